"""Experts on every backend: the choice of experts, and the weighted sum of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, DeepseekV3Config, GptOssConfig, GraniteMoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from paceline.core.experts import ExpertActivation, Routing
from paceline.kernels.experts import ExpertWeights
from paceline.kernels.interface import Kernels
from paceline.kernels.reference import ReferenceKernels
from tests.kernels.conftest import BACKENDS

HIDDEN, EXPERTS = 64, 12
REFERENCE = ReferenceKernels()
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "routed_scaling_factor": 2.5}

# The router of an architecture, and the same rule as a `Routing`.
ROUTERS: dict[str, tuple[Callable[[], Any], Routing]] = {
    "qwen3": (
        lambda: Qwen3MoeTopKRouter(
            Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4, norm_topk_prob=True)
        ),
        Routing(4, normalize=True),
    ),
    "qwen3-not-normalized": (
        lambda: Qwen3MoeTopKRouter(Qwen3MoeConfig(hidden_size=HIDDEN, num_experts=EXPERTS, num_experts_per_tok=4)),
        Routing(4),
    ),
    "granite": (
        lambda: GraniteMoeTopKRouter(
            GraniteMoeConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=5)
        ),
        Routing(5, normalize=True),
    ),
    "gpt-oss": (
        lambda: GptOssTopKRouter(GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=4)),
        Routing(4, normalize=True),
    ),
    "deepseek-v2": (
        lambda: DeepseekV2TopkRouter(
            DeepseekV2Config(
                hidden_size=HIDDEN, n_routed_experts=EXPERTS, topk_method="group_limited_greedy", **_GROUPS
            )
        ),
        Routing(3, groups=4, top_groups=2, factor=2.5),
    ),
    "deepseek-v3": (
        lambda: DeepseekV3TopkRouter(DeepseekV3Config(hidden_size=HIDDEN, n_routed_experts=EXPERTS, **_GROUPS)),
        Routing(3, "sigmoid", normalize=True, groups=4, top_groups=2, group_score="top2", factor=2.5),
    ),
}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # On the CPU, so that the numbers are the same on all devices.
    return torch.randn(shape, generator=generator, device="cpu").to(torch.get_default_device(), dtype)


def by_expert(ids: Tensor, weights: Tensor, experts: int = EXPERTS) -> Tensor:
    """Return the weight of each expert, [tokens, experts]; 0 for experts that are not chosen."""
    return torch.zeros(len(ids), experts).scatter_(1, ids, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_weights_are_those_of_the_architecture(kernels: Kernels, name: str) -> None:
    make, routing = ROUTERS[name]
    with torch.device("cpu"):
        router = make()
    for index, (_, tensor) in enumerate([*router.named_parameters(), *router.named_buffers()]):
        tensor.data = random(*tensor.shape, seed=index)
    x = random(31, HIDDEN, seed=9)
    with torch.inference_mode():
        _, wanted, wanted_ids = router(x)
    weight, bias = kernels.pack(router.weight.detach()), getattr(router, "bias", None)
    logits = kernels.router_logits(x, weight, None if bias is None else bias.detach())
    ids, weights = kernels.choose_experts(logits, routing, getattr(router, "e_score_correction_bias", None))
    assert (ids.dtype, weights.dtype) == (torch.int64, torch.float32)
    torch.testing.assert_close(by_expert(ids, weights), by_expert(wanted_ids, wanted), atol=1e-5, rtol=1e-5)


def test_the_best_expert_is_first_and_of_equal_ones_the_first(kernels: Kernels) -> None:
    logits = torch.tensor([[1.0, 3.0, 1.0, 3.0, 0.0], [2.0] * 5, [float("-inf"), 0.0, float("-inf"), 0.0, 1.0]])
    ids, weights = kernels.choose_experts(logits, Routing(3, normalize=True))
    assert ids.tolist() == [[1, 3, 0], [0, 1, 2], [4, 1, 3]]
    torch.testing.assert_close(weights[1], torch.full((3,), 1 / 3))


def test_a_choice_can_include_all_experts(kernels: Kernels) -> None:
    logits = random(7, 35)
    ids, weights = kernels.choose_experts(logits, Routing(35))
    assert torch.equal(ids, logits.argsort(dim=-1, descending=True))
    torch.testing.assert_close(by_expert(ids, weights, 35), torch.softmax(logits, -1))


def test_scores_change_the_choice_and_scales_the_weights(kernels: Kernels) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    correction, scales = torch.tensor([9.0, 0.0, 0.0]), torch.tensor([3.0, 5.0, 7.0])
    ids, weights = kernels.choose_experts(logits, Routing(2, "sigmoid", factor=2.0), correction, scales)
    assert ids.tolist() == [[0, 2]]
    torch.testing.assert_close(weights, torch.sigmoid(logits[:, [0, 2]]) * 2.0 * scales[[0, 2]])


def test_scores_of_zero_give_no_nan(kernels: Kernels) -> None:
    ids, weights = kernels.choose_experts(torch.full((1, 4), -200.0), Routing(2, "sigmoid", normalize=True))
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights, torch.zeros(1, 2))


def test_a_choice_does_not_depend_on_the_batch(kernels: Kernels) -> None:
    logits = random(33, 67)
    routing = Routing(6, normalize=True)
    ids, weights = kernels.choose_experts(logits, routing)
    for row in range(len(logits)):
        own_ids, own_weights = kernels.choose_experts(logits[row : row + 1], routing)
        assert torch.equal(own_ids[0], ids[row])
        assert torch.equal(own_weights[0], weights[row])


def test_router_logits_are_not_rounded(kernels: Kernels) -> None:
    x, weight = random(5, 70, dtype=torch.bfloat16), random(9, 70, seed=1, dtype=torch.bfloat16)
    bias = random(9, seed=2, dtype=torch.bfloat16)
    logits = kernels.router_logits(x, kernels.pack(weight), bias)
    exact = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(logits, exact.float(), atol=1e-4, rtol=1e-5)


def make_experts(
    kernels: Kernels,
    experts: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    activation: ExpertActivation = "silu",
    bias: bool = False,
    poisoned: tuple[int, ...] = (),
    pack: Callable[[Tensor], Any] = lambda weight: weight,
) -> ExpertWeights:
    """Return random experts. The weights of `poisoned` ones are NaN."""

    def matrices(seed: int, size_out: int, size_in: int) -> list[Any]:
        all_of_them = random(experts, size_out, size_in, seed=seed) * (2 / size_in**0.5)
        all_of_them[list(poisoned)] = float("nan")
        return [kernels.pack(pack(matrix.to(dtype))) for matrix in all_of_them]

    def biases(seed: int, size: int) -> Tensor | None:
        return random(experts, size, seed=seed, dtype=dtype) if bias else None

    return kernels.index_experts(
        ExpertWeights(
            matrices(1, inner, hidden),
            matrices(2, inner, hidden),
            matrices(3, hidden, inner),
            activation,
            biases(4, inner),
            biases(5, inner),
            biases(6, hidden),
        )
    )


def random_choice(tokens: int, experts: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return REFERENCE.choose_experts(random(tokens, experts, seed=seed) * 2, Routing(top_k, normalize=True))


TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.15}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)


OTHERS = pytest.mark.parametrize(
    "kernels", [*(name for name in BACKENDS if name != "reference"), "triton"], indirect=True
)
"""Runs a test on all backends but the reference."""


@OTHERS
@DTYPES
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(1, 4, 2, 64, 32), (1, 3, 3, 33, 17), (5, 9, 2, 40, 49), (80, 5, 2, 32, 70), (64, 1, 1, 48, 16), (0, 4, 2, 8, 8)],
)
def test_experts_are_those_of_the_reference(
    kernels: Kernels, dtype: torch.dtype, tokens: int, experts: int, top_k: int, hidden: int, inner: int
) -> None:
    x = random(tokens, hidden, dtype=dtype)
    ids, weights = random_choice(tokens, experts, top_k)
    found = kernels.experts(x, ids, weights, make_experts(kernels, experts, hidden, inner, dtype))
    wanted = REFERENCE.experts(x, ids, weights, make_experts(REFERENCE, experts, hidden, inner, dtype))
    assert found.dtype == dtype
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@OTHERS
@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_activations_and_biases(kernels: Kernels, dtype: torch.dtype, activation: ExpertActivation) -> None:
    x = random(6, 36, dtype=dtype) * (3 if activation == "clamped_swiglu" else 1)  # so large that the clamps matter
    ids, weights = random_choice(6, 4, 2)
    found, wanted = (
        own.experts(x, ids, weights, make_experts(own, 4, 36, 20, dtype, activation, bias=True))
        for own in (kernels, REFERENCE)
    )
    torch.testing.assert_close(found, wanted, atol=3 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_clamped_activation_is_that_of_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=24, intermediate_size=16, num_local_experts=3)
    with torch.device("cpu"):
        module = GptOssExperts(config)
    for index, tensor in enumerate(module.parameters()):
        tensor.data = random(*tensor.shape, seed=index)
    x = random(5, 24, seed=8) * 4
    ids, weights = random_choice(5, 3, 2)
    both, down = module.gate_up_proj.detach().mT, module.down_proj.detach().mT
    bias = module.gate_up_proj_bias.detach()
    experts = ExpertWeights(
        [REFERENCE.pack(matrix[::2]) for matrix in both],
        [REFERENCE.pack(matrix[1::2]) for matrix in both],
        [REFERENCE.pack(matrix) for matrix in down],
        "clamped_swiglu",
        bias[:, ::2],
        bias[:, 1::2],
        module.down_proj_bias.detach(),
    )
    with torch.inference_mode():
        wanted = module(x, ids, weights)
    torch.testing.assert_close(REFERENCE.experts(x, ids, weights, experts), wanted, atol=1e-4, rtol=1e-4)


@OTHERS
def test_all_tokens_may_have_one_expert(kernels: Kernels) -> None:
    x = random(70, 40)
    ids, weights = torch.full((70, 1), 3), torch.full((70, 1), 0.5)
    found, wanted = (
        own.experts(x, ids, weights, make_experts(own, 8, 40, 24, x.dtype)) for own in (kernels, REFERENCE)
    )
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_an_expert_that_is_not_chosen_changes_nothing(kernels: Kernels) -> None:
    x = random(9, 40)
    ids, weights = random_choice(9, 4, 2)
    ids = torch.tensor([0, 2, 5, 6])[ids]
    results = [
        kernels.experts(x, ids, weights, make_experts(kernels, 8, 40, 24, x.dtype, poisoned=poisoned))
        for poisoned in ((), (1, 3, 4, 7))
    ]
    assert torch.equal(results[0], results[1])


def test_the_weights_of_a_token_scale_its_experts(kernels: Kernels) -> None:
    x = random(3, 32)
    ids = torch.tensor([[0, 1], [1, 2], [2, 0]])
    experts = make_experts(kernels, 3, 32, 16, x.dtype)
    alone = [kernels.experts(x, ids[:, place : place + 1], torch.ones(3, 1), experts) for place in range(2)]
    weights = torch.tensor([[0.25, 0.75], [-1.0, 2.0], [0.0, 1.0]])
    wanted = weights[:, :1] * alone[0] + weights[:, 1:] * alone[1]
    torch.testing.assert_close(kernels.experts(x, ids, weights, experts), wanted)


def test_a_gated_sum(kernels: Kernels) -> None:
    x, y, gate = random(5, 24), random(5, 24, seed=1), random(5, 1, seed=2) * 3
    torch.testing.assert_close(kernels.add_gated(x, y, gate), x + torch.sigmoid(gate) * y)


@OTHERS
def test_a_row_does_not_depend_on_its_batch(kernels: Kernels) -> None:
    """The reference is left out: the order of torch's products depends on the number of rows."""
    tokens = 70  # more than 32 of one expert, which kernels compute in another way than a few
    experts = make_experts(kernels, 3, 40, 24, torch.bfloat16)
    x = random(tokens, 40, dtype=torch.bfloat16)
    ids, weights = random_choice(tokens, 3, 2)
    together = kernels.experts(x, ids, weights, experts)
    for begin, end in ((0, 1), (1, 3), (3, 12), (12, 29), (29, tokens)):
        part = kernels.experts(x[begin:end], ids[begin:end], weights[begin:end], experts)
        assert torch.equal(part, together[begin:end])
