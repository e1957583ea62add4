"""Tables that are large beside a process.

One of 300 MB passes through workers a stretch at a time, when it is saved and when it is loaded; a
lazy one of 8 GB, with as many of Adagrad's sums, takes memory for what was touched alone.
"""

from pathlib import Path

import pytest

from shoal.testing.ranks import Pool
from tests.support import faults

LARGE = str(Path(__file__).with_name("large.py"))
MOST_BYTES = 96 << 20  # stretches, a chunk of the checkpoint, and what else a run needs
MOST_LAZY_BYTES = 192 << 20  # of 16 GB, most of it what a first step loads


@pytest.mark.full
@pytest.mark.timeout(600)
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
        taken = [int(file.read_text()) for file in watched.glob("*[0-9]")]
        for file in watched.iterdir():
            file.unlink()
        assert len(taken) == 2 and max(taken) < MOST_BYTES, [n >> 20 for n in taken]
    whole = 600_000 * 128 * 4
    assert (run_dir / "model.safetensors").stat().st_size > whole


@pytest.mark.timeout(600)
def test_a_lazy_table_takes_memory_for_what_was_touched(pool: Pool, tmp_path: Path) -> None:
    """Of each process, wherever the rows are; and its state moves with the same bits."""
    watched, ends = tmp_path / "watched", []
    watched.mkdir()
    lives = {
        "alone": ["data=1 accumulate=2"],
        "moved": ["data=2 sync=server servers=2", "data=1 sync=server servers=3 accumulate=2"],
    }
    for life, plans in lives.items():
        for number, plan in enumerate(plans, start=1):
            trained = faults.start(
                pool,
                f"{LARGE}:lazy",
                tmp_path / life,
                plan=plan,
                settings={"steps": 4 * number // len(plans), "watched": watched},
                options=("--resume",) if number > 1 else (),
            ).wait(200)
            assert trained.exit_code == 0, trained.errors
        ends.append((tmp_path / life / "model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert len(ends[0]) < 2 << 20, "rows that nobody touched"
    taken = [int(file.read_text()) for file in watched.glob("*[0-9]")]
    assert len(taken) >= 8 and max(taken) < MOST_LAZY_BYTES, [n >> 20 for n in taken]
