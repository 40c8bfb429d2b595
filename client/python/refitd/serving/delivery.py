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

The forward proof (`proved`) of what is written in place and of modules that are processed: what fails is processed, where it was direct and
the engine post-processes its module, and proved again; what fails then is refused by name. An engine that serves its checkpoint keeps its
weights: versions are delivered both ways only into random ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any

from .._core.tensors import Places
from ..errors import Error, FailedPrecondition
from ..layout import Box, TensorSpec, span
from ..layout.capture import Processed, boxes_in, capture
from ..layout.memory import DTYPES, Arena, digest, empty, locate, resolve, torch_dtype
from ..layout.placement import KeptArenas, adopt_in_arenas, adopt_tensors, empty_in_arena
from ..layout.shards import collect
from . import Settings, ahead, derived, proof
from .ahead import Portion
from .derived import NotDerived, Quantised, Requantised
from .evidence import EVIDENCE_ATTRIBUTE, KEPT_ATTRIBUTE, UNPROVED, Entry, entries_of, reasons_against, written_in_arenas
from .proof import Probe, Proof, Prover

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
class _Case:
    """What a delivery is decided for. `inside`: the module with what is known of the engine's inside. `held`: the model's parameters and buffers;
    `module_of`: by name, the id of the module of each; `specs`: the manifest, by name."""

    model: Any
    manifest: Sequence[TensorSpec]
    settings: Settings
    device: Any
    inside: Any

    def __post_init__(self) -> None:
        self.held = entries_of(self.model)
        self.module_of = {entry.name: id(entry.module) for entry in self.held}
        self.specs = {spec.name: spec for spec in self.manifest}


def _decide(case: _Case, failed: Mapping[str, str]) -> Delivery:
    """Decides how each parameter of the model gets new weights, and makes the loader tensors. The model keeps its values. `failed`: by parameter or
    module, why it is not to be written in place though nothing else tells.

    Raises FailedPrecondition that names the first parameter or tensor that can't be delivered, and how many there are.
    """
    module_of = case.module_of
    why = reasons_against(case.model, case.held, case.inside)
    why.update({entry.name: reason for entry in case.held if (reason := _reason_in(failed, entry.name)) and entry.name not in why})
    captured = _capture(case, lambda name: False)
    fed = _fed(case, captured)
    if fed:
        captured = _capture(case, lambda name: False, fed)
    requantised = _requantised(case, captured, fed, why)
    # Modules are processed as a whole, and so are all modules that share a tensor of the checkpoint with a processed one.
    modules = {module_of[name] for name in (*captured.processed, *why)} - {id(entry.module) for entry in requantised}
    _refuse_undeliverable(case, captured, modules)
    sources = _sources(case, captured)
    while True:
        names = {name for name, targets in sources.items() if targets & modules}
        more = set().union(*(sources[name] for name in names)) - modules if names else set()
        if not more:
            break
        modules |= more
    captured = _capture(case, lambda name: module_of[name] in modules, fed)
    prepacked: set[int] = set()
    if case.device.type == "cpu":
        prepacked = _prepackable(case, captured, sources, modules)
        names = {name for name in names if sources[name] & (modules - prepacked)}
    requantised = [entry for entry in requantised if id(entry.module) not in modules]
    written = {name for entry in requantised for name in entry.summary()}
    captured.direct[:] = [copy for copy in captured.direct if copy.parameter not in written]
    left = {name: parameter for name, parameter in fed.items() if parameter not in written}
    _refuse(
        {name: f"is quantised in the engine's checkpoint, and can't be derived: '{to}' {why.get(to, 'is not')}" for name, to in left.items()},
        "tensors of the checkpoint can't be delivered",
        "tensor",
    )
    return _delivery_of(case, captured, modules, prepacked, names, requantised, why)


def _fed(case: _Case, captured: Any) -> dict[str, str]:
    """The tensors that trainers have in another dtype than a checkpoint that is quantised in blocks, and the parameter of the values of each."""
    named = case.model.named_modules()
    values = {f"{name}.{each.values}" for name, module in named for each in case.inside.quantised(module) if each.kind is None}
    return {name: min(parameters) for name, parameters in captured.cast.items() if parameters <= values}


