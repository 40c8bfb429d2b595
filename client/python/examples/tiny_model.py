"""A small decoder, twice: as a trainer holds it, and as an engine does, with projections fused.

Names and shapes are those of a checkpoint, so that the two halves of the examples agree on nothing else.
"""

import hashlib

import torch
from torch import nn

VOCABULARY, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN = 512, 64, 2, 4, 2, 16, 160
DTYPE = torch.bfloat16  # of the checkpoint and the engine


def checkpoint_manifest():
    """The tensors of a checkpoint: (name, dtype, shape) each. A real engine reads them from the safetensors files' headers."""
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[prefix + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[prefix + "mlp.gate_proj.weight"] = (FFN, HIDDEN)
        shapes[prefix + "mlp.up_proj.weight"] = (FFN, HIDDEN)
        shapes[prefix + "mlp.down_proj.weight"] = (HIDDEN, FFN)
        shapes[prefix + "input_layernorm.weight"] = (HIDDEN,)
        shapes[prefix + "post_attention_layernorm.weight"] = (HIDDEN,)
    return [(name, DTYPE, shape) for name, shape in sorted(shapes.items())]


def digest(tensors):
    """A short digest of (name, tensor) pairs as the checkpoint would hold them."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors):
        total.update(name.encode() + tensor.detach().to(DTYPE).contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, bias=False)


def attend(q, k, v):
    """Causal attention of [batch, tokens, heads * HEAD_DIM]; each key head serves HEADS // KV_HEADS query heads."""
    q, k, v = (x.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for x in (q, k, v))
    mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(-2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj = linear(HIDDEN, HEADS * HEAD_DIM)
        self.k_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.v_proj = linear(HIDDEN, KV_HEADS * HEAD_DIM)
        self.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        return self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x)))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(HIDDEN, FFN), linear(HIDDEN, FFN), linear(FFN, HIDDEN)

    def forward(self, x):
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class FusedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.sizes = [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        self.qkv_proj = linear(HIDDEN, sum(self.sizes))
        self.o_proj = linear(HEADS * HEAD_DIM, HIDDEN)

    def forward(self, x):
        return self.o_proj(attend(*self.qkv_proj(x).split(self.sizes, dim=-1)))


class FusedMlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = linear(HIDDEN, 2 * FFN), linear(FFN, HIDDEN)

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(nn.functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, attention, mlp):
        super().__init__()
        self.self_attn, self.mlp = attention, mlp
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """The base class of both models. `forward` gives the logits of the next token at each position."""

    def __init__(self, attention, mlp):
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.model.layers = nn.ModuleList(Layer(attention(), mlp()) for _ in range(LAYERS))
        self.model.norm = nn.RMSNorm(HIDDEN)
        self.lm_head = linear(HIDDEN, VOCABULARY)

    def forward(self, tokens):
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


class TrainerModel(Decoder):
    def __init__(self):
        super().__init__(Attention, Mlp)


class EngineModel(Decoder):
    """Keeps q, k, v in one projection, and gate, up in another, as engines do; `load_weights` takes a checkpoint's tensors."""

    def __init__(self):
        super().__init__(FusedAttention, FusedMlp)

    def parts(self):
        """(name of the checkpoint, view of the parameter that holds it) of every tensor."""
        for name, parameter in self.named_parameters():
            if ".qkv_proj." in name:
                rows = parameter.data.split([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM])
                yield from ((name.replace("qkv_proj", part), view) for part, view in zip(("q_proj", "k_proj", "v_proj"), rows))
            elif ".gate_up_proj." in name:
                halves = parameter.data.chunk(2)
                yield from ((name.replace("gate_up_proj", part), view) for part, view in zip(("gate_proj", "up_proj"), halves))
            else:
                yield name, parameter.data

    def load_weights(self, weights):
        """Copies (name, tensor) pairs into the parameters."""
        parts = dict(self.parts())
        for name, tensor in weights:
            parts[name].copy_(tensor)
