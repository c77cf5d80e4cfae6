#!/usr/bin/env bash
# Installs the OpenClaw that tests/openclaw/test_real.py talks to, into .openclaw/VERSION of the
# repository (770 MB). OPENCLAW_VERSION chooses another than the locked one.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=${OPENCLAW_VERSION:-2026.3.23-2}
folder=.openclaw/$version
if [ -x "$folder/node_modules/.bin/openclaw" ]; then
  exit 0
fi
if ! command -v npm >/dev/null; then
  echo "no npm: the test with a real OpenClaw will be skipped"
  exit 0
fi
mkdir -p "$folder"
cp tests/openclaw/npm/package.json "$folder/"
flags="--ignore-scripts --no-audit --no-fund --loglevel=error"
if [ "$version" = 2026.3.23-2 ]; then
  cp tests/openclaw/npm/package-lock.json "$folder/"
  (cd "$folder" && npm ci $flags)
else
  (cd "$folder" && npm install $flags "openclaw@$version")
fi
