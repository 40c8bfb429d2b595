"""Where the bytes of pushed values come from, and whether tensors were replaced or moved.

A registration lists memory; a forward reads whatever tensor a module has under a name by then (P11). `Places` keeps which memory each name
had, and finds the names that have other memory now: because the tensor was replaced (`m.w = nn.Parameter(...)`, `load_state_dict(assign=True)`,
vLLM's `replace_parameter`), or its memory moved (`m.to(...)`). `Views` finds parts of a module's tensors again.

Imports torch where used.
"""

from __future__ import annotations

import ctypes
import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from operator import attrgetter
from typing import Any, NamedTuple

from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..layout import is_dtensor, span
from ..layout.memory import DTYPES, DType, DeviceBytes, HostBytes, Source, resolve
from . import native
from .native import add_plain, ids, plain, reads_tensors


# By torch.dtype: a dictionary is much faster than resolve().
_torch_dtypes: dict[Any, DType] = {}

# Formats of the buffer protocol, native sizes.
_FORMATS = {
    ("d", 8): "float64",
    ("f", 4): "float32",
    ("e", 2): "float16",
    ("b", 1): "int8",
    ("B", 1): "uint8",
    ("c", 1): "uint8",
    ("?", 1): "bool",
    ("h", 2): "int16",
    ("i", 4): "int32",
    ("l", 4): "int32",
    ("l", 8): "int64",
    ("q", 8): "int64",
}


