"""Regions and tensors in them, and refitd.testing itself. No member is needed."""

import faulthandler
import fcntl
import gc
import os
import pickle
import signal
import subprocess
import unittest
from unittest import mock

import refitd
from refitd._core import native
from refitd import errors, testing
from refitd.layout.memory import ALIGNMENT

try:
    import numpy
except ImportError:
    numpy = None
try:
    import torch
except ImportError:
    torch = None


def _address(tensor):
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.__array_interface__["data"][0]


class RegionTest(unittest.TestCase):
    def test_a_region_is_found_by_any_address_in_it_until_it_goes(self):
        region = refitd.Region(8192)
        pointer = region.pointer
        self.assertEqual(region[:], bytes(8192))
        for at, nbytes, found in ((0, 8192, True), (8191, 1, True), (0, 8193, False), (-1, 1, False), (8192, 1, False)):
            self.assertEqual(refitd.locate(pointer + at, nbytes) is region, found, (at, nbytes))
        view = memoryview(region)
        del region
        gc.collect()
        self.assertIsNotNone(refitd.locate(pointer, 1))  # the view keeps it
        view.release()
        gc.collect()
        self.assertIsNone(refitd.locate(pointer, 1))

    def child(self, run):
        """The status of a forked child in which `run` runs."""
        process = os.fork()
        if process == 0:
            faulthandler.disable()  # pytest's would print that the child ends
            try:
                run()
                os._exit(0)
            except BaseException:
                os._exit(7)
        return os.waitpid(process, 0)[1]

    def test_a_forked_child_shares_memory_in_both_directions_unless_it_is_told_not_to_inherit_it(self):
        shared, own = refitd.Region(8192), refitd.Region(8192, inherit=False)
        own[0] = 5

        def write():
            shared[0] = 9

        self.assertEqual((self.child(write), shared[0]), (0, 9))
        self.assertEqual(os.WTERMSIG(self.child(lambda: own[0])), signal.SIGSEGV)
        self.assertEqual((self.child(lambda: None), own[0]), (0, 5))

        def drop():
            nonlocal own
            del own  # unmaps what the child never had, and nothing else
            gc.collect()
            for _ in range(50):
                bytearray(8192)[0] = 1

        self.assertEqual(self.child(drop), 0)
        self.assertEqual(own[0], 5)

    def test_small_tensors_that_are_not_inherited_lie_apart_from_others(self):
        one, other = refitd.empty(4, "uint8", like=self.like), refitd.empty(4, "uint8", like=self.like, inherit=False)
        found = [refitd.locate(_address(tensor), 4) for tensor in (one, other)]
        self.assertEqual([region.inherit for region in found], [True, False])

    like = "torch" if torch is not None else "numpy"

    @unittest.skipIf(torch is None, "needs torch")
    def test_adopted_weights_that_are_not_inherited_end_a_child_that_touches_them(self):
        module = torch.nn.Linear(64, 64)
        region = refitd.adopt(module, inherit=False)
        self.assertFalse(region.inherit)
        self.assertEqual(os.WTERMSIG(self.child(lambda: module.weight[0, 0].item())), signal.SIGSEGV)
        self.assertEqual(self.child(lambda: torch.ones(64).sum().item()), 0)

    def test_close_does_not_unmap_what_is_used(self):
        region = refitd.Region(4096)
        region.close()
        region[0] = 1
        self.assertEqual(region[0], 1)

    def test_it_is_sealed_and_of_the_size_that_was_asked_for(self):
        region = refitd.Region(5000)
        self.assertEqual((region.nbytes, os.fstat(region.descriptor).st_size), (5000, 5000))
        with self.assertRaises(PermissionError):
            os.ftruncate(region.descriptor, 10)
        for nbytes in (0, -1):
            with self.assertRaises(refitd.InvalidArgument):
                refitd.Region(nbytes)
        with self.assertRaises(refitd.ResourceExhausted):
            refitd.Region(1 << 62)

    def test_a_memfd_that_exists_is_mapped_if_it_is_sealed(self):
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        self.addCleanup(os.close, descriptor)
        os.write(descriptor, b"weights")
        with self.assertRaisesRegex(refitd.InvalidArgument, "F_SEAL_SHRINK"):
            refitd.Region.of_memfd(descriptor)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        region = refitd.Region.of_memfd(descriptor)
        self.assertEqual(region[:], b"weights")
        self.assertIs(refitd.locate(region.pointer, 7), region)
        region[0:1] = b"W"
        self.assertEqual(os.pread(descriptor, 1, 0), b"W")
        with open("/dev/null") as null, self.assertRaisesRegex(refitd.InvalidArgument, "no memfd"):
            refitd.Region.of_memfd(null.fileno())

    @unittest.skipUnless(numpy, "needs numpy")
    def test_empty_gives_aligned_zeros_that_do_not_overlap(self):
        arrays = [refitd.empty((3, n), "float32", like="numpy") for n in (1, 2, 5, 1000, 10_000_000)]
        for i, array in enumerate(arrays):
            self.assertEqual(array.ctypes.data % ALIGNMENT, 0)
            self.assertIsNotNone(refitd.locate(array.ctypes.data, array.nbytes))
            self.assertEqual(array.sum(), 0)
            array[:] = i + 1
        self.assertEqual([int(array.max()) for array in arrays], [1, 2, 3, 4, 5])
        self.assertEqual([int(array.min()) for array in arrays], [1, 2, 3, 4, 5])
        self.assertEqual(refitd.empty(7, "int8", like="numpy").shape, (7,))
        self.assertEqual(refitd.empty((0, 3), "int64", like="numpy").shape, (0, 3))
        for arguments in (dict(shape=(-1,)), dict(shape=(1,), dtype="complex64"), dict(shape=(1,), like="jax")):
            with self.assertRaises(refitd.InvalidArgument):
                refitd.empty(**arguments)

    @unittest.skipUnless(torch, "needs torch")
    def test_adopt_moves_a_modules_memory_and_keeps_values_ties_and_strides(self):
        module = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 8, bias=False), torch.nn.BatchNorm1d(8))
        module[1].weight = torch.nn.Parameter(module[0].weight.detach().t())  # a view of the other's storage
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        region = refitd.adopt(module)
        for name, tensor in module.state_dict().items():
            self.assertTrue(torch.equal(tensor, before[name]), name)
            self.assertIs(refitd.locate(tensor.data_ptr(), tensor.nbytes), region, name)
        self.assertEqual(module[1].weight.data_ptr(), module[0].weight.data_ptr())
        self.assertEqual(module[1].weight.stride(), (1, 8))
        module[0](torch.randn(5, 8)).sum().backward()
        optimizer.step()
        self.assertIs(refitd.locate(module[0].bias.data_ptr(), 4), region)
        self.assertFalse(torch.equal(module[0].bias, before["0.bias"]))
        self.assertIsNone(refitd.adopt(module))  # it is there already

    @unittest.skipUnless(torch, "needs torch")
    def test_empty_gives_torch_tensors(self):
        tensor = refitd.empty((2, 3), torch.bfloat16)
        self.assertEqual((tensor.dtype, tensor.shape), (torch.bfloat16, (2, 3)))
        self.assertIsNotNone(refitd.locate(tensor.data_ptr(), tensor.nbytes))


