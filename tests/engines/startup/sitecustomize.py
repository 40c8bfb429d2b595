"""Python loads this at its start where this folder is in PYTHONPATH, also in the processes that an engine starts.

REFITD_ENGINES_UNPINNED: torch leaves memory unpinned that is asked for as pinned. SGLang's LoRA layers ask for it whatever the device, and a
machine without a GPU does not have it.
REFITD_ENGINES_REPACKED: SGLang's linear layers have kernels that read their rows in reverse, into which post-processing brings them. SGLang itself
post-processes nothing on a CPU without AMX.
REFITD_ENGINES_BLOCKS: vLLM and SGLang have a kernel for FP8 weights in blocks on every CPU, which reads them as their kernels on GPUs do; their own
need AMX, and prepack.
REFITD_ENGINES_PLANT: JSON {name: arguments} of defects that are planted into SGLang's model (engine_program.PLANTS) before its rank attaches.
"""

import importlib.abc
import importlib.util
import json
import os
import sys


def unpinned(make):
    return lambda *arguments, pin_memory=False, **options: make(*arguments, **options)


def unpin(torch):
    for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *arguments: self


def repack(unquant):
    from torch.nn import Parameter

    method = unquant.UnquantizedLinearMethod
    apply = method.apply

    def process(self, layer):
        repacked = Parameter(layer.weight.data.flip(0), requires_grad=False)
        repacked.__dict__.update(layer.weight.__dict__)
        layer.weight = repacked

    def apply_repacked(self, layer, x, bias=None):
        made = apply(self, layer, x).flip(-1)
        return made if bias is None else made + bias

    method.process_weights_after_loading, method.apply = process, apply_repacked


def multiplied(given, weight, scales):
    wide = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return given.float() @ (weight.float() * wide).T


def add_block_kernel(linear):
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.platforms import PlatformEnum

    class Kernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def apply_block_scaled_mm(self, A, B, As, Bs):
            return multiplied(A, B, Bs)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU].append(Kernel)


def set_block_kernel(fp8):
    def kernel(input, weight, block_size, weight_scale, input_scale=None, bias=None):
        made = multiplied(input, weight, weight_scale)
        return (made if bias is None else made + bias).to(input.dtype)

    fp8._is_cpu = False  # else the weights are prepacked for AMX
    fp8.dispatch_w8a8_block_fp8_linear = lambda **options: kernel


def plant(adapter):
    made = adapter.Backend.__init__

    def make_planted(backend, runner):
        from engine_program import PLANTS

        made(backend, runner)
        for name, arguments in json.loads(os.environ["REFITD_ENGINES_PLANT"]).items():
            PLANTS[name](runner.model, *arguments)

    adapter.Backend.__init__ = make_planted


class After(importlib.abc.MetaPathFinder):
    """Calls `change` with the module `name` when it was imported."""

    def __init__(self, name, change):
        self._name, self._change = name, change

    def find_spec(self, name, path, target=None):
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            self._change(module)

        spec.loader.exec_module = exec_module
        return spec


if os.environ.get("REFITD_ENGINES_UNPINNED"):
    sys.meta_path.insert(0, After("torch", unpin))
if os.environ.get("REFITD_ENGINES_REPACKED"):
    sys.meta_path.insert(0, After("sglang.srt.layers.quantization.unquant", repack))
if os.environ.get("REFITD_ENGINES_BLOCKS"):
    sys.meta_path.insert(0, After("vllm.model_executor.kernels.linear", add_block_kernel))
    sys.meta_path.insert(0, After("sglang.srt.layers.quantization.fp8", set_block_kernel))
if os.environ.get("REFITD_ENGINES_PLANT"):
    sys.meta_path.insert(0, After("refitd.integrations.sglang", plant))
