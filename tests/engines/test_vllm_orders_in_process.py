"""A vLLM in one process in random orders of updates, sleep, waking, kills and requests (orders.py). There are ten orders, unless
`tools/engines --orders N --seed N --first N` asks for others; 200 are the whole. Each order that ran is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from orders import check_random_orders
from support import SLEEPS, EngineFailed, EngineProcess, following


class InProcess:
    """A vllm.LLM in a process of its own, with its worker, which takes updates between the commands that it gets."""

    processes: tuple[str, ...] = ("engine",)
    resumes = False

    def __init__(self, model: Path, folder: Path, daemon: Any) -> None:
        self._model, self._log, self._daemon = model, folder / "live.log", daemon
        self._engine: Any = None

    def start(self) -> None:
        self._engine = EngineProcess(self._model, self._log, follow=following(self._daemon), follows_between_calls=True, dtype="bfloat16", **SLEEPS)
        self._engine.started()

    def kill(self, process: str) -> None:
        self._engine.kill()

    def status(self) -> dict[str, Any] | None:
        found: dict[str, Any] = self._engine.call("poll", 0.0)
        return found

    def tokens(self) -> tuple[list[list[Any]], int]:
        return self._engine.call("generate_one_by_one"), self._engine.call("poll", 0.0)["version"]

    def gives_no_token(self) -> bool:
        with pytest.raises(EngineFailed, match="not one whole version"):
            self._engine.call("generate")
        return True

    def parameters(self) -> list[dict[str, Any]]:
        return list(self._engine.call("parameters"))

    def sleep(self, level: int) -> None:
        self._engine.call("sleep", level)

    def wake(self) -> None:
        self._engine.call("wake_up")

    def resume(self) -> bool:
        raise AssertionError("a vllm.LLM has no call that resumes it")

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()


def test_random_orders_over_an_engine_in_one_process(tmp_path: Path) -> None:
    """The engine answers with the version that it tells, whole, or not at all; and with each next version again."""
    check_random_orders(InProcess, tmp_path)
