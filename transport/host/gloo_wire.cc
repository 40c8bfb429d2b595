#include "transport/host/gloo_wire.h"

#include <gloo/transport/context.h>
#include <gloo/transport/device.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/unbound_buffer.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "transport/base/little_endian.h"
#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/sockets/host_address.h"
#include "transport/wire_epochs.h"

namespace refitd {
namespace {

using absl::StatusCode;
using GlooBuffer = gloo::transport::UnboundBuffer;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// The unit of pipelining along the chain of a broadcast; docs/decisions.md has the measurement.
constexpr int64_t kChunkBytes = int64_t{4} << 20;

// Gloo's limit for its own waits, so long that our deadlines always come first. A pair takes it at
// construction, before any deadline is known, and multiplies it by five while it connects.
constexpr milliseconds kGlooTimeout = std::chrono::hours(100);

// While a connect is being cancelled, pairs are closed again at this interval, because a connecting
// thread may have moved on to another pair after the last time.
constexpr Duration kCallOffInterval = milliseconds(20);
// The number of threads that connect at a time. If more peers than this can't be reached, the cause
// is seldom the peers.
constexpr int kConnectors = 16;

// Slots (Gloo's tags) of each pair. Payload slots have the top bit set.
constexpr uint64_t kHelloSlot = 1;
constexpr uint64_t kHeaderSlot = 2;
constexpr uint64_t kTrailerSlot = 3;
constexpr uint64_t kAckSlot = 4;
constexpr uint64_t kPayloadBit = uint64_t{1} << 63;

constexpr uint64_t kHelloMagic = 0x31304f4c4c454852;   // "RHELLO01"
constexpr uint64_t kHeaderMagic = 0x3130524441454852;  // "RHEADR01"
using Token = std::array<char, 16>;

// Sent by both ends of a new connection. The receiver's token proves that the sender holds the
// address of this epoch and not a stale one whose port was used again. Byte order is the host's, as
// in Gloo's own messages; the magic number shows a difference.
struct Hello {
  uint64_t magic;
  uint64_t epoch;
  uint32_t from;
  uint32_t to;
  Token token;
};
static_assert(sizeof(Hello) == 40 && std::is_trivially_copyable_v<Hello>);

enum class Kind : uint64_t { kBroadcast = 1, kExchange = 2 };

// Precedes each payload. The receiver compares it before it accepts the payload.
struct Header {
  uint64_t magic;
  uint64_t kind;
  uint64_t seq;
  uint64_t root;  // root of a broadcast, else 0
  uint64_t bytes;
};
static_assert(sizeof(Header) == 40 && std::is_trivially_copyable_v<Header>);

uint64_t SplitMix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

// The slot depends on the header, so that ends that disagree use different slots and Gloo moves
// nothing between them. In one slot Gloo would end the process if a payload is longer than the
// receive, and would take a shorter payload as complete.
uint64_t PayloadSlot(const Header& header) {
  uint64_t slot = SplitMix(header.kind);
  for (const uint64_t part : {header.seq, header.root, header.bytes}) slot = SplitMix(slot ^ part);
  return slot | kPayloadBit;
}

std::string KindName(uint64_t kind) {
  if (kind == static_cast<uint64_t>(Kind::kBroadcast)) return "broadcast";
  if (kind == static_cast<uint64_t>(Kind::kExchange)) return "exchange";
  return fmt::format("operation of kind {}", kind);
}

std::string Describe(const Header& header) {
  return fmt::format("{} seq {} of {} bytes{}", KindName(header.kind), header.seq, header.bytes,
                     header.kind == static_cast<uint64_t>(Kind::kBroadcast)
                         ? fmt::format(" from root {}", header.root)
                         : "");
}

// Gloo's messages start with "[file:line] ".
std::string GlooMessage(const std::exception& error) {
  std::string text = error.what();
  if (!text.empty() && text.front() == '[') {
    const size_t end = text.find("] ");
    if (end != std::string::npos) text.erase(0, end + 2);
  }
  while (!text.empty() && (text.back() == ' ' || text.back() == '\n')) text.pop_back();
  return std::string(Shorten(text, 300));
}

// The name of Gloo's own thread.
constexpr char kIoThread[] = "refitd-wire-io";

// ---- Addresses.

// The address that Open returns and that comes back from the network. Little-endian:
//   4 magic "RFW1" | 8 epoch | 4 rank | 4 size | 16 token | 1 family (4 or 6) | 16 ip | 2 x size
//   ports
// ports[p]: where rank `rank` listens for rank p; 0 for itself.
struct WireAddress {
  uint64_t epoch = 0;
  uint32_t rank = 0;
  uint32_t size = 0;
  Token token{};
  HostAddress host;
  std::vector<uint16_t> ports;
};
constexpr std::string_view kAddressMagic = "RFW1";
constexpr std::string_view kSocketMagic = "RFS1";  // of addresses of the wire over sockets
constexpr size_t kAddressFixedBytes = 4 + 8 + 4 + 4 + 16 + 1 + 16;
static_assert(kAddressFixedBytes + 2 * kMaxWireRanks <= kMaxWireAddressBytes);

std::string EncodeAddress(const WireAddress& address) {
  std::string out(kAddressMagic);
  AppendInt(address.epoch, &out);
  AppendInt(address.rank, &out);
  AppendInt(address.size, &out);
  out.append(address.token.data(), address.token.size());
  out.push_back(address.host.family == AF_INET ? 4 : 6);
  out.append(reinterpret_cast<const char*>(address.host.ip.data()), address.host.ip.size());
  for (const uint16_t port : address.ports) AppendInt(port, &out);
  return out;
}

// Decodes the address of rank `rank` of `size`. `rank` and `size` are this side's own and valid.
absl::StatusOr<WireAddress> DecodeAddress(std::string_view in, EpochId epoch, int rank, int size) {
  const auto bad = [&](const std::string& why) {
    return Error(StatusCode::kInvalidArgument, "epoch {}: address of rank {}: {}", epoch, rank,
                 why);
  };
  const size_t expected = kAddressFixedBytes + 2 * static_cast<size_t>(size);
  if (in.size() < kAddressMagic.size() || in.substr(0, kAddressMagic.size()) != kAddressMagic) {
    if (in.substr(0, kSocketMagic.size()) == kSocketMagic) {
      return bad("its daemon uses sockets for the data plane, this one Gloo (data.wire)");
    }
    return bad("not a wire address of this version");
  }
  if (in.size() != expected) {
    return bad(fmt::format("{} bytes, expected {} for {} ranks", in.size(), expected, size));
  }
  in.remove_prefix(kAddressMagic.size());
  WireAddress address;
  address.epoch = TakeInt<uint64_t>(&in);
  if (address.epoch != epoch.value()) return bad(fmt::format("is of epoch {}", address.epoch));
  address.rank = TakeInt<uint32_t>(&in);
  if (address.rank != static_cast<uint32_t>(rank)) {
    return bad(fmt::format("is of rank {}", address.rank));
  }
  address.size = TakeInt<uint32_t>(&in);
  if (address.size != static_cast<uint32_t>(size)) {
    return bad(fmt::format("is for {} ranks, expected {}", address.size, size));
  }
  std::memcpy(address.token.data(), in.data(), address.token.size());
  in.remove_prefix(address.token.size());
  const auto family = TakeInt<uint8_t>(&in);
  if (family != 4 && family != 6) return bad(fmt::format("address family {}", family));
  address.host.family = family == 4 ? AF_INET : AF_INET6;
  std::memcpy(address.host.ip.data(), in.data(), address.host.ip.size());
  in.remove_prefix(address.host.ip.size());
  const std::string unusable = WhyUnusable(address.host);
  if (!unusable.empty()) return bad(fmt::format("{} is {}", address.host.Text(), unusable));
  for (int peer = 0; peer < size; ++peer) {
    address.ports.push_back(TakeInt<uint16_t>(&in));
    if ((address.ports.back() == 0) != (peer == rank)) {
      return bad(fmt::format("port {} for rank {}", address.ports.back(), peer));
    }
  }
  return address;
}

// ---- One end of one communicator.
//
// Only the epoch's thread calls Gloo, with two exceptions: the connector threads, inside
// Pair::connect, and Interrupt, which ends the wait that is in progress.
class GlooEpoch final : public WireEpoch {
 public:
  GlooEpoch(EpochId id, int rank, int size, std::shared_ptr<gloo::transport::Device> device,
            HostAddress host, WireCounters* totals)
      : WireEpoch(id, rank, size, totals), device_(std::move(device)) {
    address_.epoch = id.value();
    address_.rank = static_cast<uint32_t>(rank);
    address_.size = static_cast<uint32_t>(size);
    address_.host = host;
  }

