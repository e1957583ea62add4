"""What a run that begins is expected to take and hold; and the refusal of what cannot fit.

A run does not wait for a profile. If its recipe was profiled before on this machine (`shoal plan`,
`shoal scale`, `--plan auto`), time and memory are predicted from that. If not, memory follows from
the model's sizes, without activations, and time from the run's own first steps once they are made
(`outcome.py`); the record says which it was. Runs over several hosts are not foreseen.

A refusal is sure: it comes from the least that a plan holds, or from a prediction less its error.
Cost: a file is read, or a model made without weights (`cost/sizes.py`).
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from shoal.cost.cluster import Cluster
from shoal.cost.planning import rank_plans
from shoal.cost.predict import BASE_BYTES, predict
from shoal.cost.prediction import Prediction
from shoal.cost.profile import Profile
from shoal.cost.profile_index import recall_profile
from shoal.cost.sizes import ModelSizes, least_host_bytes, rank_sizes, sizes_without_memory
from shoal.cost.this_machine import host_memory_bytes, kept_cluster
from shoal.errors import PlanError, UsageError
from shoal.formatting import in_units, plural
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.training.options import Recipe
from shoal.training.run import Run, resolve

LEAST_ERROR = 0.15  # that a prediction may always be off by, where it refuses
ROOM = 0.8  # of a machine's memory: a plan that needs no more at the least may fit


class Forecast(NamedTuple):
    """What is known of a run before it begins: a prediction, or the sizes of its model."""

    plan: Plan
    prediction: Prediction | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None
    sizes: ModelSizes | None = None

    def facts(self) -> dict[str, Any]:
        """For the record: seconds of a step and bytes of a rank, and where they come from."""
        if self.prediction is not None:
            return {
                "from": "profile",
                "step_s": self.prediction.step_s,
                "memory_bytes": self.prediction.memory.peak,
                "error_share": self.prediction.error_share,
            }
        memory_bytes = None
        if self.sizes is not None:
            own = rank_sizes(self.sizes, self.plan)
            memory_bytes = BASE_BYTES + own.parameters + own.gradients + own.optimizer
        return {"from": "sizes", "step_s": None, "memory_bytes": memory_bytes}


def foresee(recipe: Recipe, run: Run, plan: Plan) -> Forecast:
    """In the process that ranks are forked from, before the model is built."""
    profile, cluster = recall_profile(recipe), kept_cluster()
    if profile is not None and cluster is not None and profile.batch_size == run.batch_size:
        try:
            return Forecast(plan, predict(profile, plan, cluster), profile, cluster)
        except PlanError:
            pass  # the model's own words come when it is built
        except Exception as error:  # noqa: BLE001 (what is only foreseen must not end a run)
            log.warning("The profile of %s foretells nothing: %r", recipe.name, error)
    return Forecast(plan, sizes=sizes_without_memory(run))


def refuse_too_large(run: Run, forecast: Forecast, limit: int | None = None) -> None:
    """Refuse a plan whose processes surely do not fit in this machine's memory."""
    limit, plan = limit or host_memory_bytes(), forecast.plan
    if forecast.prediction is not None:
        found = forecast.prediction
        error = max(LEAST_ERROR, found.error_share)
        if found.host_bytes * (1 - error) <= limit:
            return
        needs = (
            f"{in_units(found.host_bytes)} for {plural(plan.num_ranks, 'rank')}, by its profile "
            f"(give or take {error:.0%})"
        )
    elif forecast.sizes is not None:
        least = least_host_bytes(forecast.sizes, plan)
        if least <= limit:
            return
        own = rank_sizes(forecast.sizes, plan)
        needs = (
            f"{in_units(least)} at the least: the model, {in_units(forecast.sizes.parameters)}, "
            f"and for each of {plural(plan.num_ranks, 'rank')} {in_units(own.parameters)} of "
            f"parameters, {in_units(own.gradients)} of gradients and {in_units(own.optimizer)} of "
            "optimizer state, without activations"
        )
    else:
        return
    raise PlanError(
        f"The plan {str(plan)!r} cannot fit in the {in_units(limit)} of this machine. It needs "
        f"{needs}. {_way_out(run, forecast, limit)} --anyway starts it all the same."
    )


def _way_out(run: Run, forecast: Forecast, limit: int) -> str:
    """The nearest plan that fits, or may."""
    plan, sizes = forecast.plan, forecast.sizes
    if forecast.profile is not None and forecast.cluster is not None:
        hosts = (msgspec.structs.replace(forecast.cluster.hosts[0], memory_bytes=limit),)
        cluster = msgspec.structs.replace(forecast.cluster, hosts=hosts)
        best = rank_plans(run, forecast.profile, cluster).best
        if best is not None:
            return f"{best.plan!r} fits: {in_units(best.prediction.host_bytes)} are predicted."
    elif sizes is not None:
        for other in _smaller(run, plan):
            least = least_host_bytes(sizes, other)
            if least <= ROOM * limit:
                return f"{str(other)!r} may fit: it needs {in_units(least)} at the least."
    return "No plan is known that fits here: use a machine with more memory, or a smaller model."


def _smaller(run: Run, plan: Plan) -> Iterator[Plan]:
    """Plans of the same ranks that hold less, then of fewer ranks."""
    bare = msgspec.structs.replace(plan, pieces=None)
    savers: list[dict[str, Any]] = [{"zero": level} for level in (1, 2, 3)]
    for keys in (*savers, {"zero": 3, "offload": "optimizer"}):
        with suppress(UsageError):
            yield resolve(run, msgspec.structs.replace(bare, **keys), plan.num_ranks)
    for data in range(plan.num_replicas - 1, 0, -1):
        for offload in ("none", "optimizer"):
            with suppress(UsageError):
                fewer = Plan(data=data, precision=plan.precision, offload=offload)
                yield resolve(run, fewer, data)
