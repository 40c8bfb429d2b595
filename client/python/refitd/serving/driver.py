"""Lets an engine take new weights when the trainer refits, with no call to the engine from outside; and routes that show its status.

The driver is one more rank of the engine's instance, after the workers' ranks, without weights. So it gets Prepare itself, pauses the engine,
lets the workers' ranks answer, and is ready last; the daemon writes nothing before. Under vLLM's external launcher each process has a driver,
which is a rank of its own. What to do when is decided by `Lifecycle`; the driver carries it out through `Controls`.

An HTTP server made with FastAPI gets these routes, and the version as a header of every answer:

    GET /refitd/ready?max_behind=N   200 where the engine may get requests, else 503; both with the status as JSON
    GET /refitd/version              {"version": ...}
    GET /refitd/status               the status

`Lifecycle` is the life of an inference engine whose weights change, as a state machine: it takes what happened, and returns actions. It does nothing
by itself, and reads no clock: the driver calls a method for what happened, and carries out the actions in their order. Not thread-safe.

    state       serves  ready   left by
    serving     yes     yes     prepare -> pausing;   sleep -> asleep;   lost (weights not good) -> dirty
    pausing     no      no      paused -> writing;    pause_failed -> refused
    writing     no      no      written -> serving;   aborted -> serving or dirty;   lost, write_failed -> dirty
    refused     no      no      aborted, lost -> serving or dirty
    dirty       no      no      prepare -> writing;   sleep -> asleep;   found -> serving
    asleep      no      no      wake -> serving or dirty

Invariants, which the tests check after every step of random orders:
1. An engine serves only while its weights are one whole version.
2. It is ready only while it serves, is attached, and is not behind by more than was asked.
3. Whatever happened, an engine that is awake serves again after the next version is committed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Optional, Protocol, Union

from ..engine import Aborted, Committed, Engine, Event, Lost, Prepare, Reattached, Staged, Weights
from ..errors import Closed, DeadlineExceeded, Error, FailedPrecondition, NotFound, Unavailable
from ..layout import devices
from . import Settings
from .proof import Value

logger = logging.getLogger("vllm.refitd")

# How long a try to attach waits for the daemon and the group, so that close() is noticed.
ATTACH_SECONDS = 2.0
# How much later than to the driver Prepare may come to a worker.
PREPARE_SECONDS = 30.0
# How long an engine's steps get most of the time while modules are processed ahead.
STEPS_SECONDS = 1.0
# The pause between two tries to attach after an error: the first, and the longest.
RETRY_SECONDS = (1.0, 30.0)


class Controls(Protocol):
    """The calls to vLLM, each of which returns when it has taken effect."""

    def pause(self, mode: str) -> None: ...

    def resume(self) -> None: ...

    def register(self, init_info: dict[str, Any]) -> None: ...

    def held(self) -> list[dict[str, Any] | None]:
        """What each worker's rank holds since it attached (rank.Rank.held)."""

    def label(self, version: int) -> None:
        """Lets tokens carry the version, which the ranks hold without an update."""

    def unregister(self) -> None: ...

    def busy(self) -> bool:
        """Whether there are requests to compute."""

    def process_ahead(self, update_id: int) -> int:
        """Lets all ranks, while the engine serves, process one more portion of what that update has staged (refitd.serving.ahead). Returns how many
        are left to be processed so."""

    def write(self, version: int, reset_caches: bool) -> None:
        """Drops the caches if asked for, then starts and makes a weight update on all ranks. Returns when the version is in place on
        all ranks; the next call at the latest finishes the update. Raises where the caches stay, before any rank is
        ready, or where a rank could not take the version."""

    def sleep(self, level: int) -> None: ...

    def wake(self) -> None:
        """Wakes the engine up, and leaves it paused (P2): the driver resumes it when its weights are whole."""


