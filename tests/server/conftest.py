"""One server for the tests that leave it as they found it; tests that break things start their own."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from tests.fakes.http import TestServer


@pytest.fixture(scope="module")
def shared_server() -> Iterator[TestServer]:
    with TestServer() as server:
        yield server


@pytest.fixture
def client(shared_server: TestServer) -> Iterator[httpx.Client]:
    with shared_server.client() as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(shared_server: TestServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shared_server.url}/v1", api_key="any", max_retries=0) as client:
        yield client
