"""verl's own manager, actor (FSDP2, two ranks over gloo), workers and configuration drive the checkpoint engine, in Ray's processes.

verl knows no CPU as a platform; `verl_cpu` adds one in the way of its plugins. Nothing of verl itself is replaced. Its adapter of vLLM
imports vLLM and calls nothing of it here: an empty package takes that name. Failures that concern one rank run without Ray, below.
"""

import asyncio
import importlib.util
import os
import re
import sys
import threading
from datetime import timedelta

import pytest

torch = pytest.importorskip("torch")
if importlib.util.find_spec("verl") is None:
    pytest.skip("verl is in the environment 2.11.0-rl", allow_module_level=True)
# Ray's workers give way to all other processes unless they are told not to, and on a busy machine reach the tests' deadlines.
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "RAY_worker_niceness": "0",
}
os.environ.update(ENVIRONMENT)

import ray  # noqa: E402
import tokenizers  # noqa: E402
import transformers  # noqa: E402
import verl_workers as workers  # noqa: E402
from hydra import compose, initialize_config_module  # noqa: E402
from verl.checkpoint_engine import CheckpointEngineManager  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd import testing  # noqa: E402

SECONDS = 600  # only what hangs reaches it: placing workers took longer than 100 on a busy machine
COMMON = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
    intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
MODELS = {
    "dense": lambda: transformers.Qwen2Config(**COMMON),  # with biases
    "experts": lambda: transformers.Qwen3MoeConfig(**COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
}


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Ray on this machine, whose processes find an empty package under the name of vLLM."""
    folder = tmp_path_factory.mktemp("vllm")
    (folder / "vllm" / "distributed").mkdir(parents=True)
    (folder / "vllm" / "__init__.py").write_text("LLM = None\n")
    (folder / "vllm" / "distributed" / "__init__.py").write_text("parallel_state = None\n")
    (folder / "vllm-0.26.0.dist-info").mkdir()
    (folder / "vllm-0.26.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
    variables = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    ray.init(num_cpus=64, include_dashboard=False, object_store_memory=128 << 20, runtime_env={"env_vars": variables}, log_to_driver=False)
    yield
    ray.shutdown()


def checkpoint(kind, folder):
    config = MODELS[kind]()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<eos>": 1}, unk_token="a"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>").save_pretrained(folder)
    return folder


def in_hydras_grammar(value):
    """What a value of a mapping of options is on a command line of verl; a mapping in it is one as well."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {in_hydras_grammar(each)}" for name, each in value.items()) + "}"
    return value


def configured(daemon, folder, group, **options):
    """verl's own configuration of PPO, with the checkpoint engine and what a CPU needs."""
    engine = {"group": group, "socket": daemon.socket, "connect": {"wait_seconds": SECONDS}, "update_seconds": SECONDS, **options}
    here = "actor_rollout_ref."
    overrides = [
        here + "rollout.checkpoint_engine.backend=refitd",
        "+" + here + "rollout.checkpoint_engine.custom_backend_module=refitd.integrations.verl",
        "+" + here + f"rollout.checkpoint_engine.engine_kwargs.refitd={in_hydras_grammar(engine)}",
        here + "rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
        here + f"model.path={folder}",
        "+" + here + "model.override_config.attn_implementation=sdpa",
        here + "model.use_remove_padding=False",
        here + "actor.strategy=fsdp2",
        here + "actor.fsdp_config.strategy=fsdp2",
        here + "actor.ppo_micro_batch_size_per_gpu=1",
        here + "rollout.log_prob_micro_batch_size_per_gpu=1",
        here + "rollout.name=vllm",
        here + "rollout.tensor_model_parallel_size=1",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=overrides).actor_rollout_ref


def group_of(kind, count, **arguments):
    made = RayClassWithInitArgs(cls=ray.remote(kind), **arguments)
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=made, device_name="cpu", use_gpu=False)


