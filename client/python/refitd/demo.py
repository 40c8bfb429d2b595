"""A try of refitd in seconds: `python -m refitd.demo [--json]`.

Starts a private daemon, two trainer ranks and an engine, each a process of its own, and moves three versions of 64 MiB in host memory
from the ranks into the engine. Each rank holds half of the rows of one tensor and half of the columns of the other. The engine
holds both tensors whole, and after each update compares every byte with the version's, which it computes by itself. In the update of a
fourth version a rank is killed: the engine must keep the third. The demo needs nothing but this package.

    from refitd import demo
    report = demo.run()                 # report.ok, report.versions, report.as_dict()

The exit status is 0 where everything was proved, 1 where not, 128 and the signal's number at Ctrl-C, SIGTERM and SIGHUP. Whatever
happens, all processes have ended by then; no wait is longer than LIMIT_SECONDS (P4).
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from types import FrameType
from typing import Any, NoReturn

from . import testing
from ._core.member import Connect, GroupSpec
from ._core.native import library_version
from .engine import Aborted, Committed, Engine, Prepare
from .errors import Error, UpdateAborted
from .layout import Box, TensorSpec
from .layout.memory import Region, RegionMemory
from .trainer import Trainer

VERSIONS = 3
RANKS = 2
KILLED_RANK = 1
# Far longer than the demo takes: only a hang reaches this limit.
LIMIT_SECONDS = 120.0
SIDE = 4096
ITEM_BYTES = 2
ROW_BYTES = SIDE * ITEM_BYTES
TENSOR_BYTES = SIDE * ROW_BYTES
# By tensor, the dimension of which each rank holds a half: rows (0) as in a column-parallel layer, columns (1) as in a row-parallel layer.
SHARDED = {"q_proj": 0, "o_proj": 1}
MODEL_BYTES = len(SHARDED) * TENSOR_BYTES

_GROUP = "demo"
_INSTANCE = "engine-0"
_SPECS = [TensorSpec(name, "bfloat16", (SIDE, SIDE)) for name in SHARDED]


@dataclass(frozen=True)
class Version:
    """What an update left in the engine.

    `bytes`: how many were committed, 0 for an aborted update; `seconds`: the time of the longest call of a rank; `held`: the version that
    the engine holds afterwards; `compared_bytes`, `differing_bytes`: how the engine's memory compares with that version.
    """

    version: int
    bytes: int
    seconds: float
    held: int
    compared_bytes: int
    differing_bytes: int

    @property
    def ok(self) -> bool:
        """Whether all bytes arrived, or, of a version after VERSIONS, none."""
        as_expected = (MODEL_BYTES, self.version) if self.version <= VERSIONS else (0, VERSIONS)
        return (self.bytes, self.held) == as_expected and (self.compared_bytes, self.differing_bytes) == (MODEL_BYTES, 0)


@dataclass(frozen=True)
class Report:
    """What was proved. `clean_at`: the version of the engine, by the daemon's status, None where the engine is not clean.

    `exit_statuses`: by process, -9 for the killed rank; `seconds`: the time of the whole demo.
    """

    refitd: str
    versions: tuple[Version, ...]
    clean_at: int | None
    exit_statuses: dict[str, int | None]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every version arrived, the aborted update changed nothing, the daemon agrees, and every process ended as it should."""
        numbers = [version.version for version in self.versions]
        arrived = numbers == list(range(1, VERSIONS + 2)) and all(version.ok for version in self.versions)
        killed = _rank_name(KILLED_RANK)
        ended = all(status == (-signal.SIGKILL if name == killed else 0) for name, status in self.exit_statuses.items())
        return arrived and self.clean_at == VERSIONS and ended

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {"ok": self.ok, **asdict(self)}


def _rank_name(rank: int) -> str:
    return f"trainer {rank}"


# ---- the weights: every process computes them by itself, row by row ----


