"""How long a step of a plan takes on a cluster, and what its ranks hold, before one is started.

Pure: a profile (`profile.py`), a resolved plan and a cluster (`cluster.py`) in, figures out, within
milliseconds, so that thousands of plans can be judged. Who holds and sends what is asked of the
functions that ranks run themselves: the strategies' `costs`, `sync/rank_layout.py`, the pipeline's
cuts and schedules, `cluster/placement.py`. What is added here is time: events of a stage, transfers
over links, buckets that leave during backward, ranks that share cores.

What is not modelled: other work on the machine, congestion between groups, evaluation and
checkpoints. Read next: `activations.py` for the peak of a step, `docs/techniques/prediction.md` for
the error against measured runs.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from msgspec import structs

from shoal.cost.activations import PassMemory, pass_memory, peak_in_flight
from shoal.cost.cluster import Cluster, HostGroup
from shoal.cost.message_memory import group_bytes, pipeline_bytes, received_bytes
from shoal.cost.plan_facts import ModelFacts, facts_of
from shoal.cost.prediction import (
    MemoryParts,
    Prediction,
    StageTimes,
    StepTimes,
    TimeParts,
)
from shoal.cost.profile import BlockTimes, Profile
from shoal.cost.rank_places import RankPlaces
from shoal.cost.round_times import busy_by_rank, order_of, round_seconds
from shoal.cost.tensor import TensorTraffic
from shoal.cost.traffic import mesh_messages
from shoal.parallel.pipeline.stages import StageSpec, rank_of_stage
from shoal.plans.keys import AUTO
from shoal.plans.plan import Plan
from shoal.plans.resize import can_recover
from shoal.sync.choose import strategy_class
from shoal.sync.costs import StepCosts
from shoal.sync.rank_layout import RankLayout
from shoal.sync.server.costs import aggregator_costs, server_costs

__all__ = [
    "MemoryParts", "Prediction", "StageTimes", "StepTimes", "TimeParts", "predict", "step_times"
]  # fmt: skip

MEASURED_ERROR = 0.15  # of a profile and a cluster that were measured on one machine
SCALED_ERROR = 0.35  # of one measured elsewhere, and scaled by the speed of a matmul
FLOPS_ERROR = 0.5  # of seconds that were made from flops
DATA_ERROR = 0.25  # in addition, if the forward depends on data
WEIGHT_SHARE = 0.5  # of a backward: the gradients of weights
ADD_SHARE = 0.4  # of an update of an element: adding two gradients, or copying one
PACK_SHARE = 4.0  # of an update of an element: packing and unpacking by a codec
FILE_BYTES_PER_S = 1.5e9  # of offloaded state, in the page cache
# Of modules and records that only some plans have.
PIPELINE_BYTES, TENSOR_BYTES, SHARDED_BYTES = 8_000_000, 7_000_000, 12_000_000


def predict(profile: Profile, plan: Plan, cluster: Cluster) -> Prediction:
    """What a step of a resolved plan takes. PlanError if the model cannot be cut as it says.

    Ranks are placed as a run would place them (`cluster/placement.py`), on as few hosts as have
    the devices; more ranks than devices share them.
    """
    step = _Step(facts_of(profile), plan, cluster)
    weighed = _StepMemory(step)
    parts, memory = step.time_parts(), weighed.memory()
    fullest, held = weighed.fullest_host(memory)
    return Prediction(
        plan=str(plan),
        step_s=parts.total,
        samples_per_s=profile.batch_size / parts.total if parts.total else 0.0,
        time=parts,
        memory=max(memory, key=lambda own: own.peak),
        server_bytes=weighed.server_bytes,
        host_bytes=held,
        host_limit_bytes=fullest.memory_bytes,
        bytes_sent=round(max(map(weighed.bytes_sent, step.layouts)) / plan.local_steps),
        error_share=_error(profile, cluster),
        notes=step.notes(),
    )


def memory_of_ranks(profile: Profile, plan: Plan, cluster: Cluster) -> list[MemoryParts]:
    """What a rank of each pipeline rank holds."""
    return _StepMemory(_Step(facts_of(profile), plan, cluster)).memory()


def step_times(profile: Profile, plan: Plan, cluster: Cluster) -> StepTimes:
    """The parts of a step, for the simulator; `predict` composes them. Pure as well."""
    return _Step(facts_of(profile), plan, cluster).times


def _error(profile: Profile, cluster: Cluster) -> float:
    speeds = [group.flops for group in cluster.hosts]
    alike = all(0.5 < profile.flops_per_s / speed < 2 for speed in speeds)
    error = MEASURED_ERROR if alike else SCALED_ERROR
    error = error if profile.is_measured else FLOPS_ERROR
    return error + DATA_ERROR * profile.depends_on_data


class _Step:
    """One plan on one cluster. Ranks that differ only in their replica or their part of a layer are
    alike, so the first of each pipeline rank stands for all."""

    def __init__(self, model: ModelFacts, plan: Plan, cluster: Cluster):
        self.model, self.profile, self.plan, self.cluster = model, model.profile, plan, cluster
        self.facts = model.facts(plan)
        self.places = RankPlaces(plan, cluster, self.profile.flops_per_s, self.profile.crowding)
        if self.facts.shares and not self.places.may_share:
            self.facts = replace(self.facts, shares=False)
        self.layouts = [
            RankLayout(self.facts, p * plan.num_replicas * plan.tensor)
            for p in range(plan.pipeline)
        ]
        if plan.num_ranks > _MOST_EXACT:
            self.facts.__dict__["norm_blocks"] = self._about_norm_blocks()
        self.costs = [strategy_class(plan).costs(layout) for layout in self.layouts]
        self.samples = self.profile.batch_size / plan.num_pieces
        cut = self.profile.tensor.get(plan.tensor)
        self.block_times: Sequence[BlockTimes] = self.profile.times if cut is None else cut.times

    def _about_norm_blocks(self) -> int:
        """Of all ranks, from the first of each pipeline rank."""
        each = self.layouts[0].num_replicas if self.plan.zero else 1
        return sum(layout.counted_blocks() for layout in self.layouts) * self.plan.tensor * each

    @cached_property
    def times(self) -> StepTimes:
        plan, profile = self.plan, self.profile
        layout, costs = self.layouts[0], self.costs[0]
        rounds = len(layout.rounds)
        num_pieces = rounds * plan.num_microbatches
        scale = max(self.places.rank_scale(p) for p in range(plan.pipeline))
        exchange = max(sum(map(self.places.seconds, own.sums)) for own in self.costs)
        exchange += self._server_seconds() + self._packing_seconds(costs) * scale
        agreement = max(sum(map(self.places.seconds, own.agreement)) for own in self.costs)
        phases = max(1, len(profile.phases))
        every = plan.local_steps
        return StepTimes(
            stages=self.stages,
            num_rounds=rounds,
            num_microbatches=plan.num_microbatches,
            data_s=num_pieces * profile.data_s.at(self.samples) * scale,
            exchange_s=phases * exchange / every,
            hidden_s=phases * self._hidden(exchange) / every,
            agreement_s=phases * agreement / every
            + profile.overhead_s * scale * self.places.sharers,
            update_s=phases * max(self._update(own) for own in self.costs) * scale,
            exchanges_every=every,
            staleness=plan.staleness_bound,
            sharers=self.places.sharers,
        )

    @cached_property
    def stages(self) -> tuple[StageTimes, ...]:
        """While a rank of a pipeline waits, it leaves others more of the host."""
        made, plan, crowd = self._stages_if_busy(), self.plan, self.places.crowd
        if plan.pipeline == 1 or crowd == 1:
            return made
        span, busy = round_seconds(plan, made)[0], busy_by_rank(plan, made)
        beside = (sum(busy) - span) / (sum(busy) - sum(busy) / plan.pipeline)
        factor = (1 + (crowd - 1) * min(1.0, max(0.0, beside))) / crowd
        return tuple(
            structs.replace(
                stage,
                forward_s=stage.forward_s * factor,
                backward_s=stage.backward_s * factor,
                weight_s=stage.weight_s * factor,
            )
            for stage in made
        )

    def _stages_if_busy(self) -> tuple[StageTimes, ...]:
        found = self.facts.survey.stages
        if found is None:
            return (self._stage(0, 0, range(len(self.profile.blocks)), 0, 0, False),)
        values, needs = found.tape.values, found.tape.need_gradient
        stages = []
        for spec in found.stages:
            rank = rank_of_stage(spec.index, self.plan.pipeline, self.plan.schedule)
            sent = sum(values[n].num_bytes for n in spec.sent)
            back = sum(values[n].num_bytes for n in spec.received if n in needs)
            events = range(spec.start, spec.stop)
            stages.append(self._stage(spec.index, rank, events, sent, back, spec.splits_backward))
        return tuple(stages)

    def _stage(
        self, index: int, rank: int, events: range, sent: int, back: int, splits: bool
    ) -> StageTimes:
        plan, profile, n = self.plan, self.profile, self.samples
        scale = self.places.rank_scale(rank, profile.precision_of(plan.precision).seconds)
        forward = [self.block_times[i].forward_s.at(n) * scale for i in events]
        backward = sum(self.block_times[i].backward_s.at(n) for i in events) * scale
        again = self.model.blocks_again(plan)
        repeated = [at for at, i in enumerate(events) if again[i] is not None]
        talk, talk_back, talk_again = self._tensor_seconds(events, again)
        next_rank = rank_of_stage(index + 1, plan.pipeline, plan.schedule)
        before = rank_of_stage(index - 1, plan.pipeline, plan.schedule) if index else rank
        weight = backward * WEIGHT_SHARE if splits and plan.schedule in _SPLITTING else 0.0
        step = plan.num_replicas * plan.tensor
        between = self.places.group("pipeline", 0)
        if plan.pipeline > 1 and next_rank != rank and next_rank < plan.pipeline:
            ends = {self.places.hosts[rank * step], self.places.hosts[next_rank * step]}
            between = between._replace(num_hosts=len(ends), num_ranks=2, num_local=1)
        return StageTimes(
            index=index,
            rank=rank,
            forward_s=sum(forward) + talk,
            backward_s=backward + talk_back + sum(forward[at] for at in repeated) + talk_again,
            weight_s=weight,
            tensor_s=talk + talk_back + talk_again,
            send_s=self.places.transfer(between, 1, sent) if sent and next_rank != rank else 0.0,
            send_back_s=self.places.transfer(between, 1, back) if back and before != rank else 0.0,
            forward_bytes=sent if next_rank != rank else 0,
            backward_bytes=back if before != rank else 0,
            kept_bytes=round(self.pass_memory(events).kept),
        )

    def _tensor_seconds(
        self, events: range, again: Sequence[str | None]
    ) -> tuple[float, float, float]:
        """The messages of the tensor axis for one piece: forward, backward, recomputation."""
        cut = self.profile.tensor.get(self.plan.tensor)
        if cut is None:
            return 0.0, 0.0, 0.0
        group, n = self.places.group("tensor"), self.samples
        forward = [
            self.places.transfer(group, cut.messages[i], cut.message_bytes[i].at(n)) for i in events
        ]
        back = [
            self.places.transfer(group, cut.back_messages[i], cut.back_bytes[i].at(n))
            for i in events
        ]
        repeated = (s for s, i in zip(forward, events, strict=True) if again[i] is not None)
        return sum(forward), sum(back), sum(repeated)

    def _update(self, costs: StepCosts) -> float:
        """The optimizer's step, sums over rounds, state from files."""
        profile, layout, plan = self.profile, self.layouts[0], self.plan
        per_tensor, per_element = profile.update_s
        num_tensors = len(layout.trained) * costs.num_stepped / max(1, layout.num_trained)
        seconds = num_tensors * per_tensor + costs.num_stepped * per_element
        pieces = len(layout.rounds) * plan.num_microbatches
        added = pieces - 1 + (layout.num_replicas > 1)
        seconds += added * layout.num_trained * per_element * ADD_SHARE
        if plan.offload == "optimizer":
            stepped = [(p.name, p.shape) for p in layout.trained]
            state = sum(
                kept.num_bytes(shape)
                for name, shape in stepped
                for kept in self.facts.state.get(name, ())
            )
            share = costs.num_stepped / max(1, layout.num_trained)
            seconds += 2 * state * share / FILE_BYTES_PER_S
        return seconds * self.places.sharers

    def _packing_seconds(self, costs: StepCosts) -> float:
        if self.plan.codec in ("none", AUTO):  # which is foreseen as none
            return 0.0
        layout = self.layouts[0]
        whole = layout.num_replicas if self.plan.zero == 3 else 1  # of which a shard is trained
        return whole * layout.num_trained * self.profile.update_s[1] * PACK_SHARE

    @cached_property
    def servers(self) -> list[StepCosts]:
        """The first server, which holds most, and a host's aggregator."""
        own = [server_costs(self.facts, 0)] if self.plan.num_servers else []
        return [*own, *([aggregator_costs(self.facts)] if self.plan.num_host_servers else [])]

    def _server_seconds(self) -> float:
        """What servers do between the last push and the last pull of a step."""
        seconds = 0.0
        for costs in self.servers:
            num_bytes = sum(m.num_bytes for m in costs.sums)
            count = sum(m.count for m in costs.sums)
            link = (
                self.cluster.inside
                if self.places.group("servers").is_inside
                else self.cluster.between
            )
            seconds += link.seconds(count / max(1, self.plan.num_apart), num_bytes)
            stepped = costs.num_stepped if self.plan.local_steps == 1 else 0
            per_element = self.profile.update_s[1]
            pushed = self.plan.num_apart * ADD_SHARE * costs.num_stepped
            seconds += (stepped + pushed) * per_element * self.places.scale([0])
        return seconds

    def _hidden(self, exchange: float) -> float:
        """What of the exchange runs while ranks compute."""
        plan = self.plan
        busy = sum(stage.forward_s + stage.backward_s for stage in self.stages if not stage.rank)
        last = sum(stage.backward_s for stage in self.stages if not stage.rank)
        rounds = len(self.layouts[0].rounds)
        if plan.staleness_bound != 0:
            return min(exchange, rounds * busy * plan.local_steps)
        if plan.local_steps > 1:
            beside = busy * rounds * plan.local_steps if plan.fragments > 1 else 0.0
            return min(exchange, beside) * self.places.spare
        if plan.pipeline > 1 or plan.num_servers:
            return 0.0  # what leaves early leaves in a backward pass of its own
        if plan.zero == 3:
            return min(exchange, rounds * busy) * self.places.spare
        backwards = rounds if plan.zero == 2 else 1
        buckets = len(self.layouts[0].flat_buffers if plan.zero else self.layouts[0].buckets)
        early = exchange * (1 - 1 / buckets) if buckets else 0.0
        return min(early, backwards * last) * self.places.spare

    def time_parts(self) -> TimeParts:
        plan, t = self.plan, self.times
        span, busy, talk = round_seconds(plan, t.stages)
        ranks = self.places.ranks_on.most_common(1)[0][1]
        works = busy_by_rank(plan, t.stages)
        mean = sum(works) / len(works)
        # A host cannot do more at once than it has devices for.
        shared = mean * max(1.0, self.places.sharers) if ranks > 1 else span
        crowd = self.places.sharers if plan.pipeline == 1 else 1.0
        compute = t.num_rounds * (busy - talk) * crowd
        whole = t.num_rounds * max(span, shared)
        exchange = t.exchange_s - t.hidden_s + t.agreement_s - self._overhead
        talking = t.num_rounds * talk * crowd
        waiting = max(0.0, whole - compute - talking)
        return TimeParts(
            compute=compute + self._overhead,
            exchange=exchange + talking,
            waiting=waiting,
            update=t.update_s,
            data=t.data_s * self.places.sharers,
        )

    @property
    def _overhead(self) -> float:
        scale = max(self.places.rank_scale(p) for p in range(self.plan.pipeline))
        return self.profile.overhead_s * scale * self.places.sharers

    def pass_memory(self, events: range) -> PassMemory:
        """The same for many plans, so it is kept with the model."""
        plan, kept = self.plan, self.model.passes
        key = events.start, events.stop, self.samples, plan.tensor, plan.precision, plan.recompute
        if key not in kept:
            kept[key] = pass_memory(self.model, plan, self.block_times, events, self.samples)
        return kept[key]

    def notes(self) -> tuple[str, ...]:
        profile, found = self.profile, []
        if not profile.is_measured:
            found.append("Seconds are made from flops: the model does not fit this machine.")
        if profile.depends_on_data:
            found.append("The forward depends on data, so other batches may take other times.")
        if self.places.sharers > 1:
            found.append(f"{self.places.sharers:.3g} ranks share each device.")
        if self.plan.local_steps > 1:
            found.append("Exchange and bytes are those of a window, over its steps.")
        if len({self.cluster.group_of(host).flops for host in self.places.ranks_on}) > 1:
            found.append("Hosts differ: the slowest one decides, unless work moves between them.")
        return tuple(found)


