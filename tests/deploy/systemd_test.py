"""deploy/systemd: the unit is clean and as closed as it says, fits the configuration, and installs."""

import os
import re
import shutil
import stat
import subprocess
import tempfile
import unittest

import textproto

FOLDER = "deploy/systemd"
UNIT = os.path.join(FOLDER, "refitd.service")
DROP_INS = ("gpu.conf", "cluster.conf")
CONFIG = "deploy/refitd.textproto"
SECONDS = 60
MAX_EXPOSURE = 2.0
CLOSING_SECONDS = 5  # what follows the last update: 1 s for copies to end, 2 s for streams, and 2 s to spare
DESCRIPTORS_OF_A_MEMBER = 4  # connection, pidfd, the watch's own pidfd, a region while it is being mapped
OTHER_DESCRIPTORS = 1024 + 64 * 2 + 64  # descriptor socket's connections, pools, the process's own


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


def settings_of(path):
    """{"LimitCORE": ["0"]}: the values of each setting, in order."""
    settings = {}
    with open(path) as file:
        for line in file:
            match = re.fullmatch(r"(\w+)=(.*)\n", line)
            if match:
                settings.setdefault(match.group(1), []).append(match.group(2))
    return settings


class FolderTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)


class UnitTest(FolderTest):
    def place(self, *drop_ins, change=lambda text: text):
        """The unit in a folder of its own, with its binary where this test has it; returns its path."""
        with open(UNIT) as file:
            text = file.read()
        path = os.path.join(self.folder, "refitd.service")
        with open(path, "w") as file:
            file.write(change(text.replace("=/usr/bin/refitd ", "=%s " % os.path.abspath("daemon/refitd"))))
        shutil.rmtree(path + ".d", ignore_errors=True)
        os.mkdir(path + ".d")
        for name in drop_ins:
            shutil.copy(os.path.join(FOLDER, name), path + ".d")
        return path

    def exposure(self, *drop_ins, change=lambda text: text):
        done = run("systemd-analyze", "security", "--offline=true", self.place(*drop_ins, change=change))
        match = re.search(r"Overall exposure level for refitd.service: (\d+\.\d)", done.stdout)
        self.assertIsNotNone(match, done.stdout + done.stderr)
        return float(match.group(1))

    def test_the_exposure_is_low_and_what_the_drop_in_says(self):
        with open(os.path.join(FOLDER, "gpu.conf")) as file:
            rated = re.search(r"rates the service (\d\.\d) with it and (\d\.\d) without", file.read())
        with_gpus, without = float(rated.group(1)), float(rated.group(2))
        self.assertLessEqual(max(with_gpus, without), MAX_EXPOSURE)
        self.assertEqual(self.exposure(), without)
        self.assertEqual(self.exposure("gpu.conf"), with_gpus)
        self.assertLessEqual(self.exposure(*DROP_INS), MAX_EXPOSURE)

    def test_each_line_that_hardens_counts(self):
        closed = self.exposure()
        for line in ("NoNewPrivileges=yes", "CapabilityBoundingSet=", "SystemCallFilter=@system-service",
                     "ProtectSystem=strict", "ProtectHome=yes", "PrivateDevices=yes",
                     "RestrictNamespaces=yes", "IPAddressDeny=any", "ProtectProc=invisible", "User=refitd"):
            opened = self.exposure(change=lambda text, line=line: text.replace("\n%s\n" % line, "\n"))
            self.assertGreater(opened, closed, line)

    def verify(self, *drop_ins, change=lambda text: text):
        done = run("systemd-analyze", "verify", "--man=no", self.place(*drop_ins, change=change))
        return done.returncode, done.stdout + done.stderr

    def test_systemd_finds_nothing_to_say_of_it(self):
        self.assertEqual(self.verify(), (0, ""))
        self.assertEqual(self.verify(*DROP_INS), (0, ""))

    def test_systemd_would_say_what_is_misspelt(self):
        _, said = self.verify(change=lambda text: text.replace("WatchdogSec=", "WatchdogSecs="))
        self.assertIn("Unknown key 'WatchdogSecs'", said)

    def test_it_fits_the_configuration(self):
        unit = settings_of(UNIT)
        config = textproto.validate(CONFIG)
        drain = int(textproto.get(config, "limits.max_duration_ms")) / 1000 + CLOSING_SECONDS
        self.assertGreaterEqual(int(unit["TimeoutStopSec"][0]), drain)
        needed = int(textproto.get(config, "limits.max_members")) * DESCRIPTORS_OF_A_MEMBER + OTHER_DESCRIPTORS
        self.assertGreaterEqual(int(unit["LimitNOFILE"][0]), needed)
        sockets = os.path.dirname(textproto.get(config, "listen.unix_path"))
        self.assertEqual(["/run/" + folder for folder in unit["RuntimeDirectory"]], [sockets])
        # Containers that mounted the folder must find the next daemon's sockets in it.
        self.assertEqual(unit["RuntimeDirectoryPreserve"], ["yes"])
        with open(os.path.join(FOLDER, "tmpfiles.conf")) as file:
            (line,) = [line.split() for line in file if not line.startswith("#")]
        self.assertEqual(line, ["d", sockets, unit["RuntimeDirectoryMode"][0], unit["User"][0], unit["Group"][0], "-"])

    def test_the_settings_for_several_nodes_are_taken_without_a_warning(self):
        config = textproto.validate(os.path.join(FOLDER, "cluster.textproto"))
        self.assertNotEqual(textproto.get(config, "peers.interface"), "lo")
        self.assertNotEqual(textproto.get(config, "data.port"), "0")

    def test_a_bad_configuration_is_not_tried_again(self):
        unit = settings_of(UNIT)
        self.assertEqual((unit["Restart"], unit["RestartPreventExitStatus"]), (["on-failure"], ["2"]))
        # A command that fails before the daemon starts is tried again, whatever its status.
        self.assertNotIn("ExecStartPre", unit)
        bad = os.path.join(self.folder, "bad.textproto")
        with open(bad, "w") as file:
            file.write("nonsense: 1\n")
        done = run("daemon/refitd", "--config", bad, env={})
        self.assertEqual(done.returncode, 2, done.stderr)


