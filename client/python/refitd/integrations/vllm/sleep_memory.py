"""Weights in the memory of vLLM's sleep mode (`enable_sleep_mode` on a GPU), which only vLLM's own process can open.

vLLM's allocator makes this memory by cuMemCreate without asking for handles that other processes can import, so that no daemon could write
it. It is made for the sake of unmapping: the addresses stay reserved, and memory comes and goes beneath them. So `make_exportable` puts
memory that can be exported beneath the addresses of the weights. CUDA graphs keep their addresses, and vLLM unmaps and releases the new
memory as its own when it sleeps. What vLLM maps when it wakes up is memory of its own kind again.
"""

from __future__ import annotations

from ctypes import c_uint64

from ...layout import devices as _devices
from . import versions as _versions


def make_exportable(device_type: str) -> int:
    """Makes all weights in memory of vLLM's sleep mode exportable; they keep their addresses and bytes. Returns how many bytes were
    not exportable before. Nothing may run on the device meanwhile. `device_type`: of the weights' device in torch.

    Raises FailedPrecondition where the device lacks the memory for a second copy of the largest allocation.
    """
    kind = _devices.kind_of_type(device_type)
    if kind is None:
        return 0
    changed = 0
    for index, nbytes, base, where in _versions.weights_of_sleep_mode():
        handle = c_uint64.from_address(where)  # vLLM's allocator takes it from there when it unmaps
        made = kind.make_exportable(index, base, nbytes, handle.value)
        changed += nbytes if made != handle.value else 0
        handle.value = made
    return changed
