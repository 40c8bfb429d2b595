#include "transport/sockets/socket_wire.h"

#include <utility>

#include "transport/base/mutex.h"
#include "transport/base/status.h"
#include "transport/sockets/communicator.h"
#include "transport/sockets/listener.h"
#include "transport/wire_communicators.h"

namespace refitd {
namespace {

static_assert(kSocketAddressFixedBytes + kMaxWireIdentityBytes <= kMaxWireAddressBytes);

class SocketWire final : public CommunicatorWire {
 public:
  SocketWire(int streams, WireListener::Options listening, std::unique_ptr<TlsContexts> tls)
      : CommunicatorWire("refitd-wire"),
        streams_(streams),
        listening_(std::move(listening)),
        tls_(std::move(tls)) {}
  ~SocketWire() override { CloseAll(); }

  absl::StatusOr<std::string> Open(CommunicatorId id, int rank, int size) override {
    REFITD_ASSIGN_OR_RETURN(const std::shared_ptr<WireListener> listener, Listen());
    return OpenCommunicator(id, rank, size, fmt::format("refitd-wire-{}", id.value() % 1000), [&] {
      return std::make_shared<SocketCommunicator>(id, rank, size, streams_, listener, tls_.get(),
                                                  totals());
    });
  }

 private:
  // The daemon listens while a communicator is open. The listener is destroyed under the mutex, so
  // that its port is free when another is made.
  absl::StatusOr<std::shared_ptr<WireListener>> Listen() {
    MutexLock lock(&mutex_);
    if (listener_ == nullptr) {
      REFITD_ASSIGN_OR_RETURN(listener_, WireListener::Start(listening_, tls_.get()));
    }
    ++users_;
    return std::shared_ptr<WireListener>(listener_.get(), [this](WireListener*) {
      MutexLock release(&mutex_);
      if (--users_ == 0) listener_ = nullptr;
    });
  }

  const int streams_;
  const WireListener::Options listening_;
  const std::unique_ptr<TlsContexts> tls_;  // null: in the clear
  Mutex mutex_;
  std::unique_ptr<WireListener> listener_ ABSL_GUARDED_BY(mutex_);  // null: nothing listens
  int users_ ABSL_GUARDED_BY(mutex_) = 0;                           // communicators
};

}  // namespace

absl::StatusOr<std::unique_ptr<Wire>> MakeSocketWire(SocketWireOptions options) {
  if (options.streams < 1 || options.streams > kMaxWireStreams) {
    return Error(absl::StatusCode::kInvalidArgument,
                 "{} connections between two ranks, want 1 to {}", options.streams,
                 kMaxWireStreams);
  }
  WireListener::Options listening;
  REFITD_ASSIGN_OR_RETURN(listening.host, FindHostAddress(options.interface, options.address));
  listening.port = options.port;
  listening.identities = options.identities;
  listening.log = options.log != nullptr ? std::move(options.log) : [](const std::string&) {};
  std::unique_ptr<TlsContexts> tls;
  if (options.certificates != nullptr) {
    tls = std::make_unique<TlsContexts>(std::move(options.certificates));
  }
  return std::unique_ptr<Wire>(
      std::make_unique<SocketWire>(options.streams, std::move(listening), std::move(tls)));
}

}  // namespace refitd
