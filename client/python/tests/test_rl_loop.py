"""The reinforcement-learning example: reward goes up, engine and trainer agree to rounding, and a stale refit is found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

from refitd import testing  # noqa: E402

SECONDS = 400  # for the whole program
EXAMPLES = Path(__file__).parents[1] / "examples"
ALARM = 3


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def run(daemon, *options):
    """The exit status, the summary, and all that was printed, with the plain torch engine and two FSDP2 ranks."""
    done = subprocess.run(
        [sys.executable, "rl_loop.py", "--json", "--engine", "torch", *options], cwd=EXAMPLES, env={**os.environ, "REFITD_SOCKET": daemon.socket},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), done.stdout
    return done.returncode, json.loads(lines[-1]), done.stdout


@pytest.mark.parametrize("mode", [(), ("--off-policy",)])
def test_the_policy_learns_and_the_engine_serves_it(daemon, mode):
    status, summary, printed = run(daemon, "--steps", "24", *mode)
    assert status == 0 and summary["steps"] == 24 and summary["alarm_step"] is None, printed
    assert summary["reward_first"] < 0.4 and summary["reward_last"] > 0.6, printed
    assert summary["kl_max"] <= 8 * summary["kl_control"] < 1e-3, printed
    assert summary["refit_ms"] > 0 and summary["pause_ms"] > 0 and summary["ranks"] == 2
    last = printed.split("version  24 ")[1].splitlines()[0]
    assert "v23:" in last or (mode and "v22:" in last), last


def test_a_trainer_of_one_rank_learns_as_well(daemon):
    status, summary, printed = run(daemon, "--steps", "12", "--ranks", "1")
    assert (status, summary["ranks"], summary["alarm_step"]) == (0, 1, None), printed
    assert summary["reward_last"] > summary["reward_first"] + 0.2, printed


@pytest.mark.parametrize("mode", [(), ("--off-policy",)])
def test_a_stale_refit_trips_the_alarm_at_its_step(daemon, mode):
    status, summary, printed = run(daemon, "--steps", "24", "--stale", "10", *mode)
    assert (status, summary["steps"], summary["alarm_step"]) == (ALARM, 10, 10), printed
    assert "ALARM: the sampler at version 10 does not serve the trainer's weights" in printed
    assert summary["kl_max"] > 8 * summary["kl_control"]


def test_a_rank_that_fails_is_the_programs_failure(daemon):
    done = subprocess.run(
        [sys.executable, "rl_loop.py", "--engine", "torch", "--steps", "1", "--fail", "1"], cwd=EXAMPLES,
        env={**os.environ, "REFITD_SOCKET": daemon.socket}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "rank 1 fails" in done.stdout and "rank 1 ended with status 1" in done.stdout


def test_the_loop_ends_without_an_abort_of_threads_that_are_left(daemon):
    for _ in range(5):
        _, _, printed = run(daemon, "--steps", "1")
        assert "terminate called" not in printed, printed
