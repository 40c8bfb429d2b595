"""The calls to SGLang around sleep and waking, in their order, on an engine that notes them."""

import asyncio
import sys
import unittest
from types import ModuleType, SimpleNamespace
from unittest import mock

from refitd.errors import FailedPrecondition, InvalidArgument
from refitd.integrations.sglang import OfflineControls, Released, check
from refitd.serving import driver as lifecycle
from refitd.serving.driver import Driver
from refitd.serving import Settings

CONSTANTS = "sglang.srt.constants"
STRUCTURES = "sglang.srt.managers.io_struct"
REQUESTS = (
    "ContinueGenerationReqInput", "PauseGenerationReqInput", "ReleaseMemoryOccupationReqInput", "ResumeMemoryOccupationReqInput",
    "UpdateWeightsFromTensorReqInput",
)  # fmt: skip


def sglang_modules():
    """Stand-ins for the modules of SGLang that the adapter imports for these calls."""
    names = ("sglang", "sglang.srt", "sglang.srt.managers", CONSTANTS, STRUCTURES)
    modules = {name: ModuleType(name) for name in names}
    modules[CONSTANTS].GPU_MEMORY_TYPE_WEIGHTS = "weights"
    modules[CONSTANTS].GPU_MEMORY_ALL_TYPES = ["weights", "kv_cache", "cuda_graph"]
    for name in REQUESTS:
        setattr(modules[STRUCTURES], name, SimpleNamespace)
    return modules


class Manager:
    """Stands for SGLang's tokenizer manager, and notes its calls."""

    def __init__(self):
        self.calls = []

    def auto_create_handle_loop(self):
        pass

    def generate_request(self, *_):
        self.calls.append("generate")

    async def pause_generation(self, request):
        self.calls.append(f"pause {request.mode}")

    async def continue_generation(self, _):
        self.calls.append("continue")

    async def release_memory_occupation(self, request, _):
        self.calls.append(f"release {request.tags}")

    async def resume_memory_occupation(self, request, _):
        self.calls.append(f"resume {request.tags}")

    async def update_weights_from_tensor(self, *_):
        self.calls.append("ask")
        return True, "[]"


class Offline:
    """Stands for an offline sglang.Engine."""

    def __init__(self):
        self.tokenizer_manager = Manager()
        self.loop = SimpleNamespace(run_until_complete=asyncio.run)
        self.server_args = SimpleNamespace()

    def release_memory_occupation(self, tags=None):
        self.tokenizer_manager.calls.append(f"release {tags}")

    def resume_memory_occupation(self, tags=None):
        self.tokenizer_manager.calls.append(f"resume {tags}")


class OfflineEngine(unittest.TestCase):
    def setUp(self):
        modules = mock.patch.dict(sys.modules, sglang_modules())
        modules.start()
        self.addCleanup(modules.stop)
        self.engine = Offline()
        self.controls = OfflineControls(self.engine, "reset")
        self.driver = Driver(self.controls, Settings(group="g", instance="i"), world_size=1, clean=True, device="cpu", patient=False)
        self.driver._attach = lambda dirty: None  # there is no daemon
        self.controls.replace_sleep(self.driver)
        self.driver.start()

    @property
    def calls(self):
        """The calls since this property was read last."""
        made, self.engine.tokenizer_manager.calls = self.engine.tokenizer_manager.calls, []
        return made

    def test_a_cache_by_version_is_refused(self):
        with self.assertRaises(InvalidArgument) as caught:
            OfflineControls(self.engine, "version")
        self.assertEqual(caught.exception.culprit, "cache")

    def test_an_engine_that_wakes_without_its_weights_stays_paused(self):
        for parts in ([None], [["kv_cache"], ["weights"]]):
            with self.subTest(parts):
                self.driver.machine.clean, self.driver.machine.state = True, lifecycle.State.SERVING
                for tags in parts:
                    self.engine.release_memory_occupation(tags)
                self.assertEqual(self.calls[-len(parts) :], [f"release {tags}" for tags in parts])
                self.assertTrue(self.controls._weights_discarded)
                for tags in reversed(parts):
                    self.engine.resume_memory_occupation(tags)
                self.assertEqual(self.calls, [f"resume {tags}" for tags in reversed(parts)])
                self.assertIs(self.driver.machine.state, lifecycle.State.DIRTY)
                with self.assertRaisesRegex(FailedPrecondition, "not one whole version"):
                    self.engine.tokenizer_manager.generate_request()

    def test_an_engine_that_kept_its_weights_goes_on_when_all_of_its_memory_is_back(self):
        self.engine.release_memory_occupation(["kv_cache"])
        with self.assertRaisesRegex(FailedPrecondition, "not one whole version"):
            self.engine.tokenizer_manager.generate_request()
        self.assertEqual(self.calls, ["pause abort", "ask", "release ['kv_cache']"])
        self.engine.resume_memory_occupation(["kv_cache"])
        self.assertEqual(self.calls, ["resume ['kv_cache']", "continue"])
        self.engine.tokenizer_manager.generate_request()
        self.assertEqual(self.calls, ["generate"])

    def test_weights_that_are_backed_up_stay(self):
        self.assertEqual(Released(backed_up=True).release(None), (True, False))
        released = Released(backed_up=False)
        self.assertEqual([released.release(["kv_cache"]), released.release(["weights"])], [(True, False), (False, True)])
        self.assertEqual([released.resume(["weights"]), released.resume(["kv_cache"])], [False, True])


class Arguments(unittest.TestCase):
    def test_what_the_adapter_cannot_serve_is_refused_by_name(self):
        check(SimpleNamespace(dp_size=1, tokenizer_worker_num=1))
        for name in ("dp_size", "pp_size", "nnodes", "tokenizer_worker_num"):
            with self.assertRaisesRegex(FailedPrecondition, name):
                check(SimpleNamespace(**{name: 2}))

    def test_experts_that_are_moved_after_registration_are_refused_by_name(self):
        check(SimpleNamespace(enable_eplb=False, ep_num_redundant_experts=0, init_expert_location="trivial", elastic_ep_backend=None))
        for name, value in (("enable_eplb", True), ("ep_num_redundant_experts", 2), ("init_expert_location", "/x.json"), ("elastic_ep_backend", "nixl")):
            with self.assertRaisesRegex(FailedPrecondition, name):
                check(SimpleNamespace(**{name: value}))


if __name__ == "__main__":
    unittest.main()
