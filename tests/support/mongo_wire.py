"""A small server that speaks MongoDB's wire protocol, for tests: no real one can be had here.

    with start_mongo({"science.samples": documents}) as server:
        mongodb(server.url, "samples")
        server.stop()      # connections break; `server.start()` listens on the same port again

It is ours, and says so: it proves that `shoal.data.mongodb` speaks to pymongo as it should and
bears the faults below, not that a MongoDB of some version answers alike. Messages are those of the
published protocol (OP_MSG, and OP_QUERY for the first hello), coded by pymongo's own `bson`. It
knows hello, find, getMore, killCursors and aggregate, the filters and stages in `_OPERATORS` and
`_STAGES`, and SCRAM-SHA-256 for one user. Faults: `stop`, `pause`, `drop_from_batches` (answers
with less than it counted), `delay_s`. Threads of the test's process; nothing is written.
"""

import base64
import hashlib
import hmac
import os
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import bson

USER = "reader"
_HEADER = struct.Struct("<iiii")
_MSG, _QUERY, _REPLY = 2013, 2004, 1
_ROUNDS = 4096
_Documents = list[dict[str, Any]]


class MongoServer:
    """Collections by "database.collection"; change them as you like while it runs."""

    def __init__(self, collections: dict[str, _Documents], password: str | None):
        self.collections, self.password = collections, password
        self.delay_s, self.drop_from_batches, self.num_commands = 0.0, 0, 0
        self.running = threading.Event()
        self._cursors: dict[int, tuple[str, _Documents]] = {}
        self._listener: _Listener | None = None
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        secret = f"{USER}:{self.password}@" if self.password else ""
        return f"mongodb://{secret}127.0.0.1:{self.port}/science"

    def start(self) -> None:
        self.running.set()
        self._listener = _Listener(("127.0.0.1", self.port), self)
        self.port = self._listener.server_address[1]
        threading.Thread(target=self._listener.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        if self._listener is not None:
            self.running.set()
            self._listener.shutdown()
            self._listener.server_close()
            self._listener.break_connections()
            self._listener = None

    def pause(self) -> None:
        """Take connections and answer nothing."""
        self.running.clear()

    def resume(self) -> None:
        self.running.set()

    def answer(self, command: dict[str, Any], session: dict[str, Any]) -> dict[str, Any]:
        self.num_commands += 1
        name = next(iter(command))
        if name.lower() in ("hello", "ismaster"):
            return self._hello(command)
        if name in ("saslStart", "saslContinue"):
            return _scram(command, session, self.password or "")
        if self.password and not session.get("is_known"):
            return _refusal(13, f"command {name} requires authentication")
        time.sleep(self.delay_s)
        if name in ("find", "aggregate"):
            return self._query(name, command)
        if name == "getMore":
            return self._more(command)
        if name in ("killCursors", "endSessions", "ping"):
            return {"ok": 1.0}
        return _refusal(59, f"no such command: '{name}'")

    def _hello(self, command: dict[str, Any]) -> dict[str, Any]:
        mechanisms = {"saslSupportedMechs": ["SCRAM-SHA-256"]} if self.password else {}
        return {
            "helloOk": True,
            "isWritablePrimary": True,
            "ismaster": True,
            "maxBsonObjectSize": 16 << 20,
            "maxMessageSizeBytes": 48 << 20,
            "maxWriteBatchSize": 100_000,
            "minWireVersion": 0,
            "maxWireVersion": 21,
            "readOnly": True,
            "ok": 1.0,
            **(mechanisms if "saslSupportedMechs" in command else {}),
        }

    def _query(self, name: str, command: dict[str, Any]) -> dict[str, Any]:
        space = f"{command['$db']}.{command[name]}"
        found = [dict(document) for document in self.collections.get(space, [])]
        try:
            if name == "find":
                size = command.get("batchSize", 101)
                stages = [
                    {"$match": command.get("filter", {})},
                    *([{"$sort": command["sort"]}] if command.get("sort") else []),
                    *([{"$project": command["projection"]}] if command.get("projection") else []),
                ]
            else:
                size, stages = command["cursor"].get("batchSize", 101), command["pipeline"]
            for stage in stages:
                ((kind, argument),) = stage.items()
                found = _STAGES[kind](found, argument)
        except KeyError as error:
            return _refusal(40324, f"Unrecognized pipeline stage or operator: {error}")
        number = len(self._cursors) + 1 if len(found) > size else 0
        batch, rest = found[:size], found[size:]
        if self.drop_from_batches and "$count" not in str(stages):
            batch, rest, number = batch[: -self.drop_from_batches], [], 0
        self._cursors[number] = space, rest
        return {"cursor": {"firstBatch": batch, "id": bson.Int64(number), "ns": space}, "ok": 1.0}

    def _more(self, command: dict[str, Any]) -> dict[str, Any]:
        number, size = int(command["getMore"]), command.get("batchSize", 101)
        if number not in self._cursors:
            return _refusal(43, f"cursor id {number} not found")
        space, rest = self._cursors[number]
        self._cursors[number] = space, rest[size:]
        left = bson.Int64(number if rest[size:] else 0)
        return {"cursor": {"nextBatch": rest[:size], "id": left, "ns": space}, "ok": 1.0}


class _Listener(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], server: MongoServer):
        self.mongo, self._open = server, set[socket.socket]()
        super().__init__(address, _Connection)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def break_connections(self) -> None:
        for connection in self._open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        session: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            while len(head := self.rfile.read(_HEADER.size)) == _HEADER.size:
                size, number, _, code = _HEADER.unpack(head)
                body = self.rfile.read(size - _HEADER.size)
                server: MongoServer = self.server.mongo  # type: ignore[attr-defined]
                server.running.wait()
                answer = server.answer(_command(code, body), session)
                self.wfile.write(_message(code, number, bson.encode(answer)))


