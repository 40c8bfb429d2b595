"""refitd with a driver and an NCCL that are not the machine's: which it loads, and what it takes from its environment."""

import os
import tempfile
import unittest

from daemon import Daemon
from refitd.v1 import operator_pb2, operator_pb2_grpc
from stub_trainer import SECONDS

DRIVER = "transport/cuda/libcuda_fake.so"
NCCL = "transport/cuda/libnccl_fake.so"


def cuda_detail(daemon):
    """What status says under "transport cuda"."""
    with daemon.channel() as channel:
        status = operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
    return next(each.detail for each in status.transports if each.name == "cuda")


class NcclTest(unittest.TestCase):
    def setUp(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl=false") as daemon:
            detail = cuda_detail(daemon)
        if "nvcc" in detail or "not compiled in" in detail:
            self.skipTest(detail)

    def test_status_says_which_nccl_was_loaded(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl-library", NCCL) as daemon:
            self.assertRegex(cuda_detail(daemon), r"; NCCL 2\.28\.9 from .*libnccl_fake\.so$")

    def test_a_path_that_fails_is_said_and_not_replaced(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl-library", "/nowhere/libnccl.so.2") as daemon:
            self.assertRegex(cuda_detail(daemon), r"; no NCCL: /nowhere/libnccl\.so\.2: ")

    def test_it_can_be_switched_off(self):
        with Daemon("--cuda-library", DRIVER, "--cuda-nccl=false") as daemon:
            self.assertTrue(cuda_detail(daemon).endswith("; no NCCL: cuda.nccl is false"))

    def test_what_launchers_export_for_nccl_is_dropped_and_logged(self):
        with tempfile.TemporaryDirectory() as folder:
            log = os.path.join(folder, "log")
            environment = dict(os.environ, NCCL_CUMEM_ENABLE="0", NCCL_ALGO="Ring", NCCL_HOSTID="a")
            with Daemon("--cuda=false", "--log-file", log, environment=environment):
                pass
            with open(log) as written:
                text = written.read()
        self.assertIn("dropped from the environment: NCCL_ALGO=Ring, NCCL_CUMEM_ENABLE=0\n", text)
        self.assertIn("NCCL's environment has NCCL_HOSTID=a\n", text)


if __name__ == "__main__":
    unittest.main()
