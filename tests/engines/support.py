"""The parts that tests of real engines share: engines as processes, a trainer, environment variables. Every wait has a deadline."""

from __future__ import annotations

import ctypes
import json
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import models
import pytest
import refitd
import torch
from refitd.serving import write_manifest
from safetensors.torch import load_file

HERE = Path(__file__).resolve().parent
# Far longer than anything takes on two cores; only what hangs reaches them.
START_SECONDS = 1200.0
CALL_SECONDS = 600.0
# The pause between two looks whether a process that does not answer is still there.
LOOK_SECONDS = 1.0
# The group of all tests; each has a daemon of its own.
GROUP = "engines"

# Whether the vLLM that is installed runs on GPUs.
VLLM_ON_GPU = any("cpu" not in found.version for found in metadata.distributions(name="vllm"))
# Engines of several tests share a GPU's memory, and run models by CUDA graphs.
VLLM_GPU_OPTIONS: dict[str, Any] = {
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 64 << 20,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL"},
}

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # these tests read parameters by collective_rpc with a function
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Tiny models gain nothing from threads, which wait for each other where the processors have other work.
    "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
}


def die_with_parent() -> None:
    """For a child before it becomes the program: whatever ends the tests ends the engine."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
# Equal weights do not always give equal tokens on a GPU, where rounding depends on the requests beside a request and on kernels that are
# chosen by trials; without refitd the first call of an engine with a tiny Mixtral gave other tokens than its 29 later calls. By so much a
# token's log probability may differ there.
TOLERANCE = 0.25
# What an engine that is to sleep needs besides; on a CPU it needs nothing.
SLEEPS: dict[str, Any] = {"enable_sleep_mode": True} if VLLM_ON_GPU else {}


def need_gpus(count: int) -> None:
    """Skips the test where vLLM is one for GPUs and there are fewer."""
    if VLLM_ON_GPU and torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")


class EngineFailed(Exception):
    """The engine answered with an error."""


class FreshFailed(EngineFailed):
    """The engine can't load the checkpoint by itself."""


