"""A trainer or engine rank of torch and the Python package: what python_bench.py compares with gpu_rank.

  python3 python_rank.py trainer|engine --socket PATH --group NAME --tensors COUNT:BYTES

The model is COUNT bfloat16 tensors of BYTES bytes, on the first GPU; PYTHONPATH names the package and REFIT_LIBRARY the library.
Commands come a line each (`fill VERSION`, `refit VERSION VERIFICATION`, `late VERSION all|named|none`, `check VERSION`, `quit`),
answers are JSON lines, in which `parts` are seconds. `late` queues a pause and then the version on a side stream, and refits at once: refit() waits for all
streams, for that stream by name, or for none."""

import argparse
import json
import sys
import threading
import time

import refitd
import torch

SEED = 20_000_003
PAUSE_CYCLES = 20_000_000  # some 10 ms


def say(event, **fields):
    print(json.dumps(dict(fields, event=event)), flush=True)


def queue_fill(weights, version):
    """Queues random bits that depend on the version and the tensor."""
    generator = torch.Generator(device="cuda")
    for index, tensor in enumerate(weights.values()):
        generator.manual_seed(version * SEED + index)
        bits = tensor.view(torch.int16)
        bits.random_(-(1 << 15), 1 << 15, generator=generator)


def fill(weights, version):
    queue_fill(weights, version)
    torch.cuda.synchronize()


def wrong(weights, version):
    """How many tensors are not that version's, bit for bit."""
    expected = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
    fill(expected, version)
    return sum(not torch.equal(expected[name].view(torch.int16), weights[name].view(torch.int16)) for name in weights)


def timed(object, name, parts):
    """Makes a method of this object put its seconds into `parts`."""
    method = getattr(object, name)

    def call(*arguments):
        began = time.monotonic()
        try:
            return method(*arguments)
        finally:
            parts[name] = time.monotonic() - began

    setattr(object, name, call)


def serve(engine):
    """Answers events; torch has no work under way here when Prepare comes, since `check` has ended."""
    parts = {}
    timed(engine, "_check_unmoved", parts)
    for event in engine:
        if isinstance(event, refitd.Prepare):
            began = time.monotonic()
            torch.cuda.synchronize()
            parts["device"] = time.monotonic() - began
            event.ready()
            parts["ready"] = time.monotonic() - began
        elif isinstance(event, refitd.Committed):
            say("committed", version=event.version, parts=parts)
        elif isinstance(event, refitd.Aborted):
            say("aborted", version=event.version, reason=event.reason)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("role", choices=["trainer", "engine"])
    parser.add_argument("--socket", required=True)
    parser.add_argument("--group", required=True)
    parser.add_argument("--tensors", required=True)
    options = parser.parse_args()
    count, size = map(int, options.tensors.split(":"))
    torch.cuda.set_device(0)
    weights = {"tensor.%d" % i: torch.empty(size // 2, dtype=torch.bfloat16, device="cuda") for i in range(count)}
    fill(weights, 0)
    serving = None
    side = torch.cuda.Stream()
    if options.role == "trainer":
        rank = refitd.Trainer(options.group, socket=options.socket)
    else:
        from refitd.layout.cuda import device_uuid

        rank = refitd.Engine(options.group, instance="engine-0", socket=options.socket, device=device_uuid(0))
    began = time.monotonic()
    rank.register(weights)
    registered = time.monotonic() - began
    if options.role == "engine":
        serving = threading.Thread(target=serve, args=(rank,))
        serving.start()
    parts = {}
    if options.role == "trainer":
        for name in ("_renew", "_fill"):
            timed(rank, name, parts)
    say("ready", ok=True, bytes=count * size, registered=registered)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "quit":
            break
        version = int(words[1])
        if words[0] == "fill":
            fill(weights, version)
            say("fill", ok=True)
        elif words[0] == "check":
            say("check", ok=True, wrong=wrong(weights, version))
        elif words[0] == "late":
            with torch.cuda.stream(side):
                torch.cuda._sleep(PAUSE_CYCLES)
                queue_fill(weights, version)
            result = rank.refit(version, streams={"all": None, "named": [side], "none": []}[words[2]])
            torch.cuda.synchronize()
            say("late", ok=True, committed=result.committed)
        elif words[0] == "refit":
            began = time.monotonic()
            result = rank.refit(version, verification=words[2])
            say("refit", ok=True, seconds=time.monotonic() - began, committed=result.committed, rebound=result.rebound,
                staged=result.staged_bytes, parts={**parts, "daemon": result.seconds})
    rank.close()
    if serving is not None:
        serving.join()
    say("quit")


if __name__ == "__main__":
    main()
