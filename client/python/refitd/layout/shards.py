"""From tensors to layouts: `collect` turns what a framework has into what `Trainer.register` takes.

    refitd.layout.shards.collect(model, dtype=torch.bfloat16)                      # nn.Module: parameters and persistent buffers
    refitd.layout.shards.collect(model.state_dict())                               # tensors and DTensors by name
    refitd.layout.shards.collect([Shard("w", (8, 4), rows, offset=(4, 0)), ...])   # boxes of global tensors, said one by one

Everything is checked before anything is registered: an InvalidArgument or FailedPrecondition names the tensor and the rank, and
its `culprit` is "tensor '...'".

This module needs no framework: torch tensors, DTensors and numpy arrays are known by what they have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

from .._core.tensors import Bindings, Marks, TensorAddress, integers
from .._core.waiting import paused
from ..errors import FailedPrecondition, InvalidArgument
from . import devices
from .boxes import Box, Layout, TensorSpec, compiled, first_overlap, matcher, range_boxes
from .casting import DEFAULT_STAGING_BYTES, Added, Addition, Cast, Demand, plan
from .dtensor import Part, is_dtensor, local_tensor, place
from .memory import DTYPES, HostMemory, Memory, resolve

# A cast to `dtype` is made of these types only: others, such as float8 with its scales, mean something else after a cast.
CAST_FROM = frozenset({"float64", "float32", "float16", "bfloat16"})
# Casts that keep values, but for a float's rounding: of each type the types to which it may go. All others must be declared.
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
    any strides; None says that this rank holds none of the tensor, and needs `dtype`. `offset`: of the box in the global tensor;
    None is zeros. `dtype`: what to deliver; None is what `collect` is told, else the tensor's own; with no tensor, what the ranks
    that hold it have.

    The others are used where casts are pushed. `replica`: this rank's number among the ranks that hold the same box, and how many
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
        raise InvalidArgument(f"tensor '{shard.name}': {error}", culprit=f"tensor '{shard.name}'") from None
    at = 0
    for offset, extent in boxes:
        count = prod(extent)
        yield replace(shard, tensor=shard.tensor[at : at + count].reshape(extent), offset=offset, ranges=True)
        at += count


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

    `x`: an nn.Module, a mapping of names to tensors (plain ones are whole tensors, DTensors what their placements say, either may
    be in a casting.Added), or an iterable of `Shard`.
    `dtype`: deliver floating-point tensors (float64, float32, float16, bfloat16) in this type; None: as they are.
    `exceptions`: patterns of names (refitd.layout.boxes), and the dtype to deliver those in, None as they are; the first that
    matches counts. {"*.e_score_correction_bias": torch.float32} keeps router biases.
    `buffers`: of a module: whether persistent buffers are taken, or patterns of those that are. A mapping has no buffers.
    `leave_out`: patterns of names that are not taken. `any_cast`: patterns of names that may be cast also where values are lost: between
    floating-point, integer, bool and float8, and to smaller integers. Others are refused.
    `tied`: True: where two names have the same memory, shape and strides, the first has the boxes, and the other is listed
    without any, so that engines need not get it. {"lm_head.weight": "model.embed_tokens.weight"}: these names are listed without
    boxes, wherever their memory is. False: every name has its boxes.
    `rank`: for errors. `world_size`: of the trainer; with 1, a tensor that is not covered whole is an error. With more, plain
    tensors of a mapping count as replicated on all ranks where casts are pushed.
    `device`: that all tensors must be on, as torch.device takes it; None: that of the first.
    `staging`, `staging_bytes`: how casts are delivered, see refitd.layout.casting: "whole" keeps all cast shards, "push" pushes them,
    "auto" keeps at most `staging_bytes` bytes. Equal on all ranks.

    Raises InvalidArgument for a wrong dtype, shape, offset or placement, overlapping or missing shards, expanded tensors, another
    device; FailedPrecondition for memory that was freed. Nothing is kept then.

    The layout refers to the tensors' memory. Its `source` looks every name up again: in the module, in the same dict, in the memory of
    a Shard's tensor. Pass the module: a plain `state_dict()` is a dict of its own, which keeps the memory that it was made of.
    """
    where = None if device is None else str(device)
    rules = _Rules(dtype, exceptions or {}, any_cast, rank)
    options = _Options(
        rules, buffers, matcher(leave_out, "leave_out"), tied, rank, world_size, where, staging, staging_bytes
    )
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
    collector = _Collector(options.rules, options.tied, options.rank, options.device)
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
        boxes, layout.pushed = plan(
            collector.casts,
            collector.demands,
            staging=options.staging,
            staging_bytes=options.staging_bytes,
            rank=options.rank,
            alone=options.world_size == 1,
        )
        layout.boxes += boxes
        layout.before_refit = _in_order(x.made_of.first if isinstance(x, (MadeMapping, MadeShards)) else None, collector.before_refit())
        layout.source = _Source(x, options, found, held, collector.specs())
    return layout


