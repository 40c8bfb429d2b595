"""Element types; places where a tensor's bytes may lie, regions of memory that the daemon can map, and bytes as arrays and tensors.

HostMemory and its like only name memory; the member that registers them makes regions of it. Four kinds exist:

- `HostMemory`: bytes of this process. Those within a region of the member (`refitd.empty`, `refitd.adopt`) are moved from
  where they are; all others are staged: copied into a region at each refit, with a `StagingWarning`.
- `RegionMemory`: bytes of one region, named by the region itself.
- `FilledMemory`: bytes that do not exist yet. The member keeps room for them in a region, and a function of the caller fills
  that room before each refit (a cast, for instance).
- `DeviceMemory`: bytes on a device, of a class for its kind (`refitd.CudaMemory` on a GPU).
"""

from __future__ import annotations

import abc
import bisect
import ctypes
import fcntl
import itertools
import math
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from ..errors import InvalidArgument, ResourceExhausted, Unimplemented

if TYPE_CHECKING:
    import numpy
    import torch


class DType(NamedTuple):
    """An element type: the name that refitd, torch and safetensors-like manifests use, the C code, and bytes an element."""

    name: str
    code: int
    itemsize: int


_ALL = (
    DType("float64", 1, 8),
    DType("float32", 2, 4),
    DType("float16", 3, 2),
    DType("bfloat16", 4, 2),
    DType("float8_e4m3fn", 5, 1),
    DType("float8_e5m2", 6, 1),
    DType("int64", 7, 8),
    DType("int32", 8, 4),
    DType("int16", 9, 2),
    DType("int8", 10, 1),
    DType("uint8", 11, 1),
    DType("bool", 12, 1),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in _ALL}


def resolve(dtype: Any, what: str = "dtype") -> DType:
    """The element type that `dtype` names: a name such as "bfloat16", a torch.dtype, or a numpy dtype (ml_dtypes' included).

    `what` says in an error whose dtype it was. Raises InvalidArgument for a type that refitd does not carry.
    """
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidArgument(f"{what}: {dtype!r} is none of {', '.join(DTYPES)}", culprit=what)
    return found


def _name_of(dtype: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        try:
            as_numpy = numpy.dtype(dtype)
        except TypeError:
            return repr(dtype)
        if not as_numpy.isnative:
            return repr(dtype)
        return str(as_numpy.name)
    return repr(dtype)


def torch_dtype(name: str) -> Any:
    """torch's dtype of this name. Imports torch."""
    import torch

    return getattr(torch, resolve(name).name)


class HostBytes:
    """`nbytes` bytes at `pointer` of this process. `owner` keeps the memory allocated, and all views of it keep `owner`."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._array: Any = bytearray()
        if nbytes:
            self._array = (ctypes.c_uint8 * nbytes).from_address(pointer)
            self._array._owner = owner

    def part(self, offset: int, nbytes: int) -> HostBytes:
        """The `nbytes` bytes from `offset`."""
        return HostBytes(self.pointer + offset, nbytes, self)

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
    """`nbytes` bytes at `pointer` on a device whose memory the host can't read; all tensors of them keep the memory. The module of the
    kind of device has the class."""

    pointer: int
    nbytes: int

    @abc.abstractmethod
    def part(self, offset: int, nbytes: int) -> HostBytes | DeviceBytes:
        """The `nbytes` bytes from `offset`."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Waits until the work that torch has queued on the device's current stream has ended."""

    def memory(self, writable: bool = True) -> memoryview:
        """Raises Unimplemented, because the host can't read the bytes."""
        raise Unimplemented("these bytes are on a device: take them as a torch tensor")

    def numpy(self, shape: Sequence[int], dtype: str, writable: bool = True) -> numpy.ndarray[Any, Any]:
        """Raises Unimplemented, as memory() does."""
        raise Unimplemented("these bytes are on a device: take them as a torch tensor")

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


@dataclass(frozen=True)
class HostMemory:
    """`nbytes` bytes of this process from address `pointer`; `owner` (a tensor or array) keeps them allocated.

    `label` names the bytes in warnings and errors, usually by the tensor's name. `pointer_now`, if given, returns at each refit where
    the bytes are: memory that moved is bound anew, unless `check_moved`, if given, raises, as it should where the tensor is not what it
    was when it was registered.
    """

    pointer: int
    nbytes: int
    owner: Any = field(default=None, compare=False, repr=False)
    label: str = ""
    pointer_now: Callable[[], int] | None = field(default=None, compare=False, repr=False)
    check_moved: Callable[[], None] | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True)
class RegionMemory:
    """`nbytes` bytes of `region` from `byte_offset`."""

    region: Region
    byte_offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class FilledMemory:
    """`nbytes` bytes that `fill` writes before each refit.

    `fill(view)` gets a writable memoryview of `nbytes` bytes (format "B"), aligned to 64 bytes, which stays valid as long as the
    registration. It runs on the thread that called refit. Boxes with the same FilledMemory object share the room.
    """

    nbytes: int
    fill: Callable[[memoryview], None] = field(repr=False)
    label: str = ""