class EngineProcess:
    """engine_program.py with a model, in a process group of its own that ends with the test."""

    program = "engine_program.py"

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        follow: dict[str, Any] | None,
        tp: int = 1,
        follows_between_calls: bool = False,
        plant: dict[str, Any] | None = None,
        **llm: Any,
    ) -> None:
        """`follow`: options of the function that makes the engine follow a group; None: it follows none. `follows_between_calls`: whether it
        takes updates while it waits for a call; else only the calls `wait` and `poll` take them. `plant`: defects to plant into the model
        before the engine follows, by name with their arguments (engine_program.PLANTS)."""
        environment = {**os.environ, **ENVIRONMENT}
        if plant:
            environment["REFITD_ENGINES_PLANT"] = json.dumps(plant)
        self._set_up(environment, llm, follow is not None, tp)
        self.log = log
        options = self._options({"llm": llm, "follow": follow, "follows_between_calls": follows_between_calls, "plant": plant or {}})
        with open(log, "ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / self.program), str(model), json.dumps(options)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                text=True,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _options(self, options: dict[str, Any]) -> dict[str, Any]:
        """The options that the program gets."""
        return options

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        if tp == 1:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
            llm.setdefault("distributed_executor_backend", "uni")
        else:
            llm["tensor_parallel_size"] = tp
        for name, value in (VLLM_GPU_OPTIONS if VLLM_ON_GPU else {"enforce_eager": True}).items():
            llm.setdefault(name, value)
        if follows:
            llm.setdefault("load_format", "refitd")
            llm["weight_transfer_config"] = {"backend": "refitd"}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("REFITD "):
                self._answers.put(json.loads(line[len("REFITD ") :]))
        self._answers.put({"error": f"the engine's process ended: see {self.log}"})

    def started(self) -> EngineProcess:
        self._answer(START_SECONDS)
        return self

    def _answer(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = self._answers.get(timeout=LOOK_SECONDS)
                break
            except queue.Empty:
                # Processes that the engine started may keep its output open after its end.
                if self.process.poll() is not None and self._answers.empty():
                    found = {"error": f"the engine's process ended with status {self.process.returncode}: see {self.log}"}
                    break
                if time.monotonic() > deadline:
                    raise TimeoutError(f"no answer within {seconds} s: {self.log.read_text(errors='replace')[-3000:]}") from None
        if "error" in found:
            raise EngineFailed(found["error"])
        return found["result"]

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self._answer(CALL_SECONDS)

    def begin(self, name: str, *arguments: Any) -> None:
        """Calls as call() does, without waiting for the answer, which result() gives."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"call": name, "arguments": arguments}) + "\n")
        self.process.stdin.flush()

    def result(self) -> Any:
        return self._answer(CALL_SECONDS)

    def kill(self) -> None:
        """SIGKILL for the engine and all its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class LaunchedProcesses:
    """Two engine processes as an external launcher starts them, each with one of two tensor-parallel ranks. Used as an EngineProcess: calls
    go to both, whose answers must be equal, but for lists by rank."""

    def __init__(self, model: Path, log: Path, *, follow: dict[str, Any] | None, tp: int = 2, **llm: Any) -> None:
        assert tp == 2
        self.log = log
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.processes = [
            LaunchedProcess(model, log.with_name(f"{log.stem}-{rank}.log"), follow=follow, launched=(rank, tp, port), **llm) for rank in range(tp)
        ]

    def started(self) -> LaunchedProcesses:
        for process in self.processes:
            process.started()
        return self

    def begin(self, name: str, *arguments: Any) -> None:
        self._lists = name in ("parameters", "status")
        for process in self.processes:
            process.begin(name, *arguments)

    def result(self) -> Any:
        answers = [process.result() for process in self.processes]
        if self._lists:
            return [entry for of_process in answers for entry in of_process]
        assert answers[0] == answers[1]
        return answers[0]

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self.result()

    def __enter__(self) -> LaunchedProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        # vLLM on a CPU gives the memory by which its ranks talk one name under every external launcher, and makes none where the name is in use.
        for left in Path("/dev/shm").glob("-tp:*-cpushm_*"):
            left.unlink()


class LaunchedProcess(EngineProcess):
    """One of LaunchedProcesses."""

    def __init__(self, *arguments: Any, launched: tuple[int, int, int], **options: Any) -> None:
        """`launched`: rank, number of ranks, and the port at which they meet."""
        self._launched = launched
        super().__init__(*arguments, **options)

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        rank, ranks, port = (str(number) for number in self._launched)
        super()._set_up(environment, llm, follows, 1)
        environment.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        llm.update(tensor_parallel_size=int(ranks), distributed_executor_backend="external_launcher")


class SglangProcess(EngineProcess):
    """sglang_program.py, likewise."""

    program = "sglang_program.py"

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        environment["PYTHONPATH"] = f"{HERE / 'startup'}:{HERE}:{environment['PYTHONPATH']}"
        environment["SGLANG_PLUGINS"] = "refitd"
        environment["SGLANG_NCCL_SO_PATH"] = "/nonexistent"  # else two ranks look for GPUs
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp))
        llm["tp_size"] = tp
        if follows:
            llm.setdefault("load_format", "dummy")


class TrainerProcess(EngineProcess):
    """trainer_program.py, likewise: a trainer of one rank that can be killed."""

    program = "trainer_program.py"

    def _set_up(self, environment: dict[str, str], llm: dict[str, Any], follows: bool, tp: int) -> None:
        pass


class CheckpointTrainer:
    """A trainer of one rank that sends checkpoints as versions."""

    def __init__(self, socket: str, first: Path, device: str = "host", **options: Any) -> None:
        """`device`: where its tensors are, "host" or "cuda"."""
        loaded = load_file(first / "model.safetensors")
        if device == "host":
            self.tensors = {name: refitd.empty(tuple(t.shape), t.dtype) for name, t in loaded.items()}
        else:
            self.tensors = {name: torch.empty_like(t, device=device) for name, t in loaded.items()}
        on = "host" if device == "host" else None
        self.trainer = refitd.Trainer(GROUP, rank=0, world_size=1, socket=socket, device=on, **options)
        self.trainer.register(self.tensors)

    def fill(self, checkpoint: Path) -> None:
        for name, tensor in load_file(checkpoint / "model.safetensors").items():
            self.tensors[name].copy_(tensor)

    def send(self, version: int, checkpoint: Path, seconds: float = 120.0) -> refitd.UpdateResult:
        self.fill(checkpoint)
        return self.trainer.refit(version, duration_seconds=seconds)

    def close(self) -> None:
        self.trainer.close()


