"""The agent of the local queue: one process a user, which starts jobs and watches them.

It is one loop: requests of commands come in (`protocol.py`), what happened goes to the journal
(`journal.py`), and what to do next is asked of the policy (`policy.py`). The first submit starts
it, and it ends when no job waits or runs. If it is killed, jobs go on; the next command starts an
agent that finds them again by their process number and start time. It holds nothing that is not in
the journal or in a run's directory.

A run is resized by the request that `shoal resize` makes, in a thread that waits for the answer.
Cost: a look at the queue each 0.5 s. Read next: `job_process.py`.
"""

import os
import queue
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from subprocess import Popen

from shoal import __version__
from shoal.cluster.affinity import allow_cores
from shoal.cluster.engine import State
from shoal.cluster.local_queue.job_process import (
    JobFiles,
    judge_end,
    num_ranks_now,
    release,
    sizes_of,
    spawn,
)
from shoal.cluster.local_queue.journal import (
    JobEnded,
    JobRequeued,
    JobResized,
    JobStarted,
    JobSubmitted,
    JournalRecord,
    LimitsSet,
    QueuedEntry,
    QueueJournal,
    ResizeAsked,
    StopAsked,
    set_limits,
)
from shoal.cluster.local_queue.policy import ActiveJob, QueuedJob, StartJob, decide
from shoal.cluster.local_queue.protocol import (
    JOURNAL,
    MOST_BYTES,
    SOCKET,
    QueueReply,
    QueueRequest,
    lock_queue,
)
from shoal.cluster.local_queue.states import list_jobs
from shoal.comm.unix import is_own, reachable
from shoal.elastic.control import send_request
from shoal.errors import UsageError
from shoal.storage.decoding import encode_json, try_decode_json
from shoal.system.identity import ProcessIdentity, boot_id, identify, open_process, send_signal

LOOK_S = 0.5
LINGER_S = 1.0  # with nothing to do, before it ends
CLIENT_S = 5.0  # for a command to send what it asks
AGAIN_S, KILL_S = 0.5, 5.0  # to a job that is to end at once: a second signal, then the last one
REFUSED_S = 10.0  # before a run that refused to be resized is asked again
MOST_TRIES = 3  # of a job under which the machine goes down
ELASTIC_GRACE_S = 120.0  # for an answer to a resize


class JobAtWork:
    """What the agent holds of a job that runs, and would find again without it."""

    def __init__(self, process: ProcessIdentity, descriptor: int, child: "Popen[bytes] | None"):
        self.process, self.descriptor, self.child = process, descriptor, child
        self.sizes: tuple[int, ...] | None = None  # until it has made a step
        self.asked_at: float | None = None  # when it was asked for another size
        self.refused_until = 0.0
        self.num_signals = 0

    def close(self) -> int | None:
        """After its end: the exit code, if this process is its parent."""
        os.close(self.descriptor)
        if self.child is None:
            return None
        code = self.child.wait()
        return code if code >= 0 else 128 - code


