"""A plain torch or transformers model as an engine: the smallest whole example of what an adapter does.

    import refitd

    with refitd.EngineLoop(model, group="policy", instance="worker-0") as weights:
        while True:
            with weights.use() as version:      # None: whatever the model came with
                outputs = model.generate(**batch)

Updates happen between uses: `use` waits while one runs, an update waits for the uses under way.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .._core.events import Aborted, Committed, Draining, Lost, Prepare, Reattached, Weights
from .._core.member import Connect
from ..engine import Engine
from ..errors import Closed, DeadlineExceeded, Error, FailedPrecondition, InvalidArgument
from ..layout import places, devices
from ..layout.memory import adopt
from .proof import PROOFS, Probe, Proof, Prover, token_ids, tokens_for


# How often a loop without an event looks whether the model's tensors still have the memory that is registered.
LOOK_SECONDS = 1.0
# The same, where registering anew failed, as it does while an update runs.
RETRY_SECONDS = 0.02


class EngineLoop:
    """A torch module as one rank of an engine, which answers events on a thread until close().

    Thread-safe: any number of threads may be within `use`. Tensors are known by their names in the module: one that was replaced, or
    whose memory moved, is brought back into the registered memory (on the host) or registered anew between updates. An update is refused,
    naming the tensor, where neither was possible (P11).
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
            group: As of refitd.Engine, with `instance`, `rank`, `world_size`, `trainer_identity`, `socket` and `connect`.
            names: By the checkpoint's names, the tensors to fill, of any shape and dtype that trainers send; None: the module's state
                dict, whose CPU tensors move into memory that the daemon can map (refitd.adopt).
            clean: Whether the model's weights may be used before the first version.
            probe: Runs the model on 64 fixed tokens, or inputs like these, and returns its output; None: that of a language model of
                transformers is known. With one, the forward is proved to read what is registered, before this returns
                (refitd.serving.proof): a parameter that it does not read is refused by name.
            proof: "report" tells in `EngineLoop.proof` what is unproved, "require" refuses it, "off" runs nothing.
            device: Where the weights are, as of refitd.Engine; None: where the model's tensors are.

        Raises:
            Error: What refitd.Engine and Engine.register raise, naming the tensor.
            FailedPrecondition: The forward does not read a parameter, or is unproved where that is refused.
        """
        self._changed = threading.Condition()
        self._uses = 0
        self._preparing = False
        self._good = clean
        self._version: int | None = None
        self._error: Exception | None = None
        self._model = model
        self._views = None if names is None else places.Views(model, names)
        self._refusal = ""  # why what the model has now was not registered
        parameters = self._tensors()
        self._kind = devices.kind_of_tensors(parameters.values())
        if device is None:
            device = devices.HOST if self._kind is None else devices.device_of(parameters.values())
        self.engine = Engine(
            group,
            instance=instance,
            rank=rank,
            world_size=world_size,
            trainer_identity=trainer_identity,
            dirty=not clean,
            device=device,
            socket=socket,
            connect=connect,
        )
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
            return self._version if self._good else None

    @contextmanager
    def use(self, timeout_seconds: float = 600.0) -> Iterator[int | None]:
        """A block that reads the weights, which are one whole version within. Yields the version.

        Raises DeadlineExceeded where no whole version is there in time, FailedPrecondition after close(), and what ended the lease
        while the weights were not whole. A block must not begin another: an update between the two would wait for the outer one.
        """
        with self._changed:
            there = self._changed.wait_for(lambda: self._stopped() or (self._good and not self._preparing), timeout_seconds)
            if not (self._good and not self._preparing):
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
        if self._kind is None:
            adopt(self._model)
        tensors = self._tensors()
        self.engine.register(tensors)
        self._places = places.Places(self._model, tensors.keys() if self._views is None else self._views.held_names)
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
        """What in the model is not as it was registered; "": nothing."""
        changed = self._places.changed()
        return places.describe(changed, self.engine.label)[0] + self._refusal if changed else ""

    def _register_anew(self) -> None:
        """Registers what the model has now, where it is not what was registered. Where that can't be, because an update has begun or because
        the model's tensors are others than trainers send, every update is refused with the reason until it can (P11)."""
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
        return self._good and not self._preparing and self._version is not None and self._version >= version

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
            self._preparing = False
            if isinstance(event, Committed):
                self._good, self._version = True, event.version
            elif isinstance(event, Aborted):
                self._good = self._good and not event.dirty
            elif isinstance(event, (Lost, Reattached)):
                self._good = self._good and event.weights is Weights.CLEAN
            self._changed.notify_all()

    def _prepare(self, event: Prepare) -> None:
        with self._changed:
            self._preparing = True
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
    """How a language model of transformers is run on fixed tokens; None for other modules."""
    config = getattr(model, "config", None)
    vocabulary: Any = getattr(config, "vocab_size", None)
    device = next((tensor.device for tensor in model.parameters()), None)
    if not isinstance(vocabulary, int) or device is None or not hasattr(model, "get_input_embeddings"):
        return None

    def run() -> Any:
        return model(input_ids=token_ids(vocabulary, tokens, device)[None], use_cache=False).logits

    return run
