"""verl's weight sync through refitd: the checkpoint engine `refitd`, written for verl 0.9.1.

In verl's configuration, and nothing else:

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: refitd
      custom_backend_module: refitd.verl
      engine_kwargs: {refitd: {group: policy, socket: /run/refitd/refitd.sock}}

verl's manager drives it. The actor yields full tensors, and its rank 0 pushes them in packed buckets; the other ranks only gather.
Each rollout worker takes them as one engine instance, and hands them to verl's own adapter of vLLM, SGLang or TensorRT-LLM.

With `in_place: true` and vLLM as the rollout, the workers take nothing: vLLM's own processes attach by refitd's backend (refitd.vllm),
and the daemon writes their parameters where they are. See `refitd._verl_vllm`.
"""

from __future__ import annotations

import asyncio
import fnmatch
import hashlib
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

from . import aio
from ._wait import awaited
from .engine import Engine
from .errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, UpdateAborted
from .events import Aborted, Committed, Joiner, Lost, Part, Prepare
from .trainer import Trainer

BACKEND = "refitd"
# The wire format that tells refitd's adapter of vLLM that nothing comes through the worker.
IN_PLACE = "refitd_in_place"
# The longest that an update lasts beyond what Prepare said remains; the daemon ends it earlier.
MARGIN_SECONDS = 30.0

# Tensors that fill an update up to the count it began with. verl yields tensors one by one and does not say how many they are, and
# engines with staged delivery must be told before: so the first sync is filled up to `tensor_count`, and later ones to twice as many
# tensors as the sync before had.
FILLER = "refitd.filler."
TENSOR_COUNT = 1 << 17
MOST_TENSORS = 1 << 18  # of an update, by the daemon
FILLERS_OF_A_BUCKET = 1 << 14  # the daemon takes at most four times as many tensors in a bucket

ADAPTER_OPTIONS = frozenset({"socket", "coordinator", "wait_seconds"})
CONNECT_OPTIONS = ADAPTER_OPTIONS | {"device", "call_margin_seconds", "silence_seconds"}
TRAINER_OPTIONS = CONNECT_OPTIONS | {"slot_bytes", "slots", "unwanted_tensors"}


@dataclass(frozen=True)
class Place:
    """What a worker is in one sync. `instances`: the engine instances that must take part; `version`: the group's before, if known."""

    role: str
    rank: int
    world_size: int
    instances: int
    version: int | None


