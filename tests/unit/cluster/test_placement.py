"""Who is on which host."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.placement import (
    clear_text,
    describe_placement,
    describe_seats,
    place,
)
from shoal.errors import PlanError
from shoal.plans.plan import Plan
from shoal.plans.resize import RunSize, host_of, size_of

meshes = st.builds(
    lambda d, t, p: Plan.parse(f"data={d} tensor={t} pipeline={p}"),
    *(st.integers(1, 4) for _ in range(3)),
)
clusters = st.dictionaries(st.integers(0, 9), st.integers(0, 8), max_size=6)


def rank_of(plan: Plan, d: int, p: int, t: int) -> int:
    """As `comm/mesh.py` numbers them."""
    return (p * plan.num_replicas + d) * plan.tensor + t


@given(plan=meshes, slots=clusters)
def test_ranks_stay_within_slots_and_near_their_replica(plan: Plan, slots: dict[int, int]) -> None:
    if plan.num_ranks > sum(slots.values()):
        with pytest.raises(PlanError, match=f"slots for {sum(slots.values())}"):
            place(plan, slots)
        return
    found = place(plan, slots)
    assert len(found) == plan.num_ranks == sum(size_of(plan))
    for host in {*found}:
        assert found.count(host) <= slots[host]
    for unit, members in (
        (plan.tensor * plan.pipeline, lambda d, p: {(d, q) for q in range(plan.pipeline)}),
        (plan.tensor, lambda d, p: {(d, p)}),
    ):
        if sum(count // unit for count in slots.values()) < plan.num_ranks // unit:
            continue  # they do not fit whole
        for d in range(plan.num_replicas):
            for p in range(plan.pipeline):
                seats = [rank_of(plan, *at, t) for at in members(d, p) for t in range(plan.tensor)]
                assert len({found[seat] for seat in seats}) == 1
        break


def test_a_replica_that_steps_apart_has_a_host_of_its_own() -> None:
    plan = Plan.parse("data=4 pipeline=2 replicas=2 local_steps=4")
    assert place(plan, {0: 4, 1: 4}) == (0, 0, 1, 1, 0, 0, 1, 1)
    assert clear_text(Plan.parse("data=4 replicas=2 sync=server local_steps=2")) == "gradients"


@given(plan=meshes, num_hosts=st.integers(1, 6))
def test_alike_hosts_get_alike_shares(plan: Plan, num_hosts: int) -> None:
    found = place(plan, dict.fromkeys(range(num_hosts), 64))
    shares = [found.count(host) for host in range(num_hosts)]
    assert max(shares) - min(shares) <= plan.tensor * plan.pipeline
    assert found[0] == 0 and shares == sorted(shares, reverse=True)


@given(data=st.integers(1, 4), servers=st.integers(1, 6), slots=clusters)
def test_neighbouring_servers_are_on_unlike_hosts(
    data: int, servers: int, slots: dict[int, int]
) -> None:
    plan = Plan.parse(f"data={data} sync=server servers={servers}")
    if data > sum(slots.values()):
        return
    hosts = [host for host in slots if slots[host]]
    found = place(plan, slots)[plan.num_ranks :]
    assert {*found} <= {*hosts} and len(found) == servers
    for near, far in pairwise(found):
        assert len(hosts) == 1 or near != far, "a copy would be lost with its server"


@given(num_hosts=st.integers(2, 5), each=st.integers(2, 5), num_servers=st.integers(1, 9))
def test_servers_in_two_levels_keep_their_places(
    num_hosts: int, each: int, num_servers: int
) -> None:
    """Neighbours together, as many ranks on each, a server of its own, the others dealt round."""
    plan = Plan.parse(f"data={num_hosts * each} sync=server servers={num_servers}")
    plan = plan.__class__(**{**_fields(plan), "hosts": num_hosts})
    found = place(plan, dict.fromkeys(range(num_hosts), each))
    size = RunSize(num_hosts * each, num_servers + num_hosts)
    assert found == tuple(host_of(seat, size, num_hosts) for seat in range(sum(size)))
    assert {*place(plan, {3: num_hosts * each})} == {3}, "one machine may have all hosts"
    with pytest.raises(PlanError, match=f"hosts={num_hosts}, and there are"):
        place(plan, dict.fromkeys(range(num_hosts + 1), each))


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in plan.__struct_fields__}


@pytest.mark.parametrize(
    ("plan", "slots", "hosts"),
    [
        ("data=4", {0: 2, 1: 2}, (0, 0, 1, 1)),
        ("data=4", {0: 1, 1: 8}, (0, 1, 1, 1)),
        ("data=2 pipeline=2", {0: 2, 1: 2}, (0, 1, 0, 1)),
        ("pipeline=2 tensor=2", {0: 2, 1: 2}, (0, 0, 1, 1)),
        ("data=2 tensor=2", {0: 3, 1: 3}, (0, 0, 1, 1)),
        ("tensor=3", {0: 2, 1: 2}, (0, 0, 1)),
        ("data=2", {2: 2, 7: 4}, (2, 7)),
    ],
)
def test_examples(plan: str, slots: dict[int, int], hosts: tuple[int, ...]) -> None:
    """Ranks are numbered (pipeline, data, tensor)."""
    found = Plan.parse(plan if "data" in plan else f"data=1 {plan}")
    assert place(found, slots) == hosts


def test_what_does_not_fit_is_told_with_numbers() -> None:
    words = "has 8 ranks, and the hosts have slots for 5: 2 on host 0, 3 on host 1.*--slots N"
    with pytest.raises(PlanError, match=words):
        place(Plan.parse("data=8"), {0: 2, 1: 3, 2: 0})
    with pytest.raises(PlanError, match="slots for 0: none"):
        place(Plan.parse("data=1"), {})


def test_seats_in_words() -> None:
    assert describe_seats(1, RunSize(4, 4), (0, 0, 1, 1, 0, 1, 0, 1)) == (
        "ranks 2, 3 and servers 1, 3"
    )
    assert describe_seats(1, RunSize(2, 1), (0, 1, 1)) == "rank 1 and server 0"
    assert describe_seats(2, RunSize(2), (0, 1)) == "no seat yet"
    rows = describe_placement(Plan.parse("data=2"), (0, 1))
    assert rows == [("host 0", "rank 0"), ("host 1", "rank 1")]


@pytest.mark.parametrize(
    ("plan", "what"),
    [
        ("data=4", "gradients"),
        ("data=2 local_steps=4", "gradients"),
        ("data=2 zero=2", "gradients and parameters"),
        ("data=1 pipeline=2", "activations and gradients"),
        ("tensor=2", "activations and gradients"),
        ("data=2 sync=server", ""),
        ("sync=server servers=2", ""),
        ("data=4 replicas=4 local_steps=4 sync=server", ""),
        ("data=4 replicas=2 local_steps=4 sync=server", "gradients"),
    ],
)
def test_what_would_be_in_clear_text(plan: str, what: str) -> None:
    assert clear_text(Plan.parse(plan)) == what
