"""Reading a run runs none of its code: a directory may be anybody's, and may name any recipe."""

import json
import os
from pathlib import Path

import pytest

from shoal.cli.main import run_here
from shoal.cluster.invitation import Invitation, write_invitation
from shoal.comm.wire import new_keys
from shoal.data.ledger import mark
from shoal.data.orders import Sequential, Shuffled, Weighted, order_name
from shoal.training.lineage import batches_of, read_record
from tests.unit.checkpoint.made import make, tensors

# What the run names, in three ways: by file, by module, and by modules that commands import.
TRAP = "import pathlib\npathlib.Path(__file__ + '.was-run').touch()\n"
RECIPE = """
import torch, shoal

def small(weights: bool = False):
    data = shoal.data.tensors(torch.zeros(40, 1), torch.zeros(40, 1))
    data = shoal.data.weighted(data, range(40)) if weights else data
    return shoal.Run(model=lambda: torch.nn.Linear(1, 1), loss=torch.nn.functional.mse_loss,
                     optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=data,
                     batch_size=4, steps=3)
"""
ORDERS = {
    "shuffled": Shuffled(40),
    "in order": Sequential(40),
    "weighted": Weighted(range(40), 40),
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of somebody else's, and in it the working directory, full of traps."""
    folder = tmp_path / "theirs"
    make(folder / "run" / "checkpoints", tensors())
    for name in ("r.py", "trap.py", "torch.py", "pip.py", "sitecustomize.py"):
        (folder / name).write_text(TRAP)
    (tmp_path / "mine.py").write_text(RECIPE)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    describe(folder / "run", "shuffled", "r.py:f")
    return folder / "run"


def describe(run: Path, order: str, recipe: str, **settings: str) -> None:
    values = {"batch_size": 4, "seed": 0, "end": "drop", "data_order": order_name(ORDERS[order], 0)}
    fields = {name: {"value": value, "from": "recipe"} for name, value in values.items()}
    described = {"recipe": recipe, "settings": settings, "num_samples": 40, "run": fields}
    (run / "run.json").write_text(json.dumps({"plan": "data=2", **described}))
    (run / "metrics.jsonl").write_text('{"step": 1}\n')

    class Data:
        def __init__(self) -> None:
            self.order = ORDERS[order]

        def __len__(self) -> int:
            return 40

    batches = batches_of(read_record(run), Data())
    lines = [{"step": step + 1, "mark": mark(batches.at(step).ids)} for step in range(3)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def traps_that_ran(run: Path) -> list[str]:
    return [path.name for path in run.parent.rglob("*.was-run")]


@pytest.mark.parametrize("recipe", ["r.py:f", "trap:f"])
@pytest.mark.parametrize(
    "words",
    [
        ["data", "audit", "run"],
        ["data", "audit", "run", "--json"],
        ["data", "show", "run"],
        ["data", "verify", "run"],
        ["checkpoint", "list", "run"],
        ["checkpoint", "show", "run/checkpoints/step-00000020"],
        ["checkpoint", "verify", "run"],
        ["checkpoint", "diff", *["run/checkpoints/step-00000020"] * 2],
        ["checkpoint", "prune", "run", "--keep", "last=1", "--dry-run"],
        ["checkpoint", "convert", "run", "copy"],
        ["checkpoint", "export", "run", "weights", "--to", "safetensors"],
        ["checkpoint", "export", "run", "weights", "--to", "dcp"],
        ["resize", "run", "data=3"],
        ["join", "run"],
        ["train", "../mine.py:small", "--resume", "--run-dir", "run"],
    ],
)
def test_no_verb_loads_what_a_run_names(run: Path, recipe: str, words: list[str]) -> None:
    describe(run, "shuffled", recipe)
    assert run_here(words) in (0, 2)
    assert not traps_that_ran(run)


@pytest.mark.parametrize("order", ORDERS)
def test_an_audit_asks_for_the_recipe_only_where_it_needs_one(
    run: Path, capsys: pytest.CaptureFixture[str], order: str
) -> None:
    describe(run, order, "r.py:f", weights="1")
    code, said = run_here(["data", "audit", "run"]), capsys.readouterr()
    if order == "weighted":
        assert code == 2 and "--recipe file.py:function" in said.err and "'r.py:f'" in said.err
        # The settings are the run's, unless others are given.
        assert run_here(["data", "audit", "run", "--recipe", "../mine.py:small"]) == 0
        words = ["data", "audit", "run", "--recipe", "../mine.py:small", "--set", "weights=0"]
        assert run_here(words) == 1
    else:
        assert code == 0 and "3 steps were made of the samples" in said.out
    assert not traps_that_ran(run)
    assert run_here(["data", "audit", "run", "--set", "weights=1"]) == 2


def test_an_audit_without_a_recipe_finds_a_wrong_mark(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[1]["mark"] += 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert run_here(["data", "audit", "run"]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's file")
@pytest.mark.parametrize("what", ["file", "directory", "link"])
def test_nobody_joins_by_an_invitation_of_another_user(
    run: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Whose recipe this host would load: its mode alone says nothing about who wrote it."""
    write_invitation(Invitation("tcp://127.0.0.1:81", new_keys(), str(run.absolute())), run)
    if what == "link":
        (run / "join.json").rename(run / "elsewhere.json")
        (run / "join.json").symlink_to("elsewhere.json")
    else:
        os.chown(run / "join.json" if what == "file" else run, 65534, 65534)
    assert run_here(["join", str(run)]) == 2
    said = capsys.readouterr().err
    assert ("is a link" if what == "link" else "belongs to user 65534") in said
    assert not traps_that_ran(run)