class Driver:
    """Drives one engine. Thread-safe; `step` does the work, on a thread that only does that or on the caller's."""

    def __init__(
        self,
        controls: Controls,
        settings: Settings,
        *,
        world_size: int,
        clean: bool,
        device: str,
        patient: bool = True,
        index: int = 0,
        drivers: int = 1,
    ) -> None:
        """`world_size`: of the workers' ranks. `index`: of this driver among the instance's `drivers`. `clean`: whether the engine started
        from a checkpoint. `device`: the type in torch of the device with the engine's weights. `patient`: tries to attach again after any
        error, which `status` shows; else only while daemon or group is absent, for at most settings.wait_seconds. Attaches nothing yet."""
        self.settings = settings.checked()
        self.machine = Lifecycle(pause=settings.pause, reset_caches=settings.cache == "reset", clean=clean)
        self.last_pause_seconds: float | None = None
        self.updates = 0
        self._controls = controls
        self._patient = patient
        self._world_size = world_size
        self._index = index
        self._drivers = drivers
        self._device = device
        self._lock = threading.RLock()  # guards the machine, and is held while its actions are carried out
        self._closed = threading.Event()
        self._member: Engine | None = None
        self._is_new = True  # until all ranks were attached once
        self._prepare: Prepare | None = None
        self._staged = False  # whether the last version arrived while the engine served
        self._paused_at = self._stopped_at = 0.0  # when the last Pause was asked for, and had taken effect
        self._incarnation: int | None = None
        self._owner: str | None = None
        self._content: int | None = None  # of a rollback

    # ---- what is asked ----

    def ready(self, max_behind: int | None = None) -> bool:
        """Whether the engine may get requests; as in Lifecycle.ready. Does not wait."""
        return self.machine.ready(max_behind)

    @property
    def version(self) -> int | None:
        return self.machine.version

    @property
    def content(self) -> int | None:
        """The version whose content the weights have: `version` itself, or where that is a rollback an earlier one."""
        return self.version if self._content is None else self._content

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def status(self) -> dict[str, Any]:
        machine = self.machine
        return {
            "group": self.settings.group,
            "instance": self.settings.instance,
            "state": machine.state.value,
            "ready": machine.ready(),
            "attached": machine.attached,
            "version": machine.version,
            "staged": self._staged,
            "content": self.content,
            "behind": machine.behind,
            "arena": self.settings.arena,
            "updates": self.updates,
            "last_pause_seconds": self.last_pause_seconds,
            "reason": machine.reason,
        }

    # ---- what is done ----

    def start(self) -> None:
        """Attaches all ranks, however long it takes; an engine with random weights is paused before."""
        with self._lock:
            self._do(self.machine.start())

    def peek_begin(self, seconds: float) -> Event | None:
        """Takes events until an update begins, or has a version staged, or ends. Returns that Prepare or Staged, which stays queued for `step`; None:
        the update has ended, or nothing began within `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            member = self._member
            event = self._next(member, max(0.0, deadline - time.monotonic()))
            if member is None or event is None:
                return None
            if isinstance(event, (Prepare, Staged)):
                member._put_back(event)
                return event
            self._take(member, event)
            if isinstance(event, Aborted):
                return None

    def step(self, seconds: float) -> bool:
        """Takes the next event and does what it calls for; returns whether there was one within `seconds`."""
        member = self._member
        event = self._next(member, seconds)
        if member is None or event is None:
            return False
        self._take(member, event)
        return True

    def _next(self, member: Engine | None, seconds: float) -> Event | Error | None:
        """The next event, or the error that ended the lease; None: no event came within `seconds`, or nothing is attached."""
        if member is None:
            self._closed.wait(min(seconds, 0.05))
            return None
        try:
            return member._next_or_none(self._closed, seconds)
        except Closed:
            return None
        except Error as error:
            return error

    def _take(self, member: Engine, event: Event | Error) -> None:
        """Carries out what the event calls for; an event of a member that was detached calls for nothing."""
        with self._lock:
            if isinstance(event, Error):
                self._do(self.machine.write_failed(f"the lease ended: {event}"))
            elif self._member is member:
                self._do(self._actions_for(event))

    def sleep(self, level: int) -> None:
        """Puts the engine to sleep, after an update that runs."""
        with self._lock:
            self._do(self.machine.sleep(level))

    def weights_discarded(self) -> None:
        """The weights of a sleeping engine were discarded: after it wakes up, it waits for the next version."""
        with self._lock:
            self._do(self.machine.weights_discarded())

    def wake(self) -> None:
        """Wakes the engine up, and attaches it anew."""
        with self._lock:
            self._do(self.machine.wake())

    def close(self) -> None:
        """Detaches the driver, without which the instance takes no update. The workers' ranks end with their processes."""
        self._closed.set()
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def serve_on_thread(self) -> None:
        """Calls serve() on a thread of its own."""
        threading.Thread(target=self.serve, name="refitd-driver", daemon=True).start()

    def serve(self) -> None:
        """Starts, and steps until close(): for a thread of its own. Logs what fails, and tries it again."""
        started = False
        while not self._closed.is_set():
            try:
                if not started:
                    self.start()
                    started = True
                self.step(0.5)
            except Exception:
                logger.exception("refitd: the driver goes on after an error")
                self._closed.wait(RETRY_SECONDS[0])

    # ---- inside ----

    def _actions_for(self, event: Event) -> list[Action]:
        if isinstance(event, Prepare):
            self._prepare = event
            return self.machine.prepare(event.version)
        if isinstance(event, Staged):
            self._process_ahead(event)
            return []
        if isinstance(event, Aborted):
            return self.machine.aborted(event.version, event.dirty, event.reason)
        if isinstance(event, Lost):
            return self.machine.lost(event.weights is Weights.CLEAN, event.reason)
        if isinstance(event, Reattached):
            return self.machine.reattached(event.weights is Weights.CLEAN)
        return []

    def _process_ahead(self, staged: Staged) -> None:
        """Lets the ranks process what needs no pause, until the answer is due. Where there are requests, the engine's steps get four fifths of the
        first STEPS_SECONDS: the trainer waits for this engine."""
        begins = time.monotonic()
        until, longest = begins + staged.remaining_seconds, 0.0
        try:
            while not self._closed.is_set() and time.monotonic() + longest < until:
                began = time.monotonic()
                if not self._controls.process_ahead(staged.update_id) or self._told_more():
                    break
                took = time.monotonic() - began
                longest = max(longest, took)
                if self._controls.busy():
                    self._closed.wait(max(0.0, min(4 * took, begins + STEPS_SECONDS - time.monotonic())))
        except Exception:
            logger.exception("refitd: what is left is processed in the pause")
        try:
            staged.processed()
        except Error as error:
            logger.info("refitd: version %d was processed too late to count: %s", staged.version, error)

    def _told_more(self) -> bool:
        """Whether an event has come, which ends what is staged: Prepare, or that the version was given up."""
        member = self._member
        event = member._next_or_none(None, 0.0) if member is not None else None
        if member is None or event is None:
            return False
        member._put_back(event)
        return True

    def _do(self, actions: Iterable[Action]) -> None:
        queue = deque(actions)
        while queue and not self._closed.is_set():
            queue.extend(self._act(queue.popleft()))

    def _act(self, action: Action) -> list[Action]:
        """Carries out one action; returns those that its result calls for."""
        machine, controls = self.machine, self._controls
        if isinstance(action, Pause):
            self._paused_at = time.monotonic()
            try:
                controls.pause(action.mode)
            except Exception as error:
                logger.exception("refitd: vLLM could not be paused")
                return machine.pause_failed(f"vLLM could not be paused: {error}")
            self._stopped_at = time.monotonic()
            return machine.paused()
        if isinstance(action, Write):
            return self._write(action.version, action.reset_caches)
        if isinstance(action, Refuse):
            self._fail(action.version, action.reason)
        elif isinstance(action, SetVersion):
            self.updates += 1
            self._staged = self._prepare is not None and self._prepare.flip
        elif isinstance(action, Resume):
            controls.resume()
            self.last_pause_seconds = time.monotonic() - self._paused_at
            return machine.resumed()
        elif isinstance(action, Register):
            return self._register(action.dirty)
        elif isinstance(action, Unregister):
            self._detach()
            controls.unregister()
        elif isinstance(action, Sleep):
            controls.sleep(action.level)
        elif isinstance(action, Wake):
            controls.wake()
        return []

    def _register(self, dirty: bool) -> list[Action]:
        """Attaches all ranks; tries again after errors, as `patient` allows."""
        pause = RETRY_SECONDS[0]
        deadline = time.monotonic() + self.settings.wait_seconds
        while not self._closed.is_set():
            try:
                found = self._attach(dirty)
                return [*self.machine.registered(), *([] if found is None else self.machine.found(found))]
            except Exception as error:
                self._detach()
                self.machine.reason = f"not attached: {error}"
                absent = isinstance(error, (DeadlineExceeded, Unavailable, NotFound))
                if not self._patient and (not absent or time.monotonic() > deadline):
                    raise
                if not isinstance(error, TimeoutError):
                    logger.warning("refitd: %s", self.machine.reason)
                if not absent:
                    self._let_go()
                self._closed.wait(pause)
                pause = min(2 * pause, RETRY_SECONDS[1])
        return []

    def _attach(self, dirty: bool) -> int | None:
        """Attaches the driver's rank, and has the workers attach theirs. The driver's rank comes first: its Attach waits until the group
        exists, and that wait blocks no worker. Returns the version that a new engine has taken up; None: none."""
        settings, machine = self.settings, self.machine
        restore = settings.restores and (self._is_new or not dirty)
        found = None
        # Whether a new engine is dirty is known when its workers have registered. An instance takes no update before its last rank has registered.
        self._member = self._engine(dirty and not restore, machine.version)
        self._controls.register(
            {**settings.of_ranks(), "drivers": self._drivers, "workers": self._world_size, "dirty": dirty, "restores": restore}
        )
        if restore and dirty:
            found = self._version_found()
            self._detach()
            self._member = self._engine(found is None, found)
        self._member.register_layout([], [])
        self._is_new = False
        if machine.clean:
            machine.reason = ""
        return found

    def _let_go(self) -> None:
        """Has the workers of a new engine give back what they claimed while they loaded it: another shape of the instance may be what is refused."""
        try:
            if self._is_new and self.settings.restores:
                self._controls.unregister()
        except Exception as error:
            logger.warning("refitd: the workers do not detach: %s", error)

    def _version_found(self) -> int | None:
        """The version that all workers' ranks have taken up."""
        held = self._controls.held()
        if held[0] is None or any(other != held[0] for other in held):
            return None
        version = int(held[0]["version"])
        self._incarnation, self._owner, self._content = held[0]["incarnation"], held[0]["owner"], held[0]["content"]
        self._controls.label(version)
        return version

    def _engine(self, dirty: bool, version: int | None) -> Engine:
        """Attaches this driver's rank. `version`: what it holds unless it is dirty."""
        settings = self.settings
        held: dict[str, Any] = {}
        if not dirty and version is not None:
            held = {"held_version": version, "held_incarnation": self._incarnation, "held_content": self._content}
        return Engine(
            settings.group,
            instance=settings.instance,
            rank=self._world_size + self._index,
            world_size=self._world_size + self._drivers,
            held_owner=self._owner,
            trainer_identity=settings.trainer_identity,
            # A group's engine ranks are all on GPUs or none. This rank holds nothing, so that any GPU will do.
            device=devices.any_of(self._device),
            dirty=dirty,
            catch_up=False,  # like the workers' ranks
            wants_staged=settings.in_arenas,
            connect=replace(settings.connect("engine driver"), wait_seconds=ATTACH_SECONDS),
            **held,
        )

    def _detach(self) -> None:
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def _fail(self, version: int, reason: str) -> None:
        member = self._member
        try:
            if member is not None:
                member.fail(version, reason)
        except Error as error:
            logger.info("refitd: version %d ended before it was refused: %s", version, error)

    def _write(self, version: int, reset_caches: bool) -> list[Action]:
        """Lets the workers take the version, while this rank answers and takes the outcome."""
        member = self._member
        assert member is not None
        outcomes: list[Event | Exception] = []
        awaits = threading.Thread(target=self._await_outcome, args=(member, version, outcomes), name="refitd-outcome", daemon=True)
        awaits.start()
        failure: Exception | None = None
        try:
            self._controls.write(version, reset_caches)
        except Exception as error:
            failure = error
            self._fail(version, f"vLLM could not take it: {error}")
        awaits.join()
        outcome = outcomes[0]
        if isinstance(outcome, Committed):
            if failure is None:
                self._incarnation, self._owner, self._content = outcome.incarnation, outcome.owner, outcome.content
                return self.machine.written(version)
            return self.machine.write_failed(f"version {version} was committed, and vLLM could not take it: {failure}")
        if isinstance(outcome, Aborted):
            return self.machine.aborted(version, outcome.dirty, outcome.reason)
        if isinstance(outcome, Lost):
            return self.machine.lost(outcome.weights is Weights.CLEAN, outcome.reason)
        return self.machine.write_failed(f"the outcome of version {version} is not known: {outcome}")

    def _await_outcome(self, member: Engine, version: int, outcomes: list[Event | Exception]) -> None:
        """Answers Prepare, and appends the outcome of the update, or why it is not known."""
        try:
            try:
                member.ready(version, time.monotonic() - self._stopped_at)
            except FailedPrecondition:
                pass  # the update ended before; its outcome comes all the same
            while not outcomes:
                event = member._next_or_none(self._closed, None)
                if event is None:
                    raise Closed("the driver was closed")
                if isinstance(event, (Committed, Aborted, Lost)):
                    outcomes.append(event)
        except Exception as error:
            outcomes.append(error)


