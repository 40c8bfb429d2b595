#include "tests/fuzz/bare_tls_client.h"

#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <algorithm>
#include <utility>

#include "transport/base/status.h"

namespace refitd {
namespace {

constexpr uint8_t kChangeCipherSpec = 20;
constexpr uint8_t kHandshake = 22;
constexpr uint8_t kApplicationData = 23;
constexpr uint8_t kServerHello = 2;
constexpr uint8_t kCertificate = 11;
constexpr uint8_t kCertificateVerify = 15;
constexpr uint8_t kFinished = 20;
constexpr size_t kKeyShareExtension = 51;
constexpr size_t kX25519 = 0x001D;
constexpr size_t kShareBytes = 32;
constexpr size_t kAes128GcmSha256 = 0x1301;
constexpr size_t kRecordHeader = 5;
constexpr size_t kMessageHeader = 4;
constexpr size_t kTagBytes = 16;

using Digest = std::array<uint8_t, 32>;
using CipherContext = std::unique_ptr<EVP_CIPHER_CTX, Freer<EVP_CIPHER_CTX_free>>;
using DigestContext = std::unique_ptr<EVP_MD_CTX, Freer<EVP_MD_CTX_free>>;
using KeyContext = std::unique_ptr<EVP_PKEY_CTX, Freer<EVP_PKEY_CTX_free>>;

const uint8_t* Bytes(std::string_view text) {
  return reinterpret_cast<const uint8_t*>(text.data());
}
uint8_t* Bytes(std::string& text) { return reinterpret_cast<uint8_t*>(text.data()); }
template <size_t N>
std::string_view View(const std::array<uint8_t, N>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// TLS has its numbers in network byte order.
size_t Number(std::string_view text, size_t at, size_t bytes) {
  size_t number = 0;
  for (size_t i = 0; i < bytes; ++i) number = number << 8 | static_cast<uint8_t>(text.at(at + i));
  return number;
}
std::string Text(size_t number, size_t bytes) {
  std::string text;
  while (bytes-- > 0) text += static_cast<char>(number >> (8 * bytes));
  return text;
}
std::string MessageOf(uint8_t type, std::string_view body) {
  return Text(type, 1) + Text(body.size(), 3) + std::string(body);
}

Digest Sha256(std::string_view text) {
  static EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  static const DigestContext context(EVP_MD_CTX_new());
  Digest digest;
  REFITD_CHECK(EVP_DigestInit_ex2(context.get(), sha256, nullptr) == 1 &&
               EVP_DigestUpdate(context.get(), text.data(), text.size()) == 1 &&
               EVP_DigestFinal_ex(context.get(), digest.data(), nullptr) == 1);
  return digest;
}

Digest Hmac(const Digest& key, std::string_view text) {
  std::string inner(64, 0x36);
  std::string outer(64, 0x5C);
  for (size_t i = 0; i < key.size(); ++i) {
    inner[i] = static_cast<char>(inner[i] ^ key[i]);
    outer[i] = static_cast<char>(outer[i] ^ key[i]);
  }
  return Sha256(outer.append(View(Sha256(inner.append(text)))));
}

// This is HKDF-Expand-Label of RFC 8446, 7.1. `bytes` are 32 at most.
Digest Expand(const Digest& secret, std::string_view label, std::string_view context,
              size_t bytes = 32) {
  const std::string name = "tls13 " + std::string(label);
  return Hmac(secret, Text(bytes, 2) + Text(name.size(), 1) + name + Text(context.size(), 1) +
                          std::string(context) + '\1');
}

Digest ExpandTranscript(const Digest& secret, std::string_view label, std::string_view transcript) {
  return Expand(secret, label, View(Sha256(transcript)));
}

// Returns where in a hello the key of its first share begins. `at`: where the hello's list of
// extensions begins.
size_t ShareIn(std::string_view hello, size_t at, size_t before_share) {
  const size_t end = at + 2 + Number(hello, at, 2);
  for (at += 2; at < end; at += 4 + Number(hello, at + 2, 2)) {
    if (Number(hello, at, 2) != kKeyShareExtension) continue;
    at += 4 + before_share;
    REFITD_CHECK(Number(hello, at, 2) == kX25519 && Number(hello, at + 2, 2) == kShareBytes);
    return at + 4;
  }
  REFITD_CHECK(false);
}

// Returns where in a hello the version, the random bytes and the session id have ended. `begin`:
// where the hello begins.
size_t AfterSession(std::string_view hello, size_t begin) {
  const size_t session = begin + kMessageHeader + 2 + 32;
  return session + 1 + Number(hello, session, 1);
}

KeyPtr ReadKey(const std::string& pem) {
  const BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  KeyPtr key(PEM_read_bio_PrivateKey(bio.get(), nullptr, nullptr, nullptr));
  REFITD_CHECK(key != nullptr);
  return key;
}

std::string ReadCertificate(const std::string& pem) {
  const BioPtr bio(BIO_new_mem_buf(pem.data(), static_cast<int>(pem.size())));
  const X509Ptr certificate(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
  REFITD_CHECK(certificate != nullptr);
  std::string der(static_cast<size_t>(i2d_X509(certificate.get(), nullptr)), '\0');
  uint8_t* to = Bytes(der);
  REFITD_CHECK(i2d_X509(certificate.get(), &to) == static_cast<int>(der.size()));
  return der;
}

std::string Sign(EVP_PKEY* key, std::string_view text) {
  const DigestContext context(EVP_MD_CTX_new());
  std::string signature(128, '\0');
  size_t bytes = signature.size();
  REFITD_CHECK(
      EVP_DigestSignInit_ex(context.get(), nullptr, "SHA256", nullptr, nullptr, key, nullptr) ==
          1 &&
      EVP_DigestSign(context.get(), Bytes(signature), &bytes, Bytes(text), text.size()) == 1);
  signature.resize(bytes);
  return signature;
}

Digest SharedWith(EVP_PKEY* own, std::string_view share) {
  const KeyPtr other(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_X25519, nullptr, Bytes(share), share.size()));
  const KeyContext context(EVP_PKEY_CTX_new_from_pkey(nullptr, own, nullptr));
  Digest shared;
  size_t bytes = shared.size();
  REFITD_CHECK(other != nullptr && EVP_PKEY_derive_init(context.get()) == 1 &&
               EVP_PKEY_derive_set_peer_ex(context.get(), other.get(), 0) == 1 &&
               EVP_PKEY_derive(context.get(), shared.data(), &bytes) == 1 &&
               bytes == shared.size());
  return shared;
}

EVP_CIPHER* Aes128Gcm() {
  static EVP_CIPHER* const cipher = EVP_CIPHER_fetch(nullptr, "AES-128-GCM", nullptr);
  return cipher;
}

EVP_CIPHER_CTX* CipherToUse() {
  static const CipherContext context(EVP_CIPHER_CTX_new());
  return context.get();
}

}  // namespace

BareTlsIdentity::BareTlsIdentity(std::string with_hello, const Certificates& own)
    : hello(std::move(with_hello)),
      share(EVP_PKEY_Q_keygen(nullptr, nullptr, "X25519")),
      key(ReadKey(own.key)) {
  size_t at = AfterSession(hello, kRecordHeader);
  at += 2 + Number(hello, at, 2);  // cipher suites
  at += 1 + Number(hello, at, 1);  // methods of compression
  size_t bytes = kShareBytes;
  REFITD_CHECK(
      EVP_PKEY_get_raw_public_key(share.get(), Bytes(hello) + ShareIn(hello, at, 2), &bytes) == 1 &&
      bytes == kShareBytes);
  const std::string der = ReadCertificate(own.certificate);
  const std::string entry = Text(der.size(), 3) + der + Text(0, 2);
  certificate = MessageOf(kCertificate, Text(0, 1) + Text(entry.size(), 3) + entry);
}

void BareTlsClient::Keys::Set(const Secret& secret) {
  const Digest new_key = Expand(secret, "key", "", key.size());
  const Digest new_iv = Expand(secret, "iv", "", iv.size());
  std::copy_n(new_key.begin(), key.size(), key.begin());
  std::copy_n(new_iv.begin(), iv.size(), iv.begin());
  records = 0;
}

std::array<uint8_t, 12> BareTlsClient::Keys::Nonce() {
  std::array<uint8_t, 12> nonce = iv;
  for (size_t i = 0; i < 8; ++i) nonce[11 - i] ^= static_cast<uint8_t>(records >> (8 * i));
  ++records;
  return nonce;
}

std::string BareTlsClient::Seal(Keys* keys, uint8_t type, std::string_view plain) {
  const std::string content = std::string(plain) + static_cast<char>(type);
  std::string record = Text(kApplicationData, 1) + Text(0x0303, 2) +
                       Text(content.size() + kTagBytes, 2) +
                       std::string(content.size() + kTagBytes, '\0');
  EVP_CIPHER_CTX* const context = CipherToUse();
  uint8_t* const body = Bytes(record) + kRecordHeader;
  int n = 0;
  REFITD_CHECK(
      EVP_EncryptInit_ex2(context, Aes128Gcm(), keys->key.data(), keys->Nonce().data(), nullptr) ==
          1 &&
      EVP_EncryptUpdate(context, nullptr, &n, Bytes(record), kRecordHeader) == 1 &&
      EVP_EncryptUpdate(context, body, &n, Bytes(content), static_cast<int>(content.size())) == 1 &&
      EVP_EncryptFinal_ex(context, body + n, &n) == 1 &&
      EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_GET_TAG, kTagBytes, body + content.size()) == 1);
  return record;
}

void BareTlsClient::Unseal(Keys* keys, Record* record) {
  REFITD_CHECK(record->bytes.size() > kTagBytes);
  const size_t bytes = record->bytes.size() - kTagBytes;
  const std::string header =
      Text(kApplicationData, 1) + Text(0x0303, 2) + Text(record->bytes.size(), 2);
  std::string content(bytes, '\0');
  EVP_CIPHER_CTX* const context = CipherToUse();
  int n = 0;
  REFITD_CHECK(EVP_DecryptInit_ex2(context, Aes128Gcm(), keys->key.data(), keys->Nonce().data(),
                                   nullptr) == 1 &&
               EVP_DecryptUpdate(context, nullptr, &n, Bytes(header), kRecordHeader) == 1 &&
               EVP_DecryptUpdate(context, Bytes(content), &n, Bytes(record->bytes),
                                 static_cast<int>(bytes)) == 1 &&
               EVP_CIPHER_CTX_ctrl(context, EVP_CTRL_AEAD_SET_TAG, kTagBytes,
                                   Bytes(record->bytes) + bytes) == 1 &&
               EVP_DecryptFinal_ex(context, Bytes(content) + n, &n) == 1);
  content.resize(content.find_last_not_of('\0') + 1);  // the padding goes
  REFITD_CHECK(!content.empty());
  record->type = static_cast<uint8_t>(content.back());
  content.pop_back();
  record->bytes = std::move(content);
}

bool BareTlsClient::NextRecord(Record* record) {
  for (;;) {
    if (incoming_.size() < kRecordHeader) return false;
    const size_t bytes = Number(incoming_, 3, 2);
    if (incoming_.size() < kRecordHeader + bytes) return false;
    record->type = static_cast<uint8_t>(incoming_[0]);
    record->bytes = incoming_.substr(kRecordHeader, bytes);
    incoming_.erase(0, kRecordHeader + bytes);
    if (record->type == kChangeCipherSpec) continue;
    if (encrypted_) {
      REFITD_CHECK(record->type == kApplicationData);
      Unseal(&from_listener_, record);
    }
    return true;
  }
}

// Derives the secrets and keys of the handshake from both hellos, as in RFC 8446, 7.1.
void BareTlsClient::TakeServerHello(std::string_view message) {
  const size_t at = AfterSession(message, 0);
  REFITD_CHECK(Number(message, at, 2) == kAes128GcmSha256);
  const size_t key = ShareIn(message, at + 3, 0);
  transcript_ = identity_.hello.substr(kRecordHeader) + std::string(message);
  const Digest early = Hmac({}, View(Digest{}));
  const Digest shared = SharedWith(identity_.share.get(), message.substr(key, kShareBytes));
  handshake_ = Hmac(ExpandTranscript(early, "derived", ""), View(shared));
  own_handshake_ = ExpandTranscript(handshake_, "c hs traffic", transcript_);
  to_listener_.Set(own_handshake_);
  from_listener_.Set(ExpandTranscript(handshake_, "s hs traffic", transcript_));
  encrypted_ = true;
}

std::string BareTlsClient::TakeFlight(std::string_view bytes) {
  incoming_ += bytes;
  for (Record record; NextRecord(&record);) {
    REFITD_CHECK(record.type == kHandshake);
    messages_ += record.bytes;
    while (messages_.size() >= kMessageHeader) {
      const size_t whole = kMessageHeader + Number(messages_, 1, 3);
      if (messages_.size() < whole) break;
      const std::string message = messages_.substr(0, whole);
      messages_.erase(0, whole);
      if (Number(message, 0, 1) == kServerHello) {
        TakeServerHello(message);
        continue;
      }
      transcript_ += message;
      if (Number(message, 0, 1) == kFinished) return Answer();
    }
  }
  return "";
}

std::string BareTlsClient::Answer() {
  const Digest master = Hmac(ExpandTranscript(handshake_, "derived", ""), View(Digest{}));
  const Digest to = ExpandTranscript(master, "c ap traffic", transcript_);
  const Digest from = ExpandTranscript(master, "s ap traffic", transcript_);
  std::string flight =
      Text(kChangeCipherSpec, 1) + Text(0x0303, 2) + Text(1, 2) + std::string(1, '\1');
  const auto add = [&](std::string_view message) {
    transcript_ += message;
    flight += Seal(&to_listener_, kHandshake, message);
  };
  add(identity_.certificate);
  const std::string signature =
      Sign(identity_.key.get(), std::string(64, ' ') + "TLS 1.3, client CertificateVerify" + '\0' +
                                    std::string(View(Sha256(transcript_))));
  constexpr size_t kEcdsaP256Sha256 = 0x0403;
  add(MessageOf(kCertificateVerify,
                Text(kEcdsaP256Sha256, 2) + Text(signature.size(), 2) + signature));
  const Digest finished = Hmac(Expand(own_handshake_, "finished", ""), View(Sha256(transcript_)));
  add(MessageOf(kFinished, View(finished)));
  to_listener_.Set(to);
  from_listener_.Set(from);
  return flight;
}

std::string BareTlsClient::Encrypt(std::string_view plain) {
  return Seal(&to_listener_, kApplicationData, plain);
}

std::string BareTlsClient::Decrypt(std::string_view bytes) {
  incoming_ += bytes;
  std::string plain;
  for (Record record; NextRecord(&record);) {
    if (record.type == kApplicationData) plain += record.bytes;  // the others are alerts
  }
  return plain;
}

}  // namespace refitd
