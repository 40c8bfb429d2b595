"""Attacks a pair of daemons, as each actor of docs/security.md could, and prints what it got.

Each try is a function that returns what the attacker got, or "" for nothing. The daemons serve a trainer with the
identity spiffe://prod/trainer/owner, which owns group "policy". The attackers are a stranger in the network, somebody
with a certificate of another root, a member without a rule, a trainer of another group, an engine, a peer that is none,
and an operator who may only read.

    bazel test //tests/security:attack --test_output=streamed

Exit code: 0, nothing was got; 1, something was.
"""

import contextlib
import os
import queue
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import time

import grpc

from certificates import Authority
from daemon import CHILD_SECONDS, LOOK_SECONDS, Daemon
from refitd.v1 import engine_pb2, engine_pb2_grpc, operator_pb2, operator_pb2_grpc, peer_pb2, peer_pb2_grpc
from refitd.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2
from stub_trainer import StubTrainer

SECONDS = 20  # deadline of each call
DOMAIN = "spiffe://prod/"
RULES = """
rule { who: "spiffe://prod/trainer/*" role: TRAINER group: "*" }
rule { who: "spiffe://prod/engine" role: ENGINE group: "other" }
rule { who: "spiffe://prod/reader" role: OPERATOR_READ group: "other" }
peers { identity: "spiffe://prod/refitd/*" }
"""
REFUSED = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNAVAILABLE,
           grpc.StatusCode.UNIMPLEMENTED)


def read(path):
    with open(path, "rb") as file:
        return file.read()


class Pair:
    """Two daemons over TLS, and what the attackers have."""

    def __init__(self, stack):
        self.folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp"))
        self.authority = Authority(self.folder)
        other = os.path.join(self.folder, "other")
        os.mkdir(other)
        self.another = Authority(other)
        self.rules = os.path.join(self.folder, "rules.textproto")
        with open(self.rules, "w") as file:
            file.write(RULES)
        self.audit = os.path.join(self.folder, "audit.log")
        self.a = stack.enter_context(self._daemon("a", "--listen-tcp", "127.0.0.1:0", "--peers-listen", "127.0.0.1:0",
                                                  "--metrics-listen", "127.0.0.1:0", "--audit-file", self.audit))
        self.b = stack.enter_context(self._daemon("b"))
        status = self.status()
        listeners = dict(name.split(":", 1) for name in status.listeners)
        self.members, self.links, self.metrics = listeners["tcp"], listeners["peers"], listeners["metrics"]
        self.owner = StubTrainer(self.channel("trainer/owner"), "policy", instances=0)
        self.token = self.owner.lease.token

    def _daemon(self, name, *flags):
        certificate, key = self.authority.issue("refitd-" + name, DOMAIN + "refitd/" + name)
        return Daemon("--config", self.rules, "--daemon-id", name, "--tls-certificate", certificate, "--tls-key", key,
                      "--tls-roots", self.authority.roots, *flags)

    def status(self):
        with self.a.channel() as channel:
            return operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)

    def channel(self, name, address=None, authority=None):
        """A channel of somebody who has a certificate for that identity."""
        authority = authority or self.authority
        certificate, key = authority.issue(name.replace("/", "-"), DOMAIN + name)
        credentials = grpc.ssl_channel_credentials(read(self.authority.roots), read(key), read(certificate))
        return grpc.secure_channel(address or self.members, credentials)


def outcome(call):
    """Makes a call and returns what it got: "" if it was refused."""
    try:
        answer = call()
    except grpc.RpcError as error:
        if error.code() in REFUSED:
            return ""
        return "%s: %s" % (error.code().name, error.details())
    return "an answer: %s" % str(answer).replace("\n", " ")[:200]


def attach(channel, group, engine=False):
    """Attaches as a member, and returns what the first event is."""
    if engine:
        hello = engine_pb2.EngineHello(protocol=1, group=group, instance="thief", world_size=1, delivery=2)
        stream = engine_pb2_grpc.EngineStub(channel).Attach(iter([engine_pb2.EngineMessage(hello=hello)]), timeout=SECONDS)
    else:
        hello = trainer_pb2.TrainerHello(protocol=1, group=group, world_size=1, spec=types_pb2.GroupSpec(trainer_ranks=1))
        stream = trainer_pb2_grpc.TrainerStub(channel).Attach(iter([trainer_pb2.TrainerMessage(hello=hello)]),
                                                              timeout=SECONDS)
    return outcome(lambda: next(stream))


def hold(*command):
    """Runs a command that ends by itself, with its input kept open, and returns its output."""
    reading, writing = os.pipe()
    try:
        return subprocess.run(command, stdin=reading, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS,
                              check=False).stdout
    finally:
        os.close(reading)
        os.close(writing)


def operator(channel):
    return operator_pb2_grpc.OperatorStub(channel)


