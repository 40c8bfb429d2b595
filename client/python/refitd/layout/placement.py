"""Moves the tensors of torch modules into memory that the daemon writes: regions, and arenas, which have two sides."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from .._core import ends_soon, interruptible, native
from .._core.native import made_by, text
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from . import devices
from .memory import BACKS, Arena, DeviceBytes, HostBytes, Region, aligned, digest, locate, resolve, torch_dtype

if TYPE_CHECKING:
    import torch


def adopt(
    module: torch.nn.Module,
    *,
    buffers: bool = True,
    inherit: bool = True,
    arena: bool = False,
    back: str = "device",
    warm_up: Callable[[], Any] | None = None,
) -> Region | None:
    """Moves a module's parameters, and buffers, into memory that the daemon can write; they keep their values, shapes and ties.

    Tensors that share memory go on sharing it, and those in regions or arenas already stay where they are. Optimizers go on working, since
    the Parameter objects are the same. Call it before threads or graphs hold on to the old memory.

    Without `arena` CPU tensors move into one new region. With it all tensors on the device of the first move into arenas: memory with two
    sides for the weights of an engine, which takes twice the bytes. Versions are then written to the other side while the engine serves;
    Prepare comes with `flip` when a version is complete and verified, and ready() exchanges the sides, which takes microseconds on the host
    and milliseconds on a GPU (with `back` "host": a copy over PCIe). Addresses stay. What the module itself writes while it serves (counters, statistics) must not be in an arena: the
    other side would not have it.

    Args:
        module: A torch module.
        buffers: Whether its buffers are moved as well; into arenas the persistent ones, since no version brings others.
        inherit: Whether forked children, such as a data loader's workers, share the weights with this process, in both directions (in
            other memory, a child has its own copy from the fork on). False: children don't have the weights, and a child that touches them
            ends by SIGSEGV. Children share an arena, and must not read it while its sides are exchanged.
        arena: Whether the memory has two sides.
        back: With `arena`, of weights on a GPU: "device" has both sides there, which takes twice the bytes; "host", for a GPU without room for
            that, writes versions into pinned host memory, which takes twice the bytes of that and the bytes once on the GPU, and ready()
            copies the version to the GPU.
        warm_up: With `arena`: runs the module as it will serve. It is called before anything moves, and may write nothing that is to move.

    Returns:
        The region; None where there was nothing to move, and with `arena`.

    Raises:
        ResourceExhausted: There is too little memory.
        FailedPrecondition: `warm_up` wrote to a tensor, which the error names. Nothing was moved.
        InvalidArgument: `warm_up` without `arena`, or another `back`.
    """
    if back not in BACKS:
        raise InvalidArgument(f"back: {back!r} is none of {', '.join(BACKS)}", culprit="back")
    if arena:
        weights = _weights(module, buffers)
        if warm_up is not None:
            _check_unwritten(module, weights, warm_up)
        adopt_in_arenas(weights, KeptArenas(back=back))
        return None
    if warm_up is not None:
        raise InvalidArgument("warm_up is for arenas: other memory keeps what the module writes", culprit="warm_up")
    tensors: list[torch.Tensor] = list(module.parameters())
    if buffers:
        tensors += list(module.buffers())
    return adopt_tensors(tensors, inherit)


def _weights(module: torch.nn.Module, buffers: bool) -> list[torch.Tensor]:
    """What versions bring: the parameters, and with `buffers` the persistent buffers."""
    tensors: list[torch.Tensor] = list(module.parameters())
    if not buffers:
        return tensors
    found = {
        id(buffer): buffer
        for owner in module.modules()
        for name, buffer in owner._buffers.items()
        if buffer is not None and name not in owner._non_persistent_buffers_set
    }
    return tensors + list(found.values())


def _check_unwritten(module: torch.nn.Module, tensors: Sequence[torch.Tensor], run: Callable[[], Any]) -> None:
    """Raises FailedPrecondition, naming the tensor, where a run writes to one of the module's tensors."""
    before = [digest(tensor) for tensor in tensors]
    run()
    written = next((tensor for tensor, was in zip(tensors, before) if digest(tensor) != was), None)
    if written is not None:
        name = next(name for name, held in (*module.named_parameters(), *module.named_buffers()) if held is written)
        raise FailedPrecondition(f"tensor '{name}' is written by warm_up: in an arena that would be lost at the next version", tensor=name)


