"""SGLang takes new weights from refitd, by hooks of SGLang's own plugin entry point (docs/sglang.md).

    REFITD_GROUP=policy python -m sglang.launch_server --model-path MODEL --load-format dummy

SGLang calls `register` in every process through the entry point `sglang.srt.plugins`. It adds three things by SGLang's own hooks:
the load format "refitd" of `update_weights_from_tensor`, which takes one update in every scheduler process; the
evidence that tells which parameters may be written in place; the driver beside the HTTP server.

What is the same for all engines comes from `refitd.serving`, whose modules import no engine. SGLang and torch are imported
where they are used only.

Of SGLang's inside, the hooks are of `SchedulerWeightUpdaterManager.update_weights_from_tensor`, `post_load_weights` and `DummyModelLoader.load_model` of the
model loader, `_setup_and_run_http_server`, and `TokenizerManager.release_memory_occupation` and `resume_memory_occupation`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from .. import errors
from .._core.member import Connect
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..layout import TensorSpec, devices
from ..layout.memory import digest
from ..layout.placement import like
from ..serving.ahead import Portion, as_before
from ..serving.delivery import Delivery, Steps, decided, keep_memory, prove_kept, proved, tensors_of
from ..serving.derived import Quantised, of_experts
from ..serving.driver import Driver, Follower, add_routes, refusal, update_info
from ..serving.evidence import EVIDENCE_ATTRIBUTE, KEPT_ATTRIBUTE, Snapshot, note_changes
from ..serving.proof import Probe, gathered, token_ids, tokens_for, union_over
from ..serving.rank import Kept, Rank, TakeUp, find_kept
from ..serving import Settings, read_manifest


def register() -> None:
    """Registers the hooks in this process. SGLang calls it once in each, before any of the hooked functions."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.update_weights_from_tensor", _update, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}.post_load_weights", _loaded, HookType.AFTER)
    HookRegistry.register(f"{_LOADER}.DummyModelLoader.load_model", _load_model, HookType.AROUND)
    HookRegistry.register(f"{_SERVER}._setup_and_run_http_server", serve, HookType.AROUND)
    HookRegistry.register(f"{_TOKENIZER}.release_memory_occupation", _release, HookType.AROUND)
    HookRegistry.register(f"{_TOKENIZER}.resume_memory_occupation", _resume, HookType.AROUND)


def follow(engine: Any, settings: Mapping[str, Any] | None = None) -> Follower:
    """Attaches an offline `sglang.Engine`, whose updates then happen in `Follower.poll` and `Follower.wait`, between calls of
    `generate`. `settings`: fields of refitd.serving.Settings by name; the others come from the environment. See
    `refitd.serving.driver.Follower`.
    """
    arguments = engine.server_args
    check(arguments)
    made = Settings.of(settings)
    controls = OfflineControls(engine, made.cache)
    clean = starts_clean(arguments)
    driver = Driver(controls, made, world_size=arguments.tp_size, clean=clean, device=arguments.device, patient=False)
    controls.replace_sleep(driver)
    return Follower(driver)


