"""Errors of refitd: one class a gRPC status, all of them `refitd.Error`."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """A gRPC status code."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Error(Exception):
    """The exception that every call of refitd raises when it fails; the subclass follows `status`.

    `status`: the gRPC status.
    `culprit`: who or what caused the failure, as far as the message names it: "tensor 'w'", "parameter 'w'",
    "module 'm'", "trainer rank 3", "engine a rank 0", "instance a", "process 1" (of a launcher's), "daemon at PATH", or the name of an
    argument or file; else None.
    `dirty`: of the end of an update: True where weights of engines may be torn, so that these engines serve nothing until the next
    commit; False where every engine still holds the version before. None where the message does not tell: it is not about an
    update's end, or the answer was lost, and then engines may be dirty.
    """

    status: Status = Status.UNKNOWN

    def __init__(self, message: str, *, culprit: str | None = None, dirty: bool | None = None) -> None:
        super().__init__(message)
        self.culprit = culprit
        self.dirty = dirty


class Cancelled(Error):
    """The call was cancelled before it was answered."""

    status = Status.CANCELLED


class Unknown(Error):
    """The daemon or a library failed in a way that has no status."""

    status = Status.UNKNOWN


class InvalidArgument(Error, ValueError):
    """An argument is wrong in itself; nothing was changed."""

    status = Status.INVALID_ARGUMENT


class DeadlineExceeded(Error, TimeoutError):
    """The call's own wait ran out; the message names who was waited for."""

    status = Status.DEADLINE_EXCEEDED


class NotFound(Error):
    """There is no such group, version or update."""

    status = Status.NOT_FOUND


class AlreadyExists(Error):
    """The group, member or update exists already, and differs."""

    status = Status.ALREADY_EXISTS


class PermissionDenied(Error):
    """The caller has no right to do this."""

    status = Status.PERMISSION_DENIED


class ResourceExhausted(Error):
    """A limit or a pool is used up."""

    status = Status.RESOURCE_EXHAUSTED


class FailedPrecondition(Error):
    """The state or a layout disagrees with the call: the message names the tensor, rank or member."""

    status = Status.FAILED_PRECONDITION


class UpdateAborted(Error):
    """The update was lost; `dirty` says whether weights of engines may be torn."""

    status = Status.ABORTED


class OutOfRange(Error):
    """An index or version is outside what exists."""

    status = Status.OUT_OF_RANGE


class Unimplemented(Error, NotImplementedError):
    """This machine, daemon or library can't do what was asked."""

    status = Status.UNIMPLEMENTED


class Internal(Error):
    """A defect of refitd."""

    status = Status.INTERNAL


class Unavailable(Error):
    """The daemon is draining, gone, or can't be reached."""

    status = Status.UNAVAILABLE


class DataLoss(Error):
    """Verification found bytes that differ from those sent."""

    status = Status.DATA_LOSS


class Unauthenticated(Error):
    """The caller could not prove who it is."""

    status = Status.UNAUTHENTICATED


class Closed(FailedPrecondition):
    """The trainer, engine, update, slot or region was closed before the call."""


class Forked(FailedPrecondition):
    """The handle belongs to the parent of this process, which was forked; open a new handle in the child."""


class StagingWarning(UserWarning):
    """Tensors lie outside refitd's regions and are therefore copied at every refit."""


_SUBCLASSES: tuple[type[Error], ...] = (
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    UpdateAborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
)
_BY_STATUS = {kind.status: kind for kind in _SUBCLASSES}


def subclass_of(status: Status) -> type[Error]:
    """The exception class of a status other than OK."""
    return _BY_STATUS[status]
