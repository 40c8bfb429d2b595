"""slime's weight updates through refitd, and those of its fork miles: Megatron's parameters are registered where they are, and nothing is gathered.

    slime ... --custom-megatron-init-path refitd.integrations.slime.init
    miles ... --custom-megatron-init-path refitd.integrations.slime.miles_init

with REFITD_GROUP (and REFITD_SOCKET) in the environment of training and of SGLang, whose servers follow the group by refitd's plugin
(refitd.integrations.sglang). `install` replaces the framework's updater over NCCL where the framework looks it up; this updater calls nothing of
SGLang for an update. To set more than the group, name a function of yours that calls `install` (`miles_install`).

Written from the sources of August 2026 (slime: commit 624b824; miles: commit 31f1ca9). Not for colocated engines, offloaded training, or quantized
updates. Of miles', updates of LoRA adapters are refused too, and the transfer modes "p2p" and "disk-delta", for which miles has updaters of its own.

Of the frameworks' inside, `UpdateWeightFromDistributed` of `megatron_utils.actor` is replaced, and `named_params_and_buffers` of
`megatron_utils.update_weight.common` is called.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from .._core.member import Connect, GroupSpec
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented, UpdateAborted
from ..layout.shards import MadeOf, MadeShards
from ..trainer import Trainer
from . import Ranks
from .megatron import Mapped, Place, finish_gather, replicas, shards, table_of

_PREFIX = "module.module."  # begins the names of parameters that slime gives
# The framework's options that `check` refuses.
_REFUSED = ("colocate", "offload_train")


@dataclass(frozen=True)
class Settings:
    """What Updater.install() takes.

    Attributes:
        group: The group's name.
        table: As in refitd.integrations.megatron.shards; None: table_of the configuration of `args.hf_checkpoint`.
        dtype: As in Trainer.register.
        update_seconds: The longest that a rank waits for the others, and then for the engines.
        spec: As in refitd.Trainer, with `device`, `socket`, `connect`; `spec.min_instances` is the number of engines, whatever it says.
    """

    group: str
    table: Mapping[str, Mapped | None] | None = None
    dtype: Any = None
    update_seconds: float = 600.0
    spec: GroupSpec = GroupSpec()
    device: str | None = None
    socket: str | None = None
    connect: Connect = Connect()


class Updater:
    """One trainer rank: slime's actor calls it in place of its UpdateWeightFromDistributed. Not thread-safe.

    `framework`: the package whose modules are used. `settings`: the arguments of install(), for the whole process.
    """

    framework = "slime"
    settings: Settings | None = None

    @classmethod
    def init(cls, args: Any) -> None:
        """Calls install() with the group that REFITD_GROUP names: the function for --custom-megatron-init-path. `args`: the framework's.

        Raises InvalidArgument where REFITD_GROUP names no group.
        """
        group = os.environ.get("REFITD_GROUP", "")
        if not group:
            raise InvalidArgument("REFITD_GROUP is not set: name the group, as for SGLang", culprit="REFITD_GROUP")
        cls.install(args, group)

    @classmethod
    def install(cls, args: Any, group: str, **options: Any) -> None:
        """Makes the framework's actor of this process update weights through refitd; every rank calls it, before the actor is set up.

        Args:
            args: The framework's.
            group: The group's name.
            options: Further fields of Settings.

        Raises:
            Unimplemented: The framework's options colocate engines or offload training.
        """
        cls.check(args)
        cls.settings = Settings(group, **options)
        actor: Any = importlib.import_module(f"{cls.framework}.backends.megatron_utils.actor")
        actor.UpdateWeightFromDistributed = cls  # where the actor looks for its updater over NCCL

    @classmethod
    def check(cls, args: Any) -> None:
        """Raises Unimplemented for options of the framework that this way of updating does not know."""
        for name in _REFUSED:
            if getattr(args, name, False):
                raise Unimplemented(f"--{name.replace('_', '-')}: parameters must stay where they are between updates", culprit=name)

    def __init__(
        self,
        args: Any,
        model: Sequence[Any],
        weights_getter: Callable[[], Mapping[str, Any]],
        *,
        model_name: str,
        quantization_config: Mapping[str, Any] | None,
    ) -> None:
        """Attaches nothing yet. `weights_getter`, `model_name`: slime's, not used: the model's own parameters are registered.

        Raises Unimplemented for a model that slime quantizes on the way.
        """
        if self.settings is None:
            raise FailedPrecondition(f"install() for {self.framework} was not called in this process")
        if quantization_config:
            raise Unimplemented("the checkpoint is quantized: refitd moves parameters as they are", culprit="quantization_config")
        self.args, self.model = args, model
        self.weight_version = 0
        self._updates = 0
        self._settings = self.settings
        self._trainer: Trainer | None = None
        self._ranks: Ranks | None = None
        self._metrics: dict[str, float] = {}

    def pop_metrics(self) -> dict[str, float]:
        """The metrics of the last update; each update's are returned only once."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any, **_: Any) -> None:
        """Attaches this rank and registers its parameters, the first time; every rank calls it. Updates wait for as many engines as there
        are now.

        Raises InvalidArgument for a parameter that the table does not know, naming it, and what attaching raises.
        """
        if self._trainer is not None:
            return
        from torch import distributed

        rank, world_size = distributed.get_rank(), distributed.get_world_size()
        self._ranks = Ranks(self._settings.update_seconds)
        self._ranks.join(rank, world_size)
        given = self._settings
        trainer = Trainer(
            given.group, rank=rank, world_size=world_size, spec=replace(given.spec, min_instances=max(1, len(rollout_engines))),
            device=given.device, socket=given.socket, connect=replace(given.connect, client=self.framework),
        )  # fmt: skip
        try:
            trainer.register(self._shards(rank), dtype=self._settings.dtype)
        except BaseException:
            trainer.close()
            raise
        self._trainer = trainer

    def disconnect_rollout_engines(self) -> None:
        """Detaches; engines keep their weights."""
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def update_weights(self) -> None:
        """Installs the parameters in every engine. Every rank calls this. The version is the first that is greater than the group's and than
        `weight_version` of every rank.

        Raises DeadlineExceeded, naming the rank, where a rank does not come within `update_seconds`: nothing was sent then. Raises what
        Trainer.refit raises, on every rank, and UpdateAborted where no engine was left. The next call takes the next version.
        """
        if self._trainer is None or self._ranks is None:
            raise FailedPrecondition("update_weights: connect_rollout_engines was not called")
        self._ranks.meet()
        # A trainer that was restarted counts from 0, and the group goes on from its version.
        self.weight_version = max(self._ranks.gather(max(self.weight_version + 1, self._trainer.next_version)))
        self._updates += 1
        note = f"{self.framework}'s update {self._updates} of this run" if self._trainer.rank == 0 else ""
        result = self._trainer.refit(self.weight_version, duration_seconds=self._settings.update_seconds, note=note)
        if not result.committed:
            raise UpdateAborted(f"version {self.weight_version}: every engine was lost", culprit="instances")
        self._metrics = {"refitd/seconds": result.seconds, "refitd/bytes": float(result.bytes)}

    def _shards(self, rank: int) -> list[Any]:
        table = self._settings.table
        if table is None:
            from transformers import AutoConfig

            table = table_of(AutoConfig.from_pretrained(self.args.hf_checkpoint))
        common: Any = importlib.import_module(f"{self.framework}.backends.megatron_utils.update_weight.common")
        named = {name.removeprefix(_PREFIX): tensor for name, tensor in common.named_params_and_buffers(self.args, self.model)}
        made_of = MadeOf(list(self.model), partial(self._shards, rank), first=partial(finish_gather, self.model))
        return MadeShards(shards(named, table, _place(rank, self.args)), made_of)


