"""`shoal verify` for tests, in a fork of the pool's warm process."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

from shoal.cli.main import run_here
from shoal.testing.ranks import Pool
from tests import zoo
from tests.parity import families


class Verified(NamedTuple):
    """What a verification ended with."""

    exit_code: int
    verdict: dict[str, Any]  # empty if there was none
    errors: str


Verify = Callable[..., Verified]


def verify_broken(bug: str, words: list[str]) -> int:
    """In the fork: break the product, then verify."""
    if bug:
        from tests.parity.bugs import BUGS

        BUGS[bug]()
    return run_here(words)


OF_TRANSFORMERS = ("gpt2", "llama", "bert", "t5", "bart")  # of the zoo


def import_models(names: Collection[str]) -> None:
    """Import all that these need, which takes longer than to train them."""
    for name in names:
        getattr(zoo if name in OF_TRANSFORMERS else families, name)().model()


@pytest.fixture(scope="session")
def warm_pool(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    pools: list[Pool],
    private_temporary_directory: object,
) -> Iterator[Pool]:
    """A pool whose warm process has imported packages of others, and the models of this run."""
    cells = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    known = (*OF_TRANSFORMERS, *families.TRANSFORMERS, *families.OTHERS)
    names = {cell["model"] for cell in cells if cell.get("model") in known}
    with Pool(tmp_path_factory.mktemp("warm"), warm_up=partial(import_models, names)) as made:
        pools.append(made)
        yield made
        pools.remove(made)


@pytest.fixture
def verify(pool: Pool, tmp_path: Path) -> Verify:
    """Verify a recipe under a plan, after a bug was put into the product if one is named."""
    return verify_in(pool, tmp_path)


def verify_in(pool: Pool, directory: Path) -> Verify:
    """A function that verifies in forks of the pool's warm process."""

    def run(
        recipe: str,
        plan: str,
        *,
        bug: str = "",
        steps: int = 5,
        settings: Mapping[str, object] | None = None,
    ) -> Verified:
        words = ["verify", recipe, "--plan", plan, "--steps", str(steps), "--json"]
        words += ["--run-dir", str(directory / "run")]
        for name, value in (settings or {}).items():
            words += ["--set", f"{name}={value}"]
        output, errors = directory / "output", directory / "errors"
        for path in (output, errors):
            path.write_bytes(b"")
        command = pool.start(
            verify_broken, bug, words, output=output, errors=errors, directory=directory
        )
        code = command.wait()
        lines = output.read_text().splitlines()
        return Verified(code, msgspec.json.decode(lines[-1]) if lines else {}, errors.read_text())

    return run
