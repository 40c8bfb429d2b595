"""What trainers and engines share: how they reach their daemon, layouts as C lists, regions known to the daemon."""

from __future__ import annotations

import ctypes
import math
import os
import struct
import sys
import threading
import warnings
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from operator import index
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ..errors import InvalidArgument, NotFound, StagingWarning
from ..layout import Box, PushedTensors, Source, TensorSpec
from ..layout.devices import connect_fields, kind_of, on_host
from ..layout.memory import DTYPES, Arena, DeviceMemory, FilledMemory, HostMemory, Region, RegionMemory, aligned, locate
from . import ends_soon, interruptible, native
from .native import Handle, check, ids, made_by, reads_tensors, refuse_fork, text, texts

if TYPE_CHECKING:
    from ..layout.devices import Resolver


_TENSOR = struct.Struct("=QiiQqq")
_PIECE = struct.Struct("=qQQQQq")
assert _TENSOR.size == ctypes.sizeof(native.refit_tensor) and _PIECE.size == ctypes.sizeof(native.refit_piece)

MAX_DIMENSIONS = 8


class Piece(NamedTuple):
    """A box of tensor `tensor` that lies in `region`, with byte_offset from the region's base."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    region: Handle
    byte_offset: int


class TensorList:
    """A C array of refit_tensor, of which each is whole."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self.count = len(tensors)
        names, dims, at = bytearray(), array("q"), []
        for tensor in tensors:
            at.append((len(names), len(dims)))
            names += tensor.name.encode() + b"\0"
            dims.extend(tensor.shape)
        dims.append(0)  # so that it has an address
        self._names, self._dims = ctypes.create_string_buffer(bytes(names)), dims
        name_base, dims_base = ctypes.addressof(self._names), dims.buffer_info()[0]
        self._packed = ctypes.create_string_buffer(_TENSOR.size * max(1, self.count))
        self.pointer = ctypes.addressof(self._packed)
        for i, (tensor, (name, dim)) in enumerate(zip(tensors, at)):
            dtype, rank = DTYPES[tensor.dtype].code, len(tensor.shape)
            _TENSOR.pack_into(self._packed, i * _TENSOR.size, name_base + name, dtype, rank, dims_base + 8 * dim, 0, native.WHOLE)


class DerivedList:
    """A C array of refit_derivation, for the tensors that are derived."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        found = [(i, tensor.derived) for i, tensor in enumerate(tensors) if tensor.derived is not None]
        self.count = len(found)
        self._sources = TensorList([derived.source for _, derived in found])
        self._packed = (native.refit_derivation * max(1, self.count))()
        self.pointer = ctypes.addressof(self._packed)
        for n, (i, derived) in enumerate(found):
            source = self._sources.pointer + n * _TENSOR.size
            self._packed[n] = native.refit_derivation(i, source, native.DERIVED_KINDS[derived.kind], native.DERIVED_ROLES[derived.role])


class PieceList:
    """A C array of refit_piece. The regions' handles must stay open as long as it is used."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.count = len(pieces)
        self._numbers = array("q", [number for piece in pieces for numbers in piece[1:4] for number in numbers] or [0])
        self._packed = ctypes.create_string_buffer(_PIECE.size * max(1, self.count))
        self.pointer = ctypes.addressof(self._packed)
        at = self._numbers.buffer_info()[0]
        for i, piece in enumerate(pieces):
            step = 8 * len(piece.offset)
            _PIECE.pack_into(self._packed, i * _PIECE.size, piece.tensor, at, at + step, at + 2 * step, piece.region.pointer, piece.byte_offset)
            at += 3 * step


