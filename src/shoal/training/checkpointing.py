"""When a run saves, and what it resumes from.

A `Checkpointer` belongs to one rank's trainer. It saves every `save_every` steps beside training,
and once more when the run ends or is asked to stop; then it waits until the checkpoint is there. A
run whose ranks are all new resumes from the newest checkpoint that every one of them could read.

A save needs all ranks in one group. One that a loss interrupts is not made up for: the next is
due soon enough, and ranks that disagree on whether it was made would wait for each other.
"""

import math
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import dropwhile
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from shoal import __version__
from shoal.checkpoint.dtypes import first_unsupported
from shoal.checkpoint.find import checkpoint_name, checkpoint_step, list_steps
from shoal.checkpoint.load import CheckpointReader
from shoal.checkpoint.manifest import Origin, Progress
from shoal.checkpoint.retention import CheckpointSummary, RetentionPolicy, find_expired
from shoal.checkpoint.save import Saver, SaveResult
from shoal.checkpoint.verify import inspect_checkpoints
from shoal.comm.collectives import Group
from shoal.errors import (
    BadCheckpoint,
    FailedElsewhere,
    RecipeError,
    ShoalError,
    UnusableCheckpoint,
    UsageError,
)
from shoal.events.events import (
    CheckpointRefusedEvent,
    Event,
    ModelNotSavableEvent,
    NothingToResumeEvent,
    RescuedEvent,
    ResumedEvent,
    SavedEvent,
    SaveFailedEvent,
    SaveSkippedEvent,
)
from shoal.events.step import StepInfo
from shoal.logs import warn_on_screen, warn_once
from shoal.numerics.precision import ScaleState
from shoal.plans.plan import Plan
from shoal.storage.object_client import StoreError
from shoal.storage.store import Store
from shoal.sync.choose import state_types, wait_for_parameters
from shoal.sync.replicas import shared_name
from shoal.sync.state import MemorySource, ShardedState, broadcast_bytes, first_problem
from shoal.training.pretrained import InitialWeights, WeightsOverlay
from shoal.training.rescue import rescue
from shoal.training.run import Run
from shoal.training.stream_state import take_stream_position, with_stream_position

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer

BATCH_LOSS = "batch_loss"  # of a step, where `loss` is that of an evaluation


class NotSaved(ShoalError):
    """The end of a run, which nothing else keeps, could not be saved."""


class CheckpointSettings(NamedTuple):
    """How a run keeps its state, decided before its ranks start."""

    store: Store
    origin: Origin
    keep: RetentionPolicy = RetentionPolicy()
    beginning: InitialWeights | None = None
    others_may_write: bool = False  # a caller's loop has its hands on the model between two steps
    is_asked: bool = True  # or only done because it can be
    resumes: bool = False  # to go on was asked for: it says so if there is nothing to
    needs_one: bool = False  # began with weights that are not at hand, so not without a checkpoint


class _Problem(NamedTuple):
    """Why a checkpoint is passed over, `minor` if it is damaged, so that nothing is lost by that;
    or why one was not made, `minor` if only because another rank could not."""

    why: str = ""
    minor: bool = False


