"""SGLang's server takes versions while clients use it, with no call by the trainer but refit()."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
from refitd import testing
from server import Server, SglangServer
from support import CALL_SECONDS, HERE, CheckpointTrainer

pytest.importorskip("sglang")
PROMPT = "Tell me"
TOKENS = 48
# How long a server that must not answer is listened to.
SILENCE_SECONDS = 0.3


def ready(server: Server, version: int) -> bool:
    code, body, _ = server.get("/refitd/ready?max_behind=0")
    return code == 200 and body["version"] == version


@pytest.mark.parametrize("arena", ["off", "device"])
def test_server_under_load(arena: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random weights are never shown, no request fails, and the versions of each answer's tokens rise and cover all of them. With an arena
    linear layers are repacked (startup/sitecustomize.py), while requests are served."""
    monkeypatch.setenv("REFITD_ARENA", arena)
    if arena == "device":
        monkeypatch.setenv("REFITD_ENGINES_REPACKED", "1")
        monkeypatch.setenv("PYTHONPATH", f"{HERE / 'startup'}:{os.environ['PYTHONPATH']}")
    checkpoints = [models.make("qwen3", tmp_path, seed) for seed in (1, 2)]
    spans: list[Any] = []
    failures: list[str] = []
    stop = threading.Event()

    def client(server: SglangServer, number: int) -> None:
        while not stop.is_set():
            try:
                spans.append(server.spans(f"client {number} says", TOKENS))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
                return

    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with SglangServer(checkpoints[0], tmp_path / "server.log", daemon.socket, SGLANG_PLUGINS="refitd") as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            assert server.get("/refitd/ready")[0] == 503  # random weights
            texts = {}
            for version in (1, 2):
                assert trainer.send(version, checkpoints[version % 2]).instances[0].committed
                server.until(lambda: ready(server, version), f"version {version}")
                texts[version % 2], told = server.complete(PROMPT)
                assert told == version
            assert texts[0] != texts[1], "the two checkpoints give the same text: the test could not fail"
            clients = [threading.Thread(target=client, args=(server, i), daemon=True) for i in range(3)]
            for thread in clients:
                thread.start()
            for version in range(3, 13):
                trainer.send(version, checkpoints[version % 2])
                server.until(lambda: ready(server, version), f"version {version}")
                assert server.complete(PROMPT) == (texts[version % 2], version)
                assert server.get("/refitd/status")[1]["staged"] == (arena == "device")
            stop.set()
            for thread in clients:
                thread.join(CALL_SECONDS)
                assert not thread.is_alive(), "a request does not end"
            # The daemon goes: the version here goes on, and the next is taken when it is back.
            daemon.kill()
            server.until(lambda: not server.get("/refitd/status")[1]["attached"], "it notices")
            assert server.get("/refitd/ready")[0] == 503
            assert server.complete(PROMPT) == (texts[0], 12)
            daemon.start()
            trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(13, checkpoints[1])
            server.until(lambda: ready(server, 13), "version 13")
            assert server.complete(PROMPT) == (texts[1], 13)
            trainer.close()
    assert not failures, failures
    for found in spans:
        assert found[0][1] == 0 and found[-1][2] == TOKENS, found
        assert all(a[2] == b[1] and a[0] < b[0] for a, b in zip(found, found[1:])), found
    assert any(len(found) > 1 for found in spans), "no answer was under way during an update: the test shows nothing"


def test_random_weights_served_after_their_memory_was_released(tmp_path: Path) -> None:
    """A server whose weights went gives no token after it woke up, neither to a request that came while it slept nor to a later one, until
    a version is committed; SGLang's own /continue_generation is refused meanwhile."""
    checkpoints = [models.make("qwen3", tmp_path, seed) for seed in (1, 2)]
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with SglangServer(checkpoints[0], tmp_path / "server.log", daemon.socket, SGLANG_PLUGINS="refitd") as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            assert server.post("/continue_generation", {}) == 409  # random weights
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = server.complete(PROMPT)
            assert server.post("/continue_generation", {}) == 200
            with ThreadPoolExecutor(1) as pool:
                for tags in (["kv_cache"], ["weights"]):
                    assert server.post("/release_memory_occupation", {"tags": tags}) == 200
                early = pool.submit(server.complete, PROMPT)
                assert server.get("/refitd/status")[1]["state"] == "asleep"
                assert server.post("/resume_memory_occupation", {"tags": ["weights", "kv_cache"]}) == 200
                status = server.get("/refitd/status")[1]
                assert (status["state"], status["ready"]) == ("dirty", False), status
                assert server.post("/continue_generation", {}) == 409
                assert server.gives_no_token(PROMPT, SILENCE_SECONDS)
                assert not early.done()
                server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
                trainer.send(2, checkpoints[0])
                server.until(lambda: ready(server, 2), "version 2")
                assert early.result(CALL_SECONDS)[0] == first[0]
            assert server.complete(PROMPT) == (first[0], 2)
            trainer.close()
