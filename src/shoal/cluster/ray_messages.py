"""What `RayStarter` and the process that talks to Ray tell each other: lines of JSON over pipes."""

from typing import Literal

import msgspec

Strategy = Literal["PACK", "SPREAD"]


class RayNode(msgspec.Struct, frozen=True):
    """What a node offers."""

    name: str  # its address
    cpus: float
    free_cpus: float


class ConnectToRay(msgspec.Struct, frozen=True, tag=True):
    """The first order."""

    address: str  # as `ray.init` takes it
    connect_timeout_s: float


class AskForAgents(msgspec.Struct, frozen=True, tag=True):
    """Start so many agents, each with so many CPUs, and write the invitation to each."""

    invitation: bytes
    count: int
    cpus: float
    strategy: Strategy
    python: str  # that runs the agents; empty: that of Ray's workers
    variables: dict[str, str]  # of the agents, beside those that their node has


class ConnectedToRay(msgspec.Struct, frozen=True, tag=True):
    own_address: str  # at which the nodes reach this machine; empty if Ray does not know
    head: str  # host:port of Ray's first node
    nodes: list[RayNode]


class RayFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more will come."""

    why: str


class AgentEnded(msgspec.Struct, frozen=True, tag=True):
    how: str


class NoRoom(msgspec.Struct, frozen=True, tag=True):
    """Agents wait for resources; sent every few seconds, and once more when they have them."""

    asked: list[float]  # CPUs of each agent that waits; empty once none does
    nodes: list[RayNode]


ToRay = ConnectToRay | AskForAgents
FromRay = ConnectedToRay | RayFailed | AgentEnded | NoRoom

TO_RAY: msgspec.json.Decoder[ToRay] = msgspec.json.Decoder(ToRay)
FROM_RAY: msgspec.json.Decoder[FromRay] = msgspec.json.Decoder(FromRay)


def encode_line(message: ToRay | FromRay) -> bytes:
    return msgspec.json.encode(message) + b"\n"
