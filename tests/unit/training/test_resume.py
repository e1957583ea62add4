"""A run goes on with what it began with: its fields, and its data by content."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import shoal
from shoal.checkpoint.manifest import Origin
from shoal.data import sample_digest
from shoal.data.identity import short_identity
from shoal.errors import UsageError
from shoal.training.checkpointing import origin_of
from shoal.training.recipe import provenance
from shoal.training.resume import refuse_changes
from shoal.training.run import Run, resolve


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


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a second may pass before a fork runs."""
    monkeypatch.setattr(sample_digest, "MOST_S", 30.0)


def test_other_data_of_the_same_length_is_refused_with_both_names() -> None:
    began, now = run_of(), run_of(shift=1.0)
    names = [short_identity(plain(run)["data_content"]) for run in (began, now)]
    with pytest.raises(UsageError) as refused:
        refuse_changes(plain(now), now, origin(began))
    assert all(name in str(refused.value) for name in names) and "--from" in str(refused.value)
    refuse_changes(plain(run_of()), run_of(), origin(began))


def test_another_order_of_the_same_data_is_refused() -> None:
    rows = torch.arange(8.0)[:, None]
    data = shoal.data.tensors(rows, rows)
    began = run_of(data=shoal.data.in_order(data))
    now = run_of(data=shoal.data.weighted(data, [1.0] * 8))
    with pytest.raises(UsageError, match=r"order of samples was 'Sequential .* now, so samples"):
        refuse_changes(plain(now), now, origin(began))
    again = run_of(data=shoal.data.in_order(data))
    refuse_changes(plain(again), again, origin(began))
    old = origin(began)
    del old.run["data_order"]
    refuse_changes(plain(now), now, old)


def test_another_order_of_new_data_is_refused() -> None:
    began, name = origin(run_of()), {"new_data_order": "Replayed 1"}
    began.run.update(name)
    refuse_changes({**plain(run_of()), **name}, run_of(), began)
    for other in ({"new_data_order": "Replayed 2"}, {}):
        with pytest.raises(UsageError, match="replayed samples was Replayed 1 when the run began"):
            refuse_changes({**plain(run_of()), **other}, run_of(), began)


class Drawn(Dataset[Any]):
    """Samples that are others each time."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        rows = np.random.default_rng().random(3)
        return rows, rows


def test_other_data_of_a_source_that_does_not_say_what_it_holds_is_refused() -> None:
    rows = torch.arange(8.0)[:, None]
    began = run_of(data=TensorDataset(rows, rows))
    same, other = TensorDataset(rows.clone(), rows), TensorDataset(rows + 1, rows)
    refuse_changes(plain(run_of(data=same)), run_of(data=same), origin(began))
    now = run_of(data=other)
    with pytest.raises(UsageError, match=r"The data was 'glimpse \w+' .*--from RUN"):
        refuse_changes(plain(now), now, origin(began))


def test_samples_that_are_drawn_anew_are_known_by_their_number_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        began, now = run_of(data=Drawn()), run_of(data=Drawn())
        refuse_changes(plain(now), now, origin(began))
    assert caplog.text.count("Samples of the Drawn are others each time") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"batch_size": 2}, "batch_size was 4 and is 2 now"),
        ({"seed": 1}, "seed was 0 and is 1 now"),
        ({"clip": 2.0}, "clip was None and is 2.0 now"),
    ],
)
def test_what_makes_another_run_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    now = run_of(**change)
    with pytest.raises(UsageError, match=words):
        refuse_changes(plain(now), now, origin(run_of()))
    longer = run_of(steps=9, save_every=3, loaders=2)
    refuse_changes(plain(longer), longer, origin(run_of()))


def test_a_run_without_a_name_for_its_data_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    """One from before there were names, and one on a source of the user's own."""
    began, now = run_of(), run_of(shift=1.0)
    old = origin(began)
    del old.run["data_content"]
    refuse_changes(plain(now), now, old)
    own = run_of(data=range(8))
    fields = plain(own) | {"data": plain(began)["data"]}
    assert caplog.text.count("began with could not be told, except by its length") == 1
    refuse_changes(fields, own, origin(began))
    assert caplog.text.count("began with could not be told, except by its length") == 2
    caplog.clear()
    refuse_changes(plain(began), began, origin(began))
    assert not caplog.text
