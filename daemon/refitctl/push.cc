// push: installs a checkpoint folder's tensors, as a trainer of one rank.
//
// If all engines of the group are registered and memory allows, the whole checkpoint is read before
// any engine pauses, and moved by one compiled refit. Otherwise it is pushed in buckets of bounded
// memory: while the daemon copies one, the next is read from the files.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <thread>

#include "client/trainer.h"
#include "daemon/process/flag_text.h"
#include "daemon/refitctl/command.h"
#include "daemon/refitctl/format.h"
#include "daemon/refitctl/placement.h"
#include "daemon/refitctl/render.h"
#include "daemon/refitctl/safetensors.h"
#include "proto/delivery.h"
#include "transport/base/failure.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/broadcast_method.h"

namespace refitd::refitctl {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Buffers for buckets: one is read, one is copied, one is between them.
constexpr int kBuffers = 3;
constexpr int64_t kRegionBucketBytes = 64 << 20;
constexpr int64_t kInlineBucketBytes = 1 << 20;  // within gRPC's usual limit of 4 MiB a message
constexpr int64_t kRefitRegionBytes = int64_t{1} << 30;  // a larger tensor gets a region of its own
constexpr int64_t kProgressIntervalMs = 200;
constexpr milliseconds kPollInterval{50};  // while waiting for instances
// A bucket is answered within the update's time; this limit only bounds a bug (P4).
constexpr std::chrono::hours kLongestUpdate{24};

struct PushOptions {
  std::string folder;
  std::string group;
  int64_t version = 0;       // 0: the group's next
  milliseconds duration{0};  // 0: the daemon's
  std::string verification;
  std::string broadcast;
  uint64_t bucket_bytes = 0;
  bool evict_late = false;
  int wait_instances = 0;
  milliseconds wait{60'000};
  bool create = false;
  int instances = 1;
  bool encrypted_data = false;
  bool push = false;  // push in buckets even if a compiled refit is possible
  std::string mode;   // --mode, the source of pushed buckets; empty: a region
  bool progress = false;
  std::string coordinator;
};

// Shows the progress of the push on stderr: by a bar on a terminal, else by a line for every tenth
// of the bytes.
class Progress {
 public:
  Progress(bool on, std::string label, int64_t total)
      : label_(std::move(label)), total_(total), start_(Clock::now()) {
    if (!on) return;
    on_ = true;
    if (const auto terminal = TerminalSizeOf(STDERR_FILENO)) block_.emplace(terminal->columns);
  }
  void Show(int64_t bytes) {
    if (!on_) return;
    meter_.Add(std::chrono::duration<double>(Clock::now() - start_).count(), bytes);
    const std::string line = ProgressLine(label_, bytes, total_, meter_);
    if (block_) {
      fmt::print(stderr, "{}", block_->Redraw({}, {line}));
      return;
    }
    const int tenth = static_cast<int>(Fraction(bytes, total_).value_or(0) * 10);
    if (tenth <= shown_tenth_) return;
    shown_tenth_ = tenth;
    PrintLine(line);
  }

 private:
  bool on_ = false;
  const std::string label_;
  const int64_t total_;
  const Clock::time_point start_;
  ProgressMeter meter_;
  std::optional<LiveBlock> block_;
  int shown_tenth_ = 0;
};

// Results that callbacks of buckets report to the pushing thread. Callbacks share its ownership, so
// it outlives them. Thread-safe.
class InFlight {
 public:
  explicit InFlight(int buffers) : free_(static_cast<size_t>(buffers), true) {}

