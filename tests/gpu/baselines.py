"""Measures what a user would do without refitd, in torch, and what the hardware allows, on the GPUs of this machine: JSON lines.

  python3 baselines.py --model qwen3-4b [--rounds 5] [--only limits,packed,...]

Cases: limits (a peer copy from GPU 0 to the last one and a local copy, in GiB pieces), per_tensor (one NCCL broadcast a
tensor), packed (1 GiB buckets, two buffers on two streams, copied into parameters by name), gather (all-gather among
sharded trainers, then packed, then each engine keeps its slice), colocated (1 GiB flattened, CUDA IPC, copied out).
Trainers are on the first half of the GPUs (--trainers), engines on the others, one process a GPU; rank 0 broadcasts to all engines.
Fresh random values every round, outside the measured time; sums of every tensor are compared after each. Seconds are wall
time between barriers."""

import argparse
import json
import math
import os
import sys
import tempfile
import time
from datetime import timedelta

os.environ["NCCL_NVLS_ENABLE"] = "0"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

BUCKET_BYTES = 1 << 30
PATIENCE_SECONDS = 300  # the time for a case


def attention_qwen(prefix, h, heads, kv, d):
    yield prefix + "self_attn.q_proj.weight", (heads * d, h)
    yield prefix + "self_attn.k_proj.weight", (kv * d, h)
    yield prefix + "self_attn.v_proj.weight", (kv * d, h)
    yield prefix + "self_attn.o_proj.weight", (h, heads * d)
    yield prefix + "self_attn.q_norm.weight", (d,)
    yield prefix + "self_attn.k_norm.weight", (d,)


def attention_latent(prefix, h, heads, kv_lora, nope, rope, v):
    yield prefix + "self_attn.q_proj.weight", (heads * (nope + rope), h)
    yield prefix + "self_attn.kv_a_proj_with_mqa.weight", (kv_lora + rope, h)
    yield prefix + "self_attn.kv_a_layernorm.weight", (kv_lora,)
    yield prefix + "self_attn.kv_b_proj.weight", (heads * (nope + v), kv_lora)
    yield prefix + "self_attn.o_proj.weight", (h, heads * v)


def mlp(prefix, h, ffn):
    yield prefix + "gate_proj.weight", (ffn, h)
    yield prefix + "up_proj.weight", (ffn, h)
    yield prefix + "down_proj.weight", (h, ffn)


# hidden, layers, attention, dense ffn, experts, expert ffn, shared experts, first dense layers, vocabulary, tied
MODELS = {
    "qwen3-0.6b": (1024, 28, ("qwen", 16, 8, 128), 3072, 0, 0, 0, 0, 151936, True),
    "qwen3-4b": (2560, 36, ("qwen", 32, 8, 128), 9728, 0, 0, 0, 0, 151936, True),
    "qwen3-30b-a3b": (2048, 48, ("qwen", 32, 4, 128), 0, 128, 768, 0, 0, 151936, False),
    "moonlight-16b-a3b": (2048, 27, ("latent", 16, 512, 128, 64, 128), 11264, 64, 1408, 2, 1, 163840, False),
}


def tensors_of(model):
    """Names and shapes, bfloat16 but for the router's bias."""
    h, layers, attention, ffn, experts, expert_ffn, shared, first_dense, vocabulary, tied = MODELS[model]
    yield "model.embed_tokens.weight", (vocabulary, h), torch.bfloat16
    for layer in range(layers):
        prefix = "model.layers.%d." % layer
        rows = [(prefix + "input_layernorm.weight", (h,)), (prefix + "post_attention_layernorm.weight", (h,))]
        rows += (attention_qwen if attention[0] == "qwen" else attention_latent)(prefix, h, *attention[1:])
        if experts == 0 or layer < first_dense:
            rows += mlp(prefix + "mlp.", h, ffn)
        else:
            rows.append((prefix + "mlp.gate.weight", (experts, h)))
            if shared:
                rows += mlp(prefix + "mlp.shared_experts.", h, shared * expert_ffn)
                yield prefix + "mlp.gate.e_score_correction_bias", (experts,), torch.float32
            for expert in range(experts):
                rows += mlp(prefix + "mlp.experts.%d." % expert, h, expert_ffn)
        for name, shape in rows:
            yield name, shape, torch.bfloat16
    yield "model.norm.weight", (h,), torch.bfloat16
    if not tied:
        yield "lm_head.weight", (vocabulary, h), torch.bfloat16


def new_parameters(model, device):
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape, dtype in tensors_of(model)}


def as_bytes(tensor):
    return tensor.reshape(-1).view(torch.uint8)


def refill(parameters, generator):
    for tensor in parameters.values():
        tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32).random_(generator=generator)


def sums(parameters):
    return torch.stack([t.view(torch.int16).sum(dtype=torch.int64) for t in parameters.values()])


def bytes_of(parameters):
    return sum(t.numel() * t.element_size() for t in parameters.values())


