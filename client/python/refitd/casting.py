"""Casts of local shards to the dtype that engines serve, with bounded memory.

A compiled refit reads all registered bytes when it is called, so every cast byte must exist then. Therefore tensors that need
a cast are delivered in one of two ways, chosen for all of them together:

- *whole*: a room of all cast shards of this rank, filled before each refit. One compiled refit moves everything, but the room
  takes as much memory as the cast shards.
- *pushed*: each update casts chunk after chunk and pushes them in buckets; memory is two chunks, whatever the model's size.

All ranks must choose the same way, as a tensor that one rank pushes is left out of every rank's layout. So "auto" decides by
what is equal on all ranks: the shapes, placements and dtypes of DTensors and replicated tensors. docs/decisions.md has reasons.

Imports torch when used. Sizes are in bytes unless they say elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any
from zlib import crc32

from . import _dtypes
from ._boxes import row_major
from ._layout import Box
from .errors import InvalidArgument
from .memory import CudaMemory, FilledMemory

if TYPE_CHECKING:
    from .update import Update

DEFAULT_STAGING_BYTES = 256 << 20
CHUNK_BYTES = 8 << 20  # of a pushed cast: large enough to be as fast as one cast, small enough to stay in a last-level cache
_ALIGNMENT = 64  # of each tensor in a room of cast shards

STAGING = ("auto", "whole", "push")


@dataclass
class Cast:
    """A box of a tensor that must be cast.

    `current`: returns the local tensor of the box's extent, wherever its memory is now. `largest`: elements of the largest shard of the tensor over all ranks, or None
    where a rank knows only its own. `rows`: True if every rank holds one range of whole rows of dimension 0. `replica`: the number
    of this rank among those that hold the same elements, and how many they are.
    """

    tensor_index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    current: Callable[[], Any]
    largest: int | None
    rows: bool
    replica: tuple[int, int] = (0, 1)

    @property
    def source(self) -> Any:
        return self.current().detach()

    @property
    def nbytes(self) -> int:
        return int(self.source.numel()) * _dtypes.DTYPES[self.dtype].itemsize

    @property
    def largest_bytes(self) -> int:
        return self.nbytes if self.largest is None else self.largest * _dtypes.DTYPES[self.dtype].itemsize


def plan(casts: Sequence[Cast], *, staging: str, staging_bytes: int, rank: int, alone: bool) -> tuple[list[Box], CastPush | None]:
    """The boxes of casts that are kept whole, and the pushes of the others.

    `alone`: this is the only trainer rank, so that no other must agree. Raises InvalidArgument where the casts fit neither way.
    """
    if staging not in STAGING:
        raise InvalidArgument(f"staging is {staging!r}, {', '.join(map(repr, STAGING))} are possible", culprit="staging")
    pushed = _pushed(casts, staging, staging_bytes, rank, alone)
    whole = [cast for cast in casts if cast.name not in pushed]
    boxes = _staged_whole(whole) if whole else []
    push = CastPush([cast for cast in casts if cast.name in pushed], min(CHUNK_BYTES, max(staging_bytes // 2, 1)))
    return boxes, push if pushed else None


def _pushed(casts: Sequence[Cast], staging: str, staging_bytes: int, rank: int, alone: bool) -> set[str]:
    """The names of the tensors to push."""
    if staging == "whole":
        return set()
    if staging == "push":
        return {cast.name for cast in casts}
    if sum(cast.largest_bytes for cast in casts) <= staging_bytes:
        return set()
    unknown = None if alone else next((cast for cast in casts if cast.largest is None), None)
    if unknown is not None:
        raise InvalidArgument(
            f"rank {rank}: {len(casts)} shards to cast, '{unknown.name}' among them, take {sum(cast.nbytes for cast in casts)} bytes, and "
            f"staging_bytes is {staging_bytes}. Other ranks must choose alike and can't know: pass staging='push' or staging='whole', "
            "or a larger staging_bytes, on every rank",
            culprit=unknown.name,
        )
    # A shard of columns would be pushed row by row: it is kept whole.
    columns = [cast for cast in casts if not cast.rows]
    if sum(cast.largest_bytes for cast in columns) > staging_bytes:
        raise InvalidArgument(
            f"rank {rank}: {len(columns)} tensors to cast are not sharded by rows, '{columns[0].name}' among them, so that they are kept "
            f"whole: they take {sum(cast.largest_bytes for cast in columns)} bytes, and staging_bytes is {staging_bytes}. Pass a "
            "larger staging_bytes, or staging='push' to push them row by row, on every rank",
            culprit=columns[0].name,
        )
    return {cast.name for cast in casts if cast.rows}


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

    def memory(self) -> FilledMemory | CudaMemory:
        device = self.casts[0].source.device
        label = f"{len(self.casts)} cast tensors"
        if device.type == "cpu":
            return FilledMemory(self.nbytes, self.fill, label)
        return self._on_device(device, label)

    def _on_device(self, device: Any, label: str) -> CudaMemory:
        import torch

        room = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        targets = self._targets_in(room)
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"

        def refresh() -> int:
            self._cast_into(targets)
            return int(room.data_ptr())

        return CudaMemory(uuid, room.data_ptr(), self.nbytes, device.index or 0, room, label, refresh)

    def fill(self, view: memoryview) -> None:
        """Casts every shard into `view`, of `nbytes` bytes."""
        import torch

        room = torch.frombuffer(view, dtype=torch.uint8)
        if room.data_ptr() != self.address:
            self.address, self.targets = room.data_ptr(), self._targets_in(room)
        self._cast_into(self.targets)

    def _targets_in(self, room: Any) -> list[Any]:
        return [
            room[at : at + cast.nbytes].view(_dtypes.torch_dtype(cast.dtype)).view(cast.source.shape)
            for cast, at in zip(self.casts, self.offsets)
        ]

    def _cast_into(self, targets: Sequence[Any]) -> None:
        import torch

        with torch.no_grad():
            for cast, target in zip(self.casts, targets):
                target.copy_(cast.source)


class CastPush:
    """Tensors that every update casts chunk by chunk and pushes; see refitd._layout.PushedTensors."""

    def __init__(self, casts: Sequence[Cast], chunk_bytes: int) -> None:
        self._casts = casts
        self._chunk_bytes = chunk_bytes
        self.indices: Sequence[int] = sorted({cast.tensor_index for cast in casts})

    def chunks(self) -> Iterator[tuple[Cast, int, Any]]:
        """(cast, first element in the global tensor, one-dimensional cast elements) of what this rank supplies, in order.

        Of several ranks that hold the same elements one supplies a tensor: its name says which.
        """
        for cast in self._casts:
            index, count = cast.replica
            if crc32(cast.name.encode()) % count == index:
                yield from self._chunks_of(cast)

    def _chunks_of(self, cast: Cast) -> Iterator[tuple[Cast, int, Any]]:
        import torch

        dtype = _dtypes.torch_dtype(cast.dtype)
        most = max(self._chunk_bytes // dtype.itemsize, 1)
        with torch.no_grad():
            for start, source in _ranges(cast.shape, cast.offset, cast.source):
                if source.is_contiguous():
                    source, row = source.view(-1), 1
                else:
                    row = source[0].numel()
                step = max(most // row, 1)
                for first in range(0, len(source), step):
                    yield cast, start + first * row, source[first : first + step].to(dtype).reshape(-1)

    def push(self, update: Update) -> None:
        """Casts and pushes all chunks."""
        for cast, start, elements in self.chunks():
            update.push(cast.name, elements, shape=cast.shape, start=start)


def _ranges(shape: Sequence[int], offset: Sequence[int], source: Any) -> Iterator[tuple[int, Any]]:
    """The parts of a box that are ranges of the global tensor: the first row-major index, and the elements, of any shape."""
    if source.numel() == 0:
        return
    if not shape:
        yield 0, source.reshape(1)
        return
    # The outermost dimension such that the box has all of those inside of it.
    dim = len(shape) - 1
    while dim and source.shape[dim] == shape[dim]:
        dim -= 1
    strides = row_major(shape)
    first = sum(o * s for o, s in zip(offset, strides))
    for indices in product(*(range(n) for n in source.shape[:dim])):
        yield first + sum(i * s for i, s in zip(indices, strides)), source[indices]