  // Waits for a buffer that no bucket uses; returns its index, or the first error of a bucket.
  absl::StatusOr<int> Acquire() {
    const auto deadline = Clock::now() + kLongestUpdate;
    MutexLock lock(&mutex_);
    while (true) {
      if (!status_.ok()) return status_;
      const auto free = std::find(free_.begin(), free_.end(), true);
      if (free != free_.end()) {
        *free = false;
        return static_cast<int>(free - free_.begin());
      }
      if (!changed_.WaitUntil(&mutex_, deadline)) {
        return absl::DeadlineExceededError("no bucket was answered");
      }
    }
  }
  void Done(int buffer, int64_t bytes, const absl::Status& status) {
    MutexLock lock(&mutex_);
    free_[static_cast<size_t>(buffer)] = true;
    if (status.ok()) {
      bytes_done_ += bytes;
    } else if (status_.ok()) {
      status_ = status;
    }
    changed_.NotifyAll();
  }
  int64_t bytes_done() {
    MutexLock lock(&mutex_);
    return bytes_done_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  std::vector<bool> free_ ABSL_GUARDED_BY(mutex_);
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  int64_t bytes_done_ ABSL_GUARDED_BY(mutex_) = 0;
};

absl::Status ReadBucket(const Checkpoint& checkpoint, const PackedBucket& packed, char* to) {
  for (size_t i = 0; i < packed.ranges.size(); ++i) {
    const TensorRange& range = packed.ranges[i];
    const int64_t element = ElementBytes(checkpoint.tensors()[range.tensor].dtype);
    REFITD_RETURN_IF_ERROR(
        checkpoint.Read(range.tensor, range.start * element,
                        {to + packed.byte_offsets[i], static_cast<size_t>(range.count * element)}));
  }
  return absl::OkStatus();
}

// The bucket's metadata; the caller still sets its source.
client::Bucket Describe(const Checkpoint& checkpoint, const PackedBucket& packed) {
  client::Bucket bucket;
  bucket.packed = true;
  bucket.byte_offsets = packed.byte_offsets;
  for (size_t i = 0; i < packed.ranges.size(); ++i) {
    TensorRange range = packed.ranges[i];
    bucket.tensors.push_back(checkpoint.tensors()[range.tensor]);
    range.tensor = static_cast<uint32_t>(i);
    bucket.ranges.push_back(range);
  }
  return bucket;
}

// Pushes the buckets of one update. Used by one thread.
class Pusher {
 public:
  Pusher(const Checkpoint& checkpoint, client::Trainer& trainer, client::Update& update,
         Progress& progress)
      : checkpoint_(checkpoint), trainer_(trainer), update_(update), progress_(progress) {}

  absl::Status Push(const std::string& mode, int64_t bucket_bytes) {
    if (mode == "slot") return PushBySlot(bucket_bytes);
    if (mode == "inline") return PushInline(bucket_bytes > 0 ? bucket_bytes : kInlineBucketBytes);
    return PushByRegion(bucket_bytes > 0 ? bucket_bytes : kRegionBucketBytes);
  }
  int64_t buckets() const { return buckets_; }

 private:
  std::vector<PackedBucket> Form(int64_t bucket_bytes) const {
    std::vector<TensorRange> whole;
    for (size_t i = 0; i < checkpoint_.tensors().size(); ++i) {
      const int64_t element = ElementBytes(checkpoint_.tensors()[i].dtype);
      whole.push_back({static_cast<uint32_t>(i), 0, checkpoint_.bytes(i) / element});
    }
    return FormBuckets(checkpoint_.tensors(), whole, bucket_bytes);
  }

  static int64_t Largest(const std::vector<PackedBucket>& buckets) {
    int64_t largest = kPackAlignment;
    for (const PackedBucket& bucket : buckets) largest = std::max(largest, bucket.bytes);
    return AlignUp(largest);
  }

  void Submit(client::Bucket bucket, int buffer, int64_t bytes) {
    ++buckets_;
    update_.PushAsync(std::move(bucket),
                      [in_flight = in_flight_, buffer, bytes](const absl::Status& status) {
                        in_flight->Done(buffer, bytes, status);
                      });
    progress_.Show(in_flight_->bytes_done());
  }

