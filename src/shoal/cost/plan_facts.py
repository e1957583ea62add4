"""The facts of a plan from a profile: what a survey of the model would find, without the model.

The recorded events of a profile become a tape again, and the pipeline's own `split_stages` cuts it;
cuts of the tensor axis and units of ZeRO 3 are looked up. So `PlanFacts`, and every cost that
strategies declare, are the same as for a model that was built (`explain.py`). What is found for one
plan is kept for the next ones: a search asks for thousands.
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch

from shoal.cost.profile import BlockProfile, Profile, TableProfile
from shoal.errors import PlanError
from shoal.parallel.apply import Survey
from shoal.parallel.layout import Cut
from shoal.parallel.pipeline.stages import StagePlan, Tape, rank_of_stage, split_stages
from shoal.parallel.pipeline.tape import Event, TapeValue, ValueLeaf
from shoal.parallel.tensor.cutting import TensorPlan
from shoal.plans.plan import Plan
from shoal.sync.rank_layout import ModelParameter, PlanFacts, StateTensor
from shoal.sync.server.lookup_costs import TableLookups

if TYPE_CHECKING:
    from shoal.cost.activations import PassMemory

_REFUSED: dict[str, Callable[[Plan], bool]] = {  # the words of `Profile.refusals`
    "data>1": lambda plan: plan.num_ranks > 1 and plan.sync != "server",
    "zero=3": lambda plan: plan.zero == 3,
    "tensor>1": lambda plan: plan.tensor > 1,
    "pipeline>1": lambda plan: plan.pipeline > 1,
    "recompute": lambda plan: plan.recompute != "none",
    "offload": lambda plan: plan.offload != "none",
    "server": lambda plan: plan.sync == "server",
    "local_steps>1": lambda plan: plan.local_steps > 1,
    "pieces>1": lambda plan: plan.num_pieces > 1,
}


class ModelFacts:
    """A profile's model, and what was found about it for plans before."""

    def __init__(self, profile: Profile):
        self.profile = profile
        self.parameters = [
            ModelParameter(p.name, p.shape, getattr(torch, p.dtype), p.is_trained)
            for p in profile.parameters
        ]
        self.state = {
            p.name: [StateTensor(dims, size) for dims, size in p.state] for p in profile.parameters
        }
        self.num_elements = {p.name: math.prod(p.shape) for p in profile.parameters}
        self._tapes: dict[tuple[int, int, bool], Tape] = {}
        self._stages: dict[tuple[Any, ...], StagePlan | PlanError] = {}
        self._again: list[str | None] | None = None
        self.passes: dict[tuple[Any, ...], PassMemory] = {}  # that `predict` has asked for

    def facts(self, plan: Plan) -> PlanFacts:
        """PlanError if the model cannot be cut as the plan says."""
        profile = self.profile
        for words, refusal in profile.refusals.items():
            if _REFUSED[words](plan):
                raise PlanError(refusal)
        stages, tensor = self.stages(plan), self.tensor(plan)
        tables = {n: _lookups(t, plan.num_pieces) for n, t in profile.tables.items()}
        lazy = {name: len(use.rows) for name, use in tables.items() if use.is_lazy}
        return PlanFacts(
            plan=plan,
            survey=Survey(tensor, stages),
            parameters=[
                p._replace(shape=(lazy[p.name], *p.shape[1:])) if p.name in lazy else p
                for p in self.parameters
            ],
            units=self._units(plan, stages, tensor) if plan.zero == 3 else [],
            state=self.state,
            is_element_wise=profile.is_element_wise,
            buffers=profile.buffers,
            changed=profile.changed,
            averaged_buffers=profile.averaged_buffers,
            clips=profile.clips,
            tables=tables if plan.num_servers else {},
            is_lazy=bool(lazy),
            phases=profile.phases,
            shares=profile.shares,
        )

    def stages(self, plan: Plan) -> StagePlan | None:
        if plan.pipeline == 1:
            return None
        if self.profile.pipeline_refusal:
            raise PlanError(self.profile.pipeline_refusal)
        num_stages, samples = plan.pipeline * plan.num_stages, self.samples(plan)
        is_v, again = plan.schedule == "zbv", plan.recompute != "none"
        key = num_stages, plan.pipeline, is_v, again, samples
        if key not in self._stages:
            rank_of = partial(rank_of_stage, num_ranks=plan.pipeline, schedule=plan.schedule)
            try:
                tape = self._tape(samples, num_stages, again)
                self._stages[key] = split_stages(tape, num_stages, rank_of)
            except PlanError as error:
                self._stages[key] = error
        found = self._stages[key]
        if isinstance(found, PlanError):
            raise found
        return found

    def tensor(self, plan: Plan) -> TensorPlan | None:
        if plan.tensor == 1:
            return None
        found = self.profile.tensor.get(plan.tensor)
        if found is None:
            known = ", ".join(map(str, self.profile.tensor)) or "none"
            raise PlanError(
                f"tensor={plan.tensor} was not profiled, so it cannot be predicted. Profiled are "
                f"the degrees: {known}."
            )
        if found.refusal:
            raise PlanError(found.refusal)
        cuts = {name: Cut(*cut) for name, cut in found.cuts.items()}
        return TensorPlan(cuts, {}, crossed=frozenset(found.crossed))

    def samples(self, plan: Plan) -> int:
        """Of a piece, rounded up."""
        return -(-self.profile.batch_size // plan.num_pieces)

    def blocks_again(self, plan: Plan) -> list[str | None]:
        """Of each event, the block with which it is run again in backward."""
        if plan.recompute == "none":
            return [None] * len(self.profile.blocks)
        if self._again is None:
            names = self.profile.recomputed
            self._again = [_block_of(block, names) for block in self.profile.blocks]
        return self._again

    def input_bytes(
        self, first: int, block: str, inside: list[str | None], samples: float
    ) -> float:
        """Of the values that a block, which begins with the event `first`, is given."""
        values, blocks = self.profile.values, self.profile.blocks
        used: set[int] = set()
        for index in range(first, len(blocks)):
            if inside[index] != block:
                break
            used.update(n for n in blocks[index].uses if n in values and values[n].made_at < first)
        return sum(values[n].num_bytes.at(samples) for n in used)

    def _tape(self, samples: int, num_stages: int, again: bool) -> Tape:
        key = samples, num_stages, again
        if key not in self._tapes:
            self._tapes[key] = self._make_tape(*key)
        return self._tapes[key]

    def _make_tape(self, samples: int, num_stages: int, again: bool) -> Tape:
        profile = self.profile
        values = {
            number: TapeValue(
                torch.Size([round(value.num_bytes.at(samples))]), (1,), torch.uint8, _CPU
            )
            for number, value in profile.values.items()
        }
        tape = Tape(
            model=profile.model,
            signature=None,
            open=frozenset(profile.opened),
            drawing=frozenset(),
            parameters={p.name: p.is_trained for p in profile.parameters},
            seeds=None,
            events=[_event(block, samples, profile) for block in profile.blocks],
            values=values,
            need_gradient={n for n, value in profile.values.items() if value.needs_gradient},
            made_at={n: value.made_at for n, value in profile.values.items()},
            final=frozenset(n for n, value in profile.values.items() if value.is_final),
        )
        tape.uncut = set(self._uncut(tape, num_stages, again))
        return tape

    def _uncut(self, tape: Tape, num_stages: int, again: bool) -> Iterator[int]:
        """Where so many stages are not cut: in submodules that recording leaves closed because
        they are small (`stages.py`), and in blocks that are run again as a whole."""
        blocks, total = self.profile.blocks, sum(self.num_elements.values())
        costs = [event.cost for event in tape.events]
        small = {
            name
            for name, size in self.profile.opened.items()
            if name
            and size <= total / (2 * num_stages)
            and sum(c for c, b in zip(costs, blocks, strict=True) if _is_in(b.path, name))
            <= sum(costs) / (2 * num_stages)
        }
        closed = [*small, *(self.profile.recomputed if again else ())]
        for index in range(1, len(blocks)):
            before, here = blocks[index - 1].path, blocks[index].path
            if any(_is_in(before, name) and _is_in(here, name) for name in closed):
                yield index

    def _units(
        self, plan: Plan, stages: StagePlan | None, tensor: TensorPlan | None
    ) -> list[list[list[str]]]:
        """By pipeline rank, as `explain.py` finds them in the model."""
        profile, crossed = self.profile, tensor.crossed if tensor else frozenset()
        sharded = [p.name for p in profile.parameters if p.shape and p.is_trained]
        blocks = [names for path, names in profile.fsdp_blocks if path not in crossed]
        if stages is None:
            return [_untaken([*blocks, sharded], set(sharded))]
        blocks += [names for path, names in profile.fsdp_rest if path not in crossed]
        found = []
        for rank in range(plan.pipeline):
            own = [
                s.index
                for s in stages.stages
                if rank_of_stage(s.index, plan.pipeline, plan.schedule) == rank
            ]
            owned = stages.held_by(own)
            found.append(_untaken([b for b in blocks if not owned.isdisjoint(b)], owned))
        return found


_CPU = torch.device("cpu")
_kept: list[tuple[Profile, ModelFacts]] = []


def facts_of(profile: Profile) -> ModelFacts:
    """Those of a profile that was asked for lately are kept."""
    for known, facts in _kept:
        if known is profile:
            return facts
    _kept.insert(0, (profile, ModelFacts(profile)))
    del _kept[4:]
    return _kept[0][1]


def _untaken(units: list[Any], owned: set[str]) -> list[list[str]]:
    taken: set[str] = set()
    found = []
    for unit in units:
        found.append([name for name in unit if name in owned and name not in taken])
        taken.update(found[-1])
    return found


def _block_of(block: BlockProfile, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if _is_in(block.path, name)), None)


