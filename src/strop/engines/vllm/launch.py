"""Starts vLLM so that it can hold answers to grammars, if it has what that takes. Its Python need not have Strop: it is
given this very text to run, and then what module of vLLM that starts, with which arguments.

Grammars are read by llguidance, over a tokenizer, and put on logits by xgrammar. A server that lacks one of them would
end with all answers in flight at the first grammar: it is started without a tokenizer, and refuses them.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

SCHEMAS = '{"backend": "guidance", "enable_in_reasoning": true}'
"""llguidance, from the first token of an answer on, whatever reads its thoughts."""
OPEN = "--enable-scale-out"
"""What opens the endpoint for tokens, where it is not open anyway: 0.30 and newer."""


def has(package: str, where: str, text: str) -> bool:
    """Whether some file of a package, which is not imported for it, has this text."""
    spec = find_spec(package)
    places = (spec and spec.submodule_search_locations) or ()
    return any(text in file.read_text(errors="replace") for place in places for file in Path(place).glob(where))


def choose_arguments() -> list[str]:
    if not has("llguidance", "*.py*", "class LLMatcher") or not has("xgrammar", "*.py", "def apply_token_bitmask"):
        return ["--tokens-only"]
    known = has("vllm", "entrypoints/**/cli_args.py", OPEN.removeprefix("--").replace("-", "_"))
    opened = [OPEN] if known else []
    return [*opened, "--return-tokens-as-token-ids", "--structured-outputs-config", SCHEMAS]


if __name__ == "__main__":
    module = sys.argv.pop(1)
    # After the command and its model: what the user gives comes later, and wins.
    at = 3 if sys.argv[1] == "serve" else 1
    sys.argv[at:at] = choose_arguments()
    runpy.run_module(module, run_name="__main__", alter_sys=True)
