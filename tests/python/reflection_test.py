"""The daemon tells a client without proto files what it serves, and answers it."""

import contextlib
import io
import json
import os
import subprocess
import tempfile
import unittest

from certificates import Authority
from daemon import Daemon

import reflect


def run(socket, *arguments):
    """(exit code, stdout, stderr) of reflect.py."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = reflect.main(["--unix", socket, *arguments])
    return code, out.getvalue(), err.getvalue()


class ReflectionTest(unittest.TestCase):
    daemon: Daemon

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.daemon.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def run_ok(self, *arguments):
        code, out, err = run(self.daemon.socket, *arguments)
        self.assertEqual((code, err), (0, ""))
        print(out)
        return out

    def test_list_names_every_service(self):
        services = self.run_ok("list").split()
        for name in (
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            "refitd.v1.Engine",
            "refitd.v1.Operator",
            "refitd.v1.Trainer",
        ):
            self.assertIn(name, services)

    def test_describe_tells_services_methods_messages_and_enums(self):
        self.assertIn(
            "  rpc GetStatus ( .refitd.v1.GetStatusRequest ) returns ( .refitd.v1.GetStatusResponse );",
            self.run_ok("describe", "refitd.v1.Operator"),
        )
        self.assertIn("rpc Attach ( stream .refitd.v1.TrainerMessage )", self.run_ok("describe", "refitd.v1.Trainer.Attach"))
        bucket = self.run_ok("describe", "refitd.v1.Bucket")
        self.assertIn("refitd.v1.Bucket is a message:", bucket)
        self.assertIn("  optional bool packed = 7;", bucket)
        self.assertIn("  oneof source {\n    .refitd.v1.InlineBytes inline_bytes = 10;", bucket)
        self.assertIn("  DTYPE_BFLOAT16 = 4;", self.run_ok("describe", "refitd.v1.DType"))

    def test_status_answers_without_a_proto_file(self):
        status = json.loads(self.run_ok("call", "refitd.v1.Operator/GetStatus"))
        self.assertTrue(status["serving"])
        self.assertEqual(status["transports"][0]["name"], "host")

    def test_health_answers_serving(self):
        # gRPC's own health service carries no descriptor for reflection to give: bytes in, bytes out.
        with self.daemon.channel() as channel:
            answer = channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=30)
        self.assertEqual(answer, b"\x08\x01")  # HealthCheckResponse{status: SERVING}

    def test_a_group_made_by_a_call_shows_in_the_list(self):
        request = {"group": "made", "spec": {"trainerRanks": 1}}
        created = json.loads(self.run_ok("call", "refitd.v1.Operator/CreateGroup", json.dumps(request)))
        self.assertTrue(created["created"])
        groups = json.loads(self.run_ok("call", "refitd.v1.Operator/ListGroups"))["groups"]
        self.assertIn("made", [group["name"] for group in groups])
        code, _, _ = run(self.daemon.socket, "call", "refitd.v1.Operator/DeleteGroup", '{"group": "made"}')
        self.assertEqual(code, 0)

    def test_errors_carry_the_status_code_and_the_culprit(self):
        code, _, err = run(self.daemon.socket, "call", "refitd.v1.Operator/GetGroup", '{"group": "nobody"}')
        self.assertEqual(code, 64 + 5)
        self.assertIn("Code: NotFound", err)
        self.assertIn("nobody", err)
        code, _, err = run(self.daemon.socket, "describe", "refitd.v1.Nothing")
        self.assertEqual(code, 2)
        self.assertIn("refitd.v1.Nothing", err)
        code, _, err = run(self.daemon.socket, "call", "refitd.v1.Operator/GetStatus", '{"field": 1}')
        self.assertEqual(code, 2)
        self.assertIn("field", err)


class TlsTest(unittest.TestCase):
    """Stubs of any language can do this over TCP, here Python's gRPC: they need a certificate each, and nothing else of
    ours.
    """

    def test_it_answers_who_has_a_certificate_and_nobody_else(self):
        with tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp") as folder:
            authority = Authority(folder)
            certificate, key = authority.issue("daemon", "spiffe://prod/refitd/a")
            rules = os.path.join(folder, "rules.textproto")
            with open(rules, "w") as file:
                file.write('rule { who: "spiffe://prod/operator" role: OPERATOR_READ group: "*" }\n')
            flags = ["--config", rules, "--tls-certificate", certificate, "--tls-key", key, "--tls-roots", authority.roots]
            with Daemon("--listen-tcp", "127.0.0.1:0", *flags) as daemon:
                _, status, _ = run(daemon.socket, "call", "refitd.v1.Operator/GetStatus")
                (address,) = [name[len("tcp:"):] for name in json.loads(status)["listeners"] if name.startswith("tcp:")]
                certificate, key = authority.issue("operator", "spiffe://prod/operator")
                member = ["--cacert", authority.roots, "--cert", certificate, "--key", key]

                def ask(*credentials):
                    out = io.StringIO()
                    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                        code = reflect.main(["--tcp", address, *credentials, "call", "refitd.v1.Operator/GetStatus"])
                    return code, out.getvalue()

                code, told = ask(*member)
                self.assertEqual(code, 0)
                self.assertTrue(json.loads(told)["serving"])
                stranger, its_key = authority.issue("stranger", "spiffe://prod/stranger")
                denied = 64 + 7
                self.assertEqual(ask("--cacert", authority.roots, "--cert", stranger, "--key", its_key), (denied, ""))
                unavailable = 64 + 14
                self.assertEqual(ask("--cacert", authority.roots), (unavailable, ""))
                self.assertEqual(ask(), (unavailable, ""))
                shown = subprocess.run(
                    ["daemon/refitctl/refitctl", "--address", address, "--tls-certificate", certificate, "--tls-key", key,
                     "--tls-roots", authority.roots, "--tls-server", "spiffe://prod/refitd/*", "status"],
                    capture_output=True, text=True, timeout=60)
                self.assertEqual((shown.returncode, shown.stderr), (0, ""))
                refused = subprocess.run(
                    ["daemon/refitctl/refitctl", "--address", address, "--tls-certificate", certificate, "--tls-key", key,
                     "--tls-roots", authority.roots, "--tls-server", "spiffe://prod/other/*", "status"],
                    capture_output=True, text=True, timeout=60)
                self.assertNotEqual(refused.returncode, 0)
                self.assertIn('"spiffe://prod/refitd/a", which does not match', refused.stderr)


if __name__ == "__main__":
    unittest.main()
