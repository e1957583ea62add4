"""What is asked of Ray, and what its answers mean. Ray itself is in `tests/system/test_ray.py`."""

import math
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cluster import on_ray, ray_jobs
from shoal.cluster.engine import JobRequest
from shoal.cluster.on_ray import (
    RayPlace,
    RayStarter,
    choose_size,
    describe_shortage,
    inside_of,
    parse_place,
    sends_in_private,
)
from shoal.cluster.ray_jobs import RayEngine, job_state, last_words, printed_exit_code
from shoal.cluster.ray_messages import ConnectedToRay, RayNode
from shoal.errors import UsageError
from shoal.launch.engines import run_on


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("", RayPlace()),
        ("auto", RayPlace()),
        ("spread", RayPlace(strategy="SPREAD")),
        ("pack,hosts=2,cpus=4", RayPlace(num_hosts=2, cpus=4)),
        ("10.0.0.1:6379", RayPlace("10.0.0.1:6379")),
        ("spread,head:6379", RayPlace("head:6379", "SPREAD")),
        ("//head:10001", RayPlace("ray://head:10001")),
        ("//10.0.0.1", RayPlace("ray://10.0.0.1:10001")),
        ("ray://head:10002,hosts=3", RayPlace("ray://head:10002", num_hosts=3)),
        ("http://head:8265/", RayPlace("http://head:8265")),
    ],
)
def test_a_place_is_read(text: str, place: RayPlace) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("spraed", "Did you mean 'spread'"),
        ("hosts=0", "'hosts=0' is no number of hosts"),
        ("cpus=two", "'cpus=two' is no number of cpus"),
        ("10.0.0.1", "no address"),
        ("head:port", "no address"),
        ("//head:99999", "no address"),
    ],
)
def test_a_place_that_is_none_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        parse_place(text)


def test_a_run_inside_of_the_cluster_needs_no_address() -> None:
    assert inside_of("") == "ray"
    assert inside_of("spread,hosts=2,http://head:8265") == "ray:spread,hosts=2"
    assert run_on("ray://head:10001") == "ray"
    assert run_on("ray:hosts=2,head:6379") == "ray:hosts=2"


nodes = st.lists(
    st.integers(0, 8).flatmap(
        lambda cpus: st.builds(
            RayNode, st.just("n"), st.just(float(cpus)), st.integers(0, cpus).map(float)
        )
    ),
    max_size=6,
)


@given(st.integers(1, 12), nodes, st.sampled_from(["PACK", "SPREAD"]))
def test_hosts_have_cpus_for_all_ranks_and_room_where_there_is_some(
    num_ranks: int, offered: list[RayNode], strategy: str
) -> None:
    found = choose_size(RayPlace(strategy=strategy), num_ranks, num_ranks, offered)
    assert 1 <= found.num_hosts <= max(1, min(num_ranks, len(offered)))
    assert found.num_hosts * found.cpus >= num_ranks
    free = [node.free_cpus for node in offered]

    def fits(num_hosts: int) -> bool:
        return sum(one >= math.ceil(num_ranks / num_hosts) for one in free) >= num_hosts

    possible = [n for n in range(1, min(num_ranks, len(offered)) + 1) if fits(n)]
    if possible:
        assert found.num_hosts == (possible[0] if strategy == "PACK" else possible[-1])


@given(nodes, st.one_of(st.none(), st.integers(1, 4)))
def test_a_plan_with_as_many_ranks_as_cores_takes_what_is_free(
    offered: list[RayNode], num_hosts: int | None
) -> None:
    found = choose_size(RayPlace(num_hosts=num_hosts), None, 1, offered)
    assert found.cpus >= 1 and found.num_hosts == (num_hosts or found.num_hosts) >= 1
    free = [node.free_cpus for node in offered if node.free_cpus >= 1]
    if len(free) >= found.num_hosts:
        assert sum(one >= found.cpus for one in free) >= found.num_hosts


def test_what_is_asked_for_is_kept() -> None:
    offered = [RayNode("n", 4.0, 4.0)] * 3
    assert choose_size(RayPlace(num_hosts=2), 3, 3, offered) == (2, 2)
    assert choose_size(RayPlace(num_hosts=2, cpus=4), 3, 3, offered) == (2, 4)
    assert choose_size(RayPlace(cpus=2), 3, 3, offered) == (2, 2)


