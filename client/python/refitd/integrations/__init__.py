"""A module or package for each framework. Each imports its framework, and nothing else of this package imports any of them.

Here is what they share: ranks that meet, and updates of full tensors that a framework's exporter yields one by one. Every trainer rank takes the
same tensors from its exporter, which gathers them by collectives, and rank 0 pushes them. Each engine is an instance with loader delivery that
hands the tensors to its framework's own loader. Imports torch when used.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout  # until Python 3.10 not the built-in one
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from .._core import awaited
from .._core.member import Connect, GroupSpec, made_of
from ..engine import Aborted, Committed, Engine, Inbox, Joiner, Lost, Part, Prepare
from ..errors import DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, UpdateAborted
from ..layout import compiled, devices
from ..layout.shards import CAST_FROM
from ..trainer import Trainer, UpdateResult

if TYPE_CHECKING:
    import torch

# An engine waits for the outcome this much longer than the time that Prepare gave. A daemon that works ends the update earlier.
MARGIN_SECONDS = 30.0

_Result = TypeVar("_Result")


async def on_thread(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Makes a call on another thread, with this thread's devices and streams in place of torch's defaults; returns its result."""
    import torch

    take_devices = devices.thread_devices()

    def run() -> _Result:
        take_devices()
        with torch.no_grad():
            return call(*arguments)

    return await asyncio.to_thread(run)


