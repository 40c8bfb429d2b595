"""Tensors and layouts as the library takes them: C lists, what librefit reads of torch tensors, and where the bytes of pushed values come from.

Lists are made in bulk: tens of thousands of entries take tens of milliseconds. librefit reads torch tensors itself, which takes tenths of a
microsecond a tensor where Python would take microseconds. DLPack (1.2 and later) puts a table of C functions at torch.Tensor, by which librefit
asks a tensor for its memory, shape, strides and dtype. Where that table, or something else that is needed, is missing, everything here says so,
and the callers ask in Python.
"""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import weakref
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter, index
from typing import Any, NamedTuple

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..layout.boxes import Box, TensorSpec
from ..layout.dtensor import is_dtensor
from ..layout.memory import DTYPES, DType, DeviceBytes, HostBytes, resolve
from . import native
from .native import Handle, check

_TENSOR = struct.Struct("=QiiQqq")
_PIECE = struct.Struct("=qQQQQq")
assert _TENSOR.size == ctypes.sizeof(native.refit_tensor) and _PIECE.size == ctypes.sizeof(native.refit_piece)

MAX_DIMENSIONS = 8


class Piece(NamedTuple):
    """A box of tensor `tensor` that lies in `region`, with byte_offset from the region's base."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    region: Handle
    byte_offset: int


class TensorList:
    """A C array of refit_tensor. `starts`, `counts`: of the elements of each; None: every tensor is whole."""

    def __init__(
        self, tensors: Sequence[TensorSpec], starts: Sequence[int] | None = None, counts: Sequence[int] | None = None
    ) -> None:
        self.count = len(tensors)
        names = bytearray()
        name_at: list[int] = []
        dims: list[int] = []
        dims_at: list[int] = []
        for tensor in tensors:
            name_at.append(len(names))
            names += tensor.name.encode()
            names.append(0)
            dims_at.append(len(dims))
            dims += tensor.shape
        self._names = ctypes.create_string_buffer(bytes(names), len(names) + 1)
        self._dims = array("q", dims or [0])
        name_base, dims_base = ctypes.addressof(self._names), self._dims.buffer_info()[0]
        packed = bytearray(_TENSOR.size * max(1, self.count))
        for i, tensor in enumerate(tensors):
            start = 0 if starts is None else starts[i]
            count = native.WHOLE if counts is None else counts[i]
            _TENSOR.pack_into(
                packed, i * _TENSOR.size, name_base + name_at[i], DTYPES[tensor.dtype].code, len(tensor.shape),
                dims_base + 8 * dims_at[i], start, count,
            )  # fmt: skip
        self._packed = (ctypes.c_char * len(packed)).from_buffer(packed)
        self.pointer = ctypes.addressof(self._packed)


class PieceList:
    """A C array of refit_piece. The regions' handles must stay open as long as it is used."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.count = len(pieces)
        numbers: list[int] = []
        at: list[int] = []
        for piece in pieces:
            at.append(len(numbers))
            numbers += piece.offset
            numbers += piece.extent
            numbers += piece.strides
        self._numbers = array("q", numbers or [0])
        base = self._numbers.buffer_info()[0]
        packed = bytearray(_PIECE.size * max(1, self.count))
        for i, piece in enumerate(pieces):
            bytes_a_list = 8 * len(piece.offset)
            first = base + 8 * at[i]
            _PIECE.pack_into(
                packed, i * _PIECE.size, piece.tensor, first, first + bytes_a_list, first + 2 * bytes_a_list,
                piece.region.pointer, piece.byte_offset,
            )  # fmt: skip
        self._packed = (ctypes.c_char * len(packed)).from_buffer(packed)
        self.pointer = ctypes.addressof(self._packed)


def numbers(values: Iterable[int]) -> array[int]:
    """A C array of int64; its address is buffer_info()[0]."""
    return array("q", values)


