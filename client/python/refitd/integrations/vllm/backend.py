"""The weight-transfer backend `refitd`: one rank of vLLM's, in its worker process, as one rank of a refitd instance.

vLLM makes it when the model is loaded, and calls it on the worker's own thread:

- `init_transfer_engine` attaches, decides the delivery of every parameter (`delivery.py`) and registers it.
- `receive_weights` takes one update: it answers Prepare, waits for the outcome, and processes what the arena brought.
- `shutdown` detaches; `init_transfer_engine` may attach anew afterwards.

Ranks: refitd's rank is vLLM's, `data_parallel_index * world_size + rank`, so that all replicas of one server commit together. Where
replicas have servers of their own (external load balancing), each is an instance, with "-dpN" after its name. With `drivers=1` the
instance has one more rank, the last, which registers nothing: the driver (`driver.py`), without which no version commits. Under an external
launcher each process has a driver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ...errors import FailedPrecondition
from ...serving.delivery import ATTRIBUTE, CONFIGURATION, Delivery, Steps, keep_memory, proved, synchronise, tensors_of, zero_padding
from ...serving.proof import Probe
from ...serving.rank import PREPARE_SECONDS, Rank
from ...serving.settings import Settings, read_manifest
from . import running, set_backend, versions
from .versions import by_external_launcher, make_exportable


@dataclass
class RefitdInitInfo(WeightTransferInitInfo):
    """The argument of `init_transfer_engine`: the fields of `settings.Settings`, where "" leaves the environment's value. `drivers`: ranks
    without weights that the instance has beside the workers'. `workers`: how many workers' ranks the instance has; 0: what their own
    configuration says. `dirty`: whether the weights are not one whole version."""

    group: str = ""
    instance: str = ""
    socket: str = ""
    coordinator: str = ""
    trainer_identity: str = ""
    manifest: str = ""
    arena_bytes: str | int = ""
    proof: str = ""
    logits: str = ""
    wait_seconds: str | float = ""
    reattach_seconds: str | float = ""
    drivers: int = 0
    workers: int = 0
    dirty: bool = False

    def settings(self) -> Settings:
        told = ("drivers", "workers", "dirty")
        return Settings.of({f.name: getattr(self, f.name) for f in fields(self) if f.name not in told}).checked()


@dataclass
class RefitdUpdateInfo(WeightTransferUpdateInfo):
    """`version`: to wait for; None: the next. `wait_seconds`: for the trainer to begin. `detach`: this rank detaches afterwards, however
    the update ended, for callers that attach it for each. `leave`: this rank only detaches; for versions of vLLM (before 0.27) that have
    no call for it."""

    version: int | None = None
    wait_seconds: float = PREPARE_SECONDS
    detach: bool = False
    leave: bool = False
    update_kind: str = "dense"  # asked for by vLLM until 0.24
    num_updates_list: list[int] | None = field(default=None)


class RefitdBackend(WeightTransferEngine):
    """See the module. Not thread-safe: vLLM calls it on one thread."""

    init_info_cls = RefitdInitInfo
    update_info_cls = RefitdUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.parallel_config, self._vllm_config = versions.init_arguments(arguments)
        self.model: Any = arguments[-1]
        if self._vllm_config is None:
            self._vllm_config = getattr(self.model, CONFIGURATION, None)
        parameters = list(self.model.parameters())
        self.device: Any = parameters[0].device
        clean = getattr(self.model, ATTRIBUTE, None) is None  # random weights otherwise
        set_backend(self)
        self.rank = Rank(self.device, client="vllm", clean=clean, decide=self._decide, process=self._process, logits=self._logits)

    # ---- attaching ----

    def init_transfer_engine(self, init_info: RefitdInitInfo) -> None:
        """Attaches and registers. Raises refitd.Error that names the tensor, parameter or field; the rank is detached then."""
        settings = init_info.settings()
        versions.check_experts_stay(self.parallel_config)
        self._make_exportable()
        if self.rank.delivery is not None and not self.rank.clean:  # sleep of level 2 discarded the padding too
            zero_padding(self.model, self.rank.delivery)
        rank, world_size, instance = place(self.parallel_config, settings.instance, init_info.workers)
        self.rank.attach(settings, instance, rank, world_size + init_info.drivers, dirty=init_info.dirty)

    def _make_exportable(self) -> None:
        self.rank.detach()  # no daemon has the old memory
        synchronise(self.device)
        made = make_exportable(self.device.type)
        if made:
            logging.getLogger("vllm.refitd").info("refitd: %d bytes of weights in memory of sleep mode can be written by the daemon now", made)

    def _decide(self, settings: Settings) -> Delivery:
        if self._vllm_config is None:
            raise FailedPrecondition("this version of vLLM gives a backend no configuration: start it with --load-format refitd")
        draft = versions.draft_of(self._vllm_config)
        if draft is not None:
            raise FailedPrecondition(
                f"vLLM was started with a draft model (speculative_config, method '{draft}'), whose weights would stay as they are",
                culprit="speculative_config",
            )
        manifest = read_manifest(settings.manifest or self._vllm_config.model_config.model)
        steps = Steps(versions, self._process, self._process, self._load, lambda: self._probe(settings.proof == "require"))
        return proved(self.model, settings, manifest, self.device, self.rank.clean, steps)

    # ---- updates ----

    def start_weight_update(self) -> None:
        """Nothing is due before Prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left: `receive_weights` returned with the version in place."""

    def receive_weights(self, update_info: RefitdUpdateInfo, load_weights: Any = None) -> None:
        """Takes one update; see `rank.Rank.take`."""
        if update_info.leave:
            self.rank.detach()
            return
        try:
            self.rank.take(update_info.version, update_info.wait_seconds)
        finally:
            if update_info.detach:
                self.rank.detach()

    def _logits(self) -> Any:
        return self._probe().run()

    def _probe(self, required: bool = False) -> Probe:
        """How the model is run alone. Attention and compiled code on made-up requests have not been tried on a GPU: there only who asks for it gets
        it (`required`)."""
        return running.probe_of(self.model, self._vllm_config, self.device, thorough=required or self.device.type == "cpu")

    def _process(self, delivery: Delivery) -> None:
        """Brings what the daemon wrote beside the modules into them. Attention comes last: it reads other modules."""
        with self._derived(delivery), versions.prepacked((entry.module, entry.filled) for entry in delivery.prepacked):
            if delivery.arena:
                versions.reload(self.model, self._vllm_config.model_config, self.device, delivery.arena.items(), delivery.modules)
            else:
                self._process_attention(delivery)

    def _load(self, delivery: Delivery, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """Puts all of a checkpoint's tensors there as vLLM's own weight updates do; returns the modules that these pass over."""
        wanted: dict[str, Any] = {}
        seen: set[int] = set()
        for name, layer in self.model.named_modules():
            own = {id(tensor) for tensor in layer._parameters.values() if tensor is not None} - seen
            seen |= own
            if own and getattr(layer, "quant_method", None) is not None:  # not those whose parameters are all another's
                wanted[name] = layer
        with self._derived(delivery):
            return versions.reload(self.model, self._vllm_config.model_config, self.device, tensors, wanted, must=False)

    @contextmanager
    def _derived(self, delivery: Delivery) -> Iterator[None]:
        """Around what processes modules: what attention and tied modules derive gets into its old memory."""
        with versions.current_config(self._vllm_config):
            memories = [(layer, tensors_of(layer)) for layer in delivery.attention]
            yield
            for layer, before in memories:
                keep_memory(layer, before)
            for layer in delivery.tied:
                layer.quant_method.process_weights_after_loading(layer)

    def _process_attention(self, delivery: Delivery) -> None:
        """Attention layers keep values that are made of other layers' weights. vLLM's reload makes them anew; without one, this does."""
        import torch

        evident = getattr(self.model, ATTRIBUTE, None)
        for layer in delivery.attention:
            if evident is None or evident.get(id(layer)):
                with torch.no_grad():
                    layer.process_weights_after_loading(self._vllm_config.model_config.dtype)

    # ---- the rest ----

    def weights_went(self) -> None:
        """Says that the memory no longer holds the weights (sleep of level 2): the rank attaches as dirty next."""
        self.rank.clean = False

    def status(self) -> dict[str, Any]:
        return self.rank.status()

    def shutdown(self) -> None:
        """Detaches; the weights stay."""
        self.rank.detach()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM until 0.27."""
        raise NotImplementedError("trainers of the backend refitd use refitd.Trainer")


def place(config: Any, instance: str, workers: int = 0) -> tuple[int, int, str]:
    """Rank, number of ranks and instance of a worker, without the driver, from vLLM's parallel config.

    `workers`: of all replicas of the server together, as its driver knows; 0: the config says. A worker of a dense model does not know
    of other replicas: vLLM tells it that there is one, and only `data_parallel_index` is its own.
    """
    if by_external_launcher(config):
        return config.rank, config.world_size, instance
    if getattr(config, "data_parallel_external_lb", False) or getattr(config, "data_parallel_hybrid_lb", False):
        return config.rank % config.world_size, config.world_size, f"{instance}-dp{config.data_parallel_index}"
    replicas = workers // config.world_size if workers else config.data_parallel_size
    index = getattr(config, "data_parallel_index", 0) if replicas > 1 else 0
    return index * config.world_size + config.rank, replicas * config.world_size, instance


__all__ = ["RefitdBackend", "RefitdInitInfo", "RefitdUpdateInfo"]