class Casts:
    """The dtypes to which tensors are cast before they are pushed."""

    def __init__(self, where: str, dtype: str | None, exceptions: Mapping[str, str] | None) -> None:
        """`where`: the place in the configuration, for errors. `dtype`: that of floating-point tensors; None or "" leaves them as they are.
        `exceptions`: other dtypes, by pattern of names. Raises InvalidArgument for what is no floating-point dtype."""
        self._dtype = _dtype_of(where, "dtype", dtype)
        of_patterns = {pattern: _dtype_of(where, f"exceptions: {pattern}", other) for pattern, other in dict(exceptions or {}).items()}
        self._exceptions = [(compiled(pattern), other) for pattern, other in of_patterns.items()]
        self._rules = of_patterns

    def rules(self, otherwise: torch.dtype | None) -> tuple[torch.dtype | None, dict[str, torch.dtype | None]]:
        """The dtype and the exceptions for Trainer.register; `otherwise`: the dtype where none was configured."""
        return self._dtype or otherwise, dict(self._rules)

    def of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it is to be pushed."""
        if self._dtype is None and not self._exceptions or str(tensor.dtype).removeprefix("torch.") not in CAST_FROM:
            return tensor  # float8 with its scales, for instance, would mean something else
        dtype = next((dtype for pattern, dtype in self._exceptions if pattern.fullmatch(name)), self._dtype)
        return tensor if dtype is None else tensor.to(dtype)


@dataclass(frozen=True)
class Settings:
    """The options that a framework's configuration gives to its checkpoint engine, equal on all workers.

    Attributes:
        group: The group of refitd.
        begin_seconds: How long a rollout worker waits for the trainer to begin.
        update_seconds: Of one sync, from its begin.
        verification: As in Trainer.update.
        dtype: The dtype to which floating-point tensors are cast before they are sent ("bfloat16"); None: as the trainer yields them.
        exceptions: Other dtypes, by pattern of names; "" leaves the tensor as it is.
        socket: As in refitd.Trainer and refitd.Engine, with `device`, and `connect` and `spec`, which may be mappings of their fields.
    """

    group: str = ""
    begin_seconds: float = 600.0
    update_seconds: float = 600.0
    verification: str | None = None
    dtype: str | None = None
    exceptions: Mapping[str, str] | None = None
    socket: str | None = None
    device: str | None = None
    connect: Connect = Connect()
    spec: GroupSpec = GroupSpec()

    @classmethod
    def of(cls, where: str, given: Mapping[str, Any]) -> Settings:
        """Settings of the options that stand at `where` in the configuration. Raises InvalidArgument that names the option."""
        made = made_of(cls, given, where)
        if not made.group:
            raise InvalidArgument(f"{where}.group is missing", culprit="group")
        connect = made_of(Connect, made.connect, f"{where}.connect").to(made.socket)
        return replace(made, socket=None, connect=connect, spec=made_of(GroupSpec, made.spec, f"{where}.spec"))

    def sender(self, where: str, who: str) -> Sender:
        """The Sender of a trainer rank. `who`: as in Sender."""
        casts = Casts(where, self.dtype, self.exceptions)
        return Sender(who, casts, update_seconds=self.update_seconds, verification=self.verification)

    def trainer(self, client: str, rank: int, world_size: int, min_instances: int | None = None) -> Trainer:
        """Attaches a trainer rank. `client`: the framework, for status pages. `min_instances`: None: that of the spec."""
        spec = self.spec if min_instances is None else replace(self.spec, min_instances=min_instances)
        connect = replace(self.connect, client=client)
        return Trainer(self.group, rank=rank, world_size=world_size, spec=spec, device=self.device, connect=connect)

    def engine(self, client: str, instance: str) -> Engine:
        """Attaches an engine that takes whole tensors, on the device that this worker shares with its inference engine. Its weights
        count as dirty, since nobody named their version."""
        device = devices.current_or_host() if self.device is None else self.device
        connect = replace(self.connect, client=client)
        return Engine(self.group, instance=instance, loader=True, dirty=True, device=device, connect=connect)

    def init_info(self, instance: str) -> dict[str, Any]:
        """Init info for refitd's backend in vLLM's processes, which attaches as dirty: the weights that vLLM loaded are no version of the group."""
        reached = {name: getattr(self.connect, name) for name in ("socket", "coordinator", "wait_seconds")}
        given = {name: value for name, value in reached.items() if value is not None}
        return {"group": self.group, "instance": instance, "dirty": True, **given}


class Ranks:
    """Brings the trainer ranks together, in a process group of gloo of their own, because a rank that failed may still gather weights in
    the framework's group. Every wait ends in `seconds`. Every rank makes the same calls. Not thread-safe.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._processes: Any = None

    def join(self, rank: int, world_size: int) -> None:
        """Makes the process group, once. Raises InvalidArgument where this is another rank's place."""
        from torch import distributed

        if not distributed.is_initialized():
            if world_size > 1:
                raise InvalidArgument(f"trainer rank {rank} of {world_size}: torch.distributed is not initialised", culprit="rank")
            return
        held = distributed.get_rank(), distributed.get_world_size()
        if held != (rank, world_size):
            who = f"trainer rank {rank}"
            why = f"{who} of {world_size} is rank {held[0]} of {held[1]} in torch.distributed: this is another rank's place"
            raise InvalidArgument(why, culprit=who)
        if self._processes is None and world_size > 1:
            self._processes = distributed.new_group(backend="gloo", timeout=timedelta(seconds=self._seconds))

    def meet(self) -> None:
        """Waits for all ranks. torch names the rank that is missing on rank 0, and on the others says that rank 0 gave up.

        Raises DeadlineExceeded, naming the rank, where a rank does not come.
        """
        if self._processes is None:
            return
        from torch import distributed

        try:
            distributed.monitored_barrier(self._processes, timedelta(seconds=self._seconds))
        except RuntimeError as error:
            found = re.search(r"[Rr]ank (\d+) (?:failed|successfully)", str(error))  # texts: torch names the rank there alone
            culprit = f"trainer rank {found[1]}" if found else None
            missing = "some trainer ranks" if culprit is None else culprit
            raise DeadlineExceeded(f"{missing} did not begin the sync within {self._seconds} s: {error}", culprit=culprit) from error

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank."""
        if self._processes is None:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * distributed.get_world_size(self._processes)
        distributed.all_gather_object(values, value, group=self._processes)
        return values

    def compare(self, **values: Any) -> None:
        """Raises InvalidArgument on every rank where a rank has another of the values than rank 0, naming both."""
        answers = self.gather(values)
        for rank, theirs in enumerate(answers):
            for name, first in answers[0].items():
                if theirs[name] != first:
                    why = f"rank {rank} has {name} {theirs[name]!r}, and rank 0 has {first!r}: they must be alike on all ranks"
                    raise InvalidArgument(why, culprit=f"trainer rank {rank}")

    def raise_alike(self, failure: Exception | None, value: Any = None) -> list[Any]:
        """The values of all ranks, by rank. Where a rank has a failure, raises it on that rank, and on the others UpdateAborted, which
        names the rank."""
        answers = self.gather((value, None if failure is None else f"{type(failure).__name__}: {failure}"))
        if failure is not None:
            raise failure
        for rank, (_, text) in enumerate(answers):
            if text is not None:
                raise UpdateAborted(f"trainer rank {rank} failed: {text}", culprit=f"trainer rank {rank}")
        return [value for value, _ in answers]


class Sender:
    """What trainer ranks do of a sync: rank 0 pushes the tensors, and all ranks compare that they had the same. Not thread-safe.

    `who`: what errors call the one that yields the tensors, such as "the actor".
    """

    def __init__(self, who: str, casts: Casts, *, update_seconds: float, verification: str | None) -> None:
        self._who, self.casts = who, casts
        self._update_seconds, self._verification = update_seconds, verification
        self._ranks = Ranks(update_seconds)

    def join(self, rank: int, world_size: int) -> None:
        """Prepares the ranks to compare what they sent; every rank calls this. Raises InvalidArgument where this is another rank's place."""
        self._ranks.join(rank, world_size)

    def refit(self, trainer: Trainer, instances: int, version: int, register: Callable[[], None], note: str = "") -> UpdateResult:
        """Installs the shards that `register` registers as `version`. Every rank calls it.

        Raises a failure of `register` on every rank before the update begins; else what Trainer.refit raises, and FailedPrecondition
        where the number of engines that took part is not `instances`.
        """
        failure: Exception | None = None
        try:
            register()
        except Exception as error:
            failure = error
        self._ranks.raise_alike(failure)
        note = note if trainer.rank == 0 else ""
        result = trainer.refit(version, duration_seconds=self._update_seconds, verification=self._verification, note=note)
        if len(result.instances) != instances:
            raise FailedPrecondition(f"{len(result.instances)} of {instances} engine instances took part in version {version}")
        return result

    def send(self, trainer: Trainer, instances: int, version: int, weights: Iterable[tuple[str, torch.Tensor]], note: str = "") -> UpdateResult:
        """Installs the tensors as `version` in all of the `instances`. Every rank calls it, with the same tensors in one order.

        A failure is raised on every rank: InvalidArgument where a rank's tensors differ from those of rank 0, naming the tensor, where
        there are none or a name comes twice; FailedPrecondition where engines are missing; UpdateAborted and DeadlineExceeded as in
        Trainer.update. Where `weights` itself fails, the update is given up, and the other ranks fail at the latest after `update_seconds`.
        """
        rank = trainer.rank
        update = trainer.update(version, duration_seconds=self._update_seconds, verification=self._verification, note=note)
        with update:
            sent = _Sent(self._who)
            failure: Exception | None = None
            try:
                if update.instances != instances:
                    raise FailedPrecondition(f"{update.instances} of {instances} engine instances take part in version {version}")
                self._push(update if rank == 0 else None, weights, sent)
            except Exception as error:
                failure = error
            self._compare(self._ranks.raise_alike(failure, sent.digest()), sent)
            # Exporters do not say how many tensors they will yield, and engines with loader delivery do not know it (P1).
            return update.commit(tensor_count=sent.count)

    def agree(self, version: int | None) -> int | None:
        """The greatest of the ranks' versions. Raises DeadlineExceeded, naming the rank, where a rank does not come in `update_seconds`."""
        self._ranks.meet()
        versions = self._ranks.gather(version)
        return max((known for known in versions if known is not None), default=None)

    def _push(self, update: Any, weights: Iterable[tuple[str, torch.Tensor]], sent: _Sent) -> None:
        """Pushes the tensors; with no `update`, only takes part in gathering."""
        iterator = iter(weights)
        taken = False  # whether a tensor of `weights` is being pushed: an error is then not the exporter's
        try:
            for name, tensor in iterator:
                taken = True
                sent.add(name, tensor)
                if update is not None:
                    update.push(name, self.casts.of(name, tensor))
                taken = False
            if not sent.count:
                raise InvalidArgument(f"{self._who} yielded no tensor", culprit="weights")
        except BaseException:
            if taken:
                for _ in iterator:  # the other ranks gather on, and would wait for this one
                    pass
            raise

    def _compare(self, digests: Sequence[bytes], sent: _Sent) -> None:
        """Raises InvalidArgument on every rank where a rank had other tensors than rank 0."""
        if len(set(digests)) == 1:
            return
        lists = self._ranks.gather(sent.entries)
        for rank, entries in enumerate(lists):
            if entries != lists[0]:
                name = first_difference(lists[0], entries)
                raise InvalidArgument(f"trainer rank {rank} has other tensors than rank 0, first at '{name}'", tensor=name)


