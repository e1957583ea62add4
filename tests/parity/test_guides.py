"""The recipes of the guides are what they say: each is trained, and compared with one process."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks_of(page: str) -> list[str]:
    return BLOCK.findall((GUIDES / f"{page}.md").read_text())


def write_logs(directory: Path) -> None:
    draws = np.random.default_rng(1)
    for name in ("monday", "tuesday"):
        with gzip.open(directory / f"{name}.jsonl.gz", "wt") as file:
            for row in draws.normal(size=(40, 3)).tolist():
                file.write(json.dumps({"features": row, "clicked": float(row[0] > 0)}) + "\n")


def write_photos(directory: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="needs the extra images")
    draws = np.random.default_rng(2)
    for name, count in (("cat", 14), ("dog", 6)):
        (directory / "photos" / name).mkdir(parents=True)
        for number in range(count):
            pixels = draws.integers(0, 255, (20 + number, 24, 3), dtype=np.uint8)
            image.fromarray(pixels).save(directory / "photos" / name / f"{number}.png")


def write_reviews(directory: Path) -> None:
    pytest.importorskip("transformers")
    datasets = pytest.importorskip("datasets")
    from tqdm.std import tqdm

    from tests.parity import streamed

    tqdm.monitor_interval = 0  # of its progress bars: no thread stays behind
    datasets.Dataset.from_list(streamed.texts()).save_to_disk(directory / "reviews")
    streamed.tokenizer().save_pretrained(directory / "base")
    from transformers import BertModel

    BertModel(streamed.config()).save_pretrained(directory / "base")


@pytest.mark.parametrize(
    ("page", "write"),
    [
        ("streams", write_logs),
        pytest.param("image-folders", write_photos, marks=pytest.mark.full),
        pytest.param("hugging-face", write_reviews, marks=pytest.mark.full),
    ],
)
def test_the_recipe_of_a_guide(verify: Any, tmp_path: Path, page: str, write: Any) -> None:
    write(tmp_path)
    recipe, *others = blocks_of(page)
    path = tmp_path / recipe.splitlines()[0].removeprefix("# ")
    path.write_text(recipe)
    found = verify(f"{path}:small", "data=2", steps=3)
    assert found.exit_code == 0, found.errors
    assert found.verdict["identical"]
    for block in others:
        exec(block, {"shoal": __import__("shoal")})
