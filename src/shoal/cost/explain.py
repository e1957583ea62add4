"""What a plan does to a model, computed before a rank starts.

`explain` builds the model once, surveys it as the ranks' parent process would
(`training/build.py`), and asks the plan's strategy what a step costs each rank. The optimizer's
state is found by one step on tiny stand-ins of the parameters; messages of the tensor axis are
counted on a dry run of one piece that sends nothing. Activations are not predicted.

Cost: one copy of the model, a few forward passes, and one backward pass if `tensor` is above 1.
Read next: `sync/rank_layout.py` for who holds what, `sync/costs.py` and each strategy's `costs` for
bytes and messages, `traffic.py` and `tensor.py` for a model that is cut, `sync/server/costs.py`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from shoal.cost.first_step import messages_of_phases, run_first_step
from shoal.cost.lookups import count_lookups
from shoal.cost.model_facts import buffers_of, changed_buffers, optimizer_state_of
from shoal.cost.tensor import TensorCuts, TensorTraffic, count_tensor_traffic, cuts_of
from shoal.cost.traffic import mesh_messages
from shoal.formatting import plural
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.optimizers import is_element_wise
from shoal.parallel import fsdp
from shoal.parallel.pipeline.stages import StagePlan, rank_of_stage
from shoal.parallel.striping import tables_of, weights_of
from shoal.plans.plan import Plan
from shoal.sync.choose import strategy_class
from shoal.sync.costs import MemoryUse, Message, StepCosts
from shoal.sync.host_state import why_apart
from shoal.sync.rank_layout import ModelParameter, PlanFacts, RankCoordinates, RankLayout
from shoal.sync.server.costs import aggregator_costs, server_costs
from shoal.training.build import BuiltModel, build_model
from shoal.training.run import Run, make_batches


class StageRow(msgspec.Struct, frozen=True):
    """A stage of a pipeline; bytes are those of one microbatch."""

    index: int
    rank: int  # on the pipeline axis
    first: str
    last: str
    num_parameters: int
    share: float  # of the cost
    num_sent: int  # values
    sent_bytes: int
    stays: bool  # the next stage is on the same rank


class TiedParameter(msgspec.Struct, frozen=True):
    name: str
    ranks: list[int]  # on the pipeline axis
    num_bytes: int


class Bubble(msgspec.Struct, frozen=True):
    """The share of the time that a pipeline rank waits, if all stages take equally long."""

    share: float
    formula: str


class RankRow(msgspec.Struct, frozen=True):
    """One rank: its coordinates, what it holds, what it sends in a step."""

    rank: int
    pipeline: int
    data: int
    tensor: int
    stages: list[int]
    num_pieces: int  # of each step
    num_held: int  # elements of parameters
    num_stepped: int  # elements that its optimizer steps on
    memory: MemoryUse
    messages: list[Message]


class ServerRow(msgspec.Struct, frozen=True):
    """One server: the elements that it steps on, what it holds, what it sends in a step."""

    server: int
    num_stepped: int
    memory: MemoryUse
    messages: list[Message]


class Explanation(msgspec.Struct, frozen=True):
    plan: str
    num_ranks: int
    axes: dict[str, int]
    zero: int
    num_pieces: int
    piece_samples: int
    round_size: int  # pieces in a pipeline together
    num_parameters: int
    num_trained: int
    alone: dict[str, int]  # bytes in one process: parameters, gradients, optimizer
    stages: list[StageRow]
    tied: list[TiedParameter]
    bubble: Bubble | None
    cuts: TensorCuts | None
    ranks: list[RankRow]
    servers: list[ServerRow]
    hosts: list[ServerRow]  # the servers that hosts have of their own
    notes: list[str]


_SHARED = (
    "Ranks of one host hold parameters and optimizer state once, and each counts its share; no "
    "gradient is sent. Over several hosts each rank would hold its own, as with memory=apart."
)
_LAZY = (
    "Rows of a shoal.Table take memory once they are touched: the first batch's are counted, "
    "without the rest of their pages."
)
_TABLES = (
    "Rows of tables are those that the first batch looks up; other batches may touch more or fewer."
)


def explain(run: Run, plan: Plan) -> Explanation:
    """What a resolved plan does to a run's model. Raises PlanError if it cannot work."""
    prepared = build_model(run, plan)
    piece = make_batches(run, plan.num_pieces).at(0).piece(0)
    facts = _facts(run, plan, prepared, piece)
    moves: dict[int, TensorTraffic] = {}
    if prepared.survey.tensor is not None:
        moves = count_tensor_traffic(run, plan, prepared, piece)
    found, tensor = prepared.survey.stages, prepared.survey.tensor
    sizes = {p.name: (math.prod(p.shape), p.dtype.itemsize) for p in facts.parameters}
    total = sum(count for count, _ in sizes.values())
    return Explanation(
        plan=str(plan),
        num_ranks=plan.num_ranks,
        axes={"data": plan.num_replicas, "tensor": plan.tensor, "pipeline": plan.pipeline},
        zero=plan.zero,
        num_pieces=plan.num_pieces,
        piece_samples=run.batch_size // plan.num_pieces,
        round_size=plan.num_microbatches,
        num_parameters=total,
        num_trained=sum(sizes[p.name][0] for p in facts.parameters if p.is_trained),
        alone=_alone(facts),
        stages=_stage_rows(found, plan, sizes) if found else [],
        tied=[
            TiedParameter(name, holders, count * size)
            for name, (count, size) in sizes.items()
            if len(holders := [*facts.pipeline_ranks(name)]) > 1
        ],
        bubble=bubble_of(plan, _splits(found)) if found else None,
        cuts=cuts_of(tensor, facts, moves, total) if tensor else None,
        ranks=[_rank_row(layout, moves) for layout in facts.ranks],
        servers=[_server_row(n, server_costs(facts, n)) for n in range(plan.num_servers)],
        hosts=[_server_row(n, aggregator_costs(facts)) for n in range(plan.num_host_servers)],
        notes=[
            *_notes(plan, found),
            *([_phases_note(facts.phases)] if facts.phases else []),
            *([_SHARED] if facts.ranks[0].shares else []),
            *([_TABLES] if facts.tables else []),
            *([_LAZY] if facts.is_lazy else []),
        ],
    )


