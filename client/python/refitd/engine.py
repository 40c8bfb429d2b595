"""An inference engine's rank: registers its parameters, or takes staged tensors, and answers the daemon's events, each of a type of its own:
`for event in engine: ...`.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from ctypes import byref
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Union

from ._core import awaited, ends_soon, interruptible, native, paused
from ._core.member import Connect, Member, Registration, TensorList, check_tensors, checked_version
from ._core.native import check, last_failure, made_by, shown, text
from ._core.tensors import Places, describe, is_module
from .errors import Closed, DataLoss, DeadlineExceeded, FailedPrecondition, Failure, InvalidArgument, NotFound
from .layout import Box, Derived, TensorSpec, devices
from .layout.memory import BY_CODE, DTYPES, Arena, DeviceBytes, DeviceMemory, HostBytes, Region, mark_versions, resolve, versioned
from .layout.placement import arena_of, place_in_arenas

if TYPE_CHECKING:
    import numpy
    import torch


class Weights(IntEnum):
    """The state of an engine rank's weights, as far as the rank knows it."""

    UNKNOWN = 0  # the lease was lost before the outcome came: treat it as dirty
    CLEAN = 1
    DIRTY = 2  # an update was lost after writing had begun, or the rank attached as dirty
    PAUSED = 3  # Prepare came, and neither Committed nor Aborted yet


@dataclass(frozen=True)
class Staged:
    """A version is complete and verified in the other side of the engine's arena (`Engine(wants_staged=True)`), and stays there until the outcome:
    prepare what can be while serving, then call processed().

    Prepare follows, also where that was not called within `remaining_seconds`; or Aborted, after which nothing that was made of the version may
    be used. `update_id`: tells two updates to one version apart; the same for all of the group's ranks.
    """

    version: int
    update_id: int
    remaining_seconds: float
    engine: Engine = field(repr=False, compare=False)

    def processed(self) -> None:
        """Answers that this rank need not be waited for. Raises FailedPrecondition where no answer is due (any more)."""
        self.engine.processed(self)


@dataclass(frozen=True)
class Prepare:
    """An update begins: stop reading the weights, synchronise the device, then call ready().

    `remaining_seconds`: how long the update may take from now, and with `flip` how long ready(). `tensor_count`: how many tensors the trainer's ranks
    announced together; None: they did not.
    `flip`: the version lies in the other side of the engine's arena, complete and verified; ready() puts it into place. `update_id`: as Staged's.
    """

    version: int
    update_id: int
    remaining_seconds: float
    tensor_count: int | None
    flip: bool
    engine: Engine = field(repr=False, compare=False)

    def ready(self, stopped_seconds: float | None = None) -> None:
        """As Engine.ready."""
        self.engine.ready(self.version, stopped_seconds)

    def fail(self, reason: str) -> None:
        """Refuses the update; Aborted follows."""
        self.engine.fail(self.version, reason)


