"""Who asks: the key of a request, and what it may do."""

from __future__ import annotations

import fnmatch
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from serve.config.names import LONGEST
from serve.gateway.access.keys import Key, digest_of, read_keys
from serve.gateway.access.rate_limit import TokenBucket
from serve.gateway.access.token_rate import TokenRate
from serve.gateway.errors import ForbiddenError, GatewayError, RateLimitedError, UnauthorizedError

__all__ = ["ANONYMOUS", "KEY_HEADERS", "Identity", "KeyRing"]

KEY_HEADERS = (b"authorization", b"x-api-key")
REMEMBERED = 1000
# What a key may ask besides inference, whatever its own rate: a question costs about as many tokens as it costs Triton
# answers. Enough for a page that is looked at, and for a client that waits for a model.
QUESTIONS, QUESTIONS_AT_ONCE = 20.0, 100


class Identity:
    """A client.

    Args:
        key: what was stored of its key.
        bucket: of its requests; None for no limit.
        questions: of what it asks besides inference; None for no limit.
        tokens: of texts that models read for it; None for no limit.
    """

    __slots__ = (
        "_allowed", "_models", "admin", "bucket", "digest", "expires", "feedback", "id", "metrics", "name", "priority",
        "questions", "tokens",
    )  # fmt: skip

    def __init__(
        self,
        key: Key,
        bucket: TokenBucket | None,
        questions: TokenBucket | None = None,
        tokens: TokenRate | None = None,
    ) -> None:
        self.id = key.id
        self.name = key.name
        self.digest = key.digest if key.id else ""  # nobody's is no secret
        self.priority = key.priority
        self.admin = key.admin
        self.metrics = key.metrics or key.admin
        self.feedback = key.feedback or key.admin
        self.bucket = bucket
        self.questions = questions
        self.tokens = tokens
        self.expires = key.expires_at
        everything = "*" in key.models
        self._models = None if everything else re.compile("|".join(map(fnmatch.translate, key.models)))
        self._allowed: set[str] = set()

    def check_model(self, model: str) -> None:
        """Raises ForbiddenError where the key may not ask the model."""
        if self._models is None or model in self._allowed:
            return
        if len(model) > LONGEST or not self._models.fullmatch(model):
            raise ForbiddenError(
                f"the key {self.name!r} may not ask the model {model[:LONGEST]!r}", mend="ask for a key that may"
            )
        if len(self._allowed) < REMEMBERED:
            self._allowed.add(model)

    def may(self, model: str) -> bool:
        """Whether `check_model` has let it pass before, or would let any pass."""
        return self._models is None or model in self._allowed

    def sees(self, model: str) -> bool:
        """Whether the model is one of those that it may ask."""
        return self._models is None or self._models.fullmatch(model) is not None

    def check_admin(self) -> None:
        """Raises ForbiddenError where the key is no administrator's."""
        if not self.admin:
            raise ForbiddenError("this needs a key with admin", mend="make one: serve keys add NAME --admin")

    def check_metrics(self) -> None:
        """Raises ForbiddenError where the key may not read metrics."""
        if not self.metrics:
            raise ForbiddenError("this needs a key with metrics", mend="make one: serve keys add NAME --metrics")

    def check_feedback(self) -> None:
        """Raises ForbiddenError where the key may not say which answers were correct."""
        if not self.feedback:
            raise ForbiddenError("this needs a key with feedback", mend="make one: serve keys add NAME --feedback")

    def ask(self, cost: float, what: str = "this") -> None:
        """Count a question that is no inference; raises RateLimitedError, whose reason says `what` it is."""
        if self.questions is not None and (wait := self.questions.take(time.monotonic(), cost)):
            raise RateLimitedError(
                f"the key {self.name!r} has asked too much besides inference",
                why=f"{what} costs {cost:g} of {self.questions.rate:g} a second, {self.questions.burst} at once",
                mend="wait as long as Retry-After says",
                retry_after_s=wait,
            )

    def try_take(self) -> bool:
        """Count a request; False, and nothing counted, where `take` would raise."""
        return self.bucket is None or not self.bucket.take(time.monotonic())

    def take(self) -> None:
        """Count a request; raises RateLimitedError."""
        if self.bucket is not None and (wait := self.bucket.take(time.monotonic())):
            raise self._limited(self.bucket, wait)

    def take_more(self, count: int) -> None:
        """Count so many more for a request that was counted as one; all of them, or none.

        Raises:
            RateLimitedError: it says when there will be as many, and one for the request itself, when it comes anew.
        """
        if self.bucket is not None and count and (wait := self.bucket.take(time.monotonic(), count)):
            raise self._limited(self.bucket, wait + 1 / self.bucket.rate)

    def give_back(self, count: int) -> None:
        """What was counted for parts of a request that were not begun."""
        if self.bucket is not None:
            self.bucket.give_back(count)

    def take_tokens(self, count: int) -> None:
        """Count tokens of texts, as they are estimated; raises RateLimitedError."""
        if self.tokens is not None and (wait := self.tokens.take(count, now := time.monotonic())):
            raise RateLimitedError(
                f"the key {self.name!r} has sent too many tokens",
                why=f"it may send {self.tokens.per_minute:,} a minute, and this is some {count:,}",
                mend="wait as long as Retry-After says",
                retry_after_s=wait,
                headers=[*self.limits(), *self.tokens.fields(now)],
            )

    def _limited(self, bucket: TokenBucket, wait: float) -> RateLimitedError:
        return RateLimitedError(
            f"the key {self.name!r} has sent too many requests",
            why=f"it may send {bucket.rate:g} a second, {bucket.burst} at once",
            mend="wait as long as Retry-After says",
            retry_after_s=wait,
            headers=self.limits(),
        )

    def limits(self) -> list[tuple[bytes, bytes]]:
        """The RateLimit fields of an answer."""
        if self.bucket is None:
            return []
        return [(b"ratelimit-policy", self.bucket.policy), (b"ratelimit", self.bucket.state())]

    def limit_lines(self) -> bytes:
        """The same as lines of a head."""
        return b"" if self.bucket is None else self.bucket.lines()


