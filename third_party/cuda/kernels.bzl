"""Kernels: CUDA source in, machine code embedded in a C++ function out."""

load("@local_cuda//:defs.bzl", "NVCC", "NVCC_ARCHITECTURES", "NVCC_FLAGS")

_WITHOUT = """\
cat >$@ <<'END'
#include <string_view>
namespace refitd { std::string_view %s(); }
std::string_view refitd::%s() { return {}; }
END
"""

# All outputs of the package share $(@D), so the binary lies beside the source, under the rule's own name.
_WITH = """\
%s --fatbin -std=c++20 -O3 -I. -Werror all-warnings %s -o $@.fatbin $(location %s)
{
cat <<'END'
#include <string_view>
namespace refitd { std::string_view %s(); }
namespace { alignas(64) const unsigned char kImage[] = {
END
od -An -v -tx1 $@.fatbin | sed -e 's/ \\(..\\)/0x\\1,/g'
cat <<'END'
}; }
std::string_view refitd::%s() {
  return {reinterpret_cast<const char*>(kImage), sizeof(kImage)};
}
END
} >$@
rm $@.fatbin
"""

def nvcc_found():
    return NVCC != ""

def cuda_image(name, src, hdrs, function):
    """The file `name`.cc, which defines std::string_view refitd::function(): a fat binary of `src`.

    Without nvcc the function returns nothing, and the rest builds all the same.

    Args:
      name: of the rule.
      src: the CUDA source.
      hdrs: what it includes.
      function: declared by a header of the project.
    """
    gencode = ["-gencode=arch=compute_%s,code=sm_%s" % (a, a) for a in NVCC_ARCHITECTURES]
    if NVCC_ARCHITECTURES:
        newest = NVCC_ARCHITECTURES[-1]
        gencode.append("-gencode=arch=compute_%s,code=compute_%s" % (newest, newest))
    flags = " ".join(gencode + NVCC_FLAGS)
    native.genrule(
        name = name,
        srcs = [src] + hdrs + ["@local_cuda//:nvcc_version.txt"],
        outs = [name + ".cc"],
        cmd = _WITH % (NVCC, flags, src, function, function) if NVCC else _WITHOUT % (function, function),
    )
