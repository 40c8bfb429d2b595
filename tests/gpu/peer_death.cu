// Tries what happens to a process that copies into another process's GPU memory when one of the two
// dies in mid-copy. docs/decisions.md has the results ("No child process for the data plane").
//
//   nvcc -O2 -std=c++17 -o peer_death peer_death.cu -lcuda && ./peer_death        # two GPUs, or
//   one
//
// An exporter owns memory; an importer (the daemon's part) maps it, by legacy CUDA IPC or by a VMM
// descriptor, and copies to or from it without pause, by kernel or by copy engine. One of them gets
// SIGKILL, or the exporter frees the memory under the copy. Then: does the survivor's context still
// work, do its other mappings, is the memory given back, can it be exported anew? One line of a
// table for each combination; with an argument N, all of it N times.
//
// Each role is a process of its own that is forked before any CUDA call. Roles talk over socket
// pairs; every wait of the parent ends after kPatience, which is then the row's result ("hangs").
#include <cuda.h>
#include <cuda_runtime.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr size_t kBytes = size_t{256} << 20;
constexpr int kPatienceMs = 30'000;
constexpr int kNobody = 65534;

enum class Kind { kLegacy, kVmm };
enum class Method { kKernel, kCopyEngine };
enum class Direction { kWrite, kRead };
enum class Event { kExporterDies, kExporterFrees, kImporterDies };

struct Case {
  Kind kind;
  bool peer;  // exporter on GPU 1, importer on GPU 0
  Method method;
  Direction direction;
  Event event;
  bool other_user;  // the exporter is another user than the importer
};

const char* Name(Kind k) { return k == Kind::kLegacy ? "legacy" : "vmm"; }
const char* Name(Method m) { return m == Method::kKernel ? "kernel" : "engine"; }
const char* Name(Event e) {
  switch (e) {
    case Event::kExporterDies:
      return "exporter dies";
    case Event::kExporterFrees:
      return "exporter frees";
    default:
      return "importer dies";
  }
}
const char* Name(Direction d) { return d == Direction::kWrite ? "write" : "read"; }

[[noreturn]] void Die(const std::string& what) {
  std::fprintf(stderr, "peer_death: %s\n", what.c_str());
  _exit(3);
}
void Check(cudaError_t e, const char* what) {
  if (e != cudaSuccess) Die(std::string(what) + ": " + cudaGetErrorName(e));
}
void Check(CUresult e, const char* what) {
  if (e == CUDA_SUCCESS) return;
  const char* name = nullptr;
  cuGetErrorName(e, &name);
  Die(std::string(what) + ": " + (name == nullptr ? "?" : name));
}

// ---- messages: a length, then text; a descriptor may ride along ----

void Send(int fd, const std::string& text, int descriptor = -1) {
  const uint32_t n = static_cast<uint32_t>(text.size());
  std::string packet(reinterpret_cast<const char*>(&n), sizeof n);
  packet += text;
  iovec io{packet.data(), packet.size()};
  msghdr m{};
  m.msg_iov = &io;
  m.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    m.msg_control = control;
    m.msg_controllen = sizeof control;
    cmsghdr* c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(c), &descriptor, sizeof(int));
  }
  if (sendmsg(fd, &m, MSG_NOSIGNAL) != static_cast<ssize_t>(packet.size())) _exit(4);
}

// False: nothing came in time, or the other end is gone.
bool Receive(int fd, std::string* text, int* descriptor = nullptr, int patience = kPatienceMs) {
  pollfd p{fd, POLLIN, 0};
  if (poll(&p, 1, patience) != 1) return false;
  uint32_t n = 0;
  iovec io{&n, sizeof n};
  msghdr m{};
  m.msg_iov = &io;
  m.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  m.msg_control = control;
  m.msg_controllen = sizeof control;
  if (recvmsg(fd, &m, MSG_WAITALL) != sizeof n) return false;
  if (descriptor != nullptr) {
    *descriptor = -1;
    if (const cmsghdr* c = CMSG_FIRSTHDR(&m)) std::memcpy(descriptor, CMSG_DATA(c), sizeof(int));
  }
  text->resize(n);
  return n == 0 || recv(fd, text->data(), n, MSG_WAITALL) == static_cast<ssize_t>(n);
}
std::string Must(int fd, const char* what, int* descriptor = nullptr) {
  std::string text;
  if (!Receive(fd, &text, descriptor)) Die(std::string("no answer: ") + what);
  return text;
}

// ---- on the device ----

