"""The calls to SGLang's tokenizer manager, of which an offline engine and a server have one each, for `refitd.serving.driver.Driver`.

Runs the driver beside SGLang's HTTP server, and adds routes that tell readiness and version (`refitd.serving.driver`).
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ... import errors
from ...serving.driver import Driver, Follower, add_routes, refusal, update_info
from ...serving.settings import Settings

# How often a pause that waits for requests looks for them.
LOOK_SECONDS = 0.01
Run = Callable[[Coroutine[Any, Any, Any]], Any]


class Released:
    """Keeps which memory of an engine is released. The engine sleeps from the first tag that is released until the last one is back.
    `backed_up`: whether SGLang keeps a copy of weights that it releases."""

    def __init__(self, backed_up: bool) -> None:
        self._backed_up = backed_up
        self._tags: set[str] = set()

    def release(self, tags: Iterable[str] | None) -> tuple[bool, bool]:
        """Whether the engine falls asleep now, and whether its weights go now. `tags`: None or none of them stands for all."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS

        now = set(tags or GPU_MEMORY_ALL_TYPES)
        falls_asleep = not self._tags
        self._tags |= now
        return falls_asleep, GPU_MEMORY_TYPE_WEIGHTS in now and not self._backed_up

    def resume(self, tags: Iterable[str] | None) -> bool:
        """Whether all of the memory is back now."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

        self._tags -= set(tags or GPU_MEMORY_ALL_TYPES)
        return not self._tags


def keeps_weights(arguments: Any) -> bool:
    """Whether SGLang keeps a copy of weights that it releases."""
    return bool(getattr(arguments, "enable_weights_cpu_backup", False))


class Controls:
    """The calls to the manager of one engine. `run`: has a coroutine carried out on the engine's event loop, and returns its result.

    `cache`: "reset" computes requests in flight anew after an update, and "keep" goes on with their blocks.
    """

    def __init__(self, manager: Any, run: Run, cache: str) -> None:
        self._manager = manager
        self._run = run
        self._cache = cache
        self._weights_went = False
        # SGLang's own functions that release the memory, and get it back.
        self.sleeps: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.wakes: Callable[[], Coroutine[Any, Any, Any]] | None = None

    def pause(self, mode: str) -> None:
        self._run(self._pause(mode))

    async def _pause(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        manager = self._manager
        manager.auto_create_handle_loop()
        if mode == "wait":
            # SGLang has no such mode. New requests wait behind this flag, as in its mode "abort".
            async with manager.is_pause_cond:
                manager.is_pause = True
            while await manager.model_update_lock.is_locked():
                await asyncio.sleep(LOOK_SECONDS)
        else:
            kept = "retract" if self._cache == "reset" else "in_place"
            await manager.pause_generation(PauseGenerationReqInput(mode=kept if mode == "keep" else "abort"))

    def resume(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._run(self._manager.continue_generation(ContinueGenerationReqInput()))

    def register(self, init_info: dict[str, Any]) -> None:
        self.ask({"do": "attach", "weights_went": self._weights_went, **init_info})
        self._weights_went = False

    def unregister(self) -> None:
        self.ask({"do": "detach"})

    def write(self, version: int, reset_caches: bool) -> None:
        if reset_caches:
            result = self._run(self._manager.flush_cache())
            if not result.success:
                raise RuntimeError(f"SGLang did not reset its prefix cache: {result.message}")
        self.ask({"do": "take", **update_info(version)}, version)

    def sleep(self, level: int) -> None:
        self._weights_went = self._weights_went or level >= 2
        if self.sleeps is not None:
            self._run(self.sleeps())

    def weights_went(self) -> None:
        """Says that a sleeping engine no longer has its weights: its ranks attach as dirty."""
        self._weights_went = True

    def wake(self) -> None:
        """Gets the memory back. SGLang stays paused, as it was before it fell asleep, until `resume` (P2)."""
        if self.wakes is not None:
            self._run(self.wakes())

    def ask(self, request: dict[str, Any], version: int | None = None) -> list[Any]:
        """Has all ranks carry out a request; returns what each answers. Raises the first rank's error."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[json.dumps(request).encode()],
            load_format="refitd",
            flush_cache=False,
            weight_version=None if version is None else str(version),
            selector="target",
        )
        success, message = self._run(self._manager.update_weights_from_tensor(asked, None))[:2]
        if success:
            # SGLang may add the answers of other schedulers to the first.
            answers: list[Any] = json.JSONDecoder().raw_decode(message[message.index("[") :])[0]  # texts: SGLang passes nothing else on
            return answers
        try:
            told = json.JSONDecoder().raw_decode(message[message.index("{") :])[0]  # texts: as above
        except ValueError:
            raise errors.FailedPrecondition(f"SGLang refused: {message}") from None
        kind = getattr(errors, told["error"], None)
        known = isinstance(kind, type) and issubclass(kind, errors.Error) and kind is not errors.UpdateAborted
        raise (kind if known and kind is not None else errors.FailedPrecondition)(told["reason"])


