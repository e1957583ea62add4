"""Ranks and servers that come and go while a run goes on: the bits stay those of one that did not.

The run has three pieces, so up to three ranks. Members 0 and 1 are the first ranks, and what is
forked for a new seat is the spare that stands by.
"""

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.elastic.control import send_request
from shoal.errors import UsageError
from tests.support.faults import (
    Trained,
    check_answers,
    check_ledger,
    check_same,
    check_sizes,
    resize,
    resize_while_one_is_killed,
)

NUM_STEPS = 60
SERVED = "sync=server servers=2"


def check(trained: Trained, undisturbed: Trained, plans: list[str]) -> None:
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_sizes(trained, plans, NUM_STEPS)


@pytest.mark.quick("replicas")
@pytest.mark.parametrize(
    "served",
    ["", SERVED, pytest.param(f"{SERVED} copies=2", marks=pytest.mark.full)],
    ids=["replicas", "servers", "copies"],
)
def test_ranks_come_and_go(start, undisturbed, served: str) -> None:
    training = start(pause=0.03, plan=f"data=2 pieces=3 {served}")
    training.wait_for_step(5)
    for size in ("data=3", "data=1"):
        told = resize(training, size)
        assert told["change"].endswith(size[-1]) and told["step"] > 5
    trained = training.wait()
    check(trained, undisturbed, [f"data={n} {served} pieces=3".replace("  ", " ") for n in (3, 1)])
    first, *_, last = trained.pids()
    assert first[0] == last[0] and len(trained.pids()) == 3, trained.events("lost")
    assert "resized at step" in trained.errors
    assert trained.result["recoveries"] == trained.result["steps_again"] == 0


@pytest.mark.full
@pytest.mark.parametrize(
    "bound", [pytest.param("staleness=2", marks=pytest.mark.full), "staleness=any"]
)
def test_ranks_come_and_go_out_of_lockstep(start, bound: str) -> None:
    training = start(pause=0.03, plan=f"data=2 pieces=3 {SERVED} {bound} damping=inverse")
    training.wait_for_step(5)
    for size in ("data=3", "data=2"):
        resize(training, size)
    trained = training.wait()
    rest = f"{SERVED} {bound} damping=inverse pieces=3"
    check_sizes(trained, [f"data={n} {rest}" for n in (3, 2)], NUM_STEPS)


def test_servers_come_and_go(start, undisturbed) -> None:
    training = start(pause=0.04, plan="data=2 sync=server pieces=3")
    training.wait_for_step(5)
    moved = []
    for size in ("servers=2", "data=3 servers=3", "data=1 servers=1"):
        moved.append(resize(training, size)["bytes"])
    trained = training.wait()
    plans = ["data=2 sync=server servers=2", "data=3 sync=server servers=3", "data=1 sync=server"]
    check(trained, undisturbed, [f"{plan} pieces=3" for plan in plans])
    num_bytes = 3 * 4 * (4 * 16 + 16 + 2 * 16 + 16 + 1)  # weights and two moments
    assert all(0 < some < num_bytes for some in moved), (moved, num_bytes)
    assert moved[0] > num_bytes / 3, "half of it goes to the second"


@pytest.mark.full
@pytest.mark.parametrize("bound", ["staleness=2", "staleness=any"])
def test_servers_come_and_go_out_of_lockstep(start, bound: str) -> None:
    rest = f"{bound} damping=inverse pieces=3"
    training = start(pause=0.03, plan=f"data=2 sync=server servers=2 {rest}")
    training.wait_for_step(5)
    for size in ("data=3 servers=3", "data=2 servers=1"):
        resize(training, size)
    trained = training.wait()
    sizes = ["data=3 sync=server servers=3", "data=2 sync=server"]
    check_sizes(trained, [f"{size} {rest}" for size in sizes], NUM_STEPS)
    assert trained.result["staleness"]["count"] > NUM_STEPS


@pytest.mark.full
def test_a_run_goes_on_from_a_checkpoint_of_another_size(start, undisturbed) -> None:
    training = start(pause=0.01, plan="data=2 pieces=3", save_every=10)
    training.wait_for_step(5)
    resize(training, "data=3")
    training.command.send_signal(signal.SIGTERM)
    stopped = training.wait()
    assert stopped.exit_code == 75, stopped.errors
    again = start(plan="data=1", options=("--resume",), run_dir=stopped.run_dir)
    assert again.wait().exit_code == 0
    assert stopped.model() == undisturbed.model()


