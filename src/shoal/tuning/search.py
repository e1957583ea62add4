"""A study of Optuna, told and asked by the driver alone: the one file that knows Optuna.

Trials draw their values here, once, so every rank of a trial has the same. Each draw has its own
seed, made of the study's seed and the trial's number: a study that was interrupted goes on with the
values it would have drawn. What was drawn and reported is in the storage before anything depends on
it; a trial that was under way when the driver died is still RUNNING there, and is taken up again.

The storage is a journal file in the study's directory, or a database by its URL; optuna-dashboard
shows either. Cost: some 10 ms a draw, with Gaussian processes up to a second. Read next:
`driver.py`.
"""

import hashlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.errors import UsageError, require
from shoal.storage.object_client import redact_password
from shoal.training.goal import Goal
from shoal.tuning.objective import TrialReport
from shoal.tuning.space import AnySpace, Space, SpaceFunction, Value

EXTRA = "tune"
_NEEDS = {"gp": ("scipy", "torch"), "cmaes": ("cmaes",)}
_RECORD = "shoal"  # the attribute of a study that says what it is of
_REASON = "reason"  # of a trial that failed
_SETTINGS = "settings"  # of a trial whose space is a function


class FinishedTrial(msgspec.Struct, frozen=True):
    """A trial of a study, as results show it."""

    trial: int
    state: str  # complete, pruned, failed or running
    value: float | None
    settings: dict[str, Value]
    run_dir: str
    steps: int = 0  # of the last report
    reason: str = ""  # why it failed


class SearchOptions(NamedTuple):
    """How values are drawn and when a trial is pruned."""

    sampler: str
    pruner: str
    seed: int
    num_parallel: int
    num_steps: int  # of a trial, as its recipe says


def load_optuna() -> None:
    """Import Optuna, which takes a second, while something else is waited for."""
    _optuna()


def grid_size(space: AnySpace | str) -> int:
    """How many points the grid of a space has."""
    return math.prod(map(len, _grid(space).values()))


def require_packages(sampler: str) -> None:
    """Refuse a study whose packages are missing, without loading them."""
    for module in ("optuna", *_NEEDS.get(sampler, ())):
        if find_spec(module) is None:
            require(module, extra=EXTRA)


def storage_of(url: str | None, journal: Path) -> Any:
    """A database, or the journal file; what a writer that was killed left of it is mended."""
    optuna = _optuna()
    if url is not None:
        try:
            return optuna.storages.RDBStorage(url)
        except Exception as error:
            why = " ".join(str(error).split())[:300]
            raise UsageError(
                f"The storage {redact_password(url)} cannot be opened: {why}. Give a database that "
                "SQLAlchemy can reach, as in sqlite:///study.db, or leave --storage out."
            ) from error
    _mend(journal)
    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    try:
        return optuna.storages.JournalStorage(backend)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"{journal} is damaged: {error}. Put back a copy of it, or begin another study with "
            "--run-dir DIR."
        ) from error


def _mend(journal: Path) -> None:
    """The study's directory is locked, so a lock or half a line is of a driver that was killed."""
    for lock in journal.parent.glob(f"{journal.name}.lock*"):
        lock.unlink(missing_ok=True)
    if not journal.exists():
        return
    content = journal.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        with open(journal, "r+b") as file:
            file.truncate(whole)