def _in_order(*steps: Callable[[], None] | None) -> Callable[[], None] | None:
    wanted = [step for step in steps if step is not None]

    def all_of_them() -> None:
        for step in wanted:
            step()

    return all_of_them if wanted else None


@dataclass(frozen=True)
class MadeOf:
    """How a mapping or a list of Shard was made of modules. `make()` makes it again, where names of the modules are bound to other tensors,
    or where what one of `watched` returns, a tensor that no name of the modules is bound to, has moved. Every rank calls `first` before each
    refit; it may communicate."""

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
    """What `x` names. `bindings`: where the names are looked up; None: only `x` itself can tell."""

    named: Mapping[str, Any] | list[Shard]
    bindings: Bindings | None
    watched: Sequence[Callable[[], Any]] = ()

    def same_objects(self, other: _Found) -> bool:
        mine, others = self.named, other.named
        if isinstance(mine, Mapping) and isinstance(others, Mapping):
            return mine.keys() == others.keys() and all(tensor is others[name] for name, tensor in mine.items())
        return mine is others


def _find(x: Any, options: _Options) -> _Found:
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
    """Looks up what a layout was collected from: see refitd.layout.boxes.Source."""

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
        """See refitd.layout.boxes.Source."""
        found = self._found
        holds = found.bindings is not None and found.bindings.hold()
        if holds and self._marks.same():
            return None
        if self._made_of is not None:
            self._x = self._made_of.make()
        if not holds or self._made_of is not None:
            found = _find(self._x, self._options)
        if found.same_objects(self._found) and self._marks.same():
            self._found = found  # modules that are wrapped and unwrapped again, as FSDP2 does, are bound as they were
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
            raise FailedPrecondition(
                f"rank {self._options.rank}: tensor '{name}' was registered as {spec}, and {is_now}: register again", culprit=f"tensor '{name}'"
            )


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
    """A shard. `current` returns its tensor, wherever its memory is now."""

    shard: Shard
    current: Callable[[], Any]
    bound: Any = None  # what the name is bound to, a DTensor for instance; None: no memory

    @property
    def address(self) -> Callable[[], int]:
        """A function that tells where the shard's memory is now. All shards are asked at every refit."""
        current = self.current
        same = isinstance(current, partial) and current.func is _same
        return TensorAddress(current, self.shard.tensor if same else None)

    def check(self, dtype: Any, extent: tuple[int, ...], strides: tuple[int, ...], rank: int) -> None:
        """Raises FailedPrecondition where the tensor, which was moved, is not of the dtype, shape and strides that were registered."""
        name, tensor = self.shard.name, self.current()
        _View(name, tensor, tensor.element_size(), rank)
        if (tensor.dtype, tuple(tensor.shape), tensor.stride()) != (dtype, extent, strides):
            raise FailedPrecondition(
                f"rank {rank}: tensor '{name}' was registered as {dtype} {extent} with strides {strides}, and is now {tensor.dtype} "
                f"{tuple(tensor.shape)} with strides {tensor.stride()}: register it again",
                culprit=f"tensor '{name}'",
            )


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
    for what, said, made in (("shape", shard.shape, shape), ("offset", shard.offset, offset)):
        if made is None and said is not None:
            raise InvalidArgument(
                f"rank {rank}: tensor '{shard.name}' has {what} {said!r}, which is no sequence of integers", culprit=f"tensor '{shard.name}'"
            )
    if shape is None or min(shape, default=0) < 0:
        raise InvalidArgument(
            f"rank {rank}: tensor '{shard.name}' has shape {shard.shape!r}, which is no shape", culprit=f"tensor '{shard.name}'"
        )
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


def _begin(additions: Iterable[Addition]) -> None:
    for addition in additions:
        addition.begin()


