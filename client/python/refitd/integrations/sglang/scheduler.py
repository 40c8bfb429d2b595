"""Runs a scheduler's model of SGLang alone, for refitd.serving.proof: on fixed tokens of one made-up request, by SGLang's own attention, without captured
graphs. The request takes free room of SGLang's cache, and gives it back (`Room`). Written for SGLang 0.5.23.

In each scheduler process of SGLang: one tensor-parallel rank as one rank of a refitd instance.

A request of the driver's comes to all ranks at once, as JSON in the place of serialized tensors. All ranks carry it out, and each hears
what became of it on the others, so that the answer, which SGLang takes from the first rank, tells of a failure on any.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ... import errors
from ...errors import FailedPrecondition
from ...serving.delivery import ATTRIBUTE, Delivery, Steps, proved, synchronise
from ...serving.proof import Probe, digest, token_ids, tokens_for, union_over
from ...serving.rank import Rank
from ...serving.settings import Settings, read_manifest
from . import inside

# So many tokens follow the first ones, one by one, each by the decode kernels.
DECODED = 1


def probe_of(runner: Any, room: Room) -> Probe:
    """How a scheduler's model is run on fixed tokens: the first all at once, a last one by itself."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_model, get_parallel

    model, group = runner.model, get_parallel().tp_group
    ids = token_ids(runner.model_config.vocab_size, room.tokens + DECODED, runner.device)
    batches = [_extend(runner, room, ids[: room.tokens]), _decode(runner, room, ids[room.tokens :])]
    context = ForwardContext(attn_backend=runner.attn_backend)

    @contextmanager
    def around(batch: Any) -> Iterator[None]:
        with get_model().override(shared_experts=model.shared_experts_config), forward_context(context, forward_batch=batch):
            yield

    def run() -> Any:
        made = []
        for batch in batches:
            runner.attn_backend.init_forward_metadata(batch)
            with around(batch):
                made.append(model.forward(batch.input_ids, batch.positions, _kept(batch)).next_token_logits.clone())
        return made

    @contextmanager
    def alone() -> Iterator[None]:
        runner.attn_backend.init_forward_metadata(batches[0])
        with around(batches[0]):
            yield

    return Probe(run, room.tokens, alone, turn=(group.rank_in_group, group.world_size), agree=partial(union_over, group), keep=_kept, beyond=beyond(runner))


def beyond(runner: Any) -> dict[str, str]:
    """By name, ways in which this engine runs its model that a probe does not take, and why."""
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    why = "are not replayed by the proof, which runs the model without them"
    runners = {"decode graphs": "decode_cuda_graph_runner", "prefill graphs": "prefill_cuda_graph_runner"}
    return {name: why for name, held in runners.items() if not isinstance(getattr(runner, held, None), (EagerRunner, type(None)))}


