"""Casts of local shards to the dtype that engines serve, and additions to them, with bounded memory.

A compiled refit reads all registered bytes when it is called, so every cast byte must exist then. Therefore tensors that need
a cast are delivered in one of two ways, chosen for all of them together:

- *whole*: a room of all cast shards of this rank, filled before each refit. One compiled refit moves everything, but the room
  takes as much memory as the cast shards.
- *pushed*: each update casts into the daemon's staging slots, bucket after bucket: no memory here, whatever the model's size.

What is added to a shard on the way (`Addition`), such as the product of an adapter's matrices, goes the same two ways, whether or
not the dtype changes.

All ranks must choose the same way, as a tensor that one rank pushes is left out of every rank's layout. So "auto" decides by
what is equal on all ranks: the shapes, placements and dtypes of DTensors and replicated tensors. docs/decisions.md has reasons.

Imports torch when used. Sizes are in bytes unless they say elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from zlib import crc32

from .._core.tensors import Source
from ..errors import FailedPrecondition, InvalidArgument
from . import devices
from .boxes import Box, range_boxes, row_major
from .memory import DTYPES, DeviceMemory, FilledMemory, HostMemory, torch_dtype

if TYPE_CHECKING:
    from .memory import DeviceBytes, HostBytes
    from .._core.update import Update

DEFAULT_STAGING_BYTES = 256 << 20
_ALIGNMENT = 64  # each tensor in a room of cast shards begins at a multiple of this

STAGING = ("auto", "whole", "push")


class Addition(Protocol):
    """Something that is added to the elements of a tensor on their way to the engines."""

    def begin(self) -> None:
        """Called on every rank before each refit, in the order in which the tensors are registered: it may communicate."""

    def write(self, target: Any, source: Any, offset: Sequence[int]) -> None:
        """Writes into `target` the sum of `source`, a box that begins at `offset` in the global tensor, and what is added there.

        Both are torch tensors of the box's extent, of any strides; `target` has the dtype to deliver.
        """


class Added(NamedTuple):
    """In a mapping of names to tensors: `tensor`, to whose elements `addition` is added on the way."""

    tensor: Any
    addition: Addition


@dataclass
class Cast:
    """A box of a tensor that must be cast, or to which something is added.

    `current`: returns the local tensor of the box's extent, wherever its memory is now. `replica`: the number of this rank among
    those that hold the same elements, and how many they are.
    """

    tensor_index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    current: Callable[[], Any]
    replica: tuple[int, int] = (0, 1)
    addition: Addition | None = None

    def write(self, target: Any, source: Any, offset: Sequence[int]) -> None:
        """Writes a box of the source, which begins at `offset` in the global tensor, as it is to be delivered."""
        if self.addition is None:
            target.copy_(source)
        else:
            self.addition.write(target, source, offset)

    @property
    def source(self) -> Any:
        return self.current().detach()

    @property
    def nbytes(self) -> int:
        return int(self.source.numel()) * DTYPES[self.dtype].itemsize


@dataclass
class Demand:
    """The memory that a tensor's cast takes on the rank that holds the most of the tensor. All ranks decide by this number.

    `nbytes`: of the cast elements; None where a rank can't know. `ranges`: every rank's boxes are ranges of the row-major tensor.
    """

    nbytes: int | None
    ranges: bool


def plan(
    casts: Sequence[Cast], demands: Mapping[str, Demand], *, staging: str, staging_bytes: int, rank: int, alone: bool
) -> tuple[list[Box], CastPush | None]:
    """The boxes of casts that are kept whole, and the pushes of the others.

    `demands`: of all tensors that are cast on some rank, by name. `alone`: this is the only trainer rank, so that no other must
    agree. Raises InvalidArgument where the casts fit neither way.
    """
    if staging not in STAGING:
        raise InvalidArgument(f"staging is {staging!r}, {', '.join(map(repr, STAGING))} are possible", culprit="staging")
    pushed = _pushed(casts, demands, staging, staging_bytes, rank, alone)
    whole = [cast for cast in casts if cast.name not in pushed]
    boxes = _staged_whole(whole) if whole else []
    push = CastPush([cast for cast in casts if cast.name in pushed])
    return boxes, push if pushed else None


def _pushed(
    casts: Sequence[Cast], demands: Mapping[str, Demand], staging: str, staging_bytes: int, rank: int, alone: bool
) -> set[str]:
    """The names of the tensors to push."""
    if staging == "whole":
        return set()
    if staging == "push":
        return set(demands)
    held: dict[str, int] = {}
    for cast in casts:
        held[cast.name] = held.get(cast.name, 0) + cast.nbytes
    if alone:
        needed = {name: held.get(name, 0) for name in demands}
    else:
        needed = {name: held.get(name, 0) if demand.nbytes is None else demand.nbytes for name, demand in demands.items()}
    if sum(needed.values()) <= staging_bytes:
        return set()
    unknown = None if alone else next((name for name, demand in demands.items() if demand.nbytes is None), None)
    if unknown is not None:
        raise InvalidArgument(
            f"rank {rank}: tensors to cast, '{unknown}' among them, take {sum(needed.values())} bytes, and staging_bytes is "
            f"{staging_bytes}. Other ranks must choose alike and can't know: pass staging='push' or staging='whole', or a larger "
            "staging_bytes, on every rank",
            culprit=f"tensor '{unknown}'",
        )
    # A shard of columns would be pushed row by row, each a bucket of its own: it is kept whole.
    columns = {name: nbytes for name, nbytes in needed.items() if not demands[name].ranges}
    if sum(columns.values()) > staging_bytes:
        first = next(iter(columns))
        raise InvalidArgument(
            f"rank {rank}: {len(columns)} tensors to cast are sharded by columns, '{first}' among them, so that they are kept whole: "
            f"they take {sum(columns.values())} bytes, and staging_bytes is {staging_bytes}. Pass a larger staging_bytes, or "
            "staging='push' to push them row by row, on every rank",
            culprit=f"tensor '{first}'",
        )
    return set(demands) - set(columns)


def _staged_whole(casts: Sequence[Cast]) -> list[Box]:
    offsets = []
    end = 0
    for cast in casts:
        offsets.append(end)
        end += -(-cast.nbytes // _ALIGNMENT) * _ALIGNMENT
    room = _Room(casts, offsets, end)
    memory = room.memory()
    boxes = []
    for cast, byte_offset in zip(casts, offsets):
        extent = tuple(cast.source.shape)
        boxes.append(Box(cast.tensor_index, cast.offset, extent, row_major(extent), memory, byte_offset))
    return boxes


@dataclass
class _Room:
    """The room of all cast shards that are kept whole."""

    casts: Sequence[Cast]
    offsets: Sequence[int]
    nbytes: int
    # The room's tensors on the host, made for the address that fill() was given last.
    address: int = 0
    targets: list[Any] = field(default_factory=list)

    def memory(self) -> FilledMemory | HostMemory | DeviceMemory:
        device = self.casts[0].source.device
        label = f"{len(self.casts)} cast tensors"
        if device.type == "cpu":
            return FilledMemory(self.nbytes, self.fill, label)
        return self._on_device(device, label)

    def _on_device(self, device: Any, label: str) -> HostMemory | DeviceMemory:
        import torch

        room = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        targets = self._targets_in(room)

        def refresh() -> int:
            self._cast_into(targets)
            return int(room.data_ptr())

        return devices.memory_at(device, room.data_ptr(), self.nbytes, room, label, refresh, what=label, culprit=label)

    def fill(self, view: memoryview) -> None:
        """Casts every shard into `view`, of `nbytes` bytes."""
        import torch

        room = torch.frombuffer(view, dtype=torch.uint8)
        if room.data_ptr() != self.address:
            self.address, self.targets = room.data_ptr(), self._targets_in(room)
        self._cast_into(self.targets)

    def _targets_in(self, room: Any) -> list[Any]:
        return [
            room[at : at + cast.nbytes].view(torch_dtype(cast.dtype)).view(cast.source.shape)
            for cast, at in zip(self.casts, self.offsets)
        ]

    def _cast_into(self, targets: Sequence[Any]) -> None:
        import torch

        with torch.no_grad():
            for cast, target in zip(self.casts, targets):
                source = cast.source
                if source.shape != target.shape or source.untyped_storage().nbytes() == 0 < source.numel():
                    raise FailedPrecondition(
                        f"tensor '{cast.name}' was registered with a shard of shape {tuple(target.shape)}, and is now of shape "
                        f"{tuple(source.shape)}, with {source.untyped_storage().nbytes()} bytes of memory",
                        culprit=f"tensor '{cast.name}'",
                    )
                cast.write(target, source, cast.offset)


class CastPush:
    """Tensors that every update casts into its slots; see refitd.layout.boxes.PushedTensors."""

    def __init__(self, casts: Sequence[Cast]) -> None:
        self._casts = casts
        self.indices: Sequence[int] = sorted({cast.tensor_index for cast in casts})

    def push(self, update: Update) -> None:
        """Pushes what this rank supplies, cast on the way into the slots.

        Of several ranks that hold the same elements one supplies a tensor: its name says which.
        """
        for cast in self._casts:
            index, count = cast.replica
            if crc32(cast.name.encode()) % count == index:
                for start, offset, tensor in _ranges(cast.shape, cast.offset, cast.source):
                    update.push(cast.name, _source(cast, offset, tensor), shape=cast.shape, start=start)


def _source(cast: Cast, at: Sequence[int], tensor: Any) -> Source:
    """A source of the elements of a box at `at` in the global tensor, in row-major order, cast when they are copied."""

    def copy(target: HostBytes | DeviceBytes, start: int, count: int) -> None:
        import torch

        with torch.no_grad():
            room = target.torch((count,), cast.dtype)
            # Boxes are views, whatever the strides; a flattened tensor might be a copy of all of it.
            for offset, extent in range_boxes(tensor.shape, start, count):
                elements = tensor[tuple(slice(first, first + n) for first, n in zip(offset, extent))]
                cast.write(room[: elements.numel()].view(extent), elements, [a + b for a, b in zip(at, offset)])
                room = room[elements.numel() :]

    return Source(DTYPES[cast.dtype], tuple(tensor.shape), tensor.numel(), copy, 0, tensor)


def _ranges(shape: Sequence[int], offset: Sequence[int], source: Any) -> Iterator[tuple[int, Sequence[int], Any]]:
    """The parts of a box that are ranges of the global tensor: the first row-major index, the offset, and the elements."""
    if source.numel() == 0:
        return
    if not shape:
        yield 0, (), source.reshape(1)
        return
    # The outermost dimension such that the box has all of those inside of it.
    dim = len(shape) - 1
    while dim and source.shape[dim] == shape[dim]:
        dim -= 1
    strides = row_major(shape)
    first = sum(o * s for o, s in zip(offset, strides))
    for indices in product(*(range(n) for n in source.shape[:dim])):
        at = [*(o + i for o, i in zip(offset, indices)), *offset[dim:]]
        yield first + sum(i * s for i, s in zip(indices, strides)), at, source[tuple(slice(i, i + 1) for i in indices)]
