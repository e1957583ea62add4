"""What a person sees while ranks work: a live line with a bar, and a line for what happens.

It goes to standard error, so that standard output stays free for results. The live line is as wide
as the terminal lets it be: what does not fit is left out, from its end. Without a terminal it
becomes a plain line every few seconds. A level leaves out what is below it: of `WARNING`, all that
is no problem.
"""

import logging
import math
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from msgspec import UNSET
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.events.events import (
    BalancedEvent,
    BatchEmptyEvent,
    BusyEvent,
    CheckpointRefusedEvent,
    EndedEarlyEvent,
    EvaluatedEvent,
    Event,
    ExitedEvent,
    HangEvent,
    HostAddedEvent,
    HostJoinedEvent,
    HostLeftEvent,
    HostLostEvent,
    HostsMissingEvent,
    ModelFailedEvent,
    ModelNotSavableEvent,
    NothingToResumeEvent,
    NotResizedEvent,
    PrintedEvent,
    ProgressEvent,
    RecoveredEvent,
    ReplicaRepairedEvent,
    ResizedEvent,
    ResumedEvent,
    SaveFailedEvent,
    SaveSkippedEvent,
    SeatedEvent,
    SlowEvent,
    StandstillEvent,
    StoppingEvent,
    WaitingEvent,
    WarningEvent,
)
from shoal.formatting import num_parameters, plural
from shoal.system.streams import silence, steady

PLAIN_EVERY_S = 5.0
MOST_SCALARS = 3  # of what is logged, in the live line
BAR, LEAST_BAR = 24, 8  # characters
WINDOW_S = 60.0  # of which the time that is left is reckoned


class Screen(Console):
    """A terminal, or what stands in its place."""

    def on_broken_pipe(self) -> None:
        """Its reader has left, which is no reason to end."""
        silence(2)