class ErrorTest(unittest.TestCase):
    def test_each_status_has_its_class_and_no_field_comes_out_of_a_text(self):
        told = errors.Failure(suspects=(errors.Suspect("engine", instance="a", rank=3),), suspect_count=1, dirty=True)
        for status in refitd.Status:
            if status is refitd.Status.OK:
                continue
            error = native.error_of(status, "Refit: trainer rank 9: tensor 'w' (weights are whole)", "trainer rank 0", told)
            self.assertEqual((error.status, error.culprit, error.dirty, error.tensor), (status, "engine a rank 3", True, None))
            self.assertEqual(str(error), "trainer rank 0: Refit: trainer rank 9: tensor 'w' (weights are whole)")
            self.assertIsInstance(error, refitd.Error)
        self.assertIsInstance(native.error_of(4, ""), TimeoutError)
        self.assertIsInstance(native.error_of(3, ""), ValueError)
        self.assertEqual(native.error_of(77, "?").status, refitd.Status.UNKNOWN)
        forged = native.error_of(10, "lost: tensor 'w' of engine a rank 0 (weights are dirty: instance a)")
        self.assertEqual((forged.culprit, forged.dirty, forged.suspects, forged.tensor), (None, None, (), None))

    def test_a_culprit_is_the_tensor_else_a_suspect_else_the_field(self):
        suspects = (errors.Suspect("trainer", rank=1), errors.Suspect("daemon", daemon="d"))
        self.assertEqual(errors.Failure(suspects=suspects, tensor="w", field="f").culprit, "tensor 'w'")
        self.assertEqual(errors.Failure(suspects=suspects, field="f").culprit, "trainer rank 1")
        self.assertEqual(errors.Failure(field="f").culprit, "f")
        self.assertIsNone(errors.Failure().culprit)
        self.assertEqual(str(suspects[1]), "daemon d")
        self.assertEqual(str(errors.Suspect("engine", instance="a")), "instance a")
        self.assertEqual(refitd.Error("x", tensor="w").culprit, "tensor 'w'")
        self.assertEqual(refitd.Error("x", tensor="w", culprit="module 'm'").culprit, "module 'm'")

    def test_a_message_keeps_nothing_that_a_terminal_obeys(self):
        error = refitd.InvalidArgument("tensor 'w\x1b[2J\x9b\u202e' of a hostile index\nsecond line")
        self.assertEqual(str(error), "tensor 'w\\x1b[2J\\x9b\\u202e' of a hostile index\nsecond line")
        told = native.error_of(10, "one\ntwo\r\u2066")
        self.assertEqual(str(told), "one\\ntwo\\r\\u2066")
        self.assertEqual(str(refitd.Error("é 漢 plain")), "é 漢 plain")

    def test_errors_cross_processes_with_their_fields(self):
        error = refitd.UpdateAborted("lost", dirty=True, dirty_instances=["a"], suspects=[errors.Suspect("trainer", rank=2)], version=4)
        there = pickle.loads(pickle.dumps(error))
        self.assertEqual(vars(there), vars(error))
        self.assertEqual((there.culprit, there.dirty_count, str(there)), ("trainer rank 2", 1, "lost"))


