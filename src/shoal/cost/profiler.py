"""Makes the profile of a run: record its forward, watch it at two batch sizes, once for each cut.

What fits this machine is run as a rank would run it, on one thread, several times; the rest on fake
tensors. Whatever a plan could ask of the model is found here, so that no plan needs it again: the
recorded forward for pipelines, the cuts of each tensor degree, blocks of ZeRO 3 and of recompute,
rows of tables, and what the model refuses.

Cost: seconds, and for a measured model its training memory once; then it comes from the cache,
which knows a run by its model's structure and code, its batch and this machine.
"""

import hashlib
import inspect
import math
import platform
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from time import thread_time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shoal.cost.first_step import run_first_step
from shoal.cost.lookups import count_lookups
from shoal.cost.model_facts import buffers_of, changed_buffers, optimizer_state_of
from shoal.cost.passes import WatchedPasses, line_through, lines_of, times_of
from shoal.cost.profile import (
    VERSION,
    BlockProfile,
    BlockTimes,
    Linear,
    ParameterProfile,
    Profile,
    TableProfile,
    TensorProfile,
    ValueProfile,
)
from shoal.cost.subject import MOST_PIECES, Subject, first_piece, make_subject, seeds_of
from shoal.cost.tensor import CountingGroup
from shoal.cost.this_machine import measure_flops
from shoal.cost.trial import crowding, process_bytes, try_steps
from shoal.data.batches import Piece
from shoal.errors import PlanError
from shoal.events.meters import own_and_shared_bytes
from shoal.logs import log
from shoal.numerics.buffers import PieceBuffers
from shoal.numerics.fused_steps import why_not_in_runs
from shoal.numerics.optimizers import is_element_wise
from shoal.parallel import fsdp
from shoal.parallel.pipeline.stages import record
from shoal.parallel.pipeline.tape import ValueLeaf
from shoal.parallel.recompute import blocks_to_recompute
from shoal.parallel.striping import tables_of, weights_of
from shoal.parallel.tensor.cutting import TensorForward, cut_tensors, find_cuts
from shoal.plans.plan import Plan
from shoal.storage.files import write_atomic
from shoal.storage.run_dir import cache_directory
from shoal.sync.host_state import why_apart
from shoal.system.memory import loaded_is_frozen
from shoal.training.build import refuse_unfit
from shoal.training.evaluate import evaluated_samples
from shoal.training.run import Run, call_model, make_batches

DEGREES = (2, 4, 8)  # of the tensor axis
MOST_STAGES = 64  # that the forward is opened for
_PROBED = {  # words of plans, with a plan that has them and nothing else
    "data>1": "data=2",
    "zero=3": "data=2 zero=3",
    "tensor>1": "data=1 tensor=2",
    "pipeline>1": "data=1 pipeline=2",
    "recompute": "data=1 recompute=blocks",
    "offload": "data=1 offload=optimizer",
    "server": "data=2 sync=server",
    "local_steps>1": "data=2 local_steps=2",
    "pieces>1": "data=1 pieces=2",
}


def profile_run(run: Run, fresh: bool = False) -> Profile:
    """The profile of a run, from the cache if the same was profiled before and not `fresh`.

    A model that fits in memory is measured; another is run on fake tensors, which allocate
    nothing. RecipeError says what is missing if the model can be run on neither.
    """
    with _as_a_rank():
        subject = make_subject(run)
        try:
            kept = cache_directory() / "profiles" / f"{_digest(run, subject)}.json"
            if kept.exists() and not fresh:
                try:
                    return msgspec.json.decode(kept.read_bytes(), type=Profile)
                except msgspec.DecodeError:
                    log.info("The cached profile %s cannot be read, and is made again.", kept)
            profile = _profile(run, subject)
        finally:
            subject.seeds.close()
    kept.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(kept, msgspec.json.encode(profile))
    return profile


def sketch_run(run: Run, plan: Plan) -> Profile:
    """What one plan needs of a profile to know its memory: from shapes, on fake tensors, in a part
    of the time and without memory. RecipeError if the forward looks at values."""
    with _as_a_rank():
        subject = make_subject(run, on_shapes=True)
        try:
            return _of_parts(run, subject, plan)
        finally:
            subject.seeds.close()


