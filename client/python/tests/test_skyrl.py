"""SkyRL's own extractor, chunks, client and configuration drive the strategy, on two FSDP2 ranks over gloo, into two engines.

The engines answer the routes of vLLM that SkyRL calls, and are attached by what SkyRL's initialisation tells them. Each has a worker
with SkyRL's own extension, whose backend stands for refitd's: as that one, it takes a version only when the worker is told to. The
extractor asks for the current CUDA device, which is replaced by the CPU where a test has no GPUs. Tests with GPUs need two of them:
the ranks then gather over NCCL, and each engine is on the GPU of a rank. SkyRL imports flash_attn, which needs a GPU to build and is
not called here: an empty stand-in takes its name. The worker's extension asks vLLM, which is not here, for a context in which to load.
Nothing of SkyRL itself is replaced.
"""

import asyncio
import contextlib
import functools
import importlib.machinery
import importlib.util
import re
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("skyrl", reason="in the environment 2.11.0-rl")

import transformers  # noqa: E402
import transformers.utils  # noqa: E402

# The wheel of SkyRL has its environments in a folder beside the package.
sys.path.append(str(Path(importlib.util.find_spec("skyrl").origin).parents[1] / "skyrl-gym"))
for name in dir(transformers.utils):
    if name.startswith("is_flash_attn") and name.endswith("available"):
        getattr(transformers.utils, name)()  # transformers keeps the answer, which the stand-in would change
for name in ("flash_attn", "flash_attn.bert_padding"):
    sys.modules.setdefault(name, mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)))

from skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap import NewInferenceWorkerWrap  # noqa: E402

import refitd  # noqa: E402
import refitd.layout.cuda  # noqa: E402
from ranks_util import Ranks  # noqa: E402
from refitd import testing  # noqa: E402

SECONDS = 100
DTYPE = torch.bfloat16
USUAL_WIDTH = 7
SLOT_BYTES = 1 << 20
# With this one both weights are larger than a slot.
WIDE = 1 << 17
# SkyRL takes long to import, so that the ranks of all tests are the same processes.
RANKS = Ranks(2, gpus=False)
RANKS_WITH_GPUS = Ranks(2)


def model_of(version, width=USUAL_WIDTH):
    """`width`: of two linear layers; "dense" or "moe": a tiny Qwen3 model of transformers."""
    torch.manual_seed(version)
    if width in ("dense", "moe"):
        sizes = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
        if width == "dense":
            config = transformers.Qwen3Config(intermediate_size=24, tie_word_embeddings=False, **sizes)
        else:
            config = transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12, intermediate_size=24, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 6))


def held_by(version, width=USUAL_WIDTH):
    """The tensors that engines must hold."""
    return {name: parameter.to(DTYPE) for name, parameter in model_of(version, width).state_dict().items()}


class Worker(NewInferenceWorkerWrap):
    """A worker of vLLM's with SkyRL's extension. Its calls run one after the other, as vLLM's do."""

    vllm_config, device = None, "cpu"

    def __init__(self, backend):
        self.weight_transfer_engine = backend
        self.model_runner = mock.MagicMock()
        self.lock = threading.Lock()

    def call(self, method, kwargs):
        with self.lock:
            return getattr(self, method)(**kwargs)


