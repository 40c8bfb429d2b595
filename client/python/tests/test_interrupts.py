"""KeyboardInterrupt at each point where CPython may raise it on the main thread, one after the other: nothing is lost or left open."""

import contextlib
import dis
import gc
import os
import sys
import threading
import unittest

import refitd
from refitd import TensorSpec
from refitd._core import native
from support import SECONDS, DaemonTest, Server, wait_until, whole

SPEC = TensorSpec("w", "uint8", (64,))
PACKAGE = os.path.dirname(refitd.__file__)


class Interruption:
    """A trace function that raises KeyboardInterrupt at point number `at` of the package's code.

    CPython runs signal handlers where a function is entered, where a loop goes back, and where a call has returned, unless what
    was called was a Python function (that has no point of its own at its end, from 3.11 on). Nothing else is a point: between
    two other instructions no handler runs.
    """

    def __init__(self, at):
        self.at = at
        self.points = 0
        self.where = None
        self._before = {}  # by frame: the instruction that it executes
        self._entered = set()  # frames that execute a call which has entered a Python function

    @contextlib.contextmanager
    def traced(self):
        """Traces the block. A KeyboardInterrupt of this object's ends it."""
        before, hook = sys.gettrace(), sys.unraisablehook
        sys.unraisablehook = lambda _: None  # CPython drops what is raised in __del__; pytest's hook would keep the object
        sys.settrace(self)
        try:
            yield
        except KeyboardInterrupt:
            if self.where is None:
                raise
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook
            self._before.clear()  # frames hold their variables
            self._entered.clear()

    def __call__(self, frame, event, argument):
        if frame.f_code.co_name != "__init__":  # called by type.__call__, which is no Python function
            self._entered.add(frame.f_back)
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._point(frame)
        return self._opcode

    def _opcode(self, frame, event, argument):
        if event == "return":
            self._before.pop(frame, None)
        if event == "opcode":
            before = self._before.get(frame)
            self._before[frame] = frame.f_lasti
            name = "" if before is None else instructions(frame.f_code)[before]
            if "JUMP_BACKWARD" in name or name == "CALL_FUNCTION_EX" or (name.startswith("CALL") and frame not in self._entered):
                self._point(frame)
            self._entered.discard(frame)
        return self._opcode

    def _point(self, frame):
        if self.points == self.at:
            self.where = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"
            self.points += 1
            raise KeyboardInterrupt(self.where)
        self.points += 1


_instructions = {}


def instructions(code):
    """The names of a function's instructions, by offset."""
    if code not in _instructions:
        _instructions[code] = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    return _instructions[code]


