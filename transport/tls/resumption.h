// Turns off the resumption of TLS sessions.
//
// A server that takes a session up again verifies no certificate: with OpenSSL's defaults a client
// whose certificate has expired would be let in for two hours more. gRPC 1.51 has no setting for
// that, so OpenSSL is told.
#ifndef REFITD_TRANSPORT_TLS_RESUMPTION_H_
#define REFITD_TRANSPORT_TLS_RESUMPTION_H_

namespace refitd {

// Servers of this process give no session tickets from now on, so that each connection is a full
// handshake. TLS 1.3 resumes by tickets alone (see RequireTls13). Called once in a process, before
// gRPC's first use of TLS.
void TurnOffTlsResumption();

}  // namespace refitd

#endif  // REFITD_TRANSPORT_TLS_RESUMPTION_H_
