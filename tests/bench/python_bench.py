"""The cost of Python: the same refits, pushes and registrations through refitd's Python package and through its C++ client.

usage: tools/bench python [--json] [--rounds N] [--case NAME]...

Both trainers use one daemon and the same memory of weights; each has a group and an engine of its own. They take turns,
and a figure is a ratio, or a difference, of medians in one run. Weights are fresh in every round, and what each engine
then holds is compared, outside the measured time, with the digest of the weights. Run by PyTorch's environment of
tools/torch_env.py; the C++ half is python_peer.cc.
"""

import argparse
import gc
import json
import os
import re
import select
import statistics
import subprocess
import sys
import time

import torch

import refitd
from refitd import testing

SECONDS = 120  # the time for an answer; only what hangs reaches it
REFIT_MODEL = "qwen3-0.6b"
SMALL_MODEL = "1mib"
MANY_SMALL = "moonlight-16b-a3b/32"
MOST_TENSORS = "qwen3-30b-a3b/32"


class Figure:
    """A row of the table. `goal` is a ceiling of the ratio where there is a baseline and `of_ratio`, else of the value."""

    def __init__(self, name, value, unit, goal, baseline=None, of_ratio=True):
        self.name, self.value, self.unit, self.goal, self.baseline = name, value, unit, goal, baseline
        self.ratio = value / baseline if baseline else None
        self.reached = (self.ratio if baseline and of_ratio else value) <= goal

    def print(self, as_json):
        if as_json:
            row = {"bench": "python", "case": self.name, "value": self.value, "unit": self.unit, "baseline": self.baseline or 0,
                   "ratio": self.ratio or 0, "goal": self.goal, "reached": self.reached}
            print(json.dumps(row), flush=True)
            return
        baseline = "%.3f" % self.baseline if self.baseline else ""
        ratio = "%.2f" % self.ratio if self.ratio else ""
        print("%-66s %10.3f %-4s %10s %6s  <= %-6g %s" % (
            self.name, self.value, self.unit, baseline, ratio, self.goal, "yes" if self.reached else "NO"), flush=True)


def fail(what):
    sys.exit("bench: " + what)


