"""A first look: train a small GPT on Shakespeare with two processes, and kill one of them
half-way.

`make demo` runs this. It starts `shoal train` as you would, watches the run directory, sends one
rank a SIGKILL in the middle, tells what came of it, and lets the model write. `--svg FILE` draws
what was on the screen as well: the picture in the README is made by
`python examples/demo.py --svg docs/images/run.svg`.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = 220
RECIPE = "recipes/charlm.py:small"
MODEL = ["--set", "length=64"]
SETTINGS = ["--set", f"steps={STEPS}", *MODEL]
PROMPT = "HAMLET. "
WORDS = ["shoal", "train", RECIPE, "--plan", "data=2", *SETTINGS]
COLOURS = {"rank ": "bold red", "a spare ": "bold green"}  # of lines in the picture, as they begin


def main(svg: Path | None = None) -> int:
    run_dir = next_run_dir()
    command = [Path(sys.executable).parent / WORDS[0], *WORDS[1:]]
    print(f"$ {' '.join(WORDS)}\n", flush=True)
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as screen:
        training = subprocess.Popen(
            [*command, "--json", "--run-dir", run_dir.relative_to(ROOT)],
            cwd=ROOT,
            stdout=answer,
            stderr=None if svg is None else screen,
        )
        try:
            victim = kill_half_way(training, run_dir)
            code = training.wait()
        except KeyboardInterrupt:
            return training.wait()  # it heard the Ctrl-C too, and stops cleanly
        answer.seek(0)
        screen.seek(0)
        content, shown = answer.read(), screen.read()
    if code or not content:
        print(shown, file=sys.stderr)
        return code or 1
    if svg is not None:
        lines = [f"$ {' '.join(WORDS)}", *thinned(shown.splitlines())]
        svg.write_text(picture(lines), encoding="utf-8")
    tell(json.loads(content.splitlines()[-1]), victim, run_dir)
    return write_some(run_dir)


def kill_half_way(training: "subprocess.Popen[bytes]", run_dir: Path) -> int | None:
    """Kill rank 1 at half the steps; its process number, or None if the run ended before."""
    while training.poll() is None:
        if last_step(run_dir) >= STEPS // 2:
            pid = process_of_rank(run_dir, 1)
            os.kill(pid, signal.SIGKILL)
            return pid
        time.sleep(0.05)
    return None


def last_step(run_dir: Path) -> int:
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def process_of_rank(run_dir: Path, rank: int) -> int:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    seats = [e for e in events if e["event"] == "seat" and e["rank"] == rank]
    return seats[-1]["pid"]


def thinned(lines: list[str]) -> list[str]:
    """What was on the screen; of the lines that only tell the step, those of a quick machine."""
    kept, next_step = [], 0
    for line in lines:
        told = re.match(rf"step ([0-9]+)/{STEPS} ", line)
        if told is None:
            kept.append(line)
        elif int(told[1]) >= next_step:
            kept.append(line)
            next_step = int(told[1]) + STEPS // 6
    return kept


def picture(lines: list[str]) -> str:
    """A terminal with these lines in it, as SVG."""
    from rich.console import Console
    from rich.text import Text

    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=120, file=nowhere)
        for line in lines:
            style = next((c for start, c in COLOURS.items() if line.startswith(start)), "")
            console.print(Text(line, style))
        return console.export_svg(title="make demo")


def tell(result: dict, victim: int | None, run_dir: Path) -> None:
    steps = [
        json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()
    ]
    once = steps == list(range(1, STEPS + 1))
    shown = os.path.relpath(run_dir)
    lost = "nothing: each step was committed exactly once" if once else f"something! {steps}"
    print(f"""
What was trained: a character GPT on Shakespeare, {result["steps"]} steps on 2 processes.
What was lost:    {lost}
                  although process {victim} was killed with -9 half-way.
Where it is:      {shown} (model.safetensors, metrics.jsonl, events.jsonl, logs/)

What to try next:
  .venv/bin/shoal verify {RECIPE} --plan "data=2 accumulate=2" --steps 3
  .venv/bin/shoal train recipes/digits.py:small
  .venv/bin/shoal doctor""")


def write_some(run_dir: Path) -> int:
    """Let the model that was trained write a few lines."""
    words = ["shoal", "generate", RECIPE, "--from", os.path.relpath(run_dir, ROOT), *MODEL]
    words += ["--prompt", PROMPT, "--tokens", "160", "--temperature", "0.7"]
    print(f"\n$ {shlex.join(words)}\n", flush=True)
    command = [Path(sys.executable).parent / words[0], *words[1:]]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def next_run_dir() -> Path:
    number = 1
    while (ROOT / "runs" / f"demo-{number}").exists():
        number += 1
    return ROOT / "runs" / f"demo-{number}"


if __name__ == "__main__":
    if len(sys.argv) not in (1, 3) or sys.argv[1:2] not in ([], ["--svg"]):
        sys.exit("usage: demo.py [--svg FILE]")
    sys.exit(main(Path(sys.argv[2]) if sys.argv[2:] else None))