def _requantised(case: _Case, captured: Any, fed: dict[str, str], why: dict[str, str]) -> list[Requantised]:
    """The modules whose values and scales can be written as derived tensors. `fed`: the result of _fed(). Fills `why` with
    the reason for each parameter of a module that is left out."""
    taken: dict[int, list[TensorSpec]] = {}
    for name, targets in _sources(case, captured).items():
        for target in targets:
            taken.setdefault(target, []).append(case.specs[name])
    of_fed = {case.module_of[parameter] for parameter in fed.values()}
    compared: dict[str, dict[str, str]] = getattr(case.model, derived.COMPARED, {})
    found = []
    for name, module in case.model.named_modules():
        quantised = [each for each in case.inside.quantised(module) if each.kind or id(module) in of_fed]
        own = [entry for entry in case.held if entry.module is module] if quantised else []
        if not own or any(entry.name in why for entry in own):
            continue
        try:
            kinds = derived.kinds_left(quantised[0].kinds(case.settings.derived, case.device), compared.get(name, {}))
            found.append(_requantised_one(name, module, quantised, kinds, own, captured, taken.get(id(module), []), fed))
        except NotDerived as reason:
            why.update({f"{name}.{parameter}": f"is not derived: {reason}" for each in quantised for parameter in (each.values, each.scales)})
    return found