def _command(code: int, body: bytes) -> dict[str, Any]:
    if code == _QUERY:  # flags, the name of the collection, two numbers, the command
        return bson.decode(body[body.index(b"\0", 4) + 9 :])
    assert code == _MSG and body[4] == 0, "sections of documents are for writes, and none is known"
    return bson.decode(body[5 : 5 + struct.unpack_from("<i", body, 5)[0]])


def _message(code: int, number: int, answer: bytes) -> bytes:
    if code == _QUERY:
        body = struct.pack("<iqii", 8, 0, 0, 1) + answer
        return _HEADER.pack(_HEADER.size + len(body), 0, number, _REPLY) + body
    body = struct.pack("<iB", 0, 0) + answer
    return _HEADER.pack(_HEADER.size + len(body), 0, number, _MSG) + body


def _refusal(code: int, said: str) -> dict[str, Any]:
    return {"ok": 0.0, "errmsg": said, "code": code}


def _scram(command: dict[str, Any], session: dict[str, Any], password: str) -> dict[str, Any]:
    """RFC 7677, for the one user."""
    payload = bytes(command["payload"]).decode()
    if "saslStart" in command:
        first = payload.partition(",,")[2]
        nonce = first.rpartition("r=")[2] + base64.b64encode(os.urandom(12)).decode()
        salt = os.urandom(16)
        second = f"r={nonce},s={base64.b64encode(salt).decode()},i={_ROUNDS}"
        session.update(first=first, second=second, salt=salt)
        return {"conversationId": 1, "done": False, "payload": second.encode(), "ok": 1.0}
    if not payload:
        return {"conversationId": 1, "done": True, "payload": b"", "ok": 1.0}
    without, _, proof = payload.rpartition(",p=")
    said = f"{session['first']},{session['second']},{without}".encode()
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), session["salt"], _ROUNDS)
    key = hmac.digest(salted, b"Client Key", "sha256")
    sign = hmac.digest(hashlib.sha256(key).digest(), said, "sha256")
    wanted = bytes(a ^ b for a, b in zip(key, sign, strict=True))
    if not session["first"].startswith(f"n={USER},") or wanted != base64.b64decode(proof):
        return _refusal(18, "Authentication failed.")
    session["is_known"] = True
    mine = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), said, "sha256")
    answer = b"v=" + base64.b64encode(mine)
    return {"conversationId": 1, "done": True, "payload": answer, "ok": 1.0}


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "$in": lambda value, wanted: value in wanted,
    "$ne": lambda value, wanted: value != wanted,
    "$gt": lambda value, wanted: value is not None and value > wanted,
    "$lt": lambda value, wanted: value is not None and value < wanted,
}


def _matches(document: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    for name, rule in wanted.items():
        if name == "$and":
            if not all(_matches(document, part) for part in rule):
                return False
        elif isinstance(rule, Mapping) and any(word.startswith("$") for word in rule):
            if not all(_OPERATORS[word](document.get(name), of) for word, of in rule.items()):
                return False
        elif document.get(name) != rule:
            return False
    return True


def _sorted(found: _Documents, order: Mapping[str, int]) -> _Documents:
    for name, direction in reversed(order.items()):
        found = sorted(found, key=lambda one: _rank(one.get(name)), reverse=direction < 0)
    return found


def _rank(value: Any) -> tuple[int, Any]:
    """By type first, as MongoDB sorts."""
    kinds = (type(None), int | float, str, dict, list, bytes, bson.ObjectId)
    place = next((at for at, kind in enumerate(kinds) if isinstance(value, kind)), len(kinds))
    return place, 0 if value is None else str(value) if isinstance(value, dict | list) else value


def _projected(found: _Documents, shown: Mapping[str, Any]) -> _Documents:
    names = {name for name, is_shown in shown.items() if is_shown}
    names |= {"_id"} if shown.get("_id", 1) else set()
    return [{name: one[name] for name in one if name in names} for one in found]


_STAGES: dict[str, Callable[[_Documents, Any], _Documents]] = {
    "$match": lambda found, wanted: [one for one in found if _matches(one, wanted)],
    "$sort": _sorted,
    "$project": _projected,
    "$count": lambda found, name: [{name: len(found)}] if found else [],
    "$set": lambda found, values: [
        one | {name: one.get(text.removeprefix("$")) for name, text in values.items()}
        for one in found
    ],
}


@contextmanager
def start_mongo(
    collections: dict[str, _Documents], password: str | None = None
) -> Iterator[MongoServer]:
    server = MongoServer(collections, password)
    try:
        yield server
    finally:
        server.stop()