@dataclass(frozen=True)
class View:
    """A tensor of `shape` and `dtype`, or its elements [start, start + count) in row-major order, in the daemon's memory.

    Read-only, though torch can't mark it so: a write there ends the process. The memory stays mapped as long as an array or tensor of
    it exists, but has other bytes once the part was acknowledged: copy what is needed longer.
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
        """Answers that the views are no longer read: on a GPU, that all work that reads them has ended."""
        self.engine.ack(self)

    def fail(self, reason: str) -> None:
        """Refuses to go on with the update; Aborted follows. ack() is due all the same."""
        self.engine.fail(self.version, reason)


@dataclass(frozen=True)
class Committed:
    """Resume on `version`. `incarnation` is that of the group: versions of two incarnations have nothing to do with each other.
    `owner`: the identity that owns the group, "" where nobody does. `digest`: of this rank's registered memory, 0 where it was not
    read back. `content`: the version whose content it is: None where that is `version` itself, an earlier one of a rollback."""

    version: int
    incarnation: int = field(repr=False)
    owner: str = ""
    digest: int = field(default=0, repr=False)
    content: int | None = None


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
    """The daemon was lost, and the library tries to attach again (`reattach_seconds`). Resume if `weights` is CLEAN; use no views any more."""

    reason: str
    weights: Weights


@dataclass(frozen=True)
class Reattached:
    """A daemon is there again. `version` is what this rank holds; None: no clean version."""

    version: int | None
    weights: Weights


Event = Union[Staged, Prepare, Part, Committed, Aborted, Draining, Lost, Reattached]


class Joiner:
    """Makes whole tensors of parts: a tensor larger than a slot arrives in several.

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
        self._begun: dict[str, tuple[View, dict[int, int]]] = {}  # by name, the whole tensor, and the counts of its parts by start

    def add(self, part: Part) -> Iterator[View]:
        """Yields the whole tensors of the part, and those that it completes, in the part's order. The part has been read only when the
        iterator is exhausted: acknowledge it then.

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
        """Copies a part into its whole tensor; returns that tensor once it is complete."""
        begun = self._begun.get(view.name)
        if begun is None:
            nbytes = math.prod(view.shape) * DTYPES[view.dtype].itemsize
            begun = View(view.name, view.dtype, view.shape, 0, math.prod(view.shape), engine._new_bytes(nbytes)), {}
            self._begun[view.name] = begun
        whole, counts = begun
        if (whole.dtype, whole.shape) != (view.dtype, view.shape):
            raise InvalidArgument(
                f"tensor '{view.name}': a part is {view.dtype} {view.shape}, those before are {whole.dtype} {whole.shape}", tensor=view.name
            )
        end = view.start + view.count
        if any(view.start < start + count and start < end for start, count in counts.items()):
            raise InvalidArgument(f"tensor '{view.name}': elements {view.start} to {end} came twice", tensor=view.name)
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
        """Forgets tensors that are not complete; call it on Committed, Aborted and Lost."""
        self._begun.clear()


# The longest that one call of the library waits for an event, so that signal handlers run and close() is noticed meanwhile.
SLICE_SECONDS = 0.1


class Engine(Member):
    """One rank of an engine instance, attached to the daemon of its node.

        engine = refitd.Engine("policy", instance="vllm-0", rank=r, world_size=tp)
        engine.register({name: parameter for name, parameter in model.named_parameters()})
        for event in engine:
            if isinstance(event, refitd.Prepare):
                pause(); event.ready()
            elif isinstance(event, (refitd.Committed, refitd.Aborted)):
                resume()        # Aborted: unless event.dirty

    Any thread may call any method, but a single thread should take and answer events.
    """

    _kind = "engine"

    def __init__(
        self,
        group: str,
        *,
        instance: str,
        rank: int = 0,
        world_size: int = 1,
        loader: bool = False,
        manifest: Sequence[TensorSpec | tuple[str, Any, Sequence[int]]] | None = None,
        held_version: int | None = None,
        held_incarnation: int | None = None,
        held_digest: int | None = None,
        held_content: int | None = None,
        held_owner: str | None = None,
        trainer_identity: str | None = None,
        dirty: bool = False,
        catch_up: bool = True,
        restore: bool = False,
        wants_staged: bool = False,
        device: str | None = None,
        socket: str | None = None,
        connect: Connect = Connect(),
    ) -> None:
        """Attaches, and waits for daemon and group for `connect.wait_seconds` (10 s).

        Args:
            group: The group's name.
            instance: The engine's name, equal on its ranks.
            rank: This rank's number, from 0.
            world_size: How many ranks the instance has.
            loader: Whether tensors come as Part events, to load with the engine's own code; else the daemon writes registered parameters.
            manifest: With `loader`, what must arrive in every update, as (name, dtype, shape).
            held_version: The version that the memory holds, complete, from an earlier attachment.
            held_incarnation: Committed's, of `held_version`.
            held_digest: Committed's, of `held_version`; with `catch_up`, memory of another digest holds no version.
            held_content: Committed's `content`, of `held_version`.
            held_owner: Committed's owner of the last version that was committed there, also where the memory is dirty since: a group
                that is made again belongs to that owner.
            trainer_identity: Whose weights this rank takes, "uid:1000", "spiffe://prod/trainer/a", "spiffe://prod/trainer/*",
                "dns:trainer.example" or "dns:*.example"; a group that another identity owns refuses the rank. None: any owner's.
            dirty: Whether the memory may hold no whole version; where you don't know, say True.
            catch_up: Without `loader`, whether the rank takes part in catch-ups. If its instance lacks the group's version, it gets that version
                from clean instances, by Prepare and its outcome as in any update, so keep taking events. If its instance holds the
                version, its registered memory is read at any time and given to others: from Committed until the next Prepare is
                answered, parameters are registered anew or the engine is closed, that memory must be the rank's weights, unchanged. Pass
                False where it is not, or where events are taken only when the trainer calls.
            restore: Without `loader`, whether the daemon keeps this rank's arenas when its process ends (GroupSpec.keep_seconds), and the rank
                takes up by restore() those that it keeps of this rank's last process; without this they are given up. Not with `held_version`
                or `dirty`.
            wants_staged: Whether Staged comes before Prepare where versions are staged in arenas. Not with `loader`.
            device: Where the weights are, a GPU's UUID ("GPU-...") or "host"; None: the current GPU where torch has used CUDA in this
                process, else host memory until tensors on a GPU are registered, for which the engine attaches anew there.
            socket: The path of the daemon's socket, in short for `connect.socket`.
            connect: How the daemon is reached. Engines share memory with it, so that it has no `address`.

        Raises:
            Unavailable: No daemon answers.
            DeadlineExceeded: The group does not appear.
            AlreadyExists: This rank is attached.
            PermissionDenied: Another identity owns the group, or the arenas to restore are another user's.
            InvalidArgument, FailedPrecondition: An argument is wrong, or the group or another rank disagrees.
        """
        super().__init__(f"instance {instance}", group, rank, world_size)
        self.instance = instance
        self.device = devices.current() if device is None else device
        self._follows_memory = device is None and not restore  # whether the device is the first registered tensor's
        self._places: Places | None = None
        self._written: tuple[Registration, list[Any] | None, list[Any]] | None = None  # the tensors of this registration and these places
        self._events = threading.Lock()  # one thread at a time takes events
        self._numbers = itertools.count()
        self._pending: list[tuple[int, Event]] = []  # put back, with their numbers, in ascending order
        options = native.sized(
            native.refit_engine_options,
            instance=text(instance),
            rank=rank,
            world_size=world_size,
            delivery=native.DELIVERIES["loader" if loader else "in_place"],
            dirty=int(dirty),
            restore=int(restore),
            wants_staged=int(wants_staged),
            catch_up=native.CATCH_UP_DEFAULT if catch_up else native.CATCH_UP_NEVER,
            held_owner=text(held_owner),
            trainer_identity=text(trainer_identity),
        )
        if held_version is not None:
            options.has_held_version, options.held_version = 1, checked_version(held_version)
            options.held_origin, options.held_digest = held_incarnation or 0, held_digest or 0
            if held_content is not None:
                options.has_held_content, options.held_content = 1, held_content
        if manifest is not None:
            specs = [spec_of(entry) for entry in manifest]
            check_tensors(specs, self.label)
            listed = TensorList(specs)
            options.has_manifest, options.manifest, options.manifest_count = 1, listed.pointer, listed.count
        if connect.address is not None:
            raise InvalidArgument("an engine shares memory with its daemon: give a socket, and no address", culprit="address")
        made = connect.to(socket)._structure(group, self.device)
        options.connect = ctypes.pointer(made)
        self._options = options, made, manifest is not None and listed  # what the structures point to is kept
        self._attach(options)

    def _close(self, wait_seconds: float) -> None:
        super()._close(wait_seconds)
        with self._lock:
            self._written = None  # it refers to the regions, which the next engine may want

    # ---- layout ----

    def register(
        self,
        layout: Any,
        *,
        buffers: bool | Sequence[str] = True,
        leave_out: Sequence[str] = (),
        tied: bool | Mapping[str, str] = True,
        derived: Mapping[str, Derived] | None = None,
    ) -> None:
        """Registers the parameters of this rank, in place of those registered before; not during an update.

        A module's tensors are known by name, those that a loader fills likewise: where one has other memory when an update begins,
        because it was replaced, `ready` refuses the update.

        Where two names are one memory (tied weights), a trainer may send either or both. The values of both are compared at every version:
        an update whose values differ fails, naming both tensors; by refit before anything is written.

        Args:
            layout: What refitd.capture returned, a torch module, a dict of names to tensors, or a list of refitd.Shard. Their memory must be of regions
                (refitd.empty, refitd.adopt) or on the GPU `device`.
            buffers: Of a module: whether persistent buffers are taken, or patterns of those that are.
            leave_out: Patterns of names that are not taken.
            tied: As in Trainer.register.
            derived: By name, how a tensor is computed from one that trainers hold or push.

        Raises:
            InvalidArgument: The layout is wrong in itself; the error names the tensor. Nothing has changed then.
            FailedPrecondition: Another rank's layout disagrees, or an update runs. Nothing has changed then.
        """
        module = layout if is_module(layout) else getattr(layout, "module", None)
        if not (hasattr(layout, "tensors") and hasattr(layout, "boxes")):
            from .layout.shards import collect

            layout = collect(layout, buffers=buffers, leave_out=leave_out, tied=tied, rank=self.rank)
        self.register_layout(_with_derived(layout.tensors, derived or {}), layout.boxes, getattr(layout, "tied", None))
        if module is not None:
            self._places = Places(module, getattr(layout, "parameter_names", None))

    def restore(self, module: torch.nn.Module, *, buffers: bool = True, back: str = "device") -> bool:
        """Gives a module's parameters and persistent buffers memory with two sides. With Engine(restore=True) that is the
        memory of this rank's last process, if the daemon keeps it and the same module was moved there by refitd.adopt(arena=True): it must not be
        written until it is registered, which this does. Else it is new, and its bytes are not set.

        The module needs no memory of its own for them (build it on the device "meta"); what values they have are let go. The Parameter objects
        become others, as by `module.to_empty`, and keep attributes and ties. Buffers that are not persistent stay as they are.

        Args:
            module: A torch module.
            buffers: Whether persistent buffers are placed and registered as well.
            back: As in refitd.adopt, of new memory.

        Returns:
            Whether the memory holds `version`, whose Committed is then the next event, and the module is registered. If not, load the weights and
            register the module, so that both sides have what no version brings.

        Raises:
            ResourceExhausted: There is too little memory.
            What register() raises; the module then has new memory.
        """
        kept = self.take_kept()
        place_in_arenas(module, kept, self.device, buffers, back)
        if not kept:
            return False
        try:
            self.register(module, buffers=buffers)
        except DataLoss:
            return False
        except BaseException:
            place_in_arenas(module, [], self.device, buffers, back)  # the kept memory can't be written
            raise
        return True

    def take_kept(self) -> list[Arena]:
        """The arenas that the daemon keeps for this rank, in the order in which its last process made them; for adapters of engines that place
        tensors themselves, as restore() does."""
        return interruptible(self._take_kept, cancel=ends_soon)

    def _take_kept(self) -> list[Arena]:
        arenas: list[Arena] = []
        with self._handle as handle:
            while True:
                try:
                    made = made_by("refit_engine_take_kept", handle, len(arenas), free="refit_arena_free", what="an arena", context=self.label)
                except NotFound:
                    return arenas
                arenas.append(arena_of(made))

    def register_layout(self, tensors: Sequence[TensorSpec], boxes: Sequence[Box], tied: Mapping[str, str] | None = None) -> None:
        """Does what register() does, for plain records.

        Trainers may send a tensor without a box of this rank that is not tied; it is not written, and UpdateResult.left_out names it.

        Args:
            tensors: The tensors that this rank knows.
            boxes: The boxes of them that it holds, by `tensor_index`.
            tied: Names without boxes whose memory is that of another name, and that name.
        """
        self._places = None
        with paused():
            check_tensors(tensors, self.label)
            self._follow_memory(next((box.memory.device_uuid for box in boxes if isinstance(box.memory, DeviceMemory)), None))
            boxes = [*boxes, *_tied_boxes(tensors, boxes, tied or {})]
            self._register(Registration(list(tensors), list(boxes), []), stage=False)

    def _follow_memory(self, device: str | None) -> None:
        """Attaches anew on the device of the first tensors that come, where no device was given and the host was taken: CUDA was not used
        when this engine attached. An error leaves the engine closed. `device`: None is the host."""
        if not self._follows_memory:
            return
        if device is not None and self._on_host:
            options, connect, _ = self._options
            interruptible(self._handle.close, cancel=ends_soon)
            with self._lock:
                self._known.clear()
            self.device = device
            connect.device = text(device)
            self._attach(options)
        self._follows_memory = False

    # ---- events ----

    def __iter__(self) -> Iterator[Event]:
        """Yields events until close(). Raises what ended the lease; `weights` then tells the rest."""
        while True:
            try:
                event = self.next(timeout_seconds=None)
            except Closed:
                return
            yield event

    def next(self, timeout_seconds: float | None = None) -> Event:
        """The next event. Raises DeadlineExceeded after `timeout_seconds` (None: never), Closed after close(), and what ended the
        lease (Unavailable, ...) once no event is left."""
        event = self._next_or_none(None, timeout_seconds)
        if event is None:
            raise DeadlineExceeded(f"{self.label}: no event within {timeout_seconds} s")
        return event

    def poll(self, seconds: float = 0.0) -> Event | None:
        """The next event, or None after `seconds`."""
        return self._next_or_none(None, seconds)

    def _next_or_none(self, stopped: threading.Event | None, timeout_seconds: float | None) -> Event | None:
        """The next event; None after `timeout_seconds`, or soon after `stopped` was set."""
        caller_left = threading.Event()
        # A signal handler may end the wait: `cancel` then ends _take, and `disown` puts back an event that it took.
        _, event = interruptible(lambda: self._take(caller_left, stopped, timeout_seconds), cancel=caller_left.set, disown=self._untake)
        return event

    def _take(
        self, caller_left: threading.Event, stopped: threading.Event | None, timeout_seconds: float | None
    ) -> tuple[int, Event | None]:
        """Returns what _next_or_none returns, with the event's number. `caller_left` is set when the caller waits no more.

        Not for a thread on which signal handlers run: an event that was taken must get to its caller, or to _untake().
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            remaining = SLICE_SECONDS if deadline is None else min(SLICE_SECONDS, deadline - time.monotonic())
            with self._events:
                if caller_left.is_set():
                    return 0, None
                if self._pending:
                    return self._pending.pop(0)
                raw = native.sized(native.refit_event)
                with self._handle as handle:
                    check(native.library().refit_engine_next(handle, round(max(remaining, 0.0) * 1000), byref(raw)), self.label)
                    event = self._event(handle, raw)
                if event is not None:
                    return next(self._numbers), event
            if (stopped is not None and stopped.is_set()) or (deadline is not None and time.monotonic() >= deadline):
                return 0, None

    def _put_back(self, event: Event) -> None:
        """For a caller that can't use its event now: the next call gets that event before any other."""
        self._untake((-1, event))

    def _untake(self, taken: tuple[int, Event | None]) -> None:
        """For a caller that was interrupted or cancelled after the event was taken: the next call gets the event, in its order."""
        number, event = taken
        if event is not None:
            with self._events:
                self._pending.append((number, event))
                self._pending.sort(key=lambda entry: entry[0])

    def _event(self, handle: int, raw: native.refit_event) -> Event | None:
        """The library's event as an object; None: nothing happened that this version knows."""
        kind = raw.kind
        if kind == native.EVENT_NOTHING:
            return None
        if kind == native.EVENT_STAGED:
            return Staged(raw.version, raw.update_id, raw.remaining_ms / 1000, self)
        if kind == native.EVENT_PREPARE:
            return Prepare(raw.version, raw.update_id, raw.remaining_ms / 1000, raw.tensor_count or None, bool(raw.flip), self)
        if kind == native.EVENT_PART:
            return Part(raw.version, raw.update_id, raw.part, self._views(handle, raw), self)
        if kind == native.EVENT_COMMITTED:
            self._mark_written()
            content = None if raw.content == raw.version else raw.content
            return Committed(raw.version, raw.incarnation, (raw.owner or b"").decode(errors="replace"), raw.digest, content)
        if kind == native.EVENT_ABORTED:
            return Aborted(raw.version, shown(raw.reason), bool(raw.dirty), last_failure())
        if kind == native.EVENT_DRAINING:
            return Draining()
        if kind == native.EVENT_LOST:
            return Lost(shown(raw.reason), Weights(raw.weights))
        if kind == native.EVENT_REATTACHED:
            return Reattached(None if raw.version < 0 else raw.version, Weights(raw.weights))
        return None  # an event of a later library

    def _mark_written(self) -> None:
        """Counts up the versions of tensors that the daemon wrote past torch: copies that a module keeps by a version become stale (P11)."""
        with self._lock:
            registration, places = self._registration, self._places
        if registration is None or "torch" not in sys.modules:
            return
        held = None if places is None else places.tensors
        if self._written is None or self._written[0] is not registration or self._written[1] is not held:
            owners = [owner for box in registration.boxes if (owner := getattr(box.memory, "owner", None)) is not None]
            self._written = registration, held, versioned([*owners, *(held or ())])
        mark_versions(self._written[2])

    def _views(self, handle: int, raw: native.refit_event) -> tuple[View, ...]:
        """The views of a Part, each of which keeps the slot's memory mapped."""
        hold = made_by("refit_engine_hold", handle, free="refit_hold_free", what="a part's memory", context=self.label)
        views = []
        for i in range(raw.view_count):
            given = raw.views[i]
            tensor = given.tensor
            dtype = BY_CODE[tensor.dtype]
            shape = tuple((ctypes.c_int64 * tensor.dim_count).from_address(tensor.dims)) if tensor.dim_count else ()
            data = devices.bytes_at(self.device, given.data or 0, tensor.count * dtype.itemsize, hold)
            views.append(View(tensor.name.decode(), dtype.name, shape, tensor.start, tensor.count, data))
        return tuple(views)

    def _new_bytes(self, nbytes: int) -> HostBytes | DeviceBytes:
        """New memory on this rank's device."""
        kind = devices.kind_of(self.device)
        if kind is not None and self.device is not None:
            return kind.new_bytes(self.device, nbytes)
        room = Region(max(nbytes, 1))  # a region of its own is page-aligned, and is freed as soon as it is unused
        return HostBytes(room.pointer, nbytes, room)

    # ---- answers ----

    def processed(self, staged: Staged) -> None:
        """Answers Staged: this rank need not be waited for. Raises FailedPrecondition where no answer is due (any more), since Prepare has come,
        say."""
        self._check("processed", staged.update_id)

    def ready(self, version: int, stopped_seconds: float | None = None) -> None:
        """Answers Prepare: this rank no longer reads its weights. `stopped_seconds`: for how long it has not, by which the daemon counts pauses;
        None: since this rank took Prepare.

        Raises FailedPrecondition where no answer is due (any more), and where a registered tensor lies in other memory now, which nobody
        would write: the update fails then, and the tensors must be registered again.
        """
        self._check_unmoved(version)
        self._check("ready", checked_version(version), -1 if stopped_seconds is None else max(round(1e6 * stopped_seconds), 0))

    def _check_unmoved(self, version: int) -> None:
        """Refuses the update where a registered tensor lies in other memory now."""
        with self._lock:
            registration, places = self._registration, self._places
        if registration is not None and registration.moved():
            first = registration.first_moved()
            self._refuse(version, f"{first} of {self.label} lies elsewhere than when it was registered", first)
        changed = {} if places is None else places.changed()
        if changed:
            self._refuse(version, *describe(changed, self.label))

    def _refuse(self, version: int, why: str, culprit: str) -> None:
        self.fail(version, why)
        raise FailedPrecondition(f"{why}: register the parameters again", culprit=culprit)

    def ack(self, part: Part) -> None:
        """Answers Part: its views are no longer read. Raises FailedPrecondition where no answer is due (any more)."""
        self._check("ack", part.update_id, part.part)

    def fail(self, version: int, reason: str) -> None:
        """Refuses to go on with the update to `version`; Aborted follows."""
        self._check("fail", checked_version(version), text(reason))

    # ---- state ----

    @property
    def weights(self) -> Weights:
        """The state of the weights, as far as this rank knows it. Works until close(), also after the lease's end."""
        return Weights(self._use(native.library().refit_engine_weights))

    @property
    def version(self) -> int | None:
        """The version installed here; None: none, or the weights are not clean."""
        return self._ask_version("version")


