"""What every route needs, in one frozen value; it lives in `app.state.service`."""

from __future__ import annotations

import msgspec
from starlette.requests import Request

from configs.settings import ServeSettings
from server.admission import Admission
from server.model_info import ModelInfo
from server.stats import ServerStats
from server.supervise import Supervisor
from server.text import Text


class Service(msgspec.Struct, frozen=True):
    supervisor: Supervisor
    model: ModelInfo
    text: Text
    settings: ServeSettings
    admission: Admission
    stats: ServerStats

    @property
    def context_length_tokens(self) -> int:
        """Of one request: what the engine says, or the plan while the engine was never up."""
        info = self.supervisor.info
        return info.context_length_tokens if info else self.model.context_length_tokens


def service_of(request: Request) -> Service:
    service = request.app.state.service
    assert isinstance(service, Service)
    return service
