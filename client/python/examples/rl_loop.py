"""Reinforcement learning that proves its refits: GRPO teaches a tiny decoder to count, and an engine in another process samples.

    python rl_loop.py                            # on policy: sample, step, refit, and so on
    python rl_loop.py --off-policy               # sampling goes on while the trainer steps and refits: at most one version late
    python rl_loop.py --engine vllm              # vLLM's server samples; else a plain torch model, where there is no vLLM
    python rl_loop.py --stale 20                 # the refit of step 20 delivers the weights before: the alarm must find it
    python rl_loop.py --json                     # the last line is JSON

The trainer is FSDP2 over gloo, `--ranks` processes, in float32 and with its projections apart; the engine is in bfloat16, with them
fused, and begins with other random weights. After each refit the trainer and the engine score the same tokens: refitd.kl.check
compares. Its control is a second engine, which loads each step's checkpoint without refitd (rl_engines.py).

Uses the daemon at REFITD_SOCKET where that is set, else a private one. Exit status: 0; 3 where the alarm found a stale engine; 1 where a
rank failed, whichever it was.
"""

import argparse
import contextlib
import datetime
import gc
import json
import multiprocessing
import os
import random
import sys
import tempfile
from statistics import mean, median

import torch
import torch.distributed as dist
from rl_engines import KINDS, LENGTH, SECONDS, START_SECONDS, SYMBOLS, log_probabilities, why_no_vllm
from tiny_model import DTYPE
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import refitd
from refitd import kl, testing

PROMPTS, SAMPLES = 16, 8  # a step's groups, and the completions in each
ALARM = 3


def rewards_of(tokens):
    """1 for each token that is the successor of the one before, modulo SYMBOLS; [batch, LENGTH]."""
    return ((tokens[:, :-1] + 1) % SYMBOLS == tokens[:, 1:]).float()


# ---- what all ranks do ----


class Ranks:
    """A rank's part of the model, the optimizer and the trainer. Every rank calls the same methods, with what rank 0 tells."""

    def __init__(self, rank, options, socket, group, folder):
        torch.set_num_threads(1)
        # A rank that ends closes its connections, so that the others' collectives fail; those that wait for a rank that hangs end after this time.
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.ranks, timeout=datetime.timedelta(seconds=SECONDS)
        )
        self.rank, self.size = rank, options.ranks
        torch.manual_seed(0)
        self.model = KINDS[options.engine][0]()
        mesh = init_device_mesh("cpu", (self.size,))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh, reshard_after_forward=True)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=options.learning_rate)
        self.trainer = refitd.Trainer(group, rank=rank, world_size=self.size, socket=socket, device="host", connect=refitd.Connect(wait_seconds=SECONDS))
        self.trainer.register(self.model, dtype=DTYPE)
        self.before = {}

    def told(self, value=None):
        """Returns what rank 0 tells."""
        values = [value]
        dist.broadcast_object_list(values, src=0)
        return values[0]

    def share(self, whole):
        """This rank's rows: whole groups of completions."""
        return whole.chunk(self.size)[self.rank]

    def step(self, tokens, sampled):
        """One GRPO step: advantages within each group, importance from the engine's own log-probabilities, clipped. The gradients of
        the ranks' shares are averaged by FSDP2."""
        tokens, sampled = self.share(tokens), self.share(sampled)
        rewards = rewards_of(tokens).view(-1, SAMPLES, LENGTH)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        advantages = advantages.view(-1, LENGTH)
        self.before = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        ratio = (log_probabilities(self.model, tokens) - sampled).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def refit(self, version, stale=False):
        """Installs the weights. `stale`: installs those from before the step, as a loop that exports too early would."""
        if not stale:
            return self.trainer.refit(version, duration_seconds=START_SECONDS)
        now = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.fill(self.before)
        result = self.trainer.refit(version)
        self.fill(now)
        return result

    @torch.no_grad()
    def fill(self, tensors):
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(tensors[name])

    @torch.no_grad()
    def score(self, tokens):
        """Log-probabilities of all tokens: each rank computes those of its share."""
        own = log_probabilities(self.model, self.share(tokens)).contiguous()
        parts = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(parts, own)
        return torch.cat(parts)

    def checkpoint(self):
        """The whole weights, which only the control needs: refitd gathers nothing."""
        return {name: tensor.full_tensor().to(DTYPE) for name, tensor in self.model.state_dict().items()}

    def close(self):
        """Ends in order: all ranks are done with their connections before the first closes them, and gloo's threads have ended before
        the interpreter does. FSDP2's modules hold the process group, so they go first."""
        self.trainer.close()
        dist.barrier()
        del self.model, self.optimizer, self.trainer, self.before
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def run_rank(rank, options, socket, group, folder):
    """A rank other than 0: does what rank 0 says, until that says None."""
    ranks = Ranks(rank, options, socket, group, folder)
    while (told := ranks.told()) is not None:
        what, arguments = told
        getattr(ranks, what)(*arguments)
    ranks.close()
    if rank == options.fail:
        sys.exit(f"rank {rank} fails")


