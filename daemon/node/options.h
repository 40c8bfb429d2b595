// The options that a daemon is made with.
#ifndef REFITD_DAEMON_NODE_OPTIONS_H_
#define REFITD_DAEMON_NODE_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "daemon/group/group.h"
#include "daemon/group/machine.h"
#include "daemon/policy/quota.h"
#include "daemon/process/audit_log.h"
#include "daemon/process/observer.h"
#include "proto/peer_defaults.h"
#include "transport/base/ids.h"
#include "transport/device_memory.h"
#include "transport/device_wire.h"
#include "transport/host/memory.h"

namespace refitd {

// The GPUs that this daemon serves.
struct DeviceOptions {
  // Null: no GPUs are served. Otherwise the transport moves memory that this object has opened.
  std::shared_ptr<DeviceMemory> memory;
  std::string detail = "not asked for";   // versions found, or why no GPUs are served; for people
  CollectivesReport collectives;          // of the transport; meaningless without memory
  std::shared_ptr<DeviceWire> wire;       // between daemons; null: none
  std::string no_wire = "not asked for";  // why there is no wire; for people
  // The most GPUs of a group that carry its bytes over the wire (DeviceWire::OpenOn).
  size_t max_rails = kMaxRails;
};

// The value of DaemonOptions::clear_wire where certificates are missing.
inline constexpr char kNotEncrypted[] = "it has no certificates (tls)";

struct DaemonOptions {
  std::string daemon_id = "refitd";  // unique in a group; wire locks are taken in its order
  std::string advertise;             // HOST:PORT by which members name this daemon; may be empty
  GroupLimits group;
  PeerLimits peers;
  // How long the last known readiness counts after the coordinator was lost; 0: not at all.
  Duration keep_readiness = kDefaultReadiness;
  int64_t default_slot_bytes = int64_t{64} << 20;
  int default_slots = 4;
  int64_t max_pool_bytes = int64_t{16} << 30;  // staging slots of all groups, on each device
  int64_t max_region_bytes = kMaxRegionBytes;  // of one region
  // Host memory of members: of one region, and of all that is mapped, each memfd once.
  int64_t machine_bytes = MachineMemoryBytes();
  int64_t max_mapped_bytes = 4 * MachineMemoryBytes();
  // Layouts, and inline bytes of unanswered calls, of all members.
  int64_t max_held_bytes = MachineMemoryBytes() / 4;
  int64_t inline_bytes = int64_t{4} << 20;   // of one PushBucket
  int64_t message_bytes = int64_t{8} << 20;  // of any message
  // When this many groups exist, a new one replaces the group that has had no member for longest.
  int max_groups = 64;
  int max_members = 4096;  // of all groups, and of daemons that joined groups of this one
  // A group without a member is dropped after this time; never while an update runs.
  Duration group_idle = std::chrono::minutes(10);
  int max_regions_per_member = 4096;
  // The limit of all members together: a process may have 65,530 mappings by default
  // (vm.max_map_count).
  int max_regions = 16'384;
  std::string descriptor_socket;  // the socket's path, which members get in their Welcome
  DeviceOptions devices;
  // Why the data plane over host memory does not encrypt, for people; empty: it encrypts.
  std::string clear_wire = kNotEncrypted;
  // Whether the sides of arenas are compared where no tensor lies, behind each read-back too.
  bool compare_sides = false;
  DaemonObserver* observer = nullptr;  // outlives the daemon; null: none
  IdentityLimits per_identity;
  // Returns the rule of the current policy for an identity as a group's owner; thread-safe. Null:
  // no rule names the owner of any group.
  std::function<OwnerRule(const std::string& group, const std::string& identity)> owner_rule{};
  AuditLog* audit = nullptr;  // outlives the daemon; null: none
};

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_OPTIONS_H_
