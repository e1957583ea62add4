"""Run directories as `shoal train` leaves them, of any size, without training."""

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

BEGAN = 1_790_000_000.0


def step_line(step: int, ranks: int, draw: random.Random, **more: Any) -> dict[str, Any]:
    busy = [round(0.01 + draw.random() * 0.004, 6) for _ in range(ranks)]
    times = {"data": 0.001, "compute": busy[0] - 0.001, "exchange": 0.003}
    times["waiting"] = max(busy) - busy[0]
    return {
        "step": step,
        "loss": 2.0 / step + draw.random() * 0.1,
        "samples": 64,
        "rate": 0.002,
        "bytes_sent": 52_896,
        "times": times,
        "ranks": busy,
        "time": BEGAN + step * 0.02,
        **more,
    }


def event_lines(ranks: int) -> list[dict[str, Any]]:
    seats = [
        {"event": "seat", "time": BEGAN, "rank": rank, "pid": 100 + rank, "generation": 0}
        | {"host": 0, "log": f"rank-{rank:03d}.log"}
        for rank in range(ranks)
    ]
    started = {"event": "started", "time": BEGAN - 1, "member": 0, "pid": 100}
    return [started, *seats, {"event": "formed", "time": BEGAN, "generation": 0, "step": 0}]


def spent_lines(steps: list[dict[str, Any]], ranks: int, together: int = 10) -> Any:
    """What each rank says of its time, of some steps in one event."""
    for first in range(0, len(steps), together):
        part = steps[first : first + together]
        for rank in range(ranks):
            busy = sum(step["ranks"][rank] for step in part)
            spent = {"data": 0.001 * len(part), "exchange": 0.003 * len(part)}
            spent["compute"] = busy - spent["data"]
            spent["waiting"] = sum(max(step["ranks"]) for step in part) - busy
            told = {"event": "spent", "time": part[-1]["time"], "rank": rank, "steps": len(part)}
            yield told | {"since_s": 0.02 * len(part)} | spent


def loss_of_rank(rank: int, step: int, ms: float = 400.0) -> list[dict[str, Any]]:
    """A rank is killed after a step, and a spare takes its seat."""
    time = BEGAN + step * 0.02
    exited = {"event": "exited", "time": time, "rank": rank, "status": -9, "step": step}
    back = {"event": "recovered", "time": time + ms / 1000, "rank": rank, "generation": 1}
    return [
        {**exited, "how": "was killed by SIGKILL"},
        {**back, "cause": "rank 1 was killed", "step": step, "ms": ms, "spare": True},
    ]


def described(steps: int, ranks: int, **more: Any) -> dict[str, Any]:
    fields = {
        "steps": {"value": steps, "from": "--set"},
        "seed": {"value": 0, "from": "default"},
        "batch_size": {"value": 64, "from": "recipe"},
    }
    return {
        "recipe": "recipes/digits.py:small",
        "settings": {"steps": str(steps)},
        "plan": f"data={ranks} pieces={ranks}",
        "num_ranks": ranks,
        "num_steps": steps,
        "num_parameters": 12_954,
        "run": fields,
        **more,
    }


def write_lines(path: Path, lines: Iterable[Mapping[str, Any]], mode: str = "w") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def make_run(
    path: Path, steps: int = 50, ranks: int = 2, *, made: int | None = None, **more: Any
) -> Path:
    """A run that was asked for `steps`, and has made all or `made` of them."""
    draw = random.Random(0)
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(described(steps, ranks, **more)))
    numbers = range(1, (steps if made is None else made) + 1)
    lines = [step_line(step, ranks, draw) for step in numbers]
    write_lines(path / "metrics.jsonl", lines)
    write_lines(path / "events.jsonl", event_lines(ranks))
    write_lines(path / "spent.jsonl", spent_lines(lines, ranks))
    return path
