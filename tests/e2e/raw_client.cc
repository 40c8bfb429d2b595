#include "tests/e2e/raw_client.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "transport/base/status.h"

namespace refitd::e2e {

std::shared_ptr<grpc::Channel> ConnectTo(const std::string& socket) {
  grpc::ChannelArguments arguments;
  // Members share no connection, since the daemon knows a peer by its connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

SharedMemory MakeMemory(int64_t bytes) {
  SharedMemory memory;
  auto fd = CreateSealedMemfd("refitd-e2e", bytes);
  REFITD_CHECK(fd.ok());
  memory.fd = *std::move(fd);
  auto mapped = HostRegion::Map(memory.fd, bytes, Access::kReadWrite, false);
  REFITD_CHECK(mapped.ok());
  memory.mapping = *std::move(mapped);
  return memory;
}

Descriptors::Descriptors(const std::string& path, const std::string& token)
    : token_(token), socket_(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  REFITD_CHECK(path.size() < sizeof(address.sun_path));
  std::memcpy(address.sun_path, path.data(), path.size());
  if (connect(socket_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    socket_.Reset();
}

DescriptorRequest Descriptors::Request(DescriptorRequestKind kind) const {
  DescriptorRequest request;
  request.kind = kind;
  std::memcpy(request.token, token_.data(), std::min(token_.size(), sizeof(request.token)));
  return request;
}

std::optional<DescriptorReply> Descriptors::Register(int fd, int64_t bytes) {
  DescriptorRequest request = Request(DescriptorRequestKind::kRegisterRegion);
  request.bytes = bytes;
  return Ask(request, {fd});
}

std::optional<DescriptorReply> Descriptors::Ask(const DescriptorRequest& request,
                                                const std::vector<int>& fds, UniqueFd* received) {
  return Send(&request, sizeof(request), fds, received);
}

std::optional<DescriptorReply> Descriptors::Send(const void* data, size_t bytes,
                                                 const std::vector<int>& fds, UniqueFd* received) {
  std::lock_guard lock(mutex_);
  alignas(cmsghdr) char control[CMSG_SPACE(16 * sizeof(int))] = {};
  iovec part{const_cast<void*>(data), bytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size() * sizeof(int));
  }
  if (sendmsg(socket_.get(), &message, MSG_NOSIGNAL) < 0) return std::nullopt;

  pollfd entry{.fd = socket_.get(), .events = POLLIN, .revents = 0};
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(kDeadline).count();
  if (poll(&entry, 1, static_cast<int>(ms)) != 1) return std::nullopt;
  DescriptorReply reply;
  part = {&reply, sizeof(reply)};
  message = {};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  if (recvmsg(socket_.get(), &message, MSG_CMSG_CLOEXEC) != sizeof(reply)) return std::nullopt;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(header), sizeof(fd));
    UniqueFd owned(fd);
    if (received != nullptr) *received = std::move(owned);
  }
  return reply;
}

v1::GroupSpec Spec(int trainer_ranks, int min_instances, int64_t slot_bytes, int slots) {
  v1::GroupSpec spec;
  spec.set_trainer_ranks(trainer_ranks);
  spec.set_min_instances(min_instances);
  spec.set_slot_bytes(slot_bytes);
  spec.set_slots(slots);
  return spec;
}

// ---- trainer ----

v1::TrainerHello RawTrainer::Hello(const std::string& group, std::optional<v1::GroupSpec> spec,
                                   int rank, int world_size) {
  v1::TrainerHello hello;
  hello.set_protocol(v1::PROTOCOL_VERSION_1);
  hello.set_group(group);
  if (spec.has_value()) *hello.mutable_spec() = *std::move(spec);
  hello.set_rank(rank);
  hello.set_world_size(world_size);
  hello.set_client("e2e trainer");
  return hello;
}

RawTrainer::RawTrainer(const std::shared_ptr<grpc::Channel>& channel, const v1::TrainerHello& hello)
    : RawMember(v1::Trainer::NewStub(channel)) {
  stream_ = std::make_unique<Stream>(
      [this](grpc::ClientContext* context) { return stub_->Attach(context); },
      [this](const v1::TrainerEvent& event) { SeeWelcome(event); });
  v1::TrainerMessage message;
  *message.mutable_hello() = hello;
  stream_->Write(message);
}

Outcome<v1::BeginResponse> RawTrainer::Begin(int64_t version, v1::Verification verification) {
  v1::BeginRequest request;
  request.set_version(version);
  request.set_verification(verification);
  return Begin(request);
}

Outcome<v1::PushBucketResponse> RawTrainer::Push(int64_t version, v1::Bucket bucket,
                                                 const std::string& request_id) {
  v1::PushBucketRequest request;
  request.set_version(version);
  request.set_request_id(request_id);
  *request.mutable_bucket() = std::move(bucket);
  return Call(&v1::Trainer::Stub::PushBucket, std::move(request));
}

Outcome<v1::CommitResponse> RawTrainer::Commit(int64_t version, int64_t buckets,
                                               const std::string& request_id) {
  v1::CommitRequest request;
  request.set_version(version);
  request.set_bucket_count(buckets);
  request.set_request_id(request_id);
  return Call(&v1::Trainer::Stub::Commit, request);
}

Outcome<v1::CommitResponse> RawTrainer::Refit(int64_t version, uint64_t binding_generation,
                                              int64_t buckets) {
  v1::RefitRequest request;
  request.set_version(version);
  request.set_binding_generation(binding_generation);
  request.set_bucket_count(buckets);
  return Refit(request);
}

Outcome<v1::AbortResponse> RawTrainer::Abort(int64_t version, const std::string& reason) {
  v1::AbortRequest request;
  request.set_version(version);
  request.set_reason(reason);
  return Call(&v1::Trainer::Stub::Abort, request);
}

Outcome<v1::LeaseSlotResponse> RawTrainer::LeaseSlot(int64_t version, int64_t wait_ms) {
  v1::LeaseSlotRequest request;
  request.set_version(version);
  request.set_wait_ms(wait_ms);
  return Call(&v1::Trainer::Stub::LeaseSlot, request);
}

Outcome<v1::ReleaseSlotResponse> RawTrainer::ReleaseSlot(uint32_t slot, uint64_t grant) {
  v1::ReleaseSlotRequest request;
  request.set_slot(slot);
  request.set_grant(grant);
  return Call(&v1::Trainer::Stub::ReleaseSlot, request);
}

Outcome<v1::GetUpdateResponse> RawTrainer::GetUpdate(const std::string& group, int64_t version) {
  v1::GetUpdateRequest request;
  request.set_group(group);
  request.set_version(version);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  Outcome<v1::GetUpdateResponse> outcome;
  outcome.status = stub_->GetUpdate(&context, request, &outcome.response);
  return outcome;
}

// ---- engine ----

v1::EngineHello RawEngine::Hello(const std::string& group, const std::string& instance, int rank,
                                 int world_size, v1::Delivery delivery,
                                 std::optional<v1::GroupSpec> spec) {
  v1::EngineHello hello;
  hello.set_protocol(v1::PROTOCOL_VERSION_1);
  hello.set_group(group);
  if (spec.has_value()) *hello.mutable_spec() = *std::move(spec);
  hello.set_instance(instance);
  hello.set_rank(rank);
  hello.set_world_size(world_size);
  hello.set_delivery(delivery);
  hello.set_client("e2e engine");
  return hello;
}

RawEngine::RawEngine(const std::shared_ptr<grpc::Channel>& channel, const v1::EngineHello& hello,
                     EngineOptions options)
    : RawMember(v1::Engine::NewStub(channel)), options_(options) {
  stream_ = std::make_unique<Stream>(
      [this](grpc::ClientContext* context) { return stub_->Attach(context); },
      [this](const v1::EngineEvent& event) { On(event); });
  v1::EngineMessage message;
  *message.mutable_hello() = hello;
  stream_->Write(message);
}

bool RawEngine::Ready(int64_t version) {
  {
    // Set before Ready is sent: from then on memory may be written.
    std::lock_guard lock(told_mutex_);
    if (version == prepared_) answered_ = true;
  }
  v1::EngineMessage message;
  message.mutable_ready()->set_version(version);
  message.mutable_ready()->set_update_id(update_id_);
  return stream_->Write(message);
}

bool RawEngine::Ack(int64_t version, int64_t part) {
  v1::EngineMessage message;
  message.mutable_ack()->set_version(version);
  message.mutable_ack()->set_update_id(update_id_);
  message.mutable_ack()->set_part(part);
  return stream_->Write(message);
}

bool RawEngine::Fail(int64_t version, const std::string& reason) {
  v1::EngineMessage message;
  message.mutable_failed()->set_version(version);
  message.mutable_failed()->set_update_id(update_id_);
  message.mutable_failed()->set_reason(reason);
  return stream_->Write(message);
}

void RawEngine::Hold(bool ready, bool ack) {
  std::lock_guard lock(told_mutex_);
  options_ = {.auto_ready = !ready, .auto_ack = !ack};
}

void RawEngine::Release() {
  int64_t ready = 0;
  std::vector<std::pair<int64_t, int64_t>> acks;
  {
    std::lock_guard lock(told_mutex_);
    options_ = {};
    if (!answered_) ready = prepared_;
    acks = std::exchange(kept_acks_, {});
  }
  if (ready != 0) Ready(ready);
  for (const auto& [version, part] : acks) Ack(version, part);
}

bool RawEngine::Await(const std::function<bool()>& condition) {
  // The end of the stream wakes no waiter, so it is checked now and then.
  constexpr std::chrono::milliseconds kLook{20};
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  std::unique_lock lock(told_mutex_);
  while (!condition()) {
    if (stream_->ended() || std::chrono::steady_clock::now() >= deadline) return condition();
    told_cond_.wait_for(lock, kLook);
  }
  return true;
}

bool RawEngine::AwaitPrepare(int64_t version) {
  return Await([&] { return prepared_ == version; });
}

bool RawEngine::AwaitPart(int64_t version) {
  return Await([&] { return part_of_ == version; });
}

Belief RawEngine::AwaitBelief(int64_t version) {
  Await([&] { return prepared_ == 0 && outcome_of_ >= version; });
  std::lock_guard lock(told_mutex_);
  Belief belief = belief_;
  belief.attached = !stream_->ended();
  belief.unknown = prepared_ != 0 && answered_;
  if (belief.unknown) belief.good = false;
  return belief;
}

void RawEngine::On(const v1::EngineEvent& event) {
  SeeWelcome(event);
  if (event.has_prepare()) {
    update_id_ = event.prepare().update_id();
    {
      std::lock_guard lock(loaded_mutex_);
      before_ = std::exchange(loaded_tensors_, {});
      loaded_error_.clear();
      next_part_ = 0;
    }
    bool answer = false;
    {
      std::lock_guard lock(told_mutex_);
      prepared_ = event.prepare().version();
      answered_ = false;
      kept_acks_.clear();
      answer = options_.auto_ready;
    }
    if (answer) Ready(event.prepare().version());
  } else if (event.has_bucket()) {
    Take(event.bucket());
    bool answer = false;
    {
      std::lock_guard lock(told_mutex_);
      part_of_ = event.bucket().version();
      answer = options_.auto_ack;
      if (!answer) kept_acks_.emplace_back(event.bucket().version(), event.bucket().part());
    }
    if (answer) Ack(event.bucket().version(), event.bucket().part());
  } else if (event.has_committed()) {
    std::lock_guard lock(told_mutex_);
    prepared_ = 0;
    outcome_of_ = std::max<int64_t>(outcome_of_, event.committed().version());
    belief_.good = true;
    belief_.version = event.committed().version();
  } else if (event.has_aborted()) {
    if (!event.aborted().dirty()) {
      std::lock_guard lock(loaded_mutex_);
      loaded_tensors_ = std::move(before_);
      before_.clear();
    }
    std::lock_guard lock(told_mutex_);
    prepared_ = 0;
    outcome_of_ = std::max<int64_t>(outcome_of_, event.aborted().version());
    if (event.aborted().dirty()) belief_.good = false;
  }
  told_cond_.notify_all();
}

void RawEngine::Take(const v1::BucketReady& part) {
  std::lock_guard lock(loaded_mutex_);
  const auto fail = [this](std::string what) {
    if (loaded_error_.empty()) loaded_error_ = std::move(what);
  };
  if (pool_ == nullptr) pool_ = MapPool(Access::kReadOnly);
  if (pool_ == nullptr) return fail("the pool can't be mapped");
  if (part.part() != next_part_)
    fail(fmt::format("part {} came where {} was due", part.part(), next_part_));
  next_part_ = part.part() + 1;
  for (int i = 0; i < part.names_size(); ++i) {
    const auto dtype = DTypeFromProto(part.dtypes(i));
    if (!dtype.ok()) return fail("dtype " + Message(dtype.status()));
    const TensorSpec tensor{part.names(i), *dtype,
                            Dims(part.shapes(i).dims().begin(), part.shapes(i).dims().end())};
    const int64_t element = ElementBytes(tensor.dtype);
    if (part.byte_offsets(i) % element != 0)
      fail(fmt::format("{} is unaligned in its slot", tensor.name));
    const int64_t bytes = part.sizes(i) * element;
    if (part.byte_offsets(i) + bytes > part.bytes() || part.bytes() > welcome_.slot_bytes()) {
      return fail(fmt::format("{} is outside of its part", tensor.name));
    }
    LoadedTensor& loaded = loaded_tensors_[tensor.name];
    loaded.bytes.resize(static_cast<size_t>(TensorBytes(tensor)));
    loaded.times.resize(loaded.bytes.size());
    const int64_t at = part.starts(i) * element;
    if (at + bytes > static_cast<int64_t>(loaded.bytes.size()))
      return fail(tensor.name + ": more than all of it");
    std::memcpy(loaded.bytes.data() + at,
                pool_->data() + part.slot_byte_offset() + part.byte_offsets(i),
                static_cast<size_t>(bytes));
    for (int64_t b = at; b < at + bytes; ++b) ++loaded.times[static_cast<size_t>(b)];
  }
}

std::string RawEngine::LoadedDifference(const Model& model, const std::vector<std::string>& bytes) {
  std::lock_guard lock(loaded_mutex_);
  if (!loaded_error_.empty()) return loaded_error_;
  // An update of which no part came has changed nothing.
  const auto& held = loaded_tensors_.empty() ? before_ : loaded_tensors_;
  if (held.size() != model.size()) {
    return fmt::format("{} tensors came instead of {}", held.size(), model.size());
  }
  for (size_t t = 0; t < model.size(); ++t) {
    const auto loader = held.find(model[t].name);
    if (loader == held.end()) return model[t].name + " did not come";
    if (loader->second.bytes != bytes[t]) return model[t].name + " has other bytes";
    if (loader->second.times.find_first_not_of('\1') != std::string::npos) {
      return model[t].name + ": not every byte came once";
    }
  }
  return "";
}

int64_t RawEngine::parts_seen() {
  std::lock_guard lock(loaded_mutex_);
  return next_part_;
}

// ---- holder ----

Holder::Holder(const std::shared_ptr<grpc::Channel>& channel, const v1::EngineHello& hello,
               const Held& held, EngineOptions options)
    : engine_(channel, hello, options), layout_(held.layout), bytes_(held.region_bytes) {
  if (const grpc::Status attached = engine_.attached(); !attached.ok()) {
    throw std::runtime_error("attach: " + attached.error_message());
  }
  memory_ = engine_.NewMemory(bytes_);
  if (memory_.region_id == 0) throw std::runtime_error("the region was refused");
  const std::string empty = EmptyImage(bytes_);
  std::memcpy(memory_.data(), empty.data(), empty.size());
  for (Piece& piece : layout_.pieces) piece.region = RegionId(memory_.region_id);
  layout_.binding_generation = 1;
  const auto registered = engine_.Register(layout_);
  if (!registered.ok()) throw std::runtime_error("register: " + registered.status.error_message());
}

std::string Holder::Difference(const Model& model, const std::vector<std::string>& bytes) const {
  return e2e::Difference(ExpectedImage(EmptyImage(bytes_), layout_, model, bytes), memory_.data(),
                         layout_);
}

std::string Holder::DifferenceFromEmpty() const {
  return e2e::Difference(EmptyImage(bytes_), memory_.data(), layout_);
}

char* Holder::Tensor(const std::string& name) const {
  for (const Piece& piece : layout_.pieces) {
    if (layout_.tensors[piece.tensor].name == name) return memory_.data() + piece.byte_offset;
  }
  return nullptr;
}

}  // namespace refitd::e2e
