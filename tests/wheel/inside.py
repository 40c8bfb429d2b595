"""Run by tests/wheel/test, in a file system that has a Python and the wheel, and hardly anything else."""

import importlib.metadata
import json
import os
import re
import signal
import struct
import subprocess
import sys
import threading
import unittest

import refitd
from refitd import testing
from refitd.demo import LIMIT_SECONDS as DEMO_SECONDS

SECONDS = 60  # far longer than anything takes; only a failing test reaches this
BIN = os.path.dirname(sys.executable)
PACKAGE = os.path.dirname(refitd.__file__)
CARRIED = [os.path.join(PACKAGE, "_bin") + "/", os.path.join(os.path.dirname(PACKAGE), "refitd.libs") + "/"]
# These are glibc, and what else a manylinux wheel may take from the system (PEP 600).
OF_THE_SYSTEM = re.compile(
    r"(ld-linux-x86-64|libc|libm|libdl|libpthread|librt|libresolv|libnss_files|libstdc\+\+|libgcc_s|libz)\.so\.")
FOREIGN = re.compile(r"lib(grpc|gpr|absl|protobuf|upb|spdlog|fmt|prometheus|civetweb|refit)\b")


def mapped_by(process_id):
    """Paths of the libraries and programs that a process has mapped."""
    with open("/proc/%s/maps" % process_id, encoding="utf-8") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if len(line.split(maxsplit=5)) == 6}
    return {path for path in paths if path.startswith("/") and (".so" in path or "/bin/" in path or "/_bin/" in path)}


def carried(path):
    return any(path.startswith(folder) for folder in CARRIED)


class WheelTest(unittest.TestCase):
    daemon: testing.Daemon
    process_id: int

    @classmethod
    def setUpClass(cls):
        cls.daemon = testing.Daemon()
        cls.process_id = cls.daemon.process.pid

    @classmethod
    def tearDownClass(cls):
        status = cls.daemon.stop()
        assert status == 0, "exit status of refitd: %s" % status

    def command(self, *arguments):
        return subprocess.run(
            [os.path.join(BIN, arguments[0]), *arguments[1:]], capture_output=True, text=True, timeout=SECONDS)

    def test_the_plugin_of_pytest_can_be_asked_for_by_name_as_well(self):
        entries = importlib.metadata.distribution("refitd").entry_points
        (entry,) = [entry for entry in entries if entry.group == "pytest11"]
        self.assertEqual(entry.name, entry.value)

    def test_the_file_system_has_no_other_copy_of_what_the_wheel_carries(self):
        seen = 0
        for top in ("/usr", "/lib", "/lib64", sys.base_prefix):
            for folder, _, files in os.walk(top):
                for name in files:
                    seen += 1
                    path = os.path.join(folder, name)
                    self.assertFalse(FOREIGN.match(name) and not carried(path), path)
        self.assertGreater(seen, 100)

    def test_all_parts_are_of_one_version(self):
        version = importlib.metadata.version("refitd")
        self.assertEqual(refitd.__version__, version)
        self.assertEqual(self.command("refitd", "--version").stdout.split("\n")[0], "refitd " + version)
        self.assertEqual(self.command("refitctl", "--version").stdout.strip(), "refitctl " + version)

    def test_commands_pass_arguments_and_exit_codes_on(self):
        direct = subprocess.run(
            [os.path.join(PACKAGE, "_bin", "refitctl"), "--socket", "/none", "--timeout", "1", "status"],
            capture_output=True, text=True, timeout=SECONDS)
        through = self.command("refitctl", "--socket", "/none", "--timeout", "1", "status")
        self.assertNotEqual(direct.returncode, 0)
        self.assertEqual((through.returncode, through.stderr), (direct.returncode, direct.stderr))

    def test_the_command_becomes_the_daemon_and_drains_at_sigterm(self):
        path = self.daemon.socket + ".second"
        process = subprocess.Popen(
            [os.path.join(BIN, "refitd"), "--listen-unix", path], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            # The daemon logs this once it listens; if it dies before, its output ends.
            told = next((line for line in process.stdout if "listening on" in line), None)
            self.assertIsNotNone(told)
            self.assertEqual(os.readlink("/proc/%d/exe" % process.pid), os.path.join(PACKAGE, "_bin", "refitd"))
            with open("/proc/%d/environ" % process.pid, encoding="utf-8") as environment:
                self.assertIn("VIRTUAL_ENV=" + os.path.dirname(BIN), environment.read().split("\0"))
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=SECONDS)
            self.assertEqual(process.returncode, 0)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()

    def test_the_demo_proves_what_it_says(self):
        # Its daemon is the wheel's, since there is no other; it imports nothing that is not here.
        run = subprocess.run([sys.executable, "-m", "refitd.demo", "--json"], capture_output=True, text=True, timeout=2 * DEMO_SECONDS)
        self.assertEqual(run.returncode, 0, run.stderr)
        report = json.loads(run.stdout)
        self.assertEqual((report["ok"], report["refitd"]), (True, importlib.metadata.version("refitd")))

    def test_a_push_and_a_refit_reach_an_engine(self):
        spec = refitd.TensorSpec("w", "float32", (64, 32))
        values = [struct.pack("<2048f", *range(start, start + 2048)) for start in (1, 5000)]

        def whole(region):
            return refitd.Box(0, (0, 0), (64, 32), (32, 1), refitd.RegionMemory(region, 0, 8192))

        source, destination = refitd.Region(8192), refitd.Region(8192)
        with refitd.Trainer("policy", socket=self.daemon.socket) as trainer:
            with refitd.Engine("policy", instance="a", socket=self.daemon.socket) as engine:
                engine.register_layout([spec], [whole(destination)])
                held = []  # the bytes of the engine's memory at each commit

                def serve():
                    for event in engine:
                        if isinstance(event, refitd.Prepare):
                            event.ready()
                        elif isinstance(event, refitd.Committed):
                            held.append((event.version, bytes(destination[:8192])))
                            if event.version == 2:
                                return

                server = threading.Thread(target=serve)
                server.start()
                with trainer.update(1) as update:
                    update.push("w", values[0], dtype="float32", shape=(64, 32))
                trainer.register_layout([spec], [whole(source)])
                source[:8192] = values[1]
                result = trainer.refit(2)
                server.join(SECONDS)
                self.assertFalse(server.is_alive())
                self.assertEqual(held, [(1, values[0]), (2, values[1])])
                self.assertEqual((result.version, result.bytes), (2, 8192))
                told = json.loads(self.daemon.control("--output", "json", "status"))
        self.assertIn('"policy"', json.dumps(told))

    def test_nothing_is_loaded_but_what_the_wheel_carries_and_every_linux_has(self):
        refitd.__version__  # loads the library
        for process_id, binary in (("self", "librefit.so"), (self.process_id, "refitd")):
            paths = mapped_by(process_id)
            self.assertIn(os.path.join(PACKAGE, "_bin", binary), paths)
            own = [path for path in paths if not carried(path)]
            if process_id != "self":
                self.assertEqual([path for path in own if not OF_THE_SYSTEM.match(os.path.basename(path))], [])
            # The interpreter has libraries of its own, such as libffi: none of them is of ours.
            self.assertEqual([path for path in own if FOREIGN.match(os.path.basename(path))], [])


if __name__ == "__main__":
    unittest.main(verbosity=1)
