"""deploy/container/Containerfile copies files that exist, installs the libraries that it needs, and runs nobody as
root.
"""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

import textproto

CONTAINERFILE = "deploy/container/Containerfile"
IGNORE = ".dockerignore"
BINARIES = ("daemon/refitd", "daemon/refitctl/refitctl")
SECONDS = 60


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


def instructions():
    """[("FROM", "debian:12 AS build"), ...], with continued lines joined and comments gone."""
    with open(CONTAINERFILE) as file:
        lines = [line for line in file.read().split("\n") if line and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.split("\n")]


def stages():
    """The instructions of each stage; those before the first FROM are dropped."""
    found = []
    for instruction in instructions():
        if instruction[0] == "FROM":
            found.append([])
        if found:
            found[-1].append(instruction)
    return found


def stage_named(name):
    (found,) = [stage for stage in stages() if stage[0][1].endswith(" AS " + name)]
    return found


def values(stage, name):
    return [value for n, value in stage if n == name]


def runtime_packages():
    (install,) = [v for v in values(stage_named("runtime"), "RUN") if "apt-get install" in v]
    words = install.partition("apt-get install")[2].partition("&&")[0].split()
    return {word for word in words if not word.startswith("-")}


def packages_of(paths):
    """{path: the package that owns the file}. dpkg may know it below /lib, which is a link to /usr/lib."""
    real = {path: os.path.realpath(path) for path in paths}
    asked = set(real.values()) | {path[len("/usr"):] for path in real.values()}
    owners = dict(reversed(line.split(": ")) for line in run("dpkg", "-S", *asked).stdout.splitlines())
    found = {}
    for path, target in real.items():
        owner = owners.get(target) or owners.get(target[len("/usr"):])
        if owner is None:
            raise AssertionError("no package owns %s" % path)
        found[path] = owner.split(":")[0]
    return found


def libraries(binary):
    """{"libfmt.so.9": its path} of all that the loader would load."""
    return dict(re.findall(r"(\S+) => (/\S+) ", run("ldd", binary).stdout))


def needed(binary):
    """Names that the binary itself asks for."""
    return set(re.findall(r"NEEDED\s+(\S+)", run("objdump", "-p", binary).stdout))


def dependencies(packages):
    """The packages and all that they depend on, as installed here."""
    known, left = set(), set(packages)
    while left:
        package = left.pop()
        known.add(package)
        done = run("dpkg-query", "-W", "-f", "${Depends},${Pre-Depends}\n", package)
        names = set(re.findall(r"(?:^|[,|\n])\s*([a-z0-9][a-z0-9.+-]+)", done.stdout))
        left |= names - known
    return known