# How long an update goes on after engines failed to take its version, until the daemon ends it with its own reason; then rank 0 gives it up.
ACCOUNT_SECONDS = 5.0
# How long a failed sync waits for the engines' answers, before its error is raised.
ANSWER_SECONDS = 30.0
# The pause between two attempts to give up an update that this rank may not have begun yet.
_ABORT_SECONDS = 0.2

logger = logging.getLogger("refitd.integrations")


def install(
    ranks: Ranks, trainer: Trainer, version: int, send: Callable[[], UpdateResult], take: Callable[[], None] | None, seconds: float
) -> UpdateResult:
    """Installs a version in engines that take it only when they are called. Every rank calls it.

    `send`: this rank's part of the update. `take`: lets the engines take the version, and returns when they have taken it; it runs on a thread beside
    `send`; None on ranks that do not call engines. `seconds`: how long engines may take after the commit.

    A failure is raised on every rank: that of `send`; UpdateAborted where `take` failed first, which gives the update up, or another rank failed;
    FailedPrecondition where an engine can't use a version that was committed.
    """
    failure: Exception | None = None
    result: UpdateResult | None = None
    taking = None if take is None else _Taking(trainer, version, take)
    try:
        result = send()
    except Exception as error:
        failure = error
    finally:
        if taking is not None:
            taking.over.set()
    if taking is not None:
        failure = taking.failure_beside(failure, seconds)
    try:
        ranks.raise_alike(failure)
    except RuntimeError:
        raise failure or DeadlineExceeded(f"version {version}: a trainer rank did not tell its outcome in time") from None
    assert result is not None
    return result


