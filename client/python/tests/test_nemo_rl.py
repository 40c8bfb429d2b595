"""NeMo-RL's transport: policy ranks over gloo and rollout workers, driven in the order of NeMo-RL's synchronizer.

NeMo-RL is on no package index as a whole. Where `nemo_rl` can't be imported, its base class is made here of what its source says
(FACTS below); with a checkout of it on PYTHONPATH its own modules are used, its workers' mixins among them.
"""

import abc
import asyncio
import importlib
import importlib.util
import inspect
import os
import sys
import threading
import types
from contextlib import aclosing
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

BASE = "nemo_rl.utils.checkpoint_engines.base"
REAL = importlib.util.find_spec("nemo_rl") is not None
# These are the methods of CheckpointEngine in nemo_rl/utils/checkpoint_engines/base.py at commit
# 7ea279abfbeb698b092856d0dab61e7cf39bc909 (2026-08-22), their arguments, and whether a subclass must have them.
FACTS = {
    "get_target_weight_layout": (["self"], [], False),
    "prepare": (["self"], [], True),
    "init_policy_process_group": (["self"], ["worker_rank", "train_world_size", "rollout_world_size", "metadata"], True),
    "init_rollout_process_group": (["self"], ["rollout_rank", "train_world_size", "rollout_world_size", "metadata"], True),
    "finalize": (["self"], [], False),
    "send_weights": (["self", "weights"], [], True),
    "receive_weight_batches": (["self"], [], True),
}


def _base_of_facts():
    def method(name, positional, keywords, required):
        def stand_in(self, *arguments, **options):
            raise NotImplementedError(name)

        stand_in.__signature__ = inspect.Signature(
            [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in positional]
            + [inspect.Parameter(p, inspect.Parameter.KEYWORD_ONLY) for p in keywords]
        )
        return abc.abstractmethod(stand_in) if required else stand_in

    methods = {name: method(name, *facts) for name, facts in FACTS.items()}
    module = types.ModuleType(BASE)
    module.CheckpointEngine = abc.ABCMeta("CheckpointEngine", (), {"shard_expert_weights": False, **methods})
    return module


if not REAL:
    for i in range(1, BASE.count(".") + 1):
        package = BASE.rsplit(".", i)[0]
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []
    sys.modules[BASE] = _base_of_facts()

from ranks_util import run_ranks  # noqa: E402

from refitd import testing  # noqa: E402
from refitd.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, UpdateAborted  # noqa: E402
from refitd.integrations.nemo_rl import Transport  # noqa: E402

# Importing torch alone takes a policy rank minutes where a machine does much else; only what hangs reaches this.
SECONDS = 600
ROLLOUTS = 2
RATIO = "update_weights_bucket_memory_ratio"


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def made(socket, group, **options):
    """The engine as NeMo-RL's create_checkpoint_engine makes it of the transport's name and its part of refit_cfg."""
    options = {"group": group, "socket": socket, "device": "host", "release_after_refit": False, **options}
    options = {"begin_seconds": SECONDS, "update_seconds": SECONDS, **options}
    if REAL:
        create = importlib.import_module(BASE).create_checkpoint_engine
        return create("refitd.integrations.nemo_rl:Transport", bucket_size_bytes=1 << 20, engine_kwargs=options)
    return Transport(bucket_size=1 << 20, **options)


def metadata_of(engine, world):
    """Returns what the synchronizer gathers: the same of all workers here, but for the rank, policy's first."""
    return [{**engine.prepare(), "rank": rank} for rank in [*range(world), *range(ROLLOUTS)]]


def weights_of(version, dtype=torch.float32):
    generator = torch.Generator().manual_seed(version)
    yield "model.norm.weight", torch.randn(7, generator=generator).to(dtype)
    yield "model.big.weight", torch.randn(700, 900, generator=generator).to(dtype)
    yield "model.empty", torch.empty(0, 3, dtype=dtype)
    yield "model.router.bias", torch.randn(5, generator=generator)
    yield "scale", torch.tensor(1.5, dtype=dtype)


