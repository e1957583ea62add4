"""Tuning: which learning rate and which width? A study from Python, two trials at a time.

    python examples/tuning.py

What it shows: `shoal.tune` draws settings of a recipe by Optuna, trains each as a run of its own,
and stops those early that fall behind (`pruner`). All trials are forked from one process that has
loaded the recipe and its data. The same call with the same `run_dir` goes on with a study that was
interrupted. Needs the extra `tune`.
"""

from pathlib import Path

import shoal

RECIPE = f"{Path(__file__).parents[1] / 'recipes/digits.py'}:small"


def main() -> None:
    found = shoal.tune(
        RECIPE,
        {"lr": "log:1e-3..0.3", "channels": [4, 8]},
        trials=8,
        settings={"steps": 60, "evaluate_every": 20},
        metric="accuracy:max",
        pruner="median",
    )
    assert found.best is not None  # or tune() would have raised
    for trial in found.trials:
        value = "-" if trial.value is None else f"{trial.value:.1%}"
        lr, channels = trial.settings["lr"], trial.settings["channels"]
        print(f"trial {trial.trial}  {trial.state:8}  {value:6}  lr {lr:.4f}  channels {channels}")
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importances.items())
    print(f"best: trial {found.best.trial} with {found.best.value:.1%}; what matters: {shares}")
    count = sum(weights.numel() for weights in found.model().parameters())
    print(f"its model has {count:,} weights; the study is in {found.study}")


if __name__ == "__main__":
    main()
