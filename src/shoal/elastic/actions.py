"""What the supervisor is to do, as `membership.py` decides it; and what it knows of a member."""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.plans.size import Size


class Spawn(NamedTuple):
    """Start a member, on one of the run's hosts."""

    member: int
    host: int = 0


class Kill(NamedTuple):
    member: int


class Announce(NamedTuple):
    """Tell each seated member its place in a new generation."""

    generation: int
    seats: tuple[int, ...]


class AllHere(NamedTuple):
    """Tell the seated members to form the group."""

    generation: int


class AllFormed(NamedTuple):
    """The group works. `replaced` names the seats that were refilled and why."""

    generation: int
    step: int
    num_steps_again: int  # that were done, and are to be done again
    replaced: tuple[tuple[int, str], ...]
    lost_at: float | None


class AllDone(NamedTuple):
    """Let everybody go."""


class Meet(NamedTuple):
    """Ask the ranks to wait for each other after a step."""

    generation: int


class Part(NamedTuple):
    """Ask the servers to write down what each of so many will hold; all ranks wait."""

    generation: int
    num_servers: int


class Resized(NamedTuple):
    """The group of another size works; who has no seat in it may go."""

    before: Size
    after: Size
    leavers: tuple[int, ...]
    met_at: float  # from when ranks waited
    step: int  # after which they did


class NotResized(NamedTuple):
    """The group keeps its size."""

    cause: str


class GiveUp(NamedTuple):
    """End the run."""

    cause: str
    exit_code: int


Action = (
    Spawn
    | Kill
    | Announce
    | AllHere
    | AllFormed
    | AllDone
    | GiveUp
    | Meet
    | Part
    | Resized
    | NotResized
)


@dataclass
class Member:
    last_heard: float
    host: int = 0
    ready: bool = False
    suspected: str = ""
