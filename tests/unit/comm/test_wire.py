"""The wire: what is sent arrives, what is damaged or too large is refused, strangers stay out."""

import os
import random
import resource
import socket as network
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import pytest
import torch
import xxhash
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import garbage

from shoal.comm import wire
from shoal.comm.unix import reachable
from shoal.comm.wire import BadFrame, Keys, connect, listen, load_keys, make_keys, pack, unpack
from shoal.errors import UsageError
from tests.support.leaks import wait_until

MOST = 1 << 20
WAIT_MS = 20_000
DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
    torch.complex64,
]


class Push(msgspec.Struct, frozen=True, tag="push"):
    worker: int
    names: list[str] = []


class Pull(msgspec.Struct, frozen=True, tag="pull"):
    clock: int


decoder = msgspec.msgpack.Decoder(Push | Pull)


def opened(frames: list[bytes]) -> tuple[Push | Pull, list[bytes]]:
    message, payload = unpack(frames, decoder, MOST)
    return message, [bytes(view) for view in payload]


def flat(frames: list[bytes | memoryview]) -> list[bytes]:
    return [bytes(frame) for frame in frames]


def crafted(message: bytes, lengths: list[int], payload: Sequence[bytes] = ()) -> list[bytes]:
    """What a peer that means harm can send: anything, under the right checksum."""
    body = msgspec.msgpack.encode([lengths, msgspec.Raw(message)])
    return with_start(body, payload)


def with_start(body: bytes, payload: Sequence[bytes] = ()) -> list[bytes]:
    digest = xxhash.xxh3_64(b"".join([body, *payload])).digest()[::-1]
    return [b"SHL" + bytes([wire.VERSION]) + digest + body, *payload]


# ---- messages


shapes = st.lists(st.integers(0, 5), max_size=3)


@given(st.lists(st.tuples(st.sampled_from(DTYPES), shapes), max_size=6), st.integers(-(2**63), 9))
def test_what_is_sent_arrives(kinds: list[tuple[torch.dtype, list[int]]], worker: int) -> None:
    tensors = [(torch.randn(shape) * 50).to(dtype) for dtype, shape in kinds]
    message = Push(worker, [str(tensor.dtype) for tensor in tensors])
    received, payload = unpack(flat(pack(message, [*tensors, b"end"])), decoder, MOST)
    assert received == message
    assert bytes(payload.pop()) == b"end"
    assert len(payload) == len(tensors)
    for view, tensor in zip(payload, tensors):
        found = wire.tensor_of(view, tensor.dtype, tensor.numel())
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(tensor.shape), tensor)


def test_tensors_are_not_copied() -> None:
    tensor = torch.nn.Parameter(torch.zeros(8))
    frame = pack(Pull(1), [tensor])[1]
    tensor.data.fill_(1.0)
    assert bytes(frame) == bytes(memoryview(torch.ones(8).numpy()))
    received = bytearray(frame)
    wire.tensor_of(memoryview(received), torch.float32, 8).fill_(0.0)
    assert received == bytes(32)


def test_bytes_that_lie_badly_or_are_read_only_become_a_tensor() -> None:
    numbers = torch.arange(6, dtype=torch.float64)
    content = bytes(memoryview(numbers.numpy()))
    for shift in range(9):
        for buffer in (bytes(shift) + content, bytearray(shift) + bytearray(content)):
            found = wire.tensor_of(memoryview(buffer)[shift:], torch.float64, 6)
            assert found.data_ptr() % 8 == 0 and torch.equal(found, numbers)
            found.zero_()
        assert bytes(shift) + content == bytes(shift) + bytes(memoryview(numbers.numpy()))


@pytest.mark.parametrize("numel", [-1, 0, 1, 3, 1 << 62])
def test_a_frame_of_another_size_is_no_tensor(numel: int) -> None:
    with pytest.raises(BadFrame, match="Run the same recipe"):
        wire.tensor_of(memoryview(bytes(8)), torch.float32, numel)


# ---- damage


