"""What `codec=auto` chose is on record and kept: by a resume, after a death, by a newcomer."""

import signal
from collections.abc import Callable
from typing import Any

import pytest

from shoal.errors import RUN_AGAIN
from tests.support.faults import Trained, check_ledger, check_same

NUM_STEPS = 60
AUTO, NAMED = "data=2 codec=auto", "data=2 codec=int8"


def test_it_trains_what_the_codec_by_its_name_does(
    start: Callable[..., Any], undisturbed_under: Callable[..., Trained]
) -> None:
    """Also if a rank is lost while a step is rehearsed: nothing of that stays."""
    armed = "plan.measuring:kill:member=1:step=0"
    trained: Trained = start(armed, recipe="forced", plan=AUTO).wait()
    check_same(trained, undisturbed_under(NAMED, "packed"))
    assert trained.result["plan"].startswith(NAMED)
    (event,) = trained.events("measured-plan")
    assert event["codec"] == "int8" and event["step_s"]["codec=int8"] > 0
    assert event["text"] in trained.errors.replace("\n", " ")


@pytest.mark.full
@pytest.mark.parametrize("plan", [AUTO, "data=2 zero=2 codec=auto bucket=auto"])
def test_a_resume_keeps_it(
    start: Callable[..., Any], undisturbed_under: Callable[..., Trained], tmp_path: Any, plan: str
) -> None:
    """Also where the command leaves it open again, and the recipe would measure something else."""
    place = {"run_dir": tmp_path / "run", "plan": plan}
    training = start(recipe="forced", **place, pause=0.02, save_every=10)
    training.wait_for_step(15)
    training.command.send_signal(signal.SIGTERM)
    assert training.wait().exit_code == RUN_AGAIN
    trained: Trained = start(recipe="forced", **place, options=("--resume",)).wait()
    check_same(trained, undisturbed_under(plan.replace("codec=auto", "codec=int8"), "packed"))
    assert len(trained.events("measured-plan")) == 1, "it was measured again"
    assert "codec=int8" in trained.result["plan"] and "keeps codec=int8" in trained.errors


@pytest.mark.full
def test_a_newcomer_is_told(start: Callable[..., Any]) -> None:
    armed = "step.computed:kill:member=1:step=20"
    trained: Trained = start(armed, recipe="forced", plan="data=3 codec=auto").wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    assert len(trained.events("measured-plan")) == 1
    assert "without what codec=int8 had not sent" in trained.errors


@pytest.mark.full
def test_all_ranks_that_begin_again_keep_it(
    start: Callable[..., Any], undisturbed_under: Callable[..., Trained]
) -> None:
    """Where no other rank holds the state, all are forked anew, of a plan that leaves it open."""
    armed = "step.computed:kill:member=1:step=25"
    trained: Trained = start(
        armed, recipe="forced", plan="data=2 zero=2 codec=auto", save_every=10
    ).wait()
    check_same(trained, undisturbed_under("data=2 zero=2 codec=int8", "packed"))
    assert len(trained.events("measured-plan")) == 1, "it was measured again"