def test_what_cannot_be_is_refused_and_changes_nothing(start, undisturbed, tmp_path: Path) -> None:
    training = start(pause=0.01, plan="data=2 pieces=3")
    training.wait_for_step(3)
    wrong = {
        "data=4": "more than the 3 pieces",
        "data=2": "that size already",
        "data=0": "data=0 is not possible",
        "servers=2": "this run has no servers",
        "tensor=2": "is no size",
        "data=auto": "Give a number",
        "": "is no size",
        "three": "not key=value",
    }
    for size, why in wrong.items():
        assert why in send_request(training.run_dir, resize=size)["refused"], size
    assert "is no size" in send_request(training.run_dir, nonsense="1")["refused"]
    check_same(training.wait(), undisturbed)
    with pytest.raises(UsageError, match="it is over"):
        send_request(training.run_dir, resize="data=1")
    with pytest.raises(UsageError, match="holds no run"):
        send_request(tmp_path / "nowhere", resize="data=1")


@pytest.mark.full
@pytest.mark.parametrize(
    "plan", ["data=2 zero=1 pieces=3", pytest.param("tensor=2", marks=pytest.mark.full)]
)
def test_a_plan_whose_ranks_hold_what_no_other_does_is_refused(start, plan: str) -> None:
    training = start(pause=0.02, plan=plan, steps=30)
    training.wait_for_step(1)
    assert "cannot be resized" in send_request(training.run_dir, resize="data=1")["refused"]
    assert training.wait().exit_code == 0


FAULTS = {  # where who is killed, and whether the run then has the new size
    "data=1 servers=1": [
        ("seat.meeting", 0, True),
        ("seat.meeting", 1, True),  # who leaves
        ("server.parting", 2, True),
        ("server.parting", 3, True),  # who leaves
        ("server.parted", 3, True),
        ("server.moving", 2, True),
        ("server.moved", 2, True),
    ],
    "data=3 servers=3": [
        ("seat.meeting", 1, True),
        ("server.parted", 2, True),
        ("seat.here", 4, True),  # a newcomer
        ("server.moving", 3, True),
        ("server.moving", 5, True),  # a newcomer
        ("server.moved", 5, True),
        ("seat.ready", 5, False),  # a newcomer
    ],
}
QUICK = {("server.parted", 3), ("server.moving", 2), ("seat.ready", 5)}


@pytest.mark.quick("data=1 servers=1-server.moving-2-True")
@pytest.mark.parametrize(
    ("size", "point", "member", "comes_through"),
    [
        pytest.param(size, *case, marks=[] if case[:2] in QUICK else [pytest.mark.full])
        for size, cases in FAULTS.items()
        for case in cases
    ],
)
def test_a_death_in_a_resize(
    start, undisturbed, size: str, point: str, member: int, comes_through: bool
) -> None:
    """Members 0 and 1 are the ranks, 2 and 3 the servers, 4 the spare."""
    training = start(f"{point}:kill:member={member}", pause=0.01, plan=f"data=2 pieces=3 {SERVED}")
    training.wait_for_step(5)
    answer = send_request(training.run_dir, resize=size)
    assert ("refused" not in answer) == comes_through, answer
    trained = training.wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    assert trained.result["recoveries"] == comes_through
    assert not list((trained.run_dir / "servers").glob("*")), "a journal was left"
    if comes_through:
        assert trained.result["plan"] == answer["plan"]
    else:
        assert "a newcomer was killed by SIGKILL" in answer["refused"]
        assert "the run keeps its size" in trained.errors


@pytest.mark.full
@pytest.mark.parametrize(
    ("served", "size"),
    [("", "data=1"), pytest.param(SERVED, "data=1 servers=1", marks=pytest.mark.full)],
)
def test_who_was_to_leave_stays_if_the_only_other_one_dies(
    start, undisturbed, served: str, size: str
) -> None:
    """What the rank held that died is held by one that has no seat any more."""
    training = start("size.taken:kill:member=0", pause=0.01, plan=f"data=2 pieces=3 {served}")
    training.wait_for_step(5)
    told = resize(training, size)
    trained = training.wait()
    check(trained, undisturbed, [told["plan"]])
    assert trained.result["steps_again"] == 0
    assert trained.pids()[-1][0] == trained.pids()[0][1]


