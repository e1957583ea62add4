"""`shoal data audit`: were the steps of a run made of the samples that its order gives?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shoal.cli import options
from shoal.cli.output import as_json, print_json, say
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.data.sources import Source
    from shoal.training.lineage import RunRecord


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--recipe",
    metavar="RECIPE",
    help="The recipe that the run was made of, as file.py:function. Needed where run.json does not "
    "tell the order of samples, and where samples were left out as bad.",
)
@options.settings
@as_json
def audit(run: Path, recipe: str | None, settings: dict[str, str], as_json: bool) -> None:
    """Check the ledger of RUN, a run directory.

    Every rank left a mark of the samples that it really loaded for each committed step. The order
    of samples is computed again and compared with these marks: from run.json, if the data is
    shuffled as a whole or taken in order, else from the data of --recipe, with the settings of the
    run and --set. A stream is read again: its marks are of what is in the samples. No recipe is
    loaded that you do not name. Exit codes: 0 every mark is that of the right samples, 1 one is
    not, or a quarantine file is damaged or gone, 2 usage or input, or there is nothing to compare.
    """
    from shoal.data.ledger import Audit
    from shoal.data.transforms.quarantine import BadQuarantine
    from shoal.training.lineage import audit_run, read_record

    if settings and recipe is None:
        raise UsageError("--set has no effect without a recipe. Add --recipe file.py:function.")
    record = read_record(run)
    if all(line["mark"] is None for line in record.steps):
        raise _nothing(record)
    try:
        found = audit_run(record, _data(record, recipe, settings))
    except BadQuarantine as bad:
        found = Audit(problems=[str(bad)])
    if not found.num_marked and not found.problems:
        raise _nothing(record)
    if as_json:
        print_json(found, int(bool(found.problems)))
    else:
        if found.last_step:
            say(_counts(run, found))
        for problem in found.problems:
            say(f"WRONG: {problem}")
        if not found.problems:
            say(f"{found.num_marked} steps were made of the samples that the order gives")
    if found.problems:
        raise SystemExit(1)


def _data(record: "RunRecord", recipe: str | None, settings: dict[str, str]) -> "Source":
    from shoal.training.lineage import data_on_record, recipe_data

    if recipe is not None:
        return recipe_data(record, recipe, settings)
    data = data_on_record(record)
    if data is None:
        raise UsageError(
            f"The order of samples does not follow from {record.path / 'run.json'} alone: they "
            "were shuffled by shards, weighted, mixed, chosen, by length, of a stream, or left out "
            "as bad. Name the recipe, whose code is then run: --recipe file.py:function. The "
            f"run says that it was made of {record.described.recipe or 'none'!r}."
        )
    return data


def _nothing(record: "RunRecord") -> UsageError:
    return UsageError(
        f"{record.path}: nothing to compare: of {len(record.steps)} steps on record none has a "
        "mark of known samples. Audit a run that has made steps under `shoal train`, under a plan "
        "without staleness."
    )


def _counts(run: Path, found: Any) -> str:
    often = (
        f", {found.passes:.2f} passes\n"
        f"each sample was trained on {found.least_often} to {found.most_often} times"
    )
    return (
        f"{run}: steps {found.first_step} to {found.last_step}, {found.num_samples} samples"
        f"{' of a stream, which was read again' if found.is_stream else often}\n"
        f"{found.num_marked} steps checked, {found.num_unmarked} without a mark, "
        f"{found.num_left_out} samples left out as bad"
    )
