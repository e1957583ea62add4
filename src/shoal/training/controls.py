"""What a callback may do: `trainer`, its first argument.

`TrainingControl` changes rates, freezes parameters, and collects what is logged; what a trainer and
the reference of `shoal verify` do in their own ways (stop, save, evaluate) is left to them.
`TrainerControl` is that of a trainer. Every rank must do the same with it; the loop compares that.

Read next: `own_loop.py`, for who looks.
"""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.errors import GroupLost, UsageError, nearest
from shoal.events.images import write_image
from shoal.logs import warn_once
from shoal.numerics.optimizers import begin_momentum
from shoal.parallel.fsdp import held_parameters
from shoal.plans.plan import Plan
from shoal.sync.choose import wait_for_parameters
from shoal.training.run import Run

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

MOST_TEXT = 10_000  # characters of a text that is logged
_TAG = re.compile(r"[A-Za-z0-9_-]{1,40}")


@dataclass
class LoggedValues:
    """What callbacks logged since the last step."""

    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)  # where they are in the run directory


class TrainingControl(ABC):
    """`metrics` are those of the last evaluation; a callback may add to them in `on_evaluate`."""

    def __init__(self, run: Run, num_steps: int):
        self.run, self.num_steps = run, num_steps
        self.metrics: dict[str, float] = {}
        self.tags: list[str] = []  # of the checkpoint of this step; empty if none was asked for
        self.reason = ""  # why the training was stopped
        self._images: Path | None = None  # the directory that they are kept in
        self._logged = LoggedValues()

    @property
    @abstractmethod
    def model(self) -> nn.Module: ...

    @property
    @abstractmethod
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    @abstractmethod
    def plan(self) -> Plan: ...

    @property
    @abstractmethod
    def step(self) -> int:
        """Steps made so far."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @abstractmethod
    def stop(self, reason: str = "") -> None:
        """End the training after this step, on all ranks: a success."""

    @abstractmethod
    def save(self, tag: str = "") -> None:
        """Save a checkpoint of this step. Of those with one tag the newest is kept."""

    def evaluate(
        self, source: Any = None, weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Mean loss and metrics over a source, the run's own by default; with other `weights`, by
        name, as `held_parameters` has them. Every rank must call it."""
        source = self.run.evaluate if source is None else source
        if source is None:
            raise UsageError("evaluate() needs a source: this run has none of its own (evaluate=).")
        return self._evaluate(source, weights or {})

    @abstractmethod
    def _evaluate(self, source: Any, weights: Mapping[str, Tensor]) -> dict[str, float]: ...

    @abstractmethod
    def whole_model(self) -> dict[str, Tensor]:
        """The model's state by name, on rank 0. Every rank must call it."""

    @abstractmethod
    def held_parameters(self) -> dict[str, Tensor]:
        """What this rank holds of the parameters, by name: whole ones, or its parts."""

    def log(self, name: str, value: Any) -> None:
        """Record a number of this step, in metrics.jsonl and TensorBoard; one rank writes."""
        _check_name(name)
        if isinstance(value, Tensor) and value.numel() == 1:
            value = value.item()
        if not hasattr(value, "__float__") or isinstance(value, Tensor):
            raise UsageError(f"log({name!r}, ...) was given a {_kind(value)}, and takes a number.")
        self._logged.scalars[name] = float(value)

    def log_text(self, name: str, text: str) -> None:
        """Record a text of this step; what is beyond 10,000 characters is cut off."""
        _check_name(name)
        if not isinstance(text, str):
            raise UsageError(f"log_text({name!r}, ...) was given a {_kind(text)}, and takes text.")
        self._logged.texts[name] = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}..."

    def log_image(self, name: str, image: Any) -> None:
        """Record an image of this step: height x width, with 1, 3 or 4 channels first or last, of
        bytes or of numbers from 0 to 1. It is a PNG file in `images` of the run directory."""
        _check_name(name)
        if (place := self._keep_image(name, image)) is not None:
            self._logged.images[name] = place

    def _keep_image(self, name: str, image: Any) -> str | None:
        return None

    def take_logged(self) -> LoggedValues:
        found, self._logged = self._logged, LoggedValues()
        return found

    def keep_images_in(self, directory: Path) -> None:
        self._images = directory

    def forget_save(self) -> None:
        """What was asked for has been done, or cannot be."""
        self.tags = []

    @torch.no_grad()
    def set_lr(
        self, value: float | None = None, *, factor: float | None = None, group: int | None = None
    ) -> None:
        """Set the learning rate, or multiply it, of one parameter group or of all.

        With `Run(schedule=...)` it is the rate that the schedule's factor is multiplied with.
        """
        if (value is None) == (factor is None):
            raise UsageError("set_lr takes a value or factor=..., one of them.")
        given = factor if value is None else value
        assert given is not None
        if not 0.0 <= given < math.inf:
            raise UsageError(f"set_lr was given {given}. A rate or factor is finite, 0 or more.")
        groups = self.optimizer.param_groups
        if group is not None and not 0 <= group < len(groups):
            raise UsageError(f"set_lr(group={group}): the optimizer has {len(groups)} groups.")
        for one in groups if group is None else [groups[group]]:
            for key in ("lr", "initial_lr"):
                before = one[key]
                new = float(before) * given if value is None else given
                if isinstance(before, Tensor):
                    before.fill_(new)
                else:
                    one[key] = new

    def freeze(self, pattern: str) -> None:
        """Train the parameters whose names match no longer: `encoder.*`."""
        for p in self._matching(pattern):
            p.requires_grad_(False)

    def unfreeze(self, pattern: str) -> None:
        """Train the parameters whose names match again."""
        for p in self._matching(pattern):
            p.requires_grad_(True)
        begin_momentum(self.optimizer)

    def _matching(self, pattern: str) -> list[nn.Parameter]:
        named = dict(self.model.named_parameters())
        found = [p for name, p in named.items() if fnmatchcase(name, pattern)]
        if not found:
            raise UsageError(f"No parameter has a name like {pattern!r}. {nearest(pattern, named)}")
        return found


