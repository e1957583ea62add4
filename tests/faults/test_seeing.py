"""A run leaves its report, and a page shows what happens to it while it happens."""

import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.conftest import NUM_STEPS, Start
from tests.support.browser import Browser, open_browser
from tests.support.leaks import wait_until
from tests.system.test_ui import serving

DATA = re.compile(r'id="data">(.*?)</script>', re.DOTALL)


def view_in(report: Path) -> dict:
    found = DATA.search(report.read_text())
    assert found is not None
    return json.loads(found[1])["runs"][0]


def test_a_run_leaves_its_report(start: Start) -> None:
    training = start(pause=0.01)
    training.wait_for_step(10)
    training.signal_rank(1, signal.SIGKILL)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    view = view_in(trained.run_dir / "report.html")
    assert (view["state"], view["step"]) == ("done", NUM_STEPS)
    (lost,) = [one for one in view["incidents"] if one["kind"] == "exited"]
    assert lost["what"] == "rank 1 was lost" and lost["lost_s"] > 0
    assert view["strips"]["workers"][1]["gone"] and not view["strips"]["workers"][0]["gone"]
    times = view["curves"]["time"]
    assert times == sorted(times) and view["began_at"] < times[0]
    assert view["environment"]["python"] and view["peak_memory_bytes"]
    outcome = json.loads((trained.run_dir / "outcome.json").read_text())
    assert outcome["recoveries"] == 1 and outcome["exit_code"] == 0


def test_a_run_whose_report_cannot_be_written_ends_well(start: Start, tmp_path: Path) -> None:
    training = start(pause=0.01)
    training.wait_for_step(2)
    (training.run_dir / "report.html").mkdir()
    trained = training.wait()
    assert trained.exit_code == 0
    assert trained.errors.count("report.html was not written") == 1


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with open_browser(tmp_path) as made:
        yield made


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_page_follows_a_run_and_shows_a_killed_rank(
    start: Start, browser: Browser, tmp_path: Path
) -> None:
    training = start(pause=0.1, steps=150)
    training.wait_for_step(3)
    with serving(training.run_dir) as ui:
        browser.open(ui["url"])
        step = "Number((document.querySelector('dd') || {}).firstChild?.textContent)"
        browser.wait(f"return {step} >= 3", "the run")
        seen = browser.run(f"return {step}")
        browser.wait(f"return {step} > {seen}", "the next step")
        assert "running" in browser.text()
        training.signal_rank(1, signal.SIGKILL)
        label = "document.querySelector('.strips canvas').getAttribute('aria-label')"
        browser.wait(f"return /rank 1: [^:]*dead/.test({label})", "the killed rank")
        browser.wait("return document.body.innerText.includes('rank 1 was lost')", "the incident")
        browser.screenshot(tmp_path / "killed.png")
        training.command.send_signal(signal.SIGINT)
        training.wait()
        browser.wait("return document.body.innerText.includes('stopped')", "the end")
        assert not browser.errors()


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_run_is_resized_and_stopped_from_the_page(
    start: Start, browser: Browser, tmp_path: Path
) -> None:
    training = start(pause=0.1, steps=400, plan="data=2 pieces=4")
    training.wait_for_step(3)
    with serving(training.run_dir, "--control") as ui:
        browser.open(ui["url"])
        browser.wait("return document.body.innerText.includes('Control')", "the buttons")
        browser.run("document.querySelector('input[type=text]').value = 'data=9'")
        press = (
            "[...document.querySelectorAll('button')].find((b) => b.textContent == '{}').click()"
        )
        browser.run(press.format("Resize"))
        browser.wait("return document.body.innerText.includes('pieces')", "the refusal")
        browser.run("document.querySelector('input[type=text]').value = 'data=3'")
        browser.run(press.format("Resize"))
        browser.wait("return document.body.innerText.includes('resized:')", "the new size")
        browser.run("window.confirm = () => true")
        browser.run(press.format("Stop"))
        trained = training.wait()
        assert trained.exit_code == 75
        browser.wait("return document.body.innerText.includes('stopped')", "the end")
        assert wait_until(
            lambda: not browser.run("return document.body.innerText.includes('Control')"), 20
        )
        refused = [line for line in browser.errors() if "409" not in line]
        assert not refused
