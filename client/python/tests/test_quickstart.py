"""The programs of docs/quickstart.md print what the page says."""

import os
import re
import subprocess
import sys
import unittest
from pathlib import Path

PROGRAM = "client/python/examples/first_weights.py"
ROOT = Path(__file__).parents[3]


class QuickstartTest(unittest.TestCase):
    def test_the_first_weights_arrive_as_the_page_says(self):
        page = (ROOT / "docs/quickstart.md").read_text()
        expected = [line for line in page.splitlines() if line.startswith(("trainer: version", "engine: version"))]
        self.assertEqual(len(expected), 6)
        # The engine is a process of its own, which finds the package by PYTHONPATH and the daemon by its socket.
        run = subprocess.run([sys.executable, str(ROOT / PROGRAM)], capture_output=True, text=True, timeout=240, env=dict(os.environ))
        self.assertEqual(run.returncode, 0, run.stderr)
        for side in ("trainer", "engine"):  # the order between the two is not fixed
            printed = [line for line in run.stdout.splitlines() if line.startswith(side)]
            self.assertEqual(printed, [line for line in expected if line.startswith(side)])

    def test_the_demo_prints_what_the_page_shows_but_for_numbers(self):
        run = subprocess.run([sys.executable, "-m", "refitd.demo"], capture_output=True, text=True, timeout=240, env=dict(os.environ))
        self.assertEqual(run.returncode, 0, run.stderr)
        printed = [without_numbers(line) for line in run.stdout.splitlines()]
        page = (ROOT / "docs/quickstart.md").read_text().splitlines()
        first = page.index(next(line for line in page if line.startswith("daemon ")))
        self.assertEqual(printed, [without_numbers(line) for line in page[first : page.index("```", first)]])


def without_numbers(line):
    line = re.sub(r"its (stream ended|process died)", "it ended", line)  # the daemon notices the one or the other first
    return re.sub(r" +", " ", re.sub(r"\d[\d.,]*", "N", line))


if __name__ == "__main__":
    unittest.main()
