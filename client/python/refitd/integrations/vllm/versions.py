"""All that differs between versions of vLLM (0.22 to 0.33), and every name that this package takes from vLLM's inside, but for those by which
the proof runs a model (`backend.py`).

The load format `refitd`: an engine starts with random weights, reads no checkpoint, and gets its first version from refitd.

While vLLM loads, this format also gathers the evidence of refitd.serving.delivery: it knows the moment between loading and post-processing.

Weights in the memory of vLLM's sleep mode (`enable_sleep_mode` on a GPU), which only vLLM's own process can open.

vLLM's allocator makes this memory by cuMemCreate without asking for handles that other processes can import, so that no daemon could write
it. It is made for the sake of unmapping: the addresses stay reserved, and memory comes and goes beneath them. So `make_exportable` puts
memory that can be exported beneath the addresses of the weights. CUDA graphs keep their addresses, and vLLM unmaps and releases the new
memory as its own when it sleeps. What vLLM maps when it wakes up is memory of its own kind again.
"""

from __future__ import annotations

import functools
import inspect
import secrets
import sys
import weakref
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from ctypes import c_uint64
from typing import Any

from ...errors import FailedPrecondition
from ...layout import devices
from ...layout.placement import like
from ...serving import Settings
from ...serving.derived import Quantised, of_experts
from ...serving.evidence import Snapshot, note_changes
from ...serving.proof import gathered, union_over

# The attribute of a model that has vLLM's configuration, which backends of vLLM until 0.24 are not given.
CONFIG_ATTRIBUTE = "_refitd_vllm_config"


def register_backend(name: str, module: str, class_name: str) -> None:
    """Makes the class a weight-transfer backend of vLLM, in this process, under `name`."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as Factory

    if name not in Factory._registry:  # a second registration raises, and vLLM may load plugins more than once
        Factory.register_engine(name, module, class_name)


# A tag with which vLLM's `wake_up` leaves the scheduler paused.
STAY_PAUSED = "refitd:stay-paused"


def let_wake_up_stay_paused() -> None:
    """Makes vLLM's engine core, in the process that runs it, take the tag STAY_PAUSED. By itself `wake_up` resumes the scheduler, also over
    weights that sleep of level 2 discarded; a pause that is sent beside that call may come before it, or a step too late."""
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.wake_up
    if hasattr(original, "__wrapped__"):  # vLLM may load plugins more than once
        return

    @functools.wraps(original)
    def wake_up(core: Any, tags: list[str] | None = None) -> Any:
        if tags is None or STAY_PAUSED not in tags:
            return original(core, tags)
        core.resume_scheduler = _do_nothing  # until the call returns, in place of the method of the class
        try:
            return original(core, [tag for tag in tags if tag != STAY_PAUSED] or None)
        finally:
            del core.resume_scheduler

    EngineCore.wake_up = wake_up


def _do_nothing() -> None:
    pass


def check_awake(awake: Any) -> None:
    """Raises FailedPrecondition unless `wake_up` with STAY_PAUSED, which returned `awake`, woke the engine. Versions whose `wake_up`
    has no result return None."""
    if awake is False:
        raise FailedPrecondition("vLLM's engine core did not wake up: the plugin refitd is not loaded in its process (VLLM_PLUGINS)")


# Methods of vLLM's workers, for `collective_rpc`: what the rank holds (rank.Rank.held), and to process a portion (rank.Rank.ahead).
HELD, PROCESS_AHEAD = "refitd_held", "refitd_process_ahead"


def add_worker_methods() -> None:
    """Adds HELD and PROCESS_AHEAD to vLLM's workers in this process: vLLM passes nothing on that a backend returns. It carries them out between two
    steps."""
    from vllm.v1.worker.worker_base import WorkerBase

    setattr(WorkerBase, HELD, lambda worker: worker.weight_transfer_engine.rank.held())
    setattr(WorkerBase, PROCESS_AHEAD, lambda worker, update_id: worker.weight_transfer_engine.rank.ahead(update_id))


def let_failures_be_read_whole() -> None:
    """Makes vLLM's executor, in the process that runs the engine core, read the answers of all ranks where one has failed. By itself it stops at the
    first failure, and takes the other ranks' answers for those of its next call: a rank that fails then goes unnoticed (P1)."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    original = MultiprocExecutor.collective_rpc
    if hasattr(original, "__wrapped__"):  # vLLM may load plugins more than once
        return

    @functools.wraps(original)
    def collective_rpc(executor: Any, *arguments: Any, **options: Any) -> Any:
        queues = executor.response_mqs
        executor.response_mqs = _Answers(queues)  # which the call keeps, also where its answers are read later
        try:
            return original(executor, *arguments, **options)
        finally:
            executor.response_mqs = queues

    MultiprocExecutor.collective_rpc = collective_rpc


