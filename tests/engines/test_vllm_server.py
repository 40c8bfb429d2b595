"""vLLM's server takes versions while clients use it, with no call by the trainer but refit()."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import models
import pytest
import vllm
from refitd import testing
from refitd.integrations.vllm import MAX_VERSIONS
from server import Load, Server, percentile
from support import CALL_SECONDS, CheckpointTrainer, Sending, Tokens, need_gpus

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = pytest.mark.skipif(VERSION < (0, 26), reason="this version of vLLM has no endpoint plugins")

PROMPT = "Tell me"
# How long an engine that must not answer is listened to.
SILENCE_SECONDS = 2.0
# vLLM's default would be as many API servers as replicas.
PARALLEL = ("--data-parallel-size", "2", "--api-server-count", "1")
# Older versions of vLLM do not label tokens with the version of the weights.
NATIVE_VERSIONS = VERSION >= (0, 32)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [models.make("qwen3", folder, seed) for seed in (1, 2)]


def ready(server: Server, version: int) -> bool:
    code, body, _ = server.get("/refitd/ready?max_behind=0")
    return code == 200 and body["version"] == version


def check_spans(load: Load, tokens: int) -> None:
    """Spans of each completion follow each other, cover all of its tokens, and versions rise."""
    for spans in load.spans if NATIVE_VERSIONS else []:
        assert spans and spans[0]["start"] == 0 and spans[-1]["end"] == tokens, spans
        assert all(a["end"] == b["start"] and a["version"] < b["version"] for a, b in zip(spans, spans[1:])), spans


def check_counts(counted: dict[int, int], load: Load, answers: dict[int, int]) -> None:
    """The metric has as many tokens of each version as the answers told, for the versions that it still tells apart.

    `answers`: tokens by version that were asked for beside the load.
    """
    if not NATIVE_VERSIONS:
        return
    told = Counter(answers)
    for span in (span for spans in load.spans for span in spans):
        told[span["version"]] += span["end"] - span["start"]
    assert len(counted) == MAX_VERSIONS and max(counted) == max(told), (counted, told)
    assert counted == {version: told[version] for version in counted}


@pytest.mark.parametrize("arena", ["off", "device"])
def test_server_under_load(arena: str, checkpoints: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No completion fails or is cut, answers are those of the version that they tell, and no answer of random weights is ever given."""
    monkeypatch.setenv("REFITD_ARENA", arena)
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            assert server.get("/refitd/ready")[0] == 503  # random weights
            result = trainer.send(1, checkpoints[0])
            assert result.instances[0].committed
            server.until(lambda: ready(server, 1), "version 1")
            expected = {0: Tokens([server.answer(PROMPT)[0]])}
            trainer.send(2, checkpoints[1])
            server.until(lambda: ready(server, 2), "version 2")
            expected[1] = Tokens([server.answer(PROMPT)[0]])
            assert expected[0].differ_from(expected[1]), "the two checkpoints give the same tokens: the test could not fail"
            quiet = Load(server)
            server.until(lambda: quiet.completions >= 12, "completions without updates")
            quiet.stop()
            load = Load(server)
            pauses, seconds = [], []
            for version in range(3, 23):
                seconds.append(trainer.send(version, checkpoints[(version + 1) % 2]).seconds)
                server.until(lambda: ready(server, version), f"version {version}")
                status = server.get("/refitd/status")[1]
                assert status["staged"] == (arena == "device"), status
                pauses.append(status["last_pause_seconds"])
                server.check_answer(PROMPT, expected[(version + 1) % 2], version)
                if NATIVE_VERSIONS:
                    assert server.choice(PROMPT)[0]["refitd_version"] == [{"version": version, "start": 0, "end": 8}]
            load.stop()
            counted = server.tokens_by_version()
            trainer.close()
    assert not quiet.failures and not load.failures, (quiet.failures, load.failures)
    assert load.completions > 0
    check_spans(load, tokens=24)
    check_counts(counted, load, answers={version: 16 for version in range(3, 23)})
    if NATIVE_VERSIONS:
        assert any(len(spans) > 1 for spans in load.spans), "no completion was under way during an update: the test shows nothing"
    figures = {
        "arena": arena,
        "gap_p50_ms": [1e3 * percentile(run.gaps, 0.5) for run in (quiet, load)],
        "gap_p99_ms": [1e3 * percentile(run.gaps, 0.99) for run in (quiet, load)],
        "refit_p50_ms": 1e3 * percentile(seconds, 0.5),
        "pause_p50_ms": 1e3 * percentile(pauses, 0.5),
        "completions": [quiet.completions, load.completions],
    }
    print("\nFIGURES " + json.dumps(figures))