class Checkpointer:
    """`emit` gets events of saves and refused checkpoints, in the trainer's thread."""

    saves = True

    def __init__(self, keeping: CheckpointSettings, emit: Callable[[Event], None]):
        self.store, self.origin = keeping.store, keeping.origin
        self._keep, self._beginning, self._emit = keeping.keep, keeping.beginning, emit
        self._others_may_write, self._is_asked = keeping.others_may_write, keeping.is_asked
        self._resumes, self._needs_one = keeping.resumes, keeping.needs_one
        self.saved_step: int | None = None  # the newest that this rank knows to be there
        self._bad: set[str] = set()  # checkpoints that were refused
        self._known: dict[str, CheckpointSummary] = {}  # looked at, in the saver's thread
        self._holds_nothing = False  # since no checkpoint can hold this state
        self._has_looked = False  # at the state after a step of this group
        self._resumed: Origin | None = None  # of the checkpoint that it went on from
        self._failure = _Problem()  # of the last save, as far as this rank knows
        self._ended: deque[SaveResult] = deque()  # filled by the saver's thread
        self._saver = Saver(self.store, self._has_ended)

    def restore(self, trainer: "Trainer") -> None:
        """If no rank has made a step, resume from the newest good checkpoint, if there is one.

        If all are damaged the run starts again at step 0, which costs what they held; one that may
        be good, and cannot be resumed from, is refused. Every rank must call it. Cost while there
        are any: a copy of the first weights.
        """
        world = trainer.mesh.world
        self._look_at(trainer)
        self._has_looked = False
        if any(any(row) for row in world.all_gather_numbers(trainer.progress.place)):
            return  # also if it is only the first phase of the first step
        names = list_steps(self.store) if world.rank == 0 else []
        shared = broadcast_bytes(world, 0, msgspec.msgpack.encode(names))
        found = msgspec.msgpack.decode(shared, type=list[str])
        first = _copy_of(trainer.strategy.state_dict()) if found else None
        problems, damaged = [], not self._needs_one
        scale, origin = trainer.loss_scale.state, self.origin
        for name in found:
            problem = _worst_problem(world, self._load(trainer, name))
            if not problem.why:
                if world.rank == 0:
                    self._tell_of_resuming(trainer, name)
                return
            self._let_go(trainer, scale, origin)
            problems.append(f"{name}: {problem.why}")
            damaged &= problem.minor
            self._bad.add(name)
            if world.rank == 0:
                self._emit(CheckpointRefusedEvent(name=name, why=problem.why))
        if not damaged and (problems or self._needs_one):
            told = " ".join(problems) or "There is none any more."
            raise BadCheckpoint(
                f"No checkpoint in {self.store} can be resumed from. {told} Remove them to begin "
                "again at step 0."
            )
        self._begin(trainer, first)

    def kept_plan(self, world: Group) -> Plan | None:
        """That of the newest checkpoint which can be opened. Every rank must call it."""
        text = ""
        for name in list_steps(self.store) if world.rank == 0 else ():
            with suppress(BadCheckpoint, OSError):
                text = CheckpointReader(self.store, name).manifest.origin.plan
                break
        shared = broadcast_bytes(world, 0, msgspec.json.encode(text))
        return Plan.parse(found) if (found := msgspec.json.decode(shared, type=str)) else None

    def _let_go(self, trainer: "Trainer", scale: ScaleState, origin: Origin) -> None:
        """Of a checkpoint that another rank could not read, though this one could: all but the
        tensors, which the next one brings."""
        trainer.restart_at(0)
        self.saved_step, self._resumed, self.origin = None, None, origin
        trainer.loss_scale.load(scale)
        if trainer.loop is not None:
            trainer.loop.let_go(trainer)

    def _begin(self, trainer: "Trainer", first: ShardedState | None) -> None:
        """At step 0; `first` is the state as the seed made it, if it has changed since."""
        world = trainer.mesh.world
        if first is not None or self._beginning is not None:
            own = MemorySource(trainer.strategy.state_dict() if first is None else first)
            source = own if self._beginning is None else self._beginning.source(own)
            problem = _worst_problem(world, self._take_over(trainer, source))
            if problem.why:
                place = self.store if self._beginning is None else self._beginning.place
                raise BadCheckpoint(f"{place}: {problem.why}")
        if self._resumes and world.rank == 0:
            self._emit(
                NothingToResumeEvent(
                    step=trainer.step, store=str(self.store), num_bad=len(self._bad)
                )
            )
            warn_once(f"Nothing to go on from in {self.store}: begins at step {trainer.step}.")

    def after_step(self, trainer: "Trainer", info: StepInfo) -> bool:
        """Save, if it is time to or was asked for; whether it did. Every rank must call it, in the
        group that made the step."""
        self.report()
        # An optimizer makes its state in its first step; out of lockstep all meet somewhat later.
        if trainer.strategy.in_lockstep or trainer.run.meets_after(info.step):
            self._look_once(trainer)
        is_last = info.step == trainer.num_steps  # which the end saves
        if is_last or self._holds_nothing or not trainer.saves_after(info.step):
            return False
        if trainer.callbacks.control.tags:
            # For the sake of this step: one under way must not keep it from being saved.
            self.finish(trainer)
        problem = self.save(trainer)
        if problem:
            self._emit(SaveSkippedEvent(step=info.step, why=problem))
            warn_once(f"The checkpoint of step {info.step} was not made: {problem}.")
        return not problem

    def await_copy(self) -> None:
        """Until the state may change."""
        self._saver.await_copy()

    def save_now(self, trainer: "Trainer") -> None:
        """Save the last step, since somebody asked for it. Every rank must call it."""
        self.finish(trainer)
        problem = "its model cannot be held in a checkpoint"
        if not self._holds_nothing:
            if self.saved_step_of(trainer.mesh.world) == trainer.step:
                return
            self._look_once(trainer)
            problem = problem if self._holds_nothing else self.save(trainer)
        if problem:
            self._emit(SaveSkippedEvent(step=trainer.step, why=problem))

    def at_end(self, trainer: "Trainer") -> None:
        """See to it that the state as it is now is saved. Every rank must call it."""
        world, step = trainer.mesh.world, trainer.step
        if self._holds_nothing:
            return
        self.finish(trainer)
        if not step or self.saved_step_of(world) == step:
            return
        self._look_once(trainer)
        if self._holds_nothing:
            return
        problem = self.save(trainer)
        self.finish(trainer)
        if problem:
            self._failure = _Problem(problem)
            self._emit(SaveSkippedEvent(step=step, why=problem))
        if self.saved_step_of(world) == step:
            return
        why = _worst_problem(world, self._failure).why
        place = rescue(trainer, self.save)
        if place and world.rank == 0:
            self._emit(RescuedEvent(step=step, place=place))
        # A command looks at what was saved when it is over; a script would end as if all were well.
        if self._others_may_write:
            kept = f" It is in {place} instead: give that as checkpoints." if place else ""
            raise NotSaved(f"Step {step}, the last, could not be saved: {why.rstrip('.')}.{kept}")

    def finish(self, trainer: "Trainer") -> None:
        """Until the save under way has ended. Every rank must call it."""
        self._saver.finish(trainer.mesh.world)
        self.report()

    def follow(self, plan: Plan) -> None:
        """Checkpoints tell of this plan from now on."""
        self.origin = msgspec.structs.replace(self.origin, plan=str(plan))

    def give_up(self) -> None:
        """The group broke: a save that waits for a lost rank will not be."""
        self._saver.give_up()

    def report(self) -> None:
        """Say what became of saves that have ended."""
        while self._ended:
            saved = self._ended.popleft()
            step = checkpoint_step(saved.name)
            assert step is not None
            if saved.problem:
                self._failure = _Problem(saved.problem, saved.is_echo)
                self._emit(SaveFailedEvent(step=step, why=saved.problem, echo=saved.is_echo))
                warn_once(f"The checkpoint of step {step} could not be written: {saved.problem}.")
            elif saved.is_committed:
                self.saved_step = step
                self._emit(
                    SavedEvent(
                        step=step,
                        name=saved.name,
                        bytes=saved.num_bytes,
                        ms=round(1000 * saved.seconds, 1),
                    )
                )

    def saved_step_of(self, world: Group) -> int | None:
        """The newest step that is saved, as rank 0 knows it. Every rank must call it."""
        known = world.all_gather_numbers([-1 if self.saved_step is None else self.saved_step])[0][0]
        self.saved_step = int(known) if known >= 0 else None
        return self.saved_step

    def save(self, trainer: "Trainer", saver: Saver | None = None) -> str:
        """Begin a save, by default where this run keeps its own; returns why not, if it did not.
        Every rank must call it."""
        wait_for_parameters(trainer.strategy)
        trainer.consistency.check(trainer.step)
        try:
            state = trainer.strategy.state_dict()
        except OSError as error:  # there is no room for what servers hold
            return error.strerror or str(error)
        except FailedElsewhere as error:
            return str(error).rstrip(".")
        if trainer.loop is not None:
            state = trainer.loop.to_save(trainer, state)
        state = with_stream_position(trainer, state)
        # A forward may change buffers, and weights that no update does (a teacher's, say).
        frozen = (name for name, p in trainer.model.named_parameters() if not p.requires_grad)
        changing = {f"model.{n}" for n in (*frozen, *(n for n, _ in trainer.model.named_buffers()))}
        problem = (saver or self._saver).save(
            trainer.mesh.world,
            checkpoint_name(trainer.step),
            state.tensors,
            state.plain,
            (self._progress(trainer), self.origin),
            at_once={name for name in state.tensors if shared_name(name) in changing},
            copied=state.copied,
        )
        if self._others_may_write:
            self.await_copy()
        return problem

    def _look_at(self, trainer: "Trainer") -> None:
        """Find what no checkpoint can hold. Every rank must call it."""
        try:
            held = state_types(trainer.strategy).tensors
            own = first_unsupported(
                (name, part.tensor) for name, parts in held.items() for part in parts
            )
        except RecipeError as error:  # of one rank perhaps, while the others wait
            own = str(error).partition(". ")[0]
        world = trainer.mesh.world
        why = first_problem(world, own)
        if why and self._is_asked:
            raise cannot_hold(why, f"and checkpoints are to be kept in {self.store}")
        if why and not self._holds_nothing and world.rank == 0:
            self._emit(ModelNotSavableEvent(why=why))
        self._holds_nothing = bool(why)

    def _look_once(self, trainer: "Trainer") -> None:
        """At a state after a step of this group. Every rank must call it."""
        if not self._has_looked:
            self._look_at(trainer)
            self._has_looked = True

    def _tell_of_resuming(self, trainer: "Trainer", name: str) -> None:
        """Only once every rank has verified and taken what it needs."""
        before = self._resumed
        assert before is not None
        self._emit(
            ResumedEvent(
                step=trainer.step,
                name=name,
                plan=before.plan,
                pieces=before.num_pieces,
                pieces_now=trainer.plan.num_pieces,
            )
        )
        if jump := _jump_of_rate(trainer):
            had = [n for n in ("steps", "epochs") if before.run.get(n)]
            began = " and ".join(f"{name}={before.run[name]}" for name in had) or "others"
            warn_on_screen(f"{jump}; when the checkpoint was made, the run had {began}.")

    def _progress(self, trainer: "Trainer") -> Progress:
        run, info, step = trainer.run, trainer.last_info, trainer.step
        told = {} if info is None else _measured(run, info)
        metrics = {name: value for name, value in told.items() if math.isfinite(value)}
        return Progress(
            step=step,
            **run.place_after(step)._asdict(),
            metrics=metrics,
            loss_scale=trainer.loss_scale.state._asdict() if trainer.loss_scale.dynamic else {},
            tags=[tag for tag in trainer.callbacks.control.tags if tag],
        )

    def _has_ended(self, saved: SaveResult) -> None:
        """In the saver's thread: a new checkpoint may make older ones superfluous."""
        if saved.is_committed:
            try:
                self._prune(saved.name)
            except OSError as error:
                warn_once(f"Old checkpoints could not be removed: {error.strerror}.")
        self._ended.append(saved)

    def _prune(self, newest: str) -> None:
        """Remove what no rule keeps, after `newest` was made.

        What was refused, what is not sound, what is of a later step (of an earlier life of the run)
        and what has another name is neither counted nor removed.
        """
        self._bad.discard(newest)  # if it was in this place
        older = dropwhile(lambda name: name != newest, list_steps(self.store))
        names = [name for name in older if name not in self._bad]
        known = {name: self._known[name] for name in names[1:] if name in self._known}
        found = inspect_checkpoints(self.store, [name for name in names if name not in known]).known
        self._known = known | {one.name: one for one in found}
        for one in find_expired(self._known.values(), self._keep):
            self.store.remove(one.name)

    def _load(self, trainer: "Trainer", name: str) -> _Problem:
        """Take the state over; returns why that cannot be."""
        try:
            opened = CheckpointReader(self.store, name)
        except BadCheckpoint as bad:
            return _Problem(str(bad), minor=not isinstance(bad, UnusableCheckpoint))
        problem = self._take_over(trainer, opened)
        if not problem.why:
            self.saved_step = trainer.step
        return problem

    def _take_over(
        self, trainer: "Trainer", source: CheckpointReader | WeightsOverlay | MemorySource
    ) -> _Problem:
        progress = (
            source.manifest.progress
            if isinstance(source, CheckpointReader)
            else Progress(0, 0, 0, 0)
        )
        try:
            if isinstance(source, CheckpointReader):
                _refuse_strange(source, trainer.spread.holding.shapes)
            trainer.strategy.load_state_dict(source, progress.step)
            if trainer.loop is not None and isinstance(source, CheckpointReader):
                trainer.loop.restored(trainer, source)
            take_stream_position(trainer, source)
            if progress.loss_scale and trainer.loss_scale.dynamic:
                trainer.loss_scale.load(ScaleState(**progress.loss_scale))
        except FailedElsewhere:
            return _Problem()  # that rank says why
        except StoreError:
            raise  # a store that cannot be reached may hold a good one
        except UsageError as wrong:
            damaged = isinstance(wrong, BadCheckpoint) and not isinstance(wrong, UnusableCheckpoint)
            return _Problem(str(wrong), minor=damaged)
        except OSError as error:
            return _Problem(f"{error.strerror}.")
        except (KeyError, TypeError, ValueError) as error:
            what = f"{type(error).__name__}: {error}"
            return _Problem(f"What it says of the optimizer makes no sense ({what}).")
        trainer.restart_at(progress.step)
        if isinstance(source, CheckpointReader):
            self._resumed = source.manifest.origin
            self.origin = msgspec.structs.replace(self.origin, parent=source.seal)
        return _Problem()


