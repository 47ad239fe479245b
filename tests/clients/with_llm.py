"""Simon Willison's `llm`, as a command: a chat, whole and as a stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MODELS = """
- model_id: ours
  model_name: {model}
  api_base: {url}
"""


def main(url: str, model: str) -> dict[str, str]:
    """Return what the command prints."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "extra-openai-models.yaml").write_text(MODELS.format(model=model, url=url))
        command = [str(Path(sys.executable).with_name("llm")), "-m", "ours", "--no-log"]
        options = ["-o", "temperature", "0", "-o", "max_tokens", "16", "Hello"]
        return {
            name: subprocess.run(
                [*command, *more, *options], check=True, capture_output=True, text=True,
                env={**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"},
            ).stdout
            for name, more in (("chat", ["--no-stream"]), ("stream", []))
        }  # fmt: skip


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])))
