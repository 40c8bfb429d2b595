"""Every mapping of tests/workloads/sharding, by its name, through trainers and engines of this package and a daemon.

Trainers hold what their framework would: Megatron's parameters by refitd.integrations.megatron, DTensors of a fully sharded mesh, and for FP8,
with which no framework of these trains, the boxes that tests/workloads/sharding lists. Engine ranks hold vLLM's fused parameters, by the
boxes that tests/workloads/sharding lists. What arrives is compared byte for byte with the full tensors.
"""

import json
import os
import subprocess
import threading
from math import prod
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from test_megatron import arena_of, config_of, parameters_of  # noqa: E402

import refitd  # noqa: E402
from refitd import kl, testing  # noqa: E402
from refitd.integrations import megatron  # noqa: E402
from refitd.layout.memory import Region, torch_dtype  # noqa: E402
from refitd.layout.shards import Shard  # noqa: E402

PRINT_LAYOUTS = os.environ.get("REFITD_PRINT_LAYOUTS", "")  # tools/test_torch builds it
SECONDS = 120
MOST_RANKS = 32  # a mapping of more ranks is not moved here: test_megatron compares its layouts
ALIGNMENT = 512
FP8_BLOCK = 8  # tests/workloads/sharding's tiny models have a scale for a block of so many rows and columns


def printed():
    if not PRINT_LAYOUTS:
        return []
    lines = subprocess.run([PRINT_LAYOUTS], check=True, stdout=subprocess.PIPE, text=True, timeout=120).stdout.splitlines()
    return [json.loads(line) for line in lines]


def label(mapping):
    side = "FP8" if mapping["model"]["fp8"] else "BF16"
    return f"{side} {mapping['model']['name']} {mapping['name']}"


ALL = printed()
MOVED = [mapping for mapping in ALL if mapping["parallel"]["world"] <= MOST_RANKS]
pytestmark = pytest.mark.skipif(not ALL, reason="REFITD_PRINT_LAYOUTS must name the program //tests/workloads/sharding:print_layouts")


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def test_the_published_mappings_are_among_those_that_are_moved():
    names = {(label(m).split()[0], m["name"]) for m in MOVED}
    assert len({n for side, n in names if side == "BF16"}) >= 14 and len({n for side, n in names if side == "FP8"}) >= 8
    assert len(set(map(label, ALL))) == len(ALL)


# ---- values ----


def full_tensors(mapping):
    """The model's tensors, by name, with values about as large as those of trained weights; FP8 tensors have any bytes."""
    specs = {name: (dtype, tuple(shape)) for rank in mapping["ranks"] for name, dtype, shape in rank["tensors"]}
    generator = torch.Generator().manual_seed(11)
    found = {}
    for name, (dtype, shape) in sorted(specs.items()):
        if dtype.startswith("float8"):
            values = torch.randint(0, 0x7F, shape, generator=generator, dtype=torch.uint8).view(torch_dtype(dtype))
        else:
            values = torch.randn(shape, generator=generator) * 0.2 + ("norm" in name)
            values = values.to(torch_dtype(dtype))
        found[name] = values
    return found


def box_of(tensor, offset, extent):
    return tensor[tuple(slice(o, o + n) for o, n in zip(offset, extent))]


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor.reshape(1).view(torch.uint8)


# ---- trainers ----


def megatron_trainers(mapping, full):
    """The shards of every rank by refitd.integrations.megatron; what the parameters hold is said by tests/workloads/sharding alone."""
    m, p = mapping["model"], mapping["parallel"]
    parallel = megatron.Parallel(p["world"], p["pp"], p["tp"], p["ep"], p["etp"], p["cp"])
    for rank in range(p["world"]):
        place = parallel.place(rank, m["layers"], m["experts"])
        parameters, _, memory = arena_of(parameters_of(m, place))
        for _ in views_of(mapping["ranks"][rank], memory, full):
            pass
        yield megatron.shards(parameters, megatron.table_of(config_of(m)), place)


