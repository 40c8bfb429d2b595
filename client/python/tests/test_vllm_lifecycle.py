"""The life of an engine, by random orders of what can happen to it. Each planted bug must be found by the same orders."""

import os
import random
import unittest
from collections import deque

from refitd.serving import driver as lifecycle
from refitd.serving.driver import Lifecycle, State

ORDERS = int(os.environ.get("REFITD_LIFECYCLE_ORDERS", "10000"))
STEPS = 60
SEED = int(os.environ.get("REFITD_LIFECYCLE_SEED", "1"))
WORDS = 3  # of an engine's weights, written one after the other
GARBAGE = -1


class Broken(AssertionError):
    """An invariant does not hold."""


class World:
    """An engine, its daemon and a trainer. Actions wait in a queue, so that anything may happen before they are carried out."""

    def __init__(self, choose, make):
        self.choose, self.make = choose, make
        self.version = 0  # the newest that the trainer began
        self.daemon = True
        self.boot()

    def boot(self, kept=None):
        """A new process: random weights, no lease. `kept`: the version in the memory that it takes up when it attaches."""
        self.kept = kept
        self.machine = self.make()
        self.words = [GARBAGE] * WORDS
        self.generates, self.asleep, self.lease, self.update = True, 0, False, None
        self.begun = set()  # versions, while this process had a lease
        self.cache = set()  # versions that cached blocks were computed with
        self.actions = deque(self.machine.start())
        # vLLM takes no request before it is started, and the driver carries out the first actions before that.
        self.drain()

    def tell(self, actions):
        self.actions.extend(actions)

    # ---- what the driver does ----

    def act(self):
        if not self.actions:
            return
        action = self.actions.popleft()
        getattr(self, "act_" + type(action).__name__)(action)

    def drain(self):
        for _ in range(1000):
            if not self.actions:
                return
            self.daemon = True
            self.act()
        raise Broken("actions without end")

    def act_Pause(self, _):
        if not self.asleep and self.choose.random() < 0.1 and self.machine.state is State.PAUSING:
            self.tell(self.machine.pause_failed("no answer"))
            return
        self.generates = False
        self.tell(self.machine.paused())

    def act_Write(self, action):
        if action.reset_caches:
            self.cache.clear()
        update = self.update
        if update is None or update["version"] != action.version:
            # It ended before; its end was heard already, or is told now.
            if update is None and self.machine.state is State.WRITING:
                self.tell(self.machine.aborted(action.version, dirty=False))
            return
        update["ready"] = True

    def act_Refuse(self, action):
        if self.update is not None and self.update["version"] == action.version:
            self.abort()

    def act_SetVersion(self, action):
        self.told = action.version

    def act_Resume(self, _):
        self.generates = True
        self.tell(self.machine.resumed())

    def act_Register(self, action):
        if not self.daemon:
            self.actions.appendleft(action)  # it waits for the daemon, and all actions after it do
            return
        self.lease = True
        self.tell(self.machine.registered())
        kept, self.kept = self.kept, None
        if kept is not None:
            self.words = [kept] * WORDS
            self.tell(self.machine.found(kept))

    def act_Unregister(self, _):
        self.lease, self.update = False, None

    def act_Sleep(self, action):
        self.asleep = action.level
        if action.level == 2:
            self.words = [GARBAGE] * WORDS

    def act_Wake(self, _):
        self.asleep = 0

    # ---- what happens ----

    def begin(self):
        if self.daemon and self.lease and self.update is None and not self.asleep:
            self.version += 1
            if self.machine.attached:
                self.begun.add(self.version)
            self.update = {"version": self.version, "ready": False, "written": 0}
            self.tell(self.machine.prepare(self.version))

    def write(self):
        update = self.update
        if update is None or not update["ready"]:
            return
        if self.generates and not self.asleep:
            raise Broken("the daemon writes while the engine generates")
        if update["written"] < WORDS:
            self.words[update["written"]] = update["version"]
            update["written"] += 1
            return
        self.update = None
        if self.choose.random() < 0.1:
            self.words[0] = GARBAGE  # post-processing failed half-way
            self.tell(self.machine.write_failed("out of memory"))
        else:
            self.tell(self.machine.written(update["version"]))

    def abort(self):
        update, self.update = self.update, None
        if update is not None:
            self.tell(self.machine.aborted(update["version"], dirty=update["written"] > 0))

    def daemon_goes(self):
        if not self.daemon:
            return
        self.daemon = False
        self.leased_before = had_lease = self.lease
        self.lease = False
        update, self.update = self.update, None
        if had_lease:
            self.tell(self.machine.lost(clean=self.machine.clean and (update is None or not update["ready"])))

    def daemon_comes(self):
        if self.daemon:
            return
        self.daemon = True
        changes = any(isinstance(action, (lifecycle.Register, lifecycle.Unregister)) for action in self.actions)
        if self.leased_before and self.machine.state is not State.ASLEEP and not changes:
            self.lease = True
            self.tell(self.machine.reattached(self.machine.clean))

    def sleep(self):
        self.tell(self.machine.sleep(self.choose.choice((1, 2))))

    def weights_go(self):
        wakes = any(isinstance(action, lifecycle.Wake) for action in self.actions)  # the driver carries that out before it hears of this
        if self.asleep and self.machine.state is State.ASLEEP and not wakes:
            self.words = [GARBAGE] * WORDS
            self.tell(self.machine.weights_discarded())

    def wake(self):
        self.tell(self.machine.wake())

    def kill(self):
        whole = self.machine.clean and self.machine.version is not None
        self.boot(self.machine.version if whole and self.choose.random() < 0.5 else None)

    def request(self):
        """One token."""
        if not self.generates or self.asleep:
            return
        version = self.words[0]
        if version == GARBAGE or any(word != version for word in self.words):
            raise Broken(f"a token from torn weights {self.words}")
        if self.machine.reset_caches and self.cache - {version}:
            raise Broken(f"a token of version {version} from blocks of {self.cache}")
        self.cache.add(version)

    def check(self):
        machine = self.machine
        if machine.ready() and any(word != machine.version for word in self.words):
            raise Broken(f"ready at version {machine.version} with weights {self.words}")
        if machine.ready(0) and any(version > machine.version for version in self.begun):
            raise Broken(f"ready at version {machine.version}, and {self.begun} began since this process came")
        if machine.serves and not self.actions and not self.generates:
            raise Broken("nothing is left to do, and the engine is paused")
        if machine.ready() and self.asleep:
            raise Broken("ready while asleep")

    EVENTS = (
        ("act", 30), ("request", 20), ("begin", 14), ("write", 24), ("abort", 4), ("daemon_goes", 2), ("daemon_comes", 6), ("sleep", 2),
        ("weights_go", 2), ("wake", 4), ("kill", 1),
    )  # fmt: skip

    def run(self, steps):
        names = [name for name, _ in self.EVENTS]
        weights = [weight for _, weight in self.EVENTS]
        for name in self.choose.choices(names, weights, k=steps):
            getattr(self, name)()
            self.check()
        self.finish()

    def finish(self):
        """Whatever happened: the next version that is committed makes the engine serve, and ready for it."""
        self.daemon_comes()
        for _ in range(50):
            self.drain()
            self.wake()
            self.drain()
            self.begin()
            self.drain()
            for _ in range(WORDS + 2):
                self.write()
                self.drain()
            self.check()
            self.request()
            if self.machine.ready(0) and self.machine.version == self.version and self.generates:
                return
        raise Broken(f"paused for good: {self.machine.state}, {self.machine.reason}, generates {self.generates}")


