"""The store over HTTP: `routes` serves one, `client` is one that is served elsewhere, `wire` is what goes between them.

HttpStore ──POST /v1/lease {...}──▶ routes ──lease(...)──▶ SqliteStore or PostgresStore
"""
