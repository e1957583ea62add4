"""Makes the pictures of pages in the documentation from a real run, one rank of which is killed.

    python docs/pictures.py

Trains `recipes/digits.py:small` on two ranks, kills one half-way, and takes the pictures of what
`report.html` and `shoal top` show of it, in Chromium. `docs/images/pictures.json` says what they
were made from; `tests/rules/test_pictures.py` fails when the page has changed since.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

IMAGES = ROOT / "docs/images"
FACTS = IMAGES / "pictures.json"
STEPS = 300
PICTURES = {"run-page.png": ((1180, 1240), False), "run-page-phone.png": ((390, 844), True)}
SCREEN = "top.svg"


def page_digest() -> str:
    """Of everything that decides how a page looks: our scripts and styles, and the screen."""
    files = [*sorted((ROOT / "src/shoal/ui/page").glob("*")), ROOT / "src/shoal/ui/top.py"]
    made = hashlib.sha256()
    for file in files:
        made.update(file.name.encode() + b"\0" + file.read_bytes())
    return made.hexdigest()


def train(run_dir: Path) -> None:
    """A run that loses a rank half-way."""
    words = ["train", "recipes/digits.py:small", "--plan", "data=2", "--run-dir", str(run_dir)]
    for name, value in {"steps": STEPS, "save_every": 100, "evaluate_every": 60}.items():
        words += ["--set", f"{name}={value}"]
    shoal = [sys.executable, "-P", "-m", "shoal", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen(shoal, cwd=ROOT, env=environment) as training:
        while training.poll() is None and num_lines(run_dir / "metrics.jsonl") < STEPS // 2:
            time.sleep(0.02)
        lines = (run_dir / "events.jsonl").read_text().splitlines()
        seats = [event for line in lines if (event := json.loads(line))["event"] == "seat"]
        os.kill(next(seat["pid"] for seat in seats if seat["rank"] == 1), signal.SIGKILL)
    if training.returncode:
        raise SystemExit(f"the run ended with code {training.returncode}")


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def take(report: Path, scratch: Path) -> None:
    from tests.support.browser import open_browser

    with open_browser(scratch) as browser:
        for name, (size, is_dark) in PICTURES.items():
            browser.resize(size, is_dark=is_dark)
            browser.open(report.as_uri())
            browser.wait("return document.querySelectorAll('.chart canvas').length >= 4", "charts")
            browser.screenshot(IMAGES / name)
        if errors := browser.errors():
            raise SystemExit(f"the page complains: {errors}")


def main() -> None:
    from rich.console import Console

    from shoal.ui.run_reader import read_view
    from shoal.ui.top import draw

    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "digits-small-1"
        train(run_dir)
        view = read_view(run_dir)
        take(run_dir / "report.html", Path(folder))
    console = Console(record=True, width=100, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(draw(view, 100))
    console.save_svg(str(IMAGES / SCREEN), title="shoal top", clear=False)
    text = console.export_text()
    facts = {
        "page": page_digest(),
        "state": view.state,
        "step": view.step,
        "incidents": [one.what for one in view.incidents],
        "pictures": {
            name: hashlib.sha256((IMAGES / name).read_bytes()).hexdigest()
            for name in (*PICTURES, SCREEN)
        },
    }
    FACTS.write_text(json.dumps(facts, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
