"""One trainers' node and many engine nodes over links of equal rate: the time of a refit and of a push.

usage: tools/bench fleet [--json] [--nodes 1,2,4,8] [--mib 64] [--rate 40] [--rounds 3] [--way refit,push]

Every node is a daemon in a network namespace of this process's own, joined to the others by a bridge in one more
namespace. What a node sends and what it receives is limited to RATE MB/s each by `tc` (a token bucket filter at either
end of its link), so that two cores do for many nodes. The trainer is `refitctl push` beside the first daemon, the engines
are `refitctl engine`, one instance a node, which compare their memory with the checkpoint after each commit. A figure is
the median over rounds of what the commit says it took; the first version, for which the program is compiled, is left out.

Two figures stand beside each time: what one engine node took, and the time of one link at its rate, which no way of
sending can beat. Needs root, or a user who may make network namespaces, and iproute2.
"""

import argparse
import json
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SECONDS = 300  # for any answer; only what hangs reaches it
TENSORS = 16
GROUP = "fleet"


def fail(what: str) -> None:
    sys.exit("bench: " + what)


class Namespace:
    """A network namespace, which lives as long as its process."""

    def __init__(self) -> None:
        self.holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo; exec sleep infinity"], stdout=subprocess.PIPE, start_new_session=True
        )
        assert self.holder.stdout is not None
        if not self.holder.stdout.readline():
            fail("network namespaces can't be made here")

    def enter(self, argv: list[str]) -> list[str]:
        return ["nsenter", "--net=/proc/%d/ns/net" % self.holder.pid, *argv]

    def run(self, command: str) -> None:
        done = subprocess.run(self.enter(command.split()), capture_output=True, text=True, timeout=SECONDS)
        if done.returncode != 0:
            fail("`%s`: %s" % (command, done.stderr.strip()))

    def end(self) -> None:
        self.holder.kill()
        self.holder.wait()


class Network:
    """Namespaces of `nodes` nodes around a bridge. Node i is 10.78.0.(i + 1)."""

    def __init__(self, nodes: int, rate: float) -> None:
        self.switch = Namespace()
        self.nodes: list[Namespace] = []
        self.switch.run("ip link set lo up")
        self.switch.run("ip link add br0 type bridge")
        self.switch.run("ip link set br0 up")
        # A quarter of a megabyte passes at once; packets wait for up to 50 ms.
        limit = "tbf rate %dkbps burst 256kb latency 50ms" % int(rate * 1000)
        for i in range(nodes):
            node = Namespace()
            self.nodes.append(node)
            node.run("ip link set lo up")
            node.run("ip link add v0 type veth peer name s%d netns /proc/%d/ns/net" % (i, self.switch.holder.pid))
            node.run("ip addr add 10.78.0.%d/24 dev v0" % (i + 1))
            node.run("ip link set v0 up")
            self.switch.run("ip link set s%d master br0" % i)
            self.switch.run("ip link set s%d up" % i)
            node.run("tc qdisc replace dev v0 root " + limit)
            self.switch.run("tc qdisc replace dev s%d root %s" % (i, limit))

    def sent(self, node: int) -> int:
        """What a node has sent on its link, in bytes with all headers."""
        done = subprocess.run(
            self.nodes[node].enter(["cat", "/proc/net/dev"]), capture_output=True, text=True, timeout=SECONDS, check=True
        )
        line = next(line for line in done.stdout.splitlines() if line.strip().startswith("v0:"))
        return int(line.split(":")[1].split()[8])

    def end(self) -> None:
        for namespace in [self.switch, *self.nodes]:
            namespace.end()


