"""Builds that are cut short, refused, or run into trouble: what they leave, and how they go on."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.data.shard_files import drafts
from shoal.data.shard_files.locations import ShardDirectory, read_index
from shoal.data.shard_files.verifying import find_faults
from shoal.data.shard_files.writing import build
from shoal.data.transforms.mapping import mapped
from shoal.data.views import weighted
from shoal.errors import RecipeError, ShoalError, UsageError
from tests.unit.data.shards.made import KINDS, NUM, Small, files, in_a_fork, kill, make

CALLS = ("open", "write", "fsync", "close", "rename", "unlink", "mkdir", "listdir", "stat")
MOST_CALLS = 300


def counted(call: Callable[..., Any], left: list[int], then: Callable[[], None]) -> Any:
    def count(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] == -1:
            then()
        return call(*arguments, **named)

    return count


def is_good(folder: Path) -> bool:
    place = ShardDirectory(folder)
    return not any(find_faults(place, read_index(place)))


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("what", ["new", "replace"])
def test_killed_before_every_call(
    tmp_path: Path, what: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is there afterwards is whole, the next build ends with the same bytes."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the machine does not die
    make("rows", tmp_path / "wanted", shard_bytes=2000)
    wanted = files(tmp_path / "wanted")
    for number in range(0, MOST_CALLS, step):
        folder = tmp_path / str(number)
        if what == "replace":
            make("packed", folder / "out", shard_bytes=9000)

        def act(folder: Path = folder, number: int = number) -> None:
            left = [number]
            for name in CALLS:
                setattr(os, name, counted(getattr(os, name), left, kill))
            make("rows", folder / "out", force=True, shard_bytes=2000)

        code = in_a_fork(act)
        if (folder / "out").exists():
            assert is_good(folder / "out"), f"killed before call {number}"
        else:
            assert what == "new"
        make("rows", folder / "out", force=True, shard_bytes=2000)
        assert files(folder / "out") == wanted
        assert os.listdir(folder) == ["out"], "something was left behind"
        if code == 0:
            assert number > 20, "nothing was counted"
            return
    pytest.fail(f"a build makes more than {MOST_CALLS} calls")


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_build_goes_on(tmp_path: Path, kind: str) -> None:
    make(kind, tmp_path / "wanted")

    class Deadly(Small):
        """Probes come before the build; only its own question for a sample is deadly."""

        def __getitem__(self, index: int) -> Any:
            if index == 50 and self.asked > 40:
                kill()
            return super().__getitem__(index)

    def dies() -> None:
        build(Deadly(kind), tmp_path / "out", shard_bytes=1000)

    assert in_a_fork(dies) == -signal.SIGKILL
    assert not (tmp_path / "out").exists() and len(os.listdir(tmp_path)) == 2
    source = make(kind, tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "wanted")
    fresh = make(kind, tmp_path / "again")
    assert source.asked < fresh.asked, "the finished shards were built again"


class Odd(Small):
    """One of its samples, which no probe looks at, does not fit into rows."""

    is_stopped = False

    def __getitem__(self, index: int) -> Any:
        if index == 50 and self.is_stopped:
            signal.raise_signal(signal.SIGINT)
        sample = super().__getitem__(index)
        return sample if index != 20 else (*sample, "odd")


def test_a_build_that_fell_back_to_packed_goes_on(tmp_path: Path) -> None:
    fresh = Odd("rows")
    build(fresh, tmp_path / "wanted", shard_bytes=1000)
    stopped = Odd("rows")
    stopped.is_stopped = True
    with pytest.raises(KeyboardInterrupt):
        build(stopped, tmp_path / "out", shard_bytes=1000)
    source = Odd("rows")
    build(source, tmp_path / "out", shard_bytes=1000)
    assert files(tmp_path / "out") == files(tmp_path / "wanted")
    assert source.asked < NUM, "the finished shards were built again"


def test_a_changed_source_begins_anew(tmp_path: Path) -> None:
    """A draft is taken up for the same samples only."""

    class Fails(list):
        def __getitem__(self, index: int) -> Any:
            if index == 45 and self.deadly:
                raise OSError(errno.EIO, "the disk is gone")
            return super().__getitem__(index)

    def source(shift: int, deadly: bool) -> Fails:
        made = Fails((torch.arange(9) + (shift if i == 40 else 0), i) for i in range(NUM))
        made.deadly = deadly
        return made

    with pytest.raises(ShoalError, match=r"sample 45 was not reached: OSError: .*the disk is gone"):
        build(source(0, True), tmp_path / "out", shard_bytes=700)
    assert len(os.listdir(tmp_path)) == 1, "finished shards are kept"
    build(source(1, False), tmp_path / "out", shard_bytes=700)  # the samples in between differ
    assert os.listdir(tmp_path) == ["out"]
    for settings in ({"shard_bytes": 900}, {"compress": "zstd"}, {"identity": "other"}):
        with pytest.raises(ShoalError):
            build(source(0, True), tmp_path / "b", shard_bytes=700)
        build(source(0, False), tmp_path / "b", **({"shard_bytes": 700} | settings))
        build(source(0, False), tmp_path / "c", **({"shard_bytes": 700} | settings))
        assert files(tmp_path / "b") == files(tmp_path / "c")
        for name in ("b", "c"):
            for path in (tmp_path / name).iterdir():
                path.unlink()
            (tmp_path / name).rmdir()


def test_a_damaged_draft_is_not_gone_on_with(tmp_path: Path) -> None:
    make("rows", tmp_path / "wanted")

    class Stops(Small):
        def __getitem__(self, index: int) -> Any:
            if index == 55 and self.asked > 40:
                signal.raise_signal(signal.SIGINT)
            return super().__getitem__(index)

    with pytest.raises(KeyboardInterrupt):
        build(Stops("rows"), tmp_path / "out", shard_bytes=1000)
    draft = drafts.FolderDraft(ShardDirectory(tmp_path / "out")).path
    shard = draft / "shard-00001.bin"
    content = bytearray(shard.read_bytes())
    content[7] ^= 1
    shard.write_bytes(content)
    make("rows", tmp_path / "out")
    assert files(tmp_path / "out") == files(tmp_path / "wanted")


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for number in range(100):
        left = [number]
        with monkeypatch.context() as patched:
            for name in ("write", "fsync"):
                patched.setattr(os, name, counted(getattr(os, name), left, full))
            try:
                make("rows", tmp_path / "out")
                assert number > 10
                return
            except UsageError as error:
                assert "No space left on device" in str(error) and "make room" in str(error)
        if (tmp_path / "out").exists():  # it failed after the set had appeared
            assert is_good(tmp_path / "out") and number > 10
            return
        assert os.listdir(tmp_path) == []
    pytest.fail("it never ended")


def test_a_full_disk_spares_the_set_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make("packed", tmp_path / "out")
    before = files(tmp_path / "out")
    left = [5]

    def full() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", counted(os.write, left, full))
        with pytest.raises(UsageError, match="No space"):
            make("rows", tmp_path / "out", force=True)
    assert files(tmp_path / "out") == before and os.listdir(tmp_path) == ["out"]


def test_what_is_there_is_not_replaced(tmp_path: Path) -> None:
    make("rows", tmp_path / "out")
    before = files(tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds a set already.*--force"):
        make("packed", tmp_path / "out")
    assert files(tmp_path / "out") == before
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    (tmp_path / "file").touch()
    for name in ("home", "file"):
        with pytest.raises(UsageError, match="no set of shards"):
            make("packed", tmp_path / name, force=True)
    assert (tmp_path / "home" / "letter").exists()
    (tmp_path / "empty").mkdir()
    make("packed", tmp_path / "empty")
    assert is_good(tmp_path / "empty")


@pytest.mark.parametrize("name", ["notes.txt", "sub/index.json"])
def test_what_lies_beside_a_set_is_not_removed_with_it(tmp_path: Path, name: str) -> None:
    make("rows", tmp_path / "out")
    own = tmp_path / "out" / name
    own.parent.mkdir(exist_ok=True)
    own.write_text("precious")
    with pytest.raises(UsageError, match=f"holds {name.partition('/')[0]} beside its set.*Move"):
        make("rows", tmp_path / "out", force=True)
    assert own.read_text() == "precious"


def test_two_builds_do_not_mix(tmp_path: Path) -> None:
    one = drafts.FolderDraft(ShardDirectory(tmp_path / "out"))
    one.begin()
    with pytest.raises(UsageError, match="being built by another process"):
        make("rows", tmp_path / "out")
    one.close(discard=True)
    make("rows", tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"source": []}, "the source is empty"),
        ({"shard_bytes": 0}, "shard_bytes=0"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 257}, "workers=257. From 1 to 256"),
        ({"compress": "zst"}, "Did you mean 'zstd'?"),
        ({"source": {"a": 1}}, "data is a dict"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, arguments: dict, told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("?", r"\?")):
        build(**({"source": Small("rows"), "out": tmp_path / "out"} | arguments))
    assert os.listdir(tmp_path) == []


def test_a_sample_that_is_no_bytes_is_named(tmp_path: Path) -> None:
    for number in (11, 29):  # one that is loaded in its turn, one that is looked at first
        samples: list[Any] = [(torch.ones(2), "a")] * 30
        samples[number] = (torch.ones(2), object())
        with pytest.raises(RecipeError, match=f"sample {number}: a sample holds a object"):
            build(samples, tmp_path / "out")


def test_progress_is_told(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    make("rows", tmp_path / "out", progress=lambda samples, size: told.append((samples, size)))
    assert told == sorted(told) and told[-1][0] == NUM and len(told) >= 3


def test_what_varies_from_pass_to_pass_is_not_frozen(tmp_path: Path) -> None:
    pairs = [(torch.zeros(2), index) for index in range(4)]
    drawn = mapped(pairs, lambda pair, random: (pair[0] + random.random(), pair[1]))
    with pytest.raises(UsageError, match=r"a Mapped whose samples differ from pass to pass"):
        build(drawn, tmp_path / "out")
    assert not any(tmp_path.iterdir())


def test_an_order_that_is_lost_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [(torch.zeros(2), index) for index in range(4)]
    build(pairs, tmp_path / "plain")
    assert not caplog.text
    build(weighted(pairs, [1, 2, 3, 4]), tmp_path / "out")
    assert "their order (Weighted) is not" in caplog.text
