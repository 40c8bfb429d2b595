"""Decides for each parameter of a vLLM model how new weights get there.

- *direct*: the daemon writes the parameter itself. Only where the evidence (`evidence.py`) says that the module's kernel reads what
  the loader wrote.
- *processed*: the daemon writes the checkpoint's tensors into an arena, and vLLM's own reload takes them from there: it fills the
  module in the loader's format, post-processes it, and copies the result into the old storage, module by module. Modules that only
  prepack their parameters (`Prepacked`) need no reload: the daemon writes their parameters in the loader's format, and they prepack
  these, without the copies in between.
- *constant*: no checkpoint has it (buffers that the model computes from its configuration).

What is none of them is refused by name, before anything is registered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any

from ..layout import dtypes as _dtypes
from ..layout.places import Places
from ..layout.records import Box, TensorSpec
from ..errors import FailedPrecondition
from .proof import Proof
from ..integrations.vllm import versions as _versions
from . import evidence

UNPROVED = "is post-processed, and the load format is not 'refitd', which would tell whether its kernel reads what the loader writes"


@dataclass
class Prepacked:
    """A module whose kernel reads a copy that post-processing makes of its parameters, and of nothing else.

    `filled`: by the parameter's name in the module, the tensor in the loader's format that the daemon writes: the module's own
    parameter where that has this format, else memory beside it. `beside`: the bytes of the latter.
    """

    name: str
    module: Any
    filled: dict[str, Any]
    beside: int


@dataclass
class Delivery:
    """How a model's weights arrive.

    `direct`, `constant`: names of parameters and buffers. `processed`: by name, why. `padded`: parameters whose rows beyond the
    vocabulary no tensor fills. `ignored`: tensors of the checkpoint that the model does not want. `arena`: by name, the
    checkpoint's tensors that processed modules need, in memory of their own; `prepacked`: those processed modules that do without.
    """

    direct: list[str]
    processed: dict[str, str]
    constant: list[str]
    padded: list[str]
    ignored: list[str]
    arena: dict[str, Any]
    tensors: list[TensorSpec] = field(repr=False)
    boxes: list[Box] = field(repr=False)
    attention: list[Any] = field(repr=False)
    modules: dict[str, Any] = field(repr=False)  # by name, the processed ones that vLLM's reload must reach
    prepacked: list[Prepacked] = field(repr=False)
    tied: list[Any] = field(repr=False)  # modules that keep something made of another module's parameter
    derived: list[str] = field(repr=False)  # names of parameters that attention layers make of other modules' parameters
    proof: Proof | None = None  # None: it was not asked for
    places: Places | None = field(default=None, repr=False)  # the memory of the model's parameters that the daemon writes
    # Names that the engine's loader passes over since another name's memory is theirs, and that name.
    tied_names: dict[str, str] = field(default_factory=dict)

    @property
    def arena_bytes(self) -> int:
        """The bytes that are there for the delivery alone."""
        return sum(int(tensor.nbytes) for tensor in self.arena.values()) + sum(entry.beside for entry in self.prepacked)

    def summary(self) -> dict[str, Any]:
        """Counts and names, for logs, `GET /refitd/delivery` and tests."""
        return {
            "direct": sorted(self.direct),
            "processed": dict(sorted(self.processed.items())),
            "constant": sorted(self.constant),
            "padded": sorted(self.padded),
            "ignored": sorted(self.ignored),
            "prepacked": sorted(entry.name for entry in self.prepacked),
            "arena_bytes": self.arena_bytes,
            "proof": None if self.proof is None else self.proof.summary(),
        }


@dataclass
class _Held:
    """A parameter or buffer of a module."""

    name: str
    module: Any
    tensor: Any
    is_parameter: bool


def decide(
    model: Any,
    manifest: Sequence[TensorSpec],
    arena_bytes: int,
    device: Any,
    inside: Any = _versions,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Delivery:
    """Decides how each parameter of the model gets new weights, and makes the arena. The model keeps its values. `inside`: the module with
    what is known of the engine's inside. `failed`: by parameter or module, why it is not to be written in place though nothing else tells.

    Raises FailedPrecondition that names the first parameter or tensor that can't be delivered, and how many there are.
    """
    held = _held(model)
    why = _reasons(model, held, inside)
    why.update({entry.name: reason for entry in held if (reason := _reason_in(failed, entry.name)) and entry.name not in why})
    captured = _capture(model, manifest, held, inside, processed=lambda name: False)
    # Modules are processed as a whole, and so are all modules that share a tensor of the checkpoint with one.
    module_of = {entry.name: id(entry.module) for entry in held}
    modules = {module_of[name] for name in (*captured.processed, *why)}
    _refuse(_beyond_loading(captured, module_of, modules), "tensors of the checkpoint can't be delivered", "tensor")
    sources = _sources(captured, module_of)
    while True:
        names = {name for name, of in sources.items() if of & modules}
        more = set().union(*(sources[name] for name in names)) - modules if names else set()
        if not more:
            break
        modules |= more
    captured = _capture(model, manifest, held, inside, processed=lambda name: module_of[name] in modules)
    if device.type == "cpu":
        prepacked = _prepackable(held, captured, sources, modules, inside)
        names = {name for name in names if sources[name] & (modules - prepacked)}
    else:
        prepacked = set()
    return _conclude(model, manifest, held, captured, modules, prepacked, names, why, arena_bytes, device, inside)


def _reason_in(failed: Mapping[str, str], name: str) -> str:
    """The reason of the parameter or of its module."""
    return failed.get(name, "") or failed.get(name.rpartition(".")[0], "")


def _prepackable(held: Sequence[_Held], captured: Any, sources: dict[str, set[int]], modules: set[int], inside: Any) -> set[int]:
    """The processed modules that only prepack parameters, each of which is boxes of tensors that no reloaded module needs."""
    entries: dict[int, list[_Held]] = {}
    for entry in held:
        entries.setdefault(id(entry.module), []).append(entry)
    found = {
        module
        for module in modules
        if inside.only_prepacks(entries[module][0].module) and all(_is_matrix(captured, entry) for entry in entries[module])
    }
    found -= set().union(*(sources[name] for name in captured.cast if name in sources))
    while True:
        shared = set().union(*(of for of in sources.values() if of & (modules - found))) & found
        if not shared:
            return found
        found -= shared


def _is_matrix(captured: Any, entry: _Held) -> bool:
    """Whether tensors of the checkpoint fill the parameter, and it is a matrix or a vector: others are not only prepacked."""
    found = captured.processed.get(entry.name)
    return found is not None and len(found.shape) <= 2


def _held(model: Any) -> list[_Held]:
    """All parameters and buffers, each once: tied ones under their first name."""
    found: list[_Held] = []
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for is_parameter, tensors in ((True, module._parameters), (False, module._buffers)):
            for name, tensor in tensors.items():
                if tensor is None or id(tensor) in seen:
                    continue
                seen.add(id(tensor))
                found.append(_Held(f"{prefix}.{name}" if prefix else name, module, tensor, is_parameter))
    return found


def _reasons(model: Any, held: Sequence[_Held], inside: Any) -> dict[str, str]:
    """By parameter, why its module can't be written in place."""
    evident: dict[int, list[str]] | None = getattr(model, evidence.ATTRIBUTE, None)
    reasons = {}
    for entry in held:
        if evident is not None and id(entry.module) in evident:
            changed = evident[id(entry.module)]
            if changed and not inside.is_attention(entry.module):
                reasons[entry.name] = "; ".join(changed)
        elif getattr(entry.module, "quant_method", None) is not None:
            reasons[entry.name] = UNPROVED
    methods = {id(module.quant_method) for module in model.modules() if hasattr(module, "quant_method")}
    for name, module in model.named_modules():
        if id(module) in methods:
            continue  # some are modules: what they get counts as a change of the module that they serve
        changed = (evident or {}).get(id(module), [])
        reprocessed = getattr(module, "quant_method", None) is not None or inside.is_attention(module)
        if changed and not reprocessed:
            raise FailedPrecondition(
                f"module '{name}' ({type(module).__name__}) is changed after loading, and vLLM does not do that again when weights "
                f"are reloaded: {'; '.join(changed)}",
                culprit=f"module '{name}'",
            )
    if evident is None and hasattr(model, "process_weights_after_loading"):
        raise FailedPrecondition(
            f"{type(model).__name__} is post-processed as a whole: start vLLM with --load-format refitd, which tells what that changes"
        )
    return reasons