# ---- the tries: each returns what it got ----


def clear_text(pair):
    """a stranger speaks gRPC in the clear"""
    with grpc.insecure_channel(pair.members) as channel:
        return outcome(lambda: operator(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS))


def no_certificate(pair):
    """a stranger speaks TLS without a certificate"""
    with grpc.secure_channel(pair.members, grpc.ssl_channel_credentials(read(pair.authority.roots))) as channel:
        return outcome(lambda: operator(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS))


def another_root(pair):
    """a certificate with the owner's name, signed by another root"""
    with pair.channel("trainer/owner", authority=pair.another) as channel:
        return attach(channel, "policy")


def older_tls(pair):
    """TLS 1.2"""
    certificate, key = pair.authority.issue("old", DOMAIN + "trainer/owner")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(pair.authority.roots)
    context.load_cert_chain(certificate, key)
    context.set_alpn_protocols(["h2"])
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = pair.members.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=SECONDS) as plain, context.wrap_socket(plain) as secure:
            return "a connection of " + secure.version()
    except (ssl.SSLError, ConnectionError):
        return ""


def resumption(pair):
    """a TLS session is taken up again, without a look at the certificate"""
    certificate, key = pair.authority.issue("again", DOMAIN + "trainer/owner")
    session = os.path.join(pair.folder, "session")
    # s_client reads tickets while it waits for input.
    command = ["timeout", "2", "openssl", "s_client", "-connect", pair.members, "-cert", certificate, "-key", key, "-CAfile",
               pair.authority.roots, "-alpn", "h2", "-tls1_3"]
    done = hold(*command, "-sess_out", session)
    if b"New, TLSv1.3" not in done:
        return "no first connection: " + done.decode()[-200:]
    if b"New Session Ticket arrived" not in done:
        return ""
    return "a resumed session" if b"Reused, TLSv1.3" in hold(*command, "-sess_in", session) else "a ticket"


def no_rule(pair):
    """a certificate of the right root that no rule names: every service"""
    with pair.channel("nobody") as channel:
        got = [attach(channel, "policy"), attach(channel, "new"), attach(channel, "policy", engine=True)]
        got.append(outcome(lambda: operator(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)))
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        got.append(outcome(lambda: health(b"", timeout=SECONDS)))
        reflection = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        got.append(outcome(lambda: next(reflection(iter([b":\x00"]), timeout=SECONDS))))
        return "; ".join(text for text in got if text)


def other_trainer(pair):
    """a trainer of other groups enters, replaces, deletes and aborts the owner's"""
    with pair.channel("trainer/thief") as channel:
        got = [attach(channel, "policy")]
        create = operator_pb2.CreateGroupRequest(group="policy", spec=types_pb2.GroupSpec(trainer_ranks=1), replace=True)
        got.append(outcome(lambda: operator(channel).CreateGroup(create, timeout=SECONDS)))
        delete = operator_pb2.DeleteGroupRequest(group="policy")
        got.append(outcome(lambda: operator(channel).DeleteGroup(delete, timeout=SECONDS)))
        abort = operator_pb2.AbortUpdateRequest(group="policy")
        got.append(outcome(lambda: operator(channel).AbortUpdate(abort, timeout=SECONDS)))
        return "; ".join(text for text in got if text)


def stolen_token(pair):
    """a trainer with the token of the owner's lease begins an update"""
    request = trainer_pb2.BeginRequest(version=99)
    request.lease.CopyFrom(pair.owner.lease)
    with pair.channel("trainer/thief") as channel:
        got = outcome(lambda: trainer_pb2_grpc.TrainerStub(channel).Begin(request, timeout=SECONDS))
    with pair.a.channel() as channel:  # over the unix socket, without a certificate
        return got + outcome(lambda: trainer_pb2_grpc.TrainerStub(channel).Begin(request, timeout=SECONDS))


def guessed_token(pair):
    """a trainer guesses tokens of leases"""
    with pair.channel("trainer/thief") as channel:
        for guess in range(100):
            request = trainer_pb2.BeginRequest(version=99)
            request.lease.CopyFrom(pair.owner.lease)
            request.lease.token = bytes([guess]) * 16
            got = outcome(lambda r=request: trainer_pb2_grpc.TrainerStub(channel).Begin(r, timeout=SECONDS))
            if got:
                return got
    return ""


def engine_elsewhere(pair):
    """an engine of another group attaches to the owner's, to read its weights"""
    with pair.channel("engine") as channel:
        return attach(channel, "policy", engine=True)


