"""Tiny models with random weights and a hand-made tokenizer of bytes, made on this machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

# Wider than usual, so that greedy tokens tell one seed from another.
SPREAD = 0.08
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VOCABULARY = {character: i for i, character in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *_SPECIAL])}
_COMMON = dict(
    vocab_size=512,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=512,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=_VOCABULARY["<|im_end|>"],
    pad_token_id=_VOCABULARY["<|endoftext|>"],
)
_EXPERTS = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)

# By name: the class of transformers before "Config" and "ForCausalLM", and what its config has beyond _COMMON.
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "qwen3-tied": ("Qwen3", dict(tie_word_embeddings=True)),
    "qwen3-odd-vocabulary": ("Qwen3", dict(vocab_size=301)),
    "qwen3-one-kv-head": ("Qwen3", dict(num_key_value_heads=1)),
    "qwen2-bias": ("Qwen2", {}),
    "llama": ("Llama", {}),
    "llama-bias": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "mistral-sliding": ("Mistral", dict(sliding_window=64)),
    "gemma2-sliding": ("Gemma2", dict(sliding_window=64, tie_word_embeddings=True, query_pre_attn_scalar=64)),
    "gemma3-tied": ("Gemma3", dict(sliding_window=64, tie_word_embeddings=True, query_pre_attn_scalar=64)),
    "qwen3-moe": ("Qwen3Moe", dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, **_EXPERTS)),
    # Each of two ranks has whole blocks of 128 of all layers.
    "qwen3-moe-wide": (
        "Qwen3Moe",
        dict(decoder_sparse_step=1, mlp_only_layers=[], norm_topk_prob=True, num_key_value_heads=4, **{**_EXPERTS, "moe_intermediate_size": 256}),
    ),
    "mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "deepseek-v2-lite": (
        "DeepseekV2",
        dict(
            num_key_value_heads=4, q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=64,
            n_routed_experts=8, n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=128, first_k_dense_replace=1,
            n_group=1, topk_group=1,
        ),
    ),
    "granite-sinks": ("GraniteSWA", dict(sliding_window=64, attention_multiplier=0.125)),
    "gpt-oss": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=64, intermediate_size=256)),
}  # fmt: skip

# The quantisation in the configuration of checkpoints of quantised models.
QUANTISED: dict[str, dict[str, Any]] = {
    "qwen3-int8": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed", "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
                "input_activations": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
            }
        },
    },
    "qwen3-fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "qwen3-awq": {
        "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["lm_head"],
    },
    "qwen3-gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
}  # fmt: skip


def make(name: str, folder: Path, seed: int, dtype: str = "bfloat16") -> Path:
    """A checkpoint of the architecture in `folder`/NAME-DTYPE-SEED, in one safetensors file."""
    if name in QUANTISED:
        return _make_quantised(name, folder, seed, dtype)
    kind, options = ARCHITECTURES[name]
    out = folder / f"{name}-{dtype}-{seed}"
    if out.exists():
        return out
    config_name = f"{kind}TextConfig" if kind == "Gemma3" else f"{kind}Config"
    config = getattr(transformers, config_name)(**{**_COMMON, **options}, dtype=dtype)
    torch.manual_seed(seed)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1:
            # Gemma scales embeddings up, so that they would drown what the layers say.
            scaled_up = kind.startswith("Gemma") and "embed" in key
            torch.nn.init.normal_(parameter, std=SPREAD / 32 if scaled_up else SPREAD)
        else:  # norms and biases differ between seeds as well
            parameter.data += torch.empty_like(parameter).uniform_(-0.1, 0.1)
    model.to(getattr(torch, dtype)).save_pretrained(out)
    _tokenizer().save_pretrained(out)
    return out


# Rows and columns of the layers of a "qwen3" that write_adapter() adapts. SGLang fuses q, k and v, and loads adapters of all three or of none.
ADAPTED = {
    "self_attn.q_proj": (256, 256), "self_attn.k_proj": (128, 256), "self_attn.v_proj": (128, 256), "self_attn.o_proj": (256, 256),
    "mlp.down_proj": (256, 512),
}  # fmt: skip
ADAPTED_NAMES = [name.split(".")[1] for name in ADAPTED]


def write_adapter(out: Path, seed: int, rank: int = 4) -> dict[str, torch.Tensor]:
    """A LoRA adapter of the tiny Qwen3 with a scaling of 2, in the files that PEFT writes; returns its tensors."""
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ADAPTED_NAMES, "bias": "none", "task_type": "CAUSAL_LM"}
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, (rows, columns) in ADAPTED.items():
            prefix = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{prefix}.lora_A.weight"] = (torch.randn(rank, columns) * 0.2).bfloat16()
            tensors[f"{prefix}.lora_B.weight"] = (torch.randn(rows, rank) * 0.2).bfloat16()
    out.mkdir()
    (out / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, out / "adapter_model.safetensors")
    return tensors


def make_eagle(served: Path, out: Path, seed: int, embeddings: bool = False) -> Path:
    """A checkpoint of an EAGLE draft of one layer for a Llama, with the names that such checkpoints have. `embeddings`: whether it has its own."""
    config = transformers.LlamaConfig(**{**_COMMON, "num_hidden_layers": 1}, dtype="bfloat16")
    torch.manual_seed(seed)
    layer = transformers.LlamaForCausalLM(config).model.layers[0].to(torch.bfloat16)
    tensors = {f"layers.0.{name}": torch.randn_like(t) * SPREAD for name, t in layer.state_dict().items() if name != "input_layernorm.weight"}
    tensors["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size, dtype=torch.bfloat16) * SPREAD
    if embeddings:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, config.hidden_size, dtype=torch.bfloat16) * SPREAD
    out.mkdir()
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def with_draft(served: Path, draft: Path, out: Path) -> Path:
    """A folder with the tensors of both checkpoints, named as trainers name them."""
    out.mkdir()
    of_draft = {f"draft.{name}": tensor for name, tensor in load_file(draft / "model.safetensors").items()}
    save_file({**load_file(served / "model.safetensors"), **of_draft}, out / "model.safetensors", {"format": "pt"})
    return out


def quantise(checkpoint: Path, out: Path, how: Callable[[Any], tuple[Any, Any]]) -> None:
    """Writes the checkpoint with linear layers and experts that are quantised in blocks: `how` makes a weight's values and scales."""
    shutil.copytree(checkpoint, out)
    config = json.loads((out / "config.json").read_text())
    loaded = load_file(checkpoint / "model.safetensors")
    routers = [key.removesuffix(".weight") for key in loaded if key.endswith(".mlp.gate.weight")]
    quantisation = {**QUANTISED["qwen3-fp8"], **({"modules_to_not_convert": routers} if routers else {})}
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": quantisation}))
    tensors = {}
    for key, tensor in loaded.items():
        tensors[key] = tensor
        if key.endswith("_proj.weight"):
            tensors[key], tensors[f"{key}_scale_inv"] = how(tensor)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})


