"""Derived tensors on GPUs or the host: their bits beside torch's operators, and how long a refit takes that computes them.

  PYTHONPATH=$PWD/site python3 refitd-gpu/derived_bench.py [--models qwen3-4b,...] [--rounds N] [--elements N] [--kinds KIND,...] [--beside bfloat16,fp8] [--oracle FILE]
      [--ranks N | --push] [--colocated] [--device cuda|cpu] [--layers N] [--json FILE]

The trainer is this process, on the first GPU; the engine is a process of its own on the last, or (--colocated) on the first too. --ranks: so many
trainer ranks have equal ranges of rows of each tensor, as FSDP gives them, so that they cut blocks; they share the GPUs in turns, all in this process.
--push: the trainer pushes all tensors instead of registering them.
Bits: of each kind and each dtype of the source, --elements elements with zeros, ties, powers of two and blocks of very different sizes; whole tensors,
windows of tensors, and edges of blocks. Both values and scales are compared. --oracle: a Python file whose `quantise(kind, weight)` returns the
expected values and scales; without it the functions below do.
Figures: full replicas in bfloat16, in FP8 that the trainer holds already (as many bytes as what is derived), and derived; router, norms, embedding and
head stay bfloat16. Seconds are those of the trainer's call, medians. The first and the last version of each case are compared. `torch`: how long torch takes to
quantise all weights on the trainer's GPU, which moves nothing. The rate of a copy of torch from the trainer's device to the engine's stands above the table."""

import argparse
import concurrent.futures
import functools
import importlib.util
import json
import math
import statistics
import subprocess
import sys
import time

import refitd
import torch
from refitd import testing
from refitd.layout.cuda import device_uuid

import baselines

FP8_MAX = 448.0
BLOCK = 128
KINDS = ("fp8_block", "fp8_block_cuda", "fp8_block_inductor", "fp8_block_reciprocal", "fp8_block_pow2", "fp8_channel", "mxfp8", "cast")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MULTIPLES = {"fp8_block_reciprocal": BLOCK, "fp8_block_pow2": BLOCK, "mxfp8": 32}  # kinds of whole blocks, and their side
VERIFICATIONS = ("off", "transfer", "readback")
SECONDS = 300  # only what hangs reaches it


# ---- what is expected ----


