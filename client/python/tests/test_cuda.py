"""torch's GPU memory over a real daemon. Needs a GPU: skipped elsewhere."""

import os
import subprocess
import sys
import unittest
import warnings

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import refitd
import refitd.layout.cuda
from support import DaemonTest, Server

EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


class CudaTest(DaemonTest):
    flags = ("--slot-bytes=4194304", "--staging-slots=4")
    device = None

    def setUp(self):
        super().setUp()
        torch.zeros(1, device="cuda")
        self.gpu = refitd.layout.cuda.device_uuid(0)

    def served(self, tensors):
        engine = self.engine(device=self.gpu)
        engine.register(tensors)
        return Server(self, engine)

    def test_members_are_on_the_gpu_that_torch_uses_where_nothing_else_is_said(self):
        self.assertEqual(self.trainer().device, self.gpu)
        self.assertEqual(self.engine().device, self.gpu)

    def test_memory_is_of_the_kind_that_this_run_is_about(self):
        pointer = torch.empty(1 << 20, device="cuda").data_ptr()
        with refitd.layout.cuda.driver().current(0):
            self.assertEqual(refitd.layout.cuda.driver().allocation(pointer).legacy, not EXPANDABLE)

    def test_a_refit_of_tensors_small_large_and_strided(self):
        shapes = {"small": (3, 5), "large": (6000, 5000), "row": (1,), "wide": (16, 1 << 20)}
        for dtype in (torch.float32, torch.bfloat16):
            self.group = f"g-{dtype}".replace("torch.", "")
            source = {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}
            source["transposed"] = torch.randn(300, 500, device="cuda").to(dtype).t()
            source["slice"] = torch.randn(300, 500, device="cuda").to(dtype)[7:100, 3:80]
            target = {name: torch.empty(tensor.shape, dtype=dtype, device="cuda") for name, tensor in source.items()}
            trainer = self.trainer()
            self.assertEqual(trainer.device, self.gpu)
            trainer.register(source)
            self.served(target)
            for version in (1, 2):
                for tensor in source.values():
                    tensor.add_(version)  # the refit waits for this work
                result = trainer.refit(version)
                self.assertEqual((result.rebound, result.staged_bytes), (0, 0))
                for name, tensor in source.items():
                    self.assertTrue(torch.equal(tensor, target[name]), name)

    def test_a_cast_on_the_gpu(self):
        module = torch.nn.Linear(1000, 3000, device="cuda")
        target = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in module.state_dict().items()}
        trainer = self.trainer()
        self.served(target)
        for version, staging in enumerate(("whole", "push")):
            trainer.register(module, dtype=torch.bfloat16, staging=staging)
            with torch.no_grad():
                module.weight.add_(1)
            trainer.refit(version)
            for name, tensor in module.state_dict().items():
                self.assertTrue(torch.equal(tensor.bfloat16(), target[name]), (staging, name))

    def test_memory_that_moved_is_bound_anew(self):
        module = torch.nn.Linear(1000, 1000, device="cuda")
        target = {name: torch.empty_like(tensor) for name, tensor in module.state_dict().items()}
        trainer = self.trainer()
        trainer.register(module)
        self.served(target)
        self.assertEqual(trainer.refit(1).rebound, 0)
        module.weight.data = torch.randn(1000, 1000, device="cuda")
        self.assertEqual(trainer.refit(2).rebound, 1)
        self.assertTrue(torch.equal(module.weight, target["weight"]))
        self.assertEqual(trainer.refit(3).rebound, 0)

    def test_parameters_that_were_replaced_are_followed(self):
        module = torch.nn.Linear(1000, 1000, device="cuda")
        target = {name: torch.empty_like(tensor, dtype=torch.bfloat16) for name, tensor in module.state_dict().items()}
        trainer = self.trainer()
        self.served(target)
        for version, staging in ((1, "whole"), (11, "push")):
            trainer.register(module, dtype=torch.bfloat16, staging=staging)
            self.assertEqual(trainer.refit(version).rebound, 0)
            module.load_state_dict({name: tensor + 1 for name, tensor in module.state_dict().items()}, assign=True)
            self.assertEqual(trainer.refit(version + 1).rebound, 2)
            module.to("cpu").to("cuda")
            with torch.no_grad():
                module.bias.add_(1)
            trainer.refit(version + 2)
            for name, tensor in module.state_dict().items():
                self.assertTrue(torch.equal(tensor.bfloat16(), target[name]), (staging, name))
            self.assertEqual(trainer.refit(version + 3).rebound, 0)

    def test_pushes_of_gpu_and_host_tensors_reach_registered_parameters(self):
        source = {"a": torch.randn(3000, 1000, device="cuda"), "b": torch.randn(7, 9, device="cuda").t(), "c": torch.randn(100)}
        target = {name: torch.empty(tensor.shape, device="cuda") for name, tensor in source.items()}
        trainer = self.trainer()
        self.served(target)
        with trainer.update(1) as update:
            for name, tensor in source.items():
                update.push(name, tensor)
        for name, tensor in source.items():
            self.assertTrue(torch.equal(tensor.cuda(), target[name]), name)

    def test_staged_parts_are_gpu_tensors(self):
        source = {"large": torch.randn(3000, 1000, device="cuda"), "small": torch.randn(10, device="cuda")}
        got = {}
        joiner = refitd.Joiner()

        def load(part):
            for view in joiner.add(part):
                got[view.name] = view.torch().clone()
            torch.cuda.synchronize()

        trainer = self.trainer()
        Server(self, self.engine(device=self.gpu, loader=True), load)
        with trainer.update(1, tensor_count=2) as update:
            for name, tensor in source.items():
                update.push(name, tensor)
        for name, tensor in source.items():
            self.assertTrue(torch.equal(tensor, got[name]), name)

    def test_tensors_on_the_host_are_refused_by_name(self):
        trainer = self.trainer()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is staged
            with self.assertRaisesRegex(refitd.InvalidArgument, "'w' of trainer rank 0 .* is in host memory"):
                trainer.register({"w": torch.zeros(3)})

    def test_device_memory_returns(self):
        """Regions are given back with the registration that made them, so that torch's blocks can be freed."""

        def use():
            self.group += "x"
            trainer = refitd.Trainer(self.group, socket=self.daemon.socket)
            trainer.register({"w": torch.randn(64 << 20, device="cuda")})
            trainer.register_layout([], [])
            trainer.close()

        use()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        for _ in range(5):
            use()
            torch.cuda.empty_cache()
        self.assertGreaterEqual(torch.cuda.mem_get_info()[0], free - (4 << 20))


@unittest.skipIf(EXPANDABLE, "this is that run")
class ExpandableSegmentsTest(unittest.TestCase):
    def test_everything_above_with_expandable_segments(self):
        environment = dict(os.environ, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
        self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)


if __name__ == "__main__":
    unittest.main()
