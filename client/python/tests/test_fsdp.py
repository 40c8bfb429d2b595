"""Shards of FSDP1: flat parameters in place, and sharded state dicts."""

import pytest

torch = pytest.importorskip("torch")

from layout_util import Reader, pushed_by  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType  # noqa: E402

from refitd.errors import InvalidArgument  # noqa: E402
from refitd.layout.shards import flat_shards  # noqa: E402
from refitd.layout.shards import collect  # noqa: E402


class Model(torch.nn.Module):
    """Sizes that no number of ranks divides; the head is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(11, 6)
        self.up = torch.nn.Linear(6, 13)
        self.down = torch.nn.Linear(13, 6, bias=False)
        self.scale = torch.nn.Parameter(torch.ones(3, 1, 2))
        self.head = torch.nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        return self.head(x + self.down(torch.relu(self.up(x))) + self.scale.expand(3, 3, 2)[0].reshape(6))


def wrap(strategy, use_orig_params):
    torch.manual_seed(0)
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, "device_id": torch.device("cpu")}
    model = Model()
    model.up = FullyShardedDataParallel(model.up, **options)
    model.down = FullyShardedDataParallel(model.down, **options)
    return FullyShardedDataParallel(model, **options)


def supplied_by(layout):
    """(name, box's offset or first element, elements) of what a rank supplies, by boxes and pushes."""
    reader = Reader(layout)
    found = [(layout.tensors[b.tensor_index].name, b.offset, reader.view(b).clone()) for b in layout.boxes]
    if layout.pushed is not None:
        found += pushed_by(layout)
    return found


def train(rank, world):
    """For each kind of model: the full weights after each step, and what layouts made before supply then."""
    results = []
    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD):
        for use_orig_params in (True, False):
            model = wrap(strategy, use_orig_params)
            layouts = [
                collect(flat_shards(model), rank=rank),
                collect(flat_shards(model), torch.bfloat16, rank=rank, world_size=world),
                collect(flat_shards(model), torch.bfloat16, rank=rank, world_size=world, staging_bytes=1),
            ]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.arange(6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                with FullyShardedDataParallel.summon_full_params(model, writeback=False):
                    full = {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
                results.append((full, [supplied_by(layout) for layout in layouts], layouts[0].tensors))
    return results


def _plain(name):
    return name.replace("_fsdp_wrapped_module.", "")


@pytest.mark.parametrize("world", [2, 3])
def test_flat_parameters_supply_every_element(world):
    ranks = run_ranks(world, train)
    for step in range(len(ranks[0])):
        full = ranks[0][step][0]
        assert {spec.name for spec in ranks[0][step][2]} == set(full) | {"head.weight"}
        for kind in range(3):
            counts = {name: torch.zeros(tensor.numel(), dtype=torch.int) for name, tensor in full.items()}
            for rank in range(world):
                for name, at, values in ranks[rank][step][1][kind]:
                    index = torch.arange(full[name].numel())
                    if isinstance(at, int):
                        index = index[at : at + values.numel()]
                    else:
                        box = tuple(slice(o, o + n) for o, n in zip(at, values.shape))
                        index = index.view(full[name].shape)[box].reshape(-1)
                    assert torch.equal(full[name].view(-1)[index].to(values.dtype), values.reshape(-1))
                    counts[name][index] += 1
            assert all((count > 0).all() for count in counts.values())
            if kind == 2:
                assert all((count == 1).all() for count in counts.values()), "pushed once, however many ranks hold it"


def offloaded(rank, world):
    """The weights of flat parameters whose memory a framework took away and gave back, and what the layout supplies then."""
    model = wrap(ShardingStrategy.FULL_SHARD, True)
    layout = collect(flat_shards(model), rank=rank)
    model(torch.arange(6)).square().mean().backward()
    unchanged = layout.source.renewed() is None
    for module in model.modules():
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            handle.flat_param.data = handle.flat_param.data + 1
            handle.flat_param._local_shard = handle.flat_param.data
    layout = layout.source.renewed()
    supplied = {name: values for name, _, values in supplied_by(layout)}
    again = layout.source.renewed() is None
    return unchanged, again, layout.source.rebound, {name: float(values.sum()) for name, values in supplied.items()}


def test_flat_parameters_whose_memory_moved_are_followed():
    for unchanged, again, rebound, supplied in run_ranks(2, offloaded):
        assert unchanged and again and rebound == len(supplied) > 0


def sharded_state_dict(rank, world):
    model = wrap(ShardingStrategy.FULL_SHARD, True)
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        full = {_plain(name): p.detach().clone() for name, p in model.named_parameters()}
    FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    layout = collect(model.state_dict(), rank=rank)
    return full, supplied_by(layout), {type(t).__name__ for t in model.state_dict().values()}


def test_a_sharded_state_dict_is_understood():
    ranks = run_ranks(3, sharded_state_dict)
    full = ranks[0][0]
    assert "ShardedTensor" in ranks[0][2]
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in full.items()}
    for _, supplied, _ in ranks:
        for name, offset, values in supplied:
            if name == "head.weight":
                continue
            box = tuple(slice(o, o + n) for o, n in zip(offset, values.shape))
            assert torch.equal(full[name][box], values)
            seen[name][box] = True
    assert all(mask.all() for mask in seen.values())


def test_a_model_without_fsdp_is_refused():
    with pytest.raises(InvalidArgument, match="no submodule is wrapped"):
        flat_shards(Model())
