"""The museum: bugs of other projects, each rebuilt in one of our engines, to be found in a run."""
