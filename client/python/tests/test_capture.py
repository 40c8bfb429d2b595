"""Capture: random loaders of random fusions, compared with what really loading writes; what is refused, and why."""

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

from refitd.errors import FailedPrecondition, InvalidArgument, Unimplemented  # noqa: E402
from refitd.layout import TensorSpec  # noqa: E402
from refitd.layout.capture import capture  # noqa: E402
from refitd.layout.memory import HostMemory  # noqa: E402


def manifest_of(weights):
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


def deliver(captured, weights):
    """Writes what the boxes say, as a daemon would: into the parameters' memory."""
    for box in captured.boxes:
        spec = captured.tensors[box.tensor_index]
        assert isinstance(box.memory, HostMemory)
        flat = torch.empty(0, dtype=weights[spec.name].dtype)
        owner = box.memory.owner
        flat.set_(owner.untyped_storage())
        first = (box.memory.pointer - owner.untyped_storage().data_ptr() + box.byte_offset) // owner.element_size()
        target = flat.as_strided(box.extent, box.strides, first)
        target.copy_(weights[spec.name][tuple(slice(o, o + n) for o, n in zip(box.offset, box.extent))])


class Part:
    """A part of a fused parameter: one tensor, how its shard is taken, and how the shard is shaped into the parameter."""

    def __init__(self, rng, name, rows, columns):
        self.name, self.rows, self.columns = name, rows, columns
        self.tp = rng.choice([1, 1, 2, 3])
        self.rank = rng.randrange(self.tp)
        self.dim = rng.randrange(2)
        self.how = rng.choice(["narrow", "chunk", "slice", "split", "view"])
        self.transposed = rng.random() < 0.3
        self.reshaped = rng.choice(["", "flat", "unsqueeze", "heads", "contiguous", "clone", "to"])
        self.assign = rng.choice(["copy_", "setitem", "data", "ellipsis"])

    def full_shape(self):
        shape = [self.rows, self.columns]
        if self.transposed:
            shape.reverse()
        shape[self.dim] *= self.tp
        return shape

    def shard(self, w):
        """The [rows, columns] that this rank loads of the full tensor."""
        n = w.shape[self.dim] // self.tp
        if self.how == "narrow":
            w = w.narrow(self.dim, self.rank * n, n)
        elif self.how == "chunk":
            w = w.chunk(self.tp, dim=self.dim)[self.rank]
        elif self.how == "slice":
            index = [slice(None), slice(None)]
            index[self.dim] = slice(self.rank * n, (self.rank + 1) * n)
            w = w[tuple(index)]
        elif self.how == "split":
            w = torch.split(w, n, dim=self.dim)[self.rank]
        else:
            w = w.unflatten(self.dim, (self.tp, n)).select(self.dim, self.rank)
        if self.transposed:
            w = w.t()
        if self.reshaped == "flat":
            w = w.reshape(-1).view(self.rows, self.columns)
        elif self.reshaped == "unsqueeze":
            w = w[None].squeeze(0)
        elif self.reshaped == "heads":
            w = w.unflatten(0, (-1, 2)).flatten(0, 1) if self.rows % 2 == 0 else w
        elif self.reshaped == "contiguous":
            w = w.contiguous()
        elif self.reshaped == "clone":
            w = w.detach().clone().view_as(w)
        elif self.reshaped == "to":
            w = w.to(w.dtype).cpu()
        return w

    def put(self, destination, w):
        assert destination.shape == w.shape
        if self.assign == "copy_":
            destination.copy_(w)
        elif self.assign == "setitem":
            destination[:] = w
        elif self.assign == "data":
            destination.data.copy_(w.data)
        else:
            destination[..., :] = w


