"""Stands in for the `ray` command: a head with a job server, jobs that run their entrypoint, and a
log of every call. Written for tests of who starts and ends what; it is no cluster."""

from __future__ import annotations

import http.server
import json
import os
import sys
from pathlib import Path


def main() -> int:
    words = sys.argv[1:]
    folder = Path(os.environ["FAKE_RAY_FOLDER"])
    with open(folder / "calls.jsonl", "a", encoding="utf-8") as calls:
        calls.write(json.dumps({"words": words, "pid": os.getpid()}) + "\n")
    if words[0] == "start":
        if os.environ.get("FAKE_RAY_BROKEN"):
            print("no space left on device")
            return 3
        port = int(words[words.index("--dashboard-port") + 1])
        return head(port)
    if words[:2] == ["job", "submit"]:
        content = json.loads(Path(words[words.index("--runtime-env") + 1]).read_text())
        entry = words[words.index("--") + 1 :]
        os.execvpe(entry[0], entry, {**os.environ, **content["env_vars"]})
    return 0


def head(port: int) -> int:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

    print("Ray runtime started.", flush=True)
    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
