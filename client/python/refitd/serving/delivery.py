"""Decides for each parameter of an engine's model how new weights get there, by evidence, and proves it.

- *direct*: the daemon writes the parameter itself. Only where the evidence says that the module's kernel reads what the loader wrote.
- *processed*: the daemon writes the checkpoint's tensors, the *loader tensors*, into memory of their own, and the engine's own reload takes them from there: it fills the
  module in the loader's format, post-processes it, and copies the result into the old storage, module by module. Modules that only
  prepack their parameters (`Prepacked`) need no reload: the daemon writes their parameters in the loader's format, and they prepack
  these, without the copies in between.
- *derived*: direct too, where the engine quantises what it loads and refits compute the same values and scales (refitd.serving.derived): the daemon
  writes these, and no loader tensors are needed.
- *constant*: no checkpoint has it (buffers that the model computes from its configuration).

What is none of them is refused by name, before anything is registered.

Equal shapes prove nothing: some kernels shuffle weights in place, and some keep a prepacked copy aside. So the engine's loader takes a
`Snapshot` of each module between loading and post-processing, with a digest of every parameter, filled with random values. Afterwards
`changes` lists what is different: a parameter's bytes or geometry, or anything that the module or its quantisation method got and that may
hold a copy of weights. A module without a change reads what the loader wrote.

The forward proof (`proved`) of what is written in place and of modules that are processed: what fails is processed, where it was direct and
the engine post-processes its module, and proved again; what fails then is refused by name. An engine that serves its checkpoint keeps its
weights: versions are delivered both ways only into random ones.
"""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from .._core.tensors import Places
from ..errors import Error, FailedPrecondition
from ..layout import Box, TensorSpec
from ..layout.capture import Processed
from ..layout.memory import DTYPES, Arena, digest, empty, locate, resolve, torch_dtype
from ..layout.placement import KeptArenas, adopt_in_arenas, adopt_tensors, empty_in_arena
from . import ahead, derived, proof
from .ahead import Portion
from .derived import NotDerived, Quantised, Requantised
from .proof import Probe, Proof, Prover

if TYPE_CHECKING:
    from . import Settings

# The attribute of a model that has its evidence: for each module, what changes() found.
ATTRIBUTE = "_refitd_evidence"
# The attribute of a model whose weights lie in arenas: by name, the digests that parameters had when they were moved there.
MOVED = "_refitd_moved"
# The attribute of a model whose weights lie in arenas: refitd.serving.rank.Kept, what was kept of this rank's last process.
KEPT = "_refitd_kept"
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
            why = may_hold_copy(now, own, same)
            if why:
                found[what + name] = f"'{what}{name}' {why}"
    return found


def _tensor_of(module: Any, name: str) -> Any:
    found = module._parameters.get(name)
    return module._buffers.get(name) if found is None else found


def _attributes(owner: Any) -> dict[str, Any]:
    """The attributes that are no parameters, buffers or submodules: the objects, so that no later object gets the id of one."""
    return {name: value for name, value in getattr(owner, "__dict__", {}).items() if name not in ("_parameters", "_buffers", "_modules")}


def note_changes(model: Any, before: Sequence[tuple[Any, Snapshot]], find_kept: Callable[[], Any] | None, inside: Any) -> None:
    """Leaves the evidence in a model that was loaded and post-processed. `before`: its modules' snapshots between the two. `find_kept`: not
    None: moves the parameters that may be written in place into arenas (refitd.adopt), before the engine measures its memory and captures
    graphs; those of this rank's last process, if it finds them (refitd.serving.rank.Kept). `inside`: as in decide()."""

    def note(placed: Set[int] = frozenset()) -> dict[int, Snapshot]:
        after = {id(layer): Snapshot.of(layer) for layer, _ in before}
        found = {id(layer): changes(layer, snapshot, after[id(layer)], placed) for layer, snapshot in before}
        object.__setattr__(model, ATTRIBUTE, found)
        return after

    note()
    if find_kept is None:
        return
    held = _held(model)
    try:
        why = _reasons(model, held, inside)
    except FailedPrecondition:
        return  # decide() refuses the model for the same reason
    kept = find_kept()
    arenas = KeptArenas() if kept is None else kept.arenas
    moved = [entry for entry in held if entry.is_parameter and entry.name not in why]
    placed = {id(tensor) for tensor in adopt_in_arenas((entry.tensor for entry in moved), arenas)}
    if kept is not None and not placed and kept.arenas.taken:
        kept.release()  # it is of another model
    after = note(placed)  # views of the memory that the parameters had are copies now
    object.__setattr__(model, KEPT, kept)
    # A parameter in kept memory can't be written before that memory is registered.
    digests = {entry.name: after[id(entry.module)].tensors[entry.name.rpartition(".")[2]][4] for entry in moved if id(entry.tensor) not in placed}
    object.__setattr__(model, MOVED, digests)


def _written(model: Any) -> dict[str, str]:
    """By name, why parameters in arenas can't be there: the engine wrote to them since it was loaded, as it profiled its memory and warmed up."""
    moved: dict[str, int] = getattr(model, MOVED, {})
    named = dict(model.named_parameters())
    why = "was written by the engine's own runs, and what they write would be lost at the next version: start it without an arena"
    found = {name: why for name, was in moved.items() if name in named and digest(named[name]) != was}
    if not found:
        object.__setattr__(model, MOVED, {})  # from now on the proof and versions write
    return found


def may_hold_copy(value: Any, own: set[int], same: set[int]) -> str | None:
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


UNPROVED = "is post-processed, and the load format is not 'refitd', which would tell whether its kernel reads what the loader writes"


