"""Who may read what a run leaves behind: the umask says it, except of keys and sockets."""

import os
import stat
from pathlib import Path

import pytest

from shoal.cli.main import run_here
from shoal.cluster.invitation import INVITATION, KEYS, Invitation, write_invitation
from shoal.comm.wire import new_keys
from shoal.elastic.control import ControlSocket
from shoal.testing.ranks import Pool
from tests.support.faults import Training
from tests.unit.checkpoint.made import make, tensors

TINY = str(Path(__file__).parents[1] / "faults" / "tiny.py")


def run_under(umask: int, words: list[str]) -> int:
    os.umask(umask)
    return run_here(words)


def modes_below(folder: Path) -> dict[str, set[int]]:
    """Of files and of directories."""
    found: dict[str, set[int]] = {"files": set(), "directories": set()}
    for path in (folder, *folder.rglob("*")):
        mode = os.lstat(path).st_mode
        found["directories" if stat.S_ISDIR(mode) else "files"].add(stat.S_IMODE(mode))
    return found


@pytest.mark.quick("2")
@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_what_a_run_leaves_follows_the_umask(pool: Pool, tmp_path: Path, umask: int) -> None:
    """Records, logs, weights and checkpoints, whichever process writes them."""
    run = tmp_path / "made" / "run"
    words = ["train", f"{TINY}:growing", "--plan", "data=2 sync=server servers=1"]
    words += ["--run-dir", str(run), "--json"]
    for setting in ("samples=40", "steps=3", "save_every=2"):
        words += ["--set", setting]
    command = pool.start(
        run_under,
        umask,
        words,
        output=tmp_path / "run.out",
        errors=tmp_path / "run.err",
        directory=tmp_path,
    )
    trained = Training(command, tmp_path / "run").wait()
    assert trained.exit_code == 0, trained.errors
    assert {path.name for path in run.iterdir()} >= {"run.json", "logs", "model.safetensors"}
    assert len(list(run.glob("checkpoints/*/manifest.json"))) == 2
    wanted = {"files": {0o666 & ~umask}, "directories": {0o777 & ~umask}}
    assert modes_below(tmp_path / "made") == wanted


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o002, 0o077])
def test_keys_and_sockets_are_for_their_owner_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        written = Invitation("tcp://10.0.0.1:81", new_keys(), str(tmp_path))
        write_invitation(written, tmp_path)
        control = ControlSocket(tmp_path)
    finally:
        os.umask(before)
    try:
        modes = {path.name: stat.S_IMODE(os.lstat(path).st_mode) for path in tmp_path.iterdir()}
    finally:
        control.close()
    assert modes == {KEYS: 0o600, INVITATION: 0o600, "control": 0o600}


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_what_is_built_and_exported_follows_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "rows.csv").write_text("a,b\n1,x\n2,y\n")
    before = os.umask(umask)
    try:
        made = tmp_path / "made"
        made.mkdir()
        assert run_here(["data", "build", str(tmp_path / "rows.csv"), str(made / "set")]) == 0
        make(made / "checkpoints", tensors())
        assert run_here(["checkpoint", "convert", str(made), str(made / "copy")]) == 0
        for form in ("safetensors", "huggingface", "state_dict", "dcp"):
            words = ["checkpoint", "export", str(made), str(made / form), "--to", form]
            assert run_here(words) == 0
    finally:
        os.umask(before)
    wanted = {"files": {0o666 & ~umask}, "directories": {0o777 & ~umask}}
    assert modes_below(made) == wanted
