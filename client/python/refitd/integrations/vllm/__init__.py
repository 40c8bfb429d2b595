"""vLLM takes new weights from refitd. docs/vllm.md lists the functions of vLLM that this package replaces in its processes.

    REFITD_GROUP=policy VLLM_PLUGINS=refitd vllm serve MODEL --load-format refitd \\
        --weight-transfer-config '{"backend": "refitd"}'

vLLM calls `register` in every process through the entry point `vllm.general_plugins`. It adds the weight-transfer backend
`refitd` (`backend.py`) and the load format `refitd` (`versions.py`). The endpoint plugin `refitd` (`Endpoints`) drives updates
from the API server, adds the routes of refitd.serving.driver, and adds to answers of the OpenAI routes which versions made their tokens.

vLLM labels every token with the version that its engine had when it made the token (`CompletionOutput.weight_versions`, since the
versions whose `finish_weight_update` takes one), but its OpenAI routes leave that out. Here each choice gets a field
`refitd_version`: [{"version": 7, "start": 0, "end": 12}, ...], where `start` and `end` count the choice's tokens, and version null is
the checkpoint's. In a stream the choice's last chunk has it. The counter `refitd_generated_tokens_total` counts by version.

vLLM (0.26 does, 0.23 does not) loads endpoint plugins that VLLM_PLUGINS names: VLLM_PLUGINS=refitd. Where vLLM offers /resume, /sleep and
/wake_up (its development mode), the plugin takes these calls first: a dirty engine is not resumed, and a sleeping one is detached and
attaches anew.

Under an external launcher, such as torchrun, each process has an offline LLM of its own with the worker of one rank, all are called alike, and
generate together by collectives. Such processes must take each version between the same two calls of `generate`: a process that takes a version
while another generates would wait for the other's rank, and the other for its collective. So `Follower` compares, before it acts, what all
processes have seen.

vLLM, torch and FastAPI are imported where they are used only.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any
from urllib.parse import parse_qs

from ...errors import FailedPrecondition
from ...serving.driver import Alone, Driver, Follower, State, add_routes, refusal, update_info
from ...serving.proof import Value
from ...serving.rank import Kept, find_kept
from ...serving import Settings
from . import adapters, versions
from .versions import LEAVE, by_external_launcher, check_api_servers, check_backend, device_of, place, starts_clean, world_size_of


def register() -> None:
    """Adds the backend and the load format `refitd` to vLLM in this process, and methods to its workers, and lets its engine core wake up
    paused; a repeated call changes nothing."""
    versions.register_backend("refitd", f"{__name__}.backend", "RefitdBackend")
    versions.register_load_format(_find_kept)
    versions.add_worker_methods()
    versions.let_wake_up_stay_paused()
    versions.let_failures_be_read_whole()


def _find_kept(parallel: Any, device: Any) -> Kept | None:
    """What the daemon keeps of this worker's rank. The parallel config of a worker does not say how many ranks the replicas of its server have,
    so that nothing is kept of those: None."""
    settings = Settings.of()
    rank, world_size, instance = place(parallel, settings.instance)
    launched = by_external_launcher(parallel)
    if not launched and (parallel.data_parallel_size > 1 or getattr(parallel, "data_parallel_index", 0) > 0):
        return None
    return find_kept(settings, instance, rank, world_size + (world_size if launched else 1), device, "vllm")


def follow(llm: Any, settings: Mapping[str, Any] | None = None) -> Follower:
    """Attaches an offline `vllm.LLM`, whose updates then happen in `Follower.poll` and `Follower.wait`. See `driver.Follower`."""
    config = llm.llm_engine.vllm_config
    made = Settings.of(settings)
    check_backend(config, made.cache)
    processes = Launched() if by_external_launcher(config.parallel_config) else Alone()
    controls = OfflineControls(llm, processes, made.cache)
    driver = Driver(
        controls, made, world_size=world_size_of(config), clean=starts_clean(config), device=device_of(config), patient=False,
        index=processes.index, drivers=processes.count,
    )  # fmt: skip
    controls.replace_sleep(driver)
    return Follower(driver, processes)


class Launched(Alone):
    """One of the processes of an external launcher, after its LLM was made."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        self.index, self.count = int(world.rank_in_group), int(world.world_size)

    def gather(self, value: Value) -> list[Value]:
        return versions.gather(value)

    def compare(self, serves: bool, version: int | None) -> None:
        self.apart = any(theirs != (True, version) for theirs in self.gather((serves, version)))