def example() -> list[bytes]:
    tensors = [torch.arange(5, dtype=torch.float32), torch.empty(0), torch.arange(3)]
    return flat(pack(Push(3, ["weight", "", "bias"]), [*tensors, b"\0\0"]))


def test_frames_cut_at_every_byte_are_refused() -> None:
    frames = example()
    for number, frame in enumerate(frames):
        for length in range(len(frame)):
            cut = [*frames[:number], frame[:length], *frames[number + 1 :]]
            with pytest.raises(BadFrame):
                opened(cut)
            with pytest.raises(BadFrame):  # and as a receiver of one long frame would cut it
                opened([*cut[: number + 1], frame[length:], *cut[number + 1 :]])
    for count in range(len(frames)):
        with pytest.raises(BadFrame):
            opened(frames[:count])


def mutated(frames: list[bytes], chance: random.Random) -> list[bytes]:
    changed = [bytearray(frame) for frame in frames]
    for _ in range(chance.randint(1, 3)):
        place = chance.randrange(len(changed))
        frame = changed[place]
        match chance.randrange(7):
            case 0 if frame:
                frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
            case 1 if frame:
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 2:
                frame.insert(chance.randint(0, len(frame)), chance.randrange(256))
            case 3 if frame:
                del frame[chance.randrange(len(frame)) :]
            case 4:
                other = chance.randrange(len(changed))
                changed[place], changed[other] = changed[other], changed[place]
            case 5 if len(changed) > 1:
                del changed[place]
            case _:
                changed.insert(place, bytearray(chance.randbytes(chance.randrange(4))))
    return [bytes(frame) for frame in changed]


def test_mutated_messages_are_refused() -> None:
    frames, chance = example(), random.Random(6)
    num_refused = 0
    for _ in range(10_000):
        changed = mutated(frames, chance)
        if changed == frames:  # an exchange with itself
            assert opened(changed) == opened(frames)
            continue
        with pytest.raises(BadFrame):
            opened(changed)
        num_refused += 1
    assert num_refused > 9_000


def test_a_mutated_record_under_a_right_checksum_never_does_worse() -> None:
    """A peer that computes the checksum itself: another message or a refusal, no other error."""
    chance = random.Random(7)
    record = msgspec.msgpack.encode(Push(3, ["weight", "bias"]))
    for _ in range(10_000):
        (changed,) = mutated([record], chance)[:1]
        for frames in (crafted(changed, [3], [b"abc"]), with_start(changed, [b"abc"])):
            try:
                message, payload = opened(frames)
            except BadFrame:
                continue
            assert isinstance(message, Push | Pull) and payload == [b"abc"]


@given(st.lists(st.binary(max_size=40), max_size=4))
def test_any_bytes_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(BadFrame):
        opened(frames)
    if frames:
        with pytest.raises(BadFrame):
            opened([b"SHL" + bytes([wire.VERSION]) + frames[0], *frames[1:]])


# ---- limits


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([], "without frames"),
        ([b""], "not one of Shoal's"),
        ([b"GET / HTTP/1.1\r\n"], "not one of Shoal's"),
        ([b"SHL\x02" + bytes(40)], "version 2"),
        ([b"SHL\x01" + bytes(8) + b"\xc1"], "cannot be read"),
        (with_start(b"\x92" * 100_000), "cannot be read"),
        (with_start(b"\x92\xdd\xff\xff\xff\xff"), "cannot be read"),
        (crafted(b"\x81\xa4type\xa3fly", []), "Run the same version"),
        (crafted(b"\x81\xa4type\xa1\xff", []), "Run the same version"),
        (crafted(b"\x82\xa4type\xa4push\xa5names\x91\xa1\xff", []), "Run the same version"),
        (crafted(b"\x05", []), "Run the same version"),
        (crafted(b"\x05", [3]), "cut or mixed up"),
        (crafted(b"\x05", [-1, 2], [b"", b"x"]), "cut or mixed up"),
        (crafted(b"\x05", [], [b"x"] * 8), "8 in all"),
        (crafted(b"\x05", [1 << 40], [b"x"]), "1,099,511,627,776 bytes"),
        (crafted(b"\x05", [(1 << 64) - 1] * 9), "are allowed"),
        (crafted(b"\xc6\x00\x10\x00\x00" + bytes(1 << 20), []), "1,048,5.. bytes|1,048,576 are"),
        ([*crafted(b"\x05", [0] * 10_000), *[b""] * 10_000], "10,001 frames"),
    ],
)
def test_each_reason_is_named(frames: list[bytes], sentence: str) -> None:
    with pytest.raises(BadFrame, match=sentence):
        opened(frames)