class NoCheckpoints:
    """A checkpointer for a run without checkpoints."""

    saved_step, saves = None, False

    def restore(self, trainer: "Trainer") -> None:
        """There is nothing to go on from."""

    def kept_plan(self, world: Group) -> None:
        """There is none."""

    def after_step(self, trainer: "Trainer", info: StepInfo) -> bool:
        """Nothing is due."""
        return False

    def save_now(self, trainer: "Trainer") -> None:
        """Nothing is kept."""

    def await_copy(self) -> None:
        """Nothing is being copied."""

    def at_end(self, trainer: "Trainer") -> None:
        """The end is not saved."""

    def finish(self, trainer: "Trainer") -> None:
        """Nothing is under way."""

    def give_up(self) -> None:
        """Nothing is under way."""

    def follow(self, plan: Plan) -> None:
        """Nothing is saved that would tell of it."""


def origin_of(recipe: str, fields: dict[str, Any], plan: Plan, run: Run) -> Origin:
    """What a checkpoint says of where it comes from."""
    versions = {"shoal": __version__, "torch": str(torch.__version__)}
    return Origin(recipe, fields, str(plan), plan.num_pieces, len(run.data), versions)


def _measured(run: Run, info: StepInfo) -> dict[str, float]:
    """What a checkpoint is compared by: the loss of a batch and one of an evaluation, which say
    unlike things, never have the same name in a run."""
    if run.evaluate is None:
        return {"loss": info.loss}
    return {BATCH_LOSS: info.loss, **(info.evaluation or {})}


