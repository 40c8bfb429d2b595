"""Runs a worker's model of vLLM alone, for refitd.serving.proof: on fixed tokens, without requests of clients and captured graphs.

Attention that reads weights by itself (MLA's copies of `kv_b_proj`, sinks) is run on made-up requests (`Requests`), over caches of their own. Other
attention mixes nothing: it gives what `_stand_in` says, so that each layer gets something that depends on the layers before. Compiled code is
run as a whole, with all attention on made-up requests.

A pipeline stage is run alone too: what the stages before would give it is made up.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from itertools import accumulate
from typing import Any

from ...errors import FailedPrecondition
from ...serving.proof import Probe, token_ids, tokens_for, union_over
from .versions import current_config

logger = logging.getLogger("refitd.proof")

# Made-up requests: so many decode one token each, after so many tokens of context; one more brings all other tokens at once.
DECODES, CONTEXT = 8, 20
# Seeds what is made up.
_SEED = 1
_COMPILED = "compiled code"


def probe_of(model: Any, vllm_config: Any, device: Any, thorough: bool = False) -> Probe:
    """How a worker's model is run on fixed tokens. `thorough`: with attention on made-up requests, and in compiled code too. Raises
    FailedPrecondition where it can't be run."""
    from vllm.distributed import parallel_state

    group, stage = parallel_state.get_tp_group(), parallel_state.get_pp_group()
    tokens = tokens_for(model)
    ids = token_ids(vllm_config.model_config.get_vocab_size(), tokens, device)
    layers = {layer.layer_name: layer for layer in model.modules() if _mixes_tokens(layer) and hasattr(layer, "layer_name")}
    requests = Requests.of({name: layer for name, layer in layers.items() if thorough and _reads_weights(layer)}, vllm_config, tokens, device)
    alone = partial(_alone, model, vllm_config, requests)

    def run(around: Callable[[], Any] = alone, requests: Requests = requests) -> Any:
        with around():
            given = {"input_ids": ids, "intermediate_tensors": None}
            if not stage.is_first_rank:
                given = {"input_ids": None, "intermediate_tensors": _of_earlier_stages(model, vllm_config, tokens, device)}
            made = model(positions=requests.positions, inputs_embeds=None, **given)
            return model.compute_logits(made) if stage.is_last_rank else made

    shows_nothing = partial(_shows_nothing, requests)
    turn = (group.rank_in_group, group.world_size)
    not_taken = beyond(vllm_config.compilation_config)
    ways = {}
    if thorough and _COMPILED in not_taken and layers:
        every = Requests.of(layers, vllm_config, tokens, device)
        if every.layers:
            del not_taken[_COMPILED]
            ways[_COMPILED] = partial(run, partial(_alone, model, vllm_config, every, compiled=True), every)
    return Probe(run, tokens, alone, shows_nothing, turn, partial(union_over, group), ways=ways, beyond=not_taken)


def beyond(compilation: Any) -> dict[str, str]:
    """By name, ways in which this engine runs its model that a probe does not take, and why."""
    found = {}
    mode = getattr(compilation, "mode", getattr(compilation, "level", None))
    if mode:
        found[_COMPILED] = f"is not run by the proof (compilation mode {int(mode)}), which runs the model's own"
    graphs = getattr(compilation, "cudagraph_mode", None)
    if graphs is not None and graphs.name != "NONE":
        found["CUDA graphs"] = f"are not replayed by the proof (cudagraph_mode {graphs.name}), which runs the model without them"
    return found


def _of_earlier_stages(model: Any, vllm_config: Any, tokens: int, device: Any) -> Any:
    """Made-up values in place of what the pipeline stages before give."""
    import torch

    made = model.make_empty_intermediate_tensors(tokens, vllm_config.model_config.dtype, device)
    generator = torch.Generator(device=device).manual_seed(_SEED)
    for tensor in made.tensors.values():
        tensor.normal_(generator=generator)
    return made


