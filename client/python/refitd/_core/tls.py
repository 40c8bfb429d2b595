"""Certificates for a daemon that is reached over TCP."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ..errors import InvalidArgument


@dataclass(frozen=True)
class TLS:
    """The certificates by which a member and a daemon over TCP know each other.

        trainer = refitd.Trainer("policy", address="node-a:7411", tls=refitd.TLS("me.pem", "me.key", "roots.pem", "spiffe://prod/refitd/*"))

    `certificate`, `key`, `roots`: paths of PEM files: this member's certificate with the rest of its chain, its private key without a
    password, and the roots that sign daemons' certificates. The files are read anew for each lease. `server`: the identity that the
    daemon must have: "spiffe://DOMAIN/PATH", the same with a last part of "*" for all below, "dns:NAME" or "dns:*.DOMAIN".

    Fields that are None come from the environment: REFITD_TLS_CERTIFICATE, REFITD_TLS_KEY, REFITD_TLS_ROOTS and REFITD_TLS_SERVER. Without
    any server the daemon's certificate must be for the host of the address.
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
