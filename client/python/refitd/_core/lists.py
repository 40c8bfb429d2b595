"""Layouts and tensors as the C lists of the library, made in bulk: tens of thousands of entries take tens of milliseconds."""

from __future__ import annotations

import ctypes
import struct
from array import array
from collections.abc import Iterable, Sequence
from operator import index
from typing import NamedTuple

from . import abi as _abi
from ..layout.dtypes import DTYPES
from ..layout.records import Box, TensorSpec
from .native import Handle
from ..errors import InvalidArgument

_TENSOR = struct.Struct("=QiiQqq")
_PIECE = struct.Struct("=qQQQQq")
assert _TENSOR.size == ctypes.sizeof(_abi.refit_tensor) and _PIECE.size == ctypes.sizeof(_abi.refit_piece)

MAX_DIMENSIONS = 8


class Piece(NamedTuple):
    """A box of tensor `tensor` that lies in `region`, with byte_offset from the region's base."""

    tensor: int
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    strides: tuple[int, ...]
    region: Handle
    byte_offset: int


class TensorList:
    """A C array of refit_tensor. `starts`, `counts`: of the elements of each; None: every tensor is whole."""

    def __init__(
        self, tensors: Sequence[TensorSpec], starts: Sequence[int] | None = None, counts: Sequence[int] | None = None
    ) -> None:
        self.count = len(tensors)
        names = bytearray()
        name_at: list[int] = []
        dims: list[int] = []
        dims_at: list[int] = []
        for tensor in tensors:
            name_at.append(len(names))
            names += tensor.name.encode()
            names.append(0)
            dims_at.append(len(dims))
            dims += tensor.shape
        self._names = ctypes.create_string_buffer(bytes(names), len(names) + 1)
        self._dims = array("q", dims or [0])
        name_base, dims_base = ctypes.addressof(self._names), self._dims.buffer_info()[0]
        packed = bytearray(_TENSOR.size * max(1, self.count))
        for i, tensor in enumerate(tensors):
            start = 0 if starts is None else starts[i]
            count = _abi.WHOLE if counts is None else counts[i]
            _TENSOR.pack_into(
                packed, i * _TENSOR.size, name_base + name_at[i], DTYPES[tensor.dtype].code, len(tensor.shape),
                dims_base + 8 * dims_at[i], start, count,
            )  # fmt: skip
        self._packed = (ctypes.c_char * len(packed)).from_buffer(packed)
        self.pointer = ctypes.addressof(self._packed)


class PieceList:
    """A C array of refit_piece. The regions' handles must stay open as long as it is used."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.count = len(pieces)
        numbers: list[int] = []
        at: list[int] = []
        for piece in pieces:
            at.append(len(numbers))
            numbers += piece.offset
            numbers += piece.extent
            numbers += piece.strides
        self._numbers = array("q", numbers or [0])
        base = self._numbers.buffer_info()[0]
        packed = bytearray(_PIECE.size * max(1, self.count))
        for i, piece in enumerate(pieces):
            bytes_a_list = 8 * len(piece.offset)
            first = base + 8 * at[i]
            _PIECE.pack_into(
                packed, i * _PIECE.size, piece.tensor, first, first + bytes_a_list, first + 2 * bytes_a_list,
                piece.region.pointer, piece.byte_offset,
            )  # fmt: skip
        self._packed = (ctypes.c_char * len(packed)).from_buffer(packed)
        self.pointer = ctypes.addressof(self._packed)


def numbers(values: Iterable[int]) -> array[int]:
    """A C array of int64; its address is buffer_info()[0]."""
    return array("q", values)


def check_name(name: str, whose: str) -> None:
    """Raises InvalidArgument for a name that C would read as another."""
    what = f"tensor {name!r}"
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidArgument(f"{what} of {whose}: the name is empty, no text, or has a null in it", culprit=what)
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} of {whose}: the name is not UTF-8: {error}", culprit=what) from None


def integers(values: object) -> tuple[int, ...] | None:
    """A sequence's entries as int, whatever integers they are (numpy's too); None where it is none, or holds something else."""
    try:
        return tuple(map(index, values))  # type: ignore[call-overload]
    except TypeError:
        return None


def check_tensors(tensors: Sequence[TensorSpec], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for what the library could only refuse in worse words."""
    seen: set[str] = set()
    for tensor in tensors:
        what = f"tensor '{tensor.name}'"
        check_name(tensor.name, whose)
        if tensor.name in seen:
            raise InvalidArgument(f"{what} of {whose} is there twice", culprit=what)
        seen.add(tensor.name)
        if tensor.dtype not in DTYPES:
            raise InvalidArgument(f"{what} of {whose}: dtype {tensor.dtype!r} is none of {', '.join(DTYPES)}", culprit=what)
        if integers(tensor.shape) is None:
            raise InvalidArgument(f"{what} of {whose}: shape {tensor.shape!r} is no sequence of integers", culprit=what)
        if len(tensor.shape) > MAX_DIMENSIONS or any(n < 0 for n in tensor.shape):
            raise InvalidArgument(
                f"{what} of {whose}: shape {tuple(tensor.shape)} has a negative or more than {MAX_DIMENSIONS} dimensions", culprit=what
            )


def check_boxes(tensors: Sequence[TensorSpec], boxes: Sequence[Box], whose: str) -> None:
    """Raises InvalidArgument, naming tensor and member, for a box outside of its tensor or of its memory."""
    for box in boxes:
        if not 0 <= box.tensor_index < len(tensors):
            raise InvalidArgument(f"a box of {whose} is of tensor {box.tensor_index} of {len(tensors)}")
        tensor = tensors[box.tensor_index]
        what = f"tensor '{tensor.name}'"
        rank = len(tensor.shape)
        if not len(box.offset) == len(box.extent) == len(box.strides) == rank:
            raise InvalidArgument(
                f"{what} of {whose} has {rank} dimensions, but its box has offset {box.offset}, extent {box.extent}, strides {box.strides}",
                culprit=what,
            )
        lowest = highest = 0
        for offset, extent, stride, size in zip(box.offset, box.extent, box.strides, tensor.shape):
            if offset < 0 or extent < 1 or offset + extent > size:
                raise InvalidArgument(
                    f"{what} of {whose}: the box at {box.offset} of {box.extent} elements is empty or beyond the shape {tensor.shape}",
                    culprit=what,
                )
            reach = (extent - 1) * stride
            if reach < 0:
                lowest += reach
            else:
                highest += reach
        itemsize = DTYPES[tensor.dtype].itemsize
        first, last = box.byte_offset + lowest * itemsize, box.byte_offset + (highest + 1) * itemsize
        if first < 0 or last > box.memory.nbytes:
            raise InvalidArgument(
                f"{what} of {whose}: the box takes bytes {first} to {last} of memory that has {box.memory.nbytes}", culprit=what
            )
