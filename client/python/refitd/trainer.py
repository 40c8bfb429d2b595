"""A trainer rank: registers its shards and refits, or pushes full tensors."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

from ._core import native
from ._core.member import CLOSE_SECONDS, Connect, GroupSpec, Member, Registration, checked_count, checked_version, milliseconds
from ._core.native import Handle, check, refuse_fork, text
from ._core.tensors import Packer, check_tensors
from ._core.update import OUTCOMES, VERIFICATIONS, PushedTensor, Update, UpdateResult, result_of
from ._core.waiting import ends_soon, interruptible, paused
from .errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument
from .layout import devices
from .layout.boxes import Box, Layout, PushedTensors, TensorSpec
from .layout.casting import DEFAULT_STAGING_BYTES
from .layout.memory import DeviceBytes, HostBytes

# A trainer does one of these with a version that is not greater than its group's.
ON_OLDER = ("refuse", "next", "replace")
WAIT_SECONDS = 10.0  # the library's default of wait_seconds
POLL_SECONDS = 0.02  # between looks whether a lease has ended


class Trainer(Member):
    """One trainer rank, attached to the daemon of its node.

        trainer = refitd.Trainer("policy", rank=r, world_size=n)
        trainer.register(model.state_dict(), dtype=torch.bfloat16)
        result = trainer.refit(version=8)                        # every rank calls it

    or, where a framework yields full tensors:

        with trainer.update(9) as update:
            for name, tensor in export():
                update.push(name, tensor)

    Any thread may call any method. Blocking calls let go of the interpreter lock, and on the main thread signal handlers run
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
                place; the result tells which. "replace": begin the group anew, which then takes any version: rank 0 replaces it (it
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
        super().__init__()
        refuse_fork()
        checked_count(world_size, "world_size", 1)
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise InvalidArgument(f"trainer rank {rank} of group {group}: world_size is {world_size}", culprit=f"trainer rank {rank}")
        if on_older not in ON_OLDER or (on_older == "replace" and spec is None):
            possible = " or ".join(map(repr, ON_OLDER))
            raise InvalidArgument(f"on_older: {on_older!r} is not {possible}; 'replace' needs a spec", culprit="on_older")
        self.label = f"trainer rank {rank} of group {group}"
        connect = connect.to(socket)
        self._on_older, self._wait_seconds = on_older, WAIT_SECONDS if connect.wait_seconds is None else connect.wait_seconds
        self.group, self.rank, self.world_size = group, rank, world_size
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

        Host tensors in regions (`empty`, `adopt`) are moved from where they are; others are copied first at each refit, of which a
        StagingWarning tells. Names are bound to the module or dict, not to the tensors that are there now: each refit looks every name up
        again, and follows tensors and memory that took another's place. A list of Shard is bound to its tensors, whose memory is followed.
        refitd keeps what was registered alive.

        Args:
            shards: A dict of names to tensors (a state dict, with DTensors), a torch module, or a list of refitd.Shard.
            dtype: What floating-point tensors are cast to on the way; None: as they are.
            exceptions: Other dtypes, by pattern of names; None as a dtype: as they are. The first pattern that matches counts.
            buffers: Of a module: whether persistent buffers are taken, or patterns of those that are.
            leave_out: Patterns of names that are not taken.
            any_cast: Patterns of names that may be cast also where values are lost.
            tied: Whether names of the same memory are sent once; or the names that are not sent, and the name of each one's memory.
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
                    shards,
                    dtype,
                    exceptions,
                    buffers=buffers,
                    leave_out=leave_out,
                    any_cast=any_cast,
                    tied=tied,
                    rank=self.rank,
                    world_size=self.world_size,
                    staging=staging,
                    staging_bytes=staging_bytes,
                )
            )

    def register_layout(
        self,
        tensors: Sequence[TensorSpec],
        boxes: Sequence[Box],
        pushed: PushedTensors | None = None,
        before_refit: Callable[[], None] | None = None,
    ) -> None:
        """Does what register() does, for plain records.

        Tensors without a box of this rank that are not pushed are left out, so that engines need not know them (tied weights). Without
        any box the layout is taken back.

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
    ) -> UpdateResult:
        """Installs the registered shards as `version` in every instance; every trainer rank calls it.

        The caller has written the version into the shards before the call, and may write the shards again once refit() has
        returned. refit() waits for work that torch has queued on the GPU's current stream.

        Args:
            version: The new version, an integer from 0 to 2^63 - 1.
            duration_seconds: Of the whole update; None: the daemon's default.
            verification: "off", "transfer", "readback"; None: the daemon's default.
            evict_late: Whether instances that are late are evicted; else the update aborts.

        Returns:
            What was moved, in how many seconds, and which instances committed.

        Raises:
            UpdateAborted: Its `dirty` says whether engines' weights may be torn.
            DeadlineExceeded: The update was not done in its time.
            FailedPrecondition: Layouts disagree; the error names tensor and rank, and nothing was written.
            Unavailable: The daemon went away.
        """
        version = self._version_for(version)
        rebound = self._renew()
        staged = self._fill()
        with self._lock:
            registration = self._registration
        common = _common(version, duration_seconds, verification, evict_late)
        pushed = registration.pushed_tensors if registration is not None else None
        if pushed is not None:
            with self._begin(version, native.sized(native.refit_begin_options, **common), with_layout=True) as update:
                pushed.push(update)
            assert update.result is not None
            return replace(update.result, staged_bytes=staged, rebound=rebound)
        options = native.sized(native.refit_refit_options, **common)

        def refit() -> UpdateResult:
            raw = native.sized(native.refit_commit_result)
            library = native.library()
            with self._handle as handle:
                check(library.refit_trainer_refit(handle, byref(options), byref(raw)), f"{self.label}, version {version}")
                return result_of(raw, "trainer", handle, staged, rebound)

        self._refitting = version
        try:
            return interruptible(refit, cancel=lambda: self._cancel(version))
        finally:
            self._refitting = None

    def close(self) -> None:
        """Detaches from the daemon, and gives up the refit that another thread waits in. No method works afterwards."""
        super().close()

    def _close(self) -> None:
        version = self._refitting
        if version is not None and not self.closed:
            self._cancel(version)
        super()._close()

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
                    self._begin_refit(registration)  # other ranks wait for this one where it communicates
                    raise
                if layout is not None:
                    self._register_collected(layout)
                    assert layout.source is not None
                    rebound = layout.source.rebound
        with self._lock:
            registration = self._registration or registration
        self._begin_refit(registration)
        if registration.source is not None and registration.before_refit is None:
            return rebound  # the source compared the addresses of all memory just now
        return rebound + self._rebind(registration)

    @staticmethod
    def _begin_refit(registration: Registration) -> None:
        if registration.before_refit is not None:
            registration.before_refit()

    def _fill(self) -> int:
        """Copies what is not in place, and waits for the work that wrote the shards. Returns how many bytes were copied."""
        with self._lock:
            registration = self._registration
        if registration is not None:
            registration.fill()
        self._synchronize()
        return 0 if registration is None else registration.staged_bytes

    def _fill_unmoved(self) -> int:
        """Does what _fill() does within an update, during which nothing can be registered anew."""
        with self._lock:
            registration = self._registration
        if registration is not None and (
            registration.moved() or (registration.source is not None and registration.source.renewed() is not None)
        ):
            raise FailedPrecondition(
                f"{self.label}: {registration.first_moved()} was bound to other memory after the update had begun: change shards before it",
                culprit=registration.first_moved(),
            )
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
    ) -> Update:
        """Begins an update to `version`, or joins it; returns when every engine has stopped reading its weights. Every rank calls it.

        Args:
            version: As of refit, with `verification` and `evict_late`.
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
        if "\0" in note:  # C would take the text to end there
            raise InvalidArgument(f"note {note!r} has a NUL character")
        version = self._version_for(version)
        rebound = self._renew() if with_layout else 0
        options = native.sized(
            native.refit_begin_options,
            tensor_count=tensor_count or 0,
            total_bytes=total_bytes or 0,
            broadcast=_number(native.BROADCASTS, broadcast, "broadcast"),
            without_layout=int(not with_layout),
            note=note.encode() or None,
            **_common(version, duration_seconds, verification, evict_late),
        )
        update = self._begin(version, options, with_layout)
        update._rebound = rebound
        update._fill = self._fill_unmoved if with_layout else None
        return update

    def _begin(self, version: int, options: native.refit_begin_options, with_layout: bool) -> Update:
        def begin() -> Update:
            out = ctypes.c_void_p()
            library = native.library()
            with self._handle as handle:
                label = f"{self.label}, version {version}"
                check(library.refit_trainer_begin(handle, byref(options), byref(out)), label)
            assert out.value is not None
            owned = Handle(out.value, library.refit_update_free, f"the update to version {version}")
            return Update(self, owned, version, with_layout)

        return interruptible(begin, cancel=lambda: self._cancel(version), disown=Update.close)

    # ---- state ----

    def abort(self, version: int, reason: str = "the trainer gave the update up") -> None:
        """Gives up the update to `version` that another thread waits in: its call then raises UpdateAborted.

        Raises FailedPrecondition where this rank has no such update open.
        """
        self._check("abort", checked_version(version), text(reason))

    def get_update(self, version: int) -> str:
        """Tells what became of an update, for a caller who missed the answer: "unknown", "running", "committed" or "aborted".

        A daemon knows of no update from before it was restarted.
        """
        out = ctypes.c_int32()
        self._check("get_update", checked_version(version), byref(out))
        return OUTCOMES[out.value]

    @property
    def group_version(self) -> int | None:
        """The last committed version that the daemon told of; None: none."""
        return self._ask_version("group_version")

    @property
    def next_version(self) -> int:
        """The version after `group_version`; 1 where there is none. Ranks that took part in the same updates agree about it."""
        known = self.group_version
        return 1 if known is None else known + 1

    def check_health(self) -> None:
        """Raises what ended the lease, and why none follows it; returns while attached."""
        self._check("health")

    # ---- inside ----

    def _version_for(self, version: int) -> int:
        """The version to install for `version`, after what `on_older` says was done."""
        checked_version(version)
        if self._on_older == "refuse" or version >= (least := self.next_version):
            return version
        if self._on_older == "next":
            return least
        self._begin_group_anew()
        return version

    def _begin_group_anew(self) -> None:
        before = self.reattachments
        if self.rank == 0:
            interruptible(lambda: check(native.library().refit_replace_group(byref(self._connect)), self.label), cancel=ends_soon)
        deadline = time.monotonic() + self._wait_seconds
        while self._attached_as(before):
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"{self.label}: trainer rank 0 did not replace the group within {self._wait_seconds} s", culprit="trainer rank 0"
                )
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
        """Attaches by another handle, which knows nothing of versions before, and registers what was registered."""
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

    def _slot_bytes(self, pointer: int, nbytes: int, owner: Any) -> HostBytes | DeviceBytes:
        return devices.bytes_at(self.device, pointer, nbytes, owner)

    def _synchronize(self) -> None:
        """Waits for the work that wrote the shards."""
        kind = devices.kind_of(self.device)
        if kind is not None:
            kind.synchronize(self.device)


