"""`shoal ui`: the runs of a directory as a live page, for this user on this machine alone.

It listens on loopback. Data are given to who shows the token of the URL that the command prints;
another Host or Origin is refused, so that no page of another site reaches it, through a name that
points here or otherwise. A content security policy lets only our own scripts run. Nothing is
changed unless it was started with control: then a run can be stopped, saved and resized, by the
same functions as the verbs.

Views are pushed as server-sent events when a run's files change, looked at twice a second. A slow
client gets the newest view when it is ready for one, and holds one view at most. Readers of the
last few runs are kept, each bounded; so memory does not grow with runs or time.

Read next: `listing.py`, `run_reader.py`; `page/app.js` is the other side.
"""

import asyncio
import hmac
import math
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import parse_qs

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from shoal.elastic.control import send_request
from shoal.errors import ShoalError, UsageError, sendable
from shoal.events.sinks import EVENTS, SPENT
from shoal.launch.engines import find_job
from shoal.launch.outcome import OUTCOME
from shoal.launch.run_status import METRICS
from shoal.launch.stop import stop_job
from shoal.storage.decoding import encode_json, try_decode_json
from shoal.storage.run_dir import RUN, owner_of
from shoal.ui.findings import settings_differences
from shoal.ui.listing import RunDirectory, file_stamp
from shoal.ui.report import ReportData, page_file
from shoal.ui.run_reader import RunReader

