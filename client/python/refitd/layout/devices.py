"""The places where memory may be: the host, or a device of a kind that this module lists. No other module knows which kinds exist."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from . import cuda
from .._core.buffers import DeviceBytes, HostBytes
from .device import DeviceKind
from ..errors import InvalidArgument
from .memory import DeviceMemory, HostMemory

HOST = "host"

# A name that no kind knows goes to the first, whose error says which devices there are.
KINDS: tuple[DeviceKind, ...] = (cuda.KIND,)


def on_host(device: str | None) -> bool:
    """Whether the argument `device` of Trainer or Engine means the host; None does too."""
    return device is None or device == HOST


def kind_of(device: str | None) -> DeviceKind | None:
    """The kind of the device with this name; None: the host."""
    if on_host(device):
        return None
    assert device is not None
    return next((kind for kind in KINDS if kind.knows(device)), KINDS[0])


def kind_of_tensors(tensors: Iterable[Any]) -> DeviceKind | None:
    """The kind of device that any of these torch tensors is on; None: all are elsewhere."""
    types = {tensor.device.type for tensor in tensors}
    return next((kind for kind in KINDS if kind.torch_type in types), None)


def device_of(tensors: Iterable[Any]) -> str | None:
    """The name of the device that has the first of these torch tensors that is on one; None: all are elsewhere."""
    for tensor in tensors:
        for kind in KINDS:
            if tensor.device.type == kind.torch_type:
                return kind.name_of(tensor.device)
    return None


def current() -> str | None:
    """The name of torch's current device, where this process has used one; None elsewhere."""
    return next((name for kind in KINDS if (name := kind.current(used=True)) is not None), None)


def current_or_host() -> str:
    """The name of torch's current device, whether this process has used it or not; else "host"."""
    return next((name for kind in KINDS if (name := kind.current(used=False)) is not None), HOST)


def kind_of_type(torch_type: str) -> DeviceKind | None:
    """The kind of device with this type in torch; None: the host. Raises InvalidArgument for a type that no kind has."""
    if torch_type == "cpu":
        return None
    for kind in KINDS:
        if kind.torch_type == torch_type:
            return kind
    raise InvalidArgument(f"device type '{torch_type}': 'cpu' and {', '.join(repr(kind.torch_type) for kind in KINDS)} are possible", culprit="device")


def any_of(torch_type: str) -> str:
    """The name of a device of the kind with this type in torch: the current one where this process has used one, else the first that it
    sees; "host" for the host. Raises InvalidArgument for a type that no kind has."""
    kind = kind_of_type(torch_type)
    return HOST if kind is None else kind.current(used=True) or kind.first()


def thread_devices() -> Callable[[], None]:
    """A function that makes this thread's current devices and streams those of the thread that calls it."""
    setters = [setter for kind in KINDS if (setter := kind.thread_device()) is not None]

    def take() -> None:
        for setter in setters:
            setter()

    return take


def connect_fields() -> dict[str, Any]:
    """Fields of refit_connect_options that the kinds fill in."""
    return {name: value for kind in KINDS for name, value in kind.connect_fields().items()}


def memory_at(
    device: Any,
    pointer: int,
    nbytes: int,
    owner: Any,
    name: str,
    pointer_now: Callable[[], int] | None,
    check_moved: Callable[[], None] | None = None,
    *,
    what: str,
    culprit: str,
) -> HostMemory | DeviceMemory:
    """Names memory on a torch.device, as HostMemory and DeviceMemory do; `name` is its label. Raises InvalidArgument, which names `what`
    and `culprit`, where refitd moves nothing of such a device."""
    if device.type == "cpu":
        return HostMemory(pointer, nbytes, owner, name, pointer_now, check_moved)
    for kind in KINDS:
        if device.type == kind.torch_type:
            return kind.memory_at(device, pointer, nbytes, owner, name, pointer_now, check_moved)
    possible = " and ".join(["host memory", *(kind.name for kind in KINDS)])
    raise InvalidArgument(f"{what} is on device {device}: {possible} are possible", culprit=culprit)


def bytes_at(device: str | None, pointer: int, nbytes: int, owner: Any) -> HostBytes | DeviceBytes:
    """The `nbytes` bytes at an address of the device; `owner` keeps the memory allocated."""
    kind = kind_of(device)
    if kind is None:
        return HostBytes(pointer, nbytes, owner)
    assert device is not None
    return kind.bytes_at(device, pointer, nbytes, owner)


def synchronize_tensor(tensor: Any) -> None:
    """Waits for the work that torch has queued on the current stream of the tensor's device; the host has none."""
    kind = kind_of_tensors((tensor,))
    if kind is not None:
        kind.synchronize_tensor(tensor)
