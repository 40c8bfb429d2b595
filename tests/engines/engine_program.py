"""A real vLLM engine as a program: takes commands as lines of JSON, answers with lines that begin with "REFITD ".

usage: engine_program.py MODEL OPTIONS     OPTIONS: JSON {"llm": {...}, "follow": {...} or null, "follows_between_calls": true or false, "plant": {...}}
"""

from __future__ import annotations

import gc
import json
import os
import queue
import sys
import threading
import traceback
from typing import Any

# Longer than a block of vLLM's cache on a CPU, so that the prefix cache matters.
PROMPTS = ["Hello refit", "abc", "the same long beginning " * 8]
TOKENS = 12
# How long an engine that follows between its calls looks for an update before it looks for the next call.
FOLLOW_SECONDS = 0.02


def parameters_of(worker: Any) -> dict[str, Any]:
    from refitd.layout.memory import digest

    model = worker.model_runner.get_model()
    held = {name: t for name, t in (*model.named_parameters(), *model.named_buffers())}
    draft = getattr(worker.model_runner, "get_draft_model", lambda: None)()
    if draft is not None:
        own = {id(t) for t in held.values()}  # what vLLM lets both share is the served model's
        held.update({f"draft.{name}": t for name, t in (*draft.named_parameters(), *draft.named_buffers()) if id(t) not in own})
    return {name: [str(t.dtype), list(t.shape), digest(t)] for name, t in held.items()}


def status_of(worker: Any) -> dict[str, Any]:
    status: dict[str, Any] = worker.weight_transfer_engine.status()
    return status


def replace_parameter(worker: Any, name: str, rows: int | None) -> None:
    import torch

    model = worker.model_runner.get_model()
    module, _, own = name.rpartition(".")
    old = model.get_parameter(name)
    replaced = torch.nn.Parameter(2 * old.detach()[:rows], requires_grad=False)
    replaced.__dict__.update(old.__dict__)
    setattr(model.get_submodule(module), own, replaced)


def plant_copy(model: Any, name: str, by_version: bool) -> None:
    """Lets a norm compute with a copy of its weight that it makes at its first forward, and keeps for as long as the weight's address and,
    `by_version`, its version stay."""
    import torch

    layer = model.get_submodule(name)
    kept: dict[Any, Any] = {}

    def forward(x: Any, residual: Any = None) -> Any:
        key = layer.weight.data_ptr(), by_version and layer.weight._version
        if key not in kept:
            kept.clear()
            kept[key] = layer.weight.detach().float()
        given = (x if residual is None else x + residual).float()
        made = given * torch.rsqrt(given.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon) * kept[key]
        return made.to(x.dtype) if residual is None else (made.to(x.dtype), given.to(x.dtype))

    layer.forward = forward


def plant_no_evidence(model: Any) -> None:
    """Makes the adapter take every module for one that post-processing left as it was."""
    from refitd.serving import evidence

    object.__setattr__(model, evidence.EVIDENCE_ATTRIBUTE, {id(layer): {} for layer in model.modules()})


def plant_sinks_copy(model: Any, name: str) -> None:
    """Lets an attention layer compute with a copy of its sinks."""
    impl = model.get_submodule(name).impl
    impl.sinks = impl.sinks.detach().clone()


def plant_no_derivation(model: Any, name: str) -> None:
    """Keeps an attention layer from making its copies of other modules' weights anew."""
    model.get_submodule(name).process_weights_after_loading = lambda *_: None


def plant_change(model: Any, name: str, rank: int) -> None:
    """Changes a parameter of one tensor-parallel rank."""
    import torch
    from vllm.distributed import get_tensor_model_parallel_rank

    if get_tensor_model_parallel_rank() == rank:
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] += 1.0


