"""From tensors to layouts: `collect` turns what a framework has into what `Trainer.register` takes.

    refitd.layout.shards.collect(model, dtype=torch.bfloat16)                      # nn.Module: parameters and persistent buffers
    refitd.layout.shards.collect(model.state_dict())                               # tensors and DTensors by name
    refitd.layout.shards.collect([Shard("w", (8, 4), rows, offset=(4, 0)), ...])   # boxes of global tensors, listed one by one

Everything is checked before anything is registered: an InvalidArgument or FailedPrecondition names the tensor and the rank, and
its `culprit` is "tensor '...'".

This module needs no framework: torch tensors, DTensors and numpy arrays are recognised by attributes. So FSDP2's models (`fully_shard`), which
keep DTensors, are taken as they are. FSDP1 (`FullyShardedDataParallel`) keeps one flat parameter a unit, of which each rank holds a range that cuts
tensors anywhere: `flat_shards(model)` gives these ranges as boxes, in place, with no gather and no copy. A state dict of type SHARDED_STATE_DICT is
understood too, but FSDP1 makes its tensors anew on every call, so that these must be registered again for each version.

Casts of local shards to the dtype that engines serve, and additions to them, take bounded memory.
A compiled refit reads all registered bytes when it is called, so every cast byte must exist then. Therefore tensors that need
a cast are delivered in one of two ways, the same for all of them:

- *whole*: a room of all cast shards of this rank, filled before each refit. One compiled refit moves everything, but the room
  takes as much memory as the cast shards.
- *pushed*: each update casts into the daemon's staging slots, bucket after bucket: no memory here, whatever the model's size.

What is added to a shard on the way (`Addition`), such as the product of an adapter's matrices, goes the same two ways, whether or
not the dtype changes.

All ranks must choose the same way, as a tensor that one rank pushes is left out of every rank's layout. So "auto" decides by
what is equal on all ranks: the shapes, placements and dtypes of DTensors and replicated tensors. docs/decisions.md has reasons.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from zlib import crc32

from .._core import paused
from .._core.member import TensorAddress, integers
from .._core.tensors import Bindings, Marks
from ..errors import Error, FailedPrecondition, InvalidArgument
from . import (
    DEFAULT_STAGING_BYTES, Box, Layout, Part, TensorSpec, compiled, devices, first_overlap, is_dtensor, local_tensor, matcher, place,
    range_boxes, row_major,
)  # fmt: skip
from .memory import DTYPES, DeviceMemory, FilledMemory, HostMemory, Memory, Source, resolve, torch_dtype

if TYPE_CHECKING:
    from ..trainer import Update
    from .memory import DeviceBytes, HostBytes


# A cast to `dtype` is made of these types only: others, such as float8 with its scales, mean something else after a cast.
CAST_FROM = frozenset({"float64", "float32", "float16", "bfloat16"})
# Casts that keep values, but for a float's rounding: by type, the types to which it may be cast. All other casts must be declared.
_KEEPS_VALUES = {
    **dict.fromkeys(CAST_FROM, CAST_FROM),
    "int8": frozenset({"int16", "int32", "int64"}),
    "uint8": frozenset({"int16", "int32", "int64"}),
    "int16": frozenset({"int32", "int64"}),
    "int32": frozenset({"int64"}),
}


@dataclass(frozen=True)
class Shard:
    """A box of a global tensor that this rank holds.

    `name`, `shape`: of the global tensor, unpadded, in elements. `tensor`: the elements of the box, of the box's extent and with
    any strides; None: this rank holds none of the tensor, and must give `dtype`. `offset`: of the box in the global tensor; None:
    zeros. `dtype`: the dtype to deliver; None: that of `collect`, else the tensor's own; without a tensor, the dtype on the ranks that
    hold it.

    The other fields are used where casts are pushed. `replica`: this rank's number among the ranks that hold the same box, and how many
    they are. `largest`: the most elements that any rank holds of the tensor, in all its shards; `ranges`: whether every rank's
    boxes of it are ranges of the row-major tensor. Both are equal on all ranks, or None where a rank does not know. `addition`: what
    is added to the elements on the way, as `refitd.integrations.lora.Product` is; given on every rank, also where `tensor` is None.
    """

    name: str
    shape: Sequence[int]
    tensor: Any
    offset: Sequence[int] | None = None
    dtype: Any = None
    replica: tuple[int, int] = (0, 1)
    largest: int | None = None
    ranges: bool | None = None
    addition: Addition | None = None


def range_shards(shard: Shard, start: int) -> Iterator[Shard]:
    """The shards of a flat range: `shard.tensor`, one-dimensional, is [start, start + its length) of the row-major tensor.

    A range that begins and ends within rows is at most 2 * len(shape) - 1 boxes, all of them views of the tensor. Raises
    InvalidArgument if the range is not within the tensor.
    """
    try:
        boxes = range_boxes(shard.shape, start, len(shard.tensor))
    except ValueError as error:
        raise InvalidArgument(f"tensor '{shard.name}': {error}", tensor=shard.name) from None
    begin = 0
    for offset, extent in boxes:
        count = prod(extent)
        yield replace(shard, tensor=shard.tensor[begin : begin + count].reshape(extent), offset=offset, ranges=True)
        begin += count


def collect(
    x: Any,
    dtype: Any = None,
    exceptions: Mapping[str, Any] | None = None,
    *,
    buffers: bool | Sequence[str] = True,
    leave_out: Sequence[str] = (),
    any_cast: Sequence[str] = (),
    tied: bool | Mapping[str, str] = True,
    rank: int = 0,
    world_size: int | None = None,
    device: Any = None,
    staging: str = "auto",
    staging_bytes: int = DEFAULT_STAGING_BYTES,
) -> Layout:
    """The layout of what this rank holds.

    `x`: an nn.Module, a mapping of names to tensors (plain ones are whole; DTensors are boxes by their placements; either may be in an
    Added), or an iterable of `Shard`.
    `dtype`, `exceptions`, `buffers`, `leave_out`, `any_cast`, `tied`, `staging`, `staging_bytes`: as in Trainer.register.
    `rank`: for errors. `world_size`: of the trainer; with 1, a tensor that is not covered whole is an error. With more, plain
    tensors of a mapping count as replicated on all ranks where casts are pushed.
    `device`: the device of all tensors, as torch.device takes it; None: that of the first tensor.

    Raises InvalidArgument for a wrong dtype, shape, offset or placement, overlapping or missing shards, expanded tensors, another
    device; FailedPrecondition for memory that was freed. Nothing is kept then.

    The layout refers to the tensors' memory. Its `source` looks every name up again: in the module, in the same dict, in the memory of
    a Shard's tensor. Pass the module: the dict of a plain `state_dict()` is never bound to other tensors.
    """
    where = None if device is None else str(device)
    rules = _Rules(dtype, exceptions or {}, any_cast, rank)
    options = _Options(rules, buffers, matcher(leave_out, "leave_out"), tied, rank, world_size, where, staging, staging_bytes)
    return _collect(x, options, _find(x, options))


@dataclass(frozen=True)
class _Options:
    """The arguments of `collect`."""

    rules: _Rules
    buffers: bool | Sequence[str]
    left_out: Callable[[str], bool]
    tied: bool | Mapping[str, str]
    rank: int
    world_size: int | None
    device: str | None
    staging: str
    staging_bytes: int


def _collect(x: Any, options: _Options, found: _Found) -> Layout:
    """collect() with its arguments checked and the tensors of `x` found."""
    collector = _Collector(options)
    held: list[_BoundShard] = []
    with paused():
        for each in _held(found.named, options):
            collector.add(each)
            held.append(each)
        collector.check_overlaps()
        collector.check_ties()
        if options.world_size == 1:
            collector.check_complete()
        layout = collector.layout
        boxes, layout.pushed = _plan(collector.casts, collector.demands, options)
        layout.boxes += boxes
        first = x.made_of.first if isinstance(x, (MadeMapping, MadeShards)) else None
        steps = [*([] if first is None else [first]), *(addition.begin for addition in collector.additions.values())]
        layout.before_refit = partial(_call_all, steps) if steps else None
        layout.source = _Source(x, options, found, held, collector.specs())
    return layout


def _call_all(steps: Iterable[Callable[[], None]]) -> None:
    for step in steps:
        step()


@dataclass(frozen=True)
class MadeOf:
    """How a mapping or a list of Shard was made of modules. `make()` makes it again, where names of the modules are bound to other tensors,
    or where a tensor that a function of `watched` returns, to which no name is bound, has moved. Every rank calls `first` before each refit;
    it may communicate."""

    modules: Sequence[Any]
    make: Callable[[], Any]
    watched: Sequence[Callable[[], Any]] = ()
    first: Callable[[], None] | None = None


class MadeMapping(dict[str, Any]):
    """A dict that was made of a module; registered, it is made again where the module has changed."""

    def __init__(self, entries: Mapping[str, Any], made_of: MadeOf) -> None:
        super().__init__(entries)
        self.made_of = made_of


class MadeShards(list[Shard]):
    """A list of Shard that was made of a module; registered, it is made again where the module has changed."""

    def __init__(self, shards: Iterable[Shard], made_of: MadeOf) -> None:
        super().__init__(shards)
        self.made_of = made_of


@dataclass
class _Found:
    """The tensors of `x`. `bindings`: where their names are looked up; None: only by reading `x` again."""

    named: Mapping[str, Any] | list[Shard]
    bindings: Bindings | None
    watched: Sequence[Callable[[], Any]] = ()

    def same_objects(self, other: _Found) -> bool:
        mine, others = self.named, other.named
        if isinstance(mine, Mapping) and isinstance(others, Mapping):
            return mine.keys() == others.keys() and all(tensor is others[name] for name, tensor in mine.items())
        return mine is others


def _find(x: Any, options: _Options) -> _Found:
    """Finds the tensors of `x`, and where their names are looked up later."""
    buffers = options.buffers
    if hasattr(x, "named_parameters") and hasattr(x, "state_dict"):
        named = _of_module(x, buffers)
        bindings = Bindings.of_modules(x)
        return _Found(named, bindings if bindings.holds_all(named.values()) else None)
    if buffers is not True:
        raise InvalidArgument(
            f"buffers is {buffers!r}, but {type(x).__name__} does not tell buffers from parameters: pass the module, or leave them out",
            culprit="buffers",
        )
    if isinstance(x, (MadeMapping, MadeShards)):
        bindings = Bindings.of_modules(*x.made_of.modules)
        return _Found(x, bindings if bindings.complete else None, x.made_of.watched)
    if isinstance(x, dict):
        return _Found(dict(x), Bindings.of_dict(x))
    if isinstance(x, Mapping):
        return _Found(dict(x), None)
    if not isinstance(x, Iterable):
        raise InvalidArgument(f"{type(x).__name__} is no module, mapping or list of Shard", culprit="x")
    return _Found(list(x), Bindings())


class _Source:
    """Looks up what a layout was collected from: see refitd.layout.Source."""

    def __init__(self, x: Any, options: _Options, found: _Found, held: Sequence[_BoundShard], specs: Mapping[str, _Spec]) -> None:
        self.rebound = 0
        self._options, self._found, self._specs = options, found, specs
        self._x = found.named if isinstance(found.named, list) else x  # an iterator has no more shards
        self._names = [each.shard.name for each in held]
        bound = [each.bound for each in held]
        self._marks = Marks([*bound, *found.watched], [*(each.current for each in held), *found.watched])
        # Tensors that are made of a module are new each time, so that only their memory counts.
        self._made_of = x.made_of if isinstance(x, (MadeMapping, MadeShards)) else None
        objects = map(id, bound) if self._made_of is None else [0] * len(held)
        self._bound = list(zip(objects, self._marks.values, [id(each.shard.addition) for each in held]))

    def renewed(self) -> Layout | None:
        """See refitd.layout.Source."""
        found = self._found
        holds = found.bindings is not None and found.bindings.hold()
        if holds and self._marks.same():
            return None
        if self._made_of is not None:
            self._x = self._made_of.make()
        if not holds or self._made_of is not None:
            found = _find(self._x, self._options)
        if found.same_objects(self._found) and self._marks.same():
            self._found = found  # FSDP2, for instance, wraps modules and unwraps them again: the names are bound as before
            return None
        return self._collect_again(found)

    def _by_name(self) -> dict[str, list[Any]]:
        """What each name is bound to."""
        found: dict[str, list[Any]] = {}
        for name, bound in zip(self._names, self._bound):
            found.setdefault(name, []).append(bound)
        return found

    def _collect_again(self, found: _Found) -> Layout | None:
        try:
            layout = _collect(self._x, self._options, found)
        except InvalidArgument as error:
            raise FailedPrecondition(f"{error} (it was registered otherwise)", culprit=error.culprit) from error
        source = layout.source
        assert isinstance(source, _Source)
        self._check_fits(source)
        before, now = self._by_name(), source._by_name()
        source.rebound = sum(before.get(name) != bound for name, bound in now.items())
        if source.rebound == 0:
            self._found, self._marks = found, source._marks
            return None
        return layout

    def _check_fits(self, source: _Source) -> None:
        for name, spec in self._specs.items():
            now = source._specs.get(name)
            if now == spec:
                continue
            is_now = "is no longer there" if now is None else f"is now {now}"
            raise _wrong(self._options.rank, name, f" was registered as {spec}, and {is_now}: register again", FailedPrecondition)


class _Spec(NamedTuple):
    """A global tensor, as it is stored and delivered."""

    shape: tuple[int, ...]
    stored: str
    delivered: str

    def __str__(self) -> str:
        cast = "" if self.stored == self.delivered else f", to deliver as {self.delivered}"
        return f"{self.stored} {self.shape}{cast}"


@dataclass
class _BoundShard:
    """A shard. `current` returns the shard's tensor, wherever the memory is now."""

    shard: Shard
    current: Callable[[], Any]
    bound: Any = None  # what the name is bound to, a DTensor for instance; None: no memory

    @property
    def address(self) -> Callable[[], int]:
        """A function that returns where the shard's memory is now. Every refit calls it for every shard."""
        current = self.current
        same = isinstance(current, partial) and current.func is _same
        return TensorAddress(current, self.shard.tensor if same else None)

    def check(self, dtype: Any, extent: tuple[int, ...], strides: tuple[int, ...], rank: int) -> None:
        """Raises FailedPrecondition where the tensor, which was moved, is not of the dtype, shape and strides that were registered."""
        name, tensor = self.shard.name, self.current()
        _View(name, tensor, tensor.element_size(), rank)
        if (tensor.dtype, tuple(tensor.shape), tensor.stride()) != (dtype, extent, strides):
            why = (
                f" was registered as {dtype} {extent} with strides {strides}, and is now {tensor.dtype} {tuple(tensor.shape)} with strides "
                f"{tensor.stride()}: register it again"
            )
            raise _wrong(rank, name, why, FailedPrecondition)


