"""tools/count_tests.py counts a target as failed that was not built, not run, or is flaky."""

import unittest

import count_tests


def configured(label, test=True):
    return {
        "id": {"targetConfigured": {"label": label}},
        "configured": {"testSize": "SMALL"} if test else {"targetKind": "cc_library rule"},
    }


def completed(label, success):
    return {"id": {"targetCompleted": {"label": label}}, "completed": {"success": success} if success else {}}


def summary(label, status):
    return {"id": {"testSummary": {"label": label}}, "testSummary": {"overallStatus": status}}


class CountTest(unittest.TestCase):
    def test_passed_tests_count(self):
        events = [configured("//a:t"), completed("//a:t", True), summary("//a:t", "PASSED")]
        self.assertEqual(count_tests.count(events, 0), (["//a:t"], []))

    def test_failed_timed_out_and_flaky_tests_are_failed(self):
        for status in ("FAILED", "TIMEOUT", "FLAKY", "NO_STATUS"):
            events = [configured("//a:t"), completed("//a:t", True), summary("//a:t", status)]
            self.assertEqual(count_tests.count(events, 3), ([], [("//a:t", status.lower())]))

    def test_a_test_that_was_not_built_or_not_run_is_failed(self):
        events = [configured("//a:t"), completed("//a:t", False), configured("//a:u")]
        self.assertEqual(count_tests.count(events, 1), ([], [("//a:t", "not built"), ("//a:u", "not run")]))

    def test_a_library_that_does_not_build_is_failed(self):
        events = [configured("//a:l", test=False), completed("//a:l", False)]
        self.assertEqual(count_tests.count(events, 1), ([], [("//a:l", "not built")]))

    def test_a_failed_run_that_names_nothing_is_failed(self):
        self.assertEqual(count_tests.count([], 2), ([], [("bazel", "exit status 2")]))


if __name__ == "__main__":
    unittest.main()
