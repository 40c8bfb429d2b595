"""SkyRL's weight sync through refitd: a WeightTransferStrategy, written for SkyRL 0.3.0.

In every process of training, before workers are built, for instance in a Ray worker_process_setup_hook:

    import refitd.integrations.skyrl
    refitd.integrations.skyrl.install("policy")                  # or install("policy", sharded=True)

and in SkyRL's configuration `generator.inference_engine.weight_sync_backend=refitd`. The engines are vLLM's with refitd's backend
(refitd.integrations.vllm). SkyRL's initialisation gives each engine its group; at each sync rank 0 makes the workers of each engine take the version,
by the calls that SkyRL's own sender makes. SkyRL pauses the engines before a sync and resumes them afterwards; after a sync
that failed, install() keeps it from resuming them, until a later sync succeeds: their weights may be of two versions.

Without `sharded`, SkyRL gathers full tensors as ever, and rank 0 pushes them. With `sharded` nothing is gathered: each rank registers the
DTensors of the model that SkyRL's extractor has, and SkyRL's chunks are never made. LoRA adapters go SkyRL's own way.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync.transfer_strategy import WeightSyncInitInfo, WeightTransferSender, WeightTransferStrategy

from .._core.member import Connect, GroupSpec
from ..errors import Error, FailedPrecondition, InvalidArgument, Unimplemented
from ..layout import devices
from ..layout.placement import adopt
from ..layout.shards import MadeMapping, MadeOf
from ..trainer import Trainer
from . import Ranks, first_difference, on_thread

BACKEND = "refitd"

logger = logging.getLogger("refitd.integrations.skyrl")

# How long a sync waits, after engines failed to take the version, until the daemon ends the update with its own reason; then rank 0 gives
# the update up.
ACCOUNT_SECONDS = 5.0
# How long a failed sync waits for the engines' answers, before its error is raised.
ANSWER_SECONDS = 30.0


@dataclass(frozen=True)
class Settings:
    """The arguments of install()."""

    group: str
    sharded: bool = False
    first_version: int | None = None
    update_seconds: float = 600.0
    attach: Callable[..., Trainer] = Trainer
    spec: GroupSpec = GroupSpec()


_settings: Settings | None = None
# The attribute of a client whose last sync failed.
_TORN = "_refitd_torn"


def install(
    group: str,
    *,
    sharded: bool = False,
    first_version: int | None = None,
    update_seconds: float = 600.0,
    spec: GroupSpec = GroupSpec(),
    device: str | None = None,
    socket: str | None = None,
    connect: Connect = Connect(),
) -> None:
    """Makes `weight_sync_backend=refitd` known to SkyRL in this process. Equal on all ranks; a later call changes later senders.

    `sharded`: move shards as they are, for FSDP2 models. `first_version`: of the first sync; each further sync has the next. None: the
    version after the group's, also after a restart of training. `update_seconds`: the longest that a rank waits for the others,
    and then for the engines. `spec`, `device`, `socket`, `connect`: as in refitd.Trainer; `spec.min_instances` is the number of engines,
    whatever it says.
    """
    global _settings
    if _settings is None:
        _wrap("get_transfer_strategy_cls", Strategy)
        _wrap("get_transfer_strategy", BACKEND)
        _keep_paused()
    attach = functools.partial(Trainer, device=device, socket=socket, connect=connect)
    _settings = Settings(group, sharded, first_version, update_seconds, attach, spec)


def _wrap(name: str, ours: Any) -> None:
    """Replaces SkyRL's function that chooses by the backend's name, because SkyRL has no registry."""
    theirs = getattr(weight_sync, name)

    def choose(weight_sync_backend: str, colocate_all: bool) -> Any:
        return ours if weight_sync_backend == BACKEND else theirs(weight_sync_backend, colocate_all)

    setattr(weight_sync, name, choose)
    # Modules that are imported later find the replacement; this module may have imported the original by now.
    utils = sys.modules.get("skyrl.backends.skyrl_train.inference_servers.utils")
    if utils is not None and getattr(utils, name, None) is theirs:
        setattr(utils, name, choose)


def _keep_paused() -> None:
    """Keeps SkyRL's client from resuming generation after a sync by refitd that failed: SkyRL resumes however a sync ended."""
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch

    broadcast, resume = WorkerDispatch._broadcast_to_inference_engines, RemoteInferenceClient.resume_generation

    @functools.wraps(broadcast)
    def broadcast_and_note(self: Any, inference_engine_client: Any, *arguments: Any, **options: Any) -> Any:
        if self.cfg.generator.inference_engine.weight_sync_backend != BACKEND:
            return broadcast(self, inference_engine_client, *arguments, **options)
        try:
            result = broadcast(self, inference_engine_client, *arguments, **options)
        except BaseException:
            setattr(inference_engine_client, _TORN, True)
            raise
        setattr(inference_engine_client, _TORN, False)
        return result

    @functools.wraps(resume)
    async def resume_unless_torn(self: Any) -> Any:
        if getattr(self, _TORN, False):
            logger.warning("refitd: the sync failed, and generation stays paused until one succeeds")
            return {}
        return await resume(self)

    WorkerDispatch._broadcast_to_inference_engines = broadcast_and_note
    RemoteInferenceClient.resume_generation = resume_unless_torn


