"""Callbacks: what a recipe does beside its steps, on every rank, and what it keeps for that.

A callback is an object with any of `on_start`, `on_step`, `on_evaluate`, `on_save` and `on_end`,
each called with `(trainer, info)`: a `TrainingControl` and a `TrainingInfo`, whose values are the
same on every rank. A run with callbacks is a loop of its own (`own_loop.py`) whose body they are:
so what their `state_dict` holds is handed to a newcomer, saved, restored and compared between
ranks, and rates and frozen parameters are followed.

Cost: a message of a few numbers a step, and what the callbacks do. Read next: `controls.py`, for
what they may do; `standard_callbacks.py`, for those that ship.
"""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from shoal.errors import GroupLost, RecipeError, StopNow, UsageError, found_in, nearest
from shoal.events.step import Hook, StepInfo

if TYPE_CHECKING:
    from shoal.plans.plan import Plan
    from shoal.training.controls import TrainingControl
    from shoal.training.run import Run

METHODS = ("on_start", "on_step", "on_evaluate", "on_save", "on_end")
RUNNER = "callbacks"  # the key of what callbacks keep, in what a loop keeps


class TrainingInfo(NamedTuple):
    """Where the training is. Every value is that of all ranks together."""

    step: int  # steps made so far
    num_steps: int
    epoch: int  # epochs that are complete
    samples: int  # that the steps so far have taken
    loss: float | None  # of the last step, over the global batch; None before the first
    parts: Mapping[str, float]  # named parts of that loss
    metrics: Mapping[str, float]  # of the last evaluation; empty before the first
    rate: float  # the learning rate of the first parameter group
    norm: float | None  # of the last gradient before clipping, if the run clips


class Callback:
    """A callback that does nothing. To inherit from it is optional."""

    def check_run(self, run: "Run") -> None:
        """Refuse a Run that it cannot work with, before anything starts."""

    def check_plan(self, plan: "Plan") -> None:
        """Refuse a plan that it cannot work with, before anything starts."""

    def on_start(self, trainer: "TrainingControl", info: TrainingInfo) -> None:
        """Before the first step of a start: also when a run is resumed, and on a newcomer."""

    def on_step(self, trainer: "TrainingControl", info: TrainingInfo) -> None:
        """After each step."""

    def on_evaluate(self, trainer: "TrainingControl", info: TrainingInfo) -> None:
        """After each evaluation of the run, when `on_step` of that step was called."""

    def on_save(self, trainer: "TrainingControl", info: TrainingInfo) -> None:
        """After a checkpoint of this step was begun. What it changes is not in that one."""

    def on_end(self, trainer: "TrainingControl", info: TrainingInfo) -> None:
        """When the training ends without an error, after the last save."""


def check_callbacks(run: "Run") -> None:
    """Refuse what nothing would call, what cannot be called, and what does not go with the run."""
    callbacks = run.callbacks
    if isinstance(callbacks, str | Mapping) or not isinstance(callbacks, Sequence):
        raise UsageError(
            f"callbacks is a {type(callbacks).__name__}. Give a list: callbacks=[...]."
        )
    for callback in callbacks:
        _check(callback)
        if hasattr(callback, "check_run"):
            callback.check_run(run)


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        name = callback.__name__
        raise UsageError(f"The callback {name} is a class. Give an object of it: {name}(...).")
    if not is_object(callback):
        if not callable(callback):
            raise UsageError(
                f"The callback {callback!r} has none of the methods {', '.join(METHODS)}, and is "
                "no function of a StepInfo either. Give it one of these methods."
            )
        return
    name = type(callback).__name__
    for method in _methods_of(callback):
        if method not in METHODS:
            raise UsageError(
                f"The callback {name} has the method {method}, which nothing calls. "
                f"{nearest(method, METHODS)}"
            )
        _check_signature(name, method, getattr(callback, method))
    if hasattr(callback, "state_dict") != hasattr(callback, "load_state_dict"):
        has = "state_dict" if hasattr(callback, "state_dict") else "load_state_dict"
        raise UsageError(
            f"The callback {name} has {has} alone. State that is kept needs state_dict() and "
            "load_state_dict(state): give it both, or neither."
        )


def is_object(callback: Any) -> bool:
    """Whether it has methods to be called; a plain function is a hook."""
    return bool(_methods_of(callback))


def _methods_of(callback: Any) -> list[str]:
    """All that look like methods of a callback, also misspelt."""
    return [
        name
        for name in dir(type(callback))
        if name.startswith("on_") and callable(getattr(callback, name, None))
    ]


def _check_signature(name: str, method: str, function: Callable[..., Any]) -> None:
    try:
        inspect.signature(function).bind("trainer", "info")
    except TypeError as error:
        raise UsageError(
            f"{name}.{method} cannot be called with (trainer, info): {error}. Write def "
            f"{method}(self, trainer, info)."
        ) from None
    except ValueError:
        return  # its signature cannot be read


