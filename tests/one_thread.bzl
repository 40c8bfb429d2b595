"""Tests that start no thread, so that ThreadSanitizer would find nothing in them; .ci/run leaves them out under it.

Each is told so (tests/one_thread.h), and fails where it does start one.
"""

_ONE_THREAD = [
    "//client:bucket_test",
    "//client:engine_state_test",
    "//client:events_test",
    "//client:packer_test",
    "//client:part_joiner_test",
    "//daemon/group:slot_ledger_test",
    "//daemon/link:messages_test",
    "//daemon/node:calls_test",
    "//daemon/node:group_spec_test",
    "//daemon/node:groups_test",
    "//daemon/node:members_test",
    "//daemon/node:peer_sessions_test",
    "//daemon/node:pending_attaches_test",
    "//daemon/node:watchers_readiness_test",
    "//daemon/node:watchers_test",
    "//daemon/policy:policy_test",
    "//daemon/policy:quota_test",
    "//daemon/process:log_limit_test",
    "//daemon/refitctl:format_test",
    "//daemon/refitctl:holder_test",
    "//daemon/refitctl:placement_test",
    "//daemon/refitctl:render_test",
    "//daemon/refitctl:safetensors_test",
    "//daemon/refitctl:slicing_test",
    "//daemon/services:noexcept_test",
    "//daemon/services:values_test",
    "//daemon/sockets:certificate_store_test",
    "//daemon/sockets:spare_descriptor_test",
    "//tests/fuzz:bucket",
    "//tests/fuzz:certificates",
    "//tests/fuzz:config",
    "//tests/fuzz:layouts",
    "//tests/fuzz:peer_command",
    "//tests/fuzz:peer_report",
    "//tests/fuzz:policy",
    "//tests/fuzz:safetensors",
    "//transport/cuda/nccl:abi_test",
    "//transport/cuda/nccl:nccl_test",
    "//transport/cuda:copy_kernel_test",
    "//transport/cuda:relay_plan_test",
    "//transport/digest:digest_test",
    "//transport/host:memory_test",
    "//transport/sockets:address_security_test",
    "//transport/sockets:connection_test",
    "//transport/sockets:tls_context_test",
    "//transport/tls:certificates_test",
    "//transport:broadcast_test",
]

def _is_one(name):
    return "//%s:%s" % (native.package_name(), name) in _ONE_THREAD

def one_thread_args(name):
    return ["--one-thread"] if _is_one(name) else []

def one_thread_tags(name):
    return ["one-thread"] if _is_one(name) else []