def _requantised_one(
    name: str, module: Any, quantised: Sequence[Quantised], kinds: tuple[str, ...], own: Sequence[Entry], captured: Any, taken: list[TensorSpec],
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


def _prepackable(case: _Case, captured: Any, sources: dict[str, set[int]], modules: set[int]) -> set[int]:
    """The processed modules that only prepack their parameters, and share no tensor of the checkpoint with a module that is reloaded."""
    entries: dict[int, list[Entry]] = {}
    for entry in case.held:
        entries.setdefault(id(entry.module), []).append(entry)
    found = {
        module
        for module in modules
        if case.inside.only_prepacks(entries[module][0].module) and all(_is_matrix(captured, entry) for entry in entries[module])
    }
    found -= set().union(*(sources[name] for name in captured.cast if name in sources))
    while True:
        shared = set().union(*(targets for targets in sources.values() if targets & (modules - found))) & found
        if not shared:
            return found
        found -= shared


def _is_matrix(captured: Any, entry: Entry) -> bool:
    """Whether tensors of the checkpoint fill the parameter, and it is a matrix or a vector: others are not only prepacked."""
    found = captured.processed.get(entry.name)
    return found is not None and len(found.shape) <= 2


def _capture(case: _Case, processed: Callable[[str], bool], fed: Mapping[str, str] = MappingProxyType({})) -> Any:
    """Runs the loader dry with parameters in its format. `fed`: of _fed(): the loader gets values of these tensors. Raises FailedPrecondition where
    post-processing removed a parameter."""
    import torch

    model, inside = case.model, case.inside
    with inside.LoaderFormat(model):
        loaded: dict[str, Any] = {}
        for entry in case.held:
            name = entry.name.rpartition(".")[2]
            found = entry.module._parameters.get(name)
            found = entry.module._buffers.get(name) if found is None else found
            if found is None or type(found).__name__ == "UninitializedParameter":
                continue  # post-processing made it: no loader fills it
            loaded[entry.name] = found
        onto = {entry.name: entry.tensor for entry in case.held if entry.name in loaded}
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
            taken = [replace(spec, dtype="float8_e4m3fn") if spec.name in fed else spec for spec in case.manifest]
            captured = capture(model.load_weights, taken, parameters=loaded, onto=onto, processed=processed)
    captured.tensors[:] = [case.specs[spec.name] for spec in captured.tensors]
    return captured


def _sources(case: _Case, captured: Any) -> dict[str, set[int]]:
    """By tensor of the checkpoint, the modules that it goes to."""
    copies = [*captured.direct, *(copy for entry in captured.processed.values() for copy in entry.copies)]
    found: dict[str, set[int]] = {}
    for copy in copies:
        found.setdefault(captured.tensors[copy.tensor_index].name, set()).add(case.module_of[copy.parameter])
    for name, parameters in captured.cast.items():
        found.setdefault(name, set()).update(case.module_of[parameter] for parameter in parameters)
    return found


def _refuse_undeliverable(case: _Case, captured: Any, processed_modules: set[int]) -> None:
    """Refuses tensors that can't be delivered. A tensor whose only obstacle is a cast is deliverable if all its modules are processed,
    because their reload runs the loader, which casts."""
    refused = {
        name: why
        for name, why in captured.unsupported.items()
        if name not in captured.cast or not {case.module_of[parameter] for parameter in captured.cast[name]} <= processed_modules
    }
    _refuse(refused, "tensors of the checkpoint can't be delivered", "tensor")


def _refuse(refused: dict[str, str], what: str, kind: str = "parameter") -> None:
    """Raises FailedPrecondition that names the first of `refused`, unless there is none."""
    if refused:
        first = next(iter(refused))
        raise FailedPrecondition(f"{len(refused)} {what}: '{first}' {refused[first]}", culprit=f"{kind} '{first}'")


def _tied_modules(model: Any) -> list[Any]:
    """Post-processed modules whose parameter is another module's, such as an output layer that is tied to the embedding: vLLM's reload
    passes them over, because it loads no tensor for them. Raises FailedPrecondition where post-processing one again is not safe."""
    evident: dict[int, dict[str, str]] | None = getattr(model, EVIDENCE_ATTRIBUTE, None)
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
    case: _Case, captured: Any, modules: set[int], prepacked: set[int], names: set[str], requantised: list[Requantised], why: dict[str, str]
) -> Delivery:
    """Makes the Delivery from what _decide() found; refuses a model of which something can't be delivered.

    `modules`, `prepacked`: ids of the modules to process, and of those among them that only prepack. `names`: the loader
    tensors. `requantised`: the modules that get derived tensors. `why`: by parameter, why its module can't be written in place.
    """
    model, held, settings, inside, specs = case.model, case.held, case.settings, case.inside, case.specs
    _refuse_undeliverable(case, captured, modules)
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
    padded = _padded(case, captured)
    packing = _prepacked(case, captured, prepacked)
    total = sum(prod(specs[name].shape) * DTYPES[specs[name].dtype].itemsize for name in names)
    total += sum(entry.beside for entry in packing)
    _check_room(total, settings.loader_bytes, processed)
    kept = getattr(model, KEPT_ATTRIBUTE, None)
    in_arenas = (kept.arenas if kept is not None else KeptArenas(back=settings.arena)) if settings.in_arenas else None
    loader_tensors = _make_loader_tensors([specs[name] for name in sorted(names)], case.device, in_arenas)
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
        not_derived={name for name, module in model.named_modules() if any(each.kind for each in inside.quantised(module))}
        - {entry.name for entry in requantised},
        tied_names=_tied_names(model, captured.ignored, specs),
    )
    if settings.in_arenas:
        sources = {name: targets for name, targets in _sources(case, captured).items() if name in names}
        made.ahead = ahead.portions(made.modules, loader_tensors, sources)
        made.ahead += [Portion({entry.name: entry.module}, entry.filled, packs=True) for entry in packing]
        if case.device.type == "cpu":
            packs = {id(module) for module in made.tied if inside.only_prepacks(module)}
            for name, module in model.named_modules():
                if id(module) in packs:
                    filled = {key: tensor for key, tensor in module._parameters.items() if tensor is not None}
                    made.ahead.append(Portion({name: module}, filled, packs=True))
    specs_derived = {part.spec.name: part.spec for entry in requantised for part in entry.parts}
    made.tensors += specs_derived.values()
    made.boxes = _boxes(case, made, captured, direct, in_arenas)
    _leave_out(made, {part.spec.derived.source.name for entry in requantised for part in entry.parts if part.spec.derived is not None})
    own = {id(tensor) for entry in packing for tensor in entry.filled.values()}
    made.places = Places(model, [entry.name for entry in held if entry.name in direct_names or id(entry.tensor) in own])
    return made


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
    tied = {name: to for name, to in getattr(model, "tied_names", {}).items() if name in ignored}
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return tied
    for name in ignored:
        embeddings = [other for other in specs if other.endswith("embed_tokens.weight") and specs[other].shape == specs[name].shape]
        if name.endswith("lm_head.weight") and len(embeddings) == 1:
            tied[name] = embeddings[0]
    return tied


