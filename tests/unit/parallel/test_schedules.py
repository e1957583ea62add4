"""What each rank of a pipeline does: all of the work once, and messages that find each other."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shoal.parallel.pipeline.schedules import (
    Action,
    ActionKind,
    Order,
    matching_receive,
    order_work,
    post_receives_early,
    with_receives,
)
from shoal.parallel.pipeline.stages import rank_of_stage
from shoal.plans.rules import STAGES_OF, fits_schedule

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]
TURNS = [ActionKind.BACKWARD, ActionKind.INPUT]  # what gives the gradient that is sent back


def order(schedule: str, num_ranks: int, num_own: int, num_microbatches: int) -> Order:
    stages: list[list[int]] = [[] for _ in range(num_ranks)]
    for stage in range(num_ranks * num_own):
        stages[rank_of_stage(stage, num_ranks, schedule)].append(stage)
    return with_receives(order_work(schedule, stages, num_microbatches))


@st.composite
def orders(draw: st.DrawFn) -> tuple[Order, int, int]:
    """An order, its number of stages and of microbatches."""
    schedule = draw(st.sampled_from(SCHEDULES))
    num_ranks, num_microbatches = draw(st.integers(2, 5)), draw(st.integers(1, 12))
    fewest, most = STAGES_OF[schedule]
    num_own = draw(st.integers(fewest, int(min(most, 3))))
    assume(fits_schedule(schedule, num_ranks, num_microbatches))
    made = order(schedule, num_ranks, num_own, num_microbatches)
    return made, num_ranks * num_own, num_microbatches


def ranks_of(made: Order) -> dict[int, int]:
    return {action.stage: rank for rank, actions in enumerate(made) for action in actions}


def posts(actions: list[Action], rank: int, rank_of: dict[int, int]) -> list[tuple[int, Action]]:
    """Who sends or receives what, in order; a message is known by its receive."""
    found = []
    for action in actions:
        if action.kind == ActionKind.RECEIVE:
            found.append((rank_of[action.stage - 1], action))
        elif action.kind == ActionKind.RECEIVE_BACK:
            found.append((rank_of[action.stage + 1], action))
        else:
            message = matching_receive(action)
            if message is not None and rank_of.get(message.stage, rank) != rank:
                found.append((rank_of[message.stage], message))
    return found


@given(orders())
def test_every_stage_does_all_of_its_work_once(drawn: tuple[Order, int, int]) -> None:
    made, num_stages, num_microbatches = drawn
    count = Counter(action for actions in made for action in actions)
    assert set(count.values()) == {1}
    for stage in range(num_stages):
        for microbatch in range(num_microbatches):
            kinds = {kind for kind in ActionKind if Action(kind, stage, microbatch) in count}
            work = {kind for kind in kinds if not kind.is_receive}
            back = (
                {ActionKind.INPUT, ActionKind.WEIGHT}
                if ActionKind.INPUT in work
                else {ActionKind.BACKWARD}
            )
            assert work == {ActionKind.FORWARD} | back


@given(orders())
def test_the_microbatches_of_a_stage_come_in_their_order(drawn: tuple[Order, int, int]) -> None:
    """Their gradients are added up as they come."""
    made, num_stages, num_microbatches = drawn
    for kind in ActionKind:
        for stage in range(num_stages):
            actions = [a for items in made for a in items if (a.kind, a.stage) == (kind, stage)]
            assert [a.microbatch for a in actions] in ([], list(range(num_microbatches)))


@given(orders())
def test_two_ranks_have_their_messages_in_one_order(drawn: tuple[Order, int, int]) -> None:
    made, rank_of = drawn[0], ranks_of(drawn[0])
    seen = [posts(actions, rank, rank_of) for rank, actions in enumerate(made)]
    for one in range(len(made)):
        for two in range(one):
            assert [m for peer, m in seen[one] if peer == two] == [
                m for peer, m in seen[two] if peer == one
            ]


@given(orders())
def test_no_rank_waits_for_ever_even_if_sends_wait_too(drawn: tuple[Order, int, int]) -> None:
    """As on one stream for each pair of ranks: both sides stand still until a message is over."""
    made, rank_of = drawn[0], ranks_of(drawn[0])
    left = [posts(actions, rank, rank_of) for rank, actions in enumerate(made)]
    while any(left):
        pairs = [
            (rank, peer)
            for rank, items in enumerate(left)
            for peer, message in items[:1]
            if left[peer] and left[peer][0] == (rank, message)
        ]
        assert pairs, left
        one, two = pairs[0]
        left[one].pop(0), left[two].pop(0)


@given(orders())
def test_sooner_moves_receives_only_and_still_ends(drawn: tuple[Order, int, int]) -> None:
    made, rank_of = drawn[0], ranks_of(drawn[0])
    moved = [post_receives_early(actions) for actions in made]
    for before, after in zip(made, moved):
        for is_receive in (False, True):
            assert [a for a in before if a.kind.is_receive == is_receive] == [
                a for a in after if a.kind.is_receive == is_receive
            ]
        assert all(after.index(a) <= before.index(a) for a in before if a.kind.is_receive)
    left, done = [list(actions) for actions in moved], set()
    while any(left):
        ready = [items for items in left if items and is_ready(items[0], done, rank_of)]
        assert ready, left
        for items in ready:
            done.add(items.pop(0))


def is_ready(action: Action, done: set[Action], rank_of: dict[int, int]) -> bool:
    """Whether an action need not wait: a receive never does, work does for what it works on."""
    kind, stage, _ = action
    if kind == ActionKind.FORWARD and stage:
        return needs(action, ActionKind.RECEIVE, stage - 1, [kind], done, rank_of)
    if kind in TURNS and stage + 1 in rank_of:
        return needs(action, ActionKind.RECEIVE_BACK, stage + 1, TURNS, done, rank_of)
    return True


def needs(
    action: Action,
    receive: ActionKind,
    stage: int,
    kinds: list[ActionKind],
    done: set[Action],
    rank_of: dict[int, int],
) -> bool:
    if rank_of[stage] != rank_of[action.stage]:
        assert Action(receive, action.stage, action.microbatch) in done
    return any(Action(kind, stage, action.microbatch) in done for kind in kinds)


@pytest.mark.parametrize("rank", range(4))
def test_1f1b_holds_no_more_microbatches_than_stages_follow(rank: int) -> None:
    held, most = 0, 0
    for action in order("1f1b", 4, 1, 12)[rank]:
        held += (action.kind == ActionKind.FORWARD) - (action.kind == ActionKind.BACKWARD)
        most = max(most, held)
    assert most == 4 - rank


def test_gpipe_takes_any_places() -> None:
    """It runs the short rounds of schedules that have two stages on a rank."""
    there_and_back = with_receives(order_work("gpipe", [[0, 3], [1, 2]], 1))
    assert [str(a.kind) + str(a.stage) for a in there_and_back[1]] == [
        *("RECV_F1", "F1", "F2", "RECV_B2", "B2", "B1")
    ]


def test_an_order_that_waits_for_itself_is_found() -> None:
    stuck = [[Action(ActionKind.BACKWARD, 0, 0), Action(ActionKind.FORWARD, 0, 0)]]
    with pytest.raises(AssertionError, match="waits for itself"):
        with_receives(stuck)
