"""A LoRA adapter of an offline SGLang engine that follows a group of refitd, in memory. Written for SGLang 0.5.23.

    engine = sglang.Engine(model_path=BASE, enable_lora=True, max_lora_rank=16, lora_target_modules=[...])
    adapter = refitd.integrations.sglang.follow_adapter(engine, "adapter_folder", group="policy-adapter", instance="sglang-0")
    adapter.wait(1)
    engine.generate(prompts, lora_path=[adapter.name])

The trainer registers `refitd.integrations.lora.adapters(model)`. The daemon writes the adapter's tensors into memory of this process; `poll` and `wait`
hand them to SGLang's `load_lora_adapter_from_tensors`, in place of the version before. The base model stays what SGLang loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..._core.member import Connect
from ...errors import FailedPrecondition, InvalidArgument, Unimplemented
from ...serving.loop import EngineLoop
from ...serving.settings import read_manifest

_MATRICES = (".lora_A.weight", ".lora_B.weight")
_SCALING = ".lora_scaling"  # as refitd.integrations.lora.adapters names it


class AdapterFollower:
    """An adapter that follows a group, from `follow_adapter`. Not thread-safe: call it where you call the engine.

    `name`: the adapter's name in SGLang.
    """

    def __init__(
        self, engine: Any, adapter: str, *, group: str, instance: str, name: str = "policy", socket: str | None = None, connect: Connect = Connect()
    ) -> None:
        """`adapter`: a folder that PEFT's save_pretrained wrote; its tensors' names, dtypes and shapes are read, and its configuration.
        `group`, `instance`, `socket`, `connect`: as of refitd.Engine. Waits for daemon and group.

        Raises InvalidArgument and Unimplemented, naming the tensor, for what SGLang does not load from tensors, and what attaching raises.
        """
        import torch

        from ...layout.memory import empty

        self.name = name
        self._engine = engine
        self._config: dict[str, Any] = json.loads((Path(adapter) / "adapter_config.json").read_text())
        self._loaded: int | None = None
        self._tensors: dict[str, Any] = {}
        self._scalings: dict[str, Any] = {}
        for spec in read_manifest(adapter):
            matrix = next((ending for ending in _MATRICES if spec.name.endswith(ending)), None)
            if matrix is None:
                what = f"tensor '{spec.name}'"
                raise Unimplemented(f"{what} of {adapter} is no matrix of a linear layer's adapter: merge it (refitd.integrations.lora)", culprit=what)
            self._tensors[spec.name] = empty(spec.shape, spec.dtype, like="torch")
            scaling = spec.name.removesuffix(matrix) + _SCALING
            self._scalings.setdefault(scaling, empty(1, "float32", like="torch"))
        if not self._tensors:
            raise InvalidArgument(f"{adapter} has no tensor", culprit=adapter)
        names = {**self._tensors, **self._scalings}
        self._loop = EngineLoop(
            torch.nn.Module(), group=group, instance=instance, names=names, clean=False, socket=socket, connect=connect
        )

    @property
    def version(self) -> int | None:
        """The version that SGLang computes with; None: it has none."""
        return self._loaded

    def poll(self) -> int | None:
        """Loads the version that has come, unless SGLang has it already; returns the version that SGLang has then. Raises
        FailedPrecondition where SGLang refuses the version, and then has none, and Unimplemented for layers that scale differently."""
        if self._loop.version is None:
            return self._loaded
        with self._loop.use() as version:
            if version != self._loaded:
                self._load(version)
        return self._loaded

    def wait(self, version: int, timeout_seconds: float = 600.0) -> int:
        """Waits for `version` or a newer one, and loads it; returns it. Raises DeadlineExceeded, and as poll() does."""
        self._loop.wait(version, timeout_seconds)
        loaded = self.poll()
        assert loaded is not None
        return loaded

    def close(self) -> None:
        """Detaches. SGLang keeps the version that it has."""
        self._loop.close()

    def _load(self, version: int | None) -> None:
        config = self._scaled(self._config)
        if self._loaded is not None:
            self._loaded = None
            self._check(self._engine.unload_lora_adapter(self.name), "unload the version before of")
        # The tensors are copied for SGLang's processes within the call.
        answer = self._engine.load_lora_adapter_from_tensors(self.name, {name: t.clone() for name, t in self._tensors.items()}, config)
        self._check(answer, f"load version {version} of")
        self._loaded = version

    def _scaled(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration with the scaling that came: SGLang computes lora_alpha / r, the same for all layers."""
        values = {name: float(tensor) for name, tensor in self._scalings.items()}
        first = next(iter(values.values()))
        other = next((name for name, value in values.items() if value != first), None)
        if other is not None:
            what = f"tensor '{other}'"
            raise Unimplemented(f"{what} is {values[other]}, and another layer's scaling is {first}: SGLang has one for all", culprit=what)
        return {**config, "lora_alpha": first * config["r"], "use_rslora": False}

    def _check(self, answer: Any, what: str) -> None:
        if not answer.success:
            raise FailedPrecondition(f"SGLang could not {what} adapter '{self.name}': {answer.error_message}", culprit=self.name)