class Policy:
    """A policy worker: NeMo-RL's own mixin where it can be had."""

    def __new__(cls, engine):
        if REAL:
            theirs = importlib.import_module("nemo_rl.models.policy.workers.checkpoint_engine").PolicyCheckpointEngineMixin
            cls = type("Policy", (theirs,), {"_checkpoint_engine_weight_iterator": lambda self, kv_scales=None: self.weights})
        made = object.__new__(cls)
        made.checkpoint_engine = engine
        return made

    async def send_weights_via_checkpoint_engine(self):
        with torch.no_grad():
            await self.checkpoint_engine.send_weights(self.weights)


class Rollout(threading.Thread):
    """A rollout worker that takes `syncs` syncs, and keeps copies of what each brought; fails in those of `failing`."""

    def __init__(self, engine, rank, world, syncs, failing=()):
        super().__init__()
        self.engine, self.rank, self.world, self.syncs, self.failing = engine, rank, world, syncs, failing
        self.held, self.errors, self.dies = [], [], False

    def run(self):
        engine = self.engine
        engine.init_rollout_process_group(
            rollout_rank=self.rank, train_world_size=self.world, rollout_world_size=ROLLOUTS, metadata=metadata_of(engine, self.world)
        )
        for sync in range(self.syncs):
            self.held.append({})
            try:
                asyncio.run(self.take(sync))
            except Exception as error:
                self.errors.append(error)
        engine.finalize()

    def load(self, batch):
        for name, tensor in batch:
            assert name not in self.held[-1]
            self.held[-1][name] = tensor.clone()  # a batch is good until the next is asked for
            if len(self.held) - 1 in self.failing and self.dies:
                self.engine._engine.close()  # the worker's process ended, as the daemon sees it
            if len(self.held) - 1 in self.failing:
                raise RuntimeError("the loader failed")

    async def take(self, sync):
        if REAL:
            theirs = importlib.import_module("nemo_rl.models.generation.vllm.checkpoint_engine").VllmCheckpointEngineMixin
            worker = object.__new__(type("Worker", (theirs,), {"_load_weights": lambda _, b: self.load(b), "_maybe_process_fp8_kv_cache": lambda _: None}))
            worker.checkpoint_engine = self.engine
            with mock.patch("torch.cuda.current_stream", lambda *_: mock.Mock()):  # there is no GPU
                assert await worker._update_weights_from_checkpoint_engine_async()
            return
        async with aclosing(self.engine.receive_weight_batches()) as batches:
            async for batch in batches:
                self.load(batch)


def policy(rank, world, socket, group, plan, options):
    """A policy rank: one sync for each entry of `plan`, a function of (rank, version) or None; returns the errors."""
    engine = made(socket, group, **options)
    engine.init_policy_process_group(
        worker_rank=rank, train_world_size=world, rollout_world_size=ROLLOUTS, metadata=metadata_of(engine, world)
    )
    worker, errors = Policy(engine), []
    for version, weights in enumerate(plan, 1):
        worker.weights = weights(rank, version)
        if worker.weights is None:  # this rank does not come
            errors.append(None)
            continue
        try:
            asyncio.run(worker.send_weights_via_checkpoint_engine())
            errors.append(None)
        except Exception as error:  # the error is refitd's, or the policy's own
            errors.append((type(error).__name__, str(error), getattr(error, "culprit", None)))
    engine.finalize()
    return errors


def good(rank, version):
    return weights_of(version)


def other_shape(rank, version):
    for name, tensor in weights_of(version):
        yield name, tensor[:5] if rank == 1 and name == "model.norm.weight" else tensor


def nothing(rank, version):
    return iter(())


def breaks(rank, version):
    yield from list(weights_of(version))[:2]
    if rank == 0:
        raise RuntimeError("the exporter broke")
    yield from list(weights_of(version))[2:]


def missing(rank, version):
    return None if rank == 1 else weights_of(version)


def mixed(rank, version):
    """The largest tensor first, in bfloat16, of several slots; and a bias in float32 among bfloat16."""
    yield "model.huge.weight", torch.randn(1500, 1000, generator=torch.Generator().manual_seed(version)).bfloat16()
    yield from weights_of(version, torch.bfloat16)


