"""Where a process listens for others of its run, and the keys that both sides show.

A run on one host uses Unix sockets in a directory of its own. A run on several hosts has an address
on each; its processes get that address and the path of the keys, never the keys, through
environment variables.
"""

import ipaddress
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from shoal.comm.wire import Keys, load_keys
from shoal.errors import UsageError

_SOCKETS, _ADDRESS, _KEYS = "SHOAL_SOCKETS", "SHOAL_ADDRESS", "SHOAL_KEYS"


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


def host_environment(address: str, keys: Path) -> dict[str, str]:
    """The environment variables of one host's processes. Gloo is given a network interface."""
    where = str(keys.absolute())  # a recipe may go elsewhere
    return {_ADDRESS: address, _KEYS: where, "GLOO_SOCKET_IFNAME": interface_of(address)}


def endpoint_from(environment: Mapping[str, str]) -> Endpoint:
    """The endpoint that `Endpoint.told` and `host_environment` wrote into an environment."""
    sockets = environment.get(_SOCKETS, "")
    if _KEYS not in environment:
        return Endpoint(sockets)
    return Endpoint(sockets, environment[_ADDRESS], load_keys(Path(environment[_KEYS])))


def _loopback_interface() -> dict[str, str]:
    name = "GLOO_SOCKET_IFNAME"
    return {name: os.environ.get(name) or interface_of("127.0.0.1")}


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
