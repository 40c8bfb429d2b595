"""vLLM on a CPU takes versions from refitd: real engines, tiny models."""

from __future__ import annotations

import os
import random
import re
import time
from pathlib import Path
from typing import Any

import models
import pytest
import refitd
import support
import torch
import vllm
from safetensors.torch import load_file
from support import (
    SLEEPS, VLLM_ON_GPU, CheckpointTrainer, EngineFailed, EngineProcess, LaunchedProcesses, Sending, Tokens, check_holds, check_refused, following, fresh, manifest_of, need_gpus, update,
)  # fmt: skip

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
SEED = int(os.environ.get("REFITD_ENGINES_SEED", "1"))


# Models whose attention reads weights by itself: a defect, the layer that gets it, and the parameter that is refused then.
ATTENTION = {
    "deepseek-v2-lite": ("no derivation", "model.layers.1.self_attn.mla_attn.mla_attn", "layers.1.self_attn.mla_attn.mla_attn.W_U"),
    "granite-sinks": ("sinks copy", "model.layers.1.self_attn.attn", "layers.1.self_attn.sinks"),
}

# By checkpoint and whether vLLM runs on a GPU, what the refusal says.
REFUSED = {
    ("qwen3-int8", False): r"parameter '\S+' is removed after loading",
    ("qwen3-gptq", False): r"parameter '\S+' is removed after loading",
    ("qwen3-gptq", True): r"'\S+g_idx' is copied to elements .* that are written more than once",
}


def check_five_versions(*arguments: Any, **options: Any) -> dict[str, Any]:
    return support.check_five_versions(EngineProcess, *arguments, **options)