class OfflineControls:
    """The calls to a vllm.LLM. It generates only while `generate` runs, so that a paused LLM need only refuse requests (P2)."""

    def __init__(self, llm: Any, processes: Alone, cache: str = "reset") -> None:
        self._llm = llm
        self._salts = versions.Salts(llm.llm_engine.engine_core) if cache == "version" else None
        self._paused = False
        self._sleep, self._wake_up = llm.sleep, llm.wake_up
        add_request = llm.llm_engine.add_request

        def add_request_unless_paused(*arguments: Any, **options: Any) -> Any:
            if self._paused or processes.apart:
                raise FailedPrecondition("the engine's weights are not one whole version: call Follower.wait before generate")
            return add_request(*arguments, **options)

        llm.llm_engine.add_request = add_request_unless_paused

    def replace_sleep(self, driver: Driver) -> None:
        """Lets `sleep` and `wake_up` of the LLM go through the driver, which detaches before and attaches anew afterwards."""

        def sleep(level: int = 1, *arguments: Any, **options: Any) -> None:
            if driver.closed or level < 1:  # level 0 keeps all memory
                self._sleep(level, *arguments, **options)
            else:
                driver.sleep(level)

        def wake_up(tags: list[str] | None = None) -> Any:
            if driver.closed or driver.machine.state is not State.ASLEEP:
                return self._wake_up(tags)
            if tags is not None:
                raise FailedPrecondition("the engine sleeps and wakes as a whole, without tags")
            driver.wake()
            return True

        self._llm.sleep, self._llm.wake_up = sleep, wake_up

    def pause(self, mode: str) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM did not reset its prefix cache")
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def register(self, init_info: dict[str, Any]) -> None:
        versions.give_draft(self._llm, self._llm.llm_engine.vllm_config)
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def held(self) -> list[dict[str, Any] | None]:
        return list(self._llm.collective_rpc(versions.HELD))

    def label(self, version: int) -> None:
        if hasattr(self._llm, "update_weight_version"):
            self._llm.update_weight_version(str(version))

    def unregister(self) -> None:
        llm = self._llm
        if hasattr(llm, "shutdown_weight_transfer_engine"):
            llm.shutdown_weight_transfer_engine()
            return
        llm.start_weight_update(**versions.start_arguments(llm.start_weight_update))
        llm.update_weights({"update_info": LEAVE})
        llm.finish_weight_update()

    def busy(self) -> bool:
        return False  # `generate` does not run

    def process_ahead(self, update_id: int) -> int:
        return max(map(int, self._llm.collective_rpc(versions.PROCESS_AHEAD, args=(update_id,))))

    def write(self, version: int, reset_caches: bool) -> None:
        if reset_caches:
            self._reset_caches()
        if self._salts is not None:
            self._salts.renew()
            self._llm.llm_engine.reset_encoder_cache()
        llm = self._llm
        llm.start_weight_update(**versions.start_arguments(llm.start_weight_update))
        llm.update_weights({"update_info": update_info(version)})
        llm.finish_weight_update(*versions.finish_arguments(llm.finish_weight_update, version))

    def sleep(self, level: int) -> None:
        self._sleep(level)

    def wake(self) -> None:
        self._wake_up()


PATHS = ("/v1/completions", "/v1/chat/completions")
# Answers whose spans are kept until they are sent; an answer that a client gave up never takes its spans.
MAX_ANSWERS = 4096
# How many labels the counter keeps; a further label removes the one that was counted first.
MAX_VERSIONS = 16


