"""A real vLLM server in random orders of updates, sleep, waking, kills and requests (orders.py). There are ten orders, unless
`tools/engines --orders N --seed N --first N` asks for others; 200 are the whole. Each order that ran is printed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import vllm
from engine_program import PROMPTS, TOKENS
from orders import check_random_orders
from server import Server
from support import HERE

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 26), reason="this version of vLLM has no endpoint plugins")

# How long an engine that must not answer is listened to.
SILENCE_SECONDS = 0.3


class ServerSubject:
    """`vllm serve`, whose worker is a process of its own, and which is asked by HTTP alone."""

    processes: tuple[str, ...] = ("worker", "server")
    resumes = True

    def __init__(self, model: Path, folder: Path, daemon: Any) -> None:
        self._model, self._log, self._daemon = model, folder / "server.log", daemon
        self._server: Any = None

    def start(self) -> None:
        if self._server is None:
            path = f"{os.environ['PYTHONPATH']}:{HERE}"
            extension = ("--worker-extension-cls", "worker_extension.Parameters")
            self._server = Server(self._model, self._log, self._daemon.socket, *extension, VLLM_SERVER_DEV_MODE="1", PYTHONPATH=path)
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
        self._server.check_runs()
        code, found, _ = self._server.get("/refitd/ready")
        return None if found is None else {**found, "ready": code == 200}

    def tokens(self) -> tuple[list[list[Any]], int]:
        answers = [self._server.answer(prompt, TOKENS) for prompt in PROMPTS]
        versions = {version for _, version in answers}
        assert len(versions) == 1, versions
        return [answer for answer, _ in answers], versions.pop()

    def gives_no_token(self) -> bool:
        before = self._server.tokens_by_engine()
        silent = self._server.gives_no_token(PROMPTS[0], SILENCE_SECONDS)
        return silent and self._server.tokens_by_engine() == before

    def parameters(self) -> list[dict[str, Any]]:
        return list(self._server.collective_rpc("refitd_parameters"))

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


def test_random_orders_over_a_server(tmp_path: Path) -> None:
    """The engine answers with the version that it tells, whole, or not at all; and with each next version again."""
    check_random_orders(ServerSubject, tmp_path)
