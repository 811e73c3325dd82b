"""A test's folder gives its marker; tests on a real clock are tried again; random numbers start alike in each test."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.long import LISTED, left_out, listed

HERE = Path(__file__).parent
# No test takes what another one did, and nothing is left with the user: of the commands that are started, too.
os.environ["COMPRESS_CACHE_GB"] = "0"
# No test asks for narrow intervals of what it exports; those that measure for a user's eyes say so.
os.environ["COMPRESS_MEASURE_SECONDS"] = "0"
# A shell starts what is put into the background (`make test &`) with Ctrl-C ignored, nohup with the terminal's end, and so
# all that is started here.
for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, usual)
# Minutes each: begun first, so that no core waits at the end for the last of them. The one that takes most of a core's
# time begins beside those that wait.
FIRST = (
    "e2e/test_demo", "integration/test_on_demand", "integration/test_upstream_deaths", "integration/test_gateway_sequences",
    "integration/test_search_on_ray", "integration/test_sharded_training", "integration/test_rollout", "e2e/test_begin",
    "integration/test_load_on_ray", "integration/test_elastic_training", "integration/test_isolation",
    "integration/test_training", "integration/test_gateway_heavy", "integration/test_gateway_memory", "integration/test_ending",
)  # fmt: skip
WAITING = frozenset(("asyncio", "multiprocessing", "signal", "socket", "subprocess", "threading", "time"))

# No test fails on a time: hypothesis sets each example a deadline, and counts how long it takes to draw one. The gate
# tries the same examples each time: what it refuses is the change, not the draw. `make hunt` draws new ones.
settings.register_profile("hunt", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.register_profile("project", settings.get_profile("hunt"), derandomize=True)
settings.register_profile("short", settings.get_profile("project"), max_examples=40)
settings.load_profile("project")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--short",
        action="store_true",
        help="of tests that take long, the cases that tests/long.txt says, and fewer examples of properties",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before tests are imported: a property takes the profile's number of examples as it is defined."""
    if config.getoption("--short") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("short")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--short"):
        out = left_out([item.nodeid for item in items], listed(LISTED.read_text(encoding="utf-8")))
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in out])
        items[:] = [item for item in items if item.nodeid not in out]
    places = {HERE / f"{name}.py": place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    for item in items:
        folder = item.path.relative_to(HERE).parts[0]
        if folder in ("integration", "e2e", "gpu"):
            item.add_marker(folder)
        waits = folder in ("integration", "e2e") or item.get_closest_marker("clock") or _waits(item)
        # Of thousands of tests, on any machine, one may meet what no change did: the summary names it.
        item.add_marker(pytest.mark.flaky(reruns=2 if waits else 1))


@pytest.fixture(autouse=True)
def imports_from_here() -> Iterator[None]:
    """Commands that run in this process set it for those that they start; a test's own processes import tests."""
    os.environ.pop("PYTHONSAFEPATH", None)
    yield
    os.environ.pop("PYTHONSAFEPATH", None)


@pytest.fixture(autouse=True)
def all_of_the_memory() -> Iterator[None]:
    """Commands that run in this process bound what it may take from then on; a Triton may need more."""
    soft, _ = resource.getrlimit(resource.RLIMIT_DATA)
    yield
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _waits(item: pytest.Item) -> bool:
    """Whether its file deals with clocks, threads or other processes itself."""
    return isinstance(item, pytest.Function) and not WAITING.isdisjoint(vars(item.module))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give each test the same random numbers whatever ran before it.

    Before each file, put what is imported by now out of the collector's sight: walking it took most of some tests.
    """
    random.seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if item.path not in _SEEN:
        _SEEN.add(item.path)
        gc.collect()
        gc.freeze()


_SEEN: set[Path] = set()
