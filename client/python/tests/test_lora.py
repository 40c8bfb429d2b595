"""Adapters that are merged into shards: the bits, whatever the sharding, and what is refused."""

import random
import threading

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from layout_util import assemble, pushed_by  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

import refitd  # noqa: E402
from refitd.integrations import lora  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import InvalidArgument  # noqa: E402
from refitd.layout.shards import Shard, collect  # noqa: E402

SECONDS = 120


def by_the_book(weight, terms, dtype):
    """The full tensor, merged by the operations that refitd.integrations.lora states, in their order."""
    kind = torch.float64 if weight.dtype == torch.float64 else torch.float32
    total = weight.to(kind)
    for b, a, scaling in terms:
        b, a = b.to(kind), a.to(kind)
        product = b[:, :1] * a[:1]
        for k in range(1, b.shape[1]):
            product = product + b[:, k : k + 1] * a[k : k + 1]
        total = total + product * scaling
    return total.to(dtype)


def adapter_of(rows, columns, rank, dtype=torch.float32, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, rank, generator=generator).to(dtype), torch.randn(rank, columns, generator=generator).to(dtype)


def boxes_of(whole, rng):
    """The tensor cut into boxes at random: (box, offset)."""
    rows = sorted({0, whole.shape[0], rng.randrange(whole.shape[0]), rng.randrange(whole.shape[0])})
    for top, bottom in zip(rows, rows[1:]):
        columns = sorted({0, whole.shape[1], rng.randrange(whole.shape[1])})
        for left, right in zip(columns, columns[1:]):
            box = whole[top:bottom, left:right]
            yield (box.t().contiguous().t() if rng.random() < 0.5 else box.contiguous()), (top, left)


@pytest.mark.parametrize("staging", ["whole", "push"])
@pytest.mark.parametrize("seed", range(20))
def test_merged_shards_are_the_merged_tensor_to_the_bit_whatever_the_boxes(seed, staging):
    rng = random.Random(seed)
    torch.manual_seed(seed)
    weight = torch.randn(rng.randint(1, 40), rng.randint(1, 40)).to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
    terms = [
        (*adapter_of(*weight.shape, rng.randint(1, 9), rng.choice([torch.float32, torch.bfloat16]), seed + i), rng.choice([0.3, 2.0]))
        for i in range(rng.randint(1, 3))
    ]
    delivered = rng.choice([torch.bfloat16, torch.float32, weight.dtype])
    product = lora.Product("w", weight, [lora.Term(*term) for term in terms])
    shards = [Shard("w", tuple(weight.shape), box, at, addition=product) for box, at in boxes_of(weight, rng)]
    layouts = [collect([shard], delivered, staging=staging, rank=i) for i, shard in enumerate(shards)]
    assert torch.equal(assemble(layouts)["w"], by_the_book(weight, terms, delivered))


def test_blocks_of_a_large_tensor_make_no_difference():
    weight = torch.randn(700, 300).bfloat16()
    terms = [(*adapter_of(700, 300, 8, torch.bfloat16), 0.25)]
    found = assemble([collect({"w": lora.add(weight, *terms[0])}, torch.bfloat16, world_size=1)])
    assert torch.equal(found["w"], by_the_book(weight, terms, torch.bfloat16))


def test_it_is_the_product_of_the_matrices_where_nothing_is_rounded():
    """Small whole numbers: every order of the sum gives the same, so that a matrix product can be the judge."""
    weight, (b, a) = torch.randint(-8, 8, (33, 21)).float(), (torch.randint(-8, 8, (33, 5)).float(), torch.randint(-8, 8, (5, 21)).float())
    found = assemble([collect({"w": lora.add(weight, b, a, 0.5)}, world_size=1)])
    assert torch.equal(found["w"], weight + 0.5 * (b @ a))
    flipped = lora.Product("w", weight.t(), [lora.Term(b, a, 0.5, transposed=True)])
    layout = collect([Shard("w", (21, 33), weight.t(), addition=flipped)], world_size=1)
    assert torch.equal(assemble([layout])["w"], (weight + 0.5 * (b @ a)).t())


def test_double_precision_stays():
    weight, (b, a) = torch.randn(6, 7, dtype=torch.float64), adapter_of(6, 7, 3, torch.float64)
    found = assemble([collect({"w": lora.add(weight, b, a, 2.0)}, world_size=1)])
    assert found["w"].dtype == torch.float64 and torch.equal(found["w"], by_the_book(weight, [(b, a, 2.0)], torch.float64))


def test_each_refit_reads_weights_adapters_and_scaling_anew():
    weight, (b, a) = torch.randn(6, 8), adapter_of(6, 8, 2)
    scaling = [1.0]
    layout = collect({"w": lora.add(weight, b, a, lambda: scaling[0])}, world_size=1)
    for _ in range(3):
        layout.before_refit()
        assert torch.equal(assemble([layout])["w"], by_the_book(weight, [(b, a, scaling[0])], torch.float32))
        weight.mul_(1.5), b.add_(1.0), a.sub_(0.5)
        scaling[0] *= 3
    assert not torch.equal(assemble([layout])["w"], by_the_book(weight, [(b, a, scaling[0])], torch.float32)), "the test changes nothing"


