"""`shoal checkpoint`: the group of its commands, and list, show and verify. None needs torch."""

import time
from fnmatch import fnmatchcase
from typing import Any

import click
import msgspec

from shoal.checkpoint.find import FoundCheckpoints, find_checkpoints, open_newest
from shoal.checkpoint.manifest import Origin, Progress, TensorEntry
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.cli import options
from shoal.cli.checkpoint_convert import convert
from shoal.cli.checkpoint_diff import diff
from shoal.cli.checkpoint_export import export, import_
from shoal.cli.checkpoint_prune import prune
from shoal.cli.output import as_json, in_json, print_json, say
from shoal.errors import BadCheckpoint, UsageError, nearest
from shoal.formatting import in_units, table
from shoal.world import cores


@click.group(short_help="List, check and compare checkpoints.")
def checkpoint() -> None:
    """List, check, compare and convert checkpoints, and remove those no longer needed.

    \b
    shoal checkpoint list runs/charlm-small-1
    shoal checkpoint show runs/charlm-small-1/checkpoints/step-00000300 --tensors "model.*"
    shoal checkpoint verify runs/charlm-small-1
    shoal checkpoint diff a/checkpoints/step-00000300 b/checkpoints/step-00000300
    shoal checkpoint prune runs/charlm-small-1 --keep "last=3 every=1000 best=loss" --dry-run
    shoal checkpoint convert runs/charlm-small-1 s3://bucket/archive/charlm
    shoal checkpoint export runs/charlm-small-1 model.safetensors --to safetensors

    PATH is a run directory, its directory of checkpoints, or one checkpoint; each may be a URL,
    such as s3://bucket/prefix. Exit codes: 0 done, 1 a checkpoint is bad (verify, prune) or two
    differ (diff), 2 usage or input.
    """
    options.refuse_unusable_process()


class Row(msgspec.Struct, frozen=True):
    """A checkpoint in a list; `problem` says why it is none, and then nothing else is known."""

    name: str
    step: int | None = None
    samples: int | None = None
    plan: str | None = None
    bytes: int | None = None
    metrics: dict[str, float] = {}
    seal: str | None = None
    problem: str | None = None
    tags: list[str] = []  # that callbacks gave it


@checkpoint.command("list")
@click.argument("path")
@as_json
def list_(path: str, as_json: bool) -> None:
    """List the checkpoints in PATH: how far each is, its plan, size and metrics.

    Looks at seals, names and lengths, not at every byte: that is what verify is for.
    """
    found = find_checkpoints(path)
    rows = [_row(found, name) for name in found.names]
    if as_json:
        print_json({"directory": str(found.store), "checkpoints": rows})
        return
    cells = [
        (row.name, "", "", "", "", "", row.problem)
        if row.problem is not None
        else (
            row.name,
            str(row.step),
            str(row.samples),
            row.plan or "data=1",
            in_units(row.bytes or 0),
            "  ".join([*row.tags, *(f"{name} {value:.4g}" for name, value in row.metrics.items())]),
            "sealed",
        )
        for row in rows
    ]
    head = ("name", "step", "samples", "plan", "bytes", "metrics", "state")
    say(table([head, *cells], numbers=[1, 2, 4]))


def _row(found: FoundCheckpoints, name: str) -> Row:
    try:
        sealed = VerifiedCheckpoint(found.store, name)
    except BadCheckpoint as bad:
        return Row(name, problem=str(bad))
    progress, origin = sealed.manifest.progress, sealed.manifest.origin
    return Row(
        name,
        progress.step,
        progress.samples,
        origin.plan,
        sealed.num_bytes,
        progress.metrics,
        sealed.seal,
        tags=progress.tags,
    )


class TensorRow(msgspec.Struct, frozen=True):
    """A tensor as `show` tells of it."""

    name: str
    type: str
    shape: tuple[int, ...]
    bytes: int
    chunks: int


class ShownCheckpoint(msgspec.Struct, frozen=True):
    """What `show` tells."""

    name: str
    seal: str
    bytes: int
    files: int
    progress: Progress
    origin: Origin
    plain: dict[str, Any]
    tensors: list[TensorRow]


@checkpoint.command()
@click.argument("path", metavar="CHECKPOINT")
@click.option(
    "--tensors",
    "pattern",
    metavar="PATTERN",
    help='Show only tensors whose names match, as in "optimizer.*.exp_avg".',
)
@as_json
def show(path: str, pattern: str | None, as_json: bool) -> None:
    """Show what CHECKPOINT holds: progress, origin, and every tensor.

    Of a directory with several, the newest that is sealed and whole in length.
    """
    sealed, *_, told = open_newest(VerifiedCheckpoint, path)
    if told:
        say(told, is_error=True)
    rows = [
        _tensor_row(sealed.tensor(name))
        for name in sealed
        if pattern is None or fnmatchcase(name, pattern)
    ]
    if pattern is not None and not rows:
        raise UsageError(
            f"No tensor of {sealed.name} matches {pattern!r}. {nearest(pattern, sealed)}"
        )
    manifest = sealed.manifest
    shown = ShownCheckpoint(
        sealed.name,
        sealed.seal,
        sealed.num_bytes,
        len(manifest.files),
        manifest.progress,
        manifest.origin,
        manifest.plain,
        rows,
    )
    if as_json:
        print_json(shown)
        return
    say(f"{shown.name}: {in_units(shown.bytes)} in {shown.files} files, seal {shown.seal}")
    for part in ("progress", "origin"):
        entries = msgspec.to_builtins(getattr(shown, part))
        say(f"\n{part}\n" + "\n".join(_entry(*entry) for entry in entries.items()))
    cells = [(r.name, r.type, str(list(r.shape)), in_units(r.bytes), str(r.chunks)) for r in rows]
    head = ("tensor", "type", "shape", "bytes", "chunks")
    say("\n" + table([head, *cells], numbers=[3, 4]))
    say(f"{len(rows)} tensors, {in_units(sum(row.bytes for row in rows))}.")


def _tensor_row(tensor: TensorEntry) -> TensorRow:
    size = sum(map(tensor.num_bytes, tensor.chunks))
    return TensorRow(tensor.name, tensor.dtype, tensor.shape, size, len(tensor.chunks))


def _entry(name: str, value: Any) -> str:
    return f"  {name:<12}  {value if isinstance(value, str) else in_json(value)}"


@checkpoint.command()
@click.argument("path")
def verify(path: str) -> None:
    """Look at every byte of every checkpoint in PATH.

    Prints a line for each: ok and how fast, or the file and what is wrong with it. Ends with exit
    code 1 if one is bad.
    """
    found = find_checkpoints(path)
    problems = [problem for name in found.names if (problem := _verify(found, name))]
    if problems:
        say(f"{len(problems)} of {len(found.names)} checkpoints are bad.", is_error=True)
        raise SystemExit(1)


def _verify(found: FoundCheckpoints, name: str) -> str:
    """Print whether it is good; returns the first thing that is wrong with it."""
    started = time.monotonic()
    try:
        sealed = VerifiedCheckpoint(found.store, name)
        faults = list(sealed.faults(cores()))
    except BadCheckpoint as bad:
        faults = [str(bad)]
    if not faults:
        seconds = max(time.monotonic() - started, 1e-9)
        rate = sealed.num_bytes / seconds / 1e9
        say(f"ok   {name}  {in_units(sealed.num_bytes)}, {rate:.2g} GB/s")
        return ""
    for fault in faults:
        say(f"bad  {name}  {fault}")
    return faults[0]


for command in (diff, prune, convert, export, import_):
    checkpoint.add_command(command)
