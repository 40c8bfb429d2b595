"""A platform of verl's for machines without a GPU, in the way that verl's plugins add platforms. verl imports this module in every
process where VERL_USE_EXTERNAL_MODULES=verl_cpu, and takes the platform where VERL_PLATFORM=cpu."""

import contextlib
import types

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

# torch.cpu, with what verl asks a GPU for.
device_module = types.ModuleType("verl_cpu_device")
device_module.__dict__.update(vars(torch.cpu))
for _name in ("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
    setattr(device_module, _name, lambda *_: 0)
for _name in ("empty_cache", "ipc_collect", "set_device", "synchronize", "reset_peak_memory_stats"):
    setattr(device_module, _name, lambda *_: None)
device_module.mem_get_info = lambda *_: (1 << 30, 1 << 30)


@PlatformRegistry.register(platform="cpu")
class Cpu(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = device_module

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg):
        return contextlib.nullcontext()

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
