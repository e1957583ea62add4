"""What a person sees of a study: a live table of the trials under way, and a line for each end.

It goes to standard error. Without a terminal there is no table, and each trial's start and end is a
plain line.
"""

import math
import time
from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.events.screen import Screen
from shoal.system.streams import steady
from shoal.training.goal import Goal
from shoal.tuning.driver import TrialProgress
from shoal.tuning.space import Value
from shoal.tuning.verdicts import TrialVerdict

REFRESH_S = 0.2
_WORDS = {
    "complete": "[green]done[/]",
    "pruned": "[yellow]pruned[/]",
    "failed": "[bold red]failed[/]",
    "resume": "[yellow]lost, and resumed[/]",
    "pause": "stopped, to be gone on with",
}


class StudyDisplay:
    """Shows a study as its driver tells of it."""

    def __init__(
        self,
        goal: Goal,
        num_trials: int,
        best: tuple[float, int] | None = None,
        *,
        is_shown: bool = True,
    ):
        """`best` is the best value so far, and its trial."""
        self._goal, self._num_trials = goal, num_trials
        self._console = Screen(stderr=True, highlight=False, soft_wrap=True, quiet=not is_shown)
        self._live: Live | None = None
        self._settings: dict[int, Mapping[str, Value]] = {}
        self._best = best
        self._shown_at = 0.0

    def open(self) -> None:
        if self._console.is_terminal and not self._console.quiet:
            self._live = Live(console=self._console, auto_refresh=False, transient=True)
            self._live.start()

    def close(self) -> None:
        if self._live is not None:
            with steady():
                self._live.stop()
            self._live = None

    def say(self, text: str) -> None:
        with steady():
            self._console.print(text)

    def started(self, number: int, settings: Mapping[str, Value], *, is_resumed: bool) -> None:
        self._settings[number] = settings
        if self._live is None:
            again = "goes on" if is_resumed else "starts"
            self.say(f"trial {number} {again}: {escape(in_words(settings))}")

    def grown(self, number: int, num_ranks: int) -> None:
        self.say(f"trial {number} asked for {num_ranks} ranks, since cores are free")

    def ended(self, number: int, verdict: TrialVerdict, value: float | None) -> None:
        words = [f"trial {number} {_WORDS[verdict.what]}"]
        if verdict.what in ("complete", "pruned") and value is not None:
            words.append(f"{self._goal.metric} {figure(value)}")
        before = None if self._best is None else self._best[0]
        if verdict.what == "complete" and value is not None and self._goal.is_better(value, before):
            self._best = (value, number)
            words.append("[bold green]the best so far[/]")
        if verdict.reason:
            words.append(escape(verdict.reason.splitlines()[0]))
        if self._live is not None:
            words.append(f"[dim]{escape(in_words(self._settings.get(number, {})))}[/]")
        self.say("  ".join(words))

    def stopping(self) -> None:
        self.say("stopping: trials under way save themselves; the same signal again ends at once")

    def tick(self, running: list[TrialProgress], num_finished: int) -> None:
        now = time.monotonic()
        if self._live is None or now - self._shown_at < REFRESH_S:
            return
        self._shown_at = now
        with steady():
            self._live.update(self._picture(running, num_finished), refresh=True)

    def _picture(self, running: Sequence[TrialProgress], num_finished: int) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("trial", "ranks", "step", "batch loss", self._goal.metric, "settings"):
            table.add_column(name, justify="left" if name == "settings" else "right")
        for one in running:
            report = "" if one.report is None else figure(one.report.value)
            loss = "" if one.loss is None else figure(one.loss)
            table.add_row(
                *(str(one.number), str(one.num_ranks), str(one.step), loss, report),
                Text(in_words(one.settings)),
            )
        best = "none yet"
        if self._best is not None:
            best = f"{figure(self._best[0])} (trial {self._best[1]})"
        head = f"{num_finished} of {self._num_trials} trials  best {self._goal.metric} {best}"
        return Group(Text(head, style="bold"), table)


def in_words(settings: Mapping[str, Value]) -> str:
    """Settings as they are set, numbers with four digits."""
    return " ".join(
        f"{name}={figure(value) if isinstance(value, float) else value}"
        for name, value in settings.items()
    )


def figure(value: float) -> str:
    return f"{value:.4g}" if math.isfinite(value) else "none"
