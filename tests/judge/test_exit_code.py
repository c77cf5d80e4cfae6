"""Tool results: exit codes, test summaries, error flags."""

from __future__ import annotations

import json
from typing import Any

import pytest

from openclaw_rl.hooks import Sample
from openclaw_rl.rewards.exit_code import custom_rm, score_results


def tool(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c1", "content": content, **more}


FAILED = [
    "ls: cannot access 'x'\nExit code: 2",
    "boom\n\n(Command exited with code 1)",
    "Command exited with code 127",
    "Process exited with status 1.",
    "[exit code 1]",
    "exit_code=1",
    "==== 1 failed, 2 passed in 0.12s ====",
    "FAILED tests/test_a.py::test_b - assert 1 == 2\n1 failed in 0.02s",
    "1 failed, 3 passed, 1 warning in 1.02s\nExit code: 0",
    "2 errors in 0.10s",
    "Ran 3 tests in 0.001s\n\nFAILED (failures=1)",
    "test result: FAILED. 1 passed; 1 failed; 0 ignored",
    "error: could not compile `x` (bin) due to 1 previous error",
    "--- FAIL: TestA (0.00s)\nFAIL\nFAIL\texample.com/a\t0.002s",
    "Test Suites: 1 failed, 1 total\nTests:       1 failed, 2 passed, 3 total",
    " Tests  1 failed | 2 passed (3)",
    "  3 passing (10ms)\n  1 failing",
    "[ERROR] Tests run: 2, Failures: 1, Errors: 0, Skipped: 0",
    "BUILD FAILED in 2s",
    "5 examples, 1 failure",
    "90% tests passed, 1 tests failed out of 10",
    "bash: line 1: foo: command not found",
    "/bin/sh: 1: foo: not found",
    'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no',
    json.dumps({"exit_code": 1, "stdout": ""}),
    json.dumps({"status": "error", "tool": "exec", "error": "not allowed"}),
    json.dumps({"error": "no such file"}),
    json.dumps({"isError": True, "content": []}),
    json.dumps({"stdout": "1 failed in 0.1s"}),
]
PASSED = [
    "all good\nExit code: 0",
    "Process exited with code 0",
    "==== 3 passed in 0.12s ====",
    "3 passed, 1 skipped, 0 failed in 0.12s",
    "Ran 3 tests in 0.001s\n\nOK",
    "Ran 3 tests in 0.001s\n\nOK (skipped=1)",
    "test result: ok. 3 passed; 0 failed; 0 ignored",
    "ok  \texample.com/a\t0.002s",
    "Tests:       3 passed, 3 total",
    " Tests  3 passed (3)",
    "  3 passing (10ms)",
    "BUILD SUCCESSFUL in 2s",
    "100% tests passed, 0 tests failed out of 10",
    json.dumps({"exit_code": 0, "stdout": "x"}),
    json.dumps({"status": "completed", "exitCode": 0}),
]
UNCLEAR = [
    "",
    "hello",
    "In the manual: an exit code of 1 means that something failed, as said elsewhere.",
    "Errors are raised when the test failed.",
    "no tests ran in 0.01s",
    "test result: ok. 0 passed; 0 failed; 0 ignored",
    json.dumps({"rows": [1, 2]}),
    json.dumps([1, 2]),
    json.dumps({"error": None, "data": 1}),
    "{not json",
]


@pytest.mark.parametrize("text", FAILED)
def test_failures(text: str) -> None:
    assert score_results([tool(text)]) == -1.0


@pytest.mark.parametrize("text", PASSED)
def test_successes(text: str) -> None:
    assert score_results([tool(text)]) == 1.0


@pytest.mark.parametrize("text", UNCLEAR)
def test_unclear(text: str) -> None:
    assert score_results([tool(text)]) == 0.0


def test_error_flags_of_the_message() -> None:
    assert score_results([tool("x", is_error=True)]) == -1.0
    assert score_results([tool("x", status="error")]) == -1.0
    assert score_results([tool([{"type": "text", "text": "Exit code: 3"}])]) == -1.0


def test_only_tools_are_read() -> None:
    assert score_results([{"role": "user", "content": "Exit code: 1"}]) == 0.0
    assert score_results([]) == 0.0


def test_a_report_at_the_end_of_a_long_output_is_found() -> None:
    assert score_results([tool("x\n" * 100_000 + "Exit code: 1")]) == -1.0


@pytest.mark.parametrize("order", [1, -1])
async def test_case_14_an_error_among_several_results_is_seen(order: int) -> None:
    results = [tool("Exit code: 1"), tool("Exit code: 0")][::order]
    reward = await custom_rm(None, Sample(metadata={"next_state": results}))
    assert reward == {"score": -1.0}


@pytest.mark.parametrize(
    "log",
    [
        "starting\nworker 3 exited with code 1\nworker 3 restarted",
        "12: worker 3 exited with code 1",  # grep
        "build.log:7:Process exited with code 1\nbuild.log:9:ok",
        "step 1\nCommand exited with code 2\nstep 2\nExit code: 1\nstep 3",
    ],
)
def test_case_49_a_log_that_was_only_shown_is_no_failure(log: str) -> None:
    assert score_results([tool(log)]) == 0.0
    assert score_results([tool(f"{log}\n\nExit code: 0")]) == 1.0
    assert score_results([tool(f"Exit code: 1\n{log}")]) == -1.0
