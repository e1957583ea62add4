"""How a run ended, in words for people and as one JSON object for scripts."""

import math
from pathlib import Path
from typing import Any

import msgspec

from shoal.cli.output import say, tell
from shoal.errors import RUN_AGAIN, UsageError
from shoal.formatting import plural


def report(outcome: Any, facts: dict[str, Any], run_dir: Path, *, as_json: bool) -> int:
    """Say how a run ended; the first failure comes last on screen."""
<<<<<<< HEAD
    from shoal.events.scribe import last_step, samples_on_record
=======
    from shoal.metrics.scribe import last_step, loss_on_record, samples_on_record
>>>>>>> 11604db (report: tell the loss of a last step that an earlier command made)

    own = outcome.summaries.get(0, {})
    lost = _not_saved(outcome, facts, own)
    record = facts.get("record", run_dir) / "metrics.jsonl"
    num_samples, num_left_out = samples_on_record(record)
    is_whole = last_step(record) >= outcome.step  # or the disk was full
    problem = lost or _nothing_trained(outcome, num_samples, num_left_out) or facts.get("moved", "")
    code = int(outcome.exit_code) or (1 if problem else 0)
    if code == RUN_AGAIN and facts.get("moved", ""):
        code = 1  # the same command would not find it
    model = run_dir / "model.safetensors"
    result = {
        "steps": outcome.step,
        "samples": num_samples if is_whole else None,
        "quarantined": num_left_out,
        # An earlier command may have made the last step.
        "loss": own["loss"] if own.get("steps") else loss_on_record(record, outcome.step),
        "evaluation": own.get("evaluation"),
        "samples_per_s": own.get("samples_per_s"),
        "bytes_sent": sum(s["bytes_sent"] for s in outcome.summaries.values()),
        "peak_memory_bytes": max(
            (s["peak_memory_bytes"] for s in outcome.summaries.values()), default=None
        ),
        "checkpoint": own.get("checkpoint"),
        "not_saved": lost or None,
        "rescued": facts.get("rescued") or None,
        "model": str(model) if model.exists() and not facts["model_problem"] else None,
        "recoveries": outcome.num_recoveries,
        "staleness": _staleness(outcome),
        "rounds": _rounds(outcome),
        "steps_again": outcome.num_steps_again,
        "plan": outcome.plan or facts["plan"],
        "run_dir": str(run_dir),
        "exit_code": code,
    }
    if outcome.exit_code == 0:
        tell(_in_words(result, own, facts))
        if problem:
            say(f"shoal: {problem}", is_error=True)
    else:
        if outcome.trace:
            tell(outcome.trace)
        say(_why_it_ended(outcome, run_dir, facts), is_error=True)
        if facts.get("moved", ""):
            say(f"shoal: {facts['moved']}", is_error=True)
    if as_json:
        _print_result(result)
    return code


def _rounds(outcome: Any) -> dict[str, Any] | None:
    """Of a run whose rounds close at a deadline, what was told last."""
    told = [s["rounds"] for s in outcome.summaries.values() if s.get("rounds")]
    return max(told, key=lambda one: one["closed"], default=None)


def _staleness(outcome: Any) -> dict[str, Any] | None:
    """What the ranks saw of it, together; None where they agree on every step."""
    from shoal.sync.server.clock import Staleness

    seen = [s["staleness"] for s in outcome.summaries.values() if s.get("staleness")]
    if not seen:
        return None
    together = Staleness()
    for one in seen:
        together.merge(Staleness(one["histogram"]))
    return together.summary()


def _not_saved(outcome: Any, facts: dict[str, Any], own: dict[str, Any]) -> str:
    """Why a run that got to its end has no checkpoint of it; empty if it has, or never would."""
    if outcome.exit_code or facts["unholdable"] or own.get("checkpoint") == outcome.step:
        return ""
    told = facts["unsaved"].get(outcome.step, ["nobody said why"])
    reasons = dict.fromkeys(why.rstrip(".") for why in told)
    kept = _rescued(facts) or (
        "Mend that, and go on from the checkpoint before it (--resume), if there is one."
    )
    return f"Step {outcome.step}, the last, could not be saved: {'; '.join(reasons)}. {kept}"


def _rescued(facts: dict[str, Any]) -> str:
    """Where the last step is, if not where it should be; empty if nowhere."""
    if not facts.get("rescued"):
        return ""
    return (
        f"It is in {facts['rescued']} instead. Put it among the run's checkpoints once they can be "
        "written, or go on with --resume and --checkpoints, given the directory that it lies in."
    )


