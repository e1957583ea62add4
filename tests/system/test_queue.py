"""submit, status, logs, stop, queue: real runs in the queue of this machine, and plain ones."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from shoal.cli.main import run_here
from shoal.cluster.engine import JobState
from shoal.cluster.local_queue.engine import LocalQueue
from shoal.cluster.local_queue.job_process import JobEnd, JobFiles
from shoal.cluster.local_queue.journal import JobRequeued, JobStarted, QueueJournal, read_journal
from shoal.cluster.local_queue.protocol import JOURNAL, LOCK, SOCKET, connect, queue_directory
from shoal.storage.decoding import encode_json
from shoal.storage.run_dir import owner_of
from shoal.system.identity import ProcessIdentity, boot_id
from tests.support.leaks import wait_until

HERE = Path(__file__).parent
PATIENT, STUCK, FAILS = (f"{HERE / 'queued.py'}:{name}" for name in ("patient", "stuck", "fails"))
LINE = f"{HERE / 'tiny.py'}:line"
LIMIT_S = 200.0  # a busy machine may take long; none is judged by it
ENDED = ("stopped", "done", "failed")
pytestmark = pytest.mark.timeout(500)


class Said(NamedTuple):
    """What a command printed, and how it ended."""

    exit_code: int
    output: str
    errors: str

    @property
    def result(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.output.splitlines()[-1])
        return found


class Queue:
    """The queue of a test, in a state directory of its own."""

    def __init__(self, path: Path):
        self.path, self.engine = path, LocalQueue()

    def shoal(self, *words: str) -> Said:
        command = [sys.executable, "-m", "shoal", *words]
        done = subprocess.run(
            command, cwd=self.path, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        return Said(done.returncode, done.stdout, done.stderr)

    def shoal_here(self, *words: str) -> Said:
        """The same in this process, which spares the start of another."""
        output, errors = io.StringIO(), io.StringIO()
        with contextlib.chdir(self.path), redirect_stdout(output), redirect_stderr(errors):
            code = run_here(list(words))
        return Said(code, output.getvalue(), errors.getvalue())

    def submit(self, recipe: str, *words: str) -> str:
        said = self.shoal("submit", recipe, *words, "--json")
        assert said.exit_code == 0, said.errors
        job: str = said.result["job"]
        return job

    def state(self, job: str) -> JobState:
        return self.engine.state(job.partition(":")[2])

    def wait(self, job: str, *states: str) -> JobState:
        assert wait_until(lambda: self.state(job).state in (*states, *ENDED), LIMIT_S, 0.1), job
        found = self.state(job)
        assert found.state in states, (found, self.printed(job))
        return found

    def printed(self, job: str) -> list[str]:
        return list(self.engine.output(job.partition(":")[2], follow=False))

    def wait_for_step(self, job: str) -> None:
        metrics = Path(self.state(job).run_dir) / "metrics.jsonl"
        self.wait(job, "running")
        assert wait_until(lambda: metrics.exists() and bool(metrics.read_bytes()), LIMIT_S), job

    def events(self, job: str, kind: str) -> list[dict[str, Any]]:
        content = (Path(self.state(job).run_dir) / "events.jsonl").read_text()
        found = [json.loads(line) for line in content.splitlines()]
        return [event for event in found if event["event"] == kind]

    def hurry(self) -> None:
        (self.path / "hurry").touch()

    def agent(self) -> int:
        """The process that holds the lock of the queue."""
        lock = queue_directory() / LOCK
        for link in Path("/proc").glob("[0-9]*/fd/*"):
            try:
                if link.samefile(lock):
                    return int(link.parts[2])
            except OSError:
                continue
        raise AssertionError("there is no agent")

    def kill_agent(self) -> None:
        agent = self.agent()
        os.kill(agent, signal.SIGKILL)
        assert wait_until(lambda: not _runs(agent), 20.0)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Queue]:
    monkeypatch.setenv("SHOAL_STATE_DIR", str(tmp_path / "state"))
    made = Queue(tmp_path)
    yield made
    if not (queue_directory() / JOURNAL).exists():
        return
    for job in made.engine.jobs():
        if job.state not in ENDED:
            made.engine.stop(job.job.partition(":")[2], now=True)
    assert wait_until(lambda: not read_journal(queue_directory() / JOURNAL).active, LIMIT_S)
    assert wait_until(_is_quiet, LIMIT_S)


def _is_quiet() -> bool:
    """Whether no agent listens; one that was killed leaves its socket."""
    connection = connect(queue_directory())
    if connection is not None:
        connection.close()
    return connection is None


def test_a_job_from_its_submission_to_its_end(queue: Queue) -> None:
    job = queue.submit(LINE, "--plan", "data=1", "--set", "steps=3", "--run-dir", "mine")
    assert job == "local:1"
    again = queue.shoal_here("submit", LINE, "--plan", "data=1", "--run-dir", "mine")
    assert again.exit_code == 2 and "mine belongs to the job local:1" in again.errors
    found = queue.wait(job, "done")
    assert found.exit_code == 0 and found.run_dir == str(queue.path / "mine")
    status = queue.shoal_here("status", "mine", "--json").result
    assert (status["job"], status["state"], status["exit_code"]) == ("local:1", "done", 0)
    assert (status["step"], status["steps"], status["generation"]) == (3, 3, 0)
    assert status["loss"] > 0 and 0 < status["goodput"] <= 1
    assert [member["rank"] for member in status["members"]] == [0]
    assert status["checkpoint"] == "step-00000003"
    assert "done: 3 steps" in queue.shoal_here("logs", job).output
    resize = queue.shoal_here("resize", job, "data=1")
    assert resize.exit_code == 2 and "mine cannot be reached" in resize.errors, resize
    lines = queue.shoal_here("logs", job, "--json").result["lines"]
    assert "done: 3 steps" in "\n".join(lines)
    assert wait_until(lambda: not (queue_directory() / SOCKET).exists(), 20.0)
    listed = queue.shoal_here("queue", "--json").result
    assert listed == {"jobs": [], "exit_code": 0}  # of the journal
    assert not (queue_directory() / SOCKET).exists()


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("status", "local:7"), "There is no job local:7"),
        (("status", "nothing"), "There is no job nothing"),
        (("status", "slurmy:7"), "There is no job slurmy:7"),
        (("logs", "."), "holds no run"),
        (("stop", "local:x"), "There is no job local:x"),
        (("resize", "local:7", "data=2"), "There is no job local:7"),
        (("resize", "nothing", "data=2"), "There is no job nothing"),
        (("queue", "--on", "lokal"), "Did you mean 'local'?"),
        (("queue", "--limit", "core=1"), "has no limit 'core'"),
        (("queue", "--limit", "cores=x"), "a limit is a whole number from 1 on"),
        (("submit", LINE, "--on", "lokal"), "Did you mean 'local'?"),
        (("submit", LINE, "--on", "local:here"), "takes no address"),
        (("submit", LINE, "--nodes", "2"), "of one machine"),
        (("submit", LINE, "--time", "soon"), "is no time"),
        (("submit", LINE, "--plan", "data=0"), "data=0"),
        (("submit", LINE, "--keep", "all"), "says nothing of what to keep"),
        (("submit", LINE, "--track", "paper"), "paper"),
        (("submit", LINE, "--replay", "0.5"), "--replay has no effect without --new-data"),
        (("submit", "nothing.py:line"), "There is no file nothing.py"),
        (("submit", "line"), "names no recipe"),
    ],
)
def test_what_is_refused(queue: Queue, words: tuple[str, ...], why: str) -> None:
    said = queue.shoal_here(*words)
    assert said.exit_code == 2 and why in said.errors, said
    assert not list(queue.path.glob("runs/*"))


def test_what_would_be_submitted_is_printed_and_nothing_is_made(queue: Queue) -> None:
    words = ("--plan", "data=2", "--set", "pause=0.5", "--keep", "last=1", "--time", "1:30")
    said = queue.shoal_here("submit", LINE, *words, "--priority", "4", "--dry-run")
    assert said.exit_code == 0, said.errors
    assert "2 cores, priority 4, at most 90 s" in said.output
    assert f"{LINE} --plan data=2 --set pause=0.5 --keep last=1 --run-dir" in said.output
    assert "--resume" in said.output and not list(queue.path.iterdir())
    said = queue.shoal_here("submit", LINE, *words, "--dry-run", "--json")
    assert "2 cores" in said.result["would_submit"] and said.result["exit_code"] == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_another_users_directory_is_refused(queue: Queue) -> None:
    (queue.path / "state").mkdir()
    os.chown(queue.path / "state", 12345, 12345)
    said = queue.shoal_here("submit", LINE, "--plan", "data=1")
    assert said.exit_code == 2 and "belongs to user 12345" in said.errors
    assert not list(queue.path.glob("runs/*"))
    os.chown(queue.path / "state", 0, 0)


def test_a_directory_that_others_may_enter_is_refused(queue: Queue) -> None:
    queue_directory().mkdir(parents=True)
    queue_directory().chmod(0o755)
    said = queue.shoal_here("queue")
    assert said.exit_code == 2 and "can be entered by others" in said.errors


def test_a_process_that_no_journal_knows_does_nothing(tmp_path: Path) -> None:
    end = tmp_path / "1.end"
    command = [sys.executable, "-m", "shoal.cli.job", str(end), "0", LINE, "--run-dir", "mine"]
    subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, check=True)
    assert JobFiles(tmp_path, 1).read_end() == JobEnd(None, has_begun=False)
    assert not (tmp_path / "mine").exists()


@pytest.mark.full
def test_jobs_take_turns_by_priority(queue: Queue) -> None:
    assert queue.shoal("queue", "--limit", "cores=1", "--limit", "waiting=2").exit_code == 0
    first = queue.submit(PATIENT, "--plan", "data=1")
    second = queue.submit(LINE, "--plan", "data=1")
    third = queue.submit(LINE, "--plan", "data=1", "--priority", "5")
    full = queue.shoal("submit", LINE, "--plan", "data=1", "--run-dir", "more")
    assert full.exit_code == 2 and "The queue is full: 2 jobs wait" in full.errors
    assert not (queue.path / "more").exists()
    rows = queue.shoal("queue", "--json").result["jobs"]
    assert [row["job"] for row in rows] == [first, third, second]
    assert [row["state"] for row in rows] == ["running", "queued", "queued"]
    queue.wait_for_step(first)
    queue.hurry()
    for job in (first, second, third):
        assert queue.wait(job, "done").exit_code == 0
    began = [queue.events(job, "started")[0]["time"] for job in (first, third, second)]
    assert began == sorted(began)
    assert not any(queue.events(job, "resized") for job in (first, second, third))


@pytest.mark.full
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_an_urgent_job_shrinks_a_run_which_grows_back_with_the_same_bits(queue: Queue) -> None:
    said = queue.shoal("queue", "--limit", "cores=all")
    assert "cores=all running=" in said.errors
    queue.shoal("queue", "--limit", "cores=2")
    elastic = queue.submit(PATIENT, "--plan", "data=2")
    queue.wait_for_step(elastic)
    urgent = queue.submit(LINE, "--plan", "data=1", "--priority", "1")
    assert queue.wait(urgent, "done").exit_code == 0
    assert wait_until(lambda: len(queue.events(elastic, "resized")) == 2, LIMIT_S)
    queue.hurry()
    found = queue.wait(elastic, "done")
    changes = [event["change"] for event in queue.events(elastic, "resized")]
    assert changes == ["data 2 -> 1", "data 1 -> 2"] and found.exit_code == 0
    plain = queue.shoal("train", PATIENT, "--plan", "data=2", "--run-dir", "plain")
    assert plain.exit_code == 0, plain.errors
    weights = [Path(where) / "model.safetensors" for where in (found.run_dir, queue.path / "plain")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.full
def test_jobs_survive_the_agent_and_are_found_again(queue: Queue) -> None:
    queue.shoal("queue", "--limit", "cores=1")
    first = queue.submit(PATIENT, "--plan", "data=1")
    second = queue.submit(LINE, "--plan", "data=1", "--set", "steps=3")
    queue.wait_for_step(first)
    owner = owner_of(Path(queue.state(first).run_dir))
    agent = queue.agent()
    queue.kill_agent()
    rows = queue.shoal("queue", "--json").result["jobs"]
    assert [(row["job"], row["state"]) for row in rows] == [(first, "running"), (second, "queued")]
    assert owner_of(Path(queue.state(first).run_dir)) == owner and queue.agent() != agent
    queue.kill_agent()  # and now a job ends while there is none
    queue.hurry()
    assert owner is not None and wait_until(lambda: not _runs(owner.pid), LIMIT_S)
    status = queue.shoal("status", first, "--json").result
    assert (status["state"], status["exit_code"], status["step"]) == ("done", 0, 1200)
    assert queue.wait(second, "done").exit_code == 0
    members = [event["member"] for event in queue.events(first, "started")]
    assert len(members) == len(set(members))  # it was started once


@pytest.mark.full
@pytest.mark.parametrize("how", ["not begun", "machine went down", "lost"])
def test_what_an_agent_finds_of_jobs_that_are_gone(queue: Queue, how: str) -> None:
    job = queue.submit(LINE, "--plan", "data=1", "--set", "steps=3", "--run-dir", "mine")
    queue.wait(job, "done")
    assert wait_until(lambda: not (queue_directory() / SOCKET).exists(), 20.0)
    journal = QueueJournal(queue_directory() / JOURNAL)
    boot = "another" if how == "machine went down" else boot_id()
    process = ProcessIdentity(1 << 22, 1, boot)
    journal.append(
        JobRequeued(job=1, counts=True), JobStarted(job=1, process=process, cores=(0,), at=0.0)
    )
    journal.close()
    files = JobFiles(queue_directory(), 1)
    files.write_environment(dict(os.environ))
    if how == "not begun":
        files.end.write_bytes(encode_json(JobEnd(None, has_begun=False)))
    found = queue.wait(job, "failed" if how == "lost" else "done")
    assert ("left no exit code" in found.reason) == (how == "lost")


@pytest.mark.full
def test_a_stopped_job_saves_and_goes_on_and_another_is_ended_at_once(queue: Queue) -> None:
    job = queue.submit(PATIENT, "--plan", "data=1", "--run-dir", "mine")
    queue.wait_for_step(job)
    said = queue.shoal("stop", "mine", "--json")
    assert said.result["state"] == "stopped" and said.result["checkpoint"].startswith("step-")
    found = queue.state(job)
    assert (found.state, found.exit_code) == ("stopped", 75)
    again = queue.submit(PATIENT, "--plan", "data=1", "--run-dir", "mine")
    assert again != job
    queue.wait_for_step(again)
    assert wait_until(lambda: bool(queue.events(again, "resumed")), LIMIT_S)
    said = queue.shoal("stop", again, "--now", "--json")
    assert said.exit_code == 0 and said.result["state"] == "stopped"
    waiting = queue.shoal("stop", again, "--json")
    assert waiting.exit_code == 0 and waiting.result["state"] == "stopped"


@pytest.mark.full
def test_a_job_that_reaches_its_time_limit_saves_or_is_killed(queue: Queue) -> None:
    queue.shoal("queue", "--limit", "cores=1", "--limit", "grace=300")
    saves = queue.submit(PATIENT, "--plan", "data=1", "--time", "60s")
    found = queue.wait(saves, "stopped")
    assert found.exit_code == 75 and "time limit of 60 s" in found.reason
    queue.shoal("queue", "--limit", "grace=1")
    killed = queue.submit(STUCK, "--plan", "data=1", "--time", "30s")
    found = queue.wait(killed, "failed")
    assert found.exit_code == 137 and "time limit of 30 s" in found.reason


@pytest.mark.full
def test_a_recipe_that_fails_is_told_of(queue: Queue) -> None:
    job = queue.submit(FAILS, "--plan", "data=1")
    found = queue.wait(job, "failed")
    assert found.exit_code == 1 and "exited with code 1" in found.reason
    assert "a key of the recipe's own" in queue.shoal("logs", job).output
    status = queue.shoal("status", job, "--json").result
    assert (status["exit_code"], status["members"], status["loss"]) == (1, [], None)


@pytest.mark.full
def test_of_two_submits_with_one_directory_one_is_refused(queue: Queue) -> None:
    said: list[Said] = []

    def submit() -> None:
        said.append(queue.shoal("submit", PATIENT, "--plan", "data=1", "--run-dir", "mine"))

    threads = [threading.Thread(target=submit) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(one.exit_code for one in said) == [0, 2, 2], said
    assert len(queue.engine.jobs()) == 1


@pytest.mark.full
def test_a_plain_run_can_be_asked_followed_and_stopped(queue: Queue) -> None:
    command = [sys.executable, "-m", "shoal", "train", PATIENT, "--plan", "data=2"]
    with open(queue.path / "said", "wb") as output:
        training = subprocess.Popen(
            [*command, "--run-dir", "mine"], cwd=queue.path, stdout=output, stderr=output
        )
    metrics = queue.path / "mine" / "metrics.jsonl"
    assert wait_until(lambda: metrics.exists() and bool(metrics.read_bytes()), LIMIT_S)
    status = queue.shoal("status", "mine", "--json").result
    assert status["state"] == "running" and len(status["members"]) == 2
    assert status["exit_code"] is None and status["steps"] == 1200
    refused = queue.shoal("submit", PATIENT, "--run-dir", "mine")
    assert refused.exit_code == 2 and f"process {training.pid}" in refused.errors
    follow = subprocess.Popen(
        [sys.executable, "-m", "shoal", "logs", "mine", "--rank", "1", "--follow"],
        cwd=queue.path,
        stdout=subprocess.DEVNULL,
    )
    time.sleep(1.0)
    assert follow.poll() is None
    said = queue.shoal("stop", "mine", "--json")
    assert said.result["state"] == "stopped" and said.result["checkpoint"]
    assert training.wait(LIMIT_S) == 75 and follow.wait(LIMIT_S) == 0
    assert queue.shoal("logs", "mine", "--rank", "7").exit_code == 2


@pytest.mark.full
def test_an_agent_that_is_killed_again_and_again_starts_no_job_twice(queue: Queue) -> None:
    queue.shoal("queue", "--limit", "cores=1")
    jobs = [queue.submit(LINE, "--plan", "data=1", "--set", f"seed={seed}") for seed in range(3)]
    draw = random.Random(19)

    def kill_and_look() -> bool:
        states = {job.job: job.state for job in queue.engine.jobs()}
        if all(states[job] == "done" for job in jobs):
            return True
        time.sleep(draw.uniform(0.0, 1.5))
        with suppress(AssertionError, ProcessLookupError):
            os.kill(queue.agent(), signal.SIGKILL)
        return False

    assert wait_until(kill_and_look, LIMIT_S)
    for job in jobs:
        assert queue.state(job).exit_code == 0
        begun = [one for one in queue.events(job, "started") if one["member"] == 0]
        assert len(begun) == 1, "it was started twice"