class Server:
    """An engine behind HTTP, attached when SkyRL initialises weight transfer. It is its worker's backend as well."""

    def __init__(
        self,
        socket,
        refuses=(),
        dies=(),
        returns=False,
        float32=(),
        width=USUAL_WIDTH,
        deaf=(),
        unusable=(),
        left_open=False,
        halves=False,
        gpu=None,
    ):
        """`halves`: the engine has two tensor-parallel ranks, each with the first or the last rows of each tensor. `refuses`, `dies`: versions.
        `returns`: after it died a new engine attaches, which lacks weights. `deaf`: versions that its route refuses. `unusable`: versions
        that fail in the worker after they were committed. `left_open`: a sync before never ended. `gpu`: torch's number of the GPU that
        has its weights; None: host memory."""
        from aiohttp import web

        self.socket, self.refuses, self.dies, self.returns = socket, refuses, dies, returns
        self.deaf, self.unusable, self.halves, self.other = deaf, unusable, halves, None
        self.worker = Worker(self)
        if left_open:
            self.worker.skyrl_start_weight_update(is_checkpoint_format=False)
        shapes = {name: tuple(parameter.shape) for name, parameter in model_of(1, width).state_dict().items()}
        dtypes = {name: torch.float32 if name in float32 else DTYPE for name in shapes}
        if gpu is None:
            self.device = "host"
            self.held = {name: refitd.empty(shape, dtypes[name], like="torch") for name, shape in shapes.items()}
        else:
            self.device = refitd.layout.cuda.device_uuid(gpu)
            self.held = {name: torch.full(shape, torch.nan, dtype=dtypes[name], device=f"cuda:{gpu}") for name, shape in shapes.items()}
        self.events, self.by_version = [], {}
        self.engine = None
        self.loop = asyncio.new_event_loop()
        application = web.Application()
        application.router.add_get("/get_world_size", self.world_size)
        application.router.add_post("/init_weight_transfer_engine", self.begin)
        application.router.add_post("/collective_rpc", self.collective_rpc)
        self.runner = web.AppRunner(application)
        self.loop.run_until_complete(self.runner.setup())
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}"
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    # ---- routes ----

    async def world_size(self, _):
        from aiohttp import web

        return web.json_response({"world_size": 1})

    async def begin(self, request):
        from aiohttp import web

        self.told = (await request.json())["init_info"]
        await asyncio.to_thread(self.attach)
        return web.json_response({})

    async def collective_rpc(self, request):
        from aiohttp import web

        asked = await request.json()
        try:
            await asyncio.to_thread(self.worker.call, asked["method"], asked.get("kwargs", {}))
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        return web.json_response({"results": [None]})

    # ---- what the backend of refitd does ----

    def attach(self, **options):
        if self.halves:
            self.other = self.half(1)
            threading.Thread(target=lambda: [event.ready() for event in self.other if isinstance(event, refitd.Prepare)]).start()
            self.engine = self.half(0)
            return
        self.engine = refitd.Engine(socket=self.socket, device=self.device, connect=refitd.Connect(wait_seconds=SECONDS), **self.told, **options)
        self.engine.register(self.held)

    def half(self, rank):
        engine = refitd.Engine(rank=rank, world_size=2, socket=self.socket, device=self.device, connect=refitd.Connect(wait_seconds=SECONDS), **self.told)
        shards = []
        for name, tensor in self.held.items():
            middle = (len(tensor) + 1) // 2
            part, begin = (tensor[:middle], 0) if rank == 0 else (tensor[middle:], middle)
            shards.append(refitd.Shard(name, tensor.shape, part, (begin, *[0] * (tensor.dim() - 1))))
        engine.register(shards)
        return engine

    def parse_update_info(self, update_info):
        return update_info

    def receive_weights(self, update_info, load_weights):
        if update_info["version"] in self.deaf:
            raise RuntimeError("this rank is not attached")
        for event in self.engine:
            self.events.append(event)
            if isinstance(event, refitd.Prepare) and event.version in self.dies:
                event.ready()
                self.engine.close()  # its process ended, as the daemon sees it
                if self.returns:
                    self.attach(dirty=True)
                raise RuntimeError("the worker died")
            elif isinstance(event, refitd.Prepare):
                event.fail("busy") if event.version in self.refuses else event.ready()
            elif isinstance(event, refitd.Committed):
                self.by_version[event.version] = {name: tensor.clone() for name, tensor in self.held.items()}
                if event.version in self.unusable:
                    raise RuntimeError("no memory to process '0.weight'")
                return
            elif isinstance(event, refitd.Aborted) and event.version == update_info["version"]:
                raise RuntimeError(f"version {event.version}: {event.reason}")

    def close(self):
        for engine in (self.engine, self.other):
            if engine is not None:
                engine.close()
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(SECONDS)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch):
    from skyrl.backends.skyrl_train.inference_servers import layerwise_reload

    config = mock.MagicMock(set_current_vllm_config=lambda _: contextlib.nullcontext())
    monkeypatch.setitem(sys.modules, "vllm", mock.MagicMock(config=config))
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setattr(layerwise_reload, "_PATCHED_LAYERWISE_NUMEL_LOADED", True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)


class ExporterFailed(Exception):
    pass


