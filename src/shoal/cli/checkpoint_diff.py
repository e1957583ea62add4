"""`shoal checkpoint diff`: how two checkpoints differ."""

from typing import TYPE_CHECKING, Any

import click

from shoal.checkpoint.find import find_checkpoint, open_checkpoint
from shoal.cli.output import as_json, in_json, print_json, say

if TYPE_CHECKING:
    from shoal.checkpoint.compare import Differences, TensorDifference

_SHOWN = 60  # characters of a value


@click.command()
@click.argument("a")
@click.argument("b")
@as_json
def diff(a: str, b: str, as_json: bool) -> None:
    """Say how the checkpoints A and B differ: tensors, progress, origin, optimizer's numbers.

    They may have been saved under different plans. Ends with exit code 1 if they differ.
    """
    find_checkpoint(a), find_checkpoint(b)  # before torch is loaded
    from shoal.checkpoint.compare import compare_checkpoints
    from shoal.checkpoint.load import CheckpointReader

    found = compare_checkpoints(
        open_checkpoint(CheckpointReader, a), open_checkpoint(CheckpointReader, b)
    )
    if as_json:
        print_json(found, int(bool(found)))
    else:
        say(_differences(found))
    raise SystemExit(1 if found else 0)


def _differences(found: "Differences") -> str:
    if not found:
        return f"The same: {found.num_equal} tensors, progress, origin and plain entries."
    lines = [f"  {one.name}: {_tensor_difference(one)}" for one in found.tensors]
    for entry in found.entries:
        told = [f"{_short(entry.a)} in a"] if entry.only_in != "b" else []
        told += [f"{_short(entry.b)} in b"] if entry.only_in != "a" else []
        only = "only " if entry.only_in else ""
        lines.append(f"  {entry.name}: {only}{', '.join(told)}")
    count = f"{len(found.tensors)} tensors differ, {found.num_equal} are the same; "
    return "\n".join([f"{count}{len(found.entries)} other entries differ.", *lines])


def _tensor_difference(one: "TensorDifference") -> str:
    if one.values is None:
        return f"{one.kind} ({one.a or one.b})" if not (one.a and one.b) else f"{one.a} / {one.b}"
    values = one.values
    return (
        f"{values.num_different} of {values.num_elements} elements differ, by at most "
        f"{values.largest_absolute:.3g} ({values.largest_relative:.3g} relative)"
    )


def _short(value: Any) -> str:
    text = in_json(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
