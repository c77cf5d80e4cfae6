"""The plugin's own tests (node's test runner), and what its files must say."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from openclaw_rl.openclaw.connect import PROVIDER

PLUGIN = Path(__file__).parents[2] / "plugins" / "openclaw"


def node_version() -> tuple[int, ...]:
    node = shutil.which("node")
    if node is None:
        return ()
    said = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    return tuple(map(int, re.findall(r"\d+", said)))


def test_the_plugins_own_tests():
    version = node_version()
    if version < (20,):
        found = ".".join(map(str, version)) or "none"
        pytest.skip(f"the plugin's tests need node 20 or newer, found is {found}")
    done = subprocess.run(["node", "--test"], cwd=PLUGIN, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_claims_our_provider_and_starts_with_the_gateway():
    manifest = json.loads((PLUGIN / "openclaw.plugin.json").read_text())
    package = json.loads((PLUGIN / "package.json").read_text())
    assert manifest["id"] == package["name"] == PROVIDER
    assert manifest["providers"] == [PROVIDER]
    assert manifest["activation"] == {"onStartup": True}
    assert manifest["version"] == package["version"]
    assert package["openclaw"]["extensions"] == ["./index.js"]


def test_it_patches_nothing():
    code = (PLUGIN / "index.js").read_text() + (PLUGIN / "runs.js").read_text()
    assert not re.search(r"(globalThis|global|window)\.fetch\s*=", code)