def mesh_of(world, gpu):
    """All ranks, over gloo; over NCCL where each has a GPU, whose number is `gpu`."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    if gpu is None:
        return init_device_mesh("cpu", (world,))
    torch.cuda.set_device(gpu)
    return DeviceMesh.from_group(torch.distributed.new_group(backend="nccl"), "cuda")


def sync(rank, world, socket, urls, group, sharded, versions, spoil, chunks_of, width, absent, gpus, options):
    """Does what a worker of SkyRL does at initialisation and at each sync. Returns the exceptions' texts by version. `spoil`: changes the
    first sync's metadata. `chunks_of`: makes other chunks of those of each sync. `absent`: a rank that does not come to the first sync.
    `gpus`: torch's number of each rank's GPU; None: the ranks have none. `options`: of install."""
    from skyrl.backends.skyrl_train import weight_sync
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor
    from skyrl.train.config.config import InferenceEngineConfig
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    import refitd.integrations.skyrl

    gpu = None if gpus is None else gpus[rank]
    mesh = mesh_of(world, gpu)
    refitd.integrations.skyrl.install(group, sharded=sharded, socket=socket, device="host" if gpu is None else refitd.layout.cuda.device_uuid(gpu), **options)
    client = RemoteInferenceClient(proxy_url=urls[0], server_urls=urls, data_parallel_size=1)
    config = InferenceEngineConfig(num_engines=len(urls), weight_sync_backend="refitd")
    model = fully_shard(model_of(1, width).to(mesh.device_type), mesh=mesh)
    extractor = FSDPWeightExtractor(model)
    errors = {}

    async def run():
        strategy = weight_sync.get_transfer_strategy_cls(weight_sync_backend=config.weight_sync_backend, colocate_all=False)
        assert weight_sync.get_transfer_strategy("nccl", False) == "nccl", "the other backends are SkyRL's"
        assert weight_sync.get_transfer_strategy_cls("refitd", colocate_all=True) is strategy
        assert weight_sync.get_transfer_strategy("nccl", True) == "ipc"
        inference_world_size, _ = await client.get_world_size()
        init_info = strategy.create_init_info(config, inference_world_size=inference_world_size)
        tasks = [asyncio.to_thread(strategy.create_sender, init_info=init_info, inference_client=client)]
        if rank == 0:
            tasks.append(client.init_weight_update_communicator(init_info))
        sender = (await asyncio.gather(*tasks))[0]
        for version in versions:
            with torch.no_grad():
                for parameter, new in zip(model.parameters(), model_of(version, width).parameters()):
                    parameter.copy_(distribute_tensor(new.to(mesh.device_type), parameter.device_mesh, parameter.placements))
            metadata = extractor.get_weight_metadata(DTYPE)
            if spoil is not None and version == versions[0]:
                spoil(rank, metadata)
            try:
                chunks = extractor.extract_weights(DTYPE)
                if chunks_of is not None:
                    chunks = chunks_of(rank, version == versions[0], chunks)
                if rank != absent or version != versions[0]:
                    await sender.send_chunks(chunks, weight_metadata=metadata)
            except (refitd.Error, ExporterFailed) as error:
                errors[version] = f"{type(error).__name__}: {error}"
        sender.teardown()
        await client.teardown()

    if gpu is None:
        with mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
            asyncio.run(run())
    else:
        with torch.cuda.stream(torch.cuda.Stream()):  # SkyRL's workers may have their own current stream
            asyncio.run(run())
    return errors


@pytest.fixture(scope="module")
def daemon():
    with testing.daemon() as running, RANKS, RANKS_WITH_GPUS:
        yield running


def run(
    daemon,
    group,
    *,
    sharded=False,
    versions=(1, 2, 3),
    spoil=None,
    chunks_of=None,
    width=USUAL_WIDTH,
    absent=None,
    gpus=None,
    install=None,
    engines=2,
    **options,
):
    """`gpus`: torch's numbers of the GPUs, on each of which are a trainer rank and an engine; None: host memory. `install`: options of
    install; `engines`: how many; `options`: of the servers."""
    servers = [Server(daemon.socket, width=width, gpu=None if gpus is None else gpus[i], **options) for i in range(engines)]
    urls = [server.url for server in servers]
    try:
        ranks = RANKS if gpus is None else RANKS_WITH_GPUS
        errors = ranks.run(sync, daemon.socket, urls, group, sharded, versions, spoil, chunks_of, width, absent, gpus, install or {})
    finally:
        for server in servers:
            server.close()
    return servers, errors


def check_equal(held, expected):
    assert list(held) == list(expected)
    for name, tensor in expected.items():
        assert held[name].dtype == tensor.dtype and torch.equal(held[name].cpu(), tensor), name


@pytest.mark.parametrize("sharded", [False, True])
def test_every_sync_reaches_every_engine_to_the_bit(daemon, sharded):
    servers, errors = run(daemon, f"sync-{sharded}", sharded=sharded)
    assert errors == [{}, {}]
    assert [server.told["instance"] for server in servers] == ["skyrl-0", "skyrl-1"]
    for server in servers:
        assert sorted(server.by_version) == [1, 2, 3]
        for version, held in server.by_version.items():
            check_equal(held, held_by(version))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_training_that_resumes_behind_the_groups_version_goes_on_with_the_next(daemon, sharded):
    for first, version in ((10, 10), (7, 11)):
        servers, errors = run(daemon, f"resumed-{sharded}", sharded=sharded, versions=(version,), install={"first_version": first})
        assert errors == [{}, {}]
        for server in servers:
            assert list(server.by_version) == [version]
            check_equal(server.by_version[version], held_by(version))
    assert "update to version 11: SkyRL's sync 1 of this run" in daemon.read_log()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("engines, halves", [(1, False), (3, False), (1, True)])
def test_engines_and_their_ranks_need_not_be_as_many_as_trainer_ranks(daemon, sharded, engines, halves):
    servers, errors = run(daemon, f"ranks-{sharded}-{engines}-{halves}", sharded=sharded, versions=(1, 2), engines=engines, halves=halves)
    assert errors == [{}, {}] and len(servers) == engines
    for server in servers:
        assert sorted(server.by_version) == [1, 2]
        for version, held in server.by_version.items():
            check_equal(held, held_by(version))


def join_apart(rank, world, socket, options):
    """Calls install() with other options on each rank, and returns the error that creating a sender raises. `options`: by rank."""
    from skyrl.train.config.config import InferenceEngineConfig

    import refitd.integrations.skyrl
    import refitd.integrations.skyrl_strategy

    refitd.integrations.skyrl.install(**{"group": "apart", "socket": socket, "device": "host", "update_seconds": 60.0, **options[rank]})
    info = refitd.integrations.skyrl_strategy.Strategy.create_init_info(InferenceEngineConfig(num_engines=1, weight_sync_backend="refitd"))
    try:
        refitd.integrations.skyrl_strategy.Strategy.create_sender(info, None)
    except refitd.Error as error:
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize(
    "other, said", [({"group": "b"}, "group 'b', and rank 0 has 'apart'"), ({"sharded": True}, "sharded True, and rank 0 has False")]
)
def test_ranks_that_were_installed_apart_are_refused_on_every_rank_before_any_attaches(daemon, other, said):
    errors = RANKS.run(join_apart, daemon.socket, [{}, other])
    assert errors == [f"InvalidArgument: rank 1 has {said}: they must be alike on all ranks"] * 2
    assert "apart" not in daemon.control("--output", "json", "status")


class OwnEngine:
    """Stands for vLLM's engine for NCCL, which SkyRL's own sender calls, here over gloo: one buffer that holds all tensors, as `packed` says."""

    @staticmethod
    def trainer_send_weights(iterator, trainer_args):
        assert trainer_args["packed"] is True
        torch.distributed.broadcast(torch.cat([tensor.reshape(-1) for _, tensor in iterator]), 0, group=trainer_args["group"])


class OwnClient:
    """The calls of SkyRL's own sender on rank 0, which tell the engines what will come."""

    def __init__(self):
        self.calls = []

    async def start_weight_update(self, is_checkpoint_format):
        self.calls.append("start")

    async def update_weights_nccl(self, update_info):
        self.calls.append(update_info)

    async def finish_weight_update(self):
        self.calls.append("finish")


