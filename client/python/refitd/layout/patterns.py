"""Patterns of tensors' names, in the one syntax that all options share: '*' stands for any characters, '?' for any one, and everything
else for itself, so that an exact name and a prefix with '*' are patterns too. transport/plan/name_patterns.h is the same in C++.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from ..errors import InvalidArgument


def compiled(pattern: str) -> re.Pattern[str]:
    """A regular expression to use with fullmatch()."""
    return re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), re.DOTALL)


def matcher(patterns: Iterable[str], what: str) -> Callable[[str], bool]:
    """A function that tells whether a name matches any of the patterns. Raises InvalidArgument, which names the option `what`, for a single
    text, whose characters would be taken for patterns."""
    if isinstance(patterns, str):
        raise InvalidArgument(f"{what}: {patterns!r} is no list of patterns", culprit=what)
    made = [compiled(pattern) for pattern in patterns]
    return lambda name: any(pattern.fullmatch(name) for pattern in made)