__global__ void Copy(uint4* to, const uint4* from, size_t n) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) to[i] = from[i];
}
__global__ void Fill(uint64_t* data, size_t n, uint64_t seed) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    data[i] = (i + seed) * 0x9e3779b97f4a7c15;
  }
}
__global__ void Differ(const uint64_t* data, size_t n, uint64_t seed, unsigned long long* count) {
  const size_t step = size_t{gridDim.x} * blockDim.x;
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += step) {
    if (data[i] != (i + seed) * 0x9e3779b97f4a7c15) atomicAdd(count, 1ULL);
  }
}

std::string Outcome(cudaError_t e) { return e == cudaSuccess ? "ok" : cudaGetErrorName(e); }

// Whether kernels run and `data` (may be null) holds what `seed` says.
std::string Health(const void* data, uint64_t seed) {
  unsigned long long* count = nullptr;
  cudaError_t e = cudaMalloc(&count, sizeof *count);
  if (e == cudaSuccess) e = cudaMemset(count, 0, sizeof *count);
  if (e == cudaSuccess && data != nullptr) {
    Differ<<<64, 256>>>(static_cast<const uint64_t*>(data), kBytes / 8, seed, count);
    e = cudaGetLastError();
  }
  unsigned long long differ = 0;
  if (e == cudaSuccess) e = cudaMemcpy(&differ, count, sizeof differ, cudaMemcpyDeviceToHost);
  if (count != nullptr) cudaFree(count);
  if (e != cudaSuccess) return cudaGetErrorName(e);
  return differ == 0 ? "ok" : std::to_string(differ) + " words differ";
}

CUmemAllocationProp Properties(int device) {
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}
void* MapVmm(CUmemGenericAllocationHandle handle, int device) {
  CUdeviceptr at = 0;
  Check(cuMemAddressReserve(&at, kBytes, 0, 0, 0), "cuMemAddressReserve");
  Check(cuMemMap(at, kBytes, 0, handle, 0), "cuMemMap");
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = device;
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  Check(cuMemSetAccess(at, kBytes, &access, 1), "cuMemSetAccess");
  return reinterpret_cast<void*>(at);
}

// ---- roles ----

