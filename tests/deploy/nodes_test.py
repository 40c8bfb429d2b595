"""Daemons on several nodes, set up by what an operator applies: the rendered configuration, policies and service.

Two pods of the DaemonSet, each in namespaces of its own (pods.py), run the daemon with the arguments, the user, the files and
the ports that deploy/kubernetes gives them.
"""

import copy
import os
import re
import shutil
import subprocess
import tempfile
import time
import unittest

import kustomize
import pods
import yaml
from certificates import Authority
from pods import Pod

SECONDS = 60
MEMBER = (20001, 10001)  # a job's user, in the group that the pods' supplementalGroups name
COORDINATOR = "refitd.example.org/coordinator"
SPACE = {"kubernetes.io/metadata.name": "refitd"}


def rendered():
    """The objects of the file that REFITD_RENDERED names (tests/charts), else those of deploy/kubernetes."""
    if path := os.environ.get("REFITD_RENDERED"):
        with open(path) as file:
            return list(yaml.safe_load_all(file))
    root = "deploy/kubernetes"
    return kustomize.render(os.path.join(root, "base"), [os.path.join(root, "components/cert-manager")])


def of_kind(resources, kind):
    return [r for r in resources if r["kind"] == kind]


class NodesTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="refitd-", dir="/tmp")
        self.addCleanup(shutil.rmtree, self.folder)
        os.chmod(self.folder, 0o755)
        self.resources = rendered()
        (self.workload,) = of_kind(self.resources, "DaemonSet")
        template = self.workload["spec"]["template"]
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.labels = template["metadata"]["labels"]
        self.a = Pod("refitd-a", "10.79.0.1", {**self.labels, COORDINATOR: "true"}, SPACE)
        self.b = Pod("refitd-b", "10.79.0.2", dict(self.labels), SPACE)
        self.prometheus = Pod("prometheus", "10.79.0.3", {}, {"kubernetes.io/metadata.name": "monitoring"})
        self.job = Pod("job", "10.79.0.4", {}, {"kubernetes.io/metadata.name": "jobs", "refitd.example.org/members": "true"})
        # Its labels are those of the daemons, but it is in a namespace of its own.
        self.stranger = Pod("stranger", "10.79.0.5", dict(self.labels), {"kubernetes.io/metadata.name": "other"})
        self.daemons = {}
        ports = {port["name"]: port["containerPort"] for port in self.container["ports"]}
        try:
            everybody = [self.a, self.b, self.prometheus, self.job, self.stranger]
            self.cluster = pods.Cluster(self.folder, everybody, self.resources, ports)
        except pods.Unavailable as why:
            print("SKIPPED: no pods on this machine: %s" % why)  # a test's log shows reasons of skips nowhere else
            self.skipTest(str(why))
        self.addCleanup(self.cluster.end)
        # The image's files, where the daemon's user and members reach them.
        self.image = os.path.join(self.folder, "image")
        os.mkdir(self.image)
        for binary in ("daemon/refitd", "daemon/refitctl/refitctl", "tests/workloads/make_checkpoint"):
            shutil.copy(binary, self.image)
        self.checkpoint = os.path.join(self.folder, "checkpoint")
        subprocess.run([os.path.join(self.image, "make_checkpoint"), "--model", "tiny", "--out", self.checkpoint],
                       stdout=subprocess.DEVNULL, timeout=SECONDS, check=True)
        self.authority = Authority(self.folder)
        for pod in (self.a, self.b):
            self.start(pod)

    def start(self, pod):
        """Mounts what the DaemonSet mounts, and runs its container."""
        context = self.spec["securityContext"]
        user, group = context["runAsUser"], context["runAsGroup"]
        maps = {c["metadata"]["name"]: c["data"] for c in of_kind(self.resources, "ConfigMap")}
        volumes = {v["name"]: maps[v["configMap"]["name"]] for v in self.spec["volumes"] if "configMap" in v}
        (certificate,) = [c for c in of_kind(self.resources, "Certificate") if c["spec"]["secretName"] == "refitd-tls"]
        (uri,) = certificate["spec"]["uris"]
        files = self.authority.issue(pod.name, uri)
        secret = dict(zip(("tls.crt", "tls.key", "ca.crt"), (*files, self.authority.roots)))
        for mount in self.container["volumeMounts"]:
            top, _, place = mount["mountPath"].lstrip("/").partition("/")
            folder = os.path.join(self.folder, pod.name, top, place)
            os.makedirs(folder, exist_ok=True)
            if mount["name"] in volumes:
                for name, text in volumes[mount["name"]].items():
                    with open(os.path.join(folder, name), "w") as file:
                        file.write(text)
            elif mount["name"] == "tls":
                for name, source in secret.items():
                    shutil.copy(source, os.path.join(folder, name))
                    os.chown(os.path.join(folder, name), user, group)
            elif mount["name"] == "sockets":
                os.chown(folder, user, group)
        log = os.path.join(self.folder, pod.name + ".log")
        command = pod.enter(os.path.join(self.image, "refitd"), *self.container["args"], user=user, group=group)
        with open(log, "w") as errors:
            daemon = subprocess.Popen(command, stderr=errors, env=self.environment(pod))
        self.addCleanup(lambda: (daemon.kill(), daemon.wait()))
        self.daemons[pod.name] = daemon
        self.wait_for(pod, r"listening on")

    def environment(self, pod):
        """The container's variables. Each pod is alone on its node, which has another name."""
        fields = {"spec.nodeName": pod.name.replace("refitd", "node")}
        return {v["name"]: v["value"] if "value" in v else fields[v["valueFrom"]["fieldRef"]["fieldPath"]] for v in self.container["env"]}

    def log(self, pod):
        with open(os.path.join(self.folder, pod.name + ".log")) as file:
            return file.read()

    def wait_for(self, pod, pattern):
        deadline = time.monotonic() + SECONDS
        while not re.search(pattern, self.log(pod)):
            self.assertIsNone(self.daemons[pod.name].poll(), self.log(pod))
            self.assertLess(time.monotonic(), deadline, self.log(pod))
            time.sleep(0.02)

    def coordinator(self):
        """The name that the service gives, as members of every node say it."""
        (service,) = of_kind(self.resources, "Service")
        (port,) = service["spec"]["ports"]
        return "%(name)s.%(namespace)s.svc:" % service["metadata"] + str(port["port"])

    def refitctl(self, pod, *arguments):
        return pod.enter(os.path.join(self.image, "refitctl"), *arguments, user=MEMBER[0], group=MEMBER[1])

    def start_engine(self, pod, group):
        """A reference engine, which ends with 0 when it holds one version and has compared it with the checkpoint."""
        engine = subprocess.Popen(
            self.refitctl(pod, "--timeout", str(SECONDS), "engine", "--group", group, "--instance", pod.name, "--checkpoint",
                          self.checkpoint, "--versions", "1", "--coordinator", self.coordinator()),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env={})
        self.addCleanup(lambda: (engine.kill(), engine.communicate()))
        return engine

    def push(self, pod, group, *options):
        return pods.run(*self.refitctl(pod, "push", self.checkpoint, "--group", group, "--create", "--instances", "2",
                                       "--coordinator", self.coordinator(), *options), env={})

    def assert_weights_cross(self, trainer, group):
        engines = [self.start_engine(pod, group) for pod in (self.a, self.b)]
        pushed = self.push(trainer, group)
        self.assertEqual(pushed.returncode, 0, pushed.stdout + pushed.stderr + self.log(self.a) + self.log(self.b))
        for engine in engines:
            _, errors = engine.communicate(timeout=SECONDS)
            self.assertEqual(engine.returncode, 0, errors)

    def test_weights_could_not_move_between_nodes_as_shipped(self):
        self.assert_weights_cross(self.a, "near-the-coordinator")
        self.assert_weights_cross(self.b, "far-from-the-coordinator")
        for pod in (self.a, self.b):
            self.assertIn("data plane over host memory: on eth0, TLS", self.log(pod))

    def test_the_label_moves_and_members_find_the_coordinator_by_the_same_name(self):
        self.assert_weights_cross(self.a, "g")
        del self.a.labels[COORDINATOR]
        self.daemons[self.a.name].terminate()
        self.assertEqual(self.daemons[self.a.name].wait(timeout=SECONDS), 0, self.log(self.a))
        self.b.labels[COORDINATOR] = "true"
        self.cluster.name_services()
        self.start(self.a)
        self.assert_weights_cross(self.a, "g")
        self.assertIn("daemon node-a", self.log(self.b))

    def test_a_changed_map_of_rules_counts_without_a_rollout(self):
        self.assert_weights_cross(self.a, "g")
        (rules,) = [c["data"]["rules.textproto"] for c in of_kind(self.resources, "ConfigMap") if "rules.textproto" in c["data"]]
        place = os.path.join(self.folder, self.a.name, "etc/refitd-rules/rules.textproto")
        with open(place + ".new", "w") as file:
            file.write(rules.replace("gid:10001", "gid:10002"))
        os.rename(place + ".new", place)
        self.wait_for(self.a, "policy changed")
        _, errors = self.start_engine(self.a, "g").communicate(timeout=SECONDS)
        self.assertIn("uid:20001 may not be engine", errors)

    def test_the_policies_let_in_whom_they_name_and_nobody_else(self):
        ports = self.cluster.ports
        # The data plane listens while daemons are connected: that it is reached is the first test's.
        listening = {name: ports[name] for name in ("control", "links", "metrics")}
        allowed = {"prometheus": {"metrics"}, "job": {"control"}, "stranger": set(), "refitd-b": {"links"}}
        for pod in (self.prometheus, self.job, self.stranger, self.b):
            reached = {name for name, port in listening.items() if pod.reaches(self.a, port)}
            self.assertEqual(reached, allowed[pod.name], pod.name)

    def test_without_the_data_planes_port_in_a_policy_no_weights_cross(self):
        """Else the policies would not count here, and the first test would prove nothing of them."""
        policies = copy.deepcopy(of_kind(self.resources, "NetworkPolicy"))
        for rule in policies[0]["spec"]["ingress"]:
            rule["ports"] = [port for port in rule["ports"] if port["port"] != "data"]
        self.cluster.enforce(policies)
        far = self.start_engine(self.b, "g")
        self.start_engine(self.a, "g")
        pushed = self.push(self.a, "g", "--duration", "8")
        self.assertIsNone(far.poll())
        self.assertRegex(pushed.stdout, r"refitd-b +evicted .* at 10\.79\.0\.2 port %d" % self.cluster.ports["data"])


if __name__ == "__main__":
    unittest.main()
