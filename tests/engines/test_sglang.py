"""SGLang on a CPU takes versions from refitd: real engines, tiny models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import refitd
import support
import torch
from refitd.serving.proof import KEPT_LOGITS
from safetensors.torch import save_file
from support import CheckpointTrainer, EngineFailed, EngineProcess, SglangProcess, check_refused, following, manifest_of, update

pytest.importorskip("sglang")


def check_spans(engine: EngineProcess, version: int) -> None:
    """Checks that SGLang tells for all tokens of an answer that they are of the version."""
    assert engine.call("spans") == [[str(version), 0, 4]]


def check_five_versions(*arguments: Any, **options: Any) -> dict[str, Any]:
    return support.check_five_versions(SglangProcess, *arguments, each=check_spans, **options)


@pytest.mark.quick
def test_five_versions_equal_a_fresh_engine(folder: Path, daemon: Any, tmp_path: Path) -> None:
    logits = tmp_path / "logits"
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path, how={"logits": str(logits)})
    assert len(list(logits.iterdir())) == KEPT_LOGITS  # each commit leaves its own
    assert "model.layers.0.input_layernorm.weight" in delivery["direct"]
    assert delivery["proof"]["proved"] == len(delivery["direct"]) and not delivery["proof"]["unproved"], delivery["proof"]


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-bias", "llama-bias", "mistral-sliding", "qwen3-tied"])
def test_five_versions_of_each_architecture(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path)


@pytest.mark.parametrize("name", ["qwen3-moe"])
def test_five_versions_where_nothing_proves_direct_delivery(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """An engine that started from its checkpoint has no evidence: what SGLang post-processes goes through loader tensors."""
    delivery = check_five_versions(name, folder, daemon, tmp_path, live={"load_format": "auto"})
    assert delivery["processed"] and delivery["direct"] and delivery["loader_bytes"]


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_five_versions_into_arenas(name: str, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions arrive in the other side of the weights, and parameters keep their values between the exchanges."""
    monkeypatch.setenv("REFITD_ARENA", "device")

    def staged(engine: EngineProcess, version: int) -> None:
        assert all(rank["staged"] for rank in engine.call("status")), version

    delivery = support.check_five_versions(SglangProcess, name, folder, daemon, tmp_path, each=staged)
    assert delivery["arena_bytes"] and not any("arena" in why for why in delivery["processed"].values()), delivery