def is_torch(value: Any) -> bool:
    """Whether the value is a torch tensor."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def source_of(name: str, value: Any, dtype: Any = None, shape: Sequence[int] | None = None) -> Source:
    """The source for `value`. `dtype`, `shape`: of the elements in raw bytes; other values must have that dtype themselves.

    Raises InvalidArgument, naming the tensor, for what is no tensor or of another dtype.
    """
    if isinstance(value, Source):  # refitd.layout.shards pushes a Source that casts
        return value
    torch = sys.modules.get("torch")
    if is_torch(value):
        source = _of_torch(torch, name, value)
    else:
        source = _of_other(torch, name, value)
    if dtype is None:
        return source
    wanted = resolve(dtype, f"tensor '{name}'")
    if wanted is source.dtype:
        return source
    if source.dtype.name != "uint8":
        why = "dtype= says what raw bytes (uint8) hold, and casts nothing: cast the tensor before the push"
        raise InvalidArgument(f"tensor '{name}' is {source.dtype.name}, not {wanted.name}; {why}", tensor=name)
    return _reinterpreted(name, source, wanted, shape)


def _of_torch(torch: Any, name: str, tensor: Any) -> Source:
    """A source for a torch tensor: its memory if that is contiguous on the host, else copies by torch."""
    known = _torch_dtypes.get(tensor.dtype)
    if known is None:
        known = _torch_dtypes[tensor.dtype] = resolve(tensor.dtype, f"tensor '{name}'")
    dtype = known
    shape = tuple(tensor.shape)
    if tensor.layout is not torch.strided or tensor.is_meta or (type(tensor) not in plain and hasattr(tensor, "full_tensor")):
        kind = "has no storage" if tensor.is_meta else f"is a {type(tensor).__name__} of layout {tensor.layout}"
        raise InvalidArgument(f"tensor '{name}' {kind}: push dense tensors (a DTensor's full_tensor()), or register the shards", tensor=name)
    if type(tensor) not in plain:
        add_plain(type(tensor))
    count = tensor.numel()
    if tensor.is_cpu and tensor.is_contiguous() and not tensor.is_neg():
        pointer = tensor.data_ptr()
        # Sharded training frees the memory of gathered parameters between uses, and leaves the shape.
        if count and (pointer == 0 or tensor.untyped_storage().nbytes() < (tensor.storage_offset() + count) * dtype.itemsize):
            raise FailedPrecondition(f"tensor '{name}' has no memory: it was freed, or is a {type(tensor).__name__} without any", tensor=name)
        return Source(dtype, shape, count, None, pointer, tensor)
    flat: list[Any] = []  # the flattened tensor, made when it is first needed, since it may be a copy of the whole

    def copy(target: HostBytes | DeviceBytes, start: int, n: int) -> None:
        with torch.no_grad():
            if n == count:
                target.torch(shape, dtype.name).copy_(tensor)
                return
            if not flat:
                flat.append(tensor.detach().reshape(-1))
            target.torch((n,), dtype.name).copy_(flat[0][start : start + n])

    return Source(dtype, shape, count, copy, 0, tensor)


def _of_other(torch: Any, name: str, value: Any) -> Source:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return _of_numpy(numpy, name, value)
    if hasattr(value, "__dlpack__"):
        return _of_dlpack(torch, name, value)
    try:
        view = memoryview(value)
    except TypeError:
        raise InvalidArgument(
            f"tensor '{name}' is a {type(value).__name__}: neither a torch tensor, a numpy array, nor with DLPack or the buffer protocol", tensor=name
        ) from None
    return _of_buffer(name, view)


def _of_numpy(numpy: Any, name: str, value: Any) -> Source:
    """A source for a numpy array: its memory if that is contiguous, else copies by numpy."""
    dtype = resolve(value.dtype, f"tensor '{name}'")
    if isinstance(value, numpy.ma.MaskedArray):
        raise InvalidArgument(f"tensor '{name}' is a masked array: push its data, or fill it", tensor=name)
    if value.flags.c_contiguous:
        return Source(dtype, tuple(value.shape), value.size, None, value.ctypes.data, value)
    flat: list[Any] = []

    def copy(target: HostBytes | DeviceBytes, start: int, n: int) -> None:
        if n == value.size and isinstance(target, HostBytes):
            numpy.copyto(target.numpy(value.shape, dtype.name), value)
            return
        if not flat:
            flat.append(numpy.ascontiguousarray(value))
        copy_host(target, flat[0].ctypes.data + start * dtype.itemsize, n * dtype.itemsize)

    return Source(dtype, tuple(value.shape), value.size, copy, 0, value)


def _of_dlpack(torch: Any, name: str, value: Any) -> Source:
    if torch is None:
        try:
            import numpy
        except ImportError:
            raise Unimplemented(f"tensor '{name}': import torch or numpy first, which take DLPack") from None
    library = numpy if torch is None else torch
    try:
        taken = library.from_dlpack(value)
    except Exception as error:  # the library may not know the device or the dtype, or may not take read-only memory
        raise InvalidArgument(
            f"tensor '{name}': {library.__name__} does not take the DLPack of a {type(value).__name__}: {error}", tensor=name
        ) from error
    return _of_numpy(numpy, name, taken) if torch is None else _of_torch(torch, name, taken)


def _of_buffer(name: str, view: memoryview) -> Source:
    """A source for an object with the buffer protocol."""
    found = _FORMATS.get((view.format.lstrip("@="), view.itemsize))
    if found is None:
        raise InvalidArgument(f"tensor '{name}': a buffer of format {view.format!r}, which is none of refitd's dtypes", tensor=name)
    dtype = DTYPES[found]
    shape = tuple(view.shape or ())
    if view.nbytes == 0:
        return Source(dtype, shape, 0, None, 0, view)
    # ctypes gives the address of writable buffers and of bytes only.
    if view.readonly or not view.c_contiguous:
        raw = view.tobytes()
        pointer = ctypes.cast(ctypes.c_char_p(raw), ctypes.c_void_p).value or 0
        return Source(dtype, shape, math.prod(shape), None, pointer, raw)
    array = (ctypes.c_uint8 * view.nbytes).from_buffer(view)
    return Source(dtype, shape, math.prod(shape), None, ctypes.addressof(array), array)


def _reinterpreted(name: str, source: Source, dtype: DType, shape: Sequence[int] | None) -> Source:
    """Raw bytes (uint8) as elements of `dtype`."""
    if source.copy is not None or source.elements % dtype.itemsize != 0:
        raise InvalidArgument(
            f"tensor '{name}': {source.elements} bytes, contiguous and on the host, must be whole elements of {dtype.name}", tensor=name
        )
    count = source.elements // dtype.itemsize
    dims = tuple(shape) if shape is not None and math.prod(shape) == count else (count,)
    return Source(dtype, dims, count, None, source.pointer, source.owner)


def copy_host(target: HostBytes | DeviceBytes, pointer: int, nbytes: int) -> None:
    """Copies contiguous host memory to the target."""
    if isinstance(target, HostBytes):
        ctypes.memmove(target.pointer, pointer, nbytes)
        return
    import torch

    from_host = torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(pointer), dtype=torch.uint8)
    target.torch((nbytes,), "uint8").copy_(from_host)


# The dicts of a torch module that hold tensors and submodules.
_HELD = ("_parameters", "_buffers", "_modules")


class Bindings:
    """Dicts as they were when they were added: `hold()` returns whether all have the same entries now. Keeps dicts and values alive."""

    def __init__(self) -> None:
        self.complete = True  # False: some module has no dict of its tensors
        self._dicts: list[dict[str, Any]] = []
        self._entries: list[Any] = []  # key and value of each entry, of one dict after the other
        self._sizes = array("q")
        # Attributes that are these dicts: the dict of attributes, the name, the value.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._owned: list[Any] = []
        self._ids: list[array[int]] = []  # of the objects in all these lists; made by the first hold()
        self._watched = False  # whether Python tells of changes of the dicts
        self._changes = -1  # what it had told of when the dicts were compared last

    @classmethod
    def of_dict(cls, entries: dict[str, Any]) -> Bindings:
        """The entries of a dict."""
        made = cls()
        made._add(entries)
        return made

    @classmethod
    def of_modules(cls, *modules: Any) -> Bindings:
        """The parameters, buffers and submodules of torch modules and of all modules below them."""
        made = cls()
        seen: set[int] = set()
        pending = list(modules)
        while pending:
            module = pending.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            attributes = module.__dict__
            for what in _HELD:
                held = attributes.get(what)
                if not isinstance(held, dict):  # TorchScript's modules keep theirs elsewhere
                    made.complete = False
                    continue
                if held:
                    made._owners.append(attributes)
                    made._names.append(what)
                    made._owned.append(held)
                made._add(held)
                if what == "_modules":
                    pending += held.values()
        return made

    def holds_all(self, tensors: Iterable[Any]) -> bool:
        """Whether each of the tensors is the value of an entry, so that no other tensor can take its place unnoticed."""
        values = set(map(id, self._entries[1::2]))
        return self.complete and all(id(tensor) in values for tensor in tensors)

    def hold(self) -> bool:
        """Whether all dicts have the entries that they had."""
        if not reads_tensors():
            return self._hold_by_python()
        library = native.locked_library()
        if not self._ids:
            self._ids = [ids(held) for held in (self._dicts, self._entries, self._owners, self._names, self._owned)]
            watched = (library.refit_python_watch_dicts(self._ids[at].buffer_info()[0], len(self._ids[at]), int(at == 2)) for at in (0, 2))
            self._watched = all(watched)
        changes = library.refit_python_dict_changes()
        if self._watched and changes == self._changes:
            return True
        dicts, entries, owners, names, owned = (objects.buffer_info()[0] for objects in self._ids)
        if (
            library.refit_python_first_rebound(owners, names, owned, len(self._owners)) != len(self._owners)
            or library.refit_python_first_altered(dicts, self._sizes.buffer_info()[0], entries, len(self._dicts)) != len(self._dicts)
        ):
            return False
        self._changes = changes
        return True

    def _hold_by_python(self) -> bool:
        if any(owner.get(name) is not owned for owner, name, owned in zip(self._owners, self._names, self._owned)):
            return False
        place = 0
        for held, size in zip(self._dicts, self._sizes):
            if len(held) != size:
                return False
            for key, value in dict.items(held):
                if key is not self._entries[place] or value is not self._entries[place + 1]:
                    return False
                place += 2
        return True

    def _add(self, held: dict[str, Any]) -> None:
        self._dicts.append(held)
        self._sizes.append(len(held))
        for entry in dict.items(held):
            self._entries += entry


class Marks:
    """The address, dtype, shape and strides that tensors had: `same()` returns whether all have them still."""

    _local = attrgetter("_local_tensor")

    def __init__(self, held: Sequence[Any], current: Sequence[Callable[[], Any]]) -> None:
        """`held`: what the names are bound to: tensors and arrays; DTensors, of which the local tensor counts; None: nothing is held.
        `current`: for each of `held`, a function that returns the tensor: where `held` has another object, only this function counts."""
        self._fast = reads_tensors()
        kind = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
        self._fixed: list[int] = []
        self._sharded: list[int] = []
        self._asked: list[int] = []
        for i, tensor in enumerate(held):
            if tensor is None:
                continue
            of: Any = type(tensor)
            sharded = _is_sharded(of)
            if self._fast and isinstance(tensor, kind) and not sharded:
                self._fixed.append(i)
            elif self._fast and sharded and isinstance(getattr(tensor, "_local_tensor", None), kind):
                self._sharded.append(i)
            else:
                self._asked.append(i)
        self._held, self._current = held, current
        self.values: list[Any] = [None] * len(held)  # the marks, equal only where nothing has changed
        self._tensors: list[Any] = []
        self._ids = self._marks = self._local_marks = array("Q")
        self._note()

    def same(self) -> bool:
        """Whether every tensor is where it was, and as it was."""
        if self._tensors and not _unchanged(self._ids, self._marks):
            return False
        if self._sharded:
            tensors = self._locals()
            if not _unchanged(ids(tensors), self._local_marks):
                return False
        return all(_look(self._current[i]()) == self.values[i] for i in self._asked)

    def _locals(self) -> list[Any]:
        return [self._local(self._held[i]) for i in self._sharded]

    def _note(self) -> None:
        self._tensors = [self._held[i] for i in self._fixed]
        self._marks, self._local_marks = _marks(self._tensors), _marks(self._locals())
        for numbers, marks in ((self._fixed, self._marks), (self._sharded, self._local_marks)):
            unread = [i for i, mark in zip(numbers, marks) if not mark]
            if unread:  # librefit can't read these: torch is called for each
                self._asked += unread
                numbers[:] = [i for i, mark in zip(numbers, marks) if mark]
                marks[:] = array("Q", filter(None, marks))
            for i, mark in zip(numbers, marks):
                self.values[i] = mark
        self._tensors = [self._held[i] for i in self._fixed]
        self._ids = ids(self._tensors)
        for i in self._asked:
            self.values[i] = _look(self._current[i]())


@cache
def _is_sharded(kind: type) -> bool:
    """Whether these are DTensors; kept by type, because looking for missing attributes of every tensor is slow."""
    return is_dtensor(kind)


def _look(tensor: Any) -> tuple[Any, ...]:
    if hasattr(tensor, "__array_interface__"):
        return (tensor.__array_interface__["data"][0], tensor.dtype, tensor.shape, tensor.strides)
    try:
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    except RuntimeError:  # it has no memory any more
        return ()


def _marks(tensors: list[Any]) -> array[int]:
    objects, marks = ids(tensors), array("Q", bytes(8 * len(tensors)))
    if tensors:
        native.locked_library().refit_python_marks(objects.buffer_info()[0], marks.buffer_info()[0], len(tensors))
    return marks


def _unchanged(objects: array[int], marks: array[int]) -> bool:
    count = len(objects)
    first = native.locked_library().refit_python_first_changed(objects.buffer_info()[0], marks.buffer_info()[0], count)
    return bool(first == count)


class Place(NamedTuple):
    """Where and how a tensor's elements lie."""

    pointer: int
    device: str
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> Place:
        local = _local(tensor)
        return cls(local.data_ptr(), str(local.device), local.dtype, tuple(local.shape), tuple(local.stride()))

    @property
    def form(self) -> tuple[Any, ...]:
        return self[1:]


