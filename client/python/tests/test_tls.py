"""Trainers that reach their daemon over TCP: with certificates, with wrong ones, and with none."""

import json
import os
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import refitd
from refitd import testing
from support import DaemonTest, Server

sys.path.insert(0, str(Path(__file__).absolute().parents[3] / "tests/python"))
from certificates import Authority  # noqa: E402

DAEMONS = "spiffe://prod/refitd/*"


class TlsTest(DaemonTest):
    """A daemon with certificates for TCP; engines attach by its unix socket, since they share memory with it."""

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp")
        cls.addClassCleanup(folder.cleanup)
        cls.authority = Authority(folder.name)
        certificate, key = cls.authority.issue("daemon", "spiffe://prod/refitd/a")
        rules = Path(folder.name, "refitd.textproto")
        rules.write_text('rule { who: "spiffe://prod/trainer" role: TRAINER group: "*" }\n')
        cls.daemon = testing.Daemon(
            (*cls.flags, f"--config={rules}", "--listen-tcp=127.0.0.1:0", f"--tls-certificate={certificate}", f"--tls-key={key}",
             f"--tls-roots={cls.authority.roots}")
        )
        listeners = json.loads(cls.daemon.control("--output", "json", "status"))["listeners"]
        (cls.address,) = [name.removeprefix("tcp:") for name in listeners if name.startswith("tcp:")]
        cls.certificate, cls.key = cls.authority.issue("trainer", "spiffe://prod/trainer")

    def over_tcp(self, **options):
        made = refitd.Trainer(self.group, connect=refitd.Connect(address=self.address, wait_seconds=20, **options))
        self.addCleanup(made.close)
        return made

    def tls(self, **fields):
        return refitd.TLS(**{"certificate": self.certificate, "key": Path(self.key), "roots": self.authority.roots, "server": DAEMONS, **fields})

    def test_an_engine_takes_the_weights_of_the_identity_that_it_names(self):
        trainer = self.over_tcp(tls=self.tls())
        with self.assertRaisesRegex(refitd.PermissionDenied, "trainer_identity: 'uid:1' is not who owns group"):
            self.engine("b", trainer_identity="uid:1")
        with self.assertRaisesRegex(refitd.InvalidArgument, "trainer_identity"):
            self.engine("b", trainer_identity="somebody")
        server = Server(self, self.engine(loader=True, trainer_identity="spiffe://prod/*"), lambda part: None)
        with trainer.update(1, tensor_count=1) as update:
            update.push("w", b"weights")
        server.wait_for(refitd.Committed, 1)
        (committed,) = server.of(refitd.Committed)
        self.assertEqual(committed.owner, "spiffe://prod/trainer")
        # A version of another owner is not one of this group's: its engine does not take this owner's weights either.
        with self.assertRaisesRegex(refitd.PermissionDenied, "held_owner"):
            self.engine("b", held_version=1, held_incarnation=7, held_owner="uid:1")

    def test_what_is_pushed_over_tls_arrives_whole(self):
        trainer = self.over_tcp(tls=self.tls())
        tensors = {f"t{i}": os.urandom(size) for i, size in enumerate((1, 0, 100, 70_000, (1 << 20) + 1, (5 << 20) + 7, 3))}
        taken, joiner = {}, refitd.Joiner()

        def load(part):
            taken.update({view.name: bytes(view.memory) for view in joiner.add(part)})

        server = Server(self, self.engine(loader=True), load)
        for version in (1, 2):
            with trainer.update(version, tensor_count=len(tensors)) as update:
                for name, value in tensors.items():
                    update.push(name, value)
            server.wait_for(refitd.Committed, version)
            self.assertEqual(taken, tensors)
            self.assertEqual(update.result.bytes, sum(map(len, tensors.values())))
            tensors = {name: os.urandom(len(value)) for name, value in tensors.items()}
            taken.clear()
        members = json.loads(self.daemon.control("--output", "json", "members"))
        self.assertIn("spiffe://prod/trainer", json.dumps(members))

    def test_memory_can_not_be_registered_over_tcp(self):
        trainer = self.over_tcp(tls=self.tls())
        region = refitd.Region(4096)
        box = refitd.Box(0, (0,), (4,), (1,), refitd.RegionMemory(region, 0, 16))
        with self.assertRaisesRegex(refitd.FailedPrecondition, "no memory is shared"):
            trainer.register_layout([refitd.TensorSpec("w", "float32", (4,))], [box])

    def test_the_environment_names_what_is_not_given(self):
        named = {"CERTIFICATE": self.certificate, "KEY": self.key, "ROOTS": self.authority.roots, "SERVER": DAEMONS}
        with mock.patch.dict(os.environ, {f"REFITD_TLS_{name}": value for name, value in named.items()}):
            self.assertIsNone(self.over_tcp().group_version)
            self.group += "-2"
            self.assertIsNone(self.over_tcp(tls=refitd.TLS(server="spiffe://prod/refitd/a")).group_version)

    def test_certificates_that_are_not_trusted_are_refused(self):
        with tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp") as folder:
            strangers = Authority(folder)
            certificate, key = strangers.issue("stranger", "spiffe://prod/trainer")
            with self.assertRaises(refitd.Unauthenticated):
                self.over_tcp(tls=self.tls(certificate=certificate, key=key))
            with self.assertRaises(refitd.Unauthenticated):
                self.over_tcp(tls=self.tls(roots=strangers.roots))
        with self.assertRaisesRegex(refitd.Unauthenticated, "spiffe://prod/refitd/a"):
            self.over_tcp(tls=self.tls(server="spiffe://prod/other/*"))

    def test_bad_arguments_are_named(self):
        for problem, options in (
            ("takes certificates", {}),
            ("tls_key is empty", {"tls": refitd.TLS(certificate=self.certificate)}),
            ("tls.key: 7 is no text", {"tls": self.tls(key=7)}),
            ("tls.roots: '' is no text", {"tls": self.tls(roots="")}),
            ('tls_server is "prod"', {"tls": self.tls(server="prod")}),
            ("is no refitd.TLS", {"tls": {"key": self.key}}),
            ("both socket", {"tls": self.tls(), "socket": self.daemon.socket}),
        ):
            with self.subTest(problem=problem), self.assertRaisesRegex(refitd.InvalidArgument, problem):
                self.over_tcp(**options)
        for name, options in (("tls", {"tls": self.tls()}), ("insecure", {"insecure": True})):
            with self.subTest(name=name), self.assertRaisesRegex(refitd.InvalidArgument, f"{name} is for a daemon over TCP"):
                refitd.Trainer(self.group, socket=self.daemon.socket, connect=refitd.Connect(**options))


if __name__ == "__main__":
    unittest.main()