def check_name(name: str, whose: str) -> None:
    """Raises InvalidArgument for a name that C would read as another."""
    what = f"tensor {name!r}"
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"{what} of {whose}: the name is empty, no text, or has a null in it", culprit=what)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} of {whose}: the name is not UTF-8: {error}", culprit=what) from None


def integers(values: object) -> tuple[int, ...] | None:
    """A sequence's entries as int, whatever integers they are (numpy's too); None where it is none, or holds something else."""
    try:
        return tuple(map(index, values))  # type: ignore[call-overload]
    except TypeError:
        return None


def check_tensors(tensors: Sequence[TensorSpec], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for what the library could only refuse in worse words."""
    seen: set[str] = set()
    for tensor in tensors:
        what = f"tensor '{tensor.name}'"
        check_name(tensor.name, whose)
        if tensor.name in seen:
            raise InvalidArgument(f"{what} of {whose} is there twice", culprit=what)
        seen.add(tensor.name)
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(f"{what} of {whose}: dtype {tensor.dtype!r} is none of {', '.join(DTYPES)}", culprit=what)
        if integers(tensor.shape) is None:
            raise InvalidArgument(f"{what} of {whose}: shape {tensor.shape!r} is no sequence of integers", culprit=what)
        if len(tensor.shape) > MAX_DIMENSIONS or any(n < 0 for n in tensor.shape):
            raise InvalidArgument(
                f"{what} of {whose}: shape {tuple(tensor.shape)} has a negative or more than {MAX_DIMENSIONS} dimensions", culprit=what
            )


def check_boxes(tensors: Sequence[TensorSpec], boxes: Sequence[Box], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for a box outside of its tensor or of its memory."""
    for box in boxes:
        if not 0 <= box.tensor_index < len(tensors):
            raise InvalidArgument(f"a box of {whose} is of tensor {box.tensor_index} of {len(tensors)}")
        tensor = tensors[box.tensor_index]
        what = f"tensor '{tensor.name}'"
        rank = len(tensor.shape)
        if not len(box.offset) == len(box.extent) == len(box.strides) == rank:
            raise InvalidArgument(
                f"{what} of {whose} has {rank} dimensions, but its box has offset {box.offset}, extent {box.extent}, strides {box.strides}",
                culprit=what,
            )
        lowest = highest = 0
        for offset, extent, stride, size in zip(box.offset, box.extent, box.strides, tensor.shape):
            if offset < 0 or extent < 1 or offset + extent > size:
                raise InvalidArgument(
                    f"{what} of {whose}: the box at {box.offset} of {box.extent} elements is empty or beyond the shape {tensor.shape}",
                    culprit=what,
                )
            reach = (extent - 1) * stride
            if reach < 0:
                lowest += reach
            else:
                highest += reach
        itemsize = DTYPES[tensor.dtype].itemsize
        first, last = box.byte_offset + lowest * itemsize, box.byte_offset + (highest + 1) * itemsize
        if first < 0 or last > box.memory.nbytes:
            raise InvalidArgument(
                f"{what} of {whose}: the box takes bytes {first} to {last} of memory that has {box.memory.nbytes}", culprit=what
            )


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
    python = native.sized(
        native.refit_python,
        exchange=pointer_of(capsule, b"dlpack_exchange_api"),
        is_negated=is_negated,
        storage=storage,
        storage_bytes=storage_bytes,
        storage_offset=storage_offset,
        implementation_at=at,
        storage_at=storage_at,
        **_functions(),
    )
    if native.locked_library().refit_python_use(ctypes.byref(python)) != 0:
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
        native.locked_library().refit_python_add_type(kind)


class Packer:
    """Packs tensors into buckets, which are slots that were leased; see client/refit_python.h. Guarded by the interpreter lock.

    `push(name, tensor)` is the fast way: it puts a torch tensor that was learned, whole, contiguous and on the host, into the
    bucket, and returns False, with nothing done, for any other.
    """

    __slots__ = ("pointer", "push", "_free", "_memory", "__weakref__")

    def __init__(self, like: Packer | None = None) -> None:
        library = native.locked_library()
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
        check(native.locked_library().refit_packer_learn(self.pointer, tensors.pointer, ctypes.byref(out)))
        return out.value

    def begin(self, pointer: int | None, nbytes: int, owner: Any) -> None:
        """Begins an empty bucket in memory that `owner` keeps. `pointer`: None where librefit can't copy to it."""
        check(native.locked_library().refit_packer_begin(self.pointer, pointer, nbytes))
        self._memory = owner

    @property
    def count(self) -> int:
        """The number of tensors, or parts of tensors, in the bucket."""
        return int(native.locked_library().refit_packer_count(self.pointer))

    def room(self, number: int) -> int:
        """Bytes that are left for the tensor in the bucket; -1: the bucket has the tensor, or there is no bucket."""
        return int(native.locked_library().refit_packer_room(self.pointer, number))

    def reserve(self, number: int, nbytes: int) -> int:
        """Reserves `nbytes` bytes and returns their offset. The caller copies to them, and then calls add()."""
        out = ctypes.c_int64()
        check(native.locked_library().refit_packer_reserve(self.pointer, number, nbytes, ctypes.byref(out)))
        return out.value

    def add(self, number: int, start: int, count: int, offset: int) -> None:
        """Lists elements [start, start + count) of the tensor, which are at `offset`."""
        check(native.locked_library().refit_packer_add(self.pointer, number, start, count, offset))

    def end(self) -> None:
        """Ends the bucket: nothing is put into it any more."""
        native.locked_library().refit_packer_end(self.pointer)
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
    first = native.locked_library().refit_python_first_moved(ids.buffer_info()[0], addresses.buffer_info()[0], count)
    return bool(first < count)


class Source(NamedTuple):
    """A tensor to push. `copy(target, start, count)` copies elements [start, start + count) to `target`, which has room for them;
    the copy to a device may still be under way when it returns: `DeviceBytes` targets are synchronised by the caller."""

    dtype: DType
    shape: tuple[int, ...]
    elements: int
    # None: contiguous host memory at `pointer`, which is copied from there.
    copy: Callable[[HostBytes | DeviceBytes, int, int], None] | None
    pointer: int
    owner: Any


# torch.dtype to DType: asking a dictionary is much faster than resolve().
_torch_dtypes: dict[Any, DType] = {}

# Formats of the buffer protocol, native sizes.
_FORMATS = {
    ("d", 8): "float64",
    ("f", 4): "float32",
    ("e", 2): "float16",
    ("b", 1): "int8",
    ("B", 1): "uint8",
    ("c", 1): "uint8",
    ("?", 1): "bool",
    ("h", 2): "int16",
    ("i", 4): "int32",
    ("l", 4): "int32",
    ("l", 8): "int64",
    ("q", 8): "int64",
}


def is_torch(value: Any) -> bool:
    """Whether it is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def source_of(name: str, value: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Source:
    """The source for `value`. `dtype` and `shape` say what raw bytes hold; other values must have that dtype themselves.

    Raises InvalidArgument, naming the tensor, for what is no tensor or of another dtype.
    """
    if isinstance(value, Source):  # refitd.layout.casting pushes a Source that casts
        return value
    torch = sys.modules.get("torch")
    if is_torch(value):
        source = _of_torch(torch, name, value)
    else:
        source = _of_other(torch, name, value)
    if dtype is None:
        return source
    wanted = resolve(dtype, f"tensor '{name}'")
    if wanted is source.dtype:
        return source
    if source.dtype.name != "uint8":
        raise InvalidArgument(
            f"tensor '{name}' is {source.dtype.name}, not {wanted.name}: cast it before the push", culprit=f"tensor '{name}'"
        )
    return _reinterpreted(name, source, wanted, shape)


def _of_torch(torch: Any, name: str, tensor: Any) -> Source:
    known = _torch_dtypes.get(tensor.dtype)
    if known is None:
        known = _torch_dtypes[tensor.dtype] = resolve(tensor.dtype, f"tensor '{name}'")
    dtype = known
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.is_meta or (type(tensor) not in plain and hasattr(tensor, "full_tensor")):
        kind = "has no storage" if tensor.is_meta else f"is a {type(tensor).__name__} of layout {tensor.layout}"
        raise InvalidArgument(
            f"tensor '{name}' {kind}: push dense tensors (a DTensor's full_tensor()), or register the shards", culprit=f"tensor '{name}'"
        )
    if type(tensor) not in plain:
        add_plain(type(tensor))
    count = tensor.numel()
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        pointer = tensor.data_ptr()
        # Sharded training frees the memory of gathered parameters between uses, and leaves the shape.
        if count and (pointer == 0 or tensor.untyped_storage().nbytes() < (tensor.storage_offset() + count) * dtype.itemsize):
            raise FailedPrecondition(
                f"tensor '{name}' has no memory: it was freed, or is a {type(tensor).__name__} without any", culprit=f"tensor '{name}'"
            )
        return Source(dtype, shape, count, None, pointer, tensor)
    flat: list[Any] = []  # the flat tensor, which is made at the first copy, since it may be a copy of the whole

    def copy(target: HostBytes | DeviceBytes, start: int, n: int) -> None:
        with torch.no_grad():
            if n == count:
                target.torch(shape, dtype.name).copy_(tensor)
                return
            if not flat:
                flat.append(tensor.detach().reshape(-1))
            target.torch((n,), dtype.name).copy_(flat[0][start : start + n])

    return Source(dtype, shape, count, copy, 0, tensor)


def _of_other(torch: Any, name: str, value: Any) -> Source:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_numpy(numpy, name, value)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(torch, name, value)
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"tensor '{name}' is a {type(value).__name__}: neither a torch tensor, a numpy array, nor with DLPack or the buffer protocol",
            culprit=f"tensor '{name}'",
        ) from None
    return _of_buffer(name, view)


def _of_numpy(numpy: Any, name: str, value: Any) -> Source:
    dtype = resolve(value.dtype, f"tensor '{name}'")
    if isinstance(value, numpy.ma.MaskedArray):
        raise InvalidArgument(f"tensor '{name}' is a masked array: push its data, or fill it", culprit=f"tensor '{name}'")
    if value.flags.c_contiguous:
        return Source(dtype, tuple(value.shape), value.size, None, value.ctypes.data, value)
    flat: list[Any] = []

    def copy(target: HostBytes | DeviceBytes, start: int, n: int) -> None:
        if n == value.size and isinstance(target, HostBytes):
            numpy.copyto(target.numpy(value.shape, dtype.name), value)
            return
        if not flat:
            flat.append(numpy.ascontiguousarray(value))
        copy_host(target, flat[0].ctypes.data + start * dtype.itemsize, n * dtype.itemsize)

    return Source(dtype, tuple(value.shape), value.size, copy, 0, value)


def _of_dlpack(torch: Any, name: str, value: Any) -> Source:
    if torch is None:
        try:
            import numpy
        except ImportError:
            raise Unimplemented(f"tensor '{name}': import torch or numpy first, which take DLPack") from None
    library = numpy if torch is None else torch
    try:
        taken = library.from_dlpack(value)
    except Exception as error:  # the library may not know the device or the dtype, or may not take read-only memory
        raise InvalidArgument(
            f"tensor '{name}': {library.__name__} does not take the DLPack of a {type(value).__name__}: {error}", culprit=f"tensor '{name}'"
        ) from error
    return _of_numpy(numpy, name, taken) if torch is None else _of_torch(torch, name, taken)


def _of_buffer(name: str, view: memoryview) -> Source:
    found = _FORMATS.get((view.format.lstrip("@="), view.itemsize))
    if found is None:
        raise InvalidArgument(
            f"tensor '{name}': a buffer of format {view.format!r}, which is none of refitd's dtypes", culprit=f"tensor '{name}'"
        )
    dtype = DTYPES[found]
    shape = tuple(view.shape or ())
    if view.nbytes == 0:
        return Source(dtype, shape, 0, None, 0, view)
    # ctypes tells the address of writable buffers and of bytes.
    if view.readonly or not view.c_contiguous:
        raw = view.tobytes()
        pointer = ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value or 0
        return Source(dtype, shape, math.prod(shape), None, pointer, raw)
    array = (ctypes.c_uint8 * view.nbytes).from_buffer(view)
    return Source(dtype, shape, math.prod(shape), None, ctypes.addressof(array), array)


def _reinterpreted(name: str, source: Source, dtype: DType, shape: Sequence[int] | None) -> Source:
    """Raw bytes (uint8) as elements of `dtype`."""
    if source.copy is not None or source.elements % dtype.itemsize != 0:
        raise InvalidArgument(
            f"tensor '{name}': {source.elements} bytes, contiguous and on the host, must be whole elements of {dtype.name}",
            culprit=f"tensor '{name}'",
        )
    count = source.elements // dtype.itemsize
    dims = tuple(shape) if shape is not None and math.prod(shape) == count else (count,)
    return Source(dtype, dims, count, None, source.pointer, source.owner)


def copy_host(target: HostBytes | DeviceBytes, pointer: int, nbytes: int) -> None:
    """Copies contiguous host memory to the target."""
    if isinstance(target, HostBytes):
        ctypes.memmove(target.pointer, pointer, nbytes)
        return
    import torch

    from_host = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
    target.torch((nbytes,), "uint8").copy_(from_host)


# The dicts of a torch module that hold tensors and submodules.
_HELD = ("_parameters", "_buffers", "_modules")


class Bindings:
    """Dicts as they were when they were added: `hold()` tells whether they still have the same entries. Keeps dicts and values alive."""

    def __init__(self) -> None:
        self.complete = True  # False: something has no dict to look at
        self._dicts: list[dict[str, Any]] = []
        self._entries: list[Any] = []  # key and value of each entry, of one dict after the other
        self._sizes = array("q")
        # Attributes that are these dicts: the dict of attributes, the name, the value.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._owned: list[Any] = []
        self._ids: list[array[int]] = []  # of the objects in all these lists; made when first asked

    @classmethod
    def of_dict(cls, entries: dict[str, Any]) -> Bindings:
        """The entries of a dict."""
        made = cls()
        made._add(entries)
        return made

    @classmethod
    def of_modules(cls, *modules: Any) -> Bindings:
        """The parameters, buffers and submodules of torch modules and of all modules below them."""
        made = cls()
        seen: set[int] = set()
        pending = list(modules)
        while pending:
            module = pending.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            attributes = module.__dict__
            for what in _HELD:
                held = attributes.get(what)
                if not isinstance(held, dict):  # TorchScript's modules keep theirs elsewhere
                    made.complete = False
                    continue
                if held:
                    made._owners.append(attributes)
                    made._names.append(what)
                    made._owned.append(held)
                made._add(held)
                if what == "_modules":
                    pending += held.values()
        return made

    def holds_all(self, tensors: Iterable[Any]) -> bool:
        """Whether each of the tensors is the value of an entry, so that no other tensor can take its place unnoticed."""
        values = set(map(id, self._entries[1::2]))
        return self.complete and all(id(tensor) in values for tensor in tensors)

    def hold(self) -> bool:
        """Whether all dicts have the entries that they had."""
        if not reads_tensors():
            return self._hold_by_python()
        if not self._ids:
            self._ids = [ids(held) for held in (self._dicts, self._entries, self._owners, self._names, self._owned)]
        dicts, entries, owners, names, owned = (of.buffer_info()[0] for of in self._ids)
        library, sizes = native.locked_library(), self._sizes.buffer_info()[0]
        return bool(
            library.refit_python_first_rebound(owners, names, owned, len(self._owners)) == len(self._owners)
            and library.refit_python_first_altered(dicts, sizes, entries, len(self._dicts)) == len(self._dicts)
        )

    def _hold_by_python(self) -> bool:
        if any(owner.get(name) is not owned for owner, name, owned in zip(self._owners, self._names, self._owned)):
            return False
        at = 0
        for held, size in zip(self._dicts, self._sizes):
            if len(held) != size:
                return False
            for key, value in dict.items(held):
                if key is not self._entries[at] or value is not self._entries[at + 1]:
                    return False
                at += 2
        return True

    def _add(self, held: dict[str, Any]) -> None:
        self._dicts.append(held)
        self._sizes.append(len(held))
        for entry in dict.items(held):
            self._entries += entry


class Marks:
    """The address, dtype, shape and strides that tensors had: `same()` tells whether all still have them."""

    _local = attrgetter("_local_tensor")

    def __init__(self, held: Sequence[Any], current: Sequence[Callable[[], Any]]) -> None:
        """`held`: what the names are bound to: tensors and arrays; DTensors, of which the local tensor counts; None: nothing is held.
        `current`: for each of the others, a function that returns the tensor: of what is neither, such as a function, only this counts."""
        self._fast = reads_tensors()
        kind = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
        self._fixed: list[int] = []
        self._sharded: list[int] = []
        self._asked: list[int] = []
        for i, tensor in enumerate(held):
            if tensor is None:
                continue
            of: Any = type(tensor)
            sharded = _is_sharded(of)
            if self._fast and isinstance(tensor, kind) and not sharded:
                self._fixed.append(i)
            elif self._fast and sharded and isinstance(getattr(tensor, "_local_tensor", None), kind):
                self._sharded.append(i)
            else:
                self._asked.append(i)
        self._held, self._current = held, current
        self.values: list[Any] = [None] * len(held)  # the marks, equal only where nothing has changed
        self._tensors: list[Any] = []
        self._ids = self._marks = self._local_marks = array("Q")
        self._note()

    def same(self) -> bool:
        """Whether every tensor is where it was, and as it was."""
        if self._tensors and not _unchanged(self._ids, self._marks):
            return False
        if self._sharded:
            tensors = self._locals()
            if not _unchanged(ids(tensors), self._local_marks):
                return False
        return all(_look(self._current[i]()) == self.values[i] for i in self._asked)

    def _locals(self) -> list[Any]:
        return [self._local(self._held[i]) for i in self._sharded]

    def _note(self) -> None:
        self._tensors = [self._held[i] for i in self._fixed]
        self._marks, self._local_marks = _marks(self._tensors), _marks(self._locals())
        for numbers, marks in ((self._fixed, self._marks), (self._sharded, self._local_marks)):
            unread = [i for i, mark in zip(numbers, marks) if not mark]
            if unread:  # by torch itself then, one by one
                self._asked += unread
                numbers[:] = [i for i, mark in zip(numbers, marks) if mark]
                marks[:] = array("Q", filter(None, marks))
            for i, mark in zip(numbers, marks):
                self.values[i] = mark
        self._tensors = [self._held[i] for i in self._fixed]
        self._ids = ids(self._tensors)
        for i in self._asked:
            self.values[i] = _look(self._current[i]())


@cache
def _is_sharded(kind: type) -> bool:
    """Each type is asked once, because asking every tensor for what it lacks is slow."""
    return is_dtensor(kind)


def _look(tensor: Any) -> tuple[Any, ...]:
    if hasattr(tensor, "__array_interface__"):
        return (tensor.__array_interface__["data"][0], tensor.dtype, tensor.shape, tensor.strides)
    try:
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    except RuntimeError:  # it has no memory any more
        return ()


def _marks(tensors: list[Any]) -> array[int]:
    objects, marks = ids(tensors), array("Q", bytes(8 * len(tensors)))
    if tensors:
        native.locked_library().refit_python_marks(objects.buffer_info()[0], marks.buffer_info()[0], len(tensors))
    return marks


def _unchanged(objects: array[int], marks: array[int]) -> bool:
    count = len(objects)
    first = native.locked_library().refit_python_first_changed(objects.buffer_info()[0], marks.buffer_info()[0], count)
    return bool(first == count)