def refuse_unmeasured(keep: RetentionPolicy, run: Run) -> None:
    """Refuse to keep the best by a number that no checkpoint will have.

    Of a run that evaluates, only what is saved after an evaluation can be the best.
    """
    keep.refuse_unknown(run.measures(), "this run measures no such number")
    every = run.saves_every
    if keep.best is None or run.evaluate is None or every is None:
        return
    saves = range(every, run.num_steps(), every)
    if saves and not any(map(run.evaluates_after, saves)):
        often = "only at the end" if run.evaluate_every is None else f"every {run.evaluate_every}"
        raise UsageError(
            f"best={keep.best} goes by evaluations, and after none of the steps that are saved "
            f"(save_every={run.save_every}) the run evaluates ({often}). Let evaluate_every divide "
            f"save_every, as with --set evaluate_every={run.save_every}, or leave best out."
        )


def cannot_hold(why: str, asked: str) -> UsageError:
    """What is said to a model, or an optimizer, with a tensor that no checkpoint can hold."""
    return UsageError(
        f"This run cannot be saved: {why}, {asked}. A checkpoint holds dense tensors of bool, "
        "whole numbers, floats of 8 to 64 bits and complex64. Keep this one in such a form (a "
        "complex128 as torch.view_as_real gives it, say), or ask for no checkpoints."
    )