class _StepMemory:
    """What the ranks of a step hold and send."""

    def __init__(self, step: _Step):
        self._step = step

    def bytes_sent(self, layout: RankLayout) -> int:
        costs = self._step.costs[layout.place.pipeline]
        sent = [*costs.sums, *mesh_messages(layout, self._moves(layout)), *costs.agreement]
        return max(1, len(self._step.profile.phases)) * sum(message.num_bytes for message in sent)

    def _moves(self, layout: RankLayout) -> dict[int, TensorTraffic]:
        """The traffic of the tensor axis for one piece, by stage."""
        cut, n = self._step.profile.tensor.get(self._step.plan.tensor), self._step.samples
        if cut is None:
            return {}
        again = self._step.model.blocks_again(self._step.plan)
        spans = [(s.index, range(s.start, s.stop)) for s in layout.stages]
        return {
            index: TensorTraffic(
                sum(cut.messages[i] for i in events),
                round(sum(cut.message_bytes[i].at(n) for i in events)),
                sum(cut.back_messages[i] for i in events),
                round(
                    sum(cut.back_bytes[i].at(n) for i in events)
                    + sum(cut.message_bytes[i].at(n) for i in events if again[i] is not None)
                ),
            )
            for index, events in spans or [(0, range(len(self._step.profile.blocks)))]
        }

    def memory(self) -> list[MemoryParts]:
        """Of each pipeline rank."""
        return [
            self._memory_of(*both)
            for both in zip(self._step.layouts, self._step.costs, strict=True)
        ]

    def _memory_of(self, layout: RankLayout, costs: StepCosts) -> MemoryParts:
        held, plan, process = costs.memory, self._step.plan, self._step.profile.process
        gradients = held.gradients.num_bytes
        if layout.stages:
            own = {s.index: self._stage_memory(s) for s in layout.stages}
            order = order_of(plan)
            activations = peak_in_flight(order[layout.place.pipeline], own)
            sent = self._pipeline_messages(layout)
        else:
            sent = 0
            whole = self._step.pass_memory(range(len(self._step.profile.blocks)))
            activations = whole.peak
            lone = layout.num_replicas == 1 and len(layout.rounds) == 1 and not plan.num_servers
            if lone and layout.num_trained:
                # Gradients come as activations go.
                each = gradients / sum(
                    self._step.model.num_elements[p.name] for p in layout.trained
                )
                best = max(whole.moments, key=lambda m: m.activations + each * m.gradient_elements)
                activations, gradients = best.activations, int(each * best.gradient_elements)
        activations = max(activations, self._in_evaluation)
        return MemoryParts(
            parameters=held.parameters.num_bytes - self._left_to_others(layout),
            gradients=gradients,
            optimizer=held.optimizer.num_bytes,
            buffers=held.buffers.num_bytes,
            activations=round(activations * (process.heap if self._on_cores else 1.0)),
            communication=held.extra.num_bytes + sent + self._group_bytes,
            base=self.base_bytes,
        )

    def _stage_memory(self, stage: StageSpec) -> PassMemory:
        received = received_bytes(self._step.profile, stage, self._step.samples)
        return self._step.pass_memory(range(stage.start, stage.stop)).with_inputs(received)

    @cached_property
    def _in_evaluation(self) -> float:
        profile, plan = self._step.profile, self._step.plan
        cut = profile.tensor.get(plan.tensor)
        found = profile.evaluation if cut is None else cut.evaluation
        return found.num_bytes * profile.precision_of(plan.precision).kept

    @cached_property
    def _in_shared_memory(self) -> bool:
        return self._on_cores and self._step.places.group("world").is_inside

    @cached_property
    def _group_bytes(self) -> int:
        return group_bytes(self._step.plan) if self._in_shared_memory else 0

    def _pipeline_messages(self, layout: RankLayout) -> int:
        step, stages = self._step, self._step.facts.survey.stages
        if stages is None or not self._in_shared_memory:
            return 0
        return pipeline_bytes(step.profile, step.plan, stages, layout.place.pipeline)

    @cached_property
    def _on_cores(self) -> bool:
        return self._step.cluster.group_of(self._step.places.hosts[0]).device == "core"

    @property
    def _has_spare(self) -> bool:
        return can_recover(self._step.plan, shares=self._step.facts.shares)

    @cached_property
    def _num_forked(self) -> int:
        """The processes of a host that come from one: its ranks, servers and a spare."""
        most = Counter(self._step.places.hosts).most_common(1)[0][1]
        return most + self._has_spare

    def _left_to_others(self, layout: RankLayout) -> int:
        """Of parameters that are not trained: ranks that hold them whole share one copy."""
        if layout.plan.cuts_model or layout.plan.zero == 3 or not self._on_cores:
            return 0
        frozen = sum(p.num_bytes for p in layout.parameters if not p.is_trained)
        return frozen - frozen // (self._num_forked + 1)

    @cached_property
    def base_bytes(self) -> int:
        """Of a rank's process: what it shares is counted by its share."""
        plan, process = self._step.plan, self._step.profile.process
        more = PIPELINE_BYTES * (plan.pipeline > 1) + TENSOR_BYTES * (plan.tensor > 1)
        more += SHARDED_BYTES * (plan.zero == 3)
        return process.own + process.share(self._num_forked) + more

    @cached_property
    def server_bytes(self) -> int:
        return max((c.memory.num_bytes + self.base_bytes for c in self._step.servers), default=0)

    def fullest_host(self, memory: Sequence[MemoryParts]) -> tuple[HostGroup, int]:
        """The host with the least room, and what its processes hold."""
        step = self._step.plan.num_replicas * self._step.plan.tensor
        held: Counter[int] = Counter()
        for p, own in enumerate(memory):
            for host, count in Counter(self._step.places.hosts[p * step : (p + 1) * step]).items():
                held[host] += count * own.peak
        for host in self._step.places.hosts[self._step.plan.num_ranks :]:
            held[host] += self.server_bytes
        share = self._step.profile.process.share(self._num_forked)
        for host in held:  # on cores also a spare, and the process that all come from, with a model
            if self._step.cluster.group_of(host).device == "core":
                held[host] += self._step.profile.parameter_bytes + share * (1 + self._has_spare)
        host = max(held, key=lambda h: held[h] / self._step.cluster.group_of(h).memory_bytes)
        return self._step.cluster.group_of(host), held[host]


_MOST_EXACT = 8  # ranks whose gradient norm is counted block by block
_SPLITTING = ("zero-bubble", "zbv")
