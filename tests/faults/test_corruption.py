"""A flipped bit in a rank's or server's state is found, and named; no clean run is suspected."""

import pytest

from tests.support.faults import Trained, check_ledger, check_recovered, check_same

NUM_STEPS = 60
APART = "data=3 memory=apart"  # replicas that can be compared with one another


def check_stopped(trained: Trained, who: str, tensor: str) -> None:
    """It ended with a sentence that names them, and nothing of after the corruption was saved."""
    assert trained.exit_code == 1
    assert who in trained.last_words and tensor in trained.last_words, trained.last_words
    assert "--resume" in trained.last_words and "Traceback" not in trained.errors
    assert not (trained.run_dir / "model.safetensors").exists()
    assert not steps_saved(trained)


def steps_saved(trained: Trained) -> list[int]:
    return [int(path.name[-8:]) for path in (trained.run_dir / "checkpoints").glob("step-*")]


def check_repaired(trained: Trained, undisturbed: Trained, rank: int, tensor: str) -> None:
    """The odd one is named, on the screen and on record, and took the state of the others."""
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [rank] and any(tensor in name for name in event["tensors"])
    assert event["step"] - event["since"] <= 1
    assert f"rank {rank} differed from the other replicas after step {event['step']}" in (
        trained.errors
    )
    assert not trained.events("recovered")


FLIPS = [
    ("step.begin", "model.0.weight"),
    ("step.computed", "exp_avg_sq"),
    ("step.computed", "running_mean"),
    ("step.exchanged", "gradient.0.weight"),  # after it was summed
    ("step.committed", "model.4.bias"),
]


@pytest.mark.parametrize(
    ("point", "what"),
    [*FLIPS[:1], *(pytest.param(*flip, marks=pytest.mark.full) for flip in FLIPS[1:])],
)
def test_two_replicas_stop_without_saving(start, point: str, what: str) -> None:
    trained = start(f"{point}:flip:member=1:step=20:what={what}", plan="data=2 memory=apart").wait()
    # A wrong gradient shows in what was made of it.
    named = "model.0.weight" if what.startswith("gradient") else what
    named = "running_mean" if what == "running_mean" else named
    check_stopped(trained, "on ranks 0 and 1", named)
    assert "between steps 19 and 20" in trained.last_words or "20 and 21" in trained.last_words
    (event,) = trained.events("replicas-differ")
    assert event["ranks"] == [0, 1]


@pytest.mark.quick("step.begin-model.0.weight")
@pytest.mark.parametrize(
    ("point", "what"),
    [*FLIPS[:2], *(pytest.param(*flip, marks=pytest.mark.full) for flip in FLIPS[2:])],
)
def test_of_three_the_odd_one_takes_the_state_of_the_others(
    start, undisturbed, point: str, what: str
) -> None:
    trained = start(f"{point}:flip:member=1:step=20:what={what}", plan=APART).wait()
    named = "0.weight" if what.startswith("gradient") else what
    check_repaired(trained, undisturbed, 1, named)


@pytest.mark.full
@pytest.mark.parametrize(
    "plan",
    [
        "data=4 memory=apart",
        "data=3 sums=ring memory=apart",
        "data=3 zero=1",
        "data=3 zero=2",
        "data=3 pieces=6 precision=bf16 memory=apart",
        "data=3 sync=server",
    ],
)
def test_the_odd_one_is_found_under_other_plans(start, undisturbed_under, plan: str) -> None:
    trained = start("step.computed:flip:member=2:step=20:what=running_mean", plan=plan).wait()
    check_repaired(trained, undisturbed_under(plan), 2, "running_mean")


@pytest.mark.full
def test_of_a_product_only_the_line_of_replicas_is_compared(start) -> None:
    flip = "step.computed:flip:member=3:step=20:what=model.0.weight"
    trained = start(flip, plan="data=2 tensor=2", recipe="in_parts").wait()
    check_stopped(trained, "on ranks 1 and 3", "model.0.weight")


HELD_ONCE = [
    ("data=2 zero=3", "step.computed", "model.0.weight"),
    ("data=2 zero=1", "step.begin", "exp_avg"),
    ("data=2 zero=2", "step.computed", "exp_avg_sq"),
    ("data=2 zero=3", "step.begin", "exp_avg"),
    ("data=3 zero=1", "step.exchanged", "exp_avg"),
    ("tensor=2", "step.computed", "exp_avg"),
    ("pipeline=2", "step.computed", "weight"),
    ("data=2 local_steps=4", "step.computed", "exp_avg"),
    ("data=2 local_steps=4", "step.computed", "model.0.weight"),
]


@pytest.mark.parametrize(
    ("plan", "point", "what"),
    [*HELD_ONCE[:1], *(pytest.param(*cell, marks=pytest.mark.full) for cell in HELD_ONCE[1:])],
)
def test_what_one_rank_holds_is_guarded(start, plan: str, point: str, what: str) -> None:
    trained = start(f"{point}:flip:member=1:step=20:what={what}", plan=plan).wait()
    check_stopped(trained, "State of rank 1 was corrupted after step 20", what)
    (event,) = trained.events("state-corrupted")
    assert event["ranks"] == [1]


