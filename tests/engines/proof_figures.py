"""Measures the forward proof (refitd.serving.proof) of models of plain torch modules with random weights, on a GPU or a CPU. No engine, no daemon.

usage: PYTHONPATH=client/python python tests/engines/proof_figures.py [--layers N] [--device cuda] [--models qwen3-30b-a3b,dense-8b]

Prints a line of JSON for each model: its parameters, seconds of the perturbation and of each delivery, both scaled to all of the model's
layers, and the same with planted defects, which must be found. Needs torch, and no transformers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from refitd.layout import TensorSpec
from refitd.layout.memory import digest
from refitd.serving import proof
from torch import nn
from torch.nn import functional as F

# hidden, layers, heads, KV heads, head dim, feed-forward, experts, chosen, vocabulary
SHAPES = {
    "qwen3-30b-a3b": (2048, 48, 32, 4, 128, 768, 128, 8, 151936),
    "dense-8b": (4096, 36, 32, 8, 128, 12288, 0, 0, 151936),
    "tiny-moe": (128, 4, 4, 2, 32, 64, 16, 4, 512),
}


class Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, kv: int, dim: int) -> None:
        super().__init__()
        self.sizes, self.dim = (heads * dim, kv * dim, kv * dim), dim
        self.qkv_proj = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.q_norm, self.k_norm = Norm(dim), Norm(dim)
        self.o_proj = nn.Linear(heads * dim, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.view(len(x), -1, self.dim) for part in self.qkv_proj(x).split(self.sizes, -1))
        q, k, v = (part.transpose(0, 1)[None] for part in (self.q_norm(q), self.k_norm(k), v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed[0].transpose(0, 1).reshape(len(x), -1))


class Gated(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden, 2 * wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Any) -> Any:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Experts(nn.Module):
    def __init__(self, hidden: int, wide: int, count: int) -> None:
        super().__init__()
        self.w13_weight = nn.Parameter(torch.empty(count, 2 * wide, hidden))
        self.w2_weight = nn.Parameter(torch.empty(count, hidden, wide))

    def forward(self, x: Any, index: Any, share: Any) -> Any:
        # All pairs of a token and an expert at once, as a fused kernel has them.
        gate, up = (self.w13_weight[index] @ x[:, None, :, None]).squeeze(-1).chunk(2, -1)
        out = (self.w2_weight[index] @ (F.silu(gate) * up)[..., None]).squeeze(-1)
        return (share[..., None] * out).sum(1)


class Mixture(nn.Module):
    def __init__(self, hidden: int, wide: int, count: int, chosen: int) -> None:
        super().__init__()
        self.top_k = chosen
        self.gate = nn.Linear(hidden, count, bias=False)
        self.experts = Experts(hidden, wide, count)

    def forward(self, x: Any) -> Any:
        share, index = self.gate(x).softmax(-1).topk(self.top_k)
        return self.experts(x, index, share)


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        hidden, _, heads, kv, dim, wide, count, chosen, _ = shape
        self.input_layernorm, self.post_attention_layernorm = Norm(hidden), Norm(hidden)
        self.self_attn = Attention(hidden, heads, kv, dim)
        self.mlp = Mixture(hidden, wide, count, chosen) if count else Gated(hidden, wide)

    def forward(self, x: Any) -> Any:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    def __init__(self, shape: tuple[int, ...], layers: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape[-1], shape[0])
        self.layers = nn.ModuleList(Layer(shape) for _ in range(layers))
        self.norm = Norm(shape[0])
        self.lm_head = nn.Linear(shape[0], shape[-1], bias=False)

    def forward(self, ids: Any) -> Any:
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def checkpoint(model: Model) -> tuple[list[TensorSpec], list[tuple[int, str, tuple[int, ...]]]]:
    """The checkpoint's tensors, one for each expert and half; and by tensor the parameter and the part of it, as index of expert and rows."""
    specs: list[TensorSpec] = []
    places: list[tuple[int, str, tuple[int, ...]]] = []
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            specs.append(TensorSpec(name, "bfloat16", tuple(parameter.shape)))
            places.append((len(specs) - 1, name, ()))
            continue
        halves = 2 if "w13" in name else 1
        rows = parameter.shape[1] // halves
        for e in range(parameter.shape[0]):
            for half in range(halves):
                specs.append(TensorSpec(f"{name}.{e}.{half}", "bfloat16", (rows, parameter.shape[2])))
                places.append((len(specs) - 1, name, (e, half * rows, rows)))
    return specs, places


