"""The callbacks of a run in the reference: the same objects, on a plain loop in one process.

What they change (rates, frozen parameters, when to stop) they change here too, by evaluations of
the replica's own model; what they log or save goes nowhere.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shoal.comm.collectives import Group
from shoal.comm.mesh import Axes, Mesh
from shoal.events.step import StepInfo, Times
from shoal.plans.plan import Plan
from shoal.sync.named_parts import add_up, means, pack_parts
from shoal.training.callbacks import CallbackRunner
from shoal.training.controls import TrainingControl
from shoal.training.evaluate import measure, swapped_weights
from shoal.training.run import Run, call_model

if TYPE_CHECKING:
    from shoal.verify.reference import Replica


class ReferenceControl(TrainingControl):
    """What callbacks act on: a replica of the reference."""

    def __init__(self, run: Run, plan: Plan, replica: "Replica"):
        super().__init__(run, run.num_steps())
        self._plan, self._replica = plan, replica
        self.num_made = 0
        self.is_stopped = False

    @property
    def step(self) -> int:
        return self.num_made

    @property
    def rank(self) -> int:
        return 0

    @property
    def model(self) -> nn.Module:
        return self._replica.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._replica.optimizer

    @property
    def plan(self) -> Plan:
        return self._plan

    def stop(self, reason: str = "") -> None:
        self.is_stopped = True

    def save(self, tag: str = "") -> None:
        """Nothing is saved."""

    def _evaluate(self, source: Any, weights: Mapping[str, Tensor]) -> dict[str, float]:
        judge = _Evaluator(self._plan, self._replica, self.num_made)
        with swapped_weights(self.model, weights):
            return measure(self.run, judge, source, Mesh.form(Group(), Axes(), "cpu"))

    def whole_model(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def held_parameters(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}


class _Evaluator:
    """What an evaluation asks of the one who runs the model."""

    def __init__(self, plan: Plan, replica: "Replica", step: int):
        self._plan, self._replica, self._step = plan, replica, step

    @property
    def plan(self) -> Plan:
        return self._plan

    @property
    def model(self) -> nn.Module:
        return self._replica.model

    def arithmetic(self) -> Any:
        return self._replica.precisions.at(self._step).autocast("cpu")

    def output(self, inputs: Any) -> Any:
        with self.arithmetic():
            return call_model(self.model, inputs)


class ReferenceLoop:
    """Calls the callbacks after each step of the reference."""

    def __init__(self, run: Run, plan: Plan, replica: "Replica"):
        self._run, self._replica = run, replica
        self._control = ReferenceControl(run, plan, replica)
        self._callbacks = CallbackRunner(run, self._control)
        self._callbacks.start(None)

    @property
    def is_stopped(self) -> bool:
        return self._control.is_stopped

    def after(self, step: int, loss: float) -> None:
        if not self._callbacks:
            return
        self._control.num_made = step
        replica = self._replica
        info = StepInfo(
            step,
            loss,
            self._run.batch_size,
            float(replica.optimizer.param_groups[0]["lr"]),
            replica.norm,
            Times(0.0, 0.0, 0.0, 0.0),
            0,
            parts={} if self._run.step else means(add_up([pack_parts(replica.parts)])),
        )
        if self._run.evaluates_after(step):
            info = info._replace(evaluation=self._control.evaluate())
        self._callbacks.after_step(info)
