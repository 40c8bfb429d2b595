"""The time of a refit, or of a push, from which one engine node's daemon is killed, over the time of one without.

usage: tools/bench loss [--json] [--nodes 4] [--mib 64] [--rate 40] [--rounds 3] [--moments 0.2,0.5,0.8] [--way refit]

Nodes and links are those of `tools/bench fleet`. A moment is the share of the model that the
trainers' node has sent when the daemon is killed. Each loss has daemons of its own. The others
must commit; the figure is the median over rounds of what the commit says it took. The goal is 1.1 of the time without a
loss: a process that is killed is noticed at once. A round in which nothing commits counts as endless: it misses the goal.
"""

import argparse
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

from fleet_bench import GROUP, SECONDS, Fleet, fail, write_checkpoint

GOAL = 1.1


def lose(fleet: Fleet, way: str, node: int, after: float, size: int) -> float:
    """Kills the daemon of `node` once the trainers' node has sent `after` of the model. Returns the update's seconds,
    infinity if it aborts."""
    argv = [fleet.options.refitctl, "--socket", fleet.socket(0), "-o", "json", "push", fleet.checkpoint, "--group", GROUP]
    argv += ["--push", "--bucket-bytes", "4MiB"] if way == "push" else []
    before = fleet.network.sent(0)
    refit = subprocess.Popen(
        fleet.network.nodes[0].enter(argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + SECONDS
    while fleet.network.sent(0) - before < after * size:
        if time.monotonic() > deadline or refit.poll() is not None:
            fail("the %s ended before the loss: " % way + str(refit.communicate()) + fleet.log())
    fleet.processes[node].send_signal(signal.SIGKILL)
    out, err = refit.communicate(timeout=SECONDS)
    try:
        answer = json.loads(out)
    except ValueError:
        print("the %s failed: %s" % (way, err.strip()), file=sys.stderr)
        return math.inf
    committed = [i["committed"] for i in answer["instances"]]
    if answer["way"] != way:
        fail("not by %s: %s" % (way, out))
    if committed.count(True) < fleet.engines - 1:
        print("not all others committed: " + out.strip(), file=sys.stderr)
        return math.inf
    return float(answer["seconds"])


def main() -> int:
    parser = argparse.ArgumentParser(description="A refit that loses an engine node's daemon")
    parser.add_argument("--refitd", required=True)
    parser.add_argument("--refitctl", required=True)
    parser.add_argument("--nodes", type=int, default=4, help="engine nodes, at least 2")
    parser.add_argument("--mib", type=int, default=64, help="size of the model")
    parser.add_argument("--rate", type=float, default=40, help="of each link and direction, in MB/s")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many")
    parser.add_argument("--moments", default="0.2,0.5,0.8", help="how much of the model was sent, as shares")
    parser.add_argument("--way", default="refit", choices=["refit", "push"])
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="loss-model-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    reached = True
    try:
        checkpoint = os.path.join(folder, "checkpoint")
        size = write_checkpoint(checkpoint, options.mib)
        for moment in [float(m) for m in options.moments.split(",")]:
            without, lost = [], []
            for i in range(options.rounds):
                fleet = Fleet(options.nodes, checkpoint, options)
                try:
                    fleet.push(options.way)
                    without.append(fleet.push(options.way))
                    lost.append(lose(fleet, options.way, 1 + i % options.nodes, moment, size))
                finally:
                    fleet.end()
            ratio = statistics.median(lost) / statistics.median(without)
            reached = reached and ratio <= GOAL
            if options.json:
                row = {"bench": "loss", "case": "%s, killed at %.2f" % (options.way, moment), "value": ratio if ratio < math.inf else None, "unit": "", "goal": GOAL}
                row.update({"seconds": statistics.median(lost) if ratio < math.inf else None, "without": statistics.median(without)})
                print(json.dumps(row), flush=True)
            else:
                print(
                    "%s, killed at %.2f  %6.2f s, without a loss %6.2f s: %5.2f (goal: at most %.2f)"
                    % (options.way, moment, statistics.median(lost), statistics.median(without), ratio, GOAL),
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