def _held(named: Mapping[str, Any] | list[Any], options: _Options) -> Iterator[_BoundShard]:
    rank = options.rank
    if isinstance(named, Mapping):
        for name, tensor in named.items():
            if not options.left_out(name):
                yield from _of_tensor(name, tensor, rank, options.world_size)
        return
    for shard in named:
        if not isinstance(shard, Shard):
            raise InvalidArgument(f"rank {rank}: a list of Shard has a {type(shard).__name__}", culprit="x")
        if options.left_out(shard.name):
            continue
        yield _BoundShard(_with_integers(shard, rank), partial(_same, shard.tensor), shard.tensor)


def _with_integers(shard: Shard, rank: int) -> Shard:
    """The same shard with tuples of int, as the other sources of shards give them."""
    shape = integers(shard.shape)
    offset = None if shard.offset is None else integers(shard.offset)
    for what, given, made in (("shape", shard.shape, shape), ("offset", shard.offset, offset)):
        if made is None and given is not None:
            raise _wrong(rank, shard.name, f" has {what} {given!r}, which is no sequence of integers")
    if shape is None or min(shape, default=0) < 0:
        raise _wrong(rank, shard.name, f" has shape {shard.shape!r}, which is no shape")
    return replace(shard, shape=shape, offset=offset)


