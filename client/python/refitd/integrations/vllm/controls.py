"""The calls to an offline vllm.LLM for `refitd.serving.driver.Driver`, and what every driver of vLLM asks of its configuration.

Under an external launcher, such as torchrun, each process has an LLM of its own with the worker of one rank, all are called alike, and generate
together by collectives. Such processes must take each version between the same two calls of `generate`: a process that takes one while another
generates would wait for the other's rank, and the other for its collective. So `Follower` asks, before it acts, what all processes have seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import FailedPrecondition
from ...serving import lifecycle
from ...serving.driver import Alone, Driver, Follower, Value, update_info
from ...serving.settings import Settings
from . import versions
from .versions import LEAVE, by_external_launcher, check_backend, device_of, starts_clean, world_size_of


class Launched(Alone):
    """One of the processes of an external launcher, after its LLM was made."""

    def __init__(self) -> None:
        from vllm.distributed.parallel_state import get_world_group

        world = get_world_group()
        self.index, self.count = int(world.rank_in_group), int(world.world_size)
        self._group = world.cpu_group

    def all(self, value: Value) -> list[Value]:
        import torch.distributed

        values: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(values, value, group=self._group)
        return values

    def compare(self, serves: bool, version: int | None) -> None:
        self.apart = any(said != (True, version) for said in self.all((serves, version)))


class OfflineControls:
    """The calls to a vllm.LLM, which generates only while `generate` runs: so pausing it means that it takes no request (P2)."""

    def __init__(self, llm: Any, processes: Alone) -> None:
        self._llm = llm
        self._paused = False
        self._sleep, self._wake_up = llm.sleep, llm.wake_up
        add_request = llm.llm_engine.add_request

        def add_request_unless_paused(*arguments: Any, **options: Any) -> Any:
            if self._paused or processes.apart:
                raise FailedPrecondition("the engine's weights are not one whole version: call Follower.wait before generate")
            return add_request(*arguments, **options)

        llm.llm_engine.add_request = add_request_unless_paused

    def stand_before_sleep(self, driver: Driver) -> None:
        """From now on `sleep` and `wake_up` of the LLM tell the driver, which detaches before and attaches anew afterwards."""

        def sleep(level: int = 1, *arguments: Any, **options: Any) -> None:
            if driver.closed or level < 1:  # level 0 keeps all memory
                self._sleep(level, *arguments, **options)
            else:
                driver.sleep(level)

        def wake_up(tags: list[str] | None = None) -> Any:
            if driver.closed or driver.machine.state is not lifecycle.State.ASLEEP:
                return self._wake_up(tags)
            if tags is not None:
                raise FailedPrecondition("the engine sleeps and wakes as a whole, without tags")
            driver.wake()
            return True

        self._llm.sleep, self._llm.wake_up = sleep, wake_up

    def pause(self, mode: str) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def _reset_caches(self) -> None:
        if not self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True):
            raise RuntimeError("vLLM did not reset its prefix cache")
        self._llm.reset_mm_cache()
        self._llm.llm_engine.reset_encoder_cache()

    def register(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def unregister(self) -> None:
        llm = self._llm
        if hasattr(llm, "shutdown_weight_transfer_engine"):
            llm.shutdown_weight_transfer_engine()
            return
        llm.start_weight_update(**versions.start_arguments(llm.start_weight_update))
        llm.update_weights({"update_info": LEAVE})
        llm.finish_weight_update()

    def write(self, version: int, reset_caches: bool) -> None:
        if reset_caches:
            self._reset_caches()
        llm = self._llm
        llm.start_weight_update(**versions.start_arguments(llm.start_weight_update))
        llm.update_weights({"update_info": update_info(version)})
        llm.finish_weight_update(*versions.finish_arguments(llm.finish_weight_update, version))

    def sleep(self, level: int) -> None:
        self._sleep(level)

    def wake(self) -> None:
        self._wake_up()


def follow(llm: Any, said: Mapping[str, Any] | None) -> Follower:
    """See refitd.integrations.vllm.follow."""
    config = llm.llm_engine.vllm_config
    check_backend(config)
    processes = Launched() if by_external_launcher(config.parallel_config) else Alone()
    controls = OfflineControls(llm, processes)
    driver = Driver(
        controls,
        Settings.of(said),
        world_size=world_size_of(config),
        clean=starts_clean(config),
        device=device_of(config),
        patient=False,
        index=processes.index,
        drivers=processes.count,
    )
    controls.stand_before_sleep(driver)
    return Follower(driver, processes)
