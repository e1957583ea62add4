"""The key-value store of a supervised run, where ranks meet: Gloo's addresses, and the servers'.

torch's own store listens on TCP and takes every caller's word, so any user of the machine could
read and change what ranks believe of each other. This one is reached as everything else of a run is
(`wire.py`): through a socket of this user's own, or with the run's keys. A thread of the supervisor
holds it, so any rank may die. To torch a client is a store like any other.

One client a generation. A request that is not answered in a while is sent again, since a connection
may break, and is carried out once. Who waits for a key leaves when its generation is over.

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
from shoal.comm.reach import Reach
from shoal.comm.wire import BadFrame, Keys

MOST_BYTES = 4 << 20  # of a request
MOST_CLIENTS = 4096  # that are remembered
AGAIN_S = 1.0
TICK_MS = 20


class _Ask(msgspec.Struct, frozen=True, array_like=True):
    """`does` is what to do with the keys, or the first of them; `number` counts a client's."""

    number: int
    does: str
    keys: list[str]
    values: list[bytes] = []
    amount: int = 0


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    number: int
    values: list[bytes] = []
    amount: int = 0


_ASK, _ANSWER = msgspec.msgpack.Decoder(_Ask), msgspec.msgpack.Decoder(_Answer)
_encode = msgspec.msgpack.Encoder().encode


class StoreServer:
    """Listens as long as it is not closed; clients connect to `address`."""

    def __init__(self, reach: Reach):
        self._context: wire.Context = zmq.Context()
        self._router, self.address = wire.listen(self._context, *reach.place, MOST_BYTES)
        self._held = Held()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name="shoal-store", daemon=True)
        self._thread.start()

    def forget(self, prefix: str) -> None:
        """Let go of the keys that begin so."""
        with self._lock:
            self._held.forget(prefix)

    def close(self) -> None:
        self._context.term()  # which ends the thread, and waits until its socket is closed
        self._thread.join()

    def _serve(self) -> None:
        with self._router:
            while True:
                try:
                    sender, *frames = self._router.recv_multipart()
                    with self._lock:
                        answers = self._held.take_in(sender, frames[-1])
                    for client, answer in answers:
                        self._send(client, answer)
                except zmq.ContextTerminated:
                    return

    def _send(self, client: bytes, answer: _Answer) -> None:
        try:
            self._router.send_multipart([client, _encode(answer)], zmq.NOBLOCK)
        except zmq.ContextTerminated:
            raise
        except zmq.ZMQError:
            return  # it is gone, or will ask again


class Held:
    """Keys, values and who waits for which. Pure: it has no socket."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[bytes, _Ask] = {}  # a client waits for one answer at a time
        self._last: OrderedDict[bytes, _Answer] = OrderedDict()  # by client

    def take_in(self, client: bytes, content: bytes) -> list[tuple[bytes, _Answer]]:
        """What is to be answered to whom, now that a client sent this."""
        try:
            ask = wire.decode(content, _ASK)
        except BadFrame:
            return []
        last = self._last.get(client)
        if last is not None and ask.number <= last.number:  # it came twice
            return [(client, last)] if ask.number == last.number else []
        if ask.does == "bye":
            self._drop(client)
            return []
        if ask.does == "get" and not self._has(ask.keys):
            self._waiting[client] = ask
            return []
        answer = self._do(ask)
        if answer is None:
            return []
        return [self._answered(client, answer), *self._serve_waiting()]

    def forget(self, prefix: str) -> None:
        """Who still waits for one of these keys is gone."""
        self.values = {k: v for k, v in self.values.items() if not k.startswith(prefix)}
        for client, ask in list(self._waiting.items()):
            if any(key.startswith(prefix) for key in ask.keys):
                self._drop(client)

    def _do(self, ask: _Ask) -> _Answer | None:
        """None for what makes no sense."""
        number, keys, values = ask.number, ask.keys, ask.values
        match ask.does:
            case "get":
                return _Answer(number, [self.values[key] for key in keys])
            case "check":
                return _Answer(number, amount=int(self._has(keys)))
            case "count":
                return _Answer(number, amount=len(self.values))
            case "set" if len(keys) == len(values):
                self.values |= zip(keys, values, strict=True)
                return _Answer(number)
            case "add" if len(keys) == 1:
                return self._add(number, keys[0], ask.amount)
            case "swap" if len(keys) == 1 and len(values) == 2:
                return self._swap(number, keys[0], *values)
            case "delete":
                found = [key for key in keys if self.values.pop(key, None) is not None]
                return _Answer(number, amount=len(found))
        return None

    def _add(self, number: int, key: str, amount: int) -> _Answer | None:
        try:
            total = int(self.values.get(key, b"0")) + amount
        except ValueError:
            return None
        self.values[key] = str(total).encode()
        return _Answer(number, amount=total)

    def _swap(self, number: int, key: str, expected: bytes, desired: bytes) -> _Answer:
        """As torch's stores do: a key that is not there is expected to be empty."""
        if self.values.get(key, b"") == expected:
            self.values[key] = desired
        return _Answer(number, [self.values.get(key, expected)])

    def _has(self, keys: Sequence[str]) -> bool:
        return self.values.keys() >= set(keys)

    def _serve_waiting(self) -> list[tuple[bytes, _Answer]]:
        served = [(c, ask) for c, ask in self._waiting.items() if self._has(ask.keys)]
        found = [_Answer(ask.number, [self.values[key] for key in ask.keys]) for _, ask in served]
        return [self._answered(c, answer) for (c, _), answer in zip(served, found, strict=True)]

    def _answered(self, client: bytes, answer: _Answer) -> tuple[bytes, _Answer]:
        self._waiting.pop(client, None)
        self._last[client] = answer
        self._last.move_to_end(client)
        while len(self._last) > MOST_CLIENTS:
            self._drop(next(iter(self._last)))
        return client, answer

    def _drop(self, client: bytes) -> None:
        self._waiting.pop(client, None)
        self._last.pop(client, None)


