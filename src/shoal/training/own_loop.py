"""What the ranks of a script's own loop tell each other between two steps.

A script acts between steps: it changes rates, keeps averages in `trainer.state`, evaluates, leaves.
Ranks that act unlike would train unlike weights, or wait for each other for ever. So before each
step, evaluation and end every rank says in one small message what it is about to do, and a digest
of what its loop may have changed; what differs is named, with the rank (`LoopDiverged`).

A newcomer takes over the step that the others are at, before their loops' bodies ran: `keep` notes
rates and state as they were then. It runs that body too, for its own variables and for what it
prints; then it takes what the others hold after it (`_bring_up`), since a body may change weights
as well. `shoal train` has such a loop if its run has callbacks, which are then the body.

Cost: a message of a few numbers a step. Read next: `loop_state.py`, `sync_state.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from shoal.checkpoint.load import CheckpointReader
from shoal.comm.wire import digest_number
from shoal.errors import RecipeError, UsageError
from shoal.numerics.fragments import FragmentSchedule
from shoal.parallel.layout import Slice, slices_of, whole_slice
from shoal.sync.consistency import data_lines
from shoal.sync.state import MemorySource, ShardedState, StateSource, broadcast_state
from shoal.training.loop_state import HeldParameters, LoopState, PackedState
from shoal.training.rank_check import (
    describe_value,
    digest_of_tensor,
    digest_of_texts,
    first_difference,
    first_unlike_pair,
)

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

CHECK_EVERY = 10  # steps, after which tensors in the state are compared too
LOOP = "loop"  # how names begin in what is handed over and saved
_NOT_VALUES = ("params", "param_names")


class LoopDiverged(RecipeError):
    """What ranks must change alike they changed unlike."""


class LoopAction(IntEnum):
    """What a rank is about to do."""

    STEP = 0
    LEAVE = 1
    FINISH = 2
    EVALUATE = 3
    GATHER = 4

    def after(self, step: int) -> str:
        """In words, of a rank."""
        return {
            LoopAction.STEP: f"goes on to step {step + 1}",
            LoopAction.LEAVE: f"left its loop after step {step}",
            LoopAction.FINISH: f"ended its loop after step {step}",
            LoopAction.EVALUATE: f"evaluates after step {step}",
            LoopAction.GATHER: f"gathers the whole model after step {step}",
        }[self]


_ENDS = (LoopAction.LEAVE, LoopAction.FINISH)


class _LoopSnapshot(NamedTuple):
    """What the loop's body of a step began with."""

    step: int
    state: PackedState
    groups: list[dict[str, Any]]
    frozen: list[str]


