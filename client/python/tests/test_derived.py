"""Derived tensors over a real daemon: engines' casts and FP8 weights, compared bit by bit with torch's own arithmetic."""

from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")

import refitd
from support import DaemonTest, Server

FP8_MAX = 448.0


def blocks_of(weight):
    """The weight in float32, padded with zeros to whole blocks of 128 x 128: (rows, 128, columns, 128)."""
    rows, columns = (-(-n // 128) * 128 for n in weight.shape)
    padded = torch.zeros(rows, columns)
    padded[: weight.shape[0], : weight.shape[1]] = weight.float()
    return padded.view(rows // 128, 128, columns // 128, 128)


def quantised(kind, weight):
    """Values and scales by torch's operators on a CPU."""
    if kind == "fp8_channel":
        most = weight.abs().amax(dim=-1, keepdim=True).float()
        scales = (most / torch.tensor(FP8_MAX)).clamp_min(1.0 / (torch.tensor(FP8_MAX) * 512))
        return (weight.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales
    if kind == "mxfp8":
        blocks = weight.float().view(weight.shape[0], -1, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126) * (1 / torch.tensor(FP8_MAX))))
        scales = (exponent + 127).clamp(0, 254)
        return (blocks / torch.exp2(scales - 127)[:, :, None]).view(weight.shape).to(torch.float8_e4m3fn), scales.to(torch.uint8)
    blocks = blocks_of(weight)
    most = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if kind == "fp8_block":
        scales = most.clamp(1e-4) / FP8_MAX
        factor = 1.0 / scales
    elif kind == "fp8_block_cuda":
        scales = most.clamp(1e-4) * (1 / torch.tensor(FP8_MAX))
        factor = 1.0 / scales
    elif kind == "fp8_block_reciprocal":
        factor = torch.where(most == 0, torch.ones(()), FP8_MAX / most)
        scales = factor.reciprocal()
    else:
        scales = torch.where(most == 0, torch.ones(()), torch.exp2(torch.ceil(torch.log2(most * (1 / torch.tensor(FP8_MAX))))))
        factor = scales.reciprocal()
    values = (blocks * factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    values = values.view(blocks.shape[0] * 128, -1)[: weight.shape[0], : weight.shape[1]]
    return values, scales.view(blocks.shape[0], blocks.shape[2])


def weights(shape, dtype, seed):
    """Random weights of many sizes, with rows of zeros."""
    torch.manual_seed(seed)
    made = torch.randn(shape) * torch.exp2(torch.randint(-12, 4, (shape[0], 1)).float())
    made[: shape[0] // 3] *= torch.randint(0, 2, (shape[0] // 3, 1))
    return made.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def refit_all(trainers, version):
    with ThreadPoolExecutor(len(trainers)) as pool:
        return list(pool.map(lambda trainer: trainer.refit(version), trainers))


class DerivedTest(DaemonTest):
    def served(self, entries, derived, **options):
        """An engine with memory for (name, shape, dtype), and that memory."""
        tensors = {name: refitd.empty(shape, dtype, like="torch") for name, shape, dtype in entries}
        engine = self.engine(**options)
        engine.register(tensors, derived=derived)
        Server(self, engine)
        return tensors

    def trained(self, shape, dtype, **options):
        tensor = refitd.empty(shape, dtype, like="torch")
        trainer = self.trainer(**options)
        trainer.register({"w": tensor})
        return trainer, tensor

    def test_values_and_scales_have_the_bits_of_torch(self):
        for kind in ("fp8_block", "fp8_block_cuda", "fp8_block_reciprocal", "fp8_block_pow2", "fp8_channel", "mxfp8"):
            for dtype in (torch.bfloat16, torch.float32, torch.float16):
                shape = (384, 256) if kind in ("fp8_block_reciprocal", "fp8_block_pow2", "mxfp8") else (300, 260)
                scales = (-(-shape[0] // 128), -(-shape[1] // 128)) if "block" in kind else (shape[0], shape[1] // 32 if kind == "mxfp8" else 1)
                with self.subTest(kind=kind, dtype=dtype):
                    self.group = f"{kind}-{dtype}"
                    trainer, weight = self.trained(shape, dtype)
                    source = refitd.TensorSpec("w", str(dtype).removeprefix("torch."), shape)
                    served = self.served(
                        [("w.q", shape, torch.float8_e4m3fn), ("w.s", scales, torch.uint8 if kind == "mxfp8" else torch.float32)],
                        {"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")},
                    )
                    for version in (1, 2, 3):
                        weight.copy_(weights(shape, dtype, version))
                        trainer.refit(version)
                        values, scale = quantised(kind, weight)
                        self.assertTrue(torch.equal(bits(served["w.q"]), bits(values)))
                        self.assertTrue(torch.equal(bits(served["w.s"]), bits(scale)))

    def test_a_push_brings_what_is_derived_from_its_tensors(self):
        shape, kind = (700, 256), "fp8_block"
        for slots in ({}, {"slot_bytes": 135_168}):  # of 256 rows, and a bit more
            for casts in (False, True):
                with self.subTest(slots=slots, casts=casts):
                    self.group = f"pushed-{len(slots)}-{casts}"
                    trainer = self.trainer(spec=refitd.GroupSpec(**slots))
                    source = refitd.TensorSpec("w", "bfloat16", shape)
                    served = self.served(
                        [("w.q", shape, torch.float8_e4m3fn), ("w.s", (6, 2), torch.float32)],
                        {"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")},
                    )
                    master = refitd.empty(shape, torch.float32, like="torch")
                    if casts:
                        trainer.register({"w": master}, dtype=torch.bfloat16, staging="push")
                    for version in (1, 2):
                        weight = weights(shape, torch.bfloat16, version)
                        if casts:
                            master.copy_(weight)
                            trainer.refit(version)
                        else:
                            with trainer.update(version) as update:
                                update.push("w", weight)
                        values, scales = quantised(kind, weight)
                        self.assertTrue(torch.equal(bits(served["w.q"]), bits(values)))
                        self.assertTrue(torch.equal(bits(served["w.s"]), bits(scales)))

    def test_a_pushed_part_that_cuts_a_block_is_refused_by_name(self):
        shape = (256, 256)
        trainer = self.trainer()
        source = refitd.TensorSpec("w", "bfloat16", shape)
        self.served(
            [("w.q", shape, torch.float8_e4m3fn), ("w.s", (2, 2), torch.float32)],
            {"w.q": refitd.Derived(source, "fp8_block"), "w.s": refitd.Derived(source, "fp8_block", "scales")},
        )
        weight = weights(shape, torch.bfloat16, 1)
        with pytest.raises(refitd.FailedPrecondition, match=r"'w\.q' is computed of whole blocks of \[128, 128\]"), trainer.update(1) as update:
            update.push("w", weight[:100], shape=shape)
            update.push("w", weight[100:], shape=shape, start=100 * 256)

    def test_a_cast_has_the_bits_of_torch(self):
        for dtype in (torch.bfloat16, torch.float16):
            self.group = str(dtype)
            trainer, weight = self.trained((70, 33), torch.float32)
            derived = {"served": refitd.Derived(refitd.TensorSpec("w", "float32", (70, 33)), "cast")}
            served = self.served([("served", (70, 33), dtype)], derived)
            weight.copy_(weights((70, 33), torch.float32, 7))
            trainer.refit(1)
            self.assertTrue(torch.equal(bits(served["served"]), bits(weight.to(dtype))))

    def test_ranks_of_both_sides_hold_shards(self):
        shape, kind = (512, 384), "fp8_block"
        source = refitd.TensorSpec("w", "bfloat16", shape)
        derived = {"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")}
        trainers, halves = [], []
        for rank in range(2):
            half = refitd.empty((256, 384), torch.bfloat16, like="torch")
            trainer = self.trainer(rank=rank, world_size=2)
            trainer.register([refitd.Shard("w", shape, half, (256 * rank, 0))])
            trainers.append(trainer)
            halves.append(half)
        shards = []
        for rank in range(2):  # columns: 0 to 192 is a block and a half
            values = refitd.empty((512, 192), torch.float8_e4m3fn, like="torch")
            scales = refitd.empty((4, 3), torch.float32, like="torch")
            engine = self.engine(rank=rank, world_size=2)
            engine.register(
                [refitd.Shard("w.q", shape, values, (0, 192 * rank)), refitd.Shard("w.s", (4, 3), scales)], derived=derived
            )
            Server(self, engine)
            shards.append((values, scales))
        for version in (1, 2):
            weight = weights(shape, torch.bfloat16, version)
            for rank, half in enumerate(halves):
                half.copy_(weight[256 * rank : 256 * (rank + 1)])
            refit_all(trainers, version)
            expected, scale = quantised(kind, weight)
            for rank, (values, scales) in enumerate(shards):
                self.assertTrue(torch.equal(bits(values), bits(expected[:, 192 * rank : 192 * (rank + 1)])))
                self.assertTrue(torch.equal(bits(scales), bits(scale)))

    def cut_trainers(self, shape, dtype, boxes):
        """A trainer rank for each box (offset, extent) of w; returns the ranks, and what fills their shards."""
        trainers, shards = [], []
        for rank, (offset, extent) in enumerate(boxes):
            shard = refitd.empty(extent, dtype, like="torch")
            trainer = self.trainer(rank=rank, world_size=len(boxes))
            trainer.register([refitd.Shard("w", shape, shard, offset)])
            trainers.append(trainer)
            shards.append((tuple(slice(o, o + n) for o, n in zip(offset, extent, strict=True)), shard))

        def fill(weight):
            for place, shard in shards:
                shard.copy_(weight[place])

        return trainers, fill

    def test_shards_may_cut_blocks(self):
        grid = lambda rows, columns, r, c: [  # noqa: E731
            ((i, j), (min(r, rows - i), min(c, columns - j))) for i in range(0, rows, r) for j in range(0, columns, c)
        ]
        for name, kind, shape, boxes in (
            ("FSDP of 2,560 rows over 8 ranks", "fp8_block", (2560, 256), grid(2560, 256, 320, 256)),
            ("rows and columns", "fp8_block", (300, 260), grid(300, 260, 150, 130)),
            ("powers of two", "fp8_block_pow2", (384, 256), grid(384, 256, 96, 192)),
            ("rows thinner than blocks", "fp8_block_reciprocal", (256, 128), grid(256, 128, 20, 128)),
            ("channels", "fp8_channel", (100, 260), grid(100, 260, 100, 70)),
            ("two replicas", "fp8_block", (256, 384), grid(256, 384, 256, 192) * 2),
        ):
            with self.subTest(name):
                self.group = "".join(c if c.isalnum() else "-" for c in name)
                trainers, fill = self.cut_trainers(shape, torch.bfloat16, boxes)
                source = refitd.TensorSpec("w", "bfloat16", shape)
                blocks = (shape[0], 1) if kind == "fp8_channel" else tuple(-(-n // 128) for n in shape)
                served = self.served(
                    [("w.q", shape, torch.float8_e4m3fn), ("w.s", blocks, torch.float32)],
                    {"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")},
                )
                for version in (1, 2):
                    weight = weights(shape, torch.bfloat16, version)
                    fill(weight)
                    refit_all(trainers, version)
                    values, scales = quantised(kind, weight)
                    self.assertTrue(torch.equal(bits(served["w.q"]), bits(values)))
                    self.assertTrue(torch.equal(bits(served["w.s"]), bits(scales)))

    def test_replicas_that_differ_fail_the_refit_although_each_could_compute_the_block(self):
        shape = (128, 256)
        boxes = [((0, 0), (64, 256)), ((64, 0), (64, 256))] * 2
        trainers, fill = self.cut_trainers(shape, torch.bfloat16, boxes)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        self.served(
            [("w.q", shape, torch.float8_e4m3fn), ("w.s", (1, 2), torch.float32)],
            {"w.q": refitd.Derived(source, "fp8_block"), "w.s": refitd.Derived(source, "fp8_block", "scales")},
        )
        fill(weights(shape, torch.bfloat16, 1))
        odd = refitd.empty((64, 256), torch.bfloat16, like="torch")
        odd.fill_(3)
        trainers[3].register([refitd.Shard("w", shape, odd, (64, 0))])
        with pytest.raises(refitd.Error, match="tensor w: replicas differ"):
            refit_all(trainers, 1)

    def test_a_late_instance_gets_blocks_that_the_ranks_of_another_cut(self):
        shape = (256, 384)
        trainer, weight = self.trained(shape, torch.bfloat16)
        for rank in range(2):
            half = refitd.empty((256, 192), torch.bfloat16, like="torch")
            engine = self.engine(instance="plain", rank=rank, world_size=2)
            engine.register([refitd.Shard("w", shape, half, (0, 192 * rank))])
            Server(self, engine)
        weight.copy_(weights(shape, torch.bfloat16, 9))
        values, scales = quantised("fp8_block", weight)
        trainer.refit(1)
        weight.zero_()  # only the plain instance has the version now
        source = refitd.TensorSpec("w", "bfloat16", shape)
        late = {
            "w.q": refitd.empty(shape, torch.float8_e4m3fn, like="torch"),
            "w.s": refitd.empty((2, 3), torch.float32, like="torch"),
        }
        engine = self.engine(instance="late")
        engine.register(
            late,
            derived={"w.q": refitd.Derived(source, "fp8_block"), "w.s": refitd.Derived(source, "fp8_block", "scales")},
        )
        self.assertEqual(Server(self, engine).wait_for(refitd.Committed).version, 1)
        self.assertTrue(torch.equal(bits(late["w.q"]), bits(values)))
        self.assertTrue(torch.equal(bits(late["w.s"]), bits(scales)))

    def test_engines_in_several_forms_share_a_version(self):
        shape = (128, 256)
        trainer, weight = self.trained(shape, torch.bfloat16)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        plain = self.served([("w", shape, torch.bfloat16)], None, instance="plain")
        small = self.served(
            [("w.q", shape, torch.float8_e4m3fn), ("w.s", (128, 1), torch.float32)],
            {"w.q": refitd.Derived(source, "fp8_channel"), "w.s": refitd.Derived(source, "fp8_channel", "scales")},
            instance="small",
        )
        weight.copy_(weights(shape, torch.bfloat16, 3))
        self.assertEqual(trainer.refit(1).committed, 2)
        self.assertTrue(torch.equal(bits(plain["w"]), bits(weight)))
        values, scales = quantised("fp8_channel", weight)
        self.assertTrue(torch.equal(bits(small["w.q"]), bits(values)))
        self.assertTrue(torch.equal(bits(small["w.s"]), bits(scales)))

    def test_a_late_instance_gets_what_another_holds(self):
        shape = (256, 128)
        trainer, weight = self.trained(shape, torch.bfloat16)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        entries = [("w.q", shape, torch.float8_e4m3fn), ("w.s", (2, 1), torch.float32)]
        derived = {"w.q": refitd.Derived(source, "fp8_block"), "w.s": refitd.Derived(source, "fp8_block", "scales")}
        self.served(entries, derived, instance="first")
        weight.copy_(weights(shape, torch.bfloat16, 5))
        values, scales = quantised("fp8_block", weight)
        trainer.refit(1)
        weight.zero_()  # only the first instance has the version now
        late = {name: refitd.empty(size, dtype, like="torch") for name, size, dtype in entries}
        engine = self.engine(instance="late")
        engine.register(late, derived=derived)
        self.assertEqual(Server(self, engine).wait_for(refitd.Committed).version, 1)
        self.assertTrue(torch.equal(bits(late["w.q"]), bits(values)))
        self.assertTrue(torch.equal(bits(late["w.s"]), bits(scales)))

    def test_what_is_wrong_is_named(self):
        shape = (128, 128)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        values, scales = refitd.empty(shape, torch.float8_e4m3fn, like="torch"), refitd.empty((1, 1), torch.float32, like="torch")
        self.trained(shape, torch.float32)
        engine = self.engine()
        whole = {"q": refitd.Derived(source, "fp8_block"), "s": refitd.Derived(source, "fp8_block", "scales")}
        for derived, text in (
            ({**whole, "x": whole["q"]}, "derived has tensor 'x'"),
            ({**whole, "q": refitd.Derived(source, "fp7")}, "kind 'fp7' is none of cast"),
            ({**whole, "q": refitd.Derived(source, "fp8_block", "zeros")}, "role 'zeros' is none of values"),
            ({**whole, "q": refitd.Derived(source, "cast")}, "it is float8_e4m3fn"),
            ({**whole, "s": refitd.Derived(refitd.TensorSpec("w", "int8", shape), "fp8_block", "scales")}, "not int8"),
        ):
            with pytest.raises(refitd.InvalidArgument, match=text):
                engine.register({"q": values, "s": scales}, derived=derived)
        with pytest.raises(refitd.InvalidArgument, match="but not the scales"):
            engine.register({"q": values}, derived={"q": whole["q"]})

    def test_a_source_that_trainers_hold_otherwise_fails_the_refit(self):
        shape = (128, 128)
        trainer, _ = self.trained(shape, torch.float32)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        self.served(
            [("q", shape, torch.float8_e4m3fn), ("s", (1, 1), torch.float32)],
            {"q": refitd.Derived(source, "fp8_block"), "s": refitd.Derived(source, "fp8_block", "scales")},
        )
        with pytest.raises(refitd.FailedPrecondition, match="engines derive it from w as bfloat16") as raised:
            trainer.refit(1)
        self.assertIn(raised.value.tensor, ("q", "s"))

    def test_a_kind_of_gpus_alone_fails_on_a_host(self):
        shape = (128, 128)
        trainer, _ = self.trained(shape, torch.bfloat16)
        source = refitd.TensorSpec("w", "bfloat16", shape)
        values = {name: refitd.Derived(source, "fp8_block_inductor", role) for name, role in (("q", "values"), ("s", "scales"))}
        self.served([("q", shape, torch.float8_e4m3fn), ("s", (1, 1), torch.float32)], values)
        with pytest.raises(refitd.UpdateAborted, match="are computed by GPUs only"):
            trainer.refit(1)

    def test_a_push_does_not_bring_it_and_the_commit_names_it(self):
        shape = (128, 128)
        trainer = self.trainer()
        source = refitd.TensorSpec("w", "float32", shape)
        self.served(
            [("q", shape, torch.float8_e4m3fn), ("s", (1, 1), torch.float32), ("v", (4,), torch.float32)],
            {"q": refitd.Derived(source, "fp8_block"), "s": refitd.Derived(source, "fp8_block", "scales")},
        )
        with pytest.raises(refitd.Error, match="'?q'?") as raised, trainer.update(1) as update:
            update.push("v", torch.ones(4))
        self.assertIn(raised.value.tensor, ("q", "s"))
