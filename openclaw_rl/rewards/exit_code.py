"""Reward from what the tools say: exit codes, test summaries, error flags. No LLM.

Guarantees: all results of a turn are looked at (an error among several counts, wherever it
stands); any failure is -1, a success without a failure is +1, and what tells neither is 0. There
is never a hint.

Only the places where programs report how they ended are read: fields of the result, lines that
are a whole exit report or test summary. Ordinary text that talks about errors tells nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openclaw_rl.hooks import Sample
from openclaw_rl.judge.prompts import text_of

MAX_READ = 20_000
"""Characters read at each end of a result: reports stand at the end, error marks at the front."""

_CODE_KEYS = ("exit_code", "exitCode", "exit_status", "returncode", "return_code", "exitcode")
_ERROR_KEYS = ("is_error", "isError")
_FAILED_WORDS = {"error", "failed", "failure", "timeout", "timed_out"}
_PASSED_WORDS = {"ok", "success", "succeeded", "completed", "passed"}

_EXIT = re.compile(
    r"^[\[(]?\s*(?:[\w ./:-]{0,60}?\b)?(?:exit(?:ed)?(?: with)?(?: (?:code|status))|exit[_ -]?code"
    r"|exit[_ -]status|return ?code|returncode)\s*[:=]?\s*(-?\d+)\s*\.?[\])]?\.?$",
    re.IGNORECASE | re.MULTILINE,
)
_FAILURES = re.compile(
    r"^(?:"
    # pytest: "=== 1 failed, 2 passed in 0.1s ===", also with -q
    r"(?:=+ )?(?=.*\b[1-9]\d* (?:failed|errors?)\b)\d+ \w+(?:, \d+ \w+)* in [\d.]+ ?s.*"
    r"|=+ no tests ran in .*error.*|ERROR: file or directory not found: .*"
    r"|FAILED \((?:failures|errors|unexpected successes)=\d+.*\)"  # unittest
    r"|test result: FAILED\..*|error(?:\[E\d+\])?: could not compile .*"  # cargo
    r"|--- FAIL: .*|FAIL\t\S+.*|FAIL"  # go test
    r"|Tests:\s+[1-9]\d* failed.*|Test Suites:\s+[1-9]\d* failed.*"  # jest
    r"|\s*Tests\s+[1-9]\d* failed\b.*"  # vitest
    r"|\s*[1-9]\d* failing"  # mocha
    r"|[#ℹ] fail [1-9]\d*|not ok \d+\b.*"  # node, TAP
    r"|(?:\[ERROR\] )?Tests run: \d+, Failures: [1-9]\d*,.*"  # JUnit
    r"|(?:\[ERROR\] )?Tests run: \d+, Failures: 0, Errors: [1-9]\d*.*"
    r"|(?:\[\w+\] )?BUILD FAIL(?:ED|URE)\b.*"  # maven, gradle, ant
    r"|Failed!\s+- Failed:.*"  # dotnet
    r"|\d+ examples?, [1-9]\d* failures?.*|FAILURES!|\d+ runs, .*\b[1-9]\d* (?:failures|errors)\b.*"
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
    r"|[#ℹ] pass [1-9]\d*"
    r"|(?:\[INFO\] )?Tests run: [1-9]\d*, Failures: 0, Errors: 0\b.*"
    r"|(?:\[\w+\] )?BUILD SUCCESS(?:FUL)?\b.*|Passed!\s+- Failed:\s+0,.*"
    r"|[1-9]\d* examples?, 0 failures.*|OK \(\d+ tests?, \d+ assertions?\)"
    r"|\d+ runs, .*\b0 failures, 0 errors\b.*"
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
    if len(text) > 2 * MAX_READ:
        text = f"{text[:MAX_READ]}\n{text[-MAX_READ:]}"
    found = list(_signs(message, text))
    if False in found:
        return False
    return True if found else None


def _signs(message: Mapping[str, Any], text: str) -> Iterator[bool]:
    """Yield True for every sign of success, False for every sign of failure."""
    yield from _fields(message)
    stripped = text.strip()
    if stripped.startswith("{"):
        try:
            value = json.loads(stripped)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            yield from _fields(value)
            details = value.get("details")
            if isinstance(details, dict):
                yield from _fields(details)
            text = "\n".join(
                str(value[key])
                for key in ("output", "stdout", "stderr", "aggregated", "text", "content")
                if isinstance(value.get(key), str)
            )
    codes = _EXIT.findall(text)
    if codes:
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
    for key in _ERROR_KEYS:
        if fields.get(key) is True:
            yield False
    status = fields.get("status")
    if isinstance(status, str):
        if status.lower() in _FAILED_WORDS:
            yield False
        elif status.lower() in _PASSED_WORDS:
            yield True
    elif fields.get("error") and "role" not in fields:
        yield False
    if fields.get("success") is False:
        yield False
    elif fields.get("success") is True:
        yield True
