"""deploy/helm as a real Helm renders it says what deploy/kubernetes says as a real kustomize renders it, and both are sound.

usage: tests/charts/test
"""

import contextlib
import copy
import json
import os
import re
import subprocess
import tempfile
import unittest

import kubernetes_test
import kustomize
import textproto
import yaml
from kubernetes_test import container, of_kind, workload

HELM = os.environ["REFITD_HELM"]
KUBECTL = os.environ["REFITD_KUBECTL"]
CHART = "deploy/helm/refitd"
RUNFILES = "bazel-bin/tests/deploy/nodes_test.runfiles"
SECONDS = 60
NODES_SECONDS = 240  # two daemons in namespaces, several times

textproto.REFITD = os.path.abspath("bazel-bin/daemon/refitd")

CLUSTER = {"cluster": {"enabled": True}}
SPIRE = {"cluster": {"enabled": True, "certificates": {"from": "spire"}}}
OPERATOR = {"monitoring": {"podMonitor": {"enabled": True}, "prometheusRule": {"enabled": True}}}
IN_THE_NODE = {"hostNetwork": True, "cluster": {"enabled": True, "interface": "bond0"}}
GPU = {"gpu": {"enabled": True}}
# The values that make of the chart what a variant of deploy/kubernetes is. The sidecar is a part of an engine's pod, and no chart's. Probes of
# gRPC take a control plane in the clear, so the chart has none.
VALUES = {
    "base": {},
    "base with cert-manager": CLUSTER,
    "base with SPIRE": SPIRE,
    "base with the Prometheus operator": OPERATOR,
    "gpu": GPU,
    "gpu with cert-manager": {**GPU, **CLUSTER},
    "gpu by CDI": {"gpu": {"enabled": True, "runtimeClass": ""}},
    "gpu with NCCL of the node": {"gpu": {"enabled": True, "nccl": {"hostPath": "/opt/nccl/lib"}}},
    "base in the node's network": IN_THE_NODE,
    "gpu with RDMA in the node's network": {**IN_THE_NODE, "gpu": {"enabled": True, "rdma": {"enabled": True}}},
    "gpu with legacy IPC": {"gpu": {"enabled": True, "legacyIpc": True}},
}
OF_KUSTOMIZE_ALONE = {"base with probes of gRPC", "gpu with probes of gRPC", "sidecar", "sidecar with legacy IPC"}
# What Helm's objects have beside those of kustomize.
HELM_LABELS = ("app.kubernetes.io/managed-by", "app.kubernetes.io/version", "helm.sh/chart")
CHECKSUM = "checksum/settings"  # rolls changed settings out, as kustomize's hash in a map's name does


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


def helm(*arguments):
    """Helm with no settings but these: its home is empty."""
    with tempfile.TemporaryDirectory() as home:
        return run(HELM, *arguments, env={"HOME": home, "PATH": "/usr/bin:/bin"})


@contextlib.contextmanager
def file_of(values):
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(values, file)
        file.flush()
        yield file.name


def template(values, folder=CHART):
    with file_of(values) as path:
        return helm("template", "refitd", folder, "--namespace", "refitd", "--values", path)


def chart(values):
    """The objects that `helm install --namespace refitd` would send."""
    done = template({"namespace": {"create": True}, **values})
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return [document for document in yaml.safe_load_all(done.stdout) if document is not None]


def kubectl_kustomize(variant):
    """The objects that `kubectl apply -k` would send."""
    folder, components = kubernetes_test.VARIANTS[variant]
    with tempfile.TemporaryDirectory(dir=".") as place:
        def path(name):
            return os.path.relpath(os.path.join(kubernetes_test.ROOT, name), place)
        with open(os.path.join(place, "kustomization.yaml"), "w") as file:
            yaml.safe_dump({"resources": [path(folder)], "components": [path(c) for c in components]}, file)
        done = run(KUBECTL, "kustomize", place)
    if done.returncode != 0:
        raise AssertionError(done.stderr)
    return list(yaml.safe_load_all(done.stdout))