def dtensor_trainers(mapping, full):
    """The layouts of DTensors for each rank of a mesh, made one after the other in this process: the ranks need not communicate."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as Rows
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world = mapping["parallel"]["world"]
    for rank in range(world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
        try:
            mesh = dist.init_device_mesh("cpu", (world,))
            layouts = {}
            for name, tensor in full.items():
                step = -(-tensor.shape[0] // world)
                local = tensor[rank * step : (rank + 1) * step].clone()
                layouts[name] = DTensor.from_local(
                    local, mesh, [Rows(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
                )
            yield refitd.layout.shards.collect(layouts, rank=rank, world_size=world)
        finally:
            dist.destroy_process_group()


def views_of(rank, memory, full=None):
    """The pieces that tests/workloads/sharding lists for a rank, as shards over its memory, filled from the full tensors if given."""
    for t, offset, extent, at, strides in rank["pieces"]:
        name, dtype, shape = rank["tensors"][t]
        span = (1 + sum((n - 1) * s for n, s in zip(extent, strides))) * torch_dtype(dtype).itemsize
        held = memory[at : at + span].view(torch_dtype(dtype)).as_strided(extent, strides)
        if full is not None:
            held.copy_(box_of(full[name], offset, extent))
        yield Shard(name, tuple(shape), held, tuple(offset))


def listed(rank, full, filled):
    """Makes the memory of a rank. Returns the pieces that tests/workloads/sharding lists for it, as shards over the memory, and the memory."""
    itemsizes = [torch_dtype(dtype).itemsize for _, dtype, _ in rank["tensors"]]
    end = max(
        at + (1 + sum((n - 1) * s for n, s in zip(extent, strides))) * itemsizes[t] for t, _, extent, at, strides in rank["pieces"]
    )
    region = Region(-(-end // ALIGNMENT) * ALIGNMENT)
    memory = region.tensor((region.nbytes,), "uint8")
    memory.fill_(0xFF)
    return list(views_of(rank, memory, full if filled else None)), memory


def trainers_of(mapping, full):
    if mapping["model"]["fp8"]:
        return [listed(rank, full, True)[0] for rank in mapping["ranks"]]
    return list(dtensor_trainers(mapping, full) if mapping["fsdp"] else megatron_trainers(mapping, full))


# ---- a refit ----


def register(trainer, held):
    if isinstance(held, list):
        trainer.register(held, tied=False)
    else:
        trainer.register_layout(held.tensors, held.boxes, held.pushed)


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
def refit(daemon, mapping, full):
    """Moves all that the trainers hold into the engine ranks of one instance; returns their shards and memories."""
    group = label(mapping).replace(" ", "-").replace(">", "")
    engines = [listed(rank, full, False) for rank in mapping["engine_ranks"]]
    held = trainers_of(mapping, full)
    world = len(held)
    failures = []

    def run(function, *arguments):
        try:
            function(*arguments)
        except BaseException as error:
            failures.append(error)

    def train(rank):
        options = dict(socket=daemon.socket, device="host", connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.Trainer(group, rank=rank, world_size=world, **options) as trainer:
            register(trainer, held[rank])
            trainer.refit(1, duration_seconds=SECONDS, verification="readback")

    def serve(rank):
        options = dict(socket=daemon.socket, device="host", connect=refitd.Connect(wait_seconds=SECONDS), dirty=True)
        with refitd.Engine(group, instance="vllm", rank=rank, world_size=len(engines), **options) as engine:
            engine.register(engines[rank][0], tied=False)
            event = engine.next(SECONDS)
            assert isinstance(event, refitd.Prepare), event
            event.ready()
            event = engine.next(SECONDS)
            assert isinstance(event, refitd.Committed), event

    threads = [threading.Thread(target=run, args=(train, rank)) for rank in range(world)]
    threads += [threading.Thread(target=run, args=(serve, rank)) for rank in range(len(engines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    return engines


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("mapping", MOVED, ids=label)
def test_engine_ranks_hold_the_full_tensors_byte_for_byte(daemon, mapping):
    full = full_tensors(mapping)
    engines = refit(daemon, mapping, full)
    elements = 0
    for shards, memory in engines:
        written = torch.zeros(memory.shape, dtype=torch.bool)
        for shard in shards:
            expected = box_of(full[shard.name], shard.offset, shard.tensor.shape)
            assert torch.equal(bits(shard.tensor), bits(expected)), (shard.name, shard.offset)
            at, itemsize = shard.tensor.data_ptr() - memory.data_ptr(), shard.tensor.element_size()
            span = 1 + sum((n - 1) * s for n, s in zip(shard.tensor.shape, shard.tensor.stride()))
            bytes_of = written[at : at + span * itemsize].view(-1, itemsize)
            bytes_of.as_strided((*shard.tensor.shape, itemsize), [*(s * itemsize for s in shard.tensor.stride()), 1]).fill_(True)
            elements += prod(shard.tensor.shape)
        assert (memory[~written] == 0xFF).all(), "bytes between the parameters were written"
    assert elements >= sum(tensor.numel() for name, tensor in full.items())


# ---- what trainer and engine compute ----


def transformers_config(transformers, m):
    options = dict(
        vocab_size=m["vocabulary"], hidden_size=m["hidden"], num_hidden_layers=m["layers"], num_attention_heads=m["heads"],
        tie_word_embeddings=m["tied"], max_position_embeddings=64,
    )  # fmt: skip
    if m["kv_lora"]:
        return transformers.DeepseekV3Config(
            q_lora_rank=m["q_lora"] or None, kv_lora_rank=m["kv_lora"], qk_nope_head_dim=m["nope"], qk_rope_head_dim=m["rope"],
            v_head_dim=m["v"], num_key_value_heads=m["heads"], intermediate_size=m["ffn"], moe_intermediate_size=m["moe_ffn"],
            n_routed_experts=m["experts"], n_shared_experts=m["shared_experts"], num_experts_per_tok=2, n_group=1, topk_group=1,
            first_k_dense_replace=m["first_dense"], **options,
        )  # fmt: skip
    options |= dict(num_key_value_heads=m["kv_heads"], head_dim=m["head_dim"])
    if not m["experts"]:
        return transformers.Qwen3Config(intermediate_size=m["ffn"], **options)
    return transformers.Qwen3MoeConfig(
        intermediate_size=m["moe_ffn"], moe_intermediate_size=m["moe_ffn"], num_experts=m["experts"], num_experts_per_tok=2, **options
    )


def dequantized(tensors, block):
    """The tensors in bfloat16: a block of FP8 values times its scale."""
    found = {}
    for name, tensor in tensors.items():
        scale = tensors.get(f"{name}_scale_inv")
        if scale is not None:
            whole = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
            tensor = (tensor.float() * whole[: tensor.shape[0], : tensor.shape[1]]).bfloat16()
        if not name.endswith("_scale_inv"):
            found[name] = tensor
    return found


def logprobs(transformers, m, tensors, tokens):
    """The log-probabilities that transformers' model with these tensors gives to each next token."""
    from safetensors.torch import save_file

    if m["fp8"]:
        tensors = dequantized(tensors, FP8_BLOCK)
    model = transformers.AutoModelForCausalLM.from_config(transformers_config(transformers, m), dtype=torch.bfloat16)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, f"{folder}/model.safetensors", {"format": "pt"})
        model.config.save_pretrained(folder)
        options = dict(dtype=torch.bfloat16, experts_implementation="eager", output_loading_info=True)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    with torch.no_grad():
        scores = torch.log_softmax(model.eval()(tokens).logits.float(), -1)
    return scores[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1)


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("mapping", MOVED, ids=label)
def test_the_engine_gives_tokens_the_probabilities_that_the_trainer_gives(daemon, mapping):
    transformers = pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")
    m = mapping["model"]
    full = full_tensors(mapping)
    if m["fp8"]:  # scales as small as those of weights are, so that logits are no larger than usual
        full = {name: tensor * 2**-9 if name.endswith("_scale_inv") else tensor for name, tensor in full.items()}
    arrived = {name: torch.full_like(tensor, torch.nan) for name, tensor in full.items()}
    for shards, _ in refit(daemon, {**mapping, "name": mapping["name"] + " kl"}, full):
        for shard in shards:
            box_of(arrived[shard.name], shard.offset, shard.tensor.shape).copy_(shard.tensor)
    tokens = torch.randint(0, m["vocabulary"], (2, 12), generator=torch.Generator().manual_seed(2))
    trainer = logprobs(transformers, m, full, tokens)
    result = kl.check(trainer, logprobs(transformers, m, arrived, tokens), dtype=torch.bfloat16, what=label(mapping))
    assert result.kl == 0.0, "the same bytes in the same model"
    stale = dict(arrived, **{"model.norm.weight": arrived["model.norm.weight"] * 4})
    with pytest.raises(kl.Diverged, match=mapping["name"].split("-")[0]):
        kl.check(trainer, logprobs(transformers, m, stale, tokens), dtype=torch.bfloat16, what=label(mapping))
