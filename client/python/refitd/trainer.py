"""A trainer rank: registers its shards and refits, or pushes full tensors into an update."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from ._core import SLICE_SECONDS, ends_soon, interruptible, native, paused
from ._core.member import (
    CLOSE_SECONDS, Connect, GroupSpec, Member, Registration, TensorList, check_name, check_tensors, checked_version, milliseconds,
)  # fmt: skip
from ._core.native import Handle, check, error_of, last_failure, made_by, reads_tensors, shown, text
from ._core.tensors import copy_host, is_torch, source_of
from .errors import DeadlineExceeded, Error, FailedPrecondition, Failure, InvalidArgument, UpdateAborted
from .layout import DEFAULT_STAGING_BYTES, Box, Layout, PushedTensors, TensorSpec, devices
from .layout.memory import DeviceBytes, HostBytes, Source, to_row_end


VERIFICATIONS = {None: 0, "off": 1, "transfer": 2, "readback": 3}
# The most bytes of a bucket over TCP: a quarter of what a daemon takes in a call by default (limits.inline_bytes).
INLINE_BYTES = 1 << 20
OUTCOMES = ("unknown", "running", "committed", "aborted")


class Stream(Protocol):
    """A queue of a device's work, such as torch.cuda.Stream."""

    def synchronize(self) -> None:
        """Waits for the work that was queued before the call."""


@dataclass(frozen=True)
class InstanceOutcome:
    """Whether an instance committed an update. `reason` (for people) and `failure` (as data): why an instance that did not was evicted."""

    instance: str
    committed: bool
    reason: str
    failure: Failure = field(default=Failure(), compare=False)


@dataclass(frozen=True)
class UpdateResult:
    """A committed update.

    `bytes`: how much tensor data all trainer ranks moved. `seconds`: from the first rank's begin to the decision, by the daemon's
    clock. `instances`: those that took part; empty where the commit's answer was lost with the daemon. `tensors`: how many this rank
    registered or pushed. `pushed_bytes`: by method of
    broadcast, how many of `bytes` were pushed. `left_out_tensors`, `left_out_bytes`: tensors that came and were written nowhere, because
    no engine wants them (`unwanted_tensors`) or their memory is another tensor's (tied weights); `left_out`: the names of the first 64,
    sorted. `staged_bytes`: how many bytes this rank copied first, since they lie outside of regions. `rebound`: how many names of this
    rank were bound to other tensors or other memory than before.
    """

    version: int
    bytes: int
    seconds: float
    instances: tuple[InstanceOutcome, ...]
    pushed_bytes: dict[str, int]
    left_out_tensors: int
    left_out_bytes: int
    staged_bytes: int = 0
    rebound: int = 0
    left_out: tuple[str, ...] = ()
    tensors: int = 0

    def __repr__(self) -> str:
        rate = f"{self.bytes} bytes in {self.seconds:.3g} s"
        left_out = f", {self.left_out_tensors} left out" if self.left_out_tensors else ""
        return f"<UpdateResult version {self.version}: {self.tensors} tensors{left_out}, {rate}, {self.committed} of {len(self.instances)} instances>"

    @property
    def committed(self) -> int:
        """How many instances hold the version."""
        return sum(outcome.committed for outcome in self.instances)


# How many tensors that were left out the library names at most.
MAX_NAMED = 64


def result_of(raw: native.refit_commit_result, of: str, handle: int, staged_bytes: int = 0, rebound: int = 0) -> UpdateResult:
    """The result of a commit or refit. Must be called on the thread that made the commit or refit, before that thread makes another: the next one
    replaces the outcomes and names that the library keeps at the handle. `of`: whose `handle` it is, "update" or "trainer"."""
    ask = getattr(native.library(), f"refit_{of}_outcome")
    instances = []
    for i in range(raw.instances):
        name, reason = ctypes.c_char_p(), ctypes.c_char_p()
        committed = ctypes.c_int32()
        check(ask(handle, i, byref(name), byref(committed), byref(reason)))
        failure = Failure() if committed.value else last_failure()
        instances.append(InstanceOutcome((name.value or b"").decode(), bool(committed.value), shown(reason.value), failure))
    pushed = {method: raw.pushed_bytes[i] for method, i in native.BROADCASTS.items() if raw.pushed_bytes[i]}
    names = []
    ask_name = getattr(native.library(), f"refit_{of}_left_out")
    for i in range(min(raw.left_out_tensors, MAX_NAMED)):
        name = ctypes.c_char_p()
        check(ask_name(handle, i, byref(name)))
        names.append((name.value or b"").decode(errors="replace"))
    left_out = raw.left_out_tensors, raw.left_out_bytes
    return UpdateResult(raw.version, raw.bytes, raw.seconds, tuple(instances), pushed, *left_out, staged_bytes, rebound, tuple(names))


