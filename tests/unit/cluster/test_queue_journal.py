"""The journal of the local queue: cut at any byte it says what was written whole, and goes on."""

import os
from pathlib import Path

import msgspec
import pytest

from shoal.cluster.engine import JobRequest
from shoal.cluster.local_queue import journal as module
from shoal.cluster.local_queue.job_process import judge_end, sizes_of_plan
from shoal.cluster.local_queue.journal import (
    JobEnded,
    JobRequeued,
    JobResized,
    JobStarted,
    JobSubmitted,
    JournalRecord,
    LimitsSet,
    QueueJournal,
    QueueLimits,
    ResizeAsked,
    StopAsked,
    fold,
    read_journal,
    set_limits,
)
from shoal.cluster.local_queue.states import list_jobs
from shoal.errors import UsageError
from shoal.system.identity import ProcessIdentity, identify, open_process, send_signal


def submitted(job: int, priority: int = 0) -> JobSubmitted:
    request = JobRequest(
        name="tiny",
        arguments=("a.py:b", "--resume"),
        directory="/",
        run_dir=f"/runs/{job}",
        priority=priority,
    )
    return JobSubmitted(job=job, request=request, python="python", token=f"t{job}", at=1.0)


PROCESS = ProcessIdentity(7, 70, "boot")
RECORDS: list[JournalRecord] = [
    submitted(1),
    JobStarted(job=1, process=PROCESS, cores=(0, 1), at=2.0),
    LimitsSet(limits=QueueLimits(cores=2)),
    submitted(2, priority=3),
    ResizeAsked(job=1, cores=(0,)),
    JobResized(job=1, cores=(0,)),
    StopAsked(job=1, at=3.0),
    JobEnded(job=1, state="stopped", exit_code=75, reason="asked", at=4.0),
    JobRequeued(job=2, counts=True),
]


def test_it_says_what_happened(tmp_path: Path) -> None:
    journal = QueueJournal(tmp_path / "journal")
    for record in RECORDS:
        journal.append(record)
    journal.close()
    found = read_journal(tmp_path / "journal")
    assert found == fold(RECORDS) == journal.state
    assert found.next_job == 3 and found.limits.cores == 2
    assert found.jobs[1].state == "stopped" and found.jobs[1].exit_code == 75
    assert [entry.job for entry in found.active] == [2]


def test_cut_at_any_byte_it_says_what_was_whole_and_goes_on(tmp_path: Path) -> None:
    journal = QueueJournal(tmp_path / "journal")
    ends = [0]
    for record in RECORDS:
        journal.append(record)
        ends.append((tmp_path / "journal").stat().st_size)
    journal.close()
    content = (tmp_path / "journal").read_bytes()
    torn = tmp_path / "torn"
    for length in range(len(content) + 1):
        torn.write_bytes(content[:length])
        num_whole = sum(end <= length for end in ends[1:])
        assert read_journal(torn) == fold(RECORDS[:num_whole])
        again = QueueJournal(torn)
        again.append(submitted(9))
        again.close()
        assert read_journal(torn) == fold([*RECORDS[:num_whole], submitted(9)])


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    journal = QueueJournal(tmp_path / "journal")
    journal.append(*RECORDS)
    journal.close()
    lines = (tmp_path / "journal").read_bytes().splitlines(keepends=True)
    lines[1] = b'{"type":"started","job":"x"}\n'
    (tmp_path / "journal").write_bytes(b"".join(lines))
    with pytest.raises(UsageError, match="Line 2 of the queue's journal"):
        read_journal(tmp_path / "journal")


def test_what_cannot_be_written_is_not_half_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = QueueJournal(tmp_path / "journal")
    journal.append(submitted(1))
    write = os.write

    def full(descriptor: int, content: bytes) -> int:
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[: len(content) - 10])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            journal.append(submitted(2))
    assert read_journal(tmp_path / "journal") == journal.state == fold([submitted(1)])
    journal.append(submitted(2))
    journal.close()
    assert len(read_journal(tmp_path / "journal").jobs) == 2


