"""The C interface of librefit.so (client/refit.h, refit_python.h), declared for ctypes, what this package uses of it; and the handles that it gives.

ctypes lets go of the interpreter lock during each call of library(), and keeps it during those of locked_library(). The library is loaded on
first use; `REFIT_LIBRARY` names another file than the one that comes with the package.

Each compiled part is looked for in this order: the file that its environment variable names (REFIT_LIBRARY, REFITD_BINARY, REFITCTL_BINARY), a
checkout's build, the file that this package carries in _bin (a wheel does, a checkout does not), and the system's own: whatever the dynamic loader
finds, or the first program of the name on PATH.

The package's commands `refitd` and `refitctl` are scripts that call `run_refitd` and `run_refitctl`. Those replace the
process by the program, so that its process id, signals, exit code and arguments are the caller's own.

librefit reads torch tensors itself, in tenths of a microsecond a tensor. DLPack (1.2 and later) puts a table of C functions at torch.Tensor, by which
librefit asks a tensor for its memory, shape, strides and dtype. Where that table, or something else that is needed, is missing, `reads_tensors` says
so, and the callers ask in Python.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
import weakref
from array import array
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p, py_object
from functools import cache, partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TypeVar

from ..errors import ROLES, Closed, Error, Failure, Forked, Status, Suspect, escaped, subclass_of
from . import ends_soon, interruptible


_IN_PACKAGE = Path(__file__).parents[1] / "_bin"
_BUILT = Path(__file__).resolve().parents[4] / "bazel-bin"
_LIBRARY = "librefit.so"
# Each compiled part has a variable of the environment that names its file, and a place in a checkout's build.
_PARTS = {
    _LIBRARY: ("REFIT_LIBRARY", "client/librefit.so"),
    "refitd": ("REFITD_BINARY", "daemon/refitd"),
    "refitctl": ("REFITCTL_BINARY", "daemon/refitctl/refitctl"),
}
_ELF_MAGIC = b"\x7fELF"
# A shell exits with this status for a command that it does not find.
_NOT_FOUND = 127


def find(part: str) -> str:
    """The file of a compiled part; of librefit.so the plain name, where only the system's loader can tell.

    Raises FileNotFoundError where its variable names no file, or where there is no such program.
    """
    variable, built = _PARTS[part]
    path = os.environ.get(variable)
    if path:
        if not os.path.isfile(path):
            raise FileNotFoundError(f"{variable} names no file: {path}")
        return path
    for file in (_BUILT / built, _IN_PACKAGE / part):
        if file.is_file():
            return str(file)
    if part == _LIBRARY:
        return part
    for folder in os.get_exec_path():
        path = os.path.join(folder, part)
        if os.access(path, os.X_OK) and _is_elf(path):  # this package's own command is a script of that name
            return path
    raise FileNotFoundError(f"no program {part}: {variable} is not set, this package carries none ({_IN_PACKAGE}), and PATH has none")


def _is_elf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_ELF_MAGIC)) == _ELF_MAGIC
    except OSError:
        return False


def run_refitd() -> NoReturn:
    """The command `refitd`: becomes the daemon, with this process's arguments."""
    _become("refitd")


def run_refitctl() -> NoReturn:
    """The command `refitctl`: becomes the program, with this process's arguments."""
    _become("refitctl")


def _become(name: str) -> NoReturn:
    try:
        path = find(name)
        # Python ignores these two signals, and a program inherits what is ignored.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        # The daemon looks for NCCL among the packages of the environment that this variable names.
        if sys.prefix != sys.base_prefix:
            os.environ.setdefault("VIRTUAL_ENV", sys.prefix)
        os.execv(path, [name, *sys.argv[1:]])
    except OSError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(_NOT_FOUND)


# refit_tensor.count
WHOLE = -1
CUDA_IPC_HANDLE_BYTES = 64

# refit_engine_options.delivery
DELIVERIES = {"in_place": 0, "loader": 1}
CATCH_UP_DEFAULT = 0
CATCH_UP_NEVER = 1

# refit_begin_options.broadcast
BROADCASTS = {"auto": 0, "direct": 1, "chain": 2, "symmetric": 3, "nccl": 4}

