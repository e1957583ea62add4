"""The record of a committed step, and hooks that receive it.

`StepInfo` is made once per committed step and passed to the trainer's hooks and its caller. A hook
is any function of a `StepInfo`.
"""

from typing import Callable, NamedTuple, Protocol, runtime_checkable


class Times(NamedTuple):
    """The seconds of one step, on this rank.

    `exchange` is all that this rank was blocked in for others, in forward, backward and update,
    too; `waiting` is the part of it before the slowest rank, or another stage's tensors, arrived.
    """

    data: float
    compute: float
    exchange: float
    waiting: float

    @property
    def total(self) -> float:
        return self.data + self.compute + self.exchange + self.waiting


class StepInfo(NamedTuple):
    """One committed step. `step` counts from 1: the number of steps committed so far."""

    step: int
    loss: float  # over the global batch, weighted as the loss is; NaN if all of it is left out
    samples: int  # in the global batch of this step
    rate: float  # learning rate of the first parameter group
    norm: float | None  # of the whole gradient before clipping; None if it was not computed
    times: Times
    bytes_sent: int  # by this rank, for this step
    mark: int | None = None  # of the samples since the last one that has it (`data/ledger.py`)
    left_out: int = 0  # of the samples, by quarantine; if all are, the step changes nothing
    evaluation: dict[str, float] | None = None  # filled when this step was one to evaluate
    ranks: tuple[float, ...] = ()  # in lockstep: seconds until each rank came to the exchange
    parts: dict[str, float] = {}  # named parts of the loss, weighted as each of them is
    logged: dict[str, float] = {}  # by callbacks
    texts: dict[str, str] = {}  # by callbacks
    images: dict[str, str] = {}  # by callbacks: where they are in the run directory
    time: float = 0.0  # at which it was made, in seconds since 1970; 0 if not known


Hook = Callable[[StepInfo], None]


@runtime_checkable
class PhaseHook(Protocol):
    """A hook that is also called after each phase of a step of the recipe's own, by its number."""

    def on_phase(self, number: int) -> None: ...


def every(num_steps: int, hook: Hook) -> Hook:
    """Call `hook` on each `num_steps`-th step only."""
    if num_steps < 1:
        raise ValueError(f"every({num_steps}): the number of steps must be at least 1.")

    def on_some(info: StepInfo) -> None:
        if info.step % num_steps == 0:
            hook(info)

    return on_some
