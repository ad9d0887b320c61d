"""`Model` for the causal models of `transformers` that have no model file in Paceline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline.core.errors import ConfigError, ModelError
from paceline.core.kv_coding import KVCoding
from paceline.core.kv_groups import groups_of_layers
from paceline.core.kv_layout import GroupShape
from paceline.kernels.caches import LayerCache
from paceline.kernels.interface import ForwardInputs, Kernels, Logits
from paceline.models.base import PADDING, EncodedRows
from paceline.models.compiled import wanted_rows
from paceline.models.config.transformers import TransformersConfig
from paceline.models.packing.packed import Pack
from paceline.models.transformers_backend.attention import NAME, PagedAttention
from paceline.models.transformers_backend.images import keep_children
from paceline.models.transformers_backend.linear import pack_linears
from paceline.models.transformers_backend.loading import (
    foreign_code,
    load_config,
    load_module,
    longest_context,
    reads_images,
)
from paceline.models.transformers_backend.self_test import check_results
from paceline.models.transformers_backend.structure import find_decoder, kv_groups

_PROBE_TOKENS = 4


class TransformersModel:
    """A `Model` for a causal model in its own code. `prepare` must be called before the first step.

    Args:
        pack: packs the matrices of linear layers. All other parts stay in torch.

    Raises:
        ConfigError: `transformers` is not installed.
        ModelError: the model cannot be loaded.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        kernels: Kernels,
        device: torch.device,
        pack: Pack,
        trust_remote_code: bool = False,
    ) -> None:
        config_of_model = load_config(folder, trust_remote_code)
        causal = load_module(folder, config_of_model, dtype, device, trust_remote_code)
        if reads_images(config_of_model):
            keep_children(causal.base_model, [causal.get_decoder()])
        pack_linears(causal, kernels, pack)
        self.config = TransformersConfig(
            architecture=type(causal).__name__,
            vocab_size=int(config_of_model.get_text_config().vocab_size),
            max_position=0,
            dtype=str(dtype).removeprefix("torch."),
        )
        self._dtype, self._device = dtype, device
        self.group_shapes: tuple[GroupShape, ...] = ()
        self.layer_groups: tuple[int, ...] = ()
        self._own_config = config_of_model
        self._causal = causal
        self._attention = PagedAttention(causal, kernels)

    def prepare(self) -> None:
        """Find the layers, their KV groups and the head by running the model on a few tokens, and test the result.

        Raises:
            ModelError: the model does something that Paceline's attention cannot do.
        """
        try:
            with torch.inference_mode(), self._device, foreign_code("its code does not work with our attention"):
                self._split()
                check_results(self, self._own_hidden, self._dtype)
        except ModelError as error:
            raise ModelError(f"{self.config.architecture} cannot run: {error}") from error

    def code_kv(self, coding: KVCoding) -> None:
        self.group_shapes = coding.applied(self.group_shapes)
        self.layer_groups = groups_of_layers(self.group_shapes)

    def forward(
        self, inputs: ForwardInputs, wanted: Sequence[int] | None = None, encoded: EncodedRows | None = None
    ) -> Tensor:
        if inputs.layers is not None or inputs.depths:
            raise ConfigError("a model that runs in transformers cannot show states between its layers")
        hidden = self._no_hidden
        if len(inputs.token_ids):  # other code does not expect a step whose requests had all ended
            with self._attention.over(cast(Sequence[LayerCache], inputs.caches), inputs.batch, self.layer_groups):
                hidden = self._hidden(inputs.token_ids, inputs.positions, encoded)
        if inputs.taps is not None:
            inputs.taps.check(hidden)
        return hidden if wanted is None else wanted_rows(hidden, inputs.batch, wanted)

    def logits(self, hidden: Tensor, adapters: Tensor | None = None) -> Logits:
        assert adapters is None  # no request has one, because the loader refuses --enable-lora
        tokens = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        with self._given.holding(hidden[None]):
            values: Tensor = self._causal(input_ids=tokens, use_cache=False).logits[0]
        return Logits(values.float())

    def _split(self) -> None:
        """Find the decoder by the attention calls of the whole model, and put `_given` into its place."""
        tokens = torch.arange(_PROBE_TOKENS) % self.config.vocab_size
        with self._attention.watching() as calls:
            try:
                self._causal(input_ids=tokens[None], position_ids=tokens[None], use_cache=False)
            except ModelError:
                raise
            except Exception:
                # A model that never calls attention often fails at the mask. Then its layers say more than the error.
                if calls:
                    raise
        place, self._decoder = find_decoder(self._causal, calls)
        self.config = replace(self.config, max_position=longest_context(self._own_config))
        self.group_shapes, self.layer_groups = kv_groups(calls, self.config.max_position)
        self._attention.number(calls)
        with self._attention.watching():
            output = self._run(tokens, tokens)
            if reads_images(self._own_config):  # then the decoder is only one part of the model before its head
                place = self._causal.base_model_prefix
                output = self._causal.base_model(input_ids=tokens[None], position_ids=tokens[None], use_cache=False)
        self._no_hidden: Tensor = output.last_hidden_state[0, :0]
        self._given = _Given(type(output))
        self._causal.set_submodule(place, self._given)

    def _run(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows | None = None) -> Any:
        arguments: dict[str, Tensor] = {"input_ids": token_ids[None]}
        if encoded is not None:
            embedded = self._decoder.get_input_embeddings()(token_ids.index_fill(0, encoded.places, PADDING))
            arguments = {"inputs_embeds": embedded.index_copy(0, encoded.places, encoded.values)[None]}
        return self._decoder(**arguments, position_ids=positions[None], use_cache=False)

    def _hidden(self, token_ids: Tensor, positions: Tensor, encoded: EncodedRows | None = None) -> Tensor:
        hidden: Tensor = self._run(token_ids, positions, encoded).last_hidden_state[0]
        return hidden

    def _own_hidden(self, token_ids: Tensor) -> Tensor:
        """Return the hidden states of one context [tokens], computed with the model's own attention."""
        self._decoder.set_attn_implementation("eager")
        try:
            return self._hidden(token_ids, torch.arange(len(token_ids)))
        finally:
            self._decoder.set_attn_implementation(NAME)


class _Given(nn.Module):
    """A module in the place of the decoder, which returns hidden states that were computed before.

    Args:
        kind: class of the decoder's results.
    """

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self._kind = kind
        self._hidden: Tensor | None = None

    @contextmanager
    def holding(self, hidden: Tensor) -> Iterator[None]:
        """Let calls of this module return `hidden` [1, tokens, hidden] within the context."""
        self._hidden = hidden
        try:
            yield
        finally:
            self._hidden = None

    def forward(self, *_: Any, **__: Any) -> Any:
        return self._kind(last_hidden_state=self._hidden)
