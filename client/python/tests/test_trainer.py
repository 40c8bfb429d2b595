"""Trainers and engines over a real daemon: refits of registered regions, events, what is refused."""

import types
import unittest
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import pytest

import refitd
from support import DaemonTest, Server, whole
from refitd import TensorSpec
from refitd.layout import devices

SPEC = TensorSpec("w", "float32", (16, 8))
BYTES = 16 * 8 * 4


class RefitTest(DaemonTest):
    def pair(self, **options):
        """A trainer and an engine that registered one tensor each, and the regions."""
        trainer, engine = self.trainer(**options), self.engine()
        source, target = refitd.Region(BYTES), refitd.Region(BYTES)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        return trainer, Server(self, engine), source, target

    def test_a_refit_moves_the_registered_bytes_and_tells_of_them(self):
        trainer, server, source, target = self.pair()
        self.assertIsNone(trainer.group_version)
        for version in (3, 4):
            source[:] = bytes([version]) * BYTES
            result = trainer.refit(version)
            self.assertEqual(target[:], source[:])
            self.assertEqual((result.version, result.bytes, result.committed), (version, BYTES, 1))
            self.assertEqual(result.instances, (refitd.InstanceOutcome("a", True, ""),))
            self.assertGreater(result.seconds, 0)
        server.wait_for(refitd.Committed, 2)
        self.assertEqual([event.version for event in server.of(refitd.Committed)], [3, 4])
        self.assertEqual((server.engine.version, server.engine.weights), (4, refitd.Weights.CLEAN))
        self.assertEqual((trainer.group_version, trainer.get_update(3), trainer.get_update(9)), (4, "committed", "unknown"))
        self.assertIsNone(trainer.check_health())

    def test_verification_and_duration_are_taken_and_checked(self):
        trainer, _, _, _ = self.pair()
        for version, verification in enumerate(("off", "transfer", "readback")):
            self.assertEqual(trainer.refit(version, verification=verification, duration_seconds=30).version, version)
        with self.assertRaisesRegex(refitd.InvalidArgument, "verification: 'all'"):
            trainer.refit(9, verification="all")
        with self.assertRaisesRegex(refitd.InvalidArgument, "duration_seconds"):
            trainer.refit(9, duration_seconds=0)

    def test_a_version_that_is_not_greater_is_refused_and_changes_nothing(self):
        trainer, server, source, target = self.pair()
        trainer.refit(5)
        source[:] = b"\x07" * BYTES
        with self.assertRaises(refitd.FailedPrecondition) as caught:
            trainer.refit(5)
        self.assertIn("version: 5 is not greater", str(caught.exception))
        self.assertIn("trainer rank 0", str(caught.exception))
        self.assertEqual(caught.exception.status, refitd.Status.FAILED_PRECONDITION)
        self.assertNotEqual(target[:], source[:])
        for version in (-1, 1.5, True, "7", 2**63):
            with self.assertRaisesRegex(refitd.InvalidArgument, "version"):
                trainer.refit(version)

    def attached(self, source, **options):
        """A trainer that a restart made anew, with its shard registered."""
        trainer = self.trainer(**options)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        return trainer

    def test_a_trainer_that_goes_on_from_an_older_version_takes_the_next_one_or_begins_the_group_anew(self):
        first, server, source, target = self.pair()
        self.assertEqual(first.next_version, 1)
        first.refit(5)
        first.close()
        refused = self.attached(source)
        self.assertEqual((refused.group_version, refused.next_version), (5, 6))
        with self.assertRaisesRegex(refitd.FailedPrecondition, "on_older"):
            refused.refit(3)
        refused.close()
        following = self.attached(source, on_older="next")
        source[:] = b"\x03" * BYTES
        self.assertEqual((following.refit(3).version, following.refit(4).version, following.refit(9).version), (6, 7, 9))
        self.assertEqual(target[:], source[:])
        with following.update(1) as update:
            update.push("w", source[:], dtype="float32", shape=(16, 8))
        self.assertEqual(update.result.version, 10)
        following.close()
        anew = self.attached(source, on_older="replace")
        source[:] = b"\x04" * BYTES
        for version in (3, 4):
            self.assertEqual((anew.refit(version).version, anew.group_version), (version, version))
            self.assertEqual(target[:], source[:])
        server.wait_for(refitd.Committed, 7)
        self.assertEqual([event.version for event in server.of(refitd.Committed)], [5, 6, 7, 9, 10, 3, 4])

    def test_every_rank_goes_on_when_rank_0_begins_the_group_anew(self):
        def ranks(**options):
            trainers = []
            for rank in range(2):
                trainers.append(self.trainer(rank=rank, world_size=2, **options))
                region = refitd.Region(BYTES // 2)
                region[:] = bytes([rank + 1]) * (BYTES // 2)
                box = refitd.Box(0, (8 * rank, 0), (8, 8), (8, 1), refitd.RegionMemory(region, 0, BYTES // 2))
                trainers[rank].register_layout([SPEC], [box])
            return trainers

        def refit(trainers, version):
            with ThreadPoolExecutor(2) as pool:
                return [result.version for result in pool.map(lambda trainer: trainer.refit(version), trainers)]

        trainers, engine, target = ranks(), self.engine(), refitd.Region(BYTES)
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        self.assertEqual(refit(trainers, 7), [7, 7])
        for trainer in trainers:
            trainer.close()
        trainers = ranks(on_older="replace")
        for version in (3, 4):
            self.assertEqual(refit(trainers, version), [version, version])
        self.assertEqual(target[:], b"\x01" * (BYTES // 2) + b"\x02" * (BYTES // 2))

    def test_a_note_that_one_rank_gives_with_a_refit_is_in_the_daemons_log(self):
        trainers, target = [], refitd.Region(BYTES)
        for rank in range(2):
            trainers.append(self.trainer(rank=rank, world_size=2))
            region = refitd.Region(BYTES // 2)
            region[:] = bytes([rank + 1]) * (BYTES // 2)
            box = refitd.Box(0, (8 * rank, 0), (8, 8), (8, 1), refitd.RegionMemory(region, 0, BYTES // 2))
            trainers[rank].register_layout([SPEC], [box])
        engine = self.engine()
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        with self.assertRaisesRegex(refitd.InvalidArgument, "NUL"):
            trainers[0].refit(1, note="a\0b")
        for version, notes in ((1, ("step 7", "")), (2, ("", "")), (3, ("", "step 9"))):
            with ThreadPoolExecutor(2) as pool:
                results = list(pool.map(lambda pair: pair[0].refit(version, note=pair[1]), zip(trainers, notes)))
            self.assertEqual([result.version for result in results], [version, version])
        self.assertEqual(target[:], b"\x01" * (BYTES // 2) + b"\x02" * (BYTES // 2))
        log = self.daemon.read_log()
        self.assertIn("update to version 1: step 7", log)
        self.assertNotIn("update to version 2:", log)
        self.assertIn("update to version 3: step 9", log)

    def test_a_group_is_begun_anew_by_hand(self):
        first, _, source, _ = self.pair()
        first.refit(5)
        refitd.replace_group(self.group, socket=self.daemon.socket)
        with self.assertRaises(refitd.Error):
            first.refit(6)  # its lease has ended
        first.close()
        self.assertEqual(self.attached(source).refit(2).version, 2)
        with self.assertRaises(refitd.AlreadyExists):
            refitd.replace_group(self.group, spec=refitd.GroupSpec(min_instances=7), socket=self.daemon.socket)
        for options in ({"on_older": "forget"}, {"on_older": "replace", "spec": None}):
            with self.assertRaisesRegex(refitd.InvalidArgument, "on_older"):
                self.trainer(**options)

    def test_two_ranks_with_half_a_tensor_each_are_joined(self):
        spec = TensorSpec("w", "float32", (16, 8))
        engine = None
        trainers = []
        for rank in range(2):
            trainers.append(self.trainer(rank=rank, world_size=2))
            region = refitd.Region(BYTES // 2)
            region[:] = bytes([rank + 1]) * (BYTES // 2)
            box = refitd.Box(0, (8 * rank, 0), (8, 8), (8, 1), refitd.RegionMemory(region, 0, BYTES // 2))
            trainers[rank].register_layout([spec], [box])
        engine, target = self.engine(), refitd.Region(BYTES)
        engine.register_layout([spec], [whole(target, spec)])
        Server(self, engine)
        with ThreadPoolExecutor(2) as pool:
            results = list(pool.map(lambda trainer: trainer.refit(1), trainers))
        self.assertEqual([(result.tensors, result.bytes) for result in results], [(1, BYTES), (1, BYTES)])
        self.assertEqual(target[:], b"\x01" * (BYTES // 2) + b"\x02" * (BYTES // 2))

    def test_a_missing_shard_is_an_error_that_names_tensor_and_changes_nothing(self):
        trainer, engine = self.trainer(), self.engine()
        source, target = refitd.Region(BYTES), refitd.Region(BYTES)
        source[:] = b"\x01" * BYTES
        half = refitd.Box(0, (0, 0), (8, 8), (8, 1), refitd.RegionMemory(source, 0, BYTES))
        trainer.register_layout([SPEC], [half])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        with self.assertRaises(refitd.Error) as caught:
            trainer.refit(1)
        self.assertEqual(caught.exception.culprit, "tensor 'w'")
        self.assertEqual(target[:], bytes(BYTES))

    def test_names_that_differ_between_ranks_are_an_error_that_names_tensor_and_rank_before_anything_is_written(self):
        trainers = [self.trainer(rank=rank, world_size=2) for rank in range(2)]
        for rank, name in enumerate(("w", "model.w")):
            region = refitd.Region(BYTES // 2)
            region[:] = b"\x01" * (BYTES // 2)
            box = refitd.Box(0, (8 * rank, 0), (8, 8), (8, 1), refitd.RegionMemory(region, 0, BYTES // 2))
            trainers[rank].register_layout([TensorSpec(name, "float32", (16, 8))], [box])
        engine, target = self.engine(), refitd.Region(BYTES)
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)

        def refused(trainer):
            with self.assertRaises(refitd.Error) as caught:
                trainer.refit(1)
            return caught.exception

        with ThreadPoolExecutor(2) as pool:
            for error in pool.map(refused, trainers):
                self.assertEqual((error.culprit, error.dirty), ("tensor 'model.w'", False))
                self.assertIn("trainer rank 1 ", str(error))
        self.assertEqual(target[:], bytes(BYTES))

    def test_shapes_and_dtypes_that_differ_between_members_are_refused_by_name(self):
        trainer, engine = self.trainer(), self.engine()
        source, target = refitd.Region(BYTES), refitd.Region(BYTES)
        source[:] = b"\x01" * BYTES
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        for version, other in enumerate((TensorSpec("w", "float32", (8, 16)), TensorSpec("w", "bfloat16", (16, 8)))):
            trainer.register_layout([other], [whole(source, other)])
            with self.assertRaises(refitd.Error) as caught:
                trainer.refit(version)
            self.assertEqual(caught.exception.culprit, "tensor 'w'")
            self.assertRegex(str(caught.exception), "tensor w: .* in trainer rank 0 .* in engine a rank 0")
            self.assertEqual("register(dtype=) casts to" in str(caught.exception), other.shape == SPEC.shape)
            self.assertEqual(target[:], bytes(BYTES))
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        trainer.refit(9)
        self.assertEqual(target[:], source[:])

    def test_wrong_layouts_are_refused_naming_tensor_and_rank(self):
        trainer = self.trainer()
        region = refitd.Region(BYTES)
        memory = refitd.RegionMemory(region, 0, BYTES)
        good = refitd.Box(0, (0, 0), (16, 8), (8, 1), memory)

        def box(**changes):
            import dataclasses

            return dataclasses.replace(good, **changes)

        cases = {
            "twice": ([SPEC, SPEC], [good]),
            "dtype 'float7'": ([TensorSpec("w", "float7", (16, 8))], [good]),
            "negative": ([TensorSpec("w", "float32", (-1, 8))], []),
            "name is empty": ([TensorSpec("", "float32", (1,))], []),
            "beyond the shape": ([SPEC], [box(offset=(1, 0))]),
            "is empty or": ([SPEC], [box(extent=(0, 8))]),
            "2 dimensions": ([SPEC], [box(strides=(1,))]),
            "of memory that has": ([SPEC], [box(byte_offset=4)]),
            "bytes": ([SPEC], [box(strides=(9, 1))]),
            "of tensor 3": ([SPEC], [box(tensor_index=3)]),
        }
        for message, (tensors, boxes) in cases.items():
            with self.subTest(message), self.assertRaises(refitd.InvalidArgument) as caught:
                trainer.register_layout(tensors, boxes)
            self.assertIn(message, str(caught.exception))
            self.assertIn("trainer rank 0 of group", str(caught.exception))
            if message != "of tensor 3":
                self.assertIn("tensor '", str(caught.exception.culprit))

    def test_attaching_is_refused_for_what_is_wrong(self):
        self.trainer()
        for kind, options in (
            (refitd.InvalidArgument, dict(rank=2, world_size=2)),
            (refitd.InvalidArgument, dict(world_size=0)),
            (refitd.AlreadyExists, dict()),
            (refitd.InvalidArgument, dict(connect=refitd.Connect(wait_seconds=-1))),
            (refitd.InvalidArgument, dict(connect=refitd.Connect(client="a\0b"))),
            (refitd.InvalidArgument, dict(connect=refitd.Connect(socket="/run/other.sock"))),  # beside socket=
            (refitd.FailedPrecondition, dict(device="GPU-00000000-0000-0000-0000-000000000000")),
        ):
            with self.subTest(options), self.assertRaises(kind):
                self.trainer(**options)
        with self.assertRaisesRegex(refitd.Unavailable, "/nonexistent"):
            refitd.Trainer("g", socket="/nonexistent/refitd.sock", connect=refitd.Connect(wait_seconds=0.01))
        with self.assertRaises(refitd.Error):
            refitd.Engine("no such group", instance="a", socket=self.daemon.socket, connect=refitd.Connect(wait_seconds=0.01))
        with self.assertRaisesRegex(refitd.InvalidArgument, "shares memory"):
            refitd.Engine("g", instance="a", connect=refitd.Connect(address="localhost:1"))

    def test_nothing_works_after_close_and_nothing_crashes(self):
        trainer, server, source, target = self.pair()
        update = trainer.update(1, with_layout=True)
        trainer.close()
        engine = server.engine
        server.stop()
        trainer.close()
        calls = [
            lambda: trainer.refit(2),
            lambda: trainer.update(2),
            lambda: trainer.register_layout([SPEC], [whole(source, SPEC)]),
            lambda: trainer.get_update(1),
            lambda: trainer.group_version,
            lambda: trainer.reattachments,
            lambda: trainer.abort(1),
            lambda: trainer.check_health(),
            lambda: engine.next(0),
            lambda: engine.poll(),
            lambda: engine.ready(1),
            lambda: engine.fail(1, "x"),
            lambda: engine.weights,
            lambda: engine.version,
            lambda: engine.register_layout([SPEC], [whole(target, SPEC)]),
        ]
        for call in calls:
            with self.assertRaises(refitd.Closed):
                call()
        self.assertEqual(list(engine), [])
        # The update outlives its trainer, but not its lease.
        with self.assertRaises(refitd.Error):
            update.commit()
        update.close()
        for call in (update.commit, update.refit, update.flush, update.abort, lambda: update.push("w", b"x")):
            with self.assertRaises(refitd.Closed):
                call()
        source[:] = target[:]  # memory stays as long as it is used
        self.assertIn("closed", repr(trainer))

    def test_members_are_context_managers(self):
        with refitd.Trainer(self.group, socket=self.daemon.socket, device="host") as trainer:
            with refitd.Engine(self.group, instance="a", socket=self.daemon.socket, device="host") as engine:
                self.assertFalse(engine.closed)
            self.assertTrue(engine.closed)
        self.assertTrue(trainer.closed)

    def test_memory_outside_of_regions_is_staged_with_a_warning_and_counted(self):
        import array

        trainer, engine = self.trainer(), self.engine()
        values = array.array("f", range(128))
        pointer, count = values.buffer_info()
        memory = refitd.HostMemory(pointer, count * 4, values, label="tensor 'w'")
        box = refitd.Box(0, (0, 0), (16, 8), (8, 1), memory)
        # assertWarns would ask each module for its registry, at which some that import lazily import all that they have.
        with pytest.warns(refitd.StagingWarning, match="tensor 'w'.*copied at every refit"):
            trainer.register_layout([SPEC], [box])
        target = refitd.Region(BYTES)
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        for version in (1, 2):
            values[0] = version
            result = trainer.refit(version)
            self.assertEqual(target[:], values.tobytes())
            self.assertEqual(result.staged_bytes, BYTES)
        with self.assertRaisesRegex(refitd.InvalidArgument, "tensor 'w' of engine rank 0 of instance a .*can't map"):
            engine.register_layout([SPEC], [box])

    def test_memory_that_moved_is_bound_anew_and_counted(self):
        trainer, engine = self.trainer(), self.engine()
        first, second, target = refitd.Region(BYTES), refitd.Region(BYTES), refitd.Region(BYTES)
        second[:] = b"\x02" * BYTES
        at = [first.pointer]
        memory = refitd.HostMemory(first.pointer, BYTES, (first, second), "tensor 'w'", lambda: at[0])
        trainer.register_layout([SPEC], [refitd.Box(0, (0, 0), (16, 8), (8, 1), memory)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        self.assertEqual(trainer.refit(1).rebound, 0)
        at[0] = second.pointer
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assertEqual(target[:], second[:])
        self.assertEqual(trainer.refit(3).rebound, 0)

    def test_memory_that_is_filled_before_a_refit_is_filled_each_time(self):
        trainer, engine = self.trainer(), self.engine()
        seen = []

        def fill(view):
            seen.append(view.nbytes)
            view[:] = bytes([len(seen)]) * BYTES

        memory = refitd.FilledMemory(BYTES, fill)
        trainer.register_layout([SPEC], [refitd.Box(0, (0, 0), (16, 8), (8, 1), memory)])
        target = refitd.Region(BYTES)
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        trainer.refit(1)
        trainer.refit(2)
        self.assertEqual((seen, target[:]), ([BYTES, BYTES], b"\x02" * BYTES))

    def test_a_refit_waits_for_all_work_of_the_device_or_for_the_streams_that_are_named(self):
        trainer, server, source, target = self.pair()
        waited = []

        class LateStream:
            def __init__(self, name):
                self.name = name

            def synchronize(self):
                waited.append(self.name)
                source[:] = bytes([len(waited)]) * BYTES

        kind = types.SimpleNamespace(
            synchronize_all=lambda device: LateStream("all").synchronize(), synchronize=lambda device: waited.append("current")
        )
        with mock.patch.object(devices, "kind_of", lambda device: kind):
            trainer.refit(1)
            self.assertEqual((waited, target[:]), (["all"], b"\x01" * BYTES))
            trainer.refit(2, streams=[LateStream("a"), LateStream("b")])
            self.assertEqual((waited[1:], target[:]), (["a", "b", "current"], b"\x03" * BYTES))
            trainer.refit(3, streams=[])
            self.assertEqual(waited[4:], ["current"])
            filled = refitd.FilledMemory(BYTES, lambda view: waited.append("filled"))
            trainer.register_layout([SPEC], [replace(whole(source, SPEC), memory=filled)])
            trainer.refit(4)
            self.assertEqual(waited[5:], ["all", "filled", "current"])
        server.wait_for(refitd.Committed, 4)


if __name__ == "__main__":
    unittest.main()
