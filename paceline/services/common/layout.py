"""KV layouts as messages, and the comparison of a worker's layout with the arena's."""

from __future__ import annotations

from paceline.core.errors import InvalidRequestError
from paceline.core.kv_layout import BASE_TOKENS, SLOT_ALIGNMENT, GroupShape, KVGroup, KVLayout
from paceline.proto import kvtransfer_pb2 as pb

_MAX_GROUPS = 64
_MAX_NAME = 256


def layout_to_pb(layout: KVLayout) -> pb.KVLayout:
    """Return the part of a layout that services other than workers need."""
    groups = [
        pb.KVGroup(name=group.shape.name, block_tokens=group.block_tokens, window=group.shape.window)
        for group in layout.groups
    ]
    return pb.KVLayout(
        fingerprint=layout.fingerprint, slot_bytes=layout.slot_bytes, base_tokens=BASE_TOKENS, groups=groups
    )


def layout_from_pb(message: pb.KVLayout) -> KVLayout:
    """Return the layout without layers and heads, which only workers know.

    Raises:
        InvalidRequestError: no arena can have this layout.
    """
    sizes = [group.block_tokens for group in message.groups]
    if not 0 < len(message.fingerprint) <= _MAX_NAME:
        raise InvalidRequestError(f"layout.fingerprint must have 1 to {_MAX_NAME} characters")
    if any(len(group.name) > _MAX_NAME for group in message.groups[: _MAX_GROUPS + 1]):
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
    groups = tuple(
        KVGroup(GroupShape(group.name, layers=(), kv_heads=0, head_dim=0, window=group.window), group.block_tokens)
        for group in message.groups
    )
    return KVLayout(groups, itemsize=0, slot_bytes=message.slot_bytes, fingerprint=message.fingerprint)


def difference(ours: KVLayout, theirs: KVLayout) -> str:
    """Return the first difference in words. The fingerprint comes last, because any difference changes it."""
    if len(ours.groups) != len(theirs.groups):
        return f"it has {len(theirs.groups)} groups of layers, the arena {len(ours.groups)}"
    for index, (our, their) in enumerate(zip(ours.groups, theirs.groups)):
        if our != their:
            return f"its group {index} is {_group(their)}, the arena's is {_group(our)}"
    if ours.slot_bytes != theirs.slot_bytes:
        return f"its slot_bytes is {theirs.slot_bytes}, the arena's is {ours.slot_bytes}"
    return f"its fingerprint is {theirs.fingerprint[:16]}, the arena's is {ours.fingerprint[:16]}"


def _group(group: KVGroup) -> str:
    return f"{group.shape.name!r} with block_tokens {group.block_tokens} and window {group.shape.window}"
