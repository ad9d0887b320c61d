"""The labels of classifiers and what makes probabilities of their numbers, from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import ModelError
from paceline.core.pooling_config import ScoreActivation

_MOST = 1 << 40


def whole(value: object, name: str) -> int:
    """Return a positive whole number of a config. Raises ModelError, with its name, if it is none."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _MOST:
        raise ModelError(f"{name} must be a positive whole number, not {value!r:.80}")
    return value


def read_labels(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of labels in order. Without any, there are two, as in transformers."""
    names = raw.get("id2label")
    if isinstance(names, Mapping) and names:
        try:
            return tuple(str(names[key]) for key in sorted(names, key=int))
        except ValueError:
            raise ModelError("the keys of id2label must be whole numbers") from None
    count = whole(raw.get("num_labels", 2), "num_labels")
    return tuple(f"LABEL_{index}" for index in range(count))


def label_activation(raw: Mapping[str, Any], labels: int) -> ScoreActivation:
    """Return what makes probabilities of a sequence's labels."""
    by_problem: Mapping[str, ScoreActivation] = {
        "regression": "none",
        "single_label_classification": "softmax",
        "multi_label_classification": "sigmoid",
    }
    problem = str(raw.get("problem_type"))
    if problem in by_problem:
        return by_problem[problem]
    own = raw.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named_activation(name or raw.get("sbert_ce_default_activation_function"))
    return named or ("sigmoid" if labels == 1 else "softmax")


def named_activation(name: object) -> ScoreActivation | None:
    """Return the activation that a class of torch names; None if there is no name."""
    known: Mapping[str, ScoreActivation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}
    if name is None:
        return None
    if not str(name).startswith("torch.") or (last := str(name).rpartition(".")[2]) not in known:
        raise ModelError(
            f"the activation {name!r:.80} of the scores is not supported; supported are: {', '.join(known)}"
        )
    return known[last]
