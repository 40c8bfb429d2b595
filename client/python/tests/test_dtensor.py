"""Boxes of DTensors against what torch itself holds and gathers."""

import random
from math import prod

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from layout_util import Reader, assemble, pushed_by  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: E402
from torch.distributed.tensor.placement_types import _StridedShard  # noqa: E402

from refitd.errors import InvalidArgument  # noqa: E402
from refitd.layout import _indices, _place  # noqa: E402
from refitd.layout.shards import collect  # noqa: E402

MESHES = {2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (1, 2, 2)]}


@pytest.mark.parametrize("seed", range(400))
def test_indices_are_those_that_torch_cuts(seed):
    rng = random.Random(seed)
    n = rng.randint(0, 40)
    expected = torch.arange(n)
    splits, coordinate = [], []
    for _ in range(rng.randint(1, 3)):
        shards = rng.randint(1, 4)
        factor = rng.choice([1, 2, 3])
        index = rng.randrange(shards)
        placement = _StridedShard(0, split_factor=factor) if factor > 1 else Shard(0)
        expected = placement._split_tensor(expected, shards, with_padding=False)[0][index]
        splits.append((shards, factor))
        coordinate.append(index)
    found = [i for begin, size in _indices(n, splits, coordinate) for i in range(begin, begin + size)]
    assert found == expected.tolist()


def placements_of(rng, mesh_dims, tensor_dims):
    return [rng.choice([Replicate(), Shard(rng.randrange(tensor_dims))]) for _ in range(mesh_dims)]


