"""Draw an explanation as SVG: ranks as boxes, bars for what each holds, arrows for what is sent.

Columns are the coordinates on the data and tensor axes, rows those on the pipeline axis. A full bar
is what one process alone would hold; buffers and the temporary memory of a step have no bar and are
listed below, so that a box adds up to its total in the table. Plain SVG text on a light card,
legible on white and dark pages. Of very many ranks some are drawn and the rest counted.
"""

from collections.abc import Iterable, Iterator
from html import escape
from itertools import pairwise

from shoal.cost.explain import Explanation, RankRow, StageRow
from shoal.formatting import in_units, plural

MOST_COLUMNS, MOST_ROWS, MOST_STAGES = 8, 8, 4
BOX, GAP_Y, MARGIN, TOP = 250, 46, 24, 112
GAP, WIDE_GAP = 26, 70  # between columns; the wide one has room for an arrow and its bytes
LINE, BAR, PAD = 17, 96, 12
BARS = {"parameters": "#2f6db5", "gradients": "#c8791a", "optimizer": "#3d8b57"}
INK, FAINT, EDGE, CARD, PAPER = "#1d2430", "#5b6675", "#b9c2ce", "#ffffff", "#f3f5f8"
NARROW = 35  # characters of a line in a box


def draw_svg(found: Explanation, recipe: str) -> str:
    """The text of an SVG file."""
    picture = _Picture(found, recipe)
    title = f"{recipe} under {picture.plan}"
    return svg_page(picture.width, picture.height, title, picture.lines())


def svg_page(width: int, height: int, title: str, body: Iterable[str]) -> str:
    """A light card with a title, and arrow heads to use."""
    size = f'width="{width}" height="{height}"'
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
        f'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="{FAINT}"/></marker>'
        "</defs>",
        f'<rect {size} rx="10" fill="{PAPER}"/>',
    ]
    return "\n".join([*head, *body, "</svg>\n"])


