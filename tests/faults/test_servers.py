"""Deaths under parameter servers: nothing acknowledged is lost, nothing is applied twice.

In lockstep that is seen in the bits: they are those of the undisturbed run without servers. Members
0 to 2 are the workers, 3 and 4 the servers, and 5 the spare.
"""

import os
import random
import re
import signal
import time

import pytest

from tests.support.faults import Trained, check_ledger, check_recovered, check_same, check_survivors

NUM_STEPS = 60
LOCKSTEP = "data=3 sync=server servers=2"
SERVER_POINTS = [
    "server.push",
    "server.apply",
    "server.unwritten",
    "server.applied",
    "server.pull",
]
COPIED = f"{LOCKSTEP} copies=2"
COPY_POINTS = ["server.push", "server.apply", "server.unwritten", "server.applied"]
COPY_POINTS += ["server.copied", "server.keep", "server.kept"]  # around the acknowledgement
QUICK_COPIES = {(3, 3), (4, 4), (5, 3)}
QUICK = {(0, 4), (2, 3), (3, 4)}  # of these points, each with a server


def check(trained: Trained, undisturbed: Trained, replaced: list[int]) -> None:
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, replaced)
    if replaced:
        check_recovered(trained, dict.fromkeys(replaced, "killed by SIGKILL"))
    for event in trained.events("recovered"):
        assert event.get("server") == (event["rank"] - 3 if event["rank"] > 2 else None)
    assert not list((trained.run_dir / "servers").glob("*")), "a journal was left"


def test_servers_change_nothing(start, undisturbed: Trained) -> None:
    check(start(plan=LOCKSTEP).wait(), undisturbed, [])


@pytest.mark.quick("server.applied-4")
@pytest.mark.parametrize(
    ("point", "server"),
    [
        pytest.param(point, server, marks=[] if (i, server) in QUICK else [pytest.mark.full])
        for i, point in enumerate(SERVER_POINTS)
        for server in (3, 4)
    ],
)
def test_a_server_killed_within_a_step(start, undisturbed, point: str, server: int) -> None:
    trained = start(f"{point}:kill:member={server}:step=20", plan=LOCKSTEP).wait()
    check(trained, undisturbed, [server])
    assert f"server {server - 3} was killed by SIGKILL after step" in trained.errors


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        pytest.param(point, rank, marks=[] if i == rank == 1 else [pytest.mark.full])
        for i, point in enumerate(
            ["step.begin", "step.computed", "step.exchanged", "step.committed"]
        )
        for rank in range(3)
    ],
)
def test_a_worker_killed_within_a_step(start, undisturbed, point: str, rank: int) -> None:
    trained = start(f"{point}:kill:member={rank}:step=20", plan=LOCKSTEP).wait()
    check(trained, undisturbed, [rank])


@pytest.mark.full
@pytest.mark.parametrize(
    ("point", "member"),
    [("seat.here", 3), pytest.param("seat.forming", 1, marks=pytest.mark.full)],
)
def test_a_kill_while_the_first_group_forms(start, undisturbed, point: str, member: int) -> None:
    trained = start(f"{point}:kill:member={member}", plan=LOCKSTEP).wait()
    check(trained, undisturbed, [member])


@pytest.mark.full
@pytest.mark.parametrize(
    "point", [pytest.param("server.push", marks=pytest.mark.full), "server.applied"]
)
def test_a_server_and_a_worker_at_once(start, undisturbed, point: str) -> None:
    armed = [f"{point}:kill:member=4:step=20", "step.exchanged:kill:member=1:step=20"]
    trained = start(*armed, plan=LOCKSTEP).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.full
@pytest.mark.parametrize("num_kills", [1, 50])
@pytest.mark.parametrize("plan", [LOCKSTEP, pytest.param(COPIED, marks=pytest.mark.full)])
@pytest.mark.timeout(900)
def test_kills_at_random_moments(
    start, undisturbed, draws: random.Random, plan: str, num_kills: int
) -> None:
    for attempt in range(num_kills):
        training = start(pause=0.01, plan=plan)
        training.wait_for_seats()
        time.sleep(draws.uniform(0.0, 0.5))
        training.signal_rank(draws.randrange(5), signal.SIGKILL)
        trained = training.wait()
        check_same(trained, undisturbed)
        check_ledger(trained, NUM_STEPS)
        assert trained.result["recoveries"] == 1, f"kill {attempt}"