def broadcast_by_skyrl(rank, world, kind):
    """SkyRL's own sender broadcasts a model; rank 1 is the engine as well. Returns what each rank told or took."""
    from skyrl.backends.skyrl_train.weight_sync import BroadcastWeightTransferSender, BroadcastWeightUpdateRequest
    from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    group = torch.distributed.new_group()
    extractor = FSDPWeightExtractor(fully_shard(model_of(1, kind), mesh=init_device_mesh("cpu", (world,))), group_by_module=True)
    metadata = extractor.get_weight_metadata(DTYPE)
    client, module = OwnClient(), mock.MagicMock(NCCLWeightTransferEngine=OwnEngine)
    taken = {}

    def take():
        """Unpacks by the sizes of SkyRL's request, which are counts of elements in the order of the tensors."""
        sizes = [torch.Size(shape).numel() for shape in metadata["shapes"]]
        request = BroadcastWeightUpdateRequest(names, metadata["dtype_names"], [shapes[name] for name in names], sizes=[shapes[name].numel() for name in names])
        packed = torch.empty(sum(request.sizes), dtype=DTYPE)
        assert len(packed) == sum(sizes)
        torch.distributed.broadcast(packed, 0, group=group)
        for name, shape, part in zip(request.names, request.shapes, packed.split(request.sizes)):
            taken[name] = part.view(shape).clone()

    shapes = {name: torch.Size(shape) for name, shape in zip(metadata["names"], metadata["shapes"])}
    modules = {}
    for name in shapes:  # chunks are a module's tensors each, in the order in which modules first come
        modules.setdefault(name.rsplit(".", 2)[0] if name.count(".") > 1 else "", []).append(name)
    names = [name for of_module in modules.values() for name in of_module]
    taking = threading.Thread(target=take)
    if rank == 1:
        taking.start()
    sender = BroadcastWeightTransferSender(None, group, client)
    fakes = {"vllm.distributed.weight_transfer.nccl_engine": module}
    with mock.patch.dict(sys.modules, fakes), mock.patch("torch.cuda.current_device", lambda: torch.device("cpu")):
        asyncio.run(sender.send_chunks(extractor.extract_weights(DTYPE), weight_metadata=metadata))
    if rank == 1:
        taking.join()
    return client.calls if rank == 0 else taken


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_engines_hold_the_bytes_that_skyrls_own_packed_broadcast_delivers(daemon, kind, sharded):
    calls, own = RANKS.run(broadcast_by_skyrl, kind)
    assert [calls[0], calls[2]] == ["start", "finish"] and calls[1]["packed"] is True
    assert any("experts" in name for name in own) == (kind == "moe")
    servers, errors = run(daemon, f"own-{kind}-{sharded}", sharded=sharded, versions=(1,), width=kind)
    assert errors == [{}, {}]
    for server in servers:
        check_equal(server.by_version[1], {name: own[name] for name in server.held})


