"""A real vLLM server in random orders of updates, sleep, waking, kills and requests (orders.py): 200 of seed 1, unless `tools/engines
--orders N --seed N` (REFITD_ENGINES_ORDERS, REFITD_ENGINES_SEED) asks for others. Each order that ran is printed."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import vllm
from engine_program import PROMPTS, TOKENS
from orders import check_random_orders
from server import Server

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 26), reason="this version of vLLM has no endpoint plugins")

# How long an engine that must not answer is listened to.
SILENCE_SECONDS = 0.3


class Served:
    """vLLM's OpenAI server and its worker, asked over HTTP. Parameters can't be asked for."""

    processes: tuple[str, ...] = ("worker", "server")
    resumes = True

    def __init__(self, model: Path, folder: Path, daemon: Any) -> None:
        self._make = partial(Server, model, folder / "server.log", daemon.socket, VLLM_SERVER_DEV_MODE="1")
        self._server: Any = None

    def start(self) -> None:
        if self._server is None:
            self._server = self._make()
        else:
            self._server.start()
        self._server.up()

    def kill(self, process: str) -> None:
        if process == "worker":
            os.kill(self._server.core(), signal.SIGKILL)
            self._server.kill_when_it_answers_nothing(PROMPTS[0])
        else:
            self._server.kill()

    def status(self) -> dict[str, Any] | None:
        assert self._server.process.poll() is None, f"the server ended: {self._server.log.read_text(errors='replace')[-3000:]}"
        found: dict[str, Any] | None = self._server.get("/refitd/status")[1]
        return found and {**found, "ready": self._server.get("/refitd/ready")[0] == 200}

    def tokens(self) -> tuple[list[list[int]], int]:
        choices = [self._server.choice(prompt, TOKENS, return_token_ids=True) for prompt in PROMPTS]
        (version,) = {version for _, version in choices}
        return [choice["token_ids"] for choice, _ in choices], version

    def gives_no_token(self) -> bool:
        return bool(self._server.gives_no_token(PROMPTS[0], SILENCE_SECONDS))

    def parameters(self) -> None:
        return None

    def sleep(self, level: int) -> None:
        assert self._server.post(f"/sleep?level={level}") == 200

    def wake(self) -> None:
        assert self._server.post("/wake_up") == 200

    def resume(self) -> bool:
        status = self._server.post("/resume")
        assert status in (200, 409), status
        return bool(status == 200)

    def close(self) -> None:
        if self._server is not None:
            self._server.kill()


def test_random_orders(tmp_path: Path) -> None:
    """The engine answers with the version that it tells, whole, or not at all; and with each next version again."""
    check_random_orders(Served, tmp_path, orders=200)