def _jump_of_rate(trainer: "Trainer") -> str:
    """What to say if the schedule now is not the one that the run has followed; empty if it is."""
    step, steps = trainer.step, trainer.num_steps
    if trainer.schedule is None or not 0 < step < steps:
        return ""
    followed, coming = (trainer.schedule(at, steps) for at in (step - 1, step))
    for group in trainer.optimizer.param_groups:
        before, first = float(group["lr"]), float(group["initial_lr"])
        if not math.isclose(before, first * followed, rel_tol=1e-5, abs_tol=1e-9 * abs(first)):
            return (
                f"The learning rate was {before:.3g} at step {step} and is {first * coming:.3g} at "
                f"step {step + 1}: the schedule runs over {steps} steps now"
            )
    return ""


def _refuse_strange(source: CheckpointReader, own: Collection[str]) -> None:
    """A tensor that the model no longer has would be dropped without a word."""
    names = {n.removeprefix("model.") for n in source if n.startswith("model.")}
    for name in sorted(names - set(own)):
        raise UsageError(f"It holds model.{name}, which the model does not have.")


def _copy_of(state: ShardedState) -> ShardedState:
    """What was copied already stays where it is: a table from servers is in a file."""
    tensors = {
        name: [part._replace(tensor=part.tensor.detach().clone()) for part in parts]
        for name, parts in state.tensors.items()
        if name not in state.copied
    }
    return ShardedState(state.tensors | tensors, state.plain, state.copied)


def _worst_problem(world: Group, own: _Problem) -> _Problem:
    """The problem of the first rank whose problem is not minor, else of the first that has one."""
    rows = world.all_gather_numbers([bool(own.why), own.minor])
    found = [rank for rank, row in enumerate(rows) if row[0]]
    if not found:
        return _Problem()
    undamaged = [rank for rank in found if not rows[rank][1]]
    first = (undamaged or found)[0]
    why = broadcast_bytes(world, first, own.why.encode()).decode()
    return _Problem(why, not undamaged)
