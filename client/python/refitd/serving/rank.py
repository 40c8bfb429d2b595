"""One rank of an engine, in the process that holds the model, as one rank of a refitd instance. It imports no engine; the backends of
vLLM and SGLang each hold a Rank, and tell it how a model's delivery is decided and how new weights are processed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from .._core.events import Aborted, Committed, Lost, Prepare
from ..engine import Engine
from ..errors import DeadlineExceeded, Error, FailedPrecondition, UpdateAborted
from ..layout.places import describe
from . import proof
from .delivery import Delivery, synchronise
from .settings import Settings

# How long `take` waits for Prepare by default. A trainer that calls the engine itself does so before it begins the update; the driver calls
# when Prepare has come, and names a shorter time.
PREPARE_SECONDS = 120.0
# A rank waits for the outcome this much longer than Prepare said remains. A daemon that works ends the update earlier.
MARGIN_SECONDS = 30.0


class Rank:
    """Attaches, takes updates, detaches. Not thread-safe: engines call it on the thread that runs the model.

    `clean`: whether the weights are one whole version. `version`: the version of refitd's that they are; None: none.
    """

    def __init__(
        self,
        device: Any,
        *,
        client: str,
        clean: bool,
        decide: Callable[[Settings], Delivery],
        process: Callable[[Delivery], None],
        logits: Callable[[], Any] | None = None,
    ) -> None:
        """`decide`: makes the delivery, once. `process`: brings what the arena got into the modules, after each version. `logits`: runs the
        model on fixed tokens, for Settings.logits."""
        self.clean = clean
        self.version: int | None = None
        self.delivery: Delivery | None = None
        self._device = device
        self._client = client
        self._decide = decide
        self._process = process
        self._logits = logits
        self._member: Engine | None = None
        self._incarnation: int | None = None
        self._digest = 0
        self._settings: Settings | None = None
        self._owner: str | None = None
        self._logger = logging.getLogger(f"{client}.refitd")

    def attach(self, settings: Settings, instance: str, rank: int, world_size: int, *, dirty: bool) -> None:
        """Attaches and registers. Raises refitd.Error that names the tensor, parameter or field; the rank is detached then."""
        self.detach()
        started = time.perf_counter()
        if self.delivery is None or self._changed():
            self.delivery = self._decide(settings)
        self._settings = settings
        dirty = dirty or not self.clean
        held: dict[str, Any] = {}
        if not dirty and self.version is not None:
            held = {"held_version": self.version, "held_incarnation": self._incarnation, "held_digest": self._digest}
        member = Engine(
            settings.group,
            instance=instance,
            rank=rank,
            world_size=world_size,
            held_owner=self._owner,
            trainer_identity=settings.trainer_identity,
            device="host" if self._device.type == "cpu" else None,
            dirty=dirty,
            # An arena is not the model's weights, sleep releases them, and events are taken only when an update is on.
            catch_up=False,
            connect=settings.connect(self._client),
            **held,
        )
        try:
            member.register_layout(self.delivery.tensors, self.delivery.boxes, self.delivery.tied_names)
        except BaseException:
            member.close()
            raise
        self._member = member
        self._logger.info(
            "refitd: %s of group %s: %d parameters direct, %d processed (arena of %d bytes), %d constant, in %.0f ms",
            member.label, settings.group, len(self.delivery.direct), len(self.delivery.processed), self.delivery.arena_bytes,
            len(self.delivery.constant), 1e3 * (time.perf_counter() - started),
        )  # fmt: skip

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
        if self._changed():
            self._refuse_changed(member, prepare)
        synchronise(self._device)
        try:
            prepare.ready()
        except FailedPrecondition as error:
            if self.delivery is not None and member.weights.name == "CLEAN":
                raise UpdateAborted(f"version {prepare.version} ended before this rank was ready: {error}", dirty=False) from error
            raise
        self._await_outcome(member, prepare)

    def detach(self) -> None:
        """The weights stay."""
        member, self._member = self._member, None
        if member is not None:
            member.close()

    def status(self) -> dict[str, Any]:
        return {
            "attached": self._member is not None,
            "clean": self.clean,
            "version": self.version,
            "delivery": None if self.delivery is None else self.delivery.summary(),
        }

    # ---- inside ----

    def _changed(self) -> dict[str, str]:
        """By name, the model's parameters that are not the memory that the daemon writes, and can't be brought back there. On a GPU captured
        graphs may read what is there now, so that nothing is brought back (P11)."""
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
                member.register_layout(made.tensors, made.boxes)
                self.delivery = made
            except Error as refused:
                self._logger.warning("refitd: %s, and can't be registered anew: %s", why, refused)
            raise UpdateAborted(f"version {prepare.version}: {why}", culprit=culprit, dirty=error.dirty) from error

    def _await_prepare(self, member: Engine, wanted: int | None, wait_seconds: float) -> Prepare:
        deadline = time.monotonic() + wait_seconds
        while True:
            event = member._next_unless(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no update{f' to version {wanted}' if wanted is not None else ''} began within {wait_seconds} s")
            if isinstance(event, Prepare) and (wanted is None or event.version >= wanted):
                if wanted is not None and event.version > wanted:
                    member._put_back(event)
                    raise UpdateAborted(f"version {wanted} is over: version {event.version} begins", dirty=not self.clean)
                return event
            if isinstance(event, Aborted) and event.dirty:
                self.clean = False

    def _await_outcome(self, member: Engine, prepare: Prepare) -> None:
        clean_before = self.clean
        self.clean = False  # until the outcome is known
        event = None
        deadline = time.monotonic() + prepare.remaining_seconds + MARGIN_SECONDS
        while event is None or not isinstance(event, (Committed, Aborted, Lost)):
            event = member._next_unless(None, max(0.0, deadline - time.monotonic()))
            if event is None:
                raise DeadlineExceeded(f"{member.label}: no outcome of version {prepare.version} in its time: the weights may be torn")
        if isinstance(event, Committed):
            self._bring_in(member, event)
            self.version, self._incarnation, self._owner, self.clean = event.version, event.incarnation, event.owner, True
            self._digest = event.digest
            return
        dirty = event.dirty if isinstance(event, Aborted) else event.weights.name != "CLEAN"
        self.clean = clean_before and not dirty
        raise UpdateAborted(f"version {prepare.version}: {event.reason}", dirty=dirty)

    def _bring_in(self, member: Engine, event: Committed) -> None:
        """An exception leaves the rank dirty; it must attach anew."""
        assert self.delivery is not None and self._settings is not None
        try:
            self._process(self.delivery)
            synchronise(self._device)
            if self._settings.logits and self._logits is not None:
                proof.compare_logits(self._settings.logits, self._logits_key(member, event), self._logits)
        except BaseException:
            self.detach()
            raise

    def _logits_key(self, member: Engine, event: Committed) -> str:
        """Names logits that engines of one shape have in common."""
        shape = f"{member.rank}of{member.world_size}-{device_name(self._device)}"
        return f"{quote(member.group, safe='')}-{quote(shape, safe='')}-{event.incarnation}-{event.version}"


def device_name(device: Any) -> str:
    if device.type == "cpu":
        return "cpu"
    import torch

    return str(torch.get_device_module(device).get_device_name(device))