@pytest.mark.full
def test_a_full_disk_leaves_the_size_and_the_next_attempt_is_free(start, undisturbed) -> None:
    training = start("server.parting:full:member=3", pause=0.01, plan=f"data=2 pieces=3 {SERVED}")
    training.wait_for_step(5)
    assert "No space left" in send_request(training.run_dir, resize="servers=1")["refused"]
    resize(training, "servers=1")
    check(training.wait(), undisturbed, ["data=2 sync=server pieces=3"])


@pytest.mark.full
def test_a_stop_in_a_resize_stops(start, undisturbed) -> None:
    """The newcomer never comes, so the resize waits until the run is over."""
    training = start("seat.ready:stop:member=4", pause=0.01, plan=f"data=2 pieces=3 {SERVED}")
    training.wait_for_step(5)
    answers: list[dict[str, Any]] = []
    caller = threading.Thread(
        target=lambda: answers.append(send_request(training.run_dir, resize="data=3"))
    )
    caller.start()
    training.wait_for_step(10)
    training.command.send_signal(signal.SIGTERM)
    trained = training.wait()
    caller.join()
    assert trained.exit_code == 75 and "over before" in answers[0]["refused"]
    again = start(plan="data=3", options=("--resume",), run_dir=trained.run_dir)
    assert again.wait().exit_code == 0
    assert trained.model() == undisturbed.model()


@pytest.mark.full
@pytest.mark.parametrize("attempt", range(20))
def test_kills_at_random_moments_of_resizes(start, undisturbed, draws, attempt: int) -> None:
    """Whoever is killed, each command is answered, and the bits are the same."""
    training = start(pause=0.02, plan=f"data=2 pieces=3 {SERVED}")
    training.wait_for_step(5)
    sizes = ["data=3 servers=1", "data=2 servers=3", "servers=2"]
    answers = resize_while_one_is_killed(training, sizes, draws, within_s=0.4)
    trained = training.wait()
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)
    check_answers(trained, answers)


@pytest.mark.full
def test_evaluations_saves_and_loaders_go_on(start) -> None:
    """All of them need every rank, and loaders are processes of a rank's own."""
    settings = {"pause": 0.01, "save_every": 2, "loaders": 1}
    steady = start(recipe="evaluated", plan="data=2 pieces=3", **settings).wait()
    training = start(recipe="evaluated", plan="data=2 pieces=3", **settings)
    training.wait_for_step(5)
    for size in ("data=3", "data=1", "data=2"):
        resize(training, size)
    trained = training.wait()
    check_same(trained, steady)
    told = [record.get("evaluation") for record in trained.steps()]
    assert told == [record.get("evaluation") for record in steady.steps()]
    assert not trained.events("save-failed")


@pytest.mark.full
def test_a_model_that_trains_on_one_rank_alone_takes_in_no_other(start) -> None:
    training = start(recipe="sparse", plan="data=1 pieces=2", pause=0.05)
    training.wait_for_step(1)
    assert "sparse" in send_request(training.run_dir, resize="data=2")["refused"]
    assert training.wait().exit_code == 0


@pytest.mark.full
def test_one_resize_at_a_time(start, undisturbed) -> None:
    """A newcomer takes its time, so the second command comes while the first waits."""
    training = start(pause=0.01, plan="data=2 pieces=3", options=("--spares", "0"))
    training.wait_for_step(5)
    answers: list[dict[str, Any]] = []
    callers = [
        threading.Thread(
            target=lambda: answers.append(send_request(training.run_dir, resize="data=3"))
        )
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sum("refused" not in answer for answer in answers) == 1, answers
    check(training.wait(), undisturbed, ["data=3 pieces=3"])


@pytest.mark.full
@pytest.mark.parametrize(
    "caller", ["gone", *(pytest.param(c, marks=pytest.mark.full) for c in ("silent", "noisy"))]
)
def test_a_caller_that_goes_away_or_says_nothing_does_no_harm(start, undisturbed, caller) -> None:
    training = start(pause=0.01, plan="data=2 pieces=3")
    training.wait_for_step(5)
    directory = os.open(training.run_dir, os.O_RDONLY)
    line = socket.socket(socket.AF_UNIX)
    line.connect(f"/proc/self/fd/{directory}/control")
    os.close(directory)
    assert (training.run_dir / "control").stat().st_mode & 0o077 == 0
    if caller == "noisy":
        line.sendall(b"x" * 200_000 + b"\n")
    if caller == "gone":
        line.sendall(b'{"resize": "data=3"}\n')
        line.close()
    trained = training.wait()
    line.close()
    check_same(trained, undisturbed)
    assert len(trained.events("resized")) == (caller == "gone")
