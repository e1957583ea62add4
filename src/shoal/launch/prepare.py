"""Prepare a run before its ranks start: load the recipe, find what it starts from, build the model.

It happens once on each host, in the process that ranks are forked from, so that every rank has all
of it without a copy. What a run starts from is nothing, a checkpoint of its own, the weights of
another run or program, or the data that another run has not seen.

Read next: `elastic/worker.py`, for what each rank does with it.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from torch import nn

from shoal.checkpoint.dtypes import first_unsupported
from shoal.checkpoint.find import CHECKPOINTS_DIR
from shoal.checkpoint.manifest import Origin
from shoal.checkpoint.retention import RetentionPolicy
from shoal.cluster.backend import Facts
from shoal.data.orders import order_name
from shoal.data.sources import as_source
from shoal.data.transforms.normalizing import save_run_statistics
from shoal.elastic.worker import (
    PreparedTraining,
    Recording,
    digest_weights,
    prepare_training,
    set_single_thread,
)
from shoal.errors import UsageError
from shoal.events.tracing import check_steps
from shoal.events.trackers import TrackedRun, asked_trackers, make_sinks
from shoal.launch.forecast import foresee, refuse_too_large
from shoal.logs import set_level, warn_on_screen
from shoal.numerics.precision import environment_for
from shoal.parallel.striping import tables_of
from shoal.plans.plan import Plan
from shoal.storage.object_store import open_store
from shoal.storage.store import Store
from shoal.system.fork_server import WorkerMain
from shoal.training.build import with_fit_plan
from shoal.training.checkpointing import (
    CheckpointSettings,
    cannot_hold,
    origin_of,
    refuse_unmeasured,
)
from shoal.training.evaluate import data_of
from shoal.training.lineage import (
    missed_samples,
    read_parent_record,
    read_record,
    refuse_other_marks,
    select_new,
)
from shoal.training.load import holds_model, load, take_weights
from shoal.training.options import DEFAULT_KEEP, Recipe, StartOptions
from shoal.training.pretrained import InitialWeights, find_initial_weights
from shoal.training.recipe import provenance
from shoal.training.resume import (
    NEW_ORDER,
    newest,
    plan_to_resume,
    refuse_changes,
    refuse_left_behind,
    refuse_other_data,
    refuse_other_recipe,
    refuse_used_store,
)
from shoal.training.run import Run, resolve
from shoal.world import launched_world

if TYPE_CHECKING:
    from shoal.launch.evaluate import EvaluateOptions


class _Preparing(NamedTuple):
    """A run that is being prepared, with what is known of it so far."""

    recipe: Recipe
    run: Run
    values: dict[str, Any]  # of the fields of the Run
    options: StartOptions
    run_dir: Path
    store: Store  # of its checkpoints

    @property
    def who_asks(self) -> str:
        """What asks for checkpoints; empty if nothing does."""
        if self.run.save_every is not None:
            return f"save_every={self.run.save_every} asks for it"
        return "--checkpoints asks for it" if self.options.checkpoints else ""


def prepare_run(
    recipe: Recipe,
    options: StartOptions,
    run_dir: Path,
    *,
    joins: bool = False,
) -> tuple[Facts, PreparedTraining]:
    """In the process that ranks are forked from. `joins` is true on all hosts but the first."""
    set_level(options.log_level)
    if options.plan is not None:  # before the recipe computes anything
        os.environ.update(environment_for(Plan.parse(options.plan).precision))
    set_single_thread()
    run, callbacks = recipe.load()
    run = replace(run, callbacks=(*run.callbacks, *callbacks))
    fields = provenance(run, recipe.settings)
    found: Facts = {}
    if options.new_data is not None:
        run, found = _on_new_data(run, fields, options, run_dir)
    values = {name: field["value"] for name, field in fields.items()}
    store = open_store(options.checkpoints or run_dir / CHECKPOINTS_DIR)
    keep = RetentionPolicy.parse(options.keep or DEFAULT_KEEP)
    _refuse_unmeasured(keep, run, is_new=not options.resume)
    if not options.resume and not joins:
        refuse_used_store(store)
    preparing = _Preparing(recipe, run, values, options, run_dir, store)

    def prepared(plan: str | None) -> tuple[Facts, PreparedTraining]:
        asked = msgspec.structs.replace(options, plan=plan)
        return _prepare(preparing._replace(options=asked), keep, joins=joins)

    facts, rank_main = with_fit_plan(run, options.plan, options.ranks, prepared)
    if not joins:
        save_run_statistics(run.data, run_dir)  # once nothing can be refused
    return facts | found | {"run": fields}, rank_main


def _prepare(
    preparing: _Preparing, keep: RetentionPolicy, *, joins: bool
) -> tuple[Facts, PreparedTraining]:
    """Under the plan of the options."""
    run, options, store = preparing.run, preparing.options, preparing.store
    plan, has_checkpoint = _plan_of(preparing)
    found, forecast = Facts(), None
    if not options.spans and not joins and launched_world() is None:
        forecast = foresee(preparing.recipe, run, plan)
        if not options.anyway:
            refuse_too_large(run, forecast)

    def look_at(model: nn.Module) -> InitialWeights | None:
        found["unholdable"] = _unholdable(model, preparing.who_asks)
        if options.spans:
            found["first_weights"] = digest_weights(model)
            found["recipe_source"] = _digest_of_source(preparing.recipe.name)
        begins = options.begin_from is not None and not has_checkpoint
        return _beginning(model, preparing) if begins else None

    facts, rank_main = prepare_training(
        run,
        plan,
        preparing.run_dir,
        keeping=CheckpointSettings(
            store,
            origin_of(preparing.recipe.name, preparing.values, plan, run),
            keep,
            is_asked=bool(preparing.who_asks),
            resumes=options.resume,
            needs_one=has_checkpoint and options.begin_from is not None,
        ),
        begin=look_at,
        recording=_recording(preparing, plan),
    )
    if forecast is not None:
        found["predicted"] = forecast.facts()
    return facts | found, rank_main


def prepare_evaluation(
    recipe: Recipe, options: "EvaluateOptions", run_dir: Path
) -> tuple[Facts, WorkerMain]:
    """In the process that ranks are forked from: the recipe's model with weights from elsewhere,
    which ranks only measure."""
    if options.plan is not None:  # before the recipe computes anything
        os.environ.update(environment_for(Plan.parse(options.plan).precision))
    set_single_thread()
    run, _ = recipe.load()
    source = data_of(run, options.on_data)
    plan = resolve(run, options.plan, options.ranks)
    found: Facts = {"num_measured": len(source)}
    is_whole = holds_model(options.begin_from)
    if is_whole and (plan.tensor * plan.pipeline > 1 or plan.zero == 3 or plan.sync == "server"):
        raise UsageError(
            f"{options.begin_from} holds a program or quantised weights, which {plan} cannot cut "
            "or serve. Evaluate it under data=N."
        )
    if is_whole:
        run = replace(run, model=partial(load, options.begin_from, run))
    elif plan.sync != "server":
        run = replace(run, model=partial(_with_dense_tables, run.model))

    def take(model: nn.Module) -> None:
        where = options.begin_from
        found["weights"] = where if is_whole else take_weights(model, where)

    facts, rank_main = prepare_training(run, plan, run_dir, begin=take, evaluates=source)
    return facts | found, rank_main


def _with_dense_tables(make: Callable[[], nn.Module]) -> nn.Module:
    """A model to evaluate. No gradients are exchanged, so its tables are held as any embedding."""
    model = make()
    tables = tables_of(model) if isinstance(model, nn.Module) else {}  # else it is refused later
    for module in tables.values():
        module.sparse = False
    return model


def _recording(preparing: _Preparing, plan: Plan) -> Recording:
    options, settings = preparing.options, {**preparing.values, "plan": str(plan)}
    tracked = TrackedRun(preparing.run_dir, preparing.recipe.name, settings)
    trackers = make_sinks(asked_trackers(options.track, options.tensorboard), tracked)
    if options.trace is None:
        return Recording(trackers)
    return Recording(trackers, check_steps(options.trace, preparing.run.num_steps()))


def _plan_of(given: _Preparing) -> tuple[Plan, bool]:
    """The plan, and whether there is a checkpoint to resume from.

    A run that is resumed must be the one that began: its checkpoint says what that was, or its
    run.json if it has no checkpoint, in which case it starts again at step 0.
    """
    options, begun = given.options, given.options.begun
    found = newest(given.store) if options.resume else None
    if found is None and begun is None:
        return resolve(given.run, options.plan, options.ranks), False
    if found is not None:
        origin = found.origin
        if begun is None:
            refuse_other_recipe(given.recipe.name, origin, given.store)
    else:
        assert begun is not None
        before = open_store(begun.get("checkpoints") or given.run_dir / CHECKPOINTS_DIR)
        refuse_left_behind(given.store, before)
        values = {name: field["value"] for name, field in begun["run"].items()}
        numbers = begun["num_pieces"], begun["num_samples"]
        origin = Origin(given.recipe.name, values, begun["plan"], *numbers, {})
    refuse_changes(_comparable(given, origin), given.run, origin)
    return plan_to_resume(given.run, options.plan, options.ranks, origin), found is not None


def _comparable(given: _Preparing, origin: Origin) -> dict[str, Any]:
    """The values that are compared with those of the run as it began.

    Early runs on new data did not record the order of their samples: theirs is known by the record.
    """
    if NEW_ORDER in origin.run or NEW_ORDER not in given.values:
        return given.values
    refuse_other_marks(read_record(given.run_dir), given.run.data.source)
    return {name: value for name, value in given.values.items() if name != NEW_ORDER}


def _refuse_unmeasured(keep: RetentionPolicy, run: Run, *, is_new: bool) -> None:
    """Refuse --keep best=METRIC if nothing measures it; a run that is resumed is only warned."""
    try:
        refuse_unmeasured(keep, run)
    except UsageError as wrong:
        if is_new:
            raise
        warn_on_screen(str(wrong))
    if keep.best is not None and run.evaluate is None:
        warn_on_screen(
            f"best={keep.best} goes by the loss of one batch, that of the step before each save: "
            "this run does not evaluate. Give it evaluate= and evaluate_every= to compare models "
            "by the same samples."
        )


def _on_new_data(
    run: Run, fields: dict[str, Any], options: StartOptions, run_dir: Path
) -> tuple[Run, Facts]:
    """The run on the samples that earlier ones have not seen; and what to record of them."""
    assert options.new_data is not None
    as_source(run.data)  # no stream: which samples it will give is not known
    named = Path(options.new_data)
    resumes = options.begun is not None
    before = read_parent_record(str(named), run_dir) if resumes else read_record(named)
    before = before.until(options.new_data_steps)
    missed = options.new_data_missed or [] if resumes else missed_samples(before, run.data)
    new = select_new(run.data, before, options.replay or 0.0, missed)
    fields[NEW_ORDER] = {"value": order_name(new.order, run.seed), "from": "--new-data"}
    # That run may be resumed, and this one too, and more samples may be found bad meanwhile.
    found = {"new_data_steps": before.last_step, "new_data_missed": missed}
    return replace(run, data=new), found


def _digest_of_source(spec: str) -> str:
    """Of the file that the recipe is in. That of an installed module does not travel, so each host
    may have its own."""
    where = spec.rpartition(":")[0]
    file = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    return "" if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def _unholdable(model: nn.Module, who_asks: str) -> str:
    """What of a model no checkpoint can hold; refused if one was asked for."""
    why = first_unsupported([*model.named_parameters(), *model.named_buffers()])
    if why and who_asks:
        raise cannot_hold(why, f"and {who_asks}")
    return why


def _beginning(model: nn.Module, given: _Preparing) -> InitialWeights:
    options = given.options
    assert options.begin_from is not None
    everything = options.take == "everything"
    found = find_initial_weights(
        options.begin_from, model, everything=everything, partial=options.partial
    )
    if found.origin is not None:
        refuse_other_data(given.values, given.run, found.origin)
    return found
