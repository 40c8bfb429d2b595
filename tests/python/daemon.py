"""A refitd of its own for a test, on a socket in a fresh folder; and child processes, each wait with a deadline."""

import os
import queue
import shutil
import subprocess
import tempfile
import threading
import time

import grpc

# These times are far longer than anything takes; only a failing test reaches them.
START_SECONDS = 60
STOP_SECONDS = 60
CHILD_SECONDS = 60  # the time for a child's line, for its end, and for all else that is waited for
LOOK_SECONDS = 0.02  # the time between two looks at a condition


def wait_for(test, what, condition):
    """Asks until the condition gives something true, and returns that."""
    deadline = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(LOOK_SECONDS)
    test.fail("not within %d s: %s" % (CHILD_SECONDS, what))


class Daemon:
    """Context manager: runs `refitd`; `socket` is its path. On exit it must drain and end with 0."""

    def __init__(self, *flags, binary="daemon/refitd", environment=None):
        # The folder is not in TEST_TMPDIR, since the path of a unix socket has at most 107 bytes.
        self.folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.socket = os.path.join(self.folder, "refitd.sock")
        self.flags = flags
        self.binary = binary
        self.environment = environment
        self.process = None

    def __enter__(self):
        command = [self.binary, "--listen-unix", self.socket, *self.flags]
        self.process = subprocess.Popen(command, env=self.environment)
        try:
            self.wait_until_serving()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, error, *unused):
        self.process.terminate()
        try:
            status = self.process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            status = "none within %d s of SIGTERM" % STOP_SECONDS
        shutil.rmtree(self.folder, ignore_errors=True)
        if status != 0 and error is None:
            raise AssertionError("exit status of refitd: %s" % status)

    def wait_until_serving(self):
        with self.channel() as channel:
            grpc.channel_ready_future(channel).result(timeout=START_SECONDS)

    def channel(self):
        return grpc.insecure_channel("unix:" + self.socket)


class Child:
    """A process whose output, stderr's too, a test reads line by line. Ends with the test at the latest."""

    def __init__(self, test, *command):
        self.test = test
        self.command = command
        self.seen = []  # lines that next_line() gave
        self.lines = queue.Queue()  # None: the end
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.reader = threading.Thread(target=self._read)
        self.reader.start()
        test.addCleanup(self._end)

    def _read(self):
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def _end(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def next_line(self):
        """The next line, or None at the end."""
        try:
            line = self.lines.get(timeout=CHILD_SECONDS)
        except queue.Empty:
            self.test.fail("nothing within %d s from %s after:\n%s" % (CHILD_SECONDS, self, "\n".join(self.seen)))
        if line is not None:
            self.seen.append(line)
        return line

    def finish(self, expected):
        """Waits for the end, whose exit code must be the expected one; returns all lines."""
        while self.next_line() is not None:
            pass
        code = self.process.wait(timeout=CHILD_SECONDS)
        self.test.assertEqual(code, expected, "exit code of %s, which told:\n%s" % (self, "\n".join(self.seen)))
        return self.seen

    def __str__(self):
        return " ".join(self.command)
