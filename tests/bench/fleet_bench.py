"""One trainers' node and many engine nodes over links of equal rate: the time of a refit and of a push.

usage: tools/bench fleet [--json] [--nodes 1,2,4,8] [--mib 64] [--rate 40] [--rounds 3] [--way refit,push]
       tools/bench fleet --catch-up 1,2,4 [--sources 4] [...]
       tools/bench fleet --way source [--sources 4] [...]
       tools/bench fleet --slow 0.25 [--nodes 4] [--relay-slow 500] [...]

Every node is a daemon in a network namespace of this process's own, joined to the others by a bridge in one more
namespace. What a node sends and what it receives is limited to RATE MB/s each by `tc` (a token bucket filter at either
end of its link), so that two cores do for many nodes. The trainer is `refitctl push` beside the first daemon, the engines
are `refitctl engine`, one instance a node, which compare their memory with the checkpoint after each commit. A figure is
the median over rounds of what the commit says it took; the first version, for which the program is compiled, is left out.

Two figures stand beside each time: what one engine node took, and the time of one link at its rate, which no way of
sending can beat.

With --catch-up, SOURCES engine nodes hold a version, and LATE others start their engines at the same moment: the group brings
them. A figure is the time from the start of their processes, which comes before they attach, until the last of them has
committed; each then compares its memory with the checkpoint. Beside it stand the bytes that crossed the busiest link
meanwhile, in one direction and with all headers, against the size of one late instance's weights.

With --way source, one late node catches up while a process reads memory as fast as it can: its rate in catch-ups against its
rate before and after them. All nodes share this host's processors, so the loss includes what all daemons take, not only
those of the source instances.

With --slow, the link of the last engine node has that part of the rate. Figures are a refit to all nodes; one in which the
coordinator leaves the slow node to catch-ups (`peers.relay_slow_ms`); and the time from its commit until the catch-up has committed.

Needs root, or a user who may make network namespaces, and iproute2.
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

SECONDS = 300  # the time for any answer; only what hangs reaches it
TENSORS = 16
GROUP = "fleet"
COORDINATOR = "10.78.0.1:7411"
POLL = 0.005  # seconds between two looks at the engines' events
CATCH_UP_LIMIT = (1.3, 0.3)  # the goal of a catch-up: so many times the link's time, and so many seconds more
LINK_LIMIT = 1.1  # the goal of the busiest link: so many times the bytes of one late instance
READER_LIMIT = 0.95  # the goal of a reader's rate in a catch-up: this part of its rate without catch-ups
READER_SECONDS = 2.0  # the reader reads for so long before and after each catch-up
SLOW_GOAL = 0.9  # the goal of the other nodes beside a slow one: this part of their link's rate


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


def link_columns(namespace: Namespace) -> list[int]:
    """The kernel's counters of a node's link: [0] bytes received, [8] bytes sent."""
    done = subprocess.run(
        namespace.enter(["cat", "/proc/net/dev"]), capture_output=True, text=True, timeout=SECONDS, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.strip().startswith("v0:"))
    return [int(column) for column in line.split(":")[1].split()]


class Network:
    """Namespaces of `nodes` nodes around a bridge. Node i is 10.78.0.(i + 1). The last one's link has `last` of the rate."""

    def __init__(self, nodes: int, rate: float, last: float = 1) -> None:
        self.switch = Namespace()
        self.nodes: list[Namespace] = []
        self.switch.run("ip link set lo up")
        self.switch.run("ip link add br0 type bridge")
        self.switch.run("ip link set br0 up")
        # The filters let a quarter of a megabyte pass at once; packets wait for up to 50 ms.
        for i in range(nodes):
            limit = "tbf rate %dkbps burst 256kb latency 50ms" % int(rate * 1000 * (last if i == nodes - 1 else 1))
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
        """The bytes that a node has sent on its link, with all headers."""
        return link_columns(self.nodes[node])[8]

    def traffic(self) -> dict[str, int]:
        """Bytes with all headers by link and direction, such as "node 2 sends"."""
        counted = {}
        for node, namespace in enumerate(self.nodes):
            columns = link_columns(namespace)
            counted["node %d receives" % node] = columns[0]
            counted["node %d sends" % node] = columns[8]
        return counted

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
    """Daemons, engines and the trainer's checkpoint. Node 0 is the trainers', the next `engines` have an engine each, and
    the last `spare` have a daemon alone until an engine is started there."""

    def __init__(
        self, engines: int, checkpoint: str, options: argparse.Namespace, spare: int = 0, last: float = 1, flags: tuple[str, ...] = ()
    ) -> None:
        self.folder = tempfile.mkdtemp(prefix="fleet-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.options = options
        self.checkpoint = checkpoint
        self.engines = engines
        self.spare = spare
        self.flags = flags  # the coordinator's flags
        self.network = Network(engines + spare + 1, options.rate, last)
        try:
            self.start()
        except BaseException:
            self.end()
            raise

    def socket(self, node: int) -> str:
        return os.path.join(self.folder, "%d.sock" % node)

    def spawn(self, node: int, argv: list[str]) -> "subprocess.Popen[bytes]":
        with open(os.path.join(self.folder, "log"), "ab") as log:
            process = subprocess.Popen(self.network.nodes[node].enter(argv), stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def start_engine(self, node: int, instance: str) -> "subprocess.Popen[bytes]":
        engine = ["--socket", self.socket(node), "engine", "--group", GROUP, "--instance", instance]
        engine += ["--checkpoint", self.checkpoint, "--coordinator", COORDINATOR, "--status-file", self.status(instance)]
        return self.spawn(node, [self.options.refitctl, *engine])

    def status(self, instance: str) -> str:
        return os.path.join(self.folder, instance + ".events")

    def events(self, instance: str) -> list[str]:
        """Names of what has happened to an engine so far."""
        try:
            with open(self.status(instance), encoding="utf-8") as lines:
                return [json.loads(line)["event"] for line in lines]
        except FileNotFoundError:
            return []

    def start(self) -> None:
        nodes = range(self.engines + self.spare + 1)
        for node in nodes:
            flags = ["--daemon-id=n%d" % node, "--data-interface=v0", "--listen-unix=" + self.socket(node), "--insecure"]
            if node == 0:
                flags += ["--listen-tcp=" + COORDINATOR, *self.flags]
            self.spawn(node, [self.options.refitd, *flags])
        deadline = time.monotonic() + SECONDS
        while not all(os.path.exists(self.socket(node)) for node in nodes):
            if time.monotonic() > deadline:
                fail("the daemons do not start: " + self.log())
            time.sleep(0.05)
        for node in range(1, self.engines + 1):
            self.start_engine(node, "i%d" % node)

    def push(self, way: str, without: str = "") -> float:
        """Installs one version in all instances, or in all but `without`; returns its seconds."""
        argv = [self.options.refitctl, "--socket", self.socket(0), "-o", "json", "push", self.checkpoint]
        argv += ["--group", GROUP, "--create", "--instances", str(self.engines), "--wait-instances", str(self.engines)]
        argv += ["--push", "--bucket-bytes", "4MiB"] if way == "push" else []
        done = subprocess.run(
            self.network.nodes[0].enter(argv), capture_output=True, text=True, timeout=SECONDS, check=False
        )
        if done.returncode != 0:
            fail("%s: %s\n%s" % (way, done.stderr.strip(), self.log()))
        answer = json.loads(done.stdout)
        if answer["way"] != way or not all(i["committed"] != (i["instance"] == without) for i in answer["instances"]):
            fail("%s: %s\n%s" % (way, done.stdout.strip(), self.log()))
        return float(answer["seconds"])

    def catch_up(self, late: int, number: int) -> "CatchUp":
        """Has `late` engines start at the spare nodes, waits until each catches up, and ends them."""
        instances = {self.engines + 1 + i: "late%d-%d" % (number, i) for i in range(late)}
        before = self.network.traffic()
        began = time.monotonic()
        started = {instance: self.start_engine(node, instance) for node, instance in instances.items()}
        attached: dict[str, float] = {}
        committed: dict[str, float] = {}
        verified: set[str] = set()
        traffic = before
        while len(verified) < late:
            now = time.monotonic()
            for instance in started:
                events = self.events(instance)
                if "mismatch" in events or "lost" in events or now > began + SECONDS:
                    fail("the catch-up of %s: %s\n%s" % (instance, events, self.log()))
                if "attached" in events:
                    attached.setdefault(instance, now)
                if "committed" in events and instance not in committed:
                    committed[instance] = now
                    if len(committed) == late:
                        traffic = self.network.traffic()
                if "verified" in events:
                    verified.add(instance)
            time.sleep(POLL)
        last = max(committed.values())
        catch_up = CatchUp(began, last, last - min(attached.values()), {k: traffic[k] - before[k] for k in before})
        for process in started.values():
            process.kill()
            process.wait()
        self.await_instances(self.engines)
        return catch_up

    def await_instances(self, number: int) -> None:
        """Waits until the group has so many instances with all their ranks."""
        argv = [self.options.refitctl, "--socket", self.socket(0), "-o", "json", "groups"]
        deadline = time.monotonic() + SECONDS
        while True:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=SECONDS, check=True)
            groups = json.loads(done.stdout)["groups"]
            if sum(i.get("attached", 0) > 0 for group in groups for i in group["instances"]) == number:
                return
            if time.monotonic() > deadline:
                fail("the group does not come to %d instances: %s" % (number, done.stdout))
            time.sleep(0.05)

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


class CatchUp:
    """A catch-up's times (`began`, `ended`: of time.monotonic) and bytes by link and direction."""

    def __init__(self, began: float, ended: float, since_attached: float, traffic: dict[str, int]) -> None:
        self.began, self.ended, self.since_attached, self.traffic = began, ended, since_attached, traffic
        self.busiest = max(traffic, key=lambda link: traffic[link])

    def seconds(self) -> float:
        return self.ended - self.began


def bench_catch_ups(checkpoint: str, size: int, options: argparse.Namespace) -> bool:
    """Prints a row for each number of late nodes. False: a goal was missed."""
    link = size / (options.rate * 1e6)
    limit = CATCH_UP_LIMIT[0] * link + CATCH_UP_LIMIT[1]
    numbers = [int(n) for n in options.catch_up.split(",")]
    reached = True
    fleet = Fleet(options.sources, checkpoint, options, spare=max(numbers))
    try:
        fleet.push("refit")
        number = 0
        for late in numbers:
            catch_ups = []
            for _ in range(options.rounds):
                number += 1
                catch_ups.append(fleet.catch_up(late, number))
            seconds = statistics.median(catch_up.seconds() for catch_up in catch_ups)
            since = statistics.median(catch_up.since_attached for catch_up in catch_ups)
            worst = max(catch_ups, key=lambda catch_up: catch_up.traffic[catch_up.busiest])
            share = worst.traffic[worst.busiest] / size
            reached = reached and seconds <= limit and share <= LINK_LIMIT
            if options.json:
                row = {"bench": "fleet", "case": "catch-up of %d" % late, "value": seconds, "unit": "s", "goal": limit}
                row.update({"since_attached": since, "of_link": link / seconds, "busiest": worst.busiest, "busiest_bytes": share})
                print(json.dumps(row), flush=True)
                continue
            print("catch-up of %2d by %2d  %8.2f s (goal %.2f)   %5.2f s since attached   %5.2f of the link   busiest link: %s %5.2f of a "
                  "late instance (goal %.2f)" % (late, options.sources, seconds, limit, since, link / seconds, worst.busiest, share, LINK_LIMIT),
                  flush=True)
    finally:
        fleet.end()
    return reached


# Searches memory for a byte that is not there, and prints when each pass ended.
READER = """
import sys, time
memory = bytearray(%d << 20)
while True:
    if memory.find(1) >= 0: sys.exit(1)
    print(time.monotonic(), flush=True)
"""
READER_MIB = 64  # far more than caches hold


class Reader:
    """A process that reads memory as fast as it can."""

    def __init__(self, folder: str) -> None:
        self.path = os.path.join(folder, "passes")
        with open(self.path, "wb") as passes:
            self.process = subprocess.Popen(
                [sys.executable, "-c", READER % READER_MIB], stdout=passes, start_new_session=True
            )

    def rate(self, began: float, ended: float) -> float:
        """GB/s of the passes that lie in this time."""
        with open(self.path, encoding="utf-8") as passes:
            ends = [float(line) for line in passes.read().split("\n")[:-1]]
        ends = [end for end in ends if began <= end <= ended]
        if len(ends) < 2:
            fail("the reader made %d passes in %.2f s" % (len(ends), ended - began))
        return (len(ends) - 1) * (READER_MIB << 20) / (ends[-1] - ends[0]) / 1e9

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def bench_source(checkpoint: str, options: argparse.Namespace) -> bool:
    """Prints what a reader beside the source instances loses. False: more than the goal allows."""
    fleet = Fleet(options.sources, checkpoint, options, spare=1)
    try:
        fleet.push("refit")
        reader = Reader(fleet.folder)
        kept, rates = [], []
        try:
            time.sleep(READER_SECONDS)
            for number in range(options.rounds):
                start = time.monotonic()
                time.sleep(READER_SECONDS)
                catch_up = fleet.catch_up(1, number)
                quiet = time.monotonic()
                time.sleep(READER_SECONDS)
                # The time since the late instance attached, without the start of its process.
                during = reader.rate(catch_up.ended - catch_up.since_attached, catch_up.ended)
                beside = (reader.rate(start, start + READER_SECONDS) + reader.rate(quiet, time.monotonic())) / 2
                kept.append(during / beside)
                rates.append((beside, during))
        finally:
            reader.end()
    finally:
        fleet.end()
    share = statistics.median(kept)
    beside, during = (statistics.median(pair[i] for pair in rates) for i in (0, 1))
    if options.json:
        row = {"bench": "fleet", "case": "reader beside source instances", "value": share, "unit": "of its rate", "goal": READER_LIMIT}
        row.update({"without": beside, "with": during, "least": min(kept), "most": max(kept)})
        print(json.dumps(row), flush=True)
    else:
        print("reader beside %d source instances  %5.2f GB/s, in a catch-up %5.2f GB/s: %5.3f of it (goal %.2f), %.3f to %.3f over %d catch-ups"
              % (options.sources, beside, during, share, READER_LIMIT, min(kept), max(kept), options.rounds), flush=True)
    return share >= READER_LIMIT


def bench_slow(checkpoint: str, size: int, options: argparse.Namespace) -> bool:
    """Prints what a slow node costs the others, without and with `peers.relay_slow_ms`. False: a goal was missed."""
    link = size / (options.rate * 1e6)
    engines = int(options.nodes.split(",")[-1])
    slow = "i%d" % engines

    def row(case: str, seconds: float, goal: "float | None") -> None:
        if options.json:
            print(json.dumps({"bench": "fleet", "case": case, "value": seconds, "unit": "s", "goal": goal, "of_link": link / seconds}), flush=True)
        else:
            print("%-46s %8.2f s   %5.2f of the link%s" % (case, seconds, link / seconds, "" if goal is None else " (goal %.2f s)" % goal), flush=True)

    name = "one of %d nodes at %.2f of the rate" % (engines, options.slow)
    fleet = Fleet(engines, checkpoint, options, last=options.slow)
    try:
        fleet.push("refit")
        row(name + ": all", statistics.median(fleet.push("refit") for _ in range(options.rounds)), None)
    finally:
        fleet.end()
    others, caught_up = [], []
    fleet = Fleet(engines, checkpoint, options, last=options.slow, flags=("--peers-relay-slow-ms=%d" % options.relay_slow,))
    try:
        fleet.push("refit")
        for _ in range(options.rounds):
            before = fleet.events(slow).count("committed")
            others.append(fleet.push("refit", slow))
            began = time.monotonic()
            while fleet.events(slow).count("committed") == before:
                if time.monotonic() > began + SECONDS:
                    fail("%s does not catch up: %s\n%s" % (slow, fleet.events(slow), fleet.log()))
                time.sleep(POLL)
            caught_up.append(time.monotonic() - began)
    finally:
        fleet.end()
    seconds = statistics.median(others)
    row(name + ", left to a catch-up", seconds, link / SLOW_GOAL)
    row("from the others' commit until it catches up", statistics.median(caught_up), None)
    return link / seconds >= SLOW_GOAL


class Row:
    def __init__(self, way: str, engines: int, seconds: float, link: float, of_one: float, sent: float) -> None:
        self.way, self.engines, self.seconds = way, engines, seconds
        self.of_link = link / seconds
        self.of_one = seconds / of_one
        self.each = seconds / (link * engines)  # this part of the time that sending to each node in turn takes
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
    """The median of the seconds of each way, and how much of the model the trainers' node sent for a version."""
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
    parser.add_argument("--way", default="refit,push", help="refit, push, or both; source: a reader beside engines that give")
    parser.add_argument("--catch-up", help="numbers of late engine nodes to bring up to date, instead of refits and pushes")
    parser.add_argument("--sources", type=int, default=4, help="engine nodes that hold the version that late ones are brought")
    parser.add_argument("--slow", type=float, help="the last engine node's link has this part of the rate, instead of refits and pushes")
    parser.add_argument("--relay-slow", type=int, default=500, help="with --slow: peers.relay_slow_ms of the coordinator")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="fleet-model-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    reached = True
    try:
        checkpoint = os.path.join(folder, "checkpoint")
        size = write_checkpoint(checkpoint, options.mib)
        link = size / (options.rate * 1e6)
        if options.catch_up is not None:
            return 0 if bench_catch_ups(checkpoint, size, options) else 1
        if options.slow is not None:
            return 0 if bench_slow(checkpoint, size, options) else 1
        if options.way == "source":
            return 0 if bench_source(checkpoint, options) else 1
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
