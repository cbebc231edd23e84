"""Lease, run, heartbeat, report. `base` is the seam: `pool` keeps agents of any kind at work, `agents` makes them."""