class CustomLoop:
    """Of one rank. `recovers`: a lost rank will be replaced; `is_script`: ranks made their runs
    themselves, and may have made them unlike."""

    def __init__(self, recovers: bool, is_script: bool = True):
        self.recovers, self.is_script = recovers, is_script
        self.is_new = False  # took a peer's step, and not yet what the loop's body made of it
        self.is_sure = True  # or what the body did to the state may be in it twice
        self.wants_stop = False
        self._is_first = True  # of this group, nothing was compared yet
        self._kept: _LoopSnapshot | None = None
        self._saved = 0  # the last step after which it was asked whether to save
        self._groups: list[dict[str, Any]] | None = None  # to take their place as the loop begins
        self._parameters: dict[str, nn.Parameter] = {}  # of the model, as it was made
        self._first_frozen: list[str] = []
        self._stepped: list[list[nn.Parameter]] | None = None  # by the optimizer, by group

    def watch(self, model: nn.Module) -> None:
        """Note which parameters there are, before anybody else has the model."""
        self._parameters = dict(model.named_parameters())
        self._first_frozen = self._frozen()

    def settled(self, optimizer: torch.optim.Optimizer) -> None:
        """Another group formed."""
        self._is_first = True
        if self._stepped is None:
            self._stepped = _parameters_of(optimizer)

    def keep(self, trainer: "Trainer") -> None:
        """Note what the body of a step that was just made begins with."""
        trainer.optimizer._opt_called = True  # type: ignore[attr-defined] # or schedulers warn
        if self.recovers and trainer.mesh.num_ranks > 1:
            groups = group_values(trainer.optimizer)
            state = trainer.state.pack().kept()
            self._kept = _LoopSnapshot(trainer.step, state, groups, self._frozen())

    def begin(self, trainer: "Trainer") -> None:
        """The script has made what it makes before its loop: what arrived takes its place."""
        trainer.state.begin()
        if self._groups is not None:
            set_groups(trainer.optimizer, self._groups)
            self._groups = None
        trainer.callbacks.start(trainer.last_info)

    def goes_on(self, trainer: "Trainer") -> bool:
        """Whether all make another step; saves what is due. Every rank must call it."""
        self._refuse_other_parameters(trainer)
        step = trainer.step
        is_due = trainer.saves_after(step) and step != self._saved
        if is_due or _meet_in(trainer, step + 1):
            is_full = is_due or step % CHECK_EVERY == 0
            if self._agree(trainer, LoopAction.STEP, is_full):
                return False
        if step != self._saved:
            self._saved = step
            if trainer.save_if_due():
                trainer.callbacks.saved()
        trainer.callbacks.control.forget_save()
        return True

    def ends(self, trainer: "Trainer", leaves: bool) -> None:
        """All end their loops here, or it is said who does not. Every rank must call it."""
        what = LoopAction.LEAVE if leaves else LoopAction.FINISH
        while not self._agree(trainer, what, True):
            continue  # others heard only now that all stop, and come here next

    def joins_in(self, trainer: "Trainer", what: LoopAction, size: int = 0) -> None:
        """All are about to do the same, with as many samples. Every rank must call it."""
        rows = trainer.mesh.world.all_gather_numbers([what, trainer.step, 0, 0, size, 0])
        _refuse_unlike_acts([(LoopAction(int(row[0])), int(row[1])) for row in rows])
        for rank, row in enumerate(rows):
            if row[4] != rows[0][4]:
                raise LoopDiverged(
                    f"Rank {rank} evaluates {int(row[4])} samples after step {trainer.step}, and "
                    f"rank 0 {int(rows[0][4])}. All ranks must give evaluate the same source."
                )

    def _agree(self, trainer: "Trainer", what: LoopAction, is_full: bool) -> bool:
        """Compare what all do and hold; True if that is the end, for all of them."""
        while True:
            told = self._told(trainer, is_full or self._is_first)
            digests = [digest_of_texts(part) for part in told]
            own = [what, trainer.step, self.is_new, self.wants_stop, *digests]
            rows = trainer.mesh.world.all_gather_numbers(own)
            acts = [(LoopAction(int(row[0])), int(row[1])) for row in rows]
            wants_stop = any(row[3] for row in rows)
            stops = wants_stop and trainer.strategy.in_lockstep
            if not (stops and all(act in (LoopAction.STEP, *_ENDS) for act, _ in acts)):
                _refuse_unlike_acts(acts)
            new = [rank for rank, row in enumerate(rows) if row[2]]
            if not new:
                break
            self._bring_up(trainer, new)
        if wants_stop:
            trainer.end_by_script()
        are_ends = {act in _ENDS for act, _ in acts}
        if len(are_ends) > 1:  # some looked at all they hold, others not: in the next round all do
            return what == LoopAction.STEP
        _refuse_unlike(trainer, told, [row[4:] for row in rows])
        self._is_first = False
        return stops or what != LoopAction.STEP

    def _frozen(self, since_start: bool = False) -> list[str]:
        """The names of parameters that are frozen now; or only of those frozen since the start."""
        found = [name for name, p in self._parameters.items() if not p.requires_grad]
        return [name for name in found if name not in self._first_frozen] if since_start else found

    @contextmanager
    def as_at_first(self) -> Iterator[None]:
        """What the loop has frozen is not, in this block: a strategy's layout is for all that the
        run began to train, since a newcomer does not know yet what is frozen."""
        still = self._frozen()
        self._freeze(self._first_frozen)
        try:
            yield
        finally:
            self._freeze(still)

    def _freeze(self, names: Sequence[str]) -> None:
        for name, p in self._parameters.items():
            if p.requires_grad == (name in names):
                p.requires_grad_(name not in names)

    def _refuse_other_parameters(self, trainer: "Trainer") -> None:
        """What the trainer does not know of would not be trained, or not alike on all ranks."""
        for name, p in self._parameters.items():
            if p.requires_grad and name in self._first_frozen:
                raise _not_trained(
                    f"{name} was frozen when the trainer began and requires a gradient now"
                )
        can_freeze = not (trainer.mesh.is_cut or _is_own(trainer))
        for name in [] if can_freeze else self._frozen(since_start=True):
            raise RecipeError(
                f"{name} was frozen after the trainer began (requires_grad=False), and under "
                f"{str(trainer.plan)!r} ranks exchange its gradient in every step. Parameters can "
                "be frozen and trained again without tensor, pipeline, zero=3 and local_steps. Or "
                "give those a group of their own, with lr=0 for as long."
            )
        now = _parameters_of(trainer.optimizer)
        if self._stepped is not None and list(map(len, now)) != list(map(len, self._stepped)):
            raise self._other_in_optimizer(now)
        if trainer.step % CHECK_EVERY == 0 or self._is_first:
            self._refuse_other_model(trainer.model)

    def _other_in_optimizer(self, now: list[list[nn.Parameter]]) -> RecipeError:
        known = {id(p) for group in self._stepped or () for p in group}
        names = {id(p): name for name, p in self._parameters.items()}
        new = [p for group in now for p in group if id(p) not in known]
        if not new:
            return _not_trained("parameters were taken out of the optimizer's groups")
        name = names.get(id(new[0]), f"a tensor of shape {list(new[0].shape)}")
        return _not_trained(f"{name} was added to the optimizer")

    def _refuse_other_model(self, model: nn.Module) -> None:
        now = dict(model.named_parameters())
        for name in now.keys() | self._parameters.keys():
            if now.get(name) is not self._parameters.get(name):
                how = "was put into the model" if name in now else "was taken out of the model"
                raise _not_trained(f"another {name} {how}")

    def _told(self, trainer: "Trainer", is_full: bool) -> tuple[dict[str, str], dict[str, str]]:
        """What all ranks must hold alike, and what those must that hold the same of the model."""
        has_schedule = trainer.schedule is not None
        rates = describe_groups(trainer.optimizer, has_schedule)
        rates |= {f"{name}.requires_grad": "False" for name in self._frozen(since_start=True)}
        if trainer.can_save and (tags := trainer.callbacks.control.tags):
            rates["trainer.save"] = repr(tags)
        if _is_own(trainer):
            return rates, {}
        return rates, trainer.state.described(is_full)

    def _bring_up(self, trainer: "Trainer", new: Sequence[int]) -> None:
        """Let newcomers take what the others hold after the body that all have run."""
        group, strategy = trainer.mesh.data, trainer.strategy
        leader = next(rank for rank in range(group.num_ranks) if rank not in new)
        state = self._with(trainer, strategy.newcomer_state(), None)
        rows = group.all_gather_numbers([_digest_of_state(state)])
        if any(rows[rank] != rows[leader] for rank in new):
            shared = MemorySource(broadcast_state(group, leader, state))
            if self.is_new:
                strategy.join(shared, trainer.step)
                self._take(trainer, shared)
                self.begin(trainer)
        self.is_new, self.is_sure = False, True

    def for_newcomer(self, trainer: "Trainer", state: ShardedState) -> ShardedState:
        """A state to hand over, with what the body of the last step began with."""
        kept = self._kept
        is_known = kept is not None and kept.step == trainer.step
        return self._with(trainer, state, kept if is_known else None)

    def join(self, trainer: "Trainer", source: StateSource) -> None:
        """As one who is behind, take what a peer handed over."""
        self._take(trainer, source)
        self.is_new, self.is_sure = True, not source.plain[LOOP]["touched"]

    def _with(
        self, trainer: "Trainer", state: ShardedState, kept: _LoopSnapshot | None
    ) -> ShardedState:
        now = group_values(trainer.optimizer)
        packed, groups, still = trainer.state.pack(), now, self._frozen()
        if kept is not None:
            packed, groups, still = kept.state, kept.groups, kept.frozen
        own = LoopState()
        own["groups"] = groups
        numbers = own.pack()
        plain = {
            "state": packed.plain,
            "groups": numbers.plain,
            "frozen": still,
            "touched": bool(packed.plain) or str(groups) != str(now),
        }
        tensors = _named(packed.tensors, "state") | _named(numbers.tensors, "groups")
        return ShardedState(state.tensors | tensors, state.plain | {LOOP: plain}, state.copied)

    def _take(self, trainer: "Trainer", source: StateSource) -> None:
        plain = source.plain[LOOP]
        trainer.state.arrive(plain["state"], source, f"{LOOP}.state.", exact=True)
        own = LoopState()
        own.arrive(plain["groups"], source, f"{LOOP}.groups.", exact=True)
        self._groups = own["groups"]
        set_groups(trainer.optimizer, self._groups)
        self._freeze(plain["frozen"])

    def to_save(self, trainer: "Trainer", state: ShardedState) -> ShardedState:
        """A state for a checkpoint, with what the loop keeps."""
        packed, still = trainer.state.pack(), self._frozen(since_start=True)
        if not packed.plain and not still:
            return state
        part, num_parts = _part(trainer)
        plain = {
            f"{LOOP}.parts": num_parts,
            f"{LOOP}.{part}": {"state": packed.plain, "frozen": still},
        }
        numbered = {n: t for n, t in enumerate(packed.tensors) if n not in packed.names}
        tensors = {f"{LOOP}.{part}.{n}": [whole_slice(t)] for n, t in numbered.items()}
        for number, (average, name) in packed.names.items():
            held = slices_of(name, packed.tensors[number], trainer.spread.holding)
            tensors[f"{average}.{name}"] = held
        return ShardedState(state.tensors | tensors, state.plain | plain, state.copied)

    def restored(self, trainer: "Trainer", source: CheckpointReader) -> None:
        """Take what a checkpoint has of the loop; the optimizer's groups were taken."""
        self._groups = group_values(trainer.optimizer)
        num_saved = source.plain.get(f"{LOOP}.parts")
        if num_saved is None:
            return
        part, num_parts = _part(trainer)
        if num_saved != num_parts:
            if any(name.startswith(f"{LOOP}.") for name in source):
                raise UsageError(
                    f"trainer.state was saved in {num_saved} parts, since its plan cut the model "
                    f"so, and this plan makes {num_parts} of it. Tensors in trainer.state go on "
                    "under the same cut of tensor, pipeline, zero=3 and local_steps only."
                )
            part = 0
        plain = source.plain[f"{LOOP}.{part}"]

        def held() -> HeldParameters:
            own = trainer.callbacks.control.held_parameters()
            return HeldParameters(own, trainer.spread.holding)

        trainer.state.arrive(plain["state"], source, f"{LOOP}.{part}.", exact=False, held=held)
        self._freeze([*plain["frozen"], *self._first_frozen])

    def let_go(self, trainer: "Trainer") -> None:
        """Of what `restored` took: not all ranks could."""
        self._groups = None
        trainer.state.let_go()
        self._freeze(self._first_frozen)


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each group holds beside its parameters; tensors are copied."""
    return [
        {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in _NOT_VALUES
        }
        for group in optimizer.param_groups
    ]


@torch.no_grad()
def set_groups(optimizer: torch.optim.Optimizer, values: Sequence[Mapping[str, Any]]) -> None:
    """Give groups these values; tensors in place, since a captured step reads them there."""
    for group, own in zip(optimizer.param_groups, values):
        for key, value in own.items():
            if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def describe_groups(optimizer: torch.optim.Optimizer, has_schedule: bool) -> dict[str, str]:
    """Each value of each group by its place. The schedule sets the rate again before each step, so
    one of a step that was given up does not count."""
    return {
        f"optimizer.param_groups[{number}][{key!r}]": describe_value(value)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in _NOT_VALUES and not (has_schedule and key == "lr")
    }


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    return [[*group["params"]] for group in optimizer.param_groups]


def _not_trained(what: str) -> RecipeError:
    return RecipeError(
        f"{what[0].upper()}{what[1:]}. The trainer trains the parameters that the model and the "
        "optimizer had when it began, and no others. Let the model begin with all that will be "
        "trained, and freeze some until then (shoal.callbacks.Freeze, or lr=0 for a group of their "
        "own); or save, and begin another run with these weights."
    )


def _meet_in(trainer: "Trainer", step: int) -> bool:
    """Whether ranks talk to each other in a step; under local steps they do where a window ends."""
    plan = trainer.plan
    timetable = FragmentSchedule(plan.local_steps, plan.fragments, trainer.num_steps)
    return trainer.strategy.in_lockstep or plan.fragments > 1 or timetable.ends_window(step)


def _part(trainer: "Trainer") -> tuple[int, int]:
    """Which part of the loop's state this rank holds, of how many that differ."""
    mesh = trainer.mesh
    if _is_own(trainer):
        return mesh.rank, mesh.num_ranks
    if mesh.is_cut:
        number = mesh.tensor.rank + mesh.tensor.num_ranks * mesh.pipeline.rank
        return number, mesh.tensor.num_ranks * mesh.pipeline.num_ranks
    return 0, 1


