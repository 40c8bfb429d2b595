"""Measures an update of a 0.6B-like model through vLLM's server on this machine, beside the same update to bare refitd: the same tensors
in memory of a process that only says that it is ready. Both in turn, in one run, since the machine's speed differs between runs.

usage: tools/engines --figures [--layers N] [--updates N]     prints one line of JSON
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from pathlib import Path
from statistics import median
from typing import Any

import models
import refitd
import torch
from refitd import testing
from server import Server
from support import VLLM_ON_GPU, CheckpointTrainer

# Where all weights are, for torch and for refitd: None is torch's current GPU.
DEVICE = "cuda" if VLLM_ON_GPU else "host"
REFITD_DEVICE = None if VLLM_ON_GPU else "host"

# The sizes of Qwen3-0.6B.
models.ARCHITECTURES["qwen3-0.6b"] = (
    "Qwen3",
    dict(
        vocab_size=151936, hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        intermediate_size=3072, tie_word_embeddings=True,
    ),
)  # fmt: skip


def empty_like(tensors: dict[str, Any]) -> dict[str, Any]:
    if VLLM_ON_GPU:
        return {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    return {name: refitd.empty(tuple(t.shape), t.dtype) for name, t in tensors.items()}


class Bare:
    """An engine of refitd's that does nothing but take versions."""

    def __init__(self, socket: str, tensors: dict[str, Any]) -> None:
        self.engine = refitd.Engine("bare", instance="bare-0", socket=socket, device=REFITD_DEVICE)
        self.engine.register(empty_like(tensors))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for event in self.engine:
            if isinstance(event, refitd.Prepare):
                event.ready()


def measure(layers: int, updates: int) -> dict[str, Any]:
    models.ARCHITECTURES["qwen3-0.6b"][1]["num_hidden_layers"] = layers
    with tempfile.TemporaryDirectory(prefix="refitd-figures-") as folder, testing.daemon() as daemon:
        checkpoint = models.make("qwen3-0.6b", Path(folder), 1)
        trainer = CheckpointTrainer(daemon.socket, checkpoint, DEVICE)
        trainer.fill(checkpoint)
        bare_trainer = refitd.Trainer("bare", rank=0, world_size=1, socket=daemon.socket, device=REFITD_DEVICE)
        bare_trainer.register(trainer.tensors)
        bare = Bare(daemon.socket, trainer.tensors)
        with Server(checkpoint, Path(folder) / "server.log", daemon.socket, OMP_NUM_THREADS=str(os.cpu_count())) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            seconds: dict[str, list[float]] = {"bare": [], "adapter": [], "pause": []}
            for version in range(1, updates + 3):
                one = bare_trainer.refit(version).seconds
                other = trainer.trainer.refit(version).seconds
                server.until(lambda: server.get("/refitd/status")[1]["updates"] == version, "the update")
                server.until(lambda: server.get("/refitd/ready")[0] == 200, "it serves")
                pause = server.get("/refitd/status")[1]["last_pause_seconds"]
                if version > 2:  # two to warm up
                    for name, value in (("bare", one), ("adapter", other), ("pause", pause)):
                        seconds[name].append(value)
        size = sum(t.nbytes for t in trainer.tensors.values())
        bare.engine.close()
        bare_trainer.close()
        trainer.close()
    return {
        "bytes": size,
        "updates": updates,
        **{f"{name}_p50_ms": round(1e3 * median(values), 1) for name, values in seconds.items()},
        "adapter_to_bare_p50": round(median(a / b for a, b in zip(seconds["adapter"], seconds["bare"])), 2),
        "pause_beyond_update_p50_ms": round(1e3 * median(p - a for p, a in zip(seconds["pause"], seconds["adapter"])), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--updates", type=int, default=10)
    arguments = parser.parse_args()
    print(json.dumps(measure(arguments.layers, arguments.updates)))


if __name__ == "__main__":
    main()
