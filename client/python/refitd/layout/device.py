"""The interface of a kind of device whose memory the host can't read. `devices.py` lists the kinds that there are; a kind's
own package (`refitd.layout.cuda`) implements this, and nothing else in refitd tells the kinds apart.

Devices are named as the daemon names them (a GPU by its UUID). Torch tensors tell their kind by `tensor.device.type`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from .memory import DeviceMemory

if TYPE_CHECKING:
    from .._core.buffers import DeviceBytes
    from .records import Box
    from .._core.lists import Piece
    from .._core.native import Handle
    from .finding import Finding


class Resolver(abc.ABC):
    """Makes pieces of one registration's boxes on a device, and the regions that hold their bytes."""

    # By base address: what the driver says of the memory there, and its region.
    regions: dict[int, tuple[Any, Handle]]

    @abc.abstractmethod
    def pieces(self, box: Box, what: str) -> list[Piece]:
        """The pieces of `box`, whose tensor `what` names. Raises InvalidArgument where the memory is not on the member's device."""


class DeviceKind(abc.ABC):
    """A kind of device. Its objects have no state but caches, and are thread-safe."""

    name: str  # for people
    torch_type: str  # the `type` of this kind's torch.device

    # ---- the process ----

    @abc.abstractmethod
    def knows(self, device: str) -> bool:
        """Whether a device may have this name, which need not exist."""

    @abc.abstractmethod
    def current(self, used: bool) -> str | None:
        """The name of torch's current device; None where torch sees none, or with `used`, where this process has used none."""

    @abc.abstractmethod
    def name_of(self, device: Any) -> str:
        """The name of a torch.device of this kind."""

    @abc.abstractmethod
    def first(self) -> str:
        """The name of the first device that this process sees, told without torch. Raises FailedPrecondition or Unavailable where it sees none."""

    @abc.abstractmethod
    def thread_device(self) -> Callable[[], None] | None:
        """A function that makes this thread's current device and stream those of the thread that calls it; None: torch sees no device."""

    @abc.abstractmethod
    def connect_fields(self) -> dict[str, Any]:
        """Fields of refit_connect_options for this kind."""

    @abc.abstractmethod
    def looks(self) -> Sequence[tuple[str, Callable[[], Finding]]]:
        """The things that refitd.doctor looks at, by name."""

    # ---- memory ----

    @abc.abstractmethod
    def memory_at(
        self,
        device: Any,
        pointer: int,
        nbytes: int,
        owner: Any,
        label: str,
        pointer_now: Callable[[], int] | None,
        check_moved: Callable[[], None] | None,
    ) -> DeviceMemory:
        """Names memory on a torch.device; see DeviceMemory."""

    @abc.abstractmethod
    def bytes_at(self, device: str, pointer: int, nbytes: int, owner: Any) -> DeviceBytes:
        """The `nbytes` bytes at an address of the device; `owner` keeps the memory allocated.

        Raises InvalidArgument where this process does not see the device.
        """

    @abc.abstractmethod
    def make_exportable(self, index: int, base: int, nbytes: int, handle: int) -> int:
        """Lets other processes open the memory that the driver knows by `handle`, which is mapped whole at `base` on device `index`. Address
        and bytes stay; nothing uses the memory meanwhile. Returns the handle of what is there then: `handle` itself where the memory could be
        opened already. Raises FailedPrecondition; the memory is as it was then."""

    @abc.abstractmethod
    def new_bytes(self, device: str, nbytes: int) -> DeviceBytes:
        """New memory on the device, which is freed with the last reference."""

    @abc.abstractmethod
    def resolver(
        self,
        label: str,
        member_kind: str,
        member: Handle,
        device: str | None,
        itemsizes: Sequence[int],
        regions: dict[int, tuple[Any, Handle]],
    ) -> Resolver:
        """A resolver for a registration of `member`, of the kind "trainer" or "engine". `regions`: those of the registration before."""

    # ---- waiting for work that torch has queued ----

    @abc.abstractmethod
    def synchronize(self, device: str | None = None) -> None:
        """Waits for the current stream of the device; None: of the current one."""

    @abc.abstractmethod
    def synchronize_tensor(self, tensor: Any) -> None:
        """Waits for the current stream of the device that the tensor is on."""

    @abc.abstractmethod
    def synchronize_all(self) -> None:
        """Waits for all streams of the current device."""
