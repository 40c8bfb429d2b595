"""A failure in an update of slime's or miles' ends the update on every rank in bounded time, and the next update works.

The frameworks' two modules stand here as in test_slime.py; Megatron Core (environment 2.11.0-trainers), the daemon and the engines are
real.
"""

import multiprocessing
import os
import re
import signal
import threading
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core", reason="in the environment 2.11.0-trainers")
pytest.importorskip("transformers", reason="in the environment 2.11.0-trainers")

import refitd  # noqa: E402
from ranks_util import run_ranks  # noqa: E402
from refitd import testing  # noqa: E402
from test_megatron_core import by_checkpoint_names, config_of, megatron_model, on_cpu, transformers  # noqa: E402
from test_slime import UPDATERS, FACTS, arguments, stand_in  # noqa: E402

SECONDS = 110
# How long a rank waits for a rank that does not come; the others of the test are there at once.
MISSING_SECONDS = 10.0
GROUP = "failures"
SLOT_BYTES = 64 << 10
# So many rows that each rank's part of the embedding, the first tensor, is larger than a slot.
MANY_ROWS = 8192
EMBEDDING = "model.embed_tokens.weight"

pytestmark = pytest.mark.filterwarnings("ignore::refitd.StagingWarning")


def fill(model, step, rank):
    """Other values with each step, and equal on both ranks where Megatron replicates the parameter."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        replicated = "layernorm" in name
        torch.manual_seed(1000 * step + 10 * number + (0 if replicated else rank))
        parameter.copy_(torch.randn_like(parameter, dtype=torch.float32))


def connect(updater):
    updater.connect_rollout_engines(["engine"], None, engine_gpu_counts=[1], engine_gpu_offsets=[0])


def attempt(updater):
    """The text of what an update raised, and None where it did not."""
    try:
        updater.update_weights()
    except refitd.Error as error:
        return f"{type(error).__name__}: {error}"
    return None


def other_rank(rank):
    """Rank 1 takes itself for rank 0 of the tensor-parallel ranks."""
    at = "megatron.core.parallel_state.get_{}_parallel_rank"
    return [mock.patch(at.format(kind), lambda: 0) for kind in ("tensor_model", "expert_tensor")] if rank == 1 else []


def no_parameter(rank):
    """Rank 1 finds no parameter in its model."""
    module = "{}.backends.megatron_utils.update_weight.common.named_params_and_buffers"
    return [mock.patch(module.format(name), lambda args, model: iter(())) for name in FACTS] if rank == 1 else []


def no_parameter_anywhere(rank):
    return no_parameter(1)


def train(rank, world, socket, folder, framework, spoil, missing, vocabulary, options):
    """Two updates in the order of the framework's actor, the first of which goes wrong. Returns what each raised, and the embedding of
    the second. `spoil`: patches while the ranks connect at first. `missing`: the rank that does not come to the first update, after
    which there is none."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    for name in FACTS:
        stand_in(name)
    args = arguments(hf_checkpoint=folder)
    UPDATERS[framework].install(args, GROUP, socket=socket, device="host", **options)
    with on_cpu(), torch.no_grad():
        model = megatron_model(world, False, False, vocabulary=vocabulary).bfloat16()
        updater = stand_in_updater(framework)(args, [model], dict, model_name="qwen3", quantization_config=None)
        patches = spoil(rank) if spoil is not None else []
        for patch in patches:
            patch.start()
        connect(updater)
        for patch in patches:
            patch.stop()
        raised = []
        for step in (1, 2):
            fill(model, step, rank)
            raised.append(attempt(updater) if rank != missing else None)
            if missing is not None:
                break
            torch.distributed.barrier()
            if spoil is not None and step == 1:
                updater.disconnect_rollout_engines()
                torch.distributed.barrier()
                connect(updater)
        versions = updater.weight_version
        torch.distributed.barrier()
        updater.disconnect_rollout_engines()
    return raised, versions, model.embedding.word_embeddings.weight.detach().clone()


def stand_in_updater(framework):
    """The class that the framework's actor finds where it looks for its own."""
    import importlib

    return importlib.import_module(f"{framework}.backends.megatron_utils.actor").UpdateWeightFromDistributed


def model_of(folder, vocabulary):
    config = config_of(False, False, vocabulary)
    config.save_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)


