"""An engine that is a model of transformers, whose weights follow a group. Run it beside transformers_trainer.py.

Prints for each version that it uses the tokens that it would say next. `use` yields one whole version: an update waits for the end of the
block, and a block for the end of an update. Needs transformers.
"""

import argparse

import torch
import transformers

import refitd

VOCABULARY = 64


def made_model(seed):
    """A small Qwen3 of random weights."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        max_position_embeddings=64, tie_word_embeddings=False)  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config)


def says(model):
    """The most likely next tokens after a few prompts."""
    with torch.no_grad():
        logits = model(torch.arange(24, device=model.device).reshape(4, 6)).logits
    return " ".join(str(token) for token in logits[:, -1].argmax(-1).tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--instance", default="engine-0")
    parser.add_argument("--until", type=int, default=3, help="end with this version")
    parser.add_argument("--seconds", type=float, default=200, help="fail where no version comes for so long (%(default)s)")
    options = parser.parse_args()

    model = made_model(seed=9)  # other weights than the trainer's: clean=False, so that no block reads them
    connect = refitd.Connect(wait_seconds=options.seconds)
    with refitd.EngineLoop(model, group=options.group, instance=options.instance, clean=False, connect=connect) as weights:
        print("registered", flush=True)
        version = -1
        while version < options.until:
            weights.wait(version + 1, options.seconds)
            with weights.use() as version:
                print(f"version {version} says {says(model)}", flush=True)


if __name__ == "__main__":
    main()