@pytest.mark.skipif(not NATIVE_VERSIONS, reason="this version of vLLM does not label tokens")
@pytest.mark.parametrize("cache", ["version", "reset"])
def test_kept_requests_keep_their_blocks_under_load(cache: str, checkpoints: list[Path], tmp_path: Path) -> None:
    """With REFITD_CACHE=version requests in flight are computed on with the blocks that they have: none is preempted, as `reset` preempts them. Requests that
    come after an update find no block of before: they answer as with the new version alone."""
    prompt = "client 1 says " * 24  # longer than a block of vLLM's on a CPU
    expected: dict[int, list[Any]] = {}
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket, REFITD_CACHE=cache) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[1])
            server.until(lambda: ready(server, 1), "version 1")
            load = Load(server, clients=2, tokens=96)
            for version in range(2, 6):
                trainer.send(version, checkpoints[version % 2])
                server.until(lambda: ready(server, version), f"version {version}")
                before = server.counter("vllm:prefix_cache_hits_total")
                answers = [server.answer(prompt) for _ in range(2)]
                assert server.counter("vllm:prefix_cache_hits_total") > before, version
                assert answers[0] == answers[1] and answers[0][1] == version, answers
                assert answers[0][0] == expected.setdefault(version % 2, answers[0][0]), version
            load.stop()
            preempted = server.counter("vllm:num_preemptions_total")
            trainer.close()
    assert not load.failures, load.failures
    assert expected[0] != expected[1], "the two checkpoints give the same tokens: the test could not fail"
    assert any(len(spans) > 1 for spans in load.spans), "no completion was under way during an update: the test shows nothing"
    assert preempted == 0 if cache == "version" else preempted > 0, preempted


def test_kill_9_of_daemon_trainer_and_server(checkpoints: list[Path], tmp_path: Path) -> None:
    """Whoever dies, the server answers with a whole version or not at all, and takes the next version."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = Tokens([server.answer(PROMPT)[0]])

            # The trainer goes with an update that it began.
            update = trainer.trainer.update(2)
            server.until(lambda: not server.get("/refitd/status")[1]["ready"], "the update pauses it")
            trainer.close()
            update.close()
            server.until(lambda: server.get("/refitd/status")[1]["state"] == "serving", "it serves again")
            server.check_answer(PROMPT, first, 1)

            # The daemon goes: the version here goes on.
            daemon.kill()
            server.until(lambda: not server.get("/refitd/status")[1]["attached"], "it notices")
            assert server.get("/refitd/ready")[0] == 503
            server.check_answer(PROMPT, first, 1)
            daemon.start()
            trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(3, checkpoints[1])
            server.until(lambda: ready(server, 3), "version 3")
            second = Tokens([server.answer(PROMPT)[0]])
            assert first.differ_from(second), "the two checkpoints give the same tokens: the test could not fail"

            # The server goes: the one that is started instead is ready with the next version only.
            server.kill()
            server.start()
            server.up()
            assert server.get("/refitd/ready")[0] == 503
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(4, checkpoints[1])
            server.until(lambda: ready(server, 4), "version 4")
            server.check_answer(PROMPT, second, 4)
            trainer.close()


def test_data_parallel_ranks_of_one_server_take_each_version_together(checkpoints: list[Path], tmp_path: Path) -> None:
    """Whichever of two replicas answers, the tokens are those of the version which the answer tells."""
    need_gpus(2)
    expected: dict[int, Tokens] = {}
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket, *PARALLEL) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            for version in range(1, 5):
                trainer.send(version, checkpoints[version % 2])
                server.until(lambda: ready(server, version), f"version {version}")
                with ThreadPoolExecutor(6) as pool:
                    answers = list(pool.map(lambda _: server.answer(PROMPT), range(6)))
                known = expected.setdefault(version % 2, Tokens([answers[0][0]]))
                assert all(told == version and known.include([answer]) for answer, told in answers), answers
            counted = server.tokens_by_engine()
            trainer.close()
    assert expected[0].differ_from(expected[1]), "the two checkpoints give the same tokens: the test could not fail"
    assert len(counted) == 2 and min(counted.values()) > 0, counted


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_pause_under_load(mode: str, checkpoints: list[Path], tmp_path: Path) -> None:
    """No completion has tokens of two versions: an update waits for those under way, or ends them."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket, REFITD_PAUSE=mode) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            load = Load(server)
            for version in range(2, 7):
                completions = load.completions
                trainer.send(version, checkpoints[version % 2])
                server.until(lambda: ready(server, version), f"version {version}")
                server.until(lambda: load.completions > completions, "a completion after it")
            load.stop()
            trainer.close()
    assert not load.failures, load.failures
    if NATIVE_VERSIONS:
        assert all(len(spans) <= 1 for spans in load.spans), load.spans
        ends = {spans[0]["end"] for spans in load.spans if spans}
        assert ends == {24} if mode == "wait" else ends <= set(range(25)), ends


