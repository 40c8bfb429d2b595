#include "transport/cuda/device_queue.h"

#if defined(REFITD_CUDA)
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"
#include "transport/cuda/copy_kernel.h"

namespace refitd {
namespace {

// Jobs on a device at once: enough that the next one's upload hides behind the copies of the one
// before, few enough that the driver's own queue, at which issuing would wait, never fills.
constexpr int kMaxRunning = 16;

// Kept for reuse; more goes back to the driver.
constexpr int64_t kMaxKeptDeviceBytes = 256 << 20;
constexpr int64_t kMaxKeptPinnedBytes = 64 << 20;

constexpr auto kYieldFor = std::chrono::microseconds(200);
constexpr auto kShortPause = std::chrono::microseconds(50);
constexpr auto kLongPause = std::chrono::microseconds(500);
constexpr auto kLongAfter = std::chrono::milliseconds(50);

// What a device that hangs may still write to must stay (P6).
void KeepForever(std::shared_ptr<DeviceQueue> queue) {
  static Mutex* const mutex = new Mutex;
  static auto* const kept = new std::vector<std::shared_ptr<DeviceQueue>>;
  MutexLock lock(mutex);
  kept->push_back(std::move(queue));
}

}  // namespace

absl::Status LostContext::Note(const absl::Status& status) {
  if (!IsLost(status)) return status;
  {
    MutexLock lock(&mutex_);
    if (!status_.ok()) return status_;
    status_ = Error(absl::StatusCode::kInternal, "this process lost the use of its GPUs: {}",
                    Message(status));
  }
  if (tell_) tell_(this->status());
  return this->status();
}

absl::Status LostContext::status() const {
  MutexLock lock(&mutex_);
  return status_;
}

DeviceQueue::DeviceQueue(std::shared_ptr<CudaContexts> contexts, int device,
                         DeviceQueueOptions options, std::shared_ptr<LostContext> lost)
    : contexts_(std::move(contexts)),
      device_(device),
      options_(std::move(options)),
      lost_(std::move(lost)),
      memory_(std::make_shared<BufferPool>(contexts_, device, BufferPool::Kind::kDevice,
                                           kMaxKeptDeviceBytes)),
      pinned_(std::make_shared<BufferPool>(contexts_, device, BufferPool::Kind::kPinned,
                                           kMaxKeptPinnedBytes)) {}

// On the thread that ended last.
DeviceQueue::~DeviceQueue() = default;

void DeviceQueue::Start() {
  issuer_ = std::thread([self = shared_from_this()] { self->IssueAll(); });
  waiter_ = std::thread([self = shared_from_this()] { self->WaitForAll(); });
  const std::string number = std::to_string(device_);
  (void)pthread_setname_np(issuer_.native_handle(), ("refitd-gpu-" + number).c_str());
  (void)pthread_setname_np(waiter_.native_handle(), ("refitd-gpuw-" + number).c_str());
}

void DeviceQueue::Submit(std::shared_ptr<DeviceJob> job) {
  auto entry = std::make_shared<Entry>();
  entry->job = std::move(job);
  entry->submitted = Clock::now();
  {
    MutexLock lock(&mutex_);
    if (!given_up_) {
      entries_.push_back(std::move(entry));
      changed_.NotifyAll();
      return;
    }
  }
  const absl::Status gone =
      Error(absl::StatusCode::kUnavailable, "device {} was given up", options_.name);
  entry->job->Fail(gone);
  entry->job->End(gone);
}

void DeviceQueue::Stop(Clock::time_point deadline) {
  bool ended = false;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.NotifyAll();
    while (threads_ended_ < 2 && changed_.WaitUntil(&mutex_, deadline)) {
    }
    if (threads_ended_ < 2) {
      given_up_ = true;
      changed_.NotifyAll();
      memory_->Abandon();
      pinned_->Abandon();
    }
  }
  FailLate();
  {
    // The waiter polls, so it ends soon; the issuer may hang inside the driver.
    constexpr auto kGrace = std::chrono::seconds(1);
    const Clock::time_point last = std::max(deadline, Clock::now() + kGrace);
    MutexLock lock(&mutex_);
    while (threads_ended_ < 2 && changed_.WaitUntil(&mutex_, last)) {
    }
    ended = threads_ended_ == 2;
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
}

// ---- issuing ----

void DeviceQueue::IssueAll() {
  while (true) {
    std::shared_ptr<Entry> entry = NextToIssue();
    if (entry == nullptr) break;
    IssueOne(entry.get());
    {
      MutexLock lock(&mutex_);
      entry->state = JobState::kRunning;
      ++running_;
      changed_.NotifyAll();
    }
    entry = nullptr;  // it ends on the waiter's thread, and nothing holds it then
    memory_->Trim();
    pinned_->Trim();
  }
  Destroy();
  MutexLock lock(&mutex_);
  ++threads_ended_;
  changed_.NotifyAll();
}

std::shared_ptr<DeviceQueue::Entry> DeviceQueue::NextToIssue() {
  MutexLock lock(&mutex_);
  while (true) {
    if (given_up_) return nullptr;
    if (running_ < kMaxRunning) {
      const auto queued = std::find_if(entries_.begin(), entries_.end(), [](const auto& entry) {
        return entry->state == JobState::kQueued;
      });
      if (queued != entries_.end()) {
        (*queued)->state = JobState::kIssuing;
        return *queued;
      }
    }
    if (stopping_ && entries_.empty()) return nullptr;
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
  if (module_ == nullptr) {
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuModuleLoadData, &module_, options_.kernel.data()));
  }
  REFITD_RETURN_IF_ERROR(
      REFITD_CUDA_CALL(api, cuModuleGetFunction, &kernel_, module_, kCopyKernel));
  for (CUstream* stream : {&main_, &engine_}) {
    if (*stream != nullptr) continue;
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamCreate, stream, CU_STREAM_NON_BLOCKING));
  }
  if (engine_event_ == nullptr) {
    REFITD_RETURN_IF_ERROR(
        REFITD_CUDA_CALL(api, cuEventCreate, &engine_event_, CU_EVENT_DISABLE_TIMING));
  }
  begun_ = true;
  return absl::OkStatus();
}

