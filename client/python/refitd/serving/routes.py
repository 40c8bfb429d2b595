"""Routes that an engine's HTTP server gets, and the version as a header of every answer. For servers made with FastAPI.

    GET /refitd/ready?max_behind=N   200 where the engine may get requests, else 503; both with the status as JSON
    GET /refitd/version              {"version": ...}
    GET /refitd/status               the status
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from .driver import Driver

DriverOf = Callable[[], Optional[Driver]]
HEADER = b"x-refitd-version"


def add_routes(app: Any, driver_of: DriverOf) -> None:
    """Adds routes and header to a server that has not started. `driver_of`: None where nothing drives updates, or not yet."""
    from fastapi import APIRouter
    from fastapi.responses import JSONResponse

    router = APIRouter()

    def status(code: int = 200) -> Any:
        driver = driver_of()
        if driver is None:
            return JSONResponse({"ready": False, "reason": "refitd drives no engine here"}, status_code=503)
        return JSONResponse(driver.status(), status_code=code)

    async def ready(max_behind: Optional[int] = None) -> Any:
        driver = driver_of()
        return status(200 if driver is not None and driver.ready(max_behind) else 503)

    async def version() -> Any:
        driver = driver_of()
        return JSONResponse({"version": None if driver is None else driver.version})

    async def whole_status() -> Any:
        return status()

    router.add_api_route("/refitd/ready", ready, methods=["GET"])
    router.add_api_route("/refitd/version", version, methods=["GET"])
    router.add_api_route("/refitd/status", whole_status, methods=["GET"])
    app.include_router(router)
    app.add_middleware(_VersionHeader, driver_of=driver_of)


def refusal(driver: Driver) -> Any:
    """The answer to a request that would resume the engine: 409 while its weights are not one whole version; None where it may be resumed."""
    from fastapi.responses import JSONResponse

    machine = driver.machine
    return None if machine.serves else JSONResponse({"error": f"refitd: not while {machine.state.value}", **driver.status()}, status_code=409)


class _VersionHeader:
    """ASGI middleware that adds the header to answers as they begin."""

    def __init__(self, app: Any, driver_of: DriverOf) -> None:
        self._app = app
        self._driver_of = driver_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_version(message: Any) -> None:
            driver = self._driver_of()
            if message["type"] == "http.response.start" and driver is not None and driver.version is not None:
                message["headers"] = [*message.get("headers", []), (HEADER, str(driver.version).encode())]
            await send(message)

        await self._app(scope, receive, send_with_version)
