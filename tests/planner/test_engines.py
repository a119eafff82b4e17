"""Which engines the planner offers, and which it refuses before it does any work."""

from __future__ import annotations

import pytest

from configs.errors import PlanError
from configs.settings import EngineSettings, Settings
from planner.engines import builds_of, offers


@pytest.mark.parametrize("url", [None, "banana", "ftp://127.0.0.1"])
def test_a_server_without_an_address_is_refused_by_name(url: str | None) -> None:
    settings = Settings(engines={"far": EngineSettings(kind="openai", url=url)})
    (offer,) = (offer for offer in offers(settings) if offer.name == "far")
    assert offer.reason is not None and offer.remedy is not None
    with pytest.raises(PlanError, match=r"engine far can not be used: .*engines\.far\.url"):
        builds_of(("far",), settings)


def test_a_server_with_an_address_is_offered() -> None:
    settings = Settings(engines={"far": EngineSettings(kind="openai", url="http://127.0.0.1:9/v1")})
    (build,) = builds_of(("far",), settings)
    assert build.name == "far"
