"""A callback for the Trainer of transformers, and for classes derived from it, such as TRL's trainers: a refit after each step.

    from refitd.integrations.transformers import RefitCallback

    trainer = transformers.Trainer(model, arguments, train_dataset=data, callbacks=[RefitCallback("policy", dtype=torch.bfloat16)])
    trainer.train()

Engines of the group get the checkpoint's tensors, by the names that save_pretrained() would write, under the version
`state.global_step`, or the version after the group's where that is greater, as after a restart from an older checkpoint.
Parameters stay where they are; nothing is gathered.

Of transformers' inside, `core_model_loading.revert_weight_conversion` tells what save_pretrained() would write.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers

from .._core.member import Connect, GroupSpec
from ..errors import FailedPrecondition, InvalidArgument, Unimplemented, UpdateAborted
from ..layout.placement import adopt
from ..layout.shards import Added, MadeOf, MadeShards, Shard
from ..trainer import Trainer, UpdateResult
from . import next_version

_EXPERT = re.compile(r"(.*\.layers\.\d+\.).*\.experts\.(\d+)\.")


class RefitCallback(transformers.TrainerCallback):
    """Refits when training begins, after every `every` steps, and when it ends. All calls are made by the training's main thread.

    `result`: the last refit's refitd.UpdateResult; None before. `trainer`: the refitd.Trainer; None before training.
    """

    def __init__(
        self,
        group: str,
        *,
        every: int = 1,
        at_begin: bool = True,
        dtype: Any = None,
        exceptions: Mapping[str, Any] | None = None,
        shards: Callable[[Any], Any] | None = None,
        tolerate: int = 0,
        spec: GroupSpec | None = GroupSpec(),
        on_older: str = "next",
        device: str | None = None,
        socket: str | None = None,
        connect: Connect = Connect(),
    ) -> None:
        """`group`: of refitd. `every`: optimizer steps from a refit to the next.

        `at_begin`: refit the weights with which training begins, so that engines may have started without weights. `dtype`, `exceptions`:
        as in Trainer.register. `shards`: what to register of the model, in place of checkpoint_tensors(model). `tolerate`: how many
        updates in a row may end as UpdateAborted with the engines' old weights whole: each is a warning, and the next step's refit
        brings the newer weights. `on_older`: what happens where the group has the step, or a later one, as a version: "next" goes on with the group's next
        version, "refuse" and "replace" as in refitd.Trainer. `spec`, `device`, `socket`, `connect`: as in refitd.Trainer; rank and world size are those of the training.

        Raises InvalidArgument. Errors of refits are raised by train().
        """
        if every < 1:
            raise InvalidArgument(f"every is {every}, at least 1 is possible", culprit="every")
        self.trainer: Trainer | None = None
        self.result: UpdateResult | None = None
        self._every, self._at_begin, self._tolerate = every, at_begin, tolerate
        self._dtype, self._exceptions = dtype, exceptions
        self._shards = shards
        self._goes_on = on_older == "next"
        self._attach = partial(Trainer, group, spec=spec, on_older=on_older, device=device, socket=socket, connect=connect)
        self._refitted: int | None = None
        self._failures = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Attaches and registers; `model` is as the Trainer prepared it."""
        self.close()
        trainer = self._attach(rank=args.process_index, world_size=args.world_size)
        try:
            tensors = checkpoint_tensors(model) if self._shards is None else self._shards(model)
            trainer.register(tensors, dtype=self._dtype, exceptions=self._exceptions)
        except BaseException:
            trainer.close()
            raise
        self.trainer, self._refitted, self._failures = trainer, None, 0
        if self._at_begin:
            self._refit(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % self._every == 0:
            self._refit(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refits steps after the last refit, and detaches."""
        try:
            if self._refitted != state.global_step:
                self._refit(state.global_step)
        finally:
            self.close()

    def close(self) -> None:
        """Detaches, also after training failed. May be called again."""
        if self.trainer is not None:
            self.trainer.close()
            self.trainer = None

    def _refit(self, step: int) -> None:
        if self.trainer is None:
            raise FailedPrecondition("the callback was added after training began")
        version = next_version(self.trainer.group_version, step) if self._goes_on else step
        try:
            self.result = self.trainer.refit(version, note=f"step {step}" if self.trainer.rank == 0 else "")
        except UpdateAborted as error:
            self._failures += 1
            if error.dirty is not False or self._failures > self._tolerate:
                raise
            warnings.warn(f"version {version} was not installed, engines go on with the one before: {error}", stacklevel=2)
            return
        self._failures, self._refitted = 0, step


def checkpoint_tensors(model: Any) -> Any:
    """Returns what Trainer.register takes of a model: its tensors under the names that save_pretrained() writes, in place.

    CPU parameters move into memory that the daemon can map (refitd.adopt). The experts that transformers fuses into one parameter per
    layer are views of that parameter. A PEFT model gives the tensors of the model without PEFT, with the active adapters of LoRA
    merged on the way (refitd.integrations.lora).

    Raises Unimplemented for DeepSpeed's partitioned parameters, models whose checkpoint has tensors that are no slices of parameters,
    and PEFT models that refitd.integrations.lora.merged refuses: for those, pass `shards` to RefitCallback.
    """
    partitioned = next((name for name, parameter in model.named_parameters() if hasattr(parameter, "ds_id")), None)
    if partitioned is not None:
        raise Unimplemented(f"parameter '{partitioned}' is partitioned by DeepSpeed: pass shards", culprit=f"parameter '{partitioned}'")
    given = model
    adopt(model)
    from . import lora

    adapted = lora.merged(model) if hasattr(model, "peft_config") else None
    held = dict(model.state_dict(keep_vars=True)) if adapted is None else {n: _base(tensor) for n, tensor in adapted.items()}
    model = model if adapted is None else model.get_base_model()
    saved = _saved(model, held)
    if saved.keys() == held.keys() and all(_same(tensor, held[name]) for name, tensor in saved.items()):
        return adapted or model  # so that parameters whose memory moves are followed
    sharded = next((name for name, tensor in held.items() if hasattr(tensor, "placements")), None)
    if sharded is not None:
        raise Unimplemented(
            f"parameter '{sharded}' is a DTensor, and {type(model).__name__} saves other tensors than it keeps: pass shards",
            culprit=f"parameter '{sharded}'",
        )
    shards = [Shard(name, tuple(tensor.shape), _in_place(name, tensor, held)) for name, tensor in saved.items()]
    additions = {name: tensor.addition for name, tensor in (adapted or {}).items() if isinstance(tensor, Added)}
    lost = next((name for name in additions if name not in saved), None)
    if lost is not None:
        raise Unimplemented(f"'{lost}' has an adapter, and {type(model).__name__} saves it under another name", tensor=lost)
    modules = [model] if adapted is None else adapted.made_of.modules
    return MadeShards([replace(shard, addition=additions.get(shard.name)) for shard in shards], MadeOf(modules, partial(checkpoint_tensors, given)))


def _base(tensor: Any) -> Any:
    return tensor.tensor if isinstance(tensor, Added) else tensor


def _saved(model: Any, held: dict[str, Any]) -> dict[str, Any]:
    """The tensors that save_pretrained() would write, by name."""
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # before version 5, models kept what they saved
        return held
    if not isinstance(model, transformers.PreTrainedModel):
        return held
    with torch.no_grad():
        return dict(revert_weight_conversion(model, dict(held)))


def _same(tensor: Any, other: Any) -> bool:
    return tensor is other or (tensor.data_ptr(), tensor.shape, tensor.stride()) == (other.data_ptr(), other.shape, other.stride())


def _in_place(name: str, tensor: Any, held: Mapping[str, Any]) -> Any:
    """The part of a parameter that `tensor` is, or of which it is a copy."""
    if any(tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr() for parameter in held.values()):
        return tensor
    # The conversion copies gate and up out of each expert's part of a fused parameter: a comparison finds which half it copied.
    expert = _EXPERT.match(name)
    found = []
    if expert is not None:
        layer, number = expert.group(1), int(expert.group(2))
        for fused, parameter in held.items():
            if fused.startswith(layer) and parameter.dim() == tensor.dim() + 1 and number < parameter.shape[0]:
                found += [part for part in parameter.data[number].chunk(2) if part.shape == tensor.shape and torch.equal(part, tensor)]
    if len(found) != 1:
        raise Unimplemented(
            f"tensor '{name}' of the checkpoint is {'no slice' if not found else 'equal to several slices'} of a parameter: pass shards", tensor=name
        )
    return found[0]
