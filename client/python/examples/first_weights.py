"""First weights: a trainer with two shards, an engine with the whole tensor, and three versions. It needs numpy, and starts a daemon of its own.

    python first_weights.py

The engine is a process of its own. It prints what it holds after each commit.
"""

import multiprocessing
import threading

import numpy

import refitd
import refitd.testing

ROWS, COLUMNS, VERSIONS, SECONDS = 1024, 1024, 3, 60


def engine_process(socket):
    weights = refitd.empty((ROWS, COLUMNS), "float32", like="numpy")  # what the engine computes with
    with refitd.Engine("policy", instance="engine-0", socket=socket) as engine:
        engine.register({"w": weights})
        version = 0
        while version < VERSIONS:
            event = engine.next(SECONDS)
            if isinstance(event, refitd.Prepare):
                event.ready()  # a real engine first waits until no request reads the weights
            elif isinstance(event, refitd.Committed):
                version = event.version
                print(f"engine: version {version}, every element is {numpy.unique(weights)}", flush=True)


def trainer_rank(socket, rank, spec):
    shard = refitd.empty((ROWS // 2, COLUMNS), "float32", like="numpy")
    with refitd.Trainer("policy", rank=rank, world_size=2, spec=spec, socket=socket) as trainer:
        trainer.register([refitd.Shard("w", (ROWS, COLUMNS), shard, (rank * ROWS // 2, 0))])
        for version in range(1, VERSIONS + 1):
            shard[:] = version / 2  # an optimizer step
            result = trainer.refit(version)
            if rank == 0:
                print(f"trainer: version {version} committed, {result.bytes} bytes", flush=True)


def main():
    with refitd.testing.daemon() as daemon:
        engine = multiprocessing.get_context("spawn").Process(target=engine_process, args=(daemon.socket,))
        engine.start()
        spec = refitd.GroupSpec(min_instances=1)  # wait for the engine
        ranks = [threading.Thread(target=trainer_rank, args=(daemon.socket, rank, spec)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        engine.join(SECONDS)


if __name__ == "__main__":
    main()
