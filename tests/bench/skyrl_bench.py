"""SkyRL's weight sync through refitd beside SkyRL's own broadcast, on a CPU: Qwen3-0.6B, two FSDP2 ranks, two engines.

usage: tools/bench skyrl [--json] [--rounds N] [--layers N]     with all 28 layers it takes 20 GiB of memory

The chunks are those of SkyRL's own FSDP extractor (it asks for the current CUDA device, which is replaced by the CPU), from float32
masters, sent in bfloat16. SkyRL 0.3.0 sends them by vLLM's NCCL broadcast, which needs GPUs. In its place rank 0 and the engines
broadcast over gloo, in the two ways of SkyRL's requests: a tensor at a time, and packed into buffers of 1 GiB; engines copy what came
into their parameters. The faster of the two is the baseline. It has no HTTP calls, and its engines know the metadata beforehand.

All take turns in one run; a figure is a ratio of medians. Each path is measured with chunks that were gathered before, and from the
model, where it gathers as it goes; the sharded path gathers nothing. In a row of its own SkyRL's extractor gathers on both ranks and
nothing is sent: no path that takes SkyRL's chunks from the model can take less. Engines' parameters are cleared before each sync and
compared after it, outside the measured time.
"""

import argparse
import asyncio
import importlib.machinery
import importlib.util
import json
import multiprocessing
import statistics
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

import refitd
from refitd import testing

SECONDS = 900  # the time for an answer; only what hangs reaches it
TRAINERS, ENGINES = 2, 2
DTYPE = torch.bfloat16
PACKED_BYTES = 1 << 30
OWN = ("one by one", "packed")
# Each case names the chunks' source ("ready": gathered before; "gather": gathered from the model) and the path that they take; "alone":
# they are dropped.
CASES = (*(("ready", path) for path in (*OWN, "push")), *(("gather", path) for path in (*OWN, "push", "sharded", "alone")))
MODULUS = 251  # weights are integers below this number, all of which bfloat16 holds


def model_of(layers):
    """Qwen3-0.6B without its head, which is tied, on device meta."""
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


def expected(index, start, count, version, dtype):
    """The values of elements [start, start + count) of a tensor, made in pieces, since the integers take more memory
    than the weights.
    """
    made, first = torch.empty(count, dtype=dtype), start + 7 * index + version
    for piece in made.split(1 << 22):
        piece.copy_(torch.arange(first, first + piece.numel()).remainder_(MODULUS))
        first += piece.numel()
    return made


def same(held, right):
    return all(torch.equal(one, two.to(DTYPE)) for one, two in zip(held.split(1 << 22), right.split(1 << 22)))


def packs(sizes):
    """Lists of indices of the tensors that are broadcast together."""
    packed, total = [[]], 0
    for i, size in enumerate(sizes):
        if packed[-1] and total + size * DTYPE.itemsize > PACKED_BYTES:
            packed.append([])
            total = 0
        packed[-1].append(i)
        total += size * DTYPE.itemsize
    return packed


