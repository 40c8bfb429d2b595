"""Megatron's parameters as boxes, against the layouts of tests/workloads/sharding."""

import json
import os
import subprocess
import warnings
from collections import Counter
from math import prod
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from layout_util import pushed_by  # noqa: E402

import refitd  # noqa: E402
from refitd import StagingWarning, testing  # noqa: E402
from refitd.errors import InvalidArgument, Unimplemented  # noqa: E402
from refitd.integrations import megatron, slime  # noqa: E402
from refitd.integrations.megatron import QKV, Column, GatedMLP, Parallel, Replicated, Row, finish_gather, model_shards, shards, table_of  # noqa: E402
from refitd.layout.shards import Shard, collect  # noqa: E402

ALIGNMENT = 512  # of parameters in tests/workloads/sharding's arenas
PRINT_LAYOUTS = os.environ.get("REFITD_PRINT_LAYOUTS", "")  # tools/test_torch builds it


@pytest.fixture(scope="module")
def mappings():
    """The layouts that tests/workloads/sharding gives each rank, by mapping. Its block-scaled layouts are left out: no training has them."""
    assert PRINT_LAYOUTS, "REFITD_PRINT_LAYOUTS must name the program //tests/workloads/sharding:print_layouts"
    lines = subprocess.run([PRINT_LAYOUTS], check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout.splitlines()
    found = [json.loads(line) for line in lines]
    found = [m for m in found if not m["fsdp"] and not m["model"]["fp8"]]
    assert len(found) >= 15 and any(m["model"]["kv_lora"] for m in found) and any(m["model"]["kv_heads"] for m in found)
    return found


def config_of(m):
    return SimpleNamespace(
        num_attention_heads=m["heads"],
        num_key_value_heads=m["kv_heads"],
        head_dim=m["head_dim"],
        vocab_size=m["vocabulary"],
        tie_word_embeddings=m["tied"],
        kv_lora_rank=m["kv_lora"],
    )


def parameters_of(m, place):
    """(name, shape, dtype) of the parameters of a Megatron rank, in the order of tests/workloads/sharding's arena."""
    tp, hidden = place.tp_size, m["hidden"]
    padded = -(-m["vocabulary"] // (128 * tp)) * 128
    if place.stage == 0:
        yield "embedding.word_embeddings.weight", (padded, hidden), torch.bfloat16
    for i in range(place.layers):
        yield from layer_of(m, place, f"decoder.layers.{i}", place.first_layer + i)
    if place.stage == place.stages - 1:
        if not m["tied"]:
            yield "output_layer.weight", (padded, hidden), torch.bfloat16
        yield "decoder.final_layernorm.weight", (hidden,), torch.bfloat16


def layer_of(m, place, at, layer):
    tp, etp, hidden, bf16 = place.tp_size, place.etp_size, m["hidden"], torch.bfloat16
    attention = f"{at}.self_attention"
    heads = m["heads"] // tp
    yield f"{attention}.linear_qkv.layer_norm_weight" if not m["kv_lora"] else f"{at}.input_layernorm.weight", (hidden,), bf16
    if m["kv_lora"]:
        q_rows = heads * (m["nope"] + m["rope"])
        if m["q_lora"]:
            yield f"{attention}.linear_q_down_proj.weight", (m["q_lora"], hidden), bf16
            yield f"{attention}.linear_q_up_proj.layer_norm_weight", (m["q_lora"],), bf16
            yield f"{attention}.linear_q_up_proj.weight", (q_rows, m["q_lora"]), bf16
        else:
            yield f"{attention}.linear_q_proj.weight", (q_rows, hidden), bf16
        yield f"{attention}.linear_kv_down_proj.weight", (m["kv_lora"] + m["rope"], hidden), bf16
        yield f"{attention}.linear_kv_up_proj.layer_norm_weight", (m["kv_lora"],), bf16
        yield f"{attention}.linear_kv_up_proj.weight", (heads * (m["nope"] + m["v"]), m["kv_lora"]), bf16
        yield f"{attention}.linear_proj.weight", (hidden, heads * m["v"]), bf16
    else:
        rows = heads + 2 * max(1, m["kv_heads"] // tp)
        yield f"{attention}.linear_qkv.weight", (rows * m["head_dim"], hidden), bf16
        yield f"{attention}.linear_proj.weight", (hidden, heads * m["head_dim"]), bf16
        if m["qk_norms"]:
            yield f"{attention}.q_layernorm.weight", (m["head_dim"],), bf16
            yield f"{attention}.k_layernorm.weight", (m["head_dim"],), bf16
    if not m["experts"] or layer < m["first_dense"]:
        yield f"{at}.mlp.linear_fc1.layer_norm_weight", (hidden,), bf16
        yield f"{at}.mlp.linear_fc1.weight", (2 * m["ffn"] // tp, hidden), bf16
        yield f"{at}.mlp.linear_fc2.weight", (hidden, m["ffn"] // tp), bf16
        return
    yield f"{at}.pre_mlp_layernorm.weight", (hidden,), bf16
    if m["shared_experts"]:
        ffn = m["shared_experts"] * m["moe_ffn"] // tp
        yield f"{at}.mlp.shared_experts.linear_fc1.weight", (2 * ffn, hidden), bf16
        yield f"{at}.mlp.shared_experts.linear_fc2.weight", (hidden, ffn), bf16
    yield f"{at}.mlp.router.weight", (m["experts"], hidden), bf16
    if m["router_bias"]:
        yield f"{at}.mlp.router.expert_bias", (m["experts"],), torch.float32
    ffn = m["moe_ffn"] // etp
    for e in range(place.experts):
        names = ("linear_fc1.weight{}", "linear_fc2.weight{}") if layer % 2 else (
            "local_experts.{}.linear_fc1.weight",
            "local_experts.{}.linear_fc2.weight",
        )
        yield f"{at}.mlp.experts.{names[0].format(e)}", (2 * ffn, hidden), bf16
        yield f"{at}.mlp.experts.{names[1].format(e)}", (hidden, ffn), bf16


def arena_of(parameters):
    """The parameters as views of one memory, and its address."""
    entries, end = [], 0
    for name, shape, dtype in parameters:
        begin = -(-end // ALIGNMENT) * ALIGNMENT
        end = begin + prod(shape) * dtype.itemsize
        entries.append((name, shape, dtype, begin))
    memory = torch.zeros(end, dtype=torch.uint8)
    views = {n: memory[b : b + prod(s) * d.itemsize].view(d).view(s) for n, s, d, b in entries}
    return views, memory.data_ptr(), memory


def test_every_rank_of_every_mapping_holds_what_the_layouts_say(mappings):
    compared = 0
    for mapping in mappings:
        m, p = mapping["model"], mapping["parallel"]
        parallel = Parallel(p["world"], p["pp"], p["tp"], p["ep"], p["etp"], p["cp"])
        table = table_of(config_of(m))
        for rank, expected in enumerate(mapping["ranks"]):
            place = parallel.place(rank, m["layers"], m["experts"])
            parameters, base, memory = arena_of(parameters_of(m, place))
            layout = collect(shards(parameters, table, place), rank=rank, tied=False)
            names = [spec.name for spec in layout.tensors]
            found = {
                (names[b.tensor_index], b.offset, b.extent, b.memory.pointer - base + b.byte_offset, b.strides)
                for b in layout.boxes
            }
            tensors = expected["tensors"]
            pieces = {
                (tensors[t][0], tuple(offset), tuple(extent), at, tuple(strides))
                for t, offset, extent, at, strides in expected["pieces"]
            }
            assert found == pieces, (mapping["name"], rank)
            assert len(layout.boxes) == len(pieces)
            specs = {(spec.name, spec.dtype, spec.shape) for spec in layout.tensors}
            held = {(name, dtype, tuple(shape)) for name, dtype, shape in tensors}
            # A rank whose vocabulary shard is all padding lists the tensor, and has no box of it.
            assert held <= specs and {n for n, *_ in specs - held} <= {"model.embed_tokens.weight", "lm_head.weight"}
            del memory
            compared += len(pieces)
    assert compared > 14_000


def test_replicas_are_numbered_without_gaps(mappings):
    for mapping in mappings:
        m, p = mapping["model"], mapping["parallel"]
        if p["world"] > 32:
            continue
        parallel = Parallel(p["world"], p["pp"], p["tp"], p["ep"], p["etp"], p["cp"])
        numbers, counts = {}, {}
        for rank in range(p["world"]):
            place = parallel.place(rank, m["layers"], m["experts"])
            parameters, _, memory = arena_of(parameters_of(m, place))
            for shard in shards(parameters, table_of(config_of(m)), place):
                if shard.tensor is None:
                    continue
                box = (shard.name, tuple(shard.offset), tuple(shard.tensor.shape))
                numbers.setdefault(box, []).append(shard.replica[0])
                counts.setdefault(box, set()).add(shard.replica[1])
            del memory
        for box, found in numbers.items():
            assert sorted(found) == list(range(len(found))), (mapping["name"], box)
            assert counts[box] == {len(found)}, (mapping["name"], box)


def test_casts_of_all_ranks_make_every_tensor_once(mappings):
    """Pushes of all ranks of a mapping with shared KV heads, data parallelism and experts, as the daemon takes them."""
    for mapping in [m for m in mappings if m["parallel"]["world"] <= 16][::3]:
        m, p = mapping["model"], mapping["parallel"]
        parallel = Parallel(p["world"], p["pp"], p["tp"], p["ep"], p["etp"], p["cp"])
        elements, shapes = Counter(), {}
        for rank in range(p["world"]):
            place = parallel.place(rank, m["layers"], m["experts"])
            parameters, _, memory = arena_of((n, s, torch.float32) for n, s, _ in parameters_of(m, place))
            layout = collect(shards(parameters, table_of(config_of(m)), place), torch.bfloat16, rank=rank, staging="push")
            shapes |= {spec.name: spec.shape for spec in layout.tensors}
            for name, start, values in pushed_by(layout):
                elements.update((name, i) for i in range(start, start + len(values)))
            del memory
        assert set(elements.values()) == {1}
        assert len(elements) == sum(map(prod, shapes.values()))


PLACE = Parallel(4, tp=2, pp=2).place(3, layers=4)


@pytest.mark.parametrize(
    ("parameters", "table", "message"),
    [
        ({"x": (4, 2)}, {"y": Column("w")}, "rank 3: no pattern of the table matches parameter 'x'"),
        ({"x": (4, 2)}, {"x": Column("w", size=9)}, "rank 3: parameter 'x' of shape \\(4, 2\\) is no Column: .*9"),
        ({"x": (4,)}, {"x": Row("w")}, "'x'.*is no Row: it has no columns"),
        ({"x": (5, 2)}, {"x": GatedMLP("{part}")}, "'x'.*is no GatedMLP: it has no two halves"),
        ({"x": (12, 2)}, {"x": QKV("{part}", 8, 4, 2)}, "'x'.*is no QKV: .* have other rows"),
        ({"x": (12, 2)}, {"x": QKV("{part}", 9, 3, 2)}, "don't divide each other"),
        ({"layers.2.x": (2,)}, {"layers.{layer}.x": Replicated("w.{layer}")}, "is of layer 2, but the rank has 2"),
    ],
)
def test_parameters_that_do_not_fit_are_refused_with_their_name(parameters, table, message):
    tensors = {name: torch.zeros(shape) for name, shape in parameters.items()}
    with pytest.raises(InvalidArgument, match=message) as raised:
        shards(tensors, table, PLACE)
    assert raised.value.culprit == f"parameter '{next(iter(parameters))}'"


def test_layers_are_numbered_over_stages_and_ignored_parameters_are_left_out():
    table = {"*._extra_state": None, "layers.{layer}.x": Replicated("w.{layer}")}
    found = shards({"layers.1.x": torch.zeros(2), "layers.0._extra_state": torch.zeros(1)}, table, PLACE)
    assert [(s.name, s.replica) for s in found] == [("w.3", (1, 2))]
    place = Parallel(2, pp=2).place(1, layers=5, layers_of_stages=[1, 4])
    assert (place.first_layer, place.layers) == (1, 4)
    assert Parallel(2, pp=2).place(0, layers=5).layers == 3


def test_padding_of_the_vocabulary_is_never_part_of_a_shard():
    for tp, expected in ((0, (0, 4)), (1, (4, 3)), (2, None)):
        place = Parallel(3, tp=3).place(tp, layers=1)
        (shard,) = shards({"e": torch.zeros(4, 2)}, {"e": Column("w", size=7)}, place)
        assert isinstance(shard, Shard) and shard.shape == (7, 2)
        assert (None if shard.tensor is None else (shard.offset[0], len(shard.tensor))) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 8, "tp": 3}, "not divisible by pp 1 \\* cp 1 \\* tp 3"),
        ({"world_size": 8, "ep": 3}, "not divisible by pp 1 \\* ep 3 \\* etp 1"),
        ({"world_size": 8, "tp": 0}, "tp is 0"),
    ],
)
def test_meshes_that_do_not_fit_the_world_are_refused(options, message):
    with pytest.raises(InvalidArgument, match=message):
        Parallel(**options)


def test_ranks_layers_and_experts_that_do_not_fit_are_refused():
    parallel = Parallel(8, pp=2, ep=4)
    for arguments, message in (
        ((8, 4), "rank is 8"),
        ((0, 4, 6), "6 experts"),
        ((0, 4, 8, [3, 2]), "layers of stages"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            parallel.place(*arguments)


class Chunk:
    """A chunk of a model in Megatron's DistributedDataParallel."""

    def __init__(self, overlaps):
        self.ddp_config = SimpleNamespace(overlap_param_gather=overlaps)
        self.calls = []

    def start_param_sync(self, *, force_sync=False):
        self.calls.append(force_sync)


def test_gathers_that_megatron_leaves_to_the_next_forward_are_finished():
    late, whole = Chunk(True), Chunk(False)
    finish_gather([late, whole, object()])
    finish_gather(late)
    assert (late.calls, whole.calls) == ([True, True], [])


class Late(torch.nn.Module):
    """What Megatron wraps of a rank whose gathers have not ended: the forward pass, or start_param_sync, writes the new values."""

    def __init__(self):
        super().__init__()
        self.ddp_config = SimpleNamespace(overlap_param_gather=True)
        self.module = torch.nn.Linear(4, 8, bias=False)
        self.gathered = 0.0

    def start_param_sync(self, *, force_sync=False):
        with torch.no_grad():
            self.module.weight.fill_(self.gathered)


class Bridge:
    """An AutoBridge whose tasks have one mapping."""

    def get_conversion_tasks(self, model):
        mapping = type("DirectMapping", (), {"is_expert": False, "hf_param": "w", "tp_rank": 0, "tp_size": 1})()
        return [SimpleNamespace(param_weight=model[0].module.weight, mapping=mapping, global_param_name="w", megatron_module=None)]


@pytest.mark.parametrize("of", ["table", "bridge"])
def test_a_refit_of_a_model_finishes_its_gathers_and_follows_parameters_that_were_replaced(of):
    model = Late()
    if of == "table":
        shards = model_shards([model], {"weight": Replicated("w")}, Parallel(1).place(0, 1))
    else:
        shards = megatron.bridge_shards(Bridge(), [model], replica=(0, 1), expert_replica=(0, 1))
    served = torch.nn.ParameterDict({"w": torch.zeros(8, 4)})
    group = f"gathers-{of}"
    with testing.daemon() as running, warnings.catch_warnings():
        warnings.simplefilter("ignore", StagingWarning)  # the parameters are in plain memory
        with (
            refitd.Trainer(group, socket=running.socket, device="host") as trainer,
            refitd.EngineLoop(served, group=group, instance="engine", socket=running.socket, device="host", proof="off") as engine,
        ):
            trainer.register(shards)
            for version in (1, 2):
                model.module.weight = torch.nn.Parameter(torch.full((8, 4), -1.0))
                model.gathered = float(version)
                trainer.refit(version, duration_seconds=60)
                engine.wait(version, 60)
                assert served["w"].eq(version).all()


def test_a_model_of_several_chunks_is_refused_by_table():
    with pytest.raises(Unimplemented, match="2 chunks"):
        model_shards([Late(), Late()], {}, Parallel(1).place(0, 1))


def test_slimes_shards_finish_gathers_before_each_refit(monkeypatch):
    chunk = Chunk(True)
    chunk.modules = lambda: iter([])
    common = SimpleNamespace(named_params_and_buffers=lambda args, model: [])
    monkeypatch.setattr(slime, "importlib", SimpleNamespace(import_module=lambda _: common))
    monkeypatch.setattr(slime, "_place", lambda rank, args: Parallel(1).place(0, 1))

    class Updater(slime.Updater):
        settings = SimpleNamespace(table={})

    updater = Updater(None, [chunk], None, model_name="", quantization_config=None)
    updater._shards(0).made_of.first()
    assert chunk.calls == [True]
