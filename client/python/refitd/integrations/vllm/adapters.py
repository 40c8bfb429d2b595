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
blocks are kept apart by path, `_gen_lora_extra_hash_keys`, and, to tell whether scalings of single layers are read, the fields of `PEFTHelper`.
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
import stat
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import TimeoutError as CallTimeout
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from itertools import count
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any, Protocol

from ..._core.member import Connect
from ...errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
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
# When a version that could not be written is tried again.
RETRY_SECONDS = 1.0
# How long a call to vLLM may take: it waits for a step, and reads files in memory.
CALL_SECONDS = 120.0
# How many clients may add adapters at once: each holds one of the server's threads (40), up to REFITD_WAIT_SECONDS where there is no such group.
MAX_ADDING = 8


class Calls(Protocol):
    """The calls to vLLM; they return when they have taken effect on all ranks."""

    def add(self, request: Any) -> None: ...

    def remove(self, lora_id: int) -> None: ...

    def name(self, requests: Mapping[str, Any], gone: Mapping[str, Any]) -> None:
        """Lets clients find these requests under these names, and no more those of `gone`, where they still have that name. Waits for nothing."""

    def served(self, name: str) -> bool:
        """Whether clients find something else by this name, or by this name with a version."""

    def busy(self) -> bool:
        """Whether requests are in flight of which `acquire` was not told."""


@dataclass(eq=False)
class _Version:
    number: int
    request: Any
    uses: int = 0  # requests in flight
    held: int = 0  # HTTP requests that found it by name, and are not yet answered


@dataclass(eq=False)
class _Tenant:
    name: str
    matrices: Any
    loop: Any  # which receives them
    taken: int = 0  # how many versions had come when the last was taken, or refused
    versions: list[_Version] = field(default_factory=list)  # the newest comes last
    reason: str = ""
    again: float = 0.0  # when, by time.monotonic(), a version that could not be written is tried again