def check_ended(others):
    """Raises where a rank other than 0 did not end, or not well."""
    for rank, process in enumerate(others, 1):
        process.join(SECONDS)
        if process.exitcode != 0:
            raise RuntimeError(f"rank {rank} did not end" if process.exitcode is None else f"rank {rank} ended with status {process.exitcode}")


# ---- what rank 0 does ----


class Loop:
    """The steps, each of which makes a version, 1 the first. `history` has a record of each step."""

    def __init__(self, options, ranks, sampler, control):
        self.options, self.ranks, self.sampler, self.control = options, ranks, sampler, control
        self.history = []

    def all(self, what, *arguments):
        """Calls the method on every rank."""
        self.ranks.told((what, arguments))
        return getattr(self.ranks, what)(*arguments)

    def ask_for_samples(self):
        prompts = torch.tensor([random.randrange(SYMBOLS) for _ in range(PROMPTS)]).repeat_interleave(SAMPLES)
        self.sampler.ask("sample", prompts)

    def run(self):
        """Ends after the steps, or where the alarm finds a stale engine."""
        self.sampler.wait_attached()
        self.all("refit", 0)
        for version in range(1, self.options.steps + 1):
            if version == 1 or not self.options.off_policy:
                self.ask_for_samples()
                tokens, sampled, versions = self.sampler.answer()
            else:
                tokens, sampled, versions = following
            if version - 1 - versions.min() > self.options.off_policy:
                raise AssertionError(f"step {version} got tokens of version {versions.min()}, which is older than the bound allows")
            if self.options.off_policy:
                self.ask_for_samples()  # they are sampled while the ranks step and refit
            self.all("step", tokens, sampled)
            result = self.all("refit", version, version == self.options.stale)
            if self.options.off_policy:
                following = self.sampler.answer()
            record = dict(
                reward=rewards_of(tokens).mean().item(), refit_ms=result.seconds * 1e3, tokens=count_of(versions), **self.compare(version, tokens)
            )
            self.history.append(record)
            print_step(version, record)
            if record["kl"] > record["limit"]:
                return

    def compare(self, version, tokens):
        """The KL of the engine to the trainer over the step's tokens, that of the control, the limit that follows, and the pause."""
        self.sampler.ask("score", tokens)
        ours = self.all("score", tokens)
        theirs, at = self.sampler.answer()
        assert at == version, f"the engine serves version {at}, not {version}"
        control = kl.measure(ours, self.control.score(self.all("checkpoint"), tokens)).kl
        try:
            measured = kl.check(ours, theirs, control=control, what=f"the sampler at version {version}")
        except kl.Diverged as diverged:
            print(f"ALARM: {diverged}", flush=True)
            measured = diverged.measured
        self.sampler.ask("pause", version)
        return dict(kl=measured.kl, control=control, limit=kl.limit_of(control=control), pause_ms=self.sampler.answer())


def count_of(versions):
    """Counts a batch's tokens by version."""
    return {int(version): int(count) for version, count in zip(*versions.unique(return_counts=True))}