def _is_own(trainer: "Trainer") -> bool:
    """Whether no other rank holds the same of the model, or not at all times."""
    return trainer.plan.zero == 3 or trainer.plan.local_steps > 1


def _named(tensors: Sequence[Tensor], part: str) -> dict[str, list[Slice]]:
    return {f"{LOOP}.{part}.{number}": [whole_slice(t)] for number, t in enumerate(tensors)}


def _digest_of_state(state: ShardedState) -> float:
    """Of every element, and of what is plain."""
    parts = [part.tensor for name in sorted(state.tensors) for part in state.tensors[name]]
    content = [digest_of_tensor(tensor).encode() for tensor in parts]
    return digest_number([msgspec.msgpack.encode(state.plain), *content])


def _refuse_unlike_acts(acts: Sequence[tuple[LoopAction, int]]) -> None:
    """Ranks that do unlike things would wait for each other for ever."""
    first, step = acts[0]
    same = _ENDS if first in _ENDS else (first,)
    for rank, (act, at) in enumerate(acts):
        if act not in same or at != step:
            raise LoopDiverged(
                f"Rank {rank} {act.after(at)}, and rank 0 {first.after(step)}. All ranks must "
                "leave their loops, evaluate and gather the model after the same steps. "
                "trainer.stop() on any rank ends the loops of all."
            )


def _refuse_unlike(
    trainer: "Trainer",
    told: tuple[dict[str, str], dict[str, str]],
    digests: Sequence[Sequence[float]],
) -> None:
    """Rates of all ranks are the same, and states of those that hold the same of the model."""
    every = [*range(trainer.mesh.num_ranks)]
    found = [(0, every), *((1, line) for line in data_lines(trainer.mesh))]
    for column, ranks in found:
        pair = first_unlike_pair([row[column] for row in digests], ranks)
        if pair is not None:
            what = first_difference(trainer.mesh.world, pair, told[column])
            raise LoopDiverged(
                f"After step {trainer.step} ranks hold unlike values: {what}. What a loop changes "
                "between steps it must change alike on every rank, and keep in trainer.state "
                "what it decides by, so that a newcomer has it too."
            )
