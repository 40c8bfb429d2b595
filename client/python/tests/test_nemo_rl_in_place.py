"""NeMo-RL's transport where vLLM's parameters are written in place: full tensors that are pushed, and FSDP2 shards.

The policy is FSDP2 over gloo. Rollout workers are threads whose backend is refitd's rank of an engine over tensors of this test; vLLM,
which would make the backend and own the tensors, is not here. With a checkout of NeMo-RL its own mixins and its generator are used.
"""

import ast
import asyncio
import importlib
import inspect
import threading
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from test_nemo_rl import REAL, ROLLOUTS, SECONDS, Rollout, made  # noqa: E402  (first: it stands in for what refitd.integrations.nemo_rl imports)

import refitd  # noqa: E402
import refitd.integrations.nemo_rl  # noqa: E402
import torch.distributed.tensor  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import FailedPrecondition, InvalidArgument, Unimplemented  # noqa: E402
from refitd.serving.rank import Rank  # noqa: E402
from refitd.serving import Settings  # noqa: E402
from support import delivery_of  # noqa: E402

SHAPES = {"embed.weight": (37, 6), "block.up.weight": (11, 6), "block.up.bias": (11,), "block.down.weight": (6, 11), "head.weight": (5, 6)}
EXCEPTIONS = {"*.bias": "float32"}
# The send mixin of DTensor's workers hands dtensor_params_generator(self.model, self.dtype) to the checkpoint engine, a generator
# function with these arguments (nemo_rl/models/policy/workers/dtensor_policy_worker.py and _v2.py at commit 7ea279a).
GENERATOR = ["model", "target_dtype"]


def dtensor_params_generator(model, target_dtype):
    for name, tensor in model.state_dict().items():
        full = tensor.full_tensor() if isinstance(tensor, torch.distributed.tensor.DTensor) else tensor
        yield name, full.to(target_dtype).contiguous()


def generator_of_nemo_rl():
    """The function of NeMo-RL's source, whose module needs more than can be installed here."""
    package = importlib.import_module("nemo_rl").__path__[0]
    source = (Path(package) / "models/policy/workers/dtensor_policy_worker.py").read_text()
    (function,) = [node for node in ast.parse(source).body if getattr(node, "name", None) == "dtensor_params_generator"]
    names = {"torch": torch, "nn": torch.nn, "Generator": object, "DTensor": torch.distributed.tensor.DTensor}
    module = ast.Module([ast.ImportFrom("__future__", [ast.alias("annotations")], 0), function], [])
    exec(compile(ast.fix_missing_locations(module), "source", "exec"), names)
    return names["dtensor_params_generator"]


GENERATE = generator_of_nemo_rl() if REAL else dtensor_params_generator


def whole(version):
    """The full tensors of a version."""
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def delivered(version):
    return {name: tensor if name.endswith("bias") else tensor.bfloat16() for name, tensor in whole(version).items()}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(37, 6)
        self.block = torch.nn.ModuleDict({"up": torch.nn.Linear(6, 11), "down": torch.nn.Linear(11, 6, bias=False)})
        self.head = torch.nn.Linear(6, 5, bias=False)


class Worker:
    """A DTensor worker of the policy: NeMo-RL's own two mixins where they can be had."""

    def __new__(cls, engine, model):
        if REAL:
            theirs = importlib.import_module("nemo_rl.models.policy.workers.checkpoint_engine")
            bases = (theirs.DTensorCheckpointEngineSendMixin, theirs.PolicyCheckpointEngineMixin)
            cls = type("Worker", bases, {"_checkpoint_engine_params": lambda self: self.generate(self.model, self.dtype)})
        made = object.__new__(cls)
        made.checkpoint_engine, made.model, made.dtype, made.cpu_offload = engine, model, torch.bfloat16, False
        made.generate = GENERATE
        return made

    async def send_weights_via_checkpoint_engine(self):
        with torch.no_grad():
            await self.checkpoint_engine.send_weights(self.generate(self.model, self.dtype))


def metadata(group, world, ranks=1, in_place=True):
    policy = [{"group": group, "in_place": in_place, "ranks": 0, "rank": rank} for rank in range(world)]
    return policy + [{"group": group, "in_place": in_place, "ranks": ranks, "rank": rank} for rank in range(ROLLOUTS)]


