"""Strop trains the model behind any agent."""
