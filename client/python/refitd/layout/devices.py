"""The places where memory may be: the host, or a device of a kind that this module lists. Everything else in refitd asks here.

A kind's own module (`refitd.layout.cuda`) implements `DeviceKind`. Devices are named as the daemon names them (a GPU by its UUID). A torch tensor's
kind follows from `tensor.device.type`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from .._core.member import Piece
    from .._core.native import Handle
    from . import Box
    from .memory import DeviceBytes, DeviceMemory, HostBytes, HostMemory

# The limit of each call that the doctor makes: a machine that needs longer is not well.
CALL_SECONDS = 30.0


class State(str, Enum):
    """OK: as it should be. NOTE: refitd works, but not everything does or it may be slow. BROKEN: refitd does not work like this."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """A result of the doctor: what was looked at, what was found (`text`), what to do ("": nothing), and figures for programs.

    Names in `figures` end with their unit, bytes or seconds.
    """

    what: str
    state: State
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


class Resolver(abc.ABC):
    """Makes pieces of one registration's boxes on a device, and the regions that hold their bytes: `regions`, by base address, with the
    driver's record of the memory there."""

    def __init__(
        self, label: str, kind: str, member: Handle, device: str | None, itemsizes: Sequence[int], before: dict[int, tuple[Any, Handle]]
    ) -> None:
        """`label`, `kind` ("trainer" or "engine"), `member`, `device`: of the member. `itemsizes`: by tensor of the layout, bytes an element.
        `before`: the regions of the registration before, whose tensors are alive, so that their addresses are still the same memory."""
        self._label, self._kind, self._member, self._device = label, kind, member, device
        self._itemsizes, self._before = itemsizes, before
        self.regions: dict[int, tuple[Any, Handle]] = {}

    @abc.abstractmethod
    def pieces(self, box: Box, what: str) -> list[Piece]:
        """The pieces of `box`, whose tensor `what` names. Raises InvalidArgument where the memory is not on the member's device."""


class DeviceKind(abc.ABC):
    """A kind of device. Its objects have no state but caches, and are thread-safe."""

    name: str  # for people
    torch_type: str  # the `type` of this kind's torch.device
    memory: type[DeviceMemory]
    resolver: type[Resolver]
    looks: Sequence[tuple[str, Callable[[], Finding]]]  # what refitd.doctor looks at, by name

    # ---- the process ----

    @abc.abstractmethod
    def knows(self, device: str) -> bool:
        """Whether a device of this kind may have this name; it need not exist."""

    @abc.abstractmethod
    def current(self, used: bool) -> str | None:
        """The name of torch's current device; None where torch sees none, or with `used`, where this process has used none."""

    @abc.abstractmethod
    def name_of(self, device: Any) -> str:
        """The name of a torch.device of this kind."""

    @abc.abstractmethod
    def first(self) -> str:
        """The name of the first device that this process sees, found without torch. Raises FailedPrecondition or Unavailable where it sees none."""

    @abc.abstractmethod
    def thread_device(self) -> Callable[[], None] | None:
        """A function that makes this thread's current device and stream those of the thread that calls it; None: torch sees no device."""

    @abc.abstractmethod
    def connect_fields(self) -> dict[str, Any]:
        """Fields of refit_connect_options for this kind."""

    # ---- memory ----

    @abc.abstractmethod
    def bytes_at(self, device: str, pointer: int, nbytes: int, owner: Any) -> DeviceBytes:
        """The `nbytes` bytes at an address of the device; `owner` keeps the memory allocated.

        Raises InvalidArgument where this process does not see the device.
        """

    @abc.abstractmethod
    def make_exportable(self, index: int, base: int, nbytes: int, handle: int) -> int:
        """Lets other processes open the memory of the driver's `handle`, which is mapped whole at `base` on device `index`. Address and bytes
        stay; the caller lets nothing use the memory meanwhile. Returns the handle of the memory that is there then: `handle` itself where
        the memory could be opened already. Raises FailedPrecondition, and leaves the memory as it was."""

    @abc.abstractmethod
    def new_bytes(self, device: str, nbytes: int) -> DeviceBytes:
        """New memory on the device, which is freed with the last reference."""

    @abc.abstractmethod
    def free_bytes(self, device: str) -> int:
        """The bytes of the device that no process holds."""

    # ---- waiting for work that torch has queued ----

    @abc.abstractmethod
    def synchronize(self, device: str | None = None) -> None:
        """Waits for the current stream of `device`; None: of the current device."""

    @abc.abstractmethod
    def release_unused(self) -> None:
        """Gives memory that torch keeps and nothing uses back to the devices."""

    @abc.abstractmethod
    def synchronize_all(self, device: str | None = None) -> None:
        """Waits for all streams of `device`; None: of the current device."""


HOST = "host"


# All kinds; the module of each adds it. A name that no kind knows goes to the first kind, whose error lists the devices.
KINDS: list[DeviceKind] = []


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
    """The name of the device of the first of these torch tensors that is on a device; None: all are elsewhere."""
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
    """The name of a device of the kind with this type in torch: the current device where this process has used one, else the first
    that it sees; "host" for the host. Raises InvalidArgument for a type that no kind has."""
    kind = kind_of_type(torch_type)
    return HOST if kind is None else kind.current(used=True) or kind.first()


def thread_devices() -> Callable[[], None]:
    """A function that makes this thread's current devices and streams those of the thread that calls it."""
    setters = [setter for kind in KINDS if (setter := kind.thread_device()) is not None]

    def take() -> None:
        for setter in setters:
            setter()

    return take


def synchronize(device: Any) -> None:
    """Waits for the work that is queued on a torch.device."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize()


def connect_fields() -> dict[str, Any]:
    """Fields of refit_connect_options that the kinds fill in."""
    return {name: value for kind in KINDS for name, value in kind.connect_fields().items()}


def memory_at(
    device: Any, pointer: int, nbytes: int, owner: Any, name: str, pointer_now: Callable[[], int] | None,
    check_moved: Callable[[], None] | None = None, *, what: str, culprit: str | None = None,
) -> HostMemory | DeviceMemory:  # fmt: skip
    """Names memory on a torch.device, as HostMemory and DeviceMemory do; `name` is its label. Raises InvalidArgument, which names `what`
    and `culprit` (None: `what` too), where refitd moves nothing of such a device."""
    if device.type == "cpu":
        from .memory import HostMemory

        return HostMemory(pointer, nbytes, owner, name, pointer_now, check_moved)
    for kind in KINDS:
        if device.type == kind.torch_type:
            return kind.memory(kind.name_of(device), pointer, nbytes, device.index or 0, owner, name, pointer_now, check_moved)
    possible = " and ".join(["host memory", *(kind.name for kind in KINDS)])
    raise InvalidArgument(f"{what} is on device {device}: {possible} are possible", culprit=culprit or what)


def bytes_at(device: str | None, pointer: int, nbytes: int, owner: Any) -> HostBytes | DeviceBytes:
    """The `nbytes` bytes at an address of the device; `owner` keeps the memory allocated."""
    kind = kind_of(device)
    if kind is None:
        from .memory import HostBytes

        return HostBytes(pointer, nbytes, owner)
    assert device is not None
    return kind.bytes_at(device, pointer, nbytes, owner)
