"""Errors of refitd: one class a gRPC status, all of them `refitd.Error`."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
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


# The roles of suspects, by the library's numbers.
ROLES = ("", "trainer", "engine", "daemon", "operator")


@dataclass(frozen=True)
class Suspect:
    """Who is held to have caused a failure, or was waited for. What is not known is "" or None.

    `role`: one of ROLES. `daemon`: its id, else its address; of a member, the daemon that it is attached to. `instance`: an engine's; "" for one
    that never attached.
    `rank`: None for a daemon, and for an instance as a whole. `pid`: on the daemon's machine.
    """

    role: str
    daemon: str = ""
    instance: str = ""
    rank: int | None = None
    pid: int | None = None

    def __str__(self) -> str:
        rank = "" if self.rank is None else f" rank {self.rank}"
        if self.role == "engine":
            if not self.instance:
                return "an engine"
            return f"engine {self.instance}{rank}" if rank else f"instance {self.instance}"
        if self.role == "daemon":
            return f"daemon {self.daemon}"
        return "an operator" if self.role == "operator" else f"{self.role}{rank}"


@dataclass(frozen=True)
class Failure:
    """What the library reports of a failure beside status and text; see Error for the fields."""

    suspects: tuple[Suspect, ...] = ()
    suspect_count: int = 0
    dirty: bool | None = None
    dirty_instances: tuple[str, ...] = ()
    dirty_count: int = 0
    tensor: str | None = None
    field: str | None = None
    version: int | None = None
    retriable: bool = False

    @property
    def culprit(self) -> str | None:
        """The tensor, else the likeliest suspect, else the field, in the form that Error.culprit has."""
        if self.tensor is not None:
            return f"tensor '{self.tensor}'"
        return str(self.suspects[0]) if self.suspects else self.field


def escaped(text: str, keep: str = "") -> str:
    """The text in a form that is safe on a terminal and in a log: control characters, marks that change the direction of writing and
    separators of lines are written out, as in "\\x1b" and "\\u202e". `keep`: characters that stay."""
    if text.isprintable():
        return text
    return "".join(c if c in keep or unicodedata.category(c) not in _UNPRINTED else c.encode("unicode_escape").decode() for c in text)


# Control characters, formats (marks of direction among them), surrogates, separators of lines and of paragraphs.
_UNPRINTED = ("Cc", "Cf", "Cs", "Zl", "Zp")


class Error(Exception):
    """The exception that every call of refitd raises when it fails; the subclass follows `status`.

    Programs decide by these fields and by the class. The text is for people: it may have parts that trainers and engines wrote, and may be cut.

    `status`: the gRPC status.
    `culprit`: who or what caused the failure, as far as it is known: "tensor 'w'", "parameter 'w'", "module 'm'", "trainer rank 3",
    "engine a rank 0", "instance a", "an engine" (none attached), "process 1" (of a launcher's), "daemon NAME", or the name of an argument or file; else None.
    `suspects`: who may have caused the failure, or did not answer, the likeliest first; `suspect_count` counts also those that are not
    named (more than 8).
    `dirty`: how an update ended: True where weights of engines may be torn, so that these engines serve nothing until the next
    commit; False where every engine still holds the version before. None where it is not known: the failure is not an update's end, or
    the answer was lost, and then engines may be dirty.
    `dirty_instances`: the engines' instances that are dirty; `dirty_count` counts also those that are not named (more than 16).
    `tensor`: the first tensor that the failure is about; `field`: the field or argument that was refused; `version`: of the update.
    None: there is none.
    `retriable`: whether the same call may succeed later, because the cause may pass. After a lost update, call with the next version.
    """

    status: Status = Status.UNKNOWN

    def __init__(
        self,
        message: str,
        *,
        culprit: str | None = None,
        dirty: bool | None = None,
        dirty_instances: Sequence[str] = (),
        dirty_count: int | None = None,
        suspects: Sequence[Suspect] = (),
        suspect_count: int | None = None,
        tensor: str | None = None,
        field: str | None = None,
        version: int | None = None,
        retriable: bool = False,
    ) -> None:
        super().__init__(escaped(message, keep="\n"))
        self.suspects = tuple(suspects)
        self.suspect_count = len(self.suspects) if suspect_count is None else suspect_count
        self.dirty = dirty
        self.dirty_instances = tuple(dirty_instances)
        self.dirty_count = len(self.dirty_instances) if dirty_count is None else dirty_count
        self.tensor = tensor
        self.field = field
        self.version = version
        self.retriable = retriable
        self.culprit = Failure(self.suspects, tensor=tensor, field=field).culprit if culprit is None else culprit


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


_BY_STATUS = {kind.status: kind for kind in Error.__subclasses__()}  # Closed and Forked are no direct subclasses


def subclass_of(status: Status) -> type[Error]:
    """The exception class of a status other than OK."""
    return _BY_STATUS[status]
