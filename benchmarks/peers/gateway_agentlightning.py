"""Agent Lightning 1.0.2's `agl-server`. Runs inside its own virtualenv (`gateway.py --setup`).

    gateway_agentlightning.py PORT MODEL

Its own entry point takes its settings through hydra and writes a line per request; this starts the same app in the same
way (one worker, its keep-alive time) without that line. uvicorn finds uvloop and httptools, which it does not install.
What it records stays in memory, for good.
"""

# pyright: reportMissingImports=false
# Its imports are those of its own virtualenv.
from __future__ import annotations

import gc
import sys

import structlog
import uvicorn
from agentlightning.server.app import create_app

if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(40))  # errors only
    proxy = {"model_name": sys.argv[2], "train": {"temperature": 1}, "val": {"temperature": 0.7}}
    app = create_app({"key": "", "default_proxy": proxy | {"include_log_probs": True}})
    gc.collect()
    gc.freeze()
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), timeout_keep_alive=120, access_log=False, log_level="error"
    )
