"""What the supervisor and the members say to each other: typed records as MessagePack, one a frame.

A member's ZeroMQ identity is its number and the run's token, so who has lost its way is not heard;
strangers do not reach the socket (`comm/wire.py`). Messages that belong to a generation carry it,
and those of an older one are ignored.
"""

from typing import Any

import msgspec

from shoal.plans.size import Size


class FromMember(msgspec.Struct, frozen=True, tag_field="say"):
    pass


class Ready(FromMember, frozen=True, tag="ready"):
    """I can take a seat. `recovers` is false when a plan cannot do without any one rank."""

    pid: int
    recovers: bool = True


class Here(FromMember, frozen=True, tag="here"):
    """I have left every older group."""

    generation: int


class Formed(FromMember, frozen=True, tag="formed"):
    """The group of this generation holds the state after `step`."""

    generation: int
    step: int


class Lost(FromMember, frozen=True, tag="lost"):
    """The group of this generation broke under me."""

    generation: int
    step: int
    why: str


class Beat(FromMember, frozen=True, tag="beat"):
    """I am alive; `step` is what I have committed, `progress` what a person wants to see. `stops`:
    I was told to end; `at`: and this is where I work, if I do not wait for somebody. `work` is
    another number each time that something was done."""

    step: int
    progress: dict[str, Any] | None = None
    stops: bool = False
    work: int = 0
    at: str = ""


class Note(FromMember, frozen=True, tag="note"):
    """Something for the run's record."""

    event: str
    what: dict[str, Any]


class Done(FromMember, frozen=True, tag="done"):
    """I have nothing left to do, and wait to be let go."""

    generation: int
    step: int
    summary: dict[str, Any]


class Met(FromMember, frozen=True, tag="met"):
    """I wait after `step`; or, of a server: what each server will hold is written down, and so
    many bytes of it move, or there is a problem."""

    generation: int
    step: int = -1
    num_bytes: int = 0
    problem: str = ""


class Failed(FromMember, frozen=True, tag="failed"):
    """The recipe's own code failed here, or on `ranks`: who finds it need not be who did it."""

    step: int
    message: str
    trace: str
    exit_code: int
    ranks: tuple[int, ...] = ()


class FromSupervisor(msgspec.Struct, frozen=True, tag_field="say"):
    pass


class TakeSeat(FromSupervisor, frozen=True, tag="seat"):
    """Leave what you are in; this is your place in the next generation."""

    generation: int
    seat: int
    sizes: tuple[Size, ...]  # that the run had, the last one now
    store: str  # its address

    @property
    def num_ranks(self) -> int:
        return self.sizes[-1].num_ranks

    @property
    def num_servers(self) -> int:
        return self.sizes[-1].num_servers

    @property
    def server(self) -> int | None:
        """The number of the server whose place it is."""
        return self.sizes[-1].server_of(self.seat)


class Go(FromSupervisor, frozen=True, tag="go"):
    """All are here: form the group."""

    generation: int


class Stop(FromSupervisor, frozen=True, tag="stop"):
    """Agree with the others on a step after which to stop."""


class Meet(FromSupervisor, frozen=True, tag="meet"):
    """Agree with the others on a step after which to wait for the next generation."""

    generation: int


class Part(FromSupervisor, frozen=True, tag="part"):
    """You are a server, and all ranks wait: write down what each of so many servers will hold."""

    generation: int
    num_servers: int


class Leave(FromSupervisor, frozen=True, tag="leave"):
    """You may exit."""


MemberMessage = Ready | Here | Formed | Lost | Beat | Note | Done | Met | Failed
SupervisorMessage = TakeSeat | Go | Stop | Meet | Part | Leave

encode = msgspec.msgpack.Encoder().encode
FROM_MEMBER: msgspec.msgpack.Decoder[MemberMessage] = msgspec.msgpack.Decoder(MemberMessage)
FROM_SUPERVISOR: msgspec.msgpack.Decoder[SupervisorMessage] = msgspec.msgpack.Decoder(
    SupervisorMessage
)
