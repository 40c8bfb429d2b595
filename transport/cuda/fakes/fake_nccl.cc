// An NCCL for tests, over the fake driver, as fake_nccl.h says. Without CUDA it is empty.
// Thread-safe.
#if defined(REFITD_CUDA)
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "transport/cuda/fakes/fake_nccl_counts.h"
#include "transport/cuda/nccl/abi.h"

namespace refitd {

// The ranks that one unique id joins, all in this process. Never freed, because work that is left
// on the devices asks whether it was revoked.
struct Clique {
  std::vector<NcclCommStruct*> comms;  // by rank
  int ranks = 0;                       // as the first rank said; 0: no rank has come
  int came = 0;
  bool listens = true;                // until all ranks have come, or a rank that does not fit
  std::atomic<bool> stopped = false;  // streams of the fake driver read it too
};

struct NcclGroup;

// FakeCudaCollective has the same type.
using PutOnStream = std::function<void(CUstream_st*, bool waits)>;

struct NcclCommStruct {
  Clique* clique = nullptr;
  int rank = 0;
  int ranks = 0;
  int device = 0;
  int policy = 0;
  bool made = false;
  bool revoked = false;
  bool gone = false;
  NcclResult result = NcclResult::kSuccess;
  std::shared_ptr<NcclGroup> group;  // in progress; else null
  int polls = 0;                     // polls until its share of the group may end
};

struct NcclWindowStruct {
  NcclComm comm = nullptr;
  uint64_t data = 0;
  size_t bytes = 0;
};

enum class Kind { kInit, kWindow, kBroadcast, kAllGather, kSend, kReceive, kRevoke };

struct Task {
  Kind kind = Kind::kInit;
  NcclComm comm = nullptr;
  uint64_t send = 0;
  uint64_t receive = 0;
  size_t bytes = 0;
  int root = 0;  // or the peer
  NcclWindow* window = nullptr;
  CUstream_st* stream = nullptr;
  bool ran = false;
  PutOnStream put{};  // puts a collective that ran onto the stream
};

struct NcclGroup {
  std::vector<Task> tasks;
  bool revokes = false;
  NcclResult result = NcclResult::kSuccess;
};

}  // namespace refitd

