"""Adapters of many tenants in one vLLM on a CPU: each answer is that of vLLM with the adapter which it names, read from files."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path
from typing import Any

import models
import pytest
import refitd
import torch
import vllm
from refitd import testing
from refitd.integrations.vllm import adapters
from server import Server
from support import CALL_SECONDS, VLLM_ON_GPU, EngineFailed, EngineProcess

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
pytestmark = [
    pytest.mark.skipif(VERSION < (0, 32), reason="this version of vLLM knows adapters by name alone"),
    pytest.mark.skipif(VLLM_ON_GPU, reason="compares tokens for equality"),
]

RANK = 4
LORA: dict[str, Any] = dict(enable_lora=True, max_lora_rank=8, max_loras=2, max_cpu_loras=4, dtype="bfloat16", load_format="auto")
WANTED: dict[str, Any] = dict(rank=RANK, target_modules=models.ADAPTED_NAMES)
SEED = int(os.environ.get("REFITD_ENGINES_SEED", "1"))


class Tenant:
    """A trainer of one adapter, or of several in one group, which sends adapters that were written as files."""

    def __init__(self, socket: str, group: str, prefixes: tuple[str, ...] = ("",)) -> None:
        self._held: dict[str, Any] = {}
        for prefix in prefixes:
            for layer in range(2):
                for module, (rows, columns) in models.ADAPTED.items():
                    name = f"{prefix}base_model.model.model.layers.{layer}.{module}"
                    self._held[f"{name}.lora_A.weight"] = refitd.empty((RANK, columns), torch.bfloat16)
                    self._held[f"{name}.lora_B.weight"] = refitd.empty((rows, RANK), torch.bfloat16)
                    self._held[f"{name}.lora_scaling"] = refitd.empty(1, "float32", like="torch").fill_(2.0)
        self.trainer = refitd.Trainer(group, socket=socket, device="host")
        self.trainer.register(self._held)

    def send(self, version: int, tensors: dict[str, torch.Tensor], prefix: str = "") -> None:
        for name, tensor in tensors.items():
            self._held[prefix + name].copy_(tensor)
        self.trainer.refit(version)

    def close(self) -> None:
        self.trainer.close()


def folders() -> set[Path]:
    """Those of engines that run."""
    adapters._remove_left_over()
    return set(Path(adapters.FOLDER).glob(f"{adapters._NAME}*"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_version_is_an_adapter_of_its_own(ranks: int, folder: Path, daemon: Any, tmp_path: Path) -> None:
    """On all ranks, versions come between calls; the one before the newest stays for requests that name it. What is not used is given up."""
    checkpoint = models.make("qwen3", folder, 1)
    files = {seed: models.write_adapter(tmp_path / f"file-{seed}", seed, RANK) for seed in (1, 2, 3)}
    alice, both = Tenant(daemon.socket, "alice"), Tenant(daemon.socket, "both", ("bob/", "carol/"))
    before = folders()
    with EngineProcess(checkpoint, tmp_path / "log", follow=None, tp=ranks, **LORA) as engine:
        engine.started()
        base = engine.call("generate")
        expected = {seed: engine.call("adapted", str(tmp_path / f"file-{seed}")) for seed in files}
        assert len({str(tokens) for tokens in (base, *expected.values())}) == 4, "adapters give the same tokens: the test could not fail"
        engine.call("follow_adapters", {"instance": "engine-0", "socket": daemon.socket})
        engine.call("adapter", "add", "alice", {"group": "alice", **WANTED})
        engine.call("adapter", "add_group", "both", {"adapters": {"bob": WANTED, "carol": {"like": str(tmp_path / "file-1")}}})
        with pytest.raises(EngineFailed, match="adapter 'alice' has no version"):
            engine.call("with_adapter", "alice")
        for version, seed in enumerate((1, 2, 3, 1), 1):
            alice.send(version, files[seed])
            assert engine.call("adapter", "wait", "alice", version) == version
            assert engine.call("with_adapter", "alice") == expected[seed], version
            if version > 1:
                assert engine.call("with_adapter", "alice", version - 1) == expected[seed - 1 or 3], version
        with pytest.raises(EngineFailed, match="no version 2"):
            engine.call("with_adapter", "alice", 2)
        both.send(1, files[2], "bob/")  # and zeros for the other
        assert engine.call("adapter", "wait", "carol", 1) == 1
        both.send(2, files[3], "carol/")
        assert engine.call("adapter", "wait", "bob", 2) == engine.call("adapter", "wait", "carol", 2) == 2
        assert [engine.call("with_adapter", name) for name in ("bob", "carol", "alice")] == [expected[seed] for seed in (2, 3, 1)]
        assert engine.call("with_adapter", "carol", 1) == base
        assert engine.call("generate") == base
        engine.call("adapter", "remove", "alice")
        with pytest.raises(EngineFailed, match="there is no adapter 'alice'"):
            engine.call("with_adapter", "alice")
        (made,) = folders() - before
        assert sorted(path.name for path in made.iterdir() if path.is_dir()) == sorted(engine.call("held_paths"))
        for name in ("bob", "carol"):
            engine.call("adapter", "remove", name)
        assert [number for number in engine.call("loaded_adapters") if number >= adapters.FIRST_ID] == []
        assert [path for path in made.iterdir() if path.is_dir()] == []
        engine.call("adapter", "close")
        assert folders() == before
    for trainer in (alice, both):
        trainer.close()


@pytest.mark.parametrize(
    "wanted, why",
    [
        (dict(rank=4, target_modules=["q_proj", "wo"]), "target_modules: 'wo' names no linear layer"),
        (dict(rank=16, target_modules=["q_proj"]), "max-lora-rank 8"),
        (dict(rank=4, target_modules=["embed_tokens"]), "adapter 'alice': vLLM does not load it"),
    ],
)
def test_an_adapter_that_the_base_does_not_know_is_refused(wanted: dict[str, Any], why: str, folder: Path, daemon: Any, tmp_path: Path) -> None:
    with EngineProcess(models.make("qwen3", folder, 1), tmp_path / "log", follow=None, **LORA) as engine:
        engine.started()
        engine.call("follow_adapters", {"instance": "engine-0", "socket": daemon.socket})
        trainer = Tenant(daemon.socket, "alice")
        with pytest.raises(EngineFailed, match=why):
            engine.call("adapter", "add", "alice", {"group": "alice", **wanted})
        assert engine.call("adapter", "status") == {}
        engine.call("adapter", "add", "alice", {"group": "alice", **WANTED})
        trainer.close()


def test_twenty_tenants_under_load(tmp_path: Path) -> None:
    """Tenants come and go, each with versions of its own, while clients ask: every answer is that of the adapter and version that it names, an adapter
    that was removed answers nothing, and nothing is left of what went."""
    checkpoint = models.make("qwen3", tmp_path, 1)
    files = {seed: models.write_adapter(tmp_path / f"file-{seed}", seed, RANK) for seed in range(40)}
    prompt = "Tell me " * 20  # longer than a block of vLLM's on a CPU
    names = [f"tenant-{i}" for i in range(20)]
    choose = random.Random(SEED)
    before = folders()
    lora = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "4", "--max-cpu-loras", "8")
    with testing.daemon() as daemon:
        # vLLM's own routes load the adapters to compare with.
        environment = {"REFITD_ADAPTERS": "[]", "REFITD_ADAPTERS_ROUTES": "on", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "REFITD_GROUP": None}
        with Server(checkpoint, tmp_path / "server.log", daemon.socket, "--load-format", "auto", *lora, **environment) as server:
            server.until(lambda: server.ask("GET", adapters.ROUTE)[0] == 200 if server.get("/health")[0] == 200 else False, "the server answers")
            expected = {}
            for seed in files:
                assert server.post("/v1/load_lora_adapter", {"lora_name": f"f{seed}", "lora_path": str(tmp_path / f"file-{seed}")}) == 200
                for beams in (False, True):
                    asked = server.choice(prompt, model=f"f{seed}", return_token_ids=True, use_beam_search=beams)
                    expected[seed, beams] = asked[0]["token_ids"]
                assert server.post("/v1/unload_lora_adapter", {"lora_name": f"f{seed}"}) == 200
            assert len({str(expected[seed, False]) for seed in files}) == len(files), "adapters give the same tokens: the test could not fail"
            for wanted, why in (
                ({"name": "tiny", "group": "tiny", **WANTED}, "served model"),
                ({"name": "a", "group": "a", **WANTED, "target_modules": "(a+)+$"}, "target_modules"),
            ):
                status, body = server.ask("POST", adapters.ROUTE, wanted)
                assert status == 400 and why in body["error"], (status, body)
            trainers = {name: Tenant(daemon.socket, name) for name in names}
            sent: dict[str, dict[int, int]] = {name: {} for name in names}  # by tenant and version, the seed
            there: set[str] = set()
            wrong: list[str] = []
            answered, refused = [0], [0]
            stop = threading.Event()

            def ask(number: int) -> None:
                mine = random.Random(SEED + number)
                beams = number % 2 == 0  # which generate once for each token
                while not stop.is_set():
                    name = mine.choice(names)
                    status, body = server.ask(
                        "POST", "/v1/completions",
                        {"model": name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
                         "use_beam_search": beams},
                    )  # fmt: skip
                    if status == 404:
                        refused[0] += 1
                        continue
                    if status != 200:
                        wrong.append(f"{name}: {status} {body}")
                        continue
                    told, _, version = body["model"].partition("@")
                    tokens = body["choices"][0]["token_ids"]
                    if told != name or tokens != expected[sent[name][int(version)], beams]:
                        whose = [seed for seed in files if expected[seed, beams] == tokens]
                        wrong.append(f"{name} was answered by {body['model']} with tokens of {whose}, and sent {sent[name]}")
                    answered[0] += 1

            def add(name: str) -> None:
                status, body = server.ask("POST", adapters.ROUTE, {"name": name, "group": name, **WANTED})
                assert status == 200, body
                there.add(name)

            def send(name: str) -> None:
                version = len(sent[name]) + 1
                seed = choose.choice(sorted(files))
                sent[name][version] = seed
                trainers[name].send(version, files[seed])

            for name in names:
                add(name)
                send(name)
            clients = [threading.Thread(target=ask, args=(i,), daemon=True) for i in range(4)]
            for client in clients:
                client.start()
            deadline = time.monotonic() + CALL_SECONDS
            changes = 0
            while changes < 60 or answered[0] < 60 or not refused[0]:
                assert time.monotonic() < deadline, (changes, answered, refused)
                name = choose.choice(names)
                if name not in there:
                    add(name)
                elif choose.random() < 0.2:
                    assert server.ask("DELETE", f"{adapters.ROUTE}/{name}")[0] == 200
                    there.discard(name)
                    assert server.ask("POST", "/v1/completions", {"model": name, "prompt": "a"})[0] == 404
                else:
                    send(name)
                    server.until(lambda: server.ask("GET", adapters.ROUTE)[1][name]["version"] == len(sent[name]), f"{name}: {sent[name]}")
                changes += 1
            stop.set()
            for client in clients:
                client.join(CALL_SECONDS)
                assert not client.is_alive()
            print(f"{changes} changes, {answered[0]} answers, {refused[0]} refused")
            assert not wrong, wrong[:5]
            status = server.ask("GET", adapters.ROUTE)[1]
            assert set(status) == there and all(not each["requests"] and not each["reason"] for each in status.values()), status
            versions = sum((each["version"] is not None) + len(each["kept"]) for each in status.values())
            (made,) = folders() - before

            def left() -> int:
                return sum(1 for path in made.iterdir() if path.is_dir())

            server.until(lambda: left() == versions, "what went is given up")
            for name in sorted(there):
                assert server.ask("DELETE", f"{adapters.ROUTE}/{name}")[0] == 200
            server.until(lambda: left() == 0, "all is given up")
            for trainer in trainers.values():
                trainer.close()
    assert folders() == before  # also of the server that was killed
