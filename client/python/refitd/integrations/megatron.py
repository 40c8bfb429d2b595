"""Megatron's parallelism: which boxes of a checkpoint's tensors the parameters of a rank are.

A table says for each kind of parameter how it is made of the checkpoint's tensors:

    table = {
        "embedding.word_embeddings.weight": Column("model.embed_tokens.weight", size=151936),
        "decoder.layers.{layer}.self_attention.linear_qkv.weight": QKV(
            "model.layers.{layer}.self_attn.{part}_proj.weight", heads=32, kv_heads=4, head_dim=128
        ),
        "decoder.layers.{layer}.self_attention.linear_proj.weight": Row("model.layers.{layer}.self_attn.o_proj.weight"),
        "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}": GatedMLP(
            "model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight", expert=True
        ),
        ...
    }
    place = Parallel(world_size=16, tp=2, ep=4, pp=2).place(rank, layers=48, experts=128)
    trainer.register(model_shards(model, table, place), dtype=torch.bfloat16)

Each refit then begins with `finish_gather(model)`: with Megatron's `overlap_param_gather`, ranks otherwise hold parameters of which some
are of the step before. Callers of `shards`, which gets no model, call `finish_gather` on every rank before each refit.

`{layer}` and `{expert}` in the names of parameters are local to the rank; in the names of tensors they are global. The classes
have the names that Megatron-Bridge gives its mappings. Only shapes are looked at: nothing is gathered or copied.

With Megatron-Bridge (written for 0.3.1) no table is needed: each rank registers, in place, the parameters that Bridge's export would gather.

    # an AutoBridge, and a list of Megatron's models, one a virtual stage
    trainer.register(bridge_shards(bridge, model, vocab_size=config.vocab_size), dtype=torch.bfloat16)

A task says which parameter of this rank is made of which tensors of the checkpoint, and by which of Bridge's mapping classes. The known
classes are DirectMapping, ReplicatedMapping, ColumnParallelMapping, RowParallelMapping, AutoMapping, QKVMapping and GatedMLPMapping
themselves: their subclasses change values or shapes, and are refused by name, as all others are.

Imports neither Bridge nor Megatron, but for the ranks of data parallelism where none are given.

Of Bridge's inside, `AutoMapping._get_or_create_mapping` and `AutoMapping._detect_parallelism_type` are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Protocol

from ..errors import InvalidArgument, Unimplemented
from ..layout.shards import MadeOf, MadeShards, Shard


# ---- where a rank is ----


@dataclass(frozen=True)
class Place:
    """The place of a rank in both meshes, and which layers and experts are its own.

    Tensor parallel: rank `tp` of `tp_size`, for experts `etp` of `etp_size`. Pipeline stage `stage` of `stages`. `first_layer`, `layers`:
    the stage's first layer, and how many it has. `first_expert`, `experts`: likewise of the rank, in each layer. `replica`,
    `expert_replica`: this rank's number among those that hold the same dense parameters, or the same experts, and how many they are.
    """

    rank: int
    tp: int
    tp_size: int
    etp: int
    etp_size: int
    stage: int
    stages: int
    first_layer: int
    layers: int
    first_expert: int
    experts: int
    replica: tuple[int, int]
    expert_replica: tuple[int, int]


@dataclass(frozen=True)
class Parallel:
    """A mapping of ranks: two meshes over one world, the last dimension innermost.

    Dense: (pp, dp, cp, tp) with dp = world_size / (pp * cp * tp). Expert: (pp, edp, ep, etp) with
    edp = world_size / (pp * ep * etp). Published names of mappings may list factors of either mesh: the world size decides which.
    """

    world_size: int
    pp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "pp", "tp", "ep", "etp", "cp"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, at least 1 is possible", culprit=name)
        for factors in (("pp", "cp", "tp"), ("pp", "ep", "etp")):
            if self.world_size % prod(getattr(self, name) for name in factors):
                sizes = " * ".join(f"{name} {getattr(self, name)}" for name in factors)
                raise InvalidArgument(f"world_size {self.world_size} is not divisible by {sizes}", culprit="world_size")

    def place(self, rank: int, layers: int, experts: int = 0, layers_of_stages: Sequence[int] | None = None) -> Place:
        """The place of `rank`. `layers`, `experts`: of the model.

        `layers_of_stages`: how many layers each stage has; None divides them evenly, the first stages having one more where that
        leaves a remainder. Raises InvalidArgument for a rank, layers or experts that don't fit.
        """
        if not 0 <= rank < self.world_size:
            raise InvalidArgument(f"rank is {rank}, 0 to {self.world_size - 1} are possible", culprit="rank")
        if experts % self.ep:
            raise InvalidArgument(f"{experts} experts are not divisible by ep {self.ep}", culprit="experts")
        of_stages = _divide(layers, self.pp) if layers_of_stages is None else list(layers_of_stages)
        if len(of_stages) != self.pp or sum(of_stages) != layers or min(of_stages) < 0:
            raise InvalidArgument(f"{of_stages} layers of stages are not {layers} layers over pp {self.pp}", culprit="layers_of_stages")
        stage, within = divmod(rank, self.world_size // self.pp)
        ep, etp = within // self.etp % self.ep, within % self.etp
        dense_replicas = self.world_size // (self.pp * self.tp)
        expert_replicas = self.world_size // (self.pp * self.ep * self.etp)
        return Place(
            rank=rank,
            tp=within % self.tp,
            tp_size=self.tp,
            etp=etp,
            etp_size=self.etp,
            stage=stage,
            stages=self.pp,
            first_layer=sum(of_stages[:stage]),
            layers=of_stages[stage],
            first_expert=ep * (experts // self.ep),
            experts=experts // self.ep,
            replica=(within // self.tp, dense_replicas),
            expert_replica=(within // (self.ep * self.etp), expert_replicas),
        )


def finish_gather(model: Any) -> None:
    """Ends the gathers of parameters that Megatron's optimizer leaves to the next forward pass (`overlap_param_gather`).

    `model`: what Megatron's DistributedDataParallel wraps, or a list of such chunks; other models are passed over. This is a
    collective: every rank calls it after its optimizer step and before Trainer.refit(). Costs nothing where gathers are not overlapped.
    """
    for chunk in chunks_of(model):
        sync = getattr(chunk, "start_param_sync", None)
        if sync is not None and getattr(getattr(chunk, "ddp_config", None), "overlap_param_gather", False):
            sync(force_sync=True)


def chunks_of(model: Any) -> list[Any]:
    """The chunks of a rank's model: Megatron has a list of them, one a virtual stage."""
    return list(model) if isinstance(model, (list, tuple)) else [model]