def _of_module(module: Any, buffers: bool | Sequence[str]) -> dict[str, Any]:
    tensors: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    if buffers is True:
        return tensors
    taken = matcher(buffers or (), "buffers")
    names = {name for name, _ in module.named_buffers(remove_duplicate=False)}
    return {name: tensor for name, tensor in tensors.items() if name not in names or taken(name)}


def _same(tensor: Any) -> Any:
    return tensor


def _part_of(tensor: Any, part: Part) -> Any:
    local = local_tensor(tensor)
    return local[tuple(slice(begin, begin + n) for begin, n in zip(part.local, part.extent))]


@cache
def _kind_of(kind: type) -> str:
    """Which kind of tensor a type's objects are; "": none. Kept by type, because looking for missing attributes of every tensor is slow."""
    if hasattr(kind, "local_shards"):
        return "ShardedTensor"
    if is_dtensor(kind):
        return "DTensor"
    return "tensor" if hasattr(kind, "shape") and hasattr(kind, "dtype") else ""


def _of_tensor(name: str, tensor: Any, rank: int, world_size: int | None) -> Iterator[_BoundShard]:
    """The shards that this rank holds of a tensor, DTensor or ShardedTensor."""
    if isinstance(tensor, Added):
        for held in _of_tensor(name, tensor.tensor, rank, world_size):
            yield replace(held, shard=replace(held.shard, addition=tensor.addition))
        return
    tensor_type: Any = type(tensor)
    kind = _kind_of(tensor_type)
    if kind == "tensor":
        shape = tuple(tensor.shape)
        replica = (rank, world_size) if world_size else (0, 1)
        yield _BoundShard(Shard(name, shape, tensor, None, None, replica, prod(shape), True), partial(_same, tensor), tensor)
        return
    if kind == "ShardedTensor":
        yield from _of_sharded_tensor(name, tensor)
        return
    if kind != "DTensor":
        raise InvalidArgument(f"rank {rank}: '{name}' is a {type(tensor).__name__}, no tensor", tensor=name)
    placed = place(name, tensor, rank)
    shape = tuple(tensor.shape)
    if len(placed.parts) == 1 and placed.parts[0].extent == placed.local_shape:
        shard = Shard(name, shape, local_tensor(tensor), placed.parts[0].offset, None, placed.replica, placed.largest, placed.rows)
        yield _BoundShard(shard, partial(local_tensor, tensor), tensor)
        return
    if not placed.parts:
        yield _BoundShard(Shard(name, shape, None, None, tensor.dtype, (0, 1), placed.largest, placed.rows), partial(_same, None))
    for part in placed.parts:
        current = partial(_part_of, tensor, part)
        shard = Shard(name, shape, current(), part.offset, None, placed.replica, placed.largest, placed.rows)
        yield _BoundShard(shard, current, tensor)