__all__ = ["follow", "follow_adapter", "register"]

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
        """Notes a release; returns whether the engine falls asleep by it, and whether it discards the weights. `tags`: None or empty: all."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES, GPU_MEMORY_TYPE_WEIGHTS

        now = set(tags or GPU_MEMORY_ALL_TYPES)
        falls_asleep = not self._tags
        self._tags |= now
        return falls_asleep, GPU_MEMORY_TYPE_WEIGHTS in now and not self._backed_up

    def resume(self, tags: Iterable[str] | None) -> bool:
        """Notes that memory is back; returns whether all of it is."""
        from sglang.srt.constants import GPU_MEMORY_ALL_TYPES

        self._tags -= set(tags or GPU_MEMORY_ALL_TYPES)
        return not self._tags


def keeps_weights(arguments: Any) -> bool:
    """Whether SGLang keeps a copy of weights that it releases."""
    return bool(getattr(arguments, "enable_weights_cpu_backup", False))


class Controls:
    """The calls to the manager of one engine. `run`: runs a coroutine on the engine's event loop, and returns its result.

    `cache`: "reset" computes requests in flight anew after an update, and "keep" goes on with their blocks.
    """

    def __init__(self, manager: Any, run: Run, cache: str) -> None:
        if cache not in ("reset", "keep"):
            raise InvalidArgument(f"cache: {cache!r} is vLLM's alone; SGLang's is reset or keep", culprit="cache")
        self._manager = manager
        self.run = run
        self._cache = cache
        self._weights_discarded = False
        # SGLang's own functions that release the memory, and get it back.
        self.sleeps: Callable[[], Coroutine[Any, Any, Any]] | None = None
        self.wakes: Callable[[], Coroutine[Any, Any, Any]] | None = None

    def busy(self) -> bool:
        return bool(self._manager.rid_to_state)

    def process_ahead(self, update_id: int) -> int:
        return max(map(int, self.ask({"do": "ahead", "update_id": update_id}, serving=True)))

    def pause(self, mode: str) -> None:
        self.run(self._pause(mode))

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

        self.run(self._manager.continue_generation(ContinueGenerationReqInput()))

    def register(self, init_info: dict[str, Any]) -> None:
        self.ask({"do": "attach", "weights_discarded": self._weights_discarded, **init_info})
        self._weights_discarded = False

    def held(self) -> list[dict[str, Any] | None]:
        return [answered["held"] for answered in self.ask({"do": "status"})]

    def label(self, version: int) -> None:
        self.ask({"do": "status"}, version)

    def unregister(self) -> None:
        self.ask({"do": "detach"})

    def write(self, version: int, reset_caches: bool) -> None:
        if reset_caches:
            result = self.run(self._manager.flush_cache())
            if not result.success:
                raise RuntimeError(f"SGLang did not reset its prefix cache: {result.message}")
        self.ask({"do": "take", **update_info(version)}, version)

    def sleep(self, level: int) -> None:
        self._weights_discarded = self._weights_discarded or level >= 2
        if self.sleeps is not None:
            self.run(self.sleeps())

    def weights_discarded(self) -> None:
        """The weights of a sleeping engine were discarded: its ranks attach as dirty."""
        self._weights_discarded = True

    def wake(self) -> None:
        """Gets the memory back. SGLang stays paused, as it was before it fell asleep, until `resume` (P2)."""
        if self.wakes is not None:
            self.run(self.wakes())

    def ask(self, request: dict[str, Any], version: int | None = None, *, serving: bool = False) -> list[Any]:
        """Lets all ranks carry out a request; returns their answers, by rank. Raises the error of the first rank that failed. `serving`: between two
        steps; else an engine that is not paused ends its requests first."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput

        asked = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=[json.dumps(request).encode()],
            load_format="refitd",
            flush_cache=False,
            weight_version=None if version is None else str(version),
            selector="target",
        )
        success, message = self.run(self._send(asked) if serving else self._manager.update_weights_from_tensor(asked, None))[:2]
        if success:
            # SGLang may add the answers of other schedulers to the first.
            answers: list[Any] = json.JSONDecoder().raw_decode(message[message.index("[") :])[0]  # texts: SGLang passes nothing else on
            return answers
        try:
            failure = json.JSONDecoder().raw_decode(message[message.index("{") :])[0]  # texts: as above
        except ValueError:
            raise errors.FailedPrecondition(f"SGLang refused: {message}") from None
        kind = getattr(errors, failure["error"], None)
        known = isinstance(kind, type) and issubclass(kind, errors.Error) and kind is not errors.UpdateAborted
        raise (kind if known and kind is not None else errors.FailedPrecondition)(failure["reason"])


    async def _send(self, asked: Any) -> tuple[bool, str]:
        """Does what `update_weights_from_tensor` of the manager does, without its lock."""
        from sglang.srt.managers.communicator import FanOutCommunicator

        self._manager.auto_create_handle_loop()
        merged: tuple[bool, str] = FanOutCommunicator.merge_results(await self._manager.update_weights_from_tensor_communicator(asked))
        return merged


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

    def replace_sleep(self, driver: Driver) -> None:
        """Replaces `release_memory_occupation` and `resume_memory_occupation` of the engine by calls of a Sleep."""
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

        engine, manager = self._engine, self._manager
        sleep = Sleep(driver, self, Released(keeps_weights(engine.server_args)))

        def release(tags: list[str] | None = None) -> None:
            sleep.release(tags, partial(manager.release_memory_occupation, ReleaseMemoryOccupationReqInput(tags=tags), None))

        def resume(tags: list[str] | None = None) -> None:
            sleep.resume(tags, partial(manager.resume_memory_occupation, ResumeMemoryOccupationReqInput(tags=tags), None))

        engine.release_memory_occupation, engine.resume_memory_occupation = release, resume


