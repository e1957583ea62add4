"""Every verb, and `--from`, takes checkpoints at URLs as it takes them at paths."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from shoal.checkpoint.load import CheckpointReader
from shoal.cli.main import run_here
from shoal.errors import BadCheckpoint
from shoal.formats.open_weights import fetch_to_disk
from shoal.parallel.layout import whole_slice
from shoal.storage.object_client import ObjectClient
from shoal.storage.object_store import open_store
from shoal.sync.state import MemorySource, ShardedState
from shoal.training.pretrained import find_initial_weights
from tests.unit.checkpoint.conftest import Said
from tests.unit.checkpoint.made import make

FIRST, SECOND = "step-00000010", "step-00000020"


def state_of(step: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(step)
    return {"model.weight": torch.randn(4, 3), "model.bias": torch.randn(4)}


def spoil(url: str, file: str) -> None:
    system, path = fsspec.core.url_to_fs(f"{url}/{file}", use_listings_cache=False)
    content = bytearray(system.cat_file(path))
    content[-1] ^= 1
    system.pipe_file(path, bytes(content))


def fill(url: str, folder: Path) -> str:
    """Put two checkpoints below a URL; returns where their run is."""
    for name, step in ((FIRST, 10), (SECOND, 20)):
        make(folder / "local", state_of(step), name=name, step=step, metrics={"loss": 1 / step})
        words = ["convert", str(folder / "local" / name), f"{url}/run/checkpoints/{name}"]
        assert run_here(["checkpoint", *words]) == 0
    return f"{url}/run"


class Verbs:
    """One suite for every kind of URL; `url` is an empty place."""

    @pytest.fixture
    def run(self, url: str, tmp_path: Path) -> str:
        return fill(url, tmp_path)

    def test_list_show_and_verify(self, run: str, capsys: pytest.CaptureFixture[str]) -> None:
        rows = Said(capsys, "list", run, "--json").json()["checkpoints"]
        assert [row["step"] for row in rows] == [10, 20] and not any(row["problem"] for row in rows)
        assert SECOND in Said(capsys, "list", f"{run}/checkpoints/{SECOND}/").out
        shown = Said(capsys, "show", f"{run}/checkpoints")
        assert shown.code == 0 and shown.out.startswith(SECOND)
        assert f"{SECOND} is taken, the newest good one of 2" in shown.err
        assert Said(capsys, "verify", run).out.count("ok ") == 2
        spoil(f"{run}/checkpoints/{SECOND}", "rank-00001.safetensors")
        verified = Said(capsys, "verify", run)
        assert verified.code == 1 and f"bad  {SECOND}  rank-00001.safetensors" in verified.out

    def test_export_takes_the_newest_good_one(
        self, run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        said = Said(capsys, "export", run, tmp_path / "m.safetensors", "--to", "safetensors")
        assert said.code == 0 and f"{SECOND} is taken" in said.err
        found = load_file(tmp_path / "m.safetensors")
        assert torch.equal(found["weight"], state_of(20)["model.weight"])
        spoil(f"{run}/checkpoints/{SECOND}", "rank-00000.safetensors")
        said = Said(capsys, "export", run, tmp_path / "n.safetensors", "--to", "safetensors")
        assert said.code == 0 and f"{FIRST} is taken" in said.err
        assert f"{SECOND} was passed over: rank-00000.safetensors" in said.err
        found = load_file(tmp_path / "n.safetensors")
        assert torch.equal(found["weight"], state_of(10)["model.weight"])

    def test_a_run_begins_with_it(self, run: str) -> None:
        model = nn.Linear(3, 4)
        found = find_initial_weights(run, model, everything=False, partial=False)
        assert f"beginning with 2 tensors of {run}/checkpoints/{SECOND}" in str(found)
        own = ShardedState(
            {f"model.{n}": [whole_slice(p.detach())] for n, p in model.named_parameters()}, {}
        )
        target = torch.zeros(4, 3)
        found.source(MemorySource(own)).fill("model.weight", [whole_slice(target)])
        assert torch.equal(target, state_of(20)["model.weight"])
        spoil(f"{run}/checkpoints/{SECOND}", "rank-00000.safetensors")
        assert FIRST in find_initial_weights(run, model, everything=False, partial=False).place

    def test_import_prune_and_diff(
        self, run: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        save_file({"w": torch.arange(6.0)}, tmp_path / "m.safetensors")
        system, path = fsspec.core.url_to_fs(f"{url}/m", use_listings_cache=False)
        system.pipe_file(path, (tmp_path / "m.safetensors").read_bytes())
        said = Said(capsys, "import", f"{url}/m", f"{url}/imported")
        assert said.code == 0, said.err
        assert Said(capsys, "import", f"{url}/m", f"{url}/imported").code == 2
        assert Said(capsys, "verify", f"{url}/imported").code == 0
        theirs = tmp_path / "local" / SECOND
        assert Said(capsys, "diff", theirs, f"{run}/checkpoints/{SECOND}").code == 0
        assert Said(capsys, "prune", run, "--keep", "last=1", "--yes").code == 0
        assert open_store(f"{run}/checkpoints").names() == [SECOND]

    def test_what_is_not_there(
        self, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for words, told in (
            (["list", f"{url}/nothing"], "holds no checkpoint"),
            (["verify", f"{url}/{FIRST}"], "holds no checkpoint"),
            (["import", f"{url}/nothing", tmp_path / "a"], "There is no"),
            (["export", tmp_path, f"{url}/out", "--to", "dcp"], "Exports are written to a disk"),
            (["convert", tmp_path, url.rpartition("/")[0] + "/"], "is a whole store"),
            (["list", f"x{url}"], "is no store that fsspec knows"),
        ):
            said = Said(capsys, *words)
            assert said.code == 2 and told in said.err, (words, said.err)
            assert "Errno" not in said.err and "Traceback" not in said.err
        assert not os.listdir(tmp_path)


def test_what_is_fetched_again_is_verified_again(memory_url: str, tmp_path: Path) -> None:
    """A window goes when others come, and what comes in its place may be something else."""
    run = fill(memory_url, tmp_path)
    store = open_store(f"{run}/checkpoints")
    opened = CheckpointReader(store, SECOND)
    opened.verify()
    spoil(f"{run}/checkpoints/{SECOND}", "rank-00000.safetensors")
    store._cache.forget(SECOND)
    with pytest.raises(BadCheckpoint, match="not those that were written"):
        for name in opened:
            opened.whole(name)
    with pytest.raises(BadCheckpoint, match="not those that were written"):
        list(opened.read_file(0))


def test_what_vanishes_while_it_is_fetched_is_named(
    memory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory.pipe_file("/urls/m.safetensors", bytes(100))
    real = ObjectClient.get_range

    def part(self: ObjectClient, path: str, start: int, stop: int) -> bytes:
        memory.rm_file("/urls/m.safetensors")
        return real(self, path, start, stop)

    monkeypatch.setattr(ObjectClient, "get_range", part)
    with (
        pytest.raises(BadCheckpoint, match=r"m\.safetensors changed while it was fetched\. Try"),
        fetch_to_disk("memory://urls/m.safetensors"),
    ):
        pass


class TestInMemory(Verbs):
    @pytest.fixture
    def url(self, memory_url: str) -> str:
        return memory_url


class TestInS3(Verbs):
    @pytest.fixture
    def url(self, s3_url: str) -> str:
        return s3_url


RECIPE = """
import torch
from torch import nn
import shoal

def line() -> shoal.Run:
    inputs = torch.linspace(-1, 1, 24).view(8, 3)
    return shoal.Run(
        model=lambda: nn.Linear(3, 4),
        loss=lambda output, target: (output - target).square().mean(),
        optimizer=lambda named: torch.optim.SGD(named, lr=0.0),
        data=shoal.data.tensors(inputs, torch.zeros(8, 4)),
        batch_size=4,
        steps=2,
    )
"""


@pytest.mark.full
@pytest.mark.usefixtures("s3_environment")
def test_a_command_begins_with_it(s3_url: str, tmp_path: Path) -> None:
    run = fill(s3_url, tmp_path)
    (tmp_path / "line.py").write_text(RECIPE)
    words = ["train", "line.py:line", "--plan", "data=2", "--run-dir", "r", "--from", run]
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        capture_output=True,
        text=True,
        timeout=50,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert f"{SECOND} is taken" in done.stderr
    found = load_file(tmp_path / "r" / "model.safetensors")
    assert torch.equal(found["weight"], state_of(20)["model.weight"])
