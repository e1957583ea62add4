"""Messages between workers and parameter servers: a typed record and raw tensors, over ZeroMQ.

A message is one small frame, the head, and a frame for each tensor, which is sent from where it
lies. The head holds the record as MessagePack, the frames' lengths and one XXH3-64 over all of it,
so a frame that was damaged, cut or mixed up on the way is refused before anything is made of it,
and nothing is unpickled. Each frame is bounded before memory is allocated. A message is complete
when all its frames are in memory, since ZeroMQ hands over whole messages: a peer with the keys may
make this process hold as much as it can send.

Without keys only Unix sockets are used that this user alone can reach (`unix.py`): on loopback
every user of the machine would get in. With keys (CURVE) it is TCP, every byte is encrypted, and
only processes that hold the run's key get in, at several times the cost a byte. So nothing is sent
to a peer that has not proved itself: by lying in that directory, or by the server's key. The
checksum finds accidents; against people it is the keys that help. Processes of one host move
tensors through `shared_memory.py` instead.
"""

import os
import re
import resource
import socket as sockets
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
import xxhash
import zmq
from torch import Tensor
from zmq.utils import z85

from shoal.comm.unix import new_path, reachable, refuse_open
from shoal.errors import ShoalError, UsageError
from shoal.storage.decoding import try_decode_json
from shoal.storage.files import read_private, write_private

VERSION = 1
MOST_FRAMES = 10_000
MOST_HEAD_BYTES = 1 << 20
MOST_FILES = 1 << 16  # connections and files of one process
MOST_WAITING = 1024  # connections that all come at once
HANDSHAKE_MS = 10_000  # after which a peer that says nothing is put out

_MAGIC = b"SHL"
_ADDRESS = re.compile(r"tcp://(\[[^][/@;]+]|[^][:/@;]+):([0-9]{1,5})")
_WRITE_IT = "Write it as tcp://host:port, or ipc://path without keys."
_START = struct.Struct("<3sBQ")  # magic, version, digest of all that follows

T = TypeVar("T")
Context = zmq.Context[zmq.Socket[bytes]]
Socket = zmq.Socket[bytes]


class BadFrame(ShoalError):
    """A message that is refused; what was wrong with it, in a sentence."""


class _Body(msgspec.Struct, frozen=True, array_like=True):
    lengths: list[int]  # of the frames that follow
    message: msgspec.Raw


_decode_body = msgspec.msgpack.Decoder(_Body).decode


def pack(
    message: msgspec.Struct, payload: Sequence[Tensor | bytes] = ()
) -> list[bytes | memoryview]:
    """The frames to send. Tensors lie contiguous on the CPU, and must not change until sent."""
    frames = [bytes_of(part) for part in payload]
    body = msgspec.msgpack.encode(
        _Body([len(frame) for frame in frames], msgspec.Raw(msgspec.msgpack.encode(message)))
    )
    head = _START.pack(_MAGIC, VERSION, digest_of([body, *frames])) + body
    _check_limits(1 + len(frames), len(head))
    return [head, *frames]


