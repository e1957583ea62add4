"""Work moves to who is fast; nobody goes without, and clean runs are left alone."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from shoal.data.balance import LoadBalancer, Rebalance, StragglerDetector, can_balance
from shoal.data.split import apportion_pieces, shares
from shoal.plans.plan import Plan
from shoal.training.balancing import advice, by_replica, slow_among

SECONDS = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


@given(SECONDS, st.integers(0, 12))
def test_every_piece_is_dealt_and_nobody_goes_without(seconds: list[float], more: int) -> None:
    counts = apportion_pieces(len(seconds) + more, seconds)
    assert sum(counts) == len(seconds) + more
    assert min(counts) >= 1
    taken = shares(sum(counts), len(counts), counts)
    assert [i for share in taken for i in share] == list(range(sum(counts)))
    assert [len(share) for share in taken] == counts


@given(st.lists(st.floats(0.1, 5), min_size=2, max_size=3), st.integers(0, 5))
def test_no_other_deal_is_done_sooner(seconds: list[float], more: int) -> None:
    num = len(seconds) + more

    def span(counts) -> float:
        return max(c * s for c, s in zip(counts, seconds, strict=True))

    others = product(range(1, num + 1), repeat=len(seconds))
    best = min(span(counts) for counts in others if sum(counts) == num)
    assert span(apportion_pieces(num, seconds)) <= best * (1 + 1e-9)


def test_one_five_times_slower_takes_a_sixteenth() -> None:
    balance = LoadBalancer(16, 4)
    assert balance.observe([4, 4, 20, 4]) is None
    move = balance.observe([4, 4, 20, 4])
    assert move == Rebalance([4, 4, 4, 4], [5, 5, 1, 5], [1, 1, 5, 1])
    assert [balance.observe([5, 5, 5, 5]) for _ in range(20)] == [None] * 20


def test_noise_moves_nothing() -> None:
    balance = LoadBalancer(8, 2)
    noisy = [1.0, 1.1, 0.9, 3.0, 1.05, 1.0, 0.95]
    found = [balance.observe([noisy[i % 7], noisy[(i * 3) % 7]]) for i in range(50)]
    assert found == [None] * 50


def test_work_comes_back() -> None:
    balance = LoadBalancer(8, 2)
    moves = [balance.observe(busy) for busy in ([4, 8], [6, 2]) for _ in range(5)]
    assert [move.after for move in moves if move] == [[6, 2], [4, 4]]


def test_who_is_slow_is_told_by_what_the_decision_was_made_of() -> None:
    balance = LoadBalancer(8, 2)
    moves = [balance.observe(busy) for busy in ([4, 10], [4, 10], [4, 10], [4, 10], [40, 4])]
    found = [move for move in moves if move is not None]
    assert [slow_among(move.seconds) for move in found] == [{}]
    assert slow_among([1.0, 1.0, 5.0]) == {"2": 5.0}


def test_plans_that_can() -> None:
    def can(text: str) -> bool:
        return can_balance(Plan.parse(text))

    assert can("data=4 pieces=16")
    assert can("data=2 zero=1 accumulate=4 pieces=8")
    assert can("data=2 tensor=2 accumulate=2 pieces=4")
    assert not can("data=4 pieces=4")
    assert not can("data=4 pieces=16 sums=ring")
    assert not can("data=2 zero=2 accumulate=4 pieces=8")
    assert not can("data=2 zero=3 accumulate=4 pieces=8")
    assert not can("data=2 accumulate=4 pieces=8 local_steps=4")


def test_the_slowest_rank_of_a_replica_counts() -> None:
    assert by_replica([1, 2, 3, 4, 9, 1, 1, 1], 2, 2) == [9, 4]


def named(steps: list[list[float]], counts: list[int]) -> list[dict[int, float]]:
    pace = StragglerDetector()
    return [found for busy in steps if (found := pace.observe(busy, counts))]


def test_who_keeps_others_waiting_is_named_once() -> None:
    assert named([[1.0, 1.1, 5.0, 0.9]] * 20, [1] * 4) == [{2: 5.0}]
    assert named([[1.0, 5.0]] * 5, [1, 1]) == [{1: 5.0}]
    assert named([[1.0, 5.0]] * 4, [1, 1]) == []


def test_nobody_is_named_in_clean_runs() -> None:
    noisy = [1.0, 1.1, 0.9, 4.0, 1.05, 5.0, 0.95]
    steps = [[noisy[i % 7], noisy[(i * 3) % 7], noisy[(i * 5) % 7]] for i in range(50)]
    assert named(steps, [1, 1, 1]) == []
    assert named([[0.002, 0.006]] * 20, [1, 1]) == []  # of a few milliseconds nobody can tell
    assert named([[2.5, 1.0, 1.0]] * 20, [2, 1, 1]) == []  # it has twice the work
    assert named([[5.0, 5.1]] * 20, [5, 1]) == []  # slow, and given less work: nobody waits
    assert named([[0.3, 0.3]] * 20, [1, 1]) == []


def resolved(text: str, batch_size: int) -> Plan:
    return Plan.parse(text).resolve(ranks=None, cores=8, batch_size=batch_size)


def advised(text: str, batch_size: int) -> str:
    return advice(resolved(text, batch_size), batch_size)


def test_advice_is_a_plan_that_can_be_balanced() -> None:
    for text, batch_size, pieces in (("data=4", 64, 16), ("data=2", 6, 6), ("data=3", 24, 12)):
        assert f"pieces={pieces} lets" in advised(text, batch_size)
        assert can_balance(resolved(f"{text} pieces={pieces}", batch_size))
    assert "pieces=8 in place of accumulate lets" in advised("data=2 accumulate=2", 8)
    assert "cannot be cut finer" in advised("data=4", 4)
    for text in ("data=4 zero=2", "data=4 sums=ring", "data=4 local_steps=2"):
        assert "does not move" in advised(text, 8)
    assert "staleness=S" in advised("data=2 sync=server", 8)


def test_replicas_that_have_nothing_to_do_are_no_measure() -> None:
    pace = StragglerDetector()
    for _ in range(10):
        assert pace.observe([0.0, 0.0, 3.0], [0, 0, 4]) == {}
        assert pace.observe([0.0, 3.0, 3.0], [0, 0, 4]) == {}