def _of_sharded_tensor(name: str, tensor: Any) -> Iterator[_BoundShard]:
    """The shards of a ShardedTensor, which FSDP1's older state dicts have: its metadata lists the boxes."""
    shape = tuple(tensor.size())
    shards = tensor.local_shards()
    held: Counter[int] = Counter()  # elements, by rank
    for box in tensor.metadata().shards_metadata:
        held[box.placement.rank()] += prod(box.shard_sizes)
    largest = max(held.values(), default=0)
    rows = all(tuple(box.shard_sizes[1:]) == shape[1:] for box in tensor.metadata().shards_metadata)
    if not shards:  # all ranks name the same tensors
        yield _BoundShard(Shard(name, shape, None, None, tensor.dtype, (0, 1), largest, rows), partial(_same, None))
    for shard in shards:
        whole = Shard(name, shape, shard.tensor, tuple(shard.metadata.shard_offsets), None, (0, 1), largest, rows)
        yield _BoundShard(whole, partial(_same, shard.tensor), shard.tensor)


def _wrong(rank: int, name: str, why: str, kind: type[Error] = InvalidArgument) -> Error:
    return kind(f"rank {rank}: tensor '{name}'{why}", tensor=name)


class _Rules:
    """Decides in which dtype each tensor is delivered."""

    def __init__(self, dtype: Any, exceptions: Mapping[str, Any], any_cast: Sequence[str], rank: int) -> None:
        self._dtype = None if dtype is None else resolve(dtype, "dtype").name
        self._exceptions = [
            (compiled(pattern), None if to is None else resolve(to, f"exceptions['{pattern}']").name) for pattern, to in exceptions.items()
        ]
        self._any_cast = matcher(any_cast, "any_cast")
        self._rank = rank
        self._names: dict[Any, str] = {}

    def stored(self, name: str, dtype: Any) -> str:
        """refitd's name of a tensor's dtype."""
        found = self._names.get(dtype)
        if found is None:
            try:
                found = self._names[dtype] = resolve(dtype).name
            except InvalidArgument as error:
                why = (
                    f": {error}. If engines need it not, leave it out: leave_out=['{name}'], or of a module's buffers buffers=False or patterns of "
                    "those to take"
                )
                raise _wrong(self._rank, name, why) from None
        return found

    def delivered(self, name: str, stored: str, given: Any) -> str:
        """The dtype in which to deliver a tensor that is stored as `stored`. `given`: that of its Shard, if any.

        Raises InvalidArgument, naming the tensor, for a cast that loses values and was not declared."""
        to = self._wanted(name, stored, given)
        if to != stored and to not in _KEEPS_VALUES.get(stored, ()) and not self._any_cast(name):
            raise _wrong(self._rank, name, f" is {stored}, and a cast to {to} loses values: declare any_cast=['{name}'] if it is meant")
        return to

    def _wanted(self, name: str, stored: str, given: Any) -> str:
        if given is not None:
            return self.stored(name, given)
        for pattern, to in self._exceptions:
            if pattern.fullmatch(name):
                return to or stored
        return self._dtype if self._dtype is not None and stored in CAST_FROM else stored


