"""POST /v1/rerank, as Cohere's and Jina's clients ask it: which of several documents answer a query best."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.gateway.edge.embedding_schemas import ANSWERS
from serve.gateway.edge.listed import Form, answer
from serve.gateway.edge.rerank_schemas import BODY, Ranking
from serve.gateway.edge.rerank_values import asked_of, fitting, ranking_of
from serve.gateway.edge.way import Way
from serve.gateway.settings import Settings

__all__ = ["rerank_router"]

FORM = Form("documents", "documents", asked_of, fitting, ranking_of)


def rerank_router(settings: Settings, way: Way) -> APIRouter:
    """The route, bound to one upstream."""
    router = APIRouter(tags=["rerank"])

    @router.post(
        "/v1/rerank", summary="Documents in the order of a query", openapi_extra={"requestBody": BODY},
        responses={**ANSWERS, 200: {"model": Ranking, "description": "The best first."}},
    )  # fmt: skip
    async def rerank(request: Request) -> Response:
        """A cross-encoder judges each document with the query.

        A list longer than the model's largest batch counts as several requests of the key's. It goes to the model in
        parts, and the answer is one. It is all or nothing: a document that is refused fails the request.
        """
        return await answer(FORM, way, settings, request)

    return router
