"""An open update: what is pushed into it, and how it ended."""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from ctypes import byref
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import Error, FailedPrecondition, Failure, InvalidArgument, UpdateAborted
from ..layout.boxes import TensorSpec
from ..layout.memory import BY_CODE, DeviceBytes, HostBytes
from . import native
from .native import Handle, check, error_of, last_failure, shown, text
from .tensors import Packer, Source, check_name, check_tensors, copy_host, is_torch, source_of
from .waiting import SLICE_SECONDS, ends_soon, interruptible

if TYPE_CHECKING:
    from ..trainer import Trainer

VERIFICATIONS = {None: 0, "off": 1, "transfer": 2, "readback": 3}
# A bucket over TCP has at most this: a quarter of what a daemon takes in a call by default (limits.inline_bytes).
INLINE_BYTES = 1 << 20
OUTCOMES = ("unknown", "running", "committed", "aborted")


@dataclass(frozen=True)
class InstanceOutcome:
    """How an instance came out of an update; `reason` says to people why one that did not commit was evicted, `failure` as data."""

    instance: str
    committed: bool
    reason: str
    failure: Failure = field(default=Failure(), compare=False)


@dataclass(frozen=True)
class UpdateResult:
    """A committed update.

    `bytes`: of tensor data that all trainer ranks moved. `seconds`: from the first rank's begin to the decision, by the daemon's
    clock. `instances`: those that took part; empty where the commit's answer was lost with the daemon. `pushed_bytes`: by method of
    broadcast, what of `bytes` was pushed. `left_out_tensors`, `left_out_bytes`: tensors that came and were written nowhere, because no
    engine wants them (`unwanted_tensors`) or their memory is another tensor's (tied weights); `left_out`: the names of the first 64,
    sorted. `staged_bytes`: of this rank, copied first since they lie outside of regions. `rebound`: names of this rank
    that were bound to other tensors or other memory than before.
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

    @property
    def committed(self) -> int:
        """How many instances hold the version."""
        return sum(outcome.committed for outcome in self.instances)


# The most names that the library tells of tensors that were left out.
MAX_NAMED = 64


def result_of(raw: native.refit_commit_result, of: str, handle: int, staged_bytes: int = 0, rebound: int = 0) -> UpdateResult:
    """The result of a commit or refit, on the thread that made it; `of`: whose `handle` it is, "update" or "trainer"."""
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
    return UpdateResult(
        raw.version,
        raw.bytes,
        raw.seconds,
        tuple(instances),
        pushed,
        raw.left_out_tensors,
        raw.left_out_bytes,
        staged_bytes,
        rebound,
        tuple(names),
    )


class _Window:
    """The slots that this rank holds: leased, or pushed and not answered yet. The daemon refuses to lease more than `slots`."""

    def __init__(self, slots: int) -> None:
        self._free: queue.SimpleQueue[None] = queue.SimpleQueue()  # an entry for each slot that may be leased
        for _ in range(slots):
            self._free.put(None)
        self.error: Error | None = None  # the error of the first push that failed
        self.key = next(_keys)
        _windows[self.key] = self

    def enter(self) -> None:
        """Counts one more slot as held; waits while this rank holds as many as it may. A push is answered at the latest when the update's time has passed.

        Raises the first error of any push: then slots may never come back, as those of an interrupted call.
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
    """Notes that a push was answered; runs on a thread of the library. This function stays for good, so that it outlives its callers."""
    window = _windows.get(key)
    if window is None:
        return
    if status != 0 and window.error is None:
        window.error = error_of(status, message.decode(errors="replace"), failure=last_failure())
    window.leave()


_answered = native.refit_done(_on_answer)