class Fused(torch.nn.Module):
    """A random engine: parameters that fuse shards of random tensors, by rows, by columns or as a stack of experts."""

    def __init__(self, seed):
        super().__init__()
        rng = random.Random(seed)
        self.parts = {}
        self.kinds = {}
        for p in range(rng.randint(1, 4)):
            kind = rng.choice(["rows", "columns", "stack", "stack_transposed", "padded", "vector"])
            dtype = rng.choice([torch.float32, torch.bfloat16])
            width = rng.randint(1, 6)
            heights = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
            if kind in ("stack", "stack_transposed"):
                heights = [heights[0]] * len(heights)
            parts = []
            for i, n in enumerate(heights):
                part = Part(rng, f"model.{p}.{i}.weight", *((width, n) if kind == "columns" else (n, width)))
                parts.append(part)
            total = sum(heights)
            shape = {
                "rows": (total, width),
                "columns": (width, total),
                "stack": (len(heights), heights[0], width),
                "stack_transposed": (len(heights), width, heights[0]),
                "padded": (total + 3, width),
                "vector": (total * width,),
            }[kind]
            room = torch.zeros([n + rng.randint(0, 1) for n in shape], dtype=dtype)
            tensor = room[tuple(slice(0, n) for n in shape)]
            if kind == "vector":
                tensor = tensor.contiguous()
            self.register_parameter(f"p{p}", torch.nn.Parameter(tensor, requires_grad=rng.random() < 0.5))
            self.kinds[f"p{p}"] = kind
            at = 0
            for i, part in enumerate(parts):
                self.parts[part.name] = (f"p{p}", kind, i, at, part)
                at += heights[i]

    def weights(self):
        generator = torch.Generator().manual_seed(1)
        return {
            name: torch.randn(part.full_shape(), generator=generator).to(getattr(self, parameter).dtype)
            for name, (parameter, _, _, _, part) in self.parts.items()
        }

    def load_weights(self, weights):
        loaded = set()
        for name, w in weights:
            parameter, kind, i, at, part = self.parts[name]
            data = getattr(self, parameter).data
            w = part.shard(w)
            if kind in ("rows", "padded"):
                part.put(data.narrow(0, at, part.rows), w)
                if kind == "padded":
                    data[-3:].fill_(0)
            elif kind == "columns":
                part.put(data[:, at : at + part.columns], w)
            elif kind == "stack":
                part.put(data[i], w)
            elif kind == "stack_transposed":
                part.put(data[i].transpose(0, 1), w)
            else:
                begin = at * part.columns
                part.put(data[begin : begin + w.numel()].view(w.shape), w)
            loaded.add(name)
        return loaded


def random_order(weights, seed):
    names = list(weights)
    random.Random(seed).shuffle(names)
    return {name: weights[name] for name in names}


@pytest.mark.parametrize("seed", range(400))
def test_random_loaders_are_captured_as_they_load(seed):
    model, twin = Fused(seed), Fused(seed)
    weights = random_order(model.weights(), seed)
    with torch.no_grad():
        twin.load_weights(weights.items())
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    captured = capture(model.load_weights, manifest_of(weights))
    assert captured.unsupported == {} and captured.processed == {} and captured.ignored == []
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name]), "a dry run writes nothing"
    deliver(captured, weights)
    for (name, found), expected in zip(model.named_parameters(), twin.parameters()):
        assert torch.equal(found, expected), name
    for name, kind in model.kinds.items():
        left = captured.unfilled.get(name, 0)
        assert left == (3 * getattr(model, name).shape[1] if kind == "padded" else 0)


@pytest.mark.parametrize("seed", range(100))
def test_the_same_loaders_are_captured_on_meta_parameters(seed):
    model, twin = Fused(seed), Fused(seed)
    weights = model.weights()
    with torch.no_grad():
        twin.load_weights(weights.items())
    kernel = {name: parameter.data for name, parameter in model.named_parameters()}
    rng = random.Random(seed)
    repacked = {name for name in kernel if rng.random() < 0.3}
    meta = {}
    for name, tensor in kernel.items():
        meta[name] = torch.nn.Parameter(
            torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), requires_grad=False
        )
        model.register_parameter(name, meta[name])
        if name in repacked:  # the kernel reads another format, of the same or another geometry
            kernel[name] = tensor.clone().flatten() if rng.random() < 0.5 else tensor.clone()
    captured = capture(model.load_weights, manifest_of(weights), parameters=meta, onto=kernel, processed=list(repacked))
    assert set(captured.processed) == repacked
    if repacked:
        with pytest.raises(FailedPrecondition, match="processed after loading"):
            captured.boxes  # noqa: B018
    tensors = {
        name: torch.zeros(1).new_zeros(1000, dtype=getattr(torch, p.dtype)).as_strided(p.shape, p.strides)
        for name, p in captured.processed.items()
    }
    deliver(captured.place(tensors), weights)
    for name, expected in twin.named_parameters():
        assert torch.equal(tensors.get(name, kernel[name]), expected), name


