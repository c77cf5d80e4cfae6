"""docs/slime.md says what is there."""

import re
import shlex

from benchmarks.slime_memory import QWEN3_8B, markdown
from openclaw_rl.config import settings
from openclaw_rl.slime.plan import HOOKS, is_used
from tests.launch.kit import ROOT, SCRIPTS

DOC = (ROOT / "docs" / "slime.md").read_text()


def test_every_variable_is_in_the_table():
    table = DOC[DOC.index("| variable |") : DOC.index("Keys reach the job")]
    told = set(re.findall(r"`([A-Z][A-Z0-9_]+)`", table))
    known = {setting.env for setting in settings() if setting.env and is_used(setting)}
    text = "".join(path.read_text() for path in [*SCRIPTS.values(), *ROOT.glob("scripts/*.sh")])
    known |= set(re.findall(r"\$\{([A-Z][A-Z0-9_]+):-", text))
    assert not known - told
    assert told - known <= {"MODEL_ARGS", "PERF_ARGS"}  # arrays, named in passing


def test_every_hook_is_in_the_table():
    for path in HOOKS.values():
        assert f"`{path}`" in DOC


def test_the_memory_table_is_the_benchmarks():
    assert markdown() in DOC
    assert abs(QWEN3_8B.parameters / 8.19e9 - 1) < 0.01  # as its model card says


def test_commands_of_the_docs_name_scripts_that_are_there():
    for name in set(re.findall(r"run_\w+\.sh", DOC)):
        assert (ROOT / name).is_file(), name
    for word in shlex.split(" ".join(re.findall(r"`(examples/[^`]+)`", DOC))):
        assert (ROOT / word).is_file(), word
