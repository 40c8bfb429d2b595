"""Adapters of many tenants: which versions are loaded, kept and given up, on an engine that notes the calls; versions come by a real daemon."""

import asyncio
import fcntl
import os
import shutil
import sys
import threading
from dataclasses import make_dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound  # noqa: E402
from refitd.layout import TensorSpec  # noqa: E402

BASE = [TensorSpec(f"model.layers.{i}.self_attn.{name}.weight", "float32", (8, 4)) for i in range(2) for name in ("q_proj", "o_proj")]
BASE += [TensorSpec("model.norm.weight", "float32", (4,))]
WANTED = dict(rank=2, target_modules=["q_proj"], dtype="float32")


class Calls:
    """What vLLM holds, by id; `refuses`: whether it refuses what comes next."""

    def __init__(self):
        self.held, self.names, self.refuses, self.is_busy, self.others = {}, {}, False, False, ()

    def add(self, request):
        if self.refuses:
            raise ValueError("no")
        self.held[request.lora_int_id] = (Path(request.lora_path) / "adapter_config.json").read_text()

    def remove(self, lora_id):
        del self.held[lora_id]

    def name(self, requests, gone):
        self.names.update(requests)
        for name, request in gone.items():
            if self.names.get(name) is request:
                del self.names[name]

    def served(self, name):
        return name in self.others

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
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request", "vllm.lora.peft_helper", "vllm.v1", "vllm.v1.core", "vllm.v1.core.kv_cache_utils", "safetensors", "safetensors.torch")}
    modules["vllm.lora.request"].LoRARequest = Request
    modules["vllm.lora.peft_helper"].PEFTHelper = make_dataclass("PEFTHelper", ["r", "lora_alpha", "rank_pattern", "alpha_pattern"])
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
    with pytest.raises(NotFound, match="'alice@1' is not here any more"):  # its answer would name a version that did not make it
        adapters.acquire(first)
    assert adapters.status() == {"alice": {"version": 4, "kept": [3], "requests": 0, "reason": ""}}


def removed_in_use(adapters, alice):
    """An adapter that was removed while a request had its version 1; returns the version."""
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)
    used = adapters.acquire(adapters.request("alice"))
    adapters.remove("alice")
    return used


def test_an_adapter_that_is_removed_ends_its_requests_first(engine, alice):
    adapters, calls = engine
    used = removed_in_use(adapters, alice)
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
    with pytest.raises(NotFound):
        adapters.acquire(used)


def test_a_name_that_a_newer_adapter_has_stays_when_an_old_version_goes(engine, alice):
    adapters, calls = engine
    used = removed_in_use(adapters, alice)
    newer = Request("alice@1", 5, "elsewhere")
    calls.names["alice@1"] = newer
    adapters.release(used)
    adapters.poll()
    assert not calls.held and calls.names == {"alice@1": newer}


def test_what_a_client_found_by_name_stays_until_it_was_answered(engine, alice):
    from refitd.integrations.vllm import adapters as module

    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)
    names = module._Names(calls.names, adapters)

    async def answer(scope, receive, send):
        request = names["alice"]
        for version in (2, 3, 4):
            alice.refit(version)
            adapters.wait("alice", version)
        for _ in range(2):  # as a search by beams, which generates once for each token
            adapters.release(adapters.acquire(request))
            adapters.poll()
        assert names["alice"].lora_name == "alice@4", "the table is behind, and gives a version that may go"
        assert calls.names["alice@1"] is request

    asyncio.run(module._Hold(answer, lambda: SimpleNamespace(adapters=adapters))({"type": "http"}, None, None))
    adapters.poll()
    assert set(calls.names) == {"alice", "alice@3", "alice@4"} and len(folders(adapters)) == 2
    assert names["alice"].lora_name == "alice@1" and len(folders(adapters)) == 2, "no request is being answered"


