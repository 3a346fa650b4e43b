"""System calls that Python 3.11 does not wrap."""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

NAMESPACES = Path("/run/netns")  # where iproute2 keeps the named ones
NAMESPACE_FILES = Path("/etc/netns")  # NAME/hosts stands in for /etc/hosts inside NAME, as for `ip netns exec`

_CLONE_NEWNS, _CLONE_NEWNET = 0x00020000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def enter_network(namespace: str) -> None:
    """Move this process, while it has one thread, into a named network namespace and give it that one's host names."""
    handle = os.open(NAMESPACES / namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(handle, _CLONE_NEWNET), f"entering network namespace {namespace}")
    finally:
        os.close(handle)
    hosts = NAMESPACE_FILES / namespace / "hosts"
    if hosts.exists():
        _check(_libc.unshare(_CLONE_NEWNS), "leaving the machine's mounts")
        _check(_libc.mount(b"none", b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "making mounts private")
        _check(_libc.mount(bytes(hosts), b"/etc/hosts", None, ctypes.c_ulong(_MS_BIND), None), f"mounting {hosts}")


def die_with_parent(parent: int) -> None:
    """This process is killed when ``parent``, which forked it, ends; also when it ended before this call."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")
    if os.getppid() != parent:
        os._exit(1)


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None when it is no more. Tells a pid from its reuse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # from field 3 on; the name before it may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def processes_in_network(namespace: str) -> list[int]:
    """Processes inside a named network namespace; none when there is no such namespace."""
    try:
        wanted = (NAMESPACES / namespace).stat()
    except FileNotFoundError:
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            held = (entry / "ns" / "net").stat()
        except OSError:  # it ended meanwhile
            continue
        if (held.st_dev, held.st_ino) == (wanted.st_dev, wanted.st_ino):
            found.append(int(entry.name))
    return found
