"""vLLM on a GPU takes versions from refitd: what engines on a CPU can't show. All other tests of vLLM run on a GPU as well."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import models
import pytest
import torch
from support import (
    SLEEPS, VLLM_ON_GPU, CheckpointTrainer, EngineFailed, EngineProcess, FreshFailed, check_five_versions, check_holds, check_refused, following, fresh, manifest_of, update,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not VLLM_ON_GPU, reason="this vLLM runs on CPUs")


def test_five_versions_from_a_trainer_on_the_gpu(folder: Path, daemon: Any, tmp_path: Path) -> None:
    delivery = check_five_versions(EngineProcess, "qwen3", folder, daemon, tmp_path, trainer_device="cuda")
    assert not delivery["processed"]


def test_five_versions_of_a_compiled_model(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """With vLLM's defaults: torch.compile, and CUDA graphs of the pieces between attention layers."""
    check_five_versions(EngineProcess, "qwen3", folder, daemon, tmp_path, compilation_config={"mode": 3})


@pytest.mark.parametrize("name,mode", [("qwen3", 0), ("deepseek-v2-lite", 0), ("gpt-oss", 0), ("qwen3", 3), ("deepseek-v2-lite", 3)])
def test_attention_and_compiled_code_are_proved_where_that_is_required(name: str, mode: int, folder: Path, daemon: Any, tmp_path: Path) -> None:
    compilation = {"mode": mode, "cudagraph_mode": "NONE"}
    try:
        found = check_five_versions(
            EngineProcess, name, folder, daemon, tmp_path, how={"proof": "require"}, compilation_config=compilation, enforce_eager=mode == 0
        )
    except FreshFailed as error:
        pytest.skip(f"vLLM does not run this model: {error}")
    assert found["proof"]["ways"] == (["compiled code"] if mode else []), found["proof"]


def test_captured_graphs_are_refused_by_name_where_a_proof_is_required(folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_refused(EngineProcess, daemon, models.make("qwen3", folder, 1), tmp_path, "'CUDA graphs' are not replayed", proof="require")


def test_five_versions_of_gpt_oss(folder: Path, daemon: Any, tmp_path: Path) -> None:
    try:
        check_five_versions(EngineProcess, "gpt-oss", folder, daemon, tmp_path)
    except FreshFailed as error:
        pytest.skip(f"vLLM does not run this tiny GPT-OSS: {error}")


def test_kv_scales_lost_where_layers_drop_them(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Attention layers of a quantised checkpoint have parameters for scales until they are post-processed. A tensor for them is refused."""
    checkpoint = models.make("qwen3-fp8", folder, 1)
    scale = "model.layers.0.self_attn.k_scale"
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", **{scale: torch.ones(1)})
    check_refused(EngineProcess, daemon, checkpoint, tmp_path, scale, manifest=manifest)


@pytest.mark.parametrize("name", ["qwen3", "qwen3-odd-vocabulary", "qwen3-moe", "qwen3-awq"])
def test_versions_of_an_engine_that_slept(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Weights in the memory of vLLM's sleep mode are written in place, also after it woke up; CUDA graphs that were captured before the
    first sleep read them. After level 1 the engine goes on with the version that it had, after level 2 it waits for the next."""
    checkpoints = [models.make(name, folder, seed) for seed in (1, 2)]
    expected = [fresh(EngineProcess, checkpoint, tmp_path, dtype="bfloat16") for checkpoint in checkpoints]
    assert expected[0][0].differ_from(expected[1][0]), "the two checkpoints give the same tokens: the test could not fail"
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16", **SLEEPS) as engine:
            engine.started()
            version = 0

            def bring_next() -> None:
                nonlocal version
                version += 1
                update(engine, trainer, version, checkpoints[version % 2])
                check_holds(engine, expected[version % 2], version)

            bring_next()
            for level in (1, 2, 2, 1):
                awake = engine.call("sleep_mode_memory")
                engine.call("sleep", level)
                asleep = engine.call("sleep_mode_memory")
                # The daemon keeps none of it. Tests beside this one would change what is free.
                alone = "PYTEST_XDIST_WORKER" not in os.environ
                assert not alone or asleep["free"] - awake["free"] >= awake["allocated"], (awake, asleep)
                with pytest.raises(EngineFailed, match="not one whole version"):
                    engine.call("generate")
                began = time.monotonic()
                engine.call("wake_up")
                print(f"waking from level {level} took {time.monotonic() - began:.3f} s")
                if level == 1:
                    check_holds(engine, expected[version % 2], version)
                else:
                    with pytest.raises(EngineFailed, match="not one whole version"):
                        engine.call("generate")
                bring_next()
                bring_next()
    finally:
        trainer.close()