def _nothing_trained(outcome: Any, num_samples: int, num_left_out: int) -> str:
    """What is wrong with a run that got to its end on no sample at all; empty if it had some."""
    if outcome.exit_code or num_samples or not num_left_out:
        return ""
    return (
        f"Quarantine left out all {num_left_out} samples, so nothing was trained. Its file says "
        "why each of them failed; mend that, and begin anew."
    )


def _in_words(result: dict[str, Any], own: dict[str, Any], facts: dict[str, Any]) -> str:
    times = own["times"]
    total = sum(times.values()) or 1.0
    shares = "  ".join(f"{name} {100 * t / total:.0f} %" for name, t in times.items())
    if not own["steps"]:
        return f"All {facts['num_steps']} steps were done already. Ask for more with --set steps=N."
    lines = [
        f"done: {result['steps']} steps, {_samples(result)}, loss {_loss(result)}, "
        f"{result['samples_per_s']:.0f} samples/s",
    ]
    if result["evaluation"]:
        told = "  ".join(f"{name} {value:.4f}" for name, value in result["evaluation"].items())
        lines.append(f"evaluation: {told}")
    lines += [
        f"time of rank 0: {shares}",
        f"sent {result['bytes_sent'] / 1e6:.1f} MB, peak memory "
        f"{result['peak_memory_bytes'] / 1e6:.0f} MB a rank",
        f"model: {result['model'] or _why_no_model(result, facts)}",
    ]
    if seen := result["staleness"]:
        mean, largest = f"{seen['mean']:.2f}", plural(seen["largest"], "batch", "batches")
        lines.insert(-1, f"staleness: {mean} on the mean, {largest} at the most")
    if told := result["rounds"]:
        lines.insert(-1, _rounds_in_words(told))
    if result["recoveries"]:
        again = result["steps_again"]
        told = f"{again} steps were done again" if again else "no step was done again"
        lost = "ranks and servers" if facts["num_servers"] else "ranks"
        lines.insert(1, f"lost {lost} replaced: {result['recoveries']}; {told}")
    return "\n".join(lines)


def _samples(result: dict[str, Any]) -> str:
    if result["samples"] is None:
        return "metrics.jsonl is not whole and does not tell of how many samples"
    out = result["quarantined"]
    return f"{result['samples']} samples" + (f" ({out} more left out by quarantine)" if out else "")


def _loss(result: dict[str, Any]) -> str:
    return "none in the last step" if math.isnan(result["loss"]) else f"{result['loss']:.4f}"


def _why_no_model(result: dict[str, Any], facts: dict[str, Any]) -> str:
    held = "" if result["checkpoint"] != result["steps"] else ". The checkpoint holds it: export it"
    return f"model.safetensors was not written: {facts['model_problem'].rstrip('.')}{held}"


def _why_it_ended(outcome: Any, run_dir: Path, facts: dict[str, Any]) -> str:
    saved_step = facts["saved_step"]
    if outcome.stopped_by and not outcome.cause:
        saved = f"It is saved; go on with the same command and --resume --run-dir {run_dir}."
        if outcome.exit_code != RUN_AGAIN:
            told = facts["unsaved"].get(outcome.step, [])
            why = f": {told[0].rstrip('.')}" if told else ""
            saved = f"It could not be saved{why}. {_rescued(facts)}".rstrip()
            saved += f" Its record is in {run_dir}."
        return f"shoal: stopped after step {outcome.step}, as asked. {saved}"
    newest = ""
    if saved_step is not None:
        again = f"the same command with --resume --run-dir {run_dir}"
        newest = f" The newest checkpoint is of step {saved_step}: {again} goes on from it."
    return f"shoal: {outcome.cause.rstrip('.')}. Logs are in {run_dir / 'logs'}.{newest}"


def _print_result(result: dict[str, Any]) -> None:
    try:
        print(msgspec.json.encode(result).decode(), flush=True)
    except OSError as error:
        raise UsageError(f"The result could not be written to standard output: {error}.") from error


def _rounds_in_words(rounds: dict[str, Any]) -> str:
    late = [
        f"rank {rank} {plural(times, 'time', 'times')}"
        for rank, times in enumerate(rounds["late"])
        if times
    ]
    who = f"; late: {', '.join(late)}" if late else ""
    return f"rounds: {rounds['early']} of {rounds['closed']} closed early{who}"