  // Makes the listening sockets.
  absl::StatusOr<std::string> Open() override;

 private:
  // One direction of one peer in one operation. The header, the payload and what follows use one
  // buffer, `payload`, because Gloo wakes only waiters on transfers that have not begun when a
  // connection breaks. The trailer (for a receiver) and the acknowledgement (for a sender) are
  // zero-byte receives on that buffer that have not begun while the payload moves, so the waiter
  // always learns of a break.
  struct Leg {
    int peer = 0;
    Header header{};    // what we send or expect
    Header received{};  // receivers only
    int64_t bytes = 0;
    std::unique_ptr<GlooBuffer> payload;
    std::unique_ptr<GlooBuffer> head;
  };

  absl::Status Connect(const WireWork& work, bool* began) override;
  absl::Status Move(const WireWork& work, bool* began) override {
    return work.broadcast.has_value() ? RunBroadcast(work, began) : RunExchange(work, began);
  }
  void Lose() override { ClosePairs(); }  // tells the peers
  // Destroying the pairs ends their connections in an orderly way: sent bytes still arrive, which
  // Pair::close does not ensure.
  void End() override { context_.reset(); }
  void Interrupt() override {
    MutexLock lock(&mu_);
    wake_.NotifyAll();
    // This runs under the mutex, because the waiting thread takes the mutex before it destroys the
    // buffer.
    if (waiting_ == nullptr) return;
    if (waiting_to_send_) {
      waiting_->abortWaitSend();
    } else {
      waiting_->abortWaitRecv();
    }
  }

