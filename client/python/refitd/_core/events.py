"""The events that an engine is told of, each with a type of its own: `for event in engine: ...`."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Union

from ..errors import Failure, InvalidArgument
from ..layout.memory import DTYPES, DeviceBytes, HostBytes

if TYPE_CHECKING:
    import numpy
    import torch

    from ..engine import Engine


class Weights(IntEnum):
    """The state of an engine rank's weights, as far as the rank knows it."""

    UNKNOWN = 0  # the lease was lost before the outcome was heard: treat it as dirty
    CLEAN = 1
    DIRTY = 2  # an update was lost after writing had begun, or the rank attached as dirty
    PAUSED = 3  # Prepare came, and neither Committed nor Aborted yet


@dataclass(frozen=True)
class Prepare:
    """An update begins: stop reading the weights, synchronise the device, then call ready().

    `remaining_seconds`: of the update. `tensor_count`: what the trainer announced at the begin, of all ranks; None: it did not.
    """

    version: int
    remaining_seconds: float
    tensor_count: int | None
    engine: Engine = field(repr=False, compare=False)

    def ready(self) -> None:
        """Says that this rank no longer reads its weights. Raises FailedPrecondition where that is not due (any more)."""
        self.engine.ready(self.version)

    def fail(self, reason: str) -> None:
        """Says that this rank can't take the update; Aborted follows."""
        self.engine.fail(self.version, reason)


@dataclass(frozen=True)
class View:
    """A tensor of `shape` and `dtype`, or its elements [start, start + count) in row-major order, in the daemon's memory.

    Read-only, though torch can't say so: a write there ends the process. The memory stays mapped as long as anything made of it,
    but it shows other bytes once the part was acknowledged: copy what is needed longer.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    count: int
    data: Union[HostBytes, DeviceBytes] = field(repr=False, compare=False)

    @property
    def whole(self) -> bool:
        """Whether this is all of the tensor."""
        return self.start == 0 and self.count == math.prod(self.shape)

    @property
    def _dims(self) -> tuple[int, ...]:
        return self.shape if self.whole else (self.count,)

    @property
    def memory(self) -> memoryview:
        """The bytes, read-only; not of a GPU."""
        return self.data.memory(writable=False)

    def numpy(self) -> numpy.ndarray[Any, Any]:
        """A read-only array of `shape`, or of (count,) for a part of a tensor.

        Raises Unimplemented for bytes on a GPU.
        """
        return self.data.numpy(self._dims, self.dtype, writable=False)

    def torch(self) -> torch.Tensor:
        """A torch tensor of `shape`, or of (count,) for a part of a tensor, where the bytes are: on the CPU or the GPU."""
        return self.data.torch(self._dims, self.dtype)


@dataclass(frozen=True)
class Part:
    """Loader delivery: tensors to load; then call ack()."""

    version: int
    update_id: int
    part: int
    views: tuple[View, ...]
    engine: Engine = field(repr=False, compare=False)

    def ack(self) -> None:
        """Says that the views are no longer read: on a GPU, that all work that reads them has ended."""
        self.engine.ack(self)

    def fail(self, reason: str) -> None:
        """Says that this rank can't go on with the update; Aborted follows. ack() is due all the same."""
        self.engine.fail(self.version, reason)


@dataclass(frozen=True)
class Committed:
    """Resume on `version`. `incarnation` is that of the group: versions of two incarnations have nothing to do with each other.
    `owner`: the identity that owns the group, "" where nobody does. `digest`: of this rank's registered memory, 0 where it was not
    read back."""

    version: int
    incarnation: int
    owner: str = ""
    digest: int = 0


@dataclass(frozen=True)
class Aborted:
    """The update was lost. Resume on the version before, unless `dirty`: then stay paused until a Committed.

    `reason` is for people; `failure` is what is known as data, of this rank's instance.
    """

    version: int
    reason: str
    dirty: bool
    failure: Failure = field(default=Failure(), compare=False)


@dataclass(frozen=True)
class Draining:
    """The daemon opens no new update."""


@dataclass(frozen=True)
class Lost:
    """The daemon went away, and is tried again (`reattach_seconds`). Resume if `weights` is CLEAN; use no views any more."""

    reason: str
    weights: Weights


@dataclass(frozen=True)
class Reattached:
    """A daemon is there again. `version` is what this rank holds; None: nothing that is good."""

    version: int | None
    weights: Weights


Event = Union[Prepare, Part, Committed, Aborted, Draining, Lost, Reattached]


class Joiner:
    """Makes whole tensors of parts: those larger than a slot arrive in several.

        joiner = Joiner()
        for event in engine:
            if isinstance(event, Part):
                model.load_weights((view.name, view.torch()) for view in joiner.add(event))
                event.ack()
            elif not isinstance(event, Prepare):
                joiner.reset()

    Joined tensors lie in memory of their own, which lives as long as anything made of it. Not thread-safe.
    """

    def __init__(self) -> None:
        self._begun: dict[str, tuple[View, dict[int, int]]] = {}  # the whole view, and counts by start

    def add(self, part: Part) -> Iterator[View]:
        """Yields the whole tensors that the part brings or completes, in its order. All of the part is read at the end.

        Raises InvalidArgument where parts overlap or disagree.
        """
        for view in part.views:
            if view.whole:
                yield view
                continue
            joined = self._join(view, part.engine)
            if joined is not None:
                yield joined

    def _join(self, view: View, engine: Engine) -> View | None:
        begun = self._begun.get(view.name)
        if begun is None:
            nbytes = math.prod(view.shape) * DTYPES[view.dtype].itemsize
            begun = View(view.name, view.dtype, view.shape, 0, math.prod(view.shape), engine._new_bytes(nbytes)), {}
            self._begun[view.name] = begun
        whole, counts = begun
        if (whole.dtype, whole.shape) != (view.dtype, view.shape):
            raise InvalidArgument(
                f"tensor '{view.name}': a part is {view.dtype} {view.shape}, those before are {whole.dtype} {whole.shape}", culprit=f"tensor '{view.name}'"
            )
        end = view.start + view.count
        if any(view.start < start + count and start < end for start, count in counts.items()):
            raise InvalidArgument(f"tensor '{view.name}': elements {view.start} to {end} came twice", culprit=f"tensor '{view.name}'")
        itemsize = DTYPES[view.dtype].itemsize
        if isinstance(view.data, HostBytes):
            ctypes.memmove(whole.data.pointer + view.start * itemsize, view.data.pointer, view.count * itemsize)
        else:
            whole.torch().view(-1)[view.start : end].copy_(view.torch())
        counts[view.start] = view.count
        if sum(counts.values()) < whole.count:
            return None
        del self._begun[view.name]
        return whole

    @property
    def unfinished(self) -> list[str]:
        """Names of tensors that were begun and are not complete."""
        return list(self._begun)

    def reset(self) -> None:
        """Forgets what is not complete: on Committed, Aborted and Lost."""
        self._begun.clear()
