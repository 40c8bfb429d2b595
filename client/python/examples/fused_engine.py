"""An engine whose parameters are fused: refitd learns from its own loader where each tensor of a checkpoint goes.

Run it beside fsdp2_trainer.py. Prints after each version a digest of what its parameters hold, and the token that it would
say next.
"""

import argparse

import torch
from tiny_model import DTYPE, EngineModel, checkpoint_manifest, digest

import refitd


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--instance", default="engine-0")
    parser.add_argument("--versions", type=int, default=3, help="end after so many")
    parser.add_argument("--seconds", type=float, default=200, help="fail where no event comes for so long (%(default)s)")
    options = parser.parse_args()

    model = EngineModel().to(DTYPE).requires_grad_(False)
    refitd.adopt(model)  # on a CPU the parameters must lie in memory that the daemon can map
    with refitd.Engine(options.group, instance=options.instance, connect=refitd.Connect(wait_seconds=200)) as engine:
        engine.register(refitd.capture(model.load_weights, checkpoint_manifest()))
        print("registered", flush=True)
        committed = 0
        while committed < options.versions:
            event = engine.next(options.seconds)  # DeadlineExceeded: the trainer sent no version
            if isinstance(event, refitd.Prepare):
                # A real engine first waits until no request uses the weights.
                event.ready()
            elif isinstance(event, refitd.Committed):
                token = model(torch.tensor([[1, 2, 3]]))[0, -1].argmax().item()
                print(f"version {event.version} digest {digest(model.parts())} says {token}", flush=True)
                committed += 1
            elif isinstance(event, refitd.Aborted):
                # The old weights are whole unless `dirty`; a dirty engine stays paused until the next commit.
                print(f"aborted version {event.version}, dirty {event.dirty}: {event.reason}", flush=True)


if __name__ == "__main__":
    main()