def _capture(model: Any, manifest: Sequence[TensorSpec], held: Sequence[_Held], inside: Any, processed: Any) -> Any:
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
        # once they keep them elsewhere; where the checkpoint has any, the tensor is refused as one that is copied to no parameter.
        known = {id(tensor) for tensor in loaded.values()}
        for prefix, module in model.named_modules():
            if inside.is_attention(module):
                continue
            for name, tensor in module._parameters.items():
                full = f"{prefix}.{name}" if prefix else name
                if tensor is not None and id(tensor) not in known and full not in loaded and not inside.is_tied(model, module, name):
                    raise FailedPrecondition(
                        f"parameter '{full}' is removed after loading, so that new weights can't be put there",
                        culprit=f"parameter '{full}'",
                    )
        with torch.device("cpu"):
            return capture(model.load_weights, manifest, parameters=loaded, onto=onto, processed=processed)


def _sources(captured: Any, module_of: dict[str, int]) -> dict[str, set[int]]:
    """By tensor of the checkpoint, the modules that it goes to."""
    copies = [*captured.direct, *(copy for entry in captured.processed.values() for copy in entry.copies)]
    found: dict[str, set[int]] = {}
    for copy in copies:
        found.setdefault(captured.tensors[copy.tensor_index].name, set()).add(module_of[copy.parameter])
    for name, parameters in captured.cast.items():
        found.setdefault(name, set()).update(module_of[parameter] for parameter in parameters)
    return found


