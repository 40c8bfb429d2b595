"""What the integrations of inference engines share; it imports no engine. Here: the settings of an engine, those of init info or of the environment,
and the manifest of the checkpoint that trainers send.
"""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .._core.member import Connect
from ..errors import InvalidArgument
from ..layout import TensorSpec
from ..layout.memory import resolve

PAUSES = ("keep", "wait", "abort")
CACHES = ("reset", "keep", "version")
PROOFS = ("report", "require", "off")  # what is unproved is reported or refused; or the proof does not run
ARENAS = ("off", "device", "host")
RESTORES = ("off", "on")
DERIVED = ("on", "off", "fp8_block", "fp8_block_cuda", "fp8_block_reciprocal", "fp8_block_pow2")  # refitd.serving.derived
# The default of Settings.loader_bytes.
LOADER_BYTES = 8 << 30


@dataclass(frozen=True)
class Settings:
    """How an engine attaches, and what it does on an update. Each field's variable is REFITD_ and the field's name in capitals.

    `group`, `instance`, `socket`, `coordinator`: as in refitd.Engine. All ranks of an engine have one `instance`.
    `trainer_identity`: whose weights the engine takes, as in refitd.Engine; None: any owner's.
    `manifest`: a folder with safetensors files, one such file, or a JSON file {name: {"dtype", "shape"}}: the checkpoint's tensors
    as trainers have them; None: those of the model that vLLM was started with.
    `pause`: what happens to requests in flight: "keep" freezes them and goes on after the update, "wait" lets them end first, "abort"
    ends them.
    `cache`: "reset" drops the prefix, encoder and multi-modal caches at each update, "keep" keeps them, "version" (vLLM's alone) keeps the blocks of
    the prefix cache for the requests that were accepted before the update, and later requests find none of them.
    `loader_bytes`: the most memory that a rank spends on tensors that can't be delivered in place; a model that needs more is
    refused by name.
    `arena`: "device" keeps the weights in memory with two sides (refitd.adopt), so that a version arrives while the engine serves, and only the
    exchange of the sides pauses it; "host" does so with versions in pinned host memory, which are copied to the GPU in the pause; "off" does
    neither. Workers read it from the environment, when they load the model.
    `restore`: "on" lets the daemon keep the arenas of an engine that ends, and an engine that starts in its place takes them up with their version
    (Engine.restore); "off" does not. Needs `arena`, and not `proof` "require", which needs random weights. Workers read it, and `group`,
    `instance` and `socket`, as they do `arena`.
    `proof`: whether the forward is proved to read what is written (refitd.serving.proof) when a rank first attaches: "report" refuses or processes what
    fails, and reports what is unproved; "require" refuses what is unproved too; "off" runs nothing.
    `derived`: "on": refits derive the values and scales that the engine makes of weights when it loads them, where that gives the same
    (docs/derived.md); trainers must refit then, as pushes bring no derived tensors. A kind's name: how refits quantise for an engine with a checkpoint
    that is quantised in blocks, where `manifest` has the trainers' tensors; None and "on": as "fp8_block". "off": nothing is derived.
    `logits`: a folder, the same for all engines of the group: after each commit, before the engine goes on, the logits of fixed tokens are
    compared with those that the first engine of the same shape to commit left there; None: nothing is compared.
    `wait_seconds`: for the daemon and the group to appear, when a rank attaches.
    `reattach_seconds`: how long a rank tries to attach again after its daemon was lost.
    """

    group: str = ""
    instance: str = ""
    socket: str | None = None
    coordinator: str | None = None
    trainer_identity: str | None = None
    manifest: str | None = None
    pause: str = "keep"
    cache: str = "reset"
    loader_bytes: int = LOADER_BYTES
    arena: str = "off"
    restore: str = "off"
    proof: str = "report"
    derived: str | None = None
    logits: str | None = None
    wait_seconds: float = 600.0
    reattach_seconds: float = 600.0

    @property
    def in_arenas(self) -> bool:
        return self.arena != "off"

    @property
    def restores(self) -> bool:
        return self.restore != "off"

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ) -> Settings:
        """Settings of `given`, else of the environment. Raises InvalidArgument that names the field."""
        values: dict[str, Any] = {}
        for field in fields(cls):
            value: Any = (given or {}).get(field.name)
            if value is None or value == "":
                value = environment.get(f"REFITD_{field.name.upper()}")
            if value is None or value == "":
                continue
            if field.name.endswith("_seconds") or field.name.endswith("_bytes"):
                try:
                    value = float(value) if field.name.endswith("_seconds") else int(value)
                except (TypeError, ValueError):
                    raise InvalidArgument(f"{field.name}: {value!r} is no number", culprit=field.name) from None
                if value < 0:
                    raise InvalidArgument(f"{field.name}: {value!r} is negative", culprit=field.name)
            values[field.name] = value
        made = cls(**values)
        for name, allowed in (("pause", PAUSES), ("cache", CACHES), ("arena", ARENAS), ("restore", RESTORES), ("proof", PROOFS), ("derived", DERIVED)):
            if getattr(made, name) not in (None, *allowed):
                raise InvalidArgument(f"{name}: {getattr(made, name)!r} is none of {', '.join(allowed)}", culprit=name)
        if made.restores and (not made.in_arenas or made.proof == "require"):
            raise InvalidArgument(f"restore: 'on' with arena {made.arena!r} and proof {made.proof!r}: it needs an arena, and not all of the proof", culprit="restore")
        return made

    @classmethod
    def of_server(cls, logger: logging.Logger) -> Settings | None:
        """Settings of a server's environment; without an instance there, host and process name it, whose place no other takes. None, and a
        warning, without a group."""
        made = cls.of()
        if not made.group:
            logger.warning("refitd: REFITD_GROUP is not set, so that nothing drives updates here")
            return None
        return made if made.instance else replace(made, instance=f"{socket.gethostname()}-{os.getpid()}", restore="off")

    def connect(self, client: str) -> Connect:
        """How a member of the engine attaches. `client`: the engine's kind, for status pages."""
        return Connect(self.socket, self.coordinator, self.wait_seconds, reattach_seconds=self.reattach_seconds, client=client)

    def of_ranks(self) -> dict[str, Any]:
        """The fields that the workers' ranks take, by name; "" where they are None."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("pause", "cache")}
        return {name: "" if value is None else value for name, value in values.items()}

    def checked(self) -> Settings:
        """Returns this object. Raises InvalidArgument where group or instance is missing."""
        for name in ("group", "instance"):
            if not getattr(self, name):
                raise InvalidArgument(f"{name} is not said: set REFITD_{name.upper()}, or pass it in the init info", culprit=name)
        return self


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
        listed = [entry for file in files for entry in _read_header(file).items()]
    elif path.suffix == ".safetensors":
        listed = list(_read_header(path).items())
    elif path.is_file():
        listed = list(_read_json(path).items())
    else:
        listed = _read_hub(source)
    specs: dict[str, TensorSpec] = {}
    for name, entry in listed:
        if name in specs:
            raise InvalidArgument(f"{source} has tensor '{name}' twice", tensor=name)
        specs[name] = _spec(source, name, entry)
    return [specs[name] for name in sorted(specs)]


def write_manifest(path: str, tensors: dict[str, Any]) -> None:
    """Writes a JSON file for REFITD_MANIFEST. `tensors`: by name, tensors or anything with `dtype` and `shape`."""
    entries = {name: {"dtype": resolve(t.dtype, f"tensor '{name}'").name, "shape": list(t.shape)} for name, t in tensors.items()}
    Path(path).write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def _spec(source: str, name: str, entry: Any) -> TensorSpec:
    try:
        dtype, shape = entry["dtype"], tuple(int(n) for n in entry["shape"])
    except (TypeError, KeyError, ValueError):
        raise InvalidArgument(f"{source}: tensor '{name}' has no dtype and shape: {entry!r}", tensor=name) from None
    return TensorSpec(name, resolve(DTYPES.get(dtype, dtype), f"{source}: tensor '{name}'").name, shape)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        made = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidArgument(f"{path} is no JSON file: {error}", culprit=str(path)) from None
    if not isinstance(made, dict):
        raise InvalidArgument(f"{path} has no object of names", culprit=str(path))
    return made


def _read_header(path: Path) -> dict[str, Any]:
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


def _read_hub(name: str) -> list[tuple[str, Any]]:
    """The tensors of a model on the Hugging Face hub: (name, {"dtype", "shape"})."""
    try:
        from huggingface_hub import get_safetensors_metadata
    except ImportError:
        raise InvalidArgument(f"{name} is no file or folder, and huggingface_hub is not installed", culprit=name) from None
    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception as error:
        raise InvalidArgument(f"{name} is no file or folder, and the hub gives no headers of it: {error}", culprit=name) from error
    return [(tensor, {"dtype": info.dtype, "shape": info.shape}) for file in files for tensor, info in file.tensors.items()]
