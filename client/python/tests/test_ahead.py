"""Post-processing of a staged version while the engine serves (refitd.serving.ahead)."""

import threading
import time
import types
import unittest
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from refitd.layout.placement import KeptArenas, empty_in_arena  # noqa: E402
from refitd.layout.shards import collect  # noqa: E402
from refitd.serving import Settings  # noqa: E402
from refitd.serving.ahead import Portion, as_before, portions, prepack, try_beside, try_out  # noqa: E402
from refitd.serving.delivery import Delivery  # noqa: E402
from refitd.serving.driver import Driver  # noqa: E402
from refitd.serving.rank import Rank  # noqa: E402
from support import SECONDS, DaemonTest  # noqa: E402
from torch import nn  # noqa: E402


class Doubling(nn.Module):
    """A module whose kernel reads twice what a loader writes."""

    def __init__(self, size=4):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size), requires_grad=False)
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("scratch", torch.ones(1), persistent=False)

    def forward(self):
        return self.weight * self.scale * self.scratch


def process(module, weight):
    module.weight = nn.Parameter(2 * weight, requires_grad=False)


class Tried:
    """A model of one module, as try_out sees it. `aside`: what processes a portion."""

    def __init__(self, aside, run=None):
        self.module = Doubling()
        self.loaded = torch.zeros(4)
        self.portion = portions({"m": self.module}, {"w": self.loaded}, {"w": {id(self.module)}})[0]
        self.why = try_out([self.portion], self.deliver, self.values, lambda portion, tensors: aside(self, portion, tensors), run or self.module)

    @staticmethod
    def values(name, seed=1):
        return torch.arange(4.0) + seed

    def deliver(self, seed):
        if self.portion.done:
            self.portion.put_in_place()
            self.portion.forget()
        else:
            self.module.weight.copy_(2 * self.values("w", seed))


def right(tried, portion, tensors):
    portion.made["m"][0]["weight"].copy_(2 * tensors["w"])


def changes_what_it_holds(tried, portion, tensors):
    right(tried, portion, tensors)
    tried.module.scale.fill_(3)


def changes_what_serves(tried, portion, tensors):
    right(tried, portion, tensors)
    tried.module.scratch.fill_(3)


def makes_something_else(tried, portion, tensors):
    portion.made["m"][0]["weight"].copy_(tensors["w"])


def reads_what_is_gone(tried, portion, tensors):
    portion.made["m"][0]["weight"] = nn.Parameter(tensors["w"], requires_grad=False)


def fails(tried, portion, tensors):
    raise ValueError("no kernel")