# refit_derivation
DERIVED_KINDS = {
    "cast": 1,
    "fp8_block": 2,
    "fp8_block_reciprocal": 3,
    "fp8_block_pow2": 4,
    "fp8_channel": 5,
    "fp8_block_cuda": 6,
    "fp8_block_inductor": 7,
    "mxfp8": 8,
}
DERIVED_ROLES = {"values": 1, "scales": 2}

# refit_failure.weights_left
WEIGHTS_CLEAN = 1
WEIGHTS_DIRTY = 2

# refit_event.kind
EVENT_NOTHING = 0
EVENT_PREPARE = 1
EVENT_PART = 2
EVENT_COMMITTED = 3
EVENT_ABORTED = 4
EVENT_DRAINING = 5
EVENT_LOST = 6
EVENT_REATTACHED = 7
EVENT_STAGED = 8


def _fields(**kinds: Any) -> list[tuple[str, Any]]:
    """Fields of a C structure, in their order."""
    return list(kinds.items())


class refit_tensor(ctypes.Structure):
    _fields_ = _fields(name=c_char_p, dtype=c_int32, dim_count=c_int32, dims=c_void_p, start=c_int64, count=c_int64)


class refit_group_spec(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, trainer_ranks=c_int32, min_instances=c_int32, slot_bytes=c_int64, slots=c_int32, engine_only_count=c_int32,
        engine_only_tensors=POINTER(c_char_p), unwanted_count=c_int32, unwanted_tensors=POINTER(c_char_p), max_lag=c_int64,
        encrypted_data=c_int32, hold_previous_seconds=c_int64, keep_seconds=c_int32,
    )  # fmt: skip


class refit_connect_options(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, socket=c_char_p, group=c_char_p, spec=POINTER(refit_group_spec), wait_ms=c_int64, call_margin_ms=c_int64,
        client=c_char_p, coordinator=c_char_p, reattach_ms=c_int64, silence_ms=c_int64, device=c_char_p, cuda_library=c_char_p,
        address=c_char_p, tls_certificate=c_char_p, tls_key=c_char_p, tls_roots=c_char_p, tls_server=c_char_p, insecure=c_int64,
    )  # fmt: skip


class refit_piece(ctypes.Structure):
    _fields_ = _fields(tensor=c_int64, offset=c_void_p, extent=c_void_p, strides=c_void_p, region=c_void_p, byte_offset=c_int64)


class refit_derivation(ctypes.Structure):
    _fields_ = _fields(tensor=c_int64, source=c_void_p, kind=c_int32, role=c_int32)


class refit_trainer_options(ctypes.Structure):
    _fields_ = _fields(struct_size=c_size_t, connect=POINTER(refit_connect_options), rank=c_int32, world_size=c_int32)


class refit_begin_options(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, version=c_int64, duration_ms=c_int64, verification=c_int32, evict_late=c_int32, tensor_count=c_int64,
        total_bytes=c_int64, broadcast=c_int32, without_layout=c_int32, note=c_char_p, hold=c_int32,
    )  # fmt: skip


class refit_commit_result(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, version=c_int64, bytes=c_int64, seconds=c_double, instances=c_int32, committed=c_int32, pushed_bytes=c_int64 * 5,
        left_out_tensors=c_int64, left_out_bytes=c_int64,
    )  # fmt: skip


class refit_refit_options(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, version=c_int64, duration_ms=c_int64, verification=c_int32, evict_late=c_int32, hold=c_int32
    )  # fmt: skip


class refit_engine_options(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, connect=POINTER(refit_connect_options), instance=c_char_p, rank=c_int32, world_size=c_int32, delivery=c_int32,
        has_manifest=c_int32, manifest=c_void_p, manifest_count=c_int64, has_held_version=c_int32, held_version=c_int64, dirty=c_int32,
        held_origin=c_uint64, catch_up=c_int32, held_owner=c_char_p, trainer_identity=c_char_p, held_digest=c_uint64,
        restore=c_int32, has_held_content=c_int32, held_content=c_int64, wants_staged=c_int32,
    )  # fmt: skip


class refit_view(ctypes.Structure):
    _fields_ = _fields(tensor=refit_tensor, data=c_void_p)