@dataclass
class InitInfo(WeightSyncInitInfo):
    """What engines and senders begin with. `instances`: how many engines there are. `instance`: the name of an engine; "" before for_servers."""

    group: str
    instances: int
    instance: str = ""

    def for_servers(self, world_size_per_server: int, num_servers: int, dp_size: int = 1) -> list[InitInfo]:
        """The InitInfo of each server, which is an instance of its own, in SkyRL's order of servers."""
        return [replace(self, instance=f"skyrl-{i}") for i in range(num_servers)]

    def to_api_payload(self) -> dict[str, Any]:
        """The init info of refitd.integrations.vllm: missing fields, such as the daemon's socket, come from the engine's environment."""
        return {"group": self.group, "instance": self.instance}


class Strategy(WeightTransferStrategy):
    """SkyRL's factory. Its methods raise FailedPrecondition before install()."""

    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> InitInfo:
        group = _installed().group
        instances = int(ie_cfg.num_engines) * int(ie_cfg.data_parallel_size)
        return InitInfo(override_existing_receiver=False, group=group, instances=instances)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        from .vllm.backend import RefitdBackend

        return RefitdBackend

    @staticmethod
    def create_sender(init_info: InitInfo, inference_client: Any) -> Sender:
        """Attaches this rank. Every rank calls it, beside the initialisation of the engines, which wait for the group."""
        return Sender(init_info, _installed(), inference_client)


def _installed() -> Settings:
    """The settings of install(); raises FailedPrecondition where it was not called."""
    if _settings is None:
        raise FailedPrecondition("refitd.integrations.skyrl.install(group) was not called in this process")
    return _settings


