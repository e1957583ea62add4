"""Messages between the supervisor and the members: typed records as MessagePack, one a frame.

A member's ZeroMQ identity is its number and the run's token, so the supervisor ignores members of
other runs; other processes cannot reach the socket (`comm/wire.py`). Messages of a generation carry
its number, and the receiver ignores those of an older one. Read next: `seat.py` sends the first
half, `supervisor.py` the second.
"""

from typing import Any

import msgspec

from shoal.comm.flight_recorder import Standing
from shoal.events.events import Event, HostUseEvent, ProgressEvent
from shoal.plans.resize import RunSize


class FromMember(msgspec.Struct, frozen=True, tag_field="say"):
    pass


class Ready(FromMember, frozen=True, tag="ready"):
    """I can take a seat. `recovers`: the plan can replace a rank that dies, as far as is known."""

    pid: int
    recovers: bool = True


class Arrived(FromMember, frozen=True, tag="arrived"):
    """I have left every older group."""

    generation: int


class Formed(FromMember, frozen=True, tag="formed"):
    """The group of this generation holds the state after `step`. `recovers`: whether a rank of it
    can be replaced, if that is known only now."""

    generation: int
    step: int
    recovers: bool | None = None


class Lost(FromMember, frozen=True, tag="lost"):
    """The group of this generation broke."""

    generation: int
    step: int
    why: str
    is_late: bool = False  # by a deadline alone: no member may be gone


class Heartbeat(FromMember, frozen=True, tag="heartbeat"):
    """I am alive. `step` is the last committed one, `progress` is for the screen. `work` grows with
    all that I complete. `stops`: I was asked to stop; `at` is then the line I am at, if I do not
    wait for another member. `standing` is sent while no collective begins or ends."""

    step: int
    progress: ProgressEvent | None = None
    stops: bool = False
    work: int = 0
    at: str = ""
    standing: Standing | None = None


class MemberEvent(FromMember, frozen=True, tag="event"):
    """An event for the run's events.jsonl."""

    event: Event


class MemberDone(FromMember, frozen=True, tag="done"):
    """I have completed all work and wait for `Release`."""

    generation: int
    step: int
    summary: dict[str, Any]


class Paused(FromMember, frozen=True, tag="paused"):
    """A rank: I wait after `step`. A server: I wrote the files of the new partition, of which
    `num_bytes` move to other servers; or there was a problem."""

    generation: int
    step: int = -1
    num_bytes: int = 0
    problem: str = ""


class Failed(FromMember, frozen=True, tag="failed"):
    """The recipe's code failed here, or on `ranks`, if another rank found the failure."""

    step: int
    message: str
    trace: str
    exit_code: int
    ranks: tuple[int, ...] = ()


class FromSupervisor(msgspec.Struct, frozen=True, tag_field="say"):
    pass


class SeatAssignment(FromSupervisor, frozen=True, tag="seat"):
    """Leave your group; this is your seat in the next generation."""

    generation: int
    seat: int
    sizes: tuple[RunSize, ...]  # all sizes of the run so far, the last one now
    store: str  # its address
    restarts: int = 0  # how often all began again, from a checkpoint and without a server's journal
    samples_host: bool = False  # this member tells what its host uses

    @property
    def num_ranks(self) -> int:
        return self.sizes[-1].num_ranks

    @property
    def num_servers(self) -> int:
        return self.sizes[-1].num_servers

    @property
    def server(self) -> int | None:
        """The number of the server in this seat; None for a rank."""
        return self.sizes[-1].server_of(self.seat)


class FormGroup(FromSupervisor, frozen=True, tag="form"):
    """All members have arrived: form the group."""

    generation: int


class StopAfterStep(FromSupervisor, frozen=True, tag="stop"):
    """Agree with the others on a step after which to stop."""


class PauseAfterStep(FromSupervisor, frozen=True, tag="pause"):
    """Agree with the others on a step after which to wait for the next generation."""

    generation: int


class SaveAfterStep(FromSupervisor, frozen=True, tag="save"):
    """Agree with the others on a step after which all save."""


class Repartition(FromSupervisor, frozen=True, tag="repartition"):
    """To a server, while all ranks wait: write the state, partitioned for so many servers."""

    generation: int
    num_servers: int


class HostUse(FromSupervisor, frozen=True, tag="host-use"):
    """To ranks, which may track it: what a host uses now."""

    use: HostUseEvent


class Release(FromSupervisor, frozen=True, tag="release"):
    """You may exit."""


MemberMessage = (
    Ready | Arrived | Formed | Lost | Heartbeat | MemberEvent | MemberDone | Paused | Failed
)
SupervisorMessage = (
    SeatAssignment
    | FormGroup
    | StopAfterStep
    | PauseAfterStep
    | SaveAfterStep
    | Repartition
    | HostUse
    | Release
)

encode = msgspec.msgpack.Encoder().encode
FROM_MEMBER: msgspec.msgpack.Decoder[MemberMessage] = msgspec.msgpack.Decoder(MemberMessage)
FROM_SUPERVISOR: msgspec.msgpack.Decoder[SupervisorMessage] = msgspec.msgpack.Decoder(
    SupervisorMessage
)
