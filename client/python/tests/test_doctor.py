"""The doctor: what it finds is what is there, and its refit is real."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

import refitd
from refitd import doctor
from refitd.doctor import State
from support import DaemonTest


class DoctorTest(DaemonTest):
    def test_a_healthy_daemon_is_asked_and_refits(self):
        report = doctor.examine(self.daemon.socket)
        self.assertTrue(report.ok, report)
        self.assertEqual(report.of("daemon").figures["version"], refitd.__version__)
        self.assertTrue(report.of("daemon").figures["transports"]["host"])
        refit = report.of("refit")
        self.assertEqual((refit.state, refit.figures["bytes"]), (State.OK, 1 << 20))
        self.assertGreater(refit.figures["second_seconds"], 0)
        self.assertFalse(any("private" in finding.what for finding in report.findings))
        self.assertEqual(self.status()["resources"]["members"], "0", "the doctor's members are gone")

    def test_the_module_runs_and_prints_json(self):
        run = subprocess.run(
            [sys.executable, "-m", "refitd.doctor", "--json", "--socket", self.daemon.socket], capture_output=True, text=True, timeout=120
        )
        self.assertEqual(run.returncode, 0, run.stderr)
        report = json.loads(run.stdout)
        self.assertTrue(report["ok"])
        found = {finding["what"]: finding for finding in report["findings"]}
        looks = [what for what, _ in doctor._LOOKS] + ["socket", "daemon", "refit"]
        self.assertEqual(list(found), looks)
        for what in looks:
            self.assertIn(found[what]["state"], ("ok", "note"), found[what])
        self.assertEqual(found["package"]["figures"]["version"], refitd.__version__)

    def test_two_doctors_at_once_do_not_meet(self):
        command = [sys.executable, "-m", "refitd.doctor", "--socket", self.daemon.socket]
        runs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        for run in runs:
            self.assertIn("1 MiB arrived", run.communicate(timeout=120)[0])

    def test_an_access_rule_that_refuses_this_user_is_told(self):
        with refitd.testing.daemon(f"--allowed-uids={os.getuid() + 1}") as strict:
            report = doctor.examine(strict.socket)
        self.assertFalse(report.ok)
        self.assertEqual(report.of("refit").state, State.BROKEN, report)
        self.assertIn("access rule", report.of("refit").advice)


class WithoutDaemonTest(unittest.TestCase):
    def test_a_private_daemon_is_tried_where_no_socket_is(self):
        with tempfile.TemporaryDirectory() as folder:
            report = doctor.examine(f"{folder}/none.sock")
        self.assertTrue(report.ok, report)
        self.assertEqual(report.of("socket").state, State.NOTE)
        self.assertIn("No such file", report.of("socket").text)
        self.assertIn("refitd --listen-unix", report.of("socket").advice)
        self.assertEqual(report.of("private daemon").state, State.OK)
        self.assertEqual(report.of("refit").state, State.OK)

    def test_what_is_no_socket_and_what_nobody_listens_at_is_told(self):
        with tempfile.TemporaryDirectory() as folder:
            file = f"{folder}/file"
            open(file, "w").close()
            self.assertIn("is no socket", doctor._look_at_socket(file).text)
            left = f"{folder}/left.sock"
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(left)
            self.assertIn("its daemon has ended", doctor._look_at_socket(left).text)

    def test_missing_programs_break_the_refit_and_nothing_raises(self):
        with mock.patch.dict(os.environ, REFITD_BINARY="/nonexistent/refitd", REFITCTL_BINARY="/nonexistent/refitctl"):
            report = doctor.examine("/nonexistent/refitd.sock")
        self.assertFalse(report.ok)
        self.assertEqual(report.of("programs").state, State.NOTE)
        self.assertIn("REFITD_BINARY", report.of("programs").advice)
        self.assertEqual(report.of("private daemon").state, State.BROKEN)

    def test_a_library_that_does_not_load_is_told(self):
        environment = {**os.environ, "REFIT_LIBRARY": "/nonexistent/librefit.so"}
        command = [sys.executable, "-m", "refitd.doctor", "--json", "--socket", "/nonexistent/refitd.sock"]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        self.assertEqual(run.returncode, 1, run.stderr)
        found = {finding["what"]: finding for finding in json.loads(run.stdout)["findings"]}
        self.assertEqual(found["package"]["state"], "broken")
        self.assertIn("/nonexistent/librefit.so", found["package"]["text"])
        self.assertEqual(found["refit"]["state"], "broken")


if __name__ == "__main__":
    unittest.main()
