#!/usr/bin/python3
"""The licences of the libraries that the wheel carries: as Debian's packages state them.

usage: tools/wheel_licenses.py collect FOLDER BINARY...
           for each Debian package with a library that the binaries load: FOLDER/PACKAGE/copyright, and FOLDER/NOTICE, which
           lists packages, versions and libraries; licences that the texts refer to are added as FOLDER/common/NAME
       tools/wheel_licenses.py check WHEEL
           exit 1 unless NOTICE lists the libraries that the wheel carries, and no others
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile

COMMON = "/usr/share/common-licenses"
IN_WHEEL = "refitd/_licenses/"
# These libraries are not carried, since every Linux of the wheel's platform tag has them.
OF_THE_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|resolv|stdc\+\+|gcc_s|z)\.so\.|ld-linux")
HEAD = """refitd is licensed under the Apache License 2.0: the file LICENSE beside this.

The wheel also carries libraries of Debian 12. Their file names and search paths are changed, and in some the version of
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


def collect(folder, binaries):
    packages = {}
    for library in loaded_by(binaries):
        packages.setdefault(package_of(library), []).append(os.path.basename(library))
    rows = []
    common = set()
    for package, libraries in sorted(packages.items()):
        source, version = output(
            "dpkg-query", "-W", "-f", "${source:Package}\\t${source:Version}\\n", package).splitlines()[0].split("\t")
        rows.append((package, source, version, " ".join(sorted(libraries))))
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
        for row in [("package", "source", "version", "libraries"), *rows]:
            notice.write("%-28s %-16s %-26s %s\n" % row)


def check(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        notice = archive.read(IN_WHEEL + "NOTICE").decode().split()
    carried = [os.path.basename(name) for name in names if re.match(r"refitd\.libs/[^/]", name)]
    if not carried:
        sys.exit("wheel_licenses: %s carries no library at all" % wheel)
    listed = {stem(word) for word in notice if ".so" in word}
    # libgrpc-1a2b3c4d.so.29.0.0 was libgrpc.so.29: the digits keep it apart from other copies in a process.
    differs = listed ^ {re.sub(r"-[0-9a-f]{8}$", "", stem(name)) for name in carried}
    if differs:
        sys.exit("wheel_licenses: in the notice or in the wheel, but not in both: %s" % ", ".join(sorted(differs)))


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
