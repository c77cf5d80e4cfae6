"""The packages of docs/architecture.md: who may import whom."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "openclaw_rl"
SHARED = {"errors", "hooks", "types"}
MAY_IMPORT = {
    "wire": set(),
    "session": set(),
    "journal": {"session"},
    "engine": set(),
    "gateway": {"wire", "session", "journal", "engine"},
    "judge": {"engine", "journal", "guards"},  # practice is measured as versions are
    "rewards": {"judge"},
    "rollout": {"journal", "session"},
    "replay": {"wire", "session", "journal", "engine", "openclaw"},
    "losses": set(),
    "slime": {"engine", "journal", "rollout", "losses", "guards"},
    "guards": {"engine", "journal"},
    "local": {"journal", "engine", "judge", "rollout", "losses", "guards"},
    "openclaw": set(),
}
WITHOUT_TORCH = set(MAY_IMPORT) - {"losses", "local", "slime"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("package", sorted(MAY_IMPORT))
def test_a_package_imports_only_what_it_may(package):
    allowed = MAY_IMPORT[package] | SHARED | {package}
    if package not in ("wire", "session", "journal"):
        allowed.add("config")
    for path in (ROOT / package).rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "openclaw_rl" and len(parts) > 1 and parts[1] != "__version__":
                assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_the_docs_say_who_may_import_whom():
    text = (ROOT.parent / "docs" / "architecture.md").read_text()
    cells = re.findall(r"^\| `(\w+)/` \|.*\| ([^|]+) \|$", text, re.M)
    packages = {*MAY_IMPORT, "cli"}
    told = {package: set(re.findall(r"\w+", cell)) & packages for package, cell in cells}
    assert told.pop("cli") == set(), "everything"
    assert told == MAY_IMPORT


@pytest.mark.parametrize("package", sorted(WITHOUT_TORCH))
def test_these_packages_need_no_torch(package):
    for path in (ROOT / package).rglob("*.py"):
        roots = {name.split(".")[0] for name in imports(path)}
        assert not roots & {"torch", "peft"}, path.relative_to(ROOT)


def test_every_package_is_listed_and_has_a_readme():
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert packages == {*MAY_IMPORT, "cli"}
    modules = {path.stem for path in ROOT.glob("*.py")}
    assert modules == {"__init__", "config", "types", "errors", "hooks"}
    assert not [
        package for package in sorted(packages) if not (ROOT / package / "README.md").is_file()
    ]


def test_only_the_edge_reads_the_environment():
    for path in ROOT.rglob("*.py"):
        if path != ROOT / "config.py" and path.parent != ROOT / "cli":
            text = path.read_text()
            assert "os.environ" not in text, path.relative_to(ROOT)
            assert "getenv" not in text, path.relative_to(ROOT)


def test_slimes_hooks_are_importable_without_torch_and_slime():
    code = (
        "import sys; sys.modules.update(torch=None, slime=None); "
        "from openclaw_rl.slime import generate_rollout"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
