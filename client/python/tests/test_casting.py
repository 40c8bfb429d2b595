"""Casts: the values, the way that is chosen, and the memory that they take."""

import random
import tracemalloc

import pytest

torch = pytest.importorskip("torch")

from layout_util import Pushes, Reader, assemble, pushed_by  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from refitd.errors import InvalidArgument  # noqa: E402
from refitd.layout.memory import FilledMemory  # noqa: E402
from refitd.layout.shards import Shard, collect  # noqa: E402


def test_casts_that_fit_are_kept_in_one_room_and_filled_at_each_refit():
    tensors = {f"w{i}": torch.randn(3 + i, 5) for i in range(4)}
    layout = collect(tensors, torch.bfloat16, world_size=1)
    assert layout.pushed is None
    assert len({box.memory for box in layout.boxes}) == 1 and isinstance(layout.boxes[0].memory, FilledMemory)
    for _ in range(2):
        reader = Reader(layout)
        for box in layout.boxes:
            assert torch.equal(reader.view(box), tensors[layout.tensors[box.tensor_index].name].bfloat16())
        for tensor in tensors.values():
            tensor.mul_(1.5)


def test_casts_that_do_not_fit_are_pushed_and_no_room_is_made():
    tensors = {f"w{i}": torch.randn(64, 32) for i in range(8)}
    tensors["kept"] = torch.randn(4).bfloat16()
    layout = collect(tensors, torch.bfloat16, world_size=1, staging_bytes=8 * 64 * 32 * 2 - 1)
    assert not any(isinstance(box.memory, FilledMemory) for box in layout.boxes)
    assert layout.pushed.indices == list(range(8))
    found = assemble([layout])
    assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in tensors.items())


@pytest.mark.parametrize("seed", range(60))
def test_pushed_chunks_of_any_boxes_and_strides_make_the_tensor(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    whole = torch.randn(shape)
    dim = rng.randrange(len(shape))
    cut = rng.randint(0, shape[dim])
    parts = [whole.narrow(dim, 0, cut), whole.narrow(dim, cut, shape[dim] - cut)]
    if rng.random() < 0.5:
        parts = [part.transpose(0, -1).contiguous().transpose(0, -1) for part in parts]
    offsets = [[at if d == dim else 0 for d in range(len(shape))] for at in (0, cut)]
    layouts = [
        collect([Shard("w", shape, p, o)], torch.bfloat16, staging="push", staging_bytes=rng.choice([4, 16, 1 << 20]), rank=r)
        for r, (p, o) in enumerate(zip(parts, offsets))
    ]
    assert torch.equal(assemble(layouts)["w"], whole.bfloat16())


def test_a_pushed_cast_makes_no_tensor_on_the_way():
    layout = collect({"w": torch.randn(1000, 1000).t()}, torch.bfloat16, staging="push")
    update = Pushes()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as run:
        layout.pushed.push(update)
    taken = sum(max(event.self_cpu_memory_usage, 0) for event in run.key_averages())
    assert len(update) == 1 and torch.equal(update[0][2].view(1000, 1000), layout.pushed._casts[0].source.bfloat16())
    assert taken < 2_000_000 + 100_000, "what Pushes itself takes, which stands for the slots"


def test_ranks_that_hold_the_same_push_it_once():
    tensors = {f"w{i}": torch.randn(4, 4) for i in range(16)}
    layouts = [collect(tensors, torch.bfloat16, staging="push", rank=r, world_size=3) for r in range(3)]
    found = assemble(layouts)  # sees that nothing comes twice
    assert set(found) == set(tensors)
    shares = [len({name for name, *_ in pushed}) for pushed in map(pushed_by, layouts)]
    assert sum(shares) == 16 and min(shares) > 0


def test_shards_that_other_ranks_can_not_judge_need_a_word():
    shards = [Shard("w", (8, 4), torch.randn(4, 4), (4, 0))]
    with pytest.raises(InvalidArgument, match="rank 1: .*'w'.*staging="):
        collect(shards, torch.bfloat16, staging_bytes=31, rank=1, world_size=2)
    assert collect(shards, torch.bfloat16, staging_bytes=32, rank=1, world_size=2).pushed is None
    assert collect(shards, torch.bfloat16, staging="whole", staging_bytes=31, rank=1, world_size=2).pushed is None
    with pytest.raises(InvalidArgument, match="staging is 'often'"):
        collect(shards, torch.bfloat16, staging="often")


def test_the_room_follows_a_parameter_whose_memory_moved():
    module = torch.nn.Linear(4, 3, bias=False)
    layout = collect(module, torch.bfloat16, world_size=1)
    module.weight.data = torch.randn(3, 4)
    assert torch.equal(Reader(layout).view(layout.boxes[0]), module.weight.detach().bfloat16())


def test_failed_collections_keep_nothing():
    tensors = {f"w{i}": torch.randn(4, 4) for i in range(50)}
    tensors["bad"] = torch.ones(1).expand(4)

    def fail():
        with pytest.raises(InvalidArgument):
            collect(tensors, torch.bfloat16)

    fail()
    tracemalloc.start()
    try:
        for _ in range(20):
            fail()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(200):
            fail()
        assert tracemalloc.get_traced_memory()[0] - before < 50_000
    finally:
        tracemalloc.stop()
