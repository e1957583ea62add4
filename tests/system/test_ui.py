"""`shoal report`, `shoal ui` and `shoal top` as commands, and their pages in a real browser."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import run_here
from tests.support.browser import SIZES, Browser, open_browser
from tests.unit.ui.made_runs import BEGAN, loss_of_rank, make_run, write_lines

EVIL = "</script><script>window.hit=1</script><img src=x onerror='window.hit=2'>"
SHOAL = [sys.executable, "-P", "-m", "shoal"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as made:
        yield made


@contextmanager
def serving(directory: Path, *options: str) -> Iterator[dict[str, Any]]:
    """`shoal ui` as a process; what it says of its address."""
    command = [*SHOAL, "ui", str(directory), "--no-browser", "--json", "--port", "0", *options]
    environment = os.environ | {"SHOAL_CACHE": str(directory.parent / "cache")}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=50)[1]
    assert process.returncode == 0, said
    assert "Traceback" not in said


def status_of(port: int, path: str, **headers: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    status = connection.getresponse().status
    connection.close()
    return status


def last_line(text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text.strip().splitlines()[-1])
    return found


def test_a_report_of_two_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path / "one"), make_run(tmp_path / "two", steps=20)
    write_lines(one / "events.jsonl", loss_of_rank(1, 20), "a")
    out = tmp_path / "both.html"
    assert run_here(["report", str(one), str(two), "-o", str(out), "--json"]) == 0
    found = last_line(capsys.readouterr().out)
    assert found["out"] == str(out) and out.exists() and found["exit_code"] == 0
    assert found["bottleneck"] and found["incidents"][0]["what"] == "rank 1 was lost"
    assert run_here(["report", str(one), str(two), "-o", str(out)]) == 2  # it exists
    assert run_here(["report", str(one)]) == 0 and (one / "report.html").exists()


@pytest.mark.parametrize("words", [["report", "none"], ["report"], ["top", "none"], ["ui", "none"]])
def test_what_is_not_there_is_refused(words: list[str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_here(words) == 2


def test_top_prints_once_without_a_terminal(tmp_path: Path, monkeypatch, capsys) -> None:
    make_run(tmp_path / "runs/one")
    monkeypatch.chdir(tmp_path)
    assert run_here(["top"]) == 0
    assert "step 50 of 50" in capsys.readouterr().out


def test_the_page_is_served_to_who_has_the_token(tmp_path: Path) -> None:
    make_run(tmp_path / "runs/one")
    with serving(tmp_path / "runs") as ui:
        port, token = ui["port"], ui["token"]
        assert status_of(port, "/api/runs") == 401
        assert status_of(port, f"/api/runs?token={token}") == 200
        assert status_of(port, f"/api/runs?token={token}", Host="evil.example") == 403
        assert ui["url"] == f"http://127.0.0.1:{port}/?token={token}"


def test_a_port_that_is_taken_is_refused(tmp_path: Path, capfd) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        words = ["ui", str(tmp_path), "--no-browser", "--port", str(port)]
        assert run_here(words) == 2
    assert f"Port {port} cannot be used" in capfd.readouterr().err


@pytest.mark.full
def test_a_report_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    """The quick smoke: it draws itself, alone, and runs nothing that a name holds."""
    run = make_run(tmp_path / "run", recipe=EVIL, run={EVIL: {"value": EVIL, "from": EVIL}})
    write_lines(run / "events.jsonl", loss_of_rank(1, 20), "a")
    use = {"event": "host-use", "host": 0, "cpu_percent": 50.0, "memory_bytes": 10**9}
    uses = [use | {"time": BEGAN + second} for second in range(3)]
    warning = {"event": "warning", "time": BEGAN, "text": EVIL}
    write_lines(run / "events.jsonl", [warning, *uses], "a")
    ahead = {"count": 9, "mean": 0.5, "largest": 2, "histogram": {"0": 5, "1": 3, "2": 1}}
    foretold = {"predicted": {"step_s": 0.5}, "measured": {"step_s": 0.6}}
    (run / "outcome.json").write_text(json.dumps({"staleness": ahead, **foretold}))
    assert run_here(["report", str(run)]) == 0
    browser.open((run / "report.html").as_uri())
    browser.wait("return document.querySelectorAll('.chart canvas').length >= 4", "the charts")
    assert "rank 1 was lost" in browser.text() and EVIL in browser.text()
    for words in ("CPU", "Memory", "Staleness", "time of a step", "500 ms"):
        assert words in browser.text()
    assert browser.run("return window.hit") is None
    strips = "return document.querySelector('.strips canvas').getAttribute('aria-label')"
    assert "rank 1: " in browser.run(strips) and "dead once" in browser.run(strips)
    assert not browser.errors()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_every_page_fits_every_screen(tmp_path: Path, browser: Browser) -> None:
    run = make_run(tmp_path / "runs/one", steps=300, ranks=8)
    write_lines(run / "events.jsonl", loss_of_rank(1, 20), "a")
    make_run(tmp_path / "runs/two", steps=100, recipe="a/very/long/path/to/a/recipe.py:" + "x" * 90)
    with serving(tmp_path / "runs") as ui:
        for name, size in SIZES.items():
            for is_dark in (False, True):
                browser.resize(size, is_dark=is_dark)
                for place, ready in (
                    ("", "return document.querySelectorAll('tbody tr').length >= 2"),
                    (
                        "#/run?id=one",
                        "return document.querySelectorAll('.chart canvas').length >= 4",
                    ),
                    (
                        "#/compare?run=one&run=two",
                        "return document.querySelectorAll('.chart canvas').length == 2",
                    ),
                ):
                    browser.open("about:blank")
                    browser.open(ui["url"] + place)
                    browser.wait(ready, f"{place or 'the list'} on a {name}")
                    wide = browser.run("return document.documentElement.scrollWidth")
                    assert wide <= size[0], f"{place} is {wide} wide on a {name}"
        assert not browser.errors()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_the_page_works_by_keyboard_and_has_its_figures_in_words(
    tmp_path: Path, browser: Browser
) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    make_run(tmp_path / "runs/one", steps=40)
    make_run(tmp_path / "runs/two", steps=40)
    with serving(tmp_path / "runs") as ui:
        browser.open(ui["url"])
        browser.wait("return document.querySelectorAll('tbody tr').length == 2", "the list")
        body = browser.driver.find_element(By.TAG_NAME, "body")
        for _ in range(12):
            body.send_keys(Keys.TAB)
            if browser.run("return document.activeElement.textContent") == "one":
                break
        browser.driver.switch_to.active_element.send_keys(Keys.ENTER)
        browser.wait("return document.querySelectorAll('.chart canvas').length >= 4", "the run")
        figure = browser.driver.find_element(By.TAG_NAME, "figure")
        browser.run("document.querySelector('figure').focus()")
        figure.send_keys(Keys.HOME)
        browser.wait(
            "return document.querySelector('.readout').textContent.includes('step 1:')",
            "the cursor",
        )
        figure.send_keys(Keys.ARROW_RIGHT)
        browser.wait(
            "return document.querySelector('.readout').textContent.includes('step 2:')", "its move"
        )
        words = browser.run("return document.querySelector('figure p').textContent")
        assert "at step 1" in words and "at step 40" in words and "least" in words
        unnamed = browser.run(
            "return [...document.querySelectorAll('button, input, canvas[role=img], [role=img]')]"
            ".filter((e) => !(e.textContent || e.getAttribute('aria-label'))).length"
        )
        assert unnamed == 0
        assert not browser.errors()


@pytest.mark.full
@pytest.mark.timeout(240)
def test_a_stranger_sees_a_sentence(tmp_path: Path, browser: Browser) -> None:
    make_run(tmp_path / "runs/one")
    with serving(tmp_path / "runs") as ui:
        browser.open(ui["url"].partition("?")[0])
        assert "the token in it is the key" in browser.text()
