"""The parts that tests share: one daemon for the tests of a class, engines that serve on threads, waits with deadlines."""

import json
import threading
import time
import unittest

import refitd
from refitd import testing

SECONDS = 60  # far longer than anything takes; only a failing test reaches it


class DaemonTest(unittest.TestCase):
    """Tests with a daemon of their class's own. `self.group` is another group in each test."""

    flags = ("--slot-bytes=65536", "--staging-slots=4")
    # The device of the tests' members, also where another test has used CUDA in this process; None: the package finds it.
    device = "host"

    @classmethod
    def setUpClass(cls):
        cls.daemon = testing.Daemon(cls.flags)

    @classmethod
    def tearDownClass(cls):
        status = cls.daemon.stop()
        assert status == 0, f"exit status of refitd: {status}"

    def setUp(self):
        self.group = self.id().rsplit(".", 1)[-1]

    def trainer(self, **options):
        made = refitd.Trainer(self.group, socket=self.daemon.socket, **{"device": self.device, **options})
        self.addCleanup(made.close)
        return made

    def engine(self, instance="a", **options):
        made = refitd.Engine(self.group, instance=instance, socket=self.daemon.socket, **{"device": self.device, **options})
        self.addCleanup(made.close)
        return made

    def status(self):
        return json.loads(self.daemon.control("--output", "json", "status"))


class Server:
    """Answers an engine's events on a thread as an inference server would. `events` are all that came."""

    def __init__(self, test, engine, on_part=None):
        self.engine = engine
        self.events = []
        self.error = None
        self._on_part = on_part
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        test.addCleanup(self.stop)

    def _serve(self):
        try:
            for event in self.engine:
                if isinstance(event, refitd.Prepare):
                    event.ready()
                elif isinstance(event, refitd.Part):
                    if self._on_part is not None:
                        self._on_part(event)
                    event.ack()
                with self._changed:
                    self.events.append(event)
                    self._changed.notify_all()
        except refitd.Error as error:
            with self._changed:
                self.error = error
                self._changed.notify_all()

    def wait_for(self, kind, count=1):
        """The `count`th event of this kind."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(self.of(kind)) >= count or self.error is not None, SECONDS)
            assert found and len(self.of(kind)) >= count, f"no {kind.__name__} in {self.events}, {self.error!r}"
            return self.of(kind)[count - 1]

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def stop(self):
        self.engine.close()
        self._thread.join(SECONDS)
        assert not self._thread.is_alive()


def delivery_of(tensors):
    """The Delivery of tensors, or of a module, that are all written in place: what an adapter decides, and a Rank reads."""
    from refitd.layout.shards import collect
    from refitd.serving.delivery import Delivery

    layout = collect(tensors)
    return Delivery([spec.name for spec in layout.tensors], {}, [], [], [], {}, layout.tensors, layout.boxes, [], {}, [], [], [])


def wait_until(condition, what):
    """Asks until the condition is true."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {what}"
        time.sleep(0.01)


def whole(region, spec, at=0):
    """The box of all of tensor 0, row-major, in `region` at byte `at`."""
    strides, n = [], 1
    for size in reversed(spec.shape):
        strides.insert(0, n)
        n *= size
    nbytes = n * {"float32": 4, "bfloat16": 2, "uint8": 1}[spec.dtype]
    memory = refitd.RegionMemory(region, at, nbytes)
    return refitd.Box(0, (0,) * len(spec.shape), tuple(spec.shape), tuple(strides), memory)
