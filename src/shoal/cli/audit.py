"""`shoal data audit`: were the steps of a run made of the samples that its order gives?"""

from pathlib import Path
from typing import Any

import click

from shoal.cli.output import as_json, print_json
from shoal.errors import UsageError


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@as_json
def audit(run: Path, as_json: bool) -> None:
    """Check the ledger of RUN, a run directory.

    Every rank left a mark of the samples that it really loaded for each committed step. The order
    of samples is computed anew from the run's recipe and seed and compared with these marks. Exit
    codes: 0 every mark is that of the right samples, 1 one is not, or a quarantine file is damaged
    or gone, 2 usage or input, or there is nothing to compare.
    """
    from shoal.data.ledger import Audit
    from shoal.data.transforms.quarantine import BadQuarantine
    from shoal.lineage import audit_run, read_record, recipe_data

    record = read_record(run)
    try:
        found = audit_run(record, recipe_data(record))
    except BadQuarantine as bad:
        found = Audit(problems=[str(bad)])
    if not found.num_marked and not found.problems:
        raise UsageError(
            f"{run}: nothing to compare: of {len(record.steps)} steps on record none has a mark. "
            "Audit a run that has made steps under `shoal train`, under a plan without staleness."
        )
    if as_json:
        print_json(found)
    else:
        if found.last_step:
            click.echo(_counts(run, found))
        for problem in found.problems:
            click.echo(f"WRONG: {problem}")
        if not found.problems:
            click.echo(f"{found.num_marked} steps were made of the samples that the order gives")
    if found.problems:
        raise SystemExit(1)


def _counts(run: Path, found: Any) -> str:
    return (
        f"{run}: steps {found.first_step} to {found.last_step}, {found.num_samples} samples, "
        f"{found.passes:.2f} passes\n"
        f"each sample was trained on {found.least_often} to {found.most_often} times\n"
        f"{found.num_marked} steps checked, {found.num_unmarked} without a mark, "
        f"{found.num_left_out} samples left out as bad"
    )
