// The transition table that all state machine headers use, and its lookup.
//
// A machine is an enum of states, an enum of events and one table; an empty cell means that the
// event is refused in that state and nothing changes. The table stands twice in each header, as a
// comment and as constexpr; fsm_test compares the two. Pure, thread-safe.
#ifndef REFITD_DAEMON_GROUP_FSM_H_
#define REFITD_DAEMON_GROUP_FSM_H_

#include <array>
#include <cstddef>
#include <optional>

#include "transport/base/status.h"

namespace refitd {

// table[state][event]; nullopt: refused.
template <typename State, size_t kStates, size_t kEvents>
using TransitionTable = std::array<std::array<std::optional<State>, kEvents>, kStates>;

// Takes a transition that this code has decided itself: if the machine refuses the event, the code
// has a bug.
template <typename State, typename Event>
void Step(State* state, Event event) {
  const std::optional<State> next = Next(*state, event);
  REFITD_CHECK(next.has_value());
  *state = *next;
}

}  // namespace refitd

#endif  // REFITD_DAEMON_GROUP_FSM_H_
