"""Reading the certificates of authorities waits until a connection needs them.

Every client of `openai`, `anthropic` and the like makes a TLS context, which reads more than a hundred certificates:
15 ms of CPU for `openai.OpenAI()`, in each rollout of an agent that makes its own, and for nothing where the gateway is
at http://. In workers (`llm.preload`) a context notes the file instead, and reads it before its first connection, or
when it is asked what it has: 0.2 ms. Whom it trusts is the same.
"""

from __future__ import annotations

import os
import ssl
import threading
from functools import wraps
from typing import Any

_NOTED = "_strop_files_to_read"
_reading = threading.RLock()


def defer_certificates() -> None:
    """For this process and those forked from it. Doing it again changes nothing."""
    kind: Any = ssl.SSLContext
    if hasattr(kind.load_verify_locations, "__wrapped__"):
        return
    load = kind.load_verify_locations

    @wraps(load)
    def note(self: Any, cafile: Any = None, capath: Any = None, cadata: Any = None) -> None:
        if isinstance(cafile, str) and capath is None and cadata is None and os.access(cafile, os.R_OK):
            _find_noted(self).append(cafile)
        else:  # also what cannot be read, which is said at once
            load(self, cafile, capath, cadata)

    kind.load_verify_locations = note
    for name in ("wrap_socket", "wrap_bio", "cert_store_stats", "get_ca_certs"):
        setattr(kind, name, _read_first(getattr(kind, name), load))


def _find_noted(context: object) -> list[str]:
    return vars(context).setdefault(_NOTED, [])


def _read_first(function: Any, load: Any) -> Any:
    @wraps(function)
    def read_first(self: Any, *given: Any, **named: Any) -> Any:
        with _reading:
            noted = _find_noted(self)
            while noted:
                load(self, noted[0])
                noted.pop(0)
        return function(self, *given, **named)

    return read_first