class Alone:
    """An LLM whose workers all belong to this process. `index`: of this process among `count`. `apart`: whether the processes differ in
    version or in whether they serve, so that none may generate."""

    index, count, apart = 0, 1, False

    def gather(self, value: Value) -> list[Value]:
        """Returns what each process called this with, by index. All processes must call this equally often and in the same places. Raises
        RuntimeError where another process has ended."""
        return [value]

    def compare(self, serves: bool, version: int | None) -> None:
        """Sets `apart` by what this process and the others call this with. All processes must call this alike."""


class Follower:
    """An offline engine that takes new versions in `poll` and `wait`, between calls of `generate`.

    From now on `generate` raises FailedPrecondition while the weights are not one whole version, and the engine's sleep and wake-up detach
    and attach. Not thread-safe: call it where you call the engine. An engine that generates for another thread meanwhile would read weights
    that change: don't let it.
    """

    def __init__(self, driver: Driver, processes: Alone = Alone()) -> None:
        """Waits for daemon and group. Raises what attaching raises: FailedPrecondition, naming the parameter that can't be delivered,
        Unavailable, ..."""
        self.driver = driver
        self._processes = processes
        failure: Exception | None = None
        try:
            driver.start()
        except Exception as error:
            failure = error
        failures = processes.gather(None if failure is None else str(failure))
        if failure is not None:
            raise failure
        for index, reason in enumerate(failures):
            if reason is not None:
                driver.close()
                raise FailedPrecondition(f"process {index} did not attach: {reason}", culprit=f"process {index}")

    def poll(self, seconds: float = 0.0) -> int | None:
        """Takes updates that are due, waiting up to `seconds` for the first to begin; returns the version here."""
        while self._take_update(seconds):
            seconds = 0.0
        return self.driver.version

    def wait(self, version: int, timeout_seconds: float = 600.0) -> int:
        """Takes updates until `version` or a newer one is here, and whole; returns it. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            here = self.driver.version if self.driver.ready() else None
            remaining = deadline - time.monotonic()
            states = self._processes.gather((here, remaining < 0))
            if here is not None and all(theirs is not None and theirs >= version for theirs, _ in states):
                return here
            if any(late for _, late in states):
                raise TimeoutError(f"version {version} did not come within {timeout_seconds} s: {self.driver.status()}")
            self._take_update(min(1.0, max(0.0, remaining)))

    def _take_update(self, seconds: float) -> bool:
        """Takes an update that begins within `seconds` in any of the processes, in all of them; returns whether one began. After Staged it waits for
        that update's Prepare, since the other engines pause until this one has answered it."""
        begun = any(self._processes.gather(self.driver.peek_begin(seconds) is not None))
        while begun:
            event = self.driver.peek_begin(PREPARE_SECONDS)
            if event is not None:
                self.driver.step(0.0)
            if not isinstance(event, Staged):
                break
        self._processes.compare(self.driver.machine.state is State.SERVING, self.driver.version)
        return begun

    def close(self) -> None:
        self.driver.close()


