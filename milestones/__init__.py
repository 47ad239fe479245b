"""The course: the lesson of each milestone, and the tools that measure and check the engines."""