def _make_quantised(name: str, folder: Path, seed: int, dtype: str) -> Path:
    """A Qwen3 whose linear layers are quantised as the name says: FP8 and int8 from its weights, four bits at random."""
    base = make("qwen3", folder, seed, dtype)
    out = folder / f"{name}-{dtype}-{seed}"
    if out.exists():
        return out
    shutil.copytree(base, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": QUANTISED[name]}))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for key, tensor in load_file(base / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            for suffix, part in _quantise(name, tensor, generator).items():
                tensors[f"{key.removesuffix('weight')}{suffix}"] = part.contiguous()
        else:
            tensors[key] = tensor
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _quantise(name: str, weight: Any, generator: Any) -> dict[str, Any]:
    """The tensors of a linear layer, by the end of their names. `weight`: [outputs, inputs]."""
    outputs, inputs = weight.shape
    if name == "qwen3-int8":
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return {"weight": (weight.float() / scale).round().to(torch.int8), "weight_scale": scale.to(weight.dtype)}
    if name == "qwen3-fp8":
        blocks = weight.float().view(outputs // 128, 128, inputs // 128, 128)
        scale = blocks.abs().amax((1, 3)) / 448
        return {
            "weight": (blocks / scale[:, None, :, None]).view(outputs, inputs).to(torch.float8_e4m3fn), "weight_scale_inv": scale,
        }  # fmt: skip
    groups = inputs // 128
    scales = {"scales": (0.02 * (1 + torch.rand(groups, outputs, generator=generator))).to(weight.dtype)}
    zeros = torch.full((groups, outputs // 8), 0x77777777, dtype=torch.int32)
    if name == "qwen3-awq":
        return {"qweight": _random_words((inputs, outputs // 8), generator), "qzeros": zeros, **scales}
    index = torch.arange(inputs, dtype=torch.int32) // 128
    return {"qweight": _random_words((inputs // 8, outputs), generator), "qzeros": zeros, "g_idx": index, **scales}


def _random_words(shape: tuple[int, int], generator: Any) -> Any:
    return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int64).to(torch.int32)


def _tokenizer() -> Any:
    made = Tokenizer(models.BPE(vocab=dict(_VOCABULARY), merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
