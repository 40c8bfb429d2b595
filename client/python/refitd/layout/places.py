"""The memory that a module's parameters and buffers have, by their names in the module (P11).

A registration lists memory; a forward reads whatever tensor a module has under a name by then. `Places` remembers what memory each name
had, and tells which names have other memory now: because the tensor was replaced (`m.w = nn.Parameter(...)`, `load_state_dict(assign=True)`,
vLLM's `replace_parameter`), or its memory moved (`m.to(...)`). `Views` finds tensors that are parts of a module's tensors again.

`mark_written` tells torch that memory was written from outside, so that copies that are kept by a tensor's version are made anew.

Imports torch where used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from .._core.tensors import Bindings, Marks
from ..errors import FailedPrecondition


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


def is_module(thing: Any) -> bool:
    return hasattr(thing, "named_parameters") and hasattr(thing, "state_dict")


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
        bindings = Bindings.of_modules(self.module)
        self._bindings = bindings if bindings.holds_all(held.values()) else None
        self._marks = Marks(tensors, [partial(_local, tensor) for tensor in tensors])

    def changed(self) -> dict[str, str]:
        """By name, what is otherwise now. Parameters that came are among them: nothing delivers these."""
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
        """Puts the module's tensors that have other memory now, and are otherwise as they were, back into the memory that they had, with
        the values that they have now. Returns what is changed all the same. For host memory: a captured CUDA graph reads other memory."""
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
    """A sentence about what `Places.changed` found, and the culprit in it."""
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
    """Tensors by checkpoint names, each found again as the part of a module's tensor that it was at first."""

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
            for held_name, other, its in by_storage.get(tensor.untyped_storage().data_ptr(), ()):
                if its.pointer <= place.pointer and _end(tensor) <= _end(other):
                    self._parts[name] = _View(held_name, its.form, place.pointer - its.pointer, place.dtype, place.shape, place.strides)
                    break

    @property
    def held_names(self) -> set[str]:
        """The names in the module of the tensors that these are, or are parts of."""
        return {*self._whole.values(), *(view.held for view in self._parts.values())}

    def now(self) -> dict[str, Any]:
        """The tensors as parts of what the module has now. Raises FailedPrecondition, naming the tensor, where one is no longer such a part."""
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
    if not tensor.numel():
        return int(tensor.data_ptr())
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    end: int = tensor.data_ptr() + span * tensor.element_size()
    return end


def _present(held: Mapping[str, Any], held_name: str, name: str) -> Any:
    if held_name not in held:
        raise FailedPrecondition(f"tensor '{name}' was the module's '{held_name}', which is no longer there", culprit=f"tensor '{name}'")
    return held[held_name]


def _part(held: Mapping[str, Any], view: _View, name: str) -> Any:
    owner = _present(held, view.held, name)
    if Place.of(owner).form != view.form:
        raise FailedPrecondition(
            f"tensor '{name}' was a part of the module's '{view.held}', which is now {owner.dtype} {tuple(owner.shape)} with strides "
            f"{owner.stride()} on {owner.device}",
            culprit=f"tensor '{name}'",
        )
    flat = owner.detach()
    if flat.dtype != view.dtype:
        flat = flat.view(view.dtype)
    return flat.as_strided(view.shape, view.strides, flat.storage_offset() + view.offset // flat.element_size())


def mark_written(tensors: Iterable[Any]) -> None:
    """Raises the versions of torch tensors, and with them those of their views, as torch's own writes do (P11)."""
    import torch

    distinct = list({id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and not tensor.is_inference()}.values())
    increment: Any = getattr(torch.autograd.graph, "increment_version", None)
    try:
        increment(distinct)
    except TypeError:  # an older torch, whose function takes one tensor, or that has none
        for tensor in distinct:
            with torch.no_grad():
                tensor.detach().as_strided((0,), (1,)).zero_()