  absl::Status PushByRegion(int64_t bucket_bytes) {
    const std::vector<PackedBucket> buckets = Form(bucket_bytes);
    const int64_t buffer_bytes = Largest(buckets);
    REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<client::Region> region,
                            trainer_.NewRegion(kBuffers * buffer_bytes));
    for (const PackedBucket& packed : buckets) {
      REFITD_ASSIGN_OR_RETURN(const int buffer, in_flight_->Acquire());
      const int64_t offset = buffer * buffer_bytes;
      REFITD_RETURN_IF_ERROR(ReadBucket(checkpoint_, packed, region->data() + offset));
      client::Bucket bucket = Describe(checkpoint_, packed);
      bucket.region = region;
      bucket.region_offsets = {offset};
      Submit(std::move(bucket), buffer, packed.bytes);
    }
    return Flush();
  }

  absl::Status PushBySlot(int64_t bucket_bytes) {
    if (update_.leasable_slots() == 0) {
      return absl::FailedPreconditionError("the group has too few slots to lease one");
    }
    REFITD_ASSIGN_OR_RETURN(auto slot, update_.LeaseSlot());
    bucket_bytes = bucket_bytes > 0 ? std::min(bucket_bytes, slot->bytes()) : slot->bytes();
    for (const PackedBucket& packed : Form(bucket_bytes)) {
      REFITD_ASSIGN_OR_RETURN(const int buffer, in_flight_->Acquire());
      if (slot == nullptr) {
        REFITD_ASSIGN_OR_RETURN(slot, update_.LeaseSlot());
      }
      REFITD_RETURN_IF_ERROR(ReadBucket(checkpoint_, packed, slot->data()));
      client::Bucket bucket = Describe(checkpoint_, packed);
      bucket.slot = std::move(slot);
      Submit(std::move(bucket), buffer, packed.bytes);
    }
    return Flush();
  }

  absl::Status PushInline(int64_t bucket_bytes) {
    const std::vector<PackedBucket> buckets = Form(bucket_bytes);
    std::vector<char> bytes(static_cast<size_t>(Largest(buckets)));
    for (const PackedBucket& packed : buckets) {
      REFITD_ASSIGN_OR_RETURN(const int buffer, in_flight_->Acquire());
      REFITD_RETURN_IF_ERROR(ReadBucket(checkpoint_, packed, bytes.data()));
      client::Bucket bucket = Describe(checkpoint_, packed);
      bucket.bytes = {std::span<const char>(bytes.data(), static_cast<size_t>(packed.bytes))};
      Submit(std::move(bucket), buffer, packed.bytes);
    }
    return Flush();
  }

  absl::Status Flush() {
    const absl::Status status = update_.Flush();
    progress_.Show(in_flight_->bytes_done());
    return status;
  }

