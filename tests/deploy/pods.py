"""Pods without Kubernetes: network namespaces around a bridge, whose files and network policies are those of rendered objects.

A pod has a network of its own, with `eth0`; a host name; and /etc and /run of its own. Rules of nftables keep its rendered
network policies, and /etc/hosts has the names that rendered services give. Needs root.
"""

import os
import shutil
import subprocess

SECONDS = 60
# Where ip and nft are; Bazel's own PATH has neither.
os.environ["PATH"] += ":/usr/sbin:/sbin"
# What /etc must have for programs: the loader's cache, users, and how names are looked up.
FILES_OF_ETC = ("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "nsswitch.conf", "passwd", "group", "host.conf")


class Unavailable(Exception):
    """Why this machine can have no pods."""


def run(*command, **options):
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False, **options)


class Namespace:
    """Namespaces of network, mounts and host name, which live as long as a process that waits for the end of its input."""

    def __init__(self, name, *mounts):
        """`mounts`: folders, each with the place where the namespace sees it."""
        script = "hostname %s && " % name
        script += "".join("mount --bind %s %s && " % mount for mount in mounts)
        script += "ip link set lo up && echo ready && exec cat"
        self.holder = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "--propagation", "private", "/bin/sh", "-c", script],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        if self.holder.stdout.readline() != "ready\n":
            raise Unavailable("no namespaces of network, mounts and host name: %s" % self.holder.communicate(timeout=SECONDS)[1].strip())

    def enter(self, *command):
        return ["nsenter", "--net", "--uts", "--mount", "--target", str(self.holder.pid), *command]

    def must(self, *command, error=AssertionError, **options):
        done = run(*self.enter(*command), **options)
        if done.returncode != 0:
            raise error("`%s`: %s" % (" ".join(command), done.stderr.strip()))

    def end(self):
        for pipe in (self.holder.stdin, self.holder.stdout, self.holder.stderr):
            pipe.close()
        self.holder.wait(timeout=SECONDS)


class Pod:
    """`labels`: its own. `space`: the labels of its namespace, which name it too."""

    def __init__(self, name, address, labels, space):
        self.name, self.address, self.labels, self.space = name, address, labels, space
        self.namespace = None  # made by Cluster

    def enter(self, *command, user=None, group=None):
        """The command in the pod, as a user and a group by number."""
        identity = [] if user is None else ["setpriv", "--reuid=%d" % user, "--regid=%d" % group, "--clear-groups"]
        return self.namespace.enter(*identity, *command)

    def run(self, *command, **options):
        return run(*self.enter(*command, **options))

    def reaches(self, other, port):
        """Whether a TCP connection comes about. Policies answer with a reset, so nothing waits for long."""
        connect = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=%d)" % SECONDS
        return self.run("/usr/bin/python3", "-c", connect, other.address, str(port)).returncode == 0


def selects(selector, labels):
    return selector is not None and selector.get("matchLabels", {}).items() <= labels.items()


def comes_from(source, peer, space):
    """Whether a policy's `from` means the pod `peer`. `space`: the labels of the policy's namespace."""
    if "namespaceSelector" in source:
        return selects(source["namespaceSelector"], peer.space) and (
            "podSelector" not in source or selects(source["podSelector"], peer.labels))
    return peer.space == space and selects(source["podSelector"], peer.labels)


def nftables_of(policies, pod, pods, ports):
    """The rules of one pod, as Kubernetes means its policies: with any, what none allows is refused.

    `ports`: the pod's numbers by name."""
    mine = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], pod.labels)]
    if not mine:
        return "flush ruleset\n"
    allowed = ""
    for rule in (rule for spec in mine for rule in spec["ingress"]):
        peers = [peer.address for peer in pods if any(comes_from(source, peer, pod.space) for source in rule["from"])]
        numbers = ["%s-%d" % (p["port"], p["endPort"]) if "endPort" in p else str(ports.get(p["port"], p["port"])) for p in rule["ports"]]
        if peers:
            allowed += "    ip saddr { %s } tcp dport { %s } accept\n" % (", ".join(peers), ", ".join(numbers))
    return """flush ruleset
table inet rendered {
  chain input {
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "lo" accept
%s    meta l4proto tcp reject with tcp reset
  }
}
""" % allowed


class Cluster:
    """Pods on one bridge, with the policies and services of the objects that Kubernetes would get."""

    def __init__(self, folder, pods, resources, ports):
        """`folder`: where pods' files lie. `ports`: the numbers of the daemons' ports by name. Raises Unavailable."""
        self.folder, self.pods, self.ports = folder, pods, ports
        self.services = [r for r in resources if r["kind"] == "Service"]
        self.bridge = None
        try:
            self._make()
            self.enforce([r for r in resources if r["kind"] == "NetworkPolicy"])
            self.name_services()
        except BaseException:
            self.end()
            raise

    def etc(self, pod):
        return os.path.join(self.folder, pod.name, "etc")

    def _make(self):
        if os.geteuid() != 0:
            raise Unavailable("not root")
        if shutil.which("nft") is None:
            raise Unavailable("no nft, which keeps network policies")
        self.bridge = Namespace("bridge")
        self.bridge.must("ip", "link", "add", "br0", "type", "bridge", error=Unavailable)
        self.bridge.must("nft", "add", "table", "inet", "rendered", error=Unavailable)
        self.bridge.must("ip", "link", "set", "br0", "up")
        for number, pod in enumerate(self.pods):
            etc, run_folder = self.etc(pod), os.path.join(self.folder, pod.name, "run")
            os.makedirs(etc)
            os.makedirs(run_folder)
            for name in FILES_OF_ETC:
                source = os.path.join("/etc", name)
                if os.path.isdir(source):
                    shutil.copytree(source, os.path.join(etc, name))
                elif os.path.exists(source):
                    shutil.copy(source, etc)
            pod.namespace = Namespace(pod.name, (etc, "/etc"), (run_folder, "/run"))
            port = "s%d" % number
            pod.namespace.must("ip", "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", str(self.bridge.holder.pid))
            pod.namespace.must("ip", "addr", "add", pod.address + "/24", "dev", "eth0")
            pod.namespace.must("ip", "link", "set", "eth0", "up")
            self.bridge.must("ip", "link", "set", port, "master", "br0")
            self.bridge.must("ip", "link", "set", port, "up")

    def enforce(self, policies):
        """From now on these policies count, and no others."""
        for pod in self.pods:
            pod.namespace.must("nft", "-f", "-", input=nftables_of(policies, pod, self.pods, self.ports))

    def name_services(self):
        """Gives every pod the services' names, as the cluster's DNS does: of a headless one, its pods' addresses."""
        lines = "127.0.0.1 localhost\n"
        for service in self.services:
            name = "%(name)s.%(namespace)s.svc" % service["metadata"]
            for pod in self.pods:
                if service["spec"]["selector"].items() <= pod.labels.items():
                    lines += "%s %s\n" % (pod.address, name)
        for pod in self.pods:
            with open(os.path.join(self.etc(pod), "hosts"), "w") as file:
                file.write(lines)

    def end(self):
        for namespace in [self.bridge, *(pod.namespace for pod in self.pods)]:
            if namespace is not None:
                namespace.end()