@dataclass
class Prepacked:
    """A module whose kernel reads a copy, which post-processing makes of the module's parameters alone.

    `filled`: by the parameter's name in the module, the tensor in the loader's format that the daemon writes: the module's own
    parameter where that has this format, else memory beside it. `beside`: the bytes of such memory.
    """

    name: str
    module: Any
    filled: dict[str, Any]
    beside: int


@dataclass
class Delivery:
    """How a model's weights arrive.

    `direct`, `constant`: names of parameters and buffers. `processed`: by name, why. `padded`: parameters whose rows beyond the
    vocabulary no tensor fills. `ignored`: tensors of the checkpoint that the model does not want. `loader_tensors`: by name, the
    checkpoint's tensors that processed modules need, in memory of their own; `prepacked`: the processed modules that need none of them.
    """

    direct: list[str]
    processed: dict[str, str]
    constant: list[str]
    padded: list[str]
    ignored: list[str]
    loader_tensors: dict[str, Any]
    tensors: list[TensorSpec] = field(repr=False)
    boxes: list[Box] = field(repr=False)
    attention: list[Any] = field(repr=False)
    modules: dict[str, Any] = field(repr=False)  # by name, the processed ones that vLLM's reload must reach
    prepacked: list[Prepacked] = field(repr=False)
    tied: list[Any] = field(repr=False)  # modules that keep something made of another module's parameter
    made_later: list[str] = field(repr=False)  # names of parameters that attention layers make of other modules' parameters
    derived: list[Requantised] = field(default_factory=list, repr=False)  # modules whose values and scales are written as derived tensors
    not_derived: set[str] = field(default_factory=set, repr=False)  # names of modules that quantise, and are processed
    proof: Proof | None = None  # None: it was not asked for
    places: Places | None = field(default=None, repr=False)  # the memory of the model's parameters that the daemon writes
    # By a name that the engine's loader passes over, the name of the tensor whose memory it shares.
    tied_names: dict[str, str] = field(default_factory=dict)
    ahead: list[Portion] = field(default_factory=list, repr=False)  # what is processed of a staged version while the engine serves
    in_pause: dict[str, str] = field(default_factory=dict)  # with arenas, by module that is processed in the pause, why

    @property
    def loader_bytes(self) -> int:
        """The bytes of memory that only the delivery needs."""
        return (
            sum(int(tensor.nbytes) for tensor in self.loader_tensors.values())
            + sum(entry.beside for entry in self.prepacked)
            + sum(portion.nbytes for portion in self.ahead)
        )

    def process_in_pause(self, portion: Portion, why: str) -> None:
        """From now on the portion is processed in the pause."""
        self.ahead.remove(portion)
        self.in_pause.update(dict.fromkeys(portion.modules, why))

    def _arenas(self) -> list[Arena]:
        """The arenas in which the boxes lie, loader tensors included."""
        found = {locate(pointer, 1) for box in self.boxes if (pointer := getattr(box.memory, "pointer", None)) is not None}
        return [arena for arena in found if isinstance(arena, Arena)]

    @property
    def arena_bytes(self) -> int:
        """The bytes of one side of the arenas."""
        return sum(arena.nbytes for arena in self._arenas())

    @property
    def flip(self) -> str | None:
        """What ready() does to put a staged version into place: "remap", or with a back in host memory "host"; None: there are no arenas."""
        backs = {arena.back for arena in self._arenas()}
        return None if not backs else "host" if "host" in backs else "remap"

    def summary(self) -> dict[str, Any]:
        """Counts and names, for logs, `GET /refitd/delivery` and tests."""
        return {
            "direct": sorted(self.direct),
            "derived": {name: what for entry in self.derived for name, what in sorted(entry.summary().items())},
            "processed": dict(sorted(self.processed.items())),
            "constant": sorted(self.constant),
            "padded": sorted(self.padded),
            "ignored": sorted(self.ignored),
            "prepacked": sorted(entry.name for entry in self.prepacked),
            "ahead": sorted(name for portion in self.ahead for name in portion.modules),
            "in_pause": dict(sorted(self.in_pause.items())),
            "loader_bytes": self.loader_bytes,
            "arena_bytes": self.arena_bytes,
            "flip": self.flip,
            "proof": None if self.proof is None else self.proof.summary(),
        }


@dataclass
class _Entry:
    """A parameter or buffer of a module."""

    name: str
    module: Any
    tensor: Any
    is_parameter: bool


