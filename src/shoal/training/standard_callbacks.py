"""Callbacks that ship: to stop early, keep the best, average weights, follow a metric, freeze.

Each decides by values that are the same on every rank, and keeps what it decides by in its state.
`shoal.callbacks` has their names. Read next: `callbacks.py`, for when each method is called.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from shoal.errors import PlanError, UsageError, nearest
from shoal.plans.plan import Plan
from shoal.training.callbacks import Callback, TrainingInfo
from shoal.training.controls import TrainingControl
from shoal.training.loop_state import ParameterTensors
from shoal.training.own_loop import group_values, set_groups
from shoal.training.run import Run

Mode = Literal["min", "max"]


class _FollowsMetric(Callback):
    """Follows a metric of the run's evaluations: its best value, and how long ago that was."""

    def __init__(self, metric: str, mode: Mode, min_delta: float):
        if mode not in ("min", "max"):
            raise UsageError(f"{self._name}(mode={mode!r}): it is 'min' or 'max'.")
        if not 0.0 <= min_delta < math.inf:
            raise UsageError(f"{self._name}(min_delta={min_delta}): it is a number of 0 or more.")
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.best: float | None = None
        self.best_step = 0
        self.num_bad = 0  # evaluations since the best one

    @property
    def _name(self) -> str:
        return type(self).__name__

    def check_run(self, run: Run) -> None:
        if run.evaluate is None:
            raise UsageError(
                f"{self._name} follows {self.metric!r} of evaluations, and this run has none. Give "
                "it evaluate=a source of samples, and evaluate_every= steps or 'epoch'."
            )

    def is_improved(self, info: TrainingInfo) -> bool:
        """Whether this evaluation is the best so far; counts those that are not."""
        if self.metric not in info.metrics:
            known = nearest(self.metric, info.metrics)
            raise UsageError(
                f"{self._name} follows {self.metric!r}, which is not measured. {known}"
            )
        value = info.metrics[self.metric]
        sign = -1.0 if self.mode == "max" else 1.0
        if self.best is None:
            is_better = not math.isnan(value)
        else:
            is_better = sign * value < sign * self.best - self.min_delta
        if is_better:
            self.best, self.best_step, self.num_bad = value, info.step, 0
        else:
            self.num_bad += 1
        return is_better

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "best_step": self.best_step, "num_bad": self.num_bad}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.best, self.best_step = state["best"], state["best_step"]
        self.num_bad = state["num_bad"]


