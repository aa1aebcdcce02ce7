"""The dashboard in deploy/grafana asks for metrics that are exported, with the labels that they have."""

import json
import re
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from offbeat.events import StepsTimed
from offbeat.runtime.monitoring.prometheus import to_prometheus
from offbeat.wire.job_view import JobView
from support.round_events import joined, ready, times_of_step
from support.source_files import ROOT

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "offbeat.json").read_text())
GIVEN_BY_PROMETHEUS = {"job", "instance"}
EXPRESSIONS = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
QUERIES = [*EXPRESSIONS, *(one["query"] for one in DASHBOARD["templating"]["list"])]


def exported():
    """Every sample's name, and its labels, of a job in which everything is known."""
    view = JobView()
    for worker in range(2):
        view.add(joined(worker))
        for round_ in range(4):
            view.add(ready(worker, round_))
    view.add(replace(ready(0, 4), line_s=((1, 0.1),)))
    view.add(StepsTimed(now_s=2.0, worker=0, steps=(times_of_step(0, wall_s=1.0, wait_s=1.0),)))
    families = text_string_to_metric_families(to_prometheus(view.status(), dropped=0))
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_the_dashboard_names_exactly_the_metrics_that_are_exported():
    named = {name for query in QUERIES for name in re.findall(r"\boffbeat_\w+", query)}
    assert named == exported().keys()


def test_every_label_in_a_query_is_one_of_its_metrics():
    labels = exported()
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"\boffbeat_\w+", target["expr"])
            known = GIVEN_BY_PROMETHEUS.union(*(labels[name] for name in names))
            used = set(re.findall(r"(\w+)=~?\"", target["expr"]))
            used |= {
                name.strip()
                for group in re.findall(r"(?:by|ignoring) \(([^)]*)\)", target["expr"])
                for name in group.split(",")
            }
            used |= set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert used <= known, f"{panel['title']}: {used - known}"


def test_panels_have_places_of_their_own():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
