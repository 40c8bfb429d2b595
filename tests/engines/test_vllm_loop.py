"""The loop of reinforcement learning with vLLM's server as its engine, and FSDP2 ranks as its trainer."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import vllm
from support import START_SECONDS

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])

EXAMPLES = Path(__file__).parents[2] / "client/python/examples"
ALARM = 3


def test_the_server_serves_what_was_trained_and_a_stale_refit_trips_the_alarm(daemon: Any) -> None:
    loop = [sys.executable, "rl_loop.py", "--engine", "vllm"]
    if VERSION < (0, 26):
        refused = subprocess.run(loop, cwd=EXAMPLES, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=START_SECONDS)
        assert refused.returncode == 2 and re.search(r"--engine vllm: vLLM \S+ is older than 0\.26", refused.stderr), refused.stderr
        return
    done = subprocess.run(
        [*loop, "--off-policy", "--steps", "8", "--stale", "6", "--json"], cwd=EXAMPLES,
        env={**os.environ, "REFITD_SOCKET": daemon.socket}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
        timeout=2 * START_SECONDS,
    )  # fmt: skip
    *printed, last = done.stdout.splitlines()
    summary = json.loads(last)
    assert (done.returncode, summary["engine"], summary["ranks"]) == (ALARM, "vllm", 2), done.stdout
    assert (summary["steps"], summary["alarm_step"]) == (6, 6), done.stdout
    assert summary["kl_max"] > 8 * summary["kl_control"] > 0
    steps = [line for line in printed if line.startswith("version")]
    # The engine's KL is that of vLLM's own reload of the same checkpoint, printed with three digits.
    assert len(steps) == 6 and all(f"KL {line.split('control ')[1].split(')')[0]} " in line for line in steps[:5]), done.stdout
