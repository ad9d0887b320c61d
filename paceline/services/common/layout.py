"""KV layouts as messages, and the comparison of a worker's KV layout with that of the arena."""

from __future__ import annotations

from dataclasses import replace

from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS, KV_CACHE_PART, SLOT_ALIGNMENT, GroupShape, KVGroup, KVLayout
from paceline.proto import kvtransfer_pb2 as pb

_MAX_GROUPS = 64
_MAX_NAME = 256
_MAX_PARTS = 4096
_SHOWN = 16
"""Number of digits of a digest that error messages show."""


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    """Convert a layout to a message, which contains the part that services other than workers need."""
    return pb.KVLayout(
        fingerprint=layout.fingerprint,
        slot_bytes=layout.slot_bytes,
        base_tokens=BASE_TOKENS,
        groups=map(_group_to_pb, layout.groups),
        encodings=None if layout.encodings is None else _group_to_pb(layout.encodings.groups[0]),
        parts=[pb.LayoutPart(name=name, value=value) for name, value in layout.parts],
    )


def layout_from_pb(message: pb.KVLayout) -> KVLayout:
    """Convert a message to a layout. It lacks layers and heads, which only workers know.

    Raises:
        InvalidRequestError: an arena cannot have this layout.
    """
    sizes = [group.block_tokens for group in message.groups]
    if not 0 < len(message.fingerprint) <= _MAX_NAME:
        raise InvalidRequestError(f"layout.fingerprint must have 1 to {_MAX_NAME} characters")
    if any(len(group.name) > _MAX_NAME for group in (*message.groups[: _MAX_GROUPS + 1], message.encodings)):
        raise InvalidRequestError(f"layout.groups: a name may have at most {_MAX_NAME} characters")
    if message.slot_bytes == 0 or message.slot_bytes % SLOT_ALIGNMENT:
        raise InvalidRequestError(f"layout.slot_bytes must be a multiple of {SLOT_ALIGNMENT}, not {message.slot_bytes}")
    if message.base_tokens != BASE_TOKENS:
        raise InvalidRequestError(f"layout.base_tokens must be {BASE_TOKENS}, not {message.base_tokens}")
    if not 0 < len(sizes) <= _MAX_GROUPS:
        raise InvalidRequestError(f"layout.groups must be 1 to {_MAX_GROUPS}, not {len(sizes)}")
    if any(size == 0 or size % BASE_TOKENS or max(sizes) % size for size in sizes):
        raise InvalidRequestError(
            f"layout.groups: block_tokens must be multiples of {BASE_TOKENS} that divide the largest, not {sizes}"
        )
    if len(message.parts) > _MAX_PARTS or any(len(each.name) + len(each.value) > _MAX_NAME for each in message.parts):
        raise InvalidRequestError(f"layout.parts may be {_MAX_PARTS}, of at most {_MAX_NAME} characters each")
    groups = tuple(map(_group_from_pb, message.groups))
    parts = tuple((each.name, each.value) for each in message.parts)
    layout = KVLayout(groups, itemsize=0, slot_bytes=message.slot_bytes, fingerprint=message.fingerprint, parts=parts)
    if not message.HasField("encodings"):
        return layout
    group = _group_from_pb(message.encodings)
    if group.block_tokens == 0 or group.block_tokens % BASE_TOKENS or group.shape.window:
        raise InvalidRequestError(
            f"layout.encodings must have no window and block_tokens that are a multiple of {BASE_TOKENS}"
        )
    return replace(layout, encodings=replace(layout, groups=(group,), first_group=len(groups)))


def difference(ours: KVLayout, theirs: KVLayout) -> str:
    """Describe the first difference between two layouts. Fingerprints come last: any difference changes them."""
    our_code, their_code = (dict(each.parts).get(KV_CACHE_PART, "auto") for each in (ours, theirs))
    if our_code != their_code and ours.parts and theirs.parts:
        return f"its {KV_CACHE_PART} is {their_code}, the arena's is {our_code}"
    if len(ours.groups) != len(theirs.groups):
        return f"it has {len(theirs.groups)} groups of layers, the arena {len(ours.groups)}"
    for index, (our, their) in enumerate(zip(ours.groups, theirs.groups)):
        if our != their:
            return f"its group {index} is {_group(their)}, the arena's is {_group(our)}"
    if ours.encodings is None or theirs.encodings is None:
        if ours.encodings is not theirs.encodings:
            return "only one of the two has encoders"
    elif ours.encodings.groups != theirs.encodings.groups:
        ours_group, theirs_group = ours.encodings.groups[0], theirs.encodings.groups[0]
        return f"its encodings are {_group(theirs_group)}, the arena's are {_group(ours_group)}"
    if ours.slot_bytes != theirs.slot_bytes:
        return f"its slot_bytes is {theirs.slot_bytes}, the arena's is {ours.slot_bytes}"
    our_parts, their_parts = dict(ours.parts), dict(theirs.parts)
    for name in {**our_parts, **their_parts}:
        our_value, their_value = our_parts.get(name, "none"), their_parts.get(name, "none")
        if our_value != their_value and our_parts and their_parts:
            values = f"{their_value[:_SHOWN]} instead of {our_value[:_SHOWN]}"
            return f"its {name} differs from the arena's ({values})"
    return f"its fingerprint is {theirs.fingerprint[:_SHOWN]}, the arena's is {ours.fingerprint[:_SHOWN]}"


def _group_to_pb(group: KVGroup) -> pb.KVGroup:
    return pb.KVGroup(name=group.shape.name, block_tokens=group.block_tokens, window=group.shape.window)


def _group_from_pb(message: pb.KVGroup) -> KVGroup:
    shape = GroupShape(message.name, layers=(), kv_heads=0, head_dim=0, window=message.window)
    return KVGroup(shape, message.block_tokens)


def _group(group: KVGroup) -> str:
    return f"{group.shape.name!r} with block_tokens {group.block_tokens} and window {group.shape.window}"