def adopt_tensors(tensors: Iterable[torch.Tensor], inherit: bool = True) -> Region | None:
    """Moves the CPU tensors' storages into one new region, as `adopt` does; the tensor objects stay the same."""
    found = _storages(tensors, "cpu")
    if not found:
        return None
    region = Region(_room_for(found), inherit)
    _move(found, HostBytes(region.pointer, region.nbytes, region))
    return region


class KeptArenas:
    """Arenas of this rank's last process, which another process gives out again as that one made them: tensors that are placed there have the
    values that lie there. The memory must not be written until it is registered. Not thread-safe."""

    def __init__(self, arenas: Sequence[Arena] = (), back: str = "device") -> None:
        """`arenas`: in the order in which they were made. `back`: of arenas that are made where these do not suffice."""
        self._all = list(arenas)
        self.back = back
        self.taken = 0  # how many were taken; may be set back where the tensors that were placed there are not used

    def __len__(self) -> int:
        return len(self._all)

    @property
    def next_bytes(self) -> int | None:
        """The size of the next arena; None: there is none."""
        return self._all[self.taken].nbytes if self.taken < len(self._all) else None

    def drop(self) -> None:
        """Gives none out from now on. Those that tensors lie in stay."""
        self._all = []

    def take(self, nbytes: int, device: str | None) -> Arena | None:
        """Gives out the next arena if it has the size that one for `nbytes` on the device has; else gives none out, now and from then on."""
        if self.next_bytes != _arena_bytes(nbytes, device):
            self.taken = len(self._all)
            return None
        self.taken += 1
        return self._all[self.taken - 1]


def adopt_in_arenas(tensors: Iterable[torch.Tensor], kept: KeptArenas) -> list[torch.Tensor]:
    """Moves the storages of the tensors on the first one's device into arenas, as `adopt` does; the tensor objects stay the same. Arenas are
    those of `kept`, or else new.

    The arenas are made one after the other, each as large as the memory allows that is free then (`_capacities`).

    Returns:
        The tensors that lie in arenas of `kept`, and have other values now.
    """
    listed, placed = list(tensors), []
    device = devices.device_of(listed[:1])
    kind = devices.kind_of(device)
    found = _storages(listed, "cpu" if kind is None else kind.torch_type)
    for batch in _batches(found, device, _capacities(device, _room_for(found), kept)):
        arena = kept.take(_room_for(batch), device)
        if arena is not None:
            placed += [tensor for tensors in batch for tensor in tensors]
            _move(batch, devices.bytes_at(device, arena.pointer, arena.nbytes, arena), copy=False)
            continue
        arena = _new_arena(_room_for(batch), device, kept.back)
        _move(batch, devices.bytes_at(device, arena.pointer, arena.nbytes, arena))
    if kind is not None:
        kind.synchronize_all(device)
    return placed


DEVICE_UNIT = 2 << 20  # bytes; a device gives memory that can be shared in multiples of it
MOST_ARENAS = 8  # of a model, about, where little memory is free
HOST_BYTES = 1 << 30  # of an arena on the host at least, if the model has as much
MOST_BYTES: int | None = None  # of an arena, for measurements: on an H200 each arena makes the pause 0.09 ms longer


def empty_in_arena(shapes: Sequence[tuple[Sequence[int], str]], device: torch.device, kept: KeptArenas) -> list[torch.Tensor]:
    """Tensors of these shapes and dtypes in one arena on the device: the next of `kept`, or a new one; their values are not set. Raises
    ResourceExhausted."""
    sizes = [math.prod(shape) * resolve(dtype).itemsize for shape, dtype in shapes]
    if not any(sizes):
        import torch

        return [torch.empty(tuple(shape), dtype=torch_dtype(dtype), device=device) for shape, dtype in shapes]
    kind = devices.kind_of_type(device.type)
    name = None if kind is None else kind.name_of(device)
    total = sum(aligned(nbytes) for nbytes in sizes)
    arena = kept.take(total, name) or _new_arena(total, name, kept.back)
    room = devices.bytes_at(name, arena.pointer, arena.nbytes, arena)
    made, at = [], 0
    for (shape, dtype), nbytes in zip(shapes, sizes):
        made.append(room.part(at, nbytes).torch(shape, dtype))
        at += aligned(nbytes)
    return made