def sync(daemon, group, plan, *, world=2, failing=((), ()), dies=False, **options):
    engines = [made(daemon.socket, group, **options) for _ in range(ROLLOUTS)]
    rollouts = [Rollout(engine, rank, world, len(plan), failing[rank]) for rank, engine in enumerate(engines)]
    for rollout in rollouts:
        rollout.dies = dies
        rollout.start()
    errors = run_ranks(world, policy, daemon.socket, group, plan, options)
    for rollout in rollouts:
        rollout.join()
    return errors, rollouts


def equal(held, expected):
    assert list(held) == [name for name, _ in expected]
    for name, tensor in expected:
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


def test_the_base_class_is_that_of_the_facts():
    base = importlib.import_module(BASE).CheckpointEngine
    for name, (positional, keywords, required) in FACTS.items():
        signature = inspect.signature(getattr(base, name)).parameters
        assert [p for p, v in signature.items() if v.kind is v.POSITIONAL_OR_KEYWORD] == positional, name
        assert [p for p, v in signature.items() if v.kind is v.KEYWORD_ONLY] == keywords, name
        assert (name in base.__abstractmethods__) == required, name
        ours = inspect.signature(getattr(Transport, name)).parameters
        assert list(ours) == positional + keywords, name
    assert not Transport.__abstractmethods__ and Transport.shard_expert_weights is False
    assert inspect.isasyncgenfunction(Transport.receive_weight_batches) and inspect.iscoroutinefunction(Transport.send_weights)


def test_each_sync_brings_the_policys_tensors_to_every_rollout_worker(daemon):
    errors, rollouts = sync(daemon, "good", [good, good, good], spec={"slot_bytes": 1 << 20})  # the large tensor comes in parts
    assert errors == [[None] * 3] * 2
    for rollout in rollouts:
        assert rollout.errors == []
        for version, held in enumerate(rollout.held, 1):
            equal(held, list(weights_of(version)))


def test_a_training_that_resumes_goes_on_with_the_groups_next_version(daemon):
    for version in (1, 2):
        errors, rollouts = sync(daemon, "resumed", [good])
        assert errors == [[None]] * 2
        equal(rollouts[0].held[0], list(weights_of(1)))
        assert f"update to version {version}: NeMo-RL's sync 1 of this run" in daemon.read_log()


def test_tensors_are_cast_before_they_are_sent(daemon):
    errors, rollouts = sync(daemon, "cast", [good], dtype="bfloat16", exceptions={"*.bias": "float32"})
    assert errors == [[None]] * 2
    expected = [(n, t if n.endswith("bias") else t.bfloat16()) for n, t in weights_of(1)]
    equal(rollouts[0].held[0], expected)


def test_failures_of_the_policy_end_the_sync_on_every_worker_and_the_next_works(daemon):
    errors, rollouts = sync(daemon, "bad", [other_shape, nothing, breaks, good])
    for of_rank in errors:
        assert of_rank[0][0] == "InvalidArgument" and of_rank[0][2] == "tensor 'model.norm.weight'"
        assert of_rank[1][0] == "InvalidArgument" and "the policy yielded no tensor" in of_rank[1][1]
        assert of_rank[3] is None
    assert errors[0][2][:2] == ("RuntimeError", "the exporter broke")
    assert errors[1][2][0] == "UpdateAborted" and "trainer rank 0 failed: RuntimeError: the exporter broke" in errors[1][2][1]
    for rollout in rollouts:
        assert [type(error) for error in rollout.errors] == [UpdateAborted] * 3
        equal(rollout.held[3], list(weights_of(4)))


def test_a_first_tensor_larger_than_a_slot_and_a_float32_bias_among_bfloat16_arrive_as_they_are(daemon):
    errors, rollouts = sync(daemon, "mixed", [mixed, mixed], spec={"slot_bytes": 1 << 20})
    assert errors == [[None] * 2] * 2
    for rollout in rollouts:
        for version, held in enumerate(rollout.held, 1):
            equal(held, list(mixed(0, version)))
            assert held["model.router.bias"].dtype is torch.float32 and held["model.norm.weight"].dtype is torch.bfloat16