class TrainerControl(TrainingControl):
    """That of a trainer."""

    def __init__(self, trainer: "Trainer"):
        super().__init__(trainer.run, trainer.num_steps)
        self._trainer = trainer

    @property
    def step(self) -> int:
        return self._trainer.step

    @property
    def rank(self) -> int:
        return self._trainer.mesh.rank

    @property
    def model(self) -> nn.Module:
        return self._trainer.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._trainer.optimizer

    @property
    def plan(self) -> Plan:
        return self._trainer.plan

    def stop(self, reason: str = "") -> None:
        self.reason = reason
        self._trainer.stop()

    def save(self, tag: str = "") -> None:
        if tag and not _TAG.fullmatch(tag):
            raise UsageError(f"save({tag!r}): a tag is letters, digits, - and _, 40 at the most.")
        if self._trainer.checkpointer.saves:
            self.tags = [*self.tags, tag]
        else:
            warn_once("trainer.save() has no effect: this run keeps no checkpoints.")

    def _evaluate(self, source: Any, weights: Mapping[str, Tensor]) -> dict[str, float]:
        return self._trainer.evaluate(source, weights)

    def whole_model(self) -> dict[str, Tensor]:
        while True:
            try:
                return self._trainer.whole_model()
            except GroupLost as lost:  # a newcomer's callback comes here as well
                self._trainer.regroup(lost)

    def held_parameters(self) -> dict[str, Tensor]:
        wait_for_parameters(self._trainer.strategy)
        absent = self._trainer.spread.holding.absent
        held = held_parameters(self.model)
        return {name: p.detach() for name, p in held.items() if name not in absent}

    def _keep_image(self, name: str, image: Any) -> str | None:
        if self._images is None:
            warn_once("log_image has no effect: only a run of `shoal train` has a run directory.")
            return None
        return write_image(self._images, name, self.step, image, self._trainer.writes_record)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise UsageError(f"{name!r} is no name to log under: it must be text.")


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"tensor of shape {list(value.shape)}"
    return type(value).__name__
