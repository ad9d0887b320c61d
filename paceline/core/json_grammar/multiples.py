"""The multiples of a number, as terminals of grammars.

A terminal reads the digits of a number one by one and remembers the remainder. The library's terminals cannot refer to
themselves. So there is one terminal for each remainder and each count of digits that may still follow, which is why
these numbers have a largest number of digits. The library has terminals for multiples of its own, but only within a
grammar inside the grammar, and it may panic at white space before such a grammar.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction


def multiples(step: Fraction, digits: int, decimals: int, named: Callable[[str], str]) -> str:
    """Return a terminal for the multiples of a positive number, as JSON writes them without an exponent.

    Args:
        step: a number with a finite number of decimals.
        digits: largest number of digits before the point.
        decimals: largest number of digits after the point. If it is 0, numbers have no point.
        named: returns the name of a terminal with a given expression. Its errors end the function.
    """
    places = 0
    while (step * 10**places).denominator != 1:
        places += 1
    return _Multiples(int(step * 10**places), places, decimals, named).number(digits)


class _Multiples:
    """Terminals for the rest of a number whose value, without its point, is a multiple of `modulus`.

    Each terminal may match the empty text. Methods return None in place of a terminal that would match no text at all.

    Args:
        places: number of decimals of the step. A number with fewer decimals counts as if zeros followed.
    """

    def __init__(self, modulus: int, places: int, decimals: int, named: Callable[[str], str]) -> None:
        self._modulus = modulus
        self._places = places
        self._zeros = max(0, decimals - places)
        self._named = named
        self._known: dict[tuple[object, ...], str | None] = {}

    def number(self, digits: int) -> str:
        """Return a terminal for numbers of up to `digits` digits before the point."""
        ways = self._by_digit(0, range(1), lambda remainder: self._whole(0, remainder))
        ways += self._by_digit(0, range(1, 10), lambda remainder: self._whole(digits - 1, remainder))
        return f"/-?/ ({' | '.join(ways)})"

    def _whole(self, digits: int, remainder: int) -> str | None:
        """Return a terminal for up to `digits` more digits before the point, and what follows them."""
        return self._terminal(
            ("whole", digits, *self._distinct(remainder, digits + self._places)),
            lambda: [
                *self._point(remainder),
                *(self._by_digit(remainder, range(10), lambda value: self._whole(digits - 1, value)) if digits else []),
            ],
        )

    def _point(self, remainder: int) -> list[str]:
        """Return expressions for the rest of a number that has all its digits before the point."""
        is_multiple = remainder * 10**self._places % self._modulus == 0
        if self._places == 0:
            return ([rf"/(\.0{{1,{self._zeros}}})?/"] if self._zeros else ['""']) if is_multiple else []
        return [*(['""'] if is_multiple else []), *([point] if (point := self._decimals(remainder)) else [])]

    def _decimals(self, remainder: int) -> str | None:
        """Return a terminal for a point and at least one decimal."""
        return self._terminal(
            ("point", *self._distinct(remainder, self._places)),
            lambda: [
                rf"/\./ {way}"
                for way in self._by_digit(remainder, range(10), lambda value: self._decimal(self._places - 1, value))
            ],
        )

    def _decimal(self, places: int, remainder: int) -> str | None:
        """Return a terminal for more decimals, of which only the first `places` may be other than 0."""
        is_multiple = remainder * 10**places % self._modulus == 0
        end = '""' if places else f"/0{{0,{self._zeros}}}/"
        return self._terminal(
            ("decimal", places, *self._distinct(remainder, places)),
            lambda: [
                *([end] if is_multiple else []),
                *(
                    self._by_digit(remainder, range(10), lambda value: self._decimal(places - 1, value))
                    if places
                    else []
                ),
            ],
        )

    def _terminal(self, key: tuple[object, ...], ways: Callable[[], list[str]]) -> str | None:
        """Return the name of a terminal with these alternatives, which are made once for each key."""
        if key not in self._known:
            found = ways()
            self._known[key] = self._named(" | ".join(found)) if found else None
        return self._known[key]

    def _distinct(self, remainder: int, digits: int) -> tuple[int, ...]:
        """Return a key that is equal for remainders after which the same digits lead to a multiple.

        Args:
            digits: number of digits that may follow, at most.
        """
        key: list[int] = []
        for count in range(digits + 1):
            missing = -remainder * 10**count % self._modulus
            if 10**count >= self._modulus:  # some digits lead to a multiple from any remainder
                return (*key, missing)
            key.append(missing if missing < 10**count else -1)
        return tuple(key)

    def _by_digit(self, remainder: int, digits: range, following: Callable[[int], str | None]) -> list[str]:
        """Return expressions for a digit and what follows it. Digits after which the same follows share one."""
        found: dict[str, str] = {}
        for digit in digits:
            each = following((remainder * 10 + digit) % self._modulus)
            if each is not None:
                found[each] = found.get(each, "") + str(digit)
        return [f"/[{which}]/ {each}" for each, which in found.items()]