def _arena_bytes(nbytes: int, device: str | None) -> int:
    """The size of an arena for so many bytes: a device gives memory in larger units than the host."""
    unit = DEVICE_UNIT if devices.kind_of(device) else 1
    return -(-nbytes // unit) * unit


def _new_arena(nbytes: int, device: str | None, back: str) -> Arena:
    connect = native.sized(native.refit_connect_options, device=text(device), **devices.connect_fields())

    def make() -> Arena:
        made = made_by("refit_arena_new", ctypes.byref(connect), nbytes, BACKS.index(back), free="refit_arena_free", what="an arena")
        return arena_of(made)

    return interruptible(make, cancel=ends_soon)


@contextmanager
def other_side(tensors: Mapping[str, torch.Tensor], device: str | None) -> Iterator[dict[str, torch.Tensor]]:
    """Within the block, by the same names, tensors over the other sides of the arenas in which `tensors` lie, to be read: between Prepare with `flip` and
    ready() they hold the staged version. Work of the device on them must have ended when the block ends. Only on the thread that calls
    ready()."""
    library = native.library()
    with ExitStack() as mapped:
        bases: dict[Arena, int] = {}
        found = {}
        for name, tensor in tensors.items():
            arena = locate(tensor.data_ptr(), 1)
            assert isinstance(arena, Arena)
            if arena not in bases:
                handle = mapped.enter_context(arena.handle)
                base = ctypes.c_void_p()
                native.check(library.refit_arena_map_back(handle, ctypes.byref(base)))
                mapped.callback(library.refit_arena_unmap_back, handle)
                assert base.value is not None
                bases[arena] = base.value
            storage = tensor.untyped_storage()
            room = devices.bytes_at(device, bases[arena], arena.nbytes, arena)
            whole = room.part(storage.data_ptr() - arena.pointer, storage.nbytes()).torch((storage.nbytes(),), "uint8")
            found[name] = _in(whole, tensor)
        yield found


def arena_of(made: native.Handle) -> Arena:
    """The arena of a C handle. Not for a thread on which signal handlers run."""
    library = native.library()
    with made as handle:
        return Arena(library.refit_arena_data(handle), library.refit_arena_bytes(handle), made, BACKS[library.refit_arena_back(handle)])


def _storages(tensors: Iterable[torch.Tensor], device_type: str) -> list[list[torch.Tensor]]:
    """The tensors on devices of that type, by storage, without those in regions and arenas."""
    found: dict[int, list[torch.Tensor]] = {}  # by address of the storage
    for tensor in tensors:
        # A DTensor's memory is its local tensor's.
        local = getattr(tensor, "_local_tensor", tensor)
        if local.device.type != device_type or local.numel() == 0:
            continue
        storage = local.untyped_storage()
        if storage.data_ptr() in found or locate(storage.data_ptr(), storage.nbytes()) is None:
            found.setdefault(storage.data_ptr(), []).append(local)
    return list(found.values())


def _capacities(device: str | None, whole: int, kept: KeptArenas) -> Iterator[int]:
    """Yields how many bytes the next arena may have, of `whole` that a model takes: those of the next kept one, if there is one. A new arena needs
    twice its bytes beside the tensors that move into it, or once with the back in host memory. So it takes three quarters of what is free on a
    device; on the host, where more arenas cost nothing, an eighth of the model."""
    kind = devices.kind_of(device)
    while True:
        nbytes = whole // MOST_ARENAS
        if kept.next_bytes is not None:
            nbytes = kept.next_bytes
        elif MOST_BYTES is not None:
            nbytes = MOST_BYTES
        elif kind is None or device is None:
            nbytes = max(nbytes, HOST_BYTES)
        else:
            kind.synchronize_all(device)
            kind.release_unused()
            nbytes = max(nbytes, kind.free_bytes(device) * 3 // (4 if kept.back == "host" else 8))
        yield nbytes


def _batches(found: list[list[torch.Tensor]], device: str | None, capacities: Iterator[int]) -> Iterator[list[list[torch.Tensor]]]:
    """The storages by the arena that each gets: as many as its capacity holds, at least one. Capacities that are the sizes of the arenas that
    were made give the same batches again."""
    first = 0
    while first < len(found):
        end, total = first + 1, _room_for(found[first : first + 1])
        capacity = _arena_bytes(max(total, next(capacities, 0)), device)
        while end < len(found) and total + _room_for(found[end : end + 1]) <= capacity:
            total += _room_for(found[end : end + 1])
            end += 1
        yield found[first:end]
        first = end


def _room_for(found: list[list[torch.Tensor]]) -> int:
    """The bytes that the storages take in one memory."""
    return sum(aligned(tensors[0].untyped_storage().nbytes()) for tensors in found)


def _move(found: list[list[torch.Tensor]], room: HostBytes | DeviceBytes, copy: bool = True) -> None:
    """Moves the storages into the room, with their values unless `copy` is False. The tensor objects stay the same, and tensors that share
    memory go on sharing it."""
    import torch

    with torch.no_grad():
        for tensors, whole in _places(found, room):
            if copy:
                whole.copy_(torch.empty(0, dtype=torch.uint8, device=whole.device).set_(tensors[0].untyped_storage()))
            for tensor in tensors:
                tensor.data = _in(whole, tensor)


def _places(found: list[list[torch.Tensor]], room: HostBytes | DeviceBytes) -> Iterator[tuple[list[torch.Tensor], torch.Tensor]]:
    """The storages' tensors, and the bytes in the room that each storage gets."""
    at = 0
    for tensors in found:
        nbytes = tensors[0].untyped_storage().nbytes()
        yield tensors, room.part(at, nbytes).torch((nbytes,), "uint8")
        at += aligned(nbytes)


def _in(whole: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as `tensor` is, in `whole` in place of its storage."""
    import torch

    offset = whole.storage_offset() // tensor.element_size() + tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype, device=whole.device).set_(whole.untyped_storage(), offset, tensor.shape, tensor.stride())


def like(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """A tensor of the same class, with the same attributes, over other data."""
    import torch

    made = torch.Tensor._make_subclass(type(tensor), data, tensor.requires_grad)
    made.__dict__.update(tensor.__dict__)
    return made


def place_in_arenas(module: torch.nn.Module, kept: Sequence[Arena], device: str | None, buffers: bool, back: str) -> None:
    """Gives the module's parameters and persistent buffers memory in arenas, where adopt(arena=True) would put them; what memory they have is
    let go, with its values. They become other Parameter objects, as by torch's `to_empty`, and keep attributes and ties.

    Args:
        kept: The arenas to use, if their number and sizes are those that the module needs; else new ones are made, whose bytes are not set.
        device: A device's name; None or "host": host memory.
        back: As in adopt(), of new arenas.
    """
    import torch

    found: dict[int, list[torch.Tensor]] = {}  # by storage; one without memory has no address
    for tensor in _weights(module, buffers):
        if hasattr(tensor, "_local_tensor"):
            raise Unimplemented("a DTensor can't be placed in an arena without its values")
        if tensor.numel() > 0:
            found.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    storages = list(found.values())
    batches = list(_batches(storages, device, (arena.nbytes for arena in kept)))
    arenas = list(kept)
    if [arena.nbytes for arena in kept] != [_arena_bytes(_room_for(batch), device) for batch in batches]:
        batches, arenas = [], []
        for batch in _batches(storages, device, _capacities(device, _room_for(storages), KeptArenas(back=back))):
            batches.append(batch)
            arenas.append(_new_arena(_room_for(batch), device, back))
    placed: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for batch, arena in zip(batches, arenas):
            for tensors, whole in _places(batch, devices.bytes_at(device, arena.pointer, arena.nbytes, arena)):
                for tensor in tensors:
                    placed[id(tensor)] = like(tensor, _in(whole, tensor))
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            held.update({name: placed[id(tensor)] for name, tensor in held.items() if tensor is not None and id(tensor) in placed})
