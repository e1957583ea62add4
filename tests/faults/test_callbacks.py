"""Callbacks when ranks die or stop: what they keep is that of a run without a fault."""

import signal
from typing import Any

import pytest
from torch import Tensor

from shoal.checkpoint.find import list_steps
from shoal.checkpoint.load import CheckpointReader
from shoal.storage.object_store import open_store
from tests.support.faults import Trained, check_same, check_survivors, resize

KEPT = ("loss", "rate", "evaluation", "logged")


def told(trained: Trained) -> list[dict[str, Any]]:
    return [{key: step.get(key) for key in KEPT} for step in trained.steps()]


def averages(trained: Trained) -> dict[str, Tensor]:
    """Of the last checkpoint."""
    store = open_store(trained.run_dir / "checkpoints")
    opened = CheckpointReader(store, list_steps(store)[0])
    return {name: opened.whole(name) for name in opened if name.startswith("ema.")}


def check(trained: Trained, undisturbed: Trained) -> None:
    assert trained.exit_code == 0, trained.errors
    check_same(trained, undisturbed)
    assert told(trained) == told(undisturbed)
    own, other = averages(trained), averages(undisturbed)
    assert own and own.keys() == other.keys()
    assert all(own[name].equal(other[name]) for name in own)


def test_callbacks_act_on_what_all_ranks_know(undisturbed_under) -> None:
    """Rates fall, parameters rest for a while, and each step is seen once."""
    steps = undisturbed_under("data=3", "called").steps()
    assert [step["logged"]["seen"] for step in steps] == [*range(1, 61)]
    assert steps[-1]["rate"] < steps[0]["rate"]
    assert all("ema_loss" in step["evaluation"] for step in steps[4::5])


@pytest.mark.parametrize(
    ("point", "step"),
    [
        ("step.committed", 20),  # before the body of a step that is evaluated
        pytest.param("step.begin", 20, marks=pytest.mark.full),
        pytest.param("step.exchanged", 19, marks=pytest.mark.full),
        pytest.param("step.committed", 30, marks=pytest.mark.full),  # when a layer is unfrozen
    ],
)
@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_newcomer_has_what_callbacks_keep(
    start, undisturbed_under, point: str, step: int, rank: int
) -> None:
    trained = start(f"{point}:kill:member={rank}:step={step}", recipe="called").wait()
    check(trained, undisturbed_under("data=3", "called"))
    check_survivors(trained, [rank])


@pytest.mark.full
@pytest.mark.parametrize("size", ["data=3", "data=1"])
def test_ranks_that_come_and_go_have_it_too(start, undisturbed_under, size: str) -> None:
    training = start(recipe="called", pause=0.03, plan="data=2 pieces=3")
    training.wait_for_step(12)
    resize(training, size)
    check(training.wait(), undisturbed_under("data=3", "called"))


@pytest.mark.full
def test_all_go_back_to_a_checkpoint_with_what_they_kept(start, undisturbed_under) -> None:
    plan = "data=2 zero=1"
    trained = start("step.computed:kill:member=1:step=27", recipe="called", plan=plan).wait()
    assert trained.result["recoveries"] == 1
    check(trained, undisturbed_under(plan, "called"))


@pytest.mark.full
def test_a_run_that_was_stopped_goes_on_with_the_same_bits(start, undisturbed_under) -> None:
    begun = start(recipe="called", pause=0.01)
    begun.wait_for_step(25)
    begun.command.send_signal(signal.SIGTERM)
    stopped = begun.wait()
    assert stopped.exit_code == 75, stopped.errors
    again = start(recipe="called", options=("--resume",), run_dir=stopped.run_dir).wait()
    check(again, undisturbed_under("data=3", "called"))


def test_early_stopping_is_a_success_and_stays_one(start) -> None:
    trained = start(recipe="called", patience=2).wait()
    assert trained.exit_code == 0, trained.errors
    last = trained.result["steps"]
    assert last < 60 and trained.model() and trained.result["checkpoint"] == last
    (ended,) = trained.events("ended-early")
    assert ended["step"] == last and "ema_loss did not improve in 2 evaluations" in ended["why"]
    assert "ended early" in trained.errors
    again = start(recipe="called", options=("--resume",), run_dir=trained.run_dir).wait()
    assert again.exit_code == 0 and again.result["steps"] == last, again.errors


def test_a_callback_that_fails_on_one_rank_ends_the_run(start) -> None:
    trained = start(recipe="called", fails=7).wait()
    assert trained.exit_code == 1
    said = "The callback Counting failed in on_step on rank 1, after step 7: KeyError"
    assert said in trained.last_words
    assert 'raise KeyError("a key of the callback\'s own")' in trained.errors


def test_a_callback_that_acts_unlike_on_one_rank_is_found(start) -> None:
    trained = start(recipe="called", unlike=7).wait()
    assert trained.exit_code == 1
    assert "After step 7 ranks hold unlike values" in trained.last_words
    assert "['initial_lr'] is" in trained.last_words or "['lr'] is" in trained.last_words
