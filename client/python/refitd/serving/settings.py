"""The adapter's settings: those of init info, and of the environment where init info says nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidArgument
from .proof import PROOFS

PAUSES = ("keep", "wait", "abort")
CACHES = ("reset", "keep")
# Room for what can't be delivered in place. A model of which more must be processed is refused by name.
ARENA_BYTES = 8 << 30


@dataclass(frozen=True)
class Settings:
    """How an engine attaches, and what it does on an update. Each field's variable is REFITD_ and the field's name in capitals.

    `group`, `instance`, `socket`, `coordinator`: as of refitd.Engine. All ranks of an engine have one `instance`.
    `trainer_identity`: whose weights the engine takes, as of refitd.Engine; None: any owner's.
    `manifest`: a folder with safetensors files, one such file, or a JSON file {name: {"dtype", "shape"}}: the checkpoint's tensors
    as trainers have them; None: those of the model that vLLM was started with.
    `pause`: what happens to requests in flight: "keep" freezes them and goes on after the update, "wait" lets them end first, "abort"
    ends them.
    `cache`: "reset" drops the prefix, encoder and multi-modal caches at each update, "keep" keeps them.
    `arena_bytes`: the most memory that a rank spends on tensors that can't be delivered in place.
    `proof`: whether the forward is proved to read what is written (refitd.serving.proof) when a rank first attaches: "report" refuses or processes what
    fails, and tells what is unproved; "require" refuses what is unproved too; "off" runs nothing.
    `logits`: a folder, the same for all engines of the group: after each commit, before the engine goes on, the logits of fixed tokens are
    compared with those that the first engine of the same shape to commit left there; None: they are not.
    `wait_seconds`: for the daemon and the group to appear, when a rank attaches.
    `reattach_seconds`: how long a daemon that went away is looked for.
    """

    group: str = ""
    instance: str = ""
    socket: str | None = None
    coordinator: str | None = None
    trainer_identity: str | None = None
    manifest: str | None = None
    pause: str = "keep"
    cache: str = "reset"
    arena_bytes: int = ARENA_BYTES
    proof: str = "report"
    logits: str | None = None
    wait_seconds: float = 600.0
    reattach_seconds: float = 600.0

    @classmethod
    def of(cls, said: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
        """Settings of `said`, else of the environment. Raises InvalidArgument that names the field."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            value: Any = (said or {}).get(field.name)
            if value is None or value == "":
                value = environment.get(f"REFITD_{field.name.upper()}")
            if value is None or value == "":
                continue
            if field.name.endswith("_seconds") or field.name.endswith("_bytes"):
                try:
                    value = float(value) if field.name.endswith("_seconds") else int(value)
                except (TypeError, ValueError):
                    raise InvalidArgument(f"{field.name}: {value!r} is no number", culprit=field.name) from None
                if value < 0:
                    raise InvalidArgument(f"{field.name}: {value!r} is negative", culprit=field.name)
            values[field.name] = value
        made = cls(**values)
        for name, allowed in (("pause", PAUSES), ("cache", CACHES), ("proof", PROOFS)):
            if getattr(made, name) not in allowed:
                raise InvalidArgument(f"{name}: {getattr(made, name)!r} is none of {', '.join(allowed)}", culprit=name)
        return made

    def checked(self) -> Settings:
        """This, if group and instance are said; else raises InvalidArgument."""
        for name in ("group", "instance"):
            if not getattr(self, name):
                raise InvalidArgument(f"{name} is not said: set REFITD_{name.upper()}, or pass it in the init info", culprit=name)
        return self
