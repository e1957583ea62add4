"""Named points at which a test can break things.

Nothing is armed in ordinary use, and a point then costs one comparison. A test launcher arms
points through the environment, as `point:action[:member=N][:step=K][:what=T]` separated by commas:
the action (kill, stop, raise, lose, full, exit, segfault, flip) happens once, in that member, at
that step. What `flip` corrupts is a bit of the first tensor that has `what` in its name, of those
that this process has exposed.
"""

import ctypes
import errno
import os
import signal
from collections.abc import Callable
from typing import NamedTuple

from shoal.errors import GroupLost

VARIABLE, FLIP = "SHOAL_FAULTS", "flip"


class Fault(NamedTuple):
    point: str
    action: str
    member: int | None
    step: int | None
    what: str = ""


class InjectedError(RuntimeError):
    """What `raise` raises: an error of the recipe's own, as far as anybody can tell."""


def _signal(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def _raise() -> None:
    raise InjectedError("a test broke this rank on purpose")


def _lose() -> None:
    raise GroupLost("a test broke the group on purpose")


def _full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# Of a tensor with this in its name: its address, its bytes, and those of an element.
Find = Callable[[str], tuple[int, int, int] | None]
_exposed: dict[str, Find] = {}  # by whose they are


def expose(whose: str, find: Find) -> None:
    """Let `flip` corrupt what this finds, from now on."""
    _exposed[whose] = find


def _flip(what: str) -> None:
    """In the middle of it, one of the higher bits of a mantissa; no process notices."""
    found = [place for find in _exposed.values() if (place := find(what)) is not None]
    if not found:
        raise InjectedError(f"there is no {what!r} to corrupt")
    address, num_bytes, size = found[0]
    element = address + num_bytes // size // 2 * size
    ctypes.c_ubyte.from_address(element + max(0, size - 2)).value ^= 0x20


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": _signal(signal.SIGKILL),
    "stop": _signal(signal.SIGSTOP),
    "segfault": _signal(signal.SIGSEGV),
    "abort": _signal(signal.SIGABRT),
    "raise": _raise,
    "lose": _lose,
    "full": _full,
    "exit": lambda: os._exit(0),
}

_armed: list[Fault] = []


def parse(text: str) -> list[Fault]:
    """Faults from the variable's text; raises ValueError for what is not one."""
    faults = []
    for part in filter(None, text.split(",")):
        point, action, *conditions = part.split(":")
        if action not in (*ACTIONS, FLIP):
            raise ValueError(f"{part!r}: the action is one of {', '.join([*ACTIONS, FLIP])}")
        where = dict(condition.split("=", 1) for condition in conditions)
        member, step = where.pop("member", None), where.pop("step", None)
        what = where.pop("what", "")
        if where:
            raise ValueError(f"{part!r}: unknown condition {', '.join(where)}")
        faults.append(
            Fault(point, action, int(member) if member else None, int(step) if step else None, what)
        )
    return faults


def arm(member: int) -> None:
    """Arm what the environment says for this member. Called once, as a rank's process starts."""
    _armed[:] = [f for f in parse(os.environ.get(VARIABLE, "")) if f.member in (None, member)]


def faultpoint(point: str, step: int | None = None) -> None:
    """Break here, if a test said so."""
    if _armed:
        for fault in _armed:
            if fault.point == point and fault.step in (None, step):
                _armed.remove(fault)
                if fault.action == FLIP:
                    _flip(fault.what)
                else:
                    ACTIONS[fault.action]()
                return
