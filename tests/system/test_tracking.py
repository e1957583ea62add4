"""`shoal train --track`: real trackers get every step, and one that is gone costs no step."""

import csv
import importlib.util
import json
import os
import signal
import socket
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from shoal.events.metrics_writer import last_recorded_step
from shoal.testing.ranks import Pool
from tests.support.faults import Trained, Training, check_same, events, start
from tests.support.leaks import wait_until
from tests.support.servers import start_mlflow, start_prometheus
from tests.unit.events.test_trackers import (  # noqa: F401 (a fixture among them)
    free_port,
    read_wandb,
    wandb_is_there,
)

RECIPE = f"{Path(__file__).with_name('tiny.py')}:line"
SECRET = "a-password-of-no-worth"


def train(pool: Pool, run_dir: Path, track: str, *options: str, **settings: Any) -> Trained:
    options = (*options, "--track", track) if track else options
    return start(pool, RECIPE, run_dir, plan="data=2", settings=settings, options=options).wait()


def need(module: str) -> None:
    """Skip where it is not installed; not loaded here, since some leave files and threads."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")


def rows(run_dir: Path) -> dict[int, dict[str, str]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        found = [*csv.DictReader(file)]
    assert len({row["step"] for row in found}) == len(found)
    return {int(row["step"]): row for row in found}


def ask(url: str, **query: str) -> Any:
    with urllib.request.urlopen(f"{url}?{urllib.parse.urlencode(query)}", timeout=10) as answer:
        return json.loads(answer.read())


def test_csv_has_every_step_and_a_resumed_run_remembers_it(pool: Pool, tmp_path: Path) -> None:
    trained = train(pool, tmp_path / "run", "csv")
    assert trained.exit_code == 0, trained.errors
    losses = {record["step"]: record["loss"] for record in trained.steps()}
    assert {step: float(row["loss"]) for step, row in rows(trained.run_dir).items()} == losses
    again = train(pool, trained.run_dir, "", "--resume", steps=12)
    assert again.exit_code == 0, again.errors
    assert sorted(rows(trained.run_dir)) == [*range(1, 13)]
    assert json.loads((trained.run_dir / "run.json").read_text())["track"] == "csv"


def test_the_csv_is_whole_though_the_rank_that_wrote_it_was_killed(pool, tmp_path) -> None:
    trained = start(
        pool,
        RECIPE,
        tmp_path / "run",
        plan="data=2",
        settings={"steps": 40, "pause": 0.01},
        faults=["step.computed:kill:member=0:step=20"],
        options=["--track", "csv"],
    ).wait()
    assert trained.exit_code == 0, trained.errors
    losses = {record["step"]: record["loss"] for record in trained.steps()}
    assert {step: float(row["loss"]) for step, row in rows(trained.run_dir).items()} == losses


@pytest.mark.parametrize(
    ("track", "words"),
    [
        ("tensorbord", "Did you mean 'tensorboard'?"),
        ("prometheus:no", "no is not a port"),
        (f"mlflow:https://me:{SECRET}@host", "has a user or a password in it"),
    ],
)
def test_what_cannot_be_tracked_is_refused(pool: Pool, tmp_path: Path, track, words) -> None:
    trained = train(pool, tmp_path / "run", track)
    assert trained.exit_code == 2 and words in trained.errors and SECRET not in trained.errors
    assert not (tmp_path / "run").exists()


def test_a_port_that_is_taken_is_refused(pool: Pool, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        trained = train(pool, tmp_path / "run", f"prometheus:{taken.getsockname()[1]}")
    assert trained.exit_code == 2 and "cannot be listened on" in trained.errors


def test_steps_that_the_run_does_not_make_cannot_be_traced(pool: Pool, tmp_path: Path) -> None:
    trained = train(pool, tmp_path / "run", "", "--trace", "9:12")
    assert trained.exit_code == 2 and "the run has 8 steps" in trained.errors
    trained = train(pool, tmp_path / "run", "", "--trace", "x")
    assert trained.exit_code == 2 and "these are no steps" in trained.errors


def test_quiet_shows_how_it_ended_alone(pool: Pool, tmp_path: Path) -> None:
    trained = train(pool, tmp_path / "run", "", "--quiet", "--log-level", "debug")
    assert trained.exit_code == 0 and trained.errors.startswith("done: 8 steps"), trained.errors
    log = (trained.run_dir / "logs" / "rank-001.log").read_text()
    assert "DEBUG step 8: Times(data=" in log


def test_what_hosts_use_is_on_record(pool: Pool, tmp_path: Path) -> None:
    trained = train(pool, tmp_path / "run", "csv", steps=60, pause=0.04)
    use = trained.events("host-use")[0]
    assert use["host"] == 0 and 0 <= use["cpu_percent"] <= 100 and use["step"] > 0
    assert 0 < use["memory_bytes"] < use["memory_total_bytes"] and use["disk_free_bytes"] > 0
    tracked = [row for row in rows(trained.run_dir).values() if row["hosts/0/memory_bytes"]]
    assert float(tracked[0]["hosts/0/memory_bytes"]) == use["memory_bytes"]


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("is_slow", [False, True], ids=["gone", "silent"])
def test_a_server_that_is_gone_or_silent_costs_one_warning_and_no_step(
    pool: Pool, tmp_path: Path, is_slow: bool
) -> None:
    need("mlflow")
    plain = train(pool, tmp_path / "plain", "")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # which takes connections, no more
        port = silent.getsockname()[1] if is_slow else free_port()
        trained = start(
            pool,
            RECIPE,
            tmp_path / "run",
            plan="data=2",
            options=["--track", f"mlflow:http://127.0.0.1:{port}"],
        ).wait(100)
    check_same(trained, plain)
    assert trained.errors.count("The sink 'mlflow'") == 1, trained.errors
    assert len(trained.steps()) == 8


def start_long(pool: Pool, tmp_path: Path, track: str, **variables: str) -> Training:
    """A run that lasts until it is stopped, however long a tracker takes to open."""
    return start(
        pool,
        RECIPE,
        tmp_path / "run",
        plan="data=2",
        settings={"steps": 100_000, "pause": 0.05},
        options=["--track", track],
        environment=variables,
    )


def stop(training: Training) -> Trained:
    training.command.send_signal(signal.SIGINT)
    trained = training.wait(60)
    assert trained.exit_code == 75, trained.errors
    return trained


def losses_on(url: str, run_id: Path) -> dict[int, float]:
    """By step, as the server has them."""
    found = ask(
        f"{url}/api/2.0/mlflow/metrics/get-history",
        run_id=run_id.read_text(),
        metric_key="loss",
        max_results="25000",
    )
    return {metric["step"]: metric["value"] for metric in found.get("metrics", [])}


def check_on_mlflow(url: str, run_dir: Path, losses: dict[int, float]) -> None:
    """The server has each step's loss once, and says how the run ended."""
    path, api = run_dir / "mlflow" / "run-id", f"{url}/api/2.0/mlflow"
    assert losses_on(url, path) == losses
    run = ask(f"{api}/runs/get", run_id=path.read_text())["run"]
    assert run["info"]["status"] == "FINISHED"
    params = {one["key"]: one["value"] for one in run["data"]["params"]}
    assert params["batch_size"] == "8" and params["plan"].startswith("data=2")


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_real_mlflow_server_has_every_step(pool: Pool, tmp_path: Path) -> None:
    need("mlflow")
    with start_mlflow() as server:
        training = start_long(pool, tmp_path, f"mlflow:{server.url}")
        run_id = training.run_dir / "mlflow" / "run-id"
        assert wait_until(run_id.exists, 120)
        server.stop()  # for a while in which steps go on
        away = last_recorded_step(training.run_dir / "metrics.jsonl")
        training.wait_for_step(away + 20, 60)
        server.start()
        assert wait_until(lambda: max(losses_on(server.url, run_id), default=0) > away + 20, 120)
        trained = stop(training)
        losses = {record["step"]: record["loss"] for record in trained.steps()}
        assert trained.errors.count("The sink") <= 1  # and nothing is lost
        check_on_mlflow(server.url, trained.run_dir, losses)
        steps = len(losses) + 5
        again = train(pool, trained.run_dir, "", "--resume", steps=steps)
        assert again.exit_code == 0, again.errors
        losses = {record["step"]: record["loss"] for record in again.steps()}
        assert len(losses) == steps
        check_on_mlflow(server.url, again.run_dir, losses)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_a_real_prometheus_scrapes_the_run(pool: Pool, tmp_path: Path) -> None:
    need("prometheus_client")
    port = free_port()
    training = start(
        pool,
        RECIPE,
        tmp_path / "run",
        plan="data=2",
        settings={"steps": 2000, "pause": 0.02},
        options=["--track", f"prometheus:{port}"],
    )
    with start_prometheus(port) as server:

        def scraped() -> dict[str, float]:
            found = ask(f"{server.url}/api/v1/query", query='{__name__=~"shoal_.+",run="run"}')
            return {
                one["metric"]["__name__"] + one["metric"].get("name", ""): float(one["value"][1])
                for one in found["data"]["result"]
            }

        assert wait_until(lambda: scraped().get("shoal_step", 0) > 10, 60)
        values = scraped()
        assert values["shoal_samples"] == 8 and 0 < values["shoal_timescompute"] < 10
        assert wait_until(lambda: "shoal_hosts0/cpu_percent" in scraped(), 30)
        training.command.send_signal(2)
        assert training.wait().exit_code == 75


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("wandb_is_there")
def test_wandb_offline_has_every_step(pool: Pool, tmp_path: Path) -> None:
    training = start_long(pool, tmp_path, "wandb:a-project", WANDB_MODE="offline")
    assert wait_until(lambda: bool(read_wandb(training.run_dir)), 120)
    trained = stop(training)
    found = read_wandb(trained.run_dir)
    losses = {record["step"]: record["loss"] for record in trained.steps()}
    assert {step: values["loss"] for step, values in found.items()} == losses


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("wandb_is_there")
def test_no_secret_is_in_what_a_run_leaves(pool: Pool, tmp_path: Path) -> None:
    need("mlflow")
    names = ("MLFLOW_TRACKING_PASSWORD", "WANDB_API_KEY", "MLFLOW_TRACKING_TOKEN")
    secrets = dict.fromkeys(names, SECRET)
    track = f"wandb,mlflow:http://127.0.0.1:{free_port()}"
    training = start_long(pool, tmp_path, track, WANDB_MODE="offline", **secrets)
    assert wait_until(lambda: bool(read_wandb(training.run_dir)), 120)
    assert wait_until(lambda: bool(events(training.run_dir, "warning")), 120)
    trained = stop(training)
    assert "The sink 'mlflow' failed" in trained.errors
    assert SECRET not in trained.errors + trained.output
    for folder, _, files in os.walk(trained.run_dir):
        for name in files:
            assert SECRET.encode() not in (Path(folder) / name).read_bytes(), name