@pytest.mark.quick
def test_five_versions_equal_a_fresh_engine(folder: Path, daemon: Any, tmp_path: Path) -> None:
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path)
    assert "model.layers.0.input_layernorm.weight" in delivery["direct"]
    assert delivery["proof"]["proved"] == len(delivery["direct"]), delivery["proof"]
    assert set(delivery["proof"]["unproved"]) == ({"CUDA graphs"} if VLLM_ON_GPU else set()), delivery["proof"]


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name not in ("qwen3", "gpt-oss")])
def test_five_versions_of_each_architecture(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    if name in ATTENTION and VERSION < (0, 32) and not VLLM_ON_GPU:
        pytest.skip("this version of vLLM has no such attention on a CPU, or it has not been tried there")
    delivery = check_five_versions(name, folder, daemon, tmp_path)
    if not VLLM_ON_GPU:
        assert not delivery["proof"]["unproved"], delivery["proof"]


@pytest.mark.skipif(VLLM_ON_GPU or VERSION < (0, 32), reason="about attention of vLLM 0.32 on CPUs")
@pytest.mark.parametrize("name", ATTENTION)
def test_a_copy_that_attention_makes_of_weights_is_served_stale(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Attention that reads weights by itself is proved on made-up requests: where it computes with a copy that no delivery reaches, the engine is
    refused by the parameter's name."""
    plant, layer, culprit = ATTENTION[name]
    check_refused(EngineProcess, daemon, models.make(name, folder, 1), tmp_path, culprit, plant={plant: [layer]})


@pytest.mark.skipif(VLLM_ON_GPU, reason="about kernels of CPUs")
def test_repacked_moe_that_a_reload_does_not_reach_is_refused(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """The experts of GPT-OSS are repacked on a CPU, and vLLM's reload passes over them."""
    check_refused(EngineProcess, daemon, models.make("gpt-oss", folder, 1), tmp_path, "experts")


@pytest.mark.skipif(VLLM_ON_GPU, reason="about kernels of CPUs")
@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_five_versions_where_linear_layers_are_prepacked(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """With float32 vLLM's linear layers on a CPU keep a prepacked copy, and some leave the parameter empty."""
    delivery = check_five_versions(name, folder, daemon, tmp_path, dtype="float32")
    assert delivery["processed"], "nothing was processed: this processor does not prepack, and the test shows nothing"
    # No reload for what only prepacks, and memory beside the modules only for parameters that these drop once they are prepacked.
    assert {"model.layers.0.self_attn.qkv_proj", "model.embed_tokens"} <= set(delivery["prepacked"])
    reloaded = {parameter.rpartition(".")[0] for parameter in delivery["processed"]} - set(delivery["prepacked"])
    assert all(".mlp.experts" in module for module in reloaded), reloaded
    if name != "qwen3-moe":
        checkpoint = load_file(models.make(name, folder, 1, "float32") / "model.safetensors")
        dropped = sum(tensor.nbytes for key, tensor in checkpoint.items() if key.endswith("_proj.weight"))
        assert delivery["loader_bytes"] == dropped


@pytest.mark.parametrize("name", ["qwen3", "qwen3-one-kv-head", "qwen3-odd-vocabulary", "qwen3-moe"])
def test_five_versions_with_two_ranks(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, tp=2)


@pytest.mark.parametrize(
    "name, dtype, tp",
    [("qwen3", "bfloat16", 1), ("qwen3-tied", "float32", 1), ("qwen3-moe", "bfloat16", 1), ("deepseek-v2-lite", "bfloat16", 1), ("qwen3", "bfloat16", 2)],
)
def test_five_versions_into_arenas(
    name: str, dtype: str, tp: int, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions arrive in the other side of the weights, and parameters keep their values between the exchanges."""
    if name in ATTENTION and VERSION < (0, 32) and not VLLM_ON_GPU:
        pytest.skip("this version of vLLM has no such attention on a CPU")
    monkeypatch.setenv("REFITD_ARENA", "device")

    def staged(engine: EngineProcess, version: int) -> None:
        for rank in engine.call("status"):
            assert rank["staged"], version
            assert rank["processed_ahead"] == len(rank["delivery"]["ahead"]), rank

    delivery = check_five_versions(name, folder, daemon, tmp_path, dtype=dtype, tp=tp, each=staged)
    assert delivery["arena_bytes"] and not any("arena" in why for why in delivery["processed"].values()), delivery
    assert not delivery["in_pause"] and bool(delivery["ahead"]) == bool(delivery["processed"]), delivery


def test_a_weight_that_the_engine_writes_is_in_no_arena(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter that changed between its move into the arena and the attach is refused by name."""
    monkeypatch.setenv("REFITD_ARENA", "device")
    check_refused(EngineProcess, daemon, models.make("qwen3", folder, 1), tmp_path, f"{KEEPS}.weight", plant={"change": [f"{KEEPS}.weight", 0]})


def test_an_arena_needs_the_load_format(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REFITD_ARENA", "device")
    checkpoint = models.make("qwen3", folder, 1)
    trainer = CheckpointTrainer(daemon.socket, checkpoint)
    try:
        with EngineProcess(checkpoint, tmp_path / "live.log", follow=following(daemon), dtype="bfloat16", load_format="auto") as engine:
            with pytest.raises(EngineFailed, match="arena: only weights whose post-processing was watched"):
                engine.started()
    finally:
        trainer.close()


def test_stages_of_a_pipeline_are_proved_and_take_a_version(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Each stage is run alone on made-up values. vLLM 0.32 can't generate so on a CPU, and parameters are compared."""
    need_gpus(2)
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected = fresh(EngineProcess, checkpoints[1], tmp_path, dtype="bfloat16")
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    staged = dict(dtype="bfloat16", pipeline_parallel_size=2, distributed_executor_backend="mp")
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), **staged) as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[1])
            first, last = engine.call("parameters")
            held = {**first, **last}  # and tables that a single engine has once for all layers
            assert {name: held[name] for name in expected[1][0]} == expected[1][0] and first.keys() != last.keys()
            for delivery in (rank["delivery"] for rank in engine.call("status")):
                assert delivery["proof"]["proved"] == len(delivery["direct"]), delivery["proof"]
                assert VLLM_ON_GPU or not delivery["proof"]["unproved"], delivery["proof"]
    finally:
        trainer.close()


@pytest.mark.skipif(VLLM_ON_GPU, reason="there test_vllm_gpu.py has a compiled model")
@pytest.mark.parametrize("name", ["qwen3", "deepseek-v2-lite"])
def test_compiled_code_is_proved_and_takes_versions(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    if name in ATTENTION and VERSION < (0, 32):
        pytest.skip("this version of vLLM has no such attention on a CPU, or it has not been tried there")
    delivery = check_five_versions(name, folder, daemon, tmp_path, enforce_eager=False)
    assert delivery["proof"]["ways"] == ["compiled code"] and not delivery["proof"]["unproved"], delivery["proof"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_five_versions_under_an_external_launcher(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    support.check_five_versions(LaunchedProcesses, name, folder, daemon, tmp_path, tp=2)


def test_launched_processes_that_ask_at_different_times_take_each_version_together(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A process that took a version while the other generates would wait for it until the update is given up."""
    need_gpus(2)
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    choose = random.Random(SEED)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    tokens: dict[int, Tokens] = {}
    try:
        with LaunchedProcesses(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16") as engines:
            engines.started()
            for version in (1, 2):
                update(engines, trainer, version, checkpoints[version % 2])
                tokens[version % 2] = Tokens(engines.call("generate"))
            assert tokens[0].differ_from(tokens[1]), "the two checkpoints give the same tokens: the test could not fail"
            for version in range(3, 13):
                sending = Sending(trainer, version, checkpoints[version % 2])
                held = version - 1
                while held < version:
                    for process in engines.processes:
                        process.begin("poll", 0.0)
                        time.sleep(choose.random() * 0.02)
                    states = [process.result() for process in engines.processes]
                    assert states[0] == {**states[1], "last_pause_seconds": states[0]["last_pause_seconds"]}, version
                    held = states[0]["version"]
                    assert tokens[held % 2].include(engines.call("generate")), version
                assert sending.result().instances[0].committed, version
    finally:
        trainer.close()


@pytest.mark.parametrize("name", models.QUANTISED)
def test_five_versions_of_a_quantised_checkpoint(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Equal, or refused by the parameter's name where post-processing drops what the loader fills."""
    try:
        check_five_versions(name, folder, daemon, tmp_path)
    except support.FreshFailed as error:
        pytest.skip(f"vLLM does not run {name} on this processor: {error}")
    except EngineFailed as error:
        assert (name, VLLM_ON_GPU) in REFUSED and re.search(REFUSED[name, VLLM_ON_GPU], str(error)), error


@pytest.mark.skipif(VLLM_ON_GPU, reason="compares tokens for equality")
@pytest.mark.parametrize("cache", ["version", "reset", "keep"])
def test_blocks_of_another_version_are_never_found(cache: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """With `version` and `reset` no block is found that another version computed; with `keep` they are, so that the test can fail. With `version` a
    request's own salt counts as well."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    prompt = "the same long beginning " * 12  # two blocks of vLLM's on a CPU
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    first: dict[int, list[int]] = {}
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon, cache=cache), dtype="bfloat16") as engine:
            engine.started()
            for version in range(1, 6):
                update(engine, trainer, version, checkpoints[version % 2])
                tokens, found = engine.call("cached", prompt)
                assert (found > 0) == (cache == "keep" and version > 1), version
                if cache == "keep":
                    continue
                assert tokens == first.setdefault(version % 2, tokens), version
                again, found = engine.call("cached", prompt)
                assert again == tokens and found > 0, version
                assert engine.call("cached", prompt, "mine")[1] == 0 < engine.call("cached", prompt, "mine")[1], version
    finally:
        trainer.close()
    assert cache == "keep" or first[0] != first[1], "the two checkpoints give the same tokens: the test could not fail"


def test_driven_by_the_trainers_calls(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Without a driver: the calls that vLLM offers to trainers, around the trainer's refit."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected = fresh(EngineProcess, checkpoints[1], tmp_path, dtype="bfloat16")
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    llm: dict[str, Any] = dict(dtype="bfloat16", load_format="refitd", weight_transfer_config={"backend": "refitd"})
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=None, **llm) as engine:
            engine.started()
            with pytest.raises(EngineFailed, match="not attached"):
                engine.call("take", 1)
            engine.call("attach", following(daemon))
            for version, checkpoint in enumerate(checkpoints, 1):
                sending = Sending(trainer, version, checkpoint)
                engine.call("take", version)
                sending.result()
            check_holds(engine, expected, 2)
    finally:
        trainer.close()


# ---- defects that users of other ways met ----


def test_parameters_skipped_silently(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused, naming the parameter."""
    checkpoint = models.make("qwen3", folder, 1)
    missing = "model.layers.1.self_attn.q_norm.weight"
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", without=missing)
    check_refused(EngineProcess, daemon, checkpoint, tmp_path, missing, manifest=manifest)


# Norms are written in place on every processor; linear layers are where vLLM does not prepack them.
KEEPS = "model.layers.1.input_layernorm"


def test_a_copy_of_a_weight_that_no_delivery_reaches_is_served_stale(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A module that computes with a copy from its first forward is refused by name when the engine attaches."""
    check_refused(EngineProcess, daemon, models.make("qwen3", folder, 1), tmp_path, KEEPS, plant={"copy": [KEEPS, False]})


def test_a_copy_that_is_kept_by_version_follows_each_commit(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """The daemon writes past torch, and the copy is made anew since each commit raises the weight's version."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    tokens = []
    try:
        with EngineProcess(
            checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16", plant={"copy": [KEEPS, True]}
        ) as engine:
            engine.started()
            for version, number in enumerate((0, 1, 0), 1):
                update(engine, trainer, version, checkpoints[number])
                tokens.append(Tokens(engine.call("generate")))
            assert tokens[0].include(engine.call("generate"))
    finally:
        trainer.close()
    assert tokens[0].differ_from(tokens[1])


@pytest.mark.skipif(VLLM_ON_GPU, reason="about kernels of CPUs")
@pytest.mark.parametrize("name,dtype", [("qwen3", "float32"), ("qwen3-moe", "bfloat16")])
def test_prepacked_and_repacked_modules_that_are_declared_direct(name: str, dtype: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Where nothing is known of what post-processing changed, running the model tells: prepacked linear layers keep a copy, and experts are
    repacked with shape, strides and dtype as they were. They are processed then, and versions are equal to a fresh engine."""
    delivery = check_five_versions(name, folder, daemon, tmp_path, dtype=dtype, live={"plant": {"no evidence": []}})
    assert any("forward proof" in why for why in delivery["processed"].values()), delivery


def test_logits_after_a_commit_are_those_of_the_first_engine(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Two engines of one group have equal logits after each commit. One that begins to compute with a copy of a weight, after it was proved, is
    found at the next commit by the engine that commits second."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    how = [following(daemon, logits=str(tmp_path / "logits"), instance=f"engine-{number}") for number in range(2)]
    try:
        with (
            EngineProcess(checkpoints[0], tmp_path / "live-0.log", follow=how[0], dtype="bfloat16") as first,
            EngineProcess(checkpoints[0], tmp_path / "live-1.log", follow=how[1], dtype="bfloat16") as second,
        ):
            first.started()
            second.started()
            for version in (1, 2, 3):
                if version == 3:
                    second.call("plant", "copy", [KEEPS, False])
                    second.call("generate")  # makes the copy
                sending = Sending(trainer, version, checkpoints[version % 2])
                first.begin("poll", 120.0)
                second.begin("poll", 120.0)
                statuses = first.result(), second.result()
                assert len(sending.result().instances) == 2
                stale = [status["reason"] for status in statuses if status["state"] == "dirty"]
                assert len(stale) == (version == 3) and all("logits" in why for why in stale), (version, statuses)
    finally:
        trainer.close()


def test_a_replaced_parameter_is_committed_and_stale(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """After a parameter object was replaced, a version is what the model computes with, or is refused by the parameter's name."""
    name = f"{KEEPS}.weight"
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected = fresh(EngineProcess, checkpoints[1], tmp_path, dtype="bfloat16")
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16") as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[0])
            engine.call("replace", name, None)
            version = 2
            if VLLM_ON_GPU:  # the first update is refused, and registers what is there
                check_update_refused(engine, trainer, 2, checkpoints[1], name)
                version = 3
            update(engine, trainer, version, checkpoints[1])
            check_holds(engine, expected, version)
            engine.call("replace", name, 8)  # no longer of the checkpoint's shape
            check_update_refused(engine, trainer, version + 1, checkpoints[0], name)
    finally:
        trainer.close()


def check_update_refused(engine: EngineProcess, trainer: CheckpointTrainer, version: int, checkpoint: Path, culprit: str) -> None:
    sending = Sending(trainer, version, checkpoint)
    status = engine.call("poll", 120.0)
    with pytest.raises(refitd.UpdateAborted, match=culprit) as caught:
        sending.result()
    assert not caught.value.dirty
    assert status["state"] == "serving" and status["version"] == version - 1, status


def test_kv_scales_lost(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Scales that the model would ignore are refused by name."""
    checkpoint = models.make("qwen3", folder, 1)
    scale = "model.layers.0.self_attn.k_scale"
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", **{scale: torch.ones(1)})
    check_refused(EngineProcess, daemon, checkpoint, tmp_path, scale, manifest=manifest)


def test_stale_prefix_cache_after_an_update(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Blocks of a prompt that were computed with the version before are not used after an update."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected, _ = fresh(EngineProcess, checkpoints[1], tmp_path, dtype="bfloat16", enable_prefix_caching=True)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    try:
        options = dict(dtype="bfloat16", enable_prefix_caching=True)
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), **options) as engine:
            engine.started()
            for version, checkpoint in enumerate(checkpoints, 1):
                update(engine, trainer, version, checkpoint)
                tokens = [engine.call("generate") for _ in range(2)]  # the second finds blocks of the first
            assert all(expected.include(answers) for answers in tokens), tokens
    finally:
        trainer.close()


def test_random_weights_generated_from_after_sleep_of_level_2(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """An offline engine whose weights sleep discarded refuses to generate until the next version, as before the first one. After
    sleep of level 1 it generates from the weights that it kept."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    refused = "not one whole version"
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16", **SLEEPS) as engine:
            engine.started()
            with pytest.raises(EngineFailed, match=refused):
                engine.call("generate")
            tokens = []
            for version, checkpoint in enumerate(checkpoints, 1):
                update(engine, trainer, version, checkpoint)
                tokens.append(Tokens(engine.call("generate")))
            assert tokens[0].differ_from(tokens[1]), "the two checkpoints give the same tokens: the test could not fail"
            for level in (1, 2):
                engine.call("sleep", level)
                with pytest.raises(EngineFailed, match=refused):
                    engine.call("generate")
                engine.call("wake_up")
                if level == 1:
                    assert tokens[1].include(engine.call("generate"))
            with pytest.raises(EngineFailed, match=refused):
                engine.call("generate")
            update(engine, trainer, 3, checkpoints[0])
            assert tokens[0].include(engine.call("generate"))
    finally:
        trainer.close()


def test_memory_growing_per_update(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Over 200 updates neither the engine's memory nor the number of its tensors grows, where modules are processed."""
    name, dtype = ("qwen3-awq", "bfloat16") if VLLM_ON_GPU else ("qwen3-moe", "float32")
    checkpoints = [models.make(name, folder, seed, dtype) for seed in (1, 2)]
    size = (checkpoints[0] / "model.safetensors").stat().st_size
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype=dtype) as engine:
            engine.started()
            assert engine.call("status")[0]["delivery"]["processed"], "nothing is processed: the test shows nothing"
            used = []
            for version in range(1, 201):
                update(engine, trainer, version, checkpoints[version % 2])
                if version % 20 == 0:
                    used.append(engine.call("memory"))
    finally:
        trainer.close()
    # The first 40 updates warm up; a copy of the weights kept in each of the others would be 160 times the size.
    assert used[-1]["bytes"] - used[1]["bytes"] < 2 * size, [entry["bytes"] >> 20 for entry in used]
    assert used[-1]["tensors"] == used[1]["tensors"], used
    assert used[-1]["gpu_bytes"] == used[1]["gpu_bytes"], used


@pytest.mark.parametrize("tp", [1, 2])
def test_failed_update_then_serving(tp: int, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A trainer that dies with its update leaves an engine that serves the version before, or none; never a mixture."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16", tp=tp) as engine:
        engine.started()
        update(engine, trainer, 1, checkpoints[0])
        before = Tokens(engine.call("generate")), engine.call("parameters")
        engine.begin("poll", 120.0)
        begun = trainer.trainer.update(2)  # and never ended
        trainer.close()
        begun.close()
        status = engine.result()
        assert status["version"] == 1
        assert status["ready"] == (status["state"] == "serving")
        if status["ready"]:
            check_holds(engine, before, 1)
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        update(engine, trainer, 3, checkpoints[1])
        trainer.close()


def test_200_random_orders(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Updates that commit and updates that are given up, in random order: what the engine serves is always the version that it tells."""
    checkpoints = {seed: models.make("qwen3", folder, seed) for seed in (1, 2)}
    choose = random.Random(SEED)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[1])
    tokens: dict[int, Tokens] = {}
    held, version = 0, 0
    with EngineProcess(checkpoints[1], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16") as engine:
        engine.started()
        for step in range(200):
            version += 1
            what = f"seed {SEED}, step {step}"
            if held == 0 or choose.random() < 0.6:
                held = choose.choice((1, 2))
                update(engine, trainer, version, checkpoints[held])
            else:
                engine.begin("poll", 120.0)
                begun = trainer.trainer.update(version)
                if choose.random() < 0.5:
                    begun.abort("given up")
                begun.close()
                engine.result()
            status = engine.call("poll", 0.0)
            assert status["state"] == "serving", (what, status)
            if held not in tokens:
                tokens[held] = Tokens(engine.call("generate"))
            assert tokens[held].include(engine.call("generate")), what
    trainer.close()
    assert tokens[1].differ_from(tokens[2])