class MilesUpdater(Updater):
    """One trainer rank of miles, with what its actor calls beyond slime's."""

    framework = "miles"

    @classmethod
    def check(cls, args: Any) -> None:
        """Raises Unimplemented as slime's does, and for another transfer mode than "broadcast"."""
        super().check(args)
        mode = getattr(args, "update_weight_transfer_mode", "broadcast")
        if mode != "broadcast":
            what = "update_weight_transfer_mode"
            raise Unimplemented(f"--update-weight-transfer-mode {mode}: refitd takes the place of broadcast", culprit=what)

    def __init__(self, *arguments: Any, is_lora: bool = False, **options: Any) -> None:
        """Attaches nothing yet. Raises Unimplemented as slime's does, and where miles updates adapters alone."""
        if is_lora:
            raise Unimplemented("LoRA: miles' adapters are not delivered; refitd.integrations.lora merges those of PEFT", culprit="is_lora")
        super().__init__(*arguments, **options)
        self._stale = False

    def is_rollout_engines_fresh(self) -> bool:
        """Tells whether this rank is attached, and the trainer's ranks are those with which it attached."""
        return self._trainer is not None and not self._stale

    def mark_engine_connection_stale(self) -> None:
        """Notes that the trainer's ranks changed: the next connect_rollout_engines() attaches anew."""
        self._stale = True

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any, **options: Any) -> None:
        """Attaches and registers as slime's does, anew where the connection is stale."""
        if self._stale:
            self.disconnect_rollout_engines()
        super().connect_rollout_engines(rollout_engines, rollout_engine_lock, **options)
        self._stale = False


init, install = Updater.init, Updater.install
miles_init, miles_install = MilesUpdater.init, MilesUpdater.install


def _place(rank: int, args: Any) -> Place:
    """The rank's place among Megatron's ranks; slime's names have global numbers of layers and experts already."""
    from megatron.core import parallel_state as state

    replica, expert_replica = replicas()
    return Place(
        rank=rank,
        tp=state.get_tensor_model_parallel_rank(),
        tp_size=state.get_tensor_model_parallel_world_size(),
        etp=state.get_expert_tensor_parallel_rank(),
        etp_size=state.get_expert_tensor_parallel_world_size(),
        stage=state.get_pipeline_model_parallel_rank(),
        stages=state.get_pipeline_model_parallel_world_size(),
        first_layer=0,
        layers=args.num_layers,
        first_expert=0,
        experts=args.num_experts or 0,
        replica=replica,
        expert_replica=expert_replica,
    )
