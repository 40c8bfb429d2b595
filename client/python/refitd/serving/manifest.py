"""The list of a checkpoint's tensors (names, dtypes, shapes), read without reading a weight.

Headers of safetensors files have the list. Their format: 8 bytes with the header's length, little-endian, then the header as JSON
(https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..layout.records import TensorSpec
from ..errors import InvalidArgument

# safetensors' names of dtypes, and refitd's.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
# A header of the largest known models has 20 MB; a file that claims more is no safetensors file.
MAX_HEADER_BYTES = 1 << 30


def read_manifest(source: str) -> list[TensorSpec]:
    """The tensors of `source`: a folder with safetensors files, one such file, a JSON file {name: {"dtype": ..., "shape": [...]}}, or
    the name of a model on the Hugging Face hub, of which only headers are fetched. In the order of their names.

    Raises InvalidArgument that names the file or the tensor.
    """
    path = Path(source)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise InvalidArgument(
                f"{source} has no *.safetensors file to read tensors' names, dtypes and shapes from: set REFITD_MANIFEST", culprit=source
            )
        listed = [entry for file in files for entry in _header(file).items()]
    elif path.suffix == ".safetensors":
        listed = list(_header(path).items())
    elif path.is_file():
        listed = list(_json(path).items())
    else:
        listed = _of_hub(source)
    specs: dict[str, TensorSpec] = {}
    for name, entry in listed:
        if name in specs:
            raise InvalidArgument(f"{source} has tensor '{name}' twice", culprit=f"tensor '{name}'")
        specs[name] = _spec(source, name, entry)
    return [specs[name] for name in sorted(specs)]


def write_manifest(path: str, tensors: dict[str, Any]) -> None:
    """Writes a JSON file for REFITD_MANIFEST. `tensors`: by name, tensors or anything with `dtype` and `shape`."""
    from ..layout.dtypes import resolve

    entries = {name: {"dtype": resolve(t.dtype, f"tensor '{name}'").name, "shape": list(t.shape)} for name, t in tensors.items()}
    Path(path).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def _spec(source: str, name: str, entry: Any) -> TensorSpec:
    from ..layout.dtypes import resolve

    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
    except (TypeError, KeyError, ValueError):
        raise InvalidArgument(f"{source}: tensor '{name}' has no dtype and shape: {entry!r}", culprit=f"tensor '{name}'") from None
    return TensorSpec(name, resolve(DTYPES.get(dtype, dtype), f"{source}: tensor '{name}'").name, shape)


def _json(path: Path) -> dict[str, Any]:
    try:
        made = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path} is no JSON file: {error}", culprit=str(path)) from None
    if not isinstance(made, dict):
        raise InvalidArgument(f"{path} has no object of names", culprit=str(path))
    return made


def _header(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise InvalidArgument(f"{path} is no safetensors file: its header has {length} bytes", culprit=str(path))
        try:
            made = json.loads(file.read(length))
        except ValueError as error:
            raise InvalidArgument(f"{path} is no safetensors file: {error}", culprit=str(path)) from None
    made.pop("__metadata__", None)
    return dict(made)


def _of_hub(name: str) -> list[tuple[str, Any]]:
    try:
        from huggingface_hub import get_safetensors_metadata
    except ImportError:
        raise InvalidArgument(f"{name} is no file or folder, and huggingface_hub is not installed", culprit=name) from None
    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:
        raise InvalidArgument(f"{name} is no file or folder, and the hub gives no headers of it: {error}", culprit=name) from error
    return [(tensor, {"dtype": info.dtype, "shape": info.shape}) for file in files for tensor, info in file.tensors.items()]