def buckets_of(parameters):
    """Lists of names, each at most BUCKET_BYTES together."""
    bucket, size = [], 0
    for name, tensor in parameters.items():
        n = tensor.numel() * tensor.element_size()
        if bucket and size + n > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(name)
        size += n
    yield bucket


def median(values):
    values = sorted(values)
    n = len(values)
    return values[n // 2] if n % 2 else (values[n // 2 - 1] + values[n // 2]) / 2


def report(case, model, size, seconds, spans=()):
    line = {"case": case, "model": model, "bytes": size, "seconds": median(seconds), "all": seconds,
            "gb_per_s": size / median(seconds) / 1e9, "spans": spans}
    print(json.dumps(line), flush=True)


def limits(model, rounds):
    """Copies of GiB pieces by the copy engine (another GPU) and within a GPU; as many bytes as the model has."""
    size = sum(math.prod(shape) * dtype.itemsize for _, shape, dtype in tensors_of(model))
    last = torch.cuda.device_count() - 1
    for case, to in (("peer_copy", last), ("local_copy", 0)):
        if case == "peer_copy" and last == 0:
            continue
        pieces = 4
        source = [torch.empty(1 << 30, dtype=torch.uint8, device="cuda:0").random_() for _ in range(pieces)]
        target = [torch.zeros(1 << 30, dtype=torch.uint8, device="cuda:%d" % to) for _ in range(pieces)]
        seconds = []
        for _ in range(rounds + 1):
            for device in {0, to}:
                torch.cuda.synchronize(device)
            start = time.perf_counter()
            for piece in range(8):
                target[piece % pieces].copy_(source[piece % pieces], non_blocking=True)
            for device in {0, to}:
                torch.cuda.synchronize(device)
            seconds.append((time.perf_counter() - start) * size / (8 << 30))
        assert torch.equal(target[0].cpu(), source[0].cpu())
        report(case, model, size, seconds[1:])
        del source, target
        torch.cuda.empty_cache()


class Ranks:
    """The ranks of one torch.distributed world: trainers first, then engines."""

    def __init__(self, rank, world, trainers, store):
        self.rank = rank
        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method="file://" + store, rank=rank, world_size=world,
                                timeout=timedelta(seconds=120), device_id=torch.device("cuda", rank))
        self.trainers = trainers
        self.engines = world - self.trainers
        self.trainer = rank < self.trainers
        self.wire = dist.new_group([0] + list(range(self.trainers, world)))
        self.among_trainers = dist.new_group(list(range(self.trainers)))
        self.on_wire = rank == 0 or not self.trainer


def per_tensor(ranks, parameters):
    if ranks.on_wire:
        for tensor in parameters.values():
            dist.broadcast(tensor, 0, group=ranks.wire)


