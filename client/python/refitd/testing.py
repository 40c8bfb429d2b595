"""A private daemon for tests: started on a socket of its own, and stopped whatever happens.

    with refitd.testing.daemon() as daemon:
        trainer = refitd.Trainer("policy", socket=daemon.socket)

As a pytest fixture `refitd_daemon`, once the package is installed; else name it in a conftest.py:
`pytest_plugins = ["refitd.pytest_plugin"]`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ._core.native import find
from .errors import DeadlineExceeded, Unavailable

# Far longer than starts and stops take: only a hang reaches these limits.
START_SECONDS = 60.0
STOP_SECONDS = 60.0
_LOOK_SECONDS = 0.01
_PR_SET_PDEATHSIG = 1


def program(name: str) -> str:
    """The path of a command, "refitd" or "refitctl".

    Looks at REFITD_BINARY and REFITCTL_BINARY, then in a checkout's build, in the package, and in PATH. Raises FileNotFoundError.
    """
    return find(name)


class Daemon:
    """A refitd that runs. `socket` is its unix socket; `log` its log file's path; `process` the process."""

    def __init__(self, flags: Sequence[str] = ()) -> None:
        """Starts the daemon, with further flags of its command line. It ends with the thread that started it at the latest.

        Raises FileNotFoundError where there is no binary, Unavailable with the log where the daemon ends, DeadlineExceeded.
        """
        # Not the environment's TMPDIR: the path of a unix socket has at most 107 bytes.
        self.folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.socket = os.path.join(self.folder, "refitd.sock")
        self.log = os.path.join(self.folder, "refitd.log")
        self._flags = list(flags)
        self.process: subprocess.Popen[bytes] | None = None
        try:
            self.start()
        except BaseException:
            self.stop()
            raise

    def start(self) -> None:
        """Starts the daemon anew, on the same socket, after kill()."""
        command = [program("refitd"), "--listen-unix", self.socket, *self._flags]
        with open(self.log, "ab") as log:
            self.process = start_process(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        deadline = time.monotonic() + START_SECONDS
        while not self._answers():
            if self.process.poll() is not None:
                raise Unavailable(f"{command[0]} ended with status {self.process.returncode}:\n{self.read_log()}")
            if time.monotonic() > deadline:
                raise DeadlineExceeded(f"{command[0]} does not listen after {START_SECONDS} s:\n{self.read_log()}")
            time.sleep(_LOOK_SECONDS)

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(self.socket)
            except OSError:
                return False
            return True

    def read_log(self) -> str:
        """Returns what the daemon has logged so far."""
        try:
            return Path(self.log).read_text(errors="replace")
        except OSError:
            return ""

    def kill(self) -> None:
        """Ends the daemon with SIGKILL, as a crash would."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int | None:
        """Drains and ends the daemon, with SIGKILL if that takes too long, and removes its folder. Returns its exit status."""
        status = None
        if self.process is not None:
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGTERM)
            try:
                status = self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                status = self.process.wait()
            self.process = None
        shutil.rmtree(self.folder, ignore_errors=True)
        return status

    def control(self, *arguments: str, timeout_seconds: float = 60.0) -> str:
        """Returns what `refitctl` prints, for instance control("--output", "json", "status"). Raises subprocess.CalledProcessError."""
        command = [program("refitctl"), "--socket", self.socket, "--timeout", str(timeout_seconds), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * timeout_seconds).stdout

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_process(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that ends with the thread that starts it at the latest; `options` are of subprocess.Popen."""
    libc = ctypes.CDLL(None)

    def die_with_parent() -> None:
        # Whatever ends the test process, SIGKILL included, ends the daemon.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(command, preexec_fn=die_with_parent, **options)


@contextmanager
def daemon(*flags: str) -> Iterator[Daemon]:
    """Runs a private daemon for a `with` block; `flags` are of refitd's command line, such as "--limits-ready-ms=1000"."""
    running = Daemon(flags)
    try:
        yield running
    finally:
        running.stop()