def _divide(n: int, parts: int) -> list[int]:
    """`n` in `parts` counts as even as can be, the larger first."""
    return [n // parts + (i < n % parts) for i in range(parts)]


# ---- mapping classes ----


@dataclass(frozen=True)
class Part:
    """Rows [first, first + count) of a parameter are the box at `offset` of tensor `name` of `shape`.

    `shared`: this rank's number among the tensor-parallel ranks that hold the same box, and how many they are.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    first: int
    count: int
    shared: tuple[int, int] = (0, 1)


class Mapped(Protocol):
    """How a parameter is made of tensors."""

    @property
    def expert(self) -> bool:
        """Whether the parameter is of an expert, and therefore sharded by expert tensor parallel."""

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        """The parts of a parameter of `shape` on rank `tp` of `tp_size`. Raises ValueError if the shape does not fit."""


@dataclass(frozen=True)
class Replicated:
    """The parameter is the whole tensor, on every tensor-parallel rank."""

    name: str
    expert: bool = False

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        yield Part(self.name, shape, (0,) * len(shape), 0, shape[0], (tp, tp_size))


@dataclass(frozen=True)
class Column:
    """Column parallel: the parameter is a shard of the tensor's rows (dimension 0).

    `size`: how many rows the tensor has where storage is padded, as in embedding and output layer; None: no padding.
    """

    name: str
    expert: bool = False
    size: int | None = None

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        rows = shape[0]
        size = rows * tp_size if self.size is None else self.size
        if size > rows * tp_size:
            raise ValueError(f"{tp_size} shards of {rows} rows are fewer than the tensor's {size}")
        begin = min(tp * rows, size)
        yield Part(self.name, (size, *shape[1:]), (begin,) + (0,) * len(shape[1:]), 0, min(rows, size - begin))


@dataclass(frozen=True)
class Row:
    """Row parallel: the parameter is a shard of the tensor's columns (dimension 1)."""

    name: str
    expert: bool = False

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        if len(shape) < 2:
            raise ValueError("it has no columns")
        rows, columns, *rest = shape
        yield Part(self.name, (rows, columns * tp_size, *rest), (0, tp * columns) + (0,) * len(rest), 0, rows)


@dataclass(frozen=True)
class QKV:
    """Fused queries, keys and values: for each KV group its query heads, its key head, its value head.

    `name` has {part} for q, k and v. With fewer KV heads than ranks, ranks share a group: each has its own query heads and the
    whole of the group's key and value. Weights and biases alike.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    expert: bool = False

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        self._check(tp_size)
        groups = max(1, self.kv_heads // tp_size)
        first_group = tp * self.kv_heads // tp_size
        heads = self.heads // tp_size
        group_heads = heads // groups
        if shape[0] != (heads + 2 * groups) * self.head_dim:
            raise ValueError(f"{heads} query and 2 * {groups} key and value heads of {self.head_dim} have other rows")
        sharing = max(1, tp_size // self.kv_heads)
        row = 0
        for group in range(groups):
            kv = first_group + group
            for part, head, count, total, shared in (
                ("q", tp * heads + group * group_heads, group_heads, self.heads, (0, 1)),
                ("k", kv, 1, self.kv_heads, (tp % sharing, sharing)),
                ("v", kv, 1, self.kv_heads, (tp % sharing, sharing)),
            ):
                rows = count * self.head_dim
                whole = (total * self.head_dim, *shape[1:])
                offset = (head * self.head_dim,) + (0,) * len(shape[1:])
                yield Part(self.name.replace("{part}", part), whole, offset, row, rows, shared)
                row += rows

    def _check(self, tp_size: int) -> None:
        small, large = sorted((self.kv_heads, tp_size))
        if self.heads % tp_size or large % small or self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} heads, {self.kv_heads} KV heads and tensor parallel over {tp_size} don't divide each other")


@dataclass(frozen=True)
class GatedMLP:
    """The fused first layer of a gated MLP: a shard of the gate's rows, then a shard of the up projection's. `name` has {part}."""

    name: str
    expert: bool = False

    def parts(self, shape: tuple[int, ...], tp: int, tp_size: int) -> Iterator[Part]:
        rows, odd = divmod(shape[0], 2)
        if odd:
            raise ValueError("it has no two halves")
        for i, part in enumerate(("gate", "up")):
            offset = (tp * rows,) + (0,) * len(shape[1:])
            yield Part(self.name.replace("{part}", part), (rows * tp_size, *shape[1:]), offset, i * rows, rows)


# ---- from parameters to shards ----


def model_shards(model: Any, table: Mapping[str, Mapped | None], place: Place) -> MadeShards:
    """The shards of a rank's model, for Trainer.register (see `shards`). Each refit begins with `finish_gather(model)` on every rank, and
    looks the parameters up in the model again.

    `model`: a module, bare or in Megatron's wrappers, or a list of one. Raises Unimplemented for a list of several chunks, since each
    numbers its layers from 0: give `shards` their parameters by names of your own.
    """
    chunks = chunks_of(model)
    if len(chunks) != 1:
        raise Unimplemented(f"rank {place.rank}: the model has {len(chunks)} chunks of layers: pass their parameters to shards()", field="model")

    def make() -> MadeShards:
        named = {_WRAPPERS.sub("", name): parameter for name, parameter in chunks[0].named_parameters()}
        return MadeShards(shards(named, table, place), MadeOf(chunks, make, first=partial(finish_gather, model)))

    return make()


_WRAPPERS = re.compile(r"^(module\.)+")  # what each wrapper (DistributedDataParallel, Float16Module) puts before a name


def shards(parameters: Mapping[str, Any], table: Mapping[str, Mapped | None], place: Place) -> list[Shard]:
    """The shards that a rank's parameters are, for `refitd.layout.shards.collect`.

    `parameters`: by Megatron's names, as a rank has them. `table`: mappings by pattern of these names, with {layer}, {expert} and
    '*'; None for what is not transferred, such as "*._extra_state". The first pattern that matches counts.

    Raises InvalidArgument, naming the parameter and the rank, where no pattern matches or a shape does not fit its mapping.
    """
    patterns = [(_compiled(pattern), mapped) for pattern, mapped in table.items()]
    found: list[Shard] = []
    for name, parameter in parameters.items():
        for regex, mapped in patterns:
            match = regex.fullmatch(name)
            if match is not None:
                break
        else:
            raise InvalidArgument(f"rank {place.rank}: no pattern of the table matches parameter '{name}'", culprit=f"parameter '{name}'")
        if mapped is not None:
            numbers = _global_numbers(name, match.groupdict(), place)
            found += _shards_of(name, parameter, mapped, numbers, place)
    return found


def _compiled(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern).replace(r"\*", ".*")
    for what in ("layer", "expert"):
        escaped = escaped.replace(re.escape("{" + what + "}"), rf"(?P<{what}>\d+)")
    return re.compile(escaped)


def _global_numbers(name: str, local: Mapping[str, str], place: Place) -> dict[str, int]:
    numbers = {}
    for what, first, count in (("layer", place.first_layer, place.layers), ("expert", place.first_expert, place.experts)):
        if what not in local:
            continue
        number = int(local[what])
        if number >= count:
            raise InvalidArgument(
                f"rank {place.rank}: parameter '{name}' is of {what} {number}, but the rank has {count}", culprit=f"parameter '{name}'"
            )
        numbers[what] = first + number
    return numbers


def _shards_of(name: str, parameter: Any, mapped: Mapped, numbers: Mapping[str, int], place: Place) -> Iterator[Shard]:
    """The shards that one parameter is. `numbers`: global layer and expert, for the names of tensors."""
    tp, tp_size = (place.etp, place.etp_size) if mapped.expert else (place.tp, place.tp_size)
    index, count = place.expert_replica if mapped.expert else place.replica
    shape = tuple(parameter.shape)
    try:
        parts = list(mapped.parts(shape, tp, tp_size))
    except ValueError as error:
        raise InvalidArgument(
            f"rank {place.rank}: parameter '{name}' of shape {shape} is no {type(mapped).__name__}: {error}", culprit=f"parameter '{name}'"
        ) from None
    row = prod(shape[1:])
    for part in parts:
        # All ranks' shards of a tensor are equally large, except for the vocabulary, of which the first rank has the most rows.
        rows = [other.count for other in parts if other.name == part.name]
        largest = row * (min(shape[0], part.shape[0]) if isinstance(mapped, Column) else sum(rows))
        ranges = part.shape[1:] == shape[1:]
        tensor = part.name
        for what, number in numbers.items():
            tensor = tensor.replace("{" + what + "}", str(number))
        if part.count == 0:
            yield Shard(tensor, part.shape, None, None, parameter.dtype, (0, 1), largest, ranges)
            continue
        held = parameter if part.count == shape[0] else parameter[part.first : part.first + part.count]
        replica = (index * part.shared[1] + part.shared[0], count * part.shared[1])
        yield Shard(tensor, part.shape, held, part.offset, None, replica, largest, ranges)


# ---- tables ----


def table_of(config: Any) -> dict[str, Mapped | None]:
    """The table of a model with Megatron Core's names of parameters and a Hugging Face checkpoint's names of tensors.

    `config`: attributes as in Hugging Face's configurations: num_attention_heads, num_key_value_heads, head_dim, vocab_size,
    tie_word_embeddings, and for latent attention kv_lora_rank. For Qwen2, Qwen3, their mixtures of experts, DeepSeek-V3,
    and models with the same names. With tied embeddings the output layer is not transferred. For other models write the table by hand, or change
    this one: shards() refuses parameters that no pattern matches.
    """
    layer = "decoder.layers.{layer}"
    to = "model.layers.{layer}"
    table: dict[str, Mapped | None] = {
        "*._extra_state": None,
        "embedding.word_embeddings.weight": Column("model.embed_tokens.weight", size=config.vocab_size),
        "output_layer.weight": None
        if getattr(config, "tie_word_embeddings", False)
        else Column("lm_head.weight", size=config.vocab_size),
        "decoder.final_layernorm.weight": Replicated("model.norm.weight"),
        f"{layer}.input_layernorm.weight": Replicated(f"{to}.input_layernorm.weight"),
        f"{layer}.self_attention.linear_qkv.layer_norm_weight": Replicated(f"{to}.input_layernorm.weight"),
        f"{layer}.self_attention.linear_proj.weight": Row(f"{to}.self_attn.o_proj.weight"),
        f"{layer}.pre_mlp_layernorm.weight": Replicated(f"{to}.post_attention_layernorm.weight"),
        f"{layer}.mlp.linear_fc1.layer_norm_weight": Replicated(f"{to}.post_attention_layernorm.weight"),
        f"{layer}.mlp.router.weight": Replicated(f"{to}.mlp.gate.weight"),
        f"{layer}.mlp.router.expert_bias": Replicated(f"{to}.mlp.gate.e_score_correction_bias"),
    }
    table |= _latent_attention(layer, to) if getattr(config, "kv_lora_rank", None) else _attention(layer, to, config)
    for megatron, tensors, expert in (
        ("mlp.linear_{fc}.weight", "mlp.{part}_proj.weight", False),
        ("mlp.shared_experts.linear_{fc}.weight", "mlp.shared_experts.{part}_proj.weight", False),
        ("mlp.experts.linear_{fc}.weight{expert}", "mlp.experts.{expert}.{part}_proj.weight", True),
        ("mlp.experts.local_experts.{expert}.linear_{fc}.weight", "mlp.experts.{expert}.{part}_proj.weight", True),
    ):
        table[f"{layer}.{megatron.replace('{fc}', 'fc1')}"] = GatedMLP(f"{to}.{tensors}", expert)
        table[f"{layer}.{megatron.replace('{fc}', 'fc2')}"] = Row(f"{to}.{tensors.replace('{part}', 'down')}", expert)
    return table


def _attention(layer: str, to: str, config: Any) -> dict[str, Mapped | None]:
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    sizes = dict(heads=heads, kv_heads=config.num_key_value_heads, head_dim=head_dim)
    return {
        f"{layer}.self_attention.linear_qkv.weight": QKV(f"{to}.self_attn.{{part}}_proj.weight", **sizes),
        f"{layer}.self_attention.linear_qkv.bias": QKV(f"{to}.self_attn.{{part}}_proj.bias", **sizes),
        f"{layer}.self_attention.q_layernorm.weight": Replicated(f"{to}.self_attn.q_norm.weight"),
        f"{layer}.self_attention.k_layernorm.weight": Replicated(f"{to}.self_attn.k_norm.weight"),
    }


def _latent_attention(layer: str, to: str) -> dict[str, Mapped | None]:
    return {
        f"{layer}.self_attention.linear_q_proj.weight": Column(f"{to}.self_attn.q_proj.weight"),
        f"{layer}.self_attention.linear_q_down_proj.weight": Replicated(f"{to}.self_attn.q_a_proj.weight"),
        f"{layer}.self_attention.linear_q_up_proj.layer_norm_weight": Replicated(f"{to}.self_attn.q_a_layernorm.weight"),
        f"{layer}.self_attention.q_layernorm.weight": Replicated(f"{to}.self_attn.q_a_layernorm.weight"),
        f"{layer}.self_attention.linear_q_up_proj.weight": Column(f"{to}.self_attn.q_b_proj.weight"),
        f"{layer}.self_attention.linear_kv_down_proj.weight": Replicated(f"{to}.self_attn.kv_a_proj_with_mqa.weight"),
        f"{layer}.self_attention.linear_kv_up_proj.layer_norm_weight": Replicated(f"{to}.self_attn.kv_a_layernorm.weight"),
        f"{layer}.self_attention.kv_layernorm.weight": Replicated(f"{to}.self_attn.kv_a_layernorm.weight"),
        f"{layer}.self_attention.linear_kv_up_proj.weight": Column(f"{to}.self_attn.kv_b_proj.weight"),
    }


# ---- Megatron-Bridge's conversion tasks ----

Replica = tuple[int, int]  # a rank's number among those that hold the same, and how many they are


def bridge_shards(bridge: Any, model: Any, **options: Any) -> MadeShards:
    """The shards of a rank's model, for Trainer.register: those of `bridge.get_conversion_tasks(model)`, with the options of `task_shards`. They
    are made again where the model's parameters were replaced."""

    def make() -> MadeShards:
        found = task_shards(bridge.get_conversion_tasks(model), **options)
        return MadeShards(found, MadeOf(chunks_of(model), make, first=partial(finish_gather, model)))

    return make()


def task_shards(
    tasks: Iterable[Any], *, vocab_size: int | None = None, replica: Replica | None = None, expert_replica: Replica | None = None, rank: int = 0
) -> list[Shard]:
    """The shards that a rank's parameters are, for Trainer.register.

    `tasks`: of this rank, as get_conversion_tasks() returns them; None among them, and tasks of other pipeline stages, are passed over.
    `vocab_size`: rows of embedding and output layer, which Megatron pads; None: there is no padding. `replica`, `expert_replica`: this
    rank's place among the data-parallel ranks of dense parameters, and of experts; None: by Megatron's parallel_state. `rank`:
    for errors.

    Raises Unimplemented, naming the parameter and its mapping, where the mapping is no plain choice of boxes; InvalidArgument where a
    shape does not fit.
    """
    if replica is None or expert_replica is None:
        dense, expert = replicas()
        replica, expert_replica = replica or dense, expert_replica or expert
    found: list[Shard] = []
    for task in tasks:
        if task is not None and task.param_weight is not None:
            found += _shards_of_task(task, vocab_size, replica, expert_replica, rank)
    return found


def replicas() -> tuple[Replica, Replica]:
    """This rank's place among the data-parallel ranks of dense parameters, and of experts, by Megatron's parallel_state."""
    from megatron.core import parallel_state as state

    return (
        (state.get_data_parallel_rank(with_context_parallel=True), state.get_data_parallel_world_size(with_context_parallel=True)),
        (state.get_expert_data_parallel_rank(), state.get_expert_data_parallel_world_size()),
    )


def _shards_of_task(task: Any, vocab_size: int | None, replica: Replica, expert_replica: Replica, rank: int) -> Iterator[Shard]:
    mapping = _delegate(task)
    mapped, names = _mapped(task, mapping, vocab_size)
    tp, tp_size = int(mapping.tp_rank), int(mapping.tp_size)  # for an expert's parameter: of expert tensor parallelism
    place = Place(rank, tp, tp_size, tp, tp_size, 0, 1, 0, 0, 0, 0, replica, expert_replica)
    for shard in _shards_of(task.global_param_name, task.param_weight, mapped, {}, place):
        yield replace(shard, name=names[shard.name])


def _delegate(task: Any) -> Any:
    """The task's mapping, or the mapping that an AutoMapping stands for."""
    mapping = task.mapping
    if type(mapping).__name__ != "AutoMapping":
        return mapping
    if getattr(mapping, "permute_dims", None) is not None:
        raise _refused(task, f"permutes dimensions {mapping.permute_dims}")
    return mapping._get_or_create_mapping(mapping._detect_parallelism_type(task.megatron_module))


def _mapped(task: Any, mapping: Any, vocab_size: int | None) -> tuple[Mapped, dict[str, str]]:
    """This module's equal of Bridge's mapping, and the checkpoint's names by the names that it yields."""
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
