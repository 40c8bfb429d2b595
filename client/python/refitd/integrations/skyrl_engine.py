"""SkyRL 0.4.0's weight sync through refitd, by a trainer engine of vLLM (refitd.integrations.vllm.trainer). refitd.integrations.skyrl installs it.

SkyRL has a closed list of backends. So what is SkyRL's own and not part of an interface is used: the functions `weight_sync.get_transfer_strategy` and
`weight_senders._build_sender_init_info` are replaced, `weight_sync._VLLM_RECEIVE_BACKENDS` gets an entry, and engines have the attributes of
`weight_senders.SkyrlTrainerCapabilities`, which SkyRL's workers read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync import weight_senders
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from ..errors import Unimplemented
from ..layout.placement import adopt
from ..layout.shards import MadeMapping
from ..trainer import Trainer, UpdateResult
from .skyrl import BACKEND, installed, prefixed
from .vllm.trainer import RefitdTrainerEngine, RefitdTrainerInitInfo

_TRAINER_BACKEND = "skyrl_refitd"


def hook() -> None:
    """Makes the backend known to SkyRL and to vLLM in this process, once."""
    strategy, build = weight_sync.get_transfer_strategy, weight_senders._build_sender_init_info

    def choose(weight_sync_backend: str, colocate_all: bool) -> str:
        return BACKEND if weight_sync_backend == BACKEND else str(strategy(weight_sync_backend, colocate_all))

    def init_info(*, backend: str, **options: Any) -> Any:
        return _init_info(**options) if backend == BACKEND else build(backend=backend, **options)

    weight_sync.get_transfer_strategy = choose
    weight_sync._VLLM_RECEIVE_BACKENDS[BACKEND] = BACKEND
    weight_senders._build_sender_init_info = init_info
    WeightTransferTrainerFactory.register_engine(_TRAINER_BACKEND, Engine)


def _init_info(*, ie_cfg: Any, rank: int, server_urls: Sequence[str], **_: Any) -> tuple[InitInfo, Callable[..., list[dict[str, Any]]]]:
    """In place of SkyRL's own function: the init info of a trainer rank, and what makes of the engines' init info that of each server."""
    if getattr(ie_cfg, "speculative_config", None) is not None:
        raise Unimplemented("speculative_config: refitd does not deliver the weights of draft models", culprit="speculative_config")
    settings = installed()
    made = {"update_seconds": settings.update_seconds, "device": settings.device, "connect": settings.connect, "spec": settings.spec}
    info = InitInfo(settings.group, {}, settings.sharded, made, len(server_urls), settings.first_version, rank=rank)
    return info, lambda given, urls, _: [{**given, "instance": f"skyrl-{i}"} for i in range(len(urls))]


@dataclass
class InitInfo(RefitdTrainerInitInfo):
    """Beside that of every trainer: `servers`, each of which is an instance, and `first_version`, as in refitd.integrations.skyrl.install."""

    backend: ClassVar[str] = _TRAINER_BACKEND

    servers: int = 1
    first_version: int | None = field(default=None)


class Engine(weight_senders.SkyrlTrainerCapabilities, RefitdTrainerEngine):
    """A trainer rank, as SkyRL's workers have it."""

    init_info_cls = InitInfo
    framework = "SkyRL"

    def __init__(self, init_info: InitInfo, client: Any, source: Any) -> None:
        super().__init__(init_info, client, source)
        self._servers, self._first_version = init_info.servers, init_info.first_version
        self._ranks.compare(first_version=init_info.first_version)

    def send_weights(self, version: int | None = None, *, note: str | None = None) -> UpdateResult:
        """As RefitdTrainerEngine.send_weights(); SkyRL passes no version, so that `first_version` is the wish for the first."""
        if version is None:
            version, self._first_version = self._first_version, None
        return super().send_weights(version, note=note)

    def _attached_trainer(self) -> Trainer:
        return installed().trainer(self.rank, self._world_size, self._servers)

    def _pieces(self) -> Callable[[], Any] | None:
        """The model of SkyRL's FSDP source, whose tensors are DTensors."""
        model = getattr(self.source, "model", None)
        if not isinstance(model, torch.nn.Module):
            return super()._pieces()
        prefix = getattr(self.source, "weight_prefix", "")

        def find() -> MadeMapping:
            adopt(model)
            return prefixed(model, prefix)

        return find

    def _register_pieces(self, trainer: Trainer, found: Any) -> None:
        dtypes = {one.name: getattr(torch, one.dtype.removeprefix("torch.")) for one in self._declared}  # whatever the model has
        trainer.register(found, exceptions=dtypes, any_cast=list(dtypes))