namespace {

using namespace refitd;  // NOLINT: the whole file is the fake

struct State {
  std::mutex mutex;
  std::condition_variable unblocked;
  std::string blocked;
  std::map<std::string, std::pair<int, NcclResult>, std::less<>> faults;
  std::pair<int, NcclResult> group_fault{0, NcclResult::kSuccess};
  bool stuck = false;
  bool stuck_revokes = false;
  bool symmetric = true;
  std::map<uint64_t, std::unique_ptr<Clique>> cliques;
  uint64_t next_clique = 1;
  std::vector<std::unique_ptr<NcclCommStruct>> comms;
  std::set<NcclWindow> windows;
  std::set<std::thread::id> threads;
  FakeNcclCounts counts;
};

State& Fake() {
  static State* const state = new State;
  return *state;
}

thread_local int depth = 0;
thread_local NcclResult group_error = NcclResult::kSuccess;
thread_local std::vector<Task> tasks;

// ---- the fake driver ----

struct Driver {
  int (*current_device)() = nullptr;
  int (*stream_device)(CUstream_st*) = nullptr;
  bool (*is_vmm)(uint64_t, size_t) = nullptr;
  void (*collective)(const FakeCudaCopy*, size_t, size_t, const std::atomic<bool>*,
                     PutOnStream*) = nullptr;
};

// The fake driver in the same folder, which is loaded already.
const Driver& TheDriver() {
  static const Driver driver = [] {
    Dl_info info = {};
    (void)dladdr(reinterpret_cast<const void*>(&Fake), &info);
    std::string path = info.dli_fname;
    path = path.substr(0, path.rfind('/') + 1) + "libcuda_fake.so";
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    if (library == nullptr) std::abort();  // tests make a FakeCuda first
    Driver found;
    const auto find = [library](const char* name, auto* function) {
      *function =
          reinterpret_cast<std::remove_reference_t<decltype(*function)>>(dlsym(library, name));
      if (*function == nullptr) std::abort();
    };
    find("FakeCudaCurrentDevice", &found.current_device);
    find("FakeCudaStreamDevice", &found.stream_device);
    find("FakeCudaIsVmm", &found.is_vmm);
    find("FakeCudaCollective", &found.collective);
    return found;
  }();
  return driver;
}

// ---- calls ----

// Locks the fake for a call; `result` is not kSuccess where it fails.
struct Call {
  explicit Call(const char* name) : fake(Fake()), lock(fake.mutex) {
    fake.threads.insert(std::this_thread::get_id());
    if (fake.blocked == name) {
      ++fake.counts.blocked_calls;
      fake.unblocked.wait(lock, [this, name] { return fake.blocked != name; });
      --fake.counts.blocked_calls;
    }
    const auto it = fake.faults.find(name);
    if (it == fake.faults.end() || --it->second.first > 0) return;
    result = it->second.second;
    fake.faults.erase(it);
    if (depth > 0) group_error = result;
  }
  bool failed() const { return result != NcclResult::kSuccess; }
  State& fake;
  std::unique_lock<std::mutex> lock;
  NcclResult result = NcclResult::kSuccess;
};

// ---- what a group does when it ends ----

bool Alike(const std::vector<Task*>& of) {
  return std::all_of(of.begin(), of.end(), [&of](const Task* task) {
    return task->bytes == of[0]->bytes && task->root == of[0]->root;
  });
}

const NcclWindowStruct* WindowOf(const State& fake, NcclComm comm, uint64_t data, size_t bytes) {
  for (const NcclWindow window : fake.windows) {
    if (window->comm == comm && data >= window->data &&
        data + bytes <= window->data + window->bytes) {
      return window;
    }
  }
  return nullptr;
}

// Whether both buffers are in windows, at equal offsets on all ranks.
bool InWindows(const State& fake, const std::vector<Task*>& of) {
  uint64_t offset = 0;
  for (const Task* task : of) {
    const auto* const receive = WindowOf(fake, task->comm, task->receive, task->bytes * of.size());
    if (receive == nullptr || WindowOf(fake, task->comm, task->send, task->bytes) == nullptr) {
      return false;
    }
    if (task == of[0]) offset = task->receive - receive->data;
    if (task->receive - receive->data != offset) return false;
  }
  return true;
}

// Puts a collective onto the streams of all ranks, on each when its rank is polled. Issuing for
// several communicators at once may therefore put their collectives onto two devices in different
// orders.
void Collective(const std::vector<Task*>& of, const std::vector<FakeCudaCopy>& copies) {
  PutOnStream put;
  TheDriver().collective(copies.data(), copies.size(), of.size(), &of[0]->comm->clique->stopped,
                         &put);
  for (Task* task : of) task->put = put;
}

void Broadcast(State* fake, const std::vector<Task*>& of) {
  const Task& root = *of[static_cast<size_t>(of[0]->root)];
  std::vector<FakeCudaCopy> copies;
  copies.reserve(of.size());
  for (const Task* task : of) {
    copies.push_back(
        {root.comm->device, root.send, task->comm->device, task->receive, task->bytes});
  }
  Collective(of, copies);
  ++fake->counts.broadcasts;
}

void AllGather(State* fake, const std::vector<Task*>& of) {
  std::vector<FakeCudaCopy> copies;
  for (const Task* from : of) {
    for (const Task* to : of) {
      const uint64_t offset = static_cast<uint64_t>(from->comm->rank) * from->bytes;
      copies.push_back(
          {from->comm->device, from->send, to->comm->device, to->receive + offset, from->bytes});
    }
  }
  Collective(of, copies);
  ++fake->counts.all_gathers;
  if (!InWindows(*fake, of)) return;
  const bool engines = of[0]->comm->policy == kNcclPolicyZero;
  ++(engines ? fake->counts.engine_all_gathers : fake->counts.symmetric_all_gathers);
}

NcclResult MakeWindows(State* fake, const std::vector<Task*>& of) {
  for (const Task* task : of) {
    if (!fake->symmetric) continue;
    if (task->receive % kNcclWindowAlignment != 0) return NcclResult::kInvalidArgument;
    if (!TheDriver().is_vmm(task->receive, task->bytes)) return NcclResult::kUnhandledCudaError;
    *task->window = new NcclWindowStruct{task->comm, task->receive, task->bytes};
    fake->windows.insert(*task->window);
  }
  return NcclResult::kSuccess;
}

// Runs the tasks of one call, which are of one kind and one clique, over all the clique's ranks.
NcclResult RunTasks(State* fake, const std::vector<Task*>& of) {
  switch (of[0]->kind) {
    case Kind::kInit:
      for (const Task* task : of) task->comm->made = true;
      return NcclResult::kSuccess;
    case Kind::kWindow:
      return MakeWindows(fake, of);
    case Kind::kBroadcast:
      Broadcast(fake, of);
      return NcclResult::kSuccess;
    case Kind::kAllGather:
      AllGather(fake, of);
      return NcclResult::kSuccess;
    default:
      return NcclResult::kInternalError;
  }
}

// The tasks of that kind in a communicator's group that have not run.
std::vector<Task*> Waiting(NcclComm comm, Kind kind) {
  std::vector<Task*> waiting;
  if (comm == nullptr || comm->group == nullptr) return waiting;
  for (Task& task : comm->group->tasks) {
    if (task.comm == comm && task.kind == kind && !task.ran) waiting.push_back(&task);
  }
  return waiting;
}

// Runs a collective when all other ranks have made the same call, in whatever groups.
NcclResult RunCollective(State* fake, const Task& task) {
  std::vector<Task*> of;
  for (const NcclComm comm : task.comm->clique->comms) {
    const std::vector<Task*> waiting = Waiting(comm, task.kind);
    if (waiting.empty()) return NcclResult::kSuccess;  // it waits
    of.push_back(waiting[0]);
  }
  if (!Alike(of)) return NcclResult::kSuccess;  // for ever
  for (Task* each : of) each->ran = true;
  return RunTasks(fake, of);
}

// Runs a send when the peer has made its receive.
void RunSend(Task* send) {
  const NcclComm peer = send->comm->clique->comms[static_cast<size_t>(send->root)];
  for (Task* receive : Waiting(peer, Kind::kReceive)) {
    if (receive->root != send->comm->rank || receive->bytes != send->bytes) continue;
    send->ran = receive->ran = true;
    Collective({send, receive},
               {{send->comm->device, send->send, peer->device, receive->receive, send->bytes}});
    return;
  }
}

// Runs a group's tasks as far as the other ranks have come.
void RunGroup(State* fake, NcclGroup* group) {
  for (Task& task : group->tasks) {
    if (task.ran || group->result != NcclResult::kSuccess) continue;
    if (task.kind == Kind::kRevoke) {
      task.ran = true;
    } else if (task.kind == Kind::kSend) {
      RunSend(&task);
    } else if (task.kind == Kind::kReceive) {
      const NcclComm peer = task.comm->clique->comms[static_cast<size_t>(task.root)];
      for (Task* send : Waiting(peer, Kind::kSend)) {
        if (send->root == task.comm->rank && !task.ran) RunSend(send);
      }
    } else {
      group->result = RunCollective(fake, task);
    }
  }
}

// `group` is a copy of the pointer, because communicators drop their own pointers here.
void EndGroup(State* fake, const std::shared_ptr<NcclGroup> group) {  // NOLINT
  for (const Task& task : group->tasks) {
    if (task.comm->group != group) continue;
    task.comm->result = group->result;
    task.comm->group = nullptr;
  }
  --fake->counts.groups;
}

// Puts the part of a group that belongs to one communicator onto its streams, if all of that part
// ran.
void EndShare(State* fake, NcclComm comm) {
  const std::shared_ptr<NcclGroup> group = comm->group;
  const auto its = [comm](const Task& task) { return task.comm == comm; };
  if (std::any_of(group->tasks.begin(), group->tasks.end(),
                  [&](const Task& task) { return its(task) && !task.ran; })) {
    return;
  }
  // All of the group's operations are started before any of them waits for its peers, since sends
  // and receives of a group are under way at once.
  for (const bool waits : {false, true}) {
    for (const Task& task : group->tasks) {
      if (its(task) && task.put) task.put(task.stream, waits);
    }
  }
  comm->result = NcclResult::kSuccess;
  comm->group = nullptr;
  const bool last = std::none_of(group->tasks.begin(), group->tasks.end(),
                                 [&](const Task& task) { return task.comm->group == group; });
  if (last) --fake->counts.groups;
}

NcclResult BeginGroup(State* fake) {
  auto group = std::make_shared<NcclGroup>();
  group->tasks.swap(tasks);
  if (group->tasks.empty()) return NcclResult::kSuccess;
  group->revokes = group->tasks[0].kind == Kind::kRevoke;
  if (fake->group_fault.first > 0 && --fake->group_fault.first == 0) {
    group->result = fake->group_fault.second;
  }
  for (const Task& task : group->tasks) {
    task.comm->group = group;
    task.comm->polls = 2;
  }
  ++fake->counts.groups;
  return NcclResult::kInProgress;
}

NcclResult Add(State* fake, Task task) {
  const bool revoke = task.kind == Kind::kRevoke;
  if (task.comm->gone || (!revoke && (task.comm->group != nullptr || task.comm->revoked)) ||
      (task.kind != Kind::kInit && !revoke && !task.comm->made)) {
    return NcclResult::kInvalidUsage;
  }
  if (revoke && task.comm->group != nullptr) EndGroup(fake, task.comm->group);
  tasks.push_back(std::move(task));
  return depth > 0 ? NcclResult::kSuccess : BeginGroup(fake);
}

NcclResult AddCollective(State* fake, Task task, CUstream_st* stream) {
  if (TheDriver().stream_device(stream) != task.comm->device) return NcclResult::kInvalidArgument;
  task.stream = stream;
  return Add(fake, std::move(task));
}

NcclResult Leave(State* fake, NcclComm comm) {
  if (comm->gone) return NcclResult::kInvalidArgument;
  if (comm->group != nullptr) EndGroup(fake, comm->group);
  comm->gone = true;
  --fake->counts.comms;
  for (auto it = fake->windows.begin(); it != fake->windows.end();) {
    if ((*it)->comm != comm) {
      ++it;
      continue;
    }
    ++fake->counts.lost_windows;
    delete *it;
    it = fake->windows.erase(it);
  }
  return NcclResult::kSuccess;
}

void StopListening(State* fake, Clique* clique) {
  if (!std::exchange(clique->listens, false)) return;
  --fake->counts.listeners;
}

// Returns the clique that a new rank joins. A rank that does not fit into the clique gets a clique
// of its own, and waits for ever.
Clique* Join(State* fake, uint64_t number, int ranks) {
  Clique* const clique = fake->cliques[number].get();
  if (clique->ranks == 0) clique->ranks = ranks;
  if (!clique->listens || clique->ranks != ranks) {
    StopListening(fake, clique);
    std::unique_ptr<Clique>& alone = fake->cliques[fake->next_clique++];
    alone = std::make_unique<Clique>();
    alone->listens = false;
    alone->comms.resize(static_cast<size_t>(ranks) + 1);
    return alone.get();
  }
  clique->comms.resize(static_cast<size_t>(ranks));
  if (++clique->came == ranks) StopListening(fake, clique);
  return clique;
}

uint64_t Address(const void* data) { return reinterpret_cast<uint64_t>(data); }

}  // namespace