class Adapters:
    """The adapters of one engine. Thread-safe, but for `poll` and `wait`, which one thread calls."""

    def __init__(self, calls: Calls, vllm_config: Any, *, instance: str, socket: str | None = None, connect: Connect = Connect(), kept: int = 1) -> None:
        """`instance`: of the engine; an adapter's instance in its group is this and its name. `kept`: how many versions before the newest stay,
        for requests that name them. Raises FailedPrecondition where vLLM can't have adapters."""
        config = vllm_config.lora_config
        if config is None:
            raise FailedPrecondition("vLLM was started without --enable-lora", culprit="enable_lora")
        if getattr(vllm_config.model_config, "enable_sleep_mode", False):
            raise FailedPrecondition("vLLM was started with --enable-sleep-mode: a version that comes while it sleeps has no memory", culprit="enable_sleep_mode")
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
        self._folder, self._held = _make_folder()
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
            for name in adapters:
                if self._calls.served(name):
                    raise InvalidArgument(f"name: {name!r} is the served model's, or that of an adapter which vLLM loaded by itself", culprit="name")
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
            named = {f"{name}@{version.number}": version.request for version in tenant.versions}
            self._calls.name({}, {**named, name: tenant.versions[-1].request} if named else {})
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
            if loop.version is not None and loop.arrived != tenant.taken and time.monotonic() >= tenant.again:
                try:
                    self._take(tenant)
                except Exception as error:
                    self._note(tenant, f"adapter '{tenant.name}': its version is not taken, and tried again: {error}")
                    tenant.again = time.monotonic() + RETRY_SECONDS
        self._retire()

    def wait(self, name: str, version: int, timeout_seconds: float = 600.0) -> int:
        """Waits for `version` of the adapter or a newer one, and takes it. Raises NotFound, DeadlineExceeded, FailedPrecondition where vLLM refuses it."""
        tenant = self._find(name)
        deadline = time.monotonic() + timeout_seconds
        tenant.loop.wait(version, timeout_seconds)
        while True:
            self.poll()
            if tenant.reason:
                raise FailedPrecondition(tenant.reason, culprit=f"adapter '{name}'")
            if tenant.versions and tenant.versions[-1].number >= version:
                return tenant.versions[-1].number
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"adapter '{name}': version {version} was not taken within {timeout_seconds} s")
            time.sleep(LOOK_SECONDS)  # the next version is being written already

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
        os.close(self._held)

    # ---- requests ----

    def acquire(self, request: Any) -> Any:
        """Keeps the version of `request` until `release` of it; returns `request`. Raises NotFound where the version is gone. Requests of adapters that are
        not here pass."""
        with self._lock:
            found = self._by_path.get(request.lora_path)
            if found is not None:
                found[1].uses += 1
            elif self._made(request):
                raise NotFound(f"'{request.lora_name}' is not here any more", culprit=f"adapter '{request.lora_name.rpartition('@')[0]}'")
            return request

    def release(self, request: Any) -> None:
        with self._lock:
            found = self._by_path.get(request.lora_path)
            if found is not None:
                found[1].uses -= 1

    def hold(self, name: str, request: Any) -> Any:
        """What a client gets that asked for `name`, where the server's table has `request`; it stays here until `let_go`, though no engine computes with it
        yet. The table may be a moment behind: the name of an adapter is that of its newest version."""
        with self._lock:
            tenant = self._tenants.get(name)
            if tenant is not None and tenant.versions and self._made(request):
                request = tenant.versions[-1].request
            if request.lora_path in self._by_path:
                self._by_path[request.lora_path][1].held += 1
            return request

    def let_go(self, request: Any) -> None:
        with self._lock:
            found = self._by_path.get(request.lora_path)
            if found is not None:
                found[1].held -= 1

    # ---- inside ----

    def _made(self, request: Any) -> bool:
        return Path(request.lora_path).parent == self._folder

    def _note(self, tenant: _Tenant, reason: str) -> None:
        if tenant.reason != reason:
            logger.exception("refitd: %s", reason)
        tenant.reason = reason

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
        from vllm.lora.peft_helper import PEFTHelper
        from vllm.lora.request import LoRARequest

        config = matrices.config()
        dropped = config.keys() & {"rank_pattern", "alpha_pattern"} - {each.name for each in fields(PEFTHelper)}
        if dropped:
            what = f"this version of vLLM drops '{min(dropped)}' of an adapter's configuration: ranks and scalings must be those of all its layers"
            raise FailedPrecondition(what, culprit=min(dropped))
        number = next(self._ids)
        folder = self._folder / str(number)
        folder.mkdir()
        try:
            (folder / "adapter_config.json").write_text(json.dumps(config))
            save_file(dict(matrices.tensors), folder / "adapter_model.safetensors")
        except BaseException:
            shutil.rmtree(folder)
            raise
        return LoRARequest(name, number, str(folder))

    def _take(self, tenant: _Tenant) -> None:
        """Raises what hinders it from being written, and DeadlineExceeded where vLLM does not answer."""
        loop = tenant.loop
        try:
            with loop.use(0) as version:
                arrived = loop.arrived
                request = self._write(f"{tenant.name}@{version}", tenant.matrices)
        except DeadlineExceeded:
            return  # the next version is being written
        try:
            self._calls.add(request)
        except DeadlineExceeded:
            shutil.rmtree(request.lora_path, ignore_errors=True)
            raise
        except Exception as error:
            tenant.taken = arrived
            self._note(tenant, f"version {version} of adapter '{tenant.name}': vLLM does not load it: {error}")
            shutil.rmtree(request.lora_path, ignore_errors=True)
            return
        tenant.taken = arrived
        made = _Version(version, request)
        with self._lock:
            tenant.reason = ""
            tenant.versions.append(made)
            self._by_path[request.lora_path] = tenant, made
            if self._tenants.get(tenant.name) is tenant:  # else it was removed meanwhile
                self._calls.name({tenant.name: request, f"{tenant.name}@{version}": request}, {})
            elif tenant not in self._leaving:
                self._leaving.append(tenant)

    def _retire(self) -> None:
        """Gives up the versions that are neither kept nor in use."""
        if self._calls.busy():
            return
        gone: list[tuple[_Tenant, _Version]] = []
        with self._lock:
            for tenant, kept in [*((tenant, self._kept + 1) for tenant in self._tenants.values()), *((tenant, 0) for tenant in self._leaving)]:
                old = [version for version in tenant.versions[: max(0, len(tenant.versions) - kept)] if not version.uses and not version.held]
                gone += [(tenant, version) for version in old]
                for version in old:
                    tenant.versions.remove(version)
                    del self._by_path[version.request.lora_path]
            self._leaving = [tenant for tenant in self._leaving if tenant.versions]
            self._calls.name({}, {f"{tenant.name}@{version.number}": version.request for tenant, version in gone})
        for tenant, version in gone:
            try:
                self._calls.remove(version.request.lora_int_id)
            except Exception:
                logger.exception("refitd: vLLM did not give up version %s of adapter '%s'", version.number, tenant.name)
            finally:
                shutil.rmtree(version.request.lora_path, ignore_errors=True)