class EarlyStopping(_FollowsMetric):
    """End the training after `patience` evaluations in a row without a better value."""

    def __init__(
        self, metric: str = "loss", patience: int = 5, mode: Mode = "min", min_delta: float = 0.0
    ):
        super().__init__(metric, mode, min_delta)
        self.patience = _count(self._name, "patience", patience)

    def on_start(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        self._stop_if_due(trainer)  # a run that is resumed after it was stopped

    def on_evaluate(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        self.is_improved(info)
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: TrainingControl) -> None:
        if self.num_bad >= self.patience:
            best = "it was never a number" if self.best is None else f"the best was {self.best:.6g}"
            trainer.stop(
                f"{self.metric} did not improve in {self.num_bad} evaluations; {best}, after step "
                f"{self.best_step}"
            )


class BestCheckpoint(_FollowsMetric):
    """Save a checkpoint after each evaluation that is the best so far, and keep the newest of
    these, under a tag."""

    def __init__(
        self, metric: str = "loss", mode: Mode = "min", min_delta: float = 0.0, tag: str = "best"
    ):
        super().__init__(metric, mode, min_delta)
        self.tag = tag

    def on_evaluate(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if self.is_improved(info):
            trainer.save(self.tag)


class ReduceOnPlateau(_FollowsMetric):
    """Multiply the learning rate with `factor` after `patience` evaluations in a row without a
    better value, down to `min_lr`. With a schedule, both factors count."""

    def __init__(
        self,
        metric: str = "loss",
        factor: float = 0.1,
        patience: int = 5,
        mode: Mode = "min",
        min_delta: float = 0.0,
        min_lr: float = 0.0,
    ):
        super().__init__(metric, mode, min_delta)
        if not 0.0 < factor < 1.0:
            raise UsageError(f"ReduceOnPlateau(factor={factor}): it is between 0 and 1.")
        self.factor, self.min_lr = factor, min_lr
        self.patience = _count(self._name, "patience", patience)

    def on_evaluate(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if self.is_improved(info) or self.num_bad < self.patience:
            return
        self.num_bad = 0
        for number, group in enumerate(trainer.optimizer.param_groups):
            first = float(group["initial_lr"])
            if first > self.min_lr:
                new = max(first * self.factor, self.min_lr)
                trainer.set_lr(factor=new / first, group=number)


class EMA(Callback):
    """An exponential moving average of the weights: `average = decay * average + (1 - decay) *
    weights`, after every `every`-th step.

    It is saved in checkpoints under `name` (`shoal.load(..., weights="ema")`). With `evaluate`,
    each evaluation is done with the average as well: `ema_loss` and so on are then metrics.
    Cost: the weights once more in memory, and a pass over them; with `evaluate` another evaluation.
    """

    def __init__(
        self, decay: float = 0.999, *, every: int = 1, evaluate: bool = False, name: str = "ema"
    ):
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"EMA(decay={decay}): it is a number from 0 to below 1.")
        if not name.isidentifier() or name in ("model", "optimizer", "groups", "loop", "outer"):
            raise UsageError(
                f"EMA(name={name!r}): it is a word that names the average, as in 'ema'."
            )
        self.decay, self.every, self.evaluate = decay, _count("EMA", "every", every), evaluate
        self.name = name
        self.average: ParameterTensors | None = None

    def check_plan(self, plan: Plan) -> None:
        for key, usual in {"local_steps": 1, "sync": "allreduce"}.items():
            if getattr(plan, key) != usual:
                raise PlanError(
                    f"EMA does not go with {key}={getattr(plan, key)}: a rank does not hold the "
                    "weights that all agree on after every step. Leave one of them out."
                )

    def on_start(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if self.average is None:
            held = {name: p.clone() for name, p in trainer.held_parameters().items()}
            self.average = ParameterTensors(self.name, held)

    @torch.no_grad()
    def on_step(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if info.step % self.every:
            return
        assert self.average is not None
        held = trainer.held_parameters()
        for name, average in self.average.items():
            if average.is_floating_point() or average.is_complex():
                # Not lerp, whose result may depend on where in a tensor an element stands.
                average.mul_(self.decay).add_(held[name] * (1.0 - self.decay))
            else:
                average.copy_(held[name])

    def on_evaluate(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if self.evaluate:
            found = trainer.evaluate(weights=self.average)
            trainer.metrics.update({f"{self.name}_{name}": v for name, v in found.items()})

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.average = state["average"]


class Freeze(Callback):
    """Do not train the parameters whose names match: from step `since` on, and if `until` is given
    up to that step, after which they are trained. `pattern` is text such as `encoder.*`, or a list.
    """

    def __init__(self, pattern: str | Sequence[str], until: int | None = None, *, since: int = 0):
        self.patterns = [pattern] if isinstance(pattern, str) else list(pattern)
        if not self.patterns or not all(isinstance(one, str) for one in self.patterns):
            raise UsageError(f"Freeze({pattern!r}): give names of parameters, such as 'encoder.*'.")
        self.since = _count("Freeze", "since", since, least=0)
        self.until = None if until is None else _count("Freeze", "until", until)
        if self.until is not None and self.until <= self.since:
            raise UsageError(f"Freeze(since={since}, until={until}): nothing would be frozen.")

    def check_plan(self, plan: Plan) -> None:
        unfit = {"tensor": plan.tensor > 1, "pipeline": plan.pipeline > 1, "zero": plan.zero == 3}
        for key, is_unfit in (unfit | {"local_steps": plan.local_steps > 1}).items():
            if is_unfit:
                raise PlanError(
                    f"Freeze does not go with {key}={getattr(plan, key)}, under which ranks "
                    "exchange the gradient of every parameter in every step. Use data, zero=1, "
                    "zero=2 or sync=server; or give those parameters a group of their own, and "
                    "lr=0 for as long."
                )

    def on_start(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        self._apply(trainer, info.step)

    def on_step(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if info.step in (self.since, self.until):
            self._apply(trainer, info.step)

    def _apply(self, trainer: TrainingControl, step: int) -> None:
        is_frozen = step >= self.since and (self.until is None or step < self.until)
        for pattern in self.patterns:
            (trainer.freeze if is_frozen else trainer.unfreeze)(pattern)


class LogEvery(Callback):
    """Log what a function of `(trainer, info)` returns, a dict of numbers, on each `num_steps`-th
    step."""

    def __init__(
        self,
        num_steps: int,
        function: Callable[[TrainingControl, TrainingInfo], Mapping[str, float | Tensor]],
    ):
        self.num_steps = _count("LogEvery", "num_steps", num_steps)
        if not callable(function):
            raise UsageError("LogEvery(num_steps, function): give a function of (trainer, info).")
        self.function = function

    def on_step(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if info.step % self.num_steps:
            return
        found = self.function(trainer, info)
        if not isinstance(found, Mapping):
            raise UsageError(
                f"The function of LogEvery returned a {type(found).__name__}. It returns a dict of "
                "numbers by name."
            )
        for name, value in found.items():
            trainer.log(name, value)


class TorchScheduler(Callback):
    """A scheduler of torch.optim.lr_scheduler, made by a function of the optimizer and stepped
    after each step, after each epoch, or with a `metric` after each evaluation."""

    def __init__(
        self,
        make: Callable[[torch.optim.Optimizer], Any],
        metric: str | None = None,
        *,
        every: Literal["step", "epoch"] = "step",
    ):
        if every not in ("step", "epoch"):
            raise UsageError(f"TorchScheduler(every={every!r}): it is 'step' or 'epoch'.")
        self.make, self.metric, self.every = make, metric, every
        self._scheduler: Any = None
        self._kept: Mapping[str, Any] | None = None  # until there is a scheduler
        self._epoch = 0

    def check_run(self, run: Run) -> None:
        if run.schedule is not None:
            raise UsageError(
                "Run(schedule=...) sets the learning rate before each step, and TorchScheduler "
                "would do so as well. Give one of them."
            )
        if self.metric is not None and run.evaluate is None:
            raise UsageError(
                f"TorchScheduler follows {self.metric!r} of evaluations, and this run has none. "
                "Give it evaluate= and evaluate_every=."
            )

    def on_start(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        rates = group_values(trainer.optimizer)
        self._scheduler = self.make(trainer.optimizer)
        if not hasattr(self._scheduler, "step"):
            raise UsageError(
                f"TorchScheduler's function returned a {type(self._scheduler).__name__}. It makes "
                "a scheduler: lambda optimizer: StepLR(optimizer, 30)."
            )
        if self._kept is not None:
            self._scheduler.load_state_dict(dict(self._kept))
            set_groups(trainer.optimizer, rates)

    def on_step(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        is_due = self.every == "step" or info.epoch != self._epoch
        self._epoch = info.epoch
        if self.metric is None and is_due:
            self._scheduler.step()

    def on_evaluate(self, trainer: TrainingControl, info: TrainingInfo) -> None:
        if self.metric is None:
            return
        if self.metric not in info.metrics:
            known = nearest(self.metric, info.metrics)
            raise UsageError(f"TorchScheduler follows {self.metric!r}, not measured. {known}")
        self._scheduler.step(info.metrics[self.metric])

    def state_dict(self) -> dict[str, Any]:
        kept = self._kept if self._scheduler is None else self._scheduler.state_dict()
        return {"scheduler": None if kept is None else dict(kept), "epoch": self._epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept, self._epoch = state["scheduler"], state["epoch"]
        if self._scheduler is not None and self._kept is not None:
            self._scheduler.load_state_dict(dict(self._kept))


def _count(who: str, name: str, value: int, least: int = 1) -> int:
    if type(value) is not int or value < least:
        raise UsageError(f"{who}({name}={value!r}): it is a whole number of at least {least}.")
    return value
