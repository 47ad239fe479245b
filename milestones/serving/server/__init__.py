"""`python -m milestones serve`: every milestone behind OpenAI's HTTP interface.

    settings.py        the settings; serve.py, one folder up, makes options of them
    run.py             uvicorn; SIGTERM drains, a second one stops
    app.py             the routes; what they share is an Api
    limits.py          before a route: API key, size of the body; open requests
    protocol.py        the bodies of requests; everything that is not supported is refused by name
    electives.py       embeddings, grammars, adapters: what only some engines have
    prompts.py         text and messages to token ids, in a thread of its own
    generation.py      one API call: admit, follow, answer whole or as a stream
    formats.py         the bodies of answers; the bytes of tokens
    engine_thread.py   the one thread that calls the engine, and the boxes of its outputs
    live/              the page at `/`: chats, and the engine step by step
    errors.py          OpenAI's error format
    metrics.py         /metrics, with vLLM's names

Only settings.py can be imported without the packages of the extra `serve`.
"""