class Packed:
    def __init__(self, parameters):
        self.buckets = list(buckets_of(parameters))
        largest = max(sum(as_bytes(parameters[n]).numel() for n in names) for names in self.buckets)
        self.buffers = [torch.empty(largest, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self.streams = [torch.cuda.Stream() for _ in range(2)]

    def run(self, ranks, parameters, source=None, target=None):
        """source(name): the whole tensor; target(name, whole): what an engine does with it."""
        if not ranks.on_wire:
            return
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for index, names in enumerate(self.buckets):
            with torch.cuda.stream(self.streams[index % 2]):
                self.bucket(ranks, parameters, names, self.buffers[index % 2], source, target)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def bucket(self, ranks, parameters, names, buffer, source, target):
        size = sum(as_bytes(parameters[n]).numel() for n in names)
        whole = buffer[:size]
        if ranks.trainer:
            torch.cat([as_bytes((source or parameters.get)(n)) for n in names], out=whole)
        dist.broadcast(whole, 0, group=ranks.wire)
        if ranks.trainer:
            return
        at = 0
        for name in names:
            tensor = parameters[name]
            n = as_bytes(tensor).numel()
            value = whole[at : at + n].view(tensor.dtype).view(tensor.shape) if at % tensor.element_size() == 0 else (
                whole[at : at + n].clone().view(tensor.dtype).view(tensor.shape))
            at += n
            (target or (lambda _, v: tensor.copy_(v)))(name, value)


class Gather:
    """Rows sharded over the trainers are gathered by rank 0 (all ranks take part), packed and broadcast; engine e of E keeps
    the e-th part of the rows (tensors without enough rows: all)."""

    def __init__(self, ranks, parameters, packed):
        self.packed = packed
        self.shards = {}
        self.slices = {}
        t, e = ranks.trainers, max(ranks.engines, 1)
        for name, tensor in parameters.items():
            if ranks.trainer and t > 1 and tensor.shape[0] % t == 0:
                self.shards[name] = tensor.chunk(t)[ranks.rank].clone()
            if not ranks.trainer:
                part = tensor.chunk(e)[ranks.rank - t] if tensor.shape[0] % e == 0 else tensor
                self.slices[name] = torch.zeros_like(part)

    def run(self, ranks, parameters):
        if ranks.trainer and ranks.trainers > 1:
            for name, shard in self.shards.items():
                dist.all_gather_into_tensor(parameters[name], shard, group=ranks.among_trainers)

        def keep(name, whole):
            mine = self.slices[name]
            first = mine.shape[0] * (ranks.rank - ranks.trainers) if mine.shape[0] != whole.shape[0] else 0
            mine.copy_(whole[first : first + mine.shape[0]])

        self.packed.run(ranks, parameters, target=keep)


def timed(ranks, run):
    """Begin and end, by CLOCK_MONOTONIC."""
    torch.cuda.synchronize()
    dist.barrier()
    start = time.monotonic()
    run()
    torch.cuda.synchronize()
    dist.barrier()
    torch.cuda.synchronize()
    return start, time.monotonic()


def same_sums(ranks, parameters):
    if not ranks.on_wire:
        return
    mine = sums(parameters)
    theirs = mine.clone()
    dist.broadcast(theirs, 0, group=ranks.wire)
    assert torch.equal(mine, theirs), "tensors differ"


def distributed_rank(rank, world, trainers, store, model, rounds, cases):
    ranks = Ranks(rank, world, trainers, store)
    parameters = new_parameters(model, "cuda")
    size = bytes_of(parameters)
    packed = Packed(parameters)
    generator = torch.Generator("cuda").manual_seed(1)
    runs = {
        "per_tensor": lambda: per_tensor(ranks, parameters),
        "packed": lambda: packed.run(ranks, parameters),
    }
    if "gather" in cases:
        gather = Gather(ranks, parameters, packed)
        runs["gather"] = lambda: gather.run(ranks, parameters)
    for case, run in runs.items():
        if case not in cases:
            continue
        spans = []
        for _ in range(rounds + 1):
            if ranks.trainer:
                refill(parameters, generator)
            spans.append(timed(ranks, run))
            if case != "gather":
                same_sums(ranks, parameters)
        if rank == 0:
            report(case, model, size, [end - start for start, end in spans[1:]], spans[1:])
    dist.destroy_process_group()


def colocated_engine(model, inbox, outbox, error):
    try:
        torch.cuda.set_device(0)
        parameters = new_parameters(model, "cuda")
        outbox.put("ready")
        while True:
            message = inbox.get(timeout=PATIENCE_SECONDS)
            if message is None:
                return
            if message == "sums":
                outbox.put(sums(parameters).cpu())
                continue
            names, buffer = message
            at = 0
            for name in names:
                tensor = parameters[name]
                n = as_bytes(tensor).numel()
                tensor.copy_(buffer[at : at + n].view(tensor.dtype).view(tensor.shape))
                at += n
            torch.cuda.synchronize()
            del buffer, message
            outbox.put("done")
    except BaseException as e:
        error.put(repr(e))
        raise


def colocated(model, rounds):
    """A trainer and an engine on GPU 0: buckets flattened, handed over by CUDA IPC, copied out."""
    torch.cuda.set_device(0)
    context = mp.get_context("spawn")
    inbox, outbox, error = context.Queue(), context.Queue(), context.Queue()
    engine = context.Process(target=colocated_engine, args=(model, inbox, outbox, error), daemon=True)
    engine.start()
    parameters = new_parameters(model, "cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    # float32 tensors first: every tensor of a bucket begins at a multiple of its element size.
    parameters = dict(sorted(parameters.items(), key=lambda item: -item[1].element_size()))
    assert outbox.get(timeout=PATIENCE_SECONDS) == "ready"
    seconds = []
    for _ in range(rounds + 1):
        refill(parameters, generator)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for names in buckets_of(parameters):
            buffer = torch.cat([as_bytes(parameters[n]) for n in names])
            torch.cuda.synchronize()
            inbox.put((names, buffer))
            outbox.get(timeout=PATIENCE_SECONDS)
        seconds.append(time.perf_counter() - start)
        inbox.put("sums")
        theirs = dict(zip([n for n, _, _ in tensors_of(model)], outbox.get(timeout=PATIENCE_SECONDS).tolist()))
        assert theirs == dict(zip(parameters, sums(parameters).tolist())), "tensors differ"
    inbox.put(None)
    engine.join(timeout=60)
    report("colocated", model, bytes_of(parameters), seconds[1:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-4b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--trainers", type=int, help="GPUs of trainers, the first ones; half of them if not said")
    parser.add_argument("--only", default="limits,per_tensor,packed,gather,colocated")
    options = parser.parse_args()
    cases = options.only.split(",")
    world = torch.cuda.device_count()
    if "limits" in cases:
        limits(options.model, options.rounds)
    if world > 1 and {"per_tensor", "packed", "gather"} & set(cases):
        with tempfile.TemporaryDirectory() as folder:
            context = mp.spawn(distributed_rank, nprocs=world, join=False,
                               args=(world, options.trainers or max(world // 2, 1), os.path.join(folder, "store"),
                                     options.model, options.rounds, cases))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not context.join(timeout=1):
                if time.monotonic() > deadline:
                    for process in context.processes:
                        process.kill()
                    sys.exit("baselines: the ranks hang")
    if "colocated" in cases:
        torch.cuda.empty_cache()
        colocated(options.model, options.rounds)


if __name__ == "__main__":
    main()
