"""`shoal train`: train a recipe under a plan, on the ranks of this machine."""

import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec

from shoal.cli import options
from shoal.cli.output import say, tell
from shoal.cli.report import report
from shoal.errors import UsageError, require

JOIN_TIMEOUT_S = 600.0
# Options that a run keeps, and goes on with if they are not given again.
KEPT = (
    *("keep", "checkpoints", "tensorboard", "new_data", "replay"),
    *("begin_from", "take", "partial"),
)


@click.command(epilog=options.plan_help())
@click.argument("recipe")
@options.plan
@options.settings
@options.ranks
@options.run_dir
@options.spares
@options.form_timeout
@options.heartbeat_timeout
@options.stop_timeout
@click.option(
    "--resume",
    is_flag=True,
    help="Go on from the newest good checkpoint of --run-dir, or of the recipe's last run; begin "
    "at step 0 if there is none. The plan may be another; without --plan it is the last one.",
)
@click.option(
    "--checkpoints",
    metavar="WHERE",
    help="Where they are kept: a directory, or a URL such as s3://bucket/prefix. Default: "
    "checkpoints/ in the run directory.",
)
@click.option(
    "--from",
    "begin_from",
    metavar="SOURCE",
    help="Begin with the weights of a checkpoint (of a run, the newest good one; a path or a URL), "
    "a safetensors or state_dict file, or a directory of Hugging Face or "
    "torch.distributed.checkpoint.",
)
@click.option(
    "--take",
    type=click.Choice(["weights", "everything"]),
    default="weights",
    show_default=True,
    help="With --from: everything is the optimizer, the step and the place in the data as well.",
)
@click.option(
    "--partial",
    is_flag=True,
    help="With --from: take what matches the model and list the rest, which is refused otherwise.",
)
@click.option(
    "--new-data",
    metavar="RUN",
    help="Train on the samples that the run in this directory, and those before it, have not seen; "
    "data may have grown at its end. Begins with the run's weights, unless --from says otherwise.",
)
@click.option(
    "--replay",
    type=float,
    metavar="SHARE",
    help="With --new-data: mix in old samples, 0.2 for one in five.",
)
@click.option(
    "--keep",
    metavar="RULE",
    help='Which checkpoints stay, as in "last=3 every=1000 best=loss" or "best=accuracy:max". '
    "Default: last=2, or what the run had before --resume.",
)
@click.option(
    "--listen",
    metavar="ADDRESS",
    help="Span hosts: with hosts=H in the plan, wait at this IP address of this machine for H - 1 "
    "others, which come by `shoal join RUN`.",
)
@click.option(
    "--join-timeout",
    "join_timeout_s",
    type=click.FloatRange(min=0.1),
    metavar="SECONDS",
    help="With --listen: how long to wait for them. Default: 600.",
)
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard events (an extra).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end.")
def train(recipe: str, settings: dict[str, str], **given: Any) -> None:
    """Train RECIPE, given as file.py:function or module:function.

    \b
    shoal train recipes/charlm.py:small
    shoal train recipes/charlm.py:small --plan data=2 --set layers=6 --set steps=50
    shoal train recipes/charlm.py:small --resume --plan "data=2 zero=1"

    The run goes on when a rank is killed: a warm spare takes its seat. Checkpoints are made every
    save_every steps (a field of the Run), at the end, and when the run is stopped. Ctrl-C once
    stops cleanly after a step and saves it, twice ends at once. With --resume the same command
    can be given again, whatever became of it before. Exit codes: 0 done, 1 the recipe's own error
    or an end that could not be saved, 2 usage, plan or input, 75 stopped after a checkpoint, 130
    and 143 ended by a signal without one.
    """
    options.refuse_closed_output()
    options.check_plan(given["plan"])
    from shoal.storage.rundir import RunDir, claimed

    _refuse_contradictions(given)
    if given["new_data"] is not None:
        given["new_data"] = str(Path(given["new_data"]).resolve())
        given["begin_from"] = given["begin_from"] or given["new_data"]

    with ExitStack() as held:
        run_dir = held.enter_context(RunDir(given["run_dir"], recipe, resume=given["resume"]))
        given["begun"] = None
        if run_dir.goes_on:
            given["begun"] = before = run_dir.record()
            settings = _as_it_began(before, recipe, settings, given)
        given["keep"] = given["keep"] or "last=2"
        if given["checkpoints"] and "://" not in given["checkpoints"]:
            held.enter_context(claimed(Path(given["checkpoints"])))
        code = _train(recipe, settings, given, run_dir)
    sys.exit(code)


