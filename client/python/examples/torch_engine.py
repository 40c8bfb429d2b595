"""A plain torch module that computes with the weights that torch_trainer.py sends, one whole version at a time.

    python torch_engine.py [GROUP]
"""

import sys

import torch

import refitd

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).requires_grad_(False)

group = (sys.argv[1:] or ["plain"])[0]
patient = refitd.Connect(wait_seconds=200)  # the trainer makes the group

# clean=False: the module's own weights are random, and are not used.
with refitd.EngineLoop(model, group=group, instance="engine-0", clean=False, connect=patient) as weights:
    version = 0
    while version < 3:
        weights.wait(version + 1)
        with weights.use() as version:  # updates wait until the block ends
            says = [round(value, 3) for value in model(torch.ones(8)).tolist()]
            print(f"version {version} says {says}", flush=True)
    print(weights, flush=True)
