"""Shards of fully sharded data parallelism. Imports torch when used.

FSDP2 (`fully_shard`) keeps DTensors: `refitd.layout.shards.collect(model)` or `collect(model.state_dict())` takes them as they are.

FSDP1 (`FullyShardedDataParallel`) keeps one flat parameter a unit, of which each rank holds a range that cuts tensors anywhere.
`flat_shards(model)` gives these ranges as boxes, in place: no gather, no copy. `collect` also understands a state dict of type
SHARDED_STATE_DICT, of ShardedTensor or DTensor; but FSDP1 makes the tensors of such a dict anew on every call, so that they must
be registered again for each version.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any

from ..errors import InvalidArgument
from .shards import MadeOf, MadeShards, Shard, range_shards

# Prefixes that wrappers add to the names of parameters.
_WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def flat_shards(module: Any) -> list[Shard]:
    """This rank's shards of the parameters of a model that FSDP1 wraps: views of its flat parameters, for `collect`.

    Tied parameters beyond the first, and parameters of which this rank holds nothing, are listed without a tensor. Parameters
    that FSDP was told to ignore are whole, on every rank. Registered, the list is made again where a flat parameter's memory moved, as it
    does when a framework offloads it, or where the module's parameters were replaced. Raises InvalidArgument if no submodule is wrapped.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    units = [(name, unit) for name, unit in module.named_modules() if isinstance(unit, FullyShardedDataParallel)]
    if not units:
        raise InvalidArgument("no submodule is wrapped by FullyShardedDataParallel", culprit=type(module).__name__)
    shards: list[Shard] = []
    flat: set[int] = set()  # ids of flat parameters and of the views that stand for the original ones
    for name, unit in units:
        if unit._handle is None:  # the unit has no parameters of its own
            continue
        parameter = unit._handle.flat_param
        flat.update(map(id, (parameter, *(parameter._params or ()), *(parameter._shared_params or ()))))
        shards.extend(_of_unit(_clean(f"{name}." if name else ""), unit))
    for name, parameter in module.named_parameters():
        if id(parameter) not in flat:
            group = units[0][1].process_group
            replica = (group.rank(), group.size())
            shape = tuple(parameter.shape)
            shards.append(Shard(_clean(name), shape, parameter, None, None, replica, parameter.numel(), True))
    watched = [partial(_local_of, unit._handle) for _, unit in units if unit._handle is not None]
    return MadeShards(shards, MadeOf([module], partial(flat_shards, module), watched))


def _local_of(handle: Any) -> Any:
    """What this rank holds of a flat parameter."""
    flat = handle.flat_param
    # FSDP1 names the shard with the first forward pass; until then the flat parameter is nothing else.
    return getattr(flat, "_local_shard", flat.data) if handle.uses_sharded_strategy else flat.data


def _clean(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _of_unit(prefix: str, unit: Any) -> Iterator[Shard]:
    handle = unit._handle
    flat = handle.flat_param
    sharded = handle.uses_sharded_strategy
    local = _local_of(handle)
    replicas = unit._inter_node_pg if hasattr(unit, "_inter_node_pg") else None if sharded else unit.process_group
    replica = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
    shapes = {}
    total = sum(prod(shape) for shape in flat._shapes)
    for fqn, shape, info in zip(flat._fqns, flat._shapes, flat._shard_param_infos):
        name = _clean(prefix + fqn)
        shapes[fqn] = tuple(shape)
        # A bound for the unit, of which each tensor has its share: which rank holds most of a tensor does not matter.
        largest = -(-prod(shape) * local.numel() // total)
        if not info.in_shard:
            yield Shard(name, tuple(shape), None, None, local.dtype, (0, 1), largest, True)
            continue
        elements = local[info.offset_in_shard : info.offset_in_shard + info.numel_in_shard]
        whole = Shard(name, tuple(shape), elements, replica=replica, largest=largest)
        yield from range_shards(whole, info.intra_param_start_idx)
    for shared in flat._shared_param_infos:
        shape = shapes[_join(shared.prim_module_name, shared.prim_param_name)]
        name = _clean(prefix + _join(shared.module_name, shared.param_name))
        yield Shard(name, shape, None, None, local.dtype, (0, 1), 0, True)


def _join(module: str, parameter: str) -> str:
    return _clean(f"{module}.{parameter}" if module else parameter)
