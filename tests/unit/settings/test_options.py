"""Settings: what wins, what is refused, what is only a warning, and what is never shown."""

from __future__ import annotations

import os
from types import MappingProxyType

import pytest

from gpumem_otel.errors import ConfigError
from gpumem_otel.settings.config import Config, Secret
from gpumem_otel.settings.options import OPTIONS, InstallOptions, resolve


def test_defaults_do_nothing_on_the_network():
    config = resolve({})
    assert config.enabled
    assert not config.serve.enabled
    assert not config.metrics.otlp
    assert config.pyroscope.url == ""
    assert config.serve.host == "127.0.0.1"
    assert config.warnings == ()


def test_every_option_is_a_typed_keyword_and_every_keyword_an_option():
    assert set(InstallOptions.__annotations__) == {option.name for option in OPTIONS} | {"enabled"}


def test_every_option_has_a_field_and_a_variable():
    config = resolve({})
    for option in OPTIONS:
        section = getattr(config, option.section) if option.section else config
        assert hasattr(section, option.field)
        assert option.environ
        assert len({option.name for option in OPTIONS}) == len(OPTIONS)


def test_keyword_wins_over_variable_over_default():
    assert resolve({"GPUMEM_OTEL_INTERVAL": "30"}).profiles.interval_seconds == 30
    assert (
        resolve({"GPUMEM_OTEL_INTERVAL": "30"}, interval_seconds=15).profiles.interval_seconds == 15
    )


def test_an_unusable_variable_is_a_warning_and_the_default():
    config = resolve({"GPUMEM_OTEL_INTERVAL": "soon", "GPUMEM_OTEL_PORT": "70000"})
    assert config.profiles.interval_seconds == 60
    assert config.serve.port == 9464
    assert config.warnings == (
        "GPUMEM_OTEL_INTERVAL must be a number; ignored",
        "GPUMEM_OTEL_PORT must be between 0 and 65535; ignored",
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval_seconds": 0}, "option 'interval_seconds' must be between 0.1 and 86400"),
        ({"interval_seconds": True}, "option 'interval_seconds' must be a number"),
        ({"port": "http"}, "option 'port' must be a whole number"),
        ({"metrics_level": "all"}, "option 'metrics_level' must be one of minimal, standard, full"),
        ({"profiles": ["live", "dead"]}, "option 'profiles' 'dead' is none of live, peak, "),
        ({"pyroscope_url": "localhost:4040"}, "option 'pyroscope_url' must be an http:// or"),
        ({"pyroscope_url": "http://me:pw@host"}, "option 'pyroscope_url' must not hold a user"),
        ({"enabled": "yes"}, "option 'enabled' must be true or false"),
        ({"intervall": 3}, "unknown option 'intervall': did you mean 'interval_seconds'? "),
        (
            {"pyroscope": "x"},
            "unknown option 'pyroscope': did you mean 'pyroscope_url'? known are ",
        ),
        ({"zzz": 3}, "unknown option 'zzz': known are allocated_window_seconds, "),
    ],
)
def test_an_unusable_keyword_is_one_clear_line(options, message):
    with pytest.raises(ConfigError) as caught:
        resolve({}, **options)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_variable_that_is_no_setting_is_a_warning():
    names = ("DISABLED", "SERV", "PYROSCOPE_URL_OF_MINE", "SERVE")
    links = ("X_SERVICE_HOST", "X_SERVICE_PORT_HTTP", "X_PORT_9464_TCP_ADDR")
    environ = {f"GPUMEM_OTEL_{name}": "" for name in (*names, *links)}
    assert resolve({**environ, "MY_GPUMEM_OTEL_SERV": "1"}).warnings == (
        "GPUMEM_OTEL_PYROSCOPE_URL_OF_MINE is no setting",
        "GPUMEM_OTEL_SERV is no setting; did you mean GPUMEM_OTEL_SERVE?",
    )


def test_every_variable_with_our_prefix_is_known():
    ours = {name: "" for option in OPTIONS for name in option.environ}
    assert resolve(ours).warnings == ()


