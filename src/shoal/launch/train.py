"""From a recipe and options to a finished run: what `shoal.train` and `shoal train` call.

The run directory is taken, the recipe prepared in a process of its own, the members started by a
back end and supervised to the end, and the outcome read off. Loads nothing heavy: torch is
imported where the recipe is.

Read next: `prepare.py`, for what a run starts from; `supervised.py`, for who watches it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shoal.checkpoint.find import CHECKPOINTS_DIR
from shoal.checkpoint.retention import RetentionPolicy
from shoal.cluster.backend import Facts, StartedRun
from shoal.elastic.membership import Membership, MembershipOptions
from shoal.errors import RUN_AGAIN, UsageError
from shoal.events.events import Event, OnEvent, TickEvent, TraceEvent, WarningEvent
from shoal.events.trace_file import TRACE, TraceFile
from shoal.events.trackers import asked_trackers, check_trackers
from shoal.launch.backends import (
    JOIN_TIMEOUT_S,
    check_on,
    make_backend,
    refuse_without_hosts,
)
from shoal.launch.choose import choose_plan
from shoal.launch.outcome import (
    Outcome,
    RunFiles,
    Saves,
    leave_records,
    outcome_of,
    prediction_event,
    record_event,
)
from shoal.launch.supervised import run_supervised
from shoal.plans.plan import Plan
from shoal.plans.resize import size_rules
from shoal.storage.object_client import redact_password
from shoal.storage.object_store import local_path
from shoal.storage.run_dir import RunDir, lock_directory
from shoal.system.environment import environment
from shoal.training.options import (
    AUTO,
    DEFAULT_KEEP,
    REMEMBERED,
    SETTABLE,
    Recipe,
    StartOptions,
    check_start,
)

if TYPE_CHECKING:
    from shoal.system.fork_server import WorkerMain


class Options(StartOptions, frozen=True, kw_only=True):
    """All that a run can be asked for; `shoal train --help` says what each is."""

    on: str = "local"
    spares: Annotated[int, msgspec.Meta(ge=0)] = 1
    heartbeat_timeout_s: Annotated[float, msgspec.Meta(ge=0.5)] = 10.0
    form_timeout_s: Annotated[float, msgspec.Meta(ge=0.1)] = 30.0
    stop_timeout_s: Annotated[float, msgspec.Meta(ge=0.1)] | None = None
    listen: str | None = None
    join_timeout_s: Annotated[float, msgspec.Meta(ge=0.1)] | None = None
    nodes: Annotated[int, msgspec.Meta(ge=1)] | None = None
    slots: Annotated[int, msgspec.Meta(ge=1)] | None = None
    include: tuple[str, ...] = ()
    python: str | None = None
    trust_network: bool = False

    @property
    def spans_hosts(self) -> bool:
        """Whether the run is on several hosts, or may be."""
        return self.listen is not None or self.on.partition(":")[0] != "local"

    def start_options(self) -> StartOptions:
        names = StartOptions.__struct_fields__
        own = {name: getattr(self, name) for name in names}
        return StartOptions(**own | {"spans": self.spans_hosts})


def train(
    recipe: Recipe,
    options: Options,
    run_dir: Path | None = None,
    *,
    watch: OnEvent = lambda event: None,
    prepared: Callable[[Facts, Path], None] = lambda facts, run_dir: None,
) -> Outcome:
    """Train a recipe to its end, or until a signal or a failure ends it.

    `watch` gets every event, `prepared` what the preparation found, before a rank starts. Raises
    NotLoaded if the recipe cannot be prepared. Call this from the main thread of a process without
    other threads (`fresh.py`).
    """
    with opened_run(recipe, options, run_dir) as (recipe, options, directory):
        why = ""
        if options.plan == AUTO:
            options, why = _with_plan(recipe, options, directory)
        return _train(recipe, options, directory, watch, prepared, why)


def _with_plan(recipe: Recipe, options: Options, run_dir: RunDir) -> tuple[Options, str]:
    """With the plan that is best here, and why it is; a run that is resumed keeps its own."""
    if run_dir.is_resumed:
        kept = f"--plan {AUTO}: a run that is resumed keeps its plan"
        return msgspec.structs.replace(options, plan=None), kept
    chosen = choose_plan(recipe, options.ranks)
    why = f"--plan {AUTO} chose it: {chosen.why}"
    return msgspec.structs.replace(options, plan=chosen.plan), why


@contextmanager
def opened_run(
    recipe: Recipe, options: Options, run_dir: Path | None
) -> Iterator[tuple[Recipe, Options, RunDir]]:
    """The locked directory of a run, with the recipe and the options that it began or begins
    with."""
    refuse_contradictions(options)
    if options.new_data is not None:
        new_data = str(Path(options.new_data).resolve())
        begin_from = options.begin_from or new_data
        options = msgspec.structs.replace(options, new_data=new_data, begin_from=begin_from)
    if options.spans_hosts:  # which may work in another directory
        options = msgspec.structs.replace(options, begin_from=_place_of(options.begin_from))
    with ExitStack() as held:
        directory = held.enter_context(RunDir(run_dir, recipe.name, resume=options.resume))
        if directory.is_resumed:
            recipe, options = _as_it_began(directory.record(), recipe, options)
        options = msgspec.structs.replace(options, keep=options.keep or DEFAULT_KEEP)
        if options.checkpoints and "://" not in options.checkpoints:
            held.enter_context(lock_directory(Path(options.checkpoints)))
        check_trackers(asked_trackers(options.track, options.tensorboard))
        yield recipe, options, directory


def _train(
    recipe: Recipe,
    options: Options,
    run_dir: RunDir,
    watch: OnEvent,
    prepared: Callable[[Facts, Path], None],
    why_plan: str = "",
) -> Outcome:
    facts: Facts = {}
    saves, trace = Saves(), TraceFile(run_dir.path / TRACE)

    def prepare() -> "tuple[Facts, WorkerMain]":
        from shoal.launch.prepare import prepare_run  # which loads torch

        return prepare_run(recipe, options.start_options(), run_dir.path)

    def begin(found: Facts) -> None:
        if why_plan:
            found["chosen"] = why_plan
        facts.update(found)
        describe_run(run_dir, recipe, options, found)
        prepared(found, run_dir.path)

    def observe(event: Event) -> None:
        if isinstance(event, TraceEvent):
            trace(event)
            return
        saves(event)
        watch(event)
        if isinstance(event, TickEvent) and (moved := run_dir.moved()):
            watch(WarningEvent(text=moved))

    ended = run_supervised(
        prepare,
        run_dir.path,
        backend=make_backend(recipe, options),
        watch=observe,
        members=lambda started: _members(started, options),
        prepared=begin,
        can_resize=True,
        stop_timeout_s=options.stop_timeout_s,
    )
    trace.close()
    if options.trace is not None and not trace.has_begun:
        watch(WarningEvent(text=f"--trace {options.trace}: none of these steps was made."))
    # What ended for want of a host can go on if there is a checkpoint.
    is_vain = ended.exit_code == RUN_AGAIN and bool(ended.cause) and not saves.last_step
    result = replace(ended, exit_code=1) if is_vain else ended
    files = files_of(run_dir, options)
    keep = RetentionPolicy.parse(options.keep or DEFAULT_KEEP)
    outcome = outcome_of(result, recipe, facts, saves, files=files, keep=keep)
    if (event := prediction_event(outcome)) is not None:
        record_event(files.record_dir, event)
    return leave_records(outcome, files.record_dir, watch)


def describe_run(run_dir: RunDir, recipe: Recipe, options: Options, found: Facts) -> None:
    """Write run.json: the run begins."""
    own = {name: getattr(options, name) for name in REMEMBERED}
    own["begin_from"] = _place(options.begin_from)
    run_dir.describe(
        recipe=recipe.name,
        settings=dict(recipe.settings),
        **own,
        **found,
        environment=environment(),
    )


def files_of(run_dir: RunDir, options: Options) -> RunFiles:
    """Where the files of a run are now."""
    store = options.checkpoints or str(run_dir.path / CHECKPOINTS_DIR)
    return RunFiles(run_dir.path, run_dir.where(), run_dir.moved(), store)


def _members(started: StartedRun, options: Options) -> Membership:
    found = started.facts
    return Membership(
        found["num_ranks"],
        found["num_servers"],
        MembershipOptions(
            num_spares=options.spares,
            num_hosts=started.num_hosts,
            hosts=started.hosts,
            slots=started.slots,
            heartbeat_timeout_s=options.heartbeat_timeout_s,
            form_timeout_s=options.form_timeout_s,
            rules=size_rules(Plan.parse(found["plan"])),
            host_timeout_s=options.join_timeout_s or JOIN_TIMEOUT_S,
        ),
    )


def refuse_contradictions(options: Options) -> None:
    """Refuse options that make no sense together, before anything is made."""
    check_on(options.on)
    if options.plan == AUTO and options.spans_hosts:
        raise UsageError(
            f"--plan {AUTO} knows this machine, and the run is to be on others too. Describe them "
            "in a file, choose with `shoal plan RECIPE --cluster FILE`, and give that plan."
        )
    check_start(options)
    refuse_without_hosts(options)


class _Begun(msgspec.Struct):
    """What run.json says of a run: as much as it takes to resume without a checkpoint."""

    recipe: str
    settings: dict[str, str]
    run: dict[str, dict[str, Any]]
    plan: str
    num_pieces: int
    num_samples: int


def _as_it_began(
    before: dict[str, Any], recipe: Recipe, options: Options
) -> tuple[Recipe, Options]:
    """What a run was given when it began, where nothing else is said now."""
    try:
        begun = msgspec.convert(before, _Begun)
    except msgspec.ValidationError as error:
        raise UsageError(
            f"run.json is not of a `shoal train` that could go on: {error}. Choose another "
            "directory with --run-dir DIR."
        ) from None
    if begun.recipe != recipe.name:
        raise UsageError(f"The run was begun with the recipe {begun.recipe}, not {recipe.name}.")
    known = begun.settings
    for name, value in recipe.settings.items():
        if name not in SETTABLE and known.get(name) != value:
            was = f"was {known[name]}" if name in known else "was not set"
            raise UsageError(
                f"--set {name}={value}: it {was} when the run began, and a run goes on as it began."
            )
    for option, name in (("begin_from", "--from"), ("new_data", "--new-data")):
        now, then = _place(getattr(options, option)), before.get(option)
        if now is not None and option in before and now != then:
            began = f"began with {then}" if then else "began without"
            raise UsageError(f"{name} {now}: the run {began}, and a run goes on as it began.")
    own = msgspec.structs.asdict(options)
    if options.begin_from is None:  # whose options these are
        own["take"] = own["partial"] = None
    for option in (*REMEMBERED, "new_data_steps", "new_data_missed"):
        if own[option] is None or own[option] is False:
            own[option] = before.get(option)
    own |= {"take": own["take"] or "weights", "begun": before}
    own |= {name: bool(own[name]) for name in ("partial", "tensorboard")}
    settings = {**known, **recipe.settings}
    return replace(recipe, settings=settings), Options(**own)


def _place_of(where: str | None) -> str | None:
    """The same place from any directory."""
    path = None if where is None else local_path(where)
    return where if path is None else str(path.absolute())


def _place(where: str | None) -> str | None:
    """A place as a run remembers it: absolute, and without a password."""
    path = None if where is None else local_path(where)
    if path is not None:
        return str(path.resolve())
    return None if where is None else redact_password(where)
