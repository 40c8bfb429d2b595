"""Places where a tensor's bytes may lie. Objects of this module only name memory; the member that registers them makes regions of it.

Four kinds exist:

- `HostMemory`: bytes of this process. Those within a region of the member (`Trainer.empty`, `Trainer.adopt`) are moved from
  where they are; any others are staged: copied into a region at each refit, with a `StagingWarning`.
- `RegionMemory`: bytes of one region, named by the region itself.
- `FilledMemory`: bytes that do not exist yet. The member keeps room for them in a region, and a function of the caller fills
  that room before each refit (a cast, for instance).
- `DeviceMemory`: bytes on a device, of a class for its kind (`refitd.CudaMemory` on a GPU).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from .regions import Region


@dataclass(frozen=True)
class HostMemory:
    """`nbytes` bytes of this process from address `pointer`; `owner` (a tensor or array) keeps them allocated.

    `label` names the bytes in warnings and errors, usually by the tensor's name. `pointer_now`, if given, tells where the bytes are
    at each refit: memory that moved is bound anew, after `check_moved`, if given, has raised nothing. It should raise where the
    tensor is not what it was when it was registered.
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

    `owner` keeps the memory allocated. `pointer_now`, if given, tells where the bytes are at each refit: memory that moved is
    bound anew, after `check_moved`, as of HostMemory.
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