def has_callbacks(run: "Run") -> bool:
    """Whether a run has more than plain functions to call."""
    return any(map(is_object, run.callbacks))


def check_plan(run: "Run", plan: "Plan") -> None:
    """Ask each callback whether it goes with a plan."""
    for callback in run.callbacks:
        if hasattr(callback, "check_plan"):
            callback.check_plan(plan)


def plain_hooks(run: "Run") -> list[Hook]:
    return [callback for callback in run.callbacks if not is_object(callback)]


class CallbackRunner:
    """Calls a run's callbacks in order; its own state is all of theirs."""

    def __init__(self, run: "Run", control: "TrainingControl"):
        self.control, self._run = control, run
        self._named = _named([_copy_of(one) for one in run.callbacks if is_object(one)])
        self._last: StepInfo | None = None
        self._has_started = self._has_ended = False
        self._saved_at = 0

    def __bool__(self) -> bool:
        return bool(self._named)

    def start(self, last: StepInfo | None) -> None:
        """Before the first step of this process, with its last one if it goes on from there."""
        if not self._has_started:
            self._has_started, self._last, self._saved_at = True, last, self.control.step
            self._call("on_start")

    def after_step(self, info: StepInfo) -> StepInfo:
        """The step, with what callbacks measured and logged."""
        if not self._named:
            return info
        self._last = info
        self._call("on_step")
        if info.evaluation is not None:
            self.control.metrics = dict(info.evaluation)
            self._call("on_evaluate")
            info = info._replace(evaluation=self.control.metrics)
        logged = self.control.take_logged()
        return info._replace(logged=logged.scalars, texts=logged.texts, images=logged.images)

    def saved(self) -> None:
        """A checkpoint of the last step was begun; only the first call after a step counts."""
        if self._saved_at != self.control.step:
            self._saved_at = self.control.step
            self._call("on_save")

    def end(self) -> None:
        """The training has ended; only the first call counts."""
        if not self._has_ended:
            self._has_ended = True
            self._call("on_end")

    def state_dict(self) -> dict[str, Any]:
        kept = {n: one.state_dict() for n, one in self._named.items() if hasattr(one, "state_dict")}
        return {"metrics": dict(self.control.metrics), **kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        kept = dict(state)
        self.control.metrics = kept.pop("metrics", {})
        for name, content in kept.items():
            if not hasattr(self._named.get(name), "load_state_dict"):
                known = ", ".join(self._named) or "none"
                raise UsageError(
                    f"The state of the callback {name} was kept, and this run has no such callback "
                    f"(it has {known}). Give it the callbacks that it began with; what they are "
                    "set to may change."
                )
            self._named[name].load_state_dict(content)

    def _call(self, method: str) -> None:
        for name, callback in self._named.items():
            function = getattr(callback, method, None)
            if function is not None:
                self._call_one(name, method, function)

    def _call_one(self, name: str, method: str, function: Callable[..., Any]) -> None:
        try:
            function(self.control, self._info())
        except (GroupLost, StopNow):
            raise
        except Exception as error:
            if (lost := found_in(error, GroupLost)) is not None:
                raise type(lost)(str(lost)) from error
            control = self.control
            what = (
                str(error) if isinstance(error, UsageError) else f"{type(error).__name__}: {error}"
            )
            raise RecipeError(
                f"The callback {name} failed in {method} on rank {control.rank}, after step "
                f"{control.step}: {what.rstrip('.')}."
            ) from error

    def _info(self) -> TrainingInfo:
        last, control = self._last, self.control
        place = self._run.place_after(control.step)
        return TrainingInfo(
            step=control.step,
            num_steps=control.num_steps,
            epoch=place.epoch,
            samples=place.samples,
            loss=None if last is None else last.loss,
            parts={} if last is None else last.parts,
            metrics=control.metrics,
            rate=float(control.optimizer.param_groups[0]["lr"]),
            norm=None if last is None else last.norm,
        )


def _copy_of(callback: Any) -> Any:
    """A Run may be trained more than once in a process, each time from the beginning."""
    try:
        return copy.deepcopy(callback)
    except Exception as error:
        raise UsageError(
            f"The callback {type(callback).__name__} cannot be copied: {error}. Each training "
            "begins with a copy: open files and connections in on_start, not before."
        ) from error


def _named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """By the names of their classes; of two of a class the second has a number."""
    found: dict[str, Any] = {}
    for callback in callbacks:
        kind = type(callback).__name__
        count = sum(type(other).__name__ == kind for other in found.values())
        found[f"{kind} {count + 1}" if count else kind] = callback
    return found
