"""Forward proof: shows, before an engine serves, that its forward reads the memory that the daemon writes (P11).

Equal names and shapes do not show it: a module may keep a copy of its weight since its first forward, in another dtype or packed for its
kernel, or a kernel may read another format than loaders write. So the model is run:

1. *Perturbation*. One forward of the whole model on fixed tokens records what each module got. Then each parameter, as the engine holds it
   (fused, per layer), is filled with other values, and only its layer is run again on what it got: the layer's output must change. Routers
   are forced to spread the tokens over all experts, and experts change a few at a time, so that each must change its own tokens. Then the
   parameter is put back, and its digest compared. The cost is one run of each layer for each of its parameters.
2. *Delivery both ways*. The same made-up tensors are delivered as the daemon does, box by box, and by the engine's own loader: each layer's
   output and the logits must be equal. This finds kernels that read another format, and modules that post-processing does not reach.

Ranks that compute together must call everything here alike, in one order: layers run collectives.

Imports torch where used. It needs neither a daemon nor librefit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from ..errors import DataLoss, FailedPrecondition, Internal
from ..layout import Box, TensorSpec
from ..layout.memory import digest, mark_written, torch_dtype

# How many tokens a probe has at least; more where this many would not reach all experts.
TOKENS = 64
# The most parameters for which more than their own layer is run.
MAX_WIDER_RUNS = 256
# These masks change the bits of floating-point elements, two neighbours in turn: 0 becomes 0.5 and 0.625 (E4M3: 0.5 and 0.75),
# numbers of common size become tiny. Applied twice, it changes nothing.
_FLIPS = {1: (0x30, 0x34), 2: (0x3F00, 0x3F20), 4: (0x3F000000, 0x3F200000), 8: (0x3FE0000000000000, 0x3FE4000000000000)}
# Names of modules that choose experts, and of the module beside them that has the experts.
_ROUTERS, _EXPERTS = ("gate", "router"), "experts"
# The number of versions whose logits are kept in a folder.
KEPT_LOGITS = 4


@dataclass
class Proof:
    """What the proof found. `proved`: parameters whose layers were seen to read them. `failed`: by name, why the layer does not compute with what
    was written. `unproved`: by name, why that can't be told. `ways`: those of Probe.ways that were seen to read all parameters."""

    proved: list[str] = field(default_factory=list)
    ways: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    unproved: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "proved": len(self.proved),
            "ways": list(self.ways),
            "failed": dict(sorted(self.failed.items())),
            "unproved": dict(sorted(self.unproved.items())),
            "seconds": round(self.seconds, 3),
        }

    def check(self, require: bool) -> None:
        """Raises FailedPrecondition that names the first parameter that failed or, with `require`, that is unproved."""
        for what, found in (("do not compute with what is written", self.failed), ("are unproved", self.unproved if require else {})):
            if found:
                first = next(iter(found))
                raise FailedPrecondition(f"{len(found)} parameters {what}: '{first}' {found[first]}", culprit=f"parameter '{first}'")


@dataclass
class Probe:
    """How a model is run.

    `run`: runs all of it on the fixed tokens, and returns logits, or None on ranks that get none. `tokens`: how many these are.
    `context`: what layers that are run again need around them. `shows_nothing`: given a module and the layer that is run for it, why an
    unchanged output shows nothing; "": it shows that the module's parameters are not read. `turn`: this rank's place among the ranks that
    compute outputs together, and their number: they change their parameters one after the other. `agree`: the union of the names that
    all ranks pass. `keep`: copies an argument of layers that is no tensor, and that the model changes as it runs. `ways`: by name,
    further ways in which the engine runs the whole model, as `run`. `not_run`: by name, further ways that the probe does not run, and why.
    """

    run: Callable[[], Any]
    tokens: int = TOKENS
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    shows_nothing: Callable[[Any, Any], str] = lambda module, layer: ""
    turn: tuple[int, int] = (0, 1)
    agree: Callable[[set[str]], set[str]] = lambda names: names
    keep: Callable[[Any], Any] = lambda value: value
    ways: Mapping[str, Callable[[], Any]] = field(default_factory=dict)
    not_run: Mapping[str, str] = field(default_factory=dict)


