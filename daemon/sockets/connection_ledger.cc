#include "daemon/sockets/connection_ledger.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace refitd {
namespace {

constexpr char kUnproven[] = "all that have made no call that a rule allows";

}  // namespace

ConnectionLedger::Id ConnectionLedger::Open(const std::string& source, TimePoint now) {
  now_ = std::max(now_, now);
  if (const auto floods = floods_.find(source);
      floods != floods_.end() && now_ - floods->second.last >= kFloodPause) {
    floods_.erase(floods);
  } else if (floods != floods_.end() && floods->second.count >= kFloods) {
    return 0;
  }
  MakeRoom();
  const Id id = ++last_;
  Connection& connection = connections_[id];
  connection.source = source;
  connection.since = now_;
  Enter(&connection, kUnproven);
  ++unproven_;
  return id;
}

void ConnectionLedger::Close(Id id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if (!found->second.ended) Leave(&found->second);
  connections_.erase(found);
}

bool ConnectionLedger::Take(Id id, int64_t bytes) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.ended) return false;
  Connection& connection = found->second;
  if (connection.proven) return true;
  connection.left -= bytes;
  if (connection.left > 0) return true;
  const std::string why = "it brought more than may come before a call that a rule allows";
  // Who has a wrong rule makes calls that are refused, again and again.
  if (connection.called) {
    End(id, &connection, why);
  } else {
    EndFlood(id, &connection, why);
  }
  return false;
}

bool ConnectionLedger::TakeClear(Id id, std::string_view bytes) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.ended) return false;
  Connection& connection = found->second;
  FrameScanner& scanner = connection.scanner;
  const int64_t opened = scanner.opened();
  const int64_t message_bytes = scanner.message_bytes();
  scanner.Read(bytes, now_);
  connection.streams += scanner.opened() - opened;
  connection.account->second.streams += scanner.opened() - opened;
  connection.account->second.message_bytes += scanner.message_bytes() - message_bytes;
  if (std::string why = Excess(connection); !why.empty()) {
    EndFlood(id, &connection, std::move(why));
    return false;
  }
  CheckAccount(connection.account);
  return !connection.ended;
}

// Why a connection must end, whatever others of its identity do; empty: it need not.
std::string ConnectionLedger::Excess(const Connection& connection) {
  const FrameScanner& scanner = connection.scanner;
  if (scanner.header_bytes() > kMaxHeaderBlock) {
    return fmt::format("headers of more than {} bytes", kMaxHeaderBlock);
  }
  if (!connection.proven && connection.streams > kUnprovenStreams) {
    return fmt::format("it opened more than {} streams before a call that a rule allows",
                       kUnprovenStreams);
  }
  if (!scanner.confirmed() && scanner.opened() > kUnconfirmedStreams) {
    return fmt::format("it opened more than {} streams and confirmed no settings",
                       kUnconfirmedStreams);
  }
  return "";
}

void ConnectionLedger::CheckAccount(const Accounts::iterator& account) {
  const int64_t streams = LimitOf(account->second, kIdentityStreams, kFloodedStreams);
  if (account->second.streams > streams) {
    return EndLargest(
        account,
        fmt::format("more than {} streams that no call explains, of {}", streams, account->first),
        [](const Connection& each) { return each.streams; });
  }
  const int64_t bytes =
      LimitOf(account->second, identity_message_bytes_, identity_message_bytes_ / 4);
  if (account->second.message_bytes > bytes) {
    EndLargest(
        account,
        fmt::format("more than {} bytes of unfinished messages, of {}", bytes, account->first),
        [](const Connection& each) { return each.scanner.message_bytes(); });
  }
}

int64_t ConnectionLedger::LimitOf(const Account& account, int64_t most, int64_t flooded) const {
  const bool floods = account.flooded.has_value() && now_ - *account.flooded < kFloodPause;
  return floods ? flooded : most;
}

void ConnectionLedger::EndLargest(const Accounts::iterator& account, const std::string& why,
                                  int64_t (*use)(const Connection&)) {
  auto largest = connections_.end();
  for (auto it = connections_.begin(); it != connections_.end(); ++it) {
    if (it->second.ended || it->second.account != account) continue;
    if (largest == connections_.end() || use(it->second) > use(largest->second)) largest = it;
  }
  if (largest != connections_.end()) EndFlood(largest->first, &largest->second, why);
}

