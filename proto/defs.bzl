"""C++ messages and gRPC stubs from .proto files, by the distribution's protoc and plugins."""

def cc_grpc_library(name, srcs, import_root, visibility = None, deps = []):
    """A cc_library with the .pb and .grpc.pb code of `srcs`.

    Args:
      name: target name.
      srcs: .proto files below `import_root`.
      import_root: folder, relative to the workspace, that import statements start from; includes start there as well.
      visibility: as usual.
      deps: further cc_library deps.
    """
    stems = [s[:-len(".proto")] for s in srcs]
    headers = [s + e for s in stems for e in (".pb.h", ".grpc.pb.h")]
    sources = [s + e for s in stems for e in (".pb.cc", ".grpc.pb.cc")]
    native.genrule(
        name = name + "_gen",
        srcs = srcs,
        outs = headers + sources,
        cmd = " ".join([
            "/usr/bin/protoc -I" + import_root,
            "--cpp_out=$(RULEDIR)",
            "--grpc_out=$(RULEDIR)",
            "--plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin",
            "$(SRCS)",
        ]),
    )
    native.cc_library(
        name = name,
        srcs = sources,
        hdrs = headers,
        copts = ["-w"],
        includes = ["."],
        visibility = visibility,
        deps = deps + ["//third_party/system:grpc"],
    )

def py_grpc_library(name, srcs, import_root, visibility = None):
    """Python messages and gRPC stubs of `srcs`, for /usr/bin/python3 with the distribution's protobuf and grpcio.

    Args:
      name: target name: a filegroup for the data of tests; `import_root` goes on sys.path.
      srcs: .proto files below `import_root`.
      import_root: as in cc_grpc_library.
      visibility: as usual.
    """
    stems = [s[:-len(".proto")] for s in srcs]
    native.genrule(
        name = name + "_gen",
        srcs = srcs,
        outs = [s + e for s in stems for e in ("_pb2.py", "_pb2_grpc.py")],
        cmd = " ".join([
            "/usr/bin/protoc -I" + import_root,
            "--python_out=$(RULEDIR)",
            "--grpc_out=$(RULEDIR)",
            "--plugin=protoc-gen-grpc=/usr/bin/grpc_python_plugin",
            "$(SRCS)",
        ]),
    )
    native.filegroup(
        name = name,
        srcs = [":" + name + "_gen"],
        visibility = visibility,
    )
