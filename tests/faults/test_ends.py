"""Terminals, disks and directories that vanish under a run: it ends as it should, and says why."""

import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shoal.checkpoint.load import CheckpointReader
from shoal.errors import RUN_AGAIN
from shoal.events.metrics_writer import last_recorded_step
from shoal.storage.store import DirectoryStore
from tests.support.faults import Trained
from tests.support.leaks import is_alive, wait_until

RECIPE = f"{Path(__file__).with_name('tiny.py')}:mlp"
NUM_STEPS = 60


def command(run_dir: Path, pause: float = 0.02) -> list[str]:
    words = ["train", RECIPE, "--plan", "data=2", "--run-dir", str(run_dir)]
    return [sys.executable, "-m", "shoal", *words, "--set", f"pause={pause}"]


def in_terminal(words: list[str], ignores: bool) -> tuple[int, int]:
    """Start a command as the leader of a terminal of its own; its pid, and the terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        if ignores:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
        os.execv(words[0], words)
    return pid, terminal


@pytest.mark.quick("plain")
@pytest.mark.parametrize("ignores", [False, True], ids=["plain", "nohup"])
def test_a_terminal_that_closes_stops_a_run_unless_it_was_told_otherwise(
    tmp_path: Path, ignores: bool
) -> None:
    run_dir = tmp_path / "run"
    pause = 0.02 if ignores else 0.3  # on a busy machine, too, it is not done before it is told
    pid, terminal = in_terminal(command(run_dir, pause), ignores)
    threading.Thread(target=drain, args=(terminal, run_dir), daemon=True).start()
    assert wait_until(lambda: last_recorded_step(run_dir / "metrics.jsonl") >= 3, 50)
    _, status = os.waitpid(pid, 0)
    steps = last_recorded_step(run_dir / "metrics.jsonl")
    names = DirectoryStore(run_dir / "checkpoints").names()
    assert names == [f"step-{steps:08d}"]
    if ignores:
        assert os.waitstatus_to_exitcode(status) == 0 and steps == NUM_STEPS
    else:
        assert os.waitstatus_to_exitcode(status) == RUN_AGAIN and steps < NUM_STEPS


def drain(terminal: int, run_dir: Path) -> None:
    """Read a terminal until the run has made some steps, and close it then."""
    while last_recorded_step(run_dir / "metrics.jsonl") < 3:
        try:
            os.read(terminal, 4096)
        except OSError:  # the command has ended
            break
    os.close(terminal)


@pytest.mark.full
def test_a_reader_of_the_screen_that_leaves_ends_no_run(tmp_path: Path) -> None:
    """`shoal train 2>&1 | head -1`."""
    line = f"set -o pipefail; {' '.join(command(tmp_path / 'run', 0.0))} 2>&1 | head -1"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    assert last_recorded_step(tmp_path / "run" / "metrics.jsonl") == NUM_STEPS


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place))
    try:
        yield place
    finally:
        while subprocess.run(["umount", place], capture_output=True).returncode == 0:
            continue


def mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"needs to mount a disk: {done.stderr.strip()}")


def fill(disk: Path) -> None:
    with open(disk / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def turn_read_only(disk: Path) -> None:
    """For whatever is opened from now on."""
    mount("--bind", str(disk), str(disk))
    mount("-o", "remount,bind,ro", str(disk))


@pytest.fixture
def rescued() -> Iterator[Callable[[Trained], Path]]:
    """Where the last step of a run is instead; removed afterwards."""
    found: list[Path] = []

    def look(trained: Trained) -> Path:
        found.append(Path(trained.result["rescued"]))
        assert str(found[-1]) in trained.last_words
        CheckpointReader(DirectoryStore(found[-1].parent), found[-1].name).verify()
        return found[-1]

    yield look
    for path in found:
        shutil.rmtree(path.parent)


@pytest.mark.quick("full")
@pytest.mark.parametrize(
    ("breaks", "plan", "told"),
    [
        (turn_read_only, "data=3", "Read-only file system"),
        (fill, "data=3", "No space left on device"),
        *(
            pytest.param(turn_read_only, plan, "Read-only", marks=pytest.mark.full)
            for plan in ("data=2 zero=3", "pipeline=2", "data=2 sync=server servers=2")
        ),
    ],
    ids=["read-only", "full", "zero", "pipeline", "servers"],
)
def test_a_disk_that_breaks_costs_no_result(
    start, disk: Path, tmp_path: Path, rescued, breaks, plan: str, told: str
) -> None:
    """The last step is saved elsewhere, and can be gone on from."""
    training = start(run_dir=disk, pause=0.02, plan=plan)
    training.wait_for_step(3)
    breaks(disk)
    trained = training.wait()
    assert trained.exit_code == 1 and "Traceback" not in trained.errors
    assert f"Step {NUM_STEPS}, the last, could not be saved" in trained.last_words
    assert told in trained.last_words and "No such file" not in trained.errors
    place = rescued(trained)
    options = ("--checkpoints", str(place.parent), "--resume")
    again = start(run_dir=tmp_path / "again", pause=0.02, plan=plan, options=options).wait()
    assert again.exit_code == 0 and f"going on from step {NUM_STEPS}" in again.errors


@pytest.mark.full
def test_a_stop_that_cannot_be_saved_says_where_it_is(start, disk: Path, rescued) -> None:
    training = start(run_dir=disk, pause=0.02)
    training.wait_for_step(3)
    turn_read_only(disk)
    training.command.send_signal(signal.SIGTERM)
    trained = training.wait()
    assert trained.exit_code == 128 + signal.SIGTERM
    assert "It could not be saved" in trained.last_words and "Read-only" in trained.last_words
    assert rescued(trained).name == f"step-{trained.result['steps']:08d}"


def test_a_death_on_a_disk_that_turned_read_only_is_repaired(start, disk: Path, rescued) -> None:
    """A newcomer can open neither its log nor the record."""
    training = start(run_dir=disk, pause=0.02, plan="data=2")
    training.wait_for_step(3)
    turn_read_only(disk)
    training.signal_rank(0, signal.SIGKILL)
    trained = training.wait()
    assert trained.exit_code == 1 and trained.result["steps"] == NUM_STEPS, trained.errors
    assert trained.result["recoveries"] == 1 and "Traceback" not in trained.errors
    rescued(trained)


def test_a_run_directory_that_is_moved_away_is_noticed(start, tmp_path: Path, undisturbed) -> None:
    training = start(run_dir=tmp_path / "here", pause=0.02)
    training.wait_for_step(3)
    (tmp_path / "here").rename(tmp_path / "there")
    trained = training.wait()
    assert trained.exit_code == trained.result["exit_code"] == 1
    assert f"was moved to {tmp_path / 'there'} while the run went on" in trained.last_words
    assert trained.model() == undisturbed.model(), "nothing is lost"
    assert DirectoryStore(tmp_path / "here" / "checkpoints").names() == [f"step-{NUM_STEPS:08d}"]
    assert last_recorded_step(tmp_path / "there" / "metrics.jsonl") == NUM_STEPS
    assert not (tmp_path / "there" / "owner").exists()


@pytest.mark.full
def test_a_run_directory_that_is_removed_is_noticed(start, tmp_path: Path, undisturbed) -> None:
    training = start(run_dir=tmp_path / "here", pause=0.02)
    training.wait_for_step(3)
    shutil.rmtree(tmp_path / "here")
    trained = training.wait()
    assert trained.exit_code == 1 and "was removed while the run went on" in trained.last_words
    assert trained.model() == undisturbed.model()


@pytest.mark.parametrize(
    ("plan", "call", "who"),
    [
        ("data=3", 3, "rank 1"),
        pytest.param(
            "data=2 pipeline=2 microbatches=2", 5, "rank 1, rank 3", marks=pytest.mark.full
        ),
    ],
)
def test_who_made_a_loss_that_is_not_finite_is_named(start, plan: str, call: int, who: str) -> None:
    trained = start(recipe="poisoned", plan=plan, call=call).wait()
    assert trained.exit_code == 1, trained.errors
    assert f"{who} failed at step 3: Step 3 is not finite: its loss is nan" in trained.last_words
    ranks = who.replace("rank ", "")
    assert f" on rank {ranks}. Look at those samples" in trained.last_words


@pytest.mark.full
def test_a_signal_three_times_ends_like_two(start) -> None:
    training = start(pause=0.5)
    training.wait_for_seats()
    for _ in range(3):
        training.command.send_signal(signal.SIGINT)
        wait_until(lambda: False, 0.2)  # or the kernel makes one of them
    trained = training.wait()
    assert trained.exit_code == 128 + signal.SIGINT and "Traceback" not in trained.errors


def test_a_quit_leaves_no_process(start) -> None:
    training = start(pause=0.5)
    training.wait_for_step(2)
    processes = training.processes()
    training.command.send_signal(signal.SIGQUIT)
    assert training.command.wait() in (-signal.SIGQUIT, 128 + signal.SIGQUIT)
    assert wait_until(lambda: not any(map(is_alive, processes)), 10)


@pytest.mark.quick("gone")
@pytest.mark.parametrize(
    ("before", "words", "told"),
    [
        ("true", f"--run-dir {'x' * 300}", "File name too long"),
        ("rmdir $PWD", "", "No such file or directory"),
    ],
    ids=["long", "gone"],
)
def test_places_that_cannot_be_are_refused_in_a_sentence(
    tmp_path: Path, before: str, words: str, told: str
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    line = f"{before}; exec {sys.executable} -m shoal train {RECIPE} {words}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=here, capture_output=True, text=True, timeout=100
    )
    assert done.returncode in (1, 2), done.stderr
    assert "Traceback" not in done.stderr and told in done.stderr
