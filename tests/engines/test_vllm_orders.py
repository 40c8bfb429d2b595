"""A real vLLM server in random orders of updates, sleep, waking, kills and requests: 200 of seed 1, unless `tools/engines --orders N
--seed N` (REFITD_ENGINES_ORDERS, REFITD_ENGINES_SEED) asks for others. Each order that ran is printed."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from refitd import testing
from server import Server
from support import EngineFailed, TrainerProcess, following

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 26), reason="this version of vLLM has no endpoint plugins")

SEED = int(os.environ.get("REFITD_ENGINES_SEED", "1"))
ORDERS = int(os.environ.get("REFITD_ENGINES_ORDERS", "200"))
STEPS = 5  # of an order
PROMPT = "Tell me"
# How long an engine that must not answer is listened to.
SILENCE_SECONDS = 0.3
# A server takes a minute to come up again, so that each of these kills happens once in all orders: who dies, and when.
RESTARTS = [(who, phase) for who in ("worker", "server") for phase in ("idle", "prepare", "parts", "commit")]


class World:
    """A server, its daemon and a trainer, and what the server may answer.

    `held`: the version that must be served and its checkpoint's number; None: nothing may be served before the next version.
    `asleep`: whether somebody put the engine to sleep.
    """

    def __init__(self, choose: random.Random, daemon: Any, checkpoints: list[Path], folder: Path) -> None:
        self.choose, self.daemon, self.checkpoints, self.folder = choose, daemon, checkpoints, folder
        self.version = 0
        self.held: tuple[int, int] | None = None
        self.asleep = False
        self.texts: dict[int, str] = {}  # by checkpoint
        self.counts: dict[str, int] = {}  # how often each step was made
        self.server = Server(checkpoints[0], folder / "server.log", daemon.socket, VLLM_SERVER_DEV_MODE="1")
        self.trainer = self._new_trainer()

    def _new_trainer(self) -> TrainerProcess:
        return TrainerProcess(self.checkpoints[0], self.folder / "trainer.log", follow=following(self.daemon))

    def begin(self) -> None:
        self.trainer.started()
        self.server.up()
        self.attached()
        self.update()  # of both checkpoints, whose texts are learned
        self.update()
        assert self.texts[0] != self.texts[1], "the two checkpoints give the same text: the test could not fail"

    # ---- what is seen ----

    def status(self) -> dict[str, Any]:
        """What the server tells; nothing of it holds where it does not answer in time."""
        found: dict[str, Any] | None = self.server.get("/refitd/status")[1]
        return found or {"state": None, "attached": None, "ready": None, "version": None}

    def attached(self) -> None:
        self.server.until(lambda: self.status()["attached"] is True, "it attaches")

    def settled(self) -> None:
        """Waits for the state that the engine must be in, and looks at what it answers."""
        state = "asleep" if self.asleep else "serving" if self.held is not None else "dirty"
        self.server.until(lambda: self.status()["state"] == state, f"it is {state}")
        if self.held is None or self.asleep:
            assert self.server.get("/refitd/ready")[0] == 503
            return
        self.server.until(lambda: self.server.get("/refitd/ready")[0] == 200, "it is ready")
        found = self.status()
        assert found["version"] == self.held[0] or found["state"] is None, (found, self.held)

    def learn(self) -> None:
        """After an end that may have been either: what the engine tells decides, and what it answers must agree."""
        self.server.until(lambda: self.status()["state"] in ("serving", "dirty"), "the update ends")
        found = self.status()
        if found["state"] == "dirty":
            self.held = None
        elif self.held is None or found["version"] != self.held[0]:
            assert found["version"] == self.version, (found, self.held)
            self.held = self.version, self.version % 2
            self.request()

    # ---- steps ----

    def update(self) -> None:
        self.version += 1
        number = self.version % 2
        if self.asleep:
            with pytest.raises(EngineFailed):
                self.trainer.call("send", self.version, str(self.checkpoints[number]), 0.5)
            return
        self.attached()
        assert self.trainer.call("send", self.version, str(self.checkpoints[number]), 120) == 1
        self.held = self.version, number
        self.settled()
        self.request()

    def request(self) -> None:
        if self.held is None or self.asleep:
            assert self.server.gives_no_token(PROMPT, SILENCE_SECONDS)
            return
        text, version = self.server.complete(PROMPT)
        assert (text, version) == (self.texts.setdefault(self.held[1], text), self.held[0])

    def sleep(self) -> None:
        level = self.choose.choice((1, 2))
        assert self.server.post(f"/sleep?level={level}") == 200
        if level == 2 and not self.asleep:
            self.held = None
        self.asleep = True

    def wake(self) -> None:
        assert self.server.post("/wake_up") == 200
        self.asleep = False

    def resume(self) -> None:
        """vLLM's own route, which must not bring a paused engine before clients."""
        assert self.server.post("/resume") == (200 if self.held is not None and not self.asleep else 409)

    def begun(self, phase: str) -> bool:
        """Brings an update up to the phase; whether one is under way."""
        if phase == "idle" or self.asleep:
            return False
        self.attached()
        self.version += 1
        self.trainer.call("begin", self.version, 120)
        checkpoint = str(self.checkpoints[self.version % 2])
        if phase != "prepare":
            self.trainer.call("push", checkpoint, 0)
            self.held = None  # unless it is committed
        if phase == "commit":
            self.trainer.call("push", checkpoint, 1)
            self.trainer.begin("commit")
        return True

    def give_up(self) -> None:
        if self.begun(self.choose.choice(("prepare", "parts"))):
            self.trainer.call("abort")

    def kill_trainer(self) -> None:
        phase = self.choose.choice(("idle", "prepare", "parts", "commit"))
        under_way = self.begun(phase)
        self.trainer.kill()
        self.trainer = self._new_trainer()
        self.trainer.started()
        if under_way and phase == "commit":
            self.learn()

    def kill_daemon(self) -> None:
        phase = self.choose.choice(("idle", "prepare", "parts", "commit"))
        before = self.held
        under_way = self.begun(phase)
        self.daemon.kill()
        if not self.asleep:
            self.server.until(lambda: self.status()["attached"] is False, "it notices")
        self.trainer.kill()
        if under_way:
            # An engine that said that it is ready can't tell whether the daemon wrote.
            self.held = before if phase == "prepare" else None
            self.learn()
        self.daemon.start()
        self.trainer = self._new_trainer()
        self.trainer.started()
        if not self.asleep:
            self.attached()

    def restart(self, who: str, phase: str) -> None:
        """The worker or the server dies. The server that is started instead has random weights, and is ready with the next version."""
        if self.asleep:
            self.wake()
        under_way = self.begun(phase)
        if who == "worker":
            os.kill(self.server.core(), signal.SIGKILL)
            self.server.kill_when_it_answers_nothing(PROMPT)
        else:
            self.server.kill()
        if under_way:
            try:
                self.trainer.result() if phase == "commit" else self.trainer.call("abort")
            except EngineFailed:
                pass  # the update may end for want of an engine
        self.server.start()
        self.server.up()
        self.held = None
        self.settled()
        self.attached()
        self.update()

    STEPS_OF = (
        ("update", 10), ("request", 6), ("give_up", 5), ("sleep", 3), ("wake", 4), ("resume", 2), ("kill_trainer", 1), ("kill_daemon", 1),
    )  # fmt: skip

    def order(self, restart: tuple[str, str] | None) -> None:
        names = self.choose.choices([name for name, _ in self.STEPS_OF], [weight for _, weight in self.STEPS_OF], k=STEPS)
        at = self.choose.randrange(STEPS) if restart is not None else None
        for place, name in enumerate(names):
            if place == at and restart is not None:
                self.counts[str(restart)] = self.counts.get(str(restart), 0) + 1
                self.restart(*restart)
            self.counts[name] = self.counts.get(name, 0) + 1
            getattr(self, name)()
            self.settled()
        # Never a paused engine for good.
        if self.asleep:
            self.wake()
        self.update()

    def close(self) -> None:
        self.trainer.kill()
        self.server.kill()


def test_random_orders(tmp_path: Path) -> None:
    """The engine answers with the version that it tells, whole, or not at all; and with each next version again."""
    choose = random.Random(SEED)
    checkpoints = [models.make("qwen3", tmp_path, seed) for seed in (1, 2)]
    restarts = dict(zip(choose.sample(range(ORDERS), min(ORDERS, len(RESTARTS))), RESTARTS))
    started = time.monotonic()
    with testing.daemon() as daemon:
        world = World(choose, daemon, checkpoints, tmp_path)
        try:
            world.begin()
            for number in range(ORDERS):
                try:
                    world.order(restarts.get(number))
                except BaseException as error:
                    error.add_note(f"seed {SEED}, order {number}, steps {world.counts}, held {world.held}, asleep {world.asleep}")
                    raise
                print(f"order {number} after {time.monotonic() - started:.0f} s, version {world.version}", flush=True)
        finally:
            world.close()
    print(f"\n{ORDERS} orders in {time.monotonic() - started:.0f} s: {world.counts}")
