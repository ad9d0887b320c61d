"""Bodies of answers with vectors, labels and scores, as `/openapi.json` shows them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field, RootModel

from paceline.services.gateway.api.api_schema import AnswerBody
from paceline.services.gateway.api.openai.bodies import Usage

Json = dict[str, Any]


class CutTokens(AnswerBody):
    """How many tokens were cut. Missing if none were."""

    truncated_tokens: int = 0


class PoolUsage(AnswerBody):
    """Numbers of tokens that were computed."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: CutTokens = CutTokens()


class ListHead(AnswerBody):
    id: str
    object: Literal["list"]
    created: int
    model: str
    usage: PoolUsage


class EmbeddingData(AnswerBody):
    index: int
    object: Literal["embedding"]
    embedding: list[float] | str
    """The numbers, or their bytes as base64."""


class Embeddings(ListHead):
    data: list[EmbeddingData]


class PoolingData(AnswerBody):
    index: int
    object: Literal["pooling"]
    data: list[float] | list[list[float]] | str
    """The numbers; a list for each token if the task has them; or their bytes as base64."""


class PoolingAnswer(ListHead):
    data: list[PoolingData]


class LabelData(AnswerBody):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Labels(ListHead):
    data: list[LabelData]


class CohereVectors(AnswerBody):
    """The vectors of all texts, by type; other types than the wanted ones are missing."""

    # A field with the name of the type would hide the type from the annotations of the class.
    floats: list[list[float]] = Field([], alias="float")
    int8: list[list[int]] = []
    uint8: list[list[int]] = []
    binary: list[list[int]] = []
    ubinary: list[list[int]] = []
    base64: list[str] = []


class CohereVersion(AnswerBody):
    version: Literal["1", "2"]


class CohereTokens(AnswerBody):
    input_tokens: int


class CohereMeta(AnswerBody):
    api_version: CohereVersion
    billed_units: CohereTokens
    tokens: CohereTokens
    warnings: list[str] = []
    """Says how many texts were cut. Missing if none were."""


class CohereEmbeddings(AnswerBody):
    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: CohereVectors | list[list[float]]
    """A plain list in version 1 if the client names no types."""
    texts: list[str]
    meta: CohereMeta


class _Bare(RootModel[Any]):
    """A body that is a list."""

    model_config = ConfigDict(defer_build=True)


class Vectors(_Bare):
    root: list[list[float]]


class AllVectors(_Bare):
    root: list[list[list[float]]]


class SparseValue(AnswerBody):
    index: int
    value: float


class SparseVectors(_Bare):
    root: list[list[SparseValue]]


class Prediction(AnswerBody):
    score: float
    label: str


class Predictions(_Bare):
    root: list[Prediction] | list[list[Prediction]]


class Similarities(_Bare):
    root: list[float]


class TeiToken(AnswerBody):
    id: int
    text: str
    special: bool
    start: int | None
    """First character of the token in its text, which has the prompt in front; None for a special token."""
    stop: int | None


class TeiTokens(_Bare):
    root: list[list[TeiToken]]


class Texts(_Bare):
    root: list[str]


class TeiInfo(AnswerBody):
    model_config = ConfigDict(defer_build=True, protected_namespaces=())

    model_id: str
    model_sha: str | None
    model_dtype: str
    model_type: Json
    """One of embedding, reranker or classifier, with the way of pooling or the names of the labels."""
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class Score(AnswerBody):
    index: int
    object: Literal["score"]
    score: float


class Scores(AnswerBody):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolUsage | Usage
    """The usage of a model that generates has more fields."""


class DocumentText(AnswerBody):
    text: str


class Ranked(AnswerBody):
    index: int
    relevance_score: float
    document: DocumentText | None = None


class Ranking(AnswerBody):
    id: str
    model: str
    results: list[Ranked]
    usage: PoolUsage | Usage


class TeiRank(AnswerBody):
    index: int
    score: float
    text: str = ""
    """Missing unless the client asks for it."""


class TeiRanking(_Bare):
    root: list[TeiRank]


class TeiError(AnswerBody):
    """An error in TEI's form."""

    error: str
    error_type: Literal["validation", "tokenizer", "backend", "overloaded", "empty", "unhealthy"]