  // Hellos by rank; `buffers` has two for each rank, over `theirs` and over `ours`.
  struct Greetings {
    explicit Greetings(int size) : ours(size), theirs(size), buffers(2 * size) {}
    std::vector<Hello> ours;
    std::vector<Hello> theirs;
    std::vector<std::unique_ptr<GlooBuffer>> buffers;
  };
  // What the threads that connect to peers share; guarded by mu_.
  struct Connecting {
    int next = 0;       // the next peer for a thread to take
    std::set<int> now;  // peers to which threads are connecting
    int threads = 0;    // threads that have not ended
    bool stop = false;
    absl::Status status;  // the first failure
  };
  absl::Status ConnectPairs(const std::vector<WireAddress>& addresses, const WireWork& work,
                            Greetings* greetings);
  int TakePeer(Connecting* progress);
  void ConnectInTurn(const std::vector<WireAddress>& addresses, const WireWork& work,
                     Greetings* greetings, Connecting* progress);
  absl::Status AwaitConnected(const WireWork& work, Connecting* progress);
  void CallOff(Connecting* progress);
  absl::Status PostGreeting(int peer, const Token& token, const WireWork& work,
                            Greetings* greetings);
  absl::Status AwaitGreetings(const WireWork& work, Greetings* greetings);
  absl::Status RunBroadcast(const WireWork& work, bool* began);
  absl::Status RunExchange(const WireWork& work, bool* began);

  // Calls Gloo; an exception becomes a status that names `peer`.
  template <typename F>
  absl::Status Guard(int peer, const WireWork& work, F call);
  absl::Status Wait(GlooBuffer* buffer, bool send, int peer, const WireWork& work);
  absl::StatusOr<std::unique_ptr<Leg>> MakeLeg(int peer, bool send, const Header& header,
                                               const MemorySpan& memory, const WireWork& work);
  absl::Status PostSendAll(Leg* leg, const WireWork& work);
  absl::Status AwaitReceived(Leg* leg, const WireWork& work);
  absl::Status Chain(Leg* in, Leg* out, const WireWork& work);
  absl::Status Exchange(const std::vector<std::unique_ptr<Leg>>& receives,
                        const std::vector<std::unique_ptr<Leg>>& sends, const WireWork& work);
  absl::Status PostReceive(Leg* leg, const WireWork& work);
  absl::Status PostSendHeader(Leg* leg, const WireWork& work);
  absl::Status PostSendChunk(Leg* leg, int64_t offset, const WireWork& work);
  absl::Status PostSendTrailer(Leg* leg, const WireWork& work);
  absl::Status AwaitHeader(Leg* leg, const WireWork& work);
  absl::Status AwaitChunk(Leg* leg, int64_t offset, const WireWork& work);
  absl::Status AwaitTrailer(Leg* leg, const WireWork& work);
  absl::Status AwaitSent(Leg* leg, const WireWork& work);
  void ClosePairs();

