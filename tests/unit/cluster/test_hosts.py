"""Who sits on which host, and which hosts are taken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.hosts import comparable_facts, describe_difference, describe_seats
from shoal.plans.resize import RunSize, host_of


@given(num_hosts=st.integers(1, 8), each=st.integers(1, 8), num_servers=st.integers(0, 9))
def test_hosts_share_alike(num_hosts: int, each: int, num_servers: int) -> None:
    """Neighbours together, as many ranks on each, a server of its own, the others dealt round."""
    own = num_hosts if num_hosts > 1 else 0
    size = RunSize(num_hosts * each, num_servers + own)
    hosts = [host_of(seat, size, num_hosts) for seat in range(sum(size))]
    ranks, servers = hosts[: size.num_ranks], hosts[size.num_ranks :]
    assert ranks == sorted(ranks) and {ranks.count(host) for host in range(num_hosts)} == {each}
    if own:
        assert servers[num_servers:] == list(range(num_hosts))
        counts = [servers[:num_servers].count(host) for host in range(num_hosts)]
        assert max(counts) - min(counts) <= 1
    assert set(hosts) == set(range(num_hosts))


def test_seats_in_words() -> None:
    assert describe_seats(1, RunSize(4, 4), 2) == "ranks 2, 3 and servers 1, 3"
    assert describe_seats(1, RunSize(2, 3), 2) == "rank 1 and server 2"


FACTS = {"plan": "data=2", "num_samples": 5, "cuts": "words", "run": {"seed": {"value": 1}}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_samples": 6}, "num_samples is 5 on the first host and 6 on this one"),
        ({"run": {"seed": {"value": 2}}}, "seed is 1 on the first host and 2 on this one"),
        ({"first_weights": "ab"}, "first_weights is None on the first host and ab on this one"),
        ({"plan": "x" * 1000}, f"plan is data=2 on the first host and {'x' * 200} on this one"),
    ],
)
def test_what_differs_is_named(change: dict[str, object], words: str) -> None:
    assert words in describe_difference(comparable_facts(FACTS), comparable_facts(FACTS | change))


def test_words_for_people_may_differ() -> None:
    assert (
        describe_difference(
            comparable_facts(FACTS), comparable_facts(FACTS | {"cuts": "other words"})
        )
        == ""
    )
    assert "torch" in comparable_facts(FACTS)
