"""The metrics that refitd shows to Prometheus: read as text, checked by promtool, and scraped by a Prometheus of the test's own."""

import json
import os
import shutil
import signal
import subprocess
import tempfile
import unittest
import urllib.error
import urllib.parse
import urllib.request

import grpc
from google.protobuf import json_format

from certificates import Authority
from daemon import CHILD_SECONDS, Child, Daemon, wait_for
from refitd.v1 import operator_pb2, operator_pb2_grpc, trainer_pb2
from stub_trainer import MODEL, SECONDS, StubTrainer, elements, unpacked

TOTAL_BYTES = sum(elements(shape) * size for _, _, shape, size in MODEL)
EXIT_IN_USE = 3

PROMETHEUS_CONFIG = """
global:
  scrape_interval: 1s
  scrape_timeout: 1s
scrape_configs:
  - job_name: refitd
    static_configs:
      - targets: ["%s"]
"""
TLS_CONFIG = """
    scheme: https
    tls_config:
      cert_file: %s
      key_file: %s
      ca_file: %s
      min_version: TLS13
"""
SCRAPE_RULE = 'rule { who: "spiffe://prod/prometheus" role: OPERATOR_READ group: "*" }'


class Metered(Daemon):
    """A daemon with metrics on a port of its own choice, in the clear unless it has certificates: `metrics` is HOST:PORT."""

    def __init__(self, *flags):
        insecure = () if "--tls-key" in flags else ("--metrics-insecure",)
        super().__init__("--metrics-listen", "127.0.0.1:0", *insecure, *flags)
        self.metrics = None

    def __enter__(self):
        super().__enter__()
        (self.metrics,) = [name for kind, _, name in self.listeners() if kind == "metrics"]
        return self

    def listeners(self):
        with self.channel() as channel:
            operator = operator_pb2_grpc.OperatorStub(channel)
            status = operator.GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
        return [listener.partition(":") for listener in status.listeners]

    def scrape(self):
        with urllib.request.urlopen("http://%s/metrics" % self.metrics, timeout=SECONDS) as answer:
            return answer.read().decode()