class Display:
    """Shows progress and events of a run."""

    def __init__(self, level: int = logging.INFO) -> None:
        self.num_steps: int | None = None
        self.console = Screen(stderr=True, highlight=False, soft_wrap=True)
        self._level = level
        self._live = self.console.is_terminal and not self.console.is_dumb_terminal
        self._shown_at = 0.0
        self._evaluated = 0  # the last step whose evaluation was shown
        self._is_drawn = False  # the live line
        self._pace = StepPace()
        self._echoes: dict[int, str] = {}  # of steps for which no rank has given a reason yet
        self._said: set[str] = set()

    def __call__(self, event: Event) -> None:
        if level_of(event) < self._level:
            return
        match event:
            case ProgressEvent():
                self._show_progress(event)
            case PrintedEvent():
                self.say(escape("\n".join(event.lines)))
            case ExitedEvent() if event.status < 0:
                self.say(f"[bold red]{_who(event)} {escape(event.how)}[/] after step {event.step}")
            case EvaluatedEvent():
                self._show_evaluation(event)
            case ResumedEvent():
                self._evaluated = event.step
                self.say(_resumed(event))
            case ModelNotSavableEvent():
                self._no_checkpoints(event.why)
            case SaveFailedEvent() | SaveSkippedEvent():
                self._not_saved(event)
            case BatchEmptyEvent():
                self._say_once("emptied", _emptied(event))
            case WarningEvent():
                self._say_once(event.text, f"[bold yellow]{escape(event.text)}[/]")
            case _ if type(event) in _SENTENCES:
                self.say(_SENTENCES[type(event)](event))

    def introduce(self, recipe: str, facts: dict[str, Any], run_dir: Path) -> None:
        """Say what is about to be trained."""
        self.num_steps = facts["num_steps"]
        if self._level > logging.INFO:
            return
        members = plural(facts["num_ranks"], "rank")
        if facts["num_servers"]:
            members += f", {plural(facts['num_servers'], 'server')}"
        self.say(
            f"{escape(recipe)}  {num_parameters(facts['num_parameters'])}, "
            f"plan {facts['plan'] or 'data=1'}, {members}, "
            f"{facts['num_steps']} steps of {facts['batch_size']} samples -> {escape(str(run_dir))}"
        )
        if facts.get("chosen"):
            self.say(escape(facts["chosen"]))
        if facts["begins"]:
            self.say(escape(facts["begins"]))
        if why := facts["unholdable"]:
            self._no_checkpoints(why)
        if facts["cuts"]:
            self.say(escape(facts["cuts"]))

    def say(self, text: str) -> None:
        with steady():
            self._clear()
            self.console.print(text)

    def close(self) -> None:
        for step, why in self._echoes.items():
            self._not_saved(SaveFailedEvent(step=step, why=why))
        with steady():
            self._clear()
            sys.stderr.flush()

    def _say_once(self, kind: str, text: str) -> None:
        """Several ranks may have the same to say, and one of them many times."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def _not_saved(self, event: SaveFailedEvent | SaveSkippedEvent) -> None:
        """Each rank says so; what one heard from another is shown if there is nothing else."""
        if isinstance(event, SaveFailedEvent) and event.echo:
            self._echoes.setdefault(event.step, event.why)
        else:
            text = f"[bold yellow]step {event.step} was not saved[/]: {escape(event.why)}"
            self._say_once(f"not saved {event.step}", text)

    def _no_checkpoints(self, why: str) -> None:
        told = f"no checkpoint will be made: {escape(why)}"
        self._say_once("unholdable", told)

    def _show_evaluation(self, event: EvaluatedEvent) -> None:
        if event.step > self._evaluated:  # two ranks may report one
            self._evaluated = event.step
            self.say(f"step {event.step}: evaluation  {_numbers(event.evaluation)}")

    def _show_progress(self, event: ProgressEvent) -> None:
        now = time.monotonic()
        self._pace.add(event.step, now)
        left_s = self._pace.left_s(self.num_steps)
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            with steady():
                self._clear()
                sys.stderr.write(live_line(event, self.num_steps, left_s, width, self._has_blocks))
                sys.stderr.flush()
            self._is_drawn = True
        elif now - self._shown_at > PLAIN_EVERY_S:
            self._shown_at = now
            with steady():
                self.console.print(Text("  ".join(parts_of_line(event, self.num_steps, left_s))))

    @property
    def _has_blocks(self) -> bool:
        return (sys.stderr.encoding or "").lower().startswith("utf")

    def _clear(self) -> None:
        if self._is_drawn:
            sys.stderr.write("\r\x1b[2K")
            self._is_drawn = False


class StepPace:
    """How fast steps go by the clock, with all that is between them: evaluations, saves, losses."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()  # when a step was the last one

    def add(self, step: int, now: float) -> None:
        if self._seen and step < self._seen[-1][1]:  # it went back to a checkpoint
            self._seen.clear()
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_S:
            self._seen.popleft()

    def left_s(self, num_steps: int | None) -> float | None:
        """Seconds until the last step; None if that is not known."""
        if num_steps is None or len(self._seen) < 2:
            return None
        (began, first), (ended, last) = self._seen[0], self._seen[-1]
        return (num_steps - last) * (ended - began) / (last - first)


def live_line(
    event: ProgressEvent, num_steps: int | None, left_s: float | None, width: int, blocks: bool
) -> str:
    """A bar and the parts of a line, as many as fit. Pure."""
    parts = parts_of_line(event, num_steps, left_s)
    least = LEAST_BAR + 2 if num_steps else 0
    while len(parts) > 2 and len("  ".join(parts)) > width - least:
        parts = parts[:-1]
    line = "  ".join(parts)
    room = min(BAR, width - len(line) - 2)
    if num_steps and room >= LEAST_BAR:
        line = f"{_bar(event.step / num_steps, room, blocks)}  {line}"
    return line[:width]


def _bar(share: float, width: int, blocks: bool) -> str:
    full, empty = ("\u2501", "\u2500") if blocks else ("#", "-")
    done = int(width * min(max(share, 0.0), 1.0))
    return full * done + empty * (width - done)