class Engine:
    """A plain torch engine on a thread, which ends when it has the version that `until` names."""

    def __init__(self, folder, socket, vocabulary, until):
        self.model = model_of(folder, vocabulary)
        refitd.adopt(self.model)
        self.held = dict(by_checkpoint_names(self.model))
        self.before = self.held[EMBEDDING].clone()
        self._until = until
        self._socket = socket
        self.seen = None
        self.ended = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        options = dict(clean=False, socket=self._socket, connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.EngineLoop(self.model, group=GROUP, instance="a", names=self.held, **options) as loop:
            if self._until is None:
                self.ended.wait(SECONDS)
                self.seen = loop.version
            else:
                self.seen = loop.wait(self._until, SECONDS)

    def join(self):
        self.ended.set()
        self._thread.join()


def run(folder, socket, framework, *, spoil=None, missing=None, vocabulary=64, until=2, **options):
    """Runs `train` on two ranks beside an engine. Returns the ranks' results, and the engine as it was left."""
    engine = Engine(folder, socket, vocabulary, until)
    try:
        of_ranks = run_ranks(2, train, socket, str(folder), framework, spoil, missing, vocabulary, options)
    finally:
        engine.join()
    return of_ranks, engine


def check_second(of_ranks, engine):
    """The second update brought both ranks' rows to the engine."""
    assert [raised[1] for raised, _, _ in of_ranks] == [None, None]
    assert engine.seen == 2 and [version for _, version, _ in of_ranks] == [2, 2]
    assert torch.equal(engine.held[EMBEDDING], torch.cat([rows for _, _, rows in of_ranks]))


@pytest.mark.parametrize("framework", FACTS)
def test_a_trainer_rank_that_is_missing_is_named_and_nothing_was_sent(tmp_path, framework):
    with testing.daemon() as daemon:
        of_ranks, engine = run(tmp_path, daemon.socket, framework, missing=1, until=None, update_seconds=MISSING_SECONDS)
    (raised, version, _), _ = of_ranks
    assert raised[0].startswith(f"DeadlineExceeded: trainer rank 1 did not begin the sync within {MISSING_SECONDS} s"), raised
    assert version == 0 and engine.seen is None
    assert torch.equal(engine.held[EMBEDDING], engine.before)


@pytest.mark.parametrize("framework", FACTS)
def test_a_rank_with_the_metadata_of_another_fails_on_every_rank_and_the_next_update_works(tmp_path, framework):
    with testing.daemon() as daemon:
        of_ranks, engine = run(tmp_path, daemon.socket, framework, spoil=other_rank)
    for raised, _, _ in of_ranks:
        assert raised[0] is not None and re.search(r"tensor '?\S*\.weight", raised[0]), raised
    check_second(of_ranks, engine)


@pytest.mark.parametrize("framework", FACTS)
@pytest.mark.parametrize("spoil", [no_parameter, no_parameter_anywhere])
def test_a_rank_without_a_parameter_fails_on_every_rank_and_the_next_update_works(tmp_path, framework, spoil):
    with testing.daemon() as daemon:
        of_ranks, engine = run(tmp_path, daemon.socket, framework, spoil=spoil)
    assert all(raised[0] is not None for raised, _, _ in of_ranks), of_ranks
    check_second(of_ranks, engine)


@pytest.mark.parametrize("framework", FACTS)
def test_a_first_tensor_larger_than_a_slot_arrives(tmp_path, framework):
    with testing.daemon() as daemon:
        of_ranks, engine = run(tmp_path, daemon.socket, framework, vocabulary=MANY_ROWS, spec=refitd.GroupSpec(slot_bytes=SLOT_BYTES))
    assert all(rows.nbytes > SLOT_BYTES and raised == [None, None] for raised, _, rows in of_ranks)
    check_second(of_ranks, engine)


def die_at_prepare(folder, socket):
    """An engine whose process is killed when an update has begun."""
    model = model_of(folder, 64)
    refitd.adopt(model)
    with refitd.Engine(GROUP, instance="doomed", socket=socket, device="host", connect=refitd.Connect(wait_seconds=SECONDS)) as engine:
        engine.register(dict(by_checkpoint_names(model)))
        for event in engine:
            if isinstance(event, refitd.Prepare):
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("framework", FACTS)
def test_an_engine_that_dies_in_an_update_ends_it_on_every_rank_and_another_takes_the_next(tmp_path, framework):
    model_of(tmp_path, 64)
    found = []

    def replace(doomed, socket):
        doomed.join(SECONDS)
        found.append(Engine(tmp_path, socket, 64, 2))

    with testing.daemon() as daemon:
        doomed = multiprocessing.get_context("spawn").Process(target=die_at_prepare, args=(str(tmp_path), daemon.socket))
        doomed.start()
        replacing = threading.Thread(target=replace, args=(doomed, daemon.socket))
        replacing.start()
        try:
            of_ranks = run_ranks(2, train, daemon.socket, str(tmp_path), framework, None, None, 64, {})
        finally:
            doomed.kill()
            replacing.join()
            found[0].join()
    assert doomed.exitcode == -signal.SIGKILL
    for raised, _, _ in of_ranks:
        assert raised[0] is not None and re.search("instance|engine|doomed", raised[0]), raised
    check_second(of_ranks, found[0])
