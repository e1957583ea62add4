"""Addresses of this machine, and what a process is told of its own."""

from pathlib import Path

import pytest

from shoal.comm.reach import LOOPBACK, Reach, address_towards, interface_of, reach_from, told_of
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


def test_what_is_told_holds_no_secret_and_is_understood(tmp_path: Path) -> None:
    keys = make_keys(tmp_path / "keys")
    told = told_of("127.0.0.1", tmp_path / "keys")
    assert keys.client_secret not in str(told) and keys.server_secret not in str(told)
    assert reach_from(told) == Reach("127.0.0.1", keys)
    assert keys.client_secret not in repr(reach_from(told))
    assert reach_from({}) == LOOPBACK
