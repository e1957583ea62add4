"""What it costs to see a run: recording a step, writing the report, and the live page.

`record` is what a rank pays for the record of a step, on its own thread; beside it stands how much
longer whole steps of a small model take with it. `report` is the time that a run of a thousand
steps waits for its report at its end. `first-paint` is the time from opening the page of a run of
a hundred thousand steps to its curves, in a real Chromium, with a server that has read nothing yet;
`memory` is how much more the server holds after that run than after one of a thousand steps.

There is no peer: other trackers keep their data in a service of their own. Floors are absolute.
"""

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from bench import commands, harness
from bench.harness import Row, Spread

LONG, SHORT, RANKS = 100_000, 1_000, 8
BEGAN = 1_790_000_000.0
FLOORS = {"record": 20.0, "steps": 1.05, "report": 250.0, "first-paint": 1.0, "memory": 48.0}


def write_run(run: Path, num_steps: int, ranks: int) -> None:
    """A run directory as a training of that length leaves it."""
    draw, now = random.Random(0), BEGAN
    run.mkdir(parents=True)
    described = {"recipe": "made.py:run", "plan": f"data={ranks}", "num_steps": num_steps}
    (run / "run.json").write_text(json.dumps(described))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, num_steps + 1):
            busy = [round(0.01 + draw.random() * 0.004, 6) for _ in range(ranks)]
            times = {"data": 0.001, "compute": busy[0], "exchange": 0.003, "waiting": 0.001}
            now += sum(times.values())
            record = {"step": step, "loss": 2 / step + draw.random() / 10, "samples": 64}
            record |= {"rate": 0.002, "bytes_sent": 52_896, "times": times, "ranks": busy}
            file.write(json.dumps(record | {"time": now, "mark": draw.getrandbits(50)}) + "\n")
    seats = [
        {"event": "seat", "time": BEGAN, "rank": rank, "pid": 9, "generation": 0, "host": 0}
        for rank in range(ranks)
    ]
    spent = {"event": "spent", "data": 0.05, "compute": 0.3, "exchange": 0.1, "waiting": 0.05}
    told, at = [], BEGAN
    while at < now:  # as often as ranks tell what they did
        since_s = max(0.5, (at - BEGAN) / 128)
        at += since_s
        for rank in range(ranks):
            told.append(spent | {"time": at, "rank": rank, "since_s": since_s, "steps": 30})
    for name, lines in (("events.jsonl", seats), ("spent.jsonl", told)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


def record_us(num_steps: int) -> float:
    """Microseconds of the calling thread for the record of one step."""
    from shoal.events.events import SpentEvent
    from shoal.events.meters import SpentReports
    from shoal.events.metrics_writer import MetricsWriter
    from shoal.events.step import StepInfo, Times

    told: list[SpentEvent] = []
    with tempfile.TemporaryDirectory() as folder, harness.quiet():
        writer = MetricsWriter(Path(folder) / "metrics.jsonl", lambda: True)
        reports = SpentReports(told.append)
        times, ranks = Times(0.001, 0.01, 0.003, 0.0), (0.011,) * RANKS
        spent = 0.0
        for step in range(1, num_steps + 1):
            began = time.perf_counter()
            info = StepInfo(step, 0.5, 64, 0.1, None, times, 9, ranks=ranks, time=time.time())
            writer(info)
            reports.add(info)
            spent += time.perf_counter() - began
            if step % 1000 == 0:
                writer.flush()  # the thread writes between steps, not in the middle of one
        writer.close()
    return 1e6 * spent / num_steps


def step_us(num_steps: int, is_recorded: bool) -> float:
    """Microseconds of a step of a small model, with its record or without."""
    import torch

    from shoal.events.metrics_writer import MetricsWriter
    from shoal.events.step import StepInfo, Times

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, target = torch.randn(64, 64), torch.randint(10, (64,))
    times = Times(0.001, 0.01, 0.003, 0.0)
    with tempfile.TemporaryDirectory() as folder, harness.quiet():
        writer = MetricsWriter(Path(folder) / "metrics.jsonl", lambda: is_recorded)
        began = time.perf_counter()
        for step in range(1, num_steps + 1):
            loss = torch.nn.functional.cross_entropy(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if is_recorded:
                info = StepInfo(step, loss.item(), 64, 0.1, None, times, 9, time=time.time())
                writer(info)
            else:
                loss.item()
        spent = time.perf_counter() - began
        writer.close()
    return 1e6 * spent / num_steps


def report_ms(run: Path) -> float:
    from shoal.ui.report import leave_report

    began = time.perf_counter()
    if why := leave_report(run):
        raise harness.ArmFailed(why)
    return 1e3 * (time.perf_counter() - began)


@contextmanager
def serving(directory: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`shoal ui` on a directory: its address, and its process."""
    words = commands.shoal("ui", str(directory), "--no-browser", "--json", "--port", "0")
    environment = harness.child_environment()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"], psutil.Process(process.pid)
        finally:
            process.terminate()


def first_paint(directory: Path, open_page: Callable[[str], float]) -> tuple[float, float]:
    """Seconds to the curves of the long run, and megabytes that the server then holds."""
    with serving(directory) as (url, process):
        return open_page(f"{url}#/run?id=long"), process.memory_info().rss / 1e6


@contextmanager
def browser() -> Iterator[Callable[[str], float]]:
    """Opens a page in Chromium; seconds from the navigation to its first curves."""
    from tests.support.browser import open_browser

    with tempfile.TemporaryDirectory() as folder, open_browser(Path(folder)) as made:

        def open_page(url: str) -> float:
            made.open("about:blank")
            made.open(url)
            shown = "performance.getEntriesByName('shown')"
            made.wait(f"return {shown}.length", "the page")
            return float(made.run(f"return {shown}[0].startTime")) / 1e3

        yield open_page


def measure(quick: bool) -> Iterator[Row]:
    rounds = 3 if quick else 7
    arms = {
        "record": lambda: record_us(20_000),
        "with": lambda: step_us(2_000, True),
        "without": lambda: step_us(2_000, False),
        "again": lambda: step_us(2_000, False),
    }
    found = harness.interleave(arms, rounds)
    yield _row("record", harness.spread(found["record"]), "microseconds", " a rank and step")
    ratio = harness.spread(harness.ratios(found["with"], found["without"]))
    control = harness.spread(harness.ratios(found["again"], found["without"])).median
    step = harness.spread(found["without"]).median
    yield _row("steps", ratio, "x", f"of a step of {step:.0f} us", control)
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        write_run(runs / "short", SHORT, RANKS)
        write_run(runs / "long", LONG, RANKS)
        reports = [report_ms(runs / "short") for _ in range(rounds)]
        yield _row("report", harness.spread(reports), "milliseconds", "of 1,000 steps")
        yield from _page_rows(runs, rounds)


def _page_rows(runs: Path, rounds: int) -> Iterator[Row]:
    from tests.support.browser import missing

    if why := missing():
        for name in ("first-paint", "memory"):
            yield Row(name=f"ui/{name}", floor=FLOORS[name], at_most=True, note=why)
        return
    with browser() as open_page:
        looks = [first_paint(runs, open_page) for _ in range(rounds)]
        with serving(runs) as (url, process):
            open_page(f"{url}#/run?id=short")
            small = process.memory_info().rss / 1e6
    paints, held = zip(*looks, strict=True)
    yield _row("first-paint", harness.spread(paints), "s", f"of {LONG:,} steps")
    more = harness.spread([megabytes - small for megabytes in held])
    yield _row("memory", more, "MB", f"more than the {small:.0f} MB with 1,000 steps")


def _row(name: str, found: Spread, unit: str, note: str, control: float | None = None) -> Row:
    return Row(
        name=f"ui/{name}",
        value=found.median,
        low=found.low,
        high=found.high,
        num_pairs=found.num_pairs,
        unit=unit,
        floor=FLOORS[name],
        at_most=True,
        peer="none",
        ceiling="none",
        control=control,
        note=note.strip(),
    )


if __name__ == "__main__":
    harness.main(measure)
