"""The time from the loss of a coordinator for good to the next commit, with the daemons' default settings.

usage: tools/bench failover [--json] [--rounds 5] [--case stopped,killed] [--silence-ms N] [--failover-ms N]

Three daemons on this host, linked over loopback: a and b are candidates for the coordinator, in this order, and c is
none. An engine at b and one at c reattach, and compare their memory with the checkpoint after each commit. In each round
new daemons install a version; then a is lost, and a trainer at c (`refitctl push`) begins the next version again and
again until it is committed in both instances. A figure is the time from the loss to the end of that push.

  stopped  SIGSTOP: a keeps its connections and says nothing, as a machine that is gone; only silence tells
  killed   SIGKILL: a's connections end at once

The goal, 10 s, holds for the slowest round.
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
import typing

SECONDS = 120  # the time for any answer; only what hangs reaches it
GOAL = 10.0
GROUP = "failover"
BYTES = 1 << 20
SIGNALS = {"stopped": signal.SIGSTOP, "killed": signal.SIGKILL}


def fail(what: str) -> typing.NoReturn:
    sys.exit("bench: " + what)


def write_checkpoint(folder: str) -> None:
    header = json.dumps({"w": {"dtype": "BF16", "shape": [BYTES // 2], "data_offsets": [0, BYTES]}}).encode()
    header += b" " * (-len(header) % 8)
    os.makedirs(folder)
    with open(os.path.join(folder, "model.safetensors"), "wb") as out:
        out.write(len(header).to_bytes(8, "little") + header + os.urandom(BYTES))


class Fleet:
    """Daemons a, b and c, and the engines."""

    def __init__(self, checkpoint: str, options: argparse.Namespace) -> None:
        self.options = options
        self.checkpoint = checkpoint
        self.folder = tempfile.mkdtemp(prefix="failover-")
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self.daemons = {name: self.start(name) for name in "abc"}
            self.candidates = ",".join(self.address(name) for name in "ab")
            for name in "bc":
                engine = ["--socket", self.socket(name), "engine", "--group", GROUP, "--instance", "at-" + name]
                engine += ["--checkpoint", checkpoint, "--coordinator", self.candidates, "--reattach", str(SECONDS)]
                self.spawn([options.refitctl, *engine], "engine-" + name)
        except BaseException:
            self.end()
            raise

    def socket(self, name: str) -> str:
        return os.path.join(self.folder, name + ".sock")

    def spawn(self, argv: list[str], name: str) -> subprocess.Popen[bytes]:
        with open(os.path.join(self.folder, name + ".log"), "ab") as log:
            self.processes.append(subprocess.Popen(argv, stdout=log, stderr=log))
        return self.processes[-1]

    def start(self, name: str) -> subprocess.Popen[bytes]:
        flags = ["--daemon-id=" + name, "--listen-unix=" + self.socket(name), "--listen-tcp=127.0.0.1:0", "--insecure"]
        if self.options.silence_ms is not None:
            flags.append("--peer-silence-ms=%d" % self.options.silence_ms)
        if self.options.failover_ms is not None:
            flags.append("--failover-ms=%d" % self.options.failover_ms)
        return self.spawn([self.options.refitd, *flags], name)

    def ask(self, name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = [self.options.refitctl, "--socket", self.socket(name), "-o", "json", *arguments]
        try:
            return subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            fail("no end of %s\n%s" % (" ".join(argv), self.logs()))

    def address(self, name: str) -> str:
        """The address at which the daemon takes links. Waits until the daemon answers."""
        deadline = time.monotonic() + SECONDS
        while True:
            status = self.ask(name, "status")
            if status.returncode == 0:
                listeners: list[str] = json.loads(status.stdout)["listeners"]
                return next(listener[len("tcp:") :] for listener in listeners if listener.startswith("tcp:"))
            if time.monotonic() > deadline:
                fail("daemon %s does not answer: %s\n%s" % (name, status.stderr.strip(), self.logs()))
            time.sleep(0.05)

    def install(self, version: int) -> None:
        """Begins the version again and again until it is committed in both instances."""
        push = ["push", self.checkpoint, "--group", GROUP, "--version", str(version), "--coordinator", self.candidates]
        push += ["--create", "--instances", "2", "--duration", str(SECONDS / 2)]
        deadline = time.monotonic() + SECONDS
        while True:
            done = self.ask("c", *push)
            if done.returncode == 0:
                break
            if time.monotonic() > deadline:
                fail("version %d is not committed: %s\n%s" % (version, done.stderr.strip(), self.logs()))
            time.sleep(0.05)
        committed = sorted(i["instance"] for i in json.loads(done.stdout)["instances"] if i["committed"])
        if committed != ["at-b", "at-c"]:
            fail("version %d is committed in %s only" % (version, committed))

    def lose(self, how: str) -> float:
        """Seconds from the loss of a to the next commit."""
        self.install(1)
        started = time.monotonic()
        self.daemons["a"].send_signal(SIGNALS[how])
        self.install(2)
        return time.monotonic() - started

    def logs(self) -> str:
        text = ""
        for name in sorted(os.listdir(self.folder)):
            if name.endswith(".log"):
                with open(os.path.join(self.folder, name), encoding="utf-8", errors="replace") as log:
                    text += "---- %s\n%s" % (name, log.read()[-2000:])
        return text

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def measure(how: str, checkpoint: str, options: argparse.Namespace) -> list[float]:
    seconds = []
    for _ in range(options.rounds):
        fleet = Fleet(checkpoint, options)
        try:
            seconds.append(fleet.lose(how))
        finally:
            fleet.end()
    return seconds


def report(how: str, seconds: list[float], as_json: bool) -> bool:
    median, slowest = statistics.median(seconds), max(seconds)
    reached = slowest <= GOAL
    if as_json:
        row = {"bench": "failover", "case": "coordinator " + how, "value": median, "unit": "s", "max": slowest}
        row.update({"rounds": len(seconds), "goal": GOAL, "reached": reached})
        print(json.dumps(row), flush=True)
    else:
        print("coordinator %-8s  until the next commit: median %5.2f s   max of %d %5.2f s   goal <= %g s   %s"
              % (how, median, len(seconds), slowest, GOAL, "yes" if reached else "NO"), flush=True)
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description="From the loss of a coordinator for good to the next commit")
    parser.add_argument("--refitd", required=True)
    parser.add_argument("--refitctl", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", default="stopped,killed", help="of stopped, killed")
    parser.add_argument("--silence-ms", type=int, help="peers.silence_ms (default: the daemon's)")
    parser.add_argument("--failover-ms", type=int, help="peers.failover_ms (default: the daemon's)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="failover-model-")
    try:
        checkpoint = os.path.join(folder, "checkpoint")
        write_checkpoint(checkpoint)
        return 0 if all([report(how, measure(how, checkpoint, options), options.json) for how in options.case.split(",")]) else 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
