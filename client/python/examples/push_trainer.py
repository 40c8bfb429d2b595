"""A trainer that pushes: its framework yields full tensors one after the other, and keeps none of them.

    refitd --listen-unix /tmp/refitd.sock &
    export REFITD_SOCKET=/tmp/refitd.sock
    python asyncio_engine.py --versions 3 &
    python push_trainer.py --versions 3

Prints after each version a digest of the model, which the engine prints too. Versions begin after the group's last, so that both can be
run again.
"""

import argparse

import torch
from tiny_model import DTYPE, TrainerModel, digest

import refitd


def export(model):
    """Full tensors in the engine's dtype, as an exporter of Megatron or verl yields them: each is gone after its turn."""
    for name, parameter in model.state_dict().items():
        yield name, parameter.to(DTYPE)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--versions", type=int, default=3)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = TrainerModel()
    with refitd.Trainer(options.group, connect=refitd.Connect(wait_seconds=200)) as trainer:
        for version in range(trainer.next_version, trainer.next_version + options.versions):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter), alpha=0.01)
            # Leaving the block commits; an exception within it aborts, and the engines go on with what they have.
            with trainer.update(version, tensor_count=len(model.state_dict())) as update:
                for name, tensor in export(model):
                    update.push(name, tensor)
            print(f"version {version} digest {digest(export(model))} in {update.result.seconds * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
