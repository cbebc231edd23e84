"""What agents written for other systems import, so that they train here as they are."""