def _row(name: str, version: int, row: int) -> bytes:
    # random gives the same bytes in every process, and is fast also in a Python without OpenSSL, unlike hashes.
    return random.Random(f"{name} {version} {row}").randbytes(ROW_BYTES)


def _shard(name: str, version: int, rank: int) -> Iterator[bytes]:
    """The bytes of a rank's half, row by row."""
    half = SIDE // RANKS
    if SHARDED[name] == 0:
        yield from (_row(name, version, row) for row in range(rank * half, (rank + 1) * half))
    else:
        columns = slice(rank * half * ITEM_BYTES, (rank + 1) * half * ITEM_BYTES)
        yield from (_row(name, version, row)[columns] for row in range(SIDE))


def _fill(region: Region, version: int, rank: int) -> None:
    end = 0
    for name in SHARDED:
        for row in _shard(name, version, rank):
            region[end : end + len(row)] = row
            end += len(row)


def _differing_bytes(region: Region, version: int) -> tuple[int, int]:
    """How many bytes of the engine's memory were compared with the version, and how many of them differ."""
    compared = differing = 0
    for name in SHARDED:
        for row in range(SIDE):
            expected, held = _row(name, version, row), region[compared : compared + ROW_BYTES]
            compared += ROW_BYTES
            if held != expected:
                differing += sum(a != b for a, b in zip(held, expected))
    return compared, differing


# ---- the processes of members: each prints a line of JSON for each step, and a trainer rank takes a line for each step ----


