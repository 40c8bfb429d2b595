"""The fields that the Kubernetes objects of deploy/kubernetes may have: a small part of the API's schema.

problems(resource) compares an object with it: a misspelt field would be refused by the API server, or dropped in
silence, long after a review. Fields not used here may be missing in here; add them from the API reference.
"""

STRING, INT, BOOL, QUANTITY = "string", "int", "bool", "quantity"
STRINGS = [STRING]
MAP = {"*": STRING}
QUANTITIES = {"*": QUANTITY}
PORT = (INT, STRING)  # a port's number, or the name that a container declares for it

METADATA = {"name": STRING, "namespace": STRING, "labels": MAP, "annotations": MAP}
LABEL_SELECTOR = {
    "matchLabels": MAP,
    "matchExpressions": [{"key": STRING, "operator": STRING, "values": STRINGS}],
}
PROBE = {
    "exec": {"command": STRINGS},
    "grpc": {"port": INT, "service": STRING},
    "httpGet": {"path": STRING, "port": PORT, "scheme": STRING},
    "tcpSocket": {"port": PORT},
    "initialDelaySeconds": INT,
    "periodSeconds": INT,
    "timeoutSeconds": INT,
    "successThreshold": INT,
    "failureThreshold": INT,
    "terminationGracePeriodSeconds": INT,
}
SECCOMP = {"type": STRING, "localhostProfile": STRING}
CONTAINER = {
    "name": STRING,
    "image": STRING,
    "imagePullPolicy": STRING,
    "command": STRINGS,
    "args": STRINGS,
    "workingDir": STRING,
    "restartPolicy": STRING,  # an init container with Always is a sidecar
    "env": [{
        "name": STRING,
        "value": STRING,
        "valueFrom": {"fieldRef": {"fieldPath": STRING}},
    }],
    "ports": [{"name": STRING, "containerPort": INT, "protocol": STRING}],
    "startupProbe": PROBE,
    "livenessProbe": PROBE,
    "readinessProbe": PROBE,
    "lifecycle": {"preStop": {"exec": {"command": STRINGS}}},
    "securityContext": {
        "runAsNonRoot": BOOL,
        "runAsUser": INT,
        "runAsGroup": INT,
        "privileged": BOOL,
        "allowPrivilegeEscalation": BOOL,
        "readOnlyRootFilesystem": BOOL,
        "capabilities": {"drop": STRINGS, "add": STRINGS},
        "seccompProfile": SECCOMP,
    },
    "resources": {"requests": QUANTITIES, "limits": QUANTITIES},
    "volumeMounts": [{"name": STRING, "mountPath": STRING, "readOnly": BOOL, "subPath": STRING}],
}
POD_SPEC = {
    "serviceAccountName": STRING,
    "automountServiceAccountToken": BOOL,
    "enableServiceLinks": BOOL,
    "priorityClassName": STRING,
    "runtimeClassName": STRING,
    "terminationGracePeriodSeconds": INT,
    "hostPID": BOOL,
    "hostIPC": BOOL,
    "hostNetwork": BOOL,
    "shareProcessNamespace": BOOL,
    "dnsPolicy": STRING,
    "nodeSelector": MAP,
    "imagePullSecrets": [{"name": STRING}],
    "tolerations": [{"key": STRING, "operator": STRING, "value": STRING, "effect": STRING}],
    "securityContext": {
        "runAsNonRoot": BOOL,
        "runAsUser": INT,
        "runAsGroup": INT,
        "fsGroup": INT,
        "supplementalGroups": [INT],
        "seccompProfile": SECCOMP,
    },
    "initContainers": [CONTAINER],
    "containers": [CONTAINER],
    "volumes": [{
        "name": STRING,
        "configMap": {"name": STRING, "defaultMode": INT},
        "hostPath": {"path": STRING, "type": STRING},
        "emptyDir": {"medium": STRING, "sizeLimit": QUANTITY},
        "secret": {"secretName": STRING, "defaultMode": INT},
        "csi": {"driver": STRING, "readOnly": BOOL},
        "persistentVolumeClaim": {"claimName": STRING, "readOnly": BOOL},
    }],
}
POD_TEMPLATE = {"metadata": METADATA, "spec": POD_SPEC}

