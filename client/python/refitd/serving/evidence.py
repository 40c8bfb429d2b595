"""Whether a module's kernel reads what the engine's loader writes: the evidence for writing its parameters in place.

Equal shapes prove nothing: some kernels shuffle weights in place, and some keep a prepacked copy aside. So the engine's loader takes a
`Snapshot` of each module between loading and post-processing, with a digest of every parameter, filled with random values. Afterwards
`changes` lists what is different: a parameter's bytes or geometry, or anything that the module or its quantisation method got and that may
hold a copy of weights. A module without a change reads what the loader wrote. refitd.serving.delivery decides by that.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import FailedPrecondition
from ..layout.memory import digest
from ..layout.placement import KeptArenas, adopt_in_arenas

# The attribute that keeps a model's evidence: for each module, what changes() found.
EVIDENCE_ATTRIBUTE = "_refitd_evidence"
# The attribute of a model whose weights lie in arenas. It keeps, by name, the digests that parameters had when they were moved there.
_MOVED = "_refitd_moved"
# The attribute of a model whose weights lie in arenas. It keeps a refitd.serving.rank.Kept: what the daemon has of this rank's last process; None:
# nothing.
KEPT_ATTRIBUTE = "_refitd_kept"
# Objects that a search for copies of weights looks at; a value that reaches more counts as a copy.
_MAX_OBJECTS = 4096

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


def changes(module: Any, before: Snapshot, after: Snapshot | None = None, placed: Set[int] = frozenset()) -> dict[str, str]:
    """By parameter or attribute, the changes, as text, by which post-processing may keep the module's kernel from reading what a loader writes later.
    `after`: the module now; None: it is made here. `placed`: ids of tensors whose bytes are others since."""
    after = Snapshot.of(module) if after is None else after
    found = {}
    for name in sorted(before.tensors.keys() | after.tensors.keys()):
        was, now = before.tensors.get(name), after.tensors.get(name)
        if was is None or now is None:
            found[name] = f"'{name}' was {'added' if was is None else 'removed'}"
        elif was[:3] != now[:3]:
            found[name] = f"'{name}' was {was[0]} {was[1]} and is {now[0]} {now[1]} with strides {now[2]}"
        elif was[4] != now[4] and id(_tensor_of(module, name)) not in placed:
            found[name] = f"the bytes of '{name}' were changed"
    # On a CPU a view may hold a copy: delivery in place moves the parameter into a region, and the view keeps the old memory.
    held = [t for t in (*module.parameters(), *module.buffers()) if t is not None]
    own = {t.untyped_storage().data_ptr() for t in held if t.device.type != "cpu"}
    same = {id(t) for t in held}
    for what, was_all, now_all in (("", before.attributes, after.attributes), ("quant_method.", before.method, after.method)):
        for name, now in now_all.items():
            if name in was_all and was_all[name] is now:
                continue
            why = _may_hold_copy(now, own, same)
            if why:
                found[what + name] = f"'{what}{name}' {why}"
    return found


def _tensor_of(module: Any, name: str) -> Any:
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _attributes(owner: Any) -> dict[str, Any]:
    """The attributes that are no parameters, buffers or submodules: the objects, so that no later object gets the id of one."""
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in ("_parameters", "_buffers", "_modules")}


def _may_hold_copy(value: Any, own: set[int], same: set[int]) -> str | None:
    """Why `value` may hold a copy of weights; None if everything that it reaches was seen, and each tensor there has an id in `same` or a
    storage in `own`."""
    import torch

    queue: list[Any] = [value]
    seen: set[int] = set()
    while queue:
        item = queue.pop()
        if isinstance(item, _PLAIN) or id(item) in seen or isinstance(item, (torch.dtype, torch.device, torch.Size, torch.layout)):
            continue
        seen.add(id(item))
        if len(seen) > _MAX_OBJECTS:
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
    """The objects that `item` refers to; None: they can't be seen."""
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


@dataclass
class Entry:
    """A parameter or buffer of a module."""

    name: str
    module: Any
    tensor: Any
    is_parameter: bool


UNPROVED = "is post-processed, and the load format is not 'refitd', which would tell whether its kernel reads what the loader writes"


