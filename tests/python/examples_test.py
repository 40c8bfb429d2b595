"""The example programs in C++ and in C work with each other, whichever side is which."""

import unittest

from daemon import Child, Daemon

VERSIONS = "3"


class ExamplesTest(unittest.TestCase):
    daemon: Daemon

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon()
        cls.daemon.__enter__()

    @classmethod
    def tearDownClass(cls):
        cls.daemon.__exit__(None, None, None)

    def pair(self, trainer, engine):
        """One trainer with a registered and a loader engine."""
        group = "%s.%s" % (trainer, engine)
        socket = self.daemon.socket
        children = [
            Child(self, "client/examples/" + engine, socket, group, "in_place", VERSIONS),
            Child(self, "client/examples/" + engine, socket, group, "loader", VERSIONS, "loader"),
            Child(self, "client/examples/" + trainer, socket, group, VERSIONS, "2"),
        ]
        for child in children:
            child.finish(0)

    def test_a_trainer_in_cpp_refits_engines_in_cpp(self):
        self.pair("trainer_example", "engine_example")

    def test_a_trainer_in_cpp_refits_engines_in_c(self):
        self.pair("trainer_example", "engine_example_c")

    def test_a_trainer_in_c_refits_engines_in_cpp(self):
        self.pair("trainer_example_c", "engine_example")

    def test_a_trainer_in_c_refits_engines_in_c(self):
        self.pair("trainer_example_c", "engine_example_c")

    def test_wrong_usage_ends_with_2(self):
        for example in ("trainer_example", "trainer_example_c", "engine_example", "engine_example_c"):
            Child(self, "client/examples/" + example).finish(2)


if __name__ == "__main__":
    unittest.main()
