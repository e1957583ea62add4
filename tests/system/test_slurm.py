"""Runs on a real Slurm of four nodes on this machine: queued, stopped, preempted, requeued.

Each run is compared with the same one that nothing disturbed: it must end with the same bits.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from shoal.cluster.engine import JobRequest, JobState
from shoal.cluster.on_slurm import SlurmEngine
from shoal.errors import UsageError
from shoal.testing.engines import EngineConformance
from tests.support.slurm import CORES, NODES, Slurm, start_slurm

ROOT = Path(__file__).parents[2]
TINY = ROOT / "tests" / "faults" / "tiny.py"
LIMIT_S = 200.0
SHOAL = [sys.executable, "-m", "shoal"]
ALONE = ("--spares", "0")  # which would only make the tests slower

pytestmark = pytest.mark.timeout(400)
full = pytest.mark.full


_clusters: list[Slurm] = []


@pytest.fixture(scope="module")
def cluster() -> Iterator[Slurm]:
    with start_slurm() as slurm:
        _clusters.append(slurm)
        yield slurm
        _clusters.remove(slurm)


@pytest.fixture(scope="session")
def kept_processes() -> Callable[[], frozenset[int]]:
    """The daemons, some of which a test replaces."""
    return lambda: frozenset(pid for slurm in _clusters for pid in slurm.pids)


@pytest.fixture(autouse=True)
def slurm(cluster: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slurm]:
    """With nothing left of the test before, and nothing of this one."""
    monkeypatch.setenv("SLURM_CONF", cluster.conf)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))  # an agent that is killed leaves files
    yield cluster
    cluster.clear()


@pytest.fixture
def engine() -> SlurmEngine:
    return SlurmEngine()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], bytes]:
    """The weights of the tiny run after so many steps, on two ranks of this machine."""
    known: dict[int, bytes] = {}

    def train(steps: int) -> bytes:
        if steps not in known:
            run_dir = tmp_path_factory.mktemp("expected") / "run"
            words = [f"{TINY}:mlp", "--plan", "data=2", *ALONE, "--set", f"steps={steps}"]
            command = [*SHOAL, "train", *words, "--set", "pause=0", "--run-dir", str(run_dir)]
            subprocess.run(command, check=True, capture_output=True, timeout=LIMIT_S)
            known[steps] = (run_dir / "model.safetensors").read_bytes()
        return known[steps]

    return train


def request(run_dir: Path, *words: str, nodes: int = 1, **changes: object) -> JobRequest:
    settings = {"steps": 60, "pause": 0.1, "save_every": 5} | changes.pop("settings", {})  # type: ignore[call-overload]
    sets = [word for item in settings.items() for word in ("--set", "{}={}".format(*item))]
    where = ("--on", "slurm", "--run-dir", str(run_dir), "--resume")
    return JobRequest(
        name="tiny",
        arguments=(f"{TINY}:mlp", "--plan", "data=2", *ALONE, *sets, *words, *where),
        directory=str(run_dir.parent),
        run_dir=str(run_dir),
        num_hosts=nodes,
        **changes,  # type: ignore[arg-type]
    )


def wait_for(engine: SlurmEngine, job: str, *states: str) -> JobState:
    deadline = time.monotonic() + LIMIT_S
    while (found := engine.state(job)).state not in states:
        is_late = time.monotonic() > deadline or not found.is_active
        assert not is_late, "\n".join([str(found), *engine.output(job, follow=False)])
        time.sleep(0.2)
    return found


def steps_of(run_dir: Path) -> list[int]:
    """The steps of the run, in the order in which they were made."""
    metrics = run_dir / "metrics.jsonl"
    whole = metrics.read_bytes().rpartition(b"\n")[0] if metrics.exists() else b""
    return [msgspec.json.decode(line)["step"] for line in whole.splitlines()]


def wait_for_step(engine: SlurmEngine, job: str, run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while max(steps_of(run_dir), default=0) < step:
        said = list(engine.output(job, follow=False))[-30:]
        assert time.monotonic() < deadline and engine.state(job).is_active, said
        time.sleep(0.1)


def num_starts(run_dir: Path) -> int:
    """How often the command was started."""
    return (run_dir / "output.log").read_text().count("parameters, plan data=2")


def weights(run_dir: Path) -> bytes:
    return (run_dir / "model.safetensors").read_bytes()


def test_a_run_is_submitted_and_done(tmp_path: Path) -> None:
    """By the verbs, as a user would; the one that is quick."""
    run_dir = tmp_path / "a run's directory, 100%"
    recipe = f"{ROOT}/tests/system/tiny.py:line"
    words = [recipe, "--plan", "data=1", "--on", "slurm:partition=main", "--time", "90m"]
    command = [*SHOAL, "submit", *words, *ALONE, "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["job"].startswith("slurm:") and answer["run_dir"] == str(run_dir)
    engine = SlurmEngine()
    found = wait_for(engine, answer["job"].rpartition(":")[2], "done")
    assert (found.exit_code, found.run_dir) == (0, str(run_dir))
    assert any("done: 8 steps" in line for line in engine.output(found.job, follow=True))
    assert "#SBATCH --time=01:30:00" in (run_dir / "shoal.sbatch").read_text()


@full
class TestSlurmEngine(EngineConformance):
    recipe = f"{ROOT}/tests/system/tiny.py:line"
    more = ("--on", "slurm", *ALONE)
    limit_s = LIMIT_S

    @pytest.fixture
    def engine(self) -> SlurmEngine:
        return SlurmEngine()


@full
def test_two_nodes_train_the_same_bits(
    engine: SlurmEngine, tmp_path: Path, expected: Callable[[int], bytes]
) -> None:
    run_dir = tmp_path / "run"
    job = engine.submit(request(run_dir, "--nodes", "2", nodes=2, settings={"pause": 0.0}))
    wait_for(engine, job, "done")
    assert weights(run_dir) == expected(60)
    assert "host 1" in (run_dir / "output.log").read_text()


@full
def test_a_preempted_run_saves_and_goes_on_by_itself(
    engine: SlurmEngine, slurm: Slurm, tmp_path: Path, expected: Callable[[int], bytes]
) -> None:
    run_dir = tmp_path / "run"
    job = engine.submit(request(run_dir, nodes=2, settings={"save_every": 1000}))
    wait_for_step(engine, job, run_dir, 10)
    wrap = ("--wrap", "sleep 5", "--output", "/dev/null")
    slurm.run("sbatch", "--partition=urgent", "--nodes=4", "--cpus-per-task=2", *wrap)
    waiting = wait_for(engine, job, "queued")
    assert waiting.reason and waiting.exit_code is None
    assert len(list((run_dir / "checkpoints").iterdir())) == 1
    assert wait_for(engine, job, "done").exit_code == 0
    assert weights(run_dir) == expected(60) and num_starts(run_dir) == 2
    assert steps_of(run_dir) == list(range(1, 61)), "steps were made twice, or left out"


@full
def test_before_the_time_limit_a_run_saves_and_goes_on_by_itself(
    engine: SlurmEngine, tmp_path: Path, expected: Callable[[int], bytes]
) -> None:
    """Slurm sends the signal up to 30 s before it is due, which is 40 s before the limit."""
    run_dir = tmp_path / "run"
    slow = {"pause": 0.7, "save_every": 1000, "steps": 140}
    job = engine.submit(request(run_dir, time_limit_s=120.0, settings=slow))
    wait_for(engine, job, "running")
    wait_for(engine, job, "queued")
    assert 0 < len(steps_of(run_dir)) < 140
    wait_for(engine, job, "done")
    assert weights(run_dir) == expected(140) and num_starts(run_dir) >= 2
    assert steps_of(run_dir) == list(range(1, 141))


@full
def test_a_node_that_is_lost_has_the_run_requeued(
    engine: SlurmEngine, slurm: Slurm, tmp_path: Path, expected: Callable[[int], bytes]
) -> None:
    run_dir = tmp_path / "run"
    job = engine.submit(request(run_dir, nodes=2))
    wait_for_step(engine, job, run_dir, 12)
    nodes = slurm.run("squeue", "-h", "-j", job, "-o", "%N").strip()
    lost = slurm.run("scontrol", "show", "hostnames", nodes).split()[1]
    slurm.lose(lost)
    try:
        wait_for(engine, job, "queued")
        wait_for(engine, job, "done")
        assert weights(run_dir) == expected(60) and num_starts(run_dir) == 2
    finally:
        slurm.bring_back(lost)


@full
def test_what_is_cancelled_is_not_requeued(
    engine: SlurmEngine, slurm: Slurm, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    job = engine.submit(request(run_dir))
    wait_for_step(engine, job, run_dir, 5)
    slurm.run("scancel", job)
    assert wait_for(engine, job, "stopped").exit_code in (75, 143)
    time.sleep(2)
    assert engine.state(job).state == "stopped"


@full
def test_a_queued_job_is_stopped(engine: SlurmEngine, slurm: Slurm, tmp_path: Path) -> None:
    wrap = ("--wrap", "sleep 60", "--output", "/dev/null")
    slurm.run("sbatch", "--partition=urgent", "--nodes=4", "--cpus-per-task=2", *wrap)
    job = engine.submit(request(tmp_path / "run"))
    second = engine.submit(request(tmp_path / "second", priority=2))
    assert engine.state(job).state == "queued" and engine.state(second).priority == 2
    assert [found.job for found in engine.jobs()][:2] == [f"slurm:{second}", f"slurm:{job}"]
    with pytest.raises(UsageError, match=rf"belongs to slurm:{job}, which is queued"):
        engine.submit(request(tmp_path / "run"))
    engine.stop(job, now=False)
    assert wait_for(engine, job, "stopped").exit_code == 143


@full
def test_what_slurm_refuses_is_said_and_nothing_is_left(slurm: Slurm, tmp_path: Path) -> None:
    asked = f"Asked for: nodes 1, cores of each 1. Nodes there: {NODES} of {CORES} CPUs in main"
    with pytest.raises(UsageError, match=rf"^sbatch failed: .*nvalid partition.*{asked}"):
        SlurmEngine("partition=nope").submit(request(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
    number = slurm.run("sbatch", "--parsable", "--wrap", "true", "-o", "/dev/null").strip()
    with pytest.raises(UsageError, match="was not submitted by `shoal submit`"):
        SlurmEngine().state(number)


@full
@pytest.mark.parametrize("node", [True, False], ids=["in a step", "from the login node"])
def test_agents_start_inside_an_allocation(
    node: bool, tmp_path: Path, expected: Callable[[int], bytes]
) -> None:
    """By salloc, as the page on Slurm shows; the shell may be on a node of it, or not."""
    run_dir = tmp_path / "run"
    words = request(run_dir, settings={"pause": 0.0}).arguments
    step = ["srun", "--nodes=1", "--ntasks=1", "--overlap"] if node else []
    command = ["salloc", "--nodes=2", "--ntasks-per-node=1", *step, *SHOAL, "train", *words]
    done = subprocess.run(command, capture_output=True, timeout=LIMIT_S, check=False, text=True)
    assert done.returncode == 0, done.stderr
    assert weights(run_dir) == expected(60)


@full
def test_an_array_of_runs_as_the_page_shows(slurm: Slurm, tmp_path: Path) -> None:
    """The batch file of docs/how-to/slurm.md, with names of this test in it."""
    page = (ROOT / "docs" / "how-to" / "slurm.md").read_text()
    (text,) = re.findall(r"```bash\n(#!/bin/bash\n#SBATCH --array.*?)```", page, re.S)
    recipe = f"{ROOT}/tests/system/tunable.py:line"
    shown = "shoal train recipes/digits.py:small"
    assert shown in text
    text = text.replace(shown, " ".join([*SHOAL, "train", recipe]))
    file = tmp_path / "array.sbatch"
    file.write_text(text)
    environment = os.environ | slurm.environment
    command = ["sbatch", "--parsable", "--wait", str(file)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, timeout=LIMIT_S, check=False)
    outputs = {path.name: path.read_text() for path in tmp_path.glob("*.out")}
    assert done.returncode == 0, outputs
    assert len(list(tmp_path.glob("runs/*/model.safetensors"))) == 3
