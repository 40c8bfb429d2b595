"""deploy/kubernetes, rendered by tests/deploy/kustomize.py: each object and what they say of each other.

Every check is tried with an error planted, so that none passes whatever it is given.
"""

import copy
import functools
import os
import re
import subprocess
import tempfile
import unittest

import kubernetes_schema
import kustomize
import textproto

ROOT = "deploy/kubernetes"
GPU_COMPONENT = "nvidia.com/gpu"
USER = 10001  # deploy/container/Containerfile
# The init container of the socket's folder needs these capabilities; no other container has them.
DIRECTORY_CAPABILITIES = {"CHOWN", "FOWNER"}
CLOSING_SECONDS = 5  # what follows the last update: 1 s for copies to end, 2 s for streams, and 2 s to spare
OWN_BYTES = 1 << 30  # memory that a daemon may need besides its pools
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
ACTIONS = ("exec", "grpc", "httpGet", "tcpSocket")

VARIANTS = {
    "base": ("base", ()),
    "base with probes of gRPC": ("base", ("components/grpc-probes",)),
    "base with cert-manager": ("base", ("components/cert-manager",)),
    "base with SPIRE": ("base", ("components/spire",)),
    "base with the Prometheus operator": ("base", ("components/prometheus-operator",)),
    "gpu with cert-manager": ("overlays/gpu", ("components/cert-manager",)),
    "sidecar": ("sidecar", ()),
    "gpu": ("overlays/gpu", ()),
    "gpu by CDI": ("overlays/gpu", ("components/cdi",)),
    "gpu with NCCL of the node": ("overlays/gpu", ("components/nccl-of-node",)),
    "gpu with RDMA in the node's network": ("overlays/gpu", ("components/cert-manager", "components/host-network", "components/rdma")),
    "base in the node's network": ("base", ("components/cert-manager", "components/host-network")),
    "gpu with probes of gRPC": ("overlays/gpu", ("components/grpc-probes",)),
    "gpu with legacy IPC": ("overlays/gpu-legacy-ipc", ()),
    "sidecar with legacy IPC": ("overlays/sidecar-legacy-ipc", ()),
}


def render(variant):
    folder, components = VARIANTS[variant]
    return kustomize.render(os.path.join(ROOT, folder), [os.path.join(ROOT, c) for c in components])


