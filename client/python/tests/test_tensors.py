"""Torch tensors that librefit reads itself: only those that are what was learned are packed, and memory that moved is noticed.

The tests run once more in a process of its own for each way that an older or another torch leaves.
"""

import ctypes
import os
import subprocess
import sys

import numpy
import pytest

torch = pytest.importorskip("torch")

from refitd import TensorSpec  # noqa: E402
from refitd._core import tensors as _tensors  # noqa: E402
from refitd._core.member import Addresses, TensorAddress  # noqa: E402
from refitd._core.tensors import Bindings, Marks  # noqa: E402
from refitd.trainer import Packer  # noqa: E402
from refitd._core.tensors import Places  # noqa: E402

WAY = os.environ.get("REFITD_TEST_WAY", "")
if WAY == "methods":  # without torch's functions of storages, and with no place to read ahead
    _tensors._functions = lambda: {}
    _tensors._places = lambda torch: (0, 0)
if WAY == "none":  # a torch without a table
    _tensors._begin = lambda torch: False
reads = pytest.mark.skipif(WAY == "none", reason="librefit reads no tensors")


class Bucket:
    def __init__(self, nbytes=4096, like=None):
        self.packer = Packer(like)
        self.memory = (ctypes.c_char * nbytes)()
        self.packer.begin(ctypes.addressof(self.memory), nbytes, self.memory)

    def learn(self, name, tensor):
        _tensors.add_plain(type(tensor))
        return self.packer.learn(TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)))

    def put(self, name, tensor):
        """Whether the tensor was packed; its bytes are compared, and else nothing may have changed."""
        before, count = bytes(self.memory), self.packer.count
        if not self.packer.push(name, tensor):
            assert (bytes(self.memory), self.packer.count) == (before, count)
            return False
        assert self.packer.count == count + 1
        assert bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy()) in bytes(self.memory)
        return True


@reads
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32",
                                   "int16", "int8", "uint8", "bool"])
def test_a_known_tensor_of_any_dtype_is_packed(dtype):
    bucket = Bucket()
    tensor = torch.randint(0, 2, (3, 5)).to(getattr(torch, dtype))
    bucket.learn("w", tensor)
    assert bucket.put("w", tensor)
    other = torch.zeros(3, 5, dtype=torch.uint8 if dtype != "uint8" else torch.bool)
    assert not Bucket(like=bucket.packer).put("w", other)


@reads
def test_tensors_that_are_something_else_now_are_left_to_the_caller():
    base = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    imaginary = torch.ones(3, 4, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg()

    class Subclass(torch.Tensor):
        pass

    cases = {
        "transposed": torch.zeros(4, 3).t(),
        "strided": torch.zeros(3, 8)[:, ::2],
        "expanded": torch.zeros(4).expand(3, 4),
        "another shape": base.reshape(4, 3),
        "more dimensions": base.reshape(3, 4, 1),
        "another dtype": base.int(),
        "negated": imaginary,
        "negated and contiguous": torch._neg_view(base.clone()),
        "meta": torch.empty(3, 4, device="meta"),
        "sparse": torch.eye(3, 4).to_sparse(),
        "a subclass": base.clone().as_subclass(Subclass),
        "numpy": base.numpy(),
        "nothing": None,
        "a number": 7,
    }
    bucket = Bucket()
    bucket.learn("w", base)
    for what, case in cases.items():
        assert not bucket.put("w", case), what
    for name in ("v", "", None, 7, b"w", "\ud800"):
        assert not bucket.put(name, base), name
    assert bucket.put("w", base)
    assert not bucket.put("w", base), "twice in a bucket"


@reads
def test_a_tensor_whose_memory_was_freed_or_cut_is_left_to_the_caller():
    for size in (0, 4, 40):
        flat = torch.arange(16, dtype=torch.float32)
        part = flat[4:].view(3, 4)
        bucket = Bucket()
        bucket.learn("w", part)
        flat.untyped_storage().resize_(size)
        assert not bucket.packer.push("w", part), size
        flat.untyped_storage().resize_(64)
        assert bucket.packer.push("w", part)


@reads
def test_parts_of_storages_parameters_and_tensors_without_elements_are_packed():
    bucket = Bucket()
    flat = torch.arange(24, dtype=torch.float32)
    for name, tensor in {
        "part": flat[4:16].view(3, 4), "parameter": torch.nn.Parameter(torch.ones(5)), "scalar": torch.tensor(3.5),
        "row": torch.ones(7, 3)[2:3], "empty": torch.empty(0, 9), "empty part": flat[3:3],
    }.items():
        bucket.learn(name, tensor)
        assert bucket.put(name, tensor), name


@reads
def test_a_tensor_is_left_to_the_caller_where_no_bucket_has_room():
    small, large = torch.ones(10), torch.ones(1000)
    bucket = Bucket(256)
    for name, tensor in {"small": small, "large": large}.items():
        bucket.learn(name, tensor)
    assert not bucket.put("large", large)
    assert bucket.put("small", small)
    bucket.packer.end()
    assert not bucket.packer.push("small", small)
    on_gpu = Packer(bucket.packer)
    on_gpu.begin(None, 4096, None)  # memory that only the caller can copy to
    assert not on_gpu.push("small", small)


@reads
def test_a_large_tensor_is_left_to_the_caller_who_lets_other_threads_run():
    large = torch.zeros((256 << 10) + 1, dtype=torch.uint8)
    bucket = Bucket(1 << 20)
    bucket.learn("w", large)
    assert not bucket.put("w", large)


@reads
def test_the_function_keeps_its_packer():
    tensor = torch.ones(3)
    bucket = Bucket()
    bucket.learn("w", tensor)
    push, memory = bucket.packer.push, bucket.memory
    del bucket
    assert push("w", tensor)
    assert bytes(memory)[:12] == bytes(tensor.numpy())
    assert not push() and not push("w") and not push("w", tensor, 3)


def test_memory_that_moved_is_noticed_whichever_tensor_it_is():
    class Module:
        pass

    holder = Module()
    holder.weight = torch.ones(5)
    fixed = [torch.ones(n % 7 + 1) for n in range(100)] + [torch.nn.Parameter(torch.ones(3)), torch.empty(0)]
    asked = [TensorAddress(lambda t=t: t, t) for t in fixed] + [TensorAddress(lambda: holder.weight), numpy.ones(3).__len__]
    addresses = Addresses(asked, [now() for now in asked])
    assert not addresses.moved()
    for tensor in (*fixed[::9], fixed[99], fixed[100]):
        before = tensor.data
        tensor.data = before.clone()
        assert addresses.moved()
        tensor.data = before
        assert not addresses.moved()
    before, holder.weight = holder.weight, torch.ones(5)
    assert addresses.moved()
    holder.weight = before
    assert not addresses.moved()
    storage = fixed[5].untyped_storage()
    storage.resize_(0)
    assert addresses.moved()


def test_a_function_that_tells_another_address_is_noticed():
    told = [5]
    addresses = Addresses([lambda: told[0]], [5])
    assert not addresses.moved()
    told[0] = 6
    assert addresses.moved()


def test_a_dict_with_other_entries_is_noticed_whichever_module_it_is_of():
    model = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)) for _ in range(40))
    bindings = Bindings.of_modules(model)
    assert bindings.complete and bindings.holds_all(model.state_dict(keep_vars=True).values())
    assert bindings.hold()
    for module in (model[0][0], model[17][1], model[39][0]):
        weight, bias = module.weight, module.bias
        module.weight = torch.nn.Parameter(torch.ones(2, 2))
        assert not bindings.hold()
        module.weight = weight
        assert bindings.hold()
        module.register_buffer("another", torch.ones(1))
        assert not bindings.hold()
        del module.another
        module.bias = None
        assert not bindings.hold()
        module.bias = bias
        parameters = module._parameters
        module._parameters = dict(parameters)
        assert not bindings.hold()
        module._parameters = parameters
        assert bindings.hold()
    model[5] = torch.nn.Sequential()
    assert not bindings.hold()