def _padded(case: _Case, captured: Any) -> list[str]:
    """The parameters whose rows beyond the vocabulary no tensor fills. Refuses all others that are filled in part only, but for buffers that loaders only
    read, such as the table of a rank's own experts."""
    padded, unfilled = [], {}
    for entry in case.held:
        left = captured.unfilled.get(entry.name, 0)
        if left and (entry.is_parameter or left < entry.tensor.numel()):
            if case.inside.is_vocabulary(entry.module):
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


def _prepacked(case: _Case, captured: Any, prepacked: set[int]) -> list[Prepacked]:
    """The modules with ids `prepacked`, with memory for what the daemon writes, whose pages are taken once they are written. With arenas that
    memory is torch's, and _boxes() moves it into an arena."""
    import torch

    names = {id(module): name for name, module in case.model.named_modules()}
    made: dict[int, Prepacked] = {}
    for entry in case.held:
        module = id(entry.module)
        if module not in prepacked:
            continue
        found = made.setdefault(module, Prepacked(names[module], entry.module, {}, 0))
        wanted = captured.processed[entry.name]
        filled = entry.tensor
        if (resolve(filled.dtype).name, tuple(filled.shape), tuple(filled.stride())) != (wanted.dtype, wanted.shape, wanted.strides):
            size = span(wanted.shape, wanted.strides)
            whole = torch.empty(size, dtype=torch_dtype(wanted.dtype)) if case.settings.in_arenas else empty(size, wanted.dtype, like="torch")
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


def _boxes(case: _Case, made: Delivery, captured: Any, direct: Sequence[Entry], in_arenas: KeptArenas | None) -> list[Box]:
    """The boxes to register: of parameters that are written in place, of prepacked modules, and of the loader tensors. `in_arenas`: as in
    _make_loader_tensors()."""
    filled = {f"{entry.name}.{name}" if entry.name else name: t for entry in made.prepacked for name, t in entry.filled.items()}
    held = {entry.name: entry.tensor for entry in case.held}
    if case.device.type == "cpu":
        tensors = [*(entry.tensor for entry in direct), *filled.values()]
        if in_arenas is not None:
            adopt_in_arenas(tensors, in_arenas)
        else:
            adopt_tensors(tensors)
    boxes = boxes_in(captured.direct, captured.tensors, held)
    boxes += boxes_in([copy for name in filled for copy in captured.processed[name].copies], captured.tensors, filled)
    index = {spec.name: i for i, spec in enumerate(made.tensors)}
    parts = [part.copy(entry.name, index[part.spec.name]) for entry in made.derived for part in entry.parts]
    boxes += boxes_in(parts, made.tensors, held)
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
    """What is known of the engine. `inside`: the module with what is known of it. `try_out`: refuses a delivery whose loader tensors do not reach every parameter, before the
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
    """The delivery without its proof; nothing is written to the weights. `failed`: by parameter or module, why it is not to be written in place; gets what must lie in an arena and does not."""
    _refuse(written_in_arenas(model), "parameters in arenas")
    failed = {} if failed is None else failed
    kept = getattr(model, KEPT_ATTRIBUTE, None)
    taken = kept.arenas.taken if kept is not None else 0
    while True:
        made = _decide(_Case(model, manifest, settings, device, inside), failed)
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
    if getattr(model, EVIDENCE_ATTRIBUTE, None) is None:
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
