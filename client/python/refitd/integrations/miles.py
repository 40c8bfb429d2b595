"""miles' weight updates through refitd, as those of slime, of which miles is a fork: see refitd.integrations.slime.

    miles ... --custom-megatron-init-path refitd.integrations.miles.init

Written from miles' source of August 2026 (commit 31f1ca9). Beside what refitd.integrations.slime refuses, updates of LoRA adapters are refused, and
the transfer modes "p2p" and "disk-delta", for which miles has updaters of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import Unimplemented
from .megatron import Updater as MegatronUpdater


class Updater(MegatronUpdater):
    """One trainer rank, as refitd.integrations.slime.Updater, with what miles' actor calls beyond that."""

    framework = "miles"

    @classmethod
    def check(cls, args: Any) -> None:
        """Raises Unimplemented as slime's does, and for another transfer mode than "broadcast"."""
        super().check(args)
        mode = getattr(args, "update_weight_transfer_mode", "broadcast")
        if mode != "broadcast":
            what = "update_weight_transfer_mode"
            raise Unimplemented(f"--update-weight-transfer-mode {mode}: refitd takes the place of broadcast", culprit=what)

    def __init__(
        self,
        args: Any,
        model: Sequence[Any],
        weights_getter: Callable[[], Mapping[str, Any]],
        *,
        model_name: str,
        quantization_config: Mapping[str, Any] | None,
        is_lora: bool = False,
    ) -> None:
        """Attaches nothing yet. Raises Unimplemented for a quantized model, and where miles updates adapters alone."""
        if is_lora:
            raise Unimplemented("LoRA: miles' adapters are not delivered; refitd.integrations.lora merges those of PEFT", culprit="is_lora")
        super().__init__(args, model, weights_getter, model_name=model_name, quantization_config=quantization_config)
        self._stale = False

    def is_rollout_engines_fresh(self) -> bool:
        """Tells whether this rank is attached, and the trainer's ranks are those with which it attached."""
        return self._trainer is not None and not self._stale

    def mark_engine_connection_stale(self) -> None:
        """Notes that the trainer's ranks changed: the next connect_rollout_engines() attaches anew."""
        self._stale = True

    def connect_rollout_engines(self, rollout_engines: Sequence[Any], rollout_engine_lock: Any, **options: Any) -> None:
        """Attaches and registers as refitd.integrations.slime.Updater does, anew where the connection is stale."""
        if self._stale:
            self.disconnect_rollout_engines()
        super().connect_rollout_engines(rollout_engines, rollout_engine_lock, **options)
        self._stale = False


init = Updater.init
install = Updater.install
