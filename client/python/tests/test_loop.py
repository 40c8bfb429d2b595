"""A plain torch model as an engine: refitd.EngineLoop."""

import threading
import unittest
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import refitd
from refitd._core.tensors import Places
from refitd.serving.rank import Rank
from refitd.serving import Settings
from support import SECONDS, DaemonTest, delivery_of


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)).eval()


class EngineLoop(DaemonTest):
    def start(self, **options):
        self.source = {name: refitd.empty(tuple(t.shape), t.dtype) for name, t in model(0).state_dict().items()}
        trainer = self.trainer(rank=0, world_size=1)
        trainer.register(self.source)
        self.served = model(1)
        loop = refitd.EngineLoop(self.served, group=self.group, instance="a", socket=self.daemon.socket, **options)
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

    def refit(self, trainer, loop, first, seed):
        """Makes updates from version `first` until one commits; returns its version, and how the others ended."""
        refused = []
        for version in range(first, first + 20):
            self.fill(seed)
            try:
                trainer.refit(version, duration_seconds=SECONDS)
            except refitd.UpdateAborted as error:
                refused.append(str(error))
                continue
            self.assertEqual(loop.wait(version, SECONDS), version)
            return version, refused
        self.fail(f"no update commits: {refused}")

    def check_follows(self, change):
        """After `change` of the served model, each version that commits is what the model computes with."""
        trainer, loop = self.start()
        self.fill(11)
        trainer.refit(1, duration_seconds=SECONDS)
        with loop.use(SECONDS):
            change(self.served)
        _, refused = self.refit(trainer, loop, 2, 12)
        with loop.use(SECONDS):
            self.assertTrue(torch.equal(self.served(torch.ones(2, 8)), model(12)(torch.ones(2, 8))))
        for text in refused:
            self.assertRegex(text, "tensor '.*' of engine rank 0 of instance a (lies elsewhere|was )")
        return loop

    def test_a_parameter_that_was_replaced_is_committed_and_stale(self):
        def change(served):
            served[0].weight = torch.nn.Parameter(served[0].weight.detach() + 1)

        self.check_follows(change)

    def test_an_assigned_state_dict_is_committed_and_stale(self):
        self.check_follows(lambda served: served.load_state_dict(model(5).state_dict(), assign=True))

    def test_a_new_submodule_and_a_new_buffer_are_committed_and_stale(self):
        def change(served):
            served[2] = torch.nn.Linear(16, 4)
            served[1].running_mean = served[1].running_mean + 1

        self.check_follows(change)

    def test_a_module_that_was_moved_and_moved_back_is_committed_and_stale(self):
        self.check_follows(lambda served: served.double().float())

    def test_an_update_is_refused_by_the_name_of_a_tensor_that_no_longer_fits(self):
        trainer, loop = self.start()
        self.fill(11)
        trainer.refit(1, duration_seconds=SECONDS)
        kept = self.served[0].weight
        with loop.use(SECONDS):
            self.served[0].weight = torch.nn.Parameter(torch.ones(16, 8, device="meta"))
        for version in (2, 3):
            with self.assertRaisesRegex(refitd.UpdateAborted, "0.weight") as caught:
                trainer.refit(version, duration_seconds=SECONDS)
            self.assertFalse(caught.exception.dirty)
        self.assertEqual(loop.version, 1)
        self.served[0].weight = kept
        self.refit(trainer, loop, 4, 12)

    def test_where_memory_cannot_be_brought_back_an_update_that_begins_before_it_is_registered_anew_writes_nothing(self):
        """As on a GPU, whose captured graphs may read the new memory."""
        trainer, loop = self.start()
        with mock.patch.object(loop, "_register_anew"), mock.patch.object(loop, "_bring_back"):
            self.served[2].bias = torch.nn.Parameter(torch.zeros(4))
            before = {name: tensor.clone() for name, tensor in self.served.state_dict().items()}
            self.fill(11)
            with self.assertRaisesRegex(refitd.UpdateAborted, "'2.bias' of engine rank 0 of instance a lies elsewhere") as caught:
                trainer.refit(1, duration_seconds=SECONDS)
            self.assertFalse(caught.exception.dirty)
            self.assertTrue(all(torch.equal(before[name], tensor) for name, tensor in self.served.state_dict().items()))
        self.refit(trainer, loop, 2, 12)

    def test_names_of_parts_of_a_parameter_follow_it(self):
        fused = torch.nn.Module()
        fused.qkv = torch.nn.Parameter(torch.zeros(6, 4))
        parts = {"q": fused.qkv.detach()[:4], "kv": fused.qkv.detach()[4:]}
        source = {"q": refitd.empty((4, 4), "float32"), "kv": refitd.empty((2, 4), "float32")}
        trainer = self.trainer(rank=0, world_size=1)
        trainer.register(source)
        self.source, self.served = source, fused
        loop = refitd.EngineLoop(fused, group=self.group, instance="a", socket=self.daemon.socket, names=parts)
        self.addCleanup(loop.close)
        self.fill = lambda seed: [tensor.fill_(seed + i) for i, tensor in enumerate(source.values())]
        self.refit(trainer, loop, 1, 7)
        with loop.use(SECONDS):
            fused.qkv = torch.nn.Parameter(torch.zeros(6, 4))
            loop._register()  # as the loop does by itself between updates
        version, _ = self.refit(trainer, loop, 2, 9)
        with loop.use(SECONDS):
            self.assertEqual(fused.qkv[:, 0].tolist(), [9] * 4 + [10] * 2)
        with loop.use(SECONDS):
            fused.qkv = torch.nn.Parameter(torch.zeros(4, 6))
        with self.assertRaisesRegex(refitd.UpdateAborted, "qkv"):
            trainer.refit(version + 1, duration_seconds=SECONDS)

    def test_a_copy_that_is_kept_by_a_version_of_its_weight_is_made_anew(self):
        class Lazy(torch.nn.Linear):
            def forward(self, x):
                key = self.weight.data_ptr(), self.weight._version
                if getattr(self, "key", None) != key:
                    self.key, self.copy = key, self.weight.detach().double()
                return torch.nn.functional.linear(x.double(), self.copy).float()

        served = torch.nn.Sequential(Lazy(8, 4, bias=False))
        source = {"0.weight": refitd.empty((4, 8), "float32")}
        trainer = self.trainer(rank=0, world_size=1)
        trainer.register(source)
        loop = refitd.EngineLoop(served, group=self.group, instance="a", socket=self.daemon.socket)
        self.addCleanup(loop.close)
        view = served[0].weight.detach()[1:]
        for version in (1, 2):
            source["0.weight"].fill_(version)
            before = view._version
            trainer.refit(version, duration_seconds=SECONDS)
            loop.wait(version, SECONDS)
            with loop.use(SECONDS):
                self.assertEqual(served(torch.ones(1, 8)).tolist(), [[8.0 * version] * 4])
                self.assertGreater(view._version, before)