  // Constant after Open.
  std::shared_ptr<gloo::transport::Device> device_;
  WireAddress address_;
  std::string encoded_address_;
  std::shared_ptr<gloo::transport::Context> context_;  // destroyed by End

  Mutex mu_;
  CondVar wake_;
  GlooBuffer* waiting_ ABSL_GUARDED_BY(mu_) = nullptr;
  bool waiting_to_send_ ABSL_GUARDED_BY(mu_) = false;
};

absl::StatusOr<std::string> GlooEpoch::Open() {
  if (getrandom(address_.token.data(), address_.token.size(), 0) !=
      static_cast<ssize_t>(address_.token.size())) {
    return ErrnoError(errno, "getrandom");
  }
  try {
    context_ = device_->createContext(rank_, size_);
    context_->setTimeout(kGlooTimeout);
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) {
        address_.ports.push_back(0);
        continue;
      }
      const auto& pair = context_->createPair(peer);
      const gloo::transport::tcp::Address address(pair->address().bytes());
      const sockaddr_storage& storage = address.getSockaddr();
      address_.ports.push_back(ntohs(
          storage.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in&>(storage).sin_port
                                       : reinterpret_cast<const sockaddr_in6&>(storage).sin6_port));
    }
  } catch (const std::exception& error) {
    const int number = errno;
    context_.reset();
    return Error(number == EMFILE || number == ENFILE ? StatusCode::kResourceExhausted
                                                      : StatusCode::kUnavailable,
                 "epoch {}: cannot listen on {}: {}", id_, address_.host.Text(),
                 GlooMessage(error));
  }
  encoded_address_ = EncodeAddress(address_);
  return encoded_address_;
}

template <typename F>
absl::Status GlooEpoch::Guard(int peer, const WireWork& work, F call) {
  std::string why;
  try {
    call();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    why = GlooMessage(error);
  } catch (...) {
    why = "unknown exception";
  }
  if (closing()) return Closed();
  if (steady_clock::now() >= work.deadline) {
    return Error(StatusCode::kDeadlineExceeded, "epoch {}: waited {} ms for rank {}", id_,
                 ToMillis(work.timeout), peer);
  }
  return Error(StatusCode::kUnavailable, "epoch {}: rank {}: {}", id_, peer, why);
}

absl::Status GlooEpoch::Wait(GlooBuffer* buffer, bool send, int peer, const WireWork& work) {
  {
    MutexLock lock(&mu_);
    if (closing()) return Closed();
    waiting_ = buffer;
    waiting_to_send_ = send;
  }
  // Rounded up, so that the deadline has passed when Gloo reports a timeout. At least 1 ms, because
  // Gloo does not take 0 or less as a time.
  const auto left = std::chrono::ceil<milliseconds>(work.deadline - steady_clock::now());
  const auto timeout = std::max(left, milliseconds(1));
  bool completed = false;
  const absl::Status status = Guard(peer, work, [&] {
    completed = send ? buffer->waitSend(nullptr, timeout) : buffer->waitRecv(nullptr, timeout);
  });
  {
    MutexLock lock(&mu_);
    waiting_ = nullptr;
  }
  REFITD_RETURN_IF_ERROR(status);
  return completed ? absl::OkStatus() : Closed();  // only Close aborts waits
}

// ---- Connect.

absl::Status GlooEpoch::Connect(const WireWork& work, bool* began) {
  const std::vector<std::string>& encoded = *work.connect;
  if (encoded.size() != static_cast<size_t>(size_)) {
    return Error(StatusCode::kInvalidArgument, "epoch {}: {} addresses for {} ranks", id_,
                 encoded.size(), size_);
  }
  if (encoded[rank_] != encoded_address_) {
    return Error(StatusCode::kInvalidArgument,
                 "epoch {}: the address of rank {} is not what Open returned here", id_, rank_);
  }
  std::vector<WireAddress> addresses;
  for (int peer = 0; peer < size_; ++peer) {
    REFITD_ASSIGN_OR_RETURN(WireAddress address, DecodeAddress(encoded[peer], id_, peer, size_));
    if (address.host.family != address_.host.family) {
      return Error(StatusCode::kInvalidArgument,
                   "epoch {}: address of rank {}: {} is of another family than this daemon's {}",
                   id_, peer, address.host.Text(), address_.host.Text());
    }
    if (peer != rank_ && address.host == address_.host &&
        std::find(address_.ports.begin(), address_.ports.end(), address.ports[rank_]) !=
            address_.ports.end()) {
      return Error(StatusCode::kInvalidArgument,
                   "epoch {}: address of rank {}: {} port {} is this daemon's own", id_, peer,
                   address.host.Text(), address.ports[rank_]);
    }
    addresses.push_back(std::move(address));
  }
  *began = true;
  Greetings greetings(size_);
  absl::Status status = ConnectPairs(addresses, work, &greetings);
  if (status.ok()) status = AwaitGreetings(work, &greetings);
  if (!status.ok()) ClosePairs();  // before the buffers are destroyed
  return status;
}