@unittest.skipIf(sys.version_info < (3, 11), "3.10 also runs handlers where a Python function has returned")
class InterruptsTest(DaemonTest):
    flags = ("--slot-bytes=65536", "--staging-slots=4")

    def at_each_point(self, scenario):
        """Calls `scenario(interruption)` with an interruption at each point until one comes no more. No handle may be left over."""
        scenario(Interruption(-1))
        gc.collect()
        at, handles = 0, len(native._open_handles)

        def none_is_left():
            gc.collect()
            return len(native._open_handles) <= handles

        while True:
            interruption = Interruption(at)
            try:
                scenario(interruption)
                wait_until(none_is_left, "no handle is left")
            except BaseException as error:
                raise AssertionError(f"interrupted at point {at}, {interruption.where}: {error!r}") from error
            if interruption.where is None:
                break
            at += 1
        self.assertGreater(at, 5)  # dozens to hundreds; CPython 3.13 traces fewer instructions

    def next_version(self):
        self.version = getattr(self, "version", 0) + 1
        return self.version

    def forget_events(self, server):
        """Those up to this version's Committed, with the memory of their parts."""
        wait_until(lambda: any(event.version == self.version for event in server.of(refitd.Committed)), "Committed")
        server.events.clear()

    def registered(self):
        trainer, engine = self.trainer(), self.engine()
        source, target = refitd.Region(64), refitd.Region(64)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        return trainer, engine, source, target

    def test_no_event_is_lost(self):
        trainer, engine, _, _ = self.registered()

        def scenario(interruption):
            version = self.next_version()
            refit = threading.Thread(target=trainer.refit, args=(version,), kwargs=dict(duration_seconds=SECONDS))
            refit.start()
            got = []

            def serve():
                for event in engine:
                    got.append(event)
                    if not isinstance(event, refitd.Prepare):
                        return
                    event.ready()

            with interruption.traced():
                serve()
            if not got or isinstance(got[-1], refitd.Prepare):  # interrupted
                if got:
                    with contextlib.suppress(refitd.FailedPrecondition):  # it was answered already
                        got[-1].ready()
                serve()
            refit.join(SECONDS)
            self.assertEqual([(type(event), event.version) for event in got], [(refitd.Prepare, version), (refitd.Committed, version)])

        self.at_each_point(scenario)

    def test_poll_loses_no_event(self):
        trainer, engine, _, _ = self.registered()

        def scenario(interruption):
            version = self.next_version()
            refit = threading.Thread(target=trainer.refit, args=(version,), kwargs=dict(duration_seconds=SECONDS))
            refit.start()
            prepare = None
            with interruption.traced():
                prepare = engine.poll(SECONDS)
            prepare = prepare or engine.poll(SECONDS)
            self.assertIsInstance(prepare, refitd.Prepare)
            prepare.ready()
            committed = engine.next(SECONDS)
            self.assertIsInstance(committed, refitd.Committed)
            self.assertEqual((prepare.version, committed.version), (version, version))
            refit.join(SECONDS)

        self.at_each_point(scenario)

    def test_a_refit_ends_and_the_next_commits(self):
        trainer, engine, source, target = self.registered()
        Server(self, engine)

        def scenario(interruption):
            version = self.next_version()
            source[:] = bytes([version % 256]) * 64
            result = None
            with interruption.traced():
                result = trainer.refit(version, duration_seconds=SECONDS)
            self.assertTrue(result is not None or interruption.where)
            self.assertIn(trainer.get_update(version), ("committed", "aborted", "unknown"))
            source[:] = bytes([(version + 1) % 256]) * 64
            self.assertEqual(trainer.refit(self.next_version(), duration_seconds=SECONDS).committed, 1)
            self.assertEqual(target[:], source[:])

        self.at_each_point(scenario)

    def test_a_pushed_update_ends_and_the_next_commits(self):
        trainer = self.trainer()
        server = Server(self, self.engine(loader=True))
        # Several buckets, and a tensor larger than a slot.
        tensors = {"a": b"1" * 40_000, "b": b"2" * 40_000, "c": b"3" * 100_000}

        def push(version):
            with trainer.update(version, tensor_count=len(tensors), duration_seconds=SECONDS) as update:
                for name, tensor in tensors.items():
                    update.push(name, tensor)
            return update.result

        def scenario(interruption):
            version = self.next_version()
            with interruption.traced():
                push(version)
            gc.collect()
            self.assertIn(trainer.get_update(version), ("committed", "aborted", "unknown"))
            self.assertEqual(push(self.next_version()).committed, 1)
            self.forget_events(server)

        self.at_each_point(scenario)

    def test_an_update_goes_on_after_an_interrupted_push_of_a_tensor_that_fits(self):
        trainer = self.trainer()
        server = Server(self, self.engine(loader=True))

        def scenario(interruption):
            with trainer.update(self.next_version(), tensor_count=3, duration_seconds=SECONDS) as update:
                update.push("a", b"1" * 100)
                with interruption.traced():
                    update.push("b", b"2" * 100)
                known = trainer._seen.get("b")
                if known is None or update._packer.room(known.number) != -1:
                    update.push("b", b"2" * 100)
                update.push("c", b"3" * 100)
            self.assertEqual(update.result.committed, 1)
            self.forget_events(server)

        self.at_each_point(scenario)

    def test_registering_changes_all_or_nothing(self):
        trainer, engine, source, target = self.registered()
        Server(self, engine)
        source[:] = b"1" * 64
        other = refitd.Region(64)
        other[:] = b"2" * 64

        def scenario(interruption):
            done = False
            with interruption.traced():
                trainer.register_layout([SPEC], [whole(other, SPEC)])
                done = True
            now = trainer._registration.boxes[0].memory.region
            if done:
                self.assertIs(now, other)
            trainer.refit(self.next_version(), duration_seconds=SECONDS)
            self.assertEqual(target[:], now[:])
            trainer.register_layout([SPEC], [whole(source, SPEC)])
            trainer.refit(self.next_version(), duration_seconds=SECONDS)
            self.assertEqual(target[:], source[:])

        self.at_each_point(scenario)

    def test_attaching_and_closing_leave_no_rank_attached(self):
        self.trainer()  # keeps the group

        def attach():
            return refitd.Engine(self.group, instance="b", socket=self.daemon.socket, device="host")

        def scenario(interruption):
            engine = None
            with interruption.traced():
                engine = attach()
                engine.close()
            if engine is not None:
                engine.close()
            del engine
            again = []

            def attached():
                with contextlib.suppress(refitd.AlreadyExists):
                    again.append(attach())
                return again

            wait_until(attached, "the rank is free again")
            again.pop().close()

        self.at_each_point(scenario)


if __name__ == "__main__":
    unittest.main()
