"""Two followers of vLLM under an external launcher, on threads that stand for its processes, over a real daemon."""

import threading
import unittest
from concurrent.futures import ThreadPoolExecutor

import refitd
from refitd.integrations import vllm as launched
from refitd.serving.driver import Driver, Follower
from refitd.serving import Settings
from support import SECONDS, DaemonTest

WORLD = 2


class Together:
    """What the processes tell each other, in rounds that all come to."""

    def __init__(self):
        self.barrier = threading.Barrier(WORLD, timeout=SECONDS)
        self.told = [None] * WORLD


class Process(launched.Launched):
    """One of the launcher's processes."""

    def __init__(self, index, together):
        self.index, self.count, self._together = index, WORLD, together

    def gather(self, value):
        together = self._together
        together.told[self.index] = value
        together.barrier.wait()
        values = list(together.told)
        together.barrier.wait()
        return values


class Controls:
    """The calls to an LLM whose one worker holds a tensor."""

    def __init__(self, test, index, refuses=False):
        self.test, self.index, self.refuses = test, index, refuses
        self.held = refitd.empty((4,), "float32")
        self.worker, self.paused, self.versions = None, False, []

    def pause(self, mode):
        self.paused = True

    def resume(self):
        self.paused = False

    def register(self, init_info):
        if self.refuses:
            raise refitd.FailedPrecondition("parameter 'w' is removed after loading", culprit="w")
        self.init_info = init_info
        options = {"rank": self.index, "world_size": WORLD + init_info["drivers"], "catch_up": False, "dirty": init_info["dirty"]}
        self.worker = self.test.engine(**options)
        self.worker.register({"w": self.held})

    def unregister(self):
        self.worker.close()

    def write(self, version, reset_caches):
        for event in self.worker:
            if isinstance(event, refitd.Prepare):
                event.ready()
            elif isinstance(event, refitd.Committed):
                self.versions.append(event.version)
                return
            elif isinstance(event, refitd.Aborted):
                raise refitd.UpdateAborted(event.reason)


class Launched(DaemonTest):
    def setUp(self):
        super().setUp()
        self.together = Together()
        self.threads = ThreadPoolExecutor(WORLD)
        self.addCleanup(self.threads.shutdown)

    def follow(self, *refuses):
        self.controls = [Controls(self, index, index in refuses) for index in range(WORLD)]
        settings = Settings.of({"group": self.group, "instance": "a", "socket": self.daemon.socket})

        def make(controls):
            process = Process(controls.index, self.together)
            driver = Driver(controls, settings, world_size=WORLD, clean=True, device="cpu", patient=False, index=process.index, drivers=process.count)
            try:
                return Follower(driver, process)
            except BaseException:
                driver.close()
                raise

        trainer = self.trainer()
        self.source = refitd.empty((4,), "float32")
        trainer.register({"w": self.source})
        making = [self.threads.submit(make, controls) for controls in self.controls]
        return trainer, making

    def each(self, call, followers):
        return [future.result(SECONDS) for future in [self.threads.submit(call, follower) for follower in followers]]

    def test_a_process_that_asked_before_the_update_began_takes_it_with_the_one_that_asked_after(self):
        trainer, making = self.follow()
        followers = [future.result(SECONDS) for future in making]
        self.assertEqual([controls.init_info["drivers"] for controls in self.controls], [WORLD, WORLD])
        with ThreadPoolExecutor(1) as refits:
            refit = refits.submit(trainer.refit, 1)
            # Process 0 comes first and does not wait; process 1 looks until it has heard of the update.
            followers[0].driver.peek_begin = lambda seconds, peek=followers[0].driver.peek_begin: peek(seconds) if seconds > 0 else None
            versions = self.each(lambda follower: follower.poll(SECONDS if follower is followers[1] else 0.0), followers)
            self.assertEqual(versions, [1, 1])
            self.assertTrue(refit.result(SECONDS).instances[0].committed)
        self.assertEqual([controls.versions for controls in self.controls], [[1], [1]])

    def test_all_wait_until_the_last_has_the_version(self):
        trainer, making = self.follow()
        followers = [future.result(SECONDS) for future in making]
        with ThreadPoolExecutor(1) as refits:
            refit = refits.submit(trainer.refit, 7)
            self.assertEqual(self.each(lambda follower: follower.wait(7, SECONDS), followers), [7, 7])
            refit.result(SECONDS)
        with self.assertRaises(TimeoutError):
            self.each(lambda follower: follower.wait(8, 0.0), followers)

    def test_none_generates_where_one_has_lost_its_lease(self):
        _, making = self.follow()
        followers = [future.result(SECONDS) for future in making]
        self.each(lambda follower: follower.poll(), followers)
        self.assertFalse(followers[0]._processes.apart or followers[1]._processes.apart)
        driver = followers[1].driver
        driver._do(driver.machine.write_failed("the lease ended"))
        self.each(lambda follower: follower.poll(), followers)
        self.assertTrue(followers[0]._processes.apart and followers[1]._processes.apart)

    def test_a_process_that_can_not_attach_is_named_in_all(self):
        _, making = self.follow(1)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "process 1 did not attach: .*parameter 'w'"):
            making[0].result(SECONDS)
        with self.assertRaisesRegex(refitd.FailedPrecondition, "^(?!process).*parameter 'w'"):
            making[1].result(SECONDS)


if __name__ == "__main__":
    unittest.main()