class ResumesAtWake(World):
    """vLLM's own wake_up."""

    def act_Wake(self, action):
        super().act_Wake(action)
        self.generates = True


def search(make, orders, kind=World):
    """The first order that breaks an invariant, as (its number, the error); None."""
    for order in range(orders):
        world = kind(random.Random(f"{SEED}-{order}"), make)
        try:
            world.run(STEPS)
        except Broken as error:
            return order, error
    return None


class ResumesWhenDirty(Lifecycle):
    def _settle(self):
        return [*super()._settle(), lifecycle.Resume()]


class ForgetsDirty(Lifecycle):
    def _mark_dirty(self, reason):
        pass


class KeepsStaleCaches(Lifecycle):
    def paused(self):
        return [
            lifecycle.Write(action.version, False) if isinstance(action, lifecycle.Write) else action for action in super().paused()
        ]


class StaysPausedAfterAbort(Lifecycle):
    def aborted(self, version, dirty, reason=""):
        return [action for action in super().aborted(version, dirty, reason) if not isinstance(action, lifecycle.Resume)]


class WritesBeforePaused(Lifecycle):
    def prepare(self, version):
        return [
            lifecycle.Write(version) if isinstance(action, lifecycle.Pause) else action for action in super().prepare(version)
        ]


class ForgetsDiscardedWeights(Lifecycle):
    def _fall_asleep(self, level):
        return super()._fall_asleep(min(level, 1))[:-1] + [lifecycle.Sleep(level)]