class PushedTensor(NamedTuple):
    """A tensor that was pushed before: the same tensors come in every update. `torch_dtype`: None where it was no torch tensor.

    `number`: the packer's, of the tensor's name.
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
        """Gives the slot back, which was not pushed."""
        if self.handle is not None:
            self.handle.close()
        self.window.leave()


class Update:
    """An update that this rank has begun: every engine has stopped reading its weights. Made by Trainer.update().

    Leaving its `with` block commits it, or aborts it where an exception leaves the block; `result` then tells of it. An exception that
    aborts it, whatever its class, leaves with the attribute `dirty`: True where bytes had reached engines, which then serve nothing until
    the next commit; False where all hold the version before; None where the daemon did not tell. Threads may take turns; pushes of
    several threads at once are made one after the other.

    `lost`: why it was lost, after abort() or such an exception; None before, and where the daemon did not tell.
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
        with handle as pointer:  # made by a call that is not interrupted
            self.instances = int(native.library().refit_update_instances(pointer))
            self.leasable_slots = int(native.library().refit_update_leasable_slots(pointer))
        self._window = _Window(max(1, self.leasable_slots))

    @property
    def ended(self) -> bool:
        """Whether it was committed, aborted or closed."""
        return self.result is not None or self._handle.closed

    # ---- pushing ----

    def push(self, name: str, tensor: Any, *, shape: Sequence[int] | None = None, start: int = 0, dtype: Any = None) -> None:
        """Packs a tensor into the current slot, and hands slots over as they fill up. The tensor's bytes are copied when it returns.

        Args:
            name: The tensor's name.
            tensor: A torch tensor of any strides and device, a numpy array, or anything with DLPack or the buffer protocol.
            shape: For a part of a tensor, the whole tensor's shape, in elements.
            start: For a part of a tensor, the first element, in row-major order, that `tensor` holds.
            dtype: Of raw bytes (uint8), what they hold; for all others only checked.

        Raises:
            InvalidArgument: The tensor can't be pushed; the error names it. What the daemon refuses (a tensor that engines do not know, a
                wrong shape) is raised by a later push or by the commit, as the push is not waited for.
        """
        # Most tensors of most updates take this way alone: exporters yield thousands of small tensors, the same every time.
        if shape is None and dtype is None and start == 0 and self._put_fast(name, tensor):
            return
        self._push(name, tensor, shape, start, dtype)

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
            self._pack(known.number, start, source)

    def _pack(self, number: int, start: int, source: Source) -> None:
        nbytes = source.elements * source.dtype.itemsize
        # A bucket has a tensor once: another part of it goes into the next.
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
            self._put(slot, number, start, source, done, count)
            done += count
            if done < source.elements:
                self._send()

    def _put(self, slot: _Slot, number: int, start: int, source: Source, done: int, count: int) -> None:
        """Copies elements [done, done + count) of the source into the slot. A signal handler that raises leaves at most a gap."""
        itemsize = source.dtype.itemsize
        nbytes = count * itemsize
        at = self._packer.reserve(number, nbytes)
        if nbytes and source.copy is None and slot.on_host:
            ctypes.memmove(slot.data.pointer + at, source.pointer + done * itemsize, nbytes)
        elif nbytes:
            target = slot.data.part(at, nbytes)
            if source.copy is None:
                copy_host(target, source.pointer + done * itemsize, nbytes)
            else:
                source.copy(target, done, count)
        self._packer.add(number, start + done, count, at)

    def _lease(self) -> _Slot:
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
        if not self._trainer.shares_memory:
            if self._inline is None:
                room = bytearray(INLINE_BYTES)
                self._inline = HostBytes(ctypes.addressof(ctypes.c_char.from_buffer(room)), INLINE_BYTES, room)
            return _Slot(None, self._inline, self._window)
        out = ctypes.c_void_p()
        library = native.library()
        with self._handle as update:
            check(library.refit_update_lease_slot(update, 0, byref(out)), self._label)
        assert out.value is not None
        handle = Handle(out.value, library.refit_slot_free, "a slot")
        pointer, nbytes = library.refit_slot_data(out), library.refit_slot_bytes(out)
        return _Slot(handle, self._trainer._slot_bytes(pointer, nbytes, handle), self._window)

    def _send(self, then: Callable[[], None] | None = None) -> None:
        """Hands the current slot over, without waiting until it was taken in, and calls `then` in the same uninterrupted call."""
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
        self._packer.end()
        if not self._packer.count:
            slot.close()
            return
        bucket = native.sized(native.refit_bucket, packed=1)
        try:
            if slot.handle is None:
                self._push_bucket(bucket)
            else:
                with slot.handle as held:
                    bucket.slot = held
                    self._push_bucket(bucket)
        except BaseException:
            self._window.leave()  # the arguments were refused, and nothing was pushed
            raise
        finally:
            if slot.handle is not None:
                slot.handle.close()

    def _push_bucket(self, bucket: native.refit_bucket) -> None:
        push = native.library().refit_packer_push
        done = ctypes.cast(_answered, ctypes.c_void_p)
        with self._handle as update:
            check(push(self._packer.pointer, update, byref(bucket), done, self._window.key), self._label)

    def flush(self) -> None:
        """Hands over what was packed, and waits until the daemon has taken in all that was pushed. Raises the first error of any."""

        def flush() -> None:
            with self._handle as update:
                check(native.library().refit_update_flush(update), self._label)

        with self._lock:
            self._send(flush)

    # ---- ending ----

    def commit(self, tensor_count: int | None = None) -> UpdateResult:
        """Pushes the rest and commits: all instances listed as committed hold the version when it returns.

        `tensor_count`: as of Trainer.update, for a caller that learns it only by pushing.

        Raises UpdateAborted (see its `dirty`), DeadlineExceeded, FailedPrecondition where an engine's tensor was never pushed (named;
        push it and commit again) or other than `tensor_count` tensors came, and errors of earlier pushes.
        """
        return self._end(native.library().refit_update_commit, tensor_count or 0)

    def refit(self) -> UpdateResult:
        """Ends the update in place of commit() where the registered layout takes part: moves all tensors that the layout does not push.

        Their bytes are read now. Raises FailedPrecondition, naming the tensor, where one was bound to other memory since the update began.
        """
        with self._lock:
            staged = self._fill() if self._fill is not None and not self.ended else 0
            result = self._end(native.library().refit_update_refit)
            self.result = replace(result, staged_bytes=staged, rebound=self._rebound)
            return self.result

    def _end(self, function: Callable[..., int], *arguments: int) -> UpdateResult:
        def end() -> None:
            raw = native.sized(native.refit_commit_result)
            with self._handle as update:
                check(function(update, *arguments, byref(raw)), self._label)
                self.result = result_of(raw, "update", update)
            self._handle.close()

        with self._lock:
            if self.result is not None:
                raise FailedPrecondition(f"{self._label} is committed already")
            self._send(end)
            assert self.result is not None
            return self.result

    def abort(self, reason: str = "the trainer gave the update up") -> None:
        """Gives the update up. Engines whose weights were written meanwhile are dirty until the next commit: `lost.dirty` tells then."""

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
        try:
            check(native.library().refit_update_lost(update), self._label)
        except UpdateAborted as error:
            self.lost = error
        except Error:
            pass  # the daemon went away meanwhile

    def _cancel(self) -> None:
        """Ends the call that another thread has under way in this update, which is over."""
        if self._window.error is None:
            self._window.error = UpdateAborted(f"{self._label}: a call was interrupted, which gave the update up")
        self._trainer._cancel(self.version)

    def _drop_slot(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._packer.end()
            slot.close()

    def close(self) -> None:
        """Aborts the update unless it has ended, and lets go of it."""

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
        try:
            self.refit() if self._with_layout else self.commit()
        except Error as error:
            if error.dirty is None and not self.ended:
                self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        """Aborts for an exception, which matters more than one of aborting, and tells it whether engines' weights are dirty."""
        with suppress(Error):  # the update may be over by now
            self.abort(f"{type(error).__name__}: {error}"[:400])
        dirty = None if self.lost is None else self.lost.dirty
        if getattr(error, "dirty", None) is not None:
            return
        with suppress(AttributeError):  # of an exception that takes no attributes
            error.dirty = dirty  # type: ignore[attr-defined]
        if self.lost is not None and hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(str(self.lost))