class _Taking:
    """The engines' part of an update, on a thread. `over`: this rank's part has ended."""

    def __init__(self, trainer: Trainer, version: int, take: Callable[[], None]) -> None:
        self.over = threading.Event()
        self._version = version
        self._taken: Future[None] = Future()
        take_devices = devices.thread_devices()

        def run() -> None:
            try:
                take_devices()
                take()
            except BaseException as error:
                self._taken.set_exception(error)
                self._give_up(trainer, error)
            else:
                self._taken.set_result(None)

        threading.Thread(target=run, name="refitd-engines", daemon=True).start()  # its calls may have no end

    def _give_up(self, trainer: Trainer, error: BaseException) -> None:
        reason = f"an engine did not take version {self._version}: {error}"
        self.over.wait(ACCOUNT_SECONDS)
        while not self.over.is_set():
            with suppress(Error):  # this rank has not begun the update yet, or has ended it
                trainer.abort(self._version, reason)
            self.over.wait(_ABORT_SECONDS)

    def failure_beside(self, failure: Exception | None, seconds: float) -> Exception | None:
        """What failed, where `failure` is that of this rank's part."""
        try:
            error = self._taken.exception(seconds if failure is None else ANSWER_SECONDS)
        except FutureTimeout:
            error = TimeoutError(f"no answer within {seconds:.0f} s")
        if failure is None:
            what = f"version {self._version} was committed, and an engine can't use it: {error}"
            return None if error is None else FailedPrecondition(what)
        # An engine that still waits for the update to begin is freed by the next update, or when its time has passed.
        logger.info("refitd: version %d failed, and the engines answered: %s", self._version, error)
        return failure


class _Sent:
    """Name, dtype and shape of what a trainer rank took from its exporter, in order."""

    def __init__(self, who: str) -> None:
        self.entries: list[tuple[str, str, tuple[int, ...]]] = []
        self._who = who
        self._names: set[str] = set()

    @property
    def count(self) -> int:
        return len(self.entries)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._names:
            raise InvalidArgument(f"{self._who} yielded tensor '{name}' twice", tensor=name)
        self._names.add(name)
        self.entries.append((name, str(tensor.dtype), tuple(tensor.shape)))

    def digest(self) -> bytes:
        return hashlib.sha256(repr(self.entries).encode()).digest()


