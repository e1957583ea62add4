"""Who runs, shrinks and grows: over random jobs, in a simulation that is as long as it takes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster.local_queue.policy import (
    ActiveJob,
    QueuedJob,
    ResizeJob,
    StartJob,
    decide,
)
from tests.support.queue_simulator import SimulatedJob, Simulation


@st.composite
def simulations(draw: st.DrawFn) -> Simulation:
    num_cores = draw(st.integers(1, 6))
    jobs = []
    for number in range(1, 1 + draw(st.integers(1, 9))):
        cores = draw(st.integers(1, 8))
        job = SimulatedJob(
            job=number,
            at=draw(st.integers(0, 20)),
            priority=draw(st.integers(-1, 2)),
            cores=cores,
            ticks=draw(st.integers(1, 12)),
            sizes=tuple(sorted(draw(st.sets(st.integers(1, max(1, cores - 1)), max_size=3)))),
        )
        jobs.append(job._replace(at=max(job.at, jobs[-1].at) if jobs else job.at))
    return Simulation(num_cores, jobs, draw(st.integers(1, 6)), draw(st.integers(1, 3)))


@given(simulations())
def test_every_job_ends_and_no_core_is_given_twice(simulation: Simulation) -> None:
    simulation.run()
    assert set(simulation.ended) == {job.job for job in simulation.jobs}


@given(simulations())
def test_no_job_is_overtaken_while_it_waits(simulation: Simulation) -> None:
    """Nothing starts that came later, or is less urgent, while one waits: so nothing delays it."""
    simulation.run()
    assert not simulation.overtaken


@given(simulations())
def test_a_run_is_shrunk_only_for_a_more_urgent_job(simulation: Simulation) -> None:
    def follow() -> None:
        queued = list(simulation.waiting.values())
        plain(simulation)
        for one in simulation.running.values():
            is_new = one.target is not None and one.answer_in == simulation.answer_ticks
            if is_new and len(one.target) < len(one.cores):
                assert any(job.priority > one.job.priority for job in queued)

    plain = Simulation.follow
    simulation.follow = follow  # type: ignore[method-assign]
    simulation.run()


@given(simulations())
def test_shrunk_runs_grow_back_when_nothing_waits(simulation: Simulation) -> None:
    """With all else gone, a run that goes on has its full size after as long as it takes to ask."""
    longest = simulation.jobs[0]._replace(job=99, at=0, priority=-5, ticks=400)
    simulation.jobs.append(longest)
    num_others = len(simulation.jobs) - 1
    arrivals = {job.job: job for job in simulation.jobs}
    while len(simulation.ended) < num_others and simulation.now < 390:
        for job in arrivals.values():
            if job.at == simulation.now:
                simulation.waiting[job.job] = job
        simulation.tick()
        simulation.now += 1
    if 99 in simulation.running and len(simulation.ended) == num_others:
        for _ in range(2 * simulation.answer_ticks + 2):
            simulation.tick()
        one = simulation.running[99]
        assert len(one.cores) == one.full


@given(simulations())
def test_a_decision_is_always_the_same(simulation: Simulation) -> None:
    queued = [QueuedJob(job.job, job.priority, job.cores) for job in simulation.jobs]
    first = decide(simulation.cores, [], queued, simulation.most)
    assert first == decide(simulation.cores, [], queued[::-1], simulation.most)
    assert any(isinstance(decision, StartJob) for decision in first)


ELASTIC = ActiveJob(1, 0, (0, 1), (1, 2))


def test_an_urgent_job_shrinks_a_run_of_lower_priority() -> None:
    assert decide([0, 1], [ELASTIC], [QueuedJob(2, 1, 1)], 9) == [ResizeJob(1, (0,))]


@pytest.mark.parametrize(
    ("active", "queued"),
    [
        (ELASTIC, QueuedJob(2, 0, 1)),  # as urgent as the run
        (ELASTIC, QueuedJob(2, 5, 2)),  # what it needs does not come free
        (ELASTIC._replace(sizes=(2,)), QueuedJob(2, 5, 1)),  # cannot be resized
        (ELASTIC._replace(is_asked=True, freeing=1), QueuedJob(2, 5, 1)),  # is asked already
    ],
)
def test_a_run_is_not_shrunk(active: ActiveJob, queued: QueuedJob) -> None:
    assert decide([0, 1], [active], [queued], 9) == []


def test_the_least_urgent_and_newest_run_shrinks_first_and_no_more_than_needed() -> None:
    active = [
        ActiveJob(1, 0, (0, 1, 2, 3), (1, 2, 4)),
        ActiveJob(2, 0, (4, 5, 6, 7), (1, 2, 4)),
        ActiveJob(3, 1, (8, 9), (1, 2)),
    ]
    (decision,) = decide(range(10), active, [QueuedJob(4, 2, 2)], 9)
    assert decision == ResizeJob(2, (4, 5))


def test_a_shrunk_run_takes_its_cores_before_a_job_that_came_later() -> None:
    shrunk = ActiveJob(1, 0, (0,), (1, 2))
    assert decide([0, 1], [shrunk], [QueuedJob(2, 0, 1)], 9) == [ResizeJob(1, (0, 1))]


def test_a_job_that_needs_more_than_there_is_gets_all_alone() -> None:
    assert decide([0, 1], [], [QueuedJob(1, 0, 8)], 9) == [StartJob(1, (0, 1))]


def test_no_more_jobs_run_than_are_allowed() -> None:
    running = ActiveJob(1, 0, (0,), (1,))
    assert decide([0, 1], [running], [QueuedJob(2, 5, 1)], 1) == []
