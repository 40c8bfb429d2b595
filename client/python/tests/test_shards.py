"""From tensors to layouts: what is held, what is delivered, what is refused."""

import random

import pytest

torch = pytest.importorskip("torch")

from layout_util import Reader, assemble  # noqa: E402

from refitd.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from refitd.layout.memory import HostMemory  # noqa: E402
from refitd.layout.shards import Shard, collect, range_shards  # noqa: E402


def random_tensor(rng, dtype=torch.float32):
    """A tensor of random shape and strides."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 4))]
    room = torch.randn([n + rng.randint(0, 2) for n in shape]).to(dtype)
    tensor = room[tuple(slice(0, n) for n in shape)]
    return tensor.permute(rng.sample(range(tensor.dim()), tensor.dim()))


@pytest.mark.parametrize("seed", range(100))
def test_boxes_describe_what_torch_holds_at_any_strides(seed):
    rng = random.Random(seed)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {f"t{i}": random_tensor(rng, rng.choice(dtypes)) for i in range(5)}
    layout = collect(tensors, world_size=1)
    assert [spec.name for spec in layout.tensors] == list(tensors)
    reader = Reader(layout)
    for box in layout.boxes:
        spec = layout.tensors[box.tensor_index]
        assert isinstance(box.memory, HostMemory) and box.memory.label == spec.name
        found, expected = reader.view(box), tensors[spec.name]
        if spec.dtype.startswith("float8"):
            found, expected = found.view(torch.uint8), expected.view(torch.uint8)
        assert torch.equal(found, expected)
        # A write through the box is a write to the tensor: it is no copy.
        assert box.memory.pointer == tensors[spec.name].data_ptr()


def test_a_module_gives_parameters_and_persistent_buffers_by_choice():
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    module.register_buffer("inv_freq", torch.zeros(2), persistent=False)
    names = lambda **options: {spec.name for spec in collect(module, **options).tensors}  # noqa: E731
    assert names() == set(module.state_dict())
    assert names(buffers=False) == {name for name, _ in module.named_parameters()}
    assert names(buffers=["*.running_*"]) == names(buffers=False) | {"1.running_mean", "1.running_var"}
    with pytest.raises(InvalidArgument, match="pass the module"):
        collect(module.state_dict(), buffers=False)


def test_tied_parameters_have_boxes_once():
    module = torch.nn.ModuleDict({"embed": torch.nn.Embedding(6, 4), "head": torch.nn.Linear(4, 6, bias=False)})
    module["head"].weight = module["embed"].weight
    layout = collect(module)
    assert [spec.name for spec in layout.tensors] == ["embed.weight", "head.weight"]
    assert [box.tensor_index for box in layout.boxes] == [0]
    assert len(collect(module, tied=False).boxes) == 2
    # Names given in `tied` are tied wherever their memory is.
    layout = collect({"embed": torch.ones(6, 4), "head": torch.ones(6, 4)}, tied={"head": "embed"})
    assert [box.tensor_index for box in layout.boxes] == [0]
    with pytest.raises(InvalidArgument, match="'head' is tied to 'embedding', which is not there"):
        collect({"head": torch.ones(6, 4)}, tied={"head": "embedding"})


def test_views_of_one_memory_with_other_geometry_are_not_tied():
    square = torch.arange(4.0).view(2, 2)
    layout = collect({"w": square, "t": square.t(), "first": square[0]})
    assert len(layout.boxes) == 3


def test_floating_tensors_are_cast_and_exceptions_and_others_are_not():
    tensors = {
        "layers.0.w": torch.randn(8, 4),
        "layers.0.e_score_correction_bias": torch.randn(4),
        "norm": torch.randn(4, dtype=torch.float64),
        "half": torch.randn(4).half(),
        "already": torch.randn(4).bfloat16(),
        "step": torch.tensor(3),
        "fp8": torch.randn(4).to(torch.float8_e4m3fn),
    }
    layout = collect(tensors, torch.bfloat16, {"*.e_score_correction_bias": None, "norm": "float32"}, world_size=1)
    dtypes = {spec.name: spec.dtype for spec in layout.tensors}
    assert dtypes == {
        "layers.0.w": "bfloat16",
        "layers.0.e_score_correction_bias": "float32",
        "norm": "float32",
        "half": "bfloat16",
        "already": "bfloat16",
        "step": "int64",
        "fp8": "float8_e4m3fn",
    }
    in_place = {layout.tensors[box.tensor_index].name for box in layout.boxes if isinstance(box.memory, HostMemory)}
    assert in_place == {"layers.0.e_score_correction_bias", "already", "step", "fp8"}
    tensors.pop("fp8")
    found = assemble([collect(tensors, torch.bfloat16, {"*.e_score_correction_bias": None, "norm": "float32"}, world_size=1)])
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(getattr(torch, dtypes[name])))


@pytest.mark.parametrize("seed", range(100))
def test_shards_said_one_by_one_make_the_tensor(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    whole = torch.randn(shape)
    cuts = [sorted({0, n, *(rng.randint(0, n) for _ in range(2))}) for n in shape]
    boxes = [()]
    for dim in cuts:
        boxes = [box + (slice(a, b),) for box in boxes for a, b in zip(dim, dim[1:])]
    shards = [Shard("w", shape, whole[box], [s.start for s in box]) for box in boxes]
    rng.shuffle(shards)
    assert torch.equal(assemble([collect(shards, world_size=1)])["w"], whole)
    if len(shards) > 1:
        with pytest.raises(InvalidArgument, match="rank 0: tensor 'w'.* its shards have"):
            collect(shards[1:], world_size=1)
        with pytest.raises(InvalidArgument, match="rank 3: tensor 'w'.*overlap"):
            collect(shards + shards[:1], rank=3, tied=False)


@pytest.mark.parametrize("seed", range(50))
def test_flat_ranges_make_the_tensor(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
    whole = torch.randn(shape)
    cuts = sorted({0, whole.numel(), *(rng.randint(0, whole.numel()) for _ in range(3))})
    flat = whole.reshape(-1).clone()
    layouts = [
        collect(list(range_shards(Shard("w", shape, flat[a:b]), a)), rank=rank, tied=False)
        for rank, (a, b) in enumerate(zip(cuts, cuts[1:]))
    ]
    assert torch.equal(assemble(layouts)["w"], whole)
    with pytest.raises(InvalidArgument, match="tensor 'w'"):
        list(range_shards(Shard("w", shape, flat), 1))


def freed():
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("shards", "error", "message"),
    [
        ([Shard("w", (4,), torch.ones(2), (3,))], InvalidArgument, "not within"),
        ([Shard("w", (4,), torch.ones(2), (-1,))], InvalidArgument, "not within"),
        ([Shard("w", (4, 2), torch.ones(2))], InvalidArgument, "dimensions differ"),
        ([Shard("w", (4,), torch.ones(2)), Shard("w", (5,), torch.ones(2), (2,))], InvalidArgument, "has shards of"),
        ([Shard("w", (4,), torch.ones(2)), Shard("w", (4,), torch.ones(2).half(), (2,))], InvalidArgument, "has shards of"),
        ([Shard("w", (4,), torch.ones(2)), Shard("w", (4,), torch.ones(2), (1,))], InvalidArgument, "overlap"),
        ([Shard("w", (4,), torch.ones(1).expand(4))], InvalidArgument, "is expanded"),
        ([Shard("w", (4,), torch.ones(4, device="meta"))], FailedPrecondition, "meta"),
        ([Shard("w", (4,), freed())], FailedPrecondition, "freed"),
        ([Shard("w", (4,), torch.ones(4, dtype=torch.complex64))], InvalidArgument, "complex64"),
        ([Shard("w", (4,), torch.ones(4), dtype="int4")], InvalidArgument, "int4"),
        ([Shard("w", (4,), torch.ones(4).to_sparse())], InvalidArgument, "layout"),
        ([Shard("w", ("4",), torch.ones(4))], InvalidArgument, "has shape .*no sequence of integers"),
        ([Shard("w", 4, torch.ones(4))], InvalidArgument, "has shape 4, .*no sequence of integers"),
        ([Shard("w", None, torch.ones(4))], InvalidArgument, "has shape None, which is no shape"),
        ([Shard("w", (-4,), torch.ones(4))], InvalidArgument, "no shape"),
        ([Shard("w", (4,), torch.ones(2), (1.5,))], InvalidArgument, "has offset .*no sequence of integers"),
        ([Shard("w", (4,), None)], InvalidArgument, "neither tensor nor dtype"),
    ],
)
def test_what_is_wrong_is_refused_with_tensor_and_rank(shards, error, message):
    with pytest.raises(error, match=message) as raised:
        collect(shards, rank=7)
    assert "rank 7" in str(raised.value) and "'w'" in str(raised.value)
    assert raised.value.culprit == "tensor 'w'"


def test_a_tensor_on_another_device_is_refused():
    with pytest.raises(InvalidArgument, match="rank 2: tensor 'b' is on device cpu, the others are on cuda:1"):
        collect({"b": torch.ones(2)}, rank=2, device="cuda:1")


@pytest.mark.parametrize("x", [3, [torch.ones(2)], {"w": [1, 2]}])
def test_what_holds_no_tensors_is_refused(x):
    with pytest.raises(InvalidArgument):
        collect(x)


def test_numpy_arrays_lie_where_they_are():
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)[:, ::2]
    layout = collect({"w": array})
    assert torch.equal(Reader(layout).view(layout.boxes[0]), torch.from_numpy(array))
    with pytest.raises(InvalidArgument, match="numpy array"):
        collect({"w": array}, dtype="bfloat16")
    with pytest.raises(InvalidArgument, match="byte strides"):
        collect({"w": array[::-1]})


@pytest.mark.parametrize("stored, to", [
    ("float32", "int8"), ("bfloat16", "bool"), ("int64", "float32"), ("int64", "int32"), ("int16", "uint8"), ("float32", "float8_e4m3fn"),
    ("float8_e4m3fn", "bfloat16"), ("uint8", "int8"), ("bool", "uint8"),
])
def test_a_cast_that_loses_values_is_refused_unless_declared(stored, to):
    tensor = torch.ones(4).to(getattr(torch, stored))
    for shards in ({"layer.w": tensor}, [Shard("layer.w", (4,), tensor, dtype=to)]):
        options = {} if isinstance(shards, list) else {"exceptions": {"*": to}}
        with pytest.raises(InvalidArgument, match=f"rank 0: tensor 'layer.w' is {stored}, and a cast to {to} loses values") as caught:
            collect(shards, **options)
        assert caught.value.culprit == "tensor 'layer.w'"
        assert collect(shards, any_cast=["layer.*"], **options).tensors[0].dtype == to


def test_floats_truncated_to_integers_by_dtype_are_refused():
    with pytest.raises(InvalidArgument, match="tensor 'w' is float32, and a cast to int8 loses values"):
        collect({"w": torch.ones(4), "n": torch.ones(4, dtype=torch.int64)}, torch.int8)


@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "uint32", "uint64", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_a_dtype_that_is_not_carried_is_refused_by_buffer_with_a_hint(dtype):
    module = torch.nn.Linear(2, 2)
    module.register_buffer("scales", torch.empty(2, dtype=getattr(torch, dtype)))
    with pytest.raises(InvalidArgument, match=rf"tensor 'scales'.*{dtype}.*leave_out=\['scales'\].*buffers=False") as caught:
        collect(module)
    assert caught.value.culprit == "tensor 'scales'"
    for options in ({"leave_out": ["scales"]}, {"buffers": False}, {"leave_out": ["sca*"]}):
        assert [spec.name for spec in collect(module, **options).tensors] == ["weight", "bias"]


def test_patterns_have_one_syntax_in_which_brackets_are_themselves():
    tensors = {f"layers[{i}].w": torch.ones(2) for i in range(12)}
    left = [spec.name for spec in collect(tensors, leave_out=["layers[1].w", "layers[1?].*"]).tensors]
    assert left == [f"layers[{i}].w" for i in (0, *range(2, 10))]
    specs = collect(tensors, torch.bfloat16, {"layers[3].w": None}).tensors
    assert [spec.name for spec in specs if spec.dtype == "float32"] == ["layers[3].w"]
    with pytest.raises(InvalidArgument, match="leave_out: 'w' is no list of patterns"):
        collect(tensors, leave_out="w")
