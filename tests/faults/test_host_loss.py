"""A host is lost, and another comes: the bits are those of a run that lost none.

Hosts are groups of processes of this machine (`tests/support/host_groups.py`); what members hold
is real, and is gone with them.
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.elastic.control import send_request
from shoal.faults import VARIABLE
from shoal.testing.ranks import Pool
from tests.faults.conftest import RECIPE
from tests.support.faults import Trained, Training, check_ledger, check_same, resize
from tests.support.host_groups import add, lose, run_on_groups
from tests.support.leaks import wait_until

NUM_STEPS = 60
Begin = Callable[..., Training]


@pytest.fixture
def begin(pool: Pool, tmp_path: Path) -> Begin:
    """Start the tiny run on three hosts."""

    def start(
        plan: str,
        *options: str,
        recipe: str = "mlp",
        faults: str = "",
        **settings: object,
    ) -> Training:
        run_dir = tmp_path / "run"
        words = ["train", f"{RECIPE}:{recipe}", "--plan", plan, "--run-dir", str(run_dir)]
        words += ["--json", "--on", "groups:3", *options]
        for name, value in ({"pause": 0.02} | settings).items():
            words += ["--set", f"{name}={value}"]
        command = pool.start(
            run_on_groups,
            "",
            words,
            environment={VARIABLE: faults},
            output=tmp_path / "run.out",
            errors=tmp_path / "run.err",
            directory=tmp_path,
        )
        return Training(command, run_dir)

    return start


def lose_in(training: Training, host: int, step: int = 15) -> None:
    training.wait_for_step(step)
    lose(training.run_dir, host)


def check_hosts(trained: Trained, lost: int) -> None:
    """After the loss no seat is on the host."""
    (told,) = [e for e in trained.events("host-lost") if e["host"] == lost]
    later = [e for e in trained.events("seat") if e["time"] > told["time"]]
    assert later and lost not in {e["host"] for e in later}
    assert told["step"] > 0 and told["how"] == f"host {lost} was silent for 1.0 s"


@pytest.mark.quick("data=3-data 3 -> 2")
@pytest.mark.parametrize(
    ("plan", "change"),
    [
        ("data=3", "data 3 -> 2"),
        ("data=6 sync=server servers=3 copies=2", "data 6 -> 4"),
    ],
)
def test_the_others_go_on_at_once(begin: Begin, undisturbed_under, plan: str, change: str) -> None:
    training = begin(plan)
    lose_in(training, 1)
    trained = training.wait()
    check_same(trained, undisturbed_under(plan))
    check_ledger(trained, NUM_STEPS)
    check_hosts(trained, 1)
    (told,) = trained.events("host-lost")
    assert told["then"] == f"the others go on: {change}"
    (resized,) = trained.events("resized")
    assert resized["change"] == change
    assert trained.result["steps_again"] == 0 and trained.result["recoveries"] >= 1
    before, after = trained.pids()
    num_left = len(after) if "server" not in plan else len(after) - 1
    assert len({*before.values()} & {*after.values()}) == num_left, "a survivor was replaced"
    assert "host 1 was silent for 1.0 s, after step" in trained.errors


@pytest.mark.parametrize(
    ("plan", "change", "recipe"),
    [
        ("data=3 zero=2 memory=apart", "data 3 -> 2", "judged"),
        pytest.param(
            "data=3 pipeline=2 microbatches=2", "data 3 -> 2", "judged", marks=pytest.mark.full
        ),
        pytest.param(
            "data=3 sync=server servers=3", "data 3 -> 2", "judged", marks=pytest.mark.full
        ),
    ],
)
def test_all_begin_again_from_a_checkpoint_with_fewer(
    begin: Begin, undisturbed_under, plan: str, change: str, recipe: str
) -> None:
    """What a lost host held is held by no other."""
    training = begin(plan, recipe=recipe, save=16)
    lose_in(training, 1, step=20)
    trained = training.wait()
    check_same(trained, undisturbed_under(plan, recipe))
    check_ledger(trained, NUM_STEPS)
    check_hosts(trained, 1)
    (told,) = trained.events("host-lost")
    assert told["then"] == f"all begin again from the newest checkpoint: {change}"
    assert trained.result["steps_again"] > 0
    assert [event["change"] for event in trained.events("resized")] == [change]
    before, after = trained.pids()
    assert not {*before.values()} & {*after.values()}


@pytest.mark.full
def test_a_run_under_local_steps_repeats_the_window_and_then_shrinks(begin: Begin) -> None:
    training = begin("data=3 local_steps=4 pieces=6")
    lose_in(training, 1)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    check_ledger(trained, NUM_STEPS)
    check_hosts(trained, 1)
    (resized,) = trained.events("resized")
    assert resized["change"] == "data 3 -> 2" and resized["step"] % 4 == 0
    last = [e for e in trained.events("seat") if e["generation"] == len(trained.pids()) - 1]
    assert {event["host"] for event in last} == {0, 2}


def test_a_host_that_comes_makes_the_run_whole_again(begin: Begin, undisturbed_under) -> None:
    training = begin("data=3", pause=0.04)
    lose_in(training, 1, step=10)
    training.wait_for_seats(1)
    add(training.run_dir, 3, 1)
    add(training.run_dir, 4, 2)
    training.wait_for_seats(2)
    why = "the hosts of this run have room for 5 ranks"
    assert "more than the 3 pieces" in send_request(training.run_dir, resize="data=6")["refused"]
    lose(training.run_dir, 2)
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3"))
    check_ledger(trained, NUM_STEPS)
    changes = [event["change"] for event in trained.events("resized")]
    assert changes == ["data 3 -> 2", "data 2 -> 3"], why
    assert [event["then"] for event in trained.events("host-added")] == ["the run grows"] * 2
    *_, last = trained.events("host-lost")
    assert last["then"] == "the others go on", "the host that stood by takes the seat"
    hosts = [e["host"] for e in trained.events("seat")][-3:]
    assert sorted(hosts) == [0, 3, 4]


@pytest.mark.full
def test_a_plan_without_a_smaller_size_waits_for_another_host(
    begin: Begin, undisturbed_under
) -> None:
    training = begin("data=1 pipeline=3 microbatches=3", recipe="judged", save=8)
    lose_in(training, 2, step=20)
    assert wait_until(lambda: bool(Trained(0, "", "", training.run_dir).events("host-lost")), 20)
    add(training.run_dir, 3, 1)
    trained = training.wait()
    check_same(trained, undisturbed_under("data=1 pipeline=3 microbatches=3", "judged"))
    check_ledger(trained, NUM_STEPS)
    assert trained.events("host-lost")[0]["then"] == "all wait for another host"
    assert trained.events("host-added")[0]["then"] == "all begin again from a checkpoint"
    assert not trained.events("resized")


@pytest.mark.full
@pytest.mark.parametrize(("save", "code"), [(8, 75), (1000, 1)])
def test_a_run_for_which_no_host_comes_says_so(begin: Begin, save: int, code: int) -> None:
    plan = "data=1 pipeline=3 microbatches=3"
    training = begin(plan, "--join-timeout", "1.5", recipe="judged", save=save)
    lose_in(training, 1, step=20)
    trained = training.wait()
    assert trained.exit_code == code, trained.errors
    assert "host 1 was silent for 1.0 s; no other host came within 1.5 s" in trained.errors
    assert "room for 2 of its 3 ranks" in trained.errors


@pytest.mark.full
def test_a_plan_that_restarts_grows_at_its_next_checkpoint(begin: Begin, undisturbed_under) -> None:
    training = begin("data=3 zero=1", recipe="judged", save=8, pause=0.04)
    lose_in(training, 1, step=10)
    training.wait_for_seats(1)
    add(training.run_dir, 3, 1)
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3 zero=1", "judged"))
    check_ledger(trained, NUM_STEPS)
    changes = [event["change"] for event in trained.events("resized")]
    assert changes == ["data 3 -> 2", "data 2 -> 3"]


@pytest.mark.full
def test_two_hosts_at_once(begin: Begin, undisturbed_under) -> None:
    training = begin("data=3")
    training.wait_for_step(15)
    lose(training.run_dir, 1)
    lose(training.run_dir, 2)
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3"))
    check_ledger(trained, NUM_STEPS)
    assert {event["host"] for event in trained.events("seat")[-1:]} == {0}


@pytest.mark.full
def test_a_resize_of_a_run_on_several_hosts(begin: Begin, undisturbed_under) -> None:
    training = begin("data=3 pieces=6", pause=0.02)
    training.wait_for_step(5)
    refused = send_request(training.run_dir, resize="data=4")["refused"]
    assert "the hosts of this run have room for 3 ranks" in refused
    resize(training, "data=2")
    add(training.run_dir, 3, 2)
    training.wait_for_step(20)
    assert resize(training, "data=4")["change"] == "data 2 -> 4"
    trained = training.wait()
    check_same(trained, undisturbed_under("data=3 pieces=6"))
    check_ledger(trained, NUM_STEPS)
