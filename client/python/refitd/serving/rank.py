"""One rank of an engine, in the process that holds the model, as one rank of a refitd instance. It imports no engine; the backends of
vLLM and SGLang each hold a Rank, and give it functions that decide a model's delivery and process new weights.

`EngineLoop`: a plain torch or transformers model as an engine: the smallest whole example of what an adapter does.

    import refitd

    with refitd.EngineLoop(model, group="policy", instance="worker-0") as weights:
        while True:
            with weights.use() as version:      # None: whatever the model came with
                outputs = model.generate(**batch)

Updates happen between uses: `use` waits while one runs, an update waits for the uses under way.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .._core.member import Connect
from .._core.tensors import Places, Views, describe
from ..engine import Aborted, Committed, Draining, Engine, Event, Lost, Prepare, Reattached, Staged, Weights
from ..errors import Closed, DataLoss, DeadlineExceeded, Error, FailedPrecondition, InvalidArgument, UpdateAborted
from ..layout import devices
from ..layout.placement import KeptArenas, adopt, other_side
from . import PROOFS, Settings, proof
from .ahead import Portion
from .proof import Probe, Proof, Prover, token_ids, tokens_for

if TYPE_CHECKING:
    from .delivery import Delivery


# How long `take` waits for Prepare by default. A trainer that calls the engine itself calls before it begins the update; the driver calls
# when Prepare has come, and gives a shorter time.
PREPARE_SECONDS = 120.0
# How long a rank that serves looks for the Staged that its driver has got.
_LOOK_AHEAD_SECONDS = 0.01
# A rank waits for the outcome this much longer than the time that Prepare gave. A daemon that works ends the update earlier.
MARGIN_SECONDS = 30.0


# How long a model that is being loaded waits for daemon and group, to ask for kept arenas.
KEPT_SECONDS = 10.0


@dataclass
class Kept:
    """The arenas that the daemon keeps of a rank's last process, which a model has taken up while it was loaded (docs/arena.md). Nothing may write
    there before a layout over them is registered.

    `lease`: has claimed them, and keeps their memory from other engines of the GPU; None: nothing is kept. `place`: group, instance, rank
    and number of ranks of the lease.
    """

    arenas: KeptArenas = field(default_factory=KeptArenas)
    lease: Engine | None = None
    place: tuple[str, str, int, int] | None = None

    def release(self) -> None:
        """Lets the daemon keep what was not registered, and no tensor lies in."""
        self.arenas.drop()
        if self.lease is not None:
            self.lease.close()
            self.lease = None

    def lease_of(self, place: tuple[str, str, int, int]) -> Engine | None:
        """The lease, which the caller has from now on, if it is of that place; another one ends."""
        lease, self.lease = self.lease, None
        if lease is not None and self.place != place:
            lease.close()
            return None
        return lease


@dataclass(frozen=True)
class TakeUp:
    """How a rank takes up what was kept. `decide`: makes the delivery, and writes nothing to the weights. `prove`: proves it without losing the
    weights; returns False where something failed. `gather`: returns the values of all ranks that compute together, which must call it alike."""

    kept: Kept
    decide: Callable[[Settings], Delivery]
    prove: Callable[[Settings, Delivery], bool]
    gather: Callable[[Any], list[Any]]


def find_kept(settings: Settings, instance: str, rank: int, world_size: int, device: Any, client: str) -> Kept:
    """What is kept of the rank. An engine of which nothing is kept, or that can't ask, starts as any other. `device`: of the weights."""
    none = Kept(KeptArenas(back=settings.arena))
    if not (settings.group and settings.instance and settings.restores):
        return none
    connect = replace(settings.connect(client), wait_seconds=KEPT_SECONDS)
    try:
        lease = _engine(settings, instance, rank, world_size, device, connect, restore=True, wants_staged=True)
        try:
            arenas = lease.take_kept()
        except BaseException:
            lease.close()
            raise
    except Error as error:
        logging.getLogger(f"{client}.refitd").warning("refitd: nothing that was kept is taken up: %s", error)
        return none
    if not arenas:
        lease.close()
        return none
    return Kept(KeptArenas(arenas, settings.arena), lease, (settings.group, instance, rank, world_size))