def update_info(version: int) -> dict[str, Any]:
    """What the workers need to take `version`, whose Prepare the driver has got."""
    return {"version": version, "wait_seconds": PREPARE_SECONDS}


DriverOf = Callable[[], Optional[Driver]]
HEADER = b"x-refitd-version"
CONTENT_HEADER = b"x-refitd-content"  # of a rollback


def add_routes(app: Any, driver_of: DriverOf) -> None:
    """Adds routes and header to a server that has not started. `driver_of`: returns None where no driver is there, or not yet."""
    from fastapi import APIRouter
    from fastapi.responses import JSONResponse

    router = APIRouter()

    def status(code: int = 200) -> Any:
        driver = driver_of()
        if driver is None:
            return JSONResponse({"ready": False, "reason": "refitd drives no engine here"}, status_code=503)
        return JSONResponse(driver.status(), status_code=code)

    async def ready(max_behind: Optional[int] = None) -> Any:
        driver = driver_of()
        return status(200 if driver is not None and driver.ready(max_behind) else 503)

    async def version() -> Any:
        driver = driver_of()
        return JSONResponse({"version": None if driver is None else driver.version})

    async def whole_status() -> Any:
        return status()

    router.add_api_route("/refitd/ready", ready, methods=["GET"])
    router.add_api_route("/refitd/version", version, methods=["GET"])
    router.add_api_route("/refitd/status", whole_status, methods=["GET"])
    app.include_router(router)
    app.add_middleware(_VersionHeader, driver_of=driver_of)


