"""How a run ended, in words for people and as one JSON object for scripts."""

import math
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cli.output import say, tell
from shoal.errors import UsageError
from shoal.formatting import in_seconds, in_units, plural
from shoal.launch.outcome import advice, how_it_ended

if TYPE_CHECKING:
    from shoal.launch.outcome import Outcome, Summary


def print_outcome(outcome: "Outcome", *, as_json: bool) -> int:
    """Say how a run ended, the first failure last; its exit code."""
    if outcome.is_finished:
        tell(_in_words(outcome))
        if problem := how_it_ended(outcome):
            say(f"shoal: {problem}", is_error=True)
    else:
        if outcome.trace:
            tell(outcome.trace)
        say(f"shoal: {how_it_ended(outcome)}", is_error=True)
    if as_json:
        _print_summary(outcome.summary)
    return outcome.exit_code


def _in_words(outcome: "Outcome") -> str:
    result, times = outcome.summary, outcome.times
    if not outcome.trained:
        if result.steps < outcome.num_steps:
            return f"The training had ended early already, after step {result.steps}."
        return f"All {outcome.num_steps} steps were done already. Ask for more with --set steps=N."
    total = sum(times.values()) or 1.0
    shares = "  ".join(f"{name} {100 * t / total:.0f} %" for name, t in times.items())
    lines = [
        f"done: {result.steps} steps, {_samples(result)}, loss {_loss(result)}, "
        f"{result.samples_per_s:.0f} samples/s",
    ]
    if result.recoveries:
        again = result.steps_again
        told = f"{again} steps were done again" if again else "no step was done again"
        lost = "ranks and servers" if outcome.num_servers else "ranks"
        lines.append(f"lost {lost} replaced: {result.recoveries}; {told}")
    if result.evaluation:
        told = "  ".join(f"{name} {value:.4f}" for name, value in result.evaluation.items())
        lines.append(f"evaluation: {told}")
    lines += [
        f"time of rank 0: {shares}",
        *filter(None, [advice(outcome)]),
        f"sent {result.bytes_sent / 1e6:.1f} MB, peak memory "
        f"{(result.peak_memory_bytes or 0) / 1e6:.0f} MB a rank",
        *_predicted_in_words(result),
    ]
    if seen := result.staleness:
        mean, largest = f"{seen['mean']:.2f}", plural(seen["largest"], "batch", "batches")
        lines.append(f"staleness: {mean} on the mean, {largest} at the most")
    if result.rounds:
        lines.append(_rounds_in_words(result.rounds))
    lines.append(f"model: {result.model or _why_no_model(outcome)}")
    return "\n".join(lines)


def _predicted_in_words(result: "Summary") -> list[str]:
    """What was predicted beside what was measured, in a line."""
    found, measured = result.predicted or {}, result.measured
    told = []
    for name, words in (("step_s", in_seconds), ("memory_bytes", in_units)):
        before, after = found.get(name), measured.get(name)
        if isinstance(before, int | float) and after:
            what = "a step" if name == "step_s" else "a rank"
            told.append(f"{words(before)} {what}, was {words(after)} ({after / before - 1:+.0%})")
    how = f"predicted, from its {found.get('from')}: "
    return [how + "; ".join(told)] if told else []


def _samples(result: "Summary") -> str:
    if result.samples is None:
        return "metrics.jsonl is not whole and does not tell of how many samples"
    out = result.quarantined
    return f"{result.samples} samples" + (f" ({out} more left out by quarantine)" if out else "")


def _loss(result: "Summary") -> str:
    is_none = result.loss is None or math.isnan(result.loss)
    return "none in the last step" if is_none else f"{result.loss:.4f}"


def _why_no_model(outcome: "Outcome") -> str:
    is_held = outcome.summary.checkpoint == outcome.steps
    held = ". The checkpoint holds it: export it" if is_held else ""
    return f"model.safetensors was not written: {outcome.model_problem.rstrip('.')}{held}"


def _print_summary(result: "Summary") -> None:
    try:
        print(msgspec.json.encode(result).decode(), flush=True)
    except OSError as error:
        raise UsageError(f"The result could not be written to standard output: {error}.") from error


def _rounds_in_words(rounds: dict[str, Any]) -> str:
    late = [
        f"replica {number} {plural(times, 'time', 'times')}"
        for number, times in enumerate(rounds["late"])
        if times
    ]
    who = f"; late: {', '.join(late)}" if late else ""
    return f"rounds: {rounds['early']} of {rounds['closed']} closed early{who}"
