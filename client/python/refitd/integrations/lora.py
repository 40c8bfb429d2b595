"""Low-rank adapters: merged into the weights on their way to the engines, or delivered on their own.

Merged, engines get plain weights, and the trainer never holds a merged copy:

    trainer.register(refitd.integrations.lora.merged(peft_model), dtype=torch.bfloat16)
    trainer.register({"w": refitd.integrations.lora.add(weight, b, a, scaling)}, dtype=torch.bfloat16)      # without PEFT

Each rank merges its own shards, block after block, into the memory from which they are delivered (refitd.layout.shards says which). On
their own, adapters are a group beside that of the weights, and engines compute with them:

    trainer = refitd.Trainer("policy-adapter", rank=rank, world_size=world_size)
    trainer.register(refitd.integrations.lora.adapters(peft_model))
    loop = refitd.integrations.lora.AdapterLoop(peft_model_of_the_engine, group="policy-adapter", instance="worker-0")

How a merged element is computed, in float32 (in float64 where the weight is float64), each operation rounded:

    product = b[i, 0] * a[0, j]
    product = product + b[i, k] * a[k, j]          # for k = 1 ... r - 1
    element = weight[i, j] + product * scaling     # and so on for each further adapter; rounded once to the dtype to deliver

No library chooses the order of that sum. So the bits depend neither on how the weight or the adapter is sharded, nor on blocks,
threads, and settings of matrix products such as TF32; they equal those of the same operations on the full tensors. A merge by a
matrix product, such as PEFT's, sums in an order of its library's choice, and rounds to the dtypes of adapter and weight in between:
it may differ from this one by such roundings.

Imports torch, and no other package.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..engine import Committed
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from ..layout import TensorSpec, is_dtensor, place
from ..layout.memory import empty
from ..layout.shards import Added, MadeMapping, MadeOf
from ..serving.rank import EngineLoop

# Elements of a block: three of float32 stay in a core's cache on the host; on a GPU a block must outweigh the start of kernels.
_HOST_BLOCK = 1 << 16
_DEVICE_BLOCK = 1 << 22

# PEFT's names of the matrices of linear layers and of embeddings: the attributes, and what follows the adapter's name.
_MATRICES = (("lora_A", "lora_B", ".weight"), ("lora_embedding_A", "lora_embedding_B", ""))
_PREFIX = "base_model.model."  # begins the names of tensors in files that PEFT writes


@dataclass(frozen=True)
class Term:
    """One adapter's share: scaling * (b @ a), or the transpose of that.

    `b`: of shape (m, r), `a`: of shape (r, n), tensors or DTensors. `scaling`: a number, or a function that each refit calls.
    """

    b: Any
    a: Any
    scaling: float | Callable[[], float] = 1.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the product that is added."""
        m, n = int(self.b.shape[0]), int(self.a.shape[1])
        return (n, m) if self.transposed else (m, n)


@dataclass(frozen=True)
class _Factors:
    """A term's matrices for one refit. `rows`: all rows of the left matrix, or those that this rank holds;
    `held`: which rows these are, as (first, count, place in `rows`)."""

    rows: Any
    columns: Any
    scaling: float
    held: tuple[tuple[int, int, int], ...]

    def of(self, first: int, count: int) -> Any:
        """The matrix's rows [first, first + count)."""
        for begin, n, place_in_rows in self.held:
            if begin <= first and first + count <= begin + n:
                start = place_in_rows + first - begin
                return self.rows[start : start + count]
        raise AssertionError(f"rows {first} to {first + count} are in none of {self.held}")


