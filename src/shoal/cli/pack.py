"""`shoal pack`: one smaller file of what is stored, and back."""

import click

from shoal.cli.output import as_json, print_json, say
from shoal.formatting import in_units


@click.command()
@click.argument("checkpoint")
@click.option("--out", required=True, metavar="PATH", help="What to write; it must not exist.")
@click.option("--unpack", is_flag=True, help="CHECKPOINT is a pack: write what it holds.")
@as_json
def pack(checkpoint: str, out: str, unpack: bool, as_json: bool) -> None:
    """Pack CHECKPOINT into one smaller file, without a loss.

    \b
    shoal pack runs/charlm-small-1 --out charlm.pack
    shoal pack charlm.pack --unpack --out charlm-again

    CHECKPOINT is a run directory, of which the newest good checkpoint is taken, a checkpoint, an
    export or a file of weights. The bytes of its numbers are sorted by significance and compressed
    by zstd; the pack is read back and every file's hash compared before it gets its name.
    `shoal.load` reads a pack as it reads what is in it. Needs the extra slim. Exit codes: 0 done,
    2 usage or input, or CHECKPOINT is damaged.
    """
    from shoal.slim import packing

    result = packing.unpack(checkpoint, out) if unpack else packing.pack(checkpoint, out)
    if result.note:
        say(result.note, is_error=True)
    if as_json:
        found = {"bytes_before": result.bytes_before, "bytes_after": result.bytes_after}
        print_json({**found, "verified": result.verified, "out": result.out})
        return
    if unpack:
        say(f"{out}: {in_units(result.bytes_after)}; every file has the hash that it had.")
        return
    share = result.bytes_after / max(1, result.bytes_before)
    say(
        f"{out}: {in_units(result.bytes_before)} became {in_units(result.bytes_after)} "
        f"({share:.0%}); read back, and every byte is the same."
    )