def refusal(driver: Driver) -> Any:
    """The answer to a request that would resume the engine: 409 while its weights are not one whole version; None where it may be resumed."""
    from fastapi.responses import JSONResponse

    machine = driver.machine
    return None if machine.serves else JSONResponse({"error": f"refitd: not while {machine.state.value}", **driver.status()}, status_code=409)


class _VersionHeader:
    """ASGI middleware that adds the header to answers as they begin."""

    def __init__(self, app: Any, driver_of: DriverOf) -> None:
        self._app = app
        self._driver_of = driver_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_version(message: Any) -> None:
            driver = self._driver_of()
            if message["type"] == "http.response.start" and driver is not None and driver.version is not None:
                named: list[tuple[bytes, int | None]] = [(HEADER, driver.version)]
                if driver.content != driver.version:
                    named.append((CONTENT_HEADER, driver.content))
                message["headers"] = [*message.get("headers", []), *((name, str(number).encode()) for name, number in named)]
            await send(message)

        await self._app(scope, receive, send_with_version)


# ---- the state machine ----

# Why an engine is dirty that slept without its weights.
DISCARDED = "the weights were discarded by sleep"


class State(Enum):
    SERVING = "serving"
    PAUSING = "pausing"
    WRITING = "writing"
    REFUSED = "refused"
    DIRTY = "dirty"
    ASLEEP = "asleep"


