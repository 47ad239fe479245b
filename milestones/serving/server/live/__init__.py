"""The live page at `/`: chats beside a picture of the engine, step by step.

    routes.py     what the page calls; the page itself as one file: live.html, live.css, live.js,
                  chats.js, and the player's drawing; pair.html: two of it, side by side
    page.py       one open page: its chats, the users of its crowd, and the events that it gets
    crowd.py      simulated users, and when they arrive
    engines.py    the engines that pages watch
    recorder.py   one recording of an engine for all of its pages

A page gets the steps of the engine and the ends of its requests in one stream of server-sent
events. Chats are not streams of their own: a browser opens at most six connections to a server.
"""
