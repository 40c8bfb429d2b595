"""The life of an inference engine whose weights change, as a state machine: what happens goes in, what is to be done comes out.

It imports neither vLLM nor torch, does nothing by itself, and reads no clock: the driver (`driver.py`) tells it what happened, and
carries its actions out one after the other, in their order. Not thread-safe.

    state       serves  ready   left by
    serving     yes     yes     prepare -> pausing;   sleep -> asleep;   lost (weights not good) -> dirty
    pausing     no      no      paused -> writing;    pause_failed -> refused
    writing     no      no      written -> serving;   aborted -> serving or dirty;   lost, write_failed -> dirty
    refused     no      no      aborted, lost -> serving or dirty
    dirty       no      no      prepare -> writing;   sleep -> asleep
    asleep      no      no      wake -> serving or dirty
    ended       no      no      -

Invariants, which the tests check after every step of random orders:
1. An engine serves only while its weights are one whole version.
2. It is ready only while it serves, is attached, and is not behind by more than was asked.
3. Whatever happened, an engine that is awake serves again after the next version is committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Union


# Why an engine is dirty that slept without its weights.
DISCARDED = "the weights were discarded by sleep"


class State(Enum):
    SERVING = "serving"
    PAUSING = "pausing"
    WRITING = "writing"
    REFUSED = "refused"
    DIRTY = "dirty"
    ASLEEP = "asleep"
    ENDED = "ended"


@dataclass(frozen=True)
class Pause:
    """Let the engine generate nothing. Answer with paused() or pause_failed()."""

    mode: str


@dataclass(frozen=True)
class Write:
    """Drop what was computed with the weights before, prefix cache and encoder cache, where `reset_caches` says so; then let all ranks
    say that they are ready, and take the version. Answer with written(), aborted(), lost() or write_failed().

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
    """Let the engine tell this version from now on."""

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
    """One engine's life. Every method that tells what happened returns the actions that it calls for.

    `pause`: the mode of Pause. `reset_caches`: whether caches go with each version. `clean`: whether the weights, before any version,
    are whole: those of a checkpoint, not random ones.
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
        self._paused = False  # whether all that was asked for of Pause and Resume ends with a Pause that was carried out
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
        """How many newer versions began that this engine does not hold. One that was given up everywhere counts as well: an engine
        does not hear what became of a version that it lost."""
        return len(self._announced)

    # ---- what happens ----

    def start(self) -> list[Action]:
        """The engine is there. Dirty weights are not served before the first version."""
        return [*self._stop_serving(), *self._register()]

    def registered(self) -> list[Action]:
        self._registers -= 1
        self.attached = self._register_is_last and not self._registers
        return []

    def prepare(self, version: int) -> list[Action]:
        if not self.attached and self.state not in (State.ASLEEP, State.ENDED):
            return []  # Prepare came by a lease that is being given up
        self._announced.add(version)
        if self.state in (State.ASLEEP, State.ENDED):
            return [Refuse(version, f"the engine is {self.state.value}")]
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
            self._soil(reason or f"version {version} was lost while it was written")
        if self._updating != version:
            return self._stop_serving() if dirty else []
        if self.state is State.PAUSING:
            self._aborted = True
            return []
        return self._settle()

    def write_failed(self, reason: str) -> list[Action]:
        """A rank could not take what was committed, or does not know the outcome: all attach anew, as dirty. An engine that was to sleep
        after the update attaches when it wakes up: until then its memory is not written."""
        self._soil(reason)
        self.attached = False
        actions = self._settle()
        return actions if self.state is State.ASLEEP else [*actions, *self._unregister(), *self._register()]

    def lost(self, good: bool, reason: str = "") -> list[Action]:
        """The daemon went away. `good`: the weights are whole all the same."""
        self.attached = False
        if not good or (self.state is State.WRITING and not self.clean):
            self._soil(reason or "the daemon went away before the outcome was heard")
        if self.state is State.PAUSING:
            self._aborted = True
            return []
        if self._updating is not None:
            return self._settle()
        return [] if self.clean else self._stop_serving()

    def reattached(self, good: bool) -> list[Action]:
        """A daemon is there again, and knows this engine."""
        self.attached = True
        if good:
            return []
        self._soil("the daemon came back and does not hold these weights for good")
        return self._stop_serving() if self._updating is None else []

    def sleep(self, level: int) -> list[Action]:
        """Somebody puts the engine to sleep; it waits for the end of an update. Level 2 discards the weights."""
        if self.state in (State.ASLEEP, State.ENDED):
            return []
        if self._updating is not None:
            self._sleep = level
            return []
        return self._fall_asleep(level)

    def weights_went(self) -> list[Action]:
        """The weights of an engine that was put to sleep were discarded afterwards."""
        if self._sleep is not None:
            self._sleep = 2
        elif self.state is State.ASLEEP:
            self._soil(DISCARDED)
        return []

    def wake(self) -> list[Action]:
        """Somebody wakes the engine up. It attaches anew, since its memory was unmapped meanwhile."""
        self._sleep = None
        if self.state is not State.ASLEEP:
            return []
        self.state = State.SERVING if self.clean else State.DIRTY
        actions: list[Action] = [Wake(), *self._register()]
        return [*actions, *self._serve()] if self.clean else actions

    def shutdown(self) -> list[Action]:
        if self.state is State.ENDED:
            return []
        self.state, self.attached, self._updating = State.ENDED, False, None
        return self._unregister()

    # ---- inside ----

    def _soil(self, reason: str) -> None:
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
        if self.clean or self.state in (State.ASLEEP, State.ENDED):
            return []
        self.state = State.DIRTY
        return [] if self._paused else self._pause("abort")

    def _fall_asleep(self, level: int) -> list[Action]:
        actions: list[Action] = [] if self._paused else self._pause("abort")
        self.state, self.attached, self._sleep = State.ASLEEP, False, None
        if level >= 2:
            self._soil(DISCARDED)
        return [*actions, *self._unregister(), Sleep(level)]

    def _register(self) -> list[Action]:
        self._register_is_last = True
        self._registers += 1
        return [Register(dirty=not self.clean)]

    def _unregister(self) -> list[Action]:
        self._register_is_last, self.attached = False, False
        return [Unregister()]
