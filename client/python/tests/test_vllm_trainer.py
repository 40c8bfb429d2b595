"""refitd's trainer engine for vLLM, driven as vLLM's registry does: two ranks over gloo, and an engine of plain torch.

Where vLLM can't be imported, its classes stand here by what its sources say (FACTS); with vLLM on PYTHONPATH its own are used. Sources are made in the
form of 0.33, which tells owners and pieces, and in that of 0.32.
"""

import importlib
import importlib.util
import inspect
import sys
import types
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

import refitd  # noqa: E402
from held_engine import INSTANCE, Held, check, tensors_of  # noqa: E402
from ranks_util import Ranks  # noqa: E402
from refitd import testing  # noqa: E402
from refitd.layout import place_in_mesh  # noqa: E402

MODULE = "vllm.distributed.weight_transfer"
REAL = importlib.util.find_spec("vllm") is not None
# The parameters of what the engine calls or is called by, in vllm/distributed/weight_transfer of 0.32.0 and 0.33.0.
FACTS = {
    "TrainerInitInfo": ["rank"],
    "TrainerWeightTransferEngine": ["client", "source", "is_sender"],
    "TrainerWeightTransferEngine.trainer_init": ["init_info", "client", "source"],
    "TrainerWeightTransferEngine.send_weights": ["self"],
    "VLLMWeightSyncClient.init_weight_transfer_engine": ["self", "init_info"],
    "VLLMWeightSyncClient.start_weight_update": ["self"],
    "VLLMWeightSyncClient.update_weights": ["self", "update_info"],
    "VLLMWeightSyncClient.finish_weight_update": ["self", "weight_version"],
}
SINCE_033 = {"rank"}  # what TrainerWeightTransferEngine takes besides


@dataclass
class _TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self):
        return self.rank == 0


class _TrainerEngine:
    def __init__(self, *, client, source=None, is_sender=True):
        self.client, self.source, self.is_sender = client, source, is_sender


class _ModuleSource:
    def __init__(self, module):
        self._module = module


class _Factory:
    _registry = {}

    @classmethod
    def register_engine(cls, name, kind):
        assert name not in cls._registry
        cls._registry[name] = lambda: kind

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        return cls._registry[init_info.backend]().trainer_init(init_info=init_info, client=client, source=source)


if not REAL:
    for name in ("vllm", "vllm.distributed", MODULE, f"{MODULE}.base", f"{MODULE}.factory"):
        sys.modules.setdefault(name, types.ModuleType(name))
    given = dict(TrainerInitInfo=_TrainerInitInfo, TrainerWeightTransferEngine=_TrainerEngine, ModuleSource=_ModuleSource)
    vars(sys.modules[f"{MODULE}.base"]).update(given)
    sys.modules[f"{MODULE}.factory"].WeightTransferTrainerFactory = _Factory

RANKS = Ranks(2, gpus=False)


@dataclass(frozen=True)
class Cut:
    """A placement of 0.33, which has `dim` where it cuts."""

    dim: int


class Meta(types.SimpleNamespace):
    """ParamMeta of 0.33."""

    def __init__(self, name, dtype, shape, owners=None, mesh_shape=None, placements=None):
        mesh_shape = mesh_shape or (None if owners is None else (len(owners),))
        super().__init__(name=name, dtype=dtype, shape=shape, owners=owners, mesh_shape=mesh_shape, placements=placements)


class Pieces:
    """A source of 0.33: rows of a, columns of b, c on both ranks, and d on rank 1 alone. Its pieces are new tensors at each pass."""

    def __init__(self, rank, pieces=True):
        self.rank, self.pieces, self.spoil = rank, pieces, None
        self.held = tensors_of(0)
        both = (0, 1)
        self.metadata = [
            Meta("a.weight", torch.float32, (7, 4), both, None, (Cut(0),)),
            Meta("b.weight", torch.float32, (4, 6), both, (1, 2), (types.SimpleNamespace(), Cut(1))),
            Meta("c.bias", torch.float32, (5,)),
            Meta("d.weight", torch.float32, (3, 2), (1,)),
        ]

    def implements_iter_local(self):
        return self.pieces

    def _owned(self):
        for meta in self.metadata:
            if meta.owners is None or self.rank in meta.owners:
                tensor = self.held[meta.name]
                yield meta, tensor.double() if self.spoil == meta.name else tensor

    def iter_full(self):
        yield from ((meta.name, tensor) for meta, tensor in self._owned())

    def iter_local(self):
        for meta, tensor in self._owned():
            for placement in meta.placements or ():
                if hasattr(placement, "dim"):
                    tensor = tensor.chunk(2, placement.dim)[self.rank]
            yield meta.name, tensor.clone()


