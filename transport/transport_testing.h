// Helpers that the tests of transports share: they run jobs, describe memory, and spoil transfers.
#ifndef REFITD_TRANSPORT_TRANSPORT_TESTING_H_
#define REFITD_TRANSPORT_TRANSPORT_TESTING_H_

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "transport/base/eventually_testing.h"
#include "transport/transport.h"

namespace refitd {

using Rng = std::mt19937_64;

inline int64_t Pick(Rng* random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(*random);
}

// The result of a job that was submitted with `done()`.
template <typename Result>
struct Outcome {
  std::shared_ptr<std::promise<Result>> promise = std::make_shared<std::promise<Result>>();
  std::future<Result> future = promise->get_future();
  std::function<void(Result)> done() {
    return [promise = promise](Result result) { promise->set_value(std::move(result)); };
  }
  bool ended() const {
    return future.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
  }
  Result Wait() {
    REQUIRE(future.wait_for(kTestDeadline) == std::future_status::ready);
    return future.get();
  }
};

inline TransferResult Run(Transport* transport, Transfer transfer) {
  Outcome<TransferResult> outcome;
  transport->Submit(std::move(transfer), outcome.done());
  return outcome.Wait();
}

inline ReadbackResult Run(Transport* transport, ReadbackJob job) {
  Outcome<ReadbackResult> outcome;
  transport->Submit(std::move(job), outcome.done());
  return outcome.Wait();
}

// Makes the job that reads back what the transfer wrote.
inline ReadbackJob JobOf(const Transfer& transfer, const TransferResult& result) {
  ReadbackJob job;
  for (const PieceDigest& sum : result.expected) {
    job.pieces.push_back({.piece = transfer.destinations[sum.destination][sum.piece],
                          .expected = sum.digest,
                          .destination = sum.destination});
  }
  job.keep_alive = transfer.keep_alive;
  return job;
}

// ---- memory of boxes ----

inline DType TypeOf(int64_t element_bytes) {
  return element_bytes == 1   ? DType::kFloat8E4M3FN
         : element_bytes == 2 ? DType::kBFloat16
         : element_bytes == 4 ? DType::kFloat32
                              : DType::kInt64;
}

// The number of elements from the first to the end of the last.
inline int64_t SpanElements(const Dims& extent, const Dims& strides) {
  int64_t last = 0;
  for (size_t d = 0; d < extent.size(); ++d) {
    if (extent[d] == 0) return 0;
    last += (extent[d] - 1) * strides[d];
  }
  return last + 1;
}

// The place of the box in the piece, in bytes.
inline int64_t Offset(const BoundPiece& piece, const Box& box) {
  return ElementDistance(box.offset, piece.box.offset, piece.strides) * ElementBytes(piece.dtype);
}

// ---- transfers that must be refused ----

// Spoils a transfer of one piece of [20, 30] to one destination in many ways. Each text names what
// is wrong.
inline std::vector<std::pair<std::string, Transfer>> Spoilt(const Transfer& good) {
  std::vector<std::pair<std::string, Transfer>> bad;
  const auto plant = [&](std::string what, auto change) {
    Transfer transfer = good;
    change(&transfer, &transfer.plan.moves[0]);
    bad.emplace_back(std::move(what), std::move(transfer));
  };
  plant("source", [](Transfer*, CopyMove* m) { m->source = 1; });
  plant("source piece", [](Transfer*, CopyMove* m) { m->source_piece = 1; });
  plant("destination", [](Transfer*, CopyMove* m) { m->destination = 1; });
  plant("destination piece", [](Transfer*, CopyMove* m) { m->destination_piece = 9; });
  plant("rank", [](Transfer*, CopyMove* m) { m->box = {{0}, {20}}; });
  plant("box", [](Transfer*, CopyMove* m) { m->box.extent[0] = 21; });
  plant("empty box", [](Transfer*, CopyMove* m) { m->box.extent[0] = 0; });
  plant("source offset", [](Transfer*, CopyMove* m) { m->source_byte_offset = 2; });
  plant("negative offset", [](Transfer*, CopyMove* m) { m->source_byte_offset = -2; });
  plant("destination offset", [](Transfer*, CopyMove* m) { m->destination_byte_offset = 2; });
  plant("strides", [](Transfer* t, CopyMove*) { t->source[0].strides.pop_back(); });
  plant("dtype", [](Transfer* t, CopyMove*) { t->source[0].dtype = DType::kFloat16; });
  plant("unmoved piece", [](Transfer* t, CopyMove*) {
    t->source.push_back(t->source[0]);
    t->source[1].strides.clear();
    t->want_source_digests = true;
  });
  return bad;
}

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TRANSPORT_TESTING_H_