# ---- facts about the model


def _facts(run: Run, plan: Plan, prepared: BuiltModel, piece: Any) -> PlanFacts:
    model, survey = prepared.model, prepared.survey
    optimizer = run.make_optimizer(model)
    shares = not (run.writes_weights or why_apart(model, optimizer))
    parameters = [
        ModelParameter(name, tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in model.named_parameters()
    ]
    tables = weights_of(tables_of(model).values())
    uses = count_lookups(run, plan.num_pieces, model)
    lazy = {name: len(use.rows) for name, use in uses.items() if use.is_lazy}
    parameters = [
        p._replace(shape=(lazy[p.name], *p.shape[1:])) if p.name in lazy else p for p in parameters
    ]
    held = PieceBuffers(model)
    phases = run_first_step(run, model, piece)
    changed = changed_buffers(model, held)
    return PlanFacts(
        plan=plan,
        survey=survey,
        parameters=parameters,
        units=[_units(prepared, plan, r) for r in range(plan.pipeline) if plan.zero == 3],
        is_element_wise=is_element_wise(optimizer, tables),
        state=optimizer_state_of(optimizer, model, tables),
        buffers={name: buffer.nbytes for name, buffer in buffers_of(model).items()},
        changed=changed,
        averaged_buffers=sum(b.numel() for b in model.buffers() if b.is_floating_point()),
        clips=run.clip is not None,
        tables=uses if plan.num_servers else {},
        is_lazy=bool(lazy),
        phases=phases,
        shares=shares,
    )


def _units(prepared: BuiltModel, plan: Plan, rank: int) -> list[list[str]]:
    """The parameters that FSDP2 shards on a pipeline rank, by unit; the model itself comes last."""
    model, found, tensor = prepared.model, prepared.survey.stages, prepared.survey.tensor
    names = {p: name for name, p in model.named_parameters()}
    owned = set(names.values())
    if found is not None:
        indices = range(len(found.stages))
        rank_of = [rank_of_stage(i, plan.pipeline, plan.schedule) for i in indices]
        owned = found.held_by([i for i in indices if rank_of[i] == rank])
    but = set() if tensor is None else {model.get_submodule(name) for name in tensor.crossed}
    taken: set[str] = set()
    units = []
    for unit in fsdp.units(model, owned, but, whole_model=found is None):
        own = [names[p] for p in unit.parameters() if p.dim() and p.requires_grad]
        units.append([name for name in own if name in owned and name not in taken])
        taken.update(units[-1])
    return units


# ---- rows


def _rank_row(layout: RankLayout, moves: Mapping[int, TensorTraffic]) -> RankRow:
    costs = strategy_class(layout.plan).costs(layout)
    sent = [*costs.sums, *mesh_messages(layout, moves), *costs.agreement]
    if layout.facts.phases:
        sent = messages_of_phases(sent, len(layout.facts.phases), layout.plan.num_ranks)
    return RankRow(
        *RankCoordinates.of(layout.place.rank, layout.plan),
        stages=[stage.index for stage in layout.stages],
        num_pieces=len(layout.rounds) * layout.plan.num_microbatches,
        num_held=sum(p.num_elements for p in layout.parameters),
        num_stepped=costs.num_stepped,
        memory=costs.memory,
        messages=[message for message in sent if message.count],
    )


def _server_row(number: int, costs: StepCosts) -> ServerRow:
    return ServerRow(number, costs.num_stepped, costs.memory, list(costs.sums))


def _alone(facts: PlanFacts) -> dict[str, int]:
    """The bytes that one process would hold."""
    sizes = {p.name: math.prod(p.shape) * p.dtype.itemsize for p in facts.parameters}
    trained = [p for p in facts.parameters if p.is_trained]
    kept = [one.num_bytes(p.shape) for p in trained for one in facts.state.get(p.name, ())]
    return {
        "parameters": sum(sizes.values()),
        "gradients": sum(sizes[p.name] for p in trained),
        "optimizer": sum(kept),
    }


def _stage_rows(
    found: StagePlan, plan: Plan, sizes: Mapping[str, tuple[int, int]]
) -> list[StageRow]:
    places = [rank_of_stage(s.index, plan.pipeline, plan.schedule) for s in found.stages]
    return [
        StageRow(
            index=stage.index,
            rank=place,
            first=stage.first,
            last=stage.last,
            num_parameters=sum(sizes[name][0] for name in stage.parameters),
            share=stage.share,
            num_sent=len(stage.sent),
            sent_bytes=sum(found.tape.values[n].num_bytes for n in stage.sent),
            stays=place == following,
        )
        for stage, place, following in zip(found.stages, places, [*places[1:], -1], strict=True)
    ]


def _splits(found: StagePlan) -> bool:
    return all(stage.splits_backward for stage in found.stages)


def bubble_of(plan: Plan, splits_backward: bool) -> Bubble:
    """From the orders of PyTorch's schedules, if all stages take the same time."""
    p, m, v = plan.pipeline, plan.num_microbatches, plan.num_stages
    if plan.schedule in ("gpipe", "1f1b"):
        return Bubble((p - 1) / (m + p - 1), "(p-1)/(m+p-1)")
    if plan.schedule == "interleaved" or not splits_backward:
        return Bubble((p - 1) / (v * m + p - 1), "(p-1)/(vm+p-1)")
    # With a split backward pass a rank idles for p-1 of 3vm+p-1 parts; in a V with few
    # microbatches for more.
    idle = max(p - 1, 4 * p - 2 - 2 * m) if plan.schedule == "zbv" else p - 1
    words = "(p-1)/(3vm+p-1)" if idle == p - 1 else "i/(3vm+i), i=4p-2-2m"
    return Bubble(idle / (3 * v * m + idle), words)


def _phases_note(names: Sequence[str]) -> str:
    return (
        f"The first step has {plural(len(names), 'phase')} ({', '.join(names)}), and its messages "
        "are counted; others may have more or fewer. Each phase exchanges the gradient of the "
        "whole model, with zeros for what it does not train."
    )


def _notes(plan: Plan, found: StagePlan | None) -> list[str]:
    notes = ["Activations are not predicted: what autograd keeps depends on the model's code."]
    if plan.is_open:
        notes.append(
            "What is auto is measured in the first steps of a run; here it is codec=none and "
            "bucket=4."
        )
    if plan.recompute == "blocks":
        notes.append(
            "recompute=blocks: a block keeps its inputs only and is run again in backward, for "
            "about a third more compute."
        )
    if plan.offload == "optimizer":
        notes.append(
            "offload=optimizer: state lies in files and is mapped in for a part of the parameters "
            "at a time; a step reads and writes all of it once."
        )
    if plan.num_servers:
        notes.append(
            "Gradients and parameters count as sent also where they stay in memory that workers "
            "and servers of a host share."
        )
    if plan.staleness_bound != 0:
        notes.append(
            f"staleness={plan.staleness}: each rank's pieces are a step of the optimizer, with a "
            "learning rate that is their share of the batch."
        )
    if plan.deadline_s is not None:
        notes.append(
            f"deadline={plan.deadline}: a round closes so many seconds after its first replica "
            "came. A late replica pushes its outer gradient in its next round."
        )
    if plan.precision != "fp32":
        notes.append(
            f"precision={plan.precision} is that of forward and backward; parameters, gradients "
            "and optimizer state stay in the types of the model."
        )
    if found is not None and plan.schedule in ("zero-bubble", "zbv"):
        whole = [str(stage.index) for stage in found.stages if not stage.splits_backward]
        if whole:
            notes.append(
                f"The backward pass of stage {', '.join(whole)} cannot be split in two, so "
                f"schedule={plan.schedule} waits there as an interleaved one does."
            )
    if plan.zero == 3 and found is not None:
        notes.append(
            "zero=3 in a pipeline: a unit stays gathered from a microbatch's forward to its "
            "backward pass, so parameters are sharded between steps rather than within one."
        )
    return notes