def broadcasts(port, rank):
    """The process group of rank 0 of the trainers and of the engines, as a function that broadcasts from rank 0."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    group = dist.ProcessGroupGloo(dist.PrefixStore("broadcast", store), rank, 1 + ENGINES, timedelta(seconds=SECONDS))
    return group, lambda tensor: group.broadcast([tensor]).wait()


class Extractors:
    """SkyRL's extractor of a sharded model, and the ways to send what it yields."""

    def __init__(self, rank, layers, port, socket):
        import transformers.utils

        # SkyRL imports flash_attn and calls nothing of it here, so a stand-in takes its place. Before that transformers
        # is asked whether the package is there, since it keeps its answer.
        for name in dir(transformers.utils):
            if name.startswith("is_flash_attn") and name.endswith("available"):
                getattr(transformers.utils, name)()
        for name in ("flash_attn", "flash_attn.bert_padding"):
            sys.modules.setdefault(name, mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)))
        sys.path.append(str(Path(importlib.util.find_spec("skyrl").origin).parents[1] / "skyrl-gym"))
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPWeightExtractor
        from torch.distributed.fsdp import fully_shard

        import refitd.integrations.skyrl
        import refitd.integrations.skyrl_strategy

        torch.cuda.current_device = lambda: torch.device("cpu")
        self.rank = rank
        model = model_of(layers)
        for layer in model.layers:
            fully_shard(layer)
        self.model = fully_shard(model).to_empty(device="cpu")
        self.extractor = FSDPWeightExtractor(self.model)
        self.sizes = [parameter.numel() for parameter in self.model.state_dict().values()]
        self.senders, self.ready = {}, []
        for path in ("push", "sharded"):
            connect = refitd.Connect(socket=socket, wait_seconds=SECONDS)
            refitd.integrations.skyrl.install(path, sharded=path == "sharded", device="host", connect=connect, first_version=1)
            info = refitd.integrations.skyrl_strategy.InitInfo(override_existing_receiver=False, group=path, instances=ENGINES)
            self.senders[path] = refitd.integrations.skyrl_strategy.Strategy.create_sender(info, None)
        # The engines come to the group of broadcasts once they are attached, for which they wait for the senders.
        self.group, self.broadcast = broadcasts(port, 0) if rank == 0 else (None, None)

    def fill(self, version):
        with torch.no_grad():
            for index, parameter in enumerate(self.model.state_dict().values()):
                local = parameter.to_local()
                row = parameter.numel() // parameter.shape[0]
                start = -(-parameter.shape[0] // TRAINERS) * self.rank * row
                local.copy_(expected(index, start, local.numel(), version, torch.float32).view(local.shape))
        # Only rank 0 sends; the other ranks have done their part by gathering.
        self.ready = [chunk for chunk in self.extractor.extract_weights(DTYPE) if self.rank == 0]

    def send(self, source, path):
        """Returns seconds, until the last engine has the weights."""
        chunks = iter(self.ready) if source == "ready" else self.extractor.extract_weights(DTYPE)
        dist.barrier()
        start = time.perf_counter()
        if path in self.senders:
            metadata = self.extractor.get_weight_metadata(DTYPE)
            asyncio.run(self.senders[path].send_chunks(chunks, weight_metadata=metadata))
        elif self.rank or path == "alone":
            for _ in chunks:
                pass
        else:
            self.send_as_skyrl(path, (tensor for chunk in chunks for tensor in chunk.tensors))
        dist.barrier()
        return time.perf_counter() - start

    def send_as_skyrl(self, path, tensors):
        if path == "one by one":
            for tensor in tensors:
                self.broadcast(tensor)
        else:
            for indices in packs(self.sizes):
                self.broadcast(torch.cat([next(tensors).view(-1) for _ in indices]))
            assert next(tensors, None) is None
        self.group.barrier().wait()  # the engines have loaded


def trainer(rank, layers, port, socket, pipe):
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=SECONDS))
    dist.init_process_group("gloo", store=dist.PrefixStore("trainers", store), rank=rank, world_size=TRAINERS, timeout=timedelta(seconds=SECONDS))
    extractors = Extractors(rank, layers, port, socket)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        what, argument = asked
        pipe.send(extractors.fill(argument) if what == "fill" else extractors.send(what, argument))
    for sender in extractors.senders.values():
        sender.teardown()
    dist.destroy_process_group()


def engine(rank, layers, port, socket, pipe):
    torch.set_num_threads(1)
    shapes = {name: tuple(parameter.shape) for name, parameter in model_of(layers).state_dict().items()}
    held = {name: refitd.empty(shape, DTYPE, like="torch") for name, shape in shapes.items()}
    parameters, members, want = list(held.values()), [], []
    sizes = [parameter.numel() for parameter in parameters]
    for path in ("push", "sharded"):
        member = refitd.Engine(path, instance=f"engine-{rank}", device="host", connect=refitd.Connect(socket=socket, wait_seconds=SECONDS))
        member.register(held)
        thread = threading.Thread(target=lambda member: [event.ready() for event in member if isinstance(event, refitd.Prepare)], args=(member,))
        thread.start()
        members.append((member, thread))
    group, broadcast = broadcasts(port, 1 + rank)
    buffer = torch.empty(max(sum(sizes[i] for i in indices) for indices in packs(sizes)), dtype=DTYPE)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        what, argument = asked
        if what == "fill":
            want = [expected(i, 0, size, argument, torch.uint8) for i, size in enumerate(sizes)]
            pipe.send(None)
        elif what == "clear":
            for parameter in parameters:
                parameter.zero_()
            pipe.send(None)
        elif what == "check":
            pipe.send([name for (name, tensor), right in zip(held.items(), want) if not same(tensor.view(-1), right)])
        else:
            for indices in packs(sizes) if argument == "packed" else [[i] for i in range(len(sizes))]:
                came = buffer[: sum(sizes[i] for i in indices)]
                broadcast(came)
                for i, part in zip(indices, came.split([sizes[i] for i in indices])):
                    parameters[i].copy_(part.view(parameters[i].shape))
            group.barrier().wait()
    for member, thread in members:
        member.close()
        thread.join()


