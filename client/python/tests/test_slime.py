"""The updaters of slime and miles over Megatron Core's own models, in the order of the frameworks' actors.

Neither is on a package index as it is used, and both need SGLang and CUDA. So two modules of each stand here as their source says
(FACTS); Megatron Core, its process groups and its models are real, in the environment 2.11.0-trainers, and the engine is a plain torch
one. With a checkout of miles or slime on PYTHONPATH the facts are compared with its source.
"""

import ast
import importlib.util
import inspect
import re
import sys
import threading
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="in the environment 2.11.0-trainers")
pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd.integrations import slime  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import FailedPrecondition, InvalidArgument, Unimplemented  # noqa: E402
from test_megatron_core import EXPERTS, LAYERS, by_checkpoint_names, config_of, megatron_model, on_cpu, transformers  # noqa: E402

SECONDS = 120
_SLIMES = {
    "__init__": (["args", "model", "weights_getter"], ["model_name", "quantization_config"]),
    "connect_rollout_engines": (
        ["rollout_engines", "rollout_engine_lock", "engine_gpu_counts", "engine_gpu_offsets", "engine_parallel_configs"], []
    ),
    "disconnect_rollout_engines": ([], []),
    "update_weights": ([], []),
    "pop_metrics": ([], []),
}  # fmt: skip
# The actors call these of UpdateWeightFromDistributed, with these positional and keyword arguments. An actor looks the class up in its
# own module when it is set up, after initialize.init has called --custom-megatron-init-path with its arguments. slime at commit
# 624b824a898ab0ec1fcb4d373004c7f3852bf515 (2026-08-21, update_weight/update_weight_from_distributed.py); miles at commit
# 31f1ca961 (2026-08-21, update_weight/update_weight_from_distributed/broadcast.py and mixin.py).
FACTS = {
    "slime": _SLIMES,
    "miles": {
        "__init__": (["args", "model", "weights_getter"], ["model_name", "quantization_config", "is_lora"]),
        "connect_rollout_engines": (["rollout_engines", "rollout_engine_lock", "engine_gpu_counts", "engine_gpu_offsets"], []),
        "is_rollout_engines_fresh": ([], []),
        "mark_engine_connection_stale": ([], []),
        "update_weights": ([], []),
        "pop_metrics": ([], []),
    },
}
UPDATERS = {"slime": slime.Updater, "miles": slime.MilesUpdater}


def named_params_and_buffers(args, model):
    """Names as slime and miles give them: global numbers of layers and grouped experts, under the prefix of Megatron's two wrappers, and expert biases."""
    from megatron.core import parallel_state as state

    first = state.get_expert_model_parallel_rank() * (args.num_experts or 0) // state.get_expert_model_parallel_world_size()
    for module in model:
        for name, parameter in module.named_parameters():
            yield "module.module." + re.sub(r"local_experts\.(\d+)\.(.*)", lambda m: f"{m[2]}{int(m[1]) + first}", name), parameter


def stand_in(framework):
    """The framework's two modules that refitd imports."""
    at = f"{framework}.backends.megatron_utils"
    actor, common = types.ModuleType(f"{at}.actor"), types.ModuleType(f"{at}.update_weight.common")
    actor.UpdateWeightFromDistributed, common.named_params_and_buffers = None, named_params_and_buffers
    for module in (actor, common):
        name = module.__name__
        for i in range(1, name.count(".") + 1):
            package = name.rsplit(".", i)[0]
            sys.modules.setdefault(package, types.ModuleType(package)).__path__ = []
        sys.modules[name] = module
    return actor


def arguments(**options):
    values = dict(num_layers=LAYERS, num_experts=None, hf_checkpoint="", colocate=False, offload_train=False)
    return types.SimpleNamespace(**{**values, **options})


@pytest.mark.parametrize("framework", FACTS)
def test_the_updater_takes_what_the_frameworks_actor_gives(framework):
    for name, (positional, keywords) in FACTS[framework].items():
        signature = inspect.signature(getattr(UPDATERS[framework], name))
        bound = [None, *positional]
        signature.bind(*bound[:3] if name == "connect_rollout_engines" else bound, **dict.fromkeys(keywords))
        if name == "connect_rollout_engines":
            signature.bind(*bound[:3], **dict.fromkeys(positional[2:]))


