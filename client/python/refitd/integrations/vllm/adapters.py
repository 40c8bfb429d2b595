"""LoRA adapters of many tenants in one vLLM, each with versions of its own, which come while the engine serves.

Offline, between calls of `generate`:

    adapters = refitd.integrations.vllm.adapters.follow(llm)
    adapters.add("alice", group="alice", rank=8, target_modules=["q_proj", "v_proj"])
    adapters.poll()
    llm.generate(prompts, lora_request=adapters.request("alice"))

A server has them by REFITD_ADAPTERS and by routes (`add_routes`); clients name an adapter as the model.

The daemon writes a version into memory of this process, which the engine does not read. Once it is committed, it is written as PEFT's files into a folder
of its own in memory (/dev/shm), and vLLM loads it on all ranks, in an inactive slot, before any request gets it. To vLLM each version is an adapter
of its own, "alice@7", with an id and a path that no other has, and answers name it as their model: a request goes on with the version that it began with, whatever comes meanwhile, no block of the prefix
cache is shared, and all ranks compute a step with the same version. A version's files stay as long as requests use it or it is one of the
`kept` before the newest, so that vLLM can load it again after it has given its slot to others or got new base weights.

An adapter is refused by the name of a module that the base model lacks, and what vLLM itself refuses is found when it is added: a trial of zeros is loaded.

Of vLLM's inside this uses `LoRARequest`, `add_lora` and `remove_lora` of its engines, `lora_requests` of the server's models, and, to tell whether
blocks are kept apart by path, `_gen_lora_extra_hash_keys`.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any, Protocol

from ..._core.member import Connect
from ...errors import Error, FailedPrecondition, InvalidArgument, NotFound
from ...layout import TensorSpec
from ...serving import Settings, read_manifest
from .versions import check_api_servers

logger = logging.getLogger("vllm.refitd")

# In memory on every Linux.
FOLDER = "/dev/shm"
_NAME = "refitd-adapters-"
# The first id of a version; vLLM gives small ids to adapters that others load.
FIRST_ID = 1 << 30
# Beneath /v1, so that vLLM asks for its API key.
ROUTE = "/v1/refitd/adapters"
# How often the server looks for new versions.
LOOK_SECONDS = 0.02


class Calls(Protocol):
    """The calls to vLLM; they return when they have taken effect on all ranks."""

    def add(self, request: Any) -> None: ...

    def remove(self, lora_id: int) -> None: ...

    def name(self, requests: dict[str, Any], gone: Sequence[str]) -> None:
        """Lets clients find these requests under these names, and no more those of `gone`. Waits for nothing."""

    def busy(self) -> bool:
        """Whether requests are in flight of which `acquire` was not told."""


@dataclass(eq=False)
class _Version:
    number: int
    request: Any
    uses: int = 0  # requests in flight


@dataclass(eq=False)
class _Tenant:
    name: str
    matrices: Any
    loop: Any  # which receives them
    taken: int = 0  # how many versions had come when the last was taken, or refused
    versions: list[_Version] = field(default_factory=list)  # the newest comes last
    reason: str = ""


class Adapters:
    """The adapters of one engine. Thread-safe, but for `poll` and `wait`, which one thread calls."""

    def __init__(self, calls: Calls, vllm_config: Any, *, instance: str, socket: str | None = None, connect: Connect = Connect(), kept: int = 1) -> None:
        """`instance`: of the engine; an adapter's instance in its group is this and its name. `kept`: how many versions before the newest stay,
        for requests that name them. Raises FailedPrecondition where vLLM can't have adapters."""
        config = vllm_config.lora_config
        if config is None:
            raise FailedPrecondition("vLLM was started without --enable-lora", culprit="enable_lora")
        nodes = getattr(vllm_config.parallel_config, "nnodes", 1)
        if nodes > 1:
            raise FailedPrecondition(f"vLLM runs on {nodes} nodes, and adapters are in the memory of one", culprit="nnodes")
        _check_blocks_are_kept_apart()
        self._calls, self._kept, self._max_rank = calls, kept, int(config.max_lora_rank)
        self._model = vllm_config.model_config.model
        self._instance, self._socket, self._connect = instance, socket, connect
        self._lock = threading.Lock()
        self._tenants: dict[str, _Tenant] = {}
        self._leaving: list[_Tenant] = []  # removed, with requests in flight
        self._coming: set[str] = set()  # names of those that are being added
        self._by_path: dict[str, tuple[_Tenant, _Version]] = {}
        self._ids = count(FIRST_ID)
        _remove_left_over()
        self._folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=FOLDER))
        self._held = open(self._folder / "lock", "w")
        fcntl.flock(self._held, fcntl.LOCK_EX)
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    # ---- tenants ----

    def add(self, name: str, *, group: str, **wanted: Any) -> None:
        """Attaches an adapter to its group; it has a version when the first has come.

        Args:
            name: By which requests ask for it.
            group: That of its trainer, which has no other adapter.
            wanted: `rank` and `target_modules` as in PEFT's LoraConfig, and `dtype`, that of the matrices as trainers have them ("bfloat16"); or `like`: a
                folder that PEFT wrote, whose tensors' names, dtypes and shapes are read.

        Raises InvalidArgument and Unimplemented, naming the field, module or tensor, FailedPrecondition for what vLLM refuses, and what
        attaching raises. Nothing is left then.
        """
        self._add(group, {name: wanted}, {name: ""}, f"{self._instance}.{name}")

    def add_group(self, group: str, adapters: Mapping[str, Mapping[str, Any]]) -> None:
        """Attaches all adapters of a group with several, whose versions come together. `adapters`: by name, as `wanted` of add(). Raises as add() does."""
        self._add(group, adapters, {name: f"{name}/" for name in adapters}, f"{self._instance}.{group}")

    def _add(self, group: str, adapters: Mapping[str, Mapping[str, Any]], prefixes: Mapping[str, str], instance: str) -> None:
        from ..lora import Receiver

        with self._lock:
            for name in adapters:
                if not re.fullmatch(r"[\w.-]+", name) or name in self._tenants or name in self._coming:
                    raise InvalidArgument(f"name: {name!r} is an adapter's already, or has other characters than letters, digits, '.', '_' and '-'", culprit="name")
            self._coming |= adapters.keys()
        try:
            base = read_manifest(self._model)
            matrices = {name: self._tried(name, base, **wanted) for name, wanted in adapters.items()}
            loop = Receiver(
                {prefixes[name]: each for name, each in matrices.items()}, group=group, instance=instance, socket=self._socket, connect=self._connect
            )
            with self._lock:
                self._tenants |= {name: _Tenant(name, each, loop) for name, each in matrices.items()}
        finally:
            with self._lock:
                self._coming -= adapters.keys()

    def remove(self, name: str) -> None:
        """Detaches the adapter. Later requests are refused, those in flight end with the version that they have. Raises NotFound."""
        with self._lock:
            tenant = self._tenants.pop(name, None)
            if tenant is None:
                raise NotFound(f"there is no adapter '{name}'", culprit=f"adapter '{name}'")
            self._leaving.append(tenant)
            self._calls.name({}, [name, *(f"{name}@{version.number}" for version in tenant.versions)])
            shared = any(other.loop is tenant.loop for other in self._tenants.values())
        if not shared:
            tenant.loop.close()
        self._retire()

    def poll(self) -> None:
        """Takes the versions that have come, and gives up those that nothing uses any more."""
        with self._lock:
            tenants = list(self._tenants.values())
        for tenant in tenants:
            loop = tenant.loop
            if loop.version is not None and loop.arrived != tenant.taken:
                self._take(tenant)
        self._retire()

    def wait(self, name: str, version: int, timeout_seconds: float = 600.0) -> int:
        """Waits for `version` of the adapter or a newer one, and takes it. Raises NotFound, DeadlineExceeded, FailedPrecondition where vLLM refuses it."""
        tenant = self._find(name)
        tenant.loop.wait(version, timeout_seconds)
        self.poll()
        if tenant.reason:
            raise FailedPrecondition(tenant.reason, culprit=f"adapter '{name}'")
        return tenant.versions[-1].number

    def request(self, name: str, version: int | None = None) -> Any:
        """The LoRARequest of the adapter's newest version, or of `version`, one of those that are kept. Offline, ask anew after
        each `poll`: it may give up what was asked for before. Raises NotFound where there is none."""
        with self._lock:
            versions = self._find(name).versions
            found = [each for each in versions if version is None or each.number == version]
            if not found:
                raise NotFound(f"adapter '{name}' has {'no version' if version is None else f'no version {version}'} here", culprit=f"adapter '{name}'")
            return found[-1].request

    def status(self) -> dict[str, Any]:
        with self._lock:
            return {
                tenant.name: {
                    "version": tenant.versions[-1].number if tenant.versions else None,
                    "kept": [version.number for version in tenant.versions[:-1]],
                    "requests": sum(version.uses for version in tenant.versions),
                    "reason": tenant.reason,
                }
                for tenant in self._tenants.values()
            }

    def close(self) -> None:
        """Detaches all adapters. vLLM may not be used with one afterwards."""
        for tenant in self._tenants.values():
            tenant.loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        self._held.close()

    # ---- requests ----

    def acquire(self, request: Any) -> Any:
        """The request to compute with in place of `request`, which stays here until `release` of it. A request of a version that is gone gets the newest;
        raises NotFound where the adapter is gone. Requests of adapters that are not here pass."""
        with self._lock:
            found = self._by_path.get(request.lora_path)
            if found is None:
                if not request.lora_path.startswith(str(self._folder)):
                    return request
                tenant = self._find(request.lora_name.rpartition("@")[0])
                if not tenant.versions:
                    raise NotFound(f"adapter '{tenant.name}' has no version here", culprit=f"adapter '{tenant.name}'")
                found = tenant, tenant.versions[-1]
            found[1].uses += 1
            return found[1].request

    def release(self, request: Any) -> None:
        with self._lock:
            found = self._by_path.get(request.lora_path)
            if found is not None:
                found[1].uses -= 1

    # ---- inside ----

    def _tried(
        self, name: str, base: Sequence[TensorSpec], rank: int = 0, target_modules: str | Sequence[str] = (), dtype: str = "bfloat16", like: str | None = None
    ) -> Any:
        """The adapter's matrices, which vLLM has loaded once as zeros."""
        from ..lora import Matrices, specs_of

        specs = read_manifest(like) if like is not None else specs_of(base, rank, target_modules, dtype)
        self._check(specs, base)
        made = Matrices(specs)
        trial = self._write(f"{name}@trial", made)
        try:
            self._calls.add(trial)
            self._calls.remove(trial.lora_int_id)
        except Exception as error:
            raise FailedPrecondition(f"adapter '{name}': vLLM does not load it: {error}", culprit=f"adapter '{name}'") from error
        finally:
            shutil.rmtree(trial.lora_path)
        return made

    def _find(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            raise NotFound(f"there is no adapter '{name}'", culprit=f"adapter '{name}'")
        return tenant

    def _check(self, specs: Sequence[TensorSpec], base: Sequence[TensorSpec]) -> None:
        """Refuses an adapter of which the base model lacks a module, or has it with another shape, or whose rank is too great."""
        shapes = {spec.name: spec.shape for spec in base}
        for spec in specs:
            name, _, ending = spec.name.removesuffix(".weight").removeprefix("base_model.model.").rpartition(".")
            weight = shapes.get(f"{name}.weight")
            rank, fits = (spec.shape[0], weight and spec.shape[1:] == weight[1:]) if ending == "lora_A" else (spec.shape[-1], weight and spec.shape[0] == weight[0])
            if not fits:
                raise InvalidArgument(f"tensor '{spec.name}' of shape {spec.shape}: the base model has '{name}' of {weight}", tensor=spec.name)
            if rank > self._max_rank:
                raise InvalidArgument(f"rank: '{spec.name}' has {rank}, and vLLM was started with --max-lora-rank {self._max_rank}", culprit="rank")

    def _write(self, name: str, matrices: Any) -> Any:
        """The adapter as PEFT's files in a folder of its own; returns vLLM's request for it."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        number = next(self._ids)
        folder = self._folder / str(number)
        folder.mkdir()
        try:
            (folder / "adapter_config.json").write_text(json.dumps(matrices.config()))
            save_file(dict(matrices.tensors), folder / "adapter_model.safetensors")
        except BaseException:
            shutil.rmtree(folder)
            raise
        return LoRARequest(name, number, str(folder))

    def _take(self, tenant: _Tenant) -> None:
        loop = tenant.loop
        with loop.use() as version:
            tenant.taken = loop.arrived
            request = self._write(f"{tenant.name}@{version}", tenant.matrices)
        try:
            self._calls.add(request)
        except Exception as error:
            tenant.reason = f"version {version} of adapter '{tenant.name}': vLLM does not load it: {error}"
            logger.exception("refitd: %s", tenant.reason)
            shutil.rmtree(request.lora_path)
            return
        made = _Version(version, request)
        with self._lock:
            tenant.reason = ""
            tenant.versions.append(made)
            self._by_path[request.lora_path] = tenant, made
            if self._tenants.get(tenant.name) is tenant:  # else it was removed meanwhile
                self._calls.name({tenant.name: request, f"{tenant.name}@{version}": request}, ())
            elif tenant not in self._leaving:
                self._leaving.append(tenant)

    def _retire(self) -> None:
        """Gives up the versions that are neither kept nor in use."""
        if self._calls.busy():
            return
        gone: list[tuple[_Tenant, _Version]] = []
        with self._lock:
            for tenant, kept in [*((tenant, self._kept + 1) for tenant in self._tenants.values()), *((tenant, 0) for tenant in self._leaving)]:
                old = [version for version in tenant.versions[: len(tenant.versions) - kept] if not version.uses] if len(tenant.versions) > kept else []
                gone += [(tenant, version) for version in old]
                for version in old:
                    tenant.versions.remove(version)
                    del self._by_path[version.request.lora_path]
            self._leaving = [tenant for tenant in self._leaving if tenant.versions]
            self._calls.name({}, [f"{tenant.name}@{version.number}" for tenant, version in gone])
        for _, version in gone:
            try:
                self._calls.remove(version.request.lora_int_id)
            finally:
                shutil.rmtree(version.request.lora_path)


def _check_blocks_are_kept_apart() -> None:
    """Raises FailedPrecondition where vLLM finds blocks of one version of an adapter for another: before 0.32 it knows adapters by name alone."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    first, second = (_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=LoRARequest("a", 1, path))) for path in ("/a", "/b"))
    if first == second:
        raise FailedPrecondition("this version of vLLM finds blocks of an adapter's other versions in its prefix cache: adapters need 0.32", culprit="vllm")


def _remove_left_over() -> None:
    """Removes the folders of processes that were killed."""
    for folder in Path(FOLDER).glob(f"{_NAME}*"):
        try:
            with open(folder / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue  # it is in use, another user's, or just being made


# ---- offline ----


class OfflineCalls:
    """The calls to a vllm.LLM."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine

    def add(self, request: Any) -> None:
        self._engine.add_lora(request)

    def remove(self, lora_id: int) -> None:
        self._engine.remove_lora(lora_id)

    def name(self, requests: dict[str, Any], gone: Sequence[str]) -> None:
        pass

    def busy(self) -> bool:
        return bool(self._engine.has_unfinished_requests())


def follow(llm: Any, *, instance: str, socket: str | None = None, connect: Connect = Connect(), kept: int = 1) -> Adapters:
    """The adapters of an offline `vllm.LLM`, which was made with enable_lora. Their versions are taken in `Adapters.poll` and `Adapters.wait`."""
    return Adapters(OfflineCalls(llm), llm.llm_engine.vllm_config, instance=instance, socket=socket, connect=connect, kept=kept)


# ---- servers ----


class ServerCalls:
    """The calls to vLLM's asynchronous engine, which a thread of their own makes. `models`: the server's, by whose names clients ask."""

    def __init__(self, engine: Any, models: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._engine, self._models, self._loop = engine, models, loop

    def _wait(self, call: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()

    def add(self, request: Any) -> None:
        self._wait(self._engine.add_lora(request))

    def remove(self, lora_id: int) -> None:
        self._wait(self._engine.remove_lora(lora_id))

    def name(self, requests: dict[str, Any], gone: Sequence[str]) -> None:
        self._models.lora_requests.update(requests)
        for name in gone:
            self._models.lora_requests.pop(name, None)

    def busy(self) -> bool:
        return False


class Server:
    """The adapters of one server, whose versions a thread takes."""

    def __init__(self, engine: Any, models: Any, wanted: Sequence[Mapping[str, Any]], settings: Settings) -> None:
        """Must be made on the server's event loop. `wanted`: of `add`, what is there from the start."""
        check_api_servers(engine.vllm_config)
        calls = ServerCalls(engine, models, asyncio.get_running_loop())
        instance = settings.instance or f"{gethostname()}-{os.getpid()}"
        kept = os.environ.get("REFITD_ADAPTERS_KEPT", "1")
        if not kept.isdecimal():
            raise InvalidArgument(f"REFITD_ADAPTERS_KEPT: {kept!r} is no number", culprit="REFITD_ADAPTERS_KEPT")
        self.adapters = Adapters(calls, engine.vllm_config, instance=instance, connect=settings.connect("vllm"), kept=int(kept))
        for name in ("generate", "encode"):
            self._count(engine, name)
        threads = [threading.Thread(target=self._serve, name="refitd-adapters", daemon=True)]
        threads += [threading.Thread(target=self._add, args=(each,), name="refitd-adapter", daemon=True) for each in wanted]
        for thread in threads:
            thread.start()

    def add(self, wanted: Mapping[str, Any]) -> None:
        """Arguments of Adapters.add, or of Adapters.add_group."""
        if "adapters" in wanted:
            self.adapters.add_group(**wanted)
        else:
            self.adapters.add(**wanted)

    def _add(self, wanted: Mapping[str, Any]) -> None:
        try:
            self.add(wanted)
        except Exception:
            logger.exception("refitd: adapters are not there: %s", wanted)

    def _serve(self) -> None:
        while True:
            try:
                self.adapters.poll()
            except Exception:
                logger.exception("refitd: adapters go on after an error")
            time.sleep(LOOK_SECONDS)

    def _acquire(self, request: Any) -> Any:
        try:
            return self.adapters.acquire(request)
        except NotFound as error:
            from vllm.exceptions import VLLMNotFoundError

            raise VLLMNotFoundError(str(error)) from error  # which the server answers with 404

    def _count(self, engine: Any, method: str) -> None:
        """Lets the engine's method tell which versions are in use."""
        original = getattr(engine, method)

        async def counted(*arguments: Any, **options: Any) -> AsyncIterator[Any]:
            given = options.get("lora_request")
            if given is None:
                async for output in original(*arguments, **options):
                    yield output
                return
            used = self._acquire(given)
            outputs = original(*arguments, **{**options, "lora_request": used})
            try:
                async for output in outputs:
                    yield output
            finally:
                await outputs.aclose()
                self.adapters.release(used)

        setattr(engine, method, counted)


def add_routes(app: Any, server_of: Callable[[], Server | None]) -> None:
    """Adds the routes to a server that has not started; those that change something only where vLLM lets clients load adapters. `server_of`: returns
    None where the server follows no adapters, or not yet."""
    from fastapi import APIRouter
    from fastapi.responses import JSONResponse

    router = APIRouter()

    def do(call: Callable[[Server], Any]) -> Any:
        server = server_of()
        if server is None:
            return JSONResponse({"error": "refitd follows no adapters here: set REFITD_ADAPTERS"}, status_code=503)
        try:
            call(server)
            return JSONResponse(server.adapters.status())
        except NotFound as error:
            return JSONResponse({"error": str(error)}, status_code=404)
        except (Error, TypeError) as error:
            return JSONResponse({"error": str(error), "culprit": getattr(error, "culprit", "")}, status_code=400)

    def listed() -> Any:
        return do(lambda server: None)

    def added(wanted: dict[str, Any]) -> Any:
        if any("like" in each for each in wanted.get("adapters", {"": wanted}).values()):
            return JSONResponse({"error": "like: this server reads no folders that clients name", "culprit": "like"}, status_code=400)
        return do(lambda server: server.add(wanted))

    def removed(name: str) -> Any:
        return do(lambda server: server.adapters.remove(name))

    router.add_api_route(ROUTE, listed, methods=["GET"])
    if os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "").lower() in ("1", "true"):
        router.add_api_route(ROUTE, added, methods=["POST"])
        router.add_api_route(f"{ROUTE}/{{name}}", removed, methods=["DELETE"])
    app.include_router(router)


def wanted(environment: Mapping[str, str] = os.environ) -> list[dict[str, Any]] | None:
    """What REFITD_ADAPTERS says: a list of arguments of Server.add, as JSON; None: the server follows no adapters. Raises InvalidArgument."""
    text = environment.get("REFITD_ADAPTERS")
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(f"REFITD_ADAPTERS is no JSON: {error}", culprit="REFITD_ADAPTERS") from None
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InvalidArgument(f"REFITD_ADAPTERS is no list of objects: {text!r}", culprit="REFITD_ADAPTERS")
    return found
