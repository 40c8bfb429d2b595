"""A trainer of several FSDP2 ranks: float32 shards, delivered as bfloat16, no tensor gathered anywhere.

    refitd --listen-unix /tmp/refitd.sock &
    export REFITD_SOCKET=/tmp/refitd.sock
    python fused_engine.py --versions 3 &
    torchrun --standalone --nproc-per-node 2 fsdp2_trainer.py --versions 3

Prints after each version a digest of the whole model, which the engine prints too. Versions begin after the group's last, so that both can
be run again.
"""

import argparse

import torch
import torch.distributed
from tiny_model import VOCABULARY, TrainerModel, digest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import refitd


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--versions", type=int, default=3)
    options = parser.parse_args()

    torch.distributed.init_process_group("gloo")
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    model = TrainerModel()
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    with refitd.Trainer(options.group, rank=rank, world_size=world_size, connect=refitd.Connect(wait_seconds=200)) as trainer:
        trainer.register(model, dtype=torch.bfloat16)
        for version in range(trainer.next_version, trainer.next_version + options.versions):
            tokens = torch.randint(VOCABULARY, (2, 33), generator=torch.Generator().manual_seed(100 * version + rank))
            logits = model(tokens[:, :-1])
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result = trainer.refit(version)
            # For show only: gathers every tensor, which refitd never does.
            whole = [(name, tensor.full_tensor()) for name, tensor in model.state_dict().items()]
            if rank == 0:
                print(f"version {version} digest {digest(whole)} bytes {result.bytes} in {result.seconds * 1e3:.1f} ms", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
