"""Failures leave nothing behind: regions at the daemon, descriptors, memory, threads."""

import gc
import os
import threading
import unittest

import refitd
from refitd import TensorSpec
from support import DaemonTest, Server, wait_until, whole

SPEC = TensorSpec("w", "uint8", (1 << 16,))
TIMES = 1000


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def mappings():
    with open("/proc/self/maps") as maps:
        return sum("refitd-python" in line for line in maps)


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class LeakTest(DaemonTest):
    def regions_of_daemon(self):
        return int(self.status()["resources"]["regions"])

    def test_a_thousand_failed_registrations_leave_nothing(self):
        trainer = self.trainer()
        trainer.register_layout([SPEC], [whole(refitd.Region(1 << 16), SPEC)])
        other = TensorSpec("v", "uint8", (1 << 16,))

        def fail(i):
            region = refitd.Region(1 << 16)
            region[:8] = b"touched!"
            good = whole(region, SPEC)
            import dataclasses

            if i % 2 == 0:  # refused here, naming the second tensor
                bad = dataclasses.replace(good, tensor_index=1, offset=(1,))
                with self.assertRaises(refitd.InvalidArgument):
                    trainer.register_layout([SPEC, other], [good, bad])
            else:  # refused by the library, after the region was made known to the daemon
                odd = whole(region, TensorSpec("f", "float32", (100,)), at=2)
                with self.assertRaisesRegex(refitd.InvalidArgument, "f.*multiple|2"):
                    trainer.register_layout([TensorSpec("f", "float32", (100,))], [odd])

        for i in range(10):
            fail(i)
        gc.collect()
        wait_until(lambda: self.regions_of_daemon() == 1, "the daemon closes regions of failed registrations")
        before = descriptors(), mappings()
        threads = threading.active_count()
        memory = resident_bytes()
        for i in range(TIMES):
            fail(i)
        gc.collect()
        self.assertEqual((descriptors(), mappings()), before)
        # A call may come before the helper thread of the call before it waits again, and then starts another helper.
        self.assertLess(threading.active_count() - threads, 10)
        self.assertLess(resident_bytes() - memory, 16 << 20)
        wait_until(lambda: self.regions_of_daemon() == 1, "the daemon closes regions of failed registrations")

    def test_registering_anew_lets_go_of_what_was_registered_before(self):
        trainer = self.trainer()
        for _ in range(50):
            trainer.register_layout([SPEC], [whole(refitd.Region(1 << 16), SPEC)])
        gc.collect()
        wait_until(lambda: self.regions_of_daemon() == 1, "only the last layout's region stays")
        trainer.close()
        gc.collect()
        wait_until(lambda: self.regions_of_daemon() == 0, "the daemon closes all")

    def test_updates_and_members_leave_no_descriptor(self):
        def use():
            trainer = refitd.Trainer(self.group, socket=self.daemon.socket, device="host")
            engine = refitd.Engine(self.group, instance="a", socket=self.daemon.socket, device="host", loader=True)
            server = Server(self, engine)
            with trainer.update(1, tensor_count=1) as update:
                update.push("w", bytes(100))
            with self.assertRaises(ZeroDivisionError):
                with trainer.update(2, tensor_count=1) as update:
                    update.push("w", bytes(100))
                    1 / 0
            server.stop()
            trainer.close()

        for _ in range(3):
            use()
            self.group += "x"
        gc.collect()
        before = descriptors()
        for _ in range(20):
            use()
            self.group += "x"
        gc.collect()
        wait_until(lambda: descriptors() <= before, f"no more than {before} descriptors")

    def test_what_is_not_closed_is_freed_by_the_collector(self):
        trainer = refitd.Trainer(self.group, socket=self.daemon.socket, device="host")
        trainer.register_layout([SPEC], [whole(refitd.Region(1 << 16), SPEC)])
        wait_until(lambda: self.regions_of_daemon() == 1, "it is registered")
        del trainer
        gc.collect()
        wait_until(lambda: self.regions_of_daemon() == 0, "it detached")


if __name__ == "__main__":
    unittest.main()