class Whole:
    """A source of 0.32: every rank has all."""

    def __init__(self, rank):
        self.rank, self.spoil, self.held = rank, None, tensors_of(0)

    def metadata(self):
        return [types.SimpleNamespace(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape)) for name, tensor in self.held.items()]

    def held_names(self):
        return None

    def __iter__(self):
        yield from ((name, tensor.double() if name == self.spoil else tensor) for name, tensor in self.held.items())


class Client:
    """A client of vLLM's, whose calls are noted. `fails`: the call that raises, once."""

    def __init__(self):
        self.calls, self.fails = [], None

    def _call(self, *what):
        self.calls.append(what)
        if self.fails == what[0]:
            self.fails = None
            raise RuntimeError(f"{what[0]} was refused")

    def init_weight_transfer_engine(self, init_info):
        self._call("init", init_info)

    def start_weight_update(self):
        self._call("start")

    def update_weights(self, update_info):
        self._call("update", update_info["version"])

    def finish_weight_update(self, weight_version=None):
        self._call("finish", weight_version)


SOURCES = {"pieces": Pieces, "full": lambda rank: Pieces(rank, pieces=False), "whole": Whole}


def train(rank, world, socket, group, source, steps, options):
    """Sends what each of `steps` says, and returns for each what came of it, and the client's calls. A step: version, wanted version, what fails."""
    import refitd.integrations.vllm.trainer as plug

    factory = sys.modules[f"{MODULE}.factory"].WeightTransferTrainerFactory
    settings = {"socket": socket, "device": "host", "update_seconds": 60.0}
    made, client = SOURCES[source](rank), Client()
    info = plug.RefitdTrainerInitInfo(group, engine={"instance": INSTANCE}, settings=settings, rank=rank, **options)
    try:
        engine = factory.trainer_init(info, client=client, source=made)
    except refitd.Error as error:
        return f"{type(error).__name__}: {error}", client.calls
    outcomes = []
    for seed, wanted, spoil in steps:
        made.held = tensors_of(seed)
        made.spoil = spoil.get("tensor") if spoil and rank == spoil.get("rank", 1) else None
        client.fails = spoil.get("call") if spoil else None
        if spoil and spoil.get("absent") == rank:
            outcomes.append(None)
            break
        try:
            outcomes.append(engine.send_weights(wanted, note=spoil.get("note") if spoil else None).version)
        except refitd.Error as error:
            outcomes.append(f"{type(error).__name__}: {error}")
    engine.shutdown()
    return outcomes, client.calls


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running, RANKS:
        yield running


def run(daemon, group, source, steps, **options):
    held = Held(daemon, group)
    try:
        answers = RANKS.run(train, daemon.socket, group, source, steps, options)
    finally:
        held.close()
    return held, answers


@pytest.mark.skipif(not REAL, reason="vLLM is not here")
def test_what_the_engine_uses_of_vllm_is_as_the_facts_say():
    base = importlib.import_module(f"{MODULE}.base")
    for what, expected in FACTS.items():
        target = base
        for part in what.split("."):
            target = getattr(target, part)
        found = [name for name in inspect.signature(target).parameters if name not in SINCE_033 or what != "TrainerWeightTransferEngine"]
        assert found == expected, what
    assert hasattr(base.ModuleSource(torch.nn.Module()), "_module"), "what ModuleSource holds has another name: see _pieces()"
    factory = importlib.import_module(f"{MODULE}.factory").WeightTransferTrainerFactory
    importlib.import_module("refitd.integrations.vllm.trainer")
    assert "refitd" in factory._registry


