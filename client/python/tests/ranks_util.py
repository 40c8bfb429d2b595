"""Several gloo ranks on this machine, for tests of what torch.distributed holds."""

import os
import tempfile
import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

DEADLINE = timedelta(seconds=120)


def _rank_main(rank, world, folder, function, arguments):
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


def run_ranks(world, function, *arguments):
    """What `function(rank, world, *arguments)` returned on each of `world` ranks; it must be importable."""
    with tempfile.TemporaryDirectory() as folder:
        context = multiprocessing.start_processes(
            _rank_main, (world, folder, function, arguments), nprocs=world, join=False, start_method="spawn"
        )
        try:
            end = time.monotonic() + DEADLINE.total_seconds()
            while not context.join(timeout=1):  # it returns when one rank ended, too
                if time.monotonic() > end:
                    raise AssertionError(f"ranks of {function.__name__} did not end within {DEADLINE}")
        except (multiprocessing.ProcessExitedException, multiprocessing.ProcessRaisedException) as error:
            errors = [open(f"{folder}/{r}.error").read() for r in range(world) if os.path.exists(f"{folder}/{r}.error")]
            raise AssertionError("\n".join(errors)) from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [torch.load(f"{folder}/{rank}.result", weights_only=False) for rank in range(world)]
