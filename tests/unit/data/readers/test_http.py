"""Files behind http://, on a real server that fails for a while, refuses, or knows no ranges."""

import gc
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import fsspec.asyn
import pytest

from shoal.data.readers.files import Files
from shoal.data.readers.linewise import lines
from shoal.data.readers.records import SourceLost
from shoal.errors import UsageError
from shoal.storage import object_client
from shoal.storage.object_client import RetryPolicy

HASTY = RetryPolicy(num_tries=3, first_pause_s=0.01, most_pause_s=0.05)
CONTENT = b"one\ntwo\nthree\n"


class Site(ThreadingHTTPServer):
    """Answers the next requests as `answers` says, and all others with CONTENT."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.answers: list[int] = []
        self.knows_ranges = True
        self.url = f"http://127.0.0.1:{self.server_port}/a.txt"


class _Answer(BaseHTTPRequestHandler):
    server: Site

    def do_GET(self) -> None:
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status < 0:  # it hangs for a while
            time.sleep(1.0)
        if status <= 0:  # the connection breaks
            self.close_connection = True
            return
        content = CONTENT if status == 200 else b""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if asked and self.server.knows_ranges and status == 200:
            status, content = 206, content[int(asked[1]) : int(asked[2]) + 1]
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def loop() -> Any:
    """The thread that requests run in: it stays for good, and is no leak of a test."""
    return fsspec.asyn.get_loop()


@pytest.fixture
def site(loop: Any) -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()
    gc.collect()  # clients are closed by the collector


def test_lines_are_read_by_range(site: Site) -> None:
    assert list(lines(site.url)) == ["one", "two", "three"]


@pytest.mark.parametrize("failure", [0, 500, 503, 429])
def test_a_server_that_fails_for_a_while_is_asked_again(site: Site, failure: int) -> None:
    files = Files(site.url, patience=HASTY)
    site.answers = [failure, failure]
    assert files.read(0, 4, 7) == b"two"
    site.answers = [200, failure, failure]  # the bytes come, the look at the file fails
    assert files.read(0, 4, 7) == b"two"
    site.answers = [failure] * 50
    with pytest.raises(SourceLost, match=r"cannot read http://.*/a.txt: .*tried 3 times"):
        files.read(0, 4, 7)
    site.answers = [200] + [failure] * 50
    with pytest.raises(SourceLost, match=r"cannot look at http://.*/a.txt: .*tried 3 times"):
        files.read(0, 4, 7)
    with pytest.raises(UsageError, match=r"cannot look at http://.*/a.txt: .*tried 3 times"):
        Files(site.url, patience=HASTY)


def test_a_file_that_shrank_has_changed(site: Site) -> None:
    files = Files(site.url, patience=HASTY)
    site.answers = [416]
    with pytest.raises(SourceLost, match=r"a.txt changed after it was opened"):
        files.read(0, 4, 7)


def test_a_server_that_hangs_ends_the_wait(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_client, "_LIMIT_S", (0.1, 0.1))
    files = Files(site.url, patience=HASTY)
    site.answers = [-1] * 3
    with pytest.raises(SourceLost, match=r"cannot read http://.*/a.txt: .*imeout.*tried 3 times"):
        files.read(0, 4, 7)
    assert files.read(0, 4, 7) == b"two"


@pytest.mark.parametrize("refusal", [401, 403])
def test_missing_credentials_are_named_at_once(site: Site, refusal: int) -> None:
    site.answers = [refusal] * 50
    with pytest.raises(UsageError, match=rf"{refusal}.*Check the credentials and the address"):
        Files(site.url, patience=HASTY)
    assert len(site.answers) == 48, "one look, by HEAD and by GET"


def test_a_file_that_is_not_there_is_missing(site: Site) -> None:
    site.answers = [404] * 50
    with pytest.raises(UsageError, match=r"a.txt does not exist"):
        Files(site.url, patience=HASTY)


def test_nobody_there_is_not_a_missing_file(site: Site) -> None:
    site.shutdown()
    site.server_close()
    with pytest.raises(UsageError, match=r"cannot look at http://.*tried 3 times"):
        Files(site.url, patience=HASTY)


def test_a_server_without_ranges_is_named(site: Site) -> None:
    files = Files(site.url, patience=HASTY)
    site.knows_ranges = False
    with pytest.raises(SourceLost, match=r"sent 14 bytes of a.txt where 3 were asked for"):
        files.read(0, 4, 7)
