"""Deaths while rows of tables are on servers: the bits are those of one process all the same.

A batch that is computed again after a server died sees the rows that it saw first, also on a
server that has stepped on it already. Members 0 to 2 are the workers, 3 and 4 the servers.
"""

from pathlib import Path

import pytest

from shoal.elastic.control import send_request
from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import Trained, check_ledger, check_same

NUM_STEPS = 60
PLAN = "data=3 sync=server servers=2"
RECIPE = str(Path(__file__).with_name("tiny.py"))
QUICK = ["server.applied:kill:member=3", "step.exchanged:kill:member=1"]
FULL = [
    *("server.push:kill:member=4", "server.apply:kill:member=3", "server.unwritten:kill:member=4"),
    *("server.pull:kill:member=4", "step.begin:kill:member=0", "step.computed:kill:member=2"),
    "step.committed:kill:member=1",
]


@pytest.fixture(scope="module")
def alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """In one process, with as many pieces."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    plan = "data=1 accumulate=3"
    trained = faults.start(pool, f"{RECIPE}:tabled", run_dir, plan=plan, settings={"pause": 0})
    return trained.wait()


@pytest.mark.quick("server.applied:kill:member=3")
@pytest.mark.parametrize(
    "fault", [*QUICK, *(pytest.param(fault, marks=pytest.mark.full) for fault in FULL)]
)
def test_a_death_within_a_step(start, alone: Trained, fault: str) -> None:
    trained = start(f"{fault}:step=20", recipe="tabled", plan=PLAN).wait()
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)
    assert trained.result["recoveries"] == 1


@pytest.mark.full
@pytest.mark.parametrize("step", [20, pytest.param(0, marks=pytest.mark.full)])
def test_a_server_and_a_worker_at_once(start, alone: Trained, step: int) -> None:
    """The newcomer among workers has seen no row of the batch, which one server has stepped on."""
    armed = [f"server.apply:kill:member=4:step={step}", f"step.exchanged:kill:member=1:step={step}"]
    trained = start(*armed, recipe="tabled", plan=PLAN).wait()
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)


COPIED = [
    *("server.copied:kill:member=3", "server.kept:kill:member=4", "server.push:kill:member=3"),
    "step.exchanged:kill:member=1",
]


@pytest.mark.parametrize(
    "fault",
    [
        "server.applied:kill:member=3",
        *(pytest.param(fault, marks=pytest.mark.full) for fault in COPIED),
    ],
)
@pytest.mark.parametrize("recipe", ["tabled", pytest.param("lazily", marks=pytest.mark.full)])
def test_a_successor_takes_rows_from_a_copy(start, request, recipe: str, fault: str) -> None:
    """With the rows before the last step, which the others may ask for."""
    trained = start(f"{fault}:step=20", recipe=recipe, plan=f"{PLAN} copies=2").wait()
    check_same(trained, request.getfixturevalue("alone" if recipe == "tabled" else "lazily_alone"))
    assert trained.result["recoveries"] == 1
    assert not any(trained.run_dir.glob("servers/*")), "what is copied is not written down"


@pytest.mark.full
def test_a_server_that_was_copied_and_a_worker_at_once(start, alone: Trained) -> None:
    armed = ["server.apply:kill:member=4:step=20", "step.exchanged:kill:member=1:step=20"]
    trained = start(*armed, recipe="tabled", plan=f"{PLAN} copies=2").wait()
    check_same(trained, alone)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.parametrize(
    "plans",
    [
        ("data=1 accumulate=3", PLAN),
        pytest.param(
            ("data=3 sync=server servers=3", "data=1 accumulate=3"), marks=pytest.mark.full
        ),
    ],
)
def test_a_checkpoint_moves_to_other_plans(start, alone: Trained, plans: tuple[str, str]) -> None:
    """Rows, and what the optimizer keeps of them, as one tensor each."""
    first = start(recipe="tabled", plan=PLAN, options=("--set", "steps=20")).wait()
    for plan, steps in zip(plans, (40, NUM_STEPS), strict=True):
        options = ("--resume", "--set", f"steps={steps}")
        again = start(recipe="tabled", plan=plan, options=options, run_dir=first.run_dir)
        trained = again.wait()
        assert trained.exit_code == 0, trained.errors
    assert first.model() == alone.model()


@pytest.mark.full
def test_servers_come_and_go(start, alone: Trained) -> None:
    """Stripes move, with what the optimizer keeps of their rows."""
    training = start(recipe="tabled", pause=0.01, plan="data=2 sync=server pieces=3")
    training.wait_for_step(5)
    for size in ("servers=3", "data=3 servers=2", "data=1 servers=1"):
        answer = send_request(training.run_dir, resize=size)
        assert "refused" not in answer, answer
        assert answer["bytes"] > 1000 * 8 * 4 / 4
    check_same(training.wait(), alone)


@pytest.fixture(scope="module")
def lazily_alone(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run_dir = tmp_path_factory.mktemp("lazily") / "run"
    plan = "data=1 accumulate=3"
    trained = faults.start(pool, f"{RECIPE}:lazily", run_dir, plan=plan, settings={"pause": 0})
    return trained.wait()


@pytest.mark.parametrize(
    "fault",
    [
        "server.applied:kill:member=3",
        *(
            pytest.param(fault, marks=pytest.mark.full)
            for fault in ("server.push:kill:member=4", "step.exchanged:kill:member=1")
        ),
    ],
)
def test_a_death_with_a_lazy_table(start, lazily_alone: Trained, fault: str) -> None:
    trained = start(f"{fault}:step=20", recipe="lazily", plan=PLAN).wait()
    check_same(trained, lazily_alone)
    assert trained.result["recoveries"] == 1


def test_a_lazy_table_moves_to_another_number_of_servers(start, lazily_alone: Trained) -> None:
    """While the run goes on; and from a checkpoint, which has only the rows that were touched."""
    training = start(recipe="lazily", pause=0.01, plan="data=2 sync=server pieces=3")
    training.wait_for_step(5)
    for size in ("servers=3", "data=3 servers=2"):
        answer = send_request(training.run_dir, resize=size)
        assert "refused" not in answer, answer
    check_same(training.wait(), lazily_alone)


@pytest.mark.full
def test_a_checkpoint_of_a_lazy_table_moves_to_other_plans(start, lazily_alone: Trained) -> None:
    first = start(recipe="lazily", plan=PLAN, options=("--set", "steps=20")).wait()
    for plan, steps in (("data=1 accumulate=3", 40), ("data=3 sync=server servers=3", NUM_STEPS)):
        options = ("--resume", "--set", f"steps={steps}")
        again = start(recipe="lazily", plan=plan, options=options, run_dir=first.run_dir)
        trained = again.wait()
        assert trained.exit_code == 0, trained.errors
    assert first.model() == lazily_alone.model()


@pytest.mark.full
@pytest.mark.parametrize(
    "fault",
    [
        "server.applied:kill:member=4:step=20",
        pytest.param("step.computed:kill:member=1:step=20", marks=pytest.mark.full),
    ],
)
def test_out_of_lockstep_the_others_go_on(start, fault: str) -> None:
    trained = start(fault, recipe="tabled", plan=f"{PLAN} staleness=any").wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.result["recoveries"] == 1
    assert [record["step"] for record in trained.steps()] == list(range(1, NUM_STEPS + 1))
    losses = [record["loss"] for record in trained.steps()]
    assert sum(losses[-10:]) < sum(losses[:10]), "it did not learn"