@contextmanager
def _as_a_rank() -> Iterator[None]:
    """On one thread, without collections that would count for one event. Random state and threads
    are put back."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), loaded_is_frozen():
            yield
    finally:
        torch.set_num_threads(threads)


def _profile(run: Run, subject: Subject) -> Profile:
    """Steps are tried first, while this process is as new as the one that ranks are forked from."""
    shared_here = (own_and_shared_bytes() or (0, 0))[1]
    counts = {run.batch_size // size for size in subject.examples}
    counts |= {2} if run.batch_size % 2 == 0 else set()
    tried = {n: try_steps(run, n) for n in sorted(counts)} if subject.mode is None else {}
    trials = {n: trial for n, trial in tried.items() if trial is not None}
    found = _of_parts(run, subject)
    process = process_bytes(run, found, trials, shared_here)
    if 1 not in trials:
        return msgspec.structs.replace(found, overhead_s=1e-3, process=process)
    measured = at_pace(found, trials[1].step_s)
    return msgspec.structs.replace(measured, process=process, crowding=crowding(run, trials[1]))


def at_pace(profile: Profile, step_s: float) -> Profile:
    """With what a whole step in one piece takes beside its parts. If it takes less than they did,
    each by itself and watched, then all of them take as much less."""
    size, (each, element) = profile.batch_size, profile.update_s
    trained = [math.prod(p.shape) for p in profile.parameters if p.is_trained]
    passes = sum(t.forward_s.at(size) + t.backward_s.at(size) for t in profile.times)
    parts = passes + profile.data_s.at(size) + each * len(trained) + element * sum(trained)
    if step_s >= parts:
        return msgspec.structs.replace(profile, overhead_s=step_s - parts)
    pace = step_s / parts
    cuts = {
        degree: msgspec.structs.replace(cut, times=_scaled(cut.times, pace))
        for degree, cut in profile.tensor.items()
    }
    return msgspec.structs.replace(
        profile,
        overhead_s=0.0,
        times=_scaled(profile.times, pace),
        tensor=cuts,
        update_s=(pace * each, pace * element),
        data_s=profile.data_s.times(pace),
    )


def _scaled(times: Sequence[BlockTimes], pace: float) -> tuple[BlockTimes, ...]:
    return tuple(
        msgspec.structs.replace(
            own, forward_s=own.forward_s.times(pace), backward_s=own.backward_s.times(pace)
        )
        for own in times
    )


def _of_parts(run: Run, subject: Subject, plan: Plan | None = None) -> Profile:
    """What does not need the trainer; for one plan only what that plan asks for."""
    model, is_plain = subject.model, run.step is None
    is_cut = plan is None or plan.pipeline > 1 or plan.tensor > 1 or plan.recompute != "none"
    records = is_plain and is_cut
    blocks, values, opened, refusal = _recorded(subject) if records else _one_event(model)
    tables = weights_of(tables_of(model).values())
    refusals = _refusals(run, model)
    watched = WatchedPasses(subject, blocks, measure_flops())
    times = watched.times() if is_plain else watched.steps()
    degrees = DEGREES if plan is None else tuple({plan.tensor} - {1})
    cuts = degrees if is_plain and "tensor>1" not in refusals else ()
    in_others = is_plain and (plan is None or plan.precision != "fp32")
    names = {id(p): name for name, p in model.named_parameters()}
    paths = {id(module): path for path, module in model.named_modules()}
    units, rest = _fsdp_units(model, names, paths)
    state = optimizer_state_of(run.make_optimizer(model), model, tables)
    held, phases = PieceBuffers(model), run_first_step(run, model, first_piece(subject))
    return Profile(
        model=type(model).__name__,
        batch_size=run.batch_size,
        sizes=tuple(subject.examples),
        parameters=tuple(
            ParameterProfile(
                name,
                tuple(p.shape),
                str(p.dtype).removeprefix("torch."),
                p.dtype.itemsize,
                p.requires_grad,
                tuple((kept.dims, kept.itemsize) for kept in state.get(name, ())),
            )
            for name, p in model.named_parameters()
        ),
        blocks=tuple(blocks),
        values=values,
        times=tuple(times),
        tensor={n: _cut(subject, blocks, n, watched.speed, times) for n in cuts},
        opened=opened,
        recomputed=_recomputed(model, paths),
        fsdp_blocks=units,
        fsdp_rest=rest,
        buffers={name: buffer.nbytes for name, buffer in buffers_of(model).items()},
        changed=changed_buffers(model, held),
        averaged_buffers=sum(b.numel() for b in model.buffers() if b.is_floating_point()),
        tables=_tables(run, subject),
        phases=tuple(phases),
        precisions=watched.precisions() if in_others else {},
        is_element_wise=is_element_wise(run.make_optimizer(model), tables),
        clips=run.clip is not None,
        update_s=watched.update_seconds(),
        data_s=_data_seconds(run),
        overhead_s=0.0,
        is_measured=subject.mode is None,
        flops_per_s=watched.speed,
        depends_on_data=watched.is_unlike or "from one batch to the next" in refusal,
        refusals=refusals,
        pipeline_refusal=refusal,
        shares=_may_share(run, subject),
        evaluation=watched.evaluation(),
    )


def _may_share(run: Run, subject: Subject) -> bool:
    """Whether ranks of one host may hold parameters and state together."""
    optimizer = run.make_optimizer(subject.model)
    is_real = subject.mode is None
    why = why_apart(subject.model, optimizer) if is_real else why_not_in_runs(optimizer)
    return not (run.writes_weights or why)


def _recomputed(model: nn.Module, paths: dict[int, str]) -> tuple[str, ...]:
    try:
        return tuple(paths[id(block)] for block in blocks_to_recompute(model))
    except PlanError:
        return ()


Units = tuple[tuple[str, tuple[str, ...]], ...]


def _fsdp_units(
    model: nn.Module, names: dict[int, str], paths: dict[int, str]
) -> tuple[Units, Units]:
    """Those that ZeRO 3 makes of the model's blocks, and those that it makes of the rest."""

    def named(units: Sequence[nn.Module]) -> Units:
        return tuple((paths[id(unit)], _sharded_in(unit, names)) for unit in units)

    units = fsdp.units(model, [*names.values()], (), whole_model=True)[:-1]
    rest = fsdp.units(model, [*names.values()], (), whole_model=False)[len(units) :]
    return named(units), named(rest)


