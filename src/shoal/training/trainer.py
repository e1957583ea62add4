"""The loop: one step after another, each committed once, on every rank alike.

A `Trainer` is an iterator of `StepInfo`, so a recipe can be trained to the end or driven by a
loop of one's own. What differs between plans is in the strategy; what differs between places is
in the seat; what can break is caught in one place, `regroup`. Everything a step needs is a pure
function of its number (samples, random state, learning rate), so a step that failed is simply
done again.

Read next: `step_attempt.py` for what a step is made of, `sync/allreduce.py` for how ranks agree,
`sync_state.py` for how a newcomer catches up.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

from torch import Tensor

from shoal.checkpoint.export import canonical_tensors, gather_model
from shoal.comm.clocks import clock_offset
from shoal.comm.mesh import Axes, Check, Mesh, Seat, accept
from shoal.errors import GroupLost, UsageError
from shoal.events.step import Hook, StepInfo
from shoal.events.tracing import TRACER
from shoal.faults import faultpoint
from shoal.numerics import schedules
from shoal.numerics.offload import offload_state
from shoal.numerics.precision import LossScale
from shoal.parallel.apply import ParallelModel
from shoal.plans.plan import Plan
from shoal.sync.choose import attach, make_strategy, recovers, served_tables, settled
from shoal.sync.consistency import Consistency
from shoal.system.memory import give_back_freed_memory
from shoal.training.balancing import make_balancer, rebalance
from shoal.training.build import BuiltModel, build_model
from shoal.training.callbacks import CallbackRunner, plain_hooks
from shoal.training.checkpointing import Checkpointer, NoCheckpoints
from shoal.training.compute import PieceRunner
from shoal.training.controls import TrainerControl
from shoal.training.diagnostics import check_last_weights
from shoal.training.evaluate import measure, swapped_weights
from shoal.training.loop_state import LoopState
from shoal.training.measured_plan import settle_plan
from shoal.training.own_loop import CustomLoop, LoopAction
from shoal.training.progress import RankProgress
from shoal.training.rank_check import facts_of, refuse_unlike
from shoal.training.resizing import meet, plan_in
from shoal.training.run import Run, call_model, make_batches, next_due
from shoal.training.step_attempt import Phases, StepAttempt, begin_traced_step
from shoal.training.sync_state import sync_state


class Trainer:
    """Trains a run under a resolved plan. `step` counts the committed steps."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        seat: Seat,
        *,
        built: BuiltModel | None = None,
        hooks: Sequence[Hook] = (),
        checkpointer: Checkpointer | NoCheckpoints | None = None,
        loop: CustomLoop | None = None,
        num_steps: int | None = None,
    ):
        """`loop` is for a script's own, which acts between steps, or that of callbacks. `num_steps`
        is the run's by default; with 0 there is a group that holds the state, to evaluate it, and
        no step."""
        self.run, self.plan, self.seat = run, plan, seat
        self.checkpointer = checkpointer or NoCheckpoints()
        self.hooks = [*plain_hooks(run), *hooks]
        self.built = build_model(run, plan) if built is None else built
        self.model = self.built.model
        self.num_steps = run.num_steps() if num_steps is None else num_steps
        self.schedule = run.make_schedule()
        self.callbacks = CallbackRunner(run, TrainerControl(self))
        self.loop = loop or (CustomLoop(recovers=False) if self.callbacks else None)
        self.state = LoopState.of(self.callbacks)  # that the loop keeps
        self.loss_scale, self.progress = LossScale(plan.precision), RankProgress()
        scale = self.loss_scale
        apart = run.writes_weights or ("a loop of a script's own may write to them" if loop else "")
        self.strategy = make_strategy(
            plan, run.num_steps(), run.meets_after, lambda: scale.value, apart
        )
        self.consistency = Consistency(run.check_every, seat.emit)
        self._num_heard = 0  # answers that this rank's caller has
        self._unseen: StepInfo | None = None  # committed, and the caller does not know yet
        self._is_over = False  # all have ended
        self.end_hooks: list[Callable[[], None]] = []
        self.save_hooks: list[Hook] = []

    @property
    def step(self) -> int:
        """The last committed step."""
        return self.progress.step

    @property
    def last_info(self) -> StepInfo | None:
        return self.progress.last_info

    @property
    def stopped(self) -> bool:
        """Whether the loop ends before its last step because it was asked to."""
        return self.progress.stopped

    @property
    def writes_record(self) -> bool:
        """Whether this rank writes the run's record; one of all does."""
        return self.progress.writes_record

    @property
    def can_save(self) -> bool:
        """Whether all made the last step in this group, and so know whether it was saved."""
        return self._is_fresh

    def __enter__(self) -> Self:
        try:
            self._enter()
        except BaseException:
            self.seat.close()
            raise
        return self

    def _enter(self) -> None:
        if self.plan.saves_memory:
            give_back_freed_memory()
        self.mesh = self.seat.form(Axes.of(self.plan), self._check())
        self._follow_size(self.mesh)
        self.model.to(self.mesh.device)
        self.batches = make_batches(self.run, self.plan.num_pieces, self.mesh.device, ahead=True)
        self.optimizer = self.run.make_optimizer(self.model)
        schedules.remember_rates(self.optimizer)
        self.phases = Phases(self.optimizer)
        if self.plan.offload == "optimizer":
            offload_state(self.optimizer, self.mesh.device)
        self.spread = ParallelModel(
            self.model, self.optimizer, self.plan, self.mesh.own, self.built.survey, call_model
        )
        seeds = self.built.seeds
        seeds.use(self.mesh.device)
        self.runner = PieceRunner(self.run, self.plan, self.spread, seeds, self.loss_scale)
        self.runner.train_apart(self.phases.parameters)
        self.model.train()
        if self.loop is not None:
            self.loop.watch(self.model)
        try:
            self._settle(self.mesh)
        except GroupLost as lost:  # a newcomer's group may break before it has the state
            self.regroup(lost)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *where: object
    ) -> None:
        leaves = kind is None or (isinstance(error, SystemExit) and not error.code)
        try:
            if leaves and self.loop is not None and not self._is_over:
                self._leave()
        finally:
            self.strategy.detach()
            if kind is None:
                self.spread.close()
            self.built.seeds.close()
            self.batches.close()
            self.seat.close()

    def __iter__(self) -> Iterator[StepInfo]:
        while True:
            try:
                if self.loop is not None:
                    self.loop.begin(self)
                if self._unseen is not None:
                    yield self._tell(self._unseen)
                elif self._goes_on():
                    self._try_step()
                elif self.progress.pauses and not self.stopped and self.step < self.num_steps:
                    meet(self)
                    self.progress.pauses = self.seat.saves = False
                elif self._finish():
                    return
            except GroupLost as lost:
                self.regroup(lost)

    def add_hooks(
        self,
        hooks: Sequence[Hook],
        at_end: Sequence[Callable[[], None]] = (),
        before_save: Sequence[Hook] = (),
    ) -> None:
        """Call these too, with each committed step, after those there are; some when all have
        ended, while ranks can still talk; and some before a step's checkpoint is begun, which may
        be again, and before or after the others."""
        self.hooks += hooks
        self.end_hooks += at_end
        self.save_hooks += before_save

    def stop(self) -> None:
        """End the loop of all ranks after the step that they are at; any rank may call it."""
        if self.loop is None:
            raise UsageError("stop() is for the loop of a script, which shoal.trainer(...) gives.")
        self.loop.wants_stop = True

    def evaluate(
        self, source: Any, weights: Mapping[str, Tensor] | None = None
    ) -> dict[str, float]:
        """Mean loss and metrics over a source, each sample once; with other `weights`, if they are
        given, for as long as it takes. Every rank must call it."""
        found = self.progress
        while self._num_heard == len(found.evaluations):
            try:
                if self.loop is not None:
                    self.loop.joins_in(self, LoopAction.EVALUATE, len(source))
                self.runner.follow(self.step)
                with TRACER.span("evaluate"), swapped_weights(self.model, weights or {}):
                    answer = measure(self.run, self.runner, source, self.mesh)
                found.evaluations.append(answer)
                found.past_evaluations = self.step, found.evaluations
            except GroupLost as lost:
                self.regroup(lost)
                found = self.progress
        self._num_heard += 1
        return found.evaluations[self._num_heard - 1]

    def whole_model(self) -> dict[str, Tensor]:
        """The model's state by name, on rank 0. Every rank must call it."""
        if self.mesh.is_cut or self.plan.zero == 3 or self.plan.num_servers:
            if self.loop is not None:
                self.loop.joins_in(self, LoopAction.GATHER)
            held = self.spread.held() | served_tables(self.strategy)
            return gather_model(self.mesh.world, self.model, held)
        return canonical_tensors(self.model) if self.mesh.rank == 0 else {}

    def regroup(self, lost: GroupLost) -> None:
        """Form the group again without leaving the process; raises if no other group comes."""
        self.consistency.leave(self.step)
        while True:
            self.checkpointer.give_up()
            self.strategy.detach()
            mesh, self.progress.pauses = self.seat.reform(lost), False
            try:
                self._settle(mesh)
                return
            except GroupLost as again:
                lost = again

    def restart_at(self, step: int) -> None:
        """Go on from a step that was loaded."""
        self.progress.step = step

    def end_by_script(self) -> None:
        """The script ends its loop: whatever else asked for a stop does not count."""
        self.progress.stopped = False

    def _follow_size(self, mesh: Mesh) -> None:
        """Follow the plan as it is in this mesh, since a run may change its size."""
        self.plan = plan_in(self.plan, mesh)
        self.checkpointer.follow(self.plan)

    def take_place(self, mesh: Mesh) -> None:
        """Work in this mesh from now on."""
        self.mesh = mesh
        with nullcontext() if self.loop is None else self.loop.as_at_first():
            where = self.model, self.optimizer, mesh, self.spread.holding
            self.strategy = attach(self.strategy, self.plan, *where)
        self.runner.settle(mesh, self.strategy)
        self.consistency.watch(self.strategy, mesh)

    def _settle(self, mesh: Mesh) -> None:
        """Take the place in a new mesh and agree on the state."""
        self._follow_size(mesh)
        if self.runner.plan.is_open:  # as it was when this rank began
            self.plan, self.strategy = settle_plan(self, mesh)
            self.checkpointer.follow(self.plan)
        self.balancing = make_balancer(self.plan, mesh)
        self._is_fresh = False  # whether the last step is one that all commit in this group
        self.take_place(mesh)
        if self.run.step is not None:
            self.phases.settle(mesh)
        if TRACER.steps:
            TRACER.offset_s = clock_offset(mesh.world)
        self.progress, took_over = sync_state(self)
        if took_over:
            self._unseen, self._num_heard = self.last_info, 0
            self._is_fresh = not self.strategy.in_lockstep and self.progress.served < self.step
        self.checkpointer.restore(self)
        settled(self.strategy)
        if self.loop is not None:
            self.loop.settled(self.optimizer)
        self.seat.formed(self.step, recovers(self.strategy, self.plan))

    def _check(self) -> Check:
        """What to do in a new group before all else. Ranks that a script makes may be unlike."""
        if self.loop is None or not self.loop.is_script or self.plan.num_ranks == 1:
            return accept
        facts = facts_of(self.run, self.plan, self.model)
        return lambda group: refuse_unlike(group, facts, self.step)

    def _goes_on(self) -> bool:
        """Whether another step is to be made."""
        at = self.progress
        if self.step == self.num_steps or at.stopped or at.pauses or at.ended:
            return False
        at.ended = self.loop is not None and not self.loop.goes_on(self)
        return not at.ended

    def _try_step(self) -> None:
        """Make the next step, or find that it must be tried again."""
        faultpoint("step.begin", self.step)
        begin_traced_step(self)
        with TRACER.span(f"step {self.step + 1}", "step"):
            made = StepAttempt(self).make()
        if made is None:
            return
        at = self.progress  # not before: another, if the group was lost in the update
        step = at.step + 1
        at.step, at.phases = step, []  # committed
        at.evaluations, self._num_heard = [], 0
        self._is_fresh = at.served < step
        if self.loop is not None:
            self.loop.keep(self)
        self.consistency.end(step, self.run.meets_after(step))
        faultpoint("step.committed", step)
        at.stopped = made.asked.stop
        at.pauses = made.asked.meet and self.mesh is made.asked_in
        self._unseen = at.last_info = made.info
        if made.busy_s and self.mesh.data.num_ranks > 1:
            rebalance(self, made.busy_s)

    def _leave(self) -> None:
        """The caller has left its loop before the end, as all must."""
        while True:
            try:
                self._finish(leaves=True)
                return
            except GroupLost as lost:
                self.regroup(lost)

    def _finish(self, leaves: bool = False) -> bool:
        """Save the end and wait for the others; raises GroupLost if one of them was lost."""
        faultpoint("run.ending", self.step)
        if self.loop is not None:
            self.loop.ends(self, leaves)
            self.progress.ended = self.step < self.num_steps and not self.stopped
        self.checkpointer.at_end(self)
        if self.checkpointer.saved_step == self.step:
            self.callbacks.saved()
        self.callbacks.end()
        for hook in self.end_hooks:
            hook()
        if not self.seat.finish():
            raise GroupLost("another rank was lost after the last step")
        self._is_over = True
        return True

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is made after the last step: it is time to, or was asked for."""
        every = self.run.saves_every
        is_due = every is not None and next_due(step - 1, every) == step
        return is_due or bool(self.callbacks.control.tags)

    def save_if_due(self) -> bool:
        """After a step that all made in this group; whether it saved. Every rank must call it."""
        if not self._is_fresh or self.last_info is None:
            return False
        if self.last_info.step == self.num_steps:
            self.consistency.check(self.num_steps)
        for hook in self.save_hooks if self.saves_after(self.last_info.step) else ():
            hook(self.last_info)
        return self.checkpointer.after_step(self, self.last_info)

    def _tell(self, info: StepInfo) -> StepInfo:
        """Let hooks and the supervisor know of a committed step."""
        if info.step == self.num_steps:
            world = self.mesh.world if self._is_fresh and self.strategy.in_lockstep else None
            check_last_weights(self.batches, self.step - 1, self.model, world)
        if self.run.evaluates_after(info.step) and not self._num_heard:
            told = info._replace(evaluation=self.evaluate(self.run.evaluate))
            info = self._unseen = self.progress.last_info = told
        if self.loop is None:  # or else when the body of the loop has run
            with TRACER.span("save", "save"):
                self.save_if_due()
        elif self.callbacks:
            info = self.progress.last_info = self.callbacks.after_step(info)
        self._unseen = None
        self.consistency.release()
        with TRACER.span("hooks"):
            for hook in (*self.hooks, self.seat.stepped):
                hook(info)
        for spans in TRACER.take(self.mesh.rank) if TRACER.steps else ():
            self.seat.emit(spans)
        return info
