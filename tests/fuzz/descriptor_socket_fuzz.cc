// Any messages to the descriptor socket of a real daemon, with any descriptors: each message gets a
// well-formed answer or ends its connection within a deadline, and afterwards no region and no
// descriptor is left (P4, P8, P10).
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "daemon/node/daemon.h"
#include "daemon/node/member_calls.h"
#include "daemon/node/member_memory.h"
#include "daemon/node/operators.h"
#include "daemon/process/log.h"
#include "daemon/services/member_requests.h"
#include "daemon/sockets/descriptor_socket.h"
#include "daemon/sockets/process_watch.h"
#include "daemon/test_util.h"
#include "tests/fuzz/inputs.pb.h"
#include "tests/fuzz/proto_mutator.h"
#include "transport/base/status.h"
#include "transport/host/host_transport.h"
#include "transport/host/memory.h"

namespace refitd {
namespace {

using fuzz::DescriptorInput;

constexpr int64_t kMemfdBytes = 8192;
constexpr int kMaxSentDescriptors = 253;  // the kernel's limit for one message

PeerCredentials Self() {
  PeerCredentials self;
  self.uid = geteuid();
  self.gid = getegid();
  return self;
}

// A member that keeps the token of its Welcome.
class Welcomed : public MemberSink {
 public:
  void Send(MemberNews news) override {
    if (const auto* welcome = std::get_if<WelcomeNews>(&news)) token = welcome->token;
  }
  void End(absl::Status) override {}
  std::string token;
};

// Another engine, whom no input names.
constexpr auto kProber = static_cast<DescriptorInput::Sender>(3);

// One daemon for the whole run, with a trainer and two engines attached.
class Target {
 public:
  Target() {
    REFITD_CHECK(SetLogging({.level = LogLevel::kError, .file = ""}).ok());
    auto watch = ProcessWatch::Create();
    REFITD_CHECK(watch.ok());
    watch_ = *std::move(watch);
    DaemonOptions options;
    options.default_slot_bytes = 4096;
    options.default_slots = 2;
    options.max_regions_per_member = 6;
    options.max_region_bytes = kMemfdBytes;
    daemon_ = std::make_unique<Daemon>(options, MakeHostTransport({.threads = 1}), watch_.get());
    auto trainer = std::make_shared<Welcomed>();
    v1::TrainerHello hello;
    hello.set_protocol(v1::PROTOCOL_VERSION_1);
    hello.set_group("g");
    hello.mutable_spec()->set_trainer_ranks(1);
    hello.set_world_size(1);
    const Peer self{Self()};
    daemon_->calls().Attach(ArrivalOf(hello, self), trainer);
    v1::EngineHello engine_hello;
    engine_hello.set_protocol(v1::PROTOCOL_VERSION_1);
    engine_hello.set_group("g");
    engine_hello.set_world_size(1);
    engine_hello.set_delivery(v1::DELIVERY_LOADER);
    auto engine = std::make_shared<Welcomed>();
    engine_hello.set_instance("i");
    daemon_->calls().Attach(ArrivalOf(engine_hello, self), engine);
    auto prober = std::make_shared<Welcomed>();
    engine_hello.set_instance("prober");
    daemon_->calls().Attach(ArrivalOf(engine_hello, self), prober);
    tokens_ = {trainer->token, engine->token, std::string(sizeof(Token), 'x'), prober->token};
    for (const std::string& token : tokens_) REFITD_CHECK(token.size() == sizeof(Token));
    // The pool's own descriptor stays open and is no leak.
    REFITD_CHECK(
        daemon_->memory().MapPool(TokenOf(DescriptorInput::TRAINER), *self.credentials).ok());
    auto socket =
        DescriptorSocket::Create({.path = folder_ / "s.fds",
                                  .admit = [](const PeerCredentials&) { return absl::OkStatus(); }},
                                 &daemon_->memory());
    REFITD_CHECK(socket.ok());
    socket_ = *std::move(socket);
  }

  Token TokenOf(DescriptorInput::Sender sender) const {
    Token token;
    std::memcpy(token.data(), tokens_[sender].data(), token.size());
    return token;
  }
  UniqueFd Connect() const {
    UniqueFd fd = ConnectTo(socket_->path(), SOCK_SEQPACKET);
    REFITD_CHECK(fd.valid());
    return fd;
  }
  Daemon& daemon() { return *daemon_; }
  DescriptorSocket& socket() { return *socket_; }
  const UniqueFd& null() const { return null_; }