class Run:
    """An actor of two ranks, rollout workers, and the manager of the first `replicas` of them."""

    def __init__(self, daemon, folder, group, *, count=2, replicas=None, real=False, **options):
        config = configured(daemon, folder, group, **options)
        self.actor = group_of(workers.Actor, 2, config=config, role="actor")
        self.actor.init_model()
        rollout, model = omega_conf_to_dataclass(config.rollout), omega_conf_to_dataclass(config.model)
        self.rollout = group_of(workers.Rollout, count, rollout_config=rollout, model_config=model, real=real)
        self.replicas = [
            workers.Replica(worker, replica_rank=rank, config=rollout, model_config=model, gpus_per_node=1)
            for rank, worker in enumerate(self.rollout.workers)
        ]
        self.manager = CheckpointEngineManager(rollout.checkpoint_engine, self.actor, self.replicas[:replicas])

    def sync(self, seed, global_steps=None):
        """Changes the weights and syncs. Returns metrics, and what verl's own engine for one process delivers."""
        self.actor.change(seed)
        metrics = self.manager.update_weights(global_steps=global_steps)
        return metrics, self.actor.sent_by_verl()[0]

    def close(self):
        for worker in [*self.actor.workers, *self.rollout.workers]:
            ray.kill(worker)


def equal(held, expected):
    assert list(held) == list(expected)
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype and torch.equal(held[name], tensor), name


@pytest.mark.parametrize("kind", list(MODELS))
def test_each_sync_brings_what_verls_own_engine_brings_and_replicas_come_and_go(daemon, cluster, tmp_path, kind):
    run = Run(daemon, checkpoint(kind, tmp_path), f"manager-{kind}", count=3, replicas=2)
    try:
        before = {}
        for seed, (steps, version) in enumerate([(None, 1), (2, 2), (2, 3), (10, 10)]):
            if seed == 2:
                run.manager.add_replicas(run.replicas[2:])
            if seed == 3:
                run.manager.remove_replicas(run.replicas[:1])
            metrics, expected = run.sync(seed, steps)
            assert metrics["refitd/version"] == version
            assert any(not torch.equal(before[name], expected[name]) for name in before) or not before
            before = expected
            held = run.rollout.held()
            with_it = {0: (0, 1), 1: (0, 1), 2: (0, 1, 2), 3: (1, 2)}[seed]
            for worker in with_it:
                equal(held[worker], expected)
        assert any(name.endswith(".bias") for name in expected) == (kind == "dense")
        assert any(".experts.3.down_proj" in name for name in expected) == (kind == "experts")
        assert run.replicas[1].asked == ["abort", "release", "restore", "resume"] * 4
    finally:
        run.close()


def test_an_actor_that_resumes_behind_the_groups_version_goes_on_with_the_next(daemon, cluster, tmp_path):
    folder = checkpoint("dense", tmp_path)
    for steps, version in ((10, 10), (7, 11)):
        run = Run(daemon, folder, "resumed", count=1)
        try:
            metrics, expected = run.sync(version, steps)
            assert metrics["refitd/version"] == version
            equal(run.rollout.held()[0], expected)
        finally:
            run.close()
    assert "update to version 11: verl's global step 7" in daemon.read_log()


def test_a_rollout_that_fails_or_dies_ends_the_sync_before_generation_resumes(daemon, cluster, tmp_path):
    run = Run(daemon, checkpoint("dense", tmp_path), "rollout-fails")
    try:
        run.sync(1)
        for how, message in (("raise", "the adapter failed"), ("exit", "died|unavailable|crashed|SYSTEM_ERROR|exit")):
            asked = len(run.replicas[0].asked)
            ray.get(run.rollout.workers[1].fail_next.remote(3, how))
            with pytest.raises(ray.exceptions.RayError, match=message):
                run.sync(2)
            assert run.replicas[0].asked[asked:] == ["abort", "release"]
            if how == "raise":
                ray.get(run.rollout.workers[1].fail_next.remote(None, None))
            else:
                run.manager.remove_replicas(run.replicas[1:])
            _, expected = run.sync(3)
            equal(ray.get(run.rollout.workers[0].held.remote()), expected)
    finally:
        run.close()