def _check_blocks_are_kept_apart() -> None:
    """Raises FailedPrecondition where vLLM finds blocks of one version of an adapter for another: before 0.32 it knows adapters by name alone."""
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys

    first, second = (_gen_lora_extra_hash_keys(SimpleNamespace(lora_request=LoRARequest("a", 1, path))) for path in ("/a", "/b"))
    if first == second:
        raise FailedPrecondition("this version of vLLM finds blocks of an adapter's other versions in its prefix cache: adapters need 0.32", culprit="vllm")


def _make_folder() -> tuple[Path, int]:
    """A new folder, and the descriptor of its file `lock`, whose lock says that the folder is in use."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=FOLDER))
        held = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)
        try:
            if os.path.samestat(os.stat(folder / "lock"), os.fstat(held)):
                return folder, held
        except FileNotFoundError:
            pass
        os.close(held)  # another process removed it before it was locked


def _remove_left_over() -> None:
    """Removes the folders of processes of this user that were killed."""
    for folder in Path(FOLDER).glob(f"{_NAME}*"):
        try:
            found = folder.lstat()
            if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode):
                continue
            lock = os.open(folder / "lock", os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # it is gone, or just being made
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            pass  # it is in use
        finally:
            os.close(lock)


# ---- offline ----


class OfflineCalls:
    """The calls to a vllm.LLM."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine

    def add(self, request: Any) -> None:
        self._engine.add_lora(request)

    def remove(self, lora_id: int) -> None:
        self._engine.remove_lora(lora_id)

    def name(self, requests: Mapping[str, Any], gone: Mapping[str, Any]) -> None:
        pass

    def served(self, name: str) -> bool:
        return False

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
        """The result of the call. Raises DeadlineExceeded where vLLM does not answer."""
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(CALL_SECONDS)
        except CallTimeout:
            future.cancel()
            raise DeadlineExceeded(f"vLLM did not answer within {CALL_SECONDS} s") from None

    def add(self, request: Any) -> None:
        self._wait(self._engine.add_lora(request))

    def remove(self, lora_id: int) -> None:
        self._wait(self._engine.remove_lora(lora_id))

    def name(self, requests: Mapping[str, Any], gone: Mapping[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._name, requests, gone)  # routes go through the table on this loop

    def _name(self, requests: Mapping[str, Any], gone: Mapping[str, Any]) -> None:
        names = self._models.lora_requests
        names.update(requests)
        for name, request in gone.items():
            if names.get(name) is request:
                del names[name]

    def served(self, name: str) -> bool:
        return bool(self._wait(self._served(name)))

    async def _served(self, name: str) -> bool:
        others = [other for other, request in self._models.lora_requests.items() if request.lora_int_id < FIRST_ID]
        others += [model.name for model in self._models.base_model_paths]
        return any(other == name or other.rpartition("@")[0] == name for other in others)

    def busy(self) -> bool:
        return False


class _Found(list[Any]):
    """The versions that one HTTP request found by name."""

    answered = False


# The HTTP request that this context answers holds these versions; None: there is no such request.
_found: ContextVar[_Found | None] = ContextVar("refitd_adapters_found", default=None)


class _Names(dict[str, Any]):
    """The server's table of adapters. What a client's request finds in it by name stays until the request was answered."""

    def __init__(self, names: Mapping[str, Any], adapters: Adapters) -> None:
        super().__init__(names)
        self._adapters = adapters

    def __getitem__(self, name: str) -> Any:
        request, found = super().__getitem__(name), _found.get()
        if found is not None and not found.answered:
            request = self._adapters.hold(name, request)
            found.append(request)
        return request


class _Hold:
    """ASGI middleware that lets go what a request found in _Names, once it was answered."""

    def __init__(self, app: Any, server_of: Callable[[], Server | None]) -> None:
        self._app, self._server_of = app, server_of

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        server = self._server_of() if scope["type"] == "http" else None
        if server is None:
            await self._app(scope, receive, send)
            return
        found = _Found()
        before = _found.set(found)
        try:
            await self._app(scope, receive, send)
        finally:
            _found.reset(before)
            found.answered = True
            for request in found:
                server.adapters.let_go(request)


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
        models.lora_requests = _Names(models.lora_requests, self.adapters)
        self.adding = threading.BoundedSemaphore(MAX_ADDING)
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
            try:
                outputs = original(*arguments, **options)
                try:
                    async for output in outputs:
                        yield output
                finally:
                    await outputs.aclose()
            finally:
                self.adapters.release(used)

        setattr(engine, method, counted)


def add_routes(app: Any, server_of: Callable[[], Server | None]) -> None:
    """Adds the routes to a server that has not started; those that change something only with REFITD_ADAPTERS_ROUTES=on. `server_of`: returns None where
    the server follows no adapters, or not yet. Raises InvalidArgument."""
    from fastapi import APIRouter
    from fastapi.responses import JSONResponse

    routes = os.environ.get("REFITD_ADAPTERS_ROUTES") or "off"
    if routes not in ("on", "off"):
        raise InvalidArgument(f"REFITD_ADAPTERS_ROUTES: {routes!r} is none of on, off", culprit="REFITD_ADAPTERS_ROUTES")
    app.add_middleware(_Hold, server_of=server_of)
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
        except ResourceExhausted as error:
            return JSONResponse({"error": str(error), "culprit": error.culprit}, status_code=429)
        except (Error, TypeError) as error:
            return JSONResponse({"error": str(error), "culprit": getattr(error, "culprit", "")}, status_code=400)

    def listed() -> Any:
        return do(lambda server: None)

    def added(wanted: dict[str, Any]) -> Any:
        def add(server: Server) -> None:
            _check_client(wanted)
            if not server.adding.acquire(blocking=False):
                raise ResourceExhausted(f"{MAX_ADDING} adapters are being added: try again", culprit="adapters")
            try:
                server.add(wanted)
            finally:
                server.adding.release()

        return do(add)

    def removed(name: str) -> Any:
        return do(lambda server: server.adapters.remove(name))

    router.add_api_route(ROUTE, listed, methods=["GET"])
    if routes == "on":
        router.add_api_route(ROUTE, added, methods=["POST"])
        router.add_api_route(f"{ROUTE}/{{name}}", removed, methods=["DELETE"])
    app.include_router(router)


def _check_client(wanted: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for what an entry of REFITD_ADAPTERS may have, and a client may not: folders, and regular expressions, which can run for
    ever."""
    entries = wanted.get("adapters", {"": wanted})
    if not isinstance(entries, dict) or not all(isinstance(each, dict) for each in entries.values()):
        raise InvalidArgument(f"adapters: {entries!r} is no object of objects", culprit="adapters")
    for each in entries.values():
        if "like" in each:
            raise InvalidArgument("like: this server reads no folders that clients name", culprit="like")
        targets = each.get("target_modules")
        if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
            raise InvalidArgument(f"target_modules: {targets!r} is no list of names", culprit="target_modules")


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
