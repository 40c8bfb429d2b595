"""The asyncio forms: they don't block the loop, and a cancelled task gives up what it waited for."""

import asyncio
import contextlib
import gc
import random
import threading
import time
import unittest

import refitd
import refitd.aio
from refitd import TensorSpec
from refitd._core import native
from support import SECONDS, DaemonTest, wait_until, whole

SPEC = TensorSpec("w", "uint8", (64,))


class AsyncTest(DaemonTest):
    def run_async(self, main):
        return asyncio.run(asyncio.wait_for(main, SECONDS))

    async def attach(self, loader=False):
        trainer = await refitd.aio.Trainer.attach(self.group, socket=self.daemon.socket)
        engine = await refitd.aio.Engine.attach(self.group, instance="a", socket=self.daemon.socket, loader=loader)
        return trainer, engine

    async def serve(self, engine, events):
        async for event in engine:
            events.append(event)
            if isinstance(event, refitd.Prepare):
                await engine.ready(event.version)
            elif isinstance(event, refitd.Part):
                await engine.ack(event)


class AioTest(AsyncTest):
    def test_refit_and_events(self):
        async def main():
            trainer, engine = await self.attach()
            source, target = refitd.Region(64), refitd.Region(64)
            source[:] = b"a" * 64
            async with trainer, engine:
                await trainer.register_layout([SPEC], [whole(source, SPEC)])
                await engine.register_layout([SPEC], [whole(target, SPEC)])
                events = []
                server = asyncio.create_task(self.serve(engine, events))
                result = await trainer.refit(1)
                self.assertEqual((result.version, target[:]), (1, source[:]))
                self.assertEqual(await trainer.get_update(1), "committed")
                while engine.version != 1:
                    await asyncio.sleep(0.01)
                await engine.close()
                await server
                self.assertEqual([type(event) for event in events], [refitd.Prepare, refitd.Committed])
            with self.assertRaises(refitd.Closed):
                await trainer.refit(2)

        self.run_async(main())

    def test_pushes(self):
        async def main():
            trainer, engine = await self.attach(loader=True)
            async with trainer, engine:
                events = []
                server = asyncio.create_task(self.serve(engine, events))
                async with await trainer.update(1, tensor_count=2) as update:
                    await update.push("w", b"x" * 100_000)
                    await update.push("v", b"y")
                self.assertEqual((update.result.bytes, update.result.committed), (100_001, 1))
                with self.assertRaises(KeyError):
                    async with await trainer.update(2, tensor_count=1) as update:
                        raise KeyError
                self.assertEqual(await trainer.get_update(2), "aborted")
                await engine.close()
                await server

        self.run_async(main())

    def test_a_cancelled_refit_gives_the_update_up_at_once(self):
        async def main():
            trainer, engine = await self.attach()
            async with trainer, engine:
                await trainer.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
                await engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
                refit = asyncio.create_task(trainer.refit(1))
                self.assertIsInstance(await engine.next(SECONDS), refitd.Prepare)  # and no answer: the refit waits
                refit.cancel()
                with self.assertRaises(asyncio.CancelledError):
                    await refit
                event = await engine.next(SECONDS)
                self.assertIsInstance(event, refitd.Aborted)
                self.assertIn("interrupted", event.reason)
                self.assertEqual((event.dirty, await trainer.get_update(1)), (False, "aborted"))

        self.run_async(main())

    def test_a_cancelled_wait_for_events_loses_none(self):
        async def main():
            trainer, engine = await self.attach(loader=True)
            async with trainer, engine:
                for version in range(1, 6):
                    waits = asyncio.create_task(engine.next())
                    begins = asyncio.create_task(trainer.update(version, tensor_count=1))
                    await asyncio.sleep(0.002 * version)
                    waits.cancel()
                    try:
                        event = await waits
                    except asyncio.CancelledError:
                        event = await engine.next(SECONDS)
                    self.assertEqual((type(event), event.version), (refitd.Prepare, version))
                    await engine.ready(version)
                    await (await begins).abort()
                    self.assertIsInstance(await engine.next(SECONDS), refitd.Aborted)

        self.run_async(main())

    def test_an_event_that_came_for_a_loop_that_was_closed_is_the_next_to_ask_s(self):
        trainer, engine = self.trainer(), self.engine()
        source, target = refitd.Region(64), refitd.Region(64)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        loop = asyncio.new_event_loop()
        loop.set_exception_handler(lambda *_: None)  # its tasks end with it
        task = loop.create_task(refitd.aio.Engine(engine).next())
        for _ in range(3):  # it asks on a thread by then
            loop.run_until_complete(asyncio.sleep(0))
        loop.close()
        refit = threading.Thread(target=trainer.refit, args=(1,))
        refit.start()
        wait_until(lambda: engine._pending, "the event that was put back")
        engine.next(SECONDS).ready()
        self.assertIsInstance(engine.next(SECONDS), refitd.Committed)
        refit.join(SECONDS)
        del task

    def test_waiting_does_not_block_the_loop(self):
        async def main():
            trainer, engine = await self.attach()
            async with trainer, engine:
                waits = [asyncio.create_task(engine.next(0.5)), asyncio.create_task(trainer.update(1, duration_seconds=0.5))]
                ticks = 0
                while not all(task.done() for task in waits):
                    await asyncio.sleep(0.01)
                    ticks += 1
                self.assertGreater(ticks, 3)
                results = await asyncio.gather(*waits, return_exceptions=True)
                for result in results:
                    self.assertIsInstance(result, (refitd.Error, refitd.Prepare))

        self.run_async(main())

    def test_a_timeout_is_deadline_exceeded(self):
        async def main():
            trainer, engine = await self.attach()
            async with trainer, engine:
                start = time.monotonic()
                with self.assertRaises(refitd.DeadlineExceeded):
                    await engine.next(0.05)
                self.assertGreaterEqual(time.monotonic() - start, 0.05)

        self.run_async(main())


    def test_tasks_that_wait_share_one_thread_and_keep_their_own_timeouts(self):
        def threads():
            return sum(thread.name == "refitd" for thread in threading.enumerate())

        async def main():
            trainer, engine = await self.attach()
            async with trainer, engine:
                before = threads()
                waits = [asyncio.create_task(engine.next()) for _ in range(100)]
                impatient = [asyncio.create_task(engine.next(timeout)) for timeout in (0, 0.01, 0.2)]
                for error in await asyncio.gather(*impatient, return_exceptions=True):
                    self.assertIsInstance(error, refitd.DeadlineExceeded)
                self.assertLessEqual(threads(), before + 1)
                for task in waits[:-1]:
                    task.cancel()
                await asyncio.gather(*waits[:-1], return_exceptions=True)
                self.assertFalse(waits[-1].done())
                await engine.close()
                with self.assertRaises(refitd.Closed):
                    await waits[-1]

        self.run_async(main())