def decide(
    model: Any,
    manifest: Sequence[TensorSpec],
    settings: Settings,
    device: Any,
    inside: Any,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Delivery:
    """Decides how each parameter of the model gets new weights, and makes the loader tensors. The model keeps its values. `inside`: the module with
    what is known of the engine's inside. `failed`: by parameter or module, why it is not to be written in place though nothing else tells.

    Raises FailedPrecondition that names the first parameter or tensor that can't be delivered, and how many there are.
    """
    held = _held(model)
    why = _reasons(model, held, inside)
    why.update({entry.name: reason for entry in held if (reason := _reason_in(failed, entry.name)) and entry.name not in why})
    captured = _capture(model, manifest, held, inside, processed=lambda name: False)
    fed = _fed(model, captured, inside)
    if fed:
        captured = _capture(model, manifest, held, inside, processed=lambda name: False, fed=fed)
    requantised = _requantised(model, manifest, held, captured, fed, why, settings, device, inside)
    # Modules are processed as a whole, and so are all modules that share a tensor of the checkpoint with a processed one.
    module_of = {entry.name: id(entry.module) for entry in held}
    modules = {module_of[name] for name in (*captured.processed, *why)} - {id(entry.module) for entry in requantised}
    _refuse(_undeliverable(captured, module_of, modules), "tensors of the checkpoint can't be delivered", "tensor")
    sources = _sources(captured, module_of)
    while True:
        names = {name for name, targets in sources.items() if targets & modules}
        more = set().union(*(sources[name] for name in names)) - modules if names else set()
        if not more:
            break
        modules |= more
    captured = _capture(model, manifest, held, inside, processed=lambda name: module_of[name] in modules, fed=fed)
    if device.type == "cpu":
        prepacked = _prepackable(held, captured, sources, modules, inside)
        names = {name for name in names if sources[name] & (modules - prepacked)}
    else:
        prepacked = set()
    requantised = [entry for entry in requantised if id(entry.module) not in modules]
    written = {name for entry in requantised for name in entry.summary()}
    captured.direct[:] = [copy for copy in captured.direct if copy.parameter not in written]
    left = {name: parameter for name, parameter in fed.items() if parameter not in written}
    _refuse(
        {name: f"is quantised in the engine's checkpoint, and can't be derived: '{to}' {why.get(to, 'is not')}" for name, to in left.items()},
        "tensors of the checkpoint can't be delivered",
        "tensor",
    )
    return _delivery_of(model, manifest, held, captured, modules, prepacked, names, requantised, why, settings, device, inside)


def _fed(model: Any, captured: Any, inside: Any) -> dict[str, str]:
    """The tensors that trainers have in another dtype than a checkpoint that is quantised in blocks, and the parameter of the values of each."""
    values = {f"{name}.{each.values}" for name, module in model.named_modules() for each in inside.quantised(module) if each.kind is None}
    return {name: min(parameters) for name, parameters in captured.cast.items() if parameters <= values}


def _requantised(
    model: Any, manifest: Sequence[TensorSpec], held: Sequence[_Entry], captured: Any, fed: dict[str, str], why: dict[str, str],
    settings: Settings, device: Any, inside: Any,
) -> list[Requantised]:  # fmt: skip
    """The modules whose values and scales can be written as derived tensors. `fed`: of _fed(). `why`: gets, by parameter, why those of other modules
    can't be."""
    module_of = {entry.name: id(entry.module) for entry in held}
    tensors = {spec.name: spec for spec in manifest}
    taken: dict[int, list[TensorSpec]] = {}
    for name, targets in _sources(captured, module_of).items():
        for target in targets:
            taken.setdefault(target, []).append(tensors[name])
    of_fed = {module_of[parameter] for parameter in fed.values()}
    compared: dict[str, dict[str, str]] = getattr(model, derived.COMPARED, {})
    found = []
    for name, module in model.named_modules():
        quantised = [each for each in inside.quantised(module) if each.kind or id(module) in of_fed]
        own = [entry for entry in held if entry.module is module] if quantised else []
        if not own or any(entry.name in why for entry in own):
            continue
        try:
            kinds = derived.kinds_left(quantised[0].kinds(settings.derived, device), compared.get(name, {}))
            found.append(_requantised_one(name, module, quantised, kinds, own, captured, taken.get(id(module), []), fed))
        except NotDerived as reason:
            why.update({f"{name}.{parameter}": f"is not derived: {reason}" for each in quantised for parameter in (each.values, each.scales)})
    return found


def _requantised_one(
    name: str, module: Any, quantised: Sequence[Quantised], kinds: tuple[str, ...], own: Sequence[_Entry], captured: Any, taken: list[TensorSpec],
    fed: dict[str, str],
) -> Requantised:  # fmt: skip
    """`kinds`: as in Requantised. `own`: what the module holds. `taken`: the checkpoint's tensors that it takes. Raises NotDerived."""
    made = Requantised(name, module, [], taken, kinds)
    for each in quantised:
        values = f"{name}.{each.values}"
        loaded = captured.processed.get(values)
        if each.kind is None:
            tensor = module._parameters[each.values]
            copies = [copy for copy in captured.direct if copy.parameter == values]
            sources = {captured.tensors[copy.tensor_index].name for copy in copies}
            loaded = Processed(values, "float8_e4m3fn", tuple(tensor.shape), tensor.stride(), copies)
            if loaded.name in captured.processed or not sources <= fed.keys():
                raise NotDerived(f"'{each.values}' is processed, or trainers have a part of it quantised")
            suffix = each.scales.removeprefix(each.values)  # experts' scales are named as those of linear layers
            made.loads.update({source: {"values": source, "scales": source + suffix} for source in sources})
        if loaded is None or values in captured.unfilled:
            which = "" if loaded is None else derived.lacking(loaded)
            raise NotDerived(f"'{each.values}' gets no tensors of the checkpoint, or not all of its elements{which}")
        made.parts += derived.parts_of(each, kinds[0], module, loaded, captured.tensors)
    filled = {copy.parameter for copy in captured.direct} | made.summary().keys()
    other = next((entry.name for entry in own if entry.is_parameter and entry.name not in filled), None)
    if other is not None:
        raise NotDerived(f"'{other}' is processed")
    return made


def _reason_in(failed: Mapping[str, str], name: str) -> str:
    """The reason of the parameter or of its module."""
    return failed.get(name, "") or failed.get(name.rpartition(".")[0], "")


def _prepackable(held: Sequence[_Entry], captured: Any, sources: dict[str, set[int]], modules: set[int], inside: Any) -> set[int]:
    """The processed modules that only prepack their parameters, and share no tensor of the checkpoint with a module that is reloaded."""
    entries: dict[int, list[_Entry]] = {}
    for entry in held:
        entries.setdefault(id(entry.module), []).append(entry)
    found = {
        module
        for module in modules
        if inside.only_prepacks(entries[module][0].module) and all(_is_matrix(captured, entry) for entry in entries[module])
    }
    found -= set().union(*(sources[name] for name in captured.cast if name in sources))
    while True:
        shared = set().union(*(targets for targets in sources.values() if targets & (modules - found))) & found
        if not shared:
            return found
        found -= shared


def _is_matrix(captured: Any, entry: _Entry) -> bool:
    """Whether tensors of the checkpoint fill the parameter, and it is a matrix or a vector: others are not only prepacked."""
    found = captured.processed.get(entry.name)
    return found is not None and len(found.shape) <= 2


def _held(model: Any) -> list[_Entry]:
    """All parameters and buffers, each once: tied ones under their first name."""
    found: list[_Entry] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found.append(_Entry(f"{prefix}.{name}" if prefix else name, module, tensor, is_parameter))
    return found


def _reasons(model: Any, held: Sequence[_Entry], inside: Any) -> dict[str, str]:
    """By parameter, why its module can't be written in place."""
    evident: dict[int, dict[str, str]] | None = getattr(model, ATTRIBUTE, None)
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


def _capture(
    model: Any, manifest: Sequence[TensorSpec], held: Sequence[_Entry], inside: Any, processed: Any, fed: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """Runs the loader dry with parameters in its format. `fed`: of _fed(): the loader gets values of these tensors. Raises FailedPrecondition where
    post-processing removed a parameter."""
    import torch

    from ..layout.capture import capture

    with inside.LoaderFormat(model):
        loaded: dict[str, Any] = {}
        for entry in held:
            name = entry.name.rpartition(".")[2]
            found = entry.module._parameters.get(name)
            found = entry.module._buffers.get(name) if found is None else found
            if found is None or type(found).__name__ == "UninitializedParameter":
                continue  # post-processing made it: no loader fills it
            loaded[entry.name] = found
        onto = {entry.name: entry.tensor for entry in held if entry.name in loaded}
        # Parameters that post-processing removed: loaders fill them, and their modules are processed. Attention layers remove their scales
        # once they keep them elsewhere; a scale that the checkpoint has is refused, as a tensor that is copied to no parameter.
        known = {id(tensor) for tensor in loaded.values()}
        for prefix, module in model.named_modules():
            if inside.is_attention(module):
                continue
            for name, tensor in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and id(tensor) not in known and full not in loaded and not inside.is_tied(model, module, name):
                    raise FailedPrecondition(
                        f"parameter '{full}' is removed after loading, so that new weights can't be put there", culprit=f"parameter '{full}'"
                    )
        with torch.device("cpu"):
            taken = [replace(spec, dtype="float8_e4m3fn") if spec.name in fed else spec for spec in manifest]
            captured = capture(model.load_weights, taken, parameters=loaded, onto=onto, processed=processed)
    specs = {spec.name: spec for spec in manifest}
    captured.tensors[:] = [specs[spec.name] for spec in captured.tensors]
    return captured


def _sources(captured: Any, module_of: dict[str, int]) -> dict[str, set[int]]:
    """By tensor of the checkpoint, the modules that it goes to."""
    copies = [*captured.direct, *(copy for entry in captured.processed.values() for copy in entry.copies)]
    found: dict[str, set[int]] = {}
    for copy in copies:
        found.setdefault(captured.tensors[copy.tensor_index].name, set()).add(module_of[copy.parameter])
    for name, parameters in captured.cast.items():
        found.setdefault(name, set()).update(module_of[parameter] for parameter in parameters)
    return found


def _undeliverable(captured: Any, module_of: dict[str, int], processed_modules: set[int]) -> dict[str, str]:
    """Why tensors can't be delivered, by name. A tensor whose only obstacle is a cast is deliverable if all its modules are processed,
    because their reload runs the loader, which casts."""
    return {
        name: why
        for name, why in captured.unsupported.items()
        if name not in captured.cast or not {module_of[parameter] for parameter in captured.cast[name]} <= processed_modules
    }


def _refuse(refused: dict[str, str], what: str, kind: str = "parameter") -> None:
    """Raises FailedPrecondition that names the first of `refused`, unless there is none."""
    if refused:
        first = next(iter(refused))
        raise FailedPrecondition(f"{len(refused)} {what}: '{first}' {refused[first]}", culprit=f"{kind} '{first}'")


def _tied_modules(model: Any) -> list[Any]:
    """Post-processed modules whose parameter is another module's, such as an output layer that is tied to the embedding: vLLM's reload
    passes them over, because it loads no tensor for them. Raises FailedPrecondition where post-processing one again is not safe."""
    evident: dict[int, dict[str, str]] | None = getattr(model, ATTRIBUTE, None)
    first: dict[int, Any] = {}
    found = []
    for name, module in model.named_modules():
        for tensor in module._parameters.values():
            if tensor is None or first.setdefault(id(tensor), module) is module or getattr(module, "quant_method", None) is None:
                continue
            changed = None if evident is None else evident.get(id(module), {})
            if changed == {}:
                continue
            if type(module.quant_method).__name__ != "UnquantizedEmbeddingMethod":
                raise FailedPrecondition(
                    f"module '{name}' shares a parameter with another, and {type(module.quant_method).__name__} post-processes it: "
                    f"{'; '.join(changed.values()) if changed else UNPROVED}",
                    culprit=f"module '{name}'",
                )
            found.append(module)
    return found


def _delivery_of(
    model: Any,
    manifest: Sequence[TensorSpec],
    held: Sequence[_Entry],
    captured: Any,
    modules: set[int],
    prepacked: set[int],
    names: set[str],
    requantised: list[Requantised],
    why: dict[str, str],
    settings: Settings,
    device: Any,
    inside: Any,
) -> Delivery:
    """Makes the Delivery from what decide() found; refuses a model of which something can't be delivered.

    `modules`, `prepacked`: ids of the modules to process, and of those among them that only prepack. `names`: the loader
    tensors. `requantised`: the modules that get derived tensors. `why`: by parameter, why its module can't be written in place.
    """
    module_of = {entry.name: id(entry.module) for entry in held}
    _refuse(_undeliverable(captured, module_of, modules), "tensors of the checkpoint can't be delivered", "tensor")
    _refuse(
        {name: "is a scale that the model ignores" for name in captured.ignored if name.rpartition(".")[2].endswith(("scale", "scale_inv", "zero_point", "zp"))},
        "tensors of the checkpoint would be lost",
        "tensor",
    )  # fmt: skip
    direct_names = {copy.parameter for copy in captured.direct} | {name for entry in requantised for name in entry.summary()}
    direct = [entry for entry in held if entry.name in direct_names]
    processed = {
        entry.name: why.get(entry.name, "is another tensor after loading, or shares a tensor of the checkpoint with such a module")
        for entry in held
        if id(entry.module) in modules and entry.name not in direct_names
    }
    made_later = {entry.name for entry in held if entry.is_parameter and inside.is_made_later(entry.module, entry.name)}
    processed.update({name: "is made of other parameters by its attention layer" for name in made_later if name not in processed})
    rest = [entry for entry in held if entry.name not in direct_names and entry.name not in processed]
    _refuse({entry.name: "gets no tensor of the checkpoint" for entry in rest if entry.is_parameter}, "parameters would stay as they are")
    padded = _padded(held, captured, inside)
    specs = {spec.name: spec for spec in manifest}
    packing = _prepacked(model, held, captured, prepacked, settings.in_arenas)
    total = sum(prod(specs[name].shape) * DTYPES[specs[name].dtype].itemsize for name in names)
    total += sum(entry.beside for entry in packing)
    _check_room(total, settings.loader_bytes, processed)
    kept = getattr(model, KEPT, None)
    in_arenas = (kept.arenas if kept is not None else KeptArenas(back=settings.arena)) if settings.in_arenas else None
    loader_tensors = _make_loader_tensors([specs[name] for name in sorted(names)], device, in_arenas)
    attention = [module for module in model.modules() if inside.is_attention(module)]
    made = Delivery(
        direct=[entry.name for entry in direct],
        processed=processed,
        constant=[entry.name for entry in rest],
        padded=padded,
        ignored=list(captured.ignored),
        loader_tensors=loader_tensors,
        tensors=[*captured.tensors, *(specs[name] for name in captured.cast)],
        boxes=[],
        attention=attention,
        modules={name: module for name, module in model.named_modules() if id(module) in modules - prepacked},
        prepacked=packing,
        tied=_tied_modules(model),
        made_later=sorted(made_later),
        derived=requantised,
        not_derived=_that_quantise(model, inside) - {entry.name for entry in requantised},
        tied_names=_tied_names(model, captured.ignored, specs),
    )
    if settings.in_arenas:
        sources = {name: targets for name, targets in _sources(captured, module_of).items() if name in names}
        made.ahead = ahead.portions(made.modules, loader_tensors, sources)
        made.ahead += [Portion({entry.name: entry.module}, entry.filled, packs=True) for entry in packing]
        if device.type == "cpu":
            packs = {id(module) for module in made.tied if inside.only_prepacks(module)}
            for name, module in model.named_modules():
                if id(module) in packs:
                    filled = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
                    made.ahead.append(Portion({name: module}, filled, packs=True))
    specs_derived = {part.spec.name: part.spec for entry in requantised for part in entry.parts}
    made.tensors += specs_derived.values()
    made.boxes = _boxes(made, captured, direct, held, device, in_arenas)
    _leave_out(made, {part.spec.derived.source.name for entry in requantised for part in entry.parts if part.spec.derived is not None})
    own = {id(tensor) for entry in packing for tensor in entry.filled.values()}
    made.places = Places(model, [entry.name for entry in held if entry.name in direct_names or id(entry.tensor) in own])
    return made


def _that_quantise(model: Any, inside: Any) -> set[str]:
    return {name for name, module in model.named_modules() if any(each.kind for each in inside.quantised(module))}


def _leave_out(made: Delivery, sources: set[str]) -> None:
    """Takes sources of derived tensors that nothing else needs out of the tensors to register."""
    needed = {box.tensor_index for box in made.boxes}
    kept = [i for i, spec in enumerate(made.tensors) if i in needed or spec.name not in sources or spec.name in made.tied_names.values()]
    index = {old: new for new, old in enumerate(kept)}
    made.tensors = [made.tensors[i] for i in kept]
    made.boxes = [replace(box, tensor_index=index[box.tensor_index]) for box in made.boxes]


def _tied_names(model: Any, ignored: Sequence[str], specs: dict[str, TensorSpec]) -> dict[str, str]:
    """By output layer that the engine's loader passes over, because it shares the embedding's memory, the embedding's name.

    The daemon compares the values of both: those of a trainer's separate output layer would be dropped.
    """
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    tied = {}
    for name in ignored:
        embeddings = [other for other in specs if other.endswith("embed_tokens.weight") and specs[other].shape == specs[name].shape]
        if name.endswith("lm_head.weight") and len(embeddings) == 1:
            tied[name] = embeddings[0]
    return tied


def _padded(held: Sequence[_Entry], captured: Any, inside: Any) -> list[str]:
    """The parameters whose rows beyond the vocabulary no tensor fills. Refuses all others that are filled in part only, but for buffers that loaders only
    read, such as the table of a rank's own experts."""
    padded, unfilled = [], {}
    for entry in held:
        left = captured.unfilled.get(entry.name, 0)
        if left and (entry.is_parameter or left < entry.tensor.numel()):
            if inside.is_vocabulary(entry.module):
                padded.append(entry.name)
            else:
                unfilled[entry.name] = f"is filled but for {left} elements"
    _refuse(unfilled, "parameters are filled in part only")
    return padded


def _check_room(total: int, loader_bytes: int, processed: dict[str, str]) -> None:
    """Refuses loader tensors of `total` bytes if that is more than the limit `loader_bytes`."""
    if total <= loader_bytes:
        return
    first = next(iter(processed))
    raise FailedPrecondition(
        f"{len(processed)} parameters must be processed after loading, which takes {total} bytes, and loader_bytes is "
        f"{loader_bytes}: '{first}' {processed[first]}",
        culprit=f"parameter '{first}'",
    )


def _prepacked(model: Any, held: Sequence[_Entry], captured: Any, prepacked: set[int], arena: bool) -> list[Prepacked]:
    """The modules with ids `prepacked`, with memory for what the daemon writes, whose pages are taken once they are written. With `arena` that
    memory is torch's, and _boxes() moves it into an arena."""
    import torch

    from ..layout.capture import _span

    names = {id(module): name for name, module in model.named_modules()}
    made: dict[int, Prepacked] = {}
    for entry in held:
        module = id(entry.module)
        if module not in prepacked:
            continue
        found = made.setdefault(module, Prepacked(names[module], entry.module, {}, 0))
        wanted = captured.processed[entry.name]
        filled = entry.tensor
        if (resolve(filled.dtype).name, tuple(filled.shape), tuple(filled.stride())) != (wanted.dtype, wanted.shape, wanted.strides):
            span = _span(wanted.shape, wanted.strides)
            whole = torch.empty(span, dtype=torch_dtype(wanted.dtype)) if arena else empty(span, wanted.dtype, like="torch")
            filled = torch.nn.Parameter(whole.as_strided(wanted.shape, wanted.strides), requires_grad=False)
            found.beside += whole.nbytes
        found.filled[entry.name.rpartition(".")[2]] = filled
    return list(made.values())


def _make_loader_tensors(specs: Sequence[TensorSpec], device: Any, in_arenas: KeptArenas | None) -> dict[str, Any]:
    """`in_arenas`: not None: the memory is an arena, the next of these or a new one."""
    import torch

    if in_arenas is not None:
        return dict(zip((spec.name for spec in specs), empty_in_arena([(spec.shape, spec.dtype) for spec in specs], device, in_arenas)))
    if device.type == "cpu":
        return {spec.name: empty(spec.shape, spec.dtype, like="torch") for spec in specs}
    return {spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype), device=device) for spec in specs}


