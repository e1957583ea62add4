"""Actions that `membership.py` returns and `supervisor.py` carries out; and a member's state."""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.plans.resize import RunSize


class Spawn(NamedTuple):
    """Start a member, on one of the run's hosts."""

    member: int
    host: int = 0


class Kill(NamedTuple):
    member: int


class Announce(NamedTuple):
    """Send each seated member its seat in a new generation."""

    generation: int
    seats: tuple[int, ...]


class AllArrived(NamedTuple):
    """All seated members have arrived: let them form the group."""

    generation: int


class AllFormed(NamedTuple):
    """The group works. `replaced` has the seats that were refilled, and why; `None` stands for a
    host that was lost."""

    generation: int
    step: int
    num_steps_again: int  # done before, and to be repeated
    replaced: tuple[tuple[int | None, str], ...]
    lost_at: float | None


class AllDone(NamedTuple):
    """Release all members."""


class PauseRanks(NamedTuple):
    """Ask the ranks to wait after a step that they agree on."""

    generation: int


class RepartitionServers(NamedTuple):
    """Ask the servers to write their state for another number of servers, while all ranks wait."""

    generation: int
    num_servers: int


class Resized(NamedTuple):
    """The group of the new size works; release the members without a seat in it."""

    before: RunSize
    after: RunSize
    leavers: tuple[int, ...]
    paused_at: float  # when the first rank began to wait
    step: int  # after which the ranks waited


class NotResized(NamedTuple):
    """The group keeps its size."""

    cause: str


class HostGone(NamedTuple):
    """Record that a host was lost, and what the run does about it."""

    host: int
    how: str
    then: str


class HostAdded(NamedTuple):
    """Record that another host came, and what the run does with it."""

    host: int
    num_slots: int
    then: str


class GiveUp(NamedTuple):
    """End the run."""

    cause: str
    exit_code: int


Action = (
    Spawn
    | Kill
    | Announce
    | AllArrived
    | AllFormed
    | AllDone
    | GiveUp
    | PauseRanks
    | RepartitionServers
    | Resized
    | NotResized
    | HostGone
    | HostAdded
)


@dataclass
class MemberState:
    """What the supervisor knows of a member."""

    last_heard: float
    host: int = 0
    ready: bool = False
    suspected: str = ""  # why it was killed
