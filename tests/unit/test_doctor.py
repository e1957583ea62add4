"""The doctor: each judgement on given numbers, and the command around them."""

import json
import resource
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal.cli import doctor as command
from shoal.doctor import doctor
from shoal.doctor.doctor import Finding
from shoal.events.meters import cpu_limit, memory_limit_bytes

MB, GB = 2**20, 2**30


@pytest.mark.parametrize(
    ("check", "verdict"),
    [
        (doctor.check_python((3, 12, 1)), "ok"),
        (doctor.check_python((3, 10, 9)), "problem"),
        (doctor.check_cores(4, 4, None), "ok"),
        (doctor.check_cores(2, 4, None), "note"),
        (doctor.check_cores(4, 4, 1.5), "note"),
        (doctor.judge_memory(8 * GB, 6 * GB, None), "ok"),
        (doctor.judge_memory(8 * GB, 6 * GB, 1 * GB), "note"),
        (doctor.judge_memory(8 * GB, 100 * MB, None), "problem"),
        (doctor.judge_shared_memory(1 * GB, 1 * GB), "ok"),
        (doctor.judge_shared_memory(64 * MB, 64 * MB), "note"),
        (doctor.judge_shared_memory(64 * MB, 1 * MB), "problem"),
        (doctor.check_shared_memory(Path("/no/such/place")), "note"),
        (doctor.check_open_files(1024), "ok"),
        (doctor.check_open_files(resource.RLIM_INFINITY), "ok"),
        (doctor.check_open_files(512), "note"),
        (doctor.check_open_files(64), "problem"),
        (doctor.judge_disk("cache", Path("x"), 2 * GB, "SHOAL_CACHE"), "ok"),
        (doctor.judge_disk("cache", Path("x"), GB // 2, "SHOAL_CACHE"), "note"),
        (doctor.judge_disk("cache", Path("x"), 1 * MB, "SHOAL_CACHE"), "problem"),
    ],
)
def test_verdicts(check, verdict):
    assert check.verdict == verdict
    assert (check.advice == "") is (verdict == "ok")


def test_loopback_is_found_by_its_address():
    assert doctor.loopback({"eth0": "10.0.0.1", "lo0": "127.0.0.1"}) == "lo0"
    assert doctor.loopback({"eth0": "10.0.0.1"}) is None


def test_a_directory_below_a_file_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("")
    check = doctor.check_disk("run directory", tmp_path / "file" / "runs", "--run-dir")
    assert check.verdict == "problem" and "--run-dir" in check.advice
    assert doctor.check_disk("run directory", tmp_path / "a" / "b", "--run-dir").value.startswith(
        str(tmp_path)
    )


def test_limits_of_containers(tmp_path):
    assert memory_limit_bytes(tmp_path) is None and cpu_limit(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup/job/step"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job/step\n")
    (group / "memory.max").write_text("max\n")
    (group / "cpu.max").write_text("max 100000\n")
    assert memory_limit_bytes(tmp_path) is None and cpu_limit(tmp_path) is None
    (group.parent / "memory.max").write_text("1000000\n")
    (group.parent / "cpu.max").write_text("150000 100000\n")
    assert memory_limit_bytes(tmp_path) == 1000000 and cpu_limit(tmp_path) == 1.5


def test_a_check_that_breaks_is_reported_and_the_rest_go_on(monkeypatch, tmp_path):
    def broken():
        raise OSError("no such file")

    for name in ("check_torch", "check_devices", "check_fused_optimizer"):
        monkeypatch.setattr(doctor, name, broken)
    monkeypatch.setattr(doctor, "check_bf16", lambda measure: Finding("bf16", "ok", "runs"))
    checks = {check.name: check for check in doctor.examine(tmp_path, quick=True)}
    assert checks["torch"].verdict == "problem" and "no such file" in checks["torch"].value
    assert checks["clock"].verdict == "ok" and "all-reduce" not in checks


def run(monkeypatch, checks, *options):
    monkeypatch.setattr(command, "examine", lambda run_dir, quick: iter(checks))
    return CliRunner().invoke(command.doctor, options)


def test_exit_code_follows_the_worst_verdict(monkeypatch):
    fine = [Finding("cores", "ok", "2 usable of 2"), Finding("bf16", "note", "[none]", "Use fp32.")]
    result = run(monkeypatch, fine)
    assert result.exit_code == 0 and "[none]" in result.output and "Use fp32." in result.output
    result = run(monkeypatch, [*fine, Finding("network", "problem", "none is up", "ip link")])
    assert result.exit_code == 1 and "1 problem" in result.output


def test_json_is_one_object_on_one_line(monkeypatch):
    result = run(monkeypatch, [Finding("cores", "note", "1 of 2", "taskset")], "--json", "--quick")
    (line,) = result.output.splitlines()
    assert json.loads(line) == {
        "verdict": "note",
        "checks": [{"name": "cores", "verdict": "note", "value": "1 of 2", "advice": "taskset"}],
        "exit_code": 0,
    }
