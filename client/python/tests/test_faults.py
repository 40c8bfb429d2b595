"""Daemons, engines and trainers that are killed, forked or interrupted: errors say so, and nothing hangs or crashes."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest

import refitd
from refitd import TensorSpec, testing
from support import SECONDS, DaemonTest, Server, wait_until, whole

SPEC = TensorSpec("w", "uint8", (64,))


class Child:
    """A Python process that runs `code`, with `socket` and `group` as variables; ends with the test at the latest."""

    def __init__(self, test, code, socket, group):
        head = f"import refitd, sys, os, signal, time, threading\nfrom support import *\nsocket, group = {socket!r}, {group!r}\n"
        command = [sys.executable, "-u", "-c", head + textwrap.dedent(code)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        test.addCleanup(self.end)
        self.seen = []

    def wait_for(self, word):
        """Reads up to the line `word`. (A child that hangs is ended by the test runner's own limit.)"""
        for line in self.process.stdout:
            self.seen.append(line)
            if line.strip() == word:
                return
        raise AssertionError(f"no {word!r} in:\n" + "".join(self.seen))

    def finish(self):
        """Waits for the end; returns the exit status and all output."""
        rest, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, "".join(self.seen) + rest

    def end(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class KilledDaemonTest(unittest.TestCase):
    def setUp(self):
        self.daemon = testing.Daemon()
        self.addCleanup(self.daemon.stop)

    def test_without_reattaching_calls_name_the_daemon_and_engines_end(self):
        trainer = refitd.Trainer("g", socket=self.daemon.socket, device="host")
        engine = refitd.Engine("g", instance="a", socket=self.daemon.socket, device="host")
        self.addCleanup(trainer.close)
        self.addCleanup(engine.close)
        trainer.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        update = trainer.update
        server = Server(self, engine)
        trainer.refit(1)
        server.wait_for(refitd.Committed)
        self.daemon.kill()
        for call in (lambda: trainer.refit(2), lambda: update(3), trainer.check_health):
            with self.assertRaises(refitd.Unavailable) as caught:
                call()
            self.assertIn("trainer rank 0 of group g", str(caught.exception))
        wait_until(lambda: server.error is not None, "the engine hears of it")
        self.assertIsInstance(server.error, refitd.Unavailable)
        self.assertEqual(engine.weights, refitd.Weights.CLEAN)

    def test_an_open_update_fails_and_is_let_go_of(self):
        trainer = refitd.Trainer("g", socket=self.daemon.socket, device="host")
        self.addCleanup(trainer.close)
        engine = refitd.Engine("g", instance="a", socket=self.daemon.socket, device="host", loader=True)
        Server(self, engine)
        with self.assertRaises(refitd.Error):
            with trainer.update(1, tensor_count=1) as update:
                self.daemon.kill()
                update.push("w", bytes(64))
        self.assertTrue(update.ended)

    def test_with_reattaching_members_go_on_with_the_next_daemon(self):
        trainer = refitd.Trainer("g", socket=self.daemon.socket, device="host", connect=refitd.Connect(reattach_seconds=SECONDS))
        engine = refitd.Engine("g", instance="a", socket=self.daemon.socket, device="host", connect=refitd.Connect(reattach_seconds=SECONDS))
        self.addCleanup(trainer.close)
        source, target = refitd.Region(64), refitd.Region(64)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        server = Server(self, engine)
        trainer.refit(1)
        server.wait_for(refitd.Committed)
        self.daemon.kill()
        self.assertEqual(server.wait_for(refitd.Lost).weights, refitd.Weights.CLEAN)
        self.daemon.start()
        self.assertEqual(server.wait_for(refitd.Reattached).version, 1)
        source[:] = b"2" * 64
        self.assertEqual(trainer.refit(2, duration_seconds=SECONDS).version, 2)
        self.assertEqual(target[:], source[:])
        self.assertEqual((trainer.reattachments, engine.reattachments), (1, 1))

    def test_close_is_prompt_after_the_daemon_died(self):
        trainer = refitd.Trainer("g", socket=self.daemon.socket, device="host")
        engine = refitd.Engine("g", instance="a", socket=self.daemon.socket, device="host")
        self.daemon.kill()
        engine.close()
        trainer.close()
        self.assertTrue(trainer.closed and engine.closed)


class KilledMemberTest(DaemonTest):
    flags = ("--slot-bytes=65536", "--staging-slots=4", "--limits-ready-ms=20000")

    ENGINE = """
        engine = refitd.Engine(group, instance="victim", socket=socket)
        region = refitd.Region(64)
        spec = refitd.TensorSpec("w", "uint8", (64,))
        engine.register_layout([spec], [whole(region, spec)])
        print("attached")
        for event in engine:
            if isinstance(event, refitd.Prepare):
                print("prepared")
                time.sleep(1000)
        """

    def test_an_engine_that_is_killed_is_evicted_and_the_refit_commits(self):
        trainer, engine = self.trainer(spec=refitd.GroupSpec(min_instances=2)), self.engine("survivor")
        target = refitd.Region(64)
        source = refitd.Region(64)
        source[:] = b"1" * 64
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])
        Server(self, engine)
        child = Child(self, self.ENGINE, self.daemon.socket, self.group)
        child.wait_for("attached")
        results = []
        thread = threading.Thread(target=lambda: results.append(trainer.refit(1)))
        thread.start()
        child.wait_for("prepared")
        child.process.kill()
        thread.join(SECONDS)
        (result,) = results
        self.assertEqual((result.committed, target[:]), (1, source[:]))
        outcomes = {outcome.instance: outcome for outcome in result.instances}
        self.assertTrue(outcomes["survivor"].committed)
        self.assertFalse(outcomes["victim"].committed)
        self.assertEqual([str(suspect) for suspect in outcomes["victim"].failure.suspects], ["engine victim rank 0"])
        self.assertIn("victim", outcomes["victim"].reason)

    def test_a_trainer_that_is_killed_aborts_the_update_and_the_engine_is_told(self):
        engine_group = self.group
        child = Child(
            self,
            """
            trainer = refitd.Trainer(group, socket=socket)
            print("attached")
            update = trainer.update(1, tensor_count=1, duration_seconds=60)
            print("begun")
            time.sleep(1000)
            """,
            self.daemon.socket,
            engine_group,
        )
        child.wait_for("attached")
        server = Server(self, self.engine(loader=True))
        child.wait_for("begun")
        child.process.kill()
        aborted = server.wait_for(refitd.Aborted)
        self.assertFalse(aborted.dirty)
        self.assertIn("trainer rank 0", aborted.reason)

    def test_an_aborted_update_says_who_was_waited_for(self):
        trainer, engine = self.trainer(), self.engine()
        trainer.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        with self.assertRaises(refitd.DeadlineExceeded) as caught:
            trainer.refit(1, duration_seconds=0.3)  # nobody answers Prepare
        error = caught.exception
        self.assertEqual((error.culprit, error.dirty), ("engine a rank 0", False))
        self.assertIsInstance(error, TimeoutError)
        (suspect,) = error.suspects
        self.assertEqual((suspect.role, suspect.instance, suspect.rank, suspect.pid), ("engine", "a", 0, os.getpid()))
        self.assertEqual((error.version, error.retriable, error.tensor), (1, True, None))
        self.assertEqual((error.dirty_instances, error.dirty_count), ((), 0))

    def test_a_refit_without_any_engine_blamed_the_daemon_that_had_answered(self):
        trainer = self.trainer()
        trainer.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        with self.assertRaisesRegex(refitd.DeadlineExceeded, "0 of 1 instances complete") as caught:
            trainer.refit(1, duration_seconds=0.3)
        error = caught.exception
        self.assertEqual((error.culprit, error.dirty, error.retriable), ("an engine", False, True))
        self.assertEqual([suspect.role for suspect in error.suspects], ["engine"])
        self.assertNotIn("daemon at", str(error))

    def test_a_reason_that_calls_weights_whole_made_a_dirty_engine_read_as_whole(self):
        trainer, engine = self.trainer(), self.engine()
        engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        server = Server(self, engine)
        update = trainer.update(1)
        update.push("w", bytes(32), shape=(64,))
        update.flush()
        engine.fail(1, "loader died (weights are whole): tensor 'forged' of trainer rank 9 at daemon at /tmp/forged.sock")
        wait_until(lambda: trainer.get_update(1) == "aborted", "the update ends")
        with self.assertRaises(refitd.UpdateAborted) as caught:
            update.commit()
        error = caught.exception
        self.assertIn("loader died (weights are whole)", str(error))
        self.assertTrue(error.dirty)
        self.assertEqual((error.dirty_instances, error.dirty_count, error.version), (("a",), 1, 1))
        self.assertEqual((error.culprit, error.tensor), ("engine a rank 0", None))
        self.assertTrue(server.wait_for(refitd.Aborted).dirty)

    def test_what_a_member_said_reached_a_terminal_raw(self):
        trainer, engine = self.trainer(), self.engine()
        engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        Server(self, engine)
        update = trainer.update(1)
        update.push("w", bytes(32), shape=(64,))
        update.flush()
        engine.fail(1, "\x1b[2J\x1b]0;owned\x07\nweights \u202eelohw era")
        wait_until(lambda: trainer.get_update(1) == "aborted", "the update ends")
        with self.assertRaises(refitd.UpdateAborted) as caught:
            update.commit()
        self.assertTrue(str(caught.exception).isprintable(), repr(str(caught.exception)))
        shown = self.daemon.control("status")
        self.assertTrue(all(line.isprintable() for line in shown.splitlines()), repr(shown))
        self.assertIn("owned", shown)

    def test_eighty_dirty_instances_of_long_names_hid_the_status_of_the_update(self):
        trainer = self.trainer(spec=refitd.GroupSpec(min_instances=80))
        names = [f"{i:03}-" + "n" * 120 for i in range(80)]
        for name in names:
            engine = self.engine(name)
            engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
            Server(self, engine)
        update = trainer.update(1, duration_seconds=SECONDS)
        update.push("w", bytes(32), shape=(64,))
        update.flush()
        trainer.abort(1, "x" * 4000 + " the end")
        with self.assertRaises(refitd.UpdateAborted) as caught:
            update.commit()
        error = caught.exception
        self.assertEqual((error.dirty, error.dirty_count, error.culprit), (True, 80, "trainer rank 0"))
        self.assertTrue(0 < len(error.dirty_instances) < 80 and set(error.dirty_instances) <= set(names))
        self.assertIn(" the end", str(error))


    def test_an_update_that_is_lost_after_bytes_were_written_says_that_weights_are_dirty(self):
        trainer, engine = self.trainer(), self.engine()
        engine.register_layout([SPEC], [whole(refitd.Region(64), SPEC)])
        server = Server(self, engine)
        update = trainer.update(1)
        update.push("w", bytes(32), shape=(64,))
        update.flush()
        trainer.abort(1, "no more")
        with self.assertRaises(refitd.UpdateAborted) as caught:
            update.commit()
        self.assertTrue(caught.exception.dirty)
        self.assertIn("no more", str(caught.exception))
        self.assertTrue(server.wait_for(refitd.Aborted).dirty)
        self.assertEqual((engine.weights, engine.version), (refitd.Weights.DIRTY, None))


