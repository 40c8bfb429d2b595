"""The things that refitd.doctor looks at where GPUs may be: the driver, IPC handles of memory, NCCL."""

from __future__ import annotations

import ctypes
import glob
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from .finding import CALL_SECONDS, Finding, State

# The numbers that cuda.h gives to these attributes and to this error.
_CUDA_ATTRIBUTES = {"vmm": 102, "vmm_descriptors": 103}
_CUDA_NO_DEVICE = 100


def _look_at_gpus() -> Finding:
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
    """Whether memory of a GPU can be handed to another process: some containers and virtual GPUs refuse that."""
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
    # In a process of its own: a context made here would stay, and take some hundred MiB of the GPU.
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=2 * CALL_SECONDS)
    if run.returncode == 0:
        return Finding("gpu ipc", State.OK, "memory of the first GPU can be shared by IPC handle")
    advice = "run daemon, trainers and engines where CUDA IPC is allowed: one container, or containers with --ipc=host --pid=host"
    return Finding("gpu ipc", State.NOTE, f"no IPC handle of GPU memory: {run.stderr.strip()[-200:]}", advice)


def _look_at_nccl() -> Finding:
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


LOOKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("gpu", _look_at_gpus),
    ("gpu ipc", _look_at_ipc),
    ("nccl", _look_at_nccl),
)