AGREED = [
    ("data=2 local_steps=4", "agreed.0.weight"),
    ("data=2 local_steps=4 outer=nesterov", "outer.momentum.0.weight"),
    ("data=2 local_steps=4 outer=nesterov codec=int8", "outer.anchor.0.weight"),
    ("data=2 local_steps=4 outer=nesterov fragments=2", "outer.anchor.0.weight"),
]


@pytest.mark.parametrize(
    ("plan", "what"),
    [*AGREED[:1], *(pytest.param(*cell, marks=pytest.mark.full) for cell in AGREED[1:])],
)
def test_what_replicas_agreed_on_is_compared_when_they_agree_anew(start, plan, what) -> None:
    trained = start(f"step.begin:flip:member=1:step=21:what={what}", plan=plan).wait()
    check_stopped(trained, "on ranks 0 and 1", what)


@pytest.mark.full
def test_of_three_local_replicas_the_odd_one_is_repaired(start, undisturbed_under) -> None:
    plan = "data=3 local_steps=4 outer=nesterov"
    flip = "step.begin:flip:member=1:step=21:what=outer.momentum"
    trained = start(flip, plan=plan).wait()
    check_same(trained, undisturbed_under(plan))
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [1] and event["step"] == 23


SERVED = [
    ("data=2 sync=server", "server.applied", "server-0.model"),
    ("data=2 sync=server", "server.push", "server-0.model"),
    ("data=2 sync=server", "server.apply", "exp_avg"),
    ("data=2 sync=server staleness=2", "server.apply", "exp_avg_sq"),
    ("data=2 sync=server servers=2", "server.apply", "exp_avg"),
    ("data=2 local_steps=4 outer=nesterov sync=server", "server.apply", "server-0.model"),
]


@pytest.mark.parametrize(
    ("plan", "point", "what"),
    [*SERVED[:1], *(pytest.param(*cell, marks=pytest.mark.full) for cell in SERVED[1:])],
)
def test_what_a_server_holds_is_guarded(start, plan: str, point: str, what: str) -> None:
    batch = 5 if "local_steps" in plan else 20
    trained = start(f"{point}:flip:member=2:step={batch}:what={what}", plan=plan).wait()
    assert trained.exit_code == 1, trained.errors
    assert "State of server 0 was corrupted after update" in trained.last_words
    assert what.removeprefix("server-0.") in trained.last_words
    assert not (trained.run_dir / "model.safetensors").exists()


@pytest.mark.full
@pytest.mark.parametrize("what", ["server-0.", "server-1."])
def test_a_copy_on_another_server_is_guarded_too(start, what: str) -> None:
    """Server 1, member 3, has its own shard and a copy of server 0's."""
    flip = f"server.kept:flip:member=3:step=20:what={what}"
    trained = start(flip, plan="data=2 sync=server servers=2 copies=2").wait()
    assert trained.exit_code == 1, trained.errors
    assert f"State of server {what[-2]} was corrupted" in trained.last_words
    assert not (trained.run_dir / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("data=2", "live.model.1.running_var"),
        pytest.param("data=2 memory=apart", "exp_avg", marks=pytest.mark.full),
        pytest.param("data=2 zero=1", "exp_avg", marks=pytest.mark.full),
        pytest.param("data=2 zero=3", "model.0.weight", marks=pytest.mark.full),
        pytest.param("data=2 local_steps=4", "model.0.weight", marks=pytest.mark.full),
    ],
)
def test_state_is_compared_before_it_is_saved(start, plan: str, what: str) -> None:
    """The flip comes after the last update before a save, which would have it."""
    flip = f"step.committed:flip:member=1:step=24:what={what}"
    trained = start(flip, plan=plan, save_every=8).wait()
    assert trained.exit_code == 1 and what.removeprefix("live.") in trained.last_words
    assert max(steps_saved(trained), default=0) < 24


@pytest.mark.full
def test_the_last_step_is_compared_before_the_model_is_written(start) -> None:
    flip = f"step.committed:flip:member=1:step={NUM_STEPS}:what=model.0.weight"
    trained = start(flip, plan="data=2 memory=apart").wait()
    assert trained.exit_code == 1 and "model.0.weight" in trained.last_words
    assert not (trained.run_dir / "model.safetensors").exists()


@pytest.mark.full
def test_a_rank_that_differs_again_and_again_is_not_trusted(start) -> None:
    flips = [f"step.begin:flip:member=1:step={n}:what=model.0.weight" for n in (10, 20, 30, 40)]
    trained = start(*flips, plan=APART).wait()
    assert trained.exit_code == 1 and "Rank 1 differs from the other replicas again" in (
        trained.last_words
    )
    assert len(trained.events("replica-repaired")) == 3


