"""refitctl against a live daemon: pushes, reference engines, what the daemon tells, exit codes."""

import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import unittest

from daemon import CHILD_SECONDS, Child, Daemon, wait_for

REFITCTL = "daemon/refitctl/refitctl"
MAKE_CHECKPOINT = "tests/workloads/make_checkpoint"
SLOT_BYTES = 256 << 10  # some tensors of the checkpoint take several slots, and some slots hold many tensors
TENSORS = 46  # the number of tensors of the tiny model
OK, FAILED, UNREACHABLE, MISMATCH, DEADLINE, NOT_READY = 0, 1, 3, 4, 5, 6


def alter_last_byte(checkpoint):
    """Changes the last byte of the last tensor in the first shard."""
    shard = sorted(name for name in os.listdir(checkpoint) if name.endswith(".safetensors"))[0]
    with open(os.path.join(checkpoint, shard), "r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


class Engine(Child):
    """A reference engine rank; its events are lines of JSON."""

    def __init__(self, test, group, instance, checkpoint, *flags, socket=None):
        arguments = ["--group", group, "--instance", instance, "--checkpoint", checkpoint, *flags]
        # The engine waits until somebody creates the group.
        common = ["--socket", socket or test.daemon.socket, "-o", "json", "--timeout", str(CHILD_SECONDS)]
        super().__init__(test, REFITCTL, *common, "engine", *arguments)

    def wait_for(self, event):
        """The fields of the next such event."""
        while True:
            line = self.next_line()
            self.test.assertIsNotNone(line, "%s ended without '%s': %s" % (self, event, self.seen))
            if line.startswith("{"):
                fields = json.loads(line)
                if fields["event"] == event:
                    return fields

    def verified(self):
        """Versions of which this rank's memory was found equal to the checkpoint."""
        events = [json.loads(line) for line in self.seen if line.startswith("{")]
        return [event["version"] for event in events if event["event"] == "verified"]


class RefitctlTest(unittest.TestCase):
    folder: str
    daemon: Daemon

    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        for version in (1, 2, 3):
            command = [MAKE_CHECKPOINT, "--model", "tiny", "--seed", str(version), "--out", cls.checkpoint(version)]
            subprocess.run(command, check=True, timeout=CHILD_SECONDS)
        cls.daemon = Daemon("--slot-bytes", str(SLOT_BYTES), "--staging-slots", "4")
        cls.daemon.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    @classmethod
    def checkpoint(cls, version):
        """The folder of a version's checkpoint, or a pattern that an engine completes."""
        return os.path.join(cls.folder, "v%s" % version)

    def refitctl(self, *arguments, code=OK, socket=None):
        """Runs refitctl to its end. Returns stdout, or the one line of stderr where it fails."""
        command = [REFITCTL, "--socket", socket or self.daemon.socket, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
        self.assertEqual(done.returncode, code, "%s: %s%s" % (command, done.stdout, done.stderr))
        if code == OK:
            return done.stdout
        self.assertRegex(done.stderr, r"\Arefitctl: [^\n]*\n\Z")
        return done.stderr

    def json(self, *arguments):
        return json.loads(self.refitctl(*arguments, "-o", "json"))

    def wait_until_no_trainer_is_left(self, group, socket=None):
        """Waits until the daemon counts no trainer: it may notice the end of a process later than this test does."""

        def trainers():
            told = json.loads(self.refitctl("groups", "-o", "json", socket=socket))["groups"]
            return [g["trainers"] for g in told if g["name"] == group]

        wait_for(self, "no trainer in %s" % group, lambda: trainers() == [0])

    def test_pushes_by_region_slot_and_inline_reach_in_place_loader_and_sliced_engines(self):
        pattern = self.checkpoint("{version}")
        sliced = ["--world-size", "2", "--slice", "0"]
        engines = [
            Engine(self, "modes", "in_place", pattern, "--versions", "3"),
            Engine(self, "modes", "loader", pattern, "--versions", "3", "--delivery", "loader"),
            Engine(self, "modes", "sliced", pattern, "--versions", "3", *sliced, "--rank", "0"),
            Engine(self, "modes", "sliced", pattern, "--versions", "3", *sliced, "--rank", "1"),
        ]
        common = ["--group", "modes", "--create", "--instances", "3"]
        for version, mode in enumerate(("region", "slot", "inline"), start=1):
            pushed = self.json("push", self.checkpoint(version), *common, "--mode", mode)
            self.assertEqual((pushed["group"], pushed["version"], pushed["tensors"]), ("modes", version, TENSORS))
            if mode == "slot":
                self.assertGreaterEqual(pushed["buckets"] * SLOT_BYTES, pushed["bytes"])
            committed = {"committed": True, "reason": ""}
            names = ("in_place", "loader", "sliced")
            outcomes = sorted(pushed["instances"], key=lambda outcome: outcome["instance"])
            self.assertEqual(outcomes, [{"instance": name, **committed} for name in names])
        for engine in engines:
            engine.finish(OK)
            self.assertEqual(engine.verified(), [1, 2, 3])
        held = [json.loads(engine.seen[0])["bytes"] for engine in engines]
        self.assertEqual(held[:2], [pushed["bytes"]] * 2)
        self.assertLess(max(held[2:]), pushed["bytes"])  # a sliced rank holds its part

    def test_in_place_engines_are_refitted_unless_a_push_is_asked_for_and_loader_engines_are_pushed(self):
        pattern = self.checkpoint("{version}")
        engine = Engine(self, "refitted", "replica", pattern, "--versions", "3", "--slice", "0")
        push = ["--group", "refitted", "--create", "--wait-instances", "1"]
        refitted = self.json("push", self.checkpoint(1), *push)
        self.assertEqual((refitted["way"], refitted["buckets"], refitted["tensors"]), ("refit", 0, TENSORS))
        self.assertEqual(refitted["instances"], [{"instance": "replica", "committed": True, "reason": ""}])
        self.wait_until_no_trainer_is_left("refitted")
        self.assertEqual(refitted["pushed"], {})
        error = self.refitctl("push", self.checkpoint(2), *push, "--broadcast", "chain", code=FAILED)
        self.assertIn("broadcast: chain is between GPUs", error)
        self.wait_until_no_trainer_is_left("refitted")
        pushed = self.json("push", self.checkpoint(2), *push, "--broadcast", "direct")
        self.assertEqual((pushed["way"], pushed["bytes"]), ("push", refitted["bytes"]))
        self.assertGreater(pushed["buckets"], 0)
        self.assertEqual(pushed["pushed"], {"direct": pushed["bytes"]})
        self.wait_until_no_trainer_is_left("refitted")
        told = self.json("buckets", "--group", "refitted")
        self.assertEqual(len(told["buckets"]), pushed["buckets"])
        self.assertEqual(sum(int(bucket["bytes"]) for bucket in told["buckets"]), pushed["bytes"])
        text = self.refitctl("buckets", "--group", "refitted")
        self.assertIn("refitted v2 committed", text)
        self.assertIn("direct: ", text)
        text = self.refitctl("push", self.checkpoint(3), *push)
        self.assertRegex(text, r"\Arefitted v3 committed: %d tensors, [^\n]* by refit, " % TENSORS)
        engine.finish(OK)
        self.assertEqual(engine.verified(), [1, 2, 3])

        engine = Engine(self, "loaded", "replica", self.checkpoint(1), "--versions", "1", "--delivery", "loader")
        loaded = self.json("push", self.checkpoint(1), "--group", "loaded", "--create", "--wait-instances", "1")
        self.assertEqual(loaded["way"], "push")
        engine.finish(OK)

    def test_status_groups_and_members_show_what_is_there_as_tables_and_as_json(self):
        engine = Engine(self, "shown", "replica", self.checkpoint(1))
        text = self.refitctl("push", self.checkpoint(1), "--group", "shown", "--create")
        self.assertRegex(text, r"\Ashown v1 committed: %d tensors, [^\n]*\nINSTANCE +OUTCOME +REASON\n" % TENSORS)
        self.assertRegex(text, r"\nreplica +committed +-\n\Z")
        engine.wait_for("verified")
        self.wait_until_no_trainer_is_left("shown")

        table = self.refitctl("groups")
        self.assertRegex(table, r"\AGROUP +STATE +VERSION +TRAINERS +INSTANCES +COMMITTED +ABORTED\n")
        self.assertRegex(table, r"\nshown +idle +1 +0/1 +1 +1 +0\n")
        table = self.refitctl("members", "--group", "shown")
        self.assertEqual(len(table.splitlines()), 2)
        row = r"\n *\d+ +shown +engine +replica +0/1 +in_place +host +attached +%d "
        self.assertRegex(table, row % engine.process.pid)
        text = self.refitctl("status")
        self.assertRegex(text, r"\Arefitd \S+ serving, up ")
        self.assertIn("listens    unix:%s\n" % self.daemon.socket, text)
        self.assertIn("\ngroup shown\n", text)
        self.assertRegex(text, r"\n  replica +clean +1 +1/1 +-\n")
        self.assertIn("\n  last update: shown v1 committed: %d tensors" % TENSORS, text)

        status = self.json("status")
        self.assertTrue(status["serving"])
        self.assertEqual(status["listeners"], ["unix:" + self.daemon.socket])
        self.assertGreaterEqual(int(status["resources"]["members"]), 1)
        groups = {group["name"]: group for group in status["groups"]}
        listed = {group["name"]: group for group in self.json("groups")["groups"]}
        self.assertEqual(listed["shown"], groups["shown"])
        group = groups["shown"]
        self.assertEqual((group["state"], group["version"], group["updates_committed"]), ("idle", "1", "1"))
        self.assertEqual(group["spec"]["slot_bytes"], str(SLOT_BYTES))
        self.assertEqual([slot["state"] for slot in group["slots"]], ["free"] * 4)
        replica = {"name": "replica", "state": "clean", "version": "1", "world_size": 1, "attached": 1, "reason": "", "catch_up": ""}
        replica["origin"] = group["incarnation"]
        replica.update(ready=True, lag="0", unready_reason="")
        self.assertEqual(group["instances"], [replica])
        self.assertEqual(group["update"]["outcome"], "UPDATE_OUTCOME_COMMITTED")
        self.assertEqual(self.refitctl("ready", "--group", "shown", "--instance", "replica"), "ready\n")
        self.assertEqual(self.refitctl("ready", "--group", "shown", "--instance", "replica", "--wait"), "ready\n")
        told = self.json("ready", "--group", "shown", "--instance", "replica")
        self.assertEqual(told, {"group": "shown", "instance": "replica", "ready": True, "status": "SERVING"})
        command = [REFITCTL, "--socket", self.daemon.socket, "ready", "--group", "shown", "--instance", "nobody"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (NOT_READY, "not known\n", ""))
        (member,) = self.json("members", "--group", "shown")["members"]
        self.assertEqual((member["role"], member["instance"], member["pid"]), ("engine", "replica", engine.process.pid))
        self.assertEqual((member["delivery"], member["pieces"]), ("in_place", str(TENSORS)))

        engine.process.send_signal(signal.SIGTERM)
        engine.finish(OK)
        self.assertEqual(json.loads(engine.seen[-1]), {"event": "stopped", "commits": 1})

    def test_push_at_a_joined_daemon_waits_for_the_instances_of_the_whole_group(self):
        with Daemon("--listen-tcp", "127.0.0.1:0", "--insecure", "--daemon-id", "a") as a, Daemon("--insecure", "--daemon-id", "b") as b:
            listeners = json.loads(self.refitctl("status", "-o", "json", socket=a.socket))["listeners"]
            (coordinator,) = [name[len("tcp:"):] for name in listeners if name.startswith("tcp:")]
            Engine(self, "far", "replica", self.checkpoint(1), socket=a.socket)  # the other daemon's
            push = ["push", self.checkpoint(1), "--group", "far", "--coordinator", coordinator, "--create", "-o", "json"]
            pushed = json.loads(self.refitctl(*push, "--wait-instances", "1", "--wait", str(CHILD_SECONDS), socket=b.socket))
            self.assertEqual([outcome["instance"] for outcome in pushed["instances"]], ["replica"])
            self.wait_until_no_trainer_is_left("far", socket=a.socket)
            error = self.refitctl(*push, "--wait-instances", "2", "--wait", "0.2", socket=b.socket, code=DEADLINE)
            self.assertIn("1 of 2 instances are complete", error)

    def test_status_and_nodes_show_the_daemons_of_a_group_and_their_link(self):
        with Daemon("--listen-tcp", "127.0.0.1:0", "--insecure", "--daemon-id", "a") as a, Daemon("--insecure", "--daemon-id", "b") as b:
            def ask(daemon, *arguments):
                return self.refitctl(*arguments, socket=daemon.socket)

            listeners = json.loads(ask(a, "status", "-o", "json"))["listeners"]
            (coordinator,) = [name[len("tcp:"):] for name in listeners if name.startswith("tcp:")]
            engine = Engine(self, "far", "replica", self.checkpoint(1), "--coordinator", coordinator, socket=b.socket)
            pushed = json.loads(ask(a, "push", self.checkpoint(1), "--group", "far", "--create", "--wait-instances", "1", "-o", "json"))
            self.assertEqual(pushed["way"], "refit")
            engine.wait_for("verified")
            self.wait_until_no_trainer_is_left("far", socket=a.socket)

            self.assertRegex(ask(a, "status"), r"\ndaemon     a\n")
            self.assertRegex(ask(a, "status"), r"\n  coordinator: this daemon\n  communicator: \d+ up, \S+ \S+ sent, 0 B rec")
            self.assertRegex(ask(a, "status"), r"\n  b +127\.0\.0\.1:\d+ +joined +1 +\d")
            self.assertRegex(ask(b, "status"), r"\n  coordinator: %s\n  communicator: \d+ up, 0 B sent, " % coordinator)

            table = ask(a, "nodes")
            self.assertRegex(table, r"\AGROUP +NODE +ADDRESS +STATE +MEMBERS +SILENT\nfar +a +- +self +0 +-\nfar +b +127\.")
            self.assertRegex(table, r"\nGROUP +NODE +SENDS TO +SENT +FORWARDED .*\nfar +a +b \(.+\) .*\nfar +b +- +0 B +0 B ")
            self.assertRegex(table, r"\nGROUP +COORDINATOR +COMMUNICATOR +STATE +SENT +RECEIVED\nfar +this daemon +\d+ +up +")
            near, far = (json.loads(ask(daemon, "nodes", "-o", "json")) for daemon in (a, b))
            self.assertEqual((near["daemon_id"], far["daemon_id"]), ("a", "b"))
            (near,), (far,) = near["groups"], far["groups"]
            self.assertEqual((near["name"], near["coordinator"], far["coordinator"]), ("far", "", coordinator))
            shown = [(node["daemon_id"], node["state"], node["members"]) for node in near["nodes"]]
            self.assertEqual(shown, [("a", "self", 0), ("b", "joined", 1)])
            self.assertEqual([(node["daemon_id"], node["state"]) for node in far["nodes"]], [("a", "joined")])
            source, sink = near["nodes"]
            # The bytes that moved are one copy of the model, with the gaps that align its tensors.
            moved = int(source["bytes_sent"])
            self.assertTrue(pushed["bytes"] <= moved <= pushed["bytes"] + TENSORS * 512, moved)
            self.assertEqual(source["sends"], [{"daemon_id": "b", "bytes": str(moved)}])
            self.assertEqual((int(sink["bytes_received"]), sink["sends"]), (moved, []))
            self.assertTrue(source["data_seconds"] > 0 and sink["data_seconds"] > 0)
            sent = int(near["wire_bytes_sent"])
            self.assertTrue(pushed["bytes"] <= sent <= pushed["bytes"] + TENSORS * 512, sent)
            self.assertEqual((int(far["wire_bytes_received"]), far["communicator"]), (sent, near["communicator"]))

            engine.process.send_signal(signal.SIGTERM)
            engine.finish(OK)

    def test_top_shows_groups_instances_and_links_on_one_screen(self):
        engine = Engine(self, "topped", "replica", self.checkpoint(1))
        self.refitctl("push", self.checkpoint(1), "--group", "topped", "--create")
        engine.wait_for("verified")
        self.wait_until_no_trainer_is_left("topped")
        screen = self.refitctl("top", "--once")
        self.assertRegex(screen, r"\A\S+ refitd \S+ serving, up ")
        self.assertRegex(screen, r"\ntopped +idle +1 +0/1 +1/1 +1 +0 ")
        self.assertRegex(screen, r"\ntopped +replica +clean +1 +0 +yes +1/1 +-\n")
        self.assertIn("\ntopped v1 committed: %d tensors" % TENSORS, screen)

    def groups_named(self, beginning, socket=None):
        told = json.loads(self.refitctl("groups", "-o", "json", socket=socket))["groups"]
        return [group["name"] for group in told if group["name"].startswith(beginning)]

    def test_smoke_proves_the_bytes_at_every_daemon_and_leaves_no_group(self):
        with Daemon("--listen-tcp", "127.0.0.1:0", "--insecure", "--daemon-id", "a") as a, Daemon("--insecure", "--daemon-id", "b") as b:
            told = json.loads(self.refitctl("smoke", "-o", "json", socket=a.socket))
            self.assertEqual((told["bytes"], told["compared"], told["committed"], told["not_tried"]), (1 << 20, ["a"], ["a"], []))
            listeners = json.loads(self.refitctl("status", "-o", "json", socket=a.socket))["listeners"]
            (coordinator,) = [name[len("tcp:"):] for name in listeners if name.startswith("tcp:")]
            both = ("smoke", "--daemon", b.socket, "--coordinator", coordinator)
            self.assertRegex(self.refitctl(*both, socket=a.socket), r"\A1\.00 MiB reached a, b, byte for byte; 2 of 2 instances ")
            self.assertEqual(self.groups_named("refitctl-smoke", socket=a.socket), [])

            named = ("--group", "refitctl-smoke-joined", "--coordinator", coordinator)
            joined = Child(self, REFITCTL, "--socket", b.socket, "smoke", "--join", *named)
            self.refitctl("smoke", *named, "--instances", "2", socket=a.socket)
            self.assertEqual(joined.finish(OK)[-1], "1.00 MiB reached b, byte for byte")
            self.assertEqual(self.groups_named("refitctl-smoke", socket=a.socket), [])

    def test_a_smoke_that_fails_deletes_its_group_and_says_who_was_waited_for(self):
        error = self.refitctl("smoke", "--instances", "2", "--duration", "500ms", code=DEADLINE)
        self.assertIn("1 of 2 instances", error)
        self.assertEqual(self.groups_named("refitctl-smoke"), [])
        engine = Engine(self, "mine", "replica", self.checkpoint(1))
        self.refitctl("push", self.checkpoint(1), "--group", "mine", "--create")
        self.assertIn("group mine is there already", self.refitctl("smoke", "--group", "mine", code=FAILED))
        engine.wait_for("verified")

    def test_a_support_bundle_has_status_members_statistics_and_metrics(self):
        with Daemon("--metrics-listen", "127.0.0.1:0", "--metrics-insecure", "true") as daemon:
            Engine(self, "bundled", "replica", self.checkpoint(1), socket=daemon.socket)
            self.refitctl("push", self.checkpoint(1), "--group", "bundled", "--create", socket=daemon.socket)
            listeners = json.loads(self.refitctl("status", "-o", "json", socket=daemon.socket))["listeners"]
            (metrics,) = [name[len("metrics:"):] for name in listeners if name.startswith("metrics:")]
            path = os.path.join(self.folder, "bundle.tar")
            self.refitctl("support-bundle", "-f", path, "--metrics", metrics, "--config", "/nowhere", socket=daemon.socket)
            with tarfile.open(path) as bundle:
                names = ["versions.txt", "status.json", "members.json", "statistics-0.json", "metrics.txt", "missing.txt"]
                self.assertEqual(bundle.getnames(), names)
                parts = {name: bundle.extractfile(name).read().decode() for name in names}
            self.assertIn("bundled", parts["status.json"])
            self.assertEqual(json.loads(parts["statistics-0.json"])["update"]["version"], "1")
            self.assertIn("\nrefitd_updates_total{", parts["metrics.txt"])
            self.assertRegex(parts["missing.txt"], r"\Aconfig.textproto: /nowhere: [^\n]*\n\Z")

    def test_a_trace_has_the_last_update_and_its_buckets(self):
        Engine(self, "traced", "replica", self.checkpoint(1))
        pushed = self.json("push", self.checkpoint(1), "--group", "traced", "--create", "--push", "--bucket-bytes", "1MiB")
        spans = [event for event in json.loads(self.refitctl("trace", "traced"))["traceEvents"] if event["ph"] == "X"]
        self.assertEqual(spans[0]["name"], "v1 committed")
        self.assertEqual(len([span for span in spans if span["name"].startswith("bucket ")]), pushed["buckets"])

    def start_watched_push(self, group):
        """A push that waits for a second engine, and a watch until idle that has shown it."""
        first = Engine(self, group, "first", self.checkpoint(1), "--versions", "1")
        refitctl = (REFITCTL, "--socket", self.daemon.socket)
        arguments = ["push", self.checkpoint(1), "--group", group, "--create", "--instances", "2"]
        push = Child(self, *refitctl, *arguments)
        opened = json.loads(Child(self, *refitctl, "watch", "-o", "json").next_line())
        self.assertEqual((opened["group"], opened["version"], opened["tensor_count"]), (group, "1", str(TENSORS)))
        watch = Child(self, *refitctl, "watch", "--group", group, "--until-idle", "--interval", "20")
        self.assertIn("%s v1 " % group, watch.next_line())
        return first, push, watch

    def test_watch_until_idle_follows_an_update_to_its_commit(self):
        first, push, watch = self.start_watched_push("watched")
        second = Engine(self, "watched", "second", self.checkpoint(1), "--versions", "1")
        for child in (push, first, second):
            child.finish(OK)
        lines = watch.finish(OK)
        self.assertRegex(lines[-1], r"^watched v1 committed: %d tensors, .*, 2 of 2 instances; paused .* to .*$" % TENSORS)
        # The group is idle, so the command ends at once.
        self.assertEqual(self.refitctl("watch", "--group", "watched", "--until-idle"), "")

    def test_watch_of_an_update_that_is_aborted_fails_and_tells_why(self):
        _, push, watch = self.start_watched_push("abandoned")
        push.process.terminate()
        lines = watch.finish(FAILED)
        self.assertRegex(lines[-1], r"^abandoned v1 aborted after .*trainer rank 0 \(pid %d\)" % push.process.pid)

    def test_a_byte_that_differs_from_the_engines_checkpoint_ends_the_engine_with_4(self):
        altered = os.path.join(self.folder, "altered")
        shutil.copytree(self.checkpoint(1), altered)
        alter_last_byte(altered)
        for delivery in ("in_place", "loader"):
            group = "altered-" + delivery
            engine = Engine(self, group, "replica", altered, "--delivery", delivery)
            self.refitctl("push", self.checkpoint(1), "--group", group, "--create")
            difference = r"tensor '\S+': element \d+ in memory differs from %s" % altered
            self.assertRegex(engine.wait_for("mismatch")["reason"], difference)
            self.assertRegex(engine.finish(MISMATCH)[-1], "^refitctl: " + difference)
            self.assertEqual(engine.verified(), [])

    def test_another_checkpoint_than_the_pushed_one_ends_the_engine_with_4(self):
        engine = Engine(self, "another", "replica", self.checkpoint(2))
        self.refitctl("push", self.checkpoint(1), "--group", "another", "--create")
        self.assertIn("element 0 in memory differs", engine.finish(MISMATCH)[-1])

    def test_instances_that_do_not_come_in_time_end_a_push_with_5(self):
        create = ["push", self.checkpoint(1), "--group", "lonely", "--create", "--instances", "2"]
        error = self.refitctl(*create, "--wait-instances", "9", "--wait", "200ms", code=DEADLINE)
        self.assertIn("group lonely: 0 of 9 instances are complete after 200ms (--wait)", error)
        error = self.refitctl(*create, "--duration", "0.3", code=DEADLINE)
        self.assertIn("0 of 2 instances", error)

    def test_a_version_that_is_not_greater_ends_a_push_with_1_and_changes_nothing(self):
        engine = Engine(self, "repeated", "replica", self.checkpoint(1), "--versions", "2")
        push = ["push", self.checkpoint(1), "--group", "repeated", "--create"]
        self.refitctl(*push, "--version", "7")
        for version in ("7", "6"):
            error = self.refitctl(*push, "--version", version, code=FAILED)
            self.assertIn("version: %s is not greater than the group's 7" % version, error)
        self.assertEqual(self.json(*push)["version"], 8)
        engine.finish(OK)
        self.assertEqual(engine.verified(), [7, 8])

    def test_a_push_that_fails_after_bytes_were_written_tells_that_weights_are_dirty(self):
        renamed = os.path.join(self.folder, "renamed")
        shutil.copytree(self.checkpoint(1), renamed)
        for name in os.listdir(renamed):
            with open(os.path.join(renamed, name), "r+b") as file:
                content = file.read().replace(b"lm_head.weight", b"mm_head.weight").replace(b"model.norm.weight", b"nodel.norm.weight")
                file.seek(0)
                file.write(content)
        engine = Engine(self, "half", "replica", self.checkpoint("{version}"), "--versions", "1")
        push = ("push", "--group", "half", "--create", "--push", "--bucket-bytes", "64KiB")
        error = self.refitctl(*push, renamed, code=FAILED)
        self.assertRegex(error, r"tensor '[mn]odel|tensor 'mm_head")
        self.assertIn("weights are dirty: instance replica", error)
        self.refitctl(*push, self.checkpoint(2), "--version", "2")
        engine.finish(OK)

    def test_a_group_goes_on_from_an_older_version_after_replace(self):
        engine = Engine(self, "older", "replica", self.checkpoint(1), "--versions", "2")
        push = ["push", self.checkpoint(1), "--group", "older", "--create"]
        self.refitctl(*push, "--version", "7")
        self.refitctl(*push, "--version", "3", code=FAILED)
        before = self.json("groups")["groups"]
        told = self.refitctl("group", "replace", "older")
        self.assertRegex(told, r"^group older: begins anew as incarnation [0-9a-f]{16}, .* 1 instances are dirty until the next commit$")
        after = {group["name"]: group["incarnation"] for group in self.json("groups")["groups"]}
        self.assertNotEqual(after["older"], {group["name"]: group["incarnation"] for group in before}["older"])
        self.assertEqual(self.json(*push, "--version", "3")["version"], 3)
        engine.finish(OK)
        self.assertEqual(engine.verified(), [7, 3])
        self.assertIn("'nobody'", self.refitctl("group", "replace", "nobody", code=FAILED))

    def test_a_group_without_members_is_deleted_and_one_with_members_is_not(self):
        engine = Engine(self, "deleted", "replica", self.checkpoint(1), "--versions", "1")
        self.refitctl("group", "delete", "deleted", code=FAILED)
        self.refitctl("push", self.checkpoint(1), "--group", "deleted", "--create")
        engine.finish(OK)

        def members():
            return self.json("members", "--group", "deleted")["members"]

        wait_for(self, "no member in deleted", lambda: members() == [])
        self.assertEqual(self.refitctl("group", "delete", "deleted"), "group deleted: deleted\n")
        self.assertNotIn("deleted", [group["name"] for group in self.json("groups")["groups"]])

    def test_an_update_that_runs_is_aborted_by_hand(self):
        _, push, watch = self.start_watched_push("by-hand")
        self.assertEqual(self.refitctl("abort", "by-hand", "--reason", "maintenance"), "group by-hand: the update was aborted\n")
        self.assertRegex(push.finish(FAILED)[-1], "maintenance")
        watch.finish(FAILED)
        self.refitctl("abort", "by-hand", code=FAILED)

    def test_a_rollback_is_refused_by_name_where_no_engine_has_the_version_before(self):
        engine = Engine(self, "back", "replica", self.checkpoint(1), "--versions", "2")
        for version in (1, 2):
            self.refitctl("push", self.checkpoint(1), "--group", "back", "--version", str(version), "--create")
        self.assertIn("no instance holds version 1 in its arenas any more, beside version 2", self.refitctl("rollback", "back", code=FAILED))
        self.assertIn("version: 7, and the group's is 2", self.refitctl("rollback", "back", "--version", "7", code=FAILED))
        self.assertEqual(self.refitctl("release", "back"), "group back: the next update may be staged\n")
        self.refitctl("rollback", "nowhere", code=FAILED)
        engine.finish(OK)

    def test_can_asks_the_running_daemon_and_says_which_rule_decided(self):
        me = "uid:%d" % os.getuid()
        asked = ("can", "--do", "operator-write", "--group", "any")
        self.assertIn("yes: %s may be operator write of group 'any' by allowed_uids: " % me, self.refitctl(*asked, "--as", me))
        self.assertTrue(self.json(*asked, "--as", me)["allowed"])
        command = [REFITCTL, "--socket", self.daemon.socket, *asked, "--as", "uid:4294967294"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
        self.assertEqual((done.returncode, done.stderr), (FAILED, ""))
        self.assertIn("no: uid:4294967294 may not be operator write of group 'any'", done.stdout)
        self.assertIn("'me'", self.refitctl(*asked, "--as", "me", code=FAILED))

    def test_a_group_that_nobody_creates_ends_a_push_with_1(self):
        error = self.refitctl("push", self.checkpoint(1), "--group", "nobody", "--timeout", "3", code=FAILED)
        self.assertIn("'nobody'", error)

    def test_no_daemon_ends_every_command_with_3(self):
        none = os.path.join(self.folder, "none.sock")
        wait = ["--timeout", "0.2"]  # the wait for a daemon that starts
        engine = ["engine", "--group", "g", "--checkpoint", self.checkpoint(1), "--instance", "i", *wait]
        push = ["push", self.checkpoint(1), "--group", "g", *wait]
        buckets, trace = ["buckets", "--group", "g"], ["trace", "g"]
        for command in (["status"], ["groups"], ["members"], ["nodes"], buckets, trace, ["top", "--once"], ["smoke"], ["watch"], push, engine):
            error = self.refitctl(*command, code=UNREACHABLE, socket=none)
            self.assertIn(none, error)


if __name__ == "__main__":
    unittest.main()
