"""Runs the scenario files of this folder: readable text, events and the actions that are expected.

A scenario is lines of four kinds; `#` begins a comment.

    policies membership.assembly:Assembly(world=2)                        who is asked, in this order; once
    1.5 Ready worker=1 step=3 round=3                                 an event at 1.5 s
      -> AbortJob worker=1 reason="…"                                an action it must be answered with
    restore                                                           all policies give way to restored ones

An event without actions below it must be answered with none. What an event leaves out has a default; what an
action leaves out is not compared (its reason may be given in part, with … at either end). Lists are written
a,b,c, and the peers of a PeerList as their ids.
"""

import ast
import json
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from offbeat.events import Action, Event
from offbeat.policies import dispatch_event
from offbeat.wire.codec import from_plain, to_plain
from offbeat.wire.log_file import read_log
from offbeat.wire.replay import build_policy, replay

HERE = Path(__file__).parent
_POLICY = re.compile(r"([\w.]+):(\w+)\(([^)]*)\)")


def defaults(worker: str) -> dict:
    return {
        "worker": 0,
        "world": 2,
        "peer": f"worker-{worker}",
        "location": f"host{worker} process 10{worker}",
        "addresses": [f"10.0.0.{worker}:7000"],
        "model_signature": ["weight float32 (10, 5)", "bias float32 (10,)"],
        "strategy": "bsp",
        "compute_s": 0.1,
        "samples": 32,
        "metrics": {},
        "epoch": 0,
        "generation": 0,
        "blocks": [],
    }


def value(text: str, default: object) -> object:
    if isinstance(default, list):
        return [part for part in text.split(",") if part]
    if isinstance(default, str):
        return text
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def event_of(words: list[str]) -> Event:
    now_s, kind, *pairs = words
    given = dict(pair.split("=", 1) for pair in pairs)
    fallback = defaults(given.get("worker", "0"))
    if kind in ("PeerUnreachable", "PeerReachable"):
        fallback["peer"] = 0  # a worker, not the name of a link
    (known,) = [cls for cls in Event.__args__ if cls.__name__ == kind]
    names = [field.name for field in fields(known)]
    plain = {name: fallback[name] for name in names if name in fallback}
    plain |= {name: value(text, fallback.get(name)) for name, text in given.items()}
    return from_plain({"type": kind, "now_s": float(now_s), **plain})


def shown(actual: object) -> str:
    if isinstance(actual, list | tuple):
        return ",".join(str(part["worker"]) if isinstance(part, dict) else str(part) for part in actual)
    return str(actual)


def agrees(action: Action, words: list[str]) -> bool:
    kind, *pairs = words
    plain = to_plain(action)
    if plain["type"] != kind:
        return False
    for name, expected in (pair.split("=", 1) for pair in pairs):
        actual, part = shown(plain[name]), expected.strip("…")
        if expected.startswith("…") and expected.endswith("…"):
            fits = part in actual
        elif expected.startswith("…"):
            fits = actual.endswith(part)
        else:
            fits = actual.startswith(part) if expected.endswith("…") else actual == part
        if not fits:
            return False
    return True


class Run:
    """One scenario as it is played line by line."""

    def __init__(self, text: str) -> None:
        self.policies: list = []
        self.specs: list[tuple[str, dict]] = []
        self.unanswered: list[Action] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = shlex.split(line, comments=True)
            if words:
                self.play(f"line {number}: {line.strip()}", words)
        self.finish("end of the scenario")

    def play(self, where: str, words: list[str]) -> None:
        match words[0]:
            case "policies":
                self.build(where, words)
            case "restore":
                self.finish(where)
                self.restore()
            case "->":
                assert self.unanswered, f"{where}: there is no such action"
                action = self.unanswered.pop(0)
                assert agrees(action, words[1:]), f"{where}: got {to_plain(action)}"
            case _:
                self.finish(where)
                self.unanswered = dispatch_event(self.policies, event_of(words))

    def build(self, where: str, words: list[str]) -> None:
        for text in words[1:]:
            found = _POLICY.fullmatch(text)
            assert found, f"{where}: {text} is no policy"
            arguments = dict(pair.split("=") for pair in found[3].split(",") if pair)
            typed = {name: ast.literal_eval(text) for name, text in arguments.items()}
            self.specs.append((f"offbeat.policies.{found[1]}:{found[2]}", typed))
        self.policies = [build_policy(*spec) for spec in self.specs]

    def restore(self) -> None:
        states = [json.loads(json.dumps(policy.state_dict())) for policy in self.policies]
        self.policies = [build_policy(*spec) for spec in self.specs]
        for policy, state in zip(self.policies, states, strict=True):
            policy.load_state_dict(state)

    def finish(self, where: str) -> None:
        assert not self.unanswered, f"before {where}: not expected: {[to_plain(a) for a in self.unanswered]}"


@pytest.mark.parametrize("path", sorted(HERE.glob("*.txt")), ids=lambda path: path.stem)
def test_scenario(path):
    Run(path.read_text())


@pytest.mark.parametrize("path", sorted(HERE.glob("*.jsonl")), ids=lambda path: path.stem)
def test_recorded_run_replays_action_for_action(path):
    difference = replay(read_log(path))
    assert difference is None, str(difference)


HEAD = "policies membership.lockstep:Lockstep(world=1)\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (HEAD + "0 Joined worker=0\n", "not expected"),
        (HEAD + "0 Joined worker=0\n -> Group step=1\n", "line 3: -> Group step=1: got"),
        (HEAD + "0 Joined worker=0\n -> AbortJob\n", "line 3: -> AbortJob: got"),
        (
            HEAD + "0 Joined worker=0\n -> Group\n -> AbortJob\n",
            "line 4: -> AbortJob: there is no such action",
        ),
        (HEAD + '0 Joined worker=0\n -> Group reason="nobody…"\n', "got"),
        (HEAD + '0 Joined worker=0\n -> Group reason="…nobody"\n', "got"),
        (HEAD + '0 Joined worker=0\n -> Group reason="…nobody…"\n', "got"),
        (HEAD + '0 Joined worker=0\n -> Group reason="all 1"\n', "got"),
        (HEAD + "0 Joined worker=0\n -> Group members=0,1\n", "got"),
    ],
)
def test_the_runner_sees_what_is_wrong(text, words):
    with pytest.raises(AssertionError, match=words):
        Run(text)