class IgnoresWeightsThatWentDuringSleep(Lifecycle):
    def weights_discarded(self):
        return []


class UpdatesWhileAsleep(Lifecycle):
    def wake(self):
        return [action for action in super().wake() if not isinstance(action, lifecycle.Register)]


class StaysPausedWithWhatWasKept(Lifecycle):
    def found(self, version):
        super().found(version)
        return []


class ReadyWhenDirty(Lifecycle):
    def ready(self, max_behind=None):
        return self.attached and self.version is not None


class ServesRandomWeights(Lifecycle):
    def start(self):
        return [action for action in super().start() if not isinstance(action, lifecycle.Pause)]


class IgnoresFailedProcessing(Lifecycle):
    def write_failed(self, reason):
        return self.written(self._updating or 0)


PLANTED = (
    ResumesWhenDirty, ForgetsDirty, KeepsStaleCaches, StaysPausedAfterAbort, WritesBeforePaused, ForgetsDiscardedWeights,
    IgnoresWeightsThatWentDuringSleep, UpdatesWhileAsleep, StaysPausedWithWhatWasKept, ReadyWhenDirty, ServesRandomWeights, IgnoresFailedProcessing,
)  # fmt: skip


class RandomOrders(unittest.TestCase):
    def test_no_order_breaks_an_invariant(self):
        found = search(Lifecycle, ORDERS)
        self.assertIsNone(found, f"order {found and found[0]} of seed {SEED}: {found and found[1]}")

    def test_each_planted_bug_is_found(self):
        for bug in PLANTED:
            with self.subTest(bug.__name__):
                self.assertIsNotNone(search(bug, 2000), "no order found it")
        with self.subTest(ResumesAtWake.__name__):
            self.assertIsNotNone(search(Lifecycle, 2000, ResumesAtWake), "no order found it")


