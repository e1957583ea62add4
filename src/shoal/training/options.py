"""What a run is asked for: its recipe, where it starts, what it keeps, how it records.

Loads nothing heavy: a recipe is loaded where it is trained, not where it is asked for.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import msgspec

from shoal.checkpoint.retention import RetentionPolicy
from shoal.errors import UsageError
from shoal.events.tracing import parse_steps
from shoal.events.trackers import parse_trackers
from shoal.plans.plan import Plan
from shoal.storage.object_client import refuse_password

if TYPE_CHECKING:
    from shoal.training.run import Run

    Given = str | Run | Callable[..., Run]

# The fields of a Run that can be set from outside.
SETTABLE = (
    *("batch_size", "steps", "epochs", "seed", "clip", "end"),
    *("evaluate_every", "save_every", "check_every", "loaders"),
)

KEEPS_NOTHING = "SHOAL_KEEPS_NOTHING"  # set for ranks of which some do not see the checkpoints
AUTO = "auto"  # in place of a plan: the best that is found
DEFAULT_KEEP = "last=2"  # checkpoints, if nothing else is asked for
WhichData = Literal["evaluate", "train"]  # of a Run, to measure a trained model on
# What a run remembers in run.json, and resumes with if it is not given again.
REMEMBERED = (
    *("keep", "checkpoints", "tensorboard", "track", "new_data", "replay"),
    *("begin_from", "take", "partial"),
)


class StartOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the preparation of a run is given, on the first host and on all others."""

    plan: str | None = None
    ranks: Annotated[int, msgspec.Meta(ge=1)] | None = None
    resume: bool = False
    checkpoints: str | None = None
    keep: str | None = None
    begin_from: str | None = None
    take: Literal["weights", "everything"] = "weights"
    partial: bool = False
    new_data: str | None = None
    new_data_steps: int | None = None
    new_data_missed: list[int] | None = None
    replay: float | None = None
    tensorboard: bool = False
    track: str | None = None
    trace: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    begun: dict[str, Any] | None = None  # what run.json says of a run that is resumed
    anyway: bool = False  # also if it cannot fit in memory
    spans: bool = False  # several hosts, whose first weights must be equal


def check_start(options: StartOptions) -> None:
    """Refuse options that make no sense, alone or together."""
    if options.plan not in (None, AUTO):
        Plan.parse(options.plan)
    if options.keep is not None:
        RetentionPolicy.parse(options.keep)
    if (options.checkpoints or "").startswith("memory:"):
        raise UsageError("--checkpoints memory: is each rank's own, and gone with it.")
    for name, value in (("--checkpoints", options.checkpoints), ("--from", options.begin_from)):
        refuse_password(name, value or "")
    parse_trackers(options.track)
    if options.trace is not None:
        parse_steps(options.trace)
    if options.replay is not None and options.new_data is None:
        raise UsageError("--replay has no effect without --new-data RUN.")
    if options.begin_from is None:
        for name, default in (("take", "weights"), ("partial", False)):
            if getattr(options, name) != default:
                raise UsageError(f"--{name} has no effect without --from SOURCE.")


def check_settings(settings: Mapping[str, str]) -> None:
    """Refuse what would stand in run.json and in the lines of a run, for all who may read them."""
    for name, value in settings.items():
        refuse_password(f"--set {name}:", value)


@dataclass(frozen=True)
class Recipe:
    """What is trained, as the user gave it: a name, a function or a Run, with what `--set` set."""

    name: str  # in records: file.py:function, or where it was made
    find: "Callable[[], tuple[Given, Sequence[Any]]]"  # itself, and the callbacks to call
    settings: Mapping[str, str] = field(default_factory=dict)
    is_named: bool = True  # so that another process can find it by its name
    change: "Callable[[Run], Run] | None" = None  # what a verb makes of the Run

    @classmethod
    def named(cls, spec: str, settings: Mapping[str, str]) -> Self:
        """Of `file.py:function` or `module:function`."""
        return cls(spec, partial(find_named, spec), settings)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a caller who pickles an Outcome, as pools of processes do: what can be imported goes
        along by its name; a Run or a function of a notebook stays where it was made."""
        given, _ = self.find()
        spec = given if isinstance(given, str) else _importable(given)
        find = partial(_left_behind, self.name) if spec is None else partial(find_named, spec)
        return type(self), (self.name, find, dict(self.settings), self.is_named, self.change)

    def load(self) -> "tuple[Run, Sequence[Any]]":
        """Call it. It runs the user's code, so this belongs to the process that trains it."""
        from shoal.training.recipe import load_recipe

        given, callbacks = self.find()
        run = load_recipe(given, self.settings)
        return run if self.change is None else self.change(run), callbacks


def find_named(spec: str) -> "tuple[Given, Sequence[Any]]":
    return spec, ()


def _left_behind(name: str) -> "tuple[Given, Sequence[Any]]":
    raise UsageError(
        f"The recipe {name} stayed in the process that trained it, since no other can import it. "
        "Load the model there, or name a recipe: shoal.load(outcome.run_dir, recipe)."
    )


def _importable(given: Any) -> str | None:
    """`module:function`, if that is how another process finds the same thing."""
    module, name = getattr(given, "__module__", None), getattr(given, "__qualname__", "")
    found = getattr(sys.modules.get(str(module)), name, None)
    return f"{module}:{name}" if found is given else None
