"""The tensors that `update.push` takes: torch tensors of any strides, numpy arrays, anything with DLPack or the buffer protocol.

Each becomes a `Source`: dtype, shape, and a way to copy a range of its elements, in row-major order, to an address.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .buffers import DeviceBytes, HostBytes
from ..layout.dtypes import DTYPES, DType, resolve
from .tensors import add_plain, plain
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented


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


