"""Handles of the C library that no call can use after they were freed, or in a forked child; statuses as exceptions."""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from types import TracebackType

from . import abi as _abi
from ..errors import ROLES, Closed, Error, Failure, Forked, Status, Suspect, escaped, subclass_of

_NOTHING = Failure()

_generation = 0  # the number of forks between the first import of refitd and this process
_attached = False  # whether this process has made a handle
_forked_from_user = False  # whether a parent of this process had made a handle before the fork


def _after_fork() -> None:
    global _attached, _forked_from_user, _generation
    _generation += 1
    _forked_from_user = _forked_from_user or _attached
    _attached = False


os.register_at_fork(after_in_child=_after_fork)


def error_of(status: int, message: str, context: str = "", failure: Failure = _NOTHING) -> Error:
    """The exception for a status other than OK. `context` says whose call it was, before the library's own message."""
    try:
        kind = subclass_of(Status(status))
    except ValueError:
        kind = Error
    return kind(escaped(f"{context}: {message}" if context else message), **vars(failure))


def last_failure() -> Failure:
    """What the library knows of the failure that its last call on this thread told of."""
    raw = _abi.sized(_abi.refit_failure)
    if _abi.library().refit_last_failure(ctypes.byref(raw)) != 0:
        return _NOTHING
    return Failure(
        suspects=tuple(_suspect(raw.suspects[i]) for i in range(raw.suspects_named)),
        suspect_count=raw.suspect_count,
        dirty={_abi.WEIGHTS_LEFT_CLEAN: False, _abi.WEIGHTS_LEFT_DIRTY: True}.get(raw.weights_left),
        dirty_instances=tuple(_text(raw.dirty_instances[i]) for i in range(raw.dirty_named)),
        dirty_count=raw.dirty_count,
        tensor=_text(raw.tensor) or None,
        field=_text(raw.field) or None,
        version=None if raw.version < 0 else raw.version,
        retriable=bool(raw.may_be_retried),
    )


def _suspect(raw: _abi.refit_suspect) -> Suspect:
    role = ROLES[raw.role] if 0 <= raw.role < len(ROLES) else ""
    return Suspect(role, _text(raw.daemon), _text(raw.instance), None if raw.rank < 0 else raw.rank, raw.pid or None)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def shown(raw: bytes | None) -> str:
    """A text of the library, which may hold what others said, as a terminal may show it."""
    return escaped(_text(raw))


def check(status: int, context: str = "") -> None:
    """Raises what the library says of its last call on this thread, unless `status` is OK."""
    if status != 0:
        failure = last_failure()
        raise error_of(status, _text(_abi.library().refit_last_error()), context, failure)


def refuse_fork() -> None:
    """Raises Forked where a parent of this process had used the library before it forked."""
    if _forked_from_user:
        raise Forked(
            "this process was forked from one that had used refitd, whose threads it lacks: start it with "
            "multiprocessing's 'spawn' method, or attach only after the fork"
        )


class Handle:
    """A handle of the library, freed once, when it is closed and no call uses it any more.

    `with handle as pointer:` gives the pointer for one call; it raises Closed after close(), and Forked in a forked child, where
    nothing is ever freed: the parent's handle is not the child's. Thread-safe. `with` and close() belong into a call of
    refitd._core.waiting.interruptible: a signal handler that raises in between would leave a user counted. The handle is then freed with
    the object.
    """

    __slots__ = ("pointer", "_free", "what", "_lock", "_users", "_closed", "_generation", "_gone", "_freed", "__weakref__")

    def __init__(self, pointer: int, free: Callable[[int], None], what: str) -> None:
        global _attached
        _attached = True
        self.pointer = pointer
        self._free = free
        self.what = what
        self._lock = threading.Lock()
        self._users = 0
        self._closed = False
        self._generation = _generation
        self._gone = False  # freed, or being freed
        self._freed = threading.Lock()  # taken until it is freed
        self._freed.acquire()
        _open_handles.add(self)

    def __enter__(self) -> int:
        with self._lock:
            self.check_open()
            self._users += 1
        return self.pointer

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._users -= 1
            last = self._closed and self._users == 0
        if last:
            self._free_now()

    def check_open(self) -> None:
        """Raises Closed or Forked where no call could use it."""
        if self._generation != _generation:
            raise Forked(f"{self.what} belongs to the parent of this process, which was forked")
        if self._closed:
            raise Closed(f"{self.what} is closed")

    @property
    def closed(self) -> bool:
        return self._closed or self._generation != _generation

    @property
    def in_use(self) -> bool:
        return self._users > 0

    def close(self, wait_seconds: float = 0.0) -> None:
        """No call begins after it. Frees at once where no call runs; else the last of them does, which is waited for."""
        if self._generation != _generation:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            idle = first and self._users == 0
        if idle:
            self._free_now()
        elif first and wait_seconds > 0 and self._freed.acquire(timeout=wait_seconds):
            self._freed.release()

    def _free_now(self) -> None:
        if not self._gone:
            self._gone = True
            self._free(self.pointer)
            self._freed.release()

    def __del__(self) -> None:
        # There is nothing to free where __init__ failed. Nothing refers to this handle any more, so no call uses it, whatever was counted.
        if hasattr(self, "_freed") and self._generation == _generation:
            self._closed = True
            self._free_now()


_open_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def _close_all() -> None:
    """Detaches in good order when the interpreter ends. A handle that a thread still uses ends with the process."""
    for handle in list(_open_handles):
        if not handle.in_use:
            handle.close()


atexit.register(_close_all)


def texts(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    """A C array of strings; ctypes keeps the bytes alive with it."""
    return (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()
