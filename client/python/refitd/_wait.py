"""Waiting for calls of the library in such a way that signal handlers run meanwhile.

Python runs signal handlers on the main thread only, between bytecodes: a main thread that blocks in C would leave Ctrl-C
unanswered. There, a blocking call runs on a helper thread and the main thread waits for it. Other threads make the call
themselves.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

# The main thread looks for pending signals so often, for the case that the system gave a signal to another thread.
SLICE_SECONDS = 0.2
# After an interruption, the call is cancelled and its end is waited for so long at most.
CANCELLED_SECONDS = 5.0


class _Job(Generic[T]):
    """A call on a helper thread. `disown` gets the result that nobody waits for any more."""

    def __init__(self, call: Callable[[], T], disown: Callable[[T], None] | None) -> None:
        self._call = call
        self._disown = disown
        self._lock = threading.Lock()
        self._abandoned = False
        self._finished = False
        self._done = threading.Event()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.on_done: Callable[[], None] | None = None

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._finished = True
            abandoned = self._abandoned
        if abandoned:
            self._drop()
        self._done.set()
        if self.on_done is not None:
            self.on_done()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def take(self) -> T:
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def abandon(self) -> None:
        with self._lock:
            self._abandoned = True
            finished = self._finished
        if finished:
            self._drop()

    def _drop(self) -> None:
        if self._error is None and self._disown is not None:
            self._disown(self._result)  # type: ignore[arg-type]


_idle: list[queue.SimpleQueue[_Job[Any]]] = []


def _forget_threads() -> None:
    _idle.clear()  # the child of a fork has none of its parent's threads


os.register_at_fork(after_in_child=_forget_threads)


def _serve(jobs: queue.SimpleQueue[_Job[Any]]) -> None:
    while True:
        job = jobs.get()
        job.run()
        del job  # with what it holds
        _idle.append(jobs)


def start(call: Callable[[], T], disown: Callable[[T], None] | None = None, on_done: Callable[[], None] | None = None) -> _Job[T]:
    """Runs `call` on a helper thread, which is kept for later calls."""
    job = _Job(call, disown)
    job.on_done = on_done
    try:
        jobs = _idle.pop()
    except IndexError:
        jobs = queue.SimpleQueue()
        threading.Thread(target=_serve, args=(jobs,), name="refitd", daemon=True).start()
    jobs.put(job)
    return job


def interruptible(
    call: Callable[[], T], *, cancel: Callable[[], None] | None = None, disown: Callable[[T], None] | None = None
) -> T:
    """The result of a blocking call, during which signal handlers run.

    Where a handler raises (KeyboardInterrupt), `cancel` is called, which should end the call soon; the exception goes on when
    the call has ended, or after CANCELLED_SECONDS. A call without `cancel` is left to its thread at once. `disown` is given the
    result that nobody gets then.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    job = start(call, disown)
    try:
        while not job.wait(SLICE_SECONDS):
            pass
    except BaseException:
        try:
            if cancel is not None:
                cancel()
                job.wait(CANCELLED_SECONDS)
        finally:
            job.abandon()
        raise
    return job.take()


async def awaited(
    call: Callable[[], T], *, cancel: Callable[[], None] | None = None, disown: Callable[[T], None] | None = None
) -> T:
    """The result of a blocking call, awaited. A cancelled task cancels the call as `interruptible` does."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def tell() -> None:
        try:
            loop.call_soon_threadsafe(done.set)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    job = start(call, disown, tell)
    try:
        await done.wait()
    except asyncio.CancelledError:
        try:
            if cancel is not None:
                start(cancel)
                await asyncio.wait_for(done.wait(), CANCELLED_SECONDS)
        except (asyncio.TimeoutError, asyncio.CancelledError):
            pass
        finally:
            job.abandon()
        raise
    return job.take()
