"""The shipped rules in a real promtool and a real Prometheus."""

from __future__ import annotations

import json
import subprocess

import pytest
from support import alert_rules
from support.cli_process import WAIT
from support.exposed import exposed
from support.said import said
from support.servers import Prometheus, program, until

pytestmark = pytest.mark.servers


def promtool(*arguments: object) -> str:
    done = subprocess.run(
        [program("promtool"), *map(str, arguments)], capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def count() -> int:
    return sum(len(group["rules"]) for group in alert_rules.groups())


def test_promtool_accepts_the_rules():
    answer = f"SUCCESS: {count()} rules found"
    assert answer in promtool("check", "rules", "--lint=all", "--lint-fatal", alert_rules.RULES)
    said("promtool", "`check rules --lint=all --lint-fatal` of the rules", f"`{answer}`")


@pytest.mark.parametrize("path", alert_rules.RULE_TESTS, ids=lambda path: path.stem)
def test_the_rules_pass_their_own_tests(path):
    assert "SUCCESS" in promtool("test", "rules", path)
    said("promtool", f"`test rules` of `{path.name}`", "`SUCCESS`")


def test_a_test_of_the_rules_can_fail(tmp_path):
    """Without the leak's rule the leak's test fails: it runs the shipped file."""
    broken = alert_rules.RULES.read_text().replace("> 0.01 * gpumem_limit_bytes", "> 1e18")
    (tmp_path / "rules").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "rules" / "gpumem.yaml").write_text(broken)
    (leak,) = [path for path in alert_rules.RULE_TESTS if path.stem == "leak"]
    copy = tmp_path / "tests" / "leak.yaml"
    copy.write_text(leak.read_text())
    done = subprocess.run(
        [program("promtool"), "test", "rules", copy], capture_output=True, text=True, timeout=WAIT
    )
    assert done.returncode == 1
    assert "GpumemLeak" in done.stdout + done.stderr


def test_one_more_label_and_another_address_of_the_runbooks_by_sed(tmp_path):
    """The two replacements that docs/alerts.md gives."""
    changed = tmp_path / "gpumem.yaml"
    done = subprocess.run(
        [
            "sed", "-e", "s/cluster, namespace, job/cluster, namespace, job, team/",
            "-e", "s|docs/runbooks/|http://127.0.0.1/runbooks/|", alert_rules.RULES,
        ],
        capture_output=True, text=True, timeout=WAIT, check=True,
    )  # fmt: skip
    changed.write_text(done.stdout)
    assert f"SUCCESS: {count()} rules found" in promtool("check", "rules", changed)
    rules = done.stdout.split("groups:")[1]
    assert "docs/runbooks/" not in rules
    assert rules.count("namespace, job") == rules.count("cluster, namespace, job, team")
    tests = tmp_path / "tests.yaml"
    tests.write_text(
        json.dumps(
            {
                "rule_files": [str(changed)],
                "evaluation_interval": "1m",
                "tests": [
                    {
                        "interval": "1m",
                        "input_series": [
                            {
                                "series": f'gpumem_ooms_total{{job="j", team="{team}", rank="0"}}',
                                "values": "0x5 1x20",
                            }
                            for team in "ab"
                        ],
                        "promql_expr_test": [
                            {
                                "expr": 'ALERTS{alertname="GpumemOom"}',
                                "eval_time": "10m",
                                "exp_samples": [
                                    {
                                        "labels": 'ALERTS{alertname="GpumemOom", '
                                        'alertstate="firing", severity="warning", '
                                        f'job="j", team="{team}"}}',
                                        "value": 1,
                                    }
                                    for team in "ab"
                                ],
                            }
                        ],
                    }
                ],
            }
        )
    )
    assert "SUCCESS" in promtool("test", "rules", tests)


class Ranks:
    """The /metrics of four ranks, by path; `ooms` may be changed while it is scraped."""

    def __init__(self) -> None:
        self.ooms = [0, 0, 0, 0]

    def text(self, rank: int) -> str:
        of = f'{{rank="{rank}",device="0"}}'
        return (
            f"# TYPE gpumem_target_info gauge\ngpumem_target_info{of} 1\n"
            f"# TYPE gpumem_limit_bytes gauge\ngpumem_limit_bytes{of} 1e11\n"
            f"# TYPE gpumem_ooms counter\ngpumem_ooms_total{of} {self.ooms[rank]}\n"
        )


def served(ranks: Ranks):
    def render(path: str, _accept: str) -> tuple[str, bytes]:
        return "text/plain; version=0.0.4", ranks.text(int(path.removeprefix("/"))).encode()

    return exposed(render)


def test_an_oom_of_a_scraped_job_is_one_alert_with_its_worst_three_ranks(tmp_path):
    """Every rule evaluates without an error, and the texts are filled in by a real server."""
    rules = tmp_path / "gpumem.yaml"
    rules.write_text(alert_rules.RULES.read_text().replace("interval: 1m", "interval: 1s"))
    ranks = Ranks()
    with (
        served(ranks) as target,
        Prometheus(
            tmp_path / "prometheus",
            scrape={"train": []},
            job_options={
                "static_configs": [
                    {
                        "targets": [target],
                        "labels": {"__metrics_path__": f"/{rank}", "cell": str(rank)},
                    }
                    for rank in range(4)
                ]
            },
            rule_files=[rules],
        ) as prometheus,
    ):
        prometheus.wait_for_series("gpumem_ooms_total", 4)
        ranks.ooms = [1, 2, 4, 3]

        def fired():
            found = prometheus.api("alerts")["alerts"]
            # a scrape may come between two ranks: wait until all are in
            return [one for one in found if "Devices: 4" in one["annotations"]["description"]]

        found = until(fired, "the alert of four ranks")
        texts = {one["labels"]["severity"]: one for one in found}
        assert texts["warning"]["labels"] == {
            "alertname": "GpumemOom", "job": "train", "severity": "warning",
        }  # fmt: skip
        assert texts["warning"]["annotations"] == {
            "summary": "Job train ran out of GPU memory",
            "description": "An allocation failed for good within 15 minutes, caught by the job or "
            "not. Devices: 4. Times: rank 2 device 0: 4, rank 3 device 0: 3, rank 1 device 0: 2. "
            "Look at the last profile before it.",
            "runbook_url": "docs/runbooks/gpumem-oom.md",
        }

        def evaluated():
            known = [rule for group in prometheus.api("rules")["groups"] for rule in group["rules"]]
            return known if all(rule["health"] != "unknown" for rule in known) else None

        known = until(evaluated, "all rules to be evaluated")
        assert len(known) == count()
        assert {rule["health"] for rule in known} == {"ok"}
        said("Prometheus", "to evaluate the rules", f"health `ok` of all {count()}")
        assert prometheus.series("job:gpumem_target_info:count").popitem()[1] == 4