def _part_of(tensor: Any, part: Part) -> Any:
    local = local_tensor(tensor)
    return local[tuple(slice(at, at + n) for at, n in zip(part.local, part.extent))]


@cache
def _kind_of(kind: type) -> str:
    """Tells what a type's objects are. Each type is asked once, because asking every tensor for what it lacks is slow."""
    if hasattr(kind, "local_shards"):
        return "ShardedTensor"
    if is_dtensor(kind):
        return "DTensor"
    return "tensor" if hasattr(kind, "shape") and hasattr(kind, "dtype") else ""


def _of_tensor(name: str, tensor: Any, rank: int, world_size: int | None) -> Iterator[_BoundShard]:
    if isinstance(tensor, Added):
        for held in _of_tensor(name, tensor.tensor, rank, world_size):
            yield replace(held, shard=replace(held.shard, addition=tensor.addition))
        return
    of: Any = type(tensor)
    kind = _kind_of(of)
    if kind == "tensor":
        shape = tuple(tensor.shape)
        replica = (rank, world_size) if world_size else (0, 1)
        yield _BoundShard(Shard(name, shape, tensor, None, None, replica, prod(shape), True), partial(_same, tensor), tensor)
        return
    if kind == "ShardedTensor":
        yield from _of_sharded_tensor(name, tensor)
        return
    if kind != "DTensor":
        raise InvalidArgument(f"rank {rank}: '{name}' is a {type(tensor).__name__}, no tensor", culprit=f"tensor '{name}'")
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
    """FSDP1's older state dicts have ShardedTensor, of which each shard is a box that says its offsets."""
    shape = tuple(tensor.size())
    shards = tensor.local_shards()
    boxes = [(tuple(box.shard_offsets), tuple(box.shard_sizes)) for box in tensor.metadata().shards_metadata]
    largest = max((prod(extent) for _, extent in boxes), default=0)
    rows = all(extent[1:] == shape[1:] for _, extent in boxes)
    if not shards:
        yield _BoundShard(Shard(name, shape, None, None, tensor.dtype, (0, 1), largest, rows), partial(_same, None))
    for shard in shards:
        held = Shard(name, shape, shard.tensor, tuple(shard.metadata.shard_offsets), None, (0, 1), largest, rows)
        yield _BoundShard(held, partial(_same, shard.tensor), shard.tensor)


class _Rules:
    """Decides in which dtype each tensor is delivered."""

    def __init__(self, dtype: Any, exceptions: Mapping[str, Any], any_cast: Sequence[str], rank: int) -> None:
        self._dtype = None if dtype is None else resolve(dtype, "dtype").name
        self._exceptions = [
            (compiled(pattern), None if to is None else resolve(to, f"exceptions['{pattern}']").name)
            for pattern, to in exceptions.items()
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
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{name}': {error}. If engines need it not, leave it out: leave_out=['{name}'], or of a "
                    "module's buffers buffers=False or patterns of those to take",
                    culprit=f"tensor '{name}'",
                ) from None
        return found

    def delivered(self, name: str, stored: str, said: Any) -> str:
        """The dtype in which to deliver a tensor that is stored as `stored` and whose shard said `said`.

        Raises InvalidArgument, naming the tensor, for a cast that loses values and was not declared."""
        to = self._wanted(name, stored, said)
        if to != stored and to not in _KEEPS_VALUES.get(stored, ()) and not self._any_cast(name):
            raise InvalidArgument(
                f"rank {self._rank}: tensor '{name}' is {stored}, and a cast to {to} loses values: declare any_cast=['{name}'] if it is meant",
                culprit=f"tensor '{name}'",
            )
        return to

    def _wanted(self, name: str, stored: str, said: Any) -> str:
        if said is not None:
            return self.stored(name, said)
        for pattern, to in self._exceptions:
            if pattern.fullmatch(name):
                return to or stored
        return self._dtype if self._dtype is not None and stored in CAST_FROM else stored


@cache
def _is_torch(kind: type) -> bool:
    return hasattr(kind, "untyped_storage")


