"""GPUs, as a kind of device (`devices.py`). Their memory becomes regions: a block of cudaMalloc by its IPC handle, memory of cuMemCreate
(torch's expandable segments) by a descriptor. Calls the driver with ctypes; torch gives device numbers only.
"""

from __future__ import annotations

import bisect
import ctypes
import glob
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from ctypes import Structure, byref, c_char, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from .._core import native
from .._core.member import Piece
from .._core.native import Handle, made_by, text
from ..errors import FailedPrecondition, InvalidArgument, Unavailable
from . import Box, devices
from .devices import CALL_SECONDS, DeviceKind, Finding, Resolver, State
from .memory import DeviceBytes, DeviceMemory, torch_dtype

if TYPE_CHECKING:
    import torch

# cuda.h
_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
_POSIX_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class _Properties(Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", _Location), ("windows", c_void_p), ("flags", c_ubyte * 8)]


class _Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", _Location), ("flags", c_int)]


def device_uuid(index: int) -> str:
    """The UUID ("GPU-...") of the GPU that torch numbers `index`."""
    import torch

    found = str(torch.cuda.get_device_properties(index).uuid)
    return found if found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


_indices: dict[str, int] = {}
_uuids: dict[int, str] = {}  # by torch's number of the GPU; kept, since torch takes long to answer for each of many tensors


def device_index(name: str) -> int:
    """torch's number of the GPU with this UUID. Raises InvalidArgument where this process does not see it."""
    found = _indices.get(name)
    if found is not None:
        return found
    import torch

    for index in range(torch.cuda.device_count()):
        _indices[device_uuid(index)] = index
    if name not in _indices:
        raise InvalidArgument(f"device: {name} is none of this process's GPUs: {', '.join(_indices) or 'it sees none'}", culprit="device")
    return _indices[name]


class CudaMemory(DeviceMemory):
    """Bytes on a GPU, whose `device_uuid` is "GPU-..."."""


class _CudaArray:
    """An object that torch.as_tensor takes by __cuda_array_interface__."""

    def __init__(self, pointer: int, nbytes: int, owner: Any) -> None:
        self._owner = owner
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class CudaBytes(DeviceBytes):
    """`nbytes` bytes at `pointer` on GPU `device_index`; `owner` keeps the memory, as do all tensors of them."""

    def __init__(self, pointer: int, nbytes: int, owner: Any, device_index: int) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self._owner = owner
        self._device_index = device_index

    def part(self, offset: int, nbytes: int) -> CudaBytes:
        """The `nbytes` bytes from `offset`."""
        return CudaBytes(self.pointer + offset, nbytes, self, self._device_index)

    def synchronize(self) -> None:
        """Waits until the work that torch has queued on the GPU's current stream has ended."""
        import torch

        torch.cuda.current_stream(self._device_index).synchronize()

    def torch(self, shape: Sequence[int], dtype: str) -> torch.Tensor:
        import torch

        device = torch.device("cuda", self._device_index)
        kind = torch_dtype(dtype)
        if self.nbytes == 0:
            return torch.empty(tuple(shape), dtype=kind, device=device)
        raw = torch.as_tensor(_CudaArray(self.pointer, self.nbytes, self._owner), device=device)
        return raw.view(kind).view(tuple(shape))


class Allocation(NamedTuple):
    """A block of cudaMalloc, or the memory of one handle of cuMemCreate."""

    base: int
    nbytes: int
    legacy: bool  # of cudaMalloc


class Driver:
    """Calls of the driver's library, which REFITD_CUDA_LIBRARY names; else libcuda.so.1. Thread-safe."""

    def __init__(self) -> None:
        name = os.environ.get("REFITD_CUDA_LIBRARY", "libcuda.so.1")
        try:
            self._library = ctypes.CDLL(name)
        except OSError as error:
            raise Unavailable(f"the CUDA driver {name}: {error}") from error
        self._lock = threading.Lock()
        self._contexts: dict[int, c_void_p] = {}  # by device; retained for good, as torch's runtime does

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(c_int(status), byref(text))
            raise FailedPrecondition(f"{name}: {(text.value or b'').decode() or status}")

    @contextmanager
    def current(self, index: int) -> Iterator[None]:
        """Within the block the primary context of device `index`, which torch uses, is this thread's."""
        with self._lock:
            context = self._contexts.get(index)
            if context is None:
                context = c_void_p()
                self._call("cuInit", c_uint(0))
                self._call("cuDevicePrimaryCtxRetain", byref(context), c_int(index))
                self._contexts[index] = context
        self._call("cuCtxPushCurrent_v2", context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def uuid(self, index: int) -> str:
        """The UUID of device `index`, as device_uuid() gives it. Makes no context."""
        device, raw = c_int(), (c_ubyte * 16)()
        self._call("cuInit", c_uint(0))
        self._call("cuDeviceGet", byref(device), c_int(index))
        self._call("cuDeviceGetUuid_v2", byref(raw), device)
        return f"GPU-{uuid.UUID(bytes=bytes(raw))}"

    def allocation(self, pointer: int) -> Allocation:
        """The allocation that `pointer` is in. Raises FailedPrecondition where that is memory of no GPU, or freed."""
        base, nbytes, legacy = c_uint64(), c_size_t(), c_int()
        self._call("cuMemGetAddressRange_v2", byref(base), byref(nbytes), c_uint64(pointer))
        self._call("cuPointerGetAttribute", byref(legacy), c_int(_LEGACY_IPC_CAPABLE), c_uint64(pointer))
        return Allocation(base.value, nbytes.value, bool(legacy.value))

    def ipc_handle(self, base: int) -> bytes:
        """The cudaIpcMemHandle_t of a block of cudaMalloc."""
        handle = (c_char * native.CUDA_IPC_HANDLE_BYTES)()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(base))
        return bytes(handle.raw)

    def export(self, base: int) -> int:
        """A descriptor of the memory of cuMemCreate at `base`, which the caller closes."""
        handle, descriptor = c_uint64(), c_int(-1)
        self._call("cuMemRetainAllocationHandle", byref(handle), c_void_p(base))
        try:
            self._call("cuMemExportToShareableHandle", byref(descriptor), handle, c_int(_POSIX_DESCRIPTOR), c_uint64(0))
        finally:
            self._call("cuMemRelease", handle)
        return descriptor.value

    def exports(self, base: int) -> bool:
        """Whether export(base) works: whoever made the memory must have asked for handles that can be exported."""
        try:
            os.close(self.export(base))
        except FailedPrecondition:
            return False
        return True

    def make_exportable(self, index: int, base: int, nbytes: int, handle: int) -> int:
        """Replaces the memory of cuMemCreate with `handle`, which is mapped whole at `base` and can't be exported, by memory that can.
        Address and bytes stay. Returns the handle of the new memory; the old memory is released.

        Device `index` is current, and nothing uses the memory meanwhile. For a moment both memories exist. Raises FailedPrecondition, and
        leaves the old memory in its place.
        """
        made, aside = c_uint64(), c_uint64()
        size = c_size_t(nbytes)
        wanted = _Properties(_PINNED, _POSIX_DESCRIPTOR, _Location(_ON_DEVICE, index))
        self._call("cuMemCreate", byref(made), size, byref(wanted), c_uint64(0))
        try:
            self._call("cuMemAddressReserve", byref(aside), size, c_size_t(0), c_uint64(0), c_uint64(0))
            try:
                self._map(index, aside.value, nbytes, made.value)
                try:
                    self._call("cuMemcpyDtoD_v2", aside, c_uint64(base), size)
                    self._call("cuCtxSynchronize")
                finally:
                    self._call("cuMemUnmap", aside, size)
            finally:
                self._call("cuMemAddressFree", aside, size)
            self._call("cuMemUnmap", c_uint64(base), size)
            try:
                self._map(index, base, nbytes, made.value)
            except FailedPrecondition:
                self._map(index, base, nbytes, handle)
                raise
        except FailedPrecondition:
            self._call("cuMemRelease", made)
            raise
        with suppress(FailedPrecondition):  # the new memory is in place, even if the old can't be released
            self._call("cuMemRelease", c_uint64(handle))
        return made.value

    def _map(self, index: int, base: int, nbytes: int, handle: int) -> None:
        """Maps the memory with `handle` at an address that is reserved, for device `index`."""
        self._call("cuMemMap", c_uint64(base), c_size_t(nbytes), c_size_t(0), c_uint64(handle), c_uint64(0))
        try:
            access = _Access(_Location(_ON_DEVICE, index), _READ_WRITE)
            self._call("cuMemSetAccess", c_uint64(base), c_size_t(nbytes), byref(access), c_size_t(1))
        except FailedPrecondition:
            self._call("cuMemUnmap", c_uint64(base), c_size_t(nbytes))
            raise


_driver: Driver | None = None


def driver() -> Driver:
    """The process's driver. Raises Unavailable where there is none."""
    global _driver
    if _driver is None:
        _driver = Driver()
    return _driver


class CudaResolver(Resolver):
    """Makes pieces of one registration's boxes on a GPU. Each allocation of the driver becomes one region."""

    @cached_property
    def _spans(self) -> list[Allocation]:
        """The allocations that were looked up, in order of address."""
        return []

    def pieces(self, box: Box, what: str) -> list[Piece]:
        """The pieces of `box`: several where its memory spans several allocations (expandable segments). `what` names its
        tensor. Raises InvalidArgument where the memory is on another device, FailedPrecondition where the driver refuses it."""
        memory = box.memory
        assert isinstance(memory, CudaMemory)
        if memory.device_uuid != self._device:
            raise InvalidArgument(
                f"{what} of {self._label} is on {memory.device_uuid}, but the {self._kind} attached with device {self._device or 'host'}",
                culprit=what,
            )
        try:
            with driver().current(memory.device_index):
                return list(self._cut(box, memory.pointer + box.byte_offset))
        except FailedPrecondition as error:
            raise FailedPrecondition(f"{what} of {self._label}: {error}", culprit=what) from error

    def _cut(self, box: Box, first: int) -> Iterator[Piece]:
        """Cuts a box whose first element is at address `first` into pieces, each within one allocation."""
        itemsize = self._itemsizes[box.tensor_index]
        lowest = first + itemsize * sum(min(0, (n - 1) * s) for n, s in zip(box.extent, box.strides))
        end = first + itemsize * (1 + sum(max(0, (n - 1) * s) for n, s in zip(box.extent, box.strides)))
        allocation = self._allocation(lowest)
        limit = allocation.base + allocation.nbytes
        if end <= limit:
            yield Piece(box.tensor_index, box.offset, box.extent, box.strides, self._region(allocation), first - allocation.base)
            return
        if allocation.legacy:
            raise FailedPrecondition(f"bytes {lowest:#x} to {end:#x} are beyond the block at {allocation.base:#x} of {allocation.nbytes}")
        along = max((d for d in range(len(box.extent)) if box.extent[d] > 1), key=lambda d: abs(box.strides[d]), default=None)
        if along is None:
            raise FailedPrecondition(f"the element at {first:#x} lies in two allocations")
        step = abs(box.strides[along]) * itemsize
        middle = min(max(1, (limit - lowest) // step if step else 1), box.extent[along] - 1)
        if box.strides[along] < 0:
            middle = box.extent[along] - middle
        for begin, stop in ((0, middle), (middle, box.extent[along])):
            offset, extent = list(box.offset), list(box.extent)
            offset[along] += begin
            extent[along] = stop - begin
            part = Box(box.tensor_index, tuple(offset), tuple(extent), box.strides, box.memory)
            yield from self._cut(part, first + begin * box.strides[along] * itemsize)

    def _allocation(self, pointer: int) -> Allocation:
        index = bisect.bisect(self._spans, (pointer, sys.maxsize, True)) - 1
        if index >= 0 and pointer < self._spans[index].base + self._spans[index].nbytes:
            return self._spans[index]
        found = driver().allocation(pointer)
        bisect.insort(self._spans, found)
        return found

    def _region(self, allocation: Allocation) -> Handle:
        known = self.regions.get(allocation.base)
        if known is None:
            known = self._before.get(allocation.base)
            if known is None or known[0] != allocation:
                known = allocation, self._new_region(allocation)
            self.regions[allocation.base] = known
        return known[1]

    def _new_region(self, allocation: Allocation) -> Handle:
        add = partial(made_by, free="refit_region_free", what="a region on a GPU", context=self._label)
        with self._member as member:
            if allocation.legacy:
                return add(f"refit_{self._kind}_add_cuda_block", member, driver().ipc_handle(allocation.base), allocation.nbytes)
            descriptor = driver().export(allocation.base)
            try:
                return add(f"refit_{self._kind}_add_cuda_vmm_at", member, descriptor, allocation.nbytes, allocation.base)
            finally:
                os.close(descriptor)


# Attributes and an error of cuda.h, by their numbers.
_CUDA_ATTRIBUTES = {"vmm": 102, "vmm_descriptors": 103}
_CUDA_NO_DEVICE = 100


def _look_at_gpus() -> Finding:
    """Lists the GPUs that this process sees, and what they support."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("gpu", State.NOTE, "no NVIDIA driver (libcuda.so.1): host memory only", figures={"gpus": []})
    status = cuda.cuInit(0)
    if status == _CUDA_NO_DEVICE:
        return Finding("gpu", State.NOTE, "an NVIDIA driver, but no GPU that this process sees", _GPU_ADVICE, {"gpus": []})
    if status != 0:
        return Finding("gpu", State.NOTE, f"cuInit fails with {status}: host memory only", _GPU_ADVICE, {"gpus": []})
    count = ctypes.c_int()
    cuda.cuDeviceGetCount(ctypes.byref(count))
    gpus = [_gpu(cuda, ordinal) for ordinal in range(count.value)]
    text = ", ".join(gpu["name"] for gpu in gpus)
    lacking = [gpu["name"] for gpu in gpus if not (gpu["vmm"] and gpu["vmm_descriptors"])]
    if lacking:
        text += f"; no virtual memory management with descriptors: {', '.join(lacking)}"
        return Finding("gpu", State.NOTE, text, _VMM_ADVICE, {"gpus": gpus})
    return Finding("gpu", State.OK, f"{text}; virtual memory management with descriptors", figures={"gpus": gpus})


_GPU_ADVICE = "in a container, pass the GPU in (--gpus all, or a device plugin); look at CUDA_VISIBLE_DEVICES"
_VMM_ADVICE = "don't use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, whose memory can't be shared here"


def _gpu(cuda: Any, ordinal: int) -> dict[str, Any]:
    device, name, value = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
    cuda.cuDeviceGet(ctypes.byref(device), ordinal)
    cuda.cuDeviceGetName(name, len(name), device)
    found: dict[str, Any] = {"name": name.value.decode(errors="replace")}
    for key, number in _CUDA_ATTRIBUTES.items():
        found[key] = cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device) == 0 and bool(value.value)
    return found


def _look_at_ipc() -> Finding:
    """Looks whether another process can open memory of a GPU: some containers and virtual GPUs refuse that."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("gpu ipc", State.NOTE, "not tried: no NVIDIA driver")
    script = (
        "import ctypes\n"
        "c = ctypes.CDLL('libcuda.so.1')\n"
        "device, context, memory, handle = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64(), ctypes.create_string_buffer(64)\n"
        "for call in (lambda: c.cuInit(0), lambda: c.cuDeviceGet(ctypes.byref(device), 0),\n"
        "             lambda: c.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), lambda: c.cuCtxSetCurrent(context),\n"
        "             lambda: c.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(1 << 20)),\n"
        "             lambda: c.cuIpcGetMemHandle(handle, memory)):\n"
        "    status = call()\n"
        "    if status: raise SystemExit(f'status {status}')\n"
    )
    # The script runs in a process of its own: a context in this process would stay, and take some hundred MiB of the GPU.
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * CALL_SECONDS)
    if run.returncode == 0:
        return Finding("gpu ipc", State.OK, "memory of the first GPU can be shared by IPC handle")
    advice = "run daemon, trainers and engines where CUDA IPC is allowed: one container, or containers with --ipc=host --pid=host"
    return Finding("gpu ipc", State.NOTE, f"no IPC handle of GPU memory: {run.stderr.strip()[-200:]}", advice)


def _look_at_nccl() -> Finding:
    """Looks for a libnccl.so.2 that loads."""
    candidates = ["libnccl.so.2"]
    for folder in sys.path:
        candidates += glob.glob(os.path.join(folder or ".", "nvidia", "nccl", "lib", "libnccl.so.2"))
    for candidate in candidates:
        try:
            nccl = ctypes.CDLL(candidate)
            number = ctypes.c_int()
            if nccl.ncclGetVersion(ctypes.byref(number)) != 0:
                continue
        except (OSError, AttributeError):
            continue
        version = f"{number.value // 10000}.{number.value // 100 % 100}.{number.value % 100}"
        return Finding("nccl", State.OK, f"NCCL {version}, {candidate}", figures={"version": version, "path": candidate})
    text = "no libnccl.so.2: GPUs of several nodes exchange no weights"
    return Finding("nccl", State.NOTE, text, "install nvidia-nccl-cu13 (or -cu12) beside the daemon, if GPUs of several nodes take part")


class CudaKind(DeviceKind):
    name = "CUDA"
    torch_type = "cuda"
    memory = CudaMemory
    resolver = CudaResolver
    looks = (("gpu", _look_at_gpus), ("gpu ipc", _look_at_ipc), ("nccl", _look_at_nccl))

    def knows(self, device: str) -> bool:
        return device.startswith(("GPU-", "MIG-"))

    def current(self, used: bool) -> str | None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.cuda.is_available() or (used and not torch.cuda.is_initialized()):
            return None
        return device_uuid(torch.cuda.current_device())

    def name_of(self, device: Any) -> str:
        index = device.index or 0
        if index not in _uuids:
            _uuids[index] = device_uuid(index)
        return _uuids[index]

    def first(self) -> str:
        try:
            return driver().uuid(0)
        except FailedPrecondition as error:
            raise FailedPrecondition(f"device: this process sees no GPU (CUDA_VISIBLE_DEVICES?): {error}", culprit="device") from error

    def thread_device(self) -> Callable[[], None] | None:
        import torch

        if not torch.cuda.is_available():
            return None
        device, stream = torch.cuda.current_device(), torch.cuda.current_stream()

        def take() -> None:
            torch.cuda.set_device(device)
            torch.cuda.set_stream(stream)

        return take

    def connect_fields(self) -> dict[str, Any]:
        return {"cuda_library": text(os.environ.get("REFITD_CUDA_LIBRARY"))}

    def bytes_at(self, device: str, pointer: int, nbytes: int, owner: Any) -> CudaBytes:
        return CudaBytes(pointer, nbytes, owner, device_index(device))

    def make_exportable(self, index: int, base: int, nbytes: int, handle: int) -> int:
        with driver().current(index):
            return handle if driver().exports(base) else driver().make_exportable(index, base, nbytes, handle)

    def new_bytes(self, device: str, nbytes: int) -> CudaBytes:
        import torch

        made = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device_index(device)))
        return CudaBytes(made.data_ptr(), nbytes, made, made.device.index)

    def free_bytes(self, device: str) -> int:
        import torch

        return int(torch.cuda.mem_get_info(device_index(device))[0])

    def synchronize(self, device: str | None = None) -> None:
        import torch

        torch.cuda.current_stream(None if device is None else device_index(device)).synchronize()

    def release_unused(self) -> None:
        import torch

        torch.cuda.empty_cache()

    def synchronize_all(self, device: str | None = None) -> None:
        import torch

        torch.cuda.synchronize(None if device is None else device_index(device))


KIND = CudaKind()
devices.KINDS.append(KIND)
