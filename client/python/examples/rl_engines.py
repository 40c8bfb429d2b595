"""Engines that sample for rl_loop.py, behind one interface, and controls, which score with checkpoints that they load themselves.

`TorchSampler` is a plain torch model in a process of its own. `VllmSampler` is vLLM's OpenAI server with refitd's plugin, as a user
starts it: nothing here tells it of versions. Both begin with random weights and get version 0 from the trainer.
"""

import collections
import concurrent.futures
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import signal
import socket as sockets
import subprocess
import sys
import threading
import time
import urllib.request

import torch
from tiny_model import DTYPE, EngineModel, TrainerModel, checkpoint_manifest

import refitd

SYMBOLS = 16  # the task's part of the vocabulary
LENGTH = 6  # tokens that follow the prompt's single token
SECONDS = 300  # for any answer of an engine
START_SECONDS = 600  # for vLLM to load


def log_probabilities(model, tokens):
    """The log-probability of each token but the first, given those before; [batch, LENGTH]."""
    logits = model(tokens[:, :-1])
    logits = getattr(logits, "logits", logits)[..., :SYMBOLS].float()
    return logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Child:
    """A process that answers questions over a pipe, in their order; `ask` does not wait."""

    def __init__(self, run, *arguments):
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=run, args=(other, *arguments), daemon=True)
        self._process.start()
        other.close()

    def ask(self, *question):
        self._pipe.send(question)

    def answer(self, seconds=SECONDS):
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"the engine's process did not answer within {seconds} s")
        return self._pipe.recv()  # EOFError: the process ended

    def close(self):
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


# ---- a plain torch engine ----


class Weights:
    """Keeps decoding steps and updates apart: an update waits for the end of a step, and steps wait for the update (a `keep` pause)."""

    def __init__(self, engine):
        self.engine = engine
        self.lock = threading.Lock()
        self.version = None
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
            versions.append(torch.full((len(tokens),), weights.version))
        distribution = torch.distributions.Categorical(logits=logits)
        chosen = distribution.sample()
        scores.append(distribution.log_prob(chosen))
        tokens = torch.cat((tokens, chosen[:, None]), dim=1)
    return tokens, torch.stack(scores, dim=1), torch.stack(versions, dim=1)


@torch.no_grad()
def score(model, weights, tokens):
    with weights.lock:
        return log_probabilities(model, tokens), weights.version


def run_torch_engine(pipe, socket, group):
    """Answers the trainer's questions, sampling and scoring, until the pipe closes."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = EngineModel().to(DTYPE).requires_grad_(False)
    refitd.adopt(model)
    with refitd.Engine(group, instance="sampler", socket=socket, device="host", connect=refitd.Connect(wait_seconds=SECONDS)) as engine:
        engine.register(refitd.capture(model.load_weights, checkpoint_manifest()))
        weights = Weights(engine)
        while (question := pipe.recv()) is not None:
            what, argument = question
            if what == "sample":
                pipe.send(sample(model, weights, argument))
            elif what == "score":
                pipe.send(score(model, weights, argument))
            else:
                pipe.send(weights.pauses_ms.get(argument))


class TorchSampler(Child):
    """The questions are ("sample", prompts), ("score", tokens) and ("pause", version)."""

    def __init__(self, socket, group, folder):
        super().__init__(run_torch_engine, socket, group)

    def wait_attached(self):
        """Does nothing, because the trainer's first refit waits for the engine."""


class TorchControl:
    """A model of the engine's kind that loads checkpoints without refitd."""

    def __init__(self, folder):
        self._model = EngineModel().to(DTYPE).requires_grad_(False)

    @torch.no_grad()
    def score(self, checkpoint, tokens):
        self._model.load_weights(checkpoint.items())
        return log_probabilities(self._model, tokens)

    def close(self):
        pass


# ---- vLLM ----


def why_no_vllm():
    """Says why vLLM's server can't follow the trainer here; None where it can: from 0.26 on it takes plugins with routes of their own."""
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    if importlib.util.find_spec("vllm") is None or "refitd" not in plugins.names:
        return "vLLM and refitd's plugin are not installed both"
    version = importlib.metadata.version("vllm")
    return None if [int(part) for part in version.split(".")[:2]] >= [0, 26] else f"vLLM {version} is older than 0.26"


def qwen3_config():
    import transformers

    return transformers.Qwen3Config(
        vocab_size=SYMBOLS, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        intermediate_size=160, max_position_embeddings=64, tie_word_embeddings=False, bos_token_id=None, eos_token_id=None,
        pad_token_id=None,
    )  # fmt: skip


def qwen3():
    import transformers

    return transformers.Qwen3ForCausalLM(qwen3_config())