def _with_derived(tensors: Sequence[TensorSpec], derived: Mapping[str, Derived]) -> list[TensorSpec]:
    if unknown := sorted(derived.keys() - {tensor.name for tensor in tensors}):
        raise InvalidArgument(f"derived has tensor '{unknown[0]}', which the layout has not", tensor=unknown[0])
    return [replace(tensor, derived=derived.get(tensor.name, tensor.derived)) for tensor in tensors]


def _tied_boxes(tensors: Sequence[TensorSpec], boxes: Sequence[Box], tied: Mapping[str, str]) -> Iterator[Box]:
    """The boxes of the names in `tied`: the library knows by equal boxes that two names are one memory."""
    numbers = {spec.name: i for i, spec in enumerate(tensors)}
    for name, kept in tied.items():
        number, owner = numbers.get(name), numbers.get(kept)
        if number is None or owner is None:
            continue
        if (tensors[number].dtype, tuple(tensors[number].shape)) == (tensors[owner].dtype, tuple(tensors[owner].shape)):
            yield from [replace(box, tensor_index=number) for box in boxes if box.tensor_index == owner]


def spec_of(entry: TensorSpec | tuple[str, Any, Sequence[int]]) -> TensorSpec:
    """Returns a TensorSpec as it is; makes one of (name, dtype, shape)."""
    if isinstance(entry, TensorSpec):
        return entry
    name, dtype, shape = entry
    return TensorSpec(name, resolve(dtype, f"tensor '{name}'").name, tuple(shape))


