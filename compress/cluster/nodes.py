"""Nodes are looked at before any work: what they run, whether they have the folder, whether they have the cores."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress import __version__
from compress.cluster.connect import behind
from compress.cluster.gpus import see_gpus
from compress.cluster.leftovers import tidy
from compress.cluster.shared import Shared
from compress.console.wording import counted
from compress.errors import RecipeError, ResourceError, ServerError, first_line
from compress.runtime.machine import int8_saturates, versions
from compress.storage.hashing import digest_of_code
from compress.storage.stage_cache import code_digest

__all__ = ["Needs", "alive", "at_once", "check_nodes", "differing", "facts"]

TURNS, SETTLES = 6, 2.0  # looks at a node that can't be given a task, and seconds between them
LOOKS = 90.0  # seconds: a node imports torch for the first time


@dataclass(frozen=True)
class Needs:
    """What a task asks for.

    Attributes:
        cpus: cores.
        gpus: of a node.
    """

    cpus: int = 1
    gpus: int = 0


def facts(code: Sequence[str] = ()) -> dict[str, str]:
    """What has to be alike on all nodes, or the same work would give another result there.

    Args:
        code: of the user, as `package.module:name`.
    """
    found = {"Python": platform.python_version(), "compress": __version__, **versions()}
    found["compress's code"] = code_digest()[:12]
    found["INT8 that saturates (a CPU without VNNI)"] = "yes" if int8_saturates() else "no"
    for source in code:
        try:
            found[source] = digest_of_code(source)[:12]
        except Exception as err:  # whatever the import raises
            found[source] = f"not to be had: {first_line(err)}"
    return found


def differing(here: Mapping[str, str], there: Mapping[str, str]) -> str:
    """The first fact that is another one; empty where all are alike."""
    for name in {**here, **there}:
        if here.get(name) != there.get(name):
            return f"{name} is {there.get(name, 'not installed')} there and {here.get(name, 'not installed')} here"
    return ""


def check_nodes(ray: Any, shared: Shared, needs: Needs, code: Sequence[str] = ()) -> int:
    """Look at every node; gives how many tasks run at the same time.

    Args:
        ray: connected.
        shared: the folder that each has to have.
        needs: of one task.
        code: of the user, which each has to have.

    Raises:
        RecipeError: no node has what a task needs.
        ResourceError: one does not see the folder.
        ServerError: one runs something else, or does not answer.
    """
    nodes = alive(ray)
    slots = at_once(nodes, needs)
    if not slots:
        raise _nowhere(nodes, needs)
    here, word = facts(code), shared.write_probe()
    answered = 0
    try:
        for name, found in _settled(ray, nodes, _Look(shared, word, tuple(code), needs.gpus > 0)):
            if isinstance(found, Exception):
                raise _silent(name, found) from found
            wrong, there = found
            if wrong:
                raise ResourceError(
                    f"{name} does not see {shared.given}",
                    why=wrong,
                    mend="mount one folder under the same path on each machine, for the same user, and name it with "
                    "--shared (by default it is the work folder)",
                )
            if other := differing(here, there):
                raise ServerError(
                    f"{name} would give other results",
                    why=other,
                    mend="install the same on each node and start Ray there anew; or take that node out of the cluster",
                )
            answered += 1
    finally:
        seen = shared.remove_probe(word)
    if seen < answered:
        why = f"{counted(answered, 'nodes')} wrote into it, and {seen} of their files can be seen here"
        mend = "mount one folder that all machines share at that path"
        raise ResourceError(f"{shared.given} is not one folder", why=why, mend=mend)
    return slots


def alive(ray: Any) -> list[Mapping[str, Any]]:
    """The nodes that the head takes to be there."""
    return [node for node in ray.nodes() if node["Alive"]]


def at_once(nodes: Sequence[Mapping[str, Any]], needs: Needs) -> int:
    """How many tasks run at the same time."""
    return sum(_slots(node, needs) for node in nodes)


def _slots(node: Mapping[str, Any], needs: Needs) -> int:
    has = node["Resources"]
    by_cpu = int(has.get("CPU", 0) // needs.cpus)
    return min(by_cpu, int(has.get("GPU", 0) // needs.gpus)) if needs.gpus else by_cpu


def _nowhere(nodes: Sequence[Mapping[str, Any]], needs: Needs) -> RecipeError:
    asked = _of(needs.cpus, "CPU") + (f" and {_of(needs.gpus, 'GPU')}" if needs.gpus else "")
    most = [int(max((node["Resources"].get(kind, 0) for node in nodes), default=0)) for kind in ("CPU", "GPU")]
    has = f"{_of(most[0], 'CPU')} and {_of(most[1], 'GPU')}"
    return RecipeError(
        "no node of the cluster can make a candidate",
        why=f"a task asks for {asked} of one node; of {counted(len(nodes), 'nodes')}, none has more than {has}",
        mend="ask for less (--train-threads, --threads, --devices, --accelerator), or start a node that has it",
    )


def _of(number: int, kind: str) -> str:
    return f"{number} {kind}{'s' * (number != 1)}"


@dataclass(frozen=True)
class _Look:
    """What a node looks for: the folder, a word in it, the user's code; and whether tasks have GPUs."""

    shared: Shared
    word: str
    code: tuple[str, ...]
    gpus: bool


def _settled(ray: Any, nodes: Sequence[Mapping[str, Any]], look: _Look) -> Iterator[tuple[str, Any]]:
    """As `_looked`, without nodes that have died: Ray lists one for seconds after that, and before it takes tasks."""
    for left in reversed(range(TURNS)):
        again = set()
        for node_id, name, found in _looked(ray, nodes, look):
            if (
                left
                and isinstance(found, ray.exceptions.RayError)
                and not isinstance(found, ray.exceptions.RayTaskError)
            ):
                again.add(node_id)
            else:
                yield name, found
        if not again:
            return
        time.sleep(SETTLES)
        nodes = [node for node in alive(ray) if node["NodeID"] in again]


def _looked(ray: Any, nodes: Sequence[Mapping[str, Any]], look: _Look) -> Iterator[tuple[str, str, Any]]:
    """For each node its id, its name, and what it found of the folder and of itself, or why it did not."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    # A process whose CUDA has begun without GPUs never sees one: where tasks have some, none of them gets this one.
    again = {"max_calls": 1} if look.gpus else {}
    asked = ray.remote(num_cpus=0, max_retries=1, **again)(_seen)
    sent = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        name = f"the node {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        sent[asked.options(scheduling_strategy=there).remote(look)] = node["NodeID"], name
    done, late = ray.wait(list(sent), num_returns=len(sent), timeout=LOOKS)
    for each in done:
        try:
            yield *sent[each], ray.get(each)
        except ray.exceptions.RayError as err:
            yield *sent[each], err
    for each in late:
        yield *sent[each], TimeoutError(f"it did not answer within {LOOKS:g} s")


def _seen(look: _Look) -> tuple[str, dict[str, str]]:
    """On a node."""
    see_gpus(0)
    tidy()  # of a command that was killed, with its tasks
    wrong = look.shared.see_probe(look.word)
    return wrong, {} if wrong else facts(look.code)


def _silent(name: str, err: Exception) -> ServerError:
    return ServerError(
        f"{name} can't work",
        why=behind(err),
        mend="install this project there, as here (pip install -c constraints.txt -e '.[ray]'), and start Ray anew",
    )
