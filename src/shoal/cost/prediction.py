"""The records of a prediction: a step in parts, where its seconds and its bytes go.

Read next: `predict.py`, which makes them.
"""

import msgspec


class StageTimes(msgspec.Struct, frozen=True):
    """One stage, for one piece, on the devices that it runs on; the whole model is one stage."""

    index: int
    rank: int  # on the pipeline axis
    forward_s: float  # with the messages of the tensor axis
    backward_s: float  # with those and with recomputation
    weight_s: float  # the part of backward that zero-bubble schedules may put off; 0 if none
    tensor_s: float  # of forward_s and backward_s, messages of the tensor axis
    send_s: float  # of a result to the next stage
    send_back_s: float  # of a gradient to the stage before
    forward_bytes: int  # to the next stage
    backward_bytes: int  # to the stage before
    kept_bytes: int  # activations of one piece until its backward has run


class StepTimes(msgspec.Struct, frozen=True):
    """A step in parts from which it can be composed, or simulated: every replica runs `num_rounds`
    rounds of `num_microbatches` pieces through the stages, exchanges and updates."""

    stages: tuple[StageTimes, ...]
    num_rounds: int  # of the replica that has most
    num_microbatches: int
    data_s: float  # to load the pieces of a step
    exchange_s: float  # of gradients or parameters, in an average step, if nothing hid them
    hidden_s: float  # of exchange_s, behind computation
    agreement_s: float  # on losses and flags, and what each step costs beside its computation
    update_s: float
    exchanges_every: int = 1  # steps: local_steps
    staleness: int | None = 0  # None: no bound
    sharers: float = 1.0  # ranks for each device, where they are more than devices


class TimeParts(msgspec.Struct, frozen=True):
    """Where the seconds of an average step go, on the rank that takes longest."""

    compute: float
    exchange: float  # that nothing hides: gradients, parameters, activations
    waiting: float  # for other stages: the bubble
    update: float
    data: float

    @property
    def total(self) -> float:
        return self.compute + self.exchange + self.waiting + self.update + self.data


class MemoryParts(msgspec.Struct, frozen=True):
    """Bytes of the rank that holds most, at the moment of the step when it does."""

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    communication: int  # buckets in flight, partial sums, gathered shards
    base: int  # the process itself

    @property
    def peak(self) -> int:
        parts = (self.parameters, self.gradients, self.optimizer, self.buffers)
        return sum(parts) + self.activations + self.communication + self.base


class Prediction(msgspec.Struct, frozen=True):
    """What a plan is expected to do. `error_share`: measured figures may be off by this share."""

    plan: str
    step_s: float
    samples_per_s: float
    time: TimeParts
    memory: MemoryParts  # of the rank that holds most
    server_bytes: int  # that the largest server process holds; 0 without
    host_bytes: int  # that all processes of the fullest host hold
    host_limit_bytes: int  # that it has
    bytes_sent: int  # in an average step, by the rank of the first replica that sends most
    error_share: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether every host has the memory."""
        return self.host_bytes <= self.host_limit_bytes
