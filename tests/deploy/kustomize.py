"""Resolves kustomization.yaml as far as deploy/kubernetes uses it; whatever it does not know is an error.

render(folder) gives the objects that `kubectl apply -k` would send, less the hash that ends a generated
ConfigMap's name (kustomize adds it to the map and to every reference alike).
"""

import copy
import os

import yaml

FIELDS = {
    "apiVersion", "kind", "namespace", "labels", "resources", "components", "configMapGenerator", "images", "patches",
}
CLUSTER_KINDS = {"Namespace", "PriorityClass", "ClusterSPIFFEID"}  # the kinds without a namespace among those used here
# Lists that a strategic merge joins by a key, as the API's own types say; all other lists are replaced.
MERGE_KEYS = {
    "containers": "name", "initContainers": "name", "env": "name", "ports": "containerPort", "volumes": "name",
    "volumeMounts": "mountPath",
}


class Error(Exception):
    pass


def load(path):
    try:
        with open(path) as file:
            return yaml.safe_load(file)
    except OSError as error:
        raise Error("%s: %s" % (path, error.strerror)) from error
    except yaml.YAMLError as error:
        raise Error("%s: %s" % (path, error)) from error


def load_all(path):
    try:
        with open(path) as file:
            return [document for document in yaml.safe_load_all(file) if document is not None]
    except OSError as error:
        raise Error("%s: %s" % (path, error.strerror)) from error


def check_keys(value, known, where):
    unknown = set(value) - set(known)
    if unknown:
        raise Error("%s: unknown field %s" % (where, ", ".join(sorted(unknown))))


def inside(folder, name):
    """A path below `folder`, as kustomize insists for files."""
    path = os.path.normpath(os.path.join(folder, name))
    if os.path.relpath(path, folder).startswith(".."):
        raise Error("%s: %s lies outside, which kustomize refuses" % (folder, name))
    return path


def identity(resource):
    return (resource["kind"], resource["metadata"]["name"])


def find(resources, kind, name, where):
    found = [r for r in resources if identity(r) == (kind, name)]
    if len(found) != 1:
        raise Error("%s: %d objects are %s %s" % (where, len(found), kind, name))
    return found[0]


def merge(base, patch, list_key=None):
    """A strategic merge: None deletes, lists of MERGE_KEYS join by key, and what only the patch has comes first."""
    if isinstance(base, dict) and isinstance(patch, dict):
        merged = dict(base)
        for key, value in patch.items():
            if value is None:
                merged.pop(key, None)
            elif key in merged:
                merged[key] = merge(merged[key], value, key)
            else:
                merged[key] = strip_nulls(value)
        return merged
    if isinstance(base, list) and isinstance(patch, list) and list_key in MERGE_KEYS:
        name = MERGE_KEYS[list_key]
        merged, added = list(base), []
        for item in patch:
            at = [i for i, old in enumerate(merged) if old.get(name) == item.get(name)]
            if at:
                merged[at[0]] = merge(merged[at[0]], item)
            else:
                added.append(strip_nulls(item))
        return added + merged
    return strip_nulls(patch)


