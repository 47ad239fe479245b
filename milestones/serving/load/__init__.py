"""`python -m milestones load`: requests at random times, for any server of OpenAI's API.

command.py    the command: one run for each rate, and the table
arrivals.py   when requests arrive, and what they ask for
client.py     send one request, and note when its tokens come
served.py     serve an engine in a process of its own
report.py     percentiles and goodput
"""
