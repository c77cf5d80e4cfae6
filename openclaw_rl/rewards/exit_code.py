"""Reward from what the tools say: exit codes, test summaries, error flags. No LLM.

Guarantees: all results of a turn are looked at (an error among several counts, wherever it
stands); any failure is -1, a success without a failure is +1, and what tells neither is 0. There
is never a hint.

Only the places where programs report how they ended are read: fields of the result, a first or
last line that is a whole exit report, lines that are a whole test summary. Ordinary text that talks
about errors tells nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.prompts import text_of

_READ = 20_000
"""Characters read at each end of a result: reports stand at the end, error marks at the front."""

_CODE_KEYS = ("exit_code", "exitCode", "exit_status", "returncode", "return_code", "exitcode")
_ERROR_KEYS = ("is_error", "isError")
_FAILED_WORDS = {"error", "failed", "failure", "timeout", "timed_out"}
_PASSED_WORDS = {"ok", "success", "succeeded", "completed", "passed"}

_EXIT = re.compile(
    r"^\s*[\[(]?\s*(?:(?:the |a )?(?:command|process|program|script|shell|bash|task|job) )?"
    r"(?:exit(?:ed)?(?: with)?(?: (?:code|status))|exit[_ -]?code"
    r"|exit[_ -]status|return ?code|returncode)\s*[:=]?\s*(-?\d+)\s*\.?[\])]?\.?\s*$",
    re.IGNORECASE,
)
_FAILURES = re.compile(
    r"^(?:"
    # pytest: "=== 1 failed, 2 passed in 0.1s ===", also with -q
    r"(?:=+ )?(?=.*\b[1-9]\d* (?:failed|errors?)\b)\d+ \w+(?:, \d+ \w+)* in [\d.]+ ?s.*"
    r"|FAILED \((?:failures|errors|unexpected successes)=\d+.*\)"  # unittest
    r"|test result: FAILED\..*|error(?:\[E\d+\])?: could not compile .*"  # cargo
    r"|--- FAIL: .*|FAIL\t\S+.*|FAIL"  # go test
    r"|Tests:\s+[1-9]\d* failed.*|Test Suites:\s+[1-9]\d* failed.*"  # jest
    r"|\s*Tests\s+[1-9]\d* failed\b.*"  # vitest
    r"|\s*[1-9]\d* failing"  # mocha
    r"|(?:\[ERROR\] )?Tests run: \d+, Failures: (?:[1-9]\d*|0, Errors: [1-9]).*"  # JUnit
    r"|(?:\[\w+\] )?BUILD FAIL(?:ED|URE)\b.*"  # maven, gradle, ant
    r"|\d+ examples?, [1-9]\d* failures?.*"  # rspec
    r"|\d+% tests passed, [1-9]\d* tests? failed out of \d+"  # ctest
    r"|make(?:\[\d+\])?: \*\*\* .*Error \d+.*|npm ERR! .*|npm error .*"
    r"|(?:\S*/)?(?:ba|z|da|k)?sh: (?:line )?\d+: .*(?:not found|No such file or directory|denied)"
    r"|(?:ba|z|da)sh: .*: command not found|fatal: (?:not a git repository|unable to) .*"
    r"|Found [1-9]\d* errors?(?: in \d+ files?)?.*"  # mypy, ruff, tsc
    r")\s*$",
    re.MULTILINE,
)
_PASSES = re.compile(
    r"^(?:"
    r"(?:=+ )?(?=.*\b[1-9]\d* passed\b)\d+ \w+(?:, \d+ \w+)* in [\d.]+ ?s.*"
    r"|test result: ok\. [1-9]\d* passed.*"
    r"|ok\s+\S+\s+(?:\(cached\)|[\d.]+s).*|PASS"
    r"|Tests:\s+(?:\d+ (?:skipped|todo), )*[1-9]\d* passed.*"
    r"|\s*Tests\s+[1-9]\d* passed\b.*"
    r"|\s*[1-9]\d* passing\b.*"
    r"|(?:\[INFO\] )?Tests run: [1-9]\d*, Failures: 0, Errors: 0\b.*"
    r"|(?:\[\w+\] )?BUILD SUCCESS(?:FUL)?\b.*|[1-9]\d* examples?, 0 failures.*"
    r"|100% tests passed, 0 tests failed out of [1-9]\d*"
    r"|Success: no issues found in \d+ source files?|All checks passed!"
    r")\s*$",
    re.MULTILINE,
)
_UNITTEST_OK = re.compile(r"^Ran [1-9]\d* tests? in [\d.]+s\s+OK(?: \([^)]*\))?\s*$", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last):\n"
_RAISED = re.compile(r"[\w.]+(?:Error|Exception|Interrupt|Exit)\b")
_ERROR_HEAD = re.compile(r"\A\s*(?:tool error|error executing tool|error calling tool)\b", re.I)


async def custom_rm(args: Any, sample: Sample, **kwargs: Any) -> dict[str, Any]:
    """Score the tool results in `sample.metadata["next_state"]`: `{"score": ±1.0 | 0.0}`."""
    return {"score": score_results(sample.metadata.get("next_state") or ())}


def score_results(next_state: Sequence[Mapping[str, Any]]) -> float:
    """-1.0 where any tool result failed, 1.0 where one succeeded and none failed, else 0.0."""
    outcomes = [_outcome(m) for m in next_state if m.get("role") == "tool"]
    if any(outcome is False for outcome in outcomes):
        return -1.0
    return 1.0 if any(outcomes) else 0.0


def _outcome(message: Mapping[str, Any]) -> bool | None:
    text = text_of(message)
    if len(text) > 2 * _READ:
        text = f"{text[:_READ]}\n{text[-_READ:]}"
    found = list(_signs(message, text))
    return all(found) if found else None


def _signs(message: Mapping[str, Any], text: str) -> Iterator[bool]:
    """Yield True for every sign of success, False for every sign of failure."""
    yield from _fields(message)
    try:
        value = json.loads(text) if text.lstrip().startswith("{") else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        yield from _fields(value)
        if isinstance(value.get("details"), dict):
            yield from _fields(value["details"])
        outputs = ("output", "stdout", "stderr", "aggregated", "text", "content")
        text = "\n".join(value[key] for key in outputs if isinstance(value.get(key), str))
    # Where a harness puts it: a log that was only shown has such lines in its midst.
    lines = text.strip().splitlines()
    if codes := [found[1] for line in (lines[:1] + lines[-1:]) if (found := _EXIT.match(line))]:
        yield int(codes[-1]) == 0
    if _FAILURES.search(text) or _ends_in_traceback(text) or _ERROR_HEAD.search(text):
        yield False
    if _PASSES.search(text) or _UNITTEST_OK.search(text):
        yield True


def _ends_in_traceback(text: str) -> bool:
    _, found, trace = text.rpartition(_TRACEBACK)
    lines = [line for line in trace.splitlines() if line[:1].strip()]
    return bool(found) and len(lines) == 1 and _RAISED.match(lines[0]) is not None


def _fields(fields: Mapping[str, Any]) -> Iterator[bool]:
    for key in _CODE_KEYS:
        code = fields.get(key)
        if isinstance(code, int) and not isinstance(code, bool):
            yield code == 0
    if any(fields.get(key) is True for key in _ERROR_KEYS):
        yield False
    status = fields.get("status")
    if isinstance(status, str) and status.lower() in _FAILED_WORDS | _PASSED_WORDS:
        yield status.lower() in _PASSED_WORDS
    elif not isinstance(status, str) and fields.get("error") and "role" not in fields:
        yield False
    if isinstance(fields.get("success"), bool):
        yield fields["success"]