class refit_event(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, kind=c_int32, dirty=c_int32, version=c_int64, remaining_ms=c_int64, tensor_count=c_int64, update_id=c_uint64,
        part=c_int64, view_count=c_int64, views=POINTER(refit_view), reason=c_char_p, weights=c_int32, incarnation=c_uint64, owner=c_char_p,
        digest=c_uint64, flip=c_int32, content=c_int64,
    )  # fmt: skip


class refit_suspect(ctypes.Structure):
    _fields_ = _fields(role=c_int32, rank=c_int32, pid=c_int64, daemon=c_char_p, instance=c_char_p)


class refit_failure(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, status=c_int32, weights_left=c_int32, what=c_char_p, suspects=POINTER(refit_suspect), suspects_named=c_int64,
        suspect_count=c_int64, dirty_instances=POINTER(c_char_p), dirty_named=c_int64, dirty_count=c_int64, tensor=c_char_p, field=c_char_p,
        version=c_int64, may_be_retried=c_int32,
    )  # fmt: skip


class refit_python(ctypes.Structure):
    _fields_ = _fields(
        struct_size=c_size_t, exchange=c_void_p, is_negated=c_void_p, storage=c_void_p, storage_bytes=c_void_p, storage_offset=c_void_p,
        implementation_at=c_int64, storage_at=c_int64, get_storage_bytes=c_void_p, get_storage_offset=c_void_p, get_address=c_void_p,
        get_dtype=c_void_p, get_dim=c_void_p, get_sizes=c_void_p, get_strides=c_void_p,
    )  # fmt: skip


STRUCTURES: tuple[type[ctypes.Structure], ...] = (
    refit_tensor, refit_group_spec, refit_connect_options, refit_piece, refit_derivation, refit_trainer_options, refit_begin_options,
    refit_commit_result, refit_refit_options, refit_engine_options, refit_view, refit_event, refit_suspect, refit_failure, refit_python,
)  # fmt: skip

# void done(void* argument, refit_status status, const char* message)
refit_done = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_char_p)

_OUT = POINTER(c_void_p)
_STATUS = c_int

