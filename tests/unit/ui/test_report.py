"""The report is one file: it loads nothing, and no name in it is ever run."""

import base64
import hashlib
import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from shoal.ui import report
from shoal.ui.report import leave_report, page_file, render_report, write_report
from shoal.ui.run_reader import read_view
from tests.unit.ui.made_runs import BEGAN, make_run, write_lines

ROOT = Path(__file__).resolve().parents[3]
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_data_of_several_runs_and_what_differs_are_in_the_file(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, steps=steps) for name, steps in (("a", 10), ("b", 20))]
    write_report(runs, tmp_path / "report.html")
    data = data_of((tmp_path / "report.html").read_text())
    assert [run["name"] for run in data["runs"]] == ["a", "b"]
    assert [row["name"] for row in data["differences"]] == ["steps"]


def test_names_with_markup_stay_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", recipe=EVIL, run={EVIL: {"value": EVIL, "from": EVIL}})
    write_lines(run / "events.jsonl", [{"event": "warning", "time": BEGAN, "text": EVIL}], "a")
    page = render_report([read_view(run)]).decode()
    assert EVIL not in page and page.count("</script>") == 3  # ours
    assert data_of(page)["runs"][0]["recipe"] == EVIL
    scripts = "".join(page_file(name).decode() for name in report.MODULES)
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in scripts  # by which a text could become markup


def test_nothing_but_its_own_scripts_may_run_and_nothing_is_loaded(tmp_path: Path) -> None:
    page = render_report([read_view(make_run(tmp_path / "run"))]).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    bodies = re.findall(
        r"<(?:script|script type=\"module\"|style)>(.*?)</(?:script|style)>", page, re.DOTALL
    )
    assert len(bodies) == 3
    for body in bodies:
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy[1]
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)


def test_the_chart_library_is_in_the_file() -> None:
    assert report.has_charts(), "run `make setup`: it fetches the chart library with npm"
    assert "uPlot" in render_report([]).decode()


def test_modules_share_no_name_so_that_they_can_be_one_script() -> None:
    names: list[str] = []
    for module in (*report.MODULES, "app.js"):
        text = page_file(module).decode()
        names += re.findall(
            r"^(?:export )?(?:async )?(?:function|class|const|let) (\w+)", text, re.MULTILINE
        )
    assert len(names) > 30
    of_one_script = [name for name in names if names.count(name) > 1 and name not in ("main",)]
    assert not of_one_script


def test_a_report_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert leave_report(run) == "" and (run / "report.html").is_file()
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    assert "report.html was not written: IsADirectoryError" in leave_report(run)


def built(tmp_path: Path) -> list[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    return zipfile.ZipFile(wheel).namelist()


@pytest.mark.full
def test_a_wheel_has_the_page_and_the_chart_library(tmp_path: Path) -> None:
    names = built(tmp_path)
    for name in (*report.MODULES, "app.js", "index.html", "style.css"):
        assert f"shoal/ui/page/{name}" in names
    for name in ("uPlot.iife.min.js", "uPlot.min.css", "uPlot.LICENSE"):
        assert f"shoal/ui/vendor/{name}" in names


@pytest.mark.full
def test_a_wheel_without_npm_is_refused_in_words(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import shutil; shutil.which = lambda name: None\n"
        "from hatch_build import CustomBuildHook\n"
        "hook = CustomBuildHook.__new__(CustomBuildHook)\n"
        f"hook._BuildHookInterface__root = {str(tmp_path)!r}\n"
        "hook.initialize('editable', {})\n"
        "hook.initialize('standard', {})"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    told = done.stderr.strip().splitlines()
    assert done.returncode == 1 and len(told) == 2
    assert all("there is no npm. Install Node.js" in line for line in told)


def test_no_javascript_of_others_is_committed() -> None:
    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    ours = [line for line in done.stdout.splitlines() if line.endswith((".js", ".mjs", ".ts"))]
    assert all(line.startswith("src/shoal/ui/page/") for line in ours)