def test_the_signatures_of_the_engine_are_those_that_vllm_calls():
    plug = importlib.import_module("refitd.integrations.vllm.trainer")
    assert list(inspect.signature(plug.RefitdTrainerEngine.trainer_init).parameters) == FACTS["TrainerWeightTransferEngine.trainer_init"]
    inspect.signature(plug.RefitdTrainerEngine.send_weights).bind(None)
    assert plug.RefitdTrainerInitInfo("g", rank=1).is_sender is False


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("source", SOURCES)
def test_versions_arrive_and_the_engines_are_called_beside_them(daemon, source):
    """A version that is behind the group's becomes the next."""
    steps = [(1, None, None), (2, 10, None), (3, 7, {"note": "step 7"})]
    held, answers = run(daemon, f"good-{source}", source, steps)
    assert [outcomes for outcomes, _ in answers] == [[1, 10, 11]] * 2
    for version, seed in ((1, 1), (10, 2), (11, 3)):
        check(held, version, seed)
    calls = [call for version in (1, 10, 11) for call in (("start",), ("update", version), ("finish", str(version)))]
    assert answers[0][1] == [("init", {"group": f"good-{source}", "instance": INSTANCE}), *calls] and answers[1][1] == []
    log = daemon.read_log()
    assert "update to version 1: vllm's sync 1 of this run" in log and "update to version 11: step 7" in log


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
@pytest.mark.parametrize("source", ["pieces", "whole"])
def test_failures_are_raised_on_every_rank_and_the_next_sync_works(daemon, source):
    steps = [(1, None, None), (2, None, {"tensor": "c.bias"}), (3, None, {"call": "update"}), (4, None, {"call": "finish"}), (5, None, None)]
    held, answers = run(daemon, f"bad-{source}", source, steps)
    (first, calls), (second, _) = answers
    assert "trainer rank 1: the source yielded 'c.bias', torch.float64 (5,), and declares 'c.bias'" in first[1] and "c.bias" in second[1]
    for outcome in (first[2], second[2]):  # the engine of this test takes the version by itself
        assert "an engine" in outcome and "update was refused" in outcome, outcome
    assert first[3].startswith("FailedPrecondition") and "can't use it: finish was refused" in first[3] and "finish was refused" in second[3]
    assert first[4] == second[4] and isinstance(first[4], int)
    check(held, first[4], 5)
    assert [call[0] for call in calls].count("init") >= 3  # engines are attached anew after each sync that failed


@pytest.mark.filterwarnings("ignore::refitd.StagingWarning")
def test_a_rank_that_does_not_come_is_named(daemon):
    settings = [(1, None, None), (2, None, {"absent": 1})]
    _, ((first, _), (second, _)) = run(daemon, "absent", "whole", settings)
    assert second == [1, None] and first[0] == 1
    assert first[1].startswith("DeadlineExceeded") and "trainer rank 1" in first[1]


def test_an_update_whose_engine_refuses_its_call_is_given_up(daemon):
    """The ranks would wait for the engine as long as the update may take."""
    (first, _), (second, _) = RANKS.run(train, daemon.socket, "refused", "whole", [(1, None, {"call": "update"})], {})
    for (outcome,) in (first, second):
        assert outcome.startswith("UpdateAborted") and "an engine did not take version 1: update was refused" in outcome, outcome


def test_options_that_are_wrong_are_refused(daemon):
    for error, calls in RANKS.run(train, daemon.socket, "wrong", "whole", [], {"sharded": True}):
        assert error.startswith("Unimplemented") and "sharded" in error and calls == []
    assert "wrong" not in daemon.control("--output", "json", "status")


def test_pieces_of_a_mesh_are_cut_as_chunks_are():
    tensor = torch.arange(7 * 6).reshape(7, 6)
    for mesh, dims in (((2, 3), (0, 0)), ((2, 3), (0, 1)), ((2, 3), (None, 1)), ((3, 2), (1, None)), ((4,), (0,)), ((2, 2), (1, 1))):
        ranks = torch.arange(int(torch.tensor(mesh).prod())).reshape(mesh)
        for coordinate in (tuple(map(int, c)) for c in torch.cartesian_prod(*map(torch.arange, mesh)).reshape(-1, len(mesh))):
            piece = tensor
            for size, index, dim in zip(mesh, coordinate, dims):
                if dim is not None:
                    chunks = piece.chunk(size, dim)
                    piece = chunks[index] if index < len(chunks) else piece.narrow(dim, 0, 0)
            placed = place_in_mesh(tensor.shape, mesh, coordinate, dims)
            assert placed.local_shape == tuple(piece.shape), (mesh, dims, coordinate)
            for part in placed.parts:
                box = tensor[tuple(slice(o, o + n) for o, n in zip(part.offset, part.extent))]
                assert torch.equal(box, piece), (mesh, dims, coordinate)
            from refitd.integrations.vllm.trainer import _coordinate

            assert _coordinate(int(ranks[coordinate]), mesh) == coordinate
