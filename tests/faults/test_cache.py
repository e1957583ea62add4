"""The cache under faults: never a wrong sample, never a hang, whoever dies and whatever breaks.

Processes that put and read the same keys are killed at random moments; bytes are flipped under
them; disks fill up; servers go away and come back. The recipe at the end trains through a cache,
and must end with the bits of a run without one.
"""

import importlib.util
import itertools
import mmap
import os
import random
import resource
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import shoal
from shoal.data.cache.cached import cached
from shoal.data.cache.disk import DiskLayer
from shoal.data.cache.layers import CacheLayer
from shoal.data.cache.memory import MemoryLayer, lay_out
from shoal.testing.caches import content_of, in_child, key_of
from tests.support import faults
from tests.support.faults import Trained, Training, check_ledger, check_same
from tests.support.servers import start_memcached, start_redis

NUM_KEYS = 300
NUM_STEPS = 60
MEMORY = 10**6

_CONTENTS = [content_of(number, 200 + 37 * number % 9000) for number in range(NUM_KEYS)]


def hammer(layer: CacheLayer, seed: int) -> None:
    """Put and read for ever; a wrong sample ends the process with code 3."""
    chosen = random.Random(seed)
    while True:
        number = chosen.randrange(NUM_KEYS)
        found = layer.get(key_of(number))
        if found is None:
            layer.put(key_of(number), _CONTENTS[number])
        elif found != _CONTENTS[number]:
            os._exit(3)