def _local(tensor: Any) -> Any:
    return getattr(tensor, "_local_tensor", tensor)


def is_module(value: Any) -> bool:
    """Whether the value has what refitd uses of a torch module."""
    return hasattr(value, "named_parameters") and hasattr(value, "state_dict")


def held_by(module: Any) -> Iterator[tuple[str, Any]]:
    """All parameters and buffers of a module by name; tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


class Places:
    """The memory of a module's tensors at one moment. `names`: those to look at; None: all. Not thread-safe."""

    def __init__(self, module: Any, names: Iterable[str] | None = None) -> None:
        self.module = module
        held = dict(held_by(module))
        wanted = held.keys() if names is None else set(names) & held.keys()
        self._known = set(held)
        self._places = {name: Place.of(held[name]) for name in wanted}
        self._memory = {name: held[name].detach() for name in wanted}
        self._wanted = wanted
        self._note(held)

    def _note(self, held: Mapping[str, Any]) -> None:
        """Notes the module as it is now, so that an unchanged module is recognised without looking at each name."""
        tensors = [held[name] for name in self._wanted]
        self._held = list(held.values())
        bindings = Bindings.of_modules(self.module)
        self._bindings = bindings if bindings.holds_all(held.values()) else None
        self._marks = Marks(tensors, [partial(_local, tensor) for tensor in tensors])

    @property
    def tensors(self) -> list[Any]:
        """All parameters and buffers of the module; the same list while the module names the same."""
        if self._bindings is not None and self._bindings.hold():
            return self._held
        return [tensor for _, tensor in held_by(self.module)]

    def changed(self) -> dict[str, str]:
        """By name, what has changed. New parameters are among them, because nothing delivers these."""
        if self._bindings is not None and self._bindings.hold() and self._marks.same():
            return {}
        held = dict(held_by(self.module))
        found = {}
        for name, before in self._places.items():
            tensor = held.get(name)
            if tensor is None:
                found[name] = "is no longer there"
                continue
            now = Place.of(tensor)
            if now.form != before.form:
                found[name] = f"was {before.dtype} {before.shape} with strides {before.strides} on {before.device} and is now " + (
                    f"{now.dtype} {now.shape} with strides {now.strides} on {now.device}"
                )
            elif now != before:
                found[name] = "lies elsewhere than when it was registered"
        new = (name for name, _ in self.module.named_parameters(remove_duplicate=False) if name not in self._known)
        found.update({name: "was not there when the module was registered" for name in new})
        return found

    def bring_back(self) -> dict[str, str]:
        """Moves tensors that have other memory now, and are otherwise as they were, back into the memory that they had, with their values.
        Returns what is changed all the same. For host memory only: a captured CUDA graph may read the memory that they have now."""
        import torch

        changed = self.changed()
        if not changed:
            return {}
        held = dict(held_by(self.module))
        for name in changed.keys() & self._places.keys() & held.keys():
            tensor, memory = held[name], self._memory[name]
            if Place.of(tensor).form == self._places[name].form:
                with torch.no_grad():
                    memory.copy_(tensor.detach())
                tensor.data = memory
        left = self.changed()
        if not left:
            self._note(dict(held_by(self.module)))
        return left