class QueueAgent:
    """Serves the queue of one directory. Its caller holds the lock."""

    def __init__(self, directory: Path):
        self._directory = directory
        self._journal = QueueJournal(directory / JOURNAL)
        self._cores = sorted(os.sched_getaffinity(0))
        self._at_work: dict[int, JobAtWork] = {}
        self._answers: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()
        self._wake_up, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def serve(self) -> None:
        """Until no job waits or runs."""
        path = self._directory / SOCKET
        path.unlink(missing_ok=True)
        self._listener.bind(reachable(str(path)))
        os.chmod(path, 0o600)  # before it listens
        self._find_again()
        self._listener.listen(64)
        idle_since = time.monotonic()
        try:
            while self._journal.state.active or time.monotonic() < idle_since + LINGER_S:
                if self._turn() or self._journal.state.active:
                    idle_since = time.monotonic()
        finally:
            path.unlink(missing_ok=True)
            self._listener.close()
            self._journal.close()

    def _turn(self) -> bool:
        """Wait for something to happen, and do what follows; whether a command asked something."""
        poller = select.poll()
        jobs = {one.descriptor: job for job, one in self._at_work.items()}
        for descriptor in (self._listener.fileno(), self._wake_up, *jobs):
            poller.register(descriptor, select.POLLIN)
        ready = [descriptor for descriptor, _ in poller.poll(int(1000 * LOOK_S))]
        if self._wake_up in ready:
            os.read(self._wake_up, 4096)
        for descriptor in ready:
            if descriptor in jobs:
                self._handle_end(jobs[descriptor])
        while not self._answers.empty():
            self._finish_resize(*self._answers.get())
        was_asked = self._listener.fileno() in ready and self._serve_command()
        self._end_what_is_due()
        self._follow_policy()
        return was_asked

    # ---- commands

    def _serve_command(self) -> bool:
        """Whether one asked something, and did not only look whether an agent is there."""
        with suppress(OSError):
            connection, _ = self._listener.accept()
            with connection:
                if not is_own(connection):
                    return False
                connection.settimeout(CLIENT_S)
                with connection.makefile("rb") as requests:
                    content = requests.readline(MOST_BYTES)
                if content:
                    connection.sendall(encode_json(self._reply(content)) + b"\n")
                    return True
        return False

    def _reply(self, content: bytes) -> QueueReply:
        request = try_decode_json(content, QueueRequest)
        if request is None or request.version != __version__:
            return QueueReply(
                refused=f"The agent of the queue is of Shoal {__version__}, and this command is "
                "not. Use that version until the queue is empty."
            )
        try:
            return self._do(request)
        except UsageError as wrong:
            return QueueReply(refused=str(wrong))
        except OSError as error:
            where = self._directory / JOURNAL
            return QueueReply(refused=f"{where} cannot be written: {error.strerror}.")

    def _do(self, request: QueueRequest) -> QueueReply:
        state = self._journal.state
        match request.ask:
            case "submit":
                return QueueReply(job=self._submit(request))
            case "stop":
                self._stop(request.job, now=request.now)
            case "limits":
                limits = set_limits(state.limits, request.limits)
                if limits != state.limits:
                    self._journal.append(LimitsSet(limits=limits))
        return QueueReply(jobs=list_jobs(self._journal.state, len(self._usable())))

    def _submit(self, request: QueueRequest) -> int:
        state, asked = self._journal.state, request.request
        if asked is None:
            raise UsageError("The request names no job.")
        for entry in state.active:
            if entry.token == request.token:
                return entry.job  # the answer to it was lost
            if entry.request.run_dir == asked.run_dir:
                raise UsageError(
                    f"{asked.run_dir} belongs to the job local:{entry.job}, which is "
                    f"{entry.state}. Two jobs cannot share a run directory."
                )
        num_waiting = sum(entry.state == "queued" for entry in state.active)
        if num_waiting >= state.limits.waiting:
            raise UsageError(
                f"The queue is full: {num_waiting} jobs wait, and {state.limits.waiting} is the "
                "limit. Wait, stop some, or allow more with `shoal queue --limit waiting=N`."
            )
        job = state.next_job
        JobFiles(self._directory, job).write_environment(request.environment)
        self._journal.append(
            JobSubmitted(
                job=job,
                request=asked,
                python=request.python,
                token=request.token,
                at=time.time(),
            )
        )
        return job

    def _stop(self, job: int, *, now: bool) -> None:
        entry = self._journal.state.jobs.get(job)
        if entry is None:
            raise UsageError(f"There is no job local:{job}.")
        if entry.state == "queued":
            self._end(entry, None, "stopped", "it was stopped before it began")
        elif entry.state == "running" and (entry.stop is None or now > entry.stop.now):
            self._journal.append(StopAsked(job=job, at=time.time(), now=now))

    # ---- jobs

    def _find_again(self) -> None:
        """Take up the jobs that ran when an earlier agent ended."""
        for entry in self._journal.state.active:
            if entry.process is None:
                continue
            descriptor = open_process(entry.process)
            if descriptor is None:
                self._take_up_ended(entry)
                continue
            found = self._at_work[entry.job] = JobAtWork(entry.process, descriptor, None)
            found.num_signals = int(entry.stop is not None)  # the second one ends a run at once
            if entry.resizing:
                self._ask_for_size(entry, found)

    def _take_up_ended(self, entry: QueuedEntry) -> None:
        """A job that ended while no agent was there."""
        assert entry.process is not None
        end = JobFiles(self._directory, entry.job).read_end()
        went_down = end is None and entry.process.boot != boot_id()
        if (end is not None and not end.has_begun) or (
            went_down and entry.num_tries < MOST_TRIES and entry.stop is None
        ):
            self._journal.append(JobRequeued(job=entry.job, counts=went_down))
            return
        code = None if end is None else end.exit_code
        state, reason = judge_end(code, entry.stop, entry.request.time_limit_s)
        if went_down:
            reason = f"the machine went down under it, {entry.num_tries} times"
        self._end(entry, code, state, reason)

    def _handle_end(self, job: int) -> None:
        entry, work = self._journal.state.jobs[job], self._at_work.pop(job)
        own, end = work.close(), JobFiles(self._directory, job).read_end()
        code = end.exit_code if end is not None else own
        state, reason = judge_end(code, entry.stop, entry.request.time_limit_s)
        self._end(entry, code, state, reason)

    def _end(self, entry: QueuedEntry, code: int | None, state: State, reason: str) -> None:
        ended = JobEnded(job=entry.job, state=state, exit_code=code, reason=reason, at=time.time())
        self._write(ended)
        JobFiles(self._directory, entry.job).remove()

    def _write(self, record: JournalRecord) -> None:
        """What has happened anyway must get into the journal, however long it takes."""
        while True:
            try:
                self._journal.append(record)
                return
            except OSError as error:
                print(f"the journal cannot be written: {error}", file=sys.stderr, flush=True)
                time.sleep(1.0)

    def _end_what_is_due(self) -> None:
        """Signals to jobs that are to end, and those that have run for too long."""
        state, now = self._journal.state, time.time()
        for job, work in self._at_work.items():
            entry = state.jobs[job]
            limit_s = entry.request.time_limit_s
            if entry.stop is None and limit_s is not None and now > entry.started_at + limit_s:
                self._write(StopAsked(job=job, at=now, is_late=True))
                entry = self._journal.state.jobs[job]
            if entry.stop is None:
                continue
            number, count = signal_due(entry.stop, work.num_signals, now, state.limits.grace)
            if number:
                send_signal(work.process, number)
                work.num_signals = count

    # ---- the policy

    def _usable(self) -> list[int]:
        return self._cores[: self._journal.state.limits.cores]

    def _follow_policy(self) -> None:
        entries = self._journal.state.active
        queued = [
            QueuedJob(one.job, one.request.priority, one.request.cores or len(self._cores))
            for one in entries
            if one.state == "queued"
        ]
        active = [self._as_active(one) for one in entries if one.job in self._at_work]
        limits = self._journal.state.limits
        for decision in decide(self._usable(), active, queued, limits.running):
            entry = self._journal.state.jobs[decision.job]
            if isinstance(decision, StartJob):
                self._start(entry, decision.cores)
            else:
                self._write(ResizeAsked(job=entry.job, cores=decision.cores))
                entry = self._journal.state.jobs[decision.job]
                self._ask_for_size(entry, self._at_work[entry.job])

    def _as_active(self, entry: QueuedEntry) -> ActiveJob:
        work, run_dir = self._at_work[entry.job], Path(entry.request.run_dir)
        if work.sizes is None:
            work.sizes = sizes_of(run_dir)
        both = tuple(dict.fromkeys((*entry.cores, *entry.resizing)))
        fixed = (len(both),)
        is_fixed = entry.stop is not None or time.monotonic() < work.refused_until
        sizes = fixed if is_fixed or work.sizes is None else work.sizes
        if len(entry.cores) not in sizes:
            sizes = fixed  # it has another number of ranks than of cores
        freeing = max(0, len(entry.cores) - len(entry.resizing)) if entry.resizing else 0
        return ActiveJob(
            entry.job, entry.request.priority, both, sizes, bool(entry.resizing), freeing
        )

    def _start(self, entry: QueuedEntry, cores: tuple[int, ...]) -> None:
        """Start a job; it trains once the journal knows its process."""
        try:
            child = spawn(entry, cores, JobFiles(self._directory, entry.job))
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            self._end(entry, None, "failed", f"it cannot be started: {error.strerror}{where}")
            return
        process = identify(child.pid)
        if process is None:
            release(child, go=False)
            self._end(entry, 128 - min(0, child.wait()), "failed", "it ended before it began")
            return
        try:
            self._journal.append(
                JobStarted(job=entry.job, process=process, cores=cores, at=time.time())
            )
        except OSError:  # no room on the disk: it waits for its turn again
            release(child, go=False)
            child.wait()
            time.sleep(LOOK_S)
            return
        self._at_work[entry.job] = JobAtWork(process, os.pidfd_open(child.pid), child)
        release(child, go=True)

    def _ask_for_size(self, entry: QueuedEntry, work: JobAtWork) -> None:
        """Ask a run for as many ranks as it is to have cores, in a thread."""
        job, num_ranks, run_dir = entry.job, len(entry.resizing), Path(entry.request.run_dir)
        if num_ranks > len(entry.cores):
            allow_cores(work.process.pid, entry.resizing)
        answers, wake = self._answers, self._wake

        def ask() -> None:
            answers.put((job, resize_run(run_dir, num_ranks)))
            with suppress(OSError):
                os.write(wake, b".")

        threading.Thread(target=ask, name=f"resize-{job}", daemon=True).start()

    def _finish_resize(self, job: int, is_done: bool) -> None:
        entry = self._journal.state.jobs[job]
        if job not in self._at_work or not entry.resizing:
            return  # it has ended
        work, cores = self._at_work[job], entry.resizing if is_done else entry.cores
        if not is_done:
            work.refused_until = time.monotonic() + REFUSED_S
        allow_cores(work.process.pid, cores)
        self._write(JobResized(job=job, cores=cores))