@cache
def _is_torch(kind: type) -> bool:
    return hasattr(kind, "untyped_storage")


class _View:
    """Where the elements of a torch tensor or numpy array lie; the constructor checks that they can be moved from there."""

    __slots__ = ("pointer", "strides", "device", "nbytes")

    def __init__(self, name: str, tensor: Any, itemsize: int, rank: int) -> None:
        tensor_type: Any = type(tensor)
        if not _is_torch(tensor_type):
            if not hasattr(tensor, "__array_interface__"):
                raise _wrong(rank, name, f" is a {tensor_type.__name__}: register torch tensors or numpy arrays, or push it")
            self.pointer: int = tensor.__array_interface__["data"][0]
            strides = tensor.strides
            if any(stride % itemsize or stride < 0 for stride in strides):
                raise _wrong(rank, name, f" has byte strides {strides}")
            self.strides: tuple[int, ...] = tuple(stride // itemsize for stride in strides)
            self.device: Any = None
        else:
            self._read_torch(name, tensor, itemsize, rank)
        span = 1
        for n, stride in zip(tensor.shape, self.strides):
            if n == 0:
                self.nbytes = 0
                return
            if stride == 0 and n > 1:
                why = f" is expanded: strides {self.strides} of shape {tuple(tensor.shape)} repeat elements. Pass a contiguous copy"
                raise _wrong(rank, name, why)
            span += (n - 1) * stride
        self.nbytes = span * itemsize
        if self.device is None:
            return
        if tensor.untyped_storage().nbytes() < tensor.storage_offset() * itemsize + self.nbytes:
            self._refuse_freed(name, tensor, rank)
        if self.pointer == 0:
            raise _wrong(rank, name, f" is a {type(tensor).__name__} without memory", FailedPrecondition)

    def _read_torch(self, name: str, tensor: Any, itemsize: int, rank: int) -> None:
        self.device = tensor.device
        if self.device.type == "meta":
            raise _wrong(rank, name, " is on device meta: it has no memory", FailedPrecondition)
        if tensor.layout is not sys.modules["torch"].strided:
            raise _wrong(rank, name, f" has layout {tensor.layout}, not torch.strided")
        if tensor.is_neg() or tensor.is_conj():
            raise _wrong(rank, name, " is negated lazily: pass tensor.resolve_neg()")
        self.strides = tensor.stride()
        self.pointer = tensor.data_ptr()

    def _refuse_freed(self, name: str, tensor: Any, rank: int) -> None:
        why = (
            f" needs {self.nbytes} bytes from element {tensor.storage_offset()} on, but its storage has {tensor.untyped_storage().nbytes()}: its "
            "memory was freed, as sharded training does between uses"
        )
        raise _wrong(rank, name, why, FailedPrecondition)


class _Collector:
    """Builds a layout shard by shard."""

    def __init__(self, options: _Options) -> None:
        self.layout = Layout()
        self.casts: list[Cast] = []
        self.demands: dict[str, Demand] = {}
        # By id() of the object, since several shards may name one addition.
        self.additions: dict[int, Addition] = {}
        self._rules, self._tied, self._rank, self._device = options.rules, options.tied, options.rank, options.device
        # By name: the index in layout.tensors, and the dtype in which the rank stores the tensor.
        self._tensors: dict[str, tuple[int, str]] = {}
        # By name: offset and extent of each box so far.
        self._boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        # By pointer, dtype, extent, offset, strides and addition: the name that has boxes there.
        self._memory: dict[tuple[Any, ...], str] = {}

    def add(self, held: _BoundShard) -> None:
        """Checks a shard, and adds it as a box or as a cast."""
        shard = held.shard
        name, tensor = shard.name, shard.tensor
        if shard.addition is not None:
            self.additions[id(shard.addition)] = shard.addition
        if tensor is None:
            self._list_without_boxes(held)
            return
        shape = tuple(shard.shape)
        stored = self._rules.stored(name, tensor.dtype)
        delivered = self._rules.delivered(name, stored, shard.dtype)
        index = self._index_of(name, shape, stored, delivered)
        offset, extent = self._box_of(name, shape, tensor, shard.offset)
        itemsize = DTYPES[stored].itemsize
        staged = delivered != stored or shard.addition is not None
        if staged:
            self._demand(held, delivered, extent)
        view = _View(name, tensor, itemsize, self._rank)
        if view.device is not None:
            self._check_device(name, view.device)
        if 0 in extent or self._is_tied(name, view, stored, extent, offset, shard.addition):
            return
        self._boxes.setdefault(name, []).append((offset, extent))
        if staged:
            if view.device is None:
                raise _wrong(self._rank, name, f" is a numpy array of {stored}: casts to {delivered} and additions are made of torch tensors")
            self.casts.append(Cast(index, name, shape, delivered, offset, held.current, shard.replica, shard.addition))
            return
        self.layout.boxes.append(Box(index, offset, extent, view.strides, self._memory_of(name, tensor, view, held), 0))

    def check_ties(self) -> None:
        """Checks that the name to which a tensor is tied exists."""
        for name, kept in self._tied.items() if isinstance(self._tied, Mapping) else ():
            if name in self._tensors and kept not in self._tensors:
                raise _wrong(self._rank, name, f" is tied to '{kept}', which is not there")

    def check_overlaps(self) -> None:
        """Checks that no element of a tensor is in two shards."""
        for name, boxes in self._boxes.items():
            overlap = first_overlap(boxes) if len(boxes) > 1 else None
            if overlap is not None:
                raise _wrong(self._rank, name, f" has shards at offsets {overlap[0]} and {overlap[1]} that overlap")

    def check_complete(self) -> None:
        """Checks that this rank, the only one, holds every tensor whole."""
        for spec in self.layout.tensors:
            boxes = self._boxes.get(spec.name)
            held = sum(prod(extent) for _, extent in boxes) if boxes else 0
            if boxes and held != prod(spec.shape):
                why = f" of shape {spec.shape} has {prod(spec.shape)} elements, but its shards have {held}, and there is no other rank"
                raise _wrong(self._rank, spec.name, why)

    def specs(self) -> dict[str, _Spec]:
        """The global tensors, by name."""
        tensors = self.layout.tensors
        return {name: _Spec(tensors[i].shape, stored, tensors[i].dtype) for name, (i, stored) in self._tensors.items()}

    def _demand(self, held: _BoundShard, delivered: str, extent: tuple[int, ...]) -> None:
        """Notes how much memory the cast takes. Tied tensors count too, because a rank with an empty shard can't see that they are tied."""
        shard = held.shard
        nbytes = None if shard.largest is None else shard.largest * DTYPES[delivered].itemsize
        ranges = extent[1:] == tuple(shard.shape[1:]) if shard.ranges is None else shard.ranges
        demand = self.demands.setdefault(shard.name, Demand(nbytes, ranges))
        demand.nbytes = None if demand.nbytes is None or nbytes is None else max(demand.nbytes, nbytes)
        demand.ranges = demand.ranges and ranges

    def _list_without_boxes(self, held: _BoundShard) -> None:
        shard = held.shard
        if shard.dtype is None:
            raise InvalidArgument(f"rank {self._rank}: a Shard of tensor '{shard.name}' has neither tensor nor dtype", tensor=shard.name)
        stored = self._rules.stored(shard.name, shard.dtype)
        delivered = self._rules.delivered(shard.name, stored, None)
        self._index_of(shard.name, tuple(shard.shape), stored, delivered)
        if delivered != stored or shard.addition is not None:
            self._demand(held, delivered, tuple(shard.shape))

    def _index_of(self, name: str, shape: tuple[int, ...], stored: str, delivered: str) -> int:
        known = self._tensors.get(name)
        if known is None:
            index = len(self.layout.tensors)
            if not isinstance(name, str) or not name:
                raise InvalidArgument(f"rank {self._rank}: tensor {index} has name {name!r}", tensor=name)
            self._tensors[name] = (index, stored)
            self.layout.tensors.append(TensorSpec(name, delivered, shape))
            return index
        index = known[0]
        spec = self.layout.tensors[index]
        if spec.shape != shape or spec.dtype != delivered or known[1] != stored:
            why = f" has shards of {known[1]} {spec.shape} to deliver as {spec.dtype}, and of {stored} {shape} to deliver as {delivered}"
            raise _wrong(self._rank, name, why)
        return index

    def _box_of(self, name: str, shape: tuple[int, ...], tensor: Any, given: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        extent = tuple(tensor.shape)
        offset = (0,) * len(shape) if given is None else tuple(given)
        if not len(extent) == len(offset) == len(shape):
            raise _wrong(self._rank, name, f" of shape {shape} has a shard of shape {extent} at offset {offset}: the numbers of dimensions differ")
        for n, begin, whole in zip(extent, offset, shape):
            if begin < 0 or begin + n > whole:
                raise _wrong(self._rank, name, f" of shape {shape} has a shard of shape {extent} at offset {offset}, which is not within it")
        return offset, extent

    def _check_device(self, name: str, device: Any) -> None:
        if self._device is None:
            self._device = str(device)
        elif str(device) != self._device and not (device.type == self._device and device.type == "cpu"):
            raise _wrong(self._rank, name, f" is on device {device}, the others are on {self._device}")

    def _is_tied(self, name: str, view: _View, stored: str, extent: tuple[int, ...], offset: tuple[int, ...], addition: Addition | None) -> bool:
        if isinstance(self._tied, Mapping):
            first = self._tied.get(name, name)
        elif self._tied:
            first = self._memory.setdefault((view.pointer, stored, extent, offset, view.strides, id(addition)), name)
        else:
            first = name
        if first != name:
            self.layout.tied[name] = first
        return first != name

    def _memory_of(self, name: str, tensor: Any, view: _View, held: _BoundShard) -> Memory:
        if view.device is None:
            return HostMemory(view.pointer, view.nbytes, tensor, name)
        check = partial(held.check, tensor.dtype, tuple(tensor.shape), tensor.stride(), self._rank)
        what, culprit = f"rank {self._rank}: tensor '{name}'", f"tensor '{name}'"
        return devices.memory_at(view.device, view.pointer, view.nbytes, tensor, name, held.address, check, what=what, culprit=culprit)

# ---- FSDP1's flat parameters ----

# Prefixes that wrappers add to the names of parameters.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def flat_shards(module: Any) -> list[Shard]:
    """This rank's shards of the parameters of a model that FSDP1 wraps: views of its flat parameters, for `collect`.

    Tied parameters beyond the first, and parameters of which this rank holds nothing, are listed without a tensor. Parameters
    that FSDP ignores are whole, on every rank. Once it is registered, the list is made again where a flat parameter's memory moved, as
    when a framework offloads it, or where the module's parameters were replaced. Raises InvalidArgument if no submodule is wrapped.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = [(name, unit) for name, unit in module.named_modules() if isinstance(unit, FullyShardedDataParallel)]
    if not units:
        raise InvalidArgument("no submodule is wrapped by FullyShardedDataParallel", culprit=type(module).__name__)
    shards: list[Shard] = []
    flat: set[int] = set()  # ids of flat parameters and of the views that stand for the original ones
    for name, unit in units:
        if unit._handle is None:  # the unit has no parameters of its own
            continue
        parameter = unit._handle.flat_param
        flat.update(map(id, (parameter, *(parameter._params or ()), *(parameter._shared_params or ()))))
        shards.extend(_of_unit(_clean(f"{name}." if name else ""), unit))
    for name, parameter in module.named_parameters():
        if id(parameter) not in flat:
            group = units[0][1].process_group
            replica = (group.rank(), group.size())
            shape = tuple(parameter.shape)
            shards.append(Shard(_clean(name), shape, parameter, None, None, replica, parameter.numel(), True))
    watched = [partial(_local_of, unit._handle) for _, unit in units if unit._handle is not None]
    return MadeShards(shards, MadeOf([module], partial(flat_shards, module), watched))


def _local_of(handle: Any) -> Any:
    """What this rank holds of a flat parameter."""
    flat = handle.flat_param
    # FSDP1 sets _local_shard in the first forward pass; until then the flat parameter is the shard.
    return getattr(flat, "_local_shard", flat.data) if handle.uses_sharded_strategy else flat.data


def _clean(name: str) -> str:
    """A parameter's name without what wrappers added to it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _of_unit(prefix: str, unit: Any) -> Iterator[Shard]:
    """The shards of the parameters of one FSDP unit, as views of its flat parameter."""
    handle = unit._handle
    flat = handle.flat_param
    sharded = handle.uses_sharded_strategy
    local = _local_of(handle)
    replicas = unit._inter_node_pg if hasattr(unit, "_inter_node_pg") else None if sharded else unit.process_group
    replica = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
    shapes = {}
    total = sum(prod(shape) for shape in flat._shapes)
    for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos):
        name = _clean(prefix + fqn)
        shapes[fqn] = tuple(shape)
        # The tensor's share of a bound for the unit: it is equal on all ranks, whichever rank holds most of the tensor.
        largest = -(-prod(shape) * local.numel() // total)
        if not info.in_shard:
            yield Shard(name, tuple(shape), None, None, local.dtype, (0, 1), largest, True)
            continue
        elements = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        whole = Shard(name, tuple(shape), elements, replica=replica, largest=largest)
        yield from range_shards(whole, info.intra_param_start_idx)
    for shared in flat._shared_param_infos:
        shape = shapes[_join(shared.prim_module_name, shared.prim_param_name)]
        name = _clean(prefix + _join(shared.module_name, shared.param_name))
        yield Shard(name, shape, None, None, local.dtype, (0, 1), 0, True)


def _join(module: str, parameter: str) -> str:
    return _clean(f"{module}.{parameter}" if module else parameter)


# ---- casts and additions ----

_ALIGNMENT = 64  # each cast shard that is kept begins at a multiple of this

STAGING = ("auto", "whole", "push")


class Addition(Protocol):
    """Something that is added to the elements of a tensor on their way to the engines."""

    def begin(self) -> None:
        """Every rank calls this before each refit, in the order in which the tensors are registered: it may communicate."""

    def write(self, target: Any, source: Any, offset: Sequence[int]) -> None:
        """Writes into `target` the sum of `source`, a box that begins at `offset` in the global tensor, and the same box of the addition.

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
    """The memory that a tensor's cast takes on the rank that holds the most of the tensor. All ranks decide by this.

    `nbytes`: of the cast elements; None where a rank can't know. `ranges`: every rank's boxes are ranges of the row-major tensor.
    """

    nbytes: int | None
    ranges: bool


def _plan(casts: Sequence[Cast], demands: Mapping[str, Demand], options: _Options) -> tuple[list[Box], CastPush | None]:
    """The boxes of casts that are kept whole, and the pushes of the others.

    `demands`: of all tensors that are cast on some rank, by name. Raises InvalidArgument where the casts fit neither way.
    """
    if options.staging not in STAGING:
        raise InvalidArgument(f"staging is {options.staging!r}, {', '.join(map(repr, STAGING))} are possible", culprit="staging")
    pushed = _pushed(casts, demands, options)
    whole = [cast for cast in casts if cast.name not in pushed]
    boxes = _staged_whole(whole) if whole else []
    push = CastPush([cast for cast in casts if cast.name in pushed])
    return boxes, push if pushed else None


def _pushed(casts: Sequence[Cast], demands: Mapping[str, Demand], options: _Options) -> set[str]:
    """The names of the tensors to push."""
    if options.staging != "auto":
        return set() if options.staging == "whole" else set(demands)
    rank, staging_bytes, alone = options.rank, options.staging_bytes, options.world_size == 1  # alone: no other rank must agree
    held: dict[str, int] = {}
    for cast in casts:
        held[cast.name] = held.get(cast.name, 0) + cast.nbytes
    needed = {name: held.get(name, 0) if alone or demand.nbytes is None else demand.nbytes for name, demand in demands.items()}
    if sum(needed.values()) <= staging_bytes:
        return set()
    unknown = None if alone else next((name for name, demand in demands.items() if demand.nbytes is None), None)
    if unknown is not None:
        raise InvalidArgument(
            f"rank {rank}: tensors to cast, '{unknown}' among them, take {sum(needed.values())} bytes, and staging_bytes is "
            f"{staging_bytes}. Other ranks must choose alike and can't know: pass staging='push' or staging='whole', or a larger "
            "staging_bytes, on every rank",
            tensor=unknown,
        )
    # A shard of columns would be pushed row by row, each row a bucket of its own: it is kept whole.
    columns = {name: nbytes for name, nbytes in needed.items() if not demands[name].ranges}
    if sum(columns.values()) > staging_bytes:
        first = next(iter(columns))
        raise InvalidArgument(
            f"rank {rank}: {len(columns)} tensors to cast are sharded by columns, '{first}' among them, so that they are kept whole: "
            f"they take {sum(columns.values())} bytes, and staging_bytes is {staging_bytes}. Pass a larger staging_bytes, or "
            "staging='push' to push them row by row, on every rank",
            tensor=first,
        )
    return set(demands) - set(columns)


def _staged_whole(casts: Sequence[Cast]) -> list[Box]:
    """Makes memory for all these casts, which each refit fills; returns their boxes in it."""
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
    """The memory of all cast shards that are kept whole."""

    casts: Sequence[Cast]
    offsets: Sequence[int]
    nbytes: int
    # The tensors in the memory, made for the address that fill() got last.
    address: int = 0
    targets: list[Any] = field(default_factory=list)

    def memory(self) -> FilledMemory | HostMemory | DeviceMemory:
        device = self.casts[0].source.device
        label = f"{len(self.casts)} cast tensors"
        if device.type == "cpu":
            return FilledMemory(self.nbytes, self.fill, label)
        return self._on_device(device, label)

    def _on_device(self, device: Any, label: str) -> HostMemory | DeviceMemory:
        """Memory on the device for the cast shards. Each refit first calls `refresh` for the address, and `refresh` casts the shards."""
        import torch

        room = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        targets = self._targets_in(room)

        def refresh() -> int:
            self._cast_into(targets)
            return int(room.data_ptr())

        return devices.memory_at(device, room.data_ptr(), self.nbytes, room, label, refresh, what=label)

    def fill(self, view: memoryview) -> None:
        """Casts every shard into `view`, of `nbytes` bytes."""
        import torch

        room = torch.frombuffer(view, dtype=torch.uint8)
        if room.data_ptr() != self.address:
            self.address, self.targets = room.data_ptr(), self._targets_in(room)
        self._cast_into(self.targets)

    def _targets_in(self, room: Any) -> list[Any]:
        return [room[o : o + cast.nbytes].view(torch_dtype(cast.dtype)).view(cast.source.shape) for cast, o in zip(self.casts, self.offsets)]

    def _cast_into(self, targets: Sequence[Any]) -> None:
        import torch

        with torch.no_grad():
            for cast, target in zip(self.casts, targets):
                source = cast.source
                if source.shape != target.shape or source.untyped_storage().nbytes() == 0 < source.numel():
                    raise FailedPrecondition(
                        f"tensor '{cast.name}' was registered with a shard of shape {tuple(target.shape)}, and is now of shape "
                        f"{tuple(source.shape)}, with {source.untyped_storage().nbytes()} bytes of memory",
                        tensor=cast.name,
                    )
                cast.write(target, source, cast.offset)


class CastPush:
    """Tensors that every update casts into its slots; see refitd.layout.PushedTensors."""

    def __init__(self, casts: Sequence[Cast]) -> None:
        self._casts = casts
        self.indices: Sequence[int] = sorted({cast.tensor_index for cast in casts})

    def push(self, update: Update) -> None:
        """Pushes what this rank supplies, cast on the way into the slots.

        Of several ranks that hold the same elements, the checksum of the tensor's name chooses the rank that supplies them.
        """
        for cast in self._casts:
            index, count = cast.replica
            if crc32(cast.name.encode()) % count == index:
                for start, offset, tensor in _ranges(cast.shape, cast.offset, cast.source):
                    update.push(cast.name, _source(cast, offset, tensor), shape=cast.shape, start=start)


def _source(cast: Cast, begin: Sequence[int], tensor: Any) -> Source:
    """A source of the elements of a box at `begin` in the global tensor, in row-major order, cast when they are copied."""

    def copy(target: HostBytes | DeviceBytes, start: int, count: int) -> None:
        import torch

        with torch.no_grad():
            room = target.torch((count,), cast.dtype)
            # Boxes are views, whatever the strides; a flattened tensor might be a copy of all of it.
            for offset, extent in range_boxes(tensor.shape, start, count):
                elements = tensor[tuple(slice(first, first + n) for first, n in zip(offset, extent))]
                cast.write(room[: elements.numel()].view(extent), elements, [a + b for a, b in zip(begin, offset)])
                room = room[elements.numel() :]

    return Source(DTYPES[cast.dtype], tuple(tensor.shape), tensor.numel(), copy, 0, tensor)


def _ranges(shape: Sequence[int], offset: Sequence[int], source: Any) -> Iterator[tuple[int, Sequence[int], Any]]:
    """The parts of a box that are ranges of the global tensor: the first row-major index, the offset, and the elements."""
    if source.numel() == 0:
        return
    if not shape:
        yield 0, (), source.reshape(1)
        return
    # The outermost dimension inside of which the box is as large as the tensor.
    dim = len(shape) - 1
    while dim and source.shape[dim] == shape[dim]:
        dim -= 1
    strides = row_major(shape)
    first = sum(o * s for o, s in zip(offset, strides))
    for indices in product(*(range(n) for n in source.shape[:dim])):
        begin = [*(o + i for o, i in zip(offset, indices)), *offset[dim:]]
        yield first + sum(i * s for i, s in zip(indices, strides)), begin, source[tuple(slice(i, i + 1) for i in indices)]
