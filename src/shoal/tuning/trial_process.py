"""The process of a trial: a run through `launch`, in a fork of one that has loaded everything.

The fork server imports torch and the recipe's module, and calls the recipe once with the first
values of the space, or the last, if those fail: so a parameter that it does not have, a metric that
it does not measure and a plan that does not fit are refused before anything runs, and what the
recipe's module keeps (a data set it has read, a cache) is shared by all trials without a copy. Each
trial is a fork that takes the cores it was given and trains; how that ended is its last word, a
file beside the run directory.

If the driver dies, the kernel asks each trial to stop, and it saves itself. Read next: `driver.py`.
"""

import os
import signal
import typing
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.cluster.local import NotLoaded
from shoal.errors import Ended, ShoalError, UsageError, nearest, sendable
from shoal.launch.train import Options, train
from shoal.storage.decoding import encode_json, try_decode_json
from shoal.storage.files import write_atomic
from shoal.system.fork_server import LOST, WorkerMain, WorkerSpec
from shoal.system.processes import stop_signals
from shoal.training.goal import Goal
from shoal.training.options import SETTABLE, Recipe
from shoal.tuning.space import AnySpace, EdgeValues, Space, SpaceFunction, setting
from shoal.tuning.verdicts import TrialEnd

if TYPE_CHECKING:
    from shoal.training.run import Run

VARIABLE = "SHOAL_TRIAL"
MOST_LOOKED_AT = 100_000  # steps
_LOST_EARLY = "The process that loads the recipe"


class TrialJob(msgspec.Struct, frozen=True):
    """What the process of a trial is given."""

    settings: dict[str, str]  # the drawn ones
    run_dir: str
    cores: list[int]
    plan: str


class StudyFacts(msgspec.Struct, frozen=True):
    """What the recipe says of itself, called with an edge of the space."""

    evaluates: bool
    evaluates_within: bool  # and before its last step
    num_steps: int
    plan: str  # of each trial; with data=auto `data` is what it gets
    least_ranks: int
    most_ranks: int


def prepare_trials(
    recipe: Recipe, space: AnySpace | str, goal: Goal, plan: str | None, num_cores: int
) -> tuple[dict[str, Any], WorkerMain]:
    """In the fork server: load all that trials share. `space` is a name if it is a function."""
    from shoal.elastic.worker import set_single_thread

    set_single_thread()
    recipe = _found(recipe)
    found = found_space(space) if isinstance(space, str) else space
    try:
        facts = _inspect(_at_edge(recipe, found, is_last=False), goal, plan, num_cores)
    except ShoalError as first:  # one value may be wrong, and others right
        try:
            facts = _inspect(_at_edge(recipe, found, is_last=True), goal, plan, num_cores)
        except ShoalError:
            raise first from first.__cause__
    return msgspec.to_builtins(facts), partial(run_trial, recipe)


def _at_edge(recipe: Recipe, space: AnySpace, *, is_last: bool) -> Recipe:
    """The recipe with the first or the last values of the space; its names are checked."""
    values = space.draw(EdgeValues(is_last=is_last))
    drawn = {name: setting(value) for name, value in values.items()}
    _refuse_set_twice(recipe, drawn)
    edge = replace(recipe, settings={**recipe.settings, **drawn})
    _refuse_unknown(edge, space)
    return edge


def found_space(name: str) -> AnySpace:
    """The space of `file.py:function`."""
    from shoal.training.recipe import find_recipe

    return SpaceFunction(name, find_recipe(name, "space"))


def _found(recipe: Recipe) -> Recipe:
    """The recipe as a function whose module is loaded, so that no trial has to."""
    from shoal.training.recipe import find_recipe

    given, callbacks = recipe.find()
    if not isinstance(given, str):
        return recipe
    function = find_recipe(given)
    return replace(recipe, find=lambda: (function, callbacks))


def _refuse_set_twice(recipe: Recipe, drawn: Mapping[str, str]) -> None:
    for name in drawn:
        if name in recipe.settings:
            raise UsageError(
                f"{name} is set by --set {name}={recipe.settings[name]} and drawn from the space. "
                "Leave one of them out."
            )
    for name in drawn:
        if name == "plan":
            raise UsageError("A plan is not drawn: give it by --plan, the same for all trials.")


def _inspect(recipe: Recipe, goal: Goal, plan: str | None, num_cores: int) -> StudyFacts:
    run, _ = recipe.load()
    _warm_up(run)
    goal.refuse_unknown(run.measures())
    evaluates = run.evaluate is not None
    text = plan if plan is not None else run.plan or "data=1"
    template, least, most = trial_plan(text, num_cores, run.batch_size)
    return StudyFacts(
        evaluates=evaluates,
        evaluates_within=evaluates and _evaluates_within(run),
        num_steps=run.num_steps(),
        plan=template,
        least_ranks=least,
        most_ranks=most,
    )


