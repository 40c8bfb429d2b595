#include "transport/sockets/lane.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <set>
#include <span>

#include "transport/base/failure.h"
#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;
using std::chrono::steady_clock;

// A relay passes bytes on after each portion that it received, so the last rank of a chain begins
// as many portions later as there are relays. A portion is small enough that all of them together
// are one kChainShare-th of a transfer, within the limits below.
constexpr int kChainShare = 10;
constexpr int64_t kMinPortion = int64_t{64} << 10;
constexpr int64_t kMaxPortion = int64_t{1} << 20;
// How much one connection moves before other connections get a turn.
constexpr int64_t kTurnBytes = int64_t{4} << 20;
// The pause after a dial that ended without an answer.
constexpr Duration kRedial = std::chrono::milliseconds(50);

bool Watch(int epoll, int fd, uint32_t events, void* user) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = user;
  return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

// The kernel tells each event of a connection once, so that waiting for the next needs no further
// call.
constexpr uint32_t kLinkEvents = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;

}  // namespace

absl::Status SocketLane::Open() {
  epoll_.Reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.Reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() || !Watch(epoll_.get(), wake_.get(), EPOLLIN, nullptr)) {
    return ErrnoError(errno, fmt::format("communicator {}", shared_.id));
  }
  return absl::OkStatus();
}

void SocketLane::Arrive(GreetedConnection arrival) {
  MutexLock lock(&mutex_);
  std::erase_if(arrivals_, [&arrival](const GreetedConnection& old) {
    return old.from == arrival.from && old.stream == arrival.stream;
  });
  arrivals_.push_back(std::move(arrival));
  Wake();
}

void SocketLane::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.get(), &one, sizeof(one));  // fails only if it was woken very often already
}

void SocketLane::CloseLinks() {
  EndFlows();
  ready_.clear();
  turn_.clear();
  dialling_.clear();
  links_.clear();
  MutexLock lock(&mutex_);
  arrivals_.clear();
}

// ---- Connect and operations ----

SocketLane::Cause SocketLane::Connect(const WireWork& work) {
  const int size = shared_.size;
  const std::set<int> neighbours = {(shared_.rank + 1) % size, (shared_.rank + size - 1) % size};
  for (const int peer : neighbours) {
    const int end = std::min(first_ + count_, streams());
    for (int stream = first_; peer != shared_.rank && stream < end; ++stream) {
      Link* const link = LinkTo(peer, stream);
      link->awaited = true;
      ++pending_;
      Queue(link);
    }
  }
  TakeArrivals();
  return Run(work);
}

SocketLane::Cause SocketLane::Move(const WireWork& work) {
  if (work.exchange.has_value()) {
    PlanExchange(*work.exchange);
  } else {
    PlanBroadcast(*work.broadcast);
  }
  return Run(work);
}

// The ranks form a chain that starts at the root.
void SocketLane::PlanBroadcast(const WireBroadcast& broadcast) {
  const Frame frame{FrameKind::kBroadcast, broadcast.seq.value(),
                    static_cast<uint64_t>(broadcast.root),
                    static_cast<uint64_t>(broadcast.memory.bytes)};
  const int position = (shared_.rank - broadcast.root + shared_.size) % shared_.size;
  const bool sends = position + 1 < shared_.size;
  int64_t portion = kTurnBytes;
  if (sends) {
    portion = std::clamp(broadcast.memory.bytes / (kChainShare * (shared_.size - 1)), kMinPortion,
                         kMaxPortion);
  }
  if (position > 0) {
    AddLeg((shared_.rank + shared_.size - 1) % shared_.size, false, frame, broadcast.memory,
           portion);
  }
  const size_t receiving = flows_.size();
  if (sends) AddLeg((shared_.rank + 1) % shared_.size, true, frame, broadcast.memory, kTurnBytes);
  // All pairs of ranks have the same number of connections, so each sending flow passes on the
  // bytes of one receiving flow.
  for (size_t i = 0; receiving > 0 && receiving + i < flows_.size(); ++i) {
    flows_[i]->relay = flows_[receiving + i].get();
    flows_[receiving + i]->from = flows_[i].get();
  }
}