class TokenVersions:
    """The versions of the tokens that one engine client yields, whose outputs this object watches. The event loop's thread calls it."""

    def __init__(self, engine: Any) -> None:
        from prometheus_client import Counter

        self._answers: OrderedDict[str, tuple[int, dict[int, list[dict[str, Any]]]]] = OrderedDict()
        self._counter = Counter("refitd_generated_tokens", "Tokens of finished answers, by version of the weights", ["version"])
        self._labels: list[str] = []
        generate = engine.generate

        async def watched(prompt: Any, sampling_params: Any, request_id: str, *arguments: Any, **options: Any) -> AsyncIterator[Any]:
            outputs = generate(prompt, sampling_params, request_id, *arguments, **options)
            try:
                async for output in outputs:
                    self._note(request_id, sampling_params, output)
                    yield output
            finally:
                await outputs.aclose()

        engine.generate = watched

    def _note(self, request_id: str, sampling_params: Any, output: Any) -> None:
        for completion in output.outputs:
            spans = getattr(completion, "weight_versions", None)
            if spans is None:
                continue
            plain = [{"version": _number(span.version), "start": span.start, "end": span.end} for span in spans]
            _, choices = self._answers.setdefault(request_id, (int(getattr(sampling_params, "n", 1) or 1), {}))
            choices[completion.index] = plain
            for span in plain:
                self._count(str(span["version"]), span["end"] - span["start"])
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)

    def _count(self, label: str, tokens: int) -> None:
        if label not in self._labels:
            self._labels.append(label)
            while len(self._labels) > MAX_VERSIONS:
                self._counter.remove(self._labels.pop(0))
        self._counter.labels(label).inc(tokens)

    def add_to(self, body: bytes) -> bytes:
        """The body of an answer, or of its chunk, with the spans of the choices that have ended."""
        try:
            answer = json.loads(body)
            name, choices = answer["id"], answer["choices"]
        except (ValueError, TypeError, KeyError):
            return body
        added = False
        for choice in choices:
            if choice.get("finish_reason") is not None:
                spans = self._take(name, choice.get("index", 0))
                if spans is not None:
                    choice["refitd_version"], added = spans, True
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode() if added else body

    def _take(self, name: str, index: int) -> list[dict[str, Any]] | None:
        """The spans of a choice. vLLM's request ids are the answer's id, followed by the prompt's number where there are several prompts."""
        found = self._answers.get(name)
        key, number = name, index
        if found is None:
            of_first_prompt = self._answers.get(f"{name}-0")
            choices = of_first_prompt[0] if of_first_prompt is not None else 1
            key, number = f"{name}-{index // choices}", index % choices
            found = self._answers.get(key)
        return None if found is None else found[1].get(number)


def _number(label: str) -> int | None:
    return int(label) if label.isdigit() else None


class AddTokenVersions:
    """ASGI middleware that adds versions to answers. `versions_of`: returns None until the engine is there."""

    def __init__(self, app: Any, versions_of: Any) -> None:
        self._app = app
        self._versions_of = versions_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        found = self._versions_of() if scope["type"] == "http" and scope["path"] in PATHS else None
        if found is None:
            await self._app(scope, receive, send)
            return
        versions: TokenVersions = found
        held: list[Any] = []  # the start of an answer whose length changes, and its body until now

        async def send_with_versions(message: Any) -> None:
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message.get("headers", []) if name.lower() == b"content-type"]
                if kinds and kinds[0].startswith(b"application/json"):
                    held[:] = [message, b""]
                    return
            elif message["type"] == "http.response.body":
                if held:
                    held[1] += message.get("body", b"")
                    if message.get("more_body"):
                        return
                    body = versions.add_to(held[1])
                    headers = [(name, value) for name, value in held[0].get("headers", []) if name.lower() != b"content-length"]
                    await send({**held[0], "headers": [*headers, (b"content-length", str(len(body)).encode())]})
                    message = {"type": "http.response.body", "body": body}
                elif message.get("body"):
                    message = {**message, "body": _stream(message["body"], versions)}
            await send(message)

        await self._app(scope, receive, send_with_versions)


def _stream(part: bytes, versions: TokenVersions) -> bytes:
    """A part of a stream, with versions added; vLLM sends whole events."""
    if b'"finish_reason":"' not in part:
        return part
    events = part.split(b"\n\n")
    return b"\n\n".join(b"data: " + versions.add_to(event[6:]) if event.startswith(b"data: {") else event for event in events)


logger = logging.getLogger("vllm.refitd")


