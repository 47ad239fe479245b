"""The course: the catalog of its exercises, and the tools that release, check and prove them."""
