"""Tells which modules' kernels read what the loader wrote.

Equal shapes prove nothing: some kernels shuffle weights in place, and some keep a prepacked copy aside. So the loader (`loader.py`)
takes a `Snapshot` of each module between loading and vLLM's post-processing, with a digest of every parameter, filled with random
values. Afterwards `changes` lists what is different: a parameter's bytes or geometry, or anything that the module or its
quantisation method got and that may hold a copy of weights. A module without a change reads what the loader wrote.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from .proof import digest

# The attribute of a model that has its evidence: {module: reasons}.
ATTRIBUTE = "_refitd_evidence"
# The attribute of a model that has vLLM's configuration, which backends of vLLM until 0.24 are not given.
CONFIGURATION = "_refitd_vllm_config"
# Objects that a search for copies of weights looks at; a value that reaches more counts as a copy.
MAX_OBJECTS = 4096

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Enum, slice, range)


@dataclass
class Snapshot:
    """A module's parameters and other attributes at one moment."""

    tensors: dict[str, tuple[Any, ...]]
    attributes: dict[str, Any]
    method: dict[str, Any]

    @classmethod
    def of(cls, module: Any) -> Snapshot:
        held: dict[str, Any] = {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        tensors: dict[str, tuple[Any, ...]] = {name: (t.dtype, tuple(t.shape), t.stride(), t.data_ptr(), digest(t)) for name, t in held.items()}
        return cls(tensors, _attributes(module), _attributes(getattr(module, "quant_method", None)))


def changes(module: Any, before: Snapshot) -> list[str]:
    """Says in words what post-processing did to the module that may keep its kernel from reading what a loader writes later."""
    after = Snapshot.of(module)
    found = []
    for name in sorted(before.tensors.keys() | after.tensors.keys()):
        was, now = before.tensors.get(name), after.tensors.get(name)
        if was is None or now is None:
            found.append(f"'{name}' was {'added' if was is None else 'removed'}")
        elif was[:3] != now[:3]:
            found.append(f"'{name}' was {was[0]} {was[1]} and is {now[0]} {now[1]} with strides {now[2]}")
        elif was[4] != now[4]:
            found.append(f"the bytes of '{name}' were changed")
    # On a CPU delivery in place moves a parameter's memory into a region: a view that was taken before stays with the old memory.
    held = [t for t in (*module.parameters(), *module.buffers()) if t is not None]
    own = {t.untyped_storage().data_ptr() for t in held if t.device.type != "cpu"}
    same = {id(t) for t in held}
    for what, was_all, now_all in (("", before.attributes, after.attributes), ("quant_method.", before.method, after.method)):
        for name, now in now_all.items():
            if name in was_all and was_all[name] is now:
                continue
            why = may_hold_copy(now, own, same)
            if why:
                found.append(f"'{what}{name}' {why}")
    return found


def _attributes(thing: Any) -> dict[str, Any]:
    """The attributes that are no parameters, buffers or submodules; kept, so that no other object takes the place of one."""
    return {name: value for name, value in getattr(thing, "__dict__", {}).items() if name not in ("_parameters", "_buffers", "_modules")}


def may_hold_copy(value: Any, own: set[int], same: set[int]) -> str | None:
    """Why `value` may hold a copy of weights; None if everything that it reaches was seen, and its tensors are those with ids `same` or
    lie in storages `own`."""
    import torch

    queue: list[Any] = [value]
    seen: set[int] = set()
    while queue:
        item = queue.pop()
        if isinstance(item, _PLAIN) or id(item) in seen or isinstance(item, (torch.dtype, torch.device, torch.Size, torch.layout)):
            continue
        seen.add(id(item))
        if len(seen) > MAX_OBJECTS:
            return "reaches too many objects to be searched"
        if isinstance(item, torch.Tensor):
            if item.numel() and id(item) not in same and item.untyped_storage().data_ptr() not in own:
                return f"has a tensor of its own or a view, {item.dtype} {tuple(item.shape)}"
            continue
        reached = _reached(item)
        if reached is None:
            return f"has a {type(item).__module__}.{type(item).__qualname__}, whose inside can't be seen"
        queue.extend(reached)
    return None


def _reached(item: Any) -> Iterable[Any] | None:
    if isinstance(item, (list, tuple, set, frozenset)):
        return list(item)
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, functools.partial):
        return [item.func, *item.args, *item.keywords.values()]
    if isinstance(item, types.MethodType):
        return [item.__self__, item.__func__]
    if isinstance(item, types.FunctionType):
        cells = [cell.cell_contents for cell in item.__closure__ or () if _filled(cell)]
        return [*cells, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()]
    if isinstance(item, (types.BuiltinFunctionType, types.ModuleType)):
        return []
    if hasattr(item, "__dict__") and type(item).__module__.split(".")[0] not in ("builtins", "_ctypes"):
        slots = [getattr(item, name) for kind in type(item).__mro__ for name in _slots(kind) if hasattr(item, name)]
        return [*vars(item).values(), *slots]
    return None


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


__all__ = ["ATTRIBUTE", "CONFIGURATION", "Snapshot", "changes", "digest", "may_hold_copy"]
