"""The alarm that compares log-probabilities: what rounding does passes, other weights and wrong input do not."""

import math
import random
import unittest

import refitd
from refitd import kl

try:
    import numpy
except ImportError:
    numpy = None


def softmax(logits):
    top = max(logits)
    total = math.log(math.fsum(math.exp(x - top) for x in logits)) + top
    return [x - total for x in logits]


class MeasureTest(unittest.TestCase):
    def test_the_estimate_agrees_with_the_true_kl_of_two_distributions(self):
        source = random.Random(1)
        engine = softmax([source.gauss(0, 1) for _ in range(16)])
        trainer = softmax([x + source.gauss(0, 0.3) for x in engine])
        true = math.fsum(math.exp(e) * (e - t) for t, e in zip(trainer, engine))
        tokens = source.choices(range(16), [math.exp(e) for e in engine], k=200_000)
        measured = kl.measure([trainer[t] for t in tokens], [engine[t] for t in tokens])
        self.assertAlmostEqual(measured.kl, true, delta=0.03 * true)
        self.assertEqual(measured.tokens, 200_000)

    def test_tiny_differences_do_not_cancel(self):
        measured = kl.measure([-1.0 + 1e-9, -1.0 - 1e-9], [-1.0, -1.0])
        self.assertAlmostEqual(measured.kl / 0.5e-18, 1, places=6)

    def test_the_mask_counts_and_the_largest_difference_is_found(self):
        measured = kl.measure([[-1.0, -2.0], [-3.0, -9.0]], [[-1.0, -2.5], [-3.1, -1.0]], mask=[[1, 1], [1, 0]])
        self.assertEqual((measured.tokens, measured.largest_at), (3, 1))
        self.assertAlmostEqual(measured.largest, 0.5)

    @unittest.skipIf(numpy is None, "needs numpy")
    def test_arrays_are_taken(self):
        ours = numpy.array([[-1.0, -2.0]], dtype="float32")
        self.assertEqual(kl.measure(ours, ours).kl, 0)
        self.assertEqual(kl.measure(ours, ours, mask=numpy.array([[True, False]])).tokens, 1)

    def test_wrong_input_is_refused(self):
        for arguments, error, message in (
            (([-1.0], [-1.0, -2.0]), refitd.InvalidArgument, "differ in shape"),
            (([], []), refitd.InvalidArgument, "no token"),
            (([-1.0], [-1.0], [0]), refitd.InvalidArgument, "no token"),
            (([-1.0, math.nan], [-1.0, -1.0]), refitd.FailedPrecondition, "token 1 .* nan of the trainer"),
            (([-1.0, -1.0, math.nan], [-1.0] * 3, [0, 1, 1]), refitd.FailedPrecondition, "token 1 of those that count .* nan of the trainer"),
            (([-1.0], [-math.inf]), refitd.FailedPrecondition, "token 0 .* -inf of the engine"),
            (([0.5], [-1.0]), refitd.FailedPrecondition, "0.5 of the trainer"),
        ):
            with self.assertRaisesRegex(error, message):
                kl.measure(*arguments)


class CheckTest(unittest.TestCase):
    def noisy(self, unit):
        source = random.Random(2)
        engine = [source.uniform(-6, -0.01) for _ in range(4000)]
        return [min(x + source.gauss(0, unit), 0) for x in engine], engine

    def test_each_dtype_passes_its_rounding_and_not_ten_times_that(self):
        for dtype, unit in (("float32", 2.0**-24), ("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
            kl.check(*self.noisy(16 * unit), dtype=dtype)
        for dtype, error in (("float32", 0.01), ("float16", 0.1), ("bfloat16", 0.5)):
            with self.assertRaisesRegex(kl.Diverged, "vllm-0 at version 3 does not serve the trainer's weights") as raised:
                kl.check(*self.noisy(error), dtype=dtype, what="vllm-0 at version 3")
            self.assertGreater(raised.exception.measured.kl, raised.exception.limit)
            self.assertEqual(raised.exception.limit, kl.LIMITS[dtype])

    def test_a_control_makes_the_alarm_sharper(self):
        control = kl.measure(*self.noisy(0.005)).kl
        kl.check(*self.noisy(0.006), control=control)
        kl.check(*self.noisy(0.05), dtype="bfloat16")
        with self.assertRaises(kl.Diverged):
            kl.check(*self.noisy(0.05), dtype="bfloat16", control=control)
        with self.assertRaises(kl.Diverged):
            kl.check(*self.noisy(0.05), dtype="bfloat16", limit=1e-5)

    def test_a_control_without_any_difference_leaves_room_for_rounding(self):
        kl.check([-1.0 + 1e-7], [-1.0], control=0.0)
        with self.assertRaises(kl.Diverged):
            kl.check([-1.0 + 1e-5], [-1.0], control=0.0)

    def test_a_limit_must_follow_from_something(self):
        for options in ({}, {"dtype": "int8"}, {"dtype": "bf15"}, {"control": -1.0}, {"control": math.nan}):
            with self.assertRaises(refitd.InvalidArgument):
                kl.check([-1.0], [-1.0], **options)


if __name__ == "__main__":
    unittest.main()