class Sending:
    """`send` on a thread, as the engine is driven meanwhile."""

    def __init__(self, trainer: CheckpointTrainer, version: int, checkpoint: Path) -> None:
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(trainer, version, checkpoint), daemon=True)
        self._thread.start()

    def _run(self, trainer: CheckpointTrainer, version: int, checkpoint: Path) -> None:
        try:
            self._outcome.append(trainer.send(version, checkpoint))
        except Exception as error:
            self._outcome.append(error)

    def finished(self) -> None:
        """Waits for the end, whatever it is."""
        self._thread.join(CALL_SECONDS)
        assert self._outcome, "the refit does not end"

    def result(self) -> refitd.UpdateResult:
        self._thread.join(CALL_SECONDS)
        assert self._outcome, "the refit does not end"
        if isinstance(self._outcome[0], Exception):
            raise self._outcome[0]
        result: refitd.UpdateResult = self._outcome[0]
        return result


def following(daemon: Any, **options: Any) -> dict[str, Any]:
    """Options of `follow` for an engine that follows the tests' group."""
    return {"group": GROUP, "instance": "engine-0", "socket": daemon.socket, **options}


class Tokens:
    """What an engine with the weights of one checkpoint answers to each of the prompts: token by token, on a GPU with the token's log
    probability and how much greater it is than that of the runner-up."""

    def __init__(self, answers: list[list[Any]]) -> None:
        self._answers = answers

    def include(self, answers: list[list[Any]]) -> bool:
        """Whether an engine with these weights may answer so: with equal tokens; on a GPU, equal up to one that rounding decides."""
        return len(answers) == len(self._answers) and all(map(_may_equal, answers, self._answers))

    def differ_from(self, other: Tokens) -> bool:
        """Whether the other weights answer otherwise. A test can't fail else."""
        return not self.include(other._answers)


def _may_equal(found: list[Any], expected: list[Any]) -> bool:
    if not VLLM_ON_GPU:
        return found == expected
    for (token, probability, ahead), (other, its_probability, its_lead) in zip(found, expected):
        if abs(probability - its_probability) > TOLERANCE:
            return False
        if token != other:
            return max(ahead, its_lead) <= TOLERANCE  # the answers go apart here
    return len(found) == len(expected)


