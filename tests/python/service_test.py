"""refitd under a service manager, whose end of the notification socket the test holds."""

import json
import os
import queue
import shutil
import signal
import socket
import tempfile
import threading
import time
import unittest

import grpc

from daemon import START_SECONDS, STOP_SECONDS, Child, Daemon
from refitd.v1 import operator_pb2, operator_pb2_grpc
from stub_trainer import SECONDS, StubTrainer, unpacked

HEALTH = "/grpc.health.v1.Health/"
SERVING = b"\x08\x01"  # HealthCheckResponse{status: SERVING}
NOT_SERVING = b"\x08\x02"


class ServiceManager:
    """Gets what the service tells, a datagram of KEY=VALUE lines each time.

    Each is taken at once, as a service manager does: a service whose datagrams lie there waits in its next one.
    """

    def __init__(self, test):
        folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        test.addCleanup(shutil.rmtree, folder)
        self.path = os.path.join(folder, "notify")
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        test.addCleanup(self.socket.close)
        self.socket.bind(self.path)
        self.heard = []
        self.datagrams = queue.Queue()  # the lines of each
        reader = threading.Thread(target=self._read)
        reader.start()
        test.addCleanup(reader.join)
        test.addCleanup(self._end)

    def _read(self):
        for datagram in iter(lambda: self.socket.recv(4096), b""):
            self.datagrams.put(datagram.decode().split("\n"))

    def _end(self):
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
            end.sendto(b"", self.path)

    def wait_for(self, line):
        """Waits for a datagram that has this line, and returns its lines."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                lines = self.datagrams.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                raise AssertionError("no %s within %d s, but %s" % (line, START_SECONDS, self.heard)) from None
            self.heard += lines
            if line in lines:
                return lines

    def environment(self):
        environment = dict(os.environ, NOTIFY_SOCKET=self.path, WATCHDOG_USEC="1000000")
        environment.pop("WATCHDOG_PID", None)
        return environment


class Service(Daemon):
    """A daemon that is taken as serving when it says so."""

    def __init__(self, test, *flags):
        self.manager = ServiceManager(test)
        super().__init__(*flags, environment=self.manager.environment())

    def wait_until_serving(self):
        self.manager.wait_for("READY=1")


def check_health(channel):
    return channel.unary_unary(HEALTH + "Check")(b"", timeout=SECONDS)


class ServiceTest(unittest.TestCase):
    def open_update(self, service, channel):
        """A trainer with version 1 begun, and the engine that takes it."""
        trainer = StubTrainer(channel, "policy", instances=1)
        engine = Child(self, "client/examples/engine_example", service.socket, "policy", "replica", "1")
        trainer.begin(1)
        return trainer, engine

    def test_a_service_that_says_it_is_ready_answers_at_once(self):
        with Service(self) as service, service.channel() as channel:
            self.assertEqual(check_health(channel), SERVING)  # a refused connection would fail: nothing tries again

    def test_the_watchdog_is_fed_and_the_end_announced(self):
        with Service(self) as service:
            service.manager.wait_for("WATCHDOG=1")
            service.manager.wait_for("WATCHDOG=1")
            service.process.terminate()
            self.assertIn("STATUS=draining", service.manager.wait_for("STOPPING=1"))
            self.assertEqual(service.process.wait(timeout=STOP_SECONDS), 0)

    def test_a_drain_waits_for_the_open_update_and_shows_in_health_and_status(self):
        with Service(self) as service, service.channel() as channel:
            trainer, engine = self.open_update(service, channel)
            operator = operator_pb2_grpc.OperatorStub(channel)
            health = channel.unary_stream(HEALTH + "Watch")(b"", timeout=SECONDS)
            self.assertEqual(next(health), SERVING)
            self.assertEqual(check_health(channel), SERVING)

            service.process.send_signal(signal.SIGTERM)
            service.manager.wait_for("STOPPING=1")
            self.assertEqual(next(health), NOT_SERVING)
            health.cancel()
            self.assertEqual(check_health(channel), NOT_SERVING)
            self.assertEqual(next(trainer.events).WhichOneof("kind"), "draining")
            self.assertFalse(operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS).serving)
            with self.assertRaises(grpc.RpcError) as refused:
                StubTrainer(channel, "late", instances=1)
            self.assertEqual(refused.exception.code(), grpc.StatusCode.UNAVAILABLE)
            # A service manager would kill a daemon that falls silent here.
            service.manager.wait_for("WATCHDOG=1")
            service.manager.wait_for("WATCHDOG=1")
            self.assertIsNone(service.process.poll())

            trainer.push(1, unpacked(0, 1, [0, 1, 2, 3]))
            self.assertEqual([i.committed for i in trainer.commit(1, 1).instances], [True])
            self.assertEqual(service.process.wait(timeout=STOP_SECONDS), 0)
            engine.finish(0)

    def test_each_line_of_the_log_is_json_whatever_peers_write(self):
        reason = 'he said "no" \\ {maybe} level=error'
        folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        path = os.path.join(folder, "log")
        with Service(self, "--log-format", "json", "--log-file", path) as service, service.channel() as channel:
            trainer, _ = self.open_update(service, channel)
            trainer.abort(1, reason)
            trainer.detach()
        with open(path) as file:
            lines = [json.loads(line) for line in file]
        for line in lines:
            self.assertEqual(set(line), {"ts", "level", "msg"})
            self.assertRegex(line["ts"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
            self.assertIn(line["level"], ("info", "warning"))
        messages = [line["msg"] for line in lines]
        self.assertEqual(len([m for m in messages if "listening on unix:" + service.socket in m]), 1, messages)
        self.assertEqual(len([m for m in messages if reason in m]), 1, messages)
        self.assertIn("SIGTERM: draining", messages)
        self.assertEqual(messages[-1], "drained")


if __name__ == "__main__":
    unittest.main()