class _Picture:
    def __init__(self, found: Explanation, recipe: str):
        self.found, self.recipe = found, recipe
        self.num_columns = found.axes["data"] * found.axes["tensor"]
        self.num_rows = found.axes["pipeline"]
        self.columns = min(self.num_columns, MOST_COLUMNS)
        self.rows = min(self.num_rows, MOST_ROWS)
        per_rank = max((len(rank.stages) for rank in found.ranks), default=0)
        self.stage_lines = min(per_rank, MOST_STAGES)
        self.box_height = 2 * PAD + LINE * (1 + self.stage_lines + len(BARS) + 1)
        self.foot = self._foot()
        ways = [abs(end - start) for start, end in self._sent()]
        self.goes_round = max(ways, default=0) > 1
        self.gap = WIDE_GAP if self.goes_round else GAP
        boxes = self.columns * (BOX + self.gap) - (0 if self.goes_round else self.gap)
        words = [self.recipe + " " * 8, self.plan, *self.foot, " " * 64]
        self.width = 2 * MARGIN + max(boxes, int(6.9 * max(map(len, words))))
        below = self.rows * (self.box_height + GAP_Y) - GAP_Y
        self.foot_y = TOP + below + 34
        self.height = self.foot_y + LINE * len(self.foot) + 8

    @property
    def plan(self) -> str:
        return self.found.plan or "data=1"

    def lines(self) -> Iterator[str]:
        yield svg_text(MARGIN, 30, self.recipe, size=15, bold=True)
        yield svg_text(MARGIN, 49, self.plan)
        yield from self._legend()
        for rank in self.found.ranks:
            if rank.pipeline < self.rows and self._column(rank) < self.columns:
                yield from self._box(rank)
        yield from self._arrows()
        for i, line in enumerate(self.foot):
            yield svg_text(MARGIN, self.foot_y + LINE * i, line, fill=FAINT)

    def _legend(self) -> Iterator[str]:
        x = MARGIN
        for name, colour in BARS.items():
            yield f'<rect x="{x}" y="61" width="11" height="11" rx="2" fill="{colour}"/>'
            words = "optimizer state" if name == "optimizer" else name
            yield svg_text(x + 16, 71, words, fill=FAINT)
            x += 32 + int(6.3 * len(words))
        yield svg_text(x, 71, "of what one process would hold", fill=FAINT)
        for column in range(self.columns):
            data, tensor = divmod(column, self.found.axes["tensor"])
            named = [f"data {data}"] if self.found.axes["data"] > 1 else []
            named += [f"tensor {tensor}"] if self.found.axes["tensor"] > 1 else []
            yield svg_text(self._x(column) + 2, TOP - 9, ", ".join(named), fill=FAINT)

    def _box(self, rank: RankRow) -> Iterator[str]:
        x, y = self._x(self._column(rank)), self._y(rank.pipeline)
        yield (
            f'<rect x="{x}" y="{y}" width="{BOX}" height="{self.box_height}" rx="7" '
            f'fill="{CARD}" stroke="{EDGE}"/>'
        )
        at = y + PAD + 10
        yield svg_text(x + PAD, at, f"rank {rank.rank}", bold=True)
        total = in_units(rank.memory.num_bytes)
        yield svg_text(x + BOX - PAD, at, total, fill=FAINT, anchor="end")
        for line in self._stages_of(rank):
            at += LINE
            yield svg_text(x + PAD, at, line, size=11)
        at = y + PAD + 10 + LINE * self.stage_lines
        for name, colour in BARS.items():
            at += LINE
            held, alone = getattr(rank.memory, name).num_bytes, self.found.alone[name]
            part = held / alone if alone else 0.0
            left = x + PAD
            yield _bar(left, at - 9, BAR, EDGE, 0.45)
            yield _bar(left, at - 9, BAR * min(part, 1.0), colour, 1.0)
            label = f"{part:.0%}  {in_units(held)}" if alone else "none"
            yield svg_text(left + BAR + 8, at, label, size=11)
        yield svg_text(x + PAD, at + LINE, _rest_of(rank), size=11, fill=FAINT)

    def _stages_of(self, rank: RankRow) -> list[str]:
        lines = [_stage_line(self.found.stages[index]) for index in rank.stages]
        if len(lines) > MOST_STAGES:
            lines = [*lines[: MOST_STAGES - 1], f"and {len(lines) - MOST_STAGES + 1} more stages"]
        return lines

    def _arrows(self) -> Iterator[str]:
        """Down at the left and up at the right of a column, and around it back to the top."""
        for (start, end), num_bytes in self._sent().items():
            if max(start, end) < self.rows:
                for column in range(self.columns):
                    yield from self._arrow(self._x(column), start, end, in_units(num_bytes))

    def _sent(self) -> dict[tuple[int, int], int]:
        """The bytes of a microbatch between each pair of pipeline ranks."""
        sent: dict[tuple[int, int], int] = {}
        for stage, following in pairwise(self.found.stages):
            if not stage.stays:
                way = stage.rank, following.rank
                sent[way] = sent.get(way, 0) + stage.sent_bytes
        return sent

    def _arrow(self, x: int, start: int, end: int, words: str) -> Iterator[str]:
        if end == start + 1:
            top, left = self._y(start) + self.box_height, x + 36
            yield _path(f"M{left} {top + 2}V{top + GAP_Y - 2}")
            yield svg_text(left + 8, top + GAP_Y // 2 + 4, words, fill=FAINT)
        elif end == start - 1:
            top, left = self._y(end) + self.box_height, x + BOX - 90
            yield _path(f"M{left} {top + GAP_Y - 2}V{top + 2}")
            yield svg_text(left + 8, top + GAP_Y // 2 + 4, words, fill=FAINT)
        else:
            side, middle = x + BOX, self.box_height // 2
            from_y, to_y = self._y(start) + middle, self._y(end) + middle
            yield _path(f"M{side} {from_y}h14V{to_y}h-12")
            yield svg_text(side + 18, (from_y + to_y) // 2, words, fill=FAINT, size=11)

    def _foot(self) -> list[str]:
        lines = []
        if self.found.stages:
            lines.append("Arrows: bytes of one microbatch; its gradients go back the other way.")
        by_axis: dict[str, int] = {}
        for rank in self.found.ranks:
            own: dict[str, int] = {}
            for message in rank.messages:
                own[message.axis] = own.get(message.axis, 0) + message.num_bytes
            by_axis = {a: max(own.get(a, 0), by_axis.get(a, 0)) for a in {**by_axis, **own}}
        sizes = [
            f"{in_units(size)} {'to' if axis == 'servers' else 'over'} {axis}"
            for axis, size in by_axis.items()
        ]
        lines.append(f"A rank sends in a step at most: {', '.join(sizes) or 'nothing'}.")
        if self.found.servers:
            sent = max(m.num_bytes for row in self.found.servers for m in row.messages)
            lines.append(
                f"Not drawn: {plural(len(self.found.servers), 'server')}, which hold the optimizer "
                f"state; each sends in a step at most {in_units(sent)} of parameters."
            )
        hidden = self.num_columns * self.num_rows - self.columns * self.rows
        if hidden:
            lines.append(f"Not drawn: {hidden} more ranks.")
        return lines

    def _column(self, rank: RankRow) -> int:
        return rank.data * self.found.axes["tensor"] + rank.tensor

    def _x(self, column: int) -> int:
        return MARGIN + column * (BOX + self.gap)

    def _y(self, row: int) -> int:
        return TOP + row * (self.box_height + GAP_Y)


def _rest_of(rank: RankRow) -> str:
    """What a rank holds that no bar shows."""
    buffers, extra = rank.memory.buffers.num_bytes, rank.memory.extra.num_bytes
    rest = [f"{in_units(buffers)} of buffers"] if buffers else []
    rest += [f"about {in_units(extra)} extra"] if extra else []
    return f"and {', '.join(rest)}" if rest else ""


def _stage_line(stage: StageRow) -> str:
    """The stage's index and modules; of long names, the ends."""
    head = f"stage {stage.index}: "
    if stage.first == stage.last:
        return head + _end_of(stage.first, NARROW - len(head))
    room = NARROW - len(head) - 4
    first = _end_of(stage.first, max(room // 2, room - len(stage.last)))
    return f"{head}{first} to {_end_of(stage.last, room - len(first))}"


def _end_of(name: str, most: int) -> str:
    return name if len(name) <= most else f"…{name[len(name) - most + 1 :]}"


def svg_text(
    x: int,
    y: int,
    words: str,
    *,
    size: int = 12,
    fill: str = INK,
    bold: bool = False,
    anchor: str = "start",
) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}" '
        f'text-anchor="{anchor}"{weight}>{escape(words)}</text>'
    )


def _bar(x: int, y: int, width: float, fill: str, opacity: float) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width:.1f}" height="10" rx="2" fill="{fill}" '
        f'opacity="{opacity}"/>'
    )


def _path(way: str) -> str:
    return f'<path d="{way}" fill="none" stroke="{FAINT}" marker-end="url(#head)"/>'