def random_dtensors(rank, world, seed):
    """On each rank: the boxes' elements equal the full tensor's, and no rank lacks or repeats elements."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    meshes = [init_device_mesh("cpu", shape) for shape in MESHES[world]]
    tensors, full = {}, {}
    for i in range(25):
        mesh = rng.choice(meshes)
        shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 3))]
        placements = placements_of(rng, mesh.ndim, len(shape))
        tensors[f"t{i}"] = distribute_tensor(torch.randn(shape), mesh, placements)
        full[f"t{i}"] = tensors[f"t{i}"].full_tensor()
        offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)[1]
        parts = _place(tuple(shape), tuple(mesh.shape), tuple(mesh.get_coordinate()), _key(placements)).parts
        assert not parts or parts[0].offset == tuple(offset)
    whole = collect(tensors, rank=rank, tied=False)
    read = [
        (whole.tensors[box.tensor_index].name, box.offset, Reader(whole).view(box).clone()) for box in whole.boxes
    ]
    pushed = collect(tensors, torch.bfloat16, staging="push", rank=rank, tied=False)
    return full, read, pushed_by(pushed)


def _key(placements):
    return tuple(("replicate",) if p.is_replicate() else ("shard", p.dim) for p in placements)


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (3, 1), (4, 2), (4, 3)])
def test_random_placements_hold_the_full_tensor(world, seed):
    results = run_ranks(world, random_dtensors, seed)
    full = results[0][0]
    seen = {name: torch.zeros(tensor.shape, dtype=torch.bool) for name, tensor in full.items()}
    for _, read, _ in results:
        for name, offset, values in read:
            index = tuple(slice(o, o + n) for o, n in zip(offset, values.shape))
            assert torch.equal(full[name][index], values)
            seen[name][index] = True
    assert all(mask.all() for mask in seen.values())
    # A cast is pushed once, whoever holds it.
    pushed = {name: torch.zeros(tensor.numel(), dtype=torch.bfloat16) for name, tensor in full.items()}
    counts = {name: torch.zeros(tensor.numel(), dtype=torch.int) for name, tensor in full.items()}
    for _, _, chunks in results:
        for name, start, values in chunks:
            pushed[name][start : start + len(values)] = values
            counts[name][start : start + len(values)] += 1
    for name, tensor in full.items():
        assert (counts[name] == 1).all()
        assert torch.equal(pushed[name].view(tensor.shape), tensor.bfloat16())


class Model(torch.nn.Module):
    """A block whose sizes nothing divides, with a tied head and a buffer."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(13, 10)
        self.up = torch.nn.Linear(10, 22, bias=True)
        self.down = torch.nn.Linear(22, 10, bias=False)
        self.norm = torch.nn.LayerNorm(10)
        self.head = torch.nn.Linear(10, 13, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.arange(7.0))

    def forward(self, x):
        x = self.embed(x)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def fsdp2_model(rank, world, tp):
    """Trains an FSDP2 (and tensor-parallel) model for two steps; the layout made before must show each step's weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Model()
    if tp > 1:
        mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        mesh = mesh["dp"]
    else:
        mesh = init_device_mesh("cpu", (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    layouts = {
        "plain": collect(model, rank=rank, world_size=world),
        "whole": collect(model, torch.bfloat16, {"bias": None}, rank=rank, world_size=world),
        "push": collect(model, torch.bfloat16, {"bias": None}, rank=rank, world_size=world, staging="push"),
        "auto": collect(model, torch.bfloat16, {"bias": None}, rank=rank, world_size=world, staging_bytes=300),
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for _ in range(2):
        model(torch.arange(8)[None]).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in model.state_dict().items()}
        supplied = {}
        for kind, layout in layouts.items():
            reader = Reader(layout)
            supplied[kind] = [
                (layout.tensors[b.tensor_index].name, b.offset, reader.view(b).clone()) for b in layout.boxes
            ]
            if layout.pushed is not None:
                supplied[kind] += [(name, (start,), elements) for name, start, elements in pushed_by(layout)]
        steps.append((full, supplied))
    return steps, sorted({str(p.placements) for p in model.parameters()})


@pytest.mark.parametrize(("world", "tp"), [(2, 1), (3, 1), (4, 2)])
def test_an_fsdp2_model_is_followed_through_its_steps(world, tp):
    results = run_ranks(world, fsdp2_model, tp)
    if tp > 1:
        assert any("_StridedShard" in placements for placements in results[0][1])
    for step in range(2):
        full = {name: tensor for name, tensor in results[0][0][step][0].items() if name != "head.weight"}
        for kind in ("plain", "whole", "push", "auto"):
            seen = {name: torch.zeros(tensor.numel(), dtype=torch.bool) for name, tensor in full.items()}
            for steps, _ in results:
                for name, offset, values in steps[step][1][kind]:
                    expected = full[name] if kind == "plain" or name == "bias" else full[name].bfloat16()
                    index = torch.arange(expected.numel()).view(expected.shape)
                    if len(offset) == expected.dim() and values.dim() == expected.dim():
                        index = index[tuple(slice(o, o + n) for o, n in zip(offset, values.shape))]
                    else:
                        index = index.view(-1)[offset[0] : offset[0] + len(values)]
                    assert torch.equal(expected.reshape(-1)[index.reshape(-1)].view(values.shape), values)
                    seen[name][index.reshape(-1)] = True
            assert all(mask.all() for mask in seen.values()), kind


def refusals(rank, world):
    mesh = init_device_mesh("cpu", (world,))
    messages = []
    partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
    torn = DTensor.from_local(torch.ones(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 2)), stride=(2, 1))
    for name, tensor in (("p", partial), ("torn", torn)):
        try:
            collect({name: tensor}, rank=rank)
        except InvalidArgument as error:
            messages.append((error.culprit, str(error)))
        else:
            messages.append((name, "accepted"))
    dist.barrier()
    return messages


def test_partial_values_and_shards_of_another_size_are_refused():
    results = run_ranks(2, refusals)
    for rank, messages in enumerate(results):
        assert messages[0][0] == "tensor 'p'" and f"rank {rank}: tensor 'p' has placement" in messages[0][1]
    # 7 rows over two ranks are 4 and 3: the first rank's 3 are wrong.
    assert results[0][1][0] == "tensor 'torn'" and "local tensor of shape (3, 2)" in results[0][1][1]
    assert results[1][1] == ("torn", "accepted")


def test_the_decision_to_push_is_the_same_on_ranks_with_unequal_shards():
    # 5 rows over 4: 2, 2, 1, 0.
    placed = [_place((5, 3), (4,), (i,), (("shard", 0),)) for i in range(4)]
    assert {p.largest for p in placed} == {6} and {p.rows for p in placed} == {True}
    assert [prod(p.local_shape) for p in placed] == [6, 6, 3, 0]
    assert not _place((5, 6), (4,), (0,), (("shard", 1),)).rows
    assert _place((1, 6), (4,), (0,), (("shard", 1),)).rows
    assert assemble([]) == {}
