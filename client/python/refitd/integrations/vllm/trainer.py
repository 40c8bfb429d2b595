"""The trainer's half of vLLM's weight transfer through refitd (vLLM 0.28 to 0.33). Importing it adds the backend `refitd` to vLLM's registry of trainer engines.

    import refitd.integrations.vllm.trainer as plug
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightTransferTrainerFactory

    init_info = plug.RefitdTrainerInitInfo("policy", engine={"instance": "vllm-0"}, rank=rank)
    engine = WeightTransferTrainerFactory.trainer_init(init_info, client=HTTPVLLMWeightSyncClient(url), source=ModuleSource(model))
    engine.send_weights()                                                     # after each step, on every rank

With a client, rank 0 drives the engines by vLLM's calls: it gives them their group when it begins, and lets them take each version. With `client=None`
nothing is called: the engines drive themselves (VLLM_PLUGINS=refitd). Engines have refitd's backend (refitd.integrations.vllm) either way.

A source that yields each rank's pieces (`iter_local`, from vLLM 0.33 on) is refitted sharded: nothing is gathered. So is vLLM's `ModuleSource` of
earlier versions, whose attribute `_module` is vLLM's own and not part of its interface. Of any other source each tensor is pushed, by the first
rank that owns it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, ClassVar

import torch
from torch import distributed
from vllm.distributed.weight_transfer.base import ModuleSource, TrainerInitInfo, TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ...errors import Error, InvalidArgument, Unimplemented
from ...layout import place_in_mesh
from ...layout.placement import adopt
from ...layout.shards import Shard
from ...trainer import Trainer, Update, UpdateResult
from .. import Ranks, Settings, first_difference, install, known_version, next_version

BACKEND = "refitd"
_WHERE = "RefitdTrainerInitInfo.settings"


@dataclass
class RefitdTrainerInitInfo(TrainerInitInfo):
    """How a trainer rank attaches, equal on all ranks but for `rank`, which is the rank in torch.distributed (0 where that is not initialised).

    `group`: the group of refitd. `engine`: what engines that are driven by the client attach with beside the group, such as `instance` and `socket`
    (fields of refitd.serving.Settings); what is missing comes from the engine's environment. `sharded`: True and False choose the way;
    None: sharded where the source has pieces. `settings`: the other options of refitd.integrations.Settings, such as `dtype`, `socket`, `spec`.
    """

    backend: ClassVar[str] = BACKEND

    group: str
    engine: Mapping[str, Any] = field(default_factory=dict)
    sharded: bool | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Declared:
    """A tensor of the source's metadata. `owners`: None: every rank owns it. `mesh`, `dims`: how `iter_local` yields it; see place_in_mesh."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None
    mesh: tuple[int, ...]
    dims: tuple[int | None, ...]

    @classmethod
    def of(cls, meta: Any) -> _Declared:
        owners = getattr(meta, "owners", None)
        mesh = () if owners is None else tuple(meta.mesh_shape)
        placements = None if owners is None else meta.placements
        dims = tuple(getattr(placement, "dim", None) for placement in placements) if placements is not None else (None,) * len(mesh)
        return cls(meta.name, str(meta.dtype), tuple(meta.shape), owners, mesh, dims)

    def __str__(self) -> str:
        return f"{self.dtype} {self.shape}"