def test_what_just_fits_is_taken() -> None:
    frames = flat(pack(Pull(1), [b""] * 9_999))
    assert opened(frames)[0] == Pull(1)
    frames = flat(pack(Pull(1), [bytes(MOST - 1), b"x"]))
    assert opened(frames)[0] == Pull(1)
    with pytest.raises(BadFrame, match="are allowed"):
        opened(flat(pack(Pull(1), [bytes(MOST), b"x"])))


def test_what_nobody_would_take_is_not_packed() -> None:
    with pytest.raises(BadFrame, match="several tensors into one frame"):
        pack(Pull(1), [b""] * 10_000)
    with pytest.raises(BadFrame, match="frames of their own"):
        pack(Push(1, ["x" * (1 << 20)]))


# ---- keys


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return make_keys(tmp_path_factory.mktemp("keys") / "keys.json")


def test_keys_are_for_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    before = os.umask(0)
    try:
        made = make_keys(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_keys(path) == made
    with pytest.raises(UsageError, match="not there yet"):
        make_keys(path)
    assert load_keys(path) == made


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o620, 0o602, 0o644, 0o666])
def test_keys_that_others_may_read_are_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = make_keys(path)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"{mode:04o}.*chmod 600"):
        load_keys(path)
    path.chmod(0o600)
    assert load_keys(path) == made


def test_a_port_that_is_taken_is_named(keys: Keys) -> None:
    with network.create_server(("127.0.0.1", 0)) as other, zmq.Context() as context:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"already in use.*Another process has port {port}"):
            listen(context, "127.0.0.1", keys, MOST, port)


def test_keys_that_another_user_made_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_keys(tmp_path / "keys.json")
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UsageError, match=f"belongs to user {os.getuid()}"):
        load_keys(tmp_path / "keys.json")


def test_keys_that_are_a_link_are_refused(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys.json")
    (tmp_path / "link.json").symlink_to("keys.json")
    with pytest.raises(UsageError, match="a link, which is not followed"):
        load_keys(tmp_path / "link.json")


def test_damaged_keys_are_refused_and_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = make_keys(path)
    content, chance = path.read_bytes(), random.Random(8)
    places = [*range(0, len(content), 7), len(content) - 1]
    cut = [content[:place] for place in places]
    flipped = [
        content[:place] + bytes([content[place] ^ 1 << chance.randrange(7)]) + content[place + 1 :]
        for place in places
    ]
    for damaged in [*cut, *flipped, content + b"x", b"null", b"[]", b"\xff", bytes(10_000)]:
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match="damaged") as caught:
            load_keys(path)
        assert made.server_secret[:8] not in str(caught.value)


def test_a_missing_file_a_directory_and_a_pipe_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("none", ".", "pipe"):
        with pytest.raises(UsageError, match="Give the file that the run wrote"):
            load_keys(tmp_path / name)
    with pytest.raises(UsageError, match="Cannot write"):
        make_keys(tmp_path / "no" / "keys.json")


def test_keys_do_not_print_their_secrets(keys: Keys) -> None:
    shown = f"{keys!r} {keys} {keys.__rich_repr__()}"
    assert keys.server_public in shown
    assert keys.server_secret not in shown and keys.client_secret not in shown


# ---- sockets


@pytest.fixture
def context() -> Iterator[wire.Context]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)
    garbage.gc.stop()  # the thread in which pyzmq hears of what it sent without a copy