def test_a_shortage_says_what_is_there_and_what_is_asked() -> None:
    told = describe_shortage([3.0, 3.0], [RayNode("10.0.0.1", 4.0, 1.0), RayNode("b", 2.0, 2.0)])
    assert told == (
        "2 hosts with 3 CPUs each wait for room. Free CPUs of 2 nodes: 10.0.0.1 1 of 4, b 2 of 2"
    )


def test_keys_cross_a_network_only_if_nobody_else_reads_them() -> None:
    def found(*names: str) -> ConnectedToRay:
        return ConnectedToRay("10.0.0.1", "10.0.0.1:6379", [RayNode(n, 1.0, 1.0) for n in names])

    assert sends_in_private(found("10.0.0.1", "10.0.0.1"), {})
    assert sends_in_private(found("127.0.0.1"), {})
    assert not sends_in_private(found("10.0.0.1", "10.0.0.2"), {"RAY_USE_TLS": "0"})
    assert sends_in_private(found("10.0.0.1", "10.0.0.2"), {"RAY_USE_TLS": "1"})


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_ray, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"ray is not installed.*shoal-ml\[ray\]"):
        RayStarter(RayPlace(), 2, 2, 1.0)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"ray is not installed.*shoal-ml\[ray\]"):
        RayEngine("")


def test_the_dashboard_starts_no_agents() -> None:
    with pytest.raises(UsageError, match="which `shoal submit` takes"):
        RayStarter(parse_place("http://head:8265"), 2, 2, 1.0)


@pytest.mark.parametrize(
    ("status", "code", "printed", "found"),
    [
        ("PENDING", None, None, ("queued", None)),
        ("RUNNING", None, None, ("running", None)),
        ("SUCCEEDED", 0, None, ("done", 0)),
        ("FAILED", 2, None, ("failed", 2)),
        ("FAILED", None, None, ("failed", 1)),
        ("FAILED", 75, None, ("stopped", 75)),
        ("STOPPED", None, 75, ("stopped", 75)),
        ("STOPPED", None, None, ("stopped", None)),
        ("STOPPED", None, 0, ("done", 0)),  # it ended by itself just before
    ],
)
def test_states_are_those_of_all_engines(
    status: str, code: int | None, printed: int | None, found: tuple[str, int | None]
) -> None:
    assert job_state(status, code, printed) == found


def test_the_shell_of_a_job_outlives_sigterm_and_says_how_it_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "a python"
    program.write_text("#!/bin/sh\ntrap 'exit 75' TERM\necho $* $SHOAL_RAY_JOB\nsleep 30 & wait\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    command = ray_jobs.entrypoint("shoal-1", ("a b.py:line", "--resume"))
    with subprocess.Popen(
        ["sh", "-c", command], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == "-P -m shoal train a b.py:line --resume shoal-1\n"
        time.sleep(0.1)  # Ray signals all processes of a job, the shell first
        subprocess.run(["kill", "-TERM", "--", f"-{shell.pid}"], check=True)
        output = shell.stdout.read()
        assert shell.wait(10) == 75 != -signal.SIGTERM
    assert printed_exit_code(output) == 75


def test_the_reason_of_a_failure_is_what_the_job_printed_last() -> None:
    message = "Job entrypoint command failed with exit code 2, last available logs:\nstep 1\n"
    assert (
        last_words(message + "shoal: no such plan\nshoal: exit code 2\n") == "shoal: no such plan"
    )
    assert last_words("") == ""


def test_a_large_directory_does_not_travel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ray_jobs, "MOST_BYTES", 1000)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "checkpoint").write_bytes(bytes(2000))
    ray_jobs.refuse_large(tmp_path)
    (tmp_path / "data.bin").write_bytes(bytes(1500))
    with pytest.raises(UsageError, match=r"data\.bin alone has"):
        ray_jobs.refuse_large(tmp_path)


@pytest.mark.parametrize("given_", [{"time_limit_s": 60.0}, {"priority": 3}])
def test_what_ray_does_not_have_is_refused(
    monkeypatch: pytest.MonkeyPatch, given_: dict[str, float]
) -> None:
    monkeypatch.setattr(ray_jobs, "require", lambda module, extra: None)
    request = JobRequest(name="n", arguments=("a",), directory=".", run_dir="/r", **given_)
    with pytest.raises(UsageError, match="neither limits of time nor priorities"):
        RayEngine("").submit(request)