async def receive(member: Engine, *, begin_seconds: float, who: str, keep: bool) -> AsyncGenerator[list[tuple[str, torch.Tensor]], None]:
    """Yields the tensors of one update as they come, some at a time, and returns when the version is committed.

    `keep`: tensors have memory of their own; else they are valid until the next are asked for. `who`: what errors call the one that begins updates.
    Raises DeadlineExceeded where no update begins within `begin_seconds`, UpdateAborted, also after tensors were yielded: the engine's
    weights are then torn until the next update. A caller that gives up fails the update.
    """
    begun: Prepare | None = None
    over = False
    inbox = Inbox(asyncio.get_running_loop(), member)
    joiner = Joiner()
    deadline = asyncio.get_running_loop().time() + begin_seconds
    try:
        while not over:
            event = await inbox.next(max(0.0, deadline - asyncio.get_running_loop().time()))
            if event is None:
                what = f"{who} did not begin" if begun is None else f"no end of version {begun.version} came"
                raise DeadlineExceeded(f"{member.label}: {what} in its time")
            if isinstance(event, Prepare):
                begun = event
                deadline = asyncio.get_running_loop().time() + event.remaining_seconds + MARGIN_SECONDS
                await awaited(partial(member.ready, event.version))  # the framework has stopped generation before
            elif isinstance(event, Part):
                tensors = _tensors_of(joiner, event, keep)
                if not keep and tensors:
                    yield tensors
                    del tensors
                    _synchronize(member)
                await awaited(partial(member.ack, event))
                if keep and tensors:
                    yield tensors
            elif isinstance(event, (Aborted, Lost)):
                over = True
                dirty = event.dirty if isinstance(event, Aborted) else True
                raise UpdateAborted(f"{member.label}: {event.reason}", dirty=dirty)
            elif isinstance(event, Committed):
                over = True
    finally:
        if begun is not None and not over:
            await awaited(partial(_give_up, member, begun.version))


def known_version(trainer: Trainer | None, committed: int | None) -> int | None:
    """The group's version as far as a trainer rank knows it."""
    known = None if trainer is None else trainer.group_version
    return max((version for version in (known, committed) if version is not None), default=None)


def next_version(known: int | None, wanted: int | None = None) -> int:
    """`wanted` where it is greater than the known version, else the number after the known version."""
    if wanted is not None and (known is None or wanted > known):
        return wanted
    return 1 if known is None else known + 1


def _dtype_of(where: str, option: str, name: str | None) -> torch.dtype | None:
    import torch

    found = getattr(torch, name, None) if name else None
    if name and not (isinstance(found, torch.dtype) and str(found).removeprefix("torch.") in CAST_FROM):
        raise InvalidArgument(f"{where}.{option}: {name!r} is no floating-point dtype of torch", culprit=option)
    return found


def first_difference(first: Sequence[Any], other: Sequence[Any]) -> str:
    """The name of the first entry in which two lists of (name, ...) differ."""
    for expected, found in zip(first, other):
        if expected != found:
            return str(found[0])
    return str(max(first, other, key=len)[min(len(first), len(other))][0])


def _tensors_of(joiner: Joiner, part: Part, keep: bool) -> list[tuple[str, torch.Tensor]]:
    """The whole tensors that a part brings; with `keep`, copied out of the daemon's memory."""
    # Views of the part lie in the daemon's slot; a tensor that the joiner joined has memory of its own.
    in_slot = {id(view) for view in part.views}
    tensors = []
    for view in joiner.add(part):
        tensor = view.torch()
        tensors.append((view.name, tensor.clone() if keep and id(view) in in_slot else tensor))
    # The caller acknowledges the part next, which frees the slot: the clones must be complete by then.
    if keep and tensors:
        _synchronize(part.engine)
    return tensors


def _synchronize(member: Engine) -> None:
    """Waits for the device work that reads the tensors of a part."""
    kind = devices.kind_of(member.device)
    if kind is not None:
        kind.synchronize(member.device)


def _give_up(member: Engine, version: int) -> None:
    """Fails the update, unless it has ended, and detaches."""
    try:
        member.fail(version, "the engine's worker gave the weights up")
    except Error:
        pass  # the update has ended
    member.close()
