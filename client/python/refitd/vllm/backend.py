"""The weight-transfer backend `refitd`: one rank of vLLM's, in its worker process, as one rank of a refitd instance.

vLLM makes it when the model is loaded, and calls it on the worker's own thread:

- `init_transfer_engine` attaches, decides the delivery of every parameter (`delivery.py`) and registers it.
- `receive_weights` takes one update: it answers Prepare, waits for the outcome, and processes what the arena brought.
- `shutdown` detaches; `init_transfer_engine` may attach anew afterwards.

Ranks: refitd's rank is vLLM's, `data_parallel_index * world_size + rank`, so that all replicas of one server commit together. Where
replicas have servers of their own (external load balancing), each is an instance, with "-dpN" after its name. With `drivers=1` the
instance has one more rank, the last, which registers nothing: the driver (`driver.py`), without which no version commits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo


from ..engine import Engine
from ..errors import DeadlineExceeded, FailedPrecondition, UpdateAborted
from ..events import Aborted, Committed, Lost, Prepare
from . import _versions, evidence
from .delivery import Delivery, decide
from .manifest import read_manifest
from .settings import Settings

logger = logging.getLogger("vllm.refitd")

# How long `receive_weights` waits for Prepare: the driver calls it when Prepare has come; a trainer that drives by HTTP calls it first.
PREPARE_SECONDS = 120.0
# The longest that an update lasts beyond what Prepare said remains; the daemon ends it earlier.
MARGIN_SECONDS = 30.0


@dataclass
class RefitdInitInfo(WeightTransferInitInfo):
    """What `init_transfer_engine` is told; the fields of `settings.Settings`, where "" leaves the environment's value."""

    group: str = ""
    instance: str = ""
    socket: str = ""
    coordinator: str = ""
    manifest: str = ""
    arena_bytes: str | int = ""
    wait_seconds: str | float = ""
    reattach_seconds: str | float = ""
    drivers: int = 0
    dirty: bool = False

    def settings(self) -> Settings:
        return Settings.of({f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("drivers", "dirty")}).checked()


@dataclass
class RefitdUpdateInfo(WeightTransferUpdateInfo):
    """`version`: to wait for; None: the next. `wait_seconds`: for the trainer to begin."""

    version: int | None = None
    wait_seconds: float = PREPARE_SECONDS
    update_kind: str = "dense"  # asked for by vLLM until 0.24
    num_updates_list: list[int] | None = field(default=None)