class Sender(WeightTransferSender):
    """A trainer rank of refitd. `result`: what the last sync returned; None before."""

    def __init__(self, init_info: InitInfo, settings: Settings, client: Any = None) -> None:
        """`client`: SkyRL's client, by which rank 0 calls the engines at each sync; None: the engines take versions without a call.

        Raises InvalidArgument on every rank, before any attaches, where a rank has another group, version or path than rank 0.
        """
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._ranks = Ranks(settings.update_seconds)
        self._ranks.join(rank, world_size)
        self._compare_settings((init_info.group, settings.sharded, settings.first_version))
        spec = replace(settings.spec, min_instances=init_info.instances)
        self._trainer = settings.attach(init_info.group, rank=rank, world_size=world_size, spec=spec)
        self._client = client if rank == 0 else None
        self._rank = rank
        self._update_seconds = settings.update_seconds
        self._sharded = settings.sharded
        next_version = max(self._ranks.gather(self._trainer.next_version))
        self._version = next_version if settings.first_version is None else settings.first_version
        self._registered: Any = None
        self.result: Any = None

    async def send_chunks(self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None) -> None:
        """Installs the model's weights as the next version in every engine. Every rank calls it, with the same metadata.

        A failure is raised on every rank. Raises InvalidArgument, naming the tensor, where ranks differ in metadata (before anything is
        sent) or a chunk differs from it; DeadlineExceeded, naming the rank, where a rank does not come within `update_seconds`; UpdateAborted
        where the call of an engine for the sync fails; FailedPrecondition where an engine could not use a version that was committed; and
        what refits raise. Where `chunks` itself fails on a rank, the update is given up; ranks that wait for it in SkyRL's own
        collectives fail when these collectives do.
        """
        if weight_metadata is None:
            raise InvalidArgument("weight_metadata is missing: the extractor's get_weight_metadata() returns it", culprit="weight_metadata")
        expected = _expected(weight_metadata)
        await on_thread(self._agree, chunks, expected)
        version, self._version = self._version, self._version + 1
        sending = asyncio.create_task(on_thread(self._send, version, chunks, expected))
        failure = await self._follow(version, sending)
        # Rank 0 alone gets the engines' answers: without this, a sync that failed would be done for the other ranks.
        try:
            failures = await asyncio.to_thread(self._ranks.gather, None if failure is None else str(failure))
        except RuntimeError:
            if failure is None:
                raise
        if failure is not None:
            raise failure
        reason = next((text for text in failures if text is not None), None)
        if reason is not None:
            raise FailedPrecondition(reason)

    def teardown(self) -> None:
        self._trainer.close()

    async def _follow(self, version: int, sending: asyncio.Task[None]) -> BaseException | None:
        """Waits until the update has ended for this rank and, on rank 0, for the engines, which that rank calls; returns what failed."""
        if self._client is None:
            return (await asyncio.gather(sending, return_exceptions=True))[0]
        taking = asyncio.create_task(self._let_engines_take(version))
        await asyncio.wait((sending, taking), return_when=asyncio.FIRST_COMPLETED)
        if not sending.done() and taking.exception() is not None:
            await asyncio.wait((sending,), timeout=ACCOUNT_SECONDS)
            reason = f"an engine did not take version {version}: {taking.exception()}"
            while not sending.done():
                try:
                    await asyncio.to_thread(self._trainer.abort, version, reason)
                except Error:
                    pass  # this rank has not begun the update yet, or has ended it
                await asyncio.wait((sending,), timeout=0.2)
        failure = (await asyncio.gather(sending, return_exceptions=True))[0]
        if failure is None:
            failed = (await asyncio.gather(taking, return_exceptions=True))[0]
            return None if failed is None else FailedPrecondition(f"version {version} was committed, and an engine can't use it: {failed}")
        # An engine that still waits for the update to begin is freed by the next update, or when `update_seconds` have passed.
        done, _ = await asyncio.wait((taking,), timeout=ANSWER_SECONDS)
        if not done:
            logger.warning("refitd: engines have not answered %.0f s after version %d failed", ANSWER_SECONDS, version)
            taking.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif taking.exception() is not None:
            logger.info("refitd: version %d failed, and an engine answered: %s", version, taking.exception())
        return failure

    async def _let_engines_take(self, version: int) -> None:
        """Lets the workers of all engines take the version, by the calls of SkyRL's own sender; returns when they have taken it."""
        client = self._client
        # With the kernels' format SkyRL's worker prepares nothing: refitd's backend does all that is due.
        try:
            await client.start_weight_update(is_checkpoint_format=False)
        except Exception:
            # A sync whose trainer was lost may still be open.
            await client.finish_weight_update()
            await client.start_weight_update(is_checkpoint_format=False)
        try:
            await client.update_weights_nccl({"version": version, "wait_seconds": self._update_seconds})
        finally:
            await client.finish_weight_update()

    def _agree(self, chunks: Iterable[Any], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Compares the ranks and registers shards. A failure is raised on every rank, before the engines are called for the sync."""
        self._compare_ranks(expected)
        if not self._sharded:
            return
        failure: Exception | None = None
        try:
            self._register(chunks, expected)
        except Exception as error:
            failure = error
        self._ranks.raise_alike(failure)

    def _send(self, version: int, chunks: Iterable[Any], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        if self._sharded:
            self.result = self._trainer.refit(version, duration_seconds=self._update_seconds)
            return
        with self._trainer.update(version, duration_seconds=self._update_seconds, tensor_count=len(expected)) as update:
            if self._rank == 0:
                _push(update, chunks, expected)
            else:
                for _ in chunks:  # all ranks gather them
                    pass
        self.result = update.result

    def _compare_settings(self, settings: tuple[str, bool, int | None]) -> None:
        all_settings = self._ranks.gather(settings)
        names = ("group", "sharded", "first_version")
        for rank, theirs in enumerate(all_settings):
            for name, first, other in zip(names, all_settings[0], theirs):
                if first != other:
                    why = f"rank {rank} has {name} {other!r}, and rank 0 has {first!r}: call install() alike on all ranks"
                    raise InvalidArgument(why, culprit=f"trainer rank {rank}")

    def _compare_ranks(self, expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Raises InvalidArgument on every rank where a rank has other tensors, or another order, than rank 0."""
        self._ranks.meet()
        all_expected = self._ranks.gather(list(expected.items()))
        first = all_expected[0]
        for rank, theirs in enumerate(all_expected):
            if theirs != first:
                name = first_difference(first, theirs)
                raise InvalidArgument(f"rank {rank} has other metadata than rank 0, first at tensor '{name}'", tensor=name)

    def _register(self, chunks: Iterable[Any], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
        """Registers the model of the extractor that would make the chunks, and closes their generator before it gathers anything."""
        extractor = inspect.getgeneratorlocals(chunks).get("self") if inspect.isgenerator(chunks) else None
        model = getattr(extractor, "model", None)
        if extractor is None or not isinstance(model, torch.nn.Module):
            raise Unimplemented("sharded: the chunks are not of an extractor with a model: install(sharded=False)")
        chunks.close()  # type: ignore[attr-defined]
        if self._registered is model:
            return
        adopt(model)
        prefix = getattr(extractor, "weight_prefix", "") or ""
        tensors = _prefixed(model, prefix)
        differs = next((name for name in {**tensors, **expected} if name not in tensors or name not in expected), None)
        if differs is not None:
            raise InvalidArgument(f"tensor '{differs}' is not both in the model and in the metadata", tensor=differs)
        dtypes = {name: dtype for name, (dtype, _) in expected.items()}  # SkyRL's metadata has each tensor's, whatever the model has
        self._trainer.register(tensors, dtype=None, exceptions=dtypes, any_cast=list(dtypes))
        self._registered = model


def _prefixed(model: torch.nn.Module, prefix: str) -> MadeMapping:
    tensors = {f"{prefix}{name}": tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    return MadeMapping(tensors, MadeOf([model], functools.partial(_prefixed, model, prefix)))


def _expected(metadata: dict[str, list[Any]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) by name, in the order of the metadata."""
    names, dtypes, shapes = (metadata[key] for key in ("names", "dtype_names", "shapes"))
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidArgument(f"metadata has {len(names)} names, {len(dtypes)} dtypes, {len(shapes)} shapes", culprit="weight_metadata")
    made = {name: (dtype.removeprefix("torch."), tuple(shape)) for name, dtype, shape in zip(names, dtypes, shapes)}
    if len(made) != len(names):
        raise InvalidArgument("metadata has a name twice", culprit="weight_metadata")
    if not made:
        raise InvalidArgument("metadata has no tensor", culprit="weight_metadata")
    return made


def _push(update: Any, chunks: Iterable[Any], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Pushes all chunks, each on another thread while this thread gathers the next, so that two chunks at most are in memory."""
    iterator = iter(chunks)
    missing = dict(expected)
    pushing: Future[None] | None = None
    with ThreadPoolExecutor(1, "refitd-push") as pusher:
        try:
            for chunk in iterator:
                _check_chunk(chunk, missing, expected)
                if pushing is not None:
                    pushing.result()
                pushing = pusher.submit(_push_chunk, update, chunk, devices.thread_devices())
            if missing:
                name, count = next(iter(missing)), len(missing)
                raise InvalidArgument(f"{count} tensors of the metadata came in no chunk, '{name}' among them", tensor=name)
            if pushing is not None:
                pushing.result()
        except BaseException:
            for _ in iterator:  # the other ranks gather on, and would wait for this one
                pass
            raise


def _check_chunk(chunk: Any, missing: dict[str, tuple[str, tuple[int, ...]]], expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Compares a chunk with the metadata before any of it is pushed, and takes its tensors out of `missing`."""
    for name, tensor in zip(chunk.names, chunk.tensors):
        found = (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        if missing.pop(name, None) != found:
            wanted = expected.get(name)
            if wanted is None:
                why = "which the metadata lacks"
            else:
                why = "a second time" if wanted == found else f"the metadata says {wanted[0]} {wanted[1]}"
            raise InvalidArgument(f"a chunk has tensor '{name}', {found[0]} {found[1]}: {why}", tensor=name)


def _push_chunk(update: Any, chunk: Any, take_devices: Callable[[], None]) -> None:
    take_devices()
    with torch.no_grad():
        for name, tensor in zip(chunk.names, chunk.tensors):
            update.push(name, tensor)