@dataclass(frozen=True)
class Pause:
    """Let the engine generate nothing. Answer with paused() or pause_failed()."""

    mode: str


@dataclass(frozen=True)
class Write:
    """With `reset_caches`, drop what was computed with the weights before, prefix cache and encoder cache; then let all ranks answer that
    they are ready, and take the version. Answer with written(), aborted(), lost() or write_failed().

    The caches go first: nothing is computed before Resume, and a failure to drop them then ends an update that wrote nothing."""

    version: int
    reset_caches: bool = True


@dataclass(frozen=True)
class Refuse:
    """Tell the daemon that this engine can't take the version. aborted() follows, or lost()."""

    version: int
    reason: str


@dataclass(frozen=True)
class SetVersion:
    """Let the engine's answers name this version from now on."""

    version: int


@dataclass(frozen=True)
class Resume:
    """Let the engine generate again. Answer with resumed()."""


@dataclass(frozen=True)
class Register:
    """Attach all ranks. Answer with registered(), however long it takes."""

    dirty: bool


@dataclass(frozen=True)
class Unregister:
    """Detach all ranks."""


@dataclass(frozen=True)
class Sleep:
    """Put the engine to sleep."""

    level: int


@dataclass(frozen=True)
class Wake:
    """Wake the engine up, paused as it was: its weights may be gone. Resume follows when they are whole."""


