"""`shoal data`: the group of its commands, and build, show and verify for shards."""

import hashlib
import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from shoal.cli import options
from shoal.cli.audit import audit
from shoal.cli.output import as_json, in_json, print_json, say, tell_failure
from shoal.data.shard_files.format import (
    COMPRESSIONS,
    BadShards,
    Index,
    Leaf,
    NoShards,
    RowLayout,
    shard_name,
)
from shoal.data.shard_files.locations import ShardLocation, open_location, read_index
from shoal.errors import RecipeError, ShoalError, UsageError
from shoal.formatting import in_units
from shoal.storage.object_client import redact_url
from shoal.world import cores

TOLD_EVERY_S = 5.0
# The ends of file names, called like the readers for them in `shoal.data`.
KINDS = (".csv", ".jsonl", ".parquet", ".tar")


@click.group(short_help="Build, show and check data.")
def data() -> None:
    """Build shards from any source, show what a set of shards holds, and check every byte of it;
    check which samples a run was trained on.

    \b
    shoal data build digits.py:train data/digits
    shoal data build photos/ s3://bucket/photos --compress zstd --workers 2
    shoal data show data/digits
    shoal data verify data/digits
    shoal data sync data/digits s3://bucket/digits
    shoal data audit runs/digits-1
    shoal data audit runs/text-1 --recipe text.py:train

    PATH and OUT are directories or URLs. Exit codes: 0 done, 1 a set is bad (verify) or a sample
    could not be loaded (build), 2 usage or input.
    """
    options.refuse_unusable_process()


data.add_command(audit)


@data.command()
@click.argument("source")
@click.argument("target")
@click.option("--force", is_flag=True, help="Replace a set of another content in TARGET.")
@as_json
def sync(source: str, target: str, force: bool, as_json: bool) -> None:
    """Let TARGET hold the set that SOURCE holds, byte for byte.

    \b
    shoal data sync data/digits s3://bucket/digits
    shoal data sync "mirror://[/a/digits,s3://b/digits]" s3://b/digits

    Each is a directory, a URL, or a mirror of several. Every byte is hashed on the way. A TARGET
    that has the set whole is left as it is; one that was away is caught up; a copy that was cut
    short goes on when it is started again. Exit codes: 0 done, 2 usage or input.
    """
    from shoal.data.shard_files.syncing import sync as sync_set
    from shoal.logs import written_to

    with written_to(sys.stderr):
        done = sync_set(source, target, force=force)
    shown = redact_url(target)
    if as_json:
        print_json(
            {"path": shown, "shards": done.num_shards, "bytes": done.num_bytes}
            | {"seal": done.contents.digest}
        )
    elif done.num_shards:
        say(f"{shown}: {done.num_shards} shards copied, {in_units(done.num_bytes)}.")
    else:
        say(f"{shown} holds the set already, every byte of it.")


@data.command()
@click.argument("source")
@click.argument("out")
@click.option(
    "--shard-mib",
    type=click.IntRange(min=1),
    default=64,
    show_default=True,
    help="Size of a shard before compression, in MiB.",
)
@click.option(
    "--compress", type=click.Choice(COMPRESSIONS), help="Compress blocks. Default: as they are."
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that load samples. The result is the same with any number.",
)
@click.option(
    "--force",
    is_flag=True,
    help="Replace the set that is in OUT already: in a directory when the new one is whole, at a "
    "URL when the build begins.",
)
@as_json
def build(
    source: str,
    out: str,
    shard_mib: int,
    compress: str | None,
    workers: int,
    force: bool,
    as_json: bool,
) -> None:
    """Write the samples of SOURCE as a set of shards in OUT.

    SOURCE is file.py:function or module:function, where the function returns a source or a Run,
    whose data is taken; or files: *.csv, *.jsonl, *.parquet, *.tar, or a folder of images. OUT
    appears when it is whole. A build that was interrupted goes on when it is started again.
    """
    from shoal.data.shard_files.writing import build as build_shards
    from shoal.data.stalls import report_stalls
    from shoal.logs import written_to

    with written_to(sys.stderr), report_stalls(_tell_of_wait):
        found, identity = _source(source)
        told = _Told(len(found))
        index = build_shards(
            found,
            out,
            shard_bytes=shard_mib << 20,
            compress=compress,
            workers=workers,
            force=force,
            identity=identity,
            progress=told,
        )
    shown = _shown(open_location(out), index)
    if as_json:
        print_json(shown)
    else:
        say(_summary(shown))


