"""The key-value store of a supervised run, where ranks meet: Gloo's addresses, and the servers'.

torch's own store listens on TCP and trusts every caller, so any user of the machine could read and
change the addresses of ranks. This one is reached as everything else of a run is (`wire.py`):
through a socket of this user's own, or with the run's keys. A thread of the supervisor serves it,
so any rank may die. `StoreClient` is a torch store.

One client a generation. A request without an answer is sent again after a while, since a connection
may break, and is executed once. A wait for a key ends when its generation is over.

Cost: two small messages a request, 0.06 ms on an idle machine where torch's store takes 0.02. To
form a group, a rank makes one for each rank and one more.
"""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import count

import msgspec
import torch.distributed as dist
import zmq

from shoal.comm import wire
from shoal.comm.endpoint import Endpoint
from shoal.comm.wire import BadFrame, Keys

MOST_BYTES = 4 << 20  # of a request
MOST_CLIENTS = 4096  # that are remembered
AGAIN_S = 1.0
TICK_MS = 20


class _StoreRequest(msgspec.Struct, frozen=True, array_like=True):
    """`does` is what to do with the keys, or the first of them; `number` counts a client's."""

    number: int
    does: str
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0


class _StoreReply(msgspec.Struct, frozen=True, array_like=True):
    number: int
    values: list[bytes] = []
    amount: int = 0


_REQUESTS, _REPLIES = msgspec.msgpack.Decoder(_StoreRequest), msgspec.msgpack.Decoder(_StoreReply)
_encode = msgspec.msgpack.Encoder().encode


class StoreServer:
    """Listens as long as it is not closed; clients connect to `address`."""

    def __init__(self, reach: Endpoint):
        self._context: wire.Context = zmq.Context()
        self._router, self.address = wire.listen(self._context, *reach.place, MOST_BYTES)
        self._state = StoreState()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)
        self._thread.start()

    def forget(self, prefix: str) -> None:
        """Delete the keys with this prefix."""
        with self._lock:
            self._state.forget(prefix)

    def close(self) -> None:
        self._context.term()  # which ends the thread, and waits until its socket is closed
        self._thread.join()

    def _serve(self) -> None:
        with self._router:
            while True:
                try:
                    sender, *frames = self._router.recv_multipart()
                    with self._lock:
                        replies = self._state.handle(sender, frames[-1])
                    for client, reply in replies:
                        self._send(client, reply)
                except zmq.ContextTerminated:
                    return

    def _send(self, client: bytes, reply: _StoreReply) -> None:
        try:
            self._router.send_multipart([client, _encode(reply)], zmq.NOBLOCK)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:
            return  # the client is gone, or will send its request again


class StoreState:
    """Keys, values and the clients that wait for keys. Pure: it has no socket."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[bytes, _StoreRequest] = {}  # a client waits for one answer at a time
        self._last: OrderedDict[bytes, _StoreReply] = OrderedDict()  # by client

    def handle(self, client: bytes, content: bytes) -> list[tuple[bytes, _StoreReply]]:
        """The replies to send, by client, after this request."""
        try:
            request = wire.decode(content, _REQUESTS)
        except BadFrame:
            return []
        last = self._last.get(client)
        if last is not None and request.number <= last.number:  # it came twice
            return [(client, last)] if request.number == last.number else []
        if request.does == "bye":
            self._drop(client)
            return []
        if request.does == "get" and not self._has(request.keys):
            self._waiting[client] = request
            return []
        reply = self._do(request)
        if reply is None:
            return []
        return [self._replied(client, reply), *self._serve_waiting()]

    def forget(self, prefix: str) -> None:
        """Delete the keys with this prefix, and the waits for them."""
        self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}
        for client, request in list(self._waiting.items()):
            if any(key.startswith(prefix) for key in request.keys):
                self._drop(client)

    def _do(self, request: _StoreRequest) -> _StoreReply | None:
        """None for an invalid request."""
        number, keys, values = request.number, request.keys, request.values
        match request.does:
            case "get":
                return _StoreReply(number, [self.values[key] for key in keys])
            case "check":
                return _StoreReply(number, amount=int(self._has(keys)))
            case "count":
                return _StoreReply(number, amount=len(self.values))
            case "set" if len(keys) == len(values):
                self.values |= zip(keys, values, strict=True)
                return _StoreReply(number)
            case "add" if len(keys) == 1:
                return self._add(number, keys[0], request.amount)
            case "swap" if len(keys) == 1 and len(values) == 2:
                return self._swap(number, keys[0], *values)
            case "delete":
                found = [key for key in keys if self.values.pop(key, None) is not None]
                return _StoreReply(number, amount=len(found))
        return None

    def _add(self, number: int, key: str, amount: int) -> _StoreReply | None:
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            return None
        self.values[key] = str(total).encode()
        return _StoreReply(number, amount=total)

    def _swap(self, number: int, key: str, expected: bytes, desired: bytes) -> _StoreReply:
        """As torch's stores do: a key that is not there is expected to be empty."""
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return _StoreReply(number, [self.values.get(key, expected)])

    def _has(self, keys: Sequence[str]) -> bool:
        return self.values.keys() >= set(keys)

    def _serve_waiting(self) -> list[tuple[bytes, _StoreReply]]:
        served = [(c, request) for c, request in self._waiting.items() if self._has(request.keys)]
        found = [
            _StoreReply(request.number, [self.values[key] for key in request.keys])
            for _, request in served
        ]
        return [self._replied(c, reply) for (c, _), reply in zip(served, found, strict=True)]

    def _replied(self, client: bytes, reply: _StoreReply) -> tuple[bytes, _StoreReply]:
        self._waiting.pop(client, None)
        self._last[client] = reply
        self._last.move_to_end(client)
        while len(self._last) > MOST_CLIENTS:
            self._drop(next(iter(self._last)))
        return client, reply

    def _drop(self, client: bytes) -> None:
        self._waiting.pop(client, None)
        self._last.pop(client, None)


