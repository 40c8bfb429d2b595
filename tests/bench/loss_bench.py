"""The time of a refit from which one engine node's daemon is killed, over the time of one without.

usage: tools/bench loss [--json] [--nodes 4] [--mib 64] [--rate 40] [--rounds 3] [--moments 0.2,0.5,0.8]

Nodes and links are those of `tools/bench fleet`. A moment is the share of the model that the
trainers' node has sent when the daemon is killed. Each loss has daemons of its own. The others
must commit; the figure is the median over rounds of what the commit says it took. The goal is 1.1 of the time without a
loss: a process that is killed is noticed at once.
"""

import argparse
import json
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


def lose(fleet: Fleet, node: int, after: float, size: int) -> float:
    """Kills the daemon of `node` once the trainers' node has sent `after` of the model. Returns the refit's seconds."""
    argv = [fleet.options.refitctl, "--socket", fleet.socket(0), "-o", "json", "push", fleet.checkpoint, "--group", GROUP]
    before = fleet.network.sent(0)
    refit = subprocess.Popen(
        fleet.network.nodes[0].enter(argv), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    deadline = time.monotonic() + SECONDS
    while fleet.network.sent(0) - before < after * size:
        if time.monotonic() > deadline or refit.poll() is not None:
            fail("the refit ended before the loss: " + str(refit.communicate()) + fleet.log())
    fleet.processes[node].send_signal(signal.SIGKILL)
    out, err = refit.communicate(timeout=SECONDS)
    try:
        answer = json.loads(out)
    except ValueError:
        fail("the refit failed: %s\n%s" % (err.strip(), fleet.log()))
    committed = [i["committed"] for i in answer["instances"]]
    if answer["way"] != "refit" or committed.count(True) < fleet.engines - 1:
        fail("not all others committed: " + out)
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
                    fleet.push("refit")
                    without.append(fleet.push("refit"))
                    lost.append(lose(fleet, 1 + i % options.nodes, moment, size))
                finally:
                    fleet.end()
            ratio = statistics.median(lost) / statistics.median(without)
            reached = reached and ratio <= GOAL
            if options.json:
                row = {"bench": "loss", "case": "killed at %.2f" % moment, "value": ratio, "unit": "", "goal": GOAL}
                row.update({"seconds": statistics.median(lost), "without": statistics.median(without)})
                print(json.dumps(row), flush=True)
            else:
                print(
                    "killed at %.2f  %6.2f s, without a loss %6.2f s: %5.2f (goal: at most %.2f)"
                    % (moment, statistics.median(lost), statistics.median(without), ratio, GOAL),
                    flush=True,
                )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