def plant_other_scale(model: Any, name: str) -> None:
    """Lets a linear layer that quantises by channels make one scale a little greater."""
    method = model.get_submodule(name).quant_method
    original = method.process_weights_after_loading

    def process(layer: Any) -> None:
        original(layer)
        layer.weight_scale.data[3] *= 1 + 2**-22

    method.process_weights_after_loading = process


PLANTS = {"change": plant_change, "copy": plant_copy, "no evidence": plant_no_evidence, "sinks copy": plant_sinks_copy, "no derivation": plant_no_derivation, "other scale": plant_other_scale}


def plant(worker: Any, name: str, arguments: list[Any]) -> None:
    PLANTS[name](worker.model_runner.get_model(), *arguments)


def _step(token: int, found: dict[int, Any]) -> list[Any]:
    first, second = sorted((entry.logprob for entry in found.values()), reverse=True)[:2]
    return [token, found[token].logprob, first - second]


class Program:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.platforms import current_platform

        self._on_gpu = current_platform.is_cuda()
        self.llm = LLM(model=model, max_model_len=512, max_num_seqs=8, seed=0, **options["llm"])
        self.weights: Any = None
        for name, arguments in options.get("plant", {}).items():
            self.llm.collective_rpc(plant, args=(name, arguments))
        if options["follow"] is not None:
            import refitd.integrations.vllm

            self.weights = refitd.integrations.vllm.follow(self.llm, options["follow"])

    def between_calls(self) -> None:
        self.weights.poll(FOLLOW_SECONDS)

    def generate(self) -> list[list[Any]]:
        """For each of the prompts what support.Tokens has."""
        return self._tokens(PROMPTS)

    def adapted(self, folder: str) -> list[list[Any]]:
        """As generate(), with an adapter that vLLM reads from its files."""
        from vllm.lora.request import LoRARequest

        self._files = getattr(self, "_files", 0) + 1
        return self._tokens(PROMPTS, LoRARequest(f"file-{self._files}", self._files, folder))

    def follow_adapters(self, options: dict[str, Any]) -> None:
        from refitd.integrations.vllm import adapters

        self.adapters = adapters.follow(self.llm, **options)

    def adapter(self, name: str, *arguments: Any) -> Any:
        """Calls a method of the adapters that the engine follows. The last argument may be a dict with options."""
        *plain, options = arguments if arguments and isinstance(arguments[-1], dict) else (*arguments, {})
        return getattr(self.adapters, name)(*plain, **options)

    def with_adapter(self, name: str, version: int | None = None) -> list[list[Any]]:
        """As generate(), with an adapter that the engine follows."""
        return self._tokens(PROMPTS, self.adapters.request(name, version))

    def held_paths(self) -> list[str]:
        """The folders of the adapters' versions that requests can name."""
        return [path.rpartition("/")[2] for path in self.adapters._by_path]

    def loaded_adapters(self) -> list[int]:
        """vLLM's ids of the adapters that its ranks hold."""
        return sorted(self.llm.llm_engine.list_loras())

    def generate_one_by_one(self) -> list[list[Any]]:
        return [self._tokens([prompt])[0] for prompt in PROMPTS]

    def _tokens(self, prompts: list[str], lora_request: Any = None) -> list[list[Any]]:
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=2 if self._on_gpu else None)
        outputs = [out.outputs[0] for out in self.llm.generate(prompts, how, use_tqdm=False, lora_request=lora_request)]
        if not self._on_gpu:
            return [list(output.token_ids) for output in outputs]
        return [[_step(token, found) for token, found in zip(output.token_ids, output.logprobs)] for output in outputs]

    def cached(self, prompt: str, salt: str | None = None) -> list[Any]:
        """The tokens after the prompt, and how many of the prompt's tokens came from the prefix cache. `salt`: the request's own."""
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        given = {"prompt": prompt, **({} if salt is None else {"cache_salt": salt})}
        (found,) = self.llm.generate([given], how, use_tqdm=False)
        return [list(found.outputs[0].token_ids), found.num_cached_tokens]

    def drafted(self) -> list[int]:
        """How many tokens the draft model has proposed until now, and how many of these were taken. Needs the option disable_log_stats=False."""
        names = ("vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens")
        found = {metric.name: metric.value for metric in self.llm.get_metrics() if metric.name in names}
        return [found[name] for name in names]

    def wait(self, version: int, seconds: float) -> int:
        return int(self.weights.wait(version, seconds))

    def poll(self, seconds: float) -> dict[str, Any]:
        self.weights.poll(seconds)
        found: dict[str, Any] = self.weights.driver.status()
        return found

    def sleep(self, level: int) -> None:
        self.llm.sleep(level)

    def wake_up(self) -> None:
        self.llm.wake_up()

    def attach(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def take(self, version: int) -> None:
        """Makes the calls that a trainer makes by HTTP at a server."""
        from refitd.integrations.vllm import versions

        self.llm.start_weight_update(**versions.start_arguments(self.llm.start_weight_update))
        self.llm.update_weights({"update_info": {"version": version}})
        self.llm.finish_weight_update(*versions.finish_arguments(self.llm.finish_weight_update, version))
        self.llm.reset_prefix_cache()

    def replace(self, name: str, rows: int | None) -> None:
        """Replaces a parameter by a new one with twice its values, of all its rows or so many, as vLLM's `replace_parameter` does."""
        self.llm.collective_rpc(replace_parameter, args=(name, rows))

    def plant(self, name: str, arguments: list[Any]) -> None:
        self.llm.collective_rpc(plant, args=(name, arguments))

    def parameters(self) -> list[dict[str, Any]]:
        return list(self.llm.collective_rpc(parameters_of))

    def status(self) -> list[dict[str, Any]]:
        return list(self.llm.collective_rpc(status_of))

    def memory(self) -> dict[str, int]:
        """Bytes of this process that are its own, without what it shares with the daemon; those on its GPU; and how many tensors it has."""
        with open("/proc/self/status") as file:
            lines = dict(line.split(":", 1) for line in file)
        import torch

        gc.collect()
        tensors = sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return {"bytes": int(lines["RssAnon"].split()[0]) * 1024, "gpu_bytes": torch.cuda.memory_allocated(), "tensors": tensors}

    def sleep_mode_memory(self) -> dict[str, int]:
        """Bytes that are free on the GPU, and those that vLLM's allocator of sleep mode has mapped while it is awake."""
        import torch
        from vllm.device_allocator.cumem import CuMemAllocator

        return {"free": torch.cuda.mem_get_info()[0], "allocated": CuMemAllocator.get_instance().get_current_usage()}


def answer(what: dict[str, Any]) -> None:
    print("REFITD " + json.dumps(what), flush=True)


def read_lines() -> queue.Queue[str]:
    """The lines of standard input, as they come; "" is its end."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, daemon=True).start()
    return lines


def serve_commands(kind: Any) -> None:
    """Makes a program of `kind`, and calls its methods as the lines on standard input say, until the line that says "end". A program that
    follows between calls has its method `between_calls` called again and again while no line is there."""
    try:
        options = json.loads(sys.argv[2])
        program = kind(sys.argv[1], options)
    except BaseException as error:
        traceback.print_exc()
        answer({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)
    answer({"result": "started"})
    lines = read_lines()
    while True:
        try:
            while options.get("follows_between_calls") and lines.empty():
                program.between_calls()
            line = lines.get()
            command = json.loads(line) if line else {"call": "end"}
            if command["call"] == "end":
                break
            answer({"result": getattr(program, command["call"])(*command["arguments"])})
        except Exception as error:
            traceback.print_exc()
            answer({"error": f"{type(error).__name__}: {error}"})
    answer({"result": "ended"})
    sys.stderr.flush()
    os._exit(0)  # engines leave threads behind that keep the interpreter


if __name__ == "__main__":
    serve_commands(Program)