class Begun(msgspec.Struct):
    """What run.json says of a run: as much as it takes to go on without a checkpoint."""

    recipe: str
    settings: dict[str, str]
    run: dict[str, dict[str, Any]]
    plan: str
    num_pieces: int
    num_samples: int


def _as_it_began(
    before: dict[str, Any], recipe: str, settings: dict[str, str], given: dict[str, Any]
) -> dict[str, str]:
    """What a run that goes on was given when it began, where nothing else is said now."""
    from shoal.training.recipe import SETTABLE

    try:
        begun = msgspec.convert(before, Begun)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"run.json is not of a `shoal train` that could go on: {error}. Choose another "
            "directory with --run-dir DIR."
        ) from None
    if begun.recipe != recipe:
        raise UsageError(f"The run was begun with the recipe {begun.recipe}, not {recipe}.")
    known = begun.settings
    for name, value in settings.items():
        if name not in SETTABLE and known.get(name) != value:
            was = f"was {known[name]}" if name in known else "was not set"
            raise UsageError(
                f"--set {name}={value}: it {was} when the run began, and a run goes on as it began."
            )
    for option, name in (("begin_from", "--from"), ("new_data", "--new-data")):
        now, then = _place(given[option]), before.get(option)
        if now is not None and option in before and now != then:
            began = f"began with {then}" if then else "began without"
            raise UsageError(f"{name} {now}: the run {began}, and a run goes on as it began.")
    if given["begin_from"] is None:  # whose options these are
        given["take"] = given["partial"] = None
    for option in (*KEPT, "new_data_steps", "new_data_missed"):
        if given.get(option) in (None, False):
            given[option] = before.get(option)
    given["take"] = given["take"] or "weights"
    given["partial"], given["tensorboard"] = bool(given["partial"]), bool(given["tensorboard"])
    return {**known, **settings}


def _place(where: str | None) -> str | None:
    """A place as a run remembers it: absolute, and without a password."""
    from shoal.storage.object_store import local_path
    from shoal.storage.remote import without_password

    path = None if where is None else local_path(where)
    if path is not None:
        return str(path.resolve())
    return None if where is None else without_password(where)


def _train(recipe: str, settings: dict[str, str], given: dict[str, Any], run_dir: Any) -> int:
    from shoal.cli.display import Display
    from shoal.cluster.invitation import Options
    from shoal.cluster.local import NotLoaded
    from shoal.elastic.membership import Membership
    from shoal.launch import launch
    from shoal.numerics.precision import environment_for
    from shoal.plans.plan import Plan

    if given["tensorboard"]:
        require("tensorboardX", extra="tensorboard")
    plan = given["plan"]
    if plan is not None:  # before the recipe computes anything
        os.environ.update(environment_for(Plan.parse(plan).precision))
    display = Display()
    facts: dict[str, Any] = {}

    def prepared(found: dict[str, Any]) -> None:
        facts.update(found)
        display.num_steps = found["num_steps"]
        own = {name: given[name] for name in KEPT} | {"begin_from": _place(given["begin_from"])}
        run_dir.describe(recipe=recipe, settings=settings, **own, **found)
        display.introduce(recipe, found, str(run_dir.path))

    def members(found: dict[str, Any]) -> Membership:
        return Membership(
            found["num_ranks"],
            num_servers=found["num_servers"],
            num_spares=given["spares"],
            heartbeat_timeout_s=given["heartbeat_timeout_s"],
            form_timeout_s=given["form_timeout_s"],
            num_hosts=1 if listening is None else Plan.parse(found["plan"]).hosts,
        )

    def watch(record: dict[str, Any]) -> None:
        display(record)
        if record["event"] == "tick" and (moved := run_dir.moved()):
            display({"event": "warning", "text": moved})

    asked = {name: given.get(name) for name in Options.__struct_fields__}
    listening = None if given["listen"] is None else _listening(recipe, settings, given, asked)
    try:
        outcome = launch(
            lambda: prepare_run(recipe, settings, asked, run_dir.path),
            run_dir.path,
            watch=watch,
            members=members,
            prepared=prepared,
            can_resize=True,
            listening=listening,
            stop_timeout_s=given["stop_timeout_s"],
        )
    except NotLoaded as error:
        return tell_not_loaded(error)
    display.close()
    facts["unsaved"], facts["model_problem"] = display.unsaved, display.model_problem
    facts["unholdable"], facts["saved_step"] = display.unholdable, display.saved_step
    facts["rescued"], facts["moved"] = display.rescued, run_dir.moved()
    facts["record"] = run_dir.where()
    return report(outcome, facts, run_dir.path, as_json=given["as_json"])