def test_a_parameter_with_other_geometry_than_the_kernels_is_processed():
    meta = {"w": torch.empty(4, 2, device="meta")}
    load = lambda weights: [meta[n].copy_(w) for n, w in weights]  # noqa: E731
    for kernel, processed in ((torch.zeros(4, 2), False), (torch.zeros(2, 4).t(), True), (torch.zeros(8), True)):
        captured = capture(load, [("w", "float32", (4, 2))], parameters=meta, onto={"w": kernel})
        assert ("w" in captured.processed) == processed
    with pytest.raises(InvalidArgument, match="strides"):
        captured.place({"w": torch.zeros(2, 4).t()})
    with pytest.raises(InvalidArgument, match="not processed"):
        captured.place({"x": torch.zeros(2, 4)})


def one(operation, shape=(4, 6), parameter=(4, 6), dtype=torch.float32, extra=True):
    """Captures a loader of one tensor 'w', which `operation(destination, w)` loads, beside a plain one."""
    parameters = {"p": torch.zeros(parameter, dtype=dtype), "q": torch.zeros(3)}

    def load(weights):
        for name, w in weights:
            if name == "w":
                operation(parameters["p"], w)
            else:
                parameters["q"].copy_(w)

    captured = capture(load, [("w", torch.float32, shape), ("plain", torch.float32, (3,))], parameters=parameters)
    assert not parameters["p"].any()
    if extra:
        assert [copy.parameter for copy in captured.direct if copy.parameter == "q"] == ["q"]
    return captured


@pytest.mark.parametrize(
    ("why", "operation", "options"),
    [
        ("is cast from torch.float32 to torch.bfloat16 in", lambda p, w: p.copy_(w), {"dtype": torch.bfloat16}),
        ("is cast from", lambda p, w: p.copy_(w.to(torch.bfloat16)), {"dtype": torch.bfloat16}),
        ("is an operand of aten.add", lambda p, w: p.copy_(w + 1), {}),
        ("is an operand of aten.mul", lambda p, w: p.copy_((w * 2)[:2].t().t()), {"parameter": (2, 6)}),
        ("is an operand of aten.cat", lambda p, w: p.copy_(torch.cat([w, w])), {"parameter": (8, 6)}),
        ("is an operand of aten.index", lambda p, w: p.copy_(w[[0, 1, 3, 2]]), {}),
        ("is an operand of aten.add_", lambda p, w: p.add_(w), {}),
        ("is an operand of aten.mul_", lambda p, w: p.copy_(w.mul_(2)), {}),
        ("expanded", lambda p, w: p.copy_(w[:1].expand(4, 6)), {}),
        ("broadcast", lambda p, w: p.copy_(w[0]), {}),
        ("no box", lambda p, w: p.copy_(w.diagonal().expand(4, 4)), {"parameter": (4, 4)}),
        ("no box", lambda p, w: p[0, :4].copy_(w.diagonal()), {}),
        ("is reinterpreted", lambda p, w: p.copy_(w.view(torch.int32).view(torch.float32)), {}),
        ("no parameter", lambda p, w: p.copy_(torch.zeros(4, 6).copy_(w)), {}),
        ("no parameter", lambda p, w: torch.zeros(4, 6).add_(w), {}),
        ("values read", lambda p, w: p.copy_(w) if w.sum().item() else None, {}),
        ("values read", lambda p, w: p.copy_(torch.from_numpy(w.numpy())), {}),
        ("values read", lambda p, w: p.copy_(w) if torch.equal(w, w) else None, {}),
        ("written more than once", lambda p, w: (p[:2].copy_(w[:2]), p[1:].copy_(w[1:])), {}),
        ("the loader then changes there by aten.mul_", lambda p, w: p.copy_(w).mul_(2), {}),
        ("the loader then changes there by aten.fill_", lambda p, w: (p.copy_(w), p[3:, 2:].fill_(0)), {}),
        ("the loader then reads by aten.add", lambda p, w: p.copy_(w).add(1), {}),
        ("the loader then reads by aten.clone", lambda p, w: p.copy_(p.copy_(w).clone()), {}),
    ],
)
def test_what_can_not_be_delivered_in_place_is_refused_by_name(why, operation, options):
    captured = one(operation, **options)
    assert list(captured.unsupported) == ["w"] and why in captured.unsupported["w"], captured.unsupported
    assert [spec.name for spec in captured.tensors] == ["plain"], "an unsupported tensor is not listed as unwanted"
    assert {copy.parameter for copy in captured.direct} == {"q"}
    with pytest.raises(FailedPrecondition, match="'w'") as raised:
        captured.boxes  # noqa: B018
    assert raised.value.culprit == "tensor 'w'"
    assert len(captured.without_unsupported().boxes) == 1


