"""Adapters of many tenants: which versions are loaded, kept and given up, on an engine that notes the calls; versions come by a real daemon."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import FailedPrecondition, InvalidArgument, NotFound  # noqa: E402
from refitd.layout import TensorSpec  # noqa: E402

BASE = [TensorSpec(f"model.layers.{i}.self_attn.{name}.weight", "float32", (8, 4)) for i in range(2) for name in ("q_proj", "o_proj")]
BASE += [TensorSpec("model.norm.weight", "float32", (4,))]
WANTED = dict(rank=2, target_modules=["q_proj"], dtype="float32")


class Calls:
    """What vLLM holds, by id; `refuses`: whether it refuses what comes next."""

    def __init__(self):
        self.held, self.names, self.refuses, self.is_busy = {}, {}, False, False

    def add(self, request):
        if self.refuses:
            raise ValueError("no")
        self.held[request.lora_int_id] = (Path(request.lora_path) / "adapter_config.json").read_text()

    def remove(self, lora_id):
        del self.held[lora_id]

    def name(self, requests, gone):
        self.names.update(requests)
        for name in gone:
            self.names.pop(name, None)

    def busy(self):
        return self.is_busy


class Request(SimpleNamespace):
    def __init__(self, name, number, path):
        super().__init__(lora_name=name, lora_int_id=number, lora_path=path)


@pytest.fixture
def daemon():
    with testing.daemon() as running:
        yield running


@pytest.fixture
def engine(monkeypatch, tmp_path, daemon):
    """Adapters of an engine, and the calls that they make."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils", "safetensors", "safetensors.torch")}
    modules["vllm.lora.request"].LoRARequest = Request
    modules["vllm.v1.core.kv_cache_utils"]._gen_lora_extra_hash_keys = lambda request: [request.lora_request.lora_path]
    modules["safetensors.torch"].save_file = lambda tensors, path: path.write_bytes(b"")
    from refitd.integrations.vllm import adapters

    monkeypatch.setattr(adapters, "FOLDER", str(tmp_path))
    monkeypatch.setattr(adapters, "read_manifest", lambda path: BASE)
    config = SimpleNamespace(
        lora_config=SimpleNamespace(max_lora_rank=4), parallel_config=SimpleNamespace(nnodes=1), model_config=SimpleNamespace(model="base")
    )
    with mock.patch.dict(sys.modules, modules):
        calls = Calls()
        made = adapters.Adapters(calls, config, instance="e", socket=daemon.socket)
        yield made, calls
        made.close()


@pytest.fixture
def alice(daemon):
    """A trainer of the adapter alice."""
    from refitd.integrations.lora import specs_of

    tensors = {spec.name: torch.zeros(spec.shape) for spec in specs_of(BASE, 2, ["q_proj"], "float32")}
    tensors |= {f"base_model.model.{spec.name.removesuffix('.weight')}.lora_scaling": torch.full((1,), 2.0) for spec in BASE if "q_proj" in spec.name}
    with refitd.Trainer("alice", socket=daemon.socket, device="host") as trainer:
        trainer.register(tensors)
        yield trainer


def folders(adapters):
    return sorted(path.name for path in adapters._folder.iterdir() if path.is_dir())


def test_a_version_stays_while_requests_use_it(engine, alice):
    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    assert not calls.held and not folders(adapters), "the trial is left"
    with pytest.raises(NotFound, match="no version"):
        adapters.request("alice")
    alice.refit(1)
    assert adapters.wait("alice", 1) == 1
    first = adapters.acquire(adapters.request("alice"))
    for version in (2, 3, 4):
        alice.refit(version)
        assert adapters.wait("alice", version) == version
    assert set(calls.names) == {"alice", "alice@1", "alice@3", "alice@4"} and calls.names["alice"].lora_name == "alice@4"
    assert adapters.request("alice", 1) is first and len(calls.held) == len(folders(adapters)) == 3
    with pytest.raises(NotFound, match="no version 2"):
        adapters.request("alice", 2)
    adapters.release(first)
    adapters.poll()
    assert set(calls.names) == {"alice", "alice@3", "alice@4"} and len(calls.held) == len(folders(adapters)) == 2
    # A request that was made before its version went is computed with the newest.
    assert adapters.acquire(first).lora_name == "alice@4"
    assert adapters.status() == {"alice": {"version": 4, "kept": [3], "requests": 1, "reason": ""}}


def test_an_adapter_that_is_removed_ends_its_requests_first(engine, alice):
    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)
    used = adapters.acquire(adapters.request("alice"))
    adapters.remove("alice")
    assert not calls.names and len(calls.held) == len(folders(adapters)) == 1
    with pytest.raises(NotFound):
        adapters.request("alice")
    adapters.release(used)
    calls.is_busy = True
    adapters.poll()
    assert calls.held, "requests that nobody counts may use it"
    calls.is_busy = False
    adapters.poll()
    assert not calls.held and not folders(adapters)
    with pytest.raises(NotFound):
        adapters.acquire(used)
    adapters.add("alice", group="alice", **WANTED)  # the name is free
    alice.refit(2)
    assert adapters.wait("alice", 2) == 2


def test_a_version_that_vllm_refuses_leaves_the_one_before(engine, alice):
    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)
    calls.refuses = True
    alice.refit(2)
    with pytest.raises(FailedPrecondition, match="version 2 of adapter 'alice'"):
        adapters.wait("alice", 2)
    assert adapters.request("alice").lora_name == "alice@1" and len(folders(adapters)) == 1
    calls.refuses = False
    alice.refit(3)
    assert adapters.wait("alice", 3) == 3 and not adapters.status()["alice"]["reason"]
    calls.refuses = True
    with pytest.raises(FailedPrecondition, match="adapter 'bob': vLLM does not load it"):
        adapters.add("bob", group="alice", **WANTED)
    assert set(adapters.status()) == {"alice"}


@pytest.mark.parametrize(
    "wanted, culprit",
    [
        (dict(rank=2, target_modules=["q_proj", "wo"]), "target_modules"),
        (dict(rank=2, target_modules="norm"), "target_modules"),
        (dict(rank=0, target_modules=["q_proj"]), "rank"),
        (dict(rank=8, target_modules=["q_proj"]), "rank"),
        (dict(rank=2, target_modules=["q_proj"], name="a@1"), "name"),
    ],
)
def test_what_the_base_or_vllm_lacks_is_refused_by_name(engine, wanted, culprit):
    adapters, calls = engine
    with pytest.raises(InvalidArgument) as caught:
        adapters.add(**{"name": "alice", "group": "alice", **wanted})
    assert caught.value.culprit == culprit and not adapters.status() and not folders(adapters)


def test_scalings_that_differ_between_layers_are_told_by_pattern(engine, alice):
    adapters, _ = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)
    matrices = adapters._tenants["alice"].matrices
    assert matrices.config() == {"peft_type": "LORA", "r": 2, "lora_alpha": 4.0, "target_modules": ["q_proj"]}
    next(reversed(matrices.scalings.values())).fill_(3.0)
    assert matrices.config()["alpha_pattern"] == {r"model\.layers\.1\.self_attn\.q_proj": 6.0}


def test_folders_of_killed_processes_are_removed(engine, tmp_path):
    from refitd.integrations.vllm import adapters as module

    adapters, _ = engine
    left = tmp_path / f"{module._NAME}left"
    left.mkdir()
    (left / "lock").touch()
    module._remove_left_over()
    assert not left.exists() and adapters._folder.exists()
