"""This build against the release before, which speaks protocol version 1 alone: its protos are all that this test has.

Each counterpart refuses what that release refuses: another `protocol` than 1 in a hello or in a welcome, and a message on
a link whose kind it does not know.
"""

import concurrent.futures
import mmap
import os
import queue
import socket
import struct
import subprocess
import tempfile
import threading
import unittest

import grpc

from daemon import CHILD_SECONDS, Daemon
from refitd.v1 import (
    engine_pb2,
    engine_pb2_grpc,
    operator_pb2,
    operator_pb2_grpc,
    peer_pb2,
    peer_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
    types_pb2,
)
from stub_trainer import MODEL, SECONDS, StubTrainer, tensor_bytes, unpacked

V1 = types_pb2.PROTOCOL_VERSION_1
INCARNATION = 7
MESSAGE_BYTES = 1 << 20
SPEC = types_pb2.GroupSpec(trainer_ranks=1, min_instances=1, slot_bytes=65536, slots=4)


class Stream:
    """One side of a bidirectional stream. It keeps the messages that were read; each is waited for with a deadline."""

    def __init__(self, test, incoming):
        self.test = test
        self.outgoing = queue.Queue()
        self.read = queue.Queue()
        self.unknown = []  # messages of a kind that the release before does not have
        self.sequence = 0
        self.incarnation = INCARNATION
        self.incoming = incoming

    def start(self):
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        try:
            for message in self.incoming:
                if message.WhichOneof("kind") is None:
                    self.unknown.append(message)
                self.read.put(message)
        except grpc.RpcError as error:
            self.read.put(error)
        except Exception:  # the call is over
            pass
        self.read.put(None)

    def next(self, kind):
        """Returns the next message of that kind. It answers pings, and drops messages of other kinds."""
        while True:
            try:
                message = self.read.get(timeout=CHILD_SECONDS)
            except queue.Empty:
                self.test.fail("no %s came" % kind)
            if message is None or isinstance(message, grpc.RpcError):
                self.test.fail("the stream ended where %s was to come: %s" % (kind, message))
            if message.WhichOneof("kind") == kind:
                return getattr(message, kind)
            if message.WhichOneof("kind") == "ping":
                self.say(peer_pb2.PeerMessage, pong=peer_pb2.PeerPong(number=message.ping.number))

    def say(self, message, **kind):
        """A report or a command, numbered."""
        self.sequence += 1
        self.outgoing.put(message(sequence=self.sequence, incarnation=self.incarnation, **kind))


def listener_of(daemon):
    with daemon.channel() as channel:
        status = operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
    (tcp,) = [name[len("tcp:") :] for name in status.listeners if name.startswith("tcp:")]
    return tcp


