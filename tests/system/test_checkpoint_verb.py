"""`shoal checkpoint` on the command line: what it prints, and its exit codes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shoal.cli.main import run_here
from tests.unit.checkpoint.conftest import Said
from tests.unit.checkpoint.made import make, tensors

WITHOUT_TORCH = """
import sys
from shoal.cli.main import run_here
code = run_here(sys.argv[1:])
assert not {"torch", "numpy"} & set(sys.modules), "torch was imported"
sys.exit(code)
"""
LOSSES = {10: 0.9, 20: 0.3, 30: 0.6, 40: 0.5}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with four checkpoints, that of step 20 the best."""
    for step, loss in LOSSES.items():
        add(tmp_path / "run", step, loss)
    return tmp_path / "run"


def add(run_dir: Path, step: int, loss: float) -> None:
    name = f"step-{step:08d}"
    make(run_dir / "checkpoints", tensors(step), name=name, step=step, metrics={"loss": loss})


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


def steps(run_dir: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run_dir / "checkpoints").iterdir())


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("words", [["list"], ["verify"], ["prune", "--keep", "last=1", "--yes"]])
def test_no_torch_is_needed(run_dir: Path, words: list[str]) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, "checkpoint", *words, str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4


def test_help_explains(capsys) -> None:
    said = Said(capsys, "--help")
    assert said.code == 0 and "shoal checkpoint prune" in said.out
    for verb in ("list", "show", "verify", "diff", "prune", "convert", "export", "import"):
        assert Said(capsys, verb, "--help").code == 0
    assert run_here(["--help"]) == 0
    assert "List, check and compare checkpoints" in capsys.readouterr().out


def test_list_by_every_kind_of_path(run_dir: Path, capsys, monkeypatch) -> None:
    said = Said(capsys, "list", run_dir)
    head, *rows = said.out.splitlines()
    assert said.code == 0 and len(rows) == 4 and head.split()[0] == "name"
    assert rows[1].split()[:4] == ["step-00000020", "20", "240", "data=2"]
    assert "loss 0.3" in rows[1] and rows[1].endswith("sealed")
    assert Said(capsys, "list", run_dir / "checkpoints").out == said.out
    assert "step-00000030" in Said(capsys, "list", at(run_dir, 30)).out
    monkeypatch.chdir(at(run_dir, 30))
    assert "step-00000030" in Said(capsys, "list", ".").out


def test_list_says_what_is_not_sealed(run_dir: Path, capsys) -> None:
    (at(run_dir, 20) / "manifest.sha256").unlink()
    flip(at(run_dir, 30) / "manifest.json", 100)
    (run_dir / "checkpoints" / ".saving-step-00000050-1").mkdir()
    said = Said(capsys, "list", run_dir, "--json").json()
    rows = {row["step"] or row["name"]: row for row in said["checkpoints"]}
    assert set(rows) == {10, "step-00000020", "step-00000030", 40}
    assert rows["step-00000020"]["problem"] == "manifest.sha256 is missing."
    assert "was changed" in rows["step-00000030"]["problem"]
    assert rows[10]["metrics"] == {"loss": 0.9} and rows[10]["plan"] == "data=2"
    assert rows[10]["bytes"] == sum(f.stat().st_size for f in at(run_dir, 10).iterdir())
    assert "manifest.sha256 is missing." in Said(capsys, "list", run_dir).out


def test_show(run_dir: Path, capsys) -> None:
    said = Said(capsys, "show", at(run_dir, 20))
    assert said.code == 0 and "8 tensors" in said.out and "loss" in said.out
    row = next(line.split() for line in said.out.splitlines() if "model.cut" in line)
    assert row == ["model.cut", "F32", "[8,", "6]", "192", "B", "2"]
    shown = Said(capsys, "show", at(run_dir, 20), "--tensors", "optimizer.*", "--json").json()
    assert [one["name"] for one in shown["tensors"]] == [
        "optimizer.cut.exp_avg",
        "optimizer.cut.step",
    ]
    assert shown["progress"]["step"] == 20 and shown["origin"]["plan"] == "data=2"
    assert shown["plain"] == {"plain.cut": {"lr": 0.1}} and len(shown["seal"]) == 64


def test_verify_names_every_fault(run_dir: Path, capsys) -> None:
    said = Said(capsys, "verify", run_dir)
    assert said.code == 0 and said.out.count("ok ") == 4 and "GB/s" in said.out
    flip(at(run_dir, 20) / "rank-00001.safetensors", -1)
    flip(at(run_dir, 20) / "rank-00000.safetensors", -1)
    (at(run_dir, 30) / "rank-00000.safetensors").unlink()
    said = Said(capsys, "verify", run_dir)
    assert said.code == 1 and said.out.count("ok ") == 2
    bad = [line for line in said.out.splitlines() if line.startswith("bad")]
    assert [line.split()[1] for line in bad] == ["step-00000020"] * 2 + ["step-00000030"]
    assert "rank-00000.safetensors: the bytes of" in bad[0] and "rank-00001" in bad[1]
    assert "rank-00000.safetensors is missing." in bad[2]
    assert "2 of 4 checkpoints are bad" in said.err