  const Checkpoint& checkpoint_;
  client::Trainer& trainer_;
  client::Update& update_;
  Progress& progress_;
  const std::shared_ptr<InFlight> in_flight_ = std::make_shared<InFlight>(kBuffers);
  int64_t buckets_ = 0;
};

// ---- a compiled refit ----

// Memory that may still be allocated on this machine and in this control group.
int64_t AvailableBytes() {
  int64_t available = std::numeric_limits<int64_t>::max();
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    long long kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %lld kB", &kib) == 1) available = kib * 1024;
  }
  std::ifstream limit("/sys/fs/cgroup/memory.max");
  std::ifstream current("/sys/fs/cgroup/memory.current");
  int64_t most = 0;
  int64_t taken = 0;
  if (limit >> most && current >> taken) available = std::min(available, most - taken);
  return available;
}

// Why the checkpoint must be pushed; empty: it can be refitted.
std::string WhyPush(const v1::GroupStatus& group, const v1::ListMembersResponse& members,
                    int64_t bytes) {
  if (!group.coordinator().empty()) {
    return fmt::format("the group's engines are known at {} only", group.coordinator());
  }
  int engines = 0;
  for (const v1::MemberStatus& member : members.members()) {
    if (member.role() != "engine") continue;
    ++engines;
    const std::optional<DeliveryMode> delivery = DeliveryOf(member.delivery());
    if (delivery.has_value() && NeedsLayout(*delivery)) continue;
    return fmt::format("engine {} rank {} takes {} delivery", member.instance(), member.rank(),
                       member.delivery());
  }
  const int complete = CompleteInstances(group);
  if (engines == 0 || complete < std::max(1, group.spec().min_instances())) {
    return fmt::format("{} complete instances are attached", complete);
  }
  const int64_t available = AvailableBytes();
  if (bytes <= available / 2) return "";
  return fmt::format("{} do not fit well into {} of memory", HumanBytes(bytes),
                     HumanBytes(available));
}

absl::StatusOr<std::string> WhyPush(const GlobalOptions& global, const PushOptions& options,
                                    const Checkpoint& checkpoint) {
  if (options.push) return "--push";
  if (!options.mode.empty()) return "--mode";
  if (options.bucket_bytes > 0) return "--bucket-bytes";
  if (!options.broadcast.empty()) return "--broadcast";
  const OperatorClient client(global);
  REFITD_ASSIGN_OR_RETURN(const v1::GetGroupResponse group,
                          client.Call(&Rpcs::GetGroup, options.group));
  REFITD_ASSIGN_OR_RETURN(const v1::ListMembersResponse members,
                          client.Call(&Rpcs::ListMembers, options.group));
  return WhyPush(group.group(), members, checkpoint.bytes());
}

// Shows the progress that the daemon reports for an update. It does so on a thread of its own,
// which ends with the object.
class Follower {
 public:
  Follower(const GlobalOptions& global, const std::string& group, Version version,
           Progress* progress)
      : client_(global) {
    v1::WatchUpdatesRequest request;
    request.set_group(group);
    request.set_interval_ms(kProgressIntervalMs);
    reader_ = client_.stub().WatchUpdates(&context_, request);
    thread_ = std::thread([this, version, progress] {
      v1::UpdateStatus update;
      while (reader_->Read(&update)) {
        if (update.version() == version.value()) progress->Show(update.bytes());
      }
      (void)reader_->Finish();
    });
  }
  ~Follower() {
    context_.TryCancel();
    thread_.join();
  }
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

