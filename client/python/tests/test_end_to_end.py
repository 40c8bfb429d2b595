"""torch models over a real daemon: a trainer's module into an engine's, in one dtype and another, pushed and refitted."""

import unittest
import warnings

import pytest

torch = pytest.importorskip("torch")

import refitd
from support import DaemonTest, Server


class Model(torch.nn.Module):
    """Layers, a buffer, tied weights, a bias that stays float32."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 16, dtype=dtype)
        self.up = torch.nn.Linear(16, 40, bias=False, dtype=dtype)
        self.down = torch.nn.Linear(40, 16, dtype=dtype)
        self.router_bias = torch.nn.Parameter(torch.zeros(7, dtype=torch.float32))
        self.register_buffer("scale", torch.ones(3, dtype=dtype))
        self.head = torch.nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight


def randomise(model, seed):
    torch.manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape))


def tensors_of(model):
    """Names and tensors, tied ones once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


class EndToEndTest(DaemonTest):
    def engine_of(self, model):
        engine = self.engine()
        refitd.adopt(model)
        engine.register(tensors_of(model))
        return Server(self, engine)

    def assert_same(self, trained, served, dtype=torch.float32):
        for name, tensor in tensors_of(served).items():
            kept = torch.float32 if name == "router_bias" else dtype
            self.assertEqual(tensor.dtype, kept)
            self.assertTrue(torch.equal(tensor, trained.state_dict()[name].to(kept)), name)

    def test_a_module_that_was_adopted_is_refitted_in_place_without_a_copy(self):
        trained, served, trainer = Model(), Model(), self.trainer()
        refitd.adopt(trained)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trainer.register(trained)
        self.engine_of(served)
        for version in (1, 2):
            randomise(trained, version)
            result = trainer.refit(version)
            self.assert_same(trained, served)
            self.assertEqual((result.staged_bytes, result.rebound, result.committed), (0, 0, 1))

    def test_an_engine_with_fused_weights_is_refitted_by_what_its_loader_does(self):
        class Fused(torch.nn.Module):
            """Holds half of q, k and v of a trainer's layers in one parameter, rank by rank, and the gate over the up projection."""

            def __init__(self, rank):
                super().__init__()
                self.rank = rank
                self.qkv = torch.nn.Parameter(torch.zeros(12, 8), requires_grad=False)
                self.gate_up = torch.nn.Parameter(torch.zeros(8, 8), requires_grad=False)

            def load_weights(self, weights):
                for name, tensor in weights:
                    if name in ("q", "k", "v"):
                        at = 4 * "qkv".index(name)
                        self.qkv.data[at : at + 4].copy_(tensor.chunk(2)[self.rank])
                    else:
                        at = 4 * ("gate", "up").index(name)
                        self.gate_up.data.narrow(0, at, 4).copy_(tensor.narrow(0, 4 * self.rank, 4))

        source = {name: refitd.empty((8, 8), "float32", like="torch") for name in ("q", "k", "v", "gate", "up")}
        trainer = self.trainer()
        trainer.register(source)
        served, expected = [Fused(rank) for rank in range(2)], [Fused(rank) for rank in range(2)]
        for rank, module in enumerate(served):
            engine = self.engine(rank=rank, world_size=2)
            refitd.adopt(module)
            captured = refitd.capture(module.load_weights, source)
            self.assertEqual((captured.unsupported, captured.processed), ({}, {}))
            engine.register(captured)
            Server(self, engine)
        for version in (1, 2):
            torch.manual_seed(version)
            for tensor in source.values():
                tensor.copy_(torch.randn(8, 8))
            trainer.refit(version)
            for module, other in zip(served, expected):
                other.load_weights(source.items())
                self.assertTrue(torch.equal(module.qkv, other.qkv))
                self.assertTrue(torch.equal(module.gate_up, other.gate_up))

    def test_a_plain_state_dict_is_staged(self):
        trained, served, trainer = Model(), Model(), self.trainer()
        with pytest.warns(refitd.StagingWarning):
            trainer.register(trained.state_dict())
        self.engine_of(served)
        randomise(trained, 3)
        self.assertGreater(trainer.refit(1).staged_bytes, 0)
        self.assert_same(trained, served)

    def test_a_cast_is_delivered_but_for_exceptions(self):
        trained, served, trainer = Model(), Model(torch.bfloat16), self.trainer()
        refitd.adopt(trained)
        for version, staging in enumerate(("whole", "push")):
            trainer.register(trained, dtype=torch.bfloat16, exceptions={"router_bias": None}, staging=staging)
            if version == 0:
                self.engine_of(served)
            randomise(trained, version)
            trainer.refit(version)
            self.assert_same(trained, served, torch.bfloat16)

    def test_parameters_whose_memory_moved_are_followed(self):
        trained, served, trainer = Model(), Model(), self.trainer()
        refitd.adopt(trained)
        trainer.register(trained)
        self.engine_of(served)
        trained.up.weight.data = refitd.empty((40, 16), "float32")
        randomise(trained, 5)
        self.assertEqual(trainer.refit(1).rebound, 1)
        self.assert_same(trained, served)

    def test_pushed_tensors_reach_registered_parameters(self):
        trained, served, trainer = Model(), Model(), self.trainer()
        self.engine_of(served)
        randomise(trained, 6)
        with trainer.update(1) as update:
            for name, tensor in tensors_of(trained).items():
                update.push(name, tensor)
        self.assert_same(trained, served)

    def test_a_shape_that_differs_is_an_error_that_names_the_tensor_before_anything_is_written(self):
        trained, served, trainer = Model(), Model(), self.trainer()
        trained.down = torch.nn.Linear(41, 16)
        refitd.adopt(trained)
        trainer.register(trained)
        before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
        self.engine_of(served)
        with self.assertRaises(refitd.FailedPrecondition) as caught:
            trainer.refit(1)
        self.assertEqual((caught.exception.culprit, caught.exception.dirty), ("tensor 'down.weight'", False))
        for name, tensor in served.state_dict().items():
            self.assertTrue(torch.equal(tensor, before[name]), name)

    def test_a_tensor_on_another_device_is_refused_by_name(self):
        with self.assertRaisesRegex(refitd.Error, "w"):
            self.trainer().register({"w": torch.empty(3, device="meta")})


if __name__ == "__main__":
    unittest.main()
