"""refitd: moves new weights from trainers into inference engines.

    trainer = refitd.Trainer("policy", rank=r, world_size=n)
    trainer.register(model.state_dict(), dtype=torch.bfloat16)
    result = trainer.refit(version=8)

    engine = refitd.Engine("policy", instance="vllm-0", rank=r, world_size=tp)
    engine.register(refitd.capture(model.load_weights, manifest))
    for event in engine: ...

torch and numpy are imported where they are used only. Errors are `refitd.Error`, with a subclass for each gRPC status.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .layout.records import Box, Layout, PushedTensors, TensorSpec
from .layout.cuda import CudaMemory
from .engine import Engine
from .errors import (
    AlreadyExists,
    Cancelled,
    Closed,
    DataLoss,
    DeadlineExceeded,
    Error,
    FailedPrecondition,
    Forked,
    Internal,
    InvalidArgument,
    NotFound,
    OutOfRange,
    PermissionDenied,
    ResourceExhausted,
    StagingWarning,
    Status,
    Suspect,
    Unauthenticated,
    Unavailable,
    Unimplemented,
    Unknown,
    UpdateAborted,
)
from ._core.events import Aborted, Committed, Draining, Event, Joiner, Lost, Part, Prepare, Reattached, View, Weights
from .layout.memory import FilledMemory, HostMemory, RegionMemory
from .layout.regions import Region, adopt, empty, locate
from ._core.tls import TLS
from .trainer import Trainer, replace_group
from ._core.update import InstanceOutcome, Update, UpdateResult

if TYPE_CHECKING:
    from .layout.capture import Captured, capture
    from .serving.loop import EngineLoop, engine_loop
    from .layout.shards import Shard


def __getattr__(name: str) -> Any:
    # Names that need torch are imported when they are first used.
    if name in ("capture", "Captured"):
        module = importlib.import_module(".layout.capture", __name__)  # which can be called
        return module if name == "capture" else module.Captured
    if name == "Shard":
        from .layout.shards import Shard

        return Shard
    if name in ("engine_loop", "EngineLoop"):
        from .serving import loop

        return getattr(loop, name)
    if name == "__version__":
        from ._core.abi import library

        return library().refit_version().decode()
    raise AttributeError(f"module 'refitd' has no attribute {name!r}")


__all__ = [
    "Aborted",
    "AlreadyExists",
    "Box",
    "Cancelled",
    "Captured",
    "Closed",
    "Committed",
    "CudaMemory",
    "DataLoss",
    "DeadlineExceeded",
    "Draining",
    "Engine",
    "EngineLoop",
    "Error",
    "Event",
    "FailedPrecondition",
    "FilledMemory",
    "Forked",
    "HostMemory",
    "InstanceOutcome",
    "Internal",
    "InvalidArgument",
    "Joiner",
    "Layout",
    "Lost",
    "NotFound",
    "OutOfRange",
    "Part",
    "PermissionDenied",
    "Prepare",
    "PushedTensors",
    "Reattached",
    "Region",
    "RegionMemory",
    "ResourceExhausted",
    "Shard",
    "StagingWarning",
    "Status",
    "Suspect",
    "TLS",
    "TensorSpec",
    "Trainer",
    "Unauthenticated",
    "Unavailable",
    "Unimplemented",
    "Unknown",
    "Update",
    "UpdateAborted",
    "UpdateResult",
    "View",
    "Weights",
    "adopt",
    "capture",
    "empty",
    "engine_loop",
    "locate",
    "replace_group",
]
