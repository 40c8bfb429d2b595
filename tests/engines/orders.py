"""Random orders of updates, sleep, waking, kills and requests over a real engine, and what the engine may answer after each step.

An engine is driven through a `Subject`. `tools/engines --orders N` says how many orders there are, and `--seed N` which. What an order
does follows from these two and its own number alone, so that `--first N`, the number at which a run begins, lets a run that was cut go on
with another engine.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import models
import pytest
from refitd import testing
from support import CALL_SECONDS, LOOK_SECONDS, EngineFailed, EngineProcess, Tokens, TrainerProcess, differing, following, fresh

SEED = int(os.environ.get("REFITD_ENGINES_SEED", "1"))
ORDERS = int(os.environ.get("REFITD_ENGINES_ORDERS", "10"))
FIRST = int(os.environ.get("REFITD_ENGINES_FIRST", "0"))
STEPS = 5  # the number of steps in each order
# In these phases of an update somebody is killed.
PHASES = ("idle", "prepare", "parts", "commit")
UPDATE_SECONDS = 120.0
# How long the trainer tries to update an engine that sleeps.
ASLEEP_SECONDS = 0.5


class Subject(Protocol):
    """A real engine that follows the tests' group. Methods return when what they ask for has been done.

    `processes`: the kinds of process that `kill` takes. `resumes`: whether `resume` asks the engine itself to go on.
    """

    processes: tuple[str, ...]
    resumes: bool

    def start(self) -> None:
        """Starts the engine, with random weights; it waits for the group."""

    def kill(self, process: str) -> None:
        """SIGKILL for the process, and the end of all that it leaves behind of the engine."""

    def status(self) -> dict[str, Any] | None:
        """The status, as Driver.status gives it; None where the engine does not answer in time."""

    def tokens(self) -> tuple[list[list[Any]], int]:
        """What support.Tokens has, of prompts that were asked for one after the other, and the version that the answers tell."""

    def gives_no_token(self) -> bool: ...

    def parameters(self) -> list[dict[str, Any]]:
        """By rank, the digest of each parameter and buffer."""

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None: ...

    def resume(self) -> bool:
        """Whether the engine lets itself be resumed."""

    def close(self) -> None: ...


class Orders:
    """A subject with a daemon and a trainer, and what the subject may answer.

    `expected`: by checkpoint, the tokens and parameters of a fresh engine that loaded it.
    `held`: the version that must be served and its checkpoint's number; None: nothing may be served before the next version.
    `asleep`: whether somebody put the engine to sleep.
    """

    STEPS_OF = (
        ("update", 10), ("request", 6), ("give_up", 5), ("sleep", 3), ("wake", 4), ("resume", 2), ("kill_trainer", 1), ("kill_daemon", 1),
    )  # fmt: skip

    def __init__(self, subject: Subject, daemon: Any, checkpoints: list[Path], expected: list[tuple[Tokens, Any]], folder: Path) -> None:
        assert expected[0][0].differ_from(expected[1][0]), "the two checkpoints give the same tokens: the test could not fail"
        self.choose = random.Random()
        self.subject, self.daemon, self.checkpoints, self.expected, self.folder = subject, daemon, checkpoints, expected, folder
        self.version = 0
        self.held: tuple[int, int] | None = None
        self.asleep = False
        self.counts: dict[str, int] = {}  # how often each step was made
        self.trainer = self._new_trainer()

    def run(self) -> None:
        """Makes all orders. Each kill of one of the engine's processes happens in one order, since an engine takes long to come up."""
        started = time.monotonic()
        kills = [(process, phase) for process in self.subject.processes for phase in PHASES]
        at = dict(zip(random.Random(SEED).sample(range(ORDERS), min(ORDERS, len(kills))), kills))
        self.trainer.started()
        self.subject.start()
        self._check()
        self._until(lambda found: found["attached"] is True, "it attaches")
        for number in range(FIRST, ORDERS):
            self.choose.seed(f"{SEED} {number}")
            try:
                self._order(at.get(number))
            except BaseException as error:
                error.add_note(f"seed {SEED}, order {number}, steps {self.counts}, held {self.held}, asleep {self.asleep}")
                raise
            print(f"order {number} after {time.monotonic() - started:.0f} s, version {self.version}", flush=True)
        print(f"\norders {FIRST} to {ORDERS - 1} of seed {SEED} in {time.monotonic() - started:.0f} s: {self.counts}")

    def close(self) -> None:
        self.trainer.kill()
        self.subject.close()

    def _order(self, kill: tuple[str, str] | None) -> None:
        steps = [(name, weight) for name, weight in self.STEPS_OF if name != "resume" or self.subject.resumes]
        names = self.choose.choices([name for name, _ in steps], [weight for _, weight in steps], k=STEPS)
        place = self.choose.randrange(STEPS)
        for number, name in enumerate(names):
            if number == place and kill is not None:
                self._count(f"kill_{kill[0]} ({kill[1]})")
                self.kill_engine(*kill)
            self._count(name)
            getattr(self, name)()
            self._check()
        # An engine never stays paused for good: whatever happened, the next version is served.
        if self.asleep:
            self.wake()
        self.update()
        self._check()

    def _count(self, step: str) -> None:
        self.counts[step] = self.counts.get(step, 0) + 1

    # ---- what is seen ----

    def _until(self, holds: Any, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            found = self.subject.status()
            if found is not None and holds(found):
                return found
            assert time.monotonic() < deadline, f"{what}: not within {CALL_SECONDS} s: {found}"
            time.sleep(LOOK_SECONDS / 20)

    def _check(self) -> None:
        """Waits for the state that the engine must be in, and compares all that it shows with the version that it must hold."""
        state = "asleep" if self.asleep else "dirty" if self.held is None else "serving"
        found = self._until(lambda found: found["state"] == state, f"it is {state}")
        if self.held is None or self.asleep:
            assert not found["ready"], found
            assert self.subject.gives_no_token()
            return
        found = self._until(lambda found: found["ready"], "it is ready")
        assert found["version"] == self.held[0], (found, self.held)
        tokens, parameters = self.expected[self.held[1]]
        assert not differing(self.subject.parameters(), parameters), f"version {self.held[0]}"
        self._check_tokens(tokens, self.held[0])

    def _check_tokens(self, expected: Tokens, version: int) -> None:
        answers, told = self.subject.tokens()
        assert told == version and expected.include(answers), (told, version, answers)

    def _learn(self) -> None:
        """After an end that may have been either: the version that the engine tells decides, and `_check` compares it."""
        found = self._until(lambda found: found["state"] in ("serving", "dirty"), "the update ends")
        if found["state"] == "dirty":
            self.held = None
        elif self.held is None or found["version"] != self.held[0]:
            assert found["version"] == self.version, (found, self.held)
            self.held = self.version, self.version % 2

    # ---- steps ----

    def update(self) -> None:
        self.version += 1
        number = self.version % 2
        if self.asleep:
            with pytest.raises(EngineFailed):
                self.trainer.call("send", self.version, str(self.checkpoints[number]), ASLEEP_SECONDS)
            return
        self._attached()
        assert self.trainer.call("send", self.version, str(self.checkpoints[number]), UPDATE_SECONDS) == 1
        self.held = self.version, number

    def request(self) -> None:
        """A further one, which may find blocks of the prefix cache."""
        if self.held is None or self.asleep:
            assert self.subject.gives_no_token()
        else:
            self._check_tokens(self.expected[self.held[1]][0], self.held[0])

    def sleep(self) -> None:
        level = self.choose.choice((1, 2))
        self.subject.sleep(level)
        if level == 2 and not self.asleep:
            self.held = None
        self.asleep = True

    def wake(self) -> None:
        self.subject.wake()
        self.asleep = False

    def resume(self) -> None:
        """The engine's own way to go on, which must not bring a paused engine before clients."""
        assert self.subject.resume() == (self.held is not None and not self.asleep)

    def give_up(self) -> None:
        if self._begun(self.choose.choice(("prepare", "parts"))):
            self.trainer.call("abort")

    def kill_trainer(self) -> None:
        phase = self.choose.choice(PHASES)
        under_way = self._begun(phase)
        self.trainer.kill()
        self._renew_trainer()
        if under_way and phase == "commit":
            self._learn()

    def kill_daemon(self) -> None:
        phase = self.choose.choice(PHASES)
        before = self.held
        under_way = self._begun(phase)
        self.daemon.kill()
        if not self.asleep:
            self._until(lambda found: found["attached"] is False, "it notices")
        self.trainer.kill()
        if under_way:
            # An engine that said that it is ready can't tell whether the daemon wrote.
            self.held = before if phase == "prepare" else None
            self._learn()
        self.daemon.start()
        self._renew_trainer()
        if not self.asleep:
            self._attached()

    def kill_engine(self, process: str, phase: str) -> None:
        """The engine that is started instead has random weights, and is ready with the next version."""
        if self.asleep:
            self.wake()
        under_way = self._begun(phase)
        self.subject.kill(process)
        if under_way:
            try:
                self.trainer.result() if phase == "commit" else self.trainer.call("abort")
            except EngineFailed:
                pass  # the update may end for want of an engine
        self.subject.start()
        self.held = None
        self._check()
        self.update()
        self._check()

    # ---- inside ----

    def _attached(self) -> None:
        self._until(lambda found: found["attached"] is True, "it attaches")

    def _begun(self, phase: str) -> bool:
        """Brings an update up to the phase; whether one is under way."""
        if phase == "idle" or self.asleep:
            return False
        self._attached()
        self.version += 1
        self.trainer.call("begin", self.version, UPDATE_SECONDS)
        checkpoint = str(self.checkpoints[self.version % 2])
        if phase != "prepare":
            self.trainer.call("push", checkpoint, 0)
            self.held = None  # unless it is committed
        if phase == "commit":
            self.trainer.call("push", checkpoint, 1)
            self.trainer.begin("commit")
        return True

    def _new_trainer(self) -> TrainerProcess:
        return TrainerProcess(self.checkpoints[0], self.folder / "trainer.log", follow=following(self.daemon))

    def _renew_trainer(self) -> None:
        self.trainer = self._new_trainer()
        self.trainer.started()


def check_random_orders(kind: Callable[[Path, Path, Any], Subject], folder: Path) -> None:
    """Makes all orders with a subject of the kind, which is made of a checkpoint, a folder for its log, and a daemon."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    loaded = partial(fresh, EngineProcess, tmp_path=folder, generate="generate_one_by_one", dtype="bfloat16")
    with ThreadPoolExecutor(len(checkpoints)) as pool:
        expected = list(pool.map(loaded, checkpoints))
    with testing.daemon() as daemon:
        orders = Orders(kind(checkpoints[0], folder, daemon), daemon, checkpoints, expected, folder)
        try:
            orders.run()
        finally:
            orders.close()