def _wrong(what: str, whose: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{what} of {whose}{why}", culprit=what)


def check_name(name: str, whose: str) -> None:
    """Raises InvalidArgument for a name that C would read as another."""
    what = f"tensor {name!r}"
    if not isinstance(name, str) or not name or "\0" in name:
        raise _wrong(what, whose, ": the name is empty, no text, or has a null in it")
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise _wrong(what, whose, f": the name is not UTF-8: {error}") from None


def integers(values: object) -> tuple[int, ...] | None:
    """A sequence's entries as int, whatever integers they are (numpy's too); None where it is none, or holds something else."""
    try:
        return tuple(map(index, values))  # type: ignore[call-overload]
    except TypeError:
        return None


def check_tensors(tensors: Sequence[TensorSpec], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for what the library could only refuse in worse words."""
    seen: set[str] = set()
    for tensor in tensors:
        what = f"tensor '{tensor.name}'"
        check_name(tensor.name, whose)
        if tensor.name in seen:
            raise _wrong(what, whose, " is there twice")
        seen.add(tensor.name)
        if tensor.dtype not in DTYPES:
            raise _wrong(what, whose, f": dtype {tensor.dtype!r} is none of {', '.join(DTYPES)}")
        if integers(tensor.shape) is None:
            raise _wrong(what, whose, f": shape {tensor.shape!r} is no sequence of integers")
        if len(tensor.shape) > MAX_DIMENSIONS or any(n < 0 for n in tensor.shape):
            raise _wrong(what, whose, f": shape {tuple(tensor.shape)} has a negative or more than {MAX_DIMENSIONS} dimensions")
        if (derived := tensor.derived) is not None:
            check_tensors([derived.source], f"what '{tensor.name}' of {whose} is derived from")
            for field, value, known in (("kind", derived.kind, native.DERIVED_KINDS), ("role", derived.role, native.DERIVED_ROLES)):
                if value not in known:
                    raise _wrong(what, whose, f": {field} {value!r} is none of {', '.join(known)}")


def check_boxes(tensors: Sequence[TensorSpec], boxes: Sequence[Box], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for a box outside of its tensor or of its memory."""
    for box in boxes:
        if not 0 <= box.tensor_index < len(tensors):
            raise InvalidArgument(f"a box of {whose} is of tensor {box.tensor_index} of {len(tensors)}")
        tensor = tensors[box.tensor_index]
        what = f"tensor '{tensor.name}'"
        rank = len(tensor.shape)
        if not len(box.offset) == len(box.extent) == len(box.strides) == rank:
            why = f" has {rank} dimensions, but its box has offset {box.offset}, extent {box.extent}, strides {box.strides}"
            raise _wrong(what, whose, why)
        lowest = highest = 0
        for offset, extent, stride, size in zip(box.offset, box.extent, box.strides, tensor.shape):
            if offset < 0 or extent < 1 or offset + extent > size:
                why = f": the box at {box.offset} of {box.extent} elements is empty or beyond the shape {tensor.shape}"
                raise _wrong(what, whose, why)
            reach = (extent - 1) * stride
            lowest, highest = lowest + min(reach, 0), highest + max(reach, 0)
        itemsize = DTYPES[tensor.dtype].itemsize
        first, last = box.byte_offset + lowest * itemsize, box.byte_offset + (highest + 1) * itemsize
        if first < 0 or last > box.memory.nbytes:
            raise _wrong(what, whose, f": the box takes bytes {first} to {last} of memory that has {box.memory.nbytes}")


class TensorAddress:
    """Tells where a tensor's memory is now. `current()` is the tensor; `fixed`: that tensor, where it is always the same."""

    __slots__ = ("current", "fixed")

    def __init__(self, current: Callable[[], Any], fixed: Any = None) -> None:
        self.current = current
        self.fixed = fixed

    def __call__(self) -> int:
        return int(self.current().data_ptr())


class Addresses:
    """Functions that return addresses, and the addresses that they returned first. Every refit asks all of them whether anything moved."""

    def __init__(self, asked: Sequence[Callable[[], int]], first: Sequence[int]) -> None:
        self._all = list(asked), list(first)
        self._fast = reads_tensors()
        if not self._fast:
            return
        kind = sys.modules["torch"].Tensor
        pairs = list(zip(asked, first))
        fixed = [(a.fixed, at) for a, at in pairs if isinstance(a, TensorAddress) and isinstance(a.fixed, kind)]
        current = [(a.current, at) for a, at in pairs if isinstance(a, TensorAddress) and not isinstance(a.fixed, kind)]
        self._fixed = [tensor for tensor, _ in fixed], array("q", [at for _, at in fixed])
        self._ids = ids(self._fixed[0])
        self._current = [ask for ask, _ in current], array("q", [at for _, at in current])
        rest = [(a, at) for a, at in pairs if not isinstance(a, TensorAddress)]
        self._rest = [a for a, _ in rest], [at for _, at in rest]

    def moved(self) -> bool:
        """Whether any function tells another address now."""
        if not self._fast:
            asked, first = self._all
            return [now() for now in asked] != first
        if _first_moved(self._ids, self._fixed[1]):
            return True
        currents, at = self._current
        if currents:
            tensors = [current() for current in currents]
            if not all(isinstance(tensor, sys.modules["torch"].Tensor) for tensor in tensors) or _first_moved(ids(tensors), at):
                return True
        rest, first = self._rest
        return [now() for now in rest] != first


def _first_moved(ids: array[int], addresses: array[int]) -> bool:
    count = len(addresses)
    first = native.locked_library().refit_python_first_moved(ids.buffer_info()[0], addresses.buffer_info()[0], count)
    return bool(first < count)


Self = TypeVar("Self", bound="Member")
T = TypeVar("T")


def milliseconds(seconds: float | None, what: str) -> int:
    """Seconds as the library's milliseconds; None is its default, 0. At least 1 ms, so that no short time becomes the default."""
    if seconds is None:
        return 0
    if not 0 < seconds < 1e12:
        raise InvalidArgument(f"{what}: {seconds} seconds is not positive", culprit=what)
    return max(1, round(seconds * 1000))


def checked_version(version: int) -> int:
    """`version`, if it is an integer from 0 to 2^63 - 1; else raises InvalidArgument."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
        raise InvalidArgument(f"version: {version!r} is no integer from 0 to 2^63 - 1", culprit="version")
    return version


def checked_count(value: int, what: str, least: int = 0) -> int:
    """`value`, if it is an integer that C's int32 holds and not below `least`; else raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidArgument(f"{what}: {value!r} is no integer from {least} to 2^31 - 1", culprit=what)
    return value


@dataclass(frozen=True)
class TLS:
    """The certificates by which a member and a daemon over TCP know each other.

    Fields that are None come from the environment: REFITD_TLS_CERTIFICATE, REFITD_TLS_KEY, REFITD_TLS_ROOTS and REFITD_TLS_SERVER.
    The files are read anew for each lease.

    Attributes:
        certificate: The path of a PEM file with this member's certificate and the rest of its chain.
        key: The path of a PEM file with the certificate's private key, without a password.
        roots: The path of a PEM file with the roots that sign daemons' certificates.
        server: The identity that the daemon must have: "spiffe://DOMAIN/PATH", the same with a last part of "*" for all below,
            "dns:NAME" or "dns:*.DOMAIN". Without any, the daemon's certificate must be for the host of the address.
    """

    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    roots: str | os.PathLike[str] | None = None
    server: str | None = None

    def _fields(self) -> dict[str, bytes | None]:
        """The fields of refit_connect_options. Raises InvalidArgument, naming the one that is no text."""
        return {f"tls_{name}": _encoded(f"tls.{name}", getattr(self, name)) for name in ("certificate", "key", "roots", "server")}


def _encoded(what: str, value: str | os.PathLike[str] | None) -> bytes | None:
    if value is None:
        return None
    try:
        given = os.fspath(value)
    except TypeError:
        given = None
    if not isinstance(given, str) or not given or "\0" in given:
        raise InvalidArgument(f"{what}: {value!r} is no text", culprit=what)
    return os.fsencode(given)


@dataclass(frozen=True)
class Connect:
    """How a member reaches its daemon, and how long it waits.

        trainer = refitd.Trainer("policy", connect=refitd.Connect(address="node-a:7411", tls=refitd.TLS("me.pem", "me.key", "roots.pem")))

    Attributes:
        socket: The path of the daemon's socket; None: REFITD_SOCKET, else /run/refitd/refitd.sock.
        coordinator: "HOST:PORT" of the daemon that has the group; None: this one. It is one name, which the daemon resolves anew
            whenever it joins the group.
        wait_seconds: How long to wait for daemon and group (10).
        call_margin_seconds: Added to what remains of an update as the deadline of its calls (5).
        reattach_seconds: How long to try to attach again after the daemon was lost; None: not at all.
        silence_seconds: A daemon that is silent for this long is lost (30).
        client: Free text for status pages.
        address: "HOST:PORT" of the daemon, in place of `socket`, for trainers. Over TCP nothing shares memory: the rank can push, in
            calls of at most 1 MiB each, and can't register.
        tls: The certificates for TCP; None: those that the environment names.
        insecure: Whether TCP without certificates is allowed, for laboratories.
    """

    socket: str | None = None
    coordinator: str | None = None
    wait_seconds: float | None = None
    call_margin_seconds: float | None = None
    reattach_seconds: float | None = None
    silence_seconds: float | None = None
    client: str | None = None
    address: str | None = None
    tls: TLS | None = None
    insecure: bool = False

    def to(self, socket: str | None) -> Connect:
        """The same options with the daemon at `socket`, unless that is None. Raises InvalidArgument where these name a socket as well."""
        if socket is None:
            return self
        if self.socket is not None:
            raise InvalidArgument(f"both socket {socket!r} and connect.socket {self.socket!r} are given", culprit="socket")
        return replace(self, socket=socket)

    def _structure(self, group: str, device: str | None, spec: native.refit_group_spec | None = None) -> native.refit_connect_options:
        """The C structure, which keeps everything that it points to."""
        texts_ = {name: getattr(self, name) for name in ("socket", "coordinator", "client", "address")}
        for name, value in {"group": group, "device": device, **texts_}.items():
            if value is not None and (not isinstance(value, str) or "\0" in value):
                raise InvalidArgument(f"{name}: {value!r} is no text", culprit=name)
        self._check_tcp()
        times = ("wait", "call_margin", "reattach", "silence")
        made = native.sized(
            native.refit_connect_options,
            group=text(group),
            device=text(None if on_host(device) else device),
            insecure=int(self.insecure),
            **{name: text(value) for name, value in texts_.items()},
            **{f"{name}_ms": milliseconds(getattr(self, f"{name}_seconds"), f"{name}_seconds") for name in times},
            **connect_fields(),
            **({} if self.tls is None else self.tls._fields()),
        )
        if spec is not None:
            made.spec = ctypes.pointer(spec)
        return made

    def _check_tcp(self) -> None:
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise InvalidArgument(f"tls: {self.tls!r} is no refitd.TLS", culprit="tls")
        if self.address is None and (self.tls is not None or self.insecure):
            given = "insecure" if self.tls is None else "tls"
            raise InvalidArgument(f"{given} is for a daemon over TCP, and no address is given", culprit=given)
        if self.address is not None and self.socket is not None:
            raise InvalidArgument(f"both socket {self.socket!r} and address {self.address!r} are given", culprit="address")


@dataclass(frozen=True)
class GroupSpec:
    """The properties of a group beside its name and its number of trainer ranks. The first rank makes the group; the others bring an equal spec.

    Attributes:
        min_instances: How many engine instances an update waits for.
        slot_bytes: Bytes of a staging slot, a multiple of 4,096; None: the daemon's default.
        slots: How many staging slots there are, 2 to 64; None: the daemon's default.
        engine_only_tensors: Patterns of names that trainers never bring.
        unwanted_tensors: Patterns of names that need reach no engine, pushed or registered.
        max_lag: How far an instance's version may be behind the group's while the instance counts as ready.
        encrypted_data: Whether bytes between daemons must be encrypted: daemons that can't encrypt are refused, and so are GPUs over
            several daemons.
        hold_previous_seconds: How long after a commit engines with arenas keep the version before, for `Trainer.rollback`: the next update
            is not staged until then, or until `Trainer.release`. A whole number; 0: it may be staged at once.
        keep_seconds: How long a daemon keeps the arenas of an engine rank with `restore` that has gone, for the rank that takes its place;
            0: not at all.
    """

    min_instances: int = 1
    slot_bytes: int | None = None
    slots: int | None = None
    engine_only_tensors: Sequence[str] = ()
    unwanted_tensors: Sequence[str] = ()
    max_lag: int = 0
    encrypted_data: bool = False
    hold_previous_seconds: int = 0
    keep_seconds: int = 600

    def _structure(self, world_size: int) -> native.refit_group_spec:
        """The C structure, of a group with `world_size` trainer ranks."""
        engine_only = _names_of(self.engine_only_tensors, "engine_only_tensors")
        unwanted = _names_of(self.unwanted_tensors, "unwanted_tensors")
        return native.sized(
            native.refit_group_spec,
            trainer_ranks=checked_count(world_size, "world_size", 1),
            min_instances=checked_count(self.min_instances, "min_instances", 1),
            slot_bytes=0 if self.slot_bytes is None else self.slot_bytes,
            slots=0 if self.slots is None else checked_count(self.slots, "slots", 1),
            engine_only_count=len(engine_only),
            engine_only_tensors=texts(engine_only),
            unwanted_count=len(unwanted),
            unwanted_tensors=texts(unwanted),
            max_lag=checked_count(self.max_lag, "max_lag", 0),
            encrypted_data=1 if self.encrypted_data else 0,
            hold_previous_seconds=checked_count(self.hold_previous_seconds, "hold_previous_seconds", 0),
            keep_seconds=checked_count(self.keep_seconds, "keep_seconds", 0) or -1,
        )


def _names_of(names: Sequence[str], what: str) -> list[str]:
    """The names as a list; raises InvalidArgument for a single text, whose characters would be taken for names."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"{what}: {names!r} is no list of names", culprit=what)
    return list(names)


def made_of(kind: type[T], given: T | Mapping[str, Any], where: str) -> T:
    """A Connect, a GroupSpec or other dataclass of the fields that a framework's configuration gives.

    Raises:
        InvalidArgument: There is no field of a name in `given`; `where` names the place in the configuration.
    """
    if isinstance(given, kind):
        return given
    assert isinstance(given, Mapping)
    known = {field.name for field in fields(kind)}
    for name in given:
        if name not in known:
            raise InvalidArgument(f"{where}.{name}: there is no such option", culprit=name)
    return kind(**given)


# close() waits this long for the calls of other threads. They have deadlines of their own: the last of them then frees the handle.
CLOSE_SECONDS = 10.0


@dataclass
class Registration:
    """The results of one register() call: the pieces, and everything that keeps their memory."""

    tensors: list[TensorSpec]
    boxes: list[Box]
    pushed: list[int]
    pieces: list[Piece] = field(default_factory=list)
    staged: list[tuple[HostMemory, Region, int]] = field(default_factory=list)  # copied before each refit
    filled: list[tuple[FilledMemory, memoryview]] = field(default_factory=list)  # filled before each refit
    device_regions: dict[int, tuple[Any, Handle]] = field(default_factory=dict)  # on devices, by base address
    owners: list[Region | Arena] = field(default_factory=list)
    pushed_tensors: PushedTensors | None = None  # the tensors that every refit pushes
    before_refit: Callable[[], None] | None = None
    source: Source | None = None  # what the layout was made of
    warning: str = ""  # the text of the StagingWarning; "": there is none

    _addresses: Addresses | None = None  # tell where memory is that may move; made when first asked

    def nbytes(self) -> int:
        """How many bytes of tensors the boxes hold."""
        return sum(math.prod(box.extent) * DTYPES[self.tensors[box.tensor_index].dtype].itemsize for box in self.boxes)

    def unresolved(self) -> Registration:
        """The same layout, of which no memory has been made known to a daemon."""
        return replace(self, pieces=[], staged=[], filled=[], device_regions={}, owners=[], warning="", _addresses=None)

    def moved(self) -> bool:
        """Whether any memory lies elsewhere than when it was registered. This is asked at every refit, of all tensors."""
        if self._addresses is None:
            memories = {id(box.memory): box.memory for box in self.boxes}.values()
            movable = [m for m in memories if isinstance(m, (HostMemory, DeviceMemory)) and m.pointer_now is not None]
            self._addresses = Addresses([m.pointer_now for m in movable if m.pointer_now is not None], [m.pointer for m in movable])
        return self._addresses.moved()

    def first_moved(self) -> str:
        """The first tensor whose memory lies elsewhere; "a tensor" where none does."""
        return next((self.tensor_of(box) for box, _, _ in self.moved_boxes()), "a tensor")

    def moved_boxes(self) -> Iterator[tuple[Box, HostMemory | DeviceMemory, int]]:
        """Boxes whose memory lies elsewhere than when it was registered: the box, its memory, and the address now."""
        for box in self.boxes:
            memory = box.memory
            if isinstance(memory, (HostMemory, DeviceMemory)) and memory.pointer_now is not None:
                pointer = memory.pointer_now()
                if pointer != memory.pointer:
                    yield box, memory, pointer

    @property
    def staged_bytes(self) -> int:
        """Bytes that are copied before each refit because they lie outside of regions."""
        return sum(memory.nbytes for memory, _, _ in self.staged)

    def tensor_of(self, box: Box) -> str:
        return f"tensor '{self.tensors[box.tensor_index].name}'"

    def begin_refit(self) -> None:
        """Does what the caller wants done first in every refit."""
        if self.before_refit is not None:
            self.before_refit()

    def fill(self) -> None:
        """Brings bytes that are not in place into the regions: first by copies, then by the caller's own functions."""
        for memory, region, at in self.staged:
            ctypes.memmove(region.pointer + at, memory.pointer, memory.nbytes)
        for room, view in self.filled:
            room.fill(view)


class Member:
    """A trainer or engine rank that is attached to its daemon. Thread-safe where its methods do not say otherwise."""

    _kind: str  # "trainer" or "engine", as in the names of C functions
    _handle: Handle
    label: str  # names this rank in errors, as the daemon does
    device: str | None  # a device's name (a GPU's UUID); None or "host": host memory

    def __init__(self, of: str, group: str, rank: int, world_size: int) -> None:
        """`of`: what this is a rank of, for errors."""
        refuse_fork()
        checked_count(world_size, "world_size", 1)
        who = f"{self._kind} rank {rank}"
        self.label = f"{who} of {of}"
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise InvalidArgument(f"{self.label}: world_size is {world_size}", culprit=who)
        self.group, self.rank, self.world_size = group, rank, world_size
        self._lock = threading.RLock()
        self._known: weakref.WeakKeyDictionary[Region | Arena, Handle] = weakref.WeakKeyDictionary()
        self._registration: Registration | None = None

    # ---- lifetime ----

    def _attach(self, options: ctypes.Structure) -> None:
        """Attaches by the C function of this kind, and owns what it makes."""
        kind = f"refit_{self._kind}"
        attach = partial(made_by, f"{kind}_attach", ctypes.byref(options), free=f"{kind}_free", what=self.label, context=self.label)
        self._handle = interruptible(attach, disown=Handle.close)

    def _use(self, call: Callable[[int], T]) -> T:
        """The result of a short call, which gets the member's pointer."""
        return self._handle.use(call)

    def _check(self, function: str, *arguments: Any) -> None:
        """Makes a short call of the C function refit_<kind>_<function>, and raises what it answers."""
        called = getattr(native.library(), f"refit_{self._kind}_{function}")
        self._use(lambda handle: check(called(handle, *arguments), self.label))

    def _ask(self, function: str, *arguments: Any) -> None:
        """Does what _check does for a call that waits for the daemon."""
        interruptible(partial(self._check, function, *arguments), cancel=ends_soon)

    def _ask_version(self, function: str) -> int | None:
        """Returns the int64 that a C function of this kind answers; None where it answers NOT_FOUND."""
        out = ctypes.c_int64()
        try:
            self._check(function, ctypes.byref(out))
        except NotFound:
            return None
        return out.value

    @property
    def closed(self) -> bool:
        """Whether close() was called, or this process is a forked child of the one that attached."""
        return self._handle.closed

    def close(self) -> None:
        """Detaches from the daemon. Calls that other threads have under way end first; a refit among them is given up. No method works
        afterwards."""
        wait_seconds = 0.0 if self._handle.used_here else CLOSE_SECONDS
        interruptible(lambda: self._close(wait_seconds), cancel=ends_soon)

    def _close(self, wait_seconds: float) -> None:
        self._handle.close(wait_seconds=wait_seconds)
        with self._lock:
            self._registration = None
            regions = list(self._known.values())
            self._known.clear()
        for region in regions:
            region.close()  # whatever still refers to it: another engine may have an arena from now on

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<refitd {self.label}{', closed' if self.closed else ''}>"

    @property
    def _on_host(self) -> bool:
        return on_host(self.device)

    @property
    def reattachments(self) -> int:
        """How often a lost lease was followed by another (`reattach_seconds`)."""
        return int(self._use(getattr(native.library(), f"refit_{self._kind}_reattachments")))

    # ---- memory ----

    def _known_region(self, region: Region | Arena) -> Handle:
        """The C region that makes `region` known to this member's daemon; made at its first use.

        Raises InvalidArgument for a trainer's tensor in an arena, FailedPrecondition for an arena that another engine has.
        """
        with self._lock:
            known = self._known.get(region)
            if known is None:
                made = partial(made_by, free="refit_region_free", what="a region", context=self.label)
                with self._handle as handle:
                    if isinstance(region, Region):
                        known = made(f"refit_{self._kind}_add_memfd", handle, region.descriptor, region.nbytes)
                    elif self._kind == "engine":
                        with region.handle as arena:
                            known = made("refit_engine_add_arena", handle, arena)
                    else:
                        raise InvalidArgument(f"{self.label}: a tensor lies in an arena, which only engines have")
                self._known[region] = known
            return known

    # ---- layouts ----

    def _register(self, registration: Registration, stage: bool) -> None:
        """Checks, resolves and hands over a layout, which replaces the one before. On an error nothing has changed.

        `stage`: whether memory outside of regions may be copied.
        """
        self._handle.check_open()  # before regions are made
        check_boxes(registration.tensors, registration.boxes, self.label)

        def register() -> None:
            with self._handle:
                self._resolve(registration, stage)
                self._hand_over(registration)
                # The daemon has the new layout, so a caller that is interrupted now must find that layout here as well.
                with self._lock:
                    self._registration = registration

        interruptible(register, cancel=ends_soon)
        if registration.warning:
            warnings.warn(registration.warning, StagingWarning, stacklevel=4)

    def _rebind(self, registration: Registration) -> int:
        """Registers the layout anew if the memory of any of its tensors has moved. Returns how many tensors have moved."""
        if not registration.moved():
            return 0
        moved: dict[int, HostMemory | DeviceMemory] = {}
        tensors: set[int] = set()
        for box, memory, pointer in registration.moved_boxes():
            if id(memory) not in moved:
                if memory.check_moved is not None:
                    memory.check_moved()
                moved[id(memory)] = replace(memory, pointer=pointer)
            tensors.add(box.tensor_index)
        if not moved:
            return 0
        boxes = [replace(box, memory=moved.get(id(box.memory), box.memory)) for box in registration.boxes]
        self._register(replace(registration.unresolved(), boxes=boxes), stage=True)
        return len(tensors)

    def _resolve(self, registration: Registration, stage: bool) -> None:
        """Finds or makes the region of each box."""
        places: dict[int, tuple[Region | Arena, int]] = {}  # id of a memory object: the region and byte offset of its bytes
        outside: dict[tuple[int, int], list[HostMemory]] = {}
        rooms: dict[int, FilledMemory] = {}
        for box in registration.boxes:
            memory = box.memory
            if id(memory) in places or id(memory) in rooms:
                continue
            if isinstance(memory, DeviceMemory):
                if (arena := locate(memory.pointer, memory.nbytes)) is not None:
                    places[id(memory)] = arena, memory.pointer - arena.pointer
                continue
            if not self._on_host:
                raise _wrong(registration.tensor_of(box), self.label, f" is in host memory, but device is {self.device}")
            if isinstance(memory, RegionMemory):
                places[id(memory)] = memory.region, memory.byte_offset
            elif isinstance(memory, HostMemory):
                region = locate(memory.pointer, memory.nbytes)
                if region is not None:
                    places[id(memory)] = region, memory.pointer - region.pointer
                elif stage:
                    outside.setdefault((memory.pointer, memory.nbytes), []).append(memory)
                else:
                    why = " lies in memory that the daemon can't map: make it with refitd.empty, or move it with refitd.adopt(module)"
                    raise _wrong(registration.tensor_of(box), self.label, why)
            elif isinstance(memory, FilledMemory):
                if not stage:
                    raise _wrong(registration.tensor_of(box), self.label, ": only a trainer's memory is filled before a refit")
                rooms[id(memory)] = memory
        self._make_staging(registration, outside, rooms, places)
        resolver = self._resolver(registration, places)
        # In the order in which they were made, as the rank finds them that takes this one's place (Engine.restore).
        arenas = {region for region, _ in places.values() if isinstance(region, Arena)}
        for arena in sorted(arenas, key=lambda arena: arena.number):
            self._known_region(arena)
        for box in registration.boxes:
            if resolver is not None and id(box.memory) not in places:
                registration.pieces += resolver.pieces(box, registration.tensor_of(box))
                continue
            region, base = places[id(box.memory)]
            at = base + box.byte_offset
            registration.pieces.append(Piece(box.tensor_index, box.offset, box.extent, box.strides, self._known_region(region), at))
        registration.owners += [region for region, _ in places.values()]
        if resolver is not None:
            registration.device_regions = resolver.regions

    def _resolver(self, registration: Registration, places: Mapping[int, Any]) -> Resolver | None:
        """The resolver for boxes on a device whose memory has no place; None where there are none."""
        found = (box.memory for box in registration.boxes if isinstance(box.memory, DeviceMemory) and id(box.memory) not in places)
        memory = next(found, None)
        if memory is None:
            return None
        # A member on the host has no kind: the memory's own then says that it is on another device than the member.
        kind = kind_of(self.device) or kind_of(memory.device_uuid)
        assert kind is not None
        before = self._registration.device_regions if self._registration is not None else {}
        itemsizes = [DTYPES[tensor.dtype].itemsize for tensor in registration.tensors]
        return kind.resolver(self.label, self._kind, self._handle, self.device, itemsizes, before)

    def _make_staging(
        self,
        registration: Registration,
        outside: dict[tuple[int, int], list[HostMemory]],
        rooms: dict[int, FilledMemory],
        places: dict[int, tuple[Region | Arena, int]],
    ) -> None:
        """Makes one region for all bytes that are not in regions."""
        total = sum(aligned(nbytes) for _, nbytes in outside) + sum(aligned(room.nbytes) for room in rooms.values())
        if total == 0:
            return
        region, at = Region(total), 0
        for (_, nbytes), memories in outside.items():
            registration.staged.append((memories[0], region, at))
            for memory in memories:
                places[id(memory)] = region, at
            at += aligned(nbytes)
        for number, room in rooms.items():
            registration.filled.append((room, memoryview(region)[at : at + room.nbytes]))
            places[number] = region, at
            at += aligned(room.nbytes)
        if outside:
            first = next((m.label for memories in outside.values() for m in memories if m.label), "a tensor")
            registration.warning = (
                f"{self.label}: {len(outside)} tensors ({sum(n for _, n in outside):,} bytes), {first} among them, lie outside of "
                "refitd's regions and are copied at every refit: move them with refitd.adopt(module), or make them with refitd.empty"
            )

    def _hand_over(self, registration: Registration) -> None:
        tensors = TensorList(registration.tensors)
        pieces = PieceList(registration.pieces)
        register = getattr(native.library(), f"refit_{self._kind}_register")
        arguments: list[int] = [tensors.pointer, tensors.count, pieces.pointer, pieces.count]
        if self._kind == "trainer":
            pushed = array("q", registration.pushed)
            arguments += [pushed.buffer_info()[0], len(pushed)]
        else:
            derived = DerivedList(registration.tensors)
            arguments += [derived.pointer, derived.count]
        with self._handle as handle:
            check(register(handle, *arguments), self.label)
