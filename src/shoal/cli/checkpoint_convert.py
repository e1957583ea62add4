"""`shoal checkpoint convert`: write a checkpoint again at another place."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import TypeVar

import click

from shoal.checkpoint.commit import CheckpointTarget, new_target, open_draft
from shoal.checkpoint.convert import copy_checkpoint, reshard
from shoal.checkpoint.find import find_checkpoints, open_newest
from shoal.checkpoint.manifest import Manifest
from shoal.checkpoint.signing import VARIABLE, read_key, signing_key
from shoal.checkpoint.verify import VerifiedCheckpoint
from shoal.cli.output import say
from shoal.errors import BadCheckpoint, UsageError
from shoal.formatting import in_units
from shoal.storage.object_store import open_store
from shoal.storage.store import Draft, Store
from shoal.world import cores

Kind = TypeVar("Kind", bound=VerifiedCheckpoint)
_UNSIGNED = "none"


@click.command()
@click.argument("source")
@click.argument("target")
@click.option(
    "--files",
    "num_files",
    type=click.IntRange(1, 99_999),
    metavar="N",
    help="Deal what it holds to N files of about one size, one for each host say. Default: the "
    "files stay as they are.",
)
@click.option(
    "--source-key",
    metavar="FILE",
    help=f"The key that SOURCE was signed with, if that is not the one of {VARIABLE}; {_UNSIGNED} "
    "if it is to be taken without a signature.",
)
@click.option(
    "--missing",
    is_flag=True,
    help="TARGET is a store of checkpoints: copy to it all of SOURCE that it does not have whole.",
)
def convert(
    source: str, target: str, num_files: int | None, source_key: str | None, missing: bool
) -> None:
    """Write the checkpoint SOURCE again at TARGET.

    \b
    shoal checkpoint convert runs/charlm-small-1 s3://bucket/archive/charlm-300
    shoal checkpoint convert s3://bucket/archive/charlm-300 start/step-00000300 --files 4
    shoal checkpoint convert old/step-00000300 new/step-00000300 --source-key old.key
    shoal checkpoint convert "mirror://[/a/run,s3://b/run]" s3://b/run --missing

    Both are paths or URLs. Of a run directory the newest good checkpoint is taken. Every byte is
    verified on the way; TARGET must not exist, and appears whole or not at all. It is signed if
    SHOAL_CHECKPOINT_KEY is set, whatever SOURCE was signed with. Without --files it holds the same
    files and has the same seal. Exit codes: 0 done, 2 usage or input, or SOURCE is bad.
    """
    key_of = _key_of(source_key)
    if missing:
        if num_files is not None:
            raise UsageError("--missing copies checkpoints as they are, so --files has no place.")
        for line in _catch_up(partial(VerifiedCheckpoint, key_of=key_of), source, target):
            say(line)
        return
    place = new_target(target)
    if num_files is None:
        made = _rewrite(partial(VerifiedCheckpoint, key_of=key_of), source, place, copy_checkpoint)
    else:
        from shoal.checkpoint.load import CheckpointReader

        resharded = partial(reshard, num_files=num_files)
        made = _rewrite(partial(CheckpointReader, key_of=key_of), source, place, resharded)
    say(_told(made, str(place)))


def _catch_up(
    kind: Callable[[Store, str], VerifiedCheckpoint], source: str, target: str
) -> Iterator[str]:
    """Copy each sound checkpoint of SOURCE that TARGET lacks, or has damaged."""
    found, store = find_checkpoints(source), open_store(target)
    num_copied = 0
    for name in found.names:
        with suppress(BadCheckpoint):
            VerifiedCheckpoint(store, name).verify(cores())
            continue
        good = kind(found.store, name)
        good.verify(cores())  # before anything of TARGET is replaced
        place = CheckpointTarget(store, name)
        with open_draft(place) as draft:
            yield _told(copy_checkpoint(good, draft), str(place))
        num_copied += 1
    if not num_copied:
        yield f"{store} has all {len(found.names)} checkpoints of {found.store}."


def _rewrite(
    kind: Callable[[Store, str], Kind],
    source: str,
    place: CheckpointTarget,
    write: Callable[[Kind, Draft], Manifest],
) -> Manifest:
    """Open the newest good one at SOURCE, and write it."""
    chosen = open_newest(kind, source, lambda sealed: sealed.verify(cores()))
    if chosen.note:
        say(chosen.note, is_error=True)
    with open_draft(place) as draft:
        return write(chosen.opened, draft)


def _key_of(given: str | None) -> Callable[[], bytes | None]:
    if given is None:
        return signing_key
    key = None if given == _UNSIGNED else read_key(given, "--source-key")
    return lambda: key


def _told(made: Manifest, target: str) -> str:
    size = sum(file.num_bytes for file in made.files)
    files = f"{len(made.files)} file{'s' if len(made.files) > 1 else ''}"
    signed = "signed" if signing_key() is not None else "not signed"
    return f"{target}: step {made.progress.step}, {in_units(size)} in {files}, {signed}."
