"""Runs a scheduler's model of SGLang alone, for refitd.serving.proof: on fixed tokens of one made-up request, by SGLang's own attention, without captured
graphs. The request takes free room of SGLang's cache, and gives it back (`Room`). Written for SGLang 0.5.23.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ...errors import FailedPrecondition
from ...serving.proof import Probe, token_ids, tokens_for

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

    def agree(names: set[str]) -> set[str]:
        import torch.distributed

        if group.world_size == 1:
            return names
        found: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(found, names, group=group.cpu_group)
        return set().union(*found)

    return Probe(run, room.tokens, alone, turn=(group.rank_in_group, group.world_size), agree=agree, keep=_kept, beyond=beyond(runner))


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
        self._requests.req_to_token[self.request, :whole] = self.slots.to(self._requests.req_to_token.dtype)

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
