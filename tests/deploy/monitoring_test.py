"""deploy/grafana and deploy/prometheus: every expression parses and asks for metrics and labels that exist."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest
import urllib.request

import kustomize
import yaml

DASHBOARD = "deploy/grafana/refitd.json"
RULES = "deploy/prometheus/alerts.yml"
SCRAPE = "deploy/prometheus/kubernetes.yml"
RULES_TEST = "deploy/prometheus/alerts_test.yml"
RUNBOOK = "docs/runbook.md"
RULE_OBJECT = "deploy/kubernetes/components/prometheus-operator/prometheusrule.yaml"
REFERENCE = "docs/reference/metrics.md"
REFITD = "daemon/refitd"
REFITCTL = "daemon/refitctl/refitctl"
MAKE_CHECKPOINT = "tests/workloads/make_checkpoint"
SECONDS = 60

# The metrics that this test asks for, with their labels; a histogram's series end in _bucket, _sum and _count.
METRICS = {
    "refitd_build_info": {"version", "cuda"},
    "refitd_updates_total": {"group", "result", "reason"},
    "refitd_update_phase_seconds": {"group", "phase"},
    "refitd_update_seconds": {"group"},
    "refitd_moved_bytes_total": {"group", "move"},
    "refitd_staging_seconds": {"group"},
    "refitd_pause_seconds": {"group", "engine"},
    "refitd_flips_total": {"group"},
    "refitd_flip_backs_total": {"group"},
    "refitd_slots": {"group", "state"},
    "refitd_leases": {"group", "role"},
    "refitd_communicator": {"group"},
    "refitd_integrity_failures_total": {"group"},
    "refitd_committed_version": {"group"},
    "refitd_peer_up": {"group", "peer"},
    "refitd_daemon_kept_out": {"group", "daemon"},
    "refitd_instances": {"group", "state"},
    "refitd_instance_ready": {"group", "engine"},
    "refitd_instance_lag": {"group", "engine"},
    "refitd_members": set(),
    "refitd_serving": set(),
    "refitd_anonymous_memory_bytes": set(),
    "refitd_pool_bytes": set(),
    "refitd_region_bytes": set(),
    "refitd_arena_bytes": {"group", "owner", "side"},
    "up": set(),
}
HISTOGRAMS = ("refitd_update_seconds", "refitd_update_phase_seconds", "refitd_staging_seconds", "refitd_pause_seconds")
TARGET_LABELS = {"job", "instance"}  # Prometheus adds them


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=SECONDS, check=False)


def wrong_names(expression):
    """Metrics and labels in the expression that do not exist."""
    wrong = []
    text = re.sub(r'"[^"]*"', '""', expression)
    for name in re.findall(r"\b(refitd_\w+|up)\b", text):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        if name not in METRICS and base not in HISTOGRAMS or name in HISTOGRAMS:
            wrong.append(name)
    known = TARGET_LABELS | {"le"}
    for name in re.findall(r"\b(refitd_\w+)\b", text):
        known |= METRICS.get(re.sub(r"_(bucket|sum|count)$", "", name), METRICS.get(name, set()))
    for labels in re.findall(r"\{([^}]*)\}", text):
        wrong += [n for n in re.findall(r"(\w+)\s*[=!]", labels) if n not in known]
    for labels in re.findall(r"\b(?:by|without|on)\s*\(([^)]*)\)", text):
        wrong += [n.strip() for n in labels.split(",") if n.strip() not in known]
    return wrong


class DaemonTest(unittest.TestCase):
    """The table above is what a daemon says."""

    def scrape(self, folder):
        """{name: label names} of every series of a coordinator, after one update of one group over two daemons."""
        checkpoint = os.path.join(folder, "checkpoint")
        subprocess.run([MAKE_CHECKPOINT, "--model", "tiny", "--out", checkpoint],
                       stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
        first, second = os.path.join(folder, "a.sock"), os.path.join(folder, "b.sock")
        log = self.start_daemon(first, "--listen-tcp", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0")
        self.start_daemon(second)
        engine = subprocess.Popen(
            [REFITCTL, "--socket", second, "--timeout", str(SECONDS), "engine", "--group", "g", "--instance", "a",
             "--checkpoint", checkpoint, "--coordinator", log(r"tcp:([^\s,]+),"), "--delivery", "loader"],
            stdout=subprocess.DEVNULL)
        self.addCleanup(lambda: (engine.kill(), engine.wait()))
        subprocess.run([REFITCTL, "--socket", first, "push", checkpoint, "--group", "g", "--create",
                        "--wait-instances", "1"], stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
        address = log(r"metrics:([^\s,]+),")
        with urllib.request.urlopen("http://%s/metrics" % address, timeout=SECONDS) as answer:
            text = answer.read().decode()
        told = {}
        for name, labels in re.findall(r"^(\w+)(?:\{(.*)\})? ", text, re.MULTILINE):
            told.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
        return told

    def start_daemon(self, socket, *flags):
        """Starts a daemon, and returns a function that waits for a pattern in its log and returns what was found."""
        log = socket + ".log"
        with open(log, "w") as errors:
            daemon = subprocess.Popen([REFITD, "--listen-unix", socket, "--daemon-id", os.path.basename(socket), "--insecure", *flags],
                                      stderr=errors)
        self.addCleanup(lambda: (daemon.kill(), daemon.wait()))
        self.wait_for(daemon, log, "(listening) on")
        return lambda pattern: self.wait_for(daemon, log, pattern)

    def wait_for(self, daemon, log, pattern):
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline and daemon.poll() is None:
            with open(log) as file:
                found = re.search(pattern, file.read())
            if found:
                return found.group(1)
            time.sleep(0.02)
        self.fail("no %s in the log" % pattern)

    def test_it_tells_every_metric_with_these_labels(self):
        with tempfile.TemporaryDirectory(prefix="refitd-", dir="/tmp") as folder:
            told = self.scrape(folder)
        for name in set(METRICS) - {"up"}:
            series, labels = (name + "_bucket", {"le"}) if name in HISTOGRAMS else (name, set())
            self.assertEqual(told.get(series), METRICS[name] | labels, name)
        with open(REFERENCE) as file:
            page = {name: (kind, set(re.findall(r"`(\w+)`", labels)))
                    for name, kind, labels in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \|", file.read(), re.MULTILINE)}
        for series, labels in told.items():
            name = re.sub(r"_(bucket|sum|count)$", "", series)
            kind, listed = page[name]
            self.assertEqual(labels, listed | ({"le"} if kind == "histogram" and series.endswith("_bucket") else set()), series)


class RulesTest(unittest.TestCase):
    def setUp(self):
        with open(RULES) as file:
            (self.group,) = yaml.safe_load(file)["groups"]

    def test_promtool_takes_them(self):
        done = promtool("check", "rules", RULES)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("%d rules found" % len(self.group["rules"]), done.stdout)

    def test_they_fire_where_they_must_and_are_quiet_elsewhere(self):
        done = promtool("test", "rules", RULES_TEST)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open(RULES_TEST) as file:
            tried = file.read()
        for rule in self.group["rules"]:
            self.assertIn(rule["alert"], tried)

    def test_they_ask_for_what_exists(self):
        for rule in self.group["rules"]:
            self.assertEqual(wrong_names(rule["expr"]), [], rule["alert"])
            self.assertEqual(set(rule["labels"]), {"severity"}, rule["alert"])
            self.assertEqual(set(rule["annotations"]), {"summary", "description", "runbook_url"}, rule["alert"])

    def test_an_alert_about_a_group_had_one_series_for_each_scrape(self):
        """A label that says who was scraped is left in alerts about daemons alone."""
        for rule in self.group["rules"]:
            if "$labels.group" in rule["annotations"]["summary"]:
                self.assertRegex(rule["expr"].strip(), r"^(sum|min|max|count|histogram_quantile\(0\.95, sum) by \(group", rule["alert"])

    def test_each_has_its_section_in_the_runbook_and_leads_there(self):
        with open(RUNBOOK) as file:
            texts = re.split(r"^## (.*)$", file.read(), flags=re.MULTILINE)[1:]
        sections = {name: text for name, text in zip(texts[::2], texts[1::2]) if name.startswith("Refitd")}
        self.assertEqual(list(sections), [rule["alert"] for rule in self.group["rules"]])
        for name, text in sections.items():
            parts = [text.find("**%s**" % part) for part in ("Means", "Look at", "Do")]
            self.assertTrue(-1 < parts[0] < parts[1] < parts[2], name)
        for rule in self.group["rules"]:
            # A page's anchors are its headings in lower case.
            self.assertRegex(rule["annotations"]["runbook_url"], r"^https://.*/docs/runbook\.html#%s$" % rule["alert"].lower())

    def test_the_object_of_the_operator_has_these_rules(self):
        with open(RULES) as rules, open(RULE_OBJECT) as objects:
            body = re.sub(r"^(?=.)", "  ", rules.read().partition("\ngroups:")[2], flags=re.MULTILINE)
            self.assertEqual(objects.read().partition("\n  groups:")[2], body, "put the text of alerts.yml below `spec`")

    def test_names_that_do_not_exist_are_found(self):
        self.assertEqual(wrong_names("refitd_update_total"), ["refitd_update_total"])
        self.assertEqual(wrong_names("refitd_update_seconds"), ["refitd_update_seconds"])
        self.assertEqual(wrong_names('refitd_slots{stat="free"}'), ["stat"])
        self.assertEqual(wrong_names("sum by (grp) (refitd_slots)"), ["grp"])
        self.assertEqual(wrong_names('sum by (group, le) (rate(refitd_update_seconds_bucket{group="a"}[5m]))'), [])


class ScrapeTest(unittest.TestCase):
    """deploy/prometheus/kubernetes.yml finds the daemons of deploy/kubernetes, as the job that the alerts ask for."""

    def setUp(self):
        with open(SCRAPE) as file:
            (self.job,) = yaml.safe_load(file)["scrape_configs"]

    def target(self, resources, name, port):
        """The labels of a container's port after relabelling; None: it is no target."""
        (workload,) = [r for r in resources if r["kind"] in ("DaemonSet", "Deployment")]
        spec = workload["spec"]["template"]["spec"]
        init = name in [c["name"] for c in spec.get("initContainers", [])]
        labels = {"__meta_kubernetes_pod_container_name": name, "__meta_kubernetes_pod_container_port_name": port,
                  "__meta_kubernetes_pod_container_init": str(init).lower(), "__meta_kubernetes_pod_name": "pod",
                  "__meta_kubernetes_pod_node_name": "node", "job": self.job["job_name"], "instance": "address"}
        for rule in self.job["relabel_configs"]:
            value = ";".join(labels[label] for label in rule["source_labels"])
            match = re.fullmatch(rule.get("regex", "(.*)"), value)
            if rule.get("action") == "keep" and match is None:
                return None
            if "target_label" in rule and match is not None:
                labels[rule["target_label"]] = match.expand(rule.get("replacement", "$1").replace("$1", r"\1"))
        return labels["job"], labels["instance"]

    def test_the_operators_scrape_has_the_same_job_and_instances(self):
        resources = kustomize.render("deploy/kubernetes/base", ["deploy/kubernetes/components/prometheus-operator"])
        (monitor,) = [r for r in resources if r["kind"] == "PodMonitor"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        self.assertEqual(endpoint["relabelings"], [
            {"targetLabel": "job", "replacement": "refitd"},
            {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "instance"}])

    def test_promtool_takes_it(self):
        # The distribution's promtool is built without the discovery of Kubernetes, so a fixed target stands for that.
        self.assertEqual(self.job.pop("kubernetes_sd_configs"), [{"role": "pod"}])
        self.job["static_configs"] = [{"targets": ["10.0.0.1:9464"]}]
        with tempfile.NamedTemporaryFile("w", suffix=".yml") as file:
            yaml.safe_dump({"scrape_configs": [self.job]}, file)
            file.flush()
            done = promtool("check", "config", file.name)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_the_job_that_alerts_ask_for_was_nowhere(self):
        base, sidecar = (kustomize.render(os.path.join("deploy/kubernetes", name)) for name in ("base", "sidecar"))
        self.assertEqual(self.target(base, "refitd", "metrics"), ("refitd", "node"))
        self.assertIsNone(self.target(base, "refitd", "links"))
        self.assertEqual(self.target(sidecar, "refitd", "metrics"), ("refitd-sidecar", "pod"))
        self.assertIsNone(self.target(sidecar, "engine", "metrics"))


class DashboardTest(unittest.TestCase):
    def setUp(self):
        with open(DASHBOARD) as file:
            self.dashboard = json.load(file)
        self.panels = [panel for panel in self.dashboard["panels"] if panel["type"] != "row"]

    def expressions(self):
        return [(panel["title"], target["expr"]) for panel in self.panels for target in panel["targets"]]

    def test_every_expression_parses(self):
        # promtool parses rules: each expression becomes one, with Grafana's variables filled in.
        rules = [{"record": "panel:%d" % i, "expr": expression.replace("$__rate_interval", "5m")}
                 for i, (_, expression) in enumerate(self.expressions())]
        folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, folder)
        path = os.path.join(folder, "panels.yml")
        with open(path, "w") as file:
            yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}, file)
        done = promtool("check", "rules", path)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertGreater(len(rules), 10)

    def test_it_asks_for_what_exists_and_for_all_of_it(self):
        for title, expression in self.expressions():
            self.assertEqual(wrong_names(expression), [], title)
        every = " ".join(expression for _, expression in self.expressions())
        for name in set(METRICS) - {"up"}:
            self.assertIn(name, every)

    def test_its_variables_are_declared(self):
        declared = {variable["name"] for variable in self.dashboard["templating"]["list"]}
        self.assertEqual(declared, {"datasource", "instance", "group"})
        for name in re.findall(r"\$\{?([a-z]\w*)\}?", json.dumps(self.dashboard)):
            self.assertIn(name, declared)
        for variable in self.dashboard["templating"]["list"]:
            if variable["type"] == "query":
                self.assertEqual(wrong_names(variable["definition"].partition("(")[2].partition(",")[0]), [])

    def test_panels_have_a_place_and_say_what_they_show(self):
        taken = {}
        ids = [panel["id"] for panel in self.dashboard["panels"]]
        self.assertEqual(len(set(ids)), len(ids))
        for panel in self.dashboard["panels"]:
            place = panel["gridPos"]
            self.assertLessEqual(place["x"] + place["w"], 24, panel["title"])
            for x in range(place["x"], place["x"] + place["w"]):
                for y in range(place["y"], place["y"] + place["h"]):
                    self.assertNotIn((x, y), taken, "%s lies on another panel" % panel["title"])
                    taken[x, y] = panel["title"]
        for panel in self.panels:
            self.assertTrue(panel["description"], panel["title"])
            self.assertEqual(panel["datasource"]["uid"], "${datasource}", panel["title"])
            self.assertEqual(len({t["refId"] for t in panel["targets"]}), len(panel["targets"]), panel["title"])


if __name__ == "__main__":
    unittest.main()
