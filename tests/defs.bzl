"""Test rules: Catch2 tests. Fuzz targets have theirs in //tests/fuzz:defs.bzl."""

load("//tests:one_thread.bzl", "one_thread_args", "one_thread_tags")

def refitd_test(name, srcs, deps = [], data = [], size = "small", args = [], tags = [], **kwargs):
    """A Catch2 test; each TEST_CASE's name is a sentence that states the behaviour."""
    native.cc_test(
        name = name,
        srcs = srcs,
        size = size,
        args = one_thread_args(name) + args,
        tags = one_thread_tags(name) + tags,
        # Only a static link records the distribution's libraries that our own ones use.
        linkstatic = True,
        # TSAN_OPTIONS names it, relative to where tests run.
        data = data + ["//tools:tsan.supp"],
        deps = deps + ["//tests:catch_main"],
        **kwargs
    )
