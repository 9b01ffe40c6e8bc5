"""The files in deploy/, and the environment variables that they name."""

from __future__ import annotations

import re
from pathlib import Path

from gpumem_otel.settings.options import OPTIONS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
EXAMPLES = DEPLOY / "examples"
MINE = "mine.json"
"""A target of whoever follows docs/getting-started.md in this clone."""
FILES = sorted(
    path
    for path in DEPLOY.rglob("*")
    if path.is_file() and path.suffix != ".pyc" and path.name != MINE
)
OURS = [path for path in FILES if path.parent.name not in {"rules", "tests"}]
"""Rules and their tests are held against METRICS by test_alert_rules."""

ALLOY = sorted((DEPLOY / "alloy").glob("*.alloy"))
SCRIPTS = [EXAMPLES / "torchrun.sh", EXAMPLES / "slurm.sbatch"]
MANIFESTS = [EXAMPLES / "kubernetes.yaml"]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()

KNOWN = {name for option in OPTIONS for name in option.environ} | {"GPUMEM_OTEL_DISABLED"}
STANDARD = {
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_PROTOCOL",
    "OTEL_RESOURCE_ATTRIBUTES",
}
"""Of OpenTelemetry's SDK and exporter, which read them themselves."""

IDENTITY = {"POD_NAME", "POD_NAMESPACE", "NODE_NAME", "RANK", "WORLD_SIZE"}
OF_THE_PLATFORM = {
    # Grafana's own, and what grafana/provisioning/ reads
    "GF_SECURITY_ADMIN_PASSWORD", "GF_AUTH_ANONYMOUS_ENABLED", "GF_USERS_ALLOW_SIGN_UP",
    "GF_ANALYTICS_REPORTING_ENABLED", "GF_ANALYTICS_CHECK_FOR_UPDATES", "GF_PATHS_PROVISIONING",
    "GPUMEM_DASHBOARDS", "PROMETHEUS_URL", "PYROSCOPE_URL", "GRAFANA_ADMIN_PASSWORD",
    # what alloy/ and otel/ read
    "LISTEN_HOST", "CLUSTER", "COLLECTOR_HOST",
    # Slurm
    "SLURM_JOB_NAME", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_NNODES", "SLURM_RESTART_COUNT",
    # Python and the shell in the image
    "PATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PIP_CONSTRAINT",
}  # fmt: skip

SECRET = re.compile(r"(?i)(pass(word|wd)?|token|secret|api_?key|credential)")
"""In the name of what may be a credential."""


def named(path: Path) -> str:
    return str(path.relative_to(DEPLOY))


def text_of(path: Path) -> str:
    return path.read_text(encoding="ascii")


def variables(text: str) -> set[str]:
    """Environment variables that a file of any of these kinds sets or reads."""
    found: set[str] = set()
    for pattern in (
        r'sys\.env\("(\w+)"\)',  # Alloy
        r"\$\{env:(\w+)",  # Collector
        r"\$\{?([A-Z][A-Z0-9_]+)",  # compose, shell
        r"^ *export (\w+)=",  # shell
        r"\{name: ([A-Z][A-Z0-9_]+)",  # Kubernetes
        r"- name: ([A-Z][A-Z0-9_]+)$",
        r"\$\(([A-Z][A-Z0-9_]+)\)",
        r'^ *"([A-Z][A-Z0-9_]+)": ',  # Python
        r"^ *([A-Z][A-Z0-9_]+): ",  # compose
        r"^(?:ENV)? +([A-Z][A-Z0-9_]+)=",  # Dockerfile
        r"\b(?:RUN) ([A-Z][A-Z0-9_]+)=",
    ):
        found |= set(re.findall(pattern, text, re.MULTILINE))
    return found
