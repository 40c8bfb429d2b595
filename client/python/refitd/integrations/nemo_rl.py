"""NeMo-RL's refit through refitd: a checkpoint engine, written for NeMo-RL of August 2026 (main, commit 7ea279a).

In NeMo-RL's configuration, for vLLM that is not colocated, and nothing else:

    policy.generation.refit_transport: "refitd.integrations.nemo_rl:Transport"
    policy.generation.refit_cfg:
      "refitd.integrations.nemo_rl:Transport": {group: policy, socket: /run/refitd/refitd.sock}

NeMo-RL's synchronizer drives it. The policy's workers yield full tensors, Megatron's and DTensor's alike, and rank 0 pushes them in
packed buckets; the other ranks only gather. Each of vLLM's workers is an engine instance, in its own process, and hands the tensors to
NeMo-RL's loader where they lie in the daemon's memory.

With `in_place: true` vLLM's workers take nothing in: each is attached by refitd's backend (refitd.integrations.vllm), which vLLM makes where
`policy.generation.vllm_kwargs.weight_transfer_config` is {"backend": "refitd"}, and the daemon writes the parameters where they are.
With `sharded: true` besides, the policy's workers register their DTensors, and nothing is gathered.

Of NeMo-RL's inside, `sharded` uses the local variables `model` and `target_dtype` of `dtensor_params_generator`, which its DTensor workers hand over.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any

import torch
from nemo_rl.utils.checkpoint_engines.base import CheckpointEngine

from ..engine import Engine
from ..errors import Error, FailedPrecondition, InvalidArgument, Unimplemented, UpdateAborted
from ..layout.placement import adopt
from ..trainer import Trainer
from . import Settings, known_version, next_version, on_thread, receive
from .vllm.versions import backend_here

_WHERE = 'refit_cfg["refitd.integrations.nemo_rl:Transport"]'


class Transport(CheckpointEngine):
    """A trainer rank or a rollout worker of one group; `init_..._process_group` decides which of the two.

    Not thread-safe: NeMo-RL calls it from one worker. Workers stay attached between syncs, unless `release_after_refit`.
    """

    # Every rollout worker gets whole tensors: its loader takes the worker's own shards.
    shard_expert_weights: bool = False

    def __init__(
        self, bucket_size: int = 0, *, release_after_refit: bool = False, in_place: bool = False, sharded: bool = False, **options: object
    ) -> None:
        """Attaches nothing yet. The options are equal on all workers, because NeMo-RL makes all workers from one configuration.

        `bucket_size`: given by NeMo-RL, not used: tensors are packed into the daemon's slots. `release_after_refit`: detach after each
        sync; NeMo-RL calls finalize() then. `in_place`, `sharded`: see the module. `options`: as in refitd.integrations.Settings.

        Raises InvalidArgument that names the option.
        """
        if sharded and not in_place:
            raise InvalidArgument(f"{_WHERE}.sharded needs in_place: engines that load full tensors can't take shards", culprit="sharded")
        settings = Settings.of(_WHERE, options)
        if settings.connect.wait_seconds is None:
            settings = replace(settings, connect=replace(settings.connect, wait_seconds=settings.begin_seconds))
        self._settings = settings
        self.group = self._settings.group
        self.release_after_refit = release_after_refit
        self.in_place, self.sharded = in_place, sharded
        self._sender = settings.sender(_WHERE, "the policy")
        self._trainer: Trainer | None = None
        self._registered: tuple[Trainer, torch.nn.Module] | None = None  # the trainer that registered shards, and their model
        self._place: tuple[int, int] | None = None  # a trainer rank's number, and how many trainer ranks there are
        self._engine: Engine | None = None
        self._backend: Any = None  # refitd's backend in vLLM, while it is attached
        self._rollout: int | None = None  # a rollout worker's number
        self._instances = 0
        self._committed: int | None = None
        self._syncs = 0

    # ---- what NeMo-RL's synchronizer calls ----

    def prepare(self) -> dict[str, Any]:
        """Returns the values that NeMo-RL passes from this worker to all workers, with this worker's rank.

        `ranks`: how many processes of vLLM one engine has; 0 where this worker is no process of vLLM.
        """
        return {"group": self.group, "in_place": self.in_place, "ranks": _ranks_of(backend_here()) if self.in_place else 0}

    def init_policy_process_group(self, *, worker_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        """Attaches a policy worker. All workers call it at the same time: engines wait for the group, which trainers make.

        Raises what attaching raises, and InvalidArgument, naming the worker, where a worker is missing or was configured for another group.
        """
        self._instances = self._check(metadata, train_world_size, rollout_world_size)
        self._sender.join(worker_rank, train_world_size)
        self._place = (worker_rank, train_world_size)
        self._attached_trainer()

    def init_rollout_process_group(self, *, rollout_rank: int, train_world_size: int, rollout_world_size: int, metadata: list[Any]) -> None:
        """Attaches a rollout worker, as init_policy_process_group does a policy's."""
        self._check(metadata, train_world_size, rollout_world_size)
        if not 0 <= rollout_rank < rollout_world_size:
            raise InvalidArgument(f"rollout_rank is {rollout_rank}, 0 to {rollout_world_size - 1} are possible", culprit="rollout_rank")
        self._rollout = rollout_rank
        if self.in_place:
            self._attached_backend()
        else:
            self._attached_engine()

    def finalize(self) -> None:
        """Detaches this worker. The next sync begins with prepare()."""
        self._leave()
        self._place = self._rollout = None

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None]) -> None:
        """Installs the tensors as the next version in every rollout worker. Every policy worker calls it, with the same tensors in one
        order. The tensors' bytes are read before the next tensor is taken from `weights`. With `sharded`, `weights` only
        leads to the model whose shards to install.

        A failure is raised on every worker, as in refitd.integrations.Sender.send: Unimplemented too where the model's shards can't be had, and
        UpdateAborted where a rollout worker was lost on the way.
        """
        if self._place is None:
            raise FailedPrecondition("send_weights: init_policy_process_group did not make this worker a trainer rank")
        trainer = self._attached_trainer()
        known = self._sender.agree(known_version(trainer, self._committed))
        version = next_version(known)
        self._syncs += 1
        note = f"NeMo-RL's sync {self._syncs} of this run"
        if self.sharded:
            result = await on_thread(self._sender.refit, trainer, self._instances, version, lambda: self._register(trainer, weights), note)
        else:
            result = await on_thread(self._sender.send, trainer, self._instances, version, weights, note)
        self._committed = version
        lost = next((outcome for outcome in result.instances if not outcome.committed), None)
        if lost is not None:
            raise UpdateAborted(f"version {version}: rollout worker '{lost.instance}' was lost: {lost.reason}", culprit=lost.instance)

    async def receive_weight_batches(self) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
        """Yields the tensors of one sync as they come, valid until the next are asked for, and returns when the version is committed.
        With `in_place` it yields nothing.

        Raises as refitd.integrations.receive does. A caller that gives up fails the sync.
        """
        if self._rollout is None:
            raise FailedPrecondition("receive_weight_batches: init_rollout_process_group did not make this worker an engine")
        if self.in_place:
            self._take_in_place()
            return
        member = self._attached_engine()
        async with aclosing(receive(member, begin_seconds=self._settings.begin_seconds, who="the policy", keep=False)) as batches:
            try:
                async for batch in batches:
                    yield batch
            except BaseException:
                await batches.aclose()  # fails the update
                self._leave()  # the next sync attaches anew, whatever became of this lease
                raise

    # ---- inside ----

    def _check(self, metadata: list[Any], train_world_size: int, rollout_world_size: int) -> int:
        """Checks the workers' metadata; returns the number of engine instances."""
        count = train_world_size + rollout_world_size
        if len(metadata) != count:
            raise InvalidArgument(f"metadata of {len(metadata)} workers, and there are {count}", culprit="metadata")
        for i, of_worker in enumerate(metadata):
            who = f"policy worker {i}" if i < train_world_size else f"rollout worker {i - train_world_size}"
            group = of_worker.get("group") if isinstance(of_worker, dict) else None
            if group != self.group:
                raise InvalidArgument(f"{who}: its group is {group!r}, this worker's is {self.group!r}", culprit=who)
            if bool(of_worker.get("in_place")) != self.in_place:
                raise InvalidArgument(f"{who}: in_place is {not self.in_place}, this worker's is {self.in_place}", culprit=who)
        if not self.in_place:
            return rollout_world_size
        rollouts = metadata[train_world_size:]
        for i, of_worker in enumerate(rollouts):
            who, ranks = f"rollout worker {i}", of_worker.get("ranks")
            if not ranks:
                raise InvalidArgument(f"{who}: {_NO_BACKEND}", culprit=who)
            if ranks != rollouts[0]["ranks"] or rollout_world_size % ranks:
                raise InvalidArgument(
                    f"{who}: its engine has {ranks} processes, that of rollout worker 0 {rollouts[0]['ranks']}, and there are "
                    f"{rollout_world_size} rollout workers",
                    culprit=who,
                )
        return rollout_world_size // int(rollouts[0]["ranks"])

    def _leave(self) -> None:
        """Detaches this worker."""
        for member in (self._trainer, self._engine):
            if member is not None:
                member.close()
        self._trainer = self._engine = None
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.shutdown()

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
            # An update waits for all rollout workers: a worker that failed in the sync before attaches when it is to receive.
            self._trainer = self._settings.trainer("nemo-rl", rank, world_size, min_instances=self._instances)
        return self._trainer

    def _attached_engine(self) -> Engine:
        """This worker's engine, attached anew where it gave an update up or its lease ended."""
        if self._engine is None:
            self._engine = self._settings.engine("nemo-rl", f"nemo-rl-{self._rollout}")
        return self._engine

    # ---- shards, and weights in place ----

    def _register(self, trainer: Trainer, weights: Any) -> None:
        """Registers the shards of the model whose tensors `weights` would gather, the first time."""
        model, dtype = _model_of(weights)
        if self._registered is not None and self._registered[0] is trainer and self._registered[1] is model:
            return
        adopt(model)
        dtype, exceptions = self._sender.casts.rules(dtype)
        trainer.register(model, dtype=dtype, exceptions=exceptions)
        self._registered = (trainer, model)

    def _attached_backend(self) -> Any:
        """vLLM's backend in this process, attached anew where the sync before failed."""
        if self._backend is None:
            backend = backend_here()
            if backend is None:
                raise FailedPrecondition(_NO_BACKEND)
            assert self._rollout is not None
            init_info = self._settings.init_info(f"nemo-rl-{self._rollout // _ranks_of(backend)}")
            backend.init_transfer_engine(backend.parse_init_info(init_info))
            self._backend = backend
        return self._backend

    def _take_in_place(self) -> None:
        """Lets vLLM's backend take one version, on this thread, which runs the model."""
        backend = self._attached_backend()
        try:
            backend.start_weight_update()
            backend.receive_weights(backend.parse_update_info({"wait_seconds": self._settings.begin_seconds}))
            backend.finish_weight_update()
        except BaseException:
            with suppress(Error):
                self._leave()
            raise


