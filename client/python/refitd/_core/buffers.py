"""Bytes at an address as what Python's libraries take: memoryview, numpy array, torch tensor; on a device, torch tensor."""

from __future__ import annotations

import abc
import ctypes
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..layout.dtypes import resolve, torch_dtype
from ..errors import Unimplemented

if TYPE_CHECKING:
    import numpy
    import torch


class HostBytes:
    """`nbytes` bytes at `pointer` of this process. `owner` keeps the memory allocated, and all views of it keep `owner`."""

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


class DeviceBytes(abc.ABC):
    """`nbytes` bytes at `pointer` on a device whose memory the host can't read; all tensors made of them keep them there. The package
    of the kind of device has the class (`device.py`)."""

    pointer: int
    nbytes: int

    @abc.abstractmethod
    def part(self, at: int, nbytes: int) -> HostBytes | DeviceBytes:
        """The `nbytes` bytes from offset `at`."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until the work that torch has queued on the device's current stream has ended."""

    @abc.abstractmethod
    def memory(self, writable: bool = True) -> memoryview:
        """Raises Unimplemented, because the host can't read the bytes."""

    @abc.abstractmethod
    def numpy(self, shape: Sequence[int], dtype: str, writable: bool = True) -> numpy.ndarray[Any, Any]:
        """Raises Unimplemented, because the host can't read the bytes."""

    @abc.abstractmethod
    def torch(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        """The bytes as a tensor of the device."""


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
