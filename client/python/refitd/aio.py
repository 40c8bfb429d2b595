"""The asyncio forms of classes with blocking methods: `refitd.aio.Trainer`, `refitd.aio.Engine`, `refitd.aio.Update`.

    async with await refitd.aio.Engine.attach("policy", instance="vllm-0") as engine:
        await engine.register({name: parameter for name, parameter in model.named_parameters()})
        async for event in engine: ...

Blocking calls run on threads of refitd, never in the event loop or its executor. Cancelling a task that waits for an update's call
gives the update up: the CancelledError goes on when the call has ended, or after 5 s. An event that came while its task was
cancelled is not lost: the task that asks next gets it. `.member` is the member itself, for properties and methods that don't block.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

from . import engine, trainer
from ._core import awaited
from .engine import Event, Inbox, Weights
from .errors import Closed, DeadlineExceeded, Error
from .trainer import Update as Open, UpdateResult

T = TypeVar("T")
Member = TypeVar("Member")
Form = TypeVar("Form")
P = ParamSpec("P")


def _formed(call: Callable[P, Coroutine[Any, Any, T]], form: Callable[[T], Form]) -> Callable[P, Coroutine[Any, Any, Form]]:
    """The same call with its result in an asyncio form."""

    @functools.wraps(call)
    async def formed(*arguments: P.args, **named: P.kwargs) -> Form:
        return form(await call(*arguments, **named))

    return formed


def _attaching(kind: Callable[P, Member], close: Callable[[Member], None]) -> Callable[P, Coroutine[Any, Any, Member]]:
    """A coroutine function that attaches by a member's class, with the arguments and errors of the class."""

    async def attach(*arguments: P.args, **named: P.kwargs) -> Member:
        return await awaited(functools.partial(kind, *arguments, **named), disown=close)

    return attach


def _awaiting(
    method: Callable[Concatenate[Member, P], T], cancel: Callable[..., None] | None = None, disown: Callable[[T], None] | None = None
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The method of a member, awaited. `cancel`: gets the call's arguments where its task is cancelled. `disown`: gets a result for
    which nobody waits."""

    @functools.wraps(method)
    async def call(form: Any, /, *arguments: P.args, **named: P.kwargs) -> T:
        member: Member = form.member
        cancelled = None if cancel is None else functools.partial(cancel, member, *arguments, **named)
        return await awaited(functools.partial(method, member, *arguments, **named), cancel=cancelled, disown=disown)

    return call


def _cancel_update(member: Open, *_: object, **__: object) -> None:
    member._cancel()


def _cancel_version(member: trainer.Trainer, version: int, **_: object) -> None:
    member._cancel(version)


class Update:
    """An open update: `async with await trainer.update(9) as update: await update.push(name, tensor)`. See refitd.Update."""

    def __init__(self, member: Open) -> None:
        self.member = member

    @property
    def result(self) -> UpdateResult | None:
        """The result of commit or refit; None before."""
        return self.member.result

    push = _awaiting(Open.push, cancel=_cancel_update)
    flush = _awaiting(Open.flush, cancel=_cancel_update)
    commit = _awaiting(Open.commit, cancel=_cancel_update)
    refit = _awaiting(Open.refit, cancel=_cancel_update)
    abort = _awaiting(Open.abort)

    async def __aenter__(self) -> Update:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.member.ended:
            return
        try:
            if error is None:
                await (self.refit() if self.member._with_layout else self.commit())
            else:
                await self.abort(f"{type(error).__name__}: {error}"[:400])
        except Error:
            if error is None:
                raise
        finally:
            await awaited(self.member.close)


class _Attached:
    """The asyncio form of a member that is attached already."""

    member: Any

    async def close(self) -> None:
        """Does what close() of the member does."""
        await awaited(self.member.close)

    async def __aenter__(self: Form) -> Form:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


class Trainer(_Attached):
    """A trainer rank. Its methods are those of refitd.Trainer, awaited; cancelling refit or update gives the update up."""

    def __init__(self, member: trainer.Trainer) -> None:
        """`member`: an attached member; attach() makes one."""
        self.member = member

    attach = staticmethod(_formed(_attaching(trainer.Trainer, trainer.Trainer.close), lambda member: Trainer(member)))
    register = _awaiting(trainer.Trainer.register)
    register_layout = _awaiting(trainer.Trainer.register_layout)
    refit = _awaiting(trainer.Trainer.refit, cancel=_cancel_version)
    rollback = _awaiting(trainer.Trainer.rollback)
    release = _awaiting(trainer.Trainer.release)
    get_update = _awaiting(trainer.Trainer.get_update)
    update = _formed(_awaiting(trainer.Trainer.update, cancel=_cancel_version, disown=Open.close), Update)


class Engine(_Attached):
    """An engine rank. Its methods are those of refitd.Engine, awaited; `async for event in engine` ends with close()."""

    def __init__(self, member: engine.Engine) -> None:
        """`member`: an attached member; attach() makes one."""
        self.member = member
        self._inbox: Inbox | None = None

    attach = staticmethod(_formed(_attaching(engine.Engine, engine.Engine.close), lambda member: Engine(member)))
    register = _awaiting(engine.Engine.register)
    register_layout = _awaiting(engine.Engine.register_layout)
    restore = _awaiting(engine.Engine.restore)
    processed = _awaiting(engine.Engine.processed)
    ready = _awaiting(engine.Engine.ready)
    ack = _awaiting(engine.Engine.ack)
    fail = _awaiting(engine.Engine.fail)

    async def next(self, timeout_seconds: float | None = None) -> Event:
        """Does what refitd.Engine.next does. Any number of tasks may wait: they get events in the order in which they asked."""
        event = await self._next(timeout_seconds)
        if event is None:
            raise DeadlineExceeded(f"{self.member.label}: no event within {timeout_seconds} s")
        return event

    async def _next(self, timeout_seconds: float | None) -> Event | None:
        loop = asyncio.get_running_loop()
        if self._inbox is None or self._inbox.loop is not loop:
            self._inbox = Inbox(loop, self.member)
        return await self._inbox.next(timeout_seconds)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            try:
                event = await self._next(None)
            except Closed:
                return
            if event is not None:
                yield event

    @property
    def weights(self) -> Weights:
        """The weights' state: see refitd.Engine.weights."""
        return Weights(self.member.weights)

    @property
    def version(self) -> int | None:
        """The version installed here: see refitd.Engine.version."""
        version: int | None = self.member.version
        return version