def write_checkpoint(folder: str, mib: int) -> int:
    """A safetensors file of random bfloat16 matrices, `mib` MiB in all."""
    rows = mib * (1 << 20) // TENSORS // 2 // 1024
    size = rows * 1024 * 2
    header = {
        "w%02d" % t: {"dtype": "BF16", "shape": [rows, 1024], "data_offsets": [t * size, (t + 1) * size]}
        for t in range(TENSORS)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    os.makedirs(folder)
    with open(os.path.join(folder, "model.safetensors"), "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for _ in range(TENSORS):
            out.write(os.urandom(size))
    return size * TENSORS


class Fleet:
    """Daemons, engines and the trainer's checkpoint. Node 0 is the trainers'."""

    def __init__(self, engines: int, checkpoint: str, options: argparse.Namespace) -> None:
        self.folder = tempfile.mkdtemp(prefix="fleet-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.options = options
        self.checkpoint = checkpoint
        self.engines = engines
        self.network = Network(engines + 1, options.rate)
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def socket(self, node: int) -> str:
        return os.path.join(self.folder, "%d.sock" % node)

    def spawn(self, node: int, argv: list[str]) -> None:
        log = open(os.path.join(self.folder, "log"), "ab")
        self.processes.append(
            subprocess.Popen(self.network.nodes[node].enter(argv), stdout=log, stderr=log, start_new_session=True)
        )

    def start(self) -> None:
        coordinator = "10.78.0.1:7411"
        for node in range(self.engines + 1):
            flags = ["--daemon-id=n%d" % node, "--data-interface=v0", "--listen-unix=" + self.socket(node), "--insecure"]
            if node == 0:
                flags += ["--listen-tcp=" + coordinator]
            self.spawn(node, [self.options.refitd, *flags])
        deadline = time.monotonic() + SECONDS
        while not all(os.path.exists(self.socket(node)) for node in range(self.engines + 1)):
            if time.monotonic() > deadline:
                fail("the daemons do not start: " + self.log())
            time.sleep(0.05)
        for node in range(1, self.engines + 1):
            engine = ["--socket", self.socket(node), "engine", "--group", GROUP, "--instance", "i%d" % node]
            engine += ["--checkpoint", self.checkpoint, "--coordinator", coordinator]
            self.spawn(node, [self.options.refitctl, *engine])

    def push(self, way: str) -> float:
        """Installs one version; returns its seconds."""
        argv = [self.options.refitctl, "--socket", self.socket(0), "-o", "json", "push", self.checkpoint]
        argv += ["--group", GROUP, "--create", "--instances", str(self.engines), "--wait-instances", str(self.engines)]
        argv += ["--push", "--bucket-bytes", "4MiB"] if way == "push" else []
        done = subprocess.run(
            self.network.nodes[0].enter(argv), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode != 0:
            fail("%s: %s\n%s" % (way, done.stderr.strip(), self.log()))
        answer = json.loads(done.stdout)
        if answer["way"] != way or not all(i["committed"] for i in answer["instances"]):
            fail("%s: %s" % (way, done.stdout.strip()))
        return float(answer["seconds"])

    def log(self) -> str:
        with open(os.path.join(self.folder, "log"), encoding="utf-8", errors="replace") as text:
            lines = text.read().splitlines()
        return "\n".join(line for line in lines if not re.search(r"\binfo\b", line))[-2000:]

    def end(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()
        self.network.end()
        shutil.rmtree(self.folder, ignore_errors=True)


class Row:
    def __init__(self, way: str, engines: int, seconds: float, link: float, of_one: float, sent: float) -> None:
        self.way, self.engines, self.seconds = way, engines, seconds
        self.of_link = link / seconds
        self.of_one = seconds / of_one
        self.each = seconds / (link * engines)  # of the time of sending to each in turn
        self.sent = sent

    def print(self, as_json: bool) -> None:
        if as_json:
            row = {"bench": "fleet", "case": "%s to %d" % (self.way, self.engines), "value": self.seconds, "unit": "s"}
            row.update({"of_one": self.of_one, "of_link": self.of_link, "of_each": self.each, "sent": self.sent})
            print(json.dumps(row), flush=True)
            return
        print("%-6s to %2d nodes  %8.2f s   %5.2f of one node   %5.2f of the link   %5.2f of sending to each   trainers' node sends "
              "%5.2f of the model" % (self.way, self.engines, self.seconds, self.of_one, self.of_link, self.each, self.sent),
              flush=True)


def measure(engines: int, checkpoint: str, size: int, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """By way: the median of its seconds, and what the trainers' node sent of the model a version."""
    fleet = Fleet(engines, checkpoint, options)
    measured = {}
    try:
        for way in options.way.split(","):
            fleet.push(way)
            before = fleet.network.sent(0)
            seconds = [fleet.push(way) for _ in range(options.rounds)]
            sent = (fleet.network.sent(0) - before) / size / options.rounds
            measured[way] = (statistics.median(seconds), sent)
    finally:
        fleet.end()
    return measured


def main() -> int:
    parser = argparse.ArgumentParser(description="A refit and a push to many nodes over links of equal rate")
    parser.add_argument("--refitd", required=True)
    parser.add_argument("--refitctl", required=True)
    parser.add_argument("--nodes", default="1,2,4,8", help="numbers of engine nodes; the first is what others are compared with")
    parser.add_argument("--mib", type=int, default=64, help="size of the model")
    parser.add_argument("--rate", type=float, default=40, help="of each link and direction, in MB/s")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many")
    parser.add_argument("--way", default="refit,push")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="fleet-model-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    reached = True
    try:
        checkpoint = os.path.join(folder, "checkpoint")
        size = write_checkpoint(checkpoint, options.mib)
        link = size / (options.rate * 1e6)
        first: dict[str, float] = {}
        for engines in [int(n) for n in options.nodes.split(",")]:
            for way, (seconds, sent) in measure(engines, checkpoint, size, options).items():
                row = Row(way, engines, seconds, link, first.setdefault(way, seconds), sent)
                row.print(options.json)
                reached = reached and (way != "refit" or (row.of_one <= 1.15 and row.of_link >= 0.9))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
