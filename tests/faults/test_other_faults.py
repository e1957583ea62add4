"""Faults other than a kill: told apart, with the right exit code, message and nothing left."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from shoal.cluster.local import LocalBackend
from shoal.elastic import supervisor
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.elastic.worker import prepare_script
from shoal.errors import RUN_AGAIN, Ended
from shoal.launch.supervised import run_supervised
from shoal.testing.ranks import Pool
from tests.support import faults
from tests.support.faults import (
    Trained,
    Training,
    check_ledger,
    check_recovered,
    check_same,
    check_survivors,
)
from tests.support.leaks import descendants, is_alive, wait_until

NUM_STEPS = 60
ECHOES = ("GroupLost", "onnection closed", "onnection reset", "Broken pipe")


def assert_alone(trained: Trained) -> None:
    """The other ranks' connection errors are not shown."""
    for echo in ECHOES:
        assert echo not in trained.errors, trained.errors


def test_a_rank_that_is_stopped_for_good_is_evicted(start, undisturbed) -> None:
    options = ("--heartbeat-timeout", "1")
    trained = start("step.computed:stop:member=1:step=20", options=options).wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_survivors(trained, [1])
    check_recovered(trained, {1: "silent"})


@pytest.mark.full
def test_a_rank_that_is_stopped_for_a_moment_is_kept(start, undisturbed) -> None:
    training = start(pause=0.01)
    training.wait_for_step(5)
    training.signal_rank(2, signal.SIGSTOP)
    time.sleep(0.5)
    training.signal_rank(2, signal.SIGCONT)
    trained = training.wait()
    check_same(trained, undisturbed)
    check_survivors(trained, [])


@pytest.mark.full
def test_the_recipes_own_error_ends_the_run(start) -> None:
    trained = start(recipe="raises").wait()
    assert trained.exit_code == 1
    assert "ValueError: sample 5 is broken" in trained.errors
    assert 'raise ValueError(f"sample {at_id} is broken")' in trained.errors
    assert "failed at step" in trained.last_words and "sample 5 is broken" in trained.last_words
    assert "Traceback" not in trained.last_words
    assert_alone(trained)
    assert not (trained.run_dir / "model.safetensors").exists()


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.full)])
def test_an_error_inside_the_loop_names_its_rank_and_step(start, rank: int) -> None:
    trained = start(f"step.computed:raise:member={rank}:step=20").wait()
    assert trained.exit_code == 1
    assert f"rank {rank} failed at step 21" in trained.last_words
    assert "a test broke this rank on purpose" in trained.last_words
    assert_alone(trained)


def test_leaving_early_with_code_0_is_not_success(start) -> None:
    trained = start("step.begin:exit:member=1:step=20").wait()
    assert trained.exit_code == 1
    assert "rank 1 exited with code 0 before the run was done" in trained.last_words
    assert_alone(trained)


@pytest.mark.full
def test_leaving_early_with_another_code_is_told_apart(start) -> None:
    trained = start(recipe="leaves", code=7).wait()
    assert trained.exit_code == 1
    assert "exited with code 7 before the run was done" in trained.last_words


@pytest.mark.full
@pytest.mark.parametrize(
    ("action", "name"),
    [("segfault", "SIGSEGV"), pytest.param("abort", "SIGABRT", marks=pytest.mark.full)],
)
def test_a_crash_is_repaired_and_told_by_its_signal(start, undisturbed, action, name) -> None:
    trained = start(f"step.computed:{action}:member=2:step=20").wait()
    check_same(trained, undisturbed)
    check_recovered(trained, {2: f"killed by {name}"})
    assert f"rank 2 was killed by {name}" in trained.errors


@pytest.mark.full
def test_the_same_step_failing_three_times_ends_the_run(start) -> None:
    # Members 3 and 4 are the spares that take the seat of rank 1.
    trained = start(*(f"step.computed:kill:member={m}:step=20" for m in (1, 3, 4))).wait()
    assert trained.exit_code == 1
    assert "step 21 failed 3 times" in trained.last_words
    assert "rank 1 was killed by SIGKILL" in trained.last_words
    assert_alone(trained)


