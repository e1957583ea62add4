"""Which process is meant: its number, when it started, and since which boot of the machine.

Numbers are given out again, so a number alone may mean another process later. Linux only.
"""

import os
import signal
from contextlib import suppress
from pathlib import Path

import msgspec

_BOOT = Path("/proc/sys/kernel/random/boot_id")


class ProcessIdentity(msgspec.Struct, frozen=True):
    """A process that is or was."""

    pid: int
    started: int  # in the kernel's ticks since it booted
    boot: str


def boot_id() -> str:
    with suppress(OSError):
        return _BOOT.read_text().strip()
    return ""


def identify(pid: int) -> ProcessIdentity | None:
    """The process with this number now; None if there is none, or it has ended."""
    try:
        content = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    state, *rest = content.rpartition(")")[2].split()
    return None if state in "ZX" else ProcessIdentity(pid, int(rest[18]), boot_id())


def open_process(process: ProcessIdentity) -> int | None:
    """A descriptor that can be read once the process has ended; None if it has."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return None
    if identify(process.pid) == process:
        return descriptor
    os.close(descriptor)
    return None


def send_signal(process: ProcessIdentity, number: int) -> bool:
    """Send a signal to this process and to no other; False if it has ended."""
    descriptor = open_process(process)
    if descriptor is None:
        return False
    try:
        signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True
