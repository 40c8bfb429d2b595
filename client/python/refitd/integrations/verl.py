"""verl's weight sync through refitd: the checkpoint engine `refitd`, written for verl 0.9.1.

In verl's configuration, and nothing else:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: refitd
      custom_backend_module: refitd.integrations.verl
      engine_kwargs: {refitd: {group: policy, socket: /run/refitd/refitd.sock}}

verl's manager drives it. The actor yields full tensors, and its rank 0 pushes them in packed buckets; the other ranks only gather.
Each rollout worker takes them as one engine instance, and hands them to verl's own adapter of vLLM, SGLang or TensorRT-LLM.

With `in_place: true` and vLLM as the rollout, the workers take nothing: vLLM's own processes attach by refitd's backend (refitd.integrations.vllm),
and the daemon writes their parameters where they are. For that, verl's adapter of vLLM gets one more wire format (vLLM 0.25 and later, started
with `rollout.engine_kwargs.vllm.weight_transfer_config={"backend": "refitd"}`). vLLM's processes are attached for one sync at a time: verl's
manager may put vLLM to sleep before it, which moves the parameters' memory, and may take a replica away after it.

Of verl's inside, `in_place` uses `verl.workers.rollout.base._ROLLOUT_REGISTRY`, and of verl's ServerAdapter of vLLM the methods `_ensure_server_handle` and
`_execute_method`.
"""

from __future__ import annotations

import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from ..engine import Engine
from ..errors import Error, FailedPrecondition, InvalidArgument
from ..trainer import Trainer
from . import Settings, known_version, next_version, on_thread, receive

BACKEND = "refitd"
# The wire format by which nothing comes through the worker; refitd's adapter of vLLM knows it.
IN_PLACE = "refitd_in_place"
_WHERE = "engine_kwargs.refitd"


@dataclass(frozen=True)
class Place:
    """A worker's part in one sync. `instances`: how many engine instances must take part; `version`: the group's before the sync, if known."""

    role: str
    rank: int
    world_size: int
    instances: int
    version: int | None