def _boxes(
    made: Delivery, captured: Any, direct: Sequence[_Entry], held: Sequence[_Entry], device: Any, in_arenas: KeptArenas | None
) -> list[Box]:
    """The boxes to register: of parameters that are written in place, of prepacked modules, and of the loader tensors. `in_arenas`: as in
    _make_loader_tensors()."""
    from ..layout.capture import _boxes_in
    from ..layout.shards import collect

    filled = {f"{entry.name}.{name}" if entry.name else name: t for entry in made.prepacked for name, t in entry.filled.items()}
    if device.type == "cpu":
        tensors = [*(entry.tensor for entry in direct), *filled.values()]
        if in_arenas is not None:
            adopt_in_arenas(tensors, in_arenas)
        else:
            adopt_tensors(tensors)
    boxes = _boxes_in(captured.direct, captured.tensors, {entry.name: entry.tensor for entry in held})
    boxes += _boxes_in([copy for name in filled for copy in captured.processed[name].copies], captured.tensors, filled)
    index = {spec.name: i for i, spec in enumerate(made.tensors)}
    parts = [part.copy(entry.name, index[part.spec.name]) for entry in made.derived for part in entry.parts]
    boxes += _boxes_in(parts, made.tensors, {entry.name: entry.tensor for entry in held})
    whole = collect(made.loader_tensors, rank=0, tied=False)
    for box in whole.boxes:
        name = whole.tensors[box.tensor_index].name
        boxes.append(Box(index[name], box.offset, box.extent, box.strides, box.memory, box.byte_offset))
    return boxes


