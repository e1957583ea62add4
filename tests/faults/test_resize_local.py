"""Replicas of local steps that come and go while a run goes on, where a window ends.

The bits are those of the same played in one process (`replicas.py`), also if one dies meanwhile:
where a step leaves nothing behind but weights, a window that is done again has the same. The run
has six pieces, so one, two, three or six replicas; windows are of four steps.
"""

import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shoal.elastic.control import send_request
from shoal.plans.plan import Plan
from shoal.training.recipe import load_recipe
from tests.faults.replicas import play
from tests.support.faults import (
    Trained,
    check_answers,
    check_ledger,
    check_sizes,
    resize,
    resize_while_one_is_killed,
)

NUM_STEPS = 60
RECIPE = str(Path(__file__).with_name("tiny.py"))
AVERAGE = "data=2 local_steps=4 pieces=6"
NESTEROV = "data=2 local_steps=4 outer=nesterov:0.7:0.5 pieces=6"
PACKED = "data=2 local_steps=4 outer=nesterov:0.7:0.5 codec=int8 pieces=6"
SERVED = "data=2 sync=server servers=2 local_steps=4 outer=nesterov:0.7:0.5 pieces=6"
full = pytest.mark.full


def check_played(trained: Trained, plan: str, recipe: str) -> None:
    """The weights, and the buffers, of the same sizes after the same steps in one process."""
    resizes = trained.events("resized")
    sizes = {event["step"]: Plan.parse(event["plan"]).num_replicas for event in resizes}
    assert sizes and not any(step % 4 for step in sizes), sizes
    run = load_recipe(f"{RECIPE}:{recipe}", {"pause": "0"})
    played = play(run, Plan.parse(plan), sizes)
    model = load_file(trained.run_dir / "model.safetensors")
    assert model.keys() == played.keys()
    differing = [name for name, value in played.items() if not torch.equal(value, model[name])]
    assert not differing, differing
    check_ledger(trained, NUM_STEPS)


@pytest.mark.quick("data=2 local_steps=4 pieces=6-mlp-sizes0")
@pytest.mark.parametrize(
    ("plan", "recipe", "sizes"),
    [
        (AVERAGE, "mlp", ["data=3", "data=2"]),
        (PACKED, "mlp", ["data=3", "data=2"]),
        (f"{SERVED} codec=int8", "mlp", ["data=3", "data=2 servers=1"]),
        pytest.param(AVERAGE, "stateless", ["data=3", "data=2", "data=6"], marks=full),
        pytest.param(NESTEROV, "mlp", ["data=1", "data=3"], marks=full),
        pytest.param(SERVED, "mlp", ["servers=1", "data=1", "data=3 servers=3"], marks=full),
        (f"{SERVED} deadline=300", "stateless", ["data=3", "data=2 servers=1"]),
    ],
)
def test_replicas_come_and_go(start, plan: str, recipe: str, sizes: list[str]) -> None:
    """Optimizers of those who stay keep what they have seen; newcomers have seen nothing."""
    training = start(pause=0.01, plan=plan, recipe=recipe)
    training.wait_for_step(5)
    told = [resize(training, size) for size in sizes]
    trained = training.wait()
    check_sizes(trained, [one["plan"] for one in told], NUM_STEPS)
    check_played(trained, plan, recipe)
    assert "continues from step" in trained.errors
    assert "went with it" in trained.errors
    assert trained.result["recoveries"] == trained.result["steps_again"] == 0
    assert trained.pids()[0][0] == trained.pids()[-1][0]


@pytest.mark.full
@pytest.mark.parametrize("bound", ["staleness=1", pytest.param("staleness=any", marks=full)])
def test_out_of_lockstep_all_meet_at_the_end_of_a_window(start, bound: str) -> None:
    training = start(pause=0.01, plan=f"{SERVED} {bound} damping=inverse")
    training.wait_for_step(5)
    told = [resize(training, size) for size in ("data=3", "data=2 servers=1", "data=3 servers=2")]
    assert not any(one["step"] % 4 for one in told)
    trained = training.wait()
    check_sizes(trained, [one["plan"] for one in told], NUM_STEPS)
    assert trained.result["recoveries"] == 0


def test_what_cannot_be_is_refused_and_changes_nothing(start) -> None:
    training = start(pause=0.01, plan=AVERAGE, steps=20)
    training.wait_for_step(3)
    wrong = {
        "data=4": "Use data=2, data=3 or data=6.",
        "data=7": "more than the 6 pieces",
        "data=1": "there is no other to average with",
        "servers=2": "this run has no servers",
    }
    for size, why in wrong.items():
        assert why in send_request(training.run_dir, resize=size)["refused"], size
    assert training.wait().exit_code == 0


FAULTS = {  # where who is killed
    (NESTEROV, "data=3"): [
        ("seat.meeting", 0),
        ("seat.meeting", 1),
        ("seat.here", 2),  # the newcomer
        ("handover.sharing", 0),
        ("handover.sharing", 2),
    ],
    (NESTEROV, "data=1"): [("seat.meeting", 1), ("size.taken", 0)],
    (SERVED, "data=3"): [
        ("seat.meeting", 1),
        ("server.parting", 2),
        ("server.parted", 3),
        ("server.moving", 2),
        ("server.moved", 3),
        ("handover.sharing", 4),  # the newcomer
    ],
    (SERVED, "data=1 servers=1"): [
        ("seat.meeting", 1),  # who leaves
        ("size.taken", 0),
        ("server.parted", 3),
        ("server.moved", 2),
    ],
    (f"{SERVED} deadline=300", "data=3 servers=3"): [
        ("seat.meeting", 0),
        ("server.parted", 2),
        ("server.moved", 2),
    ],
}
QUICK = {(NESTEROV, "handover.sharing", 0), (SERVED, "server.moving", 2)}