class Peer:
    """A process of python_peer, whose lines are read with a deadline."""

    def __init__(self, binary, *arguments, descriptors=()):
        self.process = subprocess.Popen(
            [binary, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=descriptors)
        self.rest = b""

    def line(self):
        deadline = time.monotonic() + SECONDS
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            if not ready:
                fail("no answer of the C++ side within %d s" % SECONDS)
            more = os.read(self.process.stdout.fileno(), 65536)
            if not more:
                fail("the C++ side ended")
            self.rest += more
        line, self.rest = self.rest.split(b"\n", 1)
        return line.decode()

    def ask(self, command):
        self.process.stdin.write(command.encode() + b"\n")
        self.process.stdin.flush()
        return self.line()

    def end(self):
        self.process.terminate()
        self.process.wait(SECONDS)
        self.process.stdin.close()
        self.process.stdout.close()


class Pair:
    """Two trainers of one model, one in C++ and one in Python, over the same memory, each with an engine."""

    def __init__(self, binary, socket, model, engines=True):
        table = json.loads(subprocess.run(
            [binary, "--role", "table", "--model", model], check=True, stdout=subprocess.PIPE, timeout=SECONDS).stdout)
        self.bytes = table["bytes"]
        self.region = refitd.Region(self.bytes)
        # Tensors of the checkpoint's names over the shared memory.
        self.tensors = {
            name: self.region.tensor(shape, dtype, offset) for name, dtype, shape, offset in table["tensors"]}
        # Names of groups.
        self.names = {side: model.replace("/", "-") + "-" + side for side in ("cpp", "python")}
        self.engines = {}
        if engines:
            self.engines = {side: Peer(binary, "--role", "engine", "--socket", socket, "--group", group, "--model", model)
                            for side, group in self.names.items()}
        self.cpp = Peer(
            binary, "--role", "trainer", "--socket", socket, "--group", self.names["cpp"], "--model", model,
            "--descriptor", str(self.region.descriptor), descriptors=[self.region.descriptor])
        self.python = refitd.Trainer(self.names["python"], socket=socket)
        self.version = 0

    def end(self):
        self.python.close()
        for peer in (self.cpp, *self.engines.values()):
            peer.end()

    def turns(self, rounds, cases):
        """Calls the cases in turn on fresh weights, and compares the engines. `cases`: name to (side, a function of the version that
        returns seconds). Returns the name's seconds of each round but the first, in which pages and programs are made."""
        seconds = {name: [] for name in cases}
        commits = dict.fromkeys(self.engines, 0)
        for number in range(rounds + 1):
            # Each begins as often as the others.
            order = list(cases)[number % len(cases):] + list(cases)[:number % len(cases)]
            digest = self.cpp.ask("fill %d" % (number + 1))
            for name in order:
                side, function = cases[name]
                self.version += 1
                commits[side] += 1
                took = function(self.version)
                told = self.engines[side].line()
                if told != "%d %s" % (commits[side], digest):
                    fail("%s: the engine holds %s, not %s" % (name, told, digest))
                if number:
                    seconds[name].append(took)
        return seconds


def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - start


def asked(pair, command):
    """A case of the C++ side."""
    return lambda version: float(pair.cpp.ask("%s %d" % (command, version)))


def refit(options, socket):
    """Compares refits through Python with refits through C++, of a large model and of a small one."""
    for model, rounds in ((REFIT_MODEL, options.rounds), (SMALL_MODEL, 20 * options.rounds)):
        pair = Pair(options.peer, socket, model)
        pair.cpp.ask("register")
        pair.python.register(pair.tensors)
        took = pair.turns(rounds, {
            "cpp": ("cpp", asked(pair, "refit")),
            "python": ("python", lambda version: timed(pair.python.refit, version))})
        pair.end()
        cpp, python = statistics.median(took["cpp"]) * 1e3, statistics.median(took["python"]) * 1e3
        if model == SMALL_MODEL:
            yield Figure("refit of 1 MiB: what Python adds to %.1f ms" % cpp, python - cpp, "ms", 1.5)
        else:
            yield Figure("refit of %s (1.11 GiB), against C++" % model, python, "ms", 1.05, cpp)


def push(options, socket):
    """Many small tensors of temporary memory: Python packs them into leased slots, as C++ does."""
    pair = Pair(options.peer, socket, MANY_SMALL)
    # The source of a push is any memory; these are not in a region.
    tensors = {name: torch.empty_like(tensor) for name, tensor in pair.tensors.items()}

    def through_python(version):
        for name, tensor in tensors.items():
            tensor.copy_(pair.tensors[name])
        start = time.perf_counter()
        with pair.python.update(version) as update:
            for name, tensor in tensors.items():
                update.push(name, tensor)
        return time.perf_counter() - start

    took = pair.turns(options.rounds, {
        "pack": ("cpp", asked(pair, "pack")), "push": ("cpp", asked(pair, "push")), "python": ("python", through_python)})
    pair.end()
    pack, in_place, python = (statistics.median(took[name]) * 1e3 for name in ("pack", "push", "python"))
    what = "push of %d tensors (%.1f MiB), against C++ " % (len(tensors), pair.bytes / 2**20)
    yield Figure(what + "packing as well", python, "ms", 1.2, pack)
    # A busy machine disturbs the fastest round least.
    yield Figure("the fastest of these rounds on either side", min(took["python"]) * 1e3, "ms", 1.2, min(took["pack"]) * 1e3)
    yield Figure(what + "from a region", python, "ms", 1.2, in_place)


def registration(options, socket):
    pair = Pair(options.peer, socket, MOST_TENSORS, engines=False)
    cpp, python = [], []
    for number in range(options.rounds):
        cpp.append(float(pair.cpp.ask("register")))
        # Names differ each time, so that nothing of the time before can be used.
        state = {"%s.%d" % (name, number): tensor for name, tensor in pair.tensors.items()}
        gc.collect()
        python.append(timed(pair.python.register, state))
    calls, asked = [], []
    tensors = list(pair.tensors.values())
    for number in range(8 * options.rounds):
        calls.append(timed(lambda: [tensor.data_ptr() for tensor in tensors]))
        asked.append(timed(pair.python._registration.moved))  # each refit asks this
    pair.end()
    yield Figure("registration of %d tensors, beside C++" % len(pair.tensors), statistics.median(python), "s", 1.0,
                 statistics.median(cpp), of_ratio=False)
    yield Figure("asking these where they are now, against a call each", statistics.median(asked) * 1e3, "ms", 0.5,
                 statistics.median(calls) * 1e3)


EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def fused_engine(tensors):
    """Parameters of an engine that fuses experts as vLLM does, and its loader."""
    parameters, experts, rows = {}, {}, {}
    for name, tensor in tensors.items():
        found = EXPERT.fullmatch(name)
        if found:
            prefix, _, kind = found.groups()
            experts[prefix] = experts.get(prefix, 0) + (kind == "gate")
            rows[prefix, kind] = tuple(tensor.shape)
        else:
            parameters[name] = torch.empty_like(tensor)
    for prefix, count in experts.items():
        (width, hidden), down = rows[prefix, "gate"], rows[prefix, "down"]
        parameters[prefix + ".w13_weight"] = torch.empty(count, 2 * width, hidden, dtype=torch.bfloat16)
        parameters[prefix + ".w2_weight"] = torch.empty(count, *down, dtype=torch.bfloat16)

    def load_weights(weights):
        for name, tensor in weights:
            found = EXPERT.fullmatch(name)
            if not found:
                parameters[name].copy_(tensor)
                continue
            prefix, expert, kind = found.groups()
            if kind == "down":
                parameters[prefix + ".w2_weight"][int(expert)].copy_(tensor)
                continue
            halves = parameters[prefix + ".w13_weight"][int(expert)].chunk(2)
            halves[kind == "up"].copy_(tensor)

    return parameters, load_weights


def capture(options, socket):
    pair = Pair(options.peer, socket, MOST_TENSORS, engines=False)
    parameters, load_weights = fused_engine(pair.tensors)
    manifest = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in pair.tensors.items()]
    took = []
    for _ in range(options.rounds):
        gc.collect()
        start = time.perf_counter()
        captured = refitd.capture(load_weights, manifest, parameters=parameters)
        took.append(time.perf_counter() - start)
        if len(captured.direct) != len(manifest) or captured.unsupported or captured.processed:
            fail("capture: %d of %d copies, unsupported: %s" % (len(captured.direct), len(manifest), captured.unsupported))
    pair.end()
    yield Figure("capture of a loader's %d copies" % len(manifest), statistics.median(took), "s", 5)


CASES = {"refit": refit, "push": push, "registration": registration, "capture": capture}


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\n")[0])
    parser.add_argument("--peer", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--case", action="append", choices=CASES)
    options = parser.parse_args()
    reached = True
    if not options.json:
        print("%-66s %10s %-4s %10s %6s  %-9s %s" % ("case", "value", "unit", "baseline", "ratio", "goal", "reached"))
    for case in options.case or CASES:
        with testing.daemon("--log-level", "warning") as daemon:
            for figure in CASES[case](options, daemon.socket):
                figure.print(options.json)
                reached = reached and figure.reached
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