class InstallTest(FolderTest):
    FILES = {
        "etc/refitd/refitd.textproto": 0o644,
        "usr/bin/refitctl": 0o755,
        "usr/bin/refitd": 0o755,
        "usr/lib/systemd/system/refitd.service": 0o644,
        "usr/lib/sysusers.d/refitd.conf": 0o644,
        "usr/lib/tmpfiles.d/refitd.conf": 0o644,
        "usr/share/doc/refitd/examples/alerts.yml": 0o644,
        "usr/share/doc/refitd/examples/cluster.conf": 0o644,
        "usr/share/doc/refitd/examples/cluster.textproto": 0o644,
        "usr/share/doc/refitd/examples/gpu.conf": 0o644,
        "usr/share/doc/refitd/examples/logrotate.conf": 0o644,
        "usr/share/doc/refitd/examples/refitd.json": 0o644,
        "usr/share/doc/refitd/examples/refitd.textproto": 0o644,
        "usr/share/doc/refitd/examples/scrape.yml": 0o644,
        "usr/share/doc/refitd/access.md": 0o644,
        "usr/share/doc/refitd/networks.md": 0o644,
        "usr/share/doc/refitd/operations.md": 0o644,
        "usr/share/doc/refitd/refitctl.md": 0o644,
        "usr/share/doc/refitd/reference/commands.md": 0o644,
        "usr/share/doc/refitd/reference/log.md": 0o644,
        "usr/share/doc/refitd/reference/metrics.md": 0o644,
        "usr/share/doc/refitd/reference/settings.md": 0o644,
        "usr/share/doc/refitd/runbook.md": 0o644,
        "usr/share/doc/refitd/security.md": 0o644,
        "usr/share/doc/refitd/sizing.md": 0o644,
        "usr/share/doc/refitd/troubleshooting.md": 0o644,
        "usr/share/doc/refitd/upgrade.md": 0o644,
    }

    def setUp(self):
        super().setUp()
        self.destination = os.path.join(self.folder, "destination")

    def install(self, *arguments):
        return run(os.path.join(FOLDER, "install.sh"), *arguments, env={**os.environ, "DESTDIR": self.destination})

    def installed(self):
        found = {}
        for folder, _, files in os.walk(self.destination):
            for name in files:
                path = os.path.join(folder, name)
                found[os.path.relpath(path, self.destination)] = stat.S_IMODE(os.stat(path).st_mode)
        return found

    def test_it_installs_what_a_service_needs_and_nothing_else(self):
        done = self.install(os.getcwd())
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertEqual(self.installed(), self.FILES)
        done = run(os.path.join(self.destination, "usr/bin/refitd"), "--version")
        self.assertIn("refitd ", done.stdout)

    def test_a_configuration_that_is_there_is_kept(self):
        self.install(os.getcwd())
        config = os.path.join(self.destination, "etc/refitd/refitd.textproto")
        with open(config, "w") as file:
            file.write("# mine\n")
        self.assertEqual(self.install(os.getcwd()).returncode, 0)
        with open(config) as file:
            self.assertEqual(file.read(), "# mine\n")

    def test_without_binaries_it_installs_nothing(self):
        done = self.install(self.folder)
        self.assertEqual(done.returncode, 1)
        self.assertIn("bazel build", done.stderr)
        self.assertEqual(self.installed(), {})

    def test_wrong_usage_is_said(self):
        self.assertEqual(self.install("--help").returncode, 0)
        done = self.install("--prefix=/opt")
        self.assertEqual(done.returncode, 2)
        self.assertIn("usage:", done.stdout)

    def test_user_and_folder_are_made_as_the_files_say(self):
        self.install(os.getcwd())
        os.makedirs(os.path.join(self.destination, "etc"), exist_ok=True)
        done = run("systemd-sysusers", "--root=" + self.destination, "refitd.conf")
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(os.path.join(self.destination, "etc/passwd")) as file:
            (user,) = [line.strip().split(":") for line in file]
        self.assertEqual((user[0], user[6]), ("refitd", "/usr/sbin/nologin"))
        self.assertNotEqual(user[2], "0")
        # An account of the user that runs this test, under the service's name, since only root can make folders of
        # other users.
        with open(os.path.join(self.destination, "etc/passwd"), "w") as file:
            file.write("refitd:x:%d:%d::/:/usr/sbin/nologin\n" % (os.getuid(), os.getgid()))
        with open(os.path.join(self.destination, "etc/group"), "w") as file:
            file.write("refitd:x:%d:\n" % os.getgid())
        done = run("systemd-tmpfiles", "--root=" + self.destination, "--create", "refitd.conf")
        self.assertEqual(done.returncode, 0, done.stderr)
        made = os.stat(os.path.join(self.destination, "run/refitd"))
        self.assertEqual((made.st_uid, made.st_gid), (os.getuid(), os.getgid()))
        self.assertEqual(stat.S_IMODE(made.st_mode), 0o755)


if __name__ == "__main__":
    unittest.main()
