"""Finds a CUDA toolkit: its headers, @local_cuda//:headers, and its compiler, @local_cuda//:defs.bzl.

With a toolkit, the target holds its cuda.h and defines REFITD_CUDA=1; without one it is empty, and what depends on it
builds without CUDA. Nothing is linked: the driver is loaded at run time. Nothing is fetched.

@local_cuda//:nccl_header holds the toolkit's nccl.h, with what it includes, and defines REFITD_NCCL_HEADER=1; it is empty
where there is none. One test compares the project's own declarations with it; nothing else may depend on it.

The compiler is bin/nvcc beside the header, from CUDA 12 on (C++20); NVCC is its absolute path, or "" where there is none:
kernels.bzl beside this file builds with it. The headers alone are enough for all but the kernels.

  REFITD_CUDA=off  in the environment of a build: without CUDA, whatever is installed
  CUDA_HOME=DIR    the toolkit to use; then no other place is searched

The rule runs again when one of these variables changes and when a Bazel server starts. PATH plays no part: .bazelrc
fixes it, so that two shells build the same.
"""

# The first place is that of NVIDIA's installers, the second that of a distribution's package.
_PLACES = ["/usr/local/cuda/include", "/usr/include"]

_WITH = """\
package(default_visibility = ["//visibility:public"])

exports_files(["nvcc_version.txt"])

# cuda.h is the driver API's one header, and includes nothing of the toolkit.
cc_library(
    name = "headers",
    hdrs = ["include/cuda.h"],
    defines = ["REFITD_CUDA=1"],
    includes = ["include"],
)
"""

_NCCL = """
cc_library(
    name = "nccl_header",
    hdrs = glob([
        "toolkit/*.h",
        "toolkit/*.hpp",
        "toolkit/crt/*.h",
        "toolkit/crt/*.hpp",
        "toolkit/nv/**",
    ]),
    defines = ["REFITD_NCCL_HEADER=1"],
    includes = ["toolkit"],
)
"""

_NO_NCCL = """
cc_library(name = "nccl_header")
"""

_WITHOUT = """\
package(default_visibility = ["//visibility:public"])

exports_files(["nvcc_version.txt"])

# {reason}
cc_library(name = "headers")
"""

_DEFS = """\
NVCC = {nvcc}
NVCC_ARCHITECTURES = {architectures}
NVCC_FLAGS = {flags}
"""

# Kernels have machine code for these architectures, as far as the compiler knows them, and PTX of the newest for later
# ones.
_ARCHITECTURES = ["80", "90", "100"]

def _without(reason):
    return _WITHOUT.format(reason = reason) + _NO_NCCL

def _with_header(repository_ctx, place):
    """The packages of a toolkit whose cuda.h lies in `place`."""
    if not repository_ctx.path(place + "/nccl.h").exists or not repository_ctx.path(place + "/cuda_runtime.h").exists:
        return _WITH + _NO_NCCL
    repository_ctx.symlink(place, "toolkit")
    return _WITH + _NCCL

def _define_nvcc(repository_ctx, nvcc, version, architectures, flags):
    # The version is an input of what nvcc compiles, since another compiler gives another result.
    repository_ctx.file("nvcc_version.txt", version)
    repository_ctx.file("defs.bzl", _DEFS.format(
        nvcc = repr(nvcc),
        architectures = repr(architectures),
        flags = repr(flags),
    ))

def _find_nvcc(repository_ctx, place):
    """Describes the compiler of the toolkit whose headers lie in `place`."""
    nvcc = repository_ctx.path(place).dirname.get_child("bin").get_child("nvcc")
    version = repository_ctx.execute([nvcc, "--version"]) if nvcc.exists else None
    codes = repository_ctx.execute([nvcc, "--list-gpu-code"]) if nvcc.exists else None
    if not version or version.return_code != 0 or codes.return_code != 0:
        return _define_nvcc(repository_ctx, "", "none", [], [])
    release = version.stdout.partition("release ")[2].partition(",")[0].split(".")
    if len(release) < 2 or not release[0].isdigit() or int(release[0]) < 12:
        return _define_nvcc(repository_ctx, "", version.stdout, [], [])
    known = codes.stdout.split("\n")
    architectures = [a for a in _ARCHITECTURES if "sm_" + a in known]
    if not architectures:
        return _define_nvcc(repository_ctx, "", version.stdout, [], [])
    small = int(release[0]) > 12 or (release[1].isdigit() and int(release[1]) >= 4)
    flags = ["--compress-mode=size"] if small else []
    return _define_nvcc(repository_ctx, str(nvcc), version.stdout, architectures, flags)

def _local_cuda_impl(repository_ctx):
    environ = repository_ctx.os.environ
    switch = environ.get("REFITD_CUDA", "")
    if switch not in ["", "off"]:
        fail("REFITD_CUDA is %r: only 'off' has a meaning" % switch)
    if switch == "off":
        repository_ctx.file("BUILD.bazel", _without("REFITD_CUDA=off"))
        _define_nvcc(repository_ctx, "", "none", [], [])
        return

    home = environ.get("CUDA_HOME", "")
    places = [home + "/include"] if home else _PLACES
    for place in places:
        header = repository_ctx.path(place + "/cuda.h")
        if header.exists:
            repository_ctx.symlink(header, "include/cuda.h")
            repository_ctx.file("BUILD.bazel", _with_header(repository_ctx, place))
            _find_nvcc(repository_ctx, place)
            return

    if home:
        # Somebody asked for this toolkit by name, which is worth a word, but no reason to stop.
        # buildifier: disable=print
        print("CUDA_HOME is %s, which has no include/cuda.h: building without CUDA" % home)
    repository_ctx.file("BUILD.bazel", _without("no cuda.h in " + ", ".join(places)))
    _define_nvcc(repository_ctx, "", "none", [], [])

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    configure = True,
    environ = ["CUDA_HOME", "REFITD_CUDA"],
    local = True,
)
