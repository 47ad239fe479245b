"""The course: the record of its exercises, and the tools that release, check and prove them."""
