"""What adapters use of their frameworks' insides, which no interface promises. An adapter's module names each in its docstring, and where the framework
is installed each must be there."""

import importlib
import importlib.util
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "refitd/integrations"
SKYRL = "skyrl.backends.skyrl_train"
SGLANG = "sglang.srt"
# By adapter: the module, and what it has.
INTERNALS = {
    "skyrl": [
        (f"{SKYRL}.workers.worker_dispatch", "WorkerDispatch._broadcast_to_inference_engines"),
        (f"{SKYRL}.inference_servers.remote_inference_client", "RemoteInferenceClient.resume_generation"),
    ],
    "skyrl_strategy": [(f"{SKYRL}.weight_sync", "get_transfer_strategy_cls"), (f"{SKYRL}.weight_sync", "get_transfer_strategy")],
    "skyrl_engine": [
        (f"{SKYRL}.weight_sync", "get_transfer_strategy"),
        (f"{SKYRL}.weight_sync", "_VLLM_RECEIVE_BACKENDS"),
        (f"{SKYRL}.weight_sync.weight_senders", "_build_sender_init_info"),
        (f"{SKYRL}.weight_sync.weight_senders", "SkyrlTrainerCapabilities"),
    ],
    "verl": [
        ("verl.workers.rollout.base", "_ROLLOUT_REGISTRY"),
        ("verl.workers.rollout.vllm_rollout.vllm_rollout", "ServerAdapter._ensure_server_handle"),
        ("verl.workers.rollout.vllm_rollout.vllm_rollout", "ServerAdapter._execute_method"),
    ],
    "slime": [
        ("slime.backends.megatron_utils.actor", "UpdateWeightFromDistributed"),
        ("slime.backends.megatron_utils.update_weight.common", "named_params_and_buffers"),
    ],
    "transformers": [("transformers.core_model_loading", "revert_weight_conversion")],
    "megatron": [
        ("megatron.bridge.models.conversion.param_mapping", "AutoMapping._get_or_create_mapping"),
        ("megatron.bridge.models.conversion.param_mapping", "AutoMapping._detect_parallelism_type"),
    ],
    "sglang": [
        (f"{SGLANG}.managers.scheduler_components.weight_updater", "SchedulerWeightUpdaterManager.update_weights_from_tensor"),
        (f"{SGLANG}.model_loader.loader", "post_load_weights"),
        (f"{SGLANG}.model_loader.loader", "DummyModelLoader.load_model"),
        (f"{SGLANG}.entrypoints.http_server", "_setup_and_run_http_server"),
        (f"{SGLANG}.managers.tokenizer_manager", "TokenizerManager.release_memory_occupation"),
        (f"{SGLANG}.managers.tokenizer_manager", "TokenizerManager.resume_memory_occupation"),
    ],
}
EACH = [(adapter, *internal) for adapter, internals in INTERNALS.items() for internal in internals]


@pytest.mark.parametrize("adapter, module, name", EACH)
def test_the_adapters_docstring_names_what_it_uses(adapter, module, name):
    docstring = (FOLDER / f"{adapter}.py").read_text().split('"""')[1]
    assert name.rpartition(".")[2] in docstring


@pytest.mark.parametrize("adapter, module, name", EACH)
def test_what_an_adapter_uses_is_there(adapter, module, name):
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        pytest.skip(f"{module.partition('.')[0]} is not here")
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        if (error.name or "").partition(".")[0] == module.partition(".")[0]:
            if adapter in ("skyrl_strategy", "skyrl_engine"):
                pytest.skip(f"of another version of SkyRL: {error}")
            raise
        pytest.skip(f"{module} imports what is not here: {error}")
    for part in name.split("."):
        if adapter == "skyrl_strategy" and not hasattr(found, "get_transfer_strategy_cls"):
            pytest.skip("of SkyRL 0.3.0")
        if adapter == "skyrl_engine" and hasattr(found, "get_transfer_strategy_cls"):
            pytest.skip("of SkyRL 0.4.0")
        found = getattr(found, part)