@dataclass(frozen=True)
class DeviceMemory:
    """`nbytes` bytes from `pointer` on the device with `device_uuid`; `device_index` is this process's number of it.

    `owner` keeps the memory allocated. `pointer_now`, `check_moved`: as in HostMemory.
    """

    device_uuid: str
    pointer: int
    nbytes: int
    device_index: int = 0
    owner: Any = field(default=None, compare=False, repr=False)
    label: str = ""
    pointer_now: Callable[[], int] | None = field(default=None, compare=False, repr=False)
    check_moved: Callable[[], None] | None = field(default=None, compare=False, repr=False)


Memory = Union[HostMemory, RegionMemory, FilledMemory, DeviceMemory]


# Tensors begin at multiples of this, a cache line, where copies are fastest.
ALIGNMENT = 64
# `empty` cuts small tensors from regions of this size. Pages that nobody wrote take no memory.
SLAB_BYTES = 64 << 20


class Region(mmap.mmap):
    """`nbytes` bytes of shared memory, zeroed. `pointer` is its address here, `descriptor` its memfd.

    Views of it, such as `memoryview(region)` and the results of `array` and `tensor`, keep the memory. Thread-safe.
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
        """Maps the descriptor, which the region owns from now on."""
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
                f"descriptor {descriptor}: {'the memfd is empty' if sealed else 'the memfd is not sealed with F_SEAL_SHRINK'}", culprit="descriptor"
            )
        return cls._map(own, nbytes, inherit=True)

    def close(self) -> None:
        """Does nothing: the memory is freed with its last user."""

    def array(self, shape: Sequence[int], dtype: Any, byte_offset: int = 0) -> numpy.ndarray[Any, Any]:
        """A numpy array over the region. bfloat16 and float8 need the package ml_dtypes.

        Args:
            shape: In elements.
            dtype: As in refitd.empty.
            byte_offset: Of the first element in the region.
        """
        import numpy

        made: numpy.ndarray[Any, Any] = numpy.ndarray(tuple(shape), numpy_dtype(resolve(dtype).name), buffer=self, offset=byte_offset)
        return made

    def tensor(self, shape: Sequence[int], dtype: Any, byte_offset: int = 0) -> torch.Tensor:
        """A torch tensor over the region, on the CPU, contiguous.

        Args:
            shape: As in Region.array, with `dtype` and `byte_offset`.
        """
        import torch

        count = math.prod(shape)
        kind = torch_dtype(resolve(dtype).name)
        if count == 0:
            return torch.empty(tuple(shape), dtype=kind)
        return torch.frombuffer(self, dtype=kind, count=count, offset=byte_offset).view(tuple(shape))


class Arena:
    """Memory with two sides for an engine's weights (`refitd.adopt`): `nbytes` bytes from `pointer`, on a device or the host. All tensors
    made of it keep it."""

    def __init__(self, pointer: int, nbytes: int, handle: Any, back: str) -> None:
        """`handle`: the C arena, which is closed with the last reference. `back`: one of BACKS."""
        self.number = next(_arena_numbers)  # in the order in which arenas were made
        self.pointer = pointer
        self.nbytes = nbytes
        self.handle = handle
        self.back = back
        _table.add(self)


# The two sides of a device's arena lie in the memory of one of these. The index is the C library's number.
BACKS = ("device", "host")
_arena_numbers = itertools.count()


class _Table:
    """All regions and arenas of this process, by address. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: garbage collection, which may run anywhere, removes regions
        self._pointers: list[int] = []
        self._regions: list[weakref.ref[Region | Arena]] = []

    def add(self, region: Region | Arena) -> None:
        with self._lock:
            index = bisect.bisect(self._pointers, region.pointer)
            self._pointers.insert(index, region.pointer)
            self._regions.insert(index, weakref.ref(region))
            weakref.finalize(region, self._remove, region.pointer).atexit = False

    def _remove(self, pointer: int) -> None:
        with self._lock:
            index = bisect.bisect_left(self._pointers, pointer)
            if index < len(self._pointers) and self._pointers[index] == pointer and self._regions[index]() is None:
                del self._pointers[index], self._regions[index]

    def locate(self, pointer: int, nbytes: int) -> Region | Arena | None:
        with self._lock:
            index = bisect.bisect(self._pointers, pointer) - 1
            region = self._regions[index]() if index >= 0 else None
        if region is None or pointer + nbytes > region.pointer + region.nbytes:
            return None
        return region

    def after_fork(self) -> None:
        self._lock = threading.RLock()
        for found in self._regions:
            region = found()
            if isinstance(region, Region) and not region.inherit:
                _reserve(region)