def resize_run(run_dir: Path, num_ranks: int) -> bool:
    """Ask a run for so many ranks; whether it has them then."""
    deadline = time.monotonic() + ELASTIC_GRACE_S
    while time.monotonic() < deadline:
        try:
            answer = send_request(run_dir, resize=f"data={num_ranks}")
        except (UsageError, OSError):  # it has just ended
            return False
        if "refused" not in answer or num_ranks_now(run_dir) == num_ranks:
            return True
        if "being resized" not in answer["refused"]:
            return False
        time.sleep(LOOK_S)  # an earlier request, of an agent that was killed, is under way
    return False


def signal_due(stop: StopAsked, num_signals: int, now: float, grace_s: float) -> tuple[int, int]:
    """The signal that is due for a job that is to end, and how many it has had then; 0 for none.

    One lets it save, a second one ends it at once, and the last one cannot be ignored. Pure.
    """
    since_s = now - stop.at
    if num_signals == 0:
        return signal.SIGTERM, 1
    if stop.now and num_signals == 1 and since_s > AGAIN_S:
        return signal.SIGTERM, 2
    if num_signals < 3 and since_s > (KILL_S if stop.now else grace_s):
        return signal.SIGKILL, 3
    return 0, num_signals


def main(directory: Path) -> int:
    lock = lock_queue(directory)
    if lock is None:
        return 0  # another agent serves
    try:
        QueueAgent(directory).serve()
    except UsageError as error:
        print(f"shoal: {error}", file=sys.stderr)
        return 2
    finally:
        os.close(lock)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
