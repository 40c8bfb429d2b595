"""The endpoint plugin: runs the driver beside vLLM's API server, and adds routes that tell readiness and version.

    GET /refitd/ready?max_behind=N   200 where the engine may get requests, else 503; both with the status as JSON
    GET /refitd/version              {"version": ...}
    GET /refitd/status               the status

vLLM (0.26 does, 0.23 does not) loads endpoint plugins that VLLM_PLUGINS names: VLLM_PLUGINS=refitd. Every answer of the server has the header
`x-refitd-version`, the version when the answer began. Where vLLM offers /sleep and /wake_up (its development mode), the plugin takes
their place, so that a sleeping engine is detached and attaches anew.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Coroutine
from typing import Any

from . import _versions
from .driver import Driver, check_backend, starts_clean, update_info, world_size_of
from .routes import add_routes
from .settings import Settings

logger = logging.getLogger("vllm.refitd")


class Endpoints:
    """vLLM's contract of an endpoint plugin. One API server process drives an engine: don't set --api-server-count above 1."""

    name = "refitd"
    required_tasks = None

    def __init__(self) -> None:
        self.driver: Driver | None = None

    def attach_router(self, app: Any) -> None:
        from fastapi import APIRouter

        offered = {getattr(route, "path", None) for route in app.routes}
        if {"/sleep", "/wake_up"} <= offered:
            router = APIRouter()
            self._take_over_sleep(router)
            app.include_router(router)
        add_routes(app, lambda: self.driver)

    def _take_over_sleep(self, router: Any) -> None:
        from fastapi import Response

        async def sleep(level: int = 1) -> Any:
            if self.driver is not None:
                await asyncio.to_thread(self.driver.sleep, level)
            return Response(status_code=200)

        async def wake_up() -> Any:
            if self.driver is not None:
                await asyncio.to_thread(self.driver.wake)
            return Response(status_code=200)

        router.add_api_route("/sleep", sleep, methods=["POST"])
        router.add_api_route("/wake_up", wake_up, methods=["POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        if engine_client is None:
            return
        config = engine_client.vllm_config
        settings = Settings.of()
        if not settings.group:
            logger.warning("refitd: REFITD_GROUP is not set, so that nothing drives updates here")
            return
        check_backend(config)
        if not settings.instance:
            settings = Settings.of({"instance": f"{socket.gethostname()}-{os.getpid()}"})
        controls = ServerControls(engine_client, asyncio.get_running_loop())
        self.driver = Driver(controls, settings, world_size=world_size_of(config), clean=starts_clean(config))
        state.refitd_driver = self.driver
        if not starts_clean(config):
            await engine_client.pause_generation(mode="abort")  # no request may meet random weights
        threading.Thread(target=self.driver.serve, name="refitd-driver", daemon=True).start()


class ServerControls:
    """Of vLLM's asynchronous engine, called from the driver's thread."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine = engine
        self._loop = loop

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def pause(self, mode: str) -> None:
        self._wait(self._engine.pause_generation(mode=mode, clear_cache=False))

    def resume(self) -> None:
        self._wait(self._engine.resume_generation())

    def reset_caches(self) -> None:
        self._wait(self._reset_caches())

    async def _reset_caches(self) -> None:
        # Requests that were kept are computed anew: their blocks are of the weights before.
        if not await self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its prefix cache")
        await self._engine.reset_mm_cache()
        await self._engine.reset_encoder_cache()

    def register(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def unregister(self) -> None:
        self._wait(self._engine.shutdown_weight_transfer_engine())

    def write(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def update() -> None:
            engine = self._engine
            await engine.start_weight_update(**_versions.start_arguments(engine.start_weight_update))
            await engine.update_weights(WeightTransferUpdateRequest(update_info=update_info(version)))
            await engine.finish_weight_update(*_versions.finish_arguments(engine.finish_weight_update, version))

        self._wait(update())

    def sleep(self, level: int) -> None:
        self._wait(self._engine.sleep(level))

    def wake(self) -> None:
        self._wait(self._engine.wake_up())
