"""The messages of one stream that are with Triton: it is read no further while there are too many of them."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

from tritonclient.grpc import service_pb2 as messages

from serve.gateway.access.memory import Share
from serve.gateway.errors import ClientGoneError
from serve.gateway.grpc.request import restore
from serve.gateway.oip.sequence import SEQUENCE_ID, Named

__all__ = ["FINAL_ASKED", "Unanswered"]

MOST = 256
OF_SEQUENCE = SEQUENCE_ID.encode(), b"sequence "  # in parameters, and in errors
ASKED, FINAL = "triton_enable_empty_final_response", "triton_final_response"
ERROR = b"\x0a"  # begins what has a first field, ModelStreamInferResponse.error_message

# Two messages of protobuf, one after the other, are one message with the fields of both: this makes Triton say which
# answer is a request's last. A model whose answers are decoupled from its requests may give a request none at all.
FINAL_ASKED: bytes = messages.ModelInferRequest(parameters={ASKED: {"bool_param": True}}).SerializeToString()


class Unanswered:
    """Counts them, and gives back their share of the gateway's memory once they are answered and the answer was taken.

    Args:
        share: of the stream.
        most_bytes: of messages; one more is read while there are fewer.

    Attributes:
        model: that the answer names which was read last; "" where it names none.
    """

    def __init__(self, share: Share, most_bytes: int) -> None:
        self.model = ""
        self._share = share
        self._most_bytes = most_bytes
        self._sizes: deque[int] = deque()
        self._bytes = 0
        self._answered = asyncio.Event()
        self._asked = self._ended = False
        self._sequences: OrderedDict[int | str, Named] = OrderedDict()

    async def room(self) -> None:
        """Wait until one more may be read; raises ClientGoneError once the stream is over."""
        while len(self._sizes) >= MOST or self._bytes >= self._most_bytes:
            if self._ended:  # or the call would never be told that nothing more comes
                raise ClientGoneError
            self._answered.clear()
            await self._answered.wait()

    @property
    def some(self) -> bool:
        """Whether there are messages without their last answer."""
        return bool(self._sizes)

    def end(self) -> None:
        """The stream is over."""
        self._ended = True
        self._answered.set()

    def takes(self, size: int) -> None:
        """A message of so many bytes, which the share holds."""
        self._sizes.append(size)
        self._bytes += size

    def asks(self, request: Any) -> None:
        """See whether the client wants to be told itself which answer is the last."""
        if ASKED in request.parameters and request.parameters[ASKED].bool_param:
            self._asked = True

    def of(self, sequence: Named | None) -> None:
        """A message goes on of this sequence, if of any, under another id than its client's."""
        if sequence is not None and sequence.renamed:
            self._sequences[sequence.sent] = sequence
            self._sequences.move_to_end(sequence.sent)
            if len(self._sequences) > MOST:  # no more than this are with Triton
                self._sequences.popitem(last=False)

    def read(self, answer: bytes) -> tuple[bytes | None, bool, bool]:
        """An answer of Triton's as its client is to have it, None for nothing; whether it is a request's last, and
        whether it is an error.
        """
        self.model = ""
        restored = bool(self._sequences) and any(word in answer for word in OF_SEQUENCE)
        if FINAL.encode() not in answer and not restored:
            return answer, True, answer.startswith(ERROR)
        response = messages.ModelStreamInferResponse.FromString(answer)
        inner = response.infer_response
        self.model = inner.model_name
        if restored:
            if response.error_message:
                response.error_message = self._told(response.error_message)
            restore(inner, self._sequences)
            answer = response.SerializeToString()
        failed = bool(response.error_message)
        if failed or FINAL not in inner.parameters:
            return answer, True, failed
        final: bool = inner.parameters[FINAL].bool_param
        if self._asked:
            return answer, final, False
        if final and not inner.outputs:
            return None, True, False
        del inner.parameters[FINAL]
        return response.SerializeToString(), final, False

    def _told(self, text: str) -> str:
        """An error of Triton's with the client's ids."""
        for sequence in self._sequences.values():
            text = sequence.told(text)
        return text

    def answered(self) -> None:
        """A message was answered, and its client has taken the answer; which one does not matter."""
        if self._sizes:
            size = self._sizes.popleft()
            self._bytes -= size
            self._share.resize(max(0, self._share.size - size))
            self._answered.set()