def test_a_tensor_that_is_only_cast_is_told_apart_with_its_parameters():
    cast = one(lambda p, w: p.copy_(w), dtype=torch.bfloat16)
    assert (cast.cast, cast.unfilled) == ({"w": {"p"}}, {})
    in_part = one(lambda p, w: p[:2].copy_(w[:2]), dtype=torch.bfloat16)
    assert (in_part.cast, in_part.unfilled) == ({"w": {"p"}}, {"p": 12})
    for also_refused in (lambda p, w: (p.copy_(w), p.mul_(2)), lambda p, w: p.copy_(w.to(torch.bfloat16)), lambda p, w: p.copy_(w + 1)):
        assert one(also_refused, dtype=torch.bfloat16).cast == {}


@pytest.mark.parametrize(
    "operation",
    [
        lambda p, w: (p.fill_(0), p.copy_(w)),
        lambda p, w: (p[:, 3:].copy_(w[:, 3:]), p[:, :3].copy_(w[:, :3])),
        lambda p, w: (p.copy_(w), p.copy_(w)),
        lambda p, w: p.copy_(w.unsqueeze(0)),
        lambda p, w: p.view(1, 4, 6).copy_(w),
        lambda p, w: p.copy_(w.view(2, 2, 6).transpose(0, 1).transpose(0, 1).reshape(4, 6)),
        lambda p, w: torch.nn.Parameter(p, requires_grad=False).data.copy_(torch.nn.Parameter(w, requires_grad=False)),
    ],
)
def test_what_only_looks_odd_is_captured(operation):
    captured = one(operation)
    assert captured.unsupported == {} and captured.unfilled == {}
    assert sum(copy.extent[0] * copy.extent[1] for copy in captured.direct if copy.parameter == "p") == 24


def load_two(copy):
    """Captures a loader that does `copy(p, a, b)`, where p is of [4, 6] and a and b are of [2, 6]; the parameter must stay as it is."""
    parameter = torch.arange(24.0).view(4, 6)
    manifest = [(name, torch.float32, (2, 6)) for name in "ab"]
    captured = capture(lambda weights: copy(parameter, *(w for _, w in weights)), manifest, parameters={"p": parameter})
    assert torch.equal(parameter, torch.arange(24.0).view(4, 6))
    return captured


@pytest.mark.parametrize(
    "copy",
    [
        lambda p, a, b: torch.cat([a, b], out=p),
        lambda p, a, b: torch.stack([a, b], out=p.view(2, 2, 6)),
        lambda p, a, b: torch._foreach_add_([p[:2], p[2:]], [a, b]),
        lambda p, a, b: torch._foreach_copy_([p[:2], a], [a, b]),
    ],
)
def test_writes_by_out_and_into_lists_are_refused_not_ignored(copy):
    captured = load_two(copy)
    assert set(captured.unsupported) == {"a", "b"} and captured.ignored == [] and captured.direct == []


def test_copies_of_lists_are_copies():
    captured = load_two(lambda p, a, b: torch._foreach_copy_([p[:2], p[2:]], [a, b]))
    assert captured.unsupported == {} and captured.unfilled == {} and [copy.first for copy in captured.direct] == [0, 12]


