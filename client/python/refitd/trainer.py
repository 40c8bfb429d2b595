"""A trainer rank: registers its shards and refits, or pushes full tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

from . import _abi, _devices, _gc
from ._buffers import DeviceBytes, HostBytes
from ._layout import Box, PushedTensors, TensorSpec
from ._lists import check_tensors
from ._member import ConnectOptions, Member, Registration, checked_count, checked_version, group_spec, milliseconds
from ._native import Handle, check, refuse_fork, text
from ._tensors import Packer
from ._wait import interruptible
from .errors import Error, InvalidArgument
from .tls import TLS
from .update import OUTCOMES, VERIFICATIONS, Known, Update, UpdateResult, result_of


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
        min_instances: int = 1,
        slot_bytes: int | None = None,
        slots: int | None = None,
        engine_only_tensors: Sequence[str] = (),
        unwanted_tensors: Sequence[str] = (),
        max_lag: int = 0,
        encrypted_data: bool = False,
        create: bool = True,
        socket: str | None = None,
        coordinator: str | None = None,
        device: str | None = None,
        wait_seconds: float | None = None,
        call_margin_seconds: float | None = None,
        reattach_seconds: float | None = None,
        silence_seconds: float | None = None,
        client: str | None = None,
        address: str | None = None,
        tls: TLS | None = None,
        insecure: bool = False,
    ) -> None:
        """Attaches, and waits for daemon and group for `wait_seconds` (10).

        The first rank makes the group; the others must bring an equal spec: `min_instances` that an update waits for, bytes and number
        of staging slots (None: the daemon's), `engine_only_tensors` (names that trainers never bring), `unwanted_tensors` (names, or
        prefixes that end with '*', that no engine need want), `max_lag` (how far an instance's version may be behind the group's while
        the instance counts as ready), `encrypted_data` (bytes cross between daemons encrypted or not at all; daemons that can't are
        refused, and so are GPUs over several daemons). With `create=False` the group must be made by someone else.

        `socket`: of the daemon; None: REFITD_SOCKET, else /run/refitd/refitd.sock. `coordinator`: "host:port" of the daemon that has
        the group; None: this one. It is one name, which the daemon resolves anew whenever it joins the group. `device`: where the
        weights are, a GPU's UUID ("GPU-...") or "host";
        None: the current GPU where torch has used CUDA in this process, else host memory. `reattach_seconds`: how long to try to attach
        again to a daemon that went away; None: the lease's end is the end. `silence_seconds`: a daemon that is silent for this long is
        lost (30).
        `call_margin_seconds`: added to what remains of an update as the deadline of its calls (5). `client`: free text for status pages.

        `address`: "HOST:PORT" of the daemon, in place of `socket`. Over TCP nothing shares memory: this rank can push, and its pushes
        travel inside calls of at most 1 MiB; it can't register. `tls`: the certificates that TCP takes; None: those that the
        environment names. `insecure`: TCP without them is allowed, for laboratories.

        Raises Unavailable where no daemon answers, Unauthenticated where a certificate is refused, DeadlineExceeded or NotFound where the
        group does not appear, AlreadyExists where this rank is attached or the group has another spec, InvalidArgument, FailedPrecondition.
        """
        super().__init__()
        refuse_fork()
        checked_count(world_size, "world_size", 1)
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise InvalidArgument(f"trainer rank {rank} of group {group}: world_size is {world_size}", culprit=f"trainer rank {rank}")
        self.label = f"trainer rank {rank} of group {group}"
        self.group, self.rank, self.world_size = group, rank, world_size
        self.device = device
        if device is None and address is None:
            self.device = _devices.current()
        self.shares_memory = address is None  # with the daemon
        spec = None
        if create:
            spec = group_spec(
                world_size, min_instances, slot_bytes, slots, engine_only_tensors, unwanted_tensors, max_lag, encrypted_data
            )
        connect = ConnectOptions(
            group,
            socket,
            coordinator,
            wait_seconds,
            call_margin_seconds,
            reattach_seconds,
            silence_seconds,
            self.device,
            client,
            address,
            tls,
            insecure,
        ).structure(spec)
        options = _abi.sized(_abi.refit_trainer_options, connect=ctypes.pointer(connect), rank=rank, world_size=world_size)

        self._refitting: int | None = None  # the version of the refit that runs, if any
        self._seen: dict[str, Known] = {}  # tensors that were pushed, by name
        self._packer = Packer()  # knows the same tensors
        self._attach(options)

    # ---- shards that stay where they are ----

    def register(self, shards: Any, *, dtype: Any = None, **options: Any) -> None:
        """Registers this rank's shards for refit, in place of those registered before; not during an update of this rank.

        `shards`: a dict of names to tensors (a state dict, with DTensors), a torch module, or a list of refitd.Shard. `dtype`: what
        floating-point tensors are cast to on the way; None: as they are. `options`: as of refitd.shards.collect.

        Host tensors in regions (`empty`, `adopt`) are moved from where they are; others are copied first at each refit, of which a
        StagingWarning tells. The tensors must stay: refitd keeps them alive.

        Raises InvalidArgument, naming tensor and rank; FailedPrecondition where another rank's layout disagrees or an update runs.
        Nothing has changed then.
        """
        from .shards import collect

        with _gc.paused():
            collected = collect(shards, dtype=dtype, rank=self.rank, world_size=self.world_size, **options)
            self.register_layout(collected.tensors, collected.boxes, collected.pushed, collected.before_refit)

    def register_shards(self, shards: Sequence[Any], **options: Any) -> None:
        """Registers a list of refitd.Shard(name, shape, dtype, tensor, offset): the foundation of `register`."""
        self.register(list(shards), **options)

    def register_layout(
        self,
        tensors: Sequence[TensorSpec],
        boxes: Sequence[Box],
        pushed: PushedTensors | None = None,
        before_refit: Callable[[], None] | None = None,
    ) -> None:
        """Does what register() does, for plain records. `pushed`: tensors that every refit pushes instead. `before_refit`: the function
        that each refit() calls first.

        Tensors without a box of this rank that are not pushed are left out, so that engines need not know them (tied weights). Without
        any box the layout is taken back.
        """
        with _gc.paused():
            check_tensors(tensors, self.label)
            registration = _supplied(tensors, boxes, list(pushed.indices) if pushed is not None else [])
            registration.pushed_tensors, registration.before_refit = pushed, before_refit
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
        returned. refit() waits for work that torch has queued on the GPU's current stream. `duration_seconds`: of the whole update;
        None: the daemon's default. `verification`: "off", "transfer", "readback"; None: the daemon's default. `evict_late`: evict
        instances that are late instead of aborting.

        Raises UpdateAborted (its `dirty` says whether engines' weights may be torn), DeadlineExceeded, FailedPrecondition where
        layouts disagree, naming tensor and rank, before anything is written; Unavailable where the daemon went away.
        """
        checked_version(version)
        with self._lock:
            registration = self._registration
        pushed = registration.pushed_tensors if registration is not None else None
        rebound = 0
        if registration is not None:
            if registration.before_refit is not None:
                registration.before_refit()
            rebound = self._rebind(registration)
            with self._lock:
                registration = self._registration or registration
            registration.fill()
        self._synchronize()
        staged = registration.staged_bytes if registration is not None else 0
        if pushed is not None:
            return self._refit_with_pushes(version, duration_seconds, verification, evict_late, pushed, staged, rebound)
        options = _abi.sized(
            _abi.refit_refit_options,
            version=version,
            duration_ms=milliseconds(duration_seconds, "duration_seconds"),
            verification=_number(VERIFICATIONS, verification, "verification"),
            evict_late=int(evict_late),
        )

        def refit() -> UpdateResult:
            raw = _abi.sized(_abi.refit_commit_result)
            library = _abi.library()
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

    def _refit_with_pushes(
        self,
        version: int,
        duration_seconds: float | None,
        verification: str | None,
        evict_late: bool,
        pushed: PushedTensors,
        staged: int,
        rebound: int,
    ) -> UpdateResult:
        update = self.update(
            version, duration_seconds=duration_seconds, verification=verification, evict_late=evict_late, with_layout=True
        )
        with update:
            pushed.push(update)
        assert update.result is not None
        return replace(update.result, staged_bytes=staged, rebound=rebound)

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

        `duration_seconds`: of the whole update, waiting for engines included; None: the daemon's default. `verification`,
        `evict_late`: as for refit. `tensor_count`, `total_bytes`: of all ranks together; engines with staged delivery and no manifest
        need the count. `broadcast`: "auto", "direct", "chain", "symmetric" or "nccl". `with_layout`: the registered layout takes
        part, and the update ends by refit() instead of commit(). `note`: text for people, such as "step 1200", shown in the update's
        status and in the daemon's log; at most 256 bytes of UTF-8 without control characters.

        Raises DeadlineExceeded, naming who was waited for, FailedPrecondition, UpdateAborted, AlreadyExists where this rank has an
        update open.
        """
        if "\0" in note:  # C would take the text to end there
            raise InvalidArgument(f"note {note!r} has a NUL character")
        options = _abi.sized(
            _abi.refit_begin_options,
            version=checked_version(version),
            duration_ms=milliseconds(duration_seconds, "duration_seconds"),
            verification=_number(VERIFICATIONS, verification, "verification"),
            evict_late=int(evict_late),
            tensor_count=tensor_count or 0,
            total_bytes=total_bytes or 0,
            broadcast=_number(_abi.BROADCASTS, broadcast, "broadcast"),
            without_layout=int(not with_layout),
            note=note.encode() or None,
        )

        def begin() -> Update:
            out = ctypes.c_void_p()
            library = _abi.library()
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

    def check_health(self) -> None:
        """Raises what ended the lease, and why none follows it; returns while attached."""
        self._check("health")

    # ---- inside ----

    def _cancel(self, version: int) -> None:
        try:
            self.abort(version, "the trainer was interrupted")
        except Error:
            pass  # the update had not begun, or has ended: then the call ends by itself

    def _slot_bytes(self, pointer: int, nbytes: int, owner: Any) -> HostBytes | DeviceBytes:
        return _devices.bytes_at(self.device, pointer, nbytes, owner)

    def _synchronize(self) -> None:
        """Waits for the work that wrote the shards."""
        kind = _devices.kind_of(self.device)
        if kind is not None:
            kind.synchronize(self.device)


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


def _number(names: dict[Any, int], given: Any, what: str) -> int:
    if given not in names:
        raise InvalidArgument(f"{what}: {given!r} is none of {', '.join(repr(name) for name in names)}", culprit=what)
    return names[given]