def test_nothing_of_the_size_of_the_tensor_is_made_on_the_way():
    weight = torch.randn(1000, 1000)
    layout = collect({"w": lora.add(weight, *adapter_of(1000, 1000, 4))}, torch.bfloat16, staging="push", world_size=1)
    layout.before_refit()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as run:
        pushed = pushed_by(layout)
    # The sum of all allocations: three blocks of 64 Ki float32 for each of the two ranges that pushed_by copies, and the 2 MB in which the
    # test keeps the result.
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in run.key_averages())
    assert len(pushed) == 1 and taken < 2_000_000 + 2 * 3 * 262_144 + 200_000


def test_a_weight_with_an_adapter_is_not_tied_to_the_same_weight_without():
    weight, (b, a) = torch.randn(6, 8), adapter_of(6, 8, 2)
    found = assemble([collect({"embed": lora.add(weight, b, a), "head": weight}, world_size=1)])
    assert torch.equal(found["head"], weight) and not torch.equal(found["embed"], weight)


@pytest.mark.parametrize(
    "weight, b, a, message",
    [
        ((4, 6), (4, 2), (3, 6), r"tensor 'w' of shape \(4, 6\): an adapter of b \(4, 2\) and a \(3, 6\) does not fit"),
        ((4, 6), (6, 2), (2, 4), "does not fit"),
        ((4, 6, 2), (4, 2), (2, 6), "two dimensions"),
    ],
)
def test_adapters_that_do_not_fit_are_refused_with_the_tensors_name(weight, b, a, message):
    with pytest.raises(InvalidArgument, match=message) as raised:
        lora.add(torch.zeros(weight), torch.zeros(b), torch.zeros(a), name="w")
    assert raised.value.culprit == "tensor 'w'"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_quantized_weights_are_refused(dtype):
    with pytest.raises(InvalidArgument, match=f"tensor 'w' is {dtype}"):
        lora.add(torch.zeros(4, 6).to(dtype), torch.zeros(4, 2), torch.zeros(2, 6), name="w")


# ---- sharded by DTensor, through a daemon ----


def sharded(tensor, mesh, *placements):
    return dist.tensor.distribute_tensor(tensor, mesh, placements)


def of_rank(rank, world, kind):
    """The weights and adapters of one rank, each by another sharding, in the same order on all ranks."""
    from torch.distributed.tensor import Replicate, Shard

    weight = torch.randn(13, 10, generator=torch.Generator().manual_seed(1)).bfloat16()
    b, a = adapter_of(13, 10, 3)
    mesh = dist.init_device_mesh("cpu", (world,))
    rows, columns, whole = Shard(0), Shard(1), Replicate()
    of_kind = {
        "fsdp": ((rows,), (rows,), (rows,)),
        "replicated adapter": ((rows,), (whole,), (whole,)),
        "columns": ((columns,), (rows,), (columns,)),
        "replicated weight": ((whole,), (rows,), (rows,)),
    }[kind]
    return {"w": lora.add(sharded(weight, mesh, *of_kind[0]), sharded(b, mesh, *of_kind[1]), sharded(a, mesh, *of_kind[2]), 0.5, name="w")}


KINDS = {2: ("fsdp", "replicated adapter", "columns", "replicated weight"), 3: ("fsdp",)}
CASES = {world: [(kind, staging) for kind in kinds for staging in ("whole", "push")] for world, kinds in KINDS.items()}


def group_of(world, kind, staging):
    return f"{world}-{kind}-{staging}".replace(" ", "-")


def train(rank, world, socket):
    """Two versions to the engine of each case, the second with another b; returns where b stays in place."""
    in_place = {}
    for kind, staging in CASES[world]:
        tensors = of_rank(rank, world, kind)
        product = tensors["w"].addition
        with refitd.Trainer(group_of(world, kind, staging), rank=rank, world_size=world, socket=socket, device="host") as trainer:
            trainer.register(tensors, dtype=torch.bfloat16, staging=staging)
            for version in (1, 2):
                trainer.refit(version)
                with torch.no_grad():
                    product._terms[0].b.mul_(2.0)
        in_place[kind] = product._in_place
    return in_place


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def serve(socket, group, seen):
    """An engine that notes what it holds at each version."""
    model = torch.nn.Linear(10, 13, bias=False, dtype=torch.bfloat16)
    options = dict(clean=False, socket=socket, connect=refitd.Connect(wait_seconds=SECONDS))
    with refitd.EngineLoop(model, group=group, instance="a", names={"w": model.weight}, **options) as loop:
        for version in (1, 2):
            loop.wait(version, SECONDS)
        seen[group] = model.weight.detach().clone()


@pytest.mark.parametrize("world", [2, 3])
def test_sharded_weights_and_adapters_arrive_as_the_merge_of_full_tensors(daemon, world):
    weight = torch.randn(13, 10, generator=torch.Generator().manual_seed(1)).bfloat16()
    b, a = adapter_of(13, 10, 3)
    groups, seen = [group_of(world, *case) for case in CASES[world]], {}
    serving = [threading.Thread(target=serve, args=(daemon.socket, group, seen)) for group in groups]
    for thread in serving:
        thread.start()
    in_place = run_ranks(world, train, daemon.socket)
    for thread in serving:
        thread.join()
    expected = by_the_book(weight, [(b * 2, a, 0.5)], torch.bfloat16)
    assert not torch.equal(expected, by_the_book(weight, [(b, a, 0.5)], torch.bfloat16))
    assert [group for group in groups if not torch.equal(seen[group], expected)] == []
    # Only where both are sharded by rows alike does b stay where it is; the same on all ranks, as gathering is collective.
    assert in_place == [{kind: [kind == "fsdp"] for kind in KINDS[world]}] * world
