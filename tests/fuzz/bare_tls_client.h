// This is the dialling end of a TLS 1.3 connection (RFC 8446), as small as an attacker would write
// one: it has one cipher suite, one group, the same first flight each time and a good certificate,
// and does not look at the listener's. A fuzz target that makes millions of handshakes spends its
// time on the listener then: OpenSSL's own end takes as long as the listener's, above all to parse
// a certificate. Not thread-safe: a process uses all clients in one thread.
#ifndef REFITD_TESTS_FUZZ_BARE_TLS_CLIENT_H_
#define REFITD_TESTS_FUZZ_BARE_TLS_CLIENT_H_

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "transport/tls/certificates.h"
#include "transport/tls/openssl_ptr.h"

namespace refitd {

// All clients share this.
struct BareTlsIdentity {
  // `hello`: a record with the ClientHello of OpenSSL's end, of which all is kept but its key.
  // `own` has one certificate, with a key on P-256.
  BareTlsIdentity(std::string hello, const Certificates& own);

  std::string hello;        // the first flight
  std::string certificate;  // the message that shows the certificate
  KeyPtr share;             // the private key that belongs to `hello`
  KeyPtr key;               // the certificate's
};

// The end of one connection. Its user carries the bytes, of which nobody may have changed those
// that come in.
class BareTlsClient {
 public:
  // `identity` must outlive the client.
  explicit BareTlsClient(const BareTlsIdentity* identity) : identity_(*identity) {}

  const std::string& FirstFlight() const { return identity_.hello; }
  // Takes bytes of the listener in. Returns the second flight when the listener's is complete, else
  // nothing.
  std::string TakeFlight(std::string_view bytes);
  // After the second flight: encrypts at most 16,384 bytes, and gives what the listener said.
  std::string Encrypt(std::string_view plain);
  std::string Decrypt(std::string_view bytes);

 private:
  using Secret = std::array<uint8_t, 32>;
  // One direction of the connection, under one secret.
  struct Keys {
    void Set(const Secret& secret);
    std::array<uint8_t, 12> Nonce();

    std::array<uint8_t, 16> key{};
    std::array<uint8_t, 12> iv{};
    uint64_t records = 0;
  };
  struct Record {
    uint8_t type = 0;
    std::string bytes;
  };

  bool NextRecord(Record* record);
  void TakeServerHello(std::string_view message);
  // Returns the second flight, and changes to the keys that count after it.
  std::string Answer();
  static std::string Seal(Keys* keys, uint8_t type, std::string_view plain);
  static void Unseal(Keys* keys, Record* record);

  const BareTlsIdentity& identity_;
  std::string incoming_;    // bytes of records that are not complete
  std::string messages_;    // of the listener's handshake, not complete
  std::string transcript_;  // all messages of the handshake
  bool encrypted_ = false;  // the listener's records are
  Secret handshake_{};
  Secret own_handshake_{};  // of this end's messages
  Keys from_listener_;
  Keys to_listener_;
};

}  // namespace refitd

#endif  // REFITD_TESTS_FUZZ_BARE_TLS_CLIENT_H_