def _reserve(region: Region) -> None:
    """Reserves the addresses of a region that this forked child lacks: unmapping the region there must not unmap anything else."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    no_replace, no_reserve = 0x100000, 0x4000  # MAP_FIXED_NOREPLACE, MAP_NORESERVE
    library.mmap(region.pointer, region.nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_replace | no_reserve, -1, 0)


_table = _Table()
os.register_at_fork(after_in_child=_table.after_fork)


def locate(pointer: int, nbytes: int) -> Region | Arena | None:
    """The region, or the arena of any device, that holds the `nbytes` bytes from address `pointer`; None where they lie in none."""
    return _table.locate(pointer, nbytes)


class _Slab:
    """Cuts small pieces of memory from larger regions. Thread-safe."""

    def __init__(self, inherit: bool) -> None:
        self._inherit = inherit
        self._lock = threading.Lock()
        self._region: weakref.ref[Region] | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[Region, int]:
        """A region and a byte offset in it, at a multiple of ALIGNMENT."""
        if nbytes > SLAB_BYTES // 4:
            return Region(nbytes, self._inherit), 0
        with self._lock:
            region = self._region() if self._region is not None else None
            if region is None or self._used + nbytes > region.nbytes:
                region = Region(SLAB_BYTES, self._inherit)
                self._region = weakref.ref(region)
                self._used = 0
            offset = self._used
            self._used += aligned(nbytes)
        return region, offset

    def after_fork(self) -> None:
        # A forked child that kept its parent's region would hand out the same bytes.
        self._lock = threading.Lock()
        self._region = None


_slabs = {inherit: _Slab(inherit) for inherit in (True, False)}
for _slab in _slabs.values():
    os.register_at_fork(after_in_child=_slab.after_fork)


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def empty(shape: Sequence[int] | int, dtype: Any = "float32", *, like: str | None = None, inherit: bool = True) -> Any:
    """A tensor of zeros in memory that daemons can map: once it is registered, the daemon reads and writes it in place.

    Args:
        shape: In elements.
        dtype: A name such as "bfloat16", a torch.dtype or a numpy dtype.
        like: "torch" for a torch.Tensor on the CPU, "numpy" for a numpy.ndarray; None: torch's where torch is imported or `dtype` is
            torch's, else numpy's.
        inherit: Whether forked children share the memory; if not, a child that touches it ends by SIGSEGV.

    Raises:
        InvalidArgument: An argument is wrong.
    """
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    if any(n < 0 for n in dims):
        raise InvalidArgument(f"shape {dims} has a negative dimension")
    kind = resolve(dtype)
    nbytes = math.prod(dims) * kind.itemsize
    region, offset = _slabs[inherit].take(max(nbytes, 1))
    if like not in (None, "torch", "numpy"):
        raise InvalidArgument(f"like: {like!r} is neither 'torch' nor 'numpy'")
    if like == "torch" or (like is None and "torch" in sys.modules):
        return region.tensor(dims, kind.name, offset)
    return region.array(dims, kind.name, offset)


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


def to_row_end(shape: tuple[int, ...], start: int, count: int) -> int:
    """How many of `count` elements from `start` on end after a multiple of 128 rows of the last two dimensions, so that no block that is
    quantised together is cut, or after a row. 0: none do; of one dimension, all do."""
    if len(shape) < 2:
        return count
    row = shape[-1]
    end = start + count
    matrix = end - end % (row * shape[-2])  # where the one begins in which the elements end
    for rows in (128, 1):
        cut = end - (end - matrix) % (rows * row)
        if cut > start:
            return cut - start
    return 0


def versioned(things: Iterable[Any]) -> list[Any]:
    """The torch tensors among these that have a version, each once."""
    import torch

    return list({id(thing): thing for thing in things if isinstance(thing, torch.Tensor) and not thing.is_inference()}.values())


def mark_written(tensors: Iterable[Any]) -> None:
    """Raises the versions of torch tensors, and with them those of their views, as torch's own writes do (P11)."""
    mark_versions(versioned(tensors))


def mark_versions(tensors: list[Any]) -> None:
    """Does what mark_written does, for a list that versioned() made."""
    import torch

    increment: Any = getattr(torch.autograd.graph, "increment_version", None)
    try:
        increment(tensors)
    except TypeError:  # an older torch has no such function, or one that takes a single tensor
        for tensor in tensors:
            with torch.no_grad():
                tensor.detach().as_strided((0,), (1,)).zero_()


# The number of words that digest() takes at a time.
_WORDS = 1 << 24


def digest(tensor: Any) -> int:
    """A checksum of the tensor's bytes and of their order, modulo 2^64. Another value in one word (8 bytes) alters it; different tensors
    may have the same."""
    import torch

    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    # A copy where the words would not be aligned; the last bytes are a word of their own.
    aligned = flat[:whole] if flat.storage_offset() % 8 == 0 and flat.data_ptr() % 8 == 0 else flat[:whole].clone()
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: flat.numel() - whole] = flat[whole:]
    total = 0
    for start, words in ((0, aligned.view(torch.int64)), (whole // 8, rest.view(torch.int64))):
        for offset in range(0, words.numel(), _WORDS):
            part = words[offset : offset + _WORDS]
            weights = torch.arange(start + offset, start + offset + part.numel(), device=part.device, dtype=torch.int64)
            weights = (weights * 0x5851F42D4C957F2D + 0x14057B7EF767814F) | 1
            # The mask drops copies of the sign bit, with which a word and its complement would count the same.
            mixed = part ^ ((part >> 29) & ((1 << 35) - 1))
            total += int(((mixed + 1) * weights).sum().item())
    return (total + int(flat.numel())) % (1 << 64)