void SocketLane::PlanExchange(const WireExchange& exchange) {
  for (const auto* legs : {&exchange.receives, &exchange.sends}) {
    for (const WireExchange::Leg& leg : *legs) {
      const Frame frame{FrameKind::kExchange, exchange.seq.value(), 0,
                        static_cast<uint64_t>(leg.memory.bytes)};
      AddLeg(leg.peer, legs == &exchange.sends, frame, leg.memory, kTurnBytes);
    }
  }
}

void SocketLane::AddLeg(int peer, bool send, const Frame& frame, const MemorySpan& memory,
                        int64_t portion) {
  const int end = std::min(first_ + count_, streams());
  for (int stream = first_; stream < end; ++stream) {
    auto flow = std::make_unique<Flow>();
    flow->link = LinkTo(peer, stream);
    flow->frame = frame;
    flow->data = static_cast<char*>(memory.data);
    flow->bytes = BytesOfStream(memory.bytes, stream, streams());
    flow->portion = portion;
    (send ? flow->link->send : flow->link->receive) = flow.get();
    ++pending_;
    Queue(flow->link);
    flows_.push_back(std::move(flow));
  }
}

void SocketLane::AddUses(std::map<int, WireUse>* uses) {
  for (const auto& flow : flows_) {
    Link& link = *flow->link;
    if (link.send != flow.get() || flow->moved == 0) continue;
    const Duration busy = link.connection.Busy();
    WireUse& use = (*uses)[link.peer];
    use.bytes += flow->moved;
    use.busy = std::max(use.busy, busy - link.busy);
    link.busy = busy;
  }
}

void SocketLane::EndFlows() {
  for (const auto& flow : flows_) {
    flow->link->send = nullptr;
    flow->link->receive = nullptr;
  }
  flows_.clear();
  pending_ = 0;
}

SocketLane::Link* SocketLane::LinkTo(int peer, int stream) {
  std::unique_ptr<Link>& link = links_[{peer, stream}];
  if (link == nullptr) {
    link = std::make_unique<Link>();
    link->peer = peer;
    link->stream = stream;
  }
  return link.get();
}

void SocketLane::Queue(Link* link) {
  if (link->queued) return;
  link->queued = true;
  ready_.push_back(link);
}

// ---- turns ----

SocketLane::Cause SocketLane::Run(const WireWork& work) {
  const Cause cause = Drive(work);
  if (cause != Cause::kHalted) return cause;
  failure_ = ReadLastMessages();
  return failure_.ok() ? Cause::kHalted : Cause::kOther;
}

SocketLane::Cause SocketLane::Drive(const WireWork& work) {
  while (pending_ > 0) {
    if (shared_.halted) return Cause::kHalted;
    failure_ = TakeTurn();
    if (!failure_.ok()) return broken_peer_ >= 0 ? Cause::kBroken : Cause::kOther;
    if (pending_ == 0) break;
    if (steady_clock::now() >= work.deadline) return Cause::kOverdue;
    Wait(work);
  }
  return Cause::kNone;
}

absl::Status SocketLane::TakeTurn() {
  turn_.swap(ready_);
  for (Link* const link : turn_) {
    link->queued = false;
    REFITD_RETURN_IF_ERROR(Advance(link));
  }
  turn_.clear();
  return absl::OkStatus();
}

// A peer that is at another operation says so on each of its connections before it drops them all.
// The lane that failed first may have seen only the end of its connection, so the other lanes look
// for a frame that tells more. OK: there is none.
absl::Status SocketLane::ReadLastMessages() {
  for (const auto& [key, link] : links_) {
    if (link->state != Link::State::kUp) continue;
    link->readable = true;
    absl::Status status = Receive(link.get());
    if (status.code() == StatusCode::kFailedPrecondition) return status;
  }
  broken_peer_ = -1;
  return absl::OkStatus();
}

