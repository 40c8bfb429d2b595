"""Megatron-Bridge's own mapping classes over Megatron Core's own models: shards without a gather, against what its export gathers.

Bridge's package imports Transformer Engine and more, none of which its mapping classes need: their modules alone are imported here, in
the environment 2.11.0-trainers. The class of a task is therefore this test's, with the fields that Bridge's source has.
"""

import ast
import importlib
import importlib.util
import re
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="in the environment 2.11.0-trainers")
pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")
FOLDER = Path(importlib.import_module("megatron.core").__file__).parents[1] / "bridge"
if not FOLDER.is_dir():
    pytest.skip("megatron-bridge is in the environment 2.11.0-trainers", allow_module_level=True)

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd.integrations.megatron import task_shards  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import Unimplemented  # noqa: E402
from test_megatron_core import EXPERTS, VOCABULARY, megatron_model, on_cpu  # noqa: E402

SECONDS = 120


def bridge(module):
    """A module of Bridge, without what the packages above it import."""
    for name in ("", ".models", ".models.conversion", ".utils"):
        full = f"megatron.bridge{name}"
        if full not in sys.modules:
            sys.modules[full] = types.ModuleType(full)
            sys.modules[full].__path__ = [str(FOLDER.joinpath(*name.split(".")))]
    return importlib.import_module(f"megatron.bridge.{module}")


@dataclass
class Task:
    param_name: str
    global_param_name: str
    mapping: Any
    pp_rank: int | None = None
    vp_stage: int | None = None
    megatron_module: Any = None
    param_weight: Any = None


def test_tasks_have_the_fields_of_bridges_own():
    tree = ast.parse((FOLDER / "models/conversion/model_bridge.py").read_text())
    (task,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "WeightConversionTask")
    fields = [node.target.id for node in task.body if isinstance(node, ast.AnnAssign)]
    assert fields[: len(Task.__dataclass_fields__)] == list(Task.__dataclass_fields__)


def mappings(classes):
    """The mappings of Qwen3, dense and mixture of experts, by the names of Megatron Core's parameters."""
    auto, layer, to = classes.AutoMapping, "decoder.layers.{0}", "model.layers.{0}"
    attention, experts = f"{to}.self_attn", f"{to}.mlp.experts.{{1}}"
    return {
        "embedding.word_embeddings.weight": lambda n: auto(n, "model.embed_tokens.weight"),
        "output_layer.weight": lambda n: classes.ColumnParallelMapping(n, "lm_head.weight"),
        "decoder.final_layernorm.weight": lambda n: auto(n, "model.norm.weight"),
        f"{layer}.input_layernorm.weight": lambda n, i: auto(n, f"{to}.input_layernorm.weight".format(i)),
        f"{layer}.self_attention.linear_proj.weight": lambda n, i: auto(n, f"{attention}.o_proj.weight".format(i)),
        f"{layer}.self_attention.linear_qkv.weight": lambda n, i: classes.QKVMapping(
            n, *(f"{attention}.{part}_proj.weight".format(i) for part in "qkv")
        ),
        f"{layer}.self_attention.q_layernorm.weight": lambda n, i: auto(n, f"{attention}.q_norm.weight".format(i)),
        f"{layer}.self_attention.k_layernorm.weight": lambda n, i: classes.ReplicatedMapping(n, f"{attention}.k_norm.weight".format(i)),
        f"{layer}.pre_mlp_layernorm.weight": lambda n, i: auto(n, f"{to}.post_attention_layernorm.weight".format(i)),
        f"{layer}.mlp.router.weight": lambda n, i: classes.DirectMapping(n, f"{to}.mlp.gate.weight".format(i)),
        f"{layer}.mlp.linear_fc1.weight": lambda n, i: classes.GatedMLPMapping(
            n, *(f"{to}.mlp.{part}_proj.weight".format(i) for part in ("gate", "up"))
        ),
        f"{layer}.mlp.linear_fc2.weight": lambda n, i: classes.RowParallelMapping(n, f"{to}.mlp.down_proj.weight".format(i)),
        f"{layer}.mlp.experts.linear_fc1.weight{{1}}": lambda n, i, e: classes.GatedMLPMapping(
            n, *(f"{experts}.{part}_proj.weight".format(i, e) for part in ("gate", "up"))
        ),
        f"{layer}.mlp.experts.linear_fc2.weight{{1}}": lambda n, i, e: auto(n, f"{experts}.down_proj.weight".format(i, e)),
    }


def tasks_of(model, ep, ep_size):
    """The tasks of a rank, as Bridge makes them: a name with the global number of an expert, module, parameter and mapping."""
    table = mappings(bridge("models.conversion.param_mapping"))
    find = bridge("models.conversion.utils").get_module_and_param_from_name
    patterns = {re.compile(re.escape(p).replace(r"\{0\}", r"(\d+)").replace(r"\{1\}", r"(\d+)")): make for p, make in table.items()}
    for name, _ in model.named_parameters():
        # Bridge's export takes experts under the names of grouped ones only, which need Transformer Engine; these have single modules.
        whole = re.sub(
            r"local_experts\.(\d+)\.(.*)", lambda m: f"{m[2]}{int(m[1]) + ep * EXPERTS // ep_size}", name
        )
        ((make, match),) = ((make, match) for pattern, make in patterns.items() if (match := pattern.fullmatch(whole)))
        module, parameter = find([model], name, 0)
        yield Task(name, whole, make(whole, *match.groups()), 0, 0, module, parameter)


