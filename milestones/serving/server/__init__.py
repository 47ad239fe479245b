"""`python -m milestones serve`: every milestone behind OpenAI's HTTP interface.

    options.py         the options of the command, from dataclasses (settings.py)
    run.py             uvicorn; SIGTERM drains, a second one stops
    app.py             the routes; what they share is an Api
    limits.py          before a route: API key, size of the body; open requests
    protocol.py        the bodies of requests; everything that is not supported is refused by name
    grammars.py        schemas and regular expressions, compiled before a request is queued
    prompts.py         text and messages to token ids, in a thread of its own
    generation.py      one API call: admit, follow, answer whole or as a stream
    formats.py         the bodies of answers; deltas.py, tokens.py: what a stream adds
    engine_thread.py   the one thread that calls the engine; output_box.py: what it hands over
    live/              the page at `/`: chats, and the engine step by step
    errors.py          OpenAI's error format
    metrics.py         /metrics, with vLLM's names

Only options.py and settings.py can be imported without the packages of the extra
`serve`.
"""
