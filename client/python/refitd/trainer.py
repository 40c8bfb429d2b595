"""A trainer rank: registers its shards and refits, or pushes full tensors."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from ctypes import byref
from dataclasses import replace
from typing import Any

from ._core import abi as _abi, collector as _gc
from .layout import devices as _devices
from ._core.buffers import DeviceBytes, HostBytes
from .layout.records import Box, Layout, PushedTensors, TensorSpec
from ._core.lists import check_tensors
from ._core.member import CLOSE_SECONDS, ConnectOptions, Member, Registration, checked_count, checked_version, group_spec, milliseconds
from ._core.native import Handle, check, refuse_fork, text
from ._core.tensors import Packer
from ._core.waiting import ends_soon, interruptible
from .errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument
from ._core.tls import TLS
from ._core.update import OUTCOMES, VERIFICATIONS, Known, Update, UpdateResult, result_of

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
        min_instances: int = 1,
        slot_bytes: int | None = None,
        slots: int | None = None,
        engine_only_tensors: Sequence[str] = (),
        unwanted_tensors: Sequence[str] = (),
        max_lag: int = 0,
        encrypted_data: bool = False,
        create: bool = True,
        on_older: str = "refuse",
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
        of staging slots (None: the daemon's), `engine_only_tensors` (patterns of names that trainers never bring), `unwanted_tensors`
        (patterns of names that no engine need want, pushed or registered), `max_lag` (how far an instance's version may be behind the group's while
        the instance counts as ready), `encrypted_data` (bytes cross between daemons encrypted or not at all; daemons that can't are
        refused, and so are GPUs over several daemons). With `create=False` the group must be made by someone else.

        `on_older`: what refit() and update() do with a version that is not greater than the group's, as that of a trainer that goes on
        from an older checkpoint. "refuse": raise FailedPrecondition. "next": take `next_version` in its place; the result tells which.
        "replace": begin the group anew, which then takes any version: rank 0 replaces it (it needs the role OPERATOR_WRITE at the daemon
        that has the group), every rank attaches again, and every engine is dirty until the commit. Equal on all ranks.

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
        if on_older not in ON_OLDER or (on_older == "replace" and not create):
            possible = " or ".join(map(repr, ON_OLDER))
            raise InvalidArgument(f"on_older: {on_older!r} is not {possible}; 'replace' needs create=True", culprit="on_older")
        self.label = f"trainer rank {rank} of group {group}"
        self._on_older, self._wait_seconds = on_older, WAIT_SECONDS if wait_seconds is None else wait_seconds
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
        self._connect, self._attach_options = connect, options
        self._attach(options)

    # ---- shards that stay where they are ----

    def register(self, shards: Any, *, dtype: Any = None, **options: Any) -> None:
        """Registers this rank's shards for refit, in place of those registered before; not during an update of this rank.

        `shards`: a dict of names to tensors (a state dict, with DTensors), a torch module, or a list of refitd.Shard. `dtype`: what
        floating-point tensors are cast to on the way; None: as they are. `options`: as of refitd.layout.shards.collect.

        Host tensors in regions (`empty`, `adopt`) are moved from where they are; others are copied first at each refit, of which a
        StagingWarning tells. Names are bound to the module or dict, not to the tensors that are there now: each refit looks every name up
        again, and follows tensors and memory that took another's place. A list of Shard is bound to its tensors, whose memory is followed.
        refitd keeps what was registered alive.

        Raises InvalidArgument, naming tensor and rank; FailedPrecondition where another rank's layout disagrees or an update runs.
        Nothing has changed then.
        """
        from .layout.shards import collect

        with _gc.paused():
            collected = collect(shards, dtype=dtype, rank=self.rank, world_size=self.world_size, **options)
            self._register_collected(collected)

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
        returned. refit() waits for work that torch has queued on the GPU's current stream. `duration_seconds`: of the whole update;
        None: the daemon's default. `verification`: "off", "transfer", "readback"; None: the daemon's default. `evict_late`: evict
        instances that are late instead of aborting.

        Raises UpdateAborted (its `dirty` says whether engines' weights may be torn), DeadlineExceeded, FailedPrecondition where
        layouts disagree, naming tensor and rank, before anything is written; Unavailable where the daemon went away.
        """
        version = self._version_for(version)
        rebound = self._renew()
        staged = self._fill()
        with self._lock:
            registration = self._registration
        pushed = registration.pushed_tensors if registration is not None else None
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

    def _renew(self) -> int:
        """Brings the registered layout up to date, before an update begins. Returns how many tensors were bound anew."""
        with self._lock:
            registration = self._registration
        if registration is None:
            return 0
        rebound = 0
        if registration.source is not None:
            with _gc.paused():
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
        update = self._begin(version, duration_seconds, verification, evict_late, with_layout=True)
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
        need the count, here or from Update.commit. `broadcast`: "auto", "direct", "chain", "symmetric" or "nccl". `with_layout`: the
        registered layout takes part, and the update ends by refit() instead of commit(); its names are looked up as refit() looks them up, at the begin, and its
        bytes are read in the update's refit(). `note`: text for people, such as "step 1200", shown in the update's
        status and in the daemon's log; at most 256 bytes of UTF-8 without control characters.

        Raises DeadlineExceeded, naming who was waited for, FailedPrecondition, UpdateAborted, AlreadyExists where this rank has an
        update open.
        """
        if "\0" in note:  # C would take the text to end there
            raise InvalidArgument(f"note {note!r} has a NUL character")
        version = self._version_for(version)
        rebound = self._renew() if with_layout else 0
        update = self._begin(
            version, duration_seconds, verification, evict_late, tensor_count, total_bytes, broadcast, with_layout, note
        )
        update._rebound = rebound
        update._fill = self._fill_unmoved if with_layout else None
        return update

    def _begin(
        self,
        version: int,
        duration_seconds: float | None,
        verification: str | None,
        evict_late: bool,
        tensor_count: int | None = None,
        total_bytes: int | None = None,
        broadcast: str = "auto",
        with_layout: bool = False,
        note: str = "",
    ) -> Update:
        options = _abi.sized(
            _abi.refit_begin_options,
            version=version,
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
            interruptible(lambda: check(_abi.library().refit_replace_group(byref(self._connect)), self.label), cancel=ends_soon)
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
        return _devices.bytes_at(self.device, pointer, nbytes, owner)

    def _synchronize(self) -> None:
        """Waits for the work that wrote the shards."""
        kind = _devices.kind_of(self.device)
        if kind is not None:
            kind.synchronize(self.device)


def replace_group(
    group: str,
    *,
    world_size: int = 1,
    min_instances: int = 1,
    slot_bytes: int | None = None,
    slots: int | None = None,
    engine_only_tensors: Sequence[str] = (),
    unwanted_tensors: Sequence[str] = (),
    max_lag: int = 0,
    encrypted_data: bool = False,
    socket: str | None = None,
    wait_seconds: float | None = None,
    address: str | None = None,
    tls: TLS | None = None,
    insecure: bool = False,
) -> None:
    """Begins a group anew, so that its next version may be any number; makes it where there is none. Arguments are as of Trainer, and the
    spec must be the group's. Every instance is dirty until its next commit, and trainers' leases end: they attach again.

    Raises PermissionDenied without the role OPERATOR_WRITE, AlreadyExists where the group has another spec, FailedPrecondition where an
    update runs or another daemon has the group (named), Unavailable where no daemon answers.
    """
    spec = group_spec(world_size, min_instances, slot_bytes, slots, engine_only_tensors, unwanted_tensors, max_lag, encrypted_data)
    made = ConnectOptions(group, socket=socket, wait_seconds=wait_seconds, address=address, tls=tls, insecure=insecure).structure(spec)
    interruptible(lambda: check(_abi.library().refit_replace_group(byref(made)), f"group {group}"), cancel=ends_soon)


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