logger = logging.getLogger("refitd.serving.proof")

# The proof lists this as unproved where versions were not delivered both ways.
DELIVERIES = "delivery by the engine's own loader"


@dataclass
class Steps:
    """What is known of the engine. `inside`: as in decide(). `try_out`: refuses a delivery whose loader tensors do not reach every parameter, before the
    first version is committed. `process`: brings the loader tensors into the modules, of those that are `done` what was made ahead. `aside`:
    processes a portion of the given tensors into the memory beside the model; None: the engine can't. `quantise`: does the same when the engine attaches. `agree`: as in Probe. `load`: loads tensors by the engine's
    own loader; returns names of modules that it passed over. `probe`: how the model is run; raises FailedPrecondition where it can't be."""

    inside: Any
    try_out: Callable[[Delivery], None]
    process: Callable[[Delivery], None]
    aside: Callable[[Portion, Mapping[str, Any]], None] | None
    quantise: Callable[[Portion, Mapping[str, Any]], None]
    agree: Callable[[set[str]], set[str]]
    load: Callable[[Delivery, Iterable[tuple[str, Any]]], Sequence[str]]
    probe: Callable[[], Probe]


def proved(model: Any, settings: Settings, manifest: Sequence[TensorSpec], device: Any, clean: bool, steps: Steps) -> Delivery:
    """The delivery of the tensors in `manifest` with its proof. `clean`: whether the weights must be kept. Raises FailedPrecondition that
    names what can't be delivered, fails or, where that is asked for, is unproved."""
    failed: dict[str, str] = {}
    while True:
        made = decided(model, settings, manifest, device, steps.inside, failed)
        if not _derives_equally(model, made, steps, device):
            continue
        if not clean:
            zero_padding(model, made)
            if made.loader_tensors:
                steps.try_out(made)
        if settings.in_arenas:
            _try_ahead(made, settings, device, clean, steps)
        if settings.proof == "off":
            return made
        found = made.proof = _prove(model, made, manifest, device, clean, steps)
        logger.info("refitd: forward proof in %.1f s: %d proved, unproved: %s, failed: %s", found.seconds, len(found.proved), found.unproved, found.failed)
        again = {name for name in made.direct if _is_processed_again(model, name)}
        again |= {name.rpartition(".")[0] for name in again}
        more = {name: f"failed the forward proof: {why}" for name, why in found.failed.items() if name in again}
        if not more or more.keys() <= failed.keys():
            break
        failed.update(more)
    made.proof.check(require=settings.proof == "require")
    if made.proof.unproved:
        logger.warning("refitd: the forward proof says nothing of %d parameters: %s", len(made.proof.unproved), made.proof.unproved)
    if not clean:
        zero_padding(model, made)
    return made


