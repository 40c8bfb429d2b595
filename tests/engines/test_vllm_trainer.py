"""vLLM's own trainer interface (`WeightTransferTrainerFactory`, `trainer_init`, `send_weights`) drives refitd: two FSDP2 ranks over gloo, and a
real server."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from engine_program import PROMPTS, TOKENS
from refitd import testing
from server import Server, free_port
from support import GROUP, HERE, EngineFailed, EngineProcess, Tokens, fresh

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 28), reason="this version of vLLM has no trainer engines")

WORLD = 2
EXTENSION = ("--worker-extension-cls", "worker_extension.Parameters")
# A server that drives itself has no development mode otherwise, by which the parameters are read.
DEVELOPMENT = {"VLLM_SERVER_DEV_MODE": "1"}
# A server that the trainer drives: the init info brings group and instance.
DRIVEN: dict[str, Any] = {**DEVELOPMENT, "VLLM_PLUGINS": None, "REFITD_GROUP": None, "REFITD_INSTANCE": None}
NOTE = "step 7"
# Folders with what the ranks of the trainer import first: SkyRL, or another vLLM than the one of the server, such as the unpacked wheel for GPUs.
TRAINER_PATH = os.environ.get("REFITD_ENGINES_TRAINER_PATH")


class TrainerRank(EngineProcess):
    """vllm_trainer_program.py or skyrl_trainer_program.py, likewise."""

    def __init__(self, program: str, checkpoint: Path, log: Path, options: dict[str, Any]) -> None:
        self.program, self._given = program, options
        super().__init__(checkpoint, log, follow=None)

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        if TRAINER_PATH is not None:
            environment["PYTHONPATH"] = f"{TRAINER_PATH}:{environment['PYTHONPATH']}"

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        return self._given


class TrainerRanks:
    """All ranks, called alike."""

    def __init__(self, checkpoint: Path, tmp_path: Path, daemon: Any, *, url: str | None, source: str, program: str, **info: Any) -> None:
        settings = {"socket": daemon.socket, "dtype": "bfloat16", "update_seconds": 120, **info.pop("settings", {})}
        info = {"group": GROUP, "engine": {"instance": "vllm-0"}, "settings": settings, **info}
        options = {"world_size": WORLD, "url": url, "source": source, "info": info}

        def start() -> None:
            port = free_port()
            logs = [tmp_path / f"trainer-{rank}.log" for rank in range(WORLD)]
            self._ranks = [TrainerRank(program, checkpoint, log, {**options, "rank": rank, "port": port}) for rank, log in enumerate(logs)]

        self._start = start
        start()

    def restart(self) -> None:
        """Kills all ranks, and starts others in their place."""
        self.close()
        self._start()
        self.started()

    def started(self) -> None:
        for rank in self._ranks:
            rank.started()

    def call(self, name: str, *arguments: Any) -> list[Any]:
        for rank in self._ranks:
            rank.begin(name, *arguments)
        answers: list[Any] = []
        for rank in self._ranks:
            try:
                answers.append(rank.result())
            except EngineFailed as error:
                answers.append(error)
        failed = [answer for answer in answers if isinstance(answer, EngineFailed)]
        if failed:
            assert len(failed) == WORLD, answers  # a failure is raised on every rank
            raise failed[0]
        return answers

    def close(self) -> None:
        for rank in self._ranks:
            rank.kill()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [models.make("qwen3", folder, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def expected(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Tokens, Any]]:
    """By checkpoint, tokens and parameters of an engine that loaded it."""
    found = [fresh(EngineProcess, checkpoint, tmp_path_factory.mktemp("fresh"), dtype="bfloat16") for checkpoint in checkpoints]
    assert found[0][0].differ_from(found[1][0]), "the two checkpoints give the same tokens: the test could not fail"
    return found


@contextmanager
def running(
    checkpoint: Path, tmp_path: Path, *, driven: bool, source: str = "module", program: str = "vllm_trainer_program.py", **info: Any
) -> Iterator[tuple[Any, Server, TrainerRanks]]:
    """A daemon, a server, and the trainer's ranks, which are not attached yet."""
    with testing.daemon() as daemon:
        environment = {**(DRIVEN if driven else DEVELOPMENT), "PYTHONPATH": f"{os.environ['PYTHONPATH']}:{HERE}"}
        with Server(checkpoint, tmp_path / "server.log", daemon.socket, *EXTENSION, **environment) as server:
            url = f"http://127.0.0.1:{server.port}" if driven else None
            ranks = TrainerRanks(checkpoint, tmp_path, daemon, url=url, source=source, program=program, **info)
            try:
                ranks.started()
                server.until(lambda: server.get("/health")[0] == 200, "the server answers")
                ranks.call("init")
                yield daemon, server, ranks
            finally:
                ranks.close()