def _sharded_in(unit: nn.Module, names: dict[int, str]) -> tuple[str, ...]:
    return tuple(names[id(p)] for p in unit.parameters() if p.dim() and p.requires_grad)


def _tables(run: Run, subject: Subject) -> dict[str, TableProfile]:
    if subject.mode is not None or not tables_of(subject.model):
        return {}
    num_pieces = run.batch_size // min(subject.examples)
    return {
        name: TableProfile(
            use.num_rows,
            use.row_bytes,
            use.padding,
            use.is_lazy,
            tuple(tuple(tuple(ids.tolist()) for ids in calls) for calls in use.by_piece),
        )
        for name, use in count_lookups(run, num_pieces, subject.model).items()
    }


def _refusals(run: Run, model: nn.Module) -> dict[str, str]:
    """What the model refuses, asked as a run would ask."""
    found = {}
    for words, text in _PROBED.items():
        try:
            plan = Plan.parse(text).resolve(ranks=None, cores=64, batch_size=run.batch_size)
        except PlanError:
            continue  # the batch does not divide so, which says nothing about the model
        try:
            refuse_unfit(run, plan, model)
        except PlanError as error:
            found[words] = str(error)
    return found


def _data_seconds(run: Run) -> Linear:
    """To load a piece in the rank itself; none if other processes load ahead."""
    if run.loaders:
        return Linear()
    seconds = {}
    num_pieces = max(k for k in range(1, MOST_PIECES + 1) if run.batch_size % k == 0)
    for count in dict.fromkeys((num_pieces, 1)):
        batches, laps = make_batches(run, count), []
        try:
            for step in range(min(5, batches.steps_per_epoch)):
                started = thread_time()
                size = batches.at(step).piece(0).num_samples
                laps.append(thread_time() - started)
        finally:
            batches.close()
        seconds[size] = statistics.median(laps)
    return line_through(seconds)


# ---- events


Recorded = tuple[list[BlockProfile], dict[int, ValueProfile], dict[str, int], str]


def _recorded(subject: Subject) -> Recorded:
    """The events of a forward, recorded at the smaller size and run once more at the larger: so
    bytes are lines. A model that cannot be recorded is one event, and has no pipeline."""
    (size, pieces), *larger = subject.examples.items()
    try:
        forwards = [partial(_unseeded, subject, piece) for piece in pieces]
        tape = record(subject.model, forwards, MOST_STAGES, subject.seeds)
        tapes = {size: tape}
        for other, (piece, *_) in larger:
            again = record(
                subject.model, [partial(_unseeded, subject, piece)], 0, subject.seeds, tape
            )
            if len(again.events) != len(tape.events):
                raise PlanError("The forward differs from one batch to the next in its size.")
            tapes[other] = again
    except PlanError as error:
        return _one_event(subject.model, str(error))
    blocks = [
        BlockProfile(
            name=event.name,
            where=event.where,
            is_unit=event.is_unit,
            parameters=event.parameters,
            buffers=event.buffers,
            changes=event.changes,
            uses=tuple(sorted(event.uses)),
            makes=tuple(
                {leaf.number for leaf in event.result if isinstance(leaf, ValueLeaf)}
                | {number for _, number in event.adopts}
            ),
            can_start=event.is_fresh and not event.is_inside and index not in tape.uncut,
            cost=Linear(0.0, event.cost / size),
            block=event.block,
        )
        for index, event in enumerate(tape.events)
    ]
    values = {
        number: ValueProfile(
            tape.made_at[number],
            line_through({n: tapes[n].values[number].num_bytes for n in tapes}),
            number in tape.need_gradient,
            number in tape.final,
        )
        for number in set.intersection(*(set(known.values) for known in tapes.values()))
    }
    modules = dict(subject.model.named_modules())
    opened = {n: sum(p.numel() for p in modules[n].parameters()) for n in sorted(tape.open)}
    return blocks, values, opened, ""


