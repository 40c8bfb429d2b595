#include "transport/cuda/device_queue.h"

#if defined(REFITD_CUDA)
#include <pthread.h>
#include <sys/prctl.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/copy_kernel.h"

namespace refitd {
namespace {

// The most jobs on a device at once: enough that the upload of the next job overlaps with the
// copies of the job before, and few enough that the driver's own queue, for which issuing would
// wait, never fills.
constexpr int kMaxRunning = 16;

constexpr auto kYieldFor = std::chrono::microseconds(200);
constexpr auto kShortPause = std::chrono::microseconds(10);
constexpr auto kLongPause = std::chrono::microseconds(500);
constexpr auto kLongAfter = std::chrono::milliseconds(50);

// Memory that a hanging device may still write must stay (P6).
void KeepForever(std::shared_ptr<DeviceQueue> queue) {
  static Mutex* const mutex = new Mutex;
  static auto* const kept = new std::vector<std::shared_ptr<DeviceQueue>>;
  MutexLock lock(mutex);
  kept->push_back(std::move(queue));
}

}  // namespace

DeviceQueue::DeviceQueue(std::shared_ptr<CudaContexts> contexts, int device,
                         DeviceQueueOptions options, std::shared_ptr<LostContext> lost)
    : contexts_(std::move(contexts)),
      device_(device),
      options_(std::move(options)),
      lost_(std::move(lost)),
      memory_(std::make_shared<ScratchBuffers>(contexts_, device, ScratchBuffers::Kind::kDevice,
                                               options_.kept_device_bytes)),
      pinned_(std::make_shared<ScratchBuffers>(contexts_, device, ScratchBuffers::Kind::kPinned,
                                               options_.kept_pinned_bytes)),
      late_clock_(options_.limit) {}

// May run on a thread of the queue, if that drops the last reference.
DeviceQueue::~DeviceQueue() = default;

void DeviceQueue::Start() {
  for (const auto& pool : {memory_, pinned_}) {
    pool->OnSurplus([weak = weak_from_this()] {
      const std::shared_ptr<DeviceQueue> self = weak.lock();
      if (self == nullptr) return;
      MutexLock lock(&self->mutex_);
      self->surplus_ = true;
      self->changed_.NotifyAll();
    });
  }
  issuer_ = std::thread([self = shared_from_this()] { self->IssueAll(); });
  waiter_ = std::thread([self = shared_from_this()] { self->WaitForAll(); });
  const std::string number = std::to_string(device_);
  const auto name = [this](const std::string& otherwise, const char* suffix) {
    return options_.threads.empty() ? otherwise : options_.threads + suffix;
  };
  (void)pthread_setname_np(issuer_.native_handle(), name("refitd-gpu-" + number, "").c_str());
  (void)pthread_setname_np(waiter_.native_handle(), name("refitd-gpuw-" + number, "-w").c_str());
}

void DeviceQueue::Submit(std::shared_ptr<DeviceJob> job) {
  auto entry = std::make_shared<Entry>();
  entry->job = std::move(job);
  entry->submitted = Clock::now();
  {
    MutexLock lock(&mutex_);
    if (!stopping_) {
      entries_.push_back(std::move(entry));
      changed_.NotifyAll();
      return;
    }
  }
  entry->job->End(
      Error(absl::StatusCode::kUnavailable, "device {} is no longer served", options_.name));
}

void DeviceQueue::Close() {
  MutexLock lock(&mutex_);
  stopping_ = true;
  changed_.NotifyAll();
}

bool DeviceQueue::Stop(Clock::time_point deadline) {
  Close();
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    while (threads_ended_ < 2 && changed_.WaitUntil(&mutex_, deadline)) {
    }
    ended = threads_ended_ == 2;
  }
  if (!ended) GiveUp();
  {
    // The waiting thread polls, so it ends soon; the issuing thread may hang inside the driver.
    constexpr auto kGrace = std::chrono::seconds(1);
    const Clock::time_point last = std::max(deadline, Clock::now() + kGrace);
    MutexLock lock(&mutex_);
    while (threads_ended_ < 2 && changed_.WaitUntil(&mutex_, last)) {
    }
    ended = threads_ended_ == 2;
    // The device may hang in the middle of an entry and still write the memory that the entry
    // holds.
    if (given_up_ && !entries_.empty()) {
      KeepForever(shared_from_this());
    }
  }
  if (ended) {
    issuer_.join();
    waiter_.join();
  } else {
    issuer_.detach();
    waiter_.detach();
  }
  MutexLock lock(&mutex_);
  return ended && !given_up_;
}

