"""What the supervisor and the members say to each other: typed records as MessagePack, one a frame.

A member's ZeroMQ identity is its number and the run's token, so a stranger on the port is not
heard. Messages that belong to a generation carry it, and those of an older one are ignored.
"""

from typing import Any

import msgspec


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
    """I am alive; `step` is what I have committed, `progress` what a person wants to see."""

    step: int
    progress: dict[str, Any] | None = None


class Note(FromMember, frozen=True, tag="note"):
    """Something for the run's record."""

    event: str
    what: dict[str, Any]


class Done(FromMember, frozen=True, tag="done"):
    """I have nothing left to do, and wait to be let go."""

    generation: int
    step: int
    summary: dict[str, Any]


class Failed(FromMember, frozen=True, tag="failed"):
    """The recipe's own code failed here."""

    step: int
    message: str
    trace: str
    exit_code: int


class FromSupervisor(msgspec.Struct, frozen=True, tag_field="say"):
    pass


class TakeSeat(FromSupervisor, frozen=True, tag="seat"):
    """Leave what you are in; this is your place in the next generation."""

    generation: int
    seat: int
    num_seats: int
    store_port: int
    store_host: str = "127.0.0.1"


class Go(FromSupervisor, frozen=True, tag="go"):
    """All are here: form the group."""

    generation: int


class Stop(FromSupervisor, frozen=True, tag="stop"):
    """Agree with the others on a step after which to stop."""


class Leave(FromSupervisor, frozen=True, tag="leave"):
    """You may exit."""


MemberMessage = Ready | Here | Formed | Lost | Beat | Note | Done | Failed
SupervisorMessage = TakeSeat | Go | Stop | Leave

encode = msgspec.msgpack.Encoder().encode
decode_member = msgspec.msgpack.Decoder(MemberMessage).decode
decode_supervisor = msgspec.msgpack.Decoder(SupervisorMessage).decode