def replace_group(
    group: str,
    *,
    world_size: int = 1,
    spec: GroupSpec = GroupSpec(),
    socket: str | None = None,
    connect: Connect = Connect(),
) -> None:
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
    made = connect.to(socket)._structure(group, None, spec._structure(world_size))
    interruptible(lambda: check(native.library().refit_replace_group(byref(made)), f"group {group}"), cancel=ends_soon)


def _supplied(tensors: Sequence[TensorSpec], boxes: Sequence[Box], pushed: Sequence[int]) -> Registration:
    """A registration of the tensors that this rank supplies, with indices for them alone."""
    used = {box.tensor_index for box in boxes} | set(pushed)
    if len(used) == len(tensors) or not used <= set(range(len(tensors))):  # the latter is refused later, by name
        return Registration(list(tensors), list(boxes), list(pushed))
    index = {old: new for new, old in enumerate(sorted(used))}
    return Registration(
        [tensors[old] for old in index],
        [replace(box, tensor_index=index[box.tensor_index]) for box in boxes],
        [index[old] for old in pushed],
    )


def _common(version: int, duration_seconds: float | None, verification: str | None, evict_late: bool) -> dict[str, int]:
    """The fields that refit_begin_options and refit_refit_options share."""
    return {
        "version": version,
        "duration_ms": milliseconds(duration_seconds, "duration_seconds"),
        "verification": _number(VERIFICATIONS, verification, "verification"),
        "evict_late": int(evict_late),
    }


def _number(names: dict[Any, int], given: Any, what: str) -> int:
    if given not in names:
        raise InvalidArgument(f"{what}: {given!r} is none of {', '.join(repr(name) for name in names)}", culprit=what)
    return names[given]