def parts_of_line(
    event: ProgressEvent, num_steps: int | None, left_s: float | None
) -> Sequence[str]:
    """What is said of progress, the most important first. Pure."""
    of = f"/{num_steps}" if num_steps else ""
    loss = "none" if math.isnan(event.loss) else f"{event.loss:.4f}"
    parts = [f"step {event.step}{of}", f"loss {loss}"]
    shown = list(event.scalars.items())[:MOST_SCALARS]
    parts += [f"{_printable(name)} {value:.4g}" for name, value in shown]
    if left_s is not None:
        parts.append(f"{in_time(left_s)} left")
    parts.append(f"{event.samples_per_s:.0f} samples/s")
    if event.rate:
        parts.append(f"rate {event.rate:.3g}")
    parts.append(f"{100 * event.communication:.0f} % in communication")
    if event.memory_bytes:
        parts.append(f"{event.memory_bytes / 1e6:.0f} MB a rank")
    return parts


def _printable(name: str) -> str:
    """A name may be anything: nothing in it moves the cursor."""
    return "".join(c if c.isprintable() else "?" for c in name)


def in_time(seconds: float) -> str:
    """As in 0:42, 12:05 or 3:04:05; days in front of it."""
    whole = round(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if whole < 3600:
        return f"{minutes}:{whole % 60:02d}"
    clock = f"{hours}:{minutes:02d}:{whole % 60:02d}"
    return f"{days} d {clock}" if days else clock


def level_of(event: Event) -> int:
    """How grave it is what an event tells, as levels of a log."""
    if isinstance(event, _ERRORS) or (isinstance(event, ExitedEvent) and event.status < 0):
        return logging.ERROR
    return logging.WARNING if isinstance(event, _WARNINGS) else logging.INFO


_ERRORS = (HostLostEvent, ModelFailedEvent, HangEvent, StandstillEvent)
_WARNINGS = (
    *(BatchEmptyEvent, BusyEvent, CheckpointRefusedEvent, ModelNotSavableEvent, NotResizedEvent),
    *(ReplicaRepairedEvent, SaveFailedEvent, SaveSkippedEvent, SlowEvent, WaitingEvent),
    WarningEvent,
)


def _numbers(evaluation: dict[str, float]) -> str:
    """A metric may have any name, and be no number."""
    return escape("  ".join(f"{name} {value:.4f}" for name, value in evaluation.items()))


def _who(event: SeatedEvent) -> str:
    return f"rank {event.rank}" if event.server is UNSET else f"server {event.server}"


def _recovered(event: RecoveredEvent) -> str:
    newcomer = "a spare" if event.spare else "a new process"
    who = f"{newcomer} took the seat of {_who(event)}; full strength"
    who = "at work" if event.rank is None else who
    return (
        f"[bold green]{who} again after {event.ms:.0f} ms[/], "
        f"at step {event.step}, generation {event.generation}"
    )


def resized_in_words(change: ResizedEvent) -> str:
    """How a run got another size, in a sentence."""
    moved = f", {change.bytes / 1e6:.3g} MB moved" if change.bytes else ""
    what = f"resized at step {change.step}: {change.change}{moved}, in {change.ms:.0f} ms"
    return f"{what}. {change.lost}" if change.lost else what


def _resumed(event: ResumedEvent) -> str:
    told = f"going on from step {event.step}, saved under {event.plan or 'data=1'}"
    if event.pieces != event.pieces_now:
        told += (
            f"; the batch is cut into {event.pieces_now} pieces from here on, not {event.pieces}"
        )
    return told


def _begun(event: NothingToResumeEvent) -> str:
    store = escape(event.store)
    if event.num_bad:
        bad = f"[bold yellow]no checkpoint in {store} is good[/]"
        return f"{bad}: the run starts again at step {event.step}"
    return f"nothing to go on from in {store}: the run begins at step {event.step}"


def _ended_early(event: EndedEarlyEvent) -> str:
    why = f": {escape(event.why)}" if event.why else ""
    return f"[bold]ended early, after step {event.step}[/]{why}"


def _emptied(event: BatchEmptyEvent) -> str:
    return (
        f"[bold yellow]step {event.step} changes nothing[/]: quarantine left out all "
        f"{event.left_out} samples of its batch. More such steps are in events.jsonl alone"
    )


def _waiting(event: WaitingEvent) -> str:
    return (
        f"[bold yellow]rank {event.rank} waits for data since {event.seconds} s[/], after "
        f"step {event.step}: {escape(event.samples)}"
    )


def _standstill(event: StandstillEvent) -> str:
    return (
        f"[bold yellow]nothing was done for {event.seconds} s[/] after step {event.step}, "
        "and no rank says what takes so long: they may wait for each other. Where each stands is "
        "at the end of its log; Ctrl-C ends the run"
    )


def _busy(event: BusyEvent) -> str:
    after = f", after step {event.step}" if event.server is UNSET else ""
    return (
        f"[bold yellow]{_who(event)} has been busy for {event.seconds} s[/]{after}: "
        f"{escape(event.at)}; its log has the stack"
    )


def _slow(event: SlowEvent) -> str:
    return (
        f"[bold yellow]the others wait, after step {event.step}[/]: {_times(event.slow)}; "
        f"{escape(event.advice)}"
    )


def _repaired(event: ReplicaRepairedEvent) -> str:
    ranks = ", ".join(map(str, event.ranks))
    more = event.count - len(event.tensors)
    names = ", ".join(event.tensors) + (f" and {more} more" if more else "")
    return (
        f"[bold yellow]rank {ranks} differed from the other replicas after step {event.step}"
        f"[/], in {escape(names)}, and took their state; look at its memory"
    )


def _times(slow: dict[str, float]) -> str:
    return ", ".join(f"replica {r} takes {times}x as long" for r, times in slow.items())


def _balanced(event: BalancedEvent) -> str:
    slow = _times(event.slow)
    return (
        f"[bold]work moved after step {event.step}[/]: {slow or 'speeds have changed'}; of "
        f"each batch the replicas take {', '.join(map(str, event.rounds))} parts"
    )


def _missing(event: HostsMissingEvent) -> str:
    waits = f"shoal: waits for {plural(event.count, 'more host')}"
    join = escape(f"`shoal join {event.run_dir}`")
    return f"{waits}: run {join} there" if event.run_dir else waits


# The sentence for an event that is shown each time, whatever else there was.
_SENTENCES: dict[type, Callable[[Any], str]] = {
    RecoveredEvent: _recovered,
    EndedEarlyEvent: _ended_early,
    CheckpointRefusedEvent: lambda event: (
        f"[bold yellow]{escape(event.name)} was passed over[/]: {escape(event.why)}"
    ),
    ModelFailedEvent: lambda event: (
        f"[bold red]model.safetensors was not written[/]: {escape(event.why)}"
    ),
    ResizedEvent: lambda event: f"[bold green]{escape(resized_in_words(event))}[/]",
    NotResizedEvent: lambda event: f"[bold yellow]the run keeps its size[/]: {escape(event.why)}",
    HostLostEvent: lambda event: (
        f"[bold yellow]{escape(event.how)}, after step {event.step}[/]: {escape(event.then)}"
    ),
    HostAddedEvent: lambda event: (
        f"[bold green]host {event.host} came, after step {event.step}[/]: {escape(event.then)}"
    ),
    HostsMissingEvent: _missing,
    HostJoinedEvent: lambda event: escape(f"shoal: {event.name} is there"),
    HostLeftEvent: lambda event: escape(f"shoal: {event.name} is gone again"),
    StoppingEvent: lambda event: (
        "stopping after the step under way; the same signal again ends at once"
    ),
    NothingToResumeEvent: _begun,
    BalancedEvent: _balanced,
    SlowEvent: _slow,
    WaitingEvent: _waiting,
    BusyEvent: _busy,
    ReplicaRepairedEvent: _repaired,
    StandstillEvent: _standstill,
    HangEvent: lambda event: f"[bold yellow]{escape(event.text)}[/], since {event.seconds} s",
}