def test_a_tenant_whose_next_version_is_being_written_keeps_no_other_waiting(engine, alice):
    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    loop = adapters._tenants["alice"].loop
    loop.wait(1, 60)
    with loop._changed:
        loop._preparing = True
    stuck = threading.Thread(target=adapters.poll, daemon=True)
    stuck.start()
    stuck.join(30)
    assert not stuck.is_alive() and not calls.held and not adapters.status()["alice"]["reason"]
    with loop._changed:
        loop._preparing = False
    assert adapters.wait("alice", 1) == 1


def test_a_version_that_could_not_be_written_is_tried_again(engine, alice, monkeypatch):
    from refitd.integrations.vllm import adapters as module

    adapters, _ = engine
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    adapters.add("alice", group="alice", **WANTED)
    save = sys.modules["safetensors.torch"].save_file
    sys.modules["safetensors.torch"].save_file = mock.Mock(side_effect=OSError(28, "No space left on device"))
    alice.refit(1)
    with pytest.raises(FailedPrecondition, match="No space left"):
        adapters.wait("alice", 1)
    assert adapters.status()["alice"]["version"] is None and not folders(adapters)
    sys.modules["safetensors.torch"].save_file = save
    adapters.poll()
    assert adapters.status()["alice"] == {"version": 1, "kept": [], "requests": 0, "reason": ""}


def test_a_version_that_vllm_does_not_give_up_leaves_no_files_of_others(engine, alice):
    adapters, calls = engine
    adapters.add("alice", group="alice", **WANTED)
    for version in (1, 2):
        alice.refit(version)
        adapters.wait("alice", version)
    remove, calls.remove = calls.remove, mock.Mock(side_effect=DeadlineExceeded("no answer"))
    adapters.remove("alice")
    assert calls.remove.call_count == 2 and not folders(adapters)
    calls.remove = remove


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


def test_a_name_that_the_server_has_for_something_else_is_refused(engine):
    adapters, calls = engine
    calls.others = ("base",)
    with pytest.raises(InvalidArgument, match="'base' is the served model's") as caught:
        adapters.add("base", group="base", **WANTED)
    assert caught.value.culprit == "name" and not adapters.status() and not adapters._coming


def test_names_of_the_server_are_those_of_its_models_and_of_what_it_loaded(engine):
    from refitd.integrations.vllm import adapters as module

    async def run():
        mine, static = Request("alice@1", module.FIRST_ID, "m"), Request("static", 1, "s")
        models = SimpleNamespace(lora_requests={"static": static, "bob@1": static}, base_model_paths=[SimpleNamespace(name="base")])
        calls = module.ServerCalls(None, models, asyncio.get_running_loop())
        calls.name({"alice": mine, "alice@1": mine}, {"static": mine})
        assert "alice" not in models.lora_requests, "the loop may be going through it"
        found = [name for name in ("base", "static", "bob", "alice", "carol") if await asyncio.to_thread(calls.served, name)]
        assert found == ["base", "static", "bob"] and models.lora_requests["static"] is static
        calls.name({}, {"alice": mine})
        await asyncio.sleep(0)
        assert set(models.lora_requests) == {"static", "bob@1", "alice@1"}

    asyncio.run(run())


def test_a_call_that_vllm_does_not_answer_ends(engine, monkeypatch):
    from refitd.integrations.vllm import adapters as module

    monkeypatch.setattr(module, "CALL_SECONDS", 0.01)

    async def run():
        engine = SimpleNamespace(add_lora=lambda request: asyncio.sleep(600))
        calls = module.ServerCalls(engine, None, asyncio.get_running_loop())
        with pytest.raises(DeadlineExceeded):
            await asyncio.to_thread(calls.add, None)

    asyncio.run(run())


