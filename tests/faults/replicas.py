"""Replicas that come and go between windows of local steps, played in one process.

What is trained under local steps depends on how many replicas there are, so a run that changed its
size has no run of one size to be compared with. Here each replica is the reference's, after an
agreement others join or leave, and what a newcomer knows is what was agreed on.
"""

from collections.abc import Mapping

from torch import Tensor

from shoal.data.split import share
from shoal.plans.plan import Plan
from shoal.training.run import Run, make_batches
from shoal.verify.reference import Replica
from shoal.verify.reference_codec import make_exchange
from shoal.verify.reference_outer import ReferenceOuter, average


class Team:
    def __init__(self, run: Run, plan: Plan):
        self.run, self.plan = run, plan
        self.replicas: list[Replica] = []
        self.outer: ReferenceOuter | None = None
        self.resize(plan.num_replicas)

    def resize(self, num_replicas: int) -> None:
        """Those with the highest numbers leave; newcomers have seen nothing but the agreement."""
        kept = self.replicas[:num_replicas]
        while len(kept) < num_replicas:
            newcomer = Replica(self.run, self.plan, range(0))
            if kept:
                newcomer.model.load_state_dict(kept[0].model.state_dict())
                newcomer.buffers.hold()
            kept.append(newcomer)
        for number, replica in enumerate(kept):
            replica.pieces = share(number, num_replicas, self.plan.num_pieces)
            own = replica.pieces, replica.model, replica.optimizer
            replica.exchange = make_exchange(self.run, self.plan, *own)
        self.replicas = kept
        if self.plan.has_anchor:
            self._resize_outer()

    def agree(self, step: int) -> None:
        if self.outer is not None:
            self.outer.after(step)
        if step % self.plan.local_steps == 0 or step == self.run.num_steps():
            average([r.tensors(with_weights=self.outer is None) for r in self.replicas])
            for replica in self.replicas:
                replica.buffers.hold()

    def _resize_outer(self) -> None:
        """All keep the momentum, and who stays what it had not sent. Shares of the mean are dealt
        anew, without what their owners had not sent of it."""
        before, models = self.outer, [replica.model for replica in self.replicas]
        self.outer = ReferenceOuter(models, self.plan, self.run.num_steps())
        for old, new in zip(before.fragments[0] if before else (), self.outer.fragments[0]):
            new.momentum = old.momentum
            stayed = old.residuals[: len(models)]
            new.residuals = [*stayed, *new.residuals[len(stayed) :]]


def play(run: Run, plan: Plan, sizes: Mapping[int, int]) -> dict[str, Tensor]:
    """The model at the end of a run that has so many replicas after these steps."""
    team, batches = Team(run, plan), make_batches(run, plan.num_pieces)
    for step in range(1, run.num_steps() + 1):
        batch = batches.at(step - 1)
        for replica in team.replicas:
            replica.step(batch)
        team.agree(step)
        if step in sizes:
            team.resize(sizes[step])
    return dict(team.replicas[0].model.state_dict())
