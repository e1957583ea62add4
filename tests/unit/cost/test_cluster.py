"""Cluster files: units, errors that name the nearest key, the shipped ones, writing and reading."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.cost.cluster import (
    Cluster,
    HostGroup,
    Link,
    format_cluster,
    parse_cluster,
    read_cluster,
    shipped_clusters,
    write_cluster,
)
from shoal.errors import UsageError

GOOD = """
name = "lab"
failures_per_month = 0.5

[inside]
latency = "30us"
bandwidth = "2 GB/s"
shared_memory = true

[between]
latency = "0.5 ms"
bandwidth = "1 Gbit/s"

[[hosts]]
count = 2
devices = 8
memory = "64GB"
speed = "50 Gflop/s"

[[hosts]]
devices = 4
memory = "16GiB"
speed = "1 Tflop/s"
device = "gpu"
"""


def parsed(text: str) -> Cluster:
    return parse_cluster(text.encode(), "lab.toml")


def test_units_are_read_and_hosts_may_differ() -> None:
    cluster = parsed(GOOD)
    assert cluster.inside == Link(pytest.approx(30e-6), 2e9, True)
    assert cluster.between == Link(pytest.approx(5e-4), 125e6)
    assert cluster.hosts[0] == HostGroup(2, 8, 64_000_000_000, 50e9)
    assert cluster.hosts[1] == HostGroup(1, 4, 16 << 30, 1e12, "gpu")
    assert (cluster.num_hosts, cluster.num_devices) == (3, 20)
    assert cluster.group_of(2).devices == 4 and cluster.group_of(0).devices == 8


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('bandwidth = "1 Gbit/s"', 'bandwidth = "0 Gbit/s"', "between.bandwidth = '0 Gbit/s'"),
        ('bandwidth = "1 Gbit/s"', 'bandwidth = "1 Gb/s"', "B for bytes or bit for bits"),
        ('bandwidth = "1 Gbit/s"', "bandwidth = 1000", "with its unit"),
        ('bandwidth = "1 Gbit/s"', 'bandwidth = "1e999 GB/s"', "between.bandwidth = '1e999 GB/s'"),
        ('memory = "64GB"', 'memory = "1e999GB"', "hosts[0].memory = '1e999GB' cannot be"),
        ("devices = 8", "devices = 999999", "2,000,002 devices, and may have 1,000,000"),
        (
            'bandwidth = "1 Gbit/s"',
            'bandwith = "1 Gbit/s"',
            "it needs. It has between.bandwith: is that",
        ),
        ("devices = 8", "deviecs = 8", "hosts[0].devices, which it needs. It has hosts[0].deviecs"),
        ("shared_memory", "shared_memry", "inside.shared_memry is unknown. Did you mean 'shared_m"),
        ('memory = "64GB"', 'memory = "-64GB"', r"hosts[0].memory = '-64GB' cannot be"),
        ('memory = "64GB"', 'memory = "0GB"', "above 0"),
        ("devices = 8", "devices = 0", "hosts[0].devices = 0 cannot be"),
        ("devices = 8", "devices = 8.5", "a whole number"),
        ("count = 2", "cuont = 2", "hosts[0].cuont is unknown. Did you mean 'count'?"),
        ('speed = "50 Gflop/s"', 'speed = "fast"', 'as in "50 Gflop/s"'),
        ('latency = "30us"', 'latency = "-30us"', "inside.latency = '-30us' cannot be"),
        ('device = "gpu"', 'device = "tpu"', '"core" or "gpu"'),
        ("failures_per_month = 0.5", "failures_per_month = -1", "a number of 0 or more"),
        ("[between]", "[betwen]", "Did you mean 'between'?"),
        ('name = "lab"', "name = ", "lab.toml is not TOML"),
    ],
)
def test_what_cannot_be_is_refused_by_name(old: str, new: str, words: str) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as refused:
        parsed(GOOD.replace(old, new, 1))
    assert words in str(refused.value)


def test_several_hosts_need_a_link_between_them() -> None:
    text = GOOD[: GOOD.index("[between]")] + GOOD[GOOD.index("[[hosts]]") :]
    with pytest.raises(UsageError, match=r"no \[between\] table"):
        parsed(text)
    with pytest.raises(UsageError, match="has no hosts"):
        parsed(GOOD[: GOOD.index("[[hosts]]")])


def test_shipped_clusters_are_read_by_name() -> None:
    assert {"a100-8", "laptops-16", "gpus-1000x8", "cores-2"} <= set(shipped_clusters())
    sizes = {name: read_cluster(name).num_devices for name in shipped_clusters()}
    assert sizes["a100-8"] == 8 and sizes["gpus-1000x8"] == 8000 and sizes["laptops-16"] == 88
    with pytest.raises(UsageError, match="a100-8"):
        read_cluster("nowhere")


links = st.builds(Link, st.floats(1e-7, 1), st.floats(1e3, 1e12), st.booleans())
hosts = st.builds(
    HostGroup,
    st.integers(1, 9),
    st.integers(1, 99),
    st.integers(1, 10**6).map(lambda n: n * 10**6),
    st.floats(1e6, 1e15),
    st.sampled_from(["core", "gpu"]),
    st.sampled_from([0.0, 2.5e13]),
)


@given(st.lists(hosts, min_size=1, max_size=3), links, links)
def test_what_is_written_is_read_again(
    groups: list[HostGroup], inside: Link, between: Link
) -> None:
    cluster = Cluster("a", tuple(groups), inside, between)
    again = parsed(format_cluster(cluster))
    assert again.num_devices == cluster.num_devices
    assert again.between.bytes_per_s == pytest.approx(between.bytes_per_s, rel=1e-3)
    assert again.inside.latency_s == pytest.approx(inside.latency_s, rel=1e-3)
    assert [g.memory_bytes for g in again.hosts] == [g.memory_bytes for g in groups]
    assert [g.half_flops for g in again.hosts] == [g.half_flops for g in groups]


def test_a_file_that_exists_is_not_overwritten(tmp_path: Path) -> None:
    place = tmp_path / "lab.toml"
    write_cluster(parsed(GOOD), place)
    assert read_cluster(place).num_devices == 20
    with pytest.raises(UsageError, match="exists"):
        write_cluster(parsed(GOOD), place)


@pytest.mark.full
def test_this_machine_is_measured_and_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from click.testing import CliRunner

    from shoal.cli.doctor import doctor
    from shoal.cost.this_machine import this_cluster
    from shoal.world import cores

    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "here.toml"
    done = CliRunner().invoke(doctor, ["--save", str(place), "--json"])
    assert done.exit_code == 0, done.output
    saved = read_cluster(place)
    assert saved.num_devices == cores() and saved.inside.bytes_per_s > 1e6
    assert this_cluster() == saved, "and it is what plans are judged by from now on"


def test_a_file_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    from click.testing import CliRunner

    from shoal.cli.doctor import doctor

    place = tmp_path / "here.toml"
    place.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        CliRunner().invoke(doctor, ["--save", str(place)], catch_exceptions=False)
    with pytest.raises(UsageError, match="--quick"):
        CliRunner().invoke(doctor, ["--save", "x", "--quick"], catch_exceptions=False)
    assert place.read_text() == "mine"