def other_shape_on_rank_1(rank, metadata):
    if rank == 1:
        metadata["shapes"][1] = [8]


def other_order_on_rank_1(rank, metadata):
    if rank == 1:
        for entries in metadata.values():
            entries[:2] = entries[1::-1]


def other_dtype_everywhere(rank, metadata):
    metadata["dtype_names"][2] = "float32"


def lacks_the_last(rank, metadata):
    for entries in metadata.values():
        entries.pop()


def one_too_many(rank, metadata):
    for key, entry in (("names", "2.bias"), ("dtype_names", "bfloat16"), ("shapes", [3])):
        metadata[key].append(entry)


def nothing(rank, metadata):
    for entries in metadata.values():
        entries.clear()


@pytest.mark.parametrize(
    "spoil, message, reached",
    [
        (other_shape_on_rank_1, "rank 1 has other metadata than rank 0, first at tensor '0.bias'", False),
        (other_order_on_rank_1, "rank 1 has other metadata than rank 0, first at tensor '0.bias'", False),
        (nothing, "metadata has no tensor", False),
        (other_dtype_everywhere, "a chunk has tensor '1.weight', bfloat16 .*: the metadata says float32", True),
        (lacks_the_last, "tensor '1.bias', .*: which the metadata lacks", True),
        (one_too_many, "1 tensors of the metadata came in no chunk, '2.bias' among them", True),
    ],
)
def test_metadata_that_is_wrong_fails_on_every_rank_and_the_next_sync_works(daemon, spoil, message, reached):
    servers, errors = run(daemon, spoil.__name__, versions=(1, 2), spoil=spoil)
    assert re.search(message, errors[0][1]), errors
    assert list(errors[1]) == [1], "rank 1 fails too"
    for server in servers:
        kinds = [type(event) for event in server.events if event.version == 1] if reached else []
        assert refitd.Committed not in kinds and bool(kinds) == reached
        version = 2 if reached else 1  # what was refused before anything was sent took no version
        assert list(server.by_version) == [version]
        check_equal(server.by_version[version], held_by(2))


