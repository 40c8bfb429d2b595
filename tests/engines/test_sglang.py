"""SGLang on a CPU takes versions from refitd: real engines, tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import models
import pytest
import support
from support import EngineProcess, SglangProcess, check_refused, manifest_of

pytest.importorskip("sglang")


def check_spans(engine: EngineProcess, version: int) -> None:
    """SGLang tells that all tokens of an answer are of the version."""
    assert engine.call("spans") == [[str(version), 0, 4]]


def check_five_versions(*arguments: Any, **options: Any) -> dict[str, Any]:
    return support.check_five_versions(SglangProcess, *arguments, each=check_spans, **options)


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
    delivery = check_five_versions(name, folder, daemon, tmp_path, live={"load_format": "auto"})
    assert delivery["processed"] and delivery["direct"] and delivery["arena_bytes"]


@pytest.mark.parametrize("name", ["qwen3-one-kv-head", "qwen3-moe"])
def test_five_versions_with_two_ranks(name: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    check_five_versions(name, folder, daemon, tmp_path, tp=2)


def test_parameters_skipped_silently(folder: Path, daemon: Any, tmp_path: Path) -> None:
    """A checkpoint that lacks a tensor is refused by the parameter's name."""
    checkpoint = models.make("qwen3", folder, 1)
    missing = "model.layers.1.mlp.down_proj.weight"
    manifest = manifest_of(checkpoint, tmp_path / "manifest.json", without=missing)
    check_refused(SglangProcess, daemon, checkpoint, tmp_path, missing, manifest=manifest)
