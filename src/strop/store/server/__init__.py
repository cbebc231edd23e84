"""Serves a store over HTTP: `app` has the routes, made from the table in `store/rpc.py`; `remote.HttpStore` asks it."""
