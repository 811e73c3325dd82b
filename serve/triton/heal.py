"""A model whose process died is loaded again; meanwhile its requests, and those of what is made of it, are refused."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from typing import Any

from compress.errors import ServerError, ToolkitError
from serve.gateway.health.fingerprints import Suspect
from serve.gateway.health.outages import Outages
from serve.gateway.health.suspects import Suspects
from serve.triton.causes import AT_ONCE, KEY, cause_of, wait_of
from serve.triton.control import list_models, reload_alone
from serve.triton.launch import TritonServer
from serve.triton.rounds import Rounds
from serve.triton.stubs import Stub, death_of, is_stopped

__all__ = ["Healer", "kept", "told"]

LOOK_S, PROBE_S = 1.0, 0.2
IN_ORDER_S = 0.3  # Triton clears a process away that it has asked to end
STEADY_S, FIRST_S, LONGEST_S = 60.0, 0.5, 10.0
WAITED_S = 0.9
TOLD = 8
KEPT_S = 30.0  # between loads, and that Triton has for requests of the one before, until it is told to keep its process


def told(suspects: list[Suspect]) -> str:
    """Who was with a process when it died, in words."""
    if not suspects:
        return "with no request in flight"
    more = f" and {len(suspects) - TOLD} more" if len(suspects) > TOLD else ""
    return f"in flight: {', '.join(map(str, suspects[:TOLD]))}{more}"


def kept(stubs: Iterable[Stub], seen: Mapping[int, float], now: float) -> list[Stub]:
    """Processes beside which a later load of their model has had another for a while.

    Triton never lets go of some loads (see `serve.triton.ending`). What is at work for long looks the same from
    outside, so they are told of, not ended.

    Args:
        stubs: that there are.
        seen: since when each is known, by id, on the monotonic clock.
        now: on that clock.
    """
    known = [stub for stub in stubs if stub.pid in seen]
    newest: dict[tuple[str, str, str], float] = {}
    for stub in known:
        if now - seen[stub.pid] > KEPT_S:
            name = stub.model, stub.version, stub.instance
            newest[name] = max(newest.get(name, -math.inf), seen[stub.pid])
    last = ((stub, newest.get((stub.model, stub.version, stub.instance), -math.inf)) for stub in known)
    return [stub for stub, newer in last if newer - seen[stub.pid] > KEPT_S]


class Healer:
    """Watches the processes of a Triton's Python models.

    Args:
        triton: that runs; it must allow this process to load models.
        uses: gives what `serve.repository.needs.used_by` makes of the repository as it is.
        outages: are told.
        suspects: are asked who was in flight.
        on_event: is told what happens, a line each.
        check: reads a model's files again before it is loaded; raises ToolkitError where it is not to be.
    """

    def __init__(
        self,
        triton: TritonServer,
        uses: Callable[[], Mapping[str, frozenset[str]]],
        outages: Outages,
        suspects: Suspects,
        on_event: Callable[[str], None],
        check: Callable[[Collection[str]], object] = lambda _models: None,
    ) -> None:
        self._triton = triton
        self._uses = uses
        self._users = uses()
        self._outages = outages
        self._suspects = suspects
        self._on_event = on_event
        self._check = check
        self._watched: dict[int, int] = {}
        self._seen: dict[int, float] = {}  # since when a process is watched
        self._told_kept: set[int] = set()
        self._stopped: dict[int, float] = {}  # when a process was last seen to stand still
        self._first = triton.stubs()  # one may die before the first look
        self._models = {stub.instance: stub.model for stub in self._first}  # by instance
        self._healing: dict[str, int] = {}  # how many died since the last load was begun
        self._row: Counter[str] = Counter()
        self._of_keys: Counter[str] = Counter()  # deaths in a row of one key alone, which is refused before long
        self._died: dict[str, float] = {}
        self._gone: dict[int, float] = {}  # when the watch over each ended, of late
        self._asked: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Until cancelled."""
        self._outages.seen = self._reported
        for stub in self._first:
            self._watch(stub)
        rounds = Rounds("can't look after the models' processes", self._on_event)
        try:
            while True:
                with rounds.one():
                    await self._look()
                for _ in range(round(LOOK_S / PROBE_S) or 1):
                    self._probe()
                    await asyncio.sleep(min(LOOK_S, PROBE_S))
        finally:
            self._outages.seen = lambda _instance, _began, _model: None
            for pid in list(self._watched):
                self._leave(pid)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _look(self) -> dict[str, list[int]]:
        """Watch processes that are new; the processes by instance."""
        alive: dict[str, list[int]] = {}
        found = []
        more, self._first = bool(self._first), []
        began = time.monotonic()
        self._gone = {pid: at for pid, at in self._gone.items() if began - at < PROBE_S + LOOK_S + WAITED_S}
        await asyncio.to_thread(self._triton.end_left)
        for stub in await asyncio.to_thread(self._triton.stubs):
            self._models[stub.instance] = stub.model
            if self._gone.get(stub.pid, -1.0) >= began:
                continue  # it ended, and was seen to, while they were looked for
            if stub.pid not in self._watched:
                if stub.pid in self._triton.ended and death_of(stub.pid) is not None:
                    self._triton.ended.discard(stub.pid)
                    continue  # it was ended before anybody watched it
                if not self._watch(stub):
                    continue
                more = True
            alive.setdefault(stub.instance, []).append(stub.pid)
            found.append(stub)
        if more:
            await asyncio.to_thread(self._triton.close_regions)
            await self._read_uses()
        for stub in kept(found, self._seen, time.monotonic()):
            self._tell_kept(stub)
        return alive

    def _watch(self, stub: Stub) -> bool:
        """Whether it is watched from now on: not if it has just ended."""
        try:
            self._watched[stub.pid] = file = os.pidfd_open(stub.pid)
        except OSError:
            return False
        self._seen[stub.pid] = time.monotonic()
        self._triton.ended.discard(stub.pid)  # of one before it, with its number
        asyncio.get_running_loop().add_reader(file, self._ended, stub)
        return True

    def _tell_kept(self, stub: Stub) -> None:
        if stub.pid not in self._told_kept:
            self._told_kept.add(stub.pid)
            self._on_event(
                f"{stub.model}: the process {stub.pid} of an earlier load is still there: for a request that takes"
                " long, or because another of that load has died, or its code raised; it then ends with Triton"
            )

    def _probe(self) -> None:
        """See which processes stand still: one that kept Triton waiting may go on before Triton says so."""
        now = time.monotonic()
        for pid in self._watched:
            if is_stopped(pid):
                self._stopped[pid] = now

    def _leave(self, pid: int) -> None:
        file = self._watched.pop(pid)
        self._gone[pid] = time.monotonic()
        self._stopped.pop(pid, None)
        del self._seen[pid]
        self._told_kept.discard(pid)
        asyncio.get_running_loop().remove_reader(file)
        os.close(file)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _ended(self, stub: Stub) -> None:
        """A process is no more: at once where it died, after a moment where Triton may have asked it to end."""
        self._leave(stub.pid)
        if stub.pid in self._triton.ended:
            self._triton.ended.discard(stub.pid)
            return
        how = death_of(stub.pid)
        if how is None or how.endswith("code 0"):
            self._start(self._look_again(stub))
        else:
            self._lost(stub.model, f"its process {stub.instance} {how}")

    async def _look_again(self, stub: Stub) -> None:
        await asyncio.sleep(IN_ORDER_S)
        if (how := death_of(stub.pid)) is not None:
            self._lost(stub.model, f"its process {stub.instance} {how}")

    def _reported(self, instance: str, began: float, asked: str) -> None:
        """Triton says that an instance is not healthy, to a request for the model `asked`.

        A model may say so in Triton's words, and a client through it: it can mean no more than itself and its steps.
        """
        owner = self._models.get(instance) or self._owner_of(instance, asked)
        if asked not in self._users.get(owner, {owner}):
            return
        if time.monotonic() - began < WAITED_S:
            return  # Triton says so after a second; these are a model's own words, or a client's through them
        if owner and instance not in self._asked:
            self._asked.add(instance)
            self._start(self._confirm(instance, owner, began))

    def _owner_of(self, instance: str, asked: str) -> str:
        """Whose an instance is that died before it was seen: the model's or a step's, by the name that Triton gives."""
        owners = (model for model, users in self._users.items() if asked in users)
        return next((each for each in owners if re.fullmatch(rf"{re.escape(each)}_\d+_\d+", instance)), "")

    async def _confirm(self, instance: str, model: str, began: float) -> None:
        """A process that lives, but kept Triton waiting, is out of step with it for good: it gives the answers of
        requests that were given up to others, and Triton then aborts. So it is ended, once it is proven: the words
        alone may be a client's, through a model that says what it was told.
        """
        try:
            alive = await self._look()
            if model in self._healing:
                return
            # The words name one that there never was, where the model has others.
            if instance not in alive and (
                instance in self._models or all(self._models[each] != model for each in alive)
            ):
                self._lost(model, f"its process {instance} is gone")
            self._probe()
            # A request that began before this process did was told of the one before it.
            for pid in [each for each in alive.get(instance, ()) if self._seen.get(each, began) < began]:
                if self._stopped.get(pid, -1.0) < began:
                    continue
                self._on_event(f"{model}: its process {instance} did not answer Triton; it is ended")
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            self._asked.discard(instance)

    def _lost(self, model: str, why: str) -> None:
        if not self._triton.running:
            return  # all of them end with it
        self._outages.deaths[model] += 1
        self._outages.begin(model, self._users.get(model, {model}), why)
        if model in self._healing:
            self._healing[model] += 1
        else:
            self._healing[model] = 1
            self._start(self._heal(model, why))

    async def _heal(self, model: str, why: str) -> None:
        try:
            began = time.monotonic()
            guilty = await self._suspects.died(self._users.get(model, frozenset({model})))
            await self._read_uses()
            self._outages.begin(model, self._users.get(model, {model}), why)
            wait_s = self._wait_s(model, began, cause_of(guilty))
            self._on_event(f"{model}: {why}; {told(guilty)}; it is loaded again")
            if not await self._served(model):
                return
            while self._healing[model] and self._triton.running:
                self._healing[model] = 0
                await asyncio.sleep(wait_s)
                wait_s = min(max(FIRST_S, 2 * wait_s), LONGEST_S)
                self._triton.wedged.add(model)
                try:
                    await asyncio.to_thread(self._check, (model,))
                    await reload_alone(self._triton.grpc_address, model, self._triton.control)
                except ToolkitError as err:
                    self._healing[model] = 1
                    self._on_event(f"{model} can't be loaded again: {err.why}")
                await self._look()
            self._outages.end(model)
            self._suspects.began(self._users.get(model, frozenset({model})))
            if self._triton.running:
                self._on_event(f"{model} is served again after {time.monotonic() - began:.1f} s")
        finally:
            del self._healing[model]
            self._outages.end(model)

    async def _read_uses(self) -> None:
        """Models come and go, and what asks which."""
        try:
            self._users = await asyncio.to_thread(self._uses)
        except ToolkitError as err:  # of another model's folder; what is known of this one still holds
            self._on_event(f"the models' uses of each other can't be read anew: {err.why}")

    def _wait_s(self, model: str, now: float, cause: str) -> float:
        """How long it is before the model is loaded again; what one key did alone is waited for by nobody else."""
        if now - self._died.get(model, -STEADY_S) >= STEADY_S:
            self._row[model] = self._of_keys[model] = 0
        else:
            self._row[model] += 1
        self._died[model] = now
        if cause == KEY:
            self._of_keys[model] += 1
            if self._of_keys[model] <= AT_ONCE:
                self._row[model] = max(0, self._row[model] - 1)
                return 0.0
        return wait_of(self._row[model], FIRST_S, LONGEST_S)

    async def _served(self, model: str) -> bool:
        """Whether it is meant to be loaded: somebody may have taken it out."""
        try:
            rows = await asyncio.to_thread(list_models, self._url(), self._triton.control)
        except ServerError:
            return False
        return any(row.name == model and row.state == "READY" for row in rows)

    def _url(self) -> str:
        return f"http://{self._triton.http_address}"
