"""Other engines, each in an environment of its own. This folder needs nothing of the project."""
