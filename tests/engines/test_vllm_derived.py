"""Derived tensors have the bits of vLLM's own online quantisation, and engines that quantise so get them. REFITD_DERIVED_ELEMENTS: how many elements of a kind are compared on a CPU,
2^25 by default. On a GPU these engines serve with vLLM's own kernels."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models
import pytest
import refitd
import support
import torch
from safetensors.torch import load_file, save_file
from support import VLLM_ON_GPU, CheckpointTrainer, EngineProcess, check_refused, following, manifest_of, need_gpus, update

ELEMENTS = int(os.environ.get("REFITD_DERIVED_ELEMENTS", 1 << 25))
SHAPE = (2048, 2048)
# By which kind vLLM quantises in blocks, and what the forward proof does not see: captured graphs.
BLOCKS = "fp8_block_inductor" if VLLM_ON_GPU else "fp8_block"
UNPROVED = {"CUDA graphs"} if VLLM_ON_GPU else set()


def check_proved(delivery: dict[str, Any]) -> None:
    """The forward proof saw all that the engine computes with, but for what attention makes of `kv_b_proj` on a GPU."""
    unproved = {name for name in delivery["proof"]["unproved"] if not (VLLM_ON_GPU and ("mla_attn" in name or "kv_b_proj" in name))}
    assert unproved == UNPROVED, delivery["proof"]


def weights(seed: int) -> torch.Tensor:
    """Weights as a model has them; of very different sizes, some too small for a scale of their own; ties and powers of two."""
    made = torch.Generator().manual_seed(seed)
    if seed % 3 == 0:
        return torch.randn(SHAPE, generator=made) * 0.02
    if seed % 3 == 1:
        sizes = torch.exp2(torch.randint(-40, 8, (SHAPE[0] // 128, 1), generator=made).float())
        return torch.randn(SHAPE, generator=made) * sizes.repeat_interleave(128, 0)
    halves = torch.randint(-63, 64, SHAPE, generator=made).float() / 32
    halves[:128, :256] = 0
    return halves * torch.exp2(torch.randint(-30, 5, SHAPE, generator=made).float())


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    values, scales = per_block_cast_to_fp8(weight)
    return values, scales


def by_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.online.fp8")
    if not hasattr(fp8, "_fp8_quant_per_channel"):
        pytest.skip("this vLLM does not quantise online by channels")
    scales = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
    return fp8._fp8_quant_per_channel(weight, scales), scales


def serve(engine: refitd.Engine) -> None:
    for event in engine:
        if isinstance(event, refitd.Prepare):
            event.ready()


@pytest.mark.skipif(VLLM_ON_GPU, reason="compares what vLLM computes on a CPU")
@pytest.mark.parametrize("kind,scales,quantise", [("fp8_block", (16, 16), in_blocks), ("fp8_channel", (2048, 1), by_channels)])
def test_values_and_scales_have_the_bits_of_vllm(
    kind: str, scales: tuple[int, int], quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], daemon: Any
) -> None:
    pytest.importorskip("vllm")
    weight = refitd.empty(SHAPE, torch.bfloat16, like="torch")
    served = {"w.q": refitd.empty(SHAPE, torch.float8_e4m3fn, like="torch"), "w.s": refitd.empty(scales, torch.float32, like="torch")}
    source = refitd.TensorSpec("w", "bfloat16", SHAPE)
    with refitd.Trainer("g", socket=daemon.socket, device="host") as trainer, refitd.Engine(
        "g", instance="i", socket=daemon.socket, device="host"
    ) as engine:
        trainer.register({"w": weight})
        engine.register(served, derived={"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")})
        thread = threading.Thread(target=serve, args=(engine,))
        thread.start()
        try:
            for version in range(1, max(1, ELEMENTS // weight.numel()) + 1):
                weight.copy_(weights(version))
                trainer.refit(version)
                expected = dict(zip(("w.q", "w.s"), quantise(weight)))
                for name, tensor in expected.items():
                    different = served[name].view(torch.uint8) != tensor.contiguous().view(torch.uint8)
                    assert not different.any(), (version, name, int(different.sum()))
        finally:
            engine.close()
            thread.join()


# ---- engines that quantise online ----


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets vLLM serve FP8 weights in blocks on a CPU (startup/sitecustomize.py)."""
    if not VLLM_ON_GPU:
        support.serve_blocks(monkeypatch)


