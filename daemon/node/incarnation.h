// The numbers that name the lives of groups. Incarnations are ordered: the upper 16 bits are a
// *term*, the others are drawn at random. A candidate that makes a group gives it a greater term
// than every incarnation of the group that its daemon knows of, and of two coordinators of one
// group the one with the greater incarnation stays.
//
// Thread-safe.
#ifndef REFITD_DAEMON_NODE_INCARNATION_H_
#define REFITD_DAEMON_NODE_INCARNATION_H_

#include <cstdint>

namespace refitd {

inline constexpr int kTermBits = 16;
inline constexpr uint64_t kMaxTerm = (uint64_t{1} << kTermBits) - 1;
// An engine that attaches claims the incarnation of what it holds, which can't be checked. Claims
// of greater terms are ignored, so that no claim uses the terms up (P10). Releases before terms
// drew all bits at random, so their incarnations count as claims of any term.
inline constexpr uint64_t kMaxClaimedTerm = kMaxTerm / 2;

inline constexpr uint64_t TermOf(uint64_t incarnation) { return incarnation >> (64 - kTermBits); }

// Returns the incarnation that an engine claims, or 0 where its term is too great to count.
inline constexpr uint64_t CountedClaim(uint64_t incarnation) {
  return TermOf(incarnation) <= kMaxClaimedTerm ? incarnation : 0;
}

// A new incarnation, never 0, of the next term after that of `above`; 0: of term 0. After kMaxTerm
// the term stays, and the order of incarnations is random.
uint64_t NewIncarnation(uint64_t above);

}  // namespace refitd

#endif  // REFITD_DAEMON_NODE_INCARNATION_H_