def describe(changed: Mapping[str, str], owner: str) -> tuple[str, str]:
    """A sentence about the result of `Places.changed`, and the culprit in that sentence."""
    first = next(iter(changed))
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return f"tensor '{first}' of {owner} {changed[first]}{more}", f"tensor '{first}'"


class _View(NamedTuple):
    held: str  # the name in the module
    form: tuple[Any, ...]  # of the module's tensor
    offset: int  # bytes from the start of the module's tensor
    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Views:
    """Tensors by checkpoint names, each of which was a part of a module's tensor, and is found again as the same part."""

    def __init__(self, module: Any, names: Mapping[str, Any]) -> None:
        self._module = module
        self._names = dict(names)
        held = [(name, tensor, Place.of(tensor)) for name, tensor in held_by(module) if tensor.numel() and tensor.device.type != "meta"]
        by_place = {place: name for name, _, place in held}
        by_storage: dict[int, list[tuple[str, Any, Place]]] = {}
        for entry in held:
            by_storage.setdefault(entry[1].untyped_storage().data_ptr(), []).append(entry)
        self._whole: dict[str, str] = {}
        self._parts: dict[str, _View] = {}
        for name, tensor in self._names.items():
            if not tensor.numel() or tensor.device.type == "meta":
                continue
            place = Place.of(tensor)
            if place in by_place:
                self._whole[name] = by_place[place]
                continue
            for held_name, whole, around in by_storage.get(tensor.untyped_storage().data_ptr(), ()):
                if around.pointer <= place.pointer and _end(tensor) <= _end(whole):
                    self._parts[name] = _View(held_name, around.form, place.pointer - around.pointer, place.dtype, place.shape, place.strides)
                    break

    @property
    def held_names(self) -> set[str]:
        """The module's names of the tensors of which these are the whole or a part."""
        return {*self._whole.values(), *(view.held for view in self._parts.values())}

    def now(self) -> dict[str, Any]:
        """The tensors as parts of what the module has now. Raises FailedPrecondition, naming the tensor, where a tensor is no longer such a part."""
        held = dict(held_by(self._module))
        found = {}
        for name, tensor in self._names.items():
            found[name] = tensor
            if name in self._whole:
                found[name] = _present(held, self._whole[name], name)
            elif name in self._parts:
                found[name] = _part(held, self._parts[name], name)
        return found


def _end(tensor: Any) -> int:
    """The address behind the last element."""
    return int(tensor.data_ptr()) + span(tensor.shape, tensor.stride()) * int(tensor.element_size())


def _present(held: Mapping[str, Any], held_name: str, name: str) -> Any:
    if held_name not in held:
        raise FailedPrecondition(f"tensor '{name}' was the module's '{held_name}', which is no longer there", tensor=name)
    return held[held_name]


def _part(held: Mapping[str, Any], view: _View, name: str) -> Any:
    owner = _present(held, view.held, name)
    if Place.of(owner).form != view.form:
        raise FailedPrecondition(
            f"tensor '{name}' was a part of the module's '{view.held}', which is now {owner.dtype} {tuple(owner.shape)} with strides "
            f"{owner.stride()} on {owner.device}",
            tensor=name,
        )
    flat = owner.detach()
    if flat.dtype != view.dtype:
        flat = flat.view(view.dtype)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset // flat.element_size())