def test_an_engine_that_refuses_ends_the_sync_with_an_exception_on_every_rank(daemon):
    servers, errors = run(daemon, "refused", versions=(1, 2, 3), refuses=(2,))
    for of_rank in errors:
        assert list(of_rank) == [2] and "busy" in of_rank[2], of_rank
    for server in servers:
        assert sorted(server.by_version) == [1, 3]


def test_an_engine_that_a_worker_did_not_tell_takes_nothing_by_itself(daemon):
    """An engine hears of a sync from SkyRL's calls alone. The other tests rest on this."""
    servers, errors = run(daemon, "deaf", versions=(1, 2), deaf=(1,), install={"update_seconds": 60.0})
    assert [list(of_rank) for of_rank in errors] == [[1], [1]], errors
    assert "not attached" in errors[0][1] and "version 1" in errors[0][1], errors
    for server in servers:
        assert not any(isinstance(event, refitd.Committed) and event.version == 1 for event in server.events)
        assert list(server.by_version) == [2]
        check_equal(server.by_version[2], held_by(2))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_version_that_an_engine_can_not_use_is_an_error_on_every_rank(daemon, sharded):
    servers, errors = run(daemon, f"unusable-{sharded}", sharded=sharded, versions=(1, 2), unusable=(1,))
    for of_rank in errors:
        assert list(of_rank) == [1] and "was committed, and an engine can't use it" in of_rank[1], errors
    assert [sorted(server.by_version) for server in servers] == [[1, 2], [1, 2]]


def test_a_sync_that_an_earlier_training_left_open_does_not_stop_the_next(daemon):
    servers, errors = run(daemon, "left-open", versions=(1, 2), left_open=True)
    assert errors == [{}, {}]
    assert [sorted(server.by_version) for server in servers] == [[1, 2], [1, 2]]


@pytest.mark.parametrize("backend, resumed", [("refitd", [False, True]), ("nccl", [True, True])])
def test_skyrl_does_not_resume_generation_after_a_sync_that_failed(backend, resumed):
    import ray
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig

    import refitd.integrations.skyrl

    refitd.integrations.skyrl.install("resume")
    client = RemoteInferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)
    dispatch = WorkerDispatch.__new__(WorkerDispatch)
    dispatch.cfg = SkyRLTrainConfig()
    dispatch.cfg.generator.inference_engine.weight_sync_backend = backend
    dispatch.colocate_all, dispatch._inference_engine_client, dispatch._actor_groups = False, client, mock.MagicMock()
    dispatch.ensure_active_adapter = lambda *_: None
    calls = []

    async def call(endpoint, *_, **__):
        calls.append(endpoint)
        return {}

    seen = []
    with mock.patch.object(client, "_call_all_servers", call):
        for failure in (refitd.UpdateAborted("busy"), None):
            with mock.patch.object(ray, "get", side_effect=failure), contextlib.suppress(refitd.UpdateAborted):
                asyncio.run(dispatch.save_weights_for_sampler())
            assert calls[0] == "/pause"
            seen.append("/resume" in calls)
            calls.clear()
    assert seen == resumed


@pytest.mark.parametrize("failure, tags", [(None, [["weights"], ["kv_cache"]]), (refitd.UpdateAborted("busy"), [["weights"]])])
def test_colocated_engines_wake_for_the_weights_and_get_their_cache_after_a_sync_that_succeeded_alone(failure, tags):
    import ray
    from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient
    from skyrl.backends.skyrl_train.workers.worker_dispatch import WorkerDispatch
    from skyrl.train.config import SkyRLTrainConfig

    import refitd.integrations.skyrl

    refitd.integrations.skyrl.install("colocated")
    client = RemoteInferenceClient(proxy_url="", server_urls=[], data_parallel_size=1)
    dispatch = WorkerDispatch.__new__(WorkerDispatch)
    dispatch.cfg = SkyRLTrainConfig()
    dispatch.cfg.generator.inference_engine.weight_sync_backend = "refitd"
    dispatch.colocate_all, dispatch._inference_engine_client, dispatch._actor_groups = True, client, mock.MagicMock()
    dispatch._prepare_for_weight_sync = dispatch._finish_weight_sync = lambda: None  # they move the trainer between GPU and host
    dispatch.ensure_active_adapter = lambda *_: None
    woken = []

    async def call(endpoint, *_, params=None, **__):
        if endpoint == "/wake_up":
            woken.append(params["tags"])
        return {}

    with mock.patch.object(client, "_call_all_servers", call), mock.patch.object(ray, "get", side_effect=failure):
        with contextlib.suppress(refitd.UpdateAborted):
            asyncio.run(dispatch.save_weights_for_sampler())
    assert woken == tags