def entries_of(model: Any) -> list[Entry]:
    """All parameters and buffers, each once: tied ones under their first name."""
    found: list[Entry] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found.append(Entry(f"{prefix}.{name}" if prefix else name, module, tensor, is_parameter))
    return found


def reasons_against(model: Any, held: Sequence[Entry], inside: Any) -> dict[str, str]:
    """By parameter, why its module can't be written in place."""
    evident: dict[int, dict[str, str]] | None = getattr(model, EVIDENCE_ATTRIBUTE, None)
    reasons = {}
    for entry in held:
        if evident is not None and id(entry.module) in evident:
            expected = {name for each in inside.quantised(entry.module) if each.kind for name in (each.values, each.scales)}
            unexpected = [text for name, text in evident[id(entry.module)].items() if name not in expected]
            if unexpected and not inside.is_attention(entry.module):
                reasons[entry.name] = "; ".join(unexpected)
        elif getattr(entry.module, "quant_method", None) is not None:
            reasons[entry.name] = UNPROVED
    methods = {id(module.quant_method) for module in model.modules() if hasattr(module, "quant_method")}
    for name, module in model.named_modules():
        if id(module) in methods:
            continue  # a quantisation method that is a module: its changes count as those of the module that it serves
        changed = (evident or {}).get(id(module), {})
        reprocessed = getattr(module, "quant_method", None) is not None or inside.is_attention(module)
        if changed and not reprocessed:
            raise FailedPrecondition(
                f"module '{name}' ({type(module).__name__}) is changed after loading, and vLLM does not do that again when weights "
                f"are reloaded: {'; '.join(changed.values())}",
                culprit=f"module '{name}'",
            )
    if evident is None and hasattr(model, "process_weights_after_loading"):
        raise FailedPrecondition(
            f"{type(model).__name__} is post-processed as a whole: start vLLM with --load-format refitd, which tells what that changes"
        )
    return reasons


def note_changes(model: Any, before: Sequence[tuple[Any, Snapshot]], find_kept: Callable[[], Any] | None, inside: Any) -> None:
    """Leaves the evidence in a model that was loaded and post-processed. `before`: its modules' snapshots between the two. `find_kept`: not
    None: moves the parameters that may be written in place into arenas (refitd.adopt), before the engine measures its memory and captures
    graphs; those of this rank's last process, if it finds them (refitd.serving.rank.Kept). `inside`: the module with what is known of the engine's inside."""

    def note(placed: Set[int] = frozenset()) -> dict[int, Snapshot]:
        after = {id(layer): Snapshot.of(layer) for layer, _ in before}
        found = {id(layer): changes(layer, snapshot, after[id(layer)], placed) for layer, snapshot in before}
        object.__setattr__(model, EVIDENCE_ATTRIBUTE, found)
        return after

    note()
    if find_kept is None:
        return
    held = entries_of(model)
    try:
        why = reasons_against(model, held, inside)
    except FailedPrecondition:
        return  # refitd.serving.delivery refuses the model for the same reason
    kept = find_kept()
    arenas = KeptArenas() if kept is None else kept.arenas
    moved = [entry for entry in held if entry.is_parameter and entry.name not in why]
    placed = {id(tensor) for tensor in adopt_in_arenas((entry.tensor for entry in moved), arenas)}
    if kept is not None and not placed and kept.arenas.taken:
        kept.release()  # it is of another model
    after = note(placed)  # again, since tensors that shared the parameters' old memory are copies now
    object.__setattr__(model, KEPT_ATTRIBUTE, kept)
    # A parameter in kept memory can't be written before that memory is registered.
    digests = {entry.name: after[id(entry.module)].tensors[entry.name.rpartition(".")[2]][4] for entry in moved if id(entry.tensor) not in placed}
    object.__setattr__(model, _MOVED, digests)


def written_in_arenas(model: Any) -> dict[str, str]:
    """By name, why parameters in arenas can't be there: the engine wrote to them since it was loaded, as it profiled its memory and warmed up."""
    moved: dict[str, int] = getattr(model, _MOVED, {})
    named = dict(model.named_parameters())
    why = "was written by the engine's own runs, and what they write would be lost at the next version: start it without an arena"
    found = {name: why for name, was in moved.items() if name in named and digest(named[name]) != was}
    if not found:
        object.__setattr__(model, _MOVED, {})  # from now on the proof and versions write
    return found
