"""Host CPU and heap profiles: starts pyroscope-io with the labels of our own profiles.

It takes headers only when it starts, and has no setting for certificates or a proxy. The settings
that it cannot follow are logged.
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

    It is not installed or runs already, or the file of the bearer token cannot be read.
    """
    try:
        pyroscope = import_module("pyroscope")
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "pyroscope":
            _log.warning("host profiles are set, but pyroscope-io is not installed")
        else:
            _log.warning("host profiles: pyroscope-io does not fit this Python: %s", error)
        return False
    try:
        headers, (user, password) = _credentials(config)
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
        basic_auth_username=user,
        basic_auth_password=password,
        tenant_id=config.tenant_id,
        http_headers=headers or None,
        tags=tags,
        mem_enabled=True,
    )
    if started is False:
        _log.warning(
            "host profiles: pyroscope-io already runs in this process and is left as it is"
        )
        return False
    ignored = [name for name in _NOT_FOLLOWED if getattr(config, name)]
    if ignored:
        _log.warning("host profiles: pyroscope-io ignores %s", ", ".join(ignored))
    if config.bearer_token_file:
        _log.info("host profiles: pyroscope-io does not notice when the bearer token changes")
    return True


def _credentials(config: PyroscopeConfig) -> tuple[dict[str, str], tuple[str, str]]:
    """Headers, and (user, password) of basic authentication; precedence as in our own pushes."""
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
