"""The base class of the bodies of answers, which `/openapi.json` describes."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class AnswerBody(BaseModel):
    """A body of an answer, or a part of one.

    Answers are plain JSON, so these classes only describe them. They are compiled when somebody reads the description.
    To compile them for each route at the start would take longer than to start the rest of the application.
    """

    model_config = ConfigDict(defer_build=True)