ANONYMOUS = Identity(Key("", "anonymous", "0" * 64), None)


class KeyRing:
    """The keys that are valid now.

    Args:
        path: of their file; None lets everybody in, as ANONYMOUS.

    Raises:
        ServerError: the file can't be used.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._by_digest: dict[bytes, Identity] = {}
        self._seen: tuple[int, int, int] | None = None
        self._held: dict[object, tuple[bytes | None, Callable[[GatewayError], None], Callable[[Identity], None]]] = {}
        if path is not None:
            self.reload()

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return self._path is None

    def __len__(self) -> int:
        return len(self._by_digest)

    def names(self) -> list[str]:
        return sorted(identity.name for identity in self._by_digest.values())

    def identify(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Whose request this is, by `Authorization: Bearer KEY` or `X-API-Key: KEY`.

        Raises:
            UnauthorizedError: no key, two of them, or one that is not known.
        """
        if self._path is None:
            return ANONYMOUS
        return self.identify_key(self.key_of(headers))

    def key_of(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """The key that headers carry; raises UnauthorizedError for two of them."""
        key = headers.get(b"x-api-key")
        if (given := headers.get(b"authorization")) is not None:
            scheme, _, bearer = given.partition(b" ")
            bearer = bearer.strip() if scheme.lower() == b"bearer" else b""
            if key is not None and key != bearer:
                raise UnauthorizedError("the request carries two keys", mend="send one")
            key = bearer
        return key

    def identify_key(self, key: bytes | None) -> Identity:
        """Whose key this is.

        Raises:
            UnauthorizedError: None, not known, or expired.
        """
        if self._path is None:
            return ANONYMOUS
        if not key:
            raise UnauthorizedError("the request carries no key", mend="send the header Authorization: Bearer KEY")
        identity = self._by_digest.get(digest_of(key))
        if identity is None:
            raise UnauthorizedError("the key is not known", mend="it may have been revoked: ask for a new one")
        if identity.expires is not None and time.time() >= identity.expires:
            raise UnauthorizedError("the key has expired", mend="ask for a new one")
        return identity

    def again(self, identity: Identity) -> Identity:
        """The same key as it is by now, for what took its time to come.

        Raises:
            UnauthorizedError: it has been revoked meanwhile, or has expired.
        """
        found = self.find(bytes.fromhex(identity.digest))
        if found is None:
            raise _no_longer_valid()
        return found

    def find(self, digest: bytes | None) -> Identity | None:
        """Whose key has this digest, None for no key; None where `identify_key` would raise."""
        if self._path is None:
            return ANONYMOUS
        identity = None if digest is None else self._by_digest.get(digest)
        if identity is None or (identity.expires is not None and time.time() >= identity.expires):
            return None
        return identity

    @contextmanager
    def held(
        self,
        key: bytes | None,
        end: Callable[[GatewayError], None],
        check: Callable[[Identity], None] = lambda _: None,
    ) -> Iterator[None]:
        """While it lasts, `end` is called, with why, once `look` finds that the key may no more.

        Args:
            check: raises where the key, as it is by then, may not ask what is asked.
        """
        mark = object()
        self._held[mark] = key, end, check
        try:
            yield
        finally:
            self._held.pop(mark, None)

    def look(self) -> None:
        """End what is held by keys that have been revoked, have expired, or may no longer ask for it."""
        for mark, (key, end, check) in list(self._held.items()):
            try:
                check(self.identify_key(key))
            except GatewayError as err:
                del self._held[mark]
                end(_no_longer_valid() if isinstance(err, UnauthorizedError) else err)

    def changed(self) -> bool:
        """Whether the file is another than when it was read."""
        return self._path is not None and self._mark() != self._seen

    def reload(self) -> None:
        """Read the file again; keys whose limits are as before keep what they have used of them.

        Raises:
            ServerError: it can't be used; the keys stay as they were, and it counts as `changed` still: it may be that
                it could not be read just then.
        """
        if self._path is None:
            return
        mark, now = self._mark(), time.monotonic()
        before = {identity.id: identity for identity in self._by_digest.values()}
        ring: dict[bytes, Identity] = {}
        for key in read_keys(self._path):
            bucket = None if key.rate is None else TokenBucket(key.rate, key.burst, now)
            known = before.get(key.id)
            old = None if known is None else known.bucket
            if bucket and old and (old.rate, old.burst) == (bucket.rate, bucket.burst):
                bucket = old
            asked = None if known is None else known.questions
            asked = asked or TokenBucket(QUESTIONS, QUESTIONS_AT_ONCE, now)
            tokens = None if key.tokens_per_minute is None else TokenRate(key.tokens_per_minute, now)
            counted = None if known is None else known.tokens
            if tokens and counted and counted.per_minute == tokens.per_minute:
                tokens = counted
            ring[bytes.fromhex(key.digest)] = Identity(key, bucket, asked, tokens)
        self._by_digest, self._seen = ring, mark

    def _mark(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat() if self._path is not None else None
        except OSError:
            return None
        return (stat.st_ino, stat.st_mtime_ns, stat.st_size) if stat else None


def _no_longer_valid() -> UnauthorizedError:
    return UnauthorizedError("the key is no longer valid", mend="ask for a new one")
