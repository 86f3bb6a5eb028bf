"""A script that is not as docs/testing.md says is refused in one line, before anything is served."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from engine.script import parse_script
from tests.service.commands import failure

if TYPE_CHECKING:
    from pathlib import Path


def part(**keys: Any) -> dict[str, Any]:
    return {"requests": {"a": keys}}


WRONG: list[tuple[Any, str]] = [
    ([], "must be an object, not []"),
    ({"unknown": 1}, "unknown keys: 'unknown'"),
    ({"step_ms": "5"}, 'step_ms must be a number from 0 to 86400000, not "5"'),
    ({"step_ms": -1}, "step_ms must be a number"),
    ({"step_ms": True}, "step_ms must be a number"),
    ({"step_ms": float("nan")}, "step_ms must be a number"),
    ({"step_ms": 10**400}, "step_ms must be a number"),
    ({"token_us": [1]}, "token_us must be a number"),
    ({"hang_at": "3"}, 'hang_at must be an integer of at least 1, not "3"'),
    ({"hang_at": 0}, "hang_at must be an integer of at least 1, not 0"),
    ({"fail_at": 1.5}, "fail_at must be an integer"),
    ({"fail_at": True}, "fail_at must be an integer"),
    ({"context": 0}, "context must be an integer from 1 to"),
    ({"context": 10**400}, "context must be an integer from 1 to"),
    ({"name": 5}, "name must be a string"),
    ({"name": "\ud800"}, "name must be a string"),
    ({"chat_template": 5}, "chat_template must be a string"),
    ({"chat_template": "{% if %}"}, "chat template"),
    ({"vocabulary": "abc"}, "vocabulary must be a list"),
    ({"vocabulary": []}, "the vocabulary is empty"),
    ({"vocabulary": [5]}, "vocabulary[0] must be a string"),
    ({"vocabulary": [{"hex": "zz"}]}, "vocabulary[0] must be a string"),
    ({"vocabulary": ["\udfff"]}, "vocabulary[0] must be a string"),
    ({"bos": "a"}, "bos must be an integer from 0 to 257"),
    ({"eos": 257}, "eos must be a list"),
    ({"eos": [999]}, "eos[0]: 999 is no token id"),
    ({"requests": []}, "requests must be an object"),
    ({"requests": {"a": []}}, "request 'a' must be an object"),
    (part(unknown=1), "request 'a': unknown keys: 'unknown'"),
    (part(tokens=[999]), "request 'a': tokens: 999 is no token id of a vocabulary of 258"),
    (part(tokens=[True]), "request 'a': tokens: true is no token id"),
    (part(tokens="abc"), "request 'a': tokens must be a list"),
    (part(tokens=[[97], 98]), "request 'a': tokens[1] must be a list"),
    (part(tokens=[[]], loop=True), "request 'a': tokens[0] must be a list of ids to repeat"),
    (part(tokens=[97], loop="yes"), "request 'a': loop must be true or false"),
    (part(tokens=[97], logits=[[1]]), 'has both "tokens" and "logits"'),
    (part(logits=[]), "logits must have at least one row"),
    (part(logits=[1]), "logits[0] must be a list"),
    (part(logits=[[1, "2"]]), 'logits[0][1] must be a number, not "2"'),
    (part(logits=[[10**400]]), "logits[0][0] must be a number"),
    (part(step_ms="5"), "request 'a': step_ms must be a number from 0 to 86400000, not \"5\""),
    (part(nan_at=-1), "request 'a': nan_at must be an integer of at least 0, not -1"),
    (part(hang_at="2"), "request 'a': hang_at must be an integer"),
    (part(fail_at=None), "request 'a': fail_at must be an integer of at least 0, not null"),
]


@pytest.mark.parametrize(("script", "expected"), WRONG, ids=[expected for _, expected in WRONG])
def test_a_wrong_value_is_one_line_that_names_the_file_and_the_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, script: Any, expected: str
) -> None:
    file = tmp_path / "script.json"
    file.write_text(json.dumps(script))
    line = failure(capsys, "serve", "--port", "0", "--engine", f"scripted:{file}")
    assert expected in line
    assert "script.json" in line or "chat template" in line


@pytest.mark.parametrize("content", ["", "{", "[" * 100_000, "\x00"])
def test_what_is_no_json_is_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    file = tmp_path / "script.json"
    file.write_text(content)
    assert "script.json" in failure(capsys, "serve", "--port", "0", "--engine", f"scripted:{file}")


def test_an_empty_script_has_the_documented_defaults() -> None:
    script = parse_script({})
    assert (script.name, script.context, script.step_ms, script.token_us) == ("scripted", 8192, 0, 0)
    assert (script.bos_id, script.eos_ids, script.hang_at, script.fail_at) == (None, {257}, None, None)
    assert len(script.pieces) == 258
    assert script.special_ids == {256, 257}


def test_numbers_that_are_none_may_be_logits() -> None:
    script = parse_script(part(logits=[[float("nan"), float("inf"), float("-inf"), 1]]))
    logits = script.requests["a"].logits
    assert logits is not None
    assert logits.shape == (1, 258)
