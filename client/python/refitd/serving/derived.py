"""Weights that an engine quantises by itself, written in place: as tensors that refits derive from those that trainers hold (docs/derived.md).

The class of a quantisation method says what it makes of a weight (`Quantised`). Whether refits make the same is compared, not believed: the
engine's own loader and post-processing quantise made-up tensors beside the model, and all bits are compared with what `derive` makes of them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .._core import native
from .._core.member import DerivedList, TensorList
from ..layout import Derived, TensorSpec
from ..layout.capture import Copy, Processed
from ..layout.memory import torch_dtype
from . import proof
from .ahead import Portion

# Values of Settings.derived: the engine's own quantisation is derived; nothing is.
ON, OFF = "on", "off"
# The attribute of a model that has, by module and kind, why its quantisation differs from that of refits; "": it was compared, and is the same.
COMPARED = "_refitd_compared"
# On CUDA a kind's function may have the bits of any of these kinds: it depends on whether Inductor compiles it (docs/derived.md).
_ON_CUDA = {"fp8_block": ("fp8_block_inductor", "fp8_block_cuda", "fp8_block")}
_BLOCK = 128
# derive() computes about this many elements in one call, and runs so many calls at a time.
_ELEMENTS, _THREADS = 1 << 20, 16


logger = logging.getLogger("refitd.serving.derived")


@dataclass(frozen=True)
class Quantised:
    """What a module's quantisation method makes of a weight. `kind`: of refitd.Derived, as it is on a CPU; None: it makes nothing, because the checkpoint
    has values and scales in blocks, of which refits can make several kinds. `values`: the parameter that the loader fills, and that has the
    values afterwards; `scales`: that with the scales. `transposed`: whether the values have the weight's last two dimensions in the other order."""

    kind: str | None
    values: str
    scales: str
    transposed: bool = False

    def kinds(self, setting: str | None, device: Any) -> tuple[str, ...]:
        """The kinds that it may be on the device, in the order in which they are compared. `setting`: Settings.derived. Raises NotDerived where that
        says no."""
        if setting == OFF or (self.kind is not None and setting != ON):
            raise NotDerived(f"the engine's setting derived is {setting!r}" if setting else "the engine's setting derived is not 'on'")
        if self.kind is None:
            return ("fp8_block" if setting is None or setting == ON else setting,)
        return _ON_CUDA.get(self.kind, (self.kind,)) if device.type == "cuda" else (self.kind,)


def of_experts(kind: str | None, scales: str) -> tuple[Quantised, ...]:
    """What a quantisation method makes of a mixture of experts, whose parameters have the matrices of all experts of a rank: gate and up, and down."""
    return tuple(Quantised(kind, f"{part}_weight", f"{part}_{scales}") for part in ("w13", "w2"))


class NotDerived(Exception):
    """Why a module's parameters can't be written as derived tensors."""


def kinds_left(kinds: Sequence[str], compared: Mapping[str, str]) -> tuple[str, ...]:
    """The kinds that are not known to differ. `compared`: of the module, in COMPARED. Raises NotDerived: there is none."""
    left = tuple(kind for kind in kinds if not compared.get(kind))
    if not left:
        raise NotDerived("; ".join(dict.fromkeys(f"it {compared[kind]}" for kind in kinds)))
    return left


@dataclass(frozen=True)
class Part:
    """A box of a derived tensor and where it lies: `first` and `strides` are in elements of the module's parameter of that name."""

    spec: TensorSpec
    parameter: str
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    first: int

    def copy(self, module: str, index: int) -> Copy:
        return Copy(index, self.offset, self.extent, self.strides, f"{module}.{self.parameter}" if module else self.parameter, self.first)


