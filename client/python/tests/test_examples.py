"""The examples, as their first lines say to run them, against a daemon; what trainers and engines print must agree."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from refitd import testing

SECONDS = 240  # for all of an example: importing PyTorch takes most of it
EXAMPLES = Path(__file__).parents[1] / "examples"
VERSIONS = 3


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


class Running:
    """An example's process; what it prints goes to a file, which an error shows."""

    def __init__(self, socket, *command):
        self.output = tempfile.TemporaryFile(mode="w+")
        environment = {**os.environ, "REFITD_SOCKET": socket, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, *command], env=environment, cwd=EXAMPLES, stdin=subprocess.DEVNULL, stdout=self.output,
            stderr=subprocess.STDOUT)

    def text(self):
        self.output.seek(0)
        return self.output.read()

    def versions(self):
        """The digests that it printed, by version."""
        return {int(version): digest for version, digest in re.findall(r"^version (\d+) digest (\w+)", self.text(), re.M)}

    def end(self):
        self.process.kill()
        self.process.wait()
        self.output.close()


def wait_for(running):
    """Waits until all have ended well. Where one fails the others might wait for it for good."""
    deadline = time.monotonic() + SECONDS
    while any(codes := [process.process.poll() for process in running]) or None in codes:
        failed = any(codes)
        if failed or time.monotonic() > deadline:
            raise AssertionError(f"exit statuses {codes}:\n" + "\n----\n".join(process.text() for process in running))
        time.sleep(0.05)


def test_an_engine_that_no_trainer_comes_for_ends(daemon):
    running = Running(daemon.socket, "push_trainer.py", "--group", "alone", "--versions", "0")  # makes the group
    wait_for([running])
    engine = Running(daemon.socket, "asyncio_engine.py", "--group", "alone", "--seconds", "0.5")
    try:
        assert engine.process.wait(SECONDS) != 0
        assert "DeadlineExceeded" in engine.text()
    finally:
        running.end()
        engine.end()


@pytest.mark.parametrize("name, engine, trainer", [
    ("fsdp2", ["fused_engine.py"], ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "fsdp2_trainer.py"]),
    ("push", ["asyncio_engine.py"], ["push_trainer.py"]),
])
def test_engine_holds_what_the_trainer_had(daemon, name, engine, trainer):
    options = ["--group", name, "--versions", str(VERSIONS)]
    for first in (1, 1 + VERSIONS):  # the second run goes on after the group's version
        run_both(daemon, engine, trainer, options, first)


def run_both(daemon, engine, trainer, options, first):
    running = []
    try:
        for command in (engine, trainer):
            running.append(Running(daemon.socket, *command, *options))
        wait_for(running)
        held, had = (process.versions() for process in running)
    finally:
        for process in running:
            process.end()
    assert sorted(had) == list(range(first, first + VERSIONS))
    assert len(set(had.values())) == VERSIONS
    assert held == had


def test_a_plain_module_computes_what_the_trainers_does(daemon):
    engine, trainer = (Running(daemon.socket, f"torch_{side}.py", "plain") for side in ("engine", "trainer"))
    try:
        wait_for([engine, trainer])
        held, had = (dict(re.findall(r"^(version \d+) says (.*)$", side.text(), re.M)) for side in (engine, trainer))
        results = re.findall(r"^<UpdateResult version (\d): 4 tensors, 848 bytes in [\d.e-]+ s, 1 of 1 instances>$", trainer.text(), re.M)
        loop = engine.text().splitlines()[-1]
    finally:
        engine.end()
        trainer.end()
    assert list(had) == ["version 1", "version 2", "version 3"] and len(set(had.values())) == 3
    assert held.items() <= had.items() and "version 3" in held  # a version may be overtaken by the next
    assert results == ["1", "2", "3"]
    assert re.fullmatch(r"<EngineLoop engine rank 0 of instance engine-0.*: version 3, 4 tensors, 848 bytes, paused [\d.e-]+ s>", loop), loop