def test_the_facts_of_miles_are_those_of_its_source():
    found = importlib.util.find_spec("miles")
    if found is None or not found.submodule_search_locations:
        pytest.skip("needs a checkout of miles on PYTHONPATH")
    folder = Path(found.submodule_search_locations[0]) / "backends/megatron_utils/update_weight/update_weight_from_distributed"
    functions = {}
    for file in ("mixin.py", "broadcast.py"):
        for node in ast.walk(ast.parse((folder / file).read_text())):
            if isinstance(node, ast.ClassDef):
                functions.update((each.name, each) for each in node.body if isinstance(each, ast.FunctionDef))
    for name, (positional, keywords) in FACTS["miles"].items():
        told = functions[name].args
        assert [argument.arg for argument in told.args[1:]] == positional, name
        assert [argument.arg for argument in told.kwonlyargs] == keywords, name


def train(rank, world, socket, folder, moe, ep, framework):
    """Two updates, as the framework's actor makes them; returns the bits of what the second brought, by parameter, of this rank."""
    import os

    from megatron.core import parallel_state

    tp = world // ep
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)
    actor = stand_in(framework)
    args = arguments(num_experts=EXPERTS if moe else None, hf_checkpoint=folder)
    os.environ.update(REFITD_GROUP="slime", REFITD_SOCKET=socket)
    UPDATERS[framework].init(args)
    with on_cpu(), torch.no_grad():
        model = megatron_model(tp, moe, False, ep).bfloat16()
        updater = actor.UpdateWeightFromDistributed(args, [model], dict, model_name="qwen3", quantization_config=None)
        updater.weight_version = 6
        more = {"engine_parallel_configs": [{}]} if framework == "slime" else {}
        for step in (1, 2):
            if framework == "miles":  # whose ranks may change
                assert not updater.is_rollout_engines_fresh()
            if step == 1 or framework == "miles":
                updater.connect_rollout_engines(["engine"], None, engine_gpu_counts=[1], engine_gpu_offsets=[0], **more)
            for number, (name, parameter) in enumerate(model.named_parameters()):
                replicated = "layernorm" in name or "router" in name or (ep > 1 and ".experts." not in name)
                torch.manual_seed(1000 * step + 10 * number + (0 if replicated else rank))
                parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))
            if framework == "miles":
                assert updater.is_rollout_engines_fresh()
            updater.update_weights()
            if framework == "miles":
                torch.distributed.barrier()
                updater.mark_engine_connection_stale()
        metrics = updater.pop_metrics()
        updater.disconnect_rollout_engines()
    assert updater.weight_version == 8 and metrics["refitd/bytes"] > 0 and updater.pop_metrics() == {}
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("moe, ep, framework", [(False, 1, "slime"), (True, 2, "slime"), (True, 2, "miles")])
def test_each_update_brings_megatrons_parameters_to_the_engine(tmp_path, moe, ep, framework):
    config = config_of(moe, False)
    config.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    refitd.adopt(model)
    held, seen = dict(by_checkpoint_names(model)), []

    def serve(socket):
        options = dict(clean=False, socket=socket, connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.EngineLoop(model, group="slime", instance="a", names=held, **options) as loop:
            seen.append(loop.wait(8, SECONDS))

    with testing.daemon() as running:
        serving = threading.Thread(target=serve, args=(running.socket,))
        serving.start()
        first, second = run_ranks(2, train, running.socket, str(tmp_path), moe, ep, framework)
        serving.join()
    assert seen == [8]
    layer, to = "decoder.layers.1", "model.layers.1"
    if moe:  # experts 0 and 1 are of the first rank, 2 and 3 of the second
        for rank, of_rank in enumerate((first, second)):
            for local in range(EXPERTS // 2):
                expert = f"{layer}.mlp.experts.local_experts.{local}"
                number = rank * EXPERTS // 2 + local
                gate, up = of_rank[f"{expert}.linear_fc1.weight"].chunk(2)
                assert torch.equal(held[f"{to}.mlp.experts.{number}.gate_proj.weight"], gate)
                assert torch.equal(held[f"{to}.mlp.experts.{number}.up_proj.weight"], up)
                assert torch.equal(held[f"{to}.mlp.experts.{number}.down_proj.weight"], of_rank[f"{expert}.linear_fc2.weight"])
        return
    for part, index in (("gate", 0), ("up", 1)):
        whole = torch.cat([of_rank[f"{layer}.mlp.linear_fc1.weight"].chunk(2)[index] for of_rank in (first, second)])
        assert torch.equal(held[f"{to}.mlp.{part}_proj.weight"], whole)
    rows = torch.cat([of_rank[f"{layer}.self_attention.linear_proj.weight"] for of_rank in (first, second)], 1)
    assert torch.equal(held[f"{to}.self_attn.o_proj.weight"], rows)
    assert torch.equal(held[f"{to}.input_layernorm.weight"], first[f"{layer}.input_layernorm.weight"])


def resume(rank, world, socket, framework):
    """Updates of two trainings, of which the second begins behind the first's version. Returns their versions."""
    actor = stand_in(framework)
    UPDATERS[framework].install(arguments(), "resumed", update_seconds=SECONDS, socket=socket, device="host")
    versions = []
    for before in (9, 6):
        updater = actor.UpdateWeightFromDistributed(arguments(), [], dict, model_name="qwen3", quantization_config=None)
        updater._shards = lambda rank: [refitd.Shard("w", (8,), torch.full((8,), float(before)))]
        updater.weight_version = before
        updater.connect_rollout_engines(["engine"], None)
        updater.update_weights()
        updater.disconnect_rollout_engines()
        versions.append(updater.weight_version)
    return versions


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("framework", FACTS)
def test_a_training_that_resumes_behind_the_groups_version_goes_on_with_the_next(framework):
    model = torch.nn.Module()
    model.register_parameter("w", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
    refitd.adopt(model)

    def serve(socket):
        options = dict(clean=False, socket=socket, connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.EngineLoop(model, group="resumed", instance="a", names=dict(model.named_parameters()), **options) as loop:
            loop.wait(11, SECONDS)

    with testing.daemon() as running:
        serving = threading.Thread(target=serve, args=(running.socket,))
        serving.start()
        assert run_ranks(2, resume, running.socket, framework) == [[10, 11]] * 2
        serving.join()
        assert f"update to version 11: {framework}'s update 1 of this run" in running.read_log()
    assert torch.equal(model.w, torch.full((8,), 6.0))


@pytest.mark.parametrize("framework", FACTS)
def test_what_it_does_not_know_is_refused_by_name(monkeypatch, framework):
    stand_in(framework)
    updater_of = UPDATERS[framework]
    monkeypatch.setattr(updater_of, "settings", None)
    with pytest.raises(FailedPrecondition, match=rf"install\(\) for {framework} was not called"):
        updater_of(arguments(), [], dict, model_name="", quantization_config=None)
    monkeypatch.delenv("REFITD_GROUP", raising=False)
    with pytest.raises(InvalidArgument, match="REFITD_GROUP is not set"):
        updater_of.init(arguments())
    for option in ("colocate", "offload_train"):
        with pytest.raises(Unimplemented, match=f"--{option.replace('_', '-')}"):
            updater_of.install(arguments(**{option: True}), "g")
    updater_of.install(arguments(), "g")
    with pytest.raises(Unimplemented, match="quantized"):
        updater_of(arguments(), [], dict, model_name="", quantization_config={"quant_method": "fp8"})
    updater = updater_of(arguments(), [], dict, model_name="", quantization_config=None)
    with pytest.raises(FailedPrecondition, match="connect_rollout_engines"):
        updater.update_weights()


def test_what_only_miles_has_is_refused_by_name():
    for mode in ("p2p", "disk-delta"):
        with pytest.raises(Unimplemented, match=f"--update-weight-transfer-mode {mode}"):
            slime.miles_install(arguments(update_weight_transfer_mode=mode), "g")
    stand_in("miles")
    slime.miles_install(arguments(update_weight_transfer_mode="broadcast"), "g")
    with pytest.raises(Unimplemented, match="LoRA"):
        slime.MilesUpdater(arguments(), [], dict, model_name="", quantization_config=None, is_lora=True)