def test_operations_on_lists_of_parameters_are_not_made():
    def load(p, a, b):
        torch._foreach_mul_([p[:2], p[2:]], 2.0)
        torch._foreach_zero_([p])
        p[:2].copy_(a)
        p[2:].copy_(b)
        torch._foreach_mul_([p[2:]], 2.0)

    captured = load_two(load)
    assert list(captured.unsupported) == ["b"] and "_foreach_mul_" in captured.unsupported["b"]


def test_a_loader_that_catches_what_reading_values_raises_is_noticed():
    def load(p, a, b):
        p[:2].copy_(a)
        try:
            p[2:].copy_(torch.from_numpy(b.numpy()))
        except Exception:
            pass

    def load_names(weights):
        held = dict(weights)
        load(parameter, held.get("a", torch.zeros(2, 6)), held["b"]) if "b" in held else parameter[:2].copy_(held["a"])

    parameter = torch.zeros(4, 6)
    captured = capture(load_names, [(name, torch.float32, (2, 6)) for name in "ab"], parameters={"p": parameter})
    assert list(captured.unsupported) == ["b"] and captured.ignored == []


def test_a_loader_with_threads_is_refused():
    def load(p, a, b):
        with ThreadPoolExecutor(1) as threads:
            threads.submit(p[:2].copy_, a)  # nobody asks for the result

    with pytest.raises(Unimplemented, match="'a' on another thread"):
        load_two(load)


@pytest.mark.parametrize("offset", [0, 12])
def test_as_strided_of_a_copy_is_refused(offset):
    # Its strides are those of the copy, not of the tensor that was copied.
    captured = one(lambda p, w: p.view(-1)[:12].copy_(w.t().contiguous().as_strided((12,), (2,), offset)))
    assert "as_strided" in captured.unsupported["w"] and all(copy.parameter != "p" for copy in captured.direct)


def test_a_lazily_negated_tensor_is_computed():
    assert "_neg_view" in one(lambda p, w: p.copy_(torch._neg_view(w))).unsupported["w"]


def test_copies_into_a_parameter_seen_as_smaller_elements_are_refused():
    parameter = torch.zeros(8)

    def load(weights):
        for _, w in weights:
            parameter.view(torch.uint8)[4:8].copy_(w)

    captured = capture(load, [("w", torch.uint8, (4,))], parameters={"p": parameter})
    assert "seen as torch.uint8" in captured.unsupported["w"] and captured.direct == []


def test_parameters_of_several_dtypes_in_a_storage_are_told_apart():
    memory = torch.zeros(64, dtype=torch.uint8)
    parameters = {"a": memory[0:16].view(torch.float32), "b": memory[16:32].view(torch.bfloat16), "c": memory[32:36]}
    weights = {name: torch.arange(1, 1 + p.numel()).to(p.dtype) for name, p in parameters.items()}

    def load(tensors):
        for name, w in tensors:
            parameters[name].copy_(w)

    captured = capture(load, manifest_of(weights), parameters=parameters)
    assert captured.unsupported == {} and captured.untouched == []
    deliver(captured, weights)
    assert all(torch.equal(parameters[name], w) for name, w in weights.items())


class Replacing(torch.nn.Module):
    def __init__(self, replace):
        super().__init__()
        self.p = torch.nn.Parameter(torch.ones(4, 6), requires_grad=False)
        self.replace = replace

    def load_weights(self, weights):
        for _, w in weights:
            self.replace(self, w)


def set_data(module, w):
    module.p.data = w


def set_other_data(module, w):
    module.p.data = torch.zeros(4, 6)
    module.p.copy_(w)


def set_transposed(module, w):
    module.p.data = module.p.data.t()


def set_parameter(module, w):
    module.p = torch.nn.Parameter(w, requires_grad=False)