Action = Union[Pause, Write, Refuse, SetVersion, Resume, Register, Unregister, Sleep, Wake]


class Lifecycle:
    """One engine's life. Every method for what happened returns the actions that this calls for.

    `pause`: the mode of Pause. `reset_caches`: whether each version drops the caches. `clean`: whether the weights before any
    version are those of a checkpoint, not random ones.
    """

    def __init__(self, *, pause: str = "keep", reset_caches: bool = True, clean: bool = False) -> None:
        self.pause = pause
        self.reset_caches = reset_caches
        self.clean = clean
        self.version: int | None = None
        self.attached = False
        self.reason = "" if clean else "no version has come yet"  # why it is dirty or refused
        self.state = State.SERVING if clean else State.DIRTY
        self._updating: int | None = None
        self._paused = False  # whether the last of all Pause and Resume is a Pause, and was carried out
        self._generates = clean
        self._pause_is_last = False  # whether the last of all Pause and Resume that were asked for is a Pause
        self._pauses = 0  # asked for and not answered
        self._register_is_last = False  # whether the last of all Register and Unregister that were asked for is a Register
        self._registers = 0  # asked for and not answered
        self._aborted = False  # the update was aborted before the engine was paused
        self._sleep: int | None = None  # asked for during an update
        self._announced: set[int] = set()  # versions that began and are newer than the one here

    # ---- what is asked ----

    @property
    def serves(self) -> bool:
        return self.state is State.SERVING

    def ready(self, max_behind: int | None = None) -> bool:
        """Whether the engine may get requests. `max_behind`: how many versions that began since its own it may lack; None: any."""
        return self.serves and self._generates and self.attached and (max_behind is None or self.behind <= max_behind)

    @property
    def behind(self) -> int:
        """How many newer versions began that this engine does not hold. A version that was given up everywhere counts as well: an engine
        does not get the outcome of a version that it lost."""
        return len(self._announced)

    # ---- what happens ----

    def start(self) -> list[Action]:
        """The engine has started. Dirty weights are not served before the first version."""
        return [*self._stop_serving(), *self._register()]

    def registered(self) -> list[Action]:
        self._registers -= 1
        self.attached = self._register_is_last and not self._registers
        return []

    def found(self, version: int) -> list[Action]:
        """The memory that a new engine has taken up holds the version."""
        if self.state is not State.DIRTY or self._updating is not None:
            return []
        self.clean, self.version, self.reason = True, version, ""
        self.state = State.SERVING
        return self._serve()

    def prepare(self, version: int) -> list[Action]:
        if not self.attached and self.state is not State.ASLEEP:
            return []  # Prepare came by a lease that is being given up
        self._announced.add(version)
        if self.state is State.ASLEEP:
            return [Refuse(version, "the engine is asleep")]
        if self._updating is not None:
            return [Refuse(version, f"version {self._updating} is being taken")]
        self._updating, self._aborted = version, False
        if self._paused:
            self.state = State.WRITING
            return [Write(version, self.reset_caches)]
        self.state = State.PAUSING
        return self._pause(self.pause)

    def paused(self) -> list[Action]:
        self._pauses -= 1
        self._paused = self._pause_is_last and not self._pauses
        if not self._paused or self.state is not State.PAUSING or self._updating is None:
            return []
        if self._aborted:
            return self._settle()
        self.state = State.WRITING
        return [Write(self._updating, self.reset_caches)]

    def resumed(self) -> list[Action]:
        self._generates = not self._pause_is_last
        return []

    def pause_failed(self, reason: str) -> list[Action]:
        self._pauses -= 1
        # The engine may be paused in part: Resume is due when the update is over.
        if self.state is not State.PAUSING or self._updating is None:
            return []
        if self._aborted:
            return self._settle()
        self.state = State.REFUSED
        return [Refuse(self._updating, reason)]

    def written(self, version: int) -> list[Action]:
        """Version committed, and in place on all ranks."""
        self.clean, self.version, self.reason = True, version, ""
        self._announced = {other for other in self._announced if other > version}
        return [SetVersion(version), *self._settle()]

    def aborted(self, version: int, dirty: bool, reason: str = "") -> list[Action]:
        """The update was lost; `dirty`: the weights may be torn."""
        if dirty:
            self._mark_dirty(reason or f"version {version} was lost while it was written")
        if self._updating != version:
            return self._stop_serving() if dirty else []
        if self.state is State.PAUSING:
            self._aborted = True
            return []
        return self._settle()

    def write_failed(self, reason: str) -> list[Action]:
        """A rank could not take what was committed, or does not know the outcome: all attach anew, as dirty. An engine that was to sleep
        after the update attaches when it wakes up: until then its memory is not written."""
        self._mark_dirty(reason)
        self.attached = False
        actions = self._settle()
        return actions if self.state is State.ASLEEP else [*actions, *self._unregister(), *self._register()]

    def lost(self, clean: bool, reason: str = "") -> list[Action]:
        """The daemon was lost. `clean`: the weights are of one version all the same."""
        self.attached = False
        if not clean or (self.state is State.WRITING and not self.clean):
            self._mark_dirty(reason or "the daemon went away before the outcome was heard")
        if self.state is State.PAUSING:
            self._aborted = True
            return []
        if self._updating is not None:
            return self._settle()
        return [] if self.clean else self._stop_serving()

    def reattached(self, clean: bool) -> list[Action]:
        """A daemon is there again, and has this engine as a member. `clean`: as in lost()."""
        self.attached = True
        if clean:
            return []
        self._mark_dirty("the daemon came back and does not hold these weights for good")
        return self._stop_serving() if self._updating is None else []

    def sleep(self, level: int) -> list[Action]:
        """Somebody puts the engine to sleep; it waits for the end of an update. Level 2 discards the weights."""
        if self.state is State.ASLEEP:
            return []
        if self._updating is not None:
            self._sleep = level
            return []
        return self._fall_asleep(level)

    def weights_discarded(self) -> list[Action]:
        """The weights of an engine that was put to sleep were discarded afterwards."""
        if self._sleep is not None:
            self._sleep = 2
        elif self.state is State.ASLEEP:
            self._mark_dirty(DISCARDED)
        return []

    def wake(self) -> list[Action]:
        """Somebody wakes the engine up. It attaches anew, since its memory was unmapped meanwhile."""
        self._sleep = None
        if self.state is not State.ASLEEP:
            return []
        self.state = State.SERVING if self.clean else State.DIRTY
        actions: list[Action] = [Wake(), *self._register()]
        return [*actions, *self._serve()] if self.clean else actions

    # ---- inside ----

    def _mark_dirty(self, reason: str) -> None:
        self.clean, self.reason = False, reason

    def _settle(self) -> list[Action]:
        """The update is over, one way or the other."""
        self._updating, self._aborted = None, False
        self.state = State.SERVING if self.clean else State.DIRTY
        if self._sleep is not None:
            return self._fall_asleep(self._sleep)
        return self._serve() if self.clean else []

    def _serve(self) -> list[Action]:
        self._paused = self._pause_is_last = False
        return [Resume()]

    def _pause(self, mode: str) -> list[Action]:
        self._pause_is_last, self._generates = True, False
        self._pauses += 1
        return [Pause(mode)]

    def _stop_serving(self) -> list[Action]:
        """Dirty weights are served no longer."""
        if self.clean or self.state is State.ASLEEP:
            return []
        self.state = State.DIRTY
        return [] if self._paused else self._pause("abort")

    def _fall_asleep(self, level: int) -> list[Action]:
        actions: list[Action] = [] if self._paused else self._pause("abort")
        self.state, self.attached, self._sleep = State.ASLEEP, False, None
        if level >= 2:
            self._mark_dirty(DISCARDED)
        return [*actions, *self._unregister(), Sleep(level)]

    def _register(self) -> list[Action]:
        self._register_is_last = True
        self._registers += 1
        return [Register(dirty=not self.clean)]

    def _unregister(self) -> list[Action]:
        self._register_is_last, self.attached = False, False
        return [Unregister()]
