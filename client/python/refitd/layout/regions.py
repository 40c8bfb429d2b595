"""Regions: memory of this process that a daemon may map, and tensors in it.

A region is a sealed memfd that is mapped here. It belongs to no trainer or engine: each one that registers tensors in it makes it
known to its own daemon. The memory lives as long as anything uses it: a tensor or array over it, or a registered layout.

A forked child shares a region's memory with its parent, in both directions: what the child writes, the parent computes with and its daemon
reads, and the child sees what the parent writes. With `inherit=False` a child does not have the memory (MADV_DONTFORK), and a child that
touches it ends by SIGSEGV.
"""

from __future__ import annotations

import bisect
import ctypes
import fcntl
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .._core.buffers import numpy_dtype
from .dtypes import resolve, torch_dtype
from ..errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    import numpy
    import torch

# Tensors begin at multiples of this, a cache line: copies are at their best there.
ALIGNMENT = 64
# `empty` cuts small tensors from regions of this size. Pages that nobody wrote take no memory.
ARENA_BYTES = 64 << 20


class Region(mmap.mmap):
    """`nbytes` bytes of shared memory, zeroed. `pointer` is its address here, `descriptor` its memfd.

    Anything over it, such as `memoryview(region)` or the results of `array` and `tensor`, keeps the memory. Thread-safe.
    """

    nbytes: int
    pointer: int
    descriptor: int
    inherit: bool

    def __new__(cls, nbytes: int, inherit: bool = True) -> Region:
        """`inherit`: whether forked children have the memory too. Raises InvalidArgument where nbytes is not positive, ResourceExhausted where
        the system gives no memory."""
        if nbytes <= 0:
            raise InvalidArgument(f"a region of {nbytes} bytes")
        descriptor = -1
        try:
            descriptor = os.memfd_create("refitd-python", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(descriptor, nbytes)
            # The daemon maps a memfd only if seals prevent its owner from shrinking the memfd.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        except OSError as error:
            if descriptor >= 0:
                os.close(descriptor)
            raise ResourceExhausted(f"a region of {nbytes} bytes: {error}") from error
        return cls._map(descriptor, nbytes, inherit)

    @classmethod
    def _map(cls, descriptor: int, nbytes: int, inherit: bool) -> Region:
        """Maps the descriptor, which is the region's from now on."""
        try:
            new: Any = super().__new__
            region: Region = new(cls, descriptor, nbytes)
        except OSError as error:
            os.close(descriptor)
            raise ResourceExhausted(f"a region of {nbytes} bytes: {error}") from error
        region.nbytes = nbytes
        region.descriptor = descriptor
        region.pointer = ctypes.addressof(ctypes.c_char.from_buffer(region))
        # Weights don't belong in core dumps.
        region.madvise(mmap.MADV_DONTDUMP)
        region.inherit = inherit
        if not inherit:
            region.madvise(mmap.MADV_DONTFORK)
        weakref.finalize(region, os.close, descriptor)
        _table.add(region)
        return region

    @classmethod
    def of_memfd(cls, descriptor: int) -> Region:
        """Maps all of a memfd that exists already, made with MFD_ALLOW_SEALING and sealed with F_SEAL_SHRINK.

        The descriptor, open for reading and writing, stays the caller's. Raises InvalidArgument for any other file.
        """
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            nbytes = os.fstat(descriptor).st_size
            own = os.dup(descriptor)
        except OSError as error:
            raise InvalidArgument(f"descriptor {descriptor} is no memfd: {error}", culprit="descriptor") from error
        if not sealed or nbytes == 0:
            os.close(own)
            raise InvalidArgument(
                f"descriptor {descriptor}: {'the memfd is empty' if sealed else 'the memfd is not sealed with F_SEAL_SHRINK'}",
                culprit="descriptor",
            )
        return cls._map(own, nbytes, inherit=True)

    def close(self) -> None:
        """Does nothing: the memory goes when nothing uses it any more."""

    def array(self, shape: Sequence[int], dtype: Any, byte_offset: int = 0) -> numpy.ndarray[Any, Any]:
        """A numpy array over the region. bfloat16 and float8 need the package ml_dtypes."""
        import numpy

        made: numpy.ndarray[Any, Any] = numpy.ndarray(tuple(shape), numpy_dtype(resolve(dtype).name), buffer=self, offset=byte_offset)
        return made

    def tensor(self, shape: Sequence[int], dtype: Any, byte_offset: int = 0) -> torch.Tensor:
        """A torch tensor over the region, on the CPU, contiguous."""
        import torch

        count = math.prod(shape)
        kind = torch_dtype(resolve(dtype).name)
        if count == 0:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(self, dtype=kind, count=count, offset=byte_offset).view(tuple(shape))


class _Table:
    """All regions of this process, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a region may go, and be removed, wherever Python collects garbage
        self._pointers: list[int] = []
        self._regions: list[weakref.ref[Region]] = []

    def add(self, region: Region) -> None:
        with self._lock:
            at = bisect.bisect(self._pointers, region.pointer)
            self._pointers.insert(at, region.pointer)
            self._regions.insert(at, weakref.ref(region))
            weakref.finalize(region, self._remove, region.pointer).atexit = False

    def _remove(self, pointer: int) -> None:
        with self._lock:
            at = bisect.bisect_left(self._pointers, pointer)
            if at < len(self._pointers) and self._pointers[at] == pointer and self._regions[at]() is None:
                del self._pointers[at], self._regions[at]

    def locate(self, pointer: int, nbytes: int) -> Region | None:
        with self._lock:
            at = bisect.bisect(self._pointers, pointer) - 1
            region = self._regions[at]() if at >= 0 else None
        if region is None or pointer + nbytes > region.pointer + region.nbytes:
            return None
        return region

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        for found in self._regions:
            region = found()
            if region is not None and not region.inherit:
                _reserve(region)


def _reserve(region: Region) -> None:
    """Takes the addresses of a region that this child does not have, so that nothing else comes to lie where the region will be unmapped."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    no_replace, no_reserve = 0x100000, 0x4000  # MAP_FIXED_NOREPLACE, MAP_NORESERVE
    library.mmap(region.pointer, region.nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_replace | no_reserve, -1, 0)


_table = _Table()
os.register_at_fork(after_in_child=_table.after_fork)


def locate(pointer: int, nbytes: int) -> Region | None:
    """The region that holds the `nbytes` bytes from address `pointer`; None where they lie in none."""
    return _table.locate(pointer, nbytes)


class _Arena:
    """Cuts small pieces of memory from larger regions. Thread-safe."""

    def __init__(self, inherit: bool) -> None:
        self._inherit = inherit
        self._lock = threading.Lock()
        self._region: weakref.ref[Region] | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[Region, int]:
        """A region and a byte offset in it, at a multiple of ALIGNMENT."""
        if nbytes > ARENA_BYTES // 4:
            return Region(nbytes, self._inherit), 0
        with self._lock:
            region = self._region() if self._region is not None else None
            if region is None or self._used + nbytes > region.nbytes:
                region = Region(ARENA_BYTES, self._inherit)
                self._region = weakref.ref(region)
                self._used = 0
            offset = self._used
            self._used += aligned(nbytes)
        return region, offset

    def after_fork(self) -> None:
        # A child that went on with its parent's arena would hand out the same bytes.
        self._lock = threading.Lock()
        self._region = None


_arenas = {inherit: _Arena(inherit) for inherit in (True, False)}
for _arena in _arenas.values():
    os.register_at_fork(after_in_child=_arena.after_fork)


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty(shape: Sequence[int] | int, dtype: Any = "float32", *, like: str | None = None, inherit: bool = True) -> Any:
    """A tensor of zeros in memory that daemons can map: registered, it is moved from and to where it is, without a copy.

    `shape`: in elements. `dtype`: a name such as "bfloat16", a torch.dtype or a numpy dtype. `like`: "torch" for a torch.Tensor on
    the CPU, "numpy" for a numpy.ndarray; None: torch's where torch is imported or `dtype` is torch's, else numpy's. `inherit`: whether
    forked children share the memory; without, a child that touches it ends.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(n < 0 for n in dims):
        raise InvalidArgument(f"shape {dims} has a negative dimension")
    kind = resolve(dtype)
    nbytes = math.prod(dims) * kind.itemsize
    region, offset = _arenas[inherit].take(max(nbytes, 1))
    if like not in (None, "torch", "numpy"):
        raise InvalidArgument(f"like: {like!r} is neither 'torch' nor 'numpy'")
    if like == "torch" or (like is None and "torch" in sys.modules):
        return region.tensor(dims, kind.name, offset)
    return region.array(dims, kind.name, offset)


def adopt(module: torch.nn.Module, *, buffers: bool = True, inherit: bool = True) -> Region | None:
    """Moves a module's CPU parameters, and buffers, into one new region; they keep their values, shapes and ties.

    Tensors that share memory go on sharing it. Parameters on other devices, and those in regions already, stay where they are.
    Optimizers go on working, since the Parameter objects are the same. Call it before threads or graphs hold on to the old memory.
    Returns the region; None where there was nothing to move.

    `inherit`: forked children, such as a data loader's workers, share the weights with this process, in both directions; before, each had
    a copy from the moment of the fork. False: children don't have the weights at all, and one that touches them ends by SIGSEGV.
    """
    import torch

    tensors: list[torch.Tensor] = list(module.parameters())
    if buffers:
        tensors += list(module.buffers())
    return adopt_tensors(tensors, inherit)


def adopt_tensors(tensors: Iterable[torch.Tensor], inherit: bool = True) -> Region | None:
    """Moves the CPU tensors' storages into one new region, as `adopt` does; the tensor objects stay the same."""
    import torch

    local: list[torch.Tensor] = []
    for tensor in tensors:
        # A DTensor's memory is its local tensor's.
        found = getattr(tensor, "_local_tensor", tensor)
        if found.device.type == "cpu" and found.numel() > 0:
            local.append(found)
    places: dict[int, int] = {}  # storage's address: byte offset in the region
    storages: dict[int, torch.UntypedStorage] = {}
    total = 0
    for tensor in local:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in places or locate(storage.data_ptr(), storage.nbytes()) is not None:
            continue
        places[storage.data_ptr()] = total
        storages[storage.data_ptr()] = storage
        total += aligned(storage.nbytes())
    if total == 0:
        return None
    region = Region(total, inherit)
    for pointer, storage in storages.items():
        ctypes.memmove(region.pointer + places[pointer], pointer, storage.nbytes())
    with torch.no_grad():
        for tensor in local:
            at = places.get(tensor.untyped_storage().data_ptr())
            if at is None:
                continue
            whole = torch.frombuffer(region, dtype=torch.uint8, count=tensor.untyped_storage().nbytes(), offset=at)
            tensor.data = torch.empty(0, dtype=tensor.dtype).set_(
                whole.untyped_storage(), whole.storage_offset() // tensor.element_size() + tensor.storage_offset(),
                tensor.shape, tensor.stride(),
            )
    return region
