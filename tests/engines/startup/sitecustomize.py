"""Python loads this at its start where this folder is in PYTHONPATH, also in the processes that an engine starts.

REFITD_ENGINES_UNPINNED: torch leaves memory unpinned that is asked for as pinned. SGLang's LoRA layers ask for it whatever the device, and a
machine without a GPU does not have it.
REFITD_ENGINES_REPACKED: SGLang's linear layers have kernels that read their rows in reverse, into which post-processing brings them. SGLang itself
post-processes nothing on a CPU without AMX.
REFITD_ENGINES_BLOCKS: vLLM and SGLang have a kernel for FP8 weights in blocks on every CPU, which reads them as their kernels on GPUs do; their own
need AMX, and prepack. Experts have such a kernel too: vLLM's in place of its Triton kernel, for scales of channels as well. vLLM quantises gate and up
of experts by channels with a kernel that its build for CPUs lacks; torch's operations stand for it. "swapped": the kernel of vLLM's experts takes the
place of FlashInfer's instead, for which vLLM brings up before gate.
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
    if len(scales) != len(weight):  # of blocks, not of channels
        scales = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
    return given.float() @ (weight.float() * scales).T


def computed_by_experts(given, weights, scales, ids, shares, expert_map=None, swapped=False):
    """What the experts of this rank compute together. `weights`, `scales`: of gate and up, `swapped` of up and gate; and of down. `expert_map`: by expert,
    which of this rank's it is."""
    import torch

    made = torch.zeros(given.shape, dtype=torch.float32)
    for local in range(len(weights[0])):
        expert = local if expert_map is None else int((expert_map == local).nonzero())
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = multiplied(given[token], weights[0][local], scales[0][local]).chunk(2, -1)[:: -1 if swapped else 1]
        down = multiplied(torch.nn.functional.silu(gate) * up, weights[1][local], scales[1][local])
        made.index_add_(0, token, down * shares[token, slot][:, None])
    return made.to(given.dtype)


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


def add_experts_kernel(oracle):
    from vllm.model_executor.layers.fused_moe import modular_kernel
    from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import TopKWeightAndReduceNoOP

    def supports(*_):
        return True

    class Experts(modular_kernel.FusedMoEExpertsModular):
        expects_unquantized_inputs = True
        activation_format = staticmethod(lambda: modular_kernel.FusedMoEActivationFormat.Standard)
        _supports_current_device = _supports_quant_scheme = _supports_activation = _supports_parallel_config = staticmethod(supports)
        _supports_no_act_and_mul = staticmethod(lambda: False)

        def workspace_shapes(self, M, N, K, *_):
            return (0,), (0,), (M, K)

        def finalize_weight_and_reduce_impl(self):
            return TopKWeightAndReduceNoOP()

        def apply(self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, **_):
            scales = (self.w1_scale, self.w2_scale)
            output.copy_(computed_by_experts(hidden_states, (w1, w2), scales, topk_ids, topk_weights, expert_map, swapped))

    swapped = os.environ["REFITD_ENGINES_BLOCKS"] == "swapped"
    replaced = oracle.Fp8MoeBackend.FLASHINFER_CUTLASS if swapped else oracle.Fp8MoeBackend.TRITON
    others = oracle.backend_to_kernel_cls
    oracle.backend_to_kernel_cls = lambda backend: [Experts] if backend is replaced else others(backend)


def quantise_by_tokens(ops):
    import torch

    others = ops.scaled_fp8_quant

    def scaled_fp8_quant(given, scale=None, *arguments, use_per_token_if_dynamic=False, **options):
        if scale is not None or not use_per_token_if_dynamic:
            return others(given, scale, *arguments, use_per_token_if_dynamic=use_per_token_if_dynamic, **options)
        greatest = torch.tensor(448.0)
        scales = (given.float().abs().amax(-1, keepdim=True) / greatest).clamp_min(1 / (greatest * 512))
        return (given.float() / scales).clamp(-448, 448).to(torch.float8_e4m3fn), scales

    ops.scaled_fp8_quant = scaled_fp8_quant


def set_block_kernel(fp8):
    def kernel(input, weight, block_size, weight_scale, input_scale=None, bias=None):
        made = multiplied(input, weight, weight_scale)
        return (made if bias is None else made + bias).to(input.dtype)

    def apply(self, layer, dispatch_output):
        from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

        shares, ids, _ = dispatch_output.topk_output
        scales = (layer.w13_weight_scale_inv, layer.w2_weight_scale_inv)
        made = computed_by_experts(dispatch_output.hidden_states, (layer.w13_weight, layer.w2_weight), scales, ids, shares)
        return StandardCombineInput(hidden_states=made)

    fp8._is_cpu = False  # else the weights are prepacked for AMX
    fp8.dispatch_w8a8_block_fp8_linear = lambda **options: kernel
    fp8.Fp8MoEMethod.apply = apply


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
    sys.meta_path.insert(0, After("vllm.model_executor.layers.fused_moe.oracle.fp8", add_experts_kernel))
    sys.meta_path.insert(0, After("vllm._custom_ops", quantise_by_tokens))
    sys.meta_path.insert(0, After("sglang.srt.layers.quantization.fp8", set_block_kernel))
if os.environ.get("REFITD_ENGINES_PLANT"):
    sys.meta_path.insert(0, After("refitd.integrations.sglang", plant))