@pytest.fixture
def derives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines derive what they quantise when they load it."""
    monkeypatch.setenv("REFITD_DERIVED", "on")


class PushingTrainer(CheckpointTrainer):
    """A trainer that pushes its tensors."""

    def send(self, version: int, checkpoint: Path, seconds: float = 120.0) -> refitd.UpdateResult:
        made = self.trainer.update(version, duration_seconds=seconds)
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            made.push(name, tensor)
        return made.commit()


def check_five_versions(*arguments: Any, **options: Any) -> dict[str, Any]:
    return support.check_five_versions(EngineProcess, *arguments, **options)


def delivered_by(kind: type[CheckpointTrainer], checkpoints: list[Path], daemon: Any, tmp_path: Path) -> dict[str, Any]:
    """How versions reach an engine that quantises by channels, which took the second checkpoint from such a trainer and holds what a fresh engine holds."""
    options: dict[str, Any] = dict(dtype="bfloat16", quantization="fp8_per_channel")
    expected = support.fresh(EngineProcess, checkpoints[1], tmp_path, **options)
    trainer = kind(daemon.socket, checkpoints[0])
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), **options) as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[1])
            support.check_holds(engine, expected, 1)
            delivery: dict[str, Any] = engine.call("status")[0]["delivery"]
            return delivery
    finally:
        trainer.close()


def quantised(delivery: dict[str, Any], scales: str) -> set[str]:
    """The values and scales of layers that quantise."""
    listed = {*delivery["direct"], *delivery["processed"]}
    suffix = scales.removeprefix("weight")
    return {name for values in listed if values + suffix in listed for name in (values, values + suffix)}


@pytest.mark.parametrize("name, tp", [("qwen3", 1), ("qwen3-one-kv-head", 1), ("llama-bias", 1), ("qwen3", 2)])
def test_five_versions_where_weights_are_quantised_by_channels(name: str, tp: int, folder: Path, daemon: Any, tmp_path: Path, derives: None) -> None:
    delivery = check_five_versions(name, folder, daemon, tmp_path, quantization="fp8_per_channel", tp=tp)
    assert set(delivery["derived"]) == quantised(delivery, "weight_scale") and len(delivery["derived"]) >= 16
    assert delivery["derived"]["model.layers.0.self_attn.qkv_proj.weight"] == "values of fp8_channel"
    assert set(delivery["derived"]) <= set(delivery["direct"]) and not delivery["loader_bytes"], delivery
    assert delivery["proof"]["proved"] == len(delivery["direct"]), delivery["proof"]
    check_proved(delivery)


# By checkpoint and number of ranks, the layers whose parts cut blocks, which are processed.
CUT = {("qwen3", 1): "", ("llama-bias", 1): "", ("qwen3-one-kv-head", 1): "qkv_proj", ("qwen3", 2): "qkv_proj"}


@pytest.mark.parametrize("name, tp", CUT)
def test_five_versions_where_weights_are_quantised_in_blocks(
    name: str, tp: int, folder: Path, daemon: Any, tmp_path: Path, blocks: None, derives: None
) -> None:
    delivery = check_five_versions(name, folder, daemon, tmp_path, quantization="fp8_per_block", tp=tp)
    cut = CUT[name, tp]
    for parameter in quantised(delivery, "weight_scale_inv"):
        if cut and cut in parameter:
            assert "cuts blocks of 128" in delivery["processed"][parameter], delivery
        else:
            assert parameter in delivery["direct"], delivery
    assert delivery["derived"]["model.layers.1.mlp.down_proj.weight_scale_inv"] == f"scales of {BLOCKS}"
    check_proved(delivery)


def test_five_versions_where_attention_reads_quantised_weights_and_experts_are_not_quantised(
    folder: Path, daemon: Any, tmp_path: Path, blocks: None, derives: None
) -> None:
    how = {"quantization": "online", "quantization_config": {"linear": "fp8_per_block"}}
    delivery = check_five_versions("deepseek-v2-lite", folder, daemon, tmp_path, **how)
    assert delivery["derived"]["model.layers.1.self_attn.kv_b_proj.weight"] == f"values of {BLOCKS}", delivery
    assert quantised(delivery, "weight_scale_inv") == set(delivery["derived"]), delivery
    check_proved(delivery)


@pytest.mark.parametrize(
    "name, how, options",
    [
        ("qwen3-moe", "fp8_per_block", {}),
        ("qwen3-moe", "fp8_per_channel", {}),
        ("deepseek-v2-lite", "fp8_per_block", {}),
        ("qwen3-moe-wide", "fp8_per_block", dict(tp=2)),
        ("qwen3-moe", "fp8_per_channel", dict(tp=2)),
        ("qwen3-moe-wide", "fp8_per_block", dict(tp=2, enable_expert_parallel=True)),
    ],
)
def test_five_versions_where_experts_are_quantised(
    name: str, how: str, options: dict[str, Any], folder: Path, daemon: Any, tmp_path: Path, blocks: None, derives: None
) -> None:
    try:
        delivery = check_five_versions(name, folder, daemon, tmp_path, quantization=how, **options)
    except support.FreshFailed as error:
        if not VLLM_ON_GPU:
            raise
        pytest.skip(f"vLLM does not serve this tiny model so: {error}")
    scales = {"fp8_per_block": "weight_scale_inv", "fp8_per_channel": "weight_scale"}[how]
    derived = quantised(delivery, scales)
    kind = {"fp8_per_block": BLOCKS, "fp8_per_channel": "fp8_channel"}[how]
    assert delivery["derived"]["model.layers.1.mlp.experts.routed_experts.w13_weight"] == f"values of {kind}", delivery
    assert derived == set(delivery["derived"]) <= set(delivery["direct"]), delivery
    check_proved(delivery)


@pytest.mark.skipif(VLLM_ON_GPU, reason="about a kernel of these tests for CPUs")
def test_experts_whose_kernel_reads_another_format_are_processed(
    folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, derives: None
) -> None:
    support.serve_blocks(monkeypatch, "swapped")
    delivery = check_five_versions("qwen3-moe", folder, daemon, tmp_path, quantization="fp8_per_block")
    named = r"quantised otherwise than by fp8_block: element \[\d+, \d+\] of the values of 'model.layers.1.mlp.experts.0.gate_proj.weight' is .* in 'w13_weight'"
    assert re.search(named, delivery["processed"]["model.layers.1.mlp.experts.routed_experts.w13_weight"]), delivery
    assert delivery["derived"] and not any("experts" in name for name in delivery["derived"]), delivery


@pytest.mark.skipif(VLLM_ON_GPU, reason="vLLM 0.26, which ran on GPUs, does not quantise these tiny experts there")
def test_an_expert_that_no_trainer_has_is_named(folder: Path, daemon: Any, tmp_path: Path, blocks: None, derives: None) -> None:
    checkpoint = models.make("qwen3-moe", folder, 1)
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", without="model.layers.1.mlp.experts.5.up_proj.weight")
    culprit = r"'model.layers.1.mlp.experts.routed_experts.w13_weight' is filled but for 32768 elements"
    check_refused(EngineProcess, daemon, checkpoint, tmp_path, culprit, manifest=manifest, llm=dict(quantization="fp8_per_block"))


@pytest.mark.skipif(VLLM_ON_GPU, reason="on a GPU these tests capture graphs of code that is not compiled")
def test_five_versions_of_derived_tensors_in_compiled_code(folder: Path, daemon: Any, tmp_path: Path, derives: None) -> None:
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path, quantization="fp8_per_channel", enforce_eager=False)
    assert len(delivery["derived"]) == 16, delivery
    assert delivery["proof"]["ways"] == ["compiled code"], delivery["proof"]
    check_proved(delivery)


def test_five_versions_of_derived_tensors_into_arenas(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, derives: None) -> None:
    monkeypatch.setenv("REFITD_ARENA", "device")
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path, quantization="fp8_per_channel")
    assert len(delivery["derived"]) == 16 and delivery["arena_bytes"] and not delivery["in_pause"], delivery


def test_a_restarted_engine_has_its_derived_tensors(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, derives: None) -> None:
    """What was kept is compared beside the model, which nothing is written to."""
    delivery = support.check_restarts(EngineProcess, "qwen3", folder, daemon, tmp_path, monkeypatch, quantization="fp8_per_channel")
    assert len(delivery["derived"]) == 16 and not delivery["loader_bytes"], delivery


def test_an_engine_that_quantises_takes_pushes_unless_it_is_told_to_derive(folder: Path, daemon: Any, tmp_path: Path) -> None:
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    delivery = delivered_by(PushingTrainer, checkpoints, daemon, tmp_path)
    processed = quantised(delivery, "weight_scale") & delivery["processed"].keys()
    assert not delivery["derived"] and len(processed) == 16, delivery
    assert all("setting derived is not 'on'" in delivery["processed"][name] for name in processed), delivery


def test_weights_that_the_engine_casts_before_it_quantises_are_processed(folder: Path, daemon: Any, tmp_path: Path, derives: None) -> None:
    """Trainers with float32: refits would quantise that, and the engine quantises bfloat16."""
    checkpoints = [tmp_path / str(seed) for seed in (1, 2)]
    for seed, path in enumerate(checkpoints, 1):
        shutil.copytree(models.make("qwen3", folder, seed, "float32"), path)
        loaded = load_file(path / "model.safetensors")
        tensors = {name: tensor if "_proj." in name else tensor.bfloat16() for name, tensor in loaded.items()}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    delivery = delivered_by(CheckpointTrainer, checkpoints, daemon, tmp_path)
    assert not delivery["derived"] and "is not derived" in delivery["processed"]["model.layers.0.mlp.down_proj.weight"], delivery


@pytest.mark.parametrize("tp", [1, 2])
def test_a_layer_that_quantises_otherwise_is_processed_and_named(tp: int, folder: Path, daemon: Any, tmp_path: Path, derives: None) -> None:
    """A defect in one rank's arithmetic. The engine still takes versions, by its own loader."""
    need_gpus(tp)
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    options: dict[str, Any] = dict(dtype="bfloat16", quantization="fp8_per_channel", plant={"other scale": ["model.layers.1.mlp.down_proj"]}, tp=tp)
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), **options) as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[1])
            for rank in engine.call("status"):
                delivery = rank["delivery"]
                for parameter in ("weight", "weight_scale"):
                    why = delivery["processed"][f"model.layers.1.mlp.down_proj.{parameter}"]
                    assert re.search(r"quantised otherwise than by fp8_channel: element \[3, \d+\] of the (values|scales) of 'model.layers.1.mlp.down_proj.weight'", why), why
                assert len(delivery["derived"]) == 14, delivery
    finally:
        trainer.close()