class Product:
    """The sum of terms that a refit adds to a tensor of two dimensions. It serves as an Addition of refitd.layout.shards.

    All ranks together gather sharded matrices when a refit begins, and keep them until the next refit begins. The matrix `b` is not
    gathered if it is sharded by rows as the tensor is.
    """

    def __init__(self, name: str, tensor: Any, terms: Sequence[Term]) -> None:
        """`tensor`: the product is added to this tensor, which may be a DTensor. `name`: the tensor's name, for errors.

        Raises InvalidArgument where the shapes do not fit, or a dtype is not floating-point.
        """
        self._name, self._shape = name, tuple(int(n) for n in tensor.shape)
        self._terms = list(terms)
        self._factors: list[_Factors] | None = None
        self._check(tensor)
        self._in_place = [_by_the_same_rows(term, tensor) for term in self._terms]

    def _check(self, tensor: Any) -> None:
        what = f"tensor '{self._name}'"
        if len(self._shape) != 2:
            raise InvalidArgument(f"{what} has shape {self._shape}: adapters are added to tensors of two dimensions", culprit=what)
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise InvalidArgument(f"{what} is {tensor.dtype}: adapters are added to float16, bfloat16, float32 or float64", culprit=what)
        for term in self._terms:
            b, a = tuple(term.b.shape), tuple(term.a.shape)
            if len(b) != 2 or len(a) != 2 or b[1] != a[0] or term.shape != self._shape:
                transposed = ", transposed," if term.transposed else ""
                raise InvalidArgument(f"{what} of shape {self._shape}: an adapter of b {b} and a {a}{transposed} does not fit", culprit=what)

    def begin(self) -> None:
        """Brings the matrices together; every rank calls it, as Trainer.refit does."""
        with torch.no_grad():
            self._factors = [self._of_term(term, in_place) for term, in_place in zip(self._terms, self._in_place)]

    def _of_term(self, term: Term, in_place: bool) -> _Factors:
        scaling = float(term.scaling() if callable(term.scaling) else term.scaling)
        b = term.b._local_tensor if in_place else _whole(term.b)
        a = _whole(term.a)
        rows, columns = (a.t(), b.t()) if term.transposed else (b, a)
        held: tuple[tuple[int, int, int], ...] = ((0, self._shape[0], 0),)
        if in_place:
            held = tuple((part.offset[0], part.extent[0], part.local[0]) for part in place(self._name, term.b, 0).parts)
        return _Factors(rows.detach(), columns.detach(), scaling, held)

    def write(self, target: Any, source: Any, offset: Sequence[int]) -> None:
        """Writes the sum of a box of the tensor and of its part of the product; see the module for the order of operations."""
        if self._factors is None:
            self.begin()
        assert self._factors is not None
        height, width = source.shape
        block = _HOST_BLOCK if source.device.type == "cpu" else _DEVICE_BLOCK
        step = max(1, min(height, block // max(1, width)))
        kind = torch.promote_types(source.dtype, torch.float32)
        columns = [factors.columns[:, offset[1] : offset[1] + width].to(kind) for factors in self._factors]
        room = torch.empty((3, step, width), dtype=kind, device=source.device)
        for begin in range(0, height, step):
            n = min(step, height - begin)
            total, product, summand = (part[:n] for part in room)
            total.copy_(source[begin : begin + n])
            for factors, across in zip(self._factors, columns):
                _multiply(product, summand, factors.of(offset[0] + begin, n).to(kind), across)
                total.add_(product.mul_(factors.scaling))
            target[begin : begin + n].copy_(total)


def _multiply(product: Any, summand: Any, rows: Any, columns: Any) -> None:
    """product = rows @ columns, summed in the order of the inner dimension; `summand` is room for one."""
    product.zero_()
    for k in range(columns.shape[0]):
        if k == 0:
            torch.mul(rows[:, :1], columns[:1], out=product)
            continue
        torch.mul(rows[:, k : k + 1], columns[k : k + 1], out=summand)
        product.add_(summand)


def _whole(tensor: Any) -> Any:
    """The full tensor; of a DTensor by a collective of its mesh."""
    return tensor.detach().full_tensor() if is_dtensor(tensor) else tensor


def _by_the_same_rows(term: Term, tensor: Any) -> bool:
    """Whether b's rows are sharded as the tensor's are, and neither is sharded by columns. The result is the same on all ranks."""
    if term.transposed or not is_dtensor(term.b) or not is_dtensor(tensor) or term.b.device_mesh != tensor.device_mesh:
        return False
    whole_rows = all(placement.is_replicate() or getattr(placement, "dim", None) == 0 for placement in tensor.placements)
    return whole_rows and tuple(term.b.placements) == tuple(tensor.placements)


def add(tensor: Any, b: Any, a: Any, scaling: float | Callable[[], float] = 1.0, *, name: str = "") -> Added:
    """`tensor` with scaling * (b @ a) added on the way, for a mapping that Trainer.register takes.

    `tensor`: of shape (m, n), or the DTensor of it. `b`, `a`: of shapes (m, r) and (r, n), whole on every rank or DTensors. `name`:
    for errors. Of a box of a tensor, give refitd.Shard the addition `Product(name, whole, [Term(b, a, scaling)])`, where `whole`
    is of the global shape (a tensor on device meta serves).
    """
    return Added(tensor, Product(name, tensor, [Term(b, a, scaling)]))


# ---- PEFT's models ----


def merged(model: Any) -> MadeMapping:
    """Returns what Trainer.register takes of a model of PEFT's, so that engines get the weights with all active adapters merged.

    `model`: a PeftModel, or a model with PEFT's layers of LoRA. Names are those of the model without PEFT; modules that PEFT trains
    as a whole (`modules_to_save`) come as trained. Adapters and their scalings are read at each refit; which adapters are active
    is read when this is called. Nothing of the model changes. The trainer calls this again where modules or tensors were replaced.

    Raises Unimplemented, naming the module, where a merge is no sum of weight and product: DoRA and other variants, biases of
    adapters, convolutions, single parameters, other methods than LoRA. Raises FailedPrecondition where adapters are merged already.
    """
    base = _base_of(model)
    found: dict[str, Any] = {}
    layers = dict(_layers(base))
    for name, tensor in base.state_dict(keep_vars=True).items():
        clean = _without_peft(base, layers, name)
        if clean is None:
            continue
        layer = layers.get(name[: -len(".base_layer.weight")]) if name.endswith(".base_layer.weight") else None
        terms = _terms(layer, layer.active_adapters) if layer is not None else []
        found[clean] = Added(tensor, Product(clean, tensor, terms)) if terms else tensor
    return MadeMapping(found, MadeOf([base], partial(merged, model)))


def adapters(model: Any, adapter: str | Sequence[str] = "default") -> MadeMapping:
    """Returns the tensors of one adapter of a PEFT model, or of several, as Trainer.register takes them. They need a group of their own.

    Names are those of PEFT's files; beside them each layer has `lora_scaling`, of shape (1,) and float32. Of several adapters each has its name
    and "/" before the names of its tensors: "alice/base_model.model...". Sharded matrices stay sharded. Raises InvalidArgument for an adapter
    that the model does not have, and as merged() does.
    """
    base = _base_of(model)
    found = _adapter(base, adapter) if isinstance(adapter, str) else {}
    for each in () if isinstance(adapter, str) else adapter:
        found |= {f"{each}/{name}": tensor for name, tensor in _adapter(base, each).items()}
    return MadeMapping(found, MadeOf([base], partial(adapters, model, adapter)))


def _adapter(base: Any, adapter: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, layer in _layers(base):
        if adapter not in layer.scaling:
            continue
        for _, (attribute, matrix) in _matrices(layer, adapter):
            suffix = ".weight" if not attribute.startswith("lora_embedding") else ""
            found[f"{_PREFIX}{name}.{attribute}{suffix}"] = matrix
        found[f"{_PREFIX}{name}.lora_scaling"] = _scaling_of(layer, adapter, matrix)
    if not found:
        raise InvalidArgument(f"the model has no adapter '{adapter}' of LoRA", culprit="adapter")
    return found | _trained_whole(base, adapter)


def specs_of(base: Iterable[TensorSpec], rank: int, target_modules: str | Sequence[str], dtype: str = "bfloat16") -> list[TensorSpec]:
    """The tensors of an adapter of linear layers, under the names of PEFT's files.

    `base`: the tensors of the base model's checkpoint (refitd.serving.read_manifest). `target_modules`: as in PEFT's LoraConfig, the ends of modules'
    names, or a regular expression for whole names. Raises InvalidArgument for a target that the base model lacks.
    """
    targets = [target_modules] if isinstance(target_modules, str) else list(target_modules)
    unknown, found = set(targets), []
    for spec in base:
        module = spec.name.removesuffix(".weight")
        if module == spec.name or len(spec.shape) != 2:
            continue
        if isinstance(target_modules, str):
            hits = {target_modules} if re.fullmatch(target_modules, module) else set()
        else:
            hits = {target for target in targets if module == target or module.endswith(f".{target}")}
        unknown -= hits
        if hits:
            rows, columns = spec.shape
            found.append(TensorSpec(f"{_PREFIX}{module}.lora_A.weight", dtype, (rank, columns)))
            found.append(TensorSpec(f"{_PREFIX}{module}.lora_B.weight", dtype, (rows, rank)))
    if unknown or rank < 1:
        what = f"target_modules: '{min(unknown)}' names no linear layer of the base model" if unknown else f"rank: {rank} is not positive"
        raise InvalidArgument(what, culprit="target_modules" if unknown else "rank")
    return found


class Matrices:
    """An adapter of linear layers in memory that the daemon can write: its tensors, under the names of PEFT's files, and scalings, by module."""

    def __init__(self, specs: Sequence[TensorSpec]) -> None:
        """Raises Unimplemented, naming the tensor, for what is no matrix of a linear layer's adapter."""
        self.tensors: dict[str, Any] = {}
        self.scalings: dict[str, Any] = {}
        for spec in specs:
            ending = next((ending for ending in (".lora_A.weight", ".lora_B.weight") if spec.name.endswith(ending)), None)
            if ending is None:
                what = f"tensor '{spec.name}'"
                raise Unimplemented(f"{what} is no matrix of a linear layer's adapter: merge it (refitd.integrations.lora)", culprit=what)
            self.tensors[spec.name] = empty(spec.shape, spec.dtype, like="torch")
            self.scalings.setdefault(spec.name.removesuffix(ending), empty(1, "float32", like="torch"))

    def named(self, prefix: str) -> dict[str, Any]:
        """All of it, by the names that adapters() gives."""
        scalings = {f"{prefix}{module}.lora_scaling": tensor for module, tensor in self.scalings.items()}
        return {**{prefix + name: tensor for name, tensor in self.tensors.items()}, **scalings}

    def config(self) -> dict[str, Any]:
        """PEFT's configuration of the adapter, with the scalings that are here now."""
        ranks = {name.removesuffix(".lora_A.weight").removeprefix(_PREFIX): int(t.shape[0]) for name, t in self.tensors.items() if "lora_A" in name}
        alphas = {name.removeprefix(_PREFIX): float(tensor) * ranks[name.removeprefix(_PREFIX)] for name, tensor in self.scalings.items()}
        rank, alpha = next(iter(ranks.values())), next(iter(alphas.values()))
        made: dict[str, Any] = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": sorted({name.rpartition(".")[2] for name in ranks})}
        patterns = {
            "rank_pattern": {re.escape(name): value for name, value in ranks.items() if value != rank},
            "alpha_pattern": {re.escape(name): value for name, value in alphas.items() if value != alpha},
        }
        return {**made, **{name: pattern for name, pattern in patterns.items() if pattern}}


class Receiver(EngineLoop):
    """Receives the adapters of one group, for an engine that loads them from memory. `arrived`: how many versions came."""

    arrived = 0

    def __init__(self, matrices: Mapping[str, Matrices], **options: Any) -> None:
        """Attaches; waits for daemon and group. `matrices`: by the prefix of their names in the group: "", or "NAME/" of each of several. `options`: as in
        refitd.EngineLoop, but for `names`."""
        names = {name: tensor for prefix, each in matrices.items() for name, tensor in each.named(prefix).items()}
        super().__init__(torch.nn.Module(), names=names, clean=False, **options)

    def _take(self, event: Any) -> None:
        if not isinstance(event, Committed):
            super()._take(event)
            return
        with self._changed:  # who waits for the version finds it counted
            self.arrived += 1
            super()._take(event)


class AdapterLoop(EngineLoop):
    """An EngineLoop of a model of PEFT's, for its adapter: updates write the adapter's matrices and scalings alone, in place."""

    def __init__(self, model: Any, *, adapter: str = "default", **options: Any) -> None:
        """Attaches.

        Args:
            model: The model that PEFT made.
            adapter: The adapter's name in the model.
            options: As in refitd.EngineLoop, but for `names`.

        Raises:
            Error: As refitd.EngineLoop and adapters() do.
        """
        self._adapter = adapter
        self._scalings: list[tuple[Any, Any]] = []  # layers, and where their scalings arrive
        names: dict[str, Any] = {}
        layers = {f"{_PREFIX}{name}.lora_scaling": layer for name, layer in _layers(_base_of(model))}
        for name, tensor in adapters(model, adapter).items():
            names[name] = tensor.tensor.clone() if isinstance(tensor, Added) else tensor
            if name in layers:
                names[name].fill_(layers[name].scaling[adapter])
                self._scalings.append((layers[name], names[name]))
        held = torch.nn.Module()  # so that these tensors alone move into memory that the daemon can map
        for i, tensor in enumerate(names.values()):
            if isinstance(tensor, torch.nn.Parameter):
                held.register_parameter(str(i), tensor)
            else:
                held.register_buffer(str(i), tensor)
        super().__init__(held, names=names, **options)

    def _take(self, event: Any) -> None:
        if isinstance(event, Committed):
            for layer, scaling in self._scalings:
                layer.scaling[self._adapter] = float(scaling)
        super()._take(event)


class _Scaling:
    """An addition that writes a layer's scaling; the tensor that it is added to is zero."""

    def __init__(self, layer: Any, adapter: str) -> None:
        self._layer, self._adapter = layer, adapter

    def begin(self) -> None:
        pass

    def write(self, target: Any, source: Any, offset: Sequence[int]) -> None:
        target.fill_(self._layer.scaling[self._adapter])


def _scaling_of(layer: Any, adapter: str, matrix: Any) -> Added:
    device = matrix._local_tensor.device if is_dtensor(matrix) else matrix.device
    return Added(torch.zeros(1, dtype=torch.float32, device=device), _Scaling(layer, adapter))


def _base_of(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _layers(base: Any) -> Iterator[tuple[str, Any]]:
    """The layers of LoRA, by their names in the base model. Refuses a model that has adapters of any other method."""
    for name, module in base.named_modules():
        if hasattr(module, "lora_A") and hasattr(module, "scaling"):
            _check_layer(name, module)
            yield name, module
        elif hasattr(module, "base_layer") and hasattr(module, "active_adapters"):
            raise Unimplemented(f"module '{name}' is a {type(module).__name__}, not LoRA's", culprit=f"module '{name}'")
        elif hasattr(module, "token_adapter"):
            raise Unimplemented(f"module '{name}' has trained single tokens: a merge is no product", culprit=f"module '{name}'")


def _check_layer(name: str, layer: Any) -> None:
    what = f"module '{name}'"
    if hasattr(layer, "parameter_name"):
        raise Unimplemented(f"{what} adapts the single parameter '{layer.parameter_name}'", culprit=what)
    if layer.merged:
        raise FailedPrecondition(f"{what} has adapters {layer.merged_adapters} merged already: unmerge_adapter() first", culprit=what)
    weight = getattr(layer.get_base_layer(), "weight", None)
    if weight is None or len(weight.shape) != 2:
        raise Unimplemented(f"{what} is a {type(layer).__name__}: its weight is no matrix", culprit=what)
    for adapter in layer.active_adapters:
        if adapter in getattr(layer, "lora_variant", {}) or getattr(layer, "use_dora", {}).get(adapter):
            raise Unimplemented(f"{what}: adapter '{adapter}' is a variant of LoRA, such as DoRA", culprit=what)
        if getattr(layer, "lora_bias", {}).get(adapter):
            raise Unimplemented(f"{what}: adapter '{adapter}' has a bias", culprit=what)


def _matrices(layer: Any, adapter: str) -> Iterator[tuple[bool, tuple[str, Any]]]:
    """A and then B of an adapter: whether they are an embedding's, and the attribute's name with the matrix."""
    for first, second, suffix in _MATRICES:
        if adapter in getattr(layer, first):
            for attribute in (first, second):
                held = getattr(layer, attribute)[adapter]
                yield suffix == "", (attribute, held.weight if suffix else held)


def _terms(layer: Any, active: Sequence[str]) -> list[Term]:
    terms = []
    for adapter in active:
        found = list(_matrices(layer, adapter))
        if not found:
            continue  # the adapter leaves this layer out
        (embedding, (_, a)), (_, (_, b)) = found
        transposed = embedding or bool(getattr(layer, "fan_in_fan_out", False))
        terms.append(Term(b, a, partial(_current_scaling, layer, adapter), transposed))
    return terms


def _current_scaling(layer: Any, adapter: str) -> float:
    return float(layer.scaling[adapter])


def _without_peft(base: Any, layers: dict[str, Any], name: str) -> str | None:
    """The name that a tensor of the base model has without PEFT; None for a tensor that only PEFT adds."""
    parts = name.split(".")
    for i in range(len(parts)):
        path, rest = ".".join(parts[:i]), parts[i:]
        if path in layers:
            return ".".join([path, *rest[1:]]) if rest[0] == "base_layer" else None
        if rest[0] in ("original_module", "modules_to_save") and hasattr(base.get_submodule(path), "modules_to_save"):
            active = _trained_of(base.get_submodule(path))
            if active is None:
                return ".".join([path, *rest[1:]]) if rest[0] == "original_module" else None
            return ".".join([path, *rest[2:]]) if rest[:2] == ["modules_to_save", active] else None
    return name


def _trained_of(wrapper: Any) -> str | None:
    """The active adapter for which a module was trained as a whole, if any."""
    return next((adapter for adapter in wrapper.active_adapters if adapter in wrapper.modules_to_save), None)


def _trained_whole(base: Any, adapter: str) -> dict[str, Any]:
    """The tensors of modules that were trained as a whole with the adapter."""
    found: dict[str, Any] = {}
    for name, module in base.named_modules():
        if hasattr(module, "modules_to_save") and hasattr(module, "original_module") and adapter in module.modules_to_save:
            trained = module.modules_to_save[adapter].state_dict(keep_vars=True)
            found |= {f"{_PREFIX}{name}.{rest}": tensor for rest, tensor in trained.items()}
    return found
