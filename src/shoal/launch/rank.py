"""`shoal train` under mpirun, srun or torchrun: this process is one rank of the run.

There is no supervisor: the launcher has started the ranks, and starts no other in the place of a
lost one. So there are no spares, servers and resizes; all else is as in a supervised run, by the
same code: ranks prepare the recipe (each itself), compare what they made of it, train, save and
stop after a step that all agree on. Rank 0 has the run directory, the record and the screen.
Ranks end together, with one exit code, once rank 0 has written and said all: a launcher kills the
others when the first of them has failed.

Read next: `rank_peers.py`, for what they tell each other; `comm/launcher_store.py`, for where.
"""

import faulthandler
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal import logs
from shoal.checkpoint.retention import RetentionPolicy
from shoal.cluster.backend import Facts
from shoal.cluster.local import NotLoaded
from shoal.comm.launcher_store import launcher_store, meeting_place
from shoal.elastic.messages import Failed
from shoal.elastic.supervisor import SupervisorResult
from shoal.elastic.worker import PreparedTraining, describe_failure, set_rank_threads
from shoal.errors import RUN_AGAIN, GroupLost, PlanError, ShoalError, UsageError
from shoal.events.events import GaveUpEvent, OnEvent, WarningEvent
from shoal.formatting import name_ranks
from shoal.launch.outcome import Outcome, leave_records, outcome_of, prediction_event
from shoal.launch.prepare import prepare_run
from shoal.launch.rank_peers import ENDING_S, FAILING_S, RankPeers, RanksGone
from shoal.launch.rank_seat import RankRecord, RankSeat
from shoal.launch.train import Options, describe_run, files_of, opened_run
from shoal.storage.object_store import local_path
from shoal.storage.run_dir import OWNER, RunDir
from shoal.training.options import AUTO, DEFAULT_KEEP, Recipe
from shoal.training.rank_check import refuse_unlike
from shoal.world import World

if TYPE_CHECKING:
    import torch.distributed as dist

_NOT_COMPARED = ("begun", "form_timeout_s")
SAYING_S = 10.0  # for rank 0 to say what all have found


class _RankJob(msgspec.Struct, frozen=True):
    """What rank 0 tells the others, once it has the run directory; or why there is none."""

    run_dir: str = ""
    settings: dict[str, str] = {}
    options: Options = Options()
    owner: str = ""  # what the file of that name says, where checkpoints are
    exit_code: int = 0


class RankEnd(msgspec.Struct, frozen=True):
    """How a rank ended: with a summary, by an error of its own, or because it lost the others."""

    step: int = 0
    summary: dict[str, Any] = {}
    signal: int = 0
    failed: Failed | None = None
    lost: str = ""

    @property
    def is_good(self) -> bool:
        return self.failed is None and not self.lost


