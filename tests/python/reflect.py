"""Asks a gRPC server about itself by server reflection (v1alpha), and calls it, with no proto file: what grpcurl does, for
where grpcurl can't be had. Needs only the distribution's python3-grpcio and python3-protobuf.

    /usr/bin/python3 tests/python/reflect.py --unix SOCKET list
    /usr/bin/python3 tests/python/reflect.py --unix SOCKET describe SYMBOL
    /usr/bin/python3 tests/python/reflect.py --unix SOCKET call SERVICE/METHOD [JSON]

Exit code: 0; 2 wrong usage; 64 + the gRPC status code of a failed call, as grpcurl.
"""

import argparse
import sys

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory

SERVICE = "grpc.reflection.v1alpha.ServerReflection"


def _reflection_file():
    """The part of grpc/reflection/v1alpha/reflection.proto that is used here."""
    kinds = {"string": 9, "bytes": 12, "int32": 5}
    messages = {
        "Request": [("file_containing_symbol", 4, "string", False), ("list_services", 7, "string", False)],
        "Response": [
            ("file_descriptor_response", 4, "Files", False),
            ("list_services_response", 6, "Services", False),
            ("error_response", 7, "Error", False),
        ],
        "Files": [("file_descriptor_proto", 1, "bytes", True)],
        "Services": [("service", 1, "Service", True)],
        "Service": [("name", 1, "string", False)],
        "Error": [("error_code", 1, "int32", False), ("error_message", 2, "string", False)],
    }
    file = descriptor_pb2.FileDescriptorProto(name="reflection", package="reflection", syntax="proto3")
    for message_name, fields in messages.items():
        message = file.message_type.add(name=message_name)
        for name, number, kind, repeated in fields:
            field = message.field.add(name=name, number=number, label=3 if repeated else 1)
            if kind in kinds:
                field.type = kinds[kind]
            else:
                field.type, field.type_name = 11, ".reflection." + kind
            if message_name in ("Request", "Response"):  # presence, as in the oneof that they stand for
                message.oneof_decl.add(name="_" + name)
                field.oneof_index = len(message.oneof_decl) - 1
                field.proto3_optional = True
    return file


def _pool(files):
    """A descriptor pool of FileDescriptorProtos by name, dependencies first."""
    pool = descriptor_pool.DescriptorPool()
    added = set()

    def add(name):
        if name not in added:
            added.add(name)
            for dependency in files[name].dependency:
                add(dependency)
            pool.AddSerializedFile(files[name].SerializeToString())

    for name in files:
        add(name)
    return pool


def _class(pool, name):
    return message_factory.MessageFactory(pool).GetPrototype(pool.FindMessageTypeByName(name))


class ReflectionError(Exception):
    pass


class Reflection:
    """Not thread-safe. Methods raise ReflectionError (no such symbol) or grpc.RpcError."""

    def __init__(self, channel, timeout=30):
        self.channel = channel
        self.timeout = timeout
        pool = _pool({"reflection": _reflection_file()})
        self._request = _class(pool, "reflection.Request")
        self._response = _class(pool, "reflection.Response")

    def _ask(self, **fields):
        method = self.channel.stream_stream(
            "/%s/ServerReflectionInfo" % SERVICE,
            request_serializer=self._request.SerializeToString,
            response_deserializer=self._response.FromString,
        )
        response = next(method(iter([self._request(**fields)]), timeout=self.timeout))
        if response.HasField("error_response"):
            raise ReflectionError(response.error_response.error_message)
        return response

    def services(self):
        return sorted(s.name for s in self._ask(list_services="*").list_services_response.service)

    def find(self, symbol):
        """(pool, kind, descriptor) of a service, method ("Service.Method"), message or enum."""
        try:
            response = self._ask(file_containing_symbol=symbol)
        except ReflectionError as error:
            raise ReflectionError("%s: %s" % (symbol, error)) from None
        files = {}
        for data in response.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            files[file.name] = file
        pool = _pool(files)
        for kind, finder in (
            ("service", pool.FindServiceByName),
            ("message", pool.FindMessageTypeByName),
            ("enum", pool.FindEnumTypeByName),
        ):
            try:
                return pool, kind, finder(symbol)
            except KeyError:
                pass
        service, _, method = symbol.rpartition(".")
        try:
            return pool, "method", pool.FindServiceByName(service).methods_by_name[method]
        except KeyError:
            raise ReflectionError("Symbol not found: " + symbol) from None

    def describe(self, symbol):
        """Text in the proto language."""
        _, kind, descriptor = self.find(symbol)
        article = "an" if kind == "enum" else "a"
        return "%s is %s %s:\n%s" % (symbol, article, kind, _describe(kind, descriptor))

    def call(self, method, request_json="{}"):
        """Yields the responses of a unary or server-streaming "package.Service/Method", as messages."""
        service, slash, name = method.partition("/")
        if not slash:
            service, _, name = method.rpartition(".")
        pool, kind, descriptor = self.find(service)
        if kind != "service" or name not in descriptor.methods_by_name:
            raise ReflectionError("service %s has no method %s" % (service, name))
        proto = descriptor_pb2.ServiceDescriptorProto()
        descriptor.CopyToProto(proto)
        streams = next(m for m in proto.method if m.name == name)
        if streams.client_streaming:
            raise ReflectionError("%s streams requests: not supported here" % method)
        types = descriptor.methods_by_name[name]
        request = json_format.Parse(request_json, _class(pool, types.input_type.full_name)())
        make = self.channel.unary_stream if streams.server_streaming else self.channel.unary_unary
        stub = make(
            "/%s/%s" % (service, name),
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=_class(pool, types.output_type.full_name).FromString,
        )
        answer = stub(request, timeout=self.timeout)
        if streams.server_streaming:
            yield from answer
        else:
            yield answer


