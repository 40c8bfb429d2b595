"""The demo: it proves what it says, and nothing that it started stays."""

import json
import os
import signal
import subprocess
import sys
import unittest
import uuid
from dataclasses import replace

import refitd
from refitd import demo
from support import wait_until

COMMAND = [sys.executable, "-m", "refitd.demo"]
SECONDS = 2 * demo.LIMIT_SECONDS
# The demo, which stays where it is after the first version until a signal comes.
STAYING = """
import signal, sys
from refitd import demo
move = demo._move
def stay(ranks, engine, version, say):
    if version == 2:
        signal.pause()
    return move(ranks, engine, version, say)
demo._move = stay
sys.exit(demo.main([]))
"""
GOOD = demo.Report(
    "0",
    tuple(demo.Version(version, demo.MODEL_BYTES, 0.1, version, demo.MODEL_BYTES, 0) for version in (1, 2, 3))
    + (demo.Version(4, 0, 0.1, 3, demo.MODEL_BYTES, 0),),
    3,
    {"trainer 0": 0, "trainer 1": -9, "engine": 0, "daemon": 0},
    1.0,
)


class Processes:
    """Every process that has this variable in its environment."""

    def __init__(self):
        self.environment = {**os.environ, "REFITD_DEMO_TEST": uuid.uuid4().hex}
        self._mark = b"REFITD_DEMO_TEST=" + self.environment["REFITD_DEMO_TEST"].encode()

    def commands(self):
        """The arguments of each, by process id."""
        found = {}
        for number in filter(str.isdigit, os.listdir("/proc")):
            try:
                with open(f"/proc/{number}/environ", "rb") as environ, open(f"/proc/{number}/cmdline", "rb") as line:
                    if self._mark in environ.read().split(b"\0"):
                        found[int(number)] = line.read().decode().split("\0")
            except OSError:
                continue  # it has ended
        return found


class RunTest(unittest.TestCase):
    def test_three_versions_arrive_and_a_killed_rank_changes_nothing(self):
        run = subprocess.run([*COMMAND, "--json"], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(run.returncode, 0, run.stderr)
        report = json.loads(run.stdout)
        self.assertTrue(report["ok"])
        self.assertEqual(report["refitd"], refitd.__version__)
        self.assertEqual([(each["version"], each["bytes"], each["held"]) for each in report["versions"]],
                         [(1, 64 << 20, 1), (2, 64 << 20, 2), (3, 64 << 20, 3), (4, 0, 3)])  # fmt: skip
        self.assertEqual({(each["compared_bytes"], each["differing_bytes"]) for each in report["versions"]}, {(64 << 20, 0)})
        self.assertEqual(report["exit_statuses"], {"trainer 0": 0, "trainer 1": -9, "engine": 0, "daemon": 0})

    def test_neither_torch_nor_numpy_is_imported(self):
        code = "import sys\nfrom refitd import demo\nassert demo.run().ok\nassert not {'torch', 'numpy'} & set(sys.modules)"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(run.returncode, 0, run.stderr)

    def test_a_daemon_that_does_not_start_is_an_error_with_advice(self):
        environment = {**os.environ, "REFITD_BINARY": "/nonexistent/refitd"}
        run = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=SECONDS)
        self.assertEqual(run.returncode, 1, run.stdout)
        self.assertIn("/nonexistent/refitd", run.stderr)
        self.assertIn("refitd.doctor", run.stderr)


class EndTest(unittest.TestCase):
    def interrupt(self, number):
        """Sends the signal once weights move. Returns the exit status; everything has ended, or ends soon."""
        processes = Processes()
        command = [sys.executable, "-c", STAYING]
        with subprocess.Popen(command, env=processes.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            self.addCleanup(run.kill)
            told = next((line for line in run.stdout if line.startswith("version")), None)
            self.assertIsNotNone(told)
            started = processes.commands()
            self.assertEqual(len(started), 5, started)
            (socket,) = [line[line.index("--listen-unix") + 1] for line in started.values() if "--listen-unix" in line]
            run.send_signal(number)
            run.communicate(timeout=SECONDS)
        if number == signal.SIGKILL:  # nothing of the demo ran after it
            wait_until(lambda: not processes.commands(), "every process has ended")
        else:
            self.assertEqual(processes.commands(), {})
            self.assertFalse(os.path.exists(os.path.dirname(socket)))
        return run.returncode

    def test_ctrl_c_ends_everything_that_was_started(self):
        self.assertEqual(self.interrupt(signal.SIGINT), 128 + signal.SIGINT)

    def test_sigterm_ends_everything_that_was_started(self):
        self.assertEqual(self.interrupt(signal.SIGTERM), 128 + signal.SIGTERM)

    def test_nothing_outlives_a_demo_that_was_killed(self):
        self.assertEqual(self.interrupt(signal.SIGKILL), -signal.SIGKILL)


class ProofTest(unittest.TestCase):
    def test_all_as_expected_is_a_proof(self):
        self.assertTrue(GOOD.ok)

    def test_anything_else_is_none(self):
        first, *_, last = GOOD.versions
        for wrong in (replace(first, differing_bytes=1), replace(first, compared_bytes=demo.MODEL_BYTES - 1), replace(first, held=0)):
            self.assertFalse(replace(GOOD, versions=(wrong, *GOOD.versions[1:])).ok, wrong)
        self.assertFalse(replace(GOOD, versions=(*GOOD.versions[:-1], replace(last, held=4))).ok, "an aborted version was kept")
        self.assertFalse(replace(GOOD, versions=GOOD.versions[1:]).ok)
        self.assertFalse(replace(GOOD, clean_at=None).ok)
        self.assertFalse(replace(GOOD, exit_statuses={**GOOD.exit_statuses, "daemon": 1}).ok)

    def test_each_wrong_byte_is_counted(self):
        region = refitd.Region(demo.MODEL_BYTES)
        for rank in range(demo.RANKS):
            half = refitd.Region(demo.MODEL_BYTES // demo.RANKS)
            demo._fill(half, 7, rank)
            self.place(half, region, rank)
        self.assertEqual(demo._differing_bytes(region, 7), (demo.MODEL_BYTES, 0))
        for at in (0, demo.TENSOR_BYTES, demo.MODEL_BYTES - 1):
            region[at] ^= 1
        self.assertEqual(demo._differing_bytes(region, 7), (demo.MODEL_BYTES, 3))

    def place(self, half, region, rank):
        """Puts a rank's halves where the engine has them: of q_proj rows, of o_proj columns."""
        nbytes = demo.TENSOR_BYTES // demo.RANKS
        region[rank * nbytes : (rank + 1) * nbytes] = half[:nbytes]
        width = demo.ROW_BYTES // demo.RANKS
        for row in range(demo.SIDE):
            at = demo.TENSOR_BYTES + row * demo.ROW_BYTES + rank * width
            region[at : at + width] = half[nbytes + row * width : nbytes + (row + 1) * width]


if __name__ == "__main__":
    unittest.main()