def by_identity(resources):
    return {" ".join(kustomize.identity(resource)): resource for resource in resources}


def in_order(value, field=None):
    """The value with the lists that Kubernetes reads by name, as a merge does, in the order of the names."""
    if isinstance(value, dict):
        return {name: in_order(each, name) for name, each in value.items()}
    if not isinstance(value, list):
        return value
    key = kustomize.MERGE_KEYS.get(field)
    items = [in_order(item) for item in value]
    # Init containers run in their order; a Service's ports have no containerPort.
    by_name = field != "initContainers" and all(isinstance(item, dict) and key in item for item in items)
    return sorted(items, key=lambda item: item[key]) if by_name else items


def differences(mine, theirs, where=""):
    """A line for each place where the two say something else."""
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for name in sorted({*mine, *theirs}):
            yield from differences(mine.get(name), theirs.get(name), "%s/%s" % (where, name))
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for number, pair in enumerate(zip(mine, theirs)):
            yield from differences(*pair, "%s/%d" % (where, number))
    elif mine != theirs:
        yield "%s: %s, and %s" % (where, mine, theirs)


def without_hashes(resources):
    """The objects with generated maps under the names that they have in kustomization.yaml."""
    text = json.dumps(resources)
    for resource in of_kind(resources, "ConfigMap"):
        name = resource["metadata"]["name"]
        text = text.replace('"%s"' % name, '"%s"' % re.sub(r"-[a-z0-9]{10}$", "", name))
    return json.loads(text)


def settings_of(text):
    """A file of settings as data: comments and the order of fields say nothing."""
    return textproto.parse(re.sub(r"^\s*#.*$", "", text, flags=re.M))


def comparable(resources):
    """{kind and name: object} without what is Helm's, with settings as data."""
    resources = copy.deepcopy(resources)
    for resource in resources:
        # kustomize labels what the base makes, and nothing that a component adds.
        for label in (*HELM_LABELS, "app.kubernetes.io/name"):
            resource["metadata"].get("labels", {}).pop(label, None)
        if resource["metadata"].get("labels") == {}:
            del resource["metadata"]["labels"]
        for name, text in resource.get("data", {}).items():
            lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
            resource["data"][name] = settings_of(text) if name.endswith(".textproto") else lines
        if resource["kind"] == "DaemonSet":
            resource["spec"]["template"]["metadata"]["annotations"].pop(CHECKSUM, None)
    take_interface(resources)
    return in_order(by_identity(resources))


def take_interface(resources):
    """A component can't change a part of a file, so that of the node's network names the interface by a variable, which goes before the file."""
    (settings,) = [c["data"]["refitd.textproto"] for c in of_kind(resources, "ConfigMap") if "refitd.textproto" in c["data"]]
    variables = container(resources, "refitd")["env"]
    for variable in [v for v in variables if v["name"] == "REFITD_DATA_INTERFACE"]:
        settings["peers"][0]["interface"] = [variable["value"]]
        variables.remove(variable)


