"""Two contexts have the same link if and only if they are equal up to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.context import HASH_BYTES, Context, encoding_context, full_block_names
from paceline.core.kv_layout import BASE_TOKENS, GroupShape, make_layout
from paceline.core.media import MediaKind, MediaSpan

Tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6 * BASE_TOKENS)


def links(tokens: list[int], layout: str = "model", salt: str = "") -> list[bytes]:
    return list(Context(tokens, salt).links(layout))


def test_there_is_one_link_for_each_full_base_block() -> None:
    counts = [len(links([7] * n)) for n in (0, BASE_TOKENS - 1, BASE_TOKENS, 2 * BASE_TOKENS - 1, 2 * BASE_TOKENS)]
    assert counts == [0, 0, 1, 1, 2]
    assert all(len(link) == HASH_BYTES for link in links([7] * 64))


def test_equal_tokens_at_different_positions_have_different_links() -> None:
    assert len(set(links([7] * 4 * BASE_TOKENS))) == 4


def test_layout_and_salt_separate_contexts_even_if_their_letters_move_from_one_to_the_other() -> None:
    tokens = [1] * BASE_TOKENS
    roots = [("model", ""), ("model", "salt"), ("mode", "lsalt"), ("models", "alt"), ("other", "")]
    assert len({links(tokens, *root)[0] for root in roots}) == len(roots)


def test_the_content_of_an_adapter_separates_contexts() -> None:
    tokens = [1] * 2 * BASE_TOKENS
    contexts = [
        Context(tokens, adapter=b"one"),
        Context(tokens, adapter=b"two"),
        Context(tokens, adapter=b"one", encoding=b"two"),
        Context(tokens, encoding=b"one"),
        Context(tokens, "one"),
        Context(tokens, adapter=b"one", shared_tokens=BASE_TOKENS, cache_salt="salt"),
        Context(tokens, shared_tokens=BASE_TOKENS, cache_salt="salt"),
        Context(tokens),
    ]
    # The first link is shared by contexts that differ only in the salt.
    for link, shared in enumerate((2, 0)):
        assert len({context.links("model")[link] for context in contexts}) == len(contexts) - shared
    assert len({context.name("model", 5) for context in contexts}) == len(contexts)
    assert Context(tokens, adapter=b"one").links("model") == contexts[0].links("model")


def test_names_do_not_change_between_releases() -> None:
    # Cached blocks outlive a worker's restart. A change that gives other values here must also change KV_FORMAT.
    assert links(list(range(BASE_TOKENS)))[0].hex() == "ad32d7bf9ff30bbde9e7522640df4437"
    salted = Context(list(range(40)), "salt")
    assert salted.links("model")[1].hex() == "4c89be72d1f8afb6317181f600dd7d1f"
    assert salted.name("model", 37).hex() == "9c3fb2413735f8d7ea80cadc0241009c"


@pytest.mark.slow
@given(Tokens, st.data())
def test_a_context_that_grows_step_by_step_has_the_links_of_one_that_is_made_at_once(
    tokens: list[int], data: st.DataObject
) -> None:
    grown = Context([])
    while len(grown) < len(tokens):
        length = data.draw(st.integers(len(grown) + 1, len(tokens)))
        grown.token_ids += tokens[len(grown) : length]
        grown.links("model")
    assert grown.links("model") == links(tokens)


@given(Tokens, Tokens)
def test_links_of_two_contexts_agree_exactly_as_far_as_their_tokens_do(ours: list[int], theirs: list[int]) -> None:
    for index, (one, other) in enumerate(zip(links(ours), links(theirs))):
        end = (index + 1) * BASE_TOKENS
        assert (one == other) == (ours[:end] == theirs[:end])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=BASE_TOKENS, max_size=3 * BASE_TOKENS), st.data())
def test_one_changed_token_changes_its_link_and_all_links_after_it(tokens: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[position] ^= 1
    before, after = links(tokens), links(changed)
    assert [one == other for one, other in zip(before, after)] == [
        index < position // BASE_TOKENS for index in range(len(before))
    ]


@given(st.integers(1, 100), st.integers(1, 60), st.integers(0, 15))
def test_links_of_the_same_tokens_differ_from_the_first_one_with_a_token_of_another_image(
    start: int, length: int, rest: int
) -> None:
    tokens = [7] * (start + length + rest)

    def own(*spans: tuple[int, int, bytes]) -> list[bytes]:
        media = [MediaSpan(*span, MediaKind.IMAGE) for span in spans]
        return list(Context(tokens, media=media).links("model"))

    image, other = (start, length, bytes(16)), (start, length, bytes([1]) * 16)
    earlier, seen = (start - 1, length, bytes(16)), own(image)
    assert seen == own(image)
    for changed, first in ((own(other), start), (links(tokens), start), (own(earlier), start - 1)):
        same = [one == another for one, another in zip(seen, changed, strict=True)]
        assert same == [index < first // BASE_TOKENS for index in range(len(seen))]


def test_names_depend_on_the_grid_of_an_image_because_positions_do() -> None:
    def links(grid: tuple[int, int, int] | None) -> list[bytes]:
        image = MediaSpan(20, 6, bytes(16), MediaKind.IMAGE, grid)
        return list(Context([7] * 64, media=[image]).links("model"))

    own = [links(grid) for grid in (None, (1, 2, 3), (1, 3, 2), (2, 1, 3))]
    assert {names[0] for names in own} == {own[0][0]}
    assert all(len({names[index] for names in own}) == len(own) for index in range(1, 4))


def test_an_image_within_a_base_block_is_in_the_names_of_partial_blocks() -> None:
    image = MediaSpan(3, 2, bytes(16), MediaKind.IMAGE)
    with_image, without = Context([7] * 10, media=[image]), Context([7] * 10)
    assert [with_image.name("m", end) == without.name("m", end) for end in range(1, 11)] == [True] * 3 + [False] * 7


def test_every_length_of_a_context_has_a_name_of_its_own() -> None:
    tokens = list(range(40))
    names = [Context(tokens).name("model", length) for length in range(len(tokens) + 1)]
    assert len(set(names)) == len(names)
    assert Context([*tokens[:21], 7, 8]).name("model", 21) == names[21]
    assert Context(tokens).name("other", 21) != names[21]
    assert links(tokens) == [names[16], names[32]]


def test_a_block_has_the_name_of_the_context_up_to_its_end() -> None:
    layout = make_layout((GroupShape("full", (0,), 2, 64), GroupShape("small", (1,), 1, 32)), 2, "m")
    context = Context(list(range(200)))
    for index, group in enumerate(layout.groups):
        full = full_block_names(group, context.links(layout.fingerprint), 150)
        assert len(full) == 150 // group.block_tokens
        assert [context.block_name(layout, index, block, 150) for block in range(len(full))] == list(full)
        # The last, partial block is named by the tokens that it has.
        assert context.block_name(layout, index, len(full), 150) == context.name(layout.fingerprint, 150)


@given(Tokens, st.integers(0, 6), st.integers(0, 6))
def test_contexts_with_other_salts_share_exactly_the_links_of_their_shared_tokens(
    tokens: list[int], ours: int, theirs: int
) -> None:
    full = len(tokens) // BASE_TOKENS
    ours, theirs = min(ours, full), min(theirs, full)

    def names(salt: str, shared: int) -> list[bytes]:
        context = Context(tokens, salt, shared_tokens=shared * BASE_TOKENS)
        return [context.name("model", length) for length in range(1, len(tokens) + 1)]

    def common(one: list[bytes], other: list[bytes]) -> list[int]:
        return [length for length, pair in enumerate(zip(one, other, strict=True), 1) if pair[0] == pair[1]]

    alice, bob = names("alice", ours), names("bob", theirs)
    assert len({*alice, *bob}) == 2 * len(tokens) - min(ours, theirs), "no name stands for two contents"
    # Neither the name of a tail within them nor any later name is shared.
    assert common(alice, bob) == [BASE_TOKENS * link for link in range(1, min(ours, theirs) + 1)]
    assert common(alice, names("alice", ours)) == list(range(1, len(tokens) + 1))


def test_shared_tokens_are_named_as_in_a_context_without_a_salt() -> None:
    tokens = list(range(40))
    context = Context(tokens, "salt", shared_tokens=BASE_TOKENS)
    assert context.links("model")[0] == links(tokens)[0]
    # See `test_names_do_not_change_between_releases`.
    assert (context.links("model")[1].hex(), context.name("model", 7).hex()) == (
        "9650c13f54a2041d304c84cd10564d95",
        "0feea2480358fee5f0bd140480ce742e",
    )


@given(st.binary(min_size=16, max_size=16), st.integers(1, 1000), st.text(max_size=3))
def test_an_encoding_is_named_by_its_input_and_salt(digest: bytes, length: int, salt: str) -> None:
    layout = make_layout((GroupShape("full", (0,), 1, 96),), 2, "m", encoding_size=96)
    assert layout.encodings is not None
    (group,) = layout.encodings.groups
    context = encoding_context(digest, length, salt, layout)
    assert len(context) == group.blocks_for(length) * group.block_tokens
    names = full_block_names(group, context.links(layout.fingerprint), len(context))
    assert len(names) == len({*names}) == group.blocks_for(length)
    others = [
        encoding_context(bytes(16) if any(digest) else bytes([1]) * 16, length, salt, layout),
        encoding_context(digest, length, salt + "x", layout),
        Context([0] * len(context), salt),
    ]
    assert all(not {*context.links(layout.fingerprint)} & {*each.links(layout.fingerprint)} for each in others)
