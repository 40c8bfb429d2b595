"""Learns an engine's layout from its own weight loader, by a dry run.

    captured = refitd.capture(model.load_weights, manifest)
    engine.register(captured)

The loader gets tensors that have names, shapes and dtypes but no storage. Views of them (narrow, view, reshape, chunk, split,
transpose, index by integers and slices, ...) are followed, copies into the engine's parameters (`copy_`, `param.data[...] =`) are
noted instead of made, and every copy becomes boxes of the global tensor and where they lie in the parameter. Nothing is written:
the engine may hold live weights. A tensor whose elements become no box, are cast or are computed with can't be delivered in place:
`Captured.unsupported` has its name with the reason; nothing is guessed.

Imports torch when used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from .._core import paused
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented
from . import Box, NotBoxes, TensorSpec, devices, first_overlap, matcher, span, view_boxes
from .memory import Memory, resolve, torch_dtype

# A loader that looks at the values of a tensor is run again without that tensor. After this many runs, capture fails.
MAX_RUNS = 64


class Copy(NamedTuple):
    """A box of a global tensor and where a loader puts it.

    `tensor_index`: into `Captured.tensors`. `first`: where the box's first element goes in the parameter's memory, in elements from the
    parameter's first; `strides`: the box's in that memory.
    """

    tensor_index: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    parameter: str
    first: int


@dataclass
class Processed:
    """A parameter that the engine post-processes: it must be filled in the loader's format and then be processed.

    `name`, `dtype`, `shape`, `strides`: of the parameter as the loader sees it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    copies: list[Copy] = field(default_factory=list)


@dataclass
class Captured:
    """The result of a dry run.

    `direct`: copies into parameters that can be written in place. `processed`: by name, parameters that can't; `place` gives them memory.
    `unsupported`: by name, why a tensor of the manifest can't be delivered; neither `direct` nor `processed` has copies of it. `ignored`:
    tensors that the loader took and copied nowhere: the engine does not want them. `tied`: tensors that share the parameter of another
    tensor, whose copies stand for both. `cast`: tensors of `unsupported` whose only obstacle is that their parameters have another dtype,
    with the names of these parameters: the loader itself can fill them. `unfilled`: parameters of which the loader filled only a part,
    and how many elements it left: padding, or elements of tensors that the manifest lacks. `untouched`: parameters that the loader did
    nothing with: buffers that no checkpoint has, or whose tensors the manifest lacks. `module`: the module that `load_weights` is a method
    of, if its own tensors are the parameters.
    """

    tensors: list[TensorSpec]
    direct: list[Copy]
    processed: dict[str, Processed]
    unsupported: dict[str, str]
    ignored: list[str]
    tied: dict[str, str]
    cast: dict[str, set[str]]
    unfilled: dict[str, int]
    untouched: list[str]
    module: Any = field(repr=False)
    _parameters: dict[str, Any] = field(repr=False)
    _loader_tensors: dict[str, Any] = field(default_factory=dict, repr=False)
    _accepted: bool = False
    _made: list[Box] | None = field(default=None, repr=False)

    def place(self, loader_tensors: Mapping[str, Any]) -> Captured:
        """Delivers processed parameters into `loader_tensors`: by name a tensor of the parameter's dtype, shape and strides.

        Raises InvalidArgument for a tensor that differs or is no processed parameter. Returns this object.
        """
        for name, tensor in loader_tensors.items():
            wanted = self.processed.get(name)
            if wanted is None:
                raise InvalidArgument(f"parameter '{name}' is not processed", culprit=f"parameter '{name}'")
            found = (resolve(tensor.dtype).name, tuple(tensor.shape), tuple(tensor.stride()))
            if found != (wanted.dtype, wanted.shape, wanted.strides):
                raise InvalidArgument(
                    f"parameter '{name}': the loader fills {wanted.dtype} {wanted.shape} with strides {wanted.strides}, the given tensor is "
                    f"{found[0]} {found[1]} with strides {found[2]}",
                    culprit=f"parameter '{name}'",
                )
        self._loader_tensors.update(loader_tensors)
        self._made = None
        return self

    def without_unsupported(self) -> Captured:
        """Lets `boxes` leave unsupported tensors out: they must reach the engine in another way. Returns this object."""
        self._accepted = True
        return self

    @property
    def parameter_names(self) -> set[str]:
        """The parameters that are written in place."""
        return {copy.parameter for copy in self.direct}

    @property
    def boxes(self) -> list[Box]:
        """The boxes to register, in the memory of the parameters and of the tensors that place() got.

        Raises FailedPrecondition where tensors are unsupported (see `without_unsupported`) or processed parameters have no place.
        """
        if self._made is None:
            self._made = self._make_boxes()
        return self._made

    def _make_boxes(self) -> list[Box]:
        if self.unsupported and not self._accepted:
            first = next(iter(self.unsupported))
            raise FailedPrecondition(
                f"{len(self.unsupported)} tensors can't be delivered in place: '{first}' {self.unsupported[first]}", tensor=first
            )
        unplaced = next((name for name in self.processed if name not in self._loader_tensors), None)
        if unplaced is not None:
            raise FailedPrecondition(
                f"{len(self.processed)} parameters are processed after loading and can't be written in place, such as '{unplaced}': "
                "give each a tensor by place()",
                culprit=f"parameter '{unplaced}'",
            )
        boxes = boxes_in(self.direct, self.tensors, self._parameters)
        for processed in self.processed.values():
            boxes += boxes_in(processed.copies, self.tensors, self._loader_tensors)
        return boxes