absl::Status DeviceQueue::IssueWork(DeviceJob* job, CUevent* event) {
  const CudaApi& api = contexts_->api();
  const ScopedContext current(api, context_);
  REFITD_RETURN_IF_ERROR(current.status());
  REFITD_ASSIGN_OR_RETURN(CUevent taken, TakeEvent());
  DeviceStreams streams = {.api = api,
                           .kernel = kernel_,
                           .main = main_,
                           .engine = engine_,
                           .before_engine = engine_event_};
  const absl::Status issued = job->Issue(&streams);
  // What was issued before an error still runs, and has to end before the job does.
  absl::Status closed = CloseJob(streams, &taken);
  if (closed.ok()) {
    *event = taken;
    return issued;
  }
  // Nothing tells any more when the device is done.
  if (!IsLost(closed)) closed = api.Check("cuEventRecord", CUDA_ERROR_UNKNOWN);
  return closed;
}

absl::Status DeviceQueue::CloseJob(const DeviceStreams& streams, CUevent* event) {
  const CudaApi& api = contexts_->api();
  if (streams.engine_used) {
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuEventRecord, engine_event_, engine_));
    REFITD_RETURN_IF_ERROR(REFITD_CUDA_CALL(api, cuStreamWaitEvent, main_, engine_event_, 0));
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
  while (true) {
    std::shared_ptr<Entry> first;
    {
      MutexLock lock(&mutex_);
      if (given_up_ || (stopping_ && entries_.empty())) break;
      if (entries_.empty()) {
        changed_.Wait(&mutex_);
        continue;
      }
      first = entries_.front();
      if (first->state != JobState::kRunning) {
        // Until it is issued; or it is late.
        const Clock::time_point from = std::max(first->submitted, last_end_);
        (void)changed_.WaitUntil(
            &mutex_, first->failed ? Clock::now() + options_.limit : from + options_.limit);
        if (first->state != JobState::kRunning) first = nullptr;
      }
    }
    FailLate();
    if (first != nullptr && !TakeEnd(first.get())) Pause(*first);
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
    // Stop may have taken the queue over.
    if (given_up_) return true;
    entry = std::move(entries_.front());
    entries_.pop_front();
    --running_;
    last_end_ = Clock::now();
    if (entry->event != nullptr) events_.push_back(entry->event);
    changed_.NotifyAll();
  }
  entry->job->End(status);
  return true;
}

bool DeviceQueue::Late(const Entry& entry, Clock::time_point now) const {
  return given_up_ || now - std::max(entry.submitted, last_end_) > options_.limit;
}

void DeviceQueue::FailLate() {
  const absl::Status lost = lost_->status();
  Entries late;
  Entries never_begun;
  {
    MutexLock lock(&mutex_);
    const Clock::time_point now = Clock::now();
    for (const std::shared_ptr<Entry>& entry : entries_) {
      if (entry->failed || (lost.ok() && !Late(*entry, now))) continue;
      entry->failed = true;
      late.push_back(entry);
      if (entry->state == JobState::kQueued) never_begun.push_back(entry);
    }
    for (const std::shared_ptr<Entry>& entry : never_begun) {
      entries_.erase(std::find(entries_.begin(), entries_.end(), entry));
    }
    if (!never_begun.empty()) changed_.NotifyAll();
  }
  const absl::Status status = lost.ok() ? Error(absl::StatusCode::kDeadlineExceeded,
                                                "device {} did not end its work within {} ms",
                                                options_.name, options_.limit.count())
                                        : lost;
  for (const std::shared_ptr<Entry>& entry : late) entry->job->Fail(status);
  for (const std::shared_ptr<Entry>& entry : never_begun) entry->job->End(status);
}

// The device works for microseconds or for seconds: polled closely at first, then ever less.
void DeviceQueue::Pause(const Entry& entry) const {
  const auto age = Clock::now() - entry.submitted;
  if (age < kYieldFor) {
    std::this_thread::yield();
  } else {
    std::this_thread::sleep_for(age < kLongAfter ? kShortPause : kLongPause);
  }
}

// On the issuer's thread, when nothing runs, or the device is given up and left as it is.
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
  if (engine_event_ != nullptr) events.push_back(engine_event_);
  for (CUevent event : events) (void)api.cuEventDestroy(event);
  for (CUstream stream : {main_, engine_}) {
    if (stream != nullptr) (void)api.cuStreamDestroy(stream);
  }
  if (module_ != nullptr) (void)api.cuModuleUnload(module_);
}

}  // namespace refitd

#endif  // REFITD_CUDA