def quantity(text):
    """Bytes of "4Gi"."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|Ti)?", str(text))
    if match is None:
        raise ValueError("quantity %r" % text)
    return int(match.group(1)) << {None: 0, "Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40}[match.group(2)]


def of_kind(resources, *kinds):
    return [r for r in resources if r["kind"] in kinds]


def workload(resources):
    (found,) = of_kind(resources, "DaemonSet", "Deployment")
    return found


def pod(resources):
    return workload(resources)["spec"]["template"]["spec"]


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def container(resources, name):
    (found,) = [c for c in containers(pod(resources)) if c["name"] == name]
    return found


# ---- checks: each yields what is wrong ----


def check_schema(resources):
    for resource in resources:
        yield from kubernetes_schema.problems(resource)


def check_names(resources):
    names = [("object", r["metadata"]["name"]) for r in resources]
    spec = pod(resources)
    for kind, items in (("container", containers(spec)), ("volume", spec["volumes"])):
        own = [(kind, item["name"]) for item in items]
        names += own
        for name in {n for n in own if own.count(n) > 1}:
            yield "%s %s is there twice" % name
    for kind, name in names:
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            yield "%s %r is no DNS label" % (kind, name)


def check_selectors(resources):
    spec = workload(resources)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    wanted = spec["selector"]["matchLabels"]
    if not wanted or any(labels.get(key) != value for key, value in wanted.items()):
        yield "selector %s does not match the template's labels %s" % (wanted, labels)


def check_references(resources):
    known = {kustomize.identity(r) for r in resources}
    spec = pod(resources)
    references = [("ServiceAccount", spec.get("serviceAccountName")), ("PriorityClass", spec.get("priorityClassName"))]
    references += [("ConfigMap", v["configMap"]["name"]) for v in spec["volumes"] if "configMap" in v]
    references += [("Secret", v["secret"]["secretName"]) for v in spec["volumes"] if "secret" in v]
    # cert-manager makes the secrets.
    certificates = of_kind(resources, "Certificate")
    known |= {("Secret", c["spec"]["secretName"]) for c in certificates}
    references += [("Issuer", c["spec"]["issuerRef"]["name"]) for c in certificates]
    references += [("Secret", i["spec"]["ca"]["secretName"]) for i in of_kind(resources, "Issuer") if "ca" in i["spec"]]
    for kind, name in references:
        if name is not None and (kind, name) not in known:
            yield "no %s %s" % (kind, name)
    space = workload(resources)["metadata"].get("namespace")
    for resource in resources:
        if resource["kind"] not in kustomize.CLUSTER_KINDS and resource["metadata"].get("namespace") != space:
            yield "%s is in another namespace" % resource["metadata"]["name"]
    if space is not None and ("Namespace", space) not in known:
        yield "no Namespace %s" % space


def check_volumes(resources):
    spec = pod(resources)
    declared = {v["name"] for v in spec["volumes"]}
    mounted = set()
    for c in containers(spec):
        paths = [m["mountPath"] for m in c.get("volumeMounts", [])]
        if len(set(paths)) != len(paths):
            yield "container %s: two volumes at one path" % c["name"]
        mounted |= {m["name"] for m in c.get("volumeMounts", [])}
    for name in mounted - declared:
        yield "volume %s is mounted and not declared" % name
    for name in declared - mounted:
        yield "volume %s is declared and not mounted" % name
    for v in spec["volumes"]:
        if len(v) != 2:
            yield "volume %s: one source, not %s" % (v["name"], sorted(set(v) - {"name"}))


def check_ports(resources):
    spec = pod(resources)
    every = {}
    for c in containers(spec):
        ports = {p["name"]: p["containerPort"] for p in c.get("ports", [])}
        every.update(ports)
        for name in PROBES:
            probe = c.get(name)
            if probe is None:
                continue
            actions = [a for a in ACTIONS if a in probe]
            if len(actions) != 1:
                yield "%s of %s: one action, not %s" % (name, c["name"], actions)
                continue
            port = probe[actions[0]].get("port")
            if port is not None and port not in ports and port not in ports.values():
                yield "%s of %s: no port %s" % (name, c["name"], port)
            if probe["timeoutSeconds"] > probe["periodSeconds"] and name != "startupProbe":
                yield "%s of %s: its timeout is longer than its period" % (name, c["name"])
    for policy in of_kind(resources, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                if "endPort" not in port and port["port"] not in every and port["port"] not in every.values():
                    yield "network policy: no port %s" % port["port"]
    annotations = workload(resources)["spec"]["template"]["metadata"]["annotations"]
    scraped = annotations.get("prometheus.io/port")
    for monitor in of_kind(resources, "PodMonitor"):
        labels = workload(resources)["spec"]["template"]["metadata"]["labels"]
        if not matches(monitor["spec"]["selector"], labels) or [e["port"] for e in monitor["spec"]["podMetricsEndpoints"]] != ["metrics"]:
            yield "the PodMonitor does not find the metrics"
    if annotations.get("prometheus.io/scrape") != "true" or scraped != str(every.get("metrics")):
        yield "Prometheus is told port %s, the metrics are on %s" % (scraped, every.get("metrics"))


def check_images(resources):
    for c in containers(pod(resources)):
        tag = c["image"].rpartition("/")[2].partition(":")[2]
        if tag in ("", "latest"):
            yield "image %s has no version" % c["image"]


def check_security(resources):
    """Pod Security Standards' "restricted", a root that can't be written, and the exceptions by name."""
    spec = pod(resources)
    shared = spec["securityContext"]
    if spec.get("hostIPC"):
        yield "hostIPC is set"
    if spec.get("hostNetwork") and (not any(v["name"] == "tls" for v in spec["volumes"]) or spec.get("dnsPolicy") != "ClusterFirstWithHostNet"):
        yield "hostNetwork is set, without certificates or the cluster's DNS"
    if shared.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "no seccomp profile"
    if spec.get("automountServiceAccountToken") is not False:
        yield "a token of the API server is mounted"
    for v in spec["volumes"]:
        allowed = "/opt/nccl/lib" if v["name"] == "nccl" else "/run/refitd"
        if v.get("hostPath", {}).get("path", allowed) != allowed:
            yield "volume %s: %s of the node" % (v["name"], v["hostPath"]["path"])
    for c in containers(spec):
        own = {**shared, **c.get("securityContext", {})}
        directory = c["name"] == "socket-directory"
        if (own.get("runAsUser") in (None, 0) or own.get("runAsNonRoot") is not True) and not directory:
            yield "container %s may be root" % c["name"]
        if own.get("privileged") or own.get("allowPrivilegeEscalation") is not False:
            yield "container %s may gain privileges" % c["name"]
        if own.get("readOnlyRootFilesystem") is not True:
            yield "container %s may write its image" % c["name"]
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"]:
            yield "container %s keeps capabilities" % c["name"]
        if set(capabilities.get("add", [])) - (DIRECTORY_CAPABILITIES if directory else set()):
            yield "container %s adds capabilities" % c["name"]


def check_resources(resources):
    for c in containers(pod(resources)):
        wanted, limits = c["resources"].get("requests", {}), c["resources"].get("limits", {})
        if "cpu" not in wanted or "memory" not in wanted or "memory" not in limits:
            yield "container %s: cpu or memory is missing" % c["name"]
        elif c["name"] == "refitd" and wanted["memory"] != limits["memory"]:
            yield "container refitd: it would be among the first to be killed when memory is short"
        if c["name"] == "refitd" and GPU_COMPONENT in limits:
            yield "container refitd takes GPUs away from the jobs"


def check_environment(resources):
    for c in containers(pod(resources)):
        declared = {e["name"] for e in c.get("env", [])}
        for text in c.get("command", []) + c.get("args", []):
            for name in re.findall(r"\$\((\w+)\)", text):
                if name not in declared:
                    yield "container %s: no variable %s" % (c["name"], name)


def check_tls(spec, daemon, settings, resources):
    """The certificates are where refitd looks for them, made for daemons, and somebody has a role over TLS."""
    files = [textproto.get(settings, "tls." + name, "") for name in ("certificate", "key", "roots")]
    mounts = {m["mountPath"]: m["name"] for m in daemon["volumeMounts"] if m["name"] == "tls"}
    if not any(files):
        if mounts:
            yield "certificates are mounted and not used"
        return
    if {os.path.dirname(path) for path in files} != set(mounts):
        yield "certificates are read from %s, and mounted at %s" % (files, sorted(mounts))
    pattern = textproto.get(settings, "peers.identity", "")
    for certificate in of_kind(resources, "Certificate"):
        wanted = certificate["spec"]
        (volume,) = [v for v in spec["volumes"] if v["name"] == "tls"]
        if wanted["secretName"] != volume.get("secret", {}).get("secretName"):
            continue
        if sorted(wanted.get("usages", [])) != ["client auth", "server auth"]:
            yield "the certificate is for %s, a daemon both serves and calls" % wanted.get("usages")
        if not all(uri.startswith(pattern.rstrip("*")) for uri in wanted["uris"]):
            yield "the daemons are %s, peers.identity is %s" % (wanted["uris"], pattern)
    if not any(rule["who"][0].startswith(("spiffe://", "dns:")) for rule in settings.get("rule", [])):
        yield "no rule lets anybody in over TLS"


def files_of_maps(resources):
    """{path in refitd's container: text} of the maps that it mounts."""
    maps = {c["metadata"]["name"]: c["data"] for c in of_kind(resources, "ConfigMap")}
    volumes = {v["name"]: maps.get(v["configMap"]["name"], {}) for v in pod(resources)["volumes"] if "configMap" in v}
    return {os.path.join(m["mountPath"], name): text for m in container(resources, "refitd")["volumeMounts"]
            for name, text in volumes.get(m["name"], {}).items()}


def validate(files, config, variables=None):
    """The settings in force with these files, of which one is the configuration and names the others, and with these variables."""
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            os.makedirs(folder + os.path.dirname(path), exist_ok=True)
            with open(folder + path, "w") as file:
                for other in files:
                    text = text.replace('"%s"' % other, '"%s"' % (folder + other))
                file.write(text)
        return textproto.validate(folder + config, variables)


@functools.lru_cache(maxsize=None)
def known_variables():
    """The variables that set something: a flag's name in capitals. Others would be ignored."""
    done = subprocess.run([textproto.REFITD, "--help"], env={}, capture_output=True, text=True, timeout=textproto.SECONDS, check=True)
    return {"REFITD_" + name.upper().replace("-", "_") for name in re.findall(r"--([a-z][a-z-]*)", done.stdout)}


def check_configuration(resources):
    """The files are such that refitd takes them, and the pod fits what they say."""
    spec, daemon = pod(resources), container(resources, "refitd")
    files = files_of_maps(resources)
    if daemon["args"][0] != "--config" or daemon["args"][1:] != [path for path in files if path.endswith("/refitd.textproto")]:
        yield "the files are %s, refitd is given %s" % (sorted(files), daemon["args"])
        return
    variables = {v["name"]: v.get("value", "a-node") for v in daemon.get("env", []) if v["name"].startswith("REFITD_")}
    for name in set(variables) - known_variables():
        yield "container refitd: no setting has the variable %s" % name
    try:
        settings = validate(files, daemon["args"][1], variables)
    except AssertionError as error:
        yield str(error)
        return

    socket = textproto.get(settings, "listen.unix_path")
    for c in containers(spec):
        if c["name"] == "spiffe-helper":  # the helper calls nobody over the sockets
            continue
        sockets = [m["mountPath"] for m in c.get("volumeMounts", []) if m["name"] == "sockets"]
        if sockets != [os.path.dirname(socket)]:
            yield "container %s: the sockets are in %s, mounted at %s" % (c["name"], os.path.dirname(socket), sockets)
        for variable in c.get("env", []):
            if variable["name"] == "REFITD_SOCKET" and variable["value"] != socket:
                yield "container %s: REFITD_SOCKET is not %s" % (c["name"], socket)

    metrics = textproto.get(settings, "metrics.listen", "")
    ports = {p["name"]: p["containerPort"] for p in daemon["ports"]}
    if metrics != "0.0.0.0:%s" % ports.get("metrics"):
        yield "metrics listen on %r, the port is %s" % (metrics, ports.get("metrics"))
    tcp = settings["listen"][0].get("tcp", [])
    if tcp != (["0.0.0.0:%d" % ports["control"]] if "control" in ports else []):
        yield "the control plane listens on %s, its port is %s" % (tcp, ports.get("control"))
    if tcp and not of_kind(resources, "NetworkPolicy"):
        yield "the control plane listens on %s and no network policy guards it" % tcp

    links = [a for a in settings.get("peers", [{}])[0].get("listen", []) if not a.startswith("127.0.0.1:")]
    if links != (["0.0.0.0:%d" % ports["links"]] if "links" in ports else []):
        yield "links are taken on %s, their port is %s" % (links, ports.get("links"))
    if links:
        yield from check_nodes(settings, ports, resources)
    yield from check_tls(spec, daemon, settings, resources)

    drain = int(textproto.get(settings, "limits.max_duration_ms")) / 1000 + CLOSING_SECONDS
    if spec["terminationGracePeriodSeconds"] < drain:
        yield "a drain may take %g s, the pod gets %d" % (drain, spec["terminationGracePeriodSeconds"])
    pools = int(textproto.get(settings, "staging.max_pool_bytes"))
    if quantity(daemon["resources"].get("limits", {}).get("memory", 0)) < pools + OWN_BYTES:
        yield "pools of %d bytes don't fit into the memory limit" % pools


def check_nodes(settings, ports, resources):
    """Daemons of several nodes find each other, and the policies let their links and weights through."""
    data = int(textproto.get(settings, "data.port"))
    if data != ports.get("data"):
        yield "the data plane is on port %d, the pod's is %s" % (data, ports.get("data"))
    labels = workload(resources)["spec"]["template"]["metadata"]["labels"]
    opened = set()
    for policy in of_kind(resources, "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            if any(matches(source.get("podSelector"), labels) for source in rule["from"]):
                opened |= {port["port"] for port in rule["ports"]}
    for name in ("links", "data"):
        if name not in opened:
            yield "no network policy lets the other daemons in at port %s" % name
    services = of_kind(resources, "Service")
    if len(services) != 1:
        yield "%d services name a coordinator" % len(services)
        return
    service = services[0]["spec"]
    own = {key: value for key, value in service["selector"].items() if labels.get(key) == value}
    if len(own) != len(service["selector"]) - 1:
        yield "the coordinator's service selects %s: the daemons' labels and one that an operator gives" % service["selector"]
    if [(p["port"], p["targetPort"]) for p in service["ports"]] != [(ports["links"], "links")]:
        yield "the coordinator's service is at %s, links are at %s" % (service["ports"], ports["links"])


def matches(selector, labels):
    return selector is not None and selector["matchLabels"].items() <= labels.items()


CHECKS = (check_names, check_selectors, check_references, check_volumes, check_ports, check_images,
          check_security, check_resources, check_environment, check_configuration)


def problems(resources):
    # A resource with unknown fields can't be checked by name.
    return list(check_schema(resources)) or [problem for check in CHECKS for problem in check(resources)]


class KubernetesTest(unittest.TestCase):
    def test_every_variant_is_sound(self):
        for variant in VARIANTS:
            with self.subTest(variant):
                self.assertEqual(problems(render(variant)), [])

    def test_every_kustomization_is_rendered_by_some_variant(self):
        rendered = {folder for folder, _ in VARIANTS.values()} | {c for _, cs in VARIANTS.values() for c in cs}
        for component in set(rendered):
            inner = kustomize.load(os.path.join(ROOT, component, "kustomization.yaml")).get("components", [])
            rendered |= {os.path.normpath(os.path.join(component, name)) for name in inner}
        there = {os.path.relpath(folder, ROOT) for folder, _, files in os.walk(ROOT) if "kustomization.yaml" in files}
        self.assertEqual(there, rendered)

    def test_every_file_is_used_by_some_kustomization(self):
        for folder, _, files in os.walk(ROOT):
            if "kustomization.yaml" not in files:
                self.assertEqual(files, [], folder)
                continue
            kustomization = kustomize.load(os.path.join(folder, "kustomization.yaml"))
            used = set(kustomization.get("resources", []))
            used |= {f for g in kustomization.get("configMapGenerator", []) for f in g["files"]}
            used |= {p["path"] for p in kustomization.get("patches", []) if "path" in p}
            self.assertEqual({f for f in files if f not in used}, {"kustomization.yaml"}, folder)

    def test_the_base_needs_nothing_of_the_node_but_the_sockets_folder(self):
        resources = render("base")
        spec = pod(resources)
        self.assertEqual(workload(resources)["kind"], "DaemonSet")
        self.assertFalse(spec.get("hostPID") or spec.get("shareProcessNamespace") or spec.get("runtimeClassName"))
        self.assertEqual([v["hostPath"] for v in spec["volumes"] if "hostPath" in v],
                         [{"path": "/run/refitd", "type": "DirectoryOrCreate"}])

    def test_the_sidecar_starts_before_its_engine_and_ends_after_it(self):
        spec = pod(render("sidecar"))
        (daemon,) = spec["initContainers"]
        self.assertEqual((daemon["name"], daemon["restartPolicy"]), ("refitd", "Always"))
        self.assertIn("startupProbe", daemon)
        self.assertIn({"name": "sockets", "emptyDir": {"sizeLimit": "1Mi"}}, spec["volumes"])
        self.assertEqual([c["name"] for c in spec["containers"]], ["engine"])

    def test_gpus_come_by_the_runtime_class(self):
        for variant in ("gpu", "gpu by CDI", "gpu with legacy IPC", "sidecar with legacy IPC"):
            with self.subTest(variant):
                resources = render(variant)
                environment = {e["name"]: e.get("value") for e in container(resources, "refitd")["env"]}
                self.assertRegex(container(resources, "refitd")["image"], ":.*-gpu$")  # the image with NCCL
                self.assertEqual(pod(resources).get("runtimeClassName"), None if variant == "gpu by CDI" else "nvidia")
                self.assertEqual(environment["NVIDIA_VISIBLE_DEVICES"], "all")

    def test_process_namespaces_are_shared_for_legacy_ipc_only(self):
        for variant in VARIANTS:
            spec = pod(render(variant))
            self.assertEqual(bool(spec.get("hostPID")), variant == "gpu with legacy IPC", variant)
            self.assertEqual(bool(spec.get("shareProcessNamespace")), variant == "sidecar with legacy IPC", variant)

    def test_the_engine_of_the_sidecar_is_ready_while_its_instance_is(self):
        engine = container(render("sidecar"), "engine")
        self.assertEqual(engine["readinessProbe"]["exec"]["command"], ["refitctl", "--timeout", "4", "ready"])
        # Probes' commands see no $(VARIABLE): the environment names the group and the instance that the engine has.
        named = {variable["name"] for variable in engine["env"]}
        self.assertLessEqual({"REFITD_GROUP", "REFITD_INSTANCE", "REFITD_SOCKET"}, named)
        self.assertIn("--group=$(REFITD_GROUP)", engine["args"])
        self.assertIn("--instance=$(REFITD_INSTANCE)", engine["args"])

    def test_probes_of_grpc_replace_the_others(self):
        daemon = container(render("base with probes of gRPC"), "refitd")
        for name in PROBES:
            self.assertEqual({a for a in ACTIONS if a in daemon[name]}, {"grpc"})
        daemon = container(render("base"), "refitd")
        for name in PROBES:
            self.assertEqual(daemon[name]["exec"]["command"][0], "refitctl")

    def test_the_daemons_user_is_the_images(self):
        with open("deploy/container/Containerfile") as file:
            self.assertIn("\nUSER %d:%d\n" % (USER, USER), file.read())
        for variant in VARIANTS:
            context = pod(render(variant))["securityContext"]
            self.assertEqual((context["runAsUser"], context["runAsGroup"]), (USER, USER), variant)


class PlantedTest(unittest.TestCase):
    """Each of these errors must be found."""

    def assert_found(self, plant, expected, variant="base"):
        resources = copy.deepcopy(render(variant))
        plant(resources)
        found = problems(resources)
        self.assertTrue(any(expected in problem for problem in found), "%r is not among %s" % (expected, found))

    def test_a_misspelt_field(self):
        self.assert_found(lambda r: pod(r).update(terminationGracePeriod=5), "terminationGracePeriod: no such field")

    def test_a_field_of_another_type(self):
        self.assert_found(lambda r: pod(r).update(terminationGracePeriodSeconds="630"), "is no int")

    def test_an_unknown_kind(self):
        self.assert_found(lambda r: r.append({"apiVersion": "v2", "kind": "Pod", "metadata": {"name": "x"}}),
                          "v2 Pod: no such kind")

    def test_a_name_that_is_none(self):
        self.assert_found(lambda r: container(r, "socket-directory").update(name="Sockets_"), "is no DNS label")

    def test_a_selector_that_misses(self):
        self.assert_found(lambda r: workload(r)["spec"]["selector"]["matchLabels"].update(a="b"), "does not match")

    def test_a_missing_object(self):
        for kind in ("ServiceAccount", "PriorityClass", "Namespace"):
            self.assert_found(lambda r, k=kind: r.remove(of_kind(r, k)[0]), "no %s refitd" % kind)

    def test_a_map_of_another_name(self):
        self.assert_found(lambda r: pod(r)["volumes"][0]["configMap"].update(name="other"), "no ConfigMap other")

    def test_a_volume_that_is_not_declared(self):
        self.assert_found(lambda r: pod(r)["volumes"].pop(), "volume sockets is mounted and not declared")

    def test_a_volume_that_nobody_mounts(self):
        self.assert_found(lambda r: pod(r)["volumes"].append({"name": "x", "emptyDir": {}}), "declared and not mounted")

    def test_a_probe_of_a_port_that_is_not_declared(self):
        self.assert_found(lambda r: container(r, "refitd")["readinessProbe"]["grpc"].update(port=1), "no port 1",
                          "base with probes of gRPC")

    def test_a_probe_with_two_actions(self):
        self.assert_found(lambda r: container(r, "refitd")["livenessProbe"].update(grpc={"port": 9464}), "one action")

    def test_a_policy_for_a_port_that_is_not_declared(self):
        def plant(r):
            of_kind(r, "NetworkPolicy")[0]["spec"]["ingress"][0]["ports"][0]["port"] = "metric"
        self.assert_found(plant, "network policy: no port metric")

    def test_a_scrape_of_another_port(self):
        def plant(r):
            workload(r)["spec"]["template"]["metadata"]["annotations"]["prometheus.io/port"] = "9465"
        self.assert_found(plant, "Prometheus is told port 9465")

    def test_a_monitor_of_other_pods_or_another_port(self):
        variant = "base with the Prometheus operator"
        self.assert_found(lambda r: of_kind(r, "PodMonitor")[0]["spec"]["selector"]["matchLabels"].update(a="b"), "does not find the metrics",
                          variant)
        self.assert_found(lambda r: of_kind(r, "PodMonitor")[0]["spec"]["podMetricsEndpoints"][0].update(port="links"),
                          "does not find the metrics", variant)

    def test_an_image_without_version(self):
        self.assert_found(lambda r: container(r, "refitd").update(image="registry:5000/refitd"), "has no version")

    def test_each_way_out_of_the_sandbox(self):
        def context(r):
            return container(r, "refitd")["securityContext"]
        plants = (
            (lambda r: context(r).update(runAsUser=0), "may be root"),
            (lambda r: pod(r)["securityContext"].pop("runAsNonRoot"), "may be root"),
            (lambda r: context(r).pop("allowPrivilegeEscalation"), "may gain privileges"),
            (lambda r: context(r).update(privileged=True), "may gain privileges"),
            (lambda r: context(r).pop("readOnlyRootFilesystem"), "may write its image"),
            (lambda r: context(r).pop("capabilities"), "keeps capabilities"),
            (lambda r: context(r)["capabilities"].update(add=["SYS_PTRACE"]), "adds capabilities"),
            (lambda r: pod(r)["securityContext"].pop("seccompProfile"), "no seccomp profile"),
            (lambda r: pod(r).update(hostNetwork=True), "hostNetwork"),
            (lambda r: pod(r).pop("automountServiceAccountToken"), "a token"),
            (lambda r: pod(r)["volumes"][-1]["hostPath"].update(path="/"), "/ of the node"),
        )
        for plant, expected in plants:
            self.assert_found(plant, expected)

    def test_memory_without_a_limit(self):
        self.assert_found(lambda r: container(r, "refitd")["resources"].pop("limits"), "is missing")

    def test_a_device_request(self):
        self.assert_found(lambda r: container(r, "refitd")["resources"]["limits"].update({GPU_COMPONENT: 8}),
                          "takes GPUs away", "gpu")

    def test_a_variable_that_is_not_declared(self):
        self.assert_found(lambda r: container(r, "engine")["args"].append("$(RANK)"), "no variable RANK", "sidecar")

    def test_a_configuration_that_refitd_refuses(self):
        def plant(r):
            of_kind(r, "ConfigMap")[0]["data"]["refitd.textproto"] += "nonsense: 1\n"
        self.assert_found(plant, "nonsense")

    def test_a_variable_that_sets_nothing(self):
        self.assert_found(lambda r: container(r, "refitd")["env"].append({"name": "REFITD_INTERFACE", "value": "x"}),
                          "no setting has the variable REFITD_INTERFACE")

    def test_a_configuration_at_another_place(self):
        self.assert_found(lambda r: container(r, "refitd").update(args=["--config", "/etc/x"]), "refitd is given")

    def test_sockets_at_another_place(self):
        self.assert_found(lambda r: container(r, "engine")["volumeMounts"][0].update(mountPath="/sockets"),
                          "mounted at ['/sockets']", "sidecar")
        self.assert_found(lambda r: container(r, "engine")["env"][1].update(value="/x"), "REFITD_SOCKET is not",
                          "sidecar")

    def test_a_control_plane_open_to_the_network(self):
        def plant(r):
            data = of_kind(r, "ConfigMap")[0]["data"]
            data["refitd.textproto"] = data["refitd.textproto"].replace(
                "listen {", 'peers { interface: "eth0" }\nlisten { tcp: "0.0.0.0:7070" insecure: true', 1)
        self.assert_found(plant, "the control plane listens on")
        self.assert_found(lambda r: r.remove(of_kind(r, "NetworkPolicy")[0]), "no network policy guards it",
                          "base with probes of gRPC")

    def change_settings(self, old, new):
        def plant(r):
            for each in of_kind(r, "ConfigMap"):
                each["data"] = {name: text.replace(old, new) for name, text in each["data"].items()}
        return plant

    def test_daemons_of_several_nodes_had_their_data_plane_on_loopback(self):
        for variant in ("base with cert-manager", "base with SPIRE"):
            self.assert_found(self.change_settings('interface: "eth0"', ""), "the data plane is on loopback", variant)

    def test_no_policy_let_weights_through(self):
        def plant(r):
            of_kind(r, "NetworkPolicy")[0]["spec"]["ingress"][2]["ports"].pop()
        self.assert_found(plant, "no network policy lets the other daemons in at port data", "base with cert-manager")
        self.assert_found(self.change_settings("port: 7413", ""), "the data plane is on port 0", "base with cert-manager")

    def test_no_name_led_to_a_coordinator(self):
        self.assert_found(lambda r: r.remove(of_kind(r, "Service")[0]), "0 services name a coordinator",
                          "base with cert-manager")
        self.assert_found(lambda r: of_kind(r, "Service")[0]["spec"]["selector"].popitem(),
                          "and one that an operator gives", "base with cert-manager")
        self.assert_found(lambda r: of_kind(r, "Service")[0]["spec"]["ports"][0].update(port=7411),
                          "links are at 7412", "base with SPIRE")

    def test_nccl_is_let_through_between_daemons_on_gpus_and_nowhere_else(self):
        for variant in VARIANTS:
            wide = [p for p in of_kind(render(variant), "NetworkPolicy") if p["metadata"]["name"] == "refitd-nccl"]
            self.assertEqual(len(wide), 1 if variant.startswith("gpu") else 0, variant)
            for policy in wide:
                (rule,) = policy["spec"]["ingress"]
                self.assertEqual(rule["from"], [{"podSelector": {"matchLabels": {"app.kubernetes.io/name": "refitd"}}}])

    def test_a_secret_that_nobody_makes(self):
        self.assert_found(lambda r: r.remove([c for c in of_kind(r, "Certificate") if c["metadata"]["name"] == "refitd"][0]),
                          "no Secret refitd-tls", "base with cert-manager")

    def test_an_issuer_that_is_not_there(self):
        self.assert_found(lambda r: of_kind(r, "Certificate")[1]["spec"]["issuerRef"].update(name="x"), "no Issuer x",
                          "base with cert-manager")

    def test_certificates_at_another_place(self):
        def plant(r):
            (mount,) = [m for m in container(r, "refitd")["volumeMounts"] if m["name"] == "tls"]
            mount["mountPath"] = "/etc/tls"
        self.assert_found(plant, "mounted at ['/etc/tls']", "base with cert-manager")
        self.assert_found(plant, "mounted at ['/etc/tls']", "base with SPIRE")

    def test_a_certificate_that_may_not_call(self):
        def plant(r):
            for certificate in of_kind(r, "Certificate"):
                certificate["spec"]["usages"] = ["server auth"]
        self.assert_found(plant, "both serves and calls", "base with cert-manager")

    def test_daemons_that_are_no_peers(self):
        def plant(r):
            for certificate in of_kind(r, "Certificate"):
                certificate["spec"]["uris"] = ["spiffe://example.org/daemon"]
        self.assert_found(plant, "peers.identity is spiffe://example.org/refitd/*", "base with cert-manager")

    def test_a_policy_that_refitd_refuses(self):
        def plant(r):
            for each in of_kind(r, "ConfigMap"):
                if "rules.textproto" in each["data"]:
                    each["data"]["rules.textproto"] += 'rule { who: "me" role: ENGINE group: "*" }\n'
        self.assert_found(plant, "rule[4].who", "base with cert-manager")

    def test_a_policy_that_lets_nobody_in_over_tls(self):
        plant = self.change_settings('rule { who: "spiffe', '# rule { who: "spiffe')
        self.assert_found(plant, "no rule lets anybody in", "base with cert-manager")

    def test_a_pod_that_is_killed_while_it_drains(self):
        self.assert_found(lambda r: pod(r).update(terminationGracePeriodSeconds=30), "a drain may take 605 s")

    def test_pools_beyond_the_memory_limit(self):
        def plant(r):
            for amounts in container(r, "refitd")["resources"].values():
                amounts["memory"] = "2Gi"
        self.assert_found(plant, "don't fit into the memory limit")


class KustomizeTest(unittest.TestCase):
    """The resolver itself refuses what it does not know, or what is not there."""

    def render(self, files):
        with tempfile.TemporaryDirectory() as folder:
            for name, text in files.items():
                os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
                with open(os.path.join(folder, name), "w") as file:
                    file.write(text)
            return kustomize.render(os.path.join(folder, "a"))

    OBJECT = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: x}\n"

    def test_unknown_fields(self):
        with self.assertRaisesRegex(kustomize.Error, "unknown field resource$"):
            self.render({"a/kustomization.yaml": "kind: Kustomization\nresource: []\n"})

    def test_missing_files(self):
        with self.assertRaisesRegex(kustomize.Error, "x.yaml: No such file"):
            self.render({"a/kustomization.yaml": "kind: Kustomization\nresources: [x.yaml]\n"})

    def test_files_outside(self):
        with self.assertRaisesRegex(kustomize.Error, "lies outside"):
            self.render({"a/kustomization.yaml": "kind: Kustomization\nresources: [../x.yaml]\n", "x.yaml": self.OBJECT})

    def test_objects_that_are_there_twice(self):
        with self.assertRaisesRegex(kustomize.Error, "twice"):
            self.render({"a/kustomization.yaml": "kind: Kustomization\nresources: [x.yaml, y.yaml]\n",
                         "a/x.yaml": self.OBJECT, "a/y.yaml": self.OBJECT})

    def test_patches_without_a_target(self):
        with self.assertRaisesRegex(kustomize.Error, "0 objects are"):
            self.render({"a/kustomization.yaml": "kind: Kustomization\npatches: [{path: x.yaml}]\n",
                         "a/x.yaml": self.OBJECT})

    def test_patches_join_lists_by_name_and_delete_by_null(self):
        base = {"containers": [{"name": "a", "image": "i", "args": ["1", "2"], "livenessProbe": {"exec": {}}}]}
        patch = {"containers": [{"name": "a", "args": ["3"], "livenessProbe": {"exec": None, "grpc": {"port": 1}}},
                                {"name": "b"}]}
        self.assertEqual(kustomize.merge(base, patch), {"containers": [
            {"name": "b"}, {"name": "a", "image": "i", "args": ["3"], "livenessProbe": {"grpc": {"port": 1}}}]})


if __name__ == "__main__":
    unittest.main()