class Inbox:
    """The tasks of one event loop that wait for an engine's events, served in the order in which they asked.

    Events come in their order also where tasks are cancelled: the next event is not read before the last has been received, or
    has been put back because its task was cancelled. All methods run on the loop's thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Engine) -> None:
        self.loop = loop
        self._engine = engine
        self._turn: asyncio.Future[None] = loop.create_future()  # done when the task that asks next may read
        self._turn.set_result(None)

    async def next(self, timeout_seconds: float | None) -> Event | None:
        """The next event, or None after `timeout_seconds`."""
        deadline = None if timeout_seconds is None else self.loop.time() + timeout_seconds
        turn, following = self._turn, self.loop.create_future()
        self._turn = following
        last: asyncio.Future[Any] = turn  # the turn ends when this is done
        caller_left = threading.Event()
        try:
            if not turn.done() and not (await asyncio.wait((turn,), timeout=timeout_seconds))[0]:
                return None
            remaining = None if deadline is None else max(deadline - self.loop.time(), 0.0)
            take = partial(self._engine._take, caller_left, None, remaining)
            last = self.loop.create_task(awaited(take, cancel=caller_left.set, disown=self._engine._untake))
            return (await asyncio.shield(last))[1]  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            caller_left.set()
            if last is not turn:
                last.add_done_callback(self._put_back)
            raise
        finally:
            last.add_done_callback(lambda _: following.set_result(None))

    def _put_back(self, reading: asyncio.Future[Any]) -> None:
        if not reading.cancelled() and reading.exception() is None:
            self._engine._untake(reading.result())
