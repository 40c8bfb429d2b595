"""These tests give refitd a driver and an NCCL of their own: which it loads, and what it takes from its environment."""

import os
import tempfile
import unittest

from daemon import Daemon
from refitd.v1 import operator_pb2, operator_pb2_grpc
from stub_trainer import SECONDS

DRIVER = "transport/cuda/fakes/libcuda_fake.so"
NCCL = "transport/cuda/fakes/libnccl_fake.so"


def cuda_status(daemon):
    """The entry "transport cuda" of the daemon's status."""
    with daemon.channel() as channel:
        status = operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
    return next(each for each in status.transports if each.name == "cuda")


def cuda_detail(daemon):
    return cuda_status(daemon).detail


class NcclTest(unittest.TestCase):
    def setUp(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl=false") as daemon:
            detail = cuda_detail(daemon)
        if "nvcc" in detail or "not compiled in" in detail:
            self.skipTest(detail)

    def test_status_says_which_nccl_was_loaded(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl-library", NCCL) as daemon:
            cuda = cuda_status(daemon)
        self.assertRegex(cuda.detail, r"; NCCL 2\.28\.9 from .*libnccl_fake\.so$")
        self.assertTrue(cuda.nccl.library.endswith("libnccl_fake.so"))
        self.assertEqual((cuda.nccl.version, cuda.nccl.problem, cuda.nccl.no_symmetric), ("2.28.9", "", ""))
        self.assertFalse(cuda.nccl.communicators)

    def test_an_nccl_without_symmetric_memory_says_so(self):
        environment = dict(os.environ, REFITD_FAKE_NCCL_VERSION="22005")
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl-library", NCCL, environment=environment) as daemon:
            cuda = cuda_status(daemon)
        self.assertEqual((cuda.nccl.version, cuda.nccl.no_symmetric), ("2.20.5", "it needs NCCL 2.28.7"))

    def test_a_path_that_fails_is_said_and_not_replaced(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl-library", "/nowhere/libnccl.so.2") as daemon:
            cuda = cuda_status(daemon)
        self.assertRegex(cuda.detail, r"; no NCCL: /nowhere/libnccl\.so\.2: ")
        self.assertRegex(cuda.nccl.problem, r"^/nowhere/libnccl\.so\.2: ")
        self.assertEqual((cuda.nccl.library, cuda.nccl.version), ("", ""))

    def test_it_can_be_switched_off(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl=false") as daemon:
            self.assertTrue(cuda_detail(daemon).endswith("; no NCCL: cuda.nccl is false"))

    def test_what_launchers_export_for_nccl_is_dropped_and_logged(self):
        with tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "log")
            environment = dict(os.environ, NCCL_CUMEM_ENABLE="0", NCCL_ALGO="Ring", NCCL_HOSTID="a")
            with Daemon("--cuda-enabled=false", "--log-file", log, environment=environment):
                pass
            with open(log) as written:
                text = written.read()
        self.assertIn("dropped from the environment: NCCL_ALGO=Ring, NCCL_CUMEM_ENABLE=0\n", text)
        self.assertIn("NCCL's environment has NCCL_HOSTID=a\n", text)


if __name__ == "__main__":
    unittest.main()
