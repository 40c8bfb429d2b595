// Counts what connections bring that no call explains, and says which of them must end (P9, P10).
//
// gRPC 1.51 takes headers without an end, unfinished messages and streams that are reset at once
// before any handler runs, and no setting of it bounds their memory or time. Each limit here is of
// what it keeps meanwhile.
//
// Invariants
//  1. A connection that is not proven reads at most kUnprovenBytes and opens at most
//     kUnprovenStreams, and one of an identity that no rule names reads at most kUnknownBytes more
//     once that is found out. Only a call that a rule allowed proves a connection.
//  2. At most kMaxUnproven connections are unproven at a time: the oldest one of the source (user
//     or address) that has most of them ends first. None is for longer than kUnprovenLimit.
//  3. No header block is longer than kMaxHeaderBlock. No connection that has not confirmed the
//     server's settings opens more than kUnconfirmedStreams. Nothing unfinished is older than
//     kUnfinishedLimit.
//  4. All connections of an identity, and all that are not proven, together have at most
//     kIdentityStreams streams that no handler has seen, and at most so many bytes of unfinished
//     messages as the constructor says. The connection that has most of them ends. For kFloodPause
//     after that the others have kFloodedStreams and a quarter of the bytes, since gRPC frees what
//     an ended one had only bit by bit.
//  5. After kFloods connections of a source that ended for what no client does by mistake, none of
//     that source is let in for kFloodPause.
//  6. At most kIdentityConnections of an identity are proven at a time: the last one ends.
//
// Pure; not thread-safe.
#ifndef REFITD_DAEMON_SOCKETS_CONNECTION_LEDGER_H_
#define REFITD_DAEMON_SOCKETS_CONNECTION_LEDGER_H_

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "daemon/sockets/frame_scanner.h"
#include "transport/base/ids.h"

namespace refitd {

// The first flow-control window of a call, which the server's settings give to clients. A member's
// first message may fill it before the daemon has seen the call's headers.
inline constexpr int kFirstWindowBytes = 16 << 10;
// Room for kFirstWindowBytes, the headers of calls, and a TLS handshake with long chains.
inline constexpr int64_t kUnprovenBytes = 48 << 10;
// Enough for some calls that are refused with a reason.
inline constexpr int64_t kUnknownBytes = 16 << 10;
// More calls than a client makes before it waits for the first answer.
inline constexpr int64_t kUnprovenStreams = 64;
// More than the ranks of a node, which may come all at once.
inline constexpr size_t kMaxUnproven = 256;
inline constexpr Duration kUnprovenLimit = std::chrono::seconds(30);
// gRPC refuses more than 8 KiB of metadata itself, once the block has ended.
inline constexpr int64_t kMaxHeaderBlock = 16 << 10;
inline constexpr int64_t kUnconfirmedStreams = 512;
// More than the calls that a rank may have open at a time. gRPC keeps up to 20 KiB of a stream that
// is reset at once.
inline constexpr int64_t kIdentityStreams = 1'024;
inline constexpr int64_t kFloodedStreams = 64;
// At least this for an identity. A message of the greatest size may be on its way several times.
inline constexpr int64_t kIdentityMessageBytes = 32 << 20;
inline constexpr int64_t kIdentityMessages = 4;
inline constexpr int64_t kIdentityConnections = 1'024;
inline constexpr Duration kUnfinishedLimit = std::chrono::minutes(2);
inline constexpr int kFloods = 4;
inline constexpr Duration kFloodPause = std::chrono::seconds(10);
// How often a connection is forgiven one stream that no handler saw, since its client cancelled it.
inline constexpr Duration kForgiveInterval = std::chrono::seconds(1);

class ConnectionLedger {
 public:
  using Id = uint64_t;  // of a connection; never used twice
  struct Ended {
    Id id;
    std::string source;
    std::string why;
  };

  // `message_bytes`: of the longest message that gRPC takes.
  explicit ConnectionLedger(int64_t message_bytes)
      : identity_message_bytes_(
            std::max(kIdentityMessageBytes, kIdentityMessages * message_bytes)) {}

  // Takes a connection of the source in; others may have to end for it (TakeEnded). 0: the source
  // is kept out.
  Id Open(const std::string& source, TimePoint now);
  void Close(Id id);

  // The connection has read so many bytes. False: they are for nobody.
  bool Take(Id id, int64_t bytes);
  // It has read these, decrypted. False: they are for nobody.
  bool TakeClear(Id id, std::string_view bytes);

  // A handler has seen a call of the connection: a rule allowed it, or none did. `known`: some rule
  // names the identity.
  void Allowed(Id id, const std::string& identity);
  void Refused(Id id, bool known);

  void Sweep(TimePoint now);
  // Those that ended since the last call and must be shut down. They stay until they are closed.
  std::vector<Ended> TakeEnded() { return std::exchange(ended_, {}); }

  size_t open() const { return connections_.size(); }
  size_t unproven() const { return unproven_; }

 private:
  // What connections have that share a limit.
  struct Account {
    int64_t connections = 0;
    int64_t proven = 0;
    int64_t streams = 0;
    int64_t message_bytes = 0;
    std::optional<TimePoint> flooded{};
  };
  using Accounts = std::map<std::string, Account>;
  struct Connection {
    std::string source;
    Accounts::iterator account;
    TimePoint since{};
    int64_t left = kUnprovenBytes;
    bool proven = false;
    bool ended = false;
    bool called = false;  // a handler has seen a call
    int64_t streams = 0;  // that no handler has seen
    FrameScanner scanner{};
  };
  using Connections = std::unordered_map<Id, Connection>;

  static std::string Excess(const Connection& connection);
  void Enter(Connection* connection, const std::string& name);
  void Leave(Connection* connection);
  void End(Id id, Connection* connection, std::string why);
  // The same, and counts it against the source.
  void EndFlood(Id id, Connection* connection, std::string why);
  // Ends the connection that uses most of the account, as `use` measures, and counts it against the
  // source.
  void EndLargest(const Accounts::iterator& account, const std::string& why,
                  int64_t (*use)(const Connection&));
  void CheckAccount(const Accounts::iterator& account);
  int64_t LimitOf(const Account& account, int64_t most, int64_t flooded) const;
  void Explain(Connection* connection);
  void MakeRoom();

  const int64_t identity_message_bytes_;
  TimePoint now_{};
  TimePoint forgiven_{};
  Id last_ = 0;
  Connections connections_;
  Accounts accounts_;
  struct Floods {
    int count = 0;
    TimePoint last{};
  };
  std::map<std::string, Floods> floods_;  // by source
  size_t unproven_ = 0;
  std::vector<Ended> ended_;
};

}  // namespace refitd

#endif  // REFITD_DAEMON_SOCKETS_CONNECTION_LEDGER_H_