@CheckpointEngineRegistry.register(BACKEND)
class RefitdCheckpointEngine(CheckpointEngine):
    """A trainer rank or a rollout worker of one group, which of the two it is being told by `init_process_group`.

    Not thread-safe: verl calls it from one worker. A trainer rank stays attached; a rollout worker is attached during a sync only, so
    that replicas come and go between syncs.
    """

    def __init__(
        self,
        bucket_size: int = 0,
        *,
        group: str = "",
        is_master: bool = False,
        in_place: bool = False,
        begin_seconds: float = 600.0,
        update_seconds: float = 600.0,
        verification: str | None = None,
        tensor_count: int = TENSOR_COUNT,
        dtype: str | None = None,
        exceptions: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        """Attaches nothing yet. Equal on all workers, as verl makes them from one configuration.

        `bucket_size`, `is_master`: given by verl, not used: tensors are packed into the daemon's slots. `group`: of refitd.
        `in_place`: vLLM's own processes take the weights. `begin_seconds`: how long a rollout waits for the actor to begin.
        `update_seconds`: of one sync, from its begin. `verification`: as of Trainer.update.
        `tensor_count`: how many tensors the first sync has at most; it takes the longer, the more it says. `dtype`:
        what floating-point tensors are cast to before they are sent ("bfloat16"); None: as the actor has them. `exceptions`: dtypes of
        names, or of patterns as of fnmatch, that differ from it; "" leaves the tensor as it is. `options`: of
        refitd.Trainer and refitd.Engine (`socket`, `coordinator`, `device`, `wait_seconds`, `slot_bytes`, ...).

        Raises InvalidArgument that names the option.
        """
        if not group:
            raise InvalidArgument("engine_kwargs.refitd.group is missing", culprit="group")
        for name in options:
            if name not in TRAINER_OPTIONS:
                raise InvalidArgument(f"engine_kwargs.refitd.{name}: there is no such option", culprit=name)
        self.group = group
        self.in_place = in_place
        self.wire_format = IN_PLACE if in_place else "named_tensors"
        self._begin_seconds = begin_seconds
        self._update_seconds = update_seconds
        self._verification = verification
        self._tensor_count = tensor_count
        self._dtype = _dtype_of("dtype", dtype)
        self._exceptions = [(name, _dtype_of(f"exceptions: {name}", other)) for name, other in dict(exceptions or {}).items()]
        self._options = options
        self._place: Place | None = None
        self._trainer: Trainer | None = None
        self._engine: Engine | None = None
        self._processes: Any = None  # the process group in which trainer ranks compare what they sent
        self._sent = 0  # tensors of the last sync
        self._committed: int | None = None
        # Worker processes have no name of their own that stays the same when replicas are added and removed.
        self._instance = f"verl-{uuid.uuid4().hex[:12]}"
        if in_place:
            from . import _verl_vllm

            _verl_vllm.install()

    # ---- what verl's manager calls, in this order, in each sync ----

    def prepare(self) -> dict[str, Any]:
        """What `build_topology` gets of this worker. Ends what a failed sync left behind."""
        self._leave()
        self._place = None
        adapter = _adapter() if self.in_place else None
        return {
            "group": self.group,
            "in_place": self.in_place,
            "version": self._known_version(),
            "replica": None if adapter is None else adapter.replica_rank,
        }

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Places, by argument of `init_process_group`, of the actor's workers and of the rollout's.

        Raises InvalidArgument, naming the worker, where one is missing or was configured otherwise than the first.
        """
        count = actor_wg_world_size + rollout_world_size
        if len(metadata) != count:
            raise InvalidArgument(f"metadata of {len(metadata)} workers, and there are {count}", culprit="metadata")
        for i, of_worker in enumerate(metadata):
            who = f"actor rank {i}" if i < actor_wg_world_size else f"rollout worker {i - actor_wg_world_size}"
            for key in ("group", "in_place"):
                if not isinstance(of_worker, dict) or of_worker.get(key) != metadata[0][key]:
                    raise InvalidArgument(f"{who}: {key} is not that of actor rank 0, {metadata[0][key]!r}", culprit=who)
        rollouts = metadata[actor_wg_world_size:]
        instances = len({of_worker["replica"] for of_worker in rollouts}) if metadata[0]["in_place"] else rollout_world_size
        if not instances:
            raise InvalidArgument("there is no rollout worker", culprit="rollout_world_size")
        known = max((of_worker["version"] for of_worker in metadata if of_worker["version"] is not None), default=None)

        def places(role: str, world_size: int) -> dict[str, list[Any]]:
            return {
                "role": [role] * world_size,
                "rank": list(range(world_size)),
                "world_size": [world_size] * world_size,
                "instances": [instances] * world_size,
                "version": [known] * world_size,
            }

        return places("trainer", actor_wg_world_size), places("engine", rollout_world_size)

    def init_process_group(self, *, role: str, rank: int, world_size: int, instances: int, version: int | None = None) -> None:
        """Attaches this worker. All workers of a sync call it at the same time: engines wait for the group, which trainers make.

        Raises what attaching raises, and InvalidArgument where a trainer was given the place of another rank.
        """
        place = Place(role, rank, world_size, instances, version)
        if role == "trainer":
            self._check_place(place)
            self._attach_trainer(place)
        elif self.in_place:
            self._attach_in_place()
        else:
            self._attach_engine()
        self._place = place

    def finalize(self) -> None:
        """Detaches a rollout worker. A trainer rank stays attached."""
        self._leave()

    async def send_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Installs the tensors as the next version in every engine. Every trainer rank calls it, with the same tensors in one order.

        The version is `global_steps` where that is greater than the group's version, else the number after the group's. Returns
        metrics for verl. The tensors' bytes are read before the next tensor is taken from `weights`.

        A failure is raised on every rank, before verl resumes generation: InvalidArgument where a rank's tensors differ from those of
        rank 0, naming the tensor, where there are none or a name comes twice; FailedPrecondition where engines are missing;
        UpdateAborted and DeadlineExceeded as of Trainer.update. Where `weights` itself fails, the update is given up, and the other
        ranks fail at the latest after `update_seconds`.
        """
        place, trainer = self._place, self._trainer
        if place is None or trainer is None:
            raise FailedPrecondition("send_weights: init_process_group did not make this worker a trainer rank")
        device = torch.cuda.current_device() if torch.cuda.is_available() else None

        return await asyncio.to_thread(self._send_on, device, place, trainer, weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yields the tensors of one sync as they come, each in memory of its own, and returns when the version is committed.

        Yields nothing with `in_place`. Raises DeadlineExceeded where the actor does not begin within `begin_seconds`, UpdateAborted,
        also after tensors were yielded: the engine's weights are then torn until the next sync. A caller that gives up fails the sync.
        """
        if self.in_place:
            return
        member = self._engine
        if member is None:
            raise FailedPrecondition("receive_weights: init_process_group did not make this worker an engine")
        begun: Prepare | None = None
        over = False
        engine = aio.Engine(member)
        joiner = Joiner()
        deadline = asyncio.get_running_loop().time() + self._begin_seconds
        try:
            while not over:
                event = await engine._next(max(0.0, deadline - asyncio.get_running_loop().time()))
                if event is None:
                    what = "the actor did not begin" if begun is None else f"no end of version {begun.version} came"
                    raise DeadlineExceeded(f"{member.label}: {what} in its time")
                if isinstance(event, Prepare):
                    begun = event
                    deadline = asyncio.get_running_loop().time() + event.remaining_seconds + MARGIN_SECONDS
                    await engine.ready(event.version)  # verl's manager has stopped generation before
                elif isinstance(event, Part):
                    tensors = _own_tensors(joiner, event)
                    await engine.ack(event)
                    for name, tensor in tensors:
                        yield name, tensor
                elif isinstance(event, (Aborted, Lost)):
                    over = True
                    dirty = event.dirty if isinstance(event, Aborted) else True
                    raise UpdateAborted(f"{member.label}: {event.reason}", dirty=dirty)
                elif isinstance(event, Committed):
                    over = True
        finally:
            if begun is not None and not over:
                await awaited(partial(_give_up, member, begun.version))

    # ---- attaching ----

    def _known_version(self) -> int | None:
        """The group's version as far as this trainer rank knows; forgets a trainer whose lease ended."""
        if self._trainer is None:
            return None
        try:
            self._trainer.check_health()
        except Error:
            self._trainer.close()
            self._trainer = None
            return None
        return max((v for v in (self._trainer.group_version, self._committed) if v is not None), default=None)

    def _check_place(self, place: Place) -> None:
        if not torch.distributed.is_initialized():
            if place.world_size > 1:
                raise InvalidArgument(f"trainer rank {place.rank} of {place.world_size}: torch.distributed is not initialised", culprit="rank")
            return
        held = torch.distributed.get_rank(), torch.distributed.get_world_size()
        if held != (place.rank, place.world_size):
            who = f"trainer rank {place.rank}"
            raise InvalidArgument(
                f"{who} of {place.world_size} is rank {held[0]} of {held[1]} in torch.distributed: this is another rank's place",
                culprit=who,
            )

    def _attach_trainer(self, place: Place) -> None:
        trainer = self._trainer
        if trainer is not None and (trainer.rank, trainer.world_size) != (place.rank, place.world_size):
            trainer.close()
            trainer = self._trainer = None
        if trainer is None:
            self._trainer = Trainer(
                self.group, rank=place.rank, world_size=place.world_size, client="verl", **self._options
            )
        if self._processes is None and place.world_size > 1:
            # The ranks compare in a process group of their own: a rank that failed may still gather weights in verl's group.
            self._processes = torch.distributed.new_group(backend="gloo", timeout=timedelta(seconds=self._update_seconds))

    def _attach_engine(self) -> None:
        options = {name: value for name, value in self._options.items() if name in CONNECT_OPTIONS}
        options.setdefault("device", _rollout_device())
        # This worker does not know which weights the engine behind verl's adapter holds, so it says that they are dirty.
        self._engine = Engine(self.group, instance=self._instance, staged=True, dirty=True, client="verl", **options)

    def _attach_in_place(self) -> None:
        adapter = _adapter()
        if adapter is None:
            raise FailedPrecondition("in_place: this worker's rollout is not vLLM's, or was made before refitd.verl was imported")
        options = {name: value for name, value in self._options.items() if name in ADAPTER_OPTIONS}
        adapter.attach(self.group, self._begin_seconds, options)

    def _leave(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    # ---- sending ----

    def _send_on(self, device: int | None, *arguments: Any) -> dict[str, float]:
        if device is not None:
            torch.cuda.set_device(device)  # of this thread
        with torch.no_grad():
            return self._send(*arguments)

    def _send(
        self, place: Place, trainer: Trainer, weights: Iterable[tuple[str, torch.Tensor]], global_steps: int | None
    ) -> dict[str, float]:
        known = place.version if place.version is not None else trainer.group_version
        version = _next_version(known, global_steps)
        update = trainer.update(
            version,
            duration_seconds=self._update_seconds,
            verification=self._verification,
            tensor_count=self._announced() if place.rank == 0 else None,
            note="" if global_steps is None else f"verl's global step {global_steps}",
        )
        with update:
            sent = _Sent()
            failure: Exception | None = None
            try:
                if update.instances != place.instances:
                    raise FailedPrecondition(f"{update.instances} of {place.instances} engine instances take part in version {version}")
                self._push(update if place.rank == 0 else None, weights, sent)
            except Exception as error:
                failure = error
            self._compare(place, sent, failure)
            if failure is not None:
                raise failure
        self._committed, self._sent = version, sent.count
        assert update.result is not None
        return {"refitd/version": version, "refitd/seconds": update.result.seconds, "refitd/bytes": update.result.bytes}

    def _announced(self) -> int | None:
        """How many tensors the update is begun with."""
        if self.in_place:
            return None
        return min(2 * self._sent, MOST_TENSORS) if self._sent else self._tensor_count

    def _push(self, update: Any, weights: Iterable[tuple[str, torch.Tensor]], sent: _Sent) -> None:
        """Pushes the tensors, and what fills the update up; with no `update`, only takes part in gathering."""
        iterator = iter(weights)
        taken = False  # whether `weights` itself goes on
        try:
            for name, tensor in iterator:
                taken = True
                sent.add(name, tensor)
                if update is not None:
                    update.push(name, self._cast(name, tensor))
                taken = False
            if not sent.count:
                raise InvalidArgument("the actor yielded no tensor", culprit="weights")
            if update is not None and not self.in_place:
                self._fill(update, sent.count)
        except BaseException:
            if taken:
                for _ in iterator:  # the other ranks gather on, and would wait for this one
                    pass
            raise

    def _cast(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._dtype is None and not self._exceptions or not tensor.is_floating_point():
            return tensor
        dtype = next((dtype for pattern, dtype in self._exceptions if fnmatch.fnmatchcase(name, pattern)), self._dtype)
        return tensor if dtype is None else tensor.to(dtype)

    def _fill(self, update: Any, count: int) -> None:
        announced = self._announced()
        assert announced is not None
        if count > announced:
            self._sent = 0
            raise FailedPrecondition(
                f"the actor yielded {count} tensors, and at most {announced} were expected after the sync before; the next sync takes them"
            )
        nothing = torch.empty(0, dtype=torch.uint8)
        for i in range(announced - count):
            update.push(f"{FILLER}{i}", nothing)
            if i % FILLERS_OF_A_BUCKET == FILLERS_OF_A_BUCKET - 1:
                update.flush()

    def _compare(self, place: Place, sent: _Sent, failure: Exception | None) -> None:
        """Raises InvalidArgument on every rank where one sent other tensors than rank 0, or failed; not where this rank failed."""
        if place.world_size == 1:
            return
        told = (sent.digest(), None if failure is None else f"{type(failure).__name__}: {failure}")
        of_ranks = self._gather(told, place.world_size)
        if failure is not None:
            return
        for rank, (_, text) in enumerate(of_ranks):
            if text is not None:
                raise UpdateAborted(f"trainer rank {rank} failed: {text}", culprit=f"trainer rank {rank}")
        if all(digest == of_ranks[0][0] for digest, _ in of_ranks):
            return
        lists = self._gather(sent.entries, place.world_size)
        for rank, entries in enumerate(lists):
            if entries != lists[0]:
                name = _first_difference(lists[0], entries)
                raise InvalidArgument(f"trainer rank {rank} has other tensors than rank 0, first at '{name}'", culprit=f"tensor '{name}'")

    def _gather(self, value: Any, world_size: int) -> list[Any]:
        values: list[Any] = [None] * world_size
        torch.distributed.all_gather_object(values, value, group=self._processes)
        return values


class _Sent:
    """Name, dtype and shape of what a trainer rank took from the actor, in order."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._names: set[str] = set()

    @property
    def count(self) -> int:
        return len(self.entries)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise InvalidArgument(f"the actor yielded tensor '{name}' twice", culprit=f"tensor '{name}'")
        self._names.add(name)
        self.entries.append((name, str(tensor.dtype), tuple(tensor.shape)))

    def digest(self) -> bytes:
        return hashlib.sha256(repr(self.entries).encode()).digest()


def _dtype_of(option: str, name: str | None) -> torch.dtype | None:
    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise InvalidArgument(f"engine_kwargs.refitd.{option}: {name!r} is no floating-point dtype of torch", culprit=option)
    return found


def _first_difference(first: Sequence[Any], other: Sequence[Any]) -> str:
    for one, two in zip(first, other):
        if one != two:
            return str(two[0])
    return str(max(first, other, key=len)[min(len(first), len(other))][0])


def _next_version(known: int | None, global_steps: int | None) -> int:
    if global_steps is not None and (known is None or global_steps > known):
        return global_steps
    return 1 if known is None else known + 1


def _own_tensors(joiner: Joiner, part: Part) -> list[tuple[str, torch.Tensor]]:
    """The whole tensors that a part brings, without fillers, copied out of the daemon's memory: verl's adapter of SGLang keeps tensors
    until it has a bucket full of them."""
    arrived = {id(view) for view in part.views}
    tensors = []
    for view in joiner.add(part):
        if not view.name.startswith(FILLER):
            tensor = view.torch()
            tensors.append((view.name, tensor.clone() if id(view) in arrived else tensor))
    if tensors and tensors[0][1].is_cuda:
        torch.cuda.current_stream(tensors[0][1].device).synchronize()
    return tensors


def _give_up(member: Engine, version: int) -> None:
    try:
        member.fail(version, "verl's rollout worker gave the weights up")
    except Error:
        pass  # the update has ended
    member.close()


def _rollout_device() -> str:
    """The GPU that this worker shares with its inference engine, or "host"."""
    if not torch.cuda.is_available():
        return "host"
    from .cuda import device_uuid

    return device_uuid(torch.cuda.current_device())


# verl's adapter of vLLM in this process, if it is refitd's: the checkpoint engine is not told of it.
_known_adapter: Callable[[], Any] = lambda: None  # noqa: E731


def set_adapter(adapter: Any) -> None:
    """For refitd's adapter of vLLM, when verl makes it."""
    global _known_adapter
    _known_adapter = weakref.ref(adapter)


def _adapter() -> Any:
    return _known_adapter()
