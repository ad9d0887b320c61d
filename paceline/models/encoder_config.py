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
    """Side of a patch, in pixels."""
    pooled_side: int
    """A row of the encoding is the mean of pooled_side x pooled_side patches."""
    positions: int
    """Largest number of patches along a side of an image."""
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
    """Number of log-mel features of a frame."""
    channels: tuple[int, int]
    """Output channels of the two convolutions that shorten the input."""
    conv_taps: int
    """Number of frames that the convolution of a layer reads, the frame itself included."""
    window: int
    """Number of frames to which a frame attends, itself included."""
    score_cap: float
    """Bound of attention scores, as `ModelConfig.logit_softcap` bounds logits."""
    residual_weight: float
    """Factor on the results of a layer's two MLPs, before these results are added to the residual stream."""
    limit: float
    """Largest magnitude of the elements between the parts of a layer; larger elements are clipped."""
    output_size: int
    norm_eps: float
    clipped: bool
    """Whether inputs and outputs of linear layers have bounds."""


@dataclass(frozen=True, slots=True)
class PatchEmbedderConfig:
    """Gemma 4's unified model: a linear layer over large patches, with norms and positions."""

    patch_side: int
    """Side of a patch, in pixels."""
    hidden_size: int
    positions: int
    """Largest number of patches along a side of an image."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class SampleEmbedderConfig:
    """Gemma 4's unified model: a linear layer over samples of audio."""

    samples: int
    """Number of samples for one row of the encoding."""
    norm_eps: float


@dataclass(frozen=True, slots=True)
class SiglipConfig:
    """The transformer over patches of Gemma 3."""

    layers: int
    hidden_size: int
    inner_size: int
    heads: int
    image_side: int
    """Side of an image, in pixels. All images are square and have this size."""
    patch_side: int
    """Side of a patch, in pixels."""
    rows_side: int
    """An encoding has rows_side x rows_side rows."""
    norm_eps: float
    pooled: bool = True
    """Whether the rows are means of squares of patches, with a norm. Otherwise each patch has a row."""


@dataclass(frozen=True, slots=True)
class Qwen3VisionConfig:
    """The transformer over patches of Qwen 3-VL."""

    layers: int
    hidden_size: int
    inner_size: int
    heads: int
    patch_side: int
    """Side of a patch, in pixels."""
    patch_frames: int
    """Number of frames of a patch. An image is repeated to have as many frames."""
    merged_side: int
    """A row of the encoding stands for merged_side x merged_side patches."""
    positions_side: int
    """The table of positions is positions_side x positions_side. The positions of an image of another size are
    interpolated.
    """
    shown_layers: tuple[int, ...]
    """Layers whose results are further parts of a row, each with a merger of its own (deepstack)."""
    rope_theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VisionConfig:
    """The transformer over patches of Qwen 2-VL. Fields are those of `Qwen3VisionConfig`."""

    layers: int
    hidden_size: int
    inner_size: int
    heads: int
    patch_side: int
    patch_frames: int
    merged_side: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class EncodersConfig:
    """The configurations of a model's encoders, one for each kind of media that the model reads."""

    hidden_size: int
    """Number of elements of the text model's hidden states."""
    vision: Gemma4VisionConfig | PatchEmbedderConfig | SiglipConfig | Qwen3VisionConfig | Qwen2VisionConfig | None
    audio: Gemma4AudioConfig | SampleEmbedderConfig | None
    frames: bool
    """Whether `vision` also encodes frames of videos."""

    @property
    def row_size(self) -> int:
        """Number of elements of a row of an encoding: hidden states for one or more layers of the text model."""
        shown = len(self.vision.shown_layers) if isinstance(self.vision, Qwen3VisionConfig) else 0
        return self.hidden_size * (1 + shown)
