"""What an engine is paused for, and what a refit takes, with its weights in an arena and in place.

usage: tools/bench arena [--gib G]... [--arena-gib G] [--back device|host] [--ranks N] [--versions N] [--device cuda|cpu] [--verification V] [--rollbacks N] [--restart] [--timeline]
       [--json]

A trainer refits a model of torch into an engine, a process of its own: first into one whose weights lie in an arena, then into one
that is written in place. The engine runs steps without a rest, on a GPU as a replayed CUDA graph, that read every weight, and takes
events between steps. The trainer is on the first GPU, the engine on the last, which may be the same. Pause: from when the engine
takes Prepare to when it has taken Committed. --gib: of each of the engine's ranks, which lie on the last GPUs, and hold as much each.
--arena-gib: of an arena at most; by default the free memory decides. --back: where its sides lie. --rollbacks: after so many versions the one before is served again,
and the call of the trainer is measured. --restart: also, from when a process that takes the first engine's place attaches to when it
holds its version, with the weights in place. --timeline: only what trainer, daemon and engine do in the update with the median pause in
an arena, as rows of docs/figures/arena_timeline.csv; `refitctl watch` gives the daemon's part. The outputs of all steps are compared with those of the first step after their version's
commit, and the weights of every tenth version and of every rollback with the trainer's.

With the wheel in PYTHONPATH the script needs no Bazel (tests/gpu/README.md).
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import threading
import time

import torch

import refitd
from refitd import testing
from refitd.layout import placement

SECONDS = 120  # only what hangs reaches it
ROWS = 4096  # of a weight of 32 MiB in bfloat16
BATCH = 8


def model_of(gib, device, ranks=1):
    """Weights of the size for each rank, in matrices that a step multiplies one after the other."""
    count = ranks * max(1, round(gib * (1 << 30) / (ROWS * ROWS * 2)))
    return torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(ROWS, ROWS, dtype=torch.bfloat16, device=device), False) for _ in range(count))


def weights_of(model, version, first=0):
    """The weights of a version from the number `first` on: random, and of a size that a product of many keeps."""
    generator = torch.Generator(device=model[0].device)
    for number, weight in enumerate(model, first):
        generator.manual_seed(version << 16 | number)
        yield weight, (torch.randn(weight.shape, generator=generator, device=weight.device) / math.sqrt(ROWS)).to(weight.dtype)


def fill(model, version):
    with torch.no_grad():
        for weight, value in weights_of(model, version):
            weight.copy_(value)


def synchronize(device):
    if device == "cuda":
        torch.cuda.synchronize()


class Steps:
    """Steps of a loop that serves: each reads every weight."""

    def __init__(self, model, device):
        self.device = device
        self.model = model
        self.x = torch.ones(BATCH, ROWS, dtype=torch.bfloat16, device=device)
        self.rows = ROWS if device == "cuda" else 256  # a CPU multiplies too slowly to read all
        self.graph = None
        if device == "cuda":
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                self.forward()
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.y = self.forward()

    def forward(self):
        y = self.x
        for weight in self.model:
            part = y @ weight[: self.rows].T
            y = part if self.rows == ROWS else torch.cat([part, y[:, self.rows :]], 1)
        return y

    def run(self):
        """One step; returns its output as a number."""
        with torch.no_grad():
            if self.graph is not None:
                self.graph.replay()
                return float(self.y.float().sum())
            return float(self.forward().float().sum())


def serve(options):
    """The engine's process: prints a line of JSON for each version."""
    device = options.device
    if device == "cuda":
        torch.cuda.set_device(max(0, torch.cuda.device_count() - 1 - options.rank))
    model = model_of(options.gib[0], device)
    first = options.rank * len(model)
    engine = refitd.Engine(options.group, instance="engine", rank=options.rank, world_size=options.ranks, socket=options.socket,
                           restore=options.keep)
    if options.arena_gib:
        placement.MOST_BYTES = round(options.arena_gib * (1 << 30))
    refitd.adopt(model, arena=options.arena, back=options.back)
    engine.register({str(number): weight for number, weight in enumerate(model, first)})
    steps = Steps(model, device)
    print(json.dumps({"ready": True}), flush=True)
    taken, wrong, expected, version = [], 0, None, 0
    while version < options.versions:
        began = time.monotonic()
        output = steps.run()
        taken.append((began, time.monotonic() - began))
        if expected is None:
            expected = output
        wrong += output != expected
        event = engine.poll(0)
        if not isinstance(event, refitd.Prepare):
            continue
        prepared = time.monotonic()
        synchronize(device)
        event.ready()
        exchanged = time.monotonic()
        event = engine.next(SECONDS)
        if not isinstance(event, refitd.Committed):
            sys.exit(f"no commit: {event}")
        synchronize(device)
        committed = time.monotonic()
        version, expected = event.version, None
        row = {"version": version, "prepared": prepared, "exchanged": exchanged, "committed": committed, "steps": taken, "wrong": wrong}
        content = version if event.content is None else event.content
        if version % 10 == 1 or content != version:
            row["compared"] = sum(not torch.equal(weight, value) for weight, value in weights_of(model, content, first))
        print(json.dumps(row), flush=True)
        taken, wrong = [], 0
    engine.close()


