"""Runs the driver beside SGLang's HTTP server, and adds routes that tell readiness and version (`refitd.serving.routes`)."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ...serving.driver import Driver
from ...serving.routes import add_routes, refusal
from ...serving.settings import Settings
from .controls import Controls, Released, check, keeps_weights, starts_clean

logger = logging.getLogger("sglang.refitd")

# The attribute of a tokenizer manager that has its Sleep.
SLEEP = "_refitd_sleep"


def serve(original: Any, arguments: Any, manager: Any, *others: Any, **options: Any) -> Any:
    """Wraps SGLang's function that runs its HTTP server in this process."""
    settings = Settings.of()
    if not settings.group:
        logger.warning("refitd: REFITD_GROUP is not set, so that nothing drives updates here")
        return original(arguments, manager, *others, **options)
    check(arguments)
    if not settings.instance:
        settings = Settings.of({"instance": f"{socket.gethostname()}-{os.getpid()}"})
    from sglang.srt.entrypoints import http_server

    app = http_server.app
    clean = starts_clean(arguments)
    drivers: list[Driver] = []
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[Any]:
        async with inner(app) as state:
            loop = asyncio.get_running_loop()

            def run(call: Coroutine[Any, Any, Any]) -> Any:
                return asyncio.run_coroutine_threadsafe(call, loop).result()

            controls = Controls(manager, run, settings.cache)
            if not clean:
                await controls._pause("abort")  # no request may meet random weights; the server takes requests only after this block
            driver = Driver(controls, settings, world_size=arguments.tp_size, clean=clean, device=arguments.device)
            setattr(manager, SLEEP, Sleep(driver, controls, Released(keeps_weights(arguments))))
            drivers.append(driver)
            threading.Thread(target=driver.serve, name="refitd-driver", daemon=True).start()
            try:
                yield state
            finally:
                driver.close()

    app.router.lifespan_context = lifespan
    app.add_middleware(_Guard, drivers=drivers)
    add_routes(app, lambda: drivers[0] if drivers else None)
    if not clean:
        options["execute_warmup_func"] = _no_warmup
    return original(arguments, manager, *others, **options)


def _no_warmup(*_: Any) -> bool:
    """Takes the place of SGLang's first requests, which would wait for the first version."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    http_server._global_state.tokenizer_manager.server_status = ServerStatus.Up
    return True


class Sleep:
    """The sleep of an engine whose memory is released: the engine is detached first, and attaches anew when all of the memory is back."""

    def __init__(self, driver: Driver, controls: Controls, released: Released) -> None:
        self._driver = driver
        self._controls = controls
        self._released = released

    async def release(self, original: Any, manager: Any, request: Any, *others: Any) -> None:
        falls_asleep, weights_go = self._released.release(request.tags)
        if not falls_asleep:
            if weights_go:
                self._controls.weights_went()
                await asyncio.to_thread(self._driver.weights_went)
            await original(manager, request, *others)
            return
        self._controls.sleeps = partial(original, manager, request, *others)
        await asyncio.to_thread(self._driver.sleep, 2 if weights_go else 1)

    async def resume(self, original: Any, manager: Any, request: Any, *others: Any) -> None:
        if not self._released.resume(request.tags):
            await original(manager, request, *others)
            return
        self._controls.wakes = partial(original, manager, request, *others)
        await asyncio.to_thread(self._driver.wake)


class _Guard:
    """ASGI middleware in front of SGLang's /continue_generation, which would bring random or torn weights before clients (P2)."""

    def __init__(self, app: Any, drivers: list[Driver]) -> None:
        self._app = app
        self._drivers = drivers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        continues = scope["type"] == "http" and scope.get("path") == "/continue_generation"
        answer = refusal(self._drivers[0]) if continues and self._drivers else None
        await (self._app if answer is None else answer)(scope, receive, send)