class _Answers(list[Any]):
    """The queues of the ranks' answers. A loop over them that meets a failure has read the answers of all ranks."""

    def __iter__(self) -> Iterator[Any]:
        return (_Answer(self[number], self[number + 1 :]) for number in range(len(self)))


class _Answer:
    def __init__(self, queue: Any, later: list[Any]) -> None:
        self._queue, self._later = queue, later

    def dequeue(self, **options: Any) -> tuple[Any, Any]:
        status, result = self._queue.dequeue(**options)
        if status.name != "SUCCESS":
            for queue in self._later:
                queue.dequeue(**options)
        return status, result


# Finds what the daemon keeps of a worker's rank (refitd.serving.rank.Kept; None: nothing), by vLLM's parallel config and the weights' device.
FindKept = Callable[[Any, Any], Any]


def register_load_format(find_kept: FindKept) -> None:
    """Adds the load format `refitd` to vLLM in this process."""
    from vllm.model_executor import model_loader

    if "refitd" not in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        model_loader.register_model_loader("refitd")(_loader_class(find_kept))


def init_arguments(arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """(parallel config, vLLM's config or None) of a backend's constructor: until 0.24 it got (parallel_config, model), since 0.25
    (vllm_config, device, model)."""
    config = arguments[0]
    return (config, None) if len(arguments) == 2 else (config.parallel_config, config)


def layer_info(layer: Any) -> Any:
    """vLLM's record of a layer, with the parameters that its loader fills as tensors on device meta."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    return get_layerwise_info(layer)


class LoaderFormat:
    """Within this block a model has the parameters that its loader fills, on device meta; then its own again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._placed: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        from vllm.model_executor.model_loader.reload import meta, utils

        for layer in self._model.modules():
            info = layer_info(layer)
            info.kernel_tensors = utils.get_layer_params_buffers(layer)
            if hasattr(info, "kernel_non_persistent_buffers"):  # since 0.27
                info.kernel_non_persistent_buffers = set(layer._non_persistent_buffers_set)
            self._placed.append((layer, info))
            meta.restore_layer_on_meta(layer, info)
            for tensor in (*layer._parameters.values(), *layer._buffers.values()):
                _unwrap_loader(tensor)

    def __exit__(self, *_: object) -> None:
        from vllm.model_executor.model_loader.reload import layerwise

        for layer, info in self._placed:
            layerwise._place_kernel_tensors(layer, info)
            info.reset()


def _unwrap_loader(tensor: Any) -> None:
    """Gives a parameter its own loader back. A reload leaves vLLM's wrapper in its place, which loads nothing outside of a reload."""
    loader: Any = getattr(tensor, "weight_loader", None)
    own = loader
    while getattr(own, "__name__", "") == "online_process_loader" and hasattr(own, "__wrapped__"):
        own = own.__wrapped__
    if own is not loader:
        tensor.weight_loader = own


def is_tied(model: Any, module: Any, name: str) -> bool:
    """Whether another module has the module's own parameter (that before LoaderFormat) as well."""
    kernel = layer_info(module).kernel_tensors[0].get(name)
    return kernel is not None and sum(
        1 for other in model.modules() for tensor in layer_info(other).kernel_tensors[0].values() if tensor is kernel
    ) > 1


def _redirect(wanted: Mapping[str, Any], into: Mapping[str, tuple[dict[str, Any], dict[str, Any]]]) -> list[tuple[Any, Any]]:
    """Lets a reload that has begun put results into `into`. vLLM leaves some tensors as they are, biases among them, and loads them in place: the
    layers get copies of these. Returns these copies, each after the tensor in `into` that gets its bytes when the reload has ended."""
    copies = []
    for name, results in into.items():
        layer = wanted[name]
        layer_info(layer).kernel_tensors = results
        for held, result in zip((layer._parameters, layer._buffers), results):
            for key, tensor in held.items():
                if tensor is not None and not tensor.is_meta and key in result:
                    held[key] = like(tensor, tensor.detach().clone())
                    copies.append((result[key], held[key]))
    return copies


def end_reload(layers: Iterable[Any]) -> None:
    """Makes vLLM's record of the layers as it is between two reloads, also where an exception left it half done: the next reload would go on
    with it."""
    for layer in layers:
        layer_info(layer).reset()


class _Layers:
    """Stands for a model of which a reload sees only these layers."""

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers = list(layers)

    def modules(self) -> list[Any]:
        return self._layers


def reload(
    model: Any,
    model_config: Any,
    device: Any,
    tensors: Iterable[tuple[str, Any]],
    wanted: Mapping[str, Any],
    must: bool = True,
    into: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] | None = None,
) -> list[str]:
    """Loads `tensors`, in the checkpoint's format, as vLLM's own weight updates do: each layer is filled in the loader's format,
    post-processed, and copied into its old storage. Layers that get no tensor keep theirs.

    `wanted`: by name, the layers that must be post-processed. Returns the layers that were not: their loader writes past what vLLM
    counts, so that vLLM drops what was loaded. With `must`, raises FailedPrecondition instead, which names one of them. `into`: by name
    of a wanted layer, parameters and buffers that get the result in place of its own, which the caller then gives back to it, and calls
    end_reload(); `tensors` go to wanted layers only.
    """
    import torch
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    if device.type == "cpu":
        kernels = _let_experts_prepack(wanted.values())
    layers = model if into is None else _Layers(wanted.values())
    # Newer releases of vLLM remember the device. Within torch.device(...), torch.compile of their quantisation recurses without end.
    knows = all(getattr(layer_info(layer), "restore_device", None) is not None for layer in wanted.values())
    with nullcontext() if knows else torch.device(device):
        initialize_layerwise_reload(layers)
        copies = _redirect(wanted, into or {})
        try:
            model.load_weights(iter(tensors))
            missed = [name for name, layer in wanted.items() if layer_info(layer).can_load() and layer_info(layer).load_numel <= 0]
        finally:
            finalize_layerwise_reload(layers, model_config)
    with torch.no_grad():
        for result, copy in copies:
            result.copy_(copy)
    if device.type == "cpu":
        for method, kernel in kernels:
            if method.moe_kernel is None:
                method.moe_kernel = kernel
    if missed and must:
        raise FailedPrecondition(
            f"vLLM's reload passes over {len(missed)} modules that are changed after loading, such as '{missed[0]}' "
            f"({type(wanted[missed[0]]).__name__}): new weights do not get there",
            culprit=f"module '{missed[0]}'",
        )
    return missed