def check_serves(server: Server, expected: tuple[Tokens, Any]) -> None:
    [held] = server.collective_rpc("refitd_parameters")
    assert held == expected[1][0]
    assert expected[0].include([server.answer(prompt, TOKENS)[0] for prompt in PROMPTS])


@pytest.mark.parametrize("driven", [True, False], ids=["the trainer drives the server", "the server drives itself"])
@pytest.mark.parametrize("source, sharded", [("module", None), ("module", False), ("split", None)], ids=["sharded", "pushed", "pushed by owners"])
def test_versions_that_vllms_trainer_interface_sends(
    driven: bool, source: str, sharded: bool | None, checkpoints: list[Path], expected: list[tuple[Tokens, Any]], tmp_path: Path
) -> None:
    """After each version the server has the parameters and gives the tokens of an engine that loaded the checkpoint. A version that is behind the
    group's becomes the next one, and the trainer's step is noted as text."""
    with running(checkpoints[0], tmp_path, driven=driven, source=source, sharded=sharded) as (daemon, server, ranks):
        for version, (wanted, seed) in enumerate([(None, 1), (None, 0), (1, 1), (9, 0)], 1):
            version = wanted if wanted is not None and wanted > version else version
            ranks.call("fill", str(checkpoints[seed]))
            for sent in ranks.call("send", wanted, NOTE):
                assert (sent["version"], sent["committed"]) == (version, 1)
                assert bool(sent["pushed"]) == (sharded is False or source == "split")
            if driven:
                assert server.post("/reset_prefix_cache") == 200  # which is the trainer's then
            else:
                server.until(lambda: server.get("/refitd/ready?max_behind=0")[1]["version"] == version, f"version {version}")
            check_serves(server, expected[seed])
        log = daemon.read_log()
    assert log.count(NOTE) >= 4, log[-3000:]


@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "pushed"])
def test_versions_that_skyrls_worker_sends(
    sharded: bool, checkpoints: list[Path], expected: list[tuple[Tokens, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SkyRL 0.4.0's worker, source and client: the first version is SkyRL's wish where it is greater than the group's, and a restarted training goes on
    with the group's next."""
    if TRAINER_PATH is None or not (Path(TRAINER_PATH.split(":")[0]) / "skyrl").exists():
        pytest.skip("SkyRL 0.4.0 is not there: REFITD_ENGINES_TRAINER_PATH names folders with it and what it imports")
    program = "skyrl_trainer_program.py"
    with running(checkpoints[0], tmp_path, driven=True, program=program, sharded=sharded, first_version=7) as (daemon, server, ranks):
        for version, seed in ((7, 1), (8, 0)):
            ranks.call("fill", str(checkpoints[seed]))
            for sent in ranks.call("send"):
                assert (sent["version"], sent["committed"], bool(sent["pushed"])) == (version, 1, not sharded)
            check_serves(server, expected[seed])
        ranks.restart()
        ranks.call("init")
        ranks.call("fill", str(checkpoints[1]))
        assert [sent["version"] for sent in ranks.call("send")] == [9, 9]
        check_serves(server, expected[1])
        log = daemon.read_log()
    assert "SkyRL's sync 2 of this run" in log