def answer(pipe):
    if not pipe.poll(SECONDS):
        sys.exit(f"bench: no answer within {SECONDS} s")
    return pipe.recv()


def ask(pipes, *asked):
    for pipe in pipes:
        pipe.send(asked)
    return [answer(pipe) for pipe in pipes]


def run(options, socket):
    """Seconds by case, of each round but the first."""
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=SECONDS), wait_for_workers=False)
    pipes, processes = {"trainer": [], "engine": []}, []
    for kind, function, count in (("trainer", trainer, TRAINERS), ("engine", engine, ENGINES)):
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=function, args=(rank, options.layers, store.port, socket, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes[kind].append(ours)
            processes.append(process)
    everyone = [*pipes["trainer"], *pipes["engine"]]
    for pipe in everyone:
        answer(pipe)
    seconds = {case: [] for case in CASES}
    for number in range(options.rounds + 1):
        ask(everyone, "fill", number)
        for i in range(len(CASES)):
            case = CASES[(number + i) % len(CASES)]  # each begins as often as the others
            ask(pipes["engine"], "clear", None)
            if case[1] in OWN:
                for pipe in pipes["engine"]:
                    pipe.send(case)
            took = max(ask(pipes["trainer"], *case))
            if number:
                seconds[case].append(took)
            for rank, wrong in enumerate(ask(pipes["engine"], "check", None) if case[1] != "alone" else ()):
                if wrong:
                    sys.exit(f"bench: {case}: engine {rank} holds other bytes of {len(wrong)} tensors, '{wrong[0]}' among them")
    for pipe in everyone:
        pipe.send(None)
    for process in processes:
        process.join(SECONDS)
    return seconds


def main():
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=28)
    options = parser.parse_args()
    with testing.daemon("--log-level", "warning") as daemon:
        seconds = {case: statistics.median(took) for case, took in run(options, daemon.socket).items()}
    rows = []
    for source, path, goal in (("ready", "push", 0.8), ("gather", "push", 0.8), ("gather", "alone", None), ("gather", "sharded", 0.5)):
        own = min(OWN, key=lambda name: seconds[source, name])
        what = {"ready": "chunks that are ready", "gather": "from the model"}[source]
        name = "gathering alone" if path == "alone" else f"{path}, {what}"
        rows.append((f"{name}, against {own}", seconds[source, path], seconds[source, own], goal))
    reached = True
    if not options.json:
        print("medians: " + ", ".join(f"{' '.join(case)} {took:.3f} s" for case, took in seconds.items()))
        print("%-56s %8s %9s %6s  %-8s %s" % ("case", "s", "baseline", "ratio", "goal", "reached"))
    for name, value, baseline, goal in rows:
        ratio = value / baseline
        met = None if goal is None else ratio <= goal
        reached = reached and met is not False
        if options.json:
            print(json.dumps({"bench": "skyrl", "case": name, "value": value, "unit": "s", "baseline": baseline, "ratio": ratio,
                              "goal": goal, "reached": met}), flush=True)
        else:
            aim = ("none", "") if goal is None else ("<= %g" % goal, "yes" if met else "NO")
            print("%-56s %8.3f %9.3f %6.2f  %-8s %s" % (name, value, baseline, ratio, *aim), flush=True)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
