"""Torch tensors read by librefit itself, which takes tenths of a microsecond a tensor where Python would take microseconds.

DLPack (1.2 and later) puts a table of C functions at torch.Tensor, by which librefit asks a tensor for its memory, shape, strides
and dtype. Where that table, or something else that is needed, is missing, everything here says so, and the callers ask in Python.
"""

from __future__ import annotations

import ctypes
import os
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

from . import abi as _abi
from ..layout.records import TensorSpec
from .lists import TensorList
from .native import check

_used: bool | None = None  # whether librefit reads tensors; None: not tried yet
# Types whose tensors have memory of their own (a DTensor has not). Kept by type, because it takes long to find out by asking a tensor for an
# attribute that it lacks.
plain: set[type] = set()


def reads_tensors() -> bool:
    """Whether librefit reads tensors. It is tried when torch is there."""
    global _used
    if _used is None and "torch" in sys.modules:
        _used = _begin(sys.modules["torch"])
    return bool(_used)


def _begin(torch: Any) -> bool:
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
    python = _abi.sized(
        _abi.refit_python,
        exchange=pointer_of(capsule, b"dlpack_exchange_api"),
        is_negated=is_negated,
        storage=storage,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        implementation_at=at,
        storage_at=storage_at,
        **_functions(),
    )
    if _abi.locked_library().refit_python_use(ctypes.byref(python)) != 0:
        return False
    for kind in (torch.Tensor, torch.nn.Parameter, *plain):
        add_plain(kind, added=True)
    return True


def _places(torch: Any) -> tuple[int, int]:
    """Byte offsets of the pointer to the implementation in a tensor's object, and of the pointer to the storage in the implementation.

    An offset is 0 where the pointer is not where it has long been.

    librefit asks the processor for that memory early, which changes nothing but time.
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
    """torch's C functions that tell of a tensor's memory, which take less time than its methods; none where torch has others."""
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
        _abi.locked_library().refit_python_add_type(kind)


class Packer:
    """Packs tensors into buckets, which are slots that were leased; see client/refit_python.h. Guarded by the interpreter lock.

    `push(name, tensor)` is the fast way: it puts a torch tensor that was learned, whole, contiguous and on the host, into the
    bucket, and returns False, with nothing done, for any other.
    """

    __slots__ = ("pointer", "push", "_free", "_memory", "__weakref__")

    def __init__(self, like: Packer | None = None) -> None:
        library = _abi.locked_library()
        out = ctypes.c_void_p()
        check(library.refit_packer_new(None if like is None else like.pointer, ctypes.byref(out)))
        self.pointer: int | None = out.value
        self._memory: Any = None  # of the bucket, kept while librefit may write to it
        self._free = weakref.finalize(self, library.refit_packer_free, self.pointer)
        self._free.atexit = False
        self.push: Callable[[str, Any], bool] = self._never
        if reads_tensors():
            self.push = library.refit_python_pusher(self.pointer)

    @staticmethod
    def _never(name: str, tensor: Any) -> bool:
        return False

    def learn(self, spec: TensorSpec) -> int:
        """Makes a tensor known to the packer, in place of the tensor that had its name. Returns the number of the name, which stays the same."""
        tensors, out = TensorList([spec]), ctypes.c_int64()
        check(_abi.locked_library().refit_packer_learn(self.pointer, tensors.pointer, ctypes.byref(out)))
        return out.value

    def begin(self, pointer: int | None, nbytes: int, owner: Any) -> None:
        """Begins an empty bucket in memory that `owner` keeps. `pointer`: None where librefit can't copy to it."""
        check(_abi.locked_library().refit_packer_begin(self.pointer, pointer, nbytes))
        self._memory = owner

    @property
    def count(self) -> int:
        """The number of tensors, or parts of tensors, in the bucket."""
        return int(_abi.locked_library().refit_packer_count(self.pointer))

    def room(self, number: int) -> int:
        """Bytes that are left for the tensor in the bucket; -1: the bucket has the tensor, or there is no bucket."""
        return int(_abi.locked_library().refit_packer_room(self.pointer, number))

    def reserve(self, number: int, nbytes: int) -> int:
        """Reserves `nbytes` bytes and returns their offset. The caller copies to them, and then calls add()."""
        out = ctypes.c_int64()
        check(_abi.locked_library().refit_packer_reserve(self.pointer, number, nbytes, ctypes.byref(out)))
        return out.value

    def add(self, number: int, start: int, count: int, offset: int) -> None:
        """Lists elements [start, start + count) of the tensor, which are at `offset`."""
        check(_abi.locked_library().refit_packer_add(self.pointer, number, start, count, offset))

    def end(self) -> None:
        """Ends the bucket: nothing is put into it any more."""
        _abi.locked_library().refit_packer_end(self.pointer)
        self._memory = None


class TensorAddress:
    """Tells where a tensor's memory is now. `current()` is the tensor; `fixed`: that tensor, where it is always the same."""

    __slots__ = ("current", "fixed")

    def __init__(self, current: Callable[[], Any], fixed: Any = None) -> None:
        self.current = current
        self.fixed = fixed

    def __call__(self) -> int:
        return int(self.current().data_ptr())


class Addresses:
    """Functions that tell addresses, and the addresses that they told first. Every refit asks all of them whether anything moved."""

    def __init__(self, asked: Sequence[Callable[[], int]], told: Sequence[int]) -> None:
        self._all = list(asked), list(told)
        self._fast = reads_tensors()
        if not self._fast:
            return
        kind = sys.modules["torch"].Tensor
        pairs = list(zip(asked, told))
        fixed = [(a.fixed, at) for a, at in pairs if isinstance(a, TensorAddress) and isinstance(a.fixed, kind)]
        current = [(a.current, at) for a, at in pairs if isinstance(a, TensorAddress) and not isinstance(a.fixed, kind)]
        self._fixed = [tensor for tensor, _ in fixed], array("q", [at for _, at in fixed])
        self._ids = ids(self._fixed[0])
        self._current = [ask for ask, _ in current], array("q", [at for _, at in current])
        rest = [(a, at) for a, at in pairs if not isinstance(a, TensorAddress)]
        self._rest = [a for a, _ in rest], [at for _, at in rest]

    def moved(self) -> bool:
        """Whether any function tells another address now."""
        if not self._fast:
            asked, told = self._all
            return [now() for now in asked] != told
        if _first_moved(self._ids, self._fixed[1]):
            return True
        currents, at = self._current
        if currents:
            tensors = [current() for current in currents]
            if not all(isinstance(tensor, sys.modules["torch"].Tensor) for tensor in tensors) or _first_moved(ids(tensors), at):
                return True
        rest, told = self._rest
        return [now() for now in rest] != told


def ids(objects: list[Any]) -> array[int]:
    """The addresses of objects, which the caller keeps alive."""
    return array("Q", map(id, objects))


def _first_moved(ids: array[int], addresses: array[int]) -> bool:
    count = len(addresses)
    first = _abi.locked_library().refit_python_first_moved(ids.buffer_info()[0], addresses.buffer_info()[0], count)
    return bool(first < count)
