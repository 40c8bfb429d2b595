"""NeMo-RL's refit through refitd: a checkpoint engine, written for NeMo-RL of August 2026 (main, commit 7ea279a).

In NeMo-RL's configuration, for vLLM that is not colocated, and nothing else:

    policy.generation.refit_transport: "refitd.nemo_rl:Transport"
    policy.generation.refit_cfg:
      "refitd.nemo_rl:Transport": {group: policy, socket: /run/refitd/refitd.sock}

NeMo-RL's synchronizer drives it. The policy's workers yield full tensors, Megatron's and DTensor's alike, and rank 0 pushes them in
packed buckets; the other ranks only gather. Each of vLLM's workers is an engine instance, in its own process, and hands the tensors to
NeMo-RL's loader where they lie in the daemon's memory.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import aclosing
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from . import _exports
from ._exports import CONNECT_OPTIONS, TENSOR_COUNT, TRAINER_OPTIONS
from .engine import Engine
from .errors import Error, FailedPrecondition, InvalidArgument, UpdateAborted
from .trainer import Trainer


class Transport(CheckpointEngine):
    """A trainer rank or a rollout worker of one group, which of the two it is being told by `init_..._process_group`.

    Not thread-safe: NeMo-RL calls it from one worker. Workers stay attached between syncs, unless `release_after_refit`.
    """

    # Every rollout worker gets whole tensors: its loader takes what is its own.
    shard_expert_weights: bool = False

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        group: str = "",
        release_after_refit: bool = False,
        begin_seconds: float = 600.0,
        update_seconds: float = 600.0,
        verification: str | None = None,
        tensor_count: int = TENSOR_COUNT,
        dtype: str | None = None,
        exceptions: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Attaches nothing yet. Equal on all workers, as NeMo-RL makes them from one configuration.

        `bucket_size`: given by NeMo-RL, not used: tensors are packed into the daemon's slots. `group`: of refitd.
        `release_after_refit`: detach after each sync; NeMo-RL calls finalize() then. `begin_seconds`: how long a rollout worker waits
        for the policy to begin. `update_seconds`: of one sync, from its begin. `verification`: as of Trainer.update. `tensor_count`:
        how many tensors the first sync has at most; it takes the longer, the more it says. `dtype`: what floating-point tensors are
        cast to before they are sent ("bfloat16"); None: as the policy yields them. `exceptions`: dtypes of names, or of patterns as of
        fnmatch, that differ from it; "" leaves the tensor as it is. `options`: of refitd.Trainer and refitd.Engine (`socket`,
        `coordinator`, `device`, `wait_seconds`, `slot_bytes`, ...).

        Raises InvalidArgument that names the option.
        """
        where = 'refit_cfg["refitd.nemo_rl:Transport"]'
        if not group:
            raise InvalidArgument(f"{where}.group is missing", culprit="group")
        for name in options:
            if name not in TRAINER_OPTIONS:
                raise InvalidArgument(f"{where}.{name}: there is no such option", culprit=name)
        self.group = group
        self.release_after_refit = release_after_refit
        self._begin_seconds = begin_seconds
        self._options: dict[str, Any] = {"wait_seconds": begin_seconds, **options}
        casts = _exports.Casts(where, dtype, exceptions)
        self._sender = _exports.Sender(
            "the policy", casts, update_seconds=update_seconds, verification=verification, tensor_count=tensor_count
        )
        self._trainer: Trainer | None = None
        self._place: tuple[int, int] | None = None  # of a trainer rank: its number, and how many they are
        self._engine: Engine | None = None
        self._rollout: int | None = None  # of a rollout worker
        self._instances = 0
        self._committed: int | None = None

    # ---- what NeMo-RL's synchronizer calls ----

    def prepare(self) -> dict[str, Any]:
        """What all workers get of this one; NeMo-RL adds its rank."""
        return {"group": self.group}

    def init_policy_process_group(
        self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Attaches a policy worker. All workers call it at the same time: engines wait for the group, which trainers make.

        Raises what attaching raises, and InvalidArgument, naming the worker, where one is missing or was configured for another group.
        """
        self._check(metadata, train_world_size, rollout_world_size)
        self._sender.join(worker_rank, train_world_size)
        self._place, self._instances = (worker_rank, train_world_size), rollout_world_size
        self._attached_trainer()

    def init_rollout_process_group(
        self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> None:
        """Attaches a rollout worker, as init_policy_process_group does a policy's."""
        self._check(metadata, train_world_size, rollout_world_size)
        if not 0 <= rollout_rank < rollout_world_size:
            raise InvalidArgument(f"rollout_rank is {rollout_rank}, 0 to {rollout_world_size - 1} are possible", culprit="rollout_rank")
        self._rollout = rollout_rank
        self._attached_engine()

    def finalize(self) -> None:
        """Detaches this worker. The next sync begins with prepare()."""
        self._leave()
        self._place = self._rollout = None

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Installs the tensors as the next version in every rollout worker. Every policy worker calls it, with the same tensors in one
        order. The tensors' bytes are read before the next tensor is taken from `weights`.

        A failure is raised on every worker: InvalidArgument where a worker's tensors differ from those of rank 0, naming the tensor,
        where there are none or a name comes twice; UpdateAborted, also where a rollout worker was lost on the way; DeadlineExceeded,
        naming who was waited for, rollout workers that are missing for instance.
        """
        if self._place is None:
            raise FailedPrecondition("send_weights: init_policy_process_group did not make this worker a trainer rank")
        trainer = self._attached_trainer()
        known = self._sender.agree(trainer.world_size, _exports.known_version(trainer, self._committed))
        version = _exports.next_version(known)
        result = await self._sender.send_async(trainer, self._instances, version, weights)
        self._committed = version
        lost = next((outcome for outcome in result.instances if not outcome.committed), None)
        if lost is not None:
            raise UpdateAborted(f"version {version}: rollout worker '{lost.instance}' was lost: {lost.reason}", culprit=lost.instance)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields the tensors of one sync as they come, good until the next are asked for, and returns when the version is committed.

        Raises DeadlineExceeded where the policy does not begin within `begin_seconds`, UpdateAborted, also after tensors were yielded:
        the engine's weights are then torn until the next sync. A caller that gives up fails the sync.
        """
        if self._rollout is None:
            raise FailedPrecondition("receive_weight_batches: init_rollout_process_group did not make this worker an engine")
        member = self._attached_engine()
        async with aclosing(_exports.receive(member, begin_seconds=self._begin_seconds, who="the policy", keep=False)) as batches:
            try:
                async for batch in batches:
                    yield batch
            except BaseException:
                await batches.aclose()  # it gives the update up
                self._leave()  # the next sync attaches anew, whatever became of this lease
                raise

    # ---- inside ----

    def _check(self, metadata: list[Any], train_world_size: int, rollout_world_size: int) -> None:
        count = train_world_size + rollout_world_size
        if len(metadata) != count:
            raise InvalidArgument(f"metadata of {len(metadata)} workers, and there are {count}", culprit="metadata")
        for i, of_worker in enumerate(metadata):
            who = f"policy worker {i}" if i < train_world_size else f"rollout worker {i - train_world_size}"
            group = of_worker.get("group") if isinstance(of_worker, dict) else None
            if group != self.group:
                raise InvalidArgument(f"{who}: its group is {group!r}, this worker's is {self.group!r}", culprit=who)

    def _leave(self) -> None:
        for member in (self._trainer, self._engine):
            if member is not None:
                member.close()
        self._trainer = self._engine = None

    def _attached_trainer(self) -> Trainer:
        """This worker's trainer rank, attached anew where its lease ended."""
        assert self._place is not None
        rank, world_size = self._place
        if self._trainer is not None:
            try:
                self._trainer.check_health()
            except Error:
                self._leave()
        if self._trainer is None:
            # An update waits for all rollout workers: one that failed in the sync before attaches when it is asked to receive.
            self._trainer = Trainer(
                self.group, rank=rank, world_size=world_size, min_instances=self._instances, client="nemo-rl", **self._options
            )
        return self._trainer

    def _attached_engine(self) -> Engine:
        """This worker's engine, attached anew where it gave an update up or its lease ended."""
        if self._engine is None:
            options = {name: value for name, value in self._options.items() if name in CONNECT_OPTIONS}
            options.setdefault("device", _exports.rollout_device())
            # vLLM has loaded weights that are none of the group's versions, so the engine says that they are dirty.
            instance = f"nemo-rl-{self._rollout}"
            self._engine = Engine(self.group, instance=instance, staged=True, dirty=True, client="nemo-rl", **options)
        return self._engine
