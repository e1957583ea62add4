"""Plans with made-up seconds, for simulations without a recipe."""

from typing import Any

from shoal.cost.prediction import StageTimes, StepTimes
from shoal.cost.simulate import Conditions, HostRooms, Simulation, simulate
from shoal.cost.simulated_members import Durations
from shoal.cost.work_log import SaveTimes
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.plan import Plan

FORWARD_S, BACKWARD_S, UPDATE_S = 0.1, 0.2, 0.01
DURATIONS = Durations(save=SaveTimes(stall_s=0.2, write_s=5.0), load_s=10.0, transfer_s=1.0)


def resolved(text: str, batch_size: int = 64) -> Plan:
    return Plan.parse(text).resolve(ranks=None, cores=1 << 20, batch_size=batch_size)


def times_of(plan: Plan, exchange_s: float = 0.05, send_s: float = 0.0) -> StepTimes:
    """Equal stages, which halve their backward where the schedule splits it."""
    count = plan.pipeline * plan.num_stages
    splits = plan.schedule in ("zero-bubble", "zbv")
    # Forward and both halves of backward take the same where they are split, as formulas assume.
    back_s = BACKWARD_S / count
    return StepTimes(
        stages=tuple(
            StageTimes(
                index=index,
                rank=rank_of_stage(index, plan.pipeline, plan.schedule),
                forward_s=FORWARD_S / count,
                backward_s=back_s,
                weight_s=back_s / 2 if splits else 0.0,
                tensor_s=0.0,
                send_s=send_s,
                send_back_s=send_s,
                forward_bytes=0,
                backward_bytes=0,
                kept_bytes=0,
            )
            for index in range(count)
        ),
        num_rounds=-(-plan.num_pieces // plan.num_microbatches // plan.num_replicas),
        num_microbatches=plan.num_microbatches,
        data_s=0.0,
        exchange_s=exchange_s,
        hidden_s=0.0,
        agreement_s=0.0,
        update_s=UPDATE_S,
    )


def run(
    text: str,
    num_hosts: int = 1,
    slots: int = 64,
    durations: Durations = DURATIONS,
    batch_size: int = 64,
    shares: bool = False,
    **conditions: Any,
) -> Simulation:
    at = HostRooms(dict.fromkeys(range(num_hosts), slots), shares=shares)
    given = Conditions(**{"hours": 24.0, **conditions})
    return simulate(resolved(text, batch_size), times_of, at, given, durations)