// Pair::connect blocks without a deadline, so it runs on threads of its own, and closing the pairs
// ends it. Several peers are connected at a time, so that a peer named as not connected is really
// out of reach, and not just waiting for another that is. All ranks connect in one order, so they
// can't deadlock: a rank only ever waits for a peer that comes later in its own order.
absl::Status GlooEpoch::ConnectPairs(const std::vector<WireAddress>& addresses,
                                     const WireWork& work, Greetings* greetings) {
  Connecting progress;
  progress.threads = std::min(size_ - 1, kConnectors);
  std::vector<std::thread> connectors;
  for (int i = std::min(size_ - 1, kConnectors); i > 0; --i) {
    connectors.emplace_back([&] { ConnectInTurn(addresses, work, greetings, &progress); });
  }
  absl::Status status = AwaitConnected(work, &progress);
  CallOff(&progress);
  for (std::thread& connector : connectors) connector.join();
  return status;
}

// The next peer for a thread to connect to. -1: no peer is left, or an earlier failure makes the
// rest useless.
int GlooEpoch::TakePeer(Connecting* progress) {
  MutexLock lock(&mu_);
  while (progress->next < size_ && !progress->stop && progress->status.ok()) {
    const int peer = progress->next++;
    if (peer == rank_) continue;
    progress->now.insert(peer);
    return peer;
  }
  return -1;
}

void GlooEpoch::ConnectInTurn(const std::vector<WireAddress>& addresses, const WireWork& work,
                              Greetings* greetings, Connecting* progress) {
  EnterWireThread("refitd-wire-con");
  for (int peer = TakePeer(progress); peer >= 0; peer = TakePeer(progress)) {
    socklen_t length = 0;
    const sockaddr_storage storage =
        addresses[peer].host.Sockaddr(addresses[peer].ports[rank_], &length);
    absl::Status status = Guard(peer, work, [&] {
      context_->getPair(peer)->connect(gloo::transport::tcp::Address(storage).bytes());
    });
    if (status.ok()) status = PostGreeting(peer, addresses[peer].token, work, greetings);
    MutexLock lock(&mu_);
    progress->now.erase(peer);
    if (progress->status.ok()) progress->status = std::move(status);
    wake_.NotifyAll();
  }
  MutexLock lock(&mu_);
  --progress->threads;
  wake_.NotifyAll();
}

absl::Status GlooEpoch::AwaitConnected(const WireWork& work, Connecting* progress) {
  MutexLock lock(&mu_);
  bool late = false;
  while (progress->threads > 0 && progress->status.ok() && !closing() && !late) {
    late = !wake_.WaitUntil(&mu_, work.deadline);
  }
  progress->stop = true;
  if (closing()) return Closed();
  if (!late || progress->threads == 0 || !progress->status.ok()) return progress->status;
  std::string missing;
  for (const int peer : progress->now) {
    missing += fmt::format("{}rank {}", missing.empty() ? "" : ", ", peer);
  }
  return Error(StatusCode::kDeadlineExceeded, "epoch {}: waited {} ms for {} to connect", id_,
               ToMillis(work.timeout), missing);
}

// Closes pairs until every thread that connects has ended.
void GlooEpoch::CallOff(Connecting* progress) {
  for (;;) {
    {
      MutexLock lock(&mu_);
      if (progress->threads == 0) return;
    }
    ClosePairs();
    MutexLock lock(&mu_);
    if (progress->threads > 0) wake_.WaitUntil(&mu_, steady_clock::now() + kCallOffInterval);
  }
}

// Called as soon as the pair is connected, so that a rank that waits for a greeting waits for that
// peer itself, and not for a third peer that this one can't reach.
absl::Status GlooEpoch::PostGreeting(int peer, const Token& token, const WireWork& work,
                                     Greetings* greetings) {
  greetings->ours[peer] = Hello{kHelloMagic, id_.value(), static_cast<uint32_t>(rank_),
                                static_cast<uint32_t>(peer), token};
  return Guard(peer, work, [&] {
    auto& in = greetings->buffers[2 * peer] =
        context_->createUnboundBuffer(&greetings->theirs[peer], sizeof(Hello));
    auto& out = greetings->buffers[2 * peer + 1] =
        context_->createUnboundBuffer(&greetings->ours[peer], sizeof(Hello));
    in->recv(peer, kHelloSlot);
    out->send(peer, kHelloSlot);
  });
}

