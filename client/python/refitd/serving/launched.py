"""vLLM under an external launcher, such as torchrun: each process has an LLM of its own with the worker of one rank, all are called alike,
and generate together by collectives.

Such processes must take each version between the same two calls of `generate`: a process that takes one while another generates would wait
for the other's rank, and the other for its collective. So `driver.Follower` asks here, before it acts, what all processes have seen.
"""

from __future__ import annotations

from typing import Any, TypeVar

_Value = TypeVar("_Value")


class Alone:
    """An LLM whose workers all belong to this process. `index`: of this process among `count`. `apart`: whether the processes differ in
    version or in whether they serve, so that none may generate."""

    index, count, apart = 0, 1, False

    def all(self, value: _Value) -> list[_Value]:
        """The values of all processes, by index; each must call this alike. Raises RuntimeError where another process has ended."""
        return [value]

    def compare(self, serves: bool, version: int | None) -> None:
        """Sets `apart`."""


class Launched(Alone):
    """One of the processes of an external launcher, after its LLM was made."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        self.index, self.count = int(world.rank_in_group), int(world.world_size)
        self._group = world.cpu_group

    def all(self, value: _Value) -> list[_Value]:
        import torch.distributed

        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def compare(self, serves: bool, version: int | None) -> None:
        self.apart = any(said != (True, version) for said in self.all((serves, version)))


def by_external_launcher(parallel: Any) -> bool:
    """Whether the parallel config of vLLM says so. Its world_size then counts data-parallel replicas too, and its rank is of them all."""
    return bool(parallel.distributed_executor_backend == "external_launcher")