def write_checkpoint(folder):
    """A checkpoint of random weights, and a tokenizer that knows the symbols as numbers, for vLLM to start with."""
    import transformers
    from tokenizers import Tokenizer, models

    transformers.utils.logging.disable_progress_bar()
    words = Tokenizer(models.WordLevel({str(i): i for i in range(SYMBOLS)}, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    transformers.Qwen3ForCausalLM(qwen3_config()).to(DTYPE).save_pretrained(folder)


VLLM_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
}


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class VllmSampler:
    """vLLM's server, whose requests wait through an update (`keep`) and tell the version of each token."""

    def __init__(self, socket, group, folder):
        self._log = os.path.join(folder, "vllm.log")
        with sockets.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = [
            sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", folder, "--served-model-name", "policy", "--host", "127.0.0.1",
            "--port", str(self._port), "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "64", "--max-num-seqs", "128",
            "--load-format", "refitd", "--weight-transfer-config", '{"backend": "refitd"}', "--no-enable-prefix-caching",
        ]  # fmt: skip
        environment = {
            **os.environ, **VLLM_ENVIRONMENT, "VLLM_PLUGINS": "refitd", "REFITD_GROUP": group, "REFITD_INSTANCE": "sampler",
            "REFITD_SOCKET": socket,
        }  # fmt: skip
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True,
                preexec_fn=die_with_parent,
            )  # fmt: skip
        self._asking = concurrent.futures.ThreadPoolExecutor(1)  # one question after the other, as the torch engine's process does
        self._answers = collections.deque()

    def ask(self, what, argument):
        self._answers.append(self._asking.submit(getattr(self, f"_{what}"), argument))

    def answer(self, seconds=SECONDS):
        return self._answers.popleft().result(seconds)

    def _call(self, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", None if body is None else json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.loads(answer.read())

    def wait_attached(self):
        """Returns when the server has attached to the group."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(OSError):
                if self._call("/refitd/status")["attached"]:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                with open(self._log, errors="replace") as log:
                    raise RuntimeError(f"vLLM's server did not come up:\n{log.read()[-4000:]}")
            time.sleep(0.2)

    def _complete(self, prompts, **options):
        body = {"model": "policy", "prompt": prompts.tolist(), "temperature": 1.0, "ignore_eos": True, "return_token_ids": True, **options}
        choices = sorted(self._call("/v1/completions", body)["choices"], key=lambda choice: choice["index"])
        assert len(choices) == len(prompts), f"{len(choices)} answers to {len(prompts)} prompts"
        return choices

    def _sample(self, prompts):
        choices = self._complete(prompts[:, None], max_tokens=LENGTH, logprobs=0)
        tokens = torch.tensor([choice["token_ids"] for choice in choices])
        scores = torch.tensor([choice["logprobs"]["token_logprobs"] for choice in choices])
        return torch.cat((prompts[:, None], tokens), dim=1), scores, torch.tensor([versions_of(choice) for choice in choices])

    def _score(self, tokens):
        choices = self._complete(tokens, max_tokens=1, prompt_logprobs=0)
        scores = [
            [told[str(token)]["logprob"] for token, told in zip(sequence[1:], choice["prompt_logprobs"][1:])]
            for sequence, choice in zip(tokens.tolist(), choices)
        ]
        # A prompt has no versions: they are those of the token that follows, which was computed in the same step.
        (version,) = {version for choice in choices for version in versions_of(choice)}
        return torch.tensor(scores), version

    def _pause(self, version):
        return self._call("/refitd/status")["last_pause_seconds"] * 1e3

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._asking.shutdown(cancel_futures=True)


def versions_of(choice):
    """The version of each token of a choice, from its spans."""
    return [span["version"] for span in choice["refitd_version"] for _ in range(span["start"], span["end"])]


def run_vllm_control(pipe, folder):
    """A vLLM of its own, which loads each checkpoint from its file, by vLLM's own reload."""
    log = os.open(os.path.join(folder, "control.log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(VLLM_ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_PLUGINS="")
    from safetensors.torch import save_file
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, enforce_eager=True, max_model_len=64, max_num_seqs=128, dtype="bfloat16", distributed_executor_backend="uni",
        enable_prefix_caching=False,
    )  # fmt: skip
    while (question := pipe.recv()) is not None:
        checkpoint, tokens = question
        save_file(checkpoint, os.path.join(folder, "model.safetensors"), metadata={"format": "pt"})
        llm.collective_rpc("reload_weights")
        llm.reset_prefix_cache()
        outputs = llm.generate(
            [{"prompt_token_ids": sequence} for sequence in tokens.tolist()], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False
        )
        scores = [
            [told[token].logprob for token, told in zip(sequence[1:], output.prompt_logprobs[1:])]
            for sequence, output in zip(tokens.tolist(), outputs)
        ]
        pipe.send(torch.tensor(scores))
    os._exit(0)  # vLLM leaves threads behind that keep the interpreter


class VllmControl(Child):
    def __init__(self, folder):
        super().__init__(run_vllm_control, folder)

    def score(self, checkpoint, tokens):
        self.ask({name: tensor.contiguous() for name, tensor in checkpoint.items()}, tokens)
        return self.answer(START_SECONDS)


# A kind's name gives the trainer's model, the engine, its control, and what writes the folder that both start from.
KINDS = {"torch": (TrainerModel, TorchSampler, TorchControl, lambda folder: None), "vllm": (qwen3, VllmSampler, VllmControl, write_checkpoint)}
