"""A container for each rollout of a command: bubblewrap's, docker's or podman's."""
