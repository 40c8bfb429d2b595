"""pytest's fixture `refitd_daemon`: a private daemon for each test that asks for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from . import testing


@pytest.fixture
def refitd_daemon() -> Iterator[testing.Daemon]:
    """A running `refitd.testing.Daemon`, stopped after the test."""
    with testing.daemon() as daemon:
        yield daemon