def exchange(server: wire.Socket, client: wire.Socket, num_bytes: int = 100) -> None:
    """One message there and one back, or a failure."""
    payload = torch.arange(num_bytes, dtype=torch.uint8)
    client.send_multipart(pack(Push(1), [payload, b""]), copy=False)
    assert server.poll(WAIT_MS), "nothing came"
    identity, *frames = server.recv_multipart(copy=False)
    message, (view, empty) = unpack(frames, decoder, MOST)
    assert message == Push(1) and not len(empty)
    assert torch.equal(wire.tensor_of(view, torch.uint8, num_bytes), payload)
    server.send_multipart([identity, *pack(Pull(2))])
    assert client.poll(WAIT_MS), "no answer came"
    assert unpack(client.recv_multipart(copy=False), decoder, MOST)[0] == Pull(2)


@pytest.fixture
def sockets(tmp_path: Path) -> str:
    """A directory of this user's own, too deep for a socket's path as it stands."""
    path = tmp_path / ("deep" * 20)
    path.mkdir(mode=0o700)
    return str(path)


@pytest.mark.parametrize("host", ["", "127.0.0.1", "127.1.2.3", "localhost", "::1"])
def test_a_message_there_and_back(
    context: wire.Context, host: str, keys: Keys, sockets: str
) -> None:
    if host == "::1" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    used = keys if host else None
    server, address = listen(context, host or sockets, used, MOST)
    client = connect(context, address, b"w1", used)
    exchange(server, client)
    exchange(server, client, MOST)


def test_who_comes_again_takes_its_place(context: wire.Context, sockets: str) -> None:
    server, address = listen(context, sockets, None, MOST)
    exchange(server, connect(context, address, b"w1", None))
    exchange(server, connect(context, address, b"w1", None))
    with pytest.raises(zmq.ZMQError):  # nobody is told silently
        server.send_multipart([b"w2", b""])


def test_a_server_that_comes_back_is_found(context: wire.Context, sockets: str) -> None:
    server, address = listen(context, sockets, None, MOST)
    client = connect(context, address, b"w1", None)
    exchange(server, client)
    server.close()
    again = context.socket(zmq.ROUTER)
    path = reachable(address.removeprefix("ipc://"))
    assert wait_until(lambda: _binds(again, f"ipc://{path}"), 10)

    def reached() -> bool:
        client.send(b"?")  # lost, if the client has not noticed yet that the old server is gone
        return bool(again.poll(100))

    assert wait_until(reached, 20)
    while again.poll(200):
        again.recv_multipart()
    exchange(again, client)


def _binds(socket: wire.Socket, address: str) -> bool:
    try:
        socket.bind(address)
    except zmq.ZMQError:
        return False
    return True


def test_what_is_damaged_on_its_way_is_refused_and_comes_over_another_connection(
    context: wire.Context, keys: Keys
) -> None:
    server, address = listen(context, "127.0.0.1", keys, MOST)
    with network.create_server(("127.0.0.1", 0)) as listener:
        damages = threading.Event()
        relay = threading.Thread(target=pass_on, args=(listener, address, damages), daemon=True)
        relay.start()
        client = connect(context, f"tcp://127.0.0.1:{listener.getsockname()[1]}", b"w1", keys)
        exchange(server, client)
        damages.set()
        server.send_multipart([b"w1", bytes(3000)])

        def answered() -> bool:
            client.send(b"?", zmq.NOBLOCK)
            while server.poll(100):
                identity, _ = server.recv_multipart()
                with suppress(zmq.ZMQError):  # that connection is gone
                    server.send_multipart([identity, b"!"])
            return bool(client.poll(100))

        assert wait_until(answered, 20)
        assert client.recv() == b"!", "what was damaged came through"
        client.close()
        listener.shutdown(network.SHUT_RDWR)
    relay.join()


def pass_on(listener: network.socket, address: str, damages: threading.Event) -> None:
    """A relay that turns a bit of what comes next from the server."""
    target = ("127.0.0.1", int(address.rpartition(":")[2]))
    with suppress(OSError):
        while True:
            sides = listener.accept()[0], network.create_connection(target)
            for source, sink in (sides, sides[::-1]):
                is_back = source is sides[1]
                args = (source, sink, damages if is_back else None)
                threading.Thread(target=copy_bytes, args=args, daemon=True).start()


