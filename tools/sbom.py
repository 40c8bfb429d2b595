#!/usr/bin/python3
"""Prints the bill of materials of a wheel as CycloneDX 1.6: what its programs link and have compiled in, with versions and licences.

usage: tools/sbom.py WHEEL      the tarball, the .deb and the .rpm carry the same

The list is that of tools/wheel_licenses.py, which asks the loader and dpkg when the wheel is made. Licences are SPDX expressions, of
third_party/licenses.csv. SOURCE_DATE_EPOCH fixes the time, so that equal wheels give equal bills.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import sys
import uuid
import zipfile
from typing import Any
from urllib.parse import quote

from wheel_licenses import licenses, packages_of

DISTRIBUTION = "debian-12"


def component(row: dict[str, Any], known: dict[str, tuple[str, str]]) -> dict[str, Any]:
    name, licence = known[row["source"]]
    purl = f"pkg:deb/debian/{quote(row['package'])}@{quote(row['version'], safe='')}?arch=amd64&distro={DISTRIBUTION}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": row["package"],
        "version": row["version"],
        "description": name,
        "licenses": [{"expression": licence}],
        "purl": purl,
        "properties": [{"name": "refitd:library", "value": library} for library in row["libraries"]]
        or [{"name": "refitd:compiled-in", "value": "true"}],
    }


def bill(wheel: str, seconds: int) -> dict[str, Any]:
    with open(wheel, "rb") as file:
        digest = hashlib.sha256(file.read()).hexdigest()
    with zipfile.ZipFile(wheel) as archive:
        programs = [name for name in archive.namelist() if name.startswith("refitd/_bin/") and not name.endswith("/")]
        files = [{
            "type": "file", "bom-ref": name, "name": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(archive.read(name)).hexdigest()}],
        } for name in sorted(programs)]  # fmt: skip
    version = os.path.basename(wheel).split("-")[1]
    product = f"pkg:pypi/refitd@{version}"
    known = licenses()
    libraries = [component(row, known) for row in packages_of(wheel)]
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, digest)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).isoformat(),
            "component": {
                "type": "application", "bom-ref": product, "name": "refitd", "version": version, "purl": product,
                "licenses": [{"expression": "Apache-2.0"}], "hashes": [{"alg": "SHA-256", "content": digest}], "components": files,
            },  # fmt: skip
        },
        "components": libraries,
        "dependencies": [{"ref": product, "dependsOn": [each["bom-ref"] for each in libraries]}],
    }


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    print(json.dumps(bill(sys.argv[1], int(os.environ.get("SOURCE_DATE_EPOCH", "0"))), indent=1))
