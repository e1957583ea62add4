"""`shoal.train` and `shoal.evaluate`: runs from Python, in a script, a notebook or a thread.

They are the commands of these names as functions: the same processes, recovery, checkpoints and
record. Loads nothing heavy: torch is imported where the recipe is. What uses a trained model in
this very process is in `inference/`.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, Unpack

import msgspec

from shoal.cluster.backend import Facts
from shoal.cluster.local import NotLoaded
from shoal.errors import RUN_AGAIN, RecipeError, ShoalError, UsageError, nearest
from shoal.events.events import OnEvent
from shoal.events.screen import Display
from shoal.launch import fresh
from shoal.launch.evaluate import EvaluateOptions, Evaluation
from shoal.launch.evaluate import evaluate as evaluate_here
from shoal.launch.outcome import Outcome, how_it_ended
from shoal.launch.supervised import RunFailed
from shoal.launch.train import Options, refuse_contradictions
from shoal.launch.train import train as train_here
from shoal.logs import LEVELS
from shoal.training.options import Recipe, WhichData
from shoal.training.wording import in_python

if TYPE_CHECKING:
    from shoal.plans.plan import Plan
    from shoal.training.run import Run

T = TypeVar("T")


class TrainOptions(TypedDict, total=False):
    """Of `shoal train`, under the names of its options; `--from` is begin_from."""

    ranks: int
    checkpoints: str
    keep: str
    begin_from: str
    take: Literal["weights", "everything"]
    partial: bool
    new_data: str
    replay: float
    tensorboard: bool
    track: str
    trace: str
    log_level: Literal["debug", "info", "warning", "error"]
    spares: int
    heartbeat_timeout_s: float
    form_timeout_s: float
    stop_timeout_s: float
    listen: str
    join_timeout_s: float
    nodes: int
    slots: int
    include: tuple[str, ...]
    python: str
    trust_network: bool
    anyway: bool


def train(
    run_or_recipe: "str | Run | Callable[..., Run]",
    plan: "str | Plan | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
    run_dir: str | Path | None = None,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
    on: str = "local",
    progress: bool | OnEvent = True,
    **options: Unpack[TrainOptions],
) -> Outcome:
    """Train a Run, or a recipe (`file.py:function`, or the function), and return how it ended.

    `settings` are what `--set` sets; `callbacks` are added to those of the Run: objects with
    `on_step` and other methods (`shoal.Callback`), or functions that get a StepInfo after each
    step, on every rank; `on` says where processes start. With `progress` events are shown on
    standard error as `shoal train` shows them, or given to a function. More `options` are those of
    `shoal train` (`TrainOptions`). `plan="auto"` is the fastest here that trains the same.

    A failure raises a ShoalError with the traceback of the rank that failed as a note. An interrupt
    stops the run after its step, saves it and raises KeyboardInterrupt; with `resume=True` and the
    same `run_dir` it goes on from there. Both have the Outcome as `error.outcome` (None if
    there was no first step). A process that has threads or signal handlers, or is a notebook, is
    not forked: a fresh one is started, which takes some two seconds more and gets the Run by
    cloudpickle (`launch/fresh.py`).
    """
    for option in options:
        if option not in TrainOptions.__annotations__:
            known = nearest(option, TrainOptions.__annotations__)
            raise TypeError(f"train() has no argument {option!r}. {known}")
    if callbacks and "listen" in options:
        raise UsageError("callbacks stay on this host: other hosts load the recipe by its name.")
    recipe = recipe_of(run_or_recipe, settings, callbacks)
    given = {"on": on, "plan": None if plan is None else str(plan), "resume": resume, **options}
    asked = _asked("train", Options, given)
    return train_recipe(recipe, asked, None if run_dir is None else Path(run_dir), progress)


def train_recipe(
    recipe: Recipe, options: Options, run_dir: Path | None, progress: bool | OnEvent
) -> Outcome:
    """`train`, for functions that ask for a recipe themselves (`slim/`)."""
    start = train_here if fresh.can_fork() else fresh.train_fresh
    watch, introduce, close = _shown(recipe.name, progress, LEVELS[options.log_level])
    try:
        refuse_contradictions(options)
        outcome = start(recipe, options, run_dir, watch=watch, prepared=introduce)
    except NotLoaded as error:
        raise error_of(error.exit_code, str(error), error.trace) from None
    except KeyboardInterrupt as error:
        vars(error).setdefault("outcome", None)  # before the first step
        raise
    except ShoalError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    finally:
        close()
    return _checked(outcome)


def evaluate(
    run_or_recipe: "str | Run | Callable[..., Run]",
    from_: str | Path,
    plan: "str | Plan | None" = None,
    *,
    settings: Mapping[str, Any] | None = None,
    on_data: WhichData = "evaluate",
    run_dir: str | Path | None = None,
    progress: bool | OnEvent = True,
) -> Evaluation:
    """Measure trained weights on the recipe's data, under a plan, and return loss and metrics.

    `from_` is a run directory, a checkpoint, or weights that another program wrote; the answer has
    the bits of an evaluation in training, on any number of ranks. `on_data="train"` measures on
    what the recipe trains on. Logs of ranks are kept only in a `run_dir`. Failures raise a
    ShoalError, as those of `shoal.train` do.
    """
    recipe = recipe_of(run_or_recipe, settings)
    given = {"begin_from": from_, "plan": None if plan is None else str(plan), "on_data": on_data}
    asked = _asked("evaluate", EvaluateOptions, given)
    directory = None if run_dir is None else Path(run_dir)
    start = evaluate_here if fresh.can_fork() else fresh.evaluate_fresh
    watch, _, close = _shown(recipe.name, progress)
    try:
        return start(recipe, asked, directory, watch=watch)
    except (NotLoaded, RunFailed) as error:
        if error.exit_code == fresh.INTERRUPTED:
            raise KeyboardInterrupt(str(error)) from None
        raise error_of(error.exit_code, str(error), error.trace) from None
    except ShoalError as error:
        error.args = (in_python(str(error)), *error.args[1:])
        raise
    finally:
        close()


def recipe_of(
    given: "str | Run | Callable[..., Run]",
    settings: Mapping[str, Any] | None,
    callbacks: Sequence[Any] = (),
    change: "Callable[[Run], Run] | None" = None,
) -> Recipe:
    """A recipe as a run is asked for by it; `change` makes another Run of its own."""
    name, is_named = name_of(given)
    texts = {key: str(value) for key, value in (settings or {}).items()}
    is_named = is_named and change is None
    return Recipe(name, lambda: (given, tuple(callbacks)), texts, is_named, change)


def name_of(given: "str | Run | Callable[..., Run]") -> tuple[str, bool]:
    """What records call it, and whether another process can find it by that name."""
    if isinstance(given, str):
        return given, True
    main = getattr(sys.modules["__main__"], "__file__", None)
    place = "notebook" if main is None else Path(main).name
    function = getattr(given, "__qualname__", None)
    if function is None or "<" in function:
        return place, False
    module = getattr(given, "__module__", "__main__")
    return f"{place if module == '__main__' else module}:{function}", False


def _shown(
    name: str, progress: bool | OnEvent, level: int = LEVELS["info"]
) -> tuple[OnEvent, Callable[[Facts, Path], None], Callable[[], None]]:
    """What to do with events, with what the preparation found, and at the end."""
    if callable(progress):
        return progress, lambda facts, run_dir: None, lambda: None
    if not progress:
        return lambda event: None, lambda facts, run_dir: None, lambda: None
    display = Display(level)
    return display, partial(display.introduce, name), display.close


def _checked(outcome: Outcome) -> Outcome:
    """The outcome of a run that ended as it should; else an exception that says how it ended, with
    the outcome."""
    stopped = outcome.stopped_by == signal.SIGINT and not outcome.is_finished
    if outcome.exit_code in (0, RUN_AGAIN) and not stopped:
        return outcome
    error: BaseException
    if stopped:  # not a class of our own: Python, IPython and shells know this one
        error = KeyboardInterrupt(in_python(how_it_ended(outcome)))
        if outcome.trace:
            error.add_note(outcome.trace)
    else:
        error = error_of(outcome.exit_code, how_it_ended(outcome), outcome.trace)
    vars(error).update(outcome=outcome)
    raise error


def error_of(exit_code: int, message: str, trace: str) -> ShoalError:
    """By whose doing it failed: the caller's, the recipe's, or neither's."""
    kind = RecipeError if trace else ShoalError
    message = in_python(message)
    error = UsageError(message) if exit_code == UsageError.exit_code else kind(message)
    if trace:
        error.add_note(trace)
    return error


def _asked(function: str, kind: type[T], given: Mapping[str, Any]) -> T:
    try:
        return msgspec.convert(
            {k: os.fspath(v) if isinstance(v, Path) else v for k, v in given.items()}, kind
        )
    except msgspec.ValidationError as error:
        raise UsageError(f"{function}() cannot do that: {error}.") from None
