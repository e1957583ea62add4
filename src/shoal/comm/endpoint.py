"""Where a process listens for others of its run, and the keys that both sides show.

A run on one host uses Unix sockets in a directory of its own. A run on several hosts has an address
on each; its processes get that address through environment variables, and the keys by being forked
from a process that holds them.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import NamedTuple

import psutil

from shoal.comm.wire import Keys
from shoal.errors import UsageError

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_SOCKETS, _ADDRESS, _KEYS = "SHOAL_SOCKETS", "SHOAL_ADDRESS", "SHOAL_KEYS"
_held: list[Keys] = []  # the keys of the run that this process is of, if it spans hosts


class Endpoint(NamedTuple):
    """Where a process listens, and with which keys."""

    sockets: str  # the directory for those of processes of one host
    address: str = ""  # of this host, if the run spans several
    keys: Keys | None = None  # then

    @property
    def place(self) -> tuple[str, Keys | None]:
        """Where to listen for any process of the run, as `wire.listen` takes it."""
        return (self.sockets if self.keys is None else self.address), self.keys

    def environment(self) -> dict[str, str]:
        """The environment variables of a process on any host. Without an interface of its own Gloo
        would listen at the address of the machine's name, where other machines may reach it."""
        return {_SOCKETS: self.sockets} | ({} if self.keys else _loopback_interface())


def hold_keys(keys: Keys) -> None:
    """Keep the run's keys in memory, for this process and those that are forked from it."""
    _held[:] = [keys]


def host_environment(address: str, sockets: str) -> dict[str, str]:
    """The environment variables of one host's processes, which are forked from one that holds the
    keys. Gloo is given a network interface."""
    own = {_SOCKETS: sockets, _ADDRESS: address, _KEYS: "held"}
    return own | {GLOO_INTERFACE: interface_of(address)}


def endpoint_from(environment: Mapping[str, str]) -> Endpoint:
    """The endpoint that `Endpoint` and `host_environment` wrote into an environment."""
    sockets = environment.get(_SOCKETS, "")
    if _KEYS not in environment:
        return Endpoint(sockets)
    if not _held:
        raise UsageError(
            "This process is of a run on several hosts, and does not hold its keys: only processes "
            "that are forked from a host's own do."
        )
    return Endpoint(sockets, environment[_ADDRESS], _held[0])


def _loopback_interface() -> dict[str, str]:
    return {GLOO_INTERFACE: named_interface() or interface_of("127.0.0.1")}


def named_interface() -> str:
    """The interface that the environment names for Gloo, if it does; UsageError if there is none
    such."""
    name = os.environ.get(GLOO_INTERFACE, "")
    if name and name not in (known := psutil.net_if_addrs()):
        raise UsageError(
            f"{GLOO_INTERFACE}={name} in the environment: this machine has no interface of that "
            f"name. Unset it, or name one of {', '.join(sorted(known))}."
        )
    return name


def interface_of(address: str) -> str:
    """The network interface of this machine that has an address; UsageError if none has."""
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError as error:
        raise UsageError(f"{address!r} is not an IP address, such as 10.0.0.1.") from error
    found: dict[object, str] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family in (socket.AF_INET, socket.AF_INET6):
                found[ipaddress.ip_address(entry.address.partition("%")[0])] = name
    if wanted not in found:
        known = ", ".join(sorted(map(str, found)))
        raise UsageError(
            f"{address} is not an address of this machine. Give one at which the other hosts reach "
            f"it; it has {known}."
        )
    return found[wanted]


def is_loopback(address: str) -> bool:
    """Whether packets to an address never leave this machine."""
    return ipaddress.ip_address(address).is_loopback


def resolve_name(host: str) -> str:
    """The IP address of a name; UsageError if it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"{host!r} is not the name or address of a machine: {error}. --listen ADDRESS says at "
            "which address of this one the others reach it."
        ) from error


def address_towards(address: str, port: int) -> str:
    """The address of this machine from which it would reach another; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port))
        except OSError as error:
            raise UsageError(
                f"This machine has no way to {address}, where the run listens: {error.strerror}. "
                "Start the run with --listen and an address that all hosts reach."
            ) from error
        return str(probe.getsockname()[0])
