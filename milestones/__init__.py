"""The course around the engines: what each milestone adds, and the ladder measured."""