@CheckpointEngineRegistry.register(BACKEND)
class RefitdCheckpointEngine(CheckpointEngine):
    """A trainer rank or a rollout worker of one group; `init_process_group` decides which of the two.

    Not thread-safe: verl calls it from one worker. A trainer rank stays attached; a rollout worker is attached during a sync only, so
    that replicas come and go between syncs.
    """

    def __init__(self, bucket_size: int = 0, *, is_master: bool = False, in_place: bool = False, **options: object) -> None:
        """Attaches nothing yet. The options are equal on all workers, because verl makes all workers from one configuration.

        `bucket_size`, `is_master`: given by verl, not used: tensors are packed into the daemon's slots. `in_place`: vLLM's own processes
        take the weights. `options`: as in refitd.integrations.Settings.

        Raises InvalidArgument that names the option.
        """
        self._settings = Settings.of(_WHERE, options)
        self.group = self._settings.group
        self.in_place = in_place
        self.wire_format = IN_PLACE if in_place else "named_tensors"
        self._sender = self._settings.sender(_WHERE, "the actor")
        self._place: Place | None = None
        self._trainer: Trainer | None = None
        self._engine: Engine | None = None
        self._committed: int | None = None
        # Worker processes have no name of their own that stays the same when replicas are added and removed.
        self._instance = f"verl-{uuid.uuid4().hex[:12]}"
        if in_place:
            _use_adapter_of_vllm()

    # ---- what verl's manager calls, in this order, in each sync ----

    def prepare(self) -> dict[str, Any]:
        """Returns this worker's entry of `build_topology`'s metadata. Detaches a worker that a failed sync left attached."""
        self._leave()
        self._place = None
        adapter = _adapter() if self.in_place else None
        return {
            "group": self.group,
            "in_place": self.in_place,
            "version": self._known_version(),
            "replica": None if adapter is None else adapter.replica_rank,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Places, by argument of `init_process_group`, of the actor's workers and of the rollout's.

        Raises InvalidArgument, naming the worker, where a worker is missing or was configured otherwise than the first.
        """
        count = actor_wg_world_size + rollout_world_size
        if len(metadata) != count:
            raise InvalidArgument(f"metadata of {len(metadata)} workers, and there are {count}", culprit="metadata")
        for i, of_worker in enumerate(metadata):
            who = f"actor rank {i}" if i < actor_wg_world_size else f"rollout worker {i - actor_wg_world_size}"
            for key in ("group", "in_place"):
                if not isinstance(of_worker, dict) or of_worker.get(key) != metadata[0][key]:
                    raise InvalidArgument(f"{who}: {key} is not that of actor rank 0, {metadata[0][key]!r}", culprit=who)
        rollouts = metadata[actor_wg_world_size:]
        instances = len({of_worker["replica"] for of_worker in rollouts}) if metadata[0]["in_place"] else rollout_world_size
        if not instances:
            raise InvalidArgument("there is no rollout worker", culprit="rollout_world_size")
        known = max((of_worker["version"] for of_worker in metadata if of_worker["version"] is not None), default=None)

        def places(role: str, world_size: int) -> dict[str, list[Any]]:
            return {
                "role": [role] * world_size,
                "rank": list(range(world_size)),
                "world_size": [world_size] * world_size,
                "instances": [instances] * world_size,
                "version": [known] * world_size,
            }

        return places("trainer", actor_wg_world_size), places("engine", rollout_world_size)

    def init_process_group(self, *, role: str, rank: int, world_size: int, instances: int, version: int | None = None) -> None:
        """Attaches this worker. All workers of a sync call it at the same time: engines wait for the group, which trainers make.

        Raises what attaching raises, and InvalidArgument where a trainer was given the place of another rank.
        """
        place = Place(role, rank, world_size, instances, version)
        if role == "trainer":
            self._sender.join(place.rank, place.world_size)
            self._attach_trainer(place)
        elif self.in_place:
            self._attach_in_place()
        else:
            self._attach_engine()
        self._place = place

    def finalize(self) -> None:
        """Detaches a rollout worker. A trainer rank stays attached."""
        self._leave()

    async def send_weights(self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None) -> dict[str, float]:
        """Installs the tensors as the next version in every engine. Every trainer rank calls it, with the same tensors in one order.

        The version is `global_steps` where that is greater than the group's version, else the number after the latter. Returns
        metrics for verl. The tensors' bytes are read before the next tensor is taken from `weights`. A failure is raised on every rank, as in
        refitd.integrations.Sender.send, before verl resumes generation.
        """
        place, trainer = self._place, self._trainer
        if place is None or trainer is None:
            raise FailedPrecondition("send_weights: init_process_group did not make this worker a trainer rank")
        known = place.version if place.version is not None else trainer.group_version
        version = next_version(known, global_steps)
        note = "" if global_steps is None else f"verl's global step {global_steps}"
        result = await on_thread(self._sender.send, trainer, place.instances, version, weights, note)
        self._committed = version
        return {"refitd/version": version, "refitd/seconds": result.seconds, "refitd/bytes": result.bytes}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of one sync as they come, each in memory of its own, and returns when the version is committed.

        Yields nothing with `in_place`. Raises DeadlineExceeded where the actor does not begin within `begin_seconds`, UpdateAborted,
        also after tensors were yielded: the engine's weights are then torn until the next sync. A caller that gives up fails the sync.
        """
        if self.in_place:
            return
        member = self._engine
        if member is None:
            raise FailedPrecondition("receive_weights: init_process_group did not make this worker an engine")
        # verl's adapter of SGLang keeps tensors until it has a bucket full of them.
        async with aclosing(receive(member, begin_seconds=self._settings.begin_seconds, who="the actor", keep=True)) as batches:
            async for tensors in batches:
                for name, tensor in tensors:
                    yield name, tensor

    # ---- attaching ----

    def _known_version(self) -> int | None:
        """The group's version as far as this trainer rank knows; forgets a trainer whose lease ended."""
        if self._trainer is None:
            return None
        try:
            self._trainer.check_health()
        except Error:
            self._trainer.close()
            self._trainer = None
            return None
        return known_version(self._trainer, self._committed)

    def _attach_trainer(self, place: Place) -> None:
        trainer = self._trainer
        if trainer is not None and (trainer.rank, trainer.world_size) != (place.rank, place.world_size):
            trainer.close()
            trainer = self._trainer = None
        if trainer is None:
            self._trainer = self._settings.trainer("verl", place.rank, place.world_size)

    def _attach_engine(self) -> None:
        self._engine = self._settings.engine("verl", self._instance)

    def _attach_in_place(self) -> None:
        adapter = _adapter()
        if adapter is None:
            raise FailedPrecondition("in_place: this worker's rollout is not vLLM's, or was made before refitd.integrations.verl was imported")
        adapter.attach(self._settings)

    def _leave(self) -> None:
        """Detaches an engine."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


# ---- verl's adapter of vLLM ----

# verl's adapter of vLLM in this process, if it is refitd's: the checkpoint engine does not get it.
_adapter: Callable[[], Any] = lambda: None  # noqa: E731


def _use_adapter_of_vllm() -> None:
    """Makes verl build its rollouts of vLLM with refitd's adapter, in this process. verl finds the class by the name
    `refitd.integrations.verl.ServerAdapter`, which is a global of this module from then on."""
    import ray
    from verl.workers.rollout import base
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    class ServerAdapter(vllm_rollout.ServerAdapter):
        """For verl's own wire formats this is verl's adapter. Of the ranks of a replica, only the rank with the server does something."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self._take_seconds = 0.0
            global _adapter
            _adapter = weakref.ref(self)

        def attach(self, settings: Settings) -> None:
            """Attaches the replica's processes, as one instance whose weights are dirty until the sync has ended. They wait for
            `settings.begin_seconds` for the actor to begin."""
            self._take_seconds = settings.begin_seconds
            if not self._ensure_server_handle():
                return
            init_info = settings.init_info(f"verl-replica-{self.replica_rank}")
            ray.get(self.server_handle.collective_rpc.remote("init_weight_transfer_engine", kwargs={"init_info": init_info}))

        async def update_weights(self, weights: Any, global_steps: int | None = None, wire_format: str = "named_tensors", **options: Any) -> None:
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

    globals()["ServerAdapter"] = ServerAdapter
    base._ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.ServerAdapter"