absl::Status GlooEpoch::AwaitGreetings(const WireWork& work, Greetings* greetings) {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    REFITD_RETURN_IF_ERROR(Wait(greetings->buffers[2 * peer].get(), false, peer, work));
    REFITD_RETURN_IF_ERROR(Wait(greetings->buffers[2 * peer + 1].get(), true, peer, work));
    const Hello& theirs = greetings->theirs[peer];
    const Hello expected{kHelloMagic, id_.value(), static_cast<uint32_t>(peer),
                         static_cast<uint32_t>(rank_), address_.token};
    if (std::memcmp(&theirs, &expected, sizeof(Hello)) == 0) continue;
    return Error(StatusCode::kUnavailable,
                 "epoch {}: who connected as rank {} is of another epoch (its greeting says epoch "
                 "{}, rank {} to rank {})",
                 id_, peer, theirs.epoch, theirs.from, theirs.to);
  }
  return absl::OkStatus();
}

// After this, Gloo's thread touches no memory of this epoch.
void GlooEpoch::ClosePairs() {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    try {
      context_->getPair(peer)->close();
    } catch (const std::exception&) {  // closed already
    }
  }
}

// ---- Legs.

absl::StatusOr<std::unique_ptr<GlooEpoch::Leg>> GlooEpoch::MakeLeg(int peer, bool send,
                                                                   const Header& header,
                                                                   const MemorySpan& memory,
                                                                   const WireWork& work) {
  auto leg = std::make_unique<Leg>();
  leg->peer = peer;
  leg->header = header;
  leg->bytes = memory.bytes;
  REFITD_RETURN_IF_ERROR(Guard(peer, work, [&] {
    // Gloo wants some address even where it moves nothing.
    void* const data = memory.data != nullptr ? static_cast<void*>(memory.data) : leg.get();
    leg->payload = context_->createUnboundBuffer(data, static_cast<size_t>(memory.bytes));
    leg->head = context_->createUnboundBuffer(send ? &leg->header : &leg->received, sizeof(Header));
  }));
  return leg;
}

absl::Status GlooEpoch::PostReceive(Leg* leg, const WireWork& work) {
  return Guard(leg->peer, work, [&] {
    leg->head->recv(leg->peer, kHeaderSlot);
    const uint64_t slot = PayloadSlot(leg->header);
    for (int64_t offset = 0; offset < leg->bytes; offset += kChunkBytes) {
      leg->payload->recv(leg->peer, slot, offset, std::min(kChunkBytes, leg->bytes - offset));
    }
    leg->payload->recv(leg->peer, kTrailerSlot, 0, 0);
  });
}

absl::Status GlooEpoch::PostSendHeader(Leg* leg, const WireWork& work) {
  return Guard(leg->peer, work, [&] {
    leg->payload->recv(leg->peer, kAckSlot, 0, 0);
    leg->head->send(leg->peer, kHeaderSlot);
  });
}

absl::Status GlooEpoch::PostSendChunk(Leg* leg, int64_t offset, const WireWork& work) {
  return Guard(leg->peer, work, [&] {
    leg->payload->send(leg->peer, PayloadSlot(leg->header), offset,
                       std::min(kChunkBytes, leg->bytes - offset));
  });
}

absl::Status GlooEpoch::PostSendTrailer(Leg* leg, const WireWork& work) {
  return Guard(leg->peer, work, [&] { leg->payload->send(leg->peer, kTrailerSlot, 0, 0); });
}

absl::Status GlooEpoch::AwaitHeader(Leg* leg, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(Wait(leg->head.get(), false, leg->peer, work));
  if (std::memcmp(&leg->received, &leg->header, sizeof(Header)) == 0) return absl::OkStatus();
  return Error(StatusCode::kFailedPrecondition, "epoch {}: rank {} is at {}, this rank {} at {}",
               id_, leg->peer, Describe(leg->received), rank_, Describe(leg->header));
}

absl::Status GlooEpoch::AwaitChunk(Leg* leg, int64_t offset, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(Wait(leg->payload.get(), false, leg->peer, work));
  Count(0, std::min(kChunkBytes, leg->bytes - offset));
  return absl::OkStatus();
}