def capture(
    load_weights: Callable[[Iterable[tuple[str, Any]]], Any],
    manifest: Iterable[Any] | Mapping[str, Any],
    *,
    parameters: Mapping[str, Any] | None = None,
    onto: Mapping[str, Any] | None = None,
    processed: Callable[[str], bool] | Sequence[str] = (),
    tied: Mapping[str, str] | None = None,
) -> Captured:
    """Runs a loader dry and returns which box of which tensor it puts where.

    Args:
        load_weights: Called with an iterator of (name, tensor), once or more often. It must work on the calling thread, and through torch's
            operations: what it writes from other threads or through `parameter.numpy()` can't be held back.
        manifest: The tensors as trainers have them: TensorSpec or (name, dtype, shape) each, or a mapping of names to (dtype, shape) or to
            tensors.
        parameters: By name, the tensors that the loader fills; None: parameters and buffers of the module that `load_weights` is a method of.
            *Live*: they are the engine's own, in the loader's format. *Meta*: they are on device meta, and `onto` has the engine's own.
        onto: The engine's own parameters, by the same names: where dtype, shape or strides differ the parameter is processed.
        processed: Parameters that the engine post-processes with dtype, shape and strides unchanged: patterns of names with '*', or a function of
            the name.
        tied: Tensors of the manifest that share another's parameter, {"lm_head.weight": "model.embed_tokens.weight"}.

    Raises:
        InvalidArgument: The manifest or the parameters can't be used.
        Unimplemented: The loader can't be run dry.
        FailedPrecondition: The loader itself fails; `culprit` is the tensor that it took last.
    """
    specs = _specs_of(manifest)
    destinations = _Destinations(_parameters_of(load_weights) if parameters is None else parameters, onto)
    is_processed = processed if callable(processed) else matcher(processed, "processed")
    skipped: dict[str, str] = {}
    for _ in range(MAX_RUNS):
        run = _Run(specs, skipped, destinations)
        try:
            with paused():
                run.run(load_weights)
                module = getattr(load_weights, "__self__", None) if parameters is None else None
                return _captured_of(run, destinations, is_processed, tied or {}, module)
        except _ReadsValues as read:
            skipped.update(dict.fromkeys(read.names, read.why))
    raise Unimplemented(
        f"the loader looks at the values of more than {MAX_RUNS} tensors, such as '{next(iter(skipped))}'", tensor=next(iter(skipped))
    )


