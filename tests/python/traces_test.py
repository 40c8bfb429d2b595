"""Updates as spans, at a collector of the test's own: gRPC with OpenTelemetry's TraceService."""

import concurrent.futures
import os
import shutil
import tempfile
import threading
import time
import unittest

import grpc

from certificates import Authority
from daemon import Child, wait_for
from metrics_test import Metered, values_of
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1 import trace_pb2
from stub_trainer import StubTrainer, unpacked

EXPORTED, DROPPED = ('refitd_traced_updates_total{result="%s"}' % result for result in ("exported", "dropped"))


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the spans of each call, and the identities of who made it."""

    def __init__(self, test, credentials=None):
        self.calls, self.callers = [], []
        self._lock = threading.Lock()
        server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, server)
        if credentials is None:
            self.port = server.add_insecure_port("127.0.0.1:0")
        else:
            self.port = server.add_secure_port("127.0.0.1:0", credentials)
        server.start()
        test.addCleanup(lambda: server.stop(None).wait())

    def Export(self, request, context):
        with self._lock:
            self.calls.append(request)
            self.callers.append(context.auth_context().get("x509_subject_alternative_name", []))
        return trace_service_pb2.ExportTraceServiceResponse()

    def traces(self):
        """By trace id, its spans; and the resources."""
        traces, resources = {}, []
        with self._lock:
            for call in self.calls:
                (of,) = call.resource_spans
                resources.append(attributes(of.resource))
                for span in of.scope_spans[0].spans:
                    traces.setdefault(span.trace_id, []).append(span)
        return list(traces.values()), resources


def attributes(of):
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in of.attributes}


class TracesTest(unittest.TestCase):
    def commit(self, trainer, version):
        trainer.begin(version)
        trainer.push(version, unpacked(0, version, [0, 1, 2, 3]))
        trainer.commit(version, 1)

    def members(self, daemon, channel):
        trainer = StubTrainer(channel, "policy", instances=1)
        return trainer, Child(self, "client/examples/engine_example", daemon.socket, "policy", "replica", "9")

    def test_each_update_that_ended_is_a_trace_at_the_collector(self):
        collector = Collector(self)
        began = time.time_ns()
        flags = ("--traces-collector", "localhost:%d" % collector.port, "--traces-insecure", "--daemon-id", "node-a")
        with Metered(*flags) as daemon, daemon.channel() as channel:
            trainer, engine = self.members(daemon, channel)
            self.commit(trainer, 1)
            trainer.begin(2)
            trainer.abort(2, "changed its mind")
            wait_for(self, "two traces", lambda: values_of(daemon.scrape())[EXPORTED] == 2)
            self.assertEqual(values_of(daemon.scrape())[DROPPED], 0)
            # The last update reaches the collector though the daemon ends right after it.
            self.commit(trainer, 3)
            engine.process.kill()
            trainer.detach()
        traces, resources = collector.traces()
        self.assertEqual(len(traces), 3)
        self.assertEqual([(r["service.name"], r["service.instance.id"]) for r in resources], [("refitd", "node-a")] * 3)
        ended = time.time_ns()
        for version, (root, *others) in enumerate(traces, 1):
            told = attributes(root)
            self.assertEqual((root.name, told["refitd.group"], told["refitd.version"], root.parent_span_id), ("update", "policy", version, b""))
            self.assertTrue(began <= root.start_time_unix_nano <= root.end_time_unix_nano <= ended)
            self.assertEqual({span.parent_span_id for span in others}, {root.span_id})
            self.assertEqual(len({span.span_id for span in (root, *others)}), 1 + len(others))
            committed = version != 2
            self.assertEqual(root.status.code == trace_pb2.Status.STATUS_CODE_ERROR, not committed)
            self.assertEqual([attributes(span)["refitd.trainer_rank"] for span in others if span.name == "bucket"], ["0"] if committed else [])
            self.assertEqual([attributes(span)["refitd.instance"] for span in others if span.name == "pause"], ["replica"] if committed else [])
            if committed:
                self.assertIn("data", [span.name for span in others])
        self.assertIn("changed its mind", traces[1][0].status.message)

    def test_with_tls_the_collector_must_be_who_it_is_said_to_be_and_learns_who_the_daemon_is(self):
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        authority = Authority(folder)
        own = authority.issue("own", "spiffe://prod/node-a")
        certificate, key, roots = (open(path, "rb").read() for path in (*authority.issue("otel", "spiffe://prod/otel"), authority.roots))
        collector = Collector(self, grpc.ssl_server_credentials([(key, certificate)], roots, require_client_auth=True))
        flags = ["--traces-collector", "localhost:%d" % collector.port]
        for name, path in zip(("certificate", "key", "roots"), (*own, authority.roots)):
            flags += ["--tls-" + name, path]
        for identity, exported in (("spiffe://prod/otel", 1), ("", 1), ("spiffe://prod/other", 0)):
            with self.subTest(identity=identity):
                log = os.path.join(folder, "log")
                named = ("--traces-identity", identity) if identity else ()
                with Metered(*flags, *named, "--metrics-insecure", "--log-file", log) as daemon, daemon.channel() as channel:
                    trainer, engine = self.members(daemon, channel)
                    self.commit(trainer, 1)
                    ended = wait_for(self, "an end", lambda: [values_of(daemon.scrape())[s] for s in (EXPORTED, DROPPED)] in ([1, 0], [0, 1]))
                    self.assertTrue(ended)
                    self.assertEqual(values_of(daemon.scrape())[EXPORTED], exported)
                    engine.process.kill()
                    trainer.detach()
                with open(log) as lines:
                    self.assertEqual("the spans of 1 updates were not exported to localhost" in lines.read(), not exported)
                os.remove(log)
        self.assertEqual(len(collector.calls), 2)
        self.assertTrue(all(b"spiffe://prod/node-a" in names for names in collector.callers))

    def test_updates_are_committed_though_nobody_collects(self):
        with Metered("--traces-collector", "127.0.0.1:1", "--traces-insecure") as daemon, daemon.channel() as channel:
            trainer, engine = self.members(daemon, channel)
            for version in range(1, 6):
                self.commit(trainer, version)
            wait_for(self, "a drop", lambda: values_of(daemon.scrape())[DROPPED] >= 1)
            engine.process.kill()
            trainer.detach()


if __name__ == "__main__":
    unittest.main()