def _listening(
    recipe: str, settings: dict[str, str], given: dict[str, Any], options: dict[str, Any]
) -> Any:
    from shoal.cluster.hosts import Listening

    return Listening(
        address=given["listen"],
        timeout_s=given["join_timeout_s"] or JOIN_TIMEOUT_S,
        heartbeat_timeout_s=given["heartbeat_timeout_s"],
        recipe=recipe,
        settings=settings,
        options=options,
    )


def tell_not_loaded(error: Any) -> int:
    """Say why a recipe could not be prepared; the exit code that this means."""
    if error.trace:
        tell(error.trace)
    say(f"shoal: {error}", is_error=True)
    return int(error.exit_code)


def _refuse_contradictions(given: dict[str, Any]) -> None:
    from shoal.checkpoint.retention import Keep
    from shoal.plans.plan import Plan

    if given["keep"] is not None:
        Keep.parse(given["keep"])
    if (given["checkpoints"] or "").startswith("memory:"):
        raise UsageError("--checkpoints memory: is each rank's own, and gone with it.")
    if given["join_timeout_s"] is not None and given["listen"] is None:
        raise UsageError("--join-timeout has no effect without --listen ADDRESS.")
    if given["listen"] is not None:
        if given["plan"] is not None and Plan.parse(given["plan"]).hosts == 1:
            raise UsageError(
                f"--listen has no effect under {given['plan']!r}, which has one host. Add hosts=H "
                "to the plan, or leave --listen out."
            )
        from shoal.comm.reach import interface_of

        interface_of(given["listen"])
    if given["replay"] is not None and given["new_data"] is None:
        raise UsageError("--replay has no effect without --new-data RUN.")
    if given["begin_from"] is None:
        for name, default in (("take", "weights"), ("partial", False)):
            if given[name] != default:
                raise UsageError(f"--{name} has no effect without --from SOURCE.")


def prepare_run(
    recipe: str, settings: dict[str, str], given: dict[str, Any], run_dir: Path, joins: bool = False
) -> Any:
    """In the process that ranks are forked from, on each host; all but the first one join."""
    from shoal.checkpoint.finding import FOLDER
    from shoal.checkpoint.retention import Keep
    from shoal.data.transforms.normalizing import keep_statistics
    from shoal.elastic.worker import prepare_training, use_one_thread
    from shoal.storage.object_store import open_store
    from shoal.training.checkpointing import Keeping, origin_of
    from shoal.training.recipe import load_recipe, provenance
    from shoal.training.resume import refuse_used

    use_one_thread()
    run = load_recipe(recipe, settings)
    fields = provenance(run, settings)
    looked: dict[str, Any] = {}
    if given["new_data"] is not None:
        run, looked = _on_new_data(run, fields, given, run_dir)
    plain = {name: field["value"] for name, field in fields.items()}
    store = open_store(given["checkpoints"] or run_dir / FOLDER)
    keep = Keep.parse(given["keep"])
    _refuse_unmeasured(keep, run, is_new=not given["resume"])
    if not given["resume"] and not joins:
        refuse_used(store)
    plan, has_checkpoint = _to_go_on(recipe, run, plain, given, run_dir, store)
    asked = "--checkpoints asks for it" if given["checkpoints"] else ""
    if run.save_every is not None:
        asked = f"save_every={run.save_every} asks for it"

    def look_at(model: Any) -> Any:
        looked["unholdable"] = _unholdable(model, asked)
        begins = given["begin_from"] is not None and not has_checkpoint
        return _beginning(model, run, plain, given) if begins else None

    origin = origin_of(recipe, plain, plan, run)
    facts, rank_main = prepare_training(
        run,
        plan,
        run_dir,
        keeping=Keeping(
            store,
            origin,
            keep,
            is_asked=bool(asked),
            resumes=bool(given["resume"]),
            needs_one=has_checkpoint and given["begin_from"] is not None,
        ),
        begin=look_at,
        tensorboard=given["tensorboard"],
    )
    if not joins:
        keep_statistics(run.data, run_dir)  # once nothing is refused any more
    return facts | looked | {"run": fields}, rank_main


