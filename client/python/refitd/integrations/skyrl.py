"""SkyRL's weight sync through refitd: versions 0.3.0 (refitd.integrations.skyrl_strategy) and 0.4.0 (refitd.integrations.skyrl_engine).

In every process of training, before workers are built, for instance in a Ray worker_process_setup_hook:

    import refitd.integrations.skyrl
    refitd.integrations.skyrl.install("policy")                  # or install("policy", sharded=True)

and in SkyRL's configuration `generator.inference_engine.weight_sync_backend=refitd`. The engines are vLLM's with refitd's backend
(refitd.integrations.vllm). SkyRL's initialisation gives each engine its group; at each sync rank 0 makes the workers of each engine take the version,
by the calls that SkyRL's own senders make. SkyRL pauses the engines before a sync and resumes them afterwards; after a sync
that failed, install() keeps it from resuming them, until a later sync succeeds: their weights may be of two versions.

Without `sharded`, SkyRL gathers full tensors as ever, and rank 0 pushes them. With `sharded` nothing is gathered: each rank registers the
DTensors of the model that SkyRL's extractor or source has. LoRA adapters go SkyRL's own way.

Of SkyRL's inside this uses `WorkerDispatch._broadcast_to_inference_engines` and `RemoteInferenceClient.resume_generation`, in whose places it puts its own.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from dataclasses import dataclass, replace
from typing import Any

from .._core.member import Connect, GroupSpec
from ..errors import FailedPrecondition
from ..layout.shards import MadeMapping, MadeOf
from ..trainer import Trainer

BACKEND = "refitd"

logger = logging.getLogger("refitd.integrations.skyrl")


@dataclass(frozen=True)
class Settings:
    """The arguments of install()."""

    group: str
    sharded: bool = False
    first_version: int | None = None
    update_seconds: float = 600.0
    spec: GroupSpec = GroupSpec()
    device: str | None = None
    connect: Connect = Connect()

    def trainer(self, rank: int, world_size: int, instances: int) -> Trainer:
        """Attaches a trainer rank of a group with so many engines."""
        spec = replace(self.spec, min_instances=instances)
        return Trainer(self.group, rank=rank, world_size=world_size, spec=spec, device=self.device, connect=self.connect)


_settings: Settings | None = None
# The attribute of SkyRL's client of the engines: whether the last sync by refitd failed.
_FAILED_ATTRIBUTE = "_refitd_sync_failed"


def install(
    group: str,
    *,
    sharded: bool = False,
    first_version: int | None = None,
    update_seconds: float = 600.0,
    spec: GroupSpec = GroupSpec(),
    device: str | None = None,
    socket: str | None = None,
    connect: Connect = Connect(),
) -> None:
    """Makes `weight_sync_backend=refitd` known to SkyRL in this process. Equal on all ranks; a later call changes later senders.

    `sharded`: move shards as they are, for FSDP2 models. `first_version`: of the first sync, where it is greater than the group's version; each
    further sync has the next. None: the version after the group's, also after a restart of training. `update_seconds`: the longest that a rank waits
    for the others, and then for the engines. `spec`, `device`, `socket`, `connect`: as in refitd.Trainer; `spec.min_instances` is the number of
    engines, whatever it says.
    """
    global _settings
    if _settings is None:
        # SkyRL 0.4.0 has no strategies, and drives vLLM's trainer engines.
        has_strategies = importlib.util.find_spec("skyrl.backends.skyrl_train.weight_sync.transfer_strategy") is not None
        if not has_strategies:
            importlib.import_module(".vllm", __package__).register()
        importlib.import_module(".skyrl_strategy" if has_strategies else ".skyrl_engine", __package__).hook()
        _keep_paused()
    _settings = Settings(group, sharded, first_version, update_seconds, spec, device, connect.to(socket))


def installed() -> Settings:
    """The settings of install(); raises FailedPrecondition where it was not called."""
    if _settings is None:
        raise FailedPrecondition("refitd.integrations.skyrl.install(group) was not called in this process")
    return _settings


def prefixed(model: Any, prefix: str) -> MadeMapping:
    """What Trainer.register takes of a model whose tensors have names with this prefix in the engines."""
    tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    return MadeMapping(tensors, MadeOf([model], functools.partial(prefixed, model, prefix)))


def _keep_paused() -> None:
    """Keeps SkyRL's client from resuming generation after a sync by refitd that failed: SkyRL resumes however a sync ended."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    broadcast, resume = WorkerDispatch._broadcast_to_inference_engines, RemoteInferenceClient.resume_generation

    @functools.wraps(broadcast)
    def broadcast_and_note(self: Any, inference_engine_client: Any, *arguments: Any, **options: Any) -> Any:
        if self.cfg.generator.inference_engine.weight_sync_backend != BACKEND:
            return broadcast(self, inference_engine_client, *arguments, **options)
        try:
            result = broadcast(self, inference_engine_client, *arguments, **options)
        except BaseException:
            setattr(inference_engine_client, _FAILED_ATTRIBUTE, True)
            raise
        setattr(inference_engine_client, _FAILED_ATTRIBUTE, False)
        return result

    @functools.wraps(resume)
    async def resume_unless_failed(self: Any) -> Any:
        if getattr(self, _FAILED_ATTRIBUTE, False):
            logger.warning("refitd: the sync failed, and generation stays paused until one succeeds")
            return {}
        return await resume(self)

    WorkerDispatch._broadcast_to_inference_engines = broadcast_and_note
    RemoteInferenceClient.resume_generation = resume_unless_failed
