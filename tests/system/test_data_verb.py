"""`shoal data` on the command line: what it prints, and its exit codes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from shoal.cli.main import run_here
from shoal.data.shard_files.reading import shards
from shoal.testing.ranks import Pool

RECIPE = """
import time
import torch
import shoal
from shoal.data import stalls

def pairs():
    return shoal.data.tensors(torch.arange(600.0).view(200, 3), torch.arange(200))

def run():
    return shoal.Run(model=lambda: torch.nn.Linear(3, 1), loss=lambda o, t: o.sum(),
                     optimizer=lambda named: torch.optim.SGD(named, lr=0.1), data=pairs(),
                     batch_size=10, steps=1)

def texts():
    return [({"text": "x" * i, "of": torch.ones(i)}, i) for i in range(9)]

def empty():
    return []

def fails():
    raise ValueError("no such thing")

class Bad:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        if index == 31:
            raise ValueError("a torn page")
        return torch.ones(2), index

def bad():
    return Bad()

class Hangs(Bad):
    def __getitem__(self, index):
        if index == 31:
            time.sleep(60)
        return torch.ones(2), index

def hangs():
    stalls.FIRST_S, stalls.LIMIT_S, stalls.LIMIT_PER_SAMPLE_S = 0.2, 1.0, 0.0
    return Hangs()

def nothing():
    return 3
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "recipe.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.py"


