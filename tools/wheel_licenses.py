#!/usr/bin/python3
"""The licences of the libraries that the wheel carries: as Debian's packages state them.

usage: tools/wheel_licenses.py collect FOLDER BINARY...
           for each Debian package with a library that the binaries load, or with headers that are compiled in:
           FOLDER/PACKAGE/copyright; FOLDER/packages.json, which lists packages, versions and libraries, and FOLDER/NOTICE, which says
           the same to people; licences that the texts refer to are added as FOLDER/common/NAME. Exit 1 where
           third_party/licenses.csv has no licence of a package
       tools/wheel_licenses.py check WHEEL
           exit 1 unless packages.json lists the libraries that the wheel carries, and no others
"""

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile

COMMON = "/usr/share/common-licenses"
IN_WHEEL = "refitd/_licenses/"
LICENSES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../third_party/licenses.csv")
# Libraries of headers alone, which the binaries have compiled in.
COMPILED_IN = ("libcli11-dev", "nlohmann-json3-dev")
# These libraries are not carried, since every Linux of the wheel's platform tag has them.
OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s|z)\.so\.|ld-linux")
HEAD = """refitd is licensed under the Apache License 2.0: the file LICENSE beside this.

The wheel also carries libraries of Debian 12, and has two of headers alone compiled in. Their file names and search paths are changed, and in some the version of
one symbol that they ask libstdc++ for; nothing else is. This table names the package of each and its source package and
version, under which Debian gives out the source code (https://snapshot.debian.org). The file copyright in the folder of
the package's name has its licences; common/ has the full texts that those files refer to.

"""


def output(*command):
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def loaded_by(binaries):
    """Paths of the libraries that the binaries load, by the loader's own view, less those of every system."""
    found = set()
    for binary in binaries:
        told = output("ldd", binary)
        if "not found" in told:
            sys.exit("wheel_licenses: %s lacks a library:\n%s" % (binary, told))
        found.update(re.findall(r"=> (/\S+)", told))
    return sorted(path for path in found if not OF_THE_SYSTEM.match(os.path.basename(path)))


def package_of(library):
    """The installed package that has the file; dpkg may know it by its name before /lib was merged into /usr."""
    real = os.path.realpath(library)
    names = [real, real[len("/usr"):] if real.startswith("/usr/lib/") else "/usr" + real]
    for name in names:
        done = subprocess.run(["dpkg", "-S", name], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            return done.stdout.split(":")[0]
    sys.exit("wheel_licenses: no Debian package has %s" % library)


def licenses():
    """Of each source package its name for people and its licence, an SPDX expression: {source: (name, licence)}."""
    with open(LICENSES, encoding="utf-8", newline="") as file:
        return {row["source"]: (row["name"], row["licence"]) for row in csv.DictReader(file)}


def collect(folder, binaries):
    packages = {name: [] for name in COMPILED_IN}
    known = licenses()
    for library in loaded_by(binaries):
        packages.setdefault(package_of(library), []).append(os.path.basename(library))
    rows = []
    common = set()
    for package, libraries in sorted(packages.items()):
        source, source_version, version = output(
            "dpkg-query", "-W", "-f", "${source:Package}\\t${source:Version}\\t${Version}\\n", package).splitlines()[0].split("\t")
        if source not in known:
            sys.exit("wheel_licenses: third_party/licenses.csv has no licence of %s" % source)
        rows.append({"package": package, "version": version, "source": source, "source_version": source_version,
                     "libraries": sorted(libraries)})
        text = "/usr/share/doc/%s/copyright" % package
        os.makedirs(os.path.join(folder, package))
        shutil.copyfile(text, os.path.join(folder, package, "copyright"))
        with open(text, encoding="utf-8", errors="replace") as file:
            common.update(name.rstrip(".") for name in re.findall(COMMON + r"/([\w.+-]*\w)", file.read()))
    os.makedirs(os.path.join(folder, "common"))
    for name in sorted(common):
        path = os.path.join(COMMON, name)
        if os.path.isfile(path):
            shutil.copyfile(path, os.path.join(folder, "common", name))
    with open(os.path.join(folder, "NOTICE"), "w", encoding="utf-8") as notice:
        notice.write(HEAD)
        notice.write("%-28s %-16s %-26s %s\n" % ("package", "source", "version", "libraries"))
        for row in rows:
            libraries = " ".join(row["libraries"]) or "compiled in"
            notice.write("%-28s %-16s %-26s %s\n" % (row["package"], row["source"], row["source_version"], libraries))
    with open(os.path.join(folder, "packages.json"), "w", encoding="utf-8") as file:
        json.dump(rows, file, indent=1)


def packages_of(wheel):
    """What `collect` wrote into the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return json.loads(archive.read(IN_WHEEL + "packages.json"))


def check(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    carried = [os.path.basename(name) for name in names if re.match(r"refitd\.libs/[^/]", name)]
    if not carried:
        sys.exit("wheel_licenses: %s carries no library at all" % wheel)
    listed = {stem(library) for package in packages_of(wheel) for library in package["libraries"]}
    # libgrpc-1a2b3c4d.so.29.0.0 was libgrpc.so.29: the digits keep it apart from other copies in a process.
    differs = listed ^ {re.sub(r"-[0-9a-f]{8}$", "", stem(name)) for name in carried}
    if differs:
        sys.exit("wheel_licenses: in packages.json or in the wheel, but not in both: %s" % ", ".join(sorted(differs)))


def stem(library):
    """The beginning of a library's file name, up to its version."""
    return library.split(".so")[0]


def main(arguments):
    if len(arguments) >= 3 and arguments[0] == "collect":
        collect(arguments[1], arguments[2:])
    elif len(arguments) == 2 and arguments[0] == "check":
        check(arguments[1])
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
