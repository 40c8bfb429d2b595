"""Pushed updates: what tensors are taken, how they are packed, how updates end."""

import array
import itertools
import random
import threading
import types
import unittest
from unittest import mock

import refitd
from support import DaemonTest, Server
from refitd import TensorSpec
from refitd.layout import devices
from refitd.layout.cuda import CudaBytes
from refitd.layout.memory import HostBytes

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


class Collector:
    """Loads loader parts: `tensors` are the bytes by name, with dtype and shape."""

    def __init__(self):
        self.joiner = refitd.Joiner()
        self.tensors = {}
        self.parts = 0

    def __call__(self, part):
        self.parts += 1
        for view in self.joiner.add(part):
            assert view.whole
            self.tensors[view.name] = (view.dtype, view.shape, bytes(view.memory))


class PushTest(DaemonTest):
    def staged(self, **options):
        trainer = self.trainer()
        collector = Collector()
        engine = self.engine(loader=True, **options)
        return trainer, Server(self, engine, collector), collector

    def pushed(self, *tensors):
        """Pushes each of (name, value, arguments of push), and returns the tensors that an engine got."""
        trainer, server, collector = self.staged()
        with trainer.update(1, tensor_count=len({name for name, _, _ in tensors})) as update:
            for name, value, arguments in tensors:
                update.push(name, value, **arguments)
        server.wait_for(refitd.Committed)
        self.assertEqual(update.result.committed, 1)
        return collector.tensors

    def test_tensors_larger_than_a_slot_and_many_small_ones_arrive_whole(self):
        random.seed(1)
        tensors = {f"t{i}": random.randbytes(random.choice((1, 7, 100, 5000, 65536, 65537, 300001))) for i in range(60)}
        got = self.pushed(*((name, value, {}) for name, value in tensors.items()))
        self.assertEqual({name: value[2] for name, value in got.items()}, tensors)
        self.assertEqual(got["t0"][:2], ("uint8", (len(tensors["t0"]),)))

    def test_a_count_that_the_commit_tells_is_the_number_of_tensors_that_came(self):
        trainer, server, collector = self.staged()
        with trainer.update(1) as update:
            update.push("a", b"1234")
            with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor_count: 0"):
                update.commit()
            update.push("b", b"5678")
            with self.assertRaisesRegex(refitd.FailedPrecondition, "2 tensors came, but tensor_count is 3"):
                update.commit(tensor_count=3)
            self.assertEqual(update.commit(tensor_count=2).committed, 1)
        server.wait_for(refitd.Committed)
        self.assertEqual(sorted(collector.tensors), ["a", "b"])

    def test_a_note_is_shown_in_the_status_and_a_wrong_note_opens_no_update(self):
        trainer, server, _ = self.staged()
        for note, problem in (("n" * 257, "note: 257 bytes"), ("a\nb", "note: a control character at byte 1"),
                              ("a\x9bb", "note: a control character at byte 1"), ("a\0b", "NUL")):
            with self.assertRaises(refitd.InvalidArgument) as raised:
                trainer.update(1, tensor_count=1, note=note)
            self.assertIn(problem, str(raised.exception))
        with trainer.update(1, tensor_count=1, note="step 1200, größer") as update:
            (group,) = [group for group in self.status()["groups"] if group["name"] == self.group]
            self.assertEqual(group["update"]["note"], "step 1200, größer")
            update.push("t", b"1234")
        server.wait_for(refitd.Committed)

    def test_slots_that_the_library_does_not_copy_to_are_packed_the_same(self):
        class OnGpu(CudaBytes):  # stands for a slot on a GPU, over host memory
            synchronized = 0

            def part(self, at, nbytes):
                return HostBytes(self.pointer + at, nbytes, self)

            def synchronize(self):
                OnGpu.synchronized += 1

        trainer, server, collector = self.staged()
        on_gpu = types.SimpleNamespace(kind_of=devices.kind_of, bytes_at=lambda device, pointer, nbytes, owner: OnGpu(pointer, nbytes, owner, 0))
        patch = mock.patch("refitd.trainer.devices", on_gpu)
        patch.start()
        self.addCleanup(patch.stop)
        random.seed(2)
        tensors = {f"t{i}": random.randbytes(random.choice((0, 1, 7, 5000, 65536, 300001))) for i in range(30)}
        for version in (1, 2):
            collector.tensors.clear()
            with trainer.update(version, tensor_count=len(tensors)) as update:
                for name, value in tensors.items():
                    update.push(name, value)
                    self.assertFalse(update._packer.push(name, value))
            server.wait_for(refitd.Committed)
            self.assertEqual({name: value[2] for name, value in collector.tensors.items()}, tensors)
        self.assertGreater(OnGpu.synchronized, 2)

    def test_a_part_of_a_tensor_that_is_in_the_bucket_goes_into_the_next(self):
        trainer, server, collector = self.staged()
        with trainer.update(1, tensor_count=2) as update:
            update.push("w", b"1" * 10, shape=(30,), start=0)
            update.push("v", b"2" * 10)
            update.push("w", b"3" * 20, shape=(30,), start=10)
        server.wait_for(refitd.Committed)
        self.assertEqual(collector.parts, 2)
        self.assertEqual(collector.tensors["w"], ("uint8", (30,), b"1" * 10 + b"3" * 20))

    def test_small_tensors_share_slots(self):
        trainer, server, collector = self.staged()
        with trainer.update(1, tensor_count=1000) as update:
            for i in range(1000):
                update.push(f"t{i}", bytes([i % 256]) * 64)
        server.wait_for(refitd.Committed)
        self.assertEqual(len(collector.tensors), 1000)
        self.assertLessEqual(collector.parts, 2)

    def test_buffers_of_other_formats_and_raw_bytes_of_a_dtype_are_taken(self):
        got = self.pushed(
            ("f", array.array("f", [1.5, 2.5]), {}),
            ("d", array.array("d", [1.5]), {}),
            ("h", array.array("h", [-2]), {}),
            ("q", array.array("q", [2**40]), {}),
            ("bits", memoryview(b"\x80\x3f\x00\x40"), dict(dtype="bfloat16")),
            ("fp8", bytearray(b"\x01\x02"), dict(dtype="float8_e4m3fn")),
            ("every other", memoryview(b"abcdef")[::2], {}),
            ("grid", b"123456", dict(dtype="uint8", shape=(2, 3))),
        )
        self.assertEqual(got["f"], ("float32", (2,), array.array("f", [1.5, 2.5]).tobytes()))
        self.assertEqual(got["d"][:2], ("float64", (1,)))
        self.assertEqual(got["h"], ("int16", (1,), array.array("h", [-2]).tobytes()))
        self.assertEqual(got["q"][0], "int64")
        self.assertEqual(got["bits"], ("bfloat16", (2,), b"\x80\x3f\x00\x40"))
        self.assertEqual(got["fp8"], ("float8_e4m3fn", (2,), b"\x01\x02"))
        self.assertEqual(got["every other"][2], b"ace")
        self.assertEqual(got["grid"], ("uint8", (2, 3), b"123456"))

    @unittest.skipUnless(numpy, "needs numpy")
    def test_numpy_arrays_of_any_strides_are_taken(self):
        base = numpy.arange(24 * 36, dtype=numpy.float32).reshape(24, 36)
        big = numpy.arange(200_000, dtype=numpy.int32).reshape(400, 500)
        cases = {
            "plain": base,
            "transposed": base.T,
            "strided": base[::3, 1::2],
            "reversed": base[::-1],
            "scalar": numpy.float16(2.5).reshape(()),
            "bool": base > 7,
            "broadcast": numpy.broadcast_to(base[0], (5, 36)),
            "big": big,
            "big transposed": big.T,
        }
        got = self.pushed(*((name, value, {}) for name, value in cases.items()))
        for name, value in cases.items():
            dtype, shape, data = got[name]
            self.assertEqual((dtype, shape), (value.dtype.name, value.shape), name)
            self.assertEqual(data, value.tobytes(), name)

    @unittest.skipUnless(numpy, "needs numpy")
    def test_what_has_dlpack_is_taken(self):
        class Other:
            def __init__(self, array):
                self.array = array

            def __dlpack__(self, *arguments, **options):
                return self.array.__dlpack__()

            def __dlpack_device__(self):
                return self.array.__dlpack_device__()

        value = numpy.arange(12, dtype=numpy.int16).reshape(3, 4)
        self.assertEqual(self.pushed(("x", Other(value), {}))["x"], ("int16", (3, 4), value.tobytes()))

    @unittest.skipUnless(torch, "needs torch")
    def test_torch_tensors_that_come_again_are_copied_at_once_and_checked_anew(self):
        trainer, server, collector = self.staged()
        tensors = {f"t{i}": torch.full((3, i + 1), float(i)) for i in range(50)}
        for version in (1, 2, 3):
            collector.tensors.clear()
            fast = []
            with trainer.update(version, tensor_count=len(tensors)) as update:
                put = update._put_fast
                update._put_fast = lambda name, tensor: fast.append(put(name, tensor)) or fast[-1]
                for name, tensor in tensors.items():
                    if version == 3 and name == "t7":
                        tensors[name] = tensor = tensor.t()  # what was learned has other strides and shape
                    update.push(name, tensor)
                    tensor += version  # the caller may write it as soon as push() has returned
            server.wait_for(refitd.Committed)
            for name, tensor in tensors.items():
                expected = (tensor - version).contiguous()
                self.assertEqual(collector.tensors[name], ("float32", tuple(expected.shape), expected.numpy().tobytes()), name)
            # The first tensor leases the slot; a tensor that is not as it was takes the slow way.
            self.assertEqual(sum(fast), {1: 0, 2: 49, 3: 48}[version])

    @unittest.skipUnless(torch, "needs torch")
    def test_torch_tensors_of_any_strides_and_dtypes_are_taken(self):
        base = torch.arange(24 * 36, dtype=torch.float32).reshape(24, 36)
        cases = {
            "plain": base,
            "transposed": base.t(),
            "strided": base[::3, 1::2],
            "expanded": base[0].expand(5, 36),
            "bfloat16": base.bfloat16(),
            "float8": base.to(torch.float8_e4m3fn),
            "bool": base > 7,
            "parameter": torch.nn.Parameter(base.clone()),
            "big transposed": torch.arange(200_000).reshape(400, 500).t(),
            "scalar": torch.tensor(3, dtype=torch.int8),
        }
        got = self.pushed(*((name, value, {}) for name, value in cases.items()))
        for name, value in cases.items():
            dtype, shape, data = got[name]
            self.assertEqual((f"torch.{dtype}", shape), (str(value.dtype), tuple(value.shape)), name)
            plain = value.detach().contiguous().reshape(-1).view(torch.uint8)
            self.assertEqual(data, bytes(plain.tolist()), name)

    @unittest.skipUnless(torch, "needs torch")
    def test_torch_tensors_without_dense_storage_are_refused_by_name(self):
        trainer, _, _ = self.staged()
        with self.assertRaises(refitd.UpdateAborted):
            with trainer.update(1, tensor_count=1) as update:
                for value in (torch.empty(2, device="meta"), torch.eye(2).to_sparse()):
                    with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w'"):
                        update.push("w", value)
                update.abort()
                raise refitd.UpdateAborted("as meant")

    @unittest.skipUnless(torch, "needs torch")
    def test_a_tensor_that_is_not_as_in_the_update_before_is_looked_at_again(self):
        trainer, server, collector = self.staged()
        w, v = torch.arange(12.0).reshape(4, 3), torch.arange(5)
        versions = (
            {"w": w, "v": v},
            {"w": w + 1, "v": v + 1},
            {"v": v, "w": w},  # another order
            {"w": w.to(torch.bfloat16), "v": v},
            {"w": torch.arange(12.0).reshape(3, 4).T, "v": v},  # the shape of the first, with other strides
            {"w": w[1:], "v": v[2:]},
            {"w": torch.complex(w, -w).conj().imag, "v": v},  # negated lazily
            {"w": w, "v": v.numpy() + 2},
            {"w": w, "v": v},
        )
        for version, tensors in enumerate(versions, 1):
            with self.subTest(version=version):
                with trainer.update(version, tensor_count=2) as update:
                    for name, tensor in tensors.items():
                        update.push(name, tensor)
                server.wait_for(refitd.Committed, version)
                for name, tensor in tensors.items():
                    tensor = torch.as_tensor(tensor).resolve_neg().contiguous()
                    expected = tuple(tensor.shape), bytes(tensor.view(torch.uint8).flatten().tolist())
                    self.assertEqual(collector.tensors[name][1:], expected)
        with trainer.update(len(versions) + 1, tensor_count=2) as update:
            update.push("v", v)
            tail = torch.zeros(24)[12:].view(4, 3)
            for freed in (w, tail):
                freed.untyped_storage().resize_(0)
                with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'w' has no memory"):
                    update.push("w", freed)
            with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w'"):
                update.push("w", torch.empty(4, 3, device="meta"))
            update.push("w", torch.ones(4, 3))

    def test_parts_of_a_tensor_come_together(self):
        got = self.pushed(
            ("w", b"abc", dict(shape=(6,), start=0)),
            ("w", b"def", dict(shape=(6,), start=3)),
        )
        self.assertEqual(got["w"], ("uint8", (6,), b"abcdef"))

    def test_what_is_no_tensor_or_beyond_its_shape_is_refused_by_name(self):
        trainer, _, collector = self.staged()
        with trainer.update(1, tensor_count=1) as update:
            for value, arguments, message in (
                ([1.0, 2.0], {}, "is a list"),
                (b"abc", dict(shape=(2,)), "beyond the shape"),
                (b"abc", dict(shape=(4,), start=2), "beyond the shape"),
                (b"abc", dict(start=1), "without a shape"),
                (b"abc", dict(dtype="float32"), "whole elements of float32"),
                (array.array("f", [1]), dict(dtype="bfloat16"), "dtype= says what raw bytes .* cast the tensor before"),
                (b"abcd", dict(dtype="float31"), "none of"),
            ):
                with self.subTest(message), self.assertRaisesRegex(refitd.InvalidArgument, f"tensor 'w'.*{message}"):
                    update.push("w", value, **arguments)
            update.push("w", b"good")
        self.assertEqual(collector.tensors["w"][2], b"good")

    def test_an_exception_in_the_block_aborts_and_is_raised(self):
        trainer, server, collector = self.staged()
        with self.assertRaisesRegex(KeyError, "mine"):
            with trainer.update(1, tensor_count=1) as update:
                update.push("w", b"x" * 100_000)
                raise KeyError("mine")
        aborted = server.wait_for(refitd.Aborted)
        self.assertIn("KeyError", aborted.reason)
        self.assertIsNone(update.result)
        self.assertEqual(trainer.get_update(1), "aborted")
        with trainer.update(2, tensor_count=1) as update:
            update.push("w", b"y")
        self.assertEqual(update.result.version, 2)

    def test_an_exception_that_ends_a_push_tells_whether_weights_are_dirty(self):
        trainer, server, _ = self.staged()
        versions = itertools.count(1)
        for pushed, dirty in ((0, False), (200_000, True)):
            for kind in (KeyError, refitd.InvalidArgument):
                with self.assertRaisesRegex(kind, "mine") as caught:
                    with trainer.update(next(versions), tensor_count=1) as update:
                        if pushed:
                            update.push("w", b"x" * pushed)
                            update.flush()
                        raise kind("mine")
                self.assertIs(caught.exception.dirty, dirty)
                self.assertEqual((type(update.lost), update.lost.dirty), (refitd.UpdateAborted, dirty))
                if hasattr(caught.exception, "add_note"):
                    self.assertIn("is lost", caught.exception.__notes__[-1])
                with trainer.update(next(versions), tensor_count=1) as update:
                    update.push("w", b"y")

    def test_a_bucket_that_is_refused_after_others_were_taken_tells_that_weights_are_dirty(self):
        trainer = self.trainer()
        engine = self.engine(loader=True, manifest=[TensorSpec("w", "uint8", (100_000,)), TensorSpec("v", "uint8", (3,))])
        Server(self, engine, Collector())
        with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'u'") as caught:
            with trainer.update(1) as update:
                update.push("w", bytes(100_000))
                update.flush()
                update.push("u", b"123")
        self.assertIs(caught.exception.dirty, True)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'v'.*never pushed") as caught:
            with trainer.update(2) as update:
                update.push("w", bytes(100_000))
        self.assertIs(caught.exception.dirty, True)

    @unittest.skipIf(numpy is None, "needs numpy")
    def test_unwanted_and_engine_only_tensors_are_patterns_of_one_syntax_for_pushes_and_refits(self):
        trainer = self.trainer(spec=refitd.GroupSpec(unwanted_tensors=["mtp.*.weight", "head"], engine_only_tensors=["*.inv_freq", "rope.?"]))
        engine = self.engine()
        held = {name: refitd.empty((4,), "uint8", like="numpy") for name in ("w", "a.inv_freq", "rope.1")}
        engine.register(held)
        Server(self, engine)
        source = {name: bytes([i + 1]) * 4 for i, name in enumerate(("w", "mtp.0.weight", "head"))}
        with trainer.update(1) as update:
            for name, value in source.items():
                update.push(name, value)
        self.assertEqual([bytes(memoryview(held[name])) for name in held], [source["w"], bytes(4), bytes(4)])
        self.assertRegex(repr(update.result), r"^<UpdateResult version 1: 3 tensors, 2 left out, \d+ bytes in [\d.e-]+ s, 1 of 1 instances>$")
        with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'mtp.0.bias' is unknown"):
            with trainer.update(2) as update:
                update.push("mtp.0.bias", b"1234")
        with self.assertRaisesRegex(refitd.FailedPrecondition, "tensor 'a.inv_freq' is engine-only"):
            with trainer.update(2) as update:
                update.push("a.inv_freq", b"1234")
        arrays = {name: refitd.empty((4,), "uint8", like="numpy") for name in source}
        for name, value in source.items():
            memoryview(arrays[name])[:] = value
        trainer.register(arrays)
        self.assertEqual(trainer.refit(3).left_out_tensors, 2)
        self.assertEqual([bytes(memoryview(held[name])) for name in held], [source["w"], bytes(4), bytes(4)])

    def test_an_update_that_is_dropped_is_aborted(self):
        trainer, server, _ = self.staged()
        update = trainer.update(1, tensor_count=1)
        update.push("w", b"x")
        del update
        server.wait_for(refitd.Aborted)

    def test_what_an_engine_does_not_know_is_refused_by_name(self):
        trainer = self.trainer()
        engine = self.engine(loader=True, manifest=[("w", "float32", (2,)), TensorSpec("v", "uint8", (3,))])
        Server(self, engine, Collector())
        for name, value, message in (("u", b"123", "tensor 'u'"), ("v", b"1234", "tensor 'v'")):
            with self.assertRaisesRegex(refitd.Error, message):
                with trainer.update(1) as update:
                    update.push(name, value)
        with self.assertRaisesRegex(refitd.Error, "tensor 'w'.*never pushed"):
            with trainer.update(2) as update:
                update.push("v", b"123")

    def test_pushes_of_several_threads_are_made_one_after_the_other(self):
        trainer, server, collector = self.staged()
        with trainer.update(1, tensor_count=40) as update:
            def push(first):
                for i in range(first, first + 10):
                    update.push(f"t{i}", bytes([i]) * 20_000)

            threads = [threading.Thread(target=push, args=(10 * i,)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        self.assertEqual({name: data[2] for name, data in collector.tensors.items()}, {f"t{i}": bytes([i]) * 20_000 for i in range(40)})

    def test_commit_and_flush_by_hand(self):
        trainer, _, collector = self.staged()
        update = trainer.update(1, tensor_count=1)
        self.assertEqual(update.instances, 1)
        self.assertGreater(update.leasable_slots, 0)
        update.push("w", b"abc")
        update.flush()
        self.assertEqual(update.commit().version, 1)
        with self.assertRaises(refitd.FailedPrecondition):
            update.commit()
        update.close()

    def test_pushed_tensors_and_registered_shards_make_one_version(self):
        trainer, engine = self.trainer(), self.engine()
        specs = [TensorSpec("moved", "uint8", (4,)), TensorSpec("pushed", "uint8", (4,))]
        source, target = refitd.Region(64), refitd.Region(64)
        source[:4] = b"1234"

        class Pushed:
            indices = [1]

            def push(self, update):
                update.push("pushed", b"5678")

        def box(index, region, at):
            return refitd.Box(index, (0,), (4,), (1,), refitd.RegionMemory(region, at, 4))

        trainer.register_layout(specs, [box(0, source, 0)], Pushed())
        engine.register_layout(specs, [box(0, target, 0), box(1, target, 4)])
        Server(self, engine)
        result = trainer.refit(1)
        self.assertEqual((target[:8], result.bytes, result.tensors), (b"12345678", 8, 2))

    def tied_engine(self):
        """An engine whose "head" is the memory of its "embed"; returns that memory."""
        specs = [TensorSpec("embed", "uint8", (4,)), TensorSpec("head", "uint8", (4,))]
        target, engine = refitd.Region(64), self.engine()
        box = refitd.Box(0, (0,), (4,), (1,), refitd.RegionMemory(target, 0, 4))
        engine.register_layout(specs, [box], {"head": "embed"})
        Server(self, engine)
        return target

    def test_a_tied_head_that_is_pushed_is_compared_and_named(self):
        trainer, target = self.trainer(), self.tied_engine()
        with trainer.update(1) as update:
            update.push("embed", b"1234")
            update.push("head", b"1234")
        self.assertEqual(target[:4], b"1234")
        self.assertEqual((update.result.left_out, update.result.left_out_bytes), (("head",), 4))
        with self.assertRaises(refitd.Error) as raised:
            with trainer.update(2) as update:
                update.push("embed", b"1234")
                update.push("head", b"1235")
        self.assertIn("tensor 'head' and tensor 'embed' are one memory", str(raised.exception))

    def test_a_head_that_the_trainer_has_not_tied_is_refused_by_refit_before_anything_is_written(self):
        trainer, target = self.trainer(), self.tied_engine()
        specs = [TensorSpec("embed", "uint8", (4,)), TensorSpec("head", "uint8", (4,))]
        source = refitd.Region(64)
        boxes = [refitd.Box(i, (0,), (4,), (1,), refitd.RegionMemory(source, 8 * i, 4)) for i in range(2)]
        trainer.register_layout(specs, boxes)
        source[:4] = source[8:12] = b"same"
        result = trainer.refit(1)
        self.assertEqual((target[:4], result.left_out, result.left_out_tensors), (b"same", ("head",), 1))
        source[8:12] = b"diff"
        with self.assertRaises(refitd.Error) as raised:
            trainer.refit(2)
        self.assertIn("tensor head and tensor embed are one memory", str(raised.exception))
        self.assertIn("weights are whole", str(raised.exception))
        self.assertEqual(target[:4], b"same")

    def test_a_trainer_and_an_engine_in_one_memory_shifted_are_refused(self):
        trainer, engine = self.trainer(), self.engine()
        spec, shared = TensorSpec("w", "uint8", (1024,)), refitd.Region(4096)
        shared[:1024] = bytes(range(256)) * 4

        def register(member, at):
            member.register_layout([spec], [refitd.Box(0, (0,), (1024,), (1,), refitd.RegionMemory(shared, at, 1024))])

        register(trainer, 0)
        register(engine, 64)
        Server(self, engine)
        before = shared[:]
        with self.assertRaises(refitd.FailedPrecondition) as raised:
            trainer.refit(1)
        for text in ("tensor w of trainer rank 0", "tensor w of engine", "overlap in memory", "weights are whole"):
            self.assertIn(text, str(raised.exception))
        self.assertEqual(shared[:], before)
        register(trainer, 64)  # the same place is no harm
        self.assertEqual(trainer.refit(2).committed, 1)
        register(trainer, 2048)
        self.assertEqual(trainer.refit(3).committed, 1)

    def test_views_outlive_acknowledgement_and_engine_without_a_crash(self):
        kept = []

        def keep(part):
            kept.extend(view.memory for view in part.views)

        trainer = self.trainer()
        engine = self.engine(loader=True)
        server = Server(self, engine, keep)
        with trainer.update(1, tensor_count=1) as update:
            update.push("w", b"x" * 1000)
        server.stop()
        trainer.close()
        self.assertEqual(sum(len(bytes(view)) for view in kept), 1000)
        with self.assertRaises(TypeError):
            kept[0][0] = 1  # read-only


class JoinerTest(unittest.TestCase):
    def test_parts_that_overlap_or_disagree_are_refused_by_name(self):
        from refitd.layout.memory import HostBytes

        class Engine:
            def _new_bytes(self, nbytes):
                region = refitd.Region(nbytes)
                return HostBytes(region.pointer, nbytes, region)

        source = refitd.Region(16)

        def part(start, count, shape=(8,), dtype="uint8"):
            view = refitd.View("w", dtype, shape, start, count, HostBytes(source.pointer, count, source))
            return refitd.Part(1, 1, 1, (view,), Engine())

        for second in (part(2, 4), part(4, 4, dtype="int8"), part(4, 4, shape=(9,))):
            joiner = refitd.Joiner()
            self.assertEqual(list(joiner.add(part(0, 4))), [])
            self.assertEqual(joiner.unfinished, ["w"])
            with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w'"):
                list(joiner.add(second))
            joiner.reset()
            self.assertEqual(joiner.unfinished, [])


if __name__ == "__main__":
    unittest.main()
