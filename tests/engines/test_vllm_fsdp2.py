"""The example vllm_fsdp2.py by the commands of its first lines; its tutorial shows what it prints."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import vllm
from refitd.kl import CONTROL_FACTOR
from server import Server
from support import START_SECONDS

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "client/python/examples/vllm_fsdp2.py"
PAGE = ROOT / "docs/tutorials/fsdp2.md"
NUMBER = r"\d[\d.]*(?:e-\d+)?"
STEP = re.compile(rf"step (\d+) version (\d+) refit {NUMBER} s KL ({NUMBER}) \(rounding alone ({NUMBER}), weights one step old ({NUMBER})\)")


def documented(program: str, model: Path) -> list[str]:
    """The arguments that the script's first lines give the program, and the tutorial does as well; of several lines, those of the last."""
    (first, page) = (arguments(text, program) for text in (ast.get_docstring(ast.parse(SCRIPT.read_text())) or "", PAGE.read_text()))
    assert first == page
    return [str(model) if word == "/tmp/tiny-qwen3" else word for word in first]


def arguments(text: str, program: str) -> list[str]:
    *_, line = [line for line in text.replace("\\\n", " ").splitlines() if f"{program} " in line and "/tmp/tiny-qwen3" in line]
    return shlex.split(line.partition(f"{program} ")[2].removesuffix("&"), comments=True)


def steps_of(text: str) -> list[tuple[str, ...]]:
    """Of each line about a step: step, version, vLLM's KL, that of rounding alone, and that of weights one step old."""
    return [match.groups() for line in text.splitlines() if (match := STEP.fullmatch(line))]


class Served(Server):
    def command(self, model: Path) -> list[str]:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", *documented("vllm", model), "--port", str(self.port)]


@pytest.mark.skipif(VERSION < (0, 26), reason="the server of this version of vLLM takes no plugins with routes")
def test_vllm_scores_its_tokens_as_the_fsdp2_ranks_do_after_each_step(daemon: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    subprocess.run([sys.executable, SCRIPT, "--write", model], check=True, timeout=START_SECONDS, stdin=subprocess.DEVNULL)
    trainer = [sys.executable, "-m", "torch.distributed.run", *documented("torchrun", model)]
    with Served(model, tmp_path / "server.log", daemon.socket, REFITD_GROUP="qwen3") as server:
        done = subprocess.run(
            [*trainer, "--url", f"http://127.0.0.1:{server.port}"], cwd=SCRIPT.parent, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=2 * START_SECONDS,
            env={**os.environ, "REFITD_SOCKET": daemon.socket, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + server.log.read_text(errors="replace")[-3000:]
    print(done.stdout)
    steps = steps_of(done.stdout)
    assert [step[:2] for step in steps] == [("1", "1"), ("2", "2"), ("3", "3")], done.stdout
    for _, _, engine, rounding, late in steps:
        assert 0 < float(engine) < CONTROL_FACTOR * float(rounding) < float(late), done.stdout
    shown = steps_of(PAGE.read_text())
    assert [step[:2] for step in shown] == [step[:2] for step in steps]
    # Rounding differs between processors; what a step changes hardly does.
    assert [float(late) for *_, late in steps] == [pytest.approx(float(late), rel=0.3) for *_, late in shown], done.stdout