def _specs_of(manifest: Iterable[Any] | Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The tensors of the manifest, by name."""
    entries: Iterable[Any] = manifest
    if isinstance(manifest, Mapping):
        entries = ((name, what.dtype, what.shape) if hasattr(what, "shape") else (name, *what) for name, what in manifest.items())
    specs: dict[str, TensorSpec] = {}
    names: dict[Any, str] = {}
    for entry in entries:
        if isinstance(entry, TensorSpec):
            name, dtype, shape = entry.name, entry.dtype, entry.shape
        else:
            try:
                name, dtype, shape = entry
            except (TypeError, ValueError):
                raise InvalidArgument(f"manifest has {entry!r}, not (name, dtype, shape)", culprit="manifest") from None
        if name in specs:
            raise InvalidArgument(f"manifest has tensor '{name}' twice", tensor=name)
        known = names.get(dtype)
        if known is None:
            known = names[dtype] = resolve(dtype, f"manifest: tensor '{name}'").name
        specs[name] = TensorSpec(name, known, tuple(shape))
    return specs


def _parameters_of(load_weights: Any) -> dict[str, Any]:
    module = getattr(load_weights, "__self__", None)
    if module is None or not hasattr(module, "named_parameters"):
        raise InvalidArgument("load_weights is no method of a module: pass parameters", culprit="parameters")
    return {**dict(module.named_buffers()), **dict(module.named_parameters())}


# ---- the run ----


class _ReadsValues(Exception):
    """The loader needs the values of tensors that have none."""

    def __init__(self, names: Iterable[str], why: str) -> None:
        super().__init__(why)
        self.names = tuple(names)
        self.why = why


class _Parameter(NamedTuple):
    """A tensor that the loader fills: bytes [begin, end) of its storage."""

    begin: int
    end: int
    name: str
    tensor: Any


class _Destinations:
    """The tensors that a loader fills, found by storage and byte. `kernel`: the engine's own tensors, by name."""

    def __init__(self, parameters: Mapping[str, Any], onto: Mapping[str, Any] | None) -> None:
        self.kernel = dict(parameters if onto is None else onto)
        self.parameters = dict(parameters)
        self._by_storage: dict[int, list[_Parameter]] = {}
        self._storages = []  # kept, so that no other storage gets the address of a freed one
        self._aliases: dict[str, Any] = {}  # the parameters as they were, which `restore` compares with those now
        for name, tensor in parameters.items():
            if onto is None and tensor.device.type == "meta":
                raise InvalidArgument(f"parameter '{name}' is on device meta, and onto is not given", culprit=f"parameter '{name}'")
            if onto is not None and name not in onto:
                raise InvalidArgument(f"parameter '{name}' is not among those of onto", culprit=f"parameter '{name}'")
            begin, end = _byte_range(tensor)
            storage = tensor.untyped_storage()
            self._aliases[name] = tensor.detach()
            self._storages.append(storage)
            self._by_storage.setdefault(storage._cdata, []).append(_Parameter(begin, end, name, tensor))
        for entries in self._by_storage.values():
            entries.sort(key=lambda entry: entry[:2])

    def includes(self, tensor: Any) -> bool:
        return tensor.untyped_storage()._cdata in self._by_storage

    def find(self, tensor: Any) -> _Parameter | None:
        """The parameter in which all of `tensor` lies; None: no such parameter."""
        entries = self._by_storage.get(tensor.untyped_storage()._cdata)
        if entries is None:
            return None
        begin, end = _byte_range(tensor)
        index = bisect_right(entries, begin, key=lambda entry: entry.begin) - 1 if len(entries) > 1 else 0
        entry = entries[index]
        if not entry.begin <= begin <= end <= entry.end:
            return None
        return entry

    def restore(self) -> list[str]:
        """Undoes what the loader did to the memory and shapes of parameters; returns the names of those that it changed."""
        replaced = []
        for name, alias in self._aliases.items():
            tensor = self.parameters[name]
            if _memory_key(tensor) != _memory_key(alias):
                replaced.append(name)
                tensor.data = alias
        return replaced


def _memory_key(tensor: Any) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _byte_range(tensor: Any) -> tuple[int, int]:
    """The bytes [begin, end) of its storage that a tensor's elements lie in."""
    itemsize = tensor.element_size()
    begin = tensor.storage_offset() * itemsize
    return begin, begin + span(tensor.shape, tensor.stride()) * itemsize


class _Module:
    """The parameters and buffers, by name, of the module that `load_weights` is a method of."""

    def __init__(self, load_weights: Any) -> None:
        module: Any = getattr(load_weights, "__self__", None)
        modules = module.named_modules() if hasattr(module, "named_modules") else ()
        self._held = [(f"{name}." if name else "", held, dict(held)) for name, part in modules for held in (part._parameters, part._buffers)]

    def restore(self) -> list[str]:
        """Puts back the tensors that the loader replaced by others; returns their names."""
        replaced = []
        for prefix, held, before in self._held:
            for name, tensor in before.items():
                if held.get(name) is not tensor:
                    replaced.append(prefix + name)
                    held[name] = tensor
        return replaced


class _Event(NamedTuple):
    """A copy of a tensor into elements of a parameter, or another use of such elements.

    `first`, `sizes`, `strides`: of the elements, counted from the parameter's first. For a copy, `name` is the tensor's name, and
    `source` has the offset and strides in the tensor. For another use, `use` says which; it may change what earlier copies wrote.
    """

    name: str | None
    parameter: _Parameter
    first: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    source: tuple[int, tuple[int, ...]] | None
    use: str = ""


class _Run:
    """One dry run: what the loader copied where, in order."""

    def __init__(self, specs: Mapping[str, TensorSpec], skipped: Mapping[str, str], destinations: _Destinations) -> None:
        self.specs = specs
        self.skipped = skipped
        self.destinations = destinations
        self.events: list[_Event] = []
        self.unsupported: dict[str, str] = dict(skipped)
        self.casts: dict[str, dict[str, str]] = {}  # by tensor and parameter, why a copy casts
        self._at = ""  # the tensor that the loader took last
        self._failure: Exception | None = None  # the first error, which the loader may have caught
        self._runs = False

    def run(self, load_weights: Callable[[Iterable[tuple[str, Any]]], Any]) -> None:
        """Calls the loader, then undoes what it did to modules and parameters. Raises the first failure, though the loader may catch it."""
        import torch

        module = _Module(load_weights)
        try:
            self._runs = True
            with torch.no_grad(), _mode_class()(self):
                load_weights(self._tensors())
        except Exception as error:
            if self._failure is None:
                self._failure = FailedPrecondition(
                    f"load_weights failed at tensor '{self._at}': {type(error).__name__}: {error}", culprit=f"tensor '{self._at}'"
                )
                self._failure.__cause__ = error
        finally:
            self._runs = False
            put = module.restore()
            moved = self.destinations.restore()
        if self._failure is not None:
            raise self._failure
        for name in put:
            raise Unimplemented(f"the loader puts another tensor in the place of parameter '{name}'", culprit=f"parameter '{name}'")
        for name in moved:
            raise Unimplemented(f"the loader gives parameter '{name}' other memory", culprit=f"parameter '{name}'")

    def failed(self, error: Exception) -> Exception:
        """Notes an error, which ends the run even where the loader catches it; returns it, to be raised."""
        if self._failure is None:
            self._failure = error
        return error

    def strayed(self, names: Sequence[str], func: Any) -> Exception:
        """The error to raise for an operation on a tensor without storage that the run's mode did not see."""
        if not self._runs:
            return RuntimeError(f"{func} on a tensor without storage, after the dry run")
        return self.failed(
            Unimplemented(f"the loader uses tensor '{names[0]}' on another thread than its own, by {func}", culprit=f"tensor '{names[0]}'")
        )

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        lazy = _lazy_class()
        for name, spec in self.specs.items():
            if name in self.skipped:
                continue
            self._at = name
            meta = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
            yield name, lazy(self, meta, meta, (name,), None)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Makes tensors unsupported; a tensor keeps the first reason."""
        for name in names:
            self.unsupported.setdefault(name, why)

    def copy(self, destination: Any, source: Any) -> None:
        """Notes destination.copy_(source), where source is a tensor without storage."""
        if source.refitd_why is not None:
            return self.refuse(source.refitd_names, source.refitd_why)
        parameter = self.destinations.find(destination)
        if parameter is None:
            return self.refuse(source.refitd_names, "is copied into a tensor that is no parameter")
        if destination.element_size() != parameter.tensor.element_size():
            return self.refuse(source.refitd_names, f"is copied into parameter '{parameter.name}' seen as {destination.dtype}")
        if destination.is_neg() or destination.is_conj():
            return self.refuse(source.refitd_names, f"is computed with on its way into parameter '{parameter.name}'")
        if destination.dtype != source.dtype:
            why = f"is cast from {source.dtype} to {destination.dtype} in parameter '{parameter.name}'"
            self.casts.setdefault(source.refitd_names[0], {})[parameter.name] = why
        walk = source.refitd_walk
        if walk.shape != source.shape and destination.shape == source.shape:
            # Give the destination the shape of `walk`, in which it takes the same elements in the same order.
            try:
                destination = destination.view(walk.shape)
            except RuntimeError:
                return self.refuse(source.refitd_names, f"is reshaped in another order for parameter '{parameter.name}'")
        sizes = [n for n in walk.shape if n != 1]
        if sizes != [n for n in destination.shape if n != 1]:
            return self.refuse(
                source.refitd_names, f"is broadcast from {tuple(source.shape)} to {tuple(destination.shape)} of parameter '{parameter.name}'"
            )
        strides = tuple(s for n, s in zip(destination.shape, destination.stride()) if n != 1)
        walked = tuple(s for n, s in zip(walk.shape, walk.stride()) if n != 1)
        first = destination.storage_offset() - parameter.tensor.storage_offset()
        self.events.append(_Event(source.refitd_names[0], parameter, first, tuple(sizes), strides, (walk.storage_offset(), walked)))
        return None

    def use(self, destination: Any, use: str) -> None:
        """Notes a use of a parameter's memory that is no copy. The caller makes no writes."""
        parameter = self.destinations.find(destination)
        if parameter is None:
            raise self.failed(
                Unimplemented(
                    f"the loader uses {tuple(destination.shape)} elements across parameters' borders, at tensor '{self._at}'",
                    culprit=f"tensor '{self._at}'",
                )
            )
        if destination.element_size() != parameter.tensor.element_size():
            destination = parameter.tensor  # the whole, since the view's elements have another size than the parameter's
        first = destination.storage_offset() - parameter.tensor.storage_offset()
        self.events.append(_Event(None, parameter, first, tuple(destination.shape), tuple(destination.stride()), None, use))


@lru_cache(maxsize=1)
def _lazy_class() -> Any:
    """The class of tensors without storage, made when torch is there."""
    import torch

    class Lazy(torch.Tensor):
        """A tensor without storage that knows which elements of a global tensor it stands for.

        `refitd_meta`: a meta tensor with its shape and strides. `refitd_walk`: a meta tensor whose offset and strides say where its elements
        lie in the row-major global tensor; it is `refitd_meta` until the loader makes a copy. A copy that was reshaped may have a walk of
        another shape: then its elements are those of the walk, in row-major order. `refitd_names`: the names of the global tensors.
        `refitd_why`: why the elements are not those of the tensor any more; None: they are. `refitd_run`: the dry run that it belongs to.
        """

        __torch_function__ = torch._C._disabled_torch_function_impl

        @staticmethod
        def __new__(cls: Any, run: _Run, meta: Any, walk: Any, names: tuple[str, ...], why: str | None) -> Any:
            self = torch.Tensor._make_wrapper_subclass(
                cls, meta.shape, dtype=meta.dtype, device="cpu", strides=meta.stride(), storage_offset=meta.storage_offset()
            )
            self.refitd_meta, self.refitd_walk, self.refitd_names, self.refitd_why = meta, walk, names, why
            self.refitd_run = run
            return self

        def __init__(self, *_: Any) -> None:
            pass

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # Only the loader's own thread has the mode that sees operations.
            found = _find([*args, *(kwargs or {}).values()], cls)[0]
            raise found.refitd_run.strayed(found.refitd_names, func)

        def _read(self, *_: Any, **__: Any) -> Any:
            raise self.refitd_run.failed(_ReadsValues(self.refitd_names, "has its values read by the loader"))

        # These would read values, which there are none of.
        numpy = tolist = item = data_ptr = __array__ = __dlpack__ = _read

    return Lazy


@lru_cache(maxsize=1)
def _mode_class() -> Any:
    """The class of the mode that sees every operation of the loader, made when torch is there."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    lazy = _lazy_class()
    reshapes = {aten.view.default, aten._unsafe_view.default, aten._reshape_alias.default}
    aliases = {aten.detach.default, aten.alias.default}
    same_elements = {aten.clone.default, aten._to_copy.default, aten.lift_fresh.default, aten.contiguous.default}

    class Mode(TorchDispatchMode):
        """Sees every operation of the loader."""

        def __init__(self, run: _Run) -> None:
            super().__init__()
            self._run = run
            self._written: dict[Any, tuple[tuple[int, str], ...]] = {}

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Follows one operation. A copy into an ordinary tensor becomes boxes; reshapes, views and copies keep the elements; any other
            operation on a lazy tensor computes, and its result becomes no box."""
            kwargs = kwargs or {}
            lazies = _find(args, lazy)
            if kwargs:
                lazies += _find(kwargs.values(), lazy)
            if not lazies:
                return self._plain(func, args, kwargs)
            if func is aten.copy_.default and not isinstance(args[0], lazy):
                self._run.copy(args[0], args[1])
                return args[0]
            if func is aten._foreach_copy_.default and len(lazies) == len(args[1]) == len(_find(args[1], lazy)):
                for destination, source in zip(args[0], args[1]):
                    self._run.copy(destination, source)
                return None
            # Before views: most reshapes are views as well, but keep the order of the elements.
            if func in reshapes:
                return self._reshaped(func, lazies[0], args)
            if func.is_view and len(lazies) == 1:
                return self._view(func, lazies[0], args, kwargs)
            if func in same_elements:
                return self._copied(func, lazies[0], args, kwargs)
            # A lazy tensor has no memory that could be pinned.
            if func is aten.is_pinned.default:
                return False
            return self._computed(func, lazies, args, kwargs)

        def _plain(self, func: Any, args: Any, kwargs: Any) -> Any:
            """Carries out an operation that takes no lazy tensor; of one that writes to parameters, only notes the uses."""
            if func.is_view:
                return func(*args, **kwargs)
            written = self._written_by(func, args, kwargs)
            self._note_reads(func, args, kwargs, written)
            parameters = [target for target in written if self._run.destinations.includes(target)]
            for target in parameters:
                self._run.use(target, f"which the loader then changes there by {func}")
            return _unchanged(func, written) if parameters else func(*args, **kwargs)

        def _note_reads(self, func: Any, args: Any, kwargs: Any, written: list[Any]) -> None:
            for tensor in _find([*args, *kwargs.values()], torch.Tensor):
                if (
                    not isinstance(tensor, lazy)
                    and not any(tensor is target for target in written)
                    and self._run.destinations.includes(tensor)
                ):
                    self._run.use(tensor, f"which the loader then reads by {func}")

        def _written_by(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
            """The tensors that the operation writes to, those in lists and of `out` included."""
            places = self._written.get(func)
            if places is None:
                arguments = enumerate(func._schema.arguments)
                places = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
                self._written[func] = places
            given = [args[i] if i < len(args) else kwargs.get(name) for i, name in places]
            # The schemas of operations on lists (torch._foreach_mul_) mark no written argument: by their names it is the first.
            if not places and args and func._schema.name.startswith("aten::_foreach") and func._schema.name.endswith("_"):
                given.append(args[0])
            return _find(given, torch.Tensor)

        def _reshaped(self, func: Any, source: Any, args: Any) -> Any:
            """A reshape keeps the order of the elements, so only the shape changes."""
            meta = func(source.refitd_meta, *args[1:])
            walk = meta
            if source.refitd_walk is not source.refitd_meta:
                try:
                    walk = aten.view.default(source.refitd_walk, list(meta.shape))
                except RuntimeError:
                    # The walk's strides allow no view of that shape: it keeps its own shape, in the same order (see Lazy).
                    walk = source.refitd_walk
            return lazy(self._run, meta, walk, source.refitd_names, source.refitd_why)

        def _view(self, func: Any, source: Any, args: Any, kwargs: Any) -> Any:
            """Makes the view, and the same view of the walk if the walk has the tensor's shape."""
            metas = func(source.refitd_meta, *args[1:], **kwargs)
            why = source.refitd_why
            if source.refitd_walk is source.refitd_meta:
                walks = metas
            elif func is aten.as_strided.default:
                walks, why = metas, why or "is viewed by as_strided after it was copied"
            elif source.refitd_walk.shape == source.shape:
                walks = func(source.refitd_walk, *args[1:], **kwargs)
            elif func in aliases:
                walks = source.refitd_walk
            else:
                walks, why = metas, why or f"is reshaped in another order before {func}"
            if isinstance(metas, torch.Tensor):
                return self._viewed(metas, walks, source, why, func)
            return [self._viewed(meta, walk, source, why, func) for meta, walk in zip(metas, walks)]

        def _viewed(self, meta: Any, walk: Any, source: Any, why: str | None, func: Any) -> Any:
            if meta.dtype != source.dtype:
                why = why or f"is reinterpreted as {meta.dtype} by {func}"
            if meta.is_neg() or meta.is_conj():
                why = why or f"is an operand of {func}"
            return lazy(self._run, meta, walk, source.refitd_names, why)

        def _copied(self, func: Any, source: Any, args: Any, kwargs: Any) -> Any:
            kwargs.pop("device", None)
            kwargs.pop("pin_memory", None)
            meta = func(source.refitd_meta, *args[1:], **kwargs)
            why = source.refitd_why
            if meta.dtype != source.dtype:
                why = why or f"is cast from {source.dtype} to {meta.dtype}"
            return lazy(self._run, meta, source.refitd_walk, source.refitd_names, why)

        def _computed(self, func: Any, lazies: list[Any], args: Any, kwargs: Any) -> Any:
            """Handles an operation that computes new values from lazy tensors. New values are no elements of a checkpoint, so they can't come as
            boxes: what the operation writes is refused at once, and what it returns is, with the reason, once it is copied into a parameter."""
            names = tuple(dict.fromkeys(name for source in lazies for name in source.refitd_names))
            why = next((source.refitd_why for source in lazies if source.refitd_why), None) or f"is an operand of {func}"
            written = self._written_by(func, args, kwargs)
            self._note_reads(func, args, kwargs, written)
            for target in written:
                if not isinstance(target, lazy) and not self._run.destinations.includes(target):
                    self._run.refuse(names, f"is written into a tensor that is no parameter, by {func}")
            if written:  # other lazy views of what is written change with it
                self._run.refuse(names, why)
            for target in written:
                if not isinstance(target, lazy) and self._run.destinations.includes(target):
                    self._run.use(target, f"which the loader then changes there by {func}")
            if any(not isinstance(target, lazy) for target in written):
                return _unchanged(func, written)
            try:
                result = func(*_to_meta(args), **_to_meta(kwargs))
            except Exception:
                raise self._run.failed(_ReadsValues(names, f"has its values read by the loader, by {func}")) from None
            return _as_lazy(self._run, result, names, why)

    def _unchanged(func: Any, written: list[Any]) -> Any:
        """Returns what an operation that was not carried out would have returned: the tensors that it would have written to."""
        returns = len(func._schema.returns)
        return None if returns == 0 else written[0] if returns == 1 else tuple(written[:returns])

    def _as_lazy(run: _Run, result: Any, names: tuple[str, ...], why: str) -> Any:
        if isinstance(result, torch.Tensor):
            return lazy(run, result, result, names, why)
        if isinstance(result, (list, tuple)):
            return type(result)(_as_lazy(run, entry, names, why) for entry in result)
        return result

    def _to_meta(x: Any) -> Any:
        if isinstance(x, lazy):
            return x.refitd_meta
        if isinstance(x, torch.Tensor):
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
        if isinstance(x, torch.device):
            return torch.device("meta")
        if isinstance(x, dict):
            return {key: _to_meta(value) for key, value in x.items()}
        if isinstance(x, (list, tuple)):
            return type(x)(_to_meta(entry) for entry in x)
        return x

    return Mode


def _find(args: Iterable[Any], kind: Any) -> list[Any]:
    found = []
    for arg in args:
        if isinstance(arg, kind):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            found += _find(arg, kind)
    return found


# ---- from events to boxes ----


def _captured_of(
    run: _Run, destinations: _Destinations, is_processed: Callable[[str], bool], tied: Mapping[str, str], module: Any
) -> Captured:
    """Makes the result of the run that read no values: copies become boxes; tensors that can't be delivered become `unsupported`."""
    for name, kept in tied.items():
        if name in run.specs and kept not in run.specs:
            raise InvalidArgument(f"tensor '{name}' is tied to '{kept}', which is not in the manifest", tensor=name)
    events = [event for event in _without_repeats(run.events) if event.name is None or event.name not in tied]
    copies: dict[str, list[Copy]] = {}
    for event in events:
        if event.name is None or event.name in run.unsupported:
            continue
        try:
            copies.setdefault(event.name, []).extend(_copies_of(event, run.specs[event.name]))
        except NotBoxes as why:
            run.refuse([event.name], f"has a view that is no box in parameter '{event.parameter.name}': {why}")
    unfilled = _judge_uses(run, events)
    # Before the loop below: these tensors have no obstacle but the cast, which refuse() then records as one.
    only_cast = {name: set(found) for name, found in run.casts.items() if name not in run.unsupported}
    for name, found in run.casts.items():
        run.refuse([name], next(iter(found.values())))
    # Unsupported tensors are not listed: nobody must take them for delivered, or for not wanted.
    tensors = [spec for name, spec in run.specs.items() if name not in run.unsupported]
    used = {event.parameter.name for event in run.events}
    direct: list[Copy] = []
    processed: dict[str, Processed] = {}
    for index, spec in enumerate(tensors):
        for copy in copies.get(spec.name, ()):
            copy = copy._replace(tensor_index=index)
            if is_processed(copy.parameter) or not _same_geometry(destinations, copy.parameter):
                _processed_of(processed, destinations, copy.parameter).copies.append(copy)
            else:
                direct.append(copy)
    return Captured(
        tensors=tensors,
        direct=direct,
        processed=processed,
        unsupported=run.unsupported,
        ignored=[spec.name for spec in tensors if spec.name not in copies and spec.name not in tied],
        tied={name: kept for name, kept in tied.items() if name in run.specs},
        cast=only_cast,
        unfilled=unfilled,
        untouched=[name for name, tensor in destinations.parameters.items() if tensor.numel() and name not in used],
        module=module,
        _parameters=destinations.kernel,
    )


def _without_repeats(events: Iterable[_Event]) -> Iterator[_Event]:
    """Leaves out repeated copies: of the same elements to the same place."""
    seen = set()
    for event in events:
        if event.name is not None:
            key = (event.name, event.parameter.name, *event[2:])
            if key in seen:
                continue
            seen.add(key)
        yield event


def _copies_of(event: _Event, spec: TensorSpec) -> Iterator[Copy]:
    assert event.source is not None
    offset, strides = event.source
    for box in view_boxes(spec.shape, offset, event.sizes, strides, event.strides):
        yield Copy(-1, box.offset, box.extent, box.strides, event.parameter.name, event.first + box.first)


def _same_geometry(destinations: _Destinations, name: str) -> bool:
    loaded, kernel = destinations.parameters[name], destinations.kernel[name]
    return loaded is kernel or (loaded.dtype == kernel.dtype and loaded.shape == kernel.shape and loaded.stride() == kernel.stride())


def _processed_of(processed: dict[str, Processed], destinations: _Destinations, name: str) -> Processed:
    found = processed.get(name)
    if found is None:
        tensor = destinations.parameters[name]
        dtype = resolve(tensor.dtype, f"parameter '{name}'").name
        found = processed[name] = Processed(name, dtype, tuple(tensor.shape), tuple(tensor.stride()))
    return found


class _Used(NamedTuple):
    """A box of a parameter's memory and what is done there; `order`: when, among the events of the run."""

    offset: tuple[int, ...]
    extent: tuple[int, ...]
    name: str | None  # the tensor that is copied there; None: the box is used in another way
    order: int
    use: str


def _judge_uses(run: _Run, events: Iterable[_Event]) -> dict[str, int]:
    """Refuses tensors whose elements in a parameter are used again; returns how many elements of each parameter stay unfilled."""
    by_parameter: dict[str, tuple[_Parameter, list[_Used]]] = {}
    for order, event in enumerate(events):
        parameter = event.parameter
        uses = by_parameter.setdefault(parameter.name, (parameter, []))[1]
        dims = _memory_dims(parameter.tensor)
        try:
            boxes = view_boxes(dims, event.first, event.sizes, event.strides, event.strides)
            uses += [_Used(box.offset, box.extent, event.name, order, event.use) for box in boxes]
        except NotBoxes as why:
            if event.name is None:  # it counts as a use of all of the parameter
                uses.append(_Used((0,) * len(dims), tuple(dims), None, order, event.use))
            else:
                run.refuse([event.name], f"is copied to what is no box of parameter '{parameter.name}': {why}")
    unfilled = {}
    for name, (parameter, uses) in by_parameter.items():
        filled = _judge_parameter(run, name, uses)
        if filled < parameter.tensor.numel():
            unfilled[name] = parameter.tensor.numel() - filled
    return unfilled


def _memory_dims(tensor: Any) -> list[int]:
    """The shape of a row-major tensor in whose memory the elements of `tensor` are boxes. Its rows may be longer than the tensor's."""
    dims: list[int] = []
    outer = 0
    for stride, n in sorted(((s, n) for s, n in zip(tensor.stride(), tensor.shape) if n != 1), reverse=True):
        if not dims:
            dims.append(n)
        elif stride == 0 or outer % stride:
            return [span(tensor.shape, tensor.stride())]
        else:
            dims.append(outer // stride)
        outer = stride
    if outer > 1:
        dims.append(outer)
    return dims


def _judge_parameter(run: _Run, name: str, uses: Sequence[_Used]) -> int:
    """Refuses tensors whose boxes another use overlaps; returns how many elements copies fill."""
    copies = [use for use in uses if use.name is not None and use.name not in run.unsupported]
    while (overlap := first_overlap((use.offset, use.extent) for use in copies)) is not None:
        names = list(dict.fromkeys(use.name for use in copies if use.name is not None and use.offset in overlap))
        run.refuse(
            names,
            f"is copied to elements of parameter '{name}' that are written more than once, by {', '.join(map(repr, names[:3]))}"
            + ("; if these tensors are tied, pass tied" if len(names) > 1 else ""),
        )
        copies = [use for use in copies if use.name not in names]
    for other in (use for use in uses if use.name is None):
        for copy in copies:
            if copy.order < other.order and first_overlap([copy[:2], other[:2]]) is not None:
                assert copy.name is not None
                run.refuse([copy.name], f"is copied to parameter '{name}', {other.use}")
    return sum(prod(copy.extent) for copy in copies if copy.name not in run.unsupported)


def boxes_in(copies: Sequence[Copy], tensors: Sequence[TensorSpec], parameters: Mapping[str, Any]) -> list[Box]:
    memories: dict[str, tuple[Memory, int]] = {}
    boxes = []
    for copy in copies:
        found = memories.get(copy.parameter)
        if found is None:
            found = memories[copy.parameter] = _memory_of(copy.parameter, parameters[copy.parameter])
        memory, itemsize = found
        boxes.append(Box(copy.tensor_index, copy.offset, copy.extent, copy.strides, memory, copy.first * itemsize))
    return boxes


def _memory_of(name: str, tensor: Any) -> tuple[Memory, int]:
    itemsize = tensor.element_size()
    nbytes = span(tensor.shape, tensor.stride()) * itemsize
    if tensor.untyped_storage().nbytes() < tensor.storage_offset() * itemsize + nbytes or tensor.device.type == "meta":
        raise FailedPrecondition(f"parameter '{name}' has no memory: it was freed, or is on device meta", culprit=f"parameter '{name}'")
    what = f"parameter '{name}'"
    pointer_now = tensor.data_ptr
    return devices.memory_at(tensor.device, pointer_now(), nbytes, tensor, name, pointer_now, what=what), itemsize