def _beyond_loading(captured: Any, module_of: dict[str, int], modules: set[int]) -> dict[str, str]:
    """The unsupported tensors, with the reasons.

    A tensor that the loader only casts is left out if its modules are processed: there the loader runs.
    """
    return {
        name: why
        for name, why in captured.unsupported.items()
        if name not in captured.cast or not {module_of[parameter] for parameter in captured.cast[name]} <= modules
    }


def _refuse(refused: dict[str, str], what: str, kind: str = "parameter") -> None:
    if refused:
        first = next(iter(refused))
        raise FailedPrecondition(f"{len(refused)} {what}: '{first}' {refused[first]}", culprit=f"{kind} '{first}'")


def _tied_modules(model: Any) -> list[Any]:
    """Modules that are post-processed and whose parameter is another's, an output layer that is tied to the embedding: vLLM's reload
    leaves them as they are, since it loads no tensor for them. Raises FailedPrecondition where doing that again is not safe."""
    evident: dict[int, list[str]] | None = getattr(model, evidence.ATTRIBUTE, None)
    first: dict[int, Any] = {}
    found = []
    for name, module in model.named_modules():
        for tensor in module._parameters.values():
            if tensor is None or first.setdefault(id(tensor), module) is module or getattr(module, "quant_method", None) is None:
                continue
            changed = None if evident is None else evident.get(id(module), [])
            if changed == []:
                continue
            if type(module.quant_method).__name__ != "UnquantizedEmbeddingMethod":
                raise FailedPrecondition(
                    f"module '{name}' shares a parameter with another, and {type(module.quant_method).__name__} post-processes it: "
                    f"{'; '.join(changed) if changed else UNPROVED}",
                    culprit=f"module '{name}'",
                )
            found.append(module)
    return found


def _conclude(
    model: Any,
    manifest: Sequence[TensorSpec],
    held: Sequence[_Held],
    captured: Any,
    modules: set[int],
    prepacked: set[int],
    names: set[str],
    why: dict[str, str],
    arena_bytes: int,
    device: Any,
    inside: Any,
) -> Delivery:
    """Makes the Delivery from what decide() found; refuses a model of which something can't be delivered.

    `modules`, `prepacked`: ids of the modules to process, and of those among them that only prepack. `names`: the tensors that the
    arena must have. `why`: by parameter, why its module can't be written in place.
    """
    module_of = {entry.name: id(entry.module) for entry in held}
    _refuse(_beyond_loading(captured, module_of, modules), "tensors of the checkpoint can't be delivered", "tensor")
    _refuse(
        {name: "is a scale that the model ignores" for name in captured.ignored if name.rpartition(".")[2].endswith(("scale", "scale_inv", "zero_point", "zp"))},
        "tensors of the checkpoint would be lost",
        "tensor",
    )  # fmt: skip
    direct_names = {copy.parameter for copy in captured.direct}
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
    packing = _prepacked(model, held, captured, prepacked)
    total = sum(prod(specs[name].shape) * _dtypes.DTYPES[specs[name].dtype].itemsize for name in names)
    total += sum(entry.beside for entry in packing)
    _check_room(total, arena_bytes, processed)
    arena = _make_arena([specs[name] for name in sorted(names)], device)
    attention = [module for module in model.modules() if inside.is_attention(module)]
    made = Delivery(
        direct=[entry.name for entry in direct],
        processed=processed,
        constant=[entry.name for entry in rest],
        padded=padded,
        ignored=list(captured.ignored),
        arena=arena,
        tensors=[*captured.tensors, *(specs[name] for name in captured.cast)],
        boxes=[],
        attention=attention,
        modules={name: module for name, module in model.named_modules() if id(module) in modules - prepacked},
        prepacked=packing,
        tied=_tied_modules(model),
        derived=sorted(made_later),
        tied_names=_tied_names(model, captured.ignored, specs),
    )
    made.boxes = _boxes(made, captured, direct, held, device)
    own = {id(tensor) for entry in packing for tensor in entry.filled.values()}
    made.places = Places(model, [entry.name for entry in held if entry.name in direct_names or id(entry.tensor) in own])
    return made


