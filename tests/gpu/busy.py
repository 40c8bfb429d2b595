"""A GPU at work: matrix products without end, and how fast they went at any time.

  python3 busy.py --device N

Commands on stdin, a JSON line each as the answer: `rate T0 T1` gives the products a second between two readings of
CLOCK_MONOTONIC, of which the last seconds are kept; `quit`."""

import argparse
import collections
import json
import select
import sys
import time

import torch

SIZE = 8192  # bfloat16: about 1.5 ms a product on an H200
KEPT = 20000


def say(**fields):
    print(json.dumps(fields), flush=True)


def rate(ends, t0, t1):
    """Products by time; the one that a limit falls into counts by its part."""
    done = 0.0
    for start, end in zip(ends, list(ends)[1:]):
        done += max(0.0, min(end, t1) - max(start, t0)) / (end - start)
    return done / (t1 - t0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=int, default=0)
    options = parser.parse_args()
    torch.cuda.set_device(options.device)
    a, b = (torch.randn(SIZE, SIZE, device="cuda").to(torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    for _ in range(10):
        torch.matmul(a, b, out=c)
    torch.cuda.synchronize()
    ends = collections.deque(maxlen=KEPT)
    said = False
    while True:
        # Two at a time, so that the GPU has the next one when the first is done.
        torch.matmul(a, b, out=c)
        done = torch.cuda.Event()
        done.record()
        torch.matmul(a, b, out=c)
        done.synchronize()
        ends.append(time.monotonic())
        torch.cuda.synchronize()
        ends.append(time.monotonic())
        if not said:
            said = True
            say(event="ready", ok=True)
        if select.select([sys.stdin], [], [], 0)[0]:
            words = sys.stdin.readline().split()
            if not words or words[0] == "quit":
                return
            say(event="rate", per_second=rate(ends, float(words[1]), float(words[2])))


if __name__ == "__main__":
    main()
