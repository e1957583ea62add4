"""Where a rank is in its run: the one record that ranks of a new group agree on."""

import msgspec

from shoal.events.step import StepInfo

Metrics = dict[str, float]


class RankProgress(msgspec.Struct):
    """What a rank knows beside its tensors. A newcomer takes over a peer's."""

    step: int = 0  # committed
    last_info: StepInfo | None = None  # of that step
    evaluations: list[Metrics] = []  # since that step, in the order they were asked for
    past_evaluations: tuple[int, list[Metrics]] = (0, [])  # the last step that has some, and those
    stopped: bool = False  # after this step, for good
    pauses: bool = False  # after this step, until there is a group of another size
    ended: bool = False  # by the script's own loop, before the last step
    served: int = 0  # steps that servers had of all ranks when the group formed
    writes_record: bool = False  # this rank writes metrics.jsonl
