"""All that this package knows of SGLang's inside (0.5.23): hooks, the loader's format of parameters, processing after loading."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import FailedPrecondition
from ...serving.delivery import ATTRIBUTE, Snapshot, changes, keep_memory, tensors_of

# The attribute of a model whose parameters had the loader's format while the evidence was gathered: {id of module: {name: meta tensor}}.
_FORMATS = "_refitd_formats"
_MANAGER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_LOADER = "sglang.srt.model_loader.loader"
_SERVER = "sglang.srt.entrypoints.http_server"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"


def register_hooks() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.update_weights_from_tensor", _update, HookType.AROUND)
    HookRegistry.register(f"{_LOADER}.post_load_weights", _loaded, HookType.AFTER)
    HookRegistry.register(f"{_LOADER}.DummyModelLoader.load_model", _load_model, HookType.AROUND)
    HookRegistry.register(f"{_SERVER}._setup_and_run_http_server", _serve, HookType.AROUND)
    HookRegistry.register(f"{_TOKENIZER}.release_memory_occupation", _release, HookType.AROUND)
    HookRegistry.register(f"{_TOKENIZER}.resume_memory_occupation", _resume, HookType.AROUND)


def _update(original: Any, manager: Any, request: Any) -> Any:
    if request.load_format != "refitd":
        return original(manager, request)
    from .scheduler import answer

    return answer(manager, request)


def _serve(original: Any, *arguments: Any, **options: Any) -> Any:
    from .controls import serve

    return serve(original, *arguments, **options)


def _release(original: Any, manager: Any, *arguments: Any) -> Any:
    from .controls import SLEEP

    sleep = getattr(manager, SLEEP, None)
    return original(manager, *arguments) if sleep is None else sleep.release(original, manager, *arguments)


def _resume(original: Any, manager: Any, *arguments: Any) -> Any:
    from .controls import SLEEP

    sleep = getattr(manager, SLEEP, None)
    return original(manager, *arguments) if sleep is None else sleep.resume(original, manager, *arguments)


# ---- evidence: what changes between loading and the end of post-processing ----

# While a model is being loaded, this list has the snapshots of its modules and the formats of their parameters; else it is empty.
_loading: list[Any] = []


def _load_model(original: Any, loader: Any, **options: Any) -> Any:
    _loading.clear()
    model = original(loader, **options)
    if _loading:
        snapshots, formats = _loading
        object.__setattr__(model, ATTRIBUTE, {id(layer): changes(layer, before) for layer, before in snapshots})
        object.__setattr__(model, _FORMATS, formats)
        _loading.clear()
    return model


def _loaded(result: None, model: Any) -> None:
    """Runs after random weights were made, and before modules are post-processed. At updates this does nothing that matters."""
    if hasattr(model, ATTRIBUTE):
        return
    _loading[:] = [
        [(layer, Snapshot.of(layer)) for layer in model.modules()],
        {id(layer): {name: _on_meta(t) for name, t in _tensors(layer)} for layer in model.modules()},
    ]


def _tensors(layer: Any) -> list[tuple[str, Any]]:
    return [(name, t) for name, t in (*layer._parameters.items(), *layer._buffers.items()) if t is not None]


def _on_meta(tensor: Any) -> Any:
    """The same kind of tensor without storage, with the attributes by which loaders find their place."""
    import torch

    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    if isinstance(tensor, torch.nn.Parameter):
        made = torch.Tensor._make_subclass(type(tensor), made, False)
    made.__dict__.update(tensor.__dict__)
    return made


# ---- what refitd.serving.delivery asks ----


class LoaderFormat:
    """Within this block a model has the parameters that its loader fills, on device meta; then its own again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._own: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def __enter__(self) -> None:
        formats = getattr(self._model, _FORMATS, {})
        placed: dict[int, Any] = {}  # a tied parameter stays one
        for layer in self._model.modules():
            self._own.append((layer, dict(layer._parameters), dict(layer._buffers)))
            known = formats.get(id(layer), {})
            for held in (layer._parameters, layer._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        held[name] = placed.setdefault(id(tensor), known.get(name) if name in known else _on_meta(tensor))

    def __exit__(self, *_: object) -> None:
        for layer, parameters, buffers in self._own:
            layer._parameters.clear()
            layer._parameters.update(parameters)
            layer._buffers.clear()
            layer._buffers.update(buffers)


def is_attention(layer: Any) -> bool:
    """No layer of SGLang's is post-processed after all others: `post_load_weights` of the model does that."""
    return False


def is_made_later(layer: Any, name: str) -> bool:
    return False


def is_tied(model: Any, module: Any, name: str) -> bool:
    return False


def only_prepacks(layer: Any) -> bool:
    """No layer of SGLang's is processed but by its reload."""
    return False


def is_vocabulary(layer: Any) -> bool:
    """Whether the layer's rows are padded beyond the vocabulary."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


# ---- processing ----


def reload(model: Any, tensors: Iterable[tuple[str, Any]], wanted: Mapping[str, Any]) -> None:
    """Loads `tensors`, in the checkpoint's format, and post-processes the modules `wanted`, as SGLang's own weight updates do with
    all; what they get goes into their old storage. Raises FailedPrecondition that names a module that takes another shape."""
    methods: dict[str, Any] = {name: getattr(layer, "quant_method", None) for name, layer in wanted.items()}
    before = {name: tensors_of(layer) for name, layer in wanted.items()}
    for name, layer in wanted.items():
        restore = getattr(methods[name], "restore_weights_before_loading", None)
        if restore is not None:
            restore(layer)
    model.load_weights(iter(tensors))
    for name, layer in wanted.items():
        if methods[name] is not None:
            methods[name].process_weights_after_loading(layer)
        keep_memory(layer, before[name])
        for held, old in before[name].items():
            if tensors_of(layer).get(held) is not old:
                raise FailedPrecondition(
                    f"'{name}.{held}' ({type(layer).__name__}) has another shape or dtype after SGLang loaded it again: new weights "
                    "can't be put where kernels read them",
                    culprit=f"parameter '{name}.{held}'",
                )


def finish(model: Any) -> None:
    """Makes anew what models derive from all their weights, as after any load that did not go through `load_weights`."""
    from sglang.srt.model_loader.loader import post_load_weights

    post_load_weights(model)