def _derives_equally(model: Any, made: Delivery, steps: Steps, device: Any) -> bool:
    """Whether refits make the same of made-up weights as the engine; if not, the model says so now (derived.COMPARED)."""
    if not made.derived and not made.not_derived:
        return True  # on all ranks
    return derived.compare(model, made.derived, made.not_derived, steps.quantise, steps.agree, device)


def decided(
    model: Any, settings: Settings, manifest: Sequence[TensorSpec], device: Any, inside: Any, failed: dict[str, str] | None = None
) -> Delivery:
    """The delivery without its proof; nothing is written to the weights. `failed`: as in decide(); gets what must lie in an arena and does not."""
    _refuse(_written(model), "parameters in arenas")
    failed = {} if failed is None else failed
    kept = getattr(model, KEPT, None)
    taken = kept.arenas.taken if kept is not None else 0
    while True:
        made = decide(model, manifest, settings, device, inside, failed)
        outside = _outside_arenas(model, made, device) if settings.in_arenas else {}
        if not outside.keys() - failed.keys():
            return made
        failed.update(outside)
        if kept is not None:
            kept.arenas.taken = taken


def prove_kept(model: Any, settings: Settings, made: Delivery, device: Any, steps: Steps) -> bool:
    """Makes the proof of a delivery as for an engine that serves its checkpoint: the weights stay. Returns False where something failed."""
    if not _derives_equally(model, made, steps, device):
        return False
    specs = {spec.name: spec for spec in made.tensors}
    _try(made, settings, steps, "", lambda aside, run: ahead.try_beside(made.ahead, lambda name: proof.values(specs[name], 1, device), aside, run))
    if settings.proof == "off":
        return True
    found = made.proof = _prove(model, made, made.tensors, device, True, steps)
    logger.info("refitd: forward proof in %.1f s: %d proved, unproved: %s, failed: %s", found.seconds, len(found.proved), found.unproved, found.failed)
    return not found.failed