class Room:
    """Room in SGLang's cache for one request of `tokens` tokens and DECODED more, until `close`. Raises FailedPrecondition where there is none."""

    def __init__(self, runner: Any) -> None:
        self.tokens = tokens_for(runner.model)
        self._slots_pool, self._requests = runner.token_to_kv_pool_allocator, runner.req_to_token_pool
        page = getattr(self._slots_pool, "page_size", 1)
        whole = -(-(self.tokens + DECODED) // page) * page
        self.request: int | None = None
        self.slots: Any = None
        if self._requests.free_slots and whole <= self._requests.req_to_token.shape[1]:
            self.slots = self._slots_pool.alloc(whole)
        if self.slots is None:
            raise FailedPrecondition(f"SGLang's cache has no room for a request of {whole} tokens")
        self.request = self._requests.free_slots.pop()
        try:
            self._requests.req_to_token[self.request, :whole] = self.slots.to(self._requests.req_to_token.dtype)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.request is not None:
            self._requests.free_slots.append(self.request)
            self._slots_pool.free(self.slots)
        self.request = self.slots = None


def _extend(runner: Any, room: Room, ids: Any) -> Any:
    """The batch with all tokens but those to decode."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    count = len(ids)

    def one(value: int) -> Any:
        return torch.tensor([value], dtype=torch.int32, device=runner.device)

    extend = dict(
        extend_num_tokens=count, extend_seq_lens=one(count), extend_prefix_lens=one(0), extend_start_loc=one(0), extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[count], extend_logprob_start_lens_cpu=[0],
    )  # fmt: skip
    return _batch(runner, room, ids, ForwardMode.EXTEND, 0, **extend)


def _decode(runner: Any, room: Room, ids: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return _batch(runner, room, ids, ForwardMode.DECODE, room.tokens)


def _batch(runner: Any, room: Room, ids: Any, mode: Any, before: int, **extend: Any) -> Any:
    import torch
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    length = before + len(ids)
    lengths = torch.tensor([length], dtype=torch.int64)
    positions = torch.arange(before, length, device=runner.device)
    made = ForwardBatch(
        forward_mode=mode, batch_size=1, input_ids=ids, req_pool_indices=torch.tensor([room.request], dtype=torch.int64, device=runner.device),
        seq_lens=lengths.to(runner.device), seq_lens_cpu=lengths, orig_seq_lens=lengths.to(torch.int32).to(runner.device), seq_lens_sum=length,
        out_cache_loc=room.slots[before:length], positions=positions, mrope_positions=positions.expand(3, -1).contiguous(),
        spec_algorithm=runner.spec_algorithm, capture_hidden_mode=CaptureHiddenMode.NULL, global_forward_mode=mode, **extend,
    )  # fmt: skip
    runner.kv_index_translator.bind_runner_slots(made)
    return runner.prepare_dummy_forward_batch(made)


def _kept(thing: Any) -> Any:
    """A batch as it is now: layers leave the residual stream in it, and what they cache."""
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    if not isinstance(thing, ForwardBatch):
        return thing
    made = copy.copy(thing)
    stream = getattr(thing, "residual_stream", None)
    if stream is not None:
        made.residual_stream = copy.copy(stream)
        if isinstance(stream.residual, torch.Tensor):
            made.residual_stream.residual = stream.residual.clone()
        if stream.pending is not None:
            made.residual_stream.pending = copy.copy(stream.pending)
            if isinstance(stream.pending.value, torch.Tensor):
                made.residual_stream.pending.value = stream.pending.value.clone()
    return made


__all__ = ["DECODED", "Room", "beyond", "probe_of"]


logger = logging.getLogger("sglang.refitd")

# The attribute of a model that has its Backend.
_BACKEND = "_refitd_backend"


def answer(manager: Any, request: Any) -> Any:
    """Carries out a request {"do": "attach" | "take" | "detach" | "status", ...} of `controls.py`. Never raises: an exception would end the
    scheduler, and with it the engine."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    made: Any = None
    failure = ""
    try:
        made = _carry_out(manager.tp_worker.model_runner, json.loads(bytes(request.serialized_named_tensors[0])))
    except Exception as error:
        logger.exception("refitd: the request failed on this rank")
        failure = json.dumps({"error": type(error).__name__, "reason": str(error)})
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(manager.tp_cpu_group)
    torch.distributed.all_gather_object(outcomes, (failure, made), group=manager.tp_cpu_group)
    failures = [failed for failed, _ in outcomes if failed]
    if not failures:
        manager.record_weight_version_after_update(request.weight_version)
    message = failures[0] if failures else json.dumps([told for _, told in outcomes])
    return UpdateWeightsFromTensorReqOutput(success=not failures, message=message)


def _carry_out(runner: Any, request: dict[str, Any]) -> Any:
    do = request.pop("do")
    backend = getattr(runner.model, _BACKEND, None)
    if do == "detach":
        if backend is not None:
            backend.rank.detach()
        return None
    if backend is None:
        backend = Backend(runner)
        object.__setattr__(runner.model, _BACKEND, backend)
    if do == "attach":
        backend.attach(request)
    elif do == "take":
        backend.rank.take(request["version"], request["wait_seconds"])
    elif do == "status":
        return {**backend.rank.status(), **(backend.digests() if request.get("digests") else {})}
    else:
        raise errors.InvalidArgument(f"no request '{do}'", culprit="do")
    return None


class Backend:
    """One rank's model. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, runner: Any) -> None:
        import torch

        self.model: Any = runner.model
        self._runner = runner
        clean = getattr(self.model, ATTRIBUTE, None) is None  # random weights otherwise
        device = torch.device(next(self.model.parameters()).device)
        self._device = device
        self.rank = Rank(device, client="sglang", clean=clean, decide=self._decide, process=self._process, logits=self._logits)

    def attach(self, request: dict[str, Any]) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if request.pop("weights_went"):
            self.rank.clean = False
        dirty, drivers = request.pop("dirty"), request.pop("drivers")
        settings = Settings.of(request).checked()
        self.rank.attach(settings, settings.instance, parallel.tp_rank, parallel.tp_size + drivers, dirty=dirty)

    def digests(self) -> dict[str, Any]:
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {"digests": {name: [str(t.dtype), list(t.shape), digest(t)] for name, t in held}}

    def _decide(self, settings: Settings) -> Delivery:
        manifest = read_manifest(settings.manifest or self._runner.model_config.model_path)
        synchronise(self._device)  # batches that the scheduler has launched read the weights
        with ExitStack() as rooms:
            steps = Steps(inside, self._try_out, self._process, self._load, lambda: self._probe(rooms))
            made = proved(self.model, settings, manifest, self._device, self.rank.clean, steps)
        return made

    def _probe(self, rooms: ExitStack) -> Probe:
        """How the model is run alone, until `rooms` closes."""
        room = Room(self._runner)
        rooms.callback(room.close)
        return probe_of(self._runner, room)

    def _logits(self) -> Any:
        with ExitStack() as rooms:
            return self._probe(rooms).run()

    def _load(self, delivery: Delivery, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """Puts all of a checkpoint's tensors there as SGLang's own weight updates do; raises FailedPrecondition where that can't be."""
        wanted = {name: layer for name, layer in self.model.named_modules() if getattr(layer, "quant_method", None) is not None}
        inside.reload(self.model, tensors, wanted)
        self._derive(delivery)
        return []

    def _try_out(self, made: Delivery) -> None:
        """Processes two sets of random weights. A parameter that both leave the same is passed over, and refused by name."""
        import torch

        seen = []
        for seed in (1, 2):
            generator = torch.Generator(device=self._device).manual_seed(seed)
            for tensor in made.arena.values():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, device=self._device).to(tensor.dtype))
            inside.reload(self.model, made.arena.items(), made.modules)
            named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
            seen.append({name: digest(named[name]) for name in made.processed if named[name].numel()})
        for name, first in seen[0].items():
            if seen[1].get(name) == first:
                raise errors.FailedPrecondition(
                    f"parameter '{name}' is changed after loading ({made.processed[name]}), and loading again does not reach it",
                    culprit=f"parameter '{name}'",
                )

    def _process(self, delivery: Delivery) -> None:
        if delivery.arena:
            inside.reload(self.model, delivery.arena.items(), delivery.modules)
        self._derive(delivery)

    def _derive(self, delivery: Delivery) -> None:
        """Makes anew what models and tied modules keep of other modules' weights."""
        inside.finish(self.model)
        for layer in delivery.tied:
            layer.quant_method.process_weights_after_loading(layer)
