"""Plain records of a layout: which boxes of which global tensors lie where. No framework is needed to make or read them.

`refitd.layout.shards.collect(x, dtype=None, exceptions=None, **options)` makes a `Layout` of a state dict, a module or a list of
`Shard`s; `refitd.capture(...)` returns an object with the same attributes `tensors` and `boxes`. `Trainer.register` and
`Engine.register` hand them to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from .memory import Memory

if TYPE_CHECKING:
    from .._core.update import Update


@dataclass(frozen=True)
class TensorSpec:
    """A global tensor: its name, dtype (a name such as "bfloat16") and unpadded shape, in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A box of tensor `tensor_index` and where its elements lie.

    `offset`, `extent`: in elements of the global tensor, an entry a dimension. `strides`: in elements, an entry a dimension; they
    may have any values that keep the box within the memory. `byte_offset`: of the box's first element in `memory`.
    """

    tensor_index: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    memory: Memory
    byte_offset: int = 0


class PushedTensors(Protocol):
    """Tensors that every update pushes in buckets instead of moving them from their boxes, casts with bounded memory for instance."""

    # Indices into the layout's tensors.
    indices: Sequence[int]

    def push(self, update: Update) -> None:
        """Pushes all elements of these tensors that this rank supplies, with `update.push(name, tensor, shape=, start=)`."""


class Source(Protocol):
    """What a layout was made of: names, and the tensors that they were bound to then."""

    rebound: int  # names that were bound to other tensors, or other memory, in the layout before; 0 for the first

    def renewed(self) -> Layout | None:
        """The layout of what the names are bound to now; None where nothing has changed. Raises FailedPrecondition, naming the tensor, where
        a name is bound to nothing any more, or to a tensor of another dtype or shape."""


@dataclass
class Layout:
    """Everything that one rank registers: what `refitd.layout.shards.collect` returns, and what a capture has by the same attributes.

    A tensor may have no box of this rank, such as the second of two tied ones. `tied`: names without boxes whose memory is that of
    another name, and that name. `before_refit`: called on every rank before each refit; it may communicate. `source`: what the layout was
    made of, where names may be bound to other tensors later; None: nothing is looked up again.
    """

    tensors: list[TensorSpec] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    pushed: PushedTensors | None = None
    before_refit: Callable[[], None] | None = None
    tied: dict[str, str] = field(default_factory=dict)
    source: Source | None = None
