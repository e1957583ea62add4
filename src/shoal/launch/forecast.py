"""What a run that begins is expected to take and hold; and the refusal of what cannot fit.

A run does not wait for a profile. If its recipe was profiled before on this machine (`shoal plan`,
`shoal scale`, `--plan auto`), time and memory are predicted from that. If not, a small model takes
what the run's own first steps take (`outcome.py`); of one that needs a good part of this machine,
memory with activations is found from shapes, on fake tensors. The record says which it was. Runs
over several hosts are not foreseen.

A refusal is sure: it comes from the least that a plan holds, or from a prediction less its error.
Cost: a file is read, or a model made without weights (`cost/sizes.py`); seconds for a large one.
"""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from shoal.cost.cluster import Cluster, HostGroup, Link
from shoal.cost.planning import rank_plans
from shoal.cost.predict import DATA_ERROR, predict
from shoal.cost.prediction import Prediction
from shoal.cost.profile import Profile
from shoal.cost.profile_index import recall_profile
from shoal.cost.profiler import sketch_run
from shoal.cost.sizes import ModelSizes, least_host_bytes, rank_sizes, sizes_without_memory
from shoal.cost.this_machine import host_memory_bytes, kept_cluster
from shoal.errors import PlanError, UsageError
from shoal.formatting import in_units, plural
from shoal.logs import log
from shoal.plans.plan import Plan
from shoal.system.processes import result_of_fork
from shoal.training.options import Recipe
from shoal.training.run import Run, resolve
from shoal.world import cores

MEMORY_ERROR = 0.15  # that a prediction may be off by, where it refuses
LARGE = 0.1  # of this machine's memory, from which a model is looked at on fake tensors
PATIENCE_S = 60.0  # for which a run waits for that
ROOM = 0.8  # of a machine's memory: a plan that needs no more at the least may fit


class Forecast(NamedTuple):
    """What is known of a run before it begins: a prediction, or the sizes of its model."""

    plan: Plan
    prediction: Prediction | None = None
    profile: Profile | None = None
    cluster: Cluster | None = None
    sizes: ModelSizes | None = None

    def facts(self) -> dict[str, Any]:
        """For the record: seconds of a step and bytes of a rank, and where they come from. What is
        None is known after the first steps."""
        if self.prediction is None:
            return {"from": "sizes", "step_s": None, "memory_bytes": None}
        is_measured = self.profile is not None and self.profile.is_measured
        return {
            "from": "profile" if self.cluster is not None else "shapes",
            "step_s": self.prediction.step_s if self.cluster is not None else None,
            "memory_bytes": self.prediction.memory.peak,
            "error_share": self.prediction.error_share if is_measured else None,
        }

    @property
    def memory_error(self) -> float:
        assert self.profile is not None
        return MEMORY_ERROR + DATA_ERROR * self.profile.depends_on_data


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
    sizes = sizes_without_memory(run)
    if sizes is None or least_host_bytes(sizes, plan) < LARGE * host_memory_bytes():
        return Forecast(plan, sizes=sizes)
    content = result_of_fork(lambda: msgspec.json.encode(sketch_run(run, plan)), PATIENCE_S)
    if not content:
        return Forecast(plan, sizes=sizes)  # its forward looks at values, or takes long
    sketch = msgspec.json.decode(content, type=Profile)
    try:
        return Forecast(plan, predict(sketch, plan, _this_host()), sketch, sizes=sizes)
    except PlanError:
        return Forecast(plan, sizes=sizes)


def _this_host() -> Cluster:
    """This machine, of which only the memory counts."""
    host, link = HostGroup(1, cores(), host_memory_bytes(), 1e9), Link(0.0, 1e9)
    return Cluster("this machine", (host,), link, link)


def refuse_too_large(run: Run, forecast: Forecast, limit: int | None = None) -> None:
    """Refuse a plan whose processes surely do not fit in this machine's memory."""
    limit, plan = limit or host_memory_bytes(), forecast.plan
    if forecast.prediction is not None:
        found = forecast.prediction
        error = forecast.memory_error
        if found.host_bytes * (1 - error) <= limit:
            return
        needs = (
            f"{in_units(found.host_bytes)} for {plural(plan.num_ranks, 'rank')}, by its "
            f"{'profile' if forecast.cluster is not None else 'shapes'} "
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
