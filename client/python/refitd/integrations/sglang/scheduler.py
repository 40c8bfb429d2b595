"""In each scheduler process of SGLang: one tensor-parallel rank as one rank of a refitd instance.

A request of the driver's comes to all ranks at once, as JSON in the place of serialized tensors. All ranks carry it out, and each hears
what became of it on the others, so that the answer, which SGLang takes from the first rank, tells of a failure on any.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ... import errors
from ...layout.records import TensorSpec
from ...serving import evidence
from ...serving.delivery import Delivery, decide
from ...serving.manifest import read_manifest
from ...serving.proof import Probe
from ...serving.proving import Steps, proved
from ...serving.rank import Rank, synchronise
from ...serving.settings import Settings
from . import inside, running

logger = logging.getLogger("sglang.refitd")

# The attribute of a model that has its Backend.
_BACKEND = "_refitd_backend"


def answer(manager: Any, request: Any) -> Any:
    """Carries out a request {"do": "attach" | "take" | "detach" | "status", ...} of `controls.py`. Never raises: an exception would end the
    scheduler, and with it the engine."""
    import torch
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

    made: Any = None
    failure = ""
    try:
        made = _carry_out(manager.tp_worker.model_runner, json.loads(bytes(request.serialized_named_tensors[0])))
    except Exception as error:
        logger.exception("refitd: the request failed on this rank")
        failure = json.dumps({"error": type(error).__name__, "reason": str(error)})
    outcomes: list[Any] = [None] * torch.distributed.get_world_size(manager.tp_cpu_group)
    torch.distributed.all_gather_object(outcomes, (failure, made), group=manager.tp_cpu_group)
    failures = [failed for failed, _ in outcomes if failed]
    if not failures:
        manager.record_weight_version_after_update(request.weight_version)
    message = failures[0] if failures else json.dumps([told for _, told in outcomes])
    return UpdateWeightsFromTensorReqOutput(success=not failures, message=message)


def _carry_out(runner: Any, request: dict[str, Any]) -> Any:
    do = request.pop("do")
    backend = getattr(runner.model, _BACKEND, None)
    if do == "detach":
        if backend is not None:
            backend.rank.detach()
        return None
    if backend is None:
        backend = Backend(runner)
        object.__setattr__(runner.model, _BACKEND, backend)
    if do == "attach":
        backend.attach(request)
    elif do == "take":
        backend.rank.take(request["version"], request["wait_seconds"])
    elif do == "status":
        return {**backend.rank.status(), **(backend.digests() if request.get("digests") else {})}
    else:
        raise errors.InvalidArgument(f"no request '{do}'", culprit="do")
    return None


class Backend:
    """One rank's model. Not thread-safe: the scheduler's thread calls it."""

    def __init__(self, runner: Any) -> None:
        import torch

        self.model: Any = runner.model
        self._runner = runner
        clean = getattr(self.model, evidence.ATTRIBUTE, None) is None  # random weights otherwise
        device = torch.device(next(self.model.parameters()).device)
        self._device = device
        self.rank = Rank(device, client="sglang", clean=clean, decide=self._decide, process=self._process, logits=self._logits)

    def attach(self, request: dict[str, Any]) -> None:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        if request.pop("weights_went"):
            self.rank.clean = False
        dirty, drivers = request.pop("dirty"), request.pop("drivers")
        settings = Settings.of(request).checked()
        self.rank.attach(settings, settings.instance, parallel.tp_rank, parallel.tp_size + drivers, dirty=dirty)

    def digests(self) -> dict[str, Any]:
        held = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {"digests": {name: [str(t.dtype), list(t.shape), evidence.digest(t)] for name, t in held}}

    def _decide(self, settings: Settings) -> Delivery:
        manifest = read_manifest(settings.manifest or self._runner.model_config.model_path)
        synchronise(self._device)  # batches that the scheduler has launched read the weights
        with ExitStack() as rooms:
            steps = Steps(
                decide=lambda failed: self._made(settings, manifest, failed),
                process=self._process,
                load=self._load,
                probe=lambda: self._probe(rooms),
            )
            made = proved(self.model, settings.proof, manifest, self._device, self.rank.clean, steps)
        if not self.rank.clean:
            self._zero_padding(made)
        return made

    def _made(self, settings: Settings, manifest: Sequence[TensorSpec], failed: Mapping[str, str]) -> Delivery:
        made = decide(self.model, manifest, settings.arena_bytes, self._device, inside, failed)
        if not self.rank.clean:
            self._zero_padding(made)
            if made.arena:
                self._try_out(made)
        return made

    def _probe(self, rooms: ExitStack) -> Probe:
        """How the model is run alone, until `rooms` closes."""
        room = running.Room(self._runner)
        rooms.callback(room.close)
        return running.probe_of(self._runner, room)

    def _logits(self) -> Any:
        with ExitStack() as rooms:
            return self._probe(rooms).run()

    def _load(self, delivery: Delivery, tensors: Iterable[tuple[str, Any]]) -> list[str]:
        """Puts all of a checkpoint's tensors there as SGLang's own weight updates do; raises FailedPrecondition where that can't be."""
        wanted = {name: layer for name, layer in self.model.named_modules() if getattr(layer, "quant_method", None) is not None}
        inside.reload(self.model, tensors, wanted)
        self._derive(delivery)
        return []

    def _zero_padding(self, made: Delivery) -> None:
        """Zeroes the rows beyond the vocabulary, as loading a checkpoint does; this engine loaded random weights instead."""
        import torch

        named = dict(self.model.named_parameters())
        with torch.no_grad():
            for name in made.padded:
                named[name].zero_()

    def _try_out(self, made: Delivery) -> None:
        """Processes two sets of random weights. A parameter that both leave the same is passed over, and refused by name."""
        import torch

        seen = []
        for seed in (1, 2):
            generator = torch.Generator(device=self._device).manual_seed(seed)
            for tensor in made.arena.values():
                tensor.copy_(torch.rand(tensor.shape, generator=generator, device=self._device).to(tensor.dtype))
            inside.reload(self.model, made.arena.items(), made.modules)
            named = dict((*self.model.named_parameters(), *self.model.named_buffers()))
            seen.append({name: evidence.digest(named[name]) for name in made.processed if named[name].numel()})
        for name, first in seen[0].items():
            if seen[1].get(name) == first:
                raise errors.FailedPrecondition(
                    f"parameter '{name}' is changed after loading ({made.processed[name]}), and loading again does not reach it",
                    culprit=f"parameter '{name}'",
                )

    def _process(self, delivery: Delivery) -> None:
        if delivery.arena:
            inside.reload(self.model, delivery.arena.items(), delivery.modules)
        self._derive(delivery)

    def _derive(self, delivery: Delivery) -> None:
        """Makes anew what models and tied modules keep of other modules' weights."""
        inside.finish(self.model)
        for layer in delivery.tied:
            layer.quant_method.process_weights_after_loading(layer)