@lru_cache(1 << 16)
def _is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def _event(block: BlockProfile, samples: int, profile: Profile) -> Event:
    return Event(
        name=block.name,
        is_unit=block.is_unit,
        where=block.where,
        parameters=block.parameters,
        buffers=block.buffers,
        changes=block.changes,
        uses=frozenset(block.uses) & profile.values.keys(),
        result=tuple(ValueLeaf(number) for number in block.makes if number in profile.values),
        spec=None,  # type: ignore[arg-type]  # of results that are not made
        only=None,
        passes=False,
        adopts=(),
        mutates=False,
        cost=block.cost.at(samples),
        block=block.block,
        block_after=None,
        is_fresh=block.can_start,
        is_inside=False,
    )


def _lookups(table: TableProfile, num_pieces: int) -> TableLookups:
    """The lookups of a batch that is cut into so many pieces: finer ones are put together, or cut
    up where it was recorded in fewer."""
    known = [[torch.tensor(ids) for ids in calls] for calls in table.by_piece]
    pieces = []
    for index in range(num_pieces):
        first, last = index * len(known) // num_pieces, (index + 1) * len(known) // num_pieces
        if last > first:
            calls = [torch.cat(own).unique() for own in zip(*known[first:last], strict=True)]
        else:
            parts = [k for k in range(num_pieces) if k * len(known) // num_pieces == first]
            place = parts.index(index)
            calls = [ids.tensor_split(len(parts))[place] for ids in known[first]]
        pieces.append(calls)
    return TableLookups(table.num_rows, table.row_bytes, pieces, table.padding, table.is_lazy)
