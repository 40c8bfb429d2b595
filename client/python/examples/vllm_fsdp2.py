"""Two FSDP2 ranks train a tiny Qwen3 and refit vLLM's server after each step; then both score the tokens that vLLM generated.

    refitd --listen-unix /tmp/refitd.sock &
    export REFITD_SOCKET=/tmp/refitd.sock
    python vllm_fsdp2.py --write /tmp/tiny-qwen3            # a model for both to begin with, of random weights
    REFITD_GROUP=qwen3 REFITD_INSTANCE=vllm-0 VLLM_PLUGINS=refitd vllm serve /tmp/tiny-qwen3 --served-model-name policy \\
        --max-model-len 64 --enforce-eager --load-format refitd --weight-transfer-config '{"backend": "refitd"}' &
    torchrun --standalone --nproc-per-node 2 vllm_fsdp2.py --model /tmp/tiny-qwen3

Of vLLM the trainer calls completions alone, and of refitd's plugin its status. Ranks talk by gloo on a CPU, and by NCCL where PyTorch has a
GPU for each; give vLLM another GPU then (CUDA_VISIBLE_DEVICES).
"""

import argparse
import contextlib
import json
import os
import time
import urllib.request

import torch
import torch.distributed as dist
import transformers
from tokenizers import Tokenizer, models
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import refitd
from refitd import kl

STEPS = 3
SYMBOLS, PROMPTS, LENGTH = 64, 16, 24  # of the vocabulary; prompts of one token; tokens that vLLM adds to each
START_SECONDS = 600  # for vLLM to load


def write_model(folder):
    """A tiny Qwen3 in bfloat16, and a tokenizer whose words are the numbers of the tokens."""
    config = transformers.Qwen3Config(
        vocab_size=SYMBOLS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=160, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({str(i): i for i in range(SYMBOLS)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=START_SECONDS) as answer:
        return json.loads(answer.read())


def wait_attached(url):
    """Returns when vLLM's server is up and has joined the group."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # the server does not listen yet
            if ask(f"{url}/refitd/status")["attached"]:
                return
        time.sleep(0.2)
    raise TimeoutError(f"no engine at {url} within {START_SECONDS} s")


def generate(url):
    """Tokens that vLLM chose greedily, with their log-probabilities, and the one version that all of them are of."""
    body = {"model": "policy", "prompt": [[i] for i in range(PROMPTS)], "temperature": 0, "max_tokens": LENGTH, "ignore_eos": True,
            "logprobs": 0, "return_token_ids": True}  # fmt: skip
    choices = sorted(ask(f"{url}/v1/completions", body)["choices"], key=lambda choice: choice["index"])
    tokens = torch.tensor([[i, *choice["token_ids"]] for i, choice in enumerate(choices)])
    (version,) = {span["version"] for choice in choices for span in choice["refitd_version"]}
    return tokens, torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices]), version


@torch.no_grad()
def score(model, tokens):
    """The log-probability of each token after the prompt."""
    scores = model(tokens[:, :-1]).logits.float().log_softmax(-1)
    return scores.gather(-1, tokens[:, 1:, None]).squeeze(-1).cpu()


def train(options):
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).to(device)
    # For the comparison alone: the same weights in bfloat16, as vLLM has them, but copied without refitd.
    control = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).to(device)
    mesh = init_device_mesh(device.type, (world_size,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    with refitd.Trainer("qwen3", rank=rank, world_size=world_size) as trainer:
        trainer.register(model, dtype=torch.bfloat16)
        if rank == 0:
            wait_attached(options.url)
        dist.barrier()
        for step in range(1, 1 + STEPS):
            # The task is to count: each token is the successor of the one before.
            rows = torch.randint(SYMBOLS, (32, 1), generator=torch.Generator().manual_seed(step * world_size + rank))
            tokens = ((rows + torch.arange(LENGTH)) % SYMBOLS).to(device)
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

            result = trainer.refit(trainer.next_version)  # returns when every engine holds the version

            generated = [generate(options.url) if rank == 0 else None]
            dist.broadcast_object_list(generated, src=0)
            tokens, engine, version = generated[0]
            tokens = tokens.to(device)
            ours, late = score(model, tokens), score(control, tokens)  # `control` is one step behind here
            whole = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}  # refitd gathers nothing
            control.load_state_dict(whole)
            rounding = kl.measure(ours, score(control, tokens)).kl
            measured = kl.check(ours, engine, control=rounding, what=f"vllm-0 at version {version}")  # raises kl.Diverged
            if rank == 0:
                print(f"step {step} version {version} refit {result.seconds:.3f} s KL {measured.kl:.1e} "
                      f"(rounding alone {rounding:.1e}, weights one step old {kl.measure(ours, late).kl:.1e})", flush=True)  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", metavar="FOLDER", help="write the model and end")
    parser.add_argument("--model", metavar="FOLDER")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="vLLM's server (%(default)s)")
    options = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    write_model(options.write) if options.write else train(options)