def _print_step(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def _connect(socket: str) -> Connect:
    return Connect(socket=socket, wait_seconds=LIMIT_SECONDS, client="refitd.demo")


def _trainer(socket: str, rank: int) -> None:
    """A trainer rank: fills its shards for each version, and refits when the parent lets it."""
    region = Region(MODEL_BYTES // RANKS)
    boxes = []
    for number, name in enumerate(SHARDED):
        extent = (SIDE // RANKS, SIDE) if SHARDED[name] == 0 else (SIDE, SIDE // RANKS)
        offset = (rank * extent[0], 0) if SHARDED[name] == 0 else (0, rank * extent[1])
        nbytes = TENSOR_BYTES // RANKS
        boxes.append(Box(number, offset, extent, (extent[1], 1), RegionMemory(region, number * nbytes, nbytes)))
    spec = GroupSpec(min_instances=1)
    with Trainer(_GROUP, rank=rank, world_size=RANKS, spec=spec, device="host", connect=_connect(socket)) as trainer:
        trainer.register_layout(_SPECS, boxes)
        for version in range(1, VERSIONS + 2):
            _fill(region, version, rank)  # an optimizer step
            _print_step(filled=version)
            if not sys.stdin.readline():
                return  # the parent ended
            _refit(trainer, version)
        sys.stdin.readline()


def _refit(trainer: Trainer, version: int) -> None:
    began = time.perf_counter()
    try:
        nbytes, error = trainer.refit(version, duration_seconds=LIMIT_SECONDS).bytes, ""
    except UpdateAborted as aborted:
        nbytes, error = 0, str(aborted)
    _print_step(bytes=nbytes, seconds=time.perf_counter() - began, error=error)


def _engine(socket: str) -> None:
    """The engine: answers Prepare, and compares its memory after each outcome."""
    region = Region(MODEL_BYTES)  # what the engine computes with
    boxes = [
        Box(number, (0, 0), (SIDE, SIDE), (SIDE, 1), RegionMemory(region, number * TENSOR_BYTES, TENSOR_BYTES)) for number in range(len(_SPECS))
    ]
    with Engine(_GROUP, instance=_INSTANCE, device="host", connect=_connect(socket)) as engine:
        engine.register_layout(_SPECS, boxes)
        version = held = outcomes = 0
        while outcomes <= VERSIONS:
            event = engine.next(LIMIT_SECONDS)
            if isinstance(event, Prepare):
                version = event.version
                if version <= VERSIONS:
                    event.ready()  # a real engine first waits until no request reads the weights
                _print_step(preparing=version)
            elif isinstance(event, (Committed, Aborted)):
                held = version if isinstance(event, Committed) else held
                compared, differing = _differing_bytes(region, held)
                outcomes += 1
                _print_step(held=held, compared=compared, differing=differing)
        sys.stdin.readline()


def _member(role: str, socket: str, rank: int) -> int:
    """Runs a member; returns the exit status. The member stays until the parent closes the standard input, so that status shows it."""
    try:
        if role == "engine":
            _engine(socket)
        else:
            _trainer(socket, rank)
    except Error as error:
        _print_step(failed=f"{type(error).__name__}: {error}")
        return 1
    return 0


# ---- the parent ----


class Failed(Exception):
    """A process of the demo did not do its part."""


class _Member:
    """A process of a member. `next` reads the steps that the process prints."""

    def __init__(self, name: str, arguments: Sequence[str], deadline: float) -> None:
        self.name = name
        self._deadline = deadline
        self._steps: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: nothing more will come
        command = [sys.executable, "-m", "refitd.demo", *arguments]
        # In a session of its own, so that Ctrl-C at the terminal reaches the parent alone, which ends the members.
        self.process = testing.start_process(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._steps.put(json.loads(line))
        self._steps.put(None)

    def next(self) -> dict[str, Any]:
        """The next step. Raises Failed where the member failed, ended or does not answer in time."""
        try:
            step = self._steps.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            raise Failed(f"{self.name} does not answer within {LIMIT_SECONDS:.0f} s") from None
        if step is None:
            raise Failed(f"{self.name} ended with status {self.process.wait(LIMIT_SECONDS)}")
        if "failed" in step:
            raise Failed(f"{self.name}: {step['failed']}")
        return step

    def go(self) -> None:
        """Lets a trainer rank make its next step."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def end(self) -> int:
        """Lets the member end by itself, and returns its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(max(0.0, self._deadline - time.monotonic()))

    def kill(self) -> None:
        """Ends the process in any case."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def _clean_at(daemon: testing.Daemon) -> int | None:
    """The engine's version, by the daemon's status, where the engine is clean."""
    status = json.loads(daemon.control("--output", "json", "status"))
    ((instance,),) = [group["instances"] for group in status["groups"]]
    return int(instance["version"]) if instance["state"] == "clean" else None


def run(say: Callable[[str], None] = lambda line: None) -> Report:
    """Does everything; `say` gets a line for each step.

    Raises Failed, Error, OSError and subprocess.SubprocessError where a step fails: everything has ended then.
    """
    began = time.monotonic()
    deadline = began + LIMIT_SECONDS
    statuses: dict[str, int | None] = {}
    with ExitStack() as stack:
        daemon = stack.enter_context(testing.daemon())
        assert daemon.process is not None
        say(f"daemon     refitd {library_version()}, process {daemon.process.pid}, answers after {time.monotonic() - began:.2f} s")

        def member(name: str, *arguments: str) -> _Member:
            started = _Member(name, [*arguments, "--socket", daemon.socket], deadline)
            stack.callback(started.kill)
            return started

        ranks = [member(_rank_name(rank), "--role", "trainer", "--rank", str(rank)) for rank in range(RANKS)]
        engine = member("engine", "--role", "engine")
        processes = ", ".join(f"{started.name} {started.process.pid}" for started in (*ranks, engine))
        say(f"members    processes {processes}; {len(SHARDED)} tensors of {TENSOR_BYTES >> 20} MiB, cut by rows and by columns")
        versions = [_move(ranks, engine, version, say) for version in range(1, VERSIONS + 1)]
        versions.append(_move_and_kill(ranks, engine, say))
        clean_at = _clean_at(daemon)
        say(f"status     the engine is {'not clean' if clean_at is None else f'clean, at version {clean_at}'}")
        statuses.update((ended.name, ended.end()) for ended in (*ranks, engine))
        statuses["daemon"] = daemon.stop()
    return Report(library_version(), tuple(versions), clean_at, statuses, time.monotonic() - began)


def _begin(ranks: Sequence[_Member]) -> None:
    """Lets all ranks call refit at once, after their shards are filled."""
    for rank in ranks:
        rank.next()
    for rank in ranks:
        rank.go()


def _move(ranks: Sequence[_Member], engine: _Member, version: int, say: Callable[[str], None]) -> Version:
    """Moves a version; all ranks begin at once."""
    _begin(ranks)
    answers = [rank.next() for rank in ranks]
    engine.next()  # all ranks have begun
    moved = _version_of(version, answers, engine.next())
    say(f"version {version}  {moved.bytes >> 20} MiB in {moved.seconds * 1e3:5.1f} ms, committed; the engine {_compared(moved)}")
    return moved


def _move_and_kill(ranks: Sequence[_Member], engine: _Member, say: Callable[[str], None]) -> Version:
    """Begins the version after the last one, and kills a rank before the engine is ready."""
    _begin(ranks)
    engine.next()  # all ranks have begun
    others = [rank for number, rank in enumerate(ranks) if number != KILLED_RANK]
    ranks[KILLED_RANK].process.kill()
    answers = [rank.next() for rank in others]
    left = _version_of(VERSIONS + 1, answers, engine.next())
    say(f"version {left.version}  {ranks[KILLED_RANK].name} was killed in it; after {left.seconds * 1e3:.1f} ms {others[0].name} got the error:")
    say(f"           {answers[0]['error']}")
    say(f"           the engine, still at version {left.held}, {_compared(left)}")
    return left


def _version_of(version: int, answers: Sequence[dict[str, Any]], held: dict[str, Any]) -> Version:
    seconds = max(answer["seconds"] for answer in answers)
    return Version(version, answers[0]["bytes"], seconds, held["held"], held["compared"], held["differing"])


def _compared(moved: Version) -> str:
    return f"compared {moved.compared_bytes:,} bytes, {moved.differing_bytes:,} differ"


class _Interrupted(BaseException):
    """A signal that ends the demo came. `number`: the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # further signals must not interrupt the end of all processes
    raise _Interrupted(number)


def _try(as_json: bool) -> int:
    """Runs the demo and prints what it proved; returns the exit status."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)
    say: Callable[[str], None] = (lambda line: None) if as_json else (lambda line: print(line, flush=True))
    try:
        report = run(say)
    except _Interrupted as interrupted:
        print(f"{signal.Signals(interrupted.number).name}: everything that was started has ended", file=sys.stderr)
        return 128 + interrupted.number
    except (Failed, Error, OSError, subprocess.SubprocessError) as error:
        print(f"not proved: {type(error).__name__}: {error}\nWhat this machine lacks: python -m refitd.doctor", file=sys.stderr)
        return 1
    if as_json:
        print(json.dumps(report.as_dict(), indent=1))
    else:
        _print_result(report)
    return 0 if report.ok else 1


def _print_result(report: Report) -> None:
    compared = sum(moved.compared_bytes for moved in report.versions)
    print(f"{'PROVED' if report.ok else 'NOT PROVED'} in {report.seconds:.1f} s: {VERSIONS} versions arrived, {compared:,} bytes compared")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m refitd.demo`; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m refitd.demo", description="Moves three versions from two trainer ranks into an engine.")
    parser.add_argument("--json", action="store_true", help="print JSON: {ok, refitd, versions, clean_at, exit_statuses, seconds}")
    for hidden in ("--role", "--rank", "--socket"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.role:
        return _member(given.role, given.socket, int(given.rank or 0))
    return _try(given.json)


if __name__ == "__main__":
    sys.exit(main())