class Endpoints:
    """vLLM's contract of an endpoint plugin. One API server process drives an engine: don't set --api-server-count above 1."""

    name = "refitd"
    required_tasks = None

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.versions: TokenVersions | None = None
        self.adapters: adapters.Server | None = None

    def attach_router(self, app: Any) -> None:
        app.add_middleware(AddTokenVersions, versions_of=lambda: self.versions)
        app.add_middleware(_Guard, endpoints=self)
        add_routes(app, lambda: self.driver)
        adapters.add_routes(app, lambda: self.adapters)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Makes the driver and lets it serve; vLLM calls this when its engine client is there."""
        if engine_client is None:
            return
        wanted = adapters.wanted()
        if wanted is not None:
            self.adapters = adapters.Server(engine_client, state.openai_serving_models, wanted, settings=Settings.of())
        settings = Settings.of_server(logger)
        if settings is None:
            return
        config = engine_client.vllm_config
        check_backend(config, settings.cache)
        check_api_servers(config)
        controls = ServerControls(engine_client, asyncio.get_running_loop(), settings.cache)
        self.driver = Driver(controls, settings, world_size=world_size_of(config), clean=starts_clean(config), device=device_of(config))
        self.versions = TokenVersions(engine_client)
        state.refitd_driver = self.driver
        if not starts_clean(config):
            await engine_client.pause_generation(mode="abort")  # no request may meet random weights
        self.driver.serve_on_thread()


class ServerControls:
    """The calls to vLLM's asynchronous engine, which the driver's thread makes."""

    def __init__(self, engine: Any, loop: asyncio.AbstractEventLoop, cache: str = "reset") -> None:
        self._engine = engine
        self._loop = loop
        self._salts = versions.Salts(engine.engine_core) if cache == "version" else None
        self._unfinished: int | None = None  # the version whose update was written, and not finished

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def pause(self, mode: str) -> None:
        self._wait(versions.pause(self._engine, mode))

    def resume(self) -> None:
        self._wait(self._resume())

    async def _resume(self) -> None:
        # The engine carries out calls in the order in which they are sent, so that no call need wait for the answer of an earlier one.
        await asyncio.gather(*self._finishing(), self._engine.resume_generation())

    def _finishing(self) -> list[Coroutine[Any, Any, Any]]:
        """The calls that end the update which was written last, if that is still due."""
        version, self._unfinished = self._unfinished, None
        return [] if version is None else versions.finish(self._engine, version)

    def register(self, init_info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        for call in versions.give_draft(self._engine, self._engine.vllm_config):
            self._wait(call)
        self._wait(self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info)))

    def held(self) -> list[dict[str, Any] | None]:
        return list(self._wait(self._engine.collective_rpc(versions.HELD)))

    def label(self, version: int) -> None:
        if hasattr(self._engine, "update_weight_version"):
            self._wait(self._engine.update_weight_version(str(version)))

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

    def busy(self) -> bool:
        return bool(self._engine.output_processor.has_unfinished_requests())

    def process_ahead(self, update_id: int) -> int:
        return max(map(int, self._wait(self._engine.collective_rpc(versions.PROCESS_AHEAD, args=(update_id,)))))

    def write(self, version: int, reset_caches: bool) -> None:
        self._wait(self._write(version, reset_caches))

    async def _write(self, version: int, reset_caches: bool) -> None:
        await asyncio.gather(*self._finishing())
        if reset_caches:
            await self._reset_caches()
        if self._salts is not None:
            self._salts.renew()
            await self._engine.reset_encoder_cache()
        await self._update(update_info(version))
        self._unfinished = version

    async def _update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine = self._engine
        start = engine.start_weight_update(**versions.start_arguments(engine.start_weight_update))
        await asyncio.gather(start, engine.update_weights(WeightTransferUpdateRequest(update_info=info)))

    async def _reset_caches(self) -> None:
        # Requests that were kept are computed anew: their blocks come from the old weights. The three calls go out together.
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
        versions.check_awake(self._wait(self._engine.wake_up([versions.STAY_PAUSED])))


class _Guard:
    """ASGI middleware in front of routes of vLLM's development mode. /resume is refused unless the weights are whole and no update runs,
    because clients would get answers of random or torn weights; /sleep and /wake_up detach and attach, because they unmap memory that
    the daemon writes."""

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
