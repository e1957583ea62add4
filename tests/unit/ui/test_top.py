"""The screen of `shoal top` holds what the page holds, and no name steers the terminal."""

import io
from pathlib import Path

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal.ui.records import Figure
from shoal.ui.run_reader import read_view
from shoal.ui.top import BARS, DEAD, SIGNS, draw, sparkline, strip_text, watch
from tests.unit.ui.made_runs import loss_of_rank, make_run, write_lines

VALUES = st.lists(st.one_of(st.none(), st.floats(-1e9, 1e9)), max_size=200)


def shown(run: Path, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    watch(run, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_members_step_loss_strips_and_incidents_are_there(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "events.jsonl", loss_of_rank(1, 20), "a")
    text = shown(run)
    for words in ("run  done", "step 50 of 50", "loss", "rank 0", "rank 1", "1 incident"):
        assert words in text
    assert "rank 1 was lost (was killed by SIGKILL" in text and "400 ms lost" in text


def test_a_killed_rank_is_red_on_its_strip(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_lines(run / "events.jsonl", loss_of_rank(1, 20), "a")
    view = read_view(run)
    ours, killed = (strip_text(worker, view, 60) for worker in view.strips.workers)
    assert not any(span.style == "red" for span in ours.spans)
    assert any(span.style == "red" for span in killed.spans) and len(killed.plain) == 60
    assert DEAD in killed.plain and DEAD not in ours.plain  # also where there is no colour


def test_a_steep_loss_is_drawn_by_its_logarithm(tmp_path: Path) -> None:
    """Or all but its first steps would be one flat line."""
    run = make_run(tmp_path / "run")
    view = read_view(run)
    mean = [10.0 ** -(number / 25) for number in range(100)]
    figures = {"loss": Figure(mean=[*mean], low=[], high=[])}
    curves = msgspec.structs.replace(view.curves, figures=figures)
    console = Console(file=io.StringIO(), width=100)
    with console.capture() as capture:
        console.print(draw(msgspec.structs.replace(view, curves=curves), 100))
    (line,) = [line for line in capture.get().splitlines() if line.startswith("log loss")]
    assert set(BARS[1:]) <= set(line)


def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", recipe="\x1b[2J[red]x[/red]\x07")
    text = shown(run)
    assert "\x1b" not in text and "\x07" not in text and "[red]x[/red]" in text


@given(VALUES, st.integers(-5, 120))
def test_a_sparkline_fits(values: list[float | None], width: int) -> None:
    made = sparkline(values, width)
    assert len(made) <= max(0, width) and set(made) <= set(BARS)


def test_an_empty_directory_is_shown_too(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    console = Console(file=io.StringIO(), width=40)
    console.print(draw(read_view(tmp_path / "run"), 40))


def test_a_narrow_terminal_shows_who_each_strip_is_of(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ranks=12)
    for width in (40, 59, 60, 80, 160):
        lines = shown(run, width).splitlines()
        (strip,) = [line for line in lines if "rank 11" in line]
        assert (
            len(strip) <= width
            and sum(map(strip.count, (*SIGNS.values(), "·"))) >= min(width, 100) // 2
        )
