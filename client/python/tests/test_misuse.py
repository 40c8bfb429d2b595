"""Misuse: registered tensors that are changed, names and tensors that are none, and closing while calls run: each is an error
that names the tensor, before anything is written."""

import gc
import threading
import unittest

import refitd
from support import DaemonTest, Server, wait_until

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


def numbers(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def failing_update(trainer, call):
    """Makes the call, which opens version 1 and is to fail, on another thread: that thread, and a list that gets the error."""
    errors = []

    def run():
        try:
            call()
        except refitd.Error as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    wait_until(lambda: trainer.get_update(1) == "running", "the update")
    return thread, errors


@unittest.skipIf(torch is None, "needs torch")
class TensorsThatChangeTest(DaemonTest):
    def registered(self, tensor, **options):
        trainer, engine = self.trainer(), self.engine()
        trainer.register({"w": tensor}, **options)
        held = refitd.empty(tensor.shape, options.get("dtype", tensor.dtype), like="torch")
        engine.register({"w": held})
        Server(self, engine)
        trainer.refit(1)
        return trainer, held

    def refused(self, change, message, **options):
        """The refit after `change` to a parameter is refused, and the engine holds what it held."""
        parameter = torch.nn.Parameter(numbers(400, 400), requires_grad=False)
        trainer, held = self.registered(parameter, **options)
        before = held.clone()
        change(parameter)
        with self.assertRaisesRegex(refitd.FailedPrecondition, message) as caught:
            trainer.refit(2)
        self.assertIn("tensor 'w'", str(caught.exception))
        self.assertEqual(caught.exception.culprit, "tensor 'w'")
        self.assertTrue(torch.equal(held, before))
        self.assertEqual(trainer.get_update(2), "unknown")

    def set_data(self, make):
        def change(parameter):
            parameter.data = make(parameter.data)

        return change

    def test_another_dtype_or_shape_is_refused(self):
        for number, make in enumerate((lambda w: w.half(), lambda w: w[:2].clone())):
            with self.subTest(number=number):
                self.group = f"changed-{number}"
                self.refused(self.set_data(make), "was registered as .*register again")

    def test_memory_that_was_freed_is_refused(self):
        self.refused(lambda parameter: parameter.untyped_storage().resize_(0), "was freed")

    def test_casts_of_changed_and_freed_tensors_are_refused(self):
        self.refused(self.set_data(lambda w: w[0].clone()), r"is now float32 \(400,\)", dtype=torch.bfloat16)
        self.group += "-freed"
        self.refused(lambda parameter: parameter.untyped_storage().resize_(0), "was freed", dtype=torch.bfloat16)

    def test_a_tensor_that_only_moved_is_followed(self):
        parameter = torch.nn.Parameter(numbers(8, 8), requires_grad=False)
        trainer, held = self.registered(parameter)
        parameter.data = parameter.data.clone().add_(1)
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assertTrue(torch.equal(held, parameter))

    def test_an_engine_whose_parameter_moved_takes_no_update(self):
        trainer, engine = self.trainer(), self.engine()
        trainer.register({"w": numbers(4, 4)})
        layer = torch.nn.Linear(4, 4, bias=False)
        refitd.adopt(layer)
        engine.register({"w": layer.weight})
        server = Server(self, engine)
        layer.weight.data = torch.zeros(4, 4)  # the daemon would write to the memory that it had before
        with self.assertRaisesRegex(refitd.UpdateAborted, "tensor 'w' of engine rank 0.* lies elsewhere"):
            trainer.refit(1)
        wait_until(lambda: server.error is not None, "the engine's own error")
        self.assertIsInstance(server.error, refitd.FailedPrecondition)
        self.assertEqual(server.error.culprit, "tensor 'w'")

    def test_tensors_without_memory_are_refused(self):
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode():
            fake = torch.ones(16)
        freed = torch.ones(16)
        freed.untyped_storage().resize_(0)
        trainer, engine = self.trainer(), self.engine(loader=True)
        Server(self, engine)
        for tensor in (fake, freed):
            with self.assertRaises(refitd.FailedPrecondition):
                trainer.register({"w": tensor})
        with trainer.update(1, tensor_count=1) as update:
            for tensor in (fake, freed):
                with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'w' has no memory"):
                    update.push("w", tensor)
            update.push("w", torch.ones(16))


class NamesTest(DaemonTest):
    def test_names_that_c_reads_otherwise_are_refused(self):
        trainer, engine = self.trainer(), self.engine(loader=True)
        Server(self, engine)
        with trainer.update(1, tensor_count=1) as update:
            for name in ("w\0x", "", 5, "\ud800"):  # the first would be pushed as w
                with self.assertRaisesRegex(refitd.InvalidArgument, "the name is"):
                    update.push(name, b"12345678")
            update.push("w", b"12345678")
        self.assertEqual(update.result.bytes, 8)
        with self.assertRaisesRegex(refitd.InvalidArgument, "the name is not UTF-8"):
            trainer.register_layout([refitd.TensorSpec("\ud800", "uint8", (1,))], [])

    def test_a_single_text_is_no_list_of_names(self):
        with self.assertRaisesRegex(refitd.InvalidArgument, "engine_only_tensors: 'lm_head' is no list"):
            self.trainer(spec=refitd.GroupSpec(engine_only_tensors="lm_head"))

    def test_shapes_that_are_no_integers_are_refused(self):
        trainer, engine = self.trainer(), self.engine(loader=True)
        Server(self, engine)
        with trainer.update(1, tensor_count=1) as update:
            for options in (dict(shape=8), dict(shape=(8.0,)), dict(shape=(8,), start=0.5)):
                with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w'"):
                    update.push("w", b"12345678", **options)
            update.push("w", b"12345678")

    @unittest.skipIf(numpy is None, "needs numpy")
    def test_arrays_that_hide_elements_and_foreign_memory_are_refused(self):
        class OnAnotherDevice:
            def __dlpack_device__(self):
                return 8, 0

            def __dlpack__(self, **_):
                raise BufferError("only for its own device")

        trainer, engine = self.trainer(), self.engine(loader=True)
        Server(self, engine)
        with trainer.update(1, tensor_count=1) as update:
            with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w' is a masked array"):
                update.push("w", numpy.ma.array([1.0, 2.0], mask=[0, 1]))
            with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w': .* of a OnAnotherDevice"):
                update.push("w", OnAnotherDevice())
            update.push("w", b"12345678")
        with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w' is a Foreign"):
            trainer.register({"w": type("Foreign", (), {"shape": (2,), "dtype": numpy.dtype("float32")})()})


class ClosingTest(DaemonTest):
    def test_close_gives_up_the_refit_of_another_thread(self):
        trainer = self.trainer(spec=refitd.GroupSpec(min_instances=2))  # which never come
        trainer.register_layout([refitd.TensorSpec("w", "uint8", (1,))], [])
        thread, errors = failing_update(trainer, lambda: trainer.refit(1, duration_seconds=600))
        trainer.close()
        thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertIsInstance(errors[0], refitd.UpdateAborted)

    def test_pushes_after_an_interrupted_call_do_not_wait_for_its_slots(self):
        trainer, engine = self.trainer(), self.engine(loader=True)
        Server(self, engine)
        with self.assertRaisesRegex(refitd.UpdateAborted, "interrupted"), trainer.update(1, tensor_count=1) as update:
            for _ in range(update.leasable_slots):
                update._window.enter()  # stands for a slot that a call held when a signal ended the call
            update._cancel()
            update.push("w", b"1")

    def test_an_update_that_is_dropped_is_aborted(self):
        trainer, engine = self.trainer(), self.engine(loader=True)
        server = Server(self, engine)
        update = trainer.update(1, tensor_count=1)
        update.push("w", b"1")
        del update
        gc.collect()
        server.wait_for(refitd.Aborted)
        with trainer.update(2, tensor_count=1) as update:
            update.push("w", b"1")


TOO_MANY = 262_145  # one more than a model may have


class TooManyTensorsTest(DaemonTest):
    """More tensors than a daemon takes, all of them one byte of the same memory: the error comes at once, and has the limit's name."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        memory = refitd.RegionMemory(refitd.Region(4096), 0, 1)
        cls.specs = [refitd.TensorSpec(f"t{i}", "uint8", (1,)) for i in range(TOO_MANY)]
        cls.boxes = [refitd.Box(i, (0,), (1,), (1,), memory) for i in range(TOO_MANY)]

    def assert_refused(self, call, suspect=None):
        with self.assertRaisesRegex(refitd.ResourceExhausted, r"262145.*262144 \(kMaxTensorsPerLayout\)") as caught:
            call()
        self.assertEqual([str(found) for found in caught.exception.suspects], [] if suspect is None else [suspect])

    def test_a_trainer_with_too_many_tensors_is_refused_when_it_registers(self):
        trainer = self.trainer()
        self.assert_refused(lambda: trainer.register_layout(self.specs, self.boxes))

    def test_a_refit_does_not_wait_for_an_engine_whose_layout_has_too_many_tensors(self):
        trainer, engine = self.trainer(), self.engine("many")
        trainer.register_layout(self.specs[:1], self.boxes[:1])
        self.assert_refused(lambda: engine.register_layout(self.specs, self.boxes))
        self.assert_refused(lambda: trainer.refit(1, duration_seconds=600), "engine many rank 0")

    def test_an_update_does_not_wait_for_an_engine_whose_manifest_has_too_many_tensors(self):
        trainer = self.trainer()
        thread, errors = failing_update(trainer, lambda: trainer.update(1, duration_seconds=600))  # waits for an engine
        self.assert_refused(lambda: self.engine("many", loader=True, manifest=self.specs))
        thread.join(60)
        self.assertFalse(thread.is_alive())
        self.assertIsInstance(errors[0], refitd.ResourceExhausted)
        self.assertEqual([str(found) for found in errors[0].suspects], ["engine many rank 0"])

    def test_an_update_of_too_many_tensors_does_not_begin(self):
        trainer = self.trainer()
        self.assert_refused(lambda: trainer.update(1, tensor_count=TOO_MANY, duration_seconds=600))


if __name__ == "__main__":
    unittest.main()