class ChartTest(unittest.TestCase):
    def test_every_variant_says_what_kustomize_says(self):
        for variant, values in VALUES.items():
            with self.subTest(variant):
                self.assertEqual(list(differences(comparable(chart(values)), comparable(without_hashes(kubectl_kustomize(variant))))), [])

    def test_every_variant_of_kustomize_is_compared_or_named(self):
        self.assertEqual(set(kubernetes_test.VARIANTS), set(VALUES) | OF_KUSTOMIZE_ALONE)

    def test_every_variant_is_sound(self):
        for variant, values in VALUES.items():
            with self.subTest(variant):
                self.assertEqual(kubernetes_test.problems(chart(values)), [])

    def test_the_default_values_differ_from_kustomize_by_the_namespace_alone(self):
        done = template({})
        self.assertEqual(done.returncode, 0, done.stderr)
        mine = comparable(list(yaml.safe_load_all(done.stdout)))
        theirs = comparable(without_hashes(kubectl_kustomize("base")))
        del theirs["Namespace refitd"]
        self.assertEqual(list(differences(mine, theirs)), [])

    def test_helm_finds_nothing_to_complain_about(self):
        done = helm("lint", "--strict", "--quiet", CHART)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_it_packs_with_the_alerts(self):
        with tempfile.TemporaryDirectory() as folder:
            done = helm("package", CHART, "--destination", folder)
            self.assertEqual(done.returncode, 0, done.stderr)
            (name,) = os.listdir(folder)
            packed = template(OPERATOR, os.path.join(folder, name))
        self.assertIn("alert: RefitdDown", packed.stdout)
        self.assertEqual(packed.stdout, template(OPERATOR).stdout)

    def test_a_changed_setting_is_rolled_out_and_a_changed_rule_is_not(self):
        def checksum(values):
            return workload(chart(values))["spec"]["template"]["metadata"]["annotations"][CHECKSUM]
        self.assertNotEqual(checksum({}), checksum({"settings": {"staging": {"slots": 8}}}))
        self.assertEqual(checksum({}), checksum({"allowedGids": [7]}))  # daemons take rules over while they run

    def test_settings_reach_the_daemon(self):
        values = {"settings": {"staging": {"slots": 8}, "peers": {"wire_ms": 1000}, "catch_ups": False, "default_verification": "TRANSFER",
                               "limits": {"max_region_bytes": 1 << 43}},
                  **CLUSTER, "rules": [{"who": "dns:*.example.org", "role": ["TRAINER"], "group": "llama-*", "any_owner": True}]}
        settings = kubernetes_test.validate(kubernetes_test.files_of_maps(chart(values)), "/etc/refitd/refitd.textproto")
        told = {path: textproto.get(settings, path) for path in (
            "staging.slots", "peers.wire_ms", "peers.interface", "catch_ups", "default_verification", "limits.max_region_bytes")}
        self.assertEqual(told, {"staging.slots": "8", "peers.wire_ms": "1000", "peers.interface": "eth0", "catch_ups": "false",
                                "default_verification": "TRANSFER", "limits.max_region_bytes": str(1 << 43)})
        rule = {name: settings["rule"][-1][name] for name in ("who", "role", "group", "any_owner")}
        self.assertEqual(rule, {"who": ["dns:*.example.org"], "role": ["TRAINER"], "group": ["llama-*"], "any_owner": ["true"]})

    def test_alerts_lead_to_the_runbook_that_the_values_name(self):
        values = {"monitoring": {"labels": {"release": "p"}, "prometheusRule": {"enabled": True, "runbook": "https://r.example.org/x.html"}}}
        (rule,) = of_kind(chart(values), "PrometheusRule")
        self.assertEqual(rule["metadata"]["labels"]["release"], "p")
        for alert in rule["spec"]["groups"][0]["rules"]:
            self.assertEqual(alert["annotations"]["runbook_url"], "https://r.example.org/x.html#" + alert["alert"].lower())

    def test_variables_and_images_are_as_told(self):
        values = {"env": {"NCCL_DEBUG": "INFO"}, "image": {"repository": "r.example.org/x", "tag": "7", "pullPolicy": "Always"},
                  "imagePullSecrets": ["s"], "nodeSelector": {"a": "b"}, **GPU}
        resources = chart(values)
        daemon = container(resources, "refitd")
        self.assertIn({"name": "NCCL_DEBUG", "value": "INFO"}, daemon["env"])
        self.assertEqual((daemon["image"], daemon["imagePullPolicy"]), ("r.example.org/x:7", "Always"))
        spec = kubernetes_test.pod(resources)
        self.assertEqual(spec["imagePullSecrets"], [{"name": "s"}])
        self.assertEqual(spec["nodeSelector"], {"a": "b", "nvidia.com/gpu.present": "true"})


    def test_values_that_would_leave_the_daemon_open_or_without_a_start_are_refused(self):
        for values, expected in (({"hostNetwork": True}, "network policies do not guard"), ({"metrics": {"insecure": False}}, "there is no TLS")):
            done = template(values)
            self.assertNotEqual(done.returncode, 0, values)
            self.assertIn(expected, done.stderr)


