"""The findings that refitd.doctor reports. The doctor makes them, and so do the kinds of device, which look at their own devices."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

# The limit of each call that the doctor makes: a machine that needs longer is not well.
CALL_SECONDS = 30.0


class State(str, Enum):
    """OK: as it should be. NOTE: refitd works, but not everything does or it may be slow. BROKEN: refitd does not work like this."""

    OK = "ok"
    NOTE = "note"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """A thing that was looked at, what was found in words, what to do about it ("" where nothing is), and figures for programs.

    Bytes and seconds are named so in `figures`.
    """

    what: str
    state: State
    text: str
    advice: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