class TestingTest(unittest.TestCase):
    def test_a_daemon_runs_is_asked_and_stops(self):
        with testing.daemon("--daemon-id=mine") as daemon:
            pid = daemon.process.pid
            self.assertIn("mine", daemon.control("--output", "json", "status"))
            folder = daemon.folder
            daemon.kill()
            daemon.start()
        self.assertFalse(os.path.exists(folder))
        with self.assertRaises(ProcessLookupError):
            os.kill(pid, 0)

    def test_a_daemon_that_ends_says_why(self):
        with self.assertRaisesRegex(refitd.Unavailable, "no-such-flag"):
            testing.Daemon(["--no-such-flag"])

    def test_a_daemon_ends_with_its_process_even_if_that_is_killed(self):
        import sys

        code = "import refitd.testing, os, signal; d = refitd.testing.Daemon(); print(d.process.pid, d.folder, flush=True); os.kill(os.getpid(), 9)"
        output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.split()
        from support import wait_until

        wait_until(lambda: not os.path.exists(f"/proc/{output[0]}") or _zombie(output[0]), "the daemon ended")
        import shutil

        shutil.rmtree(output[1])

    def test_pytest_has_a_fixture(self):
        import sys
        import tempfile

        test = "import refitd\ndef test_it(refitd_daemon):\n    refitd.Trainer('g', socket=refitd_daemon.socket).close()\n"
        with tempfile.TemporaryDirectory() as folder:
            with open(os.path.join(folder, "test_fixture.py"), "w") as file:
                file.write(test)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "refitd.pytest_plugin", folder]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.assertIn("1 passed", ran.stdout, ran.stdout + ran.stderr)

    def test_a_missing_binary_is_named(self):
        with mock.patch.dict(os.environ, REFITD_BINARY="/nonexistent/refitd"):
            with self.assertRaisesRegex(FileNotFoundError, "/nonexistent/refitd"):
                testing.program("refitd")

    def test_importing_refitd_imports_neither_torch_nor_numpy(self):
        import sys

        code = "import refitd, refitd.aio, refitd.testing, sys; assert not {'torch', 'numpy'} & set(sys.modules), sys.modules"
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def _zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


if __name__ == "__main__":
    unittest.main()
