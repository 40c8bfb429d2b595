"""A trainer as a program that can be killed, with commands as engine_program.py has them. It does without torch, so that a process that
takes the place of a killed one is there soon.

usage: trainer_program.py CHECKPOINT OPTIONS     OPTIONS: JSON {"follow": {"group": ..., "socket": ...}}
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import refitd
from engine_program import serve_commands
from refitd.serving import DTYPES, _read_header

# Far smaller than the model, so that an update has many parts.
SLOT_BYTES = 1 << 18


def tensors_of(checkpoint: str) -> Iterator[tuple[str, Any, str, list[int]]]:
    """Name, bytes, dtype and shape of each tensor."""
    path = Path(checkpoint) / "model.safetensors"
    with open(path, "rb") as file:
        start = 8 + int.from_bytes(file.read(8), "little")
    data = numpy.memmap(path, numpy.uint8, "r")
    for name, entry in sorted(_read_header(path).items()):
        first, end = entry["data_offsets"]
        yield name, data[start + first : start + end], DTYPES[entry["dtype"]], entry["shape"]


class Program:
    def __init__(self, checkpoint: str, options: dict[str, Any]) -> None:
        where = options["follow"]
        self.trainer = refitd.Trainer(
            where["group"], rank=0, world_size=1, socket=where["socket"], device="host", spec=refitd.GroupSpec(slot_bytes=SLOT_BYTES, slots=4)
        )
        self.update: Any = None

    def send(self, version: int, checkpoint: str, seconds: float) -> int:
        """Makes a whole update; returns how many instances committed."""
        self.begin(version, seconds)
        self.push(checkpoint, 0)
        self.push(checkpoint, 1)
        return self.commit()

    def begin(self, version: int, seconds: float) -> None:
        self.update = self.trainer.update(version, duration_seconds=seconds)

    def push(self, checkpoint: str, half: int) -> None:
        """Pushes the first or the second half of the tensors; returns when the daemon has taken them in."""
        tensors = list(tensors_of(checkpoint))
        middle = len(tensors) // 2
        for name, data, dtype, shape in tensors[:middle] if half == 0 else tensors[middle:]:
            self.update.push(name, data, dtype=dtype, shape=shape)
        self.update.flush()

    def commit(self) -> int:
        """Commits; returns how many instances committed."""
        return int(self.update.commit().committed)

    def abort(self) -> None:
        self.update.abort("given up")
        self.update.close()


if __name__ == "__main__":
    serve_commands(Program)
