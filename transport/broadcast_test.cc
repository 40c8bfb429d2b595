#include "transport/broadcast.h"

#include <catch2/catch.hpp>

#include "transport/unprepared_transport_testing.h"

namespace refitd {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

class Fake : public UnpreparedTransport {
 public:
  explicit Fake(bool chain) : chain_(chain) {}
  absl::Status CanBroadcast(BroadcastMethod method) const override {
    if (method == BroadcastMethod::kDirect || (method == BroadcastMethod::kChain && chain_)) {
      return absl::OkStatus();
    }
    return absl::UnimplementedError("not here");
  }
  void Submit(Transfer /*transfer*/, std::function<void(TransferResult)> /*done*/) override {}
  void Submit(ReadbackJob /*job*/, std::function<void(ReadbackResult)> /*done*/) override {}

 private:
  const bool chain_;
};

TEST_CASE("replicas on several devices go along a chain, shards directly") {
  const Fake transport(true);
  const auto fastest = [&](int64_t packed, std::map<int, int64_t> direct) {
    return FastestBroadcast({packed, std::move(direct)}, transport);
  };
  const int64_t part = 256 * kMiB;
  CHECK(fastest(part, {{1, part}, {2, part}, {3, part}, {4, part}}) == BroadcastMethod::kChain);
  CHECK(fastest(part, {{1, part}, {2, part}}) == BroadcastMethod::kChain);
  // Each device takes a quarter.
  CHECK(fastest(part, {{1, part / 4}, {2, part / 4}, {3, part / 4}, {4, part / 4}}) ==
        BroadcastMethod::kDirect);
  // With one receiver both methods carry the same bytes, whatever their number.
  for (const int64_t bytes : {kMiB, part, 1024 * part}) {
    CHECK(fastest(bytes, {{1, bytes}}) == BroadcastMethod::kDirect);
  }
  CHECK(fastest(part, {}) == BroadcastMethod::kDirect);
  // A chain would start four devices one after the other, which takes longer than copying so few
  // bytes directly.
  CHECK(fastest(kMiB, {{1, kMiB}, {2, kMiB}, {3, kMiB}, {4, kMiB}}) == BroadcastMethod::kDirect);
}

TEST_CASE("what the transport lacks is not chosen") {
  const int64_t part = 256 * kMiB;
  CHECK(FastestBroadcast({part, {{1, part}, {2, part}, {3, part}}}, Fake(false)) ==
        BroadcastMethod::kDirect);
}

TEST_CASE("methods have names") {
  CHECK(BroadcastMethodName(BroadcastMethod::kChain) == "chain");
  CHECK(BroadcastMethodName(BroadcastMethod::kAuto) == "auto");
}

}  // namespace
}  // namespace refitd
