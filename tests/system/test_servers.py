"""Parameter servers on a model with BatchNorm, whose statistics no server holds."""

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from shoal.testing.ranks import Pool
from tests.support.faults import start

ZOO = str(Path(__file__).parents[1] / "zoo.py")


@pytest.mark.quick("staleness=any")
@pytest.mark.parametrize("bound", ["", "staleness=any"])
def test_a_checkpoint_holds_the_statistics_of_the_finished_model(
    pool: Pool, tmp_path: Path, bound: str
) -> None:
    plan = f"data=2 sync=server servers=2 {bound}"
    trained = start(pool, f"{ZOO}:cnn", tmp_path / "run", plan=plan, settings={"steps": 4}).wait()
    assert trained.exit_code == 0, trained.errors
    saved = {}
    for file in (trained.run_dir / "checkpoints").glob("*/rank-*.safetensors"):
        saved |= load_file(file)
    model = load_file(trained.run_dir / "model.safetensors")
    statistics = [name for name in model if "running" in name]
    assert statistics
    for name in statistics:
        assert (saved[f"model.{name}"] == model[name]).all(), name