# Each function's result and arguments. Handles are c_void_p.
FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "refit_version": (c_char_p, ()),
    "refit_last_error": (c_char_p, ()),
    "refit_last_failure": (_STATUS, (POINTER(refit_failure),)),
    "refit_region_data": (c_void_p, (c_void_p,)),
    "refit_region_bytes": (c_int64, (c_void_p,)),
    "refit_region_free": (None, (c_void_p,)),
    "refit_replace_group": (_STATUS, (POINTER(refit_connect_options),)),
    "refit_trainer_attach": (_STATUS, (POINTER(refit_trainer_options), _OUT)),
    "refit_trainer_free": (None, (c_void_p,)),
    "refit_trainer_health": (_STATUS, (c_void_p,)),
    "refit_trainer_reattachments": (c_int32, (c_void_p,)),
    "refit_trainer_group_version": (_STATUS, (c_void_p, POINTER(c_int64))),
    "refit_trainer_get_update": (_STATUS, (c_void_p, c_int64, POINTER(c_int32))),
    "refit_trainer_abort": (_STATUS, (c_void_p, c_int64, c_char_p)),
    "refit_trainer_rollback": (_STATUS, (c_void_p, c_int64, POINTER(c_int64))),
    "refit_trainer_release_previous": (_STATUS, (c_void_p,)),
    "refit_trainer_add_memfd": (_STATUS, (c_void_p, c_int, c_int64, _OUT)),
    "refit_trainer_add_cuda_block": (_STATUS, (c_void_p, c_char_p, c_int64, _OUT)),
    "refit_trainer_add_cuda_vmm_at": (_STATUS, (c_void_p, c_int, c_int64, c_uint64, _OUT)),
    "refit_trainer_begin": (_STATUS, (c_void_p, POINTER(refit_begin_options), _OUT)),
    "refit_update_free": (None, (c_void_p,)),
    "refit_update_instances": (c_int32, (c_void_p,)),
    "refit_update_leasable_slots": (c_int32, (c_void_p,)),
    "refit_update_lease_slot": (_STATUS, (c_void_p, c_int64, _OUT)),
    "refit_slot_data": (c_void_p, (c_void_p,)),
    "refit_slot_bytes": (c_int64, (c_void_p,)),
    "refit_slot_free": (None, (c_void_p,)),
    # `done` is c_void_p, to which refit_done objects are cast.
    "refit_packer_push": (_STATUS, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "refit_update_flush": (_STATUS, (c_void_p,)),
    "refit_update_commit": (_STATUS, (c_void_p, c_int64, POINTER(refit_commit_result))),
    "refit_update_left_out": (_STATUS, (c_void_p, c_int32, POINTER(c_char_p))),
    "refit_trainer_left_out": (_STATUS, (c_void_p, c_int32, POINTER(c_char_p))),
    "refit_update_outcome": (_STATUS, (c_void_p, c_int32, POINTER(c_char_p), POINTER(c_int32), POINTER(c_char_p))),
    "refit_update_abort": (_STATUS, (c_void_p, c_char_p)),
    "refit_update_lost": (_STATUS, (c_void_p,)),
    "refit_trainer_register": (_STATUS, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)),
    "refit_trainer_refit": (_STATUS, (c_void_p, POINTER(refit_refit_options), POINTER(refit_commit_result))),
    "refit_trainer_outcome": (_STATUS, (c_void_p, c_int32, POINTER(c_char_p), POINTER(c_int32), POINTER(c_char_p))),
    "refit_update_refit": (_STATUS, (c_void_p, POINTER(refit_commit_result))),
    "refit_engine_attach": (_STATUS, (POINTER(refit_engine_options), _OUT)),
    "refit_engine_free": (None, (c_void_p,)),
    "refit_derive": (_STATUS, (c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p)),
    "refit_arena_new": (_STATUS, (POINTER(refit_connect_options), c_int64, c_int32, _OUT)),
    "refit_arena_data": (c_void_p, (c_void_p,)),
    "refit_arena_bytes": (c_int64, (c_void_p,)),
    "refit_arena_back": (c_int32, (c_void_p,)),
    "refit_arena_map_back": (_STATUS, (c_void_p, _OUT)),
    "refit_arena_unmap_back": (None, (c_void_p,)),
    "refit_arena_free": (None, (c_void_p,)),
    "refit_engine_add_arena": (_STATUS, (c_void_p, c_void_p, _OUT)),
    "refit_engine_take_kept": (_STATUS, (c_void_p, c_int32, _OUT)),
    "refit_engine_add_memfd": (_STATUS, (c_void_p, c_int, c_int64, _OUT)),
    "refit_engine_add_cuda_block": (_STATUS, (c_void_p, c_char_p, c_int64, _OUT)),
    "refit_engine_add_cuda_vmm_at": (_STATUS, (c_void_p, c_int, c_int64, c_uint64, _OUT)),
    "refit_engine_register": (_STATUS, (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64)),
    "refit_engine_next": (_STATUS, (c_void_p, c_int64, POINTER(refit_event))),
    "refit_engine_processed": (_STATUS, (c_void_p, c_uint64)),
    "refit_engine_ready": (_STATUS, (c_void_p, c_int64, c_int64)),
    "refit_engine_ack": (_STATUS, (c_void_p, c_uint64, c_int64)),
    "refit_engine_fail": (_STATUS, (c_void_p, c_int64, c_char_p)),
    "refit_engine_hold": (_STATUS, (c_void_p, _OUT)),
    "refit_hold_free": (None, (c_void_p,)),
    "refit_engine_weights": (c_int32, (c_void_p,)),
    "refit_engine_reattachments": (c_int32, (c_void_p,)),
    "refit_engine_version": (_STATUS, (c_void_p, POINTER(c_int64))),
}

