"""The choice of the layers whose keys and values are coded in 8 bits. Pure arithmetic, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from paceline.core.errors import ConfigError
from paceline.core.kv_groups import divide_groups
from paceline.core.kv_layout import GroupShape
from paceline.core.options import listed

_WINDOWS = "sliding_window"
_SKIP = "--kv-cache-dtype-skip-layers"
_MOST_TEXT = 200
"""Largest number of characters of the option, because the parts of a layout must fit into a message."""


@dataclass(frozen=True, slots=True)
class KVCoding:
    """The code of keys and values, and the layers that keep the dtype of the model."""

    code: str = ""
    """Name of the 8-bit code, such as "int8"; empty if no layer is coded."""
    skipped: tuple[int, ...] = ()
    """Numbers of layers that are not coded, in ascending order."""
    skips_windows: bool = False
    """Whether no layer with a sliding window is coded."""

    @classmethod
    def parse(cls, dtype: str, skip_layers: str) -> KVCoding:
        """Return the choice that two options make.

        Args:
            dtype: --kv-cache-dtype.
            skip_layers: --kv-cache-dtype-skip-layers: numbers of layers and "sliding_window", separated by commas.

        Raises:
            ConfigError: the options cannot be read or contradict each other.
        """
        entries = listed(skip_layers)
        if entries and dtype == "auto":
            raise ConfigError(f"{_SKIP} needs --kv-cache-dtype int8 or fp8_e4m3")
        numbers = [entry for entry in entries if entry != _WINDOWS]
        if wrong := [entry for entry in numbers if not (entry.isascii() and entry.isdigit())]:
            raise ConfigError(f"{_SKIP} takes numbers of layers and {_WINDOWS}, separated by commas, not {wrong[0]!r}")
        chosen = cls("" if dtype == "auto" else dtype, tuple(sorted({*map(int, numbers)})), _WINDOWS in entries)
        if len(str(chosen)) > _MOST_TEXT:
            raise ConfigError(f"{_SKIP} names too many layers; choose --kv-cache-dtype auto, or name fewer")
        return chosen

    def __str__(self) -> str:
        """Return the value of --kv-cache-dtype, and the other option if it is given."""
        skipped = ",".join([*map(str, self.skipped), *([_WINDOWS] if self.skips_windows else [])])
        return (self.code or "auto") + (f" {_SKIP} {skipped}" if skipped else "")

    def of_drafter(self) -> KVCoding:
        """Return the choice for a draft model. Numbers of layers are those of the target model."""
        return replace(self, skipped=())

    def applied(self, shapes: tuple[GroupShape, ...]) -> tuple[GroupShape, ...]:
        """Return a model's groups with their codes. A group is divided if only some of its layers are coded.

        Raises:
            ConfigError: a layer that is named has no keys and values of its own, or a layer cannot be coded.
        """
        storing = sorted(layer for shape in shapes if not shape.state for layer in shape.layers)
        if missing := [layer for layer in self.skipped if layer not in storing]:
            raise ConfigError(
                f"{_SKIP}: layer {missing[0]} has no keys and values of its own in this model; choose among "
                f"{', '.join(map(str, storing))}"
            )
        if not self.code:
            return shapes
        coded = tuple(part for shape in shapes for part in self._parts(shape))
        if len(coded) == len(shapes) or any(shape.state for shape in shapes):
            return coded
        return divide_groups(coded)

    def _parts(self, shape: GroupShape) -> tuple[GroupShape, ...]:
        """Return the coded layers of a group, if any, then the others, if any."""
        kept = shape.layers if self.skips_windows and shape.window else self.skipped
        coded = tuple(layer for layer in shape.layers if layer not in kept)
        if shape.state or not coded:
            return (shape,)
        if len(coded) == len(shape.layers):
            return (shape.coded(self.code),)
        others = tuple(layer for layer in shape.layers if layer in kept)
        return shape.part(shape.name, coded).coded(self.code), shape.part(f"{shape.name}-uncoded", others)


NO_CODING = KVCoding()
"""The choice of --kv-cache-dtype auto."""
