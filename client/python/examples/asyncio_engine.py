"""An engine in asyncio, with loader delivery: it feeds each part to its own loader, and serves requests between updates.

Run it beside push_trainer.py. A lock stands for the engine's scheduler: whoever generates holds it, and so does an update.
"""

import argparse
import asyncio

import torch
from tiny_model import DTYPE, EngineModel, digest

import refitd
import refitd.aio


async def serve(model, weights, answered):
    """Answers requests, one after the other, while the weights are whole."""
    while True:
        async with weights:
            token = await asyncio.to_thread(lambda: model(torch.tensor([[1, 2, 3]]))[0, -1].argmax().item())
        answered.append(token)
        await asyncio.sleep(0)


async def update(engine, model, weights, answered, options):
    """Takes updates until so many versions were committed."""
    joiner = refitd.Joiner()  # tensors larger than a slot come in parts
    paused = False
    committed = 0
    while committed < options.versions:
        event = await engine.next(options.seconds)  # DeadlineExceeded: no trainer came
        if isinstance(event, refitd.Prepare):
            if not paused:
                await weights.acquire()  # returns when no request uses the weights
                paused = True
            await engine.ready(event.version)
        elif isinstance(event, refitd.Part):
            await asyncio.to_thread(model.load_weights, [(view.name, view.torch()) for view in joiner.add(event)])
            await engine.ack(event)
        elif isinstance(event, (refitd.Committed, refitd.Aborted)):
            joiner.reset()
            if isinstance(event, refitd.Committed):
                print(f"version {event.version} digest {digest(model.parts())} answered {len(answered)}", flush=True)
            # A dirty engine stays paused until the next commit.
            if paused and not getattr(event, "dirty", False):
                weights.release()
                paused = False
            committed += isinstance(event, refitd.Committed)


async def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", default="policy")
    parser.add_argument("--instance", default="engine-0")
    parser.add_argument("--versions", type=int, default=3, help="end after so many")
    parser.add_argument("--seconds", type=float, default=200, help="fail where no event comes for so long (%(default)s)")
    options = parser.parse_args()

    model = EngineModel().to(DTYPE).requires_grad_(False)
    weights, answered = asyncio.Lock(), []
    engine = await refitd.aio.Engine.attach(options.group, instance=options.instance, loader=True, connect=refitd.Connect(wait_seconds=200))
    async with engine:
        print("attached", flush=True)
        serving = asyncio.create_task(serve(model, weights, answered))
        await update(engine, model, weights, answered, options)
        serving.cancel()


if __name__ == "__main__":
    asyncio.run(main())