def _unseeded(subject: Subject, piece: Piece) -> Any:
    return call_model(subject.model, piece.inputs)


def _one_event(model: nn.Module, refusal: str = "") -> Recorded:
    parameters = tuple(name for name, _ in model.named_parameters())
    buffers = tuple(name for name, _ in model.named_buffers())
    whole = BlockProfile("", "", True, parameters, buffers, (), (), (), True, Linear(0, 1), 0)
    return [whole], {}, {}, refusal


# ---- the tensor axis


def _cut(
    subject: Subject,
    blocks: Sequence[BlockProfile],
    degree: int,
    speed: float,
    whole: Sequence[BlockTimes],
) -> TensorProfile:
    run, piece = subject.run, first_piece(subject)
    try:
        plan = find_cuts(subject.model, [lambda: _unseeded(subject, piece)], degree, run.cuts)
    except PlanError as error:
        return TensorProfile(refusal=str(error))
    with subject.mode or nullcontext():
        model = run.make_model().train()
        cut_tensors(model, plan, 0, degree)
    group = CountingGroup(degree)
    seeds = seeds_of(run, model)
    cut = subject._replace(model=model, seeds=seeds, tensor=TensorForward(group), group=group)
    try:
        watched = WatchedPasses(cut, blocks, speed, whole)
        by_size = watched.amounts()
        evaluation = watched.evaluation()
    except RuntimeError as error:
        return TensorProfile(refusal=f"{type(model).__name__} cannot be run cut: {error}")
    finally:
        seeds.close()
    first = next(iter(by_size.values()))
    return TensorProfile(
        cuts={name: (found.dim, found.packs) for name, found in plan.cuts.items()},
        crossed=tuple(sorted(plan.crossed)),
        times=tuple(times_of(by_size, len(blocks))),
        messages=tuple(first.messages),
        message_bytes=tuple(lines_of(by_size, "message_bytes", len(blocks))),
        back_messages=tuple(first.back_messages),
        back_bytes=tuple(lines_of(by_size, "back_bytes", len(blocks))),
        evaluation=evaluation,
    )


# ---- the cache


def _digest(run: Run, subject: Subject) -> str:
    """What a profile depends on: the model's structure and code, the batch, this machine."""
    model, seen = subject.model, hashlib.sha256()
    kinds = {type(module) for module in model.modules()}
    own = [kind for kind in kinds if not kind.__module__.startswith("torch.")]
    optimizer = run.make_optimizer(model)
    parts = [
        str(VERSION),
        torch.__version__,
        platform.machine(),
        platform.processor() or _cpu_name(),
        str(model),
        *(
            f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad}"
            for name, p in model.named_parameters()
        ),
        *sorted(_source(kind) for kind in own),
        _source(run.loss if run.step is None else run.step),
        f"{type(optimizer).__name__} {optimizer.defaults}",
        f"{run.batch_size} {run.clip} {run.loaders} {dict(run.cuts)} {evaluated_samples(run)}",
        *(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in _tensors(subject)),
    ]
    for part in parts:
        seen.update(part.encode() + b"\0")
    return seen.hexdigest()[:32]


def _tensors(subject: Subject) -> Iterator[Tensor]:
    for pieces in subject.examples.values():
        for leaf in tree_leaves([(piece.inputs, piece.target) for piece in pieces]):
            if isinstance(leaf, Tensor):
                yield leaf


def _source(made: Any) -> str:
    try:
        return inspect.getsource(made)
    except (OSError, TypeError):
        return repr(type(made))


def _cpu_name() -> str:
    if sys.platform == "linux":
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next((line for line in file if line.startswith("model name")), "")
    return ""
