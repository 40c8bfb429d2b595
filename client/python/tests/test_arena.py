"""Engines whose weights lie in an arena: versions are staged while the engine serves, and ready() puts them into place."""

import gc
import multiprocessing
import random
import unittest
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from refitd.layout import placement  # noqa: E402
from support import SECONDS, DaemonTest, Server, wait_until  # noqa: E402
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


def serve(socket, group, pipe):
    """An engine in a process of its own, until it is killed. Sends the version that it holds: at first, and at each commit. After that it
    adds to a weight what it is sent, as a bug might, and says so."""
    model = Model()
    refitd.adopt(model, arena=True)
    with refitd.Engine(group, instance="a", socket=socket, device="host", restore=True) as engine:
        engine.register(model)
        pipe.send(engine.version)
        for event in engine:
            if isinstance(event, refitd.Prepare):
                event.ready()
            elif isinstance(event, refitd.Committed):
                pipe.send(event.version)
                with torch.no_grad():
                    model.layers[0].weight[3, 4] += pipe.recv()
                pipe.send("done")


def test_sizes_of_arenas_give_the_same_batches_again():
    chance = random.Random(7)
    for device in (None, "GPU-a"):
        for _ in range(50):
            sizes = [chance.choice([1, 100, 4096, 1 << 20, 3 << 20, (5 << 20) + 1]) for _ in range(chance.randint(1, 40))]
            found = [[torch.empty(size, dtype=torch.uint8)] for size in sizes]
            batches = list(placement._batches(found, device, iter(lambda: chance.randint(1, 20 << 20), None)))
            assert sum(batches, []) == found
            kept = [placement._arena_bytes(placement._room_for(batch), device) for batch in batches]
            assert list(placement._batches(found, device, iter(kept))) == batches


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
        refitd.adopt(model, arena=True, back="host")  # there already
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

    def test_a_tensor_that_a_run_writes_is_named_and_nothing_moves(self):
        model = Model()
        address = model.embed.weight.data_ptr()

        def counts():
            model(torch.arange(8))
            model.scale[3] += 1

        with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'scale' is written by warm_up"):
            refitd.adopt(model, arena=True, warm_up=counts)
        self.assertEqual(model.embed.weight.data_ptr(), address)
        refitd.adopt(model, arena=True, buffers=False, warm_up=counts)
        self.assertNotEqual(model.embed.weight.data_ptr(), address)
        with self.assertRaisesRegex(refitd.InvalidArgument, "warm_up is for arenas"):
            refitd.adopt(model, warm_up=counts)
        with self.assertRaisesRegex(refitd.InvalidArgument, "back: 'disk' is none of device, host"):
            refitd.adopt(model, arena=True, back="disk")

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

    def killed(self, version, change=0.0):
        """An engine is killed that holds the version, after it has changed a weight by that much."""
        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(target=serve, args=(self.daemon.socket, self.group, theirs), daemon=True)
        process.start()
        self.addCleanup(process.kill)
        self.assertIsNone(pipe.recv())
        self.source.load_state_dict(other(version))
        self.sender.refit(version)
        self.assertEqual(pipe.recv(), version)
        pipe.send(change)
        self.assertEqual(pipe.recv(), "done")
        process.kill()
        process.join(SECONDS)
        wait_until(lambda: self.kept() == [version], "the arenas are kept")

    def kept(self):
        return [int(arena["version"]) for arena in self.status()["arenas"] if arena["group"] == self.group and arena["kept"]]

    def on_meta(self):
        with torch.device("meta"):
            model = Model()
        model.table = torch.arange(16.0)
        model.embed.weight.note = "an attribute"
        return model

    def test_an_engine_restarts_with_the_weights_of_the_one_before(self):
        self.killed(1)
        model = self.on_meta()
        engine = self.engine(restore=True)
        self.assertTrue(engine.restore(model))
        self.assertEqual(engine.version, 1)
        for name, tensor in self.source.state_dict().items():
            self.assertTrue(torch.equal(model.state_dict()[name], tensor), name)
        self.assertIs(model.head.weight, model.embed.weight)
        self.assertEqual(model.embed.weight.note, "an attribute")
        self.assertTrue(model.embed.weight.requires_grad)
        tokens = torch.arange(8)
        self.assertTrue(torch.equal(model(tokens), self.source(tokens)))
        event = engine.poll()
        self.assertIsInstance(event, refitd.Committed)
        self.assertEqual((event.version, event.content), (1, None))
        self.assertIsNone(engine.poll())  # no catch-up
        self.assertEqual(self.kept(), [])
        server = Server(self, engine)
        self.source.load_state_dict(other(2))
        self.sender.refit(2)
        server.wait_for(refitd.Committed)
        self.assertTrue(torch.equal(model(tokens), self.source(tokens)))

    def test_weights_that_the_process_changed_are_no_version(self):
        self.killed(1, change=1.0)
        model = self.on_meta()
        engine = self.engine(restore=True)
        self.assertFalse(engine.restore(model))
        self.assertIsNone(engine.version)
        self.assertIn("its content differs", self.daemon.read_log())
        with self.assertRaisesRegex(refitd.DeadlineExceeded, "the layout of engine a rank 0"):
            self.sender.refit(2, duration_seconds=0.3)  # loading would overwrite it
        model.load_state_dict(other(7))  # the memory is as good as new
        engine.register(model)
        server = Server(self, engine)
        self.source.load_state_dict(other(3))
        self.sender.refit(3)
        server.wait_for(refitd.Committed)
        self.assertTrue(torch.equal(model(torch.arange(8)), self.source(torch.arange(8))))

    def test_another_model_gets_new_memory_and_no_version(self):
        self.killed(1)
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(4, 4))
        engine = self.engine(restore=True)
        self.assertFalse(engine.restore(model))
        self.assertTrue(torch.equal(model[0].weight, torch.zeros(4, 4)))
        self.assertIn("its layout differs", self.daemon.read_log())

    def test_without_restore_the_arenas_are_given_up(self):
        self.killed(1)
        engine = self.engine()
        self.assertEqual(self.kept(), [])
        self.assertFalse(engine.restore(self.on_meta()))

    def test_arguments_that_contradict_restore_are_refused(self):
        for wrong in ({"held_version": 1}, {"dirty": True}, {"loader": True}):
            with self.assertRaises(refitd.InvalidArgument):
                self.engine(restore=True, **wrong)

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
