"""Bytes at an address as what Python's libraries take: memoryview, numpy array, torch tensor; on a GPU, torch tensor."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ._dtypes import resolve, torch_dtype
from .errors import Unimplemented

if TYPE_CHECKING:
    import numpy
    import torch


class HostBytes:
    """`nbytes` bytes at `pointer` of this process; `owner` keeps them there, as do all views made of them."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._array: Any = bytearray()
        if nbytes:
            self._array = (ctypes.c_uint8 * nbytes).from_address(pointer)
            self._array._owner = owner

    def part(self, at: int, nbytes: int) -> HostBytes:
        """The `nbytes` bytes from offset `at`."""
        return HostBytes(self.pointer + at, nbytes, self)

    def memory(self, writable: bool = True) -> memoryview:
        view = memoryview(self._array).cast("B")
        return view if writable else view.toreadonly()

    def numpy(self, shape: Sequence[int], dtype: str, writable: bool = True) -> numpy.ndarray[Any, Any]:
        import numpy

        made: numpy.ndarray[Any, Any] = numpy.frombuffer(self._array, numpy_dtype(dtype)).reshape(tuple(shape))
        made.flags.writeable = writable
        return made

    def torch(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        import torch

        kind = torch_dtype(dtype)
        if math.prod(shape) == 0:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(self._array, dtype=kind).view(tuple(shape))


class _CudaArray:
    """What torch.as_tensor takes by __cuda_array_interface__."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class CudaBytes:
    """`nbytes` bytes at `pointer` on GPU `device_index`; `owner` keeps them there, as do all tensors made of them."""

    def __init__(self, pointer: int, nbytes: int, owner: Any, device_index: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._owner = owner
        self._device_index = device_index

    def part(self, at: int, nbytes: int) -> CudaBytes:
        """The `nbytes` bytes from offset `at`."""
        return CudaBytes(self.pointer + at, nbytes, self, self._device_index)

    def synchronize(self) -> None:
        """Waits until the work that torch has queued on the GPU's current stream has ended."""
        import torch

        torch.cuda.current_stream(self._device_index).synchronize()

    def memory(self, writable: bool = True) -> memoryview:
        raise Unimplemented("these bytes are on a GPU: take them as a torch tensor")

    def numpy(self, shape: Sequence[int], dtype: str, writable: bool = True) -> numpy.ndarray[Any, Any]:
        raise Unimplemented("these bytes are on a GPU: take them as a torch tensor")

    def torch(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        import torch

        device = torch.device("cuda", self._device_index)
        kind = torch_dtype(dtype)
        if self.nbytes == 0:
            return torch.empty(tuple(shape), dtype=kind, device=device)
        raw = torch.as_tensor(_CudaArray(self.pointer, self.nbytes, self._owner), device=device)
        return raw.view(kind).view(tuple(shape))


def numpy_dtype(name: str) -> Any:
    """numpy's dtype of this name; bfloat16 and float8 come from the package ml_dtypes."""
    import numpy

    name = resolve(name).name
    try:
        return numpy.dtype(name)
    except TypeError:
        pass
    try:
        import ml_dtypes
    except ImportError:
        raise Unimplemented(f"numpy has no {name}: install ml_dtypes, or take a torch tensor or the bytes") from None
    return numpy.dtype(getattr(ml_dtypes, name))
