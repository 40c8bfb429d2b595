"""Boxes of DTensors: which part of the global tensor a rank's local tensor is. Imports torch when used."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ..errors import InvalidArgument

Range = tuple[int, int]  # of indices of one dimension: begin, size


class Part(NamedTuple):
    """A box of the global tensor and where it begins in the local tensor, in elements a dimension."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    local: tuple[int, ...]


class Placed(NamedTuple):
    """The part of a tensor that one rank of a mesh holds.

    `parts`: the boxes of the local tensor, one unless a strided placement leaves gaps. `local_shape`: the local tensor's shape.
    `replica`: this rank's number among those that hold the same, and how many there are. `largest`: the most elements that a rank
    of the mesh may hold. `rows`: True if every rank holds whole rows of dimension 0, one range of them.
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

    Raises InvalidArgument for a Partial placement and for a local tensor that has another shape than its placements say.
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
                culprit=f"tensor '{name}'",
            )
    placed = _place(shape, tuple(mesh.shape), tuple(coordinate), tuple(key))
    if tuple(local.shape) != placed.local_shape:
        raise InvalidArgument(
            f"rank {rank}: tensor '{name}' has a local tensor of shape {tuple(local.shape)}, but placements {tuple(tensor.placements)} "
            f"of {shape} over mesh {tuple(mesh.shape)} give {placed.local_shape} at coordinate {tuple(coordinate)}",
            culprit=f"tensor '{name}'",
        )
    return placed


@lru_cache(maxsize=65536)
def _place(shape: tuple[int, ...], mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Any, ...]) -> Placed:
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

    Each mesh dimension in turn cuts what the ones before left. Shard cuts as torch.chunk does: pieces of ceil(n / shards), the
    last ones shorter or empty. `_StridedShard` with factor f first cuts into f blocks and then each block into pieces; the rank takes
    its piece of every block.
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
    """The elements [begin, begin + size) of the sequence that the ranges make one after the other."""
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
    return [
        Part(tuple(b for b, _, _ in entry), tuple(n for _, n, _ in entry), tuple(at for _, _, at in entry))
        for entry in product(*with_local)
    ]