# SGLang's arguments that this adapter can't serve, and the value that each may have. The last four move experts after these are registered,
# so that new weights would get into other experts (P11).
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
    """The sleep of an engine whose memory is released: the engine is detached first, and attaches anew when all of the memory is back.

    `original`: SGLang's own function for this request, which the controls run."""

    def __init__(self, driver: Driver, controls: Controls, released: Released) -> None:
        self._driver = driver
        self._controls = controls
        self._released = released

    def release(self, tags: Iterable[str] | None, original: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        falls_asleep, weights_go = self._released.release(tags)
        if falls_asleep and not self._driver.closed:
            self._controls.sleeps = original
            self._driver.sleep(2 if weights_go else 1)
            return
        if weights_go:
            self._controls.weights_discarded()
            self._driver.weights_discarded()
        self._controls.run(original())

    def resume(self, tags: Iterable[str] | None, original: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        if self._released.resume(tags) and not self._driver.closed:
            self._controls.wakes = original
            self._driver.wake()
        else:
            self._controls.run(original())


class _Guard:
    """ASGI middleware that refuses SGLang's /continue_generation while clients would get answers of random or torn weights (P2)."""

    def __init__(self, app: Any, drivers: list[Driver]) -> None:
        self._app = app
        self._drivers = drivers

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        continues = scope["type"] == "http" and scope.get("path") == "/continue_generation"
        answer = refusal(self._drivers[0]) if continues and self._drivers else None
        await (self._app if answer is None else answer)(scope, receive, send)


class AdapterFollower:
    """Attaches a LoRA adapter of an offline `sglang.Engine`. `poll` and `wait` of this object load new versions of the adapter: call them between
    calls of `generate`. Not thread-safe: call it where you call the engine."""

    def __init__(
        self, engine: Any, adapter: str, *, group: str, instance: str, name: str = "policy", socket: str | None = None, connect: Connect = Connect()
    ) -> None:
        """`adapter`: a folder that PEFT's save_pretrained wrote; its tensors' names, dtypes and shapes are read, and its configuration.
        `name`: the adapter's in SGLang. `group`, `instance`, `socket`, `connect`: as in refitd.Engine. Waits for daemon and group.

        Raises InvalidArgument and Unimplemented, naming the tensor, for what SGLang does not load from tensors, and what attaching raises.
        """
        from .lora import Matrices, Receiver

        self.name = name
        self._engine = engine
        self._config: dict[str, Any] = json.loads((Path(adapter) / "adapter_config.json").read_text())
        self._loaded: int | None = None
        specs = read_manifest(adapter)
        if not specs:
            raise InvalidArgument(f"{adapter} has no tensor", culprit=adapter)
        self._matrices = Matrices(specs)
        self._loop = Receiver({"": self._matrices}, group=group, instance=instance, socket=socket, connect=connect)

    @property
    def version(self) -> int | None:
        """The version that SGLang computes with; None: it has none."""
        return self._loaded

    def poll(self) -> int | None:
        """Loads the version that has come, unless SGLang has it already; returns the version that SGLang has then. Raises
        FailedPrecondition where SGLang refuses the version, and then has none, and Unimplemented for layers that scale differently."""
        if self._loop.version is None:
            return self._loaded
        with self._loop.use() as version:
            if version != self._loaded:
                self._load(version)
        return self._loaded

    def wait(self, version: int, timeout_seconds: float = 600.0) -> int:
        """Waits for `version` or a newer one, and loads it; returns it. Raises DeadlineExceeded, and as poll() does."""
        self._loop.wait(version, timeout_seconds)
        loaded = self.poll()
        assert loaded is not None
        return loaded

    def close(self) -> None:
        """Detaches. SGLang keeps the version that it has."""
        self._loop.close()

    def _load(self, version: int | None) -> None:
        config = self._scaled(self._config)
        if self._loaded is not None:
            self._loaded = None
            self._check(self._engine.unload_lora_adapter(self.name), "unload the version before of")
        # The tensors are copied for SGLang's processes within the call.
        answer = self._engine.load_lora_adapter_from_tensors(self.name, {name: t.clone() for name, t in self._matrices.tensors.items()}, config)
        self._check(answer, f"load version {version} of")
        self._loaded = version

    def _scaled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the lora_alpha that yields the trainer's scaling: SGLang computes lora_alpha / r, one value for all layers."""
        values = {f"{name}.lora_scaling": float(tensor) for name, tensor in self._matrices.scalings.items()}
        first = next(iter(values.values()))
        other = next((name for name, value in values.items() if value != first), None)
        if other is not None:
            what = f"tensor '{other}'"
            raise Unimplemented(f"{what} is {values[other]}, and another layer's scaling is {first}: SGLang has one for all", culprit=what)
        return {**config, "lora_alpha": first * config["r"], "use_rslora": False}

    def _check(self, answer: Any, what: str) -> None:
        if not answer.success:
            raise FailedPrecondition(f"SGLang could not {what} adapter '{self.name}': {answer.error_message}", culprit=self.name)


follow_adapter = AdapterFollower


# The attribute of a model whose parameters had the loader's format while the evidence was gathered: {id of module: {name: meta tensor}}.
_FORMATS = "_refitd_formats"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_LOADER = "sglang.srt.model_loader.loader"
_SERVER = "sglang.srt.entrypoints.http_server"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def _update(original: Any, manager: Any, request: Any) -> Any:
    """Takes requests of the load format "refitd"; all others go to SGLang."""
    if request.load_format != "refitd":
        return original(manager, request)
    return answer(manager, request)


def _release(original: Any, manager: Any, request: Any, *others: Any) -> Any:
    sleep, call = getattr(manager, SLEEP, None), partial(original, manager, request, *others)
    return call() if sleep is None else asyncio.to_thread(sleep.release, request.tags, call)


def _resume(original: Any, manager: Any, request: Any, *others: Any) -> Any:
    sleep, call = getattr(manager, SLEEP, None), partial(original, manager, request, *others)
    return call() if sleep is None else asyncio.to_thread(sleep.resume, request.tags, call)


# ---- evidence: what changes between loading and the end of post-processing ----

# While a model is being loaded, this list has the snapshots of its modules and the formats of their parameters; else it is empty.
_loading: list[Any] = []


def _load_model(original: Any, loader: Any, **options: Any) -> Any:
    """Loads random weights, and leaves evidence in the model of what post-processing changed (note_changes)."""
    _loading.clear()
    model = original(loader, **options)
    if _loading:
        snapshots, formats = _loading
        device = next(model.parameters()).device
        note_changes(model, snapshots, partial(_find_kept, device) if Settings.of().in_arenas else None, sys.modules[__name__])
        object.__setattr__(model, _FORMATS, formats)
        _loading.clear()
    return model


def _find_kept(device: Any) -> Kept:
    """What the daemon keeps of this scheduler's rank. The server's driver is the last rank of the instance."""
    from sglang.srt.runtime_context import get_parallel

    settings, parallel = Settings.of(), get_parallel()
    return find_kept(settings, settings.instance, parallel.tp_rank, parallel.tp_size + 1, device, "sglang")


def _loaded(result: None, model: Any) -> None:
    """Takes snapshots after random weights were made, before modules are post-processed. Nothing uses those that an update takes."""
    if hasattr(model, EVIDENCE_ATTRIBUTE):
        return
    _loading[:] = [
        [(layer, Snapshot.of(layer)) for layer in model.modules()],
        {id(layer): {name: _on_meta(t) for name, t in _tensors(layer)} for layer in model.modules()},
    ]


def _tensors(layer: Any) -> list[tuple[str, Any]]:
    return [(name, t) for name, t in (*layer._parameters.items(), *layer._buffers.items()) if t is not None]


def _on_meta(tensor: Any) -> Any:
    """The same kind of tensor without storage, with the attributes that loaders read."""
    import torch

    return like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"))


# ---- what refitd.serving.delivery asks ----


class LoaderFormat:
    """Within this block a model has the parameters that its loader fills, on device meta; then its own again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        formats = getattr(self._model, _FORMATS, {})
        placed: dict[int, Any] = {}  # a tied parameter stays one
        for layer in self._model.modules():
            self._own.append((layer, dict(layer._parameters), dict(layer._buffers)))
            known = formats.get(id(layer), {})
            for held in (layer._parameters, layer._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = placed.setdefault(id(tensor), known.get(name) if name in known else _on_meta(tensor))

    def __exit__(self, *_: object) -> None:
        for layer, parameters, buffers in self._own:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)


def _never(*_: Any) -> bool:
    return False


# No layer of SGLang's is post-processed after all others (`post_load_weights` of the model does that), or but by its reload.
is_attention = is_made_later = is_tied = only_prepacks = _never


def quantised(layer: Any) -> tuple[Quantised, ...]:
    """How the layer has weights of a checkpoint that is quantised in blocks. What SGLang makes of other checkpoints' weights refits have no kind for."""
    method: Any = getattr(layer, "quant_method", None)
    made = _QUANTISED.get(type(method).__name__, ())
    if not made or list(method.weight_block_size or ()) != [128, 128] or not method.quant_config.is_checkpoint_fp8_serialized:
        return ()
    return () if getattr(method, "use_mxfp8", False) or getattr(method, "is_fp4_expert", False) else made


# By name of the class of a quantisation method, where it has values and scales of blocks.
_QUANTISED = {"Fp8LinearMethod": (Quantised(None, "weight", "weight_scale_inv"),), "Fp8MoEMethod": of_experts(None, "weight_scale_inv")}


def is_vocabulary(layer: Any) -> bool:
    """Whether the layer's rows are padded beyond the vocabulary."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


# ---- processing ----


def reload(model: Any, tensors: Iterable[tuple[str, Any]], wanted: Mapping[str, Any]) -> None:
    """Loads `tensors`, in the checkpoint's format, and post-processes the modules `wanted`, as SGLang's own weight updates do with
    all modules; the results go into their old storage. Raises FailedPrecondition that names a module that takes another shape."""
    methods: dict[str, Any] = {name: getattr(layer, "quant_method", None) for name, layer in wanted.items()}
    before = {name: tensors_of(layer) for name, layer in wanted.items()}
    for name, layer in wanted.items():
        restore = getattr(methods[name], "restore_weights_before_loading", None)
        if restore is not None:
            restore(layer)
    model.load_weights(iter(tensors))
    for name, layer in wanted.items():
        if methods[name] is not None:
            methods[name].process_weights_after_loading(layer)
        keep_memory(layer, before[name])
        for held, old in before[name].items():
            if tensors_of(layer).get(held) is not old:
                raise FailedPrecondition(
                    f"'{name}.{held}' ({type(layer).__name__}) has another shape or dtype after SGLang loaded it again: new weights "
                    "can't be put where kernels read them",
                    culprit=f"parameter '{name}.{held}'",
                )


def process_aside(model: Any, tensors: Iterable[tuple[str, Any]], portion: Portion) -> None:
    """Loads `tensors`, in the checkpoint's format, into new memory of the portion's modules, post-processes these as after the model's first
    loading, and copies the result into the memory beside the model. Leaves the modules as they come out: the caller puts them back."""
    import torch

    formats = getattr(model, _FORMATS, {})
    placed: dict[int, Any] = {}  # a tied parameter stays one
    for layer in portion.modules.values():
        known = formats.get(id(layer), {})
        for name, tensor in layer._parameters.items():
            if tensor is not None:
                layer._parameters[name] = placed.setdefault(id(tensor), _zeros(known.get(name, tensor), tensor.device))
        layer._buffers.update({name: tensor.clone() for name, tensor in layer._buffers.items() if tensor is not None})
    with torch.no_grad():
        model.load_weights(iter(tensors))
        for name, layer in portion.modules.items():
            method = getattr(layer, "quant_method", None)
            if method is not None:
                method.process_weights_after_loading(layer)
            for held, into in zip((layer._parameters, layer._buffers), portion.made[name]):
                for key, tensor in into.items():
                    result = held.get(key)
                    if result is None or (result.shape, result.dtype) != (tensor.shape, tensor.dtype):
                        raise FailedPrecondition(f"'{name}.{key}' has another shape or dtype after SGLang loaded it aside", culprit=f"parameter '{name}.{key}'")
                    tensor.copy_(result)


def _zeros(tensor: Any, device: Any) -> Any:
    """The same kind of parameter, in new memory."""
    import torch

    return like(tensor, torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).zero_())


def finish(model: Any) -> None:
    """Makes anew what models derive from all their weights, as after any load that did not go through `load_weights`."""
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)


# How many tokens follow the first ones, one by one, through the decode kernels.
DECODED = 1


def probe_of(runner: Any, room: Room) -> Probe:
    """How a scheduler's model is run on fixed tokens: the first all at once, the last by itself."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_model, get_parallel

    model, group = runner.model, get_parallel().tp_group
    ids = token_ids(runner.model_config.vocab_size, room.tokens + DECODED, runner.device)
    batches = [_extend(runner, room, ids[: room.tokens]), _decode(runner, room, ids[room.tokens :])]
    context = ForwardContext(attn_backend=runner.attn_backend)

    @contextmanager
    def around(batch: Any) -> Iterator[None]:
        with get_model().override(shared_experts=model.shared_experts_config), forward_context(context, forward_batch=batch):
            yield

    def run() -> Any:
        made = []
        for batch in batches:
            runner.attn_backend.init_forward_metadata(batch)
            with around(batch):
                made.append(model.forward(batch.input_ids, batch.positions, _kept(batch)).next_token_logits.clone())
        return made

    @contextmanager
    def alone() -> Iterator[None]:
        runner.attn_backend.init_forward_metadata(batches[0])
        with around(batches[0]):
            yield

    turn, agree = (group.rank_in_group, group.world_size), partial(union_over, group)
    return Probe(run, room.tokens, alone, turn=turn, agree=agree, keep=_kept, not_run=ways_not_run(runner))


def ways_not_run(runner: Any) -> dict[str, str]:
    """By name, ways in which this engine runs its model that the probe does not run, and why."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    why = "are not replayed by the proof, which runs the model without them"
    runners = {"decode graphs": "decode_cuda_graph_runner", "prefill graphs": "prefill_cuda_graph_runner"}
    return {name: why for name, held in runners.items() if not isinstance(getattr(runner, held, None), (EagerRunner, type(None)))}


class Room:
    """Room in SGLang's cache for one request of `tokens` tokens and DECODED more, until `close`. Raises FailedPrecondition where there is none."""

    def __init__(self, runner: Any) -> None:
        self.tokens = tokens_for(runner.model)
        self._slots_pool, self._requests = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
        page = getattr(self._slots_pool, "page_size", 1)
        whole = -(-(self.tokens + DECODED) // page) * page
        self.request: int | None = None
        self.slots: Any = None
        if self._requests.free_slots and whole <= self._requests.req_to_token.shape[1]:
            self.slots = self._slots_pool.alloc(whole)
        if self.slots is None:
            raise FailedPrecondition(f"SGLang's cache has no room for a request of {whole} tokens")
        self.request = self._requests.free_slots.pop()
        try:
            self._requests.req_to_token[self.request, :whole] = self.slots.to(self._requests.req_to_token.dtype)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.request is not None:
            self._requests.free_slots.append(self.request)
            self._slots_pool.free(self.slots)
        self.request = self.slots = None


def _extend(runner: Any, room: Room, ids: Any) -> Any:
    """The batch with all tokens but those to decode."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    count = len(ids)

    def tensor_of(value: int) -> Any:
        return torch.tensor([value], dtype=torch.int32, device=runner.device)

    extend = dict(
        extend_num_tokens=count, extend_seq_lens=tensor_of(count), extend_prefix_lens=tensor_of(0), extend_start_loc=tensor_of(0),
        extend_prefix_lens_cpu=[0], extend_seq_lens_cpu=[count], extend_logprob_start_lens_cpu=[0],
    )  # fmt: skip
    return _batch(runner, room, ids, ForwardMode.EXTEND, 0, **extend)


def _decode(runner: Any, room: Room, ids: Any) -> Any:
    """The batch with the tokens to decode."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return _batch(runner, room, ids, ForwardMode.DECODE, room.tokens)


def _batch(runner: Any, room: Room, ids: Any, mode: Any, before: int, **extend: Any) -> Any:
    """A batch with the tokens `ids` of the room's request, after `before` others."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    length = before + len(ids)
    lengths = torch.tensor([length], dtype=torch.int64)
    positions = torch.arange(before, length, device=runner.device)
    made = ForwardBatch(
        forward_mode=mode, batch_size=1, input_ids=ids, req_pool_indices=torch.tensor([room.request], dtype=torch.int64, device=runner.device),
        seq_lens=lengths.to(runner.device), seq_lens_cpu=lengths, orig_seq_lens=lengths.to(torch.int32).to(runner.device), seq_lens_sum=length,
        out_cache_loc=room.slots[before:length], positions=positions, mrope_positions=positions.expand(3, -1).contiguous(),
        spec_algorithm=runner.spec_algorithm, capture_hidden_mode=CaptureHiddenMode.NULL, global_forward_mode=mode, **extend,
    )  # fmt: skip
    runner.kv_index_translator.bind_runner_slots(made)
    return runner.prepare_dummy_forward_batch(made)


def _kept(value: Any) -> Any:
    """A copy of a batch, because layers write the residual stream and what they cache into the batch that they get. Anything else is
    returned as it is."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if not isinstance(value, ForwardBatch):
        return value
    made = copy.copy(value)
    stream = getattr(value, "residual_stream", None)
    if stream is not None:
        made.residual_stream = copy.copy(stream)
        if isinstance(stream.residual, torch.Tensor):
            made.residual_stream.residual = stream.residual.clone()
        if stream.pending is not None:
            made.residual_stream.pending = copy.copy(stream.pending)
            if isinstance(stream.pending.value, torch.Tensor):
                made.residual_stream.pending.value = stream.pending.value.clone()
    return made


def gather(value: Any) -> list[Any]:
    """The values of all ranks; each must call this alike."""
    from sglang.srt.runtime_context import get_parallel

    return gathered(get_parallel().tp_group, value)


def agree(names: set[str]) -> set[str]:
    """The union of the names that all ranks pass; each must call this alike."""
    return set().union(*gather(names))


# The attribute of a model that has its Backend.
_BACKEND = "_refitd_backend"


def answer(manager: Any, request: Any) -> Any:
    """Carries out a request {"do": "attach" | "take" | "detach" | "status", ...} of `Controls`. Returns an error of the request instead of
    raising it, since an exception would end the scheduler, and with it the engine."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    made: Any = None
    failure = ""
    try:
        made = _carry_out(manager.tp_worker.model_runner, json.loads(bytes(request.serialized_named_tensors[0])))
    except Exception as error:
        logger.exception("refitd: the request failed on this rank")
        failure = json.dumps({"error": type(error).__name__, "reason": str(error)})
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(manager.tp_cpu_group)
    torch.distributed.all_gather_object(outcomes, (failure, made), group=manager.tp_cpu_group)
    failures = [failed for failed, _ in outcomes if failed]
    if not failures:
        manager.record_weight_version_after_update(request.weight_version)
    message = failures[0] if failures else json.dumps([answered for _, answered in outcomes])
    return UpdateWeightsFromTensorReqOutput(success=not failures, message=message)


def _carry_out(runner: Any, request: dict[str, Any]) -> Any:
    """Carries out a request on this rank; returns its answer."""
    do = request.pop("do")
    backend = getattr(runner.model, _BACKEND, None)
    if backend is None:
        backend = Backend(runner)
        object.__setattr__(runner.model, _BACKEND, backend)
    if do == "detach":
        backend.rank.detach()
    elif do == "attach":
        backend.attach(request)
    elif do == "take":
        backend.rank.take(request["version"], request["wait_seconds"])
    elif do == "ahead":
        return backend.rank.ahead(request["update_id"])
    elif do == "status":
        return {**backend.rank.status(), **(backend.digests() if request.get("digests") else {})}
    else:
        raise errors.InvalidArgument(f"no request '{do}'", culprit="do")
    return None


class Backend:
    """One rank's model. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, runner: Any) -> None:
        import torch

        self.model: Any = runner.model
        self._runner = runner
        # A model with evidence came from refitd's loader, which fills it with random weights.
        clean = getattr(self.model, EVIDENCE_ATTRIBUTE, None) is None
        device = torch.device(next(self.model.parameters()).device)
        self._device = device
        self._before: dict[str, int] = {}  # processed parameters before what was kept was processed
        kept = getattr(self.model, KEPT_ATTRIBUTE, None)
        take_up = None if kept is None else TakeUp(kept, self._decide_kept, self._prove_kept, gather)
        self.rank = Rank(
            device, client="sglang", clean=clean, decide=self._decide, process=self._process, aside=self._aside, logits=self._logits, take_up=take_up
        )

    def attach(self, request: dict[str, Any]) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if request.pop("weights_discarded"):
            self.rank.clean = False
        dirty, drivers, restores = request.pop("dirty"), request.pop("drivers"), request.pop("restores")
        settings = Settings.of(request).checked()
        self.rank.attach(
            settings, settings.instance, parallel.tp_rank, parallel.tp_size + drivers, dirty=dirty, restores=restores, driven=drivers > 0
        )

    def digests(self) -> dict[str, Any]:
        """By name, dtype, shape and digest of each parameter and buffer."""
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {"digests": {name: [str(t.dtype), list(t.shape), digest(t)] for name, t in held}}

    def _decide(self, settings: Settings) -> Delivery:
        manifest = self._manifest(settings)
        devices.synchronize(self._device)  # batches that the scheduler has launched read the weights
        with ExitStack() as rooms:
            made = proved(self.model, settings, manifest, self._device, self.rank.clean, self._steps(rooms))
        return made

    def _manifest(self, settings: Settings) -> list[TensorSpec]:
        return read_manifest(settings.manifest or self._runner.model_config.model_path)

    def _decide_kept(self, settings: Settings) -> Delivery:
        made = decided(self.model, settings, self._manifest(settings), self._device, sys.modules[__name__])
        self._before = self._processed(made)
        return made

    def _prove_kept(self, settings: Settings, delivery: Delivery) -> bool:
        after = self._processed(delivery)
        if any(after[name] == found for name, found in self._before.items()):
            return False  # loading again does not reach it, as _try_out finds
        with ExitStack() as rooms:
            holds = prove_kept(self.model, settings, delivery, self._device, self._steps(rooms))
        return holds

    def _processed(self, delivery: Delivery) -> dict[str, int]:
        """By name, the digest of each processed parameter and buffer that has elements."""
        named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
        return {name: digest(named[name]) for name in delivery.processed if named[name].numel()}

    def _steps(self, rooms: ExitStack) -> Steps:
        return Steps(
            sys.modules[__name__], self._try_out, self._process, self._aside, self._aside, agree, self._load, lambda: self._probe(rooms)
        )

    def _probe(self, rooms: ExitStack) -> Probe:
        """How the model is run alone, until `rooms` closes."""
        room = Room(self._runner)
        rooms.callback(room.close)
        return probe_of(self._runner, room)

    def _logits(self) -> Any:
        with ExitStack() as rooms:
            return self._probe(rooms).run()

    def _load(self, delivery: Delivery, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """Loads a checkpoint's tensors into the model as SGLang's own weight updates do. Raises FailedPrecondition where it can't be loaded anew."""
        wanted = {name: layer for name, layer in self.model.named_modules() if getattr(layer, "quant_method", None) is not None}
        reload(self.model, tensors, wanted)
        self._derive(delivery)
        return []

    def _try_out(self, made: Delivery) -> None:
        """Processes two sets of random weights. A parameter that is the same after both is refused by name: processing does not reach it."""
        import torch

        seen = []
        for seed in (1, 2):
            generator = torch.Generator(device=self._device).manual_seed(seed)
            for tensor in made.loader_tensors.values():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, device=self._device).to(tensor.dtype))
            reload(self.model, made.loader_tensors.items(), made.modules)
            seen.append(self._processed(made))
        for name, first in seen[0].items():
            if seen[1].get(name) == first:
                raise errors.FailedPrecondition(
                    f"parameter '{name}' is changed after loading ({made.processed[name]}), and loading again does not reach it",
                    culprit=f"parameter '{name}'",
                )

    def _aside(self, portion: Portion, tensors: Mapping[str, Any]) -> None:
        """Processes the portion of these tensors into the memory beside the model."""
        with as_before(portion.modules.values()):
            process_aside(self.model, tensors.items(), portion)

    def _process(self, delivery: Delivery) -> None:
        done = [portion for portion in delivery.ahead if portion.done]
        ahead = {name for portion in done for name in portion.modules}
        taken = {name for portion in done for name in portion.tensors}
        for portion in done:
            portion.put_in_place()
            portion.forget()
        tensors = {name: tensor for name, tensor in delivery.loader_tensors.items() if name not in taken}
        if tensors:
            reload(self.model, tensors.items(), {name: module for name, module in delivery.modules.items() if name not in ahead})
        self._derive(delivery)

    def _derive(self, delivery: Delivery) -> None:
        """Makes anew what models and tied modules keep of other modules' weights."""
        finish(self.model)
        for layer in delivery.tied:
            layer.quant_method.process_weights_after_loading(layer)
