"""TRL's contract for `weight_transfer`, by its own protocols where TRL is here (environment 2.11.0-trainers), else by FACTS."""

import importlib
import importlib.util
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from held_engine import Held, check, tensors_of  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.integrations.trl import WeightTransfer  # noqa: E402

# WeightTransferProtocol of both of trl 1.16.0's modules.
FACTS = {"init_weight_transfer": [], "pause": [], "send_weights": ["iterator"], "resume": [], "destroy": []}
MODULES = ("async_grpo.async_grpo_trainer", "async_distillation.async_distillation_trainer")


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running:
        yield running


def test_it_has_the_methods_that_trl_calls():
    for name, parameters in FACTS.items():
        assert list(inspect.signature(getattr(WeightTransfer, name)).parameters) == ["self", *parameters], name


@pytest.mark.parametrize("module", MODULES)
def test_the_facts_are_those_of_trl(module):
    pytest.importorskip("trl", reason="in the environment 2.11.0-trainers")
    try:
        protocol = importlib.import_module(f"trl.experimental.{module}").WeightTransferProtocol
    except ImportError as error:
        pytest.skip(f"this trainer of TRL imports what is not here: {error}")
    found = {name: list(inspect.signature(method).parameters)[1:] for name, method in vars(protocol).items() if name in FACTS}
    assert found == FACTS


def test_each_sync_is_the_groups_next_version_and_a_failed_one_takes_the_stream_to_its_end(daemon):
    held = Held(daemon, "trl")
    transfer = WeightTransfer("trl", socket=daemon.socket, device="host", update_seconds=60.0)
    try:
        with pytest.raises(refitd.FailedPrecondition, match="init_weight_transfer"):
            transfer.send_weights(iter(()))
        transfer.init_weight_transfer()
        taken = []

        def stream(seed, spoiled=False):
            for name, tensor in tensors_of(seed).items():
                taken.append(name)
                yield name, tensor[:1] if spoiled and name == "b.weight" else tensor

        for seed in (1, 2):
            transfer.pause()
            transfer.send_weights(stream(seed))
            transfer.resume()
            assert transfer.result.version == seed and transfer.result.committed == 1
        taken.clear()
        with pytest.raises(refitd.Error, match="b.weight"):
            transfer.send_weights(stream(3, spoiled=True))
        assert taken == list(tensors_of(3))
        transfer.send_weights(stream(4))
        version = transfer.result.version
    finally:
        transfer.destroy()
        held.close()
    check(held, 2, 2)
    check(held, version, 4)
    assert "update to version 1: TRL's sync 1 of this run" in daemon.read_log()


@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_frameworks_with_transports_of_their_own_do_not_call_vllms_registry(framework):
    """Where one begins to, refitd's engine for vLLM's trainer interface may serve it without a plug of its own."""
    found = importlib.util.find_spec(framework)
    if found is None:
        pytest.skip("in the environments 2.11.0-trainers and 2.11.0-rl")
    folder = found.submodule_search_locations[0]
    files = [file for file in sources_in(folder) if "WeightTransferTrainerFactory" in file.read_text(errors="replace")]
    assert not files, files


def sources_in(folder):
    files = sorted(Path(folder).rglob("*.py"))
    assert len(files) > 50, "these are not the framework's sources"
    return files
