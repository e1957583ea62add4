"""Where the store listens: at the address that ranks are told, and at no other."""

import gc
import socket
from collections.abc import Iterator

import psutil
import pytest

from shoal import logs
from shoal.comm import mesh
from shoal.comm.mesh import Axes, LauncherSeat
from shoal.comm.rendezvous import join_store, serve_store
from shoal.errors import FormError, UsageError
from shoal.world import World


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_said", set())


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        number: int = found.getsockname()[1]
    yield number
    assert not addresses(number)


def addresses(port: int) -> set[str]:
    """Where this process listens at a port."""
    found = psutil.Process().net_connections("tcp")
    return {one.laddr.ip for one in found if one.laddr.port == port and one.status == "LISTEN"}


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.2", "127.0.0.2")]
)
def test_rank_0_of_a_launcher_listens_at_its_address_alone(
    host: str, address: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # so that what is set is taken back
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    seen: list[set[str]] = []

    def come(*_: object) -> None:
        seen.append(addresses(port))
        joined = join_store(host, port, timeout_s=5.0)
        joined.set("key", "value")
        raise FormError("rank 1 did not come")

    monkeypatch.setattr(mesh, "wait_for_ranks", come)
    seat = LauncherSeat(World(0, 2, 0, 2, "srun"))
    with pytest.raises(FormError, match="rank 1 did not come"):
        seat.form(Axes())
    seat.close()
    gc.collect()  # what the error holds
    assert seen == [{address}]


def test_localhost_is_loopback(port: int, caplog: pytest.LogCaptureFixture) -> None:
    store, _ = serve_store("localhost", port)
    assert addresses(port) <= {"127.0.0.1", "::1"} and addresses(port)
    join_store("localhost", port, timeout_s=5.0).set("key", "value")
    assert store.get("key") == b"value" and not caplog.text
    del store


@pytest.mark.parametrize("address", ["127.0.1.1", "192.0.2.1"])
def test_a_name_that_means_another_address_elsewhere_is_served_on_all(
    address: str, port: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own name means loopback on many a host; some addresses are forwarded from elsewhere."""
    real = socket.getaddrinfo

    def found(host: str, *rest: object, **named: object) -> object:
        return real(address if host == "first" else host, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    store, _ = serve_store("first", port)
    assert addresses(port) <= {"::", "0.0.0.0"} and addresses(port)
    assert "Set MASTER_ADDR to one that it has" in caplog.text
    join_store("127.0.0.1", port, timeout_s=5.0).set("key", "value")
    assert store.get("key") == b"value"
    del store


def test_a_port_that_is_taken_is_named(port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(UsageError, match=rf"cannot listen at 127\.0\.0\.1:{port}: .*MASTER_PORT"),
    ):
        serve_store("127.0.0.1", port)