def _tied_names(model: Any, ignored: Sequence[str], specs: dict[str, TensorSpec]) -> dict[str, str]:
    """Output layers that the engine's loader passes over since the embedding's memory is theirs, and that embedding's name.

    A trainer whose output layer is another would have its values dropped: the daemon compares them with the embedding's.
    """
    if not getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        return {}
    tied = {}
    for name in ignored:
        embeddings = [other for other in specs if other.endswith("embed_tokens.weight") and specs[other].shape == specs[name].shape]
        if name.endswith("lm_head.weight") and len(embeddings) == 1:
            tied[name] = embeddings[0]
    return tied


def _padded(held: Sequence[_Held], captured: Any, inside: Any) -> list[str]:
    """The parameters whose rows beyond the vocabulary no tensor fills. Refuses all others that are filled in part only."""
    padded, unfilled = [], {}
    for entry in held:
        if entry.name in captured.unfilled:
            if inside.is_vocabulary(entry.module):
                padded.append(entry.name)
            else:
                unfilled[entry.name] = f"is filled but for {captured.unfilled[entry.name]} elements"
    _refuse(unfilled, "parameters are filled in part only")
    return padded


def _check_room(total: int, arena_bytes: int, processed: dict[str, str]) -> None:
    """Refuses an arena of `total` bytes if that is more than the limit `arena_bytes`."""
    if total <= arena_bytes:
        return
    first = next(iter(processed))
    raise FailedPrecondition(
        f"{len(processed)} parameters must be processed after loading, which takes an arena of {total} bytes, and arena_bytes is "
        f"{arena_bytes}: '{first}' {processed[first]}",
        culprit=f"parameter '{first}'",
    )


def _prepacked(model: Any, held: Sequence[_Held], captured: Any, prepacked: set[int]) -> list[Prepacked]:
    """The modules with ids `prepacked`, with memory for what the daemon writes; pages of it that nobody wrote take no memory."""
    import torch

    from ..layout import regions
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
        if (_dtypes.resolve(filled.dtype).name, tuple(filled.shape), tuple(filled.stride())) != (wanted.dtype, wanted.shape, wanted.strides):
            whole = regions.empty(_span(wanted.shape, wanted.strides), wanted.dtype, like="torch")
            filled = torch.nn.Parameter(whole.as_strided(wanted.shape, wanted.strides), requires_grad=False)
            found.beside += whole.nbytes
        found.filled[entry.name.rpartition(".")[2]] = filled
    return list(made.values())


def _make_arena(specs: Sequence[TensorSpec], device: Any) -> dict[str, Any]:
    import torch

    from ..layout import regions

    if device.type == "cpu":
        return {spec.name: regions.empty(spec.shape, spec.dtype, like="torch") for spec in specs}
    return {spec.name: torch.zeros(spec.shape, dtype=_dtypes.torch_dtype(spec.dtype), device=device) for spec in specs}


def _boxes(made: Delivery, captured: Any, direct: Sequence[_Held], held: Sequence[_Held], device: Any) -> list[Box]:
    """The boxes to register: of parameters that are written in place, of prepacked modules, and of the arena."""
    from ..layout import regions
    from ..layout.capture import _boxes_in
    from ..layout.shards import collect

    filled = {f"{entry.name}.{name}" if entry.name else name: t for entry in made.prepacked for name, t in entry.filled.items()}
    if device.type == "cpu":
        regions.adopt_tensors([*(entry.tensor for entry in direct), *filled.values()])
    boxes = _boxes_in(captured.direct, captured.tensors, {entry.name: entry.tensor for entry in held})
    boxes += _boxes_in([copy for name in filled for copy in captured.processed[name].copies], captured.tensors, filled)
    index = {spec.name: i for i, spec in enumerate(made.tensors)}
    whole = collect(made.arena, rank=0, tied=False)
    for box in whole.boxes:
        name = whole.tensors[box.tensor_index].name
        boxes.append(Box(index[name], box.offset, box.extent, box.strides, box.memory, box.byte_offset))
    return boxes
