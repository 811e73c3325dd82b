"""POST /v1/embeddings and GET /v1/models, as OpenAI's API has them: its clients work unchanged."""

from __future__ import annotations

from contextlib import suppress

from fastapi import APIRouter, Request
from starlette.responses import Response

from serve.gateway.access.identity import Identity
from serve.gateway.edge.embedding_schemas import ANSWERS, BODY, OF_MODELS, Embeddings, Model, Models
from serve.gateway.edge.embedding_values import asked_of, embedder_of, embeddings_of, fitting
from serve.gateway.edge.listed import Form, answer
from serve.gateway.edge.listed_values import unknown
from serve.gateway.edge.openai_errors import ParameterError
from serve.gateway.edge.rerank_values import judge_of
from serve.gateway.edge.way import Way
from serve.gateway.errors import GatewayError, UnknownModelError
from serve.gateway.oip.described import described
from serve.gateway.oip.tensors import ProtocolError
from serve.gateway.settings import Settings
from serve.repository.read import ModelInfo

__all__ = ["embeddings_router"]

FORM = Form("input", "texts", asked_of, fitting, embeddings_of)


def embeddings_router(settings: Settings, way: Way) -> APIRouter:
    """The routes, bound to one upstream."""
    router = APIRouter(tags=["OpenAI"])

    @router.post(
        "/v1/embeddings", summary="Embeddings of texts", openapi_extra={"requestBody": BODY},
        responses={**ANSWERS, 200: {"model": Embeddings, "description": "One for each text."}},
    )  # fmt: skip
    async def embeddings(request: Request) -> Response:
        """A text, or a list of them, becomes a vector each.

        A list longer than the model's largest batch counts as several requests of the key's. It goes to the model in
        parts, texts of like length together, and the answer is one. It is all or nothing: a text that is refused fails
        the request.
        """
        return await answer(FORM, way, settings, request)

    async def is_asked_here(name: str, info: ModelInfo | None) -> bool:
        release = way.releases.get(name)
        metadata = await way.metadata(name, release) if info is None or release is not None else described(info)
        return embedder_of(metadata) is not None or judge_of(metadata) is not None

    @router.get("/v1/models", summary="Models that give embeddings, or rerank", responses=OF_MODELS)
    async def models(request: Request) -> Models:
        identity: Identity = request.state.identity
        found = []
        for name, info in (await way.upstream.askable()).items():
            if identity.sees(name):
                with suppress(GatewayError, ProtocolError):  # it has been unloaded meanwhile
                    if await is_asked_here(name, info):
                        found.append(Model(id=name))
        return Models(data=found)

    @router.get("/v1/models/{model}", summary="A model that gives embeddings, or reranks", responses=OF_MODELS)
    async def one_model(model: str) -> Model:
        try:
            if await is_asked_here(model, way.upstream.resting().get(model)):
                return Model(id=model)
        except (UnknownModelError, ProtocolError):
            raise unknown(model) from None
        told = f"the model {model!r} neither gives embeddings of texts nor reranks any"
        raise ParameterError("model", told, mend="see GET /v1/models", code="model_not_supported", status=404)

    return router
