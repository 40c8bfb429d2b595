"""vLLM on a CPU takes versions from refitd: real engines, tiny models."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from refitd import testing
from support import CheckpointTrainer, EngineFailed, EngineProcess, Sending

GROUP = "engines"
SEED = int(os.environ.get("REFITD_ENGINES_SEED", "1"))
VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def daemon() -> Any:
    with testing.daemon() as running:
        yield running


def follow(daemon: Any, **options: Any) -> dict[str, Any]:
    return {"group": GROUP, "instance": "vllm-0", "socket": daemon.socket, **options}


def fresh(checkpoint: Path, tmp_path: Path, **llm: Any) -> tuple[Any, Any]:
    """Tokens and parameters of an engine that loaded the checkpoint itself."""
    with EngineProcess(checkpoint, tmp_path / "fresh.log", follow=None, **llm) as engine:
        engine.started()
        return engine.call("generate"), engine.call("parameters")


def check_five_versions(name: str, folder: Path, daemon: Any, tmp_path: Path, **llm: Any) -> dict[str, Any]:
    dtype = llm["dtype"]
    where = folder / dtype
    where.mkdir(exist_ok=True)
    checkpoints = {seed: models.make(name, where, seed, dtype) for seed in (1, 2)}
    expected = {seed: fresh(checkpoint, tmp_path, **llm) for seed, checkpoint in checkpoints.items()}
    assert expected[1][0] != expected[2][0], "the two checkpoints give the same tokens: the test could not fail"
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[1])
    try:
        with EngineProcess(checkpoints[1], tmp_path / "live.log", follow=follow(daemon), **llm) as engine:
            engine.started()
            for version, seed in enumerate((1, 2, 1, 1, 2), 1):
                sending = Sending(trainer, version, checkpoints[seed])
                assert engine.call("wait", version, 120) == version
                assert sending.result().instances[0].committed
                assert engine.call("parameters") == expected[seed][1], f"version {version}"
                assert engine.call("generate") == expected[seed][0], f"version {version}"
            ranks: list[dict[str, Any]] = engine.call("status")
    finally:
        trainer.close()
    for rank in ranks:
        delivery = rank["delivery"]
        listed = {*delivery["direct"], *delivery["processed"], *delivery["constant"]}
        assert listed == set(expected[1][1][0]), "a parameter or buffer is in no list"
    delivery = ranks[0]["delivery"]
    with open(folder / "table.jsonl", "a") as file:
        counts = {k: len(delivery[k]) for k in ("direct", "processed", "constant", "padded", "ignored")}
        file.write(json.dumps({"model": name, "dtype": dtype, "tp": llm.get("tp", 1), "arena": delivery["arena_bytes"], **counts}) + "\n")
    return dict(delivery)


@pytest.mark.quick
def test_five_versions_equal_a_fresh_engine(folder: Path, daemon: Any, tmp_path: Path) -> None:
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path, dtype="bfloat16")
    assert "model.layers.0.input_layernorm.weight" in delivery["direct"]


@pytest.mark.parametrize("name", [name for name in models.ARCHITECTURES if name not in ("qwen3", "gpt-oss")])
def test_five_versions_of_each_architecture(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, dtype="bfloat16")


def test_repacked_moe_that_a_reload_does_not_reach_is_refused(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """The experts of GPT-OSS are repacked on a CPU, and vLLM's reload passes over them."""
    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoint = models.make("gpt-oss", folder / "bfloat16", 1)
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoint)
    try:
        with EngineProcess(checkpoint, tmp_path / "live.log", follow=follow(daemon), dtype="bfloat16") as engine:
            with pytest.raises(EngineFailed, match="experts"):
                engine.started()
    finally:
        trainer.close()


@pytest.mark.parametrize("name", ["qwen3", "qwen3-tied", "qwen3-moe"])
def test_five_versions_where_linear_layers_are_prepacked(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """With float32 vLLM's linear layers on a CPU keep a prepacked copy, and some leave the parameter empty."""
    delivery = check_five_versions(name, folder, daemon, tmp_path, dtype="float32")
    assert delivery["processed"], "nothing was processed: this processor does not prepack, and the test shows nothing"


@pytest.mark.parametrize("name", ["qwen3", "qwen3-one-kv-head", "qwen3-odd-vocabulary", "qwen3-moe"])
def test_five_versions_with_two_ranks(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, dtype="bfloat16", tp=2)


def test_driven_by_the_trainers_calls(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Without a driver: the calls that vLLM offers to trainers, around the trainer's refit."""
    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoints = [models.make("qwen3", folder / "bfloat16", seed) for seed in (1, 2)]
    expected = fresh(checkpoints[1], tmp_path, dtype="bfloat16")
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[0])
    llm: dict[str, Any] = dict(dtype="bfloat16", load_format="refitd", weight_transfer_config={"backend": "refitd"})
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=None, **llm) as engine:
            engine.started()
            with pytest.raises(EngineFailed, match="not attached"):
                engine.call("take", 1)
            engine.call("attach", follow(daemon))
            for version, checkpoint in enumerate(checkpoints, 1):
                sending = Sending(trainer, version, checkpoint)
                engine.call("take", version)
                sending.result()
            assert (engine.call("generate"), engine.call("parameters")) == expected
    finally:
        trainer.close()


# ---- defects that users of other ways met ----