@pytest.mark.quick(
    "server.applied:kill:member=4:step=20-data=3 sync=server servers=2-staleness=any",
)
@pytest.mark.parametrize(
    "bound", [pytest.param("staleness=2", marks=pytest.mark.full), "staleness=any"]
)
@pytest.mark.parametrize("plan", [LOCKSTEP, pytest.param(COPIED, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "fault",
    ["step.computed:kill:member=1:step=20", "server.applied:kill:member=4:step=20"],
)
def test_out_of_lockstep_the_others_go_on(start, plan: str, bound: str, fault: str) -> None:
    trained = start(fault, plan=f"{plan} {bound}").wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.result["recoveries"] == 1
    assert trained.result["staleness"]["count"] > 0 and "staleness: " in trained.errors
    assert [record["step"] for record in trained.steps()] == list(range(1, NUM_STEPS + 1))


AHEAD = [
    ("staleness=2", 60),  # it waits until it may begin the next batch
    ("staleness=any", 20),  # until all are where the state is evaluated and saved
    ("staleness=any", 60),  # until all are at the end
    ("staleness=1 local_steps=4", 60),
    ("staleness=any local_steps=4 outer=nesterov", 20),
]


@pytest.mark.quick("staleness=any-20-1")
@pytest.mark.parametrize("num_dead", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("bound", "every"), AHEAD)
def test_one_that_dies_ahead_of_the_others_does_not_keep_them(
    start, bound: str, every: int, num_dead: int
) -> None:
    """Rank 1 stands still until the others wait for it; of those, some die."""
    plan, options = f"{LOCKSTEP} {bound}", ("--heartbeat-timeout", "60", "--spares", "2")
    training = start(recipe="judged", plan=plan, options=options, pause=0.01, save=every)
    training.wait_for_step(5)
    training.signal_rank(1, signal.SIGSTOP)
    time.sleep(2.0)
    for rank in (2, 0)[:num_dead]:
        training.signal_rank(rank, signal.SIGKILL)
    time.sleep(0.5)
    training.signal_rank(1, signal.SIGCONT)
    trained = training.wait()
    assert trained.exit_code == 0, trained.errors
    assert trained.result["recoveries"] == num_dead
    assert [record["step"] for record in trained.steps()] == list(range(1, NUM_STEPS + 1))
    assert {every, NUM_STEPS} <= {event["step"] for event in trained.events("saved")}
    most = bound.split()[0].removeprefix("staleness=")
    assert most == "any" or trained.result["staleness"]["largest"] <= int(most)


@pytest.mark.parametrize(
    "bound", ["staleness=2", pytest.param("staleness=any", marks=pytest.mark.full)]
)
def test_a_stop_out_of_lockstep_is_after_one_step_for_all(start, bound: str) -> None:
    training = start(pause=0.02, plan=f"{LOCKSTEP} {bound}")
    training.wait_for_step(5)
    os.kill(training.command.pid, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 75, trained.errors
    step = trained.result["checkpoint"]
    assert step == trained.result["steps"] < NUM_STEPS
    again = start(plan=LOCKSTEP, options=("--resume",), run_dir=trained.run_dir)
    assert again.wait().exit_code == 0
    steps = [record["step"] for record in trained.steps()]
    assert steps == list(range(1, NUM_STEPS + 1))


@pytest.mark.quick("one")
@pytest.mark.parametrize("plan", [LOCKSTEP, "data=4 sync=server hosts=2"], ids=["one", "host"])
def test_a_server_that_is_told_to_end_lets_all_stop_and_save(start, plan: str) -> None:
    """The last one: in a plan with hosts it is a host's own."""
    training = start(pause=0.02, plan=plan)
    training.wait_for_step(5)
    training.signal_rank(4 if plan == LOCKSTEP else 6, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 75, trained.errors
    assert 5 <= trained.result["checkpoint"] == trained.result["steps"] < NUM_STEPS


def test_the_secret_of_a_run_is_in_none_of_its_files(start, tmp_path) -> None:
    known = tmp_path / "known"
    armed = ["server.applied:kill:member=4:step=5", "server.push:kill:member=3:step=8"]
    training = start(*armed, recipe="telling", plan=LOCKSTEP, pause=0.02, file=str(known))
    training.wait_for_step(15)
    secret = known.read_text().partition(":")[2].encode()
    folder = training.run_dir / "servers"
    assert folder.stat().st_mode & 0o777 == 0o700
    files = [path for path in training.run_dir.rglob("*") if path.is_file()]
    assert len(secret) == 32 and any(folder in path.parents for path in files)
    assert not [path for path in files if secret in path.read_bytes()]
    assert training.wait().exit_code == 0


@pytest.mark.full
def test_what_a_successor_does_again_may_take_longer_than_a_group_has_to_form(start) -> None:
    """Twenty steps of 0.4 s, where nobody may be missing for 5 s."""
    options = ("--form-timeout", "5")
    armed = "server.applied:kill:member=4:step=20"
    trained = start(armed, recipe="dawdling", plan=LOCKSTEP, options=options).wait()
    assert trained.exit_code == 0, trained.errors
    (told,) = [e["text"] for e in trained.events("warning") if "does not work yet" in e["text"]]
    assert "After 5 s" in told and "server 1" in told
    check_recovered(trained, {4: "killed by SIGKILL"})
    check_survivors(trained, [4])


@pytest.mark.full
def test_a_death_in_the_first_step_is_repaired(start, undisturbed) -> None:
    """Servers are a step ahead of all workers, who hold the first weights."""
    trained = start("server.applied:kill:member=4:step=0", plan=LOCKSTEP).wait()
    check(trained, undisturbed, [4])


@pytest.mark.full
def test_all_servers_at_once(start, undisturbed) -> None:
    armed = [f"server.apply:kill:member={server}:step=20" for server in (3, 4)]
    check(start(*armed, plan=LOCKSTEP).wait(), undisturbed, [3, 4])


def test_when_every_worker_is_lost_the_checkpoint_is_what_is_left(start) -> None:
    # Long after the first save began: on a busy machine it takes a while.
    armed = [f"step.exchanged:kill:member={rank}:step=50" for rank in range(3)]
    trained = start(*armed, plan=LOCKSTEP, options=("--set", "save_every=10")).wait()
    assert trained.exit_code != 0
    assert "--resume" in trained.last_words
    # The step was applied or not when they died.
    assert re.search("failed at step 5[01]: Every worker was lost", trained.last_words)
    assert "The newest checkpoint is of step " in trained.last_words
    assert not (trained.run_dir / "servers").exists(), "a journal was left"


def test_a_server_that_stands_still_is_replaced(start, undisturbed) -> None:
    options = ("--heartbeat-timeout", "1")
    trained = start("server.apply:stop:member=3:step=20", plan=LOCKSTEP, options=options).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, [3])


@pytest.mark.full
def test_copies_change_nothing(start, undisturbed: Trained) -> None:
    trained = start(plan=COPIED).wait()
    check(trained, undisturbed, [])
    assert not (trained.run_dir / "servers").exists(), "copies need no journal"


@pytest.mark.quick("server.applied-3")
@pytest.mark.parametrize(
    ("point", "server"),
    [
        pytest.param(point, server, marks=[] if (i, server) in QUICK_COPIES else [pytest.mark.full])
        for i, point in enumerate(COPY_POINTS)
        for server in (3, 4)
    ],
)
def test_a_server_with_a_copy_killed_within_a_step(start, undisturbed, point, server) -> None:
    trained = start(f"{point}:kill:member={server}:step=20", plan=COPIED).wait()
    check(trained, undisturbed, [server])


@pytest.mark.full
@pytest.mark.parametrize("point", ["server.apply", "server.keep"])
def test_a_server_with_a_copy_that_stands_still_is_replaced(start, undisturbed, point) -> None:
    """Its neighbour can answer nobody meanwhile."""
    options = ("--heartbeat-timeout", "1")
    trained = start(f"{point}:stop:member=3:step=20", plan=COPIED, options=options).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, [3])


@pytest.mark.full
def test_servers_killed_one_after_another(start, undisturbed) -> None:
    """The second one's copy is on the successor of the first."""
    armed = ["server.apply:kill:member=3:step=20", "server.applied:kill:member=4:step=25"]
    check(start(*armed, plan=COPIED).wait(), undisturbed, [3, 4])


def test_both_holders_of_a_shard_at_once_end_the_run_with_a_way_out(start) -> None:
    armed = [f"server.apply:kill:member={server}:step=20" for server in (3, 4)]
    trained = start(*armed, plan=COPIED, options=("--set", "save_every=10")).wait()
    assert trained.exit_code != 0
    assert "lost" in trained.last_words and "--resume" in trained.last_words
    assert "The newest checkpoint is of step " in trained.last_words


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_worker_that_is_lost_after_the_last_step(start, undisturbed, rank: int) -> None:
    """Its successor hears of the last step, and then ends with the others."""
    trained = start(f"run.ending:kill:member={rank}", plan=COPIED).wait()
    check(trained, undisturbed, [rank])
