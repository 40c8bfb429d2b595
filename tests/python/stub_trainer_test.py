"""A trainer made of nothing but the generated stub and inline bytes, against the real daemon and real engines.

The engines are client/examples/engine_example: each computes what every version must hold and checks its own memory.
"""

import subprocess
import sys
import unittest

import grpc

from daemon import Daemon
from refitd.v1 import types_pb2
from stub_trainer import MODEL, SECONDS, StubTrainer, elements, new_bucket, packed, part, tensor_bytes, unpacked


class StubTrainerTest(unittest.TestCase):
    def start_engine(self, socket, instance, versions, *mode):
        engine = subprocess.Popen(
            ["client/examples/engine_example", socket, "policy", instance, str(versions), *mode]
        )
        self.addCleanup(engine.wait)
        self.addCleanup(engine.kill)
        return engine

    def test_versions_pushed_by_the_stub_alone_reach_registered_and_staged_engines(self):
        with Daemon() as daemon, daemon.channel() as channel:
            trainer = StubTrainer(channel, "policy", instances=2)
            engines = [
                self.start_engine(daemon.socket, "in_place", 3),
                self.start_engine(daemon.socket, "loader", 3, "loader"),
            ]
            total = sum(elements(shape) * size for _, _, shape, size in MODEL)
            plans = {
                1: [unpacked(0, 1, [0, 1, 2, 3])],
                2: [packed(0, 2, [3, 2]), packed(1, 2, [1, 0])],
                3: [part(0, 3, 0, 0, 10_000), unpacked(1, 3, [1, 2, 3]), part(2, 3, 0, 10_000, 20_720)],
            }
            for version, buckets in plans.items():
                self.assertEqual(trainer.begin(version).instances, 2)
                for bucket in buckets:
                    trainer.push(version, bucket)
                result = trainer.commit(version, len(buckets))
                self.assertEqual(result.version, version)
                self.assertEqual(result.bytes, total)
                self.assertEqual([i.committed for i in result.instances], [True, True])
            for engine in engines:
                self.assertEqual(engine.wait(timeout=SECONDS), 0)
            trainer.detach()

    def test_a_malformed_bucket_is_refused_by_name_and_the_update_goes_on(self):
        with Daemon() as daemon, daemon.channel() as channel:
            trainer = StubTrainer(channel, "policy", instances=1)
            engine = self.start_engine(daemon.socket, "in_place", 1)
            trainer.begin(1)
            bad = unpacked(0, 1, [0, 1, 2, 3])
            bad.shapes[1].dims[0] = 97
            with self.assertRaises(grpc.RpcError) as refused:
                trainer.push(1, bad)
            self.assertEqual(refused.exception.code(), grpc.StatusCode.INVALID_ARGUMENT)
            self.assertIn("layer.weight", refused.exception.details())
            self.assertIn("15520", refused.exception.details())
            trainer.push(1, unpacked(0, 1, [0, 1, 2, 3]))
            trainer.commit(1, 1)
            self.assertEqual(engine.wait(timeout=SECONDS), 0)
            trainer.detach()

    def test_an_unknown_tensor_and_a_call_without_lease_are_refused(self):
        with Daemon() as daemon, daemon.channel() as channel:
            trainer = StubTrainer(channel, "policy", instances=1)
            self.start_engine(daemon.socket, "in_place", 1)
            trainer.begin(1)
            stranger = new_bucket(0, [2])
            stranger.names[0] = "layer.stranger"
            stranger.inline_bytes.chunks.append(tensor_bytes(1, 2))
            with self.assertRaises(grpc.RpcError) as refused:
                trainer.push(1, stranger)
            self.assertEqual(refused.exception.code(), grpc.StatusCode.FAILED_PRECONDITION)
            self.assertIn("layer.stranger", refused.exception.details())

            trainer.lease = types_pb2.Lease(
                token=b"\0" * 16, incarnation=trainer.lease.incarnation, protocol=types_pb2.PROTOCOL_VERSION_1
            )
            with self.assertRaises(grpc.RpcError) as refused:
                trainer.push(1, unpacked(0, 1, [2]))
            self.assertIn(
                refused.exception.code(), (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
            )
            trainer.detach()

    def test_generated_stubs_and_the_installed_package_collided(self):
        """Both are named refitd: whichever folder came first on sys.path, one of them was not found."""
        for path in ("client/python:proto", "proto:client/python"):
            program = "import refitd, refitd.v1.trainer_pb2_grpc as stubs; print(refitd.Trainer, stubs.TrainerStub)"
            done = subprocess.run(
                [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, timeout=SECONDS,
                check=False)
            self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
