"""A real SGLang engine as a program, with the commands of engine_program.py.

usage: sglang_program.py MODEL OPTIONS     OPTIONS: JSON {"llm": {...}, "follow": {...} or null}
"""

from __future__ import annotations

from typing import Any

from engine_program import FOLLOW_SECONDS, PROMPTS, TOKENS, serve_commands

# SGLang 0.5.23 needs these settings to run on a CPU that has no AMX.
ON_A_CPU = dict(
    device="cpu", attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True, max_total_tokens=4096,
    context_length=512, log_level="warning",
)  # fmt: skip


class Program:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import refitd.integrations.sglang
        import sglang
        from refitd.integrations.sglang import Controls

        self.engine = sglang.Engine(model_path=model, **ON_A_CPU, **options["llm"])
        self.controls = Controls(self.engine.tokenizer_manager, self.engine.loop.run_until_complete, "reset")
        self.weights: Any = None
        self.adapter: Any = None
        if options["follow"] is not None:
            self.weights = refitd.integrations.sglang.follow(self.engine, options["follow"])

    def between_calls(self) -> None:
        self.weights.poll(FOLLOW_SECONDS)

    def generate(self, adapter: str | None = None) -> list[list[int]]:
        """Greedy tokens, of the base model or with an adapter."""
        how = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        options = {} if adapter is None else {"lora_path": [adapter] * len(PROMPTS)}
        return [answer["output_ids"] for answer in self.engine.generate(PROMPTS, how, **options)]

    def load_adapter(self, name: str, folder: str) -> bool:
        """SGLang's own way: from files."""
        return bool(self.engine.load_lora_adapter(name, folder).success)

    def follow_adapter(self, folder: str, options: dict[str, Any]) -> None:
        import refitd.integrations.sglang

        self.adapter = refitd.integrations.sglang.follow_adapter(self.engine, folder, **options)

    def wait_adapter(self, version: int) -> int:
        return int(self.adapter.wait(version, 120))

    def spans(self) -> list[list[Any]]:
        """Versions of the tokens of one answer, as [version, first, end]."""
        found = self.engine.generate("abc", {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True})["meta_info"]["weight_versions"]
        return [[span["version"], span["start"], span["end"]] for span in found]

    def wait(self, version: int, seconds: float) -> int:
        return int(self.weights.wait(version, seconds))

    def poll(self, seconds: float) -> dict[str, Any]:
        self.weights.poll(seconds)
        found: dict[str, Any] = self.weights.driver.status()
        return found

    def release(self, tags: list[str] | None) -> None:
        self.engine.release_memory_occupation(tags)

    def resume(self, tags: list[str] | None) -> None:
        self.engine.resume_memory_occupation(tags)

    def parameters(self) -> list[dict[str, Any]]:
        return [rank["digests"] for rank in self.controls.ask({"do": "status", "digests": True})]

    def status(self) -> list[dict[str, Any]]:
        return self.controls.ask({"do": "status"})


if __name__ == "__main__":
    serve_commands(Program)
