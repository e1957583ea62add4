"""The run's store: what torch expects of one, over connections that lose and double messages."""

import os
import random
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
import zmq

from shoal.comm import run_store, wire
from shoal.comm.endpoint import Endpoint
from shoal.comm.run_store import StoreClient, StoreServer, StoreState
from shoal.comm.wire import connect, make_keys
from tests.support.leaks import wait_until
from tests.support.relay import Message, Relay

WAIT_S = 30.0
A_WHILE = timedelta(seconds=WAIT_S)


@pytest.fixture(params=["local", "with keys"])
def reach(request: pytest.FixtureRequest, tmp_path: Path) -> Endpoint:
    if request.param == "local":
        return Endpoint(str(tmp_path))
    return Endpoint(str(tmp_path), "127.0.0.1", make_keys(tmp_path / "keys"))


@pytest.fixture
def server(reach: Endpoint) -> Iterator[StoreServer]:
    made = StoreServer(reach)
    yield made
    made.close()


@pytest.fixture
def context() -> Iterator[wire.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def store(context: wire.Context, server: StoreServer, reach: Endpoint) -> Iterator[StoreClient]:
    made = StoreClient(context, server.address, reach.keys, WAIT_S)
    yield made
    made.close()


def test_it_does_what_torchs_does(store: StoreClient) -> None:
    for one in (store, dist.HashStore()):
        one.set("a", "text")
        one.set("b", b"\0bytes")
        assert one.get("a") == b"text" and one.get("b") == b"\0bytes"
        assert one.check(["a", "b"]) and not one.check(["a", "c"])
        assert [one.add("n", 2), one.add("n", -5)] == [2, -3] and one.get("n") == b"-3"
        assert one.compare_set("a", "text", "other") == b"other"
        assert one.compare_set("a", "text", "third") == b"other"
        assert one.compare_set("new", "", "first") == b"first"
        assert one.delete_key("a") and not one.delete_key("a") and not one.check(["a"])
        one.wait(["b", "n"], A_WHILE)
        assert one.get("b") == b"\0bytes"


def test_prefixes_are_apart(store: StoreClient) -> None:
    first, second = dist.PrefixStore("1", store), dist.PrefixStore("2", store)
    first.set("a", "x")
    assert second.check(["a"]) is False and first.get("a") == b"x" and store.get("1/a") == b"x"


def test_what_was_waited_for_is_not_old(context, server, reach, store) -> None:
    other = StoreClient(context, server.address, reach.keys, WAIT_S)
    store.set("a", "1")
    store.wait(["a"], A_WHILE)
    store.check(["a"])
    other.set("a", "2")
    assert store.get("a") == b"2"
    other.close()


def test_who_waits_is_answered_when_the_key_comes(context, server, reach, store) -> None:
    other = StoreClient(context, server.address, reach.keys, WAIT_S)
    timer = threading.Timer(0.1, other.set, ["late", "x"])
    timer.start()
    assert store.get("late") == b"x"
    timer.join()
    other.close()


def test_who_waits_leaves_when_the_generation_is_over(context, server, reach) -> None:
    lost = threading.Event()
    store = StoreClient(context, server.address, reach.keys, 600.0, lost.is_set)
    threading.Timer(0.1, lost.set).start()
    with pytest.raises(dist.DistStoreError, match="generation is over"):
        store.get("never")
    store.close()


def test_who_waits_in_vain_says_for_what(store: StoreClient) -> None:
    with pytest.raises(dist.DistStoreError, match=r"in time .get never, a"):
        store.wait(["never", "a"], timedelta(seconds=0.1))
    store.set("a", "x")  # and it goes on
    assert store.get("a") == b"x"


def test_a_client_that_is_closed(store: StoreClient) -> None:
    store.close()
    with pytest.raises(dist.DistStoreError, match="closed"):
        store.get("a")


def form(store: dist.Store, rank: int, count: int, sums: dict[int, float]) -> None:
    group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, count, A_WHILE)
    summed = torch.tensor([float(rank + 1)])
    group.allreduce([summed]).wait()
    sums[rank] = summed.item()