class OfflineControls(Controls):
    """The calls to the manager of an offline `sglang.Engine`. While the engine is paused, its `generate` raises: SGLang would wait for
    somebody to resume the engine, which nobody does meanwhile (P2)."""

    def __init__(self, engine: Any, cache: str) -> None:
        super().__init__(engine.tokenizer_manager, engine.loop.run_until_complete, cache)
        self._engine = engine
        self._paused = False
        generate_request = self._manager.generate_request

        def generate_unless_paused(*arguments: Any, **options: Any) -> Any:
            if self._paused:
                raise errors.FailedPrecondition("the engine's weights are not one whole version: call Follower.wait before generate")
            return generate_request(*arguments, **options)

        self._manager.generate_request = generate_unless_paused

    def pause(self, mode: str) -> None:
        self._paused = True
        super().pause(mode)

    def resume(self) -> None:
        super().resume()
        self._paused = False

    def stand_before_sleep(self, driver: Driver) -> None:
        """Makes `release_memory_occupation` of the engine detach first, and `resume_memory_occupation` attach the engine anew when all of
        its memory is back."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        engine, manager = self._engine, self._manager
        release_now, resume_now = engine.release_memory_occupation, engine.resume_memory_occupation
        released = Released(keeps_weights(engine.server_args))

        def release(tags: list[str] | None = None) -> None:
            falls_asleep, weights_go = released.release(tags)
            if driver.closed or not falls_asleep:
                if weights_go:
                    self.weights_went()
                    driver.weights_went()
                release_now(tags)
                return
            self.sleeps = partial(manager.release_memory_occupation, ReleaseMemoryOccupationReqInput(tags=tags), None)
            driver.sleep(2 if weights_go else 1)

        def resume(tags: list[str] | None = None) -> None:
            if not released.resume(tags) or driver.closed:
                resume_now(tags)
                return
            self.wakes = partial(manager.resume_memory_occupation, ResumeMemoryOccupationReqInput(tags=tags), None)
            driver.wake()

        engine.release_memory_occupation, engine.resume_memory_occupation = release, resume


# SGLang's arguments that this adapter can't serve, and the value that each may have. The last move experts after they are registered, so
# that new weights would get into other experts (P11).
_ONLY = (
    ("dp_size", 1), ("pp_size", 1), ("nnodes", 1), ("tokenizer_worker_num", 1), ("speculative_algorithm", None), ("enable_lora", None),
    ("enable_eplb", False), ("ep_num_redundant_experts", 0), ("init_expert_location", "trivial"), ("elastic_ep_backend", None),
)  # fmt: skip


def check(arguments: Any) -> None:
    """Raises FailedPrecondition that names the first of SGLang's arguments that this adapter can't serve."""
    for name, allowed in _ONLY:
        value = getattr(arguments, name, allowed)
        if value != allowed and value:
            raise errors.FailedPrecondition(f"SGLang was started with {name}={value!r}, which is not supported", culprit=name)


def starts_clean(arguments: Any) -> bool:
    """Whether SGLang loaded a checkpoint, and no random weights."""
    return str(getattr(arguments.load_format, "value", arguments.load_format)) != "dummy"


def follow(engine: Any, said: Mapping[str, Any] | None) -> Follower:
    arguments = engine.server_args
    check(arguments)
    settings = Settings.of(said)
    controls = OfflineControls(engine, settings.cache)
    clean = starts_clean(arguments)
    driver = Driver(controls, settings, world_size=arguments.tp_size, clean=clean, device=arguments.device, patient=False)
    controls.stand_before_sleep(driver)
    return Follower(driver)


logger = logging.getLogger("sglang.refitd")

# The attribute of a tokenizer manager that has its Sleep.
SLEEP = "_refitd_sleep"


def serve(original: Any, arguments: Any, manager: Any, *others: Any, **options: Any) -> Any:
    """Wraps SGLang's function that runs its HTTP server in this process."""
    found = Settings.of_server(logger)
    if found is None:
        return original(arguments, manager, *others, **options)
    settings = found
    check(arguments)
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
            driver.serve_on_thread()
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
