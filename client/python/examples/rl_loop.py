"""Reinforcement learning that proves its refits: GRPO teaches a tiny decoder to count, and an engine in another process samples.

    python rl_loop.py                            # on policy: sample, step, refit, and so on
    python rl_loop.py --off-policy               # sampling goes on while the trainer steps and refits: at most one version late
    python rl_loop.py --stale 20                 # the refit of step 20 delivers the weights before: the alarm must find it
    python rl_loop.py --json                     # the last line is JSON

The trainer's model is in float32, with its projections apart; the engine's is in bfloat16, with them fused. Both begin with the same
random weights. After each refit the trainer and the engine score the same tokens: refitd.kl.check compares. Its control is a
second engine model, in the trainer's process, that loads each step's checkpoint without refitd.

Uses the daemon at REFITD_SOCKET where that is set, else a private one. Exit status: 0; 3 where the alarm found a stale engine.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from statistics import mean, median

import torch
from tiny_model import DTYPE, EngineModel, TrainerModel, checkpoint_manifest

import refitd
from refitd import kl, testing

SYMBOLS = 16  # the task's part of the vocabulary
LENGTH = 6  # tokens that follow the prompt's single token
PROMPTS, SAMPLES = 16, 8  # a step's groups, and the completions in each
SECONDS = 120  # for any answer of the engine
ALARM = 3


def log_probabilities(model, tokens):
    """Of each token but the first, given those before; [batch, LENGTH]."""
    logits = model(tokens[:, :-1])[..., :SYMBOLS].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


def rewards_of(tokens):
    """1 for each token that is the successor of the one before, modulo SYMBOLS; [batch, LENGTH]."""
    return ((tokens[:, :-1] + 1) % SYMBOLS == tokens[:, 1:]).float()


# ---- the engine's process ----


class Weights:
    """Keeps decoding steps and updates apart: an update waits for the end of a step, and steps wait for the update (a `keep` pause)."""

    def __init__(self, engine):
        self.engine = engine
        self.lock = threading.Lock()
        self.version = 0
        self.pauses_ms = {}  # by version
        self.whole = True
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        held, began = False, 0.0
        for event in self.engine:
            if isinstance(event, refitd.Prepare):
                held = self.lock.acquire(timeout=event.remaining_seconds)
                began = time.perf_counter()
                with contextlib.suppress(refitd.FailedPrecondition):  # the update may have ended meanwhile
                    event.ready() if held else event.fail("a decoding step did not end")
            elif isinstance(event, (refitd.Committed, refitd.Aborted)):
                if isinstance(event, refitd.Committed):
                    self.version, self.whole = event.version, True
                    self.pauses_ms[event.version] = (time.perf_counter() - began) * 1e3
                elif event.dirty:
                    self.whole = False
                if held and self.whole:
                    self.lock.release()
                    held = False


@torch.no_grad()
def sample(model, weights, prompts):
    """Completions: tokens, their log-probabilities, and the version that each token was sampled with."""
    tokens = prompts[:, None]
    scores, versions = [], []
    for _ in range(LENGTH):
        with weights.lock:
            logits = model(tokens)[:, -1, :SYMBOLS].float()
            versions.append(weights.version)
        distribution = torch.distributions.Categorical(logits=logits)
        chosen = distribution.sample()
        scores.append(distribution.log_prob(chosen))
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    return tokens, torch.stack(scores, dim=1), torch.tensor(versions)


@torch.no_grad()
def score(model, weights, tokens):
    with weights.lock:
        return log_probabilities(model, tokens), weights.version


def run_engine(pipe, socket, group, state):
    """Answers the trainer's questions, sampling and scoring, until the pipe closes."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = EngineModel().to(DTYPE).requires_grad_(False)
    model.load_weights(state.items())
    refitd.adopt(model)
    with refitd.Engine(group, instance="sampler", socket=socket, device="host", wait_seconds=SECONDS) as engine:
        engine.register(refitd.capture(model.load_weights, checkpoint_manifest()))
        weights = Weights(engine)
        pipe.send("registered")
        while (question := pipe.recv()) is not None:
            what, argument = question
            if what == "sample":
                pipe.send(sample(model, weights, argument))
            elif what == "score":
                pipe.send(score(model, weights, argument))
            else:
                pipe.send(weights.pauses_ms.get(argument))


class Sampler:
    """The trainer's end of the pipe. Questions are answered in their order; `ask` does not wait."""

    def __init__(self, socket, group, state):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=run_engine, args=(other, socket, group, state), daemon=True)
        self._process.start()
        other.close()

    def answer(self):
        if not self._pipe.poll(SECONDS):
            raise TimeoutError(f"the engine's process did not answer within {SECONDS} s")
        return self._pipe.recv()  # EOFError: the process ended

    def ask(self, *question):
        self._pipe.send(question)

    def close(self):
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(SECONDS)
        self._process.kill()


# ---- the trainer's process ----