def start(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 (the end of a process)
            traceback.print_exc()
        finally:
            os._exit(2)
    return pid


def kill(pid: int) -> int:
    """End it; how it had ended by itself, or minus the signal."""
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_at_random(layer: CacheLayer, num_kills: int) -> list[int]:
    """Three processes at once on the same keys, one after the other killed and replaced."""
    chosen = random.Random(7)
    workers = [start(lambda seed=seed: hammer(layer, seed)) for seed in range(3)]
    codes = []
    for number in range(num_kills):
        time.sleep(chosen.random() * 0.01)
        codes.append(kill(workers.pop(0)))
        workers.append(start(lambda seed=number: hammer(layer, 100 + seed)))
    return codes + [kill(pid) for pid in workers]


def check_whole(layer: CacheLayer) -> None:
    """It gives nothing wrong, and still takes samples."""
    found = [layer.get(key_of(number)) for number in range(NUM_KEYS)]
    assert all(each in (None, content) for each, content in zip(found, _CONTENTS, strict=True))
    assert any(each is not None for each in found)


@pytest.fixture
def area() -> Iterator[MemoryLayer]:
    descriptor = os.memfd_create("test")
    lay_out(descriptor, MEMORY)
    area = MemoryLayer(descriptor)
    # All is evicted again and again, so that takeovers are hit as well.
    area._opened = float("inf")
    yield area
    area.close()


@pytest.mark.parametrize("num_kills", [25, pytest.param(200, marks=pytest.mark.full)])
def test_memory_survives_kills(area: MemoryLayer, num_kills: int) -> None:
    codes = killed_at_random(area, num_kills)
    assert set(codes) == {-signal.SIGKILL}, codes
    check_whole(area)
    assert area.put(key_of(9999), b"still taken")
    assert area.get(key_of(9999)) == b"still taken"


@pytest.mark.parametrize("num_kills", [12, pytest.param(100, marks=pytest.mark.full)])
def test_disk_survives_kills(tmp_path: Path, num_kills: int) -> None:
    disk = DiskLayer(tmp_path / "kept", MEMORY)
    disk._opened = float("inf")
    codes = killed_at_random(disk, num_kills)
    assert set(codes) == {-signal.SIGKILL}, codes
    check_whole(disk)
    sizes = [path.stat().st_size for path in (tmp_path / "kept").glob("*/*")]
    assert sum(-(-size // 4096) * 4096 for size in sizes) <= MEMORY
    disk.close()


def test_bits_that_flip_under_readers_are_never_given_out(area: MemoryLayer) -> None:
    chosen = random.Random(3)
    workers = [start(lambda seed=seed: hammer(area, seed)) for seed in range(2)]
    with mmap.mmap(area.descriptor, area.shape.num_bytes) as memory:
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            # Anywhere but in the head, which says how the rest is laid out: index and arena.
            memory[chosen.randrange(4096, len(memory))] ^= 1 << chosen.randrange(8)
    assert [kill(pid) for pid in workers] == [-signal.SIGKILL] * 2
    check_whole(area)


def test_a_stopped_writer_holds_nobody_up(area: MemoryLayer) -> None:
    """Stopped with the lock in hand, as a debugger or a scheduler would."""
    worker = start(lambda: hammer(area, 1))
    for _ in range(20):
        os.kill(worker, signal.SIGSTOP)
        os.waitid(os.P_PID, worker, os.WSTOPPED)
        assert area.get(key_of(5)) in (None, _CONTENTS[5])
        area.put(key_of(5), _CONTENTS[5])
        os.kill(worker, signal.SIGCONT)
        time.sleep(0.001)
    assert kill(worker) == -signal.SIGKILL


def test_a_limit_of_the_system_is_a_full_disk(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A real refusal in the middle of a write: the file may not grow beyond 10,000 bytes."""

    def fill() -> bool:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        disk = DiskLayer(tmp_path / "kept", 10**8)
        kept = [disk.put(key_of(n), bytes(size)) for n, size in enumerate((5000, 50_000, 5000))]
        parts = list((tmp_path / "kept").glob("*/.part-*"))
        return kept == [True, False, False] and disk.get(key_of(0)) == bytes(5000) and not parts

    assert in_child(fill)


# ---- in training


class Angles:
    """The samples of the tiny run, made one by one, each with a pause."""

    def __init__(self, pause: float):
        self._pause = pause

    def __len__(self) -> int:
        return _tiny().NUM_SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(self._pause)
        data = _tiny().run_of(0.0).data
        return data[index]


def _tiny() -> Any:
    """The module of the tiny run, wherever this file was loaded from."""
    spec = importlib.util.spec_from_file_location("tiny", Path(__file__).with_name("tiny.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recipe(
    place: str, disk: str = "", redis: str = "", memcached: str = "", pause: float = 0.0
) -> shoal.Run:
    os.environ["SHOAL_CACHE"] = place
    data = cached(
        Angles(pause),
        key="angles",
        memory="2MB",
        disk=disk or None,
        disk_bytes="2MB" if disk else None,
        redis=redis or None,
        memcached=memcached or None,
    )
    run: shoal.Run = _tiny().run_of(0.002, data=data)
    return run


@pytest.fixture
def train(pool, tmp_path: Path) -> Callable[..., Training]:
    numbers = itertools.count()

    def begin(*armed: str, **settings: object) -> Training:
        run_dir = tmp_path / f"run-{next(numbers)}"
        settings["place"] = tmp_path / "place"
        return faults.start(
            pool, f"{__file__}:recipe", run_dir, plan="data=3", settings=settings, faults=armed
        )

    return begin


def assert_same(trained: Trained, undisturbed: Trained) -> None:
    check_same(trained, undisturbed)
    check_ledger(trained, NUM_STEPS)


@pytest.mark.parametrize(
    "point", ["entry", *(pytest.param(p, marks=pytest.mark.full) for p in ("reserved", "rename"))]
)
def test_a_rank_that_dies_in_a_put_costs_nothing(
    train, undisturbed: Trained, tmp_path: Path, point: str
) -> None:
    trained = train(f"cache.{point}:kill:member=1", disk=tmp_path / "disk").wait()
    assert_same(trained, undisturbed)
    assert [event["rank"] for event in trained.events("recovered")] == [1]


@pytest.mark.full
def test_two_runs_at_once_share_and_agree(train, undisturbed: Trained) -> None:
    runs = [train(pause=0.002), train(pause=0.002)]
    for run in runs:
        assert_same(run.wait(), undisturbed)


def test_a_full_disk_is_a_warning_in_training(train, undisturbed: Trained, tmp_path: Path) -> None:
    armed = "cache.disk:full:member=1", "cache.disk:full:member=2"
    trained = train(*armed, disk=tmp_path / "disk").wait()
    assert_same(trained, undisturbed)
    logs = "".join(path.read_text() for path in (trained.run_dir / "logs").glob("*.log"))
    assert logs.count("Samples can no longer be kept") == 2
    assert trained.errors.count("Samples can no longer be kept") == 1


@contextmanager
def both_servers() -> Iterator[tuple[Any, Any]]:
    with start_redis() as redis, start_memcached() as memcached:
        yield redis, memcached


def test_servers_that_go_away_in_mid_run_are_missed_by_nobody(train, undisturbed: Trained) -> None:
    with both_servers() as (redis, memcached):
        run = train(redis=redis.url, memcached=memcached.url)
        run.wait_for_step(5)
        redis.stop()
        memcached.pause()
        run.wait_for_step(20)
        redis.start()
        memcached.resume()
        trained = run.wait()
    assert_same(trained, undisturbed)
