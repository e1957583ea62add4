"""What stands beside the weights in a Hugging Face directory: the tokenizer and its configurations.

An export without them is no model that one could talk to. They come from the directory that is
exported, or from the one that the run began with (`--from`), which its run.json names; or the
recipe has a tokenizer that can write itself. Only files with the names below are copied.
"""

import shutil
from pathlib import Path
from typing import Any

from shoal.checkpoint.find import PathOrUrl
from shoal.errors import UsageError
from shoal.formats.huggingface import INDEX, SINGLE, open_huggingface
from shoal.formats.weights import ModelWeights
from shoal.storage.object_store import local_path
from shoal.storage.run_dir import RUN, read_description

CONFIGURATION = "config.json"
COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
    *("sentencepiece.bpe.model", "chat_template.jinja", "chat_template.json"),
    *("generation_config.json", "preprocessor_config.json", "processor_config.json"),
)


def origin_directory(where: PathOrUrl) -> Path | None:
    """The Hugging Face directory that weights are in, or that their run began with; if any."""
    path = local_path(where)
    if path is None:
        return None
    if _is_huggingface(path):
        return path
    for run_dir in (path, path.parent, path.parent.parent):  # of a checkpoint, of checkpoints/
        if (run_dir / RUN).is_file():
            begun = read_description(run_dir).begin_from
            origin = None if begun is None else local_path(begun)
            return origin if origin is not None and _is_huggingface(origin) else None
    return None


def write_companions(out: Path, origin: Path | None, tokenizer: Any, weights: ModelWeights) -> None:
    """Put beside exported weights what belongs there, as far as it is not there yet."""
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(out)
    if origin is None:
        return
    wanted = [name for name in COMPANIONS if (origin / name).is_file()]
    if (origin / CONFIGURATION).is_file() and _holds_the_same(origin, weights):
        wanted.append(CONFIGURATION)
    for name in wanted:
        if not (out / name).exists():
            shutil.copyfile(origin / name, out / name)


def _is_huggingface(path: Path) -> bool:
    has_weights = (path / SINGLE).is_file() or (path / INDEX).is_file()
    return has_weights and (path / CONFIGURATION).is_file()


def _holds_the_same(origin: Path, weights: ModelWeights) -> bool:
    """Whether a configuration is of these weights: their names and shapes are."""
    try:
        theirs = ModelWeights(open_huggingface(origin))
    except UsageError:  # it was damaged or changed since
        return False
    shapes = {name: theirs.shape(name) for name in theirs.names}
    return shapes == {name: weights.shape(name) for name in weights.names}
