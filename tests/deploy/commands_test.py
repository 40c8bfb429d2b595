"""The commands on pages do what the pages say: those that need no GPU, no PyTorch, no root and no cluster."""

import os
import re
import shutil
import socket
import subprocess
import tempfile
import unittest

# The pages may link any file, so the test finds the tree by the real place of one page.
TREE = os.path.dirname(os.path.dirname(os.path.realpath("docs/quickstart.md")))
PROGRAMS = {"refitd": "daemon/refitd", "refitctl": "daemon/refitctl/refitctl"}
MAKE_CHECKPOINT = "tests/workloads/make_checkpoint"
SECONDS = 100


def fences(page, heading):
    """The fenced blocks below a heading of a page, up to the next heading."""
    with open(os.path.join(TREE, "docs", page)) as file:
        text = file.read()
    below = re.split(r"(?m)^## ", text.split("## %s\n" % heading)[1])[0]
    return re.findall(r"(?m)^```\w*\n(.*?)^```", below, re.DOTALL)


def shape(line):
    """A line without its numbers and units, which differ from run to run."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?( ?(us|ms|s|B|KiB|MiB|GiB)\b)?(/s)?", "#", line)).strip()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CommandsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.folder)
        for name, path in PROGRAMS.items():
            os.symlink(os.path.realpath(path), os.path.join(self.folder, name))
        subprocess.run([MAKE_CHECKPOINT, "--model", "tiny", "--out", os.path.join(self.folder, "checkpoint")],
                       stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)

    def run_block(self, block, until=""):
        """What the block's commands print, in this test's folder in place of /tmp; `until` runs after them."""
        script = "\n".join(line for line in block.splitlines() if "another terminal" not in line)
        script = script.replace("/tmp/", self.folder + "/").replace("127.0.0.1:7411", "127.0.0.1:%d" % free_port())
        # A person's next command comes later than a daemon's start.
        script = re.sub(r"(?m)^(refitd --listen-unix (\S+).*&).*$", r"\1\nuntil [ -S \2 ]; do sleep 0.01; done", script)
        # An engine of the page serves on; here it ends with the first version.
        script = re.sub(r"refitctl (.*)engine ", r"refitctl \1engine --versions 1 ", script)
        done = subprocess.run(["bash", "-c", "set -e\ntrap 'kill $(jobs -p) 2>/dev/null || true; wait' EXIT\n%s\n%s" % (script, until)],
                              env={"PATH": self.folder + ":" + os.environ["PATH"]}, cwd=self.folder, text=True, timeout=SECONDS,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def assert_prints(self, printed, expected):
        lines = [shape(line) for line in printed.splitlines()]
        for line in expected.splitlines():
            self.assertIn(shape(line), lines, printed)

    def test_a_checkpoint_goes_to_an_engine_on_one_node_as_the_page_says(self):
        commands, pushed, engine, _ = fences("refitctl.md", "On one node")
        self.assert_prints(self.run_block(commands, "wait $!"), pushed + engine)

    def test_a_checkpoint_goes_to_an_engine_on_two_nodes_as_the_page_says(self):
        commands, _ = fences("refitctl.md", "On two nodes")
        printed = self.run_block(commands, "wait $!")
        self.assertRegex(printed, r"policy v1 committed: 46 tensors")
        self.assertRegex(printed, r"far rank 0: verified .*version=1")

    def test_the_configuration_for_several_nodes_is_valid(self):
        configuration = next(block for block in fences("networks.md", "Connect two daemons") if "listen {" in block)
        with open(os.path.join(self.folder, "refitd.textproto"), "w") as file:
            file.write(configuration)
        printed = self.run_block("refitd --config /tmp/refitd.textproto --validate")
        for line in ("tcp: \"0.0.0.0:7411\"", "interface: \"eth0\"", "identity: \"spiffe://prod/refitd/*\""):
            self.assertIn(line, printed)

    def test_the_gates_of_an_upgrade_are_commands_of_refitctl(self):
        with open(os.path.join(TREE, "docs", "upgrade.md")) as file:
            asked = re.findall(r"(?m)^ *refitctl (status|nodes)\b", file.read())
        self.assertEqual(asked, ["nodes", "status", "nodes"])
        start, *_ = fences("refitctl.md", "On one node")[0].splitlines()
        printed = self.run_block("%s\nexport REFITD_SOCKET=/tmp/refitd.sock\n%s" % (start, "\n".join("refitctl " + what for what in asked)))
        self.assertRegex(printed, r"refitd \S+ serving")


if __name__ == "__main__":
    unittest.main()