// Owns memory with the bytes of `seed`. Commands: "export" -> handle; "health" and "free" -> text;
// "quit".
[[noreturn]] void Exporter(int fd, Kind kind, int device, uint64_t seed, bool other_user) {
  if (other_user && (setgid(kNobody) != 0 || setuid(kNobody) != 0)) Die("setuid");
  Check(cudaSetDevice(device), "cudaSetDevice");
  Check(cudaFree(nullptr), "context");
  void* data = nullptr;
  CUmemGenericAllocationHandle handle = 0;
  if (kind == Kind::kLegacy) {
    Check(cudaMalloc(&data, kBytes), "cudaMalloc");
  } else {
    const CUmemAllocationProp p = Properties(device);
    Check(cuMemCreate(&handle, kBytes, &p, 0), "cuMemCreate");
    data = MapVmm(handle, device);
  }
  Fill<<<64, 256>>>(static_cast<uint64_t*>(data), kBytes / 8, seed);
  Check(cudaDeviceSynchronize(), "fill");
  for (;;) {
    std::string command;
    if (!Receive(fd, &command, nullptr, -1) || command == "quit") _exit(0);
    if (command == "export" && kind == Kind::kLegacy) {
      cudaIpcMemHandle_t ipc;
      Check(cudaIpcGetMemHandle(&ipc, data), "cudaIpcGetMemHandle");
      Send(fd, std::string(reinterpret_cast<const char*>(&ipc), sizeof ipc));
    } else if (command == "export") {
      int descriptor = -1;
      Check(cuMemExportToShareableHandle(&descriptor, handle,
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
            "cuMemExportToShareableHandle");
      Send(fd, "fd", descriptor);
      close(descriptor);
    } else if (command == "free" && kind == Kind::kLegacy) {
      Send(fd, Outcome(cudaFree(data)));
    } else if (command == "free") {
      const auto at = reinterpret_cast<CUdeviceptr>(data);
      const bool freed = cuMemUnmap(at, kBytes) == CUDA_SUCCESS &&
                         cuMemRelease(handle) == CUDA_SUCCESS &&
                         cuMemAddressFree(at, kBytes) == CUDA_SUCCESS;
      Send(fd, freed ? "ok" : "fails");
    } else {
      Send(fd, Health(data, seed));
    }
  }
}

struct Mapping {
  void* data = nullptr;
  CUmemGenericAllocationHandle handle = 0;
};
Mapping Import(Kind kind, int device, const std::string& text, int descriptor) {
  Mapping m;
  if (kind == Kind::kLegacy) {
    cudaIpcMemHandle_t ipc;
    std::memcpy(&ipc, text.data(), sizeof ipc);
    Check(cudaIpcOpenMemHandle(&m.data, ipc, cudaIpcMemLazyEnablePeerAccess),
          "cudaIpcOpenMemHandle");
  } else {
    Check(cuMemImportFromShareableHandle(&m.handle,
                                         reinterpret_cast<void*>(static_cast<intptr_t>(descriptor)),
                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
          "cuMemImportFromShareableHandle");
    close(descriptor);
    m.data = MapVmm(m.handle, device);
  }
  return m;
}
std::string Unmap(Kind kind, Mapping m) {
  if (kind == Kind::kLegacy) return Outcome(cudaIpcCloseMemHandle(m.data));
  const auto at = reinterpret_cast<CUdeviceptr>(m.data);
  if (cuMemUnmap(at, kBytes) != CUDA_SUCCESS) return "cuMemUnmap fails";
  if (cuMemRelease(m.handle) != CUDA_SUCCESS) return "cuMemRelease fails";
  return cuMemAddressFree(at, kBytes) == CUDA_SUCCESS ? "ok" : "cuMemAddressFree fails";
}
double FreeGiB(int device, int back_to) {
  size_t free = 0;
  size_t total = 0;
  if (cudaSetDevice(device) != cudaSuccess) return -1;
  const bool ok = cudaMemGetInfo(&free, &total) == cudaSuccess;
  cudaSetDevice(back_to);
  return ok ? static_cast<double>(free) / (1 << 30) : -1;
}

// Maps two exporters' memory and copies to or from the first without pause from "start" to "stop".
[[noreturn]] void Importer(int fd, const Case& c, int exporter_device) {
  constexpr int kDevice = 0;
  Check(cudaSetDevice(kDevice), "cudaSetDevice");
  Check(cudaFree(nullptr), "context");
  Mapping mapped[2];
  for (Mapping& m : mapped) {
    int descriptor = -1;
    const std::string text = Must(fd, "a handle", &descriptor);
    m = Import(c.kind, kDevice, text, descriptor);
  }
  void* own = nullptr;
  Check(cudaMalloc(&own, kBytes), "cudaMalloc");
  Fill<<<64, 256>>>(static_cast<uint64_t*>(own), kBytes / 8, 7);
  Check(cudaDeviceSynchronize(), "fill");
  cudaStream_t stream;
  Check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  const auto copy = [&](void* other) {
    void* const to = c.direction == Direction::kWrite ? other : own;
    const void* const from = c.direction == Direction::kWrite ? own : other;
    if (c.method == Method::kCopyEngine) {
      return cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDeviceToDevice, stream);
    }
    Copy<<<64, 512, 0, stream>>>(static_cast<uint4*>(to), static_cast<const uint4*>(from),
                                 kBytes / sizeof(uint4));
    return cudaGetLastError();
  };
  Send(fd, "mapped");
  if (Must(fd, "start") != "start") Die("start");
  cudaError_t e = cudaSuccess;
  int64_t copies = 0;
  bool told = false;
  // At most eight copies ahead: the stream is never idle, and ends soon.
  for (bool stop = false; !stop && e == cudaSuccess;) {
    for (int i = 0; i < 8 && e == cudaSuccess; ++i, ++copies) e = copy(mapped[0].data);
    if (!told) Send(fd, "copying");
    told = true;
    if (e == cudaSuccess) e = cudaStreamSynchronize(stream);
    pollfd p{fd, POLLIN, 0};
    stop = poll(&p, 1, 0) == 1;
  }
  (void)Must(fd, "stop");
  const std::string copied = Outcome(e);
  const double before = FreeGiB(exporter_device, kDevice);
  const std::string closed = Unmap(c.kind, mapped[0]);
  const double after = FreeGiB(exporter_device, kDevice);
  const std::string context = Health(nullptr, 0);
  std::string second = Outcome(cudaMemcpy(own, mapped[1].data, kBytes, cudaMemcpyDeviceToDevice));
  if (second == "ok") second = Health(own, 2);
  char line[512];
  std::snprintf(line, sizeof line, "copies=%s context=%s second=%s unmap=%s freed=%.2f",
                copied.c_str(), context.c_str(), second.c_str(), closed.c_str(), after - before);
  Send(fd, line);
  _exit(0);
}

// ---- the parent ----

struct Child {
  pid_t pid = -1;
  int fd = -1;
};
// Runs `role` in a child process, which it ends itself.
template <typename Role>
Child Start(Role role) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0) Die("socketpair");
  const pid_t pid = fork();
  if (pid < 0) Die("fork");
  if (pid == 0) {
    close(ends[0]);
    role(ends[1]);
  }
  close(ends[1]);
  return {pid, ends[0]};
}
void Stop(Child* child) {
  if (child->pid < 0) return;
  kill(child->pid, SIGKILL);
  waitpid(child->pid, nullptr, 0);
  close(child->fd);
  child->pid = -1;
}
bool PassHandle(Child* exporter, Child* importer) {
  Send(exporter->fd, "export");
  std::string handle;
  int descriptor = -1;
  if (!Receive(exporter->fd, &handle, &descriptor)) return false;
  Send(importer->fd, handle, descriptor);
  if (descriptor >= 0) close(descriptor);
  return true;
}

