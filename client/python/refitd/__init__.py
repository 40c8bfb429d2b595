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

from typing import Any

from ._core.member import TLS, Connect, GroupSpec
from .engine import Aborted, Committed, Draining, Engine, Event, Joiner, Lost, Part, Prepare, Reattached, Staged, View, Weights
from .errors import (
    AlreadyExists, Cancelled, Closed, DataLoss, DeadlineExceeded, Error, FailedPrecondition, Forked, Internal, InvalidArgument, NotFound,
    OutOfRange, PermissionDenied, ResourceExhausted, StagingWarning, Status, Suspect, Unauthenticated, Unavailable, Unimplemented, Unknown,
    UpdateAborted,
)  # fmt: skip
from .layout import Box, Derived, Layout, PushedTensors, TensorSpec
from .layout.capture import Captured, capture
from .layout.cuda import CudaMemory
from .layout.memory import FilledMemory, HostMemory, Region, RegionMemory, empty, locate
from .layout.placement import adopt
from .layout.shards import Shard
from .serving.rank import EngineLoop
from .trainer import InstanceOutcome, Trainer, Update, UpdateResult, replace_group


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from ._core.native import library_version

        return library_version()
    raise AttributeError(f"module 'refitd' has no attribute {name!r}")


__all__ = [
    "Aborted", "AlreadyExists", "Box", "Cancelled", "Captured", "Closed", "Committed", "Connect", "CudaMemory", "DataLoss",
    "DeadlineExceeded", "Derived", "Draining", "Engine", "EngineLoop", "Error", "Event", "FailedPrecondition", "FilledMemory", "Forked", "GroupSpec",
    "HostMemory", "InstanceOutcome", "Internal", "InvalidArgument", "Joiner", "Layout", "Lost", "NotFound", "OutOfRange", "Part",
    "PermissionDenied", "Prepare", "PushedTensors", "Reattached", "Region", "RegionMemory", "ResourceExhausted", "Shard", "Staged",
    "StagingWarning", "Status", "Suspect", "TLS", "TensorSpec", "Trainer", "Unauthenticated", "Unavailable", "Unimplemented", "Unknown", "Update",
    "UpdateAborted", "UpdateResult", "View", "Weights", "adopt", "capture", "empty", "locate", "replace_group",
]  # fmt: skip