def differing(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    """The names of parameters that are not the same on some rank; `found` and `expected` have those of each rank."""
    assert len(found) == len(expected)
    names = {name for a, b in zip(found, expected) for name in a.keys() | b.keys() if a.get(name) != b.get(name)}
    return sorted(names)


def fresh(kind: type[EngineProcess], checkpoint: Path, tmp_path: Path, *, generate: str = "generate", **llm: Any) -> tuple[Tokens, Any]:
    """Tokens and parameters of an engine that loaded the checkpoint itself. `generate`: the call that gives the tokens. Raises
    FreshFailed."""
    with kind(checkpoint, tmp_path / "fresh.log", follow=None, **llm) as engine:
        try:
            engine.started()
        except EngineFailed as error:
            raise FreshFailed(str(error)) from error
        return Tokens(engine.call(generate)), engine.call("parameters")


def update(engine: EngineProcess, trainer: CheckpointTrainer, version: int, checkpoint: Path) -> None:
    """Brings the checkpoint into the engine as `version`."""
    sending = Sending(trainer, version, checkpoint)
    assert engine.call("wait", version, 120) == version
    assert sending.result().instances[0].committed


def check_holds(engine: EngineProcess, expected: tuple[Tokens, Any], version: int) -> None:
    """The engine has the parameters and gives the tokens of an engine that loaded the checkpoint itself; `expected` is of fresh(). On a GPU an engine with
    experts answers the same prompts differently from call to call, so that one of five answers must be the expected one there: weights that are stale give none.
    """
    assert not differing(engine.call("parameters"), expected[1]), f"version {version}"
    answers = (expected[0].include(engine.call("generate")) for _ in range(5 if VLLM_ON_GPU else 1))
    assert any(answers), f"version {version}"


def check_five_versions(
    kind: type[EngineProcess],
    name: str,
    folder: Path,
    daemon: Any,
    tmp_path: Path,
    *,
    dtype: str = "bfloat16",
    each: Callable[[EngineProcess, int], None] = lambda engine, version: None,
    live: dict[str, Any] | None = None,
    how: dict[str, Any] | None = None,
    trainer_device: str = "host",
    **llm: Any,
) -> dict[str, Any]:
    """After each of five versions the live engine has the parameters, buffers and greedy tokens of an engine that loaded the
    checkpoint itself. `each`: checks more after a version. `live`: options of the live engine alone; `how`: of `follow`. `trainer_device`: as of
    CheckpointTrainer. Returns its first rank's delivery.
    """
    need_gpus(llm.get("tp", 1))
    checkpoints = {seed: models.make(name, folder, seed, dtype) for seed in (1, 2)}
    expected = {seed: fresh(kind, checkpoint, tmp_path, dtype=dtype, **llm) for seed, checkpoint in checkpoints.items()}
    assert expected[1][0].differ_from(expected[2][0]), "the two checkpoints give the same tokens: the test could not fail"
    trainer = CheckpointTrainer(daemon.socket, checkpoints[1], trainer_device)
    try:
        with kind(checkpoints[1], tmp_path / "live.log", follow=following(daemon, **(how or {})), dtype=dtype, **llm, **(live or {})) as engine:
            engine.started()
            for version, seed in enumerate((2, 1, 2, 2, 1), 1):
                update(engine, trainer, version, checkpoints[seed])
                check_holds(engine, expected[seed], version)
                each(engine, version)
            ranks: list[dict[str, Any]] = engine.call("status")
    finally:
        trainer.close()
    assert len(ranks) == llm.get("tp", 1)
    for rank, parameters in zip(ranks, expected[1][1]):
        delivery = rank["delivery"]
        listed = {*delivery["direct"], *delivery["processed"], *delivery["constant"]}
        assert listed == set(parameters), "a parameter or buffer is in no list"
    for rank in ranks:
        assert rank["delivery"]["proof"] is None or not rank["delivery"]["proof"]["failed"], rank["delivery"]["proof"]
    found = dict(ranks[0]["delivery"])
    processed = {re.sub(r"layers\.\d+", "layers.N", parameter): why for parameter, why in found["processed"].items()}
    print(f"{name}, {dtype}: {len(found['direct'])} direct, {len(found['processed'])} processed {processed}, loader tensors of {found['loader_bytes']} bytes, proof {found['proof']}")
    return found


def without_weights(checkpoint: Path, path: Path) -> Path:
    """A copy of a checkpoint whose file of weights ends after its header."""
    shutil.copytree(checkpoint, path)
    for file in path.glob("*.safetensors"):
        with open(file, "r+b") as opened:
            opened.truncate(8 + int.from_bytes(opened.read(8), "little"))
    return path


def restoring(daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets what the workers of an engine that follows the tests' group need to find what is kept of them."""
    for name, value in (("GROUP", GROUP), ("INSTANCE", "engine-0"), ("SOCKET", daemon.socket), ("ARENA", "device"), ("RESTORE", "on")):
        monkeypatch.setenv(f"REFITD_{name}", value)


def kept_versions(daemon: Any) -> list[int]:
    """The versions in the arenas that the daemon keeps."""
    status = json.loads(daemon.control("--output", "json", "status"))
    return [int(arena["version"]) for arena in status["arenas"] if arena["kept"]]


def kill(engine: Any, daemon: Any, version: int, ranks: int = 1) -> None:
    """Kills an engine, a process or server, whose arenas the daemon then keeps."""
    engine.kill()
    deadline = time.monotonic() + CALL_SECONDS
    while kept_versions(daemon) != [version] * ranks:
        assert time.monotonic() < deadline, f"{kept_versions(daemon)}: {daemon.read_log()[-3000:]}"
        time.sleep(0.05)


def serve_blocks(monkeypatch: pytest.MonkeyPatch, how: str = "plain") -> None:
    """Lets engines serve FP8 weights in blocks on this CPU (startup/sitecustomize.py)."""
    monkeypatch.setenv("REFITD_ENGINES_BLOCKS", how)
    monkeypatch.setenv("PYTHONPATH", f"{HERE / 'startup'}:{HERE}:{os.environ['PYTHONPATH']}")


def quantised_in_blocks(weight: torch.Tensor, reciprocal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as NeMo-RL's `cast_tensor_to_fp8_blockwise` makes them (`reciprocal`), or vLLM's `per_block_cast_to_fp8`. The weight's rows and columns are
    multiples of 128."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // 128, 128, columns // 128, 128)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    factor = (1.0 / amax) * 448.0 if reciprocal else 1.0 / (amax.clamp(1e-4) / 448.0)
    scales = 1.0 / factor if reciprocal else amax.clamp(1e-4) / 448.0
    values = (blocks * factor).clamp(-448, 448).to(torch.float8_e4m3fn)
    return values.view(rows, columns), scales.view(rows // 128, columns // 128)


def check_trainers_feed_a_quantised_checkpoint(
    kind: type[EngineProcess], folder: Path, daemon: Any, tmp_path: Path, how: str, name: str = "qwen3", **llm: Any
) -> None:
    """After each version the engine, which was started with a checkpoint that is quantised in blocks, has the parameters and tokens of an engine that
    loaded the trainers' bfloat16 checkpoint, quantised as the kind `how` says."""
    need_gpus(llm.get("tp", 1))
    sources = {seed: models.make(name, folder, seed) for seed in (1, 2)}
    quantised = {seed: tmp_path / f"quantised-{seed}" for seed in sources}
    for seed, path in quantised.items():
        models.quantise(sources[seed], path, lambda weight: quantised_in_blocks(weight, how == "fp8_block_reciprocal"))
    expected = {seed: fresh(kind, path, tmp_path, dtype="bfloat16", **llm) for seed, path in quantised.items()}
    assert expected[1][0].differ_from(expected[2][0]), "the two checkpoints give the same tokens: the test could not fail"
    trainer = CheckpointTrainer(daemon.socket, sources[1])
    follow = following(daemon, derived=None if how == "fp8_block" else how, manifest=str(sources[1]))  # which is the default
    try:
        with kind(quantised[1], tmp_path / "live.log", follow=follow, dtype="bfloat16", **llm) as engine:
            engine.started()
            for version, seed in enumerate((2, 1, 2), 1):
                update(engine, trainer, version, sources[seed])
                check_holds(engine, expected[seed], version)
            for delivery in (rank["delivery"] for rank in engine.call("status")):
                assert delivery["derived"]["model.layers.0.self_attn.o_proj.weight"] == f"values of {how}", delivery
                assert len(delivery["derived"]) == 16 and not delivery["proof"]["failed"], delivery
                # Routers stay bfloat16, and vLLM packs them on a CPU.
                assert bool(delivery["loader_bytes"]) == any(name.endswith("mlp.gate.weight") for name in delivery["processed"]), delivery
    finally:
        trainer.close()


def check_restarts(
    kind: type[EngineProcess], name: str, folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, dtype: str = "bfloat16",
    **llm: Any,
) -> dict[str, Any]:  # fmt: skip
    """An engine that is killed and started again, from a checkpoint whose weights are gone, has its version at once, as an engine has that loaded
    this version's checkpoint. It takes the next version, and restarts with that. Returns its first rank's delivery."""
    ranks = llm.get("tp", 1)
    need_gpus(ranks)
    checkpoints = [models.make(name, folder, seed, dtype) for seed in (1, 2)]
    expected = [fresh(kind, checkpoint, tmp_path, dtype=dtype, **llm) for checkpoint in checkpoints]
    assert expected[0][0].differ_from(expected[1][0]), "the two checkpoints give the same tokens: the test could not fail"
    restoring(daemon, monkeypatch)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    start = partial(kind, follow=following(daemon), dtype=dtype, **llm)
    lost = without_weights(checkpoints[0], tmp_path / "lost")
    try:
        with start(checkpoints[0], tmp_path / "live-0.log") as engine:
            engine.started()
            for version in (1, 2):
                update(engine, trainer, version, checkpoints[version - 1])
            kill(engine, daemon, 2, ranks)
        for version in (2, 3):
            with start(lost, tmp_path / f"live-{version}.log") as engine:
                engine.started()
                assert engine.call("wait", version, 0.0) == version, daemon.read_log()[-3000:]
                check_holds(engine, expected[(version + 1) % 2], version)
                update(engine, trainer, version + 1, checkpoints[version % 2])
                check_holds(engine, expected[version % 2], version + 1)
                statuses: list[dict[str, Any]] = engine.call("status")
                assert all(status["staged"] for status in statuses)
                kill(engine, daemon, version + 1, ranks)
    finally:
        trainer.close()
    delivery: dict[str, Any] = statuses[0]["delivery"]
    assert delivery["proof"] is not None and not delivery["proof"]["failed"], delivery["proof"]
    return delivery


def check_starts_without(engine: EngineProcess, why: str, daemon: Any) -> None:
    """The engine does not take up what was kept, for the reason that the daemon logs, and generates nothing before the next version."""
    engine.started()
    status = engine.call("poll", 0.0)
    assert (status["state"], status["ready"], status["version"]) == ("dirty", False, None), status
    assert why in daemon.read_log(), daemon.read_log()[-3000:]
    with pytest.raises(EngineFailed, match="not one whole version"):
        engine.call("generate")


def check_another_model(kind: type[EngineProcess], folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another model, in the place of one that was killed, takes nothing up."""
    checkpoints = [models.make(name, folder, 1) for name in ("qwen3", "qwen3-one-kv-head")]
    restoring(daemon, monkeypatch)
    trainer = CheckpointTrainer(daemon.socket, checkpoints[0])
    try:
        with kind(checkpoints[0], tmp_path / "live-0.log", follow=following(daemon), dtype="bfloat16") as engine:
            engine.started()
            update(engine, trainer, 1, checkpoints[0])
            kill(engine, daemon, 1)
        with kind(checkpoints[1], tmp_path / "live-1.log", follow=following(daemon), dtype="bfloat16") as engine:
            check_starts_without(engine, "its layout differs", daemon)
    finally:
        trainer.close()


def check_restarts_after(
    kind: type[EngineProcess], calls: list[tuple[Any, ...]], folder: Path, daemon: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is killed after these calls, and started again, has the version that it had before them."""
    checkpoint = models.make("qwen3", folder, 1)
    restoring(daemon, monkeypatch)
    trainer = CheckpointTrainer(daemon.socket, checkpoint)
    start = partial(kind, checkpoint, follow=following(daemon), dtype="bfloat16")
    try:
        with start(log=tmp_path / "live-0.log") as engine:
            engine.started()
            update(engine, trainer, 1, checkpoint)
            before = Tokens(engine.call("generate")), engine.call("parameters")
            for name, *arguments in calls:
                engine.call(name, *arguments)
            check_holds(engine, before, 1)
            kill(engine, daemon, 1)
        with start(log=tmp_path / "live-1.log") as engine:
            engine.started()
            check_holds(engine, before, 1)
    finally:
        trainer.close()


def check_refused(
    kind: type[EngineProcess], daemon: Any, checkpoint: Path, tmp_path: Path, culprit: str, plant: dict[str, Any] | None = None,
    llm: dict[str, Any] | None = None, **options: Any,
) -> None:  # fmt: skip
    """The engine does not attach, and the error names the culprit. `llm`: options of the engine; `options`: of `follow`."""
    trainer = CheckpointTrainer(daemon.socket, checkpoint)
    try:
        with kind(checkpoint, tmp_path / "live.log", follow=following(daemon, **options), dtype="bfloat16", plant=plant, **(llm or {})) as engine:
            with pytest.raises(EngineFailed, match=culprit):
                engine.started()
    finally:
        trainer.close()


def manifest_of(checkpoint: Path, path: Path, *, without: str = "", **more: Any) -> str:
    """Writes the list of the checkpoint's tensors, without one and with `more`; returns the path for the option `manifest`."""
    tensors = {name: tensor for name, tensor in load_file(checkpoint / "model.safetensors").items() if name != without}
    write_manifest(str(path), {**tensors, **more})
    return str(path)
