"""SGLang engines that are killed and started again have their version at once, where the daemon kept their arenas."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import models
import pytest
from refitd import testing
from server import SglangServer
from support import (
    CheckpointTrainer, SglangProcess, check_another_model, check_holds, check_restarts, check_restarts_after, check_starts_without, following, fresh,
    kill, restoring, update, without_weights,
)  # fmt: skip
from test_sglang_server import PROMPT, ready

pytest.importorskip("sglang")


@pytest.mark.parametrize("name,ranks", [("qwen3", 1), ("qwen3-tied", 1), ("qwen3-moe", 1), ("qwen3", 2)])
def test_a_restarted_engine_has_its_version(
    name: str, ranks: int, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_restarts(SglangProcess, name, folder, daemon, tmp_path, monkeypatch, tp=ranks)


def test_another_model_starts_with_memory_of_its_own(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_another_model(SglangProcess, folder, daemon, tmp_path, monkeypatch)


def test_an_engine_whose_cache_was_released_restarts(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The release detaches an engine, which attaches anew, and is killed then."""
    calls = [("release", ["kv_cache"]), ("resume", ["kv_cache"])]
    check_restarts_after(SglangProcess, calls, folder, daemon, tmp_path, monkeypatch)


def test_an_engine_that_starts_without_restore_leaves_nothing_kept(folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was kept is given up where the engine starts without taking it up. The engine waits for the next version."""
    checkpoints = [models.make("qwen3", folder, seed) for seed in (1, 2)]
    expected = fresh(SglangProcess, checkpoints[1], tmp_path, dtype="bfloat16")
    restoring(daemon, monkeypatch)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    start = partial(SglangProcess, checkpoints[0], follow=following(daemon), dtype="bfloat16")
    try:
        with start(log=tmp_path / "live-0.log") as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[0])
            kill(engine, daemon, 1)
        monkeypatch.setenv("REFITD_RESTORE", "off")
        with start(log=tmp_path / "live-1.log") as engine:
            check_starts_without(engine, "a rank attached that needs their place", daemon)
            update(engine, trainer, 2, checkpoints[1])
            check_holds(engine, expected, 2)
    finally:
        trainer.close()


def test_a_server_that_is_killed_serves_its_version_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The restarted server is ready, and answers with the version, before the trainer does anything."""
    checkpoints = [models.make("qwen3", tmp_path, seed) for seed in (1, 2)]
    monkeypatch.setenv("REFITD_ARENA", "device")
    monkeypatch.setenv("REFITD_RESTORE", "on")
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        options = {"SGLANG_PLUGINS": "refitd", "REFITD_INSTANCE": "sglang-0"}
        with SglangServer(checkpoints[0], tmp_path / "server.log", daemon.socket, **options) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            for version in (1, 2):
                trainer.send(version, checkpoints[version - 1])
            server.until(lambda: ready(server, 2), "version 2")
            second = server.complete(PROMPT)
            kill(server, daemon, 2)
        with SglangServer(without_weights(checkpoints[0], tmp_path / "lost"), tmp_path / "restarted.log", daemon.socket, **options) as server:
            server.up()
            server.until(lambda: ready(server, 2), "version 2")
            assert server.complete(PROMPT) == second
            assert server.spans(PROMPT, 4) == [[2, 0, 4]]
            trainer.send(3, checkpoints[0])
            server.until(lambda: ready(server, 3), "version 3")
            trainer.close()
