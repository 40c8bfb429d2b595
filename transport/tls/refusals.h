// Observes the certificates that TLS refuses in this process.
//
// gRPC 1.51 does not tell its user that a handshake failed, so OpenSSL is asked: the observer sees
// the result of every verification of another side's certificate in this process. The
// observer changes nothing: OpenSSL refuses the same certificates without it.
#ifndef REFITD_TRANSPORT_TLS_REFUSALS_H_
#define REFITD_TRANSPORT_TLS_REFUSALS_H_

#include <functional>
#include <string>

namespace refitd {

// `identity`: of the certificate, empty if it has none. `issuer`: who signed it, as it says itself.
// None of the three is to be trusted.
using RefusalObserver = std::function<void(const std::string& identity, const std::string& issuer,
                                           const std::string& why)>;

// Called once in a process, before any thread. `observer` runs on the threads that make handshakes.
void ObserveTlsRefusals(RefusalObserver observer);

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_REFUSALS_H_
