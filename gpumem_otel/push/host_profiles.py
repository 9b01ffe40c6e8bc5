"""Host CPU and heap profiles beside ours: starts pyroscope-io with the same labels.

It takes headers once, when it starts, and has no setting for certificates or a proxy. What of our
settings it can not follow is logged.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from gpumem_otel.base.logs import named_logger
from gpumem_otel.errors import PushError
from gpumem_otel.push.pyroscope import bearer_token

if TYPE_CHECKING:
    from gpumem_otel.base.profile import Identity
    from gpumem_otel.settings.config import PyroscopeConfig

_NOT_FOLLOWED = ("ca_file", "client_cert_file", "proxy")
_log = named_logger("gpumem_otel.export.hostprofiles")


def start_host_profiles(config: PyroscopeConfig, identity: Identity) -> bool:
    """Start pyroscope-io; False (and one log line) where that is not possible.

    It is absent or runs already, or the file of the bearer token can not be read.
    """
    try:
        pyroscope = import_module("pyroscope")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "pyroscope":
            _log.warning("host profiles asked for, but pyroscope-io is not installed")
        else:
            _log.warning("host profiles: pyroscope-io does not fit this Python: %s", error)
        return False
    try:
        headers, basic = _credentials(config)
    except PushError as error:
        _log.warning("host profiles: %s", error)
        return False
    tags = {"rank": str(identity.rank), **dict(identity.tags)}
    for name in ("namespace", "run_id"):
        if value := getattr(identity, name):
            tags[name] = value
    started = pyroscope.configure(
        application_name=identity.service_name,
        server_address=config.url,
        basic_auth_username=basic[0],
        basic_auth_password=basic[1],
        tenant_id=config.tenant_id,
        http_headers=headers or None,
        tags=tags,
        mem_enabled=True,
    )
    if started is False:
        _log.warning("host profiles: pyroscope-io already runs in this process; left as it is")
        return False
    beyond = [name for name in _NOT_FOLLOWED if getattr(config, name)]
    if beyond:
        _log.warning(
            "host profiles: pyroscope-io does not follow %s; it connects without",
            ", ".join(beyond),
        )
    if config.bearer_token_file:
        _log.info("host profiles: pyroscope-io keeps the bearer token of now, also if it changes")
    return True


def _credentials(config: PyroscopeConfig) -> tuple[dict[str, str], tuple[str, str]]:
    """Headers, and (user, password) of basic authentication; what wins is as in our own pushes."""
    headers = {name: secret.reveal() for name, secret in config.headers}
    if any(name.lower() == "authorization" for name in headers):
        return headers, ("", "")
    token = bearer_token(config)
    if token:
        return {**headers, "Authorization": f"Bearer {token}"}, ("", "")
    return headers, (config.basic_auth_user, config.basic_auth_password.reveal())


def stop_host_profiles() -> None:
    """Stop what `start_host_profiles` started."""
    import_module("pyroscope").shutdown()
