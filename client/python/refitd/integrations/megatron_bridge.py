"""Megatron-Bridge's conversion tasks as shards: each rank registers, in place, the parameters that Bridge's export would gather.

    from refitd.integrations import megatron_bridge

    # an AutoBridge, and a list of Megatron's models, one a virtual stage
    trainer.register(megatron_bridge.model_shards(bridge, model, vocab_size=config.vocab_size), dtype=torch.bfloat16)

Each refit then begins with `refitd.integrations.megatron.finish_gather(model)`, and asks the bridge again where the model's parameters were replaced.

A task says which parameter of this rank is made of which tensors of the checkpoint, and by which of Bridge's mapping classes. The known
classes are DirectMapping, ReplicatedMapping, ColumnParallelMapping, RowParallelMapping, AutoMapping, QKVMapping and GatedMLPMapping
themselves: their subclasses change values or shapes, and are refused by name, as all others are. Only shapes are looked at; nothing is
gathered.

Written for Megatron-Bridge 0.3.1. Imports neither Bridge nor Megatron, but for the ranks of data parallelism where none are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ..errors import Unimplemented
from ..layout.shards import MadeOf, MadeShards, Shard
from . import megatron
from .megatron import QKV, Column, GatedMLP, Mapped, Place, Replicated, Row

Replica = tuple[int, int]  # a rank's number among those that hold the same, and how many they are


def model_shards(
    bridge: Any,
    model: Any,
    *,
    vocab_size: int | None = None,
    replica: Replica | None = None,
    expert_replica: Replica | None = None,
    rank: int = 0,
) -> MadeShards:
    """The shards of a rank's model, for Trainer.register: those of `bridge.get_conversion_tasks(model)`; see `shards`."""

    def make() -> MadeShards:
        tasks = bridge.get_conversion_tasks(model)
        found = shards(tasks, vocab_size=vocab_size, replica=replica, expert_replica=expert_replica, rank=rank)
        return MadeShards(found, MadeOf(megatron.chunks_of(model), make, first=partial(megatron.finish_gather, model)))

    return make()


def shards(
    tasks: Iterable[Any],
    *,
    vocab_size: int | None = None,
    replica: Replica | None = None,
    expert_replica: Replica | None = None,
    rank: int = 0,
) -> list[Shard]:
    """The shards that a rank's parameters are, for Trainer.register.

    `tasks`: of this rank, as get_conversion_tasks() returns them; None among them, and tasks of other pipeline stages, are passed over.
    `vocab_size`: rows of embedding and output layer, which Megatron pads; None: there is no padding. `replica`, `expert_replica`: this
    rank's place among the data-parallel ranks of dense parameters, and of experts; None: what Megatron's parallel_state says. `rank`:
    for errors.

    Raises Unimplemented, naming the parameter and its mapping, where the mapping is no plain choice of boxes; InvalidArgument where a
    shape does not fit.
    """
    if replica is None or expert_replica is None:
        dense, expert = _replicas()
        replica, expert_replica = replica or dense, expert_replica or expert
    found: list[Shard] = []
    for task in tasks:
        if task is not None and task.param_weight is not None:
            found += _of_task(task, vocab_size, replica, expert_replica, rank)
    return found


def _replicas() -> tuple[Replica, Replica]:
    from megatron.core import parallel_state as state

    return (
        (state.get_data_parallel_rank(with_context_parallel=True), state.get_data_parallel_world_size(with_context_parallel=True)),
        (state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
    )


def _of_task(task: Any, vocab_size: int | None, replica: Replica, expert_replica: Replica, rank: int) -> Iterator[Shard]:
    mapping = _delegate(task)
    mapped, names = _mapped(task, mapping, vocab_size)
    tp, tp_size = int(mapping.tp_rank), int(mapping.tp_size)  # for an expert's parameter: of expert tensor parallelism
    place = Place(rank, tp, tp_size, tp, tp_size, 0, 1, 0, 0, 0, 0, replica, expert_replica)
    for shard in megatron._shards_of(task.global_param_name, task.param_weight, mapped, {}, place):
        yield replace(shard, name=names[shard.name])


def _delegate(task: Any) -> Any:
    """The mapping, or the one that an AutoMapping stands for."""
    mapping = task.mapping
    if type(mapping).__name__ != "AutoMapping":
        return mapping
    if getattr(mapping, "permute_dims", None) is not None:
        raise _refused(task, f"permutes dimensions {mapping.permute_dims}")
    return mapping._get_or_create_mapping(mapping._detect_parallelism_type(task.megatron_module))


def _mapped(task: Any, mapping: Any, vocab_size: int | None) -> tuple[Mapped, dict[str, str]]:
    """The class of refitd.integrations.megatron that says what the mapping says, and the checkpoint's names by those that it yields."""
    kind, expert, hf = type(mapping).__name__, bool(mapping.is_expert), mapping.hf_param
    if kind in ("DirectMapping", "ReplicatedMapping"):
        return Replicated(hf, expert), {hf: hf}
    if kind == "ColumnParallelMapping":
        padded = task.global_param_name.endswith(("word_embeddings.weight", "output_layer.weight"))
        return Column(hf, expert, vocab_size if padded else None), {hf: hf}
    if kind == "RowParallelMapping":
        if task.param_weight.dim() == 1:  # a bias of a row-parallel layer is whole on every rank
            return Replicated(hf, expert), {hf: hf}
        return Row(hf, expert), {hf: hf}
    if kind == "QKVMapping":
        return _qkv(task, expert), {part: hf[part] for part in "qkv"}
    if kind == "GatedMLPMapping":
        return GatedMLP("{part}", expert), {part: hf[part] for part in ("gate", "up")}
    raise _refused(task, "is no plain choice of rows and columns")


def _qkv(task: Any, expert: bool) -> QKV:
    config = task.megatron_module.config
    if getattr(config, "attention_output_gate", False):
        raise _refused(task, "has the gate of attention's output among the queries")
    heads = int(config.num_attention_heads)
    head_dim = int(config.kv_channels or config.hidden_size // heads)
    return QKV("{part}", heads, int(config.num_query_groups or heads), head_dim, expert)


def _refused(task: Any, why: str) -> Unimplemented:
    name = task.global_param_name
    return Unimplemented(f"parameter '{name}': {type(task.mapping).__name__} {why}: push its tensors", culprit=f"parameter '{name}'")
