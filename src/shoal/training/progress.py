"""Where a rank is in its run: the one record that ranks of a new group agree on."""

import msgspec

from shoal.events.step import StepInfo

Metrics = dict[str, float]


class PhaseResult(msgspec.Struct, frozen=True):
    """What all ranks know of a committed phase (`custom_step.py`)."""

    name: str
    loss: float  # over the whole batch
    norm: float | None = None  # of its gradient before clipping
    mark: int | None = None  # of the samples (`data/ledger.py`)
    num_samples: int | None = None  # loaded by all
    parts: Metrics = {}  # of the loss, by name


class RankProgress(msgspec.Struct):
    """What a rank knows beside its tensors. A newcomer takes over a peer's."""

    step: int = 0  # committed
    phases: list[PhaseResult] = []  # of the next step, committed; a plain step has none
    last_info: StepInfo | None = None  # of that step
    evaluations: list[Metrics] = []  # since that step, in the order they were asked for
    past_evaluations: tuple[int, list[Metrics]] = (0, [])  # the last step that has some, and those
    stopped: bool = False  # after this step, for good
    pauses: bool = False  # after this step, to save it or for a group of another size
    ended: bool = False  # by the script's own loop, before the last step
    served: int = 0  # steps that servers had of all ranks when the group formed
    writes_record: bool = False  # this rank writes metrics.jsonl

    @property
    def place(self) -> tuple[int, int]:
        """How far the tensors are: committed steps, and phases after them."""
        return self.step, len(self.phases)