void DeviceQueue::GiveUp() {
  memory_->Abandon();
  pinned_->Abandon();
  Entries begun;
  {
    MutexLock lock(&mutex_);
    given_up_ = true;
    changed_.NotifyAll();
    for (const std::shared_ptr<Entry>& entry : entries_) {
      if (entry->state != JobState::kQueued) begun.push_back(entry);
    }
  }
  absl::Status status = lost_->status();
  if (status.ok()) status = TooLate();
  for (const std::shared_ptr<Entry>& entry : begun) entry->job->Fail(status);
  EndQueued(status);
}

absl::Status DeviceQueue::TooLate() const {
  return Error(absl::StatusCode::kDeadlineExceeded, "device {} did not end its work within {} ms",
               options_.name, options_.limit.count());
}

// ---- issuing ----

void DeviceQueue::IssueAll() {
  std::shared_ptr<Entry> entry;
  while (NextToIssue(&entry)) {
    if (entry != nullptr) {
      IssueOne(entry.get());
      MutexLock lock(&mutex_);
      entry->state = JobState::kRunning;
      ++running_;
      changed_.NotifyAll();
    }
    // The entry ends on the waiter's thread, and this thread must not hold it then.
    entry = nullptr;
    memory_->Trim();
    pinned_->Trim();
  }
  Destroy();
  MutexLock lock(&mutex_);
  ++threads_ended_;
  changed_.NotifyAll();
}

bool DeviceQueue::NextToIssue(std::shared_ptr<Entry>* entry) {
  MutexLock lock(&mutex_);
  while (true) {
    if (given_up_) return false;
    if (running_ < kMaxRunning) {
      const auto queued = std::find_if(entries_.begin(), entries_.end(), [](const auto& each) {
        return each->state == JobState::kQueued;
      });
      if (queued != entries_.end()) {
        (*queued)->state = JobState::kIssuing;
        *entry = *queued;
        return true;
      }
    }
    if (stopping_ && entries_.empty()) return false;
    if (std::exchange(surplus_, false)) return true;
    changed_.Wait(&mutex_);
  }
}

void DeviceQueue::IssueOne(Entry* entry) {
  absl::Status status = lost_->status();
  if (status.ok() && entry->job->Cancelled()) status = absl::CancelledError("not begun");
  if (status.ok()) status = Begin();
  if (status.ok()) status = IssueWork(entry->job.get(), &entry->event);
  entry->issued = lost_->Note(status);
}

absl::Status DeviceQueue::Begin() {
  if (begun_) return absl::OkStatus();
  const CudaApi& api = contexts_->api();
  REFITD_ASSIGN_OR_RETURN(context_, contexts_->Get(device_));
  const ScopedContext current(api, context_);
  REFITD_RETURN_IF_ERROR(current.status());
  if (!options_.kernel.empty()) {
    if (module_ == nullptr) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuModuleLoadData, &module_, options_.kernel.data()));
    }
    for (size_t k = 0; k < kernels_.size(); ++k) {
      REFITD_RETURN_IF_ERROR(
          REFITD_CUDA_CALL(api, cuModuleGetFunction, &kernels_[k], module_, kCopyKernelNames[k]));
    }
  }
  const auto make = [&api](CUstream* stream) {
    if (*stream != nullptr) return absl::OkStatus();
    return REFITD_CUDA_CALL(api, cuStreamCreate, stream, CU_STREAM_NON_BLOCKING);
  };
  REFITD_RETURN_IF_ERROR(make(&main_));
  for (CUstream& lane : lanes_) REFITD_RETURN_IF_ERROR(make(&lane));
  if (lane_event_ == nullptr) {
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuEventCreate, &lane_event_, CU_EVENT_DISABLE_TIMING));
  }
  begun_ = true;
  return absl::OkStatus();
}

absl::Status DeviceQueue::IssueWork(DeviceJob* job, CUevent* event) {
  const CudaApi& api = contexts_->api();
  const ScopedContext current(api, context_);
  REFITD_RETURN_IF_ERROR(current.status());
  REFITD_ASSIGN_OR_RETURN(CUevent taken, TakeEvent());
  DeviceStreams streams = {.api = api, .kernels = kernels_, .main = main_, .lanes = lanes_};
  absl::Status issued = job->Issue(&streams);
  // Work issued before an error still runs, and must end before the job ends.
  absl::Status closed = CloseJob(streams, &taken);
  if (closed.ok()) {
    *event = taken;
    return issued;
  }
  // Without an event nobody learns when the device is done, so the context counts as lost.
  if (!IsLost(closed)) closed = api.Check("cuEventRecord", CUDA_ERROR_UNKNOWN);
  return closed;
}

absl::Status DeviceQueue::CloseJob(const DeviceStreams& streams, CUevent* event) {
  const CudaApi& api = contexts_->api();
  for (size_t i = 0; i < streams.lanes_used; ++i) {
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuEventRecord, lane_event_, lanes_[i]));
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamWaitEvent, main_, lane_event_, 0));
  }
  return REFITD_CUDA_CALL(api, cuEventRecord, *event, main_);
}