@pytest.mark.parametrize("name,tp", [("qwen3", 1), ("qwen2-bias", 2)])
def test_five_versions_are_post_processed_before_the_pause(
    name: str, tp: int, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With linear layers of another format (startup/sitecustomize.py), each module is processed aside, by SGLang's own loader."""
    monkeypatch.setenv("REFITD_ARENA", "device")
    monkeypatch.setenv("REFITD_ENGINES_REPACKED", "1")

    def staged(engine: EngineProcess, version: int) -> None:
        for rank in engine.call("status"):
            assert rank["staged"] and rank["processed_ahead"] == len(rank["delivery"]["ahead"]), rank

    delivery = support.check_five_versions(SglangProcess, name, folder, daemon, tmp_path, each=staged, tp=tp)
    assert not delivery["in_pause"], delivery["in_pause"]
    assert {"model.layers.0.self_attn.qkv_proj", "model.layers.1.mlp.down_proj"} <= set(delivery["ahead"])


@pytest.mark.parametrize("name", ["qwen3", "qwen3-moe"])
def test_five_versions_with_two_ranks(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, tp=2)


@pytest.mark.parametrize(
    "how, name, options",
    [
        ("fp8_block", "qwen3", {}),
        ("fp8_block_reciprocal", "qwen3", {}),
        ("fp8_block_reciprocal", "qwen3-moe", {}),
        ("fp8_block", "qwen3-moe-wide", dict(tp=2)),
    ],
)
def test_bfloat16_trainers_feed_a_checkpoint_quantised_in_blocks(
    how: str, name: str, options: dict[str, Any], folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    support.serve_blocks(monkeypatch)
    support.check_trainers_feed_a_quantised_checkpoint(SglangProcess, folder, daemon, tmp_path, how, name, **options)


def test_parameters_skipped_silently(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused by the parameter's name."""
    checkpoint = models.make("qwen3", folder, 1)
    missing = "model.layers.1.mlp.down_proj.weight"
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", without=missing)
    check_refused(SglangProcess, daemon, checkpoint, tmp_path, missing, manifest=manifest)


KEEPS = "model.layers.1.self_attn.q_norm"


def test_a_copy_of_a_weight_that_no_delivery_reaches_is_served_stale(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A module that computes with a copy from its first forward is refused by name when the engine attaches."""
    check_refused(SglangProcess, daemon, models.make("qwen3", folder, 1), tmp_path, KEEPS, plant={"copy": [KEEPS, False]})


def test_random_weights_generated_from_after_their_memory_was_released(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """An offline engine whose weights went refuses to generate until the next version, as before the first one, and also where they went
    after other memory. Where the cache alone went, it generates from the weights that it kept. SGLang on a CPU keeps all memory, so that
    what is seen here is the adapter's part."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    refused = "not one whole version"
    try:
        with SglangProcess(checkpoints[0], tmp_path / "live.log", follow=following(daemon), dtype="bfloat16") as engine:
            engine.started()
            with pytest.raises(EngineFailed, match=refused):
                engine.call("generate")
            tokens = []
            for version, checkpoint in enumerate(checkpoints, 1):
                update(engine, trainer, version, checkpoint)
                tokens.append(engine.call("generate"))
            assert tokens[0] != tokens[1], "the two checkpoints give the same tokens: the test could not fail"
            orders: tuple[list[list[str] | None], ...] = ([["kv_cache"]], [None], [["kv_cache"], ["weights"]])
            for order in orders:
                for tags in order:
                    engine.call("release", tags)
                    with pytest.raises(EngineFailed, match=refused):
                        engine.call("generate")
                for tags in reversed(order):
                    engine.call("resume", tags)
                if order == [["kv_cache"]]:
                    assert engine.call("generate") == tokens[1]
                    continue
                status = engine.call("poll", 0.0)
                assert (status["state"], status["ready"]) == ("dirty", False), status
                with pytest.raises(EngineFailed, match=refused):
                    engine.call("generate")
                version += 1
                update(engine, trainer, version, checkpoints[(version + 1) % 2])
                assert engine.call("generate") == tokens[(version + 1) % 2]
    finally:
        trainer.close()


class LoraProcess(SglangProcess):
    """SGLang with LoRA, on a machine that has no pinned memory."""

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        super()._set_up(environment, llm, follows, tp)
        environment["REFITD_ENGINES_UNPINNED"] = "1"
        llm.update(enable_lora=True, max_lora_rank=8, lora_target_modules=models.ADAPTED_NAMES, lora_backend="torch_native")


def test_an_adapter_takes_versions_in_memory(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """With each version the tokens are those of SGLang with the same adapter from its files."""
    checkpoint = models.make("qwen3", folder, 1)
    adapters = {seed: models.write_adapter(tmp_path / f"adapter-{seed}", seed) for seed in (1, 2)}
    scaling = {f"{name.removesuffix('.lora_A.weight')}.lora_scaling" for name in adapters[1] if name.endswith(".lora_A.weight")}
    held = {name: refitd.empty(tensor.shape, tensor.dtype) for name, tensor in adapters[1].items()}
    held |= {name: refitd.empty(1, "float32", like="torch").fill_(2.0) for name in scaling}
    with LoraProcess(checkpoint, tmp_path / "log", follow=None, dtype="bfloat16") as engine:
        engine.started()
        expected = {}
        for seed in adapters:
            assert engine.call("load_adapter", f"file-{seed}", str(tmp_path / f"adapter-{seed}"))
            expected[seed] = engine.call("generate", f"file-{seed}")
        base = engine.call("generate")
        assert expected[1] != expected[2] and base not in expected.values(), "the test could not fail"
        with refitd.Trainer("adapter", socket=daemon.socket, device="host") as trainer:
            trainer.register(held)
            engine.call("follow_adapter", str(tmp_path / "adapter-1"), {"group": "adapter", "instance": "a", "socket": daemon.socket})
            for version, seed in enumerate((2, 1, 2), 1):
                for name, tensor in adapters[seed].items():
                    held[name].copy_(tensor)
                trainer.refit(version)
                assert engine.call("wait_adapter", version) == version
                assert engine.call("generate", "policy") == expected[seed], f"version {version}"
            held[min(scaling)].fill_(3.0)
            trainer.refit(4)
            with pytest.raises(EngineFailed, match="SGLang has one for all"):
                engine.call("wait_adapter", 4)
        assert engine.call("generate") == base
