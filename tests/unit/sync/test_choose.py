"""A plan's strategy, as the plan says it."""

import pytest

from shoal.plans.plan import Plan
from shoal.sync.choose import make_strategy
from shoal.sync.server.local import LocalServerStrategy
from shoal.sync.server.strategy import ServerStrategy


@pytest.mark.parametrize("words", ["", " local_steps=4 outer=nesterov"])
@pytest.mark.parametrize(("rates", "expected"), [("", []), (" rates=1:0.5", [1.0, 0.5])])
def test_rates_mean_the_same_on_servers_with_and_without_local_steps(
    words: str, rates: str, expected: list[float]
) -> None:
    plan = Plan.parse(f"data=2 sync=server staleness=1 pieces=2{words}{rates}")
    strategy = make_strategy(plan, 8)
    if isinstance(strategy, LocalServerStrategy):
        strategy = strategy.outer_client
    assert isinstance(strategy, ServerStrategy)
    assert list(strategy.options.rates) == expected
