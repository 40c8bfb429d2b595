"""refitd and ranks as processes, for test and bench beside this file: every wait has a deadline, and everything that was
started is killed at the end. Standard library only. Runs from an unpacked bundle (see make_bundle.sh)."""

import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
BIN = os.environ.get("REFITD_GPU_BIN", os.path.join(HERE, "bin"))

START_SECONDS = 60  # the time until a daemon or a rank is ready (a model's memory included)
ANSWER_SECONDS = 120  # the time for one command
LOOK_SECONDS = 0.01  # the time between two looks at a condition
TOGETHER_SECONDS = 0.02  # ranks begin an update so much later, when each has heard of it


class Failure(Exception):
    """A case found something wrong."""


def expect(condition, what, *values):
    if not condition:
        raise Failure(what % values if values else what)


def gpus():
    """The GPUs' UUIDs, by ordinal; empty where there is no driver."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True, timeout=60
        )
    except OSError:
        return []
    return listed.stdout.split() if listed.returncode == 0 else []


def used_mib():
    """The memory in use on each GPU by all processes, in MiB."""
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [int(word) for word in listed.stdout.split()]


def wait_for(what, condition, seconds=ANSWER_SECONDS):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(LOOK_SECONDS)
    raise Failure("not within %d s: %s" % (seconds, what))


def settled_mib():
    """The memory in use once two readings agree, since an ended process gives its memory back a little later."""
    readings = [used_mib(), None]

    def same():
        readings[1] = readings[0]
        readings[0] = used_mib()
        return readings[0] == readings[1]

    wait_for("used memory settles", same, 60)
    return readings[0]


class Process:
    """A child that talks JSON lines on stdout. stderr is kept in a file."""

    def __init__(self, name, command, environment=None):
        self.name = name
        self.errors = tempfile.TemporaryFile()
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
        )
        self.lines = queue.Queue()
        self.kept = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            try:
                self.lines.put((time.monotonic(), json.loads(line)))
            except ValueError:
                self.lines.put((time.monotonic(), {"event": "text", "text": line.decode(errors="replace")}))
        self.lines.put((time.monotonic(), None))

    def error_text(self):
        self.errors.seek(0)
        return self.errors.read().decode(errors="replace")[-2000:]

    def wait(self, event, seconds=ANSWER_SECONDS, **fields):
        """Waits for an object of that event (and those fields), and hands it out. Other objects stay for later calls.
        """

        def matches(line):
            return line["event"] == event and all(line.get(key) == value for key, value in fields.items())

        for index, line in enumerate(self.kept):
            if matches(line):
                return self.kept.pop(index)
        deadline = time.monotonic() + seconds
        while True:
            try:
                _, line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise Failure("%s: no %s %s within %d s; has %s; stderr: %s" % (
                    self.name, event, fields, seconds, self.kept[-3:], self.error_text()))
            if line is None:
                self.lines.put((0, None))
                raise Failure("%s ended (%s) before %s %s; said %s; stderr: %s" % (
                    self.name, self.process.poll(), event, fields, self.kept[-3:], self.error_text()))
            if matches(line):
                return line
            self.kept.append(line)

    def send(self, text):
        try:
            self.process.stdin.write((text + "\n").encode())
            self.process.stdin.flush()
        except OSError:
            raise Failure("%s is gone (%s): %s" % (self.name, self.process.poll(), self.error_text()))

    def call(self, text, seconds=ANSWER_SECONDS):
        self.send(text)
        return self.wait(text.split()[0], seconds)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def quit(self, seconds=ANSWER_SECONDS):
        self.send("quit")
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise Failure("%s does not quit" % self.name)


def torch_nccl():
    """The NCCL that torch brings in a wheel of its own, if there is one: the baselines run with it."""
    try:
        import importlib.util
        spec = importlib.util.find_spec("nvidia.nccl")
        places = list(spec.submodule_search_locations) if spec else []
    except (ImportError, ValueError):
        places = []
    found = [os.path.join(place, "lib", "libnccl.so.2") for place in places]
    return [path for path in found if os.path.exists(path)]


class Daemon:
    """A refitd on a socket in a fresh folder, with torch's NCCL where there is one."""

    def __init__(self, *flags, environment=None):
        self.folder = tempfile.mkdtemp(prefix="refitd-gpu-", dir="/tmp")
        self.socket = os.path.join(self.folder, "refitd.sock")
        self.log = os.path.join(self.folder, "log")
        self.command = [os.path.join(BIN, "refitd"), "--listen-unix", self.socket,
                        *["--cuda-nccl-library=" + path for path in torch_nccl()[:1]], "--insecure", *flags]
        self.environment = dict(os.environ, **(environment or {}))
        self._start()

    def _start(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log, env=self.environment)
        wait_for("refitd answers", self._answers, START_SECONDS)

    def restart(self):
        """Kills it, and starts another one on the same socket."""
        self.process.kill()
        self.process.wait()
        self._start()

    def _answers(self):
        if self.process.poll() is not None:
            raise Failure("refitd ended (%s): %s" % (self.process.returncode, self.log_text()))
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(1)
            return s.connect_ex(self.socket) == 0

    def address(self):
        """HOST:PORT for other daemons, of one that was started with --listen-tcp."""
        with open(self.log, "rb") as log:
            found = re.search(r"listening on .*tcp:([^ ,]+)", log.read().decode(errors="replace"))
        expect(found is not None, "refitd listens on no TCP port: %s", self.log_text())
        return found.group(1)

    def rails(self):
        """The bytes that each GPU has carried to and from other daemons, by UUID, of the one communicator over GPUs."""
        ran = subprocess.run([os.path.join(BIN, "refitctl"), "--socket", self.socket, "-o", "json", "status"], capture_output=True,
                             text=True, timeout=START_SECONDS, check=True)
        (communicator,) = [c for t in json.loads(ran.stdout)["transports"] for c in t.get("nccl", {}).get("wire_communicators", ())]
        return {r["gpu_uuid"]: int(r["bytes_sent"]) + int(r["bytes_received"]) for r in communicator["rails"]}

    def log_text(self):
        with open(self.log, "rb") as log:
            return log.read().decode(errors="replace")[-4000:]

    def close(self):
        """Sends SIGTERM, after which the daemon must end with 0, once its clients are gone."""
        self.process.send_signal(signal.SIGTERM)
        try:
            status = self.process.wait(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            status = "no end within %d s of SIGTERM" % START_SECONDS
        text = self.log_text()
        self.kill()
        expect(status == 0, "refitd: %s; log: %s", status, text)

    def kill(self):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


class Machine:
    """The GPUs, and which rank is on which. Without GPUs (memory host) ordinals have no meaning."""

    def __init__(self, count, half=None):
        self.count = max(count, 1)
        self.half = half or max(self.count // 2, 1)  # trainers' GPUs, the first ones

    def one_to_many(self):
        """One GPU for the trainer, and at most four for engines."""
        return Machine(self.count, max(self.count - 4, 1))

    def engines(self):
        """How many GPUs engines have for themselves; 1 if there is one GPU only."""
        return max(self.count - self.half, 1)

    def trainer(self, index, colocated):
        return index % (self.count if colocated else self.half)

    def engine(self, index, colocated):
        return index % self.count if colocated or self.count == 1 else self.half + index % (self.count - self.half)


def flags_of(options):
    """{"tp": 2, "odd": True} as --tp 2 --odd."""
    flags = []
    for name, value in options.items():
        if value is True:
            flags.append("--" + name.replace("_", "-"))
        elif value is not False and value is not None:
            flags += ["--" + name.replace("_", "-"), str(value)]
    return flags


class Group:
    """Trainer ranks and engine instances of one group, as processes.

    common: flags of all ranks (memory, model, ...). trainer, engine: flags of a side, without rank; `world` is the number
    of ranks (of an instance)."""

    def __init__(self, daemon, machine, common, trainer, engine, instances=1, colocated=False, name="gpu", engines_at=None):
        self.daemon = daemon
        self.machine = machine
        self.common = dict(common, socket=daemon.socket, group=name, instances=instances,
                           trainers=max(trainer.get("world", 1), 1))  # 0 in `world`: somebody else is the trainer
        # engines_at: another daemon, which joins the group.
        self.engines_at = {} if engines_at is None else {"socket": engines_at.socket, "coordinator": daemon.address()}
        self.trainer_flags = trainer
        self.engine_flags = engine
        self.colocated = colocated
        self.trainers = []
        self.engines = []  # the engines of all instances, instance by instance
        self.instances = instances
        self.began = 0.0  # when the last update began, by the monotonic clock
        self.pushed = {}
        try:
            # All ranks are started at once, so that they make their memory at the same time.
            started = [self.start_trainer(r) for r in range(trainer.get("world", 1))]
            per = engine.get("world", 1)
            started_engines = [self.start_engine(i, r) for i in range(instances) for r in range(per)]
            self.trainers, self.engines = started, started_engines
            self.ready = [rank.wait("ready", START_SECONDS) for rank in started + started_engines]
            for rank, ready in zip(started + started_engines, self.ready):
                expect(ready["ok"], "%s: %s", rank.name, ready.get("error"))
        except BaseException:
            self.kill()
            raise

    def start_trainer(self, rank):
        options = dict(self.common, **self.trainer_flags, rank=rank,
                       device=self.machine.trainer(rank, self.colocated))
        process = Process("trainer %d" % rank, [os.path.join(BIN, "gpu_rank"), "trainer", *flags_of(options)])
        self.trainers.append(process)
        return process

    def start_engine(self, instance, rank):
        per = self.engine_flags.get("world", 1)
        options = dict(dict(self.common, **self.engines_at), **self.engine_flags, rank=rank, instance="engine-%d" % instance,
                       device=self.machine.engine(instance * per + rank, self.colocated))
        process = Process(
            "engine %d.%d" % (instance, rank), [os.path.join(BIN, "gpu_rank"), "engine", *flags_of(options)])
        self.engines.append(process)
        return process

    def replace(self, processes, index, start):
        """Starts another process in the place of a killed one."""
        processes[index].kill()
        fresh = start()
        processes.remove(fresh)  # start_* appended it
        processes[index] = fresh
        ready = fresh.wait("ready", START_SECONDS)
        expect(ready["ok"], "%s again: %s", fresh.name, ready.get("error"))

    def all(self, ranks, text, seconds=ANSWER_SECONDS):
        """Gives the command to all of these at once, and returns their answers."""
        for rank in ranks:
            rank.send(text)
        return [rank.wait(text.split()[0], seconds) for rank in ranks]

    def fill(self, version):
        for answer in self.all(self.trainers, "fill %d" % version):
            expect(answer["ok"], "fill: %s", answer.get("error"))

    def update(self, command, version, *words):
        """A whole update by all trainers, which must commit everywhere. Seconds: the slowest rank's, from when all begin, which
        `began` keeps; `daemon_seconds`: by the daemon's clock."""
        self.began = time.monotonic()
        if len(self.trainers) > 1:
            self.began += TOGETHER_SECONDS
            words += ("at=%.6f" % self.began,)
        answers = self.all(self.trainers, " ".join([command, str(version), *words]))
        for rank, answer in zip(self.trainers, answers):
            expect(answer["ok"], "%s of version %d, %s: %s", command, version, rank.name, answer.get("error"))
            for instance, outcome in (answer.get("instances") or {}).items():
                expect(outcome == "committed", "%s: %s", instance, outcome)
        for engine in self.engines:
            engine.wait("committed", version=version)
        self.pushed = answers[0].get("pushed", {})  # bytes by method
        self.daemon_seconds = answers[0].get("daemon_seconds")
        return max(answer["seconds"] for answer in answers)

    def check(self, version, engines=None, keep=False):
        """Checks that every element of every engine is that version's, and that nothing beside the pieces was written, unless the engines
        keep it; else their memory is poisoned.
        """
        engines = self.engines if engines is None else engines
        for engine, answer in zip(engines, self.all(engines, "check %d%s" % (version, " keep" if keep else ""))):
            expect(answer["ok"], "%s: %s", engine.name, answer.get("error"))
            expect(answer["wrong"] == 0, "%s, version %d: %d wrong elements, first %s", engine.name, version,
                   answer["wrong"], answer.get("first"))
            expect(answer["beside"] == 0, "%s, version %d: %d bytes beside the pieces", engine.name, version,
                   answer["beside"])

    def version(self, command, version, *words, streamed=False):
        """Fills in fresh values, makes an update, and checks all of it."""
        if not streamed:
            self.fill(version)
        seconds = self.update(command, version, *words)
        self.check(version)
        return seconds

    def quit(self):
        for rank in self.trainers + self.engines:
            rank.quit()

    def kill(self):
        for rank in self.trainers + self.engines:
            rank.kill()