@pytest.mark.parametrize("in_place", [False, True])
def test_verls_adapter_of_vllm_gets_the_weights_to_the_server(daemon, cluster, tmp_path, in_place):
    run = Run(daemon, checkpoint("dense", tmp_path), f"adapter-{in_place}", count=1, real=True, in_place=in_place)
    try:
        specs = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in run.actor.sent_by_verl()[0].items()}
        path = f"ipc:///tmp/rl-colocate-zmq-{ray.get_runtime_context().get_job_id()}-replica-0-rank-0.sock"
        server = workers.Server.options(name="vllm_server_0_0").remote({name: (shape, str(dtype)) for name, (shape, dtype) in specs.items()}, path)
        for seed in (1, 2):
            metrics, expected = run.sync(seed, global_steps=10 * seed)
            held, calls, steps, version = ray.get(server.state.remote())
            equal(held, expected)
            assert steps == 10 * seed and metrics["refitd/version"] == 10 * seed
            assert calls[-1] == "clear_kv_cache"
            assert ("update_weights_from_ipc" in calls) != in_place
            assert version == (10 * seed if in_place else None)
    finally:
        run.close()


# ---- failures of one rank, without Ray ----


def a_model(dtype=torch.bfloat16):
    torch.manual_seed(3)
    return [("a", torch.randn(40, 30, dtype=dtype)), ("a.bias", torch.randn(7, dtype=torch.float32)), ("b", torch.randn(3, 5, dtype=dtype))]


def usual(rank):
    return a_model()


def oversize_first(rank):
    """The first tensor has 5 MB, while slots have 1 MiB."""
    return [("huge", torch.arange(5 << 18, dtype=torch.float32)), *a_model()]


def nothing(rank):
    return []


def shape_of_another_rank(rank):
    tensors = a_model()
    return [*tensors[:2], ("b", torch.zeros(3, 4 + (rank == 0)))]


def one_more_on_rank_1(rank):
    return a_model() + [("c", torch.zeros(2))] * (rank == 1)


def twice(rank):
    return [*a_model(), a_model()[0]]


def broken_on_rank_1(rank):
    yield from a_model()[:2]
    if rank == 1:
        raise ValueError("no memory to gather 'b'")
    yield a_model()[2]


def many_more_than_before(rank):
    return [(f"t{i}", torch.full((3,), float(i))) for i in range(20)]


SYNCS = [
    (usual, None),
    (oversize_first, None),
    (nothing, "InvalidArgument: the actor yielded no tensor"),
    (shape_of_another_rank, "InvalidArgument: trainer rank 1 has other tensors than rank 0, first at 'b'"),
    (usual, None),
    (one_more_on_rank_1, "InvalidArgument: trainer rank 1 has other tensors than rank 0, first at 'c'"),
    (twice, "InvalidArgument: the actor yielded tensor 'a' twice"),
    (broken_on_rank_1, "ValueError: no memory|UpdateAborted: trainer rank 1 failed: ValueError: no memory"),
    (usual, None),
    (many_more_than_before, None),
]


def store_of(port, *, first=False):
    return torch.distributed.TCPStore("127.0.0.1", port, is_master=first, timeout=timedelta(seconds=SECONDS), wait_for_workers=False)


def meet(store, name, count):
    if store.add(name, 1) == count:
        store.set(f"{name}/all", "")
    store.wait([f"{name}/all"])


def engine_of(socket, group, **options):
    from refitd.integrations.verl import RefitdCheckpointEngine

    options = {"update_seconds": SECONDS, "begin_seconds": SECONDS, "connect": {"wait_seconds": SECONDS}, **options}
    return RefitdCheckpointEngine(1 << 20, group=group, socket=socket, spec={"slot_bytes": 1 << 20}, device="host", **options)