@pytest.mark.quick("ctrl-c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_signal_stops_after_a_step_that_all_agree_on(start, undisturbed, number) -> None:
    training = start(pause=0.02)
    training.wait_for_step(5)
    training.command.send_signal(number)
    trained = training.wait()
    assert trained.exit_code == RUN_AGAIN
    steps = trained.steps()
    assert 5 <= len(steps) < NUM_STEPS
    assert [s["loss"] for s in steps] == [s["loss"] for s in undisturbed.steps()][: len(steps)]
    assert f"stopped after step {len(steps)}, as asked" in trained.last_words
    assert trained.result["steps"] == trained.result["checkpoint"] == len(steps)


def test_ctrl_c_twice_ends_at_once(start) -> None:
    training = start(pause=0.5)
    training.wait_for_seats()
    training.command.send_signal(signal.SIGINT)
    time.sleep(0.1)
    training.command.send_signal(signal.SIGINT)
    trained = training.wait(20)
    assert trained.exit_code == 130
    assert "interrupted twice" in trained.last_words


@pytest.mark.full
def test_ctrl_c_and_a_kill_together(start) -> None:
    training = start(pause=0.02)
    training.wait_for_step(5)
    training.signal_rank(1, signal.SIGKILL)
    training.command.send_signal(signal.SIGINT)
    trained = training.wait()
    assert trained.exit_code == RUN_AGAIN
    assert [s["step"] for s in trained.steps()] == list(range(1, len(trained.steps()) + 1))


@pytest.mark.parametrize("pause", [0.02, pytest.param(0.5, marks=pytest.mark.full)])
def test_killing_the_supervisor_leaves_no_process(start, pause: float) -> None:
    training = start(pause=pause)
    training.wait_for_seats()
    processes = training.processes()
    assert len(processes) >= 5  # supervisor, fork server, three ranks
    training.command.send_signal(signal.SIGKILL)
    assert training.wait().exit_code == -signal.SIGKILL
    assert wait_until(lambda: not any(map(is_alive, processes)), 10), "a process was left"


def test_killing_the_process_that_forks_ranks_ends_the_run(start) -> None:
    training = start(pause=0.02)
    training.wait_for_seats()
    supervisor = training.command.pid
    (fork_server,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    os.kill(int(fork_server), signal.SIGKILL)
    trained = training.wait()
    assert trained.exit_code == 1
    assert "ranks are forked from is gone: it was killed by SIGKILL" in trained.last_words


def test_a_slow_rank_is_named_and_given_less_work(pool: Pool, tmp_path: Path) -> None:
    """Whole pieces move to the fast one, and the bits stay those of a run without a slow rank."""
    recipe, plan = f"{Path(__file__).parent / 'tiny.py'}:one_slow", "data=2 pieces=6"
    slow = faults.start(pool, recipe, tmp_path / "slow", plan=plan).wait()
    settings = {"pause": 0.02, "slow": -1}
    even = faults.start(pool, recipe, tmp_path / "even", plan=plan, settings=settings).wait()
    check_same(slow, even)
    check_ledger(slow, 12)
    moved = slow.events("balanced")[0]
    assert moved["step"] <= 10
    assert (moved["before"], moved["rounds"]) == ([3, 3], [5, 1])
    assert list(moved["slow"]) == ["1"]


@pytest.mark.full
@pytest.mark.parametrize("plan", ["data=2", pytest.param("data=2 zero=2", marks=pytest.mark.full)])
def test_a_slow_rank_is_named_where_no_work_can_move(pool: Pool, tmp_path: Path, plan: str) -> None:
    recipe = f"{Path(__file__).parent / 'tiny.py'}:one_slow"
    slow = faults.start(pool, recipe, tmp_path / "slow", plan=plan).wait()
    (told,) = slow.events("slow")
    assert told["step"] <= 10 and list(told["slow"]) == ["1"]
    assert "pieces=" in told["advice"] and "replica 1 takes" in slow.errors
    settings = {"pause": 0.02, "slow": -1}
    even = faults.start(pool, recipe, tmp_path / "even", plan=plan, settings=settings).wait()
    assert not even.events("slow")


@pytest.mark.parametrize("whom", ["rank", pytest.param("loader", marks=pytest.mark.full)])
def test_a_loader_or_its_rank_is_killed(pool: Pool, tmp_path: Path, whom: str) -> None:
    """A loader is replaced alone; one of a dead rank goes with it and hides nothing from others."""
    recipe = f"{Path(__file__).parent / 'tiny.py'}:listed"
    plain = faults.start(pool, recipe, tmp_path / "plain", plan="data=2").wait()
    training = faults.start(pool, recipe, tmp_path / "run", plan="data=2", settings={"loaders": 2})
    training.wait_for_step(5)
    rank = training.wait_for_seats()[1]
    os.kill(rank if whom == "rank" else min(descendants(rank)), signal.SIGKILL)
    trained = training.wait()
    check_same(trained, plain)
    check_ledger(trained, 40)
    check_survivors(trained, [1] if whom == "rank" else [])


def check_named(trained: Trained, who: str) -> None:
    """Who hangs is named, with its line, and nobody else."""
    assert trained.exit_code == 128 + signal.SIGINT
    told = trained.events("busy")
    assert {event["rank"] for event in told} == ({1} if who == "rank 1" else {2})
    assert f"{who} has been busy for" in trained.errors and "never_end" in trained.errors
    assert all("tiny.py" in event["at"] for event in told)
    log = "server-000.log" if who == "server 0" else "rank-001.log"
    assert "in never_end" in (trained.run_dir / "logs" / log).read_text()


def interrupt_twice(training: Training) -> Trained:
    for _ in range(2):
        training.command.send_signal(signal.SIGINT)
        time.sleep(0.3)  # or the kernel makes one of them
    return training.wait()


def is_told(training: Training) -> bool:
    return wait_until(lambda: bool(faults.events(training.run_dir, "busy")), 30)


MORE = ("tensor=2", "data=2 zero=3", "data=2 local_steps=2", "data=2 sync=server staleness=any")


@pytest.mark.quick("model-data=2-rank 1")
@pytest.mark.parametrize(
    ("where", "plan", "who"),
    [
        ("model", "data=2", "rank 1"),
        ("model", "pipeline=2", "rank 1"),
        ("optimizer", "data=2 sync=server", "server 0"),
        *(pytest.param("model", plan, "rank 1", marks=pytest.mark.full) for plan in MORE),
    ],
)
def test_who_hangs_is_named_with_its_line_and_nobody_else(start, where, plan, who) -> None:
    training = start(recipe="sticking", plan=plan, where=where)
    assert is_told(training)
    time.sleep(2.0)  # in which others could be
    check_named(interrupt_twice(training), who)


@pytest.mark.full
def test_whom_a_stop_waits_for_is_named(start) -> None:
    training = start(recipe="sticking", plan="data=2", where="model", while_stopping=True)
    training.wait_for_step(4)
    training.command.send_signal(signal.SIGINT)
    assert is_told(training)
    check_named(interrupt_twice(training), "rank 1")


@pytest.mark.full
@pytest.mark.parametrize(
    ("plan", "last"),  # the step before the one that hangs: a pipeline has four losses a step
    [("data=2", 4), pytest.param("pipeline=2", 1, marks=pytest.mark.full)],
)
def test_a_run_that_is_told_to_stop_ends_whatever_its_ranks_do(start, plan: str, last: int) -> None:
    """One signal is enough, and who did not come is named, with its line."""
    training = start(
        recipe="sticking",
        plan=plan,
        where="model",
        while_stopping=True,
        options=("--stop-timeout", "2"),
    )
    training.wait_for_step(last)
    processes = training.processes()
    training.command.send_signal(signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 128 + signal.SIGTERM
    assert "it was asked to stop, and no work was done for" in trained.last_words
    assert "rank 1 at never_end" in trained.last_words and "rank 0 " not in trained.last_words
    assert "in never_end" in (trained.run_dir / "logs" / "rank-001.log").read_text()
    assert wait_until(lambda: not any(map(is_alive, processes)), 10)


@pytest.mark.full
def test_a_signal_to_all_processes_at_once_is_a_clean_stop(start, undisturbed) -> None:
    """As service managers and batch systems send it."""
    training = start(pause=0.02)
    training.wait_for_step(5)
    for pid in training.processes():
        os.kill(pid, signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == RUN_AGAIN, trained.errors
    assert trained.result["checkpoint"] == len(trained.steps()) < NUM_STEPS
    assert not trained.events("exited")


def supervise_and_hang(run_dir: str) -> int:
    """Whoever watches the run takes for ever, as a screen does whose pipe nobody reads."""
    supervisor.STUCK_S = 0.5
    directory = Path(run_dir)
    (directory / "logs").mkdir(parents=True)
    (directory / "sleeps.py").write_text("import time; time.sleep(100)")

    def watch(record: dict[str, Any]) -> None:
        (directory / "watched").touch()
        os.read(read, 1)

    read, _ = os.pipe()
    try:
        run_supervised(
            lambda: prepare_script(directory / "sleeps.py", ()),
            directory,
            backend=LocalBackend(),
            watch=watch,
            members=lambda _: Membership(1, 0, MembershipOptions(num_spares=0, scripts=True)),
        )
    except Ended as ended:
        return int(str(ended))
    return 0


def test_a_supervisor_that_cannot_speak_ends_too(pool: Pool, tmp_path: Path) -> None:
    logs = {"output": tmp_path / "out", "errors": tmp_path / "err", "directory": tmp_path}
    command = pool.start(supervise_and_hang, str(tmp_path / "run"), **logs)
    assert wait_until((tmp_path / "run" / "watched").exists, 30)
    processes = descendants(command.pid)
    command.send_signal(signal.SIGTERM)
    assert command.wait(20) == 128 + signal.SIGTERM
    assert wait_until(lambda: not any(map(is_alive, processes)), 10)
