"""Who gets which cores: nobody shares one, nobody waits for ever, and it is always the same."""

from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.slots import CoreRequest, HeldCores, assign_cores


@st.composite
def situations(draw: st.DrawFn):
    cores = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
    free = list(draw(st.permutations(cores)))
    running = []
    for run in range(draw(st.integers(0, 4))):
        held = tuple(free.pop() for _ in range(min(len(free), draw(st.integers(1, 3)))))
        if held:
            running.append(HeldCores(run, held, len(held) + draw(st.integers(0, 4))))
    waiting = []
    for i in range(draw(st.integers(0, 5))):
        least = draw(st.integers(1, 14))
        waiting.append(CoreRequest(100 + i, least, least + draw(st.integers(0, 6))))
    return cores, running, waiting, draw(st.integers(1, 8))


@given(situations())
def test_no_core_is_given_twice_and_no_run_gets_too_few_or_too_many(situation) -> None:
    cores, running, waiting, most_runs = situation
    plan = assign_cores(cores, running, waiting, most_runs)
    after = {run.run: run.cores for run in running} | dict(plan.grown) | dict(plan.started)
    given_out = [core for held in after.values() for core in held]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) <= set(cores)
    asked = {request.run: request for request in waiting}
    for run, held in plan.started.items():
        least = min(asked[run].least, len(cores))
        assert least <= len(held) <= max(least, asked[run].most)
    for run in running:
        grown = plan.grown.get(run.run, run.cores)
        assert grown[: len(run.cores)] == run.cores
        assert len(grown) <= max(run.most, len(run.cores))
    assert len(plan.started) <= max(0, most_runs - len(running))


@given(situations())
def test_runs_start_in_the_order_in_which_they_asked(situation) -> None:
    """And nothing takes a core that the next one waits for."""
    cores, running, waiting, most_runs = situation
    plan = assign_cores(cores, running, waiting, most_runs)
    started = [request.run for request in waiting if request.run in plan.started]
    assert started == [request.run for request in waiting[: len(started)]]
    room = max(0, most_runs - len(running))
    if len(started) < min(room, len(waiting)):  # one waits for cores
        assert not plan.grown
        needed = min(waiting[len(started)].least, len(cores))
        num_held = sum(len(run.cores) for run in running)
        assert len(cores) - num_held - sum(map(len, plan.started.values())) < needed


@given(situations())
def test_something_always_runs_and_the_answer_is_always_the_same(situation) -> None:
    cores, running, waiting, most_runs = situation
    plan = assign_cores(cores, running, waiting, most_runs)
    assert plan == assign_cores(cores, running, waiting, most_runs)
    if waiting and not running:
        assert waiting[0].run in plan.started


@given(situations())
def test_every_run_starts_in_the_end(situation) -> None:
    cores, running, waiting, most_runs = situation
    held, left = list(running), list(waiting)
    for _ in range(len(waiting) + len(running) + 1):
        plan = assign_cores(cores, held, left, most_runs)
        most = {request.run: request.most for request in left}
        held = [run._replace(cores=plan.grown.get(run.run, run.cores)) for run in held]
        held += [HeldCores(run, got, most[run]) for run, got in plan.started.items()]
        left = [request for request in left if request.run not in plan.started]
        held = held[1:]  # the oldest ends
    assert not left


def test_the_last_runs_share_what_is_left() -> None:
    asked = [CoreRequest(0, 1, 4), CoreRequest(1, 1, 4)]
    assert assign_cores(range(4), [], asked, 2).started == {0: (0, 2), 1: (1, 3)}
    alone = assign_cores(range(4), [HeldCores(0, (0, 2), 4)], [], 2)
    assert alone.grown == {0: (0, 2, 1, 3)}


def test_who_needs_all_cores_runs_alone() -> None:
    running = [HeldCores(0, (0,), 1)]
    waiting = [CoreRequest(1, 3, 3), CoreRequest(2, 1, 1)]
    assert assign_cores([0, 1], running, waiting, 4) == ({}, {})
    assert assign_cores([0, 1], [], waiting, 4).started == {1: (0, 1)}
