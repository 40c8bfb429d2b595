"""Weights that an engine quantises by itself (refitd.serving.derived), without an engine: where values and scales lie, and what the ranks agree on."""

import types
import unittest
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from refitd.layout import TensorSpec  # noqa: E402
from refitd.errors import FailedPrecondition, InvalidArgument  # noqa: E402
from refitd.layout.capture import Copy, Processed, capture  # noqa: E402
from refitd.serving import Settings, delivery, derived  # noqa: E402
from refitd.serving.derived import NotDerived, Quantised, Requantised  # noqa: E402
from refitd.serving.evidence import Entry  # noqa: E402
from torch import nn  # noqa: E402

BLOCK = Quantised("fp8_block", "weight", "weight_scale_inv")
CHANNEL = Quantised("fp8_channel", "weight", "weight_scale", transposed=True)
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def layer(quantised, *shape):
    module = nn.Module()
    *experts, rows, columns = shape
    values = torch.zeros(*experts, columns, rows).mT if not quantised.transposed else torch.zeros(rows, columns).T
    scales = (*experts, rows, 1) if quantised.kind == "fp8_channel" else (*experts, -(-rows // 128), -(-columns // 128))
    for name, tensor in ((quantised.values, values.to(torch.float8_e4m3fn)), (quantised.scales, torch.zeros(scales))):
        module.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    return module


def loaded(shape, *copies):
    """A weight that is filled with boxes of tensors, each (tensor, offset there, extent, place in the weight)."""
    strides = torch.empty(shape, device="meta").stride()
    return Processed(
        "m.weight", "bfloat16", shape, strides,
        [
            Copy(tensor, offset, extent, strides[-2:], "m.weight", sum(i * stride for i, stride in zip(at, strides)))
            for tensor, offset, extent, at in copies
        ],
    )  # fmt: skip


def specs(*shapes):
    return [TensorSpec(f"w{i}", "bfloat16", shape) for i, shape in enumerate(shapes)]


class KindTest(unittest.TestCase):
    """What Settings.derived says."""

    def test_an_engine_that_quantises_is_derived_only_where_it_is_told_so(self):
        for given, why in (({}, "is not 'on'"), ({"derived": "off"}, "is 'off'"), ({"derived": "fp8_block_pow2"}, "is 'fp8_block_pow2'")):
            with self.assertRaisesRegex(NotDerived, f"setting derived {why}"):
                CHANNEL.kinds(Settings.of(given, {}).derived, CPU)
        self.assertEqual(CHANNEL.kinds(Settings.of({}, {"REFITD_DERIVED": "on"}).derived, CPU), ("fp8_channel",))

    def test_a_quantised_checkpoint_is_derived_as_the_setting_says(self):
        checkpoint = Quantised(None, "weight", "weight_scale_inv")
        for given, kind in ((None, "fp8_block"), ("on", "fp8_block"), ("fp8_block_cuda", "fp8_block_cuda"), ("fp8_block_pow2", "fp8_block_pow2")):
            for device in (CPU, CUDA):
                self.assertEqual(checkpoint.kinds(Settings.of({"derived": given}, {}).derived, device), (kind,))
        with self.assertRaisesRegex(NotDerived, "is 'off'"):
            checkpoint.kinds("off", CPU)

    def test_a_function_of_torch_has_several_kinds_on_cuda(self):
        self.assertEqual(BLOCK.kinds("on", CPU), ("fp8_block",))
        self.assertEqual(BLOCK.kinds("on", CUDA), ("fp8_block_inductor", "fp8_block_cuda", "fp8_block"))
        self.assertEqual(CHANNEL.kinds("on", CUDA), ("fp8_channel",))

    def test_another_value_is_refused(self):
        with self.assertRaisesRegex(InvalidArgument, "derived: 'fp8' is none of on, off, fp8_block, .*") as caught:
            Settings.of({"derived": "fp8"}, {})
        self.assertEqual(caught.exception.culprit, "derived")


class PlaceTest(unittest.TestCase):
    def boxes(self, parts, role):
        return [(part.spec.derived.source.name, part.offset, part.extent, part.first) for part in parts if part.spec.derived.role == role]

    def test_fused_parts_and_shards_lie_in_whole_blocks(self):
        tensors = specs((512, 384), (128, 384), (130, 384))
        # The second of two ranks' columns [128, 384) of three fused tensors, the last of which ends within a block.
        weight = loaded((386, 256), (0, (256, 128), (128, 256), (0, 0)), (1, (0, 128), (128, 256), (128, 0)), (2, (0, 128), (130, 256), (256, 0)))
        parts = derived.parts_of(BLOCK, "fp8_block", layer(BLOCK, 386, 256), weight, tensors)
        self.assertEqual(
            self.boxes(parts, "values"),
            [("w0", (256, 128), (128, 256), 0), ("w1", (0, 128), (128, 256), 128), ("w2", (0, 128), (130, 256), 256)],
        )
        self.assertEqual(self.boxes(parts, "scales"), [("w0", (2, 1), (1, 2), 0), ("w1", (0, 1), (1, 2), 2), ("w2", (0, 1), (2, 2), 4)])
        self.assertEqual({part.strides for part in parts if part.parameter == "weight"}, {(1, 386)})

    def test_a_cut_block_is_named(self):
        tensors = specs((64, 256), (128, 256))
        weight = loaded((192, 256), (0, (0, 0), (64, 256), (0, 0)), (1, (0, 0), (128, 256), (64, 0)))
        with self.assertRaisesRegex(NotDerived, r"elements \[0, 64\) of 'w0' in dimension 0 lie at 0 of 'm.weight', which cuts blocks of 128"):
            derived.parts_of(BLOCK, "fp8_block", layer(BLOCK, 192, 256), weight, tensors)

    def test_rows_have_their_scale_whichever_columns_are_here(self):
        weight = loaded((96, 100), (0, (3, 100), (64, 100), (0, 0)), (1, (0, 100), (32, 100), (64, 0)))
        parts = derived.parts_of(CHANNEL, "fp8_channel", layer(CHANNEL, 96, 100), weight, specs((70, 200), (32, 200)))
        self.assertEqual(self.boxes(parts, "scales"), [("w0", (3, 0), (64, 1), 0), ("w1", (0, 0), (32, 1), 64)])
        self.assertEqual({part.strides for part in parts if part.parameter == "weight"}, {(100, 1)})

    def test_parameters_that_are_no_values_and_scales_are_named(self):
        weight, tensors = loaded((128, 128), (0, (0, 0), (128, 128), (0, 0))), specs((128, 128))
        without = layer(BLOCK, 128, 128)
        without.weight_scale_inv = None
        for module, why in ((layer(BLOCK, 256, 128), "'weight' is torch.float8_e4m3fn"), (without, "no parameter 'weight_scale_inv'")):
            with self.assertRaisesRegex(NotDerived, why):
                derived.parts_of(BLOCK, "fp8_block", module, weight, tensors)


class ExpertsTest(unittest.TestCase):
    """Parameters with the matrices of all experts of a rank."""

    boxes = PlaceTest.boxes

    def test_each_expert_has_its_values_and_scales(self):
        gate_and_up, down = derived.of_experts("fp8_block", "weight_scale_inv")
        tensors = specs((512, 256), (512, 256), (512, 256), (512, 256), (256, 512), (256, 512))
        # The second of two ranks' half of gate and up of two experts, and of their down.
        copies = [(2 * expert + part, (256, 0), (256, 256), (expert, 256 * part, 0)) for expert in (0, 1) for part in (0, 1)]
        parts = derived.parts_of(gate_and_up, "fp8_block", layer(gate_and_up, 2, 512, 256), loaded((2, 512, 256), *copies), tensors)
        self.assertEqual({part.parameter for part in parts}, {"w13_weight", "w13_weight_scale_inv"})
        self.assertEqual(
            self.boxes(parts, "values"),
            [("w0", (256, 0), (256, 256), 0), ("w1", (256, 0), (256, 256), 256), ("w2", (256, 0), (256, 256), 131072), ("w3", (256, 0), (256, 256), 131328)],
        )
        self.assertEqual(
            self.boxes(parts, "scales"), [("w0", (2, 0), (2, 2), 0), ("w1", (2, 0), (2, 2), 4), ("w2", (2, 0), (2, 2), 8), ("w3", (2, 0), (2, 2), 12)]
        )
        self.assertEqual({part.strides for part in parts}, {(1, 512), (2, 1)})
        copies = [(4 + expert, (0, 256), (256, 256), (expert, 0, 0)) for expert in (0, 1)]
        parts = derived.parts_of(down, "fp8_block", layer(down, 2, 256, 256), loaded((2, 256, 256), *copies), tensors)
        self.assertEqual(self.boxes(parts, "scales"), [("w4", (0, 2), (2, 2), 0), ("w5", (0, 2), (2, 2), 4)])

    def test_a_rank_has_some_experts_whose_columns_another_rank_may_share(self):
        down = derived.of_experts("fp8_channel", "weight_scale")[1]
        weight = loaded((2, 96, 50), (0, (0, 50), (96, 50), (0, 0, 0)), (3, (0, 50), (96, 50), (1, 0, 0)))
        parts = derived.parts_of(down, "fp8_channel", layer(down, 2, 96, 50), weight, specs(*[(96, 100)] * 4))
        self.assertEqual(self.boxes(parts, "values"), [("w0", (0, 50), (96, 50), 0), ("w3", (0, 50), (96, 50), 4800)])
        self.assertEqual(self.boxes(parts, "scales"), [("w0", (0, 0), (96, 1), 0), ("w3", (0, 0), (96, 1), 96)])

    def test_what_is_no_matrix_of_one_expert_is_named(self):
        block = derived.of_experts("fp8_block", "weight_scale_inv")[0]
        whole, fused = [(0, (0, 0), (256, 128), (0, 0, 0))], specs((2, 256, 128))
        for tensors, shape, copies, why in (
            (specs((512, 128)), (2, 256, 128), [(0, (0, 0), (512, 128), (0, 0, 0))], "'w0' does not lie in 'w13_weight' as a matrix"),
            (fused, (2, 256, 128), [(0, (0, 0, 0), (2, 256, 128), (0, 0, 0))], "'w0' does not lie in 'w13_weight' as a matrix"),
            (specs((64, 128), (64, 128)), (1, 128, 128), [(0, (0, 0), (64, 128), (0, 0, 0))], r"\[0, 64\) of 'w0' .* cuts blocks of 128"),
            (specs((256, 128)), (1, 1, 256, 128), whole, "no row-major matrix while it is loaded, nor one for each expert"),
        ):
            with self.assertRaisesRegex(NotDerived, why):
                derived.parts_of(block, "fp8_block", layer(block, *shape), loaded(shape, *copies), tensors)

    def test_scales_of_another_shape_are_named(self):
        block = derived.of_experts("fp8_block", "weight_scale_inv")[0]
        module = layer(block, 1, 256, 128)
        module.w13_weight_scale_inv = nn.Parameter(torch.zeros(1, 4, 2), requires_grad=False)  # of blocks of 64
        with self.assertRaisesRegex(NotDerived, r"'w13_weight_scale_inv' is torch.float32 \(1, 4, 2\) after loading, not float32 \(1, 2, 1\)"):
            derived.parts_of(block, "fp8_block", module, loaded((1, 256, 128), (0, (0, 0), (256, 128), (0, 0, 0))), specs((256, 128)))


class Experts(nn.Module):
    """Two of four experts, whose loader looks their places up in a table."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.tensor([-1, 0, -1, 1]))
        self.register_buffer("running", torch.zeros(4))
        self.w = nn.Parameter(torch.zeros(2, 4), requires_grad=False)
        self.into = self.w.data

    def load_weights(self, tensors):
        for name, tensor in tensors:
            place = int(self.table[int(name)])
            if place >= 0:
                self.into[place].copy_(tensor)


class TableTest(unittest.TestCase):
    """Which parameters and buffers a loader fills in part."""

    def padded(self, model, count=4):
        held = [Entry(name, model, tensor, name == "w") for name, tensor in (*model.named_parameters(), *model.named_buffers())]
        found = capture(model.load_weights, [TensorSpec(str(i), "float32", (4,)) for i in range(count)])
        inside = types.SimpleNamespace(is_vocabulary=lambda module: False)
        return delivery._padded(types.SimpleNamespace(held=held, inside=inside), found)

    def test_a_table_that_is_only_read_is_no_parameter_that_is_filled_in_part(self):
        self.assertEqual(self.padded(Experts()), [])

    def test_a_parameter_that_lacks_an_expert_is_named(self):
        with self.assertRaisesRegex(FailedPrecondition, "'w' is filled but for 4 elements"):
            self.padded(Experts(), count=3)

    def test_a_buffer_that_is_filled_in_part_is_named(self):
        model = Experts()
        model.running = torch.zeros(3, 4)
        model.into = model.running
        model.w.data.zero_()
        with self.assertRaisesRegex(FailedPrecondition, "'running' is filled but for 4 elements"):
            self.padded(model)


class CompareTest(unittest.TestCase):
    """An engine that quantises by channels, with refitd's own arithmetic and a defect in some layers."""

    def setUp(self):
        self.model = nn.Module()
        self.found = []
        self.wrong = {}
        for name in ("a", "b"):
            module = layer(CHANNEL, 256, 130)
            self.model.add_module(name, module)
            source = TensorSpec(f"{name}.w", "bfloat16", (256, 130))
            parts = derived.parts_of(CHANNEL, "fp8_channel", module, loaded((256, 130), (0, (0, 0), (256, 130), (0, 0))), [source])
            self.found.append(Requantised(name, module, parts, [source], ("fp8_channel",)))
        self.quantised = []

    def quantise(self, portion, tensors):
        ((name, made),) = portion.made.items()
        self.quantised.append(name)
        for role, parameter in (("values", "weight"), ("scales", "weight_scale")):
            expected = derived.derive(derived.derived_spec(self.found["ab".index(name)].tensors[0], "fp8_channel", role), tensors[f"{name}.w"])
            made[0][parameter].copy_(expected.T if role == "values" else expected)
        self.wrong.get(name, lambda parameters: None)(made[0])

    def compare(self, elsewhere=()):
        return derived.compare(self.model, self.found, set(), self.quantise, lambda names: names | set(elsewhere), torch.device("cpu"))

    def test_equal_layers_are_compared_once(self):
        self.assertTrue(self.compare())
        self.assertTrue(self.compare())
        self.assertEqual(self.quantised, ["a", "b"])

    def test_the_first_other_bit_is_named(self):
        def minus_zero(parameters):
            parameters["weight"].view(torch.uint8)[7, 5] = 0x80  # row 5 is all zeros: -0 in place of 0

        self.wrong["b"] = minus_zero
        self.assertFalse(self.compare())
        compared = getattr(self.model, derived.COMPARED)
        self.assertEqual(compared["a"], {"fp8_channel": ""})
        self.assertRegex(compared["b"]["fp8_channel"], r"element \[5, 7\] of the values of 'b.w' is -0.0 in 'weight', and 0.0 by refits")

    def test_a_difference_on_another_rank_counts_here(self):
        self.assertFalse(self.compare(elsewhere=("a",)))
        self.assertEqual(getattr(self.model, derived.COMPARED), {"a": {"fp8_channel": "is not derived on another rank"}, "b": {"fp8_channel": ""}})
        self.assertEqual(self.quantised, ["b"])

    def test_what_fails_is_no_difference_but_counts_as_one(self):
        self.wrong["a"] = types.MappingProxyType({}).__getitem__
        self.assertFalse(self.compare())
        self.assertRegex(getattr(self.model, derived.COMPARED)["a"]["fp8_channel"], "can't be compared with fp8_channel: (KeyError|TypeError)")


def off_by_a_bit(scales):
    """Reciprocals of which one in eight is not the nearest number, as those of a GPU's instruction; which ones, is made up."""
    made = 1.0 / scales
    mantissas = scales.view(torch.int32) & 0x7FFFFF
    return torch.where((mantissas * 40503 >> 7) % 8 == 0, torch.nextafter(made, torch.tensor(torch.inf)), made)


def reciprocals(function):
    return mock.patch.object(derived, "_approximate_reciprocal", lambda device: (function, "") if function else (None, "torch.compile fails"))


class InductorTest(unittest.TestCase):
    """The arithmetic of fp8_block_inductor, on a CPU with reciprocals that stand for the GPU's."""

    def test_with_nearest_reciprocals_it_is_fp8_block_cuda(self):
        source = TensorSpec("w", "bfloat16", (700, 324))
        weight = derived._trial(source, CPU)
        with reciprocals(lambda scales: 1.0 / scales):
            for role, boxes in (("values", [((0, 0), (700, 324)), ((256, 128), (128, 196))]), ("scales", [((0, 0), (6, 3)), ((4, 1), (2, 2))])):
                for offset, extent in boxes:
                    made, expected = (
                        derived.derive(derived.derived_spec(source, kind, role), weight, offset, extent).view(torch.uint8)
                        for kind in ("fp8_block_inductor", "fp8_block_cuda")
                    )
                    self.assertTrue(torch.equal(made, expected), (role, offset))

    def test_it_is_not_computed_where_torch_has_other_reciprocals(self):
        def fails(scales):
            raise RuntimeError("no compiler")

        spec = derived.derived_spec(TensorSpec("w", "bfloat16", (128, 128)), "fp8_block_inductor", "values")
        for function, why in ((lambda x: 1.0 / x, "makes the nearest reciprocals"), (fails, "fails: RuntimeError: no compiler$")):
            derived._approximate_reciprocal.cache_clear()
            with mock.patch.object(torch, "compile", lambda _, dynamic: function), self.assertLogs("refitd.serving.derived", "WARNING") as logs:
                for _ in range(2):
                    with self.assertRaisesRegex(NotDerived, f"torch.compile {why}"):
                        derived.derive(spec, torch.ones(128, 128, dtype=torch.bfloat16))
            self.assertEqual(len(logs.output), 1, logs.output)
        derived._approximate_reciprocal.cache_clear()


class TurnsTest(unittest.TestCase):
    """An engine that may quantise by several kinds: which one is found by comparison."""

    def found(self, quantise, elsewhere=frozenset()):
        """The kinds that were compared, in their order, and why none is left, if so. `elsewhere`: what another rank refuses."""
        model = nn.Module()
        module = layer(BLOCK, 512, 2304)
        model.add_module("m", module)
        source = TensorSpec("w", "bfloat16", (512, 2304))
        weight = loaded((512, 2304), (0, (0, 0), (512, 2304), (0, 0)))

        def beside(portion, tensors):
            for role, parameter in (("values", "weight"), ("scales", "weight_scale_inv")):
                portion.made["m"][0][parameter].copy_(quantise(source, role, tensors["w"]))

        tried = []
        while True:
            try:
                kinds = derived.kinds_left(BLOCK.kinds("on", CUDA), getattr(model, derived.COMPARED, {}).get("m", {}))
            except NotDerived as none:
                return tried, str(none)
            tried.append(kinds[0])
            entry = Requantised("m", module, derived.parts_of(BLOCK, kinds[0], module, weight, [source]), [source], kinds)
            if derived.compare(model, [entry], set(), beside, lambda names: names | elsewhere, CPU):
                return tried, ""

    def by(self, kind):
        return lambda source, role, weight: derived.derive(derived.derived_spec(source, kind, role), weight)

    def test_the_first_kind_of_which_all_bits_agree_is_taken(self):
        kinds = BLOCK.kinds("on", CUDA)
        with reciprocals(off_by_a_bit):
            for count, kind in enumerate(kinds, 1):
                self.assertEqual(self.found(self.by(kind)), ([*kinds[:count]], ""))

    def test_a_kind_that_can_not_be_computed_is_passed_over(self):
        with reciprocals(None), self.assertLogs("refitd.serving.derived", "INFO") as logs:
            self.assertEqual(self.found(self.by("fp8_block_cuda")), (["fp8_block_inductor", "fp8_block_cuda"], ""))
        self.assertIn("'m' is not derived as fp8_block_inductor: it can't be compared with fp8_block_inductor: NotDerived: torch.compile fails", logs.output[0])

    def test_no_kind_is_left_of_a_module_that_another_rank_refuses(self):
        with reciprocals(off_by_a_bit):
            self.assertEqual(self.found(self.by("fp8_block_cuda"), {"m"}), (["fp8_block_inductor"], "it is not derived on another rank"))

    def test_each_kind_is_named_where_none_agrees(self):
        with reciprocals(off_by_a_bit):
            tried, why = self.found(self.by("fp8_block_pow2"))
        self.assertEqual(tried, [*BLOCK.kinds("on", CUDA)])
        self.assertRegex(why, "it is quantised otherwise than by fp8_block_inductor: .*; it .* by fp8_block_cuda: .*; it .* by fp8_block: ")


if __name__ == "__main__":
    unittest.main()