def restart(options):
    """The process of an engine that takes another's place: prints how long that took."""
    if options.device == "cuda":
        torch.cuda.set_device(max(0, torch.cuda.device_count() - 1))
        torch.cuda.init()
    if options.arena_gib:
        placement.MOST_BYTES = round(options.arena_gib * (1 << 30))
    model = model_of(options.gib[0], "meta")
    began = time.monotonic()
    engine = refitd.Engine(options.group, instance="engine", world_size=options.ranks, socket=options.socket, restore=True)
    restored = engine.restore(model, back=options.back)
    seconds = time.monotonic() - began
    wrong = sum(not torch.equal(weight, value) for weight, value in weights_of(model, options.versions))
    print(json.dumps({"restored": restored, "version": engine.version, "wrong": wrong, "seconds": seconds}), flush=True)
    engine.close()


class Peer:
    """An engine's process."""

    def __init__(self, options, daemon, group, gib, arena, rank, restart=False):
        self.group = group
        command = [sys.executable, __file__, "--engine", "--socket", daemon.socket, "--group", self.group, "--gib", str(gib), "--rank", str(rank),
                   "--ranks", str(options.ranks), "--device", options.device, "--versions", str(options.versions + (options.rollbacks if arena else 0))]
        if arena:
            command += ["--arena", "--arena-gib", str(options.arena_gib), "--back", options.back]
        if restart or options.restart and arena:
            command.append("--restart" if restart else "--keep")
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"the engine of {self.group} ended: {self.process.wait(SECONDS)}")
        return json.loads(line)


class Watch:
    """The states of a group's updates, by the clock of this process."""

    PARTS = {"opening": "prepare", "preparing": "prepare", "data": "stage", "settling": "stage", "verifying": "verify", "flipping": "flip"}

    def __init__(self, daemon, group):
        command = [testing.program("refitctl"), "--socket", daemon.socket, "-o", "json", "watch", "--group", group, "--interval", "20"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.updates = {}  # version: [(when it was taken, UpdateStatus)]
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self):
        for line in self.process.stdout:
            taken, update = time.monotonic(), json.loads(line)
            self.updates.setdefault(int(update["version"]), []).append((taken, update))

    def close(self):
        self.process.terminate()
        self.process.wait(SECONDS)
        self.thread.join(SECONDS)

    def parts(self, version):
        """(what the daemon does, begin, end) of the version's update."""
        seen = self.updates[version]
        began = min(taken - update.get("elapsed_seconds", 0) for taken, update in seen)
        parts = []
        for _, update in seen:
            at = began + update.get("elapsed_seconds", 0)
            if parts:
                parts[-1][2] = at
            what = self.PARTS.get(update["state"])
            if what and not (parts and parts[-1][0] == what):
                parts.append([what, at, at])
        return parts


