"""A real SGLang engine as a program, with the commands of engine_program.py.

usage: sglang_program.py MODEL OPTIONS     OPTIONS: JSON {"llm": {...}, "follow": {...} or null}
"""

from __future__ import annotations

from typing import Any

from engine_program import PROMPTS, TOKENS, serve_commands

# What SGLang 0.5.23 needs to run on a CPU that has no AMX.
ON_A_CPU = dict(
    device="cpu", attention_backend="torch_native", sampling_backend="pytorch", disable_cuda_graph=True, max_total_tokens=4096,
    context_length=512, log_level="warning",
)  # fmt: skip


class Program:
    def __init__(self, model: str, options: dict[str, Any]) -> None:
        import refitd.sglang
        import sglang
        from refitd.sglang.controls import Controls

        self.engine = sglang.Engine(model_path=model, **ON_A_CPU, **options["llm"])
        self.controls = Controls(self.engine.tokenizer_manager, self.engine.loop.run_until_complete, "reset")
        self.weights: Any = None
        if options["follow"] is not None:
            self.weights = refitd.sglang.follow(self.engine, **options["follow"])

    def generate(self) -> list[list[int]]:
        how = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        return [answer["output_ids"] for answer in self.engine.generate(PROMPTS, how)]

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

    def parameters(self) -> list[dict[str, Any]]:
        return [rank["digests"] for rank in self.controls.ask({"do": "status", "digests": True})]

    def status(self) -> list[dict[str, Any]]:
        return self.controls.ask({"do": "status"})


if __name__ == "__main__":
    serve_commands(Program)