void SocketLane::Wait(const WireWork& work) {
  int millis = 0;
  if (ready_.empty()) {
    TimePoint until = work.deadline;
    for (const Link* link : dialling_) until = std::min(until, link->retry);
    const Duration left = until - steady_clock::now();
    millis = static_cast<int>(std::clamp<int64_t>(
        std::chrono::ceil<std::chrono::milliseconds>(left).count(), 0, INT_MAX));
  }
  std::array<epoll_event, 64> events;
  const int count = epoll_wait(epoll_.get(), events.data(), events.size(), millis);
  bool woken = false;
  for (int i = 0; i < count; ++i) {
    auto* const link = static_cast<Link*>(events[i].data.ptr);
    if (link == nullptr) {
      woken = true;
      continue;
    }
    const uint32_t what = events[i].events;
    if ((what & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) link->ended = true;
    // Under TLS either direction may wait for the other.
    const bool both = link->ended || link->connection.tls();
    if (both || (what & EPOLLIN) != 0) link->readable = true;
    if (both || (what & EPOLLOUT) != 0) link->writable = true;
    Queue(link);
  }
  if (woken) TakeArrivals();
  DialAgain();
}

void SocketLane::DialAgain() {
  if (dialling_.empty()) return;
  const TimePoint now = steady_clock::now();
  std::erase_if(dialling_, [&](Link* link) {
    if (link->retry > now) return false;
    Queue(link);
    return true;
  });
}

void SocketLane::AddAwaited(Awaited* awaited) const {
  const auto add = [awaited](const Link& link) {
    awaited->peers.insert(link.peer);
    if (!awaited->trouble.empty() || link.trouble.empty() || link.state == Link::State::kUp) return;
    awaited->trouble = fmt::format("; the last dial of rank {}: {}", link.peer, link.trouble);
  };
  for (const auto& [key, link] : links_) {
    if (link->awaited) add(*link);
  }
  for (const auto& flow : flows_) {
    // A relay that has passed on all its bytes waits only for its source.
    const bool starved = flow->from != nullptr && flow->link->state == Link::State::kUp &&
                         flow->from->moved < flow->bytes && flow->moved == flow->from->moved;
    if (!flow->done && !starved) add(*flow->link);
  }
}

absl::Status SocketLane::Advance(Link* link) {
  if (link->state != Link::State::kUp) REFITD_RETURN_IF_ERROR(Establish(link));
  if (link->state != Link::State::kUp) return absl::OkStatus();
  REFITD_RETURN_IF_ERROR(Receive(link));
  return Send(link);
}

absl::Status SocketLane::BrokenLink(const Link& link, const absl::Status& why) {
  broken_peer_ = link.peer;
  return why;
}

// ---- connections come up ----

void SocketLane::TakeArrivals() {
  uint64_t count = 0;
  (void)!read(wake_.get(), &count, sizeof(count));
  if (shared_.addresses.empty()) return;
  std::vector<GreetedConnection> arrivals;
  {
    MutexLock lock(&mutex_);
    arrivals.swap(arrivals_);
  }
  for (GreetedConnection& arrival : arrivals) {
    if (!MayArrive(arrival)) continue;
    Link* const link = LinkTo(arrival.from, arrival.stream);
    Reset(link);
    link->connection = std::move(arrival.connection);
    link->state = Link::State::kAnswering;
    link->greeting = GreetingFor(*link, GreetingKind::kWelcome);
    if (Adopt(link)) Queue(link);
  }
}

// Whether the connection may be a link of this communicator; if not, the caller drops it, which
// closes it. The control plane told each rank's identity. The listener has checked that `from` is a
// rank below this rank. A peer that dials again replaces its link, but not once a frame has passed
// over the link, since that frame would be lost.
bool SocketLane::MayArrive(const GreetedConnection& arrival) const {
  const SocketAddress& expected = shared_.addresses[arrival.from];
  if (arrival.identity != expected.identity) {
    shared_.listener->options().log(
        fmt::format("data plane: \"{}\" is dropped: it has the token of rank {} of communicator "
                    "{}, which is \"{}\"",
                    arrival.identity, arrival.from, shared_.id, expected.identity));
    return false;
  }
  if (arrival.stream >= streams()) return false;
  const auto link = links_.find({arrival.from, arrival.stream});
  return link == links_.end() || !link->second->used;
}

void SocketLane::Reset(Link* link) {
  link->connection = Connection();
  link->state = Link::State::kAbsent;
  link->readable = link->writable = link->ended = false;
  link->greeted = 0;
  link->busy = Duration(0);
}

// Watches the connection. False: the kernel can't.
bool SocketLane::Adopt(Link* link) {
  link->readable = link->writable = true;
  if (Watch(epoll_.get(), link->connection.fd(), kLinkEvents, link)) return true;
  Reset(link);
  return false;
}

GreetingBytes SocketLane::GreetingFor(const Link& link, GreetingKind kind) const {
  return EncodeGreeting({kind, shared_.id.value(), static_cast<uint32_t>(shared_.rank),
                         static_cast<uint32_t>(link.peer), static_cast<uint32_t>(link.stream),
                         shared_.addresses[link.peer].token});
}

absl::Status SocketLane::Dial(Link* link) {
  const SocketAddress& address = shared_.addresses[link->peer];
  absl::StatusOr<UniqueFd> fd = DialTcp(shared_.address.host, address.host, address.port);
  if (!fd.ok()) return Unreachable(*link, fd.status());
  link->connection = Connection(*std::move(fd), nullptr);
  link->state = Link::State::kConnecting;
  if (!Adopt(link)) return Unreachable(*link, absl::UnavailableError("epoll has no room"));
  link->writable = false;  // until the kernel tells that the dial has ended
  return absl::OkStatus();
}

absl::Status SocketLane::Unreachable(const Link& link, const absl::Status& why) const {
  const SocketAddress& address = shared_.addresses[link.peer];
  return AboutRanks(Error(StatusCode::kUnavailable, "communicator {}: rank {} at {} port {}: {}",
                          shared_.id, link.peer, address.host.Text(), address.port, Message(why)),
                    {link.peer});
}

// The other end may have had too many strangers, so the link is dialled again.
void SocketLane::DialLater(Link* link, const absl::Status& why) {
  Reset(link);
  link->trouble = Message(why);
  link->retry = steady_clock::now() + kRedial;
  dialling_.push_back(link);
}

absl::Status SocketLane::CheckIdentity(const Link& link) const {
  if (shared_.tls == nullptr) return absl::OkStatus();
  const std::string identity = link.connection.PeerIdentity();
  const std::string& expected = shared_.addresses[link.peer].identity;
  if (identity != expected) {
    return Unreachable(link, absl::UnauthenticatedError(
                                 fmt::format("it is \"{}\", not \"{}\"", identity, expected)));
  }
  const std::string& pattern = shared_.listener->options().identities;
  if (pattern.empty() || MatchesIdentity(pattern, identity)) return absl::OkStatus();
  return Unreachable(link, absl::UnauthenticatedError(fmt::format(
                               "it is \"{}\", which does not match \"{}\"", identity, pattern)));
}

absl::Status SocketLane::Establish(Link* link) {
  for (;;) {
    const Link::State before = link->state;
    const absl::StatusOr<bool> went = Step(link);
    if (!went.ok()) {
      if (shared_.rank > link->peer) {
        Reset(link);  // its peer dials again
        return absl::OkStatus();
      }
      // A connection that just ends may be dialled again; all else has a cause that stays.
      if (went.status().code() != StatusCode::kAborted) return went.status();
      DialLater(link, went.status());
      return absl::OkStatus();
    }
    if (!*went || link->state == before) return absl::OkStatus();
    if (link->state == Link::State::kUp) {
      if (link->awaited) --pending_;
      link->awaited = false;
      link->trouble.clear();
      return absl::OkStatus();
    }
  }
}

// Takes the link one step towards kUp. False: the link waits for the other end. ABORTED: the
// connection ended without a reason.
absl::StatusOr<bool> SocketLane::Step(Link* link) {
  switch (link->state) {
    case Link::State::kAbsent:
      if (shared_.rank > link->peer || link->retry > steady_clock::now()) return false;
      REFITD_RETURN_IF_ERROR(Dial(link));
      return true;
    case Link::State::kConnecting: {
      if (!link->writable) return false;
      const absl::Status outcome = DialOutcome(link->connection.fd());
      if (!outcome.ok()) return Unreachable(*link, outcome);
      if (shared_.tls != nullptr) REFITD_RETURN_IF_ERROR(Encrypt(link));
      link->state = Link::State::kEncrypting;
      return true;
    }
    case Link::State::kEncrypting: {
      const absl::StatusOr<bool> done = link->connection.Handshake();
      if (!done.ok()) return Ended(*link, done.status());
      if (!*done) return false;
      REFITD_RETURN_IF_ERROR(CheckIdentity(*link));
      link->greeting = GreetingFor(*link, GreetingKind::kHello);
      link->greeted = 0;
      link->state = Link::State::kGreeting;
      return true;
    }
    case Link::State::kGreeting:
    case Link::State::kAnswering: {
      REFITD_ASSIGN_OR_RETURN(const bool sent, SendGreeting(link));
      if (!sent) return false;
      link->greeted = 0;
      link->state = link->state == Link::State::kGreeting ? Link::State::kAsking : Link::State::kUp;
      return true;
    }
    case Link::State::kAsking: {
      REFITD_ASSIGN_OR_RETURN(const bool heard, ReadWelcome(link));
      if (heard) link->state = Link::State::kUp;
      return heard;
    }
    case Link::State::kUp:
      return false;
  }
  return false;
}

absl::Status SocketLane::Encrypt(Link* link) {
  absl::StatusOr<SslPtr> ssl = shared_.tls->Dial(link->connection.fd());
  if (!ssl.ok()) return Unreachable(*link, ssl.status());
  link->connection.StartTls(*std::move(ssl));
  return absl::OkStatus();
}

// The error for a connection that ended before it was up. TLS tells the reason; a connection that
// was just closed tells none.
absl::Status SocketLane::Ended(const Link& link, const absl::Status& why) const {
  if (why.code() == StatusCode::kUnauthenticated) return Unreachable(link, why);
  return absl::AbortedError(Message(why));
}

absl::StatusOr<bool> SocketLane::SendGreeting(Link* link) {
  while (link->greeted < kGreetingBytes) {
    const absl::StatusOr<int64_t> n =
        link->connection.Write(std::span(link->greeting).subspan(link->greeted), {});
    if (!n.ok()) return Ended(*link, n.status());
    if (*n == 0) return false;
    link->greeted += static_cast<size_t>(*n);
  }
  return true;
}

absl::StatusOr<bool> SocketLane::ReadWelcome(Link* link) {
  while (link->greeted < kGreetingBytes) {
    const absl::StatusOr<int64_t> n =
        link->connection.Read(link->greeting.data() + link->greeted,
                              static_cast<int64_t>(kGreetingBytes - link->greeted));
    if (!n.ok()) return Ended(*link, n.status());
    if (*n == 0) return false;
    link->greeted += static_cast<size_t>(*n);
  }
  const std::optional<Greeting> answer = DecodeGreeting(link->greeting);
  if (answer.has_value() && answer->kind == GreetingKind::kUnknown) {
    return Unreachable(*link, absl::UnavailableError(
                                  "it has no such communicator: it closed it, or its address is of "
                                  "another communicator"));
  }
  if (!answer.has_value() || answer->kind != GreetingKind::kWelcome ||
      answer->communicator != shared_.id.value() ||
      answer->from != static_cast<uint32_t>(link->peer) ||
      answer->to != static_cast<uint32_t>(shared_.rank) ||
      answer->stream != static_cast<uint32_t>(link->stream) ||
      !SameToken(answer->token, shared_.address.token)) {
    return Unreachable(*link, absl::UnauthenticatedError("its answer is not that of the rank"));
  }
  return true;
}

// ---- bytes leave ----

absl::Status SocketLane::Send(Link* link) {
  for (int64_t budget = kTurnBytes; link->writable;) {
    const bool frame_left = link->out_sent < kFrameBytes;
    Flow* const flow = link->send;
    const bool in_payload = flow != nullptr && flow->started && flow->moved < flow->bytes;
    if (!frame_left && !in_payload && !NextFrame(link)) return absl::OkStatus();
    const std::span<const char> head = std::span(link->out).subspan(link->out_sent);
    std::span<const char> body;
    if (link->send != nullptr && link->send->started && !link->ack_going) {
      body = NextBytes(*link->send);
    }
    if (head.empty() && body.empty()) return absl::OkStatus();  // a relay without bytes
    link->used = true;
    const absl::StatusOr<int64_t> n = link->connection.Write(head, body);
    if (!n.ok()) return BrokenLink(*link, n.status());
    if (*n == 0) {
      link->writable = false;
      return absl::OkStatus();
    }
    // The kernel takes the remaining bytes after its next event.
    const bool whole = *n == static_cast<int64_t>(head.size() + body.size());
    if (!whole && !link->connection.tls() && !link->ended) link->writable = false;
    Sent(link, *n);
    budget -= *n;
    if (budget > 0) continue;
    Queue(link);
    return absl::OkStatus();
  }
  return absl::OkStatus();
}

// Chooses the frame to send: an acknowledgement first. A flow that passes bytes on begins when some
// have come, or, if it has no bytes, when the frame has come. False: there is no frame to send.
bool SocketLane::NextFrame(Link* link) {
  Flow* const flow = link->send;
  if (link->ack_due) {
    link->ack_due = false;
    link->ack_going = true;
    link->out = EncodeFrame({FrameKind::kAck, link->receive->frame.seq, 0, 0});
  } else if (flow != nullptr && !flow->started &&
             (flow->from == nullptr || flow->from->moved > 0 ||
              (flow->bytes == 0 && flow->from->started))) {
    flow->started = true;
    link->out = EncodeFrame(flow->frame);
  } else {
    return false;
  }
  link->out_sent = 0;
  return true;
}

// The bytes that `flow` can send now, as far as they are contiguous.
std::span<const char> SocketLane::NextBytes(const Flow& flow) const {
  const int64_t there = flow.from == nullptr ? flow.bytes : flow.from->moved;
  if (there == flow.moved) return {};
  const Stretch stretch =
      StretchAt(flow.moved, static_cast<int64_t>(flow.frame.bytes), flow.link->stream, streams());
  return {flow.data + stretch.offset,
          static_cast<size_t>(std::min(stretch.bytes, there - flow.moved))};
}

void SocketLane::Sent(Link* link, int64_t bytes) {
  const auto of_frame =
      std::min<int64_t>(bytes, static_cast<int64_t>(kFrameBytes - link->out_sent));
  link->out_sent += static_cast<size_t>(of_frame);
  if (bytes > of_frame) {
    link->send->moved += bytes - of_frame;
    shared_.count(bytes - of_frame, 0);
  }
  if (link->ack_going && link->out_sent == kFrameBytes) {
    link->ack_going = false;
    Finish(link->receive);
  }
}

void SocketLane::Finish(Flow* flow) {
  REFITD_CHECK(!flow->done && pending_ > 0);
  flow->done = true;
  --pending_;
}

// ---- bytes come ----

absl::Status SocketLane::Receive(Link* link) {
  int64_t portion = link->receive == nullptr ? kTurnBytes : link->receive->portion;
  while (link->readable) {
    const Flow* const flow = link->receive;
    absl::StatusOr<bool> more = false;
    if (flow != nullptr && flow->started && flow->moved < flow->bytes) {
      more = ReceivePayload(link, &portion);
    } else if ((flow != nullptr && !flow->started) ||
               (link->send != nullptr && !link->send->done)) {
      more = ReceiveFrame(link);
    }
    if (!more.ok()) return more.status();
    if (!*more) return absl::OkStatus();
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> SocketLane::ReceivePayload(Link* link, int64_t* portion) {
  Flow* const flow = link->receive;
  const Stretch stretch =
      StretchAt(flow->moved, static_cast<int64_t>(flow->frame.bytes), link->stream, streams());
  const int64_t wanted = std::min({stretch.bytes, flow->bytes - flow->moved, *portion});
  const absl::StatusOr<int64_t> n = link->connection.Read(flow->data + stretch.offset, wanted);
  if (!n.ok()) return BrokenLink(*link, n.status());
  // A short read has emptied the socket; more bytes are another event.
  if (*n == 0 || (*n < wanted && !link->connection.tls() && !link->ended)) link->readable = false;
  if (*n == 0) return false;
  flow->moved += *n;
  shared_.count(0, *n);
  if (flow->relay != nullptr) Queue(flow->relay->link);
  if (flow->moved == flow->bytes) link->ack_due = true;
  *portion -= *n;
  if (*portion > 0) return true;
  Queue(link);
  return false;
}

absl::StatusOr<bool> SocketLane::ReceiveFrame(Link* link) {
  link->used = true;
  const auto wanted = static_cast<int64_t>(kFrameBytes - link->in_bytes);
  const absl::StatusOr<int64_t> n = link->connection.Read(link->in.data() + link->in_bytes, wanted);
  if (!n.ok()) return BrokenLink(*link, n.status());
  if (*n == 0) {
    link->readable = false;
    return false;
  }
  link->in_bytes += static_cast<size_t>(*n);
  if (link->in_bytes < kFrameBytes) return true;
  link->in_bytes = 0;
  const std::optional<Frame> frame = DecodeFrame(link->in);
  if (!frame.has_value()) {
    return BrokenLink(*link, absl::UnavailableError("what came is no frame"));
  }
  REFITD_RETURN_IF_ERROR(TakeFrame(link, *frame));
  return true;
}

absl::Status SocketLane::TakeFrame(Link* link, const Frame& frame) {
  Flow* const send = link->send;
  Flow* const receive = link->receive;
  if (frame.kind == FrameKind::kAck) {
    const bool sent = send != nullptr && send->started && !send->done &&
                      send->moved == send->bytes && link->out_sent == kFrameBytes;
    if (!sent || frame.seq != send->frame.seq) {
      return BrokenLink(*link, absl::UnavailableError("it acknowledges what it was not sent"));
    }
    Finish(send);
    return absl::OkStatus();
  }
  const bool expected = receive != nullptr && !receive->started;
  if (expected && frame == receive->frame) {
    receive->started = true;
    if (receive->bytes > 0) return absl::OkStatus();
    link->ack_due = true;
    if (receive->relay != nullptr) Queue(receive->relay->link);
    return absl::OkStatus();
  }
  return AboutRanks(
      Error(StatusCode::kFailedPrecondition,
            "communicator {}: rank {} is at {}, this rank {} at {}", shared_.id, link->peer,
            Describe(frame), shared_.rank, Describe(expected ? receive->frame : send->frame)),
      {link->peer});
}

}  // namespace refitd