@dataclass
class Requantised:
    """A module whose values and scales are written in place. `tensors`: the checkpoint's that its loader takes. `kinds`: what its quantisation may be; `parts`
    are of the first. `loads`: by tensor that trainers hold and the engine's loader takes as values and scales, the names of these; then
    there is nothing to compare."""

    name: str
    module: Any = field(repr=False)
    parts: list[Part] = field(repr=False)
    tensors: list[TensorSpec] = field(repr=False)
    kinds: tuple[str, ...] = ()
    loads: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)

    def summary(self) -> dict[str, str]:
        """By parameter, what it is derived as."""
        kinds = {part.parameter: part.spec.derived for part in self.parts}
        return {f"{self.name}.{name}": f"{derived.role} of {derived.kind}" for name, derived in kinds.items() if derived is not None}


# ---- where values and scales lie ----


def derived_spec(source: TensorSpec, kind: str, role: str) -> TensorSpec:
    """The derived tensor, under a name that engines with the same layers have too."""
    derived = Derived(source, kind, role)
    if role == "values":
        return TensorSpec(f"{source.name}.{kind}.values", "float8_e4m3fn", source.shape, derived)
    return TensorSpec(f"{source.name}.{kind}.scales", "float32", _grid(source.shape, kind == "fp8_channel"), derived)


def parts_of(quantised: Quantised, kind: str, module: Any, loaded: Processed, tensors: Sequence[TensorSpec]) -> list[Part]:
    """The boxes of derived tensors that make up the values and scales of a weight, or of the weights of several experts. `loaded`: where the loader puts
    boxes of `tensors` in it. Raises NotDerived where a block has elements of two tensors or of two ranks, or the parameters are no such values and
    scales."""
    by_rows = kind == "fp8_channel"
    if len(loaded.shape) not in (2, 3) or loaded.strides != _row_major(loaded.shape):
        raise NotDerived(f"'{quantised.values}' is no row-major matrix while it is loaded, nor one for each expert")
    values = _held(module, quantised.values, "float8_e4m3fn", loaded.shape, quantised.transposed)
    scales = _held(module, quantised.scales, "float32", _grid(loaded.shape, by_rows), False)
    found: dict[tuple[Any, ...], Part] = {}
    for copy in loaded.copies:
        source = tensors[copy.tensor_index]
        at = _place(copy.first, loaded.strides)
        expert, at_in, shape = at[:-2], at[-2:], loaded.shape[-2:]
        if (
            len(source.shape) != 2
            or any(n > 1 and s != t for n, s, t in zip(copy.extent, copy.strides, loaded.strides[-2:]))
            or any(there + n > size for there, n, size in zip(at_in, copy.extent, shape))
        ):
            raise NotDerived(f"'{source.name}' does not lie in '{quantised.values}' as a matrix")
        if not by_rows:
            _check_blocks(source, copy, at_in, shape)
        first, there = _block_at(copy.offset, by_rows), (*expert, *_block_at(at_in, by_rows))
        count = _grid(copy.extent, by_rows)
        for role, parameter, tensor, offset, extent, place in (
            ("values", quantised.values, values, copy.offset, copy.extent, at),
            ("scales", quantised.scales, scales, first, count, there),
        ):
            spec = derived_spec(source, kind, role)
            begin = sum(i * stride for i, stride in zip(place, tensor.stride()))
            found[spec.name, offset, begin] = Part(spec, parameter, offset, extent, tuple(tensor.stride()[-2:]), begin)
    return list(found.values())


def lacking(loaded: Processed) -> str:
    """Which of a rank's experts gets no elements, or not all of its elements, as a clause of a message; "": the weight has no experts, or all get theirs."""
    filled: dict[int, int] = {}
    for copy in loaded.copies if len(loaded.shape) == 3 else ():
        expert = copy.first // loaded.strides[0]
        filled[expert] = filled.get(expert, 0) + prod(copy.extent)
    short = [expert for expert in range(loaded.shape[0]) if filled.get(expert, 0) < prod(loaded.shape[1:])] if filled else []
    return f": no tensor has those of this rank's expert {short[0]}" if short else ""


def _held(module: Any, name: str, dtype: str, shape: tuple[int, ...], transposed: bool) -> Any:
    """The parameter, in the order of the weight's dimensions."""
    tensor = module._parameters.get(name)
    if tensor is None:
        raise NotDerived(f"has no parameter '{name}' after loading")
    given = tensor.detach().T if transposed and tensor.dim() == 2 else tensor.detach()
    if given.dtype != torch_dtype(dtype) or tuple(given.shape) != shape:
        raise NotDerived(f"'{name}' is {given.dtype} {tuple(given.shape)} after loading, not {dtype} {tuple(shape)}")
    return given


