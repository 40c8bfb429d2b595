"""A plain torch model as an engine: refitd.engine_loop."""

import threading
import unittest

import pytest

torch = pytest.importorskip("torch")

import refitd
from support import SECONDS, DaemonTest


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).eval()


class EngineLoop(DaemonTest):
    def start(self, **options):
        self.source = {name: refitd.empty(tuple(t.shape), t.dtype) for name, t in model(0).state_dict().items()}
        trainer = self.trainer(rank=0, world_size=1)
        trainer.register(self.source)
        self.served = model(1)
        loop = refitd.engine_loop(self.served, group=self.group, instance="a", socket=self.daemon.socket, **options)
        self.addCleanup(loop.close)
        return trainer, loop

    def fill(self, seed):
        for name, tensor in model(seed).state_dict().items():
            self.source[name].copy_(tensor)

    def test_each_version_is_the_trainers_model(self):
        trainer, loop = self.start()
        batch = torch.ones(2, 8)
        for version in (1, 2, 3):
            self.fill(10 + version)
            trainer.refit(version, duration_seconds=SECONDS)
            self.assertEqual(loop.wait(version, SECONDS), version)
            with loop.use(SECONDS) as held:
                self.assertEqual(held, version)
                self.assertTrue(torch.equal(self.served(batch), model(10 + version)(batch)))

    def test_an_update_waits_for_uses_and_uses_wait_for_it(self):
        trainer, loop = self.start()
        self.fill(11)
        refits = threading.Thread(target=trainer.refit, args=(1,), kwargs={"duration_seconds": SECONDS})
        before = {name: tensor.clone() for name, tensor in self.served.state_dict().items()}
        with loop.use(SECONDS) as held:
            refits.start()
            with loop._changed:
                self.assertTrue(loop._changed.wait_for(lambda: loop._preparing, SECONDS))
            self.assertIsNone(held)
            self.assertTrue(all(torch.equal(before[name], tensor) for name, tensor in self.served.state_dict().items()))
        refits.join(SECONDS)
        with loop.use(SECONDS) as held:
            self.assertEqual(held, 1)

    def test_random_weights_are_not_used(self):
        trainer, loop = self.start(clean=False)
        with self.assertRaises(refitd.DeadlineExceeded):
            with loop.use(0.01):
                self.fail("weights that are not clean are used")
        self.fill(11)
        trainer.refit(1, duration_seconds=SECONDS)
        with loop.use(SECONDS) as held:
            self.assertEqual(held, 1)

    def test_a_trainer_that_gives_an_update_up_leaves_the_version_before(self):
        trainer, loop = self.start()
        self.fill(11)
        trainer.refit(1, duration_seconds=SECONDS)
        begun = trainer.update(2, duration_seconds=SECONDS)
        begun.abort("enough")
        with loop.use(SECONDS) as held:
            self.assertEqual(held, 1)

    def test_close_ends_those_who_wait(self):
        _, loop = self.start(clean=False)
        loop.close()
        with self.assertRaises(refitd.FailedPrecondition):
            with loop.use(SECONDS):
                self.fail("a closed loop is used")

    def test_a_tensor_of_another_shape_is_refused_by_name(self):
        trainer, loop = self.start()
        other = {**self.source, "0.weight": refitd.empty((8, 8), "float32")}
        trainer.register(other)
        with self.assertRaisesRegex(refitd.Error, "0.weight"):
            trainer.refit(1, duration_seconds=SECONDS)


if __name__ == "__main__":
    unittest.main()
