"""Addresses of this machine, and what a process is told of its own."""

from pathlib import Path

import psutil
import pytest

from shoal.comm import endpoint
from shoal.comm.endpoint import (
    Endpoint,
    address_towards,
    endpoint_from,
    hold_keys,
    host_environment,
    interface_of,
)
from shoal.comm.wire import make_keys
from shoal.errors import UsageError


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("203.0.113.7", "is not an address of this machine. .* it has .*127.0.0.1"),
        ("0.0.0.0", "is not an address of this machine"),
        ("node7", "is not an IP address"),
        ("", "is not an IP address"),
    ],
)
def test_an_address_of_another_machine(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        interface_of(address)


def test_what_is_told_holds_no_secret_and_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = make_keys(tmp_path / "keys")
    told = Endpoint("/s", "127.0.0.1", keys).environment() | host_environment("127.0.0.1", "/s")
    monkeypatch.setattr(endpoint, "_held", [])
    with pytest.raises(UsageError, match="does not hold its keys"):
        endpoint_from(told)
    hold_keys(keys)
    assert keys.client_secret not in str(told) and keys.server_secret not in str(told)
    assert endpoint_from(told) == Endpoint("/s", "127.0.0.1", keys)
    assert endpoint_from(told).place == ("127.0.0.1", keys)
    assert keys.client_secret not in repr(endpoint_from(told))
    assert endpoint_from(Endpoint("/s").environment()) == Endpoint("/s")
    assert endpoint_from(Endpoint("/s").environment()).place == ("/s", None)


def test_gloo_of_one_host_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Left alone it listens where the machine's name leads, which others may reach."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert Endpoint("/s").environment()["GLOO_SOCKET_IFNAME"] == "lo"
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"lo": [], "eth7": []})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # whoever says so is heard
    assert Endpoint("/s").environment()["GLOO_SOCKET_IFNAME"] == "eth7"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    with pytest.raises(UsageError, match=r"no interface of that name.*eth7, lo"):
        Endpoint("/s").environment()