// A stream is taken off the count when a handler gets its call: the count is of streams of which no
// call came.
void ConnectionLedger::Explain(Connection* connection) {
  connection->called = true;
  if (connection->streams == 0) return;
  --connection->streams;
  --connection->account->second.streams;
}

void ConnectionLedger::Allowed(Id id, const std::string& identity) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.ended) return;
  Connection& connection = found->second;
  Explain(&connection);
  if (connection.proven) return;
  Leave(&connection);
  connection.proven = true;
  Enter(&connection, identity);
  if (connection.account->second.proven > kIdentityConnections) {
    End(id, &connection,
        fmt::format("{} has {} connections already", identity, kIdentityConnections));
  }
}

void ConnectionLedger::Refused(Id id, bool known) {
  const auto found = connections_.find(id);
  if (found == connections_.end() || found->second.ended) return;
  Explain(&found->second);
  if (!known && !found->second.proven) {
    found->second.left = std::min(found->second.left, kUnknownBytes);
  }
}

void ConnectionLedger::Enter(Connection* connection, const std::string& name) {
  connection->account = accounts_.try_emplace(name).first;
  Account& account = connection->account->second;
  ++account.connections;
  if (connection->proven) ++account.proven;
  account.streams += connection->streams;
  account.message_bytes += connection->scanner.message_bytes();
}

void ConnectionLedger::Leave(Connection* connection) {
  Account& account = connection->account->second;
  --account.connections;
  if (connection->proven) --account.proven;
  if (!connection->proven) --unproven_;
  account.streams -= connection->streams;
  account.message_bytes -= connection->scanner.message_bytes();
  if (account.connections == 0) accounts_.erase(connection->account);
}

void ConnectionLedger::End(Id id, Connection* connection, std::string why) {
  Leave(connection);
  connection->ended = true;
  connection->scanner = FrameScanner();
  ended_.push_back({id, connection->source, std::move(why)});
}

void ConnectionLedger::EndFlood(Id id, Connection* connection, std::string why) {
  Floods& floods = floods_[connection->source];
  ++floods.count;
  floods.last = now_;
  connection->account->second.flooded = now_;
  End(id, connection, std::move(why));
}

void ConnectionLedger::MakeRoom() {
  if (unproven_ < kMaxUnproven) return;
  std::map<std::string, std::pair<size_t, Id>> sources;  // how many of each, and the oldest
  for (const auto& [id, connection] : connections_) {
    if (connection.ended || connection.proven) continue;
    auto& [count, oldest] = sources.try_emplace(connection.source, 0, id).first->second;
    ++count;
    oldest = std::min(oldest, id);
  }
  const auto most = std::max_element(
      sources.begin(), sources.end(),
      [](const auto& a, const auto& b) { return a.second.first < b.second.first; });
  const auto [count, oldest] = most->second;
  End(oldest, &connections_.find(oldest)->second,
      fmt::format("{} connections have made no call that a rule allows, of which {} are of this "
                  "source",
                  unproven_, count));
}

void ConnectionLedger::Sweep(TimePoint now) {
  now_ = std::max(now_, now);
  const bool forgives = now_ - forgiven_ >= kForgiveInterval;
  if (forgives) forgiven_ = now_;
  std::erase_if(floods_, [&](const auto& each) { return now_ - each.second.last >= kFloodPause; });
  for (auto& [id, connection] : connections_) {
    if (connection.ended) continue;
    if (forgives && connection.proven) Explain(&connection);
    const std::optional<TimePoint> oldest = connection.scanner.oldest();
    if (!connection.proven && now_ - connection.since >= kUnprovenLimit) {
      End(id, &connection, "it made no call that a rule allows for too long");
    } else if (oldest.has_value() && now_ - *oldest >= kUnfinishedLimit) {
      End(id, &connection, "a message or its headers did not end for too long");
    }
  }
}

}  // namespace refitd