def reader(pair):
    """an operator who may read another group reads and writes the owner's"""
    with pair.channel("reader") as channel:
        stub = operator(channel)
        got = [outcome(lambda: stub.GetGroup(operator_pb2.GetGroupRequest(group="policy"), timeout=SECONDS)),
               outcome(lambda: stub.ListMembers(operator_pb2.ListMembersRequest(group="policy"), timeout=SECONDS)),
               outcome(lambda: stub.DeleteGroup(operator_pb2.DeleteGroupRequest(group="other"), timeout=SECONDS)),
               outcome(lambda: next(stub.WatchUpdates(operator_pb2.WatchUpdatesRequest(), timeout=SECONDS)))]
        seen = [group.name for group in stub.GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS).groups]
        seen += [group.name for group in stub.ListGroups(operator_pb2.ListGroupsRequest(), timeout=SECONDS).groups]
        seen += [m.group for m in stub.ListMembers(operator_pb2.ListMembersRequest(), timeout=SECONDS).members]
        return "; ".join(text for text in got + seen if text)


def false_peer(pair):
    """a member's certificate makes a daemon"""
    hello = peer_pb2.PeerMessage(hello=peer_pb2.PeerHello(protocol=1, group="policy", daemon_id="c", boot_id=b"c" * 16,
                                                          message_bytes=1 << 20))
    got = ""
    for name in ("trainer/owner", "nobody"):
        with pair.channel(name, pair.links) as channel:
            got += outcome(lambda: next(peer_pb2_grpc.PeerStub(channel).Link(iter([hello]), timeout=SECONDS)))
    return got


def member_at_links(pair):
    """a member calls at the listener for links"""
    with pair.channel("trainer/thief", pair.links) as channel:
        return attach(channel, "new")


def false_identity(pair):
    """a daemon's address of the data plane names another daemon, whose place it would take"""
    name = (DOMAIN + "refitd/b").encode()
    # transport/sockets/frames.h: communicator, rank and size, token, family and address, port, TLS, streams, identity.
    address = b"RFS1" + struct.pack("<QII16sB16sHBBH", 1, 1, 2, b"t" * 16, 4, b"\x7f\0\0\1", 1, 1, 1, len(name)) + name
    reports = queue.Queue()
    reports.put(peer_pb2.PeerMessage(hello=peer_pb2.PeerHello(protocol=1, group="policy", daemon_id="c", boot_id=b"c" * 16,
                                                              message_bytes=1 << 20)))
    with pair.channel("refitd/c", pair.links) as channel:
        answers = peer_pb2_grpc.PeerStub(channel).Link(iter(reports.get, None), timeout=SECONDS)
        try:
            incarnation = next(answers).accepted.incarnation
            opened = peer_pb2.PeerCommunicatorEnd(communicator=1, address=address)
            reports.put(peer_pb2.PeerMessage(sequence=1, incarnation=incarnation, communicator_opened=opened))
            for _ in answers:  # pings, while the link stands
                pass
        except grpc.RpcError as error:
            return "" if error.code() in REFUSED and name.decode() in error.details() else str(error.details())
        finally:
            reports.put(None)
    return "a link that went on"


