#include "daemon/sockets/name_lookup.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <map>
#include <thread>
#include <utility>

#include "transport/base/mutex.h"
#include "transport/base/unique_fd.h"

namespace refitd {
namespace {

using Clock = std::chrono::steady_clock;

std::string TextOf(const sockaddr* address) {
  std::array<char, INET6_ADDRSTRLEN> text{};
  const void* const bytes =
      address->sa_family == AF_INET
          ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in*>(address)->sin_addr)
          : &reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr;
  const char* const written =
      inet_ntop(address->sa_family, bytes, text.data(), static_cast<socklen_t>(text.size()));
  return written == nullptr ? "" : written;
}

NameLookup::Addresses Resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return {};
  NameLookup::Addresses found;
  for (const addrinfo* next = list; next != nullptr; next = next->ai_next) {
    if (found.size() < kMaxLookedUp) found.push_back(TextOf(next->ai_addr));
  }
  freeaddrinfo(list);
  std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

}  // namespace

struct NameLookup::State {
  struct Answer {
    Addresses addresses;
    Clock::time_point since{};
    bool known = false;
    bool under_way = false;
  };
  const Resolver resolve;
  Mutex mutex;
  CondVar cond;
  std::map<std::string, Answer> answers ABSL_GUARDED_BY(mutex);

  explicit State(Resolver resolver) : resolve(std::move(resolver)) {}

  void Take(const std::string& host) {
    Addresses found = resolve(host);
    MutexLock lock(&mutex);
    answers[host] = {std::move(found), Clock::now(), /*known=*/true, /*under_way=*/false};
    cond.NotifyAll();
  }
};

NameLookup::NameLookup(Resolver resolve)
    : state_(std::make_shared<State>(resolve == nullptr ? Resolver(Resolve) : std::move(resolve))) {
}

NameLookup::Addresses NameLookup::Of(const std::string& host) {
  const Clock::time_point now = Clock::now();
  MutexLock lock(&state_->mutex);
  std::map<std::string, State::Answer>& answers = state_->answers;
  if (answers.size() >= kMaxLookups && !answers.contains(host)) {
    std::erase_if(answers, [](const auto& answer) { return !answer.second.under_way; });
    if (answers.size() >= kMaxLookups) return {};
  }
  State::Answer& answer = answers[host];
  const bool fresh = answer.known && now - answer.since < kLookupAge;
  if (!fresh && !answer.under_way) {
    answer.under_way = true;
    std::thread([state = state_, host] { state->Take(host); }).detach();
  }
  while (!fresh && answers[host].under_way &&
         state_->cond.WaitUntil(&state_->mutex, now + kLookupLimit)) {
  }
  return answers[host].addresses;
}

std::string HostOfAddress(const std::string& address) {
  std::string host = address.substr(0, std::min(address.rfind(':'), address.size()));
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  return host;
}

bool IsNumericHost(const std::string& host) {
  in6_addr any{};
  return inet_pton(AF_INET, host.c_str(), &any) == 1 ||
         inet_pton(AF_INET6, host.c_str(), &any) == 1;
}

// A socket can be bound to the machine's own addresses alone.
bool IsOwnAddress(const std::string& address) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  const bool is_v4 = inet_pton(AF_INET, address.c_str(), &v4.sin_addr) == 1;
  if (!is_v4 && inet_pton(AF_INET6, address.c_str(), &v6.sin6_addr) != 1) return false;
  const UniqueFd fd(socket(is_v4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return false;
  return is_v4 ? bind(fd.get(), reinterpret_cast<const sockaddr*>(&v4), sizeof(v4)) == 0
               : bind(fd.get(), reinterpret_cast<const sockaddr*>(&v6), sizeof(v6)) == 0;
}

}  // namespace refitd