def test_a_policy_rank_that_does_not_come_is_named_in_bounded_time(daemon):
    errors, rollouts = sync(daemon, "missing", [missing], update_seconds=5.0, begin_seconds=20.0, connect={"wait_seconds": SECONDS})
    assert errors[0][0][0] == "DeadlineExceeded" and errors[0][0][2] == "trainer rank 1", errors
    assert errors[1] == [None]
    assert all([type(error) for error in rollout.errors] == [DeadlineExceeded] for rollout in rollouts)


@pytest.mark.parametrize("dies", [False, True])
def test_a_worker_that_fails_or_dies_ends_the_sync_and_the_next_works(daemon, dies):
    errors, rollouts = sync(daemon, f"loader-{dies}", [good, good], failing=((), (0,)), dies=dies)
    assert all(of_rank[0][0] == "UpdateAborted" and of_rank[1] is None for of_rank in errors)
    assert [str(error) for error in rollouts[1].errors] == ["the loader failed"]
    equal(rollouts[1].held[1], list(weights_of(2)))
    equal(rollouts[0].held[1], list(weights_of(2)))


def test_workers_that_are_missing_or_of_another_group_are_refused_by_name(daemon):
    engine = made(daemon.socket, "mine")
    metadata = metadata_of(engine, 1)
    places = dict(train_world_size=1, rollout_world_size=ROLLOUTS)
    with pytest.raises(InvalidArgument, match="metadata of 2 workers, and there are 3"):
        engine.init_policy_process_group(worker_rank=0, metadata=metadata[:2], **places)
    with pytest.raises(InvalidArgument, match="rollout worker 1: its group is 'yours', this worker's is 'mine'") as raised:
        engine.init_policy_process_group(worker_rank=0, metadata=[*metadata[:2], {"group": "yours"}], **places)
    assert raised.value.culprit == "rollout worker 1"
    with pytest.raises(InvalidArgument, match="rollout_rank is 2"):
        engine.init_rollout_process_group(rollout_rank=2, metadata=metadata, **places)
    with pytest.raises(FailedPrecondition, match="init_policy_process_group"):
        asyncio.run(engine.send_weights(weights_of(1)))


def test_a_rollout_worker_that_does_not_come_is_named(daemon):
    engine = made(daemon.socket, "alone", update_seconds=1.0)
    metadata = metadata_of(engine, 1)
    engine.init_policy_process_group(worker_rank=0, train_world_size=1, rollout_world_size=ROLLOUTS, metadata=metadata)
    with pytest.raises((DeadlineExceeded, UpdateAborted), match="instance"):
        asyncio.run(engine.send_weights(weights_of(1)))
    engine.finalize()


@pytest.mark.parametrize("options, message", [({"group": ""}, "group is missing"), ({"sockett": "x"}, "sockett: there is no such option"), ({"spec": {"slot": 1}}, "spec.slot: there is no such option")])
def test_options_that_are_wrong_are_refused_by_name(options, message):
    with pytest.raises(InvalidArgument, match=message):
        Transport(**{"group": "g", **options})


# ---- NeMo-RL's own synchronizer, in Ray's processes ----


class PolicyActor:
    """NeMo-RL's mixin of policy workers over tensors of this test, one rank of gloo."""

    def __init__(self, rank, world, folder):
        import torch.distributed as dist

        theirs = importlib.import_module("nemo_rl.models.policy.workers.checkpoint_engine").PolicyCheckpointEngineMixin
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        self.worker = object.__new__(type("Worker", (theirs,), {"_checkpoint_engine_weight_iterator": lambda _, kv_scales=None: self.weights()}))
        self.worker.rank, self.version = rank, 0

    def weights(self):
        self.version += 1
        return weights_of(self.version)

    async def checkpoint_engine_rpc(self, checkpoint_method, method_kwargs):
        with mock.patch("torch.cuda.current_device", lambda: 0), mock.patch("torch.cuda.get_device_properties", _properties):
            return await self.worker.checkpoint_engine_rpc(checkpoint_method, method_kwargs)