extern "C" {

// ---- for tests ----

void FakeNcclReset() {
  State& fake = Fake();
  const std::lock_guard lock(fake.mutex);
  fake.blocked.clear();
  fake.unblocked.notify_all();
  fake.faults.clear();
  fake.group_fault = {0, NcclResult::kSuccess};
  fake.stuck = fake.stuck_revokes = false;
  fake.symmetric = true;
  for (const NcclWindow window : fake.windows) delete window;
  fake.windows.clear();
  for (const auto& [number, clique] : fake.cliques) clique->listens = false;
  fake.threads.clear();
  const int blocked_calls = fake.counts.blocked_calls;  // blocked calls subtract themselves
  fake.counts = {};
  fake.counts.blocked_calls = blocked_calls;
}

void FakeNcclFailAt(const char* call, int nth, int result) {
  const std::lock_guard lock(Fake().mutex);
  Fake().faults[call] = {nth, static_cast<NcclResult>(result)};
}

void FakeNcclFailGroup(int nth, int result) {
  const std::lock_guard lock(Fake().mutex);
  Fake().group_fault = {nth, static_cast<NcclResult>(result)};
}

void FakeNcclStick(bool stuck, bool revokes) {
  const std::lock_guard lock(Fake().mutex);
  Fake().stuck = stuck;
  Fake().stuck_revokes = revokes;
}

void FakeNcclBlock(const char* call) {
  const std::lock_guard lock(Fake().mutex);
  Fake().blocked = call;
  Fake().unblocked.notify_all();
}

void FakeNcclSymmetric(bool possible) {
  const std::lock_guard lock(Fake().mutex);
  Fake().symmetric = possible;
}

void FakeNcclCount(FakeNcclCounts* counts) {
  const std::lock_guard lock(Fake().mutex);
  *counts = Fake().counts;
  counts->windows = static_cast<int>(Fake().windows.size());
  counts->threads = static_cast<int>(Fake().threads.size());
}

// ---- NCCL ----

// This is not a call on a communicator: the loader of the library asks for the version.
NcclResult ncclGetVersion(int* version) {
  const char* const told = std::getenv("REFITD_FAKE_NCCL_VERSION");
  *version = told != nullptr ? std::atoi(told) : 22809;
  return NcclResult::kSuccess;
}

const char* ncclGetErrorString(NcclResult result) {
  return result == NcclResult::kUnhandledCudaError ? "unhandled cuda error" : "some error";
}

const char* ncclGetLastError(NcclComm /*comm*/) { return ""; }

NcclResult ncclGetUniqueId(NcclUniqueId* id) {
  Call call("ncclGetUniqueId");
  if (call.failed()) return call.result;
  const uint64_t number = call.fake.next_clique++;
  call.fake.cliques[number] = std::make_unique<Clique>();
  ++call.fake.counts.listeners;
  std::memcpy(id->internal.data(), &number, sizeof(number));
  return NcclResult::kSuccess;
}

NcclResult ncclCommInitRankConfig(NcclComm* made, int ranks, NcclUniqueId id, int rank,
                                  NcclConfig* config) {
  Call call("ncclCommInitRankConfig");
  if (call.failed()) return call.result;
  uint64_t number = 0;
  std::memcpy(&number, id.internal.data(), sizeof(number));
  const int device = TheDriver().current_device();
  if (rank < 0 || rank >= ranks || device < 0 || config->size != sizeof(NcclConfig) ||
      config->magic != 0xcafebeef || config->blocking != 0) {
    return NcclResult::kInvalidArgument;
  }
  auto comm = std::make_unique<NcclCommStruct>();
  comm->clique = Join(&call.fake, number, ranks);
  comm->clique->comms[static_cast<size_t>(rank)] = comm.get();
  comm->rank = rank;
  comm->ranks = ranks;
  comm->device = device;
  comm->policy = config->cta_policy;
  *made = comm.get();
  call.fake.comms.push_back(std::move(comm));
  ++call.fake.counts.comms;
  return Add(&call.fake, {.kind = Kind::kInit, .comm = *made});
}

NcclResult ncclCommGetAsyncError(NcclComm comm, NcclResult* result) {
  Call call("ncclCommGetAsyncError");
  if (call.failed()) return call.result;
  if (comm->gone) return NcclResult::kInvalidArgument;
  const std::shared_ptr<NcclGroup> group = comm->group;
  const bool stuck =
      group != nullptr && (group->revokes ? call.fake.stuck_revokes : call.fake.stuck);
  if (group != nullptr && !stuck && --comm->polls <= 0) {
    if (group->result == NcclResult::kSuccess) RunGroup(&call.fake, group.get());
    if (group->result == NcclResult::kSuccess) {
      EndShare(&call.fake, comm);
    } else {
      EndGroup(&call.fake, group);
    }
  }
  *result = comm->group != nullptr ? NcclResult::kInProgress : comm->result;
  return NcclResult::kSuccess;
}

// Must not be called while a group is in progress.
NcclResult ncclCommDestroy(NcclComm comm) {
  Call call("ncclCommDestroy");
  if (call.failed()) return call.result;
  if (comm->group != nullptr || comm->result != NcclResult::kSuccess) {
    return NcclResult::kInvalidArgument;
  }
  return Leave(&call.fake, comm);
}

NcclResult ncclCommAbort(NcclComm comm) {
  Call call("ncclCommAbort");
  if (call.failed()) return call.result;
  comm->clique->stopped = true;
  ++call.fake.counts.aborts;
  return Leave(&call.fake, comm);
}

NcclResult ncclGroupStart() {
  Call call("ncclGroupStart");
  if (!call.failed()) ++depth;
  return call.result;
}

// If a call of a group failed, the group does nothing, and its communicators have that error.
NcclResult ncclGroupEnd() {
  Call call("ncclGroupEnd");
  if (depth == 0) return NcclResult::kInvalidUsage;
  if (call.failed()) group_error = call.result;
  if (--depth > 0) return group_error;
  const NcclResult error = std::exchange(group_error, NcclResult::kSuccess);
  if (error == NcclResult::kSuccess) return BeginGroup(&call.fake);
  for (const Task& task : tasks) task.comm->result = error;
  tasks.clear();
  return error;
}

NcclResult ncclBroadcast(const void* send, void* receive, size_t count, NcclDataType type, int root,
                         NcclComm comm, CUstream_st* stream) {
  Call call("ncclBroadcast");
  if (call.failed()) return call.result;
  if (type != NcclDataType::kInt8) return NcclResult::kInvalidArgument;
  return AddCollective(&call.fake,
                       {.kind = Kind::kBroadcast,
                        .comm = comm,
                        .send = Address(send),
                        .receive = Address(receive),
                        .bytes = count,
                        .root = root},
                       stream);
}

NcclResult ncclSend(const void* data, size_t count, NcclDataType type, int peer, NcclComm comm,
                    CUstream_st* stream) {
  Call call("ncclSend");
  if (call.failed()) return call.result;
  if (type != NcclDataType::kInt8 || peer < 0 || peer >= comm->ranks) {
    return NcclResult::kInvalidArgument;
  }
  return AddCollective(
      &call.fake,
      {.kind = Kind::kSend, .comm = comm, .send = Address(data), .bytes = count, .root = peer},
      stream);
}

NcclResult ncclRecv(void* data, size_t count, NcclDataType type, int peer, NcclComm comm,
                    CUstream_st* stream) {
  Call call("ncclRecv");
  if (call.failed()) return call.result;
  if (type != NcclDataType::kInt8 || peer < 0 || peer >= comm->ranks) {
    return NcclResult::kInvalidArgument;
  }
  return AddCollective(&call.fake,
                       {.kind = Kind::kReceive,
                        .comm = comm,
                        .receive = Address(data),
                        .bytes = count,
                        .root = peer},
                       stream);
}

NcclResult ncclAllGather(const void* send, void* receive, size_t send_count, NcclDataType type,
                         NcclComm comm, CUstream_st* stream) {
  Call call("ncclAllGather");
  if (call.failed()) return call.result;
  if (type != NcclDataType::kInt8) return NcclResult::kInvalidArgument;
  return AddCollective(&call.fake,
                       {.kind = Kind::kAllGather,
                        .comm = comm,
                        .send = Address(send),
                        .receive = Address(receive),
                        .bytes = send_count},
                       stream);
}

NcclResult ncclCommWindowRegister(NcclComm comm, void* data, size_t bytes, NcclWindow* window,
                                  int flags) {
  Call call("ncclCommWindowRegister");
  if (call.failed()) return call.result;
  if (flags != kNcclWindowSymmetric) return NcclResult::kInvalidArgument;
  *window = nullptr;
  return Add(&call.fake, {.kind = Kind::kWindow,
                          .comm = comm,
                          .receive = Address(data),
                          .bytes = bytes,
                          .window = window});
}

// The window must not be in use any more.
NcclResult ncclCommWindowDeregister(NcclComm comm, NcclWindow window) {
  Call call("ncclCommWindowDeregister");
  if (call.failed()) return call.result;
  if (comm->gone || call.fake.windows.erase(window) == 0 || window->comm != comm) {
    return NcclResult::kInvalidArgument;
  }
  delete window;
  return NcclResult::kSuccess;
}

NcclResult ncclCommRevoke(NcclComm comm, int flags) {
  Call call("ncclCommRevoke");
  if (call.failed()) return call.result;
  if (flags != kNcclRevokeDefault || comm->revoked) return NcclResult::kInvalidArgument;
  comm->clique->stopped = true;
  comm->revoked = true;
  ++call.fake.counts.revokes;
  if (comm->group != nullptr || comm->result != NcclResult::kSuccess) {
    ++call.fake.counts.unsafe_revokes;
  }
  return Add(&call.fake, {.kind = Kind::kRevoke, .comm = comm});
}

}  // extern "C"

#endif  // REFITD_CUDA
