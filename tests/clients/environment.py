"""Install the clients, each into an environment of its own.

    python -m tests.clients.environment            # all that the tests need
    python -m tests.clients.environment langchain

A client must not decide which version of a package the engines get.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(sys.prefix) / "clients"  # in the project's own environment
REQUIREMENTS = {
    "lm_eval": ["lm-eval[api,hf]==0.4.13", "torch==2.13.0"],
    "langchain": ["langchain-openai==1.7.4"],
    "litellm": ["litellm==1.110.2"],
    "llm": ["llm==0.36"],
}


def python_of(client: str) -> Path:
    """Return the Python of a client's environment."""
    return FOLDER / client / "bin" / "python"


def is_installed(client: str) -> bool:
    """Return whether the environment holds the versions above."""
    mark = FOLDER / client / "installed.txt"
    return mark.is_file() and mark.read_text() == "\n".join(REQUIREMENTS[client])


def install(client: str) -> None:
    """Make the environment of a client, if it is not there."""
    if is_installed(client):
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / client], check=True)
    pip = [str(python_of(client)), "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, *REQUIREMENTS[client]], check=True)
    (FOLDER / client / "installed.txt").write_text("\n".join(REQUIREMENTS[client]))


def main() -> None:
    """Install the clients that are named; without names, all of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", choices=[*REQUIREMENTS, []], default=[])
    for client in parser.parse_args().clients or REQUIREMENTS:
        install(client)


if __name__ == "__main__":
    main()
