"""Several gloo ranks on this machine, for tests of what torch.distributed holds."""

import os
import tempfile
import time
import traceback
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

# Importing a framework alone takes a rank minutes where a machine does much else; only what hangs reaches this.
DEADLINE = timedelta(seconds=600)


def _run(rank, world, folder, function, arguments):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=DEADLINE)
    try:
        torch.save(function(rank, world, *arguments), f"{folder}/{rank}.result")
    except BaseException:
        with open(f"{folder}/{rank}.error", "w") as file:
            file.write(traceback.format_exc())
        os._exit(1)  # the others are told by their connections
    dist.barrier()
    dist.destroy_process_group()


def _serve(rank, world, pipe):
    """A rank of Ranks: runs what it is asked to, until the pipe is closed."""
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            return
        _run(rank, world, *asked)
        pipe.send(None)


class Ranks:
    """`world` processes that run one function after another, so that what they import is imported once. A context manager.

    Each run has a process group of its own. After a run that failed the next one has new processes.
    """

    def __init__(self, world, *, gpus=True):
        """`gpus`: whether the processes see GPUs of the machine."""
        self._world = world
        self._gpus = gpus
        self._context = multiprocessing.get_context("spawn")
        self._ranks = []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        ranks, self._ranks = self._ranks, []
        for process, pipe in ranks:
            process.kill()
            process.join()
            pipe.close()

    def run(self, function, *arguments):
        """Runs `function(rank, world, *arguments)`, which must be importable, on each rank; returns the results by rank."""
        if not self._ranks:
            self._start()
        with tempfile.TemporaryDirectory() as folder:
            try:
                for _, pipe in self._ranks:
                    pipe.send((folder, function, arguments))
                end = time.monotonic() + DEADLINE.total_seconds()
                for _, pipe in self._ranks:
                    if not pipe.poll(max(0.0, end - time.monotonic())):
                        raise AssertionError(f"ranks of {function.__name__} did not end within {DEADLINE}")
                    pipe.recv()
            except (EOFError, OSError) as error:
                self._await_end()
                errors = [open(f"{folder}/{r}.error").read() for r in range(self._world) if os.path.exists(f"{folder}/{r}.error")]
                raise AssertionError("\n".join(errors) or f"a rank of {function.__name__} died") from error
            except BaseException:
                self.close()
                raise
            return [torch.load(f"{folder}/{rank}.result", weights_only=False) for rank in range(self._world)]

    def _start(self):
        for rank in range(self._world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, self._world, theirs), daemon=True)
            with mock.patch.dict(os.environ, {} if self._gpus else {"CUDA_VISIBLE_DEVICES": ""}):
                process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _await_end(self):
        """Lets ranks that lost another one write their own errors, and ends them."""
        for process, _ in self._ranks:
            process.join(10)
        self.close()


def run_ranks(world, function, *arguments):
    """Runs `function(rank, world, *arguments)`, which must be importable, on each of `world` ranks; returns the results by rank."""
    with Ranks(world) as ranks:
        return ranks.run(function, *arguments)
