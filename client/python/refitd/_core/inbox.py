"""Hands an engine's events to the asyncio tasks that wait for them: one thread reads, however many tasks wait."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Optional

from .events import Event
from .waiting import start

Taken = tuple[int, Optional[Event]]  # an event with its number; no event: the time was over


class _Waiter:
    def __init__(self, loop: asyncio.AbstractEventLoop, deadline: float | None) -> None:
        self.future: asyncio.Future[Taken] = loop.create_future()
        self.deadline = deadline

    def expire(self) -> None:
        if not self.future.done():
            self.future.set_result((0, None))


class Inbox:
    """The tasks of one event loop that wait for an engine's events, served in the order in which they asked.

    Events come in their order also where tasks are cancelled: the next event is not read before the last has been received, or
    has been put back because its task was cancelled. All methods run on the loop's thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[threading.Event, threading.Event | None, float | None], Taken],
        restore: Callable[[Taken], None],
    ) -> None:
        """`take` blocks for the next event, until its time is over or its first argument was set. `restore` puts an event back."""
        self.loop = loop
        self._take = take
        self._restore = restore
        self._waiting: deque[_Waiter] = deque()
        self._receiver: _Waiter | None = None  # has been given an event that its task has not seen yet
        self._gone: threading.Event | None = None  # is set to end the reading that runs; None: none runs

    async def next(self, timeout_seconds: float | None) -> Event | None:
        """The next event, or None after `timeout_seconds`."""
        deadline = None if timeout_seconds is None else self.loop.time() + timeout_seconds
        waiter = _Waiter(self.loop, deadline)
        timer = None
        # Where no other task waits, the reading that begins below is for this task alone, and ends by itself at the deadline.
        if deadline is not None and self._waiting:
            timer = self.loop.call_at(deadline, waiter.expire)
        self._waiting.append(waiter)
        self._read()
        try:
            return (await waiter.future)[1]
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self._restore(waiter.future.result())
            raise
        finally:
            if timer is not None:
                timer.cancel()
            self._leave(waiter)

    def _leave(self, waiter: _Waiter) -> None:
        if self._receiver is waiter:
            self._receiver = None
        elif waiter in self._waiting:
            self._waiting.remove(waiter)
        if self._waiting:
            self._read()
        elif self._gone is not None:
            self._gone.set()

    def _read(self) -> None:
        if self._gone is not None or self._receiver is not None:
            return
        deadlines = [waiter.deadline for waiter in self._waiting if waiter.deadline is not None]
        timeout = max(min(deadlines) - self.loop.time(), 0.0) if deadlines else None
        self._gone = threading.Event()
        start(partial(self._run, self._gone, timeout))

    def _run(self, gone: threading.Event, timeout: float | None) -> None:
        """Takes one event, on a thread of its own."""
        try:
            taken, error = self._take(gone, None, timeout), None
        except Exception as raised:
            taken, error = (0, None), raised
        try:
            self.loop.call_soon_threadsafe(self._deliver, taken, error)
        except RuntimeError:  # the loop is closed: nobody waits in it
            self._restore(taken)

    def _deliver(self, taken: Taken, error: Exception | None) -> None:
        self._gone = None
        self._drop_done()
        if error is not None:
            if self._waiting:
                self._waiting.popleft().future.set_exception(error)
        elif taken[1] is None:
            for waiter in self._waiting:
                if waiter.deadline is not None and waiter.deadline <= self.loop.time():
                    waiter.expire()
            self._drop_done()
        elif self._waiting:
            self._receiver = self._waiting.popleft()
            self._receiver.future.set_result(taken)
        else:
            self._restore(taken)
        if self._waiting:
            self._read()

    def _drop_done(self) -> None:
        self._waiting = deque(waiter for waiter in self._waiting if not waiter.future.done())
