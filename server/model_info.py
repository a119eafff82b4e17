"""What clients may know of the model that is served."""

from __future__ import annotations

from typing import Any

import msgspec

from configs.errors import RequestError


class ModelInfo(msgspec.Struct, frozen=True):
    """`name` is the id in `/v1/models`; numbers that are not known are None."""

    name: str
    plan_id: str
    created_unix_s: int
    context_length_tokens: int
    n_vocab: int
    architecture: str | None = None
    file_bytes: int | None = None

    @property
    def fingerprint(self) -> str:
        return f"pw_{self.plan_id[:12]}"

    def as_openai(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created_unix_s,
            "owned_by": "placewright",
            "context_length": self.context_length_tokens,
            "max_model_len": self.context_length_tokens,
            "meta": {
                "n_ctx": self.context_length_tokens,
                "n_vocab": self.n_vocab,
                "size": self.file_bytes,
                "architecture": self.architecture,
                "plan_id": self.plan_id,
            },
        }

    def check_name(self, asked: str | None) -> None:
        """Raises RequestError (404) where `asked` is another model; providers' prefixes are allowed."""
        if asked and asked != self.name and not asked.endswith(f"/{self.name}"):
            raise RequestError(
                f"model {asked!r} is not here; this server has {self.name!r}",
                code="model_not_found",
                param="model",
                status=404,
            )
