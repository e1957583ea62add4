"""What reaches the screen: warnings of any process of a rank, once, and no needless traceback."""

import errno
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import logs
from shoal.data.loader_processes import Loaders, PieceKey
from shoal.data.readers.records import SourceLost
from shoal.errors import RecipeError, UsageError
from shoal.events.events import Event, ProgressEvent
from shoal.events.screen import Display, StepPace, in_time, live_line
from shoal.storage.object_client import StoreError
from shoal.system.fork_server import needs_no_traceback


@pytest.fixture(autouse=True)
def nothing_waiting() -> None:
    logs.for_the_screen.clear()


def as_event(fields: dict[str, Any]) -> Event:
    return msgspec.convert(fields, Event)  # type: ignore[arg-type]


def test_a_loaders_warning_reaches_the_rank_once() -> None:
    def load(epoch: int, ids: Any) -> tuple[Any, Any, Any]:
        if ids[0] == 0:
            logs.warn_on_screen("the disk is full")
        return 1.0, 2.0, ids

    work = Loaders(load, 1)
    try:
        for step in (0, 1):
            work.ask(PieceKey(step, 0), 0, np.array([step], dtype=np.int64))
            work.take(PieceKey(step, 0))
    finally:
        work.close()
    assert list(logs.for_the_screen) == ["the disk is full"]


def test_what_several_ranks_say_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display()
    for _ in range(3):
        display(as_event({"event": "warning", "text": "the disk [of them all] is full"}))
    told = {"event": "waiting", "rank": 1, "step": 4, "samples": "samples 3, 5"}
    for seconds in (10, 20):
        display(as_event(told | {"seconds": seconds}))
    display(
        as_event(
            {
                "event": "progress",
                "step": 5,
                "loss": float("nan"),
                "samples_per_s": 1.0,
                "communication": 0.5,
            }
        )
    )
    said = capsys.readouterr().err
    assert said.count("the disk [of them all] is full") == 1
    for rank in range(3):
        display(as_event({"event": "save-failed", "step": 4, "why": f"rank {rank} has no room"}))
    assert capsys.readouterr().err.count("step 4 was not saved") == 1
    assert "rank 1 waits for data since 20 s, after step 4: samples 3, 5" in said
    assert "loss none" in said


def test_ranks_and_servers_are_called_by_their_names(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"num_parameters": 1, "plan": "", "num_steps": 5, "batch_size": 8}
    facts |= {"begins": "", "unholdable": "", "cuts": ""}
    display = Display()
    display.introduce("recipe", facts | {"num_ranks": 1, "num_servers": 0}, "runs/1")
    display.introduce("recipe", facts | {"num_ranks": 2, "num_servers": 1}, "runs/1")
    gone = {"event": "exited", "status": -9, "how": "was killed by SIGKILL", "step": 4}
    again = {
        "event": "recovered",
        "cause": "it died",
        "ms": 80.0,
        "step": 4,
        "generation": 1,
        "spare": True,
    }
    for who in ({"rank": 1}, {"rank": 2, "server": 0}):
        display(as_event(gone | who))
        display(as_event(again | who))
    display(as_event(again | {"rank": 0, "spare": False}))
    said = capsys.readouterr().err
    assert "a new process took the seat of rank 0" in said
    assert ", 1 rank, 5 steps" in said and ", 2 ranks, 1 server, 5 steps" in said
    assert "rank 1 was killed by SIGKILL" in said and "a spare took the seat of rank 1" in said
    assert "server 0 was killed by SIGKILL" in said and "a spare took the seat of server 0" in said


def test_an_error_of_the_system_needs_no_traceback() -> None:
    def raised(error: Exception, cause: Exception | None) -> Exception:
        error.__cause__ = cause
        return error

    full = OSError(errno.ENOSPC, "No space left on device")
    assert needs_no_traceback(raised(UsageError("the directory cannot be used"), full))
    assert needs_no_traceback(raised(RecipeError("no cause"), None))
    gone = ValueError("deep in the library of a store")
    assert needs_no_traceback(raised(StoreError(errno.EIO, "cannot read s3://bucket/a"), gone))
    lost = raised(SourceLost("Redis cannot be asked"), gone)
    assert needs_no_traceback(lost) and needs_no_traceback(
        raised(UsageError("there is no such table"), lost)
    )
    assert not needs_no_traceback(raised(RecipeError("the recipe failed"), full)), (
        "its own code is shown"
    )
    assert not needs_no_traceback(raised(UsageError("wrong"), ValueError("of a function")))
    assert not needs_no_traceback(full)


