"""A plain torch or transformers model as an engine: the smallest whole example of what an adapter does.

    import refitd

    with refitd.engine_loop(model, group="policy", instance="worker-0") as weights:
        while True:
            with weights.use() as version:      # None: whatever the model came with
                outputs = model.generate(**batch)

Updates happen between uses: `use` waits while one runs, an update waits for the uses under way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from . import _devices, regions
from .engine import Engine
from .errors import Closed, DeadlineExceeded, Error, FailedPrecondition
from .events import Aborted, Committed, Draining, Lost, Prepare, Reattached, Weights


class EngineLoop:
    """The engine that `engine_loop` returns. Thread-safe: any number of threads may be within `use`."""

    def __init__(self, model: Any, group: str, instance: str, *, names: Any = None, clean: bool = True, **options: Any) -> None:
        self._changed = threading.Condition()
        self._uses = 0
        self._preparing = False
        self._good = clean
        self._version: int | None = None
        self._error: Exception | None = None
        parameters = dict(model.state_dict(keep_vars=True)) if names is None else dict(names)
        self._kind = _devices.kind_of_tensors(parameters.values())
        if self._kind is None:
            regions.adopt(model)
            options.setdefault("device", _devices.HOST)
        self.engine = Engine(group, instance=instance, dirty=not clean, **options)
        try:
            self.engine.register(parameters)
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

    # ---- the thread ----

    def _stopped(self) -> bool:
        return self._error is not None or self.engine.closed

    def _holds(self, version: int) -> bool:
        return self._good and not self._preparing and self._version is not None and self._version >= version

    def _run(self) -> None:
        try:
            for event in self.engine:
                self._take(event)
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
                self._good = self._good and event.weights is Weights.GOOD
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
            if self._kind is not None:
                self._kind.synchronize_all()
            event.ready()
        except Closed:
            raise
        except Error:
            pass  # the update ended before; Aborted is the next event


def engine_loop(model: Any, *, group: str, instance: str, names: Any = None, clean: bool = True, **options: Any) -> EngineLoop:
    """Attaches a torch module as one rank of an engine, and answers events on a thread until close().

    `names`: by the checkpoint's names, the tensors to fill, of any shape and dtype that trainers send; None: the module's state dict,
    whose CPU tensors move into memory that the daemon can map (refitd.adopt). `clean`: whether the model's weights may be used before
    the first version. `options`: as of refitd.Engine (`rank`, `world_size`, `socket`, ...).

    Raises what refitd.Engine and Engine.register raise, naming the tensor. Parameters must keep their memory: don't call
    `model.to(...)` afterwards.
    """
    return EngineLoop(model, group, instance, names=names, clean=clean, **options)