def _method(proto):
    stream = lambda on: "stream " if on else ""
    return "rpc %s ( %s%s ) returns ( %s%s );" % (
        proto.name,
        stream(proto.client_streaming),
        proto.input_type,
        stream(proto.server_streaming),
        proto.output_type,
    )


def _field(proto):
    names = descriptor_pb2.FieldDescriptorProto.Type.Name(proto.type)[len("TYPE_") :].lower()
    kind = proto.type_name if proto.type_name else names
    label = "repeated " if proto.label == 3 else "optional " if proto.proto3_optional else ""
    return "%s%s %s = %d;" % (label, kind, proto.name, proto.number)


def _message(proto):
    lines = ["message %s {" % proto.name]
    for index, field in enumerate(proto.field):
        first = index == 0 or proto.field[index - 1].oneof_index != field.oneof_index
        inside = field.HasField("oneof_index") and not field.proto3_optional
        before = index > 0 and proto.field[index - 1].HasField("oneof_index")
        if inside and (first or not before):
            lines.append("  oneof %s {" % proto.oneof_decl[field.oneof_index].name)
        lines.append(("    " if inside else "  ") + _field(field))
        last = index + 1 == len(proto.field) or not proto.field[index + 1].HasField("oneof_index")
        last = last or proto.field[index + 1].oneof_index != field.oneof_index
        if inside and last:
            lines.append("  }")
    return lines + ["}"]


def _describe(kind, descriptor):
    if kind == "method":
        proto = descriptor_pb2.ServiceDescriptorProto()
        descriptor.containing_service.CopyToProto(proto)
        return _method(next(m for m in proto.method if m.name == descriptor.name))
    makers = {
        "service": descriptor_pb2.ServiceDescriptorProto,
        "message": descriptor_pb2.DescriptorProto,
        "enum": descriptor_pb2.EnumDescriptorProto,
    }
    proto = makers[kind]()
    descriptor.CopyToProto(proto)
    if kind == "service":
        lines = ["service %s {" % proto.name] + ["  " + _method(m) for m in proto.method] + ["}"]
    elif kind == "enum":
        lines = ["enum %s {" % proto.name] + ["  %s = %d;" % (v.name, v.number) for v in proto.value] + ["}"]
    else:
        lines = _message(proto)
    return "\n".join(lines)


def _title(code):
    """grpcurl's spelling: NotFound."""
    return "".join(word.capitalize() for word in code.name.split("_"))


def _read(path):
    if path is None:
        return None
    with open(path, "rb") as file:
        return file.read()


def _channel(args):
    if args.cacert is None:
        return grpc.insecure_channel("unix:" + args.unix if args.unix else args.tcp)
    credentials = grpc.ssl_channel_credentials(_read(args.cacert), _read(args.key), _read(args.cert))
    return grpc.secure_channel(args.tcp, credentials)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--unix", metavar="SOCKET", help="path of a unix socket")
    where.add_argument("--tcp", metavar="HOST:PORT", help="address")
    parser.add_argument("--cacert", metavar="PEM", help="with --tcp: the roots that sign the server's certificate, for TLS")
    parser.add_argument("--cert", metavar="PEM", help="with --cacert: the caller's certificate")
    parser.add_argument("--key", metavar="PEM", help="with --cacert: its key")
    parser.add_argument("--timeout", type=float, default=30, metavar="SECONDS")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="names of all services")
    describe = commands.add_parser("describe", help="a service, method, message or enum in the proto language")
    describe.add_argument("symbol")
    call = commands.add_parser("call", help="a unary or server-streaming method")
    call.add_argument("method", metavar="SERVICE/METHOD")
    call.add_argument("json", nargs="?", default="{}")
    args = parser.parse_args(argv)

    try:
        with _channel(args) as channel:
            reflection = Reflection(channel, args.timeout)
            if args.command == "list":
                print("\n".join(reflection.services()))
            elif args.command == "describe":
                print(reflection.describe(args.symbol))
            else:
                for message in reflection.call(args.method, args.json):
                    print(json_format.MessageToJson(message), flush=True)
    except (ReflectionError, json_format.ParseError) as error:
        print("error: %s" % error, file=sys.stderr)
        return 2
    except grpc.RpcError as error:
        print("ERROR:\n  Code: %s\n  Message: %s" % (_title(error.code()), error.details()), file=sys.stderr)
        return 64 + error.code().value[0]
    return 0


if __name__ == "__main__":
    sys.exit(main())
