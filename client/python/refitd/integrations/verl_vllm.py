"""verl's adapter of vLLM with one more wire format, for weights that refitd writes where vLLM's parameters are. Written for verl 0.9.1
and vLLM 0.25 and later, started with `rollout.engine_kwargs.vllm.weight_transfer_config={"backend": "refitd"}`.

vLLM's processes are attached for one sync at a time: verl's manager may put vLLM to sleep before it, which moves the parameters'
memory, and may take a replica away after it.
"""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout import base
from verl.workers.rollout.vllm_rollout import vllm_rollout

from ..errors import FailedPrecondition
from .exports import IN_PLACE, Settings, set_adapter


def install() -> None:
    """Makes verl build its rollouts of vLLM with refitd's adapter, in this process."""
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.ServerAdapter"


class ServerAdapter(vllm_rollout.ServerAdapter):
    """This is verl's adapter for verl's own wire formats. Among the ranks of a replica only the one with the server does something."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._take_seconds = 0.0
        set_adapter(self)

    def attach(self, settings: Settings) -> None:
        """Attaches the replica's processes, as one instance whose weights are dirty until the sync has ended. They wait for
        `settings.begin_seconds` for the actor to begin."""
        self._take_seconds = settings.begin_seconds
        if not self._ensure_server_handle():
            return
        init_info = settings.init_info(f"verl-replica-{self.replica_rank}")
        ray.get(self.server_handle.collective_rpc.remote("init_weight_transfer_engine", kwargs={"init_info": init_info}))

    async def update_weights(
        self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any
    ) -> None:
        """Takes one sync. With `IN_PLACE` nothing comes in `weights`. Raises what vLLM's processes raise; they are detached then."""
        if wire_format != IN_PLACE:
            await super().update_weights(weights, global_steps=global_steps, wire_format=wire_format, **options)
            return
        async for name, _ in weights:
            raise FailedPrecondition(f"tensor '{name}' came through the worker, and the weights are taken in place", tensor=name)
        if not self._has_server:
            return
        await self._execute_method("start_weight_update")
        update_info = {"wait_seconds": self._take_seconds, "detach": True}
        await self._execute_method("update_weights", kwargs={"update_info": update_info})
        await self._execute_method("finish_weight_update")
        await self.server_handle.clear_kv_cache.remote()
        if global_steps is not None:
            await self.server_handle.set_global_steps.remote(global_steps)