class Requests:
    """Made-up requests for the attention layers `layers` (by name). The first DECODES decode one token each, the last brings the other tokens.

    `metadata`, `slots`: by layer, what vLLM's attention gets of a step. `positions`: of all tokens.
    """

    def __init__(self, layers: Mapping[str, Any], vllm_config: Any, tokens: int, device: Any) -> None:
        import torch

        self.layers = dict(layers)
        self.tokens = tokens
        self.metadata: dict[str, Any] = {}
        self.slots: dict[str, Any] = {}
        self._caches: dict[str, Any] = {}
        if not layers:
            self.positions = torch.arange(tokens, device=device)
            return
        new = [1] * DECODES + [tokens - DECODES]  # how many tokens each request brings, and how long it is with these
        whole = [CONTEXT + 1] * DECODES + [tokens - DECODES]
        self.positions = torch.cat([torch.arange(n - k, n, device=device) for k, n in zip(new, whole)])
        groups: dict[Any, list[str]] = {}
        for name, layer in layers.items():
            groups.setdefault((layer.get_attn_backend(), layer.get_kv_cache_spec(vllm_config)), []).append(name)
        for (backend, spec), names in groups.items():
            blocks, table, slots = _blocks_of(new, whole, spec.block_size, device)
            common = _common_metadata(new, whole, table, slots, self.positions)
            made = backend.get_builder_cls()(spec, names, vllm_config, device).build(0, common)
            for name in names:
                self.metadata[name], self.slots[name] = made, slots
                self._caches[name] = _cache_like(layers[name], blocks, vllm_config.cache_config.num_gpu_blocks)

    @classmethod
    def of(cls, layers: Mapping[str, Any], vllm_config: Any, tokens: int, device: Any) -> Requests:
        """For these attention layers; for none where they can't be run so."""
        try:
            with current_config(vllm_config):
                return cls(layers, vllm_config, tokens, device)
        except Exception as error:
            logger.warning("refitd: attention can't be run on made-up requests: %s: %s", type(error).__name__, error)
            return cls({}, vllm_config, tokens, device)

    @contextmanager
    def caches(self) -> Iterator[None]:
        """Within this block the layers have caches of their own, with the same context each time."""
        before = {name: layer.kv_cache for name, layer in self.layers.items()}
        for name, layer in self.layers.items():
            layer.kv_cache = [self._caches[name]] if isinstance(before[name], list) else self._caches[name]
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.kv_cache = before[name]