@pytest.mark.parametrize("count", [2, 5])
def test_a_group_forms_through_it(context, server, reach, count: int, monkeypatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")  # processes forked later would inherit it
    sums: dict[int, float] = {}
    stores = [StoreClient(context, server.address, reach.keys, WAIT_S) for _ in range(count)]
    threads = [
        threading.Thread(target=form, args=(s, r, count, sums)) for r, s in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for store in stores:
        store.close()
    assert sums == dict.fromkeys(range(count), count * (count + 1) / 2)


def test_an_error_of_the_store_comes_through_torch(context, server, reach) -> None:
    lost = threading.Event()
    store = StoreClient(context, server.address, reach.keys, WAIT_S, lost.is_set)
    threading.Timer(0.2, lost.set).start()
    with pytest.raises(RuntimeError, match="generation is over"):
        form(store, 0, 2, {})
    store.close()


def test_keys_of_old_generations_are_let_go_of(server: StoreServer, store: StoreClient) -> None:
    for generation in range(3):
        store.set(f"generation/{generation}/a", "x")
    server.forget("generation/1/")
    assert store.num_keys() == 2 and not store.check(["generation/1/a"])


@pytest.mark.parametrize("kind", ["lost", "doubled", "cut"])
def test_each_request_is_carried_out_once(
    context: wire.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(run_store, "AGAIN_S", 0.05)
    server, draws = StoreServer(Endpoint(str(tmp_path))), random.Random(3)

    def tamper(message: Message) -> list[Message]:
        if draws.random() > 0.2:
            return [message]
        if kind == "cut":
            relay.reset()
        return [message] * 2 if kind == "doubled" else []

    with Relay(server.address) as relay:
        store = StoreClient(context, relay.address, None, WAIT_S)
        relay.tamper = tamper
        assert [store.add("n", 1) for _ in range(60)] == list(range(1, 61))
        store.close()
    server.close()


def ask(number: int, does: str, keys: list[str], *rest: object) -> bytes:
    return msgspec.msgpack.encode([number, does, keys, *rest])


def test_who_is_gone_costs_nothing_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_store, "MOST_CLIENTS", 5)
    held = StoreState()
    for number in range(20):
        held.handle(b"waits %d" % number, ask(1, "get", ["generation/3/a"]))
        held.handle(b"asks %d" % number, ask(1, "check", ["a"]))
    assert len(held._last) == 5
    held.forget("generation/3/")
    assert not held._waiting
    held.handle(b"asks 19", ask(2, "bye", []))
    assert len(held._last) == 4


def test_a_late_request_is_not_carried_out() -> None:
    held = StoreState()
    assert held.handle(b"c", ask(2, "add", ["n"], [], 5))[0][1].amount == 5
    assert held.handle(b"c", ask(1, "add", ["n"], [], 5)) == []
    assert held.handle(b"c", ask(2, "add", ["n"], [], 5))[0][1].amount == 5
    assert held.values["n"] == b"5"


def nonsense(draws: random.Random) -> bytes:
    """Bytes, and records that are nearly requests."""
    odd = [None, -1, 1 << 63, "get", "fly", [], ["a", "a"], b"x", [[]], {"a": 1}, "\0", [""]]
    kinds = draws.randrange(4)
    if kinds == 0:
        return draws.randbytes(draws.randrange(60))
    if kinds == 1:
        return b"\x91" * draws.randrange(1, 100_000)
    fields = [draws.choice(odd) for _ in range(draws.randrange(7))]
    if kinds == 2:
        does = draws.choice(["get", "set", "add", "swap", "delete", "check", "count"])
        fields[:3] = [draws.randrange(9), does, [draws.choice("ab") for _ in range(3)]]
    content: bytes = msgspec.msgpack.encode(fields)
    return content[: draws.randrange(len(content) + 1)] if draws.random() < 0.2 else content


@pytest.mark.parametrize("count", [3_000, pytest.param(50_000, marks=pytest.mark.full)])
def test_nonsense_raises_nothing(count: int) -> None:
    draws, held = random.Random(5), StoreState()
    held.handle(b"c", ask(1, "set", ["kept"], [b"x"]))
    for _ in range(count):
        for _, answer in held.handle(draws.randbytes(draws.randrange(1, 5)), nonsense(draws)):
            assert len(msgspec.msgpack.encode(answer)) < 1_000
    assert held.values["kept"] == b"x" and len(held.values) < 10


def test_what_is_no_request_harms_nobody(context, server, reach, store) -> None:
    noisy = connect(context, server.address, b"\xff\x00noisy", reach.keys)
    for content in ([b""], [b"x" * 5_000], [b"a", b"b", b"\x91" * 5_000], [os.urandom(100)] * 3):
        noisy.send_multipart(content)
    store.set("a", "x")
    assert store.get("a") == b"x"


def test_a_server_that_is_closed_leaves_nothing(tmp_path: Path) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    for _ in range(5):
        made, context = StoreServer(Endpoint(str(tmp_path))), zmq.Context()
        store = StoreClient(context, made.address, None, WAIT_S)
        store.set("a", "x")
        store.close()
        context.term()
        made.close()
    assert wait_until(lambda: num_open() == before, 10)
