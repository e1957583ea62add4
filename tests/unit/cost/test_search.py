"""The search over plans: all that it lists is legal, in order, and no limit removes what fits."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.cost.prediction import MemoryParts, Prediction, TimeParts
from shoal.cost.search import (
    RULES,
    SearchResult,
    SearchSpace,
    axes,
    changed_keys,
    rank_counts,
    search,
)
from shoal.errors import PlanError, UsageError
from shoal.plans.plan import Plan

MB = 1_000_000
HOST_BYTES = 64_000 * MB


def made_up(plan: Plan) -> Prediction:
    """A model of 100 MB that cuts well, with figures that have the right signs."""
    ranks, pieces = plan.num_ranks, plan.num_pieces
    compute = 1.0 / ranks * (1.33 if plan.recompute == "blocks" else 1.0)
    compute *= 0.6 if plan.precision == "bf16" else 1.0
    waiting = compute * (plan.pipeline - 1) / plan.num_microbatches / plan.num_stages
    sent = int(100 * MB * (plan.num_replicas > 1) * (1 + plan.zero / 4) / plan.local_steps)
    sent += 40 * MB * (plan.tensor - 1)
    exchange = sent / (1000 * MB)
    update = 0.01 + 0.02 * (plan.offload != "none")
    cut = plan.tensor * plan.pipeline
    held = 100 * MB // cut
    shards = plan.num_replicas if plan.zero else 1
    activations = 800 * MB // pieces // (4 if plan.recompute == "blocks" else 1)
    optimizer = 0 if plan.offload != "none" else 2 * held // shards
    memory = MemoryParts(held, held, optimizer, 0, activations, 0, 50 * MB)
    time_ = TimeParts(compute, exchange, waiting, update, 0.0)
    return Prediction(
        plan=str(plan),
        step_s=time_.total,
        samples_per_s=1 / time_.total,
        time=time_,
        memory=memory,
        server_bytes=100 * MB if plan.num_servers else 0,
        host_bytes=ranks * memory.peak,
        host_limit_bytes=HOST_BYTES,
        bytes_sent=sent,
        error_share=0.1,
        notes=(),
    )


def admit(plan: Plan, ranks: int) -> Plan:
    return plan.resolve(ranks=ranks, cores=ranks, batch_size=64)


@cache
def found(ranks: int, memory_bytes: int | None = None) -> SearchResult:
    space = SearchSpace([ranks], Plan(), host_devices=8)
    return search(space, admit, made_up, num_steps=10, memory_bytes=memory_bytes)


@pytest.mark.parametrize("ranks", [1, 2, 6, 8, 16])
def test_every_plan_is_legal_and_on_so_many_ranks(ranks: int) -> None:
    plans = found(ranks).plans
    assert len({plan.plan for plan in plans}) == len(plans)
    for row in plans:
        plan = Plan.parse(row.plan)  # with the rules between keys
        resolved = plan.resolve(ranks=ranks, cores=1, batch_size=64)
        assert resolved.num_ranks == row.num_ranks == ranks
        assert str(plan) == row.plan, "no key is written twice or without effect"
        assert row.reason and row.total_s == 10 * row.step_s


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_order_is_by_time_and_what_changes_the_result_comes_apart(ranks: int) -> None:
    plans = found(ranks).plans
    same = [plan for plan in plans if not plan.changes_result]
    other = plans[len(same) :]
    assert same and other and all(plan.changes_result for plan in other)
    for rows in (same, other):
        assert [row.step_s for row in rows] == sorted(row.step_s for row in rows)
    best = found(ranks).best
    assert best is plans[0] and "fastest" in best.reason
    for row in other:
        assert changed_keys(Plan.parse(row.plan), SearchSpace([ranks], Plan()))
        assert "trains something else" in row.reason


def test_all_built_keys_are_searched() -> None:
    texts = " ".join(plan.plan for plan in found(8).plans)
    for words in (
        *("zero=1", "zero=2", "zero=3", "tensor=2", "pipeline=4", "schedule=interleaved"),
        *("schedule=zero-bubble", "schedule=zbv", "stages=4", "microbatches=", "accumulate=2"),
        *("recompute=blocks", "offload=optimizer", "sums=ring", "sync=server", "servers=4"),
        *("staleness=1", "staleness=any", "local_steps=8", "outer=nesterov", "codec=int4"),
        *("codec=bf16", "precision=bf16", "precision=fp16", "memory=apart"),
    ):
        assert words in texts, words
    assert all(sentence.endswith(".") for sentence in RULES.values())


@settings(deadline=None, max_examples=12)
@given(st.integers(50, 1500), st.integers(0, 1500), st.sampled_from([2, 4]))
def test_a_larger_limit_never_removes_a_plan(limit: int, more: int, ranks: int) -> None:
    small, large = found(ranks, limit * MB), found(ranks, (limit + more) * MB)
    assert {plan.plan for plan in small.plans} <= {plan.plan for plan in large.plans}
    assert all(plan.memory_bytes <= limit * MB for plan in small.plans)
    assert len(small.plans) + len(small.too_large) == small.num_tried
    if small.plans and small.best and large.best:
        assert large.best.step_s <= small.best.step_s


def test_a_limit_that_nothing_meets_names_the_nearest_first() -> None:
    none = found(2, 60 * MB)
    assert not none.plans and none.best is None
    over = [plan.memory_bytes for plan in none.too_large if plan.prediction.server_bytes == 0]
    assert over == sorted(over)
    assert "more than 60 MB" in none.too_large[0].reason


def test_reasons_name_the_part_that_costs() -> None:
    reasons = {plan.plan: plan.reason for plan in found(8).plans}
    assert "exchanges" in reasons["data=8 zero=3"]
    assert "computes" in reasons["data=8 recompute=blocks"]
    assert "% faster" in reasons["data=8 local_steps=64"]


def test_what_the_recipe_asks_for_is_kept() -> None:
    space = SearchSpace([2], Plan.parse("precision=bf16"))
    result = search(space, admit, made_up)
    best = result.best
    assert best is not None and "precision=bf16" in best.plan
    assert all("bf16" in plan.plan for plan in result.plans if not plan.changes_result)


def test_a_model_that_cannot_be_cut_leaves_the_rest() -> None:
    def estimate(plan: Plan) -> Prediction:
        if plan.cuts_model:
            raise PlanError("it has one layer")
        return made_up(plan)

    result = search(SearchSpace([4], Plan()), admit, estimate)
    assert result.best is not None and result.num_illegal > 0
    assert all(not Plan.parse(plan.plan).cuts_model for plan in result.plans)


@given(st.integers(1, 200), st.integers(1, 16))
def test_axes_are_products_inside_hosts(ranks: int, devices: int) -> None:
    found_axes = list(axes(ranks, devices))
    assert len(set(found_axes)) == len(found_axes)
    for data, tensor, pipeline in found_axes:
        assert data * tensor * pipeline == ranks
        assert devices == 1 or tensor <= devices
    assert (ranks, 1, 1) in found_axes


def test_counts_of_ranks_are_few() -> None:
    assert rank_counts(None, 1) == [1] and rank_counts(None, 6) == [1, 2, 4, 6]
    assert rank_counts(None, 8000) == [8000] and rank_counts(3, 8) == [3]
    for asked, most in ((5_000_000, 2), (None, 1_000_000)):
        with pytest.raises(UsageError, match=r"up to 10,000 ranks.* --ranks"):
            rank_counts(asked, most)


def test_sixty_four_ranks_are_some_hundred_plans() -> None:
    """What a search takes are its estimates."""
    space = SearchSpace([64], Plan(), host_devices=8, num_hosts=8)
    result = search(space, lambda p, n: p.resolve(ranks=n, cores=n, batch_size=512), made_up)
    assert 200 < result.num_tried < 1000
