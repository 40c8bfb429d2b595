"""Forward proof of an engine's model (`refitd.serving.proof`): of parameters that are written in place, and of modules that are processed.

    made = proved(model, settings, manifest, steps)

What fails is processed, where it was direct and the engine post-processes its module, and proved again; what fails then is refused by name. An
engine that serves its checkpoint keeps its weights: versions are delivered both ways only into random ones.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from . import proof
from ..layout.records import TensorSpec
from ..errors import Error, FailedPrecondition
from .proof import Probe, Proof, Prover
from .delivery import Delivery

logger = logging.getLogger("refitd.serving.proof")

# What is unproved where versions were not delivered both ways.
DELIVERIES = "delivery by the engine's own loader"


@dataclass
class Steps:
    """What is known of the engine. `decide`: makes a delivery; gets parameters and modules not to write in place, with why. `process`: brings
    what the arena has into the modules. `load`: puts tensors there by the engine's own loader; returns names of modules that it passed over.
    `probe`: how the model is run; raises FailedPrecondition where it is not."""

    decide: Callable[[Mapping[str, str]], Delivery]
    process: Callable[[Delivery], None]
    load: Callable[[Delivery, Iterable[tuple[str, Any]]], Sequence[str]]
    probe: Callable[[], Probe]


def proved(model: Any, how: str, manifest: Sequence[TensorSpec], device: Any, clean: bool, steps: Steps) -> Delivery:
    """The delivery with its proof. `how`: as of Settings.proof. `clean`: whether the weights must be kept. Raises FailedPrecondition that
    names what can't be delivered, fails or, where that is asked for, is unproved."""
    failed: dict[str, str] = {}
    while True:
        made = steps.decide(failed)
        if how == "off":
            return made
        found = made.proof = _prove(model, made, manifest, device, clean, steps)
        logger.info("refitd: forward proof in %.1f s: %d proved, unproved: %s, failed: %s", found.seconds, len(found.proved), found.unproved, found.failed)
        again = {name for name in made.direct if _is_processed_again(model, name)}
        again |= {name.rpartition(".")[0] for name in again}
        more = {name: f"failed the forward proof: {why}" for name, why in found.failed.items() if name in again}
        if not more or more.keys() <= failed.keys():
            break
        failed.update(more)
    made.proof.check(require=how == "require")
    if made.proof.unproved:
        logger.warning("refitd: the forward proof says nothing of %d parameters: %s", len(made.proof.unproved), made.proof.unproved)
    return made


def _is_processed_again(model: Any, name: str) -> bool:
    """Whether the engine post-processes the parameter's module: to load any other anew changes nothing but the parameter."""
    return getattr(model.get_submodule(name.rpartition(".")[0]), "quant_method", None) is not None


def _prove(model: Any, made: Delivery, manifest: Sequence[TensorSpec], device: Any, clean: bool, steps: Steps) -> Proof:
    own = [name for entry in made.prepacked for name in (f"{entry.name}.{own}" for own in entry.filled)]
    names = [*(name for name in made.direct if name not in own), *made.derived]
    try:
        probe = steps.probe()
    except Exception as error:  # another version of the engine may have another inside
        return Proof(unproved=dict.fromkeys((*names, *made.processed), f"can't be told: {type(error).__name__}: {error}"))
    deliver = partial(_deliver, made, device, steps)
    why = "the engine serves its checkpoint, which would be lost" if clean else ""
    if not why:
        try:
            deliver(1)
        except Error as error:
            why = str(error)
    prover = Prover(model, probe, names, made.tied)
    if not prover.runs:
        prover.proof.unproved.update(dict.fromkeys(made.processed, prover.proof.unproved.get(names[0], "") if names else "the model can't be run"))
        return prover.proof
    prover.perturb()
    processed = {**made.modules, **{entry.name: entry.module for entry in made.prepacked}, **_that_derive(model, made)}
    if why:
        prover.proof.unproved.update({DELIVERIES: why, **{name: why for name in processed}})
        return prover.proof
    first, derived = prover.states(processed.values()), _digests(model, made.derived)
    deliver(2)
    ours = prover.states(processed.values())
    prover.compare_processed(first, ours, processed)
    same = [name for name, before in _digests(model, made.derived).items() if derived[name] == before]
    prover.proof.failed.update(dict.fromkeys(same, "is made of other parameters, and is the same after another version was delivered"))
    deliver(1)  # what the loader does not reach is not of its version then
    try:
        passed_over = steps.load(made, ((spec.name, proof.values(spec, 2, device)) for spec in manifest))
    except Exception as error:
        prover.proof.unproved[DELIVERIES] = f"it failed: {type(error).__name__}: {error}"
        deliver(2)
        return prover.proof
    if passed_over:
        prover.proof.unproved[DELIVERIES] = f"it passes over {len(passed_over)} modules, such as '{passed_over[0]}'"
    else:
        prover.compare_deliveries(ours, prover.states(processed.values()))
    return prover.proof


def _that_derive(model: Any, made: Delivery) -> dict[str, Any]:
    """By name, the modules that keep something made of other modules' parameters."""
    layers = {name.rpartition(".")[0] for name in made.derived}
    return {name: module for name, module in model.named_modules() if name in layers or any(module is entry for entry in made.tied)}


def _digests(model: Any, names: Iterable[str]) -> dict[str, int]:
    named = dict(model.named_parameters())
    return {name: proof.digest(named[name]) for name in names}


def _deliver(made: Delivery, device: Any, steps: Steps, seed: int) -> None:
    proof.deliver(made.tensors, made.boxes, lambda spec: proof.values(spec, seed, device))
    steps.process(made)


__all__ = ["DELIVERIES", "FailedPrecondition", "Steps", "proved"]
