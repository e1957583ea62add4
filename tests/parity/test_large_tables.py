"""A table of 300 MB passes through workers a stretch at a time: when it is saved, and loaded."""

from pathlib import Path

import pytest

from shoal.testing import faults
from shoal.testing.ranks import Pool

LARGE = str(Path(__file__).with_name("large.py"))
MOST_BYTES = 96 << 20  # stretches, a chunk of the checkpoint, and what else a run needs


@pytest.mark.full
def test_no_worker_holds_a_table_while_it_is_saved_or_loaded(pool: Pool, tmp_path: Path) -> None:
    run_dir, watched = tmp_path / "run", tmp_path / "watched"
    watched.mkdir()
    for steps, plan in ((3, "servers=2"), (6, "servers=3")):
        trained = faults.start(
            pool,
            f"{LARGE}:table",
            run_dir,
            plan=f"data=2 sync=server {plan}",
            settings={"steps": steps, "watched": watched},
            options=("--resume",) if steps > 3 else (),
        ).wait(300)
        assert trained.exit_code == 0, trained.errors
        assert trained.result["checkpoint"] == steps
        taken = [int(file.read_text()) for file in watched.iterdir()]
        for file in watched.iterdir():
            file.unlink()
        assert len(taken) == 2 and max(taken) < MOST_BYTES, [n >> 20 for n in taken]
    whole = 600_000 * 128 * 4
    assert (run_dir / "model.safetensors").stat().st_size > whole
