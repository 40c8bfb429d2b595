"""A refit of torch's tensors by the Python package beside the same refit by the C++ ranks, through one daemon, taking turns.

  python3 -m pip install --no-index --no-deps --target site refitd-*.whl     # tools/wheel builds it
  PYTHONPATH=$PWD/site python3 refitd-gpu/python_bench.py [--rounds N] [--parts]

Trainer and engine share the first GPU. Every version has fresh random values, and every element is checked after it. Prints a
markdown table: medians of the seconds from the call to its return, the ratio, and by how many milliseconds Python is later.
`--parts`: of what these are made, in milliseconds: by the daemon's clock; the trainer's look at its tensors, its wait for the device, and the
rest; the engine from Prepare to ready, and of that its wait for the device and its look.
Then a writer on a side stream is late in 100 versions, and refit() must wait for it."""

import argparse
import os
import sys

from orchestrate import HERE, Daemon, Group, Machine, Process, expect

MODELS = (
    ("1 MiB in 4 tensors", "4:262144"),
    ("1.1 GiB in 310 tensors", "310:3932160"),
    ("8 GiB in 256 tensors", "256:33554432"),
    ("1 GiB in 18,867 tensors", "18867:57344"),
)
LATE_VERSIONS = 100


def median(values):
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


class PythonGroup:
    """One trainer and one engine, processes of python_rank.py."""

    def __init__(self, daemon, tensors):
        self.ranks, self.parts = [], []
        for role in ("trainer", "engine"):
            command = [sys.executable, os.path.join(HERE, "python_rank.py"), role, "--socket", daemon.socket, "--group", "python",
                       "--tensors", tensors]
            self.ranks.append(Process("python " + role, command))
        self.trainer, self.engine = self.ranks
        self.ready = [rank.wait("ready", 180) for rank in self.ranks]

    def version(self, version, verification):
        self.trainer.call("fill %d" % version)
        answer = self.trainer.call("refit %d %s" % (version, verification))
        expect(answer["ok"] and answer["committed"] == 1 and answer["staged"] == 0, "version %d: %s", version, answer)
        parts = {"engine " + name: seconds for name, seconds in self.engine.wait("committed", version=version)["parts"].items()}
        found = self.engine.call("check %d" % version)
        expect(found["wrong"] == 0, "version %d: %d wrong tensors", version, found["wrong"])
        parts.update(answer["parts"], rest=answer["seconds"] - sum(answer["parts"].values()))
        self.parts.append(parts)
        return answer["seconds"]

    def late(self, version, streams):
        """How many tensors are wrong after a refit that waited for these streams."""
        self.trainer.call("late %d %s" % (version, streams))
        self.engine.wait("committed", version=version)
        return self.engine.call("check %d" % version)["wrong"]

    def kill(self):
        for rank in self.ranks:
            rank.kill()


def late_writer():
    daemon, group = Daemon(), None
    try:
        group = PythonGroup(daemon, "64:1048576")
        for version in range(1, LATE_VERSIONS + 1):
            wrong = group.late(version, ("all", "named")[version % 2])
            expect(wrong == 0, "late writer, version %d: %d wrong tensors", version, wrong)
        expect(group.late(LATE_VERSIONS + 1, "none") > 0, "the writer was not late: a refit that waited for no stream was right")
    finally:
        if group is not None:
            group.kill()
        daemon.kill()
    print("late writer on a side stream: %d versions, all right" % LATE_VERSIONS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    print("| model | verification | C++, ms | Python, ms | Python / C++ | later by, ms | registration in Python, ms |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name, tensors in MODELS:
        daemon = Daemon()
        groups = []
        try:
            native = Group(daemon, Machine(1), {"memory": "legacy", "model": "tensors:" + tensors}, {"layout": "megatron", "world": 1},
                           {"world": 1}, name="native", colocated=True)
            groups.append(native)
            python = PythonGroup(daemon, tensors)
            groups.append(python)
            version = 0
            for verification in ("off", "transfer"):
                taken, daemons = ([], []), []
                for _ in range(options.rounds + 2):  # two to warm up
                    version += 1
                    taken[0].append(native.version("refit", version, verification))
                    daemons.append(native.daemon_seconds)
                    taken[1].append(python.version(version, verification))
                native_s, python_s = (median(seconds[2:]) for seconds in taken)
                print("| %s | %s | %.2f | %.2f | %.2f | %.2f | %.0f |" % (
                    name, verification, native_s * 1e3, python_s * 1e3, python_s / native_s, (python_s - native_s) * 1e3,
                    max(ready["registered"] for ready in python.ready) * 1e3), flush=True)
                if options.parts:
                    rounds = python.parts[-options.rounds:]
                    print("parts: C++ daemon %.3f, " % (median(daemons[2:]) * 1e3) + ", ".join(
                        "%s %.3f" % (name, median([parts[name] for parts in rounds]) * 1e3) for name in rounds[-1]), flush=True)
        finally:
            for group in groups:
                group.kill()
            daemon.kill()
    late_writer()
    return 0


if __name__ == "__main__":
    sys.exit(main())
