"""The endpoint plugin: runs the driver beside vLLM's API server, and adds routes that tell readiness and version (`routes.py`), and
to each answer the versions of its tokens (`tokens.py`).

vLLM (0.26 does, 0.23 does not) loads endpoint plugins that VLLM_PLUGINS names: VLLM_PLUGINS=refitd. Where vLLM offers /resume, /sleep and
/wake_up (its development mode), the plugin stands before them: a dirty engine is not resumed, and a sleeping one is detached and
attaches anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Coroutine
from typing import Any
from urllib.parse import parse_qs

from ...errors import FailedPrecondition
from . import versions as _versions
from ...serving.driver import LEAVE, Driver, check_backend, device_of, starts_clean, update_info, world_size_of
from ...serving.routes import add_routes, refusal
from ...serving.settings import Settings
from ...serving.tokens import AddTokenVersions, TokenVersions

logger = logging.getLogger("vllm.refitd")


class Endpoints:
    """vLLM's contract of an endpoint plugin. One API server process drives an engine: don't set --api-server-count above 1."""

    name = "refitd"
    required_tasks = None

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.versions: TokenVersions | None = None

    def attach_router(self, app: Any) -> None:
        app.add_middleware(AddTokenVersions, versions_of=lambda: self.versions)
        app.add_middleware(_Guard, endpoints=self)
        add_routes(app, lambda: self.driver)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None:
            return
        config = engine_client.vllm_config
        settings = Settings.of()
        if not settings.group:
            logger.warning("refitd: REFITD_GROUP is not set, so that nothing drives updates here")
            return
        check_backend(config)
        check_api_servers(config)
        if not settings.instance:
            settings = Settings.of({"instance": f"{socket.gethostname()}-{os.getpid()}"})
        controls = ServerControls(engine_client, asyncio.get_running_loop())
        self.driver = Driver(controls, settings, world_size=world_size_of(config), clean=starts_clean(config), device=device_of(config))
        self.versions = TokenVersions(engine_client)
        state.refitd_driver = self.driver
        if not starts_clean(config):
            await engine_client.pause_generation(mode="abort")  # no request may meet random weights
        threading.Thread(target=self.driver.serve, name="refitd-driver", daemon=True).start()


def check_api_servers(config: Any) -> None:
    """Raises FailedPrecondition where several processes answer for the engine: each would drive it, and know of its own pauses alone."""
    count = getattr(config.parallel_config, "_api_process_count", 1)
    if count > 1:
        raise FailedPrecondition(
            f"vLLM has {count} API server processes (by default as many as data-parallel ranks): start it with --api-server-count 1",
            culprit="api_server_count",
        )


class ServerControls:
    """The calls to vLLM's asynchronous engine, which the driver's thread makes."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop
        self._unfinished: int | None = None  # the version whose update was written, and not finished

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def pause(self, mode: str) -> None:
        self._wait(_versions.pause(self._engine, mode))

    def resume(self) -> None:
        self._wait(self._resume())

    async def _resume(self) -> None:
        # The engine carries calls out in the order in which they are sent, so that none waits for the answer of the one before.
        await asyncio.gather(*self._finishing(), self._engine.resume_generation())

    def _finishing(self) -> list[Coroutine[Any, Any, Any]]:
        """The calls that end the update which was written last, if that is still due."""
        version, self._unfinished = self._unfinished, None
        return [] if version is None else _versions.finish(self._engine, version)

    def register(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def unregister(self) -> None:
        self._wait(self._unregister())

    async def _unregister(self) -> None:
        engine = self._engine
        if hasattr(engine, "shutdown_weight_transfer_engine"):
            await asyncio.gather(*self._finishing(), engine.shutdown_weight_transfer_engine())
            return
        await asyncio.gather(*self._finishing())
        await self._update(LEAVE)
        await engine.finish_weight_update()

    def write(self, version: int, reset_caches: bool) -> None:
        self._wait(self._write(version, reset_caches))

    async def _write(self, version: int, reset_caches: bool) -> None:
        await asyncio.gather(*self._finishing())
        if reset_caches:
            await self._reset_caches()
        await self._update(update_info(version))
        self._unfinished = version

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        start = engine.start_weight_update(**_versions.start_arguments(engine.start_weight_update))
        await asyncio.gather(start, engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def _reset_caches(self) -> None:
        # Requests that were kept are computed anew: their blocks are of the weights before. The three calls go out together.
        prefix, *_ = await asyncio.gather(
            self._engine.reset_prefix_cache(reset_running_requests=True, reset_connector=True),
            self._engine.reset_mm_cache(),
            self._engine.reset_encoder_cache(),
        )
        if not prefix:
            raise RuntimeError("vLLM did not reset its prefix cache, or that of its KV connector")

    def sleep(self, level: int) -> None:
        self._wait(self._engine.sleep(level))

    def wake(self) -> None:
        _versions.check_awake(self._wait(self._engine.wake_up([_versions.STAY_PAUSED])))


class _Guard:
    """ASGI middleware in front of routes of vLLM's (its development mode) that would bring random or torn weights before clients, or
    unmap memory that the daemon writes: /resume is refused unless the weights are whole and no update runs; /sleep and /wake_up
    detach and attach."""

    def __init__(self, app: Any, endpoints: Endpoints) -> None:
        self._app = app
        self._endpoints = endpoints

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        from fastapi.responses import JSONResponse, Response

        driver = self._endpoints.driver
        path = scope.get("path") if scope["type"] == "http" and scope.get("method") == "POST" else None
        answer: Any = None
        if driver is not None and path in ("/resume", "/sleep", "/wake_up") and _offers(scope, path):
            query = parse_qs(scope.get("query_string", b"").decode())
            if path == "/resume":
                answer = refusal(driver)
            elif "tags" in query:
                answer = JSONResponse({"error": "refitd: the engine sleeps and wakes as a whole, without tags"}, status_code=409)
            elif path == "/sleep":
                await asyncio.to_thread(driver.sleep, int(query.get("level", ["1"])[0]))
                answer = Response(status_code=200)
            else:
                await asyncio.to_thread(driver.wake)
                answer = Response(status_code=200)
        await (self._app if answer is None else answer)(scope, receive, send)


def _offers(scope: Any, path: str) -> bool:
    return any(getattr(route, "path", None) == path for route in scope["app"].routes)