def checkpoint(model):
    return {name: parameter.detach().to(DTYPE) for name, parameter in model.state_dict().items()}


def step(model, optimizer, tokens, sampled):
    """One GRPO step: advantages within each group, importance from the engine's own log-probabilities, clipped. Returns the reward."""
    rewards = rewards_of(tokens).view(PROMPTS, SAMPLES, LENGTH)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    advantages = advantages.view(-1, LENGTH)
    ratio = (log_probabilities(model, tokens) - sampled).exp()
    loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return rewards.mean().item()


class Loop:
    """What happens at each version, 1 for the first step's. `history` has a record of each step."""

    def __init__(self, options, trainer, sampler, model):
        self.options, self.trainer, self.sampler, self.model = options, trainer, sampler, model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate)
        self.control_model = EngineModel().to(DTYPE).requires_grad_(False)
        self.history = []

    def ask_for_samples(self):
        prompts = torch.tensor([random.randrange(SYMBOLS) for _ in range(PROMPTS)]).repeat_interleave(SAMPLES)
        self.sampler.ask("sample", prompts)

    def run(self):
        """Ends after the steps, or where the alarm finds a stale engine."""
        for version in range(1, self.options.steps + 1):
            if version == 1 or not self.options.off_policy:
                self.ask_for_samples()
                tokens, sampled, versions = self.sampler.answer()
            else:
                tokens, sampled, versions = following
            if version - 1 - versions.min() > self.options.off_policy:
                raise AssertionError(f"step {version} got tokens of version {versions.min()}, which is older than the bound allows")
            if self.options.off_policy:
                self.ask_for_samples()  # they are sampled while this process steps and refits
            before = {name: parameter.detach().clone() for name, parameter in self.model.state_dict().items()}
            reward = step(self.model, self.optimizer, tokens, sampled)
            result = self.refit(version, before)
            if self.options.off_policy:
                following = self.sampler.answer()
            record = dict(reward=reward, refit_ms=result.seconds * 1e3, tokens=count_of(versions), **self.compare(version, tokens))
            self.history.append(record)
            print_step(version, record)
            if record["kl"] > record["limit"]:
                return

    def refit(self, version, before):
        """Installs the weights. With --stale, those before the step: as a loop would do that exports too early."""
        if version != self.options.stale:
            return self.trainer.refit(version)
        now = {name: parameter.clone() for name, parameter in self.model.state_dict().items()}
        self.model.load_state_dict(before)
        result = self.trainer.refit(version)
        self.model.load_state_dict(now)
        return result

    @torch.no_grad()
    def compare(self, version, tokens):
        """The KL of the engine to the trainer over the step's tokens, that of the control, the limit that follows, and the pause."""
        self.sampler.ask("score", tokens)
        theirs, at = self.sampler.answer()
        assert at == version, f"the engine serves version {at}, not {version}"
        ours = log_probabilities(self.model, tokens)
        self.control_model.load_weights(checkpoint(self.model).items())
        control = kl.measure(ours, log_probabilities(self.control_model, tokens)).kl
        try:
            measured = kl.check(ours, theirs, control=control, what=f"the sampler at version {version}")
        except kl.Diverged as diverged:
            print(f"ALARM: {diverged}", flush=True)
            measured = diverged.measured
        self.sampler.ask("pause", version)
        return dict(kl=measured.kl, control=control, limit=kl.limit_of(control=control), pause_ms=self.sampler.answer())


def count_of(versions):
    """How many tokens of each version a batch has."""
    return {int(version): int(count) * PROMPTS * SAMPLES for version, count in zip(*versions.unique(return_counts=True))}


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


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--off-policy", action="store_true", help="sample the next batch during the step: one version late at most")
    parser.add_argument("--stale", type=int, metavar="STEP", help="the refit of this step delivers the weights before it")
    parser.add_argument("--json", action="store_true", help="the last line is JSON: steps, reward_first, reward_last, kl_max, ...")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    group = f"rl-loop-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        socket = os.environ.get("REFITD_SOCKET") or stack.enter_context(testing.daemon()).socket
        model = TrainerModel()
        refitd.adopt(model)
        trainer = stack.enter_context(refitd.Trainer(group, socket=socket, device="host", min_instances=1))
        trainer.register(model, dtype=DTYPE)
        sampler = Sampler(socket, group, checkpoint(model))
        stack.callback(sampler.close)
        assert sampler.answer() == "registered"
        loop = Loop(options, trainer, sampler, model)
        loop.run()
    for key, label in (("reward", "reward"), ("kl", "KL"), ("control", "KL control"), ("refit_ms", "refit ms"), ("pause_ms", "pause ms")):
        plot(loop.history, key, label)
    summary = summary_of(loop.history)
    print(json.dumps(summary) if options.json else summary)
    return ALARM if summary["alarm_step"] is not None else 0


if __name__ == "__main__":
    sys.exit(main())