def train(rank, world, socket, group, moe, ep):
    """A trainer rank; returns what Bridge's export, by its gathers, makes of the same parameters."""
    from megatron.core import parallel_state

    tp = world // ep
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, expert_model_parallel_size=ep, expert_tensor_parallel_size=tp)
    with on_cpu(), torch.no_grad():
        model = megatron_model(tp, moe, False, ep)
        for number, (name, parameter) in enumerate(model.named_parameters()):
            replicated = "layernorm" in name or "router" in name or (ep > 1 and ".experts." not in name)
            torch.manual_seed(100 * number + (0 if replicated else rank))
            parameter.copy_(torch.randn_like(parameter))
        tasks = list(tasks_of(model, rank if ep > 1 else 0, ep))
        exported = {}
        for task in tasks:
            for name, tensor in task.mapping.megatron_to_hf(task.param_weight, task.megatron_module).items():
                exported[name] = tensor[:VOCABULARY] if "embed" in name or "lm_head" in name else tensor
        with refitd.Trainer(group, rank=rank, world_size=world, socket=socket, device="host") as trainer:
            trainer.register(task_shards([None, *tasks], vocab_size=VOCABULARY), dtype=torch.bfloat16)
            trainer.refit(1, duration_seconds=SECONDS)
    return exported


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("moe, world, ep", [(False, 1, 1), (False, 2, 1), (True, 2, 1), (True, 2, 2)])
def test_engines_get_without_a_gather_what_bridges_export_gathers(daemon, moe, world, ep):
    group = f"moe{moe}-{world}-{ep}"
    arrived = {}

    def serve():
        names = empty_checkpoint(moe)
        model = torch.nn.Module()
        for i, tensor in enumerate(names.values()):
            model.register_buffer(str(i), tensor)
        options = dict(clean=False, socket=daemon.socket, connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.EngineLoop(model, group=group, instance="a", names=names, **options) as loop:
            loop.wait(1, SECONDS)
            arrived.update({name: tensor.clone() for name, tensor in names.items()})

    serving = threading.Thread(target=serve)
    serving.start()
    results = run_ranks(world, train, daemon.socket, group, moe, ep)
    serving.join()
    exported = {name: tensor for of_rank in results for name, tensor in of_rank.items()}
    assert arrived.keys() == exported.keys()
    assert [name for name, tensor in exported.items() if not torch.equal(arrived[name], tensor.bfloat16())] == []


def empty_checkpoint(moe):
    """The tensors of the checkpoint, filled with NaN."""
    from test_megatron_core import by_checkpoint_names, config_of, transformers

    model = transformers.AutoModelForCausalLM.from_config(config_of(moe, False), dtype=torch.bfloat16)
    return {name: torch.full_like(tensor, torch.nan) for name, tensor in by_checkpoint_names(model)}


# ---- what is no plain choice of boxes ----


class Changing:
    """Stands for a mapping that changes values."""

    tp_rank, tp_size, is_expert, hf_param = 0, 1, False, "model.norm.weight"


def test_mappings_that_change_values_are_refused_by_name():
    weight = torch.zeros(4)
    for mapping in (Changing(), type("RMSNorm2ZeroCenteredRMSNormMapping", (Changing,), {})()):
        task = Task("x", "decoder.final_layernorm.weight", mapping, param_weight=weight)
        with pytest.raises(Unimplemented, match=f"'decoder.final_layernorm.weight': {type(mapping).__name__} is no plain choice") as raised:
            task_shards([task], replica=(0, 1), expert_replica=(0, 1))
        assert raised.value.culprit == "parameter 'decoder.final_layernorm.weight'"


def test_permuted_dimensions_and_gated_attention_are_refused():
    classes = bridge("models.conversion.param_mapping")
    permuting = classes.AutoMapping("x", "y", permute_dims=(1, 0))
    module = types.SimpleNamespace(config=types.SimpleNamespace(attention_output_gate=True))
    for mapping, message in ((permuting, "permutes dimensions"), (classes.QKVMapping("x", "q", "k", "v"), "gate of attention's output")):
        task = Task("x", "x", mapping, megatron_module=module, param_weight=torch.zeros(4, 4))
        with pytest.raises(Unimplemented, match=message):
            task_shards([task], replica=(0, 1), expert_replica=(0, 1))


def test_tasks_of_other_stages_are_passed_over():
    assert task_shards([None, Task("x", "x", Changing())], replica=(0, 1), expert_replica=(0, 1)) == []
