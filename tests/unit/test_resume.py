"""A run goes on with what it began with: its fields, and its data by content."""

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.checkpoint.manifest import Origin
from shoal.errors import UsageError
from shoal.keeping import origin_of
from shoal.recipe import provenance
from shoal.resume import refuse_changes
from shoal.run import Run, resolve


def run_of(shift: float = 0.0, **changes: Any) -> Run:
    rows = torch.arange(8.0)[:, None] + shift
    fields = {"batch_size": 4, "steps": 2, "data": shoal.data.tensors(rows, rows), **changes}
    return Run(
        model=lambda: nn.Linear(1, 1),
        loss=nn.functional.mse_loss,
        optimizer=lambda named: torch.optim.SGD(named, lr=0.1),
        **fields,
    )


def plain(run: Run) -> dict[str, Any]:
    return {name: field["value"] for name, field in provenance(run, {}).items()}


def origin(run: Run) -> Origin:
    return origin_of("r.py:f", plain(run), resolve(run, "data=1", None), run)


def test_other_data_of_the_same_length_is_refused_with_both_names() -> None:
    began, now = run_of(), run_of(shift=1.0)
    names = plain(began)["data_content"], plain(now)["data_content"]
    with pytest.raises(UsageError) as refused:
        refuse_changes(plain(now), now, origin(began))
    assert all(name in str(refused.value) for name in names) and "--from" in str(refused.value)
    refuse_changes(plain(run_of()), run_of(), origin(began))


def test_a_run_without_a_name_for_its_data_goes_on() -> None:
    """One from before there were names, and one on a source of the user's own."""
    began, now = run_of(), run_of(shift=1.0)
    old = origin(began)
    del old.run["data_content"]
    refuse_changes(plain(now), now, old)
    own = run_of(data=range(8))
    fields = plain(own) | {"data": plain(began)["data"]}
    refuse_changes(fields, own, origin(began))