def print_step(version, record):
    mixed = " ".join(f"v{version}:{count}" for version, count in record["tokens"].items())
    print(
        f"version {version:3}  reward {record['reward']:.3f}  KL {record['kl']:.2e} (control {record['control']:.2e})  "
        f"refit {record['refit_ms']:6.1f} ms  pause {record['pause_ms']:6.1f} ms  tokens {mixed}",
        flush=True,
    )


def plot(history, key, label):
    """A line of block characters, a character a step."""
    values = [record[key] for record in history]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    marks = "".join("▁▂▃▄▅▆▇█"[int((value - low) / span * 7.999)] for value in values)
    print(f"{label:12} {marks}  {low:.3g} to {high:.3g}")


def summary_of(history):
    """Rewards are means of three steps, KLs the largest of all steps, times medians."""
    diverged = [version for version, record in enumerate(history, 1) if record["kl"] > record["limit"]]
    return {
        "steps": len(history),
        "reward_first": mean(record["reward"] for record in history[:3]),
        "reward_last": mean(record["reward"] for record in history[-3:]),
        "kl_max": max(record["kl"] for record in history),
        "kl_control": max(record["control"] for record in history),
        "refit_ms": median(record["refit_ms"] for record in history),
        "pause_ms": median(record["pause_ms"] for record in history),
        "alarm_step": diverged[0] if diverged else None,
    }


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ranks", type=int, default=2, help="FSDP2 processes of the trainer; a divisor of 16 (%(default)s)")
    parser.add_argument("--engine", choices=("auto", *KINDS), default="auto", help="auto: vllm where it is, with refitd's plugin")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--off-policy", action="store_true", help="sample the next batch during the step: one version late at most")
    parser.add_argument("--stale", type=int, metavar="STEP", help="the refit of this step delivers the weights before it")
    parser.add_argument("--fail", type=int, metavar="RANK", help=argparse.SUPPRESS)  # for tests: this rank fails when all is done
    parser.add_argument("--json", action="store_true", help="the last line is JSON: steps, reward_first, reward_last, kl_max, ...")
    options = parser.parse_args()
    if options.ranks < 1 or PROMPTS % options.ranks:
        parser.error(f"--ranks: {options.ranks} does not divide {PROMPTS}")
    why = why_no_vllm()
    if options.engine == "auto":
        options.engine = "vllm" if why is None else "torch"
    elif options.engine == "vllm" and why is not None:
        parser.error(f"--engine vllm: {why}")
    return options


def main():
    options = parse()
    random.seed(0)
    group = f"rl-loop-{os.getpid()}"
    _, sampler_kind, control_kind, write = KINDS[options.engine]
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="rl-loop-"))
        write(folder)
        socket = os.environ.get("REFITD_SOCKET") or stack.enter_context(testing.daemon()).socket
        sampler = sampler_kind(socket, group, folder)
        stack.callback(sampler.close)
        control = control_kind(folder)
        stack.callback(control.close)
        context = multiprocessing.get_context("spawn")
        others = [context.Process(target=run_rank, args=(rank, options, socket, group, folder), daemon=True) for rank in range(1, options.ranks)]
        for process in others:
            process.start()
            stack.callback(process.kill)
        ranks = Ranks(0, options, socket, group, folder)
        loop = Loop(options, ranks, sampler, control)
        try:
            loop.run()
        except Exception as error:
            # A rank's own error is printed by its process: this one may only tell that the rank is gone.
            raise RuntimeError(f"the loop failed; statuses of the other ranks: {[process.exitcode for process in others]}") from error
        ranks.told(None)
        ranks.close()
        check_ended(others)
    for key, label in (("reward", "reward"), ("kl", "KL"), ("control", "KL control"), ("refit_ms", "refit ms"), ("pause_ms", "pause ms")):
        plot(loop.history, key, label)
    summary = {**summary_of(loop.history), "engine": options.engine, "ranks": options.ranks}
    print(json.dumps(summary) if options.json else summary)
    return ALARM if summary["alarm_step"] is not None else 0


if __name__ == "__main__":
    sys.exit(main())
