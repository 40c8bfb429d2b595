"""The Trainer of transformers, with a refit after each optimizer step; with --lora it trains adapters, which are merged on the way.

    refitd --listen-unix /tmp/refitd.sock &
    export REFITD_SOCKET=/tmp/refitd.sock
    python transformers_engine.py --until 3 &
    python transformers_trainer.py

Prints after each refit its version and the tokens that the model would say next, which the engine prints too. Needs transformers, and
peft for --lora.
"""

import argparse
import tempfile

import torch
import transformers
from transformers_engine import VOCABULARY, made_model, says

import refitd
from refitd.integrations.transformers import RefitCallback


class Report(transformers.TrainerCallback):
    """Prints what the callback before it has refitted."""

    def __init__(self, refit):
        self.refit = refit

    def on_train_begin(self, args, state, control, model=None, **_):
        print(f"version {self.refit.result.version} says {says(model)}", flush=True)

    on_step_end = on_train_begin


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lora", action="store_true", help="train adapters of PEFT alone")
    options = parser.parse_args()

    model = made_model(seed=1)
    if options.lora:
        import peft

        from refitd.integrations import lora  # noqa: F401  # merges adapters on the way

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "o_proj"]))
    rows = torch.randint(VOCABULARY, (16, 8), generator=torch.Generator().manual_seed(2))
    refit = RefitCallback(options.group, connect=refitd.Connect(wait_seconds=200))
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=options.steps, per_device_train_batch_size=4, learning_rate=0.02, use_cpu=True, report_to=[],
            save_strategy="no", disable_tqdm=True)  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in rows]
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[refit, Report(refit)]).train()


if __name__ == "__main__":
    main()