class PortionsTest(unittest.TestCase):
    def test_modules_that_share_a_tensor_are_one_portion(self):
        modules = {name: Doubling() for name in "abcd"}
        tensors = {name: torch.zeros(1) for name in "vwxyz"}
        of = {name: id(module) for name, module in modules.items()}
        sources = {"v": {of["c"]}, "w": {of["b"], of["d"]}, "x": {of["d"], of["c"]}, "y": {of["a"]}, "z": {of["a"]}, "direct": {of["a"], of["b"]}}
        found = portions(modules, tensors, sources)
        self.assertEqual([(sorted(portion.modules), sorted(portion.tensors)) for portion in found], [(["a"], ["y", "z"]), (["b", "c", "d"], ["v", "w", "x"])])

    def test_what_is_made_is_put_where_the_kernel_reads(self):
        module = Doubling()
        (portion,) = portions({"m": module}, {}, {})
        self.assertEqual(portion.nbytes, 4 * 4 + 4)
        portion.allocate()
        parameters, buffers = portion.made["m"]
        self.assertEqual(set(buffers), {"scale"})  # no loader fills the other
        parameters["weight"].fill_(7)
        address = module.weight.data_ptr()
        portion.put_in_place()
        self.assertEqual((module.weight.data_ptr(), module.weight[0].item(), module.scale.item()), (address, 7, 1))

    def test_a_module_keeps_its_tensors_and_attributes(self):
        module = Doubling()
        module.quant_method = types.SimpleNamespace(kernel="old")
        module.packed = before = object()
        weight, order = module.weight, list(module.state_dict())
        with self.assertRaises(ValueError), as_before([module]):
            del module.weight
            module.weight = nn.Parameter(torch.ones(3))
            module.extra = nn.Parameter(torch.ones(3))
            module.packed = object()
            module.added = 1
            module.quant_method.kernel = "new"
            raise ValueError
        self.assertIs(module.weight, weight)
        self.assertIs(module.packed, before)
        self.assertEqual(list(module.state_dict()), order)
        self.assertEqual((hasattr(module, "added"), hasattr(module, "extra"), module.quant_method.kernel), (False, False, "old"))

    def test_a_packed_copy_waits_beside_the_module(self):
        module = Doubling()

        def pack(layer):
            layer.copy = layer.weight * 5
            layer.weight = nn.Parameter(torch.empty(0))

        module.quant_method = types.SimpleNamespace(process_weights_after_loading=pack)
        weight = module.weight
        portion = Portion({"m": module}, {"weight": weight}, packs=True)
        prepack(portion, {"weight": torch.ones(4)})
        self.assertIs(module.weight, weight)
        self.assertFalse(hasattr(module, "copy"))
        replaced, left = portion.packed
        self.assertEqual((replaced["copy"].tolist(), left["weight"].numel()), ([5.0] * 4, 0))

    def test_a_trial_finds_what_is_not_right_ahead(self):
        self.assertEqual(Tried(right).why, {})
        self.assertIn("changes what it holds", Tried(changes_what_it_holds).why["m"])
        self.assertIn("changes what the engine computes", Tried(changes_what_serves).why[""])
        self.assertIn("becomes something else", Tried(makes_something_else).why["m"])
        self.assertIn("becomes something else", Tried(reads_what_is_gone).why["m"])
        self.assertEqual(Tried(fails).why, {"m": "can't be tried: ValueError: no kernel"})

    def test_a_trial_that_keeps_the_weights_finds_what_is_not_right_ahead(self):
        def tried(aside, packs=False):
            module = Doubling()
            loaded = torch.arange(4.0)
            module.weight.copy_(2 * loaded)
            module.quant_method = types.SimpleNamespace()
            portion = Portion({"m": module}, {"w": loaded}, packs=packs)
            why = try_beside([portion], lambda name: torch.full((4,), 9.0), lambda portion, tensors: aside(module, portion, tensors), module)
            self.assertEqual((module.weight.tolist(), loaded.tolist()), ([0.0, 2.0, 4.0, 6.0], [0.0, 1.0, 2.0, 3.0]))
            self.assertEqual((portion.done, portion.packed), (False, None))
            return why

        def make(portion, value):
            portion.made["m"][0]["weight"].copy_(value)

        def change(module, portion, tensors):
            make(portion, 2 * tensors["w"])
            module.scratch.add_(1)

        self.assertEqual(tried(lambda module, portion, tensors: make(portion, 2 * tensors["w"])), {})
        self.assertIn("something else", tried(lambda module, portion, tensors: make(portion, 3 * tensors["w"]))["m"])
        self.assertIn("is the same", tried(lambda module, portion, tensors: make(portion, module.weight))["m"])
        self.assertIn("computes meanwhile", tried(change)[""])
        self.assertIn("can't be compared", tried(None, packs=True)["m"])
        self.assertIn("can't be tried: TypeError", tried(lambda module, portion, tensors: None + 1)["m"])

    def test_a_trial_of_which_nothing_is_seen_shows_nothing(self):
        for made in (torch.ones(3), torch.full((3,), torch.nan)):
            self.assertIn("shows nothing", Tried(right, lambda made=made: made).why[""])
        self.assertEqual(Tried(right, lambda: None).why, {})  # a rank that gets no result


class DriverTest(unittest.TestCase):
    """How a driver lets ranks process ahead, with `left` portions; None: there always is one."""

    def calls(self, remaining_seconds, left, busy=False):
        answers = iter(range(left - 1, -1, -1)) if left is not None else iter(lambda: 1, 0)
        controls = mock.Mock(busy=lambda: busy, process_ahead=mock.Mock(side_effect=answers))
        driver = Driver(controls, Settings.of({"group": "g", "instance": "a"}, {}), world_size=1, clean=True, device="cpu")
        member = mock.Mock()
        staged = refitd.Staged(7, 70, remaining_seconds, member)
        driver._process_ahead(staged)
        member.processed.assert_called_once_with(staged)
        return controls.process_ahead.call_args_list

    def test_all_portions_are_processed(self):
        self.assertEqual(self.calls(SECONDS, 3), [mock.call(70)] * 3)
        self.assertEqual(self.calls(SECONDS, 3, busy=True), [mock.call(70)] * 3)

    def test_the_time_ends_it(self):
        self.assertEqual(self.calls(0, 3), [])
        self.assertGreater(len(self.calls(0.1, None)), 0)

    def test_an_engine_that_fails_ends_it(self):
        controls = mock.Mock(process_ahead=mock.Mock(side_effect=RuntimeError))
        driver = Driver(controls, Settings.of({"group": "g", "instance": "a"}, {}), world_size=1, clean=True, device="cpu")
        member = mock.Mock()
        staged = refitd.Staged(7, 70, SECONDS, member)
        with self.assertLogs("vllm.refitd"):
            driver._process_ahead(staged)
        controls.process_ahead.assert_called_once()
        member.processed.assert_called_once_with(staged)  # the others do not wait for it


