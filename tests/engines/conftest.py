from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refitd import testing


def pytest_configure(config: Any) -> None:
    config.addinivalue_line("markers", "quick: one engine in process; tools/engines --quick runs these alone")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the checkpoints of a module's tests."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def daemon() -> Iterator[Any]:
    with testing.daemon() as running:
        yield running