 private:
  const OperatorClient client_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::UpdateStatus>> reader_;
  std::thread thread_;
};

// Reads the whole checkpoint into regions and registers them. The regions must live until the refit
// has ended.
absl::StatusOr<std::vector<std::shared_ptr<client::Region>>> RegisterWhole(
    const Checkpoint& checkpoint, client::Trainer& trainer, Progress& progress) {
  const Placement placement = PlaceWhole(checkpoint.tensors(), kRefitRegionBytes);
  std::vector<std::shared_ptr<client::Region>> regions;
  std::vector<RegionId> ids;
  for (const int64_t bytes : placement.region_bytes) {
    REFITD_ASSIGN_OR_RETURN(regions.emplace_back(), trainer.NewRegion(bytes));
    ids.push_back(regions.back()->id());
  }
  int64_t read = 0;
  for (size_t i = 0; i < placement.places.size(); ++i) {
    const Placement::Place& place = placement.places[i];
    REFITD_RETURN_IF_ERROR(checkpoint.Read(
        i, 0,
        {regions[place.region]->data() + place.byte_offset, static_cast<size_t>(place.bytes)}));
    read += place.bytes;
    progress.Show(read);
  }
  REFITD_RETURN_IF_ERROR(trainer.Register(LayoutOf(checkpoint.tensors(), placement, ids)));
  return regions;
}

absl::StatusOr<client::CommitResult> RefitWhole(const GlobalOptions& global,
                                                const PushOptions& options,
                                                const Checkpoint& checkpoint,
                                                client::Trainer& trainer,
                                                const client::RefitOptions& refit) {
  const std::string label = fmt::format("{} v{}", options.group, refit.version);
  Progress reading(options.progress, label + " reading", checkpoint.bytes());
  REFITD_ASSIGN_OR_RETURN(const auto regions, RegisterWhole(checkpoint, trainer, reading));
  Progress progress(options.progress, label, checkpoint.bytes());
  std::optional<Follower> follower;
  if (options.progress) follower.emplace(global, options.group, refit.version, &progress);
  return trainer.Refit(refit);
}

absl::Status WaitForInstances(const GlobalOptions& global, const PushOptions& options) {
  if (options.wait_instances == 0) return absl::OkStatus();
  const OperatorClient client(global);
  const auto deadline = Clock::now() + options.wait;
  int complete = 0;
  while (true) {
    const auto group = client.Call(&Rpcs::GetGroup, options.group);
    if (!group.ok() && group.status().code() != absl::StatusCode::kNotFound) return group.status();
    if (group.ok()) complete = CompleteInstances(group->group());
    if (complete >= options.wait_instances) return absl::OkStatus();
    if (Clock::now() + kPollInterval > deadline) {
      return Error(absl::StatusCode::kDeadlineExceeded,
                   "group {}: {} of {} instances are complete after {} (--wait)", options.group,
                   complete, options.wait_instances, FormatDuration(options.wait));
    }
    std::this_thread::sleep_for(kPollInterval);
  }
}

client::TrainerOptions AttachOptions(const GlobalOptions& global, const PushOptions& options) {
  client::TrainerOptions attach;
  attach.connect = ConnectOf(global);
  attach.connect.group = options.group;
  attach.connect.client = "refitctl push";
  attach.connect.coordinator = options.coordinator;
  if (options.create) {
    attach.connect.spec.emplace().min_instances = options.instances;
    attach.connect.spec->encrypted_data = options.encrypted_data;
  }
  return attach;
}

std::optional<Verification> VerificationOf(const std::string& word) {
  if (word == "off") return Verification::kOff;
  if (word == "transfer") return Verification::kTransfer;
  if (word == "readback") return Verification::kReadback;
  return std::nullopt;
}

BroadcastMethod BroadcastOf(const std::string& word) {
  const auto* const found =
      std::find(kBroadcastMethodNames.begin(), kBroadcastMethodNames.end(), word);
  if (found == kBroadcastMethodNames.end()) return BroadcastMethod::kAuto;
  return static_cast<BroadcastMethod>(found - kBroadcastMethodNames.begin());
}

client::BeginOptions BeginOf(const PushOptions& options, const Checkpoint& checkpoint,
                             Version version) {
  client::BeginOptions begin;
  begin.version = version;
  begin.duration = options.duration;
  begin.verification = VerificationOf(options.verification);
  begin.evict_late = options.evict_late;
  begin.broadcast = BroadcastOf(options.broadcast);
  begin.tensor_count = static_cast<int64_t>(checkpoint.tensors().size());
  begin.total_bytes = checkpoint.bytes();
  return begin;
}

struct Summary {
  client::CommitResult result;
  int64_t tensors = 0;
  int64_t bytes = 0;
  int64_t buckets = 0;      // of a push
  bool refitted = false;    // moved by one compiled refit; else pushed
  double wall_seconds = 0;  // with reading the files and waiting for engines
};

std::string AsJson(const Summary& summary, const std::string& group) {
  nlohmann::json instances = nlohmann::json::array();
  for (const auto& outcome : summary.result.instances) {
    instances.push_back({{"instance", outcome.instance},
                         {"committed", outcome.committed},
                         {"reason", outcome.reason}});
  }
  nlohmann::json pushed = nlohmann::json::object();  // bytes by method
  for (const client::BroadcastTotals& totals : summary.result.pushed) {
    pushed[std::string(BroadcastMethodName(totals.method))] = totals.bytes;
  }
  const nlohmann::json json = {{"group", group},
                               {"version", summary.result.version.value()},
                               {"tensors", summary.tensors},
                               {"bytes", summary.bytes},
                               {"way", summary.refitted ? "refit" : "push"},
                               {"buckets", summary.buckets},
                               {"pushed", pushed},
                               {"seconds", summary.result.seconds},
                               {"wall_seconds", summary.wall_seconds},
                               {"instances", instances}};
  return json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
}

std::string AsText(const Summary& summary, const std::string& group) {
  const double seconds = summary.result.seconds;
  std::string text =
      fmt::format("{} v{} committed: {} tensors, {} {}, {} ({}); {} in all\n", group,
                  summary.result.version, summary.tensors, HumanBytes(summary.bytes),
                  summary.refitted ? "by refit" : fmt::format("in {} buckets", summary.buckets),
                  HumanSeconds(seconds),
                  HumanRate(seconds > 0 ? static_cast<double>(summary.bytes) / seconds : 0),
                  HumanSeconds(summary.wall_seconds));
  Table table({"INSTANCE", "OUTCOME", "REASON"});
  for (const auto& outcome : summary.result.instances) {
    table.Add({outcome.instance, outcome.committed ? "committed" : "evicted",
               outcome.reason.empty() ? "-" : outcome.reason});
  }
  return text + table.ToString();
}

struct Pushed {
  client::CommitResult result;
  int64_t buckets = 0;
};

// Gives the update up for `failure`. The result also says how the update left the engines' weights,
// if the daemon says so.
absl::Status GivenUp(client::Update& update, const absl::Status& failure) {
  const std::string reason = Message(failure);
  update.Abort(std::string(Shorten(reason, 256))).IgnoreError();  // the update may be over by now
  const absl::Status lost = update.Lost();
  if (absl::IsAborted(failure) || !absl::IsAborted(lost)) return failure;
  return WithFailureOf(lost, Error(failure.code(), "{}; {}", reason, Message(lost)));
}

absl::StatusOr<Pushed> PushInBuckets(const PushOptions& options, const Checkpoint& checkpoint,
                                     client::Trainer& trainer, const client::BeginOptions& begin) {
  REFITD_ASSIGN_OR_RETURN(const auto update, trainer.Begin(begin));
  Progress progress(options.progress, fmt::format("{} v{}", options.group, begin.version),
                    checkpoint.bytes());
  Pusher pusher(checkpoint, trainer, *update, progress);
  const absl::Status pushed = pusher.Push(options.mode, static_cast<int64_t>(options.bucket_bytes));
  if (!pushed.ok()) {
    return GivenUp(*update, pushed);
  }
  absl::StatusOr<client::CommitResult> result = update->Commit();
  if (!result.ok()) return GivenUp(*update, result.status());
  return Pushed{*std::move(result), pusher.buckets()};
}

absl::StatusOr<Summary> InstallCheckpoint(const GlobalOptions& global, const PushOptions& options) {
  REFITD_ASSIGN_OR_RETURN(const Checkpoint checkpoint, Checkpoint::Open(options.folder));
  REFITD_ASSIGN_OR_RETURN(const auto trainer,
                          client::Trainer::Attach(AttachOptions(global, options)));
  REFITD_RETURN_IF_ERROR(WaitForInstances(global, options));
  REFITD_ASSIGN_OR_RETURN(const std::string why_push, WhyPush(global, options, checkpoint));
  const Version version = options.version != 0
                              ? Version(options.version)
                              : trainer->group_version().value_or(Version(0)).Next();
  const client::BeginOptions begin = BeginOf(options, checkpoint, version);
  Summary summary;
  summary.tensors = static_cast<int64_t>(checkpoint.tensors().size());
  summary.bytes = checkpoint.bytes();
  summary.refitted = why_push.empty();
  if (options.progress) {
    PrintLine(fmt::format("{} v{}: {}", options.group, version,
                          summary.refitted ? "refit" : fmt::format("push ({})", why_push)));
  }
  const auto start = Clock::now();
  if (summary.refitted) {
    REFITD_ASSIGN_OR_RETURN(summary.result, RefitWhole(global, options, checkpoint, *trainer,
                                                       {version, begin.duration, begin.verification,
                                                        begin.evict_late}));
  } else {
    REFITD_ASSIGN_OR_RETURN(Pushed pushed, PushInBuckets(options, checkpoint, *trainer, begin));
    summary.result = std::move(pushed.result);
    summary.buckets = pushed.buckets;
  }
  summary.wall_seconds = std::chrono::duration<double>(Clock::now() - start).count();
  return summary;
}

int RunPush(const GlobalOptions& global, const PushOptions& options) {
  if (!global.address.empty()) {
    return UsageError("push shares memory with the daemon: it needs --socket, not --address");
  }
  const auto summary = InstallCheckpoint(global, options);
  if (!summary.ok()) return Fail(summary.status());
  Print(global.json ? AsJson(*summary, options.group) : AsText(*summary, options.group));
  return kExitOk;
}

}  // namespace