class StoreClient(dist.Store):
    """A store to torch. Hold it as long as a group is used that was formed through it.

    `is_lost` says whether no answer will come any more; a call that waits raises DistStoreError.
    """

    def __init__(
        self,
        context: wire.Context,
        address: str,
        keys: Keys | None,
        timeout_s: float,
        is_lost: Callable[[], bool] = lambda: False,
    ):
        super().__init__()
        self._timeout_s, self._is_lost = timeout_s, is_lost
        self._socket = wire.connect(context, address, secrets.token_hex(12).encode(), keys)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._seen: dict[str, bytes] = {}  # what was just waited for

    def set(self, key: str, value: str | bytes) -> None:
        self._request("set", [key], [value.encode() if isinstance(value, str) else bytes(value)])

    def get(self, key: str) -> bytes:
        """Waits until it is there."""
        if (seen := self._seen.pop(key, None)) is not None:  # torch waits for a key, then gets it
            return seen
        return self._request("get", [key]).values[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        values = self._request("get", keys, timeout_s=seconds).values
        self._seen = dict(zip(keys, values, strict=True))

    def check(self, keys: list[str]) -> bool:
        return bool(self._request("check", keys).amount)

    def add(self, key: str, amount: int) -> int:
        return self._request("add", [key], amount=amount).amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = [v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired)]
        return self._request("swap", [key], values).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._request("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._request("count", []).amount

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        with self._lock:
            if not self._socket.closed:
                bye = _StoreRequest(next(self._numbers), "bye", [])
                with suppress(zmq.Again):  # the server is gone
                    self._socket.send(_encode(bye), zmq.NOBLOCK)
                self._socket.close(linger=100)

    def _request(
        self,
        does: str,
        keys: list[str],
        values: list[bytes] | None = None,
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> _StoreReply:
        self._seen = {}
        with self._lock:
            if self._socket.closed:
                raise dist.DistStoreError("the store's client is closed")
            request = _StoreRequest(next(self._numbers), does, keys, values or [], amount)
            deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
            return self._await(request, deadline)

    def _await(self, request: _StoreRequest, deadline: float) -> _StoreReply:
        content, asked_at = _encode(request), -AGAIN_S
        while True:
            now = time.monotonic()
            if self._is_lost():
                raise dist.DistStoreError("the generation is over")
            if now > deadline:
                named = ", ".join(request.keys[:3])
                raise dist.DistStoreError(
                    f"the store did not answer in time ({request.does} {named})"
                )
            if now - asked_at > AGAIN_S:
                asked_at = now
                self._send(content)
            if self._socket.poll(TICK_MS):
                try:
                    reply = wire.decode(self._socket.recv_multipart()[-1], _REPLIES)
                except BadFrame:
                    continue
                if reply.number == request.number:
                    return reply

    def _send(self, content: bytes) -> None:
        try:
            self._socket.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return  # it will be sent again