class ShownShards(msgspec.Struct, frozen=True):
    """What `show` tells of a set."""

    path: str
    samples: int
    bytes: int
    shards: int
    layout: str
    row_bytes: int | None
    leaves: list[str]
    compression: str | None
    seal: str
    origin: dict[str, str]
    sample: str | None = None


@data.command()
@click.argument("path")
@click.option("--sample", type=int, default=0, show_default=True, help="The sample to show.")
@as_json
def show(path: str, sample: int, as_json: bool) -> None:
    """Show what the set in PATH holds: samples, bytes, layout, shapes, and one sample.

    If that sample cannot be read, the rest is shown, and the exit code is 1.
    """
    from shoal.data.shard_files.reading import open_set

    opened = open_set(path, strict=False)
    value: str | None = None
    lost: ShoalError | None = None
    try:
        value = _words(opened[sample])
    except IndexError:
        raise UsageError(
            f"--sample {sample}: {path} has {len(opened)} samples, counted from 0."
        ) from None
    except ShoalError as error:
        lost = error
    shown = _shown(opened.place, opened.index, value)
    if as_json:
        print_json(shown, 0 if lost is None else lost.exit_code)
    else:
        say(_summary(shown))
        for name, text in shown.origin.items():
            say(f"  {name:<8}  {text}")
    if lost is not None:
        raise SystemExit(tell_failure(lost))
    if not as_json:
        say(f"sample {sample}\n  {value}")


@data.command()
@click.argument("path")
def verify(path: str) -> None:
    """Look at every byte of the set in PATH.

    Prints `ok` and how fast, or a line for each thing that is wrong, with the shard, the bytes and
    the samples. Ends with exit code 1 if there is one.
    """
    place = open_location(path)
    started = time.monotonic()
    find_faults, num_bytes = _faults(place)
    if not find_faults:
        seconds = max(time.monotonic() - started, 1e-9)
        say(f"ok   {place}  {in_units(num_bytes)}, {in_units(num_bytes / seconds)}/s")
        return
    for fault in find_faults:
        say(f"bad  {place}  {fault}")
    raise SystemExit(1)


def _faults(place: ShardLocation) -> tuple[list[str], int]:
    from shoal.data.shard_files.verifying import find_faults

    try:
        index = read_index(place)
    except NoShards:
        raise
    except BadShards as bad:
        return [str(bad).removeprefix(f"{place}: ")], 0
    return list(find_faults(place, index, cores())), sum(map(index.num_bytes, index.shards))


def _source(text: str) -> tuple[Any, str]:
    """The source that the command names, and a text that changes when its code does."""
    kind = _kind(text)
    if kind is not None:
        try:
            reader = getattr(importlib.import_module("shoal.data"), kind)
            return reader(text.rstrip("/") if kind == "images" else text), redact_url(text)
        except OSError as error:
            if isinstance(error, ShoalError):
                raise
            raise UsageError(f"{redact_url(text)} cannot be read: {error.strerror}.") from error
    from shoal.data.sources import as_source
    from shoal.training.recipe import find_recipe
    from shoal.training.run import Run

    function = find_recipe(text)
    try:
        made = function()
    except ShoalError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{text} failed: {what}") from error
    found = as_source(made.data if isinstance(made, Run) else made)
    return found, f"{text} {_code_hash(text)}".strip()


def _kind(text: str) -> str | None:
    """The reader for a path or URL; None for a function."""
    suffix = Path(text).suffix.lower()
    if suffix in KINDS:
        return suffix[1:]
    if Path(text).is_dir() or ("://" in text and text.endswith("/")):
        return "images"
    is_function = ":" in text and "://" not in text
    if not is_function:
        raise UsageError(
            f"{redact_url(text)!r} is no source. Give file.py:function, a file that ends in "
            f"{', '.join(KINDS)}, or a folder of images (a URL of one ends in /)."
        )
    return None