absl::StatusOr<CUevent> DeviceQueue::TakeEvent() {
  {
    MutexLock lock(&mutex_);
    if (!events_.empty()) {
      CUevent event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  CUevent event = nullptr;
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(contexts_->api(), cuEventCreate, &event, CU_EVENT_DISABLE_TIMING));
  return event;
}

// ---- waiting ----

void DeviceQueue::WaitForAll() {
  // Make this thread's sleeps end on time, not up to 50 us later.
  (void)prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
  while (true) {
    std::shared_ptr<Entry> first;
    bool running = false;
    {
      MutexLock lock(&mutex_);
      if (given_up_ || (stopping_ && entries_.empty())) break;
      if (entries_.empty()) {
        changed_.Wait(&mutex_);
        continue;
      }
      first = entries_.front();
      if (first->state != JobState::kRunning) {
        (void)changed_.WaitUntil(&mutex_, late_clock_.NextLook());
      }
      running = first->state == JobState::kRunning;
    }
    // Take ended jobs first: they are not late, even if this thread has not looked for long.
    if (running && TakeEnd(first.get())) continue;
    JudgeLate();
    if (running) Pause(*first);
  }
  MutexLock lock(&mutex_);
  ++threads_ended_;
  changed_.NotifyAll();
}

bool DeviceQueue::TakeEnd(Entry* first) {
  absl::Status status = first->issued;
  if (first->event != nullptr) {
    const CudaApi& api = contexts_->api();
    const ScopedContext current(api, context_);
    const CUresult result = api.cuEventQuery(first->event);
    if (result == CUDA_ERROR_NOT_READY) return false;
    const absl::Status ended = lost_->Note(api.Check("cuEventQuery", result));
    if (status.ok()) status = ended;
  }
  std::shared_ptr<Entry> entry;
  {
    MutexLock lock(&mutex_);
    // Stop may have given the device up meanwhile, and then keeps the entries.
    if (given_up_) return true;
    entry = std::move(entries_.front());
    entries_.pop_front();
    --running_;
    last_end_ = Clock::now();
    if (entry->event != nullptr) events_.push_back(entry->event);
    if (late_ && status.ok()) status = lost_->status();
    changed_.NotifyAll();
  }
  entry->job->End(status);
  return true;
}

void DeviceQueue::JudgeLate() {
  bool late = false;
  {
    MutexLock lock(&mutex_);
    late_clock_.Look();
    late = !late_ && AnyLate();
    late_ = late_ || late;
  }
  if (late) lost_->Lose(TooLate());
  const absl::Status lost = lost_->status();
  if (!lost.ok()) EndQueued(lost);
}

bool DeviceQueue::AnyLate() const {
  return std::any_of(entries_.begin(), entries_.end(), [this](const auto& entry) {
    mutex_.AssertHeld();
    return late_clock_.Late(std::max(entry->submitted, last_end_));
  });
}

// Jobs that were not begun can end at once, whatever the device does.
void DeviceQueue::EndQueued(const absl::Status& status) {
  Entries queued;
  {
    MutexLock lock(&mutex_);
    std::deque<std::shared_ptr<Entry>> others;
    for (std::shared_ptr<Entry>& entry : entries_) {
      if (entry->state == JobState::kQueued) {
        queued.push_back(std::move(entry));
      } else {
        others.push_back(std::move(entry));
      }
    }
    entries_ = std::move(others);
    if (!queued.empty()) changed_.NotifyAll();
  }
  for (const std::shared_ptr<Entry>& entry : queued) entry->job->End(status);
}

// A job may take microseconds or seconds, so it is polled often at first, then less and less often.
void DeviceQueue::Pause(const Entry& entry) const {
  const auto age = Clock::now() - entry.submitted;
  if (age < kYieldFor) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(age < kLongAfter ? kShortPause : kLongPause);
  }
}

// Called on the issuing thread when nothing runs, or when the device was given up and must be left
// as it is.
void DeviceQueue::Destroy() {
  std::vector<CUevent> events;
  {
    MutexLock lock(&mutex_);
    if (given_up_ || context_ == nullptr) return;
    events.swap(events_);
  }
  const CudaApi& api = contexts_->api();
  const ScopedContext current(api, context_);
  if (!current.status().ok()) return;
  if (lane_event_ != nullptr) events.push_back(lane_event_);
  for (CUevent event : events) (void)api.cuEventDestroy(event);
  if (main_ != nullptr) (void)api.cuStreamDestroy(main_);
  for (CUstream lane : lanes_) {
    if (lane != nullptr) (void)api.cuStreamDestroy(lane);
  }
  if (module_ != nullptr) (void)api.cuModuleUnload(module_);
}

}  // namespace refitd

#endif  // REFITD_CUDA