def copy_bytes(
    source: network.socket, sink: network.socket, damages: threading.Event | None
) -> None:
    with suppress(OSError):
        while content := source.recv(1 << 16):
            if damages is not None and damages.is_set() and len(content) > 2000:  # no handshake
                damages.clear()
                half = len(content) // 2  # of the message: a sign of life may come behind it
                content = content[:half] + bytes([content[half] ^ 1]) + content[half + 1 :]
            sink.sendall(content)
    for side in (source, sink):
        with suppress(OSError):
            side.shutdown(network.SHUT_RDWR)


def test_a_frame_that_is_too_large_never_arrives(context: wire.Context, sockets: str) -> None:
    server, address = listen(context, sockets, None, MOST)
    client = connect(context, address, b"w1", None)
    client.send_multipart([b"head", bytes(3 * MOST)])
    exchange(server, client)  # what comes next, over a connection made anew


def test_strangers_do_not_get_in(context: wire.Context, keys: Keys, tmp_path: Path) -> None:
    other = make_keys(tmp_path / "other.json")
    server, address = listen(context, "127.0.0.1", keys, MOST)
    right = {"server_public": keys.server_public}
    strangers = [
        other,
        msgspec.structs.replace(other, **right),  # who knows the public half
        msgspec.structs.replace(keys, server_public=other.server_public),
        # The client's public key, without its secret.
        msgspec.structs.replace(keys, client_secret=other.client_secret),
    ]
    # Held, since a socket that nobody holds is closed, and would stay out anyway.
    clients = [connect(context, address, b"s%d" % i, s) for i, s in enumerate(strangers)]
    clients.append(context.socket(zmq.DEALER))  # without any
    clients[-1].setsockopt(zmq.LINGER, 0)
    clients[-1].connect(address)
    for client in clients:
        client.send_multipart(pack(Pull(1)))
    assert not server.poll(700)
    exchange(server, connect(context, address, b"w1", keys))
    assert not server.poll(100)


def test_two_servers_of_one_context_let_in_their_own(
    context: wire.Context, keys: Keys, tmp_path: Path
) -> None:
    other = make_keys(tmp_path / "other.json")
    first, first_address = listen(context, "127.0.0.1", keys, MOST)
    second, second_address = listen(context, "127.0.0.1", other, MOST)
    exchange(first, connect(context, first_address, b"w1", keys))
    exchange(second, connect(context, second_address, b"w1", other))
    mixed = msgspec.structs.replace(other, server_public=keys.server_public)
    client = connect(context, first_address, b"w2", mixed)
    client.send_multipart(pack(Pull(1)))
    assert not first.poll(500)


def test_without_the_thread_that_checks_nobody_gets_in(
    context: wire.Context, keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "_check_clients", lambda context: None)
    server, address = listen(context, "127.0.0.1", keys, MOST)
    client = connect(context, address, b"w1", keys)
    client.send_multipart(pack(Pull(1)))
    assert not server.poll(500)


FORGET = """
import sys, zmq
from pathlib import Path
from shoal.comm import wire
from shoal.comm.unix import reachable
keys = wire.load_keys(Path(sys.argv[1]))
context = zmq.Context()
server, address = wire.listen(context, "127.0.0.1", keys, 1000)
client = wire.connect(context, address, b"w1", keys)
client.send_multipart(wire.pack(keys))
assert server.poll(20_000)
"""


def test_a_process_that_closes_nothing_still_ends(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys.json")
    command = [sys.executable, "-c", FORGET, str(tmp_path / "keys.json")]
    subprocess.run(command, check=True, timeout=50)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.0.2.7", "2001:db8::1", "example.org", "*", "", "127.0.0.1", "localhost"],
)
def test_where_others_come_keys_are_needed(context: wire.Context, host: str) -> None:
    with pytest.raises(UsageError, match="keys are needed"):
        listen(context, host, None, MOST)
    if host:
        address = f"tcp://[{host}]:5555" if ":" in host else f"tcp://{host}:5555"
        with pytest.raises(UsageError, match="keys are needed"):
            connect(context, address, b"w1", None)


