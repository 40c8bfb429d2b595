"""Names are bound to modules and dicts, not to the tensors that were there when they were registered (P11).

Each test changes a registered module as trainers' frameworks do, and compares the bytes that an engine got with what the module holds.
"""

import time
import unittest
import warnings

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from refitd._core.tensors import Bindings  # noqa: E402
from refitd.layout import shards  # noqa: E402
from support import DaemonTest, Server  # noqa: E402
from torch import nn  # noqa: E402

warnings.filterwarnings("ignore", category=refitd.StagingWarning)


class Model(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
        self.register_buffer("scale", torch.ones(4))
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.a.weight


def other(module):
    """Another module of the same shapes and other values."""
    made = Model()
    with torch.no_grad():
        for tensor in made.state_dict().values():
            tensor.copy_(torch.randn_like(tensor))
    return made


class RebindingTest(DaemonTest):
    def served(self, module, dtype=None):
        """The tensors of an engine that wants what the module has."""
        engine = self.engine()
        held = {name: refitd.empty(tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in module.state_dict().items()}
        engine.register(held)
        self.server = Server(self, engine)
        return held

    def pair(self, module=None, **options):
        module = module or Model()
        trainer = self.trainer()
        trainer.register(module, **options)
        return module, trainer, self.served(module, options.get("dtype"))

    def assert_served(self, module, held):
        now = module if isinstance(module, dict) else module.state_dict()
        for name, tensor in held.items():
            self.assertTrue(torch.equal(tensor, now[name].to(tensor.dtype)), name)

    def refused(self, trainer, version, held, name, text=""):
        """A refit is refused before anything is written, naming the tensor."""
        before = {each: tensor.clone() for each, tensor in held.items()}
        with self.assertRaisesRegex(refitd.FailedPrecondition, text) as caught:
            trainer.refit(version)
        self.assertEqual(caught.exception.culprit, f"tensor '{name}'")
        for each, tensor in held.items():
            self.assertTrue(torch.equal(tensor, before[each]), each)

    def test_a_state_dict_that_is_assigned_is_followed(self):
        for staging in (None, "whole", "push"):
            with self.subTest(staging):
                self.group = f"assign-{staging}"
                module, trainer, held = self.pair(**({} if staging is None else {"dtype": torch.bfloat16, "staging": staging}))
                self.assertEqual(trainer.refit(1).rebound, 0)
                module.load_state_dict(other(module).state_dict(), assign=True)
                self.assertEqual(trainer.refit(2).rebound, len(held))
                self.assert_served(module, held)
                self.assertEqual(trainer.refit(3).rebound, 0)

    def test_a_new_parameter_object_is_followed(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.a.weight = nn.Parameter(torch.randn(8, 8))
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assert_served(module, held)

    def test_a_new_submodule_is_followed(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.inner = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 4))
        self.assertEqual(trainer.refit(2).rebound, 3)
        self.assert_served(module, held)
        module.inner[1] = nn.Linear(8, 4)
        self.assertEqual(trainer.refit(3).rebound, 2)
        self.assert_served(module, held)

    def test_a_buffer_that_is_computed_anew_is_followed(self):
        module, trainer, held = self.pair()
        for version in (1, 2, 3):
            module.scale = module.scale + version
            self.assertEqual(trainer.refit(version).rebound, 1)
            self.assert_served(module, held)

    def test_a_module_that_went_to_another_dtype_and_back_is_followed(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.to(torch.float64).to(torch.float32)
        with torch.no_grad():
            for tensor in module.state_dict().values():
                tensor.add_(1)
        trainer.refit(2)
        self.assert_served(module, held)
        refitd.adopt(module)
        self.assertEqual(trainer.refit(3).staged_bytes, 0)
        self.assert_served(module, held)

    def test_a_module_on_meta_is_refused_by_name(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.to("meta")
        self.refused(trainer, 2, held, "scale", "device meta")

    def test_a_parametrized_weight_is_refused_by_name(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        nn.utils.parametrize.register_parametrization(module.a, "weight", nn.Identity())
        self.refused(trainer, 2, held, "a.weight", "no longer there: register again")
        nn.utils.parametrize.remove_parametrizations(module.a, "weight")
        trainer.refit(3)
        self.assert_served(module, held)

    def test_another_shape_or_dtype_is_refused_by_name(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        weight, module.a.weight = module.a.weight, nn.Parameter(torch.zeros(9, 8))
        self.refused(trainer, 2, held, "a.weight", r"was registered as float32 \(8, 8\), and is now float32 \(9, 8\)")
        module.a.weight = weight
        weight.data = weight.data.to(torch.bfloat16)
        self.refused(trainer, 2, held, "a.weight", r"is now bfloat16 \(8, 8\)")

    def test_a_tensor_that_was_transposed_in_place_is_followed(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.a.weight.data = module.a.weight.data.t()
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assert_served(module, held)

    def test_ties_that_are_cut_are_noticed(self):
        module = Model(tied=True)
        trainer = self.trainer()
        trainer.register(module)
        held = self.served(module)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "head.weight"):
            trainer.refit(1)  # the engine has two tensors, of which a tied trainer brings one
        module.head.weight = nn.Parameter(torch.randn(8, 8))
        trainer.refit(2)
        self.assert_served(module, held)

    def test_a_buffer_that_was_tied_and_moved_is_noticed(self):
        module = Model(tied=True)
        trainer = self.trainer()
        module.head.weight = nn.Parameter(module.a.weight.data)  # an object of its own, in the same memory
        trainer.register(module)
        held = self.served(module)
        module.head.weight.data = torch.randn(8, 8)
        trainer.refit(1)
        self.assert_served(module, held)

    def test_the_values_of_a_dict_are_looked_up_by_key(self):
        source = {"w": torch.randn(4), "b": torch.randn(2)}
        trainer = self.trainer()
        trainer.register(source)
        held = {name: refitd.empty(tuple(tensor.shape)) for name, tensor in source.items()}
        engine = self.engine()
        engine.register(held)
        Server(self, engine)
        trainer.refit(1)
        source["w"] = torch.randn(4)
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assert_served(source, held)
        del source["b"]
        self.refused(trainer, 3, held, "b", "no longer there")
        source["b"], source["new"] = torch.randn(2), torch.randn(3)
        self.refused_by_the_daemon(trainer, 3, "new")

    def refused_by_the_daemon(self, trainer, version, name):
        with self.assertRaises(refitd.FailedPrecondition) as caught:
            trainer.refit(version)
        self.assertEqual(caught.exception.culprit, f"tensor '{name}'")

    def test_numpy_arrays_of_a_dict_are_looked_up_by_key(self):
        numpy = pytest.importorskip("numpy")
        source = {"w": numpy.arange(4, dtype=numpy.float32)}
        trainer, engine = self.trainer(), self.engine()
        trainer.register(source)
        held = {"w": refitd.empty((4,))}
        engine.register(held)
        Server(self, engine)
        trainer.refit(1)
        source["w"] = numpy.full(4, 7, dtype=numpy.float32)
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assertEqual(held["w"].tolist(), [7.0] * 4)

    def test_a_module_whose_state_dict_makes_new_tensors_is_asked_at_every_refit(self):
        module = Model()

        def halved(module, state, prefix, metadata):
            for name in list(state):
                state[name] = state[name].detach() / 2

        module.register_state_dict_post_hook(halved)
        trainer = self.trainer()
        trainer.register(module)
        held = self.served(module)
        for version in (1, 2):
            with torch.no_grad():
                module.a.weight.add_(1)
            trainer.refit(version)
            self.assert_served(module, held)

    def test_what_was_made_of_a_module_is_made_again_where_the_module_has_changed(self):
        module = Model()

        def make():
            made.append(1)
            halves = {f"half.{i}": half for i, half in enumerate(module.a.weight.data.chunk(2))}
            return shards.MadeMapping(halves, shards.MadeOf([module], make))

        made = []
        trainer, engine = self.trainer(), self.engine()
        trainer.register(make())
        held = {f"half.{i}": refitd.empty((4, 8)) for i in range(2)}
        engine.register(held)
        Server(self, engine)
        self.assertEqual((trainer.refit(1).rebound, len(made)), (0, 1))
        module.load_state_dict(other(module).state_dict(), assign=True)
        self.assertEqual((trainer.refit(2).rebound, len(made)), (2, 2))
        self.assertTrue(torch.equal(torch.cat(list(held.values())), module.a.weight))
        module.head.bias = nn.Parameter(torch.ones(8))  # nothing of what was made
        self.assertEqual((trainer.refit(3).rebound, len(made)), (0, 3))
        self.assertEqual((trainer.refit(4).rebound, len(made)), (0, 3))

    def test_a_list_of_shards_is_bound_to_its_tensors_and_follows_their_memory(self):
        tensor = torch.randn(4)
        trainer, engine = self.trainer(), self.engine()
        trainer.register([refitd.Shard("w", (4,), tensor)])
        held = {"w": refitd.empty((4,))}
        engine.register(held)
        Server(self, engine)
        tensor.data = torch.randn(4)
        self.assertEqual(trainer.refit(1).rebound, 1)
        self.assertTrue(torch.equal(held["w"], tensor))
        tensor.data = torch.randn(5)
        self.refused(trainer, 2, held, "w")

    def test_an_update_with_the_layout_looks_names_up_and_copies_what_is_not_in_place(self):
        module, trainer, held = self.pair()
        trainer.refit(1)
        module.load_state_dict(other(module).state_dict(), assign=True)
        with trainer.update(2, with_layout=True) as update:
            with torch.no_grad():
                module.a.bias.add_(1)  # before the bytes are read
        self.assertEqual(update.result.rebound, len(held))
        self.assertGreater(update.result.staged_bytes, 0)
        self.assert_served(module, held)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "after the update had begun"):
            with trainer.update(3, with_layout=True):
                module.a.weight = nn.Parameter(torch.randn(8, 8))
        trainer.refit(4)
        self.assert_served(module, held)


    def test_a_commit_raises_the_versions_of_all_tensors_that_the_module_has_then(self):
        source, served = Model(), Model()
        refitd.adopt(served)
        trainer, engine = self.trainer(), self.engine()
        trainer.register(source)
        engine.register(served)
        server = Server(self, engine)
        for version in (1, 2, 3):
            if version == 3:
                served.scale = served.scale.clone()  # a buffer of the same name, in other memory
                refitd.adopt(served)
                engine.register(served)
            before = {name: tensor._version for name, tensor in served.state_dict(keep_vars=True).items()}
            trainer.refit(version)
            server.wait_for(refitd.Committed, version)
            for name, tensor in served.state_dict(keep_vars=True).items():
                self.assertGreater(tensor._version, before[name], (version, name))


class Experts(nn.Module):
    def __init__(self, layers, experts):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3))) for _ in range(experts)) for _ in range(layers)
        )


