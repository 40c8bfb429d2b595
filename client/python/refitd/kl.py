"""An alarm for engines that do not serve the trainer's weights: both score the same tokens, and their log-probabilities are compared.

    measured = refitd.kl.check(trainer_logprobs, engine_logprobs, dtype=torch.bfloat16, control=control.kl)

Weights that arrived wrong, or one version late, fail nowhere: the engine answers, and training quietly becomes off-policy. The
log-probabilities that trainer and engine give to the same tokens differ then by more than rounding.

What counts as rounding depends on model, kernels and dtype, so measure it: `control` is the KL of an engine that loaded the very
checkpoint, without any refit. Without a control the limit is that of the dtype in LIMITS, which is generous: it finds wrong
weights, but not a single small step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .errors import FailedPrecondition, InvalidArgument
from .layout.memory import resolve

# The most KL, in nats a token, that passes for rounding without a control, by the dtype in which the engine computes. The error of a
# log-probability grows with the dtype's unit of rounding u, and the KL with its square. Engines whose kernels differ from the
# trainer's were assumed to err by 16 u (float32: by 1e-3, as TF32 does).
LIMITS = {"float64": 1e-9, "float32": 1e-6, "float16": 1e-4, "bfloat16": 5e-3, "float8_e4m3fn": 5e-2, "float8_e5m2": 1e-1}
# A control's KL is one sample of what rounding does: other tokens and weights give some times as much.
CONTROL_FACTOR = 8.0
# Below this the sums themselves round: a control of exactly 0 does not ask for a KL of 0.
FLOOR = 1e-12


@dataclass(frozen=True)
class Measured:
    """`kl`: of the engine's distribution to the trainer's, in nats a token, estimated. `largest`: the largest difference of two
    log-probabilities, in nats, and `largest_at` its position among the tokens that count. `tokens`: how many counted."""

    kl: float
    largest: float
    largest_at: int
    tokens: int


class Diverged(FailedPrecondition):
    """The engine does not serve what the trainer holds. `measured`: what was found; `limit`: the most that would have passed."""

    def __init__(self, message: str, measured: Measured, limit: float) -> None:
        super().__init__(message)
        self.measured = measured
        self.limit = limit


def measure(trainer: Any, engine: Any, mask: Any = None) -> Measured:
    """Compares log-probabilities, natural logarithms, that both give to tokens which the engine sampled.

    `trainer`, `engine`: of the same shape: torch tensors, numpy arrays or sequences of numbers. `mask`: of that shape, which of them
    count; None: all. The estimate is the mean of exp(d) - 1 - d with d = trainer - engine. No term is negative, so that differences of
    opposite sign do not cancel, and it scatters less than the mean of -d.

    Raises InvalidArgument where shapes differ or no token counts, FailedPrecondition where a log-probability that counts is not a
    finite number, or is above 0 by more than rounding.
    """
    shapes = {_shape(x) for x in (trainer, engine, mask) if x is not None}
    if len(shapes) > 1:
        raise InvalidArgument(f"log-probabilities and mask differ in shape: {', '.join(map(str, sorted(shapes)))}", culprit="shape")
    ours, theirs = _numbers(trainer), _numbers(engine)
    if mask is not None:
        counted = [bool(x) for x in _numbers(mask)]
        ours = [x for x, keep in zip(ours, counted) if keep]
        theirs = [x for x, keep in zip(theirs, counted) if keep]
    if not ours:
        raise InvalidArgument("no token counts", culprit="mask")
    for who, values in (("trainer", ours), ("engine", theirs)):
        for position, value in enumerate(values):
            if not math.isfinite(value) or value > 0.01:
                raise FailedPrecondition(f"token {position} of those that count has log-probability {value} of the {who}", culprit=who)
    differences = [x - y for x, y in zip(ours, theirs)]
    largest_at = max(range(len(differences)), key=lambda i: abs(differences[i]))
    # Below 1e-5, exp(d) - 1 - d would lose its digits by cancellation; the series is exact to rounding there.
    total = math.fsum(d * d / 2 + d**3 / 6 if abs(d) < 1e-5 else _expm1(d) - d for d in differences)
    return Measured(total / len(differences), abs(differences[largest_at]), largest_at, len(differences))


def limit_of(dtype: Any = None, control: float | None = None) -> float:
    """The most KL that passes for rounding: CONTROL_FACTOR times `control`, or that of the engine's `dtype` in LIMITS."""
    if control is not None:
        if not math.isfinite(control) or control < 0:
            raise InvalidArgument(f"control is {control}, no KL", culprit="control")
        return max(CONTROL_FACTOR * control, FLOOR)
    if dtype is None:
        raise InvalidArgument("neither dtype, control nor limit is given", culprit="dtype")
    name = resolve(dtype).name
    if name not in LIMITS:
        raise InvalidArgument(f"dtype: engines don't compute in {name}", culprit="dtype")
    return LIMITS[name]


def check(
    trainer: Any,
    engine: Any,
    *,
    dtype: Any = None,
    control: float | None = None,
    limit: float | None = None,
    mask: Any = None,
    what: str = "the engine",
) -> Measured:
    """Measures as measure() does, and raises Diverged where the KL is over the limit.

    `dtype`: in which the engine computes, a name or a framework's dtype. `control`: the KL of an engine that loaded the same
    checkpoint without a refit, on the same tokens or alike ones. `limit`: in nats a token, in place of both. `what` names the
    engine in the error, such as "vllm-0 at version 8". Any thread may call it.
    """
    most = limit_of(dtype, control) if limit is None else limit
    measured = measure(trainer, engine, mask)
    if measured.kl > most:
        raise Diverged(
            f"{what} does not serve the trainer's weights: KL {measured.kl:.3g} nats a token over {measured.tokens} tokens, at most "
            f"{most:.3g} is rounding; token {measured.largest_at} of those that count differs most, by {measured.largest:.3g} nats",
            measured,
            most,
        )
    return measured


def _expm1(x: float) -> float:
    try:
        return math.expm1(x)
    except OverflowError:
        return math.inf


def _shape(x: Any) -> tuple[int, ...]:
    if hasattr(x, "shape"):
        return tuple(x.shape)
    return (len(x), *_shape(x[0])) if isinstance(x, (list, tuple)) and x and isinstance(x[0], (list, tuple)) else (len(x),)


def _numbers(x: Any) -> list[float]:
    return list(map(float, x.reshape(-1).tolist() if hasattr(x, "reshape") else _flat(x)))


def _flat(x: Iterable[Any]) -> Iterable[float]:
    for entry in x:
        if isinstance(entry, (list, tuple)):
            yield from _flat(entry)
        else:
            yield entry
