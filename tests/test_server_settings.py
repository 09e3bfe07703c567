"""The service's settings: from the environment and from arguments, checked before anything listens."""

from __future__ import annotations

from typing import Any

import pytest

from rlhf_scan import InputError
from rlhf_scan.server import Settings, create_app


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLHF_SCAN_PORT", "1234")
    monkeypatch.setenv("RLHF_SCAN_MAX_BODY_BYTES", "99")
    monkeypatch.setenv("RLHF_SCAN_BODY_SECONDS", "1.5")
    monkeypatch.setenv("RLHF_SCAN_WARM", "gae, vtrace,")
    settings = Settings.from_environment(port=4321)
    assert settings == Settings(port=4321, max_body_bytes=99, body_seconds=1.5, warm="gae, vtrace,")
    assert settings.warm_ops == ("gae", "vtrace")
    monkeypatch.setenv("RLHF_SCAN_PORT", "http")
    with pytest.raises(InputError, match="RLHF_SCAN_PORT must be of type int, got 'http'"):
        create_app()


@pytest.mark.parametrize(
    "wrong", [{"port": 70000}, {"threads": 0}, {"queue": -1}, {"backend": "gpu"}, {"body_seconds": float("nan")}, {"warm": "gae,gea"}]
)
def test_settings_that_cannot_be_used(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Settings(**wrong)
