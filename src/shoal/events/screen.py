"""What a person sees while ranks work: one live line, and a line for each thing that happens.

It goes to standard error, so that standard output stays free for results. Without a terminal the
live line becomes a plain line every few seconds.
"""

import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.formatting import plural
from shoal.system.streams import silence, steady

PLAIN_EVERY_S = 5.0


class _Screen(Console):
    """A terminal, or what stands in its place."""

    def on_broken_pipe(self) -> None:
        """Whoever read it has left, which is no reason to end."""
        silence(2)


class Display:
    """Shows progress and events as the supervisor tells them."""

    def __init__(self, num_steps: int | None = None):
        self.num_steps = num_steps
        self.console = _Screen(stderr=True, highlight=False, soft_wrap=True)
        self._live = self.console.is_terminal
        self._shown_at = 0.0
        self._evaluated = 0  # the last step whose evaluation was shown
        self._width = 0
        self._echoes: dict[int, str] = {}  # of steps for which no rank has given a reason yet
        self._said: set[str] = set()

    def __call__(self, record: dict[str, Any]) -> None:
        match record["event"]:
            case "progress":
                self._progress(record)
            case "exited" if record["status"] < 0:
                self.say(f"[bold red]{_who(record)} {record['how']}[/] after step {record['step']}")
            case "recovered":
                newcomer = "a spare" if record["spare"] else "a new process"
                seat = f"{newcomer} took the seat of {_who(record)}; "
                who = "" if record["rank"] is None else seat
                self.say(
                    f"[bold green]{who}full strength again after {record['ms']:.0f} ms[/], "
                    f"at step {record['step']}, generation {record['generation']}"
                )
            case "evaluated":
                self._show_evaluation(record)
            case "resumed":
                self._evaluated = record["step"]
                self.say(_going_on(record))
            case "checkpoint-refused":
                name, why = escape(record["name"]), escape(record["why"])
                self.say(f"[bold yellow]{name} was passed over[/]: {why}")
            case "model-failed":
                why = escape(record["why"])
                self.say(f"[bold red]model.safetensors was not written[/]: {why}")
            case "unholdable":
                self._no_checkpoints(record["why"])
            case "save-failed" | "save-skipped":
                self._not_saved(record)
            case "emptied":
                self._say_once("emptied", _emptied(record))
            case "resized":
                self.say(f"[bold green]{escape(resized(record))}[/]")
            case "not-resized":
                self.say(f"[bold yellow]the run keeps its size[/]: {escape(record['why'])}")
            case "hosts-missing":
                more = plural(record["count"], "more host")
                join = escape(f"`shoal join {record['run_dir']}`")
                self.say(f"shoal: waits for {more}: run {join} there")
            case "host-joined" | "host-left":
                how = "is there" if record["event"] == "host-joined" else "is gone again"
                self.say(escape(f"shoal: {record['name']} {how}"))
            case "stopping":
                self.say("stopping after the step under way; the same signal again ends at once")
            case kind if kind in _SAID:
                self.say(_SAID[kind](record))
            case "warning":
                self._say_once(record["text"], f"[bold yellow]{escape(record['text'])}[/]")

    def introduce(self, recipe: str, facts: dict[str, Any], where: str) -> None:
        """Say what is about to be trained."""
        members = plural(facts["num_ranks"], "rank")
        if facts["num_servers"]:
            members += f", {plural(facts['num_servers'], 'server')}"
        self.say(
            f"{recipe}  {facts['num_parameters'] / 1e6:.2f} M parameters, "
            f"plan {facts['plan'] or 'data=1'}, {members}, "
            f"{facts['num_steps']} steps of {facts['batch_size']} samples -> {where}"
        )
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
            self._not_saved({"step": step, "why": why})
        with steady():
            self._clear()
            sys.stderr.flush()

    def _say_once(self, kind: str, text: str) -> None:
        """Several ranks may have the same to say, and one of them many times."""
        if kind not in self._said:
            self._said.add(kind)
            self.say(text)

    def _not_saved(self, record: dict[str, Any]) -> None:
        """Each rank says so; what one heard from another is shown if there is nothing else."""
        step, why = record["step"], record["why"]
        if record.get("echo"):
            self._echoes.setdefault(step, why)
        else:
            text = f"[bold yellow]step {step} was not saved[/]: {escape(why)}"
            self._say_once(f"not saved {step}", text)

    def _no_checkpoints(self, why: str) -> None:
        told = f"no checkpoint will be made, since none can hold it: {escape(why)}"
        self._say_once("unholdable", told)

    def _show_evaluation(self, record: dict[str, Any]) -> None:
        if record["step"] > self._evaluated:  # two ranks may tell of one
            self._evaluated = record["step"]
            self.say(f"step {record['step']}: evaluation  {_numbers(record['evaluation'])}")

    def _progress(self, record: dict[str, Any]) -> None:
        line = self._line(record)
        now = time.monotonic()
        if self._live:
            with steady():
                self._clear()
                sys.stderr.write(line)
                sys.stderr.flush()
            self._width = len(line)
        elif now - self._shown_at > PLAIN_EVERY_S:
            self._shown_at = now
            with steady():
                self.console.print(Text(line))

    def _line(self, record: dict[str, Any]) -> str:
        of = f"/{self.num_steps}" if self.num_steps else ""
        loss = "none" if math.isnan(record["loss"]) else f"{record['loss']:.4f}"
        return (
            f"step {record['step']}{of}  loss {loss}  "
            f"{record['samples_per_s']:.0f} samples/s  "
            f"{100 * record['communication']:.0f} % in communication"
        )

    def _clear(self) -> None:
        if self._live and self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            self._width = 0