def quantise(kind, weight):
    """The values and scales of a matrix by torch's operators, on its device."""
    maximum = torch.tensor(FP8_MAX, device=weight.device)
    if kind == "fp8_channel":
        most = weight.abs().amax(dim=-1, keepdim=True).float()
        scales = (most / maximum).clamp_min(1.0 / (FP8_MAX * 512))
        return (weight.float() / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales
    if kind == "mxfp8":
        blocks = weight.float().view(weight.shape[0], -1, 32)
        exponent = torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126) * (1 / maximum)))
        scales = (exponent + 127).clamp(0, 254)
        values = blocks / torch.exp2(scales - 127)[:, :, None]
        return values.view(weight.shape).to(torch.float8_e4m3fn), scales.to(torch.uint8)
    if kind == "fp8_block_inductor":
        return compiled()(weight)
    rows, columns = weight.shape
    padded = torch.zeros([-(-n // BLOCK) * BLOCK for n in weight.shape], device=weight.device)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    most = blocks.abs().amax(dim=(1, 3), keepdim=True)
    if kind in ("fp8_block", "fp8_block_cuda"):
        scales = most.clamp(1e-4) / maximum if kind == "fp8_block" else most.clamp(1e-4) * (1 / maximum)
        factor = 1.0 / scales
    elif kind == "fp8_block_reciprocal":
        factor = torch.where(most == 0, torch.ones_like(most), 1.0 / most * FP8_MAX)
        scales = factor.reciprocal()
    else:
        scales = torch.where(most == 0, torch.ones_like(most), torch.exp2(torch.ceil(torch.log2(most * (1 / maximum)))))
        factor = scales.reciprocal()
    values = (blocks * factor).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.view(padded.shape)[:rows, :columns], scales.view(blocks.shape[0], blocks.shape[2])


@functools.cache
def compiled():
    """The arithmetic of fp8_block, as Inductor compiles it for CUDA."""

    def cast(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / FP8_MAX
        return (blocks * (1.0 / scales)).to(torch.float8_e4m3fn).view(weight.shape), scales.view(blocks.shape[0], -1)

    function = torch.compile(cast, dynamic=True)

    def padded(weight):
        whole = torch.zeros([-(-n // BLOCK) * BLOCK for n in weight.shape], dtype=weight.dtype, device=weight.device)
        whole[: weight.shape[0], : weight.shape[1]] = weight
        values, scales = function(whole)
        return values[: weight.shape[0], : weight.shape[1]], scales

    return padded


def scales_shape(kind, shape):
    if kind == "fp8_channel":
        return (*shape[:-1], 1)
    return (shape[0], shape[1] // 32) if kind == "mxfp8" else (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))


def draw(shape, dtype, seed, device):
    """Weights of a seed, the same on each device of a kind: as a model has them; in sizes that differ by block; or ties and powers of two."""
    made = torch.Generator(device=device).manual_seed(seed)
    if seed % 3 == 0 or len(shape) < 2:
        return (torch.randn(shape, generator=made, device=device) * 0.02).to(dtype)
    if seed % 3 == 1:
        sizes = torch.exp2(torch.randint(-40, 8, (-(-shape[0] // BLOCK), 1), generator=made, device=device).float())
        sizes = sizes.repeat_interleave(BLOCK, 0)[: shape[0]].clamp_min(2**-14 if dtype == torch.float16 else 0)
        return (torch.randn(shape, generator=made, device=device) * sizes).clamp(-60000, 60000).to(dtype)
    halves = torch.randint(-63, 64, shape, generator=made, device=device).float() / 32
    halves[:BLOCK, : 2 * BLOCK] = 0
    return (halves * torch.exp2(torch.randint(-12, 5, shape, generator=made, device=device).float())).to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


# ---- models ----


class Case:
    """What the trainer holds and what the engine wants. `kind`: of derived tensors, or "plain": the engine wants what the trainer holds."""

    def __init__(self, name, kind, entries):
        self.name, self.kind = name, kind
        self.entries = entries  # (name, shape, dtype, quantised, window or None)

    def derived(self):
        made = {}
        for name, shape, dtype, quantised, _ in self.entries:
            if quantised and self.kind != "plain":
                source = refitd.TensorSpec(name, str(dtype).removeprefix("torch."), shape)
                made[name + ".q"] = refitd.Derived(source, self.kind)
                if self.kind != "cast":
                    made[name + ".s"] = refitd.Derived(source, self.kind, "scales")
        return made

    def boxes(self, device):
        """The engine's tensors, as arguments of refitd.Shard: (name, shape, tensor, offset), with poison in them."""
        for name, shape, dtype, quantised, window in self.entries:
            if self.kind == "plain" or not quantised:
                yield name, shape, new(shape, dtype, device), (0,) * len(shape)
                continue
            offset, extent = window or ((0,) * len(shape), shape)
            yield name + ".q", shape, new(extent, torch.bfloat16 if self.kind == "cast" else torch.float8_e4m3fn, device), offset
            if self.kind != "cast":
                whole = scales_shape(self.kind, shape)
                yield name + ".s", whole, new(whole, torch.uint8 if self.kind == "mxfp8" else torch.float32, device), (0, 0)

    def expected(self, number, version, device, oracle):
        """The tensors of one entry, in the order of `boxes`."""
        name, shape, dtype, quantised, window = self.entries[number]
        weight = source(self, number, version, device)
        if self.kind == "plain" or not quantised:
            yield weight
            return
        made = [weight.to(torch.bfloat16)] if self.kind == "cast" else list(oracle(self.kind, weight))
        if window:
            made[0] = made[0][tuple(slice(o, o + e) for o, e in zip(*window))]
        yield from made


def source(case, number, version, device):
    _, shape, dtype, _, _ = case.entries[number]
    seed = version * 1_000_003 + number
    if dtype in (torch.float8_e4m3fn, torch.uint8):
        made = torch.Generator(device=device).manual_seed(seed)
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=made, device=device).view(dtype)
    return draw(shape, dtype, seed, device)


def new(shape, dtype, device):
    if device == "cpu":
        made = refitd.empty(shape, dtype, like="torch")
    else:
        made = torch.empty(shape, dtype=dtype, device=device)
    made.view(torch.uint8).fill_(0xA5)
    return made


def is_quantised(name, shape):
    return len(shape) == 2 and (".self_attn." in name or ".mlp." in name) and not name.endswith("mlp.gate.weight")


def tensors_of(model, layers):
    """The model's tensors, of the first `layers` layers if that is given; their shapes are those of baselines.py."""
    for name, shape, dtype in baselines.tensors_of(model):
        parts = name.split(".")
        if layers is None or parts[1] != "layers" or int(parts[2]) < layers:
            yield name, shape, dtype


def case_of(model, case, layers):
    entries = []
    for name, shape, dtype in tensors_of(model, layers):
        quantised = is_quantised(name, shape)
        if not quantised or case == "bfloat16":
            entries.append((name, shape, dtype, False, None))
        elif case == "fp8":
            entries.append((name, shape, torch.float8_e4m3fn, False, None))
            entries.append((name + ".s", scales_shape("fp8_block", shape), torch.float32, False, None))
        else:
            entries.append((name, shape, torch.float32 if case == "cast" else dtype, True, None))
    return Case(case, "plain" if case in ("bfloat16", "fp8") else case, entries)


def bits_case(kind, dtype):
    """Some 2^24 elements: a large matrix whole and in a window, rows that are not multiples of 16 bytes, and edges of blocks."""
    shapes = [((3072, 4096), None), ((1024, 1152), ((100, 37), (900, 1001)))]
    if kind not in MULTIPLES:
        shapes += [((300, 260), None), ((515, 1003), None), ((129, 2049), ((1, 3), (128, 2046))), ((1, 1), None)]
    entries = [("w%d" % i, shape, DTYPES[dtype], True, window) for i, (shape, window) in enumerate(shapes)]
    return Case("%s of %s" % (kind, dtype), kind, entries)


CASES = {"bits": bits_case, "model": case_of}


# ---- the engine's process ----


def serve(options):
    """Prints a line of JSON when it is ready, and after each commit; `wrong`: bytes that differ, of the versions that are compared."""
    device = engine_device(options)
    if device != "cpu":
        torch.cuda.set_device(device)
    case = CASES[options.case[0]](*json.loads(options.case[1]))
    boxes = list(case.boxes(device))
    engine = refitd.Engine(options.group, instance="engine", socket=options.socket, device="host" if device == "cpu" else None)
    engine.register([refitd.Shard(*box) for box in boxes], derived=case.derived() or None)
    if device != "cpu":
        torch.cuda.synchronize()
    oracle = oracle_of(options)
    print(json.dumps({"ready": True, "bytes": sum(box[2].nbytes for box in boxes)}), flush=True)
    for event in engine:
        if isinstance(event, refitd.Prepare):
            event.ready()
        elif isinstance(event, refitd.Committed):
            wrong, first = 0, None
            if sys.stdin.readline().strip() == "compare":
                held = iter(boxes)
                for number in range(len(case.entries)):
                    for expected in case.expected(number, event.version, device, oracle):
                        name, _, tensor, _ = next(held)
                        count = int((bits(tensor) != bits(expected)).sum())
                        if count and first is None:
                            first = name
                        wrong += count
                        tensor.view(torch.uint8).fill_(0xA5)
            if device != "cpu":
                torch.cuda.synchronize()
            print(json.dumps({"version": event.version, "wrong": wrong, "first": first}), flush=True)
        elif isinstance(event, refitd.Aborted):
            print(json.dumps({"aborted": event.reason}), flush=True)


def engine_device(options):
    if options.device == "cpu":
        return "cpu"
    return "cuda:%d" % (0 if options.colocated else torch.cuda.device_count() - 1)


def oracle_of(options):
    if not options.oracle:
        return quantise
    spec = importlib.util.spec_from_file_location("oracle", options.oracle)
    module = sys.modules["oracle"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.quantise


class Peer:
    """The engine's process."""

    def __init__(self, options, daemon, group, case):
        command = [sys.executable, __file__, "--engine", "--socket", daemon.socket, "--group", group, "--device", options.device, "--case", case[0],
                   json.dumps(case[1:])]
        command += ["--oracle", options.oracle] if options.oracle else []
        command += ["--colocated"] if options.colocated else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            sys.exit("the engine ended: %s" % self.process.wait(SECONDS))
        return json.loads(line)

    def committed(self, compare):
        """Lets the engine look at what was committed; returns how many bytes are wrong, and in which tensor first."""
        self.process.stdin.write("compare\n" if compare else "go on\n")
        self.process.stdin.flush()
        line = self.line()
        if "wrong" not in line:
            sys.exit("the engine heard: %s" % line)
        return line["wrong"], line["first"]

    def kill(self):
        self.process.kill()
        self.process.wait(SECONDS)


# ---- the trainer ----


class Run:
    """A group of one trainer, this process, and one engine."""

    def __init__(self, options, daemon, name, case):
        self.device = "cpu" if options.device == "cpu" else "cuda:0"
        self.case = CASES[case[0]](*case[1:])
        ranks = options.ranks
        self.trainers = []
        self.shards = [[] for _ in self.case.entries]  # by entry: of each rank that has rows, the first row and the tensor
        for rank in range(ranks):
            device = "cpu" if self.device == "cpu" else "cuda:%d" % (rank % torch.cuda.device_count())
            held = []
            for (tensor, shape, dtype, _, _), shards in zip(self.case.entries, self.shards):
                step = -(-shape[0] // ranks)
                begin, end = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
                if begin == end:
                    continue
                shards.append((begin, new((end - begin, *shape[1:]), dtype, device)))
                held.append(refitd.Shard(tensor, shape, shards[-1][1], (begin,) + (0,) * (len(shape) - 1)))
            trainer = refitd.Trainer(name, rank=rank, world_size=ranks, socket=daemon.socket, device="host" if self.device == "cpu" else device_uuid(device))
            if not options.push:
                trainer.register(held)
            self.trainers.append(trainer)
        self.pushes = options.push
        self.peer = Peer(options, daemon, name, case)
        self.version = 0
        self.bytes = self.peer.line()["bytes"]

    def fill(self, version):
        for number, shards in enumerate(self.shards):
            made = source(self.case, number, version, self.device)
            for begin, shard in shards:
                shard.view(torch.uint8).copy_(made[begin : begin + shard.shape[0]].view(torch.uint8))
        self.synchronize()

    def synchronize(self):
        for device in range(torch.cuda.device_count() if self.device != "cpu" else 0):
            torch.cuda.synchronize(device)

    def refit(self, verification, compare):
        """One version of fresh values; returns the seconds of the call."""
        self.version += 1
        self.fill(self.version)
        began = time.monotonic()
        if self.pushes:
            with self.trainers[0].update(self.version, verification=verification) as update:
                for entry, shards in zip(self.case.entries, self.shards):
                    update.push(entry[0], shards[0][1])
        elif len(self.trainers) == 1:
            self.trainers[0].refit(self.version, verification=verification)
        else:
            with concurrent.futures.ThreadPoolExecutor(len(self.trainers)) as pool:
                list(pool.map(lambda trainer: trainer.refit(self.version, verification=verification), self.trainers))
        seconds = time.monotonic() - began
        wrong, first = self.peer.committed(compare)
        if wrong:
            print("WRONG: %s, version %d: %d bytes, first in %s" % (self.case.name, self.version, wrong, first), flush=True)
        self.wrong = wrong
        return seconds

    def close(self):
        self.peer.kill()
        for trainer in self.trainers:
            trainer.close()
        self.shards = None
        if self.device != "cpu":
            torch.cuda.empty_cache()


def compare_bits(options, daemon):
    """Prints how many bytes differ of each kind and dtype; returns the sum."""
    print("| kind | of | elements | wrong bytes |\n|---|---|---|---|", flush=True)
    total = 0
    for kind in options.kinds:
        for dtype in ("float32",) if kind == "cast" else DTYPES:
            run = Run(options, daemon, "bits-%s-%s" % (kind, dtype), ("bits", kind, dtype))
            each = sum(math.prod(entry[1]) for entry in run.case.entries)
            share = 1 if dtype == "bfloat16" or kind == "cast" else 8  # most elements are of the dtype that models have
            wrong, rounds = 0, max(3, math.ceil(options.elements / share / each))
            for version in range(rounds):
                run.refit(VERIFICATIONS[version % 3], True)
                wrong += run.wrong
            print("| %s | %s | %.3g | %d |" % (kind, dtype, rounds * each, wrong), flush=True)
            total += wrong
            run.close()
    return total


def torch_seconds(run, kind, oracle):
    """The median time in which torch quantises all weights where they are."""
    taken = []
    for _ in range(3):
        began = time.monotonic()
        for entry, shards in zip(run.case.entries, run.shards):
            if entry[3]:
                shards[0][1].to(torch.bfloat16) if kind == "cast" else oracle(kind, shards[0][1])
        run.synchronize()
        taken.append(time.monotonic() - began)
    return statistics.median(taken)


def copy_rate(options):
    """Bytes a second of a copy of torch from the trainer's memory to the engine's, or of memcpy."""
    size = 1 << 28 if options.device == "cpu" else 1 << 32
    here = torch.empty(size, dtype=torch.uint8, device="cpu" if options.device == "cpu" else "cuda:0").fill_(1)
    there = torch.empty(size, dtype=torch.uint8, device=engine_device(options)).fill_(2)
    taken = []
    for _ in range(5):
        if options.device != "cpu":
            torch.cuda.synchronize(0)
        began = time.monotonic()
        there.copy_(here)
        if options.device != "cpu":
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(there.device)
        taken.append(time.monotonic() - began)
    return size / statistics.median(taken)


HEADER = """\
| model | case | GiB into the engine | off, ms | to as many bytes | to bfloat16 | of the copy's rate | transfer, to off | readback, to off | first call, ms | torch, ms |
|---|---|---|---|---|---|---|---|---|---|---|"""


def figures(options, daemon, found):
    """Prints the table; returns how many bytes were wrong."""
    rate = copy_rate(options)
    print("\ncopy: %.0f GB/s; medians of %d\n\n%s" % (rate / 1e9, options.rounds, HEADER), flush=True)
    total, oracle = 0, oracle_of(options)
    for model in options.models.split(",") if options.models else ():
        base = {}
        for case in (*options.beside, *options.kinds):
            side = MULTIPLES.get(case, 1)
            if any(is_quantised(name, shape) and any(n % side for n in shape) for name, shape, _ in tensors_of(model, options.layers)):
                continue
            run = Run(options, daemon, "%s-%s%s" % (model, case, "-colocated" if options.colocated else ""), ("model", model, case, options.layers))
            first = run.refit("off", True)
            total += run.wrong
            medians = {}
            for verification in VERIFICATIONS:
                taken = [run.refit(verification, False) for _ in range(options.rounds + 1)]
                medians[verification] = statistics.median(taken[1:])
            run.refit("transfer", True)
            total += run.wrong
            off = medians["off"]
            base[case] = off
            beside = torch_seconds(run, case, oracle) if run.case.kind != "plain" and options.ranks == 1 else None
            found.append({"model": model, "case": case, "bytes": run.bytes, "seconds": medians, "first": first, "torch": beside, "copy": rate})
            print("| %s | %s | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.2f | %.0f | %s |" % (
                model, case, run.bytes / 2**30, off * 1e3, off / base.get("fp8", math.nan), off / base.get("bfloat16", math.nan), run.bytes / rate / off,
                medians["transfer"] / off, medians["readback"] / off, first * 1e3, "%.1f" % (beside * 1e3) if beside else ""), flush=True)
            run.close()
    return total


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="qwen3-4b,moonlight-16b-a3b,qwen3-30b-a3b", help="empty: no figures")
    parser.add_argument("--layers", type=int, help="only so many of each model's")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--elements", type=int, default=10**9, help="compared of each kind; 0: none")
    parser.add_argument("--kinds", help="default: all that the device has")
    parser.add_argument("--beside", default="bfloat16,fp8", help="what else is measured")
    parser.add_argument("--ranks", type=int, default=1, help="of the trainer")
    parser.add_argument("--push", action="store_true", help="what one rank has, instead of registering it")
    parser.add_argument("--oracle", help="a file with quantise(kind, weight)")
    parser.add_argument("--colocated", action="store_true")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    for hidden in ("--socket", "--group"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.push and options.ranks > 1:
        parser.error("--push: one rank pushes")
    options.kinds = options.kinds.split(",") if options.kinds else [kind for kind in KINDS if options.device != "cpu" or kind != "fp8_block_inductor"]
    options.beside = options.beside.split(",") if options.beside else []
    if options.engine:
        return serve(options)
    found = []
    with testing.Daemon() as daemon:
        wrong = compare_bits(options, daemon) if options.elements else 0
        wrong += figures(options, daemon, found) if options.models else 0
    if options.json:
        with open(options.json, "w") as file:
            json.dump(found, file, indent=1)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
