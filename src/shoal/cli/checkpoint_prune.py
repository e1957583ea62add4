"""`shoal checkpoint prune`: remove what no rule keeps, and never the last good one."""

import sys
from typing import NamedTuple

import click

from shoal.checkpoint.find import FoundCheckpoints, find_checkpoints
from shoal.checkpoint.retention import CheckpointSummary, RetentionPolicy, find_expired
from shoal.checkpoint.verify import VerifiedCheckpoint, inspect_checkpoints
from shoal.cli.output import say
from shoal.errors import BadCheckpoint, UsageError
from shoal.world import cores


class _Sorted(NamedTuple):
    """What becomes of the checkpoints of a run: which stay, which go, which cannot be judged."""

    stay: list[CheckpointSummary]
    go: list[CheckpointSummary]
    bad: dict[str, str]


@click.command()
@click.argument("path", metavar="RUN_DIR")
@click.option(
    "--keep",
    "rule",
    required=True,
    metavar="RULE",
    help='What stays, as in "last=3 every=1000 best=loss" or "best=accuracy:max".',
)
@click.option("--yes", is_flag=True, help="Remove without asking.")
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
def prune(path: str, rule: str, yes: bool, dry_run: bool) -> None:
    """Remove the checkpoints of RUN_DIR, or at a URL, that no rule keeps.

    \b
    last=N            the newest N; default 2
    every=K           the first at or after each K steps
    best=METRIC[:max] the one with the smallest, or the largest, METRIC

    The newest good one always stays: before anything is removed, every byte of it is verified. Bad
    ones are neither counted nor removed.
    """
    if yes and dry_run:
        raise UsageError("--yes and --dry-run contradict each other. Give one of them.")
    keep, found = RetentionPolicy.parse(rule), find_checkpoints(path)
    chosen = _sort_out(found, keep)
    for name, problem in chosen.bad.items():
        say(f"bad   {name}  {problem}")
    for verb, some in (("stays", chosen.stay), ("goes ", chosen.go)):
        for one in some:
            say(f"{verb} {one.name}")
    if not chosen.stay:
        say("No checkpoint is good, so nothing was removed.", is_error=True)
        raise SystemExit(1)
    if dry_run or not chosen.go:
        say(f"{len(chosen.go)} would be removed." if dry_run else "Nothing to remove.")
        return
    if not yes and not sys.stdin.isatty():
        raise UsageError(
            "There is no terminal to ask on, so nothing was removed. Add --yes, or --dry-run."
        )
    if not yes and not click.confirm(f"Remove {len(chosen.go)}?", default=False):
        say("Nothing was removed.")
        return
    for one in chosen.go:
        _remove(found, one.name)
    say(f"{len(chosen.go)} removed, {len(chosen.stay)} stay.")


def _sort_out(found: FoundCheckpoints, keep: RetentionPolicy) -> _Sorted:
    known, bad = inspect_checkpoints(found.store, found.names)
    if known:
        metrics = {metric for one in known for metric in one.metrics}
        keep.refuse_unknown(metrics, "no checkpoint has such a metric")
    while known:
        newest = max(known, key=lambda one: (one.step, one.name))
        try:
            VerifiedCheckpoint(found.store, newest.name).verify(cores())
        except BadCheckpoint as problem:
            known.remove(newest)
            bad[newest.name] = str(problem)
            continue
        break
    go = find_expired(known, keep)
    return _Sorted([one for one in known if one not in go], go, bad)


def _remove(found: FoundCheckpoints, name: str) -> None:
    try:
        found.store.remove(name)
    except FileNotFoundError:
        pass  # the run itself was quicker
    except OSError as error:
        raise UsageError(f"{found.place(name)} cannot be removed: {error.strerror}.") from error
