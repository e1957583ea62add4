"""Draw a simulation as SVG: a step as bars of its ranks, goodput over time, scaling curves.

Of the ranks those of the fastest and the slowest replica are drawn, up to `MOST_ROWS`. In the look
of `svg.py`, whose words and colours these are.
"""

from collections.abc import Iterator, Sequence

from shoal.cost.scenario import CurvePoint
from shoal.cost.simulation_report import SimulationReport
from shoal.cost.step_timeline import Span
from shoal.cost.svg import CARD, EDGE, FAINT, MARGIN, svg_page, svg_text

WIDTH, ROW, CHART, LEFT, GAP = 920, 22, 150, 84, 40
MOST_ROWS = 24
COLOURS = {
    "load": "#8a94a3",
    "forward": "#2f6db5",
    "backward": "#c8791a",
    "weight": "#e0b070",
    "wait": "#e4e8ee",
    "exchange": "#3d8b57",
    "update": "#7a5aa6",
}
LINES = {"strong": "#2f6db5", "weak": "#c8791a"}

Point = tuple[float, float]


def draw_simulation(found: SimulationReport, recipe: str) -> str:
    """The text of an SVG file."""
    s = found.simulation
    ranks = sorted({span.rank for span in s.spans})[:MOST_ROWS]
    step_y = 112
    time_y = step_y + ROW * len(ranks) + 2 * GAP
    curve_y = time_y + CHART + 2 * GAP
    curves = _curves(found.curve)
    height = (curve_y + CHART + GAP) if curves else time_y + CHART + GAP
    body = [
        svg_text(MARGIN, 30, recipe, size=15, bold=True),
        svg_text(MARGIN, 49, f"{s.plan or 'data=1'} on {found.cluster}, {s.hours:g} hours"),
        svg_text(MARGIN, 68, _summary(found), fill=FAINT),
        *_step(s.spans, ranks, step_y),
        *_over_time(s.goodput_over_time, time_y),
        *(_curve_chart(curves, found.curve[0].axis, curve_y) if curves else ()),
    ]
    return svg_page(WIDTH, height, f"{recipe} under {s.plan}, simulated", body)


def _summary(found: SimulationReport) -> str:
    s = found.simulation
    return (
        f"step {1000 * s.step_s:.3g} ms, goodput {s.goodput:.1%}, bubble {s.bubble:.1%}, "
        f"waiting {s.waiting:.1%}, failures {s.failures}"
    )


def _step(spans: Sequence[Span], ranks: Sequence[int], top: int) -> Iterator[str]:
    """A bar for what each rank does when."""
    end = max((span.stop_s for span in spans), default=1.0)
    scale = (WIDTH - LEFT - MARGIN) / end
    yield svg_text(MARGIN, top - 14, "One step", bold=True)
    x = LEFT + 20
    for what in dict.fromkeys(span.what for span in spans):
        yield _box(x, top - 24, 11, 11, COLOURS[what])
        yield svg_text(x + 16, top - 14, what, fill=FAINT)
        x += 40 + 7 * len(what)
    yield _box(LEFT, top, WIDTH - LEFT - MARGIN, ROW * len(ranks), CARD)
    rows = {rank: top + ROW * place for place, rank in enumerate(ranks)}
    for rank, y in rows.items():
        yield svg_text(LEFT - 8, y + 15, f"rank {rank}", fill=FAINT, anchor="end")
    for span in spans:
        if span.rank in rows:
            width = max(0.4, (span.stop_s - span.start_s) * scale - 0.4)
            yield _box(
                LEFT + span.start_s * scale, rows[span.rank] + 3, width, ROW - 6, COLOURS[span.what]
            )
            if span.microbatch >= 0 and width > 14:
                middle = int(LEFT + span.start_s * scale + width / 2)
                words = str(span.microbatch)
                yield svg_text(
                    middle, rows[span.rank] + 15, words, size=10, fill=CARD, anchor="middle"
                )
    bottom = top + ROW * len(ranks) + 16
    for part in range(5):
        label = f"{1000 * end * part / 4:.3g} ms"
        at = int(LEFT + (WIDTH - LEFT - MARGIN) * part / 4)
        yield svg_text(at, bottom, label, fill=FAINT, anchor="start" if part < 4 else "end")


def _over_time(points: Sequence[Point], top: int) -> Iterator[str]:
    yield svg_text(MARGIN, top - 14, "Goodput over time", bold=True)
    yield from _frame(top, ["0 %", "50 %", "100 %"])
    last = points[-1][0]
    highest = max(1.0, *(value for _, value in points))
    way = [(0.0, points[0][1]), *points]
    yield _line([(x / last, y / highest) for x, y in way], top, LINES["strong"])
    for part in range(5):
        at, anchor = _x(part / 4), "start" if part < 4 else "end"
        yield svg_text(
            int(at), top + CHART + 16, f"{last * part / 4:.3g} h", fill=FAINT, anchor=anchor
        )


def _curves(curve: Sequence[CurvePoint]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for point in curve:
        if point.efficiency is not None:
            found.setdefault(point.scaling, []).append((point.size, point.efficiency))
    return found


def _curve_chart(curves: dict[str, list[tuple[int, float]]], axis: str, top: int) -> Iterator[str]:
    """Efficiency by size; sizes are doubled from one mark to the next."""
    yield svg_text(MARGIN, top - 14, f"Efficiency by {axis}", bold=True)
    x = LEFT + 120
    for scaling in curves:
        yield _box(x, top - 24, 11, 11, LINES[scaling])
        yield svg_text(x + 16, top - 14, f"{scaling} scaling", fill=FAINT)
        x += 120
    sizes = sorted({size for points in curves.values() for size, _ in points})
    highest = max(1.0, *(share for points in curves.values() for _, share in points))
    yield from _frame(top, ["0 %", f"{50 * highest:.0f} %", f"{100 * highest:.0f} %"])
    place = {size: at / max(1, len(sizes) - 1) for at, size in enumerate(sizes)}
    for scaling, points in curves.items():
        yield _line([(place[size], share / highest) for size, share in points], top, LINES[scaling])
        for size, share in points:
            x, y = int(_x(place[size])), top + CHART * (1 - share / highest)
            yield f'<circle cx="{x}" cy="{y:.1f}" r="3" fill="{LINES[scaling]}"/>'
    for size, at in place.items():
        yield svg_text(int(_x(at)), top + CHART + 16, str(size), fill=FAINT, anchor="middle")


def _frame(top: int, marks: Sequence[str]) -> Iterator[str]:
    """A card with horizontal lines, lowest first."""
    yield _box(LEFT, top, WIDTH - LEFT - MARGIN, CHART, CARD)
    for place, words in enumerate(marks):
        y = top + CHART - CHART * place // (len(marks) - 1)
        yield f'<path d="M{LEFT} {y}H{WIDTH - MARGIN}" stroke="{EDGE}" stroke-width="0.7"/>'
        yield svg_text(LEFT - 8, y + 4, words, fill=FAINT, anchor="end")


def _line(points: Sequence[Point], top: int, colour: str) -> str:
    way = " ".join(f"{_x(x):.1f},{top + CHART * (1 - y):.1f}" for x, y in points)
    return f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>'


def _x(share: float) -> float:
    return LEFT + (WIDTH - LEFT - MARGIN) * share


def _box(x: float, y: float, width: float, height: float, fill: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" '
        f'fill="{fill}"/>'
    )
