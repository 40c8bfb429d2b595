"""Element types: their names, codes of the C interface, sizes, and what numpy, torch and DLPack call them."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from ..errors import InvalidArgument


class DType(NamedTuple):
    """An element type: the name that refitd, torch and safetensors-like manifests use, the C code, and bytes an element."""

    name: str
    code: int
    itemsize: int


_ALL = (
    DType("float64", 1, 8),
    DType("float32", 2, 4),
    DType("float16", 3, 2),
    DType("bfloat16", 4, 2),
    DType("float8_e4m3fn", 5, 1),
    DType("float8_e5m2", 6, 1),
    DType("int64", 7, 8),
    DType("int32", 8, 4),
    DType("int16", 9, 2),
    DType("int8", 10, 1),
    DType("uint8", 11, 1),
    DType("bool", 12, 1),
)
DTYPES: dict[str, DType] = {dtype.name: dtype for dtype in _ALL}
BY_CODE: dict[int, DType] = {dtype.code: dtype for dtype in _ALL}


def resolve(dtype: Any, what: str = "dtype") -> DType:
    """The element type that `dtype` names: a name such as "bfloat16", a torch.dtype, or a numpy dtype (ml_dtypes' included).

    `what` says in an error whose dtype it was. Raises InvalidArgument for a type that refitd does not carry.
    """
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    found = DTYPES.get(name.removeprefix("torch."))
    if found is None:
        raise InvalidArgument(f"{what}: {dtype!r} is none of {', '.join(DTYPES)}", culprit=what)
    return found


def _name_of(dtype: Any) -> str:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return str(dtype)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        try:
            as_numpy = numpy.dtype(dtype)
        except TypeError:
            return repr(dtype)
        if not as_numpy.isnative:
            return repr(dtype)
        return str(as_numpy.name)
    return repr(dtype)


def torch_dtype(name: str) -> Any:
    """torch's dtype of this name. Imports torch."""
    import torch

    return getattr(torch, resolve(name).name)
