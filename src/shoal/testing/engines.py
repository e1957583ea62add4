"""Tests that every engine must pass.

    class TestMine(EngineConformance):
        @pytest.fixture
        def engine(self):
            return MyEngine()

        recipe = "/a/file.py:function"  # with a parameter `pause`, seconds a step

A new engine gives these and inherits the tests. They are about what the verbs rely on: a job that
runs to its end, its output and exit code, one that fails, one that is stopped and saves itself, one
that is ended at once, the list of jobs, and ids that are not known. Jobs are tiny runs of one rank.
Cost: some seconds each, more where the engine takes its time.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shoal.cluster.engine import Engine, JobRequest, JobState
from shoal.errors import RUN_AGAIN, UsageError

ENDED = ("stopped", "done", "failed")


class EngineConformance:
    """Inherit, and give `engine` and `recipe`."""

    recipe = ""
    limit_s = 120.0  # for a job to start, and again to end
    more: tuple[str, ...] = ()  # options of `shoal train`, as in ("--on", "slurm")
    unknown = "999999"  # an id that no job has

    @pytest.fixture
    def engine(self) -> Engine:
        raise NotImplementedError("return the engine under test")

    @pytest.fixture(autouse=True)
    def end_jobs(self, engine: Engine) -> Iterator[None]:
        """Whatever a test leaves is ended."""
        yield
        for job in engine.jobs():
            if job.state not in ENDED:
                number = job.job.rpartition(":")[2]
                engine.stop(number, now=True)
                self.wait(engine, number, *ENDED)

    def request(self, tmp_path: Path, steps: int = 4, **settings: Any) -> JobRequest:
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        chosen = {"steps": steps, "pause": 0.0} | settings
        words = [word for name, value in chosen.items() for word in ("--set", f"{name}={value}")]
        place = ("--run-dir", str(run_dir), "--resume")
        return JobRequest(
            name="tiny",
            arguments=(self.recipe, *words, "--plan", "data=1", *self.more, *place),
            directory=str(tmp_path),
            run_dir=str(run_dir),
        )

    def wait(self, engine: Engine, job: str, *states: str) -> JobState:
        deadline = time.monotonic() + self.limit_s
        while (found := engine.state(job)).state not in states:
            assert time.monotonic() < deadline, f"{found} was not {states} in time"
            assert found.state not in ENDED, f"{found} ended: {self.output(engine, job)}"
            time.sleep(0.1)
        return found

    def output(self, engine: Engine, job: str) -> list[str]:
        return list(engine.output(job, follow=False))

    def wait_for_steps(self, engine: Engine, job: str, tmp_path: Path) -> None:
        """Until it runs and has made a step."""
        self.wait(engine, job, "running")
        deadline = time.monotonic() + self.limit_s
        metrics = tmp_path / "run" / "metrics.jsonl"
        while not metrics.exists() or not metrics.read_bytes():
            assert time.monotonic() < deadline, self.output(engine, job)
            time.sleep(0.1)

    def test_a_job_runs_to_its_end(self, engine: Engine, tmp_path: Path) -> None:
        request = self.request(tmp_path)
        number = engine.submit(request)
        found = self.wait(engine, number, "done")
        assert found.exit_code == 0 and found.run_dir == request.run_dir
        assert found.job.endswith(f":{number}") and found.name == "tiny"
        assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
        assert any("done: 4 steps" in line for line in engine.output(number, follow=True))

    def test_a_job_that_fails_says_so(self, engine: Engine, tmp_path: Path) -> None:
        number = engine.submit(self.request(tmp_path, unknown_setting=1))
        found = self.wait(engine, number, "failed")
        assert found.exit_code == 2
        assert any("unknown_setting" in line for line in engine.output(number, follow=False))

    def test_a_job_that_is_stopped_saves_and_goes_on(self, engine: Engine, tmp_path: Path) -> None:
        number = engine.submit(self.request(tmp_path, steps=4000, pause=0.02))
        self.wait_for_steps(engine, number, tmp_path)
        engine.stop(number, now=False)
        found = self.wait(engine, number, "stopped")
        assert found.exit_code in (RUN_AGAIN, None)
        assert list((tmp_path / "run" / "checkpoints").iterdir())
        made = len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
        again = engine.submit(self.request(tmp_path, steps=made + 2, pause=0.02))
        assert again != number
        self.wait(engine, again, "done")
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        steps = [msgspec.json.decode(line)["step"] for line in lines]
        assert steps == list(range(1, made + 3))

    def test_a_job_is_ended_at_once(self, engine: Engine, tmp_path: Path) -> None:
        number = engine.submit(self.request(tmp_path, steps=4000, pause=0.02))
        self.wait_for_steps(engine, number, tmp_path)
        engine.stop(number, now=True)
        self.wait(engine, number, "stopped", "failed")
        engine.stop(number, now=True)  # of one that has ended, it does nothing

    def test_jobs_are_listed(self, engine: Engine, tmp_path: Path) -> None:
        number = engine.submit(self.request(tmp_path, steps=4000, pause=0.02))
        listed = {job.job.rpartition(":")[2]: job for job in engine.jobs()}
        assert listed[number].is_active
        assert listed[number].run_dir == str(tmp_path / "run")

    def test_what_would_be_submitted_can_be_read(self, engine: Engine, tmp_path: Path) -> None:
        text = engine.describe(self.request(tmp_path))
        assert self.recipe in text and "--resume" in text
        assert not engine.jobs() or all(job.state in ENDED for job in engine.jobs())

    def test_an_unknown_job_is_refused(self, engine: Engine) -> None:
        for ask in (
            engine.state,
            lambda job: engine.stop(job, now=False),
            lambda job: list(engine.output(job, follow=False)),
        ):
            with pytest.raises(UsageError, match=self.unknown):
                ask(self.unknown)
