"""The model that vLLM serves and its draft model (speculative decoding: EAGLE, MTP, a smaller model) as one model, so that both get their weights in
one update, and are clean or dirty together.

Tensors of the draft's checkpoint have PREFIX before their names, on trainers as well. Where the draft is a part of the served model's checkpoint (MTP)
they keep their names. Embeddings and output layers that vLLM lets the two share are the served model's; a trainer's own copy for the draft is compared
with these.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...layout import TensorSpec
from ...serving import read_manifest
from ...serving.evidence import EVIDENCE_ATTRIBUTE

PREFIX = "draft."
# Modules that vLLM lets a draft share with the model that it serves.
SHARED = ("embed_tokens", "lm_head")


def manifest_of(manifest: str | None, model: str, speculation: Any) -> list[TensorSpec]:
    """The tensors of both checkpoints. `manifest`: as of Settings; None: the headers of both are read. `speculation`: vLLM's speculative_config."""
    specs = read_manifest(manifest or model)
    draft = speculation.draft_model_config.model
    if (draft != model or speculation.method == "draft_model") and not any(spec.name.startswith(PREFIX) for spec in specs):
        specs += [replace(spec, name=PREFIX + spec.name) for spec in read_manifest(draft)]
    return specs


def keep_own_parts(draft: Any, manifest: str | None, speculation: Any) -> None:
    """Makes vLLM keep those embeddings and output layers of a draft with random weights that its checkpoint has: vLLM tells by what is loaded, and by
    equality with the served model's, whose random values are the same. `manifest`, `speculation`: as in manifest_of()."""
    names = [spec.name for spec in manifest_of(manifest, speculation.target_model_config.model, speculation)]
    of_draft = [name for name in names if name.startswith(PREFIX)] or names
    for part in SHARED:
        if hasattr(draft, f"has_own_{part}") and any(part in name for name in of_draft):
            setattr(draft, f"has_own_{part}", True)
            for name, module in draft.named_modules():
                if name.rpartition(".")[2] == part:
                    with torch.no_grad():
                        module.weight.view(-1)[0] += 1


class WithDraft(torch.nn.Module):
    """The modules of the served model under their own names, and those of the draft after PREFIX. It is no model to serve with: `forward` runs both on
    the same tokens, as the forward proof needs."""

    def __init__(self, served: Any, draft: Any, specs: Sequence[TensorSpec]) -> None:
        super().__init__()
        for name in ("_modules", "_parameters", "_buffers"):
            getattr(self, name).update(getattr(served, name))
        self._modules[PREFIX.rstrip(".")] = draft
        self.__dict__.update(_served=served, _draft=draft, _drafted=[])
        evidence = [found for model in (served, draft) if (found := getattr(model, EVIDENCE_ATTRIBUTE, None)) is not None]
        if evidence:
            object.__setattr__(self, EVIDENCE_ATTRIBUTE, {layer: changes for found in evidence for layer, changes in found.items()})
        self._apart = any(spec.name.startswith(PREFIX) for spec in specs)
        of_served = {id(module) for module in served.modules()}
        self._shared = tuple(
            f"{part}.weight" for part in SHARED if any(id(module) in of_served and name.rpartition(".")[2] == part for name, module in draft.named_modules())
        )
        shared = [spec for spec in specs if spec.name.endswith(self._shared)]
        of_model = [spec for spec in shared if not spec.name.startswith(PREFIX)]
        self.tied_names = {
            spec.name: other.name
            for spec in shared
            for other in of_model
            if spec.name.startswith(PREFIX) and spec.shape == other.shape and _both_end(spec, other, self._shared)
        }

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_served"], name)

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        of_draft: list[tuple[str, Any]] = []
        self._served.load_weights(self._of_served(weights, of_draft))
        self._draft.load_weights(iter(of_draft))

    def _of_served(self, weights: Iterable[tuple[str, Any]], of_draft: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """The tensors of the served model; notes those of the draft under the names of its checkpoint."""
        for name, tensor in weights:
            own = name.startswith(PREFIX)
            if own == self._apart and not name.endswith(self._shared):
                of_draft.append((name.removeprefix(PREFIX), tensor))
            if not own:
                yield name, tensor

    def forward(self, positions: Any, **given: Any) -> Any:
        made = self._served(positions=positions, **given)
        hidden, auxiliary = made if isinstance(made, tuple) else (made, None)
        self._drafted[:] = [self._run_draft(given.get("input_ids"), positions, hidden, auxiliary)]
        return hidden

    def _run_draft(self, input_ids: Any, positions: Any, hidden: Any, auxiliary: Any) -> Any:
        """What the draft gives; None where it can't be run so, and its parameters stay unproved."""
        try:
            if auxiliary is not None and hasattr(self._draft, "combine_hidden_states"):
                hidden = self._draft.combine_hidden_states(torch.cat(auxiliary, dim=-1))
            given = {"input_ids": input_ids, "positions": positions, "hidden_states": hidden}
            taken = inspect.signature(self._draft.forward).parameters
            return self._draft(**{name: value for name, value in given.items() if name in taken})
        except Exception as error:
            logging.getLogger("refitd.proof").warning("refitd: the draft model can't be run by itself: %s: %s", type(error).__name__, error)
            return None

    def compute_logits(self, hidden: Any) -> Any:
        return [self._served.compute_logits(hidden), *self._drafted]


def _both_end(spec: TensorSpec, other: TensorSpec, endings: Iterable[str]) -> bool:
    return any(spec.name.endswith(ending) and other.name.endswith(ending) for ending in endings)