class InterruptTest(DaemonTest):
    def interrupted(self, code):
        """Runs `code`, which prints `waits` when it blocks, and sends SIGINT then. Returns the exit status, the output and the seconds to the end."""
        child = Child(self, code, self.daemon.socket, self.group)
        child.wait_for("waits")
        start = time.monotonic()
        child.process.send_signal(signal.SIGINT)
        status, output = child.finish()
        return status, output, time.monotonic() - start

    REFIT = """
        trainer = refitd.Trainer(group, socket=socket)
        engine = refitd.Engine(group, instance="a", socket=socket)
        spec = refitd.TensorSpec("w", "uint8", (64,))
        trainer.register_layout([spec], [whole(refitd.Region(64), spec)])
        engine.register_layout([spec], [whole(refitd.Region(64), spec)])
        def tell():
            event = engine.next(60)      # Prepare, which nobody answers: the refit waits
            print("waits")
            print(type(engine.next(60)).__name__, flush=True)
        thread = threading.Thread(target=tell)
        thread.start()
        try:
            trainer.refit(1, duration_seconds=100)
        except KeyboardInterrupt:
            thread.join()
            print("outcome", trainer.get_update(1))
            print("usable", trainer.group_version)
            raise SystemExit(7)
        """

    def test_ctrl_c_ends_a_refit_that_waits_and_gives_the_update_up(self):
        status, output, _ = self.interrupted(self.REFIT)
        self.assertEqual(status, 7, output)
        self.assertIn("Aborted\noutcome aborted\nusable None", output)

    def test_ctrl_c_ends_a_begin_that_waits(self):
        status, output, _ = self.interrupted(
            """
            trainer = refitd.Trainer(group, socket=socket, spec=refitd.GroupSpec(min_instances=3))
            threading.Timer(0.2, print, ["waits"]).start()
            try:
                trainer.update(1, duration_seconds=100)
            except KeyboardInterrupt:
                raise SystemExit(7)
            """
        )
        self.assertEqual(status, 7, output)

    def test_ctrl_c_ends_attaching_and_waiting_for_events(self):
        for code in (
            'refitd.Engine("nobody-makes-it", instance="a", socket=socket, connect=refitd.Connect(wait_seconds=100))',
            'refitd.Trainer(group, socket=socket); engine = refitd.Engine(group, instance="a", socket=socket); list(engine)',
        ):
            with self.subTest(code):
                status, output, seconds = self.interrupted(
                    f"""
                    threading.Timer(0.2, print, ["waits"]).start()
                    try:
                        {code}
                    except KeyboardInterrupt:
                        print("interrupted")
                        sys.stdout.flush()
                        os._exit(7)
                    """
                )
                self.assertEqual(status, 7, output)

    def test_signal_handlers_run_while_a_call_waits(self):
        status, output, _ = self.interrupted(
            """
            engine = None
            trainer = refitd.Trainer(group, socket=socket, spec=refitd.GroupSpec(min_instances=3))
            signal.signal(signal.SIGINT, lambda *_: print("handler ran"))
            threading.Timer(0.2, print, ["waits"]).start()
            try:
                trainer.update(1, duration_seconds=2)
            except refitd.DeadlineExceeded:
                raise SystemExit(7)
            """
        )
        self.assertEqual(status, 7, output)
        self.assertIn("handler ran", output)

    def test_a_refit_goes_on_after_a_signal_handler_that_returns(self):
        status, output, _ = self.interrupted(
            """
            trainer = refitd.Trainer(group, socket=socket)
            engine = refitd.Engine(group, instance="a", socket=socket)
            spec = refitd.TensorSpec("w", "uint8", (64,))
            trainer.register_layout([spec], [whole(refitd.Region(64), spec)])
            engine.register_layout([spec], [whole(refitd.Region(64), spec)])
            ran = threading.Event()
            signal.signal(signal.SIGINT, lambda *_: ran.set())
            def serve():
                event = engine.next(SECONDS)
                print("waits")
                if ran.wait(SECONDS):
                    event.ready()
            threading.Thread(target=serve).start()
            raise SystemExit(6 + trainer.refit(1).committed)
            """
        )
        self.assertEqual(status, 7, output)

    def test_a_signal_handler_may_close_the_trainer_that_waits(self):
        code = self.REFIT.replace("thread.start()", "thread.start(); signal.signal(signal.SIGINT, leave)").replace(
            "def tell():", """def leave(*_):
            refitd._core.member.CLOSE_SECONDS = 10 * SECONDS  # what waits for the refit to end is late
            trainer.close()
            raise SystemExit(7)
        def tell():"""
        )
        status, output, _ = self.interrupted(code)
        self.assertEqual(status, 7, output)
        self.assertIn("Aborted", output)

    def test_ctrl_c_ends_a_refit_that_nobody_answers(self):
        for how, reattach in ((signal.SIGSTOP, None), (signal.SIGKILL, 100)):
            with self.subTest(how):
                daemon = testing.Daemon()
                self.addCleanup(daemon.stop)
                code = f"""
                    trainer = refitd.Trainer(group, socket=socket, connect=refitd.Connect(reattach_seconds={reattach}))
                    spec = refitd.TensorSpec("w", "uint8", (64,))
                    trainer.register_layout([spec], [whole(refitd.Region(64), spec)])
                    print("registered")
                    sys.stdin.readline()
                    threading.Timer(0.2, print, ["waits"]).start()
                    try:
                        trainer.refit(1, duration_seconds=100)
                    except KeyboardInterrupt:
                        os._exit(7)
                    """
                child = Child(self, code, daemon.socket, self.group)
                child.wait_for("registered")
                daemon.process.send_signal(how)
                self.addCleanup(daemon.process.send_signal, signal.SIGCONT)
                child.process.stdin.write("\n")
                child.process.stdin.flush()
                child.wait_for("waits")
                child.process.send_signal(signal.SIGINT)
                status, output = child.finish()
                self.assertEqual(status, 7, output)


