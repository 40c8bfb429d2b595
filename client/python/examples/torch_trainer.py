"""A plain torch module that trains, and sends its weights after each step to torch_engine.py.

    python torch_trainer.py [GROUP]
"""

import sys

import torch

import refitd

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
refitd.adopt(model)  # on a CPU: into memory that the daemon can map; on a GPU nothing is moved

with refitd.Trainer(*sys.argv[1:] or ["plain"]) as trainer:
    trainer.register(model)
    for version in (1, 2, 3):
        optimizer.zero_grad()
        model(torch.randn(32, 8)).square().mean().backward()
        optimizer.step()
        print(trainer.refit(version), flush=True)  # returns when every engine holds the version
        says = [round(value, 3) for value in model(torch.ones(8)).tolist()]
        print(f"version {version} says {says}", flush=True)