def unpack(
    frames: Sequence[zmq.Frame | bytes], decoder: msgspec.msgpack.Decoder[T], most_bytes: int
) -> tuple[T, list[memoryview]]:
    """The record and the payload, as views of the frames; BadFrame for whatever is not as sent."""
    if not frames:
        raise BadFrame("A message without frames came. Run the same version of Shoal everywhere.")
    head, *payload = (_view(frame) for frame in frames[: MOST_FRAMES + 1])
    _check_limits(len(frames), len(head))
    body, digest = _open_head(head)
    try:
        found = _decode_body(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BadFrame(f"The head of a message cannot be read: {error}.") from error
    if sum(found.lengths) > most_bytes:
        raise BadFrame(
            f"A message says that it holds {sum(found.lengths):,} bytes; {most_bytes:,} are "
            "allowed. Run the same recipe and plan everywhere."
        )
    lengths = [len(frame) for frame in payload]
    if found.lengths != lengths:
        raise BadFrame(
            f"A message says that frames of {_some(found.lengths)} bytes follow, and there are "
            f"{_some(lengths)}: it was cut or mixed up on the way."
        )
    if digest_of([body, *payload]) != digest:
        raise BadFrame("A message was damaged on the way: its checksum differs.")
    return decode(found.message, decoder), payload


def decode(content: bytes | memoryview | msgspec.Raw, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """One record; BadFrame for whatever else it is."""
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise BadFrame(
            f"A message is none that is known here: {error}. Run the same version of Shoal "
            "everywhere."
        ) from error


def tensor_of(frame: memoryview, dtype: torch.dtype, numel: int) -> Tensor:
    """A frame as a flat tensor: a view, unless its bytes are read-only or lie badly."""
    if frame.nbytes != numel * dtype.itemsize:
        raise BadFrame(
            f"A frame of {frame.nbytes:,} bytes came where {numel:,} elements of "
            f"{dtype.itemsize} bytes were to be. Run the same recipe and plan everywhere."
        )
    if not numel:
        return torch.empty(0, dtype=dtype)
    flat = torch.frombuffer(bytearray(frame) if frame.readonly else frame, dtype=torch.uint8)
    if flat.data_ptr() % dtype.itemsize:
        flat = flat.clone()
    return flat.view(dtype)


def bytes_of(part: Tensor | bytes) -> bytes | memoryview:
    if isinstance(part, bytes):
        return part
    assert part.device.type == "cpu" and part.is_contiguous()
    return part.detach().reshape(-1).view(torch.uint8).numpy().data


def _view(frame: zmq.Frame | bytes) -> memoryview:
    return frame.buffer if isinstance(frame, zmq.Frame) else memoryview(frame)


def digest_number(parts: Sequence[bytes | memoryview]) -> float:
    """Their digest as a number that collectives carry: a float has room for 53 bits of it."""
    return float(digest_of(parts) >> 11)


def digest_of(parts: Sequence[bytes | memoryview]) -> int:
    """XXH3-64 of all parts, one after another."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.intdigest()


def _check_limits(num_frames: int, head_bytes: int) -> None:
    if num_frames > MOST_FRAMES:
        raise BadFrame(
            f"A message has {num_frames:,} frames; {MOST_FRAMES:,} are allowed. Put several "
            "tensors into one frame."
        )
    if head_bytes > MOST_HEAD_BYTES:
        raise BadFrame(
            f"The head of a message has {head_bytes:,} bytes; {MOST_HEAD_BYTES:,} are allowed. "
            "Tensors go into frames of their own."
        )


def _open_head(head: memoryview) -> tuple[memoryview, int]:
    """What follows the start of a head, and the digest it must have."""
    if len(head) < _START.size or head[: len(_MAGIC)] != _MAGIC:
        raise BadFrame("A message came that is not one of Shoal's: something else uses this port.")
    _, version, digest = _START.unpack_from(head)
    if version != VERSION:
        raise BadFrame(
            f"A message came in version {version} of the protocol, and this process speaks "
            f"{VERSION}. Install one version of Shoal everywhere."
        )
    return head[_START.size :], digest


def _some(lengths: list[int]) -> str:
    shown = ", ".join(str(length) for length in lengths[:5])
    return f"[{shown}, ... {len(lengths):,} in all]" if len(lengths) > 5 else f"[{shown}]"


# ---- keys


class Keys(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the processes of a run prove themselves with, each as 40 characters of Z85."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:  # a log or a traceback must not show the secrets
        return f"Keys(server_public={self.server_public!r}, client_public={self.client_public!r})"

    def __rich_repr__(self) -> list[tuple[str, Any]]:
        return [("server_public", self.server_public), ("client_public", self.client_public)]


def new_keys() -> Keys:
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return Keys(*(half.decode() for half in (*server, *client)))


def make_keys(path: Path) -> Keys:
    """New keys, in a new file that only this user may read."""
    keys = new_keys()
    write_keys(keys, path)
    return keys


def write_keys(keys: Keys, path: Path) -> None:
    """Write keys to a new file that only this user may read."""
    try:
        write_private(path, msgspec.json.encode(keys))
    except OSError as error:
        raise UsageError(
            f"Cannot write the run's keys to {path}: {error.strerror}. Each run makes keys of its "
            "own, in a file that is not there yet and a directory that is, on a disk with room."
        ) from error


def load_keys(path: Path) -> Keys:
    """The keys that `make_keys` wrote; refused if anyone else may read them or has made them."""
    way_out = "Give the file that the run wrote, as the user who started it."
    try:
        content = read_private(path, way_out)
    except OSError as error:
        raise UsageError(
            f"Cannot read the run's keys in {path}: {error.strerror}. {way_out}"
        ) from error
    keys = try_decode_json(content, Keys)
    if keys is None or not are_whole(keys):
        raise UsageError(
            f"{path} does not hold the keys of a run, or they are damaged. Give the file that the "
            "run wrote; if this is it, remove it and start the run again."
        )
    return keys


def are_whole(keys: Keys) -> bool:
    """Whether each secret has its public half beside it."""
    try:
        return (
            zmq.curve_public(keys.server_secret.encode()) == keys.server_public.encode()
            and zmq.curve_public(keys.client_secret.encode()) == keys.client_public.encode()
        )
    except (zmq.ZMQError, ValueError):
        return False


# ---- sockets


def listen(
    context: Context, place: str, keys: Keys | None, most_bytes: int, port: int | None = None
) -> tuple[Socket, str]:
    """A ROUTER, and the address that others connect to.

    With keys `place` is a name or address of this machine, of which this port or a free one is
    taken; without, a directory of this user's own. `most_bytes` bounds each frame of a payload,
    before memory is taken for it; all of them together are bounded by `unpack`. End the context
    with `destroy` or `term`: the thread that checks keys ends with it.
    """
    _allow_many_files()
    socket = context.socket(zmq.ROUTER)
    try:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # who comes again takes its own place
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, most_bytes + MOST_HEAD_BYTES)  # the head is a frame too
        socket.setsockopt(zmq.BACKLOG, MOST_WAITING)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if keys is None:
            return socket, _bind_here(socket, place)
        _check_clients(context)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.server_secret.encode())
        socket.setsockopt(zmq.ZAP_DOMAIN, keys.client_public.encode())
        # Without it every client that knows the server's public key gets in, if no thread checks.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        ip = _resolve(place)
        socket.setsockopt(zmq.IPV6, ":" in ip)
        socket.bind(f"tcp://{f'[{ip}]' if ':' in ip else ip}:{port or '*'}")
        return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
    except zmq.ZMQError as error:
        socket.close()
        way_out = "Give an address of this machine; `ip address` lists them."
        if error.errno == zmq.EADDRINUSE:
            way_out = f"Another process has port {port}: end it; `ss -ltnp` shows which one it is."
        raise UsageError(f"Cannot listen on {place}: {error.strerror}. {way_out}") from error
    except UsageError:
        socket.close()
        raise


def _bind_here(socket: Socket, directory: str) -> str:
    if not os.path.isabs(directory):
        raise UsageError(
            f"{directory!r} is not a directory for sockets, and to listen anywhere else the run's "
            "keys are needed. Make them with `make_keys` and give them to every process."
        )
    path = new_path(directory)
    socket.bind(f"ipc://{reachable(path)}")
    os.chmod(path, 0o600)
    return f"ipc://{path}"


class ClientSocket(zmq.Socket[bytes]):
    """ZeroMQ connects again by itself, but not where a message came in that was damaged on its way:
    it gives that connection up, and nothing can be sent any more. Then this one connects again."""

    def send(self, *given: Any, **named: Any) -> Any:
        events: Any = self.getsockopt(zmq.EVENTS)
        if not events & zmq.POLLOUT:
            target: Any = self.getsockopt(zmq.LAST_ENDPOINT)
            with suppress(zmq.ZMQError):  # it is not there any more
                self.disconnect(target)
            self.connect(target)
        return super().send(*given, **named)


def connect(context: Context, address: str, identity: bytes, keys: Keys | None) -> Socket:
    """A DEALER to a listening socket. It connects when it can, and again whenever it must."""
    assert 0 < len(identity) < 256 and identity[0], "ZeroMQ's rule for identities"
    target = _target(address, keys)
    # Bytes between processes of one host are not damaged.
    kind = zmq.Socket if keys is None else ClientSocket
    socket = context.socket(zmq.DEALER, socket_class=kind)
    try:
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RECONNECT_IVL, 20)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        if keys is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.client_public.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.client_secret.encode())
            socket.setsockopt(zmq.IPV6, "[" in address)
        socket.connect(target)
    except zmq.ZMQError as error:
        socket.close()
        raise UsageError(f"Cannot connect to {address}: {error.strerror}. {_WRITE_IT}") from error
    return socket


def _target(address: str, keys: Keys | None) -> str:
    """What ZeroMQ is to connect to: nothing where a stranger may listen."""
    if address.startswith("ipc:///") and keys is None:
        path = address.removeprefix("ipc://")
        refuse_open(os.path.dirname(path))
        return f"ipc://{reachable(path)}"
    found = _ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found[2]) < 1 << 16:  # ZeroMQ would cut off the rest
        raise UsageError(f"{address!r} is not an address. {_WRITE_IT}")
    if keys is None:
        raise UsageError(
            f"{address} can be reached by others, on loopback by every user of the machine, so the "
            "run's keys are needed. Make them with `make_keys` and give them to every process."
        )
    return address


def _resolve(host: str) -> str:
    """A number for a name, since ZeroMQ takes a name for that of a network interface."""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(sockets.getaddrinfo(host, None, type=sockets.SOCK_STREAM)[0][4][0])
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{host!r} is not a name or address of a machine: {error}. Give an address of this "
            "machine; `ip address` lists them."
        ) from error


def _allow_many_files() -> None:
    """Each connection is an open file, and many systems begin with 1,024 of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _check_clients(context: Context) -> None:
    """Have a thread answer ZeroMQ's question (ZAP) whether a client's key is let in.

    One answers for all sockets of a context, since each names the key it lets in as its domain.
    """
    # A shadow, so that `context.destroy` does not close the socket under the thread.
    zap: Socket = zmq.Context.shadow(context.underlying).socket(zmq.REP)
    try:
        zap.setsockopt(zmq.LINGER, 0)
        zap.bind("inproc://zeromq.zap.01")
    except zmq.ZMQError as error:
        zap.close()
        if error.errno != zmq.EADDRINUSE:
            raise
    else:
        threading.Thread(target=_authenticate, args=(zap,), name="shoal-keys", daemon=True).start()


def _authenticate(zap: Socket) -> None:
    """Until the context ends. ZeroMQ has made sure that the client holds the key's other half."""
    with zap:
        while True:
            try:
                version, request, domain, _, _, mechanism, *proof = zap.recv_multipart()
                is_in = mechanism == b"CURVE" and [domain] == [z85.encode(key) for key in proof]
                verdict = [b"200", b"", b"client"] if is_in else [b"400", b"unknown key", b""]
                zap.send_multipart([version, request, *verdict, b""])
            except zmq.ContextTerminated:
                return