class StormTest(AsyncTest):
    """Many tasks at once, cancelled at random. Seeded, but for the order in which threads run: nothing may depend on that."""

    def setUp(self):
        super().setUp()
        random.seed(1)

    async def registered(self):
        trainer, engine = await self.attach()
        source, target = refitd.Region(64), refitd.Region(64)
        await trainer.register_layout([SPEC], [whole(source, SPEC)])
        await engine.register_layout([SPEC], [whole(target, SPEC)])
        return trainer, engine, source, target

    def test_cancelled_refits_and_questions_leave_nothing_behind(self):
        async def main():
            trainer, engine, source, target = await self.registered()
            async with trainer, engine:
                server = asyncio.create_task(self.serve(engine, []))
                for version in range(1, 101):
                    source[:] = bytes([version]) * 64
                    refit = asyncio.create_task(trainer.refit(version))
                    questions = [asyncio.create_task(trainer.get_update(version)) for _ in range(5)]
                    await asyncio.sleep(random.choice((0, 0, random.random() / 300)))
                    for task in (refit, *questions):
                        task.cancel()
                    await asyncio.gather(refit, *questions, return_exceptions=True)
                    self.assertIn(await trainer.get_update(version), ("unknown", "committed", "aborted"))
                source[:] = b"z" * 64
                self.assertEqual((await trainer.refit(200)).committed, 1)
                self.assertEqual(target[:], source[:])
                await engine.close()
                await server

        self.run_async(main())

    def test_cancelled_pushes_leave_no_update_open_and_no_handle(self):
        async def main():
            trainer, engine = await self.attach(loader=True)

            async def push(version):
                async with await trainer.update(version, tensor_count=8) as update:
                    for i in range(8):
                        await update.push(f"t{i}", bytes([i]) * 40_000)
                return update.member.result

            async with trainer, engine:
                server = asyncio.create_task(self.serve(engine, []))
                for version in range(1, 61):
                    task = asyncio.create_task(push(version))
                    await asyncio.sleep(random.random() / 100)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                self.assertEqual((await push(100)).committed, 1)
                await engine.close()
                await server

        gc.collect()
        before = len(native._open_handles)
        self.run_async(main())

        def none_is_left():
            gc.collect()
            return len(native._open_handles) <= before

        wait_until(none_is_left, "no handle is left")

    def test_events_come_once_to_hundreds_of_tasks_of_which_most_are_cancelled(self):
        versions = range(1, 41)

        async def main():
            trainer, engine, _, _ = await self.registered()
            got = []

            async def take():
                event = await engine.next()
                got.append(event)
                while isinstance(event, refitd.Prepare):
                    try:
                        await engine.ready(event.version)
                    except asyncio.CancelledError:
                        continue  # it may have been answered or not
                    except refitd.FailedPrecondition:
                        pass
                    break

            async def refits():
                for version in versions:
                    self.assertEqual((await trainer.refit(version)).committed, 1)

            async with trainer, engine:
                trained = asyncio.create_task(refits())
                tasks = []
                while not trained.done() or len(got) < 2 * len(versions):
                    tasks = [task for task in tasks if not task.done()]
                    tasks += [asyncio.create_task(take()) for _ in range(200 - len(tasks))]
                    await asyncio.sleep(random.random() / 100)
                    for task in random.sample(tasks, 150):
                        task.cancel()
                await trained
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            expected = [(kind, version) for version in versions for kind in (refitd.Prepare, refitd.Committed)]
            self.assertEqual([(type(event), event.version) for event in got], expected)

        self.run_async(main())

    def test_cancelled_attaching_leaves_no_rank_attached(self):
        async def main():
            async with await refitd.aio.Trainer.attach(self.group, socket=self.daemon.socket):
                names = [f"e{i}" for i in range(20)]

                def attach(name):
                    return refitd.aio.Engine.attach(self.group, instance=name, socket=self.daemon.socket)

                tasks = [asyncio.create_task(attach(name)) for name in names]
                for task in tasks:
                    await asyncio.sleep(random.random() / 1000)
                    task.cancel()
                for made in await asyncio.gather(*tasks, return_exceptions=True):
                    if isinstance(made, refitd.aio.Engine):
                        await made.close()
                for name in names:
                    engine = None
                    while engine is None:
                        with contextlib.suppress(refitd.AlreadyExists):
                            engine = await attach(name)
                    await engine.close()

        self.run_async(main())


if __name__ == "__main__":
    unittest.main()
