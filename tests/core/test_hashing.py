"""Equal contexts have equal hashes, and nothing else has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.core.hashing import HASH_BYTES, HashChain
from paceline.core.kv_layout import BASE_TOKENS

Tokens = st.lists(st.integers(0, 2**32 - 1), max_size=6 * BASE_TOKENS)


def chain(tokens: list[int], fingerprint: str = "model", salt: str = "") -> list[bytes]:
    hashes = HashChain(fingerprint, salt)
    hashes.extend(tokens)
    return hashes.hashes


def test_a_link_for_each_full_base_block() -> None:
    counts = [len(chain([7] * n)) for n in (0, BASE_TOKENS - 1, BASE_TOKENS, 2 * BASE_TOKENS - 1, 2 * BASE_TOKENS)]
    assert counts == [0, 0, 1, 1, 2]
    assert all(len(link) == HASH_BYTES for link in chain([7] * 64))


def test_equal_blocks_at_different_places_differ() -> None:
    assert len(set(chain([7] * 4 * BASE_TOKENS))) == 4


def test_model_and_salt_part_the_chains_also_where_their_letters_move() -> None:
    tokens = [1] * BASE_TOKENS
    roots = [("model", ""), ("model", "salt"), ("mode", "lsalt"), ("models", "alt"), ("other", "")]
    assert len({chain(tokens, *root)[0] for root in roots}) == len(roots)


def test_the_hash_does_not_change_between_releases() -> None:
    # Blocks outlive a worker's restart. Who changes this has to change KV_FORMAT.
    assert chain(list(range(BASE_TOKENS)))[0].hex() == "ad32d7bf9ff30bbde9e7522640df4437"


@given(Tokens, st.data())
def test_growing_step_by_step_is_growing_at_once(tokens: list[int], data: st.DataObject) -> None:
    grown = HashChain("model")
    length = 0
    while length < len(tokens):
        length = data.draw(st.integers(length + 1, len(tokens)))
        grown.extend(tokens[:length])
    assert grown.hashes == chain(tokens)


@given(Tokens, Tokens)
def test_chains_agree_exactly_as_far_as_their_blocks_do(ours: list[int], theirs: list[int]) -> None:
    for index, (one, other) in enumerate(zip(chain(ours), chain(theirs))):
        end = (index + 1) * BASE_TOKENS
        assert (one == other) == (ours[:end] == theirs[:end])


@given(st.lists(st.integers(0, 2**32 - 1), min_size=BASE_TOKENS, max_size=3 * BASE_TOKENS), st.data())
def test_one_changed_token_changes_its_link_and_all_behind_it(tokens: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[place] ^= 1
    before, after = chain(tokens), chain(changed)
    assert [one == other for one, other in zip(before, after)] == [
        index < place // BASE_TOKENS for index in range(len(before))
    ]


def test_a_part_of_a_link_has_a_name_of_its_own() -> None:
    tokens = list(range(40))
    names = [HashChain("model").digest(tokens, length) for length in range(len(tokens) + 1)]
    assert len(set(names)) == len(names)
    assert HashChain("model").digest([*tokens[:21], 7, 8], 21) == names[21]
    assert HashChain("other").digest(tokens, 21) != names[21]
    chain = HashChain("model")
    chain.extend(tokens)
    assert chain.hashes == [names[16], names[32]]