Value = TypeVar("Value")


def union_over(group: Any, names: set[str]) -> set[str]:
    """The union of the names of all ranks of `group`, an engine's GroupCoordinator. Every rank calls it."""
    return set().union(*gathered(group, names))


def gathered(group: Any, value: Value) -> list[Value]:
    """The values of all ranks of `group`, an engine's GroupCoordinator, by rank. Every rank calls it."""
    import torch.distributed

    if group.world_size == 1:
        return [value]
    found: list[Any] = [None] * group.world_size
    torch.distributed.all_gather_object(found, value, group=group.cpu_group)
    return found


def token_ids(vocabulary: int, count: int, device: Any) -> Any:
    """`count` tokens that are spread over the whole vocabulary, and thereby over the ranks that share it."""
    import torch

    return (torch.arange(count, device=device) * max(1, vocabulary // count)) % vocabulary


def tokens_for(model: Any) -> int:
    """How many tokens reach every expert of the model's routers."""
    return max([TOKENS, *(-(-router.count // router.chosen) for router in _routers(model) if router.count)])


# ---- delivery ----


def values(spec: TensorSpec, seed: int, device: Any) -> Any:
    """A made-up tensor, the same wherever it is made on the same kind of device. Raises FailedPrecondition for tensors whose values mean
    something else than numbers."""
    import torch

    generator = torch.Generator(device=device).manual_seed(seed ^ crc32(spec.name.encode()))
    dtype, shape = torch_dtype(spec.dtype), tuple(spec.shape)
    if not dtype.is_floating_point:
        if spec.name.endswith("idx") or dtype == torch.bool:
            raise FailedPrecondition(f"tensor '{spec.name}' of {spec.dtype} can't be made up", tensor=spec.name)
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        return torch.randint(least, most, shape, generator=generator, device=device, dtype=dtype)
    wide = dtype if dtype.itemsize > 1 else torch.float32
    made = torch.empty(shape, dtype=wide, device=device)
    if "scale" in spec.name.rpartition(".")[2]:
        return made.uniform_(0.001, 0.01, generator=generator).to(dtype)
    if len(shape) < 2:
        return made.normal_(1.0, 0.1, generator=generator).to(dtype)
    return made.normal_(0.0, max(shape[-1], 1) ** -0.5, generator=generator).to(dtype)


def deliver(specs: Sequence[TensorSpec], boxes: Iterable[Box], source: Callable[[TensorSpec], Any]) -> None:
    """Does what the daemon does for one version: writes boxes of tensors into registered memory, past torch. `boxes`: whose memory has a
    torch tensor as owner."""
    import torch

    by_tensor: dict[int, list[Box]] = {}
    for box in boxes:
        by_tensor.setdefault(box.tensor_index, []).append(box)
    written = []
    with torch.no_grad():
        for index, wanted in by_tensor.items():
            tensor = source(specs[index])
            for box in wanted:
                owner: Any = getattr(box.memory, "owner", None)
                if owner is None:
                    raise FailedPrecondition(f"tensor '{specs[index].name}' goes to memory that is no tensor's", tensor=specs[index].name)
                part = tensor[tuple(slice(begin, begin + n) for begin, n in zip(box.offset, box.extent))]
                offset = owner.storage_offset() + box.byte_offset // owner.element_size()
                owner.data.as_strided(tuple(box.extent), tuple(box.strides), offset).copy_(part)
                written.append(owner)
    mark_written(written)


# ---- what layers got ----


@dataclass
class _Router:
    """A module that chooses `chosen` of `count` experts for each token. Within `_forced` blocks token t gets experts t * chosen + i."""

    module: Any
    count: int
    chosen: int
    forcing: bool = True

    def schedule(self, tokens: int) -> Any:
        """By token, the experts that it gets in a `_forced` block."""
        import torch

        return (torch.arange(tokens)[:, None] * self.chosen + torch.arange(self.chosen)) % self.count

    def force(self, module: Any, arguments: Any, output: Any) -> Any:
        """A forward hook, which makes the router's output choose the scheduled experts."""
        if not self.forcing:
            return None
        if isinstance(output, tuple):
            return type(output)(*map(self._forced, output)) if hasattr(output, "_fields") else tuple(map(self._forced, output))
        return self._forced(output)

    def _forced(self, tensor: Any) -> Any:
        import torch

        if not isinstance(tensor, torch.Tensor) or tensor.dim() < 2:
            return tensor
        tokens = tensor.numel() // tensor.shape[-1]
        chosen = self.schedule(tokens).to(tensor.device)
        if not tensor.dtype.is_floating_point:
            return chosen.view(tensor.shape).to(tensor.dtype) if tensor.shape[-1] == self.chosen else tensor
        if tensor.shape[-1] == self.chosen:  # the experts' shares
            return torch.full_like(tensor, 1 / self.chosen)
        if tensor.shape[-1] != self.count:
            return tensor
        forced = torch.full((tokens, self.count), -8.0, dtype=torch.float32, device=tensor.device)
        forced.scatter_(1, chosen, 8.0 - 0.0625 * torch.arange(self.chosen, device=tensor.device).expand(tokens, -1))
        return forced.view(tensor.shape).to(tensor.dtype)


def _routers(model: Any) -> list[_Router]:
    """The routers of blocks of experts, found by usual names of modules and attributes."""
    found = []
    for parent in model.modules():
        children = dict(parent.named_children())
        experts = children.get(_EXPERTS)
        router = next((children[name] for name in _ROUTERS if name in children), None)
        if experts is None or router is None:
            continue
        count = next((t.shape[0] for t in router.parameters() if t.dim() == 2), 0)
        count = count or next((v for name in ("output_size", "out_features", "num_experts") if isinstance(v := getattr(router, name, 0), int) and v), 0)
        near = (router, parent, experts, getattr(parent, "config", None), getattr(experts, "moe_config", None))
        names = ("top_k", "num_experts_per_tok", "experts_per_token", "num_selected")
        chosen = next((v for part in near for name in names if isinstance(v := getattr(part, name, None), int) and v > 0), 1)
        if count:
            found.append(_Router(router, int(count), min(chosen, int(count))))
    return found


@contextmanager
def _forced(routers: Iterable[_Router]) -> Iterator[None]:
    """Within the block, routers send tokens to scheduled experts."""
    handles = [router.module.register_forward_hook(router.force) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _map(value: Any, change: Callable[[Any], Any], keep: Callable[[Any], Any] = lambda value: value) -> Any:
    """The same value with each tensor changed, within tuples, lists, dicts and named tensors. `keep` is called with anything else, and returns what
    takes its place."""
    import torch

    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        made = [_map(entry, change, keep) for entry in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)
    if type(value) is dict:
        return {key: _map(entry, change, keep) for key, entry in value.items()}
    if _has_named_tensors(value):
        return type(value)(_map(dict(value.tensors), change, keep))
    return keep(value)


def _has_named_tensors(value: Any) -> bool:
    """Whether the value is what passes from one stage of a pipeline to the next: IntermediateTensors of vLLM's, PPProxyTensors of SGLang's."""
    return isinstance(getattr(value, "tensors", None), Mapping)


def _tensors_in(value: Any) -> list[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for entry in value.values() for tensor in _tensors_in(entry)]
    if isinstance(value, (tuple, list)):
        return [tensor for entry in value for tensor in _tensors_in(entry)]
    if _has_named_tensors(value):
        return _tensors_in(value.tensors)
    if is_dataclass(value):  # SGLang's logits, and the batch that its layers get
        return [tensor for entry in fields(value) for tensor in _tensors_in(getattr(value, entry.name, None))]
    return []


class _NotTried(str):
    """Why a parameter could not be tried. A reason that is a plain str says what its layer's output showed."""


class _Calls:
    """What each module got in one run of the model, at its first call, by the module's id. The run ends with end()."""

    def __init__(self, model: Any, keep: Callable[[Any], Any]) -> None:
        self.got: dict[int, tuple[Any, Any]] = {}  # copies of the arguments, and of the named ones
        self._keep = keep
        self.users: dict[int, Any] = {}  # the first module that got this module as an argument
        self._handles = [module.register_forward_pre_hook(self._note, with_kwargs=True) for module in model.modules()]

    def _note(self, module: Any, arguments: Any, options: Any) -> None:
        import torch

        for given in (*arguments, *options.values()):
            if isinstance(given, torch.nn.Module):
                self.users.setdefault(id(given), module)
        if id(module) not in self.got:
            self.got[id(module)] = _map((arguments, options), lambda tensor: tensor.detach().clone(), self._keep)

    def end(self) -> None:
        for handle in self._handles:
            handle.remove()


def _useful(tensor: Any, seed: int) -> Any:
    """The input, or random numbers in place of an input of tiny, huge or no numbers, which would hide what a weight does."""
    import torch

    if not tensor.dtype.is_floating_point or not tensor.numel() or tensor.dtype.itemsize < 2:
        return tensor
    largest = tensor.abs().max().item()
    if 1e-3 < largest < 1e4:
        return tensor
    generator = torch.Generator(device=tensor.device).manual_seed(seed)
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).normal_(generator=generator)


# ---- the proof ----


@dataclass
class _Outputs:
    """Tensors that a layer gave, and by how much they differ from run to run."""

    tensors: list[Any]
    noise: float = 0.0

    def differ(self, other: _Outputs) -> bool:
        return any(_differ(a, b, self.noise).any().item() for a, b in zip(self.tensors, other.tensors)) or len(self.tensors) != len(other.tensors)

    def rows_differ(self, other: _Outputs, tokens: int) -> Any:
        """By token, whether the first output differs; None where that output has no row for each token."""
        if not self.tensors or not self.tensors[0].numel() or self.tensors[0].numel() % tokens or self.tensors[0].shape != other.tensors[0].shape:
            return None
        return _differ(self.tensors[0], other.tensors[0], self.noise).view(tokens, -1).any(1).cpu()


# Noise is measured between two runs; other runs may differ by more.
_NOISE_MARGIN = 4


def _differ(a: Any, b: Any, noise: float) -> Any:
    """Where two tensors differ by more than _NOISE_MARGIN times the noise. NaN equals NaN."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return torch.ones((), dtype=torch.bool)
    if not a.dtype.is_floating_point:
        return a != b
    a, b = a.float(), b.float()
    apart = (a - b).abs() > _NOISE_MARGIN * noise if noise else a != b
    return (apart | (a.isnan() != b.isnan())) & ~(a.isnan() & b.isnan())


@dataclass
class _Entry:
    """A parameter of a module."""

    name: str
    module: Any
    tensor: Any
    layer: Any  # the module to run for the parameter; None: the whole model


class Prover:
    """Proves one model, in the state that it is in. Not thread-safe; the model must serve nothing meanwhile.

        prover = Prover(model, probe, names)
        prover.perturb()                        # proved, failed and unproved parameters in prover.proof
    """

    def __init__(self, model: Any, probe: Probe, names: Iterable[str], apart: Iterable[Any] = ()) -> None:
        """`names`: of parameters and buffers that are written in place. `apart`: processed modules that share such a parameter.
        Runs the model once; where that fails, all of `names` are unproved."""
        self.proof = Proof()
        self._model, self._probe = model, probe
        self._apart = {id(module) for module in apart}
        self._began = time.perf_counter()
        self._routers = _routers(model)
        self._got: dict[int, tuple[Any, Any]] = {}
        self._users: dict[int, Any] = {}
        self._useful: set[int] = set()  # layers whose inputs went through _useful()
        self._names = {id(module): name for name, module in model.named_modules()}
        self._parents: dict[int, list[Any]] = {}
        for parent in model.modules():
            for child in parent.children():
                self._parents.setdefault(id(child), []).append(parent)
        self.runs = self._record()
        self._held = list(self._entries_of(set(names))) if self.runs else []
        if not self.runs:
            self.proof.unproved.update(dict.fromkeys(names, self._why))
        self.proof.unproved.update(self._probe.not_run)
        self._tick()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.proof.seconds += now - self._began
        self._began = now

    def _record(self) -> bool:
        import torch

        calls = _Calls(self._model, self._probe.keep)
        try:
            with torch.no_grad(), _forced(self._routers):
                self._probe.run()
        except Exception as error:
            self._why = f"can't be told, because the model can't be run: {type(error).__name__}: {error}"
            return False
        finally:
            calls.end()
        self._got, self._users = calls.got, calls.users
        return True

    def _entries_of(self, names: set[str]) -> Iterator[_Entry]:
        """The parameters and buffers with these names. A tied parameter is listed once for each module that has it, since one of them may keep a
        copy while the others read the parameter."""
        wanted = {id(tensor) for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()) if name in names}
        for prefix, module in self._model.named_modules():
            if id(module) in self._apart:
                continue
            for own, tensor in (*module._parameters.items(), *module._buffers.items()):
                name = f"{prefix}.{own}" if prefix else own
                if tensor is None or not tensor.numel() or (name not in names and id(tensor) not in wanted):
                    continue
                yield _Entry(name, module, tensor, self.layer_of(module))

    def layer_of(self, module: Any, itself: bool = True) -> Any:
        """The module to run for the parameters of `module`: with `itself`, `module` if it was called, or another that got it as an argument;
        else the nearest called module around it. None: the whole model."""
        if itself and id(module) in self._got:
            return module
        if itself and id(module) in self._users:
            return self._users[id(module)]
        around = [module]
        seen = set()
        while around:
            around = [parent for inner in around for parent in self._parents.get(id(inner), ()) if id(parent) not in seen]
            seen |= {id(parent) for parent in around}
            for parent in around:
                if id(parent) in self._got and parent is not self._model:
                    return parent
        return None

    # ---- running ----

    def outputs(self, layer: Any, noise: float = 0.0) -> _Outputs:
        """Runs a layer on the inputs that it got; returns its outputs, and the inputs as it left them. None: the whole model's logits."""
        import torch

        if layer is None:
            return self._outputs_of(self._probe.run, noise)
        with torch.no_grad():
            arguments, options = _map(self._inputs(layer), lambda tensor: tensor.clone(), self._probe.keep)
            with self._probe.context(), self._unforced(layer):
                given = layer(*arguments, **options)
            return _Outputs([tensor.clone() for tensor in _tensors_in((given, arguments, options))], noise)

    @contextmanager
    def _unforced(self, layer: Any) -> Iterator[None]:
        """Within the block, a `layer` that is a router gives the experts that it computes. Elsewhere _Router.force replaces its output, which
        would hide its weights."""
        routers = [router for router in self._routers if router.module is layer]
        for router in routers:
            router.forcing = False
        try:
            yield
        finally:
            for router in routers:
                router.forcing = True

    def _inputs(self, layer: Any) -> Any:
        """What the layer got when it was recorded, with inputs replaced that would hide its weights."""
        if id(layer) not in self._useful:
            self._useful.add(id(layer))
            seed = crc32(self._names[id(layer)].encode())
            self._got[id(layer)] = _map(self._got[id(layer)], lambda tensor: _useful(tensor, seed))
        return self._got[id(layer)]

    def steady(self, layer: Any) -> _Outputs:
        """As outputs(), with the noise measured between two runs."""
        return self._steady(lambda: self.outputs(layer))

    def _steady(self, run: Callable[[], _Outputs]) -> _Outputs:
        first, second = run(), run()
        noise = 0.0
        for a, b in zip(first.tensors, second.tensors):
            if a.dtype.is_floating_point and a.numel():
                noise = max(noise, float((a.float() - b.float()).abs().nan_to_num(0.0).max().item()))
        first.noise = noise
        return first

    # ---- perturbation ----

    def perturb(self) -> Proof:
        """Changes every parameter, runs its layer, and puts it back. Raises Internal where a digest says that it is not back.

        A parameter that its own layer does not read may be read by another, as a router's bias is by the experts: then the module around the
        layer is run, with the routers' own choices, and at last the whole model. A tied parameter must show in each of its own layers."""
        by_name = {held.name: held for held in self._held}
        layers: dict[int, list[_Entry]] = {}
        for held in self._held:
            layers.setdefault(id(held.layer), []).append(held)
        missed: dict[str, str] = {}
        with _forced(self._routers):
            for entries in layers.values():
                untried = {held.name: "has no layer that was run" for held in entries}
                missed.update(untried if entries[0].layer is None else self._perturb_layer(entries))
        # All ranks must run alike: a parameter of which one rank saw no effect is tried again on all.
        for whole in (False, True):
            again = self._probe.agree({name for name in missed if self._holders(by_name[name]) == 1 and not missed[name].startswith("of experts")})
            for name in sorted(again & by_name.keys())[:MAX_WIDER_RUNS]:
                held = by_name[name]
                wider = _Entry(name, held.module, held.tensor, None if whole else self._around(held.layer))
                if self._perturb_layer([wider], forced=False).get(name) is None:
                    missed.pop(name, None)
        for name, held in by_name.items():
            self._judge(held, missed.get(name, ""))
        failed = self._probe.agree(set(self.proof.failed))
        self.proof.failed.update({name: "fails on another rank" for name in failed if name not in self.proof.failed})
        self.proof.proved = sorted(set(self.proof.proved) - failed - self.proof.unproved.keys())
        for way, run in self._probe.ways.items():
            if why := self._prove_way(run):
                self.proof.unproved[way] = why
            else:
                self.proof.ways.append(way)
        self._tick()
        return self.proof

    def _prove_way(self, run: Callable[[], Any]) -> str:
        """Changes each parameter and runs the whole model by `run`; returns why that does not show that `run` reads every parameter which its
        layer reads; "": it does."""
        try:
            base = self._steady(lambda: self._outputs_of(run))
        except Exception as error:
            return f"can't be told, because it can't be run: {type(error).__name__}: {error}"
        mine, count = self._probe.turn
        stale = set()
        for held in {id(held.tensor): held for held in self._held}.values():
            for turn in range(count):
                if turn != mine:
                    self._outputs_of(run)
                elif not base.differ(self._run_changed(held, [held.tensor.data], lambda: self._outputs_of(run), digest(held.tensor))):
                    stale.add(held.name)
        stale = self._probe.agree(stale & set(self.proof.proved))
        return f"shows nothing of {len(stale)} parameters, such as '{min(stale)}'" if stale else ""

    def _outputs_of(self, run: Callable[[], Any], noise: float = 0.0) -> _Outputs:
        import torch

        with torch.no_grad():
            return _Outputs(_map(_tensors_in(run()), lambda tensor: tensor.clone()), noise)

    def _around(self, layer: Any) -> Any:
        """The nearest called module around the layer; None: the whole model."""
        return None if layer is None else self.layer_of(layer, itself=False)

    def _holders(self, held: _Entry) -> int:
        return sum(1 for other in self._held if other.tensor is held.tensor)

    def _judge(self, held: _Entry, why: str) -> None:
        """Notes the parameter as proved, unproved or failed. `why`: why no output showed that it is read; "": one did."""
        shows_nothing = why and self._probe.shows_nothing(held.module, held.layer)
        if not why:
            self.proof.proved.append(held.name)
        elif shows_nothing:
            self.proof.unproved[held.name] = shows_nothing
        elif not held.tensor.dtype.is_floating_point or held.layer is None or isinstance(why, _NotTried):
            self.proof.unproved[held.name] = why
        else:
            self.proof.failed[held.name] = why

    def _perturb_layer(self, entries: Sequence[_Entry], forced: bool = True) -> dict[str, str]:
        """Changes the parameters of one layer one after the other; returns, by name, why the layer's output does not show that one is read.
        `forced`: whether routers send tokens to chosen experts."""
        layer = entries[0].layer
        try:
            base = self.steady(layer)
        except Exception as error:
            untried = _NotTried(f"can't be told, because its layer can't be run alone: {type(error).__name__}: {error}")
            return dict.fromkeys((held.name for held in entries), untried)
        return {held.name: why for held in entries if (why := self._perturb_parameter(held, base, self._router_of(held) if forced else None))}

    def _perturb_parameter(self, held: _Entry, base: _Outputs, router: _Router | None) -> str:
        """Returns why the layer's output does not show that the parameter is read; "": it does."""
        mine, count = self._probe.turn
        before = digest(held.tensor)
        why = ""
        for turn in range(count):
            if turn != mine:
                for _ in range(router.chosen if router is not None else 1):
                    self.outputs(held.layer)
            elif router is None:
                after = self._run_changed(held, [held.tensor.data], partial(self.outputs, held.layer, base.noise), before)
                if not base.differ(after):
                    why = f"({type(held.module).__name__}) is not read: its layer gives the same with other values there"
            else:
                why = self._perturb_experts(held, router, base, before)
        return why

    def _router_of(self, held: _Entry) -> _Router | None:
        """The router of a parameter that has one slice for each expert."""
        if held.layer is None or held.tensor.dim() < 2:
            return None
        name = self._names[id(held.module)]
        for router in self._routers:
            block = self._names[id(router.module)].rpartition(".")[0]
            inside = f"{block}.{_EXPERTS}" if block else _EXPERTS
            if held.tensor.shape[0] == router.count and (name == inside or name.startswith(inside + ".")):
                return router
        return None

    def _perturb_experts(self, held: _Entry, router: _Router, base: _Outputs, before: int) -> str:
        """Changes every `router.chosen`-th expert at a time: exactly the tokens that go to a changed expert must change. Returns why they
        don't, as _perturb_parameter does."""
        import torch

        scheduled = router.schedule(self._probe.tokens)
        stale: set[int] = set()
        strange = changed = False
        for first in range(router.chosen):
            after = self._run_changed(held, [held.tensor.data[first :: router.chosen]], partial(self.outputs, held.layer, base.noise), before)
            changed = changed or base.differ(after)
            rows = base.rows_differ(after, self._probe.tokens)
            theirs = scheduled % router.chosen == first
            if rows is None:
                strange = True
                continue
            strange = strange or bool((rows & ~theirs.any(1)).any())
            for token in torch.nonzero(theirs.any(1) & ~rows).flatten().tolist():
                stale |= set(scheduled[token][theirs[token]].tolist())
        if not changed:
            return f"({type(held.module).__name__}) is not read: its layer gives the same with other values there"
        if stale and strange:
            return _NotTried("can't be told of each expert, because tokens can't be sent to chosen ones")
        if stale:
            return f"of experts {', '.join(map(str, sorted(stale)[:8]))} is not read: tokens that go there give the same with other values"
        return ""

    def _run_changed(self, held: _Entry, parts: Sequence[Any], run: Callable[[], _Outputs], before: int) -> _Outputs:
        """What `run` gives with other values in `parts` of the parameter. Puts its own values back, and raises Internal where their digest is
        not `before`."""
        _flip(parts)
        mark_written([held.tensor])
        try:
            after = run()
        finally:
            _flip(parts)
            mark_written([held.tensor])
            if digest(held.tensor) != before:
                raise Internal(f"parameter '{held.name}' was not put back", culprit=f"parameter '{held.name}'")
        return after

    # ---- delivery both ways ----

    def states(self, modules: Iterable[Any] = ()) -> dict[str, _Outputs]:
        """Runs the layers of all parameters and of `modules`; returns their outputs by the module's name, and the logits under ""."""
        found: dict[str, _Outputs] = {}
        with _forced(self._routers):
            for module in [*(held.module for held in self._held), *modules]:
                layer = self.layer_of(module)
                name = self._names[id(module)]
                if layer is None or name in found:
                    continue
                try:
                    found[name] = self.steady(layer)
                except Exception:
                    continue  # its parameters are unproved
        found[""] = self.steady(None)
        return found

    def compare_processed(self, before: Mapping[str, _Outputs], after: Mapping[str, _Outputs], processed: Mapping[str, Any]) -> None:
        """Notes as failed the processed modules (by name) whose layers give the same after another version was delivered; modules
        without a layer that runs by itself are unproved."""
        for name, module in processed.items():
            if name not in before or name not in after:
                self.proof.unproved[name] = "is processed, and has no layer that runs by itself"
            elif before[name].differ(after[name]):
                continue
            elif why := self._probe.shows_nothing(module, self.layer_of(module)):
                self.proof.unproved[name] = f"is processed, and {why}"
            else:
                self.proof.failed[name] = "is processed, and its layer gives the same after another version was delivered"
        self._tick()

    def compare_deliveries(self, ours: Mapping[str, _Outputs], theirs: Mapping[str, _Outputs]) -> None:
        """Notes as failed the layers that compute otherwise after the engine's own loader loaded the same tensors."""
        wrong = {name for name, outputs in ours.items() if name in theirs and outputs.differ(theirs[name])}
        for name in sorted(self._probe.agree(wrong)):
            if name:
                self.proof.failed[name] = "computes otherwise with the same tensors from the engine's own loader"
            elif len(wrong) == 1:  # no layer explains it
                self.proof.failed["logits"] = "are others with the same tensors from the engine's own loader"
        if "" in theirs and any(not tensor.isfinite().all().item() for tensor in theirs[""].tensors if tensor.dtype.is_floating_point):
            self.proof.unproved["logits"] = "are no finite numbers with made-up tensors"
        self._tick()


def _flip(parts: Iterable[Any]) -> None:
    """Changes the values in place, past torch's count of versions; a second call changes them back."""
    import torch

    for part in parts:
        if part.dtype == torch.bool or not part.dtype.is_floating_point:
            if part.dim():  # a permutation keeps indices valid
                part.copy_(part.flip(tuple(range(part.dim()))))
            continue
        words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[part.element_size()]
        bits = part.view(words) if part.dim() else part.view(1).view(words)
        mask = torch.tensor(_FLIPS[part.element_size()], dtype=words, device=part.device)
        bits.bitwise_xor_(mask.repeat(-(-bits.shape[-1] // 2))[: bits.shape[-1]])


def compare_logits(folder: str, key: str, run: Callable[[], Any]) -> None:
    """Compares logits with those that the first engine with this `key` left in `folder`, or leaves them there. `run`: as in Probe. Raises
    DataLoss where they differ by more than they do from run to run."""
    import torch

    with torch.no_grad():
        logits, again = (_tensors_in(run()) for _ in range(2))
    if not logits:
        return
    mine = _Outputs([tensor.detach().float().cpu() for tensor in logits])
    mine.noise = max(float((a - b.float().cpu()).abs().nan_to_num(0.0).max().item()) for a, b in zip(mine.tensors, again))
    path = Path(folder) / f"{key}.logits"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = path.with_name(f"{path.name}.{os.getpid()}")
    torch.save(mine.tensors, own)
    try:
        os.link(own, path)  # the first keeps the name
    except FileExistsError:
        if _Outputs(torch.load(path, weights_only=True), mine.noise).differ(mine):
            raise DataLoss(f"the logits of fixed tokens differ from those that the first engine left in {path}") from None
    finally:
        own.unlink()
    for old in sorted(path.parent.glob(f"{key.rpartition('-')[0]}-*.logits"), key=lambda file: file.stat().st_mtime)[:-KEPT_LOGITS]:
        old.unlink(missing_ok=True)
