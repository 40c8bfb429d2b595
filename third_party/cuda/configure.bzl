"""Finds the headers of a CUDA toolkit: @local_cuda//:headers.

With a toolkit, the target holds its cuda.h and defines REFITD_CUDA=1; without one it is empty, and what depends on it
builds without CUDA. Nothing is linked: the driver is loaded at run time. Nothing is fetched.

  REFITD_CUDA=off  in the environment of a build: without CUDA, whatever is installed
  CUDA_HOME=DIR    the toolkit to use; then no other place is searched

The rule runs again when one of these variables changes and when a Bazel server starts. PATH plays no part: .bazelrc
fixes it, so that two shells build the same.
"""

# The newest toolkit of NVIDIA's installers, then a distribution's package.
_PLACES = ["/usr/local/cuda/include", "/usr/include"]

_WITH = """\
package(default_visibility = ["//visibility:public"])

# The driver API's one header: it includes nothing of the toolkit.
cc_library(
    name = "headers",
    hdrs = ["include/cuda.h"],
    defines = ["REFITD_CUDA=1"],
    includes = ["include"],
)
"""

_WITHOUT = """\
package(default_visibility = ["//visibility:public"])

# {reason}
cc_library(name = "headers")
"""

def _without(reason):
    return _WITHOUT.format(reason = reason)

def _local_cuda_impl(repository_ctx):
    environ = repository_ctx.os.environ
    switch = environ.get("REFITD_CUDA", "")
    if switch not in ["", "off"]:
        fail("REFITD_CUDA is %r: only 'off' has a meaning" % switch)
    if switch == "off":
        repository_ctx.file("BUILD.bazel", _without("REFITD_CUDA=off"))
        return

    home = environ.get("CUDA_HOME", "")
    places = [home + "/include"] if home else _PLACES
    for place in places:
        header = repository_ctx.path(place + "/cuda.h")
        if header.exists:
            repository_ctx.symlink(header, "include/cuda.h")
            repository_ctx.file("BUILD.bazel", _WITH)
            return

    if home:
        # Asked for by name: worth a word, but no reason to stop.
        # buildifier: disable=print
        print("CUDA_HOME is %s, which has no include/cuda.h: building without CUDA" % home)
    repository_ctx.file("BUILD.bazel", _without("no cuda.h in " + ", ".join(places)))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    configure = True,
    environ = ["CUDA_HOME", "REFITD_CUDA"],
    local = True,
)