def test_diff(run_dir: Path, tmp_path: Path, capsys) -> None:
    assert Said(capsys, "diff", at(run_dir, 20), at(run_dir, 20)).code == 0
    said = Said(capsys, "diff", at(run_dir, 20), at(run_dir, 40))
    assert said.code == 1 and "progress.step: 20 in a, 40 in b" in said.out
    assert "model.count: 5 of 5 elements differ, by at most 20" in said.out
    found = Said(capsys, "diff", at(run_dir, 20), at(run_dir, 40), "--json").json()
    assert found["num_equal"] == 2  # the flags, and what is empty
    values = {one["name"]: one["values"] for one in found["tensors"]}
    assert values["model.count"]["largest_absolute"] == 20
    flip(at(run_dir, 40) / "rank-00000.safetensors", -1)
    said = Said(capsys, "diff", at(run_dir, 20), at(run_dir, 40))
    assert said.code == 2 and "rank-00000.safetensors" in said.err


def test_prune(run_dir: Path, capsys) -> None:
    rule = "last=1 best=loss"
    said = Said(capsys, "prune", run_dir, "--keep", rule, "--dry-run")
    assert said.code == 0 and steps(run_dir) == [10, 20, 30, 40]
    assert "goes  step-00000010" in said.out and "stays step-00000020" in said.out
    said = Said(capsys, "prune", run_dir, "--keep", rule)
    assert said.code == 2 and "--yes" in said.err and steps(run_dir) == [10, 20, 30, 40]
    said = Said(capsys, "prune", run_dir, "--keep", rule, "--yes")
    assert said.code == 0 and steps(run_dir) == [20, 40] and "2 removed, 2 stay" in said.out
    assert "Nothing to remove" in Said(capsys, "prune", run_dir, "--keep", rule, "--yes").out
    assert Said(capsys, "verify", run_dir).code == 0


def test_prune_never_takes_the_last_good_one(run_dir: Path, capsys) -> None:
    for step in (30, 40):  # 40 can be opened, and is found bad when its bytes are looked at
        flip(at(run_dir, step) / "rank-00000.safetensors", -1 if step == 40 else 20)
    said = Said(capsys, "prune", run_dir, "--keep", "last=1", "--yes")
    assert said.code == 0 and steps(run_dir) == [20, 30, 40]
    assert said.out.count("bad ") == 2 and "stays step-00000020" in said.out
    flip(at(run_dir, 20) / "rank-00000.safetensors", -1)
    said = Said(capsys, "prune", run_dir, "--keep", "last=1", "--yes")
    assert said.code == 1 and steps(run_dir) == [20, 30, 40] and "nothing was removed" in said.err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["list", "{run}/none"], "There is no"),
        (["list", "{run}/file"], "is not a directory"),
        (["list", "{run}/empty"], "holds no checkpoint"),
        (["verify", "{run}/empty"], "holds no checkpoint"),
        (["verify", "{run}/none"], "There is no"),
        (["diff", "{run}", "{run}"], "holds 4 checkpoints, and one is asked for"),
        (["show", "{run}/checkpoints/step-00000020", "--tensors", "model.cat"], "model.cut"),
        (["diff", "{run}/none", "{run}"], "There is no"),
        (["prune", "{run}", "--keep", "lost=3"], "Did you mean 'last'?"),
        (["prune", "{run}", "--keep", "best=lss"], "Did you mean 'loss'?"),
        (["prune", "{run}", "--keep", "last=1", "--yes", "--dry-run"], "contradict"),
        (["prune", "{run}"], "--keep"),
        (["lst", "{run}"], "lst"),
    ],
)
def test_bad_words_and_paths_are_refused(run_dir: Path, capsys, words, told: str) -> None:
    (run_dir / "file").touch()
    (run_dir / "empty").mkdir()
    said = Said(capsys, *(word.format(run=run_dir) for word in words))
    assert said.code == 2 and told in said.err and "Traceback" not in said.err
    assert steps(run_dir) == [10, 20, 30, 40]


def test_names_do_not_steer_the_terminal(tmp_path: Path, capsys) -> None:
    make(tmp_path, {"model.\x1b[31m": torch.ones(2), "model.\n": torch.ones(2)}, name="step-1")
    said = Said(capsys, "show", tmp_path / "step-1")
    assert said.code == 0 and "\x1b" not in said.out and "model.\\x1b[31m" in said.out


def test_a_bad_checkpoint_is_not_shown(run_dir: Path, capsys) -> None:
    os.truncate(at(run_dir, 20) / "manifest.json", 50)
    said = Said(capsys, "show", at(run_dir, 20))
    assert said.code == 2 and "manifest.json is not what manifest.sha256 says" in said.err