def _engine(settings: Settings, instance: str, rank: int, world_size: int, device: Any, connect: Connect, **options: Any) -> Engine:
    """Attaches a rank on the device of the weights. It takes part in no catch-up: a source instance's registered memory is read at any time, but
    loader tensors are not the model's weights, and sleep frees them; a late instance gets Prepare at any time, but this rank takes events
    only during an update."""
    return Engine(
        settings.group, instance=instance, rank=rank, world_size=world_size, trainer_identity=settings.trainer_identity,
        device="host" if device.type == "cpu" else None, catch_up=False, connect=connect, **options,
    )  # fmt: skip


def _register(member: Engine, delivery: Delivery) -> None:
    """Registers all that the daemon must know of the delivery, at first and anew. Without the tied names a trainer's output layer that is
    not the embedding would be dropped in silence (P11)."""
    member.register_layout(delivery.tensors, delivery.boxes, delivery.tied_names)


class Rank:
    """Attaches, takes updates, detaches. Not thread-safe: engines call it on the thread that runs the model.

    `clean`: whether the weights are one whole version. `version`: refitd's version that the weights are; None: they are none. `staged`: whether
    that version arrived while the engine served (Settings.arena). `processed_ahead`: how many modules were post-processed for it meanwhile.
    """

    def __init__(
        self,
        device: Any,
        *,
        client: str,
        clean: bool,
        decide: Callable[[Settings], Delivery],
        process: Callable[[Delivery], None],
        aside: Callable[[Portion, Mapping[str, Any]], None] | None = None,
        logits: Callable[[], Any] | None = None,
        take_up: TakeUp | None = None,
    ) -> None:
        """`decide`: makes the delivery, once. `process`: brings the loader tensors into the modules, after each version. `aside`: processes a
        portion of the delivery into the memory beside the model. `logits`: runs the model on fixed tokens, for Settings.logits. `take_up`: how
        the rank takes up what the daemon kept of its last process. None: nothing that was kept was looked for; the ranks that compute together all
        have it, or none has."""
        self.clean = clean
        self.version: int | None = None
        self.staged = False
        self.processed_ahead = 0
        self.delivery: Delivery | None = None
        self._device = device
        self._client = client
        self._decide = decide
        self._process = process
        self._aside = aside
        self._staged: Staged | None = None  # whose version the portions that are done hold
        self._wants_staged = self._driven = False
        self._logits = logits
        self._take_up = take_up  # until it was done
        self._member: Engine | None = None
        self._incarnation: int | None = None
        self._digest = 0
        self._content: int | None = None
        self._settings: Settings | None = None
        self._owner: str | None = None
        self._logger = logging.getLogger(f"{client}.refitd")

    def attach(
        self, settings: Settings, instance: str, rank: int, world_size: int, *, dirty: bool, restores: bool = False, driven: bool = False
    ) -> None:
        """Attaches and registers. Raises refitd.Error that names the tensor, parameter or field; the rank is detached then.

        `dirty`: the weights are not one whole version. `driven`: a driver processes staged modules ahead of the pause, by ahead(). `restores`: the
        daemon keeps the rank's arenas for its next process; a rank whose first weights are random then attaches without a version, and not as
        dirty."""
        self.leave()
        started = time.perf_counter()
        self._settings, self._driven = settings, driven
        place = settings.group, instance, rank, world_size
        if self._take_up is not None and self._takes_up(self._take_up, settings, place):
            self._log_attached(f"takes up version {self.version}", started)
            return
        if self.delivery is None or self._changed():
            self.delivery = self._decide(settings)
        dirty = dirty or not self.clean
        held: dict[str, Any] = {}
        if not dirty and self.version is not None:
            held = {"held_version": self.version, "held_incarnation": self._incarnation, "held_digest": self._digest, "held_content": self._content}
        if restores and (held or self.version is None):
            try:
                self._join(settings, place, self.delivery, restore=True)
                found = self._found()
                if held and (found is None or found.version != self.version):
                    self.leave()  # nothing was kept while it was detached
            except DataLoss:
                pass  # what is claimed below is read again
        if self._member is None:
            self._join(settings, place, self.delivery, dirty=dirty, **held)
        self._log_attached("attaches", started)

    def held(self) -> dict[str, Any] | None:
        """What the driver must know to hold the same version (Engine's `held_...`); None: the weights are no version."""
        if not self.clean or self.version is None:
            return None
        return {"version": self.version, "incarnation": self._incarnation, "owner": self._owner, "content": self._content}

    def take(self, version: int | None, wait_seconds: float) -> None:
        """Takes part in one update, to `version` or, if that is None, the next. Returns when the update is committed and processed.

        Raises UpdateAborted, with `dirty`, if the update was given up; FailedPrecondition, before anything is written, if this rank is not
        attached; DeadlineExceeded if no update begins. A version that is in place already returns at once.
        """
        member = self._member
        if member is None:
            raise FailedPrecondition("this rank is not attached to refitd: call init_weight_transfer_engine first")
        if version is not None and self.version == version and self.clean:
            return
        prepare = self._await_prepare(member, version, wait_seconds)
        if self._staged is None or self._staged.update_id != prepare.update_id:
            self._forget_ahead()
        try:
            self._take(member, prepare)
        finally:
            self._forget_ahead()

    def _take(self, member: Engine, prepare: Prepare) -> None:
        if self._changed():
            self._refuse_changed(member, prepare)
        devices.synchronize(self._device)
        try:
            prepare.ready()
        except FailedPrecondition as error:
            if self.delivery is not None and member.weights.name == "CLEAN":
                raise UpdateAborted(f"version {prepare.version} ended before this rank was ready: {error}", dirty=False) from error
            raise
        self._await_outcome(member, prepare)

    def ahead(self, update_id: int) -> int:
        """Processes one more portion of what that update has staged, while the engine serves; the thread as of `take`. Returns how many are left; with
        the last one, this rank is waited for no longer.

        Raises nothing: an engine that asks several ranks gives up at the first that raises, and takes the others' answers for those of its
        next call. What fails is processed in the pause from now on.
        """
        try:
            left = self._process_ahead(update_id)
            if not left and self._staged is not None:
                self._staged.processed()
            return left
        except FailedPrecondition:
            return 0  # the update stages no more: its Prepare or its outcome comes next
        except Exception:
            self._logger.exception("refitd: what is left is processed in the pause")
            with suppress(Exception):  # the group waits for no rank that does no more
                if self._staged is not None:
                    self._staged.processed()
            return 0

    def _process_ahead(self, update_id: int) -> int:
        member, delivery = self._member, self.delivery
        if member is None or delivery is None or not self._wants_staged:
            return 0
        if not self._follow_staged(member, update_id):
            return 0
        left = [portion for portion in delivery.ahead if not portion.done] if self._aside is not None else []
        if self._staged is None or self._staged.update_id != update_id:
            return max(len(left), 1)  # it has not come here yet
        if self._aside is None or not left:
            return 0
        portion = left[0]
        try:
            with other_side(portion.tensors, member.device) as tensors:
                try:
                    self._aside(portion, tensors)
                finally:
                    devices.synchronize(self._device)
            portion.done = True
        except Exception as error:
            self._logger.exception("refitd: %s are processed in the pause from now on", ", ".join(portion.modules))
            portion.forget()
            delivery.process_in_pause(portion, f"failed while the engine served: {type(error).__name__}: {error}")
        return len(left) - 1

    def _follow_staged(self, member: Engine, update_id: int) -> bool:
        """Takes the events that tell whether the update has staged its version. False: the rank is asked to pause."""
        while True:
            has_come = self._staged is not None and self._staged.update_id == update_id
            event = member._next_or_none(None, 0.0 if has_come else _LOOK_AHEAD_SECONDS)
            if event is None:
                return True
            if isinstance(event, Prepare):
                member._put_back(event)
                return False
            self._note(event)

    def _note(self, event: Event) -> None:
        """What an event means between updates. What was made of a version that was given up must not get into place (P11)."""
        if isinstance(event, (Staged, Aborted, Lost)):
            self._forget_ahead()
        if isinstance(event, Staged):
            self._staged = event
        if isinstance(event, Aborted) and event.dirty:
            self.clean = False

    def detach(self) -> None:
        """Detaches; the model keeps its weights."""
        if self._take_up is not None and self._take_up.kept.lease is not None:
            self._take_up.kept.lease.close()
        self.leave()

    def leave(self) -> None:
        """Detaches; what was claimed while the model was loaded stays claimed."""
        self._forget_ahead()
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def status(self) -> dict[str, Any]:
        return {
            "attached": self._member is not None,
            "clean": self.clean,
            "version": self.version,
            "staged": self.staged,
            "held": self.held(),
            "processed_ahead": self.processed_ahead,
            "delivery": None if self.delivery is None else self.delivery.summary(),
        }

    # ---- inside ----

    def _forget_ahead(self) -> None:
        """What was made of another version must not get into place (P11)."""
        self._staged = None
        for portion in self.delivery.ahead if self.delivery is not None else ():
            portion.forget()

    def _join(self, settings: Settings, place: tuple[str, str, int, int], delivery: Delivery, **options: Any) -> None:
        """Attaches a member and registers the delivery. Raises refitd.Error; the rank is detached then."""
        _, instance, rank, world_size = place
        connect = settings.connect(self._client)
        wants_staged = self._driven and self._aside is not None and bool(delivery.ahead)
        member = _engine(
            settings, instance, rank, world_size, self._device, connect, held_owner=self._owner, wants_staged=wants_staged, **options
        )
        try:
            _register(member, delivery)
        except BaseException:
            member.close()
            raise
        self._member, self._wants_staged = member, wants_staged

    def _found(self) -> Committed | None:
        """The version that the daemon found in the memory when it was registered."""
        assert self._member is not None
        event = self._member.poll()
        if event is not None and not isinstance(event, Committed):
            self._member._put_back(event)
            return None
        return event

    def _takes_up(self, take_up: TakeUp, settings: Settings, place: tuple[str, str, int, int]) -> bool:
        """Registers what was kept, which makes that memory writable. Returns whether all ranks that compute together hold one version, with which
        this one then computes; if not, the rank is detached, and its weights are none. An error of one rank is raised on all, and the next call
        tries again."""
        kept = take_up.kept
        made: Delivery | None = None
        found: Committed | None = None
        failure: Error | None = None
        try:
            if len(kept.arenas):
                made = take_up.decide(settings)
                self._join_kept(kept, settings, place, made)
                found = self._found()
        except DataLoss:
            pass  # it is something else, and may be written
        except Error as error:
            failure = error
        outcomes = take_up.gather((found and (found.version, found.incarnation), failure and str(failure)))
        if failure is not None:
            raise failure
        other = next((why for _, why in outcomes if why), None)
        if other is not None:
            self.leave()
            raise FailedPrecondition(f"another rank could not take up what was kept: {other}")
        kept.arenas.drop()
        self._take_up = None
        if found is not None and made is not None and len({holds for holds, _ in outcomes}) == 1:
            self._bring_in(made, found)
            if take_up.prove(settings, made):
                self.delivery = made
                self._hold(found)
                return True
        self.leave()
        return False

    def _join_kept(self, kept: Kept, settings: Settings, place: tuple[str, str, int, int], delivery: Delivery) -> None:
        """Registers by the lease that has claimed the arenas, or, where that has ended, by another one."""
        lease = kept.lease_of(place)
        if lease is not None:
            try:
                _register(lease, delivery)
                self._member, self._wants_staged = lease, self._driven
                return
            except Error as error:
                lease.close()
                if isinstance(error, DataLoss):
                    raise
        self._join(settings, place, delivery, restore=True)

    def _hold(self, event: Committed) -> None:
        """The weights are the version."""
        self.version, self._incarnation, self._owner, self.clean = event.version, event.incarnation, event.owner, True
        self._digest, self._content = event.digest, event.content

    def _log_attached(self, what: str, started: float) -> None:
        member, delivery = self._member, self.delivery
        assert member is not None and delivery is not None
        self._logger.info(
            "refitd: %s of group %s %s: %d parameters direct, %d processed (loader tensors of %d bytes), %d constant, in %.0f ms",
            member.label, member.group, what, len(delivery.direct), len(delivery.processed), delivery.loader_bytes,
            len(delivery.constant), 1e3 * (time.perf_counter() - started),
        )  # fmt: skip

    def _changed(self) -> dict[str, str]:
        """By name, the model's parameters that do not lie in the memory that the daemon writes. On a CPU they are brought back there first, if
        that can be; on a GPU not, because captured graphs may read the memory that the parameters have now (P11)."""
        places = self.delivery.places if self.delivery is not None else None
        if places is None:
            return {}
        return places.bring_back() if self._device.type == "cpu" else places.changed()

    def _refuse_changed(self, member: Engine, prepare: Prepare) -> None:
        """Refuses the update before a byte is written, and registers what the model has now for the next one. Raises UpdateAborted."""
        why, culprit = describe(self._changed(), member.label)
        member.fail(prepare.version, why)
        try:
            self._await_outcome(member, prepare)
        except UpdateAborted as error:
            assert self._settings is not None
            try:
                made = self._decide(self._settings)
                _register(member, made)
                self.delivery = made
            except Error as refused:
                self._logger.warning("refitd: %s, and can't be registered anew: %s", why, refused)
            raise UpdateAborted(f"version {prepare.version}: {why}", culprit=culprit, dirty=error.dirty) from error

    def _await_prepare(self, member: Engine, wanted: int | None, wait_seconds: float) -> Prepare:
        """Waits until an update begins, to version `wanted` if that is not None."""
        deadline = time.monotonic() + wait_seconds
        while True:
            event = member._next_or_none(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no update{f' to version {wanted}' if wanted is not None else ''} began within {wait_seconds} s")
            if isinstance(event, Prepare) and (wanted is None or event.version >= wanted):
                if wanted is not None and event.version > wanted:
                    member._put_back(event)
                    raise UpdateAborted(f"version {wanted} is over: version {event.version} begins", dirty=not self.clean)
                return event
            self._note(event)
            if self._staged is event:
                self._staged.processed()  # whoever calls take() has stopped the engine: what is left is processed in the pause

    def _await_outcome(self, member: Engine, prepare: Prepare) -> None:
        """Waits for the outcome of the update, and brings a committed version in. Raises UpdateAborted, DeadlineExceeded."""
        clean_before = self.clean
        self.clean = False  # until the outcome is known
        event = None
        deadline = time.monotonic() + prepare.remaining_seconds + MARGIN_SECONDS
        while event is None or not isinstance(event, (Committed, Aborted, Lost)):
            event = member._next_or_none(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no outcome of version {prepare.version} in its time: the weights may be torn")
        if isinstance(event, Committed):
            assert self.delivery is not None
            ahead = sum(len(portion.modules) for portion in self.delivery.ahead if portion.done)
            self._bring_in(self.delivery, event)
            self._hold(event)
            self.staged, self.processed_ahead = prepare.flip, ahead
            return
        dirty = event.dirty if isinstance(event, Aborted) else event.weights.name != "CLEAN"
        self.clean = clean_before and not dirty
        raise UpdateAborted(f"version {prepare.version}: {event.reason}", dirty=dirty)

    def _bring_in(self, delivery: Delivery, event: Committed) -> None:
        """Processes the version. An exception leaves the rank dirty and detached."""
        assert self._member is not None and self._settings is not None
        try:
            self._process(delivery)
            devices.synchronize(self._device)
            if self._settings.logits and self._logits is not None:
                proof.compare_logits(self._settings.logits, self._logits_key(self._member, event), self._logits)
        except BaseException:
            self.detach()
            raise

    def _logits_key(self, member: Engine, event: Committed) -> str:
        """A name for the logits of this version, which are equal in all engines of this shape."""
        shape = f"{member.rank}of{member.world_size}-{device_name(self._device)}"
        return f"{quote(member.group, safe='')}-{quote(shape, safe='')}-{event.incarnation}-{event.version}"


def device_name(device: Any) -> str:
    """The model of the device, as torch names it."""
    if device.type == "cpu":
        return "cpu"
    import torch

    return str(torch.get_device_module(device).get_device_name(device))


# How often a loop without an event looks whether the model's tensors still have the memory that is registered.
LOOK_SECONDS = 1.0
# How often it does so after registering anew failed, as it does while an update runs.
RETRY_SECONDS = 0.02


class EngineLoop:
    """A torch module as one rank of an engine, which answers events on a thread until close().

    Thread-safe: any number of threads may be within `use`. Tensors are known by their names in the module: a tensor that was
    replaced, or whose memory moved, is brought back into the registered memory (on the host) or registered anew between updates. An update
    is refused, naming the tensor, where neither was possible (P11).
    """

    def __init__(
        self,
        model: Any,
        *,
        group: str,
        instance: str,
        rank: int = 0,
        world_size: int = 1,
        names: Any = None,
        clean: bool = True,
        probe: Callable[[], Any] | None = None,
        proof: str = "report",
        trainer_identity: str | None = None,
        device: str | None = None,
        socket: str | None = None,
        connect: Connect = Connect(),
    ) -> None:
        """Attaches, and proves the forward.

        Args:
            model: The module.
            group: As in refitd.Engine, with `instance`, `rank`, `world_size`, `trainer_identity`, `socket` and `connect`.
            names: By the checkpoint's names, the tensors to fill, of any shape and dtype that trainers send; None: the module's state
                dict, whose CPU tensors move into memory that the daemon can map (refitd.adopt).
            clean: Whether the model's weights may be used before the first version.
            probe: Runs the model on 64 fixed tokens, or inputs like these, and returns its output; None: a language model of
                transformers has a known one. With a probe, the forward is proved to read what is registered, before this returns
                (refitd.serving.proof): a parameter that it does not read is refused by name.
            proof: "report" leaves what is unproved in `EngineLoop.proof`, "require" refuses it, "off" runs nothing.
            device: Where the weights are, as in refitd.Engine; None: where the model's tensors are.

        Raises:
            Error: What refitd.Engine and Engine.register raise, naming the tensor.
            FailedPrecondition: The forward does not read a parameter, or is unproved where that is refused.
        """
        self._changed = threading.Condition()
        self._uses = 0
        self._preparing = False
        self._clean = clean
        self._version: int | None = None
        self._paused_at = 0.0  # when the last Prepare came
        self._paused_seconds: float | None = None  # from there to the outcome
        self._error: Exception | None = None
        self._model = model
        self._views = None if names is None else Views(model, names)
        self._refusal = ""  # why what the model has now was not registered
        parameters = self._tensors()
        self._kind = devices.kind_of_tensors(parameters.values())
        if device is None:
            device = devices.HOST if self._kind is None else devices.device_of(parameters.values())
        self.engine = Engine(
            group, instance=instance, rank=rank, world_size=world_size, trainer_identity=trainer_identity, dirty=not clean, device=device,
            socket=socket, connect=connect,
        )  # fmt: skip
        try:
            self._register()
            self.proof = self._prove(probe, proof)
        except BaseException:
            self.engine.close()
            raise
        self._thread = threading.Thread(target=self._run, name="refitd-engine-loop", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int | None:
        """The version that the model holds; None: none of refitd's, or the weights are not whole."""
        with self._changed:
            return self._version if self._clean else None

    def __repr__(self) -> str:
        registration = self.engine._registration
        holds = "nothing registered" if registration is None else f"{len(registration.tensors)} tensors, {registration.nbytes()} bytes"
        paused = "" if self._paused_seconds is None else f", paused {self._paused_seconds:.3g} s"
        return f"<EngineLoop {self.engine.label}: version {self.version}, {holds}{paused}{', closed' if self.engine.closed else ''}>"

    @contextmanager
    def use(self, timeout_seconds: float = 600.0) -> Iterator[int | None]:
        """A block that reads the weights, which are one whole version within. Yields the version.

        Raises DeadlineExceeded where no whole version is there in time, FailedPrecondition after close(), and what ended the lease
        while the weights were not whole. A block must not begin another: an update between the two would wait for the outer one.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: self._stopped() or (self._clean and not self._preparing), timeout_seconds)
            if not (self._clean and not self._preparing):
                if self._error is not None:
                    raise self._error
                if there:
                    raise FailedPrecondition(f"{self.engine.label}: closed")
                raise DeadlineExceeded(f"{self.engine.label}: no whole version within {timeout_seconds} s")
            self._uses += 1
            version = self._version
        try:
            yield version
        finally:
            with self._changed:
                self._uses -= 1
                self._changed.notify_all()

    def wait(self, version: int, timeout_seconds: float = 600.0) -> int:
        """Waits until the model holds `version` or a newer one; returns it. Raises DeadlineExceeded, and as `use` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped() or self._holds(version), timeout_seconds)
            if self._holds(version):
                assert self._version is not None
                return self._version
            if self._error is not None:
                raise self._error
            raise DeadlineExceeded(f"{self.engine.label}: version {version} did not come within {timeout_seconds} s")

    def close(self) -> None:
        """Detaches; the model keeps its weights."""
        self.engine.close()
        self._thread.join()

    def __enter__(self) -> EngineLoop:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- the model's memory ----

    def _tensors(self) -> dict[str, Any]:
        """The tensors to fill, by the checkpoint's names, as the model has them now."""
        return dict(self._model.state_dict(keep_vars=True)) if self._views is None else self._views.now()

    def _register(self) -> None:
        """Registers the tensors that the model has now, which on the host first move into memory that the daemon can map."""
        if self._kind is None:
            adopt(self._model)
        tensors = self._tensors()
        self.engine.register(tensors)
        self._places = Places(self._model, tensors.keys() if self._views is None else self._views.held_names)
        self._refusal = ""

    def _prove(self, probe: Callable[[], Any] | None, how: str) -> Proof:
        """The forward proof of what is registered; raises FailedPrecondition where that fails (P11)."""
        if how not in PROOFS:
            raise InvalidArgument(f"proof: {how!r} is none of {', '.join(PROOFS)}", culprit="proof")
        if how == "off":
            return Proof()
        names = set(self._tensors()) if self._views is None else self._views.held_names
        tokens = tokens_for(self._model)
        run = probe or (_run_of(self._model, tokens) if self._views is None else None)
        if run is None:
            made = Proof(unproved=dict.fromkeys(sorted(names), "can't be told: the model's inputs are not known, and no probe was given"))
        else:
            made = Prover(self._model, Probe(run, tokens), names).perturb()
        made.check(require=how == "require")
        return made

    def _bring_back(self) -> None:
        """On the host, gives tensors that were replaced or moved the registered memory again: no update need be refused for them."""
        if self._kind is None:
            self._places.bring_back()

    def _changed_memory(self) -> str:
        """Which tensors of the model have other memory than the registered, as text; "": none."""
        changed = self._places.changed()
        return describe(changed, self.engine.label)[0] + self._refusal if changed else ""

    def _register_anew(self) -> None:
        """Registers the model's tensors again if their memory changed. Where that fails, because an update has begun or because trainers send
        other tensors, every update is refused with the reason until it succeeds (P11)."""
        with self._changed:
            if self._preparing or self._uses:
                return
        if not self._changed_memory():
            return
        try:
            self._register()
        except Closed:
            raise
        except Error as error:
            self._refusal = f"; it was not registered anew: {error}"

    # ---- the thread ----

    def _stopped(self) -> bool:
        return self._error is not None or self.engine.closed

    def _holds(self, version: int) -> bool:
        return self._clean and not self._preparing and self._version is not None and self._version >= version

    def _run(self) -> None:
        try:
            while True:
                event = self.engine.poll(RETRY_SECONDS if self._refusal else LOOK_SECONDS)
                if event is not None:
                    self._take(event)
                self._register_anew()
        except Closed:
            pass
        except Exception as error:
            with self._changed:
                self._error = error
        with self._changed:
            self._changed.notify_all()

    def _take(self, event: Any) -> None:
        if isinstance(event, Prepare):
            self._prepare(event)
            return
        if isinstance(event, Draining):
            return
        with self._changed:
            if self._preparing:
                self._paused_seconds = time.monotonic() - self._paused_at
            self._preparing = False
            if isinstance(event, Committed):
                self._clean, self._version = True, event.version
            elif isinstance(event, Aborted):
                self._clean = self._clean and not event.dirty
            elif isinstance(event, (Lost, Reattached)):
                self._clean = self._clean and event.weights is Weights.CLEAN
            self._changed.notify_all()

    def _prepare(self, event: Prepare) -> None:
        """Waits for the uses under way, and answers that the rank is ready, or why it can't be."""
        with self._changed:
            self._preparing, self._paused_at = True, time.monotonic()
            self._changed.notify_all()
            ended = self._changed.wait_for(lambda: self._uses == 0, event.remaining_seconds)
        try:
            if not ended:
                event.fail(f"{self._uses} uses of the weights did not end within {event.remaining_seconds} s")
                return
            self._bring_back()
            stale = self._changed_memory()
            if stale:
                event.fail(stale)
                return
            if self._kind is not None:
                self._kind.synchronize_all()
            event.ready()
        except Closed:
            raise
        except Error:
            pass  # the update ended before; Aborted is the next event


def _run_of(model: Any, tokens: int) -> Callable[[], Any] | None:
    """Returns a function that runs a language model of transformers on fixed tokens; None for other modules."""
    config = getattr(model, "config", None)
    vocabulary: Any = getattr(config, "vocab_size", None)
    device = next((tensor.device for tensor in model.parameters()), None)
    if not isinstance(vocabulary, int) or device is None or not hasattr(model, "get_input_embeddings"):
        return None

    def run() -> Any:
        return model(input_ids=token_ids(vocabulary, tokens, device)[None], use_cache=False).logits

    return run
