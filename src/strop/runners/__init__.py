"""Lease, run, heartbeat, report. `llm` is what an agent is handed, `worker` runs one, `pool` keeps many at work."""
