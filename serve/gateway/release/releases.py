"""The releases of a gateway: kept in step with the state file, asked for each request, shown with the metrics."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from compress.errors import ServerError
from serve.gateway.errors import GatewayError, NoRolloutError, UnknownModelError, UpstreamTimeoutError
from serve.gateway.oip.metadata import ModelMetadata
from serve.gateway.release.aborts import Aborts
from serve.gateway.release.agreement import misfit, unlike
from serve.gateway.release.answering import models_of
from serve.gateway.release.begun import Begun
from serve.gateway.release.beside import Besides
from serve.gateway.release.release import Release
from serve.gateway.upstream.upstream import Upstream, model_path
from serve.http.client import ExchangeError
from serve.rollout.course import Course, Event
from serve.rollout.plan import Target
from serve.rollout.store import AbortAskedError, Row, StateFileError, Store

__all__ = ["PATIENCE_S", "Releases"]

LOOK_S = 0.5
SAVE_S = 2.0
PATIENCE_S = 2.0
MOST_NAMED = 8  # models in a message
MOST_STEPS = 64  # of an ensemble, that are looked at
NOTHING = "no other version is there to go back to, or the model can't be asked"
UNKNOWN = "a model under release is answered by whatever Triton serves under its name, until its rollout can be read"
ASKED = "asked for"
UNWRITTEN = (
    "{}; this gateway keeps the candidate from requests, and writes it down as soon as it can: until then other "
    "gateways go on, and so does this one if it is started anew"
)
ENDED = "it is aborted already, which will be written down"
LOST = "the baseline {} is no longer served: pack with --serve-latest 2, so that Triton keeps both versions"
OUTGROWN = (
    "its models have grown by {} MiB beyond what they were loaded with, and another was refused for want of that memory"
)
NOT_LOADED = "{0} is not loaded yet: serve models load {0.model} (of a server with --model-control; else start it anew)"

logger = logging.getLogger(__name__)


class Releases:
    """What the state file says, put into practice.

    Args:
        path: of the state file, which need not exist.
        upstream: where the models are.
        functions: names of the operator's, that rules may name.

    Attributes:
        begun: which version has which sequence.
        outgrown: says how many MiB some models have grown by, where others are refused for it.
        bound: is told, by groups, of the models that answer for each other's names.
    """

    def __init__(self, path: Path, upstream: Upstream, functions: Collection[str] = ()) -> None:
        self._functions = functions
        self._store = Store(path)
        self.begun = Begun()
        self._upstream = upstream
        self._owner = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._by_model: dict[str, Release] = {}
        self._rows: dict[str, Row] = {}
        self._saved: dict[int, float] = {}
        self._aborts = Aborts(self._store)
        self._broken = False
        self._started = False
        self._looked = False
        self.outgrown: Callable[[Collection[str]], int] = lambda _models: 0
        self.bound: Callable[[Collection[frozenset[str]]], Awaitable[None]] | None = None
        upstream.answers_for_name = self._answers_for_name

    def _answers_for_name(self, model: str, version: str) -> bool:
        """Whether a version that Triton does not serve is one that answers for its model's name."""
        release = self._by_model.get(model)
        return release is not None and release.kept == Target(model, version)

    def get(self, model: str) -> Release | None:
        """The release of a model that clients ask for; None where Triton's own answer is wanted."""
        return self._by_model.get(model)

    def beside(self, asked: Target, release: Release | None = None) -> Besides | None:
        """Where to tell of a request that may be with a candidate, and not by its release; None where it is not.

        Args:
            asked: whom it names.
            release: by which it is answered: its two models, or the one of them that has taken over, may be candidates
                of others.
        """
        if not self._by_model:
            return None
        goes = (asked,) if release is None else release.may_ask
        found = [each.beside for each in self._by_model.values() if each is not release and each.meets(goes)]
        return Besides(tuple(found)) if found else None

    def needed(self) -> set[str]:
        """The models that rollouts under way are about."""
        active = [row for row in self._rows.values() if row.active]
        return {name for row in active for name in (row.candidate.model, (row.baseline or Target(row.model)).model)}

    def __iter__(self) -> Iterator[Release]:
        return iter(list(self._by_model.values()))

    def shown(self) -> list[dict[str, Any]]:
        """Each rollout that decides what is served, as it is now."""
        found = []
        for row in self._rows.values():
            told = row.to_dict()
            release = self._by_model.get(row.model)
            if release is not None and release.rollout == row.rollout:
                told |= {"baseline": str(release.baseline), "weight": round(100 * release.weight, 3)}
                if release.course is not None:
                    told |= {
                        "state": release.course.state,
                        "step": release.course.step,
                        "seconds": round(release.course.seconds(time.monotonic()), 1),
                        "evidence": release.course.analysis.evidence(),
                        "unjudged": release.unjudged_count,
                    }
            found.append(told | self._aborts.shown(row))
        return found

    async def abort(self, model: str) -> str:
        """Give everything back to the baseline, at once; why that can't be written down yet, "" where it is.

        Raises:
            NoRolloutError: none is under way.
        """
        row, unread = self._rows.get(model), ""
        try:  # where it has none, as one that was moved, what is under way here goes on
            row = next(iter(await asyncio.to_thread(self._store.all, model)), row)
        except ServerError as err:
            unread = f"none is under way in this gateway, and its state file can't be read: {err.why}"
        if row is None or not row.active:
            raise NoRolloutError(model, unread) if unread else NoRolloutError(model)
        release = self._by_model.get(model)
        if row not in self._aborts:
            own = release is not None and release.rollout == row.rollout
            if release is not None and own and release.course is not None and release.course.state == "aborted":
                raise NoRolloutError(model, ENDED)
            self._aborts.ask(row)
            if release is not None:
                _abort(release)
        try:
            await self._aborts.write(row)
        except StateFileError as err:
            logger.error("the rollout of %s is aborted here, and not in the state file: %s", model, err.why)
            return UNWRITTEN.format(f"{err.what}: {err.why}")
        except ServerError as err:
            raise NoRolloutError(model, err.why) from err
        return ""

    async def watch(self) -> None:
        """Follow the state file until cancelled; one that can't be used changes nothing."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    async def look(self) -> None:
        """Bring releases and state file into step, once."""
        try:
            await self._look()
            self._broken, self._looked = False, True
        except ServerError as err:
            if not self._broken:
                as_they_are = "rollouts go on as they are" if self._looked else UNKNOWN
                logger.error("%s: %s (%s)", as_they_are, err.what, err.why)
            self._broken = True
        except Exception:  # whatever it is, the next look must come: an operator's abort waits for it
            if not self._broken:
                logger.exception("rollouts go on as they are")
            self._broken = True

    def rest(self) -> None:
        """Decide nothing more, as requests are about to be cut off."""
        for release in self._by_model.values():
            release.rests = True

    async def close(self) -> None:
        """Write down what was learnt."""
        self._saved.clear()
        await self.look()

    async def _look(self) -> None:
        if not self._store.path.exists():
            return
        failure: Exception | None = None
        if not self._started:
            try:
                await asyncio.to_thread(self._store.take_over, self._owner)
                self._started = True
            except ServerError as err:  # a disk that is full, perhaps: what is decided can be read all the same
                failure = err
        unread: dict[str, ServerError] = {}  # the others still have their turn, and who answers for these stays
        rows = await asyncio.to_thread(self._store.current, unread)
        failure = next(iter(unread.values()), failure)
        for row in rows:
            try:
                await self._follow(row)
            except Exception as err:  # the others still have their turn
                failure = err
        self._rows = {row.model: row for row in rows}
        for model in self._by_model.keys() - self._rows.keys() - unread.keys():
            del self._by_model[model]
        if self.bound is not None:
            await self.bound({frozenset((model, *models_of(model, each))) for model, each in self._by_model.items()})
        if failure is not None:
            raise failure

    async def _follow(self, row: Row) -> None:
        release = self._by_model.get(row.model)
        if release is not None and release.rollout != row.rollout:
            release = None
            self._saved.pop(row.id, None)
        if not row.active:
            self._aborts.ended(row)
            self._settle(row, release)
            return
        if row.owner != self._owner:
            try:
                row = await self._aborts.repeated(row, judges=False)
                claimed = await asyncio.to_thread(self._store.claim, row, self._owner)
            except ServerError:  # it can't be written: who answers stays as it was written last
                self._trail(row, release)
                raise
            if not claimed:
                self._trail(row, release)
                return
        row = await self._aborts.repeated(row, judges=True)
        if release is None or (release.course is None and row.state == "running"):
            if row.unread:
                await self._unread(row)
                return
            release = await self._resumed(row)
        if release is None:
            if row.why != NOTHING or row.wish is not None:
                await self._save(row, None, NOTHING)
            return
        if release.course is None:
            await self._begin(row, release)
            return
        if release.running and release.texts is None:  # where Triton was not there yet as a gateway went on
            with suppress(GatewayError):
                release.knows(await self._metadata(release.baseline))
        if release.running and release.steps is None:
            with suppress(GatewayError):
                mine, theirs = [await self._steps(target) for target in (release.candidate, release.baseline)]
                release.askers = await self._askers(release, mine - theirs)
                release.steps = tuple(mine - theirs)
        if release.running and await self._is_lost(release):
            release.events.append(release.course.end("aborted", LOST.format(release.baseline)))
        if release.running and (grown := self.outgrown({release.candidate.model, release.baseline.model})):
            release.events.append(release.course.end("aborted", OUTGROWN.format(grown)))
        if row.wish is not None and release.running:
            release.events.append(_granted(row, release.course))
        elif row.wish == "abort" and release.course.state == "promoted":  # which nobody has been told of yet
            _abort(release)
        release.look()
        if release.events or row.wish or time.monotonic() - self._saved.get(row.id, 0.0) > SAVE_S:
            decided = [event.why for event in release.events if event.kind != "note"]
            await self._save(row, release, decided[-1] if decided else row.why)

    async def _unread(self, row: Row) -> None:
        """Nobody knows what was asked for: the baseline goes on answering, where that can be told."""
        why = f"what was asked for can't be read: {row.unread}"
        baseline = row.baseline or await self._served(row)
        release = None if baseline is None else _release(row, baseline)
        if release is not None:
            release.course = Course(row.plan, time.monotonic())
            release.events.append(release.course.end("aborted", why))
            self._by_model[row.model] = release
        await self._save(row, release, why)

    def _settle(self, row: Row, release: Release | None) -> None:
        """It has ended: everything goes to one of the two."""
        if row.baseline is None:
            self._by_model.pop(row.model, None)
        elif release is None or release.weight != row.weight or release.running:
            self._by_model[row.model] = _release(row, row.baseline, release)

    def _trail(self, row: Row, release: Release | None) -> None:
        """Another gateway judges: go where it goes."""
        here = row in self._aborts
        weight = 0.0 if here else row.weight
        if row.baseline is not None and (release is None or release.course or release.weight != weight):
            self._by_model[row.model] = release = _release(row, row.baseline, release)
            if here:
                _abort(release)

    async def _resumed(self, row: Row) -> Release | None:
        """Keep what is served, or go on where an earlier process was; None where nobody knows what is served."""
        baseline = row.baseline or await self._served(row)
        if baseline is None:
            return None
        release = _release(row, baseline)
        if row.state == "running":
            release.course = Course(row.plan, time.monotonic(), row.step)
            try:
                release.restore(row.seconds, row.snapshot)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as err:
                logger.error(
                    "the evidence of the rollout of %s can't be read, and its step begins anew: %s", row.model, err
                )
                release.course = Course(row.plan, time.monotonic(), row.step)
        self._by_model[row.model] = release
        return release

    async def _served(self, row: Row) -> Target | None:
        """What answers for a model now: itself, or the latest of its versions but the candidate."""
        if row.candidate.model != row.model:
            return Target(row.model)
        try:
            versions = (await self._metadata(Target(row.model))).versions
        except GatewayError:
            return None
        others = [version for version in versions if version != row.candidate.version]
        return Target(row.model, max(others, key=int)) if others else None

    async def _begin(self, row: Row, release: Release) -> None:
        """The first step, once the candidate is ready and can take the baseline's requests."""
        if release.texts is None and (refused := await self._refused(release)):
            release.events.append(Event("refused", refused))
            await self._save(row, release, refused)
            return
        lost = await self._is_lost(release)
        why, for_good = (LOST.format(release.baseline), True) if lost else await self._unready(release)
        asks = why and why != row.why and not for_good and row.wish is None  # once, not at each look
        if asks and (there := await self._missing(release.candidate)):
            why = f"no model is called {release.candidate.model}"
            # The names are for the operator: who may see how far a rollout is need not learn of other models.
            release.events.append(Event("refused", f"{why} in the model repository; {there}"))
            await self._save(row, release, why)
            return
        if row.wish == "abort":
            release.events[:] = [Event("aborted", ASKED)]  # also where it could not be written before
        elif not why:
            release.course = Course(row.plan, time.monotonic())
            release.events.append(Event("step", f"{release.candidate} is ready"))
            if row.wish is not None:
                release.events.append(_granted(row, release.course))
        elif for_good or (row.plan.give_up_s and time.time() - row.created > row.plan.give_up_s):
            release.events.append(Event("aborted", why))
        late = time.monotonic() - self._saved.get(row.id, 0.0) > SAVE_S  # or another would think that nobody follows it
        if release.events or why != row.why or row.baseline is None or row.wish is not None or late:
            await self._save(row, release, release.events[-1].why if release.events else why)

    async def _refused(self, release: Release) -> str:
        """Why it can't begin as asked for, whatever is loaded; "" where it can, or the baseline can't be asked."""
        versions = release.candidate.model == release.baseline.model
        if not versions and not release.plan.agree:
            return ""
        try:
            known = await self._metadata(release.baseline)
        except GatewayError:  # asked again before it begins
            return ""
        if versions and known.shares_steps:
            return _shared(release)
        if not release.plan.agree:
            return ""
        release.knows(known)
        return misfit(release.plan.agree, known, self._functions)

    async def _missing(self, candidate: Target) -> str:
        """Which models there are, where no Triton's repository has the candidate; "" where one has, or nobody knows."""
        known = await self._upstream.known(PATIENCE_S)
        if not known or candidate.model in known:
            return ""
        close = get_close_matches(candidate.model, sorted(known), n=MOST_NAMED)
        names = [*close, *sorted(known - {*close})][:MOST_NAMED]
        more = f" and {len(known) - len(names)} more" if len(known) > len(names) else ""
        return f"name one that is there ({', '.join(names)}{more}), or pack it first"

    async def _is_lost(self, release: Release) -> bool:
        """Whether the baseline is gone: an answer has said so, which may be a model's own words, and a Triton does."""
        if release.lost and not (await self._not_loaded(release.baseline))[1]:
            release.lost = False
        return release.lost

    async def _unready(self, release: Release) -> tuple[str, bool]:
        """Why the candidate can't begin, "" where it can, and whether that is for good."""
        for target in (release.candidate, release.baseline):
            why, told = await self._not_loaded(target)
            if why:
                lost = told and target is release.baseline and release.baseline.version is not None
                return (LOST.format(target), True) if lost else (why, False)
        try:
            known = [await self._metadata(target) for target in (release.candidate, release.baseline)]
        except GatewayError as err:
            return err.error, False
        release.knows(known[1])
        if release.candidate.model == release.baseline.model and known[0].shares_steps:
            return _shared(release), True
        return unlike(*known) or misfit(release.plan.agree, known[1], self._functions), True

    async def _not_loaded(self, target: Target) -> tuple[str, bool]:
        """Which Triton does not say that a model is ready, "" where all do; and whether one says that it is not."""
        path = model_path(target.model, target.version)
        nodes = self._upstream.balancer.nodes
        for node in [node for node in nodes if node.ready] or nodes:
            try:
                answer = await node.control.request(b"GET", f"{path}/ready".encode(), timeout_s=PATIENCE_S)
            except ExchangeError as err:
                return f"{node.address} can't be asked: {err}", False
            if answer.status != 200:
                return NOT_LOADED.format(target), True
        return "", False

    async def _steps(self, target: Target) -> set[Target]:
        """The models that an ensemble or a packed pipeline asks, those of such in it too."""
        found: set[Target] = set()
        asked = [await self._metadata(target)]
        while asked and len(found) < MOST_STEPS:
            whole = asked.pop()
            steps = {Target(*step) for step in whole.steps} | ({Target(whole.network)} if whole.network else set())
            for step in steps - found:
                with suppress(UnknownModelError):  # a word in somebody's own model
                    asked.append(await self._metadata(step))
            found |= steps
        return found

    async def _askers(self, release: Release, steps: set[Target]) -> frozenset[str]:
        """Other models in service that ask the candidate, or one of the steps that it alone has."""
        own = {target.model for target in (release.candidate, *steps)}
        found = set()
        for name in await self._upstream.loaded():
            if name not in (release.model, release.candidate.model, release.baseline.model):
                with suppress(UnknownModelError):  # it has gone meanwhile
                    if own & {step.model for step in await self._steps(Target(name))}:
                        found.add(name)
        return frozenset(found)

    async def _metadata(self, target: Target) -> ModelMetadata:
        self._upstream.forget(target.model, target.version)
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._upstream.metadata(target.model, target.version)
        except TimeoutError as err:
            raise UpstreamTimeoutError("the model server took too long") from err

    async def _save(self, row: Row, release: Release | None, why: str) -> None:
        """Write down where a rollout is; what could not be written is written later."""
        events, course = (release.events, release.course) if release is not None else ([], None)
        state = row.state if course is None else course.state
        if course is None and events:
            state = "aborted"
        if release is None and row.wish == "abort":
            state, why, events = "aborted", ASKED, [Event("aborted", ASKED)]
        save = partial(
            self._store.save,
            row.id,
            self._owner,
            state=state,
            step=0 if course is None else course.step,
            seconds=0.0 if course is None else course.seconds(time.monotonic()),
            why=why,
            baseline=None if release is None else release.baseline,
            snapshot={} if release is None else release.snapshot(),
            evidence={} if course is None else course.analysis.evidence(),
            events=[(event.kind, event.why) for event in events],
            wish_done=row.wish,
        )
        written = list(events)
        try:
            saved = await asyncio.to_thread(save)
        except AbortAskedError:
            return  # the next look sees the wish
        if saved:
            self._saved[row.id] = time.monotonic()
            events[:] = [event for event in events if not any(event is each for each in written)]
            for event in written:
                logger.info("rollout of %s: %s: %s", row.model, event.kind, event.why)
        elif release is not None:
            release.course = None


def _release(row: Row, baseline: Target, before: Release | None = None) -> Release:
    release = Release(row.id, row.model, baseline, row.candidate, row.plan, weight=row.weight, created=row.created)
    if before is not None:  # what is known of the models stays known
        release.batched, release.texts = before.batched, before.texts
    return release


def _shared(release: Release) -> str:
    """Why versions can't be released whose steps are not versioned with them, and the lines to type instead."""
    name = release.baseline.model
    return (
        f"{name} asks its steps, hooks and network, at whatever version is their newest, so its versions answer alike; "
        f"pack the new one under a name of its own (serve pack ARTIFACT --hooks HOOKS.py --repository REPOSITORY "
        f"--name {name}_next), then serve rollout start {release.model} --candidate {name}_next"
    )


def _abort(release: Release) -> None:
    """The baseline has everything, before anybody has written so."""
    course = release.course
    if course is None:
        release.withdraw()
        return
    release.events[:] = [event for event in release.events if event.kind != "promoted"]
    release.events.append(course.end("aborted", ASKED))


def _granted(row: Row, course: Course) -> Event:
    if row.wish == "step":
        return course.promote(time.monotonic(), ASKED)
    return course.end("promoted" if row.wish == "promote" else "aborted", ASKED)
