#include "transport/host/gloo_baseline.h"

#include <gloo/broadcast.h>
#include <gloo/context.h>
#include <gloo/transport/context.h>
#include <gloo/transport/pair.h>
#include <gloo/transport/tcp/device.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <exception>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

using absl::StatusCode;
using std::chrono::milliseconds;

// The most bytes that a peer may make this process allocate.
constexpr size_t kMaxAddressBytes = 64 * 1024;

class Context : public gloo::Context {
 public:
  using gloo::Context::Context;
  void Set(std::shared_ptr<gloo::transport::Device> device,
           std::shared_ptr<gloo::transport::Context> context) {
    device_ = std::move(device);
    transportContext_ = std::move(context);
  }
};

class Baseline : public GlooBaseline {
 public:
  explicit Baseline(std::shared_ptr<Context> context) : context_(std::move(context)) {}

  absl::Status Broadcast(void* data, int64_t bytes, int root, Duration timeout) override {
    try {
      gloo::BroadcastOptions options(context_);
      options.setOutput(static_cast<char*>(data), static_cast<size_t>(bytes));
      options.setRoot(root);
      options.setTimeout(std::chrono::ceil<milliseconds>(timeout));
      gloo::broadcast(options);
      return absl::OkStatus();
    } catch (const std::exception& error) {
      return Error(StatusCode::kUnavailable, "gloo::broadcast: {}", error.what());
    }
  }

 private:
  std::shared_ptr<Context> context_;
};

bool Transfer(int fd, char* data, size_t bytes, bool out) {
  for (size_t done = 0; done < bytes;) {
    const ssize_t n = out ? send(fd, data + done, bytes - done, MSG_NOSIGNAL)
                          : recv(fd, data + done, bytes - done, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    done += static_cast<size_t>(n);
  }
  return true;
}

}  // namespace

absl::StatusOr<std::unique_ptr<GlooBaseline>> GlooBaseline::Connect(
    const std::string& address, int rank, int size, const ExchangeAddresses& exchange,
    Duration timeout) {
  try {
    gloo::transport::tcp::attr attr;
    attr.hostname = address;
    auto device = gloo::transport::tcp::CreateDevice(attr);
    auto context = std::make_shared<Context>(rank, size);
    auto transport = device->createContext(rank, size);
    transport->setTimeout(std::chrono::ceil<milliseconds>(timeout));
    std::string mine;  // all pairs' addresses, of one length; this rank's own stays zero
    size_t unit = 0;
    std::vector<std::vector<char>> pairs(size);
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      pairs[peer] = transport->createPair(peer)->address().bytes();
      unit = pairs[peer].size();
    }
    for (int peer = 0; peer < size; ++peer) {
      pairs[peer].resize(unit);
      mine.append(pairs[peer].data(), unit);
    }
    REFITD_ASSIGN_OR_RETURN(const std::vector<std::string> all, exchange(mine));
    if (all.size() != static_cast<size_t>(size)) {
      return Error(StatusCode::kInvalidArgument, "{} addresses for {} ranks", all.size(), size);
    }
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      if (all[peer].size() != unit * static_cast<size_t>(size)) {
        return Error(StatusCode::kInvalidArgument, "address of rank {} has {} bytes", peer,
                     all[peer].size());
      }
      const char* const at = all[peer].data() + unit * static_cast<size_t>(rank);
      transport->getPair(peer)->connect(std::vector<char>(at, at + unit));
    }
    context->Set(std::move(device), std::move(transport));
    return std::unique_ptr<GlooBaseline>(std::make_unique<Baseline>(std::move(context)));
  } catch (const std::exception& error) {
    return Error(StatusCode::kUnavailable, "Gloo on {}: {}", address, error.what());
  }
}

GlooBaseline::ExchangeAddresses ExchangeOverSocket(int fd, int rank) {
  return [fd, rank](const std::string& mine) -> absl::StatusOr<std::vector<std::string>> {
    uint64_t bytes = mine.size();
    std::string out(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    out += mine;
    std::string theirs;
    bool ok = Transfer(fd, out.data(), out.size(), true) &&
              Transfer(fd, reinterpret_cast<char*>(&bytes), sizeof(bytes), false) &&
              bytes <= kMaxAddressBytes;
    if (ok) {
      theirs.resize(bytes);
      ok = Transfer(fd, theirs.data(), theirs.size(), false);
    }
    if (!ok) return Error(StatusCode::kUnavailable, "the other rank's address did not come");
    std::vector<std::string> all(2);
    all[rank] = mine;
    all[1 - rank] = std::move(theirs);
    return all;
  };
}

}  // namespace refitd