KINDS = {
    ("v1", "Namespace"): {},
    ("v1", "ServiceAccount"): {"automountServiceAccountToken": BOOL},
    ("v1", "ConfigMap"): {"data": MAP},
    ("scheduling.k8s.io/v1", "PriorityClass"): {
        "value": INT,
        "globalDefault": BOOL,
        "description": STRING,
        "preemptionPolicy": STRING,
    },
    ("networking.k8s.io/v1", "NetworkPolicy"): {
        "spec": {
            "podSelector": LABEL_SELECTOR,
            "policyTypes": STRINGS,
            "ingress": [{
                "from": [{"namespaceSelector": LABEL_SELECTOR, "podSelector": LABEL_SELECTOR}],
                "ports": [{"protocol": STRING, "port": PORT, "endPort": INT}],
            }],
        },
    },
    ("v1", "Service"): {
        "spec": {
            "clusterIP": STRING,
            "selector": MAP,
            "ports": [{"name": STRING, "port": INT, "targetPort": PORT, "protocol": STRING}],
        },
    },
    # cert-manager's API reference, "Issuer" and "Certificate".
    ("cert-manager.io/v1", "Issuer"): {"spec": {"selfSigned": {}, "ca": {"secretName": STRING}}},
    ("cert-manager.io/v1", "Certificate"): {
        "spec": {
            "isCA": BOOL,
            "commonName": STRING,
            "secretName": STRING,
            "duration": STRING,
            "renewBefore": STRING,
            "uris": STRINGS,
            "dnsNames": STRINGS,
            "usages": STRINGS,
            "privateKey": {"algorithm": STRING, "size": INT, "rotationPolicy": STRING},
            "issuerRef": {"name": STRING, "kind": STRING, "group": STRING},
        },
    },
    # spire-controller-manager's custom resource.
    ("spire.spiffe.io/v1alpha1", "ClusterSPIFFEID"): {
        "spec": {
            "spiffeIDTemplate": STRING,
            "podSelector": LABEL_SELECTOR,
            "namespaceSelector": LABEL_SELECTOR,
            "dnsNameTemplates": STRINGS,
            "ttl": STRING,
        },
    },
    # The Prometheus operator's API reference. A rule's own fields are promtool's to check.
    ("monitoring.coreos.com/v1", "PodMonitor"): {
        "spec": {
            "selector": LABEL_SELECTOR,
            "podMetricsEndpoints": [{
                "port": STRING,
                "interval": STRING,
                "scheme": STRING,
                "tlsConfig": {"*": MAP},
                "relabelings": [{"sourceLabels": STRINGS, "targetLabel": STRING, "regex": STRING, "replacement": STRING, "action": STRING}],
            }],
        },
    },
    ("monitoring.coreos.com/v1", "PrometheusRule"): {
        "spec": {"groups": [{
            "name": STRING,
            "rules": [{"alert": STRING, "expr": STRING, "for": STRING, "keep_firing_for": STRING, "labels": MAP, "annotations": MAP}],
        }]},
    },
    ("apps/v1", "DaemonSet"): {
        "spec": {
            "selector": LABEL_SELECTOR,
            "minReadySeconds": INT,
            "updateStrategy": {"type": STRING, "rollingUpdate": {"maxUnavailable": PORT, "maxSurge": PORT}},
            "template": POD_TEMPLATE,
        },
    },
    ("apps/v1", "Deployment"): {
        "spec": {
            "replicas": INT,
            "selector": LABEL_SELECTOR,
            "strategy": {"type": STRING, "rollingUpdate": {"maxUnavailable": PORT, "maxSurge": PORT}},
            "template": POD_TEMPLATE,
        },
    },
}


def _is(value, kind):
    if isinstance(kind, tuple):
        return any(_is(value, k) for k in kind)
    if kind == STRING:
        return isinstance(value, str)
    if kind == INT:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == BOOL:
        return isinstance(value, bool)
    return isinstance(value, (str, int)) and not isinstance(value, bool)  # QUANTITY


def _compare(value, schema, path, found):
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            found.append("%s: must be an object" % path)
            return
        for key, item in value.items():
            if key in schema or "*" in schema:
                _compare(item, schema.get(key, schema.get("*")), "%s.%s" % (path, key), found)
            else:
                found.append("%s.%s: no such field" % (path, key))
    elif isinstance(schema, list):
        if not isinstance(value, list):
            found.append("%s: must be a list" % path)
            return
        for i, item in enumerate(value):
            _compare(item, schema[0], "%s[%d]" % (path, i), found)
    elif not _is(value, schema):
        found.append("%s: %r is no %s" % (path, value, schema))


def problems(resource):
    kind = (resource.get("apiVersion"), resource.get("kind"))
    if kind not in KINDS:
        return ["%s %s: no such kind" % kind]
    found = []
    _compare(resource, {"apiVersion": STRING, "kind": STRING, "metadata": METADATA, **KINDS[kind]}, kind[1], found)
    return found