def test_the_entries_of_a_dict_are_noticed_too():
    one, two = torch.ones(1), torch.ones(1)
    held = {"a": one, "b": two}
    bindings = Bindings.of_dict(held)
    assert bindings.hold()
    for change in ({"a": two}, {"b": None}, {"c": one}):
        before = dict(held)
        held.update(change)
        assert not bindings.hold()
        held.clear()
        held.update(before)
        assert bindings.hold()
    del held["b"]
    assert not bindings.hold()


def test_a_tensor_with_another_address_dtype_shape_or_strides_has_another_mark():
    tensors = [torch.ones(4, 4) for _ in range(50)] + [torch.ones((), dtype=torch.int32), torch.empty(0), numpy.ones((4, 4))]
    marks = Marks([*tensors, None], [lambda t=t: t for t in [*tensors, None]])
    assert marks.same()
    for tensor in tensors[7:50:11]:
        before = tensor.data
        others = [before.clone(), before.t(), before.view(2, 8), before[:2], before.view(torch.int32), before.view(1, 4, 4)]
        for other in others:
            tensor.data = other
            assert not marks.same(), other
            tensor.data = before
            assert marks.same()
    tensors[-1].shape = (2, 8)
    assert not marks.same()


def test_a_module_is_looked_at_name_by_name_only_where_it_has_changed():
    asked = []

    class Model(torch.nn.Sequential):
        def named_parameters(self, *arguments, **options):
            asked.append(True)
            return super().named_parameters(*arguments, **options)

    def changed():
        asked.clear()
        return places.changed()

    model = Model(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    weight = model[0].weight
    places = Places(model)
    assert changed() == {} and not asked
    model[0].weight = torch.nn.Parameter(torch.ones(2, 2))
    assert changed() == {"0.weight": "lies elsewhere than when it was registered"}
    assert places.bring_back() == {}
    assert model[0].weight.data_ptr() == weight.data_ptr()
    assert changed() == {} and not asked
    model[1].running_mean.data = torch.ones(2, dtype=torch.float64)
    assert set(changed()) == {"1.running_mean"}
    model[1].running_mean.data = places._memory["1.running_mean"]
    assert changed() == {} and not asked
    model[0].scale = torch.nn.Parameter(torch.ones(1))
    assert changed() == {"0.scale": "was not there when the module was registered"}
    del model[0].scale
    assert changed() == {} and not asked
    model[0].weight = None
    assert changed() == {"0.weight": "is no longer there"}


@pytest.mark.skipif(WAY != "", reason="itself such a process")
@pytest.mark.parametrize("way", ["methods", "none"])
def test_the_same_holds_in_other_ways(way):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=dict(os.environ, REFITD_TEST_WAY=way), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
