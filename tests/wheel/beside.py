"""Loads refitd beside other packages that bring gRPC, Protobuf and Abseil of their own, and uses all of them at once.

usage: beside.py MODULE...      the order in which they are loaded: grpc, refitd, and torch where it is installed

Run by tests/wheel/test, once for each order. Two copies of a C++ library in one process go wrong where a symbol of one is
taken for that of the other, mostly with a crash.
"""

import concurrent.futures
import importlib
import struct
import sys
import threading

SECONDS = 60  # far longer than anything takes; only a failing test reaches this
ROUNDS = 20


def call_grpc():
    """Serves and calls an echo method, with messages of Protobuf."""
    import grpc
    from google.protobuf import struct_pb2

    def echo(request, context):
        return request

    handler = grpc.method_handlers_generic_handler("Echo", {"Echo": grpc.unary_unary_rpc_method_handler(
        echo, struct_pb2.Struct.FromString, struct_pb2.Struct.SerializeToString)})
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers([handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel("127.0.0.1:%d" % port) as channel:
            method = channel.unary_unary("/Echo/Echo", struct_pb2.Struct.SerializeToString, struct_pb2.Struct.FromString)
            for number in range(ROUNDS):
                message = struct_pb2.Struct()
                message["number"] = number
                assert method(message, timeout=SECONDS) == message
            try:
                channel.unary_unary("/Echo/None")(b"", timeout=SECONDS)
                raise AssertionError("a method that is not there answered")
            except grpc.RpcError as error:
                assert error.code() == grpc.StatusCode.UNIMPLEMENTED, error
    finally:
        server.stop(None).wait(SECONDS)


def push_versions():
    """Pushes versions into an engine of this process; a refused call must raise what its status says."""
    import refitd
    from refitd import testing

    spec = refitd.TensorSpec("w", "float32", (256,))
    destination = refitd.Region(1024)
    with testing.daemon() as daemon:
        with refitd.Trainer("policy", socket=daemon.socket) as trainer:
            with refitd.Engine("policy", instance="a", socket=daemon.socket) as engine:
                engine.register_layout([spec], [refitd.Box(0, (0,), (256,), (1,), refitd.RegionMemory(destination, 0, 1024))])
                held = []

                def serve():
                    for event in engine:
                        if isinstance(event, refitd.Prepare):
                            event.ready()
                        elif isinstance(event, refitd.Committed):
                            held.append(struct.unpack("<256f", destination[:1024])[7])
                            if event.version == ROUNDS:
                                return

                server = threading.Thread(target=serve)
                server.start()
                for version in range(1, ROUNDS + 1):
                    with trainer.update(version) as update:
                        update.push("w", struct.pack("<256f", *[float(version)] * 256), dtype="float32", shape=(256,))
                server.join(SECONDS)
                assert held == [float(version) for version in range(1, ROUNDS + 1)], held
            try:
                trainer.update(1)
                raise AssertionError("a version was taken twice")
            except refitd.FailedPrecondition:
                pass


def use_torch():
    import torch

    for _ in range(ROUNDS):
        a = torch.ones(64, 64)
        assert (a @ a).sum().item() == 64**3


def main(modules):
    for name in modules:
        importlib.import_module(name)
        if name == "refitd":
            sys.modules[name].__version__  # loads the library
    uses = {"grpc": call_grpc, "refitd": push_versions, "torch": use_torch}
    with concurrent.futures.ThreadPoolExecutor(len(modules)) as threads:
        for done in [threads.submit(uses[name]) for name in modules]:
            done.result()
    print("beside: %s" % " ".join("%s %s" % (name, sys.modules[name].__version__) for name in modules))


if __name__ == "__main__":
    main(sys.argv[1:])