class DaemonTest(unittest.TestCase):
    """This build's daemon."""

    def engine(self, channel, group, coordinator=""):
        stream = Stream(self, None)
        stream.outgoing.put(
            engine_pb2.EngineMessage(
                hello=engine_pb2.EngineHello(
                    protocol=V1,
                    group=group,
                    spec=SPEC,
                    coordinator=coordinator,
                    instance="i",
                    world_size=1,
                    delivery=types_pb2.DELIVERY_STAGED,
                )
            )
        )
        stub = engine_pb2_grpc.EngineStub(channel)
        stream.incoming = stub.Attach(iter(stream.outgoing.get, None), timeout=SECONDS)
        stream.start()
        return stream

    def test_it_serves_members_of_the_release_before(self):
        with Daemon() as daemon, daemon.channel() as channel:
            trainer = StubTrainer(channel, "policy", instances=1)
            self.assertEqual(trainer.lease.protocol, V1)
            engine = subprocess.Popen(["client/examples/engine_example", daemon.socket, "policy", "now", "1"])
            self.addCleanup(engine.kill)
            trainer.begin(1)
            trainer.push(1, unpacked(0, 1, range(len(MODEL))))
            self.assertEqual([i.committed for i in trainer.commit(1, 1).instances], [True])
            self.assertEqual(engine.wait(timeout=SECONDS), 0)
            trainer.detach()

    def test_it_refuses_a_version_below_its_lowest_and_names_both(self):
        with Daemon() as daemon, daemon.channel() as channel:
            hello = trainer_pb2.TrainerHello(protocol=0, group="policy", spec=SPEC, world_size=1)
            events = trainer_pb2_grpc.TrainerStub(channel).Attach(
                iter([trainer_pb2.TrainerMessage(hello=hello)]), timeout=SECONDS
            )
            with self.assertRaises(grpc.RpcError) as refused:
                next(events)
            self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            self.assertIn("speaks versions 0 to 0, this daemon speaks 1 to 6", refused.exception.details())

    def test_a_daemon_of_the_release_before_joins_it(self):
        with Daemon("--listen-tcp", "127.0.0.1:0", "--insecure", "--daemon-id", "new") as daemon:
            with daemon.channel() as local, grpc.insecure_channel(listener_of(daemon)) as channel:
                link = Stream(self, None)
                hello = peer_pb2.PeerHello(
                    protocol=V1,
                    group="policy",
                    spec=SPEC,
                    daemon_id="old",
                    boot_id=b"0123456789abcdef",
                    message_bytes=MESSAGE_BYTES,
                )
                link.outgoing.put(peer_pb2.PeerMessage(hello=hello))
                link.incoming = peer_pb2_grpc.PeerStub(channel).Link(iter(link.outgoing.get, None), timeout=SECONDS)
                link.start()
                link.incarnation = link.next("accepted").incarnation

                engine = peer_pb2.PeerEngine(instance="far", world_size=1, delivery=types_pb2.DELIVERY_STAGED)
                link.say(peer_pb2.PeerMessage, attach=peer_pb2.PeerAttach(member=3, engine=engine))
                self.assertEqual(link.next("welcome").member, 3)

                # This daemon's data plane ends an update: the update is prepared, given up, and its members are told.
                trainer = trainer_pb2_grpc.TrainerStub(local)
                outgoing = queue.Queue()
                outgoing.put(
                    trainer_pb2.TrainerMessage(
                        hello=trainer_pb2.TrainerHello(protocol=V1, group="policy", spec=SPEC, world_size=1)
                    )
                )
                events = trainer.Attach(iter(outgoing.get, None), timeout=SECONDS)
                lease = next(events).welcome.lease
                begun = trainer.Begin.future(
                    trainer_pb2.BeginRequest(lease=lease, version=1, tensor_count=1), timeout=SECONDS
                )
                prepare = link.next("prepare")
                self.assertEqual((prepare.version, list(prepare.engines)), (1, [3]))
                epoch = link.next("epoch_open").epoch
                failed = peer_pb2.PeerStatus(code=grpc.StatusCode.UNAVAILABLE.value[0], message="no wire here")
                link.say(peer_pb2.PeerMessage, epoch_opened=peer_pb2.PeerEpochOpened(epoch=epoch, status=failed))
                link.say(peer_pb2.PeerMessage, ready=peer_pb2.PeerReady(member=3, update=prepare.update))
                self.assertEqual(begun.exception(timeout=SECONDS).code(), grpc.StatusCode.ABORTED)
                aborted = link.next("aborted")
                self.assertEqual((aborted.member, aborted.version, aborted.dirty), (3, 1, False))
                self.assertEqual(link.unknown, [])
                outgoing.put(None)
                link.outgoing.put(None)

    def test_a_daemon_of_the_release_before_stays_out_of_a_group_that_demands_encryption(self):
        # GroupSpec.encrypted_data, which the old messages do not have.
        demanding = types_pb2.GroupSpec.FromString(SPEC.SerializeToString() + b"\x40\x01")
        with Daemon("--listen-tcp", "127.0.0.1:0", "--insecure", "--daemon-id", "new") as daemon:
            with daemon.channel() as local, grpc.insecure_channel(listener_of(daemon)) as channel:
                outgoing = queue.Queue()
                hello = trainer_pb2.TrainerHello(protocol=V1, group="policy", spec=demanding, world_size=1)
                outgoing.put(trainer_pb2.TrainerMessage(hello=hello))
                events = trainer_pb2_grpc.TrainerStub(local).Attach(iter(outgoing.get, None), timeout=SECONDS)
                next(events)
                hello = peer_pb2.PeerHello(
                    protocol=V1,
                    group="policy",
                    daemon_id="old",
                    boot_id=b"0123456789abcdef",
                    message_bytes=MESSAGE_BYTES,
                )
                answers = peer_pb2_grpc.PeerStub(channel).Link(
                    iter([peer_pb2.PeerMessage(hello=hello)]), timeout=SECONDS
                )
                with self.assertRaises(grpc.RpcError) as refused:
                    next(answers)
                self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
                self.assertIn("daemon old does not know it", refused.exception.details())
                outgoing.put(None)

    def test_it_joins_a_coordinator_of_the_release_before(self):
        coordinator = OldCoordinator(self)
        with Daemon("--insecure", "--daemon-id", "new") as daemon, daemon.channel() as channel:
            engine = self.engine(channel, "policy", coordinator.address)
            link = coordinator.link()
            attached = link.next("attach")
            self.assertEqual((attached.engine.instance, attached.engine.world_size), ("i", 1))
            link.say(peer_pb2.PeerAnswer, welcome=peer_pb2.PeerWelcome(member=attached.member))
            self.assertEqual(engine.next("welcome").lease.protocol, V1)
            link.say(
                peer_pb2.PeerAnswer,
                prepare=peer_pb2.PeerPrepare(
                    update=5,
                    version=1,
                    remaining_ms=30_000,
                    tensor_count=1,
                    verification=types_pb2.VERIFICATION_READBACK,
                    engines=[attached.member],
                ),
            )
            prepare = engine.next("prepare")
            engine.outgoing.put(
                engine_pb2.EngineMessage(ready=engine_pb2.Ready(version=1, update_id=prepare.update_id))
            )
            self.assertEqual(link.next("ready").member, attached.member)
            aborted = peer_pb2.PeerAborted(member=attached.member, version=1, reason="no more")
            link.say(peer_pb2.PeerAnswer, aborted=aborted)
            self.assertEqual(engine.next("aborted").reason, "no more")
            engine.outgoing.put(None)
            self.assertEqual(link.next("gone").member, attached.member)
            self.assertEqual(link.unknown, [])
        coordinator.stop()