_SERVES = "it was not tried: the engine serves a version that its loader tensors do not hold, which would be lost"


def _try_ahead(made: Delivery, settings: Settings, device: Any, clean: bool, steps: Steps) -> None:
    """As _try, with made-up versions in place of the weights."""
    specs = {spec.name: spec for spec in made.tensors}
    deliver = partial(_deliver, made, device, steps)
    _try(made, settings, steps, _SERVES if clean else "", lambda aside, run: ahead.try_out(made.ahead, deliver, lambda name: proof.values(specs[name], 1, device), aside, run))


Aside = Callable[[Portion, Mapping[str, Any]], None]


def _try(
    made: Delivery, settings: Settings, steps: Steps, refusal: str, trial: Callable[[Aside, Callable[[], Any]], dict[str, str]]
) -> None:
    """Leaves in `made.ahead` what is right when it is processed while the engine serves; the rest is processed in the pause. With arenas all
    ranks that compute together call it, also those without anything to process. `refusal`: why nothing can be tried, if so."""
    why: dict[str, str] = {}
    probe = None
    if settings.proof == "off":
        why[""] = "it was not tried: the proof is off"
    elif steps.aside is None:
        why[""] = "this engine processes in the pause only"
    else:
        if refusal:
            why[""] = refusal
        elif made.loader_bytes > settings.loader_bytes:
            why[""] = f"the memory beside the model would exceed loader_bytes, {settings.loader_bytes}"
        try:
            probe = steps.probe()
        except Exception as error:  # the inside of another version of the engine may differ
            why[""] = f"it can't be tried: {type(error).__name__}: {error}"
    failed = set(why)
    if probe is not None and steps.aside is not None:
        failed = probe.agree(failed)
        if not failed:
            why = trial(steps.aside, probe.run)
            failed = probe.agree(set(why))
    for portion in list(made.ahead):
        if "" in failed or not failed.isdisjoint(portion.modules):
            made.process_in_pause(portion, why.get(next(iter(portion.modules)), why.get("", "another module or rank needs it")))