def train_as_rank(
    recipe: Recipe,
    options: Options,
    run_dir: Path | None,
    world: World,
    *,
    watch: OnEvent,
    prepared: Callable[[Facts, Path], None],
    show: Callable[[Outcome], int],
) -> int:
    """Train a recipe as one rank of several, to the end of all. Returns the exit code of all.

    `watch`, `prepared` and `show` are called on rank 0 alone; `show` says how the run ended.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    set_rank_threads()
    try:
        place = meeting_place(world)
        _refuse_clear_text(place.is_one_host, world, options)
    except UsageError as error:
        if world.rank:  # all find it, and have no place to meet; rank 0 says it
            time.sleep(SAYING_S)  # a launcher ends the rest with the first
            return error.exit_code
        raise
    with ExitStack() as held:
        store = held.enter_context(launcher_store(world, place, options.form_timeout_s))
        peers = RankPeers(store, world)
        held.callback(peers.close)
        try:
            is_one_host = peers.meet(_given(recipe, options, run_dir), options.form_timeout_s)
            _refuse_starting(world, options)
            _refuse_clear_text(is_one_host, world, options)
            rank = _Rank(peers, store, watch)
            if world.rank:
                code = rank.follow(recipe)
            else:
                code = rank.lead(recipe, options, run_dir, prepared, show)
            peers.end_together(code, FAILING_S if code else ENDING_S)  # others may be stuck
            return code
        except RanksGone as gone:
            return _tell_gone(peers, gone)
        except ShoalError as error:
            is_said = world.rank > 0 and peers.first_came()  # all have found it, and rank 0 says it
            peers.end_together(error.exit_code)
            if is_said:
                return error.exit_code
            raise


def _refuse_starting(world: World, options: Options) -> None:
    """Refuse what would start other ranks than those of the launcher."""
    if options.on != "local" or options.listen is not None:
        asked = "--listen" if options.listen is not None else f"--on {options.on}"
        raise UsageError(
            f"{asked} starts processes elsewhere, and {world.launcher} has started "
            f"{world.num_ranks} here already. Leave one of them out."
        )
    if options.plan == AUTO:
        raise UsageError(
            f"--plan {AUTO} is for `shoal train` without {world.launcher}. Choose with "
            f"`shoal plan RECIPE --ranks {world.num_ranks}`, and give that plan."
        )
    if options.ranks not in (None, world.num_ranks):
        raise UsageError(
            f"--ranks {options.ranks}: {world.launcher} started {world.num_ranks} processes, and "
            "each of them is a rank. Leave --ranks out."
        )


def _refuse_clear_text(is_one_host: bool, world: World, options: Options) -> None:
    if not is_one_host and not options.trust_network:
        raise UsageError(
            f"{world.launcher} started these ranks on several hosts, where gradients and the store "
            "that ranks meet in would cross the network in clear, open to all who reach its "
            "ports. Give --trust-network if the network between them is your own; or start the run "
            "with `shoal train --on ...`, whose channels are encrypted; or use one host."
        )


def _given(recipe: Recipe, options: Options, run_dir: Path | None) -> dict[str, str]:
    """What this rank was asked for, as it is compared with what the others were."""
    told = {"the recipe": recipe.name}
    told |= {f"--set {name}": value for name, value in recipe.settings.items()}
    for name, value in msgspec.structs.asdict(options).items():
        if value is not None and name not in _NOT_COMPARED:
            told[f"--{name.removesuffix('_s').replace('_', '-')}"] = str(value)
    return told | ({} if run_dir is None else {"--run-dir": str(run_dir)})


class _Rank:
    """One rank, through the phases that all go through together."""

    def __init__(self, peers: RankPeers, store: "dist.Store", watch: OnEvent):
        self._peers, self._store, self._watch = peers, store, watch
        self._world = peers.world

    def lead(
        self,
        recipe: Recipe,
        options: Options,
        run_dir: Path | None,
        prepared: Callable[[Facts, Path], None],
        show: Callable[[Outcome], int],
    ) -> int:
        """As rank 0."""
        with ExitStack() as held:
            ranks = self._world.num_ranks
            options = msgspec.structs.replace(options, ranks=ranks, trust_network=False)  # heeded
            try:
                recipe, options, directory = held.enter_context(
                    opened_run(recipe, options, run_dir)
                )
            except ShoalError as error:
                self._tell("job", _RankJob(exit_code=error.exit_code))
                raise
            job = _RankJob(
                str(directory.path.absolute()),
                dict(recipe.settings),
                options,
                _owner_of(options, directory.path),
            )
            self._tell("job", job)
            facts, training = self._prepare(recipe, job)
            record = held.enter_context(RankRecord(directory, self._watch))
            try:
                describe_run(directory, recipe, options, facts)
                prepared(facts, directory.path)
                record.write(WarningEvent(text=_what_is_not_there(self._world)))
            finally:
                self._tell("began", True)
            own = self._train(training, job, record)
            ends, gone = self._collect(own)
            result = how_all_ended(ends, gone, self._world)
            outcome = _outcome(result, recipe, facts, record, directory, options)
            code = show(outcome)
        self._tell("code", code)
        return code

    def follow(self, recipe: Recipe) -> int:
        """As any other rank."""
        job = msgspec.msgpack.decode(self._peers.await_one("job", 0), type=_RankJob)
        if job.exit_code:
            return job.exit_code
        recipe = replace(recipe, settings=job.settings)
        _, training = self._prepare(recipe, job)
        self._peers.await_one("began", 0)
        self._train(training, job, None)
        return msgspec.msgpack.decode(self._peers.await_one("code", 0), type=int)

    def _tell(self, what: str, value: Any) -> None:
        self._peers.tell(what, msgspec.msgpack.encode(value))

    def _prepare(self, recipe: Recipe, job: _RankJob) -> tuple[Facts, PreparedTraining]:
        """Prepare the run, as all do; NotLoaded if one of them could not."""
        run_dir, failed, found = Path(job.run_dir), None, None
        log = run_dir / "logs" / f"recipe-{self._world.rank:03d}.log"
        with _printing_to(log) as output:
            try:
                if self._world.rank:
                    _refuse_other_place(job, run_dir)
                found = prepare_run(
                    recipe, job.options.start_options(), run_dir, joins=self._world.rank > 0
                )
                _refuse_servers(found[0], self._world)
            except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
                traceback.print_exc(file=output)
                failed = describe_failure(error, -1, log)
        self._tell("prepared", failed)
        told = self._peers.await_all("prepared")
        failures = {r: msgspec.msgpack.decode(c, type=Failed | None) for r, c in told.items()}
        if any(failures.values()):
            who, first = _who_failed({r: f for r, f in failures.items() if f}, self._world)
            who = "" if who == "every rank" else f"{who[:1].upper()}{who[1:]}: "
            raise NotLoaded(f"{who}{first.message}", first.trace, first.exit_code)
        assert found is not None
        return found

    def _train(
        self, training: PreparedTraining, job: _RankJob, record: "RankRecord | None"
    ) -> RankEnd:
        """Train with the others; tells them how it ended here."""
        log = Path(job.run_dir) / "logs" / f"rank-{self._world.rank:03d}.log"
        facts = training.describe()
        seat = RankSeat(
            self._peers,
            self._store,
            job.options.form_timeout_s,
            check=lambda group: refuse_unlike(group, facts, 0),
            record=record,
        )
        seat.stop_on_term(signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
        logs.printed.clear()  # what the recipe printed while it was prepared is in its log
        with _printing_to(log) as output:
            try:
                training.train(seat)
                end = RankEnd(seat.step, seat.summary, seat.stop_signal)
            except GroupLost as lost:
                traceback.print_exc(file=output)
                end = RankEnd(seat.step, signal=seat.stop_signal, lost=str(lost))
            except Exception as error:  # noqa: BLE001 (the recipe may fail in any way)
                traceback.print_exc(file=output)
                end = RankEnd(seat.step, failed=describe_failure(error, seat.step, log))
            finally:
                seat.close()
        self._tell("ended", end)
        return end

    def _collect(self, own: RankEnd) -> tuple[dict[int, RankEnd], list[int]]:
        """How each rank ended, as far as they say; and the ranks that ended without a word."""
        ends, began = {0: own}, time.monotonic()
        while True:
            gone = self._peers.gone()
            for rank, content in self._peers.told_by("ended", self._peers.others).items():
                ends[rank] = msgspec.msgpack.decode(content, type=RankEnd)
            silent = [rank for rank in gone if rank not in ends]
            is_good = all(end.is_good for end in ends.values())
            limit_s = ENDING_S if is_good and not silent else FAILING_S
            if silent or any(end.failed is not None for end in ends.values()):
                limit_s = 0.2  # the launcher is about to kill this rank
            if len(ends) == self._world.num_ranks or time.monotonic() - began > limit_s:
                return ends, silent
            time.sleep(0.02)


def how_all_ended(
    ends: Mapping[int, RankEnd], gone: Sequence[int], world: World
) -> SupervisorResult:
    """How the run ended, by how its ranks did; `gone` ended without a word. Pure."""
    result = SupervisorResult(step=max((end.step for end in ends.values()), default=0))
    failures = {rank: end.failed for rank, end in ends.items() if end.failed is not None}
    lost = {rank: end.lost for rank, end in ends.items() if end.lost}
    silent = [rank for rank in range(world.num_ranks) if rank not in ends and rank not in gone]
    result.summaries = {rank: end.summary for rank, end in ends.items() if end.summary}
    result.stopped_by = next((end.signal for end in ends.values() if end.signal), 0)
    if failures:
        who, first = _who_failed(failures, world)
        result.cause = f"{who} failed at step {first.step + 1}: {first.message}"
        result.trace, result.exit_code = first.trace, first.exit_code
    elif gone or lost or silent:
        why = next(iter(lost.values()), "it said nothing more")
        who = name_ranks(gone or silent) if gone or silent else "a rank"
        how = "its process has ended" if gone else f"the others lost it ({why})"
        result.cause = (
            f"{who} was lost after step {result.step}: {how}. {world.launcher} starts no other in "
            "its place"
        )
        result.exit_code = 1
    elif any(end.summary.get("stopped") for end in ends.values()):
        result.stopped_by = result.stopped_by or signal.SIGTERM
        saved = ends[0].summary.get("checkpoint") == result.step
        result.exit_code = RUN_AGAIN if saved else 128 + result.stopped_by
    return result


def _who_failed(failures: Mapping[int, Failed], world: World) -> tuple[str, Failed]:
    """Which ranks failed as the first of them did, in words; and how."""
    first = failures[min(failures)]
    same = [rank for rank, failed in failures.items() if failed.message == first.message]
    ranks = list(first.ranks) or sorted(same)
    return "every rank" if len(ranks) == world.num_ranks else name_ranks(ranks), first


def _outcome(
    result: SupervisorResult,
    recipe: Recipe,
    facts: Facts,
    record: "RankRecord",
    directory: RunDir,
    options: Options,
) -> Outcome:
    if result.cause:
        record.write(GaveUpEvent(cause=result.cause, step=result.step))
    keep = RetentionPolicy.parse(options.keep or DEFAULT_KEEP)
    files = files_of(directory, options)
    outcome = outcome_of(result, recipe, facts, record.saves, files=files, keep=keep)
    if (event := prediction_event(outcome)) is not None:
        record.write(event)
    return leave_records(outcome, files.record_dir, record.write)


def _tell_gone(peers: RankPeers, gone: RanksGone) -> int:
    """Another rank ended while this one waited; the first of those left says so."""
    rank = peers.world.rank
    time.sleep(0.1)  # ranks that end together are seen together
    ended = sorted({*gone.ranks, *peers.gone()})
    if rank == min((r for r in range(peers.world.num_ranks) if r not in ended), default=rank):
        raise ShoalError(
            f"{name_ranks(ended).capitalize()} ended, and with that the run: "
            f"{peers.world.launcher} starts no other in its place. What it printed says why; a run "
            "that has a checkpoint goes on by --resume."
        )
    return 1


def _what_is_not_there(world: World) -> str:
    return (
        f"{world.launcher} started these {world.num_ranks} ranks, so nobody supervises them: a "
        "lost rank ends the run, and there are no spares, parameter servers and resizes. `shoal "
        "train` without a launcher has them."
    )


def _refuse_servers(facts: Facts, world: World) -> None:
    if facts["num_servers"]:
        raise PlanError(
            f"The plan {facts['plan']!r} needs parameter servers, and {world.launcher} starts "
            "ranks alone. Use `shoal train` without it, or a plan without sync=server."
        )


def _owner_of(options: Options, run_dir: Path) -> str:
    """What stands in the file by which a run holds the place of its checkpoints; empty of one
    that every host reaches, as a URL is."""
    where = local_path(options.checkpoints or str(run_dir))
    return "" if where is None else _content(where / OWNER)


def _refuse_other_place(job: _RankJob, run_dir: Path) -> None:
    if job.owner and _owner_of(job.options, run_dir) != job.owner:
        raise UsageError(
            f"{job.options.checkpoints or run_dir} is not on this host what it is on rank 0's, and "
            "checkpoints go there. Give --run-dir or --checkpoints in a file system that all hosts "
            "see, or --checkpoints with a URL."
        )


def _content(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError:
        return "absent"


@contextmanager
def _printing_to(log: Path) -> Iterator[Any]:
    """What this rank prints and logs goes to a file; to standard error, if that cannot be."""
    try:
        output = log.open("ab")
    except OSError:  # a host that does not see the run directory
        output = open(2, "ab", closefd=False)  # noqa: SIM115
    with (
        output,
        logs.PrintedLines(output.fileno()) as printed,
        redirect_stdout(printed),
        logs.written_to(printed),
        _stacks_in(output),
    ):
        yield printed


@contextmanager
def _stacks_in(output: Any) -> Iterator[None]:
    """A crash shows all stacks there, unless this process shows them elsewhere already."""
    if faulthandler.is_enabled():
        yield
        return
    with suppress(OSError):
        faulthandler.enable(output)
    try:
        yield
    finally:
        faulthandler.disable()
