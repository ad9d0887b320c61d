"""The configurations of encoders of images, frames of videos and audio. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gemma4VisionConfig:
    """The transformer over patches of Gemma 4's models with a vision tower."""

    layers: int
    hidden_size: int
    inner_size: int
    heads: int
    head_dim: int
    patch_side: int
    """Pixels."""
    pooled_side: int
    """A row of the encoding is the mean of pooled_side x pooled_side patches."""
    positions: int
    """Patches of the longest side."""
    rope_theta: float
    norm_eps: float
    clipped: bool
    """Whether inputs and outputs of linear layers have bounds."""
    standardized: bool
    """Whether each element of the pooled rows is shifted and scaled."""


@dataclass(frozen=True, slots=True)
class Gemma4AudioConfig:
    """The conformer over log-mel features of Gemma 4's small models."""

    layers: int
    hidden_size: int
    heads: int
    features: int
    """Log-mel features of a frame."""
    channels: tuple[int, int]
    """Output channels of the two convolutions that shorten the input."""
    conv_taps: int
    """Frames that the convolution of a layer reads, the frame itself included."""
    window: int
    """Frames that a frame attends to, itself included."""
    score_cap: float
    """Bound of attention scores, as `AttentionConfig.softcap`."""
    residual_weight: float
    """Factor on what a layer's two MLPs add."""
    limit: float
    """Bound of the elements between the parts of a layer."""
    output_size: int
    norm_eps: float
    clipped: bool
    """Whether inputs and outputs of linear layers have bounds."""


@dataclass(frozen=True, slots=True)
class PatchEmbedderConfig:
    """Gemma 4's unified model: a linear layer over large patches, with norms and positions."""

    patch_side: int
    """Pixels."""
    hidden_size: int
    positions: int
    """Patches of the longest side."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class SampleEmbedderConfig:
    """Gemma 4's unified model: a linear layer over samples of audio."""

    samples: int
    """Samples of one row of the encoding."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """The transformer over patches of Gemma 3."""

    layers: int
    hidden_size: int
    inner_size: int
    heads: int
    image_side: int
    """Pixels of each side of an image. There is no other size."""
    patch_side: int
    """Pixels."""
    rows_side: int
    """An encoding has rows_side x rows_side rows."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class EncodersConfig:
    """The encoders of a model."""

    hidden_size: int
    """Elements of an encoding's row, as of the text model's hidden states."""
    vision: Gemma4VisionConfig | PatchEmbedderConfig | SiglipConfig | None
    audio: Gemma4AudioConfig | SampleEmbedderConfig | None
    frames: bool
    """Whether `vision` also encodes frames of videos."""
