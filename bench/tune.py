"""Trials per minute of a study of the digits recipe, two at a time, against joblib and Ray Tune.

The peers draw by Optuna's same sampler and train by a loop written by hand: joblib's in processes
that stay warm between trials, Ray Tune's as it starts them. Nothing is pruned in any arm, so that
all train the same number of steps. The clock runs from the first draw to the end of the last trial,
in all arms; the whole command, with the start of Python and torch, is in the note, and so is the
best value after a quarter, half and all of that time.
"""

import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import commands, harness
from bench.digits_by_hand import told, train_by_hand
from bench.harness import Row

RECIPE = harness.ROOT / "recipes" / "digits.py"
NUM_PARALLEL = 2
FLOORS = {"joblib": 0.95, "ray": 2.0}
SPACE = "lr=log:1e-3..0.2 channels=8|16"
PATIENCE_S = 1800.0


class Study(NamedTuple):
    """When each trial ended, since the first was drawn, and its value; in the order of ends."""

    ends: list[tuple[float, float]]
    whole_s: float

    @property
    def per_minute(self) -> float:
        return 60 * len(self.ends) / self.ends[-1][0]

    def best_after(self, share: float) -> float | None:
        """The least value among trials that ended within a share of the time."""
        done = [value for at, value in self.ends if at <= share * self.ends[-1][0]]
        return min(done, default=None)


class Size(NamedTuple):
    num_trials: int
    num_steps: int


def drawn(trial: Any) -> dict[str, Any]:
    """The space as Optuna's users write it; the same as SPACE."""
    return {
        "lr": trial.suggest_float("lr", 1e-3, 0.2, log=True),
        "channels": trial.suggest_categorical("channels", [8, 16]),
    }


def by_joblib(size: Size) -> Study:
    """Optuna asked and told here, trials in two processes that joblib keeps warm."""
    import joblib
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    workers = joblib.Parallel(
        n_jobs=NUM_PARALLEL, pre_dispatch=NUM_PARALLEL, return_as="generator_unordered"
    )
    list(workers(joblib.delayed(told)(-1, {"lr": 0.1, "channels": 8}, 2) for _ in range(4)))
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))

    def asked() -> Iterator[Any]:
        for _ in range(size.num_trials):
            trial = study.ask()
            yield joblib.delayed(told)(trial.number, drawn(trial), size.num_steps)

    started, ends = time.monotonic(), []
    for number, value in workers(asked()):
        study.tell(number, value)
        ends.append((time.monotonic() - started, value))
    return Study(ends, time.monotonic() - started)


def by_shoal(size: Size) -> Study:
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        started = time.monotonic()
        done = subprocess.run(
            commands.shoal(
                *("tune", f"{RECIPE}:small", "--space", SPACE, "--run-dir", "study"),
                *("--trials", str(size.num_trials), "--parallel", str(NUM_PARALLEL)),
                *("--set", f"steps={size.num_steps}", "--json"),
            ),
            cwd=folder,
            env=harness.child_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        whole_s = time.monotonic() - started
        if done.returncode:
            raise harness.ArmFailed(f"`shoal tune` ended with {done.returncode}:\n{done.stderr}")
        journal = Path(folder) / json.loads(done.stdout.splitlines()[-1])["storage"]
        return Study(_ends_in(journal), whole_s)


def _ends_in(journal: Path) -> list[tuple[float, float]]:
    """Of the trials of a study, by the times that Optuna keeps."""
    import optuna

    backend = optuna.storages.journal.JournalFileBackend(str(journal))
    study = optuna.load_study(study_name="study", storage=optuna.storages.JournalStorage(backend))
    first = min(trial.datetime_start for trial in study.trials)
    ends = [((t.datetime_complete - first).total_seconds(), t.value) for t in study.trials]
    return sorted(ends)


def by_ray(size: Size) -> Study:
    """Ray Tune with its search by Optuna, two trials at a time."""
    import optuna
    import ray
    from ray import tune
    from ray.tune.search.optuna import OptunaSearch

    def trainable(config: dict[str, Any]) -> None:
        value = train_by_hand(config, size.num_steps)
        tune.report({"loss": value, "ended": time.time()})

    environment = {"PYTHONPATH": harness.child_environment()["PYTHONPATH"]}
    ray.init(
        num_cpus=NUM_PARALLEL,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": environment},
    )
    try:
        sampler = optuna.samplers.TPESampler(seed=0)
        search = OptunaSearch(space=drawn, metric="loss", mode="min", sampler=sampler)
        config = tune.TuneConfig(
            search_alg=search,
            num_samples=size.num_trials,
            max_concurrent_trials=NUM_PARALLEL,
            metric="loss",
            mode="min",
        )
        started, at = time.monotonic(), time.time()
        results = tune.Tuner(trainable, tune_config=config).fit()
        whole_s = time.monotonic() - started
        ends = sorted((r.metrics["ended"] - at, r.metrics["loss"]) for r in results)
        return Study(ends, whole_s)
    finally:
        ray.shutdown()


def measure(quick: bool) -> Iterator[Row]:
    size = Size(4, 40) if quick else Size(32, 210)
    missing = [name for name in ("optuna", "joblib") if importlib.util.find_spec(name) is None]
    if missing:
        for name, floor in FLOORS.items():
            yield Row(name=f"tune/{name}", floor=floor, note=f"{missing[0]} is not installed")
        return
    os.environ.update(harness.child_environment())  # for the processes of the peers
    studies: dict[str, list[Study]] = {"shoal": [], "joblib": [], "again": [], "ray": []}

    def arm(name: str, run: Any) -> Any:
        def once() -> float:
            studies[name].append(run(size))
            return studies[name][-1].per_minute

        return once

    arms = {"shoal": arm("shoal", by_shoal), "joblib": arm("joblib", by_joblib)}
    arms["again"] = arm("again", by_joblib)
    has_ray = importlib.util.find_spec("ray") is not None
    if has_ray:
        arms["ray"] = arm("ray", by_ray)
    rates = harness.interleave(arms, 1 if quick else 3, num_warm_up=0)
    yield _row("joblib", rates, studies)
    if has_ray:
        yield _row("ray", rates, studies)
    else:
        yield Row(name="tune/ray", floor=FLOORS["ray"], note="ray is not installed")


def _row(
    peer: str, rates: Mapping[str, Sequence[float]], studies: Mapping[str, Sequence[Study]]
) -> Row:
    against = harness.spread(harness.ratios(rates["shoal"], rates[peer]))
    control = harness.ratios(rates["again"], rates["joblib"])
    own, theirs = (harness.spread(rates[name]).median for name in ("shoal", peer))
    return Row(
        name=f"tune/{peer}",
        value=against.median,
        low=against.low,
        high=against.high,
        num_pairs=against.num_pairs,
        floor=FLOORS[peer],
        noise=harness.noise_of(control) if peer == "joblib" else 0.0,
        peer=f"{peer} {theirs:.1f} trials/min",
        ceiling="two loops that never stop",
        control=harness.spread(control).median,
        note=f"Shoal {own:.1f} trials/min, {_curve(studies['shoal'][-1])}, whole command "
        f"{studies['shoal'][-1].whole_s:.1f} s; {peer} {_curve(studies[peer][-1])}",
    )


def _curve(study: Study) -> str:
    """The best so far after a quarter, half and all of the time."""
    values = [study.best_after(share) for share in (0.25, 0.5, 1.0)]
    return "best " + " > ".join("-" if value is None else f"{value:.4f}" for value in values)


if __name__ == "__main__":
    harness.main(measure)