def _numbers(evaluation: dict[str, float]) -> str:
    """A metric may have any name, and be no number."""
    return escape("  ".join(f"{name} {value:.4f}" for name, value in evaluation.items()))


def resized(event: dict[str, Any]) -> str:
    """How a run got another size, in a sentence."""
    moved = f", {event['bytes'] / 1e6:.3g} MB moved" if event["bytes"] else ""
    what = f"resized at step {event['step']}: {event['change']}{moved}, in {event['ms']:.0f} ms"
    return f"{what}. {event['lost']}" if event["lost"] else what


def _who(record: dict[str, Any]) -> str:
    return f"server {record['server']}" if "server" in record else f"rank {record['rank']}"


def _going_on(record: dict[str, Any]) -> str:
    told = f"going on from step {record['step']}, saved under {record['plan'] or 'data=1'}"
    if record["pieces"] != record["pieces_now"]:
        told += (
            f"; the batch is cut into {record['pieces_now']} pieces from here on, "
            f"not {record['pieces']}"
        )
    return told


def _beginning(record: dict[str, Any]) -> str:
    store = escape(record["store"])
    if record["num_bad"]:
        bad = f"[bold yellow]no checkpoint in {store} is good[/]"
        return f"{bad}: the run begins anew at step {record['step']}"
    return f"nothing to go on from in {store}: the run begins at step {record['step']}"


def _emptied(record: dict[str, Any]) -> str:
    return (
        f"[bold yellow]step {record['step']} changes nothing[/]: quarantine left out all "
        f"{record['left_out']} samples of its batch. More such steps are told in events.jsonl alone"
    )


def _waiting(record: dict[str, Any]) -> str:
    return (
        f"[bold yellow]rank {record['rank']} waits for data since {record['seconds']} s[/], after "
        f"step {record['step']}: {escape(record['samples'])}"
    )


def _standstill(record: dict[str, Any]) -> str:
    return (
        f"[bold yellow]nothing was done for {record['seconds']} s[/] after step {record['step']}, "
        "and no rank says what takes so long: they may wait for each other. Where each stands is "
        "at the end of its log; Ctrl-C ends the run"
    )


def _busy(record: dict[str, Any]) -> str:
    after = "" if "server" in record else f", after step {record['step']}"
    return (
        f"[bold yellow]{_who(record)} has been busy for {record['seconds']} s[/]{after}: "
        f"{escape(record['at'])}; its log has the stack"
    )


def _slow(record: dict[str, Any]) -> str:
    return (
        f"[bold yellow]the others wait, after step {record['step']}[/]: {_times(record['slow'])}; "
        f"{escape(record['advice'])}"
    )


def _repaired(record: dict[str, Any]) -> str:
    ranks = ", ".join(map(str, record["ranks"]))
    more = record["count"] - len(record["tensors"])
    names = ", ".join(record["tensors"]) + (f" and {more} more" if more else "")
    return (
        f"[bold yellow]rank {ranks} differed from the other replicas after step {record['step']}"
        f"[/], in {escape(names)}, and took their state; look at its memory"
    )


def _times(slow: dict[str, float]) -> str:
    return ", ".join(f"replica {r} takes {times}x as long" for r, times in slow.items())


def _balanced(record: dict[str, Any]) -> str:
    slow = _times(record["slow"])
    return (
        f"[bold]work moved after step {record['step']}[/]: {slow or 'speeds have changed'}; of "
        f"each batch the replicas take {', '.join(map(str, record['rounds']))} parts"
    )


# What is said of an event, whatever else there was.
_SAID = {
    "begun": _beginning,
    "balanced": _balanced,
    "slow": _slow,
    "waiting": _waiting,
    "busy": _busy,
    "replica-repaired": _repaired,
    "standstill": _standstill,
}