def _blocks_of(new: list[int], whole: list[int], size: int, device: Any) -> tuple[int, Any, Any]:
    """How many blocks the requests take, the first of which is nobody's; the table of their blocks; the slots of their new tokens."""
    import torch

    counts = [-(-n // size) for n in whole]
    firsts = list(accumulate(counts, initial=1))[:-1]
    table = torch.zeros((len(whole), max(counts)), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, counts)):
        table[row, :count] = torch.arange(first, first + count)
    slots = [first * size + position for first, k, n in zip(firsts, new, whole) for position in range(n - k, n)]
    return 1 + sum(counts), table.to(device), torch.tensor(slots, dtype=torch.int64, device=device)


def _common_metadata(new: list[int], whole: list[int], table: Any, slots: Any, positions: Any) -> Any:
    import torch

    try:
        from vllm.v1.attention.backend import CommonAttentionMetadata as Common
    except ImportError:  # before 0.28
        from vllm.v1.attention.backends.utils import CommonAttentionMetadata as Common

    starts = torch.tensor([0, *accumulate(new)], dtype=torch.int32)
    lengths = torch.tensor(whole, dtype=torch.int32)
    computed = lengths - torch.tensor(new, dtype=torch.int32)
    values = dict(
        query_start_loc=starts.to(table.device), query_start_loc_cpu=starts, seq_lens=lengths.to(table.device), num_reqs=len(new),
        num_actual_tokens=sum(new), max_query_len=max(new), max_seq_len=max(whole), block_table_tensor=table, slot_mapping=slots, causal=True,
        positions=positions, is_prefilling=computed == 0, seq_lens_cpu_upper_bound=lengths, seq_lens_cpu=lengths, _seq_lens_cpu=lengths,
        num_computed_tokens_cpu=computed, _num_computed_tokens_cpu=computed,
    )  # fmt: skip
    known = {entry.name for entry in fields(Common) if entry.init}
    return Common(**{name: value for name, value in values.items() if name in known})


def _cache_like(layer: Any, blocks: int, count: int) -> Any:
    """A cache of `blocks` blocks with the form of the layer's own, which has `count`, and made-up contents."""
    import torch

    own = layer.kv_cache[0] if isinstance(layer.kv_cache, list) else layer.kv_cache
    if count not in own.shape:
        raise FailedPrecondition(f"the cache of '{layer.layer_name}' has the shape {tuple(own.shape)}, and there are {count} blocks")
    shape = list(own.shape)
    shape[shape.index(count)] = blocks
    order = sorted(range(own.dim()), key=own.stride, reverse=True)  # as it lies in memory
    made = torch.zeros([shape[dim] for dim in order], dtype=own.dtype, device=own.device)
    if own.dtype.is_floating_point and own.dtype.itemsize > 1:
        made.normal_(generator=torch.Generator(device=own.device).manual_seed(_SEED))
    return made.permute([order.index(dim) for dim in range(own.dim())])


@contextmanager
def _alone(model: Any, vllm_config: Any, requests: Requests, compiled: bool = False) -> Iterator[None]:
    import torch
    from vllm.forward_context import get_forward_context, set_forward_context

    known = inspect.signature(set_forward_context).parameters
    options: dict[str, Any] = {}
    if "skip_compiled" in known:
        options["skip_compiled"] = not compiled
    if "slot_mapping" in known and requests.layers:
        options["slot_mapping"] = requests.slots
    if vllm_config.parallel_config.data_parallel_size > 1:
        options["num_tokens_across_dp"] = torch.full((vllm_config.parallel_config.data_parallel_size,), requests.tokens, dtype=torch.int32)
    real = {id(layer) for layer in requests.layers.values()}
    layers = [layer for layer in model.modules() if _mixes_tokens(layer) and hasattr(layer, "num_heads") and hasattr(layer, "head_size")]
    layers = [layer for layer in layers if id(layer) not in real]
    with (
        current_config(vllm_config),
        set_forward_context(requests.metadata or None, vllm_config, num_tokens=requests.tokens, **options),
        requests.caches(),
    ):
        context = get_forward_context()
        if hasattr(context, "all_moe_layers") and not compiled:
            context.all_moe_layers = None  # layers are found by name, and not by their turn in a whole forward
        for layer in layers:
            layer.forward = partial(_stand_in, layer)
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward


def _mixes_tokens(layer: Any) -> bool:
    """Whether the layer computes by requests' metadata: attention and layers with a state."""
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    return isinstance(layer, AttentionLayerBase)


def _reads_weights(layer: Any) -> bool:
    """Whether the attention layer reads more than what its call gives it: parameters, sinks, or a module."""
    import torch

    held = vars(getattr(layer, "impl", None)).values() if getattr(layer, "impl", None) is not None else ()
    return any(True for _ in layer.parameters()) or any(isinstance(value, (torch.Tensor, torch.nn.Module)) for value in held)


def _stand_in(layer: Any, query: Any, key: Any = None, value: Any = None, output_shape: Any = None, output_dtype: Any = None, **_: Any) -> Any:
    """In place of attention's output, the sum of its inputs, repeated and cut to the output's width."""
    tokens = query.shape[0]
    width = output_shape[-1] if output_shape is not None else layer.num_heads * getattr(layer, "head_size_v", layer.head_size)
    made = query.new_zeros((tokens, width))
    for part in (query, key, value):
        if part is not None:
            flat = part.reshape(tokens, -1)
            made += flat.repeat(1, -(-width // flat.shape[1]))[:, :width]
    return made if output_dtype is None else made.to(output_dtype)


def _shows_nothing(requests: Requests, module: Any, layer: Any) -> str:
    """Why a run of the layer does not show whether the module's parameters are read; "": it does."""
    real = {id(inner) for inner in requests.layers.values()}
    inner = [child for child in (module if layer is None or layer is module else layer).modules() if _mixes_tokens(child) and id(child) not in real]
    if layer is not None and inner:
        return "is read by attention, which is not run here"
    return ""


__all__ = ["CONTEXT", "DECODES", "Requests", "beyond", "probe_of"]