def test_dicts_that_python_tells_of_are_compared_only_after_a_change():
    module = Model()
    bindings = Bindings.of_modules(module)
    assert bindings.hold()
    if not bindings._watched:
        pytest.skip("Python 3.12 or later tells of changes of dicts, with a torch that librefit reads")
    compared = bindings._changes
    module.eval()
    with torch.no_grad():
        module.a.weight.add_(1)
    assert bindings.hold() and bindings._changes == compared
    weight = module.a.weight
    module.a.weight = nn.Parameter(torch.zeros(8, 8))
    assert not bindings.hold()
    module.a.weight = weight
    assert bindings.hold() and bindings._changes > compared
    module.inner[0]._buffers["late"] = torch.ones(1)
    assert not bindings.hold()
    del module.inner[0]._buffers["late"]
    module.a._parameters = dict(module.a._parameters)
    assert not bindings.hold()


def test_looking_up_eighteen_thousand_names_costs_less_than_asking_torch_for_them():
    module = Experts(48, 128)
    layout = shards.collect(module)
    assert len(layout.tensors) == 48 * 128 * 3
    assert layout.source.renewed() is None

    def least(call):
        times = []
        for _ in range(7):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert least(layout.source.renewed) < 0.25 * least(lambda: module.state_dict(keep_vars=True))


if __name__ == "__main__":
    unittest.main()
