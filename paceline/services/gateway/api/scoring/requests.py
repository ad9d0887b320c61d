"""Bodies of requests that score and rank documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from paceline.services.gateway.http.errors import ApiError
from paceline.services.gateway.planning.request_body import Body, NamedRequest

MAX_PAIRS = 1000
"""Largest number of pairs of a query and a document in one request."""

_NAMES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
"""Pairs of names that clients use for the fields with queries and documents."""


class Document(Body):
    """A document that a client sends as an object."""

    text: str


AnyText = str | Document
Texts = Annotated[list[AnyText], Field(min_length=1, max_length=MAX_PAIRS)]


class ScoringRequest(NamedRequest):
    """The fields that /score and /rerank share."""

    request_id: str | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    """Priority of the request, lower is more urgent. Default: the priority of the key."""
    instruction: str | None = None
    """Tells a causal model when a document fits a query. Default: if the document answers a web search."""
    use_activation: bool | None = None
    """If false, a score is the number before the model's last function. For a causal model that answers yes or no, it
    is the difference of the two tokens' logprobs instead of a probability."""

    max_tokens_per_doc: int | None = Field(None, ge=0)
    """Number of tokens to which documents are cut; 0 and None are no limit."""
    max_tokens_per_query: int | None = Field(None, ge=0)
    """Number of tokens to which queries are cut; 0 and None are no limit."""
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    """Largest number of tokens of a prompt; -1 for as many as the context has. Documents of longer prompts are cut."""

    @model_validator(mode="before")
    @classmethod
    def _check_chunks(cls, data: Any) -> Any:
        name = "max_chunks_per_doc"
        if isinstance(data, dict) and data.get(name) is not None:
            raise ApiError(400, f"{name} is not supported; cut documents with max_tokens_per_doc", param=name)
        return data


class ScoreRequest(ScoringRequest):
    """The body of POST /score. There are as many documents as queries, or a single query with many documents.

    Queries and documents have one of the pairs of names in `_NAMES`.
    """

    text_1: AnyText | Texts | None = None
    text_2: AnyText | Texts | None = None
    queries: AnyText | Texts | None = None
    documents: AnyText | Texts | None = None
    items: AnyText | Texts | None = None
    data_1: AnyText | Texts | None = None
    data_2: AnyText | Texts | None = None

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Return each pair of a query and a document, by the document's field, such as "documents[0]".

        Raises ApiError if queries or documents are missing, or if their numbers do not match.
        """
        for query_name, document_name in _NAMES:
            queries, documents = _texts(getattr(self, query_name)), _texts(getattr(self, document_name))
            if queries and documents:
                break
        else:
            raise ApiError(400, "send text_1 and text_2, or queries and documents", param="text_1")
        if len(queries) not in (1, len(documents)):
            message = (
                f"{query_name} must be one text, or as many as {document_name}, which has {len(documents)}; "
                f"it has {len(queries)}"
            )
            raise ApiError(400, message, param=query_name)
        queries = queries * len(documents) if len(queries) == 1 else queries
        return {f"{document_name}[{index}]": pair for index, pair in enumerate(zip(queries, documents))}


class RerankRequest(ScoringRequest):
    """The body of POST /rerank. TEI's form has its documents in `texts`, and gets a bare list as the answer."""

    query: AnyText
    documents: Texts | None = None
    top_n: int | None = Field(None, ge=0)
    """Number of documents to return, the best ones; 0 returns all."""
    return_documents: bool = True
    raw_scores: bool = False
    """The same as use_activation false, for clients of TEI and Infinity."""

    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_PAIRS)] | None = None
    return_text: bool = False
    """Whether an answer in TEI's form has the texts."""
    truncate: bool | None = None
    """Whether TEI's texts that are too long are cut. Default: they are refused."""
    truncation_direction: Literal["Right", "right"] = "Right"

    @model_validator(mode="after")
    def _check_documents(self) -> RerankRequest:
        if (self.documents is None) == (self.texts is None):
            raise ApiError(400, "documents: send the documents to rank, as a list of texts", param="documents")
        if self.raw_scores:
            self.use_activation = False
        if self.truncate and self.truncate_prompt_tokens is None:
            self.truncate_prompt_tokens = -1
        return self

    @property
    def is_tei(self) -> bool:
        return self.texts is not None

    def pairs(self) -> dict[str, tuple[str, str]]:
        """Return each document with the query before it, by the document's field, such as "documents[0]"."""
        (query,) = _texts(self.query)
        name, documents = ("texts", self.texts) if self.documents is None else ("documents", self.documents)
        return {f"{name}[{index}]": (query, text) for index, text in enumerate(_texts(documents))}


def _texts(given: AnyText | Sequence[AnyText] | None) -> list[str]:
    listed = [] if given is None else [given] if isinstance(given, AnyText) else given
    return [each if isinstance(each, str) else each.text for each in listed]