// Waits for the trailer, then tells the sender that all bytes have come.
absl::Status GlooEpoch::AwaitTrailer(Leg* leg, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(Wait(leg->payload.get(), false, leg->peer, work));
  REFITD_RETURN_IF_ERROR(
      Guard(leg->peer, work, [&] { leg->payload->send(leg->peer, kAckSlot, 0, 0); }));
  return Wait(leg->payload.get(), true, leg->peer, work);
}

absl::Status GlooEpoch::AwaitSent(Leg* leg, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(Wait(leg->head.get(), true, leg->peer, work));
  for (int64_t offset = 0; offset < leg->bytes; offset += kChunkBytes) {
    REFITD_RETURN_IF_ERROR(Wait(leg->payload.get(), true, leg->peer, work));
    Count(std::min(kChunkBytes, leg->bytes - offset), 0);
  }
  REFITD_RETURN_IF_ERROR(Wait(leg->payload.get(), true, leg->peer, work));  // trailer
  return Wait(leg->payload.get(), false, leg->peer, work);                  // acknowledgement
}

// ---- Operations.

absl::Status GlooEpoch::PostSendAll(Leg* leg, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(PostSendHeader(leg, work));
  for (int64_t offset = 0; offset < leg->bytes; offset += kChunkBytes) {
    REFITD_RETURN_IF_ERROR(PostSendChunk(leg, offset, work));
  }
  return PostSendTrailer(leg, work);
}

absl::Status GlooEpoch::AwaitReceived(Leg* leg, const WireWork& work) {
  REFITD_RETURN_IF_ERROR(AwaitHeader(leg, work));
  for (int64_t offset = 0; offset < leg->bytes; offset += kChunkBytes) {
    REFITD_RETURN_IF_ERROR(AwaitChunk(leg, offset, work));
  }
  return AwaitTrailer(leg, work);
}

// The ranks form a chain that starts at the root; each passes a chunk on when the chunk has come.
// So every link carries the bytes once, and each further link starts one chunk later.
absl::Status GlooEpoch::RunBroadcast(const WireWork& work, bool* began) {
  const WireBroadcast& broadcast = *work.broadcast;
  REFITD_RETURN_IF_ERROR(CheckMove(work));
  *began = true;
  const Header header{kHeaderMagic, static_cast<uint64_t>(Kind::kBroadcast), broadcast.seq.value(),
                      static_cast<uint64_t>(broadcast.root),
                      static_cast<uint64_t>(broadcast.memory.bytes)};
  const int position = (rank_ - broadcast.root + size_) % size_;
  std::unique_ptr<Leg> in;
  std::unique_ptr<Leg> out;
  if (position > 0) {
    REFITD_ASSIGN_OR_RETURN(
        in, MakeLeg((rank_ + size_ - 1) % size_, false, header, broadcast.memory, work));
  }
  if (position + 1 < size_) {
    REFITD_ASSIGN_OR_RETURN(out,
                            MakeLeg((rank_ + 1) % size_, true, header, broadcast.memory, work));
  }
  absl::Status status = Chain(in.get(), out.get(), work);
  if (!status.ok()) ClosePairs();  // before the buffers are destroyed
  return status;
}

absl::Status GlooEpoch::Chain(Leg* in, Leg* out, const WireWork& work) {
  if (in == nullptr) {
    if (out == nullptr) return absl::OkStatus();  // alone
    REFITD_RETURN_IF_ERROR(PostSendAll(out, work));
    return AwaitSent(out, work);
  }
  REFITD_RETURN_IF_ERROR(PostReceive(in, work));
  if (out == nullptr) return AwaitReceived(in, work);
  REFITD_RETURN_IF_ERROR(PostSendHeader(out, work));
  REFITD_RETURN_IF_ERROR(AwaitHeader(in, work));
  for (int64_t offset = 0; offset < in->bytes; offset += kChunkBytes) {
    REFITD_RETURN_IF_ERROR(AwaitChunk(in, offset, work));
    REFITD_RETURN_IF_ERROR(PostSendChunk(out, offset, work));
  }
  REFITD_RETURN_IF_ERROR(PostSendTrailer(out, work));
  REFITD_RETURN_IF_ERROR(AwaitTrailer(in, work));
  return AwaitSent(out, work);
}

