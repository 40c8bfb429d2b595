"""A bare ncclBroadcast between two processes that take themselves to be on two hosts: sockets over loopback, as two daemons of
one host have them. Two ranks as processes; rank 0 prints one JSON object: seconds of `--bytes` in pieces of `--piece`.

  python3 socket_broadcast.py [--bytes N] [--piece N] [--rounds N]"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

SECONDS = 120


def rank(options):
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(options.rank % torch.cuda.device_count())
    dist.init_process_group("nccl", init_method="file://" + options.store, rank=options.rank, world_size=2)
    piece = torch.randint(0, 255, (options.piece,), dtype=torch.uint8, device="cuda")
    pieces = (options.bytes + options.piece - 1) // options.piece
    taken = []
    for _ in range(options.rounds + 1):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.monotonic()
        for _ in range(pieces):
            dist.broadcast(piece, 0)
        torch.cuda.synchronize()
        taken.append(time.monotonic() - start)
    if options.rank == 0:
        taken = sorted(taken[1:])
        seconds = taken[len(taken) // 2]
        print(json.dumps({"case": "socket broadcast", "bytes": pieces * options.piece, "piece": options.piece,
                          "seconds": seconds, "gb_per_s": pieces * options.piece / seconds / 1e9}), flush=True)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--piece", type=int, default=64 << 20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store")
    options = parser.parse_args()
    if options.rank is not None:
        return rank(options)
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for number in range(2):
            environment = {k: v for k, v in os.environ.items() if not k.startswith("NCCL_")}
            environment.update(NCCL_HOSTID="host%d" % number, NCCL_SOCKET_IFNAME="=lo", NCCL_NET="Socket",
                               NCCL_NVLS_ENABLE="0", NCCL_CUMEM_ENABLE="1")
            started.append(subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", str(number), "--store", os.path.join(folder, "store")],
                env=environment))
        status = 0
        for process in started:
            try:
                status = process.wait(timeout=SECONDS) or status
            except subprocess.TimeoutExpired:
                process.kill()
                status = 1
        return status


if __name__ == "__main__":
    sys.exit(main())
