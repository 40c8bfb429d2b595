"""SGLang on a CPU takes versions from refitd: real engines, tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
from refitd import testing
from support import CheckpointTrainer, EngineFailed, Sending, SglangProcess

pytest.importorskip("sglang")
GROUP = "engines"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def daemon() -> Any:
    with testing.daemon() as running:
        yield running


def follow(daemon: Any, **options: Any) -> dict[str, Any]:
    return {"group": GROUP, "instance": "sglang-0", "socket": daemon.socket, **options}


def fresh(checkpoint: Path, tmp_path: Path, **llm: Any) -> tuple[Any, Any]:
    """Tokens and parameters of an engine that loaded the checkpoint itself."""
    with SglangProcess(checkpoint, tmp_path / "fresh.log", follow=None, **llm) as engine:
        engine.started()
        return engine.call("generate"), engine.call("parameters")


def check_five_versions(name: str, folder: Path, daemon: Any, tmp_path: Path, load_format: str = "dummy", **llm: Any) -> dict[str, Any]:
    checkpoints = {seed: models.make(name, folder, seed) for seed in (1, 2)}
    expected = {seed: fresh(checkpoint, tmp_path, dtype="bfloat16", **llm) for seed, checkpoint in checkpoints.items()}
    assert expected[1][0] != expected[2][0], "the two checkpoints give the same tokens: the test could not fail"
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoints[1])
    options = dict(dtype="bfloat16", load_format=load_format, **llm)
    try:
        with SglangProcess(checkpoints[1], tmp_path / "live.log", follow=follow(daemon), **options) as engine:
            engine.started()
            for version, seed in enumerate((2, 1, 2, 2, 1), 1):
                sending = Sending(trainer, version, checkpoints[seed])
                assert engine.call("wait", version, 120) == version
                assert sending.result().instances[0].committed
                assert engine.call("parameters") == expected[seed][1], f"version {version}"
                assert engine.call("generate") == expected[seed][0], f"version {version}"
                assert engine.call("spans") == [[str(version), 0, 4]]
            ranks: list[dict[str, Any]] = engine.call("status")
    finally:
        trainer.close()
    assert len(ranks) == llm.get("tp", 1)
    for rank in ranks:
        delivery = rank["delivery"]
        listed = {*delivery["direct"], *delivery["processed"], *delivery["constant"]}
        assert listed == set(expected[1][1][0]), "a parameter or buffer is in no list"
    return dict(ranks[0]["delivery"])


@pytest.mark.quick
def test_five_versions_equal_a_fresh_engine(folder: Path, daemon: Any, tmp_path: Path) -> None:
    delivery = check_five_versions("qwen3", folder, daemon, tmp_path)
    assert "model.layers.0.input_layernorm.weight" in delivery["direct"]


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen2-bias", "llama-bias", "mistral-sliding", "qwen3-tied"])
def test_five_versions_of_each_architecture(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path)


@pytest.mark.parametrize("name", ["qwen3-moe"])
def test_five_versions_where_nothing_proves_direct_delivery(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """An engine that started from its checkpoint has no evidence: what SGLang post-processes goes through the arena."""
    delivery = check_five_versions(name, folder, daemon, tmp_path, load_format="auto")
    assert delivery["processed"] and delivery["direct"] and delivery["arena_bytes"]


@pytest.mark.parametrize("name", ["qwen3-one-kv-head", "qwen3-moe"])
def test_five_versions_with_two_ranks(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, tp=2)


def test_parameters_skipped_silently(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused by the parameter's name."""
    from refitd.vllm.manifest import write_manifest
    from safetensors.torch import load_file

    checkpoint = models.make("qwen3", folder, 1)
    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    write_manifest(str(tmp_path / "manifest.json"), tensors)
    trainer = CheckpointTrainer(GROUP, daemon.socket, checkpoint)
    try:
        options = follow(daemon, manifest=str(tmp_path / "manifest.json"))
        with SglangProcess(checkpoint, tmp_path / "live.log", follow=options, dtype="bfloat16") as engine:
            with pytest.raises(EngineFailed, match="model.layers.1.mlp.down_proj.weight"):
                engine.started()
    finally:
        trainer.close()
