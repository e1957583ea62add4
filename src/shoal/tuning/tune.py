"""`shoal.tune`: search the settings of a recipe; each trial is a run under any plan.

From a recipe and a space to a finished study: what is wrong with them is refused before anything
is made, the study's directory is taken, one process loads what all trials share, and the driver
runs them. The command line calls `run_study`, too. Loads nothing heavy by itself.

Read next: `driver.py`, the loop; `search.py`, for what Optuna does in it.
"""

import signal
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack

import msgspec

from shoal.api import error_of, recipe_of
from shoal.cluster.local import NotLoaded, prepared_fork_server
from shoal.errors import RUN_AGAIN, ShoalError, UsageError, nearest
from shoal.launch.fresh import can_fork, fork_server_afresh
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.storage.object_client import redact_password
from shoal.system.fork_server import ForkServer, fork_here
from shoal.training.goal import Goal
from shoal.training.options import Recipe
from shoal.training.wording import in_python
from shoal.tuning.directory import LOG, STUDY, StudyDir, StudyRecord, find_study, open_study
from shoal.tuning.display import StudyDisplay
from shoal.tuning.driver import Driver, DriverOptions
from shoal.tuning.results import StudyOutcome, study_outcome
from shoal.tuning.search import (
    Search,
    SearchOptions,
    grid_size,
    load_optuna,
    require_packages,
    storage_of,
)
from shoal.tuning.space import AnySpace, Space, SpaceFunction, names_function
from shoal.tuning.trial_process import StudyFacts, found_space, prepare_trials
from shoal.world import cores

if TYPE_CHECKING:
    from shoal.training.run import Run

Count = Annotated[int, msgspec.Meta(ge=1)]


class StudyOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a study can be asked for; `shoal tune --help` says what each is."""

    trials: Count | None = None  # a grid knows how many it has
    sampler: Literal["tpe", "random", "grid", "gp", "cmaes"] = "tpe"
    pruner: Literal["none", "asha", "hyperband", "median"] = "none"
    metric: str = "loss"
    parallel: Count | None = None
    plan: str | None = None
    seed: int = 0
    storage: str | None = None
    keep: str = "best=3"


class TuneOptions(TypedDict, total=False):
    """Of `shoal tune`, under the names of its options."""

    sampler: Literal["tpe", "random", "grid", "gp", "cmaes"]
    pruner: Literal["none", "asha", "hyperband", "median"]
    metric: str
    parallel: int
    seed: int
    storage: str
    keep: str


def tune(
    run_or_recipe: "str | Run | Callable[..., Run]",
    space: "str | Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]",
    trials: int | None = None,
    *,
    plan: "str | Plan | None" = None,
    settings: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    progress: bool = True,
    **options: Unpack[TuneOptions],
) -> StudyOutcome:
    """Search the settings of a Run or a recipe, and return what was found.

    `space` is a text such as "lr=log:1e-5..3e-2 width=8|64", a mapping of names to such ranges or
    to lists of choices, or a function of an Optuna trial that returns a mapping. `settings` are
    the same for all trials. More `options` are those of `shoal tune` (`TuneOptions`).

    The same call with the same `run_dir` goes on with the study, whatever ended it. All trials
    failing raises a ShoalError with the first reason. An interrupt lets the trials under way save
    themselves and raises KeyboardInterrupt.
    """
    for option in options:
        if option not in TuneOptions.__annotations__:
            known = nearest(option, TuneOptions.__annotations__)
            raise TypeError(f"tune() has no argument {option!r}. {known}")
    recipe = recipe_of(run_or_recipe, settings)
    given = {"trials": trials, "plan": None if plan is None else str(plan), **options}
    try:
        asked = msgspec.convert(given, StudyOptions)
    except msgspec.ValidationError as error:
        raise UsageError(f"tune() cannot do that: {error}.") from None
    directory = None if run_dir is None else Path(run_dir)
    try:
        outcome = run_study(recipe, space, asked, directory, is_shown=progress)
    except NotLoaded as error:
        raise error_of(error.exit_code, str(error), error.trace) from None
    except ShoalError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    if outcome.exit_code in (RUN_AGAIN, 128 + signal.SIGINT):
        raise KeyboardInterrupt(f"stopped; the study is in {outcome.study}")
    if outcome.exit_code:
        reasons = [trial.reason for trial in outcome.trials if trial.reason]
        raise ShoalError(f"All {len(outcome.trials)} trials failed. The first: {reasons[0]}")
    return outcome


def run_study(
    recipe: Recipe,
    space: "str | Mapping[str, Any] | Callable[[Any], Any]",
    options: StudyOptions,
    path: Path | None = None,
    *,
    is_shown: bool = True,
) -> StudyOutcome:
    """Search until there are as many trials as asked for, or a signal stops it.

    Raises NotLoaded if the recipe cannot be prepared.
    """
    goal = Goal.parse(options.metric)
    searched = _read_space(space)
    num_trials = _checked(options, searched)
    require_packages(options.sampler)
    record = StudyRecord(
        recipe=recipe.name,
        settings=dict(recipe.settings),
        space=str(searched),
        metric=str(goal),
        plan=options.plan,
        storage=None if options.storage is None else redact_password(options.storage),
    )
    path = find_study(path, record, num_trials)
    with open_study(path, record) as directory:
        prepare = partial(prepare_trials, recipe, searched, goal, options.plan, cores())
        start = fork_here if can_fork() else fork_server_afresh
        log_file = path.absolute() / LOG
        with prepared_fork_server(
            prepare, log_file, start(signal.SIGTERM), meanwhile=load_optuna
        ) as (server, found):
            facts = msgspec.convert(found, StudyFacts)
            search = _begun(directory, record, searched, goal, options.storage)
            outcome = _search(search, server, directory, facts, options, num_trials, is_shown)
    return msgspec.structs.replace(outcome, recipe=recipe)


def _search(
    search: Search,
    server: ForkServer,
    directory: StudyDir,
    facts: StudyFacts,
    options: StudyOptions,
    num_trials: int,
    is_shown: bool,
) -> StudyOutcome:
    parallel = num_parallel(options.parallel, facts)
    search.configure(
        SearchOptions(options.sampler, options.pruner, options.seed, parallel, facts.num_steps)
    )
    display = StudyDisplay(search.goal, num_trials, search.best(), is_shown=is_shown)
    display.say(_introduced(search, directory, facts, options, num_trials))
    if parallel < (options.parallel or 1):
        log.warning(
            "--parallel %d: %d run at a time, since %d cores hold no more under %r.",
            *(options.parallel, parallel, cores(), facts.plan),
        )
    if options.pruner != "none" and facts.evaluates and not facts.evaluates_within:
        log.warning(
            "--pruner %s has nothing to go by: the recipe evaluates at its end only. Let it "
            "evaluate before, with --set evaluate_every=N.",
            options.pruner,
        )
    driver_options = DriverOptions(num_trials, parallel, num_kept(options.keep))
    display.open()
    try:
        code = Driver(search, server, directory, facts, driver_options, display).run()
    finally:
        display.close()
    storage = options.storage or str(directory.journal)
    return study_outcome(search, directory, redact_password(storage), code)


def num_parallel(asked: int | None, facts: StudyFacts) -> int:
    """How many trials run at a time: as many as asked for, and as the cores hold."""
    most = max(1, cores() // facts.least_ranks)
    return min(asked or most, most)


def _read_space(given: Any) -> AnySpace | str:
    """The space; a function that is given by its name stays a name, and is loaded later."""
    if isinstance(given, str):
        return given.strip() if names_function(given.strip()) else Space.parse(given)
    if isinstance(given, Mapping):
        return Space.of_mapping(given)
    if callable(given):
        return SpaceFunction(getattr(given, "__qualname__", type(given).__name__), given)
    raise UsageError(
        f"A space is a text, a mapping or a function of a trial, and not a {type(given).__name__}."
    )


def _checked(options: StudyOptions, space: AnySpace | str) -> int:
    """Refuse what makes no sense, before anything is made; the number of trials."""
    if options.plan is not None:
        Plan.parse(options.plan)
    num_kept(options.keep)
    if options.sampler == "grid":
        size = grid_size(space)
        if options.trials is not None and options.trials > size:
            log.warning("The grid has %d points, and each is tried once.", size)
        return min(size, options.trials or size)
    if options.trials is None:
        raise UsageError(
            f"--sampler {options.sampler} draws as many trials as it is asked for: give --trials N."
        )
    return options.trials


def num_kept(text: str) -> int | None:
    """How many trials keep their weights, from `best=K`; None for `all`."""
    word, _, count = text.strip().partition("=")
    if word == "all" and not count:
        return None
    if word == "best" and count.isdigit():
        return int(count)
    raise UsageError(f"--keep {text!r}: write best=K for the K best trials, or all.")


def _begun(
    directory: StudyDir, record: StudyRecord, space: AnySpace | str, goal: Goal, storage: str | None
) -> Search:
    """The study in its storage. From here on it is there, and the same command goes on with it."""
    drawn = found_space(space) if isinstance(space, str) else space
    has_begun = (directory.path / STUDY).exists()
    search = Search(
        storage_of(storage, directory.journal),
        directory.name,
        msgspec.to_builtins(record),
        drawn,
        goal,
        is_new=storage is not None and not has_begun,
    )
    directory.begin(record)
    return search


def _introduced(
    search: Search, directory: StudyDir, facts: StudyFacts, options: StudyOptions, num_trials: int
) -> str:
    done = search.num_finished()
    begins = f"goes on after {done} of {num_trials} trials" if done else f"{num_trials} trials"
    goal = f"the {'largest' if search.goal.is_max else 'least'} {search.goal.metric}"
    parallel = num_parallel(options.parallel, facts)
    return (
        f"study {directory.path}: {begins}, {parallel} at a time under {facts.plan!r}, for {goal} "
        f"({options.sampler}, pruner {options.pruner}, seed {options.seed})"
    )
