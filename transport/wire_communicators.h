// The common part of all wires: a table of communicators, each with a thread and a queue of its
// own, and answers that never come inside a call. A subclass of WireCommunicator moves the bytes.
//
// This file keeps these promises of wire.h: the order (P7), deadlines that count from submission
// (P4), when a communicator is lost, and Close. The subclasses of WireCommunicator keep: an
// operation ends by its deadline, and touches no memory after that (P6).
#ifndef REFITD_TRANSPORT_WIRE_COMMUNICATORS_H_
#define REFITD_TRANSPORT_WIRE_COMMUNICATORS_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "transport/base/mutex.h"
#include "transport/wire.h"

namespace refitd {

struct WireCounters {
  std::atomic<int64_t> sent{0};
  std::atomic<int64_t> received{0};
  WireStats Get() const { return {sent.load(), received.load()}; }
};

// One item of work for a communicator's thread.
struct WireWork {
  // Present: the work is to connect to these addresses. Absent: one of the following is present.
  std::optional<std::vector<std::string>> connect;
  std::optional<WireBroadcast> broadcast;
  std::optional<WireExchange> exchange;
  Duration timeout{};
  TimePoint deadline;
  std::function<void(absl::Status)> done;
};

// Names the calling thread, and blocks signals in it and in threads that it makes, because the
// libraries that carry bytes write to sockets without MSG_NOSIGNAL.
void EnterWireThread(const std::string& name);

// One end of one communicator.
//
//   opened --Connect--> connected --failure--> lost
//      \--failure--> lost                       (every state) --Close--> closed
class WireCommunicator {
 public:
  // `totals` counts for all communicators, and must outlive this object.
  WireCommunicator(CommunicatorId id, int rank, int size, WireCounters* totals)
      : id_(id), rank_(rank), size_(size), totals_(totals) {}
  virtual ~WireCommunicator() = default;
  WireCommunicator(const WireCommunicator&) = delete;
  WireCommunicator& operator=(const WireCommunicator&) = delete;

  // Opens this end and returns its address. Called first, once.
  virtual absl::StatusOr<std::string> Open() = 0;
  // `ended` is called last, on the communicator's thread.
  void Start(const std::string& thread, std::function<void()> ended);
  void Join() { thread_.join(); }
  // Queues `work`. If the status is not OK, `work` is untouched.
  absl::Status Push(WireWork* work);
  void Close();

  CommunicatorId id() const { return id_; }
  int rank() const { return rank_; }
  int size() const { return size_; }
  WireStats Stats() const { return counters_.Get(); }
  // Returns what Wire::Uses returns for this communicator.
  std::vector<WireUse> Uses() const;
  // "open", "connecting", "connected", "lost" or "closing".
  std::string_view state() const;
  // Why the communicator was lost; OK if it was not lost.
  absl::Status failure() const;

 protected:
  // Called on the communicator's thread; must end by the work's deadline, and soon after Interrupt.
  // If it fails after setting *began, the communicator is lost.
  virtual absl::Status Connect(const WireWork& work, bool* began) = 0;
  virtual absl::Status Move(const WireWork& work, bool* began) = 0;
  // Called on the communicator's thread: Lose after the failure that lost the communicator, End at
  // the communicator's end.
  virtual void Lose() = 0;
  virtual void End() = 0;
  // Called on any thread when closing() has become true, so that waits notice it.
  virtual void Interrupt() {}

  // INVALID_ARGUMENT: a broadcast or an exchange names a rank that it may not, or a span of memory
  // is malformed.
  absl::Status CheckMove(const WireWork& work) const;
  bool closing() const;
  absl::Status Closed() const;
  void Count(int64_t sent, int64_t received);
  // Adds the bytes that an operation has sent to each rank, and the time that they took.
  void CountUses(const std::map<int, WireUse>& uses);

  const CommunicatorId id_;
  const int rank_;
  const int size_;

 private:
  void Run();
  absl::Status Do(const WireWork& work);
  absl::Status CheckMemory(const MemorySpan& memory) const;
  void Enter(std::string_view state, const absl::Status& failure = absl::OkStatus());

  WireCounters counters_;
  WireCounters* const totals_;

  mutable Mutex mutex_;
  CondVar wake_;
  std::deque<WireWork> queue_ ABSL_GUARDED_BY(mutex_);
  bool closing_ ABSL_GUARDED_BY(mutex_) = false;
  std::string_view state_ ABSL_GUARDED_BY(mutex_) = "open";
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<WireUse> uses_ ABSL_GUARDED_BY(mutex_);  // by rank; empty: nothing was counted
  std::thread thread_;
};

// A wire whose communicators are WireCommunicators. A subclass must call CloseAll in its
// destructor.
class CommunicatorWire : public Wire {
 public:
  using Done = std::function<void(absl::Status)>;

  void Connect(CommunicatorId id, std::vector<std::string> addresses, Duration timeout,
               Done done) override;
  void Submit(WireBroadcast broadcast, Done done) override;
  void Submit(WireExchange exchange, Done done) override;
  void Close(CommunicatorId id) override;
  WireStats Stats() const override { return totals_.Get(); }
  WireStats Stats(CommunicatorId id) const override;
  std::vector<WireUse> Uses(CommunicatorId id) const override;

 protected:
  // `thread` is the name of the wire's own thread, which joins the other threads and answers
  // refused operations.
  explicit CommunicatorWire(const std::string& thread);
  ~CommunicatorWire() override;

  // Does what Wire::Open does, for the communicator that `make` makes.
  absl::StatusOr<std::string> OpenCommunicator(
      CommunicatorId id, int rank, int size, const std::string& thread,
      const std::function<std::shared_ptr<WireCommunicator>()>& make);
  // Closes every communicator, and waits for the end of their threads.
  void CloseAll();
  // The open communicators, then the closed communicators whose thread has not ended.
  std::vector<std::shared_ptr<const WireCommunicator>> Communicators() const;
  WireCounters* totals() { return &totals_; }

 private:
  template <typename Operation>
  void Submit(std::optional<Operation> WireWork::*kind, Operation operation, Done done);
  void Push(CommunicatorId id, Duration timeout, WireWork work, Done done);
  std::shared_ptr<WireCommunicator> Find(CommunicatorId id) const;
  void Post(std::function<void()> call);
  void Help();

  WireCounters totals_;
  Mutex opening_;  // one Open at a time; taken before mutex_
  mutable Mutex mutex_;
  CondVar changed_;
  // A null entry: the communicator is being opened.
  std::map<CommunicatorId, std::shared_ptr<WireCommunicator>> communicators_
      ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<WireCommunicator>> closed_ ABSL_GUARDED_BY(mutex_);  // not joined yet
  std::deque<std::function<void()>> calls_ ABSL_GUARDED_BY(mutex_);  // for the helper to run
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread helper_;  // last: it uses the other members
};

}  // namespace refitd

#endif  // REFITD_TRANSPORT_WIRE_COMMUNICATORS_H_