class StoreClient(dist.Store):
    """A store to torch. Hold it as long as a group is used that was formed through it.

    `is_lost` says whether nobody will answer any more; who waits then raises DistStoreError.
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
        self._line = wire.connect(context, address, secrets.token_hex(12).encode(), keys)
        self._numbers = count(1)
        self._lock = threading.Lock()
        self._seen: dict[str, bytes] = {}  # what was just waited for

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", [key], [value.encode() if isinstance(value, str) else bytes(value)])

    def get(self, key: str) -> bytes:
        """Waits until it is there."""
        if (seen := self._seen.pop(key, None)) is not None:  # torch waits for a key, then gets it
            return seen
        return self._ask("get", [key]).values[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        values = self._ask("get", keys, timeout_s=seconds).values
        self._seen = dict(zip(keys, values, strict=True))

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys).amount)

    def add(self, key: str, amount: int) -> int:
        return self._ask("add", [key], amount=amount).amount

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        values = [v.encode() if isinstance(v, str) else bytes(v) for v in (expected, desired)]
        return self._ask("swap", [key], values).values[0]

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", [key]).amount)

    def num_keys(self) -> int:
        return self._ask("count", []).amount

    def has_extended_api(self) -> bool:
        return False

    def close(self) -> None:
        with self._lock:
            if not self._line.closed:
                bye = _Ask(next(self._numbers), "bye", [])
                with suppress(zmq.Again):  # it is gone, and needs no good-bye
                    self._line.send(_encode(bye), zmq.NOBLOCK)
                self._line.close(linger=100)

    def _ask(
        self,
        does: str,
        keys: list[str],
        values: list[bytes] | None = None,
        amount: int = 0,
        timeout_s: float | None = None,
    ) -> _Answer:
        self._seen = {}
        with self._lock:
            if self._line.closed:
                raise dist.DistStoreError("the store's client is closed")
            ask = _Ask(next(self._numbers), does, keys, values or [], amount)
            deadline = time.monotonic() + (self._timeout_s if timeout_s is None else timeout_s)
            return self._await(ask, deadline)

    def _await(self, ask: _Ask, deadline: float) -> _Answer:
        content, asked_at = _encode(ask), -AGAIN_S
        while True:
            now = time.monotonic()
            if self._is_lost():
                raise dist.DistStoreError("the generation is over")
            if now > deadline:
                named = ", ".join(ask.keys[:3])
                raise dist.DistStoreError(f"the store did not answer in time ({ask.does} {named})")
            if now - asked_at > AGAIN_S:
                asked_at = now
                self._send(content)
            if self._line.poll(TICK_MS):
                try:
                    answer = wire.decode(self._line.recv_multipart()[-1], _ANSWER)
                except BadFrame:
                    continue
                if answer.number == ask.number:
                    return answer

    def _send(self, content: bytes) -> None:
        try:
            self._line.send(content, zmq.NOBLOCK)
        except zmq.Again:
            return  # it will be sent again
