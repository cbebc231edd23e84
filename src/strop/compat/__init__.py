"""What agents written for other systems import, and environments of theirs, so that they train here as they are."""