# These are called with the interpreter lock held: they are short, or work on Python's objects.
LOCKED_FUNCTIONS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "refit_packer_new": (_STATUS, (c_void_p, _OUT)),
    "refit_packer_free": (None, (c_void_p,)),
    "refit_packer_learn": (_STATUS, (c_void_p, c_void_p, POINTER(c_int64))),
    "refit_packer_begin": (_STATUS, (c_void_p, c_void_p, c_int64)),
    "refit_packer_count": (c_int64, (c_void_p,)),
    "refit_packer_room": (c_int64, (c_void_p, c_int64)),
    "refit_packer_reserve": (_STATUS, (c_void_p, c_int64, c_int64, POINTER(c_int64))),
    "refit_packer_add": (_STATUS, (c_void_p, c_int64, c_int64, c_int64, c_int64)),
    "refit_packer_end": (None, (c_void_p,)),
    "refit_python_watched": (py_object, (c_void_p,)),
    "refit_python_use": (_STATUS, (POINTER(refit_python),)),
    "refit_python_add_type": (None, (py_object,)),
    "refit_python_pusher": (py_object, (c_void_p,)),
    "refit_python_first_moved": (c_int64, (c_void_p, c_void_p, c_int64)),
    "refit_python_marks": (None, (c_void_p, c_void_p, c_int64)),
    "refit_python_first_changed": (c_int64, (c_void_p, c_void_p, c_int64)),
    "refit_python_first_rebound": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64)),
    "refit_python_first_altered": (c_int64, (c_void_p, c_void_p, c_void_p, c_int64)),
    "refit_python_watch_dicts": (c_int32, (c_void_p, c_int64, c_int32)),
    "refit_python_dict_changes": (c_int64, ()),
}

_Sized = TypeVar("_Sized", bound=ctypes.Structure)


def sized(kind: type[_Sized], **fields: Any) -> _Sized:
    """A structure that begins with struct_size, as its REFIT_..._INIT macro makes it, with `fields` set."""
    return kind(struct_size=ctypes.sizeof(kind), **fields)


@cache
def library() -> ctypes.CDLL:
    """librefit.so, with FUNCTIONS declared. Raises OSError where it can't be loaded."""
    return _load(ctypes.CDLL, FUNCTIONS)


@cache
def locked_library() -> ctypes.PyDLL:
    """librefit.so, with LOCKED_FUNCTIONS declared, whose calls keep the interpreter lock."""
    return _load(ctypes.PyDLL, LOCKED_FUNCTIONS)


def library_version() -> str:
    """refitd's version."""
    return str(library().refit_version().decode())


_Library = TypeVar("_Library", bound=ctypes.CDLL)


def _load(kind: type[_Library], functions: dict[str, tuple[Any, tuple[Any, ...]]]) -> _Library:
    loaded = kind(find(_LIBRARY))
    for name, (result, arguments) in functions.items():
        function = getattr(loaded, name)
        function.restype = result
        function.argtypes = list(arguments)
    return loaded


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
    """The exception for a status other than OK. `context`: whose call failed; it comes before the library's own message."""
    try:
        kind = subclass_of(Status(status))
    except ValueError:
        kind = Error
    return kind(escaped(f"{context}: {message}" if context else message), **vars(failure))


def last_failure() -> Failure:
    """The library's record of why its last call on this thread failed."""
    raw = sized(refit_failure)
    if library().refit_last_failure(ctypes.byref(raw)) != 0:
        return _NOTHING
    return Failure(
        suspects=tuple(_suspect(raw.suspects[i]) for i in range(raw.suspects_named)),
        suspect_count=raw.suspect_count,
        dirty={WEIGHTS_CLEAN: False, WEIGHTS_DIRTY: True}.get(raw.weights_left),
        dirty_instances=tuple(_text(raw.dirty_instances[i]) for i in range(raw.dirty_named)),
        dirty_count=raw.dirty_count,
        tensor=_text(raw.tensor) or None,
        field=_text(raw.field) or None,
        version=None if raw.version < 0 else raw.version,
        retriable=bool(raw.may_be_retried),
    )


def _suspect(raw: refit_suspect) -> Suspect:
    role = ROLES[raw.role] if 0 <= raw.role < len(ROLES) else ""
    return Suspect(role, _text(raw.daemon), _text(raw.instance), None if raw.rank < 0 else raw.rank, raw.pid or None)


def _text(raw: bytes | None) -> str:
    return (raw or b"").decode(errors="replace")


def shown(raw: bytes | None) -> str:
    """A text of the library in a form that is safe on a terminal: others may have written parts of it."""
    return escaped(_text(raw))


