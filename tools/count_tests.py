"""Counts the results of a `bazel test` from its build events and prints them, ending with "N passed, N failed".

Every test target that Bazel meant to run counts once; one that was not built or not run is failed. So is every other target
that does not build, and a run that failed without naming anything.
"""

import argparse
import json
import sys


def read_events(path):
    with open(path, encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def count(events, bazel_status):
    """Returns (passed, failed): sorted labels, the failed ones with why."""
    tests, passed, failed = set(), set(), {}
    for event in events:
        ids = event["id"]
        if "targetConfigured" in ids and "testSize" in event.get("configured", {}):
            tests.add(ids["targetConfigured"]["label"])
        if "testSummary" in ids and "testSummary" in event:
            label = ids["testSummary"]["label"]
            status = event["testSummary"].get("overallStatus", "NO_STATUS")
            if status == "PASSED":
                passed.add(label)
            else:
                failed[label] = status.lower()
        if "targetCompleted" in ids and not event.get("completed", {}).get("success", False):
            failed.setdefault(ids["targetCompleted"]["label"], "not built")
    for label in tests - passed:
        failed.setdefault(label, "not run")
    for label in failed:
        passed.discard(label)
    if bazel_status != 0 and not failed:
        failed["bazel"] = "exit status %d" % bazel_status
    return sorted(passed), sorted(failed.items())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("events")
    parser.add_argument("--bazel-status", type=int, required=True)
    parser.add_argument("--format", choices=["none", "passed", "failed"], required=True)
    args = parser.parse_args()
    passed, failed = count(read_events(args.events), args.bazel_status)
    if args.format == "passed":
        passed.append("tools/format --check")
    elif args.format == "failed":
        failed.append(("tools/format --check", "failed"))
    for label, why in failed:
        print("FAILED %s: %s" % (label, why))
    print("%d passed, %d failed" % (len(passed), len(failed)))
    sys.exit(1 if failed or not passed else 0)


if __name__ == "__main__":
    main()
