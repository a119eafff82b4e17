"""What every test gets: a logger without handlers that an earlier test's stderr went away under."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet_logger() -> Iterator[None]:
    yield
    logging.getLogger("placewright").handlers.clear()