@pytest.mark.full
def test_a_death_and_a_flip_together(start, undisturbed_under) -> None:
    """Survivors agree on the state before a newcomer takes it, or most would be wrong."""
    plan = "data=4 memory=apart"
    faults = (
        "step.computed:kill:member=3:step=20",
        "seat.here:flip:member=0:step=20:what=model.0.weight",
    )
    trained = start(*faults, plan=plan).wait()
    check_same(trained, undisturbed_under(plan))
    check_recovered(trained, {3: "killed by SIGKILL"})
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [0]


@pytest.mark.full
def test_two_survivors_that_differ_do_not_bring_a_newcomer_up(start) -> None:
    faults = (
        "step.computed:kill:member=2:step=20",
        "seat.here:flip:member=0:step=20:what=model.0.weight",
    )
    trained = start(*faults, plan=APART).wait()
    check_stopped(trained, "on ranks 0 and 1", "model.0.weight")


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["data=3", pytest.param("data=2 sync=server", marks=pytest.mark.full)]
)
def test_a_newcomer_is_not_suspected(start, undisturbed_under, plan: str) -> None:
    """Its optimizer has come to the same state in another order."""
    kills = ["step.computed:kill:member=1:step=20"]
    if "server" in plan:
        kills.append("server.apply:kill:member=2:step=30")
    trained = start(*kills, recipe="regrouped", plan=plan).wait()
    check_same(trained, undisturbed_under(plan, "regrouped"))
    assert not trained.events("replica-repaired")


@pytest.mark.full
def test_a_recovered_run_is_compared_like_any_other(start, undisturbed) -> None:
    faults = (
        "step.computed:kill:member=2:step=10",
        "step.begin:flip:member=3:step=30:what=exp_avg",  # the spare
    )
    trained = start(*faults, plan=APART).wait()
    check_same(trained, undisturbed)
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [2]


@pytest.mark.full
def test_all_of_a_larger_state_is_compared_in_so_many_steps(start) -> None:
    """Slice by slice, so it may take some steps."""
    flip = "step.begin:flip:member=1:step=20:what=model.2.weight"
    trained = start(flip, recipe="many", plan=APART, steps=32, check_every=4).wait()
    assert trained.exit_code == 0, trained.errors
    (event,) = trained.events("replica-repaired")
    assert event["ranks"] == [1] and "model.2.weight" in event["tensors"]
    assert 16 <= event["since"] <= 20 <= event["step"] <= 24


@pytest.mark.full
def test_nothing_is_compared_if_that_is_asked_for(start) -> None:
    flip = "step.begin:flip:member=1:step=20:what=model.0.weight"
    trained = start(flip, plan="data=2 memory=apart", check_every=0).wait()
    assert trained.exit_code == 0


CLEAN = [
    ("data=3 sums=ring pieces=4", "judged"),
    ("data=2 zero=1 accumulate=2", "mlp"),
    ("data=2 local_steps=5 outer=nesterov codec=int4 fragments=2", "mlp"),
    ("data=2 sync=server servers=2", "tabled"),
    ("data=2 precision=fp16", "mlp"),
    ("data=4 precision=bf16", "judged"),
    ("data=2 zero=2", "judged"),
    ("data=2 zero=3", "in_parts"),
    ("data=2 tensor=2", "in_parts"),
    ("data=2 pipeline=2 microbatches=3", "mlp"),
    ("data=2 local_steps=8", "judged"),
    ("data=3 sync=server staleness=1", "mlp"),
    ("data=3 sync=server staleness=any damping=inverse", "mlp"),
    ("data=2 sync=server", "lazily"),
    ("data=3 sync=server servers=2 copies=2", "tabled"),
    ("data=4 sync=server hosts=2", "mlp"),
    ("data=2 local_steps=4 outer=nesterov sync=server", "mlp"),
    ("data=2 local_steps=4 outer=nesterov sync=server staleness=1", "mlp"),
    ("data=2 recompute=blocks", "mlp"),
    ("data=3", "scribbling"),
    ("data=2 zero=1", "scribbling"),
    ("data=2 zero=3", "scribbling"),
    ("data=2 local_steps=4", "scribbling"),
    ("data=2 sync=server", "scribbling"),
    ("data=2 offload=optimizer", "many"),
    ("data=2", "many"),
    ("data=2 zero=3", "many"),
    ("data=2 sync=server", "many"),
]


@pytest.mark.parametrize(
    ("plan", "recipe"),
    [*CLEAN[:1], *(pytest.param(*cell, marks=pytest.mark.full) for cell in CLEAN[1:])],
)
def test_clean_runs_are_not_suspected(start, plan: str, recipe: str) -> None:
    trained = start(recipe=recipe, plan=plan, pause=0).wait()
    assert trained.exit_code == 0, trained.errors
    for kind in ("replica-repaired", "replicas-differ", "state-corrupted"):
        assert not trained.events(kind)