_NO_BACKEND = (
    "in_place: vLLM made no backend of refitd in this process: set policy.generation.vllm_kwargs.weight_transfer_config to "
    '{"backend": "refitd"}'
)


def _ranks_of(backend: Any) -> int:
    """Counts vLLM's processes in one engine; 0 without a backend."""
    if backend is None:
        return 0
    parallel = backend.parallel_config
    if getattr(parallel, "data_parallel_external_lb", False) or getattr(parallel, "data_parallel_hybrid_lb", False):
        return int(parallel.world_size)
    return int(parallel.world_size) * int(parallel.data_parallel_size)


def _model_of(weights: Any) -> tuple[torch.nn.Module, torch.dtype]:
    """The model and dtype of the generator of NeMo-RL's DTensor workers, which is closed before it gathers anything.

    Raises Unimplemented for other generators, and for models whose tensors that generator changes on the way.
    """
    local: dict[str, Any] = {}
    if inspect.isgenerator(weights) and inspect.getgeneratorstate(weights) == inspect.GEN_CREATED:
        local = inspect.getgeneratorlocals(weights)
    model, dtype = local.get("model"), local.get("target_dtype")
    if not isinstance(model, torch.nn.Module) or not isinstance(dtype, torch.dtype):
        raise Unimplemented("sharded: the policy's worker is none of NeMo-RL's DTensor workers: set sharded to false", culprit="sharded")
    if getattr(model, "state_dict_adapter", None):
        raise Unimplemented("sharded: the model's state_dict_adapter changes its tensors: set sharded to false", culprit="sharded")
    adapter = next((name for name in model.state_dict() if name.endswith((".lora_A.weight", ".lora_B.weight"))), None)
    if adapter is not None:
        raise Unimplemented(f"sharded: tensor '{adapter}' is an adapter's, to be merged: set sharded to false", tensor=adapter)
    weights.close()
    return model, dtype