USUAL_PORT = 8765
MOST_READERS = 8
MOST_STREAMS = 64
MOST_COMPARED = 12
MOST_BODY = 65_536
LOOK_S, LIST_S, ALIVE_S = 0.5, 2.0, 10.0
FIRST_S = 0.1  # of reading before something is shown
SEND_S = 30.0  # that a client may take for one view
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class ControlAsked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `POST /api/control` takes."""

    run: str
    action: str
    size: str = ""


class Views:
    """The newest view of each run, encoded: the last few runs that were asked for."""

    def __init__(self, runs: RunDirectory):
        self.runs = runs
        self._lock = threading.Lock()
        self._readers: OrderedDict[str, tuple[RunReader, threading.Lock]] = OrderedDict()

    def get(self, run: str, most_s: float = math.inf) -> tuple[bytes | None, bool]:
        """A view as JSON, None if there is no such run; and whether there is more to read."""
        with self._lock:
            if run not in self._readers:
                place = self.runs.find(run)
                if place is None:
                    return None, False
                self._readers[run] = (RunReader(place), threading.Lock())
                while len(self._readers) > MOST_READERS:
                    self._readers.popitem(last=False)
            self._readers.move_to_end(run)
            reader, lock = self._readers[run]
        with lock:
            return encode_json(reader.look(most_s=most_s)), reader.is_behind

    def newer(self, run: str, stamp: Any) -> tuple[Any, bytes | None]:
        """The view of a run if one of its files changed since `stamp`; while it goes on, every two
        seconds at least."""
        place = self.runs.path / run
        is_running = owner_of(place) is not None
        files = [file_stamp(place / name) for name in (RUN, OUTCOME, EVENTS, SPENT, METRICS)]
        now = (files, is_running, int(time.time() / 2) if is_running else 0)
        if now == stamp:
            return now, None
        content, is_behind = self.get(run, FIRST_S)
        return None if is_behind else now, content

    def listing(self, can_control: bool) -> bytes:
        with self._lock:
            found = self.runs.list_all()
        return encode_json(msgspec.structs.replace(found, can_control=can_control))

    def compare(self, names: list[str]) -> bytes | None:
        places = [self.runs.find(name) for name in names[:MOST_COMPARED]]
        views = [RunReader(place).look() for place in places if place is not None]
        if not views:
            return None
        return encode_json(ReportData(made="", runs=views, differences=settings_differences(views)))


class TokenGuard:
    """Refuses a request without the token, or by another name than loopback's."""

    def __init__(self, app: ASGIApp, port: int, token: str):
        self._app, self._token = app, token
        self._hosts = {f"{host}:{port}" for host in ("127.0.0.1", "localhost", "[::1]")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin1"): value.decode("latin1") for name, value in scope["headers"]
        }
        refused = self.refuse(scope["path"], headers, scope["query_string"].decode("latin1"))
        if refused is not None:
            await refused(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def refuse(self, path: str, headers: Mapping[str, str], query: str) -> Response | None:
        """Why a request is refused; None if it is not."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return answer({"error": f"This is not {host or 'a host without a name'}."}, 403)
        is_foreign = origin is not None and origin.removeprefix("http://") not in self._hosts
        if is_foreign or headers.get("sec-fetch-site") == "cross-site":
            return answer({"error": "Another site asks for this, and may not."}, 403)
        if path.startswith("/page/"):
            return None  # our scripts, which hold nothing of a run
        shown = headers.get("authorization", "").removeprefix("Bearer ")
        shown = shown or parse_qs(query).get("token", [""])[0]
        if not hmac.compare_digest(shown.encode(), self._token.encode()):
            told = "Open the whole address that `shoal ui` printed: the token in it is the key."
            return answer({"error": told}, 401)
        return None


def answer(value: Any, status: int = 200) -> Response:
    return encoded(encode_json(value), status)


def encoded(content: bytes, status: int = 200) -> Response:
    return Response(content, status, HEADERS, "application/json")


# A stamp, and what is new since the last one; a stamp of None asks to look again at once.
Look = Callable[[Any], tuple[Any, bytes | None]]


class EventStream:
    """Server-sent events: what `look` finds, each time its stamp is another one."""

    def __init__(self, look: Look, every_s: float, server: "UiServer"):
        self._look, self._every_s, self._server = look, every_s, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._server.num_streams >= MOST_STREAMS:
            busy = answer({"error": f"{MOST_STREAMS} pages watch already. Close some."}, 503)
            await busy(scope, receive, send)
            return
        with self._server.streaming():
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                await self._push(send, gone)
            except (TimeoutError, OSError):
                pass  # the client does not read, or has gone
            finally:
                gone.cancel()

    async def _push(self, send: Send, gone: "asyncio.Future[None]") -> None:
        fields = {**HEADERS, "content-type": "text/event-stream"}
        headers = [(name.encode(), value.encode()) for name, value in fields.items()]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        stamp: Any = None
        sent_at = time.monotonic()
        while not gone.done() and not self._server.leaving.is_set():
            stamp, content = await run_in_threadpool(self._look, stamp)
            body = b"" if content is None else b"data: " + content + b"\n\n"
            if not body and time.monotonic() - sent_at > ALIVE_S:
                body = b": still here\n\n"
            if body:
                sent_at = time.monotonic()
                message = {"type": "http.response.body", "body": body, "more_body": True}
                await asyncio.wait_for(send(message), SEND_S)
            await asyncio.wait([gone], timeout=0 if stamp is None else self._every_s)
        await asyncio.wait_for(send({"type": "http.response.body", "body": b""}), SEND_S)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class UiServer:
    """The application, and what it knows of its clients."""

    def __init__(self, directory: Path, port: int, token: str, *, can_control: bool):
        self.num_streams, self.leaving = 0, threading.Event()
        self._views, self._can_control = Views(RunDirectory(directory)), can_control
        routes = [
            Route("/", self._index),
            Route("/page/{name}", self._page),
            Route("/api/runs", self._runs),
            Route("/api/run", self._run),
            Route("/api/compare", self._compare),
            Route("/api/stream", self._stream),
            Route("/api/control", self._control, methods=["POST"]),
        ]
        self.app = TokenGuard(Starlette(routes=routes), port, token)

    @contextmanager
    def streaming(self) -> Iterator[None]:
        self.num_streams += 1
        try:
            yield
        finally:
            self.num_streams -= 1

    async def _index(self, request: Request) -> Response:
        return Response(page_file("index.html"), 200, HEADERS, "text/html")

    async def _page(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = page_file(name) if Path(name).suffix in TYPES else b""
        if not content:
            return answer({"error": f"There is no file {name}."}, 404)
        return Response(content, 200, HEADERS, TYPES[Path(name).suffix])

    async def _runs(self, request: Request) -> Response:
        return encoded(await run_in_threadpool(self._views.listing, self._can_control))

    async def _run(self, request: Request) -> Response:
        content, _ = await run_in_threadpool(self._views.get, _name(request))
        return _found(content)

    async def _compare(self, request: Request) -> Response:
        names = request.query_params.getlist("run")
        return _found(await run_in_threadpool(self._views.compare, names))

    async def _stream(self, request: Request) -> ASGIApp:
        if "run" not in request.query_params:
            return EventStream(self._look_at_all, LIST_S, self)
        name = _name(request)
        if await run_in_threadpool(self._views.runs.find, name) is None:
            return _found(None)
        return EventStream(partial(self._views.newer, name), LOOK_S, self)

    def _look_at_all(self, stamp: Any) -> tuple[Any, bytes | None]:
        content = self._views.listing(self._can_control)
        return content, content if content != stamp else None

    async def _control(self, request: Request) -> Response:
        if not self._can_control:
            return answer({"error": "This page only looks. Start `shoal ui` with --control."}, 403)
        content = b""
        async for block in request.stream():
            content += block
            if len(content) > MOST_BODY:
                return answer({"error": "That is too long."}, 413)
        asked = try_decode_json(content, ControlAsked)
        if asked is None:
            return answer({"error": "Send run and action, and size to resize."}, 400)
        place = await run_in_threadpool(self._views.runs.find, asked.run)
        if place is None:
            return _found(None)
        try:
            done = await run_in_threadpool(control_run, place, asked.action, asked.size)
        except ShoalError as error:
            return answer({"error": sendable(str(error))}, 409)
        return answer({"done": done})


def _name(request: Request) -> str:
    return str(request.query_params.get("run", "."))


def _found(content: bytes | None) -> Response:
    if content is None:
        return answer({"error": "There is no such run in this directory."}, 404)
    return encoded(content)


def control_run(run_dir: Path, action: str, size: str) -> str:
    """Stop, save or resize a run that goes on; what was done, in words."""
    if action == "stop":
        state, run = stop_job(find_job(str(run_dir)), now=False)
        saved = f", and saved as {run.checkpoint}" if run.checkpoint else ""
        return f"The run is {state.state}{saved}."
    if action == "save":
        answer = send_request(run_dir, save=True)
        if "refused" in answer:
            raise UsageError(answer["refused"])
        return f"The run is saved as {answer['saved']}, and goes on."
    if action == "resize":
        changed = send_request(run_dir, resize=size)
        if "refused" in changed:
            raise UsageError(changed["refused"])
        return f"The run has the plan {changed['plan']}, after {changed['ms']:.0f} ms."
    raise UsageError(f"There is no action {action!r}: stop, save and resize are known.")


def open_socket(port: int | None) -> socket.socket:
    """A socket on loopback: the given port, or the usual one, or any if that is taken."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for number in (port,) if port is not None else (USUAL_PORT, 0):
        try:
            made.bind(("127.0.0.1", number))
            made.listen(64)
            return made
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or str(error)
    made.close()
    raise UsageError(
        f"Port {port} cannot be used: {why}. Choose another with --port, or leave it out to get "
        "one that is free."
    )


class LoopbackServer(uvicorn.Server):
    """Tells streams that the server leaves: they would keep it for as long as pages are open."""

    def __init__(self, config: uvicorn.Config, leaving: threading.Event):
        super().__init__(config)
        self._leaving = leaving

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._leaving.set()
        super().handle_exit(sig, frame)


def serve(directory: Path, listener: socket.socket, token: str, *, can_control: bool) -> None:
    """Serve until a signal ends it."""
    made = UiServer(directory, listener.getsockname()[1], token, can_control=can_control)
    config = uvicorn.Config(
        made.app,
        log_level="warning",
        access_log=False,  # whose lines would have the token in them
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=1,
        limit_concurrency=4 * MOST_STREAMS,
        h11_max_incomplete_event_size=MOST_BODY,
    )
    LoopbackServer(config, made.leaving).run(sockets=[listener])