def _outside_arenas(model: Any, made: Delivery, device: Any) -> dict[str, str]:
    """By name, why parameters and buffers that might be written in place are processed: they lie in no arena, and graphs may keep addresses.
    Raises FailedPrecondition where nothing was moved into arenas when the model was loaded."""
    if getattr(model, ATTRIBUTE, None) is None:
        raise FailedPrecondition(
            "arena: only weights whose post-processing was watched can be in an arena: start vLLM with "
            "--load-format refitd, SGLang with --load-format dummy",
            culprit="arena",
        )
    if device.type == "cpu":
        return {}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = [name for name in made.direct if not isinstance(locate(named[name].data_ptr(), 1), Arena)]
    if found and len(found) == len(made.direct):
        raise FailedPrecondition("arena: REFITD_ARENA was not in the worker's environment when it loaded the model", culprit="arena")
    return dict.fromkeys(found, "lies outside of the arenas")


def zero_padding(model: Any, made: Delivery) -> None:
    """Zeroes the rows beyond the vocabulary, as loading a checkpoint does, in an engine that loaded random weights instead."""
    import torch

    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in made.padded:
            named[name].zero_()


def _is_processed_again(model: Any, name: str) -> bool:
    """Whether the engine post-processes the parameter's module; otherwise a reload does no more than to write the parameter."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None) is not None


def _prove(model: Any, made: Delivery, manifest: Sequence[TensorSpec], device: Any, clean: bool, steps: Steps) -> Proof:
    """Runs the forward proof, and, unless the weights must be kept (`clean`), delivers random versions 1 and 2, and 2 by the engine's loader."""
    own = [name for entry in made.prepacked for name in (f"{entry.name}.{own}" for own in entry.filled)]
    names = [*(name for name in made.direct if name not in own), *made.made_later]
    try:
        probe = steps.probe()
    except Exception as error:  # the inside of another version of the engine may differ
        return Proof(unproved=dict.fromkeys((*names, *made.processed), f"can't be told: {type(error).__name__}: {error}"))
    deliver = partial(_deliver, made, device, steps)
    why = "the engine's weights must be kept" if clean else ""
    if not why:
        try:
            deliver(1)
        except Error as error:
            why = str(error)
    prover = Prover(model, probe, names, made.tied)
    if not prover.runs:
        prover.proof.unproved.update(dict.fromkeys(made.processed, prover.proof.unproved.get(names[0], "") if names else "the model can't be run"))
        return prover.proof
    prover.perturb()
    processed = {**made.modules, **{entry.name: entry.module for entry in made.prepacked}, **_that_derive(model, made)}
    processed.update({entry.name: entry.module for entry in made.derived})
    if why:
        prover.proof.unproved.update({DELIVERIES: why, **{name: why for name in processed}})
        return prover.proof
    before, made_later = prover.states(processed.values()), _digests(model, made.made_later)
    deliver(2)
    ours = prover.states(processed.values())
    prover.compare_processed(before, ours, processed)
    same = [name for name, found in _digests(model, made.made_later).items() if made_later[name] == found]
    prover.proof.failed.update(dict.fromkeys(same, "is made of other parameters, and is the same after another version was delivered"))
    deliver(1)  # so that what the loader does not reach differs from version 2
    try:
        passed_over = steps.load(made, derived.as_loaded(manifest, made.derived, 2, device))
    except Exception as error:
        prover.proof.unproved[DELIVERIES] = f"it failed: {type(error).__name__}: {error}"
        deliver(2)
        return prover.proof
    if passed_over:
        prover.proof.unproved[DELIVERIES] = f"it passes over {len(passed_over)} modules, such as '{passed_over[0]}'"
    else:
        prover.compare_deliveries(ours, prover.states(processed.values()))
    return prover.proof


def _that_derive(model: Any, made: Delivery) -> dict[str, Any]:
    """By name, the modules that keep something made of other modules' parameters."""
    layers = {name.rpartition(".")[0] for name in made.made_later}
    return {name: module for name, module in model.named_modules() if name in layers or any(module is entry for entry in made.tied)}


def _digests(model: Any, names: Iterable[str]) -> dict[str, int]:
    named = dict(model.named_parameters())
    return {name: digest(named[name]) for name in names}


def _deliver(made: Delivery, device: Any, steps: Steps, seed: int) -> None:
    """Delivers the made-up tensors of `seed` as the daemon would."""
    proof.deliver(made.tensors, made.boxes, lambda spec: derived.made_up(spec, seed, device))
    steps.process(made)


# ---- memory of modules ----


def tensors_of(layer: Any) -> dict[str, Any]:
    """Parameters, buffers and tensors among the other attributes of a module, without its submodules."""
    import torch

    held = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
    return {**held, **{name: t for name, t in (*layer._parameters.items(), *layer._buffers.items()) if t is not None}}


def keep_memory(layer: Any, before: dict[str, Any]) -> None:
    """Puts what post-processing made into the memory that captured CUDA graphs read. `before`: tensors_of(layer) until then."""
    import torch

    now = tensors_of(layer)
    for name, old in before.items():
        new = now.get(name)
        if new is None or new is old or (new.shape, new.dtype, new.stride()) != (old.shape, old.dtype, old.stride()):
            continue
        with torch.no_grad():
            old.copy_(new)
        setattr(layer, name, old)


def synchronise(device: Any) -> None:
    """Waits for the device's queued work."""
    if device.type != "cpu":
        import torch

        torch.accelerator.synchronize()