class SchemaTest(unittest.TestCase):
    """values.schema.json refuses what is not there, and what is of another type."""

    REFUSED = (
        ({"imagee": {}}, "'imagee' not allowed"),
        ({"image": {"tga": "1"}}, "'tga' not allowed"),
        ({"image": {"tag": 0.3}}, "/image/tag"),
        ({"metrics": {"port": "9464"}}, "/metrics/port"),
        ({"metrics": {"port": 0}}, "/metrics/port"),
        ({"gpu": {"enabled": "yes"}}, "/gpu/enabled"),
        ({"cluster": {"certificates": {"from": "vault"}}}, "/cluster/certificates/from"),
        ({"settings": {"limits": {"max_durations_ms": 1}}}, "'max_durations_ms' not allowed"),
        ({"settings": {"staging": {"slots": "four"}}}, "/settings/staging/slots"),
        ({"settings": {"log": {"format": "YAML"}}}, "/settings/log/format"),
        ({"settings": {"tls": {"key": "/k"}}}, "'tls' not allowed"),  # the chart decides it
        ({"cluster": {"settings": {"listen": {"insecure": True}}}}, "'listen' not allowed"),
        ({"rules": [{"who": "uid:1", "role": ["ADMIN"], "group": "*"}]}, "/rules/0/role"),
        ({"rules": [{"who": "uid:1", "role": ["ENGINE"]}]}, "missing property 'group'"),
        ({"resources": {"memory": "4 GB"}}, "/resources/memory"),
        ({"env": {"A": 1}}, "/env/A"),
    )

    def test_it_refuses_unknown_names_and_wrong_types(self):
        for values, expected in self.REFUSED:
            with self.subTest(values):
                done = template(values)
                self.assertNotEqual(done.returncode, 0)
                self.assertIn(expected, done.stderr)

    def test_every_value_has_a_default_and_every_default_is_in_the_schema(self):
        with open(os.path.join(CHART, "values.schema.json")) as file:
            schema = json.load(file)
        with open(os.path.join(CHART, "values.yaml")) as file:
            values = yaml.safe_load(file)

        def compare(properties, defaults, where):
            self.assertEqual(set(properties) - {"global"}, set(defaults), where)
            for name, each in properties.items():
                if "properties" in each:
                    compare(each["properties"], defaults[name], where + "." + name)

        compare(schema["properties"], values, "values")


class KustomizeTest(unittest.TestCase):
    def test_what_the_tests_resolve_is_what_kustomize_renders(self):
        """tests/deploy/kustomize.py, which needs no package of PyPI, is right about deploy/kubernetes."""
        for variant in kubernetes_test.VARIANTS:
            with self.subTest(variant):
                real = by_identity(without_hashes(kubectl_kustomize(variant)))
                self.assertEqual(list(differences(by_identity(kubernetes_test.render(variant)), real)), [])


class NodesTest(unittest.TestCase):
    def test_weights_cross_between_two_nodes_that_helm_has_set_up(self):
        """The daemons have the chart's configuration, and its network policies as firewall rules."""
        (root,) = [entry.path for entry in os.scandir(RUNFILES) if entry.is_dir()]
        with tempfile.NamedTemporaryFile("w", suffix=".yaml", dir="/tmp") as file:
            yaml.safe_dump_all(chart(CLUSTER), file)
            file.flush()
            done = subprocess.run(["tests/deploy/run.sh", "tests/deploy/nodes_test.py"], cwd=root, capture_output=True, text=True,
                                  timeout=NODES_SECONDS, check=False, env={**os.environ, "REFITD_RENDERED": file.name})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        if "SKIPPED" in done.stdout:
            self.skipTest(done.stdout.strip())


if __name__ == "__main__":
    unittest.main()
