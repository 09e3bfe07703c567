"""What can be set about the service."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from typing import Any

from rlhf_scan.call import BACKENDS
from rlhf_scan.checks import check_option
from rlhf_scan.errors import InputError
from rlhf_scan.operations import operations

PREFIX = "RLHF_SCAN_"


@dataclass(frozen=True)
class Settings:
    """Each can be given by the environment as RLHF_SCAN_<NAME>, or as an option of `rlhf-scan serve`.

    Attributes:
        host: address to listen on.
        port: to listen on; 0 takes a free one.
        backend: as in `rlhf_scan.gae`; "triton" moves what arrives to the GPU.
        max_body_bytes: largest body; 413 beyond.
        max_json_bytes: largest JSON body, which costs the whole process time to parse; 413 beyond.
        threads: that decode, compute and encode.
        queue: requests admitted at once, those being received and computed included; 503 beyond.
        body_seconds: how long a body may take to arrive; 408 beyond.
        warm: names of the operations, with commas between, that are compiled and tested before the service is ready; a backend may take
            seconds for each. The others are compiled at their first request.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    backend: str = "auto"
    max_body_bytes: int = 256 << 20
    max_json_bytes: int = 64 << 20
    threads: int = 2
    queue: int = 64
    body_seconds: float = 60.0
    warm: str = "gae"

    def __post_init__(self) -> None:
        """Raise InputError for a value that cannot be used."""
        check_option("settings", "backend", self.backend, BACKENDS)
        if not 0 <= self.port <= 65535:
            raise InputError(f"settings: port must lie in [0, 65535], got {self.port}; 0 takes a free one")
        for name in ("max_body_bytes", "max_json_bytes", "threads", "queue", "body_seconds"):
            if not getattr(self, name) > 0:
                raise InputError(f"settings: {name} must be > 0, got {getattr(self, name)}; leave it out for the default")
        for op in self.warm_ops:
            check_option("settings", "warm", op, [entry.name for entry in operations()])

    @property
    def warm_ops(self) -> tuple[str, ...]:
        """The names in `warm`."""
        return tuple(op.strip() for op in self.warm.split(",") if op.strip())

    @classmethod
    def from_environment(cls, **given: Any) -> Settings:
        """The settings of the environment; those `given` win."""
        found: dict[str, Any] = {}
        for field in fields(cls):
            text = os.environ.get(PREFIX + field.name.upper())
            if text is not None and field.name not in given:
                found[field.name] = _convert(field.name, text, type(field.default))
        return cls(**found, **given)


def _convert(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError as error:
        raise InputError(f"{PREFIX}{name.upper()} must be of type {kind.__name__}, got {text!r}; mend or unset it") from error
