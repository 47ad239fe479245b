"""Real clients of OpenAI's API. Each runs in an environment of its own, against our server."""