def _place(first: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The indices of an element of a tensor that is row-major."""
    at = []
    for stride in strides:
        at.append(first // stride)
        first %= stride
    return tuple(at)


def _grid(shape: tuple[int, ...], by_rows: bool) -> tuple[int, ...]:
    """The shape of the scales of a matrix, or of one matrix for each expert."""
    *experts, rows, columns = shape
    return (*experts, rows, 1) if by_rows else (*experts, -(-rows // _BLOCK), -(-columns // _BLOCK))


def _block_at(place: tuple[int, ...], by_rows: bool) -> tuple[int, ...]:
    return (place[0], 0) if by_rows else (place[0] // _BLOCK, place[1] // _BLOCK)


def _check_blocks(source: TensorSpec, copy: Copy, at: tuple[int, ...], shape: tuple[int, ...]) -> None:
    """Raises NotDerived where a block of the weight, or of the source, has elements within the copy and others beyond it."""
    for d, (begin, there, count) in enumerate(zip(copy.offset, at, copy.extent)):
        whole = count % _BLOCK == 0 or (begin + count == source.shape[d] and there + count == shape[d])
        if begin % _BLOCK or there % _BLOCK or not whole:
            raise NotDerived(
                f"elements [{begin}, {begin + count}) of '{source.name}' in dimension {d} lie at {there} of '{copy.parameter}', which cuts blocks of {_BLOCK}"
            )


# ---- arithmetic ----


def derive(spec: TensorSpec, source: Any, offset: Sequence[int] | None = None, extent: Sequence[int] | None = None) -> Any:
    """A box of a derived tensor, on the host, made there by the library, by several threads. `source`: the whole source. Raises FailedPrecondition that
    names a source that can't be quantised."""
    import torch

    begin = (0,) * len(spec.shape) if offset is None else tuple(offset)
    box = tuple(spec.shape if extent is None else extent)
    if spec.derived is not None and spec.derived.kind == "fp8_block_inductor":
        return _derive_compiled(spec.derived.role, source.detach(), begin, box)
    given = source.detach().cpu().contiguous()
    made = torch.empty(box, dtype=torch_dtype(spec.dtype))
    tensors, derivations = TensorList([spec]), DerivedList([spec])

    def make(first: int, count: int) -> None:
        place, part = (first, *begin[1:]), (count, *box[1:])
        numbers = [(ctypes.c_int64 * len(of))(*of) for of in (place, part)]
        to = made[first - begin[0] :].data_ptr()
        status = native.library().refit_derive(tensors.pointer, derivations.pointer, given.data_ptr(), *numbers, to)
        native.check(status, f"tensor '{spec.name}'")

    end = begin[0] + box[0]
    step = _BLOCK * max(1, _ELEMENTS // (_BLOCK * max(1, given[:1].numel())))
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
        starts = [begin[0], *range(begin[0] - begin[0] % step + step, end, step)]
        list(pool.map(make, starts, (after - first for first, after in zip(starts, [*starts[1:], end]))))
    return made


def _derive_compiled(role: str, source: Any, begin: Sequence[int], box: Sequence[int]) -> Any:
    """derive() of whole blocks by fp8_block_inductor, which only GPUs compute: on the source's device. Raises NotDerived where that can't."""
    import torch

    reciprocal, why = _approximate_reciprocal(source.device)
    if reciprocal is None:
        raise NotDerived(why)
    size = _BLOCK if role == "scales" else 1
    part = source[tuple(slice(first * size, (first + count) * size) for first, count in zip(begin, box))]
    rows, columns = part.shape
    padded = torch.zeros([-(-n // _BLOCK) * _BLOCK for n in part.shape], dtype=part.dtype, device=part.device)
    padded[:rows, :columns] = part
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, -1, _BLOCK)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True).float().clamp(1e-4) * (1 / 448)
    if role == "scales":
        return scales.view(blocks.shape[0], blocks.shape[2]).cpu()
    factor = reciprocal(scales.flatten()).view(scales.shape)
    values = (blocks.float() * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns].cpu().contiguous()


@functools.cache
def _approximate_reciprocal(device: Any) -> tuple[Callable[[Any], Any] | None, str]:
    """1 / x as Inductor compiles it for GPUs, by rcp.approx.f32; None, and why, where the device or torch's settings do not have that."""
    import torch

    function = torch.compile(lambda x: 1.0 / x, dynamic=True)
    x = torch.linspace(1, 2, 1 << 12, device=device)
    try:
        if bool((function(x) != 1.0 / x).any()):
            return function, ""
        why = "torch.compile makes the nearest reciprocals here, and not those of rcp.approx.f32"
    except Exception as error:  # compilers may be missing
        why = f"torch.compile fails: {type(error).__name__}: {error}"
    logger.warning("refitd: nothing is derived as fp8_block_inductor: %s", why)
    return None, why


class _Made:
    """A made-up derived tensor, of which each box is computed when it is asked for."""

    def __init__(self, spec: TensorSpec, source: Any) -> None:
        self._spec, self._source = spec, source

    def __getitem__(self, box: tuple[slice, ...]) -> Any:
        return derive(self._spec, self._source, [part.start for part in box], [part.stop - part.start for part in box])


def made_up(spec: TensorSpec, seed: int, device: Any) -> Any:
    """As proof.values, also of derived tensors, for proof.deliver."""
    return proof.values(spec, seed, device) if spec.derived is None else _Made(spec, proof.values(spec.derived.source, seed, device))


def as_loaded(
    manifest: Sequence[TensorSpec], found: Sequence[Requantised], seed: int, device: Any
) -> Iterator[tuple[str, Any]]:
    """The made-up tensors of `manifest` as the engine's own loader takes them: those of Requantised.loads as values and scales."""
    loads = {name: roles for entry in found for name, roles in entry.loads.items()}
    kinds = {part.spec.derived.source.name: part.spec.derived.kind for entry in found for part in entry.parts if part.spec.derived is not None}
    for spec in manifest:
        made = proof.values(spec, seed, device)
        if spec.name not in loads:
            yield spec.name, made
            continue
        for role, name in loads[spec.name].items():
            yield name, derive(derived_spec(spec, kinds[spec.name], role), made).to(device)


def _trial(spec: TensorSpec, device: Any) -> Any:
    """Made-up numbers on which ways of quantising differ: of sizes that differ by bands of rows and within them, some too small for a scale of their own, with blocks and
    rows of zeros, and with rows whose largest numbers have powers of two as scales. Reciprocals that differ in the last bit make other values only of
    numbers that lie in the middle of two values. So some blocks have one row of all middles, as near as bfloat16 comes; the 128 mantissas of the
    largest number take turns, the multiples of 7 first, with which bfloat16 comes near most."""
    import torch

    made = proof.values(spec, 1, device)
    if made.dim() != 2 or not made.dtype.is_floating_point:
        return made
    row, column = (torch.arange(n, device=device) for n in made.shape)
    band = row // _BLOCK + 1
    size = torch.exp2(-(band * 11 % 31 + 12 * (row % 16 == 9)).float())[:, None]
    wide = made.float() * (4 * made.shape[1] ** 0.5) * size
    anchors = (row % 2 == 1) & (band % 2 == 1)
    wide[:, ::_BLOCK] = torch.where(anchors[:, None], 448 * size, wide[:, ::_BLOCK])
    tied = (anchors & (row % _BLOCK == 3)).nonzero()
    block = tied // (2 * _BLOCK) * -(-made.shape[1] // _BLOCK) + column // _BLOCK
    served = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()
    middles = torch.cat([served[-1:], (served[1:] + served[:-1]) / 2, served[-1:]])
    wide[tied[:, 0]] = (128 + (5 + 7 * block) % 128) / 128 * middles[column % _BLOCK] * size[tied[:, 0]]
    wide[band % 4 == 2, :_BLOCK] = 0
    wide[row == 5] = 0
    return wide.to(made.dtype)


def compare(
    model: Any,
    found: Sequence[Requantised],
    refused: set[str],
    quantise: Callable[[Portion, Mapping[str, Any]], None],
    agree: Callable[[set[str]], set[str]],
    device: Any,
) -> bool:
    """Compares what the engine makes of made-up weights with what refits make of them, for modules that were not compared yet, and notes the outcome in
    the model. Returns whether all of `found` may be written in place. `refused`: names of other modules that quantise. `quantise`: quantises a portion
    of tensors into the memory beside the model. `agree`: as in Probe. Ranks that compute together call this alike."""
    compared: dict[str, dict[str, str]] = getattr(model, COMPARED, {})
    object.__setattr__(model, COMPARED, compared)
    elsewhere = agree(refused)
    new: dict[str, str] = {}
    for entry in found:
        if entry.name in elsewhere:
            new[entry.name] = "is not derived on another rank"
        elif entry.loads:
            new[entry.name] = ""
        elif entry.kinds[0] not in compared.get(entry.name, {}):
            new[entry.name] = _difference(entry, quantise, device)
        if new.get(entry.name):
            level = logging.INFO if len(entry.kinds) > 1 else logging.WARNING
            logger.log(level, "refitd: module '%s' is not derived as %s: it %s", entry.name, entry.kinds[0], new[entry.name])
    wrong = agree({name for name, why in new.items() if why})
    for entry in found:
        if entry.name in new:
            why = new[entry.name] or ("differs on another rank" if entry.name in wrong else "")
            kinds = entry.kinds if entry.name in elsewhere else entry.kinds[:1]
            compared.setdefault(entry.name, {}).update(dict.fromkeys(kinds, why))
    return not wrong


def _difference(entry: Requantised, quantise: Callable[[Portion, Mapping[str, Any]], None], device: Any) -> str:
    """The first element that the module quantises otherwise than refits do, as text; "": there is none."""
    given = {spec.name: _trial(spec, device) for spec in entry.tensors}
    portion = Portion({entry.name: entry.module}, dict(given))
    # Experts are many small matrices. Torch does not say that code which it compiles may be run by several threads.
    threads = 1 if entry.kinds[0] == "fp8_block_inductor" else min(_THREADS, os.cpu_count() or 1)
    try:
        portion.allocate()
        quantise(portion, given)  # first, since ranks may compute this together
        made = portion.made[entry.name][0]
        with ThreadPoolExecutor(threads) as pool:
            return next(filter(None, pool.map(functools.partial(_difference_in, made, given), entry.parts)), "")
    except Exception as error:  # the inside of another version of the engine may differ
        return f"can't be compared with {entry.kinds[0]}: {type(error).__name__}: {error}"


def _difference_in(made: Mapping[str, Any], given: Mapping[str, Any], part: Part) -> str:
    """_difference() in one box. `made`: what the engine made of the tensors `given`, by parameter."""
    derived = part.spec.derived
    if derived is None:
        return ""
    expected = derive(part.spec, given[derived.source.name], part.offset, part.extent)
    held = made[part.parameter].detach()
    engine = held.as_strided(part.extent, part.strides, held.storage_offset() + part.first).cpu().contiguous()
    differs = (engine.view(_bits(engine)) != expected.view(_bits(expected))).flatten().nonzero()
    if not len(differs):
        return ""
    index = int(differs[0])
    place = [at + begin for at, begin in zip(_place(index, _row_major(part.extent)), part.offset)]
    return (
        f"is quantised otherwise than by {derived.kind}: element {place} of the {derived.role} of '{derived.source.name}' is "
        f"{float(engine.flatten()[index])!r} in '{part.parameter}', and {float(expected.flatten()[index])!r} by refits"
    )


def _bits(tensor: Any) -> Any:
    import torch

    return {1: torch.uint8, 4: torch.int32}[tensor.element_size()]


def _row_major(extent: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(extent[d + 1 :]) for d in range(len(extent)))
