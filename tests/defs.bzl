"""Test rules: Catch2 tests. Fuzz targets have theirs in //tests/fuzz:defs.bzl."""

def refitd_test(name, srcs, deps = [], data = [], size = "small", **kwargs):
    """A Catch2 test; each TEST_CASE's name is a sentence that states the behaviour."""
    native.cc_test(
        name = name,
        srcs = srcs,
        size = size,
        # Only a static link records the distribution's libraries that our own ones use.
        linkstatic = True,
        # TSAN_OPTIONS names it, relative to where tests run.
        data = data + ["//tools:tsan.supp"],
        deps = deps + ["//tests:catch_main"],
        **kwargs
    )
