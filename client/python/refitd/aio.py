"""The asyncio forms of what blocks: `refitd.aio.Trainer`, `refitd.aio.Engine`, `refitd.aio.Update`.

    async with await refitd.aio.Engine.attach("policy", instance="vllm-0") as engine:
        await engine.register({name: parameter for name, parameter in model.named_parameters()})
        async for event in engine: ...

Blocking calls run on threads of refitd, never in the event loop or its executor. Cancelling a task that waits for an update's call
gives the update up: the CancelledError goes on when the call has ended, or after 5 s. An event that came while its task was
cancelled is not lost: the next to ask gets it. Properties and methods that don't block are those of the member: `.member`.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from . import engine as _engine
from . import trainer as _trainer
from ._core import update as _update
from ._core.inbox import Inbox
from ._core.waiting import awaited
from .errors import Closed, DeadlineExceeded, Error
from ._core.events import Event, Part, Weights

T = TypeVar("T")


class Update:
    """An open update: `async with await trainer.update(9) as update: await update.push(name, tensor)`. See refitd.Update."""

    def __init__(self, member: _update.Update, with_layout: bool) -> None:
        self.member = member
        self._with_layout = with_layout

    @property
    def result(self) -> _update.UpdateResult | None:
        """The result of commit or refit; None before."""
        return self.member.result

    async def push(self, name: str, tensor: Any, *, shape: Sequence[int] | None = None, start: int = 0, dtype: Any = None) -> None:
        """Does what refitd.Update.push does. The tensor must not change before it returns."""
        await self._run(functools.partial(self.member.push, name, tensor, shape=shape, start=start, dtype=dtype))

    async def flush(self) -> None:
        """Does what refitd.Update.flush does."""
        await self._run(self.member.flush)

    async def commit(self, tensor_count: int | None = None) -> _update.UpdateResult:
        """Does what refitd.Update.commit does."""
        return await self._run(functools.partial(self.member.commit, tensor_count))

    async def refit(self) -> _update.UpdateResult:
        """Does what refitd.Update.refit does."""
        return await self._run(self.member.refit)

    async def abort(self, reason: str = "the trainer gave the update up") -> None:
        """Does what refitd.Update.abort does."""
        await awaited(functools.partial(self.member.abort, reason))

    async def _run(self, call: Callable[[], T]) -> T:
        return await awaited(call, cancel=self.member._cancel)

    async def __aenter__(self) -> Update:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.member.ended:
            return
        try:
            if error is None:
                await (self.refit() if self._with_layout else self.commit())
            else:
                await self.abort(f"{type(error).__name__}: {error}"[:400])
        except Error:
            if error is None:
                raise
        finally:
            await awaited(self.member.close)


class Trainer:
    """A trainer rank. Its methods are those of refitd.Trainer, awaited."""

    def __init__(self, member: _trainer.Trainer) -> None:
        """`member`: one that is attached already; else see attach()."""
        self.member = member

    @classmethod
    async def attach(cls, group: str, **options: Any) -> Trainer:
        """Attaches; arguments and errors as of refitd.Trainer."""
        made = await awaited(functools.partial(_trainer.Trainer, group, **options), disown=_trainer.Trainer.close)
        return cls(made)

    async def register(self, shards: Any, *, dtype: Any = None, **options: Any) -> None:
        """Does what refitd.Trainer.register does."""
        await awaited(functools.partial(self.member.register, shards, dtype=dtype, **options))

    async def register_shards(self, shards: Sequence[Any], **options: Any) -> None:
        """Does what refitd.Trainer.register_shards does."""
        await awaited(functools.partial(self.member.register_shards, shards, **options))

    async def register_layout(self, *arguments: Any) -> None:
        """Does what refitd.Trainer.register_layout does."""
        await awaited(functools.partial(self.member.register_layout, *arguments))

    async def refit(self, version: int, **options: Any) -> _update.UpdateResult:
        """Does what refitd.Trainer.refit does. Cancelling gives the update up."""
        call = functools.partial(self.member.refit, version, **options)
        return await awaited(call, cancel=functools.partial(self.member._cancel, version))

    async def update(self, version: int, **options: Any) -> Update:
        """Does what refitd.Trainer.update does. Cancelling gives the update up."""
        call = functools.partial(self.member.update, version, **options)
        cancel = functools.partial(self.member._cancel, version)
        made = await awaited(call, cancel=cancel, disown=_update.Update.close)
        return Update(made, bool(options.get("with_layout", False)))

    async def get_update(self, version: int) -> str:
        """Does what refitd.Trainer.get_update does."""
        return await awaited(functools.partial(self.member.get_update, version))

    async def close(self) -> None:
        """Does what refitd.Trainer.close does."""
        await awaited(self.member.close)

    async def __aenter__(self) -> Trainer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Engine:
    """An engine rank. Its methods are those of refitd.Engine, awaited; `async for event in engine` ends with close()."""

    def __init__(self, member: _engine.Engine) -> None:
        """`member`: one that is attached already; else see attach()."""
        self.member = member
        self._inbox: Inbox | None = None

    @classmethod
    async def attach(cls, group: str, *, instance: str, **options: Any) -> Engine:
        """Attaches; arguments and errors as of refitd.Engine."""
        call = functools.partial(_engine.Engine, group, instance=instance, **options)
        return cls(await awaited(call, disown=_engine.Engine.close))

    async def register(self, layout: Any, **options: Any) -> None:
        """Does what refitd.Engine.register does."""
        await awaited(functools.partial(self.member.register, layout, **options))

    async def register_layout(self, *arguments: Any) -> None:
        """Does what refitd.Engine.register_layout does."""
        await awaited(functools.partial(self.member.register_layout, *arguments))

    async def next(self, timeout_seconds: float | None = None) -> Event:
        """Does what refitd.Engine.next does. Any number of tasks may wait: they get events in the order in which they asked."""
        event = await self._next(timeout_seconds)
        if event is None:
            raise DeadlineExceeded(f"{self.member.label}: no event within {timeout_seconds} s")
        return event

    async def _next(self, timeout_seconds: float | None) -> Event | None:
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = Inbox(loop, self.member._take, self.member._restore)
        return await self._inbox.next(timeout_seconds)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            try:
                event = await self._next(None)
            except Closed:
                return
            if event is not None:
                yield event

    async def ready(self, version: int) -> None:
        """Does what refitd.Engine.ready does."""
        await awaited(functools.partial(self.member.ready, version))

    async def ack(self, part: Part) -> None:
        """Does what refitd.Engine.ack does."""
        await awaited(functools.partial(self.member.ack, part))

    async def fail(self, version: int, reason: str) -> None:
        """Does what refitd.Engine.fail does."""
        await awaited(functools.partial(self.member.fail, version, reason))

    @property
    def weights(self) -> Weights:
        """The weights' state, as refitd.Engine.weights tells it."""
        return self.member.weights

    @property
    def version(self) -> int | None:
        """The version installed here, as refitd.Engine.version tells it."""
        return self.member.version

    async def close(self) -> None:
        """Does what refitd.Engine.close does."""
        await awaited(self.member.close)

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