# ---- engines with a quantised checkpoint ----


@pytest.mark.parametrize(
    "how, name, options",
    [
        ("fp8_block", "qwen3", {}),
        ("fp8_block_reciprocal", "qwen3", {}),
        ("fp8_block_reciprocal", "qwen3-moe", {}),
        ("fp8_block", "qwen3-moe-wide", dict(tp=2)),
        ("fp8_block", "qwen3-moe-wide", dict(tp=2, enable_expert_parallel=True)),
    ],
)
def test_bfloat16_trainers_feed_a_checkpoint_quantised_in_blocks(
    how: str, name: str, options: dict[str, Any], folder: Path, daemon: Any, tmp_path: Path, blocks: None
) -> None:
    support.check_trainers_feed_a_quantised_checkpoint(EngineProcess, folder, daemon, tmp_path, how, name, **options)


def test_trainers_with_quantised_weights_feed_a_checkpoint_quantised_in_blocks(
    folder: Path, daemon: Any, tmp_path: Path, blocks: None
) -> None:
    delivery = check_five_versions("qwen3-fp8", folder, daemon, tmp_path)
    assert not delivery["derived"] and "model.layers.0.mlp.down_proj.weight_scale_inv" in delivery["direct"], delivery


def test_a_quantised_checkpoint_is_refused_by_name_where_its_weights_can_not_be_derived(
    folder: Path, daemon: Any, tmp_path: Path, blocks: None
) -> None:
    source, quantised = models.make("qwen3", folder, 1), models.make("qwen3-fp8", folder, 1)
    culprit = r"_proj.weight' is quantised in the engine's checkpoint, and can't be derived: .* setting derived is 'off'"
    check_refused(EngineProcess, daemon, quantised, tmp_path, culprit, derived="off", manifest=str(source))


