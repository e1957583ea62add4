"""The live page's server, over real sockets: who may ask, and what is answered."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

import uvicorn

from shoal.errors import UsageError
from shoal.ui import server as ui_server
from shoal.ui.listing import RunDirectory
from shoal.ui.server import LoopbackServer, UiServer, Views, control_run, open_socket
from tests.unit.ui.made_runs import make_run, write_lines

TOKEN = "the-token"
EVIL = '<img src=x onerror="alert(1)">'


class Served(NamedTuple):
    port: int
    directory: Path
    ui: UiServer

    def ask(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        fields = {"authorization": f"Bearer {TOKEN}"} | {
            name.replace("_", "-"): value for name, value in headers.items()
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        connection.request(method, path, body, fields)
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        is_json = answer.headers["content-type"] == "application/json"
        return answer.status, json.loads(content) if is_json else content, dict(answer.headers)


def serving(directory: Path, can_control: bool = False) -> Iterator[Served]:
    listener = open_socket(0)
    port = listener.getsockname()[1]
    ui = UiServer(directory, port, TOKEN, can_control=can_control)
    config = uvicorn.Config(ui.app, log_level="error", lifespan="off")
    made = LoopbackServer(config, ui.leaving)
    thread = threading.Thread(target=made.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Served(port, directory, ui)
    finally:
        ui.leaving.set()
        made.should_exit = True
        thread.join()
        listener.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    make_run(tmp_path / "one", steps=10)
    make_run(tmp_path / "two", steps=20, recipe=EVIL)
    yield from serving(tmp_path)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Served]:
    make_run(tmp_path / "one")
    yield from serving(tmp_path, can_control=True)


def test_runs_are_listed_and_shown(served: Served) -> None:
    status, found, _ = served.ask("/api/runs")
    assert status == 200 and {run["id"] for run in found["runs"]} >= {"one", "two"}
    status, view, _ = served.ask("/api/run?run=two")
    assert status == 200 and view["step"] == 20 and view["recipe"] == EVIL
    status, both, _ = served.ask("/api/compare?run=one&run=two&run=none")
    assert status == 200 and len(both["runs"]) == 2


def test_a_stranger_without_the_token_gets_nothing(served: Served) -> None:
    for path in ("/?", "/api/runs?", "/api/run?run=one&", "/api/stream?", "/none?"):
        for wrong in ("", "Bearer wrong", f"Bearer {TOKEN}x", "Bearer ü"):
            status, answer, _ = served.ask(path, authorization=wrong)
            assert status == 401 and "error" in answer
        assert served.ask(f"{path}token=wrong", authorization="")[0] == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1"]
)
def test_another_host_is_refused_even_with_the_token(served: Served, host: str) -> None:
    assert served.ask("/api/runs", Host=host.format(port=served.port))[0] == 403
    assert served.ask("/page/app.js", Host=host.format(port=served.port))[0] == 403
    assert served.ask("/api/runs", Host=f"localhost:{served.port}")[0] == 200


def test_another_origin_is_refused(served: Served) -> None:
    for origin in ("http://evil.example", "null", f"https://127.0.0.1:{served.port}"):
        assert served.ask("/api/runs", Origin=origin)[0] == 403
    assert served.ask("/api/runs", Sec_Fetch_Site="cross-site")[0] == 403
    assert served.ask("/api/runs", Origin=f"http://127.0.0.1:{served.port}")[0] == 200


def test_every_answer_has_the_policy(served: Served) -> None:
    for path in ("/", "/api/runs", "/page/app.js", "/page/uPlot.iife.min.js"):
        status, _, headers = served.ask(path)
        assert status == 200
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert headers["x-content-type-options"] == "nosniff"
    assert served.ask("/?token=" + TOKEN, authorization="")[0] == 200


@pytest.mark.parametrize(
    "run", ["../one", "one/../two", "/etc", "", "one/", "none", "%00", "..%2Fone", "one/logs"]
)
def test_only_runs_of_the_list_are_read(served: Served, run: str) -> None:
    assert served.ask(f"/api/run?run={run}")[0] == 404
    assert served.ask(f"/api/stream?run={run}")[0] == 404


@pytest.mark.parametrize(
    "name", ["../server.py", "%2e%2e%2fserver.py", "none.js", "..", "__init__.py"]
)
def test_only_files_of_the_page_are_served(served: Served, name: str) -> None:
    assert served.ask(f"/page/{name}")[0] == 404


def test_without_control_nothing_is_changed(served: Served) -> None:
    body = json.dumps({"run": "one", "action": "stop"})
    status, answer, _ = served.ask("/api/control", "POST", body)
    assert status == 403 and "--control" in answer["error"]
    assert served.ask("/api/control")[0] == 405


def test_control_says_what_is_wrong(controlled: Served) -> None:
    def asked(**what: str) -> tuple[int, Any]:
        return controlled.ask("/api/control", "POST", json.dumps(what))[:2]

    assert asked(run="one", action="burn")[0] == 409
    assert asked(run="none", action="stop")[0] == 404
    assert asked(action="stop")[0] == 400
    assert controlled.ask("/api/control", "POST", "x" * 100_000)[0] == 413
    status, answer = asked(run="one", action="resize", size="data=3")
    assert status == 409 and "cannot be reached" in answer["error"]
    status, answer = asked(run="one", action="stop")  # one that is over stays as it is
    assert status == 200 and "done" in answer["done"]
    assert controlled.ask("/api/control", "POST", "{}", Origin="http://evil.example")[0] == 403


def stream(served: Served, query: str) -> tuple[http.client.HTTPConnection, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=20)
    connection.request("GET", f"/api/stream?token={TOKEN}{query}")
    return connection, connection.getresponse()


def next_view(answer: Any) -> dict[str, Any]:
    while not (line := answer.readline()).startswith(b"data: "):
        assert line
    return json.loads(line[6:])


def test_what_is_written_is_pushed(served: Served) -> None:
    run = make_run(served.directory / "live", steps=50, made=10)
    connection, answer = stream(served, "&run=live")
    assert next_view(answer)["step"] == 10
    write_lines(run / "metrics.jsonl", [{"step": 11, "loss": 0.5}], "a")
    assert next_view(answer)["step"] == 11
    connection.close()


def test_a_client_that_does_not_read_holds_up_nobody(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ui_server, "SEND_S", 0.2)
    monkeypatch.setattr(ui_server, "LOOK_S", 0.01)
    make_run(served.directory / "large", steps=2000, ranks=32)
    views = Views(RunDirectory(served.directory))
    content, _ = views.get("large")
    assert content is not None
    monkeypatch.setattr(Views, "newer", lambda self, run, stamp: (object(), content))
    slow = socket.create_connection(("127.0.0.1", served.port))
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    asked = (
        f"GET /api/stream?run=large&token={TOKEN} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\n\r\n"
    )
    slow.sendall(asked.encode())
    while served.ui.num_streams == 0:
        time.sleep(0.01)
    assert served.ask("/api/runs")[0] == 200
    while served.ui.num_streams:  # it is given up
        time.sleep(0.01)
    slow.close()


def test_there_are_only_so_many_streams(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ui_server, "MOST_STREAMS", 0)
    connection, answer = stream(served, "&run=one")
    assert answer.status == 503 and b"Close some" in answer.read()
    connection.close()


def test_readers_of_the_last_runs_alone_are_kept(tmp_path: Path) -> None:
    for number in range(12):
        make_run(tmp_path / str(number), steps=3)
    views = Views(RunDirectory(tmp_path))
    for number in range(12):
        assert views.get(str(number))[0] is not None
    assert len(views._readers) == ui_server.MOST_READERS


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=f"Port {port} cannot be used: Address already in use"):
            open_socket(port)


def test_it_listens_on_loopback_alone() -> None:
    with open_socket(0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_an_action_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="stop, save and resize"):
        control_run(tmp_path, "burn", "")