def test_a_directory_that_others_may_enter_is_refused(
    context: wire.Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o711)
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for name, words in (
        ("open", "alone may enter"),
        ("link", "alone may"),
        ("none", "no directory"),
    ):
        with pytest.raises(UsageError, match=words):
            listen(context, str(tmp_path / name), None, MOST)
        with pytest.raises(UsageError, match=words):
            connect(context, f"ipc://{tmp_path}/{name}/socket", b"w1", None)
    _, address = listen(context, str(tmp_path), None, MOST)
    monkeypatch.setattr("shoal.comm.unix.os.geteuid", lambda: 12_345)
    with pytest.raises(UsageError, match="alone may enter"):
        connect(context, address, b"w1", None)


def test_sockets_are_their_owners_whatever_the_umask(context: wire.Context, sockets: str) -> None:
    before = os.umask(0)
    try:
        _, address = listen(context, sockets, None, MOST)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(address.removeprefix("ipc://")).st_mode) == 0o600


@pytest.mark.parametrize("host", ["192.0.2.7", "*", "no.such.host.invalid", "a\0b", "x" * 300])
def test_a_host_that_is_not_this_one_is_refused(
    context: wire.Context, host: str, keys: Keys
) -> None:
    with pytest.raises(UsageError, match="`ip address` lists them"):
        listen(context, host, keys, MOST)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "tcp://",
        "127.0.0.1:5555",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "inproc://here",
        "tcp://127.0.0.1",
        "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:0",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:0;192.0.2.7:5555",
        "tcp://127.0.0.1@192.0.2.7:5555",
    ],
)
def test_a_wrong_address_is_refused(context: wire.Context, address: str) -> None:
    with pytest.raises(UsageError, match=r"Write it as tcp://host:port"):
        connect(context, address, b"w1", None)


# ---- many connections


@pytest.mark.parametrize("count", [200, pytest.param(1_000, marks=pytest.mark.full)])
@pytest.mark.parametrize("with_keys", [False, True])
def test_idle_connections_do_no_harm(
    context: wire.Context, count: int, with_keys: bool, keys: Keys, sockets: str
) -> None:
    used = keys if with_keys else None
    server, address = listen(context, "127.0.0.1" if used else sockets, used, MOST)
    client = connect(context, address, b"w1", used)
    exchange(server, client)
    with ExitStack() as stack:
        for number in range(count):
            idle = stack.enter_context(raw(address))
            if number % 3 == 1:
                idle.sendall(b"\xff" + bytes(8) + b"\x7f\x03")  # the first part of a greeting
            elif number % 3 == 2:
                idle.sendall(b"GET / HTTP/1.1\r\n\r\n")
        exchange(server, client)
        exchange(server, connect(context, address, b"w2", used))
    exchange(server, client)


def test_a_peer_that_says_nothing_is_put_out(
    context: wire.Context, monkeypatch: pytest.MonkeyPatch, sockets: str
) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_MS", 100)
    server, address = listen(context, sockets, None, MOST)
    with raw(address) as idle:
        idle.settimeout(20)
        while idle.recv(4096):  # the greeting, then the end
            pass
    exchange(server, connect(context, address, b"w1", None))


def raw(address: str) -> network.socket:
    if address.startswith("ipc://"):
        connection = network.socket(network.AF_UNIX)
        connection.settimeout(20)
        connection.connect(reachable(address.removeprefix("ipc://")))
        return connection
    host, port = address.removeprefix("tcp://").rsplit(":", 1)
    return network.create_connection((host, int(port)), timeout=20)


def test_a_small_limit_of_open_files_is_raised(context: wire.Context, sockets: str) -> None:
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        listen(context, sockets, None, MOST)
        raised, still_hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert still_hard == hard
        assert raised == (wire.MOST_FILES if hard < 0 else min(hard, wire.MOST_FILES))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