def test_a_request_ends_also_where_the_engine_fails_to_end_it(engine, alice):
    from refitd.integrations.vllm import adapters as module

    adapters, _ = engine
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    adapters.wait("alice", 1)

    async def generate(prompt, lora_request=None):
        try:
            yield lora_request
        finally:
            raise RuntimeError("not ended")

    async def run():
        vllm, server = SimpleNamespace(generate=generate), object.__new__(module.Server)
        server.adapters = adapters
        server._count(vllm, "generate")
        outputs = vllm.generate("a", lora_request=adapters.request("alice"))
        assert (await anext(outputs)).lora_name == "alice@1" and adapters.status()["alice"]["requests"] == 1
        with pytest.raises(RuntimeError, match="not ended"):
            await outputs.aclose()

    asyncio.run(run())
    assert adapters.status()["alice"]["requests"] == 0


@pytest.mark.parametrize(
    "wanted, culprit",
    [
        ({"like": "/"}, "like"),
        ({"target_modules": "(a+)+$"}, "target_modules"),
        ({"target_modules": ["q_proj", 1]}, "target_modules"),
        ({"adapters": {"a": {"target_modules": ["q_proj"]}, "b": {"target_modules": "["}}}, "target_modules"),
        ({"adapters": [1]}, "adapters"),
        ({"adapters": {"a": 1}}, "adapters"),
    ],
)
def test_what_a_client_may_not_ask_for_is_refused_by_name(wanted, culprit):
    from refitd.integrations.vllm import adapters as module

    with pytest.raises(InvalidArgument) as caught:
        module._check_client(wanted)
    assert caught.value.culprit == culprit
    module._check_client({"name": "a", "target_modules": ["q_proj"]})
    module._check_client({"adapters": {"a": {"target_modules": ["q_proj"]}}})


def test_an_engine_that_sleeps_is_refused_by_name(engine):
    from refitd.integrations.vllm import adapters as module

    config = SimpleNamespace(lora_config=SimpleNamespace(max_lora_rank=4), model_config=SimpleNamespace(model="base", enable_sleep_mode=True))
    with pytest.raises(FailedPrecondition, match="--enable-sleep-mode") as caught:
        module.Adapters(Calls(), config, instance="e")
    assert caught.value.culprit == "enable_sleep_mode"


def test_scalings_that_vllm_would_drop_are_refused_by_name(engine, alice):
    adapters, _ = engine
    sys.modules["vllm.lora.peft_helper"].PEFTHelper = make_dataclass("PEFTHelper", ["r", "lora_alpha"])
    adapters.add("alice", group="alice", **WANTED)
    alice.refit(1)
    assert adapters.wait("alice", 1) == 1
    matrices = adapters._tenants["alice"].matrices
    next(reversed(matrices.scalings.values())).fill_(3.0)
    with pytest.raises(FailedPrecondition, match="drops 'alpha_pattern'") as caught:
        adapters._write("alice@2", matrices)
    assert caught.value.culprit == "alpha_pattern"


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


def test_a_folder_that_was_removed_before_it_was_locked_is_made_anew(engine, monkeypatch):
    from refitd.integrations.vllm import adapters as module

    lock, made = fcntl.flock, []

    def late(descriptor, how):
        if not made:
            made.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).parent)
            shutil.rmtree(made[0])
        lock(descriptor, how)

    monkeypatch.setattr(module.fcntl, "flock", late)
    folder, held = module._make_folder()
    assert folder not in made and (folder / "lock").exists()
    os.close(held)


def test_what_others_put_in_the_place_of_a_folder_is_left(engine, tmp_path):
    from refitd.integrations.vllm import adapters as module

    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "lock").touch()
    (tmp_path / f"{module._NAME}link").symlink_to(theirs)
    waits, linked = (tmp_path / f"{module._NAME}{name}" for name in ("waits", "linked"))
    for folder in (waits, linked):
        folder.mkdir()
    os.mkfifo(waits / "lock")
    (linked / "lock").symlink_to(theirs / "lock")
    remover = threading.Thread(target=module._remove_left_over, daemon=True)
    remover.start()
    remover.join(30)
    assert not remover.is_alive() and theirs.exists() and linked.exists()
    with mock.patch.object(os, "getuid", return_value=os.getuid() + 1):
        (left := tmp_path / f"{module._NAME}left").mkdir()
        (left / "lock").touch()
        module._remove_left_over()
    assert left.exists()