class RefitdBackend(WeightTransferEngine):
    """See the module. Not thread-safe: vLLM calls it on one thread."""

    init_info_cls = RefitdInitInfo
    update_info_cls = RefitdUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.parallel_config, self._vllm_config = _versions.init_arguments(arguments)
        self.model: Any = arguments[-1]
        if self._vllm_config is None:
            self._vllm_config = getattr(self.model, evidence.CONFIGURATION, None)
        parameters = list(self.model.parameters())
        self.device: Any = parameters[0].device
        self.member: Engine | None = None
        self.delivery: Delivery | None = None
        self.weights_clean = getattr(self.model, evidence.ATTRIBUTE, None) is None  # random weights otherwise
        self.version: int | None = None
        self._incarnation: int | None = None

    # ---- attaching ----

    def init_transfer_engine(self, init_info: RefitdInitInfo) -> None:
        """Attaches and registers. Raises refitd.Error that names the tensor, parameter or field; the rank is detached then."""
        settings = init_info.settings()
        self.shutdown()
        started = time.perf_counter()
        if self.delivery is None:
            self.delivery = self._decide(settings)
        config = self.parallel_config
        rank, world_size, instance = place(config, settings.instance)
        dirty = init_info.dirty or not self.weights_clean
        held: dict[str, Any] = {} if dirty or self.version is None else {"held_version": self.version, "held_incarnation": self._incarnation}
        member = Engine(
            settings.group,
            instance=instance,
            rank=rank,
            world_size=world_size + init_info.drivers,
            socket=settings.socket,
            coordinator=settings.coordinator,
            device="host" if self.device.type == "cpu" else None,
            dirty=dirty,
            wait_seconds=settings.wait_seconds,
            reattach_seconds=settings.reattach_seconds,
            client="vllm",
            **held,
        )
        try:
            member.register_layout(self.delivery.tensors, self.delivery.boxes)
        except BaseException:
            member.close()
            raise
        self.member = member
        logger.info(
            "refitd: %s of group %s: %d parameters direct, %d processed (arena of %d bytes), %d constant, in %.0f ms",
            member.label, settings.group, len(self.delivery.direct), len(self.delivery.processed), self.delivery.arena_bytes,
            len(self.delivery.constant), 1e3 * (time.perf_counter() - started),
        )  # fmt: skip

    def _decide(self, settings: Settings) -> Delivery:
        if self._vllm_config is None:
            raise FailedPrecondition("this version of vLLM gives a backend no configuration: start it with --load-format refitd")
        source = settings.manifest or self._vllm_config.model_config.model
        manifest = read_manifest(source)
        made = decide(self.model, manifest, settings.arena_bytes, self.device)
        if not self.weights_clean:
            self._zero_padding(made)
            if made.arena:  # what vLLM's reload passes over is refused now, and not after the first version was committed
                with _versions.current_config(self._vllm_config):
                    _versions.reload(self.model, self._vllm_config.model_config, self.device, made.arena.items(), made.modules)
        return made

    def _zero_padding(self, made: Delivery) -> None:
        """Rows beyond the vocabulary are zeros after a checkpoint was loaded; here random weights were."""
        import torch

        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name in made.padded:
                named[name].zero_()

    # ---- updates ----

    def start_weight_update(self) -> None:
        """Nothing is due before Prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left: `receive_weights` returned with the version in place."""

    def receive_weights(self, update_info: RefitdUpdateInfo, load_weights: Any = None) -> None:
        """Takes one update. Returns when it is committed and processed.

        Raises UpdateAborted, with `dirty`, where it was lost; FailedPrecondition before anything is written where this rank is not
        attached; DeadlineExceeded where no update begins. A version that is in place already returns at once.
        """
        member = self.member
        if member is None:
            raise FailedPrecondition("this rank is not attached to refitd: call init_weight_transfer_engine first")
        wanted = update_info.version
        if wanted is not None and self.version == wanted and self.weights_clean:
            return
        prepare = self._await_prepare(member, wanted, update_info.wait_seconds)
        _synchronise(self.device)
        try:
            prepare.ready()
        except FailedPrecondition as error:
            if self.delivery is not None and member.weights.name == "GOOD":
                raise UpdateAborted(f"version {prepare.version} ended before this rank was ready: {error}", dirty=False) from error
            raise
        self._await_outcome(member, prepare)

    def _await_prepare(self, member: Engine, wanted: int | None, wait_seconds: float) -> Prepare:
        deadline = time.monotonic() + wait_seconds
        while True:
            event = member._next_unless(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no update{f' to version {wanted}' if wanted is not None else ''} began within {wait_seconds} s")
            if isinstance(event, Prepare) and (wanted is None or event.version >= wanted):
                if wanted is not None and event.version > wanted:
                    member._put_back(event)
                    raise UpdateAborted(f"version {wanted} is over: version {event.version} begins", dirty=not self.weights_clean)
                return event
            if isinstance(event, Aborted) and event.dirty:
                self.weights_clean = False

    def _await_outcome(self, member: Engine, prepare: Prepare) -> None:
        clean_before = self.weights_clean
        self.weights_clean = False  # until the outcome is known
        event = None
        deadline = time.monotonic() + prepare.remaining_seconds + MARGIN_SECONDS
        while event is None or not isinstance(event, (Committed, Aborted, Lost)):
            event = member._next_unless(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no outcome of version {prepare.version} in its time: the weights may be torn")
        if isinstance(event, Committed):
            self._process()
            self.version, self._incarnation, self.weights_clean = event.version, event.incarnation, True
            return
        dirty = event.dirty if isinstance(event, Aborted) else event.weights.name != "GOOD"
        self.weights_clean = clean_before and not dirty
        raise UpdateAborted(f"version {prepare.version}: {event.reason}", dirty=dirty)

    def _process(self) -> None:
        """Brings the arena's tensors into the modules. An exception leaves the rank dirty; it must attach anew."""
        assert self.delivery is not None
        try:
            with _versions.current_config(self._vllm_config):
                memories = [(layer, _tensors_of(layer)) for layer in self.delivery.attention]
                if self.delivery.arena:
                    self._reload()
                else:
                    self._process_attention()
                for layer, before in memories:
                    _keep_memory(layer, before)
                for layer in self.delivery.tied:
                    layer.quant_method.process_weights_after_loading(layer)
            _synchronise(self.device)
        except BaseException:
            self.shutdown()
            raise

    def _reload(self) -> None:
        assert self.delivery is not None
        delivery = self.delivery
        _versions.reload(self.model, self._vllm_config.model_config, self.device, delivery.arena.items(), delivery.modules)

    def _process_attention(self) -> None:
        """Attention layers keep values that are made of other layers' weights. vLLM's reload makes them anew; without one, this does."""
        import torch

        assert self.delivery is not None
        evident = getattr(self.model, evidence.ATTRIBUTE, None)
        for layer in self.delivery.attention:
            if evident is None or evident.get(id(layer)):
                with torch.no_grad():
                    layer.process_weights_after_loading(self._vllm_config.model_config.dtype)

    # ---- the rest ----

    def weights_went(self) -> None:
        """Says that the memory no longer holds the weights (sleep of level 2): the rank attaches as dirty next."""
        self.weights_clean = False

    def status(self) -> dict[str, Any]:
        return {
            "attached": self.member is not None,
            "clean": self.weights_clean,
            "version": self.version,
            "delivery": None if self.delivery is None else self.delivery.summary(),
        }

    def shutdown(self) -> None:
        """Detaches; the weights stay."""
        member, self.member = self.member, None
        if member is not None:
            member.close()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM until 0.27."""
        raise NotImplementedError("trainers of the backend refitd use refitd.Trainer")


def place(config: Any, instance: str) -> tuple[int, int, str]:
    """Rank, number of ranks and instance of a worker, without the driver, from vLLM's parallel config."""
    if getattr(config, "data_parallel_external_lb", False) or getattr(config, "data_parallel_hybrid_lb", False):
        return config.rank % config.world_size, config.world_size, f"{instance}-dp{config.data_parallel_index}"
    replicas = config.data_parallel_size
    index = getattr(config, "data_parallel_index", 0) if replicas > 1 else 0
    return index * config.world_size + config.rank, replicas * config.world_size, instance


def _tensors_of(layer: Any) -> dict[str, Any]:
    import torch

    held = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    return {**held, **{name: t for name, t in (*layer._parameters.items(), *layer._buffers.items()) if t is not None}}


def _keep_memory(layer: Any, before: dict[str, Any]) -> None:
    """Puts what post-processing made into the memory that CUDA graphs know."""
    import torch

    now = _tensors_of(layer)
    for name, old in before.items():
        new = now.get(name)
        if new is None or new is old or (new.shape, new.dtype, new.stride()) != (old.shape, old.dtype, old.stride()):
            continue
        with torch.no_grad():
            old.copy_(new)
        setattr(layer, name, old)


def _synchronise(device: Any) -> None:
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize()


__all__ = ["RefitdBackend", "RefitdInitInfo", "RefitdUpdateInfo"]