def test_who_is_busy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    told = {"event": "busy", "rank": 2, "step": 4, "seconds": 60, "at": "forward (my[0].py:1)"}
    Display()(as_event(told))
    assert "rank 2 has been busy for 60 s, after step 4: forward (my[0].py:1)" in _flat(capsys)
    Display()(as_event(told | {"server": 0}))
    assert "server 0 has been busy for 60 s: forward" in _flat(capsys)


def _flat(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().err.split())


def test_an_evaluation_is_shown_once_and_again_after_a_restart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    display = Display()
    told = [{"event": "evaluated", "step": step, "evaluation": {"[a]": 0.5}} for step in (5, 10)]
    for record in (told[0], told[0], told[1]):  # who took over from the dead one tells it as well
        display(as_event(record))
    assert capsys.readouterr().err.splitlines() == [
        "step 5: evaluation  [a] 0.5000",
        "step 10: evaluation  [a] 0.5000",
    ]
    resumed = {"event": "resumed", "step": 5, "name": "step-00000005", "plan": "data=2"}
    resumed |= {"pieces": 2, "pieces_now": 2}
    for record in (resumed, told[1]):
        display(as_event(record))
    assert "step 10: evaluation" in capsys.readouterr().err


def progress(**more: Any) -> ProgressEvent:
    told = {"event": "progress", "step": 450, "loss": 0.5, "samples_per_s": 1767.0}
    found = as_event(
        told | {"communication": 0.12, "rate": 3e-4, "memory_bytes": 288_000_000} | more
    )
    assert isinstance(found, ProgressEvent)
    return found


def test_the_live_line_has_a_bar_and_all_that_fits() -> None:
    line = live_line(progress(), 1000, 83.0, 115, blocks=False)
    assert line == (
        "####-----  step 450/1000  loss 0.5000  1:23 left  1767 samples/s  "
        "rate 0.0003  12 % in communication  288 MB a rank"
    )
    wide = live_line(progress(), 1000, 83.0, 160, blocks=True)
    assert wide.endswith("288 MB a rank") and wide.startswith("\u2501" * 10 + "\u2500" * 14)
    assert live_line(progress(), None, None, 30, blocks=True) == "step 450  loss 0.5000"


@settings(max_examples=60)
@given(
    width=st.integers(1, 200),
    step=st.integers(1, 10**9),
    loss=st.floats(allow_nan=True, allow_infinity=True),
    left_s=st.none() | st.floats(0, 1e9),
)
def test_the_live_line_never_wraps(width, step, loss, left_s) -> None:
    event = progress(step=step, loss=loss, scalars={"a\nb": 1.0})
    for num_steps in (None, 1, step, 10**9):
        line = live_line(event, num_steps, left_s, width, blocks=True)
        assert len(line) <= width and "\n" not in line


def test_the_time_that_is_left_follows_the_clock() -> None:
    pace = StepPace()
    assert pace.left_s(100) is None
    for step in range(1, 11):
        pace.add(step, 2.0 * step)
    assert pace.left_s(100) == 180.0 and pace.left_s(None) is None
    for step in range(5, 8):  # it went back to a checkpoint, and is faster now
        pace.add(step, 100.0 + step)
    assert pace.left_s(107) == 100.0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "0:00"), (42, "0:42"), (725, "12:05"), (11045, "3:04:05"), (90000, "1 d 1:00:00")],
)
def test_times_are_told_as_clocks_tell_them(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


def test_a_level_leaves_out_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"num_parameters": 1, "plan": "", "num_steps": 5, "batch_size": 8, "begins": ""}
    facts |= {"unholdable": "", "cuts": "", "num_ranks": 1, "num_servers": 0}
    told = [
        {"event": "evaluated", "step": 1, "evaluation": {"loss": 1.0}},
        {"event": "warning", "text": "mind the gap"},
        {"event": "host-lost", "host": 1, "how": "host 1 is gone", "step": 3, "then": "it ends"},
    ]
    shown = {}
    for name, level in logs.LEVELS.items():
        display = Display(level)
        display.introduce("recipe", facts, "runs/1")
        for event in told:
            display(as_event(event))
        display(progress())
        shown[name] = capsys.readouterr().err
    assert all(
        words in shown["info"] for words in ("recipe", "evaluation", "mind the gap", "step 450")
    )
    assert shown["warning"].splitlines() == [
        "mind the gap",
        "host 1 is gone, after step 3: it ends",
    ]
    assert shown["error"].splitlines() == ["host 1 is gone, after step 3: it ends"]
