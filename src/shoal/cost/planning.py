"""From a Run and a cluster to ranked plans: the profile, production's rules, the search.

Read next: `search.py`, for what is tried; `launch/choose.py`, for who asks.
"""

from collections.abc import Sequence

from shoal.cost.cluster import Cluster
from shoal.cost.predict import predict
from shoal.cost.prediction import Prediction
from shoal.cost.profile import Profile
from shoal.cost.search import SearchResult, SearchSpace, rank_counts, search
from shoal.errors import PlanError
from shoal.plans.plan import Plan
from shoal.system.memory import loaded_is_frozen
from shoal.training.run import Run, resolve


def rank_plans(
    run: Run,
    profile: Profile,
    cluster: Cluster,
    *,
    ranks: int | None = None,
    memory_bytes: int | None = None,
    num_steps: int | None = None,
) -> SearchResult:
    """All plans for a run on a cluster; without `ranks` on as many of its devices as are best.

    What is legal is said by `resolve`, with the rules of plans, batch and run, and by `predict`,
    with those of the model.
    """
    space = SearchSpace(
        ranks=rank_counts(ranks, cluster.num_devices),
        base=Plan.parse(run.plan),
        host_devices=max(group.devices for group in cluster.hosts),
        num_hosts=cluster.num_hosts,
    )
    with loaded_is_frozen():  # a fifth of the time
        return search(
            space,
            lambda plan, count: resolve(run, plan, count),
            lambda plan: predict(profile, plan, cluster),
            num_steps=num_steps or run.num_steps(),
            memory_bytes=memory_bytes,
        )


def predict_each(
    profile: Profile, plans: Sequence[Plan], cluster: Cluster
) -> tuple[list[Prediction | None], list[str]]:
    """What is predicted for each plan; and why not, where nothing is."""
    found: list[Prediction | None] = []
    notes = []
    for plan in plans:
        try:
            found.append(predict(profile, plan, cluster))
        except PlanError as error:
            found.append(None)
            notes.append(f"Nothing is predicted for {plan}: {error}")
    return found, notes
