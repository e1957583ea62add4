"""Samples that cannot be loaded: the run stops and names one, or goes on without them."""

from pathlib import Path

import msgspec
import pytest

from shoal.testing import faults
from shoal.testing.ranks import Pool

TINY = str(Path(__file__).with_name("tiny.py"))
BAD = [i for i in range(120) if i % 17 == 3]


@pytest.mark.parametrize("loaders", [0, 1])
def test_bad_samples_are_left_out_alike_at_every_size(
    pool: Pool, tmp_path: Path, loaders: int
) -> None:
    trained = []
    for plan in ("data=1 pieces=2", "data=2"):
        name = f"run-{len(trained)}"
        settings = {"file": str(tmp_path / f"{name}.bad"), "loaders": loaders}
        run = faults.start(
            pool, f"{TINY}:quarantined", tmp_path / name, plan=plan, settings=settings
        )
        trained.append(run.wait())
        assert trained[-1].exit_code == 0, trained[-1].errors
        lines = (tmp_path / f"{name}.bad").read_bytes().splitlines()
        assert {msgspec.json.decode(line)["index"] for line in lines} == set(BAD)
        faults.check_left_out(trained[-1], f"{TINY}:quarantined", settings, 25)
    faults.check_same(trained[1], trained[0])


def test_a_part_of_the_data_is_under_quarantine(pool: Pool, tmp_path: Path) -> None:
    settings = {"file": str(tmp_path / "bad.jsonl")}
    run = faults.start(pool, f"{TINY}:joined", tmp_path / "run", plan="data=2", settings=settings)
    trained = run.wait()
    assert trained.exit_code == 0, trained.errors
    faults.check_left_out(trained, f"{TINY}:joined", settings, 25)
