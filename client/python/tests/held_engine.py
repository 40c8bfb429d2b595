"""An engine of plain torch that keeps what each version brought, for tests of trainers' adapters."""

import contextlib
import threading

import torch

import refitd

SECONDS = 300
INSTANCE = "vllm-0"
SHAPES = {"a.weight": (7, 4), "b.weight": (4, 6), "c.bias": (5,), "d.weight": (3, 2)}


def tensors_of(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Held:
    """An engine of plain torch on a thread; `by_version`: copies of what it held after each version."""

    def __init__(self, daemon, group):
        self.by_version, self._closing = {}, threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(daemon.socket, group), daemon=True)
        self._thread.start()

    def _serve(self, socket, group):
        tensors = {name: refitd.empty(shape, torch.float32) for name, shape in SHAPES.items()}
        options = dict(dirty=True, device="host", socket=socket, connect=refitd.Connect(wait_seconds=SECONDS))
        with refitd.Engine(group, instance=INSTANCE, **options) as engine:
            engine.register(tensors)
            while not self._closing.is_set():
                event = engine.poll(0.1)
                if isinstance(event, refitd.Prepare):
                    with contextlib.suppress(refitd.FailedPrecondition):  # given up meanwhile
                        event.ready()
                elif isinstance(event, refitd.Committed):
                    self.by_version[event.version] = {name: tensor.clone() for name, tensor in tensors.items()}

    def close(self):
        self._closing.set()
        self._thread.join()


def check(held, version, seed):
    for name, tensor in tensors_of(seed).items():
        assert torch.equal(held.by_version[version][name], tensor), (version, name)