def _to_go_on(
    recipe: str, run: Any, plain: dict[str, Any], given: dict[str, Any], run_dir: Path, store: Any
) -> tuple[Any, bool]:
    """The plan, once what must be as it was is; and whether there is a checkpoint to go on from.

    Without one, a run that began is known by its run.json, and begins anew as it did.
    """
    from shoal.checkpoint.finding import FOLDER
    from shoal.checkpoint.manifest import Origin
    from shoal.storage.object_store import open_store
    from shoal.training.resume import (
        NEW_ORDER,
        newest,
        plan_to_go_on,
        refuse_changes,
        refuse_left_behind,
        refuse_other_recipe,
    )
    from shoal.training.run import resolve

    begun = given["begun"]
    found = newest(store) if given["resume"] else None
    if found is None and begun is None:
        return resolve(run, given["plan"], given["ranks"]), False
    if found is not None:
        origin = found.origin
        if begun is None:
            refuse_other_recipe(recipe, origin, store)
    else:
        refuse_left_behind(store, open_store(begun.get("checkpoints") or run_dir / FOLDER))
        values = {name: field["value"] for name, field in begun["run"].items()}
        numbers = begun["num_pieces"], begun["num_samples"]
        origin = Origin(recipe, values, begun["plan"], *numbers, {})
    own = plain if NEW_ORDER in origin.run else _known_by_marks(plain, run, run_dir)
    refuse_changes(own, run, origin)
    return plan_to_go_on(run, given["plan"], given["ranks"], origin), found is not None


def _refuse_unmeasured(keep: Any, run: Any, is_new: bool) -> None:
    """What is said of --keep best=METRIC; a run that goes on is only warned."""
    from shoal.logs import warn_on_screen
    from shoal.training.checkpointing import refuse_unmeasured

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
    run: Any, fields: dict[str, Any], given: dict[str, Any], run_dir: Path
) -> tuple[Any, dict[str, Any]]:
    """The run on what earlier ones have not seen, its order among the fields; and what to note."""
    from shoal.data.orders import order_name
    from shoal.training.lineage import missed_in, only_new, read_before, read_record
    from shoal.training.resume import NEW_ORDER

    named = Path(given["new_data"])
    goes_on = given["begun"] is not None
    before = read_before(str(named), run_dir) if goes_on else read_record(named)
    before = before.until(given.get("new_data_steps"))
    missed = given["new_data_missed"] or [] if goes_on else missed_in(before, run.data)
    new = only_new(run.data, before, given["replay"] or 0.0, missed)
    fields[NEW_ORDER] = {"value": order_name(new.order, run.seed), "from": "--new-data"}
    # That run may go on, and this one too, and more may be found bad meanwhile.
    looked = {"new_data_steps": before.last_step, "new_data_missed": missed}
    return replace(run, data=new), looked


def _known_by_marks(plain: dict[str, Any], run: Any, run_dir: Path) -> dict[str, Any]:
    """The fields of a run that began before the order of new data had a name, without that."""
    from shoal.training.lineage import read_record, refuse_other_marks
    from shoal.training.resume import NEW_ORDER

    if NEW_ORDER in plain:
        refuse_other_marks(read_record(run_dir), run.data.source)
    return {name: value for name, value in plain.items() if name != NEW_ORDER}


def _unholdable(model: Any, asked: str) -> str:
    """What of a model no checkpoint can hold; refused if one was asked for."""
    from shoal.checkpoint.types import unholdable
    from shoal.training.checkpointing import cannot_hold

    why = unholdable([*model.named_parameters(), *model.named_buffers()])
    if why and asked:
        raise cannot_hold(why, f"and {asked}")
    return why


def _beginning(model: Any, run: Any, plain: dict[str, Any], given: dict[str, Any]) -> Any:
    from shoal.training.pretrained import find_beginning
    from shoal.training.resume import refuse_other_data

    everything, partial = given["take"] == "everything", given["partial"]
    found = find_beginning(given["begin_from"], model, everything=everything, partial=partial)
    if found.origin is not None:
        refuse_other_data(plain, run, found.origin)
    return found
