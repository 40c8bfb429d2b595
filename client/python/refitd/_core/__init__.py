"""What trainers and engines share. Here: calls of the library during which signal handlers run, and pauses of the garbage collector.

Python runs signal handlers on the main thread only, between bytecodes: a main thread that blocks in C would leave Ctrl-C
unanswered. So the main thread lets a helper thread make the call, and waits for it. Other threads make the call themselves.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Generic, TypeVar


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the garbage collector, which would search the many new objects again and again: half the time of a large layout."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


T = TypeVar("T")

# How often the main thread looks for pending signals, since the system may give a signal to another thread.
SLICE_SECONDS = 0.2
# How long an interrupted wait, which cancels the call, still waits for the call to end.
CANCELLED_SECONDS = 5.0


class _Job(Generic[T]):
    """A call on a helper thread. `disown` gets a result for which nobody waits any more.

    The main thread waits by a plain lock: a signal handler that raises inside threading.Event would leave the event's lock taken.
    """

    def __init__(self, call: Callable[[], T], disown: Callable[[T], None] | None) -> None:
        self._call = call
        self._disown = disown
        self._lock = threading.Lock()
        self._begun = False
        self._abandoned = False
        self._finished = False
        self.taken = False  # whether the result, or the exception, has been handed out
        self._done = threading.Lock()  # taken until the call has ended
        self._done.acquire()
        self._result: T | None = None
        self._error: BaseException | None = None
        self.on_done: Callable[[], None] | None = None

    def run(self) -> None:
        """Makes the call on the helper thread, unless it was withdrawn."""
        with self._lock:
            if self._abandoned:
                return
            self._begun = True
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error
        with self._lock:
            self._finished = True
            abandoned = self._abandoned
        if abandoned:
            self._drop()
        self._done.release()
        if self.on_done is not None:
            self.on_done()

    def wait(self, seconds: float) -> bool:
        """Returns whether the call ended within `seconds`. Only a single thread waits."""
        return self._finished or self._done.acquire(timeout=seconds)

    def take(self) -> T:
        """Returns the result, or raises the call's exception. After the first line no signal handler runs in here."""
        self.taken = True
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def withdraw(self) -> bool:
        """Withdraws the call if it has not begun; returns whether it was withdrawn."""
        with self._lock:
            if not self._begun:
                self._abandoned = True
            return not self._begun

    def abandon(self) -> None:
        """Lets `disown` have the result, now or when the call ends."""
        with self._lock:
            dropped, self._abandoned = self._abandoned, True
            finished = self._finished
        if finished and not dropped:
            self._drop()

    def _drop(self) -> None:
        if self._error is None and self._disown is not None:
            self._disown(self._result)  # type: ignore[arg-type]


class _Helpers:
    """The threads that run jobs. They are kept for later jobs, and take them from a single queue."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job[Any]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0  # threads that wait for a job; an interrupted run() may leave the count too low

    def run(self, job: _Job[Any]) -> None:
        with self._lock:
            found = self._idle > 0
            self._idle -= found
        if not found:
            threading.Thread(target=self._serve, name="refitd", daemon=True).start()
        self._jobs.put(job)

    def _serve(self) -> None:
        while True:
            job = self._jobs.get()
            job.run()
            del job  # frees what the job holds before this thread waits again
            with self._lock:
                self._idle += 1


_helpers = _Helpers()


def _forget_threads() -> None:
    global _helpers
    _helpers = _Helpers()  # the child of a fork has none of its parent's threads


os.register_at_fork(after_in_child=_forget_threads)


def start(call: Callable[[], T], disown: Callable[[T], None] | None = None, on_done: Callable[[], None] | None = None) -> _Job[T]:
    """Runs `call` on a helper thread."""
    job = _Job(call, disown)
    job.on_done = on_done
    _helpers.run(job)
    return job


def interruptible(call: Callable[[], T], *, cancel: Callable[[], None] | None = None, disown: Callable[[T], None] | None = None) -> T:
    """Makes a call during which signal handlers run, and returns its result; on threads other than the main thread a plain call.

    Where a handler raises (KeyboardInterrupt), `cancel` is called, which should end the call soon; the exception goes on when
    the call has ended, or after CANCELLED_SECONDS. A call without `cancel` is left to its thread at once. `disown` gets a result
    that the caller does not get then.

    `call` itself is never interrupted. Steps that belong together, such as taking, using and releasing a handle, therefore belong
    into `call`, however short they are: a handler may raise wherever the main thread enters a function, also at
    the start of `__exit__`. The result is the caller's or `disown`'s: CPython runs no handler between take() and the statement
    that stores what interruptible() returns (from 3.11 on).
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    job = _Job(call, disown)
    try:
        _helpers.run(job)
        while not job.wait(SLICE_SECONDS):
            pass
        return job.take()
    except BaseException:
        if not job.taken:
            _give_up(job, cancel)
        raise


def ends_soon() -> None:
    """The `cancel` of a call that ends soon by itself, so that nothing is left half done: the wait for its end goes on."""


def _give_up(job: _Job[Any], cancel: Callable[[], None] | None) -> None:
    try:
        if cancel is not None and not job.withdraw():
            _cancel(job, cancel)
    finally:
        job.abandon()


def _cancel(job: _Job[Any], cancel: Callable[[], None]) -> None:
    """Cancels the call again and again until it has ended, for CANCELLED_SECONDS at most: at first there may be nothing to cancel."""
    deadline = time.monotonic() + CANCELLED_SECONDS
    cancel()
    while not job.wait(SLICE_SECONDS) and time.monotonic() < deadline:
        cancel()


async def awaited(call: Callable[[], T], *, cancel: Callable[[], None] | None = None, disown: Callable[[T], None] | None = None) -> T:
    """The result of a blocking call, awaited. A cancelled task cancels the call as `interruptible` does."""
    loop = asyncio.get_running_loop()

    def set_in_loop(event: asyncio.Event) -> None:
        try:
            loop.call_soon_threadsafe(event.set)
        except RuntimeError:
            job.abandon()  # the loop is closed: nobody waits

    done, cancelled = asyncio.Event(), asyncio.Event()
    job = start(call, disown, lambda: set_in_loop(done))
    try:
        await done.wait()
    except asyncio.CancelledError:
        try:
            if cancel is not None and not job.withdraw():
                start(partial(_cancel, job, cancel), None, lambda: set_in_loop(cancelled))
                await cancelled.wait()
        except asyncio.CancelledError:
            pass  # cancelled again: the call is left to its thread
        finally:
            job.abandon()
        raise
    return job.take()
