"""What a request has to pass before Triton sees it: its key, its key's limits, and a place among the others."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from compress.errors import ServerError
from serve.gateway.access.accounts import NoSilence, Silence
from serve.gateway.access.admission import Admission, Bounds
from serve.gateway.access.asides import Asides
from serve.gateway.access.begins import Begins
from serve.gateway.access.families import Families, Told
from serve.gateway.access.identity import Identity, KeyRing
from serve.gateway.access.left_streams import LeftStreams
from serve.gateway.access.lists import Lists
from serve.gateway.access.long_work import LongWork
from serve.gateway.access.loop_time import LoopTime
from serve.gateway.access.memory import Memory
from serve.gateway.access.seated import Seated
from serve.gateway.access.slotless import Slotless, Waiting
from serve.gateway.access.slots import Slots, Turn
from serve.gateway.errors import ForbiddenError
from serve.gateway.health.flights import At, Flight
from serve.gateway.health.incidents import Incidents
from serve.gateway.on_demand.lease import Lease
from serve.gateway.on_demand.residency import Residency
from serve.gateway.settings import ModelSettings, Settings

__all__ = ["OTHERS", "Gate"]

MAX_MODELS = 1000
OTHERS = "(others)"
LOOK_S = 0.5
OF_CONNECTIONS = 4  # one in so many may be of requests whose sequences wait for slots of a model, which may have half

logger = logging.getLogger(__name__)


class Gate:
    """The gate of one gateway.

    Args:
        settings: of the gateway.
        incidents: models that are down, and requests that did it; none by default.
        memory: of what is on its way; one of its own by default.
        residency: of models that are loaded on demand; None where all are loaded for good.
        silence: of the model servers; None where nobody tells.

    Raises:
        ServerError: the file of keys can't be used.
    """

    def __init__(
        self,
        settings: Settings,
        incidents: Incidents | None = None,
        memory: Memory | None = None,
        residency: Residency | None = None,
        silence: Silence | None = None,
    ) -> None:
        self.incidents = incidents or Incidents()
        self.memory = memory or Memory(settings.memory_bytes)
        self.residency = residency
        self.keys = KeyRing(settings.keys)
        self.asides = Asides(self.memory)
        self.left_streams = LeftStreams(settings.timeout_s)
        self.waiting = Waiting(settings.max_connections // OF_CONNECTIONS)
        self.begins = Begins()
        self.loop_time = LoopTime()
        self.long_work = LongWork()
        self.slots = Slots(settings.sequence_wait_s, share=settings.max_sequence_share)
        self._settings = settings
        self._places: dict[str, Admission] = {}
        self._others: Admission | None = None
        self._lists: dict[Admission, Lists] = {}
        self._families = Families(silence or NoSilence())

    def places(self, model: str) -> Admission:
        """The places of a model; names that Triton has not answered for yet share theirs."""
        found = self._places.get(model)
        if found is not None:
            return found
        if model in self._settings.models:
            return self._add(model)
        if self._others is None:
            self._others = self._new(OTHERS)
        return self._others

    def lists(self, model: str) -> Lists:
        """Where parts of lists of texts stand."""
        places = self.places(model)
        found = self._lists.get(places)
        if found is None:
            found = self._lists[places] = Lists(places)
        return found

    def among(self, model: str, who: str, turn: Turn | None) -> Admission | Seated | Slotless:
        """Where a request of a key stands while it is with a model: in one of its places, or beside them.

        Args:
            turn: of a request of a sequence.
        """
        if turn is None:
            return self.places(model)
        beside = self.waiting.of(model, who)
        return beside if turn.waits else Seated(self.places(model), beside, turn, self.begins)

    def check(self, model: str, identity: Identity, patience_s: float, models: Collection[str]) -> None:
        """Raises OverloadedError where a request that came now would wait too long; for those not yet read.

        Those of a key may be of a sequence that has a slot, for which others wait.

        Args:
            model: that is asked.
            identity: of who asks.
            patience_s: how long the client would wait for a place at most, in seconds.
            models: that may answer for it.
        """
        places, who = self.places(model), identity.id
        if not places.free_for(who, identity.priority) and not self.slots.holds(models, who):
            places.check(identity.priority, patience_s, who)

    def lease(self) -> Lease:
        """What a request will hold of its models, where these come and go; to be closed."""
        return Lease(self.residency)

    async def bring(self, model: str, who: str, deadline: float) -> None:
        """Have a model loaded, where it is on demand: to ask about one is to ask for it; raises as `Lease.need`."""
        lease = self.lease()
        try:
            await lease.need([model], who, deadline)
        finally:
            lease.close()

    def will_come(self, model: str, version: str | None = None) -> bool:
        """Whether a model, and a version of it, is not loaded, and a request would have it loaded."""
        if self.residency is None or self.residency.state(model) not in ("ON_DEMAND", "LOADING"):
            return False
        return version is None or self.residency.known[model].serves(version)

    def check_control(self) -> None:
        """Raises ForbiddenError where models come and go by the requests for them: nobody loads and unloads them."""
        if self.residency is not None:
            raise ForbiddenError(
                "models are loaded and unloaded by the requests for them here",
                why="with --memory, one that came or went by hand would get past the memory and what requests hold",
                mend="ask the model, or start `serve up` with --pin MODEL",
            )

    def holds(self, model: str) -> bool:
        """Whether somebody waits for requests of a model that are with Triton, or for their turn, or it is down."""
        return any(kind.awaited for kind in self.places(model).kinds) or model in self.incidents.outages

    def board(self, flight: Flight, sent: Callable[[str, At, At], None], model: str = "") -> None:
        """A request has its place, and is about to be sent.

        Args:
            flight: is told what it keeps at work.
            sent: of its places, that are told where it goes if that makes a difference.
            model: that is asked, where it is known by another's name.
        """
        places = self.places(model or flight.model)
        flight.needs = places.needs(flight.key)
        if places.fairness.queues.is_split:
            flight.on_sent = partial(sent, flight.key)

    def known(self, model: str) -> None:
        """Triton has answered for this model."""
        if model not in self._places and len(self._places) < MAX_MODELS:
            self._add(model)

    def works(
        self,
        model: str,
        instances: int,
        asks: Sequence[str] = (),
        *,
        servers: int = 1,
        together: int = 0,
        waits_s: float = math.inf,
        latest: str = "",
    ) -> None:
        """So many instances of a model work at the same time, on all servers.

        Args:
            servers: how many there are.
            together: requests that an instance answers at a time at most; 0 where nobody knows.
            waits_s: for how long one that is free waits for more of a batch, at most; see `Fairness`.
            latest: as of `Works`.
            asks: other models that answer for it; what keys have used of the one, they have used of the others.
        """
        for each in (*asks, model):
            self.known(each)
        self._families.works(model, Told(instances, together, waits_s, latest), asks, servers)
        self._families.settle(self._places)

    def answer_for(self, groups: Collection[frozenset[str]]) -> None:
        """Models of one group answer for each other by a release: what keys have used of one, they have of all."""
        if self._families.answer_for(groups):
            self._families.settle(self._places)

    def __iter__(self) -> Iterator[Admission]:
        yield from self._places.values()
        if self._others is not None:
            yield self._others

    async def watch_keys(self) -> None:
        """Follow the file of keys until cancelled; a broken one changes nothing, and is told once."""
        told = ""
        while not self.keys.open:
            await asyncio.sleep(LOOK_S)
            self.keys.look()
            if not self.keys.changed():
                told = ""
            else:
                try:
                    self.keys.reload()
                    logger.info("read %d keys anew", len(self.keys))
                    told = ""
                except Exception as err:  # whatever it is, the next look must come: who was revoked would stay
                    before, told = told, repr(err)
                    if told == before:
                        continue
                    if isinstance(err, ServerError):
                        logger.error("the keys stay as they were: %s (%s)", err.what, err.why)
                    else:
                        logger.exception("the keys stay as they were")

    def _add(self, model: str) -> Admission:
        self._places[model] = self._new(model)
        self._families.settle(self._places)
        return self._places[model]

    def _new(self, model: str) -> Admission:
        general, own = self._settings, self._settings.models.get(model, ModelSettings())
        bounds = Bounds(
            most=own.max_in_flight or general.max_in_flight,
            least=min(2, own.max_in_flight or general.max_in_flight),
            target_s=own.latency_target_s or general.latency_target_s or None,
            wait_s=own.max_wait_s or general.max_wait_s or None,
            waiting=general.max_waiting,
        )
        return Admission(model, bounds, time.monotonic)
