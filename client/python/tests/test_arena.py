"""Engines whose weights lie in an arena: versions are staged while the engine serves, and ready() puts them into place."""

import gc
import unittest
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from support import SECONDS, DaemonTest, Server  # noqa: E402
from torch import nn  # noqa: E402


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16, bias=False))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(16))
        self.register_buffer("table", torch.arange(16.0), persistent=False)

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)) * self.scale) + self.table.sum()


def other(seed):
    torch.manual_seed(seed)
    return Model().state_dict()


class Beside:
    """Runs a function beside the block, and raises what it raised."""

    def __init__(self, function):
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(function)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._future.result(SECONDS)
        self._pool.shutdown()


class ArenaTest(DaemonTest):
    def setUp(self):
        super().setUp()
        self.source = Model()
        self.sender = self.trainer()
        self.sender.register(self.source)

    def adopted(self):
        model = Model()
        refitd.adopt(model, arena=True)
        engine = self.engine()
        engine.register(model)
        return model, engine

    def test_tensors_keep_values_addresses_and_ties(self):
        model = Model()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        refitd.adopt(model, arena=True)
        for name, tensor in model.state_dict().items():
            self.assertTrue(torch.equal(tensor, before[name]), name)
        self.assertEqual(model.head.weight.data_ptr(), model.embed.weight.data_ptr())
        addresses = [parameter.data_ptr() for parameter in model.parameters()]
        refitd.adopt(model, arena=True)  # there already
        self.assertEqual(addresses, [parameter.data_ptr() for parameter in model.parameters()])
        engine = self.engine()
        engine.register(model)
        server = Server(self, engine)
        for version in range(1, 4):
            self.source.load_state_dict(other(version))
            self.sender.refit(version)
            server.wait_for(refitd.Committed, version)
            for name, tensor in model.state_dict().items():
                self.assertTrue(torch.equal(tensor, self.source.state_dict()[name]), name)
            self.assertEqual(addresses, [parameter.data_ptr() for parameter in model.parameters()])
            # The buffer is registered under no name, and both sides have it.
            self.assertTrue(torch.equal(model.table, torch.arange(16.0)))

    def test_the_engine_serves_its_version_until_ready(self):
        model, engine = self.adopted()
        tokens = torch.arange(8)
        with Beside(lambda: self.sender.refit(1)):
            before = model(tokens)
            event = engine.next(SECONDS)
            self.assertIsInstance(event, refitd.Prepare)
            self.assertTrue(event.flip)
            self.assertTrue(torch.equal(model(tokens), before))
            event.ready()
            self.assertTrue(torch.equal(model(tokens), self.source(tokens)))
            self.assertIsInstance(engine.next(SECONDS), refitd.Committed)

    def test_a_rank_that_fails_keeps_its_version(self):
        model, engine = self.adopted()
        tokens = torch.arange(8)
        before = model(tokens)
        with Beside(lambda: self.assertRaises(refitd.Error, self.sender.refit, 1)):
            engine.next(SECONDS).fail("not now")
            event = engine.next(SECONDS)
            self.assertIsInstance(event, refitd.Aborted)
            self.assertFalse(event.dirty)
        self.assertTrue(torch.equal(model(tokens), before))

    def test_a_rollback_serves_the_version_before_again(self):
        model, engine = self.adopted()
        server = Server(self, engine)
        tokens = torch.arange(8)
        outputs = {}
        for version in (1, 2):
            self.source.load_state_dict(other(version))
            self.sender.refit(version)
            server.wait_for(refitd.Committed, version)
            outputs[version] = model(tokens)
        self.assertFalse(torch.equal(outputs[1], outputs[2]))
        self.assertEqual(self.sender.rollback(), 3)
        server.wait_for(refitd.Committed, 3)
        self.assertTrue(torch.equal(model(tokens), outputs[1]))
        last = server.of(refitd.Committed)[-1]
        self.assertEqual((last.version, last.content), (3, 1))
        self.assertEqual(self.sender.next_version, 4)
        # A caller that missed the answer names what it wanted undone.
        self.assertEqual(self.sender.rollback(2), 3)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "is a rollback itself"):
            self.sender.rollback()
        self.source.load_state_dict(other(4))
        self.assertEqual(self.sender.refit(self.sender.next_version).version, 4)
        server.wait_for(refitd.Committed, 4)
        self.assertEqual(server.of(refitd.Committed)[-1].content, None)
        self.assertTrue(torch.equal(model(tokens), self.source(tokens)))

    def test_the_version_before_is_held_until_it_is_released(self):
        _, engine = self.adopted()
        server = Server(self, engine)
        self.sender.refit(1)
        self.sender.refit(2, hold=True)
        with self.assertRaisesRegex(refitd.DeadlineExceeded, "version 1, which is held for a rollback, to be released"):
            self.sender.refit(3, duration_seconds=0.3)
        self.sender.release()
        self.sender.refit(3)
        server.wait_for(refitd.Committed, 3)

    def test_an_arena_of_another_engine_is_refused(self):
        model, _ = self.adopted()
        with self.assertRaisesRegex(refitd.FailedPrecondition, "another engine"):
            self.engine("b").register(model)

    def test_an_arena_of_a_trainer_is_refused(self):
        model = Model()
        refitd.adopt(model, arena=True)
        with self.assertRaisesRegex(refitd.InvalidArgument, "only engines have"):
            self.sender.register(model)

    def test_the_memory_outlives_its_engine_and_serves_the_next(self):
        model, engine = self.adopted()
        for version in range(1, 4):
            server = Server(self, engine)
            self.source.load_state_dict(other(version))
            self.sender.refit(version)
            server.wait_for(refitd.Committed)
            expected = model(torch.arange(8))
            self.assertTrue(torch.equal(expected, self.source(torch.arange(8))))
            engine.close()
            del engine
            gc.collect()
            self.assertTrue(torch.equal(model(torch.arange(8)), expected))
            engine = self.engine(held_version=version)
            engine.register(model)


if __name__ == "__main__":
    unittest.main()