def test_a_long_journal_is_written_again_with_what_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 2000)
    monkeypatch.setattr(module, "KEPT", 3)
    journal = QueueJournal(tmp_path / "journal")
    for job in range(1, 21):
        journal.append(submitted(job))
        if job != 5:
            journal.append(JobEnded(job=job, state="done", exit_code=0, reason="", at=0.0))
    journal.close()
    length = (tmp_path / "journal").stat().st_size
    QueueJournal(tmp_path / "journal").close()
    found = read_journal(tmp_path / "journal")
    assert (tmp_path / "journal").stat().st_size < length
    assert sorted(found.jobs) == [5, 18, 19, 20] and found.next_job == 21


def test_limits_are_read_and_wrong_ones_refused() -> None:
    limits = set_limits(QueueLimits(), {"cores": "2", "waiting": "5"})
    assert limits == QueueLimits(cores=2, waiting=5)
    assert set_limits(limits, {"cores": "all"}).cores is None
    for words in ({"cores": "0"}, {"cores": "many"}, {"size": "1"}, {"running": "all"}):
        with pytest.raises(UsageError):
            set_limits(limits, words)


@pytest.mark.parametrize(
    ("code", "asked", "state"),
    [
        (0, None, "done"),
        (0, StopAsked(job=1, at=0.0), "done"),
        (75, None, "stopped"),
        (75, StopAsked(job=1, at=0.0, is_late=True), "stopped"),
        (143, StopAsked(job=1, at=0.0), "stopped"),
        (137, StopAsked(job=1, at=0.0, now=True), "stopped"),
        (137, StopAsked(job=1, at=0.0, is_late=True), "failed"),
        (137, None, "failed"),
        (1, None, "failed"),
        (None, None, "failed"),
    ],
)
def test_how_a_job_ended(code: int | None, asked: StopAsked | None, state: str) -> None:
    assert judge_end(code, asked, 5.0)[0] == state


def test_what_is_not_known_of_a_checkpoint_is_not_said() -> None:
    """A signal may come when the last one is saved, and ends the command then."""
    asked = StopAsked(job=1, at=0.0)
    assert judge_end(143, asked, None)[1] == "it was asked to stop, and was killed by SIGTERM"
    late = msgspec.structs.replace(asked, is_late=True)
    assert judge_end(None, late, 5.0)[1].endswith("limit of 5 s, and left no exit code")


def test_the_sizes_that_a_plan_can_have() -> None:
    assert sizes_of_plan("data=3 pieces=3") == (1, 2, 3)
    assert sizes_of_plan("data=2 pieces=2 zero=1") == (2,)
    assert sizes_of_plan("data=2 tensor=2 pieces=2") == (4,)
    assert sizes_of_plan("data=4 pieces=4 local_steps=4") == (2, 4)


def test_jobs_are_listed_in_the_order_of_their_turn() -> None:
    start = JobStarted(job=2, process=PROCESS, cores=(0,), at=0.0)
    end = JobEnded(job=1, state="done", exit_code=0, reason="", at=0.0)
    state = fold([submitted(1), submitted(2), submitted(3), submitted(4, 5), start, end])
    rows = list_jobs(state, 2)
    assert [row.job for row in rows] == ["local:2", "local:4", "local:3", "local:1"]
    assert rows[1].reason == "needs 1 core, and 1 of 2 are free"


def test_a_process_is_known_by_more_than_its_number() -> None:
    own = identify(os.getpid())
    assert own is not None and identify(own.pid) == own
    descriptor = open_process(own)
    assert descriptor is not None
    os.close(descriptor)
    other = ProcessIdentity(own.pid, own.started + 1, own.boot)
    assert open_process(other) is None and not send_signal(other, 0)
    assert send_signal(own, 0)