def check(status: int, context: str = "") -> None:
    """Raises the error of the library's last call on this thread, unless `status` is OK."""
    if status != 0:
        failure = last_failure()
        raise error_of(status, _text(library().refit_last_error()), context, failure)


def refuse_fork() -> None:
    """Raises Forked where a parent of this process had used the library before it forked."""
    if _forked_from_user:
        raise Forked(
            "this process was forked from one that had used refitd, whose threads it lacks: start it with "
            "multiprocessing's 'spawn' method, or attach only after the fork"
        )


_Result = TypeVar("_Result")


class Handle:
    """A handle of the library, freed once, when it is closed and no call uses it any more.

    `with handle as pointer:` gives the pointer for one call; it raises Closed after close(), and Forked in a forked child, which
    frees nothing, since the handle is the parent's. Thread-safe. `with` and close() belong into a call of
    refitd._core.interruptible: a signal handler that raises in between would leave a use counted, and the handle would be freed
    only with this object. `use()` may be called anywhere.
    """

    __slots__ = ("pointer", "_free", "what", "_lock", "_uses", "_closed", "_generation", "_gone", "_freed", "__weakref__")

    def __init__(self, pointer: int, free: Callable[[int], None], what: str) -> None:
        global _attached
        _attached = True
        self.pointer = pointer
        self._free = free
        self.what = what
        self._lock = threading.Lock()
        self._uses: list[tuple[int, object] | None] = []  # None: of a `with`; else the thread, and an object of the use's own
        self._closed = False
        self._generation = _generation
        self._gone = False  # freed, or being freed
        self._freed = threading.Lock()  # taken until it is freed
        self._freed.acquire()
        _open_handles.add(self)

    def use(self, call: Callable[[int], _Result]) -> _Result:
        """The result of a call that gets the pointer, on this thread. A signal handler may raise anywhere in it, but not inside C."""
        this = threading.get_ident(), object()
        try:
            result = call(self._begin(this))
            self._end(this)
        except BaseException:
            interruptible(partial(self._end, this), cancel=ends_soon)
            raise
        return result

    def _begin(self, use: tuple[int, object] | None) -> int:
        with self._lock:
            self.check_open()
            self._uses.append(use)
        return self.pointer

    def _end(self, use: tuple[int, object] | None) -> None:
        """Ends the use, unless it has ended."""
        with self._lock:
            if use in self._uses:
                self._uses.remove(use)
            last = self._closed and not self._uses
        if last:
            self._free_now()

    def __enter__(self) -> int:
        return self._begin(None)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._end(None)

    def check_open(self) -> None:
        """Raises Closed or Forked if the handle can't be used."""
        if self._generation != _generation:
            raise Forked(f"{self.what} belongs to the parent of this process, which was forked")
        if self._closed:
            raise Closed(f"{self.what} is closed")

    @property
    def closed(self) -> bool:
        return self._closed or self._generation != _generation

    @property
    def in_use(self) -> bool:
        return bool(self._uses)

    @property
    def used_here(self) -> bool:
        """Whether this thread is in a use(): then a signal handler runs, for which the use does not end."""
        return any(use is not None and use[0] == threading.get_ident() for use in self._uses)

    def close(self, wait_seconds: float = 0.0) -> None:
        """Lets no further call begin. Frees the handle at once if no call runs; else the last call frees it, for which this waits
        `wait_seconds`."""
        if self._generation != _generation:
            return
        with self._lock:
            first, self._closed = not self._closed, True
            idle = first and not self._uses
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
        # If __init__ failed, there is nothing to free. Nothing refers to this handle any more, so no call uses it, even if an interrupted
        # `with` left a use.
        if hasattr(self, "_freed") and self._generation == _generation:
            self._closed = True
            self._free_now()


_open_handles: weakref.WeakSet[Handle] = weakref.WeakSet()


def made_by(function: str, *arguments: Any, free: str, what: str, context: str = "") -> Handle:
    """Calls a C function that puts a new handle where its last argument points; returns the handle. `free`: the function that frees the
    handle; `what`: the handle's name in errors; `context`: as in check()."""
    out = c_void_p()
    check(getattr(library(), function)(*arguments, ctypes.byref(out)), context)
    assert out.value is not None
    return Handle(out.value, getattr(library(), free), what)


