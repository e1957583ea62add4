"""Fixtures for all tests: the pool of ranks, and leaks that fail the test that made them."""

import faulthandler
import gc
import importlib
import os
import signal

# Before torch is imported: ranks fill the cores, and servers use those of ranks that wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

from shoal.numerics.precision import bf16_environment

# Before torch computes: on a CPU that says it has AMX and does not, bf16 would end the process.
os.environ.update(bf16_environment())

from collections.abc import Callable, Iterator

import hypothesis
import pytest

from shoal.testing.ranks import Pool
from tests.support.leaks import no_leaks, private_temporary_directory

__all__ = ["no_leaks", "private_temporary_directory"]

# A test never asserts on seconds.
hypothesis.settings.register_profile("full", deadline=None, print_blob=True, max_examples=200)
hypothesis.settings.register_profile("quick", deadline=None, print_blob=True, max_examples=25)


def pytest_configure(config: pytest.Config) -> None:
    """The quick suite tries fewer examples of each property."""
    is_quick = config.getoption("markexpr") == "not full"
    hypothesis.settings.load_profile("quick" if is_quick else "full")
    # What a shell starts in the background, or by nohup, ignores these, and some tests are about
    # them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before cells are chosen by their markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """`@pytest.mark.quick("a", "b-2")`: only these cells of a parametrized test are in the quick
    suite. A name that no cell has is refused, or a change of names would take the test out."""
    unknown: dict[str, set[str]] = {}
    for item in items:
        marker = item.get_closest_marker("quick")
        if marker is None:
            continue
        cell = item.callspec.id
        unknown.setdefault(item.nodeid.partition("[")[0], set(marker.args)).discard(cell)
        if cell not in marker.args:
            item.add_marker(pytest.mark.full)
    is_whole = not any("::" in word for word in config.args)
    if is_whole and (wrong := {test: names for test, names in unknown.items() if names}):
        raise pytest.UsageError(f"No cell has these names, which a marker `quick` gives: {wrong}")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Thousands of tests are a heap that the collector need not look through again: in a fork of
    this process it would copy all of it, which takes seconds."""
    gc.collect()
    gc.freeze()


_pools: list[Pool] = []


@pytest.fixture(scope="session")
def pool(
    tmp_path_factory: pytest.TempPathFactory, private_temporary_directory: object
) -> Iterator[Pool]:
    """Four warm ranks for the whole test run."""
    with Pool(tmp_path_factory.mktemp("pool"), warm_up=_import_commands) as made:
        made.run(_nothing, 4)  # so that the ranks stand before any test is compared
        _pools.append(made)
        yield made
        _pools.remove(made)


@pytest.fixture(autouse=True)
def no_stacks_of_long_tests(request: pytest.FixtureRequest) -> None:
    """Tests with a limit of their own run past the usual one, before which all stacks are shown.
    That is done without the interpreter's lock, and can crash Python 3.11 while threads run."""
    if request.node.get_closest_marker("timeout"):
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def pools() -> list[Pool]:
    """Those whose processes no test is blamed for."""
    return _pools


@pytest.fixture(scope="session")
def kept_processes() -> Callable[[], frozenset[int]]:
    return lambda: frozenset(pid for pool in _pools for pid in pool.pids())


def _import_commands() -> None:
    """What `shoal train` imports, so that no fork of the warm process has to."""
    for name in ("shoal.cli.train", "shoal.cost.predict", "shoal.elastic.worker"):
        importlib.import_module(name)


def _nothing(mesh: object) -> None:
    """What a rank does to warm up."""
