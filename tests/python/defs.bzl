"""Tests in Python, run by the distribution's interpreter, whose grpcio and protobuf they need."""

def python_test(name, src, data = [], size = "medium", tags = []):
    native.sh_test(
        name = name,
        size = size,
        srcs = ["run.sh"],
        args = ["$(location %s)" % src],
        tags = tags,
        data = data + [
            src,
            "//tools:tsan.supp",  # TSAN_OPTIONS names it
        ],
    )
