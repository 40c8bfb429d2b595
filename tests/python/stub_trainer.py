"""A trainer made of nothing but the generated stub, with the model of client/examples/values.h as inline bytes."""

import queue
import struct

from refitd.v1 import trainer_pb2, trainer_pb2_grpc, types_pb2

SECONDS = 30  # deadline of each call
LEASE_SECONDS = 300  # bounds the stream that is the lease
MASK = (1 << 64) - 1

# The name, dtype, shape and bytes an element of each tensor of client/examples/values.h.
MODEL = [
    ("embed.weight", types_pb2.DTYPE_FLOAT32, [640, 48], 4),
    ("layer.weight", types_pb2.DTYPE_BFLOAT16, [96, 80], 2),
    ("layer.bias", types_pb2.DTYPE_FLOAT32, [96], 4),
    ("steps", types_pb2.DTYPE_INT64, [3], 8),
]


def elements(shape):
    count = 1
    for dim in shape:
        count *= dim
    return count


def tensor_bytes(version, tensor):
    """The bytes of a tensor of MODEL, as example_fill writes them."""
    _, _, shape, size = MODEL[tensor]
    out = bytearray()
    for index in range(elements(shape)):
        x = (version * 0x9E3779B97F4A7C15 + (tensor + 1) * 0xD1342543DE82EF95 + index * 0x2545F4914F6CDD1D) & MASK
        x ^= x >> 32
        x = (x * 0xDA942042E4DD58B5) & MASK
        out += struct.pack("<Q", x ^ (x >> 29))[:size]
    return bytes(out)


def new_bucket(seq, tensors):
    bucket = types_pb2.Bucket(seq=seq)
    for tensor in tensors:
        name, dtype, shape, _ = MODEL[tensor]
        bucket.names.append(name)
        bucket.dtypes.append(dtype)
        bucket.shapes.add(dims=shape)
    return bucket


def unpacked(seq, version, tensors):
    """A bucket without `sizes` and `packed`."""
    bucket = new_bucket(seq, tensors)
    bucket.inline_bytes.chunks.extend(tensor_bytes(version, t) for t in tensors)
    return bucket


def packed(seq, version, tensors):
    bucket = new_bucket(seq, tensors)
    bucket.packed = True
    bucket.sizes.extend(elements(MODEL[t][2]) for t in tensors)
    bucket.inline_bytes.chunks.append(b"".join(tensor_bytes(version, t) for t in tensors))
    return bucket


def part(seq, version, tensor, start, count):
    bucket = new_bucket(seq, [tensor])
    size = MODEL[tensor][3]
    bucket.starts.append(start)
    bucket.sizes.append(count)
    bucket.inline_bytes.chunks.append(tensor_bytes(version, tensor)[start * size : (start + count) * size])
    return bucket


class StubTrainer:
    """Attach and the unary calls, each with a deadline."""

    def __init__(self, channel, group, instances):
        self.stub = trainer_pb2_grpc.TrainerStub(channel)
        self.outgoing = queue.Queue()
        self.outgoing.put(
            trainer_pb2.TrainerMessage(
                hello=trainer_pb2.TrainerHello(
                    protocol=types_pb2.PROTOCOL_VERSION_1,
                    group=group,
                    spec=types_pb2.GroupSpec(trainer_ranks=1, min_instances=instances),
                    rank=0,
                    world_size=1,
                    client="stub_trainer",
                )
            )
        )
        # The stream is the lease: it stays open until detach().
        self.events = self.stub.Attach(iter(self.outgoing.get, None), timeout=LEASE_SECONDS)
        self.welcome = next(self.events).welcome
        self.lease = self.welcome.lease

    def begin(self, version):
        return self.stub.Begin(
            trainer_pb2.BeginRequest(
                lease=self.lease, version=version, duration_ms=SECONDS * 1000, tensor_count=len(MODEL)
            ),
            timeout=SECONDS,
        )

    def push(self, version, bucket):
        return self.stub.PushBucket(
            trainer_pb2.PushBucketRequest(lease=self.lease, version=version, bucket=bucket), timeout=SECONDS
        )

    def commit(self, version, buckets):
        return self.stub.Commit(
            trainer_pb2.CommitRequest(lease=self.lease, version=version, bucket_count=buckets), timeout=SECONDS
        )

    def abort(self, version, reason):
        return self.stub.Abort(
            trainer_pb2.AbortRequest(lease=self.lease, version=version, reason=reason), timeout=SECONDS
        )

    def detach(self):
        self.outgoing.put(trainer_pb2.TrainerMessage(detach=trainer_pb2.TrainerDetach()))
        self.outgoing.put(None)