class Engines(DaemonTest):
    """refitd.Engine with a module, answered by hand."""

    def start(self, layout):
        source = {"weight": refitd.empty((4, 8), "float32"), "bias": refitd.empty((4,), "float32")}
        trainer = self.trainer(rank=0, world_size=1)
        trainer.register(source)
        self.served = torch.nn.Linear(8, 4)
        refitd.adopt(self.served)
        engine = self.engine()
        engine.register(layout(self.served))
        return trainer, engine

    def check_refused(self, layout):
        trainer, engine = self.start(layout)
        self.served.weight = torch.nn.Parameter(torch.zeros(4, 8))
        outcome = []

        def refit():
            try:
                trainer.refit(1, duration_seconds=SECONDS)
            except refitd.UpdateAborted as error:
                outcome.append(error)

        refits = threading.Thread(target=refit)
        refits.start()
        prepare = engine.next(SECONDS)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "'weight' of engine rank 0 of instance a lies elsewhere"):
            prepare.ready()
        refits.join(SECONDS)
        self.assertRegex(str(outcome[0]), "weight")

    def test_a_replaced_parameter_of_a_registered_module_is_refused_at_prepare(self):
        self.check_refused(lambda served: served)

    def test_a_replaced_parameter_of_a_captured_module_is_refused_at_prepare(self):
        def capture(served):
            class Loader(torch.nn.Linear):
                def load_weights(self, tensors):
                    own = dict(self.named_parameters())
                    for name, tensor in tensors:
                        own[name].data.copy_(tensor)

            served.__class__ = Loader
            return refitd.capture(served.load_weights, [("weight", "float32", (4, 8)), ("bias", "float32", (4,))])

        self.check_refused(capture)

    def test_an_engine_that_attached_before_a_gpu_was_used_attaches_on_the_gpu_of_its_tensors(self):
        self.trainer(rank=0, world_size=1)
        engine = self.engine(device=None)
        attached = []
        with mock.patch.object(engine, "_attach", side_effect=lambda options: attached.append(options.connect.contents.device)):
            memory = refitd.CudaMemory("GPU-0", 4096, 16)
            box = refitd.Box(0, (0,), (4,), (1,), memory)
            with self.assertRaises(refitd.Error):
                engine.register_layout([refitd.TensorSpec("w", "float32", (4,))], [box])
        self.assertEqual(attached, [b"GPU-0"])
        self.assertEqual(engine.device, "GPU-0")

    def test_a_rank_that_left_attaches_again_at_once(self):
        self.trainer(rank=0, world_size=1)
        for _ in range(20):
            self.engine().close()


