"""How a run continues with another number of ranks or servers, between two steps.

All ranks agree on a step after which they wait; under local steps, on the last one of a window. A
group that breaks before that forgets it, and the next one is asked again. Then the supervisor
assigns seats: a rank that keeps one continues in a group of another size, a newcomer takes a peer's
state as after a death (`sync_state.py`), and a rank without a seat leaves. Pieces stay what they
were, so nothing that is trained depends on it, but for local steps. On the servers' side:
`sync/server/migration.py`.
"""

from typing import TYPE_CHECKING, NoReturn

from shoal.comm.mesh import Mesh
from shoal.errors import GroupLeft, PlanError, StopNow
from shoal.faults import faultpoint
from shoal.plans.plan import Plan
from shoal.plans.resize import size_of, with_size

if TYPE_CHECKING:
    from shoal.training.trainer import Trainer


def plan_in(plan: Plan, mesh: Mesh) -> Plan:
    """The plan as it is in this mesh, whose run may have changed its size."""
    if mesh.sizes and (len(mesh.sizes) > 1 or mesh.sizes[-1] != size_of(plan)):
        faultpoint("size.taken")
        return with_size(plan, mesh.sizes[-1])
    if mesh.num_ranks != plan.num_ranks:
        raise PlanError(
            f"plan {str(plan) or 'data=1'!r} needs {plan.num_ranks} ranks; "
            f"the launcher started {mesh.num_ranks}. Start as many, or change the plan."
        )
    return plan


def meet(trainer: "Trainer") -> None:
    """After a step that all have agreed on: save it, if that is what one of them was asked for;
    else wait for another group, in which this rank may have no seat (StopNow). Who was asked for
    both meets the others again. Every rank must call it."""
    if not any(asked for (asked,) in trainer.mesh.world.all_gather_numbers([trainer.seat.saves])):
        _wait_for_group(trainer)
    trainer.checkpointer.save_now(trainer)


def _wait_for_group(trainer: "Trainer") -> NoReturn:
    trainer.checkpointer.finish(trainer)  # a save needs all who began it
    if trainer.seat.finish(meets=True):
        raise StopNow("the run goes on without this rank")
    raise GroupLeft("all left it, for a group of another size")
