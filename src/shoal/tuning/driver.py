"""The driver of a study: it draws trials, starts them side by side, reads their reports, ends them.

It is one loop. Trials run in processes of their own (`trial_process.py`), forked from one server;
who gets which cores is `cluster/slots.py`; what becomes of one that ended is `verdicts.py`; values
are drawn and reports kept by `search.py`. The driver holds nothing that is not in the storage or in
a trial's run directory, so the same command goes on wherever it was killed.

When nothing waits for cores, a trial whose plan allows it grows into those that are free, by the
request that `shoal resize` makes. Cost: a look at each trial's record every 100 ms.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from shoal.cluster.affinity import allow_cores
from shoal.cluster.slots import CoreRequest, Cores, HeldCores, assign_cores
from shoal.elastic.control import send_request
from shoal.errors import RUN_AGAIN, ShoalError, UsageError
from shoal.storage.decoding import encode_json
from shoal.system.fork_server import ForkServer, WorkerExited, WorkerSpec
from shoal.system.processes import stop_signals
from shoal.tuning.directory import StudyDir
from shoal.tuning.objective import RecordReader, TrialReport
from shoal.tuning.search import Search
from shoal.tuning.space import Value, setting
from shoal.tuning.trial_process import VARIABLE, StudyFacts, TrialJob, end_path, plan_on, read_end
from shoal.tuning.verdicts import TrialEnd, TrialVerdict, is_final, judge

if TYPE_CHECKING:
    from shoal.tuning.display import StudyDisplay

POLL_S = 0.1
SOON_S = 0.01  # while a trial is about to make its last step
KILL_S = 10.0  # for trials to end that were killed


class StudyInterrupted(ShoalError):
    """The study ended before its last trial; the same command goes on with it."""

    exit_code = RUN_AGAIN


class TrialProgress(NamedTuple):
    """What a display shows of a trial under way."""

    number: int
    settings: Mapping[str, Value]
    num_ranks: int
    step: int
    loss: float | None
    report: TrialReport | None


class DriverOptions(NamedTuple):
    """How many trials there are to be, and which trials keep their weights."""

    num_trials: int
    num_parallel: int
    keep: int | None  # the best so many; None: all


class TrialRun:
    """A trial whose process runs."""

    def __init__(self, number: int, settings: Mapping[str, Value], record: RecordReader):
        self.number, self.settings, self._record = number, settings, record
        self.cores: Cores = ()
        self.most_ranks = 1
        self.reports: list[TrialReport] = []
        self._first: tuple[int, float] | None = None  # the first step that was seen, and when
        self.is_pruned = False
        self.num_losses = 0
        self._growth: threading.Thread | None = None
        self._refused = False

    def start(self, cores: Cores, most_ranks: int) -> None:
        self.cores, self.most_ranks = cores, most_ranks

    def read(self) -> bool:
        """Read its record; whether there are new reports."""
        before, self.reports = len(self.reports), self._record.reports()
        if self._first is None and self._record.last.step:
            self._first = self._record.last.step, time.monotonic()
        return len(self.reports) != before

    @property
    def is_over(self) -> bool:
        """Whether it has reported on its last step."""
        return bool(self.reports) and self.reports[-1].step >= self._record.num_steps() > 0

    @property
    def ends_soon(self) -> bool:
        """Whether it makes its last step before the next look or two, as fast as it is."""
        if self._first is None or self.is_over:
            return False
        step, since_s = self._record.last.step, time.monotonic() - self._first[1]
        made, left = step - self._first[0], self._record.num_steps() - step
        return left * since_s < 2 * POLL_S * made

    def pruned(self) -> None:
        self.is_pruned = True

    def lost(self) -> None:
        self.num_losses += 1

    def held(self) -> HeldCores:
        """Its cores; it cannot use more before its first step, or once it refused."""
        grows = self._record.last.step > 0 and self._growth is None and not self._refused
        return HeldCores(self.number, self.cores, self.most_ranks if grows else len(self.cores))

    def grow(self, cores: Cores, pid: int, run_dir: Path) -> None:
        """Ask the run for a rank on each of these cores. It answers when that is done."""
        self.cores = cores
        allow_cores(pid, cores)

        def ask() -> None:
            try:
                answer = send_request(run_dir, resize=f"data={len(cores)}")
                self._refused = "refused" in answer
            except (UsageError, OSError):  # it has just ended
                self._refused = True

        self._growth = threading.Thread(target=ask, name=f"grow-{self.number}", daemon=True)
        self._growth.start()

    def settle(self) -> bool:
        """Whether a growth has just come to its end."""
        if self._growth is None or self._growth.is_alive():
            return False
        self._growth.join()
        self._growth = None
        return True

    def close(self) -> None:
        if self._growth is not None:
            self._growth.join()

    def progress(self) -> TrialProgress:
        last = self.reports[-1] if self.reports else None
        step, loss = self._record.last.step, self._record.last.loss
        return TrialProgress(self.number, self.settings, len(self.cores), step, loss, last)


class Driver:
    """Runs the trials of a study to their end."""

    def __init__(
        self,
        search: Search,
        server: ForkServer,
        directory: StudyDir,
        facts: StudyFacts,
        options: DriverOptions,
        display: "StudyDisplay",
    ):
        self._search, self._server, self._directory = search, server, directory
        self._facts, self._options, self._display = facts, options, display
        self._cores = sorted(os.sched_getaffinity(0))
        self._running: dict[int, TrialRun] = {}
        self._waiting: list[TrialRun] = []  # drawn, and without cores yet
        self._left = search.left_running()
        self._num_drawn, self._num_finished = search.num_trials(), search.num_finished()
        self._dropped: set[int] = set()  # trials whose weights are gone
        self._signals: list[int] = []
        self._asked = 0  # how many of the signals were acted on

    def run(self) -> int:
        """Until enough trials are finished: 0; stopped by a signal, or with a trial paused: 75;
        128+n after a second signal."""
        with self._listening():
            try:
                while True:
                    self._start_trials()
                    if not self._running:
                        break
                    self._wait()
                    self._read_records()
                    self._forward_stop()
                    self._tick()
            except (EOFError, BrokenPipeError):
                raise StudyInterrupted(
                    "The process that trials are forked from is gone; those under way save "
                    "themselves. The same command goes on with the study."
                ) from None
            finally:
                self._end_all()
        if self._num_finished == self._num_drawn and not self._num_to_draw():
            return 0  # whatever was asked for meanwhile
        return RUN_AGAIN if len(self._signals) < 2 else 128 + self._signals[-1]

    def _start_trials(self) -> None:
        """Start what fits. Values are drawn as late as can be, from all that is known by then."""
        if self._signals:
            return
        self._take_up_ended()
        least, most = self._facts.least_ranks, self._facts.most_ranks
        at_work = self._at_work()
        num_free = self._options.num_parallel - len(at_work)
        num_waiting = min(len(self._waiting) + len(self._left) + self._num_to_draw(), num_free)
        requests = [CoreRequest(-1 - i, least, most) for i in range(num_waiting)]
        held = [trial.held() for trial in at_work]
        plan = assign_cores(self._cores, held, requests, self._options.num_parallel)
        for cores in plan.started.values():
            self._start(self._next(), cores)
        for number, cores in plan.grown.items():
            if number in self._server.pids:
                pid = self._server.pids[number]
                self._running[number].grow(cores, pid, self._directory.run_dir(number))

    def _at_work(self) -> list[TrialRun]:
        """Those under way but for trials that have reported on their last step: while one saves and
        ends, the next begins. Not with one at a time, which learns from all before it."""
        found = list(self._running.values())
        alone = self._options.num_parallel == 1
        return found if alone else [trial for trial in found if not trial.is_over]

    def _num_to_draw(self) -> int:
        most = min(self._options.num_trials, self._search.most_trials())
        return max(0, int(most) - self._num_drawn)

    def _take_up_ended(self) -> None:
        """Tell of trials whose runs had ended when an earlier driver was killed."""
        for number in list(self._left):
            run_dir = self._directory.run_dir(number)
            end = read_end(run_dir)
            if not is_final(end):
                continue
            self._left.remove(number)
            trial = self._drawn(number)
            trial.read()
            self._search.report(number, trial.reports)
            self._finish(trial, _as_it_ended(trial, end))

    def _next(self) -> TrialRun:
        if self._waiting:
            return self._waiting.pop(0)
        return self._drawn(self._left.pop(0) if self._left else None)

    def _drawn(self, number: int | None) -> TrialRun:
        self._num_drawn += number is None
        number, settings = self._search.propose(number)
        record = RecordReader(
            self._directory.run_dir(number), self._search.goal, evaluates=self._facts.evaluates
        )
        return TrialRun(number, settings, record)

    def _start(self, trial: TrialRun, cores: Cores) -> None:
        facts, number = self._facts, trial.number
        run_dir = self._directory.run_dir(number)
        is_resumed = run_dir.exists()
        end_path(run_dir).unlink(missing_ok=True)
        plan = plan_on(facts.plan, len(cores), facts.least_ranks, facts.most_ranks)
        job = TrialJob(
            settings={name: setting(value) for name, value in trial.settings.items()},
            run_dir=str(run_dir.resolve()),
            cores=list(cores),
            plan=plan,
        )
        trial.start(cores, facts.most_ranks)
        self._running[number] = trial
        variables = {VARIABLE: encode_json(job).decode()}
        log = str(self._directory.log_of(number).resolve())
        self._server.spawn(WorkerSpec(number, log, variables))
        self._display.started(number, trial.settings, is_resumed=is_resumed)

    def _wait(self) -> None:
        """Until a trial's process has ended, or it is time to look at the records."""
        soon = any(trial.ends_soon for trial in self._at_work())
        deadline = time.monotonic() + (SOON_S if soon else POLL_S)
        while (left_s := deadline - time.monotonic()) > 0:
            report = self._server.next_report(timeout_s=left_s)
            if isinstance(report, WorkerExited):
                self._handle_exit(report.number, report.status)
                return

    def _handle_exit(self, number: int, status: int) -> None:
        trial = self._running.pop(number)
        trial.close()
        trial.lost()
        self._read(trial)
        verdict = judge(
            status,
            read_end(self._directory.run_dir(number)),
            _value(trial),
            is_pruned=trial.is_pruned,
            is_stopping=bool(self._signals),
            num_losses=trial.num_losses,
        )
        self._finish(trial, verdict)

    def _finish(self, trial: TrialRun, verdict: TrialVerdict) -> None:
        number, value = trial.number, _value(trial)
        match verdict.what:
            case "complete":
                assert value is not None
                self._search.complete(number, value)
            case "pruned":
                self._search.prune(number)
            case "failed":
                self._search.fail(number, verdict.reason)
            case "resume":
                self._waiting.append(trial)
        self._num_finished += verdict.what in ("complete", "pruned", "failed")
        self._display.ended(number, verdict, value)
        self._drop_weights()

    def _drop_weights(self) -> None:
        """Keep the weights of the best trials only."""
        if self._options.keep is None:
            return
        rows = [t for t in self._search.trials(self._directory.run_dir) if t.state != "running"]
        done = [t for t in rows if t.state == "complete" and t.value is not None]
        sign = -1.0 if self._search.goal.is_max else 1.0
        best = sorted(done, key=lambda t: (sign * (t.value or 0.0), t.trial))[: self._options.keep]
        for trial in rows:
            if trial not in best and trial.trial not in self._dropped:
                self._directory.drop_weights(trial.trial)
                self._dropped.add(trial.trial)

    def _read_records(self) -> None:
        for trial in self._running.values():
            self._read(trial)
            if trial.settle():
                self._display.grown(trial.number, len(trial.cores))

    def _read(self, trial: TrialRun) -> None:
        falls_behind = trial.read() and self._search.report(trial.number, trial.reports)
        runs = not trial.is_pruned and not trial.is_over and trial.number in self._server.pids
        if falls_behind and runs:
            trial.pruned()
            self._server.kill(trial.number, signal.SIGTERM)

    def _tick(self) -> None:
        running = [trial.progress() for trial in self._running.values()]
        self._display.tick(running, self._num_finished)

    def _forward_stop(self) -> None:
        """The first signal asks each trial to stop and save, the second ends everything."""
        if len(self._signals) <= self._asked:
            return
        if not self._asked:
            self._display.stopping()
        number = signal.SIGTERM if len(self._signals) == 1 else signal.SIGKILL
        self._asked = len(self._signals)
        for running in self._running:
            self._server.kill(running, number)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        """Signals that ask for a stop are noted. They reach the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {s: signal.signal(s, self._on_signal) for s in stop_signals()}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _end_all(self) -> None:
        """After an error of the driver: let trials save themselves, then end what is left."""
        if not self._running:
            return
        with suppress(OSError, EOFError):
            for number in self._running:
                self._server.kill(number, signal.SIGTERM)
            deadline = time.monotonic() + KILL_S
            while self._server.pids and time.monotonic() < deadline:
                self._server.next_report(timeout_s=0.1)
            for number in self._server.pids:
                self._server.kill(number, signal.SIGKILL)


def _as_it_ended(trial: TrialRun, end: TrialEnd | None) -> TrialVerdict:
    return judge(0, end, _value(trial), is_pruned=False, is_stopping=False, num_losses=1)


def _value(trial: TrialRun) -> float | None:
    """The value of a trial that made its last step: that of its last report."""
    return trial.reports[-1].value if trial.reports else None
