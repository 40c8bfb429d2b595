"""TRL's asynchronous trainers send their weights through refitd: an object for their argument `weight_transfer`, written for TRL 1.16.0.

    from refitd.integrations.trl import WeightTransfer

    trainer = AsyncGRPOTrainer(model, ..., weight_transfer=WeightTransfer("policy", dtype="bfloat16"))

AsyncGRPOTrainer and AsyncDistillationTrainer gather full tensors, and their main process streams them to this object, which pushes them as the group's
next version. The vLLM server drives itself (refitd.integrations.vllm, VLLM_PLUGINS=refitd), and pauses by itself. TRL's other trainers take
refitd.integrations.transformers.RefitCallback, which gathers nothing. Nothing of TRL's inside is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import FailedPrecondition
from ..trainer import Trainer, UpdateResult
from . import Settings

if TYPE_CHECKING:
    import torch

_WHERE = "WeightTransfer"


class WeightTransfer:
    """TRL's WeightTransferProtocol. Not thread-safe. `result`: what the last send_weights() returned from refitd; None before."""

    def __init__(self, group: str, **options: Any) -> None:
        """Attaches nothing yet. `options`: as in refitd.integrations.Settings. Raises InvalidArgument that names the option."""
        self._settings = Settings.of(_WHERE, {**options, "group": group})
        self._casts = self._settings.sender(_WHERE, "the trainer").casts
        self._trainer: Trainer | None = None
        self._syncs = 0
        self.result: UpdateResult | None = None

    def init_weight_transfer(self) -> None:
        """Attaches the trainer. Raises what attaching raises."""
        if self._trainer is None:
            self._trainer = self._settings.trainer("trl", 0, 1)

    def pause(self) -> None:
        """Nothing is due: the server pauses itself when the update begins."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Installs the tensors as the group's next version. Raises as Trainer.update does; the stream is then taken to its end, as TRL's other processes
        gather along with it."""
        if self._trainer is None:
            raise FailedPrecondition("send_weights: init_weight_transfer was not called")
        self._syncs += 1
        version, note = self._trainer.next_version, f"TRL's sync {self._syncs} of this run"
        seconds, verification = self._settings.update_seconds, self._settings.verification
        taken = 0
        try:
            with self._trainer.update(version, duration_seconds=seconds, verification=verification, note=note) as update:
                for name, tensor in iterator:
                    taken += 1
                    update.push(name, self._casts.of(name, tensor))
                self.result = update.commit(tensor_count=taken)
        except BaseException:
            for _ in iterator:
                pass
            raise

    def resume(self) -> None:
        """Nothing is due: the server goes on when the version is in place."""

    def destroy(self) -> None:
        """Detaches; engines keep their weights."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()