def test_update_while_asleep_and_resume_of_a_dirty_engine(checkpoints: list[Path], tmp_path: Path) -> None:
    """Sleep of level 1 and 2 detaches; what vLLM's own /resume would serve is refused. vLLM on a CPU
    keeps the memory of a sleeping engine, so that what is seen here is the adapter's part."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket, VLLM_SERVER_DEV_MODE="1") as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            assert server.post("/resume") == 409  # random weights
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = Tokens([server.answer(PROMPT)[0]])
            assert server.post("/resume") == 200

            assert server.post("/sleep?level=1") == 200
            assert server.get("/refitd/status")[1]["state"] == "asleep"
            assert server.get("/refitd/ready")[0] == 503
            assert server.post("/resume") == 409
            assert server.post("/wake_up") == 200
            server.until(lambda: server.get("/refitd/ready")[0] == 200, "it serves version 1 again")
            server.check_answer(PROMPT, first, 1)

            assert server.post("/sleep?level=2") == 200
            assert server.post("/wake_up") == 200
            status = server.get("/refitd/status")[1]
            assert status["state"] == "dirty" and not status["ready"], status
            assert server.post("/resume") == 409
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(2, checkpoints[0])
            server.until(lambda: ready(server, 2), "version 2")
            server.check_answer(PROMPT, first, 2)
            trainer.close()


def test_random_weights_served_after_sleep_of_level_2(checkpoints: list[Path], tmp_path: Path) -> None:
    """vLLM's wake_up resumes the scheduler. An engine whose weights sleep discarded gives no token all the same, neither to a request
    that came while it slept nor to a later one, until a version is committed."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket, VLLM_SERVER_DEV_MODE="1") as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = Tokens([server.answer(PROMPT)[0]])
            assert server.post("/sleep?level=2") == 200
            with ThreadPoolExecutor(1) as pool:
                early = pool.submit(server.answer, PROMPT)
                assert server.gives_no_token(PROMPT, SILENCE_SECONDS)
                assert server.post("/wake_up") == 200
                assert server.gives_no_token(PROMPT, SILENCE_SECONDS)
                assert not early.done()
                assert server.get("/refitd/ready")[0] == 503
                server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
                trainer.send(2, checkpoints[0])
                server.until(lambda: ready(server, 2), "version 2")
                assert first.include([early.result(CALL_SECONDS)[0]])
            server.check_answer(PROMPT, first, 2)
            trainer.close()


@pytest.mark.parametrize("phase", ["idle", "prepare", "write"])
def test_kill_9_of_the_worker(phase: str, checkpoints: list[Path], tmp_path: Path) -> None:
    """A server whose worker is gone answers nothing; the one that is started instead is ready with the next version only."""
    with testing.daemon() as daemon:
        trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
        with Server(checkpoints[0], tmp_path / "server.log", daemon.socket) as server:
            server.up()
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches")
            trainer.send(1, checkpoints[0])
            server.until(lambda: ready(server, 1), "version 1")
            first = Tokens([server.answer(PROMPT)[0]])
            if phase == "write":
                sending = Sending(trainer, 2, checkpoints[1])
                os.kill(server.core(), signal.SIGKILL)
                sending.finished()
            elif phase == "prepare":
                update = trainer.trainer.update(2)
                server.until(lambda: not server.get("/refitd/status")[1]["ready"], "the update pauses it")
                os.kill(server.core(), signal.SIGKILL)
                update.close()
            else:
                os.kill(server.core(), signal.SIGKILL)
            server.kill_when_it_answers_nothing(PROMPT)
            server.start()
            server.up()
            assert server.get("/refitd/ready")[0] == 503
            server.until(lambda: server.get("/refitd/status")[1]["attached"], "it attaches again")
            trainer.send(5, checkpoints[0])
            server.until(lambda: ready(server, 5), "version 5")
            server.check_answer(PROMPT, first, 5)
            trainer.close()