class RolloutActor:
    """NeMo-RL's mixin of vLLM's workers, which keeps what would be loaded; what the mixin asks vLLM for is answered here."""

    def __init__(self, rank, world, folder):
        import torch.distributed as dist

        theirs = importlib.import_module("nemo_rl.models.generation.vllm.checkpoint_engine").VllmCheckpointEngineMixin
        dist.init_process_group("gloo", init_method=f"file://{folder}/rollout", rank=rank, world_size=world)
        self.loaded = []
        load = lambda _, batch: self.loaded[-1].update((name, tensor.clone()) for name, tensor in batch)  # noqa: E731
        self.worker = object.__new__(type("Worker", (theirs,), {"_load_weights": load, "_maybe_process_fp8_kv_cache": lambda _: None}))

    def checkpoint_engine_rpc(self, checkpoint_method, method_args=()):
        if checkpoint_method == "update_weights_from_checkpoint_engine":
            self.loaded.append({})
        with (
            mock.patch("torch.cuda.current_stream", lambda *_: mock.Mock()),
            mock.patch("torch.cuda.current_device", lambda: 0),
            mock.patch("torch.cuda.get_device_properties", _properties),
        ):
            return getattr(self.worker, checkpoint_method)(*method_args)

    def held(self):
        return self.loaded


def _properties(device):
    return types.SimpleNamespace(total_memory=1 << 30)


class Workers:
    """The calls that the synchronizer makes of NeMo-RL's worker groups: the same call on all workers, or a call with each one's arguments."""

    dp_size = ROLLOUTS

    def __init__(self, kind, world, folder):
        import ray

        self.cfg = {"vllm_cfg": {"async_engine": False}}
        self.worker_group = self
        self.workers = [ray.remote(num_cpus=0)(kind).remote(rank, world, str(folder)) for rank in range(world)]

    def run_all_workers_single_data(self, method, run_rank_0_only_axes=None, **options):
        return [getattr(worker, method).remote(**options) for worker in self.workers]

    def run_all_workers_multiple_data(self, method, method_args, run_rank_0_only_axes=None, common_kwargs=None):
        options = common_kwargs or {}
        # Both rollout workers are of one torch.distributed here, so that their ranks are global already.
        return [getattr(w, method).remote(method_args=a, **options) for w, a in zip(self.workers, method_args)]


@pytest.mark.skipif(not REAL, reason="needs a checkout of NeMo-RL on PYTHONPATH, and Ray")
@pytest.mark.parametrize("release", [False, True])
def test_nemo_rls_own_synchronizer_and_configuration_drive_it(daemon, tmp_path, release, monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")  # as in test_verl.py
    configured = importlib.import_module("nemo_rl.weight_sync.checkpoint_engine_config").checkpoint_engine_refit_config
    theirs = importlib.import_module("nemo_rl.weight_sync.checkpoint_engine_weight_synchronizer").CheckpointEngineWeightSynchronizer
    name = "refitd.integrations.nemo_rl:Transport"
    options = {"group": f"ray-{release}", "socket": daemon.socket, "device": "host", "release_after_refit": release}
    config = configured({"refit_transport": name, "refit_cfg": {name: options}})
    assert config["backend"] == name and config["engine_kwargs"][name]["group"] == f"ray-{release}"
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=128 << 20, runtime_env={"env_vars": {"PYTHONPATH": path}})
    try:
        policies, rollouts = Workers(PolicyActor, 2, tmp_path), Workers(RolloutActor, ROLLOUTS, tmp_path)
        synchronizer = theirs(policies, rollouts, config)
        for _ in range(3):
            synchronizer.sync_weights()
            assert not synchronizer.is_stale
        synchronizer.shutdown()
        for loaded in ray.get([worker.held.remote() for worker in rollouts.workers], timeout=SECONDS):
            assert len(loaded) == 3
            for version, held in enumerate(loaded, 1):
                equal(held, list(weights_of(version)))
    finally:
        ray.shutdown()
