// Finds NCCL and loads it at run time, in an environment that the daemon has cleaned.
//
// One binary serves machines with and without NCCL; if NCCL is missing, too old or refused, the
// report says so in words. Search order:
//   1. the configured path (cuda.nccl_library): if it fails, no other place is searched;
//   2. nvidia/nccl/lib/libnccl.so.2, where Python's wheels put it, below $VIRTUAL_ENV,
//      $CONDA_PREFIX and the system's folders of Python packages, newest Python first: engines'
//      frameworks load the same file;
//   3. libnccl.so.2, as the loader finds it.
//
// NCCL reads its environment when the first communicator is made, and keeps what it read. Launchers
// of trainers and engines export variables that suit their own processes (NCCL_CUMEM_ENABLE=0,
// NCCL_ALGO, ...). In the daemon these could silently turn symmetric memory off, so
// CleanNcclEnvironment drops all but a few names. P9: NCCL's sockets check no credentials, so they
// are bound to the interface of the data plane. Multicast (NVLS) is always off, because it needs
// rights over a whole NVLink domain and is not faster for copies between few GPUs.
//
// No CUDA and no NCCL type appears here; this also builds without CUDA.
//
// Thread-safe, except CleanNcclEnvironment.
#ifndef REFITD_TRANSPORT_CUDA_NCCL_NCCL_H_
#define REFITD_TRANSPORT_CUDA_NCCL_NCCL_H_

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "transport/device_wire.h"

namespace refitd {

struct NcclApi;  // api.h

struct NcclReport {
  std::shared_ptr<const NcclApi> api;  // null: none
  std::string library;                 // the file that was loaded; empty: none
  int version = 0;                     // 10000 * major + 100 * minor + patch; 0: none
  std::string problem;                 // why there is none; empty if there is one
  // Why NCCL has no symmetric memory; empty if it has, or if there is no NCCL.
  std::string no_symmetric;
};

// The places where NCCL is searched for, in order: files that exist, then "libnccl.so.2".
// `environment` gives a variable or null; `root` is where the system's folders lie ("/" except in
// tests).
std::vector<std::string> NcclCandidates(const std::function<const char*(const char*)>& environment,
                                        const std::string& root);

// Loads `configured`, or if that is empty the first candidate that can be loaded.
NcclReport FindNccl(const std::string& configured);
NcclReport FindNcclAmong(const std::vector<std::string>& candidates);

// The changes that CleanNcclEnvironment made, as "NAME=VALUE".
struct NcclEnvironment {
  std::vector<std::string> dropped;  // not set by this daemon's operator, or overruled
  std::vector<std::string> kept;
  std::vector<std::string> set;
  // Names that the machine's own file sets. NCCL always reads this file, but the file overrules
  // nothing in `kept` and `set`.
  std::vector<std::string> machine;
};

inline constexpr std::string_view kNcclMachineFile = "/etc/nccl.conf";

// Drops every NCCL_* variable of this process but
//   NCCL_DEBUG, NCCL_DEBUG_FILE, NCCL_DEBUG_SUBSYS   what NCCL logs, and where
//   NCCL_HOSTID                                      what counts as one host
//   NCCL_IB_*                                        InfiniBand and RoCE
//   NCCL_NET, NCCL_NET_PLUGIN, NCCL_TOPO_FILE        the machine's network and its topology
// and sets
//   NCCL_CONF_FILE=/dev/null      so that no file of the user brings back a dropped variable
//   NCCL_CUMEM_ENABLE=1, NCCL_WIN_ENABLE=1           symmetric memory
//   NCCL_ENV_PLUGIN=none          so that no plugin brings one back
//   NCCL_NVLS_ENABLE=0            no multicast
//   NCCL_RAS_ENABLE=0             NCCL's own service, which listens without credentials
//   NCCL_SOCKET_IFNAME            =`interface`
//   NCCL_NET=Socket               P9: no network adapter that nobody named. Not set if an NCCL_IB_*
//                                 or NCCL_NET* is kept, or the machine's file has one
// This changes the environment, so call it before the process has threads and before NCCL is
// loaded.
NcclEnvironment CleanNcclEnvironment(
    const std::string& interface, const std::string& machine_file = std::string(kNcclMachineFile));

// Returns a text such as "2.28.9".
std::string NcclVersionText(int version);

// Returns the report as status calls show it.
CollectivesReport CollectivesOf(const NcclReport& report);

// Describes the report in one line for people: "NCCL 2.28.9 from PATH", "NCCL 2.20.5 from PATH,
// without symmetric memory: ...", or "no NCCL: ...".
std::string Describe(const NcclReport& report);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_CUDA_NCCL_NCCL_H_