class RankTest(DaemonTest):
    """A rank whose module is processed ahead, beside an instance with an arena that may refuse."""

    def setUp(self):
        super().setUp()
        self.module = Doubling()
        (self.loaded,) = empty_in_arena([((4,), "float32")], torch.device("cpu"), KeptArenas())
        layout = collect({"w": self.loaded})
        self.portions = portions({"m": self.module}, {"w": self.loaded}, {"w": {id(self.module)}})
        self.portions[0].allocate()
        self.delivery = Delivery(
            [], {"m.weight": "is doubled"}, [], [], [], {"w": self.loaded}, layout.tensors, layout.boxes, [], {"m": self.module}, [], [], [], ahead=self.portions
        )
        self.in_pause = 0
        self.rank = Rank(
            torch.device("cpu"), client="test", clean=True, decide=lambda settings: self.delivery, process=self.process,
            aside=lambda portion, tensors: portion.made["m"][0]["weight"].copy_(2 * tensors["w"]),
        )  # fmt: skip
        self.addCleanup(self.rank.detach)
        self.source = refitd.empty((4,), torch.float32)
        self.trains = self.trainer(rank=0, world_size=1)
        self.trains.register({"w": self.source})
        settings = Settings.of({"group": self.group, "instance": "a", "socket": self.daemon.socket}, {})
        self.rank.attach(settings, "a", 0, 1, dirty=False, driven=True)

    def process(self, delivery):
        if delivery.ahead and delivery.ahead[0].done:
            delivery.ahead[0].put_in_place()
        else:
            self.in_pause += 1
            self.module.weight.copy_(2 * self.loaded)

    def begin(self, version):
        """Begins the update to weights of that value; returns the thread of the refit."""
        self.source.fill_(version)

        def refit():
            try:
                self.trains.refit(version)
            except refitd.UpdateAborted:
                pass

        thread = threading.Thread(target=refit)
        thread.start()
        self.addCleanup(thread.join, SECONDS)
        return thread

    def staged(self):
        """The update that has staged its version, as a driver would tell the rank."""
        member = self.rank._member
        event = member.next(SECONDS)
        member._put_back(event)
        self.assertIsInstance(event, refitd.Staged)
        return event.update_id

    def process_ahead(self):
        update_id = self.staged()
        deadline = time.monotonic() + SECONDS
        while self.rank.ahead(update_id):
            self.assertLess(time.monotonic(), deadline)

    def test_a_version_is_processed_before_the_pause(self):
        for version in (1, 2, 3):
            held = self.module.weight.tolist()
            refit = self.begin(version)
            self.process_ahead()
            self.assertTrue(self.portions[0].done)
            self.assertEqual(self.module.weight.tolist(), held)
            self.rank.take(version, SECONDS)
            refit.join(SECONDS)
            self.assertEqual(self.module.weight.tolist(), [2.0 * version] * 4)
            self.assertEqual((self.rank.processed_ahead, self.rank.staged, self.in_pause), (1, True, 0))

    def other_with_an_arena(self, **options):
        other = self.engine(instance="b", **options)
        (held,) = empty_in_arena([((4,), "float32")], torch.device("cpu"), KeptArenas())
        other.register({"w": held})
        return other

    def test_other_engines_are_asked_to_pause_when_the_version_is_processed(self):
        other = self.other_with_an_arena()
        refit = self.begin(1)
        deadline = time.monotonic() + SECONDS
        while self.state() != "staged":  # the rank has its event, and does not look
            self.assertLess(time.monotonic(), deadline)
        self.assertIsNone(other.poll())
        self.process_ahead()
        event = other.next(SECONDS)
        self.assertIsInstance(event, refitd.Prepare)
        event.ready()
        self.rank.take(1, SECONDS)
        self.assertIsInstance(other.next(SECONDS), refitd.Committed)
        refit.join(SECONDS)
        self.assertEqual(self.rank.processed_ahead, 1)

    def state(self):
        (group,) = (group for group in self.status()["groups"] if group["name"] == self.group)
        return group.get("update", {}).get("state")

    def test_what_was_processed_of_a_version_that_was_withdrawn_gets_nowhere(self):
        other = self.other_with_an_arena(wants_staged=True)  # holds the update where it is
        refit = self.begin(1)
        self.process_ahead()
        self.assertTrue(self.portions[0].done)
        staged = other.next(SECONDS)
        self.assertIsInstance(staged, refitd.Staged)
        self.daemon.control("abort", self.group)
        refit.join(SECONDS)
        withdrawn = other.next(SECONDS)
        self.assertEqual((type(withdrawn), withdrawn.version, withdrawn.dirty, other.weights), (refitd.Aborted, 1, False, refitd.Weights.CLEAN))
        with self.assertRaises(refitd.FailedPrecondition):
            staged.processed()
        other.close()
        self.source.fill_(7)
        refit = threading.Thread(target=self.trains.refit, args=(1,))  # the same number, and other weights
        refit.start()
        self.rank.take(1, SECONDS)
        refit.join(SECONDS)
        self.assertEqual((self.module.weight.tolist(), self.rank.processed_ahead, self.in_pause), ([14.0] * 4, 0, 1))

    def test_an_answer_to_an_earlier_try_of_a_version_was_taken_for_one_to_the_next(self):
        other = self.other_with_an_arena(wants_staged=True)
        refit = self.begin(1)
        earlier, driven = other.next(SECONDS), self.staged()
        self.daemon.control("abort", self.group)
        refit.join(SECONDS)
        self.assertIsInstance(other.next(SECONDS), refitd.Aborted)
        refit = self.begin(1)
        later = other.next(SECONDS)
        self.assertEqual((earlier.version, later.version), (1, 1))
        with self.assertRaises(refitd.FailedPrecondition):
            earlier.processed()
        # A driver that does not know of the next try yet asks about the one before: nothing is processed for that.
        member = self.rank._member
        for event in [member.next(SECONDS) for _ in range(3)]:  # Staged, Aborted, Staged
            member._put_back(event)
        self.assertGreater(self.rank.ahead(driven), 0)
        self.assertFalse(self.portions[0].done)
        self.assertEqual(self.rank.ahead(later.update_id), 0)
        later.processed()
        event = other.next(SECONDS)
        self.assertIsInstance(event, refitd.Prepare)
        self.assertEqual(event.update_id, later.update_id)
        event.ready()
        self.rank.take(1, SECONDS)
        refit.join(SECONDS)
        self.assertEqual(self.rank.processed_ahead, 1)

    def test_who_did_not_ask_gets_no_staged(self):
        self.rank.attach(self.rank._settings, "a", 0, 1, dirty=False)  # a trainer calls this engine: nobody calls ahead()
        refit = self.begin(1)
        self.rank.take(1, SECONDS)
        refit.join(SECONDS)
        self.assertEqual((self.rank._staged, self.rank.processed_ahead, self.in_pause), (None, 0, 1))

    def test_a_portion_that_fails_is_processed_in_the_pause_from_then_on(self):
        def fail(portion, tensors):
            raise RuntimeError("no memory")

        self.rank._aside = fail
        for version in (1, 2):
            refit = self.begin(version)
            self.process_ahead()
            self.rank.take(version, SECONDS)
            refit.join(SECONDS)
            self.assertEqual((self.module.weight.tolist(), self.rank.processed_ahead), ([2.0 * version] * 4, 0))
        self.assertEqual(self.delivery.in_pause, {"m": "failed while the engine served: RuntimeError: no memory"})

    def test_what_was_processed_of_an_update_that_was_given_up_gets_nowhere(self):
        other = self.other_with_an_arena()
        refit = self.begin(1)
        self.process_ahead()
        self.assertTrue(self.portions[0].done)
        other.next(SECONDS).fail("no")
        with self.assertRaises(refitd.UpdateAborted) as raised:
            self.rank.take(1, SECONDS)
        self.assertFalse(raised.exception.dirty)
        refit.join(SECONDS)
        self.assertFalse(self.portions[0].done)
        self.assertEqual(self.module.weight.tolist(), [0.0] * 4)
        self.assertIsInstance(other.next(SECONDS), refitd.Aborted)
        other.close()
        refit = self.begin(2)  # nothing is processed ahead
        self.rank.take(2, SECONDS)
        refit.join(SECONDS)
        self.assertEqual((self.module.weight.tolist(), self.rank.processed_ahead, self.in_pause), ([4.0] * 4, 0, 1))


if __name__ == "__main__":
    unittest.main()
