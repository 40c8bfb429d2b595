"""SGLang takes new weights from refitd, by hooks of SGLang's own plugin entry point (docs/sglang.md).

    REFITD_GROUP=policy python -m sglang.launch_server --model-path MODEL --load-format dummy

SGLang calls `register` in every process through the entry point `sglang.srt.plugins`. It adds three things by SGLang's own hooks:
the load format "refitd" of `update_weights_from_tensor`, which takes one update in every scheduler process (`scheduler.py`); the
evidence that tells which parameters may be written in place (`inside.py`); the driver beside the HTTP server (`server.py`).

What is the same for all engines comes from `refitd.serving`, whose modules import no engine. SGLang and torch are imported
where they are used only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..._core.member import Connect

if TYPE_CHECKING:
    from ...serving.driver import Follower
    from .adapters import AdapterFollower


def register() -> None:
    """Registers the hooks in this process. SGLang calls it once in each, before any of the hooked functions."""
    from . import inside

    inside.register_hooks()


def follow(engine: Any, settings: Mapping[str, Any] | None = None) -> Follower:
    """Attaches an offline `sglang.Engine`, whose updates then happen in `Follower.poll` and `Follower.wait`, between calls of
    `generate`. `settings`: fields of refitd.serving.settings.Settings by name; the environment says the others. See
    `refitd.serving.driver.Follower`.
    """
    from .controls import follow as begin

    return begin(engine, settings)


def follow_adapter(
    engine: Any, adapter: str, *, group: str, instance: str, name: str = "policy", socket: str | None = None, connect: Connect = Connect()
) -> AdapterFollower:
    """Attaches a LoRA adapter of an offline `sglang.Engine`, which takes new versions in `poll` and `wait`, between calls of `generate`.

    `adapter`: a folder as PEFT writes it, for names, shapes and configuration. See `refitd.integrations.sglang.adapters.AdapterFollower`.
    """
    from .adapters import AdapterFollower

    return AdapterFollower(engine, adapter, group=group, instance=instance, name=name, socket=socket, connect=connect)


__all__ = ["follow", "follow_adapter", "register"]