def places(engine, trainers, rollouts, group, version):
    metadata = [{"group": group, "in_place": False, "version": version, "replica": None}] * (trainers + rollouts)
    return engine.build_topology(trainers, rollouts, metadata)


def place_of(kwargs, rank):
    return {name: values[rank] for name, values in kwargs.items()}


def send_all(rank, world, socket, group, port, names):
    """The syncs of one trainer rank. Returns the exceptions' texts."""
    store, engine, errors = store_of(port), engine_of(socket, group), []
    for i, name in enumerate(names):
        version = engine.prepare()["version"]
        engine.init_process_group(**place_of(places(engine, world, 1, group, version)[0], rank))
        meet(store, f"placed-{i}", world + 1)
        try:
            asyncio.run(engine.send_weights(iter(globals()[name](rank))))
            errors.append(None)
        except Exception as error:
            errors.append(f"{type(error).__name__}: {error}")
        meet(store, f"over-{i}", world + 1)
        engine.finalize()
    return errors


def receive_all(socket, group, port, count, world, results):
    store, engine = store_of(port), engine_of(socket, group)

    async def receive():
        return [(name, tensor) async for name, tensor in engine.receive_weights()]

    for i in range(count):
        engine.prepare()
        engine.init_process_group(**place_of(places(engine, world, 1, group, None)[1], 0))
        meet(store, f"placed-{i}", world + 1)
        try:
            results.append(asyncio.run(receive()))
        except refitd.Error as error:
            results.append(error)
        engine.finalize()
        meet(store, f"over-{i}", world + 1)


def test_what_is_wrong_in_the_weights_fails_on_every_rank_and_the_next_sync_works(daemon):
    store = store_of(0, first=True)
    results, names = [], [function.__name__ for function, _ in SYNCS]
    thread = threading.Thread(target=receive_all, args=(daemon.socket, "wrong", store.port, len(SYNCS), 2, results))
    thread.start()
    errors = run_ranks(2, send_all, daemon.socket, "wrong", store.port, names)
    thread.join()
    for (function, message), received, of_rank_0, of_rank_1 in zip(SYNCS, results, *errors):
        if message is None:
            assert (of_rank_0, of_rank_1) == (None, None), function
            expected = dict(function(0))
            equal(dict(received), expected)
            assert len(received) == len(expected)
            continue
        for of_rank in (of_rank_0, of_rank_1):
            assert of_rank is not None and re.search(message, of_rank), (function, of_rank)
        assert isinstance(received, refitd.UpdateAborted), (function, received)
    assert len(results) == len(SYNCS)


def send_alone(rank, world, socket, group, said):
    """Rank 0 sends while the others do not. Returns the exception's text."""
    engine = engine_of(socket, group, update_seconds=3.0, connect={"wait_seconds": 3.0})
    engine.init_process_group(**said(engine, rank, world, group))
    try:
        if rank == 0:
            asyncio.run(engine.send_weights(iter(usual(0))))
    except refitd.Error as error:
        return f"{type(error).__name__}: {error}"
    finally:
        torch.distributed.barrier()
    return None


def of_this_rank(engine, rank, world, group):
    return place_of(places(engine, world, 1, group, None)[0], rank)


def test_a_trainer_rank_that_is_missing_is_named_in_bounded_time(daemon):
    errors = run_ranks(2, send_alone, daemon.socket, "missing", of_this_rank)
    assert errors[0].startswith("DeadlineExceeded") and "rank 1" in errors[0], errors


def take_others_place(rank, world, socket, group):
    engine = engine_of(socket, group)
    try:
        engine.init_process_group(**of_this_rank(engine, 1 - rank, world, group))
    except refitd.InvalidArgument as error:
        return str(error)