def metrics(pair):
    """a stranger, and an operator of another group, read the metrics"""
    host, port = pair.metrics.rsplit(":", 1)
    request = b"GET /metrics HTTP/1.1\r\n\r\n"

    def scrape(connection):
        connection.sendall(request)
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
        return "" if not answer or answer.startswith(b"HTTP/1.1 403") else answer.decode("latin-1")[:200]

    got = ""
    with socket.create_connection((host, int(port)), timeout=SECONDS) as plain, contextlib.suppress(ConnectionError):
        got += scrape(plain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(pair.authority.roots)
    for name in (None, "nobody", "reader"):
        if name is not None:
            context.load_cert_chain(*pair.authority.issue("metrics-" + name, DOMAIN + name))
        with socket.create_connection((host, int(port)), timeout=SECONDS) as plain:
            with contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(plain) as secure:
                got += scrape(secure)
    return got


def descriptors(pair):
    """a stranger to the lease takes the staging pool's descriptor with a guessed token"""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(SECONDS)
        connection.connect(pair.a.socket + ".fds")
        connection.send(b"\x00" * 64)
        with contextlib.suppress(ConnectionError):
            _, fds, _, _ = socket.recv_fds(connection, 4096, 4)
            return "a descriptor" if fds else ""
    return ""


def half_handshakes(pair):
    """a stranger holds half a handshake on hundreds of connections; members are served meanwhile"""
    host, port = pair.members.rsplit(":", 1)
    held = []
    try:
        for i in range(300):
            held.append(socket.create_connection((host, int(port)), timeout=SECONDS))
            held[-1].send(b"\x16\x03\x01\x02\x00" if i % 2 else os.urandom(64))
        with pair.channel("reader") as channel:
            operator(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
    except grpc.RpcError as error:
        return "members were not served: %s" % error.details()
    finally:
        for connection in held:
            connection.close()
    return ""


def flood(pair):
    """a certificate without a rule sends headers without an end; calls that are refused lift nothing"""
    host, port = pair.members.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(pair.authority.roots)
    context.load_cert_chain(*pair.authority.issue("flood", DOMAIN + "nobody"))
    context.set_alpn_protocols(["h2"])
    fields = b"".join(b"\0\5x-%03d\x64" % i + b"v" * 100 for i in range(150))
    with socket.create_connection((host, int(port)), timeout=SECONDS) as plain:
        with contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(plain) as secure:
            # The preface, empty settings, and headers that go on (RFC 9113).
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\0\1\0\0\0\0\1")
            for _ in range(512):
                secure.sendall(struct.pack(">I", len(fields))[1:] + b"\x09\0\0\0\0\1" + fields)
            return "8 MiB of headers were taken"
    with pair.channel("nobody") as channel:
        for _ in range(1000):
            try:
                operator(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
            except grpc.RpcError as error:
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    return ""
    return "a thousand calls on one connection"


def frame(kind, flags, stream, payload=b""):
    """A frame of HTTP/2 (RFC 9113)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def field(name, value):
    """A header field (RFC 7541), literal."""
    return bytes([0, len(name)]) + name + bytes([len(value)]) + value


def request(path):
    """The headers of a call."""
    return b"".join(field(name, value) for name, value in (
        (b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"), (b"te", b"trailers")))


def wait_for_end(connection):
    """Reads frames until one ends stream 1."""
    answer = b""
    while True:
        piece = connection.recv(4096)
        if not piece:
            raise AssertionError("the daemon ended the connection before the attack")
        answer += piece
        while len(answer) >= 9 and len(answer) >= 9 + int.from_bytes(answer[:3], "big"):
            kind, flags, stream = answer[3], answer[4], answer[8]
            if kind in (0, 1) and flags & 1 and stream == 1:
                return
            answer = answer[9 + int.from_bytes(answer[:3], "big"):]


def flood_with_a_rule(pair):
    """a trainer makes one call that a rule allows, and then sends headers without an end, and resets"""
    host, port = pair.members.rsplit(":", 1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(pair.authority.roots)
    context.load_cert_chain(*pair.authority.issue("flood-rule", DOMAIN + "trainer/flood"))
    context.set_alpn_protocols(["h2"])
    push = request(b"/refitd.v1.Trainer/PushBucket")
    fields = b"".join(field(b"x-%03d" % i, b"v" * 100) for i in range(150))

    def headers(turn):
        return frame(1, 0, 3, push) if turn == 0 else frame(9, 0, 3, fields)

    def resets(turn):
        streams = range(3 + 200 * turn, 203 + 200 * turn, 2)
        return b"".join(frame(1, 4, stream, push) + frame(3, 0, stream, b"\0\0\0\x08") for stream in streams)

    got = ""
    for attack in (headers, resets):
        with socket.create_connection((host, int(port)), timeout=SECONDS) as plain:
            with contextlib.suppress(ssl.SSLError, ConnectionError), context.wrap_socket(plain) as secure:
                secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(4, 1, 0) +
                               frame(1, 4, 1, request(b"/grpc.health.v1.Health/Check")) + frame(0, 1, 1, b"\0" * 5))
                wait_for_end(secure)
                for turn in range(4096):
                    secure.sendall(attack(turn))
                got += attack.__name__ + " were taken; "
    return got


TRIES = (clear_text, no_certificate, another_root, older_tls, resumption, no_rule, other_trainer, stolen_token,
         guessed_token, engine_elsewhere, reader, false_peer, member_at_links, false_identity, metrics,
         descriptors, half_handshakes, flood, flood_with_a_rule)


def check_audit(pair):
    """the audit log lacks a refusal, or has a token"""
    wrong = []
    deadline = time.monotonic() + CHILD_SECONDS
    while b'"refusal"' not in read(pair.audit) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
    told = read(pair.audit)
    for wanted in (b'"what":"refusal"', b'"what":"attach"', b"spiffe://prod/nobody"):
        if wanted not in told:
            wrong.append("the audit log lacks %s" % wanted.decode())
    if pair.token in told or pair.token.hex().encode() in told:
        wrong.append("the audit log has a token")
    return "; ".join(wrong)


def main():
    found = 0
    with contextlib.ExitStack() as stack:
        pair = Pair(stack)
        for attempt in (*TRIES, check_audit):
            got = attempt(pair)
            print("%-95s %s" % (attempt.__doc__.split("\n")[0], "GOT " + got if got else "nothing"), flush=True)
            found += bool(got)
        # The owner's lease has outlived all of it.
        (group,) = [g for g in pair.status().groups if g.name == "policy"]
        if group.trainers != 1:
            print("GOT the end of the owner's lease")
            found += 1
        pair.owner.detach()
    print("%d of %d tries got something" % (found, len(TRIES)))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