absl::Status GlooEpoch::RunExchange(const WireWork& work, bool* began) {
  REFITD_RETURN_IF_ERROR(CheckMove(work));
  const WireExchange& exchange = *work.exchange;
  *began = true;
  std::vector<std::unique_ptr<Leg>> receives;
  std::vector<std::unique_ptr<Leg>> sends;
  for (const auto* legs : {&exchange.receives, &exchange.sends}) {
    const bool send = legs == &exchange.sends;
    for (const WireExchange::Leg& leg : *legs) {
      const Header header{kHeaderMagic, static_cast<uint64_t>(Kind::kExchange),
                          exchange.seq.value(), 0, static_cast<uint64_t>(leg.memory.bytes)};
      REFITD_ASSIGN_OR_RETURN(auto made, MakeLeg(leg.peer, send, header, leg.memory, work));
      (send ? sends : receives).push_back(std::move(made));
    }
  }
  absl::Status status = Exchange(receives, sends, work);
  if (!status.ok()) ClosePairs();  // before the buffers are destroyed
  return status;
}

// All transfers are posted before the first wait, so no order of the waits can deadlock.
absl::Status GlooEpoch::Exchange(const std::vector<std::unique_ptr<Leg>>& receives,
                                 const std::vector<std::unique_ptr<Leg>>& sends,
                                 const WireWork& work) {
  for (const auto& leg : receives) REFITD_RETURN_IF_ERROR(PostReceive(leg.get(), work));
  for (const auto& leg : sends) REFITD_RETURN_IF_ERROR(PostSendAll(leg.get(), work));
  for (const auto& leg : receives) REFITD_RETURN_IF_ERROR(AwaitReceived(leg.get(), work));
  for (const auto& leg : sends) REFITD_RETURN_IF_ERROR(AwaitSent(leg.get(), work));
  return absl::OkStatus();
}

// ---- The wire.

class GlooWire final : public EpochWire {
 public:
  GlooWire(std::shared_ptr<gloo::transport::Device> device, HostAddress host)
      : EpochWire("refitd-wire"), host_(host), device_(std::move(device)) {}
  ~GlooWire() override { CloseAll(); }

  absl::StatusOr<std::string> Open(EpochId id, int rank, int size) override {
    return OpenEpoch(id, rank, size, fmt::format("refitd-wire-{}", id.value() % 1000), [&] {
      return std::make_shared<GlooEpoch>(id, rank, size, device_, host_, totals());
    });
  }

 private:
  const HostAddress host_;
  const std::shared_ptr<gloo::transport::Device> device_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> MakeGlooWire(const GlooWireOptions& options) {
  REFITD_ASSIGN_OR_RETURN(const HostAddress host,
                          FindHostAddress(options.interface, options.address));
  std::shared_ptr<gloo::transport::Device> device;
  absl::Status status;
  // Gloo's thread inherits signal mask and name from the thread that makes it.
  std::thread([&] {
    EnterWireThread(kIoThread);
    try {
      gloo::transport::tcp::attr attr;
      attr.hostname = host.Text();
      device = gloo::transport::tcp::CreateDevice(attr);
    } catch (const std::exception& error) {
      status =
          Error(StatusCode::kUnavailable, "Gloo device on {}: {}", host.Text(), GlooMessage(error));
    }
  }).join();
  REFITD_RETURN_IF_ERROR(status);
  return std::unique_ptr<Wire>(std::make_unique<GlooWire>(std::move(device), host));
}

}  // namespace refitd

// Replaces the C library's function. Gloo calls it for each connection that it accepts. If the peer
// has reset the connection by then (it was killed, or gave the epoch up, while connecting), the
// call fails, and Gloo throws on its own thread, which ends the process. This function then gives
// an empty address instead: Gloo finds the connection closed when it reads, which is an error of
// that connection only.
extern "C" int getpeername(int fd, sockaddr* address, socklen_t* length) noexcept {
  const auto result = static_cast<int>(syscall(SYS_getpeername, fd, address, length));
  if (result == 0 || errno != ENOTCONN) return result;
  char thread[16] = {};
  if (pthread_getname_np(pthread_self(), thread, sizeof(thread)) != 0 ||
      std::strcmp(thread, refitd::kIoThread) != 0 || *length < sizeof(sockaddr_in)) {
    errno = ENOTCONN;
    return result;
  }
  sockaddr_in nobody{};
  nobody.sin_family = AF_INET;
  std::memcpy(address, &nobody, sizeof(nobody));
  *length = sizeof(nobody);
  return 0;
}