class _View:
    """The place of a tensor's elements, found and checked in one look at torch's tensor or numpy's array."""

    __slots__ = ("pointer", "strides", "device", "nbytes")

    def __init__(self, name: str, tensor: Any, itemsize: int, rank: int) -> None:
        of: Any = type(tensor)
        if not _is_torch(of):
            if not hasattr(tensor, "__array_interface__"):
                raise InvalidArgument(
                    f"rank {rank}: tensor '{name}' is a {of.__name__}: register torch tensors or numpy arrays, or push it", culprit=f"tensor '{name}'"
                )
            self.pointer: int = tensor.__array_interface__["data"][0]
            strides = tensor.strides
            if any(stride % itemsize or stride < 0 for stride in strides):
                raise InvalidArgument(f"rank {rank}: tensor '{name}' has byte strides {strides}", culprit=f"tensor '{name}'")
            self.strides: tuple[int, ...] = tuple(stride // itemsize for stride in strides)
            self.device: Any = None
        else:
            self._look_at_torch(name, tensor, itemsize, rank)
        span = 1
        for n, stride in zip(tensor.shape, self.strides):
            if n == 0:
                self.nbytes = 0
                return
            if stride == 0 and n > 1:
                raise InvalidArgument(
                    f"rank {rank}: tensor '{name}' is expanded: strides {self.strides} of shape {tuple(tensor.shape)} repeat elements. "
                    "Pass a contiguous copy",
                    culprit=f"tensor '{name}'",
                )
            span += (n - 1) * stride
        self.nbytes = span * itemsize
        if self.device is None:
            return
        if tensor.untyped_storage().nbytes() < tensor.storage_offset() * itemsize + self.nbytes:
            self._refuse_freed(name, tensor, rank)
        if self.pointer == 0:
            raise FailedPrecondition(f"rank {rank}: tensor '{name}' is a {type(tensor).__name__} without memory", culprit=f"tensor '{name}'")

    def _look_at_torch(self, name: str, tensor: Any, itemsize: int, rank: int) -> None:
        self.device = tensor.device
        if self.device.type == "meta":
            raise FailedPrecondition(f"rank {rank}: tensor '{name}' is on device meta: it has no memory", culprit=f"tensor '{name}'")
        if tensor.layout is not sys.modules["torch"].strided:
            raise InvalidArgument(f"rank {rank}: tensor '{name}' has layout {tensor.layout}, not torch.strided", culprit=f"tensor '{name}'")
        if tensor.is_neg() or tensor.is_conj():
            raise InvalidArgument(f"rank {rank}: tensor '{name}' is negated lazily: pass tensor.resolve_neg()", culprit=f"tensor '{name}'")
        self.strides = tensor.stride()
        self.pointer = tensor.data_ptr()

    def _refuse_freed(self, name: str, tensor: Any, rank: int) -> None:
        raise FailedPrecondition(
            f"rank {rank}: tensor '{name}' needs {self.nbytes} bytes from element {tensor.storage_offset()} on, but its storage has "
            f"{tensor.untyped_storage().nbytes()}: its memory was freed, as sharded training does between uses",
            culprit=f"tensor '{name}'",
        )


class _Collector:
    """Builds a layout shard by shard."""

    def __init__(self, rules: _Rules, tied: bool | Mapping[str, str], rank: int, device: Any) -> None:
        self.layout = Layout()
        self.casts: list[Cast] = []
        self.demands: dict[str, Demand] = {}
        self._additions: dict[int, Addition] = {}
        self._rules = rules
        self._tied = tied
        self._rank = rank
        self._device = None if device is None else str(device)
        # By name: index in the layout and how the tensor is stored; boxes of it.
        self._tensors: dict[str, tuple[int, str]] = {}
        self._boxes: dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {}
        # By pointer, dtype, extent, offset, strides and addition: the name that has boxes there.
        self._memory: dict[tuple[Any, ...], str] = {}

    def add(self, held: _BoundShard) -> None:
        shard = held.shard
        name, tensor = shard.name, shard.tensor
        if shard.addition is not None:
            self._additions[id(shard.addition)] = shard.addition
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
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{name}' is a numpy array of {stored}: casts to {delivered} and additions are made of "
                    "torch tensors",
                    culprit=f"tensor '{name}'",
                )
            self.casts.append(Cast(index, name, shape, delivered, offset, held.current, shard.replica, shard.addition))
            return
        self.layout.boxes.append(Box(index, offset, extent, view.strides, self._memory_of(name, tensor, view, held), 0))

    def check_ties(self) -> None:
        """Checks that the name that has the boxes of a tied tensor is among the names."""
        for name, kept in self._tied.items() if isinstance(self._tied, Mapping) else ():
            if name in self._tensors and kept not in self._tensors:
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{name}' is tied to '{kept}', which is not there", culprit=f"tensor '{name}'"
                )

    def check_overlaps(self) -> None:
        """Checks that no element of a tensor is in two shards."""
        for name, boxes in self._boxes.items():
            overlap = first_overlap(boxes) if len(boxes) > 1 else None
            if overlap is not None:
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{name}' has shards at offsets {overlap[0]} and {overlap[1]} that overlap", culprit=f"tensor '{name}'"
                )

    def check_complete(self) -> None:
        """Checks that a single rank has every tensor as a whole."""
        for spec in self.layout.tensors:
            boxes = self._boxes.get(spec.name)
            held = sum(prod(extent) for _, extent in boxes) if boxes else 0
            if boxes and held != prod(spec.shape):
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{spec.name}' of shape {spec.shape} has {prod(spec.shape)} elements, but its shards have "
                    f"{held}, and there is no other rank",
                    culprit=f"tensor '{spec.name}'",
                )

    def specs(self) -> dict[str, _Spec]:
        """The global tensors, by name."""
        tensors = self.layout.tensors
        return {name: _Spec(tensors[i].shape, stored, tensors[i].dtype) for name, (i, stored) in self._tensors.items()}

    def before_refit(self) -> Callable[[], None] | None:
        """Returns what every rank must do before each refit; None: nothing."""
        additions = list(self._additions.values())
        return partial(_begin, additions) if additions else None

    def _demand(self, held: _BoundShard, delivered: str, extent: tuple[int, ...]) -> None:
        """Notes what the cast takes. Tied tensors count as well, as a rank with an empty shard can't tell that they are."""
        shard = held.shard
        nbytes = None if shard.largest is None else shard.largest * DTYPES[delivered].itemsize
        ranges = extent[1:] == tuple(shard.shape[1:]) if shard.ranges is None else shard.ranges
        demand = self.demands.setdefault(shard.name, Demand(nbytes, ranges))
        demand.nbytes = None if demand.nbytes is None or nbytes is None else max(demand.nbytes, nbytes)
        demand.ranges = demand.ranges and ranges

    def _list_without_boxes(self, held: _BoundShard) -> None:
        shard = held.shard
        if shard.dtype is None:
            raise InvalidArgument(
                f"rank {self._rank}: a Shard of tensor '{shard.name}' has neither tensor nor dtype", culprit=f"tensor '{shard.name}'"
            )
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
                raise InvalidArgument(f"rank {self._rank}: tensor {index} has name {name!r}", culprit=f"tensor '{name}'")
            self._tensors[name] = (index, stored)
            self.layout.tensors.append(TensorSpec(name, delivered, shape))
            return index
        index = known[0]
        spec = self.layout.tensors[index]
        if spec.shape != shape or spec.dtype != delivered or known[1] != stored:
            raise InvalidArgument(
                f"rank {self._rank}: tensor '{name}' has shards of {known[1]} {spec.shape} to deliver as {spec.dtype}, and of {stored} "
                f"{shape} to deliver as {delivered}",
                culprit=f"tensor '{name}'",
            )
        return index

    def _box_of(
        self, name: str, shape: tuple[int, ...], tensor: Any, said: Sequence[int] | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        extent = tuple(tensor.shape)
        offset = (0,) * len(shape) if said is None else tuple(said)
        if not len(extent) == len(offset) == len(shape):
            raise InvalidArgument(
                f"rank {self._rank}: tensor '{name}' of shape {shape} has a shard of shape {extent} at offset {offset}: the numbers of "
                "dimensions differ",
                culprit=f"tensor '{name}'",
            )
        for n, at, whole in zip(extent, offset, shape):
            if at < 0 or at + n > whole:
                raise InvalidArgument(
                    f"rank {self._rank}: tensor '{name}' of shape {shape} has a shard of shape {extent} at offset {offset}, which is not "
                    "within it",
                    culprit=f"tensor '{name}'",
                )
        return offset, extent

    def _check_device(self, name: str, device: Any) -> None:
        if self._device is None:
            self._device = str(device)
        elif str(device) != self._device and not (device.type == self._device and device.type == "cpu"):
            raise InvalidArgument(
                f"rank {self._rank}: tensor '{name}' is on device {device}, the others are on {self._device}", culprit=f"tensor '{name}'"
            )

    def _is_tied(
        self, name: str, view: _View, stored: str, extent: tuple[int, ...], offset: tuple[int, ...], addition: Addition | None
    ) -> bool:
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
