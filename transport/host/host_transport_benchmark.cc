// Compares the host transport with a plain memcpy of the same bytes by as many threads. Prints one
// line for each case, with the ratio (1: as fast as memcpy of the sources' bytes). Baseline and
// case alternate; the best of several rounds counts.
//
//   host_transport_benchmark [MIB] [THREADS] [ROUNDS]

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "transport/base/status.h"
#include "transport/host/host_transport.h"
#include "transport/host/memory.h"

namespace refitd {
namespace {

double Seconds(const std::function<void()>& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::shared_ptr<HostRegion> MakeRegion(int64_t bytes) {
  auto fd = CreateSealedMemfd("benchmark", bytes);
  REFITD_CHECK(fd.ok());
  auto region = HostRegion::Map(*fd, bytes, Access::kReadWrite, true);
  REFITD_CHECK(region.ok());
  std::memset((*region)->data(), 0x5a, static_cast<size_t>(bytes));
  return *std::move(region);
}

TransferResult Run(Transport* transport, Transfer transfer) {
  std::promise<TransferResult> promise;
  transport->Submit(std::move(transfer),
                    [&](TransferResult result) { promise.set_value(std::move(result)); });
  return promise.get_future().get();
}

ReadbackResult Run(Transport* transport, ReadbackJob job) {
  std::promise<ReadbackResult> promise;
  transport->Submit(std::move(job),
                    [&](ReadbackResult result) { promise.set_value(std::move(result)); });
  return promise.get_future().get();
}

BoundPiece Piece(const Dims& shape, const Box& box, char* data) {
  return {.dtype = DType::kBFloat16,
          .shape = shape,
          .box = box,
          .strides = RowMajorStrides(box.extent),
          .data = data,
          .name = "weight"};
}

// Shapes of a model: matrices with `columns` columns, and norms between them.
std::vector<Dims> Shapes(int64_t bytes, int64_t columns) {
  std::vector<Dims> shapes;
  for (int64_t left = bytes; left > 0;) {
    const int64_t rows = std::min<int64_t>(3072, left / (2 * columns));
    if (rows == 0) break;
    shapes.push_back({rows, columns});
    shapes.push_back({1024});
    left -= 2 * rows * columns + 2048;
  }
  return shapes;
}

// Every tensor goes to `parts` destinations, each of which holds a slice of the columns, packed.
Transfer MakeTransfer(const std::vector<Dims>& shapes, int parts, char* from, char* to) {
  Transfer transfer;
  transfer.destinations.resize(static_cast<size_t>(parts));
  for (const Dims& shape : shapes) {
    const Box whole = WholeBox(shape);
    const auto source_piece = static_cast<uint32_t>(transfer.source.size());
    transfer.source.push_back(Piece(shape, whole, from));
    from += ElementCount(whole) * 2;
    for (int part = 0; part < parts; ++part) {
      Box box = whole;
      box.extent.back() /= parts;
      box.offset.back() = part * box.extent.back();
      auto& pieces = transfer.destinations[static_cast<size_t>(part)];
      transfer.plan.moves.push_back({.source_piece = source_piece,
                                     .destination = static_cast<uint32_t>(part),
                                     .destination_piece = static_cast<uint32_t>(pieces.size()),
                                     .box = box,
                                     .source_byte_offset = box.offset.back() * 2});
      pieces.push_back(Piece(shape, box, to));
      to += ElementCount(box) * 2;
    }
  }
  return transfer;
}

// Pairs of experts' matrices, gate and up, whose elements alternate in memory at one end.
Transfer MakeInterleaved(int64_t bytes, bool at_source, char* from, char* to) {
  const Dims shape = {2880, 2880};
  const int64_t piece_bytes = ElementCount(shape).value() * 2;
  Transfer transfer;
  transfer.destinations.resize(1);
  for (int64_t pair = 0; (pair + 1) * 2 * piece_bytes <= bytes; ++pair) {
    for (int64_t half = 0; half < 2; ++half) {
      const int64_t dense = (2 * pair + half) * piece_bytes;
      const int64_t turns = 2 * pair * piece_bytes + 2 * half;
      const auto index = static_cast<uint32_t>(transfer.source.size());
      transfer.source.push_back(Piece(shape, WholeBox(shape), from + (at_source ? turns : dense)));
      transfer.destinations[0].push_back(
          Piece(shape, WholeBox(shape), to + (at_source ? dense : turns)));
      BoundPiece& apart = at_source ? transfer.source.back() : transfer.destinations[0].back();
      apart.strides = {2 * 2880, 2};
      transfer.plan.moves.push_back(
          {.source_piece = index, .destination_piece = index, .box = WholeBox(shape)});
    }
  }
  return transfer;
}

// Matrices that are quantised on the way: values, and scales behind them.
Transfer MakeDerived(int64_t bytes, DerivedKind kind, char* from, char* to) {
  const Dims shape = {3072, 3072};
  const int64_t matrix_bytes = ElementCount(shape).value() * 2;
  Transfer transfer;
  transfer.destinations.resize(1);
  for (; bytes >= matrix_bytes; bytes -= matrix_bytes, from += matrix_bytes) {
    for (const DerivedRole role : {DerivedRole::kValues, DerivedRole::kScales}) {
      const auto derivation =
          std::make_shared<Derivation>(Derivation{{"weight", DType::kBFloat16, shape}, kind, role});
      const Box box = *ComputableBox(*derivation, WholeBox(shape));
      const auto index = static_cast<uint32_t>(transfer.source.size());
      BoundPiece piece = Piece(box.extent, box, from);
      piece.dtype = role == DerivedRole::kValues ? DType::kFloat8E4M3FN : DType::kFloat32;
      transfer.destinations[0].push_back(piece);
      transfer.destinations[0].back().data = to;
      to += ElementCount(box) * ElementBytes(piece.dtype);
      BoundPiece held = Piece(shape, WholeBox(shape), from);
      held.dtype = DType::kBFloat16;
      piece.held = std::make_shared<HeldPiece>(HeldPiece{derivation, {std::move(held)}});
      transfer.source.push_back(std::move(piece));
      transfer.plan.moves.push_back(
          {.source_piece = index, .destination_piece = index, .box = box});
    }
  }
  return transfer;
}

// The sources' bytes.
int64_t BytesOf(const Transfer& transfer) {
  int64_t bytes = 0;
  for (const CopyMove& move : transfer.plan.moves) {
    const BoundPiece& source = transfer.source[move.source_piece];
    const bool scales =
        source.held != nullptr && source.held->derivation->role == DerivedRole::kScales;
    if (!scales) bytes += 2 * ElementCount(move.box);
  }
  return bytes;
}

void Update(Transport* transport, const Transfer& transfer) {
  Transfer copy = transfer;
  const TransferResult result = Run(transport, std::move(copy));
  REFITD_CHECK(result.status.ok());
  if (transfer.verification != Verification::kReadback) return;
  ReadbackJob job;
  for (const PieceDigest& sum : result.expected) {
    job.pieces.push_back({.piece = transfer.destinations[sum.destination][sum.piece],
                          .expected = sum.digest,
                          .destination = sum.destination});
  }
  REFITD_CHECK(Run(transport, std::move(job)).status.ok());
}

void Memcpy(char* to, const char* from, int64_t bytes, int threads) {
  std::vector<std::thread> workers;
  workers.reserve(static_cast<size_t>(threads));
  const int64_t share = bytes / threads;
  for (int i = 0; i < threads; ++i) {
    workers.emplace_back(
        [=] { std::memcpy(to + i * share, from + i * share, static_cast<size_t>(share)); });
  }
  for (std::thread& worker : workers) worker.join();
}

// Measures the time of one transfer of 64 KiB from submission to `done`.
void Latency(Transport* transport, char* from, char* to) {
  const Transfer transfer = MakeTransfer({{32, 1024}}, 1, from, to);
  std::vector<double> times;
  times.reserve(2000);
  for (int i = 0; i < 2000; ++i) times.push_back(Seconds([&] { Update(transport, transfer); }));
  std::sort(times.begin(), times.end());
  const double copy = Seconds([&] {
    for (int i = 0; i < 2000; ++i) std::memcpy(to, from, 64 << 10);
  });
  std::printf("64 KiB transfer          p50 %6.1f us   p99 %6.1f us   memcpy %6.1f us\n",
              times[1000] * 1e6, times[1980] * 1e6, copy / 2000 * 1e6);
}

int Main(int argc, char** argv) {
  const int64_t bytes = (argc > 1 ? std::atoll(argv[1]) : 1126) << 20;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 2;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 5;
  const auto from = MakeRegion(bytes);
  const auto to = MakeRegion(bytes);
  const auto transport = MakeHostTransport({.threads = threads});
  const auto slices = [&](int64_t columns, int parts) {
    return MakeTransfer(Shapes(bytes, columns), parts, from->data(), to->data());
  };
  struct Case {
    const char* name;
    Transfer transfer;
  };
  const Case cases[] = {
      {"whole tensors", slices(1024, 1)},
      {"4 slices, 512 B rows", slices(1024, 4)},
      {"4 slices, 384 B rows", slices(768, 4)},
      {"from every 2nd element", MakeInterleaved(bytes, true, from->data(), to->data())},
      {"to every 2nd element", MakeInterleaved(bytes, false, from->data(), to->data())},
      {"to FP8, 128 x 128", MakeDerived(bytes, DerivedKind::kFp8Block, from->data(), to->data())},
      {"to FP8, by rows", MakeDerived(bytes, DerivedKind::kFp8Channel, from->data(), to->data())}};
  const std::pair<const char*, Verification> verifications[] = {
      {"off", Verification::kOff},
      {"transfer", Verification::kTransfer},
      {"readback", Verification::kReadback}};
  for (const Case& c : cases) {
    for (const auto& [name, verification] : verifications) {
      Transfer transfer = c.transfer;
      const int64_t moved = BytesOf(transfer);
      transfer.verification = verification;
      double best = 1e9;
      double baseline = 1e9;
      for (int round = 0; round < rounds; ++round) {
        baseline =
            std::min(baseline, Seconds([&] { Memcpy(to->data(), from->data(), moved, threads); }));
        best = std::min(best, Seconds([&] { Update(transport.get(), transfer); }));
      }
      const double gigabytes = static_cast<double>(moved) / 1e9;
      std::printf("%-22s %-9s %5.1f GB/s   memcpy %5.1f GB/s   ratio %.2f\n", c.name, name,
                  gigabytes / best, gigabytes / baseline, baseline / best);
    }
  }
  Latency(transport.get(), from->data(), to->data());
  return 0;
}

}  // namespace
}  // namespace refitd

int main(int argc, char** argv) { return refitd::Main(argc, argv); }
