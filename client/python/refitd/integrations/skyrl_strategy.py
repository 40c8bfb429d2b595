"""SkyRL 0.3.0's weight sync through refitd: a WeightTransferStrategy. refitd.integrations.skyrl installs it.

SkyRL has no registry for strategies. So what is SkyRL's own and not part of an interface is used: `get_transfer_strategy_cls` and `get_transfer_strategy`,
which choose by the backend's name, are replaced in `weight_sync` and in `inference_servers.utils`, and, with `sharded`, the local variable `self` of the
generator of chunks leads to the extractor's `model`.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from skyrl.backends.skyrl_train import weight_sync
from skyrl.backends.skyrl_train.weight_sync.transfer_strategy import WeightSyncInitInfo, WeightTransferSender, WeightTransferStrategy

from ..errors import InvalidArgument, Unimplemented
from ..layout import devices
from ..layout.placement import adopt
from ..trainer import UpdateResult
from . import Ranks, first_difference, install, next_version, on_thread
from .skyrl import BACKEND, Settings, installed, prefixed


def hook() -> None:
    """Makes the backend known to SkyRL in this process, once."""
    _wrap("get_transfer_strategy_cls", Strategy)
    _wrap("get_transfer_strategy", BACKEND)


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
        group = installed().group
        instances = int(ie_cfg.num_engines) * int(ie_cfg.data_parallel_size)
        return InitInfo(override_existing_receiver=False, group=group, instances=instances)

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        from .vllm.backend import RefitdBackend

        return RefitdBackend

    @staticmethod
    def create_sender(init_info: InitInfo, inference_client: Any) -> Sender:
        """Attaches this rank. Every rank calls it, beside the initialisation of the engines, which wait for the group."""
        return Sender(init_info, installed(), inference_client)


class Sender(WeightTransferSender):
    """A trainer rank of refitd. `result`: what the last sync returned; None before."""

    def __init__(self, init_info: InitInfo, settings: Settings, client: Any = None) -> None:
        """`client`: SkyRL's client, by which rank 0 calls the engines at each sync; None: the engines take versions without a call.

        Raises InvalidArgument on every rank, before any attaches, where a rank has another group, version or path than rank 0.
        """
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._ranks = Ranks(settings.update_seconds)
        self._ranks.join(rank, world_size)
        self._ranks.compare(group=init_info.group, sharded=settings.sharded, first_version=settings.first_version)
        self._trainer = settings.trainer(rank, world_size, init_info.instances)
        self._client = client if rank == 0 else None
        self._rank = rank
        self._update_seconds = settings.update_seconds
        self._sharded = settings.sharded
        known = self._ranks.gather(self._trainer.group_version)
        self._version = next_version(max((version for version in known if version is not None), default=None), settings.first_version)
        self._syncs = 0
        self._registered: Any = None
        self.result: UpdateResult | None = None

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
        self._syncs += 1
        take = None
        if self._client is not None:
            loop = asyncio.get_running_loop()
            take = lambda: asyncio.run_coroutine_threadsafe(self._let_engines_take(version), loop).result()  # noqa: E731
        send = partial(self._send, version, chunks, expected)
        self.result = await on_thread(install, self._ranks, self._trainer, version, send, take, self._update_seconds)

    def teardown(self) -> None:
        self._trainer.close()

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

    def _send(self, version: int, chunks: Iterable[Any], expected: dict[str, tuple[str, tuple[int, ...]]]) -> UpdateResult:
        note = f"SkyRL's sync {self._syncs} of this run"
        if self._sharded:
            return self._trainer.refit(version, duration_seconds=self._update_seconds, note=note if self._rank == 0 else "")
        with self._trainer.update(version, duration_seconds=self._update_seconds, tensor_count=len(expected), note=note) as update:
            if self._rank == 0:
                _push(update, chunks, expected)
            else:
                for _ in chunks:  # all ranks gather them
                    pass
        assert update.result is not None
        return update.result

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
        tensors = prefixed(model, prefix)
        differs = next((name for name in {**tensors, **expected} if name not in tensors or name not in expected), None)
        if differs is not None:
            raise InvalidArgument(f"tensor '{differs}' is not both in the model and in the metadata", tensor=differs)
        dtypes = {name: dtype for name, (dtype, _) in expected.items()}  # SkyRL's metadata has each tensor's, whatever the model has
        self._trainer.register(tensors, dtype=None, exceptions=dtypes, any_cast=list(dtypes))
        self._registered = model


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