Command AddPush(CommandApp app, const GlobalOptions& global) {
  CommandApp sub = app.AddCommand(
      "push", "Install a checkpoint folder (safetensors) in every instance of a group", kTry);
  auto options = std::make_shared<PushOptions>();
  sub.Add("CHECKPOINT_DIR", &options->folder,
          "Folder with model.safetensors, or an index and its shards")
      .Required();
  sub.Add("--group", &options->group, "The group").Required();
  sub.Add("--coordinator", &options->coordinator,
          "HOST:PORT of the daemon that holds the group (default: the one at --socket)");
  sub.AddFlag("--progress", &options->progress, "Show a progress bar on stderr");
  sub.BeginGroup("Update");
  sub.Add("--version", &options->version, "The version to install (default: the group's + 1, or 1)")
      .InRange(int64_t{1}, INT64_MAX);
  sub.Add("--duration", &options->duration,
          "How long the whole update may take (default: the daemon's limits.default_duration_ms)");
  sub.Add("--verification", &options->verification,
          "What is compared after the copies (default: the daemon's default_verification)")
      .OneOf({"off", "transfer", "readback"});
  sub.AddFlag("--evict-late", &options->evict_late,
              "Evict instances that are late or fail instead of aborting");
  sub.Add("--wait-instances", &options->wait_instances,
          "Begin when so many complete instances are attached")
      .InRange(1, 65'536);
  sub.Add("--wait", &options->wait, "How long --wait-instances waits");
  sub.BeginGroup("A group that is not there yet");
  const Option create = sub.AddFlag("--create", &options->create,
                                    "Create the group if there is none, for one trainer rank");
  sub.Add("--instances", &options->instances, "With --create: instances that an update waits for")
      .Needs(create)
      .InRange(1, 65'536);
  sub.AddFlag("--encrypted-data", &options->encrypted_data,
              "With --create: the group's bytes cross between daemons encrypted or not at all")
      .Needs(create);
  sub.BeginGroup(
      "Push in buckets (else a compiled refit where every engine takes in-place delivery)");
  sub.AddFlag("--push", &options->push,
              "Push in buckets also where all engines are registered and a refit would do");
  sub.Add("--bucket-bytes", &options->bucket_bytes,
          "The size of a bucket (default: 64MiB; inline 1MiB; slot a slot)")
      .AsSize()
      .InRange(uint64_t{kPackAlignment}, uint64_t{1} << 40);
  sub.Add("--mode", &options->mode,
          "How bytes reach the daemon: region (shared memory; the default), slot (its staging), "
          "inline")
      .OneOf({"region", "slot", "inline"});
  sub.Add("--broadcast", &options->broadcast,
          "How bytes reach engines on several GPUs: auto (the default), direct, chain, symmetric, "
          "nccl; all but the first two need a trainer on a GPU")
      .OneOf({kBroadcastMethodNames.begin(), kBroadcastMethodNames.end()});
  return {sub, [&global, options] { return RunPush(global, *options); }};
}

}  // namespace refitd::refitctl