@cache
def watched(function: str) -> Callable[..., int]:
    """A function of three pointers as call(cancel, a, b, c), which takes addresses; see refit_python_watched. For the main thread."""
    made: Callable[..., int] = locked_library().refit_python_watched(getattr(library(), function))
    return made


def _close_all() -> None:
    """Closes handles in order when the interpreter ends. A handle that a thread still uses ends with the process."""
    for handle in list(_open_handles):
        if not handle.in_use:
            handle.close()


atexit.register(_close_all)


def texts(values: list[str]) -> ctypes.Array[ctypes.c_char_p]:
    """A C array of strings; ctypes keeps the bytes alive with it."""
    return (ctypes.c_char_p * len(values))(*[value.encode() for value in values])


def text(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


_used: bool | None = None  # whether librefit reads tensors; None: not tried yet
# Types whose tensors have memory of their own (a DTensor has not). Kept by type, because looking for a missing attribute of a tensor takes
# long.
plain: set[type] = set()


def reads_tensors() -> bool:
    """Whether librefit reads torch's tensors itself; this is tried once torch is imported."""
    global _used
    if _used is None and "torch" in sys.modules:
        _used = _begin(sys.modules["torch"])
    return bool(_used)


def _begin(torch: Any) -> bool:
    """Gives librefit what it needs to read torch's tensors; returns whether it can."""
    has_lock: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)
    if sys.implementation.name != "cpython" or not has_lock():
        return False
    try:
        capsule = torch.Tensor.__dlpack_c_exchange_api__
        methods = [torch.Tensor.is_neg, torch.Tensor.untyped_storage, torch.UntypedStorage.nbytes, torch.Tensor.storage_offset]
        pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
    except AttributeError:  # an older torch
        return False
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    is_negated, storage, storage_bytes, storage_offset = map(id, methods)
    at, storage_at = _places(torch)
    python = sized(
        refit_python,
        exchange=pointer_of(capsule, b"dlpack_exchange_api"),
        is_negated=is_negated,
        storage=storage,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        implementation_at=at,
        storage_at=storage_at,
        **_functions(),
    )
    if locked_library().refit_python_use(ctypes.byref(python)) != 0:
        return False
    for kind in (torch.Tensor, torch.nn.Parameter, *plain):
        add_plain(kind, added=True)
    return True


def _places(torch: Any) -> tuple[int, int]:
    """Byte offsets of the pointer to the implementation in a tensor's object, and of the pointer to the storage in the implementation.

    An offset is 0 where this torch has the pointer elsewhere. librefit prefetches the memory at these pointers, which changes nothing
    but time.
    """
    at = storage_at = object.__basicsize__
    tensor = torch.empty(1)
    try:
        if ctypes.c_void_p.from_address(id(tensor) + at).value != tensor._cdata:
            return 0, 0
        found = ctypes.c_void_p.from_address(tensor._cdata + storage_at).value
        return at, storage_at if found == tensor.untyped_storage()._cdata else 0
    except AttributeError:
        return 0, 0


def _functions() -> dict[str, int | None]:
    """torch's C functions that read where a tensor's memory is, faster than its methods; {} where this torch lacks any of them."""
    names = {
        "get_storage_bytes": "aoti_torch_get_storage_size",
        "get_storage_offset": "aoti_torch_get_storage_offset",
        "get_address": "aoti_torch_get_data_ptr",
        "get_dtype": "aoti_torch_get_dtype",
        "get_dim": "aoti_torch_get_dim",
        "get_sizes": "aoti_torch_get_sizes",
        "get_strides": "aoti_torch_get_strides",
    }
    try:
        torch = ctypes.CDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return {field: ctypes.cast(getattr(torch, name), ctypes.c_void_p).value for field, name in names.items()}
    except (OSError, AttributeError):
        return {}


def add_plain(kind: type, added: bool = False) -> None:
    """Notes that this type's tensors have memory of their own."""
    plain.add(kind)
    if added or _used:
        locked_library().refit_python_add_type(kind)


def ids(objects: list[Any]) -> array[int]:
    """The addresses of objects, which the caller keeps alive."""
    return array("Q", map(id, objects))
