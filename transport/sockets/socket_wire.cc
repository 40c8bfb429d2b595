#include "transport/sockets/socket_wire.h"

#include <utility>

#include "transport/base/status.h"
#include "transport/sockets/epoch.h"
#include "transport/sockets/listener.h"
#include "transport/wire_epochs.h"

namespace refitd {
namespace {

static_assert(kSocketAddressFixedBytes + kMaxWireIdentityBytes <= kMaxWireAddressBytes);

class SocketWire final : public EpochWire {
 public:
  SocketWire(int streams, std::unique_ptr<TlsContexts> tls, std::unique_ptr<WireListener> listener)
      : EpochWire("refitd-wire"),
        streams_(streams),
        tls_(std::move(tls)),
        listener_(std::move(listener)) {}
  ~SocketWire() override { CloseAll(); }

  absl::StatusOr<std::string> Open(EpochId id, int rank, int size) override {
    return OpenEpoch(id, rank, size, fmt::format("refitd-wire-{}", id.value() % 1000), [&] {
      return std::make_shared<SocketEpoch>(id, rank, size, streams_, listener_.get(), tls_.get(),
                                           totals());
    });
  }

 private:
  const int streams_;
  const std::unique_ptr<TlsContexts> tls_;  // null: in the clear
  const std::unique_ptr<WireListener> listener_;
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
  REFITD_ASSIGN_OR_RETURN(auto listener, WireListener::Start(std::move(listening), tls.get()));
  return std::unique_ptr<Wire>(
      std::make_unique<SocketWire>(options.streams, std::move(tls), std::move(listener)));
}

}  // namespace refitd