def none_at_first(rank, first, chunks):
    return iter(()) if first else chunks


def test_an_empty_list_of_chunks_fails_on_every_rank_and_the_next_sync_works(daemon):
    servers, errors = run(daemon, "empty", versions=(1, 2), chunks_of=none_at_first)
    assert re.search("4 tensors of the metadata came in no chunk, '0.weight' among them", errors[0][1]), errors
    assert [list(of_rank) for of_rank in errors] == [[1], [1]]
    assert [list(server.by_version) for server in servers] == [[2], [2]]


def float32_in_metadata(rank, metadata):
    metadata["dtype_names"][metadata["names"].index("0.bias")] = "float32"


def float32_bias(rank, first, chunks):
    for chunk in chunks:
        chunk.tensors = [tensor.float() if name == "0.bias" else tensor for name, tensor in zip(chunk.names, chunk.tensors)]
        yield chunk


def test_a_float32_bias_among_bfloat16_arrives_as_it_is(daemon):
    servers, errors = run(daemon, "bias", versions=(1,), spoil=float32_in_metadata, chunks_of=float32_bias, float32=("0.bias",))
    assert errors == [{}, {}]
    for server in servers:
        expected = held_by(1)
        check_equal(server.by_version[1], {**expected, "0.bias": expected["0.bias"].float()})


@pytest.mark.parametrize("sharded", [False, True])
def test_engines_that_die_in_a_sync_end_it_on_every_rank_and_those_that_come_instead_take_the_next(daemon, sharded):
    servers, errors = run(daemon, f"dies-{sharded}", sharded=sharded, dies=(2,), returns=True)
    assert [list(of_rank) for of_rank in errors] == [[2], [2]], errors
    assert all("skyrl-" in of_rank[2] or "instance" in of_rank[2] for of_rank in errors), errors
    for server in servers:
        assert list(server.by_version) == [1, 3]
        check_equal(server.by_version[3], held_by(3))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_first_tensor_larger_than_a_slot_arrives(daemon, sharded):
    options = {"install": {"spec": refitd.GroupSpec(slot_bytes=SLOT_BYTES)}, "width": WIDE, "versions": (1, 2), "sharded": sharded}
    servers, errors = run(daemon, f"oversize-{sharded}", **options)
    assert errors == [{}, {}]
    for server in servers:
        for version in (1, 2):
            expected = held_by(version, WIDE)
            assert next(iter(expected.values())).nbytes > SLOT_BYTES
            check_equal(server.by_version[version], expected)


def fails_at_first(failing, rank, first, chunks):
    """On one rank, after the last collective of the extractor's."""
    yield from chunks
    if first and rank == failing:
        raise ExporterFailed("no memory to cast '1.bias'")


@pytest.mark.parametrize("failing", [0, 1])
def test_an_extractor_that_fails_on_a_rank_ends_the_sync_on_every_rank_and_the_next_works(daemon, failing):
    servers, errors = run(daemon, f"extractor-{failing}", versions=(1, 2), chunks_of=functools.partial(fails_at_first, failing))
    assert errors[failing] == {1: "ExporterFailed: no memory to cast '1.bias'"}
    assert list(errors[1 - failing]) == [1] and f"rank {failing}" in errors[1 - failing][1], errors
    for server in servers:
        assert list(server.by_version) == [2]
        check_equal(server.by_version[2], held_by(2))


def asked_while_pushing(rank, first, chunks):
    """On rank 0 each push waits until the next chunk is asked for."""
    if rank:
        yield from chunks
        return
    asked = threading.Semaphore(0)
    push = refitd.Update.push

    def push_when_asked(self, name, tensor):
        assert asked.acquire(timeout=SECONDS), f"nothing was asked for while '{name}' was pushed"
        push(self, name, tensor)

    with mock.patch.object(refitd.Update, "push", push_when_asked):
        for chunk in chunks:
            yield chunk
            asked.release()