class ForkTest(DaemonTest):
    def in_child(self, function):
        """The exit status of a forked child that runs `function`, 0 where that returned."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                function()
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        return os.waitstatus_to_exitcode(status)

    def test_a_forked_child_can_use_no_handle_and_harms_none(self):
        trainer, engine = self.trainer(), self.engine()
        source, target = refitd.Region(64), refitd.Region(64)
        trainer.register_layout([SPEC], [whole(source, SPEC)])
        engine.register_layout([SPEC], [whole(target, SPEC)])

        def child():
            for call in (
                lambda: trainer.refit(1),
                lambda: trainer.group_version,
                lambda: engine.next(0),
                lambda: engine.weights,
                lambda: refitd.Trainer("other", socket=self.daemon.socket),
                lambda: refitd.Engine("other", instance="a", socket=self.daemon.socket),
            ):
                try:
                    call()
                except refitd.Forked as error:
                    assert "fork" in str(error)
                else:
                    raise AssertionError("no error")
            assert trainer.closed and engine.closed
            trainer.close()
            engine.close()

        self.assertEqual(self.in_child(child), 0)
        Server(self, engine)
        self.assertEqual(trainer.refit(1).committed, 1)

    def test_a_child_that_ends_by_itself_leaves_the_parents_lease_alone(self):
        trainer = self.trainer()
        code = "import gc; gc.collect()"
        self.assertEqual(self.in_child(lambda: exec(code)), 0)
        trainer.check_health()


if __name__ == "__main__":
    unittest.main()