def boxes_of(model: Model, specs: list[TensorSpec], places: list[tuple[int, str, tuple[int, ...]]]) -> list[Any]:
    from refitd.layout import devices
    from refitd.layout import Box

    named = dict(model.named_parameters())
    memories = {
        name: devices.memory_at(t.device, t.data_ptr(), t.nbytes, t, name, t.data_ptr, what=name) for name, t in named.items()
    }
    boxes = []
    for index, name, part in places:
        parameter, shape = named[name], tuple(specs[index].shape)
        first = (part[0] * parameter.stride(0) + part[1] * parameter.stride(1)) * parameter.element_size() if part else 0
        boxes.append(Box(index, (0,) * len(shape), shape, tuple(parameter.stride())[-len(shape) :], memories[name], first))
    return boxes


def timed(call: Callable[[], Any], device: str) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    if device != "cpu":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def plant(model: Model, kind: str) -> str:
    """Plants a defect into the last layer; returns the parameter or module that must be found."""
    number = len(model.layers) - 1
    attention = model.layers[number].self_attn
    mlp = model.layers[number].mlp
    if kind == "copy":
        layer, kept = attention.o_proj, []

        def forward(x: Any) -> Any:
            kept.append(layer.weight.detach().clone()) if not kept else None
            return F.linear(x, kept[0])

        layer.forward = forward
        return f"layers.{number}.self_attn.o_proj.weight"
    experts = mlp.experts
    original, one = experts.w2_weight, 3
    copied = original.detach()[one].clone()

    def forward_experts(x: Any, index: Any, share: Any) -> Any:
        now = experts.w2_weight.data[one].clone()
        experts.w2_weight.data[one] = copied
        try:
            return Experts.forward(experts, x, index, share)
        finally:
            experts.w2_weight.data[one] = now

    experts.forward = forward_experts
    return f"layers.{number}.mlp.experts.w2_weight"


def measure(name: str, layers: int, device: str) -> dict[str, Any]:
    shape = SHAPES[name]
    count = min(layers or shape[1], shape[1])
    with torch.device(device):
        previous = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device("meta"):
                model = Model(shape, count)
        finally:
            torch.set_default_dtype(previous)
        model.to_empty(device=device)
    model.requires_grad_(False)
    specs, places = checkpoint(model)
    boxes = boxes_of(model, specs, places)
    tokens = proof.tokens_for(model)
    ids = proof.token_ids(shape[-1], tokens, device)
    probe = proof.Probe(lambda: model(ids), tokens)
    names = [key for key, _ in model.named_parameters()]
    source = lambda seed: lambda spec: proof.values(spec, seed, device)  # noqa: E731
    _, delivered = timed(lambda: proof.deliver(specs, boxes, source(1)), device)
    before = {key: digest(tensor) for key, tensor in model.named_parameters()}
    prover, recorded = timed(lambda: proof.Prover(model, probe, names), device)
    found, perturbed = timed(prover.perturb, device)
    assert not found.failed and not found.unproved and len(found.proved) == len(names), found.summary()
    assert before == {key: digest(tensor) for key, tensor in model.named_parameters()}, "a parameter was not put back"
    proof.deliver(specs, boxes, source(2))
    ours, state = timed(prover.states, device)

    def load() -> None:
        named = dict(model.named_parameters())
        for index, key, part in places:
            tensor = proof.values(specs[index], 2, device)
            (named[key] if not part else named[key][part[0], part[1] : part[1] + part[2]]).copy_(tensor)

    _, loaded = timed(load, device)
    prover.compare_deliveries(ours, prover.states())
    assert not prover.proof.failed, prover.proof.summary()
    caught = {}
    for kind in ("copy", "expert") if shape[6] else ("copy",):
        model(ids)
        wanted = plant(model, kind)
        model(ids)
        again = proof.Prover(model, probe, [wanted]).perturb()
        caught[kind] = wanted in again.failed
    all_of = (recorded + perturbed + 2 * delivered + loaded + 3 * state) * shape[1] / count
    return {
        "model": name, "layers": count, "of": shape[1], "device": torch.cuda.get_device_name() if device != "cpu" else "cpu",
        "torch": torch.__version__, "parameters": sum(t.numel() for t in model.parameters()), "tensors": len(specs), "tokens": tokens,
        "record_seconds": round(recorded, 3), "perturb_seconds": round(perturbed, 3), "deliver_seconds": round(delivered, 3),
        "load_seconds": round(loaded, 3), "states_seconds": round(state, 3), "all_layers_seconds": round(all_of, 2), "caught": caught,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=0, help="so many of each model's layers (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", default="qwen3-30b-a3b,dense-8b", help=f"of {', '.join(SHAPES)} (%(default)s)")
    arguments = parser.parse_args()
    for name in arguments.models.split(","):
        print(json.dumps(measure(name, arguments.layers, arguments.device)), flush=True)


if __name__ == "__main__":
    main()
