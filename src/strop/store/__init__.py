"""The only state rooms share. `base` is the interface; `sqlite` holds a run on one machine."""