std::string Run(const Case& c, int devices) {
  const int exporter_device = c.peer && devices > 1 ? 1 : 0;
  Child first = Start([&](int fd) { Exporter(fd, c.kind, exporter_device, 1, c.other_user); });
  Child second = Start([&](int fd) { Exporter(fd, c.kind, exporter_device, 2, c.other_user); });
  Child importer = Start([&](int fd) { Importer(fd, c, exporter_device); });
  Child again;
  std::string result;
  const auto ask = [&](Child* child, const char* command) {
    Send(child->fd, command);
    std::string text;
    return Receive(child->fd, &text) ? text : std::string("hangs");
  };
  std::string text;
  if (!PassHandle(&first, &importer) || !PassHandle(&second, &importer) ||
      !Receive(importer.fd, &text) || text != "mapped") {
    result = "cannot be mapped";
  } else if (ask(&importer, "start") != "copying") {
    result = "does not start";
  } else {
    usleep(300'000);
    if (c.event != Event::kImporterDies) {
      if (c.event == Event::kExporterDies) {
        kill(first.pid, SIGKILL);
        waitpid(first.pid, nullptr, 0);
      } else {
        result = "free=" + ask(&first, "free") + " ";
      }
      usleep(500'000);
      result += ask(&importer, "stop") + " other_exporter=" + ask(&second, "health");
    } else {
      kill(importer.pid, SIGKILL);
      waitpid(importer.pid, nullptr, 0);
      // The first exporter's memory was written over and may be torn; the second exporter's was
      // only mapped.
      const std::string context = ask(&first, "health");
      result = "exporter=" + (context.find("differ") != std::string::npos ? "ok" : context) +
               " second=" + ask(&second, "health");
      again = Start([&](int fd) { Importer(fd, c, exporter_device); });
      if (PassHandle(&first, &again) && PassHandle(&second, &again) && Receive(again.fd, &text) &&
          ask(&again, "start") == "copying") {
        usleep(100'000);
        result += " again: " + ask(&again, "stop");
      } else {
        result += " again: cannot be mapped";
      }
    }
  }
  for (Child* child : {&first, &second, &importer, &again}) Stop(child);
  return result;
}

// Asks in a child, because the parent forks and so must never use CUDA.
int Devices() {
  int ends[2];
  if (pipe(ends) != 0) Die("pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    int n = 0;
    if (cudaGetDeviceCount(&n) != cudaSuccess) n = 0;
    (void)!write(ends[1], &n, sizeof n);
    _exit(0);
  }
  int n = 0;
  (void)!read(ends[0], &n, sizeof n);
  waitpid(pid, nullptr, 0);
  return n;
}

}  // namespace

int main(int argc, char** argv) {
  signal(SIGPIPE, SIG_IGN);
  const int devices = Devices();
  if (devices == 0) {
    std::printf("SKIPPED: no GPU\n");
    return 0;
  }
  std::vector<Case> cases;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  for (const Event event : {Event::kExporterFrees, Event::kExporterDies, Event::kImporterDies}) {
    for (const Kind kind : {Kind::kLegacy, Kind::kVmm}) {
      for (const bool peer : {false, true}) {
        if (peer && devices < 2) continue;
        for (const Method method : {Method::kKernel, Method::kCopyEngine}) {
          for (const Direction direction : {Direction::kWrite, Direction::kRead}) {
            cases.push_back({kind, peer, method, direction, event, false});
          }
        }
        cases.push_back({kind, peer, Method::kKernel, Direction::kWrite, event, true});
      }
    }
  }
  for (size_t i = 0; i < cases.size() * static_cast<size_t>(rounds); ++i) {
    const Case& c = cases[i % cases.size()];
    std::printf("%-14s, %-6s %-4s %-6s %-5s %-10s | ", Name(c.event), Name(c.kind),
                c.peer ? "peer" : "same", Name(c.method), Name(c.direction),
                c.other_user ? "other user" : "");
    std::fflush(stdout);
    std::printf("%s\n", Run(c, devices).c_str());
    std::fflush(stdout);
  }
  return 0;
}
