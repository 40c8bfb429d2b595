// Looks up what names of DNS resolve to now, for status: whether the name by which members call
// their coordinator still leads to it.
//
// A lookup has no deadline of its own, so it runs on a thread that nobody waits for: a caller waits
// at most kLookupLimit (P4) and gets what was found last. At most one lookup runs for each name.
//
// Thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_NAME_LOOKUP_H_
#define REFITD_DAEMON_SOCKETS_NAME_LOOKUP_H_

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace refitd {

inline constexpr std::chrono::milliseconds kLookupLimit{500};
inline constexpr std::chrono::seconds kLookupAge{1};  // how long an answer is used
inline constexpr size_t kMaxLookups = 256;            // names that are kept
inline constexpr size_t kMaxLookedUp = 16;            // addresses of a name

class NameLookup {
 public:
  using Addresses = std::vector<std::string>;  // numeric, as inet_ntop writes them; sorted
  using Resolver = std::function<Addresses(const std::string& host)>;

  // `resolve` null: the system's resolver.
  explicit NameLookup(Resolver resolve = nullptr);

  // What `host` resolves to. Empty: to nothing, or nothing is known yet.
  Addresses Of(const std::string& host);

 private:
  struct State;
  const std::shared_ptr<State> state_;  // also the threads'
};

// "10.0.0.1" of "10.0.0.1:7411", "::1" of "[::1]:7411".
std::string HostOfAddress(const std::string& address);
// Whether `host` is an IPv4 or IPv6 address, which leads nowhere else later, and not a name.
bool IsNumericHost(const std::string& host);
// Whether connections to that numeric address reach this machine, or this network namespace.
bool IsOwnAddress(const std::string& address);

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_NAME_LOOKUP_H_
