"""`shoal top`: one run in a terminal, as `page/` shows it in a browser, four times a second.

`draw` makes the screen from a view, and is pure; `watch` looks and shows until the run is over or
Ctrl-C. Without a terminal the screen is printed once.

Read next: `run_reader.py`.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.ui.records import Incident, RunView, Strip
from shoal.ui.run_reader import RunReader
from shoal.ui.step_buckets import KINDS

LOOK_S = 0.25
BARS = " ▁▂▃▄▅▆▇█"
COLOURS = {"compute": "cyan", "exchange": "yellow", "data": "blue", "waiting": "bright_black"}
SIGNS = {"compute": "█", "exchange": "▓", "data": "▒", "waiting": "░"}  # where there is no colour
DEAD, STEEP = "x", 10.0  # so many times the least is the largest of a loss that is drawn by its log
STATES = {"running": "cyan", "done": "green", "failed": "red", "stopped": "yellow"}
GRADES = {"bad": "red", "warn": "yellow", "good": "green", "info": "blue"}
MOST_WORKERS, MOST_INCIDENTS = 24, 6
PLAIN_WIDTH = 100
WIDE = 60  # columns, below which a strip has only the name of its worker beside it


def watch(run_dir: Path, console: Console) -> None:
    """Show a run until it is over."""
    reader = RunReader(run_dir)
    if not console.is_terminal:
        console.print(draw(reader.look(), min(console.width, PLAIN_WIDTH)))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            view = reader.look()
            live.update(draw(view, console.width), refresh=True)
            if view.state not in ("running", "queued"):
                break
            time.sleep(LOOK_S)
    console.print(draw(view, console.width))


def draw(view: RunView, width: int) -> RenderableType:
    """The screen. Pure. Names are texts, so that none of them steers the terminal."""
    parts: list[RenderableType] = [_head(view)]
    if view.curves.step:
        parts.append(_loss(view, width - 4))
    if view.strips.workers:
        parts.append(_workers(view, width - 4))
    parts.append(Text.assemble(("bottleneck  ", "bold"), _plain(view.bottleneck.sentence)))
    parts += [Text(f"  {_plain(text)}", style="bright_black") for text in view.bottleneck.tries[:2]]
    parts.append(_incidents(view.incidents, view.num_incidents))
    parts += [Text(_plain(text), style="yellow") for text in view.problems]
    return Group(*(Panel(part) if isinstance(part, Table) else part for part in parts))


def _head(view: RunView) -> Text:
    of = f" of {view.num_steps}" if view.num_steps else ""
    loss = "none" if view.loss is None else f"{view.loss:.4f}"
    speed = view.totals.samples_per_s
    words = [f"step {view.step}{of}", f"loss {loss}"]
    if speed is not None:
        words.append(f"{speed:.0f} samples/s")
    if view.totals.goodput is not None:
        words.append(f"goodput {view.totals.goodput:.0%}")
    if view.remaining_s is not None:
        words.append(f"{duration(view.remaining_s)} left")
    head = Text.assemble(
        (_plain(view.name), "bold"),
        "  ",
        (view.state, STATES.get(view.state, "bright_black")),
        f"  {_plain(view.recipe)}  {_plain(view.plan)}\n",
        "  ".join(words),
    )
    if view.reason:
        head.append(f"\n{_plain(view.reason)}", style="red")
    return head


def _loss(view: RunView, width: int) -> Text:
    values = view.curves.figures["loss"].mean if "loss" in view.curves.figures else []
    known, name = [value for value in values if value is not None], "loss  "
    if known and 0 < STEEP * min(known) < max(known):
        values = [None if value is None else math.log(value) for value in values]
        name = "log loss  "
    return Text.assemble((name, "bold"), (sparkline(values, width - len(name)), "cyan"))


def _workers(view: RunView, width: int) -> Table:
    table = Table(box=None, pad_edge=False, expand=False, show_header=True, header_style="bold")
    names = ("worker", "host", "process") if width >= WIDE else ("worker",)
    longest = max((len(worker.name) for worker in view.strips.workers), default=0)
    widths = [max(longest, len("worker")), len("host"), len("process")][: len(names)]
    for name, least in zip(names, widths, strict=True):
        table.add_column(name, no_wrap=True, min_width=least)
    strip_width = max(10, width - sum(widths) - 2 * len(names))
    kinds = [(f"{SIGNS[kind]} {kind} ", COLOURS[kind]) for kind in KINDS]
    legend = Text.assemble(*kinds, (f"{DEAD} dead", "red"))
    table.add_column(legend, no_wrap=True)
    workers = view.strips.workers
    for worker in workers[:MOST_WORKERS]:
        style = "" if worker.is_alive else "red"
        place = (str(worker.host), str(worker.pid or ""))[: len(names) - 1]
        strip = strip_text(worker, view, strip_width)
        table.add_row(Text(_plain(worker.name), style), *place, strip)
    if len(workers) > MOST_WORKERS:
        table.add_row(f"and {len(workers) - MOST_WORKERS} more")
    return table


def strip_text(worker: Strip, view: RunView, width: int) -> Text:
    """A character a stretch of time: the sign of what took most of it, or that it was gone."""
    begins, ends = view.strips.begin, view.strips.end
    first = view.began_at or (begins[0] if begins else 0.0)
    last = max(view.seen_at, ends[-1] if ends else 0.0)
    made, at = Text(), 0
    step = (last - first) / width if last > first else 0.0
    for cell in range(width):
        begin, end = first + cell * step, first + (cell + 1) * step
        while at < len(begins) and ends[at] <= begin:
            at += 1
        if any(gone < end and (back is None or back > begin) for gone, back in worker.gone):
            made.append(DEAD, style="red")
        elif at < len(begins) and begins[at] < end and worker.shares:
            most = max(KINDS, key=lambda kind: worker.shares[kind][at])
            is_idle = worker.shares[most][at] <= "0"
            sign, style = ("·", "bright_black") if is_idle else (SIGNS[most], COLOURS[most])
            made.append(sign, style=style)
        else:
            made.append("·", style="bright_black")
    return made


def _incidents(incidents: Sequence[Incident], count: int) -> Text:
    if not incidents:
        return Text("no incidents", style="bright_black")
    made = Text(f"{count} incidents\n" if count > 1 else "1 incident\n", style="bold")
    for one in incidents[-MOST_INCIDENTS:]:
        lost = "" if one.lost_s is None else f", {duration(one.lost_s)} lost"
        step = "" if one.step is None else f"step {one.step}: "
        cause = f" ({_plain(one.cause)})" if one.cause else ""
        made.append(f"  {step}{_plain(one.what)}{cause}{lost}\n", style=GRADES[one.grade])
    made.rstrip()
    return made


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The values in `width` characters, the least at the bottom; the newest are at the right."""
    known = [value for value in values if value is not None]
    if not known or width < 1:
        return ""
    low, high = min(known), max(known)
    cells = []
    for cell in range(min(width, len(values))):
        count = min(width, len(values))
        part = values[cell * len(values) // count : (cell + 1) * len(values) // count]
        found = [value for value in part if value is not None]
        if not found:
            cells.append(" ")
            continue
        share = (sum(found) / len(found) - low) / (high - low) if high > low else 0.5
        cells.append(BARS[1 + min(7, int(share * 8))])
    return "".join(cells)


def duration(seconds: float) -> str:
    for most, unit, divided in ((1.0, "ms", 1e-3), (90.0, "s", 1.0), (5400.0, "min", 60.0)):
        if seconds < most:
            return f"{seconds / divided:.3g} {unit}"
    return f"{seconds / 3600:.1f} h"


def _plain(text: str) -> str:
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