class Said:
    """A command's exit code and words."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: object):
        capsys.readouterr()
        self.code = run_here(["data", *map(str, words)])
        self.out, self.err = capsys.readouterr()

    def json(self) -> dict:
        return json.loads(self.out)


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_that_hangs_is_told_of_and_ends_the_build(
    pool: Pool, recipe: Path, tmp_path: Path, workers: int
) -> None:
    words = ["data", "build", f"{recipe}:hangs", "out", "--workers", str(workers)]
    errors = tmp_path / "errors"
    output = tmp_path / "output"
    command = pool.start(run_here, words, output=output, errors=errors, directory=tmp_path)
    assert command.wait() == 1
    *told, last = errors.read_text().splitlines()
    assert 1 <= len(told) <= 3 and all("waiting for data since" in line for line in told)
    assert all(line.endswith("s: sample 31") for line in told)
    assert last.startswith("shoal: sample 31: nothing came for 1 s, which is the limit.")
    assert not (tmp_path / "out").exists()


def test_help_explains(capsys) -> None:
    said = Said(capsys, "--help")
    assert said.code == 0 and "shoal data build" in said.out
    for verb in ("build", "show", "verify"):
        assert Said(capsys, verb, "--help").code == 0


@pytest.mark.parametrize("function", ["pairs", "run"])
def test_build_show_and_verify(recipe: Path, capsys, function: str) -> None:
    said = Said(capsys, "build", f"recipe.py:{function}", "out", "--workers", "2")
    assert said.code == 0 and "200 samples in rows of 24 bytes" in said.out
    assert len(shards("out")) == 200
    said = Said(capsys, "show", "out", "--sample", "2")
    assert said.code == 0 and "sample[0]: tensor of float32 [3]" in said.out
    assert "(torch.float32 [3] [6, 7, 8], torch.int64 [] [2])" in said.out
    shown = Said(capsys, "show", "out", "--json").json()
    assert (shown["samples"], shown["layout"], shown["shards"]) == (200, "rows", 1)
    assert shown["origin"]["source"].startswith(f"recipe.py:{function} sha256 ")
    said = Said(capsys, "verify", "out")
    assert said.code == 0 and re.search(r"^ok   out  .*B, [\d.]+ \w?B/s$", said.out, re.M)
    flip(Path("out/shard-00000.bin"), 5)
    said = Said(capsys, "verify", "out")
    assert said.code == 1 and said.out.startswith("bad  out  shard-00000.bin: the bytes 0 to")
    said = Said(capsys, "show", "out")  # all but the sample
    assert said.code == 1 and "200 samples in rows" in said.out and "sample 0 of out" in said.err
    said = Said(capsys, "show", "out", "--json")
    assert said.code == 1 and said.json()["sample"] is None


def test_records_of_any_shape(recipe: Path, capsys) -> None:
    said = Said(capsys, "build", "recipe.py:texts", "out", "--compress", "zstd", "--json")
    assert said.code == 0 and said.json()["layout"] == "packed"
    said = Said(capsys, "show", "out", "--sample", "3")
    assert said.code == 0 and '"xxx"' in said.out and "compression zstd" in said.out
    said = Said(capsys, "show", "out", "--sample", "9")
    assert said.code == 2 and "has 9 samples" in said.err


def test_files_are_sources(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows.csv").write_text("a,b\n1,x\n2,y\n")
    Path("lines.jsonl").write_text('{"a": 1}\n{"a": 2}\n{"a": 3}\n')
    assert Said(capsys, "build", "rows.csv", "one").code == 0
    assert shards("one")[1] == {"a": "2", "b": "y"}
    assert Said(capsys, "build", "lines.jsonl", "two").code == 0
    assert shards("two")[2] == {"a": 3}


def test_an_existing_set_is_kept(recipe: Path, capsys) -> None:
    assert Said(capsys, "build", "recipe.py:pairs", "out").code == 0
    said = Said(capsys, "build", "recipe.py:texts", "out")
    assert said.code == 2 and "--force" in said.err and len(shards("out")) == 200
    assert Said(capsys, "build", "recipe.py:texts", "out", "--force").code == 0
    assert len(shards("out")) == 9


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["build", "recipe.py:empty", "out"], 2, "the source is empty"),
        (["build", "recipe.py:fails", "out"], 1, "ValueError: no such thing"),
        (["build", "recipe.py:bad", "out"], 1, "sample 31 of 100 failed: ValueError: a torn page"),
        (["build", "recipe.py:bad", "out", "--workers", "2"], 1, "sample 31 of 100 failed"),
        (["build", "recipe.py:nothing", "out"], 2, "data is a int"),
        (["build", "recipe.py:pears", "out"], 2, "Did you mean 'pairs'?"),
        (["build", "none.py:pairs", "out"], 2, "There is no recipe file"),
        (["build", "none.csv", "out"], 2, "none.csv"),
        (["build", "something", "out"], 2, "is no source"),
        (["build", "recipe.py:pairs", "recipe.py"], 2, "is no set of shards"),
        (["build", "recipe.py:pairs", "mem://x"], 2, "is no store that fsspec knows"),
        (["build", "recipe.py:pairs", "out", "--compress", "lz4"], 2, "zstd"),
        (["build", "recipe.py:pairs", "out", "--shard-mib", "0"], 2, "--shard-mib"),
        (["show", "none"], 2, "holds no set of shards"),
        (["verify", "none"], 2, "holds no set of shards"),
        (["shw", "out"], 2, "shw"),
    ],
)
def test_bad_words_are_refused(recipe: Path, capsys, words, code: int, told: str) -> None:
    said = Said(capsys, *words)
    assert said.code == code and told in said.err and "src/shoal" not in said.err
    assert "Traceback" not in said.err or code == 1  # that of the recipe's own error
    assert not os.path.exists("out")


def test_a_damaged_index(recipe: Path, capsys) -> None:
    assert Said(capsys, "build", "recipe.py:pairs", "out").code == 0
    flip(Path("out/index.json"), 20)
    said = Said(capsys, "verify", "out")
    assert said.code == 1 and "bad  out  index.json is not what index.sha256 says" in said.out
    said = Said(capsys, "show", "out")
    assert said.code == 2 and "out: index.json is not what index.sha256 says" in said.err


def test_verify_needs_no_torch(recipe: Path, capsys) -> None:
    assert Said(capsys, "build", "recipe.py:pairs", "out").code == 0
    code = (
        "import sys\nfrom shoal.cli.main import run_here\n"
        "code = run_here(['data', 'verify', 'out'])\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\nsys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


def test_no_password_is_kept_or_shown(tmp_path: Path, capsys) -> None:
    url = "memory://me:hunter2@host/rows.csv"
    fsspec.filesystem("memory").pipe_file(url, b"a,b\n1,2\n3,4\n")
    assert Said(capsys, "build", url, tmp_path / "out").code == 0
    for file in (tmp_path / "out").iterdir():
        assert b"hunter2" not in file.read_bytes()
    said = Said(capsys, "show", tmp_path / "out")
    assert "memory://host/rows.csv" in said.out and "hunter2" not in said.out
    for wrong in (f"{url}?x", "memory://me:hunter2@host/none.csv"):
        said = Said(capsys, "build", wrong, tmp_path / "other")
        assert said.code == 2 and "hunter2" not in said.err