def test_parameters_skipped_silently(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused, naming the parameter."""
    from safetensors.torch import load_file
    from refitd.vllm.manifest import write_manifest

    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoint = models.make("qwen3", folder / "bfloat16", 1)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    write_manifest(str(tmp_path / "manifest.json"), tensors)
    refused(daemon, checkpoint, tmp_path, "model.layers.1.self_attn.q_norm.weight")


def test_kv_scales_lost(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Scales that the model would ignore are refused by name."""
    from safetensors.torch import load_file
    from refitd.vllm.manifest import write_manifest
    import torch

    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoint = models.make("qwen3", folder / "bfloat16", 1)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    write_manifest(str(tmp_path / "manifest.json"), tensors)
    refused(daemon, checkpoint, tmp_path, "model.layers.0.self_attn.k_scale")


def refused(daemon: Any, checkpoint: Path, tmp_path: Path, culprit: str) -> None:
    """The engine does not attach with tmp_path's manifest, and its status names the culprit."""
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoint)
    try:
        options = follow(daemon, manifest=str(tmp_path / "manifest.json"))
        with EngineProcess(checkpoint, tmp_path / "live.log", follow=options, dtype="bfloat16") as engine:
            with pytest.raises(EngineFailed, match=culprit):
                engine.started()
    finally:
        trainer.close()


def test_stale_prefix_cache_after_an_update(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Blocks of a prompt that were computed with the version before are not used after an update."""
    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoints = [models.make("qwen3", folder / "bfloat16", seed) for seed in (1, 2)]
    expected, _ = fresh(checkpoints[1], tmp_path, dtype="bfloat16", enable_prefix_caching=True)
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[0])
    try:
        options = dict(dtype="bfloat16", enable_prefix_caching=True)
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=follow(daemon), **options) as engine:
            engine.started()
            for version, checkpoint in enumerate(checkpoints, 1):
                sending = Sending(trainer, version, checkpoint)
                engine.call("wait", version, 120)
                sending.result()
                tokens = [engine.call("generate") for _ in range(2)]  # the second finds blocks of the first
            assert tokens == [expected, expected]
    finally:
        trainer.close()


def test_memory_growing_per_update(folder: Path, daemon: Any, tmp_path: Path) -> None:
    (folder / "float32").mkdir(exist_ok=True)
    checkpoints = [models.make("qwen3-moe", folder / "float32", seed, "float32") for seed in (1, 2)]
    size = (checkpoints[0] / "model.safetensors").stat().st_size
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[0])
    try:
        with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=follow(daemon), dtype="float32") as engine:
            engine.started()
            used = []
            for version in range(1, 41):
                sending = Sending(trainer, version, checkpoints[version % 2])
                engine.call("wait", version, 120)
                sending.result()
                used.append(engine.call("memory"))
    finally:
        trainer.close()
    # Half of the updates warm up; a copy of the weights kept in each of the others would be 20 times the size.
    assert used[-1] - used[19] < 2 * size, [n >> 20 for n in used]


def test_failed_update_then_serving(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A trainer that dies with its update leaves an engine that serves the version before, or none; never a mixture."""
    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoints = [models.make("qwen3", folder / "bfloat16", seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[0])
    with EngineProcess(checkpoints[0], tmp_path / "live.log", follow=follow(daemon), dtype="bfloat16") as engine:
        engine.started()
        sending = Sending(trainer, 1, checkpoints[0])
        engine.call("wait", 1, 120)
        sending.result()
        before = engine.call("generate"), engine.call("parameters")
        engine.begin("poll", 120.0)
        update = trainer.trainer.update(2)  # begun, and never ended
        trainer.close()
        update.close()
        status = engine.result()
        assert status["version"] == 1
        assert status["ready"] == (status["state"] == "serving")
        if status["ready"]:
            assert (engine.call("generate"), engine.call("parameters")) == before
        trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[0])
        sending = Sending(trainer, 3, checkpoints[1])
        assert engine.call("wait", 3, 120) == 3
        sending.result()
        trainer.close()


def test_200_random_orders(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """Updates that commit and updates that are given up, in random order: what the engine serves is always the version that it tells."""
    (folder / "bfloat16").mkdir(exist_ok=True)
    checkpoints = {seed: models.make("qwen3", folder / "bfloat16", seed) for seed in (1, 2)}
    choose = random.Random(SEED)
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[1])
    tokens: dict[int, Any] = {}
    held, version = 0, 0
    with EngineProcess(checkpoints[1], tmp_path / "live.log", follow=follow(daemon), dtype="bfloat16") as engine:
        engine.started()
        for step in range(200):
            version += 1
            what = f"seed {SEED}, step {step}"
            if held == 0 or choose.random() < 0.6:
                held = choose.choice((1, 2))
                sending = Sending(trainer, version, checkpoints[held])
                assert engine.call("wait", version, 120) == version, what
                sending.result()
            else:
                engine.begin("poll", 120.0)
                update = trainer.trainer.update(version)
                if choose.random() < 0.5:
                    update.abort("given up")
                update.close()
                engine.result()
            status = engine.call("poll", 0.0)
            assert status["state"] == "serving", (what, status)
            now = engine.call("generate")
            assert now == tokens.setdefault(held, now), what
    trainer.close()
    assert tokens[1] != tokens[2]