class Search:
    """The study: propose trials, take their reports, finish them."""

    def __init__(
        self,
        storage: Any,
        name: str,
        record: Mapping[str, Any],
        space: AnySpace,
        goal: Goal,
        *,
        is_new: bool,
    ):
        """Open the study, or begin it if it `is_new`. `record` is what it is of."""
        optuna = _optuna()
        direction = "maximize" if goal.is_max else "minimize"
        with _quiet():
            self._study = optuna.create_study(
                storage=storage, study_name=name, direction=direction, load_if_exists=True
            )
        self._space, self.goal = space, goal
        self._trials: dict[int, Any] = {}  # those under way
        self._options = SearchOptions("random", "none", 0, 1, 1)
        known = self._study.user_attrs.get(_RECORD)
        if known is None and self._study.trials:
            raise UsageError(f"The study {name!r} in this storage was not made by `shoal tune`.")
        if known is not None and (is_new or known != dict(record)):
            raise UsageError(
                f"The storage has a study {name!r} already, of {known.get('recipe')}, and its "
                "trials are not in this directory. A study is named after its directory: choose "
                "another --run-dir DIR."
            )
        if known is None:
            self._study.set_user_attr(_RECORD, dict(record))

    def configure(self, options: SearchOptions) -> None:
        """Say how to search; before `propose`."""
        self._options = options
        self._study.pruner = _pruner(options)

    def num_finished(self) -> int:
        return sum(trial.state.is_finished() for trial in self._frozen())

    def num_trials(self) -> int:
        return len(self._frozen())

    def most_trials(self) -> float:
        """How many trials there can be: as many as the grid has points, if it is one."""
        if self._options.sampler != "grid":
            return math.inf
        return grid_size(self._space)

    def left_running(self) -> list[int]:
        """The trials that were under way when an earlier driver ended."""
        return [t.number for t in self._frozen() if not t.state.is_finished()]

    def propose(self, number: int | None = None) -> tuple[int, dict[str, Value]]:
        """A new trial, or one that was left under way, and its values.

        What an earlier driver drew for it stays, and what it did not get to is drawn now.
        """
        optuna = _optuna()
        with _quiet():
            if number is None:
                self._study.sampler = _sampler(self._options, self._space, len(self._frozen()))
                trial = self._study.ask()
            else:
                self._study.sampler = _sampler(self._options, self._space, number)
                trial_id = self._frozen()[number]._trial_id
                trial = optuna.trial.Trial(self._study, trial_id)
            drawn = self._space.draw(trial)
            if isinstance(self._space, SpaceFunction):  # it may have made others of what it drew
                trial.set_user_attr(_SETTINGS, drawn)
        self._trials[trial.number] = trial
        return trial.number, drawn

    def report(self, number: int, reports: Sequence[TrialReport]) -> bool:
        """Take what a trial has reported so far; True if it is to be pruned."""
        trial = self._trials[number]
        known = self._frozen()[number].intermediate_values
        prune = False
        with _quiet():
            for step, value in reports:
                if step not in known:
                    trial.report(value, step)
                    prune = prune or bool(trial.should_prune())
        return prune

    def complete(self, number: int, value: float) -> None:
        self._tell(number, value=value)

    def prune(self, number: int) -> None:
        self._tell(number, state="PRUNED")

    def fail(self, number: int, reason: str) -> None:
        self._trials[number].set_user_attr(_REASON, reason)
        self._tell(number, state="FAIL")

    def _tell(self, number: int, value: float | None = None, state: str | None = None) -> None:
        optuna = _optuna()
        told = None if state is None else optuna.trial.TrialState[state]
        # A grid that is exhausted asks for an end of `optimize`, which is not what runs here.
        with _quiet(), suppress(RuntimeError):
            self._study.tell(self._trials[number], value, state=told)
        del self._trials[number]

    def trials(self, run_dir_of: Any) -> list[FinishedTrial]:
        """All trials so far."""
        return [_row(trial, str(run_dir_of(trial.number))) for trial in self._frozen()]

    def best(self) -> tuple[float, int] | None:
        """The best value among trials that made their last step, and the trial's number."""
        done = [t for t in self._frozen() if t.state.name == "COMPLETE"]
        if not done:
            return None
        sign = -1.0 if self.goal.is_max else 1.0
        found = min(done, key=lambda t: (sign * t.value, t.number))
        return float(found.value), int(found.number)

    def importances(self) -> dict[str, float]:
        """The share of each parameter in what made trials good (PED-ANOVA); empty if too few."""
        optuna = _optuna()
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        try:
            with _quiet():
                found = optuna.importance.get_param_importances(self._study, evaluator=evaluator)
        except (ValueError, RuntimeError):
            return {}
        return {name: float(share) for name, share in found.items() if math.isfinite(share)}

    def _frozen(self) -> list[Any]:
        found: list[Any] = self._study.get_trials(deepcopy=False)
        return found


def _row(trial: Any, run_dir: str) -> FinishedTrial:
    names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed"}
    value = trial.value if trial.value is not None and math.isfinite(trial.value) else None
    return FinishedTrial(
        trial=trial.number,
        state=names.get(trial.state.name, "running"),
        value=value,
        settings=dict(trial.user_attrs.get(_SETTINGS, trial.params)),
        run_dir=run_dir,
        steps=max(trial.intermediate_values, default=0),
        reason=str(trial.user_attrs.get(_REASON, "")),
    )


def _sampler(options: SearchOptions, space: AnySpace, number: int) -> Any:
    """The sampler of one draw. What it learns from is in the storage, not in it."""
    samplers, name = _optuna().samplers, options.sampler
    text = f"{options.seed}:{number}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:4], "big")
    if name == "grid":
        return samplers.GridSampler(_grid(space), seed=options.seed)
    if name == "random":
        return samplers.RandomSampler(seed=seed)
    if name == "gp":
        require("torch", extra=EXTRA).set_num_threads(1)  # trials have the cores
        return samplers.GPSampler(seed=seed, deterministic_objective=False)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    # Trials under way count as bad ones, or two that are drawn side by side would be alike.
    return samplers.TPESampler(seed=seed, constant_liar=options.num_parallel > 1)


def _grid(space: AnySpace | str) -> Mapping[str, Sequence[Value]]:
    if not isinstance(space, Space):
        raise UsageError(
            f"A grid tries all values, and the function {space} does not list them. Give the space "
            "as text, or another sampler."
        )
    return space.grid()


def _pruner(options: SearchOptions) -> Any:
    pruners, name = _optuna().pruners, options.pruner
    if name == "none":
        return pruners.NopPruner()
    if name == "asha":
        return pruners.SuccessiveHalvingPruner()
    if name == "hyperband":
        return pruners.HyperbandPruner(max_resource=options.num_steps)
    return pruners.MedianPruner()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without remarks that samplers and storages are new, or that a step was reported before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _optuna() -> Any:
    module = require("optuna", extra=EXTRA)
    module.logging.set_verbosity(module.logging.ERROR)
    return module