def timeline(watch, found):
    """Prints who does what in the update with the median pause."""
    began, ended, row = sorted(found, key=lambda each: each[2]["committed"] - each[2]["prepared"])[len(found) // 2]
    parts = watch.parts(row["version"])
    rows = [("trainer", "begin", began, parts[0][1]), ("trainer", "wait", parts[0][1], ended), *(("daemon", *part) for part in parts),
            ("engine", "serve", began, row["prepared"]), ("engine", "exchange", row["prepared"], row["exchanged"]),
            ("engine", "resume", row["exchanged"], row["committed"])]
    print("who,what,begin,end")
    for who, what, *times in rows:
        print(who, what, *(f"{(at - began) * 1e3:.2f}" for at in times), sep=",")


def quantile(values, share):
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


def measure(options, daemon, model, gib, arena):
    """Seconds of pauses, refits, and steps beside nothing and beside a refit."""
    group = f"bench-{'arena' if arena else 'in-place'}-{gib}"
    found = {"pause": [], "refit": [], "rollback": [], "idle": [], "busy": [], "updates": []}
    wrong = 0
    with refitd.Trainer(group, socket=daemon.socket) as trainer:
        trainer.register({str(number): weight for number, weight in enumerate(model)})
        peers = [Peer(options, daemon, group, gib, arena, rank) for rank in range(options.ranks)]
        for peer in peers:
            peer.line()
        watch = Watch(daemon, group) if options.timeline else None
        for number in range(1, options.versions + 1):
            version = trainer.next_version
            fill(model, version)
            synchronize(options.device)
            time.sleep(options.rest)
            began = time.monotonic()
            trainer.refit(version, verification=options.verification)
            ended = time.monotonic()
            rows = [peer.line() for peer in peers]
            wrong += sum(row["wrong"] + row.get("compared", 0) for row in rows)
            if number <= 2:
                continue  # programs are bound to each side once
            found["pause"].append(max(row["committed"] for row in rows) - max(row["prepared"] for row in rows))
            found["refit"].append(ended - began)
            row = rows[0]
            found["updates"].append((began, ended, row))
            found["idle"] += [seconds for at, seconds in row["steps"] if began - options.rest < at and at + seconds < began]
            found["busy"] += [seconds for at, seconds in row["steps"] if began < at and at + seconds < row["prepared"]]
            if arena and number <= 2 + options.rollbacks:
                began = time.monotonic()
                trainer.rollback()
                found["rollback"].append(time.monotonic() - began)
                wrong += sum(row["wrong"] + row["compared"] for row in [peer.line() for peer in peers])
        for peer in peers:
            peer.process.wait(SECONDS)
        if watch:
            watch.close()
            timeline(watch, found["updates"])
        if arena and options.restart:
            row = Peer(options, daemon, group, gib, arena, 0, restart=True).line()
            if not row["restored"] or row["version"] != version or row["wrong"]:
                sys.exit(f"the engine that took the place is wrong: {row}")
            found["restart"] = row["seconds"]
    if wrong:
        sys.exit(f"{wrong} steps and tensors are of another version")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, action="append")
    parser.add_argument("--arena-gib", type=float, default=0)
    parser.add_argument("--back", choices=["device", "host"], default="device", help="where versions are written beside the weights")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--versions", type=int, default=42)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--verification", default="readback")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds of steps before each refit")
    parser.add_argument("--rollbacks", type=int, default=0, help="fewer than versions by 3 at least")
    parser.add_argument("--restart", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--arena", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--socket", help=argparse.SUPPRESS)
    parser.add_argument("--group", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        return restart(options) if options.restart else serve(options)
    missed = 0
    if not options.json and not options.timeline:
        print("| GiB | pause in an arena, p50, p99, ms | goal | pause in place, p50, ms | refit, arena, in place, ms | ratio | steps while staged, to idle |")
        print("|---|---|---|---|---|---|---|", flush=True)
    for gib in options.gib or [1.1]:
        with testing.Daemon() as daemon:
            model = model_of(gib, options.device, options.ranks)
            refitd.adopt(model)
            rows = {arena: measure(options, daemon, model, gib, arena) for arena in ([True] if options.timeline else [True, False])}
            del model
        if options.timeline:
            continue
        goal = 5.0 if options.device == "cpu" else 3 + 22 * gib if options.back == "host" else 1.5 + 0.06 * gib
        p99 = quantile(rows[True]["pause"], 0.99) * 1e3
        medians = {arena: {kind: statistics.median(found[kind]) * 1e3 for kind in ("pause", "refit")} for arena, found in rows.items()}
        busy = rows[True]["busy"]
        steps = statistics.median(rows[True]["idle"]) / statistics.median(busy) if busy else math.nan
        missed += p99 > goal
        if options.json:
            print(json.dumps({"bench": "arena", "gib": gib, "pause_p50_ms": medians[True]["pause"], "pause_p99_ms": p99, "goal_ms": goal,
                              "back": options.back, "in_place_pause_ms": medians[False]["pause"], "refit_ms": medians[True]["refit"],
                              "in_place_refit_ms": medians[False]["refit"], "steps": steps,
                              "rollback_ms": [seconds * 1e3 for seconds in rows[True]["rollback"]],
                              "restart_seconds": rows[True].get("restart")}), flush=True)
        else:
            print("| %g | %.2f, %.2f | %.2f | %.2f | %.1f, %.1f | %.2f | %.2f |" % (
                gib, medians[True]["pause"], p99, goal, medians[False]["pause"], medians[True]["refit"], medians[False]["refit"],
                medians[True]["refit"] / medians[False]["refit"], steps), flush=True)
            if options.rollbacks:
                rollbacks = rows[True]["rollback"]
                print("%g GiB rolled back in %.2f, %.2f ms (p50, p99)" % (gib, statistics.median(rollbacks) * 1e3, quantile(rollbacks, 0.99) * 1e3))
            if options.restart:
                print("%g GiB restarted in %.2f s" % (gib, rows[True]["restart"]), flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
