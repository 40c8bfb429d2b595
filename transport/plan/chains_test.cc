#include "transport/plan/chains.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <map>
#include <numeric>
#include <set>
#include <utility>

namespace refitd {
namespace {

std::vector<uint32_t> Nodes(size_t n) {
  std::vector<uint32_t> nodes(n);
  for (size_t i = 0; i < n; ++i) nodes[i] = static_cast<uint32_t>(10 + 3 * i);
  return nodes;
}

TEST_CASE("Every node is first and last in equally many orders and sends to each other equally") {
  for (size_t n = 2; n <= 17; ++n) {
    INFO(n << " nodes");
    const std::vector<uint32_t> nodes = Nodes(n);
    const int times = n % 2 == 0 ? 1 : 2;
    std::map<uint32_t, int> first;
    std::map<uint32_t, int> last;
    std::map<std::pair<uint32_t, uint32_t>, int> sends;
    std::set<std::vector<uint32_t>> different;
    for (size_t order = 0; order < ChainOrders(n); ++order) {
      const std::vector<uint32_t> chain = ChainOrder(nodes, order);
      std::vector<uint32_t> sorted = chain;
      std::sort(sorted.begin(), sorted.end());
      REQUIRE(sorted == nodes);
      different.insert(chain);
      ++first[chain.front()];
      ++last[chain.back()];
      for (size_t i = 1; i < n; ++i) ++sends[{chain[i - 1], chain[i]}];
    }
    CHECK(different.size() == ChainOrders(n));
    for (const uint32_t node : nodes) {
      CHECK(first[node] == times);
      CHECK(last[node] == times);
    }
    REQUIRE(sends.size() == n * (n - 1));
    for (const auto& [edge, count] : sends) CHECK(count == times);
  }
  CHECK(ChainOrder(Nodes(1), 0) == Nodes(1));
  CHECK(ChainOrders(1) == 1);
}

// The bytes that each node does not send because it is last in the orders of these shares.
std::vector<int64_t> Spared(size_t n, const std::vector<ChainShare>& shares) {
  const std::vector<uint32_t> nodes = Nodes(n);
  std::vector<int64_t> spared(n);
  for (const ChainShare& share : shares) {
    const uint32_t last = ChainOrder(nodes, share.order).back();
    spared[(last - 10) / 3] += share.bytes;
  }
  return spared;
}

TEST_CASE("The nodes that send most are last for so many bytes that loads even out") {
  constexpr int64_t kBytes = 1'000'000;
  for (size_t n = 2; n <= 9; ++n) {
    INFO(n << " nodes");
    std::vector<int64_t> equal(n, kBytes);
    const std::vector<ChainShare> shares = DivideAmongOrders(kBytes, 1, &equal);
    CHECK(shares.size() == ChainOrders(n));
    const auto [least, most] = std::minmax_element(equal.begin(), equal.end());
    CHECK(*most - *least <= static_cast<int64_t>(n));
    CHECK(std::accumulate(equal.begin(), equal.end(), int64_t{0}) ==
          kBytes * static_cast<int64_t>(n - 1));
  }
  // A node that also sends what it holds forwards less than the others.
  std::vector<int64_t> sends = {kBytes, kBytes + 600'000, kBytes, kBytes};
  const std::vector<int64_t> before = sends;
  const std::vector<ChainShare> shares = DivideAmongOrders(kBytes, 1, &sends);
  CHECK(sends == std::vector<int64_t>(4, 900'000));
  const std::vector<int64_t> spared = Spared(4, shares);
  for (size_t i = 0; i < 4; ++i) CHECK(spared[i] == before[i] - sends[i]);
}

TEST_CASE("Few bytes take few orders and different ones from set to set") {
  std::vector<int64_t> sends(8, 1000);
  std::set<size_t> orders;
  for (int set = 0; set < 8; ++set) {
    const std::vector<ChainShare> shares = DivideAmongOrders(10, 1 << 20, &sends);
    REQUIRE(shares.size() == 1);
    CHECK(shares[0].bytes == 10);
    orders.insert(shares[0].order);
  }
  CHECK(orders.size() == 8);
  CHECK(sends == std::vector<int64_t>(8, 990));
  std::vector<int64_t> some(8, 1000);
  CHECK(DivideAmongOrders(300, 100, &some).size() == 3);
}

TEST_CASE("Rounds are enough for slots and for filling but not more than small rounds allow") {
  constexpr int64_t kSlot = int64_t{64} << 20;
  RelayShape shape{2, 16, 16, 32, int64_t{1} << 30};
  RelayRounds rounds = RoundsOf(shape, kSlot);
  CHECK(rounds.filling == 30);
  CHECK(rounds.rounds == 21 * 30);  // filling decides
  shape.node_bytes = int64_t{1} << 40;
  rounds = RoundsOf(shape, kSlot);
  CHECK(rounds.rounds - rounds.filling > (int64_t{1} << 40) / kSlot);  // slots decide
  shape.node_bytes = int64_t{1} << 20;
  CHECK(RoundsOf(shape, kSlot).rounds == 2 * 30 + 1);  // not shorter than the longest chain needs
  shape.node_bytes = int64_t{16} << 20;
  CHECK(RoundsOf(shape, kSlot).rounds == 86 + 30);  // 192 KiB a round
  shape.longest = 512;                              // some chains that matter little are longer
  shape.node_bytes = int64_t{1} << 30;
  CHECK(RoundsOf(shape, kSlot).rounds == 2 * 2 * 511 + 1);
  CHECK(RoundsOf(shape, kSlot).filling == 30);
}

}  // namespace
}  // namespace refitd
