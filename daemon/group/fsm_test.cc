// Tests every state machine with each state and each trigger: the constexpr table equals the tables
// in its header's comment and in docs/protocol.md, and keeps the rules for tables.
#include <catch2/catch.hpp>
#include <fstream>
#include <string>
#include <string_view>
#include <vector>

#include "daemon/group/group_state.h"
#include "daemon/group/instance_state.h"
#include "daemon/group/member_state.h"
#include "daemon/group/update_state.h"

namespace refitd {
namespace {

std::vector<std::string> Cells(const std::string& line) {
  std::vector<std::string> cells;
  size_t begin = line.find('|') + 1;
  for (size_t end = line.find('|', begin); end != std::string::npos;
       begin = end + 1, end = line.find('|', begin)) {
    const std::string cell = line.substr(begin, end - begin);
    const size_t first = cell.find_first_not_of(' ');
    const size_t last = cell.find_last_not_of(' ');
    cells.push_back(first == std::string::npos ? "" : cell.substr(first, last - first + 1));
  }
  return cells;
}

std::vector<std::vector<std::string>> TableOf(const std::string& header) {
  std::ifstream in("daemon/group/" + header);
  REQUIRE(in.good());
  std::vector<std::vector<std::string>> rows;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("// | ") && line.ends_with(" |")) rows.push_back(Cells(line));
  }
  return rows;
}

// The table under "### <title>" in docs/protocol.md.
std::vector<std::vector<std::string>> DocumentedTable(const std::string& title) {
  std::ifstream in("docs/protocol.md");
  REQUIRE(in.good());
  std::vector<std::vector<std::string>> rows;
  bool inside = false;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with("#")) inside = line == "### " + title;
    if (inside && line.starts_with("| ")) rows.push_back(Cells(line));
  }
  return rows;
}

template <typename Trigger, typename State, size_t kStates, size_t kTriggers>
void CheckEqual(const std::string& header, const TransitionTable<State, kStates, kTriggers>& table,
                const std::array<std::string_view, kStates>& states,
                const std::array<std::string_view, kTriggers>& triggers) {
  const auto rows = TableOf(header);
  REQUIRE(rows.size() == kStates + 1);
  REQUIRE(rows[0].size() == kTriggers + 1);
  for (size_t t = 0; t < kTriggers; ++t) CHECK(rows[0][t + 1] == triggers[t]);
  for (size_t s = 0; s < kStates; ++s) {
    REQUIRE(rows[s + 1].size() == kTriggers + 1);
    CHECK(rows[s + 1][0] == states[s]);
    for (size_t t = 0; t < kTriggers; ++t) {
      const std::optional<State> next = Next(static_cast<State>(s), static_cast<Trigger>(t));
      CAPTURE(header, states[s], triggers[t]);
      CHECK(next == table[s][t]);
      CHECK(rows[s + 1][t + 1] == (next.has_value() ? Name(*next) : "-"));
    }
  }
}

template <typename State, size_t kStates, size_t kTriggers>
std::vector<State> Terminal(const TransitionTable<State, kStates, kTriggers>& table) {
  std::vector<State> terminal;
  for (size_t s = 0; s < kStates; ++s) {
    bool leaves = false;
    for (const auto& next : table[s]) leaves |= next.has_value() && *next != static_cast<State>(s);
    if (!leaves) terminal.push_back(static_cast<State>(s));
  }
  return terminal;
}

TEST_CASE("the member machine is what its comment says") {
  CheckEqual<MemberTrigger>("member_state.h", kMemberTransitions, kMemberStateNames,
                            kMemberTriggerNames);
  CHECK(Terminal(kMemberTransitions) == std::vector{MemberState::kGone});
}

TEST_CASE("the instance machine is what its comment says") {
  CheckEqual<InstanceTrigger>("instance_state.h", kInstanceTransitions, kInstanceStateNames,
                              kInstanceTriggerNames);
  CHECK(Terminal(kInstanceTransitions) == std::vector{InstanceState::kGone});
}

TEST_CASE("the update machine is what its comment says") {
  CheckEqual<UpdateTrigger>("update_state.h", kUpdateTransitions, kUpdateStateNames,
                            kUpdateTriggerNames);
  CHECK(Terminal(kUpdateTransitions) ==
        std::vector{UpdateState::kCommitted, UpdateState::kAborted});
}

TEST_CASE("the group machine is what its comment says") {
  CheckEqual<GroupTrigger>("group_state.h", kGroupTransitions, kGroupStateNames,
                           kGroupTriggerNames);
  CHECK(Terminal(kGroupTransitions) == std::vector{GroupState::kDrained});
}

TEST_CASE("the protocol's page shows the tables of the code") {
  CHECK(DocumentedTable("Update") == TableOf("update_state.h"));
  CHECK(DocumentedTable("Instance") == TableOf("instance_state.h"));
  CHECK(DocumentedTable("Member") == TableOf("member_state.h"));
  CHECK(DocumentedTable("Group") == TableOf("group_state.h"));
}

TEST_CASE("a dirty instance becomes clean by a commit only") {
  using enum InstanceState;
  const std::vector<InstanceState> dirty = {kFormingDirty, kDirty, kDirtyPreparing, kDirtyReady};
  const auto is_dirty = [&](InstanceState s) {
    return std::find(dirty.begin(), dirty.end(), s) != dirty.end();
  };
  for (const InstanceState state : dirty) {
    for (size_t t = 0; t < kInstanceTriggerNames.size(); ++t) {
      const auto trigger = static_cast<InstanceTrigger>(t);
      const auto next = Next(state, trigger);
      if (!next.has_value() || *next == kGone) continue;
      CAPTURE(Name(state), kInstanceTriggerNames[t]);
      CHECK(is_dirty(*next) == (trigger != InstanceTrigger::kCommit));
    }
  }
}

TEST_CASE("an update commits only from settling or verifying, and ends aborted only when quiet") {
  for (size_t s = 0; s < kUpdateStateNames.size(); ++s) {
    for (size_t t = 0; t < kUpdateTriggerNames.size(); ++t) {
      const auto state = static_cast<UpdateState>(s);
      const auto trigger = static_cast<UpdateTrigger>(t);
      const auto next = Next(state, trigger);
      if (next == UpdateState::kCommitted) {
        CHECK((state == UpdateState::kSettling || state == UpdateState::kVerifying ||
               state == UpdateState::kFlipping));
        CHECK(trigger == UpdateTrigger::kDecide);
      }
      if (next == UpdateState::kAborted) {
        CHECK(state == UpdateState::kEnding);
        CHECK(trigger == UpdateTrigger::kQuiet);
      }
    }
  }
}

}  // namespace
}  // namespace refitd