@pytest.mark.parametrize("replace", [set_data, set_other_data, set_transposed, set_parameter])
def test_a_loader_that_replaces_parameters_is_refused_and_undone(replace):
    module = Replacing(replace)
    parameter, pointer = module.p, module.p.data_ptr()
    with pytest.raises(Unimplemented, match="parameter 'p'"):
        capture(module.load_weights, [("w", torch.float32, (4, 6))])
    assert module.p is parameter and parameter.data_ptr() == pointer and parameter.shape == (4, 6)
    assert torch.equal(parameter, torch.ones(4, 6))


def test_parameters_that_the_loader_skips_are_named():
    parameters = {"p": torch.zeros(4), "forgotten": torch.zeros(3), "empty": torch.zeros(0)}
    captured = capture(
        lambda weights: [parameters["p"].copy_(w) for _, w in weights], [("w", torch.float32, (4,))], parameters=parameters
    )
    assert captured.untouched == ["forgotten"]


def test_an_update_in_part_is_refused_as_a_whole():
    captured = one(lambda p, w: (p[:2].copy_(w[:2]), p[2:].copy_(w[2:] * 2)))
    assert list(captured.unsupported) == ["w"]
    assert captured.unfilled == {"p": 24}


def test_tied_tensors_are_told_not_guessed():
    parameter = torch.nn.Parameter(torch.zeros(3, 2))

    def load(weights):
        for _, w in weights:
            parameter.data.copy_(w)

    manifest = [TensorSpec("embed", "float32", (3, 2)), TensorSpec("head", "float32", (3, 2))]
    captured = capture(load, manifest, parameters={"e": parameter})
    assert set(captured.unsupported) == {"embed", "head"} and "tied" in captured.unsupported["head"]
    captured = capture(load, manifest, parameters={"e": parameter}, tied={"head": "embed"})
    assert captured.unsupported == {} and captured.tied == {"head": "embed"}
    assert [spec.name for spec in captured.tensors] == ["embed", "head"]
    assert [captured.tensors[copy.tensor_index].name for copy in captured.direct] == ["embed"]
    with pytest.raises(InvalidArgument, match="not in the manifest"):
        capture(load, manifest, parameters={"e": parameter}, tied={"head": "wte"})


def test_tensors_that_the_loader_skips_are_ignored():
    captured = capture(
        lambda weights: [w for name, w in weights], {"inv_freq": (torch.float32, (4,))}, parameters={"p": torch.zeros(4)}
    )
    assert captured.ignored == ["inv_freq"] and captured.boxes == [] and len(captured.tensors) == 1


def test_parameters_that_share_a_storage_are_told_apart():
    region = torch.zeros(100)
    parameters = {"a": region[0:6].view(2, 3), "b": region[10:16].view(2, 3)}
    weights = {"a": torch.randn(2, 3), "b": torch.randn(2, 3)}

    def load(tensors):
        for name, w in tensors:
            parameters[name].copy_(w)

    captured = capture(load, manifest_of(weights), parameters=parameters)
    deliver(captured, weights)
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)
    with pytest.raises(Unimplemented, match="borders"):
        capture(lambda tensors: region.zero_(), manifest_of(weights), parameters=parameters)


def test_a_loader_that_fails_or_moves_parameters_is_told():
    with pytest.raises(FailedPrecondition, match="failed at tensor 'w': KeyError: 'no such layer'") as raised:
        one(lambda p, w: {}["no such layer"])
    assert raised.value.culprit == "tensor 'w'"
    parameter = torch.nn.Parameter(torch.zeros(4))

    def load(weights):
        for _, w in weights:
            parameter.data = torch.zeros(4)
            parameter.data.copy_(w)

    with pytest.raises(Unimplemented, match="'p' other memory"):
        capture(load, [("w", "float32", (4,))], parameters={"p": parameter})


@pytest.mark.parametrize(
    ("manifest", "parameters", "message"),
    [
        ([("w", "float32", (4,)), ("w", "float32", (4,))], {"p": torch.zeros(4)}, "'w' twice"),
        ([("w", "int3", (4,))], {"p": torch.zeros(4)}, "'w'.*int3"),
        (["w"], {"p": torch.zeros(4)}, "not \\(name, dtype, shape\\)"),
        ([("w", "float32", (4,))], {"p": torch.zeros(4, device="meta")}, "'p' is on device meta"),
        ([("w", "float32", (4,))], None, "pass parameters"),
    ],
)
def test_what_can_not_be_captured_is_refused(manifest, parameters, message):
    with pytest.raises(InvalidArgument, match=message):
        capture(lambda weights: None, manifest, parameters=parameters)