def quantised_experts(folder: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A mixture of experts, and the same quantised in blocks."""
    source, path = models.make("qwen3-moe", folder, 1), tmp_path / "quantised"
    models.quantise(source, path, lambda weight: support.quantised_in_blocks(weight, False))
    return source, path


@pytest.mark.skipif(VLLM_ON_GPU, reason="about a kernel of these tests for CPUs")
def test_a_quantised_checkpoint_whose_experts_have_a_kernel_with_another_format_is_refused_by_name(
    folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.serve_blocks(monkeypatch, "swapped")
    source, quantised = quantised_experts(folder, tmp_path)
    culprit = r"'model.layers.0.mlp.experts.0.down_proj.weight' is quantised .*, and can't be derived: '.*w2_weight' the bytes of 'w13_weight' were changed"
    check_refused(EngineProcess, daemon, quantised, tmp_path, culprit, manifest=str(source))


def test_an_expert_of_a_quantised_checkpoint_that_no_trainer_has_is_named(folder: Path, daemon: Any, tmp_path: Path, blocks: None) -> None:
    source, quantised = quantised_experts(folder, tmp_path)
    manifest = manifest_of(source, tmp_path / "manifest.json", without="model.layers.1.mlp.experts.5.down_proj.weight")
    culprit = r"layers.1.mlp.experts.*can't be derived: .*'w2_weight' gets no tensors .*, or not all of its elements: .* this rank's expert 5"
    check_refused(EngineProcess, daemon, quantised, tmp_path, culprit, manifest=manifest)
