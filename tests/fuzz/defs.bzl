"""Fuzz targets: under the normal configurations a test that replays a corpus, under --config=fuzz a libFuzzer binary."""

load("//tests:one_thread.bzl", "one_thread_args", "one_thread_tags")

def cc_fuzz_test(name, srcs, corpus = [], prefixes = 64, dictionary = None, deps = []):
    """A fuzz target.

    Its corpus is in corpus/NAME: seeds as `corpus` names them, and what fuzzing found in corpus/NAME/found.

    Args:
      name: target name; tools/fuzz finds the corpus by it.
      srcs: sources that define LLVMFuzzerTestOneInput.
      corpus: labels of the seeds, usually a proto_corpus.
      prefixes: of each file, evenly spread, how many the test runs beside the whole.
      dictionary: libFuzzer's -dict, named NAME.dict.
      deps: what srcs need.
    """
    if dictionary and dictionary != name + ".dict":
        fail("dictionary must be %s.dict: tools/fuzz looks for that" % name)
    native.cc_test(
        name = name,
        size = "medium",
        srcs = srcs + select({
            "//tests/fuzz:libfuzzer": [],
            "//conditions:default": ["//tests/fuzz:replay_main.cc"],
        }),
        args = one_thread_args(name) + [str(prefixes), native.package_name() + "/corpus/" + name],
        data = corpus + native.glob(["corpus/%s/found/*" % name], allow_empty = True) +
               ([dictionary] if dictionary else []) + ["//tools:tsan.supp"],
        tags = one_thread_tags(name),
        linkopts = select({
            "//tests/fuzz:libfuzzer": ["-fsanitize=fuzzer"],
            "//conditions:default": [],
        }),
        linkstatic = True,
        deps = deps + ["//tests:one_thread"],
    )

def proto_corpus(name, message, protos, import_roots = ["proto"]):
    """Seeds from text: each corpus/X/*.textproto becomes a .bin, the same message serialised. X is `name` without "_corpus".

    Args:
      name: target name, X_corpus.
      message: full name of the message type.
      protos: labels of the .proto files; the first defines `message`.
      import_roots: folders, relative to the workspace, that import statements start from.
    """
    folder = "corpus/" + name[:-len("_corpus")]
    srcs = native.glob([folder + "/*.textproto"])
    outs = [src[:-len(".textproto")] + ".bin" for src in srcs]
    for src, out in zip(srcs, outs):
        native.genrule(
            name = out + "_gen",
            srcs = [src] + protos,
            outs = [out],
            cmd = "/usr/bin/protoc %s --encode=%s $(location %s) < $(location %s) > $@" % (
                " ".join(["-I" + root for root in import_roots]),
                message,
                protos[0],
                src,
            ),
        )
    native.filegroup(
        name = name,
        srcs = outs,
    )