class Moe(torch.nn.Module):
    """Parameters and loader of a Qwen3 mixture of experts as an engine has them, on device meta: only geometry counts."""

    def __init__(self, layers=48, hidden=2048, heads=32, kv_heads=4, head_dim=128, experts=128, ffn=768, vocabulary=151936):
        super().__init__()
        self.hidden, self.experts, self.ffn, self.layers, self.vocabulary = hidden, experts, ffn, layers, vocabulary
        self.q, self.kv, self.head_dim = heads * head_dim, kv_heads * head_dim, head_dim
        shapes = {"model.embed_tokens.weight": (vocabulary, hidden), "lm_head.weight": (vocabulary, hidden)}
        shapes["model.norm.weight"] = (hidden,)
        for layer in range(layers):
            at = f"model.layers.{layer}"
            shapes |= {
                f"{at}.input_layernorm.weight": (hidden,),
                f"{at}.post_attention_layernorm.weight": (hidden,),
                f"{at}.self_attn.qkv_proj.weight": (self.q + 2 * self.kv, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, self.q),
                f"{at}.self_attn.q_norm.weight": (head_dim,),
                f"{at}.self_attn.k_norm.weight": (head_dim,),
                f"{at}.mlp.gate.weight": (experts, hidden),
                f"{at}.mlp.experts.w13_weight": (experts, 2 * ffn, hidden),
                f"{at}.mlp.experts.w2_weight": (experts, hidden, ffn),
            }
        self.fused = {n: torch.empty(s, dtype=torch.bfloat16, device="meta") for n, s in shapes.items()}

    def manifest(self):
        expert = {"gate_proj": (self.ffn, self.hidden), "up_proj": (self.ffn, self.hidden), "down_proj": (self.hidden, self.ffn)}
        for name, tensor in self.fused.items():
            prefix = name.rpartition(".")[0].rpartition(".")[0]
            if name.endswith("qkv_proj.weight"):
                for part, rows in (("q", self.q), ("k", self.kv), ("v", self.kv)):
                    yield f"{prefix}.{part}_proj.weight", "bfloat16", (rows, self.hidden)
            elif name.endswith("w13_weight"):
                for e in range(self.experts):
                    for part, shape in expert.items():
                        yield f"{prefix}.experts.{e}.{part}.weight", "bfloat16", shape
            elif not name.endswith("w2_weight"):
                yield name, "bfloat16", tuple(tensor.shape)

    def load_weights(self, weights):
        for name, w in weights:
            if ".experts." in name:
                prefix, _, rest = name.partition(".experts.")
                expert, part = rest.split(".")[:2]
                if part == "down_proj":
                    self.fused[f"{prefix}.experts.w2_weight"].data[int(expert)].copy_(w)
                else:
                    data = self.fused[f"{prefix}.experts.w13_weight"].data[int(expert)]
                    data.narrow(0, self.ffn if part == "up_proj" else 0, self.ffn).copy_(w)
            elif any(f".{part}_proj" in name for part in "qkv"):
                part = name.split(".")[-2][0]
                fused = self.fused[name.replace(f"{part}_proj", "qkv_proj")].data
                at = {"q": 0, "k": self.q, "v": self.q + self.kv}[part]
                fused.narrow(0, at, w.shape[0]).copy_(w)
            else:
                self.fused[name].data.copy_(w)


def test_a_mixture_of_experts_of_18867_tensors_is_captured():
    model = Moe()
    manifest = list(model.manifest())
    assert len(manifest) == 18867
    begin = time.process_time()
    captured = capture(model.load_weights, manifest, parameters=model.fused, onto=model.fused)
    seconds = time.process_time() - begin
    print(f"capture of {len(manifest)} tensors: {seconds:.2f} s of processor time")
    assert len(captured.direct) == 18867 and captured.unsupported == {} and captured.unfilled == {}
    assert {copy.parameter for copy in captured.direct} == set(model.fused)
