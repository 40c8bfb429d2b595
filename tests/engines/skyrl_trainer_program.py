"""A trainer rank of SkyRL 0.4.0: the methods of its own worker sync its own source over an FSDP2 model, by its own client. As vllm_trainer_program.py,
with `sharded` and `first_version` in the options for `info`.

The worker is not made by SkyRL, whose __init__ wants a GPU: it has what these methods read.
"""

from __future__ import annotations

import asyncio
import importlib.machinery
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import refitd.integrations.skyrl
import vllm_trainer_program
from engine_program import serve_commands

# SkyRL imports it, which needs a GPU to build, and does not call it here.
for name in ("flash_attn", "flash_attn.bert_padding"):
    sys.modules.setdefault(name, mock.MagicMock(__spec__=importlib.machinery.ModuleSpec(name, None)))

from skyrl.backends.skyrl_train.inference_servers.remote_inference_client import RemoteInferenceClient  # noqa: E402
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402

import refitd  # noqa: E402


class Program(vllm_trainer_program.Program):
    def init(self) -> None:
        given = self._options["info"]
        settings = given["settings"]
        refitd.integrations.skyrl.install(
            given["group"], sharded=bool(given["sharded"]), first_version=given.get("first_version"), socket=settings["socket"],
            update_seconds=settings["update_seconds"], device="host",
        )  # fmt: skip
        from skyrl.backends.skyrl_train.weight_sync import get_vllm_receive_backend

        assert get_vllm_receive_backend("refitd", False) == "refitd"
        config = SkyRLTrainConfig()
        self._engines = config.generator.inference_engine
        self._engines.weight_sync_backend, self._engines.model_dtype = "refitd", "bfloat16"
        self._worker = object.__new__(FSDPPolicyWorkerBase)
        self._worker.cfg, self._worker._is_lora, self._worker._is_multimodal_lm_only = config.trainer, False, False
        self._worker.cfg.placement.colocate_all = False
        self._worker.model = SimpleNamespace(model=self.model)
        url = self._options["url"]
        client = RemoteInferenceClient(proxy_url=url, server_urls=[url], data_parallel_size=1)
        asyncio.run(self._worker.init_weight_sync_state(client, self._engines))

    def send(self, version: int | None = None, note: str | None = None) -> dict[str, Any]:
        asyncio.run(self._worker.broadcast_to_inference_engines(None, self._engines))
        result: refitd.UpdateResult = self._worker._weight_sync_engine.result
        return {"version": result.version, "committed": result.committed, "pushed": sum(result.pushed_bytes.values())}


if __name__ == "__main__":
    serve_commands(Program)