def test_standard_variables_come_first():
    config = resolve(
        {
            "OTEL_RESOURCE_ATTRIBUTES": "service.name=a%20b,k8s.namespace.name=team,broken",
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318",
            "OTEL_METRIC_EXPORT_INTERVAL": "15000",
            "OTEL_EXPORTER_PROMETHEUS_PORT": "9999",
        }
    )
    assert config.service_name == "a b"
    assert config.namespace == "team"
    assert config.metrics.otlp
    assert config.metrics.otlp_interval_seconds == 15
    assert config.serve.port == 9999
    named = {"OTEL_SERVICE_NAME": "named", "OTEL_RESOURCE_ATTRIBUTES": "service.name=other"}
    assert resolve(named).service_name == "named"


@pytest.mark.parametrize(
    ("environ", "otlp", "serve"),
    [
        ({"OTEL_METRICS_EXPORTER": "otlp"}, True, False),
        ({"OTEL_METRICS_EXPORTER": "prometheus"}, False, True),
        ({"OTEL_METRICS_EXPORTER": "otlp, prometheus"}, True, True),
        ({"OTEL_METRICS_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "x"}, False, False),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "x"}, True, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "x", "OTEL_SDK_DISABLED": "true"}, False, False),
        ({"OTEL_METRICS_EXPORTER": "prometheus", "GPUMEM_OTEL_SERVE": "0"}, False, False),
    ],
)
def test_exporters_follow_the_standard_variables(environ, otlp, serve):
    config = resolve(environ)
    assert (config.metrics.otlp, config.serve.enabled) == (otlp, serve)


@pytest.mark.parametrize("word", ["1", "true", "YES", "on"])
def test_disabled_by_variable(word):
    assert not resolve({"GPUMEM_OTEL_DISABLED": word}).enabled
    assert not resolve({"GPUMEM_OTEL_DISABLED": word}, enabled=True).enabled


def test_no_secret_is_ever_shown():
    config = resolve(
        {
            "PYROSCOPE_BASIC_AUTH_PASSWORD": "s3cret",
            "PYROSCOPE_AUTH_TOKEN": "s3cret",
            "PYROSCOPE_HTTP_HEADERS": "X-Key=s3cret",
            "PYROSCOPE_PROXY": "http://user:s3cret@proxy:3128",
            "GPUMEM_OTEL_TOKEN": "s3cret",
            "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret",
        }
    )
    assert "s3cret" not in repr(config)
    assert "s3cret" not in str(config)
    assert config.serve.token == Secret("s3cret")
    assert config.pyroscope.proxy.reveal() == "http://user:s3cret@proxy:3128"
    assert config.pyroscope.headers[0][1].reveal() == "s3cret"
    assert dict(config.metrics.otlp_environ)["OTEL_EXPORTER_OTLP_HEADERS"] == "authorization=s3cret"


def test_a_bad_secret_does_not_reach_the_warning():
    config = resolve({"PYROSCOPE_HTTP_HEADERS": "s3cret", "PYROSCOPE_SERVER_ADDRESS": "s3cret"})
    assert config.warnings
    assert not any("s3cret" in warning for warning in config.warnings)


def test_run_dir_follows_xdg():
    assert resolve({"XDG_RUNTIME_DIR": "/run/user/7"}).serve.run_dir == "/run/user/7/gpumem-otel"
    assert resolve({"GPUMEM_OTEL_RUN_DIR": "/x"}).serve.run_dir == "/x"


def test_config_is_a_value():
    assert resolve({"A": "b"}) == resolve({}) == Config(serve=resolve({}).serve)


SECRET_URLS = [
    "http://user:s3cret\u2100@host:4040",  # urlsplit's own error repeats it
    "http://user:s3cret@[host",
    "http://user:s3cret@host:40400x",
    "http://user:s3cret@host",
]


@pytest.mark.parametrize("url", SECRET_URLS)
def test_a_url_with_credentials_is_refused_without_repeating_it(url):
    config = resolve({"PYROSCOPE_SERVER_ADDRESS": url})
    assert config.pyroscope.url == ""
    (warning,) = config.warnings
    assert warning.startswith("PYROSCOPE_SERVER_ADDRESS must ")
    assert "s3cret" not in warning
    with pytest.raises(ConfigError) as caught:
        resolve({}, pyroscope_url=url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "http://host:40400x",
        "http://host:99999",
        "http://host:0",
        "http://[::1",
        "http://",
        "ftp://h",
    ],
)
def test_a_url_that_could_never_be_reached_is_refused(url):
    """So that it switches off pushing, with a warning, and not all that starts after it."""
    config = resolve({"PYROSCOPE_SERVER_ADDRESS": url})
    assert config.pyroscope.url == ""
    (warning,) = config.warnings
    assert warning == (
        "PYROSCOPE_SERVER_ADDRESS must be an http:// or https:// URL, like http://host:4040;"
        " ignored"
    )


@pytest.mark.parametrize(
    "url", ["http://host", "https://host:4040/prefix", "http://[::1]:4040", "http://host:"]
)
def test_urls_that_are_kept(url):
    assert resolve({"PYROSCOPE_SERVER_ADDRESS": f" {url}/ "}).pyroscope.url == url


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_no_text_of_a_variable_is_ever_raised_or_shown(option):
    """GIVEN any text WHEN it cannot be used THEN a warning, in our own words."""
    for text in (
        "s3cret\u2100",
        "http://a:s3cret@b:c",
        "=s3cret",
        "9" * 5000,
        "nan",
        "\0",
        "[" * 9,
    ):
        config = resolve({option.environ[0]: text})
        if option.name != "profiles":  # names the words that it does not know
            assert not any("s3cret" in warning for warning in config.warnings)


@pytest.mark.parametrize("number", [10**400, -(10**400)])
@pytest.mark.parametrize(
    ("option", "bounds"),
    [("interval_seconds", "0.1 and 86400"), ("max_window_events", "100 and 10000000")],
)
def test_a_huge_number_is_out_of_bounds(option, bounds, number):
    with pytest.raises(ConfigError, match=f"option '{option}' must be between {bounds}"):
        resolve({}, **{option: number})


def test_a_run_id_of_ones_own():
    assert resolve({}).run_id == ""
    assert resolve({"GPUMEM_OTEL_RUN_ID": "night-7"}).run_id == "night-7"
    assert resolve({"GPUMEM_OTEL_RUN_ID": "night-7"}, run_id="day-8").run_id == "day-8"


def test_the_list_of_exporters_decides_about_otlp():
    """An endpoint alone asks for it; beside a list without `otlp` it does not."""
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}
    assert resolve(endpoint).metrics.otlp
    assert not resolve({**endpoint, "OTEL_METRICS_EXPORTER": "prometheus"}).metrics.otlp
    assert resolve({**endpoint, "OTEL_METRICS_EXPORTER": "prometheus,otlp"}).metrics.otlp
    assert resolve({"OTEL_SDK_DISABLED": "true", "GPUMEM_OTEL_OTLP": "1"}).metrics.otlp


PATHS = [option for option in OPTIONS if option.name.endswith(("_file", "_dir", "_path"))]


@pytest.mark.parametrize("option", PATHS, ids=lambda option: option.name)
def test_a_path_stays_where_it_was_when_the_job_goes_elsewhere(option, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def found(environ=MappingProxyType({}), **given):
        config = resolve(environ, **given)
        return getattr(getattr(config, option.section) if option.section else config, option.field)

    assert found(**{option.name: "some/file"}) == f"{tmp_path}/some/file"
    assert found(**{option.name: "/some/file"}) == "/some/file"
    for value in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match=r"must be a path, which this cannot be$"):
            resolve({}, **{option.name: value})
    odd = found({option.environ[0]: os.fsdecode(b"latin-\xe9")})
    assert os.fsencode(odd) == os.fsencode(tmp_path) + b"/latin-\xe9"


def test_a_path_in_a_folder_that_is_gone_stays_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert resolve({}, token_file="token").serve.token_file == "token"