class RefitdTrainerEngine(TrainerWeightTransferEngine):
    """A trainer rank. `result`: what the last send_weights() returned; None before. Not thread-safe."""

    init_info_cls = RefitdTrainerInitInfo
    # The framework that calls this class; status pages and errors name it.
    framework = "vllm"

    @classmethod
    def trainer_init(cls, init_info: RefitdTrainerInitInfo, *, client: Any, source: Any = None) -> RefitdTrainerEngine:
        """Attaches this rank and, with a client, the engines. Every rank calls it.

        A failure is raised on every rank: InvalidArgument, naming the option or the rank, for wrong options and ranks that differ in them; Unimplemented
        where `sharded` is True and the source has no pieces; what attaching and the client raise.
        """
        if source is None:
            raise InvalidArgument("source is missing: refitd sends the tensors of a WeightSource", culprit="source")
        engine = cls(init_info, client, source)
        try:
            engine._ranks.raise_alike(_failure_of(engine._attach))
        except BaseException:
            engine.shutdown()
            raise
        return engine

    def __init__(self, init_info: RefitdTrainerInitInfo, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank
        self.result: UpdateResult | None = None
        self._world_size = distributed.get_world_size() if distributed.is_initialized() else 1
        self._settings = Settings.of(_WHERE, {**init_info.settings, "group": init_info.group})
        self._casts = self._settings.sender(_WHERE, "the source").casts
        self._engine_info = {"group": init_info.group, **init_info.engine}
        self._ranks = Ranks(self._settings.update_seconds)
        self._ranks.join(self.rank, self._world_size)
        self._ranks.compare(group=init_info.group, sharded=init_info.sharded, drives=client is not None)
        self._find_pieces = None if init_info.sharded is False else self._pieces()
        if init_info.sharded and self._find_pieces is None:
            raise Unimplemented(f"sharded: {type(source).__name__} has no pieces of tensors: set sharded to False", culprit="sharded")
        self._trainer: Trainer | None = None
        self._engines_attached = False
        self._registered: tuple[Trainer, Any] | None = None  # the trainer, and marks of what it registered
        self._digest: bytes | None = None  # of the metadata that the ranks compared last
        self._declared: Sequence[_Declared] = ()
        self._yielded: Sequence[_Declared] = ()  # those that the source yields on this rank
        self._pushers: dict[str, int] = {}
        self._committed: int | None = None
        self._sends = 0

    def send_weights(self, version: int | None = None, *, note: str | None = None) -> UpdateResult:
        """Installs the source's tensors in every engine. Every rank calls it, with the same version.

        `version`: None, or not greater than the group's: the version after the group's. `note`: text for people in the update's status, such as the
        training's step; None: the number of this call.

        A failure is raised on every rank: InvalidArgument where ranks differ in metadata or version, or the source yields something else than it declares,
        naming rank or tensor; DeadlineExceeded, naming the rank, where a rank does not come within `update_seconds`; and as in
        refitd.integrations.install. The next call takes the next version.
        """
        version = self._agree(version)
        trainer = self._trainer
        assert trainer is not None
        self._sends += 1
        if note is None:
            note = f"{self.framework}'s sync {self._sends} of this run"
        if self._find_pieces is not None:
            self._ranks.raise_alike(_failure_of(partial(self._register, trainer)))
        send = partial(self._refit if self._find_pieces is not None else self._send, trainer, version, note)
        take = partial(self._let_engines_take, version) if self._drives else None
        try:
            self.result = install(self._ranks, trainer, version, send, take, self._settings.update_seconds)
        except BaseException:
            self._engines_attached = False  # an engine may have left
            raise
        self._committed = version
        return self.result

    def shutdown(self) -> None:
        """Detaches; engines keep their weights."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    # ---- before an update ----

    @property
    def _drives(self) -> bool:
        return self.client is not None and bool(self.is_sender)

    def _attach(self) -> None:
        """Attaches this rank where it is not attached, and the engines likewise."""
        if self._trainer is not None:
            try:
                self._trainer.check_health()
            except Error:
                self.shutdown()
        if self._trainer is None:
            self._trainer = self._attached_trainer()
            self._engines_attached = False
        if self._drives and not self._engines_attached:
            self.client.init_weight_transfer_engine(dict(self._engine_info))
            self._engines_attached = True

    def _attached_trainer(self) -> Trainer:
        return self._settings.trainer(self.framework, self.rank, self._world_size)

    def _agree(self, wanted: int | None) -> int:
        """The version that all ranks install; they have compared their metadata then."""
        self._ranks.meet()
        failure = _failure_of(self._attach)
        declared: list[_Declared] = []
        # Metadata may be made by collectives: a rank that failed takes part in them.
        failure = _failure_of(lambda: declared.extend(_declared(self.source))) or failure
        digest = hashlib.sha256(repr(declared).encode()).digest()
        known = known_version(self._trainer, self._committed)
        answers = self._ranks.raise_alike(failure, (digest, known, wanted))
        if any(theirs[2] != answers[0][2] for theirs in answers):
            self._ranks.compare(version=wanted)
        if any(theirs[0] != digest for theirs in answers) or digest != self._digest:
            self._compare(declared)
            self._digest = digest
        return next_version(max((theirs[1] for theirs in answers if theirs[1] is not None), default=None), wanted)

    def _compare(self, declared: list[_Declared]) -> None:
        """Compares the metadata of the ranks, and shares tensors that are pushed out among those that own them."""
        held = getattr(self.source, "held_names", lambda: None)()  # until 0.32; owners took its place
        answers = self._ranks.gather((declared, None if held is None else frozenset(held)))
        for rank, (theirs, _) in enumerate(answers):
            if theirs != answers[0][0]:
                name = first_difference([(one.name, one) for one in answers[0][0]], [(one.name, one) for one in theirs])
                raise InvalidArgument(f"trainer rank {rank} declares other tensors than rank 0, first at '{name}'", tensor=name)
        if not declared:
            raise InvalidArgument("the source declares no tensor", culprit="source")
        self._declared, self._pushers = declared, {}
        # Until 0.32 a rank with some of the tensors goes through whole groups of them.
        some = None if held is None else {name for group in self.source.groups() for name in group}
        self._yielded = [one for one in declared if (one.name in some if some is not None else one.owners is None or self.rank in one.owners)]
        for one in declared:
            owners = one.owners if one.owners is not None else [r for r, (_, names) in enumerate(answers) if names is None or one.name in names]
            if one.name in self._pushers or not owners:
                why = "is declared twice" if one.name in self._pushers else "belongs to no rank"
                raise InvalidArgument(f"tensor '{one.name}' {why}", tensor=one.name)
            self._pushers[one.name] = min(owners)

    # ---- sharded ----

    def _pieces(self) -> Callable[[], Any] | None:
        """A function that finds what Trainer.register takes of the source; None: the source has full tensors only."""
        if _implements(self.source, "iter_local"):
            return self._local_shards
        module = getattr(self.source, "_module", None) if type(self.source) is ModuleSource else None
        return None if module is None else lambda: module

    def _register(self, trainer: Trainer) -> None:
        """Registers the pieces, unless they are those that are registered."""
        assert self._find_pieces is not None
        found = self._find_pieces()
        marks = id(found) if isinstance(found, torch.nn.Module) else _marks(found)
        if self._registered != (trainer, marks):
            self._register_pieces(trainer, found)
            self._registered = trainer, marks

    def _register_pieces(self, trainer: Trainer, found: Any) -> None:
        dtype, exceptions = self._casts.rules(None)
        if isinstance(found, torch.nn.Module):
            adopt(found)
            trainer.register(found, dtype=dtype, exceptions=exceptions, buffers=False)
        else:
            trainer.register(found, dtype=dtype, exceptions=exceptions)

    def _local_shards(self) -> list[Shard]:
        """A shard of each declared tensor, with this rank's piece where it owns one."""
        expected = _Expected(self._yielded, self.rank)
        found = {name: tensor for name, tensor in self.source.iter_local() if expected.holds(name, tensor)}
        expected.end()
        return [self._shard(one, found.get(one.name)) for one in self._declared]

    def _shard(self, one: _Declared, tensor: Any) -> Shard:
        owners = range(self._world_size) if one.owners is None else one.owners
        mesh, dims = (one.mesh, one.dims) if one.owners is not None else ((self._world_size,), (None,))
        index = owners.index(self.rank) if tensor is not None else 0
        placed = place_in_mesh(one.shape, mesh, _coordinate(index, mesh), dims)
        dtype = getattr(torch, one.dtype.removeprefix("torch."))
        if tensor is None or not placed.parts:
            return Shard(one.name, one.shape, None, None, dtype, (0, 1), placed.largest, placed.rows)
        if tuple(tensor.shape) != placed.local_shape:
            why = f"the source's piece of '{one.name}' has shape {tuple(tensor.shape)}, and its placements give {placed.local_shape}"
            raise InvalidArgument(f"trainer rank {self.rank}: {why}", tensor=one.name)
        return Shard(one.name, one.shape, tensor.detach(), placed.parts[0].offset, None, placed.replica, placed.largest, placed.rows)

    def _refit(self, trainer: Trainer, version: int, note: str) -> UpdateResult:
        note = note if self.rank == 0 else ""
        return trainer.refit(version, duration_seconds=self._settings.update_seconds, verification=self._settings.verification, note=note)

    # ---- pushed ----

    def _send(self, trainer: Trainer, version: int, note: str) -> UpdateResult:
        update = trainer.update(
            version, duration_seconds=self._settings.update_seconds, verification=self._settings.verification, tensor_count=len(self._declared), note=note
        )
        with update:
            self._push(update)
        assert update.result is not None
        return update.result

    def _push(self, update: Update) -> None:
        """Takes all tensors of the source, which gathers them by collectives, and pushes those of this rank."""
        tensors = iter(self.source.iter_full() if hasattr(self.source, "iter_full") else self.source)
        expected = _Expected(self._yielded, self.rank)
        taken = False  # whether a tensor of the source is being looked at: an error is then not the source's
        try:
            for name, tensor in tensors:
                taken = True
                if expected.holds(name, tensor, whole=True) and self._pushers[name] == self.rank:
                    update.push(name, self._casts.of(name, tensor.detach()))
                taken = False
            expected.end()
        except BaseException:
            if taken:
                for _ in tensors:  # the other ranks gather on, and would wait for this one
                    pass
            raise

    # ---- the engines ----

    def _let_engines_take(self, version: int) -> None:
        """Lets the engines take the version; returns when they have taken it."""
        client = self.client
        try:
            client.start_weight_update()
        except Exception:
            client.finish_weight_update()  # of a sync whose trainer was lost
            client.start_weight_update()
        try:
            client.update_weights({"version": version, "wait_seconds": self._settings.update_seconds})
        except BaseException:
            with suppress(Exception):  # vLLM's worker has ended the sync
                client.finish_weight_update()
            raise
        client.finish_weight_update(str(version))


class _Expected:
    """What the source yields on this rank, in this order."""

    def __init__(self, declared: Sequence[_Declared], rank: int) -> None:
        self._declared, self._rank = iter(declared), rank

    def holds(self, name: str, tensor: Any, whole: bool = False) -> bool:
        """Whether this rank holds the tensor that was yielded; None stands for one of another rank. Raises InvalidArgument where that was not its turn."""
        one = next(self._declared, None)
        if one is not None and one.name == name:
            if tensor is None:
                return False
            if str(tensor.dtype) == one.dtype and (not whole or tuple(tensor.shape) == one.shape):
                return True
        found = f"'{name}'" if tensor is None else f"'{name}', {tensor.dtype} {tuple(tensor.shape)}"
        expected = "nothing more" if one is None else f"'{one.name}', {one}"
        raise InvalidArgument(f"trainer rank {self._rank}: the source yielded {found}, and declares {expected}", tensor=name)

    def end(self) -> None:
        """Raises InvalidArgument where a tensor was not yielded."""
        one = next(self._declared, None)
        if one is not None:
            raise InvalidArgument(f"trainer rank {self._rank}: the source did not yield '{one.name}', which it declares", tensor=one.name)


def _failure_of(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error
    return None


def _declared(source: Any) -> Iterator[_Declared]:
    metadata = source.metadata
    yield from map(_Declared.of, metadata() if callable(metadata) else metadata)  # a method until 0.32


def _implements(source: Any, mode: str) -> bool:
    tells = getattr(source, f"implements_{mode}", None)
    return tells is not None and bool(tells())


def _coordinate(index: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Where the rank with this number is in a mesh whose ranks are counted row by row."""
    coordinate = []
    for i, size in enumerate(mesh):
        coordinate.append(index // prod(mesh[i + 1 :]) % size)
    return tuple(coordinate)


def _marks(found: Any) -> list[Any]:
    """What differs where a tensor of the same name is another or has other memory. Registered tensors are alive, so that no other has their addresses."""
    if isinstance(found, Mapping):
        return [(name, id(tensor)) for name, tensor in found.items()]
    tensors = ((shard.name, shard.tensor) for shard in found)
    return [(name, None if t is None else (t.data_ptr(), tuple(t.shape), t.stride(), t.dtype)) for name, t in tensors]


if BACKEND not in WeightTransferTrainerFactory._registry:  # a second registration raises
    WeightTransferTrainerFactory.register_engine(BACKEND, RefitdTrainerEngine)
