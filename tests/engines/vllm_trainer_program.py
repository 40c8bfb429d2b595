"""A trainer rank that vLLM's own trainer interface drives, over gloo, with commands as engine_program.py has them.

usage: vllm_trainer_program.py CHECKPOINT OPTIONS     OPTIONS: JSON {"rank", "world_size", "port", "url", "source", "info"}
`url`: of the server that the trainer drives; null: it drives itself. `source`: "module", vLLM's over an FSDP2 model, or "split", where each rank
has some tensors. `info`: fields of RefitdTrainerInitInfo.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_program import serve_commands
from safetensors.torch import load_file
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, ModuleSource, WeightSource, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import ParamMeta, layerwise_groups

import refitd.integrations.vllm.trainer as plug

# Whether sources tell how tensors are cut and who owns them, from vLLM 0.33 on.
TELLS_PIECES = hasattr(WeightSource, "iter_local")


def split_source(tensors: dict[str, Any], rank: int, world_size: int) -> Any:
    """A source whose tensors belong to the ranks by turns, layer by layer, as the vLLM that is there has such sources."""
    groups = layerwise_groups(list(tensors))
    owner = {name: number % world_size for number, group in enumerate(groups) for name in group}

    if TELLS_PIECES:

        class Split(WeightSource):  # type: ignore[misc]
            @cached_property
            def metadata(self) -> list[Any]:
                return [ParamMeta(name, t.dtype, tuple(t.shape), owners=(owner[name],)) for name, t in tensors.items()]

            def iter_full(self) -> Any:
                yield from ((name, tensor) for name, tensor in tensors.items() if owner[name] == rank)

        return Split()

    class Held(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]

        def held_names(self) -> set[str]:
            return {name for name in tensors if owner[name] == rank}

        def __iter__(self) -> Any:
            for group in self.groups():
                yield from ((name, tensors[name]) for name in group)

    return Held()


class Program:
    def __init__(self, checkpoint: str, options: dict[str, Any]) -> None:
        self.rank, world_size = options["rank"], options["world_size"]
        distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{options['port']}", rank=self.rank, world_size=world_size)
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        mesh = init_device_mesh("cpu", (world_size,))
        self.tensors: dict[str, Any] = {}
        if options["source"] == "module":
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            self.tensors = dict(model.named_parameters())
            self.source = ModuleSource(model)
            self.model = model
        else:
            self.tensors = {name: parameter.detach().to(torch.bfloat16) for name, parameter in model.named_parameters()}
            self.source = split_source(self.tensors, self.rank, world_size)
        self._options = options
        self.engine: Any = None

    def init(self) -> None:
        url = self._options["url"]
        client = None if url is None else HTTPVLLMWeightSyncClient(url, timeout=600)
        info = plug.RefitdTrainerInitInfo(rank=self.rank, **self._options["info"])
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=self.source)

    def fill(self, checkpoint: str) -> None:
        """Makes the trainer's tensors those of the checkpoint."""
        with torch.no_grad():
            for name, tensor in load_file(Path(checkpoint) / "model.safetensors").items():
                held = self.tensors[name]
                if hasattr(held, "placements"):
                    tensor = distribute_tensor(tensor.to(held.dtype), held.device_mesh, held.placements, src_data_rank=None)
                held.copy_(tensor)

    def send(self, version: int | None = None, note: str | None = None) -> dict[str, Any]:
        result = self.engine.send_weights(version, note=note)
        return {"version": result.version, "committed": result.committed, "pushed": sum(result.pushed_bytes.values())}


if __name__ == "__main__":
    serve_commands(Program)
