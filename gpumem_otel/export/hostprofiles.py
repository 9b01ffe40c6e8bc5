"""Host CPU and heap profiles beside ours: starts pyroscope-io with the same labels."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpumem_otel.config import PyroscopeConfig
    from gpumem_otel.core.model import Identity

__all__ = ["start_host_profiles", "stop_host_profiles"]

_log = logging.getLogger("gpumem_otel.export.hostprofiles")


def start_host_profiles(config: PyroscopeConfig, identity: Identity) -> bool:
    """Start pyroscope-io; False (and one log line) where it is absent or already running."""
    try:
        pyroscope = import_module("pyroscope")
    except ImportError:
        _log.warning("host profiles asked for, but pyroscope-io is not installed")
        return False
    tags = {"rank": str(identity.rank), **dict(identity.tags)}
    for name in ("namespace", "run_id"):
        if value := getattr(identity, name):
            tags[name] = value
    headers = {name: secret.reveal() for name, secret in config.headers}
    if config.bearer_token:
        headers["Authorization"] = f"Bearer {config.bearer_token.reveal()}"
    started = pyroscope.configure(
        application_name=identity.service_name,
        server_address=config.url,
        basic_auth_username=config.basic_auth_user,
        basic_auth_password=config.basic_auth_password.reveal(),
        tenant_id=config.tenant_id,
        http_headers=headers or None,
        tags=tags,
        mem_enabled=True,
    )
    if started is False:
        _log.warning("host profiles: pyroscope-io already runs in this process; left as it is")
        return False
    return True


def stop_host_profiles() -> None:
    """Stop what `start_host_profiles` started."""
    import_module("pyroscope").shutdown()