def test_the_place_of_another_rank_is_refused_before_anything_is_attached(daemon):
    errors = run_ranks(2, take_others_place, daemon.socket, "places")
    for rank, error in enumerate(errors):
        assert error.startswith(f"trainer rank {1 - rank} of 2 is rank {rank} of 2 in torch.distributed"), error
    assert '"places"' not in daemon.control("--output", "json", "status")


def test_metadata_of_workers_that_are_missing_or_of_another_group_is_refused():
    from refitd.integrations.verl import RefitdCheckpointEngine as Engine

    one = {"group": "policy", "in_place": False, "version": 4, "replica": None}
    with pytest.raises(refitd.InvalidArgument, match="metadata of 2 workers, and there are 3"):
        Engine.build_topology(2, 1, [one] * 2)
    with pytest.raises(refitd.InvalidArgument, match="rollout worker 0: group is not that of actor rank 0, 'policy'"):
        Engine.build_topology(2, 1, [one, one, {**one, "group": "other"}])
    with pytest.raises(refitd.InvalidArgument, match="actor rank 1: in_place"):
        Engine.build_topology(2, 1, [one, {"group": "policy"}, one])
    trainers, engines = Engine.build_topology(2, 3, [one, {**one, "version": None}, *[{**one, "version": 5}] * 3])
    assert trainers["version"] == [5, 5] and engines["instances"] == [3, 3, 3]
    in_place = {**one, "in_place": True}
    replicas = [{**in_place, "replica": i // 2} for i in range(4)]
    assert Engine.build_topology(1, 4, [in_place, *replicas])[0]["instances"] == [2]
    with pytest.raises(refitd.InvalidArgument, match="group is missing"):
        Engine(0)
    with pytest.raises(refitd.InvalidArgument, match="engine_kwargs.refitd.sokcet"):
        Engine(0, group="policy", sokcet="")


def test_floating_point_tensors_are_cast_where_the_configuration_says_so(daemon):
    sender = engine_of(daemon.socket, "cast", dtype="bfloat16", exceptions={"*.bias": "float16", "b": ""})
    receiver = engine_of(daemon.socket, "cast")
    sender.init_process_group(role="trainer", rank=0, world_size=1, instances=1)
    receiver.init_process_group(role="engine", rank=0, world_size=1, instances=1)
    tensors = [*a_model(torch.float32), ("steps", torch.arange(3))]

    async def receive():
        return {name: tensor async for name, tensor in receiver.receive_weights()}

    async def both():
        return await asyncio.gather(sender.send_weights(iter(tensors)), receive())

    dtypes = {"a": torch.bfloat16, "a.bias": torch.float16, "b": torch.float32, "steps": torch.int64}
    equal(asyncio.run(both())[1], {name: tensor.to(dtypes[name]) for name, tensor in tensors})
    with pytest.raises(refitd.InvalidArgument, match="dtype: 'bf16' is no floating-point dtype"):
        engine_of(daemon.socket, "cast", dtype="bf16")


def test_engines_that_are_missing_are_counted_and_a_receiver_alone_waits_no_longer_than_it_is_told(daemon):
    sender, receiver = (engine_of(daemon.socket, "alone", begin_seconds=0.3) for _ in range(2))
    sender.init_process_group(role="trainer", rank=0, world_size=1, instances=2)
    receiver.init_process_group(role="engine", rank=0, world_size=1, instances=2)

    async def receive():
        return [name async for name, _ in receiver.receive_weights()]

    with pytest.raises(refitd.DeadlineExceeded, match="the actor did not begin"):
        asyncio.run(receive())

    async def both():
        return await asyncio.gather(sender.send_weights(iter(usual(0))), receive(), return_exceptions=True)

    sent, received = asyncio.run(both())
    assert isinstance(sent, refitd.FailedPrecondition) and "1 of 2 engine instances" in str(sent)
    assert isinstance(received, refitd.UpdateAborted) and "1 of 2 engine instances" in str(received)