def _let_experts_prepack(layers: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Makes mixtures of experts on a CPU prepack again: vLLM prepacks them only while they have no kernel, on the first load.
    Returns the kernels that they had."""
    kernels = []
    for layer in layers:
        method: Any = getattr(layer, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            kernels.append((method, method.moe_kernel))
            method.moe_kernel = None
    return kernels


def only_prepacks(layer: Any) -> bool:
    """Whether post-processing on a CPU makes a copy of the layer's parameters for its kernel, and changes nothing else that matters."""
    return type(getattr(layer, "quant_method", None)).__name__ in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")


# By name of the class of a quantisation method, what it makes of weights when they are loaded.
_QUANTISED = {
    "Fp8PerBlockOnlineLinearMethod": (Quantised("fp8_block", "weight", "weight_scale_inv"),),
    "Fp8PtpcOnlineLinearMethod": (Quantised("fp8_channel", "weight", "weight_scale", transposed=True),),
    "Fp8PerBlockOnlineMoEMethod": of_experts("fp8_block", "weight_scale_inv"),
    "Fp8PtpcOnlineMoEMethod": of_experts("fp8_channel", "weight_scale"),
}
# Likewise, of methods for checkpoints that are quantised in blocks.
_LOADED = {"Fp8LinearMethod": (Quantised(None, "weight", "weight_scale_inv"),), "Fp8MoEMethod": of_experts(None, "weight_scale_inv")}


def quantised(layer: Any) -> tuple[Quantised, ...]:
    """What the layer's quantisation method makes of weights; none where refits have no such kind."""
    method: Any = getattr(layer, "quant_method", None)
    in_blocks = list(getattr(method, "weight_block_size", None) or ()) == [128, 128]
    return (_LOADED if in_blocks and type(method).__name__ in _LOADED else _QUANTISED).get(type(method).__name__, ())


@contextmanager
def prepacked(layers: Iterable[tuple[Any, Mapping[str, Any], tuple[dict[str, Any], dict[str, Any]] | None]]) -> Iterator[None]:
    """Post-processes layers that only prepack, as after they were loaded: their kernels then read a new copy of the given parameters,
    which have the loader's format. Within the block the layers have what post-processing left of these parameters, for attention layers
    that read them; afterwards, also after an exception, the parameters that they had before. The third of a layer: what refitd.serving.ahead
    has packed of these parameters already; None: nothing.

    The packed copy of an embedding is read only where the embedding is the output layer as well. So embeddings are prepacked when their
    copy is first read.
    """
    before = []
    try:
        for layer, filled, packed in layers:
            own = dict(layer._parameters)
            if packed is None and type(layer).__name__ == "VocabParallelEmbedding" and all(own[name] is filled[name] for name in filled):
                layer.cpu_linear = functools.partial(_prepack_at_first_use, layer)
                continue
            before.append((layer, own))
            layer._parameters.update(filled)
            if packed is None:
                layer.quant_method.process_weights_after_loading(layer)
            else:
                replaced, left = packed
                vars(layer).update(replaced)
                layer._parameters.update(left)
        yield
    finally:
        for layer, own in before:
            layer._parameters.update(own)


def is_unused(layer: Any) -> bool:
    """Whether the packed copy of an embedding has not been read since the last version."""
    return getattr(getattr(layer, "cpu_linear", None), "func", None) is _prepack_at_first_use


def _prepack_at_first_use(layer: Any, *arguments: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer.cpu_linear(*arguments)


def is_attention(layer: Any) -> bool:
    """Whether vLLM post-processes the layer after all others, with values of other layers."""
    from vllm.model_executor.layers import attention

    if hasattr(attention, "is_deferred_attention_layer"):
        return bool(attention.is_deferred_attention_layer(layer))
    kinds = tuple(getattr(attention, name) for name in ("Attention", "MLAAttention", "MMEncoderAttention") if hasattr(attention, name))
    return isinstance(layer, kinds) and hasattr(layer, "process_weights_after_loading")


def is_made_later(layer: Any, name: str) -> bool:
    """Whether the attention layer has the parameter only since it was post-processed."""
    return is_attention(layer) and name.rpartition(".")[2] not in layer_info(layer).restore_metadata[0]


def is_vocabulary(layer: Any) -> bool:
    """Whether the layer's rows are padded beyond the vocabulary."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    return isinstance(layer, VocabParallelEmbedding)


def weights_of_sleep_mode() -> list[tuple[int, int, int, int]]:
    """The allocations of weights that vLLM's allocator of sleep mode has mapped on NVIDIA's GPUs: for each the device's number, bytes, address,
    and the place where the driver's handle (CUmemGenericAllocationHandle) is kept. [] without sleep mode."""
    module = sys.modules.get("vllm.device_allocator.cumem")
    allocator = None if module is None else module.CuMemAllocator.instance
    if allocator is None:
        return []
    found = (data for data in allocator.pointer_to_data.values() if data.tag == "weights" and not getattr(data, "is_asleep", False))
    return [data.handle for data in found if isinstance(data.handle[3], int)]  # a list on AMD's GPUs


def current_config(vllm_config: Any) -> Any:
    from vllm.config import set_current_vllm_config

    return set_current_vllm_config(vllm_config)


def start_arguments(start: Callable[..., Any]) -> dict[str, Any]:
    """Arguments of `start_weight_update` that keep vLLM from reloading by itself: until 0.24 it did so outside of the backend."""
    return {"is_checkpoint_format": False} if "is_checkpoint_format" in inspect.signature(start).parameters else {}


def finish_arguments(finish: Callable[..., Any], version: int) -> tuple[Any, ...]:
    """Arguments of `finish_weight_update`: since 0.27 it takes the version, as text."""
    return (str(version),) if inspect.signature(finish).parameters else ()


def check_experts_stay(parallel: Any) -> None:
    """Raises FailedPrecondition, which names the setting of a parallel config, where vLLM balances the load of experts: it moves them after
    they are registered, so that new weights would get into other experts (P11)."""
    redundant = getattr(getattr(parallel, "eplb_config", None), "num_redundant_experts", 0) or getattr(parallel, "num_redundant_experts", 0)
    setting = "enable_eplb" if getattr(parallel, "enable_eplb", False) else "num_redundant_experts" if redundant else None
    if setting is not None:
        raise FailedPrecondition(
            f"vLLM was started with {setting}: it moves experts between ranks while it runs, so that new weights would get into other experts",
            culprit=setting,
        )


def draft_of(vllm_config: Any) -> str | None:
    """The method of speculative decoding, where it has weights of its own."""
    method = getattr(getattr(vllm_config, "speculative_config", None), "method", None)
    return None if method in (None, "ngram", "ngram_gpu", "suffix") else str(method)


def give_draft(engine: Any, vllm_config: Any) -> list[Any]:
    """Makes the calls by which vLLM's backends get the draft model, if there is one; returns what an asynchronous engine awaits."""
    if draft_of(vllm_config) is None or not hasattr(engine, "start_draft_weight_update"):
        return []
    return [engine.start_draft_weight_update(), engine.finish_weight_update()]


def finish(engine: Any, version: int) -> list[Coroutine[Any, Any, Any]]:
    """The calls to an asynchronous engine that end an update. Where vLLM labels tokens (since 0.27), the label is a call of its own
    here: `finish_weight_update(version)` sends it only when its first call was answered."""
    if hasattr(engine, "update_weight_version"):
        return [engine.finish_weight_update(), engine.update_weight_version(str(version))]
    return [engine.finish_weight_update(*finish_arguments(engine.finish_weight_update, version))]


class Salts:
    """Keeps requests that were accepted between two updates apart from all others in the prefix cache of one engine: each gets a `cache_salt`, by
    which vLLM's blocks are found. A request's own salt is a part of it. `renew` must be called while the engine computes nothing, before weights
    change; requests that came before it keep their salt to the end.

    The salt begins with a number of this process's own, so that engines that share blocks by a KV connector find none of each other's: they do not
    take a version at one moment.
    """

    def __init__(self, client: Any) -> None:
        """`client`: that by which vLLM sends requests to its engine core."""
        self._process, self._updates = secrets.token_hex(8), 0
        if hasattr(client, "add_request"):
            self._salt(client, "add_request")
        if hasattr(client, "add_request_async"):
            self._salt(client, "add_request_async")

    def renew(self) -> None:
        self._updates += 1

    def _salt(self, client: Any, name: str) -> None:
        """Salts what the client's method sends; the call sends it before it waits for anything."""
        original = getattr(client, name)

        def add_request(request: Any) -> Any:
            request.cache_salt = f"refitd:{self._process}:{self._updates}:{request.cache_salt or ''}"
            return original(request)

        setattr(client, name, add_request)


async def pause(engine: Any, mode: str) -> None:
    """Does what `pause_generation` of an asynchronous engine does, without the 20 ms that vLLM sleeps afterwards. vLLM's source says that no
    caller needs this sleep to be right."""
    core = getattr(getattr(engine, "engine_core", None), "pause_scheduler_async", None)
    if core is None:
        await engine.pause_generation(mode=mode, clear_cache=False)
    else:
        await core(mode=mode, clear_cache=False)


def _loader_class(find_kept: FindKept) -> Any:
    """vLLM's loader of random weights, with the evidence."""
    import torch
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    class RefitdModelLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            # Loading a checkpoint changes neither buffers that it lacks, nor the parameters that attention layers have for scales.
            kept = [tensor for layer in model.modules() for tensor in layer._buffers.values()]
            kept += [tensor for layer in model.modules() if is_attention(layer) for tensor in layer._parameters.values()]
            values = [(tensor, tensor.detach().clone()) for tensor in kept if tensor is not None]
            early: dict[int, Snapshot] = {}
            with _before_quantising(model, early):
                super().load_weights(model, model_config)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            if getattr(model_config, "runner_type", "") == "draft":
                from .draft import keep_own_parts

                keep_own_parts(model, Settings.of().manifest, self._speculation)
            self._before = [(layer, early.get(id(layer)) or Snapshot.of(layer)) for layer in model.modules()]

        def load_model(self, vllm_config: Any, *arguments: Any, **options: Any) -> Any:
            self._speculation = vllm_config.speculative_config
            model = super().load_model(vllm_config, *arguments, **options)
            find = functools.partial(find_kept, vllm_config.parallel_config, next(model.parameters()).device)
            note_changes(model, self._before, find if Settings.of().in_arenas else None, sys.modules[__name__])
            object.__setattr__(model, CONFIG_ATTRIBUTE, vllm_config)
            del self._before
            return model

    return RefitdModelLoader


@contextmanager
def _before_quantising(model: Any, found: dict[int, Snapshot]) -> Iterator[None]:
    """Within the block layers that quantise leave a snapshot in `found`, by id, before they do so: vLLM quantises each as soon as it is loaded."""

    def watch(layer: Any, method: Any) -> None:
        original = method.process_weights_after_loading

        def watched(layer: Any) -> None:
            found.setdefault(id(layer), Snapshot.of(layer))
            original(layer)

        method.process_weights_after_loading = watched  # of the object, in place of the method of the class

    methods = [(layer, layer.quant_method) for layer in model.modules() if any(each.kind for each in quantised(layer))]
    for layer, method in methods:
        watch(layer, method)
    try:
        yield
    finally:
        for _, method in methods:
            vars(method).pop("process_weights_after_loading", None)


def place(config: Any, instance: str, workers: int = 0) -> tuple[int, int, str]:
    """Rank, number of ranks and instance of a worker, without the driver, from vLLM's parallel config.

    `workers`: how many ranks all replicas of the server have, as its driver knows; 0: as many as the config has. In a worker of a dense
    model the config has one replica, whatever the server has, and only `data_parallel_index` tells it from others.
    """
    if by_external_launcher(config):
        return config.rank, config.world_size, instance
    if getattr(config, "data_parallel_external_lb", False) or getattr(config, "data_parallel_hybrid_lb", False):
        return config.rank % config.world_size, config.world_size, f"{instance}-dp{config.data_parallel_index}"
    replicas = workers // config.world_size if workers else config.data_parallel_size
    index = getattr(config, "data_parallel_index", 0) if replicas > 1 else 0
    return index * config.world_size + config.rank, replicas * config.world_size, instance


def make_exportable(device_type: str) -> int:
    """Makes all weights in memory of vLLM's sleep mode exportable; they keep their addresses and bytes. Returns how many bytes were
    not exportable before. Nothing may run on the device meanwhile. `device_type`: of the weights' device in torch.

    Raises FailedPrecondition where the device lacks the memory for a second copy of the largest allocation.
    """
    kind = devices.kind_of_type(device_type)
    if kind is None:
        return 0
    changed = 0
    for index, nbytes, base, where in weights_of_sleep_mode():
        handle = c_uint64.from_address(where)  # vLLM's allocator takes it from there when it unmaps
        made = kind.make_exportable(index, base, nbytes, handle.value)
        changed += nbytes if made != handle.value else 0
        handle.value = made
    return changed


# ---- what the configuration says ----

# The update by which workers only detach.
LEAVE = {"leave": True}


def gather(value: Any) -> list[Any]:
    """The values of all ranks of this process's model; each must call this alike."""
    from vllm.distributed.parallel_state import get_world_group

    return gathered(get_world_group(), value)


def agree(names: set[str]) -> set[str]:
    """The union of the names that all tensor-parallel ranks pass; each must call this alike."""
    from vllm.distributed.parallel_state import get_tp_group

    return union_over(get_tp_group(), names)


def by_external_launcher(parallel: Any) -> bool:
    """Whether an external launcher started vLLM. The config's world_size and rank then count the ranks of all data-parallel replicas."""
    return bool(parallel.distributed_executor_backend == "external_launcher")


def world_size_of(config: Any) -> int:
    """How many workers' ranks the instance has; the same rule as place()."""
    parallel = config.parallel_config
    if by_external_launcher(parallel):
        return int(parallel.world_size)
    if getattr(parallel, "data_parallel_external_lb", False) or getattr(parallel, "data_parallel_hybrid_lb", False):
        return int(parallel.world_size)
    return int(parallel.data_parallel_size * parallel.world_size)


def device_of(config: Any) -> str:
    """The type in torch of the device that vLLM runs on."""
    return str(config.device_config.device_type)


def starts_clean(config: Any) -> bool:
    """Whether vLLM loaded a checkpoint, and no random weights."""
    return str(getattr(config.load_config.load_format, "value", config.load_config.load_format)) not in ("dummy", "refitd")


def check_backend(config: Any, cache: str = "reset") -> None:
    """Raises FailedPrecondition where an engine of this configuration can't follow a group. `cache`: as of Settings."""
    check_experts_stay(config.parallel_config)
    draft = draft_of(config)
    if draft is not None and config.parallel_config.pipeline_parallel_size > 1:
        raise FailedPrecondition(
            f"vLLM was started with a draft model (speculative_config, method '{draft}') and pipeline_parallel_size "
            f"{config.parallel_config.pipeline_parallel_size}: the last stage alone has the draft",
            culprit="speculative_config",
        )
    if cache == "version" and getattr(config, "kv_transfer_config", None) is not None:
        raise FailedPrecondition(
            "cache: 'version' with a KV connector (kv_transfer_config), of which some find blocks without their cache_salt: set REFITD_CACHE=reset", culprit="cache"
        )
    transfer = config.weight_transfer_config
    if transfer is None or transfer.backend != "refitd":
        raise FailedPrecondition('vLLM was started without --weight-transfer-config \'{"backend": "refitd"}\'')


def check_api_servers(config: Any) -> None:
    """Raises FailedPrecondition where several processes answer for the engine: each would drive it, and know only the pauses that it made."""
    count = getattr(config.parallel_config, "_api_process_count", 1)
    if count > 1:
        raise FailedPrecondition(
            f"vLLM has {count} API server processes (by default as many as data-parallel ranks): start it with --api-server-count 1",
            culprit="api_server_count",
        )


# The backend that vLLM made in this worker's process, for frameworks to whose code in the worker vLLM does not pass it.
_backend: Callable[[], Any] = lambda: None  # noqa: E731


def set_backend(backend: Any) -> None:
    """Notes the backend. The backend calls this when vLLM makes it."""
    global _backend
    _backend = weakref.ref(backend)


def backend_here() -> Any:
    """The backend of this process's vLLM worker; None where vLLM has none."""
    return _backend()
