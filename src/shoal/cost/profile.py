"""A profile of a recipe: what its model holds and how long its parts take, for any plan.

A forward of the model is recorded once, as events (submodules, and operations between them), and
run at two batch sizes, so that seconds and bytes of each event are a line in the samples of a
piece. A model that does not fit this machine is run on fake tensors: shapes, bytes and flops are
right, nothing is allocated, and seconds follow from the flops. A profile is plain data; `predict`
needs nothing else of the model.

Here are its records and its cache; `profiler.py` makes one. Read next: `predict.py`;
`parallel/pipeline/cuts.py` for how events become stages.
"""

import math

import msgspec

VERSION = 4  # of the form of a profile, and of how it is measured


class Linear(msgspec.Struct, frozen=True, array_like=True):
    """An amount that grows with the samples of a piece."""

    fixed: float = 0.0
    per_sample: float = 0.0

    def at(self, num_samples: float) -> float:
        return self.fixed + self.per_sample * num_samples

    def times(self, factor: float) -> "Linear":
        return Linear(factor * self.fixed, factor * self.per_sample)


class BlockProfile(msgspec.Struct, frozen=True):
    """One event of the forward: a submodule, or an operation between submodules."""

    name: str
    where: str  # the module whose code calls it
    is_unit: bool  # a submodule
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    changes: tuple[str, ...]  # buffers that it writes
    uses: tuple[int, ...]  # numbers of values made before
    makes: tuple[int, ...]
    can_start: bool  # a stage may begin here
    cost: Linear  # as the pipeline balances it, about flops
    block: int  # that the random generator was last set for

    @property
    def path(self) -> str:
        """The submodule itself, or the one whose code runs the operation."""
        return self.name if self.is_unit else self.where


class BlockTimes(msgspec.Struct, frozen=True, array_like=True):
    """What an event takes on one device: seconds, flops, bytes that stay until backward, and the
    most bytes beyond what was there before it."""

    forward_s: Linear
    backward_s: Linear
    flops: Linear  # of forward
    kept_bytes: Linear
    forward_peak_bytes: Linear
    backward_peak_bytes: Linear


class PrecisionProfile(msgspec.Struct, frozen=True, array_like=True):
    """What another precision changes of a pass: the factor of its seconds on a core, the factor of
    the bytes that stay until backward, and the bytes besides for each element of a parameter, whose
    copies in that precision stay too."""

    seconds: float = 1.0
    kept: float = 1.0
    copies: float = 0.0


class ValueProfile(msgspec.Struct, frozen=True):
    """A tensor between events: what is sent if a pipeline is cut behind it."""

    made_at: int
    num_bytes: Linear
    needs_gradient: bool
    is_final: bool


class ParameterProfile(msgspec.Struct, frozen=True):
    """A parameter with the optimizer's state of it: (its dims or None for all, bytes of one)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    is_trained: bool
    state: tuple[tuple[tuple[int, ...] | None, int], ...]


class TableProfile(msgspec.Struct, frozen=True):
    """A table whose rows may be on servers, with the rows that the first batch looks up."""

    num_rows: int
    row_bytes: int
    padding: int | None
    is_lazy: bool
    by_piece: tuple[tuple[tuple[int, ...], ...], ...]


class EvaluationMemory(msgspec.Struct, frozen=True, array_like=True):
    """Of a piece of a run's evaluation, which no plan cuts: its samples, and the most bytes while
    nothing is kept for a backward. Nothing if the run evaluates nothing."""

    num_samples: int = 0
    num_bytes: int = 0


class TensorProfile(msgspec.Struct, frozen=True):
    """The model cut over so many ranks: cuts by name (dim, packs), what each event then takes, and
    its messages for one piece. `refusal` says why it cannot be cut so."""

    cuts: dict[str, tuple[int, int]] = {}
    crossed: tuple[str, ...] = ()
    times: tuple[BlockTimes, ...] = ()
    messages: tuple[int, ...] = ()  # of a forward, by event
    message_bytes: tuple[Linear, ...] = ()
    back_messages: tuple[int, ...] = ()
    back_bytes: tuple[Linear, ...] = ()
    evaluation: EvaluationMemory = EvaluationMemory()
    refusal: str = ""


class ProcessBytes(msgspec.Struct, frozen=True):
    """What a rank's process takes beside tensors. `heap`: bytes of the process for each byte of
    activations, since freed blocks leave gaps. What is shared is that of the process which ranks
    are forked from, partly with the command that started it; each counts a part of it."""

    own: int = 36_000_000
    heap: float = 1.3
    with_ranks: int = 160_000_000
    with_command: int = 130_000_000

    def share(self, num_forked: int) -> int:
        """Of each of so many processes of a host, forked from one."""
        return self.with_ranks // (num_forked + 1) + self.with_command // (num_forked + 2)


class Crowding(msgspec.Struct, frozen=True, array_like=True):
    """How many times as long a step takes where so many processes compute at once on cores: they
    share caches, memory, and perhaps the units of a core."""

    num_processes: int = 1
    times: float = 1.0

    def at(self, num_busy: float) -> float:
        """Among so many; more than were tried are as crowded as those."""
        if self.num_processes == 1:
            return 1.0
        share = (num_busy - 1) / (self.num_processes - 1)
        return 1 + (self.times - 1) * min(1.0, share)


ALONE = Crowding()


class Profile(msgspec.Struct, frozen=True):
    """All that `predict` has to know about a run."""

    model: str
    batch_size: int
    sizes: tuple[int, ...]  # samples of the pieces that were run
    parameters: tuple[ParameterProfile, ...]
    blocks: tuple[BlockProfile, ...]
    values: dict[int, ValueProfile]
    times: tuple[BlockTimes, ...]  # by event, of the whole model
    tensor: dict[int, TensorProfile]  # by degree
    opened: dict[str, int]  # submodules whose code was recorded, with their elements
    recomputed: tuple[str, ...]  # blocks of recompute=blocks
    fsdp_blocks: tuple[tuple[str, tuple[str, ...]], ...]  # with their parameters
    fsdp_rest: tuple[tuple[str, tuple[str, ...]], ...]
    buffers: dict[str, int]  # bytes
    changed: dict[str, int]  # elements of those that a forward changes
    averaged_buffers: int
    tables: dict[str, TableProfile]
    phases: tuple[str, ...]  # of a step of the recipe's own
    precisions: dict[str, PrecisionProfile]
    is_element_wise: bool
    clips: bool
    update_s: tuple[float, float]  # of the optimizer: for each tensor, for each element
    data_s: Linear  # to load a piece
    overhead_s: float  # that each step takes beside its pieces and its update
    is_measured: bool  # seconds were measured, and not made from flops
    flops_per_s: float  # of the device that seconds are of, fp32
    depends_on_data: bool  # the forward takes other paths for other data: errors are wider
    refusals: dict[str, str]  # of plans, by the words that are refused
    process: ProcessBytes = ProcessBytes()  # measured where the model was
    pipeline_refusal: str = ""  # why the model cannot be cut into stages
    shares: bool = False  # ranks of one host may hold parameters and state together
    crowding: Crowding = ALONE
    evaluation: EvaluationMemory = EvaluationMemory()

    def precision_of(self, plan_precision: str) -> PrecisionProfile:
        """Of a plan that may change its precision: the first."""
        return self.precisions.get(plan_precision.split(":")[0], PrecisionProfile())

    @property
    def parameter_bytes(self) -> int:
        return sum(math.prod(p.shape) * p.itemsize for p in self.parameters)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(p.shape) for p in self.parameters)