 private:
  const TempFolder folder_;
  const UniqueFd null_{open("/dev/null", O_RDWR | O_CLOEXEC)};
  std::unique_ptr<ProcessWatch> watch_;
  std::unique_ptr<Daemon> daemon_;
  std::array<std::string, 4> tokens_;  // by Sender
  std::unique_ptr<DescriptorSocket> socket_;
};

// Of this process. Neither libFuzzer nor the test opens or closes any while an input runs.
int OpenDescriptors() {
  DIR* const folder = opendir("/proc/self/fd");
  REFITD_CHECK(folder != nullptr);
  int count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

UniqueFd Sealed() {
  auto fd = CreateSealedMemfd("fuzz", kMemfdBytes);
  REFITD_CHECK(fd.ok());
  return *std::move(fd);
}

class Conversation {
 public:
  explicit Conversation(Target* target) : target_(target), connection_(target->Connect()) {}

  void Say(const DescriptorInput::Message& message) {
    if (message.connect_again() || !connection_.valid()) {
      connection_ = target_->Connect();
      unread_ = 0;
    }
    const std::vector<UniqueFd> descriptors = Descriptors(message);
    const std::string data = Data(message);
    if (!SendMessage(message, data, descriptors)) {
      connection_.Reset();  // the daemon has closed it
      return;
    }
    ++unread_;
    if (message.unread()) return;
    while (unread_ > 0 && connection_.valid()) Hear(unread_ == 1 ? &message : nullptr);
  }

  // Returns when the daemon has served everything and has closed its end.
  void End() {
    while (unread_ > 0 && connection_.valid()) Hear(nullptr);
    connection_.Reset();
    REFITD_CHECK(Eventually([this] { return target_->socket().connections() == 0; }));
  }

 private:
  UniqueFd Make(DescriptorInput::Descriptor kind) {
    switch (kind) {
      case DescriptorInput::SEALED:
        last_ = Sealed();
        return Duplicate(last_.get());
      case DescriptorInput::UNSEALED: {
        UniqueFd fd(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
        REFITD_CHECK(ftruncate(fd.get(), kMemfdBytes) == 0);
        return fd;
      }
      case DescriptorInput::READ_ONLY: {
        auto fd = ReadOnlyDuplicate(Sealed());
        REFITD_CHECK(fd.ok());
        return *std::move(fd);
      }
      case DescriptorInput::PIPE: {
        std::array<int, 2> ends{};
        REFITD_CHECK(pipe2(ends.data(), O_CLOEXEC) == 0);
        close(ends[1]);
        return UniqueFd(ends[0]);
      }
      case DescriptorInput::SAME:
        if (last_.valid()) return Duplicate(last_.get());
        break;
      case DescriptorInput::FILE:
        break;
    }
    return Duplicate(target_->null().get());
  }

  std::vector<UniqueFd> Descriptors(const DescriptorInput::Message& message) {
    std::vector<UniqueFd> made;
    for (const int kind : message.descriptors()) {
      if (made.size() == kMaxSentDescriptors) break;
      made.push_back(Make(static_cast<DescriptorInput::Descriptor>(kind)));
    }
    const uint32_t more = message.more_descriptors() % (kMaxSentDescriptors + 1);
    while (made.size() < more) made.push_back(Make(DescriptorInput::FILE));
    return made;
  }

  std::string Data(const DescriptorInput::Message& message) const {
    if (!message.has_request()) return message.raw();
    const DescriptorInput::Request& in = message.request();
    DescriptorRequest request;
    request.magic ^= in.magic_xor();
    request.version ^= in.version_xor();
    request.kind = static_cast<DescriptorRequestKind>(in.kind());
    request.region_kind = static_cast<RegionKind>(in.region_kind());
    const Token token = target_->TokenOf(in.sender());
    std::memcpy(request.token, token.data(), token.size());
    request.bytes = in.bytes();
    request.region_id = in.region();
    request.keep = static_cast<KeepDescriptor>(in.keep());
    if (!in.raw_region() && !regions_.empty()) {
      request.region_id = regions_[in.region() % regions_.size()];
    }
    std::memcpy(request.reserved, in.reserved().data(),
                std::min(in.reserved().size(), sizeof(request.reserved)));
    return {reinterpret_cast<const char*>(&request), sizeof(request)};
  }

  // False: the connection has ended.
  bool SendMessage(const DescriptorInput::Message& message, const std::string& data,
                   const std::vector<UniqueFd>& descriptors) {
    iovec part{.iov_base = const_cast<char*>(data.data()), .iov_len = data.size()};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    // The kernel accepts the descriptors in one control message or in several.
    const size_t first = message.split_descriptors() ? descriptors.size() / 2 : descriptors.size();
    std::vector<char> control(CMSG_SPACE(first * sizeof(int)) +
                              CMSG_SPACE((descriptors.size() - first) * sizeof(int)));
    if (!descriptors.empty()) {
      header.msg_control = control.data();
      header.msg_controllen = control.size();
      cmsghdr* at = CMSG_FIRSTHDR(&header);
      size_t next = 0;
      for (const size_t count : {first, descriptors.size() - first}) {
        if (count == 0) continue;
        at->cmsg_level = SOL_SOCKET;
        at->cmsg_type = SCM_RIGHTS;
        at->cmsg_len = CMSG_LEN(count * sizeof(int));
        for (size_t i = 0; i < count; ++i) {
          const int fd = descriptors[next++].get();
          std::memcpy(CMSG_DATA(at) + i * sizeof(int), &fd, sizeof(fd));
        }
        at = reinterpret_cast<cmsghdr*>(reinterpret_cast<char*>(at) +
                                        CMSG_SPACE(count * sizeof(int)));
      }
      header.msg_controllen = static_cast<size_t>(reinterpret_cast<char*>(at) - control.data());
    }
    return sendmsg(connection_.get(), &header, MSG_NOSIGNAL) == static_cast<ssize_t>(data.size());
  }

  // P4. False: neither data nor the end came before the deadline. (libFuzzer's alarms interrupt
  // waits.)
  bool AnswerComes() const {
    pollfd entry{.fd = connection_.get(), .events = POLLIN, .revents = 0};
    return Eventually([&entry] { return poll(&entry, 1, /*timeout=*/100) == 1; });
  }

  // Takes one reply, or the end. `to`: the message that it answers, if known.
  void Hear(const DescriptorInput::Message* to) {
    REFITD_CHECK(AnswerComes());
    --unread_;
    std::array<char, sizeof(DescriptorReply) + 1> buffer{};
    iovec data{.iov_base = buffer.data(), .iov_len = buffer.size()};
    alignas(cmsghdr) std::array<char, CMSG_SPACE(4 * sizeof(int))> control;
    msghdr header{};
    header.msg_iov = &data;
    header.msg_iovlen = 1;
    header.msg_control = control.data();
    header.msg_controllen = control.size();
    const ssize_t bytes = recvmsg(connection_.get(), &header, MSG_CMSG_CLOEXEC);
    std::vector<UniqueFd> got;
    for (cmsghdr* at = CMSG_FIRSTHDR(&header); bytes > 0 && at != nullptr;
         at = CMSG_NXTHDR(&header, at)) {
      REFITD_CHECK(at->cmsg_type == SCM_RIGHTS);
      for (size_t i = 0; i < (at->cmsg_len - CMSG_LEN(0)) / sizeof(int); ++i) {
        int fd = -1;
        std::memcpy(&fd, CMSG_DATA(at) + i * sizeof(int), sizeof(fd));
        got.emplace_back(fd);
      }
    }
    if (bytes <= 0) {  // the connection has ended
      connection_.Reset();
      return;
    }
    REFITD_CHECK(bytes == sizeof(DescriptorReply) && (header.msg_flags & MSG_CTRUNC) == 0);
    DescriptorReply reply;
    std::memcpy(&reply, buffer.data(), sizeof(reply));
    CheckReply(to, reply, got);
  }

  void CheckReply(const DescriptorInput::Message* to, const DescriptorReply& reply,
                  const std::vector<UniqueFd>& got) {
    REFITD_CHECK(reply.magic == kDescriptorMagic && reply.version == kDescriptorWireVersion);
    REFITD_CHECK(reply.code <= 16);
    const size_t length = strnlen(reply.message, sizeof(reply.message));
    REFITD_CHECK(length < sizeof(reply.message) && (length == 0) == (reply.code == 0));
    if (reply.code != 0) REFITD_CHECK(got.empty());
    if (to == nullptr || reply.code != 0) return;
    // Only a well-formed message may succeed.
    if (!to->has_request()) return;
    const DescriptorInput::Request& in = to->request();
    REFITD_CHECK(in.magic_xor() == 0 && in.version_xor() == 0);
    REFITD_CHECK(in.keep() <= (in.kind() == 1 ? 1U : 0U));
    REFITD_CHECK(in.sender() != DescriptorInput::NOBODY);
    switch (static_cast<DescriptorRequestKind>(in.kind())) {
      case DescriptorRequestKind::kRegisterRegion:
        REFITD_CHECK(got.empty() && in.bytes() > 0 && in.bytes() <= kMemfdBytes);
        REFITD_CHECK(in.region_kind() == static_cast<uint32_t>(RegionKind::kMemfd));
        REFITD_CHECK(to->descriptors_size() == 1 || to->more_descriptors() == 1);
        regions_.push_back(reply.region_id);
        return;
      case DescriptorRequestKind::kReleaseRegion:
        REFITD_CHECK(got.empty());
        return;
      case DescriptorRequestKind::kMapPool: {
        REFITD_CHECK(got.size() == 1 && reply.slot_bytes == 4096 && reply.bytes == 2 * 4096);
        // Trainers may write to the pool, engines may not.
        const bool writable = HostRegion::Map(got[0], reply.bytes, Access::kReadWrite, false).ok();
        REFITD_CHECK(writable == (in.sender() == DescriptorInput::TRAINER));
        return;
      }
      case DescriptorRequestKind::kTakeKept:
        break;  // nothing is kept for any of the members
    }
    REFITD_CHECK(false);
  }

  Target* const target_;
  UniqueFd connection_;
  UniqueFd last_;
  int unread_ = 0;
  std::vector<uint64_t> regions_;  // ids in the answers
};

// Releases whatever the members still hold, by number: ids only grow. The id of one more region
// shows how far they are.
void ReleaseAll(Target* target, int messages) {
  static const UniqueFd memory = Sealed();
  static uint64_t first = 1;
  const PeerCredentials self = Self();
  MemberMemory& regions = target->daemon().memory();
  const Token prober = target->TokenOf(kProber);
  const auto probe = regions.RegisterRegion(prober, self, Duplicate(memory.get()),
                                            RegionKind::kMemfd, kMemfdBytes);
  // A message makes at most one.
  REFITD_CHECK(probe.ok() && probe->value() <= first + static_cast<uint64_t>(messages));
  for (uint64_t id = first; id < probe->value(); ++id) {
    for (const auto sender : {DescriptorInput::TRAINER, DescriptorInput::ENGINE}) {
      const absl::Status released =
          regions.ReleaseRegion(target->TokenOf(sender), self, RegionId(id));
      REFITD_CHECK(released.ok() || absl::IsNotFound(released));
    }
  }
  REFITD_CHECK(regions.ReleaseRegion(prober, self, *probe).ok());
  first = probe->value() + 1;
}

void FuzzOne(const DescriptorInput& input) {
  constexpr int kMaxMessages = 32;
  static Target target;
  // What is opened once is open after this: the count below includes it.
  static const bool warm = (ReleaseAll(&target, /*messages=*/0), true);
  static_cast<void>(warm);
  static const int before = OpenDescriptors();
  const int messages = std::min(input.messages_size(), kMaxMessages);
  {
    Conversation conversation(&target);
    for (int i = 0; i < messages; ++i) conversation.Say(input.messages(i));
    conversation.End();
  }
  ReleaseAll(&target, messages);
  const DaemonDetails details = target.daemon().operators().Describe();
  REFITD_CHECK(details.regions == 0 && details.members == 3);
  // The thread that served last closes the socket a moment after removing it from its list.
  REFITD_CHECK(Eventually([] { return OpenDescriptors() == before; }));
}

}  // namespace
}  // namespace refitd

REFITD_PROTO_FUZZ_TARGET(refitd::fuzz::DescriptorInput)
