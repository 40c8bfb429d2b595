"""Finding the compiled parts, and the commands that become them."""

import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from refitd._core import native

SECONDS = 60  # far longer than anything takes; only a failing test reaches it
PACKAGE_PARENT = str(Path(native.__file__).parents[2])
# Prints its arguments, then the signals that it ignores, then waits for the end of its input and ends with 7.
PROGRAM = """#!/bin/sh
echo "$$" "$@"
grep SigIgn /proc/self/status
read line
exit 7
"""


class BinariesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        environment = mock.patch.dict(os.environ, {"PATH": str(self.folder / "path")})
        environment.start()
        self.addCleanup(environment.stop)
        for name in ("REFIT_LIBRARY", "REFITD_BINARY", "REFITCTL_BINARY"):
            os.environ.pop(name, None)
        for name, folder in (("_IN_PACKAGE", "_bin"), ("_BUILT", "bazel-bin")):
            patch = mock.patch.object(native, name, self.folder / folder)
            patch.start()
            self.addCleanup(patch.stop)

    def file(self, name, content=b"\x7fELF"):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        path.chmod(0o755)
        return str(path)

    def test_the_environment_comes_before_the_build_and_the_package_before_the_system(self):
        self.assertEqual(native.find("librefit.so"), "librefit.so")
        for folders in (("path", None), ("_bin", "_bin"), ("bazel-bin/daemon", "bazel-bin/client")):
            for folder, part in zip(folders, ("refitd", "librefit.so")):
                if folder is not None:
                    file = self.file(f"{folder}/{part}")
                    self.assertEqual(native.find(part), file)
        os.environ["REFITD_BINARY"] = os.environ["REFIT_LIBRARY"] = own = self.file("own")
        self.assertEqual((native.find("refitd"), native.find("librefit.so")), (own, own))

    def test_a_variable_that_names_no_file_is_an_error_that_names_both(self):
        for variable, part in (("REFIT_LIBRARY", "librefit.so"), ("REFITD_BINARY", "refitd"), ("REFITCTL_BINARY", "refitctl")):
            with mock.patch.dict(os.environ, {variable: "/none/such"}):
                with self.assertRaisesRegex(FileNotFoundError, variable + ".*/none/such"):
                    native.find(part)

    def test_the_packages_own_script_on_the_path_is_not_taken_for_the_program(self):
        self.file("path/refitd", b"#!/usr/bin/python3\n")
        with self.assertRaisesRegex(FileNotFoundError, "REFITD_BINARY is not set"):
            native.find("refitd")

    def start(self, command, *arguments, **environment):
        """Starts what the console script of that name starts."""
        code = "import sys; sys.argv[0] = %r; from refitd._core import native; native.run_%s()" % (command, command)
        environment = {"PYTHONPATH": PACKAGE_PARENT, "PATH": os.defpath, **environment}
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments], env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def test_a_command_becomes_the_program_with_its_arguments_process_and_exit_code(self):
        program = self.file("program", PROGRAM.encode())
        for command, variable in (("refitd", "REFITD_BINARY"), ("refitctl", "REFITCTL_BINARY")):
            process = self.start(command, "--flag", "two words", "", **{variable: program})
            output, errors = process.communicate("\n", timeout=SECONDS)
            self.assertEqual((process.returncode, errors), (7, ""))
            first, ignored = output.splitlines()
            self.assertEqual(first, "%d --flag two words " % process.pid)
            self.assertFalse(int(ignored.split()[1], 16) >> (signal.SIGPIPE - 1) & 1, ignored)

    def test_a_signal_to_the_command_reaches_the_program(self):
        process = self.start("refitd", REFITD_BINARY=self.file("program", PROGRAM.encode()))
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
        self.assertEqual(process.returncode, -signal.SIGTERM)

    def test_a_command_without_its_program_says_where_it_looked_and_ends_as_a_shell_would(self):
        process = self.start("refitctl", REFITCTL_BINARY="/none/such")
        _, errors = process.communicate(timeout=SECONDS)
        self.assertEqual(process.returncode, 127)
        self.assertIn("refitctl: REFITCTL_BINARY names no file: /none/such", errors)


if __name__ == "__main__":
    unittest.main()