class OldCoordinator(peer_pb2_grpc.PeerServicer):
    """A coordinator of the release before, as far as its link goes."""

    def __init__(self, test):
        self.test = test
        self.links = queue.Queue()
        self.streams = []
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=2))
        peer_pb2_grpc.add_PeerServicer_to_server(self, self.server)
        self.address = "127.0.0.1:%d" % self.server.add_insecure_port("127.0.0.1:0")
        self.server.start()
        test.addCleanup(self.stop)

    def stop(self):
        for stream in self.streams:
            stream.outgoing.put(None)  # ends its thread
        self.server.stop(grace=None)

    def link(self):
        try:
            return self.links.get(timeout=CHILD_SECONDS)
        except queue.Empty:
            self.test.fail("no daemon joined")

    def Link(self, request_iterator, context):
        hello = next(request_iterator).hello
        if hello.protocol != V1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "hello.protocol is %d" % hello.protocol)
        stream = Stream(self.test, request_iterator)
        stream.outgoing.put(
            peer_pb2.PeerAnswer(
                incarnation=INCARNATION,
                accepted=peer_pb2.PeerAccepted(
                    incarnation=INCARNATION, spec=SPEC, coordinator_id="old", message_bytes=MESSAGE_BYTES
                ),
            )
        )
        stream.start()
        self.streams.append(stream)
        self.links.put(stream)
        yield from iter(stream.outgoing.get, None)