def _code_hash(spec: str) -> str:
    file = Path(spec.rpartition(":")[0])
    if file.suffix != ".py":
        return ""
    return f"sha256 {hashlib.sha256(file.read_bytes()).hexdigest()}"


def _tell_of_wait(late: Any) -> None:
    """In a thread: the one that waits may hang where nothing reaches it, so it cannot end itself.

    What the build has finished stays, as after a kill, and workers die with this process.
    """
    if not late.is_lost:
        say(f"waiting for data since {late.seconds:.0f} s: {late.samples}", is_error=True)
        return
    say(f"shoal: {late}", is_error=True)
    sys.stderr.flush()
    os._exit(ShoalError.exit_code)


class _Told:
    """Progress on standard error: one live line, or a line now and then without a terminal."""

    def __init__(self, num_samples: int):
        self._num_samples, self._told_at = num_samples, time.monotonic()
        self._live = sys.stderr.isatty()

    def __call__(self, num_samples: int, num_bytes: int) -> None:
        line = f"{num_samples} of {self._num_samples} samples, {in_units(num_bytes)}"
        is_done = num_samples >= self._num_samples
        if self._live:
            sys.stderr.write(f"\r{line:<60}" + "\r" * is_done)
            sys.stderr.flush()
        elif time.monotonic() - self._told_at > TOLD_EVERY_S:
            self._told_at = time.monotonic()
            sys.stderr.write(line + "\n")


def _shown(place: ShardLocation, index: Index, sample: str | None = None) -> ShownShards:
    rows = index.layout if isinstance(index.layout, RowLayout) else None
    return ShownShards(
        path=str(place),
        samples=index.num_samples,
        bytes=sum(map(index.num_bytes, index.shards)),
        shards=len(index.shards),
        layout="packed" if rows is None else "rows",
        row_bytes=None if rows is None else rows.row_bytes,
        leaves=[] if rows is None else _leaves(rows.tree, rows.leaves),
        compression=index.compression,
        seal=index.digest,
        origin=index.origin,
        sample=sample,
    )


def _leaves(tree: Any, leaves: tuple[Leaf, ...], at: str = "sample") -> list[str]:
    """A line for each leaf: where it stands in a sample, its type and shape."""
    if isinstance(tree, int):
        leaf = leaves[tree]
        shape = f" {list(leaf.shape)}" if leaf.kind in ("tensor", "array") else ""
        return [f"{at}: {leaf.kind} of {leaf.dtype}{shape}"]
    ((kind, parts),) = tree.items()
    pairs = parts if kind == "dict" else enumerate(parts)
    return [line for key, part in pairs for line in _leaves(part, leaves, f"{at}[{key!r}]")]


def _summary(shown: ShownShards) -> str:
    packing = "each packed by itself"
    if shown.row_bytes is not None:
        packing = f"in rows of {shown.row_bytes} bytes"
    last = shard_name(shown.shards - 1)
    lines = [
        f"{shown.path}: {shown.samples} samples {packing}, {in_units(shown.bytes)} in "
        f"{shown.shards} shards (to {last}), compression {shown.compression or 'none'}",
        f"  seal      {shown.seal}",
        *(f"  {line}" for line in shown.leaves),
    ]
    return "\n".join(lines)


def _words(value: Any) -> str:
    """A sample in a line: shapes, and the first numbers."""
    if hasattr(value, "dtype"):
        flat = value.reshape(-1)
        first = ", ".join(map(_number, flat[:6].tolist()))
        more = ", ..." if len(flat) > 6 else ""
        return f"{value.dtype} {list(value.shape)} [{first}{more}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_words(part)}" for key, part in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(map(_words, value)) + ")"
    text = repr(value) if isinstance(value, bytes) else in_json(value)
    return text if len(text) <= 80 else f"{text[:77]}... ({len(value)} long)"


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
