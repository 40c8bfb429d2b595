"""Fuzz targets: under the normal configurations a test that replays a corpus, under --config=fuzz a libFuzzer binary."""

def cc_fuzz_test(name, srcs, corpus, deps = []):
    """A fuzz target.

    Args:
      name: target name; tools/fuzz finds the corpus by it, in corpus/NAME.
      srcs: sources that define LLVMFuzzerTestOneInput.
      corpus: labels of the corpus' files, usually a proto_corpus.
      deps: what srcs need.
    """
    native.cc_test(
        name = name,
        size = "small",
        srcs = srcs + select({
            "//tests/fuzz:libfuzzer": [],
            "//conditions:default": ["//tests/fuzz:replay_main.cc"],
        }),
        args = [native.package_name() + "/corpus/" + name],
        data = corpus + ["//tools:tsan.supp"],
        linkopts = select({
            "//tests/fuzz:libfuzzer": ["-fsanitize=fuzzer"],
            "//conditions:default": [],
        }),
        linkstatic = True,
        deps = deps,
    )

def proto_corpus(name, message, srcs, protos, import_root = "proto"):
    """Corpus files from text: each X.textproto becomes X.bin, the same message serialised.

    Args:
      name: target name.
      message: full name of the message type.
      srcs: .textproto files.
      protos: labels of the .proto files; the first defines `message`.
      import_root: as in cc_grpc_library.
    """
    outs = [src[:-len(".textproto")] + ".bin" for src in srcs]
    for src, out in zip(srcs, outs):
        native.genrule(
            name = out + "_gen",
            srcs = [src] + protos,
            outs = [out],
            cmd = "/usr/bin/protoc -I%s --encode=%s $(location %s) < $(location %s) > $@" % (
                import_root,
                message,
                protos[0],
                src,
            ),
        )
    native.filegroup(
        name = name,
        srcs = outs,
    )