@pytest.mark.quick("data=2 local_steps=4 outer=nesterov:0.7:0.5 pieces=6-data=3-handover.sharing-0")
@pytest.mark.parametrize(
    ("plan", "size", "point", "member"),
    [
        pytest.param(plan, size, *case, marks=() if (plan, *case) in QUICK else full)
        for (plan, size), cases in FAULTS.items()
        for case in cases
    ],
)
def test_a_death_in_a_resize(start, plan: str, size: str, point: str, member: int) -> None:
    """Members 0 and 1 are the replicas, then the servers, then the spare."""
    training = start(f"{point}:kill:member={member}", pause=0.01, plan=plan, recipe="stateless")
    training.wait_for_step(5)
    told = resize(training, size)
    trained = training.wait()
    check_sizes(trained, [told["plan"]], NUM_STEPS)
    check_played(trained, plan, "stateless")
    assert trained.result["recoveries"] == 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "armed"),
    [
        (AVERAGE, "local.brought:lose:member=1:step=12"),
        pytest.param(NESTEROV, "local.agreed:lose:member=0:step=12", marks=full),
        pytest.param(NESTEROV, "local.agreed:kill:member=1:step=12", marks=full),
        pytest.param(NESTEROV, "step.exchanged:kill:member=0:step=11", marks=full),
        pytest.param(NESTEROV, "step.committed:kill:member=1:step=12", marks=full),
        pytest.param(SERVED, "step.exchanged:kill:member=0:step=11", marks=full),
        pytest.param(SERVED, "server.applied:kill:member=3:step=2", marks=full),
    ],
)
def test_a_group_that_breaks_after_it_was_asked_meets_one_window_later(
    start, plan: str, armed: str
) -> None:
    """All have heard that they are to meet after step 12 when that group is lost."""
    training = start(armed, pause=0.05, plan=plan, recipe="stateless")
    training.wait_for_step(8)
    told = resize(training, "data=3")
    trained = training.wait()
    assert told["step"] > 12
    check_sizes(trained, [told["plan"]], NUM_STEPS)
    check_played(trained, plan, "stateless")


@pytest.mark.full
def test_a_newcomer_whose_group_breaks_before_it_has_the_anchor_takes_it_in_the_next(start) -> None:
    training = start("local.joining:lose:member=4", pause=0.01, plan=SERVED, recipe="stateless")
    training.wait_for_step(5)
    told = resize(training, "data=3")
    trained = training.wait()
    check_sizes(trained, [told["plan"]], NUM_STEPS)
    check_played(trained, SERVED, "stateless")


@full
@pytest.mark.parametrize(
    ("bound", "armed"),
    [
        (bound, armed)
        for bound in ("staleness=1", "staleness=any", "deadline=300")
        for armed in (
            "seat.meeting:kill:member=1",
            "server.parted:kill:member=3",
            "server.moved:kill:member=2",
            "server.pull:kill:member=2:step=4",
            "step.computed:kill:member=0:step=14",
        )
    ],
)
def test_a_death_out_of_lockstep(start, bound: str, armed: str) -> None:
    training = start(armed, pause=0.02, plan=f"{SERVED} {bound}")
    training.wait_for_step(5)
    told = resize(training, "data=3 servers=1")
    trained = training.wait()
    check_sizes(trained, [told["plan"]], NUM_STEPS)
    assert trained.result["recoveries"] == 1


@full
@pytest.mark.parametrize("plan", [PACKED, SERVED])
def test_a_run_goes_on_from_a_checkpoint_of_another_size(start, plan: str) -> None:
    training = start(pause=0.02, plan=plan)
    training.wait_for_step(5)
    resize(training, "data=3")
    training.command.send_signal(signal.SIGTERM)
    stopped = training.wait()
    assert stopped.exit_code == 75 and stopped.result["steps"] < NUM_STEPS, stopped.errors
    plan_of_now = stopped.result["plan"]
    again = start(plan=plan_of_now, options=("--resume",), run_dir=stopped.run_dir).wait()
    assert again.exit_code == 0, again.errors
    check_played(stopped, plan, "mlp")


@full
def test_where_a_death_takes_all_back_replicas_come_and_go_too(start) -> None:
    """A save within a window needs all replicas as they are."""
    settings = {"recipe": "judged", "plan": AVERAGE, "save": 10, "pause": 0.01}
    training = start("step.begin:kill:member=1:step=45", **settings)
    training.wait_for_step(5)
    told = [resize(training, size) for size in ("data=3", "data=2")]
    trained = training.wait()
    check_sizes(trained, [one["plan"] for one in told], NUM_STEPS)
    check_ledger(trained, NUM_STEPS)


@full
@pytest.mark.parametrize("attempt", range(20))
@pytest.mark.parametrize("plan", [NESTEROV, SERVED])
def test_kills_at_random_moments_of_resizes(start, draws, plan: str, attempt: int) -> None:
    """Whoever is killed, each command is answered, and the bits are those of the sizes it had.

    Two replicas at least: what one alone has learnt dies with it."""
    training = start(pause=0.01, plan=plan, recipe="stateless")
    training.wait_for_step(5)
    sizes = ["data=3", "data=6", "data=2"]
    answers = resize_while_one_is_killed(training, sizes, draws, within_s=0.6)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    check_answers(trained, answers)
    if trained.events("resized"):
        check_played(trained, plan, "stateless")
