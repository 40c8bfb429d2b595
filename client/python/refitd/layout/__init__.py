"""What a process registers: tensors, the boxes of them that it has, and the memory where they lie."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..errors import InvalidArgument

if TYPE_CHECKING:
    from ..trainer import Update
    from .memory import Memory


def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression to use with fullmatch()."""
    return re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)


def matcher(patterns: Iterable[str], what: str) -> Callable[[str], bool]:
    """A function that returns whether a name matches any of the patterns. Raises InvalidArgument, which names the option `what`, for a
    single str, whose characters would be taken for patterns."""
    if isinstance(patterns, str):
        raise InvalidArgument(f"{what}: {patterns!r} is no list of patterns", culprit=what)
    made = [compiled(pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in made)


# A strided view is cut into at most this number of boxes. Views of real loaders need one to a few; more would make slow layouts.
MAX_BOXES_PER_VIEW = 256


class NotBoxes(ValueError):
    """The elements of a view are not a few boxes of the tensor; the message says why."""


class ViewBox(NamedTuple):
    """A box of the global tensor and the part of the view's memory that corresponds to it.

    `first`: where the box's first element lies in that memory, in elements from the view's first. `strides`: in that memory, an entry for
    each dimension of the global tensor.
    """

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    first: int


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of `shape` in C order."""
    strides = []
    stride = 1
    for n in reversed(shape):
        strides.append(stride)
        stride *= n
    return tuple(reversed(strides))


def span(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory a strided tensor reaches over."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides))


def range_boxes(shape: Sequence[int], start: int, count: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The elements [start, start + count) of a row-major tensor as (offset, extent) of at most 2 * len(shape) - 1 boxes.

    The boxes are in ascending order, and each begins where the box before it ends.
    """
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []

    # The range within dimensions `dim` and inner, at index `prefix` of the outer ones: a part of a row, whole rows, a part of a row.
    def cut(dim: int, start: int, count: int, prefix: tuple[int, ...]) -> None:
        if count == 0:
            return
        ones = (1,) * dim
        inner = shape[dim + 1 :]
        if not inner:
            boxes.append((prefix + (start,), ones + (count,)))
            return
        row = prod(inner)
        first, before = divmod(start, row)
        if before or count < row:
            head = min(count, row - before)
            cut(dim + 1, before, head, prefix + (first,))
            first, count = first + 1, count - head
        rows, tail = divmod(count, row)
        if rows:
            boxes.append((prefix + (first,) + (0,) * len(inner), ones + (rows, *inner)))
        cut(dim + 1, 0, tail, prefix + (first + rows,))

    if not 0 <= start <= start + count <= prod(shape):
        raise ValueError(f"elements [{start}, {start + count}) are not within shape {tuple(shape)}")
    if not shape:
        return [((), ())] * count
    cut(0, start, count, ())
    return boxes


def view_boxes(shape: Sequence[int], offset: int, sizes: Sequence[int], strides: Sequence[int], other: Sequence[int]) -> list[ViewBox]:
    """The boxes of a row-major tensor of `shape` that a strided view of it takes.

    The view begins at element `offset` and has `sizes` and `strides`; `other` are the strides of the memory that the view's
    elements go to or come from, in the same order of dimensions. Raises NotBoxes where the view repeats elements or is more than
    MAX_BOXES_PER_VIEW boxes.
    """
    if 0 in sizes:
        return []
    return _View(shape, offset).boxes([dim for dim in zip(sizes, strides, other) if dim[0] != 1])


class _View:
    """The state of view_boxes: how much of each dimension of the tensor the view's dimensions so far have taken."""

    def __init__(self, shape: Sequence[int], offset: int) -> None:
        self._shape = tuple(shape)
        self._rows = row_major(shape)
        self._start: list[int] = []
        for n, row in zip(self._shape, self._rows):
            index, offset = divmod(offset, row)
            if index >= n:
                raise NotBoxes("it begins outside the tensor")
            self._start.append(index)
        # Each entry describes a dimension: the box's extent, its stride in the other memory, and the span of all boxes.
        self._extent = [1] * len(self._shape)
        self._stride = [1] * len(self._shape)
        self._span = [1] * len(self._shape)
        # Walks along dimensions, box by box: (dimension, boxes, step in the dimension, step in the other memory).
        self._walks: list[tuple[int, int, int, int]] = []

    def boxes(self, dims: list[tuple[int, int, int]]) -> list[ViewBox]:
        """`dims`: (size, stride, other stride) of the view's dimensions of more than one element."""
        pending = sorted(dims, key=lambda dim: -dim[1])
        while pending:
            size, stride, other = pending.pop()
            if stride == 0:
                raise NotBoxes("it is expanded: it repeats elements")
            dim = self._dimension_of(stride)
            step, rest = divmod(stride, self._rows[dim])
            if rest:
                raise NotBoxes(f"stride {stride} is no multiple of the row of {self._rows[dim]} elements that it walks")
            size, stride, other = self._take(dim, size, step, other)
            if size > 1:
                pending.append((size, stride, other))
                pending.sort(key=lambda dim: -dim[1])
        if prod(walk[1] for walk in self._walks) > MAX_BOXES_PER_VIEW:
            raise NotBoxes(f"it is more than {MAX_BOXES_PER_VIEW} boxes")
        return list(self._walk())

    def _dimension_of(self, stride: int) -> int:
        """The outermost dimension of the tensor in which a step of `stride` elements goes at least one index on."""
        for dim, row in enumerate(self._rows):
            if row <= stride and self._shape[dim] > 1:
                return dim
        raise NotBoxes("it has more elements than the tensor")

    def _take(self, dim: int, size: int, step: int, other: int) -> tuple[int, int, int]:
        """Takes `size` elements of `dim`, `step` apart; returns what is left for the dimensions outside of it."""
        extent = self._extent[dim]
        if step < self._span[dim]:
            raise NotBoxes("it repeats elements")
        if step == self._span[dim] == extent and (extent == 1 or other == extent * self._stride[dim]):
            if extent == 1:
                self._stride[dim] = other
            return self._lengthen(dim, size * extent)
        left = 1
        here = size
        if self._start[dim] + (size - 1) * step + self._span[dim] > self._shape[dim]:
            here, rest = divmod(self._shape[dim], step)
            if rest or self._start[dim] + self._span[dim] > step or size % here:
                raise NotBoxes("it crosses rows")
            left = size // here
        if here > 1:
            self._walks.append((dim, here, step, other))
            self._span[dim] += (here - 1) * step
        return left, self._rows[dim] * self._shape[dim], other * here

    def _lengthen(self, dim: int, extent: int) -> tuple[int, int, int]:
        """Gives the box `extent` in `dim`; returns what is left, as _take does."""
        n = self._shape[dim]
        left = 1
        if self._start[dim] + extent > n:
            if self._start[dim] or extent % n:
                raise NotBoxes("it crosses rows")
            left, extent = extent // n, n
        self._extent[dim] = self._span[dim] = extent
        return left, self._rows[dim] * n, self._stride[dim] * n

    def _walk(self) -> Iterator[ViewBox]:
        """Yields the boxes: the first box, moved by every combination of steps along the walks."""
        extent, strides = tuple(self._extent), tuple(self._stride)
        for indices in product(*(range(walk[1]) for walk in self._walks)):
            offset = list(self._start)
            first = 0
            for index, (dim, _, step, other) in zip(indices, self._walks):
                offset[dim] += index * step
                first += index * other
            yield ViewBox(tuple(offset), extent, strides, first)


def first_overlap(boxes: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """The offsets of two boxes, given as (offset, extent), that share elements; None if there are none."""
    taken = [box for box in boxes if 0 not in box[1]]
    if not taken:
        return None
    if not taken[0][0]:  # scalars
        return ((), ()) if len(taken) > 1 else None
    # A sweep along the dimension in which most boxes are apart compares each box only with those that it meets in that dimension.
    dim = max(range(len(taken[0][0])), key=lambda d: len({offset[d] for offset, _ in taken}))
    taken.sort(key=lambda box: box[0][dim])
    open_boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    for offset, extent in taken:
        open_boxes = [box for box in open_boxes if box[0][dim] + box[1][dim] > offset[dim]]
        for other_offset, other_extent in open_boxes:
            if all(a < b + m and b < a + n for a, n, b, m in zip(offset, extent, other_offset, other_extent)):
                return other_offset, offset
        open_boxes.append((offset, extent))
    return None


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor: its name, dtype (a name such as "bfloat16") and unpadded shape, in elements. `derived`: how refits
    compute this engine's tensor; None: it is moved unchanged."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    derived: Derived | None = None


@dataclass(frozen=True)
class Derived:
    """How refits compute an engine's tensor from one that trainers hold.

    `source`: the trainers' tensor, as they register it: float32, bfloat16 or float16. `kind`: "cast" to another of these dtypes;
    "fp8_block", "fp8_block_cuda", "fp8_block_inductor", "fp8_block_reciprocal", "fp8_block_pow2" (float8_e4m3fn values and a float32 scale for
    each block of 128 x 128 of the last two dimensions), "fp8_channel" (a scale for each row) or "mxfp8" (an exponent in a uint8 for each 32
    elements of a row); docs/derived.md has their arithmetic. `role`: "values", of the source's shape, or "scales", of a number a block:
    [rows / 128, columns / 128], rounded up, [rows, 1] or [rows, columns / 32]. An engine that registers the values registers the scales too.
    """

    source: TensorSpec
    kind: str
    role: str = "values"


@dataclass(frozen=True)
class Box:
    """A box of tensor `tensor_index` and where its elements lie.

    `offset`, `extent`: in elements of the global tensor, an entry a dimension. `strides`: in elements, an entry a dimension; they
    may have any values that keep the box within the memory. `byte_offset`: of the box's first element in `memory`.
    """

    tensor_index: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    memory: Memory
    byte_offset: int = 0


class PushedTensors(Protocol):
    """Tensors that every update pushes in buckets instead of moving them from their boxes, casts with bounded memory for instance."""

    # Indices into the layout's tensors.
    indices: Sequence[int]

    def push(self, update: Update) -> None:
        """Pushes the elements of these tensors that this rank supplies, by `update.push(name, tensor, shape=, start=)`."""


class Source(Protocol):
    """What a layout was made of: names, and the tensors that they were bound to then."""

    rebound: int  # names that were bound to other tensors, or other memory, in the layout before; 0 for the first

    def renewed(self) -> Layout | None:
        """The layout of what the names are bound to now; None where nothing has changed. Raises FailedPrecondition, naming the tensor, where
        a name is no longer bound, or is bound to a tensor of another dtype or shape."""


@dataclass
class Layout:
    """Everything that one rank registers: `refitd.layout.shards.collect` returns it, and a capture has the same attributes.

    A tensor may have no box of this rank, such as the second of two tied tensors. `tied`: by a name without boxes, the name with the same
    memory. `before_refit`: every rank calls it before each refit; it may communicate. `source`: what the layout was
    made of, where names may be bound to other tensors later; None: nothing is looked up again.
    """

    tensors: list[TensorSpec] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    pushed: PushedTensors | None = None
    before_refit: Callable[[], None] | None = None
    tied: dict[str, str] = field(default_factory=dict)
    source: Source | None = None


Range = tuple[int, int]  # of indices of one dimension: begin, size


class Part(NamedTuple):
    """A box of the global tensor and where it begins in the local tensor, in elements a dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    local: tuple[int, ...]


class Placed(NamedTuple):
    """The part of a tensor that one rank of a mesh holds.

    `parts`: the boxes of the local tensor: a single one unless a strided placement leaves gaps. `local_shape`: the local tensor's shape.
    `replica`: this rank's number among those that hold the same, and how many there are. `largest`: the most elements that a rank
    of the mesh may hold. `rows`: True if every rank holds a single range of whole rows of dimension 0.
    """

    parts: tuple[Part, ...]
    local_shape: tuple[int, ...]
    replica: tuple[int, int]
    largest: int
    rows: bool


def is_dtensor(x: Any) -> bool:
    """Whether `x` is a DTensor, or the type of DTensors; does not import torch.distributed."""
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def local_tensor(tensor: Any) -> Any:
    """The local tensor of a DTensor, without autograd's wrapping."""
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor.detach().to_local()


def place(name: str, tensor: Any, rank: int) -> Placed:
    """Finds what this rank holds of a DTensor. `name` and `rank` are for errors.

    Raises InvalidArgument for a Partial placement and for a local tensor whose shape differs from its placements.
    """
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    shape = tuple(tensor.shape)
    local = local_tensor(tensor)
    if coordinate is None:  # this rank is not in the mesh
        return Placed((), tuple(local.shape), (0, 1), 0, True)
    key: list[tuple[Any, ...]] = []
    for placement in tensor.placements:
        if placement.is_replicate():
            key.append(("replicate",))
        elif getattr(placement, "split_factor", None) is not None:
            key.append(("strided", placement.dim % len(shape), int(placement.split_factor)))
        elif placement.is_shard():
            key.append(("shard", placement.dim % len(shape)))
        else:
            raise InvalidArgument(
                f"rank {rank}: tensor '{name}' has placement {placement}: its values are not final. Reduce it first, with "
                "redistribute() to Replicate or Shard",
                tensor=name,
            )
    placed = _place(shape, tuple(mesh.shape), tuple(coordinate), tuple(key))
    if tuple(local.shape) != placed.local_shape:
        raise InvalidArgument(
            f"rank {rank}: tensor '{name}' has a local tensor of shape {tuple(local.shape)}, but placements {tuple(tensor.placements)} "
            f"of {shape} over mesh {tuple(mesh.shape)} give {placed.local_shape} at coordinate {tuple(coordinate)}",
            tensor=name,
        )
    return placed


def place_in_mesh(shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], dims: Sequence[int | None]) -> Placed:
    """Finds what the rank at `coordinate` of a mesh of shape `mesh` holds of a tensor. `dims`: for each dimension of the mesh the dimension of the
    tensor that it cuts as torch.chunk does, or None where it replicates."""
    return _place(tuple(shape), tuple(mesh), tuple(coordinate), tuple(("replicate",) if dim is None else ("shard", dim) for dim in dims))


@lru_cache(maxsize=65536)
def _place(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> Placed:
    """place() by values, which many tensors have in common."""
    dims: list[list[Range]] = []
    largest = 1
    for dim, n in enumerate(shape):
        mine = [i for i, placement in enumerate(placements) if placement[1:2] == (dim,)]
        splits = [(mesh[i], placements[i][2] if placements[i][0] == "strided" else 1) for i in mine]
        dims.append(_indices(n, splits, [coordinate[i] for i in mine]))
        most = n
        for shards, factor in splits:
            most = min(most, factor * -(-(-(-most // factor)) // shards))
        largest *= most
    replicated = [i for i, placement in enumerate(placements) if placement[0] == "replicate"]
    index = 0
    for i in replicated:
        index = index * mesh[i] + coordinate[i]
    sharded = {placement[1] for placement in placements if len(placement) > 1}
    strided = any(placement[0] == "strided" for placement in placements)
    return Placed(
        tuple(_parts(dims)),
        tuple(sum(size for _, size in ranges) for ranges in dims),
        (index, prod(mesh[i] for i in replicated)),
        largest,
        all(prod(shape[:dim]) <= 1 for dim in sharded) and not strided,
    )


def _indices(n: int, splits: Sequence[tuple[int, int]], coordinate: Sequence[int]) -> list[Range]:
    """The indices of a dimension of `n` that a rank holds, in the order of its local tensor, as ranges.

    Each mesh dimension in turn cuts the ranges that earlier ones left. Shard cuts as torch.chunk does: chunks of ceil(n / shards), the
    last ones shorter or empty. `_StridedShard` with factor f first cuts into f blocks and then each block into chunks; the rank takes
    its chunk of every block.
    """
    ranges = [(0, n)]
    for (shards, factor), index in zip(splits, coordinate):
        total = sum(size for _, size in ranges)
        if factor == 1:
            ranges = _slice(ranges, *_chunk(total, shards, index))
            continue
        taken: list[Range] = []
        for block in range(factor):
            begin, size = _chunk(total, factor, block)
            within, taking = _chunk(size, shards, index)
            taken += _slice(ranges, begin + within, taking)
        ranges = taken
    return _joined(ranges)


def _chunk(n: int, chunks: int, index: int) -> Range:
    size = -(-n // chunks)
    begin = min(index * size, n)
    return begin, min(size, n - begin)


def _slice(ranges: Sequence[Range], begin: int, size: int) -> list[Range]:
    """The elements [begin, begin + size) of the concatenated ranges."""
    found = []
    for first, n in ranges:
        low, high = max(begin, 0), min(begin + size, n)
        if low < high:
            found.append((first + low, high - low))
        begin -= n
    return found


def _joined(ranges: Sequence[Range]) -> list[Range]:
    joined: list[Range] = []
    for begin, size in ranges:
        if joined and sum(joined[-1]) == begin:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        elif size:
            joined.append((begin, size))
    return joined


def _parts(dims: Sequence[Sequence[Range]]) -> list[Part]:
    with_local = []
    for ranges in dims:
        local = 0
        entries = []
        for begin, size in ranges:
            entries.append((begin, size, local))
            local += size
        with_local.append(entries)
    return [Part(tuple(b for b, _, _ in entry), tuple(n for _, n, _ in entry), tuple(at for _, _, at in entry)) for entry in product(*with_local)]

DEFAULT_STAGING_BYTES = 256 << 20
