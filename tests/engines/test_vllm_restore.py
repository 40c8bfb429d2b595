"""vLLM engines that are killed and started again have their version at once, where the daemon kept their arenas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
from refitd import testing
from server import Server
from support import (
    CheckpointTrainer, EngineProcess, LaunchedProcesses, VLLM_ON_GPU, Tokens, check_another_model, check_holds, check_restarts, check_restarts_after,
    check_starts_without, following, fresh, kill, need_gpus, restoring, update, without_weights,
)  # fmt: skip
from test_vllm_server import NATIVE_VERSIONS, PROMPT, ready

# A norm is written in place on every processor.
WEIGHT = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-odd-vocabulary", "deepseek-v2-lite"])
def test_a_restarted_engine_has_its_version(
    name: str, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_restarts(EngineProcess, name, folder, daemon, tmp_path, monkeypatch)


@pytest.mark.skipif(VLLM_ON_GPU, reason="about kernels of CPUs")
@pytest.mark.parametrize("name,dtype", [("qwen3", "float32"), ("qwen3-moe", "bfloat16")])
def test_a_restarted_engine_post_processes_what_was_kept(
    name: str, dtype: str, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the arenas has the loader's format, from which the kernel's is made anew."""
    delivery = check_restarts(EngineProcess, name, folder, daemon, tmp_path, monkeypatch, dtype=dtype)
    assert delivery["processed"]
    # A copy that a kernel's library packed can't be compared without putting it into place.
    assert bool(delivery["ahead"]) == (name == "qwen3-moe"), (delivery["ahead"], delivery["in_pause"])


@pytest.mark.parametrize("kind", [EngineProcess, LaunchedProcesses])
def test_two_ranks_restart(kind: type[EngineProcess], folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_restarts(kind, "qwen3", folder, daemon, tmp_path, monkeypatch, tp=2)


def test_a_weight_that_was_changed_is_no_version(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of which one rank wrote to its weights before it died waits for the next version with all its ranks."""
    rank, ranks = 1, 2
    need_gpus(ranks)
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected = fresh(EngineProcess, checkpoints[1], tmp_path, dtype="bfloat16", tp=ranks)
    restoring(daemon, monkeypatch)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    start = partial(EngineProcess, checkpoints[0], follow=following(daemon), dtype="bfloat16", tp=ranks)
    try:
        with start(log=tmp_path / "live-0.log") as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[0])
            engine.call("plant", "change", [WEIGHT, rank])
            kill(engine, daemon, 1, ranks)
        with start(log=tmp_path / "live-1.log") as engine:
            check_starts_without(engine, "its content differs", daemon)
            update(engine, trainer, 2, checkpoints[1])
            check_holds(engine, expected, 2)
    finally:
        trainer.close()


def test_another_model_starts_with_memory_of_its_own(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_another_model(EngineProcess, folder, daemon, tmp_path, monkeypatch)


def test_an_engine_that_slept_restarts(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleep detaches an engine, which attaches anew, and is killed then."""
    check_restarts_after(EngineProcess, [("sleep", 1), ("wake_up",)], folder, daemon, tmp_path, monkeypatch)


def test_a_server_that_is_killed_serves_its_version_again(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted server is ready, and answers with the version, before the trainer does anything."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    monkeypatch.setenv("REFITD_ARENA", "device")
    monkeypatch.setenv("REFITD_RESTORE", "on")
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            for version in (1, 2):
                trainer.send(version, checkpoints[version - 1])
            server.until(lambda: ready(server, 2), "version 2")
            second = Tokens([server.answer(PROMPT)[0]])
            kill(server, daemon, 2)
        lost = without_weights(checkpoints[0], tmp_path / "lost")
        with Server(lost, tmp_path / "restarted.log", daemon.socket) as server:
            server.up()
            server.until(lambda: ready(server, 2), "version 2")
            server.check_answer(PROMPT, second, 2)
            if NATIVE_VERSIONS:
                assert server.choice(PROMPT)[0]["refitd_version"] == [{"version": 2, "start": 0, "end": 8}]
            trainer.send(3, checkpoints[0])
            server.until(lambda: ready(server, 3), "version 3")
            trainer.close()