def _evaluates_within(run: "Run") -> bool:
    """Whether it evaluates before its last step; looked for among the first ones."""
    steps = range(1, min(run.num_steps(), MOST_LOOKED_AT))
    return run.evaluate_every is not None and any(map(run.evaluates_after, steps))


def _warm_up(run: "Run") -> None:
    """Load what a trial would until its end: most of it is imported when first used."""
    import torch.distributed.tensor  # noqa: F401
    import zmq  # noqa: F401

    from shoal.launch import prepare  # noqa: F401
    from shoal.system.environment import environment
    from shoal.training.recipe import provenance
    from shoal.ui.report import render_report

    render_report([])
    environment()
    provenance(run, {})
    run.make_optimizer(run.make_model())


def _refuse_unknown(recipe: Recipe, space: AnySpace) -> None:
    """Refuse what neither the recipe nor a Run has, and numbers for what must be whole ones."""
    from shoal.training.recipe import parameters_of
    from shoal.training.run import Run

    given, _ = recipe.find()
    fields = typing.get_type_hints(Run)
    types = {name: fields[name] for name in SETTABLE}
    if not isinstance(given, str | Run):
        types |= parameters_of(given, recipe.name)
    for name in recipe.settings:
        if name not in types:
            raise UsageError(
                f"{recipe.name} has no parameter {name!r}, and a Run has none that can be set. "
                f"{nearest(name, types)}"
            )
    for one in space.dimensions if isinstance(space, Space) else ():
        kinds = set(typing.get_args(types[one.name])) or {types[one.name]}
        if int in kinds and not kinds & {float, str} and not (one.choices or one.is_int):
            meant = one._replace(is_int=True)
            raise UsageError(f"{one}: {one.name} is a whole number. Did you mean {meant}?")


def trial_plan(text: str, num_cores: int, batch_size: int) -> tuple[str, int, int]:
    """The plan of trials, and the least and the most ranks of one. Pure.

    Under `data=auto` a trial has as many ranks as it gets cores. All trials cut their batches
    alike, for the most ranks there could be, so that what one computes depends on its settings
    alone. Any plan with more pieces than ranks may grow, if it can be resized.
    """
    from shoal.plans.plan import Plan
    from shoal.plans.resize import can_resize

    plan = Plan.parse(text)
    resolved = plan.resolve(ranks=None, cores=num_cores, batch_size=batch_size)
    if resolved.hosts > 1:
        raise UsageError(
            f"A trial runs on this machine, and {text!r} spans {resolved.hosts} hosts. Leave hosts "
            "out of the plan."
        )
    most = resolved.num_pieces if can_resize(resolved) else resolved.num_ranks
    if plan.data is None and can_resize(resolved):
        return str(msgspec.structs.replace(resolved, data=1)), 1, most
    return str(resolved), resolved.num_ranks, max(most, resolved.num_ranks)


def plan_on(plan: str, num_cores: int, least: int, most: int) -> str:
    """The plan of a trial that starts on so many cores."""
    from shoal.plans.plan import Plan
    from shoal.plans.resize import size_of, with_size

    resolved = Plan.parse(plan)
    num_ranks = min(most, max(least, num_cores))
    if num_ranks == resolved.num_ranks:
        return plan
    return str(with_size(resolved, size_of(resolved)._replace(num_ranks=num_ranks)))


def run_trial(recipe: Recipe, spec: WorkerSpec) -> int:
    """The main of a trial's process."""
    for number in stop_signals()[1:]:
        signal.signal(number, _leave)  # until the supervisor listens
    job = msgspec.json.decode(spec.variables[VARIABLE], type=TrialJob)
    os.sched_setaffinity(0, job.cores)
    options = Options(plan=job.plan, resume=True, keep="last=1", spares=0)
    own = replace(recipe, settings={**recipe.settings, **job.settings})
    try:
        outcome = train(own, options, Path(job.run_dir))
        end = TrialEnd(
            outcome.exit_code,
            outcome.cause or outcome.problem,
            outcome.trace,
            outcome.steps,
            is_lost=outcome.cause.startswith(LOST),
        )
    except NotLoaded as error:
        end = TrialEnd(error.exit_code, str(error), error.trace)
    except ShoalError as error:
        end = TrialEnd(error.exit_code, str(error), is_lost=str(error).startswith(_LOST_EARLY))
    write_end(Path(job.run_dir), end)
    return end.exit_code


def _leave(number: int, frame: object) -> None:
    raise Ended(128 + number)


def end_path(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}.json")


def write_end(run_dir: Path, end: TrialEnd) -> None:
    end = msgspec.structs.replace(end, cause=sendable(end.cause), trace=sendable(end.trace))
    write_atomic(end_path(run_dir), encode_json(end))


def read_end(run_dir: Path) -> TrialEnd | None:
    """How the trial of a run directory ended; None if it did not, or could not say so."""
    try:
        return try_decode_json(end_path(run_dir).read_bytes(), TrialEnd)
    except FileNotFoundError:
        return None
