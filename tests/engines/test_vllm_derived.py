"""Derived tensors have the bits of vLLM's own online quantisation, as it runs on a CPU. REFITD_DERIVED_ELEMENTS: how many elements of a kind are
compared, 2^25 by default."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import refitd
import torch

ELEMENTS = int(os.environ.get("REFITD_DERIVED_ELEMENTS", 1 << 25))
SHAPE = (2048, 2048)


def weights(seed: int) -> torch.Tensor:
    """Weights as a model has them; of very different sizes, some too small for a scale of their own; ties and powers of two."""
    made = torch.Generator().manual_seed(seed)
    if seed % 3 == 0:
        return torch.randn(SHAPE, generator=made) * 0.02
    if seed % 3 == 1:
        sizes = torch.exp2(torch.randint(-40, 8, (SHAPE[0] // 128, 1), generator=made).float())
        return torch.randn(SHAPE, generator=made) * sizes.repeat_interleave(128, 0)
    halves = torch.randint(-63, 64, SHAPE, generator=made).float() / 32
    halves[:128, :256] = 0
    return halves * torch.exp2(torch.randint(-30, 5, SHAPE, generator=made).float())


def in_blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    values, scales = per_block_cast_to_fp8(weight)
    return values, scales


def by_channels(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.online.fp8")
    if not hasattr(fp8, "_fp8_quant_per_channel"):
        pytest.skip("this vLLM does not quantise online by channels")
    scales = fp8._fp8_channel_scale(fp8.weight_amax(weight, dim=-1, keepdim=True))
    return fp8._fp8_quant_per_channel(weight, scales), scales


def serve(engine: refitd.Engine) -> None:
    for event in engine:
        if isinstance(event, refitd.Prepare):
            event.ready()


@pytest.mark.parametrize("kind,scales,quantise", [("fp8_block", (16, 16), in_blocks), ("fp8_channel", (2048, 1), by_channels)])
def test_values_and_scales_have_the_bits_of_vllm(
    kind: str, scales: tuple[int, int], quantise: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], daemon: Any
) -> None:
    pytest.importorskip("vllm")
    weight = refitd.empty(SHAPE, torch.bfloat16, like="torch")
    served = {"w.q": refitd.empty(SHAPE, torch.float8_e4m3fn, like="torch"), "w.s": refitd.empty(scales, torch.float32, like="torch")}
    source = refitd.TensorSpec("w", "bfloat16", SHAPE)
    with refitd.Trainer("g", socket=daemon.socket, device="host") as trainer, refitd.Engine(
        "g", instance="i", socket=daemon.socket, device="host"
    ) as engine:
        trainer.register({"w": weight})
        engine.register(served, derived={"w.q": refitd.Derived(source, kind), "w.s": refitd.Derived(source, kind, "scales")})
        thread = threading.Thread(target=serve, args=(engine,))
        thread.start()
        try:
            for version in range(1, max(1, ELEMENTS // weight.numel()) + 1):
                weight.copy_(weights(version))
                trainer.refit(version)
                expected = dict(zip(("w.q", "w.s"), quantise(weight)))
                for name, tensor in expected.items():
                    different = served[name].view(torch.uint8) != tensor.contiguous().view(torch.uint8)
                    assert not different.any(), (version, name, int(different.sum()))
        finally:
            engine.close()
            thread.join()
