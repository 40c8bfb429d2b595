"""Tries the tarball, the .deb and the .rpm that tools/package makes of the wheel, unpacked on this machine; tests/package/test installs the .deb.

usage: packages.py TARBALL DEB RPM      run by tests/wheel/test
"""

import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

SECONDS = 60  # far longer than anything takes; only a failing test reaches this
OF_THE_SYSTEM = re.compile(r"(linux-vdso|.*/ld-linux-x86-64|lib(c|m|dl|pthread|rt|resolv|stdc\+\+|gcc_s|z))\.so\.")


def run(*command, **options):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=SECONDS, **options).stdout


def files_below(folder):
    return {os.path.relpath(os.path.join(top, name), folder) for top, _, names in os.walk(folder) for name in names}


class PackagesTest(unittest.TestCase):
    folder: str
    tree: str
    root: str
    control: str
    rpm_root: str

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp()
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        run("tar", "-C", cls.folder, "-xf", TARBALL)
        (cls.tree,) = glob.glob(cls.folder + "/*")
        cls.root, cls.control = cls.folder + "/deb", cls.folder + "/control"
        run("dpkg-deb", "-x", DEB, cls.root)
        run("dpkg-deb", "-e", DEB, cls.control)
        cls.rpm_root = cls.folder + "/rpm"
        os.mkdir(cls.rpm_root)
        with open(RPM, "rb") as package, subprocess.Popen(["rpm2archive", "-"], stdin=package, stdout=subprocess.PIPE) as archive:
            run("tar", "-C", cls.rpm_root, "-xzf", "-", stdin=archive.stdout)

    def test_all_have_the_same_files(self):
        of_tarball = {"usr/" + name if not name.startswith("etc/") else name for name in files_below(self.tree)}
        self.assertEqual(of_tarball, files_below(self.root))
        self.assertEqual(of_tarball, files_below(self.rpm_root))
        for name in of_tarball:
            with open(f"{self.root}/{name}", "rb") as one, open(f"{self.rpm_root}/{name}", "rb") as other:
                self.assertEqual(one.read(), other.read(), name)
            self.assertEqual(os.stat(f"{self.root}/{name}").st_mode, os.stat(f"{self.rpm_root}/{name}").st_mode, name)
        for name in ("usr/bin/refitd", "usr/bin/refitctl", "usr/lib/systemd/system/refitd.service", "usr/lib/sysusers.d/refitd.conf",
                     "usr/lib/tmpfiles.d/refitd.conf", "etc/refitd/refitd.textproto", "usr/share/doc/refitd/copyright",
                     "usr/share/man/man8/refitd.8.gz", "usr/share/man/man1/refitctl.1.gz"):
            self.assertIn(name, of_tarball)

    def test_programs_load_only_libraries_beside_them_and_those_of_every_linux(self):
        for tree in (self.tree, self.root + "/usr", self.rpm_root + "/usr"):
            for program in ("refitd", "refitctl"):
                for line in run("ldd", f"{tree}/bin/{program}").splitlines():
                    name, _, path = line.strip().partition(" => ")
                    if not OF_THE_SYSTEM.match(name):
                        self.assertEqual(os.path.dirname(os.path.realpath(path.split(" (")[0])), tree + "/lib/refitd", line)

    def test_the_tarball_runs_from_any_folder(self):
        moved = self.folder + "/elsewhere"
        shutil.copytree(self.tree, moved)
        version = run(moved + "/bin/refitctl", "--version").split()[1]
        self.assertEqual(os.path.basename(self.tree), f"refitd-{version}-linux-x86_64")
        self.assertEqual(run(moved + "/bin/refitd", "--version").split("\n")[0], "refitd " + version)
        run(moved + "/bin/refitd", "--config", moved + "/etc/refitd/refitd.textproto", "--validate")

    def test_the_package_says_what_it_is(self):
        fields = dict(line.split(": ", 1) for line in run("dpkg-deb", "-f", DEB).splitlines() if not line.startswith(" "))
        self.assertEqual((fields["Package"], fields["Architecture"]), ("refitd", "amd64"))
        self.assertEqual(fields["Version"], run(self.tree + "/bin/refitctl", "--version").split()[1])
        self.assertIn("libc6 (>= 2.34)", fields["Depends"])
        with open(self.control + "/conffiles") as file:
            self.assertEqual(file.read(), "/etc/refitd/refitd.textproto\n")

    def test_the_rpm_says_what_it_is(self):
        def query(*arguments):
            return run("rpm", "-qp", "--nosignature", *arguments, RPM).splitlines()

        version = run(self.tree + "/bin/refitctl", "--version").split()[1]
        self.assertEqual(query("--qf", "%{NAME} %{VERSION} %{RELEASE} %{ARCH} %{LICENSE}"), [f"refitd {version} 1 x86_64 Apache-2.0"])
        self.assertEqual(query("--configfiles"), ["/etc/refitd/refitd.textproto"])
        needed = query("--requires")
        self.assertIn("libc.so.6(GLIBC_2.34)(64bit)", needed)
        self.assertEqual([name for name in needed if "grpc" in name or "protobuf" in name], [], "the package brings these")
        listed = query("--qf", "[%{FILENAMES} %{FILEUSERNAME} %{FILEGROUPNAME}\\n]")
        self.assertEqual({line.split()[1:] == ["root", "root"] for line in listed}, {True})
        folders = {line.split()[0] for line in listed} - {"/" + name for name in files_below(self.rpm_root)}
        self.assertLessEqual({"/etc/refitd", "/usr/lib/refitd", "/usr/share/doc/refitd"}, folders)
        self.assertNotIn("/usr/bin", folders)

    def test_the_scripts_of_both_packages_do_the_same(self):
        """Each is run as its package manager runs it, with commands in place that only say that they were called."""
        systemd, called = self.folder + "/systemd", self.folder + "/called"
        os.makedirs(self.folder + "/stubs", exist_ok=True)
        os.makedirs(systemd, exist_ok=True)
        for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles"):
            with open(f"{self.folder}/stubs/{name}", "w") as stub:
                stub.write(f'#!/bin/sh\necho {name} "$@" >> {called}\n')
            os.chmod(stub.name, 0o755)

        def calls(*scripts):
            open(called, "w").close()
            for script, argument in scripts:
                script = script.replace("/run/systemd/system", systemd)
                run("sh", "-c", script, "script", argument, env={"PATH": self.folder + "/stubs:/usr/bin:/bin"})
            with open(called) as file:
                return file.read().splitlines()

        deb = {}
        for name in ("postinst", "prerm", "postrm"):
            with open(f"{self.control}/{name}") as file:
                deb[name] = file.read()
        rpm = {name: run("rpm", "-qp", "--nosignature", "--qf", "%{" + name + "}", RPM) for name in ("POSTIN", "PREUN", "POSTUN")}
        made, reload = ["systemd-sysusers refitd.conf", "systemd-tmpfiles --create refitd.conf"], "systemctl --system daemon-reload"
        for expected, of_deb, of_rpm in (
            (made + [reload], [("postinst", "configure")], [("POSTIN", "1")]),
            # An upgrade: the scripts of the version before run too, in another order, and end no service.
            (made + [reload, reload], [("prerm", "upgrade"), ("postrm", "upgrade"), ("postinst", "configure")],
             [("POSTIN", "2"), ("PREUN", "1"), ("POSTUN", "1")]),
            (["systemctl disable --now refitd.service", reload], [("prerm", "remove"), ("postrm", "remove")], [("PREUN", "0"), ("POSTUN", "0")]),
        ):
            self.assertEqual(sorted(calls(*((deb[name], argument) for name, argument in of_deb))), sorted(expected))
            self.assertEqual(sorted(calls(*((rpm[name], argument) for name, argument in of_rpm))), sorted(expected))

    def test_the_sums_are_those_of_the_files(self):
        with open(self.control + "/md5sums") as file:
            sums = dict(reversed(line.rstrip("\n").split("  ", 1)) for line in file)
        self.assertEqual(set(sums), {name for name in files_below(self.root) if name.startswith("usr/")})
        for name, expected in sums.items():
            with open(f"{self.root}/{name}", "rb") as file:
                self.assertEqual(hashlib.md5(file.read()).hexdigest(), expected, name)

    @unittest.skipUnless(shutil.which("man"), "man is not installed")
    def test_man_pages_have_no_error_and_name_every_command(self):
        told = {}
        for page in ("man8/refitd.8.gz", "man1/refitctl.1.gz"):
            done = subprocess.run(["man", "--warnings", "-E", "UTF-8", "-l", f"{self.tree}/share/man/{page}"], capture_output=True,
                                  text=True, timeout=SECONDS, env={**os.environ, "MANPAGER": "cat", "MANWIDTH": "200", "MAN_KEEP_FORMATTING": ""})
            self.assertEqual((done.returncode, done.stderr), (0, ""), page)
            told[page] = done.stdout
        self.assertIn("--listen-unix", told["man8/refitd.8.gz"])
        for command in ("status", "push", "group replace"):
            self.assertRegex(told["man1/refitctl.1.gz"], r"(?m)^refitctl %s$" % command)

    def test_completions_come_from_the_program(self):
        refitctl = self.tree + "/bin/refitctl"
        path = self.tree + "/share/bash-completion/completions/refitctl"
        done = subprocess.run([refitctl, "completion", "bash"], capture_output=True, text=True, timeout=SECONDS)
        if done.returncode != 0:
            self.skipTest("this refitctl prints no completions")
        with open(path) as file:
            self.assertEqual(file.read(), done.stdout)


if __name__ == "__main__":
    TARBALL, DEB, RPM = (os.path.abspath(path) for path in sys.argv[1:4])
    unittest.main(argv=sys.argv[:1])