def strip_nulls(value):
    if isinstance(value, dict):
        return {k: strip_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [strip_nulls(v) for v in value]
    return value


def apply_operations(resource, operations, where):
    """Applies a patch of RFC 6902, of whose operations it knows `add` and `replace` on fields of objects."""
    for operation in operations:
        check_keys(operation, {"op", "path", "value"}, where)
        if operation["op"] not in ("add", "replace"):
            raise Error("%s: operation %s" % (where, operation["op"]))
        *parents, last = operation["path"].lstrip("/").split("/")
        target = resource
        for part in parents:
            if not isinstance(target, dict) or part not in target:
                raise Error("%s: no %s in %s" % (where, operation["path"], identity(resource)))
            target = target[part]
        if operation["op"] == "replace" and last not in target:
            raise Error("%s: no %s to replace" % (where, operation["path"]))
        target[last] = operation["value"]


def apply_patch(folder, entry, resources):
    where = os.path.join(folder, "kustomization.yaml")
    check_keys(entry, {"path", "patch", "target"}, where)
    if ("path" in entry) == ("patch" in entry):
        raise Error("%s: a patch has either path or patch" % where)
    content = load(inside(folder, entry["path"])) if "path" in entry else yaml.safe_load(entry["patch"])
    target = entry.get("target")
    if target is None:
        target = {"kind": content["kind"], "name": content["metadata"]["name"]}
    check_keys(target, {"kind", "name"}, where)
    resource = find(resources, target["kind"], target["name"], where)
    if isinstance(content, list):
        apply_operations(resource, content, where)
        return
    if identity(content) != identity(resource):
        raise Error("%s: patch of %s for %s" % (where, identity(content), identity(resource)))
    merged = merge(resource, content)
    resource.clear()
    resource.update(merged)


def generate_config_maps(folder, entries, resources):
    for entry in entries:
        where = "%s: configMapGenerator" % folder
        check_keys(entry, {"name", "namespace", "files", "behavior", "options"}, where)
        check_keys(entry.get("options", {}), {"disableNameSuffixHash"}, where)
        data = {}
        for name in entry["files"]:
            with open(inside(folder, name)) as file:
                data[os.path.basename(name)] = file.read()
        behavior = entry.get("behavior", "create")
        if behavior == "replace":
            replaced = find(resources, "ConfigMap", entry["name"], where)
            if replaced["metadata"].get("namespace") != entry.get("namespace"):
                raise Error("%s: %s is in namespace %s" % (where, entry["name"], replaced["metadata"].get("namespace")))
            replaced["data"] = data
        elif behavior == "create":
            metadata = {key: entry[key] for key in ("name", "namespace") if key in entry}
            resources.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data})
        else:
            raise Error("%s: behavior %s" % (where, behavior))


def pod_template(resource):
    return resource.get("spec", {}).get("template") if resource["kind"] in ("DaemonSet", "Deployment") else None


def add_labels(resource, entry, where):
    check_keys(entry, {"pairs", "includeSelectors", "includeTemplates"}, where)
    resource["metadata"].setdefault("labels", {}).update(entry["pairs"])
    template = pod_template(resource)
    if template is None:
        return
    if entry.get("includeSelectors"):
        resource["spec"]["selector"].setdefault("matchLabels", {}).update(entry["pairs"])
    if entry.get("includeSelectors") or entry.get("includeTemplates"):
        template.setdefault("metadata", {}).setdefault("labels", {}).update(entry["pairs"])


def set_image(resource, entry, where):
    check_keys(entry, {"name", "newName", "newTag"}, where)
    template = pod_template(resource)
    if template is None:
        return
    for container in template["spec"].get("initContainers", []) + template["spec"].get("containers", []):
        if container["image"].split(":")[0] == entry["name"]:
            container["image"] = "%s:%s" % (entry.get("newName", entry["name"]), entry.get("newTag", "latest"))


def apply(folder, resources):
    """Adds to `resources` and changes them, as the kustomization in `folder` says."""
    where = os.path.join(folder, "kustomization.yaml")
    kustomization = load(where)
    check_keys(kustomization, FIELDS, where)
    if kustomization.get("kind") not in ("Kustomization", "Component"):
        raise Error("%s: kind %s" % (where, kustomization.get("kind")))
    for name in kustomization.get("resources", []):
        path = os.path.normpath(os.path.join(folder, name))
        if os.path.isdir(path):
            added = []
            apply(path, added)
        else:
            added = load_all(inside(folder, name))
        for resource in added:
            if identity(resource) in map(identity, resources):
                raise Error("%s: %s twice" % (where, identity(resource)))
            resources.append(resource)
    generate_config_maps(folder, kustomization.get("configMapGenerator", []), resources)
    for name in kustomization.get("components", []):
        apply(os.path.normpath(os.path.join(folder, name)), resources)
    for entry in kustomization.get("patches", []):
        apply_patch(folder, entry, resources)
    for resource in resources:
        if "namespace" in kustomization and resource["kind"] not in CLUSTER_KINDS:
            resource["metadata"]["namespace"] = kustomization["namespace"]
        for entry in kustomization.get("labels", []):
            add_labels(resource, entry, where)
        for entry in kustomization.get("images", []):
            set_image(resource, entry, where)


def render(folder, components=()):
    resources = []
    apply(folder, resources)
    for component in components:
        apply(component, resources)
    return copy.deepcopy(resources)