def policy(rank, world, socket, group, plan, options):
    """A policy rank: one sync for each entry of `plan`; returns the errors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    model = Model()
    fully_shard(model.block["up"], mesh=mesh)
    fully_shard(model, mesh=mesh)
    engine = made(socket, group, **options)
    engine.init_policy_process_group(
        worker_rank=rank, train_world_size=world, rollout_world_size=ROLLOUTS, metadata=metadata(group, world)
    )
    worker, errors = Worker(engine, model), []
    for version, what in enumerate(plan, 1):
        with torch.no_grad():
            for name, tensor in whole(version).items():
                parameter = model.get_parameter(name)
                parameter.copy_(distribute_tensor(tensor, parameter.device_mesh, parameter.placements))
        if what == "adapter":  # rank 1 alone has an adapter
            model.state_dict_adapter = rank == 1
        if what == "megatron":
            worker.generate = lambda model, dtype: iter([])
        try:
            asyncio.run(worker.send_weights_via_checkpoint_engine())
            errors.append(None)
        except refitd.Error as error:
            errors.append((type(error).__name__, str(error), error.culprit))
        model.state_dict_adapter, worker.generate = None, GENERATE
    engine.finalize()
    return errors


class Backend:
    """This answers what the transport asks of refitd.integrations.vllm.backend.RefitdBackend, over tensors that are no model's."""

    def __init__(self, ranks=1):
        self.parallel_config = types.SimpleNamespace(world_size=ranks, data_parallel_size=1)
        self.held = {name: refitd.empty(t.shape, t.dtype) for name, t in delivered(0).items()}
        self.failing = ""  # the place at which the sync that runs fails; "": it does not fail
        self.attached = []  # instances
        self.rank = Rank(torch.device("cpu"), client="vllm", clean=True, decide=self._decide, process=self._process)

    def _process(self, delivery):
        if self.failing == "after the commit":
            raise RuntimeError("vLLM failed")

    def _decide(self, settings):
        return delivery_of(self.held)

    def parse_init_info(self, said):
        return said

    parse_update_info = parse_init_info

    def init_transfer_engine(self, info):
        self.attached.append(info["instance"])
        settings = Settings.of({name: value for name, value in info.items() if name != "dirty"}, {}).checked()
        self.rank.attach(settings, settings.instance, 0, 1, dirty=info["dirty"])

    def start_weight_update(self):
        pass

    finish_weight_update = start_weight_update

    def receive_weights(self, info):
        if self.failing == "at the begin":
            self.rank._await_prepare(self.rank._member, None, SECONDS).fail("vLLM failed")
        if self.failing == "as it dies":
            self.rank._await_prepare(self.rank._member, None, SECONDS)
            self.rank.detach()  # its process ended, as the daemon sees it
        if self.failing in ("at once", "at the begin", "as it dies"):
            raise RuntimeError("vLLM failed")
        self.rank.take(None, info["wait_seconds"])

    def shutdown(self):
        self.rank.detach()


class RolloutInPlace(Rollout):
    """A Rollout that keeps a copy of the backend's tensors after each sync; nothing comes through the worker."""

    def __init__(self, backends, where, *arguments):
        super().__init__(*arguments)
        self.backends, self.backend, self.where = backends, Backend(), where

    def run(self):
        self.backends.backend = self.backend
        engine = self.engine
        assert engine.prepare()["ranks"] == 1
        engine.init_rollout_process_group(
            rollout_rank=self.rank, train_world_size=self.world, rollout_world_size=ROLLOUTS, metadata=metadata(engine.group, self.world)
        )
        for sync in range(self.syncs):
            self.backend.failing = self.where if sync in self.failing else ""
            try:
                asyncio.run(self.take(sync))
                self.errors.append(None)
            except Exception as error:
                self.errors.append(error)
            self.held.append({name: tensor.clone() for name, tensor in self.backend.held.items()})
        engine.finalize()

    def load(self, batch):
        raise AssertionError(f"{[name for name, _ in batch]} came through the worker")


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def sync(daemon, monkeypatch, group, plan, *, failing=((), ()), where="", **options):
    options = {"in_place": True, "sharded": True, "exceptions": EXCEPTIONS, **options}
    backends = threading.local()
    monkeypatch.setattr(refitd.integrations.nemo_rl, "backend_here", lambda: getattr(backends, "backend", None))
    rollouts = [
        RolloutInPlace(backends, where, made(daemon.socket, group, **options), rank, 2, len(plan), failing[rank]) for rank in range(ROLLOUTS)
    ]
    for rollout in rollouts:
        rollout.start()
    errors = run_ranks(2, policy, daemon.socket, group, plan, options)
    for rollout in rollouts:
        rollout.join()
    return errors, rollouts


def equal(held, expected):
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


def test_the_generator_is_that_of_the_facts():
    assert inspect.isgeneratorfunction(GENERATE) and list(inspect.signature(GENERATE).parameters) == GENERATOR