def test_the_next_chunk_is_gathered_while_one_is_pushed(daemon):
    servers, errors = run(daemon, "overlap", versions=(1, 2), chunks_of=asked_while_pushing)
    assert errors == [{}, {}]
    for server in servers:
        for version in (1, 2):
            check_equal(server.by_version[version], held_by(version))


def no_bytes_in_the_second_at_first(rank, first, chunks):
    """On rank 0 a chunk is as the metadata says, and can't be pushed."""
    for number, chunk in enumerate(chunks):
        if first and rank == 0 and number == 1:
            chunk.tensors = [tensor.to("meta") for tensor in chunk.tensors]
        yield chunk


def test_a_push_that_fails_while_the_next_chunk_is_gathered_ends_the_sync_on_every_rank_and_the_next_works(daemon):
    servers, errors = run(daemon, "pushing", versions=(1, 2), chunks_of=no_bytes_in_the_second_at_first)
    assert errors[0][1].startswith("InvalidArgument") and "tensor '0.bias'" in errors[0][1], errors
    assert [list(of_rank) for of_rank in errors] == [[1], [1]] and "tensor '0.bias'" in errors[1][1], errors
    for server in servers:
        assert list(server.by_version) == [2]
        check_equal(server.by_version[2], held_by(2))


@pytest.mark.parametrize("sharded", [False, True])
def test_a_trainer_rank_that_is_missing_is_named_and_nothing_was_sent(daemon, sharded):
    servers, errors = run(daemon, f"missing-{sharded}", sharded=sharded, versions=(1,), absent=1, install={"update_seconds": 10.0})
    assert errors[0][1].startswith("DeadlineExceeded: trainer rank 1 did not begin the sync within 10.0 s") and errors[1] == {}
    assert [server.events for server in servers] == [[], []]


# The ranks' order is not the GPUs', so that a thread that has torch's first GPU, and not its rank's, is noticed.
GPUS = (1, 0)
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def late_on_its_stream(rank, first, chunks):
    """On rank 0 the current stream has work before each chunk's bytes: who reads them without waiting for that stream reads others."""
    for chunk in chunks:
        if rank == 0:
            right = chunk.tensors
            chunk.tensors = [torch.full_like(tensor, torch.nan) for tensor in right]
            torch.cuda._sleep(200_000_000)
            for tensor, bytes_of in zip(chunk.tensors, right):
                tensor.copy_(bytes_of)
        yield chunk


@two_gpus
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("width", [USUAL_WIDTH, WIDE, "moe"])
def test_colocated_engines_take_every_sync_from_the_memory_of_the_trainers_gpus(daemon, sharded, width):
    servers, errors = run(daemon, f"gpus-{sharded}-{width}", sharded=sharded, width=width, gpus=GPUS)
    assert errors == [{}, {}]
    for server in servers:
        for version in (1, 2, 3):
            check_equal(server.by_version[version], held_by(version, width))


@two_gpus
def test_a_push_from_a_gpu_waits_for_the_stream_on_which_the_chunk_is_made(daemon):
    servers, errors = run(daemon, "stream", chunks_of=late_on_its_stream, gpus=GPUS)
    assert errors == [{}, {}]
    for server in servers:
        for version in (1, 2, 3):
            check_equal(server.by_version[version], held_by(version))


@two_gpus
@pytest.mark.parametrize("sharded", [False, True])
def test_colocated_engines_that_die_in_a_sync_end_it_on_every_rank_and_those_that_come_instead_take_the_next(daemon, sharded):
    servers, errors = run(daemon, f"gpus-die-{sharded}", sharded=sharded, dies=(2,), returns=True, gpus=GPUS)
    assert [list(of_rank) for of_rank in errors] == [[2], [2]], errors
    for server in servers:
        assert list(server.by_version) == [1, 3]
        check_equal(server.by_version[3], held_by(3))


def test_before_install_nothing_is_made(monkeypatch):
    import refitd.integrations.skyrl
    import refitd.integrations.skyrl_strategy

    monkeypatch.setattr(refitd.integrations.skyrl, "_settings", None)

    with pytest.raises(refitd.FailedPrecondition, match="install"):
        refitd.integrations.skyrl_strategy.Strategy.create_init_info(None)
