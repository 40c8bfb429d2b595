"""What registered names are bound to. Names belong to modules and dicts, not to the tensors that were there when they were registered,
so that every refit looks each of them up anew (P11). librefit does it, in tenths of a microsecond a name, where it reads tensors.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

from . import abi as _abi
from .tensors import ids, reads_tensors
from ..layout.dtensor import is_dtensor

# The dicts of a torch module that hold tensors and submodules.
_HELD = ("_parameters", "_buffers", "_modules")


class Bindings:
    """Dicts as they were when they were added: `hold()` tells whether they still have the same entries. Keeps dicts and values alive."""

    def __init__(self) -> None:
        self.complete = True  # False: something has no dict to look at
        self._dicts: list[dict[str, Any]] = []
        self._entries: list[Any] = []  # key and value of each entry, of one dict after the other
        self._sizes = array("q")
        # Attributes that are these dicts: the dict of attributes, the name, the value.
        self._owners: list[dict[str, Any]] = []
        self._names: list[str] = []
        self._owned: list[Any] = []
        self._ids: list[array[int]] = []  # of the objects in all these lists; made when first asked

    @classmethod
    def of_dict(cls, entries: dict[str, Any]) -> Bindings:
        """The entries of a dict."""
        made = cls()
        made._add(entries)
        return made

    @classmethod
    def of_modules(cls, *modules: Any) -> Bindings:
        """The parameters, buffers and submodules of torch modules and of all modules below them."""
        made = cls()
        seen: set[int] = set()
        pending = list(modules)
        while pending:
            module = pending.pop()
            if module is None or id(module) in seen:
                continue
            seen.add(id(module))
            attributes = module.__dict__
            for what in _HELD:
                held = attributes.get(what)
                if not isinstance(held, dict):  # TorchScript's modules keep theirs elsewhere
                    made.complete = False
                    continue
                if held:
                    made._owners.append(attributes)
                    made._names.append(what)
                    made._owned.append(held)
                made._add(held)
                if what == "_modules":
                    pending += held.values()
        return made

    def holds_all(self, tensors: Iterable[Any]) -> bool:
        """Whether each of the tensors is the value of an entry, so that no other tensor can take its place unnoticed."""
        values = set(map(id, self._entries[1::2]))
        return self.complete and all(id(tensor) in values for tensor in tensors)

    def hold(self) -> bool:
        """Whether all dicts have the entries that they had."""
        if not reads_tensors():
            return self._hold_by_python()
        if not self._ids:
            self._ids = [ids(held) for held in (self._dicts, self._entries, self._owners, self._names, self._owned)]
        dicts, entries, owners, names, owned = (of.buffer_info()[0] for of in self._ids)
        library, sizes = _abi.locked_library(), self._sizes.buffer_info()[0]
        return bool(
            library.refit_python_first_rebound(owners, names, owned, len(self._owners)) == len(self._owners)
            and library.refit_python_first_altered(dicts, sizes, entries, len(self._dicts)) == len(self._dicts)
        )

    def _hold_by_python(self) -> bool:
        if any(owner.get(name) is not owned for owner, name, owned in zip(self._owners, self._names, self._owned)):
            return False
        at = 0
        for held, size in zip(self._dicts, self._sizes):
            if len(held) != size:
                return False
            for key, value in dict.items(held):
                if key is not self._entries[at] or value is not self._entries[at + 1]:
                    return False
                at += 2
        return True

    def _add(self, held: dict[str, Any]) -> None:
        self._dicts.append(held)
        self._sizes.append(len(held))
        for entry in dict.items(held):
            self._entries += entry


class Marks:
    """The address, dtype, shape and strides that tensors had: `same()` tells whether all still have them."""

    _local = attrgetter("_local_tensor")

    def __init__(self, held: Sequence[Any], current: Sequence[Callable[[], Any]]) -> None:
        """`held`: what the names are bound to: tensors and arrays; DTensors, of which the local tensor counts; None: nothing is held.
        `current`: for each of the others, a function that returns the tensor: of what is neither, such as a function, only this counts."""
        self._fast = reads_tensors()
        kind = sys.modules["torch"].Tensor if "torch" in sys.modules else ()
        self._fixed: list[int] = []
        self._sharded: list[int] = []
        self._asked: list[int] = []
        for i, tensor in enumerate(held):
            if tensor is None:
                continue
            of: Any = type(tensor)
            sharded = _is_sharded(of)
            if self._fast and isinstance(tensor, kind) and not sharded:
                self._fixed.append(i)
            elif self._fast and sharded and isinstance(getattr(tensor, "_local_tensor", None), kind):
                self._sharded.append(i)
            else:
                self._asked.append(i)
        self._held, self._current = held, current
        self.values: list[Any] = [None] * len(held)  # the marks, equal only where nothing has changed
        self._tensors: list[Any] = []
        self._ids = self._marks = self._local_marks = array("Q")
        self._note()

    def same(self) -> bool:
        """Whether every tensor is where it was, and as it was."""
        if self._tensors and not _unchanged(self._ids, self._marks):
            return False
        if self._sharded:
            tensors = self._locals()
            if not _unchanged(ids(tensors), self._local_marks):
                return False
        return all(_look(self._current[i]()) == self.values[i] for i in self._asked)

    def _locals(self) -> list[Any]:
        return [self._local(self._held[i]) for i in self._sharded]

    def _note(self) -> None:
        self._tensors = [self._held[i] for i in self._fixed]
        self._marks, self._local_marks = _marks(self._tensors), _marks(self._locals())
        for numbers, marks in ((self._fixed, self._marks), (self._sharded, self._local_marks)):
            unread = [i for i, mark in zip(numbers, marks) if not mark]
            if unread:  # by torch itself then, one by one
                self._asked += unread
                numbers[:] = [i for i, mark in zip(numbers, marks) if mark]
                marks[:] = array("Q", filter(None, marks))
            for i, mark in zip(numbers, marks):
                self.values[i] = mark
        self._tensors = [self._held[i] for i in self._fixed]
        self._ids = ids(self._tensors)
        for i in self._asked:
            self.values[i] = _look(self._current[i]())


@cache
def _is_sharded(kind: type) -> bool:
    """Each type is asked once, because asking every tensor for what it lacks is slow."""
    return is_dtensor(kind)


def _look(tensor: Any) -> tuple[Any, ...]:
    if hasattr(tensor, "__array_interface__"):
        return (tensor.__array_interface__["data"][0], tensor.dtype, tensor.shape, tensor.strides)
    try:
        return (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
    except RuntimeError:  # it has no memory any more
        return ()


def _marks(tensors: list[Any]) -> array[int]:
    objects, marks = ids(tensors), array("Q", bytes(8 * len(tensors)))
    if tensors:
        _abi.locked_library().refit_python_marks(objects.buffer_info()[0], marks.buffer_info()[0], len(tensors))
    return marks


def _unchanged(objects: array[int], marks: array[int]) -> bool:
    count = len(objects)
    first = _abi.locked_library().refit_python_first_changed(objects.buffer_info()[0], marks.buffer_info()[0], count)
    return bool(first == count)
