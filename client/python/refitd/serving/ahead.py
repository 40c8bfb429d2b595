"""Post-processing of a version while the engine still serves the one before, so that the pause need not hold it.

From Staged on the version lies in the other side of the arenas, complete and verified. Modules that must be post-processed are
processed from there, one *portion* between two steps of the engine, into memory beside the model. In the pause, after the commit, these bytes
are copied to where kernels and captured graphs read them; modules that only prepack get the packed copy. An update that is given up leaves
nothing behind.

A module's attributes are put back after its portion: the engine serves with what it has. Where post-processing changes more than the module's
tensors, that would not be right. So `try_out` compares, with made-up versions, what the modules hold and what the model computes: both must not
change while portions are processed, and be the same afterwards as with processing in the pause. What fails is processed in the pause, by name (`Delivery.in_pause`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..layout.memory import digest


@dataclass
class Portion:
    """Modules that are processed together, because they share tensors of the checkpoint; or one that only prepacks.

    `modules`: by name. `tensors`: by name, what the daemon writes for them: loader tensors, or parameters in the loader's format. `made`: by
    module, memory for the parameters and the buffers that post-processing makes, once it is allocated. `packs`: whether the module only
    prepacks; `packed`: then the attributes that this replaces, and what it leaves of the parameters. `done`: whether that is of the version
    that is about to be committed.
    """

    modules: dict[str, Any]
    tensors: dict[str, Any] = field(repr=False)
    packs: bool = False
    made: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict, repr=False)
    packed: tuple[dict[str, Any], dict[str, Any]] | None = field(default=None, repr=False)
    done: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes that allocate() takes."""
        if self.packs:
            return 0
        return sum(int(tensor.nbytes) for module in self.modules.values() for held in _of_loader(module) for tensor in held.values())

    def allocate(self) -> None:
        """Makes the memory beside the model."""
        import torch

        if self.packs:
            return
        for name, module in self.modules.items():
            parameters, buffers = map(_beside, _of_loader(module))
            self.made[name] = ({key: torch.nn.Parameter(t, requires_grad=False) for key, t in parameters.items()}, buffers)

    def put_in_place(self) -> None:
        """Copies what was made to where the modules' kernels read it; nothing where the module only prepacks."""
        import torch

        with torch.no_grad():
            for name, made in self.made.items():
                for own, tensors in zip(_of_loader(self.modules[name]), made):
                    for key, tensor in tensors.items():
                        own[key].copy_(tensor)

    def forget(self) -> None:
        """What is made is of no version any more."""
        self.done, self.packed = False, None

    def state(self) -> list[Any]:
        """Digests of all tensors that put_in_place() or the engine's own processing writes."""
        return _digests({name: _of_loader(module) for name, module in self.modules.items()})

    def state_made(self) -> list[Any]:
        """The same of what was made beside the model."""
        return _digests(self.made)