class Steps(unittest.TestCase):
    """The orders that users meet, one by one."""

    def serving(self, **options):
        machine = Lifecycle(**options)
        machine.start(), machine.registered(), machine.paused(), machine.prepare(1)
        machine.written(1), machine.resumed()
        return machine

    def test_random_weights_are_not_served_before_the_first_version(self):
        machine = Lifecycle()
        self.assertEqual(machine.start(), [lifecycle.Pause("abort"), lifecycle.Register(dirty=True)])
        machine.paused(), machine.registered()
        self.assertFalse(machine.ready())
        self.assertEqual(machine.prepare(1), [lifecycle.Write(1)])
        self.assertEqual(machine.written(1), [lifecycle.SetVersion(1), lifecycle.Resume()])
        self.assertFalse(machine.ready())
        machine.resumed()
        self.assertTrue(machine.ready(0))

    def test_a_version_that_was_kept_is_served_before_the_next(self):
        machine = Lifecycle()
        machine.start(), machine.paused(), machine.registered()
        self.assertEqual(machine.found(5), [lifecycle.Resume()])
        machine.resumed()
        self.assertEqual((machine.version, machine.ready(0)), (5, True))
        self.assertEqual(machine.found(6), [])  # it serves

    def test_a_failed_update_is_not_served(self):
        machine = self.serving()
        self.assertEqual(machine.prepare(2), [lifecycle.Pause("keep")])
        self.assertEqual(machine.paused(), [lifecycle.Write(2)])
        self.assertEqual(machine.aborted(2, dirty=True), [])
        self.assertIs(machine.state, State.DIRTY)
        self.assertFalse(machine.ready())

    def test_a_clean_abort_resumes_the_version_before(self):
        machine = self.serving()
        machine.prepare(2), machine.paused()
        self.assertEqual(machine.aborted(2, dirty=False), [lifecycle.Resume()])
        machine.resumed()
        self.assertEqual((machine.version, machine.ready()), (1, True))
        self.assertFalse(machine.ready(0))  # a newer version began
        self.assertTrue(machine.ready(1))

    def test_an_update_while_asleep_is_refused(self):
        machine = self.serving()
        self.assertEqual(machine.sleep(1), [lifecycle.Pause("abort"), lifecycle.Unregister(), lifecycle.Sleep(1)])
        self.assertEqual(machine.prepare(2), [lifecycle.Refuse(2, "the engine is asleep")])
        self.assertEqual(machine.wake(), [lifecycle.Wake(), lifecycle.Register(dirty=False), lifecycle.Resume()])

    def test_sleep_of_level_2_makes_dirty(self):
        machine = self.serving()
        machine.sleep(2)
        self.assertEqual(machine.wake(), [lifecycle.Wake(), lifecycle.Register(dirty=True)])
        self.assertFalse(machine.ready())

    def test_weights_that_go_during_sleep_make_dirty(self):
        machine = self.serving()
        machine.sleep(1)
        self.assertEqual(machine.weights_discarded(), [])
        self.assertEqual(machine.wake(), [lifecycle.Wake(), lifecycle.Register(dirty=True)])
        self.assertFalse(machine.ready())

    def test_weights_that_go_before_an_engine_falls_asleep_make_dirty(self):
        machine = self.serving()
        machine.prepare(2), machine.pause_failed("no answer")
        self.assertEqual((machine.sleep(1), machine.weights_discarded()), ([], []))
        self.assertEqual(machine.aborted(2, dirty=False)[-1], lifecycle.Sleep(2))
        self.assertEqual(machine.wake(), [lifecycle.Wake(), lifecycle.Register(dirty=True)])

    def test_a_failed_update_before_sleep_attaches_nothing_until_the_engine_wakes(self):
        machine = self.serving()
        machine.prepare(2), machine.paused(), machine.sleep(1)
        self.assertEqual(machine.write_failed("out of memory"), [lifecycle.Unregister(), lifecycle.Sleep(1)])
        self.assertEqual(machine.wake(), [lifecycle.Wake(), lifecycle.Register(dirty=True)])

    def test_sleep_waits_for_the_end_of_an_update(self):
        machine = self.serving()
        machine.prepare(2), machine.paused()
        self.assertEqual(machine.sleep(1), [])
        self.assertEqual(machine.written(2)[-1], lifecycle.Sleep(1))

    def test_caches_are_kept_by_choice(self):
        machine = self.serving(reset_caches=False)
        machine.prepare(2)
        self.assertEqual(machine.paused(), [lifecycle.Write(2, reset_caches=False)])


if __name__ == "__main__":
    unittest.main()
