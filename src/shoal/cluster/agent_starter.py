"""What starts host agents on other machines: ssh, srun, Ray, or a person who types `shoal join`.

An agent is the command `shoal agent`, which reads an invitation from its standard input: where the
run listens, and the keys that both sides show. All else comes through the channel that it then
opens: recipe, settings, files, orders. So a starter only has to run one command on another
machine and to write some bytes to it, and no key is on a command line, in an environment or in a
file. Read next: `host_agent.py`, for what the agent does; `hosts.py`, for who answers it.
"""

from typing import NamedTuple, Protocol

AGENT_COMMAND = ("-P", "-m", "shoal", "agent")  # of the Python that the other machine has


class AgentStarter(Protocol):
    """Starts host agents. Called by the first host's side, from one thread.

    A starter may also have `peer`, the name or address of another host: this machine listens at the
    address that leads there, unless `--listen` names one. And `slots`, how many ranks each host
    takes, unless `--slots` says it; else as many as it has cores.
    """

    @property
    def num_hosts(self) -> int:
        """How many hosts the run is to have, this machine included if it is one of them."""
        ...

    @property
    def is_host(self) -> bool:
        """Whether this machine is one of the hosts; else it only supervises."""
        ...

    def start(self, invitation: bytes, count: int) -> None:
        """Ask for so many agents: at the beginning, and again for hosts that were lost. It does
        not wait; an agent that comes joins by itself, and one may never come."""
        ...

    def poll(self) -> list[str]:
        """Agents that ended since the last call, each as a sentence with what it printed last."""
        ...

    def close(self) -> None:
        """End the agents that are left, and give back what was held for them."""
        ...


class JoinByHand(NamedTuple):
    """People start the agents, with `shoal join RUN`: the invitation is in the run directory."""

    num_hosts: int
    is_host: bool = True
    is_by_hand: bool = True

    def start(self, invitation: bytes, count: int) -> None:
        """They are told to, by an event."""

    def poll(self) -> list[str]:
        return []

    def close(self) -> None:
        """They end when the run does."""
