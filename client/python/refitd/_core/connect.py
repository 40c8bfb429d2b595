"""How a member reaches its daemon, and what a group is: `Connect`, `TLS`, `GroupSpec`, and the C structures of these."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from . import abi as _abi
from ..errors import InvalidArgument
from ..layout.devices import connect_fields, on_host
from .native import text, texts

T = TypeVar("T")


def milliseconds(seconds: float | None, what: str) -> int:
    """Seconds as the library's milliseconds; None is its default, 0. At least 1 ms, so that no short time becomes the default."""
    if seconds is None:
        return 0
    if not 0 < seconds < 1e12:
        raise InvalidArgument(f"{what}: {seconds} seconds is not positive", culprit=what)
    return max(1, round(seconds * 1000))


def checked_version(version: int) -> int:
    """`version`, if it is an integer from 0 to 2^63 - 1; else raises InvalidArgument."""
    if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
        raise InvalidArgument(f"version: {version!r} is no integer from 0 to 2^63 - 1", culprit="version")
    return version


def checked_count(value: int, what: str, least: int = 0) -> int:
    """`value`, if it is an integer that C's int32 holds and not below `least`; else raises InvalidArgument."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise InvalidArgument(f"{what}: {value!r} is no integer from {least} to 2^31 - 1", culprit=what)
    return value


@dataclass(frozen=True)
class TLS:
    """The certificates by which a member and a daemon over TCP know each other.

    Fields that are None come from the environment: REFITD_TLS_CERTIFICATE, REFITD_TLS_KEY, REFITD_TLS_ROOTS and REFITD_TLS_SERVER.
    The files are read anew for each lease.

    Attributes:
        certificate: The path of a PEM file with this member's certificate and the rest of its chain.
        key: The path of a PEM file with the certificate's private key, without a password.
        roots: The path of a PEM file with the roots that sign daemons' certificates.
        server: The identity that the daemon must have: "spiffe://DOMAIN/PATH", the same with a last part of "*" for all below,
            "dns:NAME" or "dns:*.DOMAIN". Without any, the daemon's certificate must be for the host of the address.
    """

    certificate: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    roots: str | os.PathLike[str] | None = None
    server: str | None = None

    def fields(self) -> dict[str, bytes | None]:
        """The fields of refit_connect_options. Raises InvalidArgument, naming the one that is no text."""
        return {f"tls_{name}": _encoded(f"tls.{name}", getattr(self, name)) for name in ("certificate", "key", "roots", "server")}


def _encoded(what: str, value: str | os.PathLike[str] | None) -> bytes | None:
    if value is None:
        return None
    try:
        given = os.fspath(value)
    except TypeError:
        given = None
    if not isinstance(given, str) or not given or "\0" in given:
        raise InvalidArgument(f"{what}: {value!r} is no text", culprit=what)
    return os.fsencode(given)


@dataclass(frozen=True)
class Connect:
    """How a member reaches its daemon, and how long it waits.

        trainer = refitd.Trainer("policy", connect=refitd.Connect(address="node-a:7411", tls=refitd.TLS("me.pem", "me.key", "roots.pem")))

    Attributes:
        socket: The path of the daemon's socket; None: REFITD_SOCKET, else /run/refitd/refitd.sock.
        coordinator: "HOST:PORT" of the daemon that has the group; None: this one. It is one name, which the daemon resolves anew
            whenever it joins the group.
        wait_seconds: How long daemon and group are waited for (10).
        call_margin_seconds: Added to what remains of an update as the deadline of its calls (5).
        reattach_seconds: How long a daemon that went away is looked for, to attach again; None: the lease's end is the end.
        silence_seconds: A daemon that is silent for this long is lost (30).
        client: Free text for status pages.
        address: "HOST:PORT" of the daemon, in place of `socket`, for trainers. Over TCP nothing shares memory: the rank can push, in
            calls of at most 1 MiB each, and can't register.
        tls: The certificates that TCP takes; None: those that the environment names.
        insecure: Whether TCP without certificates is allowed, for laboratories.
    """

    socket: str | None = None
    coordinator: str | None = None
    wait_seconds: float | None = None
    call_margin_seconds: float | None = None
    reattach_seconds: float | None = None
    silence_seconds: float | None = None
    client: str | None = None
    address: str | None = None
    tls: TLS | None = None
    insecure: bool = False

    def to(self, socket: str | None) -> Connect:
        """This, to the daemon at `socket` where that is given. Raises InvalidArgument where this names a daemon as well."""
        if socket is None:
            return self
        if self.socket is not None:
            raise InvalidArgument(f"both socket {socket!r} and connect.socket {self.socket!r} are given", culprit="socket")
        return replace(self, socket=socket)

    def structure(self, group: str, device: str | None, spec: _abi.refit_group_spec | None = None) -> _abi.refit_connect_options:
        """The C structure. What it points to lives as long as the structure does."""
        texts_ = {name: getattr(self, name) for name in ("socket", "coordinator", "client", "address")}
        for name, value in {"group": group, "device": device, **texts_}.items():
            if value is not None and (not isinstance(value, str) or "\0" in value):
                raise InvalidArgument(f"{name}: {value!r} is no text", culprit=name)
        self._check_tcp()
        times = ("wait", "call_margin", "reattach", "silence")
        made = _abi.sized(
            _abi.refit_connect_options,
            group=text(group),
            device=text(None if on_host(device) else device),
            insecure=int(self.insecure),
            **{name: text(value) for name, value in texts_.items()},
            **{f"{name}_ms": milliseconds(getattr(self, f"{name}_seconds"), f"{name}_seconds") for name in times},
            **connect_fields(),
            **({} if self.tls is None else self.tls.fields()),
        )
        if spec is not None:
            made.spec = ctypes.pointer(spec)
        return made

    def _check_tcp(self) -> None:
        if self.tls is not None and not isinstance(self.tls, TLS):
            raise InvalidArgument(f"tls: {self.tls!r} is no refitd.TLS", culprit="tls")
        if self.address is None and (self.tls is not None or self.insecure):
            given = "insecure" if self.tls is None else "tls"
            raise InvalidArgument(f"{given} is for a daemon over TCP, and no address is given", culprit=given)
        if self.address is not None and self.socket is not None:
            raise InvalidArgument(f"both socket {self.socket!r} and address {self.address!r} are given", culprit="address")


@dataclass(frozen=True)
class GroupSpec:
    """What a group is beside its name and its number of trainer ranks. The first rank makes the group; the others bring an equal spec.

    Attributes:
        min_instances: How many engine instances an update waits for.
        slot_bytes: Bytes of a staging slot, a multiple of 4,096; None: the daemon's default.
        slots: How many staging slots there are, 2 to 64; None: the daemon's default.
        engine_only_tensors: Patterns of names that trainers never bring.
        unwanted_tensors: Patterns of names that no engine need want, pushed or registered.
        max_lag: How far an instance's version may be behind the group's while the instance counts as ready.
        encrypted_data: Whether bytes cross between daemons encrypted or not at all: daemons that can't are refused, and so are GPUs
            over several daemons.
    """

    min_instances: int = 1
    slot_bytes: int | None = None
    slots: int | None = None
    engine_only_tensors: Sequence[str] = ()
    unwanted_tensors: Sequence[str] = ()
    max_lag: int = 0
    encrypted_data: bool = False

    def structure(self, world_size: int) -> _abi.refit_group_spec:
        """The C structure, of a group with `world_size` trainer ranks."""
        engine_only = _names_of(self.engine_only_tensors, "engine_only_tensors")
        unwanted = _names_of(self.unwanted_tensors, "unwanted_tensors")
        return _abi.sized(
            _abi.refit_group_spec,
            trainer_ranks=checked_count(world_size, "world_size", 1),
            min_instances=checked_count(self.min_instances, "min_instances", 1),
            slot_bytes=0 if self.slot_bytes is None else self.slot_bytes,
            slots=0 if self.slots is None else checked_count(self.slots, "slots", 1),
            engine_only_count=len(engine_only),
            engine_only_tensors=texts(engine_only),
            unwanted_count=len(unwanted),
            unwanted_tensors=texts(unwanted),
            max_lag=checked_count(self.max_lag, "max_lag", 0),
            encrypted_data=1 if self.encrypted_data else 0,
        )


def _names_of(names: Sequence[str], what: str) -> list[str]:
    """The names as a list; raises InvalidArgument for a single text, whose characters would be taken for names."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise InvalidArgument(f"{what}: {names!r} is no list of names", culprit=what)
    return list(names)


def made_of(kind: type[T], given: T | Mapping[str, Any], where: str) -> T:
    """A Connect, a GroupSpec or other dataclass of the fields that a framework's configuration gives.

    Raises:
        InvalidArgument: There is no field of a name in `given`; `where` names the place in the configuration.
    """
    if isinstance(given, kind):
        return given
    assert isinstance(given, Mapping)
    known = {field.name for field in fields(kind)}
    for name in given:
        if name not in known:
            raise InvalidArgument(f"{where}.{name}: there is no such option", culprit=name)
    return kind(**given)