def _of_loader(module: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The module's parameters, and the buffers that a loader may fill."""
    parameters = {key: t for key, t in module._parameters.items() if t is not None}
    return parameters, {key: t for key, t in module._buffers.items() if t is not None and key not in module._non_persistent_buffers_set}


def _digests(held: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[Any]:
    return [(name, key, digest(t)) for name, both in held.items() for tensors in both for key, t in tensors.items()]


def _beside(held: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors, in memory of their own: post-processing may leave some as they are."""
    import torch

    copies = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for name, t in held.items()}
    with torch.no_grad():
        for name, copy in copies.items():
            copy.copy_(held[name])
    return copies


def portions(modules: Mapping[str, Any], tensors: Mapping[str, Any], sources: Mapping[str, set[int]]) -> list[Portion]:
    """The modules, by name, as portions in the model's order. `tensors`: the loader tensors. `sources`: by tensor, ids of modules that it goes to."""
    of: dict[int, int] = {id(module): number for number, module in enumerate(modules.values())}  # the first module of the portion
    for targets in (sources[name] for name in tensors):
        joined = {of[target] for target in targets}
        of.update({target: min(joined) for target, first in of.items() if first in joined})
    found: dict[int, Portion] = {}
    for name, module in modules.items():
        found.setdefault(of[id(module)], Portion({}, {})).modules[name] = module
    for name, tensor in tensors.items():
        found[of[next(iter(sources[name]))]].tensors[name] = tensor
    return list(found.values())


@contextmanager
def as_before(modules: Iterable[Any]) -> Iterator[None]:
    """After the block the modules and their quantisation methods have the tensors and attributes that they had before."""
    held = []
    for module in modules:
        for owner in (module, getattr(module, "quant_method", None)):
            if hasattr(owner, "__dict__"):
                attributes = dict(vars(owner))
                inside = {name: attributes[name].copy() for name in _INSIDE if name in attributes}
                held.append((owner, attributes, inside))
    try:
        yield
    finally:
        for owner, attributes, inside in held:
            vars(owner).clear()
            vars(owner).update(attributes)
            for name, contents in inside.items():
                attributes[name].clear()
                attributes[name].update(contents)


def prepack(portion: Portion, tensors: Mapping[str, Any]) -> None:
    """Post-processes a module that only prepacks, with these parameters, and keeps the result in `portion.packed`; the module stays as it is."""
    import torch

    (module,) = portion.modules.values()
    before = dict(vars(module))
    with as_before([module]):
        given = {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        module._parameters.update(given)
        module.quant_method.process_weights_after_loading(module)
        replaced = {name: value for name, value in vars(module).items() if name not in _INSIDE and before.get(name) is not value}
        left = {name: tensor for name, tensor in module._parameters.items() if name in given and tensor is not given[name]}
    portion.packed = (replaced, left)


# The attributes of a torch module that hold its tensors and submodules, which change in place.
_INSIDE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def try_out(
    found: Sequence[Portion],
    deliver: Callable[[int], None],
    values: Callable[[str], Any],
    aside: Callable[[Portion, Mapping[str, Any]], None],
    run: Callable[[], Any],
) -> dict[str, str]:
    """Processes the portions ahead of a made-up version, and returns by module why that is not right; "": of all modules.

    `deliver`: delivers the made-up version of a seed, which takes what is `done` into account. `values`: a loader tensor of the version of
    seed 1. `aside`: processes a portion of tensors. `run`: what the model computes. Ranks that compute together call it alike: whatever
    else fails, each calls `run` four times.
    """
    why: dict[str, str] = {}

    def attempt(step: Callable[[], Any], names: Iterable[str] = ("",)) -> Any:
        try:
            return step()
        except Exception as error:  # the inside of another version of the engine may differ
            why.update({name: f"can't be tried: {type(error).__name__}: {error}" for name in names if name not in why})

    def process(portion: Portion, packs: dict[str, Any] | None) -> None:
        portion.allocate()
        given = packs or {name: values(name) for name in portion.tensors}
        aside(portion, given)
        portion.done = True
        for tensor in given.values():
            tensor.zero_()  # as it is gone after the flip: what was made must not read it

    def compare(expected: Any, reason: str) -> None:
        for portion, state in zip(found, expected or ()):
            if portion.state() != state:
                why.update({name: reason for name in portion.modules if name not in why})

    def states() -> list[list[Any]]:
        return [portion.state() for portion in found]

    attempt(lambda: deliver(1))
    wanted, in_pause = run(), attempt(states)
    packs = attempt(lambda: [{key: t.detach().clone() for key, t in portion.tensors.items()} if portion.packs else None for portion in found])
    attempt(lambda: deliver(2))
    serving, held = run(), attempt(states)
    for portion, tensors in zip(found, packs or ()):
        attempt(partial(process, portion, tensors), portion.modules)
    meanwhile = run()
    attempt(lambda: compare(held, "processing changes what it holds meanwhile"))
    attempt(lambda: deliver(1))
    ahead = run()
    attempt(lambda: compare(in_pause, "becomes something else than by processing in the pause"))

    def results() -> None:
        if not _finite(wanted) or _bytes(wanted) and _bytes(wanted) == _bytes(serving):
            why[""] = "what the model computes of made-up versions shows nothing"
        elif _bytes(meanwhile) != _bytes(serving):
            why[""] = "processing changes what the engine computes meanwhile"
        elif _bytes(ahead) != _bytes(wanted):
            why[""] = "what was processed ahead computes something else than what is processed in the pause"

    attempt(results)
    for portion in found:
        portion.forget()
    return why


def try_beside(
    found: Sequence[Portion], values: Callable[[str], Any], aside: Callable[[Portion, Mapping[str, Any]], None], run: Callable[[], Any]
) -> dict[str, str]:
    """Does what try_out does where the weights must be kept, and the loader tensors hold the version that the modules were processed of: nothing is
    written to the model. What is made of that version must be what the modules hold, and differ from what is made of another. Each rank calls `run`
    twice, whatever else fails."""
    why: dict[str, str] = {}

    def attempt(portion: Portion) -> None:
        if portion.packs:
            return refuse(portion, "what it packs can't be compared while the version is kept")
        try:
            portion.allocate()
            aside(portion, {name: values(name) for name in portion.tensors})
            other = portion.state_made()
            given = {name: tensor.detach().clone() for name, tensor in portion.tensors.items()}
            aside(portion, given)
            for tensor in given.values():
                tensor.zero_()
            made = portion.state_made()
            if made == other:
                refuse(portion, "what is made of two versions is the same")
            elif made != portion.state():
                refuse(portion, "becomes something else than by processing in the pause")
        except Exception as error:  # as in try_out
            refuse(portion, f"can't be tried: {type(error).__name__}: {error}")

    def refuse(portion: Portion, reason: str) -> None:
        why.update({name: reason for name in portion.modules})

    def states() -> list[list[Any]]:
        return [portion.state() for portion in found]

    held, serving = states(), run()
    for portion in found:
        attempt(portion)
    meanwhile = run()
    for portion, before, after in zip(found, held, states()):
        if before != after:
            refuse(portion, "processing changes what it holds meanwhile")
        portion.forget()
    if _bytes(meanwhile) != _bytes(serving):
        why[""] = "processing changes what the engine computes meanwhile"
    return why


def _tensors(made: Any) -> list[Any]:
    """A forward's result: a tensor, several, tensors by name, or nothing."""
    import torch

    if isinstance(made, torch.Tensor):
        return [made]
    return list(made) if isinstance(made, list) else list(getattr(made, "tensors", {}).values())


def _finite(made: Any) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in _tensors(made))


def _bytes(made: Any) -> list[bytes]:
    import torch

    return [tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes() for tensor in _tensors(made)]