def values_of(text):
    """Each series, as it is written, with its value."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}


def events_of(stream):
    """Name and data of each event of a stream of server-sent events."""
    fields = {}
    for line in stream:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name:
            fields[name] = value
        elif "event" in fields:
            yield fields["event"], fields["data"]
            fields = {}


def updates(group, result, reason=""):
    return 'refitd_updates_total{group="%s",result="%s",reason="%s"}' % (group, result, reason)


class MetricsTest(unittest.TestCase):
    def update_twice_and_abort_once(self, daemon, channel):
        """Leaves version 2 committed, and trainer and engine attached."""
        trainer = StubTrainer(channel, "policy", instances=1)
        engine = Child(self, "client/examples/engine_example", daemon.socket, "policy", "replica", "3")
        for version in (1, 2):
            trainer.begin(version)
            trainer.push(version, unpacked(0, version, [0, 1, 2, 3]))
            trainer.commit(version, 1)
        trainer.begin(3)
        trainer.abort(3, "changed its mind")
        return trainer, engine

    def test_a_scrape_shows_the_groups_state(self):
        with Metered() as daemon, daemon.channel() as channel:
            trainer, engine = self.update_twice_and_abort_once(daemon, channel)
            text = daemon.scrape()
            values = values_of(text)
            self.assertRegex(text, r'\nrefitd_build_info\{version="\d+\.\d+\.\d+",cuda="CUDA [^"]+"\} 1\n')
            self.assertEqual(values['refitd_committed_version{group="policy"}'], 2)
            self.assertEqual(values['refitd_leases{group="policy",role="trainer"}'], 1)
            self.assertEqual(values['refitd_leases{group="policy",role="engine"}'], 1)
            # The abort leaves the instance clean, since nothing had been written.
            self.assertEqual(values['refitd_instances{group="policy",state="clean"}'], 1)
            self.assertEqual(values['refitd_slots{group="policy",state="free"}'], 4)
            self.assertEqual(values['refitd_update_running{group="policy"}'], 0)
            self.assertEqual(values["refitd_members"], 2)
            self.assertEqual(values["refitd_serving"], 1)
            self.assertGreater(values["refitd_uptime_seconds"], 0)
            self.assertGreater(values["process_open_fds"], 3)
            self.assertGreater(values["process_resident_memory_bytes"], 1 << 20)

            # An update that runs is seen to run, and does not end with a drain.
            trainer.begin(4)
            self.assertEqual(values_of(daemon.scrape())['refitd_update_running{group="policy"}'], 1)
            daemon.process.send_signal(signal.SIGTERM)
            wait_for(self, "a draining daemon", lambda: values_of(daemon.scrape())["refitd_serving"] == 0)
            trainer.push(4, unpacked(0, 4, [0, 1, 2, 3]))
            trainer.commit(4, 1)
            engine.process.kill()

    def test_a_scrape_counts_updates_phases_and_bytes_until_the_group_is_deleted(self):
        with Metered() as daemon, daemon.channel() as channel:
            trainer, engine = self.update_twice_and_abort_once(daemon, channel)
            values = values_of(daemon.scrape())
            self.assertEqual(values[updates("policy", "committed")], 2)
            self.assertEqual(values[updates("policy", "aborted", "aborted")], 1)
            ended = {series: value for series, value in values.items() if series.startswith("refitd_updates_total")}
            self.assertEqual(sum(ended.values()), 3, ended)
            self.assertEqual(values['refitd_update_seconds_count{group="policy"}'], 3)
            self.assertEqual(values['refitd_update_bytes_total{group="policy"}'], 2 * TOTAL_BYTES)
            self.assertGreaterEqual(values['refitd_moved_bytes_total{group="policy",move="copy"}'], 2 * TOTAL_BYTES)
            self.assertEqual(values['refitd_integrity_failures_total{group="policy"}'], 0)
            phases = 0
            for phase in ("prepare", "data", "verify", "flip"):
                labels = '{group="policy",phase="%s"}' % phase
                if phase != "flip":  # no instance is shadowed
                    self.assertGreaterEqual(values["refitd_update_phase_seconds_count" + labels], 2, phase)
                phases += values["refitd_update_phase_seconds_sum" + labels]
            self.assertGreater(phases, 0)
            self.assertLessEqual(phases, values['refitd_update_seconds_sum{group="policy"}'] * (1 + 1e-9))

            trainer.detach()
            engine.process.kill()
            operator = operator_pb2_grpc.OperatorStub(channel)

            def members():
                return operator.ListMembers(operator_pb2.ListMembersRequest(group="policy"), timeout=SECONDS).members

            wait_for(self, "an empty group", lambda: not members())
            operator.DeleteGroup(operator_pb2.DeleteGroupRequest(group="policy"), timeout=SECONDS)
            self.assertNotIn("policy", daemon.scrape())

    def test_each_way_to_lose_an_update_counts_under_its_own_reason(self):
        with Metered("--limits-ready-ms", "60000", "--limits-idle-ms", "60000") as daemon, daemon.channel() as channel:
            operator = operator_pb2_grpc.OperatorStub(channel)
            trainer = StubTrainer(channel, "policy", instances=1)
            engine = Child(self, "client/examples/engine_example", daemon.socket, "policy", "replica", "9")
            version = 0
            lost = []

            def lose(reason, how):
                nonlocal version
                version += 1
                trainer.begin(version)
                how()
                lost.append(reason)
                expected = {updates("policy", "aborted", reason): lost.count(reason) for reason in lost}

                def counted():
                    values = values_of(daemon.scrape())
                    return all(values[series] == count for series, count in expected.items())

                wait_for(self, expected, counted)

            abort = operator_pb2.AbortUpdateRequest(group="policy", reason="test")
            lose("operator", lambda: operator.AbortUpdate(abort, timeout=SECONDS))
            lose("aborted", lambda: trainer.abort(version, "test"))
            lose("operator", lambda: operator.AbortUpdate(abort, timeout=SECONDS))
            lose("member_lost", engine.process.kill)
            # No engine is left that could take part.
            request = trainer_pb2.BeginRequest(lease=trainer.lease, version=version + 1, duration_ms=200)
            with self.assertRaises(grpc.RpcError):
                trainer.stub.Begin(request, timeout=SECONDS)
            deadline = updates("policy", "aborted", "deadline")
            wait_for(self, deadline, lambda: values_of(daemon.scrape())[deadline] == 1)

    def test_the_page_brings_the_operators_own_messages(self):
        with Metered("--metrics-page") as daemon, daemon.channel() as channel:
            trainer, _ = self.update_twice_and_abort_once(daemon, channel)
            with urllib.request.urlopen("http://%s/" % daemon.metrics, timeout=SECONDS) as answer:
                self.assertEqual(answer.headers["Content-Type"], "text/html; charset=utf-8")
                self.assertIn("default-src 'none'; script-src 'sha256-", answer.headers["Content-Security-Policy"])
            changes = []
            with urllib.request.urlopen("http://%s/events" % daemon.metrics, timeout=SECONDS) as stream:
                for name, data in events_of(stream):
                    if name == "status":
                        break
                    changes.append(json_format.Parse(data, operator_pb2.UpdateStatus()))
            ended = [(u.version, u.state, u.reason) for u in changes if u.state in ("committed", "aborted")]
            self.assertEqual([each[:2] for each in ended], [(1, "committed"), (2, "committed"), (3, "aborted")])
            self.assertIn("changed its mind", ended[2][2])
            first = [u for u in changes if u.version == 1]
            self.assertIn("data", [u.state for u in first])
            self.assertEqual([u.elapsed_seconds for u in first], sorted(u.elapsed_seconds for u in first))

            status = json_format.Parse(data, operator_pb2.GetStatusResponse())
            other = operator_pb2_grpc.OperatorStub(channel).GetStatus(operator_pb2.GetStatusRequest(), timeout=SECONDS)
            for each in (status, other):  # what time changes, and what the page leaves out
                each.ClearField("resources")
                each.ClearField("uptime_seconds")
                each.groups[0].ClearField("slots")
            self.assertEqual(status, other)
            trainer.detach()

    def test_promtool_finds_no_fault_in_a_scrape(self):
        with Metered() as daemon, daemon.channel() as channel:
            self.update_twice_and_abort_once(daemon, channel)
            text = daemon.scrape()
        check = ["promtool", "check", "metrics"]
        done = subprocess.run(check, input=text, capture_output=True, text=True, timeout=CHILD_SECONDS)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, "", ""), text)
        # promtool would see a fault.
        text = text.replace("# TYPE refitd_update_seconds histogram\n", "# TYPE refitd_update_seconds nothing\n")
        done = subprocess.run(check, input=text, capture_output=True, text=True, timeout=CHILD_SECONDS)
        self.assertNotEqual(done.returncode, 0)

    def start_prometheus(self, target, more=""):
        """Returns a function that gives the result of an instant query: lists of labels and value.

        `more`: further settings of the scrape.
        """
        folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        config = os.path.join(folder, "prometheus.yml")
        with open(config, "w") as file:
            file.write(PROMETHEUS_CONFIG % target + more)
        storage = "--storage.tsdb.path=" + os.path.join(folder, "data")
        listen = "--web.listen-address=127.0.0.1:0"
        prometheus = Child(self, "prometheus", "--config.file=" + config, storage, listen, "--log.format=json")

        # Two of its threads write these lines, in any order.
        listening, ready = "Listening on", "Server is ready to receive web requests."
        said = {}
        while not {listening, ready} <= said.keys():
            line = prometheus.next_line()
            self.assertIsNotNone(line, "prometheus ended: %s" % prometheus.seen)
            fields = json.loads(line)
            said[fields.get("msg")] = fields
        address = said[listening]["address"]

        def query(expression):
            url = "http://%s/api/v1/query?%s" % (address, urllib.parse.urlencode({"query": expression}))
            with urllib.request.urlopen(url, timeout=SECONDS) as answer:
                result = json.load(answer)["data"]["result"]
            return [(sample["metric"], float(sample["value"][1])) for sample in result]

        return query

    def test_prometheus_scrapes_the_series(self):
        with Metered() as daemon, daemon.channel() as channel:
            query = self.start_prometheus(daemon.metrics)
            wait_for(self, "up", lambda: [value for _, value in query('up{job="refitd"}')] == [1])
            self.update_twice_and_abort_once(daemon, channel)
            for expression, expected in (
                ('refitd_committed_version{group="policy"}', 2),
                ('sum(refitd_updates_total{group="policy",result="committed"})', 2),
                ('sum(refitd_updates_total{group="policy",result="aborted"})', 1),
                ('refitd_update_seconds_bucket{group="policy",le="+Inf"}', 3),
                ('sum(refitd_instances{group="policy"})', 1),
            ):
                wait_for(self, expression, lambda: [value for _, value in query(expression)] == [expected])

    def test_prometheus_scrapes_over_tls_with_a_certificate_that_a_rule_names(self):
        folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, folder)
        authority = Authority(folder)
        certificate, key = authority.issue("refitd", "spiffe://prod/refitd/a")
        rules = os.path.join(folder, "rules.textproto")
        with open(rules, "w") as file:
            file.write(SCRAPE_RULE)
        tls = ("--tls-certificate", certificate, "--tls-key", key, "--tls-roots", authority.roots)
        with Metered("--config", rules, *tls) as daemon:
            for name, up in (("prometheus", 1), ("nobody", 0)):
                own = authority.issue(name, "spiffe://prod/" + name)
                query = self.start_prometheus(daemon.metrics, TLS_CONFIG % (*own, authority.roots))
                wait_for(self, name, lambda q=query, u=up: [value for _, value in q('up{job="refitd"}')] == [u])
            self.assertEqual(query("refitd_serving"), [])

    def test_metrics_are_off_unless_asked_for(self):
        with Daemon() as daemon:
            listeners = Metered.listeners(daemon)
        self.assertEqual([kind for kind, _, _ in listeners], ["unix"])

    def test_a_port_in_use_ends_the_second_daemon_with_3(self):
        with Metered() as daemon:
            socket = os.path.join(daemon.folder, "second.sock")
            second = Child(self, "daemon/refitd", "--listen-unix", socket, "--metrics-listen", daemon.metrics, "--metrics-insecure")
            lines = second.finish(EXIT_IN_USE)
            self.assertIn("can't listen for metrics on %s: in use" % daemon.metrics, lines[-1])
            self.assertEqual(values_of(daemon.scrape())["refitd_serving"], 1)

    def test_any_other_path_is_not_found(self):
        with Metered() as daemon:
            for path in ("/", "/metrics/../../etc/passwd", "/etc/passwd"):
                with self.assertRaises(urllib.error.HTTPError) as refused:
                    urllib.request.urlopen("http://%s%s" % (daemon.metrics, path), timeout=SECONDS)
                self.assertEqual(refused.exception.code, 404, path)
                refused.exception.close()


if __name__ == "__main__":
    unittest.main()
