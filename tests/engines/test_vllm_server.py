"""vLLM's server takes versions while clients use it, with no call by the trainer but refit()."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from refitd import testing
from server import Load, Server, percentile
from support import CheckpointTrainer

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 26), reason="this version of vLLM has no endpoint plugins")

PROMPT = "Tell me"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [models.make("qwen3", folder, seed) for seed in (1, 2)]


def ready(server: Server, version: int) -> bool:
    code, body, _ = server.get("/refitd/ready?max_behind=0")
    return code == 200 and body["version"] == version


def test_server_under_load(checkpoints: list[Path], tmp_path: Path) -> None:
    """No completion fails or is cut, answers are those of the version that they tell, and what random weights are is never shown."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer("engines", daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            assert server.get("/refitd/ready")[0] == 503  # random weights
            result = trainer.send(1, checkpoints[0])
            assert result.instances[0].committed
            server.until(lambda: ready(server, 1), "version 1")
            texts = {0: server.complete(PROMPT)[0]}
            trainer.send(2, checkpoints[1])
            server.until(lambda: ready(server, 2), "version 2")
            texts[1] = server.complete(PROMPT)[0]
            assert texts[0] != texts[1], "the two checkpoints give the same text: the test could not fail"
            quiet = Load(server)
            server.until(lambda: quiet.completions >= 12, "completions without updates")
            quiet.stop()
            load = Load(server)
            pauses, seconds = [], []
            for version in range(3, 23):
                seconds.append(trainer.send(version, checkpoints[(version + 1) % 2]).seconds)
                server.until(lambda: ready(server, version), f"version {version}")
                pauses.append(server.get("/refitd/status")[1]["last_pause_seconds"])
                text, told = server.complete(PROMPT)
                assert (text, told) == (texts[(version + 1) % 2], version)
            load.stop()
            trainer.close()
    assert not quiet.failures and not load.failures, (quiet.failures, load.failures)
    assert load.completions > 0
    figures = {
        "gap_p50_ms": [1e3 * percentile(run.gaps, 0.5) for run in (quiet, load)],
        "gap_p99_ms": [1e3 * percentile(run.gaps, 0.99) for run in (quiet, load)],
        "refit_p50_ms": 1e3 * percentile(seconds, 0.5),
        "pause_p50_ms": 1e3 * percentile(pauses, 0.5),
        "completions": [quiet.completions, load.completions],
    }
    print("\nFIGURES " + json.dumps(figures))


def test_kill_9_of_daemon_trainer_and_server(checkpoints: list[Path], tmp_path: Path) -> None:
    """Whoever dies, the server answers with a whole version or not at all, and takes the next version."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer("engines", daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = server.complete(PROMPT)

            # The trainer goes with an update that it began.
            update = trainer.trainer.update(2)
            server.until(lambda: not server.get("/refitd/status")[1]["ready"], "the update pauses it")
            trainer.close()
            update.close()
            server.until(lambda: server.get("/refitd/status")[1]["state"] == "serving", "it serves again")
            assert server.complete(PROMPT) == first

            # The daemon goes: the version here goes on.
            daemon.kill()
            server.until(lambda: not server.get("/refitd/status")[1]["attached"], "it notices")
            assert server.get("/refitd/ready")[0] == 503
            assert server.complete(PROMPT) == first
            daemon.start()
            trainer = CheckpointTrainer("engines", daemon.socket, checkpoints[0])
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(3, checkpoints[1])
            server.until(lambda: ready(server, 3), "version 3")
            second = server.complete(PROMPT)
            assert second[0] != first[0]

            # The server goes: the one that is started instead is ready with the next version only.
            server.kill()
            server.start()
            server.up()
            assert server.get("/refitd/ready")[0] == 503
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(4, checkpoints[1])
            server.until(lambda: ready(server, 4), "version 4")
            assert server.complete(PROMPT) == (second[0], 4)
            trainer.close()
