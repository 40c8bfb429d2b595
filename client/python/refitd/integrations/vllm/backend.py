"""The weight-transfer backend `refitd`: one rank of vLLM's, in its worker process, as one rank of a refitd instance.

vLLM makes it when the model is loaded, and calls it on the worker's own thread:

- `init_transfer_engine` attaches, decides the delivery of every parameter (`delivery.py`) and registers it.
- `receive_weights` takes one update: it answers Prepare, waits for the outcome, and processes the loader tensors
  (what can't be written in place).
- `shutdown` detaches; `init_transfer_engine` may attach anew afterwards.

Ranks: refitd's rank is vLLM's, `data_parallel_index * world_size + rank`, so that all replicas of one server commit together. Where
replicas have servers of their own (external load balancing), each is an instance, with "-dpN" after its name. With `drivers=1` the
instance has one more rank, the last, which registers nothing: the driver (`driver.py`), without which no version commits. Under an external
launcher each process has a driver.

For refitd.serving.proof the model is run on fixed tokens, without vLLM's scheduler, clients' requests or captured graphs. Attention that reads
weights by itself (MLA's copies of `kv_b_proj`, sinks) is run on made-up requests (`Requests`), over caches of their own. Other attention is not
run: `_stand_in` makes a value from its inputs, so that what a layer gets depends on the layers before. Compiled code is run as a whole, with
all attention on made-up requests. A pipeline stage is run alone too, on made-up outputs of the stages before.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, make_dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from ...errors import FailedPrecondition
from ...layout import TensorSpec, devices
from ...serving.ahead import Portion, as_before, prepack
from ...serving.delivery import Delivery, Steps, decided, keep_memory, prove_kept, proved, tensors_of, zero_padding
from ...serving.evidence import EVIDENCE_ATTRIBUTE, KEPT_ATTRIBUTE
from ...serving.proof import Probe, token_ids, tokens_for, union_over
from ...serving.rank import PREPARE_SECONDS, Rank, TakeUp
from ...serving import Settings, read_manifest
from . import versions
from .draft import WithDraft, manifest_of
from .versions import CONFIG_ATTRIBUTE, current_config, make_exportable, set_backend


# The argument of `init_transfer_engine`: the fields of refitd.serving.Settings that ranks take, where "" leaves the environment's value. `drivers`:
# ranks without weights that the instance has beside the workers'. `workers`: how many workers' ranks the instance has; 0: what their own
# configuration says. `dirty`: whether the weights are not one whole version. `restores`: as in Rank.attach.
_FIELDS: list[Any] = [*((name, Any, "") for name in Settings().of_ranks()), ("drivers", int, 0), ("workers", int, 0), ("dirty", bool, False), ("restores", bool, False)]
RefitdInitInfo: Any = make_dataclass("RefitdInitInfo", _FIELDS, bases=(WeightTransferInitInfo,), namespace={"__module__": __name__})


@dataclass
class RefitdUpdateInfo(WeightTransferUpdateInfo):
    """`version`: the version to take; None: the next. `wait_seconds`: how long the trainer may take to begin. `detach`: this rank detaches
    afterwards, however the update ended, for callers that attach it for each update. `leave`: this rank only detaches, for vLLM before
    0.27, which has no call for that."""

    version: int | None = None
    wait_seconds: float = PREPARE_SECONDS
    detach: bool = False
    leave: bool = False
    update_kind: str = "dense"  # asked for by vLLM until 0.24
    num_updates_list: list[int] | None = field(default=None)


class RefitdBackend(WeightTransferEngine):
    """See the module. Not thread-safe: vLLM calls it on one thread."""

    init_info_cls = RefitdInitInfo
    update_info_cls = RefitdUpdateInfo
    supports_draft_weight_update = True  # by which vLLM gives the draft model to `set_weight_update_target`

    def __init__(self, config: Any, *arguments: Any) -> None:
        super().__init__(config, *arguments)
        self.parallel_config, self._vllm_config = versions.init_arguments(arguments)
        self.model: Any = arguments[-1]
        if self._vllm_config is None:
            self._vllm_config = getattr(self.model, CONFIG_ATTRIBUTE, None)
        parameters = list(self.model.parameters())
        self.device: Any = parameters[0].device
        # A model with evidence came from refitd's loader, which fills it with random weights.
        clean = getattr(self.model, EVIDENCE_ATTRIBUTE, None) is None
        self._served, self._draft = self.model, None
        self._draft_alone = False  # whether an update was begun for the draft model alone
        set_backend(self)
        kept = getattr(self.model, KEPT_ATTRIBUTE, None)
        take_up = None if kept is None else TakeUp(kept, self._decide_kept, self._prove_kept, versions.gather)
        self.rank = Rank(
            self.device, client="vllm", clean=clean, decide=self._decide, process=self._process, aside=self._aside, logits=self._logits,
            take_up=take_up,
        )  # fmt: skip

    # ---- attaching ----

    def init_transfer_engine(self, init_info: Any) -> None:
        """Attaches and registers. Raises refitd.Error that names the tensor, parameter or field; the rank is detached then."""
        settings = Settings.of(vars(init_info)).checked()
        versions.check_experts_stay(self.parallel_config)
        self._join_draft(settings)
        self._make_exportable()
        if self.rank.delivery is not None and not self.rank.clean:  # sleep of level 2 discarded the padding too
            zero_padding(self.model, self.rank.delivery)
        rank, world_size, instance = versions.place(self.parallel_config, settings.instance, init_info.workers)
        self.rank.attach(
            settings, instance, rank, world_size + init_info.drivers, dirty=init_info.dirty, restores=init_info.restores, driven=init_info.drivers > 0
        )

    def _join_draft(self, settings: Settings) -> None:
        """From now on the draft model's weights come with the served model's. Raises FailedPrecondition where they would stay as they are."""
        method = versions.draft_of(self._vllm_config)
        if method is None:
            return
        what = f"vLLM was started with a draft model (speculative_config, method '{method}')"
        if self._draft is None:
            why = "whose weights would stay as they are: let it have start_draft_weight_update and finish_weight_update before (vLLM since 0.32)"
        elif settings.in_arenas:
            why = "which an arena does not hold: set REFITD_ARENA=off"
        else:
            if not isinstance(self.model, WithDraft):
                self.model = WithDraft(self._served, self._draft, self._manifest(settings))
            return
        raise FailedPrecondition(f"{what}, {why}", culprit="speculative_config")

    def _make_exportable(self) -> None:
        """Lets the daemon open weights in memory of vLLM's sleep mode."""
        self.rank.leave()  # no daemon has the old memory
        devices.synchronize(self.device)
        made = make_exportable(self.device.type)
        if made:
            logging.getLogger("vllm.refitd").info("refitd: %d bytes of weights in memory of sleep mode can be written by the daemon now", made)

    def _decide(self, settings: Settings) -> Delivery:
        return proved(self.model, settings, self._manifest(settings), self.device, self.rank.clean, self._steps(settings))

    def _decide_kept(self, settings: Settings) -> Delivery:
        return decided(self.model, settings, self._manifest(settings), self.device, versions)

    def _prove_kept(self, settings: Settings, delivery: Delivery) -> bool:
        return prove_kept(self.model, settings, delivery, self.device, self._steps(settings))

    def _steps(self, settings: Settings) -> Steps:
        # Ray runs the model on another thread than calls.
        aside = None if getattr(self.parallel_config, "distributed_executor_backend", None) == "ray" else self._aside
        return Steps(
            versions, self._process, self._process, aside, self._aside, versions.agree, self._load, lambda: self._probe(settings.proof == "require")
        )

    def _manifest(self, settings: Settings) -> list[TensorSpec]:
        """The checkpoint's tensors. Raises FailedPrecondition where the engine can't follow a group."""
        if self._vllm_config is None:
            raise FailedPrecondition("this version of vLLM gives a backend no configuration: start it with --load-format refitd")
        model = self._vllm_config.model_config.model
        if self._draft is None:
            return read_manifest(settings.manifest or model)
        return manifest_of(settings.manifest, model, self._vllm_config.speculative_config)

    # ---- updates ----

    def set_weight_update_target(self, model: Any, model_config: Any) -> None:
        """vLLM calls this when an update of the draft model begins, and `reset_weight_update_target` when one ends. `init_transfer_engine` needs to
        have got the draft so; no update is for it alone."""
        self._draft, self._draft_alone = model, True

    def reset_weight_update_target(self) -> None:
        self._draft_alone = False

    def start_weight_update(self) -> None:
        """Nothing is due before Prepare."""

    def finish_weight_update(self) -> None:
        """Nothing is left: `receive_weights` returned with the version in place."""

    def receive_weights(self, update_info: RefitdUpdateInfo, load_weights: Any = None) -> None:
        """Takes one update; see `rank.Rank.take`."""
        if self._draft_alone:
            raise FailedPrecondition("the draft model's weights come with the served model's: begin by start_weight_update", culprit="speculative_config")
        if update_info.leave:
            self.rank.detach()
            return
        try:
            self.rank.take(update_info.version, update_info.wait_seconds)
        finally:
            if update_info.detach:
                self.rank.detach()

    def _logits(self) -> Any:
        return self._probe().run()

    def _probe(self, required: bool = False) -> Probe:
        """How the model is run alone. Attention and compiled code on made-up requests have not been tried on a GPU, where they are run
        only if `required`."""
        return probe_of(self.model, self._vllm_config, self.device, thorough=required or self.device.type == "cpu")

    def _aside(self, portion: Portion, tensors: Mapping[str, Any]) -> None:
        """Processes the portion of these tensors into the memory beside the model."""
        if portion.packs:
            if not any(map(versions.is_unused, portion.modules.values())):
                prepack(portion, tensors)
            return
        with versions.current_config(self._vllm_config), as_before(portion.modules.values()):
            try:
                versions.reload(self.model, self._vllm_config.model_config, self.device, tensors.items(), portion.modules, into=portion.made)
            finally:
                versions.end_reload(portion.modules.values())

    def _process(self, delivery: Delivery) -> None:
        """Brings what the daemon wrote beside the modules into the modules. Attention comes last: it reads other modules."""
        done = [portion for portion in delivery.ahead if portion.done]
        ahead = {name: portion for portion in done for name in portion.modules}
        packed = {id(module): portion.packed for portion in done for module in portion.modules.values()}
        taken = {name for portion in done if not portion.packs for name in portion.tensors}
        tensors = {name: tensor for name, tensor in delivery.loader_tensors.items() if name not in taken}
        modules = {name: module for name, module in delivery.modules.items() if name not in ahead}
        filled = ((entry.module, entry.filled, packed.get(id(entry.module))) for entry in delivery.prepacked)
        with self._derived(delivery, packed), versions.prepacked(filled):
            for portion in done:
                portion.put_in_place()
                portion.forget()
            if tensors:
                versions.reload(self.model, self._vllm_config.model_config, self.device, tensors.items(), modules)
            else:
                self._process_attention(delivery)

    def _load(self, delivery: Delivery, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """Loads all of a checkpoint's tensors as vLLM's own weight updates do; returns names of the modules that these pass over. Modules that are written
        in place keep their kernels: a reload gives experts one that reads their scales where it loaded them, and no version is written there."""
        wanted: dict[str, Any] = {}
        seen: set[int] = set()
        for name, layer in self.model.named_modules():
            own = {id(tensor) for tensor in layer._parameters.values() if tensor is not None} - seen
            seen |= own
            if own and getattr(layer, "quant_method", None) is not None:  # not a module whose parameters are all another's
                wanted[name] = layer
        processed = {*delivery.modules, *(entry.name for entry in delivery.prepacked)}
        in_place = [layer for name, layer in wanted.items() if name not in processed and not versions.is_attention(layer)]
        with self._derived(delivery), as_before(in_place):
            return versions.reload(self.model, self._vllm_config.model_config, self.device, tensors, wanted, must=False)

    @contextmanager
    def _derived(self, delivery: Delivery, packed: Mapping[int, Any] = MappingProxyType({})) -> Iterator[None]:
        """Around a block that processes modules: what attention and tied modules derive is put into its old memory. `packed`: by id of a
        module, Portion.packed."""
        with versions.current_config(self._vllm_config):
            memories = [(layer, tensors_of(layer)) for layer in delivery.attention]
            yield
            for layer, before in memories:
                keep_memory(layer, before)
            for layer in delivery.tied:
                if packed.get(id(layer)) is None:
                    layer.quant_method.process_weights_after_loading(layer)
                else:
                    vars(layer).update(packed[id(layer)][0])

    def _process_attention(self, delivery: Delivery) -> None:
        """Attention layers keep values that are made of other layers' weights. vLLM's reload makes them anew; without a reload, this does."""
        evident = getattr(self.model, EVIDENCE_ATTRIBUTE, None)
        for layer in delivery.attention:
            if evident is None or evident.get(id(layer)):
                with torch.no_grad():
                    layer.process_weights_after_loading(self._vllm_config.model_config.dtype)

    # ---- the rest ----

    def status(self) -> dict[str, Any]:
        return self.rank.status()

    def shutdown(self) -> None:
        """Detaches; the weights stay."""
        self.rank.detach()

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Abstract in vLLM until 0.27."""
        raise NotImplementedError("trainers of the backend refitd use refitd.Trainer")


__all__ = ["RefitdBackend", "RefitdInitInfo", "RefitdUpdateInfo"]

logger = logging.getLogger("refitd.proof")

# Made-up requests: DECODES of them decode one token each after CONTEXT tokens; one more brings all other tokens at once.
DECODES, CONTEXT = 8, 20
# The seed of all made-up values.
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
    not_run = ways_not_run(vllm_config.compilation_config)
    ways = {}
    if thorough and _COMPILED in not_run and layers:
        every = Requests.of(layers, vllm_config, tokens, device)
        if every.layers:
            del not_run[_COMPILED]
            ways[_COMPILED] = partial(run, partial(_alone, model, vllm_config, every, compiled=True), every)
    return Probe(run, tokens, alone, shows_nothing, turn, partial(union_over, group), ways=ways, not_run=not_run)


def ways_not_run(compilation: Any) -> dict[str, str]:
    """By name, ways in which this engine runs its model that the probe does not run, and why."""
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
    made = model.make_empty_intermediate_tensors(tokens, vllm_config.model_config.dtype, device)
    generator = torch.Generator(device=device).manual_seed(_SEED)
    for tensor in made.tensors.values():
        tensor.normal_(generator=generator)
    return made


class Requests:
    """Made-up requests for the attention layers `layers` (by name). The first DECODES decode one token each, the last brings the other tokens.

    `metadata`, `slots`: by layer, what vLLM's attention gets for a step. `positions`: of all tokens.
    """

    def __init__(self, layers: Mapping[str, Any], vllm_config: Any, tokens: int, device: Any) -> None:
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
        """Requests for these attention layers; for none of them where they can't be run on made-up requests."""
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
    """How many blocks there are, of which the first belongs to no request; the table of their blocks; the slots of their new tokens."""
    counts = [-(-n // size) for n in whole]
    firsts = list(accumulate(counts, initial=1))[:-1]
    table = torch.zeros((len(whole), max(counts)), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, counts)):
        table[row, :count] = torch.arange(first, first + count)
    slots = [first * size + position for first, k, n in zip(firsts, new, whole) for position in range(n - k, n)]
    return 1 + sum(counts), table.to(device), torch.tensor(slots, dtype=torch.int64, device=device)


def _common_metadata(new: list[int], whole: list[int], table: Any, slots: Any, positions: Any) -> Any:
    """vLLM's description of one step, with the fields that its version has."""
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
    """Around a run of the model without vLLM's scheduler: attention layers without a request give what `_stand_in` makes."""
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
