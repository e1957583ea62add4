"""A few steps of the real trainer in a fork: what a step takes beside its parts, and holds.

A rank is a fork of a process that has loaded the recipe, so this is one: a world of one rank, which
ends after some steps and leaves nothing. Its own memory, less the tensors that its plan is known to
hold, is what any rank's process needs; at two sizes of pieces it also shows how much room a byte of
activations takes in a heap with gaps. Several at once show how much slower a step is where all
cores are busy. Cost: some steps for each. Read next: `predict.py`.
"""

import gc
import math
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import linear_regression, median
from time import monotonic, thread_time

import msgspec
import psutil
import torch

from shoal.comm.mesh import LauncherSeat
from shoal.cost.cluster import Cluster, HostGroup, Link
from shoal.cost.predict import memory_of_ranks
from shoal.cost.profile import Crowding, EvaluationMemory, ProcessBytes, Profile
from shoal.cost.subject import SHARE_OF_MEMORY
from shoal.events.meters import own_and_shared_bytes
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.system.processes import die_with_parent, result_of_fork
from shoal.training.run import Run, resolve
from shoal.training.trainer import Trainer
from shoal.world import World, cores

FEWEST_STEPS, MOST_STEPS = 4, 400
COLD_SHARE = 0.25  # of the steps, before caches and clocks are as in a run
LONG_ENOUGH_S = 0.5  # for all of them but the fewest
PATIENCE_S = 120.0
LEAST_CHANGE = 10_000_000  # bytes of activations between two sizes that show the heap's gaps
MOST_HEAP = 3.0
MOST_AT_ONCE = 16  # processes that are tried beside each other
_ANYWHERE = Cluster("", (HostGroup(1, 1, 1 << 40, 1e9),), Link(0, 1e9), Link(0, 1e9))


class Trial(msgspec.Struct, frozen=True):
    """What the fork saw of itself."""

    step_s: float  # of its thread, so other work on the machine counts little
    own_bytes: int
    shared_bytes: int


def try_steps(run: Run, num_pieces: int, at_once: int = 1) -> Trial | None:
    """Train some steps of one rank, each in so many pieces, in `at_once` processes that do the
    same; None if it cannot be done here."""
    if torch.cuda.is_initialized():
        return None  # does not survive a fork
    bare = replace(
        run, callbacks=(), evaluate=None, evaluate_every=None, save_every=None, loaders=0
    )
    content = result_of_fork(
        lambda: msgspec.msgpack.encode(_train_beside(bare, num_pieces, at_once - 1)), PATIENCE_S
    )
    found = msgspec.msgpack.decode(content, type=Trial | None) if content else None
    if found is None:
        log.info("No steps in %d pieces could be tried in a process of their own.", num_pieces)
    return found


def crowding(run: Run, alone: Trial) -> Crowding:
    """What becomes of a step where each core makes one, as far as there is memory for it."""
    room = SHARE_OF_MEMORY * psutil.virtual_memory().available
    count = min(cores(), MOST_AT_ONCE, int(room // max(1, alone.own_bytes)))
    among = try_steps(run, 1, count) if count > 1 else None
    if among is None:
        return Crowding()
    return Crowding(count, max(1.0, among.step_s / alone.step_s))


def _train_beside(run: Run, num_pieces: int, num_others: int) -> Trial | None:
    """While so many others do the same, which end with it."""
    gc.freeze()  # as a fork server does: a collection would copy every page that it walks over
    others, here = list[int](), os.getpid()
    try:
        for _ in range(num_others):
            if not (pid := os.fork()):
                try:
                    die_with_parent(here)
                    _train(run, num_pieces, PATIENCE_S, 1 << 30)
                finally:
                    os._exit(0)
            others.append(pid)
        return _train(run, num_pieces, LONG_ENOUGH_S, MOST_STEPS)
    finally:
        for pid in others:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _train(run: Run, num_pieces: int, seconds: float, most_steps: int) -> Trial | None:
    laps: list[float] = []
    plan = trial_plan(run, num_pieces)
    with Trainer(run, plan, LauncherSeat(World()), num_steps=most_steps) as trainer:
        begun, started = monotonic(), thread_time()
        for _ in trainer:
            laps.append(thread_time() - started)
            if len(laps) >= FEWEST_STEPS and monotonic() - begun > seconds:
                break
            started = thread_time()
        memory = own_and_shared_bytes()
    warm = laps[math.ceil(COLD_SHARE * len(laps)) :]
    return Trial(median(warm), *memory) if memory else None


def trial_plan(run: Run, num_pieces: int) -> Plan:
    return resolve(run, Plan(accumulate=num_pieces), 1)


def process_bytes(
    run: Run, profile: Profile, trials: Mapping[int, Trial], shared_here: int
) -> ProcessBytes:
    """What a process holds beside tensors, from trials by their number of pieces. `shared_here` is
    what this process shares with the one that started it."""
    points = [_beside(run, profile, count, trial) for count, trial in trials.items()]
    if not points:
        return ProcessBytes()
    heap = heap_factor(points)
    shared = max(trial.shared_bytes for trial in trials.values())
    return ProcessBytes(
        own=max(0, round(sum(held - heap * kept for kept, held in points) / len(points))),
        heap=heap,
        with_ranks=max(0, shared - shared_here),
        with_command=min(shared, shared_here),
    )


def _beside(run: Run, profile: Profile, num_pieces: int, trial: Trial) -> tuple[float, float]:
    """The bytes of activations, and what the process held of those and of nothing that is known."""
    bare = msgspec.structs.replace(
        profile, process=ProcessBytes(0, 1.0, 0, 0), evaluation=EvaluationMemory()
    )
    (known,) = memory_of_ranks(bare, trial_plan(run, num_pieces), _ANYWHERE)
    return known.activations, trial.own_bytes - (known.peak - known.activations)


def heap_factor(points: Sequence[tuple[float, float]]) -> float:
    """Bytes of the process for each byte of activations: the line that is nearest to the points;
    the default by one, or if they are too near."""
    kept, held = zip(*points, strict=True)
    if max(kept) - min(kept) < LEAST_CHANGE:
        return ProcessBytes().heap
    return min(MOST_HEAP, max(1.0, linear_regression(kept, held).slope))