@pytest.mark.parametrize("sharded", [True, False])
def test_each_sync_writes_the_policys_tensors_where_they_are(daemon, monkeypatch, sharded):
    # Pushed tensors are of the generator's dtype already: the bias is rounded on the way, and comes as float32.
    errors, rollouts = sync(daemon, monkeypatch, f"sharded-{sharded}", ["good"] * 3, sharded=sharded)
    assert errors == [[None] * 3] * 2
    for rank, rollout in enumerate(rollouts):
        assert rollout.errors == [None] * 3
        assert rollout.backend.attached == [f"nemo-rl-{rank}"]
        for version, held in enumerate(rollout.held, 1):
            expected = delivered(version)
            if not sharded:
                expected["block.up.bias"] = expected["block.up.bias"].bfloat16().float()
            equal(held, expected)


def test_shards_that_can_not_be_had_end_the_sync_on_every_rank_and_the_next_works(daemon, monkeypatch):
    plan = ["adapter", "megatron", "good"]
    errors, rollouts = sync(daemon, monkeypatch, "refused", plan, failing=((0, 1), (0, 1)), where="at once")
    assert errors[0][0][0] == "UpdateAborted" and errors[0][0][2] == "trainer rank 1" and "state_dict_adapter" in errors[0][0][1]
    assert errors[1][0][0] == "Unimplemented"
    assert [of_rank[1][0] for of_rank in errors] == ["Unimplemented"] * 2 and "DTensor workers" in errors[0][1][1]
    assert [of_rank[2] for of_rank in errors] == [None] * 2
    for rollout in rollouts:
        equal(rollout.held[2], delivered(3))


@pytest.mark.parametrize("where", ["at the begin", "as it dies", "after the commit"])
def test_a_worker_that_fails_raises_and_the_next_sync_works(daemon, monkeypatch, where):
    errors, rollouts = sync(daemon, monkeypatch, where.replace(" ", "-"), ["good", "good"], failing=((), (0,)), where=where)
    for of_rank in errors:
        assert of_rank[1] is None
        assert of_rank[0] is None if where == "after the commit" else of_rank[0][0] == "UpdateAborted"
    assert str(rollouts[1].errors[0]) == "vLLM failed" and rollouts[1].errors[1] is None
    # An engine that goes away is left out: the other one gets the version, and the policy is told who was lost.
    assert (rollouts[0].errors[0] is None) == (where != "at the begin")
    if where == "as it dies":
        assert all("nemo-rl-1" in of_rank[0][1] and of_rank[0][2] == "nemo-rl-1" for of_rank in errors)
    assert rollouts[1].backend.attached == ["nemo-rl-1"] * 2
    for rollout in rollouts:
        equal(rollout.held[1], delivered(2))


def test_workers_that_do_not_fit_together_are_refused_by_name(daemon, monkeypatch):
    engine = made(daemon.socket, "mine", in_place=True)
    places = dict(worker_rank=0, train_world_size=1, rollout_world_size=ROLLOUTS)
    for said, message in (
        (metadata("mine", 1, in_place=False), "policy worker 0: in_place is False, this worker's is True"),
        (metadata("mine", 1, ranks=0), "rollout worker 0: .*vllm_kwargs.weight_transfer_config"),
        (metadata("mine", 1, ranks=3), "its engine has 3 processes"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            engine.init_policy_process_group(metadata=said, **places)
    assert engine._check(metadata("mine", 1, ranks=ROLLOUTS), 1, ROLLOUTS) == 1
    with pytest.raises(FailedPrecondition, match="weight_transfer_config"):
        engine.init_rollout_process_group(rollout_rank=0, train_world_size=1, rollout_world_size=ROLLOUTS, metadata=metadata("mine", 1))
    with pytest.raises(InvalidArgument, match="sharded needs in_place"):
        made(daemon.socket, "mine", sharded=True)


def test_models_that_the_generator_changes_are_refused():
    model = Model()
    for name in ("state_dict_adapter", "lora_A"):
        setattr(model if name != "lora_A" else model.head, name, True if name != "lora_A" else torch.nn.Linear(1, 1))
        with pytest.raises(Unimplemented, match="adapter"):
            refitd.integrations.nemo_rl._model_of(GENERATE(model, torch.bfloat16))
        model.state_dict_adapter = None
    begun = GENERATE(Model(), torch.bfloat16)
    next(begun)
    with pytest.raises(Unimplemented, match="DTensor workers"):
        refitd.integrations.nemo_rl._model_of(begun)