class OldDaemon(trainer_pb2_grpc.TrainerServicer, engine_pb2_grpc.EngineServicer):
    """A daemon of the release before, for one trainer or one engine; what was said to it is in `said`."""

    def __init__(self, test):
        self.folder = tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp")
        self.socket = os.path.join(self.folder.name, "refitd.sock")
        self.said = queue.Queue()
        self.regions = {}
        self.descriptors = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.descriptors.bind(self.socket + ".fds")
        self.descriptors.listen()
        threading.Thread(target=self._take_descriptors, daemon=True).start()
        self.server = grpc.server(concurrent.futures.ThreadPoolExecutor(max_workers=8))
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, self.server)
        engine_pb2_grpc.add_EngineServicer_to_server(self, self.server)
        self.server.add_insecure_port("unix:" + self.socket)
        self.server.start()
        test.addCleanup(self.folder.cleanup)
        test.addCleanup(self.descriptors.close)
        test.addCleanup(self.server.stop, None)

    def _take_descriptors(self):
        try:
            while True:
                connection, _ = self.descriptors.accept()
                threading.Thread(target=self._serve_descriptors, args=(connection,), daemon=True).start()
        except OSError:
            pass  # the test is over

    def _serve_descriptors(self, connection):
        with connection:
            while True:
                request, fds, _, _ = socket.recv_fds(connection, 64, 1)
                if not request:
                    return
                magic, version = struct.unpack_from("<II", request)
                (size,) = struct.unpack_from("<q", request, 32)
                region = len(self.regions) + 1
                if fds:
                    self.regions[region] = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
                    os.close(fds[0])
                connection.send(struct.pack("<IIIIQqq216s", magic, version, 0, 0, region, 0, 0, b""))

    def _welcome(self, hello, context):
        if hello.protocol != V1:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "protocol: version %d is not served" % hello.protocol)
        return types_pb2.Welcome(
            lease=types_pb2.Lease(token=b"t" * 16, incarnation=INCARNATION, protocol=V1),
            member_id=1,
            descriptor_socket=self.socket + ".fds",
            limits=types_pb2.Limits(
                inline_bytes=1 << 20,
                outstanding_buckets=4,
                default_duration_ms=30_000,
                max_duration_ms=60_000,
                message_bytes=8 << 20,
            ),
            slot_bytes=65536,
            slots=4,
        )

    def _check(self, lease, context):
        if lease.protocol != V1 or lease.incarnation != INCARNATION:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "lease: %s" % lease)


class OldTrainerDaemon(OldDaemon):
    def Attach(self, request_iterator, context):
        yield trainer_pb2.TrainerEvent(welcome=self._welcome(next(request_iterator).hello, context))
        for message in request_iterator:
            self.said.put(message.WhichOneof("kind"))

    def Begin(self, request, context):
        self._check(request.lease, context)
        self.said.put("begin")
        return trainer_pb2.BeginResponse(update_id=5, remaining_ms=30_000, instances=1)

    def PushBucket(self, request, context):
        self._check(request.lease, context)
        bucket = request.bucket
        names = [name for name, _, _, _ in MODEL]
        for i, name in enumerate(bucket.names):
            wanted = tensor_bytes(request.version, names.index(name))
            if bucket.HasField("inline_bytes"):
                found = bucket.inline_bytes.chunks[i]
            else:
                place = bucket.regions.refs[i]
                found = self.regions[place.region_id][place.byte_offset : place.byte_offset + len(wanted)]
            self.said.put(name if found == wanted else "%s is wrong" % name)
        return trainer_pb2.PushBucketResponse(group_seq=bucket.seq)

    def Commit(self, request, context):
        self._check(request.lease, context)
        self.said.put("commit of %d" % request.bucket_count)
        taken = types_pb2.InstanceResult(instance="i", committed=True)
        return trainer_pb2.CommitResponse(version=request.version, instances=[taken])


class OldEngineDaemon(OldDaemon):
    def Attach(self, request_iterator, context):
        yield engine_pb2.EngineEvent(welcome=self._welcome(next(request_iterator).hello, context))
        yield engine_pb2.EngineEvent(prepare=engine_pb2.Prepare(version=1, update_id=5, remaining_ms=30_000))
        self.said.put(next(request_iterator).WhichOneof("kind"))
        context.abort(grpc.StatusCode.ABORTED, "the test has seen enough")


class ClientTest(unittest.TestCase):
    """This build's client."""

    def run_client(self, *command):
        client = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.addCleanup(client.kill)
        _, errors = client.communicate(timeout=SECONDS)
        return client.returncode, errors

    def test_a_trainer_works_with_a_daemon_of_the_release_before(self):
        daemon = OldTrainerDaemon(self)
        code, errors = self.run_client("client/examples/trainer_example", daemon.socket, "policy", "1")
        self.assertEqual((code, errors), (0, ""))
        said = []
        while not daemon.said.empty():
            said.append(daemon.said.get())
        # Pushes and the commit are under way together.
        pushed = [name for name, _, _, _ in MODEL]
        self.assertEqual(sorted(set(said) - {"detach"}), sorted(["begin", "commit of 2", *pushed]))

    def test_an_engine_works_with_a_daemon_of_the_release_before(self):
        daemon = OldEngineDaemon(self)
        code, errors = self.run_client("client/examples/engine_example", daemon.socket, "policy", "i", "1", "staged")
        self.assertEqual(daemon.said.get(timeout=SECONDS), "ready")
        self.assertEqual(code, 1)
        self.assertIn("the test has seen enough", errors)


if __name__ == "__main__":
    unittest.main()