class Ranks(DaemonTest):
    """One rank of vLLM's or SGLang's, without the engine."""

    def decide(self, settings):
        refitd.adopt(self.served)
        made = delivery_of(self.served)
        made.places = Places(self.served)
        if self.tied:
            made.tensors.append(refitd.TensorSpec("head", "float32", (4, 8)))
            made.tied_names = {"head": "weight"}
        return made

    def take(self, version, **others):
        """Lets the rank take a version of ones times the version, but of the tensors in `others`; returns what it and the trainer raised."""
        for name, tensor in self.source.items():
            tensor.fill_(others.get(name, version))
        raised = []

        def noted(call):
            try:
                call()
                raised.append(None)
            except refitd.Error as error:
                raised.append(error)

        refits = threading.Thread(target=noted, args=(lambda: self.trains.refit(version, duration_seconds=SECONDS),))
        refits.start()
        noted(lambda: self.rank.take(version, SECONDS))
        refits.join(SECONDS)
        return raised

    def start(self, tied=False):
        """`tied`: the trainer has a tensor `head` as well, whose memory the rank's `weight` is, too."""
        self.tied = tied
        self.served = torch.nn.Linear(8, 4)
        self.source = {name: refitd.empty(t.shape, t.dtype) for name, t in self.served.state_dict().items()}
        if tied:
            self.source["head"] = refitd.empty((4, 8), torch.float32)
        self.trains = self.trainer(rank=0, world_size=1)
        self.trains.register(self.source)
        self.rank = Rank(torch.device("cpu"), client="test", clean=True, decide=self.decide, process=lambda delivery: None)
        self.addCleanup(self.rank.detach)
        settings = Settings.of({"group": self.group, "instance": "a", "socket": self.daemon.socket}, {})
        self.rank.attach(settings, "a", 0, 1, dirty=False)
        self.assertEqual(self.take(1), [None, None])
        self.served.weight = torch.nn.Parameter(torch.zeros(4, 8))

    def check_holds(self, version):
        self.assertEqual(self.rank.version, version)
        self.assertTrue(all((tensor == version).all() for tensor in self.served.state_dict().values()))

    def test_a_replaced_parameter_of_a_rank_is_committed_and_stale(self):
        self.start()
        self.assertEqual(self.take(2), [None, None])
        self.check_holds(2)

    def test_a_rank_whose_graphs_may_read_a_replaced_parameter_refuses_one_update_and_registers_it_for_the_next(self):
        self.start()
        with mock.patch.object(Places, "bring_back", Places.changed):
            for error in self.take(2):
                self.assertRegex(str(error), "'weight' of engine rank 0 of instance a lies elsewhere")
                self.assertFalse(error.dirty)
            self.assertEqual((self.rank.version, self.rank.clean, self.served.weight.sum().item()), (1, True, 0.0))
            self.assertEqual(self.take(3), [None, None])
            self.check_holds(3)

    def test_a_tied_tensor_of_other_values_is_refused_also_after_a_replaced_parameter_was_registered(self):
        self.start(tied=True)
        with mock.patch.object(Places, "bring_back", Places.changed):
            self.assertNotIn(None, self.take(2))
            self.assertEqual(self.take(3), [None, None])
            for error in self.take(4, head=5):
                self.assertRegex(str(error), "tensor head and tensor weight are one memory in engine a rank 0")


if __name__ == "__main__":
    unittest.main()