class _Window:
    """The slots that this rank holds: leased ones, and pushed ones without an answer. The daemon refuses to lease more than `slots`."""

    def __init__(self, slots: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each slot that may be leased
        for _ in range(slots):
            self._free.put(None)
        self.error: Error | None = None  # the error of the first push that failed
        self.key = next(_keys)
        _windows[self.key] = self

    def enter(self) -> None:
        """Counts one more slot as held; waits while this rank holds as many as it may, at the latest until the update's time has passed,
        when every push is answered.

        Raises the first error of any push: then slots may never come back, such as those of an interrupted call.
        """
        while True:
            try:
                return self._free.get(timeout=SLICE_SECONDS)
            except queue.Empty:
                if self.error is not None:
                    raise self.error from None

    def leave(self) -> None:
        """Counts one slot less as held."""
        self._free.put(None)


_keys = itertools.count(1)
_windows: weakref.WeakValueDictionary[int, _Window] = weakref.WeakValueDictionary()


def _on_answer(key: int, status: int, message: bytes) -> None:
    """Notes that a push was answered; runs on a thread of the library. It is never freed, so that it outlives its callers."""
    window = _windows.get(key)
    if window is None:
        return
    if status != 0 and window.error is None:
        window.error = error_of(status, message.decode(errors="replace"), failure=last_failure())
    window.leave()


_answered = native.refit_done(_on_answer)


class PushedTensor(NamedTuple):
    """A tensor that was pushed before: the same tensors come in every update. `torch_dtype`: None where it was no torch tensor.

    `number`: the packer's number of the tensor's name.
    """

    spec: TensorSpec
    torch_dtype: Any
    number: int


class _Slot:
    """A leased slot that is being packed; without a `handle`, memory of this process whose bytes travel inside the call."""

    def __init__(self, handle: Handle | None, data: HostBytes | DeviceBytes, window: _Window) -> None:
        self.handle = handle
        self.data = data
        self.on_host = isinstance(data, HostBytes)
        self.window = window

    def close(self) -> None:
        """Gives back a slot that was not pushed."""
        if self.handle is not None:
            self.handle.close()
        self.window.leave()


class Update:
    """An update that this rank has begun: every engine has stopped reading its weights. Made by Trainer.update().

    Leaving its `with` block commits it, or aborts it where an exception leaves the block; `result` is then set. An exception that
    aborts the update gets the attribute `dirty`, whatever its class: True where bytes had reached engines, which then serve nothing until
    the next commit; False where all hold the version before; None where that is not known. Threads may take turns; pushes of several
    threads at once are made one after the other.

    `lost`: why the update was lost, after abort() or such an exception; None before, and where the reason is not known.
    """

    def __init__(self, trainer: Trainer, handle: Handle, version: int, with_layout: bool) -> None:
        self._trainer = trainer
        self._handle = handle
        self._lock = threading.RLock()
        self._slot: _Slot | None = None
        self._inline: HostBytes | None = None  # the memory of all slots, where none can be leased
        self._packer = Packer(trainer._packer)  # knows the tensors that earlier updates pushed, and has a bucket of its own
        self._put_fast = self._packer.push
        self._with_layout = with_layout
        self._label = f"{trainer.label}, version {version}"
        self.version = version
        self.result: UpdateResult | None = None
        self.lost: Error | None = None
        # Set by Trainer.update: copies the layout's bytes that are not in place, and returns how many; names that were bound anew.
        self._fill: Callable[[], int] | None = None
        self._rebound = 0
        self._pushed: set[str] = set()  # names of what this rank pushed
        with handle as pointer:  # made by a call that is not interrupted
            self.instances = int(native.library().refit_update_instances(pointer))
            self.leasable_slots = int(native.library().refit_update_leasable_slots(pointer))
        self._window = _Window(max(1, self.leasable_slots))

    @property
    def ended(self) -> bool:
        """Whether the update was committed, aborted or closed."""
        return self.result is not None or self._handle.closed

    # ---- pushing ----

    def push(self, name: str, tensor: Any, *, shape: Sequence[int] | None = None, start: int = 0, dtype: Any = None) -> None:
        """Packs a tensor into the current slot, and hands slots over as they fill up. The tensor's bytes are copied when it returns.

        Args:
            name: The tensor's name.
            tensor: A torch tensor of any strides and device, a numpy array, or anything with DLPack or the buffer protocol.
            shape: For a part of a tensor, the whole tensor's shape, in elements.
            start: For a part of a tensor, the first element, in row-major order, that `tensor` holds.
            dtype: The dtype of the elements in raw bytes (uint8); other tensors are only compared with it.

        Raises:
            InvalidArgument: The tensor can't be pushed; the error names it. What the daemon refuses (a tensor that engines do not know, a
                wrong shape) is raised by a later push or by the commit, as this call does not wait for the daemon.
        """
        # The fast way takes most tensors of most updates: exporters yield thousands of small tensors, the same every time.
        if not (shape is None and dtype is None and start == 0 and self._put_fast(name, tensor)):
            self._push(name, tensor, shape, start, dtype)
        self._pushed.add(name)

    def _push(self, name: str, tensor: Any, shape: Sequence[int] | None, start: int, dtype: Any) -> None:
        """Does what push() does, for any tensor."""
        what = f"tensor '{name}'"
        known = self._trainer._seen.get(name) if isinstance(name, str) else None
        if shape is not None:
            try:
                shape = tuple(map(operator.index, shape))
                start = operator.index(start)
            except TypeError as error:
                raise InvalidArgument(f"{what} of {self._label}: shape {shape!r}, start {start!r}: {error}", culprit=what) from None
        source = source_of(name, tensor, dtype, shape)
        whole = source.shape
        if shape is not None:
            whole = shape
            if start < 0 or start + source.elements > math.prod(whole):
                raise InvalidArgument(
                    f"{what} of {self._label}: elements {start} to {start + source.elements} are beyond the shape {whole}", culprit=what
                )
        elif start != 0:
            raise InvalidArgument(f"{what} of {self._label}: start is {start}, without a shape", culprit=what)
        kind = tensor.dtype if is_torch(tensor) else None
        if known is None or known.torch_dtype is not kind or known.spec.shape != whole or known.spec.dtype != source.dtype.name:
            check_name(name, self._label)
            spec = TensorSpec(name, source.dtype.name, whole)
            check_tensors([spec], self._label)
            with self._lock:
                known = self._trainer._seen[name] = PushedTensor(spec, kind, self._packer.learn(spec))
        with self._lock:
            self._pack(known, start, source)

    def _pack(self, known: PushedTensor, start: int, source: Source) -> None:
        """Copies the source into slots: into one if it fits, else in parts."""
        number = known.number
        nbytes = source.elements * source.dtype.itemsize
        # A bucket has a tensor only once: a further part of the tensor goes into the next bucket.
        if self._slot is not None and nbytes > self._packer.room(number) and self._packer.count:
            self._send()
        slot = self._slot or self._lease()
        if nbytes <= self._packer.room(number):
            self._put(slot, number, start, source, 0, source.elements)
            return
        done = 0
        while done < source.elements:
            slot = self._slot or self._lease()
            count = min(source.elements - done, self._packer.room(number) // source.dtype.itemsize)
            if done + count < source.elements:
                count = to_row_end(known.spec.shape, start + done, count) or count
            self._put(slot, number, start, source, done, count)
            done += count
            if done < source.elements:
                self._send()

    def _put(self, slot: _Slot, number: int, start: int, source: Source, done: int, count: int) -> None:
        """Copies elements [done, done + count) of the source into the slot. A signal handler that raises leaves at most a gap."""
        itemsize = source.dtype.itemsize
        nbytes = count * itemsize
        offset = self._packer.reserve(number, nbytes)
        if nbytes and source.copy is None and slot.on_host:
            ctypes.memmove(slot.data.pointer + offset, source.pointer + done * itemsize, nbytes)
        elif nbytes:
            target = slot.data.part(offset, nbytes)
            if source.copy is None:
                copy_host(target, source.pointer + done * itemsize, nbytes)
            else:
                source.copy(target, done, count)
        self._packer.add(number, start + done, count, offset)

    def _lease(self) -> _Slot:
        """Leases a slot and begins a bucket in it, which is then the current slot."""
        def lease() -> _Slot:
            self._handle.check_open()
            self._window.enter()
            try:
                if self._window.error is not None:
                    raise self._window.error
                slot = self._new_slot()
                self._packer.begin(slot.data.pointer if slot.on_host else None, slot.data.nbytes, slot)
                return slot
            except BaseException:
                self._window.leave()
                raise

        def disown(slot: _Slot) -> None:
            self._packer.end()
            slot.close()

        self._slot = interruptible(lease, cancel=self._cancel, disown=disown)
        return self._slot

    def _new_slot(self) -> _Slot:
        """Leases a slot of the daemon; over TCP, memory of this process takes its place."""
        if not self._trainer.shares_memory:
            if self._inline is None:
                room = bytearray(INLINE_BYTES)
                self._inline = HostBytes(ctypes.addressof(ctypes.c_char.from_buffer(room)), INLINE_BYTES, room)
            return _Slot(None, self._inline, self._window)
        with self._handle as update:
            handle = made_by("refit_update_lease_slot", update, 0, free="refit_slot_free", what="a slot", context=self._label)
        library, slot = native.library(), handle.pointer
        data = devices.bytes_at(self._trainer.device, library.refit_slot_data(slot), library.refit_slot_bytes(slot), handle)
        return _Slot(handle, data, self._window)

    def _send(self, then: Callable[[], None] | None = None) -> None:
        """Hands the current slot over without waiting for an answer, and calls `then` in the same uninterrupted call."""
        slot = self._slot
        if slot is None and then is None:
            return
        if slot is not None and isinstance(slot.data, DeviceBytes):
            slot.data.synchronize()  # the stream of this thread

        def send() -> None:
            self._slot = None
            if slot is not None:
                self._hand_over(slot)
            if then is not None:
                then()

        interruptible(send, cancel=self._cancel)

    def _hand_over(self, slot: _Slot) -> None:
        """Pushes the slot's bucket; gives an empty slot back."""
        self._packer.end()
        if not self._packer.count:
            slot.close()
            return
        try:
            if slot.handle is None:
                self._push_bucket(None)
            else:
                with slot.handle as leased:
                    self._push_bucket(leased)
        except BaseException:
            self._window.leave()  # the arguments were refused, and nothing was pushed
            raise
        finally:
            if slot.handle is not None:
                slot.handle.close()

    def _push_bucket(self, slot: int | None) -> None:
        push = native.library().refit_packer_push
        done = ctypes.cast(_answered, ctypes.c_void_p)
        with self._handle as update:
            check(push(self._packer.pointer, update, slot, done, self._window.key), self._label)

    def flush(self) -> None:
        """Hands over what was packed, and waits until the daemon has taken in all pushes. Raises the first error of any push."""

        def flush() -> None:
            with self._handle as update:
                check(native.library().refit_update_flush(update), self._label)

        with self._lock:
            self._send(flush)

    # ---- ending ----

    def commit(self, tensor_count: int | None = None) -> UpdateResult:
        """Pushes the rest and commits: all instances listed as committed hold the version when it returns.

        `tensor_count`: as in Trainer.update, for a caller that knows the count only after pushing.

        Raises UpdateAborted (see its `dirty`), DeadlineExceeded, FailedPrecondition where an engine's tensor was never pushed (named;
        push it and commit again) or other than `tensor_count` tensors came, and errors of earlier pushes.
        """
        return self._end(native.library().refit_update_commit, tensor_count or 0)

    def refit(self) -> UpdateResult:
        """Ends the update in place of commit() where the registered layout takes part: moves all tensors that the layout does not push.

        Their bytes are read now. Raises FailedPrecondition, naming the tensor, where a name was bound to other memory since the update began.
        """
        with self._lock:
            staged = self._fill() if self._fill is not None and not self.ended else 0
            result = self._end(native.library().refit_update_refit)
            registration = self._trainer._registration
            sent = self._pushed.union(() if registration is None else (spec.name for spec in registration.tensors))
            self.result = replace(result, staged_bytes=staged, rebound=self._rebound, tensors=len(sent))
            return self.result

    def _end(self, function: Callable[..., int], *arguments: int) -> UpdateResult:
        def end() -> None:
            raw = native.sized(native.refit_commit_result)
            with self._handle as update:
                check(function(update, *arguments, byref(raw)), self._label)
                self.result = replace(result_of(raw, "update", update), tensors=len(self._pushed))
            self._handle.close()

        with self._lock:
            if self.result is not None:
                raise FailedPrecondition(f"{self._label} is committed already")
            self._send(end)
            assert self.result is not None
            return self.result

    def abort(self, reason: str = "the trainer gave the update up") -> None:
        """Gives the update up. Engines whose weights were written meanwhile are dirty until the next commit, and `lost.dirty` is True."""

        def abort() -> None:
            self._drop_slot()
            try:
                with self._handle as update:
                    try:
                        check(native.library().refit_update_abort(update, text(reason)), self._label)
                    finally:
                        self._ask_why_lost(update)
            finally:
                self._handle.close()

        with self._lock:
            interruptible(abort, cancel=ends_soon)

    def _ask_why_lost(self, update: int) -> None:
        """Sets `lost`, if the daemon still answers."""
        try:
            check(native.library().refit_update_lost(update), self._label)
        except UpdateAborted as error:
            self.lost = error
        except Error:
            pass  # the daemon was lost meanwhile

    def _cancel(self) -> None:
        """Gives the update up, which ends the call that another thread has under way in it."""
        if self._window.error is None:
            self._window.error = UpdateAborted(f"{self._label}: a call was interrupted, which gave the update up")
        self._trainer._cancel(self.version)

    def _drop_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._packer.end()
            slot.close()

    def close(self) -> None:
        """Aborts the update unless it has ended, and frees its memory."""
        if self._slot is None and self._handle.closed:
            return

        def close() -> None:
            self._drop_slot()
            self._handle.close()

        with self._lock:
            interruptible(close, cancel=ends_soon)

    def __enter__(self) -> Update:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.ended:
            return
        try:
            if error is None:
                self._end_well()
            else:
                self._give_up(error)
        finally:
            self.close()

    def _end_well(self) -> None:
        """Commits, or refits with a layout; gives up an update whose end is not known then."""
        try:
            self.refit() if self._with_layout else self.commit()
        except Error as error:
            if error.dirty is None and not self.ended:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Aborts because of an exception, whose `dirty` it sets. Errors of the abort itself matter less, and are dropped."""
        with suppress(Error):  # the update may be over by now
            self.abort(f"{type(error).__name__}: {error}"[:400])
        dirty = None if self.lost is None else self.lost.dirty
        if getattr(error, "dirty", None) is not None:
            return
        with suppress(AttributeError):  # some exceptions take no attributes
            error.dirty = dirty  # type: ignore[attr-defined]
        if self.lost is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(str(self.lost))


class Packer:
    """Packs tensors into buckets, which are slots that were leased; see client/refit_python.h. Guarded by the interpreter lock.

    `push(name, tensor)` is the fast way: it puts a learned torch tensor, whole, contiguous and on the host, into the bucket; for any
    other tensor it does nothing and returns False.
    """

    __slots__ = ("pointer", "push", "_free", "_memory", "__weakref__")

    def __init__(self, like: Packer | None = None) -> None:
        library = native.locked_library()
        out = ctypes.c_void_p()
        check(library.refit_packer_new(None if like is None else like.pointer, ctypes.byref(out)))
        self.pointer: int | None = out.value
        self._memory: Any = None  # the bucket's memory, kept while librefit may write to it
        self._free = weakref.finalize(self, library.refit_packer_free, self.pointer)
        self._free.atexit = False
        self.push: Callable[[str, Any], bool] = self._never
        if reads_tensors():
            self.push = library.refit_python_pusher(self.pointer)

    @staticmethod
    def _never(name: str, tensor: Any) -> bool:
        return False

    def learn(self, spec: TensorSpec) -> int:
        """Makes a tensor known to the packer, in place of the tensor that had its name. Returns the number of the name, which stays the same."""
        tensors, out = TensorList([spec]), ctypes.c_int64()
        check(native.locked_library().refit_packer_learn(self.pointer, tensors.pointer, ctypes.byref(out)))
        return out.value

    def begin(self, pointer: int | None, nbytes: int, owner: Any) -> None:
        """Begins an empty bucket in memory that `owner` keeps. `pointer`: None where librefit can't copy to it."""
        check(native.locked_library().refit_packer_begin(self.pointer, pointer, nbytes))
        self._memory = owner

    @property
    def count(self) -> int:
        """The number of tensors, or parts of tensors, in the bucket."""
        return int(native.locked_library().refit_packer_count(self.pointer))

    def room(self, number: int) -> int:
        """Bytes that are left for the tensor in the bucket; -1: the bucket has the tensor, or there is no bucket."""
        return int(native.locked_library().refit_packer_room(self.pointer, number))

    def reserve(self, number: int, nbytes: int) -> int:
        """Reserves `nbytes` bytes and returns their offset. The caller copies to them, and then calls add()."""
        out = ctypes.c_int64()
        check(native.locked_library().refit_packer_reserve(self.pointer, number, nbytes, ctypes.byref(out)))
        return out.value

    def add(self, number: int, start: int, count: int, offset: int) -> None:
        """Lists elements [start, start + count) of the tensor, which are at `offset`."""
        check(native.locked_library().refit_packer_add(self.pointer, number, start, count, offset))

    def end(self) -> None:
        """Ends the bucket: nothing is put into it any more."""
        native.locked_library().refit_packer_end(self.pointer)
        self._memory = None


# The ways in which a trainer can treat a version that is not greater than its group's.
ON_OLDER = ("refuse", "next", "replace")
WAIT_SECONDS = 10.0  # the library's default of wait_seconds
POLL_SECONDS = 0.02  # how often a wait looks whether a lease has ended


class Trainer(Member):
    """One trainer rank, attached to the daemon of its node.

        trainer = refitd.Trainer("policy", rank=r, world_size=n)
        trainer.register(model.state_dict(), dtype=torch.bfloat16)
        result = trainer.refit(version=8)                        # every rank calls it

    or, where a framework yields full tensors:

        with trainer.update(9) as update:
            for name, tensor in export():
                update.push(name, tensor)

    Any thread may call any method. Blocking calls release the interpreter lock, and on the main thread signal handlers run
    meanwhile: Ctrl-C gives the update up.
    """

    _kind = "trainer"

    def __init__(
        self,
        group: str,
        *,
        rank: int = 0,
        world_size: int = 1,
        spec: GroupSpec | None = GroupSpec(),
        on_older: str = "refuse",
        device: str | None = None,
        socket: str | None = None,
        connect: Connect = Connect(),
    ) -> None:
        """Attaches, and waits for daemon and group for `connect.wait_seconds` (10 s).

        Args:
            group: The group's name.
            rank: This rank's number, from 0.
            world_size: How many trainer ranks the group has.
            spec: What the group is; the first rank makes it, the others must bring an equal one. None: the group must be made by
                someone else.
            on_older: What refit() and update() do with a version that is not greater than the group's, as that of a trainer that goes
                on from an older checkpoint; equal on all ranks. "refuse": raise FailedPrecondition. "next": take `next_version` in its
                place, which the result names. "replace": begin the group anew, which then takes any version: rank 0 replaces it (it
                needs the role OPERATOR_WRITE at the daemon that has the group), every rank attaches again, and every engine is dirty
                until the commit.
            device: Where the weights are, a GPU's UUID ("GPU-...") or "host"; None: the current GPU where torch has used CUDA in this
                process, else host memory.
            socket: The path of the daemon's socket, in short for `connect.socket`.
            connect: How the daemon is reached.

        Raises:
            Unavailable: No daemon answers.
            Unauthenticated: A certificate is refused.
            DeadlineExceeded, NotFound: The group does not appear.
            AlreadyExists: This rank is attached, or the group has another spec.
            InvalidArgument, FailedPrecondition: An argument is wrong, and the error names it.
        """
        super().__init__(f"group {group}", group, rank, world_size)
        if on_older not in ON_OLDER or (on_older == "replace" and spec is None):
            possible = " or ".join(map(repr, ON_OLDER))
            raise InvalidArgument(f"on_older: {on_older!r} is not {possible}; 'replace' needs a spec", culprit="on_older")
        connect = connect.to(socket)
        self._on_older, self._wait_seconds = on_older, WAIT_SECONDS if connect.wait_seconds is None else connect.wait_seconds
        self.shares_memory = connect.address is None  # with the daemon
        self.device = devices.current() if device is None and self.shares_memory else device
        made = connect._structure(group, self.device, None if spec is None else spec._structure(world_size))
        options = native.sized(native.refit_trainer_options, connect=ctypes.pointer(made), rank=rank, world_size=world_size)

        self._refitting: int | None = None  # the version of the refit that runs, if any
        self._seen: dict[str, PushedTensor] = {}  # tensors that were pushed, by name
        self._packer = Packer()  # knows the same tensors
        self._connect, self._attach_options = made, options
        self._attach(options)

    # ---- shards that stay where they are ----

    def register(
        self,
        shards: Any,
        *,
        dtype: Any = None,
        exceptions: Mapping[str, Any] | None = None,
        buffers: bool | Sequence[str] = True,
        leave_out: Sequence[str] = (),
        any_cast: Sequence[str] = (),
        tied: bool | Mapping[str, str] = True,
        staging: str = "auto",
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> None:
        """Registers this rank's shards for refit, in place of those registered before; not during an update of this rank.

        Host tensors in regions (`empty`, `adopt`) are moved from where they are; others are copied first at each refit, with a
        StagingWarning. Names are bound to the module or dict, not to the tensors that are there now: each refit looks every name up
        again, and follows tensors and memory that took another's place. A list of Shard is bound to its tensors, whose memory is followed.
        refitd keeps what was registered alive.

        Args:
            shards: A dict of names to tensors (a state dict, with DTensors), a torch module, or a list of refitd.Shard.
            dtype: What floating-point tensors (float64, float32, float16, bfloat16) are cast to on the way; None: as they are.
            exceptions: Other dtypes, by pattern of names; None as a dtype: as they are. The first pattern that matches counts:
                {"*.e_score_correction_bias": torch.float32} keeps router biases.
            buffers: Of a module: whether persistent buffers are taken, or patterns of those that are.
            leave_out: Patterns of names that are not taken.
            any_cast: Patterns of names that may be cast also where values are lost: between floating-point, integer, bool and float8, and to
                smaller integers. Others are refused.
            tied: True: where two names have the same memory, shape and strides, the first is sent, and engines need not get the other.
                {"lm_head.weight": "model.embed_tokens.weight"}: these names are not sent, wherever their memory is. False: all are sent.
            staging: "whole" keeps casts of all shards, "push" pushes casts, "auto" keeps at most `staging_bytes`. Equal on all ranks.
            staging_bytes: Bytes; equal on all ranks.

        Raises:
            InvalidArgument: A tensor is wrong; the error names tensor and rank. Nothing has changed then.
            FailedPrecondition: Another rank's layout disagrees, or an update runs. Nothing has changed then.
        """
        from .layout.shards import collect

        with paused():
            self._register_collected(
                collect(
                    shards, dtype, exceptions, buffers=buffers, leave_out=leave_out, any_cast=any_cast, tied=tied, rank=self.rank,
                    world_size=self.world_size, staging=staging, staging_bytes=staging_bytes,
                )  # fmt: skip
            )

    def register_layout(
        self, tensors: Sequence[TensorSpec], boxes: Sequence[Box], pushed: PushedTensors | None = None, before_refit: Callable[[], None] | None = None
    ) -> None:
        """Does what register() does, for plain records.

        Tensors of which this rank has no box and pushes nothing are left out, so that engines need not know them (tied weights). A layout
        without any box takes back the registered one.

        Args:
            tensors: The tensors that this rank knows.
            boxes: The boxes of them that it holds, by `tensor_index`.
            pushed: Tensors that every refit pushes instead.
            before_refit: The function that each refit() calls first.
        """
        with paused():
            self._register_collected(Layout(list(tensors), list(boxes), pushed, before_refit))

    def _register_collected(self, layout: Layout) -> None:
        check_tensors(layout.tensors, self.label)
        pushed = layout.pushed
        registration = _supplied(layout.tensors, layout.boxes, list(pushed.indices) if pushed is not None else [])
        registration.pushed_tensors, registration.before_refit, registration.source = pushed, layout.before_refit, layout.source
        self._register(registration, stage=True)

    def refit(
        self,
        version: int,
        *,
        duration_seconds: float | None = None,
        verification: str | None = None,
        evict_late: bool = False,
        streams: Sequence[Stream] | None = None,
        note: str = "",
        hold: bool = False,
    ) -> UpdateResult:
        """Installs the registered shards as `version` in every instance; every trainer rank calls it.

        The caller has written the version into the shards before the call, or queued the work that writes it on the GPU, and may
        write the shards again once refit() has returned. refit() waits for all work of the device that was queued before the call,
        on whatever stream; with `streams`, only for those and for the current stream.

        Args:
            version: The new version, an integer from 0 to 2^63 - 1.
            duration_seconds: Of the whole update; None: the daemon's default.
            verification: "off", "transfer", "readback"; None: the daemon's default.
            evict_late: Whether instances that are late are evicted; else the update aborts.
            streams: The streams (torch.cuda.Stream) with the work that writes the shards, so that other streams go on; None: all streams
                of the device. Ignored on the host.
            note: As in update. One rank's is enough; that rank makes one call more to the daemon.
            hold: Whether engines with arenas keep the version before this one: the next update is not staged before `release` or
                `rollback`. One rank's is enough.

        Returns:
            What was moved, in how many seconds, and which instances committed.

        Raises:
            UpdateAborted: Its `dirty` says whether engines' weights may be torn.
            DeadlineExceeded: The update was not done in its time.
            FailedPrecondition: Layouts disagree; the error names tensor and rank, and nothing was written.
            Unavailable: The daemon was lost.
        """
        noted = _note(note)
        version = self._version_for(version)
        rebound = self._renew()
        staged = self._fill(streams)
        with self._lock:
            registration = self._registration
        common = _common(version, duration_seconds, verification, evict_late, hold)
        pushed = registration.pushed_tensors if registration is not None else None
        tensors = len(registration.tensors) if registration is not None else 0
        if pushed is not None or noted:
            with self._begin(version, native.sized(native.refit_begin_options, note=noted, **common), with_layout=True) as update:
                if pushed is not None:
                    pushed.push(update)
            assert update.result is not None
            return replace(update.result, staged_bytes=staged, rebound=rebound, tensors=tensors)
        options, raw = native.sized(native.refit_refit_options, **common), native.sized(native.refit_commit_result)

        def refit(handle: int) -> UpdateResult:
            if threading.current_thread() is threading.main_thread():
                call = native.watched("refit_trainer_refit")
                status = call(lambda: self._cancel(version), handle, ctypes.addressof(options), ctypes.addressof(raw))
            else:
                status = native.library().refit_trainer_refit(handle, byref(options), byref(raw))
            check(status, f"{self.label}, version {version}")
            return replace(result_of(raw, "trainer", handle, staged, rebound), tensors=tensors)

        self._refitting = version
        try:
            return self._handle.use(refit)
        finally:
            self._refitting = None

    def _close(self, wait_seconds: float) -> None:
        version = self._refitting
        if version is not None and not self.closed:
            self._cancel(version)
        super()._close(wait_seconds)

    def _renew(self) -> int:
        """Brings the registered layout up to date, before an update begins. Returns how many tensors were bound anew."""
        with self._lock:
            registration = self._registration
        if registration is None:
            return 0
        rebound = 0
        if registration.source is not None:
            with paused():
                try:
                    layout = registration.source.renewed()
                except BaseException:
                    registration.begin_refit()  # it may communicate, and other ranks would wait for this one
                    raise
                if layout is not None:
                    self._register_collected(layout)
                    assert layout.source is not None
                    rebound = layout.source.rebound
        with self._lock:
            registration = self._registration or registration
        registration.begin_refit()
        if registration.source is not None and registration.before_refit is None:
            return rebound  # the source compared the addresses of all memory just now
        return rebound + self._rebind(registration)

    def _fill(self, streams: Sequence[Stream] | None = None) -> int:
        """Waits for the work that writes the shards, and copies what is not in place. Returns how many bytes were copied."""
        kind = devices.kind_of(self.device)
        if kind is not None:
            if streams is None:
                kind.synchronize_all(self.device)
            for stream in streams or ():
                stream.synchronize()
        with self._lock:
            registration = self._registration
        if registration is not None:
            registration.fill()
        if kind is not None and (streams is not None or (registration is not None and registration.filled)):
            kind.synchronize(self.device)  # the current stream, and what filling has queued
        return 0 if registration is None else registration.staged_bytes

    def _fill_unmoved(self) -> int:
        """_fill() within an update, where tensors that moved can't be registered anew: raises FailedPrecondition for them."""
        with self._lock:
            registration = self._registration
        source = None if registration is None else registration.source
        if registration is not None and (registration.moved() or (source is not None and source.renewed() is not None)):
            first = registration.first_moved()
            why = f"{self.label}: {first} was bound to other memory after the update had begun: change shards before it"
            raise FailedPrecondition(why, culprit=first)
        return self._fill()

    # ---- pushed tensors ----

    def update(
        self,
        version: int,
        *,
        duration_seconds: float | None = None,
        verification: str | None = None,
        evict_late: bool = False,
        tensor_count: int | None = None,
        total_bytes: int | None = None,
        broadcast: str = "auto",
        with_layout: bool = False,
        note: str = "",
        hold: bool = False,
    ) -> Update:
        """Begins an update to `version`, or joins it; returns when every engine has stopped reading its weights. Every rank calls it.

        Args:
            version: As in refit, with `verification`, `evict_late` and `hold`.
            duration_seconds: Of the whole update, waiting for engines included; None: the daemon's default.
            tensor_count: Tensors of all ranks together; engines with loader delivery and no manifest need the count, here or from
                Update.commit.
            total_bytes: Bytes of all ranks together.
            broadcast: "auto", "direct", "chain", "symmetric" or "nccl".
            with_layout: Whether the registered layout takes part, and the update ends by refit() instead of commit(); its names are looked up
                as refit() looks them up, at the begin, and its bytes are read in the update's refit().
            note: Text for people, such as "step 1200", shown in the update's status and in the daemon's log; at most 256 bytes of UTF-8
                without control characters.

        Returns:
            The open update, which ends with a `with` block.

        Raises:
            DeadlineExceeded: Somebody was waited for; the error names who.
            AlreadyExists: This rank has an update open.
            FailedPrecondition, UpdateAborted: The update can't begin.
        """
        noted = _note(note)
        version = self._version_for(version)
        rebound = self._renew() if with_layout else 0
        options = native.sized(
            native.refit_begin_options,
            tensor_count=tensor_count or 0,
            total_bytes=total_bytes or 0,
            broadcast=_number(native.BROADCASTS, broadcast, "broadcast"),
            without_layout=int(not with_layout),
            note=noted,
            **_common(version, duration_seconds, verification, evict_late, hold),
        )
        update = self._begin(version, options, with_layout)
        update._rebound = rebound
        update._fill = self._fill_unmoved if with_layout else None
        return update

    def _begin(self, version: int, options: native.refit_begin_options, with_layout: bool) -> Update:
        def begin() -> Update:
            what, label = f"the update to version {version}", f"{self.label}, version {version}"
            with self._handle as handle:
                owned = made_by("refit_trainer_begin", handle, byref(options), free="refit_update_free", what=what, context=label)
            return Update(self, owned, version, with_layout)

        return interruptible(begin, cancel=lambda: self._cancel(version), disown=Update.close)

    # ---- the version before ----

    def rollback(self, version: int | None = None) -> int:
        """Puts the content of the version before the group's into place again, and returns its new number: the group's plus one.

        Engines with arenas that still hold it flip to it; the others then catch up from them. One rank calls it; all go on with
        `next_version`. An update that has asked no engine for anything yet ends with UpdateAborted.

        Args:
            version: The version to roll back. If the group has another, the call is refused; if it is rolled back already, that rollback's
                number is returned. None: the group's.

        Raises:
            FailedPrecondition: No engine holds the version before any more, or an engine could not follow; the error names it, and
                nothing has changed.
            UpdateAborted: An engine could not flip: all serve what they served.
        """
        out = ctypes.c_int64()
        self._ask("rollback", -1 if version is None else checked_version(version), byref(out))
        return out.value

    def release(self) -> None:
        """Lets the next update be staged, though the version before is held (`hold`, `GroupSpec.hold_previous_seconds`)."""
        self._ask("release_previous")

    # ---- state ----

    def abort(self, version: int, reason: str = "the trainer gave the update up") -> None:
        """Gives up the update to `version` in which another thread waits: the call of that thread then raises UpdateAborted.

        Raises FailedPrecondition where this rank has no such update open.
        """
        self._ask("abort", checked_version(version), text(reason))

    def get_update(self, version: int) -> str:
        """The state of an update, for a caller that missed the answer: "unknown", "running", "committed" or "aborted".

        For a restarted daemon, all earlier updates are unknown.
        """
        out = ctypes.c_int32()
        self._ask("get_update", checked_version(version), byref(out))
        return OUTCOMES[out.value]

    @property
    def group_version(self) -> int | None:
        """The last committed version that the daemon reported; None: none."""
        return self._ask_version("group_version")

    @property
    def next_version(self) -> int:
        """The version after `group_version`; 1 where there is none. Ranks that took part in the same updates agree about it."""
        known = self.group_version
        return 1 if known is None else known + 1

    def check_health(self) -> None:
        """Raises what ended the lease, and why no other lease follows; returns while attached."""
        self._check("health")

    # ---- inside ----

    def _version_for(self, version: int) -> int:
        """The version to install for `version`, after `on_older` was obeyed."""
        checked_version(version)
        if self._on_older == "refuse" or self.group_version is None or version >= (least := self.next_version):
            return version
        if self._on_older == "next":
            return least
        self._begin_group_anew()
        return version

    def _begin_group_anew(self) -> None:
        """Rank 0 replaces the group; every rank waits until its lease has ended, and attaches again."""
        before = self.reattachments
        if self.rank == 0:
            _replace_group(self._connect, self.label)
        deadline = time.monotonic() + self._wait_seconds
        while self._attached_as(before):
            if time.monotonic() > deadline:
                why = f"{self.label}: trainer rank 0 did not replace the group within {self._wait_seconds} s"
                raise DeadlineExceeded(why, culprit="trainer rank 0")
            time.sleep(POLL_SECONDS)
        self._attach_anew()

    def _attached_as(self, reattachments: int) -> bool:
        """Whether this rank is attached by the same lease as when it had `reattachments`. A replaced group ends its trainers' leases."""
        try:
            self.check_health()
        except Error:
            return False
        return self.reattachments == reattachments

    def _attach_anew(self) -> None:
        """Attaches by another handle, which has no version from before, and registers again what was registered."""
        with self._lock:
            registration, self._registration = self._registration, None
            self._known.clear()
        interruptible(lambda: self._handle.close(wait_seconds=CLOSE_SECONDS), cancel=ends_soon)
        self._attach(self._attach_options)
        if registration is not None:
            self._register(registration.unresolved(), stage=True)

    def _cancel(self, version: int) -> None:
        try:
            self.abort(version, "the trainer was interrupted")
        except Error:
            pass  # the update had not begun, or has ended: then the call ends by itself


def replace_group(group: str, *, world_size: int = 1, spec: GroupSpec = GroupSpec(), socket: str | None = None, connect: Connect = Connect()) -> None:
    """Begins a group anew, so that its next version may be any number; makes it where there is none.

    Every instance is dirty until its next commit, and trainers' leases end: they attach again.

    Args:
        group: The group's name.
        world_size: How many trainer ranks it has.
        spec: What the group is, and stays.
        socket: The path of the daemon's socket, in short for `connect.socket`.
        connect: How the daemon is reached.

    Raises:
        PermissionDenied: The caller has not the role OPERATOR_WRITE.
        AlreadyExists: The group has another spec.
        FailedPrecondition: An update runs, or another daemon has the group (named).
        Unavailable: No daemon answers.
    """
    _replace_group(connect.to(socket)._structure(group, None, spec._structure(world_size)), f"group {group}")


def _replace_group(connect: native.refit_connect_options, label: str) -> None:
    interruptible(lambda: check(native.library().refit_replace_group(byref(connect)), label), cancel=ends_soon)


def _supplied(tensors: Sequence[TensorSpec], boxes: Sequence[Box], pushed: Sequence[int]) -> Registration:
    """A registration of the tensors that this rank supplies, with indices for them alone."""
    used = {box.tensor_index for box in boxes} | set(pushed)
    if len(used) == len(tensors) or not used <= set(range(len(tensors))):  # the latter is refused later, by name
        return Registration(list(tensors), list(boxes), list(pushed))
    index = {old: new for new, old in enumerate(sorted(used))}
    return Registration(
        [tensors[old] for old in index], [replace(box, tensor_index=index[box.tensor_index]) for box in boxes], [index[old] for old in pushed]
    )


def _common(version: int, duration_seconds: float | None, verification: str | None, evict_late: bool, hold: bool) -> dict[str, int]:
    """The fields that refit_begin_options and refit_refit_options share."""
    return {
        "version": version,
        "duration_ms": milliseconds(duration_seconds, "duration_seconds"),
        "verification": _number(VERIFICATIONS, verification, "verification"),
        "evict_late": int(evict_late),
        "hold": int(hold),
    }


def _note(note: str) -> bytes | None:
    """A note as C takes it. Raises InvalidArgument for a text that C would take to end earlier."""
    if "\0" in note:
        raise InvalidArgument(f"note {note!r} has a NUL character", culprit="note")
    return note.encode() or None


def _number(names: dict[Any, int], given: Any, what: str) -> int:
    if given not in names:
        raise InvalidArgument(f"{what}: {given!r} is none of {', '.join(repr(name) for name in names)}", culprit=what)
    return names[given]
