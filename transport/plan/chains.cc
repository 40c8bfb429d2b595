#include "transport/plan/chains.h"

#include <algorithm>
#include <numeric>

#include "transport/base/status.h"
#include "transport/plan/boxes.h"

namespace refitd {
namespace {

// A plan has this number of times the rounds that filling a usual chain takes, so that filling
// costs a twentieth. More rounds would cost more than they save: on a busy machine each round costs
// milliseconds.
constexpr int64_t kFillParts = 20;

// Rounds are not made shorter than this to fill chains sooner, because each round costs about as
// much as sending some ten thousand bytes over a fast link.
constexpr int64_t kMinRoundBytes = int64_t{192} << 10;

// Place i of the zigzag over n nodes.
size_t Zigzag(size_t i, size_t n) { return i % 2 == 1 ? (i + 1) / 2 : (n - i / 2) % n; }

int64_t AlignedDown(int64_t bytes) { return bytes / kSectionAlignment * kSectionAlignment; }

int64_t DividedUp(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Returns the orders in which node `last` (an index into the set) is the last.
std::vector<size_t> OrdersEndingAt(size_t last, size_t nodes) {
  const size_t rotation = (last + nodes - Zigzag(nodes - 1, nodes)) % nodes;
  if (nodes % 2 == 0) return {rotation};
  return {rotation, nodes + last};  // a reversed zigzag ends where the zigzag begins
}

}  // namespace

RelayRounds RoundsOf(const RelayShape& shape, int64_t round_bytes) {
  REFITD_CHECK(shape.lag > 0 && round_bytes >= MinRelayRoundBytes(shape.node_streams));
  const int64_t lag = shape.lag;
  const int64_t streams = std::max<int64_t>(shape.node_streams, 1);
  // Alignment may take some bytes of each stream. A quarter of the rest is kept for streams that
  // carry more in a round than their even part: the streams of minor chains, which have as few as
  // half of the rounds, and short streams, which end early.
  const int64_t usable = (round_bytes - kSectionAlignment * streams) / 4 * 3;
  const int64_t needed = DividedUp(shape.node_bytes, usable);
  RelayRounds made;
  made.filling = lag * std::max<int64_t>(int64_t{shape.usual} - 1, 0);
  const int64_t wanted =
      std::min(kFillParts * made.filling, DividedUp(shape.node_bytes, kMinRoundBytes));
  const int64_t carrying = std::max<int64_t>({needed, wanted, 1});
  const int64_t longest = lag * std::max<int64_t>(int64_t{shape.longest} - 1, 0);
  made.rounds = std::max(carrying + made.filling, 2 * longest + 1);
  made.min_step =
      std::max(kSectionAlignment,
               AlignedDown(shape.node_bytes / (made.rounds - made.filling) / (4 * streams)));
  return made;
}

size_t ChainOrders(size_t nodes) {
  if (nodes <= 1) return 1;
  return nodes % 2 == 0 ? nodes : 2 * nodes;
}

std::vector<uint32_t> ChainOrder(absl::Span<const uint32_t> nodes, size_t order) {
  const size_t n = nodes.size();
  std::vector<uint32_t> chain;
  chain.reserve(n);
  for (size_t i = 0; i < n; ++i) chain.push_back(nodes[(Zigzag(i, n) + order) % n]);
  if (order >= n) std::reverse(chain.begin(), chain.end());
  return chain;
}

std::vector<ChainShare> DivideAmongOrders(int64_t bytes, int64_t least,
                                          std::vector<int64_t>* sends) {
  const size_t n = sends->size();
  const auto shares = static_cast<size_t>(
      std::clamp<int64_t>(bytes / std::max<int64_t>(least, 1), 1, static_cast<int64_t>(n)));
  // The nodes that send most become last in an order.
  std::vector<size_t> last(n);
  std::iota(last.begin(), last.end(), size_t{0});
  std::stable_sort(last.begin(), last.end(),
                   [&](size_t a, size_t b) { return (*sends)[a] > (*sends)[b]; });
  last.resize(shares);
  std::sort(last.begin(), last.end());
  // The last node of a chain does not forward, so these nodes send `bytes` less in all. Most is
  // taken from those that send most, until all are level: WaterLevel of what each load lacks to the
  // largest says how far.
  int64_t most = 0;
  for (const size_t node : last) most = std::max(most, (*sends)[node]);
  std::vector<int64_t> missing;
  missing.reserve(last.size());
  for (const size_t node : last) missing.push_back(most - (*sends)[node]);
  const int64_t level = WaterLevel(missing, bytes);
  std::vector<ChainShare> made;
  int64_t rest = bytes;
  for (size_t i = 0; i < last.size(); ++i) {
    const bool final = i + 1 == last.size();
    const int64_t spared = final ? rest : std::clamp<int64_t>(level - missing[i], 0, rest);
    rest -= spared;
    (*sends)[last[i]] -= spared;
    const std::vector<size_t> orders = OrdersEndingAt(last[i], n);
    const auto parts = static_cast<int64_t>(shares < n ? 1 : orders.size());
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t part = spared / parts + (p < spared % parts ? 1 : 0);
      if (part > 0) made.push_back({orders[static_cast<size_t>(p)], part});
    }
  }
  return made;
}

}  // namespace refitd
