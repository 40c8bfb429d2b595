"""What refitd.integrations.skyrl_engine uses of SkyRL 0.4.0: by SkyRL's own modules where they and vLLM can be imported, else by FACTS, of which
stand-ins are made. tests/engines/test_vllm_trainer.py drives it by SkyRL's own worker into a real server."""

import importlib
import importlib.util
import inspect
import sys
import types

import pytest

torch = pytest.importorskip("torch")

import test_vllm_trainer  # noqa: E402,F401  its stand-ins for vLLM, where that is not here

import refitd  # noqa: E402

ROOT = "skyrl.backends.skyrl_train"
# skyrl 0.4.0: what is called or replaced, with its parameters, and the attributes that SkyRL's worker reads of an engine.
FACTS = {
    "get_transfer_strategy": ["weight_sync_backend", "colocate_all"],
    "get_vllm_receive_backend": ["weight_sync_backend", "colocate_all"],
    "_build_sender_init_info": ["backend", "ie_cfg", "rank", "inference_world_size", "dtype", "server_urls", "data_parallel_size", "base_model_path"],
}
ATTRIBUTES = {
    "skyrl_handles_prefix_cache_reset": False, "skyrl_force_disable_expandable_segments": False, "skyrl_empty_cache_after_send": True, "skyrl_draft_source": None,
}  # fmt: skip


def _is_real():
    """Whether SkyRL of 0.4.0 and vLLM are here."""
    found = importlib.util.find_spec("skyrl")
    if found is None or not test_vllm_trainer.REAL:
        return False
    return importlib.util.find_spec(f"{ROOT}.weight_sync.weight_senders") is not None


REAL = _is_real()


def stand_in():
    """SkyRL's modules, as FACTS says they are."""
    parts = ROOT.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    made = {name: types.ModuleType(name) for name in [*names, f"{ROOT}.weight_sync", f"{ROOT}.weight_sync.weight_senders"]}
    for module in made.values():
        module.__path__ = []
    sync, senders = made[f"{ROOT}.weight_sync"], made[f"{ROOT}.weight_sync.weight_senders"]
    sync._VLLM_RECEIVE_BACKENDS = {"nccl": "skyrl_nccl"}
    sync.get_transfer_strategy = lambda weight_sync_backend, colocate_all: "nccl"
    sync.get_vllm_receive_backend = lambda backend, colocate_all: sync._VLLM_RECEIVE_BACKENDS[sync.get_transfer_strategy(backend, colocate_all)]
    sync.weight_senders = senders
    made[ROOT].weight_sync = sync
    senders._build_sender_init_info = lambda *, backend, **options: (backend, options)
    senders.SkyrlTrainerCapabilities = type("SkyrlTrainerCapabilities", (), dict(ATTRIBUTES))
    return made


@pytest.fixture
def plug(monkeypatch):
    """refitd.integrations.skyrl_engine, hooked in."""
    skyrl = importlib.import_module("refitd.integrations.skyrl")
    monkeypatch.setattr(skyrl, "_settings", skyrl.Settings("policy", sharded=True, first_version=7, device="host"))
    if not REAL:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
        monkeypatch.setattr("refitd.integrations.vllm.register", lambda: None)
    monkeypatch.delitem(sys.modules, "refitd.integrations.skyrl_engine", raising=False)
    made = importlib.import_module("refitd.integrations.skyrl_engine")
    factory = sys.modules["vllm.distributed.weight_transfer.factory"].WeightTransferTrainerFactory
    factory._registry.pop("skyrl_refitd", None)
    made.hook()
    yield made
    sys.modules.pop("refitd.integrations.skyrl_engine", None)


@pytest.mark.skipif(not REAL, reason="SkyRL 0.4.0 is not here")
def test_the_facts_are_those_of_skyrl():
    sync = importlib.import_module(f"{ROOT}.weight_sync")
    senders = importlib.import_module(f"{ROOT}.weight_sync.weight_senders")
    for name, expected in FACTS.items():
        assert list(inspect.signature(getattr(senders if name.startswith("_") else sync, name)).parameters) == expected, name
    assert "nccl" in sync._VLLM_RECEIVE_BACKENDS
    assert {name: getattr(senders.SkyrlTrainerCapabilities, name) for name in ATTRIBUTES} == ATTRIBUTES
    dispatch = importlib.import_module(f"{ROOT}.workers.worker_dispatch").WorkerDispatch
    client = importlib.import_module(f"{ROOT}.inference_servers.remote_inference_client").RemoteInferenceClient
    assert callable(dispatch._broadcast_to_inference_engines) and callable(client.resume_generation)


def test_skyrls_choice_by_the_backends_name_finds_refitd(plug):
    sync, senders = (sys.modules[f"{ROOT}.weight_sync{rest}"] for rest in ("", ".weight_senders"))
    assert sync.get_transfer_strategy("refitd", True) == "refitd" and sync.get_vllm_receive_backend("refitd", True) == "refitd"
    assert sync.get_transfer_strategy("nccl", False) == "nccl" and sync.get_vllm_receive_backend("nccl", False) == "skyrl_nccl"
    given = dict.fromkeys(FACTS["_build_sender_init_info"])
    urls = ["http://a", "http://b"]
    given.update(backend="refitd", ie_cfg=types.SimpleNamespace(speculative_config=None), rank=1, server_urls=urls)
    info, payloads = senders._build_sender_init_info(**given)
    assert (info.group, info.sharded, info.first_version, info.servers, info.rank) == ("policy", True, 7, 2, 1)
    assert payloads({"group": "policy"}, urls, 1) == [{"group": "policy", "instance": "skyrl-0"}, {"group": "policy", "instance": "skyrl-1"}]
    assert {name: getattr(plug.Engine, name) for name in ATTRIBUTES} == ATTRIBUTES
    given["ie_cfg"] = types.SimpleNamespace(speculative_config={"method": "mtp"})
    with pytest.raises(refitd.Unimplemented, match="speculative_config"):
        senders._build_sender_init_info(**given)