class ContainerTest(unittest.TestCase):
    def test_what_it_copies_is_in_the_tree_and_not_ignored(self):
        with open(IGNORE) as file:
            ignored = [line.strip() for line in file if line.strip() and not line.startswith("#")]
        for stage in stages():
            for value in values(stage, "COPY"):
                *sources, _ = [word for word in value.split() if not word.startswith("--")]
                if "--from=" in value:
                    continue
                for source in sources:
                    self.assertTrue(os.path.exists(source), source)
                    hits = [p for p in ignored if fnmatch.fnmatch(source, p) or source.startswith(p + "/")]
                    self.assertEqual(hits, [], source)
        for never in (".git", "bazel-bin", "bazel-out"):
            self.assertTrue(any(fnmatch.fnmatch(never, p) for p in ignored), never)

    def test_what_it_takes_from_the_build_was_put_there(self):
        build, runtime = stage_named("build"), stage_named("runtime")
        put = set(re.findall(r"install -D -m 755 \S+ (/out/\S+)", " ".join(values(build, "RUN"))))
        (taken,) = [v for v in values(runtime, "COPY") if "--from=build" in v]
        self.assertEqual(set(taken.split()[1:-1]), put)
        self.assertEqual({os.path.basename(path) for path in put}, {os.path.basename(path) for path in BINARIES})
        for label in re.findall(r"//\S+", " ".join(values(build, "RUN"))):
            self.assertIn(label, ("//daemon:refitd", "//daemon/refitctl"))

    def test_every_base_has_a_version(self):
        defaults = dict(value.split("=", 1) for name, value in instructions() if name == "ARG")
        for stage in stages():
            image = stage[0][1].split()[0]
            image = re.sub(r"\$\{(\w+)\}", lambda match: defaults[match.group(1)], image)
            if image == "runtime":
                continue
            tag = image.rpartition("/")[2].partition(":")[2]
            self.assertRegex(tag, r"^12(-slim)?$", image)  # the release whose packages are named below

    def test_the_packages_are_those_of_the_libraries_that_the_binaries_name(self):
        wanted = set()
        for binary in BINARIES:
            loaded = libraries(binary)
            wanted |= set(packages_of(loaded.get(name, "/lib64/" + name) for name in needed(binary)).values())
        self.assertIn("libgrpc++1.51", wanted)
        self.assertEqual(runtime_packages(), wanted)

    def test_the_packages_bring_every_library_that_is_loaded(self):
        brought = dependencies(runtime_packages())
        for binary in BINARIES:
            for path, package in packages_of(libraries(binary).values()).items():
                self.assertIn(package, brought, path)

    def test_the_image_for_gpus_had_no_nccl(self):
        """It has NCCL where the daemon looks, pinned by its hash, and the image without --target is the one without."""
        self.assertEqual([stage[0][1] for stage in stages()][-2:], ["runtime AS gpu", "runtime AS host"])
        self.assertEqual(len(stage_named("host")), 1)
        (copied,) = values(stage_named("gpu"), "COPY")
        self.assertEqual(copied.split(), ["--from=nccl", "/nccl", "/usr/local/lib/python3/dist-packages"])
        (install,) = [v for v in values(stage_named("nccl"), "RUN") if "pip install" in v]
        self.assertIn("--require-hashes --target /nccl --requirement /nccl.txt", install)
        self.assertIn("deploy/container/nccl.txt /nccl.txt", values(stage_named("nccl"), "COPY"))
        with open("deploy/container/nccl.txt") as file:
            (pinned,) = file.read().splitlines()
        version = re.fullmatch(r"nvidia-nccl-cu\d+==(\d+)\.(\d+)\.(\d+) --hash=sha256:[0-9a-f]{64}", pinned)
        self.assertGreaterEqual(tuple(map(int, version.groups())), (2, 28, 7))  # which symmetric memory needs

    def test_it_does_not_run_as_root(self):
        runtime = stage_named("runtime")
        (user,) = values(runtime, "USER")
        self.assertRegex(user, r"^[1-9]\d*:[1-9]\d*$")
        names = [name for name, _ in runtime]
        self.assertLess(names.index("USER"), names.index("ENTRYPOINT"))
        made = " ".join(values(runtime, "RUN"))
        uid, gid = user.split(":")
        self.assertIn("--uid %s --gid %s" % (uid, gid), made)

    def test_its_command_serves_and_its_check_finds_that(self):
        runtime = stage_named("runtime")
        (entry,), (arguments,), (check,) = (values(runtime, n) for n in ("ENTRYPOINT", "CMD", "HEALTHCHECK"))
        command = json.loads(entry) + json.loads(arguments)
        (config,) = [v for v in values(runtime, "COPY") if "--from" not in v]
        source, target = config.split()
        self.assertEqual(command, ["refitd", "--config", target])
        settings = textproto.validate(source)
        socket = textproto.get(settings, "listen.unix_path")
        self.assertEqual(values(runtime, "VOLUME"), [os.path.dirname(socket)])
        self.assertIn("-m 755 %s" % os.path.dirname(socket), " ".join(values(runtime, "RUN")))
        self.assertEqual(values(runtime, "STOPSIGNAL"), ["SIGTERM"])

        folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        own = os.path.join(folder, "refitd.sock")
        health = json.loads(check[check.index("["):])
        self.assertEqual(health[0], "refitctl")

        def healthy():
            return run(BINARIES[1], *health[1:], env={"REFITD_SOCKET": own}).returncode == 0

        self.assertFalse(healthy())
        with subprocess.Popen([BINARIES[0], "--config", source, "--listen-unix", own]) as daemon:
            try:
                deadline = time.monotonic() + SECONDS
                while not healthy():
                    self.assertLess(time.monotonic(), deadline)
            finally:
                daemon.terminate()
            self.assertEqual(daemon.wait(timeout=SECONDS), 0)


if __name__ == "__main__":
    unittest.main()
