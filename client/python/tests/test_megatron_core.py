"""Megatron Core's own models: the tables of refitd.integrations.megatron give a transformers model that computes what Megatron computes.

The models run on the CPU over gloo. Megatron asks for the current CUDA device, forks CUDA's random state for dropout, which is 0
here, and reads a name that only Transformer Engine gives it; these three are replaced, nothing else.
"""

import contextlib
import re
import threading
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="in the environment 2.11.0-trainers")
transformers = pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd.integrations import megatron  # noqa: E402
from refitd import testing  # noqa: E402

SECONDS = 240
HIDDEN, FFN, EXPERT_FFN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY, EXPERTS = 32, 48, 24, 2, 4, 2, 8, 61, 4
TOKENS = torch.arange(3, 27).reshape(2, 12)


def config_of(moe, tied, vocabulary=VOCABULARY):
    """The configuration of the transformers model, which also makes the table."""
    options = dict(
        vocab_size=vocabulary, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=1e-6, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    if not moe:
        return transformers.Qwen3Config(**options)
    return transformers.Qwen3MoeConfig(
        **options, num_experts=EXPERTS, num_experts_per_tok=2, moe_intermediate_size=EXPERT_FFN, norm_topk_prob=True, decoder_sparse_step=1
    )


def megatron_model(tp, moe, tied, ep=1, vocabulary=VOCABULARY):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    experts = dict(
        num_moe_experts=EXPERTS, moe_router_topk=2, moe_ffn_hidden_size=EXPERT_FFN, moe_token_dispatcher_type="allgather",
        moe_router_load_balancing_type="none",
    )  # fmt: skip
    config = TransformerConfig(
        num_layers=LAYERS, hidden_size=HIDDEN, ffn_hidden_size=FFN, num_attention_heads=HEADS, num_query_groups=KV_HEADS,
        kv_channels=HEAD_DIM, normalization="RMSNorm", layernorm_epsilon=1e-6, add_bias_linear=False, gated_linear_unit=True,
        activation_func=torch.nn.functional.silu, qk_layernorm=True, attention_dropout=0.0, hidden_dropout=0.0,
        tensor_model_parallel_size=tp, expert_model_parallel_size=ep, params_dtype=torch.float32, use_cpu_initialization=True, bias_activation_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False, gradient_accumulation_fusion=False,
        **(experts if moe else {}),
    )  # fmt: skip
    experts_of_layer = EXPERTS if moe else None
    spec = get_gpt_layer_local_spec(num_experts=experts_of_layer, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm")
    rows = -(-vocabulary // 8) * 8  # Megatron pads the vocabulary, so that tensor parallelism divides it
    return GPTModel(
        config, spec, vocab_size=rows, max_sequence_length=64, position_embedding_type="rope", rotary_base=10000,
        share_embeddings_and_output_weights=tied, parallel_output=False,
    ).eval()  # fmt: skip


@contextlib.contextmanager
def on_cpu():
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    with (
        mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")),
        mock.patch("megatron.core.transformer.moe.moe_utils.te_general_gemm", None, create=True),
        mock.patch.object(CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext()),
    ):
        yield


def train(rank, world, socket, group, moe, tied):
    """A trainer rank: refits Megatron's parameters; returns the logits that Megatron computes with them."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    with on_cpu(), torch.no_grad():
        torch.manual_seed(7)
        model = megatron_model(world, moe, tied)
        for name, parameter in model.named_parameters():
            if "layernorm" in name:  # Megatron's are all 1, which would hide a mistake; ranks hold equal copies
                torch.manual_seed(sum(name.encode()))
                parameter.copy_(torch.rand_like(parameter) + 0.5)
            parameter.copy_(parameter.bfloat16())  # so that the cast to the engine's dtype loses nothing
        config = config_of(moe, tied)
        config.num_experts = EXPERTS if moe else 0
        with refitd.Trainer(group, rank=rank, world_size=world, socket=socket, device="host") as trainer:
            known = dict(model=model, config=config, trainer=trainer, rank=rank, world_size=world, tp=world, ep=1, etp=world, pp=1)
            exec(documented(), {"torch": torch, **known})
            trainer.refit(1, duration_seconds=SECONDS)
        count = TOKENS.shape[1]
        mask = torch.triu(torch.ones(1, 1, count, count, dtype=torch.bool), 1)
        logits = model(TOKENS, torch.arange(count).expand_as(TOKENS), mask)
    return logits[..., :VOCABULARY].tolist()


def documented():
    """The Python of docs/tutorials/megatron.md that registers a Megatron model."""
    text = (Path(__file__).parents[3] / "docs/tutorials/megatron.md").read_text()
    (found,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.S) if "megatron.Parallel(" in block)
    return found


def by_checkpoint_names(model):
    """The tensors of a checkpoint, as views of the parameters of transformers, which keeps the experts of a layer in one."""
    for name, parameter in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(parameter):
                for part, half in zip(("gate", "up"), both.chunk(2)):
                    yield name.replace("gate_up_proj", f"{expert}.{part}_proj.weight"), half
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(parameter):
                yield name.replace("down_proj", f"{expert}.down_proj.weight"), one
        elif not (name == "lm_head.weight" and model.config.tie_word_embeddings):
            yield name, parameter


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("moe, tied", [(False, False), (False, True), (True, False)])
def test_transformers_computes_with_the_weights_what_megatron_computes(daemon, tp, moe, tied):
    group = f"tp{tp}-moe{moe}-tied{tied}"
    config = config_of(moe, tied)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)  # whatever is not written shows
    refitd.adopt(model)
    loops = []

    def attach():
        names = dict(by_checkpoint_names(model))
        options = dict(socket=daemon.socket, connect=refitd.Connect(wait_seconds=SECONDS), clean=False)
        loops.append(refitd.EngineLoop(model, group=group, instance="transformers", names=names, **options))

    attaching = threading.Thread(target=attach)
    attaching.start()
    results = run_ranks(tp, train, daemon.socket, group, moe, tied)
    attaching.join()
    with loops[0] as weights, weights.use() as version:
        assert version == 1
        state = {name: tensor.float() for name, tensor in model.state_dict().items()}
    exact = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    exact.load_state_dict(state)
    with torch.no_grad():
        logits = exact(TOKENS).logits
    for of_rank in results:
        torch.testing.assert_close(logits, torch.tensor(of_rank), rtol=1e-4, atol=1e-5)
    assert logits.std() > 0.01, "the logits tell nothing"
